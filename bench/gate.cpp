// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What the quality gate finds: blends of a real model, healthy and with faults put into the KV that is handed over, by
// their KL to full recompute and by what stands where at layer 0, fed to a QualityGate as an engine would.
#include <rag/eigen_host.hpp>
#include <rag/prompt_file.hpp>
#include <rag/tokenized.hpp>
#include <rag/trial.hpp>

#include <kvblend/kvblend.hpp>
#include <kvblend/store.hpp>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace kvblend;

constexpr double kRatio = 0.15;
constexpr int kRuns = 2000;
constexpr std::uint64_t kSeed = 20261130;
constexpr std::array<const char*, 2> kSelectors = {"key_value_deviation", "attention_value_mass"};

enum Condition { healthy, rotated_by_one, swapped_values, wrong_base, stale, rows_by_one, conditions };
constexpr std::array<const char*, conditions> kNames = {"healthy",    "rotated_by_one", "swapped_values",
                                                        "wrong_base", "stale",          "rows_by_one"};
constexpr std::array<const char*, conditions> kTexts = {"as the engine stored it",
                                                        "keys rotated one position too far",
                                                        "values of the first and the last passage swapped",
                                                        "keys taken for ones of ten times their rope base",
                                                        "the middle passage holds another text's KV",
                                                        "keys one row late with values in place"};

struct Options {
  std::string model = KVBLEND_MODEL_PATH;
  std::string context = rag::kUsualContext;
  std::string json;
  std::string header;
  int questions = 32;
  int tokens = 768;
  int answer_tokens = 16;
  int threads = 2;
  double limit = 4.0;
  bool restart = false;
};

// A benchmark that cannot go on has nothing to clean up.
void require(const Status& status, const char* what) {
  if (status.ok()) return;
  std::fprintf(stderr, "kvblend_bench_gate: %s: %s: %s\n", what, status.where(), status.message());
  std::exit(1);
}

// Over the questions.
struct Series {
  std::array<std::vector<double>, conditions> kl;
  std::array<std::vector<double>, conditions> placement;  // as the blend leaves it
  std::vector<double> raised;                             // healthy, at the gate's raised ratio
};
struct Measured {
  std::array<std::vector<double>, conditions> placement;  // by full reuse of the same chunks
  std::array<Series, kSelectors.size()> by_selector;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Series, kl, placement, raised)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Measured, placement, by_selector)

// ---- Faults, put into what the engine hands over

Chunk copy_of(const Chunk& chunk) {
  auto copy = Chunk::allocate(chunk.identity());
  require(copy.status, "chunk");
  for (std::int32_t layer = 0; layer < chunk.layers(); ++layer) {
    std::memcpy(copy.value.layer(layer).data(), chunk.layer(layer).data(), chunk.layer(layer).size());
  }
  return std::move(copy.value);
}

// Turns all keys from where `stored` has them to where the chunk's own ropes do `by` positions on.
template <class Stored>
void turn(Chunk& chunk, int by, Stored stored) {
  const Position from = chunk.identity().first_position;
  const ShiftRun run{Row(0), 0, chunk.tokens(), from, from + by};
  std::vector<float> scratch;
  for (std::int32_t layer = 0; layer < chunk.layers(); ++layer) {
    const RopeSpec& rope = chunk.identity().rope(layer);
    const RopeSpec before = stored(rope);
    scratch.resize(static_cast<std::size_t>(RopeShifter<>::scratch_size(before, rope, run)));
    const auto keys = chunk.key_plane<F32Codec>(layer);
    require(RopeShifter<>().shift(before, rope, run, keys, keys, scratch), "turn");
  }
}

RopeSpec ten_times_the_base(const RopeSpec& rope) {
  RopeSpec out = rope;
  for (std::int32_t pair = 0; pair < rope.pairs(); ++pair) {
    out.inv_freq[static_cast<std::size_t>(pair)] *= std::pow(10.0, -2.0 * pair / rope.rotary_dim);
  }
  return out;
}

void values_from(Chunk& chunk, const Chunk& other) {
  const std::int32_t rows = std::min(chunk.tokens(), other.tokens());
  for (std::int32_t layer = 0; layer < chunk.layers(); ++layer) {
    copy_rows(other.value_plane<F32Codec>(layer), 0, chunk.value_plane<F32Codec>(layer), 0, rows);
  }
}

