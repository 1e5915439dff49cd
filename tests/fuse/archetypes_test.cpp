// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A blend made of the smallest types its concepts allow: what compiles here is all that a blend asks of anybody.
#include <kvblend/codec/floats.hpp>
#include <kvblend/eigen/backend.hpp>
#include <kvblend/fuse/blend.hpp>
#include <kvblend/fuse/pass_blend.hpp>
#include <kvblend/memory/layouts.hpp>
#include <kvblend/select/scores.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <vector>

using namespace kvblend;

namespace {

// Neither copied nor moved nor made from nothing.
struct Fixed {
  Fixed() = delete;
  explicit Fixed(int) {}
  Fixed(const Fixed&) = delete;
  Fixed& operator=(const Fixed&) = delete;
};

constexpr std::int32_t kLayers = 2;
constexpr std::int32_t kKeyDim = 4;
constexpr std::int32_t kValueDim = 6;  // as in latent attention, values may be wider or narrower than keys
constexpr std::int32_t kRows = 7;

RopeSpec small_rope() {
  RopeSpec spec;
  spec.head_dim = kKeyDim;
  spec.rotary_dim = 2;
  spec.inv_freq[0] = 0.5;
  return spec;
}

template <class Byte>
auto plane_of(Byte* bytes, std::int32_t rows, std::int32_t head_dim) {
  return dense_plane<F32Codec>(bytes, rows, 1, head_dim);
}

// The fresh key and value of row r at layer l are all 100·l + r.
struct HostArchetype : Fixed {
  using Fixed::Fixed;
  RopeSpec spec = small_rope();
  std::array<std::vector<float>, kLayers> key_memory, value_memory;
  std::vector<float> fresh_key_memory, fresh_value_memory;
  std::vector<std::size_t> ran;
  int committed = -1;

  std::int32_t layers() { return kLayers; }
  const RopeSpec& rope(std::int32_t) { return spec; }
  Status begin(const Prompt& prompt) {
    for (auto& memory : key_memory) memory.assign(static_cast<std::size_t>(prompt.rows() * kKeyDim), -1.0f);
    for (auto& memory : value_memory) memory.assign(static_cast<std::size_t>(prompt.rows() * kValueDim), -1.0f);
    return {};
  }
  Status embed(std::span<const Row>) { return {}; }
  Status project(std::int32_t layer, std::span<const Row> rows) {
    ran.push_back(rows.size());
    fresh_key_memory.clear();
    fresh_value_memory.clear();
    for (const Row row : rows) {
      const auto value = static_cast<float>(100 * layer + row.value);
      fresh_key_memory.insert(fresh_key_memory.end(), kKeyDim, value);
      fresh_value_memory.insert(fresh_value_memory.end(), kValueDim, value);
    }
    return {};
  }
  auto fresh_keys() { return plane_of(std::as_bytes(std::span(fresh_key_memory)).data(), kRows, kKeyDim); }
  auto fresh_values() { return plane_of(std::as_bytes(std::span(fresh_value_memory)).data(), kRows, kValueDim); }
  auto keys(std::int32_t layer) {
    return plane_of(std::as_writable_bytes(std::span(key_memory[static_cast<std::size_t>(layer)])).data(), kRows,
                    kKeyDim);
  }
  auto values(std::int32_t layer) {
    return plane_of(std::as_writable_bytes(std::span(value_memory[static_cast<std::size_t>(layer)])).data(), kRows,
                    kValueDim);
  }
  Status attend(std::int32_t, std::span<const Row>, std::span<const ActiveIndex>) { return {}; }
  Status commit(std::int32_t rows) {
    committed = rows;
    return {};
  }
  void abort() {}
};

// The same fresh keys and values, computed over all layers at once or over one. Staging memory is the cache.
struct PassHostArchetype : Fixed {
  PassHostArchetype(int i, bool ranges) : Fixed(i), one_by_one(ranges) {}
  RopeSpec spec = small_rope();
  std::array<std::vector<float>, kLayers> key_memory, value_memory;
  std::array<std::vector<float>, kLayers> fresh_key_memory, fresh_value_memory;
  std::vector<std::size_t> ran;
  std::vector<int> layers_ran;
  int committed = -1;
  bool one_by_one;

