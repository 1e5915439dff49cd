// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: kvblend: this selector scores by a probe pass, so the host must have attend_and_report
//
// A selector that asks by a probe pass, on a host that cannot report attention.
#include "host.hpp"

int main() { return blend_on(CompleteHost(), kvblend::AttentionMass()); }
