// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What kvblend-cuda-bench is asked to measure.
#pragma once

#include <cuda_engine/attention_shape.hpp>
#include <cuda_engine/weights.hpp>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace cuda_engine {

struct BenchOptions {
  std::string shape = "llama3-8b";
  std::int32_t tokens = 4096;  // of the whole prompt
  std::int32_t passage = 512;  // tokens of a passage; the last one takes what is left over
  std::int32_t question = 64;  // tokens behind the passages
  std::vector<double> ratios = {0.05, 0.15, 0.3};
  std::int32_t rounds = 5;
  std::int32_t attention_mb = 256;
  std::uint32_t seed = 1;
  AttentionBy attention = AttentionBy::own;
  bool pinned = true;  // also with KV in pinned host memory
  bool graph = true;   // also captured in a graph and replayed
  bool check = false;
  bool cpu = false;
  bool help = false;
};

inline constexpr const char* kBenchUsage =
    "kvblend-cuda-bench [options]: time to the first token of a full prefill and of blends, as JSON\n"
    "  --shape S         llama3-8b, qwen2.5-7b or tiny; random weights\n"
    "  --tokens N        of the prompt\n"
    "  --passage N       tokens of each passage\n"
    "  --question N      tokens behind the passages\n"
    "  --ratios A,B,…    of reused rows that are computed again\n"
    "  --rounds N        measured after one that is not\n"
    "  --attention-mb N  scratch of attention\n"
    "  --seed N\n"
    "  --no-pinned       leave out KV that is loaded from host memory\n"
    "  --no-graph        leave out graph capture\n"
    "  --attention A     own: the engine's kernel; products; flashinfer, in a program that was built with it\n"
    "  --check           no times: compares a small model's logits on the GPU with those of the CPU, also as JSON\n"
    "  --cpu             the same flow without a GPU, for trying it\n";

inline Result<ModelConfig> bench_shape(const BenchOptions& options) {
  if (options.shape == "llama3-8b") return llama3_8b(options.tokens);
  if (options.shape == "qwen2.5-7b") return qwen25_7b(options.tokens);
  if (options.shape == "tiny") {
    ModelConfig c;
    c.architecture = "llama";
    c.vocabulary = 320;
    c.hidden = 64;
    c.layers = 3;
    c.heads = 8;
    c.kv_heads = 2;
    c.head_dim = 16;
    c.feed_forward = 128;
    c.context = options.tokens;
    c.tied_output = false;
    return c;
  }
  return Status::error(StatusCode::invalid_argument, "is no shape this program knows").at("%s", options.shape.c_str());
}

inline Result<RopeSpec> bench_rope(const BenchOptions& options, const ModelConfig& config) {
  return kvblend::plain_rope(config.head_dim, options.shape == "qwen2.5-7b" ? 1e6 : 5e5, kvblend::RopePairing::neox);
}

namespace detail {

inline Status parse_number(const char* text, const char* name, std::int64_t least, std::int32_t& out) {
  char* end = nullptr;
  const long long value = std::strtoll(text, &end, 10);
  if (end == text || *end != '\0' || value < least || value > (1 << 30)) {
    return Status::error(StatusCode::invalid_argument, "'%s' is no number from %lld up", text,
                         static_cast<long long>(least))
        .at("%s", name);
  }
  out = static_cast<std::int32_t>(value);
  return {};
}

inline Status parse_ratios(const char* text, std::vector<double>& out) {
  out.clear();
  while (true) {
    char* end = nullptr;
    const double value = std::strtod(text, &end);
    if (end == text || (*end != ',' && *end != '\0') || !(value >= 0 && value <= 1)) {
      return Status::error(StatusCode::invalid_argument, "'%s' is no list of numbers in [0, 1]", text).at("--ratios");
    }
    out.push_back(value);
    if (*end == '\0') return {};
    text = end + 1;
  }
}

inline Status parse_attention(const char* text, AttentionBy& out) {
  for (const AttentionBy by : {AttentionBy::own, AttentionBy::products, AttentionBy::flashinfer}) {
    if (std::strcmp(text, to_string(by)) != 0) continue;
    out = by;
    return {};
  }
  return Status::error(StatusCode::invalid_argument, "'%s' is not own, products or flashinfer", text).at("--attention");
}

}  // namespace detail

inline Result<BenchOptions> parse_bench_options(int count, const char* const* arguments) {
  BenchOptions options;
  std::int32_t seed = 1;
  const struct {
    const char* name;
    std::int32_t& value;
    std::int64_t least;
  } numbers[] = {
      {"--tokens", options.tokens, 2}, {"--passage", options.passage, 1},           {"--question", options.question, 1},
      {"--rounds", options.rounds, 1}, {"--attention-mb", options.attention_mb, 1}, {"--seed", seed, 0}};
  const struct {
    const char* name;
    bool& value;
    bool becomes;
  } flags[] = {{"--no-pinned", options.pinned, false},
               {"--no-graph", options.graph, false},
               {"--check", options.check, true},
               {"--cpu", options.cpu, true},
               {"--help", options.help, true}};
  for (int i = 1; i < count; ++i) {
    const char* const name = arguments[i];
    bool known = false;
    for (const auto& flag : flags) {
      if (std::strcmp(name, flag.name) != 0) continue;
      flag.value = flag.becomes;
      known = true;
    }
    if (known) continue;
    const char* const value = i + 1 < count ? arguments[i + 1] : nullptr;
    for (const auto& number : numbers) {
      if (value == nullptr || std::strcmp(name, number.name) != 0) continue;
      KVBLEND_RETURN_IF_ERROR(detail::parse_number(value, name, number.least, number.value));
      known = true;
    }
    if (value != nullptr && std::strcmp(name, "--shape") == 0) {
      options.shape = value;
      known = true;
    }
    if (value != nullptr && std::strcmp(name, "--attention") == 0) {
      KVBLEND_RETURN_IF_ERROR(detail::parse_attention(value, options.attention));
      known = true;
    }
    if (value != nullptr && std::strcmp(name, "--ratios") == 0) {
      KVBLEND_RETURN_IF_ERROR(detail::parse_ratios(value, options.ratios));
      known = true;
    }
    if (!known) return Status::error(StatusCode::invalid_argument, "is unknown, or lacks its value").at("%s", name);
    ++i;
  }
  options.seed = static_cast<std::uint32_t>(seed);
  if (options.question >= options.tokens) {
    return Status::error(StatusCode::invalid_argument, "leaves no room for passages").at("--question");
  }
  return options;
}

}  // namespace cuda_engine
