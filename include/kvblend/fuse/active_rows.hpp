// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// ActiveRows: which rows of the prompt run at the current layer, which of those go on, and which of them a selector may
// choose. LayerwiseFusor's bookkeeping, without any arithmetic on keys or values.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/fuse/drift.hpp>
#include <kvblend/fuse/workspace.hpp>
#include <kvblend/prompt/prompt.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

class ActiveRows {
 public:
  // Marks the mandatory rows, fresh ones and `outputs`, and lists the candidates, the reused rows besides them.
  // Works in the arrays of `space`. Errors name the entry of `outputs` that does not ascend, is outside or is resident.
  Status begin(const Prompt& prompt, std::span<const Row> outputs, const FusorWorkspace& space);

  [[nodiscard]] std::span<const Row> active() const { return active_; }
  [[nodiscard]] std::span<const ActiveIndex> kept() const { return kept_; }  // into active()
  // The rows to choose from, ascending; in_active() are their places in active() (after list_active_candidates()).
  [[nodiscard]] std::span<const Row> candidates() const { return space_.candidate_rows.first(candidates_); }
  [[nodiscard]] std::span<const ActiveIndex> in_active() const { return space_.candidate_active.first(candidates_); }

  // Where among the mandatory rows a probe starts to report: at the first one behind all reused rows, or the last.
  [[nodiscard]] std::int32_t first_probe_row() const { return first_probe_row_; }
  // Reused rows among those that are kept.
  [[nodiscard]] std::int32_t kept_reused() const;
  // Whether reused rows are left that are not active.
  [[nodiscard]] bool some_reused_rest() const { return active_.size() < to_compute_; }
  // By row: reused rows in [first, end) that are not active move, those that are tell where to, but for outputs.
  [[nodiscard]] std::span<const DriftRole> drift_roles(Row first, Row end);

  // The active set of the first layer: every row that is not exact, or the mandatory rows and the picked candidates.
  void start_with_all();
  void start_with_picked(std::span<const ActiveIndex> picked);

  void list_active_candidates();
  // Of the active rows go on: all; the mandatory ones and the picked candidates; those kept so far that are outputs.
  void keep_all();
  void keep_picked(std::span<const ActiveIndex> picked);
  void keep_outputs();
  // What was kept is the active set now.
  void narrow();
  // The active set keeps its mandatory rows and, of the others, those that are among the picked candidates.
  void narrow_to(std::span<const ActiveIndex> picked);

 private:
  [[nodiscard]] bool is_mandatory(Row row) const { return space_.mandatory[static_cast<std::size_t>(row.value)] != 0; }

  const Prompt* prompt_ = nullptr;
  FusorWorkspace space_;
  std::span<const Row> outputs_;
  std::span<Row> active_;
  std::span<ActiveIndex> kept_;
  std::size_t candidates_ = 0;
  std::size_t to_compute_ = 0;  // rows that full recompute would run: mandatory ones and all candidates
  std::int32_t first_probe_row_ = 0;
};

// ---------------------------------------------------------------------------------------------------------------------

inline Status ActiveRows::begin(const Prompt& prompt, std::span<const Row> outputs, const FusorWorkspace& space) {
  prompt_ = &prompt;
  space_ = space;
  outputs_ = outputs;
  active_ = {};
  kept_ = {};
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const Row row = outputs[i];
    const auto error = [i, row](StatusCode code, const char* what) {
      return Status::error(code, "row %d %s", row.value, what).at("outputs[%zu]", i);
    };
    if (row.value < 0 || row.value >= prompt.rows()) return error(StatusCode::out_of_range, "is not in the prompt");
    if (i > 0 && row <= outputs[i - 1]) return error(StatusCode::invalid_argument, "does not ascend");
    if (row.value < prompt.resident_rows()) {
      return error(StatusCode::invalid_argument, "is resident: pass its token as fresh to have it computed");
    }
    space_.mandatory[static_cast<std::size_t>(row.value)] = 1;
  }

  candidates_ = 0;
  std::int32_t mandatory_rows = 0;
  std::int32_t last_reused = -1;
  for (const Segment& segment : prompt.segments()) {
    for (Row row = segment.first_row; row < segment.end_row(); ++row) {
      auto& mandatory = space_.mandatory[static_cast<std::size_t>(row.value)];
      if (segment.kind == SegmentKind::fresh) mandatory = 1;
      mandatory_rows += mandatory;
      if (segment.kind != SegmentKind::cached || segment.exact) continue;
      last_reused = row.value;
      if (mandatory == 0) space_.candidate_rows[candidates_++] = row;
    }
  }
  to_compute_ = static_cast<std::size_t>(mandatory_rows) + candidates_;
  first_probe_row_ = 0;
  for (std::int32_t row = 0; row <= last_reused; ++row) first_probe_row_ += is_mandatory(Row(row)) ? 1 : 0;
  // A prompt that ends in reused rows has no question behind them: its last mandatory row asks.
  if (first_probe_row_ == mandatory_rows && first_probe_row_ > 0) --first_probe_row_;
  return {};
}

