// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// kvblend-calibrate: measures what blending costs a model in quality and time, and writes one JSON that a planner's
// host loads.
#include "calibrator.hpp"

#include <rag/report.hpp>

#include <CLI/CLI.hpp>

#include <chrono>
#include <cstdio>
#include <string>

namespace {

int fail(const kvblend::Status& status) {
  std::fprintf(stderr, "kvblend-calibrate: %s: %s\n", status.where(), status.message());
  return 1;
}

void print(const rag::CalibrationFile& file) {
  const kvblend::QualityCalibration& q = file.quality;
  std::printf("%s on %s, %s, encoded behind: %s. KL to full recompute, nats a token (standard error)\n",
              q.model.c_str(), file.host.c_str(), file.prompts.c_str(), rag::describe(file.context).c_str());
  for (const kvblend::SelectorQuality& selector : q.selectors) {
    std::printf("  %-22s", selector.name.c_str());
    for (const kvblend::KlPoint& p : selector.points) {
      std::printf("  %2.0f %%: %.3f (%.3f)", 100 * p.ratio, p.kl_mean, p.kl_se);
    }
    std::printf("\n");
  }
  for (std::size_t s = 0; s < kvblend::kSituations; ++s) {
    const kvblend::SelectorDefault& d = q.defaults[s];
    std::printf("%s: ", kvblend::to_string(static_cast<kvblend::Situation>(s)));
    if (d.selector < 0) {
      std::printf("do not blend: no selector reaches a KL of %g\n", q.target_kl);
    } else {
      std::printf("%s, at least %.1f %% for a KL of %g\n",
                  q.selectors[static_cast<std::size_t>(d.selector)].name.c_str(), 100 * d.r_min, q.target_kl);
    }
  }
  for (const rag::TierSpeed& tier : file.tiers)
    std::printf("%s: %.2f GB/s\n", tier.name.c_str(), tier.bytes_per_s / 1e9);
  if (q.signal.empty()) {
    std::printf("signal for the gate: none tells good requests from bad\n");
  } else {
    std::printf("signal for the gate: %s; raise the ratio above %.3g, recompute above %.3g\n", q.signal.c_str(),
                q.signal_limits.raise_at, q.signal_limits.recompute_at);
  }
}

}  // namespace

int main(int argc, char** argv) {
  calibrate::Options options;
  std::string prompts = std::string(KVBLEND_PROMPTS) + "/musique_choosing.json";
  std::string context = rag::kUsualContext;
  std::string out = "kvblend-calibration.json";
  CLI::App app("Measures what blending costs a model in quality and time.", "kvblend-calibrate");
  app.add_option("--model", options.model, "GGUF file")->required();
  app.add_option("--prompts", prompts, "JSON of instructions, passages and questions, as they will be asked")
      ->capture_default_str();
  app.add_option("--context", context, rag::kContextHelp)->capture_default_str();
  app.add_option("--out", out, "the calibration")->capture_default_str();
  app.add_option("--target-kl", options.target_kl, "wanted mean KL to full recompute, nats a token")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--minutes", options.minutes, "prompts are taken as long as this allows, at least eight")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--items", options.items, "prompts at most; 0: all")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--tokens", options.tokens, "of a prompt, at most")
      ->check(CLI::Range(64, 1 << 20))
      ->capture_default_str();
  app.add_option("--answer-tokens", options.answer_tokens, "of full recompute's answer, at most")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--host", options.host, "the engine; auto: eigen where it can run the model")
      ->check(CLI::IsMember({"auto", "eigen", "llama.cpp"}))
      ->capture_default_str();
  app.add_option("--threads", options.threads, "compute threads")->check(CLI::Range(1, 256))->capture_default_str();
  app.add_option("--file-tier", options.file_tier, "directory of a file store, whose speed is measured too");
  CLI11_PARSE(app, argc, argv);

  if (const kvblend::Status status = rag::check_writable(out); !status.ok()) return fail(status);
  auto file = rag::read_prompt_file(prompts);
  if (!file.ok()) return fail(file.status);
  auto read = rag::read_context(context);
  if (!read.ok()) return fail(read.status);
  file.value.context = std::move(read.value);
  if (const kvblend::Status status = calibrate::Calibrator::check(options, file.value); !status.ok())
    return fail(status);
  const auto start = std::chrono::steady_clock::now();
  const auto progress = [start](double done, const std::string& what) {
    const double spent = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const double left = done > 0.05 ? spent * (1 - done) / done : 0;
    std::fprintf(stderr, "\r%3.0f %%  %-24s", 100 * done, what.c_str());
    if (left > 0) std::fprintf(stderr, " about %.0f s left   ", left);
  };
  const auto calibrator = calibrate::Calibrator::open(options, progress);
  if (!calibrator.ok()) {
    std::fprintf(stderr, "\n");
    return fail(calibrator.status);
  }
  const auto calibration = calibrator.value->run(file.value);
  std::fprintf(stderr, "\n");
  if (!calibration.ok()) return fail(calibration.status);
  print(calibration.value);
  if (const kvblend::Status status = rag::write_calibration(calibration.value, out); !status.ok()) return fail(status);
  const auto again = rag::read_calibration(out);  // what is written can be loaded
  if (!again.ok()) return fail(again.status);
  std::printf("%s\n", out.c_str());
  return 0;
}
