// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: ignoring return.*nodiscard
//
// A Status that nobody looks at is an error under -Werror.
#include <kvblend/core/status.hpp>

kvblend::Status check();

int main() { check(); }
