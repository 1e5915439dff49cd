// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// How fast the device's kernels move rows, against cudaMemcpy from device to device, over far more memory than caches
// hold. Prints JSON; bench/gpu_check.sh builds it for one codec after the other, since that takes a compiler long, and
// runs it.
#include <kvblend/codec/floats.hpp>
#include <kvblend/codec/fp8.hpp>
#include <kvblend/codec/ggml_blocks.hpp>
#include <kvblend/cuda/operations.hpp>
#include <kvblend/cuda/stream_execution.cuh>
#include <kvblend/memory/layouts.hpp>
#include <kvblend/rope/angles.hpp>
#include <kvblend/rope/builders.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#ifndef KVBLEND_BENCH_CODEC
#define KVBLEND_BENCH_CODEC Bf16Codec
#endif

namespace {

using kvblend::ActiveIndex;
using kvblend::Row;
using kvblend::Status;
using Operations = kvblend::cuda::Operations<kvblend::cuda::StreamExecution>;

constexpr std::int32_t kHeads = 8;
constexpr std::int32_t kHeadDim = 128;
constexpr std::int32_t kBlock = 16;           // rows of a block of the cache
constexpr std::int64_t kBytes = 512ll << 20;  // of a plane
constexpr int kRounds = 20;

void check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "gpu_shift: %s: %s\n", status.where(), status.message());
  std::exit(1);
}
void check(cudaError_t error, const char* call) { check(kvblend::cuda::status_of(error, call)); }

