// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The memory tier and the file tier: who is found, who is thrown out, and who is not mistaken for another.
#include "fixtures.hpp"

#include <atomic>
#include <limits>
#include <random>
#include <thread>

using namespace kvblend_test;

namespace {

// Every identity has the same digest.
struct ConstantHash {
  void update(std::span<const std::byte>) {}
  [[nodiscard]] ChunkDigest finish() const { return {42, 42}; }
};

std::vector<ChunkIdentity> others_of(const ChunkIdentity& identity) {
  std::vector<ChunkIdentity> others(5, identity);
  others[0].tokens = {4, 5, 6};
  others[1].model.dtype = DType::bf16;
  others[2].model.name = "another";
  others[3].tenant = "bob";
  others[4].ropes[0].inv_freq[0] = 0.25;
  return others;
}

}  // namespace

TEST_CASE("memory tier: with one hash for everything, a look-up still finds its chunk only") {
  MemoryTier<ConstantHash> tier(1 << 20);
  const ChunkIdentity identity = small_identity({1, 2, 3}, DType::f16);
  REQUIRE(tier.insert(share(filled_chunk(identity))).ok());
  for (const ChunkIdentity& other : others_of(identity)) CHECK(tier.find(other) == nullptr);
  for (const ChunkIdentity& other : others_of(identity)) REQUIRE(tier.insert(share(filled_chunk(other))).ok());
  CHECK(tier.stats().chunks == 6);
  for (const ChunkIdentity& other : others_of(identity)) {
    const ChunkHandle found = tier.find(other);
    REQUIRE(found != nullptr);
    CHECK(found->identity() == other);
  }
  REQUIRE(tier.find(identity) != nullptr);
  CHECK(tier.find(identity)->identity() == identity);
  CHECK(tier.erase(others_of(identity)[2]));
  CHECK_FALSE(tier.erase(others_of(identity)[2]));
  CHECK(tier.stats().chunks == 5);
}

TEST_CASE("file tier: with one hash for everything, another chunk's file is an error, never data") {
  const TemporaryDirectory directory;
  Result<FileTier<ConstantHash>> tier = FileTier<ConstantHash>::open(directory / "tier");
  REQUIRE(tier.ok());
  const ChunkIdentity identity = small_identity({1, 2, 3}, DType::f16);
  CHECK(tier.value.find(identity).status.code() == StatusCode::not_found);
  REQUIRE(tier.value.insert(filled_chunk(identity)).ok());
  for (const ChunkIdentity& other : others_of(identity)) {
    CHECK(tier.value.find(other).status.code() == StatusCode::mismatch);
    CHECK(tier.value.erase(other).code() == StatusCode::mismatch);
  }
  CHECK(tier.value.find(identity).ok());
}

TEST_CASE("memory tier: the least recently used goes first") {
  const Chunk example = filled_chunk(small_identity({0, 0, 0}));
  MemoryTier<> tier(3 * example.bytes());
  for (TokenId i = 1; i <= 3; ++i) REQUIRE(tier.insert(share(filled_chunk(small_identity({i, 0, 0})))).ok());
  CHECK(tier.find(small_identity({1, 0, 0})) != nullptr);  // now 2 is the oldest
  REQUIRE(tier.insert(share(filled_chunk(small_identity({4, 0, 0})))).ok());
  CHECK(tier.find(small_identity({2, 0, 0})) == nullptr);
  CHECK(tier.find(small_identity({1, 0, 0})) != nullptr);
  CHECK(tier.find(small_identity({3, 0, 0})) != nullptr);
  CHECK(tier.find(small_identity({4, 0, 0})) != nullptr);
  const auto stats = tier.stats();
  CHECK(stats.hits == 4);
  CHECK(stats.misses == 1);
  CHECK(stats.evictions == 1);
  CHECK(stats.chunks == 3);
  CHECK(stats.bytes == 3 * example.bytes());
  CHECK(stats.pinned_bytes == 0);
}

