// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What CacheBlend rests on (arXiv 2405.16444, section 4), measured: few tokens hold most of the deviation of reused KV
// from full prefill's, they are much the same ones from layer to layer, and computing them anew repairs the attention
// that the question pays. bench/shootout/plot.py draws it.
#include <eigen_engine/engine.hpp>
#include <eigen_engine/gguf_loader.hpp>
#include <eigen_engine/tokenizer.hpp>
#include <kvblend/kvblend.hpp>
#include <kvblend/plan/statistics.hpp>
#include <kvblend/store.hpp>
#include <rag/blender.hpp>
#include <rag/prompt_file.hpp>
#include <rag/tokenized.hpp>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace kvblend;
using eigen_engine::Engine;
using Json = nlohmann::ordered_json;

constexpr std::array<double, 6> kShares = {0.05, 0.10, 0.15, 0.20, 0.30, 0.50};
constexpr std::array<const char*, 2> kSelectors = {"key_value_deviation", "attention_value_mass"};
constexpr std::size_t kCdfSteps = 50;
constexpr std::size_t kCheckLayer = 1;  // before it reused KV is exact but for rounding

using Values = std::vector<double>;
using ByLayer = std::vector<Values>;

struct Options {
  std::vector<std::string> models;
  std::string prompts = std::string(KVBLEND_PROMPTS) + "/musique_choosing.json";
  std::string json;
  int items = 4;
  int tokens = 1500;
  int threads = 2;
};

// A benchmark that cannot go on has nothing to clean up.
void require(const Status& status, const std::string& where) {
  if (status.ok()) return;
  std::fprintf(stderr, "kvblend_bench_deviation: %s: %s: %s\n", where.c_str(), status.where(), status.message());
  std::exit(1);
}

std::string name_of(const std::string& path) { return path.substr(path.find_last_of('/') + 1); }

// A model and two caches of it, one for full prefill and one for blends.
struct Lab {
  Lab(const std::string& path, const Options& options) : name(name_of(path)), pool(options.threads) {
    auto loaded = eigen_engine::load_gguf(path.c_str());
    require(loaded.status, name);
    model = std::make_unique<eigen_engine::Model>(std::move(loaded.value));
    auto words = eigen_engine::Tokenizer::load(path.c_str());
    require(words.status, name);
    tokenizer = std::move(words.value);
    const eigen_engine::ModelConfig& config = model->config();
    identity.name = name;
    identity.layers = config.layers;
    identity.kv_heads = config.kv_heads;
    identity.head_dim = config.head_dim;
    full = std::make_unique<Engine>(*model, options.tokens, pool);
    blended = std::make_unique<Engine>(*model, options.tokens, pool);
  }

  [[nodiscard]] std::size_t layers() const { return static_cast<std::size_t>(identity.layers); }

  std::string name;
  eigen_engine::ThreadPool pool;
  std::unique_ptr<eigen_engine::Model> model;
  eigen_engine::Tokenizer tokenizer;
  ModelIdentity identity;
  std::unique_ptr<Engine> full, blended;
  rag::Blender blender{pool};
};

ChunkHandle encode(Lab& lab, std::span<const TokenId> tokens) {
  Engine& engine = *lab.blended;
  ChunkIdentity identity;
  identity.model = lab.identity;
  for (std::int32_t layer = 0; layer < engine.layers(); ++layer) identity.add_layer_rope(engine.rope(layer));
  identity.tokens.assign(tokens.begin(), tokens.end());
  auto chunk = Chunk::allocate(identity);
  require(chunk.status, lab.name);
  engine.clear();
  require(engine.prefill(tokens, eigen_engine::Wanted::none), lab.name);
  for (std::int32_t layer = 0; layer < engine.layers(); ++layer) {
    require(import_rows<F32Codec>(chunk.value, layer, engine.keys(layer), engine.values(layer), 0, 0, engine.rows()),
            lab.name);
  }
  return share(std::move(chunk.value));
}

// A prompt whose parts were prefilled alone and stored.
struct Scene {
  Scene(Lab& lab, rag::TokenizedItem item) : tokens(std::move(item)) {
    for (const auto& part : tokens.reusable) sources.emplace_back(encode(lab, part));
    infos.reserve(sources.size());  // segments point into it
    for (const ChunkSource& source : sources) infos.push_back(source.chunk->info());
    for (const ChunkInfo& info : infos) segments.push_back(cached_segment(info));
    segments.push_back(fresh_segment(tokens.question));
    sources.emplace_back();
    auto made = Prompt::make(segments, Position(lab.model->config().context - 1));
    require(made.status, lab.name);
    prompt = made.value;
    if (prompt.reused_rows() == 0) {
      require(Status::error(StatusCode::invalid_argument, "no passage fits, so nothing is reused").at("prompt"),
              lab.name);
    }
  }

