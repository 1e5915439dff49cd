// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: no pass gives both
//
// A sum of a deviation, for which every row runs, and of attention, for which only the question's do.
#include "host.hpp"

#include <kvblend/select/combine.hpp>

int main() { return blend_on(CompleteHost(), kvblend::SumScore<kvblend::KeyDeviation, kvblend::AttentionMass>()); }
