// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Both hosts of examples/rag: where attention goes, scores that are stored with chunks, blends that choose by either,
// and the share of a question's attention that a calibration takes for a request's signal.
#include <rag/trial.hpp>

#include <doctest/doctest.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <filesystem>
#include <memory>
#include <string>

#include "engine/host_fixture.hpp"
#include "llama_cpp/tiny_gguf.hpp"

using namespace engine_fixture;
using namespace kvblend;

namespace {

constexpr std::int32_t kChunk = 50;

// The fusor's sum over the rows that a probing blend may choose, against the probe's sum over the exact ones.
void check_share(rag::Host& host, int vocabulary) {
  rag::TokenizedItem item;
  item.reusable = {random_tokens(20, vocabulary, 11), random_tokens(12, vocabulary, 12),
                   random_tokens(9, vocabulary, 13)};
  item.question = random_tokens(7, vocabulary, 14);
  item.context = random_tokens(16, vocabulary, 15);
  const eigen_engine::Tokenizer tokenizer;
  const std::vector<std::string> answers;
  const auto trial = rag::Trial::open(host, tokenizer, item, answers, 0);
  require_ok(trial.status);
  const auto share = trial.value->attention_share();
  require_ok(share.status);

  std::vector<ChunkInfo> infos;
  for (const ChunkHandle& chunk : trial.value->chunks()) infos.push_back(chunk->info());
  std::vector<Segment> segments;
  std::vector<ChunkSource> sources;
  for (std::size_t i = 0; i < infos.size(); ++i) {
    segments.push_back(cached_segment(infos[i]));
    sources.emplace_back(trial.value->chunks()[i]);
  }
  segments.push_back(fresh_segment(item.question));
  sources.emplace_back();
  const auto prompt = Prompt::make(segments, Position(1000));
  require_ok(prompt.status);
  rag::ScoresSeen seen;
  rag::Selection selection;
  selection.selector = "attention_mass";
  selection.ratio = 0.5;
  selection.seen = &seen;
  rag::Run run;
  std::vector<float> logits(static_cast<std::size_t>(host.vocabulary()));
  host.clear();
  require_ok(host.blend(prompt.value, sources, selection, run, logits));
  CHECK(seen.rows == 9);  // the second passage: what stands before it is exact
  rag::ProbeSums sums;
  host.clear();
  require_ok(host.blend(prompt.value, sources, {}, run, logits));
  require_ok(host.truncate(41));
  require_ok(host.probe(item.question, sums));
  double exact = 0;
  for (std::size_t row = 0; row < 32; ++row) exact += static_cast<double>(sums.mass[row]);
  CHECK(exact > 0);
  CHECK(share.value == doctest::Approx(seen.attention / (seen.attention + exact)).epsilon(1e-4));
}

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
  check_share(*eigen, 40000);

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

TEST_CASE("the share of a question's attention is what a blend that probes sees of it") {
  const tiny_gguf::TemporaryFile file("share.gguf");
  tiny_gguf::write_decoder(file.path(), "llama");
  const auto host = opened(rag::LlamaHost::open(file.path(), llama(false)));
  require_ok(host->reserve(100));
  check_share(*host, tiny_gguf::kVocabulary);
}

namespace {

// Two passages behind a context, blended with a question in front and behind. All tokens are below kVocabulary.
struct DriftScene {
  explicit DriftScene(rag::Host& h, int tokens = 100) : host(h) {
    for (unsigned i = 0; i < 2; ++i) {
      auto chunk = host.encode(random_tokens(tokens, tiny_gguf::kVocabulary, i), random_tokens(20, tiny_gguf::kVocabulary, 9));
      require_ok(chunk.status);
      chunks.push_back(chunk.value);
    }
  }

