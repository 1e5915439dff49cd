// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The functions that host and device share, called by kernels: each codec, the rotation of paged planes, deviations,
// ranks. Every .cu that includes this has them all; where there is a GPU it runs them, and compares with the host.
#pragma once

#include <kvblend/codec/floats.hpp>
#include <kvblend/codec/fp8.hpp>
#include <kvblend/codec/ggml_blocks.hpp>
#include <kvblend/codec/scaled.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/memory/layouts.hpp>
#include <kvblend/memory/rows.hpp>
#include <kvblend/rope/angles.hpp>
#include <kvblend/rope/rotate.hpp>
#include <kvblend/rope/spec.hpp>
#include <kvblend/select/deviation.hpp>
#include <kvblend/select/top_k.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <cuda_runtime_api.h>
#include <type_traits>

namespace device_functions {

using namespace kvblend;

constexpr std::int32_t kRows = 48;
constexpr std::int32_t kHeads = 2;
constexpr std::int32_t kHeadDim = 96;  // 32 values turn, 32 on either side stay
constexpr std::int32_t kValues = kRows * kHeads * kHeadDim;
constexpr std::int32_t kBlockRows = 16;

// What kernels work on, in one piece of memory that host and device share.
struct Shared {
  float values[kValues];
  float decoded[kValues];
  alignas(16) std::byte stored[kValues * 4 + 16];  // runs start at 16 bytes, and a byte behind
  alignas(16) std::byte turned[kValues * 4];
  float table[32];
  double squares;
  float scores[kRows];
  std::uint32_t ranks[kRows];
  std::int32_t block_table[kRows / kBlockRows];
  Row rows[3];
  bool orders;
};

// Plane parameters must look alike to both compilers.
static_assert(sizeof(Plane<F16Codec, PagedLayout>) == sizeof(std::byte*) + sizeof(PagedLayout));
static_assert(sizeof(RopeShape) == 16 && sizeof(RotationTable) == 16);
static_assert(std::is_trivially_copyable_v<RopeShape> && std::is_trivially_copyable_v<RopeSpec> &&
              std::is_trivially_copyable_v<Plane<Scaled<Fp8E4M3Codec, TensorScale>, PagedLayout>>);

template <class C>
KVBLEND_HOST_DEVICE PagedPlane<C> paged(std::byte* base, const std::int32_t* block_table, C codec) {
  const std::int64_t head = bytes_of<C>(kHeadDim);
  return {base, PagedLayout(block_table, kRows / kBlockRows, kBlockRows, kHeads, kHeadDim, kBlockRows * kHeads * head,
                            kHeads * head, head), codec};
}

// Item i encodes, and decodes again, 32 values.
template <class C>
KVBLEND_HOST_DEVICE void recode(C codec, Shared& shared, std::int32_t skew, std::int32_t i) {
  std::byte* const at = shared.stored + skew + bytes_of<C>(32 * i);
  codec.encode(shared.values + 32 * i, at, 32);
  codec.decode(at, shared.decoded + 32 * i, 32);
}

// Item i turns one head of one row.
template <class C>
KVBLEND_HOST_DEVICE void rotate(C codec, Shared& shared, RopeShape shape, RotationTable table, std::int32_t i) {
  const auto source = paged(shared.stored, shared.block_table, codec);
  const auto destination = paged(shared.turned, shared.block_table, codec);
  const std::int32_t row = i / kHeads;
  kvblend::detail::rotate_head<PortableRotation>(shape, table.cosines(row), table.sines(row), source, row, destination,
                                                 row, i % kHeads);
}

KVBLEND_HOST_DEVICE inline void score(Shared& shared) {
  shared.squares = PortableDistance::squared(shared.values, shared.decoded, kValues);
  for (int i = 0; i < kRows; ++i) shared.ranks[i] = score_rank(shared.scores[i]);
  const Row* rows = shared.rows;
  shared.orders = rows[0] < rows[1] && rows[1] > rows[0] && rows[0] <= rows[1] && rows[1] >= rows[0] &&
                  rows[0] != rows[1] && rows[0] == rows[2] && rows[0] + 1 == rows[1] && rows[1] - rows[0] == 1;
}

template <class C>
__global__ void recode_kernel(C codec, Shared* shared, std::int32_t skew) {
  recode(codec, *shared, skew, static_cast<std::int32_t>(threadIdx.x));
}
template <class C>
__global__ void rotate_kernel(C codec, Shared* shared, RopeShape shape, RotationTable table) {
  rotate(codec, *shared, shape, table, static_cast<std::int32_t>(threadIdx.x));
}
template <class Unused>
__global__ void score_kernel(Shared* shared) {
  score(*shared);
}
template <class P, class Q>
__global__ void copy_kernel(P source, Q destination) {
  copy_row(source, threadIdx.x, destination, threadIdx.x);
}

inline bool ran(const char* what) {
  cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error != cudaSuccess) std::printf("%s: %s\n", what, cudaGetErrorString(error));
  return error == cudaSuccess;
}

