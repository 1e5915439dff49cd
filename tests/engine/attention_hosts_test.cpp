// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Both hosts of examples/rag on one real model: where attention goes, scores that are stored with chunks, and blends
// that choose by either.
#include <doctest/doctest.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <filesystem>
#include <memory>
#include <string>

#include "engine/host_fixture.hpp"

using namespace engine_fixture;
using namespace kvblend;

namespace {

constexpr std::int32_t kChunk = 50;

}  // namespace

TEST_CASE("attention and stored scores of two engines agree on SmolLM2") {
  if (!std::filesystem::exists(KVBLEND_TEST_MODEL)) {
    MESSAGE("skipped: no model at " << KVBLEND_TEST_MODEL);
    return;
  }
  const auto eigen = opened(rag::EigenHost::open(KVBLEND_TEST_MODEL, 1));
  const auto chunk = random_tokens(kChunk, 40000, 1);
  const auto question = random_tokens(12, 40000, 2);
  const std::vector<std::vector<TokenId>> probes = {random_tokens(6, 40000, 3), random_tokens(9, 40000, 4)};
  require_ok(eigen->store_scores(probes));
  require_ok(eigen->reserve(80));
  rag::ProbeSums expected;
  require_ok(eigen->prefill(chunk, rag::Wanted::none));
  require_ok(eigen->probe(question, expected));
  const auto scored = eigen->encode(chunk, {});
  require_ok(scored.status);
  const std::vector<float> scores(scored.value->scores().begin(), scored.value->scores().end());

  for (const bool flash : {true, false}) {
    CAPTURE(flash);
    const auto host = opened(rag::LlamaHost::open(KVBLEND_TEST_MODEL, llama(flash)));
    CHECK(host->reports_attention());
    CHECK(host->recipe().empty());
    require_ok(host->store_scores(probes));
    CHECK(host->recipe() == eigen->recipe());
    require_ok(host->reserve(80));
    CHECK(host->reports_attention());
    rag::ProbeSums sums;
    require_ok(host->prefill(chunk, rag::Wanted::none));
    require_ok(host->probe(question, sums));
    // llama.cpp quantises what it multiplies quantised weights with.
    MESSAGE("relative L2 of attention " << relative_error(sums.mass, expected.mass) << ", times norms "
                                        << relative_error(sums.value_mass, expected.value_mass));
    CHECK(relative_error(sums.mass, expected.mass) < 0.02);
    CHECK(relative_error(sums.value_mass, expected.value_mass) < 0.02);

    if (flash) continue;

    const auto encoded = host->encode(chunk, {});
    require_ok(encoded.status);
    const std::vector<float> own(encoded.value->scores().begin(), encoded.value->scores().end());
    CHECK(relative_error(own, scores) < 0.02);

    // They come back from a file with the chunk.
    const std::filesystem::path folder =
        std::filesystem::temp_directory_path() / ("kvblend_scores_" + std::to_string(::getpid()));
    {
      const auto tier = FileTier<>::open(folder.string());
      require_ok(tier.status);
      require_ok(tier.value.insert(*encoded.value));
      const auto reader = tier.value.find(host->chunk_identity(chunk, {}));
      require_ok(reader.status);
      const ChunkInfo info = reader.value.info();
      CHECK(std::vector<float>(info.scores.begin(), info.scores.end()) == own);
    }
    std::filesystem::remove_all(folder);

    // Blends that choose by either.
    const std::array<ChunkInfo, 1> infos = {encoded.value->info()};
    const auto start = random_tokens(5, 40000, 5);
    std::vector<Segment> segments = {fresh_segment(start), cached_segment(infos[0]), fresh_segment(question)};
    const std::vector<ChunkSource> sources = {{}, ChunkSource(encoded.value), {}};
    const auto prompt = Prompt::make(segments, Position(1000));
    require_ok(prompt.status);
    std::vector<TokenId> all(start);
    all.insert(all.end(), chunk.begin(), chunk.end());
    all.insert(all.end(), question.begin(), question.end());
    std::vector<float> full(static_cast<std::size_t>(host->vocabulary()));
    std::vector<float> logits(full.size());
    host->clear();
    require_ok(host->prefill(all, rag::Wanted::last));
    require_ok(host->logits(full));
    const auto blend = [&](const char* selector, double ratio) {
      CAPTURE(selector);
      rag::Selection selection;
      selection.selector = selector;
      selection.ratio = ratio;
      require_ok(host->check(selection));
      rag::Run run;
      host->clear();
      require_ok(host->blend(prompt.value, sources, selection, run, logits));
      CHECK(run.rows_recomputed == static_cast<std::int32_t>(std::lround(ratio * kChunk)));
    };
    blend("attention_value_mass", 0.2);
    CHECK(logits != full);
    blend("stored_score", 0.2);
    blend("attention_mass", 1);
    CHECK(logits == full);
  }
}
