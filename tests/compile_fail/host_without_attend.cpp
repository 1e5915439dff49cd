// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: LayerwiseHost.*host\.attend\(layer, rows, kept\)
//
// A host that lacks a function: the message names the concept and the call that is missing.
#include "host.hpp"

struct NoAttend : HostBase {
  kvblend::Status project(std::int32_t, Rows) { return {}; }
};

int main() { return blend_on(NoAttend(), kvblend::KeyDeviation()); }
