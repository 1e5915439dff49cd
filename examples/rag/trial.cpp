// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <rag/trial.hpp>

#include <rag/closeness.hpp>
#include <rag/eigen_host.hpp>
#include <rag/llama_host.hpp>
#include <rag/selectors.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <span>
#include <utility>

namespace rag {

using namespace kvblend;

namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::string small_letters(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return out;
}

double entropy(std::span<const float> logits) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  double weighted = 0;
  for (const float logit : logits) {
    const double e = std::exp(logit - largest);
    sum += e;
    weighted += e * (logit - largest);
  }
  return std::log(sum) - weighted / sum;
}

}  // namespace

Result<std::unique_ptr<Host>> open_host(const std::string& model, std::int32_t threads, const std::string& host) {
  if (host != "llama.cpp") {
    auto eigen = EigenHost::open(model, threads);
    const bool other = eigen.status.code() == StatusCode::unsupported;
    if (eigen.ok() || host == "eigen" || !other) return eigen;
  }
  LlamaOptions options;
  options.threads = threads;
  options.flash_attention = false;
  return LlamaHost::open(model, options);
}

bool has_answer(std::string_view text, const std::vector<std::string>& answers) {
  const std::string small = small_letters(text);
  return std::any_of(answers.begin(), answers.end(), [&](const std::string& answer) {
    return !answer.empty() && small.find(small_letters(answer)) != std::string::npos;
  });
}

Result<std::unique_ptr<Trial>> Trial::open(Host& host, const eigen_engine::Tokenizer& tokenizer,
                                           const TokenizedItem& item, const std::vector<std::string>& answers,
                                           std::int32_t answer_tokens, std::span<const ChunkHandle> known) {
  std::unique_ptr<Trial> trial(new Trial(host, tokenizer, item, answers));
  KVBLEND_RETURN_IF_ERROR(trial->encode(known));
  if (answer_tokens == 0) return trial;
  KVBLEND_RETURN_IF_ERROR(trial->recompute(answer_tokens));
  Selection nothing;
  nothing.selector = "first_k";
  auto reuse = trial->blend(nothing);
  KVBLEND_RETURN_IF_ERROR(reuse.status);
  trial->reuse_ = reuse.value;
  return trial;
}

Status Trial::encode(std::span<const ChunkHandle> known) {
  std::vector<ChunkHandle> chunks;
  for (std::size_t part = 0; part < item_.reusable.size(); ++part) {
    const ChunkIdentity identity = host_.chunk_identity(item_.reusable[part], item_.context_of(part));
    const auto same = std::find_if(known.begin(), known.end(),
                                   [&](const ChunkHandle& chunk) { return chunk->identity() == identity; });
    if (same != known.end()) {
      chunks.push_back(*same);
      continue;
    }
    auto chunk = host_.encode(item_.reusable[part], item_.context_of(part));
    KVBLEND_RETURN_IF_ERROR(chunk.status);
    chunks.push_back(std::move(chunk.value));
  }
  KVBLEND_RETURN_IF_ERROR(hand_over(std::move(chunks)));
  return {};
}

Status Trial::hand_over(std::vector<ChunkHandle> chunks) {
  infos_.clear();
  sources_.clear();
  segments_.clear();
  infos_.reserve(chunks.size());  // segments point into it
  for (const ChunkHandle& chunk : chunks) {
    infos_.push_back(chunk->info());
    sources_.emplace_back(chunk);
    segments_.push_back(cached_segment(infos_.back()));
  }
  chunks_ = std::move(chunks);
  segments_.push_back(fresh_segment(item_.question));
  sources_.emplace_back();
  auto prompt = Prompt::make(segments_, Position(host_.context() - 1));
  KVBLEND_RETURN_IF_ERROR(prompt.status);
  prompt_ = prompt.value;
  return {};
}

