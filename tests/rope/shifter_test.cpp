// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// RopeShifter refuses what cannot be moved before it writes anything; its tables hold what the angle rules say; keys
// move between the frequencies of two lengths, and by positions listed token by token.
#include <kvblend/codec/floats.hpp>
#include <kvblend/codec/fp8.hpp>
#include <kvblend/codec/scaled.hpp>
#include <kvblend/memory/layouts.hpp>
#include <kvblend/rope/builders.hpp>
#include <kvblend/rope/scaling.hpp>
#include <kvblend/rope/shifter.hpp>

#include <doctest/doctest.h>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

using namespace kvblend;

namespace {

constexpr std::int32_t kLargest = std::numeric_limits<std::int32_t>::max();

// A valid move of four keys, to be spoilt in one place.
struct Move {
  RopeSpec stored = plain_rope(8, 10000).value;
  RopeSpec wanted = stored;
  ShiftRun run{Row(2), 0, 4, Position(3), Position(9)};
  std::vector<std::byte> from = std::vector<std::byte>(4 * 2 * 8 * 4, std::byte{0x3f});
  std::vector<std::byte> to = std::vector<std::byte>(6 * 2 * 8 * 4, std::byte{7});
  ConstContiguousPlane<F32Codec> source = dense_plane<F32Codec>(static_cast<const std::byte*>(from.data()), 4, 2, 8);
  ContiguousPlane<F32Codec> destination = dense_plane<F32Codec>(to.data(), 6, 2, 8);
  std::vector<float> scratch = std::vector<float>(8);
  std::vector<AxisPositions> old_positions = std::vector<AxisPositions>(4, AxisPositions{{3, 4, 5}});
  std::vector<AxisPositions> new_positions = {{{9, 9, 9}}, {{1, 1, 1}}, {{3, 5, 4}}, {{kLargest, 0, 5}}};

  Move() = default;
  Move(const Move&) = delete;
  Move& operator=(const Move&) = delete;
  Status shift() { return RopeShifter<>{}.shift(stored, wanted, run, source, destination, scratch); }
  Status shift_listed() {
    return RopeShifter<>{}.shift(stored, wanted, RowMove{run.destination, run.source, run.count}, old_positions,
                                 new_positions, source, destination, scratch);
  }
};

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    largest = std::max(largest, std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
  }
  return largest;
}

// Keys [rows, 1 head, head_dim] in float, and their rotation in double: the oracle.
struct Keys {
  int head_dim;
  std::vector<std::byte> bytes;

  Keys(int rows, int values) : head_dim(values), bytes(static_cast<std::size_t>(rows * values * 4)) {}
  [[nodiscard]] int rows() const { return static_cast<int>(bytes.size()) / 4 / head_dim; }
  auto plane() { return dense_plane<F32Codec>(bytes.data(), rows(), 1, head_dim); }
  auto plane() const { return dense_plane<F32Codec>(bytes.data(), rows(), 1, head_dim); }
  [[nodiscard]] std::vector<float> row(int row) const {
    std::vector<float> values(static_cast<std::size_t>(head_dim));
    std::memcpy(values.data(), bytes.data() + row * head_dim * 4, values.size() * 4);
    return values;
  }
  void set(int row, const std::vector<float>& values) {
    std::memcpy(bytes.data() + row * head_dim * 4, values.data(), values.size() * 4);
  }
  void fill(std::mt19937& random) {
    std::normal_distribution<float> normal;
    for (int r = 0; r < rows(); ++r) {
      std::vector<float> values(static_cast<std::size_t>(head_dim));
      for (float& value : values) value = normal(random);
      set(r, values);
    }
  }
  [[nodiscard]] double norm() const {
    double sum = 0;
    for (const float value : row(0)) sum += static_cast<double>(value) * static_cast<double>(value);
    return std::sqrt(sum);
  }
  [[nodiscard]] double distance_to(const Keys& other) const {
    double largest = 0;
    for (int r = 0; r < rows(); ++r) largest = std::max(largest, largest_difference(row(r), other.row(r)));
    return largest;
  }
  // As an engine rotates fresh keys, row i at positions[i]; rows beyond the list stay.
  [[nodiscard]] Keys turned(const RopeSpec& spec, const std::vector<AxisPositions>& positions) const {
    Keys out = *this;
    for (std::size_t r = 0; r < positions.size(); ++r) {
      const std::vector<float> in = row(static_cast<int>(r));
      std::vector<float> key = in;
      for (int pair = 0; pair < spec.rotary_dim / 2; ++pair) {
        const auto i = static_cast<std::size_t>(pair);
        const double angle = spec.inv_freq[i] * positions[r].axis[spec.axis_of_pair[i]];
        const bool neox = spec.pairing == RopePairing::neox;
        const auto a = static_cast<std::size_t>(spec.rotary_offset + (neox ? pair : 2 * pair));
        const auto b = a + static_cast<std::size_t>(neox ? spec.rotary_dim / 2 : 1);
        const double x = static_cast<double>(in[a]) * spec.attention_factor;
        const double y = static_cast<double>(in[b]) * spec.attention_factor;
        key[a] = static_cast<float>(x * std::cos(angle) - y * std::sin(angle));
        key[b] = static_cast<float>(y * std::cos(angle) + x * std::sin(angle));
      }
      out.set(static_cast<int>(r), key);
    }
    return out;
  }
  [[nodiscard]] Keys turned(const RopeSpec& spec, int first_position) const {
    std::vector<AxisPositions> positions;
    for (int r = 0; r < rows(); ++r) {
      positions.push_back({{first_position + r, first_position + r, first_position + r}});
    }
    return turned(spec, positions);
  }
  template <class Angles>
  void receive(const RopeSpec& stored, const RopeSpec& wanted, const ShiftRun& run, const Keys& source) {
    std::vector<float> scratch(static_cast<std::size_t>(RopeShifter<Angles>::scratch_size(stored, wanted, run)));
    const Status status = RopeShifter<Angles>{}.shift(stored, wanted, run, source.plane(), plane(), scratch);
    REQUIRE_MESSAGE(status.ok(), status.where() << ": " << status.message());
  }
};

}  // namespace

