// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Whether a device computes what another does: logits of the same small random model, prefilled and blended over a
// paged cache, and the attention that a probe pass reports. kvblend-cuda-bench --check compares the GPU with the CPU.
#pragma once

#include <cuda_engine/blender.hpp>
#include <cuda_engine/engine.hpp>
#include <cuda_engine/passages.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <span>
#include <string>
#include <vector>

namespace cuda_engine {

struct CheckCase {
  std::int32_t head_dim = 64;
  bool bias = false;
  AttentionBy attention = AttentionBy::own;
};

struct CheckLogits {
  std::vector<float> full, blended;  // of a few rows
  std::vector<float> mass;           // attention of the question to each row
};

// Weights that round differently make other logits: compare devices of one Scalar, or with patience.
template <Device D>
Status logits_to_check(D& device, const CheckCase& of, CheckLogits& out) {
  constexpr std::int32_t kTokens = 205;
  constexpr std::int32_t kPassage = 90;
  ModelConfig config;
  config.vocabulary = 256;
  config.hidden = 256;
  config.layers = 3;
  config.heads = 6;
  config.kv_heads = 2;
  config.head_dim = of.head_dim;
  config.feed_forward = 384;
  config.context = kTokens;
  config.qkv_bias = of.bias;
  config.tied_output = false;
  const Result<RopeSpec> rope =
      kvblend::plain_rope(of.head_dim, 1e4, of.bias ? kvblend::RopePairing::interleaved : kvblend::RopePairing::neox);
  KVBLEND_RETURN_IF_ERROR(rope.status);
  Weights<D> weights;
  KVBLEND_RETURN_IF_ERROR(weights.make_up(device, config, rope.value, 3));
  std::vector<std::int32_t> table(15);
  for (std::size_t i = 0; i < table.size(); ++i) table[i] = static_cast<std::int32_t>(i * 4 % table.size());
  EngineOptions options;
  options.max_rows = kTokens;
  options.block_table = table;
  options.attention = of.attention;
  options.attention_bytes = std::int64_t{1} << 20;
  Engine<D> engine(device, weights);
  KVBLEND_RETURN_IF_ERROR(engine.open(options));

  std::mt19937 generator(4);
  std::vector<TokenId> tokens;
  for (std::int32_t i = 0; i < kTokens; ++i) {
    tokens.push_back(static_cast<TokenId>(generator() % static_cast<std::uint32_t>(config.vocabulary)));
  }
  const std::span<const TokenId> all(tokens);
  Passages<D> passages(device, engine);
  KVBLEND_RETURN_IF_ERROR(passages.add(all.first(kPassage)));
  KVBLEND_RETURN_IF_ERROR(passages.add(all.subspan(kPassage, kPassage)));
  const std::array<kvblend::ChunkInfo, 2> chunks = {kvblend::ChunkInfo{passages.tokens(0), Position(0), {}, {}},
                                                    kvblend::ChunkInfo{passages.tokens(1), Position(0), {}, {}}};
  std::array<Segment, 3> segments = {kvblend::cached_segment(chunks[0]), kvblend::cached_segment(chunks[1]),
                                     kvblend::fresh_segment(all.subspan(2 * kPassage))};
  const Result<Prompt> prompt = Prompt::make(segments, Position(kTokens - 1));
  KVBLEND_RETURN_IF_ERROR(prompt.status);

  Array<D, float> logits;
  KVBLEND_RETURN_IF_ERROR(logits.allocate(std::int64_t{kTokens} * config.vocabulary, "logits"));
  const auto read = [&](std::vector<float>& to) -> Status {
    to.resize(static_cast<std::size_t>(engine.active_rows()) * static_cast<std::size_t>(config.vocabulary));
    KVBLEND_RETURN_IF_ERROR(engine.logits({logits.data(), to.size()}));
    return device.download(to.data(), logits.data(), to.size() * sizeof(float));
  };
  KVBLEND_RETURN_IF_ERROR(engine.prefill(tokens, Wanted::all));
  KVBLEND_RETURN_IF_ERROR(read(out.full));
  engine.clear();
  // Rows that are chosen by their places, since scores that round differently would choose others.
  using Selector = kvblend::DeviationSelector<kvblend::FirstK, kvblend::RatioBudget>;
  Blender<D, Selector> blender(device, Selector({}, kvblend::RatioBudget{0.3}));
  KVBLEND_RETURN_IF_ERROR(blender.open(engine, prompt.value));
  const std::array<Row, 2> outputs = {Row(kTokens - 20), Row(kTokens - 1)};
  KVBLEND_RETURN_IF_ERROR(blender.run(engine, passages, prompt.value, outputs));
  KVBLEND_RETURN_IF_ERROR(read(out.blended));
  // The cache goes on being one.
  std::vector<float> next;
  KVBLEND_RETURN_IF_ERROR(engine.truncate(kTokens - 1));
  KVBLEND_RETURN_IF_ERROR(engine.decode(7));
  KVBLEND_RETURN_IF_ERROR(read(next));
  out.blended.insert(out.blended.end(), next.begin(), next.end());

  engine.clear();
  using Probing = kvblend::DeviationSelector<kvblend::AttentionMass, kvblend::RatioBudget>;
  Blender<D, Probing> prober(device, Probing({}, kvblend::RatioBudget{0.3}));
  KVBLEND_RETURN_IF_ERROR(prober.open(engine, prompt.value));
  KVBLEND_RETURN_IF_ERROR(prober.run(engine, passages, prompt.value, outputs));
  out.mass.resize(prober.attention_mass().size());
  return device.download(out.mass.data(), prober.attention_mass().data(), out.mass.size() * sizeof(float));
}

// |a - b| / |b|, as vectors; infinite where their sizes or a number differ beyond that.
[[nodiscard]] inline double relative_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < a.size() && i < b.size(); ++i) {
    const double off = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    difference += off * off;
    size += static_cast<double>(b[i]) * static_cast<double>(b[i]);
  }
  const double relative = std::sqrt(difference / size);
  return a.size() == b.size() && relative < INFINITY ? relative : INFINITY;
}

