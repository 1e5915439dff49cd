// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: kvblend: the back end cannot move.*backend\.merge\(source, rows, destination\)
//
// A back end that lacks an operation: the message names it.
#include "host.hpp"

struct NoMerge {
  template <class P, class Q>
  void shift(const kvblend::RopeSpec&, const kvblend::RotationTable&, const kvblend::ShiftRun&, const P&,
             const Q&) const {}
  template <class P, class Q>
  void copy(const kvblend::ShiftRun&, const P&, const Q&) const {}
  template <class P, class Q>
  void deviation(const P&, Kept, Rows, const Q&, std::span<float>) const {}
  void top_k(std::span<const float>, std::int32_t, std::span<std::uint64_t>, std::span<kvblend::ActiveIndex>) const {}
};

int main() {
  CompleteHost host;
  CompleteSource source;
  using Selector = kvblend::DeviationSelector<kvblend::KeyDeviation, kvblend::RatioBudget>;
  kvblend::LayerwiseFusor<Selector, NoMerge> fusor{Selector()};
  return kvblend::blend(host, source, fusor, kvblend::Prompt(), 8, {}, {}).ok() ? 0 : 1;
}
