// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Layouts of any kind made of fuzzed numbers, each beside a second account of where its rows lie: plain arithmetic in
// 128 bits that shares nothing with the library. It says how much memory a view needs, so that the fuzzer can place
// exactly that much, and which of its bytes may be written.
#pragma once

#include "bytes.hpp"

#include <kvblend/memory/block_array.hpp>
#include <kvblend/memory/engines.hpp>
#include <kvblend/memory/pools.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace fuzz {

__extension__ using Wide = __int128;

enum class Kind : std::uint8_t { contiguous, paged, slots32, slots64, slots_unsigned, blocks };
inline constexpr std::int32_t kKinds = 6;

// One type for all layouts, so that the moves need not be compiled for each pair of them.
struct AnyLayout {
  Kind kind = Kind::contiguous;
  kvblend::ContiguousLayout contiguous;
  kvblend::PagedLayout paged;
  kvblend::SlotLayout<std::int32_t> slots32;
  kvblend::SlotLayout<std::int64_t> slots64;
  kvblend::SlotLayout<std::uint32_t> slots_unsigned;
  kvblend::BlockArrayLayout blocks;

  template <class Use>
  auto visit(const Use& use) const {
    switch (kind) {
      case Kind::paged: return use(paged);
      case Kind::slots32: return use(slots32);
      case Kind::slots64: return use(slots64);
      case Kind::slots_unsigned: return use(slots_unsigned);
      case Kind::blocks: return use(blocks);
      default: return use(contiguous);
    }
  }
  [[nodiscard]] std::int32_t heads() const {
    return visit([](const auto& layout) { return layout.heads(); });
  }
  [[nodiscard]] std::int32_t head_dim() const {
    return visit([](const auto& layout) { return layout.head_dim(); });
  }
  [[nodiscard]] std::int32_t tiles() const {
    return visit([](const auto& layout) { return layout.tiles(); });
  }
  [[nodiscard]] std::int32_t tile_values() const {
    return visit([](const auto& layout) { return layout.tile_values(); });
  }
  [[nodiscard]] bool contains(std::int64_t row) const {
    return visit([row](const auto& layout) { return layout.contains(row); });
  }
  [[nodiscard]] bool skips(std::int64_t row) const {
    return visit([row](const auto& layout) { return kvblend::skips_row(layout, row); });
  }
  [[nodiscard]] std::int64_t offset(std::int64_t row, std::int32_t head, std::int32_t tile) const {
    return visit([=](const auto& layout) { return layout.offset(row, head, tile); });
  }
};
static_assert(kvblend::Layout<AnyLayout>);

// A codec's bytes.
struct Format {
  std::int32_t block_values;
  std::int32_t block_bytes;
};

struct RowRange {
  std::int64_t first = 0;
  std::int64_t count = 0;
};

enum class RowState : std::uint8_t { absent, skipped, present };

// A layout and the numbers it was made of.
struct View {
  AnyLayout layout;
  kvblend::BlockPool pool;  // of a contiguous layout: its shape and row_stride
  std::int64_t rows = 0;
  std::vector<std::int64_t> entries;  // of the table or the list
  std::int64_t secondary_blocks = 0;
  std::int64_t secondary_origin = 0;
  std::unique_ptr<std::int32_t[]> table;  // exactly as long as the layout is told
  std::unique_ptr<std::int64_t[]> slots;
  std::unique_ptr<std::uint32_t[]> unsigned_slots;

  [[nodiscard]] bool has_shape(const Format& format) const {
    return pool.head_count > 0 && pool.head_values > 0 && pool.head_values <= 1024 && pool.tile_size > 0 &&
           pool.head_values % pool.tile_size == 0 && pool.tile_size % format.block_values == 0;
  }

