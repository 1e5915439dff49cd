# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# kvblend::cccl: the headers of a CUDA Toolkit from 12 on and of CCCL (Thrust, CUB), which lie in a folder of their own
# since 13. CMake's own module would leave its findings in the cache of whoever includes this. Used by the build and by
# the installed package alike.
if(NOT TARGET kvblend::cccl)
  find_path(
    KVBLEND_CUDA_INCLUDE_DIR cuda_runtime_api.h
    HINTS "${CUDAToolkit_ROOT}" ENV CUDAToolkit_ROOT ENV CUDA_PATH ENV CUDA_HOME /usr/local/cuda
    PATH_SUFFIXES include)
  find_path(
    KVBLEND_CCCL_INCLUDE_DIR thrust/version.h
    HINTS "${KVBLEND_CUDA_INCLUDE_DIR}/cccl" "${KVBLEND_CUDA_INCLUDE_DIR}"
    NO_DEFAULT_PATH)
  mark_as_advanced(KVBLEND_CUDA_INCLUDE_DIR KVBLEND_CCCL_INCLUDE_DIR)
  if(KVBLEND_CUDA_INCLUDE_DIR AND KVBLEND_CCCL_INCLUDE_DIR)
    file(STRINGS "${KVBLEND_CUDA_INCLUDE_DIR}/cuda_runtime_api.h" kvblend_cudart REGEX "^#define CUDART_VERSION +[0-9]+")
    if(kvblend_cudart MATCHES "([0-9]+)$" AND CMAKE_MATCH_1 GREATER_EQUAL 12000)
      add_library(kvblend::cccl INTERFACE IMPORTED)
      target_include_directories(kvblend::cccl INTERFACE "${KVBLEND_CCCL_INCLUDE_DIR}" "${KVBLEND_CUDA_INCLUDE_DIR}")
    endif()
    unset(kvblend_cudart)
  endif()
endif()
