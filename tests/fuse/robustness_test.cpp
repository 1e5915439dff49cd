// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a blend does with bad input, with failures in its middle, with other memory than the plain one, and with the
// prompts that broke other engines.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"  // g++ sees only one half of the operators replaced below
#endif
#include "scene.hpp"
#include "tiny_pass_host.hpp"

#include <doctest/doctest.h>

#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <string>
#include <vector>

using namespace kvblend;
using namespace tiny;

namespace {

long allocations = 0;

std::string text(const Status& status) { return std::string(status.where()) + ": " + status.message(); }

bool contains(const Status& status, const char* part) { return text(status).find(part) != std::string::npos; }

std::vector<Row> rows_of(std::span<const Row> rows) { return {rows.begin(), rows.end()}; }

// Prompts over chunks of four tokens, computed in the context of each other.
struct Four {
  Config config;
  Model model{config, 31};
  std::vector<std::unique_ptr<Chunk>> chunks;
  std::vector<TokenId> all;

  Four() {
    std::mt19937 random(31);
    all = random_tokens(random, 12, config.vocab);
    for (int i = 0; i < 3; ++i) {
      auto& chunk = *chunks.emplace_back(std::make_unique<Chunk>());
      chunk.context.assign(all.begin(), all.begin() + 4 * i);
      chunk.tokens.assign(all.begin() + 4 * i, all.begin() + 4 * (i + 1));
      encode_chunk(model, chunk, 4 * i);
    }
  }

  template <class Selector>
  Status run(std::vector<Segment>& segments, std::vector<Chunk*> by_segment, Selector selector, FloatHost& host,
             Prompt& prompt, BlendReport* report = nullptr) {
    Result<Prompt> made = Prompt::make(segments, Position(1000));
    KVBLEND_RETURN_IF_ERROR(made.status);
    prompt = made.value;
    const std::vector<Row> outputs = {Row(prompt.rows() - 1)};
    LayerwiseFusor<Selector> fusor(selector);
    std::vector<std::byte> memory(fusor.workspace_bytes(prompt, config.head_dim));
    Source source(model, by_segment);
    return blend(host, source, fusor, prompt, outputs, memory, report);
  }
};

}  // namespace

long allocations_so_far() { return allocations; }

// Counts every allocation of the program, so that a step that allocates is seen.
void* operator new(std::size_t size) {
  ++allocations;
  if (void* memory = std::malloc(size)) return memory;
  std::abort();
}
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

TEST_CASE("the steps of a blend allocate nothing, and their workspace is as small as promised") {
  Scene scene;
  const Config& config = scene.model.config;
  const auto check = [&](auto selector) {
    FloatHost host = make_host(scene.model, scene.prompt.rows());
    LayerwiseFusor<decltype(selector)> fusor(selector);
    // Scratch: at most 48 bytes a row of selection arrays, and one rotation table a cached segment; each of the twelve
    // arrays rounded up to 64 bytes.
    const std::size_t bytes = fusor.workspace_bytes(scene.prompt, config.head_dim);
    CHECK(bytes <= static_cast<std::size_t>(48 * scene.prompt.rows() + 2 * 4 * config.head_dim + 4 * 16 + 14 * 64));
    std::vector<std::byte> memory(bytes);
    Source source = scene.source();
    long counted = 0;
    const auto step = [&](auto&& call) {
      const long before = allocations;
      const Status status = call();
      counted += allocations - before;
      REQUIRE(status.ok());
    };
    step([&] { return fusor.begin(scene.prompt, {config.layers, config.head_dim}, scene.outputs, memory); });
    REQUIRE(host.begin(scene.prompt).ok());
    for (const bool again : {false, true}) {
      if (again && !fusor.probing()) break;
      if (again) step([&] { return fusor.choose_after_probe(); });
      REQUIRE(host.embed(fusor.active()).ok());
      for (std::int32_t l = 0; l < config.layers; ++l) {
        REQUIRE(host.project(l, fusor.active()).ok());
        if (!again) step([&] { return fusor.place(l, host.rope(l), source, host.keys(l), host.values(l)); });
        step([&] { return fusor.fuse(l, host.fresh_keys(), host.fresh_values(), host.keys(l), host.values(l)); });
        REQUIRE(host.attend(l, fusor.active(), fusor.kept()).ok());
        fusor.narrow();
      }
    }
    CHECK(counted == 0);
  };
  check(at_ratio<FirstK>(0.3));
  check(at_ratio<KeyValueDeviation>(0.3));
  check(at_ratio<AttentionMass>(0.3));
}

