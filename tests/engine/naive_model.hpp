// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The oracle of the engine's tests: a llama-family forward pass in double, loop by loop, one token after the other.
#pragma once

#include <eigen_engine/model.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace naive {

using Vector = std::vector<double>;

struct Output {
  std::vector<Vector> logits;             // [tokens][vocabulary]
  std::vector<std::vector<Vector>> mass;  // [layer][query token][key token], summed over heads
};

inline Vector matvec(const std::vector<float>& matrix, const Vector& x, std::size_t rows) {
  Vector y(rows, 0.0);
  for (std::size_t i = 0; i < rows; ++i) {
    for (std::size_t j = 0; j < x.size(); ++j) y[i] += static_cast<double>(matrix[i * x.size() + j]) * x[j];
  }
  return y;
}

inline Vector rms_norm(const Vector& x, const std::vector<float>& weight, double epsilon) {
  double squares = 0;
  for (const double v : x) squares += v * v;
  const double scale = 1.0 / std::sqrt(squares / static_cast<double>(x.size()) + epsilon);
  Vector y(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) y[i] = x[i] * scale * static_cast<double>(weight[i]);
  return y;
}

inline void rotate(const kvblend::RopeSpec& rope, int position, double* head) {
  const int half = rope.rotary_dim / 2;
  for (int pair = 0; pair < half; ++pair) {
    const double angle = position * rope.inv_freq[static_cast<std::size_t>(pair)];
    const bool neox = rope.pairing == kvblend::RopePairing::neox;
    double& a = head[rope.rotary_offset + (neox ? pair : 2 * pair)];
    double& b = head[rope.rotary_offset + (neox ? pair + half : 2 * pair + 1)];
    const double x = a;
    const double y = b;
    a = x * std::cos(angle) - y * std::sin(angle);
    b = x * std::sin(angle) + y * std::cos(angle);
  }
}

inline Output forward(const eigen_engine::ModelConfig& c, const eigen_engine::ModelTensors& w,
                      const std::vector<int>& tokens, const std::vector<int>& positions) {
  const auto head_dim = static_cast<std::size_t>(c.head_dim);
  const auto heads = static_cast<std::size_t>(c.heads);
  const auto kv_heads = static_cast<std::size_t>(c.kv_heads);
  const auto hidden = static_cast<std::size_t>(c.hidden);
  const auto feed_forward = static_cast<std::size_t>(c.feed_forward);
  const std::size_t count = tokens.size();
  Output out;
  std::vector<Vector> x(count, Vector(hidden));
  for (std::size_t t = 0; t < count; ++t) {
    for (std::size_t i = 0; i < hidden; ++i) {
      x[t][i] = static_cast<double>(w.embedding[static_cast<std::size_t>(tokens[t]) * hidden + i]);
    }
  }
  for (const eigen_engine::LayerTensors& layer : w.layers) {
    std::vector<Vector> queries, keys, values;
    for (std::size_t t = 0; t < count; ++t) {
      const Vector n = rms_norm(x[t], layer.attention_norm, static_cast<double>(c.norm_epsilon));
      queries.push_back(matvec(layer.query, n, heads * head_dim));
      keys.push_back(matvec(layer.key, n, kv_heads * head_dim));
      values.push_back(matvec(layer.value, n, kv_heads * head_dim));
      if (c.qkv_bias) {
        for (std::size_t i = 0; i < heads * head_dim; ++i) {
          queries[t][i] += static_cast<double>(layer.query_bias[i]);
        }
        for (std::size_t i = 0; i < kv_heads * head_dim; ++i) {
          keys[t][i] += static_cast<double>(layer.key_bias[i]);
          values[t][i] += static_cast<double>(layer.value_bias[i]);
        }
      }
      for (std::size_t h = 0; h < heads; ++h) rotate(layer.rope, positions[t], queries[t].data() + h * head_dim);
      for (std::size_t h = 0; h < kv_heads; ++h) rotate(layer.rope, positions[t], keys[t].data() + h * head_dim);
    }
    out.mass.emplace_back(count, Vector(count, 0.0));
    for (std::size_t t = 0; t < count; ++t) {
      Vector attended(heads * head_dim, 0.0);
      for (std::size_t h = 0; h < heads; ++h) {
        const std::size_t kv = h / (heads / kv_heads);
        Vector weight(t + 1);
        double sum = 0;
        for (std::size_t s = 0; s <= t; ++s) {
          double dot = 0;
          for (std::size_t i = 0; i < head_dim; ++i) dot += queries[t][h * head_dim + i] * keys[s][kv * head_dim + i];
          weight[s] = std::exp(dot / std::sqrt(static_cast<double>(head_dim)));
          sum += weight[s];
        }
        for (std::size_t s = 0; s <= t; ++s) {
          out.mass.back()[t][s] += weight[s] / sum;
          for (std::size_t i = 0; i < head_dim; ++i) {
            attended[h * head_dim + i] += weight[s] / sum * values[s][kv * head_dim + i];
          }
        }
      }
      const Vector o = matvec(layer.attention_output, attended, hidden);
      for (std::size_t i = 0; i < hidden; ++i) x[t][i] += o[i];
      const Vector n = rms_norm(x[t], layer.feed_forward_norm, static_cast<double>(c.norm_epsilon));
      Vector gate = matvec(layer.gate, n, feed_forward);
      const Vector up = matvec(layer.up, n, feed_forward);
      for (std::size_t i = 0; i < feed_forward; ++i) gate[i] = gate[i] / (1.0 + std::exp(-gate[i])) * up[i];
      const Vector down = matvec(layer.down, gate, hidden);
      for (std::size_t i = 0; i < hidden; ++i) x[t][i] += down[i];
    }
  }
  for (std::size_t t = 0; t < count; ++t) {
    const Vector n = rms_norm(x[t], w.output_norm, static_cast<double>(c.norm_epsilon));
    out.logits.push_back(matvec(c.tied_output ? w.embedding : w.output, n, static_cast<std::size_t>(c.vocabulary)));
  }
  return out;
}

}  // namespace naive