  [[nodiscard]] std::int32_t stored_rows() const { return prompt.rows() - prompt.fresh_rows(); }

  rag::TokenizedItem tokens;
  std::vector<ChunkSource> sources;
  std::vector<ChunkInfo> infos;
  std::vector<Segment> segments;
  Prompt prompt;
};

template <class Score>
void blend_by(Lab& lab, const Scene& scene, Score score, double ratio) {
  const std::array<Row, 1> outputs = {Row(scene.prompt.rows() - 1)};
  const DeviationSelector<Score, RatioBudget> selector(score, RatioBudget{ratio});
  BlendReport report;
  lab.blended->clear();
  require(lab.blender.run<F32Codec>(*lab.blended, selector, lab.identity, scene.prompt, scene.sources, outputs, report),
          lab.name);
}

void blend_with(Lab& lab, const Scene& scene, std::string_view selector, double ratio) {
  if (selector == kSelectors[0]) return blend_by(lab, scene, KeyValueDeviation{}, ratio);
  blend_by(lab, scene, AttentionValueMass{}, ratio);
}

// How far the reused rows' KV is from full prefill's, from the check layer on: ‖difference‖₂ of keys and of values,
// each divided by its mean over the rows, and the mean of the two. So the rows of a layer have mean 1.
ByLayer deviations(Lab& lab, const Scene& scene) {
  ByLayer out(lab.layers());
  for (std::size_t layer = kCheckLayer; layer < lab.layers(); ++layer) {
    const auto at = static_cast<std::int32_t>(layer);
    const auto of = [&](const Engine::Plane& full, const Engine::Plane& reused) {
      Values rows;
      for (std::int32_t row = scene.prompt.exact_end().value; row < scene.stored_rows(); ++row) {
        rows.push_back(static_cast<double>(row_deviation(full, row, reused, row)));
      }
      const double mean = std::accumulate(rows.begin(), rows.end(), 0.0) / static_cast<double>(rows.size());
      for (double& row : rows) row /= mean;
      return rows;
    };
    const Values keys = of(lab.full->keys(at), lab.blended->keys(at));
    const Values values = of(lab.full->values(at), lab.blended->values(at));
    for (std::size_t i = 0; i < keys.size(); ++i) out[layer].push_back((keys[i] + values[i]) / 2);
  }
  return out;
}

// What the question pays to each stored row at each layer, summed over heads and over the question's rows: the engine
// tells no more. The question runs once more behind the cache, and sees what it saw in the pass that filled it.
ByLayer question_attention(Lab& lab, Engine& engine, const Scene& scene) {
  const std::int32_t stored = scene.stored_rows();
  require(engine.truncate(stored), lab.name);
  const std::vector<TokenId> before(engine.tokens().begin(), engine.tokens().end());
  std::array<Segment, 2> segments = {resident_segment(before), fresh_segment(scene.tokens.question)};
  const auto prompt = Prompt::make(segments, Position(engine.config().context - 1));
  require(prompt.status, lab.name);
  std::vector<Row> rows;
  std::vector<ActiveIndex> all;
  for (std::int32_t i = 0; i < scene.prompt.fresh_rows(); ++i) {
    rows.emplace_back(stored + i);
    all.emplace_back(i);
  }
  ByLayer out;
  require(engine.begin(prompt.value), lab.name);
  require(engine.embed(rows), lab.name);
  for (std::int32_t layer = 0; layer < engine.layers(); ++layer) {
    std::vector<float> mass(static_cast<std::size_t>(prompt.value.rows()));
    require(engine.project(layer, rows), lab.name);
    copy_rows(engine.fresh_keys(), 0, engine.keys(layer), stored, prompt.value.fresh_rows());
    copy_rows(engine.fresh_values(), 0, engine.values(layer), stored, prompt.value.fresh_rows());
    require(engine.attend_and_report(layer, rows, all, 0, mass), lab.name);
    out.emplace_back(mass.begin(), mass.begin() + stored);
  }
  engine.abort();
  return out;
}

double distance(const Values& a, const Values& b) {
  return std::sqrt(std::inner_product(a.begin(), a.end(), b.begin(), 0.0, std::plus<>(),
                                      [](double x, double y) { return (x - y) * (x - y); }));
}

// Sums over the prompts of a model.
struct Sums {
  explicit Sums(std::size_t layers)
      : top(layers, Values(kShares.size())),
        quantiles(layers, Values(kCdfSteps + 1)),
        next(layers),
        first(layers),
        reuse(layers),
        blend(kSelectors.size(), ByLayer(kShares.size(), Values(layers))) {}

