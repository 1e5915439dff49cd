// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Every back end rotates keys as it should: pairing, magnitude, position, partial heads, overlap. Layouts are in
// shift_layouts_test.cpp.
#include <kvblend/codec/floats.hpp>
#include <kvblend/codec/fp8.hpp>
#include <kvblend/codec/scaled.hpp>
#include <kvblend/rope/builders.hpp>
#include <kvblend/rope/scaling.hpp>
#include <kvblend/rope/shifter.hpp>

#include <doctest/doctest.h>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>
#include "shift_support.hpp"
#include "support.hpp"

using namespace kvblend;
using namespace kvblend_test;

namespace {

std::vector<float> moved_once(const RopeSpec& spec, const std::vector<float>& key, int old_first, int new_first) {
  Rows<F32Codec> keys(1, 1, spec.head_dim);
  keys.set_head(0, 0, key);
  must_shift<PortableBackend>(spec, make_run(0, 0, 1, old_first, new_first), keys.plane(), keys.plane());
  return keys.head(0, 0);
}

}  // namespace

// vLLM pull request 49323: the interleaved flag was ignored.
TEST_CASE_TEMPLATE("pairs turn as the pairing says", Backend, KVBLEND_TEST_BACKENDS) {
  struct Case {
    RopePairing pairing;
    std::vector<double> expected;
  };
  const Case cases[] = {{RopePairing::neox, {.5403, 0, .8415, 0}}, {RopePairing::interleaved, {.5403, .8415, 0, 0}}};
  for (const Case& c : cases) {
    const RopeSpec spec = plain_rope(4, 10000, c.pairing).value;
    Rows<F32Codec> keys(1, 1, 4);
    keys.set_head(0, 0, {1, 0, 0, 0});
    must_shift<Backend>(spec, make_run(0, 0, 1, 0, 1), keys.plane(), keys.plane());
    CHECK(near(keys.head(0, 0), c.expected, 0, 5e-5));
  }
}

// llama.cpp pull request 17945: YaRN's magnitude was applied again by each shift.
TEST_CASE_TEMPLATE("a magnitude in the keys is not applied again", Backend, KVBLEND_TEST_BACKENDS) {
  RopeSpec spec = plain_rope(64, 10000).value;
  spec.attention_factor = 0.1 * std::log(4.0) + 1;  // YaRN, factor 4: 1.1386
  std::mt19937 random(1);
  Rows<F32Codec> keys(1, 1, 64);
  keys.fill(random);
  const std::vector<float> original = keys.head(0, 0);
  const auto norm = [&] {
    double sum = 0;
    for (const float value : keys.head(0, 0)) sum += static_cast<double>(value) * static_cast<double>(value);
    return std::sqrt(sum);
  };
  const double before = norm();
  must_shift<Backend>(spec, make_run(0, 0, 1, 5, 9), keys.plane(), keys.plane());
  CHECK(norm() == doctest::Approx(before).epsilon(1e-6));
  must_shift<Backend>(spec, make_run(0, 0, 1, 9, 12), keys.plane(), keys.plane());
  CHECK(norm() == doctest::Approx(before).epsilon(1e-6));
  CHECK(near(keys.head(0, 0), turned(spec, original, 7), 0, 2e-6));
}

// llama.cpp pull request 8676: llama 3's frequency factors were loaded and never applied.
TEST_CASE_TEMPLATE("llama3 scaling reaches the keys", Backend, KVBLEND_TEST_BACKENDS) {
  const RopeSpec spec = llama3_rope(8, 10000, {8, 1, 4, 64}).value;
  const double expected[] = {1, .013042, .00125, .000125};
  for (std::size_t i = 0; i < 4; ++i) CHECK(spec.inv_freq[i] == doctest::Approx(expected[i]).epsilon(1e-4));
  Rows<F32Codec> keys(1, 1, 8);
  keys.set_head(0, 0, {1, 1, 1, 1, 0, 0, 0, 0});
  must_shift<Backend>(spec, make_run(0, 0, 1, 0, 50), keys.plane(), keys.plane());
  std::vector<double> wanted(8);
  for (std::size_t i = 0; i < 4; ++i) {
    wanted[i] = std::cos(50 * expected[i]);
    wanted[i + 4] = std::sin(50 * expected[i]);
  }
  CHECK(near(keys.head(0, 0), wanted, 0, 1e-4));
}

