// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// From an engine's shapes to layouts, checked: a shape gives a pool once, when the engine allocates; a pool with a
// sequence's block table or slot list gives the layout of its rows. engines.hpp names the pools of known engines.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/memory/layouts.hpp>

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// The shape of paged memory for keys or values of one layer.
struct PoolShape {
  std::int64_t blocks = 0;
  std::int32_t block_size = 1;  // rows a block
  std::int32_t heads = 0;
  std::int32_t head_dim = 0;       // values
  std::int64_t block_padding = 0;  // bytes after each block that hold nothing
};

// The order within a block, by FlashInfer's names: [rows, heads, head_dim] or [heads, rows, head_dim].
enum class RowOrder : std::uint8_t { nhd, hnd };

// Keys and values of one layer, as layouts over one base pointer.
template <class L>
struct KvPair {
  L keys{};
  L values{};
};

namespace detail {

// Sums and products of sizes that remember whether they left 63 bits.
class ByteCount {
 public:
  constexpr ByteCount(std::int64_t value) : value_(value) {}  // NOLINT: implicit by design

  friend constexpr ByteCount operator*(ByteCount a, ByteCount b) {
    constexpr std::int64_t kMost = (std::numeric_limits<std::int64_t>::max)();
    ByteCount product(0);
    product.fits_ = a.fits_ && b.fits_ && (b.value_ == 0 || a.value_ <= kMost / b.value_);
    if (product.fits_) product.value_ = a.value_ * b.value_;
    return product;
  }
  friend constexpr ByteCount operator+(ByteCount a, ByteCount b) {
    constexpr std::int64_t kMost = (std::numeric_limits<std::int64_t>::max)();
    ByteCount sum(0);
    sum.fits_ = a.fits_ && b.fits_ && a.value_ <= kMost - b.value_;
    if (sum.fits_) sum.value_ = a.value_ + b.value_;
    return sum;
  }
  [[nodiscard]] constexpr std::int64_t value() const { return value_; }
  [[nodiscard]] constexpr bool fits() const { return fits_; }

