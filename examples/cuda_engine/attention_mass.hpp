// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Functors that sum attention weights by the cached row they are paid to. Each sum has one order, whoever makes it and
// when, and is made in double.
#pragma once

#include <kvblend/core/config.hpp>

#include <cstdint>

namespace cuda_engine {

// Weights of a chunk of queries, [kv_heads, queries, stride], summed over the queries of each key head, into the row of
// its first. An item is a column of a key head: its neighbours read what lies beside it.
struct SumQueries {
  float* weights;
  std::int64_t queries;  // of a key head
  std::int64_t stride;
  std::int64_t columns;

  KVBLEND_HOST_DEVICE void operator()(std::int64_t item) const {
    const std::int64_t head = item / columns;
    float* const column = weights + head * queries * stride + (item - head * columns);
    double sum = 0;
    for (std::int64_t query = 0; query < queries; ++query) sum += static_cast<double>(column[query * stride]);
    *column = static_cast<float>(sum);
  }
};

// mass[column] += those sums of all key heads.
struct AddHeads {
  const float* sums;
  std::int64_t head_stride;
  std::int32_t kv_heads;
  float* mass;

  KVBLEND_HOST_DEVICE void operator()(std::int64_t column) const {
    double sum = 0;
    for (std::int32_t head = 0; head < kv_heads; ++head) sum += static_cast<double>(sums[head * head_stride + column]);
    mass[column] += static_cast<float>(sum);
  }
};

}  // namespace cuda_engine
