# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# cmake -P cmake/check.cmake
# Installs what is missing, builds everything, runs every test, and closes with "N passed, N failed". What is counted are
# the tests of ctest: each doctest TEST_CASE is one, and so is each sanitizer run, header check, compile-fail case and
# consumer project. A build that fails counts as one more failure. ctest lists what was skipped; it is in neither number.
cmake_minimum_required(VERSION 3.25)
include("${CMAKE_CURRENT_LIST_DIR}/steps.cmake")

foreach(step install fetch_llama fetch_model configure)
  cmake_language(CALL kvblend_step_${step} error)
  if(error)
    message(SEND_ERROR " ${error}") # the blank keeps it on one line
    kvblend_say("0 passed, 1 failed")
    return()
  endif()
endforeach()

# A file that does not compile must not hide the results of the others.
kvblend_say("Building everything (the first time llama.cpp too, which takes minutes)")
set(keep_going "")
if(EXISTS "${kvblend_build}/build.ninja")
  set(keep_going -- -k 0)
endif()
execute_process(COMMAND "${CMAKE_COMMAND}" --build "${kvblend_build}" --parallel ${kvblend_jobs} ${keep_going}
                RESULT_VARIABLE build_status)

kvblend_say("Running the tests")
set(report "${kvblend_build}/check.xml")
file(REMOVE "${report}")
execute_process(
  COMMAND "${CMAKE_CTEST_COMMAND}" --test-dir "${kvblend_build}" --output-on-failure --no-tests=error --parallel
          ${kvblend_jobs} --output-junit "${report}"
  RESULT_VARIABLE test_status)

set(passed 0)
set(failed 0)
if(EXISTS "${report}")
  file(READ "${report}" text)
  foreach(count tests failures disabled skipped)
    string(REGEX MATCH "[ \t\n]${count}=\"([0-9]+)\"" ignored "${text}")
    set(${count} "${CMAKE_MATCH_1}")
  endforeach()
  # ctest's report also calls skipped what could not be run, say as its program was not built: that has failed.
  string(REGEX MATCHALL "<skipped message=\"SKIP_" on_purpose "${text}")
  list(LENGTH on_purpose on_purpose)
  math(EXPR failed "${failures} + ${skipped} - ${on_purpose}")
  math(EXPR passed "${tests} - ${failures} - ${skipped} - ${disabled}")
endif()
if(NOT build_status EQUAL 0)
  kvblend_say("The build failed; the compiler's messages are above the tests' output.")
  math(EXPR failed "${failed} + 1")
endif()
if(NOT test_status EQUAL 0 AND failed EQUAL 0)
  kvblend_say("ctest itself failed (${test_status}).")
  set(failed 1)
endif()
if(failed GREATER 0)
  message(SEND_ERROR "${failed} failed.")
endif()
kvblend_say("${passed} passed, ${failed} failed")
