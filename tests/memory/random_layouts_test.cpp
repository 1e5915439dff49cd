// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Each layout type, with random axes, strides, padding, tiles and tables, against an index into a nested array.
#include <kvblend/memory/block_array.hpp>

#include <doctest/doctest.h>
#include <array>
#include <cstdint>
#include <random>
#include <type_traits>
#include <vector>
#include "layout_support.hpp"

using namespace kvblend;
using namespace kvblend_test;

namespace {

constexpr int kCases = 10000;

static_assert(Layout<ContiguousLayout> && Layout<PagedLayout> && Layout<SlotLayout<>> && Layout<BlockArrayLayout> &&
              Layout<SlotLayout<std::int64_t>> && Layout<SlotLayout<std::uint32_t>>);
static_assert(std::is_trivially_copyable_v<BlockPool> && std::is_trivially_copyable_v<SlotPlane<F16Codec>>);

// An array of blocks × rows × heads × tiles in any nesting, each axis with some unused elements at its end, some axes
// running downwards; innermost a tile's values.
template <class C>
struct RandomArray {
  enum Axis { kBlock, kRow, kHead, kTile };
  std::array<std::int64_t, 4> extent{};
  std::array<std::int64_t, 4> allocated{};
  std::array<bool, 4> downwards{};
  std::array<Axis, 4> nesting{kBlock, kRow, kHead, kTile};
  std::int64_t tile = 1;
  std::int64_t gap = 0;  // bytes after each tile

