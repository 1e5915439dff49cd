// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Passages: KV of texts that were each computed alone, in device memory or in pinned host memory. A KvSource whose
// layers are always there; those of the host are what kvblend's LayerLoader brings to the device.
#pragma once

#include <cuda_engine/engine.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace cuda_engine {

// Layers that a loader has on the device, or on their way there.
inline constexpr std::int32_t kLoadDepth = 3;

// Segments [0, size()) of a prompt are the passages.
template <Device D, Where where = Where::device>
class Passages {
 public:
  using T = typename D::Scalar;
  using Plane = kvblend::ContiguousPlane<typename D::Codec>;

  // The engine must outlive it: its shape and ropes are asked for.
  Passages(D& device, Engine<D>& engine) : device_(device), engine_(engine) {}

  // Computes `tokens` in the engine's emptied cache, at positions from 0 on, and keeps the KV.
  Status add(std::span<const TokenId> tokens) requires(where == Where::device) {
    engine_.clear();
    KVBLEND_RETURN_IF_ERROR(engine_.prefill(tokens, Wanted::none));
    KVBLEND_RETURN_IF_ERROR(make_room(tokens));
    using Copy = CopyRow<T, typename Engine<D>::CachePlane, Plane>;
    const auto rows = static_cast<std::int64_t>(tokens.size());
    for (std::int32_t layer = 0; layer < engine_.layers(); ++layer) {
      KVBLEND_RETURN_IF_ERROR(device_.rows(rows, Copy{engine_.keys(layer), keys(size() - 1, layer), nullptr}));
      KVBLEND_RETURN_IF_ERROR(device_.rows(rows, Copy{engine_.values(layer), values(size() - 1, layer), nullptr}));
    }
    engine_.clear();
    return device_.finish();  // before the next one's tokens go where this one's are read from
  }

  // Copies from the device.
  Status copy(const Passages<D, Where::device>& from) requires(where == Where::host) {
    passages_.clear();
    for (std::int32_t i = 0; i < from.size(); ++i) {
      KVBLEND_RETURN_IF_ERROR(make_room(from.tokens(i)));
      const std::span<const T> values = from.memory(i);
      KVBLEND_RETURN_IF_ERROR(device_.download(passages_.back().values.data(), values.data(), values.size_bytes()));
    }
    return {};
  }

  [[nodiscard]] std::int32_t size() const { return static_cast<std::int32_t>(passages_.size()); }
  [[nodiscard]] std::span<const TokenId> tokens(std::int32_t i) const { return at(i).tokens; }
  // [layers, keys and values, rows, kv_heads, head_dim].
  [[nodiscard]] std::span<const T> memory(std::int32_t i) const {
    return {at(i).values.data(), static_cast<std::size_t>(at(i).values.size())};
  }

  // KvSource.
  Status wait(std::int32_t) { return {}; }
  [[nodiscard]] Plane keys(std::int32_t segment, std::int32_t layer) { return plane(segment, 2 * layer); }
  [[nodiscard]] Plane values(std::int32_t segment, std::int32_t layer) { return plane(segment, 2 * layer + 1); }
  void release(std::int32_t) {}
  [[nodiscard]] const RopeSpec& rope(std::int32_t, std::int32_t layer) { return engine_.rope(layer); }

 private:
  struct Passage {
    std::vector<TokenId> tokens;
    Array<D, T, where> values;
  };
  [[nodiscard]] const Passage& at(std::int32_t i) const { return passages_[static_cast<std::size_t>(i)]; }

  Status make_room(std::span<const TokenId> tokens) {
    const ModelConfig& c = engine_.config();
    Passage passage;
    passage.tokens.assign(tokens.begin(), tokens.end());
    const auto rows = static_cast<std::int64_t>(tokens.size());
    KVBLEND_RETURN_IF_ERROR(passage.values.allocate(2 * c.layers * rows * c.key_values(), "passage"));
    passages_.push_back(std::move(passage));
    return {};
  }

  [[nodiscard]] Plane plane(std::int32_t segment, std::int64_t part) {
    Passage& passage = passages_[static_cast<std::size_t>(segment)];
    const ModelConfig& c = engine_.config();
    const auto rows = static_cast<std::int64_t>(passage.tokens.size());
    return kvblend::dense_plane<typename D::Codec>(
        reinterpret_cast<std::byte*>(passage.values.data() + part * rows * c.key_values()), rows, c.kv_heads,
        c.head_dim);
  }

  D& device_;
  Engine<D>& engine_;
  std::vector<Passage> passages_;
};

}  // namespace cuda_engine
