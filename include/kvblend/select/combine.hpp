// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Scores made of two: their sum, their product, and the union of what each would choose. They nest, and are known when
// the later of their parts is.
#pragma once

#include <kvblend/core/config.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/select/score.hpp>
#include <kvblend/select/scores.hpp>
#include <kvblend/select/top_k.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

namespace detail {

// A string as a template's argument.
template <std::size_t size>
struct Word {
  char text[size]{};
  constexpr Word(const char (&from)[size]) {  // NOLINT(google-explicit-constructor): written as a string
    for (std::size_t i = 0; i < size; ++i) text[i] = from[i];
  }
};

// "word(a,b)" at compile time; without b "word(a)".
template <Word word, class A, class B = void>
struct JoinedName {
  static constexpr std::size_t length(const char* text) {
    std::size_t n = 0;
    while (text[n] != '\0') ++n;
    return n;
  }
  static constexpr const char* second() {
    if constexpr (std::same_as<B, void>) {
      return "";
    } else {
      return B::name;
    }
  }
  static constexpr auto join() {
    constexpr const char* parts[] = {word.text, "(", A::name, second()[0] == '\0' ? "" : ",", second(), ")"};
    std::array<char, length(word.text) + length(A::name) + length(second()) + 4> text{};
    std::size_t at = 0;
    for (const char* part : parts) {
      for (; *part != '\0'; ++part) text[at++] = *part;
    }
    return text;
  }
  static constexpr auto joined = join();
};

inline Status check_scratch(const ScoreInputs& inputs) {
  const std::size_t room = (std::min)(inputs.scratch.keys.size(), inputs.scratch.places.size());
  if (room >= inputs.rows.size()) return {};
  return Status::error(StatusCode::insufficient_space, "%zu entries for %zu rows", room, inputs.rows.size())
      .at("score scratch");
}

// Sorts `keys`: the low halves are the scores' indices plus `first`, the best first.
inline void sort_by_score(std::span<const float> scores, std::size_t first, std::span<std::uint64_t> keys) {
  for (std::size_t i = 0; i < scores.size(); ++i) keys[i] = std::uint64_t{score_rank(scores[i])} << 32 | (first + i);
  std::sort(keys.begin(), keys.end());
}
[[nodiscard]] inline std::size_t index_of_key(std::uint64_t key) { return static_cast<std::size_t>(key & 0xffffffffu); }

// Divides by the magnitude of the mean, so that no score's scale decides; a mean of 0 leaves them as they are.
[[nodiscard]] KVBLEND_HOST_DEVICE inline float over_mean(float score, double mean) {
  const double size = mean < 0 ? -mean : mean;
  return size > 0 ? static_cast<float>(static_cast<double>(score) / size) : score;
}
inline void divide_by_mean(std::span<float> scores) {
  const double mean = finite_mean(scores);
  for (float& score : scores) score = over_mean(score, mean);
}

// What two scores together are.
template <class A, class B>
struct PairOfScores {
  static_assert(A::timing == B::timing || A::timing == ScoreTiming::before_load ||
                    B::timing == ScoreTiming::before_load,
                "kvblend: a deviation wants every row to run and a probe only the question's: no pass gives both");
  static_assert(A::timing != B::timing || A::timing != ScoreTiming::after_probe || A::uses_values == B::uses_values,
                "kvblend: one probe pass reports attention either plain or weighed by values");
  static constexpr ScoreTiming timing = (std::max)(A::timing, B::timing);
  static constexpr bool uses_keys = A::uses_keys || B::uses_keys;
  static constexpr bool uses_values = A::uses_values || B::uses_values;

  A first{};
  B second{};

  PairOfScores() = default;
  PairOfScores(const A& a, const B& b) : first(a), second(b) {}

  [[nodiscard]] Status validate() const {
    KVBLEND_RETURN_IF_ERROR(validate_score(first));
    return validate_score(second);
  }
  [[nodiscard]] bool covers(const Prompt& prompt) const {
    return score_covers(first, prompt) && score_covers(second, prompt);
  }
};

// Both scores, one after the other: out[i] = combine(a, b). What the first gave waits in the low half of
// ScoreScratch::keys, above what a sum around this one keeps there.
template <class A, class B>
struct Arithmetic : PairOfScores<A, B> {
  using PairOfScores<A, B>::PairOfScores;
  static_assert(held_by<B>() <= 1, "kvblend: nest sums and products in their first part, and unions outside of them");
  static constexpr std::int32_t held = (std::max)(held_by<A>(), 1 + held_by<B>());

