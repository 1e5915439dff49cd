// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The memory of each known engine, at random sizes, against an index into the nested array that the engine documents.
#include <kvblend/memory/engines.hpp>

#include <doctest/doctest.h>
#include <cstdint>
#include <random>
#include <vector>
#include "layout_support.hpp"

using namespace kvblend;
using namespace kvblend_test;

namespace {

constexpr int kCases = 10000;

// Sizes of one case, by the letters of the engines' documents.
struct Sizes {
  std::int64_t blocks, rows, heads, dim, padding;
  explicit Sizes(std::mt19937& random)
      : blocks(pick(random, 1, 4)),
        rows(pick(random, 1, 4)),
        heads(pick(random, 1, 3)),
        dim(pick(random, 1, 6)),
        padding(pick(random, 0, 1) * pick(random, 1, 5)) {}
  PoolShape shape() const {
    return {blocks, static_cast<std::int32_t>(rows), static_cast<std::int32_t>(heads), static_cast<std::int32_t>(dim),
            padding};
  }
  std::int32_t rows32() const { return static_cast<std::int32_t>(rows); }
  std::int32_t heads32() const { return static_cast<std::int32_t>(heads); }
  std::int32_t dim32() const { return static_cast<std::int32_t>(dim); }
};

// The block and the row within it that a table or a slot list gives.
struct Place {
  std::int64_t block, row;
};

// A pool through a random block table, and through random slots. byte(block, row, head, value) is the naive index.
template <class C, class Byte>
bool pool_agrees(std::mt19937& random, const BlockPool& pool, std::int64_t first_block, Memory& memory,
                 const Byte& byte) {
  const std::int64_t size = pool.block_size;
  if (pool.first_block != first_block) return false;
  const auto valid = [&](std::int64_t block) { return block >= first_block && block < pool.block_count; };
  if (pick(random, 0, 1) == 0) {
    const std::vector<std::int32_t> table = random_table(random, pick(random, 0, 4), -1, pool.block_count);
    const auto entries = static_cast<std::int64_t>(table.size());
    const std::int64_t rows = pick(random, -1, entries * size);
    const Result<PagedLayout> layout = by_table(pool, table.data(), entries, rows);
    if (!layout.ok()) return false;
    const std::int64_t length = rows < 0 ? entries * size : rows;
    const auto block = [&](std::int64_t row) { return table[static_cast<std::size_t>(row / size)]; };
    return agrees<C>(
        random, layout.value, entries * size,
        [&](std::int64_t row) { return row >= 0 && row < length && valid(block(row)) ? Held::yes : Held::no; },
        [&](std::int64_t row, std::int64_t head, std::int64_t value) {
          return byte(block(row), row % size, head, value);
        },
        memory);
  }
  std::vector<std::int64_t> slots(static_cast<std::size_t>(pick(random, 0, 8)));
  const auto count = static_cast<std::int64_t>(slots.size());
  for (std::int64_t& slot : slots) slot = pick(random, -1, pool.block_count * size);
  const Result<SlotLayout<std::int64_t>> layout = by_slots(pool, slots.data(), count);
  if (!layout.ok()) return false;
  const auto slot = [&](std::int64_t row) { return slots[static_cast<std::size_t>(row)]; };
  return agrees<C>(
      random, layout.value, count,
      [&](std::int64_t row) {
        if (row < 0 || row >= count) return Held::no;
        if (slot(row) < first_block * size) return Held::padding;
        return valid(slot(row) / size) ? Held::yes : Held::no;
      },
      [&](std::int64_t row, std::int64_t head, std::int64_t value) {
        return byte(slot(row) / size, slot(row) % size, head, value);
      },
      memory);
}

// Rows that all exist.
template <class C, class Byte>
bool rows_agree(std::mt19937& random, const ContiguousLayout& layout, std::int64_t rows, Memory& memory,
                const Byte& byte) {
  return agrees<C>(
      random, layout, rows, [&](std::int64_t row) { return row >= 0 && row < rows ? Held::yes : Held::no; }, byte,
      memory);
}

template <class Case>
void run_cases(unsigned seed, const Case& agrees_once) {
  CAPTURE(seed);
  std::mt19937 random(seed);
  int right = 0;  // also the number of the first case that is wrong
  while (right < kCases && agrees_once(random)) ++right;
  CHECK(right == kCases);
}

using Indices = std::vector<std::int64_t>;

}  // namespace

