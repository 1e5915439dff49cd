// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Keys and values into the memory of each known engine and back: from dense rows, turned to where the engine has them,
// and turned back, with every byte that is not theirs left alone.
#include <kvblend/codec/floats.hpp>
#include <kvblend/codec/fp8.hpp>
#include <kvblend/codec/ggml_blocks.hpp>
#include <kvblend/codec/hadamard.hpp>
#include <kvblend/codec/scaled.hpp>
#include <kvblend/memory/engines.hpp>

#include <doctest/doctest.h>
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>
#include "shift_support.hpp"
#include "support.hpp"

using namespace kvblend;
using namespace kvblend_test;

namespace {

constexpr std::int32_t kRows = 11;
constexpr std::int32_t kHeads = 3;
constexpr std::int32_t kDim = 16;
constexpr std::int32_t kBlockRows = 4;
constexpr PoolShape kShape{7, kBlockRows, kHeads, kDim, 6};
constexpr PoolShape kPlainShape{7, kBlockRows, kHeads, kDim, 0};
constexpr std::int32_t kTable[] = {5, 1, 3};
constexpr std::int64_t kSlots[] = {9, 4, -1, 17, 5, 22, 8, -1, 13, 27, 6};  // two rows of padding
constexpr std::int32_t kTokenSlots[] = {9, 4, 0, 17, 5, 22, 8, 0, 13, 27, 6};
constexpr std::uint32_t kCells[] = {9, 4, 0, 17, 5, 22, 8, 1, 13, 27, 6};

RopeSpec spec_of(std::int32_t head_dim, std::int32_t rotary, std::int32_t offset, RopePairing pairing) {
  RopeSpec spec = plain_rope(head_dim, 10000, pairing, rotary).value;
  spec.rotary_offset = offset;
  return spec;
}

std::vector<float> random_head(std::mt19937& random, std::int32_t dim) {
  std::vector<float> values(static_cast<std::size_t>(dim));
  for (float& value : values) value = static_cast<float>(static_cast<int>(random() % 65) - 32) / 16;  // exact in all
  return values;
}

// Memory that holds the layout's rows, and a base from which all offsets lie within it.
template <class C, class L>
struct EngineMemory {
  std::vector<std::byte> bytes;
  L layout;
  std::int64_t least = 0;

  EngineMemory(std::mt19937& random, const L& rows) : layout(rows) {
    std::int64_t most = 0;
    each_run([&](std::int64_t at, std::int64_t size) {
      least = (std::min)(least, at);
      most = (std::max)(most, at + size);
    });
    bytes.resize(static_cast<std::size_t>(most - least + 3));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  }
  // Unaligned, as the memory begins at an odd address.
  Plane<C, L> plane(C codec = C{}) { return Plane<C, L>(bytes.data() + 1 - least, layout, codec); }
  template <class Use>
  void each_run(const Use& use) const {
    for (std::int64_t row = 0; row < kRows; ++row) {
      for (std::int32_t head = 0; layout.contains(row) && head < layout.heads(); ++head) {
        for (std::int32_t tile = 0; tile < layout.tiles(); ++tile) {
          use(layout.offset(row, head, tile), bytes_of<C>(layout.tile_values()));
        }
      }
    }
  }
  // `before` with the rows of now: what memory must be if nothing else was written.
  std::vector<std::byte> with_rows(std::vector<std::byte> before) const {
    each_run([&](std::int64_t at, std::int64_t size) {
      const auto first = 1 - least + at;
      std::copy(bytes.begin() + first, bytes.begin() + first + size, before.begin() + first);
    });
    return before;
  }
};

template <class Backend, class C, class L>
void keys_go_and_return(const Result<L>& layout, const RopeSpec& spec, double relative) {
  REQUIRE_MESSAGE(layout.ok(), layout.status.where() << ": " << layout.status.message());
  std::mt19937 random(71);
  const std::int32_t heads = layout.value.heads();
  EngineMemory<C, L> engine(random, layout.value);
  Rows<F32Codec> source(kRows, heads, spec.head_dim), back(kRows, heads, spec.head_dim);
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (std::int32_t head = 0; head < heads; ++head) source.set_head(row, head, random_head(random, spec.head_dim));
  }
  const std::vector<std::byte> before = engine.bytes;
  const std::vector<std::byte> empty = back.bytes;
  const ShiftRun there = make_run(0, 0, kRows, 3, 90);
  const ShiftRun again = make_run(0, 0, kRows, 90, 3);
  must_shift<Backend>(spec, there, source.plane(), engine.plane());
  must_shift<Backend>(spec, again, engine.plane(), back.plane());
  CHECK(engine.with_rows(before) == engine.bytes);
  bool right = true;
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (std::int32_t head = 0; head < heads; ++head) {
      const std::vector<float> key = source.head(row, head);
      if (skips_row(layout.value, row)) {  // padding: neither written nor read
        right = right && back.head(row, head) == std::vector<float>(key.size(), 0.0f);
        continue;
      }
      std::vector<float> there_values(key.size());
      decode_head(engine.plane(), row, head, there_values.data());
      right = right && near(there_values, turned(spec, key, there.distance()), relative, 2e-6 + relative);
      right = right && near(back.head(row, head), {key.begin(), key.end()}, 0, 4e-6 + 4 * relative);
      for (std::int32_t i = 0; i < spec.head_dim; ++i) {  // what does not turn keeps its bits
        const bool turns = i >= spec.rotary_offset && i < spec.rotary_offset + spec.rotary_dim;
        const auto at = static_cast<std::size_t>(i);
        right = right && (turns || (there_values[at] == key[at] && back.head(row, head)[at] == key[at]));
      }
    }
  }
  CHECK(right);
}

