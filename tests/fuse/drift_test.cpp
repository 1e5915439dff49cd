// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// CommonDrift against an oracle that compares each pair of directions, alone and within whole blends.
#include <kvblend/codec/floats.hpp>
#include <kvblend/codec/fp8.hpp>
#include <kvblend/codec/ggml_blocks.hpp>
#include <kvblend/codec/scaled.hpp>
#include <kvblend/eigen.hpp>
#include <kvblend/fuse/drift.hpp>

#include "../backend/support.hpp"
#include "tiny_pass_host.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

using namespace kvblend;
using namespace tiny;

namespace {

using Vector = std::vector<double>;

double dot(const Vector& a, const Vector& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// What rows move by whose fellows deviated so.
Vector expected_move(const std::vector<Vector>& deviations, std::size_t values, double share = 1) {
  Vector move(values);
  std::vector<Vector> directions;
  double inverse = 0;
  for (const Vector& deviation : deviations) {
    const double length = std::sqrt(dot(deviation, deviation));
    if (!(length > 0) || !std::isfinite(length)) continue;
    inverse += 1 / length;
    directions.push_back(deviation);
    for (double& value : directions.back()) value /= length;
  }
  const auto n = static_cast<double>(directions.size());
  if (directions.size() < 2) return move;
  double cosine = 0;
  for (std::size_t i = 0; i < directions.size(); ++i) {
    for (std::size_t j = 0; j < directions.size(); ++j) {
      if (i != j) cosine += dot(directions[i], directions[j]) / (n * (n - 1));
    }
    for (std::size_t k = 0; k < values; ++k) move[k] += directions[i][k] / n;
  }
  const double squared = dot(move, move);
  for (double& value : move) value *= cosine > 0 ? share * n / inverse * cosine / squared : 0;
  return move;
}

constexpr std::int32_t kHeads = 3;
constexpr std::int32_t kDim = 32;
constexpr double kShare = 1;

const std::byte* bytes_of_floats(const std::vector<float>& values) {
  return reinterpret_cast<const std::byte*>(values.data());
}

// Two runs, rows 2 to 41 and 45 to 52, of which some are recomputed.
struct Planes {
  std::array<PlacedRun, 2> runs;
  std::vector<Row> active;
  std::vector<DriftRole> roles = std::vector<DriftRole>(60, DriftRole::moves);
  std::vector<float> moves = std::vector<float>(runs.size() * kHeads * kDim);

  explicit Planes(const std::vector<int>& rows) {
    runs[0].run = {Row(2), 0, 40, Position(0), Position(2)};
    runs[1].run = {Row(45), 0, 8, Position(0), Position(45)};
    for (const int row : rows) {
      active.emplace_back(row);
      roles[static_cast<std::size_t>(row)] = DriftRole::tells;
    }
  }
};

// Reused rows, and fresh ones of the active among them that deviate by a common part and by one of their own.
template <class P, class Random>
std::vector<std::vector<Vector>> deviate(const Planes& planes, const P& reused, std::vector<float>& fresh, double own,
                                         Random& random) {
  std::normal_distribution<double> normal;
  std::array<Vector, 2> common;
  for (Vector& values : common) {
    for (int i = 0; i < kHeads * kDim; ++i) values.push_back(normal(random));
  }
  std::vector<std::vector<Vector>> by_run_and_head(2 * kHeads);
  for (std::size_t i = 0; i < planes.active.size(); ++i) {
    const std::size_t run = planes.active[i].value < 45 ? 0 : 1;
    for (std::int32_t head = 0; head < kHeads; ++head) {
      std::array<float, kDim> values{};
      decode_head(reused, planes.active[i].value, head, values.data());
      Vector deviation;
      for (std::int32_t d = 0; d < kDim; ++d) {
        const double moved = common[run][static_cast<std::size_t>(head * kDim + d)] + own * normal(random);
        const float value = values[static_cast<std::size_t>(d)] + static_cast<float>(moved);
        deviation.push_back(static_cast<double>(value) - static_cast<double>(values[static_cast<std::size_t>(d)]));
        fresh.push_back(value);
      }
      by_run_and_head[run * kHeads + static_cast<std::size_t>(head)].push_back(deviation);
    }
  }
  return by_run_and_head;
}

}  // namespace

TEST_CASE_TEMPLATE("rows that are not recomputed move as the recomputed ones of their run agree", Backend,
                   PortableBackend, kvblend_test::SerialEigen, kvblend_test::TwoThreadEigen) {
  const Planes start({0, 3, 4, 9, 17, 30, 41, 43, 46, 47, 52, 55});
  for (const double own : {0.0, 0.5, 2.0, 20.0}) {
    CAPTURE(own);
    std::mt19937 random(5);
    kvblend_test::Rows<F32Codec> before(60, kHeads, kDim);
    before.fill(random);
    Planes planes = start;
    planes.active = {Row(3), Row(4), Row(9), Row(17), Row(30), Row(41), Row(46), Row(47), Row(52)};
    std::vector<float> fresh;
    const auto deviations = deviate(planes, before.plane(), fresh, own, random);
    const auto fresh_plane =
        dense_plane<F32Codec>(bytes_of_floats(fresh), static_cast<std::int64_t>(planes.active.size()), kHeads, kDim);
    kvblend_test::Rows<F32Codec> rows = before;
    PortableBackend{}.drift(fresh_plane, planes.active, planes.runs, rows.plane(), planes.roles, kShare, planes.moves);
    const auto portable = rows.bytes;
    rows = before;
    Backend{}.drift(fresh_plane, planes.active, planes.runs, rows.plane(), planes.roles, kShare, planes.moves);
    CHECK(rows.bytes == portable);
    for (std::int64_t row = 0; row < 60; ++row) {
      const bool reused = (row >= 2 && row < 42) || (row >= 45 && row < 53);
      for (std::int32_t head = 0; head < kHeads; ++head) {
        CAPTURE(row);
        const auto is = rows.head(row, head);
        const auto was = before.head(row, head);
        if (!reused || planes.roles[static_cast<std::size_t>(row)] != DriftRole::moves) {
          CHECK(is == was);
          continue;
        }
        const auto which = static_cast<std::size_t>((row < 45 ? 0 : kHeads) + head);
        const Vector move = expected_move(deviations[which], kDim);
        for (std::size_t d = 0; d < kDim; ++d) {
          CHECK(static_cast<double>(is[d]) == doctest::Approx(static_cast<double>(was[d]) + move[d]).epsilon(2e-6));
        }
      }
    }
  }
}

TEST_CASE("deviations that are all the same move by just that and opposite or single ones by nothing") {
  const Planes start({3, 4, 5, 46});
  kvblend_test::Rows<F32Codec> before(60, kHeads, kDim);
  const auto moved = [&](std::vector<Row> active, const std::vector<float>& by) {
    Planes planes = start;
    kvblend_test::Rows<F32Codec> rows = before;
    std::vector<float> fresh;
    for (const float value : by) fresh.insert(fresh.end(), kHeads * kDim, value);
    const auto plane =
        dense_plane<F32Codec>(bytes_of_floats(fresh), static_cast<std::int64_t>(active.size()), kHeads, kDim);
    PortableBackend{}.drift(plane, active, planes.runs, rows.plane(), planes.roles, kShare, planes.moves);
    return rows.head(10, 1)[7];
  };
  CHECK(moved({Row(3), Row(4)}, {0.5f, 0.5f}) == doctest::Approx(0.5));
  CHECK(moved({Row(3), Row(4)}, {0.5f, 2.0f}) == doctest::Approx(0.8));  // the harmonic mean
  CHECK(moved({Row(3), Row(4)}, {0.5f, -0.5f}) == 0.0f);
  CHECK(moved({Row(3)}, {0.5f}) == 0.0f);
  CHECK(moved({Row(3), Row(46)}, {0.5f, 0.5f}) == 0.0f);  // of two runs
  CHECK(moved({}, {}) == 0.0f);
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  CHECK(moved({Row(3), Row(4), Row(5)}, {0.5f, 0.5f, nan}) == doctest::Approx(0.5));
  CHECK(moved({Row(3), Row(4), Row(5)}, {0.5f, inf, 0.5f}) == doctest::Approx(0.5));
  CHECK(moved({Row(3), Row(4), Row(5)}, {0.5f, 0.0f, 0.5f}) == doctest::Approx(0.5));  // one that did not deviate
}

TEST_CASE_TEMPLATE("drift goes through the cache's codec", Codec, F16Codec, Bf16Codec, Q8_0Codec) {
  const Planes start({3, 4, 9});
  std::mt19937 random(6);
  kvblend_test::Rows<Codec> before(60, kHeads, kDim);
  before.fill(random);
  Planes planes = start;
  std::vector<float> fresh;
  const auto deviations = deviate(planes, before.plane(), fresh, 0.3, random);
  const auto plane = dense_plane<F32Codec>(bytes_of_floats(fresh), 3, kHeads, kDim);
  const auto check = [&](auto backend) {
    kvblend_test::Rows<Codec> rows = before;
    backend.drift(plane, planes.active, planes.runs, rows.plane(), planes.roles, kShare, planes.moves);
    kvblend_test::Rows<Codec> expected(1, 1, kDim);
    for (std::int64_t row = 0; row < 60; ++row) {
      const bool moves = row >= 2 && row < 42 && planes.roles[static_cast<std::size_t>(row)] == DriftRole::moves;
      for (std::int32_t head = 0; head < kHeads; ++head) {
        auto values = before.head(row, head);
        if (moves) {
          const Vector move = expected_move(deviations[static_cast<std::size_t>(head)], kDim);
          for (std::size_t d = 0; d < kDim; ++d) values[d] += static_cast<float>(move[d]);
          expected.set_head(0, 0, values);
          values = expected.head(0, 0);
        }
        const auto is = rows.head(row, head);
        for (std::size_t d = 0; d < kDim; ++d) {  // a sum that was rounded otherwise may be a step off
          CHECK(std::abs(is[d] - values[d]) <= (moves ? 0.04f : 0.0f));
        }
      }
    }
  };
  check(PortableBackend{});
  check(kvblend_test::TwoThreadEigen{});
}

TEST_CASE("rows that make their own scales get one that fits the moved values") {
  using Scales = TokenScales<ContiguousLayout>;
  constexpr std::int64_t kRows = 60;
  for (const int scales_a_row : {1, kHeads}) {  // one for all heads, or one each
    CAPTURE(scales_a_row);
    std::vector<std::byte> bytes(kRows * kHeads * kDim);
    std::vector<float> memory(static_cast<std::size_t>(kRows * scales_a_row), 0.01f);
    const Scales scales(reinterpret_cast<std::byte*>(memory.data()),
                        ContiguousLayout(kRows, scales_a_row, 1, 4 * scales_a_row, 4));
    const Plane<Scaled<Fp8E4M3Codec, Scales>, ContiguousLayout, std::byte> plane(
        bytes.data(), ContiguousLayout(kRows, kHeads, kDim, kHeads * kDim, kDim), Scaled<Fp8E4M3Codec, Scales>(scales));
    Planes planes({3, 4});
    std::vector<float> fresh;
    for (int i = 0; i < 2; ++i) {
      for (int head = 0; head < kHeads; ++head) fresh.insert(fresh.end(), kDim, head == 0 ? 25.0f : 100.0f);
    }
    // Far beyond what a scale of .01 can hold.
    PortableBackend{}.drift(dense_plane<F32Codec>(bytes_of_floats(fresh), 2, kHeads, kDim), planes.active, planes.runs,
                            plane, planes.roles, kShare, planes.moves);
    const auto all_are = [&](std::int64_t row, std::int32_t head, float expected) {
      std::array<float, kDim> values{};
      decode_head(plane, row, head, values.data());
      for (const float value : values) CHECK(value == doctest::Approx(expected).epsilon(1e-5));
    };
    all_are(10, 0, 25);
    all_are(10, 2, 100);
    all_are(3, 2, 0);  // recomputed
    all_are(43, 2, 0);
  }
}

namespace {

constexpr float kBlendShare = 0.7f;

template <class Backend = PortableBackend, class Selector>
Status drift_run(Scene& scene, FloatHost& host, Selector selector, BlendReport* report = nullptr,
                 std::size_t missing = 0, float share = kBlendShare) {
  const Config& c = scene.model.config;
  std::vector<float> moves(CommonDrift::floats(scene.prompt, std::int64_t{c.kv_heads} * c.head_dim) - missing);
  const CommonDrift drift{moves, share};
  LayerwiseFusor<Selector, Backend, ExactAngles, CommonDrift> fusor(selector, Backend{}, drift);
  std::vector<std::byte> memory(fusor.workspace_bytes(scene.prompt, c.head_dim));
  Source source = scene.source();
  return blend(host, source, fusor, scene.prompt, scene.outputs, memory, report);
}

bool runs_at(const Scene& scene, const std::vector<bool>& chosen, int first, int layer, int row) {
  const auto r = static_cast<std::size_t>(row);
  const bool output = std::find(scene.outputs.begin(), scene.outputs.end(), Row(row)) != scene.outputs.end();
  return !scene.cached[r] || layer <= first || chosen[r] || output;
}

// The oracle of a blend in which the rows in `chosen` run at the layers from `first` on, and all before.
Prefill drifted(Scene& scene, const std::vector<bool>& chosen, int first) {
  const Config& c = scene.model.config;
  const auto computes = [&](int layer, int row) { return runs_at(scene, chosen, first, layer, row); };
  const auto is_output = [&](Row row) {
    return std::find(scene.outputs.begin(), scene.outputs.end(), row) != scene.outputs.end();
  };
  const auto move = [&](std::size_t l, std::vector<std::vector<double>>& keys,
                        std::vector<std::vector<double>>& values) {
    if (l == 0) return;
    for (const Segment& segment : scene.prompt.segments()) {
      if (segment.kind != SegmentKind::cached || segment.exact) continue;
      for (const bool of_keys : {true, false}) {
        auto& now = of_keys ? keys : values;
        for (int head = 0; head < c.kv_heads; ++head) {
          const auto slice = [&](const Vector& row) {
            return Vector(row.begin() + head * c.head_dim, row.begin() + (head + 1) * c.head_dim);
          };
          std::vector<Vector> deviations;
          for (Row row = segment.first_row; row < segment.end_row(); ++row) {
            const auto r = static_cast<std::size_t>(row.value);
            if (!computes(static_cast<int>(l), row.value) || is_output(row)) continue;
            Vector was = of_keys ? scene.reused.keys[l][r] : scene.reused.values[l][r];
            if (of_keys) rotate(scene.model.ropes[l], was, scene.positions[r]);
            deviations.push_back(slice(now[r]));
            const Vector reused = slice(was);
            for (std::size_t d = 0; d < reused.size(); ++d) deviations.back()[d] -= reused[d];
          }
          const Vector by =
              expected_move(deviations, static_cast<std::size_t>(c.head_dim), static_cast<double>(kBlendShare));
          for (Row row = segment.first_row; row < segment.end_row(); ++row) {
            if (computes(static_cast<int>(l), row.value)) continue;
            for (std::size_t d = 0; d < by.size(); ++d) {
              now[static_cast<std::size_t>(row.value)][static_cast<std::size_t>(head * c.head_dim) + d] += by[d];
            }
          }
        }
      }
    }
  };
  return reference(scene.model, scene.tokens, scene.positions, &scene.reused, computes, move);
}

// Chooses these rows, at whatever time a score of kind `Like` would.
template <class Like>
struct Chosen : Like {
  const std::vector<bool>* rows = nullptr;
  [[nodiscard]] Status operator()(const ScoreInputs& inputs, std::span<float> out) const {
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = (*rows)[static_cast<std::size_t>(inputs.rows[i].value)] ? 1.0f : 0.0f;
    }
    return {};
  }
};

template <class Like, class Backend>
void compare_with_oracle(Scene& scene, const std::vector<bool>& chosen, int first) {
  CAPTURE(first);
  const auto count = static_cast<std::int32_t>(std::count(chosen.begin(), chosen.end(), true));
  Chosen<Like> score;
  score.rows = &chosen;
  FloatHost host = make_host(scene.model, scene.prompt.rows());
  BlendReport report;
  REQUIRE(
      drift_run<Backend>(scene, host, DeviationSelector<Chosen<Like>, CountBudget>(score, CountBudget{count}), &report)
          .ok());
  CHECK(report.fusor.rows_selected == count);
  const Prefill oracle = drifted(scene, chosen, first);
  CHECK(cache_error(scene, host, oracle) <= 1e-5);
  CHECK(largest_difference(host.logits(host.outputs() - 1), oracle.logits.back()) <= 1e-4);
  // It is not what a blend without drift gives.
  const Prefill plain = reference(scene.model, scene.tokens, scene.positions, &scene.reused,
                                  [&](int layer, int row) { return runs_at(scene, chosen, first, layer, row); });
  CHECK(cache_error(scene, host, plain) > 1e-3);
}

}  // namespace

