// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The owning chunk, and how a host's cache becomes one.
#include "fixtures.hpp"

#include <cstdint>

using namespace kvblend_test;

TEST_CASE("a chunk has a zeroed, aligned buffer a layer, keys before values") {
  Result<Chunk> made = Chunk::allocate(small_identity({5, 6, 7}, DType::f16));
  REQUIRE(made.ok());
  Chunk& chunk = made.value;
  CHECK(chunk.layers() == 2);
  CHECK(chunk.layer(1).size() == 2 * 3 * 2 * 4 * 2);
  CHECK(reinterpret_cast<std::uintptr_t>(chunk.layer(0).data()) % 64 == 0);
  CHECK(reinterpret_cast<std::uintptr_t>(chunk.layer(1).data()) % 64 == 0);
  for (const std::byte byte : chunk.layer(1)) CHECK(byte == std::byte{0});
  CHECK(chunk.key_plane<F16Codec>(1).at(2, 1) == chunk.layer(1).data() + (2 * 2 + 1) * 4 * 2);
  CHECK(chunk.value_plane<F16Codec>(1).at(0, 0) == chunk.layer(1).data() + 3 * 2 * 4 * 2);
  CHECK(chunk.scores().empty());
  CHECK(chunk.info().tokens.size() == 3);
  CHECK(chunk.info().tokens.data() == chunk.identity().tokens.data());
}

TEST_CASE("planes of another dtype or layer have no rows") {
  const Chunk chunk = filled_chunk(small_identity({5, 6, 7}, DType::f16));
  CHECK_FALSE(chunk.key_plane<Bf16Codec>(0).layout.contains(0));
  CHECK_FALSE(chunk.key_plane<F32Codec>(0).layout.contains(0));
  CHECK_FALSE(chunk.value_plane<F16Codec>(2).layout.contains(0));
  CHECK_FALSE(chunk.value_plane<F16Codec>(-1).layout.contains(0));
  CHECK(chunk.value_plane<F16Codec>(1).layout.contains(2));
}

TEST_CASE("a recipe comes with scores") {
  ChunkIdentity identity = small_identity({5, 6, 7});
  identity.recipe = "saliency, 3 probes";
  const Chunk chunk = filled_chunk(identity);
  REQUIRE(chunk.info().scores.size() == 3);
  CHECK(chunk.info().scores[2] == 2.5f);
}

TEST_CASE("an impossible chunk is a status") {
  ChunkIdentity identity = small_identity({5});
  identity.model.layers = 3;
  CHECK(Chunk::allocate(identity).status.code() == StatusCode::invalid_argument);
}

