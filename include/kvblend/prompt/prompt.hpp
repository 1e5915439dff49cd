// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Prompt: segments of fresh, cached and resident tokens laid out as one space of rows. It says what each later part
// needs to know of a row: its position, where its KV comes from, and whether it must be recomputed.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>

#include <cstdint>
#include <limits>
#include <ranges>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// What a prompt must know of a chunk whose KV was computed earlier. Views into the owner's memory (store/ or the
// engine's own), which must outlive the Prompt.
struct ChunkInfo {
  std::span<const TokenId> tokens;
  Position first_position;           // where tokens[0] stood when the KV was computed
  std::span<const TokenId> context;  // what stood before it then, from position 0; empty: it was computed alone
  std::span<const float> scores;     // one per token, by a before-load selector's recipe; empty: none stored
};

enum class SegmentKind : std::uint8_t {
  fresh,     // never seen: computed in full
  cached,    // KV comes from a chunk, is moved to its new position and partly recomputed
  resident,  // already in the host's cache at its place, exact; only at the front of a prompt
};

// Stands for "directly behind the segment before" (position 0 for the first).
inline constexpr Position kNextPosition{(std::numeric_limits<std::int32_t>::min)()};

// A run of consecutive tokens at consecutive positions. Rows are numbered through all segments in order, from 0.
struct Segment {
  SegmentKind kind = SegmentKind::fresh;
  std::span<const TokenId> tokens;
  Position wanted_position = kNextPosition;  // of tokens[0]
  const ChunkInfo* chunk = nullptr;          // of cached segments
  std::int32_t chunk_offset = 0;             // tokens[0] is chunk->tokens[chunk_offset]

  // Filled in by Prompt::make.
  Row first_row{};
  Position first_position{};
  bool exact = false;  // nothing before it differs from what its KV was computed behind: reused as it is

  [[nodiscard]] std::int32_t size() const { return static_cast<std::int32_t>(tokens.size()); }
  [[nodiscard]] Row end_row() const { return first_row + size(); }
  // Position the stored key of `row` was rotated to. Of cached segments only.
  [[nodiscard]] Position old_position(Row row) const {
    return chunk->first_position + (chunk_offset + (row - first_row));
  }
  [[nodiscard]] Position position(Row row) const { return first_position + (row - first_row); }
};

[[nodiscard]] inline Segment fresh_segment(std::span<const TokenId> tokens, Position first = kNextPosition) {
  Segment segment;
  segment.tokens = tokens;
  segment.wanted_position = first;
  return segment;
}

// The whole chunk.
[[nodiscard]] inline Segment cached_segment(const ChunkInfo& chunk, Position first = kNextPosition) {
  Segment segment;
  segment.kind = SegmentKind::cached;
  segment.tokens = chunk.tokens;
  segment.wanted_position = first;
  segment.chunk = &chunk;
  return segment;
}

// `count` tokens of the chunk from `offset` on. A range outside the chunk is reported by Prompt::make.
[[nodiscard]] inline Segment cached_segment(const ChunkInfo& chunk, std::int32_t offset, std::int32_t count,
                                            Position first = kNextPosition) {
  Segment segment = cached_segment(chunk, first);
  const auto size = static_cast<std::int64_t>(chunk.tokens.size());
  segment.chunk_offset = offset;
  const bool inside = offset >= 0 && count >= 0 && static_cast<std::int64_t>(offset) + count <= size;
  segment.tokens = inside ? chunk.tokens.subspan(static_cast<std::size_t>(offset), static_cast<std::size_t>(count))
                          : std::span<const TokenId>{};
  if (!inside) segment.chunk_offset = -1;
  return segment;
}

// A segment points to its tokens and its chunk: temporaries would be gone before the prompt is.
template <std::ranges::range R>
requires(!std::ranges::borrowed_range<R>) Segment fresh_segment(R&& tokens, Position first = kNextPosition) = delete;
Segment cached_segment(const ChunkInfo&& chunk, Position first = kNextPosition) = delete;
Segment cached_segment(const ChunkInfo&& chunk, std::int32_t offset, std::int32_t count,
                       Position first = kNextPosition) = delete;