TEST_CASE("vLLM FlashAttention: [2, NB, BS, H, D] and [2, NB, H, BS, D]") {
  run_cases(501, [](std::mt19937& random) {
    const Sizes n(random);
    const bool hnd = pick(random, 0, 1) == 0;
    const auto pools = vllm_flash_attention<F16Codec>(n.shape(), hnd ? RowOrder::hnd : RowOrder::nhd);
    if (!pools.ok()) return false;
    const std::int64_t half = pick(random, 0, 1);
    const Indices block_shape = hnd ? Indices{n.heads, n.rows, n.dim} : Indices{n.rows, n.heads, n.dim};
    const std::int64_t block_bytes = elements(block_shape) * 2 + n.padding;
    Memory memory(random, 2 * n.blocks * block_bytes);
    return pool_agrees<F16Codec>(
        random, half == 0 ? pools.value.keys : pools.value.values, 1, memory,
        [&](std::int64_t block, std::int64_t row, std::int64_t head, std::int64_t value) {
          const Indices within = hnd ? Indices{head, row, value} : Indices{row, head, value};
          return element({2, n.blocks}, {half, block}) * block_bytes + element(block_shape, within) * 2;
        });
  });
}

TEST_CASE("vLLM FlashInfer backend: [NB, 2, BS, H, D] and [NB, 2, H, BS, D]") {
  run_cases(502, [](std::mt19937& random) {
    Sizes n(random);
    const bool hnd = pick(random, 0, 1) == 0;
    const auto pools = vllm_flashinfer<Bf16Codec>(n.shape(), hnd ? RowOrder::hnd : RowOrder::nhd);
    if (!pools.ok()) return false;
    const std::int64_t half = pick(random, 0, 1);
    const Indices shape = hnd ? Indices{2, n.heads, n.rows, n.dim} : Indices{2, n.rows, n.heads, n.dim};
    const std::int64_t block_bytes = elements(shape) * 2 + n.padding;
    Memory memory(random, n.blocks * block_bytes);
    return pool_agrees<Bf16Codec>(
        random, half == 0 ? pools.value.keys : pools.value.values, 1, memory,
        [&](std::int64_t block, std::int64_t row, std::int64_t head, std::int64_t value) {
          const Indices within = hnd ? Indices{half, head, row, value} : Indices{half, row, head, value};
          return block * block_bytes + element(shape, within) * 2;
        });
  });
}

TEST_CASE("vLLM legacy: keys [NB, H, D/x, BS, x], values [NB, H, D, BS]") {
  run_cases(503, [](std::mt19937& random) {
    Sizes n(random);
    const std::int64_t x = pick(random, 1, 4);
    n.dim = x * pick(random, 1, 3);
    n.padding = 0;
    const auto pools = vllm_packed_keys<F16Codec, F32Codec>(n.shape(), static_cast<std::int32_t>(x));
    if (!pools.ok()) return false;
    Memory keys(random, elements({n.blocks, n.heads, n.dim, n.rows}) * 2);
    Memory values(random, elements({n.blocks, n.heads, n.dim, n.rows}) * 4);
    return pool_agrees<F16Codec>(random, pools.value.keys, 0, keys,
                                 [&](std::int64_t block, std::int64_t row, std::int64_t head, std::int64_t value) {
                                   return 2 * element({n.blocks, n.heads, n.dim / x, n.rows, x},
                                                      {block, head, value / x, row, value % x});
                                 }) &&
           pool_agrees<F32Codec>(random, pools.value.values, 0, values,
                                 [&](std::int64_t block, std::int64_t row, std::int64_t head, std::int64_t value) {
                                   return 4 * element({n.blocks, n.heads, n.dim, n.rows}, {block, head, value, row});
                                 });
  });
  // x is 16 bytes of values unless said.
  CHECK(vllm_packed_keys<F16Codec>({2, 16, 2, 64, 0}).value.keys.tile_values() == 8);
  CHECK(vllm_packed_keys<F32Codec>({2, 16, 2, 64, 0}).value.keys.tile_values() == 4);
}

