// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Layouts put rows where their strides say, in 64 bits, and know which rows have memory.
#include <kvblend/codec/floats.hpp>
#include <kvblend/memory/block_array.hpp>
#include <kvblend/memory/engines.hpp>
#include <kvblend/memory/layouts.hpp>
#include <kvblend/memory/rows.hpp>

#include <doctest/doctest.h>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

using namespace kvblend;

namespace {

static_assert(Layout<ContiguousLayout> && Layout<PagedLayout> && Layout<SlotLayout<>>);
static_assert(std::is_trivially_copyable_v<ContiguousPlane<F16Codec>> &&
              std::is_trivially_copyable_v<PagedPlane<Bf16Codec>>);
static_assert(WritablePlane<ContiguousPlane<F32Codec>> && !WritablePlane<ConstContiguousPlane<F32Codec>>);
static_assert(ReadablePlane<ConstContiguousPlane<F32Codec>>);
static_assert(std::is_convertible_v<ContiguousPlane<F32Codec>, ConstContiguousPlane<F32Codec>>);
static_assert(!std::is_convertible_v<ConstContiguousPlane<F32Codec>, ContiguousPlane<F32Codec>>);

// Archetypes: nothing beyond what the concepts ask for.
struct LeastCodec {
  static constexpr DType dtype = DType::f32;
  static constexpr std::int32_t block_values = 4;
  static constexpr std::int32_t block_bytes = 8;
  static void decode(const std::byte* source, float* values, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) values[i] = static_cast<float>(source[i / 4 * 8 + i % 4]);
  }
  static void encode(const float* values, std::byte* destination, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      destination[i / 4 * 8 + i % 4] = static_cast<std::byte>(static_cast<int>(values[i]));
    }
  }
};
struct LeastLayout {  // two tiles of four values
  std::int32_t heads() const { return 1; }
  std::int32_t head_dim() const { return 8; }
  std::int32_t tiles() const { return 2; }
  std::int32_t tile_values() const { return 4; }
  bool contains(std::int64_t row) const { return row >= 0 && row < 3; }
  std::int64_t offset(std::int64_t row, std::int32_t, std::int32_t tile) const { return (tile * 3 + row) * 8; }
};
static_assert(Codec<LeastCodec> && Layout<LeastLayout>);

}  // namespace

// vllm-xpu-kernels pull request 449: the layout of K was assumed for V.
TEST_CASE("rows-first and heads-first planes find the same token") {
  constexpr std::int32_t kRows = 4;
  constexpr std::int32_t kHeads = 3;
  constexpr std::int32_t kDim = 2;
  float values[kRows * kHeads * kDim];
  for (int i = 0; i < kRows * kHeads * kDim; ++i) values[i] = static_cast<float>(i);
  const auto* bytes = reinterpret_cast<const std::byte*>(values);
  const ConstContiguousPlane<F32Codec> rows_first(bytes,
                                                  ContiguousLayout(kRows, kHeads, kDim, kHeads * kDim * 4, kDim * 4));
  const ConstContiguousPlane<F32Codec> heads_first(bytes,
                                                   ContiguousLayout(kRows, kHeads, kDim, kDim * 4, kRows * kDim * 4));
  float head[kDim];
  decode_head(rows_first, 2, 1, head);
  CHECK(head[0] == 14);
  CHECK(head[1] == 15);
  decode_head(heads_first, 2, 1, head);
  CHECK(head[0] == 12);
  CHECK(head[1] == 13);
}

// vLLM issues 1486 and 50427: 32-bit offsets wrapped around.
TEST_CASE("offsets reach past 32 bits") {
  const std::vector<std::int32_t> table{0, 131072};
  const std::int64_t block_values = 16 * 8 * 128;
  const PagedLayout one_byte(table.data(), 2, 16, 8, 128, block_values, 8 * 128, 128);
  CHECK(one_byte.offset(16, 0, 0) == std::int64_t{1} << 31);
  CHECK(one_byte.offset(17, 1, 0) == (std::int64_t{1} << 31) + 8 * 128 + 128);
  const PagedLayout two_bytes(table.data(), 2, 16, 8, 128, 2 * block_values, 2 * 8 * 128, 2 * 128);
  CHECK(two_bytes.offset(31, 7, 0) == (std::int64_t{1} << 32) + 15 * 2 * 8 * 128 + 7 * 2 * 128);
  const ContiguousLayout rows(std::int64_t{1} << 22, 8, 128, 8 * 128 * 2, 128 * 2);
  CHECK(rows.offset(std::int64_t{1} << 21, 0, 0) == std::int64_t{1} << 32);
  const ContiguousLayout heads(1 << 20, 8, 128, 128 * 4, (std::int64_t{1} << 20) * 128 * 4);
  CHECK(heads.offset(0, 7, 0) == 7 * (std::int64_t{1} << 29));
  const std::int64_t largest = std::numeric_limits<std::int32_t>::max();
  CHECK(rows.contains(largest) == false);
  CHECK(one_byte.contains(largest) == false);
}