inline void ActiveRows::start_with_all() {
  std::size_t count = 0;
  for (Row row; row.value < prompt_->rows(); ++row) {
    if (row >= prompt_->exact_end() || is_mandatory(row)) space_.active[count++] = row;
  }
  active_ = space_.active.first(count);
}

inline void ActiveRows::start_with_picked(std::span<const ActiveIndex> picked) {
  std::size_t count = 0;
  std::size_t next = 0;
  for (Row row; row.value < prompt_->rows(); ++row) {
    const bool chosen =
        next < picked.size() && space_.candidate_rows[static_cast<std::size_t>(picked[next].value)] == row;
    if (chosen) ++next;
    if (chosen || is_mandatory(row)) space_.active[count++] = row;
  }
  active_ = space_.active.first(count);
}

inline void ActiveRows::list_active_candidates() {
  candidates_ = 0;
  for (std::size_t i = 0; i < active_.size(); ++i) {
    if (is_mandatory(active_[i])) continue;
    space_.candidate_rows[candidates_] = active_[i];
    space_.candidate_active[candidates_++] = ActiveIndex(static_cast<std::int32_t>(i));
  }
}

inline void ActiveRows::keep_all() {
  kept_ = space_.kept.first(active_.size());
  for (std::size_t i = 0; i < kept_.size(); ++i) kept_[i] = ActiveIndex(static_cast<std::int32_t>(i));
}

inline void ActiveRows::keep_picked(std::span<const ActiveIndex> picked) {
  std::size_t count = 0;
  std::size_t next = 0;
  for (std::size_t i = 0; i < active_.size(); ++i) {
    const ActiveIndex index(static_cast<std::int32_t>(i));
    const bool chosen =
        next < picked.size() && space_.candidate_active[static_cast<std::size_t>(picked[next].value)] == index;
    if (chosen) ++next;
    if (chosen || is_mandatory(active_[i])) space_.kept[count++] = index;
  }
  kept_ = space_.kept.first(count);
}

inline void ActiveRows::keep_outputs() {
  std::size_t count = 0;
  std::size_t next = 0;
  for (const ActiveIndex index : kept_) {
    if (next == outputs_.size() || outputs_[next] != active_[static_cast<std::size_t>(index.value)]) continue;
    ++next;
    kept_[count++] = index;
  }
  kept_ = kept_.first(count);
}

inline void ActiveRows::narrow() {
  for (std::size_t i = 0; i < kept_.size(); ++i) active_[i] = active_[static_cast<std::size_t>(kept_[i].value)];
  active_ = active_.first(kept_.size());
}

inline void ActiveRows::narrow_to(std::span<const ActiveIndex> picked) {
  std::size_t count = 0;
  std::size_t next = 0;
  const auto candidate = [this, picked](std::size_t i) {
    return space_.candidate_rows[static_cast<std::size_t>(picked[i].value)];
  };
  for (const Row row : active_) {
    while (next < picked.size() && candidate(next) < row) ++next;
    const bool chosen = next < picked.size() && candidate(next) == row;
    if (chosen || is_mandatory(row)) active_[count++] = row;
  }
  active_ = active_.first(count);
}

inline std::span<const DriftRole> ActiveRows::drift_roles(Row first, Row end) {
  const auto exact = static_cast<std::size_t>(prompt_->exact_end().value);
  std::fill(space_.roles.begin(), space_.roles.end(), DriftRole::none);
  for (auto row = (std::max)(exact, static_cast<std::size_t>(first.value)); row < static_cast<std::size_t>(end.value);
       ++row) {
    if (space_.mandatory[row] == 0) space_.roles[row] = DriftRole::moves;
  }
  for (const Row row : active_) {
    DriftRole& role = space_.roles[static_cast<std::size_t>(row.value)];
    if (role == DriftRole::moves) role = DriftRole::tells;
  }
  return space_.roles;
}

inline std::int32_t ActiveRows::kept_reused() const {
  std::int32_t count = 0;
  for (const ActiveIndex index : kept_) count += is_mandatory(active_[static_cast<std::size_t>(index.value)]) ? 0 : 1;
  return count;
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
