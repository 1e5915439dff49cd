// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Tiles, and what is done in each: Eigen's products and vectorised exponentials.
#include <algorithm>
#include <cmath>
#include <Eigen/Core>
#include <eigen_engine/kernels.hpp>
#include <eigen_engine/model.hpp>

namespace eigen_engine {

namespace {

using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using MatrixMap = Eigen::Map<RowMajor, Eigen::Unaligned, Eigen::OuterStride<>>;
using ConstMatrixMap = Eigen::Map<const RowMajor, Eigen::Unaligned, Eigen::OuterStride<>>;
using ArrayMap = Eigen::Map<Eigen::ArrayXf>;
using ConstArrayMap = Eigen::Map<const Eigen::ArrayXf>;

MatrixMap view(float* data, std::int64_t rows, std::int64_t columns, std::int64_t stride) {
  return {data, rows, columns, Eigen::OuterStride<>(stride)};
}
ConstMatrixMap view(const float* data, std::int64_t rows, std::int64_t columns, std::int64_t stride) {
  return {data, rows, columns, Eigen::OuterStride<>(stride)};
}

// Tiles of a product. Eigen packs both factors of every product anew, so large tiles are better until there are too few
// to share out. Since no row's result depends on the tile it is in (see kRowStep), the number of threads may choose them.
// Columns go in whole register blocks of Eigen's, which a gate block is.
constexpr std::int64_t kMaxTileRows = 384;
constexpr std::int64_t kMaxTileColumns = 10 * kGateBlock;

struct Tiling {
  std::int64_t rows, columns;  // of the product
  std::int64_t tile_rows, tile_columns;
  std::int64_t row_tiles, column_tiles;

  Tiling(std::int64_t product_rows, std::int64_t product_columns, std::int64_t column_step, std::int64_t threads)
      : rows(product_rows), columns(product_columns) {
    row_tiles = (rows + kMaxTileRows - 1) / kMaxTileRows;
    tile_rows = ((rows + row_tiles - 1) / row_tiles + 3) / 4 * 4;
    row_tiles = (rows + tile_rows - 1) / tile_rows;
    const std::int64_t wanted = threads > 1 ? 2 * threads : 1;  // as many for each thread
    const std::int64_t most = (columns + column_step - 1) / column_step;
    column_tiles = (columns + kMaxTileColumns - 1) / kMaxTileColumns;
    while (column_tiles < most && (row_tiles * column_tiles < wanted || row_tiles * column_tiles % threads != 0)) {
      ++column_tiles;
    }
    tile_columns = ((columns + column_tiles - 1) / column_tiles + column_step - 1) / column_step * column_step;
    column_tiles = (columns + tile_columns - 1) / tile_columns;
  }
  [[nodiscard]] std::int64_t tiles() const { return row_tiles * column_tiles; }
  // Tiles that follow each other share their columns: the weights stay in the cache.
  [[nodiscard]] std::int64_t first_row(std::int64_t tile) const { return tile % row_tiles * tile_rows; }
  [[nodiscard]] std::int64_t first_column(std::int64_t tile) const { return tile / row_tiles * tile_columns; }
  [[nodiscard]] std::int64_t row_count(std::int64_t tile) const {
    return (std::min)(tile_rows, rows - first_row(tile));
  }
  [[nodiscard]] std::int64_t column_count(std::int64_t tile) const {
    return (std::min)(tile_columns, columns - first_column(tile));
  }
};

// Eigen adds up an element's terms in an order that depends on where it lies in the product: in a full register block or
// in what is left over, and in which block of the inner dimension. Rounding up to these makes every block full, so that
// a row's result is the same to the bit whatever other rows run with it: alone, in a prefill, or scattered in a blend.
constexpr std::int64_t kRowStep = 4;
constexpr std::int64_t kContextStep = kContextPadding;  // multiple of Eigen's blocks with any vector width
constexpr std::int64_t kInnerBlock = 3 * kContextStep;  // of attention's weights·values; Eigen takes it in one go
std::int64_t round_up(std::int64_t n, std::int64_t step) { return (n + step - 1) / step * step; }

// One row alone is a matrix-vector product, which decoding wants to be fast.
std::int64_t padded_rows(const MutableMatrix& y) {
  return y.padded && y.rows > 1 ? round_up(y.rows, kRowStep) : y.rows;
}

// Query rows that go through attention together, for all query heads of a key head.
std::int64_t attention_block(std::int64_t group) {
  return (std::max)(std::int64_t{8}, 96 / (std::max)(std::int64_t{1}, group) / 4 * 4);
}
std::int64_t blocks(std::int64_t rows, std::int64_t block) { return (rows + block - 1) / block; }

constexpr std::int64_t kRowsPerTask = 32;  // of work that goes row by row

void attend_block(const Attention& a, std::int64_t kv_head, std::int64_t block, float* scratch, float* partial) {
  const std::int64_t group = a.heads / a.kv_heads;
  const std::int64_t size = attention_block(group);
  const std::int64_t first = block * size;
  const std::int64_t count = (std::min)(size, a.rows - first);
  const std::int64_t d = a.head_dim;
  std::int64_t seen = 0;
  for (std::int64_t i = 0; i < count; ++i) seen = (std::max)(seen, std::int64_t{a.visible[first + i]});
  seen = round_up(seen, kContextStep);
  const std::int64_t rows = round_up(count * group, kRowStep);
  const std::int64_t d_stride = aligned_stride(d);
  const std::int64_t stride = aligned_stride(seen);
  float* queries = scratch;                                                // [rows, d]
  float* outputs = queries + round_up(size * group, kRowStep) * d_stride;  // [rows, d]
  float* weights = outputs + round_up(size * group, kRowStep) * d_stride;  // [rows, seen]

  const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(d)));
  for (std::int64_t i = 0; i < count; ++i) {
    const float* source = a.queries + a.query_rows[first + i] * a.query_stride + kv_head * group * d;
    for (std::int64_t g = 0; g < group; ++g) {
      ArrayMap(queries + (i * group + g) * d_stride, d) = ConstArrayMap(source + g * d, d) * scale;
    }
  }
  for (std::int64_t i = count * group; i < rows; ++i) ArrayMap(queries + i * d_stride, d).setZero();
  const std::int64_t kv_stride = a.kv_heads * d;
  const ConstMatrixMap keys = view(a.keys + kv_head * d, seen, d, kv_stride);
  const ConstMatrixMap values = view(a.values + kv_head * d, seen, d, kv_stride);
  MatrixMap scores = view(weights, rows, seen, stride);
  scores.noalias() = view(static_cast<const float*>(queries), rows, d, d_stride) * keys.transpose();

