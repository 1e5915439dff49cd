// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Angles: how far a pair turns when its key moves. Two rules, and the rotation table that holds their cosines and
// sines.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/rope/spec.hpp>

#include <cmath>
#include <concepts>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// Rows of a chunk that move together: `count` consecutive source rows to as many consecutive destination rows, all by
// the same distance.
struct ShiftRun {
  Row destination{};        // row of the host's cache
  std::int32_t source = 0;  // row of the chunk
  std::int32_t count = 0;
  Position old_first{};  // position the first source key is rotated to
  Position new_first{};

  [[nodiscard]] std::int32_t distance() const { return new_first - old_first; }
};

// An angle rule gives the radians a pair must turn to go from one position to another.
//   uniform   true if the angle depends on the distance alone: then one table serves a whole run
template <class A>
concept AngleRule = requires(const RopeSpec& spec, Position position, std::int32_t pair) {
  { A::uniform } -> std::convertible_to<bool>;
  { A::angle(spec, position, position, pair) } -> std::same_as<double>;
};

// The true angle. For engines that compute angles in double, and for short prompts in any.
struct ExactAngles {
  static constexpr bool uniform = true;
  static double angle(const RopeSpec& spec, Position old_position, Position new_position, std::int32_t pair) {
    return static_cast<double>(new_position - old_position) * spec.inv_freq[static_cast<std::size_t>(pair)];
  }
};

// The angle an engine that works in float32 has turned its own keys by: it rounds the frequency and the product, which
// at position 131 071 puts its keys up to 0.02 from the exact ones. Keys moved by this rule match keys it computes.
struct EngineAngles {
  static constexpr bool uniform = false;
  static double angle(const RopeSpec& spec, Position old_position, Position new_position, std::int32_t pair) {
    const auto frequency = static_cast<float>(spec.inv_freq[static_cast<std::size_t>(pair)]);
    const float old_angle = static_cast<float>(old_position.value) * frequency;
    const float new_angle = static_cast<float>(new_position.value) * frequency;
    return static_cast<double>(new_angle) - static_cast<double>(old_angle);
  }
};

// Cosines and sines of one run: for each of table_rows() rows, pairs() cosines, then pairs() sines. A view over the
// caller's floats.
class RotationTable {
 public:
  RotationTable() = default;

  // Floats the table of `run` needs.
  template <AngleRule A>
  [[nodiscard]] static std::int64_t size(const RopeSpec& spec, const ShiftRun& run) {
    return std::int64_t{2} * spec.pairs() * (A::uniform ? 1 : run.count);
  }

  // Fills `storage` (at least size() floats) and returns the view over it.
  template <AngleRule A>
  static Result<RotationTable> make(const RopeSpec& spec, const ShiftRun& run, std::span<float> storage) {
    if (static_cast<std::int64_t>(storage.size()) < size<A>(spec, run)) {
      return Status::error(StatusCode::insufficient_space, "needs %lld floats, has %zu",
                           static_cast<long long>(size<A>(spec, run)), storage.size())
          .at("rotation table");
    }
    RotationTable table;
    table.values_ = storage.data();
    table.pairs_ = spec.pairs();
    table.row_step_ = A::uniform ? 0 : 2 * spec.pairs();
    const std::int32_t rows = A::uniform ? (run.count > 0 ? 1 : 0) : run.count;
    for (std::int32_t row = 0; row < rows; ++row) {
      float* cosines = storage.data() + static_cast<std::ptrdiff_t>(row) * table.row_step_;
      float* sines = cosines + table.pairs_;
      for (std::int32_t pair = 0; pair < table.pairs_; ++pair) {
        const double angle = A::angle(spec, run.old_first + row, run.new_first + row, pair);
        cosines[pair] = static_cast<float>(std::cos(angle));
        sines[pair] = static_cast<float>(std::sin(angle));
      }
    }
    return table;
  }

  [[nodiscard]] const float* cosines(std::int32_t row) const {
    return values_ + static_cast<std::ptrdiff_t>(row) * row_step_;
  }
  [[nodiscard]] const float* sines(std::int32_t row) const { return cosines(row) + pairs_; }
  [[nodiscard]] std::int32_t pairs() const { return pairs_; }

 private:
  const float* values_ = nullptr;
  std::int32_t pairs_ = 0;
  std::int32_t row_step_ = 0;
};

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
