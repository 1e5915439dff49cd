// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A shift allocates nothing and takes no lock, whatever the codec, the layout and the angle rule; and it leaves the
// same bits with one thread and with two.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"  // g++ sees only one half of the operators replaced below
#endif
#include <kvblend/codec/fp8.hpp>
#include <kvblend/codec/ggml_blocks.hpp>
#include <kvblend/codec/hadamard.hpp>
#include <kvblend/codec/scaled.hpp>

#include <dlfcn.h>
#include <doctest/doctest.h>
#include <pthread.h>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <vector>
#include "shift_support.hpp"
#include "support.hpp"

using namespace kvblend;
using namespace kvblend_test;

namespace {
std::atomic<long> allocations{0};
std::atomic<long> locks{0};
}  // namespace

void* operator new(std::size_t size) {
  ++allocations;
  if (void* memory = std::malloc(size)) return memory;
  std::abort();
}
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  ++allocations;
  return std::malloc(size);
}
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

extern "C" int pthread_mutex_lock(pthread_mutex_t* mutex) noexcept {
  using Lock = int (*)(pthread_mutex_t*);
  static Lock real = nullptr;  // a local initialiser would itself lock
  if (real == nullptr) real = reinterpret_cast<Lock>(dlsym(RTLD_NEXT, "pthread_mutex_lock"));
  ++locks;
  return real(mutex);
}

namespace {

constexpr std::int32_t kRows = 70;  // more than a back end hands out at a time
constexpr std::int32_t kHeads = 2;
constexpr std::int32_t kDim = 128;

// Blocks of eight rows, in an order of their own, in one allocation.
template <class C>
struct Paged {
  std::vector<std::int32_t> table;
  std::vector<std::byte> bytes;
  C codec;

  explicit Paged(C c = C{}) : codec(c) {
    for (std::int32_t block = 0; block < 9; ++block) table.push_back(8 - block);
    bytes.resize(static_cast<std::size_t>(9 * 8 * kHeads * bytes_of<C>(kDim)));
  }
  Plane<C, PagedLayout> plane() {
    const std::int64_t head = bytes_of<C>(kDim);
    return {bytes.data(), PagedLayout(table.data(), 9, 8, kHeads, kDim, 8 * kHeads * head, kHeads * head, head), codec};
  }
};

template <class P>
void fill(const P& plane, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<float> values(kDim);
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (std::int32_t head = 0; head < kHeads; ++head) {
      for (float& value : values) value = static_cast<float>(static_cast<int>(random() % 65) - 32) / 16;
      encode_head(plane, row, head, values.data());
    }
  }
}

// Calls use(source, destination) for each codec, with memory of its own.
template <class Use>
void each_codec(const Use& use) {
  const auto stateless = [&use](auto codec) {
    using C = decltype(codec);
    CAPTURE(to_string(C::dtype));
    Paged<C> source, destination;
    fill(source.plane(), 5);
    use(source.plane(), destination.plane(), destination.bytes);
  };
  stateless(F32Codec{});
  stateless(F16Codec{});
  stateless(Bf16Codec{});
  stateless(Fp8E4M3Codec{});
  stateless(Fp8E5M2Codec{});
  stateless(Q8_0Codec{});
  stateless(Q4_0Codec{});
  stateless(HadamardCodec<Q8_0Codec, 128>{});

  // Scales that are made as rows are written.
  using Scales = TokenScales<ContiguousLayout>;
  using Scaling = Scaled<Fp8E4M3Codec, Scales>;
  std::vector<float> scales(2 * kRows * kHeads, 0.25f);
  const ContiguousLayout each(kRows, kHeads, 1, kHeads * 4, 4);
  auto* const first = reinterpret_cast<std::byte*>(scales.data());
  Paged<Scaling> source(Scaling{Scales{first, each}});
  Paged<Scaling> destination(Scaling{Scales{first + kRows * kHeads * 4, each}});
  fill(source.plane(), 6);
  use(source.plane(), destination.plane(), destination.bytes);
}

}  // namespace

TEST_CASE_TEMPLATE("a shift neither allocates nor locks", Backend, PortableBackend, SerialEigen) {
  {
    const long before = locks;
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&mutex);
    pthread_mutex_unlock(&mutex);
    REQUIRE(locks == before + 1);  // they are counted at all
  }
  const RopeSpec spec = plain_rope(kDim, 10000).value;
  std::vector<float> scratch(kDim * kRows);
  each_codec([&](const auto& source, const auto& destination, const auto&) {
    const auto move = [&](const auto& shifter, std::int32_t distance) {
      const ShiftRun run = make_run(0, 0, kRows, 40, 40 + distance);
      const long allocated = allocations;
      const long locked = locks;
      const Status status = shifter.shift(spec, spec, run, source, destination, scratch);
      const long now_allocated = allocations;
      const long now_locked = locks;
      REQUIRE_MESSAGE(status.ok(), status.where() << ": " << status.message());
      CHECK(now_allocated == allocated);
      CHECK(now_locked == locked);
    };
    for (const std::int32_t distance : {0, 7, -33}) {
      move(RopeShifter<ExactAngles, Backend>(), distance);
      move(RopeShifter<EngineAngles, Backend>(), distance);
    }
  });
}

TEST_CASE("a shift leaves the same bits with one thread and with two, in every codec") {
  for (const RopePairing pairing : {RopePairing::neox, RopePairing::interleaved}) {
    const RopeSpec spec = plain_rope(kDim, 10000, pairing).value;
    const ShiftRun run = make_run(0, 0, kRows, 40, 7);
    std::vector<float> scratch(kDim * kRows);
    each_codec([&](const auto& source, const auto& destination, std::vector<std::byte>& bytes) {
      must_shift<SerialEigen>(spec, run, source, destination);
      const std::vector<std::byte> one = bytes;
      std::fill(bytes.begin(), bytes.end(), std::byte{0});
      must_shift<TwoThreadEigen>(spec, run, source, destination);
      CHECK(bytes == one);
    });
  }
}
