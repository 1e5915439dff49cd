// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows are copied bit by bit between planes of one codec, whatever their tiles, and converted between others.
#include <kvblend/codec/floats.hpp>
#include <kvblend/memory/layouts.hpp>
#include <kvblend/memory/rows.hpp>

#include <doctest/doctest.h>
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

using namespace kvblend;

namespace {

// [heads, head_dim / tile, rows, tile]: keys in tiles, as some engines pack them.
struct TiledLayout {
  std::int64_t row_count = 0;
  std::int32_t head_count = 0;
  std::int32_t dim = 0;
  std::int32_t tile = 1;
  std::int64_t value_bytes = 1;

  std::int32_t heads() const { return head_count; }
  std::int32_t head_dim() const { return dim; }
  std::int32_t tiles() const { return dim / tile; }
  std::int32_t tile_values() const { return tile; }
  bool contains(std::int64_t row) const { return row >= 0 && row < row_count; }
  std::int64_t offset(std::int64_t row, std::int32_t head, std::int32_t index) const {
    return ((std::int64_t{head} * tiles() + index) * row_count + row) * tile * value_bytes;
  }
};
static_assert(Layout<TiledLayout>);

}  // namespace

TEST_CASE("rows keep their bits between layouts of different tiles") {
  const unsigned seed = 61;
  CAPTURE(seed);
  std::mt19937 random(seed);
  std::vector<std::byte> dense(5 * 2 * 24 * 2);
  for (std::byte& byte : dense) byte = static_cast<std::byte>(random());  // signalling NaNs among them
  const auto source = dense_plane<F16Codec>(static_cast<const std::byte*>(dense.data()), 5, 2, 24);
  for (const std::int32_t tile : {1, 2, 3, 4, 6, 8, 12, 24}) {
    for (const std::int32_t other : {1, 4, 8, 24}) {
      CAPTURE(tile);
      CAPTURE(other);
      std::vector<std::byte> first(dense.size()), second(dense.size()), back(dense.size());
      const Plane<F16Codec, TiledLayout> tiled(first.data(), TiledLayout{5, 2, 24, tile, 2});
      const Plane<F16Codec, TiledLayout> retiled(second.data(), TiledLayout{5, 2, 24, other, 2});
      copy_rows(source, 0, tiled, 0, 5);
      copy_rows(tiled, 0, retiled, 0, 5);
      copy_rows(retiled, 0, dense_plane<F16Codec>(back.data(), 5, 2, 24), 0, 5);
      CHECK(back == dense);
    }
  }
}

TEST_CASE_TEMPLATE("many rows go into transposed memory and back and padding is passed over", C, F16Codec, F32Codec) {
  const unsigned seed = 62;
  CAPTURE(seed);
  std::mt19937 random(seed);
  constexpr std::int32_t kRows = 150, kHeads = 3, kDim = 20, kBlock = 8;
  constexpr std::size_t kBytes = C::block_bytes;
  std::vector<std::byte> dense(std::size_t{kRows} * kHeads * kDim * kBytes);
  for (std::byte& byte : dense) byte = static_cast<std::byte>(random());
  const auto source = dense_plane<C>(static_cast<const std::byte*>(dense.data()), kRows, kHeads, kDim);

  // [blocks, heads, head_dim, rows of a block], rows by slots in any order, every seventh one padding.
  std::vector<std::int32_t> slots(kRows);
  for (std::int32_t i = 0; i < kRows; ++i) slots[static_cast<std::size_t>(i)] = i;
  std::shuffle(slots.begin(), slots.end(), random);
  for (std::size_t i = 0; i < slots.size(); i += 7) slots[i] = -1;
  constexpr std::int64_t kValue = std::int64_t{kBlock} * static_cast<std::int64_t>(kBytes);
  const BlockPool pool((kRows + kBlock - 1) / kBlock, kBlock, HeadShape(kHeads, kDim, kDim * kValue, 1, kValue),
                       kHeads * kDim * kValue, static_cast<std::int64_t>(kBytes));
  std::vector<std::byte> memory(static_cast<std::size_t>(pool.block_count * pool.block_stride), std::byte{0x5a});
  const SlotPlane<C> transposed(memory.data(), SlotLayout<>(pool, slots.data(), kRows));
  const std::int32_t first = 3;
  copy_rows(source, first, transposed, first, kRows - first);

  std::vector<std::byte> expected(memory.size(), std::byte{0x5a});
  for (std::int32_t row = first; row < kRows; ++row) {
    const std::int32_t slot = slots[static_cast<std::size_t>(row)];
    for (std::int32_t value = 0; value < kHeads * kDim && slot >= 0; ++value) {
      const std::size_t from = static_cast<std::size_t>(row * kHeads * kDim + value) * kBytes;
      const std::size_t to =
          static_cast<std::size_t>((slot / kBlock * kHeads * kDim + value) * kBlock + slot % kBlock) * kBytes;
      std::copy_n(dense.begin() + static_cast<std::ptrdiff_t>(from), kBytes,
                  expected.begin() + static_cast<std::ptrdiff_t>(to));
    }
  }
  CHECK(memory == expected);

  std::vector<std::byte> back(dense.size(), std::byte{1});
  copy_rows(transposed, 0, dense_plane<C>(back.data(), kRows, kHeads, kDim), 0, kRows);
  for (std::int32_t row = first; row < kRows; ++row) {
    const std::size_t bytes = std::size_t{kHeads} * kDim * kBytes;
    const auto at = static_cast<std::ptrdiff_t>(static_cast<std::size_t>(row) * bytes);
    const bool padding = slots[static_cast<std::size_t>(row)] < 0;
    CHECK(std::equal(back.begin() + at, back.begin() + at + static_cast<std::ptrdiff_t>(bytes), dense.begin() + at) !=
          padding);
  }
}

TEST_CASE("rows of one plane may overlap") {
  std::vector<float> values(40);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  const auto plane = dense_plane<F32Codec>(reinterpret_cast<std::byte*>(values.data()), 20, 1, 2);
  copy_rows(plane, 0, plane, 3, 10);
  for (std::size_t i = 0; i < 20; ++i) CHECK(values[6 + i] == static_cast<float>(i));
  copy_rows(plane, 3, plane, 1, 10);
  for (std::size_t i = 0; i < 20; ++i) CHECK(values[2 + i] == static_cast<float>(i));
}

TEST_CASE("rows are converted where the codecs differ") {
  float values[4] = {1.0f, 1.0f + 0x1p-11f, -70000.0f, 0x1p-25f};
  std::byte half[8];
  copy_row(dense_plane<F32Codec>(reinterpret_cast<const std::byte*>(values), 1, 1, 4), 0,
           dense_plane<F16Codec>(half, 1, 1, 4), 0);
  const unsigned char expected[8] = {0x00, 0x3c, 0x00, 0x3c, 0x00, 0xfc, 0x00, 0x00};
  for (int i = 0; i < 8; ++i) CHECK(half[i] == static_cast<std::byte>(expected[i]));
}
