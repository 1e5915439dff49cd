# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# The steps that demo.cmake, check.cmake and bench.cmake share. Each step is a function with one argument, the name of a
# variable that it sets to one sentence if it fails. Everything is left in build/; a step whose result is there is
# quick.
include("${CMAKE_CURRENT_LIST_DIR}/fetch.cmake")

get_filename_component(kvblend_source "${CMAKE_CURRENT_LIST_DIR}" DIRECTORY)
set(kvblend_build "${kvblend_source}/build")
cmake_host_system_information(RESULT kvblend_jobs QUERY NUMBER_OF_LOGICAL_CORES)

# One line on standard output.
function(kvblend_say text)
  execute_process(COMMAND "${CMAKE_COMMAND}" -E echo "${text}")
endfunction()

# Sets <result> to what the user wrote after "--".
function(kvblend_script_arguments result)
  set(arguments "")
  set(behind FALSE)
  math(EXPR last "${CMAKE_ARGC} - 1")
  foreach(index RANGE ${last})
    if(behind)
      list(APPEND arguments "${CMAKE_ARGV${index}}")
    elseif(CMAKE_ARGV${index} STREQUAL "--")
      set(behind TRUE)
    endif()
  endforeach()
  set(${result} "${arguments}" PARENT_SCOPE)
endfunction()

# Debian package, and what shows that it is there: a header, a program, or a module of Python.
set(kvblend_needs
    "libeigen3-dev|header|eigen3/Eigen/Core"
    "nlohmann-json3-dev|header|nlohmann/json.hpp"
    "libxxhash-dev|header|xxhash.h"
    "doctest-dev|header|doctest/doctest.h"
    "libcli11-dev|header|CLI/CLI.hpp"
    "libbenchmark-dev|header|benchmark/benchmark.h"
    "ninja-build|program|ninja"
    "python3-pip|module|pip")

function(kvblend_missing_packages result)
  set(missing "")
  foreach(need IN LISTS kvblend_needs)
    string(REPLACE "|" ";" need "${need}")
    list(GET need 0 package)
    list(GET need 1 kind)
    list(GET need 2 name)
    unset(found) # the find commands keep what is already set
    if(kind STREQUAL "header")
      find_path(found "${name}" PATHS /usr/include /usr/local/include PATH_SUFFIXES include NO_CACHE)
      if(NOT found AND name MATCHES "^eigen3/(.*)")
        find_path(found "${CMAKE_MATCH_1}" PATHS /usr/include /usr/local/include PATH_SUFFIXES include NO_CACHE)
      endif()
    elseif(kind STREQUAL "program")
      find_program(found "${name}" NO_CACHE)
    else()
      execute_process(COMMAND python3 -c "import ${name}" RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET)
      if(status EQUAL 0)
        set(found TRUE)
      endif()
    endif()
    if(NOT found)
      list(APPEND missing ${package})
    endif()
  endforeach()
  set(${result} "${missing}" PARENT_SCOPE)
endfunction()

