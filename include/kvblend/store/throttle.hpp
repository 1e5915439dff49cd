// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// ThrottledReader: a reader as slow as a link of given bandwidth and latency, for measuring a blend, and what the
// planner made of it, against tiers that a machine does not have.
#pragma once

#include <kvblend/core/bits.hpp>
#include <kvblend/store/reader.hpp>

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <thread>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// Tells the time and waits; another one lets tests run without waiting. Seconds from any start.
template <class P>
concept Pacer = requires(P& pacer, double seconds) {
  { pacer.now() } -> std::same_as<double>;
  { pacer.sleep_until(seconds) } -> std::same_as<void>;
};

struct SteadyPacer {
  [[nodiscard]] double now() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  void sleep_until(double seconds) const {
    std::this_thread::sleep_for(std::chrono::duration<double>((std::max)(0.0, seconds - now())));
  }
};

// The link. Readers that share one share its bandwidth: their reads follow each other.
template <Pacer P = SteadyPacer>
class Link {
 public:
  // Bytes a second (infinite: no limit) and seconds a read. Readers of a link that was not given a bandwidth above 0
  // and a finite latency from 0 on report that.
  Link(double bandwidth, double latency, P pacer = {}) : bandwidth_(bandwidth), latency_(latency), pacer_(pacer) {}

  Status check() const {
    if (is_nan(bandwidth_) || !(bandwidth_ > 0)) {
      return Status::error(StatusCode::invalid_argument, "%g is not above 0", bandwidth_).at("bandwidth");
    }
    if (!is_finite(latency_) || latency_ < 0) {
      return Status::error(StatusCode::invalid_argument, "%g is not finite, or negative", latency_).at("latency");
    }
    return {};
  }

  // Reads by `read`, and returns no sooner than the link would have had `bytes` through. Sleeping too long at one read
  // shortens the next, so that the mean is right for many small reads too.
  template <class Read>
  Status pass(std::size_t bytes, Read&& read) {
    KVBLEND_RETURN_IF_ERROR(check());
    const std::lock_guard<std::mutex> lock(mutex_);
    const double start = pacer_.now();
    KVBLEND_RETURN_IF_ERROR(read());
    const double cost = latency_ + (is_finite(bandwidth_) ? static_cast<double>(bytes) / bandwidth_ : 0.0);
    const double due = start + (std::max)(0.0, cost - overslept_);
    const bool late = pacer_.now() > due;
    if (!late) pacer_.sleep_until(due);
    overslept_ = late ? 0.0 : (std::min)(cost, (std::max)(0.0, pacer_.now() - due));
    return {};
  }

 private:
  double bandwidth_;
  double latency_;
  P pacer_;
  std::mutex mutex_;
  double overslept_ = 0;  // seconds
};

// Both are the caller's and must outlive it.
template <ChunkReader R, Pacer P = SteadyPacer>
class ThrottledReader {
 public:
  ThrottledReader(R& reader, Link<P>& link) : reader_(&reader), link_(&link) {}

  [[nodiscard]] const ChunkIdentity& identity() const { return reader_->identity(); }
  [[nodiscard]] ChunkInfo info() const { return reader_->info(); }
  Status read_layer(std::int32_t layer, std::span<std::byte> destination) {
    return link_->pass(destination.size(),
                       [this, layer, destination] { return reader_->read_layer(layer, destination); });
  }

 private:
  R* reader_;
  Link<P>* link_;
};

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