// `other_text`: KV of a text of the middle passage's length. The instructions are left as they are.
std::vector<ChunkHandle> with_fault(const std::vector<ChunkHandle>& good, Condition fault, const Chunk& other_text) {
  std::vector<ChunkHandle> out = good;
  for (std::size_t i = 1; i < good.size(); ++i) {
    Chunk chunk = copy_of(*good[i]);
    switch (fault) {
      case healthy:
      case conditions: break;
      case rotated_by_one: turn(chunk, 1, [](const RopeSpec& rope) { return rope; }); break;
      case wrong_base: turn(chunk, 0, ten_times_the_base); break;
      case swapped_values:
        if (i == 1) values_from(chunk, *good.back());
        if (i + 1 == good.size()) values_from(chunk, *good[1]);
        break;
      case stale:
        if (i != good.size() / 2) break;
        for (std::int32_t layer = 0; layer < chunk.layers(); ++layer) {
          std::memcpy(chunk.layer(layer).data(), other_text.layer(layer).data(), chunk.layer(layer).size());
        }
        break;
      case rows_by_one:
        for (std::int32_t layer = 0; layer < chunk.layers(); ++layer) {
          copy_rows(good[i]->key_plane<F32Codec>(layer), 0, chunk.key_plane<F32Codec>(layer), 1, chunk.tokens() - 1);
        }
        break;
    }
    out[i] = share(std::move(chunk));
  }
  return out;
}

// ---- Measuring

// Layer 0 of the engine's cache.
Chunk layer_0(rag::EigenHost& host, const rag::TokenizedItem& item) {
  auto chunk = Chunk::allocate(host.chunk_identity(item.all, {}));
  require(chunk.status, "layer 0");
  require(
      import_rows<F32Codec>(chunk.value, 0, host.engine().keys(0), host.engine().values(0), 0, 0, chunk.value.tokens()),
      "layer 0");
  return std::move(chunk.value);
}

double placement(rag::EigenHost& host, const Chunk& exact, const std::vector<Row>& rows) {
  const auto keys = placement_error(host.engine().keys(0), exact.key_plane<F32Codec>(0), rows);
  require(keys.status, "keys");
  const auto values = placement_error(host.engine().values(0), exact.value_plane<F32Codec>(0), rows);
  require(values.status, "values");
  return static_cast<double>(std::max(keys.value, values.value));
}

rag::Outcome blend(rag::Trial& trial, const char* selector, double ratio) {
  rag::Selection selection;
  selection.selector = selector;
  selection.ratio = ratio;
  auto outcome = trial.blend(selection);
  require(outcome.status, selector);
  return std::move(outcome.value);
}

void measure(rag::EigenHost& host, const eigen_engine::Tokenizer& tokenizer, const rag::TokenizedItem& item,
             const rag::TokenizedItem& other, const Options& options, Measured& out) {
  const std::vector<std::string> no_answers;
  auto opened = rag::Trial::open(host, tokenizer, item, no_answers, 0);
  require(opened.status, "trial");
  rag::Trial& trial = *opened.value;
  const std::vector<ChunkHandle> good = trial.chunks();
  std::vector<TokenId> text(other.all.begin() + static_cast<std::ptrdiff_t>(other.reusable.front().size()),
                            other.all.end());
  text.resize(static_cast<std::size_t>(good[good.size() / 2]->tokens()));
  const auto other_text = host.encode(text, item.context);
  require(other_text.status, "another text");
  require(trial.recompute(options.answer_tokens), "full recompute");
  const Chunk exact = layer_0(host, item);
  std::vector<Row> reused;  // all that lie between exact ones and the question
  const std::int32_t question = trial.rows() - static_cast<std::int32_t>(item.question.size());
  for (std::int32_t row = question - trial.reused_rows(); row < question; ++row) reused.emplace_back(row);

  for (int c = 0; c < conditions; ++c) {
    const auto condition = static_cast<Condition>(c);
    require(trial.hand_over(with_fault(good, condition, *other_text.value)), kNames[condition]);
    // A blend that looks for deviations runs all rows at layer 0 and leaves fresh KV there: only a full reuse shows
    // what was handed over.
    blend(trial, "first_k", 0);
    out.placement[condition].push_back(placement(host, exact, reused));
    for (std::size_t s = 0; s < kSelectors.size(); ++s) {
      Series& series = out.by_selector[s];
      series.kl[condition].push_back(blend(trial, kSelectors[s], kRatio).kl);
      series.placement[condition].push_back(placement(host, exact, reused));
      if (condition == healthy) {
        series.raised.push_back(blend(trial, kSelectors[s], GateOptions().raise * kRatio).kl);
      }
    }
  }
}

// ---- The gate