  explicit RandomArray(std::mt19937& random) {
    extent = {pick(random, 1, 4), pick(random, 1, 4), pick(random, 1, 3), pick(random, 1, 4)};
    tile = pick(random, 1, 4);
    gap = pick(random, 0, 2);
    std::shuffle(nesting.begin(), nesting.end(), random);
    for (std::size_t axis = 0; axis < 4; ++axis) {
      allocated[axis] = extent[axis] + (pick(random, 0, 3) == 0 ? 1 : 0);
      downwards[axis] = pick(random, 0, 3) == 0;
    }
  }
  std::int64_t unit() const { return tile * C::block_bytes + gap; }
  std::int64_t size() const { return elements({allocated[0], allocated[1], allocated[2], allocated[3]}) * unit(); }
  // By the array's description.
  std::int64_t byte(std::int64_t block, std::int64_t row, std::int64_t head, std::int64_t value) const {
    const std::array<std::int64_t, 4> index{block, row, head, value / tile};
    std::vector<std::int64_t> shape, indices;
    for (const Axis axis : nesting) {
      shape.push_back(allocated[axis]);
      indices.push_back(downwards[axis] ? extent[axis] - 1 - index[axis] : index[axis]);
    }
    return element(shape, indices) * unit() + value % tile * C::block_bytes;
  }
  // By strides, for the layout.
  std::int64_t stride(Axis axis) const {
    std::int64_t bytes = unit();
    for (std::size_t i = 4; nesting[--i] != axis;) bytes *= allocated[nesting[i]];
    return downwards[axis] ? -bytes : bytes;
  }
  std::int64_t origin() const {
    std::int64_t bytes = 0;
    for (const Axis axis : nesting) bytes -= downwards[axis] ? (extent[axis] - 1) * stride(axis) : 0;
    return bytes;
  }
  HeadShape shape() const {
    return HeadShape(static_cast<std::int32_t>(extent[kHead]), static_cast<std::int32_t>(extent[kTile] * tile),
                     stride(kHead), static_cast<std::int32_t>(tile), stride(kTile));
  }
  // With the origin in the layout, or left to the base.
  BlockPool pool(std::int64_t first_row) const {
    BlockPool made(extent[kBlock], static_cast<std::int32_t>(extent[kRow]), shape(), stride(kBlock), stride(kRow));
    made.origin = first_row;
    return made;
  }
};

template <class C>
bool contiguous_agrees(std::mt19937& random) {
  using Array = RandomArray<C>;
  const Array array(random);
  const std::int64_t block = pick(random, 0, array.extent[0] - 1);
  const std::int64_t start = array.origin() + block * array.stride(Array::kBlock);
  ContiguousLayout layout(array.extent[1], array.shape(), array.stride(Array::kRow));
  layout.origin = pick(random, 0, 1) * start;
  const std::int64_t from_base = layout.origin == 0 ? start : 0;
  Memory memory(random, array.size());
  return agrees<C>(
      random, layout, array.extent[1],
      [&](std::int64_t row) { return row >= 0 && row < array.extent[1] ? Held::yes : Held::no; },
      [&](std::int64_t row, std::int64_t head, std::int64_t value) {
        return array.byte(block, row, head, value) - from_base;
      },
      memory, from_base);
}

template <class C>
bool paged_agrees(std::mt19937& random) {
  const RandomArray<C> array(random);
  const std::int64_t blocks = array.extent[0];
  const std::int64_t size = array.extent[1];
  const std::vector<std::int32_t> table = random_table(random, pick(random, 0, 5), -1, blocks);
  const auto entries = static_cast<std::int64_t>(table.size());
  PagedLayout layout(array.pool(array.origin()), table.data(), entries);
  layout.first_block = pick(random, 0, 1);
  const std::int64_t rows = pick(random, 0, entries * size);
  if (pick(random, 0, 1) == 0) layout.row_count = rows;
  const std::int64_t length = layout.row_count == rows ? rows : entries * size;
  Memory memory(random, array.size());
  return agrees<C>(
      random, layout, entries * size,
      [&](std::int64_t row) {
        if (row < 0 || row >= length) return Held::no;
        const std::int32_t block = table[static_cast<std::size_t>(row / size)];
        return block >= layout.first_block && block < blocks ? Held::yes : Held::no;
      },
      [&](std::int64_t row, std::int64_t head, std::int64_t value) {
        return array.byte(table[static_cast<std::size_t>(row / size)], row % size, head, value);
      },
      memory);
}

template <class C, class Slot>
bool slots_agree(std::mt19937& random) {
  const RandomArray<C> array(random);
  const std::int64_t size = array.extent[1];
  const std::int64_t room = array.extent[0] * size;
  std::vector<Slot> slots(static_cast<std::size_t>(pick(random, 0, 12)));
  for (Slot& slot : slots) slot = static_cast<Slot>(pick(random, std::is_signed_v<Slot> ? -2 : 0, room));
  SlotLayout<Slot> layout(array.pool(array.origin()), slots.data(), static_cast<std::int64_t>(slots.size()));
  layout.first_block = pick(random, 0, 1);
  Memory memory(random, array.size());
  const auto slot = [&](std::int64_t row) { return static_cast<std::int64_t>(slots[static_cast<std::size_t>(row)]); };
  return agrees<C>(
      random, layout, static_cast<std::int64_t>(slots.size()),
      [&](std::int64_t row) {
        if (row < 0 || row >= static_cast<std::int64_t>(slots.size())) return Held::no;
        if (slot(row) < layout.first_block * size) return Held::padding;
        return slot(row) < room ? Held::yes : Held::no;
      },
      [&](std::int64_t row, std::int64_t head, std::int64_t value) {
        return array.byte(slot(row) / size, slot(row) % size, head, value);
      },
      memory);
}

// Two pools in one memory, the secondary one before or after the primary.
template <class C>
bool block_array_agrees(std::mt19937& random) {
  RandomArray<C> array(random);
  const std::int64_t size = array.extent[1];
  const bool secondary_first = pick(random, 0, 1) == 0;
  const std::int64_t apart = array.size() + pick(random, 0, 3);
  const std::int64_t secondary_blocks = pick(random, 0, array.extent[0]);
  std::vector<std::int32_t> table = random_table(random, pick(random, 0, 5), 0, array.extent[0]);
  std::vector<bool> secondary, none;
  for (std::int32_t& entry : table) {
    secondary.push_back(pick(random, 0, 1) == 0);
    none.push_back(pick(random, 0, 5) == 0);
    if (secondary.back()) entry = static_cast<std::int32_t>(static_cast<std::uint32_t>(entry) | 0x80000000u);
    if (none.back()) entry = -1;
  }
  const auto entries = static_cast<std::int64_t>(table.size());
  Memory memory(random, 2 * apart);
  const std::int64_t primary = secondary_first ? apart : 0;
  BlockArrayLayout layout(array.pool(array.origin()), secondary_blocks,
                          bytes_between(memory.base() + primary, memory.base() + apart - primary), table.data(),
                          entries);
  layout.row_count = pick(random, 0, entries * size);
  const auto number = [&](std::int64_t row) { return table[static_cast<std::size_t>(row / size)] & 0x7fffffff; };
  return agrees<C>(
      random, layout, entries * size,
      [&](std::int64_t row) {
        if (row < 0 || row >= layout.row_count || none[static_cast<std::size_t>(row / size)]) return Held::no;
        const std::int64_t blocks =
            secondary[static_cast<std::size_t>(row / size)] ? secondary_blocks : array.extent[0];
        return number(row) < blocks ? Held::yes : Held::no;
      },
      [&](std::int64_t row, std::int64_t head, std::int64_t value) {
        const std::int64_t shift = secondary[static_cast<std::size_t>(row / size)] ? apart - 2 * primary : 0;
        return shift + array.byte(number(row), row % size, head, value);
      },
      memory, primary);
}

template <class Case>
void run_cases(unsigned seed, const Case& agrees_once) {
  CAPTURE(seed);
  std::mt19937 random(seed);
  int right = 0;  // also the number of the first case that is wrong
  while (right < kCases && agrees_once(random)) ++right;
  CHECK(right == kCases);
}

}  // namespace

TEST_CASE("contiguous rows lie where a nested array has them") {
  run_cases(401, contiguous_agrees<F16Codec>);
  run_cases(402, contiguous_agrees<F32Codec>);
}
TEST_CASE("paged rows lie where a nested array has them") { run_cases(403, paged_agrees<F16Codec>); }
TEST_CASE("rows in slots lie where a nested array has them") {
  run_cases(404, slots_agree<F16Codec, std::int32_t>);
  run_cases(405, slots_agree<Bf16Codec, std::int64_t>);
  run_cases(406, slots_agree<F32Codec, std::uint32_t>);
}
TEST_CASE("rows in two pools lie where nested arrays have them") { run_cases(407, block_array_agrees<F16Codec>); }
