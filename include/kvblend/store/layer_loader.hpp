// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// LayerwiseLoader: brings the cached segments of a prompt into memory, a layer ahead of the blend that uses them. It is
// the KvSource that fuse/ reads from; chunks that are in memory are used where they lie.
#pragma once

#include <kvblend/memory/layouts.hpp>
#include <kvblend/prompt/prompt.hpp>
#include <kvblend/store/reader.hpp>
#include <kvblend/store/thread_launcher.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// Where one segment's chunk comes from: a handle to use in place, or a reader to load through, which must outlive the
// loader's use of it. Segments that are not cached have neither.
struct ChunkSource {
  ChunkHandle chunk;
  ChunkReaderRef reader;

  ChunkSource() = default;
  ChunkSource(ChunkHandle c) : chunk(std::move(c)) {}  // NOLINT: implicit by design
  ChunkSource(ChunkReaderRef r) : reader(r) {}         // NOLINT: implicit by design
};

// Use: open, start (or run on a thread of the caller's), then for each layer ascending wait, keys and values, release.
//
// Layers are loaded in ascending order into a ring of `depth` slots in the caller's staging memory; a slot is used again
// once its layer was released. C is the codec of the chunks' dtype. Everything is allocated by open; loading allocates
// nothing. One thread loads, one other consumes.
template <Codec C, Launcher L = ThreadLauncher>
class LayerwiseLoader {
 public:
  LayerwiseLoader() = default;
  LayerwiseLoader(const LayerwiseLoader&) = delete;
  LayerwiseLoader& operator=(const LayerwiseLoader&) = delete;
  ~LayerwiseLoader() { stop(); }

  // Staging memory that open will ask for: 0 if all chunks are in memory. `sources` has one entry a segment.
  [[nodiscard]] static std::int64_t staging_bytes(const Prompt& prompt, std::span<const ChunkSource> sources,
                                                  std::int32_t depth);

  // Checks every source against the model and against what its segment says, and lays out the ring. `depth` layers are
  // held at once; layers() or more keeps all. The prompt is not used afterwards; `staging` and the readers must live
  // until stop() or the loader's end, so declare them before the loader. Errors name segment and field: a source that
  // is missing, of another model, shape or dtype, or not of the tokens, context and position its segment states; depth
  // below 1; staging too small.
  Status open(const ModelIdentity& model, const Prompt& prompt, std::span<const ChunkSource> sources,
              std::int32_t depth, std::span<std::byte> staging);

  // Runs the loading loop through the launcher, once after each open.
  Status start();
  // The loading loop itself: returns when all layers are loaded, at the first error, or after stop().
  Status run();
  // Ends loading, after the read in progress, and returns when the loop has. Waiting ends with
  // StatusCode::cancelled. Layers that were loaded stay valid. Not to be called by a reader.
  void stop();

  // Blocks until the layer is loaded and verified: forever, if nobody calls start() or run(). Errors name segment and
  // tensor; layers before the one that failed are still fine. Also errors: a layer that was released and whose slot may
  // be in use again, and one that can never be loaded since `depth` earlier ones are not released.
  Status wait(std::int32_t layer);
  // Between wait(layer) and release(layer). Planes over all rows of the segment's chunk; without rows for segments that
  // are not cached, or are empty.
  [[nodiscard]] ConstContiguousPlane<C> keys(std::int32_t segment, std::int32_t layer) const {
    return plane(segment, layer, 0);
  }
  [[nodiscard]] ConstContiguousPlane<C> values(std::int32_t segment, std::int32_t layer) const {
    return plane(segment, layer, 1);
  }
  void release(std::int32_t layer);
  // The rope that the segment's stored keys were rotated by.
  [[nodiscard]] const RopeSpec& rope(std::int32_t segment, std::int32_t layer) const;

  [[nodiscard]] std::int32_t layers() const { return layers_; }
  // Bytes that are read for a layer.
  [[nodiscard]] std::int64_t layer_read_bytes() const { return read_bytes_; }
  // Seconds spent reading and verifying the layer, and seconds wait(layer) blocked. 0 for what did not happen yet.
  [[nodiscard]] double load_seconds(std::int32_t layer) const { return seconds(load_seconds_, layer); }
  [[nodiscard]] double wait_seconds(std::int32_t layer) const { return seconds(wait_seconds_, layer); }