TEST_CASE_TEMPLATE("a blend with drift gives what the oracle does", Backend, PortableBackend, EigenBackend<>,
                   kvblend_test::TwoThreadEigen) {
  for (const int gap : {0, 40}) {
    Config config;
    config.odd_layers_theta = 100;
    config.layer_without_rope = 2;
    Scene scene(config, 13, gap);
    std::vector<bool> chosen(scene.tokens.size());
    for (const std::size_t row : {5u, 8u, 9u, 14u, 17u, 20u, 22u}) chosen[row] = true;
    compare_with_oracle<FirstK, Backend>(scene, chosen, -1);
    compare_with_oracle<AttentionMass, Backend>(scene, chosen, -1);
    compare_with_oracle<AttentionValueMass, Backend>(scene, chosen, -1);
    compare_with_oracle<KeyValueDeviation, Backend>(scene, chosen, 1);
    scene.outputs = {Row(10), Row(24), Row(28)};  // of which the first two are reused rows that run in a probe too
    compare_with_oracle<FirstK, Backend>(scene, chosen, -1);
    compare_with_oracle<AttentionMass, Backend>(scene, chosen, -1);
    compare_with_oracle<KeyValueDeviation, Backend>(scene, chosen, 1);
  }
}

TEST_CASE("all rows or none recomputed leave nothing to move") {
  Scene scene;
  const auto check = [&](auto selector) {
    FloatHost plain = make_host(scene.model, scene.prompt.rows());
    REQUIRE(run(scene, plain, selector).ok());
    FloatHost host = make_host(scene.model, scene.prompt.rows());
    REQUIRE(drift_run(scene, host, selector).ok());
    CHECK(host.memory() == plain.memory());
  };
  for (const double ratio : {0.0, 1.0}) {
    CAPTURE(ratio);
    check(at_ratio<FirstK>(ratio));
    check(at_ratio<KeyValueDeviation>(ratio));
    check(at_ratio<AttentionMass>(ratio));
  }
}

