// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <rag/eigen_host.hpp>

#include <rag/layer_time.hpp>
#include <rag/selectors.hpp>

#include <eigen_engine/gguf_loader.hpp>

#include <algorithm>
#include <array>

namespace rag {

using namespace kvblend;
using eigen_engine::Engine;

Result<std::unique_ptr<Host>> EigenHost::open(const std::string& model_path, std::int32_t threads) {
  auto model = eigen_engine::load_gguf(model_path.c_str());
  KVBLEND_RETURN_IF_ERROR(model.status);
  auto identity = identity_of_file(model_path);
  KVBLEND_RETURN_IF_ERROR(identity.status);
  const eigen_engine::ModelConfig& config = model.value.config();
  identity.value.dtype = DType::f32;
  identity.value.layers = config.layers;
  identity.value.kv_heads = config.kv_heads;
  identity.value.head_dim = config.head_dim;
  return std::unique_ptr<Host>(new EigenHost(std::move(model.value), std::move(identity.value), threads));
}

Status EigenHost::reserve(std::int32_t rows) {
  std::size_t longest = 0;  // a probe behind the longest chunk
  for (const auto& probe : probes_) longest = (std::max)(longest, probe.size());
  engine_ = std::make_unique<Engine>(model_, rows + static_cast<std::int32_t>(longest), pool_);
  return {};
}

Status EigenHost::prefill(std::span<const TokenId> tokens, Wanted wanted) {
  switch (wanted) {
    case Wanted::none: return engine_->prefill(tokens, eigen_engine::Wanted::none);
    case Wanted::last: return engine_->prefill(tokens, eigen_engine::Wanted::last);
    case Wanted::all: break;
  }
  return engine_->prefill(tokens, eigen_engine::Wanted::all);
}

Result<ChunkHandle> EigenHost::encode(std::span<const TokenId> tokens, std::span<const TokenId> context) {
  const auto first = static_cast<std::int32_t>(context.size());
  const std::span<const TokenId> held = engine_->tokens();
  if (!blended_ && held.size() >= context.size() && std::equal(context.begin(), context.end(), held.begin())) {
    KVBLEND_RETURN_IF_ERROR(engine_->truncate(first));
  } else {
    clear();
    KVBLEND_RETURN_IF_ERROR(engine_->prefill(context, eigen_engine::Wanted::none));
  }
  KVBLEND_RETURN_IF_ERROR(engine_->prefill(tokens, eigen_engine::Wanted::none));
  auto chunk = Chunk::allocate(chunk_identity(tokens, context));
  KVBLEND_RETURN_IF_ERROR(chunk.status);
  for (std::int32_t layer = 0; layer < identity_.layers; ++layer) {
    KVBLEND_RETURN_IF_ERROR(import_rows<F32Codec>(chunk.value, layer, engine_->keys(layer), engine_->values(layer),
                                                  first, 0, chunk.value.tokens()));
  }
  if (!probes_.empty()) KVBLEND_RETURN_IF_ERROR(saliency(*engine_, probes_, context.size(), chunk.value.scores()));
  return share(std::move(chunk.value));
}

Status EigenHost::probe(std::span<const TokenId> tokens, ProbeSums& out) { return run_probe(*engine_, tokens, out); }

Status EigenHost::store_scores(std::vector<std::vector<TokenId>> probes) {
  probes_ = std::move(probes);
  return {};
}

LayerFlops EigenHost::layer_flops() const {
  const eigen_engine::ModelConfig& c = model_.config();
  const double weights = static_cast<double>(c.hidden) * (c.qkv_values() + c.query_values() + 3.0 * c.feed_forward);
  return {2.0 * weights, 4.0 * c.query_values()};
}

Status EigenHost::blend(const Prompt& prompt, std::span<const ChunkSource> sources, const Selection& selection,
                        Run& run, std::span<float> logits) {
  blended_ = true;
  const std::array<Row, 1> outputs = {Row(prompt.rows() - 1)};
  BlendReport report;
  const auto traits = selector_traits(selection.selector);
  KVBLEND_RETURN_IF_ERROR(traits.status);
  KVBLEND_RETURN_IF_ERROR(with_selector(selection, [&](const auto& selector) {
    if (traits.value.drifts) {
      return blender_.run<F32Codec, CommonDrift>(*engine_, selector, identity_, prompt, sources, outputs, report);
    }
    return blender_.run<F32Codec>(*engine_, selector, identity_, prompt, sources, outputs, report);
  }));
  run.load_s = report.fusor.load_s;
  run.shift_s = report.fusor.shift_s;
  run.score_s = report.fusor.score_s;
  run.select_s = report.fusor.select_s;
  run.merge_s = report.fusor.merge_s;
  run.rows_recomputed = report.fusor.rows_selected;
  run.rows_computed = report.fusor.rows_computed;
  run.recompute_s = report.host_s;
  Stopwatch watch(run.recompute_s);
  return engine_->logits(logits);
}

Result<double> EigenHost::layer_time(const ChunkHandle& chunk, std::int32_t rows, std::int32_t context) {
  blended_ = true;
  return LayerTime{*engine_, pool_, chunk}(rows, context);
}

}  // namespace rag