TEST_CASE("memory tier: what is in use stays, is counted, and can make a chunk not fit") {
  const Chunk example = filled_chunk(small_identity({0, 0, 0}));
  MemoryTier<> tier(2 * example.bytes());
  ChunkHandle first = share(filled_chunk(small_identity({1, 0, 0})));
  REQUIRE(tier.insert(first).ok());
  REQUIRE(tier.insert(share(filled_chunk(small_identity({2, 0, 0})))).ok());
  CHECK(tier.stats().pinned_bytes == example.bytes());
  // 1 is older but in use, so 2 goes.
  ChunkHandle third = share(filled_chunk(small_identity({3, 0, 0})));
  REQUIRE(tier.insert(third).ok());
  CHECK(tier.find(small_identity({2, 0, 0})) == nullptr);
  CHECK(tier.find(small_identity({1, 0, 0})) == first);
  const Status status = tier.insert(share(filled_chunk(small_identity({4, 0, 0}))));
  CHECK(status.code() == StatusCode::insufficient_space);
  CHECK(says(status, "in use"));
  CHECK(tier.stats().chunks == 2);
  // Erased while in use: not found any more, valid and counted until the handle goes.
  CHECK(tier.erase(small_identity({1, 0, 0})));
  CHECK(tier.find(small_identity({1, 0, 0})) == nullptr);
  CHECK(same_bytes(*first, filled_chunk(small_identity({1, 0, 0}))));
  CHECK(tier.stats().bytes == 2 * example.bytes());
  CHECK(tier.insert(share(filled_chunk(small_identity({4, 0, 0})))).code() == StatusCode::insufficient_space);
  first.reset();
  CHECK(tier.stats().bytes == example.bytes());
  CHECK(tier.insert(share(filled_chunk(small_identity({4, 0, 0})))).ok());
}

TEST_CASE("memory tier: inserting again replaces, and does not count twice") {
  MemoryTier<> tier(1 << 20);
  const ChunkIdentity identity = small_identity({1, 2, 3});
  const ChunkHandle one = share(filled_chunk(identity, 1));
  const ChunkHandle two = share(filled_chunk(identity, 2));
  REQUIRE(tier.insert(one).ok());
  REQUIRE(tier.insert(one).ok());
  CHECK(tier.stats().bytes == one->bytes());
  REQUIRE(tier.insert(two).ok());
  CHECK(tier.find(identity) == two);
  CHECK(tier.stats().chunks == 1);
  CHECK(tier.stats().bytes == 2 * one->bytes());  // the first is still in use here
}

TEST_CASE("memory tier: a chunk larger than the tier, or none at all, is refused") {
  const Chunk example = filled_chunk(small_identity({0, 0, 0}));
  MemoryTier<> tier(example.bytes());
  REQUIRE(tier.insert(share(filled_chunk(small_identity({1, 0, 0})))).ok());
  CHECK(tier.insert(share(filled_chunk(small_identity({1, 2, 3, 4})))).code() == StatusCode::insufficient_space);
  CHECK(tier.find(small_identity({1, 0, 0})) != nullptr);
  CHECK(tier.insert(nullptr).code() == StatusCode::invalid_argument);
  CHECK(tier.insert(share(Chunk())).code() == StatusCode::invalid_argument);
  MemoryTier<> nothing(0);
  CHECK(nothing.insert(share(filled_chunk(small_identity({1})))).code() == StatusCode::insufficient_space);
  MemoryTier<> negative((std::numeric_limits<std::int64_t>::min)());
  CHECK(negative.insert(share(filled_chunk(small_identity({1})))).code() == StatusCode::insufficient_space);
}

TEST_CASE("memory tier: threads may insert, find and erase at once") {
  const Chunk example = filled_chunk(small_identity({0, 0, 0}));
  MemoryTier<> tier(4 * example.bytes());
  std::atomic<int> wrong = 0;
  constexpr unsigned kSeed = 7;
  INFO("seed ", kSeed);
  const auto work = [&tier, &wrong](unsigned seed) {
    std::mt19937 random(seed);
    for (int round = 0; round < 400; ++round) {
      const auto id = static_cast<TokenId>(random() % 8);
      const ChunkIdentity identity = small_identity({id, 0, 0});
      switch (random() % 4) {
        case 0: {
          const Status status = tier.insert(share(filled_chunk(identity, static_cast<unsigned>(id))));
          if (!status.ok() && status.code() != StatusCode::insufficient_space) ++wrong;
          break;
        }
        case 1: tier.erase(identity); break;
        default: {
          const ChunkHandle found = tier.find(identity);
          if (found && !same_bytes(*found, filled_chunk(identity, static_cast<unsigned>(id)))) ++wrong;
        }
      }
      if (tier.stats().bytes > tier.capacity()) ++wrong;
    }
  };
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < 4; ++i) threads.emplace_back(work, kSeed + i);
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(tier.stats().pinned_bytes == 0);
}

