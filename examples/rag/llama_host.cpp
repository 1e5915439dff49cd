// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <rag/llama_host.hpp>

#include <rag/selectors.hpp>

#include <kvblend/select/norm.hpp>
#include <llama_cpp/host.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "llama.h"

namespace rag {

using namespace kvblend;

namespace {

const char* name_of(DType type) {
  switch (type) {
    case DType::f32: return "f32";
    case DType::f16: return "f16";
    case DType::bf16: return "bf16";
    case DType::q8_0: return "q8_0";
    default: return "other";
  }
}

}  // namespace

Result<std::unique_ptr<Host>> LlamaHost::open(const std::string& model_path, const LlamaOptions& options) {
  auto model = llama_cpp::Model::open(model_path);
  KVBLEND_RETURN_IF_ERROR(model.status);
  auto identity = identity_of_file(model_path);
  KVBLEND_RETURN_IF_ERROR(identity.status);
  identity.value.dtype = options.cache_type;
  identity.value.layers = model.value.layers();
  identity.value.kv_heads = model.value.kv_heads();
  identity.value.head_dim = model.value.head_dim();
  return std::unique_ptr<Host>(new LlamaHost(std::move(model.value), std::move(identity.value), options));
}

std::string LlamaHost::note() const {
  std::string out = std::string(name_of(options_.cache_type)) + " cache, flash attention " +
                    (options_.flash_attention ? "on" : "off") + "; blends ";
  if (engine_->route() == llama_cpp::Route::runs) {
    out += "take a decode for each run of tokens, which is slower, and no plan";
  } else if (!engine_->runs_ranges()) {
    out += "run in place, all layers at once";
  } else {
    out += "run in place";
  }
  return engine_->route_reason().empty() ? out : out + ": " + engine_->route_reason();
}

Status LlamaHost::check(const Selection& selection) const {
  const auto traits = selector_traits(selection.selector);
  KVBLEND_RETURN_IF_ERROR(traits.status);
  const bool asks = traits.value.timing == ScoreTiming::after_probe || traits.value.needs_stored_scores;
  if (const Status why = engine_->can_probe(); asks && !why.ok()) {
    return Status::error(StatusCode::unsupported, "needs attention, which cannot be read: %s: %s", why.where(),
                         why.message())
        .at("selector %s", selection.selector.c_str());
  }
  if (const Status why = engine_->can_settle(); traits.value.drifts && !why.ok()) {
    return Status::error(StatusCode::unsupported, "moves rows layer by layer, which cannot be done: %s: %s",
                         why.where(), why.message())
        .at("selector %s", selection.selector.c_str());
  }
  if (selection.schedule == "gradual" && !engine_->runs_ranges()) {
    return Status::error(StatusCode::unsupported, "needs ranges of layers, which are not run: %s",
                         engine_->route_reason().c_str())
        .at("schedule gradual");
  }
  return {};
}

Status LlamaHost::reserve(std::int32_t rows) {
  llama_cpp::EngineOptions options;
  options.context = rows;
  options.threads = options_.threads;
  options.cache_type = options_.cache_type;
  options.flash_attention = options_.flash_attention;
  options.route = options_.route;
  options.fill_from = 0;
  auto engine = llama_cpp::Engine::open(model_, options);
  KVBLEND_RETURN_IF_ERROR(engine.status);
  engine_ = std::move(engine.value);
  if (!engine_->can_probe().ok()) probes_.clear();  // check() says what then cannot be done
  // Another engine's KV of the same file and type differs, and so do rows that were turned.
  identity_.fingerprint += " llama.cpp";
  if (engine_->key_hadamard() > 0) identity_.fingerprint += " hadamard " + std::to_string(engine_->key_hadamard());
  return {};
}

Status LlamaHost::prefill(std::span<const TokenId> tokens, Wanted wanted) {
  logits_.clear();
  if (wanted != Wanted::all) {
    KVBLEND_RETURN_IF_ERROR(
        engine_->prefill(tokens, wanted == Wanted::last ? llama_cpp::Wanted::last : llama_cpp::Wanted::none));
    logits_.assign(engine_->logits().begin(), engine_->logits().end());
    return {};
  }
  // One by one, as an answer is decoded: llama.cpp's kernels for one token and for many round differently.
  for (const TokenId& token : tokens) {
    KVBLEND_RETURN_IF_ERROR(engine_->prefill({&token, 1}));
    logits_.insert(logits_.end(), engine_->logits().begin(), engine_->logits().end());
  }
  return {};
}

Status LlamaHost::logits(std::span<float> out) {
  if (logits_.size() != out.size()) {
    return Status::error(StatusCode::mismatch, "has %zu, wanted are %zu", logits_.size(), out.size()).at("logits");
  }
  std::copy(logits_.begin(), logits_.end(), out.begin());
  return {};
}

Result<ChunkHandle> LlamaHost::encode(std::span<const TokenId> tokens, std::span<const TokenId> context) {
  if (!context.empty() && std::ranges::equal(context, context_)) {
    KVBLEND_RETURN_IF_ERROR(engine_->truncate(static_cast<std::int32_t>(context.size())));
  } else {
    clear();
    KVBLEND_RETURN_IF_ERROR(engine_->prefill(context, llama_cpp::Wanted::none));
    context_.assign(context.begin(), context.end());
  }
  KVBLEND_RETURN_IF_ERROR(engine_->prefill(tokens, llama_cpp::Wanted::none));
  ChunkHandle out;
  const Status status = llama_cpp::with_host(*engine_, blob_, [&](auto&& host) -> Status {
    using Stored = typename std::remove_cvref_t<decltype(host)>::stored_codec;
    auto chunk = llama_cpp::export_chunk<Stored>(*engine_, chunk_identity(tokens, context));
    KVBLEND_RETURN_IF_ERROR(chunk.status);
    if (!probes_.empty()) {
      const Probing probing = [this](std::span<const TokenId> probe, ProbeSums& sums) {
        return this->probe(probe, sums);
      };
      KVBLEND_RETURN_IF_ERROR(saliency(probing, model_.layers(), llama_model_n_head(model_.get()), probes_,
                                       context.size(), chunk.value.scores()));
    }
    out = share(std::move(chunk.value));
    return {};
  });
  KVBLEND_RETURN_IF_ERROR(status);
  return out;
}

Status LlamaHost::probe(std::span<const TokenId> tokens, ProbeSums& out) {
  const auto rows = static_cast<std::size_t>(engine_->rows());
  out.mass.assign(rows, 0.0f);
  out.value_mass.assign(rows, 0.0f);
  if (rows == 0) return {};
  KVBLEND_RETURN_IF_ERROR(engine_->probe(tokens));
  return llama_cpp::with_host(*engine_, blob_, [&](auto&& host) -> Status {
    using Stored = typename std::remove_cvref_t<decltype(host)>::stored_codec;
    return llama_cpp::read_held<Stored>(
        *engine_, [&](std::int32_t layer, std::int32_t first, const auto&, const auto& values) -> Status {
          const std::span<const float> mass = engine_->attention_mass(layer);
          for (std::size_t r = 0; r < rows; ++r) {
            out.mass[r] += mass[r];
            if (layer == 0 || mass[r] == 0) continue;
            const std::int64_t held = static_cast<std::int64_t>(r) - first;
            if (held < 0) {
              return Status::error(StatusCode::host_error, "gets attention in layer %d, whose window has passed it",
                                   layer)
                  .at("row %zu", r);
            }
            out.value_mass[r] += mass[r] * row_norm(values, held);
          }
          return {};
        });
  });
}

Status LlamaHost::store_scores(std::vector<std::vector<TokenId>> probes) {
  probes_ = std::move(probes);
  return {};
}

Status LlamaHost::blend(const Prompt& prompt, std::span<const ChunkSource> sources, const Selection& selection,
                        Run& run, std::span<float> logits) {
  KVBLEND_RETURN_IF_ERROR(check(selection));
  context_.clear();
  if (prompt.reused_rows() == 0 && prompt.exact_end().value < prompt.rows()) {
    KVBLEND_RETURN_IF_ERROR(prefill_behind_prefix(prompt, sources, run));
  } else {
    const std::array<Row, 1> outputs = {Row(prompt.rows() - 1)};
    KVBLEND_RETURN_IF_ERROR(blend_rows(prompt, sources, selection, outputs, run));
  }
  Stopwatch watch(run.recompute_s);
  logits_.assign(engine_->logits().begin(), engine_->logits().end());
  return this->logits(logits);
}

Status LlamaHost::blend_rows(const Prompt& prompt, std::span<const ChunkSource> sources, const Selection& selection,
                             std::span<const Row> outputs, Run& run) {
  PassReport report;
  const auto traits = selector_traits(selection.selector);
  KVBLEND_RETURN_IF_ERROR(traits.status);
  const Status status = with_selector(selection, [&](const auto& selector) {
    return llama_cpp::with_host(*engine_, blob_, [&](auto&& host) {
      using Stored = typename std::remove_cvref_t<decltype(host)>::stored_codec;
      if (traits.value.drifts) {
        return blender_.run<Stored, CommonDrift>(host, selector, identity_, prompt, sources, outputs, report);
      }
      return blender_.run<Stored>(host, selector, identity_, prompt, sources, outputs, report);
    });
  });
  KVBLEND_RETURN_IF_ERROR(status);
  run.load_s = report.fusor.load_s;
  run.shift_s = report.fusor.shift_s;
  run.score_s = report.fusor.score_s;
  run.select_s = report.fusor.select_s;
  run.merge_s = report.fusor.merge_s + report.load_cache_s;
  run.rows_recomputed = report.fusor.rows_selected;
  run.rows_computed = report.fusor.rows_computed;
  run.recompute_s = report.score_pass_s + report.probe_s + report.compute_s;
  return {};
}

// What comes behind an exact prefix and is all new needs no blend.
Status LlamaHost::prefill_behind_prefix(const Prompt& prompt, std::span<const ChunkSource> sources, Run& run) {
  std::vector<Segment> prefix;
  std::vector<TokenId> rest;
  for (const Segment& segment : prompt.segments()) {
    if (segment.end_row() <= prompt.exact_end()) {
      prefix.push_back(segment);
    } else {
      rest.insert(rest.end(), segment.tokens.begin(), segment.tokens.end());
    }
  }
  const Result<Prompt> exact = Prompt::make(prefix, Position(context() - 1));
  KVBLEND_RETURN_IF_ERROR(exact.status);
  KVBLEND_RETURN_IF_ERROR(blend_rows(exact.value, sources.first(prefix.size()), {.selector = "first_k"}, {}, run));
  Stopwatch watch(run.recompute_s);
  return engine_->prefill(rest);
}

// All but the embedding is taken for the layers'.
LayerFlops LlamaHost::layer_flops() const {
  const llama_model* model = model_.get();
  const double embedding = static_cast<double>(model_.vocabulary()) * llama_model_n_embd(model);
  const double weights = (static_cast<double>(llama_model_n_params(model)) - embedding) / model_.layers();
  return {2.0 * weights, 4.0 * llama_model_n_head(model) * model_.head_dim()};
}

Result<double> LlamaHost::layer_time(const ChunkHandle& chunk, std::int32_t rows, std::int32_t context) {
  context_.clear();
  // One new token first, so that the chunk behind it is no exact prefix.
  const ChunkInfo info = chunk->info();
  std::vector<Segment> segments = {fresh_segment(info.tokens.first(1))};
  for (std::int32_t left = context - 1; left > 0; left -= chunk->tokens()) {
    segments.push_back(cached_segment(info, 0, (std::min)(left, chunk->tokens())));
  }
  std::vector<ChunkSource> sources(segments.size(), ChunkSource(chunk));
  sources.front() = {};
  const Result<Prompt> prompt = Prompt::make(segments, Position(this->context() - 1));
  KVBLEND_RETURN_IF_ERROR(prompt.status);
  const std::array<Row, 1> outputs = {Row(context - 1)};
  using Selector = DeviationSelector<RandomScore, CountBudget>;
  const Selector selector(RandomScore{}, CountBudget{(std::max)(rows - 2, 0)});  // the first row and the last run too

  double seconds = 0;
  const Status status = llama_cpp::with_host(*engine_, blob_, [&](auto&& host) -> Status {
    using Stored = typename std::remove_cvref_t<decltype(host)>::stored_codec;
    LayerwiseLoader<Stored> source;
    KVBLEND_RETURN_IF_ERROR(source.open(identity_, prompt.value, sources, 1, {}));
    LayerwiseFusor<Selector, Backend> fusor(selector, Backend(eigen_engine::PoolExecutor(pool_)));
    std::vector<std::byte> workspace(fusor.workspace_bytes(prompt.value, identity_.head_dim));
    KVBLEND_RETURN_IF_ERROR(fusor.begin(prompt.value, {host.layers(), identity_.head_dim}, outputs, workspace));
    engine_->clear();
    KVBLEND_RETURN_IF_ERROR(host.begin(prompt.value));

    // A few layers tell, if they can be run alone: those behind the one that scoring ends at.
    LayerRange range{0, host.layers()};
    if (host.runs_ranges() && host.layers() > 5) {
      range = {1, 5};
      KVBLEND_RETURN_IF_ERROR(host.score(range.first, fusor.active()));
    }
    double place_s = 0;
    double load_s = 0;
    double compute_s = 0;
    {
      Stopwatch watch(place_s);
      for (std::int32_t l = 0; l < host.layers(); ++l) {
        KVBLEND_RETURN_IF_ERROR(fusor.place(l, host.rope(l), source, host.keys(l), host.values(l), true));
      }
    }
    {
      Stopwatch watch(load_s);
      KVBLEND_RETURN_IF_ERROR(host.load());
    }
    {
      Stopwatch watch(compute_s);
      KVBLEND_RETURN_IF_ERROR(host.compute(range, fusor.active(), {}));
    }
    seconds += (place_s + load_s) / host.layers() + compute_s / range.size();
    return {};
  });
  engine_->clear();
  KVBLEND_RETURN_IF_ERROR(status);
  return seconds;
}

}  // namespace rag
