// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Pipeline: when each layer is ready and done while the loader runs ahead of the compute.
#pragma once

#include <kvblend/plan/plan.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// Fills ready_s and done_s from load_s and recompute_s, and returns the last done_s (0 without layers). One loader reads
// the layers in order while one compute runs them in order:
//   ready(l) = max(ready(l-1), done(l - staging)) + load(l)
//   done(l)  = max(done(l-1), ready(l), compute_from) + recompute(l)
// `staging` is how many layers may be in memory before they are done; 0: all of them. With equal layers and staging 0
// or >= 2 this is load + (L - 1)·max(load, recompute) + recompute. compute_from: no layer runs before that time.
inline double run_pipeline(std::span<LayerPlan> layers, std::int32_t staging, double compute_from = 0.0) {
  double loader_free = 0.0;
  double compute_free = compute_from;
  const auto ahead = static_cast<std::size_t>(staging);
  for (std::size_t l = 0; l < layers.size(); ++l) {
    if (staging > 0 && l >= ahead) loader_free = (std::max)(loader_free, layers[l - ahead].done_s);
    layers[l].ready_s = loader_free + layers[l].load_s;
    layers[l].done_s = (std::max)(compute_free, layers[l].ready_s) + layers[l].recompute_s;
    loader_free = layers[l].ready_s;
    compute_free = layers[l].done_s;
  }
  return layers.empty() ? 0.0 : compute_free;
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
