// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: Score.*S::timing
//
// A score that does not say when it is known: the message names the concept and the constant.
#include "host.hpp"

struct Untimed {
  static constexpr bool uses_keys = false;
  static constexpr bool uses_values = false;
  static constexpr const char* name = "untimed";
  kvblend::Status operator()(const kvblend::ScoreInputs&, std::span<float>) const { return {}; }
};

int main() { return blend_on(CompleteHost(), Untimed()); }