// llama.cpp pull request 10401, LMCache pull request 5080: a model some of whose layers have no rope must be movable.
TEST_CASE_TEMPLATE("layers without rope keep their bytes while others turn", Backend, KVBLEND_TEST_BACKENDS) {
  const RopeSpec layers[] = {plain_rope(16, 10000).value, no_rope(16).value, plain_rope(16, 10000).value};
  std::mt19937 random(2);
  for (int layer = 0; layer < 3; ++layer) {
    CAPTURE(layer);
    Rows<F16Codec> source(40, 2, 16);
    source.fill(random);
    source.bytes[0] = std::byte{0x01};  // a signalling NaN, which arithmetic would make quiet
    source.bytes[1] = std::byte{0x7c};
    Rows<F16Codec> destination(40, 2, 16);
    must_shift<Backend>(layers[layer], make_run(0, 0, 40, 3, 10), source.plane(), destination.plane());
    CHECK((source.bytes == destination.bytes) == (layer == 1));
  }
}

// imp pull request 1325, mlxcel pull request 1055: fast sines drift at large positions.
TEST_CASE_TEMPLATE("keys are right at position 131071", Backend, KVBLEND_TEST_BACKENDS) {
  const RopeSpec spec = plain_rope(64, 10000).value;
  std::mt19937 random(3);
  Rows<F32Codec> keys(1, 1, 64);
  keys.fill(random);
  const std::vector<float> original = keys.head(0, 0);
  must_shift<Backend>(spec, make_run(0, 0, 1, 0, 131071), keys.plane(), keys.plane());
  CHECK(near(keys.head(0, 0), turned(spec, original, 131071), 0, 1e-5));
}

// LMCache issue 845, MemOS pull request 2304: the old position was assumed to be zero.
TEST_CASE_TEMPLATE("a chunk encoded in the middle of a prompt moves by the difference", Backend,
                   KVBLEND_TEST_BACKENDS) {
  const RopeSpec spec = plain_rope(32, 10000).value;
  std::mt19937 random(4);
  Rows<F32Codec> source(4, 2, 32);
  source.fill(random);
  Rows<F32Codec> destination(9, 2, 32);
  const ShiftRun run = make_run(0, 5, 4, 37, 5);
  CHECK(run.distance() == -32);
  must_shift<Backend>(spec, run, source.plane(), destination.plane());
  for (int row = 0; row < 4; ++row) {
    CHECK(near(destination.head(5 + row, 1), turned(spec, source.head(row, 1), -32), 0, 2e-6));
  }
}

// flash-linear-attention pull request 1177, flash-attention issue 1195: a large interleaved head read past its end.
TEST_CASE_TEMPLATE("a head of 72 interleaved values works", Backend, KVBLEND_TEST_BACKENDS) {
  const RopeSpec spec = plain_rope(72, 10000, RopePairing::interleaved).value;
  std::mt19937 random(5);
  Rows<F32Codec> source(1, 1, 72);  // exactly its bytes: a sanitizer sees any other
  source.fill(random);
  Rows<F32Codec> destination(1, 1, 72);
  must_shift<Backend>(spec, make_run(0, 0, 1, 7, 1), source.plane(), destination.plane());
  CHECK(near(destination.head(0, 0), turned(spec, source.head(0, 0), -6), 0, 2e-6));
}

