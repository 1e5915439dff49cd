// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: kvblend: this selector scores by a probe pass, which a PassHost does not offer without probe
//
// A selector that asks by a probe pass, on a host of whole passes.
#include "pass_host.hpp"

int main() { return blend_on(CompletePassHost(), kvblend::AttentionMass()); }
