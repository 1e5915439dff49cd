// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Keys and values between random layouts - any nesting of rows, heads and tiles, padding, odd addresses, rows that run
// downwards, shuffled pages, scattered slots - against a naive reading of each layout's description.
#include <kvblend/codec/floats.hpp>

#include <doctest/doctest.h>
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>
#include "shift_support.hpp"
#include "support.hpp"

using namespace kvblend;
using namespace kvblend_test;

namespace {

// A random layout over memory of its own, and where a naive reading of its description puts each row.
template <class Codec>
struct RandomPlane {
  enum Kind { kContiguous, kPaged, kSlots };
  enum Axis { kRow, kHead, kTile };

  Kind kind = kContiguous;
  std::vector<std::byte> memory;
  std::vector<std::int32_t> table;  // of blocks, or of slots
  std::int64_t rows = 0;
  std::int32_t heads = 0;
  std::int32_t dim = 0;
  std::int32_t tile = 0;                 // values
  std::int64_t base = 0;                 // bytes into memory
  std::array<std::int64_t, 3> stride{};  // bytes, by axis
  std::int64_t block_stride = 0;
  std::int32_t block_rows = 0;

  RandomPlane(std::mt19937& random, std::int64_t row_count, std::int32_t head_count, std::int32_t values, bool any_kind)
      : kind(any_kind ? static_cast<Kind>(random() % 3) : kContiguous),
        rows(row_count),
        heads(head_count),
        dim(values),
        tile(values) {
    const std::int64_t size = Codec::block_bytes;
    const std::int64_t padding = static_cast<std::int64_t>(random() % 3) * (random() % 2 == 0 ? size : 1);
    if (random() % 3 == 0) {
      const std::int32_t tiles[] = {1, 2, dim / 2};
      tile = tiles[random() % 3];
    }
    block_rows = kind == kContiguous ? static_cast<std::int32_t>(rows) : 1 + static_cast<std::int32_t>(random() % 5);
    std::array<Axis, 3> nesting{kRow, kHead, kTile};
    std::shuffle(nesting.begin(), nesting.end(), random);
    const std::array<std::int64_t, 3> extent{block_rows, heads, dim / tile};
    block_stride = tile * size + padding;
    for (const Axis axis : nesting) {  // the innermost first
      stride[axis] = block_stride;
      block_stride *= extent[axis];
    }
    block_stride += padding;
    const std::int64_t blocks = kind == kContiguous ? 1 : (rows + block_rows - 1) / block_rows + 2;
    base = static_cast<std::int64_t>(random() % 5);
    memory.resize(static_cast<std::size_t>(base + blocks * block_stride + 8));
    for (std::byte& byte : memory) byte = static_cast<std::byte>(random() % 0x70);  // finite in every codec
    if (kind == kContiguous) {
      if (random() % 3 != 0) return;
      base += (rows - 1) * stride[kRow];  // rows that run downwards
      stride[kRow] = -stride[kRow];
      return;
    }
    table.resize(static_cast<std::size_t>(kind == kPaged ? blocks : blocks * block_rows));
    for (std::size_t i = 0; i < table.size(); ++i) table[i] = static_cast<std::int32_t>(i);
    std::shuffle(table.begin(), table.end(), random);
  }