  // The policy, to set up its threads before start().
  [[nodiscard]] L& launcher() { return launcher_; }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::int64_t kAlignment = 64;

  struct Place {
    ChunkHandle chunk;
    ChunkReaderRef reader;
    const ChunkIdentity* identity = nullptr;
    std::int64_t offset = -1;  // of the layer within a slot, if it is read
    bool reads = false;        // false if an earlier segment reads the same
  };

  [[nodiscard]] static std::int64_t aligned(std::int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  [[nodiscard]] static bool is_read(const Segment& segment, const ChunkSource& source) {
    return segment.kind == SegmentKind::cached && segment.size() > 0 && source.chunk == nullptr && source.reader;
  }
  // The first segment that is read through the same reader.
  static std::size_t first_of(const Prompt& prompt, std::span<const ChunkSource> sources, std::size_t segment);
  static Status check_source(const ModelIdentity& model, const Segment& segment, const ChunkSource& source, int index);
  static void enter(void* self) { static_cast<void>(static_cast<LayerwiseLoader*>(self)->run()); }

  Status load(std::int32_t layer);
  [[nodiscard]] std::byte* slot(std::int32_t layer) const { return ring_ + (layer % depth_) * slot_bytes_; }
  [[nodiscard]] ConstContiguousPlane<C> plane(std::int32_t segment, std::int32_t layer, std::int64_t which) const;
  [[nodiscard]] double seconds(const std::vector<double>& of, std::int32_t layer) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return layer >= 0 && static_cast<std::size_t>(layer) < of.size() ? of[static_cast<std::size_t>(layer)] : 0.0;
  }

  // Set by open, then constant.
  std::vector<Place> places_;  // one a segment
  RopeSpec no_rope_;
  std::int32_t layers_ = 0;
  std::int32_t depth_ = 1;
  std::byte* ring_ = nullptr;
  std::int64_t slot_bytes_ = 0;
  std::int64_t read_bytes_ = 0;
  L launcher_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by the mutex. Layers come in order, so one number is the event of each.
  std::int32_t loaded_ = 0;    // layers below are loaded
  std::int32_t released_ = 0;  // layers below are released
  bool started_ = false;
  bool running_ = false;
  Status status_;
  std::vector<double> load_seconds_;
  std::vector<double> wait_seconds_;
  std::atomic<bool> stopped_ = false;  // written under the mutex; read without it between two reads
};

// ---------------------------------------------------------------------------------------------------------------------

template <Codec C, Launcher L>
std::size_t LayerwiseLoader<C, L>::first_of(const Prompt& prompt, std::span<const ChunkSource> sources,
                                            std::size_t segment) {
  std::size_t first = 0;
  while (first < segment && !(is_read(prompt.segments()[first], sources[first]) &&
                              sources[first].reader.refers_as(sources[segment].reader))) {
    ++first;
  }
  return first;
}

template <Codec C, Launcher L>
std::int64_t LayerwiseLoader<C, L>::staging_bytes(const Prompt& prompt, std::span<const ChunkSource> sources,
                                                  std::int32_t depth) {
  std::int64_t slot = 0;
  std::int64_t slots = 0;
  const std::size_t count = (std::min)(prompt.segments().size(), sources.size());
  for (std::size_t i = 0; i < count; ++i) {
    if (!is_read(prompt.segments()[i], sources[i]) || first_of(prompt, sources, i) != i) continue;
    slot += aligned(layer_bytes(sources[i].reader.identity()));
    slots = (std::min)(depth, sources[i].reader.identity().model.layers);
  }
  return slot == 0 ? 0 : slot * slots + kAlignment - 1;
}

template <Codec C, Launcher L>
Status LayerwiseLoader<C, L>::check_source(const ModelIdentity& model, const Segment& segment,
                                           const ChunkSource& source, int index) {
  if (source.chunk == nullptr && !source.reader) {
    return Status::error(StatusCode::invalid_argument, "cached segment has no source").at("segment %d", index);
  }
  const ChunkIdentity& identity = source.chunk != nullptr ? source.chunk->identity() : source.reader.identity();
  Status status = check_same(model, identity.model);
  if (status.ok()) status = validate(identity);
  if (status.ok()) status = detail::check_same_tokens("tokens", segment.chunk->tokens, identity.tokens);
  if (status.ok()) status = detail::check_same_tokens("context", segment.chunk->context, identity.context);
  if (status.ok() && segment.chunk->first_position != identity.first_position) {
    status =
        detail::number_mismatch("first_position", segment.chunk->first_position.value, identity.first_position.value);
  }
  if (status.ok()) return {};
  return Status::error(status.code(), "%s", status.message()).at("segment %d, %s", index, status.where());
}