 private:
  std::int64_t value_;
  bool fits_ = true;
};

inline Status check_size(std::int64_t value, std::int64_t least, const char* name) {
  if (value >= least) return {};
  return Status::error(StatusCode::invalid_argument, "is %lld, must be at least %lld", static_cast<long long>(value),
                       static_cast<long long>(least))
      .at("%s", name);
}

// Whether the offsets in so many bytes are 64-bit numbers.
inline Status check_bytes(ByteCount bytes, const char* name) {
  if (bytes.fits()) return {};
  return Status::error(StatusCode::out_of_range, "are more bytes than 64-bit offsets reach").at("%s", name);
}

// A table or list of `count` entries.
template <class T>
Status check_table(const T* table, std::int64_t count, const char* name) {
  KVBLEND_RETURN_IF_ERROR(check_size(count, 0, name));
  if (table != nullptr || count == 0) return {};
  return Status::error(StatusCode::invalid_argument, "is null, and has %lld entries", static_cast<long long>(count))
      .at("%s", name);
}

template <Codec C>
Status check_head_dim(std::int32_t head_dim, std::int32_t run, const char* name) {
  if (head_dim < 1 || head_dim > kMaxHeadDim) {
    return Status::error(StatusCode::invalid_argument, "is %d, must be in [1, %d]", head_dim, kMaxHeadDim)
        .at("%s", name);
  }
  if (run < 1 || head_dim % run != 0) {
    return Status::error(StatusCode::invalid_argument, "is %d, not whole tiles of %d values", head_dim, run)
        .at("%s", name);
  }
  if (run % C::block_values != 0) {
    return Status::error(StatusCode::invalid_argument, "runs of %d values are not whole %s blocks of %d", run,
                         to_string(C::dtype), static_cast<int>(C::block_values))
        .at("%s", name);
  }
  return {};
}

inline Status check_order(RowOrder order) {
  if (order == RowOrder::nhd || order == RowOrder::hnd) return {};
  return Status::error(StatusCode::invalid_argument, "is %d", static_cast<int>(order)).at("order");
}

template <Codec C>
Status check_pool(const PoolShape& shape, std::int32_t tile) {
  KVBLEND_RETURN_IF_ERROR(check_size(shape.blocks, 0, "blocks"));
  KVBLEND_RETURN_IF_ERROR(check_size(shape.block_size, 1, "block_size"));
  KVBLEND_RETURN_IF_ERROR(check_size(shape.heads, 1, "heads"));
  KVBLEND_RETURN_IF_ERROR(check_size(shape.block_padding, 0, "block_padding"));
  return check_head_dim<C>(shape.head_dim, tile, "head_dim");
}

// Bytes of a block's contents. Tiles of a head, if several, lie block_size rows apart.
template <Codec C>
[[nodiscard]] constexpr ByteCount block_bytes(const PoolShape& shape) {
  return ByteCount(bytes_of<C>(shape.head_dim)) * shape.heads * shape.block_size;
}

// Whether the offsets in blocks of such contents, with their padding, are 64-bit numbers.
inline Status check_blocks(ByteCount contents, const PoolShape& shape) {
  KVBLEND_RETURN_IF_ERROR(check_bytes(contents, "block_size"));
  KVBLEND_RETURN_IF_ERROR(check_bytes(contents + shape.block_padding, "block_padding"));
  return check_bytes((contents + shape.block_padding) * shape.blocks, "blocks");
}

// Whether `entries` blocks have room for so many rows; -1 is any number.
inline Status check_room(std::int64_t rows, std::int64_t entries, std::int32_t block_size) {
  KVBLEND_RETURN_IF_ERROR(check_size(rows, -1, "rows"));
  const ByteCount room = ByteCount(entries) * block_size;
  if (!room.fits() || rows <= room.value()) return {};
  return Status::error(StatusCode::out_of_range, "are %lld, the block table has room for %lld",
                       static_cast<long long>(rows), static_cast<long long>(room.value()))
      .at("rows");
}

// An error at a field of ours, under the name that the caller's engine has for it.
inline Status renamed(const Status& status, const char* field, const char* name) {
  if (status.ok() || std::strcmp(status.where(), field) != 0) return status;
  return Status::error(status.code(), "%s", status.message()).at("%s", name);
}

// A pool of checked shape whose blocks are `stride` bytes apart, the first at `origin`.
template <Codec C>
[[nodiscard]] BlockPool make_pool(const PoolShape& shape, RowOrder order, std::int64_t stride, std::int64_t origin) {
  const std::int64_t head = bytes_of<C>(shape.head_dim);
  const bool rows_outside = order == RowOrder::nhd;
  BlockPool pool(shape.blocks, shape.block_size,
                 HeadShape(shape.heads, shape.head_dim, rows_outside ? head : shape.block_size * head), stride,
                 rows_outside ? shape.heads * head : head);
  pool.origin = origin;
  return pool;
}

// The same in tiles: [heads, head_dim / tile, rows, tile].
template <Codec C>
[[nodiscard]] BlockPool make_tiled_pool(const PoolShape& shape, std::int32_t tile, std::int64_t stride) {
  const std::int64_t run = bytes_of<C>(tile);
  const std::int64_t head = bytes_of<C>(shape.head_dim);
  return BlockPool(shape.blocks, shape.block_size,
                   HeadShape(shape.heads, shape.head_dim, shape.block_size * head, tile, shape.block_size * run),
                   stride, run);
}

}  // namespace detail

// [blocks, rows, heads, head_dim] or [blocks, heads, rows, head_dim], with padding after each block if there is any.
// Errors name the field: a size below its least, head_dim not in whole codec blocks, more bytes than offsets reach.
template <Codec C>
Result<BlockPool> block_pool(const PoolShape& shape, RowOrder order = RowOrder::nhd) {
  KVBLEND_RETURN_IF_ERROR(detail::check_order(order));
  KVBLEND_RETURN_IF_ERROR(detail::check_pool<C>(shape, shape.head_dim));
  const detail::ByteCount contents = detail::block_bytes<C>(shape);
  KVBLEND_RETURN_IF_ERROR(detail::check_blocks(contents, shape));
  return detail::make_pool<C>(shape, order, contents.value() + shape.block_padding, 0);
}

// [blocks, heads, head_dim / tile, rows, tile]: tile 1 is transposed memory, tile x packs x values of each row.
template <Codec C>
Result<BlockPool> tiled_pool(const PoolShape& shape, std::int32_t tile) {
  KVBLEND_RETURN_IF_ERROR(detail::check_size(tile, 1, "tile"));
  KVBLEND_RETURN_IF_ERROR(detail::check_pool<C>(shape, tile));
  const detail::ByteCount contents = detail::block_bytes<C>(shape);
  KVBLEND_RETURN_IF_ERROR(detail::check_blocks(contents, shape));
  return detail::make_tiled_pool<C>(shape, tile, contents.value() + shape.block_padding);
}

