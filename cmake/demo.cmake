# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# cmake -P cmake/demo.cmake [-- <arguments of kvblend-rag>]
# Installs what is missing, builds, fetches a small model and runs examples/rag on it; --prompt, --model and --json may
# be given after "--" in place of the demo's own.
cmake_minimum_required(VERSION 3.25)
include("${CMAKE_CURRENT_LIST_DIR}/steps.cmake")

set(kvblend_build_targets kvblend-rag)

function(kvblend_step_demo error)
  set(${error} "" PARENT_SCOPE)
  kvblend_script_arguments(arguments)
  set(command "${kvblend_build}/bin/kvblend-rag")
  foreach(default "model|${kvblend_build}/models/${kvblend_model_name}" "json|${kvblend_build}/demo.json"
                  "prompt|${kvblend_source}/examples/rag/data/musique_3.json")
    string(REPLACE "|" ";" default "${default}")
    list(GET default 0 option)
    list(GET default 1 value)
    if(NOT arguments MATCHES "(^|;)--${option}(=|;|$)")
      list(APPEND command --${option} "${value}")
    endif()
  endforeach()
  list(APPEND command ${arguments})
  list(JOIN command " " line)
  kvblend_say("Running ${line}")
  execute_process(COMMAND ${command} RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    set(${error} "kvblend-rag failed (${status}); its message is above." PARENT_SCOPE)
  endif()
endfunction()

foreach(step install fetch_llama fetch_model configure build demo)
  cmake_language(CALL kvblend_step_${step} error)
  if(error)
    message(FATAL_ERROR " ${error}") # the blank keeps it on one line
  endif()
endforeach()
