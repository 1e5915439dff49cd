// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Angles: how far a pair turns when its key moves. Two rules, and the rotation table that holds their cosines and
// sines.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/rope/spec.hpp>

#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// Rows of a chunk that move together: `count` consecutive source rows to as many consecutive destination rows, all by
// the same distance. Under M-RoPE the positions count for all three axes, as they do for text.
struct ShiftRun {
  Row destination{};        // row of the host's cache
  std::int32_t source = 0;  // row of the chunk
  std::int32_t count = 0;
  Position old_first{};  // position the first source key is rotated to
  Position new_first{};

  [[nodiscard]] KVBLEND_HOST_DEVICE std::int32_t distance() const { return new_first - old_first; }
};

// One token's positions under M-RoPE: time, height, width.
struct AxisPositions {
  std::array<std::int32_t, kRopeAxes> axis{};

  friend bool operator==(const AxisPositions&, const AxisPositions&) = default;
};

// An angle rule gives the radians a pair must turn to go from one frequency and position to another: zero if both are
// the same.
//   uniform   true if, the frequency staying as it is, the angle depends on the distance alone: then one table serves a
//             whole run
template <class A>
concept AngleRule = requires(double frequency, std::int32_t position) {
  { A::uniform } -> std::convertible_to<bool>;
  { A::angle(frequency, position, frequency, position) } -> std::same_as<double>;
};

// The true angle. For engines that compute angles in double, and for short prompts in any.
struct ExactAngles {
  static constexpr bool uniform = true;
  static double angle(double old_frequency, std::int32_t old_position, double new_frequency,
                      std::int32_t new_position) {
    if (old_frequency == new_frequency) {
      return static_cast<double>(std::int64_t{new_position} - old_position) * new_frequency;
    }
    return new_position * new_frequency - old_position * old_frequency;
  }
};

// The angle an engine that works in float32 has turned its own keys by: it rounds the frequency and the product, which
// at position 131 071 puts its keys up to 0.02 from the exact ones. Keys moved by this rule match keys it computes.
struct EngineAngles {
  static constexpr bool uniform = false;
  static double angle(double old_frequency, std::int32_t old_position, double new_frequency,
                      std::int32_t new_position) {
    const float old_angle = static_cast<float>(old_position) * static_cast<float>(old_frequency);
    const float new_angle = static_cast<float>(new_position) * static_cast<float>(new_frequency);
    return static_cast<double>(new_angle) - static_cast<double>(old_angle);
  }
};

namespace detail {

// Where the rows of a move were and go, axis by axis.
struct RunPositions {
  std::int32_t old_first;
  std::int32_t new_first;

  explicit RunPositions(const ShiftRun& run) : old_first(run.old_first.value), new_first(run.new_first.value) {}
  RunPositions(std::int32_t old_position, std::int32_t new_position)
      : old_first(old_position), new_first(new_position) {}
  // Those from `row` on.
  [[nodiscard]] RunPositions from(std::int32_t row) const { return {old_first + row, new_first + row}; }
  [[nodiscard]] std::int32_t old_at(std::int32_t row, std::size_t) const { return old_first + row; }
  [[nodiscard]] std::int32_t new_at(std::int32_t row, std::size_t) const { return new_first + row; }
  [[nodiscard]] bool stays(std::int32_t) const { return old_first == new_first; }
  [[nodiscard]] bool one_distance(std::int32_t) const { return true; }
};

// Of the three positions those count that some pair of the spec turns by.
struct ListedPositions {
  const AxisPositions* old_positions;
  const AxisPositions* new_positions;
  std::array<bool, kRopeAxes> counts{};  // by axis

  ListedPositions(const RopeSpec& spec, const AxisPositions* old_list, const AxisPositions* new_list)
      : old_positions(old_list), new_positions(new_list) {
    for (const std::uint8_t axis : spec.axes()) counts[axis] = true;
  }
  [[nodiscard]] ListedPositions from(std::int32_t row) const {
    ListedPositions rest = *this;
    rest.old_positions += row;
    rest.new_positions += row;
    return rest;
  }
  [[nodiscard]] std::int32_t old_at(std::int32_t row, std::size_t axis) const { return old_positions[row].axis[axis]; }
  [[nodiscard]] std::int32_t new_at(std::int32_t row, std::size_t axis) const { return new_positions[row].axis[axis]; }
  [[nodiscard]] bool stays(std::int32_t row) const {
    for (std::size_t axis = 0; axis < kRopeAxes; ++axis) {
      if (counts[axis] && distance(row, axis) != 0) return false;
    }
    return true;
  }
  // On each axis one for all rows; the axes may differ in it.
  [[nodiscard]] bool one_distance(std::int32_t count) const {
    for (std::int32_t row = 1; row < count; ++row) {
      for (std::size_t axis = 0; axis < kRopeAxes; ++axis) {
        if (counts[axis] && distance(row, axis) != distance(0, axis)) return false;
      }
    }
    return true;
  }
  [[nodiscard]] std::int64_t distance(std::int32_t row, std::size_t axis) const {
    return std::int64_t{new_at(row, axis)} - old_at(row, axis);
  }
};

// How many of `count` rows at `positions`, the first or (backwards) the last of them, stay as they are, or turn, as
// one: what stays is copied, and must not be in a table beside what turns.
template <class Positions>
[[nodiscard]] std::int32_t rows_alike(const Positions& positions, std::int32_t count, bool backwards) {
  const std::int32_t first = backwards ? count - 1 : 0;
  std::int32_t alike = 1;
  while (alike < count && positions.stays(backwards ? first - alike : alike) == positions.stays(first)) ++alike;
  return alike;
}
[[nodiscard]] inline std::int32_t rows_alike(const RunPositions&, std::int32_t count, bool) { return count; }

}  // namespace detail

