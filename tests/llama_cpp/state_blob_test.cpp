// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// State blobs: against bytes put together field by field, against whatever may have been done to them, and against
// llama.cpp itself where a model file is at hand (KVBLEND_TEST_MODEL in the environment, or what the build fetched).
#include <doctest/doctest.h>
#include <llama_cpp/state_blob.hpp>

#include <sys/resource.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ggml.h"
#include "llama.h"

using kvblend::Position;
using kvblend::Result;
using kvblend::Status;
using kvblend::StatusCode;
using llama_cpp::BlobFormat;
using llama_cpp::BlobLayer;
using llama_cpp::BlobReader;
using llama_cpp::BlobRows;
using llama_cpp::BlobWriter;

namespace {

using Bytes = std::vector<std::uint8_t>;

std::span<const std::byte> view(const Bytes& bytes) { return std::as_bytes(std::span(bytes)); }
std::string text_of(const Status& status) { return std::string(status.where()) + ": " + status.message(); }

// ---- the oracle: the format as a list of fields, little endian whatever the machine is ----

struct Cells {
  std::int32_t count = 0;
  std::int32_t first = 0;
};

struct Shape {
  std::string name;
  std::uint32_t magic = 0xaf143cd8;
  std::int32_t sequence = 0;
  BlobFormat format;
  std::vector<Cells> cells;  // of each body
};

// Which bytes are rows, and where each field begins, as "body, name".
struct Assembled {
  Bytes bytes;
  std::vector<bool> is_row;
  std::vector<std::pair<std::string, std::size_t>> fields;