inline void fill(Shared& shared) {
  std::uint32_t state = 1;
  for (std::int32_t i = 0; i < kValues; ++i) {
    state = state * 1664525u + 1013904223u;
    shared.values[i] = std::ldexp(static_cast<float>(static_cast<std::int32_t>(state)) * 0x1p-31f,
                                  static_cast<int>(state >> 8 & 7u));
  }
  for (std::int32_t pair = 0; pair < 16; ++pair) {
    shared.table[pair] = std::cos(static_cast<float>(pair));
    shared.table[16 + pair] = std::sin(static_cast<float>(pair));
  }
  for (std::int32_t i = 0; i < kRows; ++i) shared.scores[i] = shared.values[7 * i];
  shared.scores[5] = INFINITY;
  shared.scores[6] = -NAN;
  shared.scores[7] = -0.0f;
  shared.block_table[0] = 2;
  shared.block_table[1] = 0;
  shared.block_table[2] = 1;
  shared.rows[0] = shared.rows[2] = Row(4);
  shared.rows[1] = Row(5);
}

// The same bits from both; turned ones, of which a device rounds fewer parts, up to two steps
// of a codec whose numbers below 256 are within `unit` of any, relatively.
template <class C>
bool same(const char* name, C codec, Shared* device, Shared* host, float unit) {
  for (const std::int32_t skew : {1, 0}) {
    recode_kernel<<<1, kValues / 32>>>(codec, device, skew);
    if (!ran(name)) return false;
    for (std::int32_t i = 0; i < kValues / 32; ++i) recode(codec, *host, skew, i);
    if (std::memcmp(device->stored + skew, host->stored + skew, static_cast<std::size_t>(bytes_of<C>(kValues))) != 0 ||
        std::memcmp(device->decoded, host->decoded, sizeof host->decoded) != 0) {
      std::printf("%s: other bits than the host's, %d bytes from a multiple of 16\n", name, skew);
      return false;
    }
  }
  RopeShape shape;
  shape.head_dim = kHeadDim;
  shape.rotary_dim = shape.rotary_offset = 32;
  float scratch[32];
  ShiftRun run;
  run.count = kRows;
  run.new_first = Position(7);
  RopeSpec spec;
  static_cast<RopeShape&>(spec) = shape;
  for (std::size_t pair = 0; pair < 16; ++pair) spec.inv_freq[pair] = 0.25;
  const auto made = RotationTable::make<ExactAngles>(spec, spec, run, scratch);
  rotate_kernel<<<1, kRows * kHeads>>>(codec, device, shape, made.value.moved_to(device->table));
  if (!ran(name)) return false;
  for (std::int32_t i = 0; i < kRows * kHeads; ++i) {
    rotate(codec, *host, shape, made.value.moved_to(host->table), i);
  }
  for (std::int32_t i = 0; i < kValues / 32; ++i) {
    codec.decode(device->turned + bytes_of<C>(32 * i), device->decoded + 32 * i, 32);
    codec.decode(host->turned + bytes_of<C>(32 * i), host->decoded + 32 * i, 32);
  }
  for (std::int32_t i = 0; i < kValues; ++i) {
    const float a = device->decoded[i], b = host->decoded[i];
    const float allowed = i / 32 % 3 == 1 ? unit * 512 : 0;
    if (!(std::fabs(a - b) <= allowed)) {
      std::printf("%s: value %d turned to %g, the host's to %g\n", name, i, static_cast<double>(a),
                  static_cast<double>(b));
      return false;
    }
  }
  return true;
}

inline int run() {
  int devices = 0;
  int major = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0 ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) != cudaSuccess || major < 8) {
    std::printf("skipped: there is no GPU that this was compiled for\n");
    return 0;
  }
  Shared* device = nullptr;
  if (cudaMallocManaged(reinterpret_cast<void**>(&device), sizeof(Shared)) != cudaSuccess) return 1;
  auto* host = new Shared;
  fill(*device);
  fill(*host);
  bool ok = same("f32", F32Codec{}, device, host, 0x1p-24f) && same("f16", F16Codec{}, device, host, 0x1p-11f) &&
            same("bf16", Bf16Codec{}, device, host, 0x1p-8f) && same("e4m3", Fp8E4M3Codec{}, device, host, 0x1p-4f) &&
            same("e5m2", Fp8E5M2Codec{}, device, host, 0x1p-3f) && same("q8_0", Q8_0Codec{}, device, host, 0x1p-7f) &&
            same("q4_0", Q4_0Codec{}, device, host, 0x1p-3f) &&
            same("scaled", ScaledRun<Fp8E4M3Codec>{0.3f}, device, host, 0x1p-4f);
  if (ok) {
    std::memcpy(device->decoded, host->decoded, sizeof host->decoded);
    score_kernel<int><<<1, 1>>>(device);
    ok = ran("score");
    score(*host);
    if (ok && (std::memcmp(&device->squares, &host->squares, sizeof(double)) != 0 ||
               std::memcmp(device->ranks, host->ranks, sizeof host->ranks) != 0 || !device->orders || !host->orders)) {
      std::printf("scores: other bits than the host's\n");
      ok = false;
    }
  }
  using Scaled8 = Scaled<Fp8E4M3Codec, TokenScales<ContiguousLayout>>;
  if (ok) {
    const auto source = paged(device->stored, device->block_table, F32Codec{});
    const auto destination = paged(
        device->turned, device->block_table,
        Scaled8(TokenScales<ContiguousLayout>(reinterpret_cast<std::byte*>(device->decoded),
                                              ContiguousLayout(kRows, kHeads, 1, kHeads * 4, 4))));
    recode_kernel<<<1, kValues / 32>>>(F32Codec{}, device, 0);
    copy_kernel<<<1, kRows>>>(source, destination);
    ok = ran("copy");
  }
  delete host;
  static_cast<void>(cudaFree(device));
  std::printf("%s\n", ok ? "the device agrees with the host" : "FAILED");
  return ok ? 0 : 1;
}

}  // namespace device_functions
