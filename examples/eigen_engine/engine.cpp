// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// One transformer layer in two halves, project and attend, for any set of rows; prefill and blends are made of them.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <eigen_engine/engine.hpp>
#include <numeric>

namespace eigen_engine {

using kvblend::ActiveIndex;
using kvblend::Position;
using kvblend::Prompt;
using kvblend::RopePairing;
using kvblend::RopeSpec;
using kvblend::Row;
using kvblend::Segment;
using kvblend::SegmentKind;
using kvblend::Status;
using kvblend::StatusCode;
using kvblend::TokenId;

namespace {

constexpr std::int64_t kRowsPerTask = 32;
std::int64_t tasks_of(std::int64_t rows) { return (rows + kRowsPerTask - 1) / kRowsPerTask; }

// Turns the pairs of one head in place.
void rotate_head(const RopeSpec& spec, const float* cosines, const float* sines, float* head) {
  const std::int32_t pairs = spec.pairs();
  float* values = head + spec.rotary_offset;
  const auto amplitude = static_cast<float>(spec.attention_factor);
  const bool neox = spec.pairing == RopePairing::neox;
  const std::ptrdiff_t step = neox ? 1 : 2;
  const std::ptrdiff_t partner = neox ? pairs : 1;
  for (std::ptrdiff_t pair = 0; pair < pairs; ++pair) {
    const float x = values[pair * step];
    const float y = values[pair * step + partner];
    values[pair * step] = (x * cosines[pair] - y * sines[pair]) * amplitude;
    values[pair * step + partner] = (x * sines[pair] + y * cosines[pair]) * amplitude;
  }
}

}  // namespace

Engine::Engine(const Model& model, std::int32_t max_rows, ThreadPool& pool)
    : model_(model), pool_(pool), capacity_((std::max)(max_rows, 0)) {
  const ModelConfig& c = model.config();
  const std::int64_t n = capacity_;
  tokens_.resize(size_of(capacity_));
  positions_.resize(size_of(capacity_));
  keys_ = Buffer((n * c.layers + kContextPadding) * c.key_values());
  values_ = Buffer((n * c.layers + kContextPadding) * c.key_values());
  active_.reserve(size_of(capacity_));
  query_rows_.resize(size_of(capacity_));
  visible_.resize(size_of(capacity_));
  prefill_rows_.reserve(size_of(capacity_));
  for (std::int32_t i = 0; i < capacity_; ++i) all_.emplace_back(i);
  hidden_ = Buffer((n + kRowPadding) * aligned_stride(c.hidden));
  normed_ = Buffer((n + kRowPadding) * aligned_stride(c.hidden));
  qkv_ = Buffer((n + kRowPadding) * aligned_stride(c.qkv_values()));
  attended_ = Buffer((n + kRowPadding) * aligned_stride(c.query_values()));
  gated_ = Buffer((n + kRowPadding) * aligned_stride(c.feed_forward));
  scratch_.floats_per_worker = scratch_floats(n, c.head_dim, c.heads / c.kv_heads);
  scratch_.memory = Buffer(scratch_.floats_per_worker * pool.threads());
  for (std::int32_t layer = 0; layer < c.layers; ++layer) {
    std::size_t table = 0;
    while (table < table_specs_.size() && !(*table_specs_[table] == model.rope(layer))) ++table;
    if (table == table_specs_.size()) {
      table_specs_.push_back(&model.rope(layer));
      tables_.emplace_back(n * 2 * model.rope(layer).pairs());
    }
    table_of_layer_.push_back(static_cast<std::int32_t>(table));
  }
}

Status Engine::truncate(std::int32_t rows) {
  if (rows < 0 || rows > rows_) {
    return Status::error(StatusCode::out_of_range, "is %d, the cache has %d", rows, rows_).at("rows");
  }
  if (blending_) return Status::error(StatusCode::host_error, "a blend is under way").at("truncate");
  rows_ = pass_rows_ = rows;
  active_.clear();
  return {};
}

void Engine::clear() {
  blending_ = false;
  rows_ = pass_rows_ = 0;
  active_.clear();
}

// --- passes ----------------------------------------------------------------------------------------------------------

Status Engine::prefill(std::span<const TokenId> tokens, Wanted wanted, Position first) {
  if (blending_) return Status::error(StatusCode::host_error, "a blend is under way").at("prefill");
  const auto count = static_cast<std::int64_t>(tokens.size());
  if (rows_ + count > capacity_) {
    return Status::error(StatusCode::out_of_range, "%d cached and %lld new rows exceed the capacity of %d", rows_,
                         static_cast<long long>(count), capacity_)
        .at("tokens");
  }
  const std::int64_t next = rows_ == 0 ? 0 : std::int64_t{positions_[size_of(rows_ - 1)].value} + 1;
  const std::int64_t start = first == kvblend::kNextPosition ? next : std::int64_t{first.value};
  if (start < next || start + count > config().context) {
    return Status::error(StatusCode::out_of_range, "%lld to %lld, must lie in [%lld, %d)",
                         static_cast<long long>(start), static_cast<long long>(start + count - 1),
                         static_cast<long long>(next), config().context)
        .at("positions");
  }
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] >= config().vocabulary) {
      return Status::error(StatusCode::out_of_range, "is %d, the vocabulary has %d", tokens[i], config().vocabulary)
          .at("token %zu", i);
    }
  }
  active_.clear();
  if (count == 0) return {};

  const auto added = static_cast<std::int32_t>(count);
  prefill_rows_.clear();
  for (std::int32_t i = 0; i < added; ++i) {
    const std::size_t row = size_of(rows_ + i);
    tokens_[row] = tokens[size_of(i)];
    positions_[row] = Position(static_cast<std::int32_t>(start) + i);
    prefill_rows_.emplace_back(rows_ + i);
  }
  pass_rows_ = rows_ + added;
  embed_rows(prefill_rows_);
  for (std::int32_t layer = 0; layer < layers(); ++layer) {
    project_rows(layer);
    store_fresh(layer);
    std::span<const ActiveIndex> kept(all_.data(), size_of(added));
    if (layer == layers() - 1 && wanted == Wanted::none) kept = kept.first(0);
    if (layer == layers() - 1 && wanted == Wanted::last) kept = kept.last(1);
    KVBLEND_RETURN_IF_ERROR(run_layer(layer, prefill_rows_, kept, 0, {}));
  }
  rows_ = pass_rows_;
  return {};
}