# Checks what is asked of the machine, and installs Debian's packages that are missing.
function(kvblend_step_install error)
  set(${error} "" PARENT_SCOPE)
  find_program(python python3 NO_CACHE)
  if(NOT python)
    set(${error} "Python 3 is needed, and no python3 was found." PARENT_SCOPE)
    return()
  endif()

  kvblend_missing_packages(missing)
  if(missing)
    list(JOIN missing " " names)
    kvblend_say("Installing what is missing: ${names}")
    find_program(apt_get apt-get NO_CACHE)
    if(NOT apt_get)
      set(${error} "These are missing, and without apt-get they must be installed by hand: ${names}." PARENT_SCOPE)
      return()
    endif()
    set(as_root "")
    execute_process(COMMAND id -u OUTPUT_VARIABLE user OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(NOT user EQUAL 0)
      find_program(sudo sudo NO_CACHE)
      if(NOT sudo)
        set(${error} "Run this as root, or install sudo: these packages are missing: ${names}." PARENT_SCOPE)
        return()
      endif()
      set(as_root "${sudo}")
    endif()
    set(log "${kvblend_build}/install.log")
    file(WRITE "${log}" "")
    set(apt ${as_root} ${CMAKE_COMMAND} -E env DEBIAN_FRONTEND=noninteractive ${apt_get})
    execute_process(COMMAND ${apt} update OUTPUT_VARIABLE output ERROR_VARIABLE output)
    file(APPEND "${log}" "${output}")
    execute_process(COMMAND ${apt} install --yes --no-install-recommends ${missing} OUTPUT_VARIABLE output
                    ERROR_VARIABLE output)
    file(APPEND "${log}" "${output}")
    kvblend_missing_packages(missing)
    if(missing)
      list(JOIN missing " " names)
      set(${error} "apt-get could not install ${names} (is there a network?); see ${log}." PARENT_SCOPE)
      return()
    endif()
  endif()

  if(DEFINED ENV{CXX})
    set(compiler "$ENV{CXX}")
  else()
    find_program(compiler NAMES c++ g++ clang++ NO_CACHE)
  endif()
  if(NOT compiler)
    set(${error} "No C++ compiler was found: install g++ 12, clang 14 or newer." PARENT_SCOPE)
    return()
  endif()
  separate_arguments(compiler NATIVE_COMMAND "${compiler}")
  file(WRITE "${kvblend_build}/cxx20.cpp" "#include <concepts>\n#include <span>\n#include <version>\n"
                                          "static_assert(std::integral<int> && __cpp_lib_atomic_wait);\n")
  execute_process(
    COMMAND ${compiler} -std=c++20 -fsyntax-only "${kvblend_build}/cxx20.cpp"
    RESULT_VARIABLE status
    OUTPUT_QUIET ERROR_QUIET)
  if(NOT status EQUAL 0)
    set(${error} "The compiler ${compiler} does not compile C++20: g++ 12, clang 14 or newer is needed." PARENT_SCOPE)
  endif()
endfunction()

# Fetches the sources of llama.cpp, before configuring, so that a failure is one sentence.
function(kvblend_step_fetch_llama error)
  set(${error} "" PARENT_SCOPE)
  list(GET kvblend_llama_package 2 file)
  if(NOT EXISTS "${kvblend_build}/deps/${file}")
    kvblend_say("Fetching the sources of llama.cpp (77 MB)")
  endif()
  kvblend_fetch_llama("${kvblend_build}/deps" path failure)
  set(${error} "${failure}" PARENT_SCOPE)
endfunction()

function(kvblend_step_fetch_model error)
  set(${error} "" PARENT_SCOPE)
  if(NOT EXISTS "${kvblend_build}/models/${kvblend_model_name}")
    kvblend_say("Fetching the model SmolLM2-135M-Instruct (93 MB)")
  endif()
  kvblend_fetch_model("${kvblend_build}/models" path failure)
  set(${error} "${failure}" PARENT_SCOPE)
endfunction()

# The two models for benchmarks and tests alone. Both are optional: a failure is said, and is no error.
function(kvblend_step_fetch_qwen error)
  set(${error} "" PARENT_SCOPE)
  if(NOT EXISTS "${kvblend_build}/models/${kvblend_qwen_name}")
    kvblend_say("Fetching the model Qwen2.5-Coder-0.5B-Instruct (478 MB)")
  endif()
  kvblend_fetch_qwen("${kvblend_build}/models" path failure)
  if(failure)
    kvblend_say("Going on without Qwen2.5-Coder: ${failure}")
  endif()
endfunction()

function(kvblend_step_fetch_gemma error)
  set(${error} "" PARENT_SCOPE)
  if(NOT EXISTS "${kvblend_build}/models/${kvblend_gemma_name}")
    kvblend_say("Fetching the model Gemma 3 270M (238 MB). Gemma is provided under and subject to the Gemma Terms of \
Use found at ai.google.dev/gemma/terms")
  endif()
  kvblend_fetch_gemma("${kvblend_build}/models" path failure)
  if(failure)
    kvblend_say("Going on without Gemma 3: ${failure}")
  endif()
endfunction()

# All scripts configure alike, so that none rebuilds what another has built; and with the pinned llama.cpp.
function(kvblend_step_configure error)
  set(${error} "" PARENT_SCOPE)
  kvblend_say("Configuring in ${kvblend_build}")
  set(generator -G Ninja)
  if(EXISTS "${kvblend_build}/CMakeCache.txt")
    set(generator "") # a build folder keeps the generator that it was made with
  endif()
  execute_process(
    COMMAND
      "${CMAKE_COMMAND}" -S "${kvblend_source}" -B "${kvblend_build}" ${generator} -DCMAKE_BUILD_TYPE=Release
      -DKVBLEND_BUILD_TESTS=ON -DKVBLEND_BUILD_EXAMPLES=ON -DKVBLEND_BUILD_BENCH=ON -DKVBLEND_INSTALL=ON
      -DKVBLEND_EXAMPLES_NATIVE=ON -DCMAKE_DISABLE_FIND_PACKAGE_llama=ON
    RESULT_VARIABLE status
    OUTPUT_VARIABLE output
    ERROR_VARIABLE output)
  file(WRITE "${kvblend_build}/configure.log" "${output}")
  if(NOT status EQUAL 0)
    set(${error} "CMake could not configure the project; see ${kvblend_build}/configure.log." PARENT_SCOPE)
  endif()
endfunction()

# Builds the targets named in kvblend_build_targets, or everything.
function(kvblend_step_build error)
  set(${error} "" PARENT_SCOPE)
  set(targets "")
  if(kvblend_build_targets)
    set(targets --target ${kvblend_build_targets})
    list(JOIN kvblend_build_targets " " names)
    kvblend_say("Building ${names} (the first time llama.cpp too, which takes minutes)")
  else()
    kvblend_say("Building everything (the first time llama.cpp too, which takes minutes)")
  endif()
  execute_process(COMMAND "${CMAKE_COMMAND}" --build "${kvblend_build}" --parallel ${kvblend_jobs} ${targets}
                  RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    set(${error} "The build failed; the compiler's messages are above." PARENT_SCOPE)
  endif()
endfunction()