TEST_CASE("an exact prefix does not move whatever runs in it") {
  Scene scene({}, 3);
  scene.segments = {cached_segment(scene.a->info), fresh_segment(scene.instructions), cached_segment(scene.b->info),
                    fresh_segment(scene.question)};
  scene.lay_out();
  REQUIRE(scene.prompt.exact_end() == Row(11));
  scene.outputs = {Row(4), Row(5), Row(10), Row(28)};
  FloatHost host = make_host(scene.model, scene.prompt.rows());
  REQUIRE(drift_run(scene, host, at_ratio<FirstK>(0.5)).ok());
  FloatHost plain = make_host(scene.model, scene.prompt.rows());
  REQUIRE(run(scene, plain, at_ratio<FirstK>(0.5)).ok());
  const auto values = [&](FloatHost& of, std::int64_t row) {
    std::vector<float> out(static_cast<std::size_t>(scene.model.config.head_dim));
    decode_head(of.values(3), row, 0, out.data());
    return out;
  };
  for (std::int64_t row = 0; row < 11; ++row) CHECK(values(host, row) == values(plain, row));
  CHECK(values(host, 22) != values(plain, 22));  // one of the passage that is reused
}

TEST_CASE("a share outside of its range is an error and of 0 moves nothing") {
  Scene scene;
  FloatHost plain = make_host(scene.model, scene.prompt.rows());
  REQUIRE(run(scene, plain, at_ratio<FirstK>(0.4)).ok());
  for (const float share : {-0.1f, 1.1f, std::numeric_limits<float>::quiet_NaN(), 0.0f}) {
    CAPTURE(share);
    FloatHost host = make_host(scene.model, scene.prompt.rows());
    const Status status = drift_run(scene, host, at_ratio<FirstK>(0.4), nullptr, 0, share);
    CHECK(status.ok() == (share == 0.0f));
    if (!status.ok()) CHECK(std::string(status.where()) == "drift share");
    if (status.ok()) CHECK(host.memory() == plain.memory());
  }
}

