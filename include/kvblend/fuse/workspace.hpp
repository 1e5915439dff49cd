// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// FusorWorkspace: the arrays of one blend, carved from one piece of memory the caller gives. Nothing else is allocated.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/fuse/place.hpp>
#include <kvblend/prompt/prompt.hpp>
#include <kvblend/rope/angles.hpp>

#include <cstddef>
#include <cstdint>
#include <new>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

struct FusorWorkspace {
  std::span<Row> active;                    // rows the current layer computes
  std::span<ActiveIndex> kept;              // those of them that go on
  std::span<Row> candidate_rows;            // reused rows a selector chooses from
  std::span<ActiveIndex> candidate_active;  // the same rows in the active set
  std::span<ActiveIndex> picked;            // chosen candidates
  std::span<float> scores;
  std::span<float> key_deviation;
  std::span<float> value_deviation;
  std::span<float> attention_mass;  // per row of the prompt
  std::span<std::uint64_t> top_k_scratch;
  std::span<std::uint8_t> mandatory;  // per row: fresh, or its logits are wanted
  std::span<std::uint8_t> computed;   // per row: fresh KV replaces what would be placed at the current layer
  std::span<PlacedRun> runs;          // one a cached segment
  std::span<float> table_values;      // of all tables, one after the other

  // Bytes to pass to make(): about 46 a row, and a table of head_dim floats for each cached segment (for each of its
  // rows, if the angle rule is not uniform).
  template <AngleRule Angles>
  [[nodiscard]] static std::size_t bytes(const Prompt& prompt, std::int32_t head_dim) {
    FusorWorkspace unused;
    return unused.carve<Angles>(prompt, head_dim, nullptr) + kAlignment;
  }

  // Carves `memory` (any alignment).
  template <AngleRule Angles>
  static Result<FusorWorkspace> make(const Prompt& prompt, std::int32_t head_dim, std::span<std::byte> memory) {
    const std::size_t needed = bytes<Angles>(prompt, head_dim);
    if (memory.size() < needed) {
      return Status::error(StatusCode::insufficient_space, "needs %zu bytes, has %zu", needed, memory.size())
          .at("workspace");
    }
    const auto misaligned = reinterpret_cast<std::uintptr_t>(memory.data()) % kAlignment;
    FusorWorkspace workspace;
    workspace.carve<Angles>(prompt, head_dim, memory.data() + (misaligned == 0 ? 0 : kAlignment - misaligned));
    return workspace;
  }

 private:
  static constexpr std::size_t kAlignment = 64;

  template <AngleRule Angles>
  std::size_t carve(const Prompt& prompt, std::int32_t head_dim, std::byte* memory) {
    const auto rows = static_cast<std::size_t>(prompt.rows());
    std::size_t table_rows = 0;
    for (const Segment& segment : prompt.segments()) {
      if (segment.kind == SegmentKind::cached) table_rows += Angles::uniform ? 1 : segment.tokens.size();
    }
    std::size_t used = 0;
    take(memory, used, top_k_scratch, rows);
    take(memory, used, active, rows);
    take(memory, used, kept, rows);
    take(memory, used, candidate_rows, rows);
    take(memory, used, candidate_active, rows);
    take(memory, used, picked, rows);
    take(memory, used, scores, rows);
    take(memory, used, key_deviation, rows);
    take(memory, used, value_deviation, rows);
    take(memory, used, attention_mass, rows);
    take(memory, used, runs, prompt.segments().size());
    take(memory, used, table_values, table_rows * static_cast<std::size_t>(head_dim));
    take(memory, used, mandatory, rows);
    take(memory, used, computed, rows);
    return used;
  }

  // With memory null only the size is counted.
  template <class T>
  static void take(std::byte* memory, std::size_t& used, std::span<T>& out, std::size_t count) {
    if (memory != nullptr) {
      T* first = reinterpret_cast<T*>(memory + used);
      for (std::size_t i = 0; i < count; ++i) ::new (static_cast<void*>(first + i)) T();
      out = {first, count};
    }
    used += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
  }
};

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
