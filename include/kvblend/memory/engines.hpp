// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The KV memory of known engines, by the engine's name. Each function takes the engine's own numbers and gives a pool
// (or rows) of pools.hpp; by_table, by_slots or in_order then say where a sequence's rows are. C, K and V are codecs.
// All check their numbers, and an error names the one at fault. Shapes are row-major, the outermost first.
//
//   vLLM              vllm_flash_attention, vllm_flashinfer, vllm_packed_keys, vllm_mla, vllm_fp8_ds_mla
//   SGLang            sglang_tokens, sglang_mla
//   FlashInfer        flashinfer_pages, flashinfer_mla, flashinfer_sequence, check_flashinfer_tables
//   TensorRT-LLM      tensorrt_llm_blocks, tensorrt_llm_sequence
//   llama.cpp         llama_cpp_cells, llama_cpp_transposed_values
//   LMCache           lmcache_kv_2ltd, lmcache_kv_t2d, lmcache_kv_2td
//
// Codecs are those of the cache's dtype: f32, f16, bf16 as they are; fp8 with the engine's scales (codec/scaled.hpp);
// llama.cpp's q8_0 and q4_0. How rotated values pair is the model's in its engine: vLLM, SGLang, FlashInfer and
// TensorRT-LLM turn neox pairs unless told otherwise (is_neox_style, interleave, rope_gptj), as vLLM and SGLang are for
// DeepSeek's MLA: interleaved. llama.cpp turns interleaved pairs for architectures of LLAMA_ROPE_TYPE_NORM, Llama among
// them, whose weights are permuted. LMCache stores what its engine turned.
//
// MLA keeps one row of `lora` latents and `rope` rotated values a token, with one head. Its spec has rotary_dim = rope
// and rotary_offset = lora; attention reads the latents as values: prefix_of(layout, lora).
#pragma once

#include <kvblend/codec/ds_mla.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/memory/block_array.hpp>
#include <kvblend/memory/pools.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// ---- vLLM (vllm/v1/attention/backends, csrc/cache_kernels.cu) -------------------------------------------------------
// Rows by block table or by slot_mapping (64-bit slots, -1 for padding). vLLM never gives block 0 to a sequence (it
// stands for "no block"), so rows of it are refused, or passed over in a slot list; set first_block to 0 for engines
// that do. The legacy cache has no such block.

// FlashAttention: [2, blocks, rows, heads, head_dim], or hnd: [2, blocks, heads, rows, head_dim]. Block padding is that
// of each of the two halves.
template <Codec K, Codec V = K>
Result<KvPair<BlockPool>> vllm_flash_attention(const PoolShape& shape, RowOrder order = RowOrder::nhd) {
  Result<BlockPool> keys = block_pool<K>(shape, order);
  Result<BlockPool> values = block_pool<V>(shape, order);
  KVBLEND_RETURN_IF_ERROR(keys.status);
  KVBLEND_RETURN_IF_ERROR(values.status);
  const detail::ByteCount half = detail::ByteCount(keys.value.block_stride) * shape.blocks;
  KVBLEND_RETURN_IF_ERROR(
      detail::check_bytes(half + detail::ByteCount(values.value.block_stride) * shape.blocks, "blocks"));
  values.value.origin = half.value();
  keys.value.first_block = values.value.first_block = 1;
  return KvPair<BlockPool>{keys.value, values.value};
}

// FlashInfer within vLLM: [blocks, 2, rows, heads, head_dim], or hnd: [blocks, 2, heads, rows, head_dim]. Block padding
// comes after both.
template <Codec K, Codec V = K>
Result<KvPair<BlockPool>> vllm_flashinfer(const PoolShape& shape, RowOrder order = RowOrder::nhd) {
  KVBLEND_RETURN_IF_ERROR(detail::check_order(order));
  KVBLEND_RETURN_IF_ERROR(detail::check_pool<K>(shape, shape.head_dim));
  KVBLEND_RETURN_IF_ERROR(detail::check_pool<V>(shape, shape.head_dim));
  const detail::ByteCount keys = detail::block_bytes<K>(shape);
  const detail::ByteCount contents = keys + detail::block_bytes<V>(shape);
  KVBLEND_RETURN_IF_ERROR(detail::check_blocks(contents, shape));
  const std::int64_t stride = contents.value() + shape.block_padding;
  KvPair<BlockPool> pair{detail::make_pool<K>(shape, order, stride, 0),
                         detail::make_pool<V>(shape, order, stride, keys.value())};
  pair.keys.first_block = pair.values.first_block = 1;
  return pair;
}

