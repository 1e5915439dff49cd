// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: kvblend: the back end cannot move.*backend\.merge\(source, rows, destination\)
//
// A back end that lacks an operation: the message names it.
#include "host.hpp"

struct NoMerge {
  template <class Stored, class K, class V>
  void place(const kvblend::RopeSpec&, std::span<const kvblend::PlacedRun>, const Stored&, const K&, const V&,
             std::span<const std::uint8_t>) const {}
  template <class P, class Q>
  void deviation(const P&, Kept, Rows, const Q&, std::span<float>) const {}
  void top_k(std::span<const float>, std::int32_t, std::span<std::uint64_t>, std::span<kvblend::ActiveIndex>) const {}
};

int main() {
  CompleteHost host;
  CompleteSource source;
  using Selector = kvblend::DeviationSelector<kvblend::KeyDeviation, kvblend::RatioBudget>;
  kvblend::LayerwiseFusor<Selector, NoMerge> fusor{Selector()};
  return kvblend::blend(host, source, fusor, kvblend::Prompt(), {}, {}).ok() ? 0 : 1;
}