Status Engine::logits(std::span<float> out) {
  const ModelConfig& c = config();
  const auto needed = active_.size() * static_cast<std::size_t>(c.vocabulary);
  if (out.size() != needed) {
    return Status::error(StatusCode::invalid_argument, "has %zu floats, %zu rows need %zu", out.size(), active_.size(),
                         needed)
        .at("logits");
  }
  normalise(pool_, read(hidden_, c.hidden), model_.output_norm(), c.norm_epsilon, matrix(normed_, c.hidden));
  multiply(pool_, read(normed_, c.hidden), model_.output(), {out.data(), active_rows(), c.vocabulary, c.vocabulary},
           false);
  return {};
}

// --- the host's side of a blend --------------------------------------------------------------------------------------

Status Engine::begin(const Prompt& prompt) {
  if (blending_) return Status::error(StatusCode::host_error, "a blend is under way").at("begin");
  if (prompt.rows() > capacity_) {
    return Status::error(StatusCode::out_of_range, "needs %d rows, the cache has %d", prompt.rows(), capacity_)
        .at("prompt");
  }
  if (prompt.resident_rows() != rows_) {
    return Status::error(StatusCode::mismatch, "says that %d rows are resident, the cache has %d",
                         prompt.resident_rows(), rows_)
        .at("prompt");
  }
  for (const Segment& segment : prompt.segments()) {
    for (std::int32_t i = 0; i < segment.size(); ++i) {
      const Row row = segment.first_row + i;
      const TokenId token = segment.tokens[size_of(i)];
      const bool resident = segment.kind == SegmentKind::resident;
      if (token < 0 || token >= config().vocabulary) {
        return Status::error(StatusCode::out_of_range, "is token %d, the vocabulary has %d", token, config().vocabulary)
            .at("row %d", row.value);
      }
      if (segment.position(row).value < 0 || segment.position(row).value >= config().context) {
        return Status::error(StatusCode::out_of_range, "is at position %d, the model's range is [0, %d)",
                             segment.position(row).value, config().context)
            .at("row %d", row.value);
      }
      if (resident &&
          (token != tokens_[size_of(row.value)] || segment.position(row) != positions_[size_of(row.value)])) {
        return Status::error(StatusCode::mismatch, "is token %d at %d, the cache holds %d at %d", token,
                             segment.position(row).value, tokens_[size_of(row.value)],
                             positions_[size_of(row.value)].value)
            .at("resident row %d", row.value);
      }
    }
  }
  for (const Segment& segment : prompt.segments()) {
    for (std::int32_t i = 0; i < segment.size(); ++i) {
      const Row row = segment.first_row + i;
      tokens_[size_of(row.value)] = segment.tokens[size_of(i)];
      positions_[size_of(row.value)] = segment.position(row);
    }
  }
  pass_rows_ = prompt.rows();
  blending_ = true;
  active_.clear();
  return {};
}