[[nodiscard]] inline Segment resident_segment(std::span<const TokenId> tokens) {
  Segment segment;
  segment.kind = SegmentKind::resident;
  segment.tokens = tokens;
  return segment;
}

// A validated view over the caller's segments.
class Prompt {
 public:
  Prompt() = default;

  // Numbers the rows, places the segments, and finds the exact prefix. Positions ascend strictly from row to row: a
  // segment may leave a gap of positions before it but not step back. `max_position` is the model's last position.
  // The segments stay the caller's and must outlive the Prompt. Empty segments and an empty prompt are fine.
  // Errors name the segment: a position that overlaps or leaves the model's range, a cached segment without chunk or
  // outside it, a chunk whose own fields are wrong, tokens that are not the chunk's, a resident segment behind another
  // kind, more than 2^31 - 1 rows.
  static Result<Prompt> make(std::span<Segment> segments, Position max_position);

  [[nodiscard]] std::span<const Segment> segments() const { return segments_; }
  [[nodiscard]] std::int32_t rows() const { return rows_; }
  [[nodiscard]] bool empty() const { return rows_ == 0; }

  // Rows before this one hold exact KV once placed: resident rows, and cached rows that stand where and behind what
  // they were computed. They need no rotation, no score and no recompute.
  [[nodiscard]] Row exact_end() const { return exact_end_; }
  [[nodiscard]] std::int32_t resident_rows() const { return resident_rows_; }
  // Rows of cached segments behind the exact prefix: those a selector chooses from.
  [[nodiscard]] std::int32_t reused_rows() const { return reused_rows_; }
  [[nodiscard]] std::int32_t fresh_rows() const { return fresh_rows_; }

  // The segment `row` lies in; `row` must be in [0, rows()). O(log segments).
  [[nodiscard]] const Segment& segment_of(Row row) const;
  [[nodiscard]] Position position(Row row) const { return segment_of(row).position(row); }
  [[nodiscard]] TokenId token(Row row) const {
    const Segment& segment = segment_of(row);
    return segment.tokens[static_cast<std::size_t>(row - segment.first_row)];
  }

 private:
  static Status check_cached(const Segment& segment, int index);

  std::span<const Segment> segments_;
  std::int32_t rows_ = 0;
  Row exact_end_{};
  std::int32_t resident_rows_ = 0;
  std::int32_t reused_rows_ = 0;
  std::int32_t fresh_rows_ = 0;
};

// ---------------------------------------------------------------------------------------------------------------------

inline Status Prompt::check_cached(const Segment& segment, int index) {
  const auto invalid = [index](const char* what) {
    return Status::error(StatusCode::invalid_argument, "%s", what).at("segment %d", index);
  };
  if (segment.chunk == nullptr) return invalid("cached segment has no chunk");
  const ChunkInfo& chunk = *segment.chunk;
  const auto chunk_size = static_cast<std::int64_t>(chunk.tokens.size());
  if (segment.chunk_offset < 0 ||
      segment.chunk_offset + static_cast<std::int64_t>(segment.tokens.size()) > chunk_size) {
    return invalid("range of tokens leaves its chunk");
  }
  if (chunk.first_position.value < 0) return invalid("chunk.first_position is negative");
  if (chunk.first_position.value + chunk_size > std::int64_t{1} << 31) {
    return invalid("chunk.first_position and tokens pass position 2^31 - 1");
  }
  if (!chunk.scores.empty() && chunk.scores.size() != chunk.tokens.size()) {
    return invalid("chunk.scores must have one entry per token");
  }
  for (std::size_t i = 0; i < segment.tokens.size(); ++i) {
    if (segment.tokens[i] != chunk.tokens[static_cast<std::size_t>(segment.chunk_offset) + i]) {
      return Status::error(StatusCode::mismatch, "token %zu is %d, the chunk has %d", i, segment.tokens[i],
                           chunk.tokens[static_cast<std::size_t>(segment.chunk_offset) + i])
          .at("segment %d", index);
    }
  }
  return {};
}

