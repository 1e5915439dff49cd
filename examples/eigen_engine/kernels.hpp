// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The engine's arithmetic over plain arrays. A row's result depends neither on the rows that run with it nor on the number
// of threads, to the bit. Eigen stays inside kernels.cpp.
//
// Matrices are row-major; `stride` is floats from row to row. Activations start at 64-byte boundaries and have strides
// that are multiples of 16 floats.
#pragma once

#include <eigen_engine/buffer.hpp>
#include <eigen_engine/thread_pool.hpp>

#include <cstdint>

namespace eigen_engine {

struct ConstMatrix {
  const float* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t stride = 0;
};

struct MutableMatrix {
  float* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t stride = 0;
  bool padded = false;  // up to kRowPadding rows behind the last may be written, and read of the other factor
};

// Rows behind the last that activations, and keys and values of a cache, have memory for. What is in them is finite and
// decides nothing.
inline constexpr std::int64_t kRowPadding = 3;
inline constexpr std::int64_t kContextPadding = 48;

// Floats of scratch a worker needs, for any call below.
[[nodiscard]] std::int64_t scratch_floats(std::int64_t max_rows, std::int64_t head_dim, std::int64_t group);

// One buffer a worker.
struct Scratch {
  Buffer memory;
  std::int64_t floats_per_worker = 0;
  [[nodiscard]] float* of(std::int32_t worker) { return memory.data() + worker * floats_per_worker; }
};

// y = x · wᵀ, or y += x · wᵀ. x [rows, k], w [columns, k] dense, y [rows, columns].
void multiply(ThreadPool& pool, ConstMatrix x, const float* w, MutableMatrix y, bool accumulate);

// y = silu(x · gateᵀ) ∘ (x · upᵀ), with gate and up interleaved as Model has them. y [rows, feed_forward].
void multiply_gated(ThreadPool& pool, ConstMatrix x, const float* gate_up, MutableMatrix y, Scratch& scratch);

// y[i] = x[i] / rms(x[i]) ∘ weight.
void normalise(ThreadPool& pool, ConstMatrix x, const float* weight, float epsilon, MutableMatrix y);

// Attention of some rows over a cache of keys and values.
struct Attention {
  const float* queries = nullptr;  // query of row i at queries + query_rows[i]·query_stride, heads one after the
  std::int64_t query_stride = 0;   // other; not yet scaled
  const std::int32_t* query_rows = nullptr;
  const std::int32_t* visible = nullptr;  // row i sees cached rows [0, visible[i])
  std::int64_t rows = 0;
  const float* keys = nullptr;  // [cached rows, kv_heads, head_dim], and kContextPadding rows of memory behind
  const float* values = nullptr;
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;
  MutableMatrix out;  // [rows, heads·head_dim]
  // Where to report attention weights, or null: mass[r] grows by what rows [mass_first, rows) pay to cached row r,
  // summed over heads; r < mass_rows. `partial` holds mass_partials(…)·mass_rows floats.
  float* mass = nullptr;
  std::int64_t mass_first = 0;
  std::int64_t mass_rows = 0;
  float* partial = nullptr;
};
[[nodiscard]] std::int64_t mass_partials(std::int64_t rows, std::int64_t heads, std::int64_t kv_heads);
void attend(ThreadPool& pool, const Attention& attention, Scratch& scratch);

}  // namespace eigen_engine