// The legacy cache: keys [blocks, heads, head_dim / x, rows, x] with x values in 16 bytes (x = 0), values [blocks,
// heads, head_dim, rows]. Two memories, each layout from its own base.
template <Codec K, Codec V = K>
Result<KvPair<BlockPool>> vllm_packed_keys(const PoolShape& shape, std::int32_t x = 0) {
  static_assert(K::block_values == 1 && V::block_values == 1, "values in tiles are single numbers");
  KVBLEND_RETURN_IF_ERROR(detail::check_size(x, 0, "x"));
  const Result<BlockPool> keys = tiled_pool<K>(shape, x > 0 ? x : 16 / K::block_bytes);
  const Result<BlockPool> values = tiled_pool<V>(shape, 1);
  KVBLEND_RETURN_IF_ERROR(keys.status);
  KVBLEND_RETURN_IF_ERROR(values.status);
  return KvPair<BlockPool>{keys.value, values.value};
}

namespace detail {

template <Codec C>
Status check_mla(std::int32_t lora, std::int32_t rope) {
  KVBLEND_RETURN_IF_ERROR(check_head_dim<C>(lora, lora, "lora"));
  return check_head_dim<C>(rope, rope, "rope");
}

}  // namespace detail

// MLA: [blocks, rows, lora + rope], 512 + 64 in DeepSeek's models.
template <Codec C>
Result<BlockPool> vllm_mla(std::int64_t blocks, std::int32_t block_size, std::int32_t lora = 512,
                           std::int32_t rope = 64) {
  KVBLEND_RETURN_IF_ERROR(detail::check_mla<C>(lora, rope));
  Result<BlockPool> pool = block_pool<C>({blocks, block_size, 1, lora + rope, 0});
  pool.value.first_block = 1;
  return pool;
}

// MLA's latents and rotated part where they are apart.
struct MlaPools {
  BlockPool latents;
  BlockPool rope;
};

// fp8_ds_mla (csrc/cache_kernels.cu, concat_and_cache_ds_mla_kernel): [blocks, rows, 656 bytes], in them 512 latents
// with their scales (DsMlaLatentCodec, 528 bytes) and 64 rotated values (Bf16Codec). Both layouts are from one base,
// each for a plane of its own: the latents are copied, the rotated values turn, with rotary_dim 64 at offset 0.
inline Result<MlaPools> vllm_fp8_ds_mla(std::int64_t blocks, std::int32_t block_size) {
  constexpr std::int64_t kLatents = DsMlaLatentCodec::block_bytes;
  constexpr std::int64_t kRow = kLatents + 64 * 2;
  KVBLEND_RETURN_IF_ERROR(detail::check_size(blocks, 0, "blocks"));
  KVBLEND_RETURN_IF_ERROR(detail::check_size(block_size, 1, "block_size"));
  const detail::ByteCount stride = detail::ByteCount(kRow) * block_size;
  KVBLEND_RETURN_IF_ERROR(detail::check_bytes(stride * blocks, "blocks"));
  MlaPools pools{
      BlockPool(blocks, block_size, HeadShape(1, DsMlaLatentCodec::block_values, kRow), stride.value(), kRow),
      BlockPool(blocks, block_size, HeadShape(1, 64, kRow), stride.value(), kRow)};
  pools.rope.origin = kLatents;
  pools.latents.first_block = pools.rope.first_block = 1;
  return pools;
}

// ---- SGLang (python/sglang/srt/mem_cache/memory_pool.py) ------------------------------------------------------------
// Rows by token-level slots (32-bit kv_indices or 64-bit out_cache_loc). Slot 0 takes the writes of padding tokens, so
// rows in it are passed over.

// k_buffer and v_buffer of a layer, each [size + page_size, heads, head_dim] with a base of its own.
template <Codec C>
Result<BlockPool> sglang_tokens(std::int64_t size, std::int32_t page_size, std::int32_t heads, std::int32_t head_dim) {
  KVBLEND_RETURN_IF_ERROR(detail::check_size(size, 0, "size"));
  KVBLEND_RETURN_IF_ERROR(detail::check_size(page_size, 1, "page_size"));
  const detail::ByteCount slots = detail::ByteCount(size) + page_size;
  KVBLEND_RETURN_IF_ERROR(detail::check_bytes(slots, "size"));
  Result<BlockPool> pool = block_pool<C>({slots.value(), 1, heads, head_dim, 0});
  KVBLEND_RETURN_IF_ERROR(detail::renamed(pool.status, "blocks", "size"));
  pool.value.first_block = 1;
  return pool;
}