// Cosines and sines of one move: for each of its rows, or once for all of them, pairs() cosines, then pairs() sines. A
// view over the caller's floats. A default-constructed table turns nothing: rows are copied.
class RotationTable {
 public:
  RotationTable() = default;

  // Floats the table of `run` needs: 0 if nothing turns, one row's if one serves all - the rule is uniform and the
  // frequencies are the same - and a row's for each row otherwise. The specs are ones that can_shift().
  template <AngleRule A>
  [[nodiscard]] static std::int64_t size(const RopeSpec& stored, const RopeSpec& wanted, const ShiftRun& run) {
    return size<A>(stored, wanted, detail::RunPositions(run), run.count);
  }

  // Fills `storage` (at least size() floats) and returns the view over it: from `stored`'s frequencies at the old
  // positions to `wanted`'s at the new.
  template <AngleRule A>
  static Result<RotationTable> make(const RopeSpec& stored, const RopeSpec& wanted, const ShiftRun& run,
                                    std::span<float> storage) {
    return make<A>(stored, wanted, detail::RunPositions(run), run.count, storage);
  }

  // The same for `count` rows at positions of any kind (detail::RunPositions, detail::ListedPositions), which all stay
  // or all turn (detail::rows_alike).
  template <AngleRule A, class Positions>
  [[nodiscard]] static std::int64_t size(const RopeSpec& stored, const RopeSpec& wanted, const Positions& positions,
                                         std::int32_t count) {
    return std::int64_t{2} * wanted.pairs() * table_rows<A>(stored, wanted, positions, count);
  }
  template <AngleRule A, class Positions>
  static Result<RotationTable> make(const RopeSpec& stored, const RopeSpec& wanted, const Positions& positions,
                                    std::int32_t count, std::span<float> storage);

  // The table at `values`, where the caller has a copy of its floats: size() of them, in the order in which make()
  // wrote them. For kernels, which read a copy in the device's memory. A table that turns nothing stays one.
  [[nodiscard]] KVBLEND_HOST_DEVICE RotationTable moved_to(const float* values) const {
    RotationTable moved = *this;
    if (turns()) moved.values_ = values;
    return moved;
  }

  [[nodiscard]] KVBLEND_HOST_DEVICE bool turns() const { return values_ != nullptr; }
  [[nodiscard]] KVBLEND_HOST_DEVICE const float* cosines(std::int32_t row) const {
    return values_ + static_cast<std::ptrdiff_t>(row) * row_step_;
  }
  [[nodiscard]] KVBLEND_HOST_DEVICE const float* sines(std::int32_t row) const { return cosines(row) + pairs_; }
  [[nodiscard]] KVBLEND_HOST_DEVICE std::int32_t pairs() const { return pairs_; }

 private:
  template <AngleRule A, class Positions>
  static std::int32_t table_rows(const RopeSpec& stored, const RopeSpec& wanted, const Positions& positions,
                                 std::int32_t count) {
    if (count <= 0 || wanted.rotary_dim == 0) return 0;
    const bool same = same_frequencies(stored, wanted);
    if (same && positions.stays(0)) return 0;
    return A::uniform && same && positions.one_distance(count) ? 1 : count;
  }

  const float* values_ = nullptr;
  std::int32_t pairs_ = 0;
  std::int32_t row_step_ = 0;  // floats from a row to the next; 0: all rows turn alike
};
static_assert(std::is_trivially_copyable_v<RotationTable>);

// ---------------------------------------------------------------------------------------------------------------------

template <AngleRule A, class Positions>
Result<RotationTable> RotationTable::make(const RopeSpec& stored, const RopeSpec& wanted, const Positions& positions,
                                          std::int32_t count, std::span<float> storage) {
  const std::int32_t rows = table_rows<A>(stored, wanted, positions, count);
  const std::int64_t needed = std::int64_t{2} * wanted.pairs() * rows;
  if (static_cast<std::int64_t>(storage.size()) < needed) {
    return Status::error(StatusCode::insufficient_space, "needs %lld floats, has %zu", static_cast<long long>(needed),
                         storage.size())
        .at("rotation table");
  }
  RotationTable table;
  if (rows == 0) return table;
  table.values_ = storage.data();
  table.pairs_ = wanted.pairs();
  table.row_step_ = rows == 1 ? 0 : 2 * wanted.pairs();
  for (std::int32_t row = 0; row < rows; ++row) {
    float* cosines = storage.data() + static_cast<std::ptrdiff_t>(row) * table.row_step_;
    float* sines = cosines + table.pairs_;
    for (std::int32_t pair = 0; pair < table.pairs_; ++pair) {
      const auto i = static_cast<std::size_t>(pair);
      const std::size_t axis = wanted.axis_of_pair[i];
      const double angle =
          A::angle(stored.inv_freq[i], positions.old_at(row, axis), wanted.inv_freq[i], positions.new_at(row, axis));
      cosines[pair] = static_cast<float>(std::cos(angle));
      sines[pair] = static_cast<float>(std::sin(angle));
    }
  }
  return table;
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
