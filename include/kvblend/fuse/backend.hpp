// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Backend: the bulk operations a blend does itself - rotate, copy, measure, merge, pick. Everything else is the host's.
// PortableBackend is the readable reference; eigen/ has the same operations in other clothes.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/fuse/place.hpp>
#include <kvblend/memory/layouts.hpp>
#include <kvblend/rope/spec.hpp>

#include <concepts>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

namespace detail {
template <class P>
struct StoredProbe {
  [[nodiscard]] P keys(std::int32_t segment) const;
  [[nodiscard]] P values(std::int32_t segment) const;
};
}  // namespace detail

// Operations, over any planes (P source, Q destination):
//   place(spec, runs, stored, Q keys, Q values, computed)
//                                                    every run into the cache: keys rotated, values copied; bits are kept
//                                                    where nothing turns and both codecs are the same. Rows r with
//                                                    computed[r] != 0 may be left out: fresh ones follow
//   deviation(P fresh, which, rows, Q reused, out)   out[i] = ‖fresh row which[i] − reused row rows[i]‖₂ over all heads
//   merge(P fresh, rows, Q destination)              destination row rows[i] = fresh row i
//   top_k(scores, k, scratch, out)                   the k best, ascending, by the rule of select/top_k.hpp; scratch has
//                                                    scores.size() entries
// and, only for a fusor with CommonDrift:
//   drift(P fresh, rows, runs, Q reused, roles, share, moves)
//                                                    the runs' rows move as fuse/drift.hpp says, by their roles; fresh row
//                                                    i is row rows[i], moves are scratch [runs, heads, head_dim]
// Arguments were validated by the caller: they do not fail. Same bits whatever the number of threads.
template <class B, class P, class Q>
concept BackendFor = requires(const B backend, const RopeSpec& spec, std::span<const PlacedRun> runs,
                              const detail::StoredProbe<P>& stored, P source, Q destination, std::span<const Row> rows,
                              std::span<const ActiveIndex> which, std::span<float> out, std::span<const float> scores,
                              std::int32_t k, std::span<std::uint64_t> scratch, std::span<ActiveIndex> picked,
                              std::span<const std::uint8_t> computed) {
  { backend.place(spec, runs, stored, destination, destination, computed) } -> std::same_as<void>;
  { backend.deviation(source, which, rows, destination, out) } -> std::same_as<void>;
  { backend.merge(source, rows, destination) } -> std::same_as<void>;
  { backend.top_k(scores, k, scratch, picked) } -> std::same_as<void>;
};

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