  std::int32_t layers() { return kLayers; }
  const RopeSpec& rope(std::int32_t) { return spec; }
  Status begin(const Prompt& prompt) {
    for (auto& memory : key_memory) memory.assign(static_cast<std::size_t>(prompt.rows() * kKeyDim), -1.0f);
    for (auto& memory : value_memory) memory.assign(static_cast<std::size_t>(prompt.rows() * kValueDim), -1.0f);
    return {};
  }
  Status score(std::int32_t layer, std::span<const Row> rows) {
    for (std::int32_t l = 0; l <= layer; ++l) {
      const auto at = static_cast<std::size_t>(l);
      for (const Row row : rows) {
        const auto value = static_cast<float>(100 * l + row.value);
        fresh_key_memory[at].insert(fresh_key_memory[at].end(), kKeyDim, value);
        fresh_value_memory[at].insert(fresh_value_memory[at].end(), kValueDim, value);
      }
    }
    return {};
  }
  auto fresh_keys(std::int32_t layer) {
    return plane_of(std::as_bytes(std::span(fresh_key_memory[static_cast<std::size_t>(layer)])).data(), kRows, kKeyDim);
  }
  auto fresh_values(std::int32_t layer) {
    return plane_of(std::as_bytes(std::span(fresh_value_memory[static_cast<std::size_t>(layer)])).data(), kRows,
                    kValueDim);
  }
  auto keys(std::int32_t layer) {
    return plane_of(std::as_writable_bytes(std::span(key_memory[static_cast<std::size_t>(layer)])).data(), kRows,
                    kKeyDim);
  }
  auto values(std::int32_t layer) {
    return plane_of(std::as_writable_bytes(std::span(value_memory[static_cast<std::size_t>(layer)])).data(), kRows,
                    kValueDim);
  }
  Status load() { return {}; }
  Status compute(LayerRange range, std::span<const Row> rows, std::span<const Row>) {
    ran.push_back(rows.size());
    layers_ran.push_back(range.size());
    for (std::int32_t l = range.first; l < range.end; ++l) {
      const auto at = static_cast<std::size_t>(l);
      for (const Row row : rows) {
        const auto value = static_cast<float>(100 * l + row.value);
        std::fill_n(key_memory[at].begin() + row.value * kKeyDim, kKeyDim, value);
        std::fill_n(value_memory[at].begin() + row.value * kValueDim, kValueDim, value);
      }
    }
    return {};
  }
  bool runs_ranges() const { return one_by_one; }
  Status commit(std::int32_t rows) {
    committed = rows;
    return {};
  }
  void abort() {}
};

// Row r of a prompt receives r times as much attention as row 1.
struct ProbingArchetype : PassHostArchetype {
  using PassHostArchetype::PassHostArchetype;
  std::array<float, kRows> mass = {};
  Status probe(std::span<const Row> rows, std::int32_t) {
    ran.push_back(rows.size());
    for (std::size_t row = 0; row < mass.size(); ++row) mass[row] = static_cast<float>(row);
    return {};
  }
  const std::array<float, kRows>& attention_mass(std::int32_t) { return mass; }
};

// Four rows: the key of row r is (r, 0, r, r), its value r in all places.
struct SourceArchetype : Fixed {
  explicit SourceArchetype(int i) : Fixed(i) {
    for (int row = 0; row < 4; ++row) {
      const auto value = static_cast<float>(row);
      for (const float k : {value, 0.0f, value, value}) key_memory.push_back(k);
      value_memory.insert(value_memory.end(), kValueDim, value);
    }
  }
  RopeSpec spec = small_rope();
  std::vector<float> key_memory, value_memory;

  Status wait(std::int32_t) { return {}; }
  auto keys(std::int32_t, std::int32_t) { return plane_of(std::as_bytes(std::span(key_memory)).data(), 4, kKeyDim); }
  auto values(std::int32_t, std::int32_t) {
    return plane_of(std::as_bytes(std::span(value_memory)).data(), 4, kValueDim);
  }
  void release(std::int32_t) {}
  const RopeSpec& rope(std::int32_t, std::int32_t) { return spec; }
};

struct BackendArchetype {
  BackendArchetype() = delete;
  explicit BackendArchetype(int) {}
  BackendArchetype(const BackendArchetype&) = default;
  BackendArchetype& operator=(const BackendArchetype&) = delete;

  template <class Stored, class K, class V>
  void place(const RopeSpec& spec, std::span<const PlacedRun> runs, const Stored& stored, const K& keys,
             const V& values, std::span<const std::uint8_t> computed) const {
    PortableBackend{}.place(spec, runs, stored, keys, values, computed);
  }
  template <class P, class Q>
  void deviation(const P& fresh, std::span<const ActiveIndex> which, std::span<const Row> rows, const Q& reused,
                 std::span<float> out) const {
    PortableBackend{}.deviation(fresh, which, rows, reused, out);
  }
  template <class P, class Q>
  void merge(const P& fresh, std::span<const Row> rows, const Q& to) const {
    PortableBackend{}.merge(fresh, rows, to);
  }
  void top_k(std::span<const float> scores, std::int32_t k, std::span<std::uint64_t> scratch,
             std::span<ActiveIndex> out) const {
    PortableBackend{}.top_k(scores, k, scratch, out);
  }
};

struct ScoreArchetype {
  static constexpr ScoreTiming timing = ScoreTiming::during_pass;
  static constexpr bool uses_keys = false;
  static constexpr bool uses_values = true;
  static constexpr const char* name = "archetype";
  ScoreArchetype() = delete;
  explicit ScoreArchetype(int) {}
  ScoreArchetype(const ScoreArchetype&) = default;
  ScoreArchetype& operator=(const ScoreArchetype&) = delete;