// The same in every layout: only offsets are taken, from memory that need not exist.
TEST_CASE("offsets of all layouts reach past 32 bits") {
  constexpr std::int64_t kBlock = 131072;
  constexpr std::int64_t kBytes = 16 * 8 * 128;  // a block's, one byte a value
  const std::int32_t table[2] = {-1, kBlock};
  const HeadShape shape(8, 128, 128);
  const BlockPool pool(kBlock + 1, 16, shape, kBytes, 8 * 128);
  CHECK(PagedLayout(pool, table, 2).offset(16, 0, 0) == std::int64_t{1} << 31);

  const std::int32_t slot32 = kBlock * 16 + 3;
  const std::int64_t slot64 = (std::int64_t{1} << 40) + 5;
  CHECK(SlotLayout<>(pool, &slot32, 1).offset(0, 7, 0) == (std::int64_t{1} << 31) + 3 * 1024 + 7 * 128);
  CHECK(SlotLayout<>(pool, &slot32, 1).contains(0));
  CHECK(SlotLayout<std::int64_t>(pool, &slot64, 1).offset(0, 0, 0) == (std::int64_t{1} << 50) + 5 * 1024);
  CHECK_FALSE(SlotLayout<std::int64_t>(pool, &slot64, 1).contains(0));
  const std::uint32_t last_cell = 0xffffffffu;  // not a negative number
  const BlockPool cells = llama_cpp_cells<F16Codec>(std::int64_t{1} << 32, 8, 128).value;
  CHECK(SlotLayout<std::uint32_t>(cells, &last_cell, 1).contains(0));
  CHECK(SlotLayout<std::uint32_t>(cells, &last_cell, 1).offset(0, 0, 0) == ((std::int64_t{1} << 32) - 1) * 2048);

  // The last block of the largest secondary pool, behind a primary one of 2^42 bytes.
  const std::int32_t entry = static_cast<std::int32_t>(0xfffffffeu);
  const BlockArrayLayout blocks(pool, std::int64_t{1} << 31, std::int64_t{1} << 42, &entry, 1);
  CHECK(blocks.contains(15));
  const std::int32_t none = -1;  // no block, though that pool is large enough for block 2^31 - 1
  CHECK_FALSE(BlockArrayLayout(pool, std::int64_t{1} << 31, 0, &none, 1).contains(0));
  CHECK(blocks.offset(15, 0, 0) == (std::int64_t{1} << 42) + ((std::int64_t{1} << 31) - 2) * kBytes + 15 * 1024);

  // Transposed: the head and the tile stride, not the row, make the large number.
  const BlockPool values = llama_cpp_transposed_values<F16Codec>(1 << 22, 8, 128, 3).value;
  const ContiguousLayout rows = in_order(values).value;
  CHECK(rows.offset(5, 7, 127) == 2 * (((std::int64_t{3} * 8 + 7) * 128 + 127) * (std::int64_t{1} << 22) + 5));
  const auto packed = vllm_packed_keys<F16Codec>({2, std::int32_t{1} << 30, 8, 128, 0}).value.keys;
  const std::int64_t row = std::int64_t{1} << 30;
  const std::int32_t first[1] = {1};
  CHECK(PagedLayout(packed, first, 1).offset(row - 1, 7, 15) ==
        2 * ((((std::int64_t{8} + 7) * 16 + 15) * row + row - 1) * 8));
}

// vLLM pull request 13922: padding slots were written.
TEST_CASE("rows of negative slots are passed over, those past the pool refused") {
  std::vector<float> pool(8, -1.0f);
  const std::int64_t slots[3] = {3, -1, 5};
  const auto tokens = block_pool<F32Codec>({8, 1, 1, 1, 0}).value;
  const SlotPlane<F32Codec, std::int64_t> plane(reinterpret_cast<std::byte*>(pool.data()),
                                                by_slots(tokens, slots, 3).value);
  CHECK(check_rows(plane, 0, 3, "keys").ok());
  CHECK(check_rows(plane, 0, 4, "keys").code() == StatusCode::out_of_range);
  CHECK(plane.layout.skips(1));
  CHECK_FALSE(plane.layout.skips(3));
  const float rows[3] = {10, 11, 12};
  copy_rows(dense_plane<F32Codec>(reinterpret_cast<const std::byte*>(rows), 3, 1, 1), 0, plane, 0, 3);
  CHECK(pool == std::vector<float>{-1, -1, -1, 10, -1, 12, -1, -1});
  float back[3] = {0, 0, 0};
  copy_rows(plane, 0, dense_plane<F32Codec>(reinterpret_cast<std::byte*>(back), 3, 1, 1), 0, 3);
  CHECK(back[0] == 10);
  CHECK(back[1] == 0);
  CHECK(back[2] == 12);

  const std::int64_t past[2] = {7, 8};
  const SlotPlane<F32Codec, std::int64_t> beyond(plane.base, by_slots(tokens, past, 2).value);
  CHECK(std::string(check_rows(beyond, 0, 2, "keys").message()) == "row 1 has no memory");
}

