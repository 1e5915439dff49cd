// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The flow of kvblend-cuda-bench on any machine: passages are computed alone, then a prompt of them is prefilled in
// full and blended, each to the logits of its last row, and the times and logits are compared.
#pragma once

#include <cuda_engine/bench_options.hpp>
#include <cuda_engine/blender.hpp>
#include <cuda_engine/engine.hpp>
#include <cuda_engine/passages.hpp>
#include <kvblend/cuda/layer_loader.hpp>

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

// A Machine is a Device with a stopwatch and a recorder of graphs:
//   device()
//   start(), stop()      queue marks in the stream of work
//   milliseconds(out)    between them; waits
//   record(body)         keeps what body() queues; replay() queues it again
//   streams()            the stream of work and one for copies, with marks for kLoadDepth layers
template <class M>
concept Machine = requires(M& machine, double& milliseconds, Status (*body)()) {
  requires Device<typename M::Device>;
  { machine.device() } -> std::same_as<typename M::Device&>;
  { machine.start() } -> std::same_as<Status>;
  { machine.stop() } -> std::same_as<Status>;
  { machine.milliseconds(milliseconds) } -> std::same_as<Status>;
  { machine.record(body) } -> std::same_as<Status>;
  { machine.replay() } -> std::same_as<Status>;
  { machine.streams() } -> kvblend::cuda::Streams;
};

template <Machine M>
class Bench {
 public:
  using D = typename M::Device;
  using Loader = kvblend::cuda::LayerLoader<Passages<D, Where::host>, typename M::Streams>;

  Bench(M& machine, const BenchOptions& options)
      : machine_(machine),
        options_(options),
        weights_(),
        engine_(machine.device(), weights_),
        passages_(machine.device(), engine_),
        host_passages_(machine.device(), engine_) {}

  Status open();
  Status run();
  [[nodiscard]] const std::string& json() const { return json_; }

 private:
  struct Times {
    double least = 0, median = 0;
  };

  Status make_prompt();
  // Times body(), which ends with logits in logits_, and takes the logits of the last round.
  template <class Body>
  Status measure(const Body& body, Times& times, std::vector<float>& logits);
  Status measure_ratio(double ratio);
  template <class Body>
  Status report(double ratio, const char* source, const Body& body, std::vector<float>& logits);
  template <class Body>
  Status report_graph(double ratio, const char* source, const Body& body, const std::vector<float>& expected);
  Status last_logits() { return engine_.logits({logits_.data(), static_cast<std::size_t>(logits_.size())}); }
  template <class... Values>
  void print(const char* format, Values... values) {
    char text[512];
    std::snprintf(text, sizeof text, format, values...);
    json_ += text;
  }

  M& machine_;
  const BenchOptions options_;
  Weights<D> weights_;
  Engine<D> engine_;
  Passages<D> passages_;
  Passages<D, Where::host> host_passages_;
  Array<D, std::byte> staging_;  // of layers on their way to the device
  std::vector<TokenId> tokens_;
  std::vector<kvblend::ChunkInfo> chunks_;
  std::vector<Segment> segments_;
  Prompt prompt_;
  Array<D, float> logits_;  // of the prompt's last row
  std::vector<float> full_logits_;
  std::string json_;
};

template <Machine M>
Status Bench<M>::open() {
  const Result<ModelConfig> config = bench_shape(options_);
  KVBLEND_RETURN_IF_ERROR(config.status);
  const Result<RopeSpec> rope = bench_rope(options_, config.value);
  KVBLEND_RETURN_IF_ERROR(rope.status);
  KVBLEND_RETURN_IF_ERROR(weights_.make_up(machine_.device(), config.value, rope.value, options_.seed));
  EngineOptions engine_options;
  engine_options.max_rows = options_.tokens;
  engine_options.attention_bytes = std::int64_t{options_.attention_mb} << 20;
  engine_options.attention = options_.attention;
  KVBLEND_RETURN_IF_ERROR(engine_.open(engine_options));
  KVBLEND_RETURN_IF_ERROR(logits_.allocate(config.value.vocabulary, "logits"));
  return make_prompt();
}

template <Machine M>
Status Bench<M>::make_prompt() {
  std::mt19937 generator(options_.seed);
  const auto vocabulary = static_cast<std::uint32_t>(engine_.config().vocabulary);
  for (std::int32_t i = 0; i < options_.tokens; ++i) tokens_.push_back(static_cast<TokenId>(generator() % vocabulary));
  const std::span<const TokenId> all(tokens_);
  const auto passage_rows = static_cast<std::size_t>(options_.tokens - options_.question);
  const auto size = static_cast<std::size_t>(options_.passage);
  for (std::size_t at = 0; at < passage_rows;) {
    const std::size_t count = passage_rows - at < 2 * size ? passage_rows - at : size;
    KVBLEND_RETURN_IF_ERROR(passages_.add(all.subspan(at, count)));
    at += count;
  }
  for (std::int32_t i = 0; i < passages_.size(); ++i) chunks_.push_back({passages_.tokens(i), Position(0), {}, {}});
  for (const kvblend::ChunkInfo& chunk : chunks_) segments_.push_back(kvblend::cached_segment(chunk));
  segments_.push_back(kvblend::fresh_segment(all.subspan(passage_rows)));
  Result<Prompt> prompt = Prompt::make(segments_, Position(engine_.config().context - 1));
  KVBLEND_RETURN_IF_ERROR(prompt.status);
  prompt_ = prompt.value;
  if (!options_.pinned) return {};
  KVBLEND_RETURN_IF_ERROR(host_passages_.copy(passages_));
  const ModelConfig& c = engine_.config();
  return staging_.allocate(
      static_cast<std::int64_t>(Loader::staging_bytes(prompt_, {c.layers, c.kv_heads, c.head_dim}, kLoadDepth)),
      "staging");
}