QualityGate make_gate(const std::vector<double>& calibration, const Options& options) {
  const auto known = healthy_kl(calibration);
  require(known.status, "calibration");
  GateOptions gate_options;
  gate_options.healthy = known.value;
  gate_options.limit_kl = options.limit * known.value.mean;
  gate_options.share = 1.0;  // the requests here are the sampled ones
  auto gate = QualityGate::make(gate_options);
  require(gate.status, "gate");
  return gate.value;
}

// A sampled request, measured as the gate asks for. Returns the gate's level after it.
GateLevel feed(QualityGate& gate, std::uint64_t request, double kl_base, double kl_raised, double placement) {
  const auto decision = gate.decide(request, kRatio);
  require(decision.status, "decide");
  GateSample sample;
  sample.measured = decision.value.measure;
  sample.kl = sample.measured == GateLevel::base ? kl_base : kl_raised;
  sample.placement_error = placement;
  require(gate.observe(sample), "observe");
  return gate.level();
}

std::string text_of(const QualityGate& gate) {
  std::vector<char> text(gate.print({}) + 1);
  gate.print(text);
  return text.data();
}

// All questions healthy, then all with the fault, in their order, until it is found; then healthy again, from the first
// on and over again, until the planned ratio is back. `placed`: whether the gate is told the placement errors.
nlohmann::json find(const Measured& all, const Series& series, Condition fault, bool placed, const Options& options) {
  QualityGate gate = make_gate(series.kl[healthy], options);
  const std::size_t n = series.raised.size();
  std::uint64_t request = 0;
  const auto feed_healthy = [&](std::size_t i) {
    return feed(gate, request++, series.kl[healthy][i % n], series.raised[i % n],
                placed ? all.placement[healthy][i % n] : 0);
  };
  nlohmann::json out = {{"fault", kNames[fault]}, {"signal", placed ? "placement and KL" : "KL alone"}};
  for (std::size_t i = 0; i < n; ++i) {
    if (feed_healthy(i) == GateLevel::base) continue;
    out["false_alarm"] = text_of(gate);
    return out;
  }
  std::size_t found = 0;
  for (std::size_t i = 0; i < n && found == 0; ++i) {
    const GateLevel level = feed(gate, request++, series.kl[fault][i], 0, placed ? all.placement[fault][i] : 0);
    if (level != GateLevel::base) found = i + 1;
  }
  out["found_at"] = found;  // 0: not
  if (found == 0) return out;
  out["reason"] = to_string(gate.reason());
  out["says"] = text_of(gate);
  std::size_t healed = 0;
  while (healed < 1000 && feed_healthy(healed++) != GateLevel::base) continue;
  if (gate.level() == GateLevel::base) out["back_after"] = healed;
  return out;
}

// Runs of 1000 healthy samples, drawn at random from the questions' with replacement, by a gate that was calibrated on
// as many draws as there are questions, anew for each run.
int false_alarms(const Measured& all, const Series& series, const Options& options) {
  std::mt19937_64 random(kSeed);
  const std::size_t n = series.raised.size();
  int alarms = 0;
  for (int run = 0; run < kRuns; ++run) {
    std::vector<double> calibration(n);
    for (double& kl : calibration) kl = series.kl[healthy][random() % n];
    QualityGate gate = make_gate(calibration, options);
    for (std::uint64_t i = 0; i < 1000; ++i) {
      const std::size_t q = random() % n;
      if (feed(gate, i, series.kl[healthy][q], series.raised[q], all.placement[healthy][q]) == GateLevel::base)
        continue;
      ++alarms;
      break;
    }
  }
  return alarms;
}

double mean(const std::vector<double>& x) {
  return std::accumulate(x.begin(), x.end(), 0.0) / static_cast<double>(x.size());
}