TEST_CASE("a bad move is refused by name and writes nothing") {
  struct Case {
    const char* where;
    StatusCode code;
    std::function<void(Move&)> spoil;
  };
  const Case cases[] = {
      {"rope pairing", StatusCode::mismatch, [](Move& m) { m.wanted.pairing = RopePairing::interleaved; }},
      {"rope rotary_dim", StatusCode::invalid_argument, [](Move& m) { m.stored.rotary_dim = 5; }},
      {"rope rotary_dim", StatusCode::invalid_argument, [](Move& m) { m.wanted.rotary_dim = 10; }},
      {"rope rotary_dim", StatusCode::mismatch, [](Move& m) { m.wanted = no_rope(8).value; }},
      {"rope attention_factor", StatusCode::mismatch, [](Move& m) { m.wanted.attention_factor = 1.25; }},
      {"rope axis_of_pair[3]", StatusCode::mismatch, [](Move& m) { m.wanted.axis_of_pair[3] = 1; }},
      {"rope axis_of_pair[0]", StatusCode::invalid_argument, [](Move& m) { m.stored.axis_of_pair[0] = 3; }},
      {"run count", StatusCode::invalid_argument, [](Move& m) { m.run.count = -1; }},
      {"run old_first", StatusCode::out_of_range, [](Move& m) { m.run.old_first = Position(-1); }},
      {"run new_first", StatusCode::out_of_range, [](Move& m) { m.run.new_first = Position(-5); }},
      {"run new_first", StatusCode::out_of_range, [](Move& m) { m.run.new_first = Position(kLargest - 2); }},
      {"run source", StatusCode::out_of_range, [](Move& m) { m.run.source = -1; }},
      {"run destination", StatusCode::out_of_range, [](Move& m) { m.run.destination = Row(-1); }},
      {"run destination", StatusCode::out_of_range, [](Move& m) { m.run.destination = Row(kLargest); }},
      {"source", StatusCode::out_of_range, [](Move& m) { m.run.source = 1; }},
      {"destination", StatusCode::out_of_range, [](Move& m) { m.run.destination = Row(3); }},
      {"destination", StatusCode::mismatch, [](Move& m) { m.destination.layout.head_count = 1; }},
      {"destination", StatusCode::invalid_argument, [](Move& m) { m.destination.layout.head_count = 0; }},
      {"source", StatusCode::invalid_argument, [](Move& m) { m.source.layout.head_values = 0; }},
      {"head_dim", StatusCode::mismatch, [](Move& m) { m.source.layout.head_values = m.source.layout.tile_size = 4; }},
      {"head_dim", StatusCode::mismatch, [](Move& m) { m.stored = m.wanted = plain_rope(6, 10000).value; }},
      {"source", StatusCode::invalid_argument, [](Move& m) { m.source.base = nullptr; }},
      {"scratch", StatusCode::insufficient_space, [](Move& m) { m.scratch.resize(7); }},
  };
  for (const Case& c : cases) {
    CAPTURE(std::string(c.where));
    Move move;
    c.spoil(move);
    const auto before = move.to;
    const Status status = move.shift();
    CHECK(status.code() == c.code);
    CHECK(std::string(status.where()) == c.where);
    CHECK(move.to == before);
  }
  Move good;
  const auto before = good.to;
  CHECK(good.shift().ok());
  CHECK(good.to != before);
}