  void put(std::uint64_t value, int size, const std::string& name) {
    fields.emplace_back(name, bytes.size());
    for (int i = 0; i < size; ++i) bytes.push_back(static_cast<std::uint8_t>(value >> (8 * i) & 0xff));
    is_row.resize(bytes.size(), false);
  }
  // Offset of the `nth` field of that name.
  [[nodiscard]] std::size_t at(const std::string& name, std::size_t nth = 0) const {
    for (const auto& [field, offset] : fields) {
      if (field == name && nth-- == 0) return offset;
    }
    FAIL("no field " << name);
    return 0;
  }
};

// fill(body, layer, is_value, bytes of the whole block) gives its bytes.
template <class Fill>
Assembled assemble(const Shape& shape, Fill&& fill) {
  Assembled out;
  const auto block = [&](std::size_t b, std::size_t l, bool value, std::size_t size) {
    const Bytes rows = fill(b, l, value, size);
    REQUIRE(rows.size() == size);
    out.bytes.insert(out.bytes.end(), rows.begin(), rows.end());
    out.is_row.resize(out.bytes.size(), true);
  };
  const auto u32 = [](std::int64_t value) { return static_cast<std::uint64_t>(value); };
  out.put(shape.magic, 4, "magic");
  out.put(u32(shape.sequence), 4, "sequence");
  for (std::size_t b = 0; b < shape.format.bodies.size(); ++b) {
    const std::string body = "body " + std::to_string(b) + ", ";
    const auto cells = static_cast<std::size_t>(shape.cells[b].count);
    out.put(1, 4, body + "streams");
    out.put(cells, 4, body + "cells");
    if (cells == 0) continue;
    for (std::size_t c = 0; c < cells; ++c) {
      const std::string cell = body + "cell " + std::to_string(c) + ", ";
      out.put(u32(shape.cells[b].first) + c, 4, cell + "position");
      out.put(1, 4, cell + "sequences");
      out.put(u32(shape.sequence), 4, cell + "sequence");
    }
    out.put(shape.format.transposed_values ? 1 : 0, 4, body + "values transposed");
    out.put(shape.format.bodies[b].size(), 4, body + "layers");
    for (std::size_t l = 0; l < shape.format.bodies[b].size(); ++l) {
      const BlobLayer& layer = shape.format.bodies[b][l];
      const std::string name = body + "layer " + std::to_string(l) + ", ";
      out.put(u32(layer.key_type), 4, name + "key type");
      out.put(u32(layer.key_row_bytes), 8, name + "key row bytes");
      block(b, l, false, cells * static_cast<std::size_t>(layer.key_row_bytes));
    }
    for (std::size_t l = 0; l < shape.format.bodies[b].size(); ++l) {
      const BlobLayer& layer = shape.format.bodies[b][l];
      const std::string name = body + "layer " + std::to_string(l) + ", ";
      out.put(u32(layer.value_type), 4, name + "value type");
      if (shape.format.transposed_values) {
        out.put(u32(layer.value_bytes), 4, name + "value bytes");
        out.put(u32(layer.value_row_bytes / layer.value_bytes), 4, name + "values a row");
      } else {
        out.put(u32(layer.value_row_bytes), 8, name + "value row bytes");
      }
      block(b, l, true, cells * static_cast<std::size_t>(layer.value_row_bytes));
    }
  }
  return out;
}

Assembled assemble_noise(const Shape& shape, std::uint32_t seed = 1) {
  std::mt19937 random(seed);
  return assemble(shape, [&](std::size_t, std::size_t, bool, std::size_t size) {
    Bytes rows(size);
    for (std::uint8_t& byte : rows) byte = static_cast<std::uint8_t>(random());
    return rows;
  });
}

// ---- shapes ----

constexpr std::int32_t kF32 = 0;
constexpr std::int32_t kF16 = 1;
constexpr std::int32_t kQ8 = 8;
constexpr std::int32_t kBF16 = 30;

Shape shape(std::string name, std::vector<std::vector<BlobLayer>> bodies, std::vector<Cells> cells,
            bool transposed = false, std::int32_t sequence = 0) {
  Shape out;
  out.name = std::move(name);
  out.format.magic = out.magic;
  out.format.transposed_values = transposed;
  out.format.bodies = std::move(bodies);
  out.cells = std::move(cells);
  out.sequence = sequence;
  return out;
}

// Small ones of every kind; all bodies of one have the same cells unless `windowed`.
std::vector<Shape> shapes(bool windowed) {
  const BlobLayer f16{kF16, kF16, 8, 8};
  const BlobLayer narrow{kF16, kF16, 4, 2};
  const BlobLayer q8{kQ8, kQ8, 34, 68};
  const BlobLayer mixed{kQ8, kF32, 34, 12};
  const BlobLayer odd{kBF16, kQ8, 3, 5};  // rows and headers at any address
  const BlobLayer f16_t{kF16, kF16, 8, 6, 2};
  const BlobLayer f32_t{kF16, kF32, 8, 20, 4};
  std::vector<Shape> out = {
      shape("one body", {{f16, narrow, f16}}, {{3, 0}}),
      shape("one cell", {{f16}}, {{1, 7}}),
      shape("quantised", {{q8, q8}}, {{4, 100}}),
      shape("keys and values of two types", {{mixed, mixed}}, {{2, 5}}, false, 3),
      shape("odd sizes", {{odd, odd, odd}}, {{5, 1}}),
      shape("two bodies", {{f16, f16}, {narrow}}, {{3, 2}, {3, 2}}, false, 1),
      shape("transposed", {{f16_t, f16_t}}, {{3, 0}}, true),
      shape("transposed, f32", {{f32_t}}, {{4, 9}}, true),
      shape("transposed, two bodies", {{f16_t}, {f16_t, f16_t}}, {{2, 4}, {2, 4}}, true),
      shape("the last position", {{f16}}, {{2, (std::numeric_limits<std::int32_t>::max)() - 1}}),
  };
  if (windowed) {
    out.push_back(shape("window", {{f16, f16}, {narrow}}, {{5, 2}, {2, 5}}));
    out.push_back(shape("window, transposed", {{f16_t}, {f16_t, f16_t}}, {{4, 0}, {1, 3}}, true, 2));
  }
  return out;
}

bool same(const BlobFormat& a, const BlobFormat& b) {
  if (a.magic != b.magic || a.transposed_values != b.transposed_values || a.bodies.size() != b.bodies.size()) {
    return false;
  }
  for (std::size_t i = 0; i < a.bodies.size(); ++i) {
    if (a.bodies[i].size() != b.bodies[i].size()) return false;
    for (std::size_t j = 0; j < a.bodies[i].size(); ++j) {
      const BlobLayer& x = a.bodies[i][j];
      const BlobLayer& y = b.bodies[i][j];
      if (x.key_type != y.key_type || x.value_type != y.value_type || x.key_row_bytes != y.key_row_bytes ||
          x.value_row_bytes != y.value_row_bytes || x.value_bytes != y.value_bytes) {
        return false;
      }
    }
  }
  return true;
}

// What a reader says of a blob, put together anew; the sequence's number is taken from the blob.
Bytes again(const BlobFormat& format, const BlobReader& reader, const Bytes& blob) {
  Shape shape;
  shape.magic = format.magic;
  shape.format = format;
  std::memcpy(&shape.sequence, blob.data() + 4, 4);
  for (std::int32_t b = 0; b < static_cast<std::int32_t>(format.bodies.size()); ++b) {
    shape.cells.push_back({reader.cells(b), reader.first_position(b).value});
  }
  const Assembled out = assemble(shape, [&](std::size_t b, std::size_t l, bool value, std::size_t size) {
    const auto rows = reader.rows(static_cast<std::int32_t>(b), static_cast<std::int32_t>(l));
    const auto* begin = reinterpret_cast<const std::uint8_t*>(value ? rows.values : rows.keys);
    return Bytes(begin, begin + size);
  });
  return out.bytes;
}

void check_named(const Status& status) {
  CHECK_FALSE(status.ok());
  CHECK(status.where()[0] != '\0');
  CHECK(status.message()[0] != '\0');
}

// ---- damage ----

Bytes mutate(const Bytes& blob, const Bytes& other, std::mt19937& random) {
  Bytes out = blob;
  const auto below = [&](std::size_t count) { return count == 0 ? 0 : random() % count; };
  const auto at = [&](std::size_t offset) { return static_cast<std::ptrdiff_t>(offset); };
  const std::size_t times = 1 + below(3);
  for (std::size_t t = 0; t < times; ++t) {
    switch (below(6)) {
      case 0:  // flip a bit
        if (!out.empty()) out[below(out.size())] ^= static_cast<std::uint8_t>(1U << below(8));
        break;
      case 1: {  // a number at a multiple of 4
        static constexpr std::uint32_t kNumbers[] = {0, 1, 2, 3, 0x7fffffff, 0x80000000, 0xffffffff, 0x10000};
        if (out.size() >= 4) std::memcpy(out.data() + 4 * below(out.size() / 4), &kNumbers[below(8)], 4);
        break;
      }
      case 2: {  // cut out
        const std::size_t from = below(out.size() + 1);
        const std::size_t to = from + below(out.size() - from + 1);
        out.erase(out.begin() + at(from), out.begin() + at(to));
        break;
      }
      case 3: {  // put in, at times a copy of what is there
        const std::size_t from = below(out.size() + 1);
        const std::size_t to = from + below((std::min)(out.size() - from, std::size_t{40}) + 1);
        Bytes piece(out.begin() + at(from), out.begin() + at(to));
        if (below(2) == 0)
          std::generate(piece.begin(), piece.end(), [&] { return static_cast<std::uint8_t>(random()); });
        out.insert(out.begin() + at(below(2) == 0 ? from : below(out.size() + 1)), piece.begin(), piece.end());
        break;
      }
      case 4: {  // the head of one, the tail of another
        const std::size_t head = below(out.size() + 1);
        const std::size_t tail = below(2) == 0 ? (std::min)(head, other.size()) : below(other.size() + 1);
        out.resize(head);
        out.insert(out.end(), other.begin() + at(tail), other.end());
        break;
      }
      default:  // a flip in what is mostly headers
        if (!out.empty()) out[below((std::min)(out.size(), std::size_t{64}))] = static_cast<std::uint8_t>(random());
    }
  }
  out.shrink_to_fit();  // so that a byte too far is seen
  return out;
}

// Address space may grow by 64 MiB only as long as this lives, if there are no sanitizers, which need more.
class LittleMemory {
 public:
  LittleMemory() {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    REQUIRE(::getrlimit(RLIMIT_AS, &before_) == 0);
    std::ifstream statm("/proc/self/statm");
    rlim_t pages = 0;
    if (!(statm >> pages)) return;
    rlimit limit = before_;
    limit.rlim_cur = pages * 4096 + (rlim_t{64} << 20);
    set_ = ::setrlimit(RLIMIT_AS, &limit) == 0;
#endif
  }
  ~LittleMemory() {
    if (set_) ::setrlimit(RLIMIT_AS, &before_);
  }
  LittleMemory(const LittleMemory&) = delete;
  LittleMemory& operator=(const LittleMemory&) = delete;

