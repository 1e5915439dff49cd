// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Attention of scattered rows over cached ones: in one kernel where the device has one (flash_attention.hpp), by
// FlashInfer if it is asked for, else by matrix products: for a chunk of query rows, and all key heads at once, scores,
// a masked softmax, weights · values.
#pragma once

#include <cuda_engine/attention_mass.hpp>
#include <cuda_engine/attention_shape.hpp>
#include <cuda_engine/device.hpp>
#include <cuda_engine/flash_attention.hpp>
#include <cuda_engine/flashinfer.hpp>
#include <cuda_engine/functors.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/memory/layouts.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

namespace cuda_engine {

template <Device D>
class Attention {
 public:
  using T = typename D::Scalar;
  using Codec = typename D::Codec;

  struct Options {
    std::int64_t max_rows = 0;
    std::int64_t bytes = 0;  // of scratch for scores and weights; what one row needs at the least
    bool paged = true;       // else the cache lies in one piece from the planes' base on
    AttentionBy by = AttentionBy::own;
  };

  kvblend::Status open(D& device, const AttentionShape& shape, const Options& options) {
    shape_ = shape;
    options_ = options;
    const std::int64_t rows = options.max_rows;
    score_count_ =
        (std::max)(options.bytes / static_cast<std::int64_t>(sizeof(float) + sizeof(T)), shape.heads * stride(rows));
    if (options.by == AttentionBy::flashinfer) KVBLEND_RETURN_IF_ERROR(open_flashinfer(device));
    KVBLEND_RETURN_IF_ERROR(scores_.allocate(score_count_, "attention scores"));
    KVBLEND_RETURN_IF_ERROR(weights_.allocate(score_count_, "attention weights"));
    KVBLEND_RETURN_IF_ERROR(queries_.allocate(rows * shape.query_values(), "queries"));
    KVBLEND_RETURN_IF_ERROR(outputs_.allocate(rows * shape.query_values(), "attention outputs"));
    for (auto& gathered : gathered_) {
      KVBLEND_RETURN_IF_ERROR(gathered.allocate(options.paged ? rows * shape.key_values() : 0, "gathered rows"));
    }
    return {};
  }

  // out[i] = attention of rows[kept[i]], whose query is qkv[kept[i]], over those of the `cached` rows of the planes
  // that it sees. The first `fixed` of them are none of rows. out [kept, heads · head_dim].
  template <class Plane>
  kvblend::Status attend(D& device, const T* qkv, std::span<const Row> rows, std::span<const ActiveIndex> kept,
                         const Plane& keys, const Plane& values, std::int64_t cached, std::int64_t fixed, T* out) {
    const auto count = static_cast<std::int64_t>(kept.size());
    const std::int32_t group = shape_.group();
    const std::int32_t d = shape_.head_dim;
    // With few rows most of the device would be idle while each tile goes through the whole cache.
    if constexpr (FlashInferDevice<D>) {
      if (options_.by == AttentionBy::flashinfer && count >= kRowsOfOneKernel) {
        return flashinfer_.attend(device, qkv, rows, kept, keys, values, cached, fixed, queries_.data(), out);
      }
    }
    if constexpr (requires(const FlashAttention& args) { device.attend(args); }) {
      if (options_.by == AttentionBy::own && D::has_attention(d) && count >= kRowsOfOneKernel) {
        const double scale = 1.4426950408889634 / std::sqrt(static_cast<double>(d));
        return device.attend(FlashAttention{qkv, shape_.qkv_values(), rows.data(), kept.data(),
                                            static_cast<std::int32_t>(count), group, keys, values, out,
                                            shape_.query_values(), static_cast<float>(scale)});
      }
    }
    const T* cached_keys = nullptr;
    const T* cached_values = nullptr;
    KVBLEND_RETURN_IF_ERROR(gather(device, keys, cached, 0, cached_keys));
    KVBLEND_RETURN_IF_ERROR(gather(device, values, cached, 1, cached_values));
    KVBLEND_RETURN_IF_ERROR(device.rows(
        count, PackQueries<T>{qkv, kept.data(), queries_.data(), count, shape_.qkv_values(), shape_.heads, group, d}));
    const std::int64_t chunk = chunk_rows(count, cached);
    for (std::int64_t first = 0; first < count; first += chunk) {
      const std::int64_t size = (std::min)(chunk, count - first);
      // Kept rows ascend, so there are at least as many cached rows behind the chunk's last row as kept ones.
      const std::int64_t seen = cached - (count - first - size);
      KVBLEND_RETURN_IF_ERROR(attend_chunk(device, rows, kept.subspan(static_cast<std::size_t>(first)), cached_keys,
                                           cached_values, {first, size, count, seen, stride(cached)}));
    }
    return device.rows(count, UnpackOutputs<T>{outputs_.data(), out, count, shape_.heads, group, d});
  }

