// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// FusorWorkspace: the arrays of one blend, carved from one piece of memory the caller gives. Nothing else is allocated.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/fuse/drift.hpp>
#include <kvblend/fuse/place.hpp>
#include <kvblend/prompt/prompt.hpp>
#include <kvblend/rope/angles.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// How many rows the rotation tables of the cached segments have room for. An angle rule that is not uniform needs one a
// row in any case.
enum class RopeTables : std::uint8_t {
  per_run,  // one a segment: its keys were rotated by the frequencies of the host's cache
  per_row,  // one a token: frequencies depend on the prompt's length (dynamic NTK, longrope), and the stored ones differ
};

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
  std::span<DriftRole> roles;         // per row
  std::span<PlacedRun> runs;          // one a cached segment
  std::span<RotationTable> tables;    // one a run
  std::span<float> table_values;      // of all tables, one after the other: at least what was asked for

  // Bytes to pass to make(): about 47 a row, and a table of head_dim floats for each cached segment, or for each of its
  // rows.
  template <AngleRule Angles>
  [[nodiscard]] static std::size_t bytes(const Prompt& prompt, std::int32_t head_dim,
                                         RopeTables tables = RopeTables::per_run) {
    FusorWorkspace unused;
    const bool per_row = tables == RopeTables::per_row || !Angles::uniform;
    return unused.carve(prompt, nullptr) + table_floats(prompt, head_dim, per_row) * sizeof(float) + kAlignment;
  }

  // Carves `memory` (any alignment). What it has beyond bytes() gives the tables more rows, up to one a token.
  template <AngleRule Angles>
  static Result<FusorWorkspace> make(const Prompt& prompt, std::int32_t head_dim, std::span<std::byte> memory) {
    const std::size_t needed = bytes<Angles>(prompt, head_dim);
    if (memory.size() < needed) {
      return Status::error(StatusCode::insufficient_space, "needs %zu bytes, has %zu", needed, memory.size())
          .at("workspace");
    }
    const auto misaligned = reinterpret_cast<std::uintptr_t>(memory.data()) % kAlignment;
    const std::size_t skipped = misaligned == 0 ? 0 : kAlignment - misaligned;
    FusorWorkspace workspace;
    const std::size_t used = skipped + workspace.carve(prompt, memory.data() + skipped);
    const std::size_t room = (memory.size() - used) / sizeof(float);
    float* values = reinterpret_cast<float*>(memory.data() + used);
    workspace.table_values = {values, (std::min)(room, table_floats(prompt, head_dim, true))};
    for (std::size_t i = 0; i < workspace.table_values.size(); ++i) ::new (static_cast<void*>(values + i)) float;
    return workspace;
  }

  // Floats of the tables of all cached segments.
  [[nodiscard]] static std::size_t table_floats(const Prompt& prompt, std::int32_t head_dim, bool per_row) {
    std::size_t rows = 0;
    for (const Segment& segment : prompt.segments()) {
      if (segment.kind == SegmentKind::cached) rows += per_row ? segment.tokens.size() : 1;
    }
    return rows * static_cast<std::size_t>(head_dim);
  }

 private:
  static constexpr std::size_t kAlignment = 64;

  // All but the tables' values; returns the bytes it takes.
  std::size_t carve(const Prompt& prompt, std::byte* memory) {
    const auto rows = static_cast<std::size_t>(prompt.rows());
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
    take(memory, used, tables, prompt.segments().size());
    take(memory, used, mandatory, rows);
    take(memory, used, computed, rows);
    take(memory, used, roles, rows);
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
