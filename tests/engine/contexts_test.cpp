// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What passages are encoded behind: how it is named, that a calibration keeps it, and what it makes of a chunk on both
// hosts of examples/rag.
#include <rag/calibration_file.hpp>
#include <rag/prompt_file.hpp>
#include <rag/tokenized.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "engine/host_fixture.hpp"
#include "llama_cpp/tiny_gguf.hpp"

using namespace engine_fixture;
using namespace kvblend;

namespace {

bool same_bytes(const Chunk& a, const Chunk& b) {
  for (std::int32_t layer = 0; layer < a.layers(); ++layer) {
    if (!std::ranges::equal(a.layer(layer), b.layer(layer))) return false;
  }
  return a.layers() == b.layers() && std::ranges::equal(a.scores(), b.scores());
}

std::vector<TokenId> joined(const std::vector<std::vector<TokenId>>& parts) {
  std::vector<TokenId> out;
  for (const auto& part : parts) out.insert(out.end(), part.begin(), part.end());
  return out;
}

ChunkHandle encoded(rag::Host& host, const std::vector<TokenId>& tokens, const std::vector<TokenId>& context) {
  const auto chunk = host.encode(tokens, context);
  require_ok(chunk.status);
  CHECK(chunk.value->identity() == host.chunk_identity(tokens, context));
  return chunk.value;
}

// Each part behind all before it, the last one fresh: how far the logits are from a prefill's, where nothing of the
// parts is approximate and so nothing is chosen or recomputed.
double off_from_prefill(rag::Host& host, const std::vector<std::vector<TokenId>>& parts) {
  std::vector<float> full(static_cast<std::size_t>(host.vocabulary()));
  std::vector<float> logits(full.size());
  host.clear();
  for (const auto& part : parts) require_ok(host.prefill(part, rag::Wanted::last));
  require_ok(host.logits(full));
  std::vector<ChunkHandle> chunks;
  std::vector<ChunkInfo> infos;
  infos.reserve(parts.size());  // segments point into it
  std::vector<Segment> segments;
  std::vector<ChunkSource> sources;
  std::vector<TokenId> before;
  for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
    chunks.push_back(encoded(host, parts[i], before));
    infos.push_back(chunks.back()->info());
    segments.push_back(cached_segment(infos.back()));
    sources.emplace_back(chunks.back());
    before.insert(before.end(), parts[i].begin(), parts[i].end());
  }
  segments.push_back(fresh_segment(parts.back()));
  sources.emplace_back();
  const auto prompt = Prompt::make(segments, Position(4000));
  require_ok(prompt.status);
  CHECK(prompt.value.reused_rows() == 0);
  rag::Run run;
  host.clear();
  require_ok(host.blend(prompt.value, sources, {}, run, logits));
  return relative_error(logits, full);
}

// Whatever the cache has held since, a chunk behind a context has the same bytes, which are not those of one alone.
void check_repeats(rag::Host& host, const std::vector<TokenId>& tokens, const std::vector<TokenId>& context) {
  host.clear();
  const ChunkHandle first = encoded(host, tokens, context);
  CHECK(first->scores().size() == tokens.size());
  const std::vector<TokenId> other(tokens.rbegin(), tokens.rend());
  encoded(host, other, context);
  CHECK(same_bytes(*encoded(host, tokens, context), *first));
  rag::ProbeSums sums;
  require_ok(host.probe(other, sums));
  require_ok(host.prefill(other, rag::Wanted::none));
  CHECK(same_bytes(*encoded(host, tokens, context), *first));
  require_ok(host.truncate(static_cast<std::int32_t>(context.size()) / 2));
  require_ok(host.prefill(other, rag::Wanted::none));
  CHECK(same_bytes(*encoded(host, tokens, context), *first));
  require_ok(host.layer_time(first, 20, 30).status);
  CHECK(same_bytes(*encoded(host, tokens, context), *first));
  CHECK_FALSE(host.encode({}, std::vector<TokenId>(context.size(), -1)).ok());
  CHECK(same_bytes(*encoded(host, tokens, context), *first));
  CHECK_FALSE(same_bytes(*encoded(host, tokens, {}), *first));
}

}  // namespace

TEST_CASE("a chunk encoded behind a context is what a prefill of both has there") {
  if (!std::filesystem::exists(KVBLEND_TEST_MODEL)) {
    MESSAGE("skipped: no model at " << KVBLEND_TEST_MODEL);
    return;
  }
  const auto context = random_tokens(30, 40000, 1);
  const auto tokens = random_tokens(50, 40000, 2);
  const auto question = random_tokens(8, 40000, 3);
  std::vector<std::vector<float>> scores;
  for (const bool eigen : {true, false}) {
    CAPTURE(eigen);
    const auto host = eigen ? opened(rag::EigenHost::open(KVBLEND_TEST_MODEL, 1))
                            : opened(rag::LlamaHost::open(KVBLEND_TEST_MODEL, llama(false)));
    require_ok(host->store_scores({random_tokens(6, 40000, 4)}));
    require_ok(host->reserve(200));
    CHECK(off_from_prefill(*host, {context, tokens, question}) < 1e-4);
    check_repeats(*host, tokens, context);
    const ChunkHandle chunk = encoded(*host, tokens, context);
    scores.emplace_back(chunk->scores().begin(), chunk->scores().end());
  }
  CHECK(relative_error(scores[1], scores[0]) < 0.02);
}

