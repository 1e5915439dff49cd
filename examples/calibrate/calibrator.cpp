// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "calibrator.hpp"

#include <rag/selectors.hpp>

#include <kvblend/plan/calibration.hpp>
#include <kvblend/store.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <span>
#include <utility>

namespace calibrate {

using namespace kvblend;

namespace {

// The cheap ones first: a later one becomes the default only where it is better beyond doubt. Behind one with drift the
// same without, for hosts that cannot.
const std::array<const char*, 6> kSelectors = {"first_k",
                                               "key_value_deviation",
                                               "drift(floor(stored_score))",
                                               "floor(stored_score)",
                                               "drift(attention_value_mass)",
                                               "attention_value_mass"};
const std::array<double, 3> kRatios = {0.05, 0.15, 0.30};
constexpr double kTrialRatio = 0.15;
constexpr std::size_t kLeastItems = 8;
constexpr std::size_t kPriorItems = 2;
constexpr double kShareRaised = 0.2;
constexpr double kShareRecomputed = 0.05;
// Candidates for the gate's signal. The first is known before rows are chosen, the second after the blend.
constexpr const char* kAttentionShare = "share of the question's attention to stored tokens that goes to reused ones";
constexpr const char* kMoved = "KL of the first token, blend to full reuse";

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Prompts that may be taken.
std::size_t count_of(const Options& options, const rag::PromptFile& prompts) {
  const auto most = options.items > 0 ? static_cast<std::size_t>(options.items) : prompts.items.size();
  return (std::min)(most, prompts.items.size());
}

}  // namespace

Status Calibrator::check(const Options& options, const rag::PromptFile& prompts) {
  const std::size_t count = count_of(options, prompts);
  // Behind the instructions alone the first passage is exact.
  const std::size_t exact = prompts.context && prompts.context->empty() ? 1 : 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (prompts.items[i].passages.size() > exact) continue;
    return Status::error(StatusCode::invalid_argument,
                         "has one passage, which is exact where it stands: nothing is reused")
        .at("items[%zu]", i);
  }
  if (count >= kLeastItems) return {};
  return Status::error(StatusCode::invalid_argument, "%zu, at least %zu are needed", count, kLeastItems).at("prompts");
}

double Calibrator::seconds() const { return now() - start_; }

Result<std::unique_ptr<Calibrator>> Calibrator::open(const Options& options, Progress progress) {
  std::unique_ptr<Calibrator> out(new Calibrator(options, std::move(progress)));
  out->start_ = now();
  out->progress_(0, "loading the model");
  auto host = rag::open_host(options.model, options.threads, options.host);
  KVBLEND_RETURN_IF_ERROR(host.status);
  out->host_ = std::move(host.value);
  auto tokenizer = eigen_engine::Tokenizer::load(options.model.c_str());
  KVBLEND_RETURN_IF_ERROR(tokenizer.status);
  out->tokenizer_ = std::move(tokenizer.value);
  if (out->host_->reports_attention()) {
    auto probes = rag::saliency_probes(out->tokenizer_);
    KVBLEND_RETURN_IF_ERROR(probes.status);
    KVBLEND_RETURN_IF_ERROR(out->host_->store_scores(std::move(probes.value)));
  }
  return out;
}

Result<rag::TokenizedItem> Calibrator::tokens(const rag::PromptFile& prompts, std::size_t item) const {
  auto out = rag::tokenize(tokenizer_, prompts, prompts.items[item], static_cast<std::size_t>(options_.tokens));
  if (out.ok()) out.status = rag::check_context(out.value, host_->context());
  return out;
}

