// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Engine: runs a Model over a KV cache of its own. It is kvblend's reference host (LayerwiseHost and
// AttentionReportingHost), and its own full prefill goes through the same functions, which makes it an honest baseline.
#pragma once

#include <eigen_engine/kernels.hpp>
#include <eigen_engine/model.hpp>
#include <eigen_engine/thread_pool.hpp>
#include <kvblend/codec/floats.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/memory/layouts.hpp>
#include <kvblend/prompt/prompt.hpp>

#include <cstdint>
#include <span>
#include <vector>

namespace eigen_engine {

// Which rows' logits a prefill is run for. The last layer computes nothing for the others.
enum class Wanted : std::uint8_t { none, last, all };

class Engine {
 public:
  using Plane = kvblend::ContiguousPlane<kvblend::F32Codec>;

  // A cache of `max_rows` rows and all scratch memory; nothing is allocated later. Model and pool must outlive it.
  Engine(const Model& model, std::int32_t max_rows, ThreadPool& pool);

  [[nodiscard]] const ModelConfig& config() const { return model_.config(); }
  [[nodiscard]] std::int32_t capacity() const { return capacity_; }
  [[nodiscard]] std::int32_t rows() const { return rows_; }
  [[nodiscard]] std::span<const kvblend::TokenId> tokens() const { return {tokens_.data(), size_of(rows_)}; }
  [[nodiscard]] std::span<const kvblend::Position> positions() const { return {positions_.data(), size_of(rows_)}; }

  // Forgets rows from `rows` on. Errors: more rows than there are.
  kvblend::Status truncate(std::int32_t rows);
  void clear();  // also ends a blend that was begun

  // Appends tokens behind the cached rows and computes them in one pass, at consecutive positions from `first` on
  // (default: behind the last row's, 0 in an empty cache). Errors leave the cache as it was: no room, a token or
  // position outside the model, a position not behind the cache's last, a blend under way.
  kvblend::Status prefill(std::span<const kvblend::TokenId> tokens, Wanted wanted = Wanted::last,
                          kvblend::Position first = kvblend::kNextPosition);
  kvblend::Status decode(kvblend::TokenId token) { return prefill({&token, 1}); }

  // Logits of the active rows, those that came out of the last pass: `out` has [active_rows(), vocabulary] floats.
  [[nodiscard]] std::int32_t active_rows() const { return static_cast<std::int32_t>(active_.size()); }
  kvblend::Status logits(std::span<float> out);

  // LayerwiseHost, as fuse/host.hpp documents it. begin() wants a cache that holds the prompt's resident rows and
  // nothing else - truncate() it first - so that after abort() it holds what it held before.
  [[nodiscard]] std::int32_t layers() const { return config().layers; }
  [[nodiscard]] const kvblend::RopeSpec& rope(std::int32_t layer) const { return model_.rope(layer); }
  kvblend::Status begin(const kvblend::Prompt& prompt);
  kvblend::Status embed(std::span<const kvblend::Row> rows);
  kvblend::Status project(std::int32_t layer, std::span<const kvblend::Row> rows);
  [[nodiscard]] Plane fresh_keys();
  [[nodiscard]] Plane fresh_values();
  // Planes over the rows of the blend under way, or else over the cached rows.
  [[nodiscard]] Plane keys(std::int32_t layer);
  [[nodiscard]] Plane values(std::int32_t layer);
  kvblend::Status attend(std::int32_t layer, std::span<const kvblend::Row> rows,
                         std::span<const kvblend::ActiveIndex> kept);
  kvblend::Status attend_and_report(std::int32_t layer, std::span<const kvblend::Row> rows,
                                    std::span<const kvblend::ActiveIndex> kept, std::int32_t first,
                                    std::span<float> mass);
  kvblend::Status commit(std::int32_t row_count);
  void abort();

 private:
  [[nodiscard]] static std::size_t size_of(std::int32_t n) { return static_cast<std::size_t>(n); }
  [[nodiscard]] std::int32_t visible_rows() const { return pass_rows_; }
  kvblend::Status check_active(std::int32_t layer, std::span<const kvblend::Row> rows) const;
  kvblend::Status run_layer(std::int32_t layer, std::span<const kvblend::Row> rows,
                            std::span<const kvblend::ActiveIndex> kept, std::int32_t first, std::span<float> mass);
  void embed_rows(std::span<const kvblend::Row> rows);
  void project_rows(std::int32_t layer);
  void rotate_rows(std::int32_t layer);
  void store_fresh(std::int32_t layer);
  [[nodiscard]] Plane plane(Buffer& memory, std::int32_t layer);
  [[nodiscard]] MutableMatrix matrix(Buffer& buffer, std::int64_t columns) const;
  [[nodiscard]] ConstMatrix read(const Buffer& buffer, std::int64_t columns) const;

  const Model& model_;
  ThreadPool& pool_;
  const std::int32_t capacity_;
  std::int32_t rows_ = 0;       // committed
  std::int32_t pass_rows_ = 0;  // rows of the pass under way: the planes' and attention's extent
  bool blending_ = false;

  std::vector<kvblend::TokenId> tokens_;      // [capacity], by row
  std::vector<kvblend::Position> positions_;  // [capacity]
  Buffer keys_, values_;                      // [layers, capacity, kv_heads, head_dim]

  // The active set and its scratch, rows in its order.
  std::vector<kvblend::Row> active_;
  std::vector<std::int32_t> query_rows_, visible_;
  std::vector<kvblend::ActiveIndex> all_;  // 0, 1, 2, …
  std::vector<kvblend::Row> prefill_rows_;
  Buffer hidden_, normed_, qkv_, attended_, gated_;
  Buffer partial_mass_;
  Scratch scratch_;

  // Cosines then sines by row of the cache, for each rope spec that differs from those of the layers before.
  std::vector<std::int32_t> table_of_layer_;
  std::vector<const kvblend::RopeSpec*> table_specs_;
  std::vector<Buffer> tables_;
};

}  // namespace eigen_engine