  Status operator()(const ScoreInputs& inputs, std::span<float> out) const {
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = inputs.value_deviation[i];
    return {};
  }
};

struct BudgetArchetype {
  BudgetArchetype() = delete;
  explicit BudgetArchetype(int) {}
  BudgetArchetype(const BudgetArchetype&) = default;
  BudgetArchetype& operator=(const BudgetArchetype&) = delete;

  Status validate() const { return {}; }
  std::int32_t rows(const BudgetInputs&) const { return 1; }
  std::int32_t most_rows(std::int32_t) const { return 1; }
  bool narrows_at(std::int32_t, std::int32_t) const { return false; }
};

struct NoRows {
  Status validate() const { return {}; }
  std::int32_t rows(const BudgetInputs&) const { return 0; }
  std::int32_t most_rows(std::int32_t) const { return 0; }
  bool narrows_at(std::int32_t, std::int32_t) const { return false; }
};

struct ExecutorArchetype {
  ExecutorArchetype() = delete;
  explicit ExecutorArchetype(int) {}
  ExecutorArchetype(const ExecutorArchetype&) = default;
  ExecutorArchetype& operator=(const ExecutorArchetype&) = delete;
  template <class Body>
  void parallel_for(std::int64_t count, const Body& body) const {
    SerialExecutor{}.parallel_for(count, body);
  }
};

struct AnglesArchetype {
  AnglesArchetype() = delete;
  static constexpr bool uniform = false;
  static double angle(double old_frequency, std::int32_t from, double new_frequency, std::int32_t to) {
    return ExactAngles::angle(old_frequency, from, new_frequency, to);
  }
};

static_assert(LayerwiseHost<HostArchetype> && !AttentionReportingHost<HostArchetype> && KvSource<SourceArchetype>);
static_assert(ScoringPassHost<PassHostArchetype> && !LayerwiseHost<PassHostArchetype> && !PassHost<HostArchetype>);
static_assert(ProbingPassHost<ProbingArchetype> && !ProbingPassHost<PassHostArchetype>);
static_assert(Score<ScoreArchetype> && !ValidatedScore<ScoreArchetype> && Budget<BudgetArchetype>);
static_assert(Executor<ExecutorArchetype> && AngleRule<AnglesArchetype>);

// [two fresh][the chunk's four rows, from position 4 on][one fresh]
struct SevenRows {
  std::vector<TokenId> fresh = {1, 2}, cached = {3, 4, 5, 6}, question = {7};
  ChunkInfo chunk;
  std::vector<Segment> segments;
  Result<Prompt> prompt = Prompt();
  std::vector<Row> outputs = {Row(6)};

