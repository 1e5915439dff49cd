// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A throttled reader takes the time its link would, by a clock that the test turns itself.
#include "fixtures.hpp"

#include <limits>

using namespace kvblend_test;

namespace {

struct TestClock {
  double* time;
  double oversleep = 0;
  [[nodiscard]] double now() const { return *time; }
  void sleep_until(double seconds) const { *time = std::max(*time, seconds) + oversleep; }
};

// A reader that takes time of its own.
struct SlowReader {
  MemoryReader inner;
  double* time;
  double cost;
  [[nodiscard]] const ChunkIdentity& identity() const { return inner.identity(); }
  [[nodiscard]] ChunkInfo info() const { return inner.info(); }
  Status read_layer(std::int32_t layer, std::span<std::byte> destination) {
    *time += cost;
    return inner.read_layer(layer, destination);
  }
};

}  // namespace

TEST_CASE("a read takes latency and bytes over bandwidth") {
  const ChunkHandle chunk = share(filled_chunk(small_identity({1, 2, 3})));  // 192 bytes a layer
  std::vector<std::byte> room(192);
  double time = 100;
  SlowReader slow{MemoryReader(chunk), &time, 0.25};
  Link<TestClock> link(96.0, 0.5, TestClock{&time});
  ThrottledReader<SlowReader, TestClock> reader(slow, link);
  REQUIRE(reader.read_layer(1, room).ok());
  CHECK(time == doctest::Approx(102.5));
  CHECK(std::equal(room.begin(), room.end(), chunk->layer(1).begin()));
  CHECK(reader.identity() == chunk->identity());
  CHECK(reader.info().tokens.size() == 3);

  slow.cost = 7;  // slower than the link
  REQUIRE(reader.read_layer(0, room).ok());
  CHECK(time == doctest::Approx(109.5));
}

TEST_CASE("sleeping too long is made up for") {
  double time = 0;
  MemoryReader memory(share(filled_chunk(small_identity({1, 2, 3}))));
  std::vector<std::byte> room(192);
  Link<TestClock> link(192.0, 0.0, TestClock{&time, 0.0625});
  ThrottledReader<MemoryReader, TestClock> reader(memory, link);
  for (int i = 0; i < 100; ++i) REQUIRE(reader.read_layer(0, room).ok());
  CHECK(time == doctest::Approx(100.0625));
}

TEST_CASE("two readers of one link share its bandwidth") {
  double time = 0;
  MemoryReader a(share(filled_chunk(small_identity({1, 2, 3}))));
  MemoryReader b(share(filled_chunk(small_identity({4, 5, 6}))));
  std::vector<std::byte> room(192);
  Link<TestClock> link(192.0, 0.0, TestClock{&time});
  ThrottledReader<MemoryReader, TestClock> first(a, link);
  ThrottledReader<MemoryReader, TestClock> second(b, link);
  REQUIRE(first.read_layer(0, room).ok());
  REQUIRE(second.read_layer(0, room).ok());
  CHECK(time == doctest::Approx(2.0));
}

TEST_CASE("links that cannot be are refused at the first read, an infinite bandwidth costs latency only") {
  double time = 0;
  MemoryReader memory(share(filled_chunk(small_identity({1, 2, 3}))));
  std::vector<std::byte> room(192, std::byte{7});
  const double inf = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto read = [&](double bandwidth, double latency) {
    Link<TestClock> link(bandwidth, latency, TestClock{&time});
    ThrottledReader<MemoryReader, TestClock> reader(memory, link);
    return reader.read_layer(0, room);
  };
  for (const double bandwidth : {0.0, -1.0, nan, -inf}) CHECK(says(read(bandwidth, 0.0), "bandwidth"));
  for (const double latency : {-1.0, nan, inf}) CHECK(says(read(1.0, latency), "latency"));
  CHECK(time == 0);
  for (const std::byte byte : room) CHECK(byte == std::byte{7});
  CHECK(read(inf, 0.5).ok());
  CHECK(time == 0.5);
}

TEST_CASE("the clock of the machine is good enough to run by") {
  MemoryReader memory(share(filled_chunk(small_identity({1, 2, 3}))));
  std::vector<std::byte> room(192);
  Link<> link(1e9, 1e-4);
  ThrottledReader reader(memory, link);
  CHECK(reader.read_layer(0, room).ok());
  CHECK(reader.read_layer(5, room).code() == StatusCode::out_of_range);
}
