// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The engine's row work: f(row, team), for a team of one as for a block of a GPU. Values go in groups of four, which a
// GPU reads at once: all widths are multiples of four, and rows start at a group's boundary.
#pragma once

#include <kvblend/codec/floats.hpp>
#include <kvblend/core/config.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/memory/plane.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace cuda_engine {

using kvblend::ActiveIndex;
using kvblend::BFloat16;
using kvblend::Row;
using kvblend::TokenId;

KVBLEND_HOST_DEVICE inline float load(float value) { return value; }
KVBLEND_HOST_DEVICE inline float load(BFloat16 value) { return kvblend::to_float(value); }
KVBLEND_HOST_DEVICE inline void store(float& to, float value) { to = value; }
KVBLEND_HOST_DEVICE inline void store(BFloat16& to, float value) { to = kvblend::to_bfloat16(value); }

template <class T>
struct alignas(4 * sizeof(T)) Four {
  T value[4];
};
template <class T>
KVBLEND_HOST_DEVICE const Four<T>& four(const T* values, std::int64_t group) {
  return reinterpret_cast<const Four<T>*>(values)[group];
}
template <class T>
KVBLEND_HOST_DEVICE Four<T>& four(T* values, std::int64_t group) {
  return reinterpret_cast<Four<T>*>(values)[group];
}

template <class T>
struct EmbedRow {
  const Row* rows;
  const TokenId* tokens;  // by row
  const T* embedding;     // [vocabulary, columns]
  T* hidden;              // [active, columns]
  std::int32_t columns;

  template <class Team>
  KVBLEND_HOST_DEVICE void operator()(std::int64_t i, const Team& team) const {
    const T* from = embedding + std::int64_t{tokens[rows[i].value]} * columns;
    T* to = hidden + i * columns;
    for (std::int32_t g = team.rank(); g < columns / 4; g += team.size()) four(to, g) = four(from, g);
  }
};

// out = in / rms(in) ∘ weight.
template <class T>
struct NormaliseRow {
  const T* in;
  const float* weight;
  T* out;
  std::int32_t columns;
  float epsilon;

  template <class Team>
  KVBLEND_HOST_DEVICE void operator()(std::int64_t i, const Team& team) const {
    const T* from = in + i * columns;
    T* to = out + i * columns;
    float squares = 0;
    for (std::int32_t g = team.rank(); g < columns / 4; g += team.size()) {
      const Four<T> x = four(from, g);
      for (int k = 0; k < 4; ++k) squares += load(x.value[k]) * load(x.value[k]);
    }
    const float scale = 1.0f / std::sqrt(team.sum(squares) / static_cast<float>(columns) + epsilon);
    for (std::int32_t g = team.rank(); g < columns / 4; g += team.size()) {
      const Four<T> x = four(from, g);
      const Four<float> w = four(weight, g);
      Four<T> y;
      for (int k = 0; k < 4; ++k) store(y.value[k], load(x.value[k]) * scale * w.value[k]);
      four(to, g) = y;
    }
  }
};

// Adds the bias to queries, keys and values, and turns queries and keys to their positions, in place.
template <class T>
struct TurnRow {
  const Row* rows;
  const std::int32_t* positions;  // by row
  const float* table;             // by position: `pairs` cosines, then as many sines
  const float* bias;              // [stride], or null
  T* qkv;                         // [active, stride]: queries, keys, values
  std::int32_t stride;
  std::int32_t heads;  // of queries and keys
  std::int32_t head_dim;
  std::int32_t pairs;
  std::int32_t offset;  // of the first value that turns, within a head
  bool halves;          // pair i is values i and i + pairs, else 2i and 2i + 1