  SevenRows() {
    chunk.tokens = cached;
    chunk.first_position = Position(1);
    segments = {fresh_segment(fresh), cached_segment(chunk, Position(4)), fresh_segment(question)};
    prompt = Prompt::make(segments, Position(100));
    REQUIRE(prompt.ok());
  }
  SevenRows(const SevenRows&) = delete;
  SevenRows& operator=(const SevenRows&) = delete;
};

// Reused rows as placed: three positions on, pair (0, 1) turned.
void check_placed(const std::vector<float>& keys, const std::vector<float>& values, int row) {
  const auto at = static_cast<std::size_t>(row + 2);
  CHECK(keys[at * kKeyDim] == doctest::Approx(row * std::cos(1.5)));
  CHECK(keys[at * kKeyDim + 1] == doctest::Approx(row * std::sin(1.5)));
  CHECK(keys[at * kKeyDim + 2] == static_cast<float>(row));
  CHECK(keys[at * kKeyDim + 3] == static_cast<float>(row));
  for (std::size_t d = 0; d < kValueDim; ++d) CHECK(values[at * kValueDim + d] == static_cast<float>(row));
}

template <class Angles, class Backend>
void blend_archetypes(const Backend& backend) {
  const SevenRows scene;
  const Result<Prompt>& prompt = scene.prompt;
  const std::vector<Row>& outputs = scene.outputs;

  using Selector = DeviationSelector<ScoreArchetype, BudgetArchetype>;
  LayerwiseFusor<Selector, Backend, Angles> fusor(Selector(ScoreArchetype(0), BudgetArchetype(0)), backend);
  HostArchetype host(0);
  SourceArchetype source(0);
  std::vector<std::byte> memory(fusor.workspace_bytes(prompt.value, kKeyDim));
  REQUIRE(blend(host, source, fusor, prompt.value, outputs, memory).ok());
  CHECK(host.committed == 7);
  CHECK(host.ran == std::vector<std::size_t>{7, 7});
  CHECK(fusor.report().rows_selected == 1);
  for (std::size_t row = 0; row < 7; ++row) {  // all ran layers 0 and 1, so that all are fresh there
    CHECK(host.value_memory[1][row * kValueDim + 5] == 100.0f + static_cast<float>(row));
  }

  // Without a choice only the fresh rows run, and the reused ones are placed.
  using Reuse = DeviationSelector<ScoreArchetype, NoRows>;
  LayerwiseFusor<Reuse, Backend, Angles> reuse(Reuse(ScoreArchetype(0)), backend);
  REQUIRE(blend(host, source, reuse, prompt.value, outputs, memory).ok());
  for (int row = 0; row < 4; ++row) check_placed(host.key_memory[1], host.value_memory[1], row);
}

template <class Angles, class Backend>
void blend_pass_archetypes(const Backend& backend, bool ranges) {
  const SevenRows scene;
  // Scores come from layer 0, so that layer 1 shows what was chosen: value deviations are 2 at every row, and the
  // lowest row wins.
  using Selector = DeviationSelector<ScoreArchetype, BudgetArchetype>;
  LayerwiseFusor<Selector, Backend, Angles> fusor(Selector(ScoreArchetype(0), BudgetArchetype(0), 0), backend);
  PassHostArchetype host(0, ranges);
  SourceArchetype source(0);
  std::vector<std::byte> memory(fusor.workspace_bytes(scene.prompt.value, kKeyDim));
  REQUIRE(blend(host, source, fusor, scene.prompt.value, scene.outputs, memory).ok());
  CHECK(host.committed == 7);
  CHECK(host.ran == std::vector<std::size_t>{4});
  CHECK(host.layers_ran == std::vector<int>{2});
  CHECK(fusor.report().rows_selected == 1);
  for (const int row : {0, 1, 2, 6}) {
    CHECK(host.value_memory[1][static_cast<std::size_t>(row) * kValueDim + 5] == 100.0f + static_cast<float>(row));
  }
  for (const int row : {1, 2, 3}) check_placed(host.key_memory[1], host.value_memory[1], row);
  for (std::size_t row = 0; row < 7; ++row) CHECK(host.key_memory[0][row * kKeyDim] == static_cast<float>(row));
}

void blend_probing_archetypes() {
  const SevenRows scene;
  using Selector = DeviationSelector<AttentionMass, BudgetArchetype>;
  LayerwiseFusor<Selector, BackendArchetype> fusor(Selector(AttentionMass{}, BudgetArchetype(0)), BackendArchetype(0));
  ProbingArchetype host(0, false);
  SourceArchetype source(0);
  std::vector<std::byte> memory(fusor.workspace_bytes(scene.prompt.value, kKeyDim));
  REQUIRE(blend(host, source, fusor, scene.prompt.value, scene.outputs, memory).ok());
  CHECK(host.committed == 7);
  CHECK(host.ran == std::vector<std::size_t>{3, 4});
  // The last of the reused rows is what is computed besides the fresh ones.
  for (const int row : {0, 1, 5, 6}) {
    CHECK(host.value_memory[1][static_cast<std::size_t>(row) * kValueDim + 5] == 100.0f + static_cast<float>(row));
  }
  for (const int row : {0, 1, 2}) check_placed(host.key_memory[1], host.value_memory[1], row);
}

}  // namespace

TEST_CASE("a blend is made from archetypes, with values of another head_dim than keys") {
  blend_archetypes<ExactAngles>(BackendArchetype(0));
  blend_archetypes<AnglesArchetype>(BackendArchetype(0));
  blend_archetypes<EngineAngles>(EigenBackend<ExecutorArchetype>(ExecutorArchetype(0)));
}

TEST_CASE("a blend by passes is made from archetypes") {
  for (const bool ranges : {false, true}) {
    blend_pass_archetypes<ExactAngles>(BackendArchetype(0), ranges);
    blend_pass_archetypes<AnglesArchetype>(BackendArchetype(0), ranges);
    blend_pass_archetypes<EngineAngles>(EigenBackend<ExecutorArchetype>(ExecutorArchetype(0)), ranges);
  }
  blend_probing_archetypes();
}