namespace detail {

// Whether the KV of `segment` was computed behind exactly the rows that now stand before it, `before`, whose positions
// are 0, 1, 2, …: its chunk's context and the chunk's own tokens up to the segment are those rows' tokens.
inline bool computed_behind(const Segment& segment, std::span<const Segment> before, std::int32_t before_rows) {
  const ChunkInfo& chunk = *segment.chunk;
  const auto context = static_cast<std::int64_t>(chunk.context.size());
  if (context != chunk.first_position.value || context + segment.chunk_offset != before_rows) return false;
  std::int64_t at = 0;
  for (const Segment& other : before) {
    for (const TokenId token : other.tokens) {
      const TokenId expected = at < context ? chunk.context[static_cast<std::size_t>(at)]
                                            : chunk.tokens[static_cast<std::size_t>(at - context)];
      if (token != expected) return false;
      ++at;
    }
  }
  return true;
}

}  // namespace detail

inline Result<Prompt> Prompt::make(std::span<Segment> segments, Position max_position) {
  constexpr std::int64_t kMaxRows = (std::numeric_limits<std::int32_t>::max)();
  Prompt prompt;
  std::int64_t rows = 0;
  std::int64_t next_position = 0;
  bool exact_so_far = true;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const int index = static_cast<int>(i);
    Segment& segment = segments[i];
    const auto count = static_cast<std::int64_t>(segment.tokens.size());
    if (rows + count > kMaxRows) {
      return Status::error(StatusCode::out_of_range, "more than 2^31 - 1 rows").at("segment %d", index);
    }
    if (segment.kind == SegmentKind::cached) KVBLEND_RETURN_IF_ERROR(check_cached(segment, index));

    const std::int64_t first =
        segment.wanted_position == kNextPosition ? next_position : std::int64_t{segment.wanted_position.value};
    if (first < next_position) {
      return Status::error(StatusCode::invalid_argument,
                           "position %lld overlaps the segment before, which ends at %lld",
                           static_cast<long long>(first), static_cast<long long>(next_position - 1))
          .at("segment %d", index);
    }
    if (count > 0 && first + count - 1 > max_position.value) {
      return Status::error(StatusCode::out_of_range, "position %lld exceeds the model's last position %d",
                           static_cast<long long>(first + count - 1), max_position.value)
          .at("segment %d", index);
    }
    segment.first_row = Row(static_cast<std::int32_t>(rows));
    segment.first_position = Position(static_cast<std::int32_t>(first < kMaxRows ? first : kMaxRows));
    segment.exact = false;

    // Exactness needs positions 0, 1, 2, … up to here, hence first == rows.
    if (count == 0) {
      segment.exact = exact_so_far;
    } else if (segment.kind == SegmentKind::resident) {
      if (!exact_so_far || rows != prompt.resident_rows_) {
        return Status::error(StatusCode::invalid_argument, "resident segments must stand before all others")
            .at("segment %d", index);
      }
      segment.exact = true;
      prompt.resident_rows_ += static_cast<std::int32_t>(count);
    } else if (segment.kind == SegmentKind::cached) {
      segment.exact = exact_so_far && first == rows &&
                      detail::computed_behind(segment, segments.first(i), static_cast<std::int32_t>(rows));
      if (!segment.exact) prompt.reused_rows_ += static_cast<std::int32_t>(count);
    } else {
      prompt.fresh_rows_ += static_cast<std::int32_t>(count);
    }
    exact_so_far = exact_so_far && segment.exact;
    rows += count;
    next_position = first + count;
    if (exact_so_far) prompt.exact_end_ = Row(static_cast<std::int32_t>(rows));
  }
  prompt.segments_ = segments;
  prompt.rows_ = static_cast<std::int32_t>(rows);
  return prompt;
}

inline const Segment& Prompt::segment_of(Row row) const {
  std::size_t low = 0;
  std::size_t high = segments_.size();
  while (high - low > 1) {  // the last segment that starts at or before `row`; empty ones are passed over
    const std::size_t middle = low + (high - low) / 2;
    (segments_[middle].first_row <= row ? low : high) = middle;
  }
  return segments_[low];
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