TEST_CASE("a bad move by listed positions is refused by name and writes nothing") {
  struct Case {
    const char* where;
    StatusCode code;
    std::function<void(Move&)> spoil;
  };
  const Case cases[] = {
      {"old_positions", StatusCode::mismatch, [](Move& m) { m.old_positions.pop_back(); }},
      {"old_positions", StatusCode::mismatch, [](Move& m) { m.old_positions.clear(); }},
      {"new_positions", StatusCode::mismatch, [](Move& m) { m.new_positions.push_back({}); }},
      {"old_positions[3]", StatusCode::out_of_range, [](Move& m) { m.old_positions[3].axis[2] = -1; }},
      {"new_positions[0]", StatusCode::out_of_range, [](Move& m) { m.new_positions[0].axis[1] = -7; }},
      {"run count", StatusCode::invalid_argument, [](Move& m) { m.run.count = -1; }},
      {"run source", StatusCode::out_of_range, [](Move& m) { m.run.source = -1; }},
      {"run destination", StatusCode::out_of_range, [](Move& m) { m.run.destination = Row(kLargest); }},
      {"source", StatusCode::out_of_range, [](Move& m) { m.run.source = 1; }},
      {"destination", StatusCode::out_of_range, [](Move& m) { m.run.destination = Row(3); }},
      {"destination", StatusCode::mismatch, [](Move& m) { m.destination.layout.head_count = 1; }},
      {"rope pairing", StatusCode::mismatch, [](Move& m) { m.wanted.pairing = RopePairing::interleaved; }},
      {"rope axis_of_pair[3]", StatusCode::mismatch, [](Move& m) { m.wanted.axis_of_pair[3] = 1; }},
      {"scratch", StatusCode::insufficient_space, [](Move& m) { m.scratch.resize(7); }},
  };
  for (const Case& c : cases) {
    CAPTURE(std::string(c.where));
    Move move;
    c.spoil(move);
    const auto before = move.to;
    const Status status = move.shift_listed();
    CHECK(status.code() == c.code);
    CHECK(std::string(status.where()) == c.where);
    CHECK(move.to == before);
  }
  Move good;
  const auto before = good.to;
  CHECK(good.shift_listed().ok());
  CHECK(good.to != before);
  Move nothing;
  nothing.run.count = 0;
  nothing.old_positions.clear();
  nothing.new_positions.clear();
  nothing.scratch.clear();
  CHECK(nothing.shift_listed().ok());
  CHECK(nothing.to == before);
}

TEST_CASE("keys that stay need no scratch") {
  Move move;
  move.scratch.clear();
  move.run.new_first = move.run.old_first;
  CHECK(RopeShifter<>::scratch_size(move.stored, move.wanted, move.run) == 0);
  CHECK(move.shift().ok());
  CHECK(std::vector<std::byte>(move.to.begin() + 2 * 2 * 8 * 4, move.to.end()) == move.from);
}

TEST_CASE("the largest positions are within reach") {
  Move move;
  move.run.old_first = Position(0);
  move.run.new_first = Position(kLargest - 3);
  CHECK(move.shift().ok());
}

