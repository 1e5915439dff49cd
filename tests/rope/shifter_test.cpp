// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// RopeShifter refuses what cannot be moved before it writes anything, and its tables hold what the angle rules say.
#include <kvblend/codec/floats.hpp>
#include <kvblend/memory/layouts.hpp>
#include <kvblend/rope/builders.hpp>
#include <kvblend/rope/shifter.hpp>

#include <doctest/doctest.h>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
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

  Move() = default;
  Move(const Move&) = delete;
  Move& operator=(const Move&) = delete;
  Status shift() { return RopeShifter<>{}.shift(stored, wanted, run, source, destination, scratch); }
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
      {"head_dim", StatusCode::mismatch, [](Move& m) { m.source.layout.head_values = 4; }},
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

TEST_CASE("keys that stay need no scratch") {
  Move move;
  move.scratch.clear();
  move.run.new_first = move.run.old_first;
  CHECK(RopeShifter<>::scratch_size(move.wanted, move.run) == 0);
  CHECK(move.shift().ok());
  CHECK(std::vector<std::byte>(move.to.begin() + 2 * 2 * 8 * 4, move.to.end()) == move.from);
}

TEST_CASE("the largest positions are within reach") {
  Move move;
  move.run.old_first = Position(0);
  move.run.new_first = Position(kLargest - 3);
  CHECK(move.shift().ok());
}

TEST_CASE("exact tables hold one row a run and engine tables one a key") {
  const RopeSpec spec = plain_rope(8, 10000).value;
  const ShiftRun run{Row(0), 0, 3, Position(5), Position(100000)};
  CHECK(RotationTable::size<ExactAngles>(spec, run) == 8);
  CHECK(RotationTable::size<EngineAngles>(spec, run) == 24);
  std::vector<float> storage(24);
  const auto exact = RotationTable::make<ExactAngles>(spec, run, storage);
  REQUIRE(exact.ok());
  for (std::int32_t row = 0; row < 3; ++row) {
    for (std::int32_t pair = 0; pair < 4; ++pair) {
      const double angle = 99995.0 * std::pow(10.0, -pair);
      CHECK(static_cast<double>(exact.value.cosines(row)[pair]) == doctest::Approx(std::cos(angle)).epsilon(1e-6));
      CHECK(static_cast<double>(exact.value.sines(row)[pair]) == doctest::Approx(std::sin(angle)).epsilon(1e-6));
    }
  }
  const auto engine = RotationTable::make<EngineAngles>(spec, run, storage);
  REQUIRE(engine.ok());
  for (std::int32_t row = 0; row < 3; ++row) {
    const float angle = static_cast<float>(100000 + row) * 0.1f - 0.0f;
    const float old_angle = static_cast<float>(5 + row) * 0.1f;
    const double turn = static_cast<double>(angle) - static_cast<double>(old_angle);
    CHECK(static_cast<double>(engine.value.cosines(row)[1]) == doctest::Approx(std::cos(turn)).epsilon(1e-6));
    CHECK(static_cast<double>(engine.value.sines(row)[1]) == doctest::Approx(std::sin(turn)).epsilon(1e-6));
  }
  CHECK(RotationTable::make<EngineAngles>(spec, run, std::span<float>(storage).first(23)).status.code() ==
        StatusCode::insufficient_space);
}
