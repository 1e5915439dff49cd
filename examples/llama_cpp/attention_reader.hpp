// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// AttentionReader: where the attention of a batch goes, read from llama.cpp's graphs as they run. Without flash
// attention the weights are a node's result; with it they never lie in memory, and are computed anew from the node's
// inputs. Weights that do not add up are an error, never a result.
#pragma once

#include <kvblend/core/status.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

struct ggml_tensor;

namespace llama_cpp {

class AttentionReader {
 public:
  // Of the graphs to come. `own` are the cells of the rows of all their batches, one batch after the other; attention
  // of the rows [first, end) of those counts, and what cells [0, cells) receive is kept. Copies `own`.
  void begin(std::int32_t layers, std::int32_t cells, std::span<const std::int32_t> own, std::int32_t first,
             std::int32_t end);
  // Before each graph.
  void begin_graph();
  // Whether a node's result is wanted; asked for each node.
  bool wants(ggml_tensor* node);
  // A wanted node was computed. False: reading failed.
  bool read(ggml_tensor* node);
  // Nothing of the graph is wanted any more.
  [[nodiscard]] bool complete() const { return next_layer_ == layers_; }
  // What was wrong so far; empty: nothing.
  [[nodiscard]] const std::string& failure() const { return failure_; }
  // After the last graph. Errors: what was wrong.
  kvblend::Status finish();

  // Softmax weights paid to each cell, summed over the query heads and the rows that count.
  [[nodiscard]] std::span<const float> mass(std::int32_t layer) const {
    return std::span(mass_).subspan(index_of(layer) * index_of(cells_), index_of(cells_));
  }

 private:
  // A row's mask: what is added to its scores, -infinity for cells that it does not see. It sees [first, end) only.
  struct Seen {
    std::vector<float> mask;
    std::int64_t first = 0;
    std::int64_t end = 0;
  };

  static std::size_t index_of(std::int64_t i) { return static_cast<std::size_t>(i); }
  bool fail(const char* format, ...) __attribute__((format(printf, 2, 3)));
  bool read_weights(const ggml_tensor* node);
  bool read_flash(const ggml_tensor* node);
  bool check_shape(const ggml_tensor* queries, const ggml_tensor* mask, std::int64_t cells);
  bool read_mask(const ggml_tensor* mask, std::int64_t cells);
  void attend(const float* query, std::int64_t width, const Seen& seen);
  bool check_output(const ggml_tensor* node, std::int64_t head, std::int64_t row, const Seen& seen);
  bool add(std::span<const float> weights, const Seen& seen);
  [[nodiscard]] std::int64_t counted_from() const { return first_ > done_ ? first_ - done_ : 0; }
  [[nodiscard]] std::int64_t counted_to() const { return end_ < done_ + rows_ ? end_ - done_ : rows_; }

  std::int32_t layers_ = 0;
  std::int32_t cells_ = 0;
  std::vector<std::int32_t> own_;
  std::int32_t first_ = 0;
  std::int32_t end_ = 0;
  std::int64_t done_ = 0;  // rows of the graphs before
  std::int64_t rows_ = 0;  // of this graph; 0: not known yet
  std::int32_t next_layer_ = 0;
  std::int32_t layer_ = 0;  // of the node at hand
  std::vector<float> mass_;
  std::string failure_;

  std::vector<Seen> seen_;  // of the rows that count
  std::vector<std::byte> bytes_;
  std::vector<std::byte> queries_;
  std::vector<std::byte> rounded_;
  std::vector<float> row_;
  std::vector<float> keys_;     // of one kv head, [value][cell]
  std::vector<float> weights_;  // of one row and head
};

}  // namespace llama_cpp
