// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The Eigen back end gives the same bits however many threads share its rows, and runs each block once.
#include <kvblend/codec/floats.hpp>
#include <kvblend/eigen.hpp>
#include <kvblend/memory/layouts.hpp>
#include <kvblend/rope/builders.hpp>

#include <doctest/doctest.h>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

using namespace kvblend;

namespace {

// A handle to `threads` threads that take the bodies in no fixed order, and count them.
struct CountingThreads {
  int threads = 1;
  std::atomic<std::int64_t>* bodies = nullptr;

  template <class Body>
  void parallel_for(std::int64_t count, const Body& body) const {
    std::atomic<std::int64_t> next{0};
    std::vector<std::thread> workers;
    for (int thread = 0; thread < threads; ++thread) {
      workers.emplace_back([&] {
        for (std::int64_t i = next++; i < count; i = next++) {
          body(i);
          ++*bodies;
        }
      });
    }
    for (std::thread& worker : workers) worker.join();
  }
};
static_assert(Executor<CountingThreads>);

// A stored layer of one segment, with the same plane for keys and values.
template <class P>
struct OnePlane {
  P plane;
  [[nodiscard]] P keys(std::int32_t) const { return plane; }
  [[nodiscard]] P values(std::int32_t) const { return plane; }
};

struct Outcome {
  std::vector<std::byte> keys, values, merged;
  std::vector<float> deviations;
  std::int64_t bodies = 0;
};

template <class Codec, AngleRule Angles>
Outcome blend_with(int threads, std::int32_t rows, RopePairing pairing) {
  constexpr std::int32_t kHeads = 3;
  constexpr std::int32_t kDim = 40;
  std::atomic<std::int64_t> bodies{0};
  const EigenBackend<CountingThreads> backend(CountingThreads{threads, &bodies});
  const auto bytes = static_cast<std::size_t>(bytes_of<Codec>(std::int64_t{rows} * kHeads * kDim));
  std::mt19937 random(41);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(static_cast<std::size_t>(rows) * kHeads * kDim);
  for (float& number : numbers) number = normal(random);
  std::vector<std::byte> stored(bytes);
  Codec::encode(numbers.data(), stored.data(), static_cast<std::int64_t>(numbers.size()));
  const auto source = dense_plane<Codec>(static_cast<const std::byte*>(stored.data()), rows, kHeads, kDim);

  Outcome outcome{std::vector<std::byte>(bytes), std::vector<std::byte>(bytes), std::vector<std::byte>(bytes), {}, 0};
  const RopeSpec spec = plain_rope(kDim, 10000, pairing).value;
  const ShiftRun run{Row(0), 0, rows, Position(3), Position(1000)};
  std::vector<float> scratch(static_cast<std::size_t>(RotationTable::size<Angles>(spec, spec, run)));
  const auto table = RotationTable::make<Angles>(spec, spec, run, scratch);
  REQUIRE(table.ok());
  const auto keys = dense_plane<Codec>(outcome.keys.data(), rows, kHeads, kDim);
  const std::array<PlacedRun, 1> runs = {PlacedRun{0, run, table.value}};
  backend.place(spec, runs, OnePlane<decltype(source)>{source}, keys,
                dense_plane<Codec>(outcome.values.data(), rows, kHeads, kDim), {});
  std::vector<Row> all;
  std::vector<ActiveIndex> which;
  for (std::int32_t i = 0; i < rows; ++i) {
    all.emplace_back(i);
    which.emplace_back(rows - 1 - i);
  }
  backend.merge(keys, all, dense_plane<Codec>(outcome.merged.data(), rows, kHeads, kDim));
  outcome.deviations.resize(static_cast<std::size_t>(rows));
  backend.deviation(source, which, all, keys, outcome.deviations);
  outcome.bodies = bodies;
  return outcome;
}

}  // namespace

TEST_CASE("one and many threads give the same bits") {
  for (const std::int32_t rows : {0, 1, 31, 32, 33, 64, 257, 1500}) {
    for (const auto pairing : {RopePairing::neox, RopePairing::interleaved}) {
      CAPTURE(rows);
      const Outcome one = blend_with<F32Codec, ExactAngles>(1, rows, pairing);
      const Outcome one_engine = blend_with<F16Codec, EngineAngles>(1, rows, pairing);
      CHECK(one.keys == one.merged);
      for (const int threads : {2, 3, 5}) {
        CAPTURE(threads);
        const Outcome many = blend_with<F32Codec, ExactAngles>(threads, rows, pairing);
        CHECK(one.keys == many.keys);
        CHECK(one.values == many.values);
        CHECK(one.merged == many.merged);
        CHECK((rows == 0 ||
               std::memcmp(one.deviations.data(), many.deviations.data(), one.deviations.size() * sizeof(float)) == 0));
        CHECK(one.bodies == many.bodies);
        const Outcome many_engine = blend_with<F16Codec, EngineAngles>(threads, rows, pairing);
        CHECK(one_engine.keys == many_engine.keys);
        CHECK((rows == 0 || std::memcmp(one_engine.deviations.data(), many_engine.deviations.data(),
                                        one_engine.deviations.size() * sizeof(float)) == 0));
      }
    }
  }
}
