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

# What it needs, and the models that it runs on, of those in build/models: "" for its own default. A model that is not
# there is left out.
set(steps install fetch_llama fetch_model configure build bench)
set(kvblend_build_targets kvblend_bench_${name})
set(models "")
if(name STREQUAL "ttft")
  set(steps install fetch_llama fetch_model fetch_qwen fetch_gemma configure build requantize bench)
  set(models SmolLM2-135M-Instruct.Q4_0.gguf Qwen2.5-Coder-0.5B-Instruct.Q4_0.gguf "${kvblend_gemma_name}"
             SmolLM2-135M-Instruct.F16.gguf)
elseif(name STREQUAL "requests")
  set(steps install fetch_llama fetch_model configure build requantize bench)
  set(models SmolLM2-135M-Instruct.Q4_0.gguf)
endif()
if("requantize" IN_LIST steps)
  list(APPEND kvblend_build_targets kvblend-requantize)
endif()

# SmolLM2's Q4_1 and some types of Qwen's Q4_K_M have no fast kernels on CPUs; a full prefill on Q4_0 is the harder one
# to beat. F16 has them too, and is not quantised a second time.
function(kvblend_step_requantize error)
  set(${error} "" PARENT_SCOPE)
  set(folder "${kvblend_build}/models")
  foreach(supplied IN ITEMS "${kvblend_model_name}|Q4_0" "${kvblend_model_name}|F16" "${kvblend_qwen_name}|Q4_0")
    string(REPLACE "|" ";" supplied "${supplied}")
    list(POP_BACK supplied type)
    string(REGEX REPLACE "\\.Q[^.]*\\.gguf$" ".${type}.gguf" wanted "${supplied}")
    if(NOT "${wanted}" IN_LIST models OR EXISTS "${folder}/${wanted}" OR NOT EXISTS "${folder}/${supplied}")
      continue()
    endif()
    string(TOLOWER "${type}" type)
    execute_process(COMMAND "${kvblend_build}/bin/kvblend-requantize" "${folder}/${supplied}" "${folder}/${wanted}"
                            ${type} RESULT_VARIABLE status)
    if(NOT status EQUAL 0)
      set(${error} "kvblend-requantize failed (${status}); its message is above." PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

function(kvblend_step_bench error)
  set(${error} "" PARENT_SCOPE)
  kvblend_script_arguments(arguments)
  set(command "${kvblend_build}/bench/kvblend_bench_${name}" --json "${kvblend_build}/bench/${name}.json")
  if(NOT arguments MATCHES "(^|;)--model(=|;|$)")
    foreach(model IN LISTS models)
      if(EXISTS "${kvblend_build}/models/${model}")
        list(APPEND command --model "${kvblend_build}/models/${model}")
      endif()
    endforeach()
  endif()
  kvblend_say("Running kvblend_bench_${name}")
  execute_process(COMMAND ${command} ${arguments} RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    set(${error} "kvblend_bench_${name} failed (${status})." PARENT_SCOPE)
  endif()
endfunction()

foreach(step IN LISTS steps)
  cmake_language(CALL kvblend_step_${step} error)
  if(error)
    message(FATAL_ERROR " ${error}") # the blank keeps it on one line
  endif()
endforeach()
