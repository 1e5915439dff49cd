# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# What only kvblend's own tests, examples and benchmarks use; none of it reaches a target of the library.

# kvblend_warnings: link it PRIVATE.
add_library(kvblend_warnings INTERFACE)
set(kvblend_warning_flags -Wall -Wextra -Wconversion -Wsign-conversion -Wshadow -Werror)
if(NOT MSVC)
  target_compile_options(kvblend_warnings INTERFACE ${kvblend_warning_flags})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    target_compile_options(kvblend_warnings INTERFACE -Wno-restrict) # false in its own std::string, at -O3
  endif()
endif()

# kvblend_native: machine-specific flags for examples and benchmarks. A library that includes Eigen must pass it on
# (PUBLIC), since Eigen's alignment, and with it the ABI, depends on the instruction set.
add_library(kvblend_native INTERFACE)
if(KVBLEND_EXAMPLES_NATIVE)
  include(CheckCXXCompilerFlag)
  check_cxx_compiler_flag(-march=native KVBLEND_HAS_MARCH_NATIVE)
  if(KVBLEND_HAS_MARCH_NATIVE)
    target_compile_options(kvblend_native INTERFACE -march=native)
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      # g++'s own AVX-512 headers read an undefined register on purpose, and warn about it once they are inlined.
      target_compile_options(kvblend_native INTERFACE -Wno-maybe-uninitialized -Wno-uninitialized)
    endif()
  endif()
endif()
