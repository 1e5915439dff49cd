// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <llama_cpp/attention_reader.hpp>

#include <llama_cpp/graph_nodes.hpp>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <limits>

#include "ggml-backend.h"
#include "ggml.h"

namespace llama_cpp {

using kvblend::Status;
using kvblend::StatusCode;

namespace {

constexpr double kSumTolerance = 1e-3;
// Of the node's own result, which llama.cpp rounds to f16 on the way.
constexpr double kOutputTolerance = 3e-2;
constexpr float kHidden = -std::numeric_limits<float>::infinity();

float parameter(const ggml_tensor* node, std::size_t index) {
  float value = 0;
  std::memcpy(&value, &node->op_params[index], sizeof value);
  return value;
}

// Whether to_floats() reads rows of it.
bool holds_rows(const ggml_tensor* tensor) {
  return (tensor->type == GGML_TYPE_F32 || ggml_get_type_traits(tensor->type)->to_float != nullptr) &&
         tensor->nb[0] == ggml_type_size(tensor->type) && tensor->ne[3] == 1;
}

void to_floats(ggml_type type, const std::byte* from, float* to, std::int64_t count) {
  if (type == GGML_TYPE_F32) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
  } else {
    ggml_get_type_traits(type)->to_float(from, to, count);
  }
}

// Before they meet quantised keys, queries are quantised as well.
void round_like(ggml_type type, std::vector<float>& values, std::vector<std::byte>& scratch) {
  if (!ggml_is_quantized(type)) return;
  const auto count = static_cast<std::int64_t>(values.size());
  scratch.resize(ggml_row_size(type, count));
  ggml_quantize_chunk(type, values.data(), scratch.data(), 0, 1, count, nullptr);
  to_floats(type, scratch.data(), values.data(), count);
}

void get_all(const ggml_tensor* tensor, std::vector<std::byte>& into) {
  into.resize(ggml_nbytes(tensor));
  ggml_backend_tensor_get(tensor, into.data(), 0, into.size());
}

}  // namespace

void AttentionReader::begin(std::int32_t layers, std::int32_t cells, std::span<const std::int32_t> own,
                            std::int32_t first, std::int32_t end) {
  layers_ = next_layer_ = layers;
  cells_ = cells;
  own_.assign(own.begin(), own.end());
  first_ = first;
  end_ = end;
  done_ = rows_ = 0;
  mass_.assign(index_of(layers) * index_of(cells), 0.0f);
  failure_.clear();
}

bool AttentionReader::fail(const char* format, ...) {
  if (!failure_.empty()) return false;
  char text[160];
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  failure_ = text;
  return false;
}

void AttentionReader::begin_graph() {
  if (!complete()) fail("attention of layer %d is not where it was looked for", next_layer_);
  done_ += rows_;
  rows_ = 0;
}

Status AttentionReader::finish() {
  begin_graph();
  if (done_ < end_) fail("the graph has no attention where it was looked for");
  if (failure_.empty()) return {};
  return Status::error(StatusCode::host_error, "%s", failure_.c_str()).at("attention");
}

bool AttentionReader::wants(ggml_tensor* node) {
  std::int32_t layer = -1;
  if (mask_of(node, layer) == nullptr) return false;
  if (rows_ == 0) {
    rows_ = node->op == GGML_OP_FLASH_ATTN_EXT ? node->src[0]->ne[1] : node->ne[1];
    if (counted_from() < counted_to()) {
      next_layer_ = 0;
      seen_.clear();
    }
  }
  return !complete();
}

bool AttentionReader::read(ggml_tensor* node) {
  mask_of(node, layer_);
  if (layer_ != next_layer_) return fail("attention of layer %d comes where %d was expected", layer_, next_layer_);
  if (max_bias_of(node) != 0) return fail("attention of layer %d is biased by distance", layer_);
  // Sinks take a share of the weights that goes to no cell.
  const ggml_tensor* sinks = node->op == GGML_OP_FLASH_ATTN_EXT ? node->src[4] : node->src[2];
  if (sinks != nullptr) return fail("attention of layer %d has sinks", layer_);
  if (!(node->op == GGML_OP_FLASH_ATTN_EXT ? read_flash(node) : read_weights(node))) return false;
  ++next_layer_;
  return true;
}