  std::vector<float> blend(const char* selector, double ratio, rag::Run* report = nullptr) {
    const std::array<ChunkInfo, 2> infos = {chunks[0]->info(), chunks[1]->info()};
    const auto question = random_tokens(8, tiny_gguf::kVocabulary, 3);
    std::vector<Segment> segments = {fresh_segment(question), cached_segment(infos[1]), cached_segment(infos[0]),
                                     fresh_segment(question)};
    const std::vector<ChunkSource> sources = {{}, ChunkSource(chunks[1]), ChunkSource(chunks[0]), {}};
    const auto prompt = Prompt::make(segments, Position(1000));
    require_ok(prompt.status);
    rag::Selection selection;
    selection.selector = selector;
    selection.ratio = ratio;
    std::vector<float> logits(static_cast<std::size_t>(host.vocabulary()));
    rag::Run run;
    host.clear();
    require_ok(host.check(selection));
    require_ok(host.blend(prompt.value, sources, selection, run, logits));
    if (report != nullptr) *report = run;
    return logits;
  }

  rag::Host& host;
  std::vector<ChunkHandle> chunks;
};

}  // namespace

TEST_CASE("drift on llama.cpp is what it is on the other engine") {
  const tiny_gguf::TemporaryFile file("drift.gguf");
  tiny_gguf::write_decoder(file.path(), "llama");
  const auto eigen = opened(rag::EigenHost::open(file.path(), 2));
  require_ok(eigen->reserve(400));
  DriftScene expected(*eigen);
  const char* const kDrift = "drift(attention_value_mass)";

  rag::LlamaOptions options = llama(false);
  const auto check = [&](DType type, bool flash, double tolerance) {
    CAPTURE(static_cast<int>(type));
    CAPTURE(flash);
    options.cache_type = type;
    options.flash_attention = flash;
    const auto host = opened(rag::LlamaHost::open(file.path(), options));
    require_ok(host->reserve(400));
    DriftScene scene(*host);
    rag::Run run;
    const auto logits = scene.blend(kDrift, 0.3, &run);
    CHECK(run.rows_recomputed == 60);
    const auto plain = expected.blend("attention_value_mass", 0.3);
    CHECK(relative_error(logits, expected.blend(kDrift, 0.3)) < tolerance);
    CHECK(relative_error(logits, plain) > 0.2);
    CHECK(relative_error(scene.blend("attention_value_mass", 0.3), plain) < tolerance);
    CHECK(relative_error(scene.blend("drift(key_value_deviation)", 0.3),
                         expected.blend("drift(key_value_deviation)", 0.3)) < tolerance);
    CHECK(scene.blend(kDrift, 1) == scene.blend("attention_value_mass", 1));
  };
  check(DType::f32, false, 1e-4);
  // Other roundings may choose another row where two score almost alike.
  check(DType::f32, true, 0.08);
  check(DType::f16, false, 0.08);
  check(DType::q8_0, true, 0.08);

  // More rows than llama.cpp runs at once.
  options = llama(false);
  options.cache_type = DType::f32;
  const auto long_eigen = opened(rag::EigenHost::open(file.path(), 2));
  const auto long_host = opened(rag::LlamaHost::open(file.path(), options));
  require_ok(long_eigen->reserve(1000));
  require_ok(long_host->reserve(1000));
  DriftScene long_expected(*long_eigen, 400);
  DriftScene in_parts(*long_host, 400);
  const auto expected_logits = long_expected.blend(kDrift, 0.7);
  const double moved = relative_error(long_expected.blend("attention_value_mass", 0.7), expected_logits);
  CHECK(moved > 0.1);
  CHECK(relative_error(in_parts.blend(kDrift, 0.7), expected_logits) < moved / 3);

  options = llama(false);
  options.route = llama_cpp::Route::runs;
  const auto runs = opened(rag::LlamaHost::open(file.path(), options));
  require_ok(runs->reserve(400));
  rag::Selection selection;
  selection.selector = kDrift;
  selection.ratio = 0.3;
  CHECK(runs->check(selection).code() == StatusCode::unsupported);
}
