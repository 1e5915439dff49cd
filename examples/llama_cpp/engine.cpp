// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <llama_cpp/engine.hpp>

#include <kvblend/codec/hadamard.hpp>
#include <kvblend/fuse/stopwatch.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <utility>

#include "llama.h"

namespace llama_cpp {

using namespace kvblend;

namespace {

// Query rows from which on llama.cpp's CPU flash attention takes its fast kernel, which knows f16 and f32 alone.
constexpr std::int32_t kManyRows = 64;
// Cells that a part of a pass may reach over before it is cut.
constexpr std::int32_t kManyCells = 1536;
// What measure_filling() runs: so many rows, and kManyRows, over so many cells.
constexpr std::int32_t kMeasuredRows = 16;
constexpr std::int32_t kMeasuredCells = 1024;

std::size_t index_of(std::int32_t i) { return static_cast<std::size_t>(i); }

Result<ggml_type> ggml_type_of(DType type) {
  switch (type) {
    case DType::f32: return GGML_TYPE_F32;
    case DType::f16: return GGML_TYPE_F16;
    case DType::bf16: return GGML_TYPE_BF16;
    case DType::q8_0: return GGML_TYPE_Q8_0;
    default: return Status::error(StatusCode::unsupported, "must be f32, f16, bf16 or q8_0").at("cache_type");
  }
}

}  // namespace

void Engine::Free::operator()(llama_context* context) const { llama_free(context); }

Engine::~Engine() = default;

Result<std::unique_ptr<Engine>> Engine::open(const Model& model, const EngineOptions& options) {
  const auto at_least = [](std::int32_t value, std::int32_t least, const char* field) -> Status {
    if (value >= least) return {};
    return Status::error(StatusCode::invalid_argument, "is %d, must be at least %d", value, least).at("%s", field);
  };
  KVBLEND_RETURN_IF_ERROR(at_least(options.context, 1, "context"));
  KVBLEND_RETURN_IF_ERROR(at_least(options.batch, kManyRows, "batch"));
  KVBLEND_RETURN_IF_ERROR(at_least(options.threads, 1, "threads"));
  KVBLEND_RETURN_IF_ERROR(at_least(options.fill_from, 0, "fill_from"));
  if (options.cache_type == DType::q8_0 && !options.flash_attention) {
    return Status::error(StatusCode::unsupported, "q8_0 needs flash attention, as llama.cpp's values do")
        .at("cache_type");
  }
  std::unique_ptr<Engine> engine(new Engine(model, options));
  engine->route_ = options.route;
  engine->fill_from_ = options.fill_from;
  KVBLEND_RETURN_IF_ERROR(engine->make_context());
  KVBLEND_RETURN_IF_ERROR(engine->learn());
  if (options.self_test && options.route == Route::in_place) KVBLEND_RETURN_IF_ERROR(engine->test_itself());
  if (options.fill_from == 0) KVBLEND_RETURN_IF_ERROR(engine->measure_filling());
  return engine;
}

Status Engine::make_context() {
  const Result<ggml_type> type = ggml_type_of(options_.cache_type);
  KVBLEND_RETURN_IF_ERROR(type.status);
  llama_context_params params = llama_context_default_params();
  params.n_ctx = static_cast<std::uint32_t>(options_.context + options_.batch);  // a pass takes scratch cells
  params.n_batch = params.n_ubatch = static_cast<std::uint32_t>(options_.batch);
  params.n_seq_max = 2;
  params.n_threads = params.n_threads_batch = options_.threads;
  params.flash_attn_type = options_.flash_attention ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  params.type_k = params.type_v = type.value;
  params.cb_eval = GraphHook::callback;
  params.cb_eval_user_data = &hook_;
  params.swa_full = true;
  params.kv_unified = true;
  params.op_offload = false;
  params.no_perf = true;
  context_.reset(llama_init_from_model(model_.get(), params));
  if (context_ == nullptr) {
    return Status::error(StatusCode::host_error, "llama.cpp makes none of %u cells, flash attention %s", params.n_ctx,
                         options_.flash_attention ? "on" : "off")
        .at("context");
  }
  return {};
}

// The format of blobs, from the engine's own.
Status Engine::learn() {
  windowed_.assign(index_of(model_.layers()), 0);
  if (model_.window() > 0) KVBLEND_RETURN_IF_ERROR(learn_windows());

  const std::array<TokenId, 1> token = {0};
  std::vector<std::byte> blob;
  KVBLEND_RETURN_IF_ERROR(prefill(token, Wanted::none));
  KVBLEND_RETURN_IF_ERROR(save(blob));
  clear();
  Result<BlobFormat> format = BlobFormat::learn(blob);
  KVBLEND_RETURN_IF_ERROR(format.status);
  blob_format_ = std::move(format.value);

  // With two bodies the second holds the windowed layers; in each, layers ascend.
  std::vector<std::int32_t> next(blob_format_.bodies.size(), 0);
  for (const std::uint8_t windowed : windowed_) {
    const std::int32_t body = windowed != 0 && next.size() > 1 ? 1 : 0;
    places_.push_back({body, next[index_of(body)]++});
  }
  const std::int64_t width = std::int64_t{model_.kv_heads()} * model_.head_dim();
  const std::int64_t row_bytes = width / block_values(options_.cache_type) * block_bytes(options_.cache_type);
  for (std::size_t body = 0; body < next.size(); ++body) {
    if (next[body] != static_cast<std::int32_t>(blob_format_.bodies[body].size())) {
      return Status::error(StatusCode::unsupported, "keeps KV of %zu layers in place of %d",
                           blob_format_.bodies[body].size(), next[body])
          .at("context");
    }
    for (const BlobLayer& layer : blob_format_.bodies[body]) {
      if (layer.key_row_bytes == row_bytes && layer.value_row_bytes == row_bytes) continue;
      return Status::error(StatusCode::unsupported, "keeps key and value rows of %lld and %lld bytes in place of %lld",
                           static_cast<long long>(layer.key_row_bytes), static_cast<long long>(layer.value_row_bytes),
                           static_cast<long long>(row_bytes))
          .at("cache");
    }
  }
  return {};
}

// Which layers have the window, from what one token's masks show: it stands at the end of two windows, the cells before
// it at the positions that tell.
Status Engine::learn_windows() {
  const std::int32_t window = model_.window();
  const std::int32_t own = 2 * window;
  const auto put = [this](std::int32_t position, std::span<const TokenId> tokens) -> Status {
    llama_memory_t memory = llama_get_memory(context_.get());
    KVBLEND_RETURN_IF_ERROR(decode(1, position, tokens, {}));
    llama_memory_seq_cp(memory, 1, 0, -1, -1);
    llama_memory_seq_rm(memory, 1, -1, -1);
    return {};
  };
  const std::array<TokenId, 2> tokens = {0, 0};
  KVBLEND_RETURN_IF_ERROR(put(0, std::span(tokens).first(1)));
  KVBLEND_RETURN_IF_ERROR(put(own - window, tokens));  // just outside, and just inside
  KVBLEND_RETURN_IF_ERROR(put(own - 1, std::span(tokens).first(1)));
  GraphHook::Observation seen;
  hook_.observe(seen);
  const Status status = decode(0, own, std::span(tokens).first(1), {});
  const Status hooked = hook_.finish();
  clear();
  KVBLEND_RETURN_IF_ERROR(status);
  KVBLEND_RETURN_IF_ERROR(hooked);
  if (seen.alibi) return Status::error(StatusCode::unsupported, "biases attention by distance").at("model");
  for (std::size_t layer = 0; layer < windowed_.size(); ++layer) {
    const auto shows = [&](std::array<bool, 5> expected) {
      return layer < seen.visible.size() && seen.visible[layer].size() >= expected.size() &&
             std::equal(expected.begin(), expected.end(), seen.visible[layer].begin());
    };
    windowed_[layer] = shows({false, false, true, true, true}) ? 1 : 0;
    if (windowed_[layer] == 0 && !shows({true, true, true, true, true})) {
      return Status::error(StatusCode::unsupported, "attention is neither full nor a plain window of %d", window)
          .at("layer %zu", layer);
    }
  }
  return {};
}

// From how many rows on a pass takes no less time than one of 64, over a cache of zeros.
Status Engine::measure_filling() {
  fill_from_ = kManyRows;  // nothing is filled up meanwhile
  const std::int32_t cells = std::min(options_.context, kMeasuredCells);
  if (!wants_many_rows() || route_ != Route::in_place || cells < kManyRows) return {};
  BlobWriter zeros;
  KVBLEND_RETURN_IF_ERROR(zeros.lay_out(blob_format_, cells, Position(0)));
  KVBLEND_RETURN_IF_ERROR(load(zeros.bytes(), cells));
  const std::vector<TokenId> tokens(index_of(cells), 0);
  const auto seconds_of = [&](std::int32_t count, double& least) -> Status {
    std::vector<Row> rows;
    for (std::int32_t i = cells - count; i < cells; ++i) rows.push_back(Row(i));
    for (int round = 0; round < 3; ++round) {
      double seconds = 0;
      {
        Stopwatch watch(seconds);
        KVBLEND_RETURN_IF_ERROR(compute({0, model_.layers()}, rows, tokens, {}));
      }
      least = round == 0 ? seconds : std::min(least, seconds);
    }
    return {};
  };
  double few = 0;
  double many = 0;
  KVBLEND_RETURN_IF_ERROR(seconds_of(kMeasuredRows, few));
  KVBLEND_RETURN_IF_ERROR(seconds_of(kManyRows, many));
  clear();
  fill_from_ = static_cast<std::int32_t>(std::clamp(std::ceil(many / few * kMeasuredRows), 1.0, double{kManyRows}));
  return {};
}

std::int32_t Engine::key_hadamard() const {
  const char* disabled = std::getenv("LLAMA_ATTN_ROT_DISABLE");
  const bool turned = options_.cache_type == DType::q8_0 && !(disabled != nullptr && std::atoi(disabled) != 0);
  return turned ? hadamard_values(model_.head_dim()) : 0;
}

// ---- plain use ------------------------------------------------------------------------------------------------------

void Engine::clear() {
  // Cells that are not used are read as well, under a mask: one that is no number makes all attention so.
  llama_memory_clear(llama_get_memory(context_.get()), poisoned_);
  poisoned_ = false;
  in_order_ = true;
  rows_ = 0;
}

Status Engine::truncate(std::int32_t rows) {
  if (rows < 0 || rows > rows_) {
    return Status::error(StatusCode::out_of_range, "%d of %d", rows, rows_).at("rows");
  }
  llama_memory_seq_rm(llama_get_memory(context_.get()), 0, rows, -1);
  rows_ = rows;
  return {};
}

Status Engine::drop(std::int32_t first, std::int32_t end) {
  if (first < 0 || first > end || end > rows_) {
    return Status::error(StatusCode::out_of_range, "[%d, %d) of %d", first, end, rows_).at("rows");
  }
  llama_memory_t memory = llama_get_memory(context_.get());
  if (!llama_memory_can_shift(memory) || options_.cache_type == DType::bf16) {  // it would abort on bf16
    return Status::error(StatusCode::unsupported, "llama.cpp does not shift these keys").at("context");
  }
  llama_memory_seq_rm(memory, 0, first, end);
  llama_memory_seq_add(memory, 0, end, -1, first - end);
  rows_ -= end - first;
  in_order_ = in_order_ && first == end;
  return {};
}

Status Engine::decode(std::int32_t sequence, std::int32_t first, std::span<const TokenId> tokens,
                      std::span<const std::uint8_t> wants) {
  const auto vocabulary = index_of(model_.vocabulary());
  for (std::size_t done = 0; done < tokens.size();) {
    const std::size_t count = std::min(tokens.size() - done, index_of(options_.batch));
    llama_batch batch = llama_batch_init(static_cast<std::int32_t>(count), 0, 1);
    batch.n_tokens = static_cast<std::int32_t>(count);
    for (std::size_t i = 0; i < count; ++i) {
      batch.token[i] = tokens[done + i];
      batch.pos[i] = first + static_cast<std::int32_t>(done + i);
      batch.n_seq_id[i] = 1;
      batch.seq_id[i][0] = sequence;
      batch.logits[i] = !wants.empty() && wants[done + i] != 0 ? 1 : 0;
    }
    hook_.begin_graph();
    const std::int32_t result = llama_decode(context_.get(), batch);
    Status status;
    if (result != 0) {
      status = Status::error(StatusCode::host_error, "llama.cpp refused %zu tokens from position %d on (%d)", count,
                             batch.pos[0], result)
                   .at("decode");
    }
    for (std::size_t i = 0; i < count && status.ok(); ++i) {
      if (batch.logits[i] == 0) continue;
      const float* row = llama_get_logits_ith(context_.get(), static_cast<std::int32_t>(i));
      if (std::isnan(row[0])) poisoned_ = true;
      logits_.insert(logits_.end(), row, row + vocabulary);
    }
    llama_batch_free(batch);
    KVBLEND_RETURN_IF_ERROR(status);
    done += count;
  }
  return {};
}

Status Engine::prefill(std::span<const TokenId> tokens, Wanted wanted) {
  if (static_cast<std::int64_t>(rows_) + static_cast<std::int64_t>(tokens.size()) > options_.context) {
    return Status::error(StatusCode::insufficient_space, "%zu behind %d, the context has %d", tokens.size(), rows_,
                         options_.context)
        .at("tokens");
  }
  logits_.clear();
  wanted_.assign(tokens.size(), wanted == Wanted::all ? 1 : 0);
  if (wanted == Wanted::last && !tokens.empty()) wanted_.back() = 1;
  if (Status status = decode(0, rows_, tokens, wanted_); !status.ok()) {
    llama_memory_seq_rm(llama_get_memory(context_.get()), 0, rows_, -1);
    return status;
  }
  rows_ += static_cast<std::int32_t>(tokens.size());
  return {};
}

Status Engine::save(std::vector<std::byte>& blob) const {
  if (!in_order_) return Status::error(StatusCode::unsupported, "rows were dropped from it").at("state");
  blob.resize(llama_state_seq_get_size(context_.get(), 0));
  const std::size_t written =
      llama_state_seq_get_data(context_.get(), reinterpret_cast<std::uint8_t*>(blob.data()), blob.size(), 0);
  if (written == blob.size() && written > 0) return {};
  return Status::error(StatusCode::host_error, "llama.cpp wrote %zu bytes of %zu", written, blob.size()).at("state");
}

// ---- a blend --------------------------------------------------------------------------------------------------------

Status Engine::load(std::span<const std::byte> blob, std::int32_t rows) {
  clear();
  if (rows == 0) return {};
  // llama.cpp itself trusts much of what it reads.
  const Result<BlobReader> reader = BlobReader::open(blob_format_, blob);
  KVBLEND_RETURN_IF_ERROR(reader.status);
  if (reader.value.cells(0) != rows || reader.value.first_position(0) != Position(0)) {
    return Status::error(StatusCode::mismatch, "%d cells from position %d on, not %d from 0 on", reader.value.cells(0),
                         reader.value.first_position(0).value, rows)
        .at("state");
  }
  const std::size_t read =
      llama_state_seq_set_data(context_.get(), reinterpret_cast<const std::uint8_t*>(blob.data()), blob.size(), 0);
  if (read != blob.size()) {
    clear();
    return Status::error(StatusCode::host_error, "llama.cpp read %zu bytes of %zu", read, blob.size()).at("state");
  }
  rows_ = rows;
  return {};
}

Status Engine::score(std::int32_t layer, std::span<const TokenId> tokens) {
  if (!scores_) return Status::error(StatusCode::unsupported, "%s", route_reason_.c_str()).at("score");
  if (layer < 0 || layer >= model_.layers()) {
    return Status::error(StatusCode::out_of_range, "%d of %d", layer, model_.layers()).at("layer");
  }
  const auto count = static_cast<std::int32_t>(tokens.size());
  capture_.layer = layer;
  capture_.width = std::int64_t{model_.kv_heads()} * model_.head_dim();
  capture_.tokens = count;
  capture_.done = 0;
  capture_.keys.resize(index_of(layer) + 1);
  capture_.values.resize(index_of(layer) + 1);
  for (auto* planes : {&capture_.keys, &capture_.values}) {
    for (auto& plane : *planes) plane.resize(tokens.size() * static_cast<std::size_t>(capture_.width));
  }
  const bool keeps_hidden = layer > 0 && runs_ranges();
  hidden_.width = llama_model_n_embd(model_.get());
  hidden_.first_cell = rows_;
  hidden_.entry.assign(tokens.size(), keeps_hidden ? layer : -1);
  if (keeps_hidden) hidden_.values.resize(tokens.size() * static_cast<std::size_t>(hidden_.width));
  capture_.hidden = keeps_hidden ? &hidden_ : nullptr;

  hook_.capture(capture_);
  Status status = decode(0, rows_, tokens, {});
  const Status hooked = hook_.finish();
  llama_memory_seq_rm(llama_get_memory(context_.get()), 0, rows_, -1);
  KVBLEND_RETURN_IF_ERROR(status);
  KVBLEND_RETURN_IF_ERROR(hooked);
  if (capture_.done == count) return {};
  return Status::error(StatusCode::host_error, "layer %d stored keys and values of %d tokens in place of %d", layer,
                       capture_.done, count)
      .at("graph");
}

std::span<float> Engine::fresh_keys(std::int32_t layer) { return capture_.keys[index_of(layer)]; }
std::span<float> Engine::fresh_values(std::int32_t layer) { return capture_.values[index_of(layer)]; }

bool Engine::wants_many_rows() const {
  return options_.flash_attention && (options_.cache_type == DType::f16 || options_.cache_type == DType::f32);
}

// How many more rows the fast kernel takes to be taken, where it is worth it.
std::int32_t Engine::missing_rows(std::size_t rows) const {
  if (!wants_many_rows() || rows < index_of(fill_from_) || rows >= index_of(kManyRows)) return 0;
  return kManyRows - static_cast<std::int32_t>(rows);
}

// Adds rows before the last one until there are as many as the fast kernel takes.
void Engine::fill_up(LayerRange range, std::int32_t rows, std::int32_t first_row) {
  const auto others = index_of(rows) - std::min(cells_.size(), index_of(rows));
  std::size_t missing = std::min(index_of(missing_rows(cells_.size())), others);
  for (std::size_t i = cells_.size(); i-- > 0 && missing > 0;) {
    const std::int32_t before = i == 0 ? first_row - 1 : cells_[i - 1];
    std::int32_t cell = cells_[i] - 1;
    std::size_t added = 0;
    const auto runs = [&](std::int32_t candidate) {
      const std::int32_t row = candidate - hidden_.first_cell;
      return range.first == 0 ||
             (row >= 0 && index_of(row) < hidden_.entry.size() && hidden_.entry[index_of(row)] == range.first);
    };
    while (cell > before && added < missing && runs(cell)) {
      --cell;
      ++added;
    }
    std::vector<std::int32_t> filled(added);
    for (std::size_t k = 0; k < added; ++k) filled[k] = cell + 1 + static_cast<std::int32_t>(k);
    cells_.insert(cells_.begin() + static_cast<std::ptrdiff_t>(i), filled.begin(), filled.end());
    wanted_.insert(wanted_.begin() + static_cast<std::ptrdiff_t>(i), added, 0);
    missing -= added;
  }
}

Status Engine::compute(LayerRange range, std::span<const Row> rows, std::span<const TokenId> tokens,
                       std::span<const Row> outputs, std::int32_t first_row, const Settle& settle) {
  logits_.clear();
  if (settle) {
    KVBLEND_RETURN_IF_ERROR(can_settle());
    if (!in_order_) return Status::error(StatusCode::unsupported, "rows were dropped before").at("settle");
  }
  if (rows.empty()) return {};
  cells_.clear();
  for (const Row row : rows) cells_.push_back(row.value);
  if (static_cast<std::int32_t>(tokens.size()) != rows_ || cells_.front() < 0 || cells_.back() >= rows_) {
    return Status::error(StatusCode::out_of_range, "%zu tokens and rows up to %d, the sequence has %d", tokens.size(),
                         cells_.back(), rows_)
        .at("rows");
  }
  wanted_.assign(rows.size(), 0);
  std::size_t next = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (next == outputs.size() || outputs[next] != rows[i]) continue;
    wanted_[i] = 1;
    ++next;
  }
  if (route_ == Route::in_place && in_order_) {
    if (range.first == 0 && range.end < model_.layers()) {
      // Rows that no score() ran leave their hidden rows here for the range that follows.
      hidden_.width = llama_model_n_embd(model_.get());
      hidden_.first_cell = 0;
      hidden_.entry.assign(index_of(rows_), -1);
      hidden_.values.resize(index_of(rows_) * static_cast<std::size_t>(hidden_.width));
    }
    fill_up(range, rows_, first_row);
    Status status = compute_in_place(range, tokens, nullptr, settle, first_row);
    const bool unsound = status.code() == StatusCode::host_error;
    // Rows that may run in all layers give the same, wherever they were to start.
    if (!unsound) return status;
    if (settle) {  // what the other route would start from has moved
      settles_ = status;
      return status;
    }
    if (range.end != model_.layers()) {
      ranges_ = false;
      route_reason_ = std::string(status.where()) + ": " + status.message();
      return status;
    }
    take_other_route(status);
    logits_.clear();
  }
  if (range.end != model_.layers()) {
    return Status::error(StatusCode::unsupported, "ends at layer %d: runs are computed in all layers", range.end)
        .at("range");
  }
  return compute_by_runs(tokens);
}