Status Engine::embed(std::span<const Row> rows) {
  if (!blending_) return Status::error(StatusCode::host_error, "no blend was begun").at("embed");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].value < 0 || rows[i].value >= pass_rows_ || (i > 0 && rows[i] <= rows[i - 1])) {
      return Status::error(StatusCode::out_of_range, "is row %d; rows must ascend in [0, %d)", rows[i].value,
                           pass_rows_)
          .at("active row %zu", i);
    }
  }
  embed_rows(rows);
  return {};
}

Status Engine::project(std::int32_t layer, std::span<const Row> rows) {
  KVBLEND_RETURN_IF_ERROR(check_active(layer, rows));
  project_rows(layer);
  return {};
}

Status Engine::attend(std::int32_t layer, std::span<const Row> rows, std::span<const ActiveIndex> kept) {
  KVBLEND_RETURN_IF_ERROR(check_active(layer, rows));
  return run_layer(layer, rows, kept, 0, {});
}

Status Engine::attend_and_report(std::int32_t layer, std::span<const Row> rows, std::span<const ActiveIndex> kept,
                                 std::int32_t first, std::span<float> mass) {
  KVBLEND_RETURN_IF_ERROR(check_active(layer, rows));
  if (static_cast<std::int64_t>(mass.size()) != pass_rows_) {
    return Status::error(StatusCode::invalid_argument, "has %zu floats, the prompt has %d rows", mass.size(),
                         pass_rows_)
        .at("mass");
  }
  if (first < 0) return Status::error(StatusCode::out_of_range, "is %d", first).at("first");
  return run_layer(layer, rows, kept, first, mass);
}

Status Engine::commit(std::int32_t row_count) {
  if (!blending_) return Status::error(StatusCode::host_error, "no blend was begun").at("commit");
  if (row_count < rows_ || row_count > pass_rows_) {
    return Status::error(StatusCode::out_of_range, "%d rows, must be in [%d, %d]", row_count, rows_, pass_rows_)
        .at("commit");
  }
  rows_ = pass_rows_ = row_count;
  blending_ = false;
  return {};
}

void Engine::abort() {
  blending_ = false;
  pass_rows_ = rows_;
  active_.clear();
}

Engine::Plane Engine::fresh_keys() {
  const ModelConfig& c = config();
  const std::int64_t head_bytes = std::int64_t{c.head_dim} * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t row_bytes = aligned_stride(c.qkv_values()) * static_cast<std::int64_t>(sizeof(float));
  return {reinterpret_cast<std::byte*>(qkv_.data() + c.query_values()),
          kvblend::ContiguousLayout(active_rows(), c.kv_heads, c.head_dim, row_bytes, head_bytes)};
}

Engine::Plane Engine::fresh_values() {
  Plane fresh = fresh_keys();
  fresh.base += std::int64_t{config().key_values()} * static_cast<std::int64_t>(sizeof(float));
  return fresh;
}

Engine::Plane Engine::keys(std::int32_t layer) { return plane(keys_, layer); }
Engine::Plane Engine::values(std::int32_t layer) { return plane(values_, layer); }

