// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <rag/saliency.hpp>

#include <kvblend/kvblend.hpp>
#include <kvblend/select/norm.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

namespace rag {

using namespace kvblend;
using eigen_engine::Engine;

Result<std::vector<std::vector<TokenId>>> saliency_probes(const eigen_engine::Tokenizer& tokenizer) {
  const std::array<const char*, 3> questions = {
      "Question: Who was the first to climb the highest mountain of the country?\nAnswer:",
      "Question: In which year did the company open its second factory?\nAnswer:",
      "Question: What is the name of the city where the river meets the sea?\nAnswer:"};
  std::vector<std::vector<TokenId>> out;
  for (const char* question : questions) {
    auto tokens = tokenizer.tokenize(question, false, false);
    KVBLEND_RETURN_IF_ERROR(tokens.status);
    out.push_back(std::move(tokens.value));
  }
  return out;
}

namespace {

Status run_layers(Engine& engine, std::span<const Row> rows, std::span<const ActiveIndex> all, std::int32_t cached,
                  ProbeSums& out) {
  std::vector<float> mass(static_cast<std::size_t>(cached) + rows.size());
  KVBLEND_RETURN_IF_ERROR(engine.embed(rows));
  for (std::int32_t layer = 0; layer < engine.layers(); ++layer) {
    KVBLEND_RETURN_IF_ERROR(engine.project(layer, rows));
    copy_rows(engine.fresh_keys(), 0, engine.keys(layer), cached, static_cast<std::int64_t>(rows.size()));
    copy_rows(engine.fresh_values(), 0, engine.values(layer), cached, static_cast<std::int64_t>(rows.size()));
    std::fill(mass.begin(), mass.end(), 0.0f);
    KVBLEND_RETURN_IF_ERROR(engine.attend_and_report(layer, rows, all, 0, mass));
    for (std::int32_t row = 0; row < cached; ++row) {
      const auto r = static_cast<std::size_t>(row);
      out.mass[r] += mass[r];
      if (layer > 0) out.value_mass[r] += mass[r] * row_norm(engine.values(layer), row);
    }
  }
  return {};
}

}  // namespace

Status run_probe(Engine& engine, std::span<const TokenId> tokens, ProbeSums& out) {
  const std::int32_t cached = engine.rows();
  const std::vector<TokenId> before(engine.tokens().begin(), engine.tokens().end());
  std::array<Segment, 2> segments = {resident_segment(before), fresh_segment(tokens)};
  const Result<Prompt> prompt = Prompt::make(segments, Position(engine.config().context - 1));
  KVBLEND_RETURN_IF_ERROR(prompt.status);
  out.mass.assign(before.size(), 0.0f);
  out.value_mass.assign(before.size(), 0.0f);
  std::vector<Row> rows;
  std::vector<ActiveIndex> all;
  for (std::int32_t i = 0; i < static_cast<std::int32_t>(tokens.size()); ++i) {
    rows.emplace_back(cached + i);
    all.emplace_back(i);
  }
  KVBLEND_RETURN_IF_ERROR(engine.begin(prompt.value));
  const Status status = run_layers(engine, rows, all, cached, out);
  engine.abort();
  return status;
}

Status saliency(Engine& engine, std::span<const std::vector<TokenId>> probes, std::size_t context,
                std::span<float> out) {
  const Probing probing = [&](std::span<const TokenId> tokens, ProbeSums& sums) {
    return run_probe(engine, tokens, sums);
  };
  return saliency(probing, engine.layers(), engine.config().heads, probes, context, out);
}

Status saliency(const Probing& probing, std::int32_t layers, std::int32_t heads,
                std::span<const std::vector<TokenId>> probes, std::size_t context, std::span<float> out) {
  std::fill(out.begin(), out.end(), 0.0f);
  ProbeSums sums;
  for (const std::vector<TokenId>& probe : probes) {
    KVBLEND_RETURN_IF_ERROR(probing(probe, sums));
    if (sums.value_mass.size() != context + out.size()) {
      return Status::error(StatusCode::mismatch, "%zu behind %zu for %zu rows", out.size(), context,
                           sums.value_mass.size())
          .at("scores");
    }
    const double terms =
        static_cast<double>(probes.size()) * static_cast<double>(probe.size()) * heads * (std::max)(layers - 1, 1);
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] += static_cast<float>(static_cast<double>(sums.value_mass[context + i]) / terms);
    }
  }
  return {};
}

PriorSums::PriorSums(std::int32_t longest)
    : step_(std::log((std::max)(longest, 16) / 8.0) / (kBins - 1)), bins_(static_cast<std::size_t>(kBins)) {}

void PriorSums::add(std::int32_t distance, double in_place, double stored) {
  const double d = (std::max)(distance, 1);
  const auto bin = static_cast<std::int32_t>(d < first_ ? 0.0 : 1.0 + std::log(d / first_) / step_);
  Bin& into = bins_[static_cast<std::size_t>(std::clamp(bin, 0, kBins - 1))];
  into.log_distance += std::log(d);
  into.in_place += in_place;
  into.stored += stored;
  into.rows += 1;
}

Result<BinnedPrior> PriorSums::prior() const {
  std::vector<double> distances;
  std::vector<double> values;
  for (const Bin& bin : bins_) {
    if (!(bin.in_place > 0 && bin.stored > 0)) continue;
    distances.push_back(std::exp(bin.log_distance / bin.rows));
    values.push_back(bin.in_place / bin.stored);
  }
  if (values.size() < 2) return Status::error(StatusCode::invalid_argument, "too few distances").at("prior");
  return BinnedPrior::make(distances, values);
}

}  // namespace rag