Status Engine::only_in_place(const char* what, const Status& tested) const {
  if (route_ == Route::in_place) return tested;
  return Status::error(StatusCode::unsupported, "rows are computed by runs%s%s", route_reason_.empty() ? "" : ": ",
                       route_reason_.c_str())
      .at("%s", what);
}

void Engine::take_other_route(const Status& why) {
  route_ = Route::runs;
  route_reason_ = std::string(why.where()) + ": " + why.message();
}

// Rows of the pass that starts with the `done`-th. Cut as llama.cpp cuts a prefill, as results depend on it to the last
// bit. With the fast kernel scattered rows go in smaller parts, which are shown fewer cells; but, batches of 128 rows
// and more provided, no part is too small for it. Where rows settle parts are as long as can be, since each does so by its
// own rows alone.
std::size_t Engine::part_of(std::size_t done, bool settles) const {
  const std::size_t left = cells_.size() - done;
  std::size_t count = std::min(left, index_of(options_.batch));
  if (settles || !wants_many_rows()) return count;
  std::size_t least = 2 * index_of(kManyRows);
  while (least < count && cells_[done + least - 1] - cells_[done] < kManyCells) least += index_of(kManyRows);
  count = std::min(count, least);
  if (left > count && left - count < index_of(kManyRows)) {
    count = left <= index_of(options_.batch) ? left : left / 2;
  }
  return count;
}

