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

// What a plain pass left.
struct Expected {
  std::vector<float> logits;
  std::vector<std::byte> blob;

  Status take(const Engine& engine) {
    logits.assign(engine.logits().begin(), engine.logits().end());
    return engine.save(blob);
  }
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

// Whether fresh rows, [rows, kv_heads * head_dim], are bit for bit those that a prefill stored of the cells from `first` on.
Status compare_rows(const Engine& engine, std::span<const float> keys, std::span<const float> values,
                    const BlobReader::Rows& stored, std::size_t first) {
  const std::int64_t width = std::int64_t{engine.model().kv_heads()} * engine.model().head_dim();
  const auto floats = static_cast<std::size_t>(width);
  const bool transposed = engine.blob_format().transposed_values;
  std::vector<std::byte> row(floats * sizeof(float));
  bool same = keys.size() == values.size() && keys.size() % floats == 0;
  const Status known = with_codec(engine.options().cache_type, [&](auto codec) -> Status {
    using C = decltype(codec);
    const auto bytes = static_cast<std::size_t>(width / C::block_values * C::block_bytes);
    for (std::size_t i = 0; same && i < keys.size() / floats; ++i) {
      const std::size_t cell = first + i;
      codec.encode(keys.data() + i * floats, row.data(), width);
      same = std::memcmp(row.data(), stored.keys + cell * bytes, bytes) == 0;
      codec.encode(values.data() + i * floats, row.data(), width);
      if (!transposed) {
        same = same && std::memcmp(row.data(), stored.values + cell * bytes, bytes) == 0;
        continue;
      }
      for (std::size_t j = 0; j < floats; ++j) {
        const std::size_t at = (j * kTokens + cell) * C::block_bytes;
        same = same && std::memcmp(row.data() + j * C::block_bytes, stored.values + at, C::block_bytes) == 0;
      }
    }
    return {};
  });
  KVBLEND_RETURN_IF_ERROR(known);
  return same ? Status() : differs("fresh keys or values");
}

// Where a layer lies in the blob of a prefill.
Result<BlobReader::Rows> rows_of(const Engine& engine, const BlobReader& reader, std::int32_t layer) {
  const Engine::Place place = engine.place_of(layer);
  if (reader.cells(place.body) == kTokens) return reader.rows(place.body, place.layer);
  return Status::error(StatusCode::unsupported, "its window is shorter than %d tokens", kTokens).at("layer %d", layer);
}

// Keys and values that scoring captures, against those a prefill stored; and those below the scored layer into `writer`,
// as they are not computed again.
Status take_scored(Engine& engine, std::int32_t scored, const Expected& expected, const BlobWriter& writer) {
  const Result<BlobReader> reader = BlobReader::open(engine.blob_format(), expected.blob);
  KVBLEND_RETURN_IF_ERROR(reader.status);
  for (std::int32_t layer = 0; layer <= scored; ++layer) {
    const Result<BlobReader::Rows> stored = rows_of(engine, reader.value, layer);
    KVBLEND_RETURN_IF_ERROR(stored.status);
    KVBLEND_RETURN_IF_ERROR(
        compare_rows(engine, engine.fresh_keys(layer), engine.fresh_values(layer), stored.value, 0));
    if (layer == scored) continue;
    const Engine::Place place = engine.place_of(layer);
    const BlobRows into = writer.rows(place.body, place.layer);
    const BlobLayer& format =
        engine.blob_format().bodies[static_cast<std::size_t>(place.body)][static_cast<std::size_t>(place.layer)];
    std::memcpy(into.keys, stored.value.keys, static_cast<std::size_t>(kTokens * format.key_row_bytes));
    std::memcpy(into.values, stored.value.values, static_cast<std::size_t>(kTokens * format.value_row_bytes));
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

// The last rows over a cache of zeros that becomes the prefill's, layer by layer, before they attend to it.
Status test_settling(Engine& engine, std::span<const TokenId> tokens, std::span<const Row> rows,
                     std::span<const Row> last, const Expected& prefill) {
  const Result<BlobReader> reader = BlobReader::open(engine.blob_format(), prefill.blob);
  KVBLEND_RETURN_IF_ERROR(reader.status);
  const LayerRange all{0, engine.model().layers()};
  KVBLEND_RETURN_IF_ERROR(engine.load(prefill.blob, kTokens));
  KVBLEND_RETURN_IF_ERROR(engine.compute(all, rows, tokens, last));
  Expected expected;
  KVBLEND_RETURN_IF_ERROR(expected.take(engine));

  BlobWriter writer;
  KVBLEND_RETURN_IF_ERROR(writer.lay_out(engine.blob_format(), kTokens, Position(0)));
  KVBLEND_RETURN_IF_ERROR(engine.load(writer.bytes(), kTokens));
  const auto settle = [&](std::int32_t layer, std::int32_t, std::int32_t, std::span<const std::int32_t> cells,
                          std::span<const float> keys, std::span<const float> values) -> Result<BlobReader::Rows> {
    const Result<BlobReader::Rows> stored = rows_of(engine, reader.value, layer);
    KVBLEND_RETURN_IF_ERROR(stored.status);
    const auto first = static_cast<std::size_t>(cells.front());
    KVBLEND_RETURN_IF_ERROR(compare_rows(engine, keys, values, stored.value, first));
    return stored;
  };
  KVBLEND_RETURN_IF_ERROR(engine.compute(all, rows, tokens, last, 0, settle));
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
  KVBLEND_RETURN_IF_ERROR(expected.take(engine));

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
  settles_ = test_settling(engine, tokens, std::span<const Row>(rows).last(8), last, expected);
  probes_ = test_probes(engine, tokens, rows);
  return {};
}

}  // namespace llama_cpp
