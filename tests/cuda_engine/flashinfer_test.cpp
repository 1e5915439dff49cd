// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What FlashInfer's kernel is given, without FlashInfer: the mask against positions, the plan against its rules, pages
// against the cache's own layout; and the engine on a device whose kernel reads these tables as FlashInfer's does.
#include <kvblend/kvblend.hpp>

#include <doctest/doctest.h>
#include <cuda_engine/blender.hpp>
#include <cuda_engine/cpu_device.hpp>
#include <cuda_engine/engine.hpp>
#include <cuda_engine/flashinfer.hpp>
#include <cuda_engine/passages.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "engine/engine_fixture.hpp"

using namespace cuda_engine;
using namespace engine_fixture;
using kvblend::Prompt;
using kvblend::Segment;
using kvblend::Status;
using kvblend::StatusCode;

namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

int pick(std::mt19937& random, int least, int most) {
  return least + static_cast<int>(random() % static_cast<unsigned>(most - least + 1));
}

// `count` of [first, end), ascending.
std::vector<int> some_of(std::mt19937& random, int first, int end, int count) {
  std::vector<int> all(at(end - first));
  std::iota(all.begin(), all.end(), first);
  std::shuffle(all.begin(), all.end(), random);
  all.resize(at(count));
  std::sort(all.begin(), all.end());
  return all;
}

// FlashInfer's kernel as it reads its parameters, in float: BatchPrefillWithPagedKVCacheDevice, LogitsMask of
// DefaultAttention, and VariableLengthMergeStates.
class PeerDevice : public CpuDevice<float> {
 public:
  explicit PeerDevice(std::int32_t multiprocessors) : multiprocessors_(multiprocessors) {}

  [[nodiscard]] std::int32_t multiprocessors() const { return multiprocessors_; }
  [[nodiscard]] static bool has_flashinfer(std::int32_t head_dim) { return head_dim == 16; }

  Status attend(const FlashInferCall<float>& call) {
    const FlashInferTables& tables = call.tables;
    const FlashInferPages<float>& pages = call.pages;
    const std::int32_t heads = call.shape.heads, dim = call.shape.head_dim, group = heads / call.shape.kv_heads;
    const std::int32_t queries = tables.q_indptr[1] - tables.q_indptr[0];
    const auto size = static_cast<std::int32_t>(pages.page_size);
    const std::int32_t cached = (tables.page_indptr[1] - tables.page_indptr[0] - 1) * size + tables.last_page_len[0];
    const bool merged = call.plan.chunks > 1;
    const std::int32_t chunk_rows = merged ? tables.kv_chunk_size[0] : cached;
    const std::int32_t chunks = (cached + tables.kv_chunk_size[0] - 1) / tables.kv_chunk_size[0];
    ++(call.mask != nullptr ? masked : causal);
    if (merged) ++split;
    const auto* const bits = reinterpret_cast<const std::uint8_t*>(call.mask);
    for (std::int32_t entry = 0; entry < call.plan.entries(); ++entry) {
      REQUIRE(tables.request_indices[entry] == 0);
      const std::int32_t begin = merged ? tables.kv_tile_indices[entry] * chunk_rows : 0;
      const std::int32_t end = (std::min)(begin + chunk_rows, cached);
      for (std::int32_t i = 0; i < 128 * call.shape.kv_heads; ++i) {
        const std::int32_t kv_head = i / 128;
        const std::int32_t packed = tables.qo_tile_indices[entry] * 128 + i % 128;
        const std::int32_t query = packed / group, head = kv_head * group + packed % group;
        if (query >= queries) continue;
        const float* const q = call.queries + (tables.q_indptr[0] + query) * call.query_stride + head * dim;
        double sum = 0;
        std::vector<double> out(at(dim), 0.0);
        std::vector<double> scores;
        const auto element = [&](const float* base, std::int32_t row) {
          return base + pages.indices[tables.page_indptr[0] + row / size] * pages.page_stride +
                 row % size * pages.row_stride + kv_head * pages.head_stride;
        };
        for (std::int32_t row = begin; row < end; ++row) {
          const std::int64_t bit = std::int64_t{query} * cached + row;
          const bool seen = bits != nullptr ? ((bits[tables.mask_indptr[0] + bit / 8] >> (bit % 8)) & 1) != 0
                                            : row + queries <= cached + query;
          double score = 0;
          const float* const key = element(pages.keys, row);
          for (std::int32_t d = 0; d < dim; ++d) score += static_cast<double>(q[d]) * static_cast<double>(key[d]);
          scores.push_back(seen ? score * static_cast<double>(call.scale) : -5e4);
        }
        const double most = *std::max_element(scores.begin(), scores.end());
        for (std::int32_t row = begin; row < end; ++row) {
          const double weight = std::exp(scores[at(row - begin)] - most);
          const float* const value = element(pages.values, row);
          sum += weight;
          for (std::int32_t d = 0; d < dim; ++d) out[at(d)] += weight * static_cast<double>(value[d]);
        }
        const std::int64_t to = tables.o_indptr[0] + (merged ? query * chunks + tables.kv_tile_indices[entry] : query);
        for (std::int32_t d = 0; d < dim; ++d) {
          (merged ? call.partial_out : call.out)[(to * heads + head) * dim + d] = static_cast<float>(out[at(d)] / sum);
        }
        if (merged) call.partial_sums[to * heads + head] = static_cast<float>(std::log2(sum) + most * 1.44269504);
      }
    }
    if (merged) merge(call);
    return {};
  }