// Rows before `first_row` do not settle.
Status Engine::compute_in_place(LayerRange range, std::span<const TokenId> tokens, AttentionReader* reader,
                                const Settle& settle, std::int32_t first_row) {
  for (std::size_t done = 0; done < cells_.size();) {
    const std::size_t count = part_of(done, static_cast<bool>(settle));
    const std::span<const std::int32_t> cells = std::span(cells_).subspan(done, count);
    batch_.clear();
    for (const std::int32_t cell : cells) batch_.push_back(tokens[index_of(std::min(cell, rows_ - 1))]);
    GraphHook::Rewrite what;
    what.range = range;
    what.layers = model_.layers();
    what.cells = rows_;
    what.rows = cells;
    what.windowed = windowed_;
    what.window = model_.window();
    what.hidden = &hidden_;
    hook_.rewrite(what);
    if (settle) {
      GraphHook::Settling settling;
      settling.first = done == 0 ? 0 : cells.front();
      settling.end = done + count == cells_.size() ? rows_ : cells_[done + count];
      settling.decide = [&, first = settling.first, end = settling.end](std::int32_t layer, std::span<const float> keys,
                                                                        std::span<const float> values) {
        return settle(layer, first, end, cells, keys, values);
      };
      settling.first = std::max(settling.first, first_row);
      settling.width = std::int64_t{model_.kv_heads()} * model_.head_dim();
      settling.transposed_values = blob_format_.transposed_values;
      hook_.settle(std::move(settling));
    }
    if (reader != nullptr) hook_.report(*reader);
    const std::span<const std::uint8_t> wants = std::span(wanted_).subspan(done, count);
    const Status status = decode(1, 0, batch_, range.end == model_.layers() ? wants : std::span<const std::uint8_t>{});
    const Status hooked = hook_.finish();
    llama_memory_seq_rm(llama_get_memory(context_.get()), 1, -1, -1);
    KVBLEND_RETURN_IF_ERROR(status);
    KVBLEND_RETURN_IF_ERROR(hooked);
    done += count;
  }
  return {};
}

