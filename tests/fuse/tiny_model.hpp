// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A llama-family model small enough for naive loops: the oracle in double, written without any part of the library's
// arithmetic, and a host in float that the library blends on.
#pragma once

#include <kvblend/codec/floats.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/memory/layouts.hpp>
#include <kvblend/prompt/prompt.hpp>
#include <kvblend/rope/spec.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

namespace tiny {

using kvblend::ActiveIndex;
using kvblend::Position;
using kvblend::Row;
using kvblend::Status;
using kvblend::TokenId;

struct Config {
  int layers = 4;
  int hidden = 24;
  int heads = 4;
  int kv_heads = 2;
  int head_dim = 8;
  int ffn = 40;
  int vocab = 50;
  kvblend::RopePairing pairing = kvblend::RopePairing::neox;
  bool bias = false;
  int layer_without_rope = -1;
  double theta = 10000;
  double odd_layers_theta = 10000;  // of layers 1, 3, …
};

struct LayerWeights {
  std::vector<double> q, k, v, o, gate, up, down, attention_norm, mlp_norm, q_bias, k_bias, v_bias;
};

struct Model {
  Config config;
  std::vector<double> embedding, final_norm;  // the output head is the embedding
  std::vector<LayerWeights> layers;
  std::vector<kvblend::RopeSpec> ropes;

  Model(Config c, unsigned seed) : config(c) {
    std::mt19937 random(seed);
    const auto matrix = [&random](int rows, int columns, double scale) {
      std::normal_distribution<double> normal(0, scale);
      std::vector<double> values(static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns));
      // Rounded to float, so that the oracle and the host have the same weights.
      for (double& value : values) value = static_cast<float>(normal(random));
      return values;
    };
    const auto norm = [&](int n) {
      auto values = matrix(n, 1, 0.1);
      for (double& value : values) value = static_cast<float>(value + 1);
      return values;
    };
    embedding = matrix(c.vocab, c.hidden, 1);
    final_norm = norm(c.hidden);
    const double scale = 1.0 / std::sqrt(c.hidden);
    for (int l = 0; l < c.layers; ++l) {
      LayerWeights w;
      // Sharper than usual, so that attention between chunks matters and reuse loses something.
      w.q = matrix(c.heads * c.head_dim, c.hidden, 2 * scale);
      w.k = matrix(c.kv_heads * c.head_dim, c.hidden, 2 * scale);
      w.v = matrix(c.kv_heads * c.head_dim, c.hidden, 2 * scale);
      w.o = matrix(c.hidden, c.heads * c.head_dim, scale);
      w.gate = matrix(c.ffn, c.hidden, scale);
      w.up = matrix(c.ffn, c.hidden, scale);
      w.down = matrix(c.hidden, c.ffn, 1.0 / std::sqrt(c.ffn));
      w.attention_norm = norm(c.hidden);
      w.mlp_norm = norm(c.hidden);
      const double bias = c.bias ? 0.5 : 0.0;
      w.q_bias = matrix(c.heads * c.head_dim, 1, bias);
      w.k_bias = matrix(c.kv_heads * c.head_dim, 1, bias);
      w.v_bias = matrix(c.kv_heads * c.head_dim, 1, bias);
      layers.push_back(w);

      kvblend::RopeSpec spec;
      spec.head_dim = c.head_dim;
      spec.rotary_dim = l == c.layer_without_rope ? 0 : c.head_dim;
      spec.pairing = c.pairing;
      for (int i = 0; i < spec.pairs(); ++i) {
        spec.inv_freq[static_cast<std::size_t>(i)] =
            std::pow(l % 2 == 0 ? c.theta : c.odd_layers_theta, -2.0 * i / c.head_dim);
      }
      ropes.push_back(spec);
    }
  }
};

// y[rows] = W[rows, columns] x[columns] (+ bias)
template <class T>
std::vector<T> multiply(const std::vector<double>& weights, const std::vector<T>& x,
                        const std::vector<double>* bias = nullptr) {
  const std::size_t rows = weights.size() / x.size();
  std::vector<T> y(rows);
  for (std::size_t r = 0; r < rows; ++r) {
    T sum = bias != nullptr ? static_cast<T>((*bias)[r]) : T(0);
    for (std::size_t c = 0; c < x.size(); ++c) sum += static_cast<T>(weights[r * x.size() + c]) * x[c];
    y[r] = sum;
  }
  return y;
}

