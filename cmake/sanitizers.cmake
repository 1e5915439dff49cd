# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# Test programs under AddressSanitizer with UndefinedBehaviorSanitizer, and under ThreadSanitizer. Whether a sanitizer
# runs depends on the compiler's runtime and on the kernel, so a small program is tried first; where it does not run,
# its tests are stated as skipped.

set(kvblend_sanitizer_address -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
set(kvblend_sanitizer_thread -fsanitize=thread)
# Checked code takes three times as long to compile with any optimisation; only what waits for threads runs long.
set(kvblend_sanitizer_level_address -O0)
set(kvblend_sanitizer_level_thread -O1)

# Sets <result> to the command line that runs a program under the sanitizer ("run" or a wrapper), or to "" if none does.
# ThreadSanitizer of older compilers gives up under strong address randomisation, hence the try with setarch.
function(kvblend_probe_sanitizer sanitizer result)
  if(NOT DEFINED KVBLEND_SANITIZER_${sanitizer})
    message(STATUS "kvblend: trying sanitizer ${sanitizer}")
    set(dir "${PROJECT_BINARY_DIR}/sanitizers")
    set(how "")
    file(WRITE "${dir}/probe.cpp" "#include <thread>\nint main() { std::thread t([] {}); t.join(); }\n")
    execute_process(
      COMMAND ${CMAKE_CXX_COMPILER} -std=c++20 ${kvblend_sanitizer_${sanitizer}} probe.cpp -pthread -o probe_${sanitizer}
      WORKING_DIRECTORY "${dir}"
      RESULT_VARIABLE status
      OUTPUT_QUIET ERROR_QUIET)
    if(status EQUAL 0)
      execute_process(COMMAND "${dir}/probe_${sanitizer}" RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET)
      if(status EQUAL 0)
        set(how run)
      else()
        execute_process(COMMAND setarch -R "${dir}/probe_${sanitizer}" RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET)
        if(status EQUAL 0)
          set(how setarch -R)
        endif()
      endif()
    endif()
    set(KVBLEND_SANITIZER_${sanitizer} "${how}" CACHE INTERNAL "how a program runs under this sanitizer")
  endif()
  set(${result} "${KVBLEND_SANITIZER_${sanitizer}}" PARENT_SCOPE)
endfunction()

# kvblend_add_sanitized_test(<folder> <sanitizer> <source>... [LINK <target>...])
function(kvblend_add_sanitized_test folder sanitizer)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "" "LINK")
  set(test "${folder}: all under sanitizer ${sanitizer}")
  kvblend_probe_sanitizer(${sanitizer} how)
  if(NOT how)
    add_test(NAME "${test}" COMMAND "${CMAKE_COMMAND}" -E echo "skipped: the ${sanitizer} sanitizer does not run here")
    set_tests_properties("${test}" PROPERTIES SKIP_REGULAR_EXPRESSION "^skipped: ")
    return()
  endif()
  list(REMOVE_ITEM how run)
  set(program kvblend_test_${folder}_${sanitizer})
  kvblend_add_test_program(${program} ${arg_UNPARSED_ARGUMENTS} SANITIZER ${sanitizer} LINK ${arg_LINK})
  add_test(NAME "${test}" COMMAND ${how} $<TARGET_FILE:${program}>)
  set_tests_properties("${test}" PROPERTIES TIMEOUT 900 ENVIRONMENT "${KVBLEND_TEST_ENVIRONMENT}"
                                               FAIL_REGULAR_EXPRESSION "test cases: +0 ")
endfunction()
