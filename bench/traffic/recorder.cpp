// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The recorder, and the functions that instrumented code calls. No sanitizer's runtime is linked.
#include "recorder.hpp"

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace bench::recorder {
namespace {

struct State {
  std::uintptr_t first = 0;  // of the sector in which the memory begins
  std::size_t bytes = 0;
  bool recording = false;
  std::uint32_t warp = 0;
  std::int64_t warp_in_launch = -1;
  std::vector<std::uint32_t> read_by, written_by;  // by sector: the warp that did so last, 0: none
  Traffic traffic;
};
State state;

void count(std::uint32_t& last, std::int64_t& memory, std::int64_t& warps) {
  if (last == 0 || state.warp - last > kCachedWarps) memory += std::int64_t{kSectorBytes};
  if (last != state.warp) warps += std::int64_t{kSectorBytes};
  last = state.warp;
}

void touch(const void* address, std::size_t size, bool writes) {
  const std::size_t at = reinterpret_cast<std::uintptr_t>(address) - state.first;  // before it: far too large
  if (!state.recording || size == 0 || at >= state.bytes) return;
  Traffic& t = state.traffic;
  for (std::size_t sector = at / kSectorBytes; sector <= (at + size - 1) / kSectorBytes; ++sector) {
    if (writes) {
      count(state.written_by[sector], t.memory.written, t.warps.written);
    } else {
      count(state.read_by[sector], t.memory.read, t.warps.read);
    }
  }
}

}  // namespace

void watch(std::span<const std::byte> memory) {
  state = {};
  const auto first = reinterpret_cast<std::uintptr_t>(memory.data());
  state.first = first / kSectorBytes * kSectorBytes;
  state.bytes = first - state.first + memory.size();
  state.read_by.assign(state.bytes / kSectorBytes + 1, 0);
  state.written_by = state.read_by;
}

Traffic traffic() { return state.traffic; }

void begin_launch() {
  state.warp += kCachedWarps;
  state.warp_in_launch = -1;
}

void begin_item(std::int64_t item) {
  if (item / kWarpItems != state.warp_in_launch) ++state.warp;
  state.warp_in_launch = item / kWarpItems;
  state.recording = true;
}

void end_launch() { state.recording = false; }

void add(const Bytes& bytes) {
  state.traffic.memory += bytes;
  state.traffic.warps += bytes;
}

}  // namespace bench::recorder

// What compilers call, by their names for it.
// NOLINTBEGIN
extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}

#define KVBLEND_BENCH_ACCESS(size)                                                                  \
  void __tsan_read##size(void* address) { bench::recorder::touch(address, size, false); }           \
  void __tsan_write##size(void* address) { bench::recorder::touch(address, size, true); }           \
  void __tsan_unaligned_read##size(void* address) { bench::recorder::touch(address, size, false); } \
  void __tsan_unaligned_write##size(void* address) { bench::recorder::touch(address, size, true); }
KVBLEND_BENCH_ACCESS(1)
KVBLEND_BENCH_ACCESS(2)
KVBLEND_BENCH_ACCESS(4)
KVBLEND_BENCH_ACCESS(8)
KVBLEND_BENCH_ACCESS(16)
#undef KVBLEND_BENCH_ACCESS

void __tsan_read_range(void* address, std::size_t size) { bench::recorder::touch(address, size, false); }
void __tsan_write_range(void* address, std::size_t size) { bench::recorder::touch(address, size, true); }

// Copies stay calls of the C library's functions, which the linker redirects to here (--wrap).
void* __real_memcpy(void* to, const void* from, std::size_t size);
void* __real_memmove(void* to, const void* from, std::size_t size);
void* __real_memset(void* to, int value, std::size_t size);
void* __wrap_memcpy(void* to, const void* from, std::size_t size) {
  bench::recorder::touch(from, size, false);
  bench::recorder::touch(to, size, true);
  return __real_memcpy(to, from, size);
}
void* __wrap_memmove(void* to, const void* from, std::size_t size) {
  bench::recorder::touch(from, size, false);
  bench::recorder::touch(to, size, true);
  return __real_memmove(to, from, size);
}
void* __wrap_memset(void* to, int value, std::size_t size) {
  bench::recorder::touch(to, size, true);
  return __real_memset(to, value, size);
}
void* __tsan_memcpy(void* to, const void* from, std::size_t size) { return __wrap_memcpy(to, from, size); }
void* __tsan_memmove(void* to, const void* from, std::size_t size) { return __wrap_memmove(to, from, size); }
void* __tsan_memset(void* to, int value, std::size_t size) { return __wrap_memset(to, value, size); }

}  // extern "C"
// NOLINTEND