template <class T>
std::vector<T> rms_norm(const std::vector<T>& x, const std::vector<double>& gain) {
  T sum = 0;
  for (const T value : x) sum += value * value;
  const T scale = T(1) / std::sqrt(sum / static_cast<T>(x.size()) + T(1e-6));
  std::vector<T> y(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) y[i] = x[i] * scale * static_cast<T>(gain[i]);
  return y;
}

// Rotates the heads of x to `position`.
template <class T>
void rotate(const kvblend::RopeSpec& spec, std::vector<T>& x, int position) {
  const int half = spec.rotary_dim / 2;
  for (std::size_t head = 0; head * static_cast<std::size_t>(spec.head_dim) < x.size(); ++head) {
    T* values = x.data() + head * static_cast<std::size_t>(spec.head_dim);
    for (int i = 0; i < half; ++i) {
      const bool neox = spec.pairing == kvblend::RopePairing::neox;
      T& a = values[neox ? i : 2 * i];
      T& b = values[neox ? i + half : 2 * i + 1];
      const double angle = position * spec.inv_freq[static_cast<std::size_t>(i)];
      const T c = static_cast<T>(std::cos(angle));
      const T s = static_cast<T>(std::sin(angle));
      const T rotated = a * c - b * s;
      b = b * c + a * s;
      a = rotated;
    }
  }
}

template <class T>
std::vector<T> swiglu(const LayerWeights& w, const std::vector<T>& x) {
  auto gate = multiply(w.gate, x);
  const auto up = multiply(w.up, x);
  for (std::size_t i = 0; i < gate.size(); ++i) gate[i] = gate[i] / (T(1) + std::exp(-gate[i])) * up[i];
  return multiply(w.down, gate);
}

template <class T>
std::vector<T> embed(const Model& model, TokenId token) {
  const auto hidden = static_cast<std::size_t>(model.config.hidden);
  std::vector<T> x(hidden);
  for (std::size_t i = 0; i < hidden; ++i)
    x[i] = static_cast<T>(model.embedding[static_cast<std::size_t>(token) * hidden + i]);
  return x;
}

template <class T>
std::vector<T> output_head(const Model& model, const std::vector<T>& hidden) {
  return multiply(model.embedding, rms_norm(hidden, model.final_norm));
}

// Attention of one token over rows whose keys and values are given by `key_of(row, kv_head)` and `value_of(row, kv_head)`,
// for rows with visible(row). Adds the weights to `mass` if given.
template <class T, class KeyOf, class ValueOf, class Visible>
std::vector<T> attention(const Config& c, const std::vector<T>& query, int rows, KeyOf key_of, ValueOf value_of,
                         Visible visible, float* mass = nullptr) {
  std::vector<T> out(static_cast<std::size_t>(c.heads * c.head_dim), T(0));
  for (int head = 0; head < c.heads; ++head) {
    const int kv_head = head / (c.heads / c.kv_heads);
    std::vector<T> weights(static_cast<std::size_t>(rows), T(0));
    T largest = -1e30f;
    for (int row = 0; row < rows; ++row) {
      if (!visible(row)) continue;
      const std::vector<T> key = key_of(row, kv_head);
      T dot = 0;
      for (int d = 0; d < c.head_dim; ++d) {
        dot += query[static_cast<std::size_t>(head * c.head_dim + d)] * key[static_cast<std::size_t>(d)];
      }
      weights[static_cast<std::size_t>(row)] = dot / std::sqrt(static_cast<T>(c.head_dim));
      largest = std::max(largest, weights[static_cast<std::size_t>(row)]);
    }
    T sum = 0;
    for (int row = 0; row < rows; ++row) {
      T& weight = weights[static_cast<std::size_t>(row)];
      weight = visible(row) ? std::exp(weight - largest) : T(0);
      sum += weight;
    }
    for (int row = 0; row < rows; ++row) {
      if (!visible(row)) continue;
      const T weight = weights[static_cast<std::size_t>(row)] / sum;
      if (mass != nullptr) mass[row] += static_cast<float>(weight);
      const std::vector<T> value = value_of(row, kv_head);
      for (int d = 0; d < c.head_dim; ++d) {
        out[static_cast<std::size_t>(head * c.head_dim + d)] += weight * value[static_cast<std::size_t>(d)];
      }
    }
  }
  return out;
}

// ---- the oracle -----------------------------------------------------------------------------------------------------

