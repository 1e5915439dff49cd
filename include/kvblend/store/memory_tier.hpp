// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// MemoryTier: chunks in memory, up to a number of bytes. The least recently used go first, but never one in use.
#pragma once

#include <kvblend/store/chunk.hpp>
#include <kvblend/store/digest.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <list>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// Thread-safe. A chunk is in use while anybody but the tier holds a handle to it: it is then neither evicted nor
// forgotten in `bytes`, since its memory is not free.
template <IdentityHash Hash = Xxh3Hash>
class MemoryTier {
 public:
  struct Stats {
    std::int64_t hits = 0;
    std::int64_t misses = 0;
    std::int64_t evictions = 0;
    std::int64_t chunks = 0;        // that can be found
    std::int64_t bytes = 0;         // held, by those chunks and by erased or replaced ones still in use
    std::int64_t pinned_bytes = 0;  // of `bytes`, those in use
  };

  explicit MemoryTier(std::int64_t capacity_bytes) : capacity_(capacity_bytes) {}

  // Takes the chunk, in the place of one of the same identity, and evicts others until it fits. On an error the tier is
  // as it was: StatusCode::insufficient_space for a chunk larger than the tier, or than what is not in use.
  Status insert(ChunkHandle chunk);

  // The chunk of this identity, all of it compared; null if there is none. The handle keeps it in place.
  [[nodiscard]] ChunkHandle find(const ChunkIdentity& identity);

  // Whether there was one. Handles stay valid.
  bool erase(const ChunkIdentity& identity);

  [[nodiscard]] Stats stats() const;
  [[nodiscard]] std::int64_t capacity() const { return capacity_; }

 private:
  struct Entry {
    ChunkHandle chunk;
    ChunkDigest digest;
  };
  struct DigestHash {
    std::size_t operator()(const ChunkDigest& digest) const { return static_cast<std::size_t>(digest.low); }
  };
  using Entries = std::list<Entry>;  // most recently used first
  using Map = std::unordered_multimap<ChunkDigest, typename Entries::iterator, DigestHash>;

  // Under the lock nobody can take a new handle from an entry that only the tier holds.
  static bool pinned(const ChunkHandle& chunk) { return chunk.use_count() > 1; }

  typename Map::iterator locate(const ChunkIdentity& identity, const ChunkDigest& digest);
  // Takes an entry out; a chunk in use stays counted until its last handle goes.
  void remove(typename Map::iterator place);
  void forget_released();

  std::int64_t capacity_;
  mutable std::mutex mutex_;
  Entries entries_;
  Map map_;
  std::list<ChunkHandle> retired_;  // removed, but still in use
  std::int64_t bytes_ = 0;
  Stats stats_;
};

// ---------------------------------------------------------------------------------------------------------------------

template <IdentityHash Hash>
typename MemoryTier<Hash>::Map::iterator MemoryTier<Hash>::locate(const ChunkIdentity& identity,
                                                                  const ChunkDigest& digest) {
  auto [place, end] = map_.equal_range(digest);
  while (place != end && !(place->second->chunk->identity() == identity)) ++place;
  return place == end ? map_.end() : place;
}

template <IdentityHash Hash>
void MemoryTier<Hash>::remove(typename Map::iterator place) {
  ChunkHandle& chunk = place->second->chunk;
  if (pinned(chunk)) {
    retired_.push_back(std::move(chunk));
  } else {
    bytes_ -= chunk->bytes();
  }
  entries_.erase(place->second);
  map_.erase(place);
}

template <IdentityHash Hash>
void MemoryTier<Hash>::forget_released() {
  for (auto place = retired_.begin(); place != retired_.end();) {
    if (pinned(*place)) {
      ++place;
    } else {
      bytes_ -= (*place)->bytes();
      place = retired_.erase(place);
    }
  }
}

template <IdentityHash Hash>
Status MemoryTier<Hash>::insert(ChunkHandle chunk) {
  if (chunk == nullptr || chunk->layers() == 0) {
    return Status::error(StatusCode::invalid_argument, "is null, or was never allocated").at("chunk");
  }
  const std::int64_t size = chunk->bytes();
  if (size > capacity_) {
    return Status::error(StatusCode::insufficient_space, "%lld bytes are more than the tier's %lld",
                         static_cast<long long>(size), static_cast<long long>(capacity_))
        .at("chunk");
  }
  const ChunkDigest digest = digest_of<Hash>(chunk->identity());
  const std::lock_guard<std::mutex> lock(mutex_);
  forget_released();
  const auto old = locate(chunk->identity(), digest);
  if (old != map_.end() && old->second->chunk == chunk) {
    entries_.splice(entries_.begin(), entries_, old->second);
    return {};
  }

  std::int64_t in_use = 0;
  for (const ChunkHandle& retired : retired_) in_use += retired->bytes();
  for (const Entry& entry : entries_) in_use += pinned(entry.chunk) ? entry.chunk->bytes() : 0;
  if (size > capacity_ - in_use) {
    return Status::error(StatusCode::insufficient_space, "%lld bytes do not fit: of %lld, %lld are in use",
                         static_cast<long long>(size), static_cast<long long>(capacity_),
                         static_cast<long long>(in_use))
        .at("chunk");
  }
  if (old != map_.end()) remove(old);
  for (auto entry = entries_.end(); bytes_ + size > capacity_ && entry != entries_.begin();) {
    --entry;
    if (pinned(entry->chunk)) continue;
    const auto next = std::next(entry);
    auto [place, end] = map_.equal_range(entry->digest);
    while (place != end && place->second != entry) ++place;
    remove(place);
    ++stats_.evictions;
    entry = next;
  }
  entries_.push_front({std::move(chunk), digest});
  map_.emplace(digest, entries_.begin());
  bytes_ += size;
  return {};
}

template <IdentityHash Hash>
ChunkHandle MemoryTier<Hash>::find(const ChunkIdentity& identity) {
  const ChunkDigest digest = digest_of<Hash>(identity);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto place = locate(identity, digest);
  if (place == map_.end()) {
    ++stats_.misses;
    return nullptr;
  }
  ++stats_.hits;
  entries_.splice(entries_.begin(), entries_, place->second);
  return place->second->chunk;
}

template <IdentityHash Hash>
bool MemoryTier<Hash>::erase(const ChunkIdentity& identity) {
  const ChunkDigest digest = digest_of<Hash>(identity);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto place = locate(identity, digest);
  if (place == map_.end()) return false;
  remove(place);
  return true;
}

template <IdentityHash Hash>
typename MemoryTier<Hash>::Stats MemoryTier<Hash>::stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  Stats stats = stats_;
  stats.chunks = static_cast<std::int64_t>(entries_.size());
  for (const Entry& entry : entries_) {
    stats.bytes += entry.chunk->bytes();
    stats.pinned_bytes += pinned(entry.chunk) ? entry.chunk->bytes() : 0;
  }
  for (const ChunkHandle& retired : retired_) {
    const std::int64_t held = pinned(retired) ? retired->bytes() : 0;
    stats.bytes += held;
    stats.pinned_bytes += held;
  }
  return stats;
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