// Rows [rows, heads, head_dim] or [heads, rows, head_dim] that nothing lies between.
template <Codec C>
Result<ContiguousLayout> dense_layout(std::int64_t rows, std::int32_t heads, std::int32_t head_dim,
                                      RowOrder order = RowOrder::nhd) {
  KVBLEND_RETURN_IF_ERROR(detail::check_order(order));
  KVBLEND_RETURN_IF_ERROR(detail::check_size(rows, 0, "rows"));
  KVBLEND_RETURN_IF_ERROR(detail::check_pool<C>({0, 1, heads, head_dim, 0}, head_dim));
  const std::int64_t head = bytes_of<C>(head_dim);
  KVBLEND_RETURN_IF_ERROR(detail::check_bytes(detail::ByteCount(head) * heads * rows, "rows"));
  return order == RowOrder::nhd ? ContiguousLayout(rows, heads, head_dim, heads * head, head)
                                : ContiguousLayout(rows, heads, head_dim, head, rows * head);
}

// A sequence's rows by its block table: row r lies in block table[r / block_size]. `rows` is the sequence's length
// where the engine knows it (its last block is seldom full); -1: as many as the table has room for.
// Entries are looked at when rows are, not here.
inline Result<PagedLayout> by_table(const BlockPool& pool, const std::int32_t* table, std::int64_t entries,
                                    std::int64_t rows = -1) {
  KVBLEND_RETURN_IF_ERROR(detail::check_table(table, entries, "block table"));
  KVBLEND_RETURN_IF_ERROR(detail::check_size(pool.block_size, 1, "block_size"));
  KVBLEND_RETURN_IF_ERROR(detail::check_room(rows, entries, pool.block_size));
  PagedLayout layout(pool, table, entries);
  if (rows >= 0) layout.row_count = rows;
  return layout;
}

// Rows by a list of slots (std::int32_t, std::int64_t, or std::uint32_t), negative ones being padding.
template <class Slot>
Result<SlotLayout<Slot>> by_slots(const BlockPool& pool, const Slot* slots, std::int64_t count) {
  KVBLEND_RETURN_IF_ERROR(detail::check_table(slots, count, "slots"));
  KVBLEND_RETURN_IF_ERROR(detail::check_size(pool.block_size, 1, "block_size"));
  return SlotLayout<Slot>(pool, slots, count);
}

// All rows of a pool in the order in which they lie, where that is one stride.
inline Result<ContiguousLayout> in_order(const BlockPool& pool) {
  KVBLEND_RETURN_IF_ERROR(detail::check_size(pool.block_count, 0, "block_count"));
  KVBLEND_RETURN_IF_ERROR(detail::check_size(pool.block_size, 1, "block_size"));
  if (pool.first_block > 0) {
    return Status::error(StatusCode::unsupported, "is %lld: the pool's first rows are padding",
                         static_cast<long long>(pool.first_block))
        .at("first_block");
  }
  const bool one_stride =
      pool.block_size == 1 || pool.block_count <= 1 ||
      (pool.block_stride % pool.block_size == 0 && pool.block_stride / pool.block_size == pool.row_stride);
  if (!one_stride) {
    return Status::error(StatusCode::unsupported, "is %lld: blocks of %d rows of %lld bytes are not one run of rows",
                         static_cast<long long>(pool.block_stride), pool.block_size,
                         static_cast<long long>(pool.row_stride))
        .at("block_stride");
  }
  const detail::ByteCount rows = detail::ByteCount(pool.block_count) * pool.block_size;
  KVBLEND_RETURN_IF_ERROR(detail::check_bytes(rows, "block_count"));
  const std::int64_t stride = pool.block_size == 1 ? pool.block_stride : pool.row_stride;
  return ContiguousLayout(rows.value(), pool, stride);
}

// The first `values` values of each head, as MLA's values are the first of its keys. For any pool or layout of memory/.
template <class L>
Result<L> prefix_of(L layout, std::int32_t values) {
  static_assert(std::is_base_of_v<HeadShape, L>);
  if (values < 1 || values > layout.head_values) {
    return Status::error(StatusCode::invalid_argument, "are %d, the head has %d", values, layout.head_values)
        .at("prefix values");
  }
  if (layout.tile_size == layout.head_values) {
    layout.tile_size = values;
  } else if (layout.tile_size < 1 || values % layout.tile_size != 0) {
    return Status::error(StatusCode::invalid_argument, "are %d, not whole tiles of %d", values, layout.tile_size)
        .at("prefix values");
  }
  layout.head_values = values;
  return layout;
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
