// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Tier: a place where chunks lie, described by what reading from it costs.
#pragma once

#include <kvblend/core/bits.hpp>
#include <kvblend/core/status.hpp>

#include <cstdint>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// One bit per tier of a list: bit i stands for tiers[i].
using TierMask = std::uint32_t;
inline constexpr std::int32_t kMaxTiers = 32;

struct Tier {
  const char* name = "";
  double bandwidth_bytes_per_s = 0.0;  // >= 0; 0: nothing comes out of it; infinity: bytes cost nothing
  double latency_s = 0.0;              // of one read: one layer of one segment; in [0, 1e9]
  bool in_memory = false;              // KV can be read in place, without loading it first

  Tier() = default;
  Tier(const char* tier_name, double bandwidth, double latency = 0.0, bool memory = false)
      : name(tier_name), bandwidth_bytes_per_s(bandwidth), latency_s(latency), in_memory(memory) {}

  // Whether reads from it come to an end. A byte in thirty years is taken for none.
  [[nodiscard]] bool delivers() const { return bandwidth_bytes_per_s >= 1e-9; }

  // Seconds of one read of a tier that delivers. Nothing is read where there are no bytes.
  [[nodiscard]] double load_seconds(double bytes) const {
    if (bytes <= 0.0) return 0.0;
    if (!is_finite(bandwidth_bytes_per_s)) return latency_s;
    return latency_s + bytes / bandwidth_bytes_per_s;
  }

  // `index` is the tier's place in its list, for the error's `where`.
  [[nodiscard]] Status validate(std::int32_t index) const {
    if (name == nullptr) {
      return Status::error(StatusCode::invalid_argument, "is null").at("tiers[%d].name", index);
    }
    if (is_nan(bandwidth_bytes_per_s) || bandwidth_bytes_per_s < 0.0) {
      return Status::error(StatusCode::invalid_argument, "%g is not >= 0", bandwidth_bytes_per_s)
          .at("tiers[%d].bandwidth_bytes_per_s", index);
    }
    if (is_nan(latency_s) || !(latency_s >= 0.0 && latency_s <= 1e9)) {
      return Status::error(StatusCode::invalid_argument, "%g is not in [0, 1e9]", latency_s)
          .at("tiers[%d].latency_s", index);
    }
    return {};
  }
};

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