// sglang issue 23609: a chunk of zero tokens left a sticky launch error behind.
TEST_CASE_TEMPLATE("chunks of no tokens are fine between others", Backend, KVBLEND_TEST_BACKENDS) {
  const RopeSpec spec = plain_rope(8, 10000).value;
  std::mt19937 random(6);
  Rows<F32Codec> source(4, 1, 8);
  source.fill(random);
  Rows<F32Codec> destination(8, 1, 8);
  const Rows<F32Codec> nothing(0, 1, 8);
  must_shift<Backend>(spec, make_run(0, 0, 4, 0, 3), source.plane(), destination.plane());
  must_shift<Backend>(spec, make_run(0, 4, 0, 0, 7), nothing.plane(), destination.plane());
  must_shift<Backend>(spec, make_run(0, 4, 4, 0, 7), source.plane(), destination.plane());
  CHECK(near(destination.head(7, 0), turned(spec, source.head(3, 0), 7), 0, 2e-6));
}

TEST_CASE_TEMPLATE("overlapping rows of one plane move as if read first", Backend, KVBLEND_TEST_BACKENDS) {
  std::mt19937 random(7);
  for (int round = 0; round < 60; ++round) {
    CAPTURE(round);
    const int count = 1 + static_cast<int>(random() % 70);
    const int source = static_cast<int>(random() % 30);
    const int destination = static_cast<int>(random() % 30);
    const RopeSpec spec = plain_rope(16, 10000, round % 2 == 0 ? RopePairing::neox : RopePairing::interleaved).value;
    const ShiftRun run = make_run(source, destination, count, 40, round % 5 == 0 ? 40 : 90);
    Rows<F32Codec> keys(100, 2, 16);
    keys.fill(random);
    const Rows<F32Codec> pristine = keys;
    Rows<F32Codec> expected = keys;
    must_shift<PortableBackend>(spec, run, pristine.plane(), expected.plane());

    Rows<F32Codec> engine_expected = keys;
    must_shift<PortableBackend, EngineAngles>(spec, run, pristine.plane(), engine_expected.plane());
    Rows<F32Codec> engine_keys = keys;
    // Scratch for three rows at a time: the parts, too, must come in the right order.
    std::vector<float> scratch(static_cast<std::size_t>(3 * RopeShifter<EngineAngles>::least_scratch(spec)));
    const RopeShifter<EngineAngles, Backend> shifter;
    REQUIRE(shifter.shift(spec, spec, run, engine_keys.plane(), engine_keys.plane(), scratch).ok());
    must_shift<Backend>(spec, run, keys.plane(), keys.plane());
    const auto close = [](const Rows<F32Codec>& a, const Rows<F32Codec>& b) {
      for (int row = 0; row < 100; ++row) {
        for (int head = 0; head < 2; ++head) {
          const auto wanted = b.head(row, head);
          if (!near(a.head(row, head), {wanted.begin(), wanted.end()}, 0, 1e-6)) return false;
        }
      }
      return true;
    };
    CHECK(close(keys, expected));
    CHECK(close(engine_keys, engine_expected));

    Rows<F32Codec> placed = pristine;
    place_values<Backend>(run, placed.plane(), placed.plane());
    Rows<F32Codec> placed_apart = pristine;
    place_values<Backend>(run, pristine.plane(), placed_apart.plane());
    CHECK(placed.bytes == placed_apart.bytes);
  }
}