TEST_CASE("vLLM MLA: [NB, BS, lora + rope], values a prefix of the keys") {
  run_cases(504, [](std::mt19937& random) {
    const Sizes n(random);
    const std::int64_t rope = pick(random, 1, 4);
    const auto pool = vllm_mla<Bf16Codec>(n.blocks, n.rows32(), n.dim32(), static_cast<std::int32_t>(rope));
    if (!pool.ok() || pool.value.heads() != 1 || pool.value.head_dim() != n.dim + rope) return false;
    const bool values = pick(random, 0, 1) == 0;
    const Result<BlockPool> prefix = prefix_of(pool.value, n.dim32());
    if (!prefix.ok() || prefix.value.head_dim() != n.dim) return false;
    Memory memory(random, elements({n.blocks, n.rows, n.dim + rope}) * 2);
    return pool_agrees<Bf16Codec>(random, values ? prefix.value : pool.value, 1, memory,
                                  [&](std::int64_t block, std::int64_t row, std::int64_t, std::int64_t value) {
                                    return 2 * element({n.blocks, n.rows, n.dim + rope}, {block, row, value});
                                  });
  });
}

TEST_CASE("vLLM fp8_ds_mla: 656 bytes a token, 512 fp8, 4 float scales, 64 bf16") {
  run_cases(505, [](std::mt19937& random) {
    const std::int64_t blocks = pick(random, 1, 2);
    const std::int64_t rows = pick(random, 1, 2);
    const auto pools = vllm_fp8_ds_mla(blocks, static_cast<std::int32_t>(rows));
    if (!pools.ok() || pools.value.rope.head_dim() != 64) return false;
    Memory memory(random, blocks * rows * 656);
    return pool_agrees<Bf16Codec>(random, pools.value.rope, 1, memory,
                                  [&](std::int64_t block, std::int64_t row, std::int64_t, std::int64_t value) {
                                    return element({blocks, rows, 656}, {block, row, 512 + 16 + 2 * value});
                                  });
  });

  std::mt19937 random(506);
  Memory memory(random, 3 * 4 * 656);
  const auto pools = vllm_fp8_ds_mla(3, 4);
  REQUIRE(pools.ok());
  const std::vector<std::int64_t> slots{5, -1, 10};
  const auto layout = by_slots(pools.value.latents, slots.data(), 3);
  REQUIRE(layout.ok());
  const Plane<DsMlaLatentCodec, SlotLayout<std::int64_t>> latents(memory.base(), layout.value);
  REQUIRE(check_shape(latents, "latents").ok());
  std::vector<float> values(512), back(512);
  for (std::size_t i = 0; i < 512; ++i) values[i] = static_cast<float>(i % 128 == 7 ? 448 : static_cast<int>(i % 16));
  std::vector<std::byte> expected = memory.bytes;
  encode_head(latents, 2, 0, values.data());
  decode_head(latents, 2, 0, back.data());
  CHECK(back == values);                   // a scale of 1: small integers are exact
  for (std::size_t i = 0; i < 528; ++i) {  // those of slot 10 alone are new
    const auto at = static_cast<std::size_t>(memory.at) + 10 * 656 + i;
    expected[at] = memory.bytes[at];
  }
  CHECK(memory.bytes == expected);
  float scale;
  std::memcpy(&scale, memory.base() + 10 * 656 + 512 + 4, 4);
  CHECK(scale == 1);
  CHECK(memory.base()[10 * 656 + 7] == std::byte{0x7e});  // 448
}