Engine::Plane Engine::plane(Buffer& memory, std::int32_t layer) {
  float* base = memory.data() + std::int64_t{layer} * capacity_ * config().key_values();
  return kvblend::dense_plane<kvblend::F32Codec>(reinterpret_cast<std::byte*>(base), pass_rows_, config().kv_heads,
                                                 config().head_dim);
}

// --- a layer ---------------------------------------------------------------------------------------------------------

MutableMatrix Engine::matrix(Buffer& buffer, std::int64_t columns) const {
  return {buffer.data(), active_rows(), columns, aligned_stride(columns), true};
}
ConstMatrix Engine::read(const Buffer& buffer, std::int64_t columns) const {
  return {buffer.data(), active_rows(), columns, aligned_stride(columns)};
}

Status Engine::check_active(std::int32_t layer, std::span<const Row> rows) const {
  if (!blending_) return Status::error(StatusCode::host_error, "no blend was begun").at("layer %d", layer);
  if (layer < 0 || layer >= layers()) {
    return Status::error(StatusCode::out_of_range, "the model has %d", layers()).at("layer %d", layer);
  }
  if (!std::equal(rows.begin(), rows.end(), active_.begin(), active_.end())) {
    return Status::error(StatusCode::invalid_argument, "rows are not the active set, which has %d", active_rows())
        .at("layer %d", layer);
  }
  return {};
}

void Engine::embed_rows(std::span<const Row> rows) {
  active_.assign(rows.begin(), rows.end());
  const std::int64_t hidden = config().hidden;
  const std::int64_t stride = aligned_stride(hidden);
  pool_.run(tasks_of(active_rows()), [&](std::int64_t task, std::int32_t) {
    const std::int64_t end = (std::min)(std::int64_t{active_rows()}, (task + 1) * kRowsPerTask);
    for (std::int64_t i = task * kRowsPerTask; i < end; ++i) {
      const std::int64_t row = active_[static_cast<std::size_t>(i)].value;
      const auto at = static_cast<std::size_t>(row);
      std::memcpy(hidden_.data() + i * stride, model_.embedding() + tokens_[at] * hidden,
                  static_cast<std::size_t>(hidden) * sizeof(float));
      for (std::size_t table = 0; table < tables_.size(); ++table) {
        const RopeSpec& spec = *table_specs_[table];
        float* cosines = tables_[table].data() + row * 2 * spec.pairs();
        for (std::int32_t pair = 0; pair < spec.pairs(); ++pair) {
          const double angle = positions_[at].value * spec.inv_freq[static_cast<std::size_t>(pair)];
          cosines[pair] = static_cast<float>(std::cos(angle));
          cosines[spec.pairs() + pair] = static_cast<float>(std::sin(angle));
        }
      }
    }
  });
}

void Engine::project_rows(std::int32_t layer) {
  const ModelConfig& c = config();
  const LayerWeights& weights = model_.layer(layer);
  normalise(pool_, read(hidden_, c.hidden), weights.attention_norm.data(), c.norm_epsilon, matrix(normed_, c.hidden));
  multiply(pool_, read(normed_, c.hidden), weights.qkv.data(), matrix(qkv_, c.qkv_values()), false);
  rotate_rows(layer);
}

// Adds the bias and turns queries and keys to their positions.
void Engine::rotate_rows(std::int32_t layer) {
  const ModelConfig& c = config();
  const Buffer& bias = model_.layer(layer).qkv_bias;
  const RopeSpec& spec = model_.rope(layer);
  const float* table = tables_[static_cast<std::size_t>(table_of_layer_[static_cast<std::size_t>(layer)])].data();
  const std::int64_t stride = aligned_stride(c.qkv_values());
  pool_.run(tasks_of(active_rows()), [&](std::int64_t task, std::int32_t) {
    const std::int64_t end = (std::min)(std::int64_t{active_rows()}, (task + 1) * kRowsPerTask);
    for (std::int64_t i = task * kRowsPerTask; i < end; ++i) {
      float* values = qkv_.data() + i * stride;
      if (!bias.empty()) {
        for (std::int64_t column = 0; column < c.qkv_values(); ++column) values[column] += bias.data()[column];
      }
      const float* cosines = table + std::int64_t{active_[static_cast<std::size_t>(i)].value} * 2 * spec.pairs();
      for (std::int32_t head = 0; head < c.heads + c.kv_heads; ++head) {
        rotate_head(spec, cosines, cosines + spec.pairs(), values + std::int64_t{head} * c.head_dim);
      }
    }
  });
}

