// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// DeferredExecution: an execution that only writes down what it is told, as a CUDA Graph does, and does it when the
// test says so, as often as it says. Whatever looked at device memory too early, or used host memory again too soon,
// gives other bits. DeferredHost is an engine that is written down likewise.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <vector>
#include "fuse/scene.hpp"

namespace kvblend_test {

using Queue = std::vector<std::function<void()>>;

inline void run_queue(const Queue& queue) {
  for (const auto& work : queue) work();
}

class DeferredExecution {
 public:
  explicit DeferredExecution(Queue* queue = nullptr) : queue_(queue) {}

  template <class Functor>
  kvblend::Status for_each(std::int64_t count, Functor functor) const {
    queue_->emplace_back([count, functor] {
      for (std::int64_t i = count - 1; i >= 0; --i) functor(i);  // any order will do
    });
    return {};
  }
  kvblend::Status sort(std::span<std::uint64_t> keys, std::span<std::byte> scratch) const {
    if (scratch.size() < sort_bytes(static_cast<std::int64_t>(keys.size()))) {
      return kvblend::Status::error(kvblend::StatusCode::insufficient_space, "too little").at("scratch");
    }
    queue_->emplace_back([keys, scratch] {
      std::sort(keys.begin(), keys.end());
      std::fill(scratch.begin(), scratch.end(), std::byte{0xee});
    });
    return {};
  }
  [[nodiscard]] std::size_t sort_bytes(std::int64_t count) const { return static_cast<std::size_t>(8 * count); }
  kvblend::Status upload(void* device, const void* host, std::size_t bytes) const {
    queue_->emplace_back([device, host, bytes] { std::memcpy(device, host, bytes); });
    return {};
  }

 private:
  Queue* queue_;
};

// The tiny host behind a queue; the fresh rows have memory of their own, as their place must be known beforehand.
class DeferredHost {
 public:
  DeferredHost(tiny::FloatHost& host, Queue& queue, std::int32_t rows, const tiny::Config& config)
      : host_(host), queue_(queue), config_(config) {
    for (auto& values : fresh_) values.resize(static_cast<std::size_t>(rows * config.kv_heads * config.head_dim));
  }

  [[nodiscard]] std::int32_t layers() const { return host_.layers(); }
  [[nodiscard]] const kvblend::RopeSpec& rope(std::int32_t layer) const { return host_.rope(layer); }
  [[nodiscard]] tiny::FloatHost::Plane keys(std::int32_t layer) { return host_.keys(layer); }
  [[nodiscard]] tiny::FloatHost::Plane values(std::int32_t layer) { return host_.values(layer); }
  [[nodiscard]] tiny::FloatHost::FreshPlane fresh_keys() { return fresh(0); }
  [[nodiscard]] tiny::FloatHost::FreshPlane fresh_values() { return fresh(1); }

  kvblend::Status begin(const kvblend::Prompt& prompt) { return host_.begin(prompt); }
  kvblend::Status embed(std::span<const kvblend::Row> rows) {
    queue_.emplace_back([this, rows] { static_cast<void>(host_.embed(rows)); });
    return {};
  }
  kvblend::Status project(std::int32_t layer, std::span<const kvblend::Row> rows) {
    rows_ = rows.size();
    queue_.emplace_back([this, layer, rows] {
      static_cast<void>(host_.project(layer, rows));
      std::memcpy(fresh_[0].data(), host_.fresh_keys().base, row_bytes() * rows.size());
      std::memcpy(fresh_[1].data(), host_.fresh_values().base, row_bytes() * rows.size());
    });
    return {};
  }
  kvblend::Status attend(std::int32_t layer, std::span<const kvblend::Row> rows,
                         std::span<const kvblend::ActiveIndex> kept) {
    queue_.emplace_back([this, layer, rows, kept] { static_cast<void>(host_.attend(layer, rows, kept)); });
    return {};
  }
  kvblend::Status attend_and_report(std::int32_t layer, std::span<const kvblend::Row> rows,
                                    std::span<const kvblend::ActiveIndex> kept, std::int32_t first,
                                    std::span<float> mass) {
    queue_.emplace_back([this, layer, rows, kept, first, mass] {
      static_cast<void>(host_.attend_and_report(layer, rows, kept, first, mass));
    });
    return {};
  }
  kvblend::Status commit(std::int32_t rows) { return host_.commit(rows); }
  void abort() { host_.abort(); }

 private:
  [[nodiscard]] std::size_t row_bytes() const {
    return sizeof(float) * static_cast<std::size_t>(config_.kv_heads * config_.head_dim);
  }
  tiny::FloatHost::FreshPlane fresh(std::size_t which) {
    return kvblend::dense_plane<kvblend::F32Codec>(reinterpret_cast<std::byte*>(fresh_[which].data()),
                                                   static_cast<std::int64_t>(rows_), config_.kv_heads,
                                                   config_.head_dim);
  }

  tiny::FloatHost& host_;
  Queue& queue_;
  const tiny::Config& config_;
  std::vector<float> fresh_[2];
  std::size_t rows_ = 0;
};

}  // namespace kvblend_test