bool AttentionReader::check_shape(const ggml_tensor* queries, const ggml_tensor* mask, std::int64_t cells) {
  const bool fits = queries->type == GGML_TYPE_F32 && queries->nb[0] == sizeof(float) && queries->ne[1] == rows_ &&
                    queries->ne[3] == 1 && mask->ne[0] >= cells && mask->ne[1] >= rows_ && mask->ne[2] == 1 &&
                    mask->ne[3] == 1 && holds_rows(mask) &&
                    counted_to() + done_ <= static_cast<std::int64_t>(own_.size());
  return fits || fail("attention of layer %d is of another shape than one sequence's", layer_);
}

// Which cells the rows see: those from some one on up to their own, as cells are in the order of positions.
bool AttentionReader::read_mask(const ggml_tensor* mask, std::int64_t cells) {
  seen_.resize(index_of(counted_to() - counted_from()));
  row_.resize(index_of(mask->ne[0]));
  bytes_.resize(ggml_row_size(mask->type, mask->ne[0]));
  for (std::int64_t row = counted_from(); row < counted_to(); ++row) {
    Seen& seen = seen_[index_of(row - counted_from())];
    ggml_backend_tensor_get(mask, bytes_.data(), index_of(row) * mask->nb[1], bytes_.size());
    to_floats(mask->type, bytes_.data(), row_.data(), mask->ne[0]);
    seen.mask.assign(row_.begin(), row_.begin() + cells);
    const auto visible = [](float value) { return value > kHidden; };
    const auto first = std::find_if(seen.mask.begin(), seen.mask.end(), visible);
    const auto end = std::find_if_not(first, seen.mask.end(), visible);
    seen.first = first - seen.mask.begin();
    seen.end = end - seen.mask.begin();
    if (seen.end != own_[index_of(done_ + row)] + 1 || std::find_if(end, seen.mask.end(), visible) != seen.mask.end()) {
      return fail("in layer %d the row in cell %d sees others than the cells before it", layer_,
                  own_[index_of(done_ + row)]);
    }
  }
  return true;
}

// The weights of one row and head, over all cells that the graph has.
bool AttentionReader::add(std::span<const float> weights, const Seen& seen) {
  double sum = 0;
  for (const float weight : weights) sum += static_cast<double>(weight);
  if (!(std::abs(sum - 1) <= kSumTolerance)) return fail("weights of layer %d sum to %g", layer_, sum);
  float* const to = mass_.data() + index_of(layer_) * index_of(cells_);
  const auto end = std::min<std::int64_t>(seen.end, cells_);
  for (std::int64_t cell = seen.first; cell < end; ++cell) to[cell] += weights[index_of(cell)];
  return true;
}

bool AttentionReader::read_weights(const ggml_tensor* node) {
  const std::int64_t cells = node->ne[0];
  if (!check_shape(node, node->src[1], cells) || !read_mask(node->src[1], cells)) return false;
  weights_.resize(index_of(cells));
  for (std::int64_t head = 0; head < node->ne[2]; ++head) {
    for (std::int64_t row = counted_from(); row < counted_to(); ++row) {
      ggml_backend_tensor_get(node, weights_.data(), index_of(head) * node->nb[2] + index_of(row) * node->nb[1],
                              weights_.size() * sizeof(float));
      if (!add(weights_, seen_[index_of(row - counted_from())])) return false;
    }
  }
  return true;
}