nlohmann::json study(const Measured& all, const Options& options) {
  nlohmann::json out = nlohmann::json::array();
  const std::size_t n = all.placement[healthy].size();
  for (std::size_t s = 0; s < kSelectors.size(); ++s) {
    const Series& series = all.by_selector[s];
    nlohmann::json one = {{"selector", kSelectors[s]}, {"ratio", kRatio}};
    std::printf("\n%s at %.0f %%; the gate's limit is %.3g times the healthy mean KL\n", kSelectors[s], 100 * kRatio,
                options.limit);
    for (int c = 0; c < conditions; ++c) {
      const auto condition = static_cast<Condition>(c);
      std::printf("%s\n  mean KL %.3f; placement error of the first sample %.2g, as the blend itself leaves it %.2g\n",
                  kTexts[condition], mean(series.kl[condition]), all.placement[condition].front(),
                  series.placement[condition].front());
      if (condition == healthy) std::printf("  mean KL at the raised ratio %.3f\n", mean(series.raised));
      for (const bool placed : {true, false}) {
        if (condition == healthy) break;
        const auto found = find(all, series, condition, placed, options);
        one["faults"].push_back(found);
        std::printf("  by %s: ", placed ? "placement and KL" : "KL alone");
        if (found.contains("false_alarm")) {
          std::printf("false alarm before the fault\n");
        } else if (!found.contains("reason")) {
          std::printf("not found in %zu samples\n", n);
        } else {
          const std::string back = found.contains("back_after")
                                       ? "back after " + std::to_string(found["back_after"].get<int>())
                                       : "not back after 1000";
          std::printf("found at sample %d: %s; mended, %s\n", found["found_at"].get<int>(),
                      found["reason"].get<std::string>().c_str(), back.c_str());
        }
      }
    }
    const int alarms = false_alarms(all, series, options);
    std::printf("false alarms: %d of %d runs of 1000 healthy samples drawn from these, each calibrated on %zu draws\n",
                alarms, kRuns, n);
    one["false_alarms"] = alarms;
    one["false_alarm_runs"] = kRuns;
    out.push_back(one);
  }
  return out;
}

// ---- tests/plan/gate_data.hpp

std::string list(const std::vector<double>& x, const char* indent) {
  std::string out = "{";
  char number[32];
  for (std::size_t i = 0; i < x.size(); ++i) {
    std::snprintf(number, sizeof(number), "%.4f", x[i]);
    if (i > 0) out += i % 12 == 0 ? std::string(",\n ") + indent : ", ";
    out += number;
  }
  return indent + out + "}";
}