template <Codec C, Launcher L>
Status LayerwiseLoader<C, L>::open(const ModelIdentity& model, const Prompt& prompt,
                                   std::span<const ChunkSource> sources, std::int32_t depth,
                                   std::span<std::byte> staging) {
  stop();
  const std::lock_guard<std::mutex> lock(mutex_);
  places_.clear();
  layers_ = loaded_ = released_ = 0;
  slot_bytes_ = read_bytes_ = 0;
  status_ = Status();
  KVBLEND_RETURN_IF_ERROR(validate(model));
  if (C::dtype != model.dtype) {
    return Status::error(StatusCode::mismatch, "the loader's codec is %s, the model's cache %s", to_string(C::dtype),
                         to_string(model.dtype))
        .at("model.dtype");
  }
  if (depth < 1) return Status::error(StatusCode::invalid_argument, "%d is below 1", depth).at("depth");
  const std::span<const Segment> segments = prompt.segments();
  if (sources.size() != segments.size()) {
    return Status::error(StatusCode::invalid_argument, "there are %zu for %zu segments", sources.size(),
                         segments.size())
        .at("sources");
  }
  std::vector<Place> places(segments.size());
  std::int64_t slot_bytes = 0;
  std::int64_t read_bytes = 0;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    if (segments[i].kind != SegmentKind::cached) continue;
    KVBLEND_RETURN_IF_ERROR(check_source(model, segments[i], sources[i], static_cast<int>(i)));
    Place& place = places[i];
    place.chunk = sources[i].chunk;
    place.reader = sources[i].reader;
    place.identity = place.chunk != nullptr ? &place.chunk->identity() : &place.reader.identity();
    if (!is_read(segments[i], sources[i])) continue;
    const std::size_t first = first_of(prompt, sources, i);
    place.reads = first == i;
    place.offset = place.reads ? slot_bytes : places[first].offset;
    if (!place.reads) continue;
    slot_bytes += aligned(layer_bytes(*place.identity));
    read_bytes += layer_bytes(*place.identity);
  }
  const std::int64_t needed = staging_bytes(prompt, sources, depth);
  if (static_cast<std::int64_t>(staging.size()) < needed) {
    return Status::error(StatusCode::insufficient_space, "needs %lld bytes, has %zu", static_cast<long long>(needed),
                         staging.size())
        .at("staging");
  }
  if (needed > 0) {
    const auto address = reinterpret_cast<std::uintptr_t>(staging.data());
    ring_ = staging.data() + (aligned(static_cast<std::int64_t>(address % kAlignment)) -
                              static_cast<std::int64_t>(address % kAlignment));
  }
  places_ = std::move(places);
  layers_ = model.layers;
  depth_ = (std::min)(depth, layers_);
  slot_bytes_ = slot_bytes;
  read_bytes_ = read_bytes;
  loaded_ = slot_bytes == 0 ? layers_ : 0;
  load_seconds_.assign(static_cast<std::size_t>(layers_), 0.0);
  wait_seconds_.assign(static_cast<std::size_t>(layers_), 0.0);
  started_ = stopped_ = false;
  return {};
}

template <Codec C, Launcher L>
Status LayerwiseLoader<C, L>::start() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (layers_ == 0) return Status::error(StatusCode::invalid_argument, "was not opened").at("loader");
    // Launching again would wait for the loop, which may wait for this thread to release a layer.
    if (started_ || running_) return Status::error(StatusCode::invalid_argument, "was started already").at("loader");
    if (loaded_ == layers_) return {};
    started_ = true;
  }
  Status status = launcher_.launch(&enter, this);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!status.ok() && status_.ok()) status_ = status;
  changed_.notify_all();
  return status;
}

