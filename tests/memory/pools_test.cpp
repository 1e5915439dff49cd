// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What the makers of pools and layouts refuse, and how they name it.
#include <kvblend/memory/engines.hpp>

#include <doctest/doctest.h>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

using namespace kvblend;

namespace {

constexpr std::int64_t kHuge = (std::numeric_limits<std::int64_t>::max)();
constexpr std::int32_t kHuge32 = (std::numeric_limits<std::int32_t>::max)();

template <class R>
void refuses(const R& result, StatusCode code, const char* where) {
  CHECK(result.status.code() == code);
  CHECK(std::string(result.status.where()) == where);
  CHECK(result.status.message()[0] != '\0');
}
template <class R>
void refuses(const R& result, const char* where) {
  refuses(result, StatusCode::invalid_argument, where);
}

}  // namespace

TEST_CASE("pools refuse sizes that no memory has, and name the field") {
  CHECK(block_pool<F16Codec>({0, 1, 1, 1, 0}).ok());
  refuses(block_pool<F16Codec>({-1, 16, 8, 128, 0}), "blocks");
  refuses(block_pool<F16Codec>({4, 0, 8, 128, 0}), "block_size");
  refuses(block_pool<F16Codec>({4, 16, 0, 128, 0}), "heads");
  refuses(block_pool<F16Codec>({4, 16, 8, 0, 0}), "head_dim");
  refuses(block_pool<F16Codec>({4, 16, 8, kMaxHeadDim + 1, 0}), "head_dim");
  refuses(block_pool<F16Codec>({4, 16, 8, 128, -1}), "block_padding");
  refuses(block_pool<F16Codec>({4, 16, 8, 128, 0}, static_cast<RowOrder>(7)), "order");
  refuses(tiled_pool<F16Codec>({4, 16, 8, 128, 0}, 0), "tile");
  refuses(tiled_pool<F16Codec>({4, 16, 8, 100, 0}, 8), "head_dim");
  refuses(dense_layout<F16Codec>(-1, 8, 128), "rows");
  refuses(dense_layout<F16Codec>(4, 8, 128, static_cast<RowOrder>(7)), "order");
}

TEST_CASE("pools refuse more bytes than 64-bit offsets reach") {
  const auto beyond = StatusCode::out_of_range;
  CHECK(block_pool<F16Codec>({std::int64_t{1} << 41, 16, 8, 128, 0}).ok());
  refuses(block_pool<F16Codec>({std::int64_t{1} << 48, 16, 8, 128, 0}), beyond, "blocks");
  refuses(block_pool<F16Codec>({1, kHuge32, kHuge32, 1024, 0}), beyond, "block_size");
  refuses(block_pool<F16Codec>({1, 16, 8, 128, kHuge}), beyond, "block_padding");
  refuses(vllm_flashinfer<F16Codec>({1, 16, 8, 128, kHuge}), beyond, "block_padding");
  refuses(tiled_pool<F16Codec>({kHuge, 16, 8, 128, 0}, 8), beyond, "blocks");
  refuses(tiled_pool<F16Codec>({1, kHuge32, kHuge32, 1024, 0}, 8), beyond, "block_size");
  refuses(dense_layout<F32Codec>(kHuge / 4096, 8, 128 + 1), beyond, "rows");
  // One half fits, both do not.
  CHECK(block_pool<F16Codec>({std::int64_t{1} << 47, 16, 8, 128, 0}).ok());
  refuses(vllm_flash_attention<F16Codec>({std::int64_t{1} << 47, 16, 8, 128, 0}), beyond, "blocks");
  refuses(vllm_flashinfer<F16Codec>({std::int64_t{1} << 47, 16, 8, 128, 0}), beyond, "blocks");
  refuses(vllm_flashinfer<F16Codec>({1, kHuge32, kHuge32, 1024, 0}), beyond, "block_size");
  refuses(vllm_mla<F16Codec>(kHuge, 16), beyond, "blocks");
  refuses(vllm_fp8_ds_mla(kHuge / 656, 16), beyond, "blocks");
  refuses(sglang_tokens<F16Codec>(kHuge, 16, 8, 128), beyond, "size");
  refuses(sglang_tokens<F16Codec>(kHuge - 16, 16, 8, 128), beyond, "size");
  refuses(llama_cpp_cells<F16Codec>(1 << 20, 8, 128, std::int64_t{1} << 40), beyond, "stream");
  refuses(llama_cpp_transposed_values<F16Codec>(1 << 20, 8, 128, std::int64_t{1} << 40), beyond, "stream");
  refuses(llama_cpp_transposed_values<F16Codec>(kHuge / 2, 8, 128), beyond, "cells");
  refuses(lmcache_kv_2ltd<F16Codec>(std::int64_t{1} << 41, 1 << 12, 8, 128, 0), beyond, "layers");
  refuses(lmcache_kv_t2d<F16Codec>(std::int64_t{1} << 51, 8, 128), beyond, "tokens");
}

