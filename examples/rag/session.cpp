// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <rag/session.hpp>

#include <rag/closeness.hpp>
#include <rag/saliency.hpp>
#include <rag/selectors.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <limits>
#include <span>
#include <utility>

namespace rag {

using namespace kvblend;

namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Of KV in memory, the first that the host can run; of KV in files, the last.
constexpr std::array<const char*, 3> kOwnChoices = {"drift(attention_value_mass)", "attention_value_mass", "first_k"};

}  // namespace

std::vector<std::string> selector_names() {
  std::vector<std::string> names;
  for (const SelectorTraits& traits : all_selectors()) names.emplace_back(traits.name);
  return names;
}

Result<std::unique_ptr<Session>> Session::open(const Options& options, std::unique_ptr<Host> host) {
  auto tokenizer = eigen_engine::Tokenizer::load(options.model.c_str());
  if (!tokenizer.ok()) return tokenizer.status;
  std::unique_ptr<Session> session(new Session(options, std::move(host), std::move(tokenizer.value)));
  std::string& selector = session->options_.selector;
  session->own_choice_ = selector.empty();
  if (selector.empty()) selector = options.store == "memory" ? kOwnChoices.front() : kOwnChoices.back();
  const auto traits = selector_traits(selector);
  KVBLEND_RETURN_IF_ERROR(traits.status);
  bool scores = traits.value.needs_stored_scores;
  if (!options.calibration.empty()) {
    auto file = read_calibration(options.calibration);
    KVBLEND_RETURN_IF_ERROR(file.status);
    const QualityCalibration& quality = file.value.quality;
    for (const SelectorDefault& usual : quality.defaults) {
      if (usual.selector < 0) continue;
      const std::string& name = quality.selectors[static_cast<std::size_t>(usual.selector)].name;
      const auto its = selector_traits(name);
      KVBLEND_RETURN_IF_ERROR(its.status);
      scores = scores || its.value.needs_stored_scores;
    }
    session->calibration_ = std::move(file.value);
  }
  if (scores) {
    auto probes = saliency_probes(session->tokenizer_);
    KVBLEND_RETURN_IF_ERROR(probes.status);
    KVBLEND_RETURN_IF_ERROR(session->host_->store_scores(std::move(probes.value)));
  }
  if (options.store == "file") {
    auto tier = FileTier<>::open(options.store_directory);
    if (!tier.ok()) return tier.status;
    session->file_tier_ = std::move(tier.value);
  }
  return session;
}

Status Session::check_calibration() const {
  const QualityCalibration& quality = calibration_->quality;
  if (quality.fingerprint != host_->identity().fingerprint || calibration_->host != host_->name()) {
    return Status::error(StatusCode::mismatch, "is of %.80s on %.20s, not of this model on %s", quality.model.c_str(),
                         calibration_->host.c_str(), host_->name())
        .at("%.60s", options_.calibration.c_str());
  }
  for (const SelectorDefault& usual : quality.defaults) {
    if (usual.selector < 0) continue;
    const std::string& name = quality.selectors[static_cast<std::size_t>(usual.selector)].name;
    KVBLEND_RETURN_IF_ERROR(host_->check(selection(name, usual.r_min)));
  }
  const auto speed = std::find_if(calibration_->tiers.begin(), calibration_->tiers.end(),
                                  [&](const TierSpeed& tier) { return tier.name == options_.store; });
  if (options_.store == "memory" || speed != calibration_->tiers.end()) return {};
  return Status::error(StatusCode::not_found, "has no speed of a file store; kvblend-calibrate --file-tier measures it")
      .at("%.60s", options_.calibration.c_str());
}