 private:
  rlimit before_{};
  bool set_ = false;
};

}  // namespace

// ---- without an engine ----

TEST_CASE("state blob: a format is learnt from a blob") {
  for (const Shape& shape : shapes(true)) {
    CAPTURE(shape.name);
    const Result<BlobFormat> learnt = BlobFormat::learn(view(assemble_noise(shape).bytes));
    REQUIRE_MESSAGE(learnt.ok(), text_of(learnt.status));
    CHECK(same(learnt.value, shape.format));
  }
}

TEST_CASE("state blob: a reader finds cells and rows where they were put") {
  for (const Shape& shape : shapes(true)) {
    CAPTURE(shape.name);
    const Bytes blob = assemble_noise(shape).bytes;
    const Result<BlobReader> reader = BlobReader::open(shape.format, view(blob));
    REQUIRE_MESSAGE(reader.ok(), text_of(reader.status));
    for (std::size_t b = 0; b < shape.cells.size(); ++b) {
      CHECK(reader.value.cells(static_cast<std::int32_t>(b)) == shape.cells[b].count);
      CHECK(reader.value.first_position(static_cast<std::int32_t>(b)) == Position(shape.cells[b].first));
    }
    CHECK(again(shape.format, reader.value, blob) == blob);
    const auto bodies = static_cast<std::int32_t>(shape.cells.size());
    const auto layers = static_cast<std::int32_t>(shape.format.bodies[0].size());
    for (const auto& [b, l] : {std::pair(bodies, 0), {-1, 0}, {0, layers}, {0, -1}}) {
      CHECK(reader.value.rows(b, l).keys == nullptr);
      CHECK(reader.value.rows(b, l).values == nullptr);
    }
    CHECK(reader.value.cells(bodies) == 0);
    CHECK(reader.value.cells(-1) == 0);
  }
}

TEST_CASE("state blob: a writer's bytes are those put together by hand") {
  BlobWriter writer;  // one for all, so that each finds what the one before left
  for (Shape shape : shapes(false)) {
    CAPTURE(shape.name);
    shape.sequence = 0;
    const Bytes blob = assemble_noise(shape).bytes;
    const std::int32_t cells = shape.cells[0].count;
    CHECK(shape.format.bytes(cells) == static_cast<std::int64_t>(blob.size()));
    REQUIRE(writer.lay_out(shape.format, cells, Position(shape.cells[0].first)).ok());
    CHECK(writer.cells() == cells);
    REQUIRE(writer.bytes().size() == blob.size());
    const Result<BlobReader> reader = BlobReader::open(shape.format, view(blob));
    REQUIRE(reader.ok());
    for (std::size_t b = 0; b < shape.format.bodies.size(); ++b) {
      for (std::size_t l = 0; l < shape.format.bodies[b].size(); ++l) {
        const BlobLayer& layer = shape.format.bodies[b][l];
        const BlobRows to = writer.rows(static_cast<std::int32_t>(b), static_cast<std::int32_t>(l));
        const auto from = reader.value.rows(static_cast<std::int32_t>(b), static_cast<std::int32_t>(l));
        std::memcpy(to.keys, from.keys, static_cast<std::size_t>(cells * layer.key_row_bytes));
        std::memcpy(to.values, from.values, static_cast<std::size_t>(cells * layer.value_row_bytes));
      }
    }
    CHECK(std::memcmp(writer.bytes().data(), blob.data(), blob.size()) == 0);
    CHECK(writer.rows(0, static_cast<std::int32_t>(shape.format.bodies[0].size())).keys == nullptr);
    CHECK(writer.rows(static_cast<std::int32_t>(shape.format.bodies.size()), 0).keys == nullptr);
    CHECK(writer.rows(-1, 0).values == nullptr);
  }
}