TEST_CASE("a table has one row where the distance decides and a row a token elsewhere") {
  const RopeSpec spec = plain_rope(8, 10000).value;
  const RopeSpec longer = plain_rope(8, 90000).value;
  const ShiftRun run{Row(0), 0, 3, Position(5), Position(2)};
  ShiftRun still = run;
  still.new_first = still.old_first;
  ShiftRun nothing = run;
  nothing.count = 0;
  CHECK(RotationTable::size<ExactAngles>(spec, spec, run) == 8);
  CHECK(RotationTable::size<EngineAngles>(spec, spec, run) == 24);
  CHECK(RotationTable::size<ExactAngles>(spec, longer, run) == 24);
  CHECK(RotationTable::size<ExactAngles>(spec, longer, still) == 24);
  for (const ShiftRun& none : {still, nothing}) {
    CHECK(RotationTable::size<ExactAngles>(spec, spec, none) == 0);
    CHECK(RotationTable::size<EngineAngles>(spec, spec, none) == 0);
    CHECK_FALSE(RotationTable::make<EngineAngles>(spec, spec, none, {}).value.turns());
  }
  CHECK(RotationTable::size<EngineAngles>(no_rope(8).value, no_rope(8).value, run) == 0);
  CHECK_FALSE(RotationTable().turns());

  std::vector<float> storage(24);
  const auto exact = RotationTable::make<ExactAngles>(spec, spec, run, storage);
  REQUIRE(exact.ok());
  CHECK(exact.value.turns());
  for (const int row : {0, 2}) {
    for (std::size_t pair = 0; pair < 4; ++pair) {
      const double angle = -3 * spec.inv_freq[pair];
      CHECK(static_cast<double>(exact.value.cosines(row)[pair]) == doctest::Approx(std::cos(angle)).epsilon(1e-6));
      CHECK(static_cast<double>(exact.value.sines(row)[pair]) == doctest::Approx(std::sin(angle)).epsilon(1e-6));
    }
  }
  const auto engine = RotationTable::make<EngineAngles>(spec, spec, run, storage);
  REQUIRE(engine.ok());
  for (int row = 0; row < 3; ++row) {  // pair 1: frequency 0.1, rounded to float as its products are
    const double turn = static_cast<double>(static_cast<float>(2 + row) * 0.1f) -
                        static_cast<double>(static_cast<float>(5 + row) * 0.1f);
    CHECK(static_cast<double>(engine.value.cosines(row)[1]) == doctest::Approx(std::cos(turn)).epsilon(1e-6));
    CHECK(static_cast<double>(engine.value.sines(row)[1]) == doctest::Approx(std::sin(turn)).epsilon(1e-6));
  }
  const auto lengths = RotationTable::make<ExactAngles>(spec, longer, run, storage);
  REQUIRE(lengths.ok());
  for (int row = 0; row < 3; ++row) {
    for (std::size_t pair = 0; pair < 4; ++pair) {
      const double angle = (2 + row) * longer.inv_freq[pair] - (5 + row) * spec.inv_freq[pair];
      CHECK(static_cast<double>(lengths.value.sines(row)[pair]) == doctest::Approx(std::sin(angle)).epsilon(1e-6));
    }
  }
  CHECK(RotationTable::make<EngineAngles>(spec, spec, run, std::span<float>(storage).first(23)).status.code() ==
        StatusCode::insufficient_space);
  CHECK(RotationTable::make<ExactAngles>(spec, longer, run, std::span<float>(storage).first(23)).status.code() ==
        StatusCode::insufficient_space);
}

// transformers issue 25104: dynamic NTK's base depends on the length, and moving by the distance alone is wrong. Both
// lengths' specs together are right.
TEST_CASE("keys cached at one length's dynamic base move into a prompt of another length") {
  const DynamicNtkScaling scaling{2, 8};
  const RopeSpec at_8 = dynamic_ntk_rope(4, 1e4, scaling, 8).value;
  const RopeSpec at_16 = dynamic_ntk_rope(4, 1e4, scaling, 16).value;
  Keys original(6, 4);
  for (int row = 0; row < 6; ++row) original.set(row, {1, 0.5f, -0.25f, 2});
  const Keys cached = original.turned(at_8, 2);      // by position 2 + row
  const Keys expected = original.turned(at_16, 10);  // the oracle: un-rotated keys at the target position, in double
  const ShiftRun run{Row(0), 0, 6, Position(2), Position(10)};
  Keys moved(6, 4);
  moved.receive<ExactAngles>(at_8, at_16, run, cached);
  CHECK(moved.distance_to(expected) < 1e-6);
  Keys by_distance(6, 4);
  by_distance.receive<ExactAngles>(at_16, at_16, run, cached);
  CHECK(by_distance.distance_to(expected) > 1e-3);
}