TEST_CASE("too little memory for the drift is an error that names it and the blend is undone") {
  Scene scene;
  FloatHost host = make_host(scene.model, scene.prompt.rows());
  const Status status = drift_run(scene, host, at_ratio<FirstK>(0.4), nullptr, 1);
  CHECK(status.code() == StatusCode::insufficient_space);
  CHECK(std::string(status.where()) == "drift memory");
  CHECK(host.committed == 0);
}

namespace {

template <class Backend, class Host, class Selector>
Status drift_passes(Scene& scene, Host& host, const Selector& selector, PassReport* report = nullptr,
                    std::size_t missing = 0) {
  const Config& c = scene.model.config;
  std::vector<float> moves(CommonDrift::floats(scene.prompt, std::int64_t{c.kv_heads} * c.head_dim) - missing);
  LayerwiseFusor<Selector, Backend, ExactAngles, CommonDrift> fusor(selector, Backend{}, {moves, kBlendShare});
  std::vector<std::byte> memory(fusor.workspace_bytes(scene.prompt, c.head_dim));
  Source source = scene.source();
  return blend(host, source, fusor, scene.prompt, scene.outputs, memory, report);
}

template <class Backend, class Selector>
void compare_hosts(Scene& scene, const Selector& selector, const std::vector<int>& cuts = {}) {
  FloatHost layers = make_host(scene.model, scene.prompt.rows());
  REQUIRE(drift_run<Backend>(scene, layers, selector).ok());
  for (const bool ranges : {true, false}) {
    CAPTURE(ranges);
    TinyPassHost host(scene.model, ranges);
    host.cuts = cuts;
    PassReport report;
    REQUIRE(drift_passes<Backend>(scene, host, selector, &report).ok());
    CHECK(host.misuses == 0);
    CHECK(host.settled > 0);
    CHECK(report.fusor.merge_s > 0);
    for (std::size_t l = 0; l < host.committed_keys.size(); ++l) {
      CAPTURE(l);
      CHECK(same_bits(layers.memory()[2 * l], host.committed_keys[l]));
      CHECK(same_bits(layers.memory()[2 * l + 1], host.committed_values[l]));
    }
    for (std::size_t i = 0; i < scene.outputs.size(); ++i) CHECK(host.logits[i] == layers.logits(i));
  }
}

}  // namespace

