// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: this budget counts rows by their scores, which the host does not know
//
// A threshold on scores that are made on the device: how many rows it keeps would have to be waited for.
#include <kvblend/cuda.cuh>
#include <kvblend/select/budgets.hpp>
#include <kvblend/select/scores.hpp>

struct Nowhere {
  template <class Functor>
  kvblend::Status for_each(std::int64_t, Functor) const {
    return {};
  }
  kvblend::Status sort(std::span<std::uint64_t>, std::span<std::byte>) const { return {}; }
  std::size_t sort_bytes(std::int64_t) const { return 0; }
  kvblend::Status upload(void*, const void*, std::size_t) const { return {}; }
};

template <class Budget>
auto fusor_with(Budget budget) {
  const kvblend::DeviationSelector<kvblend::KeyDeviation, Budget> selector(kvblend::KeyDeviation{}, budget);
  return kvblend::cuda::Fusor<kvblend::DeviationSelector<kvblend::KeyDeviation, Budget>, Nowhere>(selector);
}

int main() {
  const auto known = fusor_with(kvblend::RatioBudget(0.15));  // compiles
  const auto unknown = fusor_with(kvblend::ThresholdBudget{});
  return known.probing() || unknown.probing();
}