Status Trial::recompute(std::int32_t answer_tokens) {
  const auto start = std::chrono::steady_clock::now();
  host_.clear();
  KVBLEND_RETURN_IF_ERROR(host_.prefill(item_.all, Wanted::last));
  std::vector<float> first(static_cast<std::size_t>(host_.vocabulary()));
  KVBLEND_RETURN_IF_ERROR(host_.logits(first));
  full_s_ = seconds_since(start);
  KVBLEND_RETURN_IF_ERROR(decode(std::move(first), answer_tokens, answer_, &logits_));
  auto text = tokenizer_.detokenize(answer_);
  KVBLEND_RETURN_IF_ERROR(text.status);
  answer_text_ = text.value;
  full_is_correct_ = has_answer(answer_text_, answers_);
  return {};
}

Status Trial::decode(std::vector<float> logits, std::int32_t most, std::vector<TokenId>& out,
                     std::vector<std::vector<float>>* all) {
  for (std::int32_t i = 0; i < most; ++i) {
    out.push_back(most_likely(logits));
    if (all != nullptr) all->push_back(logits);
    if (tokenizer_.is_end(out.back()) || i + 1 == most) break;
    KVBLEND_RETURN_IF_ERROR(host_.decode(out.back()));
    KVBLEND_RETURN_IF_ERROR(host_.logits(logits));
  }
  return {};
}

Result<Outcome> Trial::blend(const Selection& selection) {
  Outcome out;
  std::vector<float> first(static_cast<std::size_t>(host_.vocabulary()));
  Selection seeing = selection;
  seeing.seen = &out.seen;
  host_.clear();
  const auto start = std::chrono::steady_clock::now();
  KVBLEND_RETURN_IF_ERROR(host_.blend(prompt_, sources_, seeing, out.run, first));
  out.seconds = seconds_since(start);

  const auto traits = selector_traits(selection.selector);
  KVBLEND_RETURN_IF_ERROR(traits.status);
  const ModelIdentity& model = host_.identity();
  const double layer = 2.0 * model.kv_heads * static_cast<double>(head_bytes(model)) * prompt_.reused_rows();
  const bool chose = selection.ratio > 0;
  if (chose && traits.value.timing == ScoreTiming::during_pass) out.bytes_before = 2 * layer;
  if (chose && traits.value.timing == ScoreTiming::after_probe) out.bytes_before = model.layers * layer;
  if (chose && traits.value.needs_stored_scores) out.bytes_before += 4.0 * prompt_.reused_rows();
  out.flops = flops_of(out.run, chose && traits.value.timing == ScoreTiming::after_probe);

  if (reuse_first_.empty()) reuse_first_ = first;  // open() blends at ratio 0 before all others
  out.moved = divergence(first, reuse_first_);
  out.entropy = entropy(first);
  KVBLEND_RETURN_IF_ERROR(judge(first, out));
  return out;
}

// Feeds full recompute's answer to the cache as it is and compares the predictions at each of its tokens.
Status Trial::judge(const std::vector<float>& first, Outcome& out) {
  const auto vocabulary = static_cast<std::size_t>(host_.vocabulary());
  const std::size_t count = answer_.size();
  std::vector<float> rest((count - 1) * vocabulary);
  if (count > 1) {
    KVBLEND_RETURN_IF_ERROR(host_.prefill(std::span(answer_).first(count - 1), Wanted::all));
    KVBLEND_RETURN_IF_ERROR(host_.logits(rest));
  }
  std::size_t same = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::span<const float> got =
        i == 0 ? std::span(first) : std::span(rest).subspan((i - 1) * vocabulary, vocabulary);
    const double kl = divergence(logits_[i], got);
    out.kl += kl / static_cast<double>(count);
    if (i == 0) out.kl_first = kl;
    out.kl_worst = (std::max)(out.kl_worst, kl);
    if (most_likely(logits_[i]) == most_likely(got)) ++same;
  }
  out.top1 = static_cast<double>(same) / static_cast<double>(count);
  out.correct = full_is_correct_;  // the same tokens are the same answer
  if (same == count || answers_.empty()) return {};
  KVBLEND_RETURN_IF_ERROR(host_.truncate(prompt_.rows()));
  std::vector<TokenId> own;
  KVBLEND_RETURN_IF_ERROR(decode(first, static_cast<std::int32_t>(count) + 4, own, nullptr));
  auto text = tokenizer_.detokenize(own);
  KVBLEND_RETURN_IF_ERROR(text.status);
  out.correct = has_answer(text.value, answers_);
  return {};
}