TEST_CASE_TEMPLATE("a host of whole passes that settles its layers ends with the same bits", Backend, PortableBackend,
                   EigenBackend<>) {
  Config config;
  config.odd_layers_theta = 100;
  Scene scene(config, 13);
  const auto all = [&](const std::vector<int>& cuts) {
    compare_hosts<Backend>(scene, at_ratio<FirstK>(0.4), cuts);
    compare_hosts<Backend>(scene, at_ratio<AttentionMass>(0.4), cuts);
    compare_hosts<Backend>(scene, at_ratio<AttentionValueMass>(0.4), cuts);
    compare_hosts<Backend>(scene, at_ratio<KeyValueDeviation>(0.4), cuts);
  };
  all({});
  // In parts, where these do not cut a passage: each drifts by its own rows.
  std::vector<int> cuts;
  for (const Segment& segment : scene.prompt.segments()) {
    if (segment.first_row > Row(0)) cuts.push_back(segment.first_row.value);
  }
  REQUIRE(cuts.size() > 1);
  all(cuts);
  scene.outputs = {Row(10), Row(24), Row(28)};
  all({});
}

TEST_CASE("a passage in two parts drifts in each by the rows of that part") {
  Scene scene;
  const Segment& passage = scene.prompt.segments()[1];
  REQUIRE(passage.kind == SegmentKind::cached);
  TinyPassHost whole(scene.model, true);
  REQUIRE(drift_passes<PortableBackend>(scene, whole, at_ratio<RandomScore>(0.6)).ok());
  TinyPassHost host(scene.model, true);
  host.cuts = {passage.first_row.value + passage.size() / 2};
  REQUIRE(drift_passes<PortableBackend>(scene, host, at_ratio<RandomScore>(0.6)).ok());
  CHECK(host.misuses == 0);
  TinyPassHost plain(scene.model, true);
  REQUIRE(run_passes(scene, plain, at_ratio<RandomScore>(0.6)).ok());
  // Both halves moved, each once: reused rows of a half all by the same, which is not the whole passage's.
  const std::size_t width = static_cast<std::size_t>(scene.model.config.kv_heads * scene.model.config.head_dim);
  const auto move_of = [&](TinyPassHost& of, std::int32_t row) {
    std::vector<float> out;
    for (std::size_t i = 0; i < width; ++i) {
      const std::size_t at = static_cast<std::size_t>(row) * width + i;
      out.push_back(of.committed_values[1][at] - plain.committed_values[1][at]);
    }
    return out;
  };
  const auto ran = [&](std::int32_t row) {
    const auto& rows = host.passes[0].rows;
    return std::find(rows.begin(), rows.end(), row) != rows.end();
  };
  std::vector<std::vector<float>> halves(2);
  for (std::int32_t row = passage.first_row.value; row < passage.end_row().value; ++row) {
    if (ran(row)) continue;
    auto& half = halves[row < host.cuts[0] ? 0 : 1];
    const auto move = move_of(host, row);
    if (half.empty()) half = move;
    CHECK(largest_difference_of(half, move) <= 1e-5);
    CHECK(largest_difference_of(move, move_of(whole, row)) > 1e-4);
  }
  REQUIRE(!halves[0].empty());
  REQUIRE(!halves[1].empty());
  CHECK(largest_difference_of(halves[0], halves[1]) > 1e-4);
}

