# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# Compiles one source and compares the outcome with the source's own `// expect:` line.
file(STRINGS "${source}" lines LIMIT_COUNT 10 REGEX "^// expect: ")
if(NOT lines MATCHES "^// expect: (.*)$")
  message(FATAL_ERROR "${source} has no line `// expect: ` among its first")
endif()
set(expected "${CMAKE_MATCH_1}")

execute_process(
  COMMAND "${compiler}" -std=c++20 -Wall -Wextra -Werror -I "${include}" -c "${source}" -o "${object}"
  RESULT_VARIABLE status
  OUTPUT_VARIABLE output
  ERROR_VARIABLE output)
if(expected STREQUAL "success")
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "does not compile:\n${output}")
  endif()
elseif(status EQUAL 0)
  message(FATAL_ERROR "compiles, though it must not")
elseif(NOT output MATCHES "${expected}")
  message(FATAL_ERROR "fails to compile, but without a message that matches\n  ${expected}\nbut with:\n${output}")
endif()