  int prompts = 0;
  std::int64_t rows = 0, reused = 0;
  ByLayer top;                 // share of the deviation that the first of kShares of the rows hold
  ByLayer quantiles;           // of the rows' deviations
  Values next, first;          // rank correlation of a layer with the one after it, and with the check layer
  Values reuse;                // attention deviation of full reuse, by layer
  std::vector<ByLayer> blend;  // the same of blends, by selector and ratio
};

void add_concentration(const ByLayer& deviation, Sums& sums) {
  for (std::size_t layer = kCheckLayer; layer < deviation.size(); ++layer) {
    Values sorted = deviation[layer];
    std::sort(sorted.begin(), sorted.end());
    const auto last = static_cast<double>(sorted.size() - 1);
    const double total = std::accumulate(sorted.begin(), sorted.end(), 0.0);
    for (std::size_t i = 0; i < kShares.size(); ++i) {
      const auto count = std::lround(kShares[i] * static_cast<double>(sorted.size()));
      sums.top[layer][i] += std::accumulate(sorted.end() - count, sorted.end(), 0.0) / total;
    }
    for (std::size_t i = 0; i <= kCdfSteps; ++i) {
      const double place = last * static_cast<double>(i) / static_cast<double>(kCdfSteps);
      sums.quantiles[layer][i] += sorted[static_cast<std::size_t>(std::lround(place))];
    }
  }
}

void add_correlations(const ByLayer& deviation, Sums& sums, const std::string& where) {
  const auto rho = [&](std::size_t a, std::size_t b) {
    const auto correlation = rank_correlation(deviation[a], deviation[b]);
    require(correlation.status, where);
    return correlation.value.rho;
  };
  for (std::size_t layer = kCheckLayer; layer < deviation.size(); ++layer) {
    if (layer + 1 < deviation.size()) sums.next[layer] += rho(layer, layer + 1);
    sums.first[layer] += layer == kCheckLayer ? 1.0 : rho(kCheckLayer, layer);
  }
}

void measure(Lab& lab, const Scene& scene, Sums& sums) {
  const std::span<const TokenId> all = scene.tokens.all;
  lab.full->clear();
  require(lab.full->prefill(all.first(static_cast<std::size_t>(scene.stored_rows())), eigen_engine::Wanted::none),
          lab.name);
  blend_with(lab, scene, kSelectors[0], 0);
  const ByLayer deviation = deviations(lab, scene);
  add_concentration(deviation, sums);
  add_correlations(deviation, sums, lab.name);

  const ByLayer exact = question_attention(lab, *lab.full, scene);
  const auto add_attention = [&](Values& into) {
    const ByLayer attention = question_attention(lab, *lab.blended, scene);
    for (std::size_t layer = 0; layer < exact.size(); ++layer) into[layer] += distance(attention[layer], exact[layer]);
  };
  add_attention(sums.reuse);
  for (std::size_t s = 0; s < kSelectors.size(); ++s) {
    for (std::size_t r = 0; r < kShares.size(); ++r) {
      blend_with(lab, scene, kSelectors[s], kShares[r]);
      add_attention(sums.blend[s][r]);
    }
  }
  sums.prompts += 1;
  sums.rows += scene.prompt.rows();
  sums.reused += scene.prompt.reused_rows();
}