// Keys before rope and values, [layer][row][kv_heads * head_dim]; and the logits of every row.
struct Prefill {
  std::vector<std::vector<std::vector<double>>> keys, values;
  std::vector<std::vector<double>> logits;
};

// Full prefill, or what a blend must give: in layer l only rows with computes(l, row) run, all others have the keys and
// values of `reused`, changed by move(l, rotated keys, values) before anybody sees them. Rows that stopped running have
// no logits.
struct MoveNothing {
  void operator()(std::size_t, std::vector<std::vector<double>>&, std::vector<std::vector<double>>&) const {}
};
template <class Computes, class Move = MoveNothing>
Prefill reference(const Model& model, const std::vector<TokenId>& tokens, const std::vector<int>& positions,
                  const Prefill* reused, Computes computes, Move move = {}) {
  const Config& c = model.config;
  const std::size_t rows = tokens.size();
  Prefill out;
  out.keys.resize(static_cast<std::size_t>(c.layers));
  out.values.resize(static_cast<std::size_t>(c.layers));
  std::vector<std::vector<double>> hidden;
  for (const TokenId token : tokens) hidden.push_back(embed<double>(model, token));
  for (std::size_t l = 0; l < model.layers.size(); ++l) {
    const LayerWeights& w = model.layers[l];
    if (reused != nullptr) {
      out.keys[l] = reused->keys[l];
      out.values[l] = reused->values[l];
    }
    out.keys[l].resize(rows);
    out.values[l].resize(rows);
    std::vector<std::vector<double>> queries(rows);
    for (std::size_t row = 0; row < rows; ++row) {
      if (!computes(static_cast<int>(l), static_cast<int>(row))) continue;
      const auto x = rms_norm(hidden[row], w.attention_norm);
      queries[row] = multiply(w.q, x, &w.q_bias);
      out.keys[l][row] = multiply(w.k, x, &w.k_bias);
      out.values[l][row] = multiply(w.v, x, &w.v_bias);
      rotate(model.ropes[l], queries[row], positions[row]);
    }
    auto rotated = out.keys[l];
    for (std::size_t row = 0; row < rows; ++row) rotate(model.ropes[l], rotated[row], positions[row]);
    move(l, rotated, out.values[l]);
    for (std::size_t row = 0; row < rows; ++row) {
      out.keys[l][row] = rotated[row];
      rotate(model.ropes[l], out.keys[l][row], -positions[row]);
    }
    const auto slice = [&c](const std::vector<double>& all, int head) {
      return std::vector<double>(all.begin() + head * c.head_dim, all.begin() + (head + 1) * c.head_dim);
    };
    for (std::size_t row = 0; row < rows; ++row) {
      if (!computes(static_cast<int>(l), static_cast<int>(row))) continue;
      const auto attended = attention(
          c, queries[row], static_cast<int>(rows),
          [&](int r, int h) { return slice(rotated[static_cast<std::size_t>(r)], h); },
          [&](int r, int h) { return slice(out.values[l][static_cast<std::size_t>(r)], h); },
          [&](int r) { return positions[static_cast<std::size_t>(r)] <= positions[row]; });
      const auto projected = multiply(w.o, attended);
      for (std::size_t i = 0; i < projected.size(); ++i) hidden[row][i] += projected[i];
      const auto mlp = swiglu(w, rms_norm(hidden[row], w.mlp_norm));
      for (std::size_t i = 0; i < mlp.size(); ++i) hidden[row][i] += mlp[i];
    }
  }
  for (std::size_t row = 0; row < rows; ++row) out.logits.push_back(output_head(model, hidden[row]));
  return out;
}

inline Prefill full_prefill(const Model& model, const std::vector<TokenId>& tokens, const std::vector<int>& positions) {
  return reference(model, tokens, positions, nullptr, [](int, int) { return true; });
}

// ---- the host -------------------------------------------------------------------------------------------------------

// A LayerwiseHost in float with its cache in the given codec and layout. Planes come from `make_plane`, so that a test
// can hand in paged memory.
template <class Codec, class Layout>
class Host {
 public:
  using Plane = kvblend::Plane<Codec, Layout>;
  using FreshPlane = kvblend::ContiguousPlane<kvblend::F32Codec>;

  Host(const Model& model, Layout layout, std::size_t plane_bytes) : model_(model), layout_(layout) {
    memory_.assign(2 * model.layers.size(), std::vector<std::byte>(plane_bytes, std::byte{0x7f}));
  }

