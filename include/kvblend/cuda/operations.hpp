// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Operations: what a blend does on the device - move rows, measure deviations, pick the best - queued on an Execution.
// The parts under cuda::Fusor, for engines that want some of them alone.
#pragma once

#include <kvblend/core/arithmetic.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/cuda/choose.hpp>
#include <kvblend/cuda/execution.hpp>
#include <kvblend/cuda/measure.hpp>
#include <kvblend/cuda/move.hpp>
#include <kvblend/fuse/place.hpp>
#include <kvblend/memory/plane.hpp>
#include <kvblend/rope/angles.hpp>
#include <kvblend/rope/rotate.hpp>
#include <kvblend/rope/spec.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {
namespace cuda {

// Planes, their tables of blocks, rotation tables and all lists are device memory; arguments were validated by the
// caller, but for tables of blocks: rows without a block are passed over. `scratch` is device memory that the calls of
// one Operations use in turn.
template <Execution E>
class Operations {
 public:
  Operations() = default;
  explicit Operations(E execution, std::span<std::byte> scratch = {}) : execution_(execution), scratch_(scratch) {}

  // Scratch for top_k of `rows` scores and, where heads > 0, deviation or norms of `rows` rows of so many heads.
  [[nodiscard]] std::size_t scratch_bytes(std::int64_t rows, std::int32_t heads) const {
    const std::size_t squares = static_cast<std::size_t>(rows * heads) * sizeof(double) + alignof(double);
    return kvblend::detail::larger(execution_.sort_bytes(rows), squares);
  }
  [[nodiscard]] const E& execution() const { return execution_; }

  // The rows of `run`, turned by `table`; copied, where that turns nothing. Rows with computed[destination row] != 0
  // are left out (null: none). Rows of one plane that move over each other go in as many launches as that takes.
  template <ReadablePlane P, WritablePlane Q>
  Status shift(const RopeShape& shape, const RotationTable& table, const ShiftRun& run, const P& source,
               const Q& destination, const std::uint8_t* computed = nullptr) const {
    return each_part(run, source, destination, computed, [&](const RunRows& rows, std::int64_t count) {
      if (!table.turns()) return copy(rows, count, source, destination);
      if constexpr (!SelfScalingCodec<typename Q::codec_type>) {
        using Blocks = TurnBlocks<P, Q>;
        if (Blocks::serves(shape)) {
          const Blocks blocks{source, destination, rows, shape, table};
          return execution_.for_each(blocks.items.of(count), blocks);
        }
      }
      if constexpr (kMayStage<P, Q>) {
        return execution_.for_each(count, WholeRows<P, Q, RunRows>{source, destination, rows, shape, table});
      }
      return Status();
    });
  }

  // The same without turning.
  template <ReadablePlane P, WritablePlane Q>
  Status copy(const ShiftRun& run, const P& source, const Q& destination,
              const std::uint8_t* computed = nullptr) const {
    return each_part(run, source, destination, computed,
                     [&](const RunRows& rows, std::int64_t count) { return copy(rows, count, source, destination); });
  }

  // Row i of `fresh` to row rows[i].
  template <ReadablePlane P, WritablePlane Q>
  Status merge(const P& fresh, std::span<const Row> rows, const Q& destination) const {
    return copy(ListedRows{rows.data()}, static_cast<std::int64_t>(rows.size()), fresh, destination);
  }

  // out[i] = ‖fresh row which[i] − reused row rows[i]‖₂ over all heads, with the bits of PortableBackend.
  template <ReadablePlane P, ReadablePlane Q>
  Status deviation(const P& fresh, std::span<const ActiveIndex> which, std::span<const Row> rows, const Q& reused,
                   std::span<float> out) const {
    const auto count = static_cast<std::int64_t>(rows.size());
    const std::int32_t heads = fresh.layout.heads();
    if (count == 0) return {};
    const Result<double*> squares = room_for_squares(count * heads, "deviations");
    KVBLEND_RETURN_IF_ERROR(squares.status);
    KVBLEND_RETURN_IF_ERROR(
        execution_.for_each(count * heads, HeadSquares<P, Q>{fresh, reused, which.data(), rows.data(), squares.value}));
    return execution_.for_each(count, RowRoots{squares.value, heads, out.data()});
  }

  // out[i] = ‖row rows[i]‖₂ over all heads, with the bits of row_norm (select/norm.hpp).
  template <ReadablePlane P>
  Status norms(const P& plane, std::span<const Row> rows, std::span<float> out) const {
    const auto count = static_cast<std::int64_t>(rows.size());
    const std::int32_t heads = plane.layout.heads();
    if (count == 0) return {};
    const Result<double*> squares = room_for_squares(count * heads, "norms");
    KVBLEND_RETURN_IF_ERROR(squares.status);
    KVBLEND_RETURN_IF_ERROR(execution_.for_each(count * heads, HeadNorms<P>{plane, rows.data(), squares.value}));
    return execution_.for_each(count, RowRoots{squares.value, heads, out.data()});
  }