// llama.cpp pull request 17945: YaRN's magnitude was applied again by each shift.
TEST_CASE("YaRN's magnitude survives two shifts as it is") {
  YarnScaling scaling;
  scaling.factor = 4;
  scaling.original_length = 4096;
  const RopeSpec spec = yarn_rope(64, 1e6, scaling).value;
  REQUIRE(spec.attention_factor == doctest::Approx(1.1386).epsilon(1e-4));
  std::mt19937 random(11);
  Keys original(1, 64);
  original.fill(random);
  Keys keys = original.turned(spec, 5);
  const double norm = keys.norm();
  CHECK(norm == doctest::Approx(1.1386 * original.norm()).epsilon(1e-4));
  for (const int from : {5, 9}) {
    const ShiftRun run{Row(0), 0, 1, Position(from), Position(from == 5 ? 9 : 12)};
    keys.receive<ExactAngles>(spec, spec, run, Keys(keys));
    CHECK(keys.norm() == doctest::Approx(norm).epsilon(1e-6));
  }
  CHECK(keys.distance_to(original.turned(spec, 12)) < 2e-6);
}

TEST_CASE_TEMPLATE("tokens with three positions turn each pair by its own", Angles, ExactAngles, EngineAngles) {
  std::mt19937 random(12);
  for (int round = 0; round < 50; ++round) {
    CAPTURE(round);
    const RopeSpec spec = with_axes(plain_rope(16, 10000).value, std::vector<std::int32_t>{3, 3, 2},
                                    round % 2 == 0 ? AxisOrder::sectioned : AxisOrder::interleaved)
                              .value;
    const int count = static_cast<int>(random() % 9);
    Keys original(12, 16);
    original.fill(random);
    std::vector<AxisPositions> before(static_cast<std::size_t>(count)), after = before;
    for (std::size_t i = 0; i < before.size(); ++i) {
      for (std::size_t axis = 0; axis < 3; ++axis) {
        before[i].axis[axis] = static_cast<std::int32_t>(random() % 50);
        after[i].axis[axis] = round % 5 == 0 ? before[i].axis[axis] + 7  // one table does
                                             : static_cast<std::int32_t>(random() % 50);
      }
    }
    const Keys stored = original.turned(spec, before);
    const Keys expected = original.turned(spec, after);
    const RowMove move{Row(2), 1, count};
    const auto least = static_cast<std::size_t>(RopeShifter<Angles>::least_scratch(spec));
    std::vector<std::byte> first;
    for (const std::size_t rows : {std::size_t{1}, std::size_t{3}, std::size_t{12}}) {
      // Apart, and within one plane, where rows 1… go to rows 2… and overlap them.
      Keys source(12, 16), apart(12, 16);
      for (int row = 0; row < count; ++row) source.set(1 + row, stored.row(row));
      Keys within = source;
      std::vector<float> scratch(least * rows);
      const RopeShifter<Angles> shifter;
      REQUIRE(shifter.shift(spec, spec, move, before, after, source.plane(), apart.plane(), scratch).ok());
      REQUIRE(shifter.shift(spec, spec, move, before, after, within.plane(), within.plane(), scratch).ok());
      for (int row = 0; row < count; ++row) {
        CHECK(largest_difference(apart.row(2 + row), expected.row(row)) < 1e-5);
        CHECK(apart.row(2 + row) == within.row(2 + row));
      }
      if (first.empty()) first = apart.bytes;
      CHECK(apart.bytes == first);  // whatever the scratch
    }
  }
}

TEST_CASE_TEMPLATE("text under M-RoPE moves as under plain rope, by a run or by a list", Angles, ExactAngles,
                   EngineAngles) {
  const RopeSpec plain = plain_rope(16, 10000).value;
  const RopeSpec spec = with_axes(plain, std::vector<std::int32_t>{3, 3, 2}, AxisOrder::interleaved).value;
  std::mt19937 random(13);
  Keys source(5, 16);
  source.fill(random);
  const ShiftRun run{Row(0), 0, 5, Position(100), Position(4000)};
  std::vector<AxisPositions> before, after;
  for (int row = 0; row < 5; ++row) {
    before.push_back({{100 + row, 100 + row, 100 + row}});
    after.push_back({{4000 + row, 4000 + row, 4000 + row}});
  }
  Keys by_plain(5, 16), by_run(5, 16), by_list(5, 16);
  by_plain.receive<Angles>(plain, plain, run, source);
  by_run.receive<Angles>(spec, spec, run, source);
  std::vector<float> scratch(static_cast<std::size_t>(5 * RopeShifter<Angles>::least_scratch(spec)));
  REQUIRE(RopeShifter<Angles>{}
              .shift(spec, spec, RowMove{Row(0), 0, 5}, before, after, source.plane(), by_list.plane(), scratch)
              .ok());
  CHECK(by_run.bytes == by_plain.bytes);
  CHECK(by_list.bytes == by_plain.bytes);
}