TEST_CASE("state blob: a writer's memory is zero at first and stays otherwise") {
  const Shape shape = shapes(false)[0];
  const auto zero = [](std::size_t, std::size_t, bool, std::size_t size) { return Bytes(size, 0); };
  const Bytes blob = assemble(shape, zero).bytes;
  BlobWriter writer;
  CHECK(writer.bytes().empty());
  CHECK(writer.cells() == 0);
  REQUIRE(writer.lay_out(shape.format, 3, Position(0)).ok());
  REQUIRE(writer.bytes().size() == blob.size());
  CHECK(std::memcmp(writer.bytes().data(), blob.data(), blob.size()) == 0);

  std::memset(writer.rows(0, 1).keys, 7, 12);
  const std::byte* memory = writer.bytes().data();
  REQUIRE(writer.lay_out(shape.format, 3, Position(5)).ok());
  CHECK(static_cast<int>(writer.rows(0, 1).keys[11]) == 7);
  REQUIRE(writer.lay_out(shape.format, 2, Position(8)).ok());
  CHECK(writer.bytes().data() == memory);
  REQUIRE(writer.lay_out(shape.format, 3, Position(8)).ok());
  CHECK(writer.bytes().data() == memory);
  REQUIRE(writer.lay_out(shape.format, 100000, Position(0)).ok());  // grown
  CHECK(writer.bytes().size() == static_cast<std::size_t>(shape.format.bytes(100000)));
  const BlobRows last = writer.rows(0, 2);
  CHECK(std::all_of(last.values, last.values + 100000 * 8, [](std::byte b) { return b == std::byte{0}; }));
  CHECK(BlobReader::open(shape.format, writer.bytes()).ok());
}

TEST_CASE("state blob: a writer refuses what makes no blob and is as it was") {
  const Shape shape = shapes(false)[0];
  BlobWriter writer;
  REQUIRE(writer.lay_out(shape.format, 3, Position(2)).ok());
  const std::byte* memory = writer.bytes().data();
  const std::size_t size = writer.bytes().size();
  constexpr std::int32_t kMost = (std::numeric_limits<std::int32_t>::max)();
  check_named(writer.lay_out(shape.format, 0, Position(0)));
  check_named(writer.lay_out(shape.format, -1, Position(0)));
  check_named(writer.lay_out(shape.format, 1, Position(-1)));
  check_named(writer.lay_out(shape.format, 2, Position(kMost)));
  BlobFormat large = shape.format;
  large.bodies[0].resize(1);
  large.bodies[0][0].key_row_bytes = large.bodies[0][0].value_row_bytes = (1LL << 30) - 12;
  CHECK(large.bytes(kMost) > (std::int64_t{1} << 61));
  CHECK(writer.lay_out(large, kMost, Position(0)).code() == StatusCode::insufficient_space);

  std::vector<BlobFormat> broken(9, shape.format);
  broken[0].bodies.clear();
  broken[1].bodies.resize(3, broken[1].bodies[0]);
  broken[2].bodies.emplace_back();
  broken[3].bodies[0][1].key_row_bytes = 0;
  broken[4].bodies[0][2].value_row_bytes = std::int64_t{1} << 31;
  broken[5].bodies[0][2].value_type = kF32;
  broken[6].bodies[0][0].value_bytes = 2;
  broken[7].transposed_values = true;  // but no value bytes
  broken[8].bodies[0][0].key_row_bytes = broken[8].bodies[0][1].key_row_bytes = 1 << 30;
  const Bytes blob = assemble_noise(shape).bytes;
  for (const BlobFormat& format : broken) {
    CAPTURE(&format - broken.data());
    check_named(writer.lay_out(format, 3, Position(0)));
    check_named(BlobReader::open(format, view(blob)).status);
  }
  BlobFormat ragged = shapes(false)[6].format;
  ragged.bodies[0][0].value_bytes = 4;  // of rows of 6
  check_named(writer.lay_out(ragged, 1, Position(0)));

  CHECK(writer.bytes().data() == memory);
  CHECK(writer.bytes().size() == size);
  CHECK(writer.cells() == 3);
  CHECK(BlobReader::open(shape.format, writer.bytes()).value.first_position(0) == Position(2));
}

TEST_CASE("state blob: an empty sequence is one without cells in every body") {
  for (Shape shape : shapes(false)) {
    CAPTURE(shape.name);
    for (Cells& cells : shape.cells) cells.count = 0;
    const Bytes blob = assemble_noise(shape).bytes;
    CHECK(blob.size() == 8 + 8 * shape.cells.size());
    CHECK(shape.format.bytes(0) == static_cast<std::int64_t>(blob.size()));
    const Result<BlobReader> reader = BlobReader::open(shape.format, view(blob));
    REQUIRE_MESSAGE(reader.ok(), text_of(reader.status));
    for (std::int32_t b = 0; b < 3; ++b) {
      CHECK(reader.value.cells(b) == 0);
      CHECK(reader.value.rows(b, 0).keys == nullptr);
    }
    const Result<BlobFormat> learnt = BlobFormat::learn(view(blob));
    CHECK(std::string(learnt.status.where()) == "body 0, cells");
  }
  for (const std::size_t empty : {0U, 1U}) {
    Shape shape = shapes(false)[5];
    shape.cells[empty].count = 0;
    CAPTURE(empty);
    const Status status = BlobReader::open(shape.format, view(assemble_noise(shape).bytes)).status;
    CHECK(std::string(status.where()) == "body 1, cells");
  }
}

TEST_CASE("state blob: every cut and every byte too many is noticed") {
  for (const Shape& shape : shapes(true)) {
    CAPTURE(shape.name);
    const Assembled whole = assemble_noise(shape);
    std::size_t body_end = 0;  // where a blob of the first body alone would end
    if (shape.cells.size() == 2) body_end = whole.at("body 1, streams");
    for (std::size_t size = 0; size < whole.bytes.size(); ++size) {
      CAPTURE(size);
      const Bytes cut(whole.bytes.begin(), whole.bytes.begin() + static_cast<std::ptrdiff_t>(size));
      check_named(BlobReader::open(shape.format, view(cut)).status);
      if (size != body_end || size == 0) check_named(BlobFormat::learn(view(cut)).status);
    }
    for (const std::size_t more : {1U, 3U, 4U, 8U, 16U, 1000U}) {
      Bytes longer = whole.bytes;
      longer.resize(longer.size() + more);
      CHECK(std::string(BlobReader::open(shape.format, view(longer)).status.where()) == "end");
      check_named(BlobFormat::learn(view(longer)).status);
    }
    Bytes twice = whole.bytes;  // a second body of the same kind
    twice.insert(twice.end(), whole.bytes.begin() + 8, whole.bytes.end());
    CHECK(std::string(BlobReader::open(shape.format, view(twice)).status.where()) == "end");
  }
}

