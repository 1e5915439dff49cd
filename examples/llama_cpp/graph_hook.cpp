// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <llama_cpp/graph_hook.hpp>

#include <llama_cpp/attention_reader.hpp>
#include <llama_cpp/graph_nodes.hpp>

#include <kvblend/fuse/stopwatch.hpp>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

#include "ggml-backend.h"
#include "ggml.h"

namespace llama_cpp {

using kvblend::Status;
using kvblend::StatusCode;

namespace {

std::size_t index_of(std::int32_t i) { return static_cast<std::size_t>(i); }

constexpr std::int64_t kCellStep = 256;  // llama.cpp gives attention cells in such steps

constexpr std::uint16_t kVisibleF16 = 0;
constexpr std::uint16_t kHiddenF16 = 0xfc00;  // -infinity

// Which cells row `row` of a mask lets through.
bool read_mask_row(const ggml_tensor* mask, std::int64_t row, std::vector<std::byte>& scratch,
                   std::vector<bool>& visible, bool& plain) {
  const auto cells = static_cast<std::size_t>(mask->ne[0]);
  if ((mask->type != GGML_TYPE_F16 && mask->type != GGML_TYPE_F32) || row >= mask->ne[1]) return false;
  const std::size_t bytes = ggml_row_size(mask->type, mask->ne[0]);
  scratch.resize(bytes);
  ggml_backend_tensor_get(mask, scratch.data(), static_cast<std::size_t>(row) * mask->nb[1], bytes);
  visible.assign(cells, false);
  plain = true;
  for (std::size_t cell = 0; cell < cells; ++cell) {
    float value = 0;
    if (mask->type == GGML_TYPE_F16) {
      ggml_fp16_t half = 0;
      std::memcpy(&half, scratch.data() + cell * sizeof half, sizeof half);
      value = ggml_fp16_to_fp32(half);
    } else {
      std::memcpy(&value, scratch.data() + cell * sizeof value, sizeof value);
    }
    visible[cell] = value > -std::numeric_limits<float>::infinity();
    if (visible[cell] && value != 0) plain = false;
  }
  return true;
}

}  // namespace

bool GraphHook::callback(ggml_tensor* node, bool ask, void* self) {
  auto& hook = *static_cast<GraphHook*>(self);
  if (!ask) {
    hook.stopped_ = !hook.done(node);
    return !hook.stopped_;
  }
  if (hook.stopped_) hook.skip(node);
  return !hook.stopped_ && hook.ask(node);
}

void GraphHook::begin_graph() {
  stopped_ = false;
  if (reader_ != nullptr) reader_->begin_graph();
}

void GraphHook::observe(Observation& out) {
  mode_ = Mode::observe;
  observation_ = &out;
  out = {};
}

void GraphHook::capture(Capture& out) {
  mode_ = Mode::capture;
  capture_ = &out;
  key_done_ = value_done_ = false;
}

void GraphHook::rewrite(const Rewrite& what) {
  mode_ = Mode::rewrite;
  rewrite_ = what;
  nodes_.clear();
  inputs_.clear();
  entered_ = what.range.first == 0;
  left_ = what.range.end == what.layers;
  saw_positions_ = saw_cells_ = saw_mask_ = false;
}

void GraphHook::settle(Settling settling) {
  settling_ = std::move(settling);
  decide_error_ = {};
  settled_ = 0;
  stored_keys_ = stored_values_ = nullptr;
}

Status GraphHook::finish() {
  // Graphs are used again.
  for (ggml_tensor* node : skipped_) node->flags |= GGML_TENSOR_FLAG_COMPUTE;
  skipped_.clear();
  for (const auto& [view, cells] : shortened_) view->ne[1] = cells;
  shortened_.clear();
  nodes_.clear();
  inputs_.clear();
  const Mode mode = mode_;
  mode_ = Mode::idle;
  const bool settles = static_cast<bool>(settling_.decide);
  settling_ = {};
  if (!decide_error_.ok()) {
    failure_.clear();
    return std::exchange(decide_error_, Status());
  }
  if (mode == Mode::rewrite && failure_.empty()) {
    if (!saw_positions_ || !saw_cells_ || !saw_mask_) {
      failure_ = "the graph has no positions, cells or mask where they were looked for";
    } else if (!entered_ || !left_) {
      failure_ = "the graph has no node l_out where a range of layers starts or ends";
    } else if (settles && settled_ != rewrite_.range.size()) {
      failure_ = "the graph does not store keys and values of each layer where they were looked for";
    }
  }
  if (reader_ != nullptr && failure_.empty()) failure_ = reader_->failure();
  reader_ = nullptr;
  if (failure_.empty()) return {};
  Status status = Status::error(StatusCode::host_error, "%s", failure_.c_str()).at("graph");
  failure_.clear();
  return status;
}

void GraphHook::fail(const char* format, ...) {
  if (!failure_.empty()) return;
  char text[160];
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  failure_ = text;
  for (ggml_tensor* node : nodes_) skip(node);
}

void GraphHook::skip(ggml_tensor* node) {
  if ((node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0) return;
  node->flags &= ~GGML_TENSOR_FLAG_COMPUTE;
  skipped_.push_back(node);
}

bool GraphHook::ask(ggml_tensor* node) {
  switch (mode_) {
    case Mode::idle: return reader_ != nullptr && reader_->wants(node);
    case Mode::observe: ask_observing(node); return false;
    case Mode::capture: return ask_capturing(node);
    case Mode::rewrite: return ask_rewriting(node) || (failure_.empty() && reader_ != nullptr && reader_->wants(node));
  }
  return false;
}

void GraphHook::ask_observing(ggml_tensor* node) {
  std::int32_t layer = -1;
  const ggml_tensor* mask = mask_of(node, layer);
  if (mask == nullptr) return;
  if (max_bias_of(node) != 0) observation_->alibi = true;
  if (observation_->visible.size() <= index_of(layer)) observation_->visible.resize(index_of(layer) + 1);
  bool plain = false;
  if (!read_mask_row(mask, 0, scratch_, observation_->visible[index_of(layer)], plain)) {
    fail("the mask of layer %d is of no known type", layer);
  } else if (!plain) {
    observation_->alibi = true;
  }
}

// ---- scoring --------------------------------------------------------------------------------------------------------

bool GraphHook::ask_capturing(ggml_tensor* node) {
  std::int32_t layer = -1;
  if (cache_written(node, layer) != Cache::none) return layer <= capture_->layer;
  if (capture_->hidden != nullptr && number_behind(node->name, "l_out-") == capture_->layer - 1) return true;
  // Queries of the scored layer are of no use.
  if (number_behind(node->name, "Qcur-") == capture_->layer) skip(node);
  return false;
}

bool GraphHook::done(ggml_tensor* node) {
  if (reader_ != nullptr && reader_->wants(node)) return reader_->read(node) && !reader_->complete();
  if (mode_ == Mode::rewrite) {
    std::int32_t stored = -1;
    if (cache_written(node, stored) != Cache::none) return settle_layer(node);
    leave(node);
    return false;
  }
  if (mode_ != Mode::capture) return true;
  Capture& out = *capture_;
  std::int32_t layer = -1;
  const Cache cache = cache_written(node, layer);
  if (cache == Cache::none) {  // hidden rows
    HiddenRows& hidden = *out.hidden;
    if (node->type != GGML_TYPE_F32 || node->ne[0] != hidden.width || !ggml_is_contiguous(node) ||
        node->ne[1] > out.tokens - out.done) {
      fail("%s has another shape than hidden rows have", node->name);
      return false;
    }
    ggml_backend_tensor_get(node, hidden.values.data() + out.done * hidden.width, 0, ggml_nbytes(node));
    return true;
  }

  const std::int64_t count = ggml_nelements(node->src[0]) / out.width;
  auto& into = (cache == Cache::keys ? out.keys : out.values)[index_of(layer)];
  if (!read_fresh(node, out.width, out.tokens - out.done, into.data() + out.done * out.width)) return false;
  if (layer < out.layer) return true;
  (cache == Cache::keys ? key_done_ : value_done_) = true;
  if (!key_done_ || !value_done_) return true;
  key_done_ = value_done_ = false;
  out.done += static_cast<std::int32_t>(count);
  return false;  // enough of this graph
}

// The rows that a node stores, at most `room` of them.
bool GraphHook::read_fresh(const ggml_tensor* node, std::int64_t width, std::int64_t room, float* to) {
  const ggml_tensor* rows = node->src[0];
  const std::int64_t count = ggml_nelements(rows) / width;
  if (rows->type != GGML_TYPE_F32 || ggml_nelements(rows) % width != 0 || count > room ||
      (rows->ne[0] != width && !ggml_is_contiguous(rows))) {
    fail("%s is given rows of another shape than keys or values have", node->name);
    return false;
  }
  const std::size_t bytes = static_cast<std::size_t>(width) * sizeof(float);
  if (ggml_is_contiguous(rows)) {
    ggml_backend_tensor_get(rows, to, 0, static_cast<std::size_t>(count) * bytes);
    return true;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    ggml_backend_tensor_get(rows, to + i * width, static_cast<std::size_t>(i) * rows->nb[1], bytes);
  }
  return true;
}

// ---- rewriting ------------------------------------------------------------------------------------------------------

bool GraphHook::ask_rewriting(ggml_tensor* node) {
  if (!failure_.empty()) {
    skip(node);
    return false;
  }
  nodes_.push_back(node);
  {
    kvblend::Stopwatch watch(patch_seconds_);
    rewrite_inputs(node);
  }
  if (!failure_.empty()) return false;
  const std::int32_t layer_out = number_behind(node->name, "l_out-");
  if (!entered_) {
    skip(node);
    if (layer_out == rewrite_.range.first - 1) enter(node);
    return false;
  }
  std::int32_t stored = -1;
  if (settling_.decide && cache_written(node, stored) != Cache::none) return true;
  return !left_ && layer_out == rewrite_.range.end - 1;
}

void GraphHook::rewrite_inputs(ggml_tensor* node) {
  std::int32_t layer = -1;
  if (node->op == GGML_OP_ROPE && node->src[1] != nullptr) {
    if (is_new_input(node->src[1], "positions")) rewrite_positions(node->src[1]);
  } else if (cache_written(node, layer) != Cache::none) {
    if (is_new_input(node->src[1], "cells")) rewrite_cells(node->src[1], node);
  } else if (ggml_tensor* mask = mask_of(node, layer); mask != nullptr) {
    if (max_bias_of(node) != 0) return fail("attention of layer %d is biased by distance", layer);
    if (is_new_input(mask, "mask")) rewrite_mask(mask, layer);
    if (node->op == GGML_OP_FLASH_ATTN_EXT && failure_.empty()) {
      shorten(node->src[1]);
      shorten(node->src[2]);
    }
  }
}

// Flash attention is shown the cells up to the batch's last row only. The others are masked, but llama.cpp's CPU kernel
// reads their mask to find that out.
void GraphHook::shorten(ggml_tensor* cache_view) {
  const std::int64_t wanted = (rewrite_.rows.back() / kCellStep + 1) * kCellStep;
  const bool is_view = cache_view->view_src != nullptr && origin_of(cache_view)->op == GGML_OP_NONE;
  if (!is_view || cache_view->op == GGML_OP_CPY || cache_view->ne[1] <= wanted) return;
  shortened_.emplace_back(cache_view, cache_view->ne[1]);
  cache_view->ne[1] = wanted;
}

bool GraphHook::is_new_input(ggml_tensor* input, const char* what) {
  if (std::find(inputs_.begin(), inputs_.end(), input) != inputs_.end()) return false;
  if (input->op != GGML_OP_NONE || (input->flags & GGML_TENSOR_FLAG_INPUT) == 0) {
    fail("%s: %s is no input of the graph", what, input->name);
    return false;
  }
  inputs_.push_back(input);
  return true;
}

void GraphHook::rewrite_positions(ggml_tensor* positions) {
  const auto count = rewrite_.rows.size();
  if (positions->type != GGML_TYPE_I32 || positions->ne[0] != static_cast<std::int64_t>(count)) {
    return fail("positions: not one 32-bit number a token");
  }
  scratch_.resize(count * sizeof(std::int32_t));
  ggml_backend_tensor_get(positions, scratch_.data(), 0, scratch_.size());
  for (std::size_t i = 0; i < count; ++i) {
    std::int32_t value = 0;
    std::memcpy(&value, scratch_.data() + i * sizeof value, sizeof value);
    if (value != static_cast<std::int32_t>(i)) return fail("positions: token %zu of the batch is at %d", i, value);
  }
  ggml_backend_tensor_set(positions, rewrite_.rows.data(), 0, scratch_.size());
  saw_positions_ = true;
}

// One index a token; or, where values lie transposed, one a value: value j of a cell is at j * (cells of the cache) +
// cell.
void GraphHook::rewrite_cells(ggml_tensor* cells, const ggml_tensor* cache) {
  const auto tokens = static_cast<std::int64_t>(rewrite_.rows.size());
  const std::int64_t width = tokens == 0 ? 0 : cells->ne[0] / tokens;
  if (cells->type != GGML_TYPE_I64 || width == 0 || cells->ne[0] % tokens != 0) {
    return fail("cells: not 64-bit numbers, the same a token");
  }
  const std::int64_t stride = width == 1 ? 0 : ggml_nelements(cache) / width;
  const auto count = static_cast<std::size_t>(cells->ne[0]);
  scratch_.resize(count * sizeof(std::int64_t));
  ggml_backend_tensor_get(cells, scratch_.data(), 0, scratch_.size());
  for (std::int64_t i = 0; i < tokens; ++i) {
    for (std::int64_t j = 0; j < width; ++j) {
      std::byte* at = scratch_.data() + static_cast<std::size_t>(i * width + j) * sizeof(std::int64_t);
      std::int64_t index = 0;
      std::memcpy(&index, at, sizeof index);
      if (index != j * stride + rewrite_.cells + i) {
        return fail("cells: token %lld of the batch is put into cell %lld, not into the one behind the sequence",
                    static_cast<long long>(i), static_cast<long long>(index - j * stride));
      }
      index = j * stride + rewrite_.rows[static_cast<std::size_t>(i)];
      std::memcpy(at, &index, sizeof index);
    }
  }
  ggml_backend_tensor_set(cells, scratch_.data(), 0, scratch_.size());
  saw_cells_ = true;
}

void GraphHook::rewrite_mask(ggml_tensor* mask, std::int32_t layer) {
  const auto tokens = static_cast<std::int64_t>(rewrite_.rows.size());
  if (mask->ne[1] != tokens || mask->ne[2] != 1 || mask->ne[3] != 1 || mask->ne[0] < rewrite_.cells + tokens ||
      index_of(layer) >= rewrite_.windowed.size()) {
    return fail("mask: layer %d has one of another shape", layer);
  }
  const std::int32_t window = rewrite_.windowed[index_of(layer)] != 0 ? rewrite_.window : 0;
  std::vector<bool> visible;
  bool plain = false;
  if (!read_mask_row(mask, tokens - 1, scratch_, visible, plain) || !plain) {
    return fail("mask: layer %d has one of another kind than visible or not", layer);
  }
  for (std::int64_t cell = 0; cell < mask->ne[0]; ++cell) {
    const std::int64_t own = cell - rewrite_.cells;  // the batch sees itself alone
    const bool expected = own >= 0 && own < tokens && (window == 0 || tokens - 1 - own < window);
    if (visible[static_cast<std::size_t>(cell)] != expected) {
      return fail("mask: in layer %d cell %lld is %s to the batch", layer, static_cast<long long>(cell),
                  expected ? "hidden" : "visible");
    }
  }

  const auto cells = static_cast<std::size_t>(mask->ne[0]);
  const auto put = [&](auto shown, auto hidden) {
    using Value = decltype(shown);
    scratch_.resize(cells * sizeof(Value));
    auto* const row = reinterpret_cast<Value*>(scratch_.data());
    for (std::size_t i = 0; i < rewrite_.rows.size(); ++i) {
      const std::int32_t last = rewrite_.rows[i];
      const std::int32_t first = window > 0 ? std::max(0, last - window + 1) : 0;
      std::fill(row, row + first, hidden);
      std::fill(row + first, row + last + 1, shown);
      std::fill(row + last + 1, row + cells, hidden);
      ggml_backend_tensor_set(mask, row, i * mask->nb[1], scratch_.size());
    }
  };
  if (mask->type == GGML_TYPE_F16) {
    put(kVisibleF16, kHiddenF16);
  } else {
    put(0.0f, -std::numeric_limits<float>::infinity());
  }
  saw_mask_ = true;
}

bool GraphHook::holds_hidden(const ggml_tensor* node) {
  if (node->type == GGML_TYPE_F32 && node->ne[0] == rewrite_.hidden->width && ggml_is_contiguous(node) &&
      node->ne[1] == static_cast<std::int64_t>(rewrite_.rows.size())) {
    return true;
  }
  fail("%s has another shape than hidden rows have", node->name);
  return false;
}

// The last node before the range: its rows are what the range before it, or scoring, left.
void GraphHook::enter(ggml_tensor* node) {
  entered_ = true;
  const HiddenRows& hidden = *rewrite_.hidden;
  if (!holds_hidden(node)) return;
  const std::size_t bytes = static_cast<std::size_t>(hidden.width) * sizeof(float);
  for (std::size_t i = 0; i < rewrite_.rows.size(); ++i) {
    const std::int32_t row = rewrite_.rows[i] - hidden.first_cell;
    if (row < 0 || index_of(row) >= hidden.entry.size() || hidden.entry[index_of(row)] != rewrite_.range.first) {
      return fail("cell %d has no hidden row at layer %d", rewrite_.rows[i], rewrite_.range.first);
    }
    ggml_backend_tensor_set(node, hidden.values.data() + row * hidden.width, i * bytes, bytes);
  }
}

void GraphHook::leave(ggml_tensor* node) {
  left_ = true;
  HiddenRows& hidden = *rewrite_.hidden;
  if (!holds_hidden(node)) return;
  const std::size_t bytes = static_cast<std::size_t>(hidden.width) * sizeof(float);
  for (std::size_t i = 0; i < rewrite_.rows.size(); ++i) {
    const std::int32_t row = rewrite_.rows[i] - hidden.first_cell;
    if (row < 0 || index_of(row) >= hidden.entry.size()) {
      return fail("cell %d has no place for a hidden row", rewrite_.rows[i]);
    }
    ggml_backend_tensor_get(node, hidden.values.data() + row * hidden.width, i * bytes, bytes);
    hidden.entry[index_of(row)] = rewrite_.range.end;
  }
}

// A node has stored keys or values. Once both are there, the layer's cells are made what they are to be.
bool GraphHook::settle_layer(const ggml_tensor* node) {
  std::int32_t layer = -1;
  const bool of_keys = cache_written(node, layer) == Cache::keys;
  const auto tokens = static_cast<std::int64_t>(rewrite_.rows.size());
  auto& fresh = of_keys ? fresh_keys_ : fresh_values_;
  fresh.resize(static_cast<std::size_t>(tokens * settling_.width));
  if (ggml_nelements(node->src[0]) != tokens * settling_.width) {
    fail("%s is given another number of rows than run", node->name);
    return false;
  }
  if (!read_fresh(node, settling_.width, tokens, fresh.data())) return false;
  (of_keys ? stored_keys_ : stored_values_) = node;
  if (stored_keys_ == nullptr || stored_values_ == nullptr) return true;

  const ggml_tensor* keys = std::exchange(stored_keys_, nullptr);
  const ggml_tensor* values = std::exchange(stored_values_, nullptr);
  const kvblend::Result<BlobReader::Rows> blob = settling_.decide(layer, fresh_keys_, fresh_values_);
  if (!blob.ok()) {
    decide_error_ = blob.status;
    return false;
  }
  while (keys->view_src != nullptr) keys = keys->view_src;
  while (values->view_src != nullptr) values = values->view_src;
  copy_to_cells(keys, blob.value.keys);
  if (settling_.transposed_values) {
    copy_to_columns(values, blob.value.values);
  } else {
    copy_to_cells(values, blob.value.values);
  }
  ++settled_;
  return failure_.empty();
}

// [cells, width]
void GraphHook::copy_to_cells(const ggml_tensor* cache, const std::byte* rows) {
  const std::size_t row = ggml_row_size(cache->type, settling_.width);
  const auto first = static_cast<std::size_t>(settling_.first) * row;
  const auto end = static_cast<std::size_t>(settling_.end) * row;
  if (cache->nb[1] != row || end > ggml_nbytes(cache)) return fail("%s is of another shape", cache->name);
  ggml_backend_tensor_set(const_cast<ggml_tensor*>(cache), rows + first, first, end - first);
}

// [width, cells], in the cache of more cells than in the blob.
void GraphHook::copy_to_columns(const ggml_tensor* cache, const std::byte* columns) {
  const std::size_t value = ggml_type_size(cache->type);
  const auto width = static_cast<std::size_t>(settling_.width);
  const std::size_t column = ggml_nbytes(cache) / width;
  const std::size_t blob_column = static_cast<std::size_t>(rewrite_.cells) * value;
  const auto first = static_cast<std::size_t>(settling_.first) * value;
  const auto end = static_cast<std::size_t>(settling_.end) * value;
  if (ggml_nbytes(cache) % width != 0 || end > column) return fail("%s is of another shape", cache->name);
  for (std::size_t i = 0; i < width; ++i) {
    ggml_backend_tensor_set(const_cast<ggml_tensor*>(cache), columns + i * blob_column + first, i * column + first,
                            end - first);
  }
}

}  // namespace llama_cpp
