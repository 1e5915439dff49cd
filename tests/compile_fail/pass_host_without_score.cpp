// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: kvblend: this selector looks at fresh keys and values, so the host must have score
//
// A selector that looks at deviations, on a host of whole passes that cannot score.
#include "pass_host.hpp"

int main() { return blend_on(PlainPassHost(), kvblend::KeyDeviation()); }