TEST_CASE("a workspace one byte short is refused and may start anywhere") {
  Scene scene;
  const Config& config = scene.model.config;
  LayerwiseFusor fusor(at_ratio<KeyValueDeviation>(0.3));
  std::vector<std::byte> memory(fusor.workspace_bytes(scene.prompt, config.head_dim) + 1);
  const std::span<std::byte> all(memory);
  const LayerwiseFusor<DeviationSelector<KeyValueDeviation, RatioBudget>>::Shape shape{config.layers, config.head_dim};
  CHECK(fusor.begin(scene.prompt, shape, scene.outputs, all.subspan(2)).code() == StatusCode::insufficient_space);
  CHECK(fusor.begin(scene.prompt, shape, scene.outputs, all.subspan(1)).ok());
}

TEST_CASE("a host that fails in any of its calls leaves the cache as it was and can be used again") {
  Scene scene;
  const Config& config = scene.model.config;
  // Two rows are resident, and stay to the bit.
  FloatHost probe = make_host(scene.model, scene.prompt.rows());
  REQUIRE(run(scene, probe, at_ratio<KeyValueDeviation>(0.3)).ok());
  const int calls = 1 + 1 + 2 * config.layers + 1;  // begin, embed, project and attend of each layer, commit
  for (int call = 0; call < calls; ++call) {
    CAPTURE(call);
    FloatHost host = make_host(scene.model, scene.prompt.rows());
    host.committed = 2;
    host.fail_after = call;
    const Status status = run(scene, host, at_ratio<KeyValueDeviation>(0.3));
    CHECK(status.code() == StatusCode::host_error);
    CHECK(contains(status, "engine failed"));
    CHECK(host.committed == 2);
    CHECK(host.aborts == (call == 0 ? 0 : 1));  // a begin that failed has nothing to abort
    REQUIRE(run(scene, host, at_ratio<KeyValueDeviation>(0.3)).ok());
    CHECK(host.memory() == probe.memory());
  }
}

TEST_CASE("a source that fails at any layer aborts the blend and names the cause") {
  Scene scene;
  for (int layer = 0; layer < scene.model.config.layers; ++layer) {
    FloatHost host = make_host(scene.model, scene.prompt.rows());
    LayerwiseFusor fusor(at_ratio<FirstK>(0.3));
    std::vector<std::byte> memory(fusor.workspace_bytes(scene.prompt, 8));
    Source source = scene.source();
    source.fail_at_layer = layer;
    const Status status = blend(host, source, fusor, scene.prompt, scene.outputs, memory);
    CHECK(status.code() == StatusCode::corrupt);
    CHECK(contains(status, "checksum differs"));
    CHECK(host.committed == 0);
    CHECK(host.aborts == 1);
  }
}

TEST_CASE("bad arguments are named before the host is asked for anything") {
  Scene scene;
  FloatHost host = make_host(scene.model, scene.prompt.rows());
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double ratio : {-0.01, 1.01, nan, std::numeric_limits<double>::infinity()}) {
    const Status status = run(scene, host, at_ratio<KeyDeviation>(ratio));
    CHECK(status.code() == StatusCode::invalid_argument);
    CHECK(contains(status, "ratio"));
  }
  scene.outputs = {Row(29)};
  CHECK(contains(run(scene, host, at_ratio<FirstK>(0.1)), "outputs[0]: row 29 is not in the prompt"));
  scene.outputs = {Row(3), Row(-1)};
  CHECK(contains(run(scene, host, at_ratio<FirstK>(0.1)), "outputs[1]: row -1"));
  scene.outputs = {Row(5), Row(5)};
  CHECK(contains(run(scene, host, at_ratio<FirstK>(0.1)), "outputs[1]: row 5 does not ascend"));
  CHECK(contains(run(scene, host, at_ratio<KeyDeviation>(0.1)), "outputs[1]"));
  scene.outputs = {Row(28)};
  CHECK(contains(run(scene, host, at_ratio<StoredScore<>>(0.1)), "segment 1"));  // no scores were stored
  CHECK(host.aborts == 0);
  CHECK(host.committed == 0);
}

