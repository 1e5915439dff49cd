// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Small chunks, directories and files for the tests of store/.
#pragma once

#include <kvblend/codec/floats.hpp>
#include <kvblend/store.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

namespace kvblend_test {

using namespace kvblend;

inline RopeSpec small_rope(std::int32_t head_dim, double base = 10000.0) {
  RopeSpec spec;
  spec.head_dim = head_dim;
  spec.rotary_dim = head_dim / 2 * 2;
  double frequency = 1.0;
  for (std::int32_t i = 0; i < spec.pairs(); ++i) {
    spec.inv_freq[static_cast<std::size_t>(i)] = frequency;
    frequency /= base / 97.0;
  }
  return spec;
}

// Heads of 4 values, or of two of the dtype's blocks.
inline ChunkIdentity small_identity(std::vector<TokenId> tokens, DType dtype = DType::f32, std::int32_t layers = 2) {
  ChunkIdentity identity;
  const std::int32_t head_dim = block_values(dtype) == 1 ? 4 : 2 * block_values(dtype);
  identity.model = {"toy", "0123abcd", dtype, layers, 2, head_dim};
  identity.tenant = "alice";
  for (std::int32_t layer = 0; layer < layers; ++layer) {
    identity.add_layer_rope(small_rope(head_dim, layer == 1 ? 500000.0 : 10000.0));
  }
  identity.tokens = std::move(tokens);
  return identity;
}

// Every byte of every layer differs from what stands beside it; scores are 0.5, 1.5, …
inline Chunk filled_chunk(const ChunkIdentity& identity, unsigned salt = 0) {
  Result<Chunk> chunk = Chunk::allocate(identity);
  REQUIRE_MESSAGE(chunk.ok(), chunk.status.where(), ": ", chunk.status.message());
  unsigned state = 12345u + salt;
  for (std::int32_t layer = 0; layer < chunk.value.layers(); ++layer) {
    for (std::byte& byte : chunk.value.layer(layer)) {
      state = state * 1664525u + 1013904223u;
      byte = static_cast<std::byte>((state >> 24) & 0x3fu);  // small exponents: finite in every dtype
    }
  }
  for (std::size_t i = 0; i < chunk.value.scores().size(); ++i) {
    chunk.value.scores()[i] = static_cast<float>(i) + 0.5f;
  }
  return std::move(chunk.value);
}

inline bool same_bytes(const Chunk& a, const Chunk& b) {
  if (!(a.identity() == b.identity()) || a.scores().size() != b.scores().size()) return false;
  for (std::int32_t layer = 0; layer < a.layers(); ++layer) {
    if (!std::equal(a.layer(layer).begin(), a.layer(layer).end(), b.layer(layer).begin(), b.layer(layer).end())) {
      return false;
    }
  }
  return std::equal(a.scores().begin(), a.scores().end(), b.scores().begin());
}

// A chunk all of whose bytes are 7, to see that a failed load leaves it alone.
inline Chunk chunk_of_sevens(const ChunkIdentity& identity) {
  Result<Chunk> chunk = Chunk::allocate(identity);
  REQUIRE(chunk.ok());
  for (std::int32_t layer = 0; layer < chunk.value.layers(); ++layer) {
    for (std::byte& byte : chunk.value.layer(layer)) byte = std::byte{7};
  }
  return std::move(chunk.value);
}

inline bool all_sevens(const Chunk& chunk) {
  if (chunk.layers() == 0) return false;
  for (std::int32_t layer = 0; layer < chunk.layers(); ++layer) {
    for (const std::byte byte : chunk.layer(layer)) {
      if (byte != std::byte{7}) return false;
    }
  }
  return true;
}

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string name = (std::filesystem::temp_directory_path() / "kvblend-test-XXXXXX").string();
    REQUIRE(::mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  [[nodiscard]] std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] std::size_t entries() const {
    std::size_t count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      static_cast<void>(entry);
      ++count;
    }
    return count;
  }

 private:
  std::string path_;
};

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  REQUIRE(file.good());
}

inline std::string with_length(std::string json) {
  std::string result;
  for (int byte = 0; byte < 8; ++byte) result.push_back(static_cast<char>((json.size() >> (8 * byte)) & 0xff));
  return result + json;
}

// Opens and loads the file as a caller would; the destination is replaced on success only.
inline Status load_file(const std::string& path, const ChunkIdentity& wanted, Chunk& destination) {
  Result<FileReader> reader = FileReader::open(path, wanted);
  if (!reader.ok()) return reader.status;
  return load_chunk(reader.value, destination);
}

inline std::string text_of(const Status& status) {
  return std::string(to_string(status.code())) + " | " + status.where() + " | " + status.message();
}

inline bool says(const Status& status, const std::string& part) {
  return text_of(status).find(part) != std::string::npos;
}

}  // namespace kvblend_test
