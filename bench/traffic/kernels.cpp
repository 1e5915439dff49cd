// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// This file alone is compiled with -fsanitize=thread: loads and stores of the functors of kvblend/cuda are recorded.
// Which of the code's branches are the host's does not matter: the bytes that an item touches are the same.
#include "kernels.hpp"

#include <kvblend/codec/floats.hpp>
#include <kvblend/codec/fp8.hpp>
#include <kvblend/codec/ggml_blocks.hpp>
#include <kvblend/cuda/operations.hpp>
#include <kvblend/cuda/thrust_execution.hpp>
#include <kvblend/memory/layouts.hpp>
#include <kvblend/rope/angles.hpp>
#include <kvblend/rope/builders.hpp>
#include <kvblend/rope/spec.hpp>

#include <thrust/system/cpp/execution_policy.h>
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <span>
#include <vector>

namespace bench {
namespace {

using kvblend::ActiveIndex;
using kvblend::Row;
using kvblend::Status;

// Tells the recorder which thread of the device runs.
template <class Functor>
struct Numbered {
  Functor functor;
  void operator()(std::int64_t item) const {
    recorder::begin_item(item);
    functor(item);
  }
};

class RecordedExecution {
 public:
  template <class Functor>
  Status for_each(std::int64_t count, Functor functor) const {
    recorder::begin_launch();
    const Status status = cpu_.for_each(count, Numbered<Functor>{functor});
    recorder::end_launch();
    return status;
  }
  // Not recorded, as the CPU sorts in another way: cub's radix sort reads all keys once to count digits, then reads and
  // writes them for each of the 8 bytes of a key.
  Status sort(std::span<std::uint64_t> keys, std::span<std::byte> scratch) const {
    const auto bytes = static_cast<std::int64_t>(keys.size_bytes());
    recorder::add({9 * bytes, 8 * bytes});
    return cpu_.sort(keys, scratch);
  }
  [[nodiscard]] std::size_t sort_bytes(std::int64_t) const { return 0; }
  Status upload(void* device, const void* host, std::size_t bytes) const { return cpu_.upload(device, host, bytes); }

 private:
  kvblend::cuda::ThrustExecution<thrust::system::cpp::detail::par_t> cpu_;
};
static_assert(kvblend::cuda::Execution<RecordedExecution>);

// The memory under watch. Whatever is made of its bytes are ordinary numbers, the same all over.
class Arena {
 public:
  Arena() : memory_(std::size_t{1} << 26, std::byte{0x3c}) {}

  void clear() { used_ = 0; }
  [[nodiscard]] std::span<const std::byte> memory() const { return memory_; }
  template <class T>
  [[nodiscard]] std::span<T> take(std::int64_t count) {
    const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(memory_.data() + used_) % kAlignment;
    used_ += misaligned == 0 ? 0 : kAlignment - misaligned;
    const std::size_t at = used_;
    used_ += static_cast<std::size_t>(count) * sizeof(T);
    if (used_ > memory_.size()) std::abort();
    return {reinterpret_cast<T*>(memory_.data() + at), static_cast<std::size_t>(count)};
  }

 private:
  static constexpr std::size_t kAlignment = 256;
  std::vector<std::byte> memory_;
  std::size_t used_ = 0;
};

void check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s: %s\n", status.where(), status.message());
  std::exit(1);
}

template <class Codec>
std::int64_t bytes_of_rows(std::int64_t rows) {
  return kvblend::bytes_of<Codec>(rows * kTrafficHeads * kTrafficHeadDim);
}

template <class Codec>
auto dense_rows(Arena& arena, std::int64_t rows) {
  return kvblend::dense_plane<Codec>(arena.take<std::byte>(bytes_of_rows<Codec>(rows)).data(), rows, kTrafficHeads,
                                     kTrafficHeadDim);
}

template <class Codec>
struct InOnePiece {
  static constexpr const char* kName = "contiguous";
  static auto cache(Arena& arena, std::mt19937&) { return dense_rows<Codec>(arena, kTrafficRows); }
};

template <class Codec>
struct InPages {
  static constexpr const char* kName = "paged";
  static auto cache(Arena& arena, std::mt19937& random) {
    const std::span<std::int32_t> table = arena.take<std::int32_t>(kTrafficRows / kTrafficBlock);
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), random);
    const std::int64_t row_bytes = bytes_of_rows<Codec>(1);
    return kvblend::PagedPlane<Codec>(
        arena.take<std::byte>(bytes_of_rows<Codec>(kTrafficRows)).data(),
        kvblend::PagedLayout(table.data(), static_cast<std::int64_t>(table.size()), kTrafficBlock, kTrafficHeads,
                             kTrafficHeadDim, kTrafficBlock * row_bytes, row_bytes, row_bytes / kTrafficHeads));
  }
};

