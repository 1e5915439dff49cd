// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// LayerLoader: brings the cached segments' layers from pinned host memory to the device, some layers ahead of the
// blend that reads them. The KvSource of cuda::Fusor; generic over the two queues of work, so that its order is tested
// without a GPU.
#pragma once

#include <kvblend/codec/codec.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/fuse/host.hpp>
#include <kvblend/memory/layouts.hpp>
#include <kvblend/prompt/prompt.hpp>
#include <kvblend/rope/spec.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {
namespace cuda {

// Two queues of work, that of the blend and one for copies, and marks in one that the other waits for. All calls return
// at once; a queue waits for a mark as it was last made when the wait was queued.
//   copy(device, host, bytes)   on the queue for copies
//   mark_copied(slot)           behind the copies queued so far
//   await_copied(slot)          the blend's queue waits for that
//   mark_read(slot)             behind what the blend queued so far
//   await_read(slot)            the queue for copies waits for that
// CudaStreams (streams.cuh) is this on two streams, with two events a slot.
template <class S>
concept Streams = std::copyable<S> &&
    requires(const S& streams, void* device, const void* host, std::size_t bytes, std::int32_t slot) {
  { streams.copy(device, host, bytes) } -> std::same_as<Status>;
  { streams.mark_copied(slot) } -> std::same_as<Status>;
  { streams.await_copied(slot) } -> std::same_as<Status>;
  { streams.mark_read(slot) } -> std::same_as<Status>;
  { streams.await_read(slot) } -> std::same_as<Status>;
};

// Host is a KvSource over dense rows in pinned memory, all layers of which stay there until the work of the blend is
// done: nobody but the device knows when a copy is. Its wait(layer) is called when the layer's copy is queued, `depth`
// layers before it is used, and its release() never.
// Use: open, then as any source: wait, keys and values, release, layer by layer.
template <KvSource Host, Streams S>
class LayerLoader {
 public:
  using HostPlane = decltype(std::declval<Host&>().keys(0, 0));
  using Codec = typename HostPlane::codec_type;
  using Plane = ConstContiguousPlane<Codec>;
  static_assert(std::same_as<typename HostPlane::layout_type, ContiguousLayout>,
                "kvblend: LayerLoader copies rows that lie at a fixed stride");

  struct Shape {
    std::int32_t layers = 0;
    std::int32_t heads = 0;  // KV heads
    std::int32_t head_dim = 0;
  };

  explicit LayerLoader(S streams) : streams_(streams) {}

  // Device memory for `depth` layers.
  [[nodiscard]] static std::size_t staging_bytes(const Prompt& prompt, const Shape& shape, std::int32_t depth) {
    return static_cast<std::size_t>(slot_bytes(prompt, shape) * depth + kAlignment);
  }

  // Queues the first `depth` layers, behind all that the blend's queue holds already. `host`, `prompt` and `staging`
  // (device memory, staging_bytes()) must stay until the work is done.
  // Errors: `shape`, `depth` or `staging` by name; the host's own.
  Status open(Host& host, const Prompt& prompt, const Shape& shape, std::int32_t depth, std::span<std::byte> staging);

  // Errors: a layer out of order; errors of queueing it, which may have come up in release().
  Status wait(std::int32_t layer);
  [[nodiscard]] Plane keys(std::int32_t segment, std::int32_t layer) const { return plane(segment, layer, 0); }
  [[nodiscard]] Plane values(std::int32_t segment, std::int32_t layer) const { return plane(segment, layer, 1); }
  void release(std::int32_t layer);
  [[nodiscard]] const RopeSpec& rope(std::int32_t segment, std::int32_t layer) const {
    return host_->rope(segment, layer);
  }

 private:
  static constexpr std::int64_t kAlignment = 256;