void Engine::store_fresh(std::int32_t layer) {
  const Plane fresh[] = {fresh_keys(), fresh_values()};
  const Plane cache[] = {keys(layer), values(layer)};
  const std::size_t bytes = static_cast<std::size_t>(config().key_values()) * sizeof(float);
  for (int part = 0; part < 2; ++part) {
    for (std::int32_t i = 0; i < active_rows(); ++i) {
      std::memcpy(cache[part].at(active_[size_of(i)].value, 0), fresh[part].at(i, 0), bytes);
    }
  }
}

// From attention to the end of the layer, for rows[kept[i]]; reports attention if `mass` is not empty.
Status Engine::run_layer(std::int32_t layer, std::span<const Row> rows, std::span<const ActiveIndex> kept,
                         std::int32_t first, std::span<float> mass) {
  const ModelConfig& c = config();
  const LayerWeights& weights = model_.layer(layer);
  for (std::size_t i = 0; i < kept.size(); ++i) {
    if (kept[i].value < 0 || kept[i].value >= active_rows() || (i > 0 && kept[i] <= kept[i - 1])) {
      return Status::error(StatusCode::out_of_range, "kept[%zu] is %d; must ascend in [0, %d)", i, kept[i].value,
                           active_rows())
          .at("layer %d", layer);
    }
  }
  const std::int64_t stride = aligned_stride(c.hidden);
  for (std::size_t i = 0; i < kept.size(); ++i) {
    const auto from = kept[i].value;
    const auto to = static_cast<std::int32_t>(i);
    const Row row = rows[size_of(from)];
    active_[i] = row;
    query_rows_[i] = from;
    // Positions ascend with the rows, so what a row may see is a prefix of them.
    const auto end = positions_.begin() + pass_rows_;
    visible_[i] = static_cast<std::int32_t>(std::upper_bound(positions_.begin(), end, positions_[size_of(row.value)]) -
                                            positions_.begin());
    if (from != to) {
      std::memcpy(hidden_.data() + to * stride, hidden_.data() + from * stride,
                  static_cast<std::size_t>(c.hidden) * sizeof(float));
    }
  }
  active_.resize(kept.size());
  if (kept.empty()) return {};

  Attention attention;
  attention.queries = qkv_.data();
  attention.query_stride = aligned_stride(c.qkv_values());
  attention.query_rows = query_rows_.data();
  attention.visible = visible_.data();
  attention.rows = active_rows();
  attention.keys = reinterpret_cast<const float*>(keys(layer).base);
  attention.values = reinterpret_cast<const float*>(values(layer).base);
  attention.heads = c.heads;
  attention.kv_heads = c.kv_heads;
  attention.head_dim = c.head_dim;
  attention.out = matrix(attended_, c.query_values());
  if (!mass.empty()) {
    // The one allocation a pass can make: how many rows will be asked about is not known before.
    const std::int64_t needed = mass_partials(active_rows(), c.heads, c.kv_heads) * pass_rows_;
    if (partial_mass_.size() < needed) partial_mass_ = Buffer(needed);
    attention.mass = mass.data();
    attention.mass_first = first;
    attention.mass_rows = pass_rows_;
    attention.partial = partial_mass_.data();
  }
  eigen_engine::attend(pool_, attention, scratch_);
  multiply(pool_, read(attended_, c.query_values()), weights.attention_output.data(), matrix(hidden_, c.hidden), true);
  normalise(pool_, read(hidden_, c.hidden), weights.feed_forward_norm.data(), c.norm_epsilon,
            matrix(normed_, c.hidden));
  multiply_gated(pool_, read(normed_, c.hidden), weights.gate_up.data(), matrix(gated_, c.feed_forward), scratch_);
  multiply(pool_, read(gated_, c.feed_forward), weights.down.data(), matrix(hidden_, c.hidden), true);
  return {};
}

}  // namespace eigen_engine