template <Codec C, Launcher L>
Status LayerwiseLoader<C, L>::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (layers_ == 0) return Status::error(StatusCode::invalid_argument, "was not opened").at("loader");
  if (running_) return Status::error(StatusCode::invalid_argument, "is running already").at("loader");
  running_ = true;
  while (status_.ok() && loaded_ < layers_) {
    changed_.wait(lock, [this] { return stopped_ || loaded_ - released_ < depth_; });
    const std::int32_t layer = loaded_;
    lock.unlock();
    const Clock::time_point begin = Clock::now();
    Status status = load(layer);
    const double spent = std::chrono::duration<double>(Clock::now() - begin).count();
    lock.lock();
    load_seconds_[static_cast<std::size_t>(layer)] = spent;
    if (status.ok()) {
      ++loaded_;
    } else {
      status_ = status;
    }
    changed_.notify_all();
  }
  running_ = false;
  Status status = status_;
  // Under the lock: once it is free, stop() may return and the loader may be gone.
  changed_.notify_all();
  return status;
}

template <Codec C, Launcher L>
Status LayerwiseLoader<C, L>::load(std::int32_t layer) {
  for (std::size_t i = 0; i < places_.size(); ++i) {
    const Place& place = places_[i];
    if (!place.reads) continue;
    if (stopped_) return Status::error(StatusCode::cancelled, "loading was stopped").at("layer %d", layer);
    const auto size = static_cast<std::size_t>(layer_bytes(*place.identity));
    const Status status = place.reader.read_layer(layer, {slot(layer) + place.offset, size});
    if (!status.ok()) {
      return Status::error(status.code(), "%s: %s", status.where(), status.message())
          .at("segment %zu, layer %d", i, layer);
    }
  }
  return {};
}

template <Codec C, Launcher L>
void LayerwiseLoader<C, L>::stop() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    stopped_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return !running_; });
  }
  launcher_.join();  // a loop that had not begun ends at once
}

template <Codec C, Launcher L>
Status LayerwiseLoader<C, L>::wait(std::int32_t layer) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (layer < 0 || layer >= layers_) {
    return Status::error(StatusCode::out_of_range, "there are %d layers", layers_).at("layer %d", layer);
  }
  const bool reuses_slots = slot_bytes_ > 0 && depth_ < layers_;
  if (reuses_slots && layer < released_) {
    return Status::error(StatusCode::invalid_argument, "was released, and its memory is in use again")
        .at("layer %d", layer);
  }
  if (reuses_slots && layer - released_ >= depth_) {
    return Status::error(StatusCode::invalid_argument, "cannot be loaded before layer %d is released, at depth %d",
                         layer - depth_, depth_)
        .at("layer %d", layer);
  }
  if (loaded_ <= layer) {
    const Clock::time_point begin = Clock::now();
    changed_.wait(lock, [this, layer] { return loaded_ > layer || !status_.ok() || stopped_; });
    wait_seconds_[static_cast<std::size_t>(layer)] += std::chrono::duration<double>(Clock::now() - begin).count();
  }
  if (loaded_ > layer) return {};
  if (!status_.ok()) return status_;
  return Status::error(StatusCode::cancelled, "loading was stopped").at("layer %d", layer);
}

template <Codec C, Launcher L>
void LayerwiseLoader<C, L>::release(std::int32_t layer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (layer < released_ || layer >= layers_) return;
  released_ = layer + 1;
  changed_.notify_all();
}

template <Codec C, Launcher L>
const RopeSpec& LayerwiseLoader<C, L>::rope(std::int32_t segment, std::int32_t layer) const {
  if (segment < 0 || static_cast<std::size_t>(segment) >= places_.size() || layer < 0 || layer >= layers_) {
    return no_rope_;
  }
  const ChunkIdentity* identity = places_[static_cast<std::size_t>(segment)].identity;
  return identity == nullptr ? no_rope_ : identity->rope(layer);
}

template <Codec C, Launcher L>
ConstContiguousPlane<C> LayerwiseLoader<C, L>::plane(std::int32_t segment, std::int32_t layer,
                                                     std::int64_t which) const {
  if (segment < 0 || static_cast<std::size_t>(segment) >= places_.size() || layer < 0 || layer >= layers_) return {};
  const Place& place = places_[static_cast<std::size_t>(segment)];
  if (place.chunk != nullptr) {
    return which == 0 ? place.chunk->template key_plane<C>(layer) : place.chunk->template value_plane<C>(layer);
  }
  if (place.offset < 0) return {};
  const std::byte* base = slot(layer) + place.offset + which * plane_bytes(*place.identity);
  return dense_plane<C>(base, static_cast<std::int64_t>(place.identity->tokens.size()), place.identity->model.kv_heads,
                        place.identity->model.head_dim);
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
