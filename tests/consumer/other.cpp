// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The consumer's second translation unit: the same headers once more in one program.
#include <kvblend/kvblend.hpp>

int version_seen_by_other();

int version_seen_by_other() { return KVBLEND_VERSION_MAJOR * 100 + KVBLEND_VERSION_MINOR; }
