// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Chunk: the keys and values of a run of tokens, owned, as the tiers of store/ keep them. A host fills one after a
// prefill or a blend (import_rows); from then on it is shared as a ChunkHandle and never changes.
#pragma once

#include <kvblend/memory/layouts.hpp>
#include <kvblend/memory/rows.hpp>
#include <kvblend/prompt/prompt.hpp>
#include <kvblend/store/identity.hpp>

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// For each layer keys [tokens, kv_heads, head_dim], then values in the same shape, dense, in the identity's dtype. A
// layer starts at a multiple of 64 bytes.
class Chunk {
 public:
  Chunk() = default;
  Chunk(Chunk&&) = default;
  Chunk& operator=(Chunk&&) = default;

  // All keys, values and scores are 0. Scores exist if the identity names a recipe for them. Errors: an invalid
  // identity; StatusCode::insufficient_space if the system has not enough memory.
  static Result<Chunk> allocate(ChunkIdentity identity);

  [[nodiscard]] const ChunkIdentity& identity() const { return identity_; }
  [[nodiscard]] std::int32_t tokens() const { return static_cast<std::int32_t>(identity_.tokens.size()); }
  [[nodiscard]] std::int32_t layers() const { return memory_ != nullptr ? identity_.model.layers : 0; }

  // What a prompt must know of it: views that live as long as the chunk.
  [[nodiscard]] ChunkInfo info() const {
    return {identity_.tokens, identity_.first_position, identity_.context, scores_};
  }

  // One layer's bytes, keys before values; `layer` in [0, layers()).
  [[nodiscard]] std::span<std::byte> layer(std::int32_t layer) { return view(layer); }
  [[nodiscard]] std::span<const std::byte> layer(std::int32_t layer) const { return view(layer); }
  // [tokens()], or empty.
  [[nodiscard]] std::span<float> scores() { return scores_; }
  [[nodiscard]] std::span<const float> scores() const { return scores_; }

  // Planes over a layer, in the chunk's dtype. With a codec of another dtype, or a layer that is not there, a plane
  // without rows.
  template <Codec C>
  [[nodiscard]] ContiguousPlane<C> key_plane(std::int32_t layer) {
    return plane<C>(layer, 0);
  }
  template <Codec C>
  [[nodiscard]] ContiguousPlane<C> value_plane(std::int32_t layer) {
    return plane<C>(layer, 1);
  }
  template <Codec C>
  [[nodiscard]] ConstContiguousPlane<C> key_plane(std::int32_t layer) const {
    return plane<C>(layer, 0);
  }
  template <Codec C>
  [[nodiscard]] ConstContiguousPlane<C> value_plane(std::int32_t layer) const {
    return plane<C>(layer, 1);
  }

  // What it counts for in a tier: keys, values, scores and tokens.
  [[nodiscard]] std::int64_t bytes() const {
    const std::size_t rest = scores_.size() * sizeof(float) +
                             (identity_.tokens.size() + identity_.context.size()) * sizeof(TokenId) +
                             identity_.ropes.size() * sizeof(RopeSpec);
    return total_bytes(identity_) + static_cast<std::int64_t>(rest);
  }

 private:
  struct Unmap {
    std::size_t size;
    Unmap() : size(0) {}
    explicit Unmap(std::size_t bytes) : size(bytes) {}
    void operator()(std::byte* memory) const { ::munmap(memory, size); }
  };
  static constexpr std::size_t kAlignment = 64;

  // From one layer's first byte to the next one's.
  [[nodiscard]] std::size_t layer_step() const {
    return (static_cast<std::size_t>(layer_bytes(identity_)) + kAlignment - 1) / kAlignment * kAlignment;
  }
  [[nodiscard]] std::span<std::byte> view(std::int32_t layer) const {
    return {memory_.get() + static_cast<std::size_t>(layer) * layer_step(),
            static_cast<std::size_t>(layer_bytes(identity_))};
  }

  template <Codec C>
  [[nodiscard]] ContiguousPlane<C> plane(std::int32_t layer, std::int64_t which) const {
    static_assert(C::block_bytes * block_values(C::dtype) == C::block_values * block_bytes(C::dtype),
                  "a codec with more bytes than its dtype, such as scales between the values, is none of a chunk");
    if (C::dtype != identity_.model.dtype || layer < 0 || layer >= layers()) return {};
    return dense_plane<C>(view(layer).data() + which * plane_bytes(identity_), tokens(), identity_.model.kv_heads,
                          identity_.model.head_dim);
  }

