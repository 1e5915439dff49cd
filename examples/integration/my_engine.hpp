// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What an engine's own code would be: a KV cache and a transformer that can run one layer for any rows. Here the
// "transformer" computes nothing worth reading, so that the example is about kvblend; examples/eigen_engine is a real one.
#pragma once

#include <kvblend/kvblend.hpp>

#include <algorithm>
#include <cstddef>
#include <vector>

namespace my {

inline constexpr int kLayers = 4, kHeads = 2, kHeadDim = 64, kMaxRows = 256;
inline constexpr std::size_t kRowValues = std::size_t{kHeads} * kHeadDim;

class Engine {
 public:
  using Plane = kvblend::ContiguousPlane<kvblend::F32Codec>;

  Engine()
      : rope_(kvblend::plain_rope(kHeadDim, 10000.0, kvblend::RopePairing::neox).value),
        cache_(2 * kLayers, std::vector<float>(kMaxRows * kRowValues)) {}

  // The LayerwiseHost concept of kvblend/fuse/host.hpp.
  [[nodiscard]] std::int32_t layers() const { return kLayers; }
  [[nodiscard]] const kvblend::RopeSpec& rope(std::int32_t) const { return rope_; }
  kvblend::Status begin(const kvblend::Prompt& prompt) {
    if (prompt.rows() <= kMaxRows) return {};
    return kvblend::Status::error(kvblend::StatusCode::insufficient_space, "more than %d rows", kMaxRows).at("prompt");
  }
  kvblend::Status embed(std::span<const kvblend::Row> rows) {
    fresh_keys_.assign(rows.size() * kRowValues, 0.5f);
    fresh_values_.assign(rows.size() * kRowValues, 0.25f);
    return {};
  }
  kvblend::Status project(std::int32_t, std::span<const kvblend::Row>) { return {}; }
  Plane fresh_keys() { return plane(fresh_keys_); }
  Plane fresh_values() { return plane(fresh_values_); }
  Plane keys(std::int32_t layer) { return plane(cache_[static_cast<std::size_t>(2 * layer)]); }
  Plane values(std::int32_t layer) { return plane(cache_[static_cast<std::size_t>(2 * layer + 1)]); }
  kvblend::Status attend(std::int32_t, std::span<const kvblend::Row>, std::span<const kvblend::ActiveIndex>) {
    return {};
  }
  kvblend::Status commit(std::int32_t rows) {
    cached_rows_ = rows;
    return {};
  }
  void abort() {}

  [[nodiscard]] std::int32_t cached_rows() const { return cached_rows_; }

 private:
  static Plane plane(std::vector<float>& values) {
    const auto rows = static_cast<std::int64_t>(values.size() / kRowValues);
    return kvblend::dense_plane<kvblend::F32Codec>(reinterpret_cast<std::byte*>(values.data()), rows, kHeads, kHeadDim);
  }

  kvblend::RopeSpec rope_;
  std::vector<std::vector<float>> cache_;  // keys of layer 0, values of layer 0, keys of layer 1, …
  std::vector<float> fresh_keys_, fresh_values_;
  std::int32_t cached_rows_ = 0;
};

// KV of a passage as the engine kept it: the KvSource concept.
class StoredKv {
 public:
  explicit StoredKv(const kvblend::RopeSpec& rope, std::size_t tokens)
      : rope_(rope), values_(tokens * kRowValues, 1.0f) {}

  kvblend::Status wait(std::int32_t) { return {}; }  // it is in memory already
  void release(std::int32_t) {}
  auto keys(std::int32_t, std::int32_t) { return plane(); }
  auto values(std::int32_t, std::int32_t) { return plane(); }
  const kvblend::RopeSpec& rope(std::int32_t, std::int32_t) { return rope_; }

 private:
  Engine::Plane plane() {
    return kvblend::dense_plane<kvblend::F32Codec>(reinterpret_cast<std::byte*>(values_.data()),
                                                   static_cast<std::int64_t>(values_.size() / kRowValues), kHeads,
                                                   kHeadDim);
  }

  kvblend::RopeSpec rope_;
  std::vector<float> values_;
};

}  // namespace my
