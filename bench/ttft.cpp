// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The race to the first token on llama.cpp: full prefill, prefix cache, cache reuse by K-shift, full KV reuse and blend,
// each beside a full prefill of the same run; how long every part of it takes, and how close the answer's distribution
// comes. Without options that choose, the standard set.
#include "ttft/lab.hpp"

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace {

using lab::Variant;

struct Options {
  std::vector<std::string> models;
  std::string prompt = KVBLEND_TTFT_PROMPTS;
  std::string json;
  std::string store_directory;
  std::vector<std::string> variants;
  std::vector<std::string> selectors;
  std::vector<double> ratios;
  std::vector<std::string> tiers;
  std::string cache_type = "f16";
  std::string flash_attention = "on";
  int tokens = 3072;
  int threads = 2;
  int items = 2;
  int rounds = 2;
  bool gradual = false;
};

// One variant with its settings, and all it measured.
struct Entry {
  Variant variant;
  std::vector<lab::Timing> timings;
  std::vector<double> full_s;
  double kl = 0;
  double top1 = 0;
  int judged = 0;
};

struct Set {
  lab::Settings settings;
  std::vector<Entry> entries;
  int items = 1;
  int rounds = 1;
  std::int32_t tokens = 0;  // of the longest prompt
};

// A benchmark that cannot go on has nothing to clean up.
void require(const kvblend::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "kvblend_bench_ttft: %s: %s\n", status.where(), status.message());
  std::exit(1);
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

kvblend::DType dtype_of(const std::string& name) {
  if (name == "f32") return kvblend::DType::f32;
  if (name == "bf16") return kvblend::DType::bf16;
  if (name == "q8_0") return kvblend::DType::q8_0;
  return kvblend::DType::f16;
}

std::string name_of(const lab::Settings& settings) {
  switch (settings.cache_type) {
    case kvblend::DType::f32: return "f32";
    case kvblend::DType::bf16: return "bf16";
    case kvblend::DType::q8_0: return "q8_0";
    default: return "f16";
  }
}

Entry entry(std::string name, std::string selector = "none", double ratio = 0, std::string tier = "memory",
            bool gradual = false) {
  Entry out;
  out.variant = {std::move(name), std::move(selector), ratio, std::move(tier), gradual};
  return out;
}

// Every variant takes its turn in each round, so that a busy moment of the machine does not fall on one alone.
void measure(Set& set, const rag::PromptFile& file) {
  auto opened = lab::Lab::open(set.settings);
  require(opened.status);
  lab::Lab& lab = *opened.value;
  const std::string reason = lab.engine().route_reason();
  std::printf("\n%s, %s cache, flash attention %s, %d threads, route %s%s%s\n", set.settings.model.c_str(),
              name_of(set.settings).c_str(), set.settings.flash_attention ? "on" : "off", set.settings.threads,
              lab.engine().route() == llama_cpp::Route::in_place ? "in place" : "by runs", reason.empty() ? "" : ": ",
              reason.c_str());
  std::printf("passes of %d to 63 rows are filled up\n", lab.engine().fill_from());
  auto requests = lab.requests(file);
  require(requests.status);
  const auto items = std::min<std::size_t>(requests.value.size(), static_cast<std::size_t>(set.items));
  for (std::size_t item = 0; item < items; ++item) {
    const lab::Request& request = requests.value[item];
    const auto tokens = static_cast<std::int32_t>(request.all().size());
    set.tokens = std::max(set.tokens, tokens);
    require(lab.store(request));
    lab::Lab::Reference reference;
    std::vector<std::byte> full_state;
    for (int round = 0; round < set.rounds; ++round) {
      lab::Timing full;
      require(lab.run(request, Variant{}, full));
      if (round == 0) {
        require(lab.engine().save(full_state));
        require(lab.answer(tokens, reference));
      }
      std::fprintf(stderr, "item %zu, round %d: full %.3f s", item + 1, round + 1, full.ttft_s);
      for (Entry& entry : set.entries) {
        lab::Timing timing = full;
        if (entry.variant.name != "full") require(lab.run(request, entry.variant, timing));
        entry.timings.push_back(timing);
        entry.full_s.push_back(full.ttft_s);
        std::fprintf(stderr, ".");
        if (round > 0) continue;
        if (entry.variant.name == "blend" && entry.variant.ratio == 1) {
          std::vector<std::byte> state;
          require(lab.engine().save(state));
          const std::span<const float> logits = lab.engine().logits();
          std::printf("ratio 1, %s, item %zu: logits %s, keys and values %s those of full prefill\n",
                      entry.variant.selector.c_str(), item + 1,
                      std::equal(logits.begin(), logits.end(), reference.logits[0].begin(), reference.logits[0].end())
                          ? "are"
                          : "are not",
                      state == full_state ? "are" : "are not");
        }
        ++entry.judged;
        if (entry.variant.name == "full") {
          entry.top1 += 1;
          continue;
        }
        const auto closeness = lab.judge(reference);
        require(closeness.status);
        entry.kl += closeness.value.kl;
        entry.top1 += closeness.value.top1_agreement;
      }
      std::fprintf(stderr, "\n");
    }
  }
}

nlohmann::json to_json(const Set& set, const Entry& entry) {
  const auto middle = [&](auto get) {
    std::vector<double> values;
    for (const lab::Timing& timing : entry.timings) values.push_back(get(timing));
    return median(values);
  };
  std::vector<double> speedups;
  for (std::size_t i = 0; i < entry.timings.size(); ++i) speedups.push_back(entry.full_s[i] / entry.timings[i].ttft_s);
  const std::string& path = set.settings.model;
  return {
      {"variant", entry.variant.name},
      {"model", path.substr(path.find_last_of('/') + 1)},
      {"tokens", set.tokens},
      {"ratio", entry.variant.ratio},
      {"selector", entry.variant.selector},
      {"schedule", entry.variant.gradual ? "gradual" : "flat"},
      {"threads", set.settings.threads},
      {"flash_attention", set.settings.flash_attention},
      {"cache_type", name_of(set.settings)},
      {"tier", entry.variant.tier},
      {"ttft_s", middle([](const lab::Timing& t) { return t.ttft_s; })},
      {"full_ttft_s", median(entry.full_s)},
      {"speedup", median(speedups)},
      {"load_s", middle([](const lab::Timing& t) { return t.load_s; })},
      {"shift_s", middle([](const lab::Timing& t) { return t.shift_s; })},
      {"score_s", middle([](const lab::Timing& t) { return t.score_s; })},
      {"select_s", middle([](const lab::Timing& t) { return t.select_s; })},
      {"merge_s", middle([](const lab::Timing& t) { return t.merge_s; })},
      {"patch_s", middle([](const lab::Timing& t) { return t.patch_s; })},
      {"recompute_s", middle([](const lab::Timing& t) { return t.recompute_s; })},
      {"suffix_s", middle([](const lab::Timing& t) { return t.suffix_s; })},
      {"own_share", middle([](const lab::Timing& t) { return t.own_share(); })},
      {"rows_selected", middle([](const lab::Timing& t) { return t.rows_selected; })},
      {"kl_vs_full", entry.judged > 0 ? entry.kl / entry.judged : 0},
      {"top1_agreement", entry.judged > 0 ? entry.top1 / entry.judged : 0},
      {"pairs", entry.timings.size()},
  };
}

void print(const nlohmann::json& entries) {
  std::printf("%-12s %-20s %6s %-9s %8s %8s %7s | %7s %7s %7s %7s %8s %7s | %5s %7s %5s\n", "variant", "selector",
              "ratio", "tier", "TTFT s", "full s", "faster", "load", "shift", "score", "select", "compute", "suffix",
              "own %", "KL", "top1");
  for (const auto& e : entries) {
    std::string selector = e["selector"];
    if (e["schedule"] == "gradual") selector += ", gradual";
    std::printf(
        "%-12s %-20.20s %6.2f %-9s %8.3f %8.3f %6.2fx | %7.4f %7.4f %7.4f %7.4f %8.4f %7.4f | %5.2f %7.4f %5.2f\n",
        e["variant"].get<std::string>().c_str(), selector.c_str(), e["ratio"].get<double>(),
        e["tier"].get<std::string>().c_str(), e["ttft_s"].get<double>(), e["full_ttft_s"].get<double>(),
        e["speedup"].get<double>(), e["load_s"].get<double>(), e["shift_s"].get<double>(), e["score_s"].get<double>(),
        e["select_s"].get<double>(), e["recompute_s"].get<double>(), e["suffix_s"].get<double>(),
        100 * e["own_share"].get<double>(), e["kl_vs_full"].get<double>(), e["top1_agreement"].get<double>());
  }
  std::fflush(stdout);
}

std::vector<Set> standard_sets(const Options& options) {
  std::vector<Set> sets;
  for (const std::string& model : options.models) {
    Set set;
    set.settings = {model, options.tokens, options.threads, dtype_of(options.cache_type), true, ""};
    set.items = options.items;
    set.rounds = options.rounds;
    set.entries = {entry("full"), entry("prefix"), entry("cache_reuse"), entry("reuse")};
    for (const double ratio : {0.05, 0.15, 0.30}) {
      for (const char* selector : {"value_deviation", "key_value_deviation", "first_k", "random"}) {
        set.entries.push_back(entry("blend", selector, ratio));
      }
    }
    set.entries.push_back(entry("blend", "key_value_deviation", 0.15, "memory", true));
    sets.push_back(set);
  }
  if (options.models.empty()) return sets;

  // Where the KV lies, on the first model.
  Set tiers = sets.front();
  tiers.settings.store_directory = options.store_directory;
  tiers.items = 1;
  tiers.entries = {entry("full")};
  for (const char* tier : {"memory", "warm_file", "cold_file"}) {
    tiers.entries.push_back(entry("reuse", "none", 0, tier));
    tiers.entries.push_back(entry("blend", "key_value_deviation", 0.15, tier));
    tiers.entries.push_back(entry("blend", "first_k", 0.15, tier));
  }
  sets.push_back(tiers);
  // Other caches, on a shorter prompt: llama.cpp's kernels for them are slow.
  for (const bool flash_attention : {true, false}) {
    for (const kvblend::DType type : {kvblend::DType::f16, kvblend::DType::q8_0}) {
      if (type == kvblend::DType::q8_0 && !flash_attention) continue;
      Set cache = sets.front();
      cache.settings.tokens = std::min(options.tokens, 1024);
      cache.settings.cache_type = type;
      cache.settings.flash_attention = flash_attention;
      cache.rounds = 1;
      cache.entries = {entry("full"), entry("cache_reuse"), entry("reuse"), entry("blend", "key_value_deviation", 0.15),
                       entry("blend", "first_k", 0.15)};
      sets.push_back(cache);
    }
  }
  return sets;
}

std::vector<Set> chosen_sets(const Options& options) {
  std::vector<Set> sets;
  for (const std::string& model : options.models) {
    Set set;
    set.settings = {model,
                    options.tokens,
                    options.threads,
                    dtype_of(options.cache_type),
                    options.flash_attention == "on",
                    options.tiers.empty() ? "" : options.store_directory};
    set.items = options.items;
    set.rounds = options.rounds;
    const std::vector<std::string> tiers = options.tiers.empty() ? std::vector<std::string>{"memory"} : options.tiers;
    for (const std::string& variant : options.variants) {
      for (const std::string& tier : tiers) {
        if (variant == "reuse") set.entries.push_back(entry(variant, "none", 0, tier));
        if (variant != "blend") continue;
        for (const std::string& selector : options.selectors) {
          for (const double ratio : options.ratios) {
            set.entries.push_back(
                entry(variant, selector, ratio, tier, options.gradual && selector == "key_value_deviation"));
          }
        }
      }
      if (variant != "blend" && variant != "reuse") set.entries.push_back(entry(variant));
    }
    sets.push_back(set);
  }
  return sets;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Time to the first token on llama.cpp, by full prefill, caches and blends.", "kvblend_bench_ttft");
  Options options;
  app.add_option("--model", options.models, "GGUF file; may be given several times")->required();
  app.add_option("--prompt", options.prompt, "prompt file, as kvblend-rag takes it")->capture_default_str();
  app.add_option("--json", options.json, "write the figures to this file");
  app.add_option("--store-dir", options.store_directory, "where the tiers in files lie; default: beside the JSON");
  auto* variants = app.add_option("--variant", options.variants, "those to run; without: the standard set")
                       ->check(CLI::IsMember({"full", "prefix", "cache_reuse", "reuse", "blend"}));
  app.add_option("--selector", options.selectors, "of blends")
      ->check(CLI::IsMember({"key_value_deviation", "key_deviation", "value_deviation", "first_k", "random"}));
  app.add_option("--ratio", options.ratios, "of blends")->check(CLI::Range(0.0, 1.0));
  app.add_option("--tier", options.tiers)->check(CLI::IsMember({"memory", "warm_file", "cold_file"}));
  app.add_option("--cache-type", options.cache_type)
      ->check(CLI::IsMember({"f16", "f32", "bf16", "q8_0"}))
      ->capture_default_str();
  app.add_option("--flash-attention", options.flash_attention)
      ->check(CLI::IsMember({"on", "off"}))
      ->capture_default_str();
  app.add_option("--tokens", options.tokens, "of a prompt, at most")
      ->check(CLI::Range(128, 1 << 20))
      ->capture_default_str();
  app.add_option("--threads", options.threads)->check(CLI::Range(1, 256))->capture_default_str();
  app.add_option("--items", options.items, "questions of the file")->check(CLI::Range(1, 1000))->capture_default_str();
  app.add_option("--rounds", options.rounds, "runs of each question")->check(CLI::Range(1, 99))->capture_default_str();
  app.add_flag("--gradual", options.gradual, "blends by key_value_deviation narrow over the layers");
  CLI11_PARSE(app, argc, argv);
  if (options.store_directory.empty()) {
    options.store_directory = options.json.empty() ? "kvblend-store" : options.json + ".store";
  }
  if (options.selectors.empty()) options.selectors = {"key_value_deviation"};
  if (options.ratios.empty()) options.ratios = {0.15};

  const auto file = rag::read_prompt_file(options.prompt);
  require(file.status);
  std::vector<Set> sets = variants->count() > 0 ? chosen_sets(options) : standard_sets(options);
  nlohmann::json all = nlohmann::json::array();
  for (Set& set : sets) {
    measure(set, file.value);
    nlohmann::json entries = nlohmann::json::array();
    for (const Entry& entry : set.entries) entries.push_back(to_json(set, entry));
    std::printf("%d tokens, medians of %zu pairs\n", set.tokens, set.entries.front().timings.size());
    print(entries);
    for (auto& one : entries) all.push_back(std::move(one));
    if (options.json.empty()) continue;
    std::ofstream out(options.json);  // after each set: a run that is cut leaves what it has
    out << all.dump(1) << '\n';
    if (!out.good()) {
      std::fprintf(stderr, "kvblend_bench_ttft: %s: cannot be written\n", options.json.c_str());
      return 1;
    }
  }
  return 0;
}
