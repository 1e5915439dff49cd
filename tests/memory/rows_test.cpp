// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows are copied bit by bit between planes of one codec, whatever their tiles, and converted between others.
#include <kvblend/codec/floats.hpp>
#include <kvblend/memory/layouts.hpp>
#include <kvblend/memory/rows.hpp>

#include <doctest/doctest.h>
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
