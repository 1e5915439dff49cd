// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What is asked of the planes of a blend before anything is written: one shape, rows with memory, ropes that go
// together.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/fuse/place.hpp>
#include <kvblend/memory/plane.hpp>
#include <kvblend/prompt/prompt.hpp>
#include <kvblend/rope/can_shift.hpp>
#include <kvblend/rope/spec.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// The model's.
struct BlendShape {
  std::int32_t layers = 0;
  std::int32_t head_dim = 0;  // of keys; the largest, where layers differ
};

[[nodiscard]] inline Status validate(const BlendShape& shape) {
  if (shape.layers <= 0) return Status::error(StatusCode::invalid_argument, "is %d", shape.layers).at("layers");
  if (shape.head_dim > 0 && shape.head_dim <= kMaxHeadDim) return {};
  return Status::error(StatusCode::invalid_argument, "is %d, must be in [1, %d]", shape.head_dim, kMaxHeadDim)
      .at("head_dim");
}

namespace detail {

// Whether `count` rows of `plane` from `first` on can be moved into `cache`.
template <class Planes, ReadablePlane P, WritablePlane Cache>
Status check_source(const P& plane, std::int64_t first, std::int64_t count, const Cache& cache, const char* name) {
  KVBLEND_RETURN_IF_ERROR(Planes::check_shape(plane, name));
  if (plane.layout.heads() != cache.layout.heads() || plane.layout.head_dim() != cache.layout.head_dim()) {
    return Status::error(StatusCode::mismatch, "%d heads of %d values, the cache has %d of %d", plane.layout.heads(),
                         plane.layout.head_dim(), cache.layout.heads(), cache.layout.head_dim())
        .at("%s", name);
  }
  return Planes::check_stored_rows(plane, first, count, name);
}

template <class Planes, class Source, class Keys, class Values>
Status check_segment(const Prompt& prompt, std::int32_t index, std::int32_t layer, const RopeSpec& spec, Source& source,
                     const Keys& keys, const Values& values) {
  const Segment& segment = prompt.segments()[static_cast<std::size_t>(index)];
  const std::int64_t first = segment.chunk_offset;
  KVBLEND_RETURN_IF_ERROR(check_source<Planes>(source.keys(index, layer), first, segment.size(), keys, "stored keys"));
  KVBLEND_RETURN_IF_ERROR(
      check_source<Planes>(source.values(index, layer), first, segment.size(), values, "stored values"));
  KVBLEND_RETURN_IF_ERROR(can_shift(source.rope(index, layer), spec).status);
  if (spec.head_dim == keys.layout.head_dim()) return {};
  return Status::error(StatusCode::mismatch, "is %d, the cache's keys have %d", spec.head_dim, keys.layout.head_dim())
      .at("rope head_dim");
}

// Whether a layer's cached segments, `runs`, can be placed into the cache.
template <class Planes, class Source, class Keys, class Values>
Status check_place(const Prompt& prompt, std::span<const PlacedRun> runs, std::int32_t layer, const RopeSpec& spec,
                   Source& source, const Keys& keys, const Values& values) {
  const std::int32_t resident = prompt.resident_rows();
  KVBLEND_RETURN_IF_ERROR(Planes::check_shape(keys, "cache keys"));
  KVBLEND_RETURN_IF_ERROR(Planes::check_shape(values, "cache values"));
  KVBLEND_RETURN_IF_ERROR(Planes::check_rows(keys, resident, prompt.rows() - resident, "cache keys"));
  KVBLEND_RETURN_IF_ERROR(Planes::check_rows(values, resident, prompt.rows() - resident, "cache values"));
  for (const PlacedRun& placed : runs) {
    if (Status status = check_segment<Planes>(prompt, placed.segment, layer, spec, source, keys, values);
        !status.ok()) {
      return Status::error(status.code(), "%s: %s", status.where(), status.message())
          .at("segment %d, layer %d", placed.segment, layer);
    }
  }
  return {};
}

// Whether the fresh planes have a row for each of `active` rows.
template <class Planes, class FreshKeys, class FreshValues, class Keys, class Values>
Status check_fresh(std::int64_t active, const FreshKeys& fresh_keys, const FreshValues& fresh_values, const Keys& keys,
                   const Values& values) {
  if (active == 0) return {};
  KVBLEND_RETURN_IF_ERROR(check_source<Planes>(fresh_keys, 0, active, keys, "fresh keys"));
  return check_source<Planes>(fresh_values, 0, active, values, "fresh values");
}

// Whether rows that a host says it ran ascend in the part [first, end) of a prompt.
[[nodiscard]] inline Status check_part(Row first, Row end, std::span<const Row> rows, std::int32_t prompt_rows) {
  if (first < Row(0) || end < first || end > Row(prompt_rows)) {
    return Status::error(StatusCode::out_of_range, "[%d, %d) of %d rows", first.value, end.value, prompt_rows)
        .at("settle part");
  }
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] >= (i == 0 ? first : rows[i - 1] + 1) && rows[i] < end) continue;
    return Status::error(StatusCode::out_of_range, "is %d, the part is [%d, %d) and rows ascend", rows[i].value,
                         first.value, end.value)
        .at("settle rows[%zu]", i);
  }
  return {};
}

}  // namespace detail

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