TEST_CASE("SGLang: [size + page, H, D] by token slots, slot 0 a dummy") {
  run_cases(507, [](std::mt19937& random) {
    const Sizes n(random);
    const std::int64_t size = pick(random, 0, 12);
    const auto pool = sglang_tokens<Bf16Codec>(size, n.rows32(), n.heads32(), n.dim32());
    if (!pool.ok()) return false;
    Memory memory(random, elements({size + n.rows, n.heads, n.dim}) * 2);
    return pool_agrees<Bf16Codec>(random, pool.value, 1, memory,
                                  [&](std::int64_t slot, std::int64_t, std::int64_t head, std::int64_t value) {
                                    return 2 * element({size + n.rows, n.heads, n.dim}, {slot, head, value});
                                  });
  });
  run_cases(508, [](std::mt19937& random) {
    const Sizes n(random);
    const auto pool = sglang_mla<F16Codec>(n.blocks, n.rows32(), n.dim32(), 2);
    if (!pool.ok()) return false;
    Memory memory(random, elements({n.blocks + n.rows, 1, n.dim + 2}) * 2);
    return pool_agrees<F16Codec>(random, pool.value, 1, memory,
                                 [&](std::int64_t slot, std::int64_t, std::int64_t head, std::int64_t value) {
                                   return 2 * element({n.blocks + n.rows, 1, n.dim + 2}, {slot, head, value});
                                 });
  });
}

TEST_CASE("FlashInfer paged_kv_t: [P, S, H, D] and [P, H, S, D], a batch's tables") {
  run_cases(509, [](std::mt19937& random) {
    Sizes n(random);
    n.padding = 0;
    const bool hnd = pick(random, 0, 1) == 0;
    const auto pool = flashinfer_pages<F16Codec>(n.shape(), hnd ? RowOrder::hnd : RowOrder::nhd);
    const std::int64_t batch = pick(random, 1, 4);
    std::vector<std::int32_t> indptr{0}, last, indices;
    for (std::int64_t b = 0; b < batch; ++b) {
      const std::int64_t pages = pick(random, 0, 3);
      for (std::int64_t i = 0; i < pages; ++i)
        indices.push_back(static_cast<std::int32_t>(pick(random, 0, n.blocks - 1)));
      indptr.push_back(static_cast<std::int32_t>(indices.size()));
      last.push_back(static_cast<std::int32_t>(pages == 0 ? 0 : pick(random, 1, n.rows)));
    }
    const FlashInferTables tables{indices, indptr, last};
    if (!pool.ok() || !check_flashinfer_tables(tables, n.rows32()).ok()) return false;
    const auto b = static_cast<std::size_t>(pick(random, 0, batch - 1));
    const auto layout = flashinfer_sequence(pool.value, tables, static_cast<std::int64_t>(b));
    if (!layout.ok()) return false;
    const std::int64_t pages = indptr[b + 1] - indptr[b];
    const std::int64_t length = pages == 0 ? 0 : (pages - 1) * n.rows + last[b];
    const Indices shape = hnd ? Indices{n.blocks, n.heads, n.rows, n.dim} : Indices{n.blocks, n.rows, n.heads, n.dim};
    Memory memory(random, elements(shape) * 2);
    return agrees<F16Codec>(
        random, layout.value, pages * n.rows,
        [&](std::int64_t row) { return row >= 0 && row < length ? Held::yes : Held::no; },
        [&](std::int64_t row, std::int64_t head, std::int64_t value) {
          const std::int64_t page = indices[static_cast<std::size_t>(indptr[b] + row / n.rows)];
          const std::int64_t entry = row % n.rows;
          return 2 * element(shape, hnd ? Indices{page, head, entry, value} : Indices{page, entry, head, value});
        },
        memory);
  });
}

