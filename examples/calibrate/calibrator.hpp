// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Calibrator: measures a model on a host for as long as it may, and makes a calibration of it.
#pragma once

#include <rag/calibration_file.hpp>
#include <rag/prompt_file.hpp>
#include <rag/trial.hpp>

#include <eigen_engine/tokenizer.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace calibrate {

struct Options {
  std::string model;  // GGUF file
  std::string host = "auto";
  std::int32_t threads = 2;
  std::int32_t tokens = 1500;  // of a prompt, at most
  std::int32_t answer_tokens = 24;
  std::int32_t items = 0;  // at most; 0: all
  double minutes = 4.5;
  double target_kl = 0.1;
  double most_ratio = 0.5;  // what needs more is not blended
  std::string file_tier;    // directory whose speed is measured; empty: none
};

class Calibrator {
 public:
  // Called with a share of all work and what is being done.
  using Progress = std::function<void(double done, const std::string& what)>;

  // Whether there are prompts enough: known before a model is loaded.
  static kvblend::Status check(const Options& options, const rag::PromptFile& prompts);
  static kvblend::Result<std::unique_ptr<Calibrator>> open(const Options& options, Progress progress);
  // Once.
  kvblend::Result<rag::CalibrationFile> run(const rag::PromptFile& prompts);

 private:
  // One selector at one ratio, prompt by prompt.
  struct Series {
    std::size_t selector = 0;
    double ratio = 0;
    std::vector<double> kls;
    std::vector<double> moved;
  };

  Calibrator(const Options& options, Progress progress) : options_(options), progress_(std::move(progress)) {}
  kvblend::Status choose_selectors();
  kvblend::Result<rag::TokenizedItem> tokens(const rag::PromptFile& prompts, std::size_t item) const;
  kvblend::Status find_prior(const rag::PromptFile& prompts);
  kvblend::Status find_cost(const rag::PromptFile& prompts);
  kvblend::Status find_tiers(const kvblend::ChunkHandle& chunk);
  kvblend::Status measure(const rag::PromptFile& prompts);
  kvblend::Status measure_item(const rag::PromptFile& prompts, std::size_t item);
  kvblend::Status settle();
  [[nodiscard]] double seconds() const;

  Options options_;
  Progress progress_;
  double start_ = 0;
  std::unique_ptr<rag::Host> host_;
  eigen_engine::Tokenizer tokenizer_;
  rag::CalibrationFile out_;
  std::vector<Series> series_;
  std::vector<double> attention_shares_;  // per prompt; empty on hosts that do not report attention
  std::size_t measured_ = 0;              // prompts
};

}  // namespace calibrate