// kv_buffer of a layer with MLA: [size + page_size, 1, lora + rope].
template <Codec C>
Result<BlockPool> sglang_mla(std::int64_t size, std::int32_t page_size, std::int32_t lora = 512,
                             std::int32_t rope = 64) {
  KVBLEND_RETURN_IF_ERROR(detail::check_mla<C>(lora, rope));
  return sglang_tokens<C>(size, page_size, 1, lora + rope);
}

// ---- FlashInfer (include/flashinfer/page.cuh) -----------------------------------------------------------------------

// paged_kv_t, keys and values alike: [pages, rows, heads, head_dim] or hnd [pages, heads, rows, head_dim]. A cache with
// other strides is BlockPool's own constructor.
template <Codec C>
Result<BlockPool> flashinfer_pages(const PoolShape& shape, RowOrder order = RowOrder::nhd) {
  return block_pool<C>(shape, order);
}

// paged_kv_mla_t: ckv [pages, rows, lora] and kpe [pages, rows, rope], each with a base of its own.
template <Codec C>
Result<MlaPools> flashinfer_mla(std::int64_t pages, std::int32_t page_size, std::int32_t lora = 512,
                                std::int32_t rope = 64) {
  KVBLEND_RETURN_IF_ERROR(detail::check_size(page_size, 1, "page_size"));
  KVBLEND_RETURN_IF_ERROR(detail::check_mla<C>(lora, rope));
  const Result<BlockPool> latents = block_pool<C>({pages, page_size, 1, lora, 0});
  const Result<BlockPool> rotated = block_pool<C>({pages, page_size, 1, rope, 0});
  KVBLEND_RETURN_IF_ERROR(detail::renamed(latents.status, "blocks", "pages"));
  KVBLEND_RETURN_IF_ERROR(detail::renamed(rotated.status, "blocks", "pages"));
  return MlaPools{latents.value, rotated.value};
}

// The tables of a batch: sequence b has pages indices[indptr[b]] … indices[indptr[b + 1] - 1], and last_page_len[b]
// rows in the last of them. Host memory.
struct FlashInferTables {
  std::span<const std::int32_t> indices;
  std::span<const std::int32_t> indptr;         // [batch + 1]
  std::span<const std::int32_t> last_page_len;  // [batch]
};

namespace detail {

inline Status check_flashinfer_sequence(const FlashInferTables& tables, std::int32_t page_size, std::size_t b) {
  const std::int64_t first = tables.indptr[b];
  const std::int64_t end = tables.indptr[b + 1];
  const std::int32_t last = tables.last_page_len[b];
  if (first < 0 || end < first || end > static_cast<std::int64_t>(tables.indices.size())) {
    return Status::error(StatusCode::invalid_argument, "pages [%lld, %lld) are not a range of %zu indices",
                         static_cast<long long>(first), static_cast<long long>(end), tables.indices.size())
        .at("indptr[%zu]", b + 1);
  }
  if (last < (end > first ? 1 : 0) || last > page_size) {
    return Status::error(StatusCode::invalid_argument, "is %d, a page has %d rows", last, page_size)
        .at("last_page_len[%zu]", b);
  }
  return {};
}

inline Status check_flashinfer_sizes(const FlashInferTables& tables, std::int32_t page_size) {
  KVBLEND_RETURN_IF_ERROR(check_size(page_size, 1, "page_size"));
  if (tables.indptr.size() == tables.last_page_len.size() + 1) return {};
  return Status::error(StatusCode::mismatch, "has %zu entries, last_page_len %zu", tables.indptr.size(),
                       tables.last_page_len.size())
      .at("indptr");
}

}  // namespace detail

// Whether tables describe a batch: indptr starts at 0, ascends, and ends within indices; last pages have 1 … page_size
// rows (0 is allowed for a sequence without pages).
inline Status check_flashinfer_tables(const FlashInferTables& tables, std::int32_t page_size) {
  KVBLEND_RETURN_IF_ERROR(detail::check_flashinfer_sizes(tables, page_size));
  if (tables.indptr[0] != 0) {
    return Status::error(StatusCode::invalid_argument, "is %d, must be 0", tables.indptr[0]).at("indptr[0]");
  }
  for (std::size_t b = 0; b < tables.last_page_len.size(); ++b) {
    KVBLEND_RETURN_IF_ERROR(detail::check_flashinfer_sequence(tables, page_size, b));
  }
  return {};
}