TEST_CASE("FlashInfer paged_kv_mla_t: ckv [P, S, 512], kpe [P, S, 64]") {
  run_cases(510, [](std::mt19937& random) {
    const Sizes n(random);
    const std::int64_t rope = pick(random, 1, 4);
    const auto pools = flashinfer_mla<F16Codec>(n.blocks, n.rows32(), n.dim32(), static_cast<std::int32_t>(rope));
    if (!pools.ok()) return false;
    Memory ckv(random, elements({n.blocks, n.rows, n.dim}) * 2);
    Memory kpe(random, elements({n.blocks, n.rows, rope}) * 2);
    return pool_agrees<F16Codec>(random, pools.value.latents, 0, ckv,
                                 [&](std::int64_t page, std::int64_t entry, std::int64_t, std::int64_t value) {
                                   return 2 * element({n.blocks, n.rows, n.dim}, {page, entry, value});
                                 }) &&
           pool_agrees<F16Codec>(random, pools.value.rope, 0, kpe,
                                 [&](std::int64_t page, std::int64_t entry, std::int64_t, std::int64_t value) {
                                   return 2 * element({n.blocks, n.rows, rope}, {page, entry, value});
                                 });
  });
  const auto deepseek = flashinfer_mla<Bf16Codec>(3, 16);
  CHECK(deepseek.value.latents.head_dim() == 512);
  CHECK(deepseek.value.rope.head_dim() == 64);
}

TEST_CASE("TensorRT-LLM KVBlockArray: block offsets [B, W, 2, M] into two pools of [H, T, D]") {
  run_cases(511, [](std::mt19937& random) {
    Sizes n(random);
    n.padding = 0;
    const std::int64_t batch = pick(random, 1, 2), beams = pick(random, 1, 2), most = pick(random, 1, 3);
    const std::int64_t secondary_blocks = pick(random, 0, 3);
    std::vector<std::int32_t> offsets =
        random_table(random, elements({batch, beams, 2, most}), -1, n.blocks + secondary_blocks - 1);
    // Offsets from n.blocks on stand for the secondary pool's, and get its flag.
    std::vector<std::int32_t> plain = offsets;
    for (std::int32_t& offset : offsets) {
      if (offset >= n.blocks) {
        offset = static_cast<std::int32_t>(static_cast<std::uint32_t>(offset - n.blocks) + 0x80000000u);
      }
    }
    const std::int64_t b = pick(random, 0, batch - 1), beam = pick(random, 0, beams - 1), kv = pick(random, 0, 1);
    const auto pool = tensorrt_llm_blocks<F16Codec>(n.shape());
    const std::int64_t block_bytes = n.heads * n.rows * n.dim * 2;
    const std::int64_t rows = pick(random, -1, most * n.rows);
    const auto pair = tensorrt_llm_sequence(pool.value, {secondary_blocks, n.blocks * block_bytes + 5}, {offsets, most},
                                            b * beams + beam, rows);
    if (!pool.ok() || !pair.ok()) return false;
    const std::int64_t length = rows < 0 ? most * n.rows : rows;
    Memory memory(random, (n.blocks + secondary_blocks) * block_bytes + 5);
    const auto block = [&](std::int64_t row) {
      return plain[static_cast<std::size_t>(element({batch, beams, 2, most}, {b, beam, kv, row / n.rows}))];
    };
    return agrees<F16Codec>(
        random, kv == 0 ? pair.value.keys : pair.value.values, most * n.rows,
        [&](std::int64_t row) { return row >= 0 && row < length && block(row) >= 0 ? Held::yes : Held::no; },
        [&](std::int64_t row, std::int64_t head, std::int64_t value) {
          return (block(row) >= n.blocks ? 5 : 0) + block(row) * block_bytes +
                 2 * element({n.heads, n.rows, n.dim}, {head, row % n.rows, value});
        },
        memory);
  });
}