TEST_CASE("state blob: a changed byte of a header is an error that names it and one of a row is read") {
  for (const Shape& shape : shapes(true)) {
    CAPTURE(shape.name);
    const Assembled whole = assemble_noise(shape);
    std::size_t field = 0;
    for (std::size_t i = 0; i < whole.bytes.size(); ++i) {
      CAPTURE(i);
      while (field + 1 < whole.fields.size() && whole.fields[field + 1].second <= i) ++field;
      const std::string& name = whole.fields[field].first;
      for (int bit = 0; bit < 8; ++bit) {
        CAPTURE(bit);
        Bytes changed = whole.bytes;
        changed[i] ^= static_cast<std::uint8_t>(1U << bit);
        const Result<BlobReader> reader = BlobReader::open(shape.format, view(changed));
        // A single cell may stand anywhere, but not below 0.
        const bool moves = shape.name == "one cell" && name == "body 0, cell 0, position" &&
                           (i + 1 < whole.fields[field].second + 4 || bit < 7);
        if (whole.is_row[i] || moves) {
          REQUIRE_MESSAGE(reader.ok(), text_of(reader.status));
          CHECK(again(shape.format, reader.value, changed) == changed);
          continue;
        }
        check_named(reader.status);
        const std::string where = reader.status.where();
        // What a number changes shows at another one only if it is a count, a first position or the sequence's name.
        if (name.ends_with(", cells")) {
          std::uint32_t cells = 0;
          std::memcpy(&cells, changed.data() + whole.fields[field].second, 4);
          if (cells > 0) CHECK(where.starts_with(name.substr(0, 6)));
        } else if (name.ends_with("cell 0, position")) {
          CHECK(where.ends_with("position"));
        } else if (name == "sequence") {
          CHECK(where.ends_with("sequence"));
        } else {
          CHECK(where == name);
        }
      }
    }
  }
}

TEST_CASE("state blob: a blob of another format is refused") {
  const std::vector<Shape> all = shapes(true);
  for (const Shape& mine : all) {
    for (const Shape& other : all) {
      CAPTURE(mine.name);
      CAPTURE(other.name);
      const Status status = BlobReader::open(mine.format, view(assemble_noise(other).bytes)).status;
      CHECK(status.ok() == same(mine.format, other.format));
      if (!status.ok()) check_named(status);
    }
  }
  Shape shape = all[0];
  shape.magic ^= 0x100;
  const Status magic = BlobReader::open(shape.format, view(assemble_noise(shape).bytes)).status;
  CHECK(std::string(magic.where()) == "magic");
  CHECK(magic.code() == StatusCode::mismatch);
  CHECK(BlobFormat::learn(view(assemble_noise(shape).bytes)).value.magic == shape.magic);
}

TEST_CASE("state blob: cells that are no run of one sequence are refused") {
  const auto where = [](const Shape& shape, const Bytes& blob) {
    const std::string learnt = BlobFormat::learn(view(blob)).status.where();
    const std::string opened = BlobReader::open(shape.format, view(blob)).status.where();
    CHECK(learnt == opened);
    return opened;
  };
  const Shape shape = shapes(false)[2];
  const Assembled whole = assemble_noise(shape);
  for (const std::uint32_t position : {0U, 100U, 101U, 103U, 0x80000000U, 0xffffffffU}) {
    Bytes blob = whole.bytes;
    std::memcpy(blob.data() + whole.at("body 0, cell 2, position"), &position, 4);
    CHECK(where(shape, blob) == "body 0, cell 2, position");
  }
  for (const std::uint32_t count : {0U, 2U, 0xffffffffU}) {
    Bytes blob = whole.bytes;
    std::memcpy(blob.data() + whole.at("body 0, cell 1, sequences"), &count, 4);
    CHECK(where(shape, blob) == "body 0, cell 1, sequences");
    blob = whole.bytes;
    std::memcpy(blob.data() + whole.at("body 0, streams"), &count, 4);
    CHECK(where(shape, blob) == "body 0, streams");
  }
  Bytes blob = whole.bytes;
  blob[whole.at("body 0, cell 3, sequence")] = 1;
  CHECK(where(shape, blob) == "body 0, cell 3, sequence");

  Shape negative = shape;  // in all places alike
  negative.sequence = -1;
  CHECK(where(negative, assemble_noise(negative).bytes) == "sequence");
  negative = shape;
  negative.cells[0].first = -3;
  CHECK(where(negative, assemble_noise(negative).bytes) == "body 0, cell 0, position");
  // Past the last position: the next one in 32 bits is negative.
  Shape past = shape;
  past.cells[0].first = (std::numeric_limits<std::int32_t>::max)() - 2;
  CHECK(where(past, assemble_noise(past).bytes) == "body 0, cell 3, position");

  // Bodies that do not end together, or a window that has more than all.
  Shape apart = shapes(false)[5];
  apart.cells[1] = {2, 2};
  CHECK(where(apart, assemble_noise(apart).bytes) == "body 1, cell 1, position");
  apart.cells[1] = {4, 1};
  CHECK(where(apart, assemble_noise(apart).bytes) == "body 1, cells");
}

