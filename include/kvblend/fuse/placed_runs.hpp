// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// PlacedRuns: the cached segments of one prompt on their way into the cache, with the rotation tables that serve every
// layer of the same ropes. LayerwiseFusor's bookkeeping of what place() moves.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/fuse/place.hpp>
#include <kvblend/fuse/workspace.hpp>
#include <kvblend/prompt/prompt.hpp>
#include <kvblend/rope/angles.hpp>
#include <kvblend/rope/rotate.hpp>
#include <kvblend/rope/spec.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

template <AngleRule Angles>
class PlacedRuns {
 public:
  // Lists the cached segments that have rows, in the arrays of `space`. There are no tables yet.
  void begin(const Prompt& prompt, const FusorWorkspace& space);

  [[nodiscard]] bool empty() const { return runs_.empty(); }
  [[nodiscard]] std::span<const PlacedRun> all() const { return runs_; }

  // For back ends that read tables elsewhere than on the host:
  //   make_tables_in(values)   where refresh_tables() makes tables from now on
  //   new_tables()             those that its last call made; none, if it kept the old ones
  //   use_copy(copy)           has the runs read a copy of their tables, which starts there, until its next call
  void make_tables_in(std::span<float> values) { values_ = values; }
  [[nodiscard]] std::span<const float> new_tables() const { return new_tables_; }
  void use_copy(const float* copy);

  // Gives every run the table that turns its keys of `layer` from the source's spec to `spec`. Tables serve every layer
  // with the same ropes; layers without rope turn nothing and leave them as they are.
  // Errors: the tables do not fit the workspace; the ropes are no pair to convert.
  template <class Source>
  Status refresh_tables(std::int32_t layer, const RopeSpec& spec, Source& source);

 private:
  // Whether the tables were made from the same frequencies, stored and wanted.
  template <class Source>
  bool tables_hold(std::int32_t layer, const RopeSpec& spec, Source& source) const;

  std::span<PlacedRun> runs_;
  std::span<RotationTable> tables_;
  std::span<float> values_;  // room for all tables
  std::span<const float> new_tables_;
  const float* table_values_ = nullptr;  // of the first table
  std::int32_t table_layer_ = -1;        // whose ropes the tables were made from; -1: there are none
  RopeSpec table_spec_;                  // the host's then
};

// ---------------------------------------------------------------------------------------------------------------------

template <AngleRule Angles>
void PlacedRuns<Angles>::begin(const Prompt& prompt, const FusorWorkspace& space) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < prompt.segments().size(); ++i) {
    const Segment& segment = prompt.segments()[i];
    if (segment.kind != SegmentKind::cached || segment.size() == 0) continue;
    PlacedRun& placed = space.runs[count++];
    placed.segment = static_cast<std::int32_t>(i);
    placed.run = {segment.first_row, segment.chunk_offset, segment.size(), segment.old_position(segment.first_row),
                  segment.first_position};
  }
  runs_ = space.runs.first(count);
  tables_ = space.tables;
  values_ = space.table_values;
  new_tables_ = {};
  table_layer_ = -1;
}

template <AngleRule Angles>
template <class Source>
bool PlacedRuns<Angles>::tables_hold(std::int32_t layer, const RopeSpec& spec, Source& source) const {
  if (table_layer_ < 0 || !(spec == table_spec_)) return false;
  for (const PlacedRun& placed : runs_) {
    if (!same_frequencies(source.rope(placed.segment, layer), source.rope(placed.segment, table_layer_))) return false;
  }
  return true;
}

template <AngleRule Angles>
template <class Source>
Status PlacedRuns<Angles>::refresh_tables(std::int32_t layer, const RopeSpec& spec, Source& source) {
  const bool turns = spec.rotary_dim != 0;
  new_tables_ = {};
  if (turns && !tables_hold(layer, spec, source)) {
    table_layer_ = -1;
    std::int64_t needed = 0;
    for (const PlacedRun& placed : runs_) {
      needed += RotationTable::size<Angles>(source.rope(placed.segment, layer), spec, placed.run);
    }
    std::span<float> storage = values_;
    if (needed > static_cast<std::int64_t>(storage.size())) {
      return Status::error(StatusCode::insufficient_space,
                           "rotation tables need %lld floats, have %zu: chunks stored by other frequencies take "
                           "RopeTables::per_row",
                           static_cast<long long>(needed), storage.size())
          .at("workspace");
    }
    for (std::size_t i = 0; i < runs_.size(); ++i) {
      const RopeSpec& stored = source.rope(runs_[i].segment, layer);
      Result<RotationTable> table = RotationTable::make<Angles>(stored, spec, runs_[i].run, storage);
      KVBLEND_RETURN_IF_ERROR(table.status);
      tables_[i] = table.value;
      storage = storage.subspan(static_cast<std::size_t>(RotationTable::size<Angles>(stored, spec, runs_[i].run)));
    }
    table_layer_ = layer;
    table_spec_ = spec;
    table_values_ = values_.data();
    new_tables_ = values_.first(static_cast<std::size_t>(needed));
  }
  for (std::size_t i = 0; i < runs_.size(); ++i) runs_[i].table = turns ? tables_[i] : RotationTable{};
  return {};
}

template <AngleRule Angles>
void PlacedRuns<Angles>::use_copy(const float* copy) {
  for (PlacedRun& placed : runs_) {
    if (placed.table.turns()) placed.table = placed.table.moved_to(copy + (placed.table.cosines(0) - table_values_));
  }
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
