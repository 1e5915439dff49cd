// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Keys and values between random layouts - either order of rows and heads, padding, odd addresses, rows that run
// downwards, shuffled pages - against a naive reading of each layout's description.
#include <kvblend/codec/floats.hpp>

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

// A random layout over memory of its own, and where a naive reading of its description puts each row.
template <class Codec>
struct RandomPlane {
  std::vector<std::byte> memory;
  std::vector<std::int32_t> table;
  std::int64_t rows = 0;
  std::int32_t heads = 0;
  std::int32_t dim = 0;
  std::int64_t base = 0;  // bytes into memory
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t block_stride = 0;
  std::int32_t block_rows = 0;  // 0: contiguous

  RandomPlane(std::mt19937& random, std::int64_t row_count, std::int32_t head_count, std::int32_t values)
      : rows(row_count), heads(head_count), dim(values) {
    const std::int64_t size = Codec::block_bytes;
    const std::int64_t padding = static_cast<std::int64_t>(random() % 3) * (random() % 2 == 0 ? size : 1);
    const bool heads_outside = random() % 2 == 0;
    const bool paged = random() % 2 == 0;
    block_rows = paged ? 1 + static_cast<std::int32_t>(random() % 5) : 0;
    const std::int64_t group = paged ? block_rows : rows;
    const std::int64_t unit = dim * size + padding;
    row_stride = heads_outside ? unit : unit * heads;
    head_stride = heads_outside ? unit * group : unit;
    const std::int64_t blocks = paged ? (rows + block_rows - 1) / block_rows + 2 : 1;
    block_stride = unit * heads * group + padding;
    base = static_cast<std::int64_t>(random() % 5);
    memory.resize(static_cast<std::size_t>(base + blocks * block_stride + 8));
    for (std::byte& byte : memory) byte = static_cast<std::byte>(random() % 0x70);  // finite in every codec
    if (paged) {
      table.resize(static_cast<std::size_t>(blocks));
      for (std::size_t i = 0; i < table.size(); ++i) table[i] = static_cast<std::int32_t>(i);
      std::shuffle(table.begin(), table.end(), random);
    } else if (random() % 3 == 0) {  // rows that run downwards
      base += (rows - 1) * row_stride;
      row_stride = -row_stride;
    }
  }

  std::int64_t offset(std::int64_t row, std::int32_t head) const {
    std::int64_t at = base + head * head_stride;
    if (block_rows == 0) {
      for (std::int64_t i = 0; i < row; ++i) at += row_stride;
      return at;
    }
    std::int64_t block = 0;
    while (row >= block_rows) {
      row -= block_rows;
      ++block;
    }
    return at + table[static_cast<std::size_t>(block)] * block_stride + row * row_stride;
  }
  std::vector<float> head(std::int64_t row, std::int32_t head_index) const {
    std::vector<float> values(static_cast<std::size_t>(dim));
    Codec::decode(memory.data() + offset(row, head_index), values.data(), dim);
    return values;
  }
  void set_head(std::int64_t row, std::int32_t head_index, const std::vector<float>& values) {
    Codec::encode(values.data(), memory.data() + offset(row, head_index), dim);
  }
  template <class Use>
  void with_plane(const Use& use) {
    if (block_rows == 0) {
      use(ContiguousPlane<Codec>(memory.data() + base, ContiguousLayout(rows, heads, dim, row_stride, head_stride)));
    } else {
      use(PagedPlane<Codec>(memory.data() + base,
                            PagedLayout(table.data(), static_cast<std::int64_t>(table.size()), block_rows, heads, dim,
                                        block_stride, row_stride, head_stride)));
    }
  }
};

template <class Backend, class From, class To>
void check_random_layouts(unsigned seed, int rounds, double relative, double absolute) {
  CAPTURE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < rounds; ++round) {
    CAPTURE(round);
    const auto heads = static_cast<std::int32_t>(1 + random() % 3);
    const auto dim = static_cast<std::int32_t>(2 + 2 * (random() % 20));
    const auto count = static_cast<std::int32_t>(random() % 9);
    RandomPlane<From> source(random, count + 1 + static_cast<std::int64_t>(random() % 4), heads, dim);
    RandomPlane<To> destination(random, count + 1 + static_cast<std::int64_t>(random() % 4), heads, dim);
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
    source.with_plane([&](const auto& read) {
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