// The same for codecs that round all of a block's values.
template <class Backend, class C, class L>
void keys_turn_within(const Result<L>& layout, const RopeSpec& spec, double tolerance, C codec = C{}) {
  REQUIRE_MESSAGE(layout.ok(), layout.status.where() << ": " << layout.status.message());
  std::mt19937 random(73);
  EngineMemory<C, L> engine(random, layout.value);
  Rows<F32Codec> source(kRows, layout.value.heads(), spec.head_dim);
  source.fill(random);
  const std::vector<std::byte> before = engine.bytes;
  const ShiftRun there = make_run(0, 0, kRows, 3, 90);
  must_shift<Backend>(spec, there, source.plane(), engine.plane(codec));
  CHECK(engine.with_rows(before) == engine.bytes);
  bool right = true;
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (std::int32_t head = 0; head < layout.value.heads(); ++head) {
      if (skips_row(layout.value, row)) continue;
      std::vector<float> values(static_cast<std::size_t>(spec.head_dim));
      decode_head(engine.plane(codec), row, head, values.data());
      right = right && near(values, turned(spec, source.head(row, head), there.distance()), 0, tolerance);
    }
  }
  CHECK(right);
}

template <class C, class L>
void values_go_and_return(const Result<L>& layout) {
  REQUIRE_MESSAGE(layout.ok(), layout.status.where() << ": " << layout.status.message());
  std::mt19937 random(72);
  const std::int32_t heads = layout.value.heads();
  const std::int32_t dim = layout.value.head_dim();
  EngineMemory<C, L> engine(random, layout.value);
  Rows<C> source(kRows, heads, dim), back(kRows, heads, dim);
  for (std::byte& byte : source.bytes) byte = static_cast<std::byte>(random());  // any bits
  const std::vector<std::byte> before = engine.bytes;
  copy_rows(source.plane(), 0, engine.plane(), 0, kRows);
  copy_rows(engine.plane(), 0, back.plane(), 0, kRows);
  CHECK(engine.with_rows(before) == engine.bytes);
  const std::int64_t row_bytes = heads * bytes_of<C>(dim);
  for (std::int64_t row = 0; row < kRows; ++row) {
    if (!skips_row(layout.value, row)) continue;
    std::fill_n(source.bytes.begin() + row * row_bytes, row_bytes, std::byte{0});
  }
  CHECK(back.bytes == source.bytes);
}

