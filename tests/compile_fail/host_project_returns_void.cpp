// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: LayerwiseHost.*host\.project\(layer, rows\)
//
// A host that cannot report that it failed: the message names the concept and the call.
#include "host.hpp"

struct VoidProject : HostBase {
  void project(std::int32_t, Rows) {}
  kvblend::Status attend(std::int32_t, Rows, Kept) { return {}; }
};

int main() { return blend_on(VoidProject(), kvblend::KeyDeviation()); }
