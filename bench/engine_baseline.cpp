// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// How honest a baseline the example engine's full prefill is: its time against that of its matrix products alone, done
// as plain Eigen products on the same number of threads.
#include "workload.hpp"

#include <Eigen/Core>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

namespace {

using namespace bench;
using eigen_engine::Model;
using eigen_engine::ModelConfig;
using eigen_engine::ThreadPool;

using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Weights = Eigen::Map<const RowMajor>;

// y = x · wᵀ with the rows in equal parts, one a thread.
void product(ThreadPool& pool, const RowMajor& x, const float* w, RowMajor& y) {
  const Eigen::Index rows = x.rows();
  const Eigen::Index part = (rows + pool.threads() - 1) / pool.threads();
  pool.run((rows + part - 1) / part, [&](std::int64_t i, std::int32_t) {
    const Eigen::Index count = (std::min)(part, rows - i * part);
    y.middleRows(i * part, count).noalias() =
        x.middleRows(i * part, count) * Weights(w, y.cols(), x.cols()).transpose();
  });
}

// What the products of one full prefill take: projections of all layers, and attention in causal blocks of rows, head by
// head. Contents do not matter, so activations are not passed on.
double matrix_product_seconds(const Model& model, std::int64_t rows, ThreadPool& pool) {
  constexpr Eigen::Index kBlock = 64;
  const ModelConfig& c = model.config();
  const RowMajor hidden = RowMajor::Constant(rows, c.hidden, 0.01f);
  const RowMajor heads = RowMajor::Constant(rows, c.query_values(), 0.01f);
  const RowMajor inner = RowMajor::Constant(rows, c.feed_forward, 0.01f);
  const RowMajor one = RowMajor::Constant(1, c.hidden, 0.01f);
  RowMajor qkv(rows, c.qkv_values());
  RowMajor back(rows, c.hidden);
  RowMajor gate_up(rows, 2 * c.feed_forward);
  RowMajor logits(1, c.vocabulary);
  RowMajor keys = RowMajor::Constant(rows, c.key_values(), 0.01f);
  RowMajor attended(rows, c.query_values());
  std::vector<RowMajor> scores(static_cast<std::size_t>(pool.threads()), RowMajor(kBlock, rows));
  const Eigen::Index blocks = (rows + kBlock - 1) / kBlock;

  const auto start = std::chrono::steady_clock::now();
  for (std::int32_t layer = 0; layer < c.layers; ++layer) {
    const eigen_engine::LayerWeights& weights = model.layer(layer);
    product(pool, hidden, weights.qkv.data(), qkv);
    if (layer == c.layers - 1) break;  // of the last layer a prefill wants one row
    pool.run(blocks * c.heads, [&](std::int64_t task, std::int32_t worker) {
      const Eigen::Index head = task % c.heads;
      const Eigen::Index first = (blocks - 1 - task / c.heads) * kBlock;
      const Eigen::Index count = (std::min)(kBlock, rows - first);
      const Eigen::Index seen = first + count;
      const Eigen::Index kv = head / (c.heads / c.kv_heads) * c.head_dim;
      const auto stored = keys.block(0, kv, seen, c.head_dim);
      auto block = scores[static_cast<std::size_t>(worker)].topLeftCorner(count, seen);
      block.noalias() = heads.block(first, head * c.head_dim, count, c.head_dim) * stored.transpose();
      attended.block(first, head * c.head_dim, count, c.head_dim).noalias() = block * stored;
    });
    product(pool, heads, weights.attention_output.data(), back);
    product(pool, hidden, weights.gate_up.data(), gate_up);
    product(pool, inner, weights.down.data(), back);
  }
  logits.noalias() = one * Weights(model.output(), c.vocabulary, c.hidden).transpose();
  return seconds_since(start);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Full prefill against its matrix products alone");
  const Options options = parse(app, argc, argv);
  Workload work(options);
  const std::int64_t tokens = work.prompt.rows();
  std::vector<double> prefill, products, ratios;
  for (int i = 0; i <= options.repeats; ++i) {
    const double seconds = work.full_prefill();
    const double alone = matrix_product_seconds(*work.model, tokens, work.pool);
    if (i == 0) continue;  // warm-up
    prefill.push_back(seconds);
    products.push_back(alone);
    ratios.push_back(seconds / alone);
  }
  const double tokens_per_s = static_cast<double>(tokens) / median(prefill);
  std::printf(
      "%s, %lld tokens, %d threads, median of %d: full prefill %.3f s (%.0f tokens/s), its matrix products alone "
      "%.3f s: %.2fx\n",
      work.identity.name.c_str(), static_cast<long long>(tokens), options.threads, options.repeats, median(prefill),
      tokens_per_s, median(products), median(ratios));
  write(options, {{"model", work.identity.name},
                  {"tokens", tokens},
                  {"threads", options.threads},
                  {"repeats", options.repeats},
                  {"prefill_s", median(prefill)},
                  {"products_s", median(products)},
                  {"prefill_over_products", median(ratios)},
                  {"tokens_per_s", tokens_per_s}});
  return 0;
}
