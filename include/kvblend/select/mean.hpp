// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Means of scores, summed in blocks of a fixed size: whoever sums the blocks, and in whatever order, the mean has the
// same bits.
#pragma once

#include <kvblend/core/arithmetic.hpp>
#include <kvblend/core/bits.hpp>
#include <kvblend/core/config.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

namespace detail {

inline constexpr std::int64_t kMeanBlock = 128;  // values

// Sum and number of finite values, in double. One overflowed row must not hide all others.
struct FiniteSum {
  double sum = 0;
  double count = 0;

  KVBLEND_HOST_DEVICE void add(const FiniteSum& other) {
    sum = rounded_sum(sum, other.sum);
    count += other.count;
  }
  // 0 if there are none.
  [[nodiscard]] KVBLEND_HOST_DEVICE double mean() const { return count == 0 ? 0.0 : sum / count; }
};

[[nodiscard]] KVBLEND_HOST_DEVICE constexpr std::int64_t mean_blocks(std::int64_t count) {
  return (count + kMeanBlock - 1) / kMeanBlock;
}

// The block-th block of `count` values.
[[nodiscard]] KVBLEND_HOST_DEVICE inline FiniteSum block_sum(const float* values, std::int64_t count,
                                                             std::int64_t block) {
  FiniteSum total;
  const std::int64_t end = smaller((block + 1) * kMeanBlock, count);
  for (std::int64_t i = block * kMeanBlock; i < end; ++i) {
    if (is_finite(values[i])) total.add({static_cast<double>(values[i]), 1.0});
  }
  return total;
}

[[nodiscard]] inline double finite_mean(std::span<const float> values) {
  FiniteSum total;
  const auto count = static_cast<std::int64_t>(values.size());
  for (std::int64_t block = 0; block < mean_blocks(count); ++block) total.add(block_sum(values.data(), count, block));
  return total.mean();
}

}  // namespace detail

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