TEST_CASE("state blob: layers that differ where none of one context do are not learnt") {
  const auto where = [](const Shape& shape) {
    return std::string(BlobFormat::learn(view(assemble_noise(shape).bytes)).status.where());
  };
  Shape shape = shapes(false)[0];
  shape.format.bodies[0][2].key_type = kF32;
  CHECK(where(shape) == "body 0, layer 2, key type");
  shape = shapes(false)[5];
  shape.format.bodies[1][0].value_type = kF32;
  CHECK(where(shape) == "body 1, layer 0, value type");
  shape = shapes(false)[0];
  shape.format.bodies[0][0].key_type = -1;
  CHECK(where(shape) == "body 0, layer 0, key type");
  shape = shapes(false)[0];
  shape.format.bodies[0][1].value_row_bytes = 0;
  CHECK(where(shape) == "body 0, layer 1, value row bytes");
  shape = shapes(false)[0];
  shape.format.bodies[0].clear();
  CHECK(where(shape) == "body 0, layers");

  shape = shapes(false)[8];
  Assembled whole = assemble_noise(shape);
  whole.bytes[whole.at("body 1, values transposed")] = 0;
  CHECK(std::string(BlobFormat::learn(view(whole.bytes)).status.where()) == "body 1, values transposed");
  whole.bytes[whole.at("body 0, values transposed")] = 2;
  CHECK(std::string(BlobFormat::learn(view(whole.bytes)).status.where()) == "body 0, values transposed");
}

TEST_CASE("state blob: huge numbers fail where they stand and nothing is allocated for them") {
  const LittleMemory little;
  const auto is_count = [](const std::string& name) {
    return name.ends_with("cells") || name.ends_with("layers") || name.ends_with("bytes") || name.ends_with("a row");
  };
  for (const Shape& shape : shapes(true)) {
    CAPTURE(shape.name);
    const Assembled whole = assemble_noise(shape);
    for (const auto& field : whole.fields) {
      const std::string& name = field.first;
      const std::size_t offset = field.second;
      if (!is_count(name)) continue;
      CAPTURE(name);
      const bool wide = name.ends_with("row bytes");
      for (const std::uint64_t number :
           {std::uint64_t{0xffffffff}, std::uint64_t{0x7fffffff}, std::uint64_t{0x80000000}, std::uint64_t{1} << 63,
            (std::uint64_t{1} << 63) - 1, ~std::uint64_t{0}, std::uint64_t{1} << 32, std::uint64_t{0x55555556},
            std::uint64_t{0}}) {
        if (!wide && number > 0xffffffff) continue;
        CAPTURE(number);
        Bytes blob = whole.bytes;
        std::memcpy(blob.data() + offset, &number, wide ? 8 : 4);
        const Status opened = BlobReader::open(shape.format, view(blob)).status;
        check_named(opened);
        if (!name.ends_with("cells") || number != 0) CHECK(std::string(opened.where()) == name);
        const Status learnt = BlobFormat::learn(view(blob)).status;
        check_named(learnt);
        // A row may be that long, so that its rows are what is missing.
        const std::string start = name.substr(0, name.rfind(' '));
        if (number != 0x7fffffff && number != 0x55555556) {
          CHECK(std::string(learnt.where()) == name);
        } else {
          CHECK(std::string(learnt.where()).substr(0, 6) == start.substr(0, 6));
        }
      }
    }
  }
}

TEST_CASE("state blob: numbers whose product is too large are refused before it is used") {
  const Shape shape = shapes(false)[7];
  const Assembled whole = assemble_noise(shape);
  for (const auto& [bytes, count] : {std::pair{1U << 30, 2U},
                                     {2U, 1U << 30},
                                     {1U << 16, 1U << 16},
                                     {1U << 30, 1U << 30},
                                     {0x7fffffffU, 0x7fffffffU}}) {
    Bytes blob = whole.bytes;
    std::memcpy(blob.data() + whole.at("body 0, layer 0, value bytes"), &bytes, 4);
    std::memcpy(blob.data() + whole.at("body 0, layer 0, values a row"), &count, 4);
    CHECK(std::string(BlobFormat::learn(view(blob)).status.where()) == "body 0, layer 0, values a row");
    CHECK(std::string(BlobReader::open(shape.format, view(blob)).status.where()) == "body 0, layer 0, value bytes");
  }
}

TEST_CASE("state blob: whatever is done to blobs none is read past or taken for another") {
  const std::vector<Shape> all = shapes(true);
  std::vector<Bytes> blobs;
  for (const Shape& shape : all) blobs.push_back(assemble_noise(shape).bytes);
  std::mt19937 random(20240229);
  int accepted = 0;
  int changed = 0;
  int learnt = 0;
  bool sound = true;
  for (int i = 0; i < 100000; ++i) {
    const std::size_t mine = random() % all.size();
    const Bytes& other = blobs[random() % 2 == 0 ? mine : random() % blobs.size()];
    const Bytes blob = mutate(blobs[mine], other, random);
    const Result<BlobReader> reader = BlobReader::open(all[mine].format, view(blob));
    if (reader.ok()) {
      ++accepted;
      changed += blob != blobs[mine] ? 1 : 0;
      sound = sound && again(all[mine].format, reader.value, blob) == blob;
    } else {
      sound = sound && reader.status.where()[0] != '\0' && reader.status.message()[0] != '\0';
    }
    const Result<BlobFormat> format = BlobFormat::learn(view(blob));
    if (format.ok()) {
      ++learnt;
      const Result<BlobReader> own = BlobReader::open(format.value, view(blob));
      sound = sound && own.ok() && again(format.value, own.value, blob) == blob;
    } else {
      sound = sound && format.status.where()[0] != '\0' && format.status.message()[0] != '\0';
    }
    if (!sound) {
      FAIL("mutation " << i << " of " << all[mine].name);
      break;
    }
  }
  MESSAGE(accepted << " accepted, " << changed << " of them changed; " << learnt << " learnt");
  CHECK(changed > 1000);  // else nothing was tried
  CHECK(accepted < 60000);
}