 protected:
  template <class Prepare, class Combine>
  Status apply(const ScoreInputs& inputs, std::span<float> out, Prepare prepare, Combine combine) const {
    KVBLEND_RETURN_IF_ERROR(check_scratch(inputs));
    const std::span<std::uint64_t> stack = inputs.scratch.keys;
    KVBLEND_RETURN_IF_ERROR(run_score(this->first, inputs, out));
    prepare(out);
    for (std::size_t i = 0; i < out.size(); ++i) stack[i] = stack[i] << 32 | std::bit_cast<std::uint32_t>(out[i]);
    KVBLEND_RETURN_IF_ERROR(run_score(this->second, inputs, out));
    prepare(out);
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = combine(std::bit_cast<float>(static_cast<std::uint32_t>(stack[i])), out[i]);
      stack[i] >>= 32;
    }
    return {};
  }
};

}  // namespace detail

// a/|mean a| + b/|mean b|, means over the candidates.
template <Score A, Score B>
struct SumScore : detail::Arithmetic<A, B> {
  using detail::Arithmetic<A, B>::Arithmetic;
  static constexpr const char* name = detail::JoinedName<"sum", A, B>::joined.data();

  [[nodiscard]] Status operator()(const ScoreInputs& inputs, std::span<float> out) const {
    return this->apply(
        inputs, out, [](std::span<float> scores) { detail::divide_by_mean(scores); },
        [](float a, float b) { return a + b; });
  }
};

// a·b, of scores that are not negative: first-k's are, and have no product that means anything.
template <Score A, Score B>
struct ProductScore : detail::Arithmetic<A, B> {
  using detail::Arithmetic<A, B>::Arithmetic;
  static constexpr const char* name = detail::JoinedName<"product", A, B>::joined.data();

  [[nodiscard]] Status operator()(const ScoreInputs& inputs, std::span<float> out) const {
    // In mean units too: products of small attention and small saliency would end at 0 in float.
    return this->apply(
        inputs, out, [](std::span<float> scores) { detail::divide_by_mean(scores); },
        [](float a, float b) { return a * b; });
  }
};

// The best of either: of k rows half are the best of one score and half of the other, and those that both want leave
// room for the next of each. It writes minus the better of a row's two places, so that it holds for every k. Of two
// rows that stand alike the lower comes first.
template <Score A, Score B>
struct UnionScore : detail::PairOfScores<A, B> {
  using detail::PairOfScores<A, B>::PairOfScores;
  static constexpr const char* name = detail::JoinedName<"union", A, B>::joined.data();
  static constexpr std::int32_t held = kAllScratch;
  static constexpr bool writes_places = true;
  static_assert(detail::held_by<B>() < kAllScratch, "kvblend: nest unions in their first part");

  [[nodiscard]] Status operator()(const ScoreInputs& inputs, std::span<float> out) const {
    KVBLEND_RETURN_IF_ERROR(detail::check_scratch(inputs));
    const std::span<std::uint64_t> keys = inputs.scratch.keys.first(out.size());
    const std::span<ActiveIndex> places = inputs.scratch.places;
    KVBLEND_RETURN_IF_ERROR(detail::run_score(this->first, inputs, out));
    detail::sort_by_score(out, 0, keys);
    for (std::size_t place = 0; place < keys.size(); ++place) {
      places[detail::index_of_key(keys[place])] = ActiveIndex(static_cast<std::int32_t>(place));
    }
    KVBLEND_RETURN_IF_ERROR(detail::run_score(this->second, inputs, out));
    detail::sort_by_score(out, 0, keys);
    for (std::size_t place = 0; place < keys.size(); ++place) {
      const std::size_t i = detail::index_of_key(keys[place]);
      out[i] = -static_cast<float>((std::min)(places[i].value, static_cast<std::int32_t>(place)));
    }
    return {};
  }
};

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
