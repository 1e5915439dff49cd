// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// ChunkReader: how a chunk that lies in a tier is read, a layer at a time. The loader (store/layer_loader.hpp) and
// wrappers such as ThrottledReader take any of them.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/store/chunk.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <utility>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

//   identity()                       of the chunk it reads, verified against what was asked for
//   info()                           for the prompt; views that live as long as the reader
//   read_layer(layer, destination)   layer_bytes(identity()) bytes, keys before values. Ok only if they are all there
//                                    and were verified. After an error destination holds no particular bytes; the
//                                    status names the tensor ("layers.3.key"). Allocates nothing.
// One thread reads at a time.
template <class R>
concept ChunkReader = requires(R& reader, const R& view, std::int32_t layer, std::span<std::byte> destination) {
  { view.identity() } -> std::same_as<const ChunkIdentity&>;
  { view.info() } -> std::same_as<ChunkInfo>;
  { reader.read_layer(layer, destination) } -> std::same_as<Status>;
};

// The least a ChunkReader can be; templates are instantiated with it in the tests.
struct ChunkReaderArchetype {
  ChunkReaderArchetype() = delete;
  ChunkReaderArchetype(const ChunkReaderArchetype&) = delete;
  ChunkReaderArchetype& operator=(const ChunkReaderArchetype&) = delete;
  [[nodiscard]] const ChunkIdentity& identity() const;
  [[nodiscard]] ChunkInfo info() const;
  Status read_layer(std::int32_t layer, std::span<std::byte> destination);
};

// Any reader by reference, so that one prompt's chunks may come from different tiers. The reader must outlive it.
class ChunkReaderRef {
 public:
  ChunkReaderRef() = default;
  template <ChunkReader R>
  requires(!std::same_as<std::remove_const_t<R>, ChunkReaderRef>)
      ChunkReaderRef(R& reader)  // NOLINT: implicit by design
      : reader_(&reader), identity_(&get_identity<R>), info_(&get_info<R>), read_layer_(&do_read_layer<R>) {}

  [[nodiscard]] explicit operator bool() const { return reader_ != nullptr; }
  [[nodiscard]] const ChunkIdentity& identity() const { return identity_(reader_); }
  [[nodiscard]] ChunkInfo info() const { return info_(reader_); }
  Status read_layer(std::int32_t layer, std::span<std::byte> destination) const {
    return read_layer_(reader_, layer, destination);
  }
  // Whether both read through the same reader.
  [[nodiscard]] bool refers_as(const ChunkReaderRef& other) const { return reader_ == other.reader_; }

 private:
  template <class R>
  static const ChunkIdentity& get_identity(const void* reader) {
    return static_cast<const R*>(reader)->identity();
  }
  template <class R>
  static ChunkInfo get_info(const void* reader) {
    return static_cast<const R*>(reader)->info();
  }
  template <class R>
  static Status do_read_layer(void* reader, std::int32_t layer, std::span<std::byte> destination) {
    return static_cast<R*>(reader)->read_layer(layer, destination);
  }

  void* reader_ = nullptr;
  const ChunkIdentity& (*identity_)(const void*) = nullptr;
  ChunkInfo (*info_)(const void*) = nullptr;
  Status (*read_layer_)(void*, std::int32_t, std::span<std::byte>) = nullptr;
};

namespace detail {

inline Status check_layer_read(const ChunkIdentity& identity, std::int32_t layer, std::size_t room) {
  if (layer < 0 || layer >= identity.model.layers) {
    return Status::error(StatusCode::out_of_range, "the chunk has %d layers", identity.model.layers)
        .at("layer %d", layer);
  }
  if (room != static_cast<std::size_t>(layer_bytes(identity))) {
    return Status::error(StatusCode::invalid_argument, "destination has %zu bytes, the layer %lld", room,
                         static_cast<long long>(layer_bytes(identity)))
        .at("layer %d", layer);
  }
  return {};
}

}  // namespace detail

// Reads a chunk that is in memory, by copying. To use such a chunk in place, give the loader its handle instead.
class MemoryReader {
 public:
  MemoryReader() = default;
  // `chunk` is not null.
  explicit MemoryReader(ChunkHandle chunk) : chunk_(std::move(chunk)) {}

  [[nodiscard]] const ChunkIdentity& identity() const { return chunk_->identity(); }
  [[nodiscard]] ChunkInfo info() const { return chunk_->info(); }
  Status read_layer(std::int32_t layer, std::span<std::byte> destination) {
    KVBLEND_RETURN_IF_ERROR(detail::check_layer_read(identity(), layer, destination.size()));
    if (!destination.empty()) std::memcpy(destination.data(), chunk_->layer(layer).data(), destination.size());
    return {};
  }

 private:
  ChunkHandle chunk_;
};

// Reads all of a chunk into `destination`, which is replaced as a whole, or left as it was on an error.
template <ChunkReader R>
Status load_chunk(R& reader, Chunk& destination) {
  Result<Chunk> chunk = Chunk::allocate(reader.identity());
  if (!chunk.ok()) return chunk.status;
  for (std::int32_t layer = 0; layer < chunk.value.layers(); ++layer) {
    KVBLEND_RETURN_IF_ERROR(reader.read_layer(layer, chunk.value.layer(layer)));
  }
  const ChunkInfo info = reader.info();
  if (info.scores.size() != chunk.value.scores().size()) {
    return Status::error(StatusCode::mismatch, "there are %zu for %d tokens", info.scores.size(), chunk.value.tokens())
        .at("scores");
  }
  std::copy(info.scores.begin(), info.scores.end(), chunk.value.scores().begin());
  destination = std::move(chunk.value);
  return {};
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
