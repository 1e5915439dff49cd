// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Index spaces count, compare, and do not mix; executors run each body once.
#include <kvblend/core/executor.hpp>
#include <kvblend/core/types.hpp>

#include <doctest/doctest.h>
#include <compare>
#include <concepts>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

using namespace kvblend;

namespace {

template <class A, class B>
concept Comparable = requires(A a, B b) {
  a == b;
};
template <class A, class B>
concept Subtractable = requires(A a, B b) {
  a - b;
};

static_assert(!std::convertible_to<Row, Position> && !std::constructible_from<Row, Position>);
static_assert(!std::convertible_to<Position, ActiveIndex> && !std::constructible_from<ActiveIndex, Row>);
static_assert(!std::convertible_to<std::int32_t, Row> && !std::convertible_to<Row, std::int32_t>);
static_assert(std::constructible_from<Row, std::int32_t>);
static_assert(Comparable<Row, Row> && !Comparable<Row, Position> && !Comparable<Row, int>);
static_assert(Subtractable<Row, Row> && !Subtractable<Row, ActiveIndex> && !Subtractable<Row, int>);
static_assert(std::three_way_comparable<Row, std::strong_ordering>);
static_assert(sizeof(Row) == sizeof(std::int32_t) && std::is_trivially_copyable_v<Row>);

// A user's struct with an index in it.
struct Span {
  Row first;
  std::int32_t rows = 0;
  auto operator<=>(const Span&) const = default;
};

// The archetype: nothing beyond what the concept asks for.
struct LeastExecutor {
  template <class Body>
  void parallel_for(std::int64_t count, const Body& body) const {
    for (std::int64_t i = count - 1; i >= 0; --i) body(i);
  }
};
struct NoExecutor {};
static_assert(Executor<SerialExecutor> && Executor<LeastExecutor> && !Executor<NoExecutor>);

}  // namespace

TEST_CASE("indices count within their space") {
  Row row(4);
  CHECK((row + 3).value == 7);
  CHECK(Row(9) - row == 5);
  CHECK((++row).value == 5);
  CHECK(row < Row(6));
  CHECK(Row() == Row(0));
}

TEST_CASE("structs of indices compare by default") {
  CHECK(Span{Row(1), 9} < Span{Row(2), 0});
  CHECK(Span{Row(2), 0} < Span{Row(2), 1});
  CHECK(Span{Row(2), 1} == Span{Row(2), 1});
  CHECK((Row(3) <=> Row(2)) == std::strong_ordering::greater);
}

TEST_CASE("dtypes have names") {
  CHECK(std::string(to_string(DType::f32)) == "f32");
  CHECK(std::string(to_string(DType::f16)) == "f16");
  CHECK(std::string(to_string(DType::bf16)) == "bf16");
  CHECK(std::string(to_string(DType::f8_e4m3)) == "f8_e4m3");
  CHECK(std::string(to_string(DType::f8_e5m2)) == "f8_e5m2");
  CHECK(std::string(to_string(DType::q8_0)) == "q8_0");
  CHECK(std::string(to_string(DType::q4_0)) == "q4_0");
  CHECK(std::string(to_string(static_cast<DType>(77))) == "unknown");
}

TEST_CASE("the numbers of dtypes stay, since digests hold them") {
  int number = 0;
  for (const DType dtype : kAllDTypes) CHECK(static_cast<int>(dtype) == number++);
  CHECK(static_cast<int>(DType::bf16) == 2);
  CHECK(static_cast<int>(DType::q4_0) == 6);
  CHECK(block_bytes(static_cast<DType>(77)) == 0);
}

TEST_CASE("the serial executor runs each body once") {
  for (const int count : {0, 1, 17}) {
    std::vector<int> runs(static_cast<std::size_t>(count));
    SerialExecutor{}.parallel_for(count, [&runs](std::int64_t i) { ++runs[static_cast<std::size_t>(i)]; });
    CHECK(runs == std::vector<int>(static_cast<std::size_t>(count), 1));
  }
}