TEST_CASE("rows that a host adds to a pass do not move") {
  Scene scene;
  const auto selector = at_ratio<FirstK>(0.4);
  TinyPassHost host(scene.model, true);
  host.extra = {scene.prompt.segments()[1].end_row().value - 1};
  REQUIRE(drift_passes<PortableBackend>(scene, host, selector).ok());
  CHECK(host.misuses == 0);
  const std::size_t width = static_cast<std::size_t>(scene.model.config.kv_heads * scene.model.config.head_dim);
  TinyPassHost plain(scene.model, true);
  plain.extra = host.extra;
  REQUIRE(run_passes(scene, plain, selector).ok());
  // In layer 1 what it ran saw the same: no row moved before.
  const auto first = static_cast<std::size_t>(*host.extra.begin()) * width;
  for (std::size_t i = first; i < first + width; ++i) {
    CHECK(host.committed_values[1][i] == plain.committed_values[1][i]);
  }
  CHECK(host.committed_values[1] != plain.committed_values[1]);
}

TEST_CASE("an error in a layer that settles ends the pass and the blend is undone") {
  Scene scene;
  TinyPassHost host(scene.model, true);
  const Status status = drift_passes<PortableBackend>(scene, host, at_ratio<FirstK>(0.4), nullptr, 1);
  CHECK(status.code() == StatusCode::insufficient_space);
  CHECK(std::string(status.where()) == "drift memory");
  CHECK(host.aborts == 1);
  CHECK(host.commits == 0);
}