// The rows of one sequence of a batch: (pages - 1) · page_size + last_page_len of them. Only its own entries are
// checked.
inline Result<PagedLayout> flashinfer_sequence(const BlockPool& pool, const FlashInferTables& tables,
                                               std::int64_t sequence) {
  KVBLEND_RETURN_IF_ERROR(detail::check_flashinfer_sizes(tables, pool.block_size));
  if (sequence < 0 || sequence >= static_cast<std::int64_t>(tables.last_page_len.size())) {
    return Status::error(StatusCode::out_of_range, "is %lld, the batch has %zu", static_cast<long long>(sequence),
                         tables.last_page_len.size())
        .at("sequence");
  }
  const auto b = static_cast<std::size_t>(sequence);
  KVBLEND_RETURN_IF_ERROR(detail::check_flashinfer_sequence(tables, pool.block_size, b));
  const std::int64_t pages = std::int64_t{tables.indptr[b + 1]} - tables.indptr[b];
  if (pages == 0) return by_table(pool, nullptr, 0, 0);
  return by_table(pool, tables.indices.data() + tables.indptr[b], pages,
                  (pages - 1) * pool.block_size + tables.last_page_len[b]);
}

// ---- TensorRT-LLM (cpp/tensorrt_llm/kernels/kvCacheUtils.h) ---------------------------------------------------------
// Rows are the cache's own token indices, after KVBlockArray::getKVTokenIdx where an attention window wraps around.

// Blocks [heads, rows, head_dim] of a pool; keys and values are blocks of the same pool, each named by its own table.
// Where they differ in type, make one pool for each. `blocks` counts the primary pool's.
template <Codec C>
Result<BlockPool> tensorrt_llm_blocks(const PoolShape& shape) {
  return block_pool<C>(shape, RowOrder::hnd);
}

// The second of two memories, with the same strides.
struct SecondaryPool {
  std::int64_t blocks = 0;
  std::int64_t origin = 0;  // bytes from the primary pool; see bytes_between
};

// Block offsets [batch, beams, 2, max_blocks] (KVBlockArray::data), keys first.
struct BlockOffsets {
  std::span<const std::int32_t> entries;
  std::int64_t max_blocks = 0;
};

// Keys and values of sequence batch_index · beams + beam. `rows` is its length, -1: all that the table has room for.
inline Result<KvPair<BlockArrayLayout>> tensorrt_llm_sequence(const BlockPool& pool, const SecondaryPool& secondary,
                                                              const BlockOffsets& offsets, std::int64_t sequence,
                                                              std::int64_t rows = -1) {
  KVBLEND_RETURN_IF_ERROR(detail::check_size(pool.block_size, 1, "block_size"));
  KVBLEND_RETURN_IF_ERROR(detail::check_size(secondary.blocks, 0, "secondary blocks"));
  KVBLEND_RETURN_IF_ERROR(detail::check_size(offsets.max_blocks, 1, "max_blocks"));
  const auto entries = static_cast<std::int64_t>(offsets.entries.size());
  if (sequence < 0 || sequence >= entries / 2 / offsets.max_blocks) {
    return Status::error(StatusCode::out_of_range, "is %lld, the table has %lld", static_cast<long long>(sequence),
                         static_cast<long long>(entries / 2 / offsets.max_blocks))
        .at("sequence");
  }
  KVBLEND_RETURN_IF_ERROR(detail::check_room(rows, offsets.max_blocks, pool.block_size));
  const std::int32_t* const table = offsets.entries.data() + sequence * 2 * offsets.max_blocks;
  KvPair<BlockArrayLayout> pair{
      BlockArrayLayout(pool, secondary.blocks, secondary.origin, table, offsets.max_blocks),
      BlockArrayLayout(pool, secondary.blocks, secondary.origin, table + offsets.max_blocks, offsets.max_blocks)};
  if (rows >= 0) pair.keys.row_count = pair.values.row_count = rows;
  return pair;
}

// ---- llama.cpp (src/llama-kv-cache.cpp) -----------------------------------------------------------------------------
// A row is a cell: in_order for cells as they lie, by_slots for the scattered cells of a sequence (slot_info's 32-bit
// indices, or the 64-bit ones of k_idxs). Tensors of keys and of values each have a base of their own.

