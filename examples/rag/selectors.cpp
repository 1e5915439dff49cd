// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <rag/selectors.hpp>

#include <kvblend/select/chunk_rules.hpp>
#include <kvblend/select/combine.hpp>

#include <algorithm>
#include <cmath>
#include <iterator>

namespace rag {

using namespace kvblend;

namespace {

// Stored scores by the model's own prior, or by the power law until it was measured.
struct CalibratedScore : StoredScore<BinnedPrior> {
  CalibratedScore() = default;
  explicit CalibratedScore(const BinnedPrior& p) : StoredScore<BinnedPrior>(p) {}

  [[nodiscard]] Status validate() const { return prior.bins == 0 ? Status() : StoredScore<BinnedPrior>::validate(); }
  [[nodiscard]] Status operator()(const ScoreInputs& inputs, std::span<float> out) const {
    return prior.bins == 0 ? StoredScore<PowerLawPrior>{}(inputs, out)
                           : StoredScore<BinnedPrior>::operator()(inputs, out);
  }
};
using Saliency = StoredScore<NoPrior>;

template <Score S>
class Held final : public AnyScore {
 public:
  explicit Held(const S& score) : score_(score) {}
  [[nodiscard]] Status score(const ScoreInputs& inputs, std::span<float> out) const override {
    return score_(inputs, out);
  }
  [[nodiscard]] Status validate() const override { return kvblend::detail::validate_score(score_); }

 private:
  S score_;
};

struct Entry {
  SelectorTraits traits;
  std::unique_ptr<AnyScore> (*make)(const BinnedPrior&);
};

// `Make`: a function of a prior, without captures, that makes the score.
template <class Make>
constexpr Entry entry(const char* name, Make, bool stored = false) {
  using S = decltype(Make{}(BinnedPrior{}));
  const bool weighs = S::timing == ScoreTiming::after_probe && S::uses_values;
  return {{name, S::timing, weighs, stored, false}, [](const BinnedPrior& prior) -> std::unique_ptr<AnyScore> {
            return std::make_unique<Held<S>>(Make{}(prior));
          }};
}

Entry drifting(Entry entry) {
  entry.traits.drifts = true;
  return entry;
}

using Prior = const BinnedPrior&;
const Entry kEntries[] = {
    entry("random", [](Prior) { return RandomScore{}; }),
    entry("first_k", [](Prior) { return FirstK{}; }),
    entry("key_deviation", [](Prior) { return KeyDeviation{}; }),
    entry("value_deviation", [](Prior) { return ValueDeviation{}; }),
    entry("key_value_deviation", [](Prior) { return KeyValueDeviation{}; }),
    entry("attention_mass", [](Prior) { return AttentionMass{}; }),
    entry("attention_value_mass", [](Prior) { return AttentionValueMass{}; }),
    entry(
        "stored_score", [](Prior prior) { return CalibratedScore(prior); }, true),
    entry(
        "stored_score_power", [](Prior) { return StoredScore<PowerLawPrior>{}; }, true),
    entry(
        "saliency", [](Prior) { return Saliency{}; }, true),
    entry(
        "floor(stored_score)", [](Prior prior) { return ChunkFloor<CalibratedScore>(CalibratedScore(prior)); }, true),
    entry("floor(attention_value_mass)", [](Prior) { return ChunkFloor<AttentionValueMass>(AttentionValueMass{}); }),
    entry(
        "sinks_first(stored_score)", [](Prior prior) { return SinksFirst<CalibratedScore>(CalibratedScore(prior)); },
        true),
    entry("sinks_first(attention_value_mass)",
          [](Prior) { return SinksFirst<AttentionValueMass>(AttentionValueMass{}); }),
    entry(
        "union(stored_score,first_k)",
        [](Prior prior) { return UnionScore<CalibratedScore, FirstK>(CalibratedScore(prior), FirstK{}); }, true),
    entry(
        "union(attention_value_mass,stored_score)",
        [](Prior prior) {
          return UnionScore<AttentionValueMass, CalibratedScore>(AttentionValueMass{}, CalibratedScore(prior));
        },
        true),
    entry(
        "product(attention_value_mass,saliency)",
        [](Prior) { return ProductScore<AttentionValueMass, Saliency>(AttentionValueMass{}, Saliency{}); }, true),
    entry(
        "sum(attention_value_mass,stored_score)",
        [](Prior prior) {
          return SumScore<AttentionValueMass, CalibratedScore>(AttentionValueMass{}, CalibratedScore(prior));
        },
        true),
    entry(
        "product(key_value_deviation,stored_score)",
        [](Prior prior) {
          return ProductScore<KeyValueDeviation, CalibratedScore>(KeyValueDeviation{}, CalibratedScore(prior));
        },
        true),
    drifting(entry("drift(key_value_deviation)", [](Prior) { return KeyValueDeviation{}; })),
    drifting(entry("drift(attention_value_mass)", [](Prior) { return AttentionValueMass{}; })),
    drifting(entry(
        "drift(floor(stored_score))", [](Prior prior) { return ChunkFloor<CalibratedScore>(CalibratedScore(prior)); },
        true)),
};

const Entry* find(std::string_view name) {
  const auto found = std::find_if(std::begin(kEntries), std::end(kEntries),
                                  [&](const Entry& entry) { return name == entry.traits.name; });
  return found == std::end(kEntries) ? nullptr : found;
}

Status unknown(std::string_view name) {
  return Status::error(StatusCode::not_found, "there is none of the name %.*s", static_cast<int>(name.size()),
                       name.data())
      .at("selector");
}

double sum(std::span<const float> values) {
  double out = 0;
  for (const float value : values) out += static_cast<double>(value);
  return out;
}

double mean(std::span<const float> values) {
  return values.empty() ? 0 : sum(values) / static_cast<double>(values.size());
}

}  // namespace

std::vector<SelectorTraits> all_selectors() {
  std::vector<SelectorTraits> out;
  for (const Entry& entry : kEntries) out.push_back(entry.traits);
  return out;
}

Result<SelectorTraits> selector_traits(std::string_view name) {
  const Entry* entry = find(name);
  if (entry == nullptr) return unknown(name);
  return SelectorTraits(entry->traits);
}

Result<std::unique_ptr<AnyScore>> make_score(std::string_view name, const BinnedPrior& prior) {
  const Entry* entry = find(name);
  if (entry == nullptr) return unknown(name);
  return entry->make(prior);
}

void look(const ScoreInputs& inputs, std::span<const float> scores, ScoresSeen& seen) {
  seen.rows = static_cast<std::int32_t>(scores.size());
  double count = 0;
  for (const float score : scores) {  // one that is infinite is a rule's, and measures nothing
    if (!std::isfinite(score)) continue;
    seen.mean += static_cast<double>(score);
    count += 1;
  }
  seen.mean /= (std::max)(count, 1.0);
  for (const float score : scores) {
    const double off = std::isfinite(score) ? static_cast<double>(score) - seen.mean : 0;
    seen.sd += off * off;
  }
  seen.sd = std::sqrt(seen.sd / (std::max)(count, 1.0));
  seen.key_deviation = mean(inputs.key_deviation);
  seen.value_deviation = mean(inputs.value_deviation);
  seen.attention = sum(inputs.attention_mass);
}

}  // namespace rag