TEST_CASE_TEMPLATE("values beside the rotated part keep their bits", Backend, KVBLEND_TEST_BACKENDS) {
  std::mt19937 random(8);
  for (int round = 0; round < 40; ++round) {
    CAPTURE(round);
    RopeSpec spec = plain_rope(40, 10000, round % 2 == 0 ? RopePairing::neox : RopePairing::interleaved, 16).value;
    spec.rotary_offset = static_cast<std::int32_t>(random() % 25);
    Rows<Bf16Codec> source(3, 2, 40);
    for (std::byte& byte : source.bytes) byte = static_cast<std::byte>(random());  // NaNs of all kinds among them
    Rows<Bf16Codec> destination(3, 2, 40);
    must_shift<Backend>(spec, make_run(0, 0, 3, 0, 5), source.plane(), destination.plane());
    Rows<Bf16Codec> in_place = source;
    must_shift<Backend>(spec, make_run(0, 0, 3, 0, 5), in_place.plane(), in_place.plane());
    bool kept = true;
    for (std::size_t i = 0; i < source.bytes.size(); ++i) {
      const auto value = static_cast<std::int32_t>(i / 2 % 40);
      if (value >= spec.rotary_offset && value < spec.rotary_offset + 16) continue;
      kept = kept && source.bytes[i] == destination.bytes[i] && source.bytes[i] == in_place.bytes[i];
    }
    CHECK(kept);
  }
}

TEST_CASE_TEMPLATE("infinite and NaN keys harm no other row", Backend, KVBLEND_TEST_BACKENDS) {
  const RopeSpec spec = plain_rope(8, 10000).value;
  std::mt19937 random(9);
  Rows<F32Codec> source(3, 1, 8);
  source.fill(random);
  auto bad = source.head(1, 0);
  bad[0] = std::numeric_limits<float>::infinity();
  bad[1] = std::numeric_limits<float>::quiet_NaN();
  source.set_head(1, 0, bad);
  Rows<F32Codec> destination(3, 1, 8);
  must_shift<Backend>(spec, make_run(0, 0, 3, 0, 4), source.plane(), destination.plane());
  CHECK(near(destination.head(0, 0), turned(spec, source.head(0, 0), 4), 0, 2e-6));
  CHECK(near(destination.head(2, 0), turned(spec, source.head(2, 0), 4), 0, 2e-6));
  CHECK(is_nan(destination.head(1, 0)[1]));
  CHECK(!is_finite(destination.head(1, 0)[0]));
}

TEST_CASE("one move is more exact than two in a row") {
  const RopeSpec spec = plain_rope(64, 10000).value;
  std::mt19937 random(10);
  Rows<F32Codec> key(1, 1, 64);
  key.fill(random);
  const auto original = key.head(0, 0);
  CHECK(near(moved_once(spec, original, 5, 1000), turned(spec, original, 995), 0, 1e-6));
}

TEST_CASE_TEMPLATE("rows that are computed anyway need not be placed, and the others are", Backend,
                   KVBLEND_TEST_BACKENDS) {
  std::mt19937 random(17);
  const RopeSpec spec = plain_rope(8, 10000, RopePairing::neox).value;
  Rows<F32Codec> source(150, 2, 8);
  source.fill(random);
  const std::array<ShiftRun, 2> moves = {make_run(10, 5, 90, 0, 40), make_run(0, 120, 30, 7, 7)};
  std::array<std::vector<float>, 2> scratch;
  std::array<PlacedRun, 2> runs;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    scratch[i].resize(static_cast<std::size_t>(RotationTable::size<ExactAngles>(spec, spec, moves[i])));
    runs[i] = {static_cast<std::int32_t>(i), moves[i],
               RotationTable::make<ExactAngles>(spec, spec, moves[i], scratch[i]).value};
  }
  Rows<F32Codec> keys(150, 2, 8), values(150, 2, 8), all_keys(150, 2, 8), all_values(150, 2, 8);
  std::vector<std::uint8_t> computed(150);
  for (auto& flag : computed) flag = random() % 3 == 0 ? 1 : 0;
  computed[5] = computed[94] = computed[149] = 1;  // the ends of runs
  const kvblend_test::OnePlane<decltype(std::as_const(source).plane())> stored{std::as_const(source).plane()};
  Backend{}.place(spec, runs, stored, all_keys.plane(), all_values.plane(), std::span<const std::uint8_t>());
  Backend{}.place(spec, runs, stored, keys.plane(), values.plane(), computed);
  const std::vector<float> zero(8, 0.0f);
  for (int row = 0; row < 150; ++row) {
    const bool placed = (row >= 5 && row < 95) || row >= 120;
    const bool skipped = computed[static_cast<std::size_t>(row)] != 0 || !placed;
    CAPTURE(row);
    for (int head = 0; head < 2; ++head) {
      CHECK(keys.head(row, head) == (skipped ? zero : all_keys.head(row, head)));
      CHECK(values.head(row, head) == (skipped ? zero : all_values.head(row, head)));
      if (placed) CHECK(all_values.head(row, head) != zero);
    }
  }
}

