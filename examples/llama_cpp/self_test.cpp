// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The engine's self-test: whether rewritten graphs of this model compute what unaltered ones do, bit for bit.
#include <llama_cpp/engine.hpp>

#include <kvblend/codec/with_codec.hpp>

#include <algorithm>
#include <cstring>
#include <utility>

namespace llama_cpp {

using namespace kvblend;

namespace {

constexpr std::int32_t kTokens = 48;

Status differs(const char* what) {
  return Status::error(StatusCode::mismatch, "%s differ from a plain prefill's", what).at("self-test");
}

// What a plain prefill left.
struct Expected {
  std::vector<float> logits;
  std::vector<std::byte> blob;
};

bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

Status compare(const Engine& engine, const Expected& expected) {
  std::vector<std::byte> blob;
  KVBLEND_RETURN_IF_ERROR(engine.save(blob));
  if (!same_bits(engine.logits(), expected.logits)) return differs("logits");
  if (blob != expected.blob) return differs("keys or values");
  return {};
}

// Keys and values that scoring captures, against those a prefill stored; and those below the scored layer into `writer`,
// as they are not computed again.
Status take_scored(Engine& engine, std::int32_t scored, const Expected& expected, const BlobWriter& writer) {
  const Result<BlobReader> reader = BlobReader::open(engine.blob_format(), expected.blob);
  KVBLEND_RETURN_IF_ERROR(reader.status);
  const auto width = static_cast<std::int64_t>(engine.fresh_keys(0).size()) / kTokens;
  std::vector<std::byte> row(static_cast<std::size_t>(width) * sizeof(float));
  const bool transposed = engine.blob_format().transposed_values;
  for (std::int32_t layer = 0; layer <= scored; ++layer) {
    const Engine::Place place = engine.place_of(layer);
    if (reader.value.cells(place.body) != kTokens) {
      return Status::error(StatusCode::unsupported, "its window is shorter than %d tokens", kTokens)
          .at("layer %d", layer);
    }
    const BlobReader::Rows stored = reader.value.rows(place.body, place.layer);
    const BlobRows into = writer.rows(place.body, place.layer);
    const std::span<const float> keys = engine.fresh_keys(layer);
    const std::span<const float> values = engine.fresh_values(layer);
    bool same = true;
    const Status known = with_codec(engine.options().cache_type, [&](auto codec) -> Status {
      using C = decltype(codec);
      const auto bytes = static_cast<std::size_t>(width / C::block_values * C::block_bytes);
      for (std::size_t t = 0; t < std::size_t{kTokens}; ++t) {
        codec.encode(keys.data() + t * static_cast<std::size_t>(width), row.data(), width);
        same = same && std::memcmp(row.data(), stored.keys + t * bytes, bytes) == 0;
        codec.encode(values.data() + t * static_cast<std::size_t>(width), row.data(), width);
        if (!transposed) {
          same = same && std::memcmp(row.data(), stored.values + t * bytes, bytes) == 0;
          continue;
        }
        for (std::size_t j = 0; j < static_cast<std::size_t>(width); ++j) {
          const std::size_t at = (j * kTokens + t) * C::block_bytes;
          same = same && std::memcmp(row.data() + j * C::block_bytes, stored.values + at, C::block_bytes) == 0;
        }
      }
      if (layer == scored) return {};
      std::memcpy(into.keys, stored.keys, kTokens * bytes);
      std::memcpy(into.values, stored.values, kTokens * bytes);
      return {};
    });
    KVBLEND_RETURN_IF_ERROR(known);
    if (!same) return differs("scored keys or values");
  }
  return {};
}

Status test_ranges(Engine& engine, std::span<const TokenId> tokens, std::span<const Row> rows,
                   std::span<const Row> last, const Expected& expected, bool& scores_hold) {
  const std::int32_t layers = engine.model().layers();
  if (layers < 3) return Status::error(StatusCode::unsupported, "the model has %d layers", layers).at("ranges");
  BlobWriter writer;
  KVBLEND_RETURN_IF_ERROR(writer.lay_out(engine.blob_format(), kTokens, Position(0)));
  engine.clear();
  KVBLEND_RETURN_IF_ERROR(engine.score(1, tokens));
  const Status scored = take_scored(engine, 1, expected, writer);
  scores_hold = scored.code() != StatusCode::mismatch;
  KVBLEND_RETURN_IF_ERROR(scored);
  KVBLEND_RETURN_IF_ERROR(engine.load(writer.bytes(), kTokens));
  const std::int32_t middle = (1 + layers) / 2;
  KVBLEND_RETURN_IF_ERROR(engine.compute({1, middle}, rows, tokens, {}));
  KVBLEND_RETURN_IF_ERROR(engine.compute({middle, layers}, rows, tokens, last));
  return compare(engine, expected);
}

// Attention of the last rows, run behind the others, and anew among them.
Status test_probes(Engine& engine, std::span<const TokenId> tokens, std::span<const Row> rows) {
  constexpr std::size_t kProbed = 8;
  const std::size_t before = tokens.size() - kProbed;
  engine.clear();
  KVBLEND_RETURN_IF_ERROR(engine.prefill(tokens.first(before), Wanted::none));
  KVBLEND_RETURN_IF_ERROR(engine.probe(tokens.last(kProbed)));
  std::vector<std::vector<float>> expected;
  for (std::int32_t layer = 0; layer < engine.model().layers(); ++layer) {
    const auto mass = engine.attention_mass(layer);
    expected.emplace_back(mass.begin(), mass.end());
  }
  KVBLEND_RETURN_IF_ERROR(engine.prefill(tokens.last(kProbed), Wanted::none));
  KVBLEND_RETURN_IF_ERROR(engine.probe(rows.last(kProbed), 0, tokens));
  for (std::int32_t layer = 0; layer < engine.model().layers(); ++layer) {
    const auto mass = engine.attention_mass(layer).first(before);
    if (!same_bits(mass, expected[static_cast<std::size_t>(layer)])) return differs("attention weights");
  }
  return {};
}

}  // namespace

// Every row is computed anew over a cache of zeros, without flash attention, whose kernels depend on how rows are cut
// into batches. What fails is not used, and the reason kept.
Status Engine::test_itself() {
  EngineOptions options = options_;
  options.context = 2 * kTokens;
  options.batch = 64;
  options.flash_attention = false;
  options.self_test = false;
  if (options.cache_type == DType::q8_0) options.cache_type = DType::f16;
  const Result<std::unique_ptr<Engine>> opened = Engine::open(model_, options);
  if (!opened.ok()) {
    take_other_route(opened.status);
    return {};
  }
  Engine& engine = *opened.value;

  std::vector<TokenId> tokens;
  std::vector<Row> rows;
  for (std::int32_t i = 0; i < kTokens; ++i) {
    tokens.push_back(static_cast<TokenId>((std::int64_t{i} * 7919 + 101) % model_.vocabulary()));
    rows.push_back(Row(i));
  }
  const std::span<const Row> last = std::span<const Row>(rows).last(1);
  Expected expected;
  KVBLEND_RETURN_IF_ERROR(engine.prefill(tokens));
  expected.logits.assign(engine.logits().begin(), engine.logits().end());
  KVBLEND_RETURN_IF_ERROR(engine.save(expected.blob));

  BlobWriter writer;
  KVBLEND_RETURN_IF_ERROR(writer.lay_out(engine.blob_format(), kTokens, Position(0)));
  Status status = engine.load(writer.bytes(), kTokens);
  if (status.ok()) status = engine.compute({0, model_.layers()}, rows, tokens, last);
  if (status.ok() && engine.route() != Route::in_place) {
    status = Status::error(StatusCode::unsupported, "%s", engine.route_reason().c_str()).at("self-test");
  }
  if (status.ok()) status = compare(engine, expected);
  if (!status.ok()) {
    take_other_route(status);
    return {};
  }
  if (status = test_ranges(engine, tokens, rows, last, expected, scores_); !status.ok()) {
    ranges_ = false;
    route_reason_ = std::string(status.where()) + ": " + status.message();
  }
  probes_ = test_probes(engine, tokens, rows);
  return {};
}

}  // namespace llama_cpp