  // What a test may break: the call whose countdown reaches 0 fails.
  int fail_after = -1;

  [[nodiscard]] std::int32_t layers() const { return model_.config.layers; }
  [[nodiscard]] const kvblend::RopeSpec& rope(std::int32_t layer) const {
    return model_.ropes[static_cast<std::size_t>(layer)];
  }
  [[nodiscard]] Plane keys(std::int32_t layer) {
    return Plane(memory_[static_cast<std::size_t>(2 * layer)].data(), layout_);
  }
  [[nodiscard]] Plane values(std::int32_t layer) {
    return Plane(memory_[static_cast<std::size_t>(2 * layer + 1)].data(), layout_);
  }
  [[nodiscard]] FreshPlane fresh_keys() { return fresh(fresh_keys_); }
  [[nodiscard]] FreshPlane fresh_values() { return fresh(fresh_values_); }

  Status begin(const kvblend::Prompt& prompt) {
    if (fails()) return failure("begin");
    prompt_ = &prompt;
    return {};
  }
  Status embed(std::span<const Row> rows) {
    if (fails()) return failure("embed");
    hidden_.clear();
    for (const Row row : rows) hidden_.push_back(tiny::embed<float>(model_, prompt_->token(row)));
    return {};
  }
  Status project(std::int32_t layer, std::span<const Row> rows) {
    if (fails()) return failure("project");
    const LayerWeights& w = model_.layers[static_cast<std::size_t>(layer)];
    queries_.clear();
    fresh_keys_.clear();
    fresh_values_.clear();
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const auto x = rms_norm(hidden_[i], w.attention_norm);
      auto query = multiply(w.q, x, &w.q_bias);
      auto key = multiply(w.k, x, &w.k_bias);
      const auto value = multiply(w.v, x, &w.v_bias);
      rotate(rope(layer), query, prompt_->position(rows[i]).value);
      rotate(rope(layer), key, prompt_->position(rows[i]).value);
      queries_.push_back(query);
      fresh_keys_.insert(fresh_keys_.end(), key.begin(), key.end());
      fresh_values_.insert(fresh_values_.end(), value.begin(), value.end());
    }
    return {};
  }
  Status attend(std::int32_t layer, std::span<const Row> rows, std::span<const ActiveIndex> kept) {
    return attend_and_report(layer, rows, kept, static_cast<std::int32_t>(kept.size()), {});
  }
  Status attend_and_report(std::int32_t layer, std::span<const Row> rows, std::span<const ActiveIndex> kept,
                           std::int32_t first, std::span<float> mass) {
    if (fails()) return failure("attend");
    const LayerWeights& w = model_.layers[static_cast<std::size_t>(layer)];
    const Config& c = model_.config;
    const auto read = [&c](const Plane& plane, int row, int head) {
      std::vector<float> values(static_cast<std::size_t>(c.head_dim));
      kvblend::decode_head(plane, row, head, values.data());
      return values;
    };
    std::vector<std::vector<float>> narrowed;
    for (std::size_t i = 0; i < kept.size(); ++i) {
      const auto at = static_cast<std::size_t>(kept[i].value);
      const Position own = prompt_->position(rows[at]);
      const bool reports = static_cast<std::int32_t>(i) >= first;
      const auto attended = attention(
          c, queries_[at], prompt_->rows(), [&](int r, int h) { return read(keys(layer), r, h); },
          [&](int r, int h) { return read(values(layer), r, h); },
          [&](int r) { return prompt_->position(Row(r)) <= own; }, reports && !mass.empty() ? mass.data() : nullptr);
      auto x = hidden_[at];
      const auto projected = multiply(w.o, attended);
      for (std::size_t j = 0; j < x.size(); ++j) x[j] += projected[j];
      const auto mlp = swiglu(w, rms_norm(x, w.mlp_norm));
      for (std::size_t j = 0; j < x.size(); ++j) x[j] += mlp[j];
      narrowed.push_back(x);
    }
    hidden_ = narrowed;
    return {};
  }
  Status commit(std::int32_t rows) {
    if (fails()) return failure("commit");
    committed = rows;
    return {};
  }
  void abort() { ++aborts; }

  // Logits of the i-th output row.
  [[nodiscard]] std::vector<float> logits(std::size_t i) const { return output_head(model_, hidden_[i]); }
  [[nodiscard]] std::size_t outputs() const { return hidden_.size(); }
  [[nodiscard]] const std::vector<std::vector<std::byte>>& memory() const { return memory_; }

  int committed = 0;
  int aborts = 0;

 private:
  bool fails() { return fail_after >= 0 && fail_after-- == 0; }
  static Status failure(const char* call) {
    return Status::error(kvblend::StatusCode::host_error, "engine failed").at("%s", call);
  }
  FreshPlane fresh(std::vector<float>& values) {
    const Config& c = model_.config;
    const auto rows = static_cast<std::int64_t>(values.size()) / (c.kv_heads * c.head_dim);
    return kvblend::dense_plane<kvblend::F32Codec>(reinterpret_cast<std::byte*>(values.data()), rows, c.kv_heads,
                                                   c.head_dim);
  }

  const Model& model_;
  Layout layout_;
  std::vector<std::vector<std::byte>> memory_;  // keys of layer 0, values of layer 0, keys of layer 1, …
  const kvblend::Prompt* prompt_ = nullptr;
  std::vector<std::vector<float>> hidden_, queries_;
  std::vector<float> fresh_keys_, fresh_values_;
};