// What the node computes: softmax(scale q·k, capped if it has a cap, + mask).
bool AttentionReader::read_flash(const ggml_tensor* node) {
  const ggml_tensor* queries = node->src[0];
  const ggml_tensor* keys = node->src[1];
  const std::int64_t width = keys->ne[0];
  const std::int64_t cells = keys->ne[1];
  if (!check_shape(queries, node->src[3], cells)) return false;
  if (!holds_rows(keys) || queries->ne[0] != width || queries->ne[2] % keys->ne[2] != 0) {
    return fail("keys of layer %d do not go with its queries", layer_);
  }
  if (!read_mask(node->src[3], cells)) return false;
  const float cap = parameter(node, 2);
  const float scale = cap != 0 ? parameter(node, 0) / cap : parameter(node, 0);
  get_all(queries, queries_);
  get_all(keys, bytes_);
  keys_.resize(index_of(width * cells));
  row_.resize(index_of(width));
  const std::int64_t group = queries->ne[2] / keys->ne[2];
  for (std::int64_t head = 0; head < queries->ne[2]; ++head) {
    if (head % group == 0) {
      for (std::int64_t cell = 0; cell < cells; ++cell) {
        const std::size_t at = index_of(cell) * keys->nb[1] + index_of(head / group) * keys->nb[2];
        to_floats(keys->type, bytes_.data() + at, row_.data(), width);
        for (std::int64_t d = 0; d < width; ++d) keys_[index_of(d * cells + cell)] = row_[index_of(d)];
      }
    }
    for (std::int64_t row = counted_from(); row < counted_to(); ++row) {
      const Seen& seen = seen_[index_of(row - counted_from())];
      const std::size_t at = index_of(row) * queries->nb[1] + index_of(head) * queries->nb[2];
      std::memcpy(row_.data(), queries_.data() + at, index_of(width) * sizeof(float));
      round_like(keys->type, row_, rounded_);
      for (float& value : row_) value *= scale;
      weights_.assign(index_of(cells), 0.0f);
      attend(row_.data(), width, seen);
      if (cap != 0) {
        for (float& score : weights_) score = cap * std::tanh(score);
      }
      double sum = 0;
      float largest = kHidden;
      for (std::int64_t cell = seen.first; cell < seen.end; ++cell) {
        weights_[index_of(cell)] += seen.mask[index_of(cell)];
        largest = std::max(largest, weights_[index_of(cell)]);
      }
      for (std::int64_t cell = 0; cell < cells; ++cell) {
        float& weight = weights_[index_of(cell)];
        weight = cell >= seen.first && cell < seen.end ? std::exp(weight - largest) : 0.0f;
        sum += static_cast<double>(weight);
      }
      for (float& weight : weights_) weight = static_cast<float>(static_cast<double>(weight) / sum);
      if (!add(weights_, seen)) return false;
      const bool last = row + 1 == counted_to() && head + 1 == queries->ne[2];
      if (last && !check_output(node, head, row, seen)) return false;
    }
  }
  return true;
}

// Scores of the cells that are seen, added to weights_. Cell by cell inside, which compilers turn into vector code.
void AttentionReader::attend(const float* query, std::int64_t width, const Seen& seen) {
  const std::int64_t cells = static_cast<std::int64_t>(keys_.size()) / width;
  float* const scores = weights_.data() + seen.first;
  const std::int64_t count = seen.end - seen.first;
  for (std::int64_t d = 0; d < width; ++d) {
    const float q = query[d];
    const float* const keys = keys_.data() + d * cells + seen.first;
    for (std::int64_t i = 0; i < count; ++i) scores[i] += q * keys[i];
  }
}

// Weights that were computed here must give what the node gives: those in weights_, times the values.
bool AttentionReader::check_output(const ggml_tensor* node, std::int64_t head, std::int64_t row, const Seen& seen) {
  const ggml_tensor* values = node->src[2];
  if (!holds_rows(values) || values->ne[1] < seen.end || node->type != GGML_TYPE_F32 || node->ne[0] != values->ne[0] ||
      node->src[0]->ne[2] % values->ne[2] != 0) {
    return fail("values of layer %d do not go with its keys", layer_);
  }
  const std::int64_t width = values->ne[0];
  const std::size_t kv_head = index_of(head / (node->src[0]->ne[2] / values->ne[2]));
  std::vector<double> expected(index_of(width), 0.0);
  double size = 0;  // what the sum could come to
  row_.resize(index_of(width));
  get_all(values, bytes_);
  for (std::int64_t cell = seen.first; cell < seen.end; ++cell) {
    to_floats(values->type, bytes_.data() + index_of(cell) * values->nb[1] + kv_head * values->nb[2], row_.data(),
              width);
    double squares = 0;
    for (std::size_t d = 0; d < row_.size(); ++d) {
      const auto value = static_cast<double>(row_[d]);
      expected[d] += static_cast<double>(weights_[index_of(cell)]) * value;
      squares += value * value;
    }
    size += static_cast<double>(weights_[index_of(cell)]) * std::sqrt(squares);
  }
  ggml_backend_tensor_get(node, row_.data(), index_of(head) * node->nb[1] + index_of(row) * node->nb[2],
                          row_.size() * sizeof(float));
  double squares = 0;
  for (std::size_t d = 0; d < row_.size(); ++d) {
    const double off = static_cast<double>(row_[d]) - expected[d];
    squares += off * off;
  }
  const double off = std::sqrt(squares);
  return off <= kOutputTolerance * size ||
         fail("weights of layer %d give a result that is off by %g", layer_, off / size);
}

}  // namespace llama_cpp