TEST_CASE("planes that do not fit are refused before the layer is written") {
  Scene scene;
  const Config& config = scene.model.config;
  LayerwiseFusor fusor(at_ratio<FirstK>(0.3));
  std::vector<std::byte> memory(fusor.workspace_bytes(scene.prompt, config.head_dim));
  const auto place = [&](FloatHost& host, const RopeSpec& spec, Source& source) {
    REQUIRE(fusor.begin(scene.prompt, {config.layers, config.head_dim}, scene.outputs, memory).ok());
    const auto before = host.memory();
    const Status status = fusor.place(0, spec, source, host.keys(0), host.values(0));
    CHECK(host.memory() == before);
    return status;
  };
  Source source = scene.source();
  FloatHost small = make_host(scene.model, scene.prompt.rows() - 1);
  CHECK(contains(place(small, small.rope(0), source), "row 28 has no memory"));

  FloatHost host = make_host(scene.model, scene.prompt.rows());
  RopeSpec other = host.rope(0);
  other.attention_factor = 1.25;
  const Status status = place(host, other, source);
  CHECK(status.code() == StatusCode::mismatch);
  CHECK(contains(status, "segment 1, layer 0"));
  CHECK(contains(status, "attention_factor"));

  scene.a->values[0].resize(4 * 16);  // a source that has lost rows
  CHECK(contains(place(host, host.rope(0), source), "stored values"));
}

TEST_CASE("paged memory and plain memory get the same bits, and 16-bit caches close ones") {
  Scene scene({}, 3);
  const Config& config = scene.model.config;
  FloatHost plain = make_host(scene.model, scene.prompt.rows());
  REQUIRE(run(scene, plain, at_ratio<KeyValueDeviation>(0.3)).ok());

  const std::vector<std::int32_t> table = {5, 0, 7, 2, 3, 6, 1, 4};  // 8 blocks of 4 rows
  const auto paged = [&](std::int64_t value_bytes) {
    const std::int64_t row = value_bytes * config.kv_heads * config.head_dim;
    return PagedLayout(table.data(), 8, 4, config.kv_heads, config.head_dim, 4 * row, row,
                       value_bytes * config.head_dim);
  };
  Host<F32Codec, PagedLayout> host(scene.model, paged(4), 8 * 4 * 4 * 16);
  REQUIRE(run(scene, host, at_ratio<KeyValueDeviation>(0.3)).ok());
  CHECK(host.logits(0) == plain.logits(0));

  Host<F16Codec, PagedLayout> half(scene.model, paged(2), 8 * 4 * 2 * 16);
  REQUIRE(run(scene, half, at_ratio<FirstK>(0.3)).ok());
  FloatHost first_k = make_host(scene.model, scene.prompt.rows());
  REQUIRE(run(scene, first_k, at_ratio<FirstK>(0.3)).ok());
  for (std::size_t i = 0; i < half.logits(0).size(); ++i) {
    CHECK(half.logits(0)[i] == doctest::Approx(first_k.logits(0)[i]).epsilon(0.02).scale(1));
  }
}