// [streams, cells, heads · head_dim], one stream of it: all keys, and values with flash attention. With MLA there are
// keys alone, heads 1 and head_dim lora + rope.
template <Codec C>
Result<BlockPool> llama_cpp_cells(std::int64_t cells, std::int32_t heads, std::int32_t head_dim,
                                  std::int64_t stream = 0) {
  KVBLEND_RETURN_IF_ERROR(detail::check_size(stream, 0, "stream"));
  Result<BlockPool> pool = block_pool<C>({cells, 1, heads, head_dim, 0});
  KVBLEND_RETURN_IF_ERROR(detail::renamed(pool.status, "blocks", "cells"));
  const detail::ByteCount bytes = detail::ByteCount(pool.value.block_stride) * cells;
  KVBLEND_RETURN_IF_ERROR(detail::check_bytes(bytes * stream + bytes, "stream"));
  pool.value.origin = bytes.value() * stream;
  return pool;
}

// Values without flash attention: [streams, heads, head_dim, cells], never quantised.
template <Codec C>
Result<BlockPool> llama_cpp_transposed_values(std::int64_t cells, std::int32_t heads, std::int32_t head_dim,
                                              std::int64_t stream = 0) {
  static_assert(C::block_values == 1, "values in tiles are single numbers");
  KVBLEND_RETURN_IF_ERROR(detail::check_size(stream, 0, "stream"));
  KVBLEND_RETURN_IF_ERROR(detail::check_size(cells, 0, "cells"));
  KVBLEND_RETURN_IF_ERROR(detail::check_pool<C>({cells, 1, heads, head_dim, 0}, 1));
  const detail::ByteCount column = detail::ByteCount(cells) * C::block_bytes;
  const detail::ByteCount head = column * head_dim;
  const detail::ByteCount bytes = head * heads;
  KVBLEND_RETURN_IF_ERROR(detail::check_bytes(bytes, "cells"));
  KVBLEND_RETURN_IF_ERROR(detail::check_bytes(bytes * stream + bytes, "stream"));
  BlockPool pool(cells, 1, HeadShape(heads, head_dim, head.value(), 1, column.value()), C::block_bytes, C::block_bytes);
  pool.origin = bytes.value() * stream;
  return pool;
}

// ---- LMCache (lmcache/v1/memory_management.py, MemoryFormat) --------------------------------------------------------
// Memory objects of a chunk of tokens, keys and values from one base.

// KV_2LTD: [2, layers, tokens, heads · head_dim], one layer of it.
template <Codec C>
Result<KvPair<ContiguousLayout>> lmcache_kv_2ltd(std::int64_t layers, std::int64_t tokens, std::int32_t heads,
                                                 std::int32_t head_dim, std::int64_t layer) {
  KVBLEND_RETURN_IF_ERROR(detail::check_size(layers, 1, "layers"));
  if (layer < 0 || layer >= layers) {
    return Status::error(StatusCode::out_of_range, "is %lld of %lld", static_cast<long long>(layer),
                         static_cast<long long>(layers))
        .at("layer");
  }
  const Result<ContiguousLayout> rows = dense_layout<C>(tokens, heads, head_dim);
  KVBLEND_RETURN_IF_ERROR(detail::renamed(rows.status, "rows", "tokens"));
  const detail::ByteCount one = detail::ByteCount(rows.value.row_stride) * tokens;
  KVBLEND_RETURN_IF_ERROR(detail::check_bytes(one * layers * 2, "layers"));
  KvPair<ContiguousLayout> pair{rows.value, rows.value};
  pair.keys.origin = layer * one.value();
  pair.values.origin = layers * one.value() + pair.keys.origin;
  return pair;
}

// KV_2TD: [2, tokens, heads · head_dim], a layer's own object.
template <Codec C>
Result<KvPair<ContiguousLayout>> lmcache_kv_2td(std::int64_t tokens, std::int32_t heads, std::int32_t head_dim) {
  return lmcache_kv_2ltd<C>(1, tokens, heads, head_dim, 0);
}

// KV_T2D: [tokens, 2, heads · head_dim].
template <Codec C>
Result<KvPair<ContiguousLayout>> lmcache_kv_t2d(std::int64_t tokens, std::int32_t heads, std::int32_t head_dim) {
  const Result<ContiguousLayout> rows = dense_layout<C>(tokens, heads, head_dim);
  KVBLEND_RETURN_IF_ERROR(detail::renamed(rows.status, "rows", "tokens"));
  KVBLEND_RETURN_IF_ERROR(detail::check_bytes(detail::ByteCount(rows.value.row_stride) * 2 * tokens, "tokens"));
  KvPair<ContiguousLayout> pair{rows.value, rows.value};
  pair.values.origin = rows.value.row_stride;
  pair.keys.row_stride = pair.values.row_stride = 2 * rows.value.row_stride;
  return pair;
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
