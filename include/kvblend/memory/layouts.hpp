// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The layouts of memory/, each one way to say which memory a row has: rows at a fixed stride, blocks named by a table,
// or slots named by a list. What a row looks like inside - heads, and tiles within a head - is the same for all of
// them. Constructors check nothing; pools.hpp and engines.hpp make layouts from an engine's shapes and check them.
#pragma once

#include <kvblend/memory/plane.hpp>

#include <cstdint>
#include <limits>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// Inside a row: heads at a fixed stride; a head's values in tiles of tile_size consecutive ones, tiles at a fixed
// stride. Most memory has one tile a head. [head_dim / x, rows, x] has tiles of x values, [head_dim, rows] tiles of
// one. Strides are bytes, may be negative, and nothing needs to be aligned.
struct HeadShape {
  std::int32_t head_count = 0;
  std::int32_t head_values = 0;
  std::int32_t tile_size = 0;    // values, divides head_values
  std::int64_t origin = 0;       // from the plane's base to value 0 of head 0 of the first row
  std::int64_t head_stride = 0;  // bytes
  std::int64_t tile_stride = 0;  // bytes

  HeadShape() = default;
  KVBLEND_HOST_DEVICE HeadShape(std::int32_t heads, std::int32_t head_dim, std::int64_t head_stride_bytes)
      : head_count(heads), head_values(head_dim), tile_size(head_dim), head_stride(head_stride_bytes) {}
  KVBLEND_HOST_DEVICE HeadShape(std::int32_t heads, std::int32_t head_dim, std::int64_t head_stride_bytes,
                                std::int32_t tile_values, std::int64_t tile_stride_bytes)
      : head_count(heads),
        head_values(head_dim),
        tile_size(tile_values),
        head_stride(head_stride_bytes),
        tile_stride(tile_stride_bytes) {}

  [[nodiscard]] KVBLEND_HOST_DEVICE std::int32_t heads() const { return head_count; }
  [[nodiscard]] KVBLEND_HOST_DEVICE std::int32_t head_dim() const { return head_values; }
  [[nodiscard]] KVBLEND_HOST_DEVICE std::int32_t tiles() const { return tile_size > 0 ? head_values / tile_size : 0; }
  [[nodiscard]] KVBLEND_HOST_DEVICE std::int32_t tile_values() const { return tile_size; }

 protected:
  [[nodiscard]] KVBLEND_HOST_DEVICE std::int64_t within_row(std::int32_t head, std::int32_t tile) const {
    return origin + head * head_stride + tile * tile_stride;
  }
};

// Rows at a fixed stride. [rows, heads, head_dim] has row_stride = heads·head_dim·s and head_stride = head_dim·s with s
// bytes a value; [heads, rows, head_dim] has them the other way round.
struct ContiguousLayout : HeadShape {
  std::int64_t row_count = 0;
  std::int64_t row_stride = 0;  // bytes

  ContiguousLayout() = default;
  KVBLEND_HOST_DEVICE ContiguousLayout(std::int64_t rows, std::int32_t heads, std::int32_t head_dim,
                                       std::int64_t row_stride_bytes, std::int64_t head_stride_bytes)
      : ContiguousLayout(rows, HeadShape(heads, head_dim, head_stride_bytes), row_stride_bytes) {}
  KVBLEND_HOST_DEVICE ContiguousLayout(std::int64_t rows, const HeadShape& shape, std::int64_t row_stride_bytes)
      : HeadShape(shape), row_count(rows), row_stride(row_stride_bytes) {}

  [[nodiscard]] KVBLEND_HOST_DEVICE bool contains(std::int64_t row) const { return row >= 0 && row < row_count; }
  [[nodiscard]] KVBLEND_HOST_DEVICE bool contains_rows(std::int64_t first, std::int64_t count) const {
    return first >= 0 && first <= row_count && count <= row_count - first;
  }
  [[nodiscard]] bool lists_rows(std::int64_t first, std::int64_t count) const { return contains_rows(first, count); }
  [[nodiscard]] KVBLEND_HOST_DEVICE std::int64_t offset(std::int64_t row, std::int32_t head, std::int32_t tile) const {
    return row * row_stride + within_row(head, tile);
  }
};

// Memory that an engine deals out in blocks of block_size rows. It says nothing yet about which rows are where: a table
// or a list does, below. Contents may be smaller than the stride (padded blocks).
struct BlockPool : HeadShape {
  std::int64_t block_count = 0;
  std::int64_t first_block = 0;   // blocks before it never hold tokens: a dummy slot, a null block
  std::int32_t block_size = 1;    // rows
  std::int64_t block_stride = 0;  // bytes
  std::int64_t row_stride = 0;    // bytes, within a block

  BlockPool() = default;
  KVBLEND_HOST_DEVICE BlockPool(std::int64_t blocks, std::int32_t rows_per_block, const HeadShape& shape,
                                std::int64_t block_stride_bytes, std::int64_t row_stride_bytes)
      : HeadShape(shape),
        block_count(blocks),
        block_size(rows_per_block),
        block_stride(block_stride_bytes),
        row_stride(row_stride_bytes) {}