TEST_CASE("engines' own numbers are checked") {
  refuses(vllm_flash_attention<F16Codec>({4, 16, 8, 128, 0}, static_cast<RowOrder>(2)), "order");
  refuses(vllm_flashinfer<F16Codec>({4, 16, 8, 128, 0}, static_cast<RowOrder>(2)), "order");
  refuses(vllm_flashinfer<F16Codec>({4, 16, 8, -128, 0}), "head_dim");
  refuses(vllm_packed_keys<F16Codec>({4, 16, 8, 100, 0}), "head_dim");  // 8 values a tile
  refuses(vllm_packed_keys<F16Codec>({4, 16, 8, 128, 0}, -8), "x");
  refuses(vllm_mla<F16Codec>(4, 16, 0, 64), "lora");
  refuses(vllm_mla<F16Codec>(4, 16, kHuge32, 64), "lora");
  refuses(vllm_mla<F16Codec>(4, 16, 512, kHuge32), "rope");
  refuses(vllm_mla<F16Codec>(4, 16, kMaxHeadDim, 1), "head_dim");
  refuses(vllm_fp8_ds_mla(-1, 16), "blocks");
  refuses(vllm_fp8_ds_mla(4, 0), "block_size");
  refuses(sglang_tokens<F16Codec>(-1, 1, 8, 128), "size");
  refuses(sglang_tokens<F16Codec>(64, 0, 8, 128), "page_size");
  refuses(sglang_mla<F16Codec>(64, 1, 512, 0), "rope");
  refuses(llama_cpp_cells<F16Codec>(64, 8, 128, -1), "stream");
  refuses(llama_cpp_transposed_values<F16Codec>(64, 8, 128, -1), "stream");
  refuses(lmcache_kv_2ltd<F16Codec>(0, 16, 8, 128, 0), "layers");
  refuses(lmcache_kv_2ltd<F16Codec>(4, 16, 8, 128, 4), StatusCode::out_of_range, "layer");
  refuses(lmcache_kv_2ltd<F16Codec>(4, 16, 8, 128, -1), StatusCode::out_of_range, "layer");
  refuses(lmcache_kv_2td<F16Codec>(-1, 8, 128), "tokens");
  refuses(lmcache_kv_t2d<F16Codec>(-1, 8, 128), "tokens");
  refuses(llama_cpp_cells<F16Codec>(-1, 8, 128), "cells");
  refuses(llama_cpp_transposed_values<F16Codec>(-1, 8, 128), "cells");
  refuses(flashinfer_mla<F16Codec>(-1, 16), "pages");
  refuses(flashinfer_mla<F16Codec>(4, 0), "page_size");
  refuses(flashinfer_mla<F16Codec>(4, 16, 0, 64), "lora");
  refuses(flashinfer_mla<F16Codec>(4, 16, 512, 0), "rope");
  refuses(lmcache_kv_t2d<F16Codec>(16, 0, 128), "heads");
}

