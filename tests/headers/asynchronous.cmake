# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# Nothing in the CUDA back end waits for the device or allocates: its headers are searched for what does. With
# -Dcontrol=ON the search itself is tried, on lines that have such a call and on lines that have none.
#
#   cmake "-Dfiles=<header>;..." -P asynchronous.cmake

cmake_minimum_required(VERSION 3.25)

# What Thrust and CUB may be used for: none of these returns a value that it must wait for, and CUB's take temporary
# memory from the caller. Sorts of Thrust allocate.
set(allowed_thrust for_each_n counting_iterator cuda cpp omp tbb)
set(allowed_cub DeviceFor DeviceRadixSort DoubleBuffer)

set(word "(^|[^A-Za-z0-9_])")
set(end "([^A-Za-z0-9_]|$)")
set(forbidden
    # CUDA, runtime and driver
    "${word}cu(da)?[A-Za-z]*Synchronize[A-Za-z0-9_]*"
    "${word}cu(da)?(Stream|Event)Query${end}"
    "${word}cu(da)?(Malloc|Free|Mem[A-Za-z]|HostAlloc|HostRegister|HostUnregister|ArrayCreate)[A-Za-z0-9_]*[ \n]*\\("
    "${word}cu(da)?[A-Za-z]*(Create|Destroy)[A-Za-z0-9_]*[ \n]*\\("
    # C and C++
    "${word}(new|delete)${end}"
    "${word}(malloc|calloc|realloc|aligned_alloc|posix_memalign|free)[ \n]*\\("
    "std::(vector|deque|list|map|set|unordered_[a-z]+|multimap|multiset|queue|stack|basic_string|string|function|any)${end}"
    "std::(make_unique|make_shared|allocate_shared|unique_ptr|shared_ptr|allocator|pmr|get_temporary_buffer)${end}"
    # A policy of Thrust that waits
    "thrust::cuda::par${end}")

# Sets <result> to the calls in <text> that wait or allocate.
function(find_calls text result)
  set(found "")
  string(REPLACE ";" " " text "${text}")
  string(REGEX REPLACE "//[^\n]*" "" text "${text}")
  string(REGEX REPLACE "[][]" " " text "${text}") # brackets would keep CMake from telling matches apart
  # Declared by the standard, not called: functions that are deleted, headers.
  string(REGEX REPLACE "= *delete" "" text "${text}")
  string(REGEX REPLACE "#[ ]*include[^\n]*" "" text "${text}")
  foreach(pattern IN LISTS forbidden)
    string(REGEX MATCHALL "${pattern}" matches "${text}")
    foreach(match IN LISTS matches)
      # What is only put into a stream's order is no wait.
      if(NOT match MATCHES "cuda(Memcpy|Memset)[A-Za-z0-9]*Async[ \n]*\\(")
        list(APPEND found "${match}")
      endif()
    endforeach()
  endforeach()
  foreach(library thrust cub)
    string(REGEX MATCHALL "${word}${library}::[A-Za-z_]+" matches "${text}")
    foreach(match IN LISTS matches)
      string(REGEX REPLACE ".*::" "" name "${match}")
      if(NOT name IN_LIST allowed_${library})
        list(APPEND found "${match}")
      endif()
    endforeach()
  endforeach()
  set(${result} "${found}" PARENT_SCOPE)
endfunction()

if(control)
  set(waits
      "cudaMalloc(&p, n)" "cudaMallocAsync(&p, n, s)" "cudaFree(p)" "cudaFreeHost (p)" "cudaHostAlloc(&p, n, 0)"
      "cudaDeviceSynchronize()" "return cudaStreamSynchronize(s)" "cudaEventSynchronize(e)" "cuStreamSynchronize(s)"
      "cudaMemcpy(a, b, n, cudaMemcpyDeviceToHost)" "cudaMemcpy2D(a)" "cudaMemset(a, 0, n)" "cudaEventCreate(&e)"
      "cudaEventCreateWithFlags(&e, 0)" "cudaStreamCreateWithPriority(&s, 0, 0)" "cudaEventDestroy(e)"
      "cudaStreamQuery(s)" "cuMemAlloc(&p, n)" "new float[n]" "auto* p = new(std::nothrow) T" "delete p" "malloc(n)"
      "std::malloc (n)" "std::vector<int> v" "std::unique_ptr<int> p" "std::function<void()> f"
      "thrust::device_vector<int> v" "thrust::reduce(p, a, b)" "thrust::copy_if(p, a, b, c, f)"
      "int n = thrust::count(p, a, b, 1)" "thrust::sort(p, a, b)" "thrust::for_each_n(thrust::cuda::par.on(s), i, n, f)"
      "thrust::device_malloc<int>(n)" "cub::CachingDeviceAllocator a" "cub::DeviceScan::ExclusiveSum(p, n, a, b, c)"
      "f(cudaMemcpyAsync(a, b, n, k, s)) + cudaMalloc(p, n)")
  set(queues
      "cudaMemcpyAsync(a, b, n, cudaMemcpyHostToDevice, s)" "cudaMemsetAsync(a, 0, n, s)" "cudaEventRecord(e, s)"
      "cudaStreamWaitEvent(s, e, 0)" "cudaPeekAtLastError()" "cub::DeviceFor::Bulk(n, f, s)"
      "cub::DeviceRadixSort::SortKeys(p, n, a, b)" "thrust::for_each_n(thrust::cuda::par_nosync.on(s), i, n, f)"
      "Fusor(const Fusor&) = delete" "int renewed = news + new_rows" "#include <new>" "// cudaMalloc(p, n) is not called"
      "free_rows(n)")
  foreach(line IN LISTS waits)
    find_calls("${line}" found)
    if(found STREQUAL "")
      message(SEND_ERROR "not found: ${line}")
    endif()
  endforeach()
  foreach(line IN LISTS queues)
    find_calls("${line}" found)
    if(NOT found STREQUAL "")
      message(SEND_ERROR "found in vain: ${found} in ${line}")
    endif()
  endforeach()
  return()
endif()

if(NOT files)
  message(FATAL_ERROR "no headers to search")
endif()
foreach(file IN LISTS files)
  file(READ "${file}" text)
  find_calls("${text}" found)
  foreach(call IN LISTS found)
    string(STRIP "${call}" call)
    message(SEND_ERROR "${file}: ${call}")
  endforeach()
endforeach()