// The cases that a device's kernels tell apart, as one JSON object; an error if one is further off than rounding is.
// bf16 has 8 bits: on the CPU its logits are up to 0.02 off those of float32, and two ways of rounding may add up.
// Mistakes are larger: reuse without recompute is 0.13 off a prefill. FlashInfer is held against the device's own
// kernel too, which differs from it in the rounding of attention alone.
template <Device D, Device Reference>
Status check_device(D& device, Reference& reference, std::string& json) {
  constexpr double kMost = 0.05;
  constexpr double kMostToOwn = 0.02;
  Status status;
  json = "{\n  \"checks\": [";
  for (const std::int32_t head_dim : {64, 128}) {
    for (const bool bias : {false, true}) {
      CheckLogits expected;
      KVBLEND_RETURN_IF_ERROR(logits_to_check(reference, {head_dim, bias, AttentionBy::products}, expected));
      const auto compare = [&](const CheckLogits& logits, const CheckLogits& with, AttentionBy by, const char* name,
                               double most) {
        const double full = relative_difference(logits.full, with.full);
        const double blended = relative_difference(logits.blended, with.blended);
        const double mass = relative_difference(logits.mass, with.mass);
        char text[256];
        std::snprintf(text, sizeof text,
                      "%s\n    {\"head_dim\": %d, \"bias\": %s, \"attention\": \"%s\", \"compared_with\": \"%s\", "
                      "\"full\": %.3g, \"blended\": %.3g, \"mass\": %.3g}",
                      json.back() == '[' ? "" : ",", head_dim, bias ? "true" : "false", to_string(by), name, full,
                      blended, mass);
        json += text;
        if (full <= most && blended <= most && mass <= most) return;
        status = Status::error(StatusCode::mismatch, "are %.3g, %.3g and, of attention, %.3g off those of %s", full,
                               blended, mass, name)
                     .at("logits by %s with heads of %d", to_string(by), head_dim);
      };
      CheckLogits products, own;
      KVBLEND_RETURN_IF_ERROR(logits_to_check(device, {head_dim, bias, AttentionBy::products}, products));
      compare(products, expected, AttentionBy::products, "the reference", kMost);
      KVBLEND_RETURN_IF_ERROR(logits_to_check(device, {head_dim, bias, AttentionBy::own}, own));
      compare(own, expected, AttentionBy::own, "the reference", kMost);
      if constexpr (FlashInferDevice<D>) {
        CheckLogits flashinfer;
        KVBLEND_RETURN_IF_ERROR(logits_to_check(device, {head_dim, bias, AttentionBy::flashinfer}, flashinfer));
        compare(flashinfer, expected, AttentionBy::flashinfer, "the reference", kMost);
        compare(flashinfer, own, AttentionBy::flashinfer, "own", kMostToOwn);
      }
    }
  }
  json += "\n  ]\n}\n";
  return status;
}

}  // namespace cuda_engine
