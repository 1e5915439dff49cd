// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: success
//
// The control of the pass_host_ cases: with scores, with a probe, without either where the selector wants none, and with
// layers that settle where rows drift.
#include "pass_host.hpp"

int main() {
  return blend_on(CompletePassHost(), kvblend::KeyDeviation()) + blend_on(AskedPassHost(), kvblend::AttentionMass()) +
         blend_on(PlainPassHost(), kvblend::FirstK()) +
         blend_on<kvblend::CommonDrift>(SettlingPassHost(), kvblend::FirstK());
}
