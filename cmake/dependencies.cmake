# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# llama.cpp, for the examples only: it reads GGUF files, tokenises, and is the host of examples/llama_cpp.
include("${CMAKE_CURRENT_LIST_DIR}/fetch.cmake")

# Adds the targets llama, ggml, ggml-base and ggml-cpu: those of the project around kvblend; else of an installed
# llama.cpp, but only one that the user pointed to (llama_DIR, llama_ROOT, CMAKE_PREFIX_PATH), since what a chance one
# computes and how it lays out its states differ; else of the pinned sources, as static libraries.
function(kvblend_add_llama)
  if(TARGET llama)
    return()
  endif()
  find_package(llama CONFIG QUIET GLOBAL NO_SYSTEM_ENVIRONMENT_PATH NO_CMAKE_PACKAGE_REGISTRY NO_CMAKE_SYSTEM_PATH
               NO_CMAKE_SYSTEM_PACKAGE_REGISTRY)
  if(llama_FOUND)
    message(STATUS "kvblend: the examples use the llama.cpp of ${llama_DIR}")
    foreach(target ggml ggml-base ggml-cpu)
      if(NOT TARGET ${target} AND TARGET ggml::${target})
        add_library(${target} ALIAS ggml::${target})
      endif()
    endforeach()
    return()
  endif()
  kvblend_add_pinned_llama()
endfunction()

# All settings are variables of this function, so that nothing outlives it; llama.cpp's own options see them, since they
# give way to ordinary variables.
function(kvblend_add_pinned_llama)
  kvblend_fetch_llama("${PROJECT_BINARY_DIR}/deps" source error)
  if(error)
    message(FATAL_ERROR " kvblend's examples need llama.cpp: ${error} "
                        "-DKVBLEND_BUILD_EXAMPLES=OFF builds without them.")
  endif()

  set(BUILD_SHARED_LIBS OFF)
  foreach(part COMMON TESTS TOOLS EXAMPLES SERVER APP UI MTMD)
    set(LLAMA_BUILD_${part} OFF)
  endforeach()
  set(LLAMA_USE_PREBUILT_UI OFF)
  set(LLAMA_OPENSSL OFF)
  set(LLAMA_SUBPROCESS OFF)
  set(LLAMA_ALL_WARNINGS OFF)
  set(LLAMA_TESTS_INSTALL OFF)
  set(GGML_OPENMP OFF)
  set(GGML_BLAS OFF)
  set(GGML_CUDA OFF)
  set(GGML_METAL OFF)
  set(GGML_LLAMAFILE ON) # its kernels for prompts are part of the engine as released
  set(GGML_CCACHE OFF) # it would set a launcher for the whole build
  set(GGML_NATIVE ${KVBLEND_EXAMPLES_NATIVE})
  foreach(extension SSE42 AVX AVX2 BMI2 FMA F16C)
    set(GGML_${extension} OFF) # used only without GGML_NATIVE: runs on every machine of the architecture
  endforeach()
  # Without git the commit of the project around it does not get into the objects, and no commit rebuilds them.
  set(GIT_EXE "")
  set(GIT_EXECUTABLE "")
  set(CMAKE_DISABLE_FIND_PACKAGE_Git ON)
  set(LLAMA_BUILD_NUMBER 0)
  set(LLAMA_BUILD_COMMIT unknown)
  if(NOT CMAKE_BUILD_TYPE)
    set(CMAKE_BUILD_TYPE Release)
  endif()
  set(CMAKE_MESSAGE_LOG_LEVEL ERROR)

  add_subdirectory("${source}" "${PROJECT_BINARY_DIR}/deps/llama" EXCLUDE_FROM_ALL SYSTEM)

  foreach(target llama ggml ggml-base ggml-cpu)
    target_compile_options(${target} PRIVATE -w)
  endforeach()
endfunction()