// ---- chunks ---------------------------------------------------------------------------------------------------------

// A chunk as an engine would have stored it: computed behind `context`, from position 0, keys rotated.
struct Chunk {
  std::vector<TokenId> tokens, context;
  std::vector<std::vector<float>> keys, values;  // per layer, dense
  std::vector<float> scores;
  kvblend::ChunkInfo info;
  Prefill prefill;  // of context and tokens
};

// `info` points into the chunk, so chunks live behind stable addresses.
inline void encode_chunk(const Model& model, Chunk& chunk, int first_position) {
  std::vector<TokenId> all = chunk.context;
  all.insert(all.end(), chunk.tokens.begin(), chunk.tokens.end());
  const int skipped = static_cast<int>(chunk.context.size());
  std::vector<int> positions;
  for (int i = 0; i < static_cast<int>(all.size()); ++i) positions.push_back(i + first_position - skipped);
  chunk.prefill = full_prefill(model, all, positions);
  chunk.keys.clear();
  chunk.values.clear();
  for (std::size_t l = 0; l < model.layers.size(); ++l) {
    auto& keys = chunk.keys.emplace_back();
    auto& values = chunk.values.emplace_back();
    for (std::size_t row = chunk.context.size(); row < all.size(); ++row) {
      auto key = chunk.prefill.keys[l][row];
      rotate(model.ropes[l], key, positions[row]);
      for (const double value : key) keys.push_back(static_cast<float>(value));
      for (const double value : chunk.prefill.values[l][row]) values.push_back(static_cast<float>(value));
    }
  }
  chunk.info.tokens = chunk.tokens;
  chunk.info.context = chunk.context;
  chunk.info.first_position = Position(first_position);
  chunk.info.scores = chunk.scores;
}

// A KvSource over chunks in memory.
class Source {
 public:
  Source(const Model& model, std::vector<Chunk*> by_segment) : model_(model), chunks_(std::move(by_segment)) {}

  int fail_at_layer = -1;
  int waits = 0;

  Status wait(std::int32_t layer) {
    ++waits;
    if (layer != fail_at_layer) return {};
    return Status::error(kvblend::StatusCode::corrupt, "checksum differs").at("layer %d", layer);
  }
  [[nodiscard]] auto keys(std::int32_t segment, std::int32_t layer) {
    return plane(at(segment).keys[static_cast<std::size_t>(layer)]);
  }
  [[nodiscard]] auto values(std::int32_t segment, std::int32_t layer) {
    return plane(at(segment).values[static_cast<std::size_t>(layer)]);
  }
  void release(std::int32_t) {}
  [[nodiscard]] const kvblend::RopeSpec& rope(std::int32_t, std::int32_t layer) {
    return model_.ropes[static_cast<std::size_t>(layer)];
  }

 private:
  Chunk& at(std::int32_t segment) { return *chunks_[static_cast<std::size_t>(segment)]; }
  kvblend::ConstContiguousPlane<kvblend::F32Codec> plane(const std::vector<float>& values) const {
    const Config& c = model_.config;
    const auto rows = static_cast<std::int64_t>(values.size()) / (c.kv_heads * c.head_dim);
    return kvblend::dense_plane<kvblend::F32Codec>(reinterpret_cast<const std::byte*>(values.data()), rows, c.kv_heads,
                                                   c.head_dim);
  }

  const Model& model_;
  std::vector<Chunk*> chunks_;
};

}  // namespace tiny