template <Machine M>
template <class Body>
Status Bench<M>::measure(const Body& body, Times& times, std::vector<float>& logits) {
  std::vector<double> all;
  for (std::int32_t round = 0; round <= options_.rounds; ++round) {
    double milliseconds = 0;
    KVBLEND_RETURN_IF_ERROR(machine_.start());
    KVBLEND_RETURN_IF_ERROR(body());
    KVBLEND_RETURN_IF_ERROR(machine_.stop());
    KVBLEND_RETURN_IF_ERROR(machine_.milliseconds(milliseconds));
    if (round > 0) all.push_back(milliseconds);  // the first one warms up
  }
  std::sort(all.begin(), all.end());
  times = {all.front(), all[all.size() / 2]};
  logits.resize(static_cast<std::size_t>(logits_.size()));
  return machine_.device().download(logits.data(), logits_.data(), logits.size() * sizeof(float));
}

template <Machine M>
template <class Body>
Status Bench<M>::report(double ratio, const char* source, const Body& body, std::vector<float>& logits) {
  Times times;
  KVBLEND_RETURN_IF_ERROR(measure(body, times, logits));
  double difference = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const double here = std::fabs(static_cast<double>(logits[i]) - static_cast<double>(full_logits_[i]));
    if (!(here <= difference)) difference = here;  // a NaN too
  }
  const auto best = [](const std::vector<float>& of) { return std::max_element(of.begin(), of.end()) - of.begin(); };
  print(
      "%s\n    {\"ratio\": %g, \"kv\": \"%s\", \"min_ms\": %.4f, \"median_ms\": %.4f, \"logits_difference\": %.6g, "
      "\"same_token\": %s}",
      json_.back() == '[' ? "" : ",", ratio, source, times.least, times.median, difference,
      best(logits) == best(full_logits_) ? "true" : "false");
  return {};
}

template <Machine M>
Status Bench<M>::measure_ratio(double ratio) {
  const std::array<Row, 1> outputs = {Row(prompt_.rows() - 1)};
  Blender<D> blender(machine_.device(), BenchSelector({}, kvblend::RatioBudget{ratio}));
  KVBLEND_RETURN_IF_ERROR(blender.open(engine_, prompt_));
  const auto blend = [&]() -> Status {
    engine_.clear();
    KVBLEND_RETURN_IF_ERROR(blender.run(engine_, passages_, prompt_, outputs));
    return last_logits();
  };
  std::vector<float> logits;
  KVBLEND_RETURN_IF_ERROR(report(ratio, "device", blend, logits));
  if (options_.graph) KVBLEND_RETURN_IF_ERROR(report_graph(ratio, "device, graph", blend, logits));
  if (!options_.pinned) return {};
  Loader loader(machine_.streams());
  const auto load_and_blend = [&]() -> Status {
    engine_.clear();
    const ModelConfig& c = engine_.config();
    KVBLEND_RETURN_IF_ERROR(loader.open(host_passages_, prompt_, {c.layers, c.kv_heads, c.head_dim}, kLoadDepth,
                                        {staging_.data(), static_cast<std::size_t>(staging_.size())}));
    KVBLEND_RETURN_IF_ERROR(blender.run(engine_, loader, prompt_, outputs));
    return last_logits();
  };
  std::vector<float> loaded;
  KVBLEND_RETURN_IF_ERROR(report(ratio, "pinned", load_and_blend, loaded));
  if (loaded != logits) return Status::error(StatusCode::mismatch, "differ from those of resident KV").at("logits");
  return options_.graph ? report_graph(ratio, "pinned, graph", load_and_blend, logits) : Status();
}

template <Machine M>
template <class Body>
Status Bench<M>::report_graph(double ratio, const char* source, const Body& body, const std::vector<float>& expected) {
  std::vector<float> logits;
  KVBLEND_RETURN_IF_ERROR(machine_.record(body));
  KVBLEND_RETURN_IF_ERROR(report(
      ratio, source, [&] { return machine_.replay(); }, logits));
  if (logits == expected) return {};
  return Status::error(StatusCode::mismatch, "differ from those without a graph").at("logits");
}

template <Machine M>
Status Bench<M>::run() {
  Times full;
  const auto prefill = [&]() -> Status {
    engine_.clear();
    KVBLEND_RETURN_IF_ERROR(engine_.prefill(tokens_));
    return last_logits();
  };
  KVBLEND_RETURN_IF_ERROR(measure(prefill, full, full_logits_));
  print(
      "{\n  \"shape\": \"%s\", \"attention\": \"%s\", \"tokens\": %d, \"passages\": %d, \"question\": %d, "
      "\"rounds\": %d,\n",
      options_.shape.c_str(), to_string(options_.attention), options_.tokens, passages_.size(), options_.question,
      options_.rounds);
  print("  \"full_prefill\": {\"min_ms\": %.4f, \"median_ms\": %.4f},\n  \"blends\": [", full.least, full.median);
  for (const double ratio : options_.ratios) KVBLEND_RETURN_IF_ERROR(measure_ratio(ratio));
  json_ += "\n  ]\n}\n";
  return {};
}

}  // namespace cuda_engine