  // The places of the best clamp(k, 0, scores.size()) scores to `out`, ascending, by the rule of select/top_k.hpp.
  // `keys` has scores.size() entries.
  Status top_k(std::span<const float> scores, std::int32_t k, std::span<std::uint64_t> keys,
               std::span<ActiveIndex> out) const {
    const auto count = static_cast<std::int64_t>(scores.size());
    const std::int64_t picks = kvblend::detail::smaller(std::int64_t{k}, count);
    if (picks <= 0) return {};
    if (picks == count) return execution_.for_each(count, CountUp{out.data()});
    KVBLEND_RETURN_IF_ERROR(execution_.for_each(count, RankScores{scores.data(), keys.data()}));
    KVBLEND_RETURN_IF_ERROR(execution_.sort(keys.first(scores.size()), scratch_));
    const std::span<std::uint64_t> best = keys.first(static_cast<std::size_t>(picks));
    KVBLEND_RETURN_IF_ERROR(execution_.for_each(picks, DropRanks{best.data()}));
    KVBLEND_RETURN_IF_ERROR(execution_.sort(best, scratch_));
    return execution_.for_each(picks, StoreIndices{best.data(), out.data()});
  }

 private:
  [[nodiscard]] Result<double*> room_for_squares(std::int64_t count, const char* what) const {
    const auto needed = static_cast<std::size_t>(count) * sizeof(double) + alignof(double);
    if (scratch_.size() < needed) {
      return Status::error(StatusCode::insufficient_space, "%s need %zu bytes, have %zu", what, needed, scratch_.size())
          .at("scratch");
    }
    const auto misaligned = reinterpret_cast<std::uintptr_t>(scratch_.data()) % alignof(double);
    return reinterpret_cast<double*>(scratch_.data() + (alignof(double) - misaligned));
  }

  // Rows for which blocks do not do: a block of the codec may be cut by the rotated part, or a scale be of many values.
  template <class P, class Q>
  static constexpr bool kMayStage =
      SelfScalingCodec<typename Q::codec_type> || P::codec_type::block_values != 1 || Q::codec_type::block_values != 1;

  template <class P, class Q, class Rows>
  Status copy(const Rows& rows, std::int64_t count, const P& source, const Q& destination) const {
    constexpr bool kSame = SameFormat<typename P::codec_type, typename Q::codec_type>;
    if constexpr (SelfScalingCodec<typename Q::codec_type>) {
      bool same = false;
      if constexpr (kSame) same = stores_alike(source.codec, destination.codec);
      if (!same) {
        return execution_.for_each(count,
                                   WholeRows<P, Q, Rows>{source, destination, rows, RopeShape(), RotationTable()});
      }
    }
    if constexpr (kSame || !SelfScalingCodec<typename Q::codec_type>) {
      const CopyBlocks<P, Q, Rows> blocks{source, destination, rows};
      return execution_.for_each(blocks.items.of(count), blocks);
    }
    return Status();
  }

  // All rows of the run at once; or, where some are read from where others are written, as many at a time as do not
  // reach each other, in the order in which none is overwritten before it is read.
  template <class P, class Q, class Use>
  Status each_part(const ShiftRun& run, const P& source, const Q& destination, const std::uint8_t* computed,
                   const Use& use) const {
    RunRows rows{0, run.source, run.destination.value, computed};
    if (run.count <= 0) return {};
    if (!run_overlaps(run, source, destination)) return use(rows, std::int64_t{run.count});
    const std::int64_t step = rows.destinations - rows.sources;
    const std::int64_t part = step > 0 ? step : -step;
    for (std::int64_t left = run.count; left > 0;) {
      const std::int64_t count = kvblend::detail::smaller(part, left);
      rows.first = step > 0 ? left - count : run.count - left;
      KVBLEND_RETURN_IF_ERROR(use(rows, count));
      left -= count;
    }
    return {};
  }

  E execution_{};
  std::span<std::byte> scratch_;
};

// A layer's cached segments: keys turned, values copied, but for rows with computed[row] != 0 (null: none).
template <Execution E, class Stored, WritablePlane Keys, WritablePlane Values>
Status place_runs(const Operations<E>& operations, const RopeShape& shape, std::span<const PlacedRun> runs,
                  const Stored& stored, const Keys& keys, const Values& values, const std::uint8_t* computed) {
  if (any_overlaps(runs, stored, keys, values)) computed = nullptr;  // what lies there is yet to be read
  for (const PlacedRun& placed : runs) {
    KVBLEND_RETURN_IF_ERROR(
        operations.shift(shape, placed.table, placed.run, stored.keys(placed.segment), keys, computed));
    KVBLEND_RETURN_IF_ERROR(operations.copy(placed.run, stored.values(placed.segment), values, computed));
  }
  return {};
}

}  // namespace cuda
}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