  int causal = 0, masked = 0, split = 0;  // calls

 private:
  static void merge(const FlashInferCall<float>& call) {
    const std::int32_t heads = call.shape.heads, dim = call.shape.head_dim;
    for (std::int32_t at_head = 0; at_head < call.count * heads; ++at_head) {
      const std::int32_t query = at_head / heads, head = at_head % heads;
      const std::int32_t begin = call.tables.merge_indptr[query], end = call.tables.merge_indptr[query + 1];
      float most = call.partial_sums[begin * heads + head];
      for (std::int32_t part = begin; part < end; ++part) {
        most = (std::max)(most, call.partial_sums[part * heads + head]);
      }
      for (std::int32_t d = 0; d < dim; ++d) {
        float sum = 0, out = 0;
        for (std::int32_t part = begin; part < end; ++part) {
          const float weight = std::exp2(call.partial_sums[part * heads + head] - most);
          sum += weight;
          out += weight * call.partial_out[(part * heads + head) * dim + d];
        }
        call.out[at_head * dim + d] = out / sum;
      }
    }
  }
  std::int32_t multiprocessors_;
};

static_assert(FlashInferDevice<PeerDevice>);
static_assert(!FlashInferDevice<CpuDevice<float>>);

}  // namespace

TEST_CASE("the mask for FlashInfer has a bit for each cached row at a position up to the query's") {
  std::mt19937 random(11);
  for (int round = 0; round < 300; ++round) {
    INFO("round " << round << " of seed 11");
    // Rows at ascending positions with gaps, of which some in front are resident and no query.
    const int cached = round < 3 ? 32 * (round + 1) : pick(random, 1, 150);
    const int resident = pick(random, 0, cached - 1);
    std::vector<int> positions = {pick(random, 0, 3)};
    while (static_cast<int>(positions.size()) < cached) positions.push_back(positions.back() + pick(random, 1, 4));
    std::vector<Row> rows;
    for (const int row : some_of(random, resident, cached, pick(random, 1, cached - resident))) rows.emplace_back(row);
    const int active = static_cast<int>(rows.size());
    std::vector<ActiveIndex> kept;
    for (const int i : some_of(random, 0, active, pick(random, 1, active))) kept.emplace_back(i);

    const std::int64_t words = PackMaskWord::words(static_cast<std::int64_t>(kept.size()), cached);
    std::vector<std::uint32_t> mask(at(words) + 1, 0xabababab);
    const PackMaskWord pack{mask.data(), rows.data(), kept.data(), static_cast<std::int64_t>(kept.size()), cached};
    for (std::int64_t i = words - 1; i >= 0; --i) pack(i);
    CHECK(mask.back() == 0xabababab);

    std::vector<std::uint8_t> expected(4 * at(words), 0);
    for (std::size_t query = 0; query < kept.size(); ++query) {
      const int own = positions[at(rows[at(kept[query].value)].value)];
      for (int row = 0; row < cached; ++row) {
        const std::size_t bit = query * at(cached) + at(row);
        if (positions[at(row)] <= own) expected[bit / 8] = static_cast<std::uint8_t>(expected[bit / 8] | 1 << bit % 8);
      }
    }
    const auto* const bytes = reinterpret_cast<const std::uint8_t*>(mask.data());
    REQUIRE(std::vector<std::uint8_t>(bytes, bytes + expected.size()) == expected);
  }
}

