// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// How segments become rows and positions, which of them are exact, and what is refused.
#include <kvblend/prompt/prompt.hpp>

#include <doctest/doctest.h>

#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

using namespace kvblend;

namespace {

std::vector<TokenId> iota(int count, int first) {
  std::vector<TokenId> tokens(static_cast<std::size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

ChunkInfo chunk_of(const std::vector<TokenId>& tokens, int position = 0, std::span<const TokenId> context = {}) {
  ChunkInfo chunk;
  chunk.tokens = tokens;
  chunk.first_position = Position(position);
  chunk.context = context;
  return chunk;
}

std::string error_of(std::vector<Segment> segments, int max_position = 1000) {
  const Result<Prompt> prompt = Prompt::make(segments, Position(max_position));
  CHECK_FALSE(prompt.ok());
  return std::string(prompt.status.where()) + ": " + prompt.status.message();
}

}  // namespace

TEST_CASE("rows and positions count through the segments, and gaps move positions alone") {
  const auto a = iota(3, 10);
  const auto b = iota(4, 20);
  const ChunkInfo chunk = chunk_of(b, 37);
  std::vector<Segment> segments = {fresh_segment(a), fresh_segment({}), cached_segment(chunk, Position(8)),
                                   cached_segment(chunk, 1, 2), fresh_segment(a)};
  const Result<Prompt> prompt = Prompt::make(segments, Position(16));
  REQUIRE(prompt.ok());
  CHECK(prompt.value.rows() == 12);
  CHECK(prompt.value.fresh_rows() == 6);
  CHECK(prompt.value.reused_rows() == 6);
  CHECK(prompt.value.exact_end() == Row(0));
  const std::vector<int> positions = {0, 1, 2, 8, 9, 10, 11, 12, 13, 14, 15, 16};
  const std::vector<TokenId> tokens = {10, 11, 12, 20, 21, 22, 23, 21, 22, 10, 11, 12};
  for (int row = 0; row < 12; ++row) {
    CAPTURE(row);
    CHECK(prompt.value.position(Row(row)) == Position(positions[static_cast<std::size_t>(row)]));
    CHECK(prompt.value.token(Row(row)) == tokens[static_cast<std::size_t>(row)]);
  }
  CHECK(segments[3].old_position(Row(7)) == Position(38));  // the chunk's second token
}

// LMCache #845, MemOS PR2304: the old position was assumed to be 0.
TEST_CASE("a chunk's keys move from where they were computed") {
  const auto tokens = iota(4, 0);
  const ChunkInfo chunk = chunk_of(tokens, 37);
  std::vector<Segment> segments = {cached_segment(chunk, Position(5))};
  REQUIRE(Prompt::make(segments, Position(100)).ok());
  CHECK(segments[0].first_position - segments[0].old_position(Row(0)) == -32);
}

TEST_CASE("the exact prefix ends at the first row that is fresh, moved, or behind other tokens than it was computed") {
  const auto all = iota(12, 0);
  const std::span<const TokenId> span(all);
  const std::vector<TokenId> first(all.begin(), all.begin() + 4), second(all.begin() + 4, all.begin() + 8),
      third(all.begin() + 8, all.end());
  const ChunkInfo a = chunk_of(first);
  const ChunkInfo b = chunk_of(second, 4, span.first(4));
  const ChunkInfo c = chunk_of(third, 8, span.first(8));
  const ChunkInfo alone = chunk_of(second, 4);  // right place, but nothing stood before it
  const auto wrong_context = iota(4, 1);
  const ChunkInfo elsewhere = chunk_of(second, 4, wrong_context);
  const ChunkInfo whole = chunk_of(all);
  const auto exact_end = [](std::vector<Segment> segments) {
    const Result<Prompt> prompt = Prompt::make(segments, Position(1000));
    REQUIRE(prompt.ok());
    return prompt.value.exact_end().value;
  };
  CHECK(exact_end({cached_segment(a), cached_segment(b), cached_segment(c)}) == 12);
  CHECK(exact_end({cached_segment(a), cached_segment(c, Position(8))}) == 4);  // a gap
  CHECK(exact_end({cached_segment(a), cached_segment(alone)}) == 4);
  CHECK(exact_end({cached_segment(a), cached_segment(elsewhere)}) == 4);
  CHECK(exact_end({cached_segment(b)}) == 0);
  CHECK(exact_end({cached_segment(b, Position(4))}) == 0);  // its context is missing
  CHECK(exact_end({cached_segment(a, Position(1))}) == 0);
  CHECK(exact_end({fresh_segment(first), cached_segment(b)}) == 0);
  CHECK(exact_end({resident_segment(first), cached_segment(b), fresh_segment(third)}) == 8);
  CHECK(exact_end({resident_segment(span.first(6)), cached_segment(whole, 6, 3), cached_segment(whole, 9, 3)}) == 12);
  CHECK(exact_end({cached_segment(whole, 1, 3, Position(1))}) == 0);
  CHECK(exact_end({cached_segment(alone, Position(0))}) == 0);  // computed at 4, with nothing before it
  CHECK(exact_end({resident_segment(second), cached_segment(whole, 4, 4)}) == 4);  // its chunk starts otherwise
  CHECK(exact_end({cached_segment(a), cached_segment(a)}) == 4);
  CHECK(exact_end({}) == 0);

  std::vector<Segment> segments = {cached_segment(a), cached_segment(b), cached_segment(a), fresh_segment(third)};
  const Result<Prompt> prompt = Prompt::make(segments, Position(1000));
  REQUIRE(prompt.ok());
  CHECK(prompt.value.reused_rows() == 4);  // those behind the exact prefix
  CHECK(prompt.value.fresh_rows() == 4);
}

TEST_CASE("what cannot be a prompt is refused, and the segment named") {
  const auto tokens = iota(4, 0);
  const auto other = iota(4, 1);
  const ChunkInfo chunk = chunk_of(tokens);
  CHECK(error_of({fresh_segment(tokens), fresh_segment(tokens, Position(3))}).find("segment 1: position 3 overlaps") ==
        0);
  CHECK(error_of({fresh_segment(tokens, Position(-1))}).find("segment 0: position -1") == 0);
  CHECK(error_of({fresh_segment(tokens), fresh_segment(tokens)}, 6).find("segment 1: position 7 exceeds") == 0);
  CHECK(error_of({cached_segment(chunk, 1, 4)}).find("segment 0: range of tokens leaves its chunk") == 0);
  CHECK(error_of({cached_segment(chunk, -1, 2)}).find("segment 0: range") == 0);
  CHECK(error_of({cached_segment(chunk, 2147483647, 2147483647)}).find("segment 0: range") == 0);
  CHECK(error_of({fresh_segment(tokens), resident_segment(tokens)}).find("segment 1: resident") == 0);
  Segment wrong = cached_segment(chunk);
  wrong.tokens = other;
  CHECK(error_of({fresh_segment(tokens), wrong}).find("segment 1: token 0 is 1, the chunk has 0") == 0);
  wrong.chunk = nullptr;
  CHECK(error_of({wrong}).find("segment 0: cached segment has no chunk") == 0);
  const std::vector<float> scores(3);
  ChunkInfo scored = chunk;
  scored.scores = scores;
  CHECK(error_of({cached_segment(scored)}).find("segment 0: chunk.scores") == 0);
  const ChunkInfo negative = chunk_of(tokens, -2);
  CHECK(error_of({cached_segment(negative)}).find("segment 0: chunk.first_position") == 0);
  const ChunkInfo far = chunk_of(tokens, std::numeric_limits<int>::max() - 2);  // its last token would pass 2^31 - 1
  CHECK(error_of({cached_segment(far)}).find("segment 0: chunk.first_position") == 0);
  CHECK(error_of({cached_segment(chunk), resident_segment(tokens)}).find("segment 1: resident") == 0);
}

TEST_CASE("any mix of segments gives each row the segment it lies in") {
  const unsigned seed = 99;
  CAPTURE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 500; ++round) {
    std::vector<std::vector<TokenId>> tokens;
    std::vector<ChunkInfo> chunks;
    const int count = static_cast<int>(random() % 8);
    for (int i = 0; i < count; ++i)
      tokens.push_back(iota(static_cast<int>(random() % 4), static_cast<int>(random() % 50)));
    for (int i = 0; i < count; ++i)
      chunks.push_back(chunk_of(tokens[static_cast<std::size_t>(i)], static_cast<int>(random() % 5)));
    std::vector<Segment> segments;
    std::vector<int> segment_of_row, position_of_row;
    int position = 0;
    for (int i = 0; i < count; ++i) {
      const auto at = static_cast<std::size_t>(i);
      position += static_cast<int>(random() % 3);
      segments.push_back(random() % 2 == 0 ? fresh_segment(tokens[at], Position(position))
                                           : cached_segment(chunks[at], Position(position)));
      for (std::size_t j = 0; j < tokens[at].size(); ++j) {
        segment_of_row.push_back(i);
        position_of_row.push_back(position++);
      }
    }
    const Result<Prompt> prompt = Prompt::make(segments, Position(1000));
    REQUIRE(prompt.ok());
    REQUIRE(prompt.value.rows() == static_cast<int>(segment_of_row.size()));
    for (int row = 0; row < prompt.value.rows(); ++row) {
      const Segment& segment = prompt.value.segment_of(Row(row));
      CHECK(&segment - segments.data() == segment_of_row[static_cast<std::size_t>(row)]);
      CHECK(segment.position(Row(row)).value == position_of_row[static_cast<std::size_t>(row)]);
    }
  }
}
