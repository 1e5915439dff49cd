// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: this score writes places, which no budget can count by
//
// A threshold on a floor's places, all of which are negative: it would keep nothing.
#include <kvblend/select/budgets.hpp>
#include <kvblend/select/chunk_rules.hpp>
#include <kvblend/select/selector.hpp>

template <class Budget>
auto floor_with(Budget budget) {
  using Score = kvblend::SinksFirst<kvblend::ChunkFloor<kvblend::StoredScore<>>>;
  return kvblend::DeviationSelector<Score, Budget>(Score(), budget);
}

int main() {
  const auto shares = floor_with(kvblend::RatioBudget(0.15));  // compiles
  const auto threshold = floor_with(kvblend::ThresholdBudget(0.5f));
  return shares.first_layer() + threshold.first_layer();
}