TEST_CASE("file tier: chunks are found by their identity, and by no other") {
  const TemporaryDirectory directory;
  Result<FileTier<>> tier = FileTier<>::open(directory / "tier");
  REQUIRE(tier.ok());
  const ChunkIdentity identity = small_identity({1, 2, 3}, DType::f16);
  REQUIRE(tier.value.insert(filled_chunk(identity)).ok());
  for (const ChunkIdentity& other : others_of(identity)) {
    CHECK(tier.value.find(other).status.code() == StatusCode::not_found);
    REQUIRE(tier.value.insert(filled_chunk(other)).ok());
  }
  for (const ChunkIdentity& other : others_of(identity)) CHECK(tier.value.find(other).ok());
  // A later run of the program finds them too.
  Result<FileTier<>> again = FileTier<>::open(directory / "tier");
  REQUIRE(again.ok());
  Result<FileReader> reader = again.value.find(identity);
  REQUIRE(reader.ok());
  Chunk chunk;
  REQUIRE(load_chunk(reader.value, chunk).ok());
  CHECK(same_bytes(chunk, filled_chunk(identity)));
  CHECK(reader.value.info().tokens.size() == 3);
  CHECK(again.value.erase(identity).ok());
  CHECK(again.value.erase(identity).code() == StatusCode::not_found);
  CHECK(again.value.find(identity).status.code() == StatusCode::not_found);
}

TEST_CASE("file tier: a chunk that is replaced or removed after look-up still reads, one that is cut is an error") {
  const TemporaryDirectory directory;
  Result<FileTier<>> tier = FileTier<>::open(directory.path());
  REQUIRE(tier.ok());
  const ChunkIdentity identity = small_identity({1, 2, 3});
  const Chunk first = filled_chunk(identity, 1);
  REQUIRE(tier.value.insert(first).ok());

  Result<FileReader> reader = tier.value.find(identity);
  REQUIRE(reader.ok());
  REQUIRE(tier.value.insert(filled_chunk(identity, 2)).ok());
  REQUIRE(tier.value.erase(identity).ok());
  Chunk chunk;
  REQUIRE(load_chunk(reader.value, chunk).ok());
  CHECK(same_bytes(chunk, first));

  REQUIRE(tier.value.insert(first).ok());
  reader = tier.value.find(identity);
  REQUIRE(reader.ok());
  std::filesystem::resize_file(tier.value.path_of(identity), 700);
  Chunk destination = chunk_of_sevens(identity);
  const Status status = load_chunk(reader.value, destination);
  CHECK(status.code() == StatusCode::corrupt);
  CHECK(says(status, "layers."));
  CHECK(all_sevens(destination));
  // What cannot be read can still be thrown away.
  CHECK(tier.value.find(identity).status.code() == StatusCode::corrupt);
  CHECK(tier.value.erase(identity).ok());
  CHECK(directory.entries() == 0);
}

TEST_CASE("file tier: its directory must be one") {
  const TemporaryDirectory directory;
  write_file(directory / "file", "x");
  CHECK(FileTier<>::open(directory / "file").status.code() == StatusCode::io_error);
  CHECK(FileTier<>::open(directory / "no/where").status.code() == StatusCode::not_found);
  CHECK(FileTier<>::open("").status.code() == StatusCode::invalid_argument);
}

TEST_CASE("a chunk goes from memory to a file and back") {
  const TemporaryDirectory directory;
  Result<FileTier<>> files = FileTier<>::open(directory.path());
  REQUIRE(files.ok());
  MemoryTier<> memory(1 << 20);
  const ChunkIdentity identity = small_identity({1, 2, 3}, DType::bf16);
  REQUIRE(memory.insert(share(filled_chunk(identity))).ok());
  REQUIRE(files.value.insert(*memory.find(identity)).ok());
  CHECK(memory.erase(identity));
  Result<FileReader> reader = files.value.find(identity);
  REQUIRE(reader.ok());
  Chunk chunk;
  REQUIRE(load_chunk(reader.value, chunk).ok());
  REQUIRE(memory.insert(share(std::move(chunk))).ok());
  CHECK(same_bytes(*memory.find(identity), filled_chunk(identity)));
}

TEST_CASE("file tier: what cannot be opened to see what it is stays") {
  const TemporaryDirectory directory;
  Result<FileTier<>> tier = FileTier<>::open(directory.path());
  REQUIRE(tier.ok());
  const ChunkIdentity identity = small_identity({1, 2, 3});
  REQUIRE(::mkfifo(tier.value.path_of(identity).c_str(), 0600) == 0);
  CHECK(tier.value.find(identity).status.code() == StatusCode::invalid_argument);
  CHECK(tier.value.erase(identity).code() == StatusCode::invalid_argument);
  CHECK(directory.entries() == 1);
}