template <class L>
Result<L> held(const Result<KvPair<L>>& pair, bool keys) {
  if (!pair.ok()) return pair.status;
  return keys ? pair.value.keys : pair.value.values;
}
Result<PagedLayout> by_table_of(const Result<BlockPool>& pool) {
  if (!pool.ok()) return pool.status;
  return by_table(pool.value, kTable, 3, kRows);
}
Result<SlotLayout<std::int64_t>> by_slots_of(const Result<BlockPool>& pool) {
  if (!pool.ok()) return pool.status;
  return by_slots(pool.value, kSlots, kRows);
}
Result<BlockPool> keys_of(const Result<KvPair<BlockPool>>& pair) { return held(pair, true); }
Result<BlockPool> values_of(const Result<KvPair<BlockPool>>& pair) { return held(pair, false); }

constexpr auto kNeox = RopePairing::neox;
constexpr auto kInterleaved = RopePairing::interleaved;
constexpr double kF16 = 0x1p-10;
constexpr double kBf16 = 0x1p-7;

}  // namespace

TEST_CASE_TEMPLATE("keys and values go into each engine's memory and return", Backend,
                   KVBLEND_TEST_ANY_LAYOUT_BACKENDS) {
  const RopeSpec neox = spec_of(kDim, kDim, 0, kNeox);
  const RopeSpec interleaved = spec_of(kDim, kDim, 0, kInterleaved);
  const RopeSpec partial = spec_of(kDim, 8, 2, kNeox);
  SUBCASE("vLLM FlashAttention") {
    for (const RowOrder order : {RowOrder::nhd, RowOrder::hnd}) {
      CAPTURE(static_cast<int>(order));
      const auto pools = vllm_flash_attention<Bf16Codec>(kShape, order);
      keys_go_and_return<Backend, Bf16Codec>(by_table_of(keys_of(pools)), neox, kBf16);
      keys_go_and_return<Backend, Bf16Codec>(by_slots_of(keys_of(pools)), partial, kBf16);
      values_go_and_return<Bf16Codec>(by_table_of(values_of(pools)));
      values_go_and_return<Bf16Codec>(by_slots_of(values_of(pools)));
    }
  }
  SUBCASE("vLLM FlashInfer") {
    for (const RowOrder order : {RowOrder::nhd, RowOrder::hnd}) {
      CAPTURE(static_cast<int>(order));
      const auto pools = vllm_flashinfer<F16Codec>(kShape, order);
      keys_go_and_return<Backend, F16Codec>(by_table_of(keys_of(pools)), neox, kF16);
      keys_go_and_return<Backend, F16Codec>(by_slots_of(keys_of(pools)), interleaved, kF16);
      values_go_and_return<F16Codec>(by_table_of(values_of(pools)));
    }
  }
  SUBCASE("FlashInfer paged_kv_t") {
    for (const RowOrder order : {RowOrder::nhd, RowOrder::hnd}) {
      CAPTURE(static_cast<int>(order));
      const std::vector<std::int32_t> indices{6, 5, 1, 3}, indptr{0, 1, 4}, last{4, 3};
      const auto pool = flashinfer_pages<F16Codec>(kPlainShape, order);
      REQUIRE(pool.ok());
      const auto rows = flashinfer_sequence(pool.value, {indices, indptr, last}, 1);
      keys_go_and_return<Backend, F16Codec>(rows, interleaved, kF16);
      values_go_and_return<F16Codec>(rows);
    }
  }
  SUBCASE("dense rows") {
    for (const RowOrder order : {RowOrder::nhd, RowOrder::hnd}) {
      CAPTURE(static_cast<int>(order));
      keys_go_and_return<Backend, F32Codec>(dense_layout<F32Codec>(kRows, kHeads, kDim, order), partial, 0);
    }
  }
  SUBCASE("vLLM legacy, x-packed keys and transposed values") {
    const auto pools = vllm_packed_keys<F16Codec>(kPlainShape);
    for (const RopeSpec& spec : {neox, interleaved, partial}) {
      keys_go_and_return<Backend, F16Codec>(by_table_of(keys_of(pools)), spec, kF16);
    }
    keys_go_and_return<Backend, F32Codec>(by_slots_of(keys_of(vllm_packed_keys<F32Codec>(kPlainShape))), neox, 0);
    values_go_and_return<F16Codec>(by_table_of(values_of(pools)));
    values_go_and_return<F16Codec>(by_slots_of(values_of(pools)));
  }
  SUBCASE("vLLM MLA") {
    const auto pool = vllm_mla<Bf16Codec>(7, kBlockRows, 24, 8);
    REQUIRE(pool.ok());
    keys_go_and_return<Backend, Bf16Codec>(by_table_of(pool), spec_of(32, 8, 24, kInterleaved), kBf16);
    values_go_and_return<Bf16Codec>(by_slots_of(prefix_of(pool.value, 24)));
  }
  SUBCASE("vLLM fp8_ds_mla") {
    const auto pools = vllm_fp8_ds_mla(7, kBlockRows);
    REQUIRE(pools.ok());
    keys_go_and_return<Backend, Bf16Codec>(by_table_of(pools.value.rope), spec_of(64, 64, 0, kInterleaved), kBf16);
    values_go_and_return<DsMlaLatentCodec>(by_slots_of(pools.value.latents));
  }
  SUBCASE("SGLang") {
    const auto pool = sglang_tokens<Bf16Codec>(27, 1, kHeads, kDim);
    REQUIRE(pool.ok());
    const auto rows = by_slots(pool.value, kTokenSlots, kRows);
    REQUIRE(rows.ok());
    CHECK(rows.value.skips(2));  // the dummy
    keys_go_and_return<Backend, Bf16Codec>(rows, neox, kBf16);
    values_go_and_return<Bf16Codec>(rows);
  }
  SUBCASE("SGLang MLA") {
    const auto pool = sglang_mla<Bf16Codec>(27, 1, 24, 8);
    keys_go_and_return<Backend, Bf16Codec>(by_slots_of(pool), spec_of(32, 8, 24, kInterleaved), kBf16);
    values_go_and_return<Bf16Codec>(by_slots_of(prefix_of(pool.value, 24)));
  }
  SUBCASE("FlashInfer paged_kv_mla_t") {
    const auto pools = flashinfer_mla<F16Codec>(7, kBlockRows, 24, 8);
    REQUIRE(pools.ok());
    keys_go_and_return<Backend, F16Codec>(by_table_of(pools.value.rope), spec_of(8, 8, 0, kInterleaved), kF16);
    values_go_and_return<F16Codec>(by_table_of(pools.value.latents));
  }
  SUBCASE("TensorRT-LLM KVBlockArray") {
    // One sequence: three blocks of keys, three of values, some in the secondary pool, which lies before the primary.
    const auto secondary = [](std::uint32_t block) { return static_cast<std::int32_t>(block | 0x80000000u); };
    const std::vector<std::int32_t> offsets{5, secondary(1), 3, secondary(0), 2, secondary(2)};
    const auto pool = tensorrt_llm_blocks<F16Codec>(kPlainShape);
    REQUIRE(pool.ok());
    const auto rows = tensorrt_llm_sequence(pool.value, {3, -100000}, {offsets, 3}, 0, kRows);
    keys_go_and_return<Backend, F16Codec>(held(rows, true), neox, kF16);
    values_go_and_return<F16Codec>(held(rows, false));
  }
  SUBCASE("llama.cpp") {
    const auto keys = llama_cpp_cells<F16Codec>(28, kHeads, kDim, 1);
    const auto values = llama_cpp_transposed_values<F16Codec>(28, kHeads, kDim, 1);
    REQUIRE(keys.ok());
    REQUIRE(values.ok());
    keys_go_and_return<Backend, F16Codec>(in_order(keys.value), interleaved, kF16);
    keys_go_and_return<Backend, F16Codec>(by_slots(keys.value, kCells, kRows), interleaved, kF16);
    values_go_and_return<F16Codec>(by_slots(keys.value, kCells, kRows));  // with flash attention
    values_go_and_return<F16Codec>(by_slots(values.value, kCells, kRows));
    values_go_and_return<F16Codec>(in_order(values.value));
  }
  SUBCASE("llama.cpp q8_0") {  // 34 bytes for 32 values
    const auto keys = llama_cpp_cells<Q8_0Codec>(28, kHeads, 64);
    REQUIRE(keys.ok());
    CHECK(keys.value.block_stride == kHeads * 2 * 34);
    const auto rows = by_slots(keys.value, kCells, kRows);
    values_go_and_return<Q8_0Codec>(rows);
    values_go_and_return<Q8_0Codec>(in_order(keys.value));
    keys_turn_within<Backend, Q8_0Codec>(rows, spec_of(64, 64, 0, kInterleaved), 2.0 * 2.9 / 127);
  }
  SUBCASE("llama.cpp q4_0, and its Hadamard-rotated rows") {
    const auto q4 = llama_cpp_cells<Q4_0Codec>(28, kHeads, 64);
    REQUIRE(q4.ok());
    keys_turn_within<Backend, Q4_0Codec>(by_slots(q4.value, kCells, kRows), spec_of(64, 64, 0, kInterleaved), 0.5);
    values_go_and_return<Q4_0Codec>(by_slots(q4.value, kCells, kRows));
    using Rotated = HadamardCodec<Q8_0Codec, 64>;
    const auto rotated = llama_cpp_cells<Rotated>(28, kHeads, 64);
    REQUIRE(rotated.ok());
    keys_turn_within<Backend, Rotated>(by_slots(rotated.value, kCells, kRows), spec_of(64, 64, 0, kNeox), 0.1);
    values_go_and_return<Rotated>(by_slots(rotated.value, kCells, kRows));
  }
  SUBCASE("fp8 with a scale for the tensor, each head, and each token, in pages and slots") {
    // A value of magnitude up to 2.9 is stored within 1/16 of itself.
    constexpr double kFp8 = 2.9 / 16;
    const auto pool = keys_of(vllm_flash_attention<Fp8E4M3Codec>(kShape, RowOrder::hnd));
    using PerTensor = Scaled<Fp8E4M3Codec, TensorScale>;
    keys_turn_within<Backend, PerTensor>(by_table_of(pool), neox, kFp8, PerTensor(TensorScale{0.01f}));
    const float by_head[] = {0.01f, 0.02f, 0.03f};
    using PerHead = Scaled<Fp8E4M3Codec, HeadScales>;
    keys_turn_within<Backend, PerHead>(by_slots_of(pool), neox, kFp8, PerHead(HeadScales{by_head, kHeads}));
    for (const std::int32_t scales_a_row : {1, kHeads}) {  // scales lie by slot, as the rows do
      std::vector<float> memory(static_cast<std::size_t>(28 * scales_a_row));
      const auto scales = block_pool<F32Codec>({28, 1, scales_a_row, 1, 0});
      REQUIRE(scales.ok());
      using Scales = TokenScales<SlotLayout<std::int64_t>>;
      using PerToken = Scaled<Fp8E4M3Codec, Scales>;
      const auto layout = by_slots(scales.value, kSlots, kRows);
      REQUIRE(layout.ok());
      keys_turn_within<Backend, PerToken>(by_slots_of(pool), neox, kFp8,
                                          PerToken(Scales(reinterpret_cast<std::byte*>(memory.data()), layout.value)));
    }
  }
  SUBCASE("LMCache") {
    const auto all = lmcache_kv_2ltd<Bf16Codec>(4, kRows, kHeads, kDim, 2);
    const auto layer = lmcache_kv_2td<Bf16Codec>(kRows, kHeads, kDim);
    const auto tokens = lmcache_kv_t2d<Bf16Codec>(kRows, kHeads, kDim);
    for (const auto& pair : {all, layer, tokens}) {
      keys_go_and_return<Backend, Bf16Codec>(held(pair, true), neox, kBf16);
      values_go_and_return<Bf16Codec>(held(pair, false));
    }
  }
}