// LMCache #938, #854, #1875: a full hit, reordered or repeated chunks crashed.
TEST_CASE("a prompt of nothing but chunks, in any order and repeated, has its last row computed") {
  Four four;
  Prompt prompt;
  for (const std::vector<int>& order : {std::vector<int>{2, 0, 1}, {1, 1, 1}, {0, 0, 2, 2}, {0, 1, 2}}) {
    std::vector<Segment> segments;
    std::vector<Chunk*> by_segment;
    for (const int i : order) {
      segments.push_back(cached_segment(four.chunks[static_cast<std::size_t>(i)]->info));
      by_segment.push_back(four.chunks[static_cast<std::size_t>(i)].get());
    }
    FloatHost host = make_host(four.model, 16);
    BlendReport report;
    REQUIRE(four.run(segments, by_segment, at_ratio<KeyValueDeviation>(0.25), host, prompt, &report).ok());
    CHECK(host.outputs() == 1);
    std::vector<TokenId> tokens;
    std::vector<int> positions;
    for (int row = 0; row < prompt.rows(); ++row) {
      tokens.push_back(prompt.token(Row(row)));
      positions.push_back(row);
    }
    if (order ==
        std::vector<int>{0, 1, 2}) {  // each chunk stands where and behind what it was computed: nothing deviates
      CHECK(prompt.exact_end() == Row(12));
      CHECK(report.fusor.rows_computed == four.config.layers);  // the last row alone
      const auto oracle = full_prefill(four.model, tokens, positions);
      CHECK(largest_difference(host.logits(0), oracle.logits.back()) <= 1e-4);
    } else {
      CHECK(report.fusor.rows_selected == prompt.reused_rows() / 4);
    }
  }
}

// LMCache #832, PR2207: a missing chunk in the middle shifted all rows behind it; resident rows were overwritten.
TEST_CASE("a missing chunk is a fresh segment and moves nothing, and resident rows are not touched") {
  Four four;
  Prompt prompt;
  const std::span<const TokenId> all(four.all);
  std::vector<Segment> segments = {cached_segment(four.chunks[0]->info), fresh_segment(all.subspan(4, 4)),
                                   cached_segment(four.chunks[2]->info)};
  FloatHost host = make_host(four.model, 12);
  REQUIRE(four.run(segments, {four.chunks[0].get(), nullptr, four.chunks[2].get()}, at_ratio<FirstK>(0), host, prompt)
              .ok());
  CHECK(prompt.exact_end() == Row(4));
  CHECK(prompt.segments()[2].first_row == Row(8));
  const auto oracle = full_prefill(four.model, four.all, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11});
  CHECK(largest_difference(host.logits(0), oracle.logits.back()) <= 1e-4);  // chunk 2 was computed behind these tokens

  // Six rows are resident; the chunk of the first seven tokens is stored as well and serves for the seventh.
  Chunk seven;
  seven.tokens.assign(four.all.begin(), four.all.begin() + 7);
  encode_chunk(four.model, seven, 0);
  std::vector<Segment> more = {resident_segment(all.first(6)), cached_segment(seven.info, 6, 1),
                               fresh_segment(all.subspan(7, 5))};
  const auto before = host.memory();
  FloatHost again = host;
  REQUIRE(four.run(more, {nullptr, &seven, nullptr}, at_ratio<FirstK>(1), again, prompt).ok());
  CHECK(prompt.exact_end() == Row(7));
  CHECK(largest_difference(again.logits(0), oracle.logits.back()) <= 1e-4);
  for (std::size_t i = 0; i < before.size(); ++i) {
    CHECK(std::memcmp(before[i].data(), again.memory()[i].data(), 6 * 4 * 16) == 0);
  }
  std::vector<Segment> resident_only = {resident_segment(all)};
  CHECK(contains(four.run(resident_only, {nullptr}, at_ratio<FirstK>(1), again, prompt), "is resident"));
}

// sglang #23609: no tokens for one chunk made every later call fail.
TEST_CASE("empty chunks, empty segments and an empty prompt are fine") {
  Four four;
  Prompt prompt;
  Chunk empty;
  encode_chunk(four.model, empty, 0);
  std::vector<Segment> segments = {cached_segment(four.chunks[1]->info), cached_segment(empty.info),
                                   cached_segment(four.chunks[0]->info), fresh_segment({})};
  FloatHost host = make_host(four.model, 8);
  REQUIRE(four.run(segments, {four.chunks[1].get(), &empty, four.chunks[0].get(), nullptr}, at_ratio<KeyDeviation>(0.5),
                   host, prompt)
              .ok());
  CHECK(host.outputs() == 1);
  CHECK(host.committed == 8);

  std::vector<Segment> none;
  const Prompt nothing = Prompt::make(none, Position(0)).value;
  LayerwiseFusor fusor(at_ratio<KeyDeviation>(0.5));
  std::vector<std::byte> memory(fusor.workspace_bytes(nothing, 8));
  Source source(four.model, {});
  CHECK(blend(host, source, fusor, nothing, {}, memory).ok());
  CHECK(host.committed == 0);
}

