// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Models, prompts and blends for the tests of llama.cpp as a host; and what a test looks at: logits, and cells of the
// cache, bit by bit.
#pragma once

#include <doctest/doctest.h>
#include <llama_cpp/host.hpp>

#include <kvblend/fuse/pass_blend.hpp>
#include <kvblend/kvblend.hpp>
#include <kvblend/store.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tiny_gguf.hpp"

namespace llama_fixture {

using namespace kvblend;

using Tokens = std::vector<TokenId>;
using Bytes = std::vector<std::byte>;

inline std::string text_of(const Status& status) { return std::string(status.where()) + ": " + status.message(); }

// Fails the test with the Status's own words.
inline void require_ok(const Status& status) {
  INFO(text_of(status));
  REQUIRE(status.ok());
}

// ---- models ---------------------------------------------------------------------------------------------------------

// One of tiny_gguf::write_decoder's.
inline llama_cpp::Model tiny_model(const std::string& architecture) {
  const tiny_gguf::TemporaryFile file(architecture + ".gguf");
  tiny_gguf::write_decoder(file.path(), architecture);
  Result<llama_cpp::Model> model = llama_cpp::Model::open(file.path());
  require_ok(model.status);
  return std::move(model.value);
}

// Files that the build fetches; all but the first on request.
inline constexpr const char* kSmolLm2 = "SmolLM2-135M-Instruct.Q4_1.gguf";
inline constexpr const char* kQwen = "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf";
inline constexpr const char* kGemma = "gemma-3-270m.Q4_K_M.gguf";

// Where such a file is: KVBLEND_TEST_MODELS_DIR in the environment, or where the build fetched it to;
// KVBLEND_TEST_MODEL may name the first one. Empty, with a word to the reader, if it is not there.
inline std::string model_path(const std::string& file) {
  const char* given = file == kSmolLm2 ? std::getenv("KVBLEND_TEST_MODEL") : nullptr;
  const char* folder = std::getenv("KVBLEND_TEST_MODELS_DIR");
  const std::string path =
      given != nullptr ? given : std::string(folder != nullptr ? folder : KVBLEND_TEST_MODELS_DIR) + "/" + file;
  if (std::filesystem::exists(path)) return path;
  MESSAGE("skipped: no model file at \"" << path << "\"; set KVBLEND_TEST_MODELS_DIR");
  return {};
}

inline llama_cpp::Model open_model(const std::string& path) {
  Result<llama_cpp::Model> model = llama_cpp::Model::open(path);
  require_ok(model.status);
  return std::move(model.value);
}

// ---- engines --------------------------------------------------------------------------------------------------------

// One thread: tests run side by side, and ggml's threads spin while they wait. No flash attention: its kernels' results
// depend on how rows are cut into batches.
inline llama_cpp::EngineOptions options_for(std::int32_t context, DType type = DType::f16,
                                            bool flash_attention = false) {
  llama_cpp::EngineOptions options;
  options.context = context;
  options.threads = 1;
  options.cache_type = type;
  options.flash_attention = flash_attention;
  return options;
}

inline std::unique_ptr<llama_cpp::Engine> open_engine(const llama_cpp::Model& model,
                                                      const llama_cpp::EngineOptions& options) {
  Result<std::unique_ptr<llama_cpp::Engine>> engine = llama_cpp::Engine::open(model, options);
  require_ok(engine.status);
  INFO(engine.value->route_reason());
  REQUIRE(engine.value->route() == options.route);
  REQUIRE(engine.value->runs_ranges() == (options.route == llama_cpp::Route::in_place));
  REQUIRE(engine.value->can_settle().ok() == (options.route == llama_cpp::Route::in_place));
  return std::move(engine.value);
}

inline Tokens random_tokens(std::int32_t count, const llama_cpp::Model& model, unsigned seed) {
  std::mt19937 random(seed);
  const std::int32_t first = (std::min)(100, model.vocabulary() / 10);  // behind most special ones
  const std::int32_t kinds = (std::min)(20000, model.vocabulary() - first);
  Tokens tokens;
  for (std::int32_t i = 0; i < count; ++i) {
    tokens.push_back(first + static_cast<TokenId>(random() % static_cast<unsigned>(kinds)));
  }
  return tokens;
}

// ---- what a run leaves ----------------------------------------------------------------------------------------------

struct Outcome {
  Status status;
  std::vector<float> logits;
  Bytes blob;
  PassReport report;
};

inline Outcome outcome_of(const llama_cpp::Engine& engine) {
  Outcome outcome;
  outcome.logits.assign(engine.logits().begin(), engine.logits().end());
  require_ok(engine.save(outcome.blob));
  return outcome;
}

// A plain prefill of an empty cache, in as many calls as there are pieces.
inline Outcome prefill(llama_cpp::Engine& engine, const std::vector<Tokens>& pieces) {
  engine.clear();
  for (const Tokens& piece : pieces) require_ok(engine.prefill(piece));
  return outcome_of(engine);
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

inline void check_same(const Outcome& a, const Outcome& b) {
  CHECK(same_bits(a.logits, b.logits));
  CHECK(a.blob == b.blob);
}

template <class A, class B>
double relative_error(const A& a, const B& expected) {
  REQUIRE(a.size() == expected.size());
  double difference = 0;
  double norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double e = static_cast<double>(expected[i]);
    difference += (static_cast<double>(a[i]) - e) * (static_cast<double>(a[i]) - e);
    norm += e * e;
  }
  return std::sqrt(difference / norm);
}

// Goes on by plain decoding, from the logits that are there.
inline Tokens greedy(llama_cpp::Engine& engine, std::int32_t count) {
  Tokens tokens;
  for (std::int32_t i = 0; i < count; ++i) {
    const auto logits = engine.logits();
    tokens.push_back(static_cast<TokenId>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
    require_ok(engine.prefill(std::span(tokens).last(1)));
  }
  return tokens;
}

// ---- cells ----------------------------------------------------------------------------------------------------------

// Calls visit(byte offset into the blob, bytes) for all that a layer keeps of a cell.
template <class Visit>
void visit_cell(const llama_cpp::Engine& engine, const Bytes& blob, std::int32_t layer, std::int32_t cell,
                const Visit& visit) {
  const auto reader = llama_cpp::BlobReader::open(engine.blob_format(), blob);
  require_ok(reader.status);
  const llama_cpp::Engine::Place place = engine.place_of(layer);
  const llama_cpp::BlobLayer& format =
      engine.blob_format().bodies[static_cast<std::size_t>(place.body)][static_cast<std::size_t>(place.layer)];
  const llama_cpp::BlobReader::Rows rows = reader.value.rows(place.body, place.layer);
  const std::int64_t cells = reader.value.cells(place.body);
  REQUIRE(cell < cells);
  visit(rows.keys - blob.data() + cell * format.key_row_bytes, format.key_row_bytes);
  if (!engine.blob_format().transposed_values) {
    visit(rows.values - blob.data() + cell * format.value_row_bytes, format.value_row_bytes);
    return;
  }
  for (std::int64_t j = 0; j < format.value_row_bytes / format.value_bytes; ++j) {
    visit(rows.values - blob.data() + (j * cells + cell) * format.value_bytes, format.value_bytes);
  }
}

inline bool same_cell(const llama_cpp::Engine& engine, const Bytes& a, const Bytes& b, std::int32_t layer,
                      std::int32_t cell) {
  bool same = a.size() == b.size();
  visit_cell(engine, a, layer, cell, [&](std::ptrdiff_t at, std::int64_t bytes) {
    same = same && std::memcmp(a.data() + at, b.data() + at, static_cast<std::size_t>(bytes)) == 0;
  });
  return same;
}

// Of the cells that differ in that layer.
inline std::vector<std::int32_t> changed_cells(const llama_cpp::Engine& engine, const Bytes& a, const Bytes& b,
                                               std::int32_t layer, std::int32_t cells) {
  std::vector<std::int32_t> changed;
  for (std::int32_t cell = 0; cell < cells; ++cell) {
    if (!same_cell(engine, a, b, layer, cell)) changed.push_back(cell);
  }
  return changed;
}

// ---- blends ---------------------------------------------------------------------------------------------------------

struct Part {
  SegmentKind kind = SegmentKind::fresh;
  Tokens tokens;
};

inline Tokens tokens_of(const std::vector<Part>& parts) {
  Tokens tokens;
  for (const Part& part : parts) tokens.insert(tokens.end(), part.tokens.begin(), part.tokens.end());
  return tokens;
}

template <class Host>
ModelIdentity identity_of(Host& host, const llama_cpp::Engine& engine) {
  ModelIdentity identity;
  identity.name = identity.fingerprint = "test";
  identity.dtype = Host::stored_codec::dtype;
  identity.layers = host.layers();
  identity.kv_heads = engine.model().kv_heads();
  identity.head_dim = engine.model().head_dim();
  return identity;
}

// Clears the engine, prefills the tokens alone and takes their KV out.
template <class Host>
Result<Chunk> make_chunk(Host& host, llama_cpp::Engine& engine, const Tokens& tokens) {
  engine.clear();
  KVBLEND_RETURN_IF_ERROR(engine.prefill(tokens, llama_cpp::Wanted::none));
  ChunkIdentity identity;
  identity.model = identity_of(host, engine);
  for (std::int32_t layer = 0; layer < host.layers(); ++layer) identity.add_layer_rope(host.rope(layer));
  identity.tokens = tokens;
  return llama_cpp::export_chunk<typename Host::stored_codec>(engine, std::move(identity));
}

// What is behind the parts of a prompt: a chunk for each that is cached, else none.
template <class Host>
std::vector<ChunkHandle> make_chunks(Host& host, llama_cpp::Engine& engine, const std::vector<Part>& parts) {
  std::vector<ChunkHandle> chunks;
  for (const Part& part : parts) {
    ChunkHandle& handle = chunks.emplace_back();
    if (part.kind != SegmentKind::cached) continue;
    Result<Chunk> chunk = make_chunk(host, engine, part.tokens);
    require_ok(chunk.status);
    handle = share(std::move(chunk.value));
  }
  return chunks;
}

inline std::vector<ChunkHandle> make_chunks(llama_cpp::Engine& engine, const std::vector<Part>& parts) {
  llama_cpp::BlobWriter staging;
  std::vector<ChunkHandle> chunks;
  require_ok(llama_cpp::with_host(engine, staging, [&](auto host) -> Status {
    chunks = make_chunks(host, engine, parts);
    return {};
  }));
  return chunks;
}

// Blends the prompt behind the resident parts, which the cache must hold. Logits of the last row.
template <class Host, class Selector>
Status blend_parts(Host& host, const llama_cpp::Engine& engine, const std::vector<Part>& parts,
                   const std::vector<ChunkHandle>& chunks, const Selector& selector, PassReport& report,
                   const PassOptions& options = {}) {
  std::vector<ChunkInfo> infos;
  for (const ChunkHandle& chunk : chunks) infos.push_back(chunk != nullptr ? chunk->info() : ChunkInfo{});
  std::vector<Segment> segments;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    switch (parts[i].kind) {
      case SegmentKind::fresh: segments.push_back(fresh_segment(std::span(parts[i].tokens))); break;
      case SegmentKind::cached: segments.push_back(cached_segment(infos[i])); break;
      case SegmentKind::resident: segments.push_back(resident_segment(std::span(parts[i].tokens))); break;
    }
  }
  const Result<Prompt> prompt = Prompt::make(segments, Position(100000));
  KVBLEND_RETURN_IF_ERROR(prompt.status);
  std::vector<ChunkSource> sources;
  for (const ChunkHandle& chunk : chunks) {
    if (chunk != nullptr) {
      sources.emplace_back(chunk);
    } else {
      sources.emplace_back();
    }
  }
  LayerwiseLoader<typename Host::stored_codec> loader;
  KVBLEND_RETURN_IF_ERROR(loader.open(identity_of(host, engine), prompt.value, sources, host.layers(), {}));
  LayerwiseFusor<Selector> fusor(selector);
  Bytes memory(fusor.workspace_bytes(prompt.value, engine.model().head_dim()));
  const std::array<Row, 1> outputs = {Row(prompt.value.rows() - 1)};
  return blend(host, loader, fusor, prompt.value, outputs, memory, &report, options);
}

template <class Selector>
Outcome blend_parts(llama_cpp::Engine& engine, llama_cpp::BlobWriter& staging, const std::vector<Part>& parts,
                    const std::vector<ChunkHandle>& chunks, const Selector& selector, const PassOptions& options = {}) {
  PassReport report;
  const Status status = llama_cpp::with_host(
      engine, staging, [&](auto host) { return blend_parts(host, engine, parts, chunks, selector, report, options); });
  Outcome outcome = outcome_of(engine);
  outcome.status = status;
  outcome.report = report;
  return outcome;
}

// ---- selectors ------------------------------------------------------------------------------------------------------

using FirstRows = DeviationSelector<FirstK, RatioBudget>;
using Deviating = DeviationSelector<KeyValueDeviation, RatioBudget>;
using GradualFirstRows = DeviationSelector<FirstK, GradualBudget>;
using GradualDeviating = DeviationSelector<KeyValueDeviation, GradualBudget>;

inline FirstRows first_rows(double ratio) { return FirstRows(FirstK{}, RatioBudget(ratio)); }
inline Deviating deviating(double ratio) { return Deviating(KeyValueDeviation{}, RatioBudget(ratio)); }
inline GradualFirstRows gradual_first_rows(double ratio) { return GradualFirstRows(FirstK{}, GradualBudget(ratio)); }
inline GradualDeviating gradual_deviating(double ratio) {
  return GradualDeviating(KeyValueDeviation{}, GradualBudget(ratio));
}

inline std::vector<Row> rows_of(const std::vector<std::int32_t>& cells) {
  std::vector<Row> rows;
  for (const std::int32_t cell : cells) rows.emplace_back(cell);
  return rows;
}

}  // namespace llama_fixture
