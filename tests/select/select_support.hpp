// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What the tests of select/ share: prompts over owned memory, and a pick by plain sorting as the oracle of top-k.
#pragma once

#include <kvblend/core/bits.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/prompt/prompt.hpp>
#include <kvblend/select/selector.hpp>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <limits>
#include <span>
#include <vector>

namespace test {

// Builds a prompt segment by segment and keeps all it points to. Tokens differ from chunk to chunk.
class PromptBuilder {
 public:
  PromptBuilder& fresh(int tokens, kvblend::Position first = kvblend::kNextPosition) {
    segments_.push_back(kvblend::fresh_segment(new_tokens(tokens), first));
    return *this;
  }

  // A chunk that was computed at positions from 0 on, behind nothing.
  PromptBuilder& cached(int tokens, std::vector<float> scores = {}, kvblend::Position first = kvblend::kNextPosition) {
    segments_.push_back(kvblend::cached_segment(new_chunk(tokens, std::move(scores)), first));
    return *this;
  }

  // A part of a chunk.
  PromptBuilder& cached_part(int tokens, int offset, int count, std::vector<float> scores = {}) {
    segments_.push_back(kvblend::cached_segment(new_chunk(tokens, std::move(scores)), offset, count));
    return *this;
  }

  PromptBuilder& resident(int tokens) {
    segments_.push_back(kvblend::resident_segment(new_tokens(tokens)));
    return *this;
  }

  kvblend::Prompt make() {
    kvblend::Result<kvblend::Prompt> prompt =
        kvblend::Prompt::make(segments_, kvblend::Position(std::numeric_limits<std::int32_t>::max() - 1));
    REQUIRE_MESSAGE(prompt.ok(), prompt.status.where() << ": " << prompt.status.message());
    return prompt.value;
  }

 private:
  std::span<const kvblend::TokenId> new_tokens(int count) {
    std::vector<kvblend::TokenId> ids(static_cast<std::size_t>(count));
    for (kvblend::TokenId& id : ids) id = next_token_++;
    tokens_.push_back(std::move(ids));
    return tokens_.back();
  }

  const kvblend::ChunkInfo& new_chunk(int count, std::vector<float> scores) {
    kvblend::ChunkInfo chunk;
    chunk.tokens = new_tokens(count);
    scores_.push_back(std::move(scores));
    chunk.scores = scores_.back();
    chunks_.push_back(chunk);
    return chunks_.back();
  }

  kvblend::TokenId next_token_ = 1;
  std::deque<std::vector<kvblend::TokenId>> tokens_;  // deques: what segments point to must not move
  std::deque<std::vector<float>> scores_;
  std::deque<kvblend::ChunkInfo> chunks_;
  std::vector<kvblend::Segment> segments_;
};

// The rows a selector chooses from.
inline std::vector<kvblend::Row> reused_rows(const kvblend::Prompt& prompt) {
  std::vector<kvblend::Row> rows;
  for (const kvblend::Segment& segment : prompt.segments()) {
    if (segment.kind != kvblend::SegmentKind::cached || segment.exact) continue;
    for (kvblend::Row row = segment.first_row; row < segment.end_row(); ++row) rows.push_back(row);
  }
  return rows;
}

// Picks by a stable sort: NaN before all, then higher scores, then lower indices.
struct SortingBackend {
  void top_k(std::span<const float> scores, std::int32_t k, std::span<std::uint64_t>,
             std::span<kvblend::ActiveIndex> out) const {
    std::vector<std::int32_t> order(scores.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int32_t>(i);
    std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
      const float x = scores[static_cast<std::size_t>(a)];
      const float y = scores[static_cast<std::size_t>(b)];
      if (kvblend::is_nan(x) || kvblend::is_nan(y)) return kvblend::is_nan(x) && !kvblend::is_nan(y);
      return x > y;
    });
    std::sort(order.begin(), order.begin() + k);
    for (std::int32_t i = 0; i < k; ++i) {
      out[static_cast<std::size_t>(i)] = kvblend::ActiveIndex(order[static_cast<std::size_t>(i)]);
    }
  }
};

// Owns what a choice works in.
struct Scratch {
  std::vector<float> scores;
  std::vector<std::uint64_t> keys;
  std::vector<kvblend::ActiveIndex> picked;

  explicit Scratch(std::size_t n) : scores(n), keys(n), picked(n) {}
  [[nodiscard]] kvblend::SelectorScratch view() { return {scores, keys, picked}; }
};

inline std::vector<int> values(std::span<const kvblend::ActiveIndex> indices) {
  std::vector<int> out;
  for (const kvblend::ActiveIndex index : indices) out.push_back(index.value);
  return out;
}

}  // namespace test