  std::int64_t offset(std::int64_t row, std::int32_t head, std::int32_t tile_index) const {
    std::int64_t block = 0;
    if (kind == kSlots) row = table[static_cast<std::size_t>(row)];
    while (kind != kContiguous && row >= block_rows) {
      row -= block_rows;
      ++block;
    }
    if (kind == kPaged) block = table[static_cast<std::size_t>(block)];
    return base + block * block_stride + row * stride[kRow] + head * stride[kHead] + tile_index * stride[kTile];
  }
  std::vector<float> head(std::int64_t row, std::int32_t head_index) const {
    std::vector<float> values(static_cast<std::size_t>(dim));
    for (std::int32_t i = 0; i < dim / tile; ++i) {
      Codec::decode(memory.data() + offset(row, head_index, i), values.data() + i * tile, tile);
    }
    return values;
  }
  void set_head(std::int64_t row, std::int32_t head_index, const std::vector<float>& values) {
    for (std::int32_t i = 0; i < dim / tile; ++i) {
      Codec::encode(values.data() + i * tile, memory.data() + offset(row, head_index, i), tile);
    }
  }
  template <bool any_kind = true, class Use>
  void with_plane(const Use& use) {
    const HeadShape shape(heads, dim, stride[kHead], tile, stride[kTile]);
    const BlockPool pool(1000, block_rows, shape, block_stride, stride[kRow]);
    const auto entries = static_cast<std::int64_t>(table.size());
    if (!any_kind || kind == kContiguous) {
      use(ContiguousPlane<Codec>(memory.data() + base, ContiguousLayout(rows, shape, stride[kRow])));
    } else if constexpr (any_kind) {
      if (kind == kPaged) {
        use(PagedPlane<Codec>(memory.data() + base, PagedLayout(pool, table.data(), entries)));
      } else {
        use(SlotPlane<Codec>(memory.data() + base, SlotLayout<>(pool, table.data(), entries)));
      }
    }
  }
};

// `any_source`: from layouts of all kinds; else from rows at a stride, as fewer combinations take less to compile.
template <class Backend, class From, class To, bool any_source = true>
void check_random_layouts(unsigned seed, int rounds, double relative, double absolute) {
  CAPTURE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < rounds; ++round) {
    CAPTURE(round);
    const auto heads = static_cast<std::int32_t>(1 + random() % 3);
    const auto dim = static_cast<std::int32_t>(2 + 2 * (random() % 20));
    const auto count = static_cast<std::int32_t>(random() % 9);
    RandomPlane<From> source(random, count + 1 + static_cast<std::int64_t>(random() % 4), heads, dim, any_source);
    RandomPlane<To> destination(random, count + 1 + static_cast<std::int64_t>(random() % 4), heads, dim, true);
    for (std::int64_t row = 0; row < source.rows; ++row) {
      for (std::int32_t head = 0; head < heads; ++head) {
        std::vector<float> values(static_cast<std::size_t>(dim));
        for (float& value : values) value = static_cast<float>(static_cast<int>(random() % 65) - 32) / 16;
        source.set_head(row, head, values);
      }
    }
    const auto pairing = random() % 2 == 0 ? RopePairing::neox : RopePairing::interleaved;
    const auto rotary = static_cast<std::int32_t>(2 * (random() % static_cast<unsigned>(dim / 2 + 1)));
    RopeSpec spec = plain_rope(dim, 10000, pairing, rotary).value;
    spec.rotary_offset = (dim - rotary) / 2;
    const auto from = static_cast<std::int32_t>(random() % static_cast<unsigned>(source.rows - count + 1));
    const auto to = static_cast<std::int32_t>(random() % static_cast<unsigned>(destination.rows - count + 1));
    const ShiftRun run = make_run(from, to, count, static_cast<int>(random() % 100), static_cast<int>(random() % 100));

    auto values = destination;  // for copy
    auto untouched = destination;
    source.template with_plane<any_source>([&](const auto& read) {
      destination.with_plane([&](const auto& write) { must_shift<Backend>(spec, run, read, write); });
      values.with_plane([&](const auto& write) { place_values<Backend>(run, read, write); });
    });
    bool right = true;
    for (std::int32_t row = 0; row < count; ++row) {
      for (std::int32_t head = 0; head < heads; ++head) {
        const auto key = source.head(from + row, head);
        right = right && near(destination.head(to + row, head), turned(spec, key, run.distance()), relative, absolute);
        right = right && values.head(to + row, head) == key;  // multiples of 1/16 up to 2 are exact in all codecs
        untouched.set_head(to + row, head, destination.head(to + row, head));
      }
    }
    CHECK(right);
    // Nothing but the rows asked for was written.
    CHECK(untouched.memory == destination.memory);
  }
}

}  // namespace

// The loops over rows and layouts are the same in all CPU back ends: the codecs are gone through with one of them.
TEST_CASE("keys of all codecs move right between random layouts") {
  check_random_layouts<PortableBackend, F16Codec, F16Codec>(12, 800, 0x1p-10, 1e-6);
  check_random_layouts<PortableBackend, Bf16Codec, Bf16Codec>(13, 800, 0x1p-7, 1e-6);
  check_random_layouts<PortableBackend, F32Codec, Bf16Codec>(15, 400, 0x1p-7, 1e-6);
}

TEST_CASE_TEMPLATE("keys move right between random layouts", Backend, PortableBackend, TwoThreadEigen) {
  check_random_layouts<Backend, F32Codec, F32Codec>(11, 1500, 0, 2e-6);
  check_random_layouts<Backend, F16Codec, F32Codec>(14, 400, 0, 2e-6);
}

#if KVBLEND_TEST_CUDA
TEST_CASE("keys move right into random layouts on the CUDA back end") {
  check_random_layouts<DeviceOmp, F32Codec, F32Codec, false>(16, 400, 0, 2e-6);
  check_random_layouts<DeviceOmp, Bf16Codec, F16Codec, false>(17, 400, 0x1p-10, 1e-6);
}
#endif