  // Where row `row` is, in bytes from the base to its first head.
  RowState find(std::int64_t row, Wide& at) const {
    if (row < 0) return RowState::absent;
    at = pool.origin;
    if (layout.kind == Kind::contiguous) {
      at += Wide{row} * pool.row_stride;
      return row < rows ? RowState::present : RowState::absent;
    }
    if (pool.block_size <= 0) return RowState::absent;
    const bool by_slot = layout.kind != Kind::paged && layout.kind != Kind::blocks;
    if (!by_slot && row >= rows) return RowState::absent;
    const std::int64_t index = by_slot ? row : row / pool.block_size;
    if (index >= static_cast<std::int64_t>(entries.size())) return RowState::absent;
    std::int64_t block = entries[static_cast<std::size_t>(index)];
    std::int64_t within = row % pool.block_size;
    std::int64_t blocks = pool.block_count;
    std::int64_t first_block = pool.first_block;
    if (by_slot) {
      if (block < 0) return RowState::skipped;
      within = block % pool.block_size;
      block /= pool.block_size;
      if (block < first_block) return RowState::skipped;
    } else if (layout.kind == Kind::blocks && block < 0) {
      if (block == -1) return RowState::absent;
      block += std::int64_t{1} << 31;
      blocks = secondary_blocks;
      first_block = 0;
      at += secondary_origin;
    }
    if (block < 0 || block < first_block || block >= blocks) return RowState::absent;
    at += Wide{block} * pool.block_stride + Wide{within} * pool.row_stride;
    return RowState::present;
  }
  [[nodiscard]] RowState find(std::int64_t row) const {
    Wide at = 0;
    return find(row, at);
  }

  [[nodiscard]] Wide run_bytes(const Format& format) const {
    return Wide{pool.tile_size} / format.block_values * format.block_bytes;
  }
  [[nodiscard]] Wide within(std::int32_t head, std::int32_t tile) const {
    return Wide{head} * pool.head_stride + Wide{tile} * pool.tile_stride;
  }
};

// What lies between the first byte of some rows and their last.
struct Extent {
  Wide low = 0;
  Wide high = 0;  // past the last

  void add(Wide first, Wide bytes) {
    const bool none = low == high;
    low = none ? first : (std::min)(low, first);
    high = none ? first + bytes : (std::max)(high, first + bytes);
  }
  void add(const View& view, const RowRange& range, const Format& format) {
    if (!view.has_shape(format)) return;
    for (std::int64_t row = range.first; row < range.first + range.count; ++row) {
      Wide at = 0;
      if (view.find(row, at) != RowState::present) continue;
      const std::int32_t last_tile = view.pool.head_values / view.pool.tile_size - 1;
      for (const std::int32_t head : {0, view.pool.head_count - 1}) {
        for (const std::int32_t tile : {0, last_tile}) add(at + view.within(head, tile), view.run_bytes(format));
      }
    }
  }
  // Small enough to allocate, and near enough that a pointer so far before it is still a pointer.
  [[nodiscard]] bool fits() const {
    return high - low <= (Wide{1} << 18) && low > -(Wide{1} << 44) && high < (Wide{1} << 44);
  }
};

