// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Functors that choose rows: ranks of scores, what the sorted ranks picked, and lists of rows put together. All lists
// ascend and have each entry once; their lengths are known on the host, only their contents are not.
#pragma once

#include <kvblend/core/types.hpp>
#include <kvblend/select/norm.hpp>
#include <kvblend/select/top_k.hpp>

#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {
namespace cuda {

// A list on the device.
struct RowList {
  const Row* rows = nullptr;
  std::int32_t size = 0;

  [[nodiscard]] static RowList of(std::span<const Row> rows) {
    return {rows.data(), static_cast<std::int32_t>(rows.size())};
  }

  // How many of them stand before `row`: its place among them, if it is one.
  [[nodiscard]] KVBLEND_HOST_DEVICE std::int32_t before(Row row) const {
    std::int32_t low = 0;
    std::int32_t high = size;
    while (low < high) {
      const std::int32_t middle = low + (high - low) / 2;
      if (rows[middle] < row) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

// out[i] = value
template <class T>
struct Fill {
  T* out;
  T value;

  KVBLEND_HOST_DEVICE void operator()(std::int64_t i) const { out[i] = value; }
};

// out[i] = i
struct CountUp {
  ActiveIndex* out;

  KVBLEND_HOST_DEVICE void operator()(std::int64_t i) const { out[i] = ActiveIndex(static_cast<std::int32_t>(i)); }
};

// out[rows[i]] = value
struct FillRows {
  const Row* rows;
  std::uint8_t* out;
  std::uint8_t value;

  KVBLEND_HOST_DEVICE void operator()(std::int64_t i) const { out[rows[i].value] = value; }
};

// Keys that sort as select_top_k ranks: by score, then by index.
struct RankScores {
  const float* scores;
  std::uint64_t* keys;

  KVBLEND_HOST_DEVICE void operator()(std::int64_t i) const {
    keys[i] = std::uint64_t{score_rank(scores[i])} << 32 | static_cast<std::uint64_t>(i);
  }
};

// Of such a key the index alone.
struct DropRanks {
  std::uint64_t* keys;

  KVBLEND_HOST_DEVICE void operator()(std::int64_t i) const { keys[i] &= 0xffffffffu; }
};

struct StoreIndices {
  const std::uint64_t* keys;
  ActiveIndex* out;

  KVBLEND_HOST_DEVICE void operator()(std::int64_t i) const {
    out[i] = ActiveIndex(static_cast<std::int32_t>(keys[i]));
  }
};

// out[i] = rows[picked[i]]
struct GatherRows {
  const Row* rows;
  const ActiveIndex* picked;
  Row* out;

  KVBLEND_HOST_DEVICE void operator()(std::int64_t i) const { out[i] = rows[picked[i].value]; }
};

// out[i] = by_row[rows[i]]
struct GatherByRow {
  const Row* rows;
  const float* by_row;
  float* out;

  KVBLEND_HOST_DEVICE void operator()(std::int64_t i) const { out[i] = by_row[rows[i].value]; }
};

// A layer of a probe pass: what rows[i] was paid, mass[rows[i]], goes weighed on to its sum, and starts at 0 again for the
// next layer. Mass of other rows, which nobody chooses from, goes on to add up.
struct WeighMass {
  const Row* rows;
  const float* norms;  // of the i-th row's values
  float* mass;
  float* sums;

  KVBLEND_HOST_DEVICE void operator()(std::int64_t i) const {
    const std::int32_t row = rows[i].value;
    sums[row] = kvblend::detail::add_weighed(sums[row], mass[row], norms[i]);
    mass[row] = 0;
  }
};

// The active rows are two lists, mandatory rows and candidates, merged: a row's place is that in its own list and how
// many of the other stand before it.
//
// out[i] = the place of candidate i among the active rows
struct PlaceCandidates {
  RowList mandatory;
  RowList candidates;
  ActiveIndex* out;

  KVBLEND_HOST_DEVICE void operator()(std::int64_t i) const {
    const auto own = static_cast<std::int32_t>(i);
    out[i] = ActiveIndex(own + mandatory.before(candidates.rows[i]));
  }
};

// out[i] = the place of row i of a part of the mandatory rows among the active ones
struct PlaceRows {
  const Row* rows;
  RowList mandatory;
  RowList candidates;
  ActiveIndex* out;

  KVBLEND_HOST_DEVICE void operator()(std::int64_t i) const {
    out[i] = ActiveIndex(mandatory.before(rows[i]) + candidates.before(rows[i]));
  }
};

// Of the active rows go on the mandatory ones and `chosen`, a part of the candidates: kept[i] is the place of the i-th
// of them among those that are active now (null: not asked for), active[i] its row. Items: mandatory rows, then chosen
// ones.
struct KeepChosen {
  RowList mandatory;
  RowList candidates;
  RowList chosen;
  ActiveIndex* kept;
  Row* active;

  KVBLEND_HOST_DEVICE void operator()(std::int64_t item) const {
    const auto i = static_cast<std::int32_t>(item);
    const bool is_mandatory = i < mandatory.size;
    const Row row = is_mandatory ? mandatory.rows[i] : chosen.rows[i - mandatory.size];
    const std::int32_t mandatory_before = mandatory.before(row);
    const std::int32_t to = mandatory_before + chosen.before(row);
    active[to] = row;
    if (kept != nullptr) kept[to] = ActiveIndex(mandatory_before + candidates.before(row));
  }
};

}  // namespace cuda
}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
