// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What the engine gives FlashInfer's kernels against what FlashInfer's own plan and paged_kv_t make of the same
// numbers. A program without a test framework, as nvcc compiles it; it needs no GPU.
#include <flashinfer/attention/scheduler.cuh>
#include <flashinfer/page.cuh>

#include <cuda_engine/flashinfer.hpp>
#include <kvblend/memory/pools.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

namespace {

using namespace cuda_engine;

std::int32_t pick(std::mt19937& random, int least, int most) {
  return least + static_cast<std::int32_t>(random() % static_cast<unsigned>(most - least + 1));
}

bool same(const std::vector<std::int32_t>& theirs, const std::int32_t* ours) {
  return std::equal(theirs.begin(), theirs.end(), ours);
}

bool agrees(std::mt19937& random, int& splits) {
  const std::int32_t cached = pick(random, 65, 5000);
  const std::int32_t count = pick(random, 65, cached);  // below 65 FlashInfer may take smaller tiles than the engine
  const std::int32_t kv_heads = pick(random, 1, 8);
  const std::int32_t group = pick(random, 1, 8);
  const std::int32_t page_size = pick(random, 0, 1) == 0 ? pick(random, 1, 300) : 16;
  const std::int32_t blocks = pick(random, 0, 140);
  const FlashInferPlan plan = flashinfer_plan(count, group, cached, page_size, blocks);
  std::vector<std::int32_t> memory(static_cast<std::size_t>(FlashInferTables::size(plan.entries(), count)));
  const FlashInferTables tables = FlashInferTables::in(memory.data(), plan.entries(), count);
  const FillFlashInferTables fill{tables, plan, count, cached, page_size};
  for (std::int64_t i = 0; i < fill.size(); ++i) fill(i);

  const auto [split, entries, padded, tile, chunk, request, query_tile, chunk_of, merge, out] =
      flashinfer::PrefillSplitQOKVIndptr<std::int32_t>(
          tables.q_indptr, tables.page_indptr, static_cast<std::uint32_t>(count), 1,
          static_cast<std::uint32_t>(kv_heads * group), static_cast<std::uint32_t>(kv_heads), 128,
          static_cast<std::uint32_t>(page_size), static_cast<std::uint32_t>(blocks), false);
  if (split) ++splits;
  if (split != (plan.chunks > 1) || tile != kFlashInferTile || chunk != plan.chunk_rows) return false;
  if (entries != static_cast<std::uint32_t>(plan.entries()) || padded != entries) return false;
  if (!same(request, tables.request_indices) || !same(query_tile, tables.qo_tile_indices) ||
      !same(chunk_of, tables.kv_tile_indices) || !same(merge, tables.merge_indptr) || !same(out, tables.o_indptr)) {
    return false;
  }

  // Its cache, over the same blocks.
  const auto order = pick(random, 0, 1) == 0 ? kvblend::RowOrder::nhd : kvblend::RowOrder::hnd;
  const std::int32_t used = tables.page_indptr[1];
  std::vector<std::int32_t> table(static_cast<std::size_t>(used));
  for (std::int32_t i = 0; i < used; ++i) table[static_cast<std::size_t>(i)] = i;
  std::shuffle(table.begin(), table.end(), random);
  const auto pool = kvblend::block_pool<kvblend::Bf16Codec>({used, page_size, kv_heads, 64, 0}, order);
  if (!pool.ok()) return false;
  using Plane = kvblend::PagedPlane<kvblend::Bf16Codec>;
  std::byte base{};  // of which only addresses are made
  const Plane plane(&base, kvblend::PagedLayout(pool.value, table.data(), used));
  const auto pages = flashinfer_pages<BFloat16>(plane, plane);
  if (!pages.ok()) return false;
  const std::int64_t strides[3] = {pages.value.page_stride, pages.value.row_stride, pages.value.head_stride};
  const flashinfer::paged_kv_t<std::uint16_t, std::int32_t> peer(
      static_cast<std::uint32_t>(kv_heads), pages.value.page_size, 64, 1, flashinfer::QKVLayout::kNHD, nullptr, nullptr,
      strides, table.data(), tables.page_indptr, tables.last_page_len);
  if (peer.get_length(0) != static_cast<std::uint32_t>(cached)) return false;
  for (int i = 0; i < 50; ++i) {
    const std::int32_t row = pick(random, 0, cached - 1);
    const std::int32_t head = pick(random, 0, kv_heads - 1);
    std::uint32_t page = 0, entry = 0;
    peer.page_size.divmod(static_cast<std::uint32_t>(row), page, entry);
    const std::size_t there = peer.get_elem_offset(static_cast<std::size_t>(peer.indices[page]),
                                                   static_cast<std::size_t>(head), entry, 0);
    if (plane.layout.offset(row, head, 0) != static_cast<std::int64_t>(2 * there)) return false;
  }
  return true;
}

}  // namespace

int main() {
  constexpr int kCases = 3000;
  std::mt19937 random(603);
  int right = 0, splits = 0;
  while (right < kCases && agrees(random, splits)) ++right;
  std::printf("plan and pages: %d of %d random cases agree, %d of them in chunks (seed 603)\n", right, kCases, splits);
  return right == kCases && splits > kCases / 4 ? 0 : 1;
}