// ---- llama.cpp itself ----

namespace {

// Empty, with a word to the reader, if there is none.
std::string model_path() {
  std::string path;
  if (const char* given = std::getenv("KVBLEND_TEST_MODEL"); given != nullptr) path = given;
#ifdef KVBLEND_TEST_MODEL
  if (path.empty()) path = KVBLEND_TEST_MODEL;
#endif
  if (std::filesystem::exists(path)) return path;
  MESSAGE("skipped: no model file at \"" << path << "\"; set KVBLEND_TEST_MODEL");
  return {};
}

using ModelPointer = std::unique_ptr<llama_model, decltype(&llama_model_free)>;
using ContextPointer = std::unique_ptr<llama_context, decltype(&llama_free)>;

ModelPointer load_model(const std::string& path) {
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  llama_model_params params = llama_model_default_params();
  params.use_extra_bufts = false;
  ModelPointer model(llama_model_load_from_file(path.c_str(), params), llama_model_free);
  REQUIRE(model != nullptr);
  return model;
}

struct Kind {
  const char* name;
  ggml_type type;
  bool flash;
};

ContextPointer make_context(llama_model& model, const Kind& kind) {
  llama_context_params params = llama_context_default_params();
  params.n_ctx = 256;
  params.n_batch = params.n_ubatch = 64;
  params.n_seq_max = 2;
  params.n_threads = params.n_threads_batch = 2;
  params.kv_unified = true;
  params.type_k = params.type_v = kind.type;
  params.flash_attn_type = kind.flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  ContextPointer context(llama_init_from_model(&model, params), llama_free);
  REQUIRE(context != nullptr);
  return context;
}

constexpr std::int32_t kTokens = 40;

// Decodes `count` arbitrary tokens behind `first` in a sequence; the logits of the last.
std::vector<float> decode(llama_context& context, std::int32_t first, std::int32_t count, llama_seq_id sequence = 0) {
  const llama_vocab* vocabulary = llama_model_get_vocab(llama_get_model(&context));
  llama_batch batch = llama_batch_init(count, 0, 1);
  for (std::int32_t i = 0; i < count; ++i) {
    batch.token[i] = 1000 + 37 * (first + i);
    batch.pos[i] = first + i;
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = sequence;
    batch.logits[i] = i + 1 == count ? 1 : 0;
  }
  batch.n_tokens = count;
  const std::int32_t code = llama_decode(&context, batch);
  llama_batch_free(batch);
  REQUIRE(code == 0);
  const float* logits = llama_get_logits_ith(&context, -1);
  REQUIRE(logits != nullptr);
  return {logits, logits + llama_vocab_n_tokens(vocabulary)};
}

Bytes save(llama_context& context, llama_seq_id sequence) {
  Bytes blob(llama_state_seq_get_size(&context, sequence));
  REQUIRE(llama_state_seq_get_data(&context, blob.data(), blob.size(), sequence) == blob.size());
  return blob;
}

// As an engine must do it: what the reader refuses is never set.
Status load(llama_context& context, const BlobFormat& format, std::span<const std::byte> blob, llama_seq_id sequence) {
  KVBLEND_RETURN_IF_ERROR(BlobReader::open(format, blob).status);
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(blob.data());
  CHECK(llama_state_seq_set_data(&context, bytes, blob.size(), sequence) == blob.size());
  return {};
}

// The same cells and rows, by the writer.
void craft(BlobWriter& writer, const BlobFormat& format, const Bytes& blob) {
  const Result<BlobReader> reader = BlobReader::open(format, view(blob));
  REQUIRE_MESSAGE(reader.ok(), text_of(reader.status));
  const std::int32_t cells = reader.value.cells(0);
  REQUIRE(cells == kTokens);
  REQUIRE(writer.lay_out(format, cells, reader.value.first_position(0)).ok());
  for (std::int32_t b = 0; b < static_cast<std::int32_t>(format.bodies.size()); ++b) {
    REQUIRE(reader.value.cells(b) == cells);
    const std::vector<BlobLayer>& layers = format.bodies[static_cast<std::size_t>(b)];
    for (std::int32_t l = 0; l < static_cast<std::int32_t>(layers.size()); ++l) {
      const BlobLayer& layer = layers[static_cast<std::size_t>(l)];
      const BlobRows to = writer.rows(b, l);
      const auto from = reader.value.rows(b, l);
      for (std::int32_t c = 0; c < cells; ++c) {
        std::memcpy(to.keys + c * layer.key_row_bytes, from.keys + c * layer.key_row_bytes,
                    static_cast<std::size_t>(layer.key_row_bytes));
        if (!format.transposed_values) {
          std::memcpy(to.values + c * layer.value_row_bytes, from.values + c * layer.value_row_bytes,
                      static_cast<std::size_t>(layer.value_row_bytes));
          continue;
        }
        for (std::int64_t j = 0; j < layer.value_row_bytes / layer.value_bytes; ++j) {
          const std::int64_t at = (j * cells + c) * layer.value_bytes;
          std::memcpy(to.values + at, from.values + at, static_cast<std::size_t>(layer.value_bytes));
        }
      }
    }
  }
}

constexpr Kind kKinds[] = {{"f16, flash attention", GGML_TYPE_F16, true},
                           {"f16", GGML_TYPE_F16, false},
                           {"f32", GGML_TYPE_F32, false},
                           {"q8_0, flash attention", GGML_TYPE_Q8_0, true}};

}  // namespace