Result<rag::CalibrationFile> Calibrator::run(const rag::PromptFile& prompts) {
  KVBLEND_RETURN_IF_ERROR(check(options_, prompts));
  const auto first = tokens(prompts, 0);
  KVBLEND_RETURN_IF_ERROR(first.status);
  // A part is no longer than a prompt may be.
  const auto context = static_cast<std::int32_t>(first.value.context.size());
  KVBLEND_RETURN_IF_ERROR(host_->reserve(options_.tokens + (std::max)(context, options_.answer_tokens + 8)));
  out_ = {};
  out_.host = host_->name();
  out_.quality.model = host_->identity().name;
  out_.quality.fingerprint = host_->identity().fingerprint;
  out_.quality.target_kl = options_.target_kl;
  out_.context = prompts.context;
  KVBLEND_RETURN_IF_ERROR(choose_selectors());
  if (host_->reports_attention()) KVBLEND_RETURN_IF_ERROR(find_prior(prompts));
  KVBLEND_RETURN_IF_ERROR(find_cost(prompts));
  KVBLEND_RETURN_IF_ERROR(measure(prompts));
  KVBLEND_RETURN_IF_ERROR(settle());
  KVBLEND_RETURN_IF_ERROR(out_.quality.validate());
  return out_;
}

Status Calibrator::choose_selectors() {
  bool drifts = false;
  for (const char* name : kSelectors) {
    rag::Selection selection;
    selection.selector = name;
    if (std::exchange(drifts, false) || !host_->check(selection).ok()) continue;
    const auto traits = rag::selector_traits(name);
    KVBLEND_RETURN_IF_ERROR(traits.status);
    drifts = traits.value.drifts;
    SelectorQuality quality;
    quality.name = name;
    quality.timing = traits.value.timing;
    quality.needs_stored_scores = traits.value.needs_stored_scores;
    for (const double ratio : kRatios) series_.push_back({out_.quality.selectors.size(), ratio, {}, {}});
    out_.quality.selectors.push_back(std::move(quality));
  }
  return {};
}

Status Calibrator::find_prior(const rag::PromptFile& prompts) {
  rag::PriorSums sums(options_.tokens);
  const std::vector<std::string> no_answers;
  for (std::size_t i = 0; i < (std::min)(kPriorItems, prompts.items.size()); ++i) {
    progress_(0.02 + 0.02 * static_cast<double>(i), "position prior");
    const auto item = tokens(prompts, i);
    KVBLEND_RETURN_IF_ERROR(item.status);
    const auto trial = rag::Trial::open(*host_, tokenizer_, item.value, no_answers, 0);
    KVBLEND_RETURN_IF_ERROR(trial.status);
    KVBLEND_RETURN_IF_ERROR(trial.value->add_to(sums));
  }
  const auto prior = sums.prior();
  out_.quality.prior = prior.value;
  return prior.status;
}

Status Calibrator::find_cost(const rag::PromptFile& prompts) {
  progress_(0.06, "cost of a layer");
  const auto item = tokens(prompts, 0);
  KVBLEND_RETURN_IF_ERROR(item.status);
  const auto& part = *std::max_element(item.value.reusable.begin(), item.value.reusable.end(),
                                       [](const auto& a, const auto& b) { return a.size() < b.size(); });
  const auto chunk = host_->encode(part, {});
  KVBLEND_RETURN_IF_ERROR(chunk.status);
  KVBLEND_RETURN_IF_ERROR(find_tiers(chunk.value));
  CalibrationOptions options;
  options.max_context = (std::max)(static_cast<std::int32_t>(item.value.all.size()), 64);
  options.repeats = 3;
  const auto fit = kvblend::calibrate(
      [&](std::int32_t rows, std::int32_t context) { return host_->layer_time(chunk.value, rows, context); }, options);
  out_.quality.cost = fit.value.model;
  return fit.status;
}

