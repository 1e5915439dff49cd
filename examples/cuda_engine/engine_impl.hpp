// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Engine's members; engine.hpp includes this.
#pragma once

#include <cuda_engine/engine.hpp>

#include <algorithm>
#include <numeric>

namespace cuda_engine {

// --- set-up ----------------------------------------------------------------------------------------------------------

template <Device D>
Status Engine<D>::open(const EngineOptions& options) {
  const ModelConfig& c = config();
  if (options.max_rows < 1) {
    return Status::error(StatusCode::invalid_argument, "is %d", options.max_rows).at("max_rows");
  }
  capacity_ = options.max_rows;
  const std::int64_t n = capacity_;
  KVBLEND_RETURN_IF_ERROR(host_tokens_.allocate(n, "tokens"));
  KVBLEND_RETURN_IF_ERROR(host_positions_.allocate(n, "positions"));
  KVBLEND_RETURN_IF_ERROR(tokens_.allocate(n, "tokens"));
  KVBLEND_RETURN_IF_ERROR(positions_.allocate(n, "positions"));
  KVBLEND_RETURN_IF_ERROR(all_rows_.allocate(n, "rows"));
  KVBLEND_RETURN_IF_ERROR(all_indices_.allocate(n, "indices"));
  KVBLEND_RETURN_IF_ERROR(device_.execution().for_each(n, CountUp<Row>{all_rows_.data()}));
  KVBLEND_RETURN_IF_ERROR(device_.execution().for_each(n, CountUp<ActiveIndex>{all_indices_.data()}));
  KVBLEND_RETURN_IF_ERROR(hidden_.allocate(n * c.hidden, "hidden states"));
  KVBLEND_RETURN_IF_ERROR(kept_hidden_.allocate(n * c.hidden, "hidden states"));
  KVBLEND_RETURN_IF_ERROR(normed_.allocate(n * c.hidden, "normalised states"));
  KVBLEND_RETURN_IF_ERROR(qkv_.allocate(n * c.qkv_values(), "queries, keys and values"));
  KVBLEND_RETURN_IF_ERROR(attended_.allocate(n * c.query_values(), "attention outputs"));
  KVBLEND_RETURN_IF_ERROR(gate_up_.allocate(n * 2 * c.feed_forward, "gate and up"));
  KVBLEND_RETURN_IF_ERROR(gated_.allocate(n * c.feed_forward, "gated values"));
  hidden_now_ = hidden_.data();
  hidden_next_ = kept_hidden_.data();
  KVBLEND_RETURN_IF_ERROR(open_cache(options));
  KVBLEND_RETURN_IF_ERROR(attention_.open(device_, {c.heads, c.kv_heads, c.head_dim},
                                          {n, options.attention_bytes, !in_order_, options.attention}));
  KVBLEND_RETURN_IF_ERROR(open_tables());
  clear();
  return device_.finish();
}

template <Device D>
Status Engine<D>::open_cache(const EngineOptions& options) {
  const ModelConfig& c = config();
  if (options.block_size < 1) {
    return Status::error(StatusCode::invalid_argument, "is %d", options.block_size).at("block_size");
  }
  table_entries_ = (std::int64_t{capacity_} + options.block_size - 1) / options.block_size;
  std::vector<std::int32_t> table(options.block_table.begin(), options.block_table.end());
  if (table.empty()) {
    table.resize(size_of(table_entries_));
    std::iota(table.begin(), table.end(), 0);
  }
  if (static_cast<std::int64_t>(table.size()) < table_entries_) {
    return Status::error(StatusCode::invalid_argument, "has %zu blocks, %d rows need %lld", table.size(), capacity_,
                         static_cast<long long>(table_entries_))
        .at("block_table");
  }
  table.resize(size_of(table_entries_));
  std::vector<std::int32_t> sorted = table;
  std::sort(sorted.begin(), sorted.end());
  if (sorted.front() < 0 || std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
    return Status::error(StatusCode::invalid_argument, "names a block twice, or a negative one").at("block_table");
  }
  in_order_ = table == sorted && sorted.front() == 0 && sorted.back() == table_entries_ - 1;
  auto pool =
      kvblend::block_pool<Codec>({std::int64_t{sorted.back()} + 1, options.block_size, c.kv_heads, c.head_dim, 0});
  KVBLEND_RETURN_IF_ERROR(pool.status);
  pool_ = pool.value;
  pool_values_ = pool_.block_count * pool_.block_size * c.key_values();
  KVBLEND_RETURN_IF_ERROR(cache_.allocate(2 * c.layers * pool_values_, "cache"));
  KVBLEND_RETURN_IF_ERROR(block_table_.allocate(table_entries_, "block table"));
  KVBLEND_RETURN_IF_ERROR(
      device_.execution().upload(block_table_.data(), table.data(), table.size() * sizeof(std::int32_t)));
  return device_.finish();  // before `table` goes
}

template <Device D>
Status Engine<D>::open_tables() {
  const ModelConfig& c = config();
  tables_.clear();
  table_of_layer_.clear();
  std::vector<const RopeSpec*> specs;
  for (std::int32_t layer = 0; layer < c.layers; ++layer) {
    const RopeSpec& spec = rope(layer);
    KVBLEND_RETURN_IF_ERROR(kvblend::validate(spec));
    if (spec.head_dim != c.head_dim ||
        std::any_of(spec.axes().begin(), spec.axes().end(), [](int a) { return a != 0; })) {
      return Status::error(StatusCode::unsupported, "is for other heads, or has several axes")
          .at("rope of layer %d", layer);
    }
    std::size_t index = 0;
    while (index < specs.size() && !(*specs[index] == spec)) ++index;
    table_of_layer_.push_back(static_cast<std::int32_t>(index));
    if (index < specs.size()) continue;
    specs.push_back(&spec);
    const std::int64_t pairs = spec.pairs();
    std::vector<float> table(size_of(c.context * 2 * pairs));
    for (std::int64_t position = 0; position < c.context; ++position) {
      float* cosines = table.data() + position * 2 * pairs;
      for (std::int64_t pair = 0; pair < pairs; ++pair) {
        const double angle = static_cast<double>(position) * spec.inv_freq[size_of(pair)];
        cosines[pair] = static_cast<float>(std::cos(angle) * spec.attention_factor);
        cosines[pairs + pair] = static_cast<float>(std::sin(angle) * spec.attention_factor);
      }
    }
    Array<D, float> on_device;
    KVBLEND_RETURN_IF_ERROR(on_device.allocate(static_cast<std::int64_t>(table.size()), "rope table"));
    KVBLEND_RETURN_IF_ERROR(device_.execution().upload(on_device.data(), table.data(), table.size() * sizeof(float)));
    KVBLEND_RETURN_IF_ERROR(device_.finish());  // before `table` goes
    tables_.push_back(std::move(on_device));
  }
  return {};
}

// --- passes ----------------------------------------------------------------------------------------------------------

template <Device D>
Status Engine<D>::truncate(std::int32_t rows) {
  if (blending_) return Status::error(StatusCode::host_error, "a blend is under way").at("truncate");
  if (rows < 0 || rows > rows_) {
    return Status::error(StatusCode::out_of_range, "is %d, the cache has %d", rows, rows_).at("rows");
  }
  rows_ = pass_rows_ = rows;
  active_ = 0;
  return {};
}

template <Device D>
Status Engine<D>::check_token(std::int32_t row, TokenId token, std::int64_t position) const {
  if (token < 0 || token >= config().vocabulary) {
    return Status::error(StatusCode::out_of_range, "is token %d, the vocabulary has %d", token, config().vocabulary)
        .at("row %d", row);
  }
  if (position < 0 || position >= config().context) {
    return Status::error(StatusCode::out_of_range, "is at position %lld, the model's range is [0, %d)",
                         static_cast<long long>(position), config().context)
        .at("row %d", row);
  }
  return {};
}

template <Device D>
Status Engine<D>::upload_rows(std::int32_t first, std::int32_t end) {
  const std::size_t bytes = size_of(end - first) * sizeof(std::int32_t);
  KVBLEND_RETURN_IF_ERROR(device_.execution().upload(tokens_.data() + first, host_tokens_.data() + first, bytes));
  return device_.execution().upload(positions_.data() + first, host_positions_.data() + first, bytes);
}

template <Device D>
Status Engine<D>::prefill(std::span<const TokenId> tokens, Wanted wanted, Position first) {
  if (blending_) return Status::error(StatusCode::host_error, "a blend is under way").at("prefill");
  if (tokens.size() > size_of(capacity_ - rows_)) {
    return Status::error(StatusCode::out_of_range, "%d cached and %zu new rows exceed the capacity of %d", rows_,
                         tokens.size(), capacity_)
        .at("tokens");
  }
  const auto count = static_cast<std::int32_t>(tokens.size());
  const std::int64_t next = rows_ == 0 ? 0 : std::int64_t{host_positions_[rows_ - 1]} + 1;
  const std::int64_t start = first == kvblend::kNextPosition ? next : std::int64_t{first.value};
  if (start < next) {
    return Status::error(StatusCode::out_of_range, "%lld is not behind the cache's last, %lld",
                         static_cast<long long>(start), static_cast<long long>(next - 1))
        .at("positions");
  }
  for (std::int32_t i = 0; i < count; ++i) {
    KVBLEND_RETURN_IF_ERROR(check_token(rows_ + i, tokens[size_of(i)], start + i));
  }
  active_ = 0;
  if (count == 0) return {};
  for (std::int32_t i = 0; i < count; ++i) {
    host_tokens_[rows_ + i] = tokens[size_of(i)];
    host_positions_[rows_ + i] = static_cast<std::int32_t>(start) + i;
  }
  pass_rows_ = rows_ + count;
  const std::span<const Row> rows(all_rows_.data() + rows_, size_of(count));
  const auto run = [&]() -> Status {
    KVBLEND_RETURN_IF_ERROR(upload_rows(rows_, pass_rows_));
    KVBLEND_RETURN_IF_ERROR(embed(rows));
    for (std::int32_t layer = 0; layer < layers(); ++layer) {
      KVBLEND_RETURN_IF_ERROR(project(layer, rows));
      KVBLEND_RETURN_IF_ERROR(store_fresh(layer, rows));
      std::span<const ActiveIndex> kept(all_indices_.data(), size_of(count));
      if (layer == layers() - 1 && wanted == Wanted::none) kept = kept.first(0);
      if (layer == layers() - 1 && wanted == Wanted::last) kept = kept.last(1);
      KVBLEND_RETURN_IF_ERROR(run_layer(layer, rows, kept));
    }
    return {};
  };
  if (Status status = run(); !status.ok()) {
    abort();
    return status;
  }
  rows_ = pass_rows_;
  return {};
}

template <Device D>
Status Engine<D>::logits(std::span<float> out) {
  const std::size_t needed = size_of(active_) * size_of(config().vocabulary);
  if (out.size() != needed) {
    return Status::error(StatusCode::invalid_argument, "has %zu floats, %d rows need %zu", out.size(), active_, needed)
        .at("logits");
  }
  if (active_ == 0) return {};
  KVBLEND_RETURN_IF_ERROR(normalise(weights_.output_norm()));
  return multiply(normed_.data(), config().hidden, weights_.output(), out.data(), config().vocabulary);
}

// --- the host's side of a blend --------------------------------------------------------------------------------------

template <Device D>
Status Engine<D>::begin(const Prompt& prompt) {
  if (blending_) return Status::error(StatusCode::host_error, "a blend is under way").at("begin");
  if (prompt.rows() > capacity_) {
    return Status::error(StatusCode::out_of_range, "needs %d rows, the cache has %d", prompt.rows(), capacity_)
        .at("prompt");
  }
  const std::int32_t resident = prompt.resident_rows();
  if (resident != rows_) {
    return Status::error(StatusCode::mismatch, "says that %d rows are resident, the cache has %d", resident, rows_)
        .at("prompt");
  }
  for (const Segment& segment : prompt.segments()) {
    for (std::int32_t i = 0; i < segment.size(); ++i) {
      const Row row = segment.first_row + i;
      const TokenId token = segment.tokens[size_of(i)];
      const std::int32_t position = segment.position(row).value;
      KVBLEND_RETURN_IF_ERROR(check_token(row.value, token, position));
      if (row.value < resident && (token != host_tokens_[row.value] || position != host_positions_[row.value])) {
        return Status::error(StatusCode::mismatch, "is token %d at %d, the cache holds %d at %d", token, position,
                             host_tokens_[row.value], host_positions_[row.value])
            .at("resident row %d", row.value);
      }
    }
  }
  for (const Segment& segment : prompt.segments()) {
    for (std::int32_t i = 0; i < segment.size(); ++i) {
      const Row row = segment.first_row + i;
      host_tokens_[row.value] = segment.tokens[size_of(i)];
      host_positions_[row.value] = segment.position(row).value;
    }
  }
  KVBLEND_RETURN_IF_ERROR(upload_rows(resident, prompt.rows()));
  pass_rows_ = prompt.rows();
  blending_ = true;
  active_ = 0;
  return {};
}

template <Device D>
Status Engine<D>::embed(std::span<const Row> rows) {
  if (rows.size() > size_of(pass_rows_)) {
    return Status::error(StatusCode::out_of_range, "are %zu, the pass has %d", rows.size(), pass_rows_).at("rows");
  }
  active_ = static_cast<std::int32_t>(rows.size());
  return device_.rows(active_,
                      EmbedRow<T>{rows.data(), tokens_.data(), weights_.embedding(), hidden_now_, config().hidden});
}

template <Device D>
Status Engine<D>::project(std::int32_t layer, std::span<const Row> rows) {
  KVBLEND_RETURN_IF_ERROR(check_pass(layer, rows));
  if (active_ == 0) return {};
  const ModelConfig& c = config();
  const LayerWeights<D>& weights = weights_.layer(layer);
  KVBLEND_RETURN_IF_ERROR(normalise(weights.attention_norm.data()));
  KVBLEND_RETURN_IF_ERROR(multiply(normed_.data(), c.hidden, weights.qkv.data(), qkv_.data(), c.qkv_values()));
  const RopeSpec& spec = rope(layer);
  TurnRow<T> turn{};
  turn.rows = rows.data();
  turn.positions = positions_.data();
  turn.table = tables_[size_of(table_of_layer_[size_of(layer)])].data();
  turn.bias = weights.qkv_bias.data();
  turn.qkv = qkv_.data();
  turn.stride = c.qkv_values();
  turn.heads = c.heads + c.kv_heads;
  turn.head_dim = c.head_dim;
  turn.pairs = spec.pairs();
  turn.offset = spec.rotary_offset;
  turn.halves = spec.pairing == kvblend::RopePairing::neox;
  return device_.rows(active_, turn);
}

template <Device D>
typename Engine<D>::FreshPlane Engine<D>::fresh_keys() {
  const ModelConfig& c = config();
  const auto bytes = static_cast<std::int64_t>(sizeof(T));
  return {reinterpret_cast<std::byte*>(qkv_.data() + c.query_values()),
          kvblend::ContiguousLayout(active_, c.kv_heads, c.head_dim, c.qkv_values() * bytes, c.head_dim * bytes)};
}

template <Device D>
typename Engine<D>::FreshPlane Engine<D>::fresh_values() {
  FreshPlane fresh = fresh_keys();
  fresh.base += std::int64_t{config().key_values()} * static_cast<std::int64_t>(sizeof(T));
  return fresh;
}

template <Device D>
typename Engine<D>::CachePlane Engine<D>::cache(std::int32_t layer, std::int64_t part) {
  kvblend::PagedLayout layout(pool_, block_table_.data(), table_entries_);
  layout.row_count = pass_rows_;
  return {reinterpret_cast<std::byte*>(cache_.data() + (2 * layer + part) * pool_values_), layout};
}

template <Device D>
Status Engine<D>::attend(std::int32_t layer, std::span<const Row> rows, std::span<const ActiveIndex> kept) {
  KVBLEND_RETURN_IF_ERROR(check_pass(layer, rows));
  return run_layer(layer, rows, kept);
}

template <Device D>
Status Engine<D>::commit(std::int32_t row_count) {
  if (!blending_) return Status::error(StatusCode::host_error, "no blend was begun").at("commit");
  if (row_count < rows_ || row_count > pass_rows_) {
    return Status::error(StatusCode::out_of_range, "%d rows, must be in [%d, %d]", row_count, rows_, pass_rows_)
        .at("commit");
  }
  rows_ = pass_rows_ = row_count;
  blending_ = false;
  return {};
}

// --- a layer ---------------------------------------------------------------------------------------------------------

template <Device D>
Status Engine<D>::check_pass(std::int32_t layer, std::span<const Row> rows) const {
  if (layer < 0 || layer >= layers()) {
    return Status::error(StatusCode::out_of_range, "the model has %d", layers()).at("layer %d", layer);
  }
  if (rows.size() != size_of(active_)) {
    return Status::error(StatusCode::invalid_argument, "are %zu, %d are active", rows.size(), active_)
        .at("rows of layer %d", layer);
  }
  return {};
}

template <Device D>
template <class Y>
Status Engine<D>::multiply(const T* x, std::int64_t inner, const T* w, Y* y, std::int64_t columns, float keep) {
  Gemm gemm = RowMajor<T>{x, inner, w, inner, true, active_, columns, inner}.into(y, columns);
  gemm.beta = keep;
  return device_.multiply(gemm);
}

template <Device D>
Status Engine<D>::normalise(const float* weight) {
  return device_.rows(active_,
                      NormaliseRow<T>{hidden_now_, weight, normed_.data(), config().hidden, config().norm_epsilon});
}

template <Device D>
Status Engine<D>::store_fresh(std::int32_t layer, std::span<const Row> rows) {
  using Copy = CopyRow<T, FreshPlane, CachePlane>;
  KVBLEND_RETURN_IF_ERROR(device_.rows(active_, Copy{fresh_keys(), keys(layer), rows.data()}));
  return device_.rows(active_, Copy{fresh_values(), values(layer), rows.data()});
}

// From attention to the end of the layer, for rows[kept[i]].
template <Device D>
Status Engine<D>::run_layer(std::int32_t layer, std::span<const Row> rows, std::span<const ActiveIndex> kept) {
  if (kept.size() > rows.size()) {
    return Status::error(StatusCode::out_of_range, "are %zu of %zu rows", kept.size(), rows.size())
        .at("kept of layer %d", layer);
  }
  const ModelConfig& c = config();
  const LayerWeights<D>& weights = weights_.layer(layer);
  active_ = static_cast<std::int32_t>(kept.size());
  if (active_ == 0) return {};
  if (kept.size() < rows.size()) {  // else they are the same, since they ascend
    KVBLEND_RETURN_IF_ERROR(device_.rows(active_, KeepRow<T>{hidden_now_, kept.data(), hidden_next_, c.hidden}));
    std::swap(hidden_now_, hidden_next_);
  }
  KVBLEND_RETURN_IF_ERROR(attention_.attend(device_, qkv_.data(), rows, kept, keys(layer), values(layer), pass_rows_,
                                            rows_, attended_.data()));
  KVBLEND_RETURN_IF_ERROR(
      multiply(attended_.data(), c.query_values(), weights.attention_output.data(), hidden_now_, c.hidden, 1));
  KVBLEND_RETURN_IF_ERROR(normalise(weights.feed_forward_norm.data()));
  KVBLEND_RETURN_IF_ERROR(
      multiply(normed_.data(), c.hidden, weights.gate_up.data(), gate_up_.data(), 2 * std::int64_t{c.feed_forward}));
  KVBLEND_RETURN_IF_ERROR(device_.rows(active_, GateRow<T>{gate_up_.data(), gated_.data(), c.feed_forward}));
  return multiply(gated_.data(), c.feed_forward, weights.down.data(), hidden_now_, c.hidden, 1);
}

}  // namespace cuda_engine
