// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: success
//
// The control of the host_ and score_ cases.
#include "host.hpp"

int main() { return blend_on(CompleteHost(), kvblend::KeyDeviation()); }
