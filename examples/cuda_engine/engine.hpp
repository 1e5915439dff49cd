// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Engine: a llama-family forward pass over a paged KV cache in a device's memory. It satisfies LayerwiseHost; its own
// prefill goes through the same functions.
#pragma once

#include <cuda_engine/attention.hpp>
#include <cuda_engine/attention_shape.hpp>
#include <cuda_engine/device.hpp>
#include <cuda_engine/functors.hpp>
#include <cuda_engine/weights.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/memory/layouts.hpp>
#include <kvblend/memory/pools.hpp>
#include <kvblend/prompt/prompt.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace cuda_engine {

using kvblend::Position;
using kvblend::Prompt;
using kvblend::Segment;

// Which rows' logits a prefill is run for. The last layer computes nothing for the others.
enum class Wanted : std::uint8_t { none, last, all };

struct EngineOptions {
  std::int32_t max_rows = 0;
  std::int32_t block_size = 16;               // rows of a block of the cache
  std::span<const std::int32_t> block_table;  // blocks 0, 1, 2, … in the order they are used in; empty: in order
  AttentionBy attention = AttentionBy::own;
  std::int64_t attention_bytes = std::int64_t{1} << 28;  // scratch of attention: larger is fewer, longer steps
};

// All spans of rows and indices that it is given, and what its planes point to, block tables included, are device
// memory. Once open, it allocates nothing, and everything but logits' reader only queues work: a pass can be captured.
// Device and weights must outlive it. begin() and prefill() write host memory that their uploads read: rows that a pass
// used before may be used again once the device has finished with it.
template <Device D>
class Engine {
 public:
  using T = typename D::Scalar;
  using Codec = typename D::Codec;
  using CachePlane = kvblend::PagedPlane<Codec>;
  using FreshPlane = kvblend::ContiguousPlane<Codec>;

  Engine(D& device, const Weights<D>& weights) : device_(device), weights_(weights) {}

  // Allocates. Errors: sizes that make no sense, memory that is not to be had, a rope with several axes.
  Status open(const EngineOptions& options);

  [[nodiscard]] const ModelConfig& config() const { return weights_.config(); }
  [[nodiscard]] std::int32_t capacity() const { return capacity_; }
  [[nodiscard]] std::int32_t rows() const { return rows_; }
  [[nodiscard]] std::int32_t active_rows() const { return active_; }

  Status truncate(std::int32_t rows);
  void clear() {
    abort();
    rows_ = pass_rows_ = 0;
  }

  // Appends tokens behind the cached rows, at the positions that follow the last row's or from `first` on. `tokens` is
  // host memory. Errors leave the cache as it was.
  Status prefill(std::span<const TokenId> tokens, Wanted wanted = Wanted::last,
                 Position first = kvblend::kNextPosition);
  Status decode(TokenId token) { return prefill({&token, 1}); }

  // Logits of the rows that came out of the last pass, into `out`, [active_rows(), vocabulary] floats of the device.
  Status logits(std::span<float> out);

  // AttentionReportingHost, as fuse/host.hpp documents it. begin() wants a cache that holds the prompt's resident rows
  // and nothing else. That device rows ascend and are within the prompt is the caller's part: nothing here reads them.
  [[nodiscard]] std::int32_t layers() const { return config().layers; }
  [[nodiscard]] const RopeSpec& rope(std::int32_t layer) const { return weights_.layer(layer).rope; }
  Status begin(const Prompt& prompt);
  Status embed(std::span<const Row> rows);
  Status project(std::int32_t layer, std::span<const Row> rows);
  [[nodiscard]] FreshPlane fresh_keys();
  [[nodiscard]] FreshPlane fresh_values();
  [[nodiscard]] CachePlane keys(std::int32_t layer) { return cache(layer, 0); }
  [[nodiscard]] CachePlane values(std::int32_t layer) { return cache(layer, 1); }
  Status attend(std::int32_t layer, std::span<const Row> rows, std::span<const ActiveIndex> kept);
  Status attend_and_report(std::int32_t layer, std::span<const Row> rows, std::span<const ActiveIndex> kept,
                           std::int32_t first, std::span<float> mass) {
    KVBLEND_RETURN_IF_ERROR(check_pass(layer, rows));
    if (first < 0 || mass.size() != size_of(pass_rows_)) {
      return Status::error(StatusCode::invalid_argument, "%zu floats for %d rows, from kept row %d on", mass.size(),
                           pass_rows_, first)
          .at("mass of layer %d", layer);
    }
    const std::span<const ActiveIndex> asking = kept.subspan((std::min)(size_of(first), kept.size()));
    KVBLEND_RETURN_IF_ERROR(
        attention_.add_mass(device_, qkv_.data(), rows, asking, keys(layer), pass_rows_, mass.data()));
    return run_layer(layer, rows, kept);
  }
  Status commit(std::int32_t row_count);
  void abort() {
    blending_ = false;
    pass_rows_ = rows_;
    active_ = 0;
  }

 private:
  [[nodiscard]] static std::size_t size_of(std::int64_t n) { return static_cast<std::size_t>(n); }
  [[nodiscard]] CachePlane cache(std::int32_t layer, std::int64_t part);
  Status open_cache(const EngineOptions& options);
  Status open_tables();
  Status check_token(std::int32_t row, TokenId token, std::int64_t position) const;
  Status upload_rows(std::int32_t first, std::int32_t end);
  Status check_pass(std::int32_t layer, std::span<const Row> rows) const;
  Status store_fresh(std::int32_t layer, std::span<const Row> rows);
  Status run_layer(std::int32_t layer, std::span<const Row> rows, std::span<const ActiveIndex> kept);
  // y = x · wᵀ + keep · y for the active rows, all dense.
  template <class Y>
  Status multiply(const T* x, std::int64_t inner, const T* w, Y* y, std::int64_t columns, float keep = 0);
  Status normalise(const float* weight);

  D& device_;
  const Weights<D>& weights_;
  std::int32_t capacity_ = 0;
  std::int32_t rows_ = 0;       // committed
  std::int32_t pass_rows_ = 0;  // rows of the pass under way: the planes' and attention's extent
  std::int32_t active_ = 0;
  bool blending_ = false;

  // By row, on the host and on the device.
  Array<D, TokenId, Where::host> host_tokens_;
  Array<D, std::int32_t, Where::host> host_positions_;
  Array<D, TokenId> tokens_;
  Array<D, std::int32_t> positions_;

  kvblend::BlockPool pool_;       // of a layer's keys, or values
  std::int64_t pool_values_ = 0;  // Scalars of it
  std::int64_t table_entries_ = 0;
  Array<D, T> cache_;  // [layers, keys and values, blocks, …]
  Array<D, std::int32_t> block_table_;
  bool in_order_ = true;  // the table is 0, 1, 2, …: the cache is one piece

  Array<D, Row> all_rows_;             // 0, 1, 2, …
  Array<D, ActiveIndex> all_indices_;  // 0, 1, 2, …
  Array<D, T> hidden_, kept_hidden_;   // [active, hidden]; they change places
  T* hidden_now_ = nullptr;
  T* hidden_next_ = nullptr;
  Array<D, T> normed_, qkv_, attended_, gate_up_, gated_;
  Attention<D> attention_;

  // By position, for each rope that differs from those of the layers before: see TurnRow.
  std::vector<std::int32_t> table_of_layer_;
  std::vector<Array<D, float>> tables_;
};

}  // namespace cuda_engine

#include <cuda_engine/engine_impl.hpp>
