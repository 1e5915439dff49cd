// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: PassHost.*host\.compute\(range, rows, rows\)
//
// A host of whole passes that cannot run one.
#include "pass_host.hpp"

struct NoCompute : PassHostBase {};

int main() { return blend_on(NoCompute(), kvblend::FirstK()); }
