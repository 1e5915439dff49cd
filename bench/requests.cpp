// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Many requests one after the other over a pool of passages, drawn and shuffled anew each time, through the memory tier:
// whether blending stays as fast as it began, what it does with passages that it has never seen, and what memory it takes
// beside the engine's own.
#include "ttft/lab.hpp"

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace {

void require(const kvblend::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "kvblend_bench_requests: %s: %s\n", status.where(), status.message());
  std::exit(1);
}

// A figure of /proc/self/status in MiB; 0 if there is none.
double memory_mib(const char* field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(field, 0) == 0) return std::strtod(line.c_str() + std::string(field).size() + 1, nullptr) / 1024;
  }
  return 0;
}

// From now on the peak is of what follows.
void forget_peak() { std::ofstream("/proc/self/clear_refs") << "5"; }

double mean(const std::vector<double>& values, std::size_t first, std::size_t count) {
  return std::accumulate(values.begin() + static_cast<std::ptrdiff_t>(first),
                         values.begin() + static_cast<std::ptrdiff_t>(first + count), 0.0) /
         static_cast<double>(count);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Requests one after the other, over a pool of passages in the memory tier.", "kvblend_bench_requests");
  lab::Settings settings;
  std::string prompt = KVBLEND_TTFT_PROMPTS;
  std::string json;
  std::string selector = "key_value_deviation";
  double ratio = 0.15;
  int requests = 50;
  int pool_size = 60;
  int passages = 6;
  app.add_option("--model", settings.model, "GGUF file")->required();
  app.add_option("--prompt", prompt, "prompt file, whose passages are the pool")->capture_default_str();
  app.add_option("--json", json, "write the figures to this file");
  app.add_option("--selector", selector)
      ->check(CLI::IsMember({"key_value_deviation", "key_deviation", "value_deviation", "first_k", "random"}))
      ->capture_default_str();
  app.add_option("--ratio", ratio)->check(CLI::Range(0.0, 1.0))->capture_default_str();
  app.add_option("--requests", requests)->check(CLI::Range(20, 100000))->capture_default_str();
  app.add_option("--pool", pool_size, "passages in the pool")->check(CLI::Range(2, 100000))->capture_default_str();
  app.add_option("--passages", passages, "passages of a request")->check(CLI::Range(2, 1000))->capture_default_str();
  app.add_option("--threads", settings.threads)->check(CLI::Range(1, 256))->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  settings.tokens = 64 + 320 * passages;

  const auto file = rag::read_prompt_file(prompt);
  require(file.status);
  auto opened = lab::Lab::open(settings);
  require(opened.status);
  lab::Lab& lab = *opened.value;
  auto pool = lab.passages(file.value);
  require(pool.status);
  if (pool.value.size() > static_cast<std::size_t>(pool_size)) pool.value.resize(static_cast<std::size_t>(pool_size));
  auto made = lab.requests(file.value);
  require(made.status);
  if (made.value.empty() || pool.value.empty()) {
    require(kvblend::Status::error(kvblend::StatusCode::invalid_argument, "has no passages").at("%s", prompt.c_str()));
  }
  lab::Request request = made.value.front();
  request.passages = pool.value;
  require(lab.store(request));

  std::mt19937 random(1);
  const auto draw = [&](std::size_t number) {
    std::vector<std::size_t> order(pool.value.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::shuffle(order.begin(), order.end(), random);
    request.passages.clear();
    for (std::size_t i = 0; i < static_cast<std::size_t>(passages); ++i) {
      request.passages.push_back(pool.value[order[i % order.size()]]);
    }
    request.question = made.value[number % made.value.size()].question;
  };
  // The pair of a blend and a full prefill of the same prompt.
  lab::Variant blend{"blend", selector, ratio, "memory", false};
  const auto pair = [&](lab::Timing& blended) {
    lab::Timing full;
    require(lab.run(request, lab::Variant{}, full));
    require(lab.run(request, blend, blended));
    return full.ttft_s / blended.ttft_s;
  };

  lab::Timing timing;
  for (std::size_t warm_up = 0; warm_up < 2; ++warm_up) {
    draw(warm_up);
    require(lab.run(request, lab::Variant{}, timing));
  }
  const double before = memory_mib("VmRSS:");
  forget_peak();
  require(lab.run(request, blend, timing));
  const double peak = memory_mib("VmHWM:");
  const double fused = static_cast<double>(request.all().size()) * lab.row_bytes() / (1 << 20);
  std::printf(
      "memory: %.1f MiB before the first blend, %.1f at its peak: %.1f more, of which the fused KV is %.1f (%zu "
      "tokens)\n",
      before, peak, peak - before, fused, request.all().size());

  std::vector<double> speedups;
  std::vector<double> shares;
  for (int i = 0; i < requests; ++i) {
    draw(static_cast<std::size_t>(i));
    speedups.push_back(pair(timing));
    shares.push_back(timing.own_share());
    std::fprintf(stderr, "\rrequest %d of %d: %.2fx", i + 1, requests, speedups.back());
  }
  std::fprintf(stderr, "\n");
  const double first = mean(speedups, 0, 10);
  const double last = mean(speedups, speedups.size() - 10, 10);
  std::printf(
      "%d requests of %d passages out of %zu, about %zu tokens: first ten %.3fx, last ten %.3fx (%+.1f %%), own "
      "work %.2f %%\n",
      requests, passages, pool.value.size(), request.all().size(), first, last, 100 * (last / first - 1),
      100 * mean(shares, 0, shares.size()));

  // Passages that the store does not have, all the same way.
  const auto special = [&](const char* name) {
    const double speedup = pair(timing);
    std::printf("%-24s %6.2fx\n", name, speedup);
    return speedup;
  };
  nlohmann::json others;
  draw(0);
  for (auto& passage : request.passages) passage = request.passages.front();
  others["one passage again and again"] = special("one passage repeated");
  draw(1);
  std::vector<kvblend::TokenId>& middle = request.passages[request.passages.size() / 2];
  std::reverse(middle.begin(), middle.end());  // no passage of the pool
  others["a hole in the middle"] = special("a hole in the middle");
  draw(2);
  for (auto& passage : request.passages) std::reverse(passage.begin(), passage.end());
  others["no hit"] = special("no hit");
  if (json.empty()) return 0;
  std::ofstream out(json);
  out << nlohmann::json{{"model", settings.model.substr(settings.model.find_last_of('/') + 1)},
                        {"requests", requests},
                        {"passages", passages},
                        {"pool", pool.value.size()},
                        {"speedups", speedups},
                        {"first_ten", first},
                        {"last_ten", last},
                        {"own_share", mean(shares, 0, shares.size())},
                        {"memory_before_mib", before},
                        {"memory_peak_mib", peak},
                        {"fused_kv_mib", fused},
                        {"others", others}}
             .dump(1)
      << '\n';
  return out.good() ? 0 : 1;
}
