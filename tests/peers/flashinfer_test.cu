// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Offsets and lengths of FlashInfer's own paged_kv_t and paged_kv_mla_t (page.cuh) against kvblend's layouts, for
// random shapes, strides and tables. A program without a test framework, as nvcc compiles it.
#include <flashinfer/page.cuh>

#include <kvblend/codec/floats.hpp>
#include <kvblend/memory/engines.hpp>

#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

namespace {

using namespace kvblend;

constexpr int kCases = 10000;

std::int32_t pick(std::mt19937& random, int least, int most) {
  return least + static_cast<std::int32_t>(random() % static_cast<unsigned>(most - least + 1));
}

// A random batch, as both sides take it.
struct Batch {
  std::vector<std::int32_t> indices, indptr{0}, last;

  Batch(std::mt19937& random, std::int32_t pages, std::int32_t page_size) {
    const int sequences = pick(random, 1, 5);
    for (int b = 0; b < sequences; ++b) {
      const int own = pick(random, 0, 4);
      for (int i = 0; i < own; ++i) indices.push_back(pick(random, 0, pages - 1));
      indptr.push_back(static_cast<std::int32_t>(indices.size()));
      last.push_back(own == 0 ? 0 : pick(random, 1, page_size));
    }
  }
  FlashInferTables tables() const { return {indices, indptr, last}; }
  std::uint32_t size() const { return static_cast<std::uint32_t>(last.size()); }
};

// Whether a sequence has as many rows as the peer says, each where the peer has it: element(page, entry, head, value).
template <class Element>
bool agrees(const BlockPool& pool, const Batch& batch, std::uint32_t b, std::uint32_t length, const Element& element) {
  const Result<PagedLayout> layout = flashinfer_sequence(pool, batch.tables(), b);
  if (!layout.ok() || layout.value.contains(length)) return false;
  for (std::uint32_t row = 0; row < length; ++row) {
    if (!layout.value.contains(row)) return false;
    const auto size = static_cast<std::uint32_t>(pool.block_size);
    const std::int32_t page = batch.indices[static_cast<std::size_t>(batch.indptr[b]) + row / size];
    for (std::int32_t head = 0; head < pool.heads(); ++head) {
      for (std::int32_t value = 0; value < pool.head_dim(); ++value) {
        const std::size_t theirs = element(static_cast<std::size_t>(page), row % size, static_cast<std::size_t>(head),
                                           static_cast<std::size_t>(value));
        if (layout.value.offset(row, head, 0) + 2 * value != static_cast<std::int64_t>(2 * theirs)) return false;
      }
    }
  }
  return true;
}

bool paged_kv_agrees(std::mt19937& random) {
  // Pages from a range that takes offsets past 32 bits at times.
  const std::int32_t pages = pick(random, 0, 3) == 0 ? 1 << 28 : pick(random, 1, 8);
  const std::int32_t page_size = pick(random, 1, 5);
  const std::int32_t heads = pick(random, 1, 4);
  const std::int32_t dim = 2 * pick(random, 1, 8);
  const bool hnd = pick(random, 0, 1) == 0;
  Batch batch(random, pages, page_size);
  const auto order = hnd ? flashinfer::QKVLayout::kHND : flashinfer::QKVLayout::kNHD;
  using Peer = flashinfer::paged_kv_t<std::uint16_t, std::int32_t>;
  Peer peer(static_cast<std::uint32_t>(heads), static_cast<std::uint32_t>(page_size), static_cast<std::uint32_t>(dim),
            batch.size(), order, nullptr, nullptr, batch.indices.data(), batch.indptr.data(), batch.last.data());
  Result<BlockPool> pool =
      flashinfer_pages<F16Codec>({pages, page_size, heads, dim, 0}, hnd ? RowOrder::hnd : RowOrder::nhd);
  if (!pool.ok()) return false;
  if (pick(random, 0, 1) == 0) {  // keys and values of a page together: [P, 2, …]
    const std::int64_t block = std::int64_t{page_size} * heads * dim;
    const std::int64_t outer = hnd ? std::int64_t{page_size} * dim : std::int64_t{heads} * dim;
    const std::int64_t strides[3] = {2 * block, outer, dim};
    peer = Peer(static_cast<std::uint32_t>(heads), static_cast<std::uint32_t>(page_size),
                static_cast<std::uint32_t>(dim), batch.size(), order, nullptr, nullptr, strides, batch.indices.data(),
                batch.indptr.data(), batch.last.data());
    pool.value =
        vllm_flashinfer<F16Codec>({pages, page_size, heads, dim, 0}, hnd ? RowOrder::hnd : RowOrder::nhd).value.keys;
    pool.value.first_block = 0;
  }
  for (std::uint32_t b = 0; b < batch.size(); ++b) {
    if (!agrees(pool.value, batch, b, peer.get_length(b),
                [&peer](std::size_t page, std::size_t entry, std::size_t head, std::size_t value) {
                  return peer.get_elem_offset(page, head, entry, value);
                })) {
      return false;
    }
  }
  return true;
}

bool paged_kv_mla_agrees(std::mt19937& random) {
  const std::int32_t pages = pick(random, 1, 8);
  const std::int32_t page_size = pick(random, 1, 5);
  const std::int32_t lora = pick(random, 1, 16);
  const std::int32_t rope = pick(random, 1, 8);
  Batch batch(random, pages, page_size);
  const flashinfer::paged_kv_mla_t<std::uint16_t, std::int32_t> peer(
      static_cast<std::uint32_t>(page_size), static_cast<std::uint32_t>(lora), static_cast<std::uint32_t>(rope),
      batch.size(), nullptr, nullptr, batch.indices.data(), batch.indptr.data(), batch.last.data());
  const Result<MlaPools> pools = flashinfer_mla<F16Codec>(pages, page_size, lora, rope);
  if (!pools.ok()) return false;
  for (std::uint32_t b = 0; b < batch.size(); ++b) {
    if (!agrees(pools.value.latents, batch, b, peer.get_length(b),
                [&peer](std::size_t page, std::size_t entry, std::size_t, std::size_t value) {
                  return peer.get_elem_offset_ckv(page, entry, value);
                }) ||
        !agrees(pools.value.rope, batch, b, peer.get_length(b),
                [&peer](std::size_t page, std::size_t entry, std::size_t, std::size_t value) {
                  return peer.get_elem_offset_kpe(page, entry, value);
                })) {
      return false;
    }
  }
  return true;
}

int count_right(const char* what, unsigned seed, bool (*agrees_once)(std::mt19937&)) {
  std::mt19937 random(seed);
  int right = 0;
  while (right < kCases && agrees_once(random)) ++right;
  std::printf("%s: %d of %d random cases agree (seed %u)\n", what, right, kCases, seed);
  return right;
}

}  // namespace

int main() {
  const int paged = count_right("paged_kv_t", 601, paged_kv_agrees);
  const int mla = count_right("paged_kv_mla_t", 602, paged_kv_mla_agrees);
  return paged == kCases && mla == kCases ? 0 : 1;
}