// The layers whose concentration is shown.
std::vector<std::size_t> some_layers(std::size_t layers) {
  std::vector<std::size_t> out = {kCheckLayer, layers / 4, layers / 2, layers - 1};
  std::erase_if(out, [](std::size_t layer) { return layer < kCheckLayer; });
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

// Of [first, end).
double mean_from(const Values& by_layer, std::size_t first, std::size_t end) {
  double sum = 0;
  for (std::size_t layer = first; layer < end; ++layer) sum += by_layer[layer];
  return sum / static_cast<double>(end - first);
}

Json report(const std::string& name, const Sums& sums) {
  const std::size_t layers = sums.top.size();
  const auto mean = [&](Values values) {
    for (double& value : values) value /= sums.prompts;
    return values;
  };
  std::printf("\n%s: %d prompts of %lld tokens in the mean, %lld of them reused; %zu layers, counted from 0\n",
              name.c_str(), sums.prompts, static_cast<long long>(sums.rows / sums.prompts),
              static_cast<long long>(sums.reused / sums.prompts), layers);
  Json out = {{"model", name}, {"n", sums.prompts}, {"layers", layers}, {"ratios", kShares}};

  std::printf("share of the K+V deviation from full prefill that the highest tokens hold\nlayer ");
  for (const double share : kShares) std::printf(" %4.0f %%", 100 * share);
  for (const std::size_t layer : some_layers(layers)) {
    const Values top = mean(sums.top[layer]);
    std::printf("\n%5zu ", layer);
    for (const double share : top) std::printf(" %6.3f", share);
    out["concentration"].push_back({{"layer", layer}, {"top", top}, {"quantiles", mean(sums.quantiles[layer])}});
  }

  const Values next = mean(sums.next);
  const Values first = mean(sums.first);
  std::printf("\nSpearman correlation of the tokens' deviations\nlayer  with the next  with layer %zu\n", kCheckLayer);
  for (std::size_t layer = kCheckLayer; layer < layers; ++layer) {
    if (layer + 1 < layers) {
      std::printf("%5zu %14.3f %13.3f\n", layer, next[layer], first[layer]);
      out["adjacent"].push_back({{"layer", layer}, {"rho", next[layer]}});
    } else {
      std::printf("%5zu %14s %13.3f\n", layer, "", first[layer]);
    }
    out["with_check_layer"].push_back({{"layer", layer}, {"rho", first[layer]}});
  }
  std::printf(" mean %14.3f\n", mean_from(next, kCheckLayer, layers - 1));

  // At the check layer a deviation selector leaves all rows fresh, so the mean is over those behind it.
  std::printf(
      "removed of full reuse's attention deviation, mean over layers %zu to %zu: L2 distance to full prefill over the\n"
      "stored tokens of attention summed over heads and the question's rows\n%-20s ",
      kCheckLayer + 1, layers - 1, "");
  for (const double share : kShares) std::printf(" %4.0f %%", 100 * share);
  out["attention_summed_over_heads_and_question_rows"] = Json::array();
  for (std::size_t s = 0; s < kSelectors.size(); ++s) {
    std::printf("\n%-20s ", kSelectors[s]);
    for (std::size_t r = 0; r < kShares.size(); ++r) {
      Values left;
      for (std::size_t layer = kCheckLayer; layer < layers; ++layer) {
        left.push_back(sums.blend[s][r][layer] / sums.reuse[layer]);
      }
      const double removed = 1 - mean_from(left, 1, left.size());
      std::printf(" %6.3f", removed);
      out["attention_summed_over_heads_and_question_rows"].push_back(
          {{"selector", kSelectors[s]}, {"ratio", kShares[r]}, {"removed", removed}, {"left_from_layer_1_on", left}});
    }
  }
  std::printf("\n");
  std::fflush(stdout);
  return out;
}

Json measure_model(const std::string& path, const rag::PromptFile& file, const Options& options) {
  Lab lab(path, options);
  Sums sums(lab.layers());
  const auto count = (std::min)(static_cast<std::size_t>(options.items), file.items.size());
  for (std::size_t i = 0; i < count; ++i) {
    std::fprintf(stderr, "%s: prompt %zu of %zu\n", lab.name.c_str(), i + 1, count);
    auto tokens = rag::tokenize(lab.tokenizer, file, file.items[i], static_cast<std::size_t>(options.tokens));
    require(tokens.status, lab.name + ", item " + std::to_string(i + 1));
    measure(lab, Scene(lab, std::move(tokens.value)), sums);
  }
  return report(lab.name, sums);
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Which tokens' KV deviates under full reuse, and what computing them anew repairs.",
               "kvblend_bench_deviation");
  app.add_option("--model", options.models, "GGUF file; may be repeated")->default_val(std::string(KVBLEND_MODEL_PATH));
  app.add_option("--prompts", options.prompts, "prompt file; default: the MuSiQue questions to choose by");
  app.add_option("--items", options.items, "prompts of it, from the first on")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--tokens", options.tokens, "of a prompt, at most; passages are left out until it fits")
      ->check(CLI::Range(64, 1 << 20))
      ->capture_default_str();
  app.add_option("--threads", options.threads, "compute threads")->check(CLI::Range(1, 256))->capture_default_str();
  app.add_option("--json", options.json, "leave the figures in this file");
  CLI11_PARSE(app, argc, argv);

  const auto file = rag::read_prompt_file(options.prompts);
  require(file.status, "prompts");
  Json json = {{"prompts", name_of(options.prompts)}, {"tokens", options.tokens}, {"models", Json::array()}};
  for (const std::string& model : options.models) {
    json["models"].push_back(measure_model(model, file.value, options));
  }
  if (options.json.empty()) return 0;
  std::ofstream stream(options.json);
  stream << json.dump() << '\n';
  if (!stream.flush()) {
    require(Status::error(StatusCode::io_error, "cannot be written").at("%.150s", options.json.c_str()), "json");
  }
  return 0;
}
