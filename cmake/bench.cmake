# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# cmake -P cmake/bench.cmake NAME [-- <arguments of the benchmark>]
# Installs what is missing, builds kvblend_bench_NAME and runs it. It prints its figures and leaves them in
# build/bench/NAME.json.
cmake_minimum_required(VERSION 3.25)
include("${CMAKE_CURRENT_LIST_DIR}/steps.cmake")

# NAME is the argument behind the script's own path.
set(name "")
math(EXPR last "${CMAKE_ARGC} - 1")
foreach(index RANGE ${last})
  math(EXPR next "${index} + 1")
  if(CMAKE_ARGV${index} STREQUAL "-P")
    math(EXPR next "${index} + 2")
    if(next LESS CMAKE_ARGC)
      set(name "${CMAKE_ARGV${next}}")
    endif()
    break()
  endif()
endforeach()
if(NOT name OR NOT EXISTS "${kvblend_source}/bench/${name}.cpp")
  file(GLOB names RELATIVE "${kvblend_source}/bench" "${kvblend_source}/bench/*.cpp")
  list(TRANSFORM names REPLACE "\\.cpp$" "")
  list(JOIN names ", " names)
  message(FATAL_ERROR " Name one of the benchmarks (${names}): cmake -P cmake/bench.cmake NAME [-- ARGUMENTS]")
endif()

set(kvblend_build_targets kvblend_bench_${name})

function(kvblend_step_bench error)
  set(${error} "" PARENT_SCOPE)
  kvblend_script_arguments(arguments)
  kvblend_say("Running kvblend_bench_${name}")
  execute_process(
    COMMAND "${kvblend_build}/bench/kvblend_bench_${name}" --json "${kvblend_build}/bench/${name}.json" ${arguments}
    RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    set(${error} "kvblend_bench_${name} failed (${status})." PARENT_SCOPE)
  endif()
endfunction()

foreach(step install fetch_llama fetch_model configure build bench)
  cmake_language(CALL kvblend_step_${step} error)
  if(error)
    message(FATAL_ERROR " ${error}") # the blank keeps it on one line
  endif()
endforeach()