Status Session::tokenize(const PromptFile& file, std::vector<TokenizedItem>& items) const {
  for (const Item& item : file.items) {
    auto tokenized = rag::tokenize(tokenizer_, file, item);
    KVBLEND_RETURN_IF_ERROR(tokenized.status);
    TokenizedItem& out = tokenized.value;
    const auto needed = static_cast<std::int64_t>(out.all.size()) + options_.answer_tokens;
    if (needed > host_->context()) {
      return Status::error(StatusCode::out_of_range, "needs %lld positions with its answer, the model has %d",
                           static_cast<long long>(needed), host_->context())
          .at("items[%zu]", items.size());
    }
    KVBLEND_RETURN_IF_ERROR(check_context(out, host_->context()));
    items.push_back(std::move(out));
  }
  return {};
}

// Prefills a part behind its context and keeps its KV.
Status Session::store(const TokenizedItem& item, std::size_t part) {
  auto chunk = host_->encode(item.reusable[part], item.context_of(part));
  KVBLEND_RETURN_IF_ERROR(chunk.status);
  return options_.store == "file" ? file_tier_.insert(*chunk.value) : memory_tier_.insert(std::move(chunk.value));
}

// What the planner must know of the engine and the store: from the file, or measured now.
Status Session::calibrate(const std::vector<TokenizedItem>& items) {
  if (calibration_) {
    cost_ = calibration_->quality.cost;
    for (const TierSpeed& tier : calibration_->tiers) {
      if (tier.name == options_.store) file_bandwidth_ = tier.bytes_per_s;
    }
    return {};
  }
  const auto shorter = [](const auto& a, const auto& b) { return a.size() < b.size(); };
  const auto& longest = *std::max_element(items.begin(), items.end(),
                                          [&](const auto& a, const auto& b) { return shorter(a.all, b.all); });
  const auto part = static_cast<std::size_t>(
      std::max_element(longest.reusable.begin(), longest.reusable.end(), shorter) - longest.reusable.begin());
  CalibrationOptions options;
  options.max_context = std::max(static_cast<std::int32_t>(longest.all.size()), 64);
  const Result<ChunkHandle> chunk = host_->encode(longest.reusable[part], longest.context_of(part));
  KVBLEND_RETURN_IF_ERROR(chunk.status);
  const auto layer_time = [&](std::int32_t rows, std::int32_t context) {
    return host_->layer_time(chunk.value, rows, context);
  };
  const Result<CostFit> fit = kvblend::calibrate(layer_time, options);
  KVBLEND_RETURN_IF_ERROR(fit.status);
  cost_ = fit.value.model;

  if (options_.store == "file") {
    auto reader = file_tier_.find(chunk.value->identity());
    KVBLEND_RETURN_IF_ERROR(reader.status);
    std::vector<std::byte> layer(static_cast<std::size_t>(layer_bytes(reader.value.identity())));
    const auto start = std::chrono::steady_clock::now();
    const std::int32_t layers = host_->identity().layers;
    for (std::int32_t i = 0; i < layers; ++i) KVBLEND_RETURN_IF_ERROR(reader.value.read_layer(i, layer));
    file_bandwidth_ = static_cast<double>(total_bytes(reader.value.identity())) / seconds_since(start);
  }
  return {};
}