  [[nodiscard]] static std::int64_t row_bytes(const Shape& shape) {
    return shape.heads * bytes_of<Codec>(shape.head_dim);
  }
  // Of the keys, or the values, of one segment.
  [[nodiscard]] static std::int64_t part_bytes(const Segment& segment, const Shape& shape) {
    if (segment.kind != SegmentKind::cached) return 0;
    return (segment.size() * row_bytes(shape) + kAlignment - 1) / kAlignment * kAlignment;
  }
  [[nodiscard]] static std::int64_t slot_bytes(const Prompt& prompt, const Shape& shape) {
    std::int64_t bytes = 0;
    for (const Segment& segment : prompt.segments()) bytes += 2 * part_bytes(segment, shape);
    return bytes;
  }
  // Where the rows of a segment lie on the device; which: 0 keys, 1 values.
  [[nodiscard]] std::byte* place(std::int32_t segment, std::int32_t layer, int which) const;
  [[nodiscard]] Plane plane(std::int32_t segment, std::int32_t layer, int which) const;
  Status copy_rows(std::int32_t segment, std::int32_t layer, int which, const HostPlane& rows);
  Status queue(std::int32_t layer);

  S streams_;
  Host* host_ = nullptr;
  const Prompt* prompt_ = nullptr;
  Shape shape_;
  std::int32_t depth_ = 0;
  std::byte* staging_ = nullptr;
  std::int64_t slot_bytes_ = 0;
  std::int32_t queued_ = 0;    // layers below have their copies queued
  std::int32_t released_ = 0;  // layers below were released
  Status status_;
};

// ---------------------------------------------------------------------------------------------------------------------

template <KvSource Host, Streams S>
Status LayerLoader<Host, S>::open(Host& host, const Prompt& prompt, const Shape& shape, std::int32_t depth,
                                  std::span<std::byte> staging) {
  const auto invalid = StatusCode::invalid_argument;
  prompt_ = nullptr;
  if (shape.layers <= 0) return Status::error(invalid, "is %d", shape.layers).at("layers");
  if (shape.heads <= 0) return Status::error(invalid, "is %d", shape.heads).at("heads");
  if (shape.head_dim <= 0 || shape.head_dim % Codec::block_values != 0) {
    return Status::error(invalid, "is %d, blocks have %d values", shape.head_dim, int{Codec::block_values})
        .at("head_dim");
  }
  if (depth < 1) return Status::error(invalid, "%d is below 1", depth).at("depth");
  if (staging.size() < staging_bytes(prompt, shape, depth)) {
    return Status::error(StatusCode::insufficient_space, "needs %zu bytes, has %zu",
                         staging_bytes(prompt, shape, depth), staging.size())
        .at("staging");
  }
  host_ = &host;
  shape_ = shape;
  depth_ = depth < shape.layers ? depth : shape.layers;
  const auto misaligned = reinterpret_cast<std::uintptr_t>(staging.data()) % kAlignment;
  staging_ = staging.data() + (kAlignment - static_cast<std::int64_t>(misaligned));
  slot_bytes_ = slot_bytes(prompt, shape);
  queued_ = released_ = 0;
  status_ = Status();
  prompt_ = &prompt;
  // What was queued before may still read the staging memory.
  KVBLEND_RETURN_IF_ERROR(streams_.mark_read(0));
  KVBLEND_RETURN_IF_ERROR(streams_.await_read(0));
  while (queued_ < depth_) KVBLEND_RETURN_IF_ERROR(queue(queued_));
  return {};
}

template <KvSource Host, Streams S>
Status LayerLoader<Host, S>::queue(std::int32_t layer) {
  KVBLEND_RETURN_IF_ERROR(host_->wait(layer));
  const auto segments = static_cast<std::int32_t>(prompt_->segments().size());
  for (std::int32_t i = 0; i < segments; ++i) {
    const Segment& segment = prompt_->segments()[static_cast<std::size_t>(i)];
    if (segment.kind != SegmentKind::cached || segment.size() == 0) continue;
    KVBLEND_RETURN_IF_ERROR(copy_rows(i, layer, 0, host_->keys(i, layer)));
    KVBLEND_RETURN_IF_ERROR(copy_rows(i, layer, 1, host_->values(i, layer)));
  }
  KVBLEND_RETURN_IF_ERROR(streams_.mark_copied(layer % depth_));
  queued_ = layer + 1;
  return {};
}

template <KvSource Host, Streams S>
Status LayerLoader<Host, S>::copy_rows(std::int32_t segment, std::int32_t layer, int which, const HostPlane& rows) {
  const Segment& of = prompt_->segments()[static_cast<std::size_t>(segment)];
  const ContiguousLayout& layout = rows.layout;
  const std::int64_t head_bytes = bytes_of<Codec>(shape_.head_dim);
  if (layout.heads() != shape_.heads || layout.head_dim() != shape_.head_dim || layout.tiles() != 1 ||
      layout.row_stride != row_bytes(shape_) || (shape_.heads > 1 && layout.head_stride != head_bytes)) {
    return Status::error(StatusCode::mismatch, "are not dense rows of %d heads of %d values", shape_.heads,
                         shape_.head_dim)
        .at("segment %d, layer %d, stored %s", segment, layer, which == 0 ? "keys" : "values");
  }
  if (!layout.contains_rows(of.chunk_offset, of.size())) {
    return Status::error(StatusCode::out_of_range, "has %lld rows", static_cast<long long>(layout.row_count))
        .at("segment %d, layer %d, stored %s", segment, layer, which == 0 ? "keys" : "values");
  }
  return streams_.copy(place(segment, layer, which), rows.at(of.chunk_offset, 0),
                       static_cast<std::size_t>(of.size() * row_bytes(shape_)));
}

template <KvSource Host, Streams S>
Status LayerLoader<Host, S>::wait(std::int32_t layer) {
  KVBLEND_RETURN_IF_ERROR(status_);
  if (prompt_ == nullptr) return Status::error(StatusCode::invalid_argument, "was not opened").at("loader");
  if (layer < released_ || layer >= queued_) {
    return Status::error(StatusCode::out_of_range, "layers %d to %d are there", released_, queued_ - 1)
        .at("layer %d", layer);
  }
  return streams_.await_copied(layer % depth_);
}

template <KvSource Host, Streams S>
void LayerLoader<Host, S>::release(std::int32_t layer) {
  if (layer != released_ || layer >= queued_ || !status_.ok()) return;
  released_ = layer + 1;
  if (queued_ >= shape_.layers) return;
  // The next layer that has no slot yet takes this one, once it was read.
  status_ = streams_.mark_read(layer % depth_);
  if (status_.ok()) status_ = streams_.await_read(layer % depth_);
  if (status_.ok()) status_ = queue(queued_);
}

template <KvSource Host, Streams S>
std::byte* LayerLoader<Host, S>::place(std::int32_t segment, std::int32_t layer, int which) const {
  std::int64_t offset = layer % depth_ * slot_bytes_;
  for (std::int32_t i = 0; i < segment; ++i) {
    offset += 2 * part_bytes(prompt_->segments()[static_cast<std::size_t>(i)], shape_);
  }
  return staging_ + offset + which * part_bytes(prompt_->segments()[static_cast<std::size_t>(segment)], shape_);
}

// Over the rows of the chunk, of which only the segment's are there.
template <KvSource Host, Streams S>
typename LayerLoader<Host, S>::Plane LayerLoader<Host, S>::plane(std::int32_t segment, std::int32_t layer,
                                                                 int which) const {
  const Segment& of = prompt_->segments()[static_cast<std::size_t>(segment)];
  if (of.kind != SegmentKind::cached) return {};
  HeadShape shape(shape_.heads, shape_.head_dim, bytes_of<Codec>(shape_.head_dim));
  shape.origin = -of.chunk_offset * row_bytes(shape_);
  const HostPlane rows = which == 0 ? host_->keys(segment, layer) : host_->values(segment, layer);
  return {place(segment, layer, which),
          ContiguousLayout(std::int64_t{of.chunk_offset} + of.size(), shape, row_bytes(shape_)), rows.codec};
}

}  // namespace cuda
}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
