// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// BlockArrayLayout: blocks of two pools in two memories, as TensorRT-LLM's KVBlockArray keeps them. The primary pool
// lies where the engine computes, the secondary one where it moves blocks that it has no room for.
#pragma once

#include <kvblend/memory/layouts.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// Table entries are TensorRT-LLM's KVCacheIndex (cpp/include/tensorrt_llm/kernels/kvCacheIndex.h): the block's number
// in the lower 31 bits, the top bit set for the secondary pool, all bits set for no block. The plane's base is the
// primary pool; the secondary one has the same strides. An entry past its pool's end is no block: its rows are not
// contained. The table is the caller's and must outlive the view.
struct BlockArrayLayout : BlockPool {
  const std::int32_t* block_table = nullptr;  // [table_size]
  std::int64_t table_size = 0;
  std::int64_t row_count = (std::numeric_limits<std::int64_t>::max)();
  std::int64_t secondary_count = 0;   // blocks
  std::int64_t secondary_origin = 0;  // bytes from the primary pool to the secondary one

  BlockArrayLayout() = default;
  KVBLEND_HOST_DEVICE BlockArrayLayout(const BlockPool& primary, std::int64_t secondary_blocks,
                                       std::int64_t secondary_origin_bytes, const std::int32_t* table,
                                       std::int64_t table_entries)
      : BlockPool(primary),
        block_table(table),
        table_size(table_entries),
        secondary_count(secondary_blocks),
        secondary_origin(secondary_origin_bytes) {}

  [[nodiscard]] KVBLEND_HOST_DEVICE bool contains(std::int64_t row) const {
    return row >= 0 && row < row_count && block_size > 0 && row / block_size < table_size &&
           has_entry(block_table[row / block_size]);
  }
  // Valid for contained rows only.
  [[nodiscard]] KVBLEND_HOST_DEVICE std::int64_t offset(std::int64_t row, std::int32_t head, std::int32_t tile) const {
    const std::int32_t entry = block_table[row / block_size];
    return (entry < 0 ? secondary_origin : 0) + number(entry) * block_stride + row % block_size * row_stride +
           within_row(head, tile);
  }

 private:
  [[nodiscard]] KVBLEND_HOST_DEVICE static std::int64_t number(std::int32_t entry) { return entry & 0x7fffffff; }
  [[nodiscard]] KVBLEND_HOST_DEVICE bool has_entry(std::int32_t entry) const {
    if (entry >= 0) return has_block(entry);
    return entry != -1 && number(entry) < secondary_count;
  }
};

// Bytes from one allocation to another, for secondary_origin.
[[nodiscard]] inline std::int64_t bytes_between(const void* from, const void* to) {
  return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(to) - reinterpret_cast<std::uintptr_t>(from));
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