  ChunkIdentity identity_;
  std::unique_ptr<std::byte, Unmap> memory_;  // all layers
  std::vector<float> scores_;
};

// A chunk in use: as long as a handle lives, so does the chunk, whatever its tier does meanwhile.
using ChunkHandle = std::shared_ptr<const Chunk>;

[[nodiscard]] inline ChunkHandle share(Chunk&& chunk) { return std::make_shared<const Chunk>(std::move(chunk)); }

// Copies `count` rows of a host's planes, from `source_first` on, to rows `chunk_first` and on of one layer of the
// chunk. C is the codec of the chunk's dtype; rows of another codec are converted, rounding to nearest. Keys must be
// rotated to the positions the chunk's identity states. On an error the chunk is as it was. Errors: another dtype or
// shape; a layer or rows that either side does not have.
template <Codec C, ReadablePlane K, ReadablePlane V>
Status import_rows(Chunk& chunk, std::int32_t layer, const K& keys, const V& values, std::int64_t source_first,
                   std::int64_t chunk_first, std::int64_t count);

// ---------------------------------------------------------------------------------------------------------------------

inline Result<Chunk> Chunk::allocate(ChunkIdentity identity) {
  KVBLEND_RETURN_IF_ERROR(validate(identity));
  Chunk chunk;
  chunk.identity_ = std::move(identity);
  // One mapping, zeroed by the system, in huge pages where it has them, since every blend reads all of it once. A chunk
  // without tokens has one too, which tells it from one never allocated.
  const std::size_t size =
      (std::max)(std::size_t{1}, chunk.layer_step() * static_cast<std::size_t>(chunk.identity_.model.layers));
  void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return Status::error(StatusCode::insufficient_space, "no memory for %zu bytes", size).at("chunk");
  }
  chunk.memory_ = {static_cast<std::byte*>(memory), Unmap(size)};
#if defined(MADV_HUGEPAGE)
  ::madvise(memory, size, MADV_HUGEPAGE);
#endif
  if (!chunk.identity_.recipe.empty()) chunk.scores_.resize(chunk.identity_.tokens.size());
  return Result<Chunk>(std::move(chunk));  // spelled out for nvcc, which would copy
}

namespace detail {

template <ReadablePlane P>
Status check_import(const P& source, const ModelIdentity& model, std::int64_t first, std::int64_t count,
                    const char* name) {
  if (source.layout.heads() != model.kv_heads || source.layout.head_dim() != model.head_dim) {
    return Status::error(StatusCode::mismatch, "has %d heads of %d, the chunk %d of %d", source.layout.heads(),
                         source.layout.head_dim(), model.kv_heads, model.head_dim)
        .at("%s", name);
  }
  KVBLEND_RETURN_IF_ERROR(check_shape(source, name));
  return check_stored_rows(source, first, count, name);
}

}  // namespace detail

template <Codec C, ReadablePlane K, ReadablePlane V>
Status import_rows(Chunk& chunk, std::int32_t layer, const K& keys, const V& values, std::int64_t source_first,
                   std::int64_t chunk_first, std::int64_t count) {
  const ModelIdentity& model = chunk.identity().model;
  if (C::dtype != model.dtype) {
    return Status::error(StatusCode::mismatch, "codec is %s, the chunk %s", to_string(C::dtype), to_string(model.dtype))
        .at("model.dtype");
  }
  if (layer < 0 || layer >= chunk.layers()) {
    return Status::error(StatusCode::out_of_range, "the chunk has %d layers", chunk.layers()).at("layer %d", layer);
  }
  if (source_first < 0 || chunk_first < 0 || count < 0 || count > chunk.tokens() ||
      chunk_first > chunk.tokens() - count) {
    return Status::error(StatusCode::out_of_range, "%lld rows from %lld on do not fit a chunk of %d",
                         static_cast<long long>(count), static_cast<long long>(chunk_first), chunk.tokens())
        .at("layer %d", layer);
  }
  KVBLEND_RETURN_IF_ERROR(detail::check_import(keys, model, source_first, count, "keys"));
  KVBLEND_RETURN_IF_ERROR(detail::check_import(values, model, source_first, count, "values"));
  copy_rows(keys, source_first, chunk.key_plane<C>(layer), chunk_first, count);
  copy_rows(values, source_first, chunk.value_plane<C>(layer), chunk_first, count);
  return {};
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