Status Session::run(PromptFile file, Report& report) {
  if (calibration_) file.context = calibration_->context;
  std::vector<TokenizedItem> items;
  KVBLEND_RETURN_IF_ERROR(tokenize(file, items));
  report.model = host_->identity().name;
  report.context = describe(file.context);
  report.host = host_->name();
  report.threads = options_.threads;
  int parts = 0;
  std::int32_t rows = 64;
  for (const TokenizedItem& item : items) {
    rows = std::max({rows, static_cast<std::int32_t>(item.all.size()) + options_.answer_tokens, item.rows_to_encode()});
    report.tokens = std::max(report.tokens, static_cast<std::int32_t>(item.all.size()));
    parts += static_cast<int>(item.reusable.size()) - (parts == 0 ? 0 : 1);
  }
  KVBLEND_RETURN_IF_ERROR(host_->reserve(rows));
  if (calibration_) KVBLEND_RETURN_IF_ERROR(check_calibration());
  if (!options_.ratio && !calibration_ && !host_->can_plan()) options_.ratio = PlannerOptions().r_min;
  if (!calibration_) {
    for (const char* name : kOwnChoices) {
      if (own_choice_ && !host_->check(selection(options_.selector, 1)).ok()) options_.selector = name;
    }
    KVBLEND_RETURN_IF_ERROR(host_->check(selection(options_.selector, options_.ratio.value_or(1))));
  }

  Progress progress(parts + (options_.ratio ? 0 : 1) + static_cast<int>(items.size()) * (4 * options_.repeats + 4));
  for (std::size_t i = 0; i < items.size(); ++i) {
    // The instructions are every item's.
    for (std::size_t part = i == 0 ? 0 : 1; part < items[i].reusable.size(); ++part) {
      progress.step("item " + std::to_string(i + 1) + ": storing part " + std::to_string(part + 1));
      KVBLEND_RETURN_IF_ERROR(store(items[i], part));
    }
  }
  if (!options_.ratio) {
    progress.step("measuring the engine for the planner");
    KVBLEND_RETURN_IF_ERROR(calibrate(items));
  }
  for (std::size_t i = 0; i < items.size(); ++i) {
    const std::size_t first = report.runs.size();
    KVBLEND_RETURN_IF_ERROR(run_item(items[i], progress, "item " + std::to_string(i + 1), report));
    for (std::size_t r = first; r < report.runs.size(); ++r) report.runs[r].item = static_cast<std::int32_t>(i + 1);
  }
  report.note = host_->note();
  return {};
}

Status Session::run_item(const TokenizedItem& item, Progress& progress, const std::string& label, Report& report) {
  const std::array<const char*, 4> modes = {"full", "prefix", "reuse", "blend"};
  std::array<std::vector<Run>, 4> runs;
  std::vector<float> first;  // logits of the prompt's last row
  // The modes take turns, so that a busy moment of the machine does not fall on one of them alone.
  for (std::int32_t repeat = 0; repeat < options_.repeats; ++repeat) {
    for (std::size_t m = 0; m < modes.size(); ++m) {
      progress.step(label + ": " + modes[m] + ", run " + std::to_string(repeat + 1));
      Run run;
      run.mode = modes[m];
      run.tokens = static_cast<std::int32_t>(item.all.size());
      KVBLEND_RETURN_IF_ERROR(run_mode(item, run, first));
      runs[m].push_back(run);
    }
  }
  Reference reference;
  for (std::size_t m = 0; m < modes.size(); ++m) {
    progress.step(label + ": answer by " + modes[m]);
    const auto middle = runs[m].begin() + static_cast<std::ptrdiff_t>(runs[m].size() / 2);
    std::nth_element(runs[m].begin(), middle, runs[m].end(),
                     [](const Run& a, const Run& b) { return a.ttft_s < b.ttft_s; });
    Run run = *middle;
    Run again = run;  // fills the cache as this mode does; its times are not counted
    KVBLEND_RETURN_IF_ERROR(run_mode(item, again, first));
    Reference own;
    KVBLEND_RETURN_IF_ERROR(answer_freely(first, own));
    if (m == 0) reference = own;
    auto text = tokenizer_.detokenize(own.answer);
    KVBLEND_RETURN_IF_ERROR(text.status);
    run.answer = text.value;
    KVBLEND_RETURN_IF_ERROR(host_->truncate(run.tokens));
    KVBLEND_RETURN_IF_ERROR(judge(reference, first, run));
    report.runs.push_back(run);
  }
  return {};
}

Status Session::run_mode(const TokenizedItem& item, Run& run, std::vector<float>& logits) {
  logits.resize(static_cast<std::size_t>(host_->vocabulary()));
  host_->clear();
  run.load_s = run.shift_s = run.score_s = run.select_s = run.merge_s = run.recompute_s = 0;
  run.selector = "none";
  const auto start = std::chrono::steady_clock::now();
  if (run.mode == "full") {
    KVBLEND_RETURN_IF_ERROR(full_recompute(item, run, logits));
  } else if (run.mode == "prefix") {
    KVBLEND_RETURN_IF_ERROR(prefix(item, 1, run, logits));
  } else if (run.mode == "reuse") {
    KVBLEND_RETURN_IF_ERROR(reuse(item, item.reusable.size(), 0.0, run, logits));
  } else if (options_.ratio) {
    KVBLEND_RETURN_IF_ERROR(reuse(item, item.reusable.size(), *options_.ratio, run, logits));
  } else {
    KVBLEND_RETURN_IF_ERROR(planned(item, run, logits));
  }
  run.ttft_s = seconds_since(start);
  return {};
}