TEST_CASE("chunks are encoded behind contexts that a sliding window has passed") {
  const tiny_gguf::TemporaryFile file("contexts.gguf");
  tiny_gguf::write_decoder(file.path(), "gemma3");
  const auto host = opened(rag::LlamaHost::open(file.path(), llama(false)));
  require_ok(host->store_scores({random_tokens(6, tiny_gguf::kVocabulary, 4)}));
  require_ok(host->reserve(400));
  const auto tokens = [](int count, std::uint32_t seed) { return random_tokens(count, tiny_gguf::kVocabulary, seed); };
  const auto first = tokens(tiny_gguf::kWindow - 4, 1);
  const auto second = tokens(tiny_gguf::kWindow - 10, 2);
  const auto third = tokens(40, 3);
  CHECK(off_from_prefill(*host, {first, second, third, tokens(9, 5)}) < 1e-5);
  check_repeats(*host, third, joined({first, second}));
}

TEST_CASE("a prompt's first passage is encoded behind the instructions alone and is exact there") {
  if (!std::filesystem::exists(KVBLEND_TEST_MODEL)) {
    MESSAGE("skipped: no model at " << KVBLEND_TEST_MODEL);
    return;
  }
  const auto tokenizer = eigen_engine::Tokenizer::load(KVBLEND_TEST_MODEL);
  require_ok(tokenizer.status);
  rag::PromptFile file;
  file.instructions = "Answer in a few words.";
  file.items.push_back({"Which colour?", {"The house is red.", "The boat is blue.", "The car is green."}, {}, {}});
  const auto check = [&](const rag::Context& context, std::int32_t exact_parts) {
    file.context = context;
    const auto item = rag::tokenize(tokenizer.value, file, file.items[0]);
    require_ok(item.status);
    const auto& parts = item.value.reusable;
    REQUIRE(parts.size() == 4);
    std::vector<ChunkInfo> infos;
    infos.reserve(parts.size());  // segments point into it
    std::vector<Segment> segments;
    for (std::size_t part = 0; part < parts.size(); ++part) {
      ChunkInfo info;
      info.tokens = parts[part];
      info.context = item.value.context_of(part);
      info.first_position = Position(static_cast<std::int32_t>(info.context.size()));
      infos.push_back(info);
      segments.push_back(cached_segment(infos.back()));
    }
    const auto prompt = Prompt::make(segments, Position(1000));
    require_ok(prompt.status);
    std::int32_t exact = 0;
    for (const Segment& segment : segments) exact += segment.exact ? 1 : 0;
    CHECK(exact == exact_parts);
    CHECK(item.value.rows_to_encode() >= static_cast<std::int32_t>(infos[3].context.size() + infos[3].tokens.size()));
    return std::vector<TokenId>(infos[2].context.begin(), infos[2].context.end());
  };
  CHECK(check({}, 1).empty());
  const auto instructions = check(std::vector<std::string>{}, 2);
  const auto context = check(std::vector<std::string>{"The bus is white.", "The train is black."}, 2);
  CHECK(!instructions.empty());
  REQUIRE(context.size() > instructions.size());
  CHECK(std::equal(instructions.begin(), instructions.end(), context.begin()));
}

TEST_CASE("a context is named by what it has") {
  CHECK(rag::describe({}) == "alone");
  const auto alone = rag::read_context("alone");
  CHECK((alone.ok() && !alone.value));
  const auto instructions = rag::read_context("instructions");
  CHECK((instructions.ok() && instructions.value && instructions.value->empty()));
  CHECK(rag::describe(instructions.value) == "instructions");
  const auto usual = rag::read_context(rag::kUsualContext);
  require_ok(usual.status);
  CHECK(usual.value->size() == 4);
  const std::string name = rag::describe(usual.value);
  CHECK(name.starts_with("instructions; behind the first 4 passages "));
  rag::Context other = usual.value;
  other->back() += ".";
  CHECK(rag::describe(other) != name);
}

TEST_CASE("a calibration file keeps its context and the gate's signal") {
  rag::CalibrationFile calibration;
  calibration.host = "eigen";
  calibration.quality.model = "model";
  calibration.quality.fingerprint = "1";
  calibration.quality.target_kl = 0.1;
  calibration.quality.cost = LinearCostModel(1e-4, 1e-6, 1e-9, 1e-9);
  const tiny_gguf::TemporaryFile file("calibration.json");
  for (const rag::Context& context : {rag::Context(), rag::Context(std::vector<std::string>()),
                                      rag::Context(std::vector<std::string>{"one", "two"})}) {
    calibration.context = context;
    require_ok(rag::write_calibration(calibration, file.path()));
    const auto read = rag::read_calibration(file.path());
    require_ok(read.status);
    CHECK(read.value.context == context);
  }
  for (const SignalLimits& limits : {SignalLimits(), SignalLimits{0.925, SignalLimits().recompute_at}, {0.3, 0.7}}) {
    calibration.quality.signal = "a signal";
    calibration.quality.signal_limits = limits;
    require_ok(rag::write_calibration(calibration, file.path()));
    const auto read = rag::read_calibration(file.path());
    require_ok(read.status);
    CHECK(read.value.quality.signal == "a signal");
    CHECK(read.value.quality.signal_limits.raise_at == limits.raise_at);
    CHECK(read.value.quality.signal_limits.recompute_at == limits.recompute_at);
  }
  std::ofstream(file.path()) << R"({"kvblend_calibration": 1})";
  const auto old = rag::read_calibration(file.path());
  CHECK(old.status.code() == StatusCode::corrupt);
  CHECK(std::string(old.status.message()).find("version 1") != std::string::npos);
}