TEST_CASE("the plan for FlashInfer keeps the device busy and covers each query and cached row once") {
  std::mt19937 random(12);
  int splits = 0;
  for (int round = 0; round < 300; ++round) {
    INFO("round " << round << " of seed 12");
    const int cached = pick(random, 1, 900), count = pick(random, 1, cached), group = pick(random, 1, 8);
    const int page_size = std::array{1, 8, 16, 48, 256}[at(pick(random, 0, 4))], blocks = pick(random, 0, 40);
    const FlashInferPlan plan = flashinfer_plan(count, group, cached, page_size, blocks);

    int tiles = 0;
    while (tiles * 128 < count * group) ++tiles;
    const int pages = cached / page_size + (cached % page_size != 0 ? 1 : 0);
    const auto chunks_of = [&](int chunk_pages) { return (pages + chunk_pages - 1) / chunk_pages; };
    int chunk_pages = (std::max)(128 / page_size, 1);
    while (chunk_pages < pages && tiles * chunks_of(chunk_pages) > blocks) ++chunk_pages;
    REQUIRE(plan.tiles == tiles);
    REQUIRE(plan.chunk_rows == chunk_pages * page_size);
    REQUIRE(plan.chunks == chunks_of(chunk_pages));
    if (plan.chunks > 1) ++splits;

    const std::int64_t size = FlashInferTables::size(plan.entries(), count);
    std::vector<std::int32_t> memory(at(size) + 1, -7);
    const FlashInferTables tables = FlashInferTables::in(memory.data(), plan.entries(), count);
    const FillFlashInferTables fill{tables, plan, count, cached, page_size};
    for (std::int64_t i = fill.size() - 1; i >= 0; --i) fill(i);
    REQUIRE(std::count(memory.begin(), memory.end(), -7) == 1);  // all is written, and no more
    REQUIRE(memory.back() == -7);

    std::vector<int> covered(at(tiles * pages), 0);
    for (int entry = 0; entry < plan.entries(); ++entry) {
      REQUIRE(tables.request_indices[entry] == 0);
      const int begin = tables.kv_tile_indices[entry] * tables.kv_chunk_size[0] / page_size;
      for (int page = begin; page < (std::min)(begin + chunk_pages, pages); ++page) {
        ++covered[at(tables.qo_tile_indices[entry] * pages + page)];
      }
    }
    REQUIRE(std::count(covered.begin(), covered.end(), 1) == tiles * pages);
    for (int query = 0; query <= count; ++query) REQUIRE(tables.merge_indptr[query] == query * plan.chunks);
    REQUIRE(tables.q_indptr[0] == 0);
    REQUIRE(tables.q_indptr[1] == count);
    REQUIRE(tables.o_indptr[0] == 0);
    REQUIRE(tables.o_indptr[1] == count * plan.chunks);
    REQUIRE(tables.mask_indptr[0] == 0);
  }
  CHECK(splits > 50);
}

