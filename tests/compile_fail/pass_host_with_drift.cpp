// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: kvblend: reused rows drift by what a layer computes
//
// Drift on a host that runs whole passes and shows no layer's fresh rows.
#include "pass_host.hpp"

int main() { return blend_on<kvblend::CommonDrift>(PlainPassHost(), kvblend::FirstK()); }
