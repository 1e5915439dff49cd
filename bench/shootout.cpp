// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// All selectors against each other: every selector, ratio, model and prompt, by KL to full recompute. Written after
// each prompt, and continued from there by the next run.
#include "shootout/results.hpp"

#include <rag/prompt_file.hpp>
#include <rag/selectors.hpp>
#include <rag/trial.hpp>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace {

using shootout::Contestant;
using shootout::ItemKey;
using shootout::Results;

struct Options {
  std::vector<std::string> models;
  std::vector<std::string> selectors;
  std::vector<double> ratios = {0.05, 0.10, 0.15, 0.20, 0.30, 0.50};
  std::string half = "confirming";
  std::string prompts;
  std::string context = rag::kUsualContext;
  std::string host = "auto";
  std::string json;
  int items = 0;
  int tokens = 1500;
  int answer_tokens = 24;
  int threads = 2;
  int prior_items = 4;
  bool restart = false;
};

// A benchmark that cannot go on has nothing to clean up: what was measured is in the file.
void require(const kvblend::Status& status, const std::string& where) {
  if (status.ok()) return;
  std::fprintf(stderr, "kvblend_bench_shootout: %s: %s: %s\n", where.c_str(), status.where(), status.message());
  std::exit(1);
}

std::string name_of(const std::string& path) { return path.substr(path.find_last_of('/') + 1); }

std::string without_ending(const std::string& name) { return name.substr(0, name.find_last_of('.')); }

struct Job {
  std::string selector;
  double ratio;
};

// What is left to do of a prompt; full reuse comes with every prompt.
std::vector<Job> jobs_of(const Results& results, const ItemKey& key, const std::vector<std::string>& selectors,
                         const std::vector<double>& ratios) {
  std::vector<Job> jobs;
  if (!results.has(key, "none", 0)) jobs.push_back({"none", 0});
  for (const std::string& selector : selectors) {
    if (selector == "none") continue;
    for (const double ratio : ratios) {
      if (!results.has(key, selector, ratio)) jobs.push_back({selector, ratio});
    }
  }
  return jobs;
}

// About what a job costs in full prefills: for the time left.
double weight_of(const std::vector<Job>& jobs) {
  double sum = jobs.empty() ? 0 : 2.5;  // chunks, the reference and its answer
  for (const Job& job : jobs) sum += job.ratio + 0.12;
  return sum;
}