namespace {

// Shows its layers as those of other rows than run.
struct LostPassHost : TinyPassHost {
  using TinyPassHost::TinyPassHost;
  using TinyPassHost::compute;

  template <class Settle>
  Status compute(LayerRange range, std::span<const Row> rows, std::span<const Row> outputs, const Settle& settle) {
    return TinyPassHost::compute(
        range, rows, outputs,
        [&](std::int32_t layer, Row, Row, std::span<const Row> ran, const auto& fresh_keys, const auto& fresh_values) {
          std::vector<Row> others(ran.begin(), ran.end());
          if (others.size() > 1) others[1] = said;
          return settle(layer, first, end, others, fresh_keys, fresh_values);
        });
  }

  Row first{0}, end{0}, said{0};
};

}  // namespace

TEST_CASE("a host that shows rows that are not there is told which") {
  Scene scene;
  const std::int32_t rows = scene.prompt.rows();
  const auto check = [&](Row first, Row end, Row said, const char* where) {
    CAPTURE(where);
    LostPassHost host(scene.model, true);
    host.first = first;
    host.end = end;
    host.said = said;
    const Status status = drift_passes<PortableBackend>(scene, host, at_ratio<FirstK>(0.4));
    CHECK(status.code() == StatusCode::out_of_range);
    CHECK(std::string(status.where()) == where);
    CHECK(host.aborts == 1);
  };
  check(Row(0), Row(rows + 1), Row(1), "settle part");
  check(Row(-1), Row(rows), Row(1), "settle part");
  check(Row(4), Row(3), Row(1), "settle part");
  check(Row(0), Row(rows), Row(0), "settle rows[1]");
  check(Row(0), Row(rows), Row(rows), "settle rows[1]");
  check(Row(1), Row(rows), Row(1), "settle rows[0]");
}