namespace detail {

// Numbers for a table of `blocks` blocks or a list of as many slots: mostly right, some far out.
inline void take_entries(Bytes& in, std::int64_t blocks, View& view) {
  const std::int32_t count = in.below(48);
  const std::int64_t range = (std::clamp)(blocks, std::int64_t{1}, std::int64_t{128});
  for (std::int32_t i = 0; i < count; ++i) {
    const std::uint8_t kind = in.byte();
    view.entries.push_back(kind < 216 ? kind % range : kind < 232 ? -1 - kind % 3 : in.odd32());
  }
}

template <class T>
std::unique_ptr<T[]> exactly(const std::vector<std::int64_t>& numbers) {
  auto copy = std::make_unique<T[]>(numbers.size());
  std::transform(numbers.begin(), numbers.end(), copy.get(), [](std::int64_t n) { return static_cast<T>(n); });
  return copy;
}

inline std::int64_t stride(Bytes& in) {
  const std::uint8_t kind = in.byte();
  if (kind < 128) return kind * 16;
  if (kind < 248) return in.take<std::int16_t>();
  return in.take<std::int32_t>() / 16;
}

// A dense stride; of shapes so large that it means nothing, any.
inline std::int64_t product(Wide a, Wide b, Wide c = 1) {
  return static_cast<std::int64_t>(a * b * c % (Wide{1} << 30));
}

// Strides of any kind: dense in either order, in tiles, or anything.
inline kvblend::BlockPool take_pool(Bytes& in, std::int32_t heads, std::int32_t head_dim, const Format& format) {
  const std::int32_t form = in.below(5);
  const std::int64_t head = std::int64_t{head_dim} / format.block_values * format.block_bytes;
  const std::int32_t rows = in.mostly(1 + in.below(16));
  const std::int32_t blocks = in.mostly(1 + in.below(32));
  std::int32_t tile = head_dim;
  if (form >= 2 && in.flag()) tile = in.mostly((std::max)(format.block_values, 1) << in.below(5));
  if (in.seldom()) tile = in.odd32();
  const std::int64_t run = std::int64_t{tile} / format.block_values * format.block_bytes;
  kvblend::HeadShape shape(heads, head_dim, form == 1 ? product(rows, head) : head, tile, run);
  std::int64_t row_stride = form == 1 ? head : product(heads, head);
  if (form == 2) {  // [heads, tiles, rows, tile]
    shape.head_stride = product(rows, head);
    shape.tile_stride = product(rows, run);
    row_stride = run;
  }
  if (form >= 3) {
    shape.head_stride = stride(in);
    shape.tile_stride = stride(in);
    row_stride = stride(in);
  }
  const std::int64_t block_stride = form == 4 ? stride(in) : product(rows, head, heads) + in.below(8);
  if (in.flag()) shape.origin = stride(in);
  kvblend::BlockPool pool(blocks, rows, shape, block_stride, row_stride);
  if (in.seldom()) pool.first_block = in.odd32();
  return pool;
}

inline void make_layout(Bytes& in, Kind kind, View& view) {
  const kvblend::BlockPool& pool = view.pool;
  const auto count = static_cast<std::int64_t>(view.entries.size());
  AnyLayout& layout = view.layout;
  layout.kind = kind;
  switch (kind) {
    case Kind::contiguous: layout.contiguous = kvblend::ContiguousLayout(view.rows, pool, pool.row_stride); return;
    case Kind::paged:
      layout.paged = kvblend::PagedLayout(pool, view.table.get(), count);
      layout.paged.row_count = view.rows;
      return;
    case Kind::slots32: layout.slots32 = kvblend::SlotLayout<std::int32_t>(pool, view.table.get(), count); return;
    case Kind::slots64:
      for (std::int64_t& slot : view.entries) slot = in.seldom() ? in.odd64() : slot;
      view.slots = exactly<std::int64_t>(view.entries);
      layout.slots64 = kvblend::SlotLayout<std::int64_t>(pool, view.slots.get(), count);
      return;
    case Kind::slots_unsigned:
      for (std::int64_t& slot : view.entries) slot &= 0xffffffff;
      view.unsigned_slots = exactly<std::uint32_t>(view.entries);
      layout.slots_unsigned = kvblend::SlotLayout<std::uint32_t>(pool, view.unsigned_slots.get(), count);
      return;
    case Kind::blocks:
      view.secondary_blocks = in.mostly(in.below(32));
      view.secondary_origin = stride(in);
      for (std::int64_t& entry : view.entries) {
        if (in.flag() && entry >= 0) entry -= std::int64_t{1} << 31;
      }
      view.table = exactly<std::int32_t>(view.entries);
      layout.blocks =
          kvblend::BlockArrayLayout(pool, view.secondary_blocks, view.secondary_origin, view.table.get(), count);
      layout.blocks.row_count = view.rows;
      return;
  }
}

// A sequence by FlashInfer's tables, whose own checks decide whether there is one.
inline bool make_flashinfer(Bytes& in, View& view) {
  const auto pages = static_cast<std::int64_t>(view.entries.size());
  const std::int32_t batch = in.below(4);
  std::vector<std::int64_t> numbers(static_cast<std::size_t>(batch) + (in.seldom() ? 0u : 1u));
  for (std::int64_t& n : numbers) n = in.mostly(in.below(static_cast<std::int32_t>(pages) + 1));
  if (in.flag()) std::sort(numbers.begin(), numbers.end());
  const auto indptr = exactly<std::int32_t>(numbers);
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(batch));
  for (std::int64_t& n : lengths) n = in.mostly(1 + in.below(16));
  const auto last = exactly<std::int32_t>(lengths);
  const kvblend::FlashInferTables tables{
      {view.table.get(), view.entries.size()}, {indptr.get(), numbers.size()}, {last.get(), lengths.size()}};
  const std::int64_t sequence = in.seldom() ? in.odd64() : in.below(4);
  is_ok(kvblend::check_flashinfer_tables(tables, view.pool.block_size));
  const auto made = kvblend::flashinfer_sequence(view.pool, tables, sequence);
  if (!is_ok(made.status)) return false;
  const auto b = static_cast<std::size_t>(sequence);
  require(b + 1 < numbers.size(), "a sequence of the batch");
  view.entries = std::vector<std::int64_t>(view.entries.begin() + numbers[b], view.entries.begin() + numbers[b + 1]);
  view.rows = view.entries.empty() ? 0 : (numbers[b + 1] - numbers[b] - 1) * view.pool.block_size + lengths[b];
  view.layout.kind = Kind::paged;
  view.layout.paged = made.value;
  return true;
}

}  // namespace detail