  if (partial != nullptr) ArrayMap(partial, a.mass_rows).setZero();
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t visible = a.visible[first + i];
    for (std::int64_t g = 0; g < group; ++g) {
      float* row = weights + (i * group + g) * stride;
      ArrayMap seen_part(row, visible);
      seen_part = (seen_part - seen_part.maxCoeff()).exp();
      const float inverse = 1.0f / seen_part.sum();
      ArrayMap(row + visible, seen - visible).setZero();
      if (partial != nullptr && first + i >= a.mass_first) ArrayMap(partial, visible) += seen_part * inverse;
      // Outputs are divided by the sum of their weights at the end. It waits where the query was, which is used up.
      queries[(i * group + g) * d_stride] = inverse;
    }
  }
  MatrixMap out = view(outputs, rows, d, d_stride);
  for (std::int64_t at = 0; at < seen; at += kInnerBlock) {
    const std::int64_t width = (std::min)(kInnerBlock, seen - at);
    if (at == 0) {
      out.noalias() = scores.leftCols(width) * values.topRows(width);
    } else {
      out.noalias() += scores.middleCols(at, width) * values.middleRows(at, width);
    }
  }
  for (std::int64_t i = 0; i < count; ++i) {
    float* target = a.out.data + (first + i) * a.out.stride + kv_head * group * d;
    for (std::int64_t g = 0; g < group; ++g) {
      const std::int64_t at = (i * group + g) * d_stride;
      ArrayMap(target + g * d, d) = ConstArrayMap(outputs + at, d) * queries[at];
    }
  }
}

}  // namespace

std::int64_t scratch_floats(std::int64_t max_rows, std::int64_t head_dim, std::int64_t group) {
  const std::int64_t gated = kMaxTileRows * kMaxTileColumns;
  const std::int64_t attention = round_up(attention_block(group) * group, kRowStep) *
                                 (2 * aligned_stride(head_dim) + aligned_stride(round_up(max_rows, kContextStep)));
  return aligned_stride((std::max)(gated, attention));
}