Status Session::full_recompute(const TokenizedItem& item, Run& run, std::vector<float>& logits) {
  const auto start = std::chrono::steady_clock::now();
  run.ratio = 1;
  run.rows_recomputed = static_cast<std::int32_t>(item.all.size() - item.question.size());
  KVBLEND_RETURN_IF_ERROR(host_->prefill(item.all, Wanted::last));
  KVBLEND_RETURN_IF_ERROR(host_->logits(logits));
  run.recompute_s = seconds_since(start);
  return {};
}

// Reuses the first `exact` parts; the others are recomputed as if they were new.
Status Session::prefix(const TokenizedItem& item, std::size_t exact, Run& run, std::vector<float>& logits) {
  KVBLEND_RETURN_IF_ERROR(reuse(item, exact, 0.0, run, logits));
  run.ratio = 1;
  run.rows_recomputed = 0;
  for (std::size_t part = exact; part < item.reusable.size(); ++part) {
    run.rows_recomputed += static_cast<std::int32_t>(item.reusable[part].size());
  }
  return {};
}

Status Session::look_up(const TokenizedItem& item, std::size_t cached, Request& request) {
  const std::size_t parts = item.reusable.size();
  // Segments and sources point into these.
  request.infos.reserve(parts);
  request.readers.reserve(parts);
  for (std::size_t i = 0; i < parts; ++i) {
    if (i >= cached) {
      request.segments.push_back(fresh_segment(item.reusable[i]));
      request.sources.emplace_back();
      continue;
    }
    const ChunkIdentity identity = host_->chunk_identity(item.reusable[i], item.context_of(i));
    if (options_.store == "file") {
      auto reader = file_tier_.find(identity);
      if (!reader.ok()) return reader.status;
      request.readers.push_back(std::move(reader.value));
      request.infos.push_back(request.readers.back().info());
      request.sources.emplace_back(ChunkReaderRef(request.readers.back()));
    } else {
      ChunkHandle chunk = memory_tier_.find(identity);
      if (chunk == nullptr) {
        return Status::error(StatusCode::not_found, "is not in the memory tier any more").at("part %zu", i);
      }
      request.infos.push_back(chunk->info());
      request.sources.emplace_back(std::move(chunk));
    }
    request.segments.push_back(cached_segment(request.infos.back()));
  }
  request.segments.push_back(fresh_segment(item.question));
  request.sources.emplace_back();
  auto prompt = Prompt::make(request.segments, Position(host_->context() - 1));
  request.prompt = prompt.value;
  return prompt.status;
}

Status Session::blend_with(const Selection& selection, Request& request, Run& run, std::vector<float>& logits) {
  run.ratio = selection.ratio;
  if (selection.ratio > 0) run.selector = selection.selector;
  return host_->blend(request.prompt, request.sources, selection, run, logits);
}

Status Session::reuse(const TokenizedItem& item, std::size_t cached, double ratio, Run& run,
                      std::vector<float>& logits) {
  Request request;
  KVBLEND_RETURN_IF_ERROR(look_up(item, cached, request));
  return blend_with(selection(options_.selector, ratio), request, run, logits);
}

