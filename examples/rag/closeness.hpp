// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// How close one prediction of the next token is to another, both as logits over the vocabulary.
#pragma once

#include <kvblend/core/types.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>

namespace rag {

inline kvblend::TokenId most_likely(std::span<const float> logits) {
  return static_cast<kvblend::TokenId>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

// Kullback-Leibler divergence of softmax(got) from softmax(truth), in nats.
inline double divergence(std::span<const float> truth, std::span<const float> got) {
  const auto log_sum = [](std::span<const float> logits) {
    const double largest = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (const float logit : logits) sum += std::exp(logit - largest);
    return largest + std::log(sum);
  };
  const double truth_sum = log_sum(truth);
  const double got_sum = log_sum(got);
  double kl = 0;
  for (std::size_t i = 0; i < truth.size(); ++i) {
    const double log_p = truth[i] - truth_sum;
    kl += std::exp(log_p) * (log_p - (got[i] - got_sum));
  }
  return (std::max)(kl, 0.0);  // rounding may leave -1e-16
}

}  // namespace rag