class TimeLeft {
 public:
  explicit TimeLeft(double weight) : left_(weight) {}
  void done(double weight) {
    done_ += weight;
    left_ -= weight;
  }
  [[nodiscard]] double seconds() const {
    const double spent = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    return done_ > 0 ? spent * left_ / done_ : 0;
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  double done_ = 0;
  double left_;
};

struct Prompts {
  std::string name;     // in the results
  std::string context;  // what their passages are encoded behind
  rag::PromptFile file;
};

// Prompts whose passages are encoded otherwise are other prompts in the results, of the same numbers.
Prompts read_prompts(const std::string& path, const std::string& context) {
  auto file = rag::read_prompt_file(path);
  require(file.status, "--prompts");
  auto passages = rag::read_context(context);
  require(passages.status, "--context");
  file.value.context = std::move(passages.value);
  Prompts out{without_ending(name_of(path)), rag::describe(file.value.context), std::move(file.value)};
  if (context != rag::kUsualContext) out.name += ", " + out.context;
  return out;
}

// Results that were measured behind another one are not continued.
std::string usual_context() {
  const auto context = rag::read_context(rag::kUsualContext);
  require(context.status, "context");
  return rag::describe(context.value);
}

// A model that is loaded, and what is fixed for all its prompts.
struct Bench {
  std::string name;
  std::unique_ptr<rag::Host> host;
  eigen_engine::Tokenizer tokenizer;
  kvblend::BinnedPrior prior;
  std::vector<kvblend::ChunkHandle> chunks;  // of the last prompt: made-up ones come in groups that share passages
};

rag::TokenizedItem tokens_of(const Bench& bench, const Prompts& prompts, std::size_t item, const Options& options) {
  auto tokens =
      rag::tokenize(bench.tokenizer, prompts.file, prompts.file.items[item], static_cast<std::size_t>(options.tokens));
  require(tokens.status, prompts.name + ", item " + std::to_string(item + 1));
  require(rag::check_context(tokens.value, bench.host->context()), bench.name);
  return std::move(tokens.value);
}

Bench open_bench(const std::string& model, const Prompts& prompts, const Options& options, bool scores) {
  Bench bench;
  bench.name = name_of(model);
  auto host = rag::open_host(model, options.threads, options.host);
  require(host.status, bench.name);
  bench.host = std::move(host.value);
  auto tokenizer = eigen_engine::Tokenizer::load(model.c_str());
  require(tokenizer.status, bench.name);
  bench.tokenizer = std::move(tokenizer.value);
  if (scores && bench.host->reports_attention()) {
    auto probes = rag::saliency_probes(bench.tokenizer);
    require(probes.status, bench.name);
    require(bench.host->store_scores(std::move(probes.value)), bench.name);
  }
  // A part is no longer than a prompt may be.
  const auto context = static_cast<std::int32_t>(tokens_of(bench, prompts, 0, options).context.size());
  require(bench.host->reserve(options.tokens + std::max(context, options.answer_tokens + 8)), bench.name);
  return bench;
}

// From the choosing half, whatever is measured afterwards.
void find_prior(Bench& bench, const Options& options, Results& results) {
  const Prompts choosing = read_prompts(std::string(KVBLEND_PROMPTS) + "/musique_choosing.json", options.context);
  const std::string name = bench.name + ", " + choosing.context;
  if (results.prior(name, bench.prior)) return;
  rag::PriorSums sums(options.tokens);
  const auto count = std::min<std::size_t>(choosing.file.items.size(), static_cast<std::size_t>(options.prior_items));
  for (std::size_t i = 0; i < count; ++i) {
    std::fprintf(stderr, "\r%s: position prior, prompt %zu of %zu ", bench.name.c_str(), i + 1, count);
    const rag::TokenizedItem tokens = tokens_of(bench, choosing, i, options);
    const std::vector<std::string> no_answers;
    const auto trial = rag::Trial::open(*bench.host, bench.tokenizer, tokens, no_answers, 0);
    require(trial.status, bench.name);
    require(trial.value->add_to(sums), bench.name);
  }
  const auto prior = sums.prior();
  require(prior.status, bench.name);
  bench.prior = prior.value;
  results.set_prior(name, prior.value, choosing.name + ", items 1 to " + std::to_string(count));
  std::fprintf(stderr, "\n");
}

void measure_item(Bench& bench, const Prompts& prompts, std::size_t index, const std::vector<Job>& jobs,
                  const Options& options, const TimeLeft& time, Results& results) {
  const ItemKey key{bench.name, prompts.name, static_cast<std::int32_t>(index + 1)};
  const std::string where = key.model + ", " + key.prompts + " " + std::to_string(key.id);
  const rag::Item& text = prompts.file.items[index];
  const rag::TokenizedItem tokens = tokens_of(bench, prompts, index, options);
  auto opened =
      rag::Trial::open(*bench.host, bench.tokenizer, tokens, text.answers, options.answer_tokens, bench.chunks);
  require(opened.status, where);
  rag::Trial& trial = *opened.value;
  bench.chunks = trial.chunks();
  nlohmann::json& item = results.item(key);
  if (!item.contains("signals")) {
    const auto signals = trial.signals();
    require(signals.status, where);
    item["question"] = text.question;
    item["group"] = text.group;
    item["host"] = bench.host->name();
    item["tokens"] = trial.rows();
    item["reused"] = trial.reused_rows();
    item["answer"] = trial.answer();
    item["answer_tokens"] = trial.answer_tokens();
    item["full_correct"] = trial.full_is_correct();
    item["full_flops"] = trial.full_flops();
    item["full_s"] = trial.full_seconds();
    item["signals"] = {{"key_deviation", signals.value.key_deviation},
                       {"value_deviation", signals.value.value_deviation},
                       {"attention_share", signals.value.attention_share},
                       {"reuse_entropy", signals.value.reuse_entropy}};
  }
  for (std::size_t j = 0; j < jobs.size(); ++j) {
    if (j % 4 == 0) {
      std::fprintf(stderr, "\r%s: %zu of %zu blends; %.0f min left   ", where.c_str(), j, jobs.size(),
                   time.seconds() / 60);
    }
    if (jobs[j].selector == "none") {
      Results::add(item, "none", 0, trial.reuse());
      continue;
    }
    const Contestant contestant = shootout::contestant(jobs[j].selector);
    rag::Selection selection;
    selection.selector = contestant.selector;
    selection.schedule = contestant.schedule;
    selection.ratio = jobs[j].ratio;
    selection.prior = bench.prior;
    const auto outcome = trial.blend(selection);
    require(outcome.status, where + ", " + contestant.name);
    Results::add(item, contestant.name, jobs[j].ratio, outcome.value);
  }
  std::fprintf(stderr, "\r%s: %d tokens, full %.1f s, reuse KL %.3f%20s\n", where.c_str(), trial.rows(),
               trial.full_seconds(), trial.reuse().kl, "");
}

// Those of the list that the host can run.
std::vector<std::string> possible(const rag::Host& host, const std::vector<std::string>& selectors) {
  std::vector<std::string> out;
  for (const std::string& name : selectors) {
    const Contestant contestant = shootout::contestant(name);
    rag::Selection selection;
    selection.selector = contestant.selector;
    selection.schedule = contestant.schedule;
    if (const kvblend::Status status = host.check(selection); status.ok()) {
      out.push_back(name);
    } else {
      std::fprintf(stderr, "%s: left out on %s: %s\n", name.c_str(), host.name(), status.message());
    }
  }
  return out;
}

void measure_model(const std::string& model, const Prompts& prompts, const Options& options, Results& results) {
  const auto count = static_cast<std::size_t>(
      options.items > 0 ? std::min<int>(options.items, static_cast<int>(prompts.file.items.size()))
                        : static_cast<int>(prompts.file.items.size()));
  const bool scores = std::any_of(options.selectors.begin(), options.selectors.end(), [](const std::string& name) {
    const auto traits = rag::selector_traits(shootout::contestant(name).selector);
    return traits.ok() && traits.value.needs_stored_scores;
  });
  Bench bench = open_bench(model, prompts, options, scores);
  const std::vector<std::string> selectors = possible(*bench.host, options.selectors);
  std::vector<std::vector<Job>> jobs;
  double weight = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const ItemKey key{bench.name, prompts.name, static_cast<std::int32_t>(i + 1)};
    results.forget_other(key, prompts.file.items[i].question);
    jobs.push_back(jobs_of(results, key, selectors, options.ratios));
    weight += weight_of(jobs.back());
  }
  if (weight == 0) return;
  if (scores && bench.host->reports_attention()) find_prior(bench, options, results);
  TimeLeft time(weight);
  for (std::size_t i = 0; i < count; ++i) {
    if (jobs[i].empty()) continue;
    measure_item(bench, prompts, i, jobs[i], options, time, results);
    time.done(weight_of(jobs[i]));
    results.summarise();
    require(results.write(), options.json);
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> names = {"none"};
  for (const rag::SelectorTraits& traits : rag::all_selectors()) names.emplace_back(traits.name);
  names.emplace_back("gradual_key_value_deviation");

  Options options;
  CLI::App app("All selectors against each other.", "kvblend_bench_shootout");
  app.add_option("--model", options.models, "GGUF file; may be repeated")->default_val(std::string(KVBLEND_MODEL_PATH));
  app.add_option("--selector", options.selectors, "those to measure; default: all")->check(CLI::IsMember(names));
  app.add_option("--ratio", options.ratios, "shares of the reused rows")
      ->check(CLI::Range(0.001, 1.0))
      ->capture_default_str();
  app.add_option("--half", options.half, "of the MuSiQue questions: one to choose by, one to confirm with")
      ->check(CLI::IsMember({"choosing", "confirming"}))
      ->capture_default_str();
  app.add_option("--prompts", options.prompts, "a prompt file in place of them");
  app.add_option("--context", options.context, rag::kContextHelp)->capture_default_str();
  app.add_option("--items", options.items, "questions, from the first on; 0: all")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  app.add_option("--tokens", options.tokens, "of a prompt, at most; passages are left out until it fits")
      ->check(CLI::Range(64, 1 << 20))
      ->capture_default_str();
  app.add_option("--answer-tokens", options.answer_tokens, "of full recompute's answer, at most")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--host", options.host, "the engine; auto: eigen where it can run the model")
      ->check(CLI::IsMember({"auto", "eigen", "llama.cpp"}))
      ->capture_default_str();
  app.add_option("--threads", options.threads, "compute threads")->check(CLI::Range(1, 256))->capture_default_str();
  app.add_option("--json", options.json, "leave the results here, and continue those that are there");
  app.add_flag("--restart", options.restart, "forget what is there");
  CLI11_PARSE(app, argc, argv);
  if (options.selectors.empty()) {
    options.selectors = names;
    // Behind a context a chunk's head is no sink, and they choose as they would without.
    if (options.context != "alone") {
      std::erase_if(options.selectors, [](const std::string& name) { return name.rfind("sinks_first", 0) == 0; });
    }
  }
  std::sort(options.ratios.begin(), options.ratios.end());

  const std::string path =
      options.prompts.empty() ? std::string(KVBLEND_PROMPTS) + "/musique_" + options.half + ".json" : options.prompts;
  const Prompts prompts = read_prompts(path, options.context);
  std::printf(
      "prompts: %s, %zu of them, passages encoded behind: %s; MuSiQue's questions 1 to 37 are the choosing half, 38 to "
      "75 the confirming one\n",
      prompts.name.c_str(), prompts.file.items.size(), prompts.context.c_str());
  std::fflush(stdout);
  Results results;
  const nlohmann::json settings = {{"tokens", options.tokens},
                                   {"answer_tokens", options.answer_tokens},
                                   {"host", options.host},
                                   {"usual_context", usual_context()},
                                   {"scores", rag::kSaliencyRecipe}};
  require(results.open(options.json, settings, options.restart), "--json");
  for (const std::string& model : options.models) measure_model(model, prompts, options, results);
  results.summarise();
  require(results.write(), options.json);
  results.print();
  return 0;
}
