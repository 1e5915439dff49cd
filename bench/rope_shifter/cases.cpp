// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The measured moves, for one target: compiled with KVBLEND_BENCH_TARGET, its name, and an ABI namespace of its own, so
// that two of them live in one program.
#include "cases.hpp"

#include <eigen_engine/thread_pool.hpp>
#include <kvblend/codec/fp8.hpp>
#include <kvblend/codec/ggml_blocks.hpp>
#include <kvblend/eigen.hpp>
#include <kvblend/kvblend.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <span>
#include <string>
#include <vector>

namespace bench {
namespace {

using namespace kvblend;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void copy(const std::byte* source, std::byte* destination, std::size_t bytes, eigen_engine::ThreadPool& pool) {
  const std::size_t part = bytes / static_cast<std::size_t>(pool.threads());
  pool.run(pool.threads(), [=](std::int64_t i, std::int32_t) {
    const std::size_t begin = static_cast<std::size_t>(i) * part;
    std::memcpy(destination + begin, source + begin, part);
  });
}

// One move of kTokens keys and one memcpy of as many bytes, in turn, each over memory of its own.
template <class Codec, class Backend>
void measure(benchmark::State& state, Arena& arena, std::size_t which, eigen_engine::ThreadPool& pool,
             Backend backend) {
  const Case& of = cases()[which];
  const auto bytes = static_cast<std::size_t>(bytes_of<Codec>(std::int64_t{kTokens} * kHeads * of.head_dim));
  const Result<RopeSpec> spec = plain_rope(of.head_dim, 10000.0);
  const ShiftRun run{Row(0), 0, kTokens, Position(0), Position(5000)};
  const RopeShifter<ExactAngles, Backend> shifter(backend);
  std::vector<float> scratch(static_cast<std::size_t>(shifter.scratch_size(spec.value, run)));
  double shift_seconds = 0;
  double copy_seconds = 0;
  for (auto _ : state) {
    std::size_t at = arena.next(bytes);
    auto start = std::chrono::steady_clock::now();
    copy(arena.source(at), arena.destination(at), bytes, pool);
    copy_seconds += seconds_since(start);

    at = arena.next(bytes);
    const auto source = dense_plane<Codec>(arena.source(at), kTokens, kHeads, of.head_dim);
    const auto destination = dense_plane<Codec>(arena.destination(at), kTokens, kHeads, of.head_dim);
    start = std::chrono::steady_clock::now();
    const Status status = shifter.shift(spec.value, spec.value, run, source, destination, scratch);
    const double seconds = seconds_since(start);
    if (!status.ok()) {
      state.SkipWithError(status.message());
      return;
    }
    shift_seconds += seconds;
    state.SetIterationTime(seconds);
  }
  const double moved = 2e-9 * static_cast<double>(bytes) * static_cast<double>(state.iterations());
  state.counters["case"] = static_cast<double>(which);
  state.counters["gbps"] = moved / shift_seconds;
  state.counters["memcpy_gbps"] = moved / copy_seconds;
  state.counters["ratio"] = copy_seconds / shift_seconds;
}

template <class Codec, class Backend>
void add(Arena& arena, const char* target, std::int32_t head_dim, const char* backend_name,
         eigen_engine::ThreadPool& pool, Backend backend) {
  const std::size_t which = cases().size();
  cases().push_back({target, to_string(Codec::dtype), head_dim, pool.threads(), backend_name});
  const std::string name = std::string(target) + '/' + to_string(Codec::dtype) + '/' + std::to_string(head_dim) + '/' +
                           std::to_string(pool.threads()) + '/' + backend_name;
  benchmark::RegisterBenchmark(
      name.c_str(),
      [&arena, &pool, which, backend](benchmark::State& state) { measure<Codec>(state, arena, which, pool, backend); })
      ->UseManualTime()
      ->ReportAggregatesOnly(true);
}

template <class Codec>
void add_all(Arena& arena, const char* target, eigen_engine::ThreadPool& one, eigen_engine::ThreadPool& two) {
  for (const std::int32_t head_dim : {64, 128}) {
    for (eigen_engine::ThreadPool* pool : {&one, &two}) {
      add<Codec>(arena, target, head_dim, "eigen", *pool,
                 EigenBackend<eigen_engine::PoolExecutor>(eigen_engine::PoolExecutor(*pool)));
    }
    add<Codec>(arena, target, head_dim, "portable", one, PortableBackend());
  }
}

}  // namespace

#define KVBLEND_JOINED(a, b) a##b
#define KVBLEND_REGISTER(target) KVBLEND_JOINED(register_, target)
#define KVBLEND_TEXT_OF(target) #target
#define KVBLEND_TEXT(target) KVBLEND_TEXT_OF(target)

void KVBLEND_REGISTER(KVBLEND_BENCH_TARGET)(Arena& arena) {
  static eigen_engine::ThreadPool one(1);
  static eigen_engine::ThreadPool two(2);
  const char* const target = KVBLEND_TEXT(KVBLEND_BENCH_TARGET);
  add_all<F32Codec>(arena, target, one, two);
  add_all<F16Codec>(arena, target, one, two);
  add_all<Bf16Codec>(arena, target, one, two);
  add_all<Fp8E4M3Codec>(arena, target, one, two);
  add_all<Fp8E5M2Codec>(arena, target, one, two);
  add_all<Q8_0Codec>(arena, target, one, two);
  add_all<Q4_0Codec>(arena, target, one, two);
}

}  // namespace bench
