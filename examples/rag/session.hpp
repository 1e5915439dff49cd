// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Session: a host, a store and the four ways to answer from passages. This is where kvblend's parts meet.
#pragma once

#include <rag/calibration_file.hpp>
#include <rag/host.hpp>
#include <rag/prompt_file.hpp>
#include <rag/report.hpp>
#include <rag/tokenized.hpp>

#include <eigen_engine/tokenizer.hpp>
#include <kvblend/kvblend.hpp>
#include <kvblend/store.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace rag {

struct Options {
  std::string model;              // GGUF file
  std::string calibration;        // of kvblend-calibrate; empty: the engine is measured, and `selector` is taken. What
                                  // passages are encoded behind is the calibration's, or else the prompt file's
  std::optional<double> ratio;    // empty: the planner's
  std::string selector;           // empty: attention_value_mass of KV in memory, with drift where the host can, or else
                                  // first_k, which hides all loading
  std::string schedule = "flat";  // or gradual
  std::string store = "memory";   // or file
  std::string store_directory;
  std::int32_t threads = 2;
  std::int32_t repeats = 3;
  std::int32_t answer_tokens = 24;
  bool print_plan = false;
};

// The selectors by name, in the order --help lists them.
std::vector<std::string> selector_names();

class Session {
 public:
  // Loads the tokenizer and opens the store. Errors are one line that names the file or option.
  static kvblend::Result<std::unique_ptr<Session>> open(const Options& options, std::unique_ptr<Host> host);

  // Answers every item in every mode.
  kvblend::Status run(PromptFile file, Report& report);

 private:
  // Logits at each token of the full-recompute answer, and that answer.
  struct Reference {
    std::vector<kvblend::TokenId> answer;
    std::vector<std::vector<float>> logits;
  };
  // The prompt as the library sees it, with whatever its segments point to.
  struct Request {
    std::vector<kvblend::FileReader> readers;
    std::vector<kvblend::ChunkInfo> infos;
    std::vector<kvblend::ChunkSource> sources;
    std::vector<kvblend::Segment> segments;
    kvblend::Prompt prompt;
  };

  Session(const Options& options, std::unique_ptr<Host> host, eigen_engine::Tokenizer tokenizer)
      : options_(options),
        host_(std::move(host)),
        tokenizer_(std::move(tokenizer)),
        memory_tier_(std::int64_t{8} << 30) {}

  [[nodiscard]] Selection selection(const std::string& selector, double ratio) const {
    Selection out;
    out.selector = selector;
    out.schedule = options_.schedule;
    out.ratio = ratio;
    if (calibration_) out.prior = calibration_->quality.prior;
    return out;
  }
  // Errors: it is another model's or host's, names a selector that this host lacks, or lacks the store's speed.
  [[nodiscard]] kvblend::Status check_calibration() const;
  kvblend::Status tokenize(const PromptFile& file, std::vector<TokenizedItem>& items) const;
  kvblend::Status store(const TokenizedItem& item, std::size_t part);
  kvblend::Status calibrate(const std::vector<TokenizedItem>& items);

  kvblend::Status run_item(const TokenizedItem& item, Progress& progress, const std::string& label, Report& report);
  kvblend::Status run_mode(const TokenizedItem& item, Run& run, std::vector<float>& logits);
  kvblend::Status full_recompute(const TokenizedItem& item, Run& run, std::vector<float>& logits);
  kvblend::Status prefix(const TokenizedItem& item, std::size_t exact, Run& run, std::vector<float>& logits);
  // Takes the first `cached` of the reusable parts from the store.
  kvblend::Status look_up(const TokenizedItem& item, std::size_t cached, Request& request);
  kvblend::Status reuse(const TokenizedItem& item, std::size_t cached, double ratio, Run& run,
                        std::vector<float>& logits);
  kvblend::Status planned(const TokenizedItem& item, Run& run, std::vector<float>& logits);
  kvblend::Status blend_with(const Selection& selection, Request& request, Run& run, std::vector<float>& logits);

  kvblend::Status answer_freely(const std::vector<float>& first, Reference& out);
  kvblend::Status judge(const Reference& reference, const std::vector<float>& first, Run& run);

  Options options_;
  bool own_choice_ = false;  // of the selector
  std::unique_ptr<Host> host_;
  eigen_engine::Tokenizer tokenizer_;
  kvblend::MemoryTier<> memory_tier_;
  kvblend::FileTier<> file_tier_;
  std::optional<CalibrationFile> calibration_;
  kvblend::LinearCostModel cost_;
  double file_bandwidth_ = 0;  // bytes a second, measured
};

}  // namespace rag
