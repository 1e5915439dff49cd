# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# Runs PROGRAM with ARGUMENTS and checks its exit status and what it says (see CMakeLists.txt beside this).
execute_process(
  COMMAND "${PROGRAM}" ${ARGUMENTS}
  RESULT_VARIABLE status
  OUTPUT_VARIABLE output
  ERROR_VARIABLE errors)
if(NOT status EQUAL STATUS)
  message(FATAL_ERROR "exit status ${status}, not ${STATUS}:\n${output}${errors}")
endif()
if(STATUS EQUAL 0)
  set(text "${output}")
else()
  set(text "${errors}")
  if(NOT text MATCHES "^[^\n]+\n$")
    message(FATAL_ERROR "not one line:\n${text}")
  endif()
endif()
if(NOT text MATCHES "${REGEX}")
  message(FATAL_ERROR "nothing matches ${REGEX} in:\n${text}")
endif()
