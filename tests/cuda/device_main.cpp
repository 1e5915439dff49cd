// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The main of the tests that run on a GPU: those of this folder and of tests/backend, compiled as CUDA sources. All
// memory of new, and so of std::vector, is managed here, which host and device both read and write: tests written for
// the host then run on the device as they are, but for variables on the stack.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cuda_runtime_api.h>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <new>

namespace {

bool has_gpu() {
  static const bool has = [] {
    int devices = 0;
    return cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
  }();
  return has;
}

}  // namespace

void* operator new(std::size_t size) {
  void* memory = nullptr;
  if (size == 0) size = 1;
  if (!has_gpu()) {
    memory = std::malloc(size);
  } else if (cudaMallocManaged(&memory, size, cudaMemAttachGlobal) != cudaSuccess) {
    memory = nullptr;
  }
  if (memory == nullptr) std::abort();
  return memory;
}
void* operator new[](std::size_t size) { return operator new(size); }
void operator delete(void* memory) noexcept {
  if (has_gpu()) {
    static_cast<void>(cudaFree(memory));
  } else {
    std::free(memory);
  }
}
void operator delete[](void* memory) noexcept { operator delete(memory); }
void operator delete(void* memory, std::size_t) noexcept { operator delete(memory); }
void operator delete[](void* memory, std::size_t) noexcept { operator delete(memory); }

int main(int count, char** arguments) {
  if (!has_gpu()) {
    std::printf("skipped: there is no GPU\n");
    return 0;
  }
  return doctest::Context(count, arguments).run();
}