class Measurement {
 public:
  // `run` gets operations and an arena that is all its own, and returns the least bytes of what it queued.
  template <class Run>
  void kernel(const char* name, const char* dtype, const char* layout, double limit, const Run& run) {
    arena_.clear();
    recorder::watch(arena_.memory());
    const std::span<std::byte> scratch = arena_.take<std::byte>(std::int64_t{kTrafficRows} * kTrafficHeads * 8 + 8);
    const Bytes least = run(kvblend::cuda::Operations<RecordedExecution>(RecordedExecution(), scratch), arena_);
    kernels.push_back({name, dtype, layout, least, recorder::traffic(), limit});
  }

  template <class Codec, template <class> class Layout>
  void kernels_of() {
    const char* const dtype = kvblend::to_string(Codec::dtype);
    const char* const layout = Layout<Codec>::kName;
    std::mt19937 random(1);

    // Keys of passages, as they are stored, to other positions of a cache.
    kernel("shift", dtype, layout, 1.1, [&](const auto& operations, Arena& arena) {
      const auto cache = Layout<Codec>::cache(arena, random);
      const auto spec = kvblend::plain_rope(kTrafficHeadDim, 5e5, kvblend::RopePairing::neox);
      check(spec.status);
      constexpr std::int32_t kRows = kTrafficRows / kTrafficPassages;
      for (std::int32_t i = 0; i < kTrafficPassages; ++i) {
        const std::int32_t to = (kTrafficPassages - 1 - i) * kRows;
        const kvblend::ShiftRun run{Row(to), 0, kRows, kvblend::Position(0), kvblend::Position(to + 7)};
        const std::int64_t floats = kvblend::RotationTable::size<kvblend::ExactAngles>(spec.value, spec.value, run);
        const auto table =
            kvblend::RotationTable::make<kvblend::ExactAngles>(spec.value, spec.value, run, arena.take<float>(floats));
        check(table.status);
        check(operations.shift(spec.value, table.value, run, dense_rows<Codec>(arena, kRows), cache));
      }
      return Bytes{bytes_of_rows<Codec>(kTrafficRows), bytes_of_rows<Codec>(kTrafficRows)};
    });

    // Fresh rows into a cache.
    kernel("merge", dtype, layout, 1.1, [&](const auto& operations, Arena& arena) {
      const auto cache = Layout<Codec>::cache(arena, random);
      const std::span<Row> rows = some_rows(arena, kTrafficPicked, random);
      check(operations.merge(dense_rows<Codec>(arena, kTrafficPicked), rows, cache));
      return Bytes{bytes_of_rows<Codec>(kTrafficPicked), bytes_of_rows<Codec>(kTrafficPicked)};
    });

    // Deviations of all rows' keys, and the places of the largest.
    kernel("score", dtype, layout, 1.3, [&](const auto& operations, Arena& arena) {
      const auto cache = Layout<Codec>::cache(arena, random);
      const auto fresh = dense_rows<Codec>(arena, kTrafficRows);
      const std::span<Row> rows = some_rows(arena, kTrafficRows, random);
      const auto which = arena.take<ActiveIndex>(kTrafficRows);
      for (std::int32_t i = 0; i < kTrafficRows; ++i) which[static_cast<std::size_t>(i)] = ActiveIndex(i);
      const auto scores = arena.take<float>(kTrafficRows);
      const auto picked = arena.take<ActiveIndex>(kTrafficPicked);
      check(operations.deviation(fresh, which, rows, cache, scores));
      check(operations.top_k(scores, kTrafficPicked, arena.take<std::uint64_t>(kTrafficRows), picked));
      return Bytes{2 * bytes_of_rows<Codec>(kTrafficRows), static_cast<std::int64_t>(picked.size_bytes())};
    });

    // The cache's rows into one piece, for attention or to be stored.
    kernel("gather", dtype, layout, 1.1, [&](const auto& operations, Arena& arena) {
      const auto cache = Layout<Codec>::cache(arena, random);
      kvblend::ShiftRun run;
      run.count = kTrafficRows;
      check(operations.copy(run, cache, dense_rows<Codec>(arena, kTrafficRows)));
      return Bytes{bytes_of_rows<Codec>(kTrafficRows), bytes_of_rows<Codec>(kTrafficRows)};
    });
  }

  template <class Codec>
  void both_layouts() {
    kernels_of<Codec, InOnePiece>();
    kernels_of<Codec, InPages>();
  }

  std::vector<KernelTraffic> kernels;

 private:
  static std::span<Row> some_rows(Arena& arena, std::int32_t count, std::mt19937& random) {
    std::vector<std::int32_t> all(kTrafficRows);
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), random);
    std::sort(all.begin(), all.begin() + count);
    const std::span<Row> rows = arena.take<Row>(count);
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = Row(all[i]);
    return rows;
  }

  Arena arena_;
};

}  // namespace

std::vector<KernelTraffic> measure_kernels() {
  Measurement measurement;
  measurement.both_layouts<kvblend::F32Codec>();
  measurement.both_layouts<kvblend::F16Codec>();
  measurement.both_layouts<kvblend::Bf16Codec>();
  measurement.both_layouts<kvblend::Fp8E4M3Codec>();
  measurement.both_layouts<kvblend::Q8_0Codec>();
  return measurement.kernels;
}

}  // namespace bench