// A chunk's layers copied in memory, and read from its file: of a file just written, which the system still holds.
Status Calibrator::find_tiers(const ChunkHandle& chunk) {
  std::vector<std::byte> layer(static_cast<std::size_t>(layer_bytes(chunk->identity())));
  const auto bytes = static_cast<double>(total_bytes(chunk->identity()));
  double start = now();
  for (std::int32_t l = 0; l < chunk->layers(); ++l) {
    const std::span<const std::byte> from = chunk->layer(l);
    std::copy(from.begin(), from.end(), layer.begin());
  }
  out_.tiers.push_back({"memory", bytes / (now() - start)});
  if (options_.file_tier.empty()) return {};
  auto tier = FileTier<>::open(options_.file_tier);
  KVBLEND_RETURN_IF_ERROR(tier.status);
  KVBLEND_RETURN_IF_ERROR(tier.value.insert(*chunk));
  auto reader = tier.value.find(chunk->identity());
  KVBLEND_RETURN_IF_ERROR(reader.status);
  start = now();
  for (std::int32_t l = 0; l < chunk->layers(); ++l) KVBLEND_RETURN_IF_ERROR(reader.value.read_layer(l, layer));
  out_.tiers.push_back({"file", bytes / (now() - start)});
  return {};
}

// Prompts as long as there is time for another: the longest that one took is left.
Status Calibrator::measure(const rag::PromptFile& prompts) {
  const std::size_t count = count_of(options_, prompts);
  double longest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const double before = seconds();
    if (i >= kLeastItems && before + longest > 60 * options_.minutes) break;
    const double by_items = static_cast<double>(i) / static_cast<double>(count);
    const double by_time = (std::min)(1.0, before / (60 * options_.minutes));
    progress_(0.1 + 0.9 * (i < kLeastItems ? by_items : (std::max)(by_items, by_time)),
              "prompt " + std::to_string(i + 1));
    KVBLEND_RETURN_IF_ERROR(measure_item(prompts, i));
    longest = (std::max)(longest, seconds() - before);
    ++measured_;
  }
  return {};
}

Status Calibrator::measure_item(const rag::PromptFile& prompts, std::size_t index) {
  const auto item = tokens(prompts, index);
  KVBLEND_RETURN_IF_ERROR(item.status);
  const std::vector<std::string> no_answers;  // KL is what is measured
  const auto trial = rag::Trial::open(*host_, tokenizer_, item.value, no_answers, options_.answer_tokens);
  KVBLEND_RETURN_IF_ERROR(trial.status);
  if (host_->reports_attention()) {
    const auto share = trial.value->attention_share();
    KVBLEND_RETURN_IF_ERROR(share.status);
    attention_shares_.push_back(share.value);
  }
  for (Series& series : series_) {
    rag::Selection selection;
    selection.selector = out_.quality.selectors[series.selector].name;
    selection.ratio = series.ratio;
    selection.prior = out_.quality.prior;
    const auto outcome = trial.value->blend(selection);
    KVBLEND_RETURN_IF_ERROR(outcome.status);
    series.kls.push_back(outcome.value.kl);
    series.moved.push_back(outcome.value.moved);
  }
  return {};
}

Status Calibrator::settle() {
  QualityCalibration& q = out_.quality;
  out_.prompts = std::to_string(measured_) + " prompts of at most " + std::to_string(options_.tokens) + " tokens";
  std::vector<SelectorTrial> trials(q.selectors.size());
  for (const Series& series : series_) {
    SelectorQuality& selector = q.selectors[series.selector];
    const auto point = kl_point(series.ratio, series.kls);
    KVBLEND_RETURN_IF_ERROR(point.status);
    selector.points.push_back(point.value);
    if (series.ratio == kTrialRatio) {
      trials[series.selector] = {series.kls, selector.timing, selector.needs_stored_scores};
    }
  }
  KVBLEND_RETURN_IF_ERROR(settle_defaults(q, kTrialRatio, trials, options_.most_ratio));
  const SelectorDefault& usual = q.of(Situation::kv_in_memory);
  for (const Series& series : series_) {
    if (static_cast<std::int32_t>(series.selector) != usual.selector || series.ratio != kTrialRatio) continue;
    std::vector<SignalTrial> signals;
    if (!attention_shares_.empty()) signals.push_back({kAttentionShare, attention_shares_});
    signals.push_back({kMoved, series.moved});
    return settle_signal(q, signals, series.kls, kShareRaised, kShareRecomputed);
  }
  return {};
}

}  // namespace calibrate