TEST_CASE("tables and lists must be there, and as long as they are said to be") {
  const BlockPool pool = block_pool<F16Codec>({4, 4, 1, 2, 0}).value;
  const std::int32_t table[2] = {0, 1};
  CHECK(by_table(pool, nullptr, 0).ok());
  CHECK(by_table(pool, table, 2, 8).ok());
  refuses(by_table(pool, nullptr, 2), "block table");
  refuses(by_table(pool, table, -1), "block table");
  refuses(by_table(pool, table, 2, -2), "rows");
  refuses(by_table(pool, table, 2, 9), StatusCode::out_of_range, "rows");
  refuses(by_table(BlockPool(4, 0, HeadShape(1, 2, 4), 4, 4), table, 2), "block_size");

  const std::int64_t slots[2] = {3, 4};
  CHECK(by_slots(pool, slots, 2).ok());
  refuses(by_slots(pool, slots, -1), "slots");
  refuses(by_slots(pool, static_cast<const std::int64_t*>(nullptr), 1), "slots");
  refuses(by_slots(BlockPool(4, 0, HeadShape(), 0, 0), slots, 2), "block_size");
}

TEST_CASE("FlashInfer's tables must describe a batch") {
  const BlockPool pool = flashinfer_pages<F16Codec>({8, 4, 1, 2, 0}).value;
  const std::vector<std::int32_t> indices{5, 2, 7};
  const std::vector<std::int32_t> indptr{0, 2, 2, 3};
  const std::vector<std::int32_t> last{3, 0, 4};
  CHECK(check_flashinfer_tables({indices, indptr, last}, 4).ok());
  const auto first = flashinfer_sequence(pool, {indices, indptr, last}, 0);
  REQUIRE(first.ok());
  CHECK(first.value.contains(6));
  CHECK_FALSE(first.value.contains(7));  // on the last page, past last_page_len
  const auto empty = flashinfer_sequence(pool, {indices, indptr, last}, 1);
  REQUIRE(empty.ok());
  CHECK_FALSE(empty.value.contains(0));
  refuses(flashinfer_sequence(pool, {indices, indptr, last}, 3), StatusCode::out_of_range, "sequence");
  refuses(flashinfer_sequence(pool, {indices, indptr, last}, -1), StatusCode::out_of_range, "sequence");
  refuses(flashinfer_sequence(BlockPool(), {indices, std::vector<std::int32_t>{0}, last}, 0), StatusCode::mismatch,
          "indptr");

  struct Wrong {
    std::vector<std::int32_t> indptr, last;
    const char* where;
  };
  const Wrong wrong[] = {
      {{0, 2, 1, 3}, {3, 4, 4}, "indptr[2]"},        {{0, 2, 2, 4}, {3, 0, 4}, "indptr[3]"},
      {{-1, 2, 2, 3}, {3, 0, 4}, "indptr[1]"},       {{0, 2, 2, 3}, {0, 0, 4}, "last_page_len[0]"},
      {{0, 2, 2, 3}, {5, 0, 4}, "last_page_len[0]"}, {{0, 2, 2, 3}, {3, -1, 4}, "last_page_len[1]"},
      {{0, 2, 2, 3}, {3, 5, 4}, "last_page_len[1]"},
  };
  for (const Wrong& table : wrong) {
    CAPTURE(table.where);
    const FlashInferTables tables{indices, table.indptr, table.last};
    bool refused = false;
    for (std::int64_t b = 0; b < 3; ++b) {
      const auto layout = flashinfer_sequence(pool, tables, b);
      refused = refused || (!layout.ok() && std::string(layout.status.where()) == table.where);
    }
    CHECK(refused);
    CHECK_FALSE(check_flashinfer_tables(tables, 4).ok());
  }
  const std::vector<std::int32_t> late{1, 2, 2, 3};
  CHECK(std::string(check_flashinfer_tables({indices, late, last}, 4).where()) == "indptr[0]");
  CHECK(std::string(check_flashinfer_tables({indices, indptr, last}, 0).where()) == "page_size");
  CHECK(check_flashinfer_tables({indices, {}, {}}, 4).code() == StatusCode::mismatch);
}

