// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The state of one sequence as llama.cpp writes and reads it (llama_state_seq_get_data, llama_state_seq_set_data): the
// KV of its tokens, cell by cell. The format is no promise of llama.cpp's, so a context's own blob, of one token, is
// the model of all others: whatever differs from it in magic, streams, layers, types or row sizes is refused.
//
//   u32 magic | i32 sequence | body (of the layers with full attention, or all) | body (of those with a sliding window)
//   body    u32 streams (1) | u32 cells | cells x {i32 position, u32 sequences (1), i32 sequence}
//           | u32 values transposed | u32 layers
//           | layers x {i32 type, u64 row bytes, cells x key row}
//           | layers x {i32 type, u64 row bytes, cells x value row}, or, transposed,
//             layers x {i32 type, u32 value bytes, u32 values a row, [values a row][cells]}
// Little endian, packed. A body without cells ends at their count. Cells that a sliding window has passed are not
// written, so that the second body may begin later than the first; both end at the same position.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace llama_cpp {

// One layer's part of a body.
struct BlobLayer {
  std::int32_t key_type = 0;  // ggml_type
  std::int32_t value_type = 0;
  std::int64_t key_row_bytes = 0;
  std::int64_t value_row_bytes = 0;  // if transposed, value bytes * values a row
  std::int32_t value_bytes = 0;      // of one value; only if transposed, else 0
};

// What all blobs of one context have in common. bodies[i][j] is the j-th layer of the i-th body.
struct BlobFormat {
  std::uint32_t magic = 0;
  bool transposed_values = false;
  std::vector<std::vector<BlobLayer>> bodies;  // one or two

  // Learns it from a blob of at least one cell in each body. Errors name the field: a blob that is cut, has bytes left
  // over, more than one stream, cells that BlobReader::open would refuse, no layers, layers or bodies of different
  // types, or rows that are empty or make up 2 GiB or more a cell. Bytes that follow the first body are a second one,
  // and a blob cut just there is learnt as one body: whoever knows the model compares the layers.
  static kvblend::Result<BlobFormat> learn(std::span<const std::byte> blob);

  // Of a blob of that many cells in each body, at least 0. It cannot overflow: learn, and whatever else takes a format,
  // has seen to it that cells and the bytes of a cell fit 31 bits each.
  [[nodiscard]] std::int64_t bytes(std::int32_t cells) const;
};

// Where one layer's rows lie in a blob. Key row c is at keys + c * key_row_bytes. Value row c is at
// values + c * value_row_bytes; if transposed, value j of it at values + (j * cells + c) * value bytes.
struct BlobRows {
  std::byte* keys = nullptr;
  std::byte* values = nullptr;
};

// A blob that is written: all cells of one sequence, in order, in every body. The sequence is called 0; the one it is
// set to takes its place.
class BlobWriter {
 public:
  // Lays out `cells` cells, at least one, at positions first_position, + 1, …; rows keep what the memory holds from
  // before, all zero the first time and whenever it grew. What it holds may be NaN once it lies elsewhere, old headers
  // among it: a row that nobody writes before attention reads it, be it under a mask, must be zeroed. Memory is kept
  // and only grows. Errors, on which all is as it was: a format that learn would refuse; no cells; a position that is
  // negative or past 31 bits; StatusCode::insufficient_space if the system has not enough memory.
  kvblend::Status lay_out(const BlobFormat& format, std::int32_t cells, kvblend::Position first_position);

  // Of layer `layer` of body `body`, until the next lay_out; nowhere if it is not there. Calls and writes to different
  // rows may run at once.
  [[nodiscard]] BlobRows rows(std::int32_t body, std::int32_t layer) const;
  [[nodiscard]] std::int32_t cells() const { return cells_; }
  [[nodiscard]] std::span<const std::byte> bytes() const { return {memory_.get(), size_}; }

 private:
  struct Unmap {
    std::size_t size;
    Unmap() : size(0) {}
    explicit Unmap(std::size_t bytes) : size(bytes) {}
    void operator()(std::byte* memory) const;
  };
  std::unique_ptr<std::byte, Unmap> memory_;  // one mapping
  std::size_t size_ = 0;
  std::int32_t cells_ = 0;
  std::vector<std::vector<BlobRows>> rows_;
};

// A blob that was read. Views into it.
class BlobReader {
 public:
  // Checks every field and the length; what it accepts, a context of that format does too, if it has the room. Errors
  // name the field: a blob of another magic, format or stream count, cut or too long; a cell of more than one sequence
  // or another than the blob's, or whose position is negative or does not follow the one before it; bodies that do not
  // end at the same position. A blob without cells is one of an empty sequence: no body has any.
  static kvblend::Result<BlobReader> open(const BlobFormat& format, std::span<const std::byte> blob);

  // Cells of a body: a window may have passed the first ones. 0 for one that is not there.
  [[nodiscard]] std::int32_t cells(std::int32_t body) const;
  [[nodiscard]] kvblend::Position first_position(std::int32_t body) const;
  struct Rows {
    const std::byte* keys = nullptr;
    const std::byte* values = nullptr;
  };
  // As BlobRows, of cells(body) cells; nowhere if the layer or its cells are not there.
  [[nodiscard]] Rows rows(std::int32_t body, std::int32_t layer) const;

 private:
  struct Body {
    std::int32_t cells = 0;
    kvblend::Position first_position{};
    std::vector<Rows> rows;
  };
  std::vector<Body> bodies_;
};

}  // namespace llama_cpp
