// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What the layout tests share: where a nested array keeps an element, told from its shape alone, and a check of a
// layout against that - rows are written through a plane and looked for in the memory, which must be unchanged
// elsewhere.
#pragma once

#include <kvblend/codec/floats.hpp>
#include <kvblend/memory/layouts.hpp>
#include <kvblend/memory/rows.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

namespace kvblend_test {

using namespace kvblend;

// The place of element indices[0], indices[1], … in an array of that shape, row-major.
inline std::int64_t element(const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& indices) {
  std::int64_t place = 0;
  for (std::size_t axis = 0; axis < shape.size(); ++axis) place = place * shape[axis] + indices[axis];
  return place;
}
inline std::int64_t elements(const std::vector<std::int64_t>& shape) {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  return count;
}

inline std::int64_t pick(std::mt19937& random, std::int64_t least, std::int64_t most) {
  return least + static_cast<std::int64_t>(random() % static_cast<unsigned>(most - least + 1));
}

// Random bytes, and a base in them at any alignment.
struct Memory {
  std::vector<std::byte> bytes;
  std::int64_t at = 0;

  Memory(std::mt19937& random, std::int64_t size) : bytes(static_cast<std::size_t>(size + 8)), at(pick(random, 0, 8)) {
    std::uint32_t word = 0;
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      if (i % 4 == 0) word = static_cast<std::uint32_t>(random());
      bytes[i] = static_cast<std::byte>(word >> (8 * (i % 4)));
    }
  }
  std::byte* base() { return bytes.data() + at; }
};

enum class Held { yes, no, padding };

// Whether `layout` agrees with a naive reading of its memory: held(row) says what a row is, byte(row, head, value)
// where a value lies, in bytes from `from_base` bytes after the memory's base. Rows from -2 to `rows` + 3 are asked
// for.
template <class C, class L, class HeldRow, class Byte>
bool agrees(std::mt19937& random, const L& layout, std::int64_t rows, const HeldRow& held, const Byte& byte,
            Memory& memory, std::int64_t from_base = 0) {
  static_assert(C::block_values == 1);
  const std::int32_t dim = layout.head_dim();
  const Plane<C, L> plane(memory.base() + from_base, layout);
  std::vector<std::byte> expected = memory.bytes;
  std::vector<float> values(static_cast<std::size_t>(dim));
  if (!check_shape(plane, "plane").ok()) return false;
  for (std::int64_t row = -2; row < rows + 4; ++row) {
    const Held is = held(row);
    if (layout.contains(row) != (is == Held::yes) || skips_row(layout, row) != (is == Held::padding)) return false;
    if (check_rows(plane, row, 1, "plane").ok() != (is != Held::no)) return false;
    if (is != Held::yes) continue;
    const auto head = static_cast<std::int32_t>(pick(random, 0, layout.heads() - 1));
    for (float& value : values) value = static_cast<float>(pick(random, -64, 64)) / 32;
    encode_head(plane, row, head, values.data());
    for (std::int32_t i = 0; i < dim; ++i) {
      C::encode(&values[static_cast<std::size_t>(i)], expected.data() + memory.at + from_base + byte(row, head, i), 1);
    }
  }
  if (memory.bytes != expected) return false;
  for (std::int64_t row = 0; row < rows; ++row) {  // every row and head, now that all has been written
    if (held(row) != Held::yes) continue;
    for (std::int32_t head = 0; head < layout.heads(); ++head) {
      decode_head(plane, row, head, values.data());
      for (std::int32_t i = 0; i < dim; ++i) {
        float value;
        C::decode(expected.data() + memory.at + from_base + byte(row, head, i), &value, 1);
        if (std::memcmp(&value, &values[static_cast<std::size_t>(i)], sizeof value) != 0) return false;
      }
    }
  }
  return true;
}

inline std::vector<std::int32_t> random_table(std::mt19937& random, std::int64_t entries, std::int64_t least,
                                              std::int64_t most) {
  std::vector<std::int32_t> table(static_cast<std::size_t>(entries));
  for (std::int32_t& entry : table) entry = static_cast<std::int32_t>(pick(random, least, most));
  return table;
}

}  // namespace kvblend_test