double Trial::full_flops() const {
  const LayerFlops layer = host_.layer_flops();
  const double n = prompt_.rows();
  return host_.identity().layers * (n * layer.row + n * n / 2 * layer.pair);
}

double Trial::flops_of(const Run& run, bool probed) const {
  const LayerFlops layer = host_.layer_flops();
  const double n = prompt_.rows();
  const auto computed = static_cast<double>(run.rows_computed);
  const double question = static_cast<double>(prompt_.fresh_rows()) * host_.identity().layers * (probed ? 2 : 1);
  const double reused = (std::max)(computed - question, 0.0);
  return computed * layer.row + (question * n + reused * n / 2) * layer.pair;
}

Result<RequestSignals> Trial::signals() {
  RequestSignals out;
  out.reuse_entropy = entropy(reuse_first_);
  Selection one;  // enough to have deviations measured
  one.selector = "key_value_deviation";
  one.ratio = 1.0 / (std::max)(prompt_.reused_rows(), 1);
  ScoresSeen seen;
  one.seen = &seen;
  Run run;
  std::vector<float> logits(static_cast<std::size_t>(host_.vocabulary()));
  host_.clear();
  KVBLEND_RETURN_IF_ERROR(host_.blend(prompt_, sources_, one, run, logits));
  out.key_deviation = seen.key_deviation;
  out.value_deviation = seen.value_deviation;
  if (!host_.reports_attention()) return out;
  const auto share = attention_share();
  KVBLEND_RETURN_IF_ERROR(share.status);
  out.attention_share = share.value;
  return out;
}

Status Trial::probe(ProbeSums& out) {
  Selection nothing;
  Run run;
  std::vector<float> logits(static_cast<std::size_t>(host_.vocabulary()));
  host_.clear();
  KVBLEND_RETURN_IF_ERROR(host_.blend(prompt_, sources_, nothing, run, logits));
  KVBLEND_RETURN_IF_ERROR(host_.truncate(prompt_.rows() - static_cast<std::int32_t>(item_.question.size())));
  return host_.probe(item_.question, out);
}

Result<double> Trial::attention_share() {
  ProbeSums sums;
  KVBLEND_RETURN_IF_ERROR(probe(sums));
  double all = 0;
  double reused = 0;
  for (std::size_t row = 0; row < sums.mass.size(); ++row) {
    all += static_cast<double>(sums.mass[row]);
    if (static_cast<std::int32_t>(row) >= prompt_.exact_end().value) reused += static_cast<double>(sums.mass[row]);
  }
  return all > 0 ? reused / all : 0.0;
}

Status Trial::add_to(PriorSums& prior) {
  ProbeSums sums;
  KVBLEND_RETURN_IF_ERROR(probe(sums));
  const double terms = static_cast<double>(item_.question.size());  // the rest is the same for all prompts of a model
  for (const Segment& segment : prompt_.segments()) {
    if (segment.kind != SegmentKind::cached || segment.exact || segment.chunk->scores.empty()) continue;
    for (std::int32_t i = 1; i < segment.size(); ++i) {
      const Row row = segment.first_row + i;
      prior.add(prompt_.position(Row(prompt_.rows() - 1)) - segment.position(row),
                static_cast<double>(sums.value_mass[static_cast<std::size_t>(row.value)]) / terms,
                static_cast<double>(segment.chunk->scores[static_cast<std::size_t>(segment.chunk_offset + i)]));
    }
  }
  return {};
}

}  // namespace rag