TEST_CASE("state blob: llama.cpp takes a written blob for its own") {
  const std::string path = model_path();
  if (path.empty()) return;
  const ModelPointer model = load_model(path);
  for (const Kind& kind : kKinds) {
    CAPTURE(kind.name);
    const ContextPointer context = make_context(*model, kind);
    // Learnt from one token, as an engine does, and the same as from many.
    decode(*context, 0, 1);
    const Result<BlobFormat> format = BlobFormat::learn(view(save(*context, 0)));
    REQUIRE_MESSAGE(format.ok(), text_of(format.status));
    llama_memory_clear(llama_get_memory(context.get()), false);
    const Bytes none = save(*context, 0);
    const Result<BlobReader> empty = BlobReader::open(format.value, view(none));
    CHECK_MESSAGE(empty.ok(), text_of(empty.status));
    CHECK(empty.value.cells(0) == 0);
    CHECK(static_cast<std::int64_t>(none.size()) == format.value.bytes(0));

    decode(*context, 0, kTokens);
    const Bytes blob = save(*context, 0);
    const Result<BlobFormat> from_many = BlobFormat::learn(view(blob));
    REQUIRE_MESSAGE(from_many.ok(), text_of(from_many.status));
    CHECK(same(format.value, from_many.value));

    // What the model and the context say of it.
    CHECK(format.value.transposed_values == !kind.flash);
    std::size_t layers = 0;
    for (const std::vector<BlobLayer>& body : format.value.bodies) {
      layers += body.size();
      for (const BlobLayer& layer : body) {
        const std::int64_t width = std::int64_t{llama_model_n_embd(model.get())} / llama_model_n_head(model.get()) *
                                   llama_model_n_head_kv(model.get());
        CHECK(layer.key_type == static_cast<std::int32_t>(kind.type));
        CHECK(layer.value_type == static_cast<std::int32_t>(kind.type));
        CHECK(layer.value_bytes == (kind.flash ? 0 : static_cast<std::int32_t>(ggml_type_size(kind.type))));
        // Models whose heads are not the embedding's share are no concern of this test.
        if (llama_model_n_swa(model.get()) > 0) continue;
        CHECK(layer.key_row_bytes == static_cast<std::int64_t>(ggml_row_size(kind.type, width)));
        CHECK(layer.value_row_bytes == layer.key_row_bytes);
      }
    }
    CHECK(layers == static_cast<std::size_t>(llama_model_n_layer(model.get())));
    CHECK(format.value.bytes(kTokens) == static_cast<std::int64_t>(blob.size()));

    BlobWriter writer;
    craft(writer, format.value, blob);
    REQUIRE(writer.bytes().size() == blob.size());
    CHECK(std::memcmp(writer.bytes().data(), blob.data(), blob.size()) == 0);

    // Another context, where cells are those of the blob, and another sequence beside the first, where they are not.
    const ContextPointer fresh = make_context(*model, kind);
    CHECK(load(*fresh, format.value, writer.bytes(), 0).ok());
    CHECK(save(*fresh, 0) == blob);
    CHECK(load(*context, format.value, writer.bytes(), 1).ok());
    const Bytes second = save(*context, 1);
    const Result<BlobReader> reader = BlobReader::open(format.value, view(second));
    REQUIRE_MESSAGE(reader.ok(), text_of(reader.status));
    Bytes renamed = again(format.value, reader.value, blob);  // as sequence 0
    CHECK(renamed == blob);
    CHECK(second != blob);

    // And they go on alike.
    const std::vector<float> next = decode(*context, kTokens, 1);
    CHECK(decode(*fresh, kTokens, 1) == next);

    // At other positions too.
    REQUIRE(writer.lay_out(format.value, kTokens, Position(100)).ok());
    CHECK(load(*fresh, format.value, writer.bytes(), 0).ok());
    llama_memory_t memory = llama_get_memory(fresh.get());
    CHECK(llama_memory_seq_pos_min(memory, 0) == 100);
    CHECK(llama_memory_seq_pos_max(memory, 0) == 100 + kTokens - 1);
  }
}

TEST_CASE("state blob: llama.cpp never sees a blob that is refused") {
  const std::string path = model_path();
  if (path.empty()) return;
  const ModelPointer model = load_model(path);
  for (const Kind& kind : {kKinds[0], kKinds[1]}) {
    CAPTURE(kind.name);
    const ContextPointer context = make_context(*model, kind);
    decode(*context, 0, kTokens);
    const Bytes blob = save(*context, 0);
    const std::vector<float> wanted = decode(*context, kTokens, 1);
    REQUIRE(llama_memory_seq_rm(llama_get_memory(context.get()), 0, kTokens, -1));
    const Result<BlobFormat> format = BlobFormat::learn(view(blob));
    REQUIRE_MESSAGE(format.ok(), text_of(format.status));
    CHECK(decode(*context, kTokens, 1) == wanted);  // without any damage
    REQUIRE(llama_memory_seq_rm(llama_get_memory(context.get()), 0, kTokens, -1));

    std::mt19937 random(7);
    std::set<std::string> places;
    // Heads of the blob: the cells' fields and the first layer's; then what a mutation makes of all of it.
    constexpr std::size_t kHeads = 16 + 12 * kTokens + 8 + 12;
    for (std::size_t i = 0; i < kHeads + 40; ++i) {
      Bytes damaged = blob;
      if (i < kHeads) {
        damaged[i] ^= static_cast<std::uint8_t>(1U << random() % 8);
      } else if (i % 2 == 0) {
        damaged.resize(blob.size() - 1 - random() % (blob.size() - 1));
      } else {
        damaged.resize(blob.size() + 1 + random() % 1000);
      }
      const Status status = load(*context, format.value, view(damaged), 0);
      CAPTURE(i);
      check_named(status);
      places.insert(status.where());
    }
    CHECK(places.size() > 3 * 30);
    CHECK(save(*context, 0) == blob);
    CHECK(decode(*context, kTokens, 1) == wanted);
  }
}