// vLLM pull requests 54296 and 13922: block tables were read past their end, padding was taken for a block.
TEST_CASE("rows beyond the table or without a block are refused") {
  // Two sequences' tables in one array, eight blocks of four rows each: row 32 of the first would be row 0 of the
  // second.
  std::vector<std::int32_t> tables(16);
  for (std::size_t i = 0; i < tables.size(); ++i) tables[i] = static_cast<std::int32_t>(i);
  std::vector<std::byte> memory(16 * 4 * 2 * 4);
  PagedPlane<F32Codec> plane(memory.data(), PagedLayout(tables.data(), 8, 4, 1, 2, 4 * 2 * 4, 2 * 4, 2 * 4));
  CHECK(plane.layout.contains(31));
  CHECK_FALSE(plane.layout.contains(32));
  CHECK_FALSE(plane.layout.contains(33));
  CHECK_FALSE(plane.layout.contains(-1));
  CHECK(check_rows(plane, 0, 32, "keys").ok());
  const Status beyond = check_rows(plane, 30, 4, "keys");
  CHECK(beyond.code() == StatusCode::out_of_range);
  CHECK(std::string(beyond.where()) == "keys");
  CHECK(std::string(beyond.message()) == "row 32 has no memory");

  tables[2] = -1;
  CHECK(plane.layout.contains(7));
  CHECK_FALSE(plane.layout.contains(8));
  CHECK_FALSE(plane.layout.contains(11));
  CHECK(plane.layout.contains(12));
  CHECK(std::string(check_rows(plane, 0, 16, "values").message()) == "row 8 has no memory");

  plane.layout.block_size = 0;  // an empty view, not a division by zero
  CHECK_FALSE(plane.layout.contains(0));
}

TEST_CASE("a plane without memory is refused unless nothing is asked of it") {
  const ContiguousPlane<F32Codec> plane(nullptr, ContiguousLayout(4, 1, 2, 8, 8));
  CHECK(check_rows(plane, 0, 0, "keys").ok());
  CHECK(check_rows(plane, 0, 1, "keys").code() == StatusCode::invalid_argument);
}

TEST_CASE("a plane's shape must be whole") {
  std::byte memory[64] = {};
  CHECK(check_shape(ContiguousPlane<F32Codec>(memory, ContiguousLayout(1, 1, 4, 16, 16)), "keys").ok());
  CHECK_FALSE(check_shape(ContiguousPlane<F32Codec>(memory, ContiguousLayout(1, 0, 4, 16, 16)), "keys").ok());
  CHECK_FALSE(check_shape(ContiguousPlane<F32Codec>(memory, ContiguousLayout(1, 1, 0, 16, 16)), "keys").ok());
  CHECK_FALSE(check_shape(ContiguousPlane<F32Codec>(memory, ContiguousLayout(1, 1, 1025, 16, 16)), "keys").ok());
  CHECK(check_shape(Plane<LeastCodec, LeastLayout>(memory, {}), "keys").ok());
  const Status odd = check_shape(ContiguousPlane<LeastCodec>(memory, ContiguousLayout(1, 1, 6, 16, 16)), "keys");
  CHECK(std::string(odd.where()) == "keys");
  CHECK(std::string(odd.message()) == "runs of 6 values are not whole f32 blocks of 4");
}

TEST_CASE("a head in several tiles of blocks is read and written in one piece") {
  std::vector<std::byte> memory(2 * 3 * 8);
  const Plane<LeastCodec, LeastLayout> plane(memory.data(), {});
  const float values[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  encode_head(plane, 1, 0, values);
  CHECK(memory[8] == std::byte{1});   // row 1 of tile 0
  CHECK(memory[32] == std::byte{5});  // row 1 of tile 1
  CHECK(memory[0] == std::byte{0});
  float back[8];
  decode_head(plane, 1, 0, back);
  for (int i = 0; i < 8; ++i) CHECK(back[i] == values[i]);
  decode_values(plane, 1, 0, 4, 8, back);
  CHECK(back[0] == 5);
}