// A view of `heads` heads of `head_dim` values; none where the library's own factory refused the numbers.
inline std::optional<View> take_view(Bytes& in, std::int32_t heads, std::int32_t head_dim, const Format& format) {
  View view;
  const std::int32_t kind = in.below(kKinds + 1);
  view.pool = detail::take_pool(in, heads, head_dim, format);
  view.rows = in.mostly(1 + in.byte());
  const bool by_slot = kind >= static_cast<std::int32_t>(Kind::slots32);
  const std::int64_t size = (std::clamp)(view.pool.block_size, 1, 64);
  detail::take_entries(in, by_slot ? view.pool.block_count * size : view.pool.block_count, view);
  view.table = detail::exactly<std::int32_t>(view.entries);
  if (kind == kKinds) {
    if (!detail::make_flashinfer(in, view)) return std::nullopt;
  } else {
    detail::make_layout(in, static_cast<Kind>(kind), view);
  }
  return view;
}

// At most `rows` rows, so that no run over them is long.
inline void limit_rows(View& view, std::int64_t rows) {
  view.rows = (std::min)(view.rows, rows);
  for (std::int64_t* count :
       {&view.layout.contiguous.row_count, &view.layout.paged.row_count, &view.layout.blocks.row_count}) {
    *count = (std::min)(*count, rows);
  }
}

// Both accounts must tell the same of a row, and of where its runs begin if `placed`.
inline void compare_row(const View& view, std::int64_t row, bool placed) {
  Wide at = 0;
  const RowState state = view.find(row, at);
  require(view.layout.contains(row) == (state == RowState::present), "a layout contains the rows that have memory");
  require(view.layout.skips(row) == (state == RowState::skipped), "a layout skips the rows that are padding");
  if (!placed || state != RowState::present) return;
  const std::int32_t last_tile = view.pool.head_values / view.pool.tile_size - 1;
  for (const std::int32_t head : {0, view.pool.head_count - 1}) {
    for (const std::int32_t tile : {0, last_tile}) {
      require(view.layout.offset(row, head, tile) == at + view.within(head, tile),
              "a layout's offset is where its row is");
    }
  }
}

// Exactly the memory that an extent covers, somewhere in the address space, and a copy of what was in it.
class Memory {
 public:
  Memory() = default;
  Memory(Bytes& in, const Extent& extent) : low_(static_cast<std::int64_t>(extent.low)) {
    const std::size_t pad = in.byte() % 16;  // rows need no alignment
    const auto size = pad + static_cast<std::size_t>(extent.high - extent.low);
    bytes_ = std::make_unique<std::byte[]>(size);
    std::uint32_t state = in.byte() * 2654435761u;
    for (std::size_t i = 0; state != 0 && i < size; ++i) {
      state = state * 1664525u + 1013904223u;
      bytes_[i] = static_cast<std::byte>(state >> 24);
    }
    before_.assign(bytes_.get(), bytes_.get() + size);
    writable_.assign(size, false);
    first_ = pad;
  }

  [[nodiscard]] std::byte* base() const {
    const auto first = reinterpret_cast<std::uintptr_t>(bytes_.get()) + first_;
    return reinterpret_cast<std::byte*>(first - static_cast<std::uintptr_t>(low_));
  }
  // Row `row` of `view` may be written.
  void open(const View& view, std::int64_t row, const Format& format) {
    Wide at = 0;
    if (view.find(row, at) != RowState::present) return;
    for (std::int32_t head = 0; head < view.pool.head_count; ++head) {
      for (std::int32_t tile = 0; tile < view.pool.head_values / view.pool.tile_size; ++tile) {
        const auto from =
            static_cast<std::ptrdiff_t>(first_) + static_cast<std::ptrdiff_t>(at + view.within(head, tile) - low_);
        std::fill_n(writable_.begin() + from, static_cast<std::ptrdiff_t>(view.run_bytes(format)), true);
      }
    }
  }
  void check() const {
    for (std::size_t i = 0; i < before_.size(); ++i) {
      require(writable_[i] || bytes_[i] == before_[i], "only rows that a call was given are written");
    }
  }

 private:
  std::unique_ptr<std::byte[]> bytes_;
  std::vector<std::byte> before_;
  std::vector<bool> writable_;
  std::int64_t low_ = 0;
  std::size_t first_ = 0;
};

}  // namespace fuzz
