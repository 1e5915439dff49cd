// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: (could not convert|no matching|no viable|cannot convert)
//
// A row of the prompt is not a position: the index spaces do not mix.
#include <kvblend/core/types.hpp>

void rotate_to(kvblend::Position position);

int main() { rotate_to(kvblend::Row(3)); }