TEST_CASE("rows with a NaN in their stored KV are recomputed first") {
  Scene scene;
  for (auto& keys : scene.b->keys) keys[4 * 16 + 3] = std::numeric_limits<float>::quiet_NaN();  // row 20
  FloatHost host = make_host(scene.model, scene.prompt.rows());
  REQUIRE(run(scene, host, at_ratio<KeyDeviation>(0.05)).ok());  // one row of twenty
  for (const float logit : host.logits(0)) CHECK_FALSE(std::isnan(logit));
}

TEST_CASE("a fused cache goes back into the store as a chunk and is an exact prefix of the next prompt") {
  Scene scene;
  const Config& config = scene.model.config;
  FloatHost host = make_host(scene.model, scene.prompt.rows());
  REQUIRE(run(scene, host, at_ratio<KeyValueDeviation>(0.3)).ok());

  Chunk fused;
  fused.tokens = scene.tokens;
  for (std::int32_t l = 0; l < config.layers; ++l) {
    const auto read = [&](auto plane) {
      std::vector<float> values(static_cast<std::size_t>(scene.prompt.rows() * config.kv_heads * config.head_dim));
      for (int row = 0; row < scene.prompt.rows(); ++row) {
        for (int head = 0; head < config.kv_heads; ++head) {
          decode_head(plane, row, head, values.data() + (row * config.kv_heads + head) * config.head_dim);
        }
      }
      return values;
    };
    fused.keys.push_back(read(host.keys(l)));
    fused.values.push_back(read(host.values(l)));
  }
  fused.info.tokens = fused.tokens;

  std::mt19937 random(1);
  const std::vector<TokenId> next = random_tokens(random, 3, config.vocab);
  std::vector<Segment> segments = {cached_segment(fused.info), fresh_segment(next)};
  const Prompt prompt = Prompt::make(segments, Position(1000)).value;
  CHECK(prompt.exact_end() == Row(scene.prompt.rows()));
  CHECK(prompt.reused_rows() == 0);
  FloatHost other = make_host(scene.model, prompt.rows());
  LayerwiseFusor fusor(at_ratio<KeyValueDeviation>(0.3));
  std::vector<std::byte> memory(fusor.workspace_bytes(prompt, config.head_dim));
  Source source(scene.model, {&fused, nullptr});
  BlendReport report;
  const std::vector<Row> outputs = {Row(prompt.rows() - 1)};
  REQUIRE(blend(other, source, fusor, prompt, outputs, memory, &report).ok());
  CHECK(report.fusor.rows_computed == 3 * config.layers);
  const auto bytes = static_cast<std::size_t>(scene.prompt.rows() * config.kv_heads * config.head_dim * 4);
  for (std::size_t i = 0; i < host.memory().size(); ++i) {
    CHECK(std::memcmp(host.memory()[i].data(), other.memory()[i].data(), bytes) == 0);
  }
}

TEST_CASE("active rows of a during-pass selector leave out the exact prefix") {
  Four four;
  Prompt prompt;
  std::vector<Segment> segments = {cached_segment(four.chunks[0]->info), cached_segment(four.chunks[0]->info)};
  prompt = Prompt::make(segments, Position(100)).value;
  LayerwiseFusor fusor(at_ratio<KeyDeviation>(0.5));
  std::vector<std::byte> memory(fusor.workspace_bytes(prompt, 8));
  const std::vector<Row> outputs = {Row(1), Row(7)};
  REQUIRE(fusor.begin(prompt, {4, 8}, outputs, memory).ok());
  CHECK(rows_of(fusor.active()) == std::vector<Row>{Row(1), Row(4), Row(5), Row(6), Row(7)});
}