// Sequence 1 grows from left to right: what is kept is shared with it, what is computed is decoded there.
Status Engine::compute_by_runs(std::span<const TokenId> tokens) {
  llama_memory_t memory = llama_get_memory(context_.get());
  std::int32_t kept = 0;
  Status status;
  for (std::size_t i = 0; i < cells_.size() && status.ok();) {
    const std::size_t first = i;
    while (++i < cells_.size() && cells_[i] == cells_[i - 1] + 1) {
    }
    const std::int32_t begin = cells_[first];
    const std::int32_t end = cells_[i - 1] + 1;
    if (kept < begin) llama_memory_seq_cp(memory, 0, 1, kept, begin);
    llama_memory_seq_rm(memory, 0, begin, end);
    status = decode(1, begin, tokens.subspan(index_of(begin), index_of(end - begin)),
                    std::span(wanted_).subspan(first, i - first));
    kept = end;
  }
  if (!status.ok()) {
    clear();
    return status;
  }
  if (kept < rows_) llama_memory_seq_cp(memory, 0, 1, kept, rows_);
  llama_memory_seq_rm(memory, 0, -1, -1);
  llama_memory_seq_cp(memory, 1, 0, -1, -1);
  llama_memory_seq_rm(memory, 1, -1, -1);
  return {};
}

}  // namespace llama_cpp