  // mass[r] += the weights, in float32, that rows[kept[i]] pay to cached row r, of all i and query heads.
  template <class Plane>
  kvblend::Status add_mass(D& device, const T* qkv, std::span<const Row> rows, std::span<const ActiveIndex> kept,
                           const Plane& keys, std::int64_t cached, float* mass) {
    const auto count = static_cast<std::int64_t>(kept.size());
    const std::int32_t group = shape_.group();
    const T* cached_keys = nullptr;
    if (count == 0) return {};
    KVBLEND_RETURN_IF_ERROR(gather(device, keys, cached, 0, cached_keys));
    KVBLEND_RETURN_IF_ERROR(
        device.rows(count, PackQueries<T>{qkv, kept.data(), queries_.data(), count, shape_.qkv_values(), shape_.heads,
                                          group, shape_.head_dim}));
    const std::int64_t most = chunk_rows(count, cached);
    for (std::int64_t first = 0; first < count; first += most) {
      const std::int64_t size = (std::min)(most, count - first);
      const Chunk chunk{first, size, count, cached - (count - first - size), stride(cached)};
      KVBLEND_RETURN_IF_ERROR(multiply_scores(device, cached_keys, chunk));
      KVBLEND_RETURN_IF_ERROR(softmax(device, rows, kept.subspan(static_cast<std::size_t>(first)), chunk,
                                      scores_.data()));  // in place
      const std::int64_t queries = size * group;
      KVBLEND_RETURN_IF_ERROR(device.execution().for_each(
          shape_.kv_heads * chunk.seen, SumQueries{scores_.data(), queries, chunk.stride, chunk.seen}));
      KVBLEND_RETURN_IF_ERROR(device.execution().for_each(
          chunk.seen, AddHeads{scores_.data(), queries * chunk.stride, shape_.kv_heads, mass}));
    }
    return {};
  }

 private:
  static constexpr std::int64_t kRowsOfOneKernel = 32;

  kvblend::Status open_flashinfer([[maybe_unused]] D& device) {
    if constexpr (FlashInferDevice<D>) {
      return flashinfer_.open(device, shape_, options_.max_rows);
    } else {
      return kvblend::Status::error(kvblend::StatusCode::unsupported,
                                    "this program was built without FlashInfer: set KVBLEND_WITH_FLASHINFER")
          .at("attention");
    }
  }

  // Rows [0, count) of a cache in one piece, [count, kv_heads · head_dim].
  template <class Plane>
  kvblend::Status gather(D& device, const Plane& plane, std::int64_t count, int part, const T*& out) {
    if (!options_.paged) {
      out = reinterpret_cast<const T*>(plane.base);
      return {};
    }
    T* const to = gathered_[part].data();
    out = to;
    const auto dense =
        kvblend::dense_plane<Codec>(reinterpret_cast<std::byte*>(to), count, shape_.kv_heads, shape_.head_dim);
    return device.rows(count, CopyRow<T, Plane, kvblend::ContiguousPlane<Codec>>{plane, dense, nullptr});
  }

  struct Chunk {
    std::int64_t first, size;  // of the kept rows
    std::int64_t count;        // of kept rows in all
    std::int64_t seen;         // cached rows that a row of the chunk may see
    std::int64_t stride;       // of scores and weights
  };

  // Scores of the chunk's queries, for all key heads.
  kvblend::Status multiply_scores(D& device, const T* keys, const Chunk& chunk) {
    const std::int64_t group = shape_.group();
    const std::int64_t d = shape_.head_dim;
    const std::int64_t score_rows = chunk.size * group;  // of a key head
    Gemm scores =
        RowMajor<T>{
            queries_.data() + chunk.first * group * d, d, keys, shape_.key_values(), true, score_rows, chunk.seen, d}
            .into(scores_.data(), chunk.stride);
    scores.batch = shape_.kv_heads;
    scores.stride_a = d;
    scores.stride_b = chunk.count * group * d;
    scores.stride_c = score_rows * chunk.stride;
    scores.alpha = static_cast<float>(1.0 / std::sqrt(static_cast<double>(d)));
    return device.multiply(scores);
  }

  // Scores to weights. `kept` from the chunk's first row on.
  template <class Weight>
  kvblend::Status softmax(D& device, std::span<const Row> rows, std::span<const ActiveIndex> kept, const Chunk& chunk,
                          Weight* weights) {
    return device.rows(
        shape_.heads * chunk.size,
        MaskedSoftmax<Weight>{scores_.data(), weights, rows.data(), kept.data(), static_cast<std::int32_t>(chunk.size),
                              shape_.group(), static_cast<std::int32_t>(chunk.seen), chunk.stride});
  }

  kvblend::Status attend_chunk(D& device, std::span<const Row> rows, std::span<const ActiveIndex> kept, const T* keys,
                               const T* values, const Chunk& chunk) {
    const std::int32_t group = shape_.group();
    const std::int64_t d = shape_.head_dim;
    const std::int64_t score_rows = chunk.size * group;  // of a key head
    KVBLEND_RETURN_IF_ERROR(multiply_scores(device, keys, chunk));
    KVBLEND_RETURN_IF_ERROR(softmax(device, rows, kept, chunk, weights_.data()));
    Gemm sums =
        RowMajor<T>{weights_.data(), chunk.stride, values, shape_.key_values(), false, score_rows, d, chunk.seen}.into(
            outputs_.data() + chunk.first * group * d, d);
    sums.batch = shape_.kv_heads;
    sums.stride_a = d;
    sums.stride_b = score_rows * chunk.stride;
    sums.stride_c = chunk.count * group * d;
    return device.multiply(sums);
  }

  // Rows of whole tensor-core tiles start at 16-byte boundaries.
  [[nodiscard]] static std::int64_t stride(std::int64_t cached) { return (cached + 63) / 64 * 64; }

  [[nodiscard]] std::int64_t chunk_rows(std::int64_t count, std::int64_t cached) const {
    const std::int64_t most = score_count_ / (shape_.heads * stride(cached));
    if (most >= count) return count;
    return most >= 32 ? most / 32 * 32 : most;
  }

  AttentionShape shape_;
  Options options_;
  std::int64_t score_count_ = 0;
  Array<D, float> scores_;  // [kv_heads, chunk, group, stride]
  Array<D, T> weights_;
  Array<D, T> queries_, outputs_;  // [kv_heads, kept, group, head_dim]
  Array<D, T> gathered_[2];        // [cached, kv_heads · head_dim]: keys, values
  FlashInfer<D> flashinfer_;       // opened if it is asked for
};

}  // namespace cuda_engine
