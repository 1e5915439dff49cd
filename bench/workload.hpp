// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What the benchmarks share: options, a model, and a prompt of instructions, passages and question whose reusable parts
// were prefilled alone and stored.
#pragma once

#include <eigen_engine/engine.hpp>
#include <eigen_engine/gguf_loader.hpp>
#include <eigen_engine/tokenizer.hpp>
#include <kvblend/eigen.hpp>
#include <kvblend/kvblend.hpp>
#include <kvblend/store.hpp>
#include <rag/prompt_file.hpp>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace bench {

using namespace kvblend;
using eigen_engine::Engine;

struct Options {
  std::string model = KVBLEND_MODEL_PATH;
  std::string prompt = KVBLEND_DEFAULT_PROMPT;
  std::string json;
  int item = 1;
  int threads = 2;
  int repeats = 5;
};

// A benchmark that cannot go on has nothing to clean up.
inline void require(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s: %s\n", status.where(), status.message());
  std::exit(1);
}

inline Options parse(CLI::App& app, int argc, char** argv) {
  Options options;
  app.add_option("--model", options.model, "GGUF file")->capture_default_str();
  app.add_option("--prompt", options.prompt, "prompt file, as kvblend-rag takes it")->capture_default_str();
  app.add_option("--item", options.item, "which of its items")->check(CLI::Range(1, 1000))->capture_default_str();
  app.add_option("--json", options.json, "write the figures to this file");
  app.add_option("--threads", options.threads)->check(CLI::Range(1, 256))->capture_default_str();
  app.add_option("--repeats", options.repeats)->check(CLI::Range(1, 99))->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  return options;
}

inline void write(const Options& options, const nlohmann::ordered_json& json) {
  if (options.json.empty()) return;
  std::ofstream stream(options.json, std::ios::binary);
  stream << json.dump(1) << '\n';
  if (!stream.flush()) {
    require(Status::error(StatusCode::io_error, "cannot write %.150s", options.json.c_str()).at("json"));
  }
}

inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

inline double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

class Workload {
 public:
  explicit Workload(const Options& options) : pool(options.threads) {
    auto loaded = eigen_engine::load_gguf(options.model.c_str());
    require(loaded.status);
    model = std::make_unique<eigen_engine::Model>(std::move(loaded.value));
    const auto tokenizer = eigen_engine::Tokenizer::load(options.model.c_str());
    require(tokenizer.status);
    const auto file = rag::read_prompt_file(options.prompt);
    require(file.status);
    if (options.item > static_cast<int>(file.value.items.size())) {
      require(Status::error(StatusCode::out_of_range, "the file has %zu", file.value.items.size()).at("item"));
    }
    const rag::Item& item = file.value.items[static_cast<std::size_t>(options.item - 1)];

    const eigen_engine::ModelConfig& config = model->config();
    identity.name = options.model.substr(options.model.find_last_of('/') + 1);
    identity.layers = config.layers;
    identity.kv_heads = config.kv_heads;
    identity.head_dim = config.head_dim;

    const auto tokenize = [&](const std::string& text, bool first) {
      auto tokens = tokenizer.value.tokenize(text, first, false);
      require(tokens.status);
      all.insert(all.end(), tokens.value.begin(), tokens.value.end());
      return tokens.value;
    };
    std::vector<std::vector<TokenId>> parts = {tokenize(file.value.instructions + "\n\n", true)};
    for (const std::string& passage : item.passages) parts.push_back(tokenize(passage + "\n\n", false));
    question = tokenize("Question: " + item.question + "\nAnswer:", false);

    engine = std::make_unique<Engine>(*model, static_cast<std::int32_t>(all.size()), pool);
    for (const auto& part : parts) {
      ChunkIdentity chunk_identity;
      chunk_identity.model = identity;
      for (std::int32_t layer = 0; layer < config.layers; ++layer) chunk_identity.add_layer_rope(model->rope(layer));
      chunk_identity.tokens = part;
      auto chunk = Chunk::allocate(chunk_identity);
      require(chunk.status);
      engine->clear();
      require(engine->prefill(part, eigen_engine::Wanted::none));
      for (std::int32_t layer = 0; layer < config.layers; ++layer) {
        require(import_rows<F32Codec>(chunk.value, layer, engine->keys(layer), engine->values(layer), 0, 0,
                                      engine->rows()));
      }
      chunks.push_back(share(std::move(chunk.value)));
    }
    for (const ChunkHandle& chunk : chunks) infos.push_back(chunk->info());
    for (const ChunkInfo& info : infos) segments.push_back(cached_segment(info));
    segments.push_back(fresh_segment(question));
    auto made = Prompt::make(segments, Position(config.context - 1));
    require(made.status);
    prompt = made.value;
    outputs = {Row(prompt.rows() - 1)};
  }

  // Chunks in memory as sources of a loader.
  [[nodiscard]] std::vector<ChunkSource> sources() const {
    std::vector<ChunkSource> out;
    for (const ChunkHandle& chunk : chunks) out.emplace_back(chunk);
    out.emplace_back();
    return out;
  }

  // Blends from `sources` and returns the seconds from opening the loader to the last row's logits.
  template <class Selector>
  double blend(const Selector& selector, std::span<const ChunkSource> from, std::int32_t staging_layers,
               BlendReport& report) {
    return blend(selector, from, staging_layers, report,
                 EigenBackend<eigen_engine::PoolExecutor>(eigen_engine::PoolExecutor(pool)));
  }
  template <class Selector, class Backend>
  double blend(const Selector& selector, std::span<const ChunkSource> from, std::int32_t staging_layers,
               BlendReport& report, const Backend& backend) {
    using Loader = LayerwiseLoader<F32Codec>;
    LayerwiseFusor<Selector, Backend> fusor(selector, backend);
    workspace_.resize(fusor.workspace_bytes(prompt, identity.head_dim));
    staging_.resize(static_cast<std::size_t>(Loader::staging_bytes(prompt, from, staging_layers)));
    engine->clear();
    const auto start = std::chrono::steady_clock::now();
    Loader loader;
    require(loader.open(identity, prompt, from, staging_layers, staging_));
    require(loader.start());
    require(kvblend::blend(*engine, loader, fusor, prompt, outputs, workspace_, &report));
    require(engine->logits(logits()));
    return seconds_since(start);
  }

  double full_prefill() {
    engine->clear();
    const auto start = std::chrono::steady_clock::now();
    require(engine->prefill(all));
    require(engine->logits(logits()));
    return seconds_since(start);
  }

  // Of the last row, by the last call of blend or full_prefill.
  [[nodiscard]] std::vector<float>& logits() {
    logits_.resize(static_cast<std::size_t>(model->config().vocabulary));
    return logits_;
  }

  eigen_engine::ThreadPool pool;
  std::unique_ptr<eigen_engine::Model> model;
  std::unique_ptr<Engine> engine;
  ModelIdentity identity;
  std::vector<ChunkHandle> chunks;  // instructions, then passages
  std::vector<ChunkInfo> infos;
  std::vector<TokenId> question, all;
  std::vector<Segment> segments;
  Prompt prompt;
  std::vector<Row> outputs;

 private:
  std::vector<float> logits_;
  std::vector<std::byte> workspace_, staging_;
};

}  // namespace bench
