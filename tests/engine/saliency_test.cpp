// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Stored scores and probes of examples/rag against the oracle's attention, and the position prior made of them.
#include <rag/saliency.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include "engine/engine_fixture.hpp"
#include "engine/naive_model.hpp"

using namespace engine_fixture;
using namespace kvblend;
using eigen_engine::Engine;
using eigen_engine::Model;
using eigen_engine::ThreadPool;
using eigen_engine::Wanted;

namespace {

double value_norm(Engine& engine, std::int32_t layer, std::int64_t row) {
  double sum = 0;
  const auto plane = engine.values(layer);
  for (std::int32_t head = 0; head < plane.layout.heads(); ++head) {
    const auto* values = reinterpret_cast<const float*>(plane.at(row, head));
    for (std::int32_t i = 0; i < plane.layout.head_dim(); ++i) sum += std::pow(static_cast<double>(values[i]), 2);
  }
  return std::sqrt(sum);
}

}  // namespace

TEST_CASE("a chunk's scores are the probes' mean attention times the norm of its values") {
  const auto config = small_config();
  const auto tensors = eigen_engine::random_tensors(config, RopePairing::neox, 7);
  auto made = Model::make(config, eigen_engine::random_tensors(config, RopePairing::neox, 7));
  require_ok(made.status);
  const Model model = std::move(made.value);
  const auto chunk = random_tokens(41, config.vocabulary, 3);
  const std::vector<std::vector<TokenId>> probes = {random_tokens(5, config.vocabulary, 4),
                                                    random_tokens(9, config.vocabulary, 5)};
  ThreadPool pool(2);
  Engine engine(model, 64, pool);
  require_ok(engine.prefill(chunk, Wanted::none));

  std::vector<double> expected(chunk.size(), 0.0);
  for (const auto& probe : probes) {
    std::vector<int> tokens = chunk;
    tokens.insert(tokens.end(), probe.begin(), probe.end());
    std::vector<int> positions(tokens.size());
    for (std::size_t i = 0; i < tokens.size(); ++i) positions[i] = static_cast<int>(i);
    const naive::Output truth = naive::forward(config, tensors, tokens, positions);
    for (std::int32_t layer = 1; layer < config.layers; ++layer) {
      for (std::size_t query = chunk.size(); query < tokens.size(); ++query) {
        for (std::size_t key = 0; key < chunk.size(); ++key) {
          const double paid = truth.mass[static_cast<std::size_t>(layer)][query][key];
          expected[key] += paid * value_norm(engine, layer, static_cast<std::int64_t>(key)) /
                           (2.0 * static_cast<double>(probe.size()) * config.heads * (config.layers - 1));
        }
      }
    }
  }

  const auto before = cached(engine, 2);
  std::vector<float> scores(chunk.size());
  require_ok(rag::saliency(engine, probes, 0, scores));
  for (std::size_t i = 0; i < scores.size(); ++i) CHECK(scores[i] == doctest::Approx(expected[i]).epsilon(1e-4));
  CHECK(*std::min_element(scores.begin(), scores.end()) > 0);

  SUBCASE("the cache is as it was") {
    CHECK(engine.rows() == 41);
    CHECK(cached(engine, 2) == before);
    CHECK(std::equal(chunk.begin(), chunk.end(), engine.tokens().begin(), engine.tokens().end()));
  }
  SUBCASE("a chunk behind a context is the last rows") {
    std::vector<float> last(scores.size() - 3);
    require_ok(rag::saliency(engine, probes, 3, last));
    CHECK(std::equal(last.begin(), last.end(), scores.begin() + 3));
  }
  SUBCASE("scores for other rows are refused") {
    CHECK(rag::saliency(engine, probes, 1, scores).code() == StatusCode::mismatch);
    scores.pop_back();
    CHECK(rag::saliency(engine, probes, 0, scores).code() == StatusCode::mismatch);
  }
  SUBCASE("a probe that does not fit is refused and leaves the cache") {
    rag::ProbeSums sums;
    CHECK_FALSE(rag::run_probe(engine, random_tokens(24, config.vocabulary, 6), sums).ok());
    CHECK(cached(engine, 2) == before);
  }
}

TEST_CASE("a prior is what attention in place is in units of the stored scores") {
  rag::PriorSums sums(1000);
  // Attention that falls as 1/d for tokens whose stored scores differ by a factor of 5.
  for (std::int32_t d = 1; d <= 1000; ++d) {
    const double stored = d % 2 == 0 ? 1.0 : 5.0;
    sums.add(d, stored * 40.0 / d, stored);
  }
  const auto prior = sums.prior();
  require_ok(prior.status);
  CHECK(prior.value.bins == rag::PriorSums::kBins);
  for (const std::int32_t d : {12, 50, 200, 700}) {
    CHECK(prior.value(d) * d / 40.0 == doctest::Approx(1.0).epsilon(0.1));
  }
  rag::PriorSums empty(1000);
  empty.add(10, 1, 1);
  CHECK_FALSE(empty.prior().ok());
}
