// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Calls the functions of memory/ that make layouts with any numbers: they return an error that names one, or a layout
// whose offsets all are 64-bit numbers, and whose rows can be asked for.
#pragma once

#include "bytes.hpp"
#include "views.hpp"

#include <kvblend/codec/floats.hpp>
#include <kvblend/codec/ggml_blocks.hpp>
#include <kvblend/codec/with_codec.hpp>
#include <kvblend/memory/engines.hpp>
#include <kvblend/memory/pools.hpp>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <type_traits>

namespace fuzz {

// All bytes of a pool, or of rows, are at offsets from 0 up to what 64 bits hold.
inline void check_offsets(const kvblend::HeadShape& shape, std::int64_t outer, std::int64_t outer_stride,
                          std::int64_t inner, std::int64_t inner_stride) {
  require(shape.head_count > 0 && shape.head_values > 0 && shape.head_values <= kvblend::kMaxHeadDim &&
              shape.tile_size > 0 && shape.head_values % shape.tile_size == 0,
          "a layout that is made has a shape");
  if (outer == 0 || inner == 0) return;
  const std::int32_t tiles = shape.head_values / shape.tile_size;
  for (const Wide row : {Wide{0}, Wide{outer - 1} * outer_stride}) {
    for (const Wide within : {Wide{0}, Wide{inner - 1} * inner_stride}) {
      for (const std::int32_t head : {0, shape.head_count - 1}) {
        for (const std::int32_t tile : {0, tiles - 1}) {
          const Wide at = shape.origin + row + within + Wide{head} * shape.head_stride + Wide{tile} * shape.tile_stride;
          require(at >= 0 && at < Wide{(std::numeric_limits<std::int64_t>::max)()}, "a layout's offsets fit 64 bits");
        }
      }
    }
  }
}
inline void check_offsets(const kvblend::BlockPool& pool) {
  require(pool.block_count >= 0 && pool.block_size > 0, "a pool has blocks of rows");
  check_offsets(pool, pool.block_count, pool.block_stride, pool.block_size, pool.row_stride);
}
inline void check_offsets(const kvblend::ContiguousLayout& rows) {
  check_offsets(rows, rows.row_count, rows.row_stride, 1, 0);
}
inline void check_offsets(const kvblend::MlaPools& pools) {
  check_offsets(pools.latents);
  check_offsets(pools.rope);
}
template <class L>
void check_offsets(const kvblend::KvPair<L>& pair) {
  check_offsets(pair.keys);
  check_offsets(pair.values);
}

template <class T>
bool made(const kvblend::Result<T>& result) {
  if (!is_ok(result.status)) return false;
  check_offsets(result.value);
  return true;
}

template <class L>
void ask_rows(Bytes& in, const L& layout) {
  for (int i = 0; i < 4; ++i) {
    const std::int64_t row = in.odd64();
    require(!(layout.contains(row) && kvblend::skips_row(layout, row)), "a row is not both memory and padding");
  }
}

template <kvblend::Codec C>
void make_pools(Bytes& in) {
  using namespace kvblend;
  PoolShape shape;
  shape.blocks = in.odd64();
  shape.block_size = in.odd32();
  shape.heads = in.odd32();
  shape.head_dim = in.flag() ? 32 << in.below(6) : in.odd32();
  shape.block_padding = in.flag() ? 0 : in.odd64();
  const RowOrder order = in.seldom() ? static_cast<RowOrder>(in.byte()) : in.flag() ? RowOrder::hnd : RowOrder::nhd;
  const std::int64_t more = in.odd64();
  const std::int32_t other = in.odd32();
  switch (in.below(14)) {
    case 0: made(block_pool<C>(shape, order)); return;
    case 1: made(tiled_pool<C>(shape, other)); return;
    case 2: made(dense_layout<C>(more, shape.heads, shape.head_dim, order)); return;
    case 3: made(vllm_flash_attention<C, F16Codec>(shape, order)); return;
    case 4: made(vllm_flashinfer<C, F16Codec>(shape, order)); return;
    case 5: made(vllm_packed_keys<F16Codec>(shape, other)); return;
    case 6: made(vllm_mla<C>(shape.blocks, shape.block_size, shape.head_dim, other)); return;
    case 7: made(vllm_fp8_ds_mla(shape.blocks, shape.block_size)); return;
    case 8: made(sglang_tokens<C>(shape.blocks, shape.block_size, shape.heads, shape.head_dim)); return;
    case 9: made(sglang_mla<C>(shape.blocks, shape.block_size, shape.head_dim, other)); return;
    case 10: made(flashinfer_mla<C>(shape.blocks, shape.block_size, shape.head_dim, other)); return;
    case 11: made(llama_cpp_cells<C>(shape.blocks, shape.heads, shape.head_dim, more)); return;
    case 12: made(llama_cpp_transposed_values<F16Codec>(shape.blocks, shape.heads, shape.head_dim, more)); return;
    default:
      made(lmcache_kv_2ltd<C>(shape.blocks, other, shape.heads, shape.head_dim, more));
      made(lmcache_kv_t2d<C>(shape.blocks, shape.heads, shape.head_dim));
      made(tensorrt_llm_blocks<C>(shape));
      return;
  }
}

inline void make_rows(Bytes& in) {
  using namespace kvblend;
  // In braces the numbers are taken in the order in which they are written, whatever the compiler.
  BlockPool pool{in.odd64(), in.odd32(), HeadShape{in.odd32(), in.odd32(), in.odd64(), in.odd32(), in.odd64()},
                 in.odd64(), in.odd64()};
  pool.first_block = in.seldom() ? in.odd64() : 0;
  const std::int32_t count = in.below(32);
  const auto size = static_cast<std::size_t>(count);
  const auto entries = std::make_unique<std::int32_t[]>(size);
  for (std::size_t i = 0; i < size; ++i) entries[i] = in.odd32();
  // A length that is not the list's own is either too small or refused.
  const std::int64_t told = in.seldom() ? -std::int64_t{in.byte()} : count;
  const std::int32_t* const list = in.seldom() ? nullptr : entries.get();
  if (list == nullptr && told > 0) {
    require(!by_table(pool, list, told).ok() && !by_slots(pool, list, told).ok(), "a missing list is refused");
    return;
  }
  const std::int64_t more = in.odd64();
  switch (in.below(5)) {
    case 0: {
      const Result<PagedLayout> rows = by_table(pool, list, told, more);
      if (is_ok(rows.status)) ask_rows(in, rows.value);
      return;
    }
    case 1: {
      const Result<SlotLayout<std::int32_t>> rows = by_slots(pool, list, told);
      if (is_ok(rows.status)) ask_rows(in, rows.value);
      return;
    }
    case 2: {
      const Result<ContiguousLayout> rows = in_order(pool);
      if (is_ok(rows.status)) ask_rows(in, rows.value);
      return;
    }
    case 3: {
      const Result<BlockPool> part = prefix_of(pool, in.odd32());
      if (is_ok(part.status))
        require(part.value.head_values <= pool.head_values, "a prefix is no longer than the whole");
      return;
    }
    default: {
      const SecondaryPool secondary{in.odd64(), in.odd64()};
      const BlockOffsets offsets{{entries.get(), size}, in.seldom() ? in.odd64() : 1 + in.below(8)};
      const auto rows = tensorrt_llm_sequence(pool, secondary, offsets, more, in.flag() ? -1 : in.odd64());
      if (!is_ok(rows.status)) return;
      ask_rows(in, rows.value.keys);
      ask_rows(in, rows.value.values);
      return;
    }
  }
}

inline void call_layouts(Bytes& in) {
  if (in.flag()) {
    make_rows(in);
    return;
  }
  is_ok(kvblend::with_codec(static_cast<kvblend::DType>(in.byte() % 8), [&in](auto codec) {
    make_pools<decltype(codec)>(in);
    return kvblend::Status();
  }));
}

}  // namespace fuzz