TEST_CASE("TensorRT-LLM's block offsets are asked only for sequences they have") {
  const BlockPool pool = tensorrt_llm_blocks<F16Codec>({8, 4, 1, 2, 0}).value;
  const std::vector<std::int32_t> offsets(2 * 2 * 3);  // two sequences of three blocks
  const BlockOffsets table{offsets, 3};
  CHECK(tensorrt_llm_sequence(pool, {}, table, 1, 12).ok());
  refuses(tensorrt_llm_sequence(pool, {}, table, 2), StatusCode::out_of_range, "sequence");
  refuses(tensorrt_llm_sequence(pool, {}, table, -1), StatusCode::out_of_range, "sequence");
  refuses(tensorrt_llm_sequence(pool, {}, table, 0, 13), StatusCode::out_of_range, "rows");
  refuses(tensorrt_llm_sequence(pool, {}, table, 0, -2), "rows");
  refuses(tensorrt_llm_sequence(pool, {}, {offsets, 0}, 0), "max_blocks");
  refuses(tensorrt_llm_sequence(pool, {-1, 0}, table, 0), "secondary blocks");
}

TEST_CASE("a pool is rows in order only where one stride reaches them") {
  CHECK(in_order(block_pool<F16Codec>({4, 4, 2, 8, 0}).value).value.row_count == 16);
  CHECK(in_order(block_pool<F16Codec>({1, 4, 2, 8, 0}, RowOrder::hnd).value).ok());
  refuses(in_order(block_pool<F16Codec>({4, 4, 2, 8, 0}, RowOrder::hnd).value), StatusCode::unsupported,
          "block_stride");
  refuses(in_order(block_pool<F16Codec>({4, 4, 2, 8, 2}).value), StatusCode::unsupported, "block_stride");
  CHECK(in_order(block_pool<F16Codec>({4, 1, 2, 8, 2}).value).value.row_stride == 34);
  refuses(in_order(sglang_tokens<F16Codec>(4, 1, 2, 8).value), StatusCode::unsupported, "first_block");
  refuses(in_order(BlockPool(4, 0, HeadShape(), 0, 0)), "block_size");
}

TEST_CASE("a prefix is part of a head, in whole tiles") {
  const ContiguousLayout rows = dense_layout<F16Codec>(4, 1, 576).value;
  CHECK(prefix_of(rows, 512).value.head_dim() == 512);
  CHECK(prefix_of(rows, 512).value.tiles() == 1);
  CHECK(prefix_of(rows, 512).value.offset(3, 0, 0) == rows.offset(3, 0, 0));
  refuses(prefix_of(rows, 0), "prefix values");
  refuses(prefix_of(rows, 577), "prefix values");
  const BlockPool tiled = tiled_pool<F16Codec>({4, 16, 2, 64, 0}, 8).value;
  CHECK(prefix_of(tiled, 16).value.tiles() == 2);
  refuses(prefix_of(tiled, 12), "prefix values");
}

TEST_CASE("vLLM's null block holds no rows") {
  const BlockPool pool = vllm_flash_attention<F16Codec>({8, 4, 1, 2, 0}).value.keys;
  const std::int32_t table[3] = {0, 7, 8};  // freed by a sliding window, held, past the pool
  const PagedLayout layout = by_table(pool, table, 3).value;
  CHECK_FALSE(layout.contains(3));
  CHECK(layout.contains(4));
  CHECK_FALSE(layout.contains(8));
}
