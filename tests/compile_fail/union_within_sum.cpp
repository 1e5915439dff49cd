// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: nest sums and products in their first part
//
// A union needs all of the scratch in which the sum around it keeps its first part.
#include "host.hpp"

#include <kvblend/select/combine.hpp>

using Union = kvblend::UnionScore<kvblend::FirstK, kvblend::RandomScore>;

int main() { return blend_on(CompleteHost(), kvblend::SumScore<kvblend::FirstK, Union>()); }