void multiply(ThreadPool& pool, ConstMatrix x, const float* w, MutableMatrix y, bool accumulate) {
  if (y.rows == 0) return;
  const Tiling tiling(padded_rows(y), y.columns, kGateBlock, pool.threads());
  pool.run(tiling.tiles(), [&](std::int64_t tile, std::int32_t) {
    const std::int64_t row = tiling.first_row(tile);
    const std::int64_t column = tiling.first_column(tile);
    const std::int64_t columns = tiling.column_count(tile);
    const ConstMatrixMap left = view(x.data + row * x.stride, tiling.row_count(tile), x.columns, x.stride);
    const ConstMatrixMap right = view(w + column * x.columns, columns, x.columns, x.columns);
    MatrixMap target = view(y.data + row * y.stride + column, tiling.row_count(tile), columns, y.stride);
    if (accumulate) {
      target.noalias() += left * right.transpose();
    } else {
      target.noalias() = left * right.transpose();
    }
  });
}

void multiply_gated(ThreadPool& pool, ConstMatrix x, const float* gate_up, MutableMatrix y, Scratch& scratch) {
  if (y.rows == 0) return;
  const Tiling tiling(padded_rows(y), 2 * y.columns, 2 * kGateBlock, pool.threads());
  pool.run(tiling.tiles(), [&](std::int64_t tile, std::int32_t worker) {
    const std::int64_t row = tiling.first_row(tile);
    const std::int64_t rows = tiling.row_count(tile);
    const std::int64_t column = tiling.first_column(tile);
    const std::int64_t columns = tiling.column_count(tile);
    const std::int64_t stride = aligned_stride(columns);
    float* product = scratch.of(worker);
    const ConstMatrixMap left = view(x.data + row * x.stride, rows, x.columns, x.stride);
    const ConstMatrixMap right = view(gate_up + column * x.columns, columns, x.columns, x.columns);
    view(product, rows, columns, stride).noalias() = left * right.transpose();
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t at = 0; at < columns; at += 2 * kGateBlock) {
        const std::int64_t count = (std::min)(2 * kGateBlock, columns - at) / 2;
        const ConstArrayMap gate(product + i * stride + at, count);
        const ConstArrayMap up(product + i * stride + at + count, count);
        ArrayMap(y.data + (row + i) * y.stride + (column + at) / 2, count) = gate / (1.0f + (-gate).exp()) * up;
      }
    }
  });
}

void normalise(ThreadPool& pool, ConstMatrix x, const float* weight, float epsilon, MutableMatrix y) {
  pool.run(blocks(x.rows, kRowsPerTask), [&](std::int64_t task, std::int32_t) {
    const std::int64_t end = (std::min)(x.rows, (task + 1) * kRowsPerTask);
    const ConstArrayMap weights(weight, x.columns);
    for (std::int64_t i = task * kRowsPerTask; i < end; ++i) {
      const ConstArrayMap row(x.data + i * x.stride, x.columns);
      const float mean = row.square().sum() / static_cast<float>(x.columns);
      ArrayMap(y.data + i * y.stride, x.columns) = row * (1.0f / std::sqrt(mean + epsilon)) * weights;
    }
  });
}

std::int64_t mass_partials(std::int64_t rows, std::int64_t heads, std::int64_t kv_heads) {
  return kv_heads * blocks(rows, attention_block(heads / kv_heads));
}

void attend(ThreadPool& pool, const Attention& a, Scratch& scratch) {
  const std::int64_t block_count = blocks(a.rows, attention_block(a.heads / a.kv_heads));
  const std::int64_t tasks = block_count * a.kv_heads;
  pool.run(tasks, [&](std::int64_t task, std::int32_t worker) {
    // Later rows see more: the long tasks come first, so that the crew finishes together.
    const std::int64_t block = block_count - 1 - task / a.kv_heads;
    float* partial = a.mass != nullptr ? a.partial + task * a.mass_rows : nullptr;
    attend_block(a, task % a.kv_heads, block, scratch.of(worker), partial);
  });
  if (a.mass == nullptr) return;
  for (std::int64_t task = 0; task < tasks; ++task) {
    ArrayMap(a.mass, a.mass_rows) += ConstArrayMap(a.partial + task * a.mass_rows, a.mass_rows);
  }
}

}  // namespace eigen_engine