TEST_CASE("tokens that stay where they are keep their bytes") {
  const RopeSpec spec =
      with_axes(plain_rope(8, 10000).value, std::vector<std::int32_t>{2, 1, 1}, AxisOrder::sectioned).value;
  std::mt19937 random(14);
  Keys source(3, 8), destination(3, 8);
  for (std::byte& byte : source.bytes) byte = static_cast<std::byte>(random());  // NaNs among them
  source.set(0, {std::numeric_limits<float>::signaling_NaN(), 0, 0, 0, 0, 0, 0, -0.0f});
  const std::vector<AxisPositions> positions = {{{1, 2, 3}}, {{7, 7, 7}}, {{0, 0, 0}}};
  REQUIRE(RopeShifter<EngineAngles>{}
              .shift(spec, spec, RowMove{Row(0), 0, 3}, positions, positions, source.plane(), destination.plane(), {})
              .ok());
  CHECK(source.bytes == destination.bytes);
}

TEST_CASE("the latent row and the expanded key of one model turn alike") {
  YarnScaling scaling;
  scaling.factor = 40;
  scaling.original_length = 4096;
  scaling.mscale = scaling.mscale_all_dim = 1;
  const RopeSpec part = yarn_rope(64, 10000, scaling, RopePairing::interleaved).value;
  const RopeSpec expanded = within_head(part, 192, 128).value;
  const RopeSpec latent = within_head(part, 576, 512).value;
  std::mt19937 random(15);
  Keys key(1, 64);
  key.fill(random);
  const ShiftRun run{Row(0), 0, 1, Position(5000), Position(17)};
  Keys alone(1, 64);
  alone.receive<ExactAngles>(part, part, run, key);
  for (const RopeSpec& spec : {expanded, latent}) {
    Keys wide(1, spec.head_dim), moved(1, spec.head_dim);
    wide.fill(random);
    std::vector<float> values = wide.row(0);
    const std::vector<float> rotated = key.row(0);
    std::copy(rotated.begin(), rotated.end(), values.end() - 64);
    wide.set(0, values);
    moved.receive<ExactAngles>(spec, spec, run, wide);
    const std::vector<float> row = moved.row(0);
    CHECK(std::equal(row.begin(), row.end() - 64, values.begin()));
    CHECK(std::equal(row.end() - 64, row.end(), alone.row(0).begin()));
  }
}

TEST_CASE("scales that are missing refuse the shift, with the row, and nothing is written") {
  using Layout = ContiguousLayout;
  using Codec8 = Scaled<Fp8E4M3Codec, TokenScales<Layout>>;
  const RopeSpec spec = plain_rope(4, 10000).value;
  const ShiftRun run{Row(0), 0, 3, Position(0), Position(5)};
  std::vector<float> keys(3 * 4, 1.0f), scratch(4);
  std::vector<float> scales(3, 0.5f);
  std::vector<std::byte> stored(3 * 4, std::byte{0x38});
  const auto floats = dense_plane<F32Codec>(reinterpret_cast<std::byte*>(keys.data()), 3, 1, 4);
  const auto with_scales = [&](std::int64_t rows) {
    const Codec8 codec(TokenScales<Layout>(reinterpret_cast<std::byte*>(scales.data()), Layout(rows, 1, 1, 4, 4)));
    return Plane<Codec8, Layout>(stored.data(), Layout(3, 1, 4, 4, 4), codec);
  };
  const std::vector<std::byte> before = stored;
  Status status = RopeShifter<>().shift(spec, spec, run, floats, with_scales(2), scratch);
  CHECK(std::string(status.where()) == "destination");
  CHECK(std::string(status.message()) == "row 2 has no memory for its scales");
  CHECK(stored == before);
  scales[1] = 0;  // never written
  status = RopeShifter<>().shift(spec, spec, run, with_scales(3), floats, scratch);
  CHECK(std::string(status.where()) == "source scale of row 1, head 0");
  CHECK(keys == std::vector<float>(3 * 4, 1.0f));
  CHECK(RopeShifter<>().shift(spec, spec, run, floats, with_scales(3), scratch).ok());  // writing makes them
  CHECK(scales[1] > 0);
}
