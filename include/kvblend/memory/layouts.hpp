// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The layouts of memory/: contiguous (any strides, so NHD and HND alike) and paged through a block table.
#pragma once

#include <kvblend/memory/plane.hpp>

#include <cstdint>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// Rows and heads at fixed byte strides; a head's values are consecutive. [rows, heads, head_dim] has row_stride =
// heads·head_dim·s and head_stride = head_dim·s with s bytes a value; [heads, rows, head_dim] has them the other way
// round. Strides may be negative, and rows need no alignment.
struct ContiguousLayout {
  std::int64_t row_count = 0;
  std::int32_t head_count = 0;
  std::int32_t head_values = 0;
  std::int64_t row_stride = 0;   // bytes
  std::int64_t head_stride = 0;  // bytes

  ContiguousLayout() = default;
  KVBLEND_HOST_DEVICE ContiguousLayout(std::int64_t rows, std::int32_t heads, std::int32_t head_dim,
                                       std::int64_t row_stride_bytes, std::int64_t head_stride_bytes)
      : row_count(rows),
        head_count(heads),
        head_values(head_dim),
        row_stride(row_stride_bytes),
        head_stride(head_stride_bytes) {}

  [[nodiscard]] KVBLEND_HOST_DEVICE std::int32_t heads() const { return head_count; }
  [[nodiscard]] KVBLEND_HOST_DEVICE std::int32_t head_dim() const { return head_values; }
  [[nodiscard]] KVBLEND_HOST_DEVICE std::int32_t tiles() const { return 1; }
  [[nodiscard]] KVBLEND_HOST_DEVICE std::int32_t tile_values() const { return head_values; }
  [[nodiscard]] KVBLEND_HOST_DEVICE bool contains(std::int64_t row) const { return row >= 0 && row < row_count; }
  [[nodiscard]] KVBLEND_HOST_DEVICE std::int64_t offset(std::int64_t row, std::int32_t head, std::int32_t) const {
    return row * row_stride + head * head_stride;
  }
};

// Blocks of block_size rows anywhere in one allocation; block_table[row / block_size] names the block. A negative entry
// is no block: its rows are not contained. The table is the caller's and must outlive the view.
struct PagedLayout {
  const std::int32_t* block_table = nullptr;  // [table_size]
  std::int64_t table_size = 0;
  std::int32_t block_size = 1;  // rows a block
  std::int32_t head_count = 0;
  std::int32_t head_values = 0;
  std::int64_t block_stride = 0;  // bytes
  std::int64_t row_stride = 0;    // bytes, within a block
  std::int64_t head_stride = 0;   // bytes

  PagedLayout() = default;
  KVBLEND_HOST_DEVICE PagedLayout(const std::int32_t* table, std::int64_t table_entries, std::int32_t rows_per_block,
                                  std::int32_t heads, std::int32_t head_dim, std::int64_t block_stride_bytes,
                                  std::int64_t row_stride_bytes, std::int64_t head_stride_bytes)
      : block_table(table),
        table_size(table_entries),
        block_size(rows_per_block),
        head_count(heads),
        head_values(head_dim),
        block_stride(block_stride_bytes),
        row_stride(row_stride_bytes),
        head_stride(head_stride_bytes) {}

  [[nodiscard]] KVBLEND_HOST_DEVICE std::int32_t heads() const { return head_count; }
  [[nodiscard]] KVBLEND_HOST_DEVICE std::int32_t head_dim() const { return head_values; }
  [[nodiscard]] KVBLEND_HOST_DEVICE std::int32_t tiles() const { return 1; }
  [[nodiscard]] KVBLEND_HOST_DEVICE std::int32_t tile_values() const { return head_values; }
  [[nodiscard]] KVBLEND_HOST_DEVICE bool contains(std::int64_t row) const {
    return row >= 0 && block_size > 0 && row / block_size < table_size && block_table[row / block_size] >= 0;
  }
  // Valid for contained rows only.
  [[nodiscard]] KVBLEND_HOST_DEVICE std::int64_t offset(std::int64_t row, std::int32_t head, std::int32_t) const {
    return block_table[row / block_size] * block_stride + row % block_size * row_stride + head * head_stride;
  }
};

template <Codec C>
using ContiguousPlane = Plane<C, ContiguousLayout>;
template <Codec C>
using ConstContiguousPlane = Plane<C, ContiguousLayout, const std::byte>;
template <Codec C>
using PagedPlane = Plane<C, PagedLayout>;

// Dense rows [rows, heads, head_dim] at `base`, the shape chunks are stored in.
template <Codec C, class Byte>
[[nodiscard]] Plane<C, ContiguousLayout, Byte> dense_plane(Byte* base, std::int64_t rows, std::int32_t heads,
                                                           std::int32_t head_dim) {
  const std::int64_t head_bytes = bytes_of<C>(head_dim);
  return {base, ContiguousLayout(rows, heads, head_dim, heads * head_bytes, head_bytes)};
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