// Device memory, freed with the process.
template <class T>
std::span<T> allocate(std::int64_t count) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, static_cast<std::size_t>(count) * sizeof(T)), "cudaMalloc");
  return {static_cast<T*>(memory), static_cast<std::size_t>(count)};
}
template <class T>
std::span<const T> upload(const std::vector<T>& values) {
  const std::span<T> device = allocate<T>(static_cast<std::int64_t>(values.size()));
  check(cudaMemcpy(device.data(), values.data(), device.size_bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
  return device;
}

// Bytes that are finite numbers in any of the formats.
struct Noise {
  std::uint32_t* out;
  std::uint32_t seed;
  KVBLEND_HOST_DEVICE void operator()(std::int64_t i) const {
    std::uint32_t x = (static_cast<std::uint32_t>(i) + seed) * 2654435761u;
    x ^= x >> 15;
    x *= 2246822519u;
    x ^= x >> 13;
    out[i] = x & 0xbfbfbfbfu;
  }
};

// Lists of rows that ascend.
std::vector<std::int32_t> some_of(std::int64_t rows, std::int64_t count) {
  std::vector<std::int32_t> all(static_cast<std::size_t>(rows));
  std::iota(all.begin(), all.end(), 0);
  std::mt19937 random(1);
  std::shuffle(all.begin(), all.end(), random);
  all.resize(static_cast<std::size_t>(count));
  std::sort(all.begin(), all.end());
  return all;
}

template <class Index>
std::span<const Index> indices(const std::vector<std::int32_t>& numbers) {
  std::vector<Index> list;
  for (const std::int32_t number : numbers) list.push_back(Index(number));
  return upload(list);
}

class Bench {
 public:
  Bench() {
    check(cudaStreamCreate(&stream_), "cudaStreamCreate");
    for (cudaEvent_t& event : events_) check(cudaEventCreate(&event), "cudaEventCreate");
    for (std::span<std::byte>& plane : planes_) {
      plane = allocate<std::byte>(kBytes);
      check(execution().for_each(kBytes / 4, Noise{reinterpret_cast<std::uint32_t*>(plane.data()), seed_++}));
    }
  }

  void copies() {
    measure("cudaMemcpy", "bytes", "contiguous", 2 * kBytes, [&] {
      check(cudaMemcpyAsync(planes_[1].data(), planes_[0].data(), static_cast<std::size_t>(kBytes),
                            cudaMemcpyDeviceToDevice, stream_),
            "cudaMemcpyAsync");
    });
    void* pinned = nullptr;
    check(cudaMallocHost(&pinned, static_cast<std::size_t>(kBytes)), "cudaMallocHost");
    std::memset(pinned, 0x3c, static_cast<std::size_t>(kBytes));
    measure("load of pinned memory", "bytes", "contiguous", kBytes, [&] {
      check(cudaMemcpyAsync(planes_[1].data(), pinned, static_cast<std::size_t>(kBytes), cudaMemcpyHostToDevice,
                            stream_),
            "cudaMemcpyAsync");
    });
    check(cudaFreeHost(pinned), "cudaFreeHost");
  }

  template <class Codec>
  void kernels(bool paged) {
    const std::int64_t row_bytes = kvblend::bytes_of<Codec>(kHeads * kHeadDim);
    const std::int64_t rows = kBytes / row_bytes / kBlock * kBlock;
    const auto stored = kvblend::dense_plane<Codec>(planes_[0].data(), rows, kHeads, kHeadDim);
    if (!paged) return kernels_of<Codec>("contiguous", rows, stored,
                                         kvblend::dense_plane<Codec>(planes_[1].data(), rows, kHeads, kHeadDim));
    std::vector<std::int32_t> table(static_cast<std::size_t>(rows / kBlock));
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(2));
    const kvblend::PagedLayout layout(upload(table).data(), rows / kBlock, kBlock, kHeads, kHeadDim,
                                      kBlock * row_bytes, row_bytes, row_bytes / kHeads);
    kernels_of<Codec>("paged", rows, stored, kvblend::PagedPlane<Codec>(planes_[1].data(), layout));
  }

  void print() const {
    cudaDeviceProp device;
    check(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
    std::printf("{\n  \"device\": \"%s\",\n  \"kernels\": [", device.name);
    for (std::size_t i = 0; i < figures_.size(); ++i) {
      const Figure& f = figures_[i];
      std::printf("%s\n    {\"kernel\": \"%s\", \"dtype\": \"%s\", \"layout\": \"%s\", \"ms\": %.5f, \"gbps\": %.1f, "
                  "\"of_memcpy\": %.3f}",
                  i == 0 ? "" : ",", f.kernel, f.dtype, f.layout, f.ms, f.gbps, f.gbps / figures_[0].gbps);
    }
    std::printf("\n  ]\n}\n");
  }

 private:
  struct Figure {
    const char* kernel;
    const char* dtype;
    const char* layout;
    double ms;
    double gbps;  // of the least bytes, read and written
  };

  [[nodiscard]] kvblend::cuda::StreamExecution execution() const { return kvblend::cuda::StreamExecution(stream_); }

  template <class Codec, class Plane, class Stored>
  void kernels_of(const char* layout, std::int64_t rows, const Stored& stored, const Plane& cache) {
    const char* const dtype = kvblend::to_string(Codec::dtype);
    const std::int64_t row_bytes = kvblend::bytes_of<Codec>(kHeads * kHeadDim);
    const auto spec = kvblend::plain_rope(kHeadDim, 5e5, kvblend::RopePairing::neox);
    check(spec.status);
    const kvblend::ShiftRun run{Row(0), 0, static_cast<std::int32_t>(rows), kvblend::Position(0),
                                kvblend::Position(1234)};
    std::vector<float> angles(2 * kHeadDim);
    const auto table = kvblend::RotationTable::make<kvblend::ExactAngles>(spec.value, spec.value, run, angles);
    check(table.status);
    const kvblend::RotationTable device_table = table.value.moved_to(upload(angles).data());

    const auto picked = static_cast<std::int32_t>(rows * 15 / 100);
    const auto merged = indices<Row>(some_of(rows, picked));
    const auto all = some_of(rows, rows);
    const auto which = indices<ActiveIndex>(all);
    const auto all_rows = indices<Row>(all);
    const auto scores = allocate<float>(rows);
    const auto keys = allocate<std::uint64_t>(rows);
    const auto best = allocate<ActiveIndex>(picked);
    const Operations counts(execution());
    const Operations operations(execution(),
                                allocate<std::byte>(static_cast<std::int64_t>(counts.scratch_bytes(rows, kHeads))));

    measure("shift", dtype, layout, 2 * rows * row_bytes,
            [&] { check(operations.shift(spec.value, device_table, run, stored, cache)); });
    measure("merge", dtype, layout, 2 * picked * row_bytes, [&] { check(operations.merge(stored, merged, cache)); });
    measure("score", dtype, layout, 2 * rows * row_bytes, [&] {
      check(operations.deviation(stored, which, all_rows, cache, scores));
      check(operations.top_k(scores, picked, keys, best));
    });
    measure("gather", dtype, layout, 2 * rows * row_bytes, [&] { check(operations.copy(run, cache, stored)); });
  }

  template <class Body>
  void measure(const char* kernel, const char* dtype, const char* layout, std::int64_t bytes, const Body& body) {
    std::vector<float> times;
    for (int round = -2; round < kRounds; ++round) {  // the first two warm up
      check(cudaEventRecord(events_[0], stream_), "cudaEventRecord");
      body();
      check(cudaEventRecord(events_[1], stream_), "cudaEventRecord");
      check(cudaEventSynchronize(events_[1]), kernel);
      float ms = 0;
      check(cudaEventElapsedTime(&ms, events_[0], events_[1]), "cudaEventElapsedTime");
      if (round >= 0) times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    const double ms = static_cast<double>(times[times.size() / 2]);
    figures_.push_back({kernel, dtype, layout, ms, static_cast<double>(bytes) / ms / 1e6});
  }

  cudaStream_t stream_ = nullptr;
  cudaEvent_t events_[2] = {};
  std::uint32_t seed_ = 1;
  std::span<std::byte> planes_[2];
  std::vector<Figure> figures_;
};

}  // namespace

int main() {
  using Codec = kvblend::KVBLEND_BENCH_CODEC;
  Bench bench;
  bench.copies();
  if constexpr (Codec::dtype == kvblend::DType::bf16) bench.kernels<Codec>(false);
  bench.kernels<Codec>(true);
  bench.print();
}