TEST_CASE("rows of a head-major host cache are imported where they belong") {
  // Host: [heads, rows, head_dim], f32; chunk rows 1 and 2 come from its rows 3 and 4.
  std::vector<float> keys(2 * 6 * 4);
  std::vector<float> values(2 * 6 * 4);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    keys[i] = static_cast<float>(i) * 0.25f;
    values[i] = -static_cast<float>(i);
  }
  const ContiguousLayout layout(6, 2, 4, 4 * 4, 6 * 4 * 4);
  const ConstContiguousPlane<F32Codec> key_plane(reinterpret_cast<const std::byte*>(keys.data()), layout);
  const ConstContiguousPlane<F32Codec> value_plane(reinterpret_cast<const std::byte*>(values.data()), layout);

  SUBCASE("bits are copied where the dtype is the same") {
    Chunk chunk = filled_chunk(small_identity({5, 6, 7}));
    REQUIRE(import_rows<F32Codec>(chunk, 1, key_plane, value_plane, 3, 1, 2).ok());
    std::vector<float> head(kMaxHeadDim);  // on the heap: g++ -O3 cannot see head_dim and warns of small arrays
    for (std::int32_t row = 0; row < 2; ++row) {
      for (std::int32_t h = 0; h < 2; ++h) {
        decode_head(chunk.key_plane<F32Codec>(1), 1 + row, h, head.data());
        for (std::int32_t d = 0; d < 4; ++d) {
          CHECK(head[static_cast<std::size_t>(d)] == keys[static_cast<std::size_t>((h * 6 + 3 + row) * 4 + d)]);
        }
        decode_head(chunk.value_plane<F32Codec>(1), 1 + row, h, head.data());
        CHECK(head[1] == values[static_cast<std::size_t>((h * 6 + 3 + row) * 4 + 1)]);
      }
    }
    const Chunk before = filled_chunk(small_identity({5, 6, 7}));
    const std::size_t row_bytes = 2 * 4 * 4;
    CHECK(std::equal(chunk.layer(1).begin(), chunk.layer(1).begin() + row_bytes, before.layer(1).begin()));
    CHECK(std::equal(chunk.layer(0).begin(), chunk.layer(0).end(), before.layer(0).begin()));
  }
  SUBCASE("and converted where it is not") {
    Chunk chunk = filled_chunk(small_identity({5, 6, 7}, DType::bf16));
    REQUIRE(import_rows<Bf16Codec>(chunk, 0, key_plane, value_plane, 0, 0, 3).ok());
    std::vector<float> head(kMaxHeadDim);  // on the heap: g++ -O3 cannot see head_dim and warns of small arrays
    decode_head(chunk.key_plane<Bf16Codec>(0), 2, 1, head.data());
    CHECK(head[3] == keys[(6 + 2) * 4 + 3]);  // 8.75 is exact in bf16
  }
  SUBCASE("what does not fit is refused and changes nothing") {
    Chunk chunk = chunk_of_sevens(small_identity({5, 6, 7}));
    CHECK(import_rows<F16Codec>(chunk, 0, key_plane, value_plane, 0, 0, 3).code() == StatusCode::mismatch);
    CHECK(import_rows<F32Codec>(chunk, 2, key_plane, value_plane, 0, 0, 3).code() == StatusCode::out_of_range);
    CHECK(import_rows<F32Codec>(chunk, 0, key_plane, value_plane, 0, 1, 3).code() == StatusCode::out_of_range);
    CHECK(import_rows<F32Codec>(chunk, 0, key_plane, value_plane, -1, 0, 3).code() == StatusCode::out_of_range);
    CHECK(import_rows<F32Codec>(chunk, 0, key_plane, value_plane, 4, 0, 3).code() == StatusCode::out_of_range);
    CHECK(import_rows<F32Codec>(chunk, 0, key_plane, value_plane, 0, 0, std::int64_t{1} << 62).code() ==
          StatusCode::out_of_range);
    const ConstContiguousPlane<F32Codec> thin(key_plane.base, ContiguousLayout(6, 1, 4, 16, 16));
    CHECK(says(import_rows<F32Codec>(chunk, 0, key_plane, thin, 0, 0, 3), "values"));
    CHECK(all_sevens(chunk));
  }
}

TEST_CASE("a chunk without tokens is a chunk") {
  Chunk chunk = filled_chunk(small_identity({}));
  CHECK(chunk.layer(0).empty());
  CHECK(import_rows<F32Codec>(chunk, 0, chunk.key_plane<F32Codec>(1), chunk.value_plane<F32Codec>(1), 0, 0, 0).ok());
  Chunk copy;
  MemoryReader reader(share(filled_chunk(small_identity({}))));
  REQUIRE(load_chunk(reader, copy).ok());
  CHECK(same_bytes(chunk, copy));
}

TEST_CASE("a chunk that was moved from has nothing, and the other has all") {
  Chunk first = filled_chunk(small_identity({5, 6, 7}), 1);
  const std::byte* memory = first.layer(0).data();
  Chunk second = std::move(first);
  CHECK(second.layer(0).data() == memory);
  CHECK(first.layers() == 0);  // NOLINT: what is left of it is the test
  CHECK(first.tokens() == 0);
  CHECK(first.layer(0).empty());
  CHECK_FALSE(first.key_plane<F32Codec>(0).layout.contains(0));
  // Over one of another size: each memory is given back with its own.
  Chunk third = filled_chunk(small_identity(std::vector<TokenId>(3000, 1)), 2);
  third = std::move(second);
  CHECK(same_bytes(third, filled_chunk(small_identity({5, 6, 7}), 1)));
  first = filled_chunk(small_identity({8}), 3);
  CHECK(same_bytes(first, filled_chunk(small_identity({8}), 3)));
}
