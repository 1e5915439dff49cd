// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Trial: one prompt on a host. Its passages are encoded once, full recompute answers once, and then any number of
// blends are held against that: what the shoot-out and the calibration measure with.
#pragma once

#include <rag/host.hpp>
#include <rag/saliency.hpp>
#include <rag/tokenized.hpp>

#include <eigen_engine/tokenizer.hpp>
#include <kvblend/kvblend.hpp>
#include <kvblend/store.hpp>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace rag {

// Opens a model on kvblend's own engine if that can run it, else, or if `host` says so, on llama.cpp: "auto", "eigen",
// "llama.cpp". There the cache is f16 with flash attention off, which is closest to exact arithmetic.
kvblend::Result<std::unique_ptr<Host>> open_host(const std::string& model, std::int32_t threads,
                                                 const std::string& host = "auto");

// Whether text has one of the answers, whatever the case.
[[nodiscard]] bool has_answer(std::string_view text, const std::vector<std::string>& answers);

struct Outcome {
  double kl = 0;        // to full recompute, nats a token, mean over the tokens of its answer
  double kl_first = 0;  // of the first of them
  double kl_worst = 0;  // of the worst of them
  double top1 = 0;      // share of them at which the most likely token is the same
  bool correct = false;
  double moved = 0;         // KL of the first prediction under full reuse to the blend's
  double entropy = 0;       // of the blend's first prediction
  double flops = 0;         // multiply-adds times two, with half of the context for a reused row's attention
  double bytes_before = 0;  // of stored data that must be in memory before it is known which rows run
  double seconds = 0;       // of the blend
  Run run;
  ScoresSeen seen;
};

// Known of a request however its rows are chosen.
struct RequestSignals {
  double key_deviation = 0;  // mean over the reused rows, layer 1
  double value_deviation = 0;
  double attention_share = 0;  // of the question's attention to stored rows, what goes to reused ones; 0: not known
  double reuse_entropy = 0;    // of the first prediction under full reuse
};

class Trial {
 public:
  // Encodes the parts behind the item's context, recomputes in full, and answers with up to `answer_tokens` tokens; with
  // 0 of them only add_to() can be called before recompute(). All arguments but `known` must outlive it. `known`: chunks
  // that are not encoded again where the item has a part of their identity.
  static kvblend::Result<std::unique_ptr<Trial>> open(Host& host, const eigen_engine::Tokenizer& tokenizer,
                                                      const TokenizedItem& item,
                                                      const std::vector<std::string>& answers,
                                                      std::int32_t answer_tokens,
                                                      std::span<const kvblend::ChunkHandle> known = {});

  // Recomputes in full and answers with up to `answer_tokens` > 0 tokens: what blends are held against from then on. The
  // host's cache has the prompt's rows afterwards, and the answer's behind them.
  kvblend::Status recompute(std::int32_t answer_tokens);
  // What blends reuse, one chunk a part, and others in their place: faulty ones, say.
  [[nodiscard]] const std::vector<kvblend::ChunkHandle>& chunks() const { return chunks_; }
  kvblend::Status hand_over(std::vector<kvblend::ChunkHandle> chunks);

  // Full reuse, for ratio 0 of anything.
  [[nodiscard]] const Outcome& reuse() const { return reuse_; }
  kvblend::Result<Outcome> blend(const Selection& selection);
  kvblend::Result<RequestSignals> signals();
  // RequestSignals' own, by a full reuse and a pass of the question's rows: what a blend that chooses after a probe
  // knows before it chooses. On hosts that report attention.
  kvblend::Result<double> attention_share();
  // Adds the reused rows' attention under full reuse to what a prior is made of. On hosts that report attention, with
  // stored scores.
  kvblend::Status add_to(PriorSums& sums);

  [[nodiscard]] std::int32_t rows() const { return prompt_.rows(); }
  [[nodiscard]] std::int32_t reused_rows() const { return prompt_.reused_rows(); }
  [[nodiscard]] std::int32_t answer_tokens() const { return static_cast<std::int32_t>(answer_.size()); }
  [[nodiscard]] const std::string& answer() const { return answer_text_; }
  [[nodiscard]] bool full_is_correct() const { return full_is_correct_; }
  [[nodiscard]] double full_flops() const;
  [[nodiscard]] double full_seconds() const { return full_s_; }

 private:
  Trial(Host& host, const eigen_engine::Tokenizer& tokenizer, const TokenizedItem& item,
        const std::vector<std::string>& answers)
      : host_(host), tokenizer_(tokenizer), item_(item), answers_(answers) {}

  kvblend::Status encode(std::span<const kvblend::ChunkHandle> known);
  // The question's attention under full reuse.
  kvblend::Status probe(ProbeSums& out);
  kvblend::Status judge(const std::vector<float>& first, Outcome& out);
  // Greedy, behind the cached rows.
  kvblend::Status decode(std::vector<float> logits, std::int32_t most, std::vector<kvblend::TokenId>& out,
                         std::vector<std::vector<float>>* all);
  [[nodiscard]] double flops_of(const Run& run, bool probed) const;

  Host& host_;
  const eigen_engine::Tokenizer& tokenizer_;
  const TokenizedItem& item_;
  const std::vector<std::string>& answers_;
  std::vector<kvblend::ChunkInfo> infos_;
  std::vector<kvblend::ChunkSource> sources_;
  std::vector<kvblend::ChunkHandle> chunks_;
  std::vector<kvblend::Segment> segments_;
  kvblend::Prompt prompt_;
  std::vector<kvblend::TokenId> answer_;    // full recompute's
  std::vector<std::vector<float>> logits_;  // at each of its tokens
  std::string answer_text_;
  bool full_is_correct_ = false;
  double full_s_ = 0;
  std::vector<float> reuse_first_;
  Outcome reuse_;
};

}  // namespace rag