TEST_CASE_TEMPLATE("rows with scales of their own move over themselves as they do into other memory", Backend,
                   KVBLEND_TEST_BACKENDS) {
  using Scales = TokenScales<ContiguousLayout>;
  using Scaling = Scaled<Fp8E4M3Codec, Scales>;
  const unsigned seed = 3;
  CAPTURE(seed);
  std::mt19937 random(seed);
  const auto below = [&random](int limit) { return static_cast<int>(random() % static_cast<unsigned>(limit)); };
  for (int round = 0; round < 200; ++round) {
    const int heads = 1 + below(3), dim = 2 * (1 + below(40)), rows = 2 + below(20);
    const int scales_a_row = below(2) == 0 ? 1 : heads;
    const int rotary = 2 * (1 + below(dim / 2));
    RopeSpec spec = plain_rope(dim, 10000, below(2) == 0 ? RopePairing::neox : RopePairing::interleaved, rotary).value;
    spec.rotary_offset = below(dim - rotary + 1);
    std::vector<std::byte> stored(static_cast<std::size_t>(rows * heads * dim));
    std::vector<float> scales(static_cast<std::size_t>(rows * scales_a_row));
    for (std::byte& byte : stored) byte = static_cast<std::byte>(below(0x70) | below(2) << 7);
    for (float& scale : scales) scale = 0.01f * static_cast<float>(1 + below(9));
    const auto plane = [&](std::vector<std::byte>& bytes, std::vector<float>& of) {
      const ContiguousLayout each(rows, scales_a_row, 1, 4 * scales_a_row, 4);
      return Plane<Scaling, ContiguousLayout>(bytes.data(), ContiguousLayout(rows, heads, dim, heads * dim, dim),
                                              Scaling(Scales(reinterpret_cast<std::byte*>(of.data()), each)));
    };
    const int count = below(rows + 1), distance = below(3) == 0 ? 0 : below(100);
    const ShiftRun run = make_run(below(rows - count + 1), below(rows - count + 1), count, 5, 5 + distance);
    std::vector<std::byte> apart = stored;
    std::vector<float> scales_apart = scales;
    must_shift<Backend>(spec, run, plane(stored, scales), plane(apart, scales_apart));
    must_shift<Backend>(spec, run, plane(stored, scales), plane(stored, scales));
    CHECK(stored == apart);
    CHECK(scales == scales_apart);
  }
}