void write_header(const Measured& all, const std::string& about, const std::string& path) {
  std::ofstream out(path, std::ios::binary);
  char line[256];
  const auto& ok = all.placement[healthy];
  std::snprintf(line, sizeof(line),
                "inline constexpr int kQuestions = %zu;\n"
                "inline constexpr double kHealthyPlacement = %.2g;  // the largest of all questions'\n",
                ok.size(), *std::max_element(ok.begin(), ok.end()));
  out << "// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception\n//\n"
         "// Blends of a real model, healthy and with faults put in: mean KL to full recompute over the tokens of its\n"
         "// answer, one number a question. Made by\n"
         "//   cmake -P cmake/bench.cmake gate -- --questions "
      << ok.size() << " --header tests/plan/gate_data.hpp\n// " << about
      << ".\n#pragma once\n\nnamespace gate_data {\n\n// clang-format off\n"
      << line
      << "\nstruct Fault {\n  const char* name;\n  double placement_error;  // the least of all questions'\n"
         "  double kl[kQuestions];   // at 15 %\n};\n"
         "struct Blends {\n  const char* selector;\n  double healthy[kQuestions];  // at 15 %\n"
         "  double raised[kQuestions];   // healthy, at 30 %\n  Fault faults[5];\n};\n\n"
         "inline constexpr Blends kBlends[] = {\n";
  for (std::size_t s = 0; s < kSelectors.size(); ++s) {
    const Series& series = all.by_selector[s];
    out << "  {\"" << kSelectors[s] << "\",\n"
        << list(series.kl[healthy], "   ") << ",\n"
        << list(series.raised, "   ") << ",\n   {\n";
    for (int c = healthy + 1; c < conditions; ++c) {
      const auto fault = static_cast<Condition>(c);
      const auto& errors = all.placement[fault];
      std::snprintf(line, sizeof(line), "    // %s\n    {\"%s\", %.2g,\n", kTexts[fault], kNames[fault],
                    *std::min_element(errors.begin(), errors.end()));
      out << line << list(series.kl[fault], "     ") << "},\n";
    }
    out << "   }},\n";
  }
  out << "};\n// clang-format on\n\n}  // namespace gate_data\n";
  if (!out.flush()) require(Status::error(StatusCode::io_error, "cannot write %.150s", path.c_str()), "--header");
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("What the quality gate finds of a real model's blends, healthy and faulty.", "kvblend_bench_gate");
  app.add_option("--model", options.model, "GGUF file that kvblend's own engine runs")->capture_default_str();
  app.add_option("--context", options.context, rag::kContextHelp)->capture_default_str();
  app.add_option("--questions", options.questions, "of the choosing half, from the first on")
      ->check(CLI::Range(8, 36))
      ->capture_default_str();
  app.add_option("--tokens", options.tokens, "of a prompt, at most; passages are left out until it fits")
      ->check(CLI::Range(512, 1 << 20))
      ->capture_default_str();
  app.add_option("--answer-tokens", options.answer_tokens, "of full recompute's answer, at most")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--limit", options.limit, "the gate's, in units of the healthy mean")
      ->check(CLI::Range(1.01, 1000.0))
      ->capture_default_str();
  app.add_option("--threads", options.threads, "compute threads")->check(CLI::Range(1, 256))->capture_default_str();
  app.add_option("--json", options.json, "write the figures to this file, and continue what is there");
  app.add_flag("--restart", options.restart, "forget what is there");
  app.add_option("--header", options.header, "write what was measured as C++, for tests/plan");
  CLI11_PARSE(app, argc, argv);

  auto opened = rag::EigenHost::open(options.model, options.threads);
  require(opened.status, "--model");
  auto& host = static_cast<rag::EigenHost&>(*opened.value);
  const auto tokenizer = eigen_engine::Tokenizer::load(options.model.c_str());
  require(tokenizer.status, "--model");
  auto file = rag::read_prompt_file(std::string(KVBLEND_PROMPTS) + "/musique_choosing.json");
  require(file.status, "prompts");
  auto passages = rag::read_context(options.context);
  require(passages.status, "--context");
  file.value.context = std::move(passages.value);
  const std::string context = rag::describe(file.value.context);
  const auto tokens_of = [&](std::size_t item) {
    auto tokens =
        rag::tokenize(tokenizer.value, file.value, file.value.items[item], static_cast<std::size_t>(options.tokens));
    require(tokens.status, "tokens");
    require(rag::check_context(tokens.value, host.context()), "--context");
    return std::move(tokens.value);
  };
  rag::TokenizedItem item = tokens_of(0);
  // A part is no longer than a prompt may be.
  const auto before = static_cast<std::int32_t>(item.context.size());
  require(host.reserve(options.tokens + std::max(before, options.answer_tokens + 8)), "--tokens");

  // What was measured is kept after each question.
  Measured all;
  nlohmann::json json;
  const nlohmann::json settings = {
      {"model", host.identity().name}, {"tokens", options.tokens}, {"answer_tokens", options.answer_tokens},
      {"prompts", "musique_choosing"}, {"context", context},       {"conditions", kNames},
      {"selectors", kSelectors},       {"ratio", kRatio},          {"raised", GateOptions().raise * kRatio}};
  if (std::ifstream stream(options.json, std::ios::binary); stream && !options.restart) {
    json = nlohmann::json::parse(stream, nullptr, false);
    if (!json.is_object() || json.value("settings", nlohmann::json()) != settings) {
      require(Status::error(StatusCode::mismatch, "%.100s was measured with other settings; --restart replaces it",
                            options.json.c_str()),
              "--json");
    }
    json["measured"].get_to(all);
    std::printf("%zu questions were measured before, in %s\n", all.placement[healthy].size(), options.json.c_str());
  }
  json = {{"settings", settings}};
  const auto save = [&] {
    if (options.json.empty()) return;
    json["measured"] = all;
    std::ofstream stream(options.json, std::ios::binary);
    stream << json.dump(1) << '\n';
    if (!stream.flush()) {
      require(Status::error(StatusCode::io_error, "cannot write %.150s", options.json.c_str()), "--json");
    }
  };

  const std::size_t questions = std::max(static_cast<std::size_t>(options.questions), all.placement[healthy].size());
  std::size_t rows = 0;
  for (std::size_t q = 0; q < questions; ++q) {
    rag::TokenizedItem next = tokens_of(q + 1);
    rows += item.all.size();
    if (q >= all.placement[healthy].size()) {
      std::fprintf(stderr, "\rquestion %zu of %zu, %zu tokens ", q + 1, questions, item.all.size());
      measure(host, tokenizer.value, item, next, options, all);
      save();
    }
    item = std::move(next);
  }
  std::fprintf(stderr, "\n");

  char about[256];
  std::snprintf(about, sizeof(about), "%.80s, MuSiQue's questions 1 to %zu, %zu tokens a prompt, up to %d of an answer",
                host.identity().name.c_str(), questions, rows / questions, options.answer_tokens);
  const std::string encoded = "passages encoded behind: " + context;
  std::printf("%s\n%s\n", about, encoded.c_str());
  json["gate"] = study(all, options);
  save();
  if (!options.header.empty()) write_header(all, std::string(about) + ";\n// " + encoded, options.header);
  return 0;
}
