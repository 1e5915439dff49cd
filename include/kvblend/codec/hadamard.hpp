// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// HadamardCodec<Inner, N>: rows that llama.cpp turned by a Walsh-Hadamard matrix before it quantised them. What is
// stored of N values x is Inner(H x); decoding gives H (H x) = x.
//
// H is orthonormal, in Sylvester's order, and its own inverse: element (i, j) is (-1)^popcount(i & j) / sqrt(N), as
// llama.cpp builds it (src/llama-kv-cache.cpp, ggml_gen_hadamard). llama.cpp turns keys and values so where their cache
// type is quantised and head_dim is a multiple of 64, unless LLAMA_ATTN_ROT_DISABLE is set; hadamard_values() gives N.
// The steps and their order are those of its CPU back end (ggml/src/ggml-cpu/ops.cpp, ggml_compute_forward_fwht), so
// the floats are the same to the bit.
//
// The dtype is Inner's. Where such rows are stored as a chunk, the model's fingerprint must say that they are turned.
#pragma once

#include <kvblend/codec/codec.hpp>
#include <kvblend/core/arithmetic.hpp>
#include <kvblend/core/types.hpp>

#include <cstddef>
#include <cstdint>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// N for keys: the largest 64 * 2^k that divides head_dim; for values it is 64. 0: such rows are not turned.
[[nodiscard]] constexpr std::int32_t hadamard_values(std::int32_t head_dim) {
  if (head_dim <= 0 || head_dim % 64 != 0) return 0;
  std::int32_t values = 64;
  while (head_dim % (2 * values) == 0) values *= 2;
  return values;
}

namespace detail {

// 1 / sqrt(n) for a power of two, as single precision computes it.
[[nodiscard]] KVBLEND_HOST_DEVICE constexpr float inverse_root(std::int32_t n) {
  float root = 1;
  for (; n >= 4; n /= 4) root *= 2;
  return n == 2 ? 1.0f / (root * 0x1.6a09e6p+0f) : 1.0f / root;  // sqrt(2) to 24 bits
}

// One step of the transform: sums and differences of neighbours. Results are put so that after log2(N) steps each value
// is where it belongs, and so that every step reads and writes in the same order, which vectorises.
template <std::int32_t N>
KVBLEND_HOST_DEVICE inline void hadamard_step(const float* __restrict from, float* __restrict to) {
  KVBLEND_ROLLED
  for (std::int32_t i = 0; i < N / 2; ++i) {
    to[i] = from[2 * i] + from[2 * i + 1];
    to[i + N / 2] = from[2 * i] - from[2 * i + 1];
  }
}

// `to` = H `from`; they may be the same.
template <std::int32_t N>
KVBLEND_HOST_DEVICE void hadamard(const float* from, float* to) {
  alignas(64) float a[static_cast<std::size_t>(N)];
  alignas(64) float b[static_cast<std::size_t>(N)];
  constexpr float kScale = inverse_root(N);
#if KVBLEND_ON_DEVICE
  KVBLEND_ROLLED
  for (std::int32_t i = 0; i < N; ++i) a[i] = rounded_product(from[i], kScale);
#else
  // Hidden from the compiler, or it would fuse the product with the first step's sums, which rounds differently.
  std::uint32_t no_bits = 0;
  __asm__("" : "+r"(no_bits));
  for (std::int32_t i = 0; i < N; ++i) {
    a[i] = __builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, from[i] * kScale) ^ no_bits);
  }
#endif
  std::int32_t done = 1;
  KVBLEND_ROLLED
  for (; 4 * done < N; done *= 4) {
    hadamard_step<N>(a, b);
    hadamard_step<N>(b, a);
  }
  if (2 * done == N) {
    hadamard_step<N>(a, to);
  } else {
    hadamard_step<N>(a, b);
    hadamard_step<N>(b, to);
  }
}

}  // namespace detail

template <RunCodec Inner, std::int32_t N>
struct HadamardCodec {
  static_assert(N >= 2 && N <= kMaxHeadDim && (N & (N - 1)) == 0, "N must be a power of two");
  static_assert(N % Inner::block_values == 0, "N must be whole blocks of the inner codec");

  static constexpr DType dtype = Inner::dtype;
  static constexpr std::int32_t block_values = N;
  static constexpr std::int32_t block_bytes = N / Inner::block_values * Inner::block_bytes;

  KVBLEND_HOST_DEVICE static void decode(const std::byte* source, float* values, std::int64_t count) {
    for (std::int64_t done = 0; done < count; done += N, source += block_bytes) {
      Inner{}.decode(source, values + done, N);
      detail::hadamard<N>(values + done, values + done);
    }
  }
  KVBLEND_HOST_DEVICE static void encode(const float* values, std::byte* destination, std::int64_t count) {
    float turned[static_cast<std::size_t>(N)];
    for (std::int64_t done = 0; done < count; done += N, destination += block_bytes) {
      detail::hadamard<N>(values + done, turned);
      Inner{}.encode(turned, destination, N);
    }
  }
};

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