  template <class Team>
  KVBLEND_HOST_DEVICE void operator()(std::int64_t i, const Team& team) const {
    T* values = qkv + i * stride;
    if (bias != nullptr) {
      for (std::int32_t g = team.rank(); g < stride / 4; g += team.size()) {
        Four<T> x = four(values, g);
        const Four<float> b = four(bias, g);
        for (int k = 0; k < 4; ++k) store(x.value[k], load(x.value[k]) + b.value[k]);
        four(values, g) = x;
      }
      team.sync();
    }
    const float* cosines = table + std::int64_t{positions[rows[i].value]} * 2 * pairs;
    for (std::int32_t at = team.rank(); at < heads * pairs; at += team.size()) {
      const std::int32_t head = at / pairs;
      const std::int32_t pair = at - head * pairs;
      T* a = values + head * head_dim + offset + (halves ? pair : 2 * pair);
      T* b = a + (halves ? pairs : 1);
      const float x = load(*a);
      const float y = load(*b);
      const float cosine = cosines[pair];
      const float sine = cosines[pairs + pair];
      store(*a, x * cosine - y * sine);
      store(*b, x * sine + y * cosine);
    }
  }
};

// All heads of row `rows[i]`, or i without rows, of one plane into the same or row i of another: fresh rows into the
// cache, the cache's rows into one piece.
template <class T, class From, class To>
struct CopyRow {
  From from;
  To to;
  const Row* to_rows;  // or null

  template <class Team>
  KVBLEND_HOST_DEVICE void operator()(std::int64_t i, const Team& team) const {
    const std::int64_t target = to_rows != nullptr ? to_rows[i].value : i;
    const std::int32_t per_head = from.layout.head_dim() / 4;
    for (std::int32_t at = team.rank(); at < from.layout.heads() * per_head; at += team.size()) {
      const std::int32_t head = at / per_head;
      const std::int32_t g = at - head * per_head;
      four(reinterpret_cast<T*>(to.at(target, head)), g) = four(reinterpret_cast<const T*>(from.at(i, head)), g);
    }
  }
};

// Queries of the kept rows, so that those of the query heads of a key head lie together: [kv_heads, rows, group,
// head_dim] from heads in order; and outputs back.
template <class T>
struct PackQueries {
  const T* qkv;
  const ActiveIndex* kept;
  T* packed;
  std::int64_t rows;
  std::int32_t stride;  // of qkv
  std::int32_t heads, group, head_dim;

  template <class Team>
  KVBLEND_HOST_DEVICE void operator()(std::int64_t i, const Team& team) const {
    const T* from = qkv + std::int64_t{kept[i].value} * stride;
    const std::int32_t per_head = head_dim / 4;
    for (std::int32_t at = team.rank(); at < heads * per_head; at += team.size()) {
      const std::int32_t head = at / per_head;
      const std::int64_t packed_head = (std::int64_t{head / group} * rows + i) * group + head % group;
      four(packed + packed_head * head_dim, at - head * per_head) = four(from, at);
    }
  }
};

template <class T>
struct UnpackOutputs {
  const T* packed;
  T* attended;  // [rows, heads · head_dim]
  std::int64_t rows;
  std::int32_t heads, group, head_dim;

  template <class Team>
  KVBLEND_HOST_DEVICE void operator()(std::int64_t i, const Team& team) const {
    T* to = attended + i * heads * head_dim;
    const std::int32_t per_head = head_dim / 4;
    for (std::int32_t at = team.rank(); at < heads * per_head; at += team.size()) {
      const std::int32_t head = at / per_head;
      const std::int64_t packed_head = (std::int64_t{head / group} * rows + i) * group + head % group;
      four(to, at) = four(packed + packed_head * head_dim, at - head * per_head);
    }
  }
};

// Scores to weights for a chunk of query rows, [kv_heads, chunk, group, stride]. Positions ascend strictly with the
// rows of a cache, so the rows at positions ≤ a row's own are those up to itself: the mask by position is a number of
// rows.
template <class T>
struct MaskedSoftmax {
  const float* scores;
  T* weights;
  const Row* rows;
  const ActiveIndex* kept;  // of the chunk's first row
  std::int32_t chunk, group;
  std::int32_t columns;  // seen by the row that sees most; weights of what a row does not see are 0
  std::int64_t stride;