TEST_CASE("llama.cpp: [stream][cell][H*D], values without flash attention [stream][H][D][cell]") {
  run_cases(512, [](std::mt19937& random) {
    const Sizes n(random);
    const std::int64_t streams = pick(random, 1, 3), stream = pick(random, 0, streams - 1), cells = n.blocks * n.rows;
    const bool transposed = pick(random, 0, 1) == 0;
    const auto pool = transposed ? llama_cpp_transposed_values<F16Codec>(cells, n.heads32(), n.dim32(), stream)
                                 : llama_cpp_cells<F16Codec>(cells, n.heads32(), n.dim32(), stream);
    if (!pool.ok()) return false;
    Memory memory(random, streams * cells * n.heads * n.dim * 2);
    const auto byte = [&](std::int64_t cell, std::int64_t, std::int64_t head, std::int64_t value) {
      return 2 * (transposed ? element({streams, n.heads, n.dim, cells}, {stream, head, value, cell})
                             : element({streams, cells, n.heads * n.dim}, {stream, cell, head * n.dim + value}));
    };
    const Result<ContiguousLayout> rows = in_order(pool.value);
    return rows.ok() && pool_agrees<F16Codec>(random, pool.value, 0, memory, byte) &&
           rows_agree<F16Codec>(
               random, rows.value, cells, memory,
               [&](std::int64_t row, std::int64_t head, std::int64_t value) { return byte(row, 0, head, value); });
  });
}

TEST_CASE("LMCache: KV_2LTD, KV_2TD and KV_T2D") {
  run_cases(513, [](std::mt19937& random) {
    const Sizes n(random);
    const std::int64_t layers = pick(random, 1, 3), layer = pick(random, 0, layers - 1), kv = pick(random, 0, 1);
    const std::int64_t tokens = pick(random, 0, 6);
    const auto ltd = lmcache_kv_2ltd<Bf16Codec>(layers, tokens, n.heads32(), n.dim32(), layer);
    const auto td = lmcache_kv_2td<Bf16Codec>(tokens, n.heads32(), n.dim32());
    const auto t2d = lmcache_kv_t2d<Bf16Codec>(tokens, n.heads32(), n.dim32());
    if (!ltd.ok() || !td.ok() || !t2d.ok()) return false;
    Memory memory(random, elements({2, layers, tokens, n.heads * n.dim}) * 2);
    const auto one = [kv](const auto& pair) { return kv == 0 ? pair.value.keys : pair.value.values; };
    return rows_agree<Bf16Codec>(
               random, one(ltd), tokens, memory,
               [&](std::int64_t row, std::int64_t head, std::int64_t value) {
                 return 2 * element({2, layers, tokens, n.heads * n.dim}, {kv, layer, row, head * n.dim + value});
               }) &&
           rows_agree<Bf16Codec>(random, one(td), tokens, memory,
                                 [&](std::int64_t row, std::int64_t head, std::int64_t value) {
                                   return 2 * element({2, tokens, n.heads * n.dim}, {kv, row, head * n.dim + value});
                                 }) &&
           rows_agree<Bf16Codec>(random, one(t2d), tokens, memory,
                                 [&](std::int64_t row, std::int64_t head, std::int64_t value) {
                                   return 2 * element({tokens, 2, n.heads * n.dim}, {row, kv, head * n.dim + value});
                                 });
  });
}

TEST_CASE("dense rows: [rows, heads, head_dim] and [heads, rows, head_dim]") {
  run_cases(514, [](std::mt19937& random) {
    const Sizes n(random);
    const bool hnd = pick(random, 0, 1) == 0;
    const auto layout = dense_layout<F32Codec>(n.blocks, n.heads32(), n.dim32(), hnd ? RowOrder::hnd : RowOrder::nhd);
    if (!layout.ok()) return false;
    Memory memory(random, n.blocks * n.heads * n.dim * 4);
    return rows_agree<F32Codec>(random, layout.value, n.blocks, memory,
                                [&](std::int64_t row, std::int64_t head, std::int64_t value) {
                                  return 4 * (hnd ? element({n.heads, n.blocks, n.dim}, {head, row, value})
                                                  : element({n.blocks, n.heads, n.dim}, {row, head, value}));
                                });
  });
}
