// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// CostModel: how long a layer takes for a set of rows. LinearCostModel is the one we ship; calibration.hpp fits it.
#pragma once

#include <kvblend/core/bits.hpp>
#include <kvblend/core/status.hpp>

#include <concepts>
#include <cstdint>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// A cost model is a copyable struct with
//   double seconds(rows, context) const   one layer, for `rows` rows spread evenly over a prompt of `context` tokens,
//                                         each attending to all positions <= its own; finite, >= 0, never falling in
//                                         either argument
//   Status validate() const               names the field that is out of range
template <class C>
concept CostModel = requires(const C cost, std::int32_t rows, std::int32_t context) {
  { cost.seconds(rows, context) } -> std::same_as<double>;
  { cost.validate() } -> std::same_as<Status>;
};

// fixed + per_row·rows + per_pair·rows·context + per_context·context: launches, matrix products, attention, and bringing
// the context's reused rows into the cache. A row of a causal prompt sees half of the context in the mean; per_pair holds
// that factor.
struct LinearCostModel {
  double fixed_s = 0.0;        // a layer, whatever the rows
  double per_row_s = 0.0;      // a row
  double per_pair_s = 0.0;     // a row and a token of context
  double per_context_s = 0.0;  // a token of context

  LinearCostModel() = default;
  LinearCostModel(double fixed, double per_row, double per_pair, double per_context = 0.0)
      : fixed_s(fixed), per_row_s(per_row), per_pair_s(per_pair), per_context_s(per_context) {}

  [[nodiscard]] double seconds(std::int32_t rows, std::int32_t context) const {
    if (rows <= 0) return 0.0;
    return fixed_s + rows * (per_row_s + per_pair_s * context) + per_context_s * context;
  }

  [[nodiscard]] Status validate() const {
    KVBLEND_RETURN_IF_ERROR(check(fixed_s, "fixed_s"));
    KVBLEND_RETURN_IF_ERROR(check(per_row_s, "per_row_s"));
    KVBLEND_RETURN_IF_ERROR(check(per_pair_s, "per_pair_s"));
    KVBLEND_RETURN_IF_ERROR(check(per_context_s, "per_context_s"));
    if (fixed_s > 0.0 || per_row_s > 0.0 || per_pair_s > 0.0 || per_context_s > 0.0) return {};
    return Status::error(StatusCode::invalid_argument, "fixed_s, per_row_s, per_pair_s and per_context_s are all 0")
        .at("cost");
  }

 private:
  static Status check(double x, const char* field) {
    // Above 1e12 s products with rows and context could overflow, and nobody waits that long.
    if (is_finite(x) && x >= 0.0 && x <= 1e12) return {};
    return Status::error(StatusCode::invalid_argument, "%g is not in [0, 1e12]", x).at("cost.%s", field);
  }
};

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