  template <class Team>
  KVBLEND_HOST_DEVICE void operator()(std::int64_t i, const Team& team) const {
    const std::int64_t query = i / group % chunk;
    const std::int32_t visible = rows[kept[query].value].value + 1;
    const float* from = scores + i * stride;
    T* to = weights + i * stride;
    float largest = -INFINITY;
    float sum = 0;
    for (std::int32_t g = team.rank(); g < (visible + 3) / 4; g += team.size()) {
      const Four<float> x = four(from, g);
      float most = largest;
      for (int k = 0; k < 4; ++k) most = 4 * g + k < visible && x.value[k] > most ? x.value[k] : most;
      float more = 0;
      for (int k = 0; k < 4; ++k) more += 4 * g + k < visible ? std::exp(x.value[k] - most) : 0.0f;
      sum = sum * std::exp(largest - most) + more;
      largest = most;
    }
    const float most = team.max(largest);
    const float inverse = 1.0f / team.sum(sum * std::exp(largest - most));
    for (std::int32_t g = team.rank(); g < (columns + 3) / 4; g += team.size()) {
      Four<T> y{};
      if (4 * g < visible) {
        const Four<float> x = four(from, g);
        for (int k = 0; k < 4; ++k) {
          store(y.value[k], 4 * g + k < visible ? std::exp(x.value[k] - most) * inverse : 0.0f);
        }
      }
      four(to, g) = y;
    }
  }
};

// Hidden states of the kept rows. In and out do not overlap.
template <class T>
struct KeepRow {
  const T* in;
  const ActiveIndex* kept;
  T* out;
  std::int32_t columns;

  template <class Team>
  KVBLEND_HOST_DEVICE void operator()(std::int64_t i, const Team& team) const {
    const T* from = in + std::int64_t{kept[i].value} * columns;
    T* to = out + i * columns;
    for (std::int32_t g = team.rank(); g < columns / 4; g += team.size()) four(to, g) = four(from, g);
  }
};

// gated = silu(gate) ∘ up.
template <class T>
struct GateRow {
  const T* gate_up;  // [active, 2 · columns]: gate, then up
  T* gated;          // [active, columns]
  std::int32_t columns;

  template <class Team>
  KVBLEND_HOST_DEVICE void operator()(std::int64_t i, const Team& team) const {
    const T* gate = gate_up + i * 2 * columns;
    T* to = gated + i * columns;
    for (std::int32_t g = team.rank(); g < columns / 4; g += team.size()) {
      const Four<T> a = four(gate, g);
      const Four<T> b = four(gate + columns, g);
      Four<T> y;
      for (int k = 0; k < 4; ++k) {
        const float x = load(a.value[k]);
        store(y.value[k], x / (1.0f + std::exp(-x)) * load(b.value[k]));
      }
      four(to, g) = y;
    }
  }
};

// 0, 1, 2, … as indices of any space.
template <class Index>
struct CountUp {
  Index* out;
  KVBLEND_HOST_DEVICE void operator()(std::int64_t i) const { out[i] = Index(static_cast<std::int32_t>(i)); }
};

// mean + deviation · a number that is nearly normal, each from its index and the seed alone.
template <class T>
struct RandomValue {
  T* out;
  std::uint64_t seed;
  float mean, deviation;

  KVBLEND_HOST_DEVICE void operator()(std::int64_t i) const {
    std::uint64_t x = seed + static_cast<std::uint64_t>(i) * 0x9e3779b97f4a7c15ULL;  // splitmix64
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    x ^= x >> 31;
    float sum = 0;  // of four uniforms: variance 1/3
    for (int part = 0; part < 4; ++part) {
      sum += static_cast<float>((x >> (16 * part)) & 0xffff) * (1.0f / 65536.0f) - 0.5f;
    }
    store(out[i], mean + deviation * 1.7320508f * sum);
  }
};

}  // namespace cuda_engine