// Asks the planner, and does what it says.
Status Session::planned(const TokenizedItem& item, Run& run, std::vector<float>& logits) {
  Request request;
  KVBLEND_RETURN_IF_ERROR(look_up(item, item.reusable.size(), request));
  const std::array<Tier, 1> tiers = {options_.store == "file"
                                         ? Tier("file", file_bandwidth_)
                                         : Tier("memory", std::numeric_limits<double>::infinity(), 0, true)};
  std::vector<TierMask> held_in;
  for (const Segment& segment : request.segments) held_in.push_back(segment.kind == SegmentKind::cached ? 1 : 0);
  std::vector<SegmentPlan> segment_plans(request.segments.size());
  const ModelIdentity& identity = host_->identity();
  std::vector<LayerPlan> layer_plans(static_cast<std::size_t>(identity.layers));
  std::string selector = options_.selector;
  PlannerOptions planner_options;
  planner_options.timing = selector_traits(selector).value.timing;
  if (calibration_) {
    const auto situation = situation_of(request.prompt, tiers, held_in);
    KVBLEND_RETURN_IF_ERROR(situation.status);
    const QualityCalibration& quality = calibration_->quality;
    planner_options = quality.planner_options(situation.value);
    const std::int32_t usual = quality.of(situation.value).selector;
    if (usual >= 0) selector = quality.selectors[static_cast<std::size_t>(usual)].name;
  }
  planner_options.staging_layers = kStagingLayers;
  const RecomputePlanner<LinearCostModel> planner(cost_, planner_options);
  const UniformBytes bytes(std::int64_t{2} * identity.kv_heads * head_bytes(identity));
  const Result<Plan> plan = planner.plan({request.prompt, tiers, held_in}, bytes, {segment_plans, layer_plans});
  KVBLEND_RETURN_IF_ERROR(plan.status);
  if (options_.print_plan) {
    std::array<char, 8192> text;
    print(plan.value, text);
    std::fprintf(stderr, "\n%s", text.data());
    options_.print_plan = false;
  }
  switch (plan.value.mode) {
    case PlanMode::nothing:
    case PlanMode::full_recompute: return full_recompute(item, run, logits);
    case PlanMode::prefix: {
      const auto& segments = request.segments;
      const auto exact = std::find_if(segments.begin(), segments.end(), [](const Segment& s) { return !s.exact; });
      return prefix(item, static_cast<std::size_t>(exact - segments.begin()), run, logits);
    }
    case PlanMode::reuse:
    case PlanMode::blend: break;
  }
  return blend_with(selection(selector, plan.value.ratio), request, run, logits);
}

// Greedy, from the logits of the prompt's last row on; ends with the model's end token.
Status Session::answer_freely(const std::vector<float>& first, Reference& out) {
  std::vector<float> logits = first;
  for (std::int32_t i = 0; i < options_.answer_tokens; ++i) {
    out.logits.push_back(logits);
    out.answer.push_back(most_likely(logits));
    if (tokenizer_.is_end(out.answer.back())) break;
    if (i + 1 == options_.answer_tokens) break;
    KVBLEND_RETURN_IF_ERROR(host_->decode(out.answer.back()));
    KVBLEND_RETURN_IF_ERROR(host_->logits(logits));
  }
  return {};
}

// Feeds the reference answer to the cache as it is and compares the predictions at each of its tokens.
Status Session::judge(const Reference& reference, const std::vector<float>& first, Run& run) {
  const auto vocabulary = static_cast<std::size_t>(host_->vocabulary());
  const std::size_t count = reference.answer.size();
  std::vector<float> rest((count - 1) * vocabulary);
  if (count > 1) {
    KVBLEND_RETURN_IF_ERROR(host_->prefill(std::span(reference.answer).first(count - 1), Wanted::all));
    KVBLEND_RETURN_IF_ERROR(host_->logits(rest));
  }
  for (std::size_t i = 0; i < count; ++i) {
    std::vector<float> got = first;
    if (i > 0) std::copy_n(rest.begin() + static_cast<std::ptrdiff_t>((i - 1) * vocabulary), vocabulary, got.begin());
    run.kl_vs_full += divergence(reference.logits[i], got);
    run.top1_agreement += most_likely(reference.logits[i]) == most_likely(got) ? 1 : 0;
  }
  run.kl_vs_full /= static_cast<double>(count);
  run.top1_agreement /= static_cast<double>(count);
  return {};
}

}  // namespace rag