TEST_CASE_TEMPLATE("scales that can only be read stand for the same memory and are never left behind", Backend,
                   KVBLEND_TEST_BACKENDS) {
  using Writable = TokenScales<ContiguousLayout>;
  using ReadOnly = TokenScales<ContiguousLayout, const std::byte>;
  const ContiguousLayout shape(4, 1, 4, 4, 4);
  const ContiguousLayout each(4, 1, 1, 4, 4);
  for (const int rotary : {0, 2}) {
    CAPTURE(rotary);
    const RopeSpec spec = rotary == 0 ? no_rope(4).value : plain_rope(4, 10000, RopePairing::neox, rotary).value;
    std::vector<std::byte> bytes(16, std::byte{0x38});  // ones
    std::vector<float> scales{1, 2, 3, 4};
    auto* const at = reinterpret_cast<std::byte*>(scales.data());
    const Plane<Scaled<Fp8E4M3Codec, Writable>, ContiguousLayout> to(
        bytes.data(), shape, Scaled<Fp8E4M3Codec, Writable>(Writable(at, each)));
    const Plane<Scaled<Fp8E4M3Codec, ReadOnly>, ContiguousLayout, const std::byte> from(
        bytes.data(), shape, Scaled<Fp8E4M3Codec, ReadOnly>(ReadOnly(at, each)));
    const auto last_value = [&](std::int64_t row) {
      float values[4];
      decode_head(to, row, 0, values);
      return values[3];
    };
    must_shift<Backend>(spec, make_run(0, 1, 3, 0, 1), from, to);  // over itself
    for (int row = 0; row < 4; ++row) CHECK(last_value(row) == doctest::Approx(row == 0 ? 1 : row).epsilon(0.07));

    // Under scales that stay, values are stored anew.
    std::vector<std::byte> other(16);
    std::vector<float> twos(4, 2.0f);
    const Plane<Scaled<Fp8E4M3Codec, ReadOnly>, ContiguousLayout> under(
        other.data(), shape,
        Scaled<Fp8E4M3Codec, ReadOnly>(ReadOnly(reinterpret_cast<const std::byte*>(twos.data()), each)));
    must_shift<Backend>(spec, make_run(0, 0, 4, 0, 1), to, under);
    for (int row = 0; row < 4; ++row) {
      float values[4];
      decode_head(under, row, 0, values);
      CHECK(values[3] == doctest::Approx(last_value(row)).epsilon(0.07));
    }
  }
}

TEST_CASE_TEMPLATE("listed rows that stay keep their bits beside rows that turn, whatever the scratch", Backend,
                   KVBLEND_TEST_BACKENDS) {
  constexpr int kListed = 7;
  const std::int32_t sections[] = {1, 1, 1};
  const RopeSpec three = with_axes(plain_rope(6, 10000).value, sections, AxisOrder::sectioned).value;
  const RopeSpec one = plain_rope(6, 10000).value;
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<AxisPositions> old_positions(kListed, AxisPositions{{4, 5, 6}});
  std::vector<AxisPositions> new_positions = old_positions;
  new_positions[2] = {{9, 9, 9}};
  new_positions[3] = {{9, 8, 7}};
  new_positions[6] = {{4, 5, 7}};  // stays where only the first axis counts
  for (const RopeSpec& spec : {three, one}) {
    for (const int step : {0, 2}) {  // apart, and over itself from the back
      for (const std::int64_t scratch_rows : {1, 2, 3, kListed}) {
        CAPTURE(step);
        CAPTURE(scratch_rows);
        Rows<F32Codec> cache(kListed + 2, 1, 6), other(kListed, 1, 6);
        for (int row = 0; row < kListed; ++row) cache.set_head(row, 0, {-0.0f, infinity, -1, 2, -0.0f, 3});
        std::vector<float> scratch(static_cast<std::size_t>(6 * scratch_rows));
        const RopeShifter<ExactAngles, Backend> shifter;
        const RowMove rows{Row(step), 0, kListed};
        const Status status =
            step == 0
                ? shifter.shift(spec, spec, rows, old_positions, new_positions, cache.plane(), other.plane(), scratch)
                : shifter.shift(spec, spec, rows, old_positions, new_positions, cache.plane(), cache.plane(), scratch);
        REQUIRE_MESSAGE(status.ok(), status.where() << ": " << status.message());
        for (const int row : {0, 1, 4, 5, 6}) {
          if (row == 6 && spec == three) continue;
          const std::vector<float> found = step == 0 ? other.head(row, 0) : cache.head(row + step, 0);
          const std::vector<float> kept{-0.0f, infinity, -1, 2, -0.0f, 3};
          CHECK(std::memcmp(found.data(), kept.data(), kept.size() * sizeof(float)) == 0);
        }
        const std::vector<float> turned_row = step == 0 ? other.head(2, 0) : cache.head(2 + step, 0);
        CHECK(turned_row[5] != 3.0f);
      }
    }
  }
}