TEST_CASE("the pages for FlashInfer are the cache's: shuffled blocks with gaps and a last one that is not full") {
  using Plane = kvblend::PagedPlane<kvblend::Bf16Codec>;
  std::mt19937 random(13);
  for (int round = 0; round < 100; ++round) {
    INFO("round " << round << " of seed 13");
    const int cached = pick(random, 1, 90), page_size = pick(random, 1, 16), heads = pick(random, 1, 3);
    const int used = (cached + page_size - 1) / page_size, blocks = used + pick(random, 0, 5);
    std::vector<std::int32_t> table(at(blocks));
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), random);
    const auto order = round % 2 == 0 ? kvblend::RowOrder::nhd : kvblend::RowOrder::hnd;
    const auto pool = kvblend::block_pool<kvblend::Bf16Codec>({blocks, page_size, heads, 64, 32 * (round % 3)}, order);
    require_ok(pool.status);
    std::vector<std::byte> keys(at(blocks * pool.value.block_stride)), values(keys.size());
    const kvblend::PagedLayout layout(pool.value, table.data(), used);
    const Plane key_plane(keys.data(), layout), value_plane(values.data(), layout);
    const auto pages = flashinfer_pages<BFloat16>(key_plane, value_plane);
    require_ok(pages.status);

    const FlashInferPlan plan = flashinfer_plan(1, 1, cached, page_size, 4);
    std::vector<std::int32_t> memory(at(FlashInferTables::size(plan.entries(), 1)));
    const FlashInferTables tables = FlashInferTables::in(memory.data(), plan.entries(), 1);
    const FillFlashInferTables fill{tables, plan, 1, cached, page_size};
    for (std::int64_t i = 0; i < fill.size(); ++i) fill(i);
    REQUIRE(tables.page_indptr[0] == 0);
    REQUIRE((tables.page_indptr[1] - 1) * page_size + tables.last_page_len[0] == cached);
    REQUIRE(tables.last_page_len[0] >= 1);
    REQUIRE(tables.last_page_len[0] <= page_size);
    for (int row = 0; row < cached; ++row) {
      for (int head = 0; head < heads; ++head) {
        const std::int64_t there = pages.value.indices[row / page_size] * pages.value.page_stride +
                                   row % page_size * pages.value.row_stride + head * pages.value.head_stride;
        REQUIRE(reinterpret_cast<std::byte*>(pages.value.keys + there) == key_plane.at(row, head));
        REQUIRE(reinterpret_cast<std::byte*>(pages.value.values + there) == value_plane.at(row, head));
      }
    }
  }
}

TEST_CASE("a cache that FlashInfer cannot say is refused") {
  using Plane = kvblend::PagedPlane<kvblend::Bf16Codec>;
  const std::array<std::int32_t, 2> table = {0, 1};
  const kvblend::PagedLayout good(table.data(), 2, 4, 2, 64, 4096, 1024, 128);
  std::array<std::byte, 1> memory{};
  const auto refusal = [&](const kvblend::PagedLayout& keys, const kvblend::PagedLayout& values) {
    return flashinfer_pages<BFloat16>(Plane(memory.data(), keys), Plane(memory.data(), values)).status.code();
  };
  CHECK(refusal(good, good) == StatusCode::ok);
  auto odd = good, backwards = good, far = good, tiled = good, other = good;
  odd.row_stride = 1025;
  backwards.head_stride = -128;
  far.block_stride = std::int64_t{1} << 34;
  tiled.tile_size = 8;
  other.block_stride = 8192;
  for (const auto& layout : {odd, backwards, far, tiled}) CHECK(refusal(layout, layout) == StatusCode::unsupported);
  CHECK(refusal(good, other) == StatusCode::unsupported);
}

