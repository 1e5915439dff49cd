# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# xxHash is used through its header alone (XXH_INLINE_ALL) and has no CMake package in common distributions, hence this
# target. It is used by the build and by the installed package alike.
if(NOT TARGET kvblend::xxhash)
  find_path(KVBLEND_XXHASH_INCLUDE_DIR xxhash.h)
  mark_as_advanced(KVBLEND_XXHASH_INCLUDE_DIR)
  if(KVBLEND_XXHASH_INCLUDE_DIR)
    add_library(kvblend::xxhash INTERFACE IMPORTED)
    target_include_directories(kvblend::xxhash INTERFACE "${KVBLEND_XXHASH_INCLUDE_DIR}")
  endif()
endif()