  [[nodiscard]] KVBLEND_HOST_DEVICE bool has_block(std::int64_t block) const {
    return block >= 0 && block >= first_block && block < block_count;
  }
};

// Blocks anywhere in a pool; block_table[row / block_size] names the block. An entry that is negative, before the
// pool's first block, or past its last is no block: its rows are not contained. The table is the caller's and must
// outlive the view.
struct PagedLayout : BlockPool {
  const std::int32_t* block_table = nullptr;  // [table_size]
  std::int64_t table_size = 0;
  std::int64_t row_count = (std::numeric_limits<std::int64_t>::max)();  // where the last block is not full

  PagedLayout() = default;
  // A pool of unknown size: any entry from 0 up is a block.
  KVBLEND_HOST_DEVICE PagedLayout(const std::int32_t* table, std::int64_t table_entries, std::int32_t rows_per_block,
                                  std::int32_t heads, std::int32_t head_dim, std::int64_t block_stride_bytes,
                                  std::int64_t row_stride_bytes, std::int64_t head_stride_bytes)
      : PagedLayout(BlockPool(std::int64_t{1} << 31, rows_per_block, HeadShape(heads, head_dim, head_stride_bytes),
                              block_stride_bytes, row_stride_bytes),
                    table, table_entries) {}
  KVBLEND_HOST_DEVICE PagedLayout(const BlockPool& pool, const std::int32_t* table, std::int64_t table_entries)
      : BlockPool(pool), block_table(table), table_size(table_entries) {}

  [[nodiscard]] KVBLEND_HOST_DEVICE bool contains(std::int64_t row) const {
    return row >= 0 && row < row_count && block_size > 0 && row / block_size < table_size &&
           has_block(block_table[row / block_size]);
  }
  [[nodiscard]] bool lists_rows(std::int64_t first, std::int64_t count) const {
    if (first < 0 || block_size <= 0 || first > row_count || count > row_count - first) return false;
    return count == 0 || (first + count - 1) / block_size < table_size;
  }
  // Valid for contained rows only.
  [[nodiscard]] KVBLEND_HOST_DEVICE std::int64_t offset(std::int64_t row, std::int32_t head, std::int32_t tile) const {
    return block_table[row / block_size] * block_stride + row % block_size * row_stride + within_row(head, tile);
  }
};

// Rows anywhere in a pool; slots[row] counts the pool's rows: slot = block · block_size + row within the block. A
// negative slot, and one in a block before the pool's first, is padding: the row is passed over. A slot past the pool's
// end is refused. The list is the caller's and must outlive the view.
template <class Slot = std::int32_t>
struct SlotLayout : BlockPool {
  static_assert(sizeof(Slot) < 8 || Slot(-1) < Slot(0), "slots fit a signed 64-bit number");

  const Slot* slots = nullptr;  // [slot_count]
  std::int64_t slot_count = 0;

  SlotLayout() = default;
  KVBLEND_HOST_DEVICE SlotLayout(const BlockPool& pool, const Slot* slot_list, std::int64_t count)
      : BlockPool(pool), slots(slot_list), slot_count(count) {}

  [[nodiscard]] KVBLEND_HOST_DEVICE bool contains(std::int64_t row) const {
    return row >= 0 && row < slot_count && block_size > 0 && slot(row) >= 0 && has_block(slot(row) / block_size);
  }
  [[nodiscard]] bool lists_rows(std::int64_t first, std::int64_t count) const {
    return first >= 0 && block_size > 0 && first <= slot_count && count <= slot_count - first;
  }
  [[nodiscard]] KVBLEND_HOST_DEVICE bool skips(std::int64_t row) const {
    return row >= 0 && row < slot_count && block_size > 0 && (slot(row) < 0 || slot(row) / block_size < first_block);
  }
  // Valid for contained rows only.
  [[nodiscard]] KVBLEND_HOST_DEVICE std::int64_t offset(std::int64_t row, std::int32_t head, std::int32_t tile) const {
    const std::int64_t at = slot(row);
    return at / block_size * block_stride + at % block_size * row_stride + within_row(head, tile);
  }

 private:
  [[nodiscard]] KVBLEND_HOST_DEVICE std::int64_t slot(std::int64_t row) const {
    return static_cast<std::int64_t>(slots[row]);
  }
};

template <Codec C>
using ContiguousPlane = Plane<C, ContiguousLayout>;
template <Codec C>
using ConstContiguousPlane = Plane<C, ContiguousLayout, const std::byte>;
template <Codec C>
using PagedPlane = Plane<C, PagedLayout>;
template <Codec C, class Slot = std::int32_t>
using SlotPlane = Plane<C, SlotLayout<Slot>>;

// Dense rows [rows, heads, head_dim] at `base`, the shape chunks are stored in.
template <Codec C, class Byte>
[[nodiscard]] Plane<C, ContiguousLayout, Byte> dense_plane(Byte* base, std::int64_t rows, std::int32_t heads,
                                                           std::int32_t head_dim) {
  const std::int64_t head_bytes = bytes_of<C>(head_dim);
  return {base, ContiguousLayout(rows, heads, head_dim, heads * head_bytes, head_bytes)};
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