TEST_CASE("with FlashInfer's attention the GPU engine gives the logits that it gives by products") {
  struct Case {
    int multiprocessors, gap, resident;
  };
  for (const Case& of : {Case{1, 0, 0}, Case{9, 50, 0}, Case{9, 0, 45}}) {
    const int multiprocessors = of.multiprocessors, gap = of.gap, resident = of.resident;
    INFO("multiprocessors " << multiprocessors << ", gap " << gap << ", resident " << resident);
    PeerDevice device(multiprocessors);
    const auto model = small_model(kvblend::RopePairing::neox, gap > 0);
    Weights<PeerDevice> weights;
    require_ok(weights.load(device, model));
    std::vector<std::int32_t> table(50);  // of blocks of 7 rows: more than are used
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(7));
    EngineOptions options;
    options.max_rows = 300;
    options.block_size = 7;
    options.block_table = table;
    options.attention = AttentionBy::products;
    Engine<PeerDevice> products(device, weights), peer(device, weights);
    require_ok(products.open(options));
    options.attention = AttentionBy::flashinfer;
    require_ok(peer.open(options));

    const auto logits_of = [](Engine<PeerDevice>& engine) {
      std::vector<float> out(at(engine.active_rows()) * at(engine.config().vocabulary));
      require_ok(engine.logits(out));
      return out;
    };
    const auto compare = [&] {
      const std::vector<float> expected = logits_of(products), got = logits_of(peer);
      REQUIRE(got.size() == expected.size());
      double largest = 0;
      for (std::size_t i = 0; i < got.size(); ++i) {
        const double off = std::fabs(static_cast<double>(got[i]) - static_cast<double>(expected[i]));
        if (!(off <= largest)) largest = off;
      }
      CHECK(largest <= 1e-4);
    };
    const auto on_both = [&](const auto& run) {
      run(products);
      run(peer);
      compare();
    };
    // Two passes, the second one behind rows that it has not.
    const auto text = random_tokens(250, 101, 3);
    const std::span<const TokenId> all(text);
    on_both([&](auto& engine) { require_ok(engine.prefill(all.first(200), Wanted::all)); });
    on_both([&](auto& engine) { require_ok(engine.prefill(all.subspan(200), Wanted::all)); });
    CHECK(device.causal == 8);
    CHECK(device.masked == 0);
    CHECK((device.split > 0) == (multiprocessors > 1));
    device.causal = device.split = 0;

    // A blend: the rows of all passages in layer 0, some of those that were projected in layer 1, and these alone in
    // layer 2.
    Passages<PeerDevice> passages(device, products);
    products.clear();
    const std::vector<TokenId> front(text.begin(), text.begin() + resident);
    std::vector<Segment> segments;
    if (resident > 0) {
      require_ok(passages.add(random_tokens(1, 101, 4)));  // stands for the resident segment, which is not asked for
      segments.push_back(kvblend::resident_segment(front));
    }
    std::vector<std::vector<TokenId>> texts = {random_tokens(60, 101, 5), random_tokens(91, 101, 6)};
    for (const auto& passage : texts) require_ok(passages.add(passage));
    std::vector<kvblend::ChunkInfo> chunks;
    for (const auto& passage : texts) chunks.push_back({passage, kvblend::Position(0), {}, {}});
    for (const auto& chunk : chunks) segments.push_back(kvblend::cached_segment(chunk));
    const auto question = random_tokens(11, 101, 8);
    segments.push_back(kvblend::fresh_segment(question, kvblend::Position(resident + 151 + gap)));
    const auto prompt = Prompt::make(segments, kvblend::Position(511));
    require_ok(prompt.status);
    const std::array<Row, 2> outputs = {Row(prompt.value.rows() - 3), Row(prompt.value.rows() - 1)};
    on_both([&](auto& engine) {
      engine.clear();
      require_ok(engine.prefill(front));
      device.causal = device.masked = device.split = 0;
      Blender<PeerDevice> blender(device, BenchSelector({}, kvblend::RatioBudget{0.3}));
      require_ok(blender.open(engine, prompt.value));
      require_ok(blender.run(engine, passages, prompt.value, outputs));
    });
    // Without resident rows the first passage is where it was computed, and layer 0 has the rows behind it alone, which
    // the engine cannot know of their number.
    CHECK(device.causal == (resident > 0 ? 1 : 0));
    CHECK(device.masked == (resident > 0 ? 2 : 3));
    CHECK((device.split > 0) == (multiprocessors > 1));
    on_both([&](auto& engine) { require_ok(engine.decode(44)); });
  }
}

TEST_CASE("FlashInfer's attention is refused where it is not built or not for the heads") {
  PeerDevice device(1);
  CHECK(FlashInfer<PeerDevice>().open(device, {4, 2, 64}, 10).code() == StatusCode::unsupported);
  const auto model = small_model();
  CpuDevice<float> without;
  Weights<CpuDevice<float>> weights;
  require_ok(weights.load(without, model));
  Engine<CpuDevice<float>> engine(without, weights);
  EngineOptions options;
  options.max_rows = 10;
  options.attention = AttentionBy::flashinfer;
  const Status status = engine.open(options);
  CHECK(status.code() == StatusCode::unsupported);
  CHECK(std::string(status.message()).find("KVBLEND_WITH_FLASHINFER") != std::string::npos);
}
