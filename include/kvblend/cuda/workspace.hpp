// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Workspace: the memory of a blend on the device, the caller's. FusorSpace carves it into the arrays that cuda::Fusor
// works in.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/fuse/workspace.hpp>
#include <kvblend/prompt/prompt.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {
namespace cuda {

struct WorkspaceBytes {
  std::size_t host = 0;
  std::size_t device = 0;
};

// Any alignment. What is uploaded lies in `host`: pinned memory, which must not be used again before the work of the
// blend, or of the last replay of a graph it was captured in, is done.
struct Workspace {
  std::span<std::byte> host;
  std::span<std::byte> device;
};

namespace detail {

// Takes arrays from a piece of memory, one after the other, without touching it; or only counts what they would take.
class Carver {
 public:
  Carver() = default;  // counts
  explicit Carver(std::span<std::byte> memory) : memory_(memory), counts_(false) {
    const auto misaligned = reinterpret_cast<std::uintptr_t>(memory.data()) % kAlignment;
    used_ = misaligned == 0 ? 0 : kAlignment - misaligned;
  }

  template <class T>
  void take(std::span<T>& out, std::size_t count) {
    const std::size_t at = used_;
    used_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    if (counts_) return;
    out = fits() ? std::span<T>(reinterpret_cast<T*>(memory_.data() + at), count) : std::span<T>();
  }

  [[nodiscard]] bool fits() const { return counts_ || used_ <= memory_.size(); }
  // What was taken, at the worst alignment.
  [[nodiscard]] std::size_t bytes() const { return used_ + kAlignment; }
  [[nodiscard]] std::span<std::byte> rest() const { return fits() ? memory_.subspan(used_) : std::span<std::byte>(); }

 private:
  static constexpr std::size_t kAlignment = 256;

  std::span<std::byte> memory_;
  std::size_t used_ = 0;
  bool counts_ = true;
};

}  // namespace detail

// Lists that a choice replaces are there twice: what reads the old one may still be queued when the new one is made.
struct FusorSpace {
  std::span<Row> mandatory;
  std::span<Row> outputs;
  std::span<Row> candidates[2];
  std::span<Row> active[2];
  std::span<ActiveIndex> all;  // 0, 1, 2, …: kept rows, where all are
  std::span<ActiveIndex> kept;
  std::span<ActiveIndex> in_active;  // candidates' places among the active rows
  std::span<ActiveIndex> picked;
  std::span<float> key_deviation;
  std::span<float> value_deviation;
  std::span<float> mass;          // by row: attention that the host reports of a probe
  std::span<float> weighed_mass;  // by row: summed over the layers
  std::span<float> stored_by_row;
  std::span<float> stored;
  std::span<float> scores;
  std::span<double> sums;  // of scores, by blocks
  std::span<std::uint64_t> keys;
  std::span<std::uint8_t> computed;  // by row: active
  std::span<float> table_values;

  // Arrays that not every score needs.
  struct Needs {
    bool scores = false;  // else the host chooses
    bool mass = false;
    bool weighed = false;
    bool stored = false;
  };

  void carve(detail::Carver& carver, const Prompt& prompt, const Needs& needs, std::size_t table_floats) {
    const auto rows = static_cast<std::size_t>(prompt.rows());
    const auto candidate_rows = static_cast<std::size_t>(prompt.reused_rows());
    const std::size_t reused = needs.scores ? candidate_rows : 0;
    carver.take(mandatory, rows);
    carver.take(outputs, rows);
    for (std::span<Row>& list : candidates) carver.take(list, candidate_rows);
    for (std::span<Row>& list : active) carver.take(list, rows);
    carver.take(all, rows);
    carver.take(kept, rows);
    carver.take(computed, rows);
    carver.take(table_values, table_floats);
    carver.take(in_active, reused);
    carver.take(picked, reused);
    carver.take(key_deviation, reused);
    carver.take(value_deviation, reused);
    carver.take(mass, needs.mass ? rows : 0);
    carver.take(weighed_mass, needs.weighed ? rows : 0);
    carver.take(stored_by_row, needs.stored ? rows : 0);
    carver.take(stored, needs.stored ? reused : 0);
    carver.take(scores, reused);
    carver.take(sums, reused == 0 ? 0 : kSums + 2 * reused / kSums);
    carver.take(keys, reused);
  }

 private:
  static constexpr std::size_t kSums = 16;
};

}  // namespace cuda
}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
