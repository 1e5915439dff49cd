// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Attention in one kernel: tiles of query rows against tiles of cached rows, products on tensor cores, scores never in
// memory. Queries may be scattered rows, and the cache paged; what no row of a tile sees is not read.
//
// What hardware does is left to a Lane - one thread of a warp - so that the tests can run the tile on a CPU:
//   thread()                  within the block
//   sync()                    all threads of the block
//   copy(to, from)            16 bytes to shared memory; commit() closes a group of them, wait(n) waits until only the
//                             newest n groups are under way
//   load(out, from, across)   ldmatrix .x4: lane i gives the address of row i % 8 of 8 x 8 matrix i / 8; out[m] holds
//                             row lane / 4, columns 2 (lane % 4) and one more of matrix m, or of its transpose
//                             if `across`
//   multiply(c, a, b0, b1)    mma m16n8k16: c += a · b, with the fragments of PTX
//   pack(low, high)           two bf16, rounded to nearest
//   quad_max(x), quad_sum(x)  over the four lanes with the same lane / 4
#pragma once

#include <cuda_engine/functors.hpp>
#include <kvblend/core/config.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/memory/layouts.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>

#if defined(__CUDA_ARCH__)
#define CUDA_ENGINE_UNROLL _Pragma("unroll")
#else
#define CUDA_ENGINE_UNROLL
#endif

namespace cuda_engine {

// The sizes of a tile: a warp has 16 query rows. Query rows here are a kept row's query heads of one key head, one
// after the other, so that they share what is read of the cache.
template <int head_dim, int warps = 8>
struct FlashShape {
  static constexpr int kDim = head_dim;
  static constexpr int kWarps = warps;
  static constexpr int kThreads = 32 * warps;
  static constexpr int kRows = 16 * warps;
  static constexpr int kKeys = 64;
  static constexpr int kPieces = head_dim / 8;            // of 16 bytes, in a row
  static constexpr int kPart = kKeys * head_dim;          // keys, or values, of a stage
  static constexpr int kSharedBytes = 2 * 2 * kPart * 2;  // two stages
};

struct FlashAttention {
  using Plane = kvblend::PagedPlane<kvblend::Bf16Codec>;
  const BFloat16* qkv;  // by ActiveIndex, queries in front
  std::int64_t qkv_stride;
  const Row* rows;
  const ActiveIndex* kept;
  std::int32_t count;  // kept rows
  std::int32_t group;  // query heads of a key head
  Plane keys, values;  // of one layout
  BFloat16* out;       // [count, heads · head_dim]
  std::int64_t out_stride;
  float scale;  // of scores, times log2(e)
};

template <class Shape, class Lane>
class FlashTile {
 public:
  KVBLEND_HOST_DEVICE FlashTile(const FlashAttention& args, const Lane& lane, BFloat16* shared)
      : args_(args), lane_(lane), shared_(shared) {}

  KVBLEND_HOST_DEVICE void run(std::int32_t tile, std::int32_t kv_head) {
    const std::int32_t total = args_.count * args_.group;
    const std::int32_t begin = tile * Shape::kRows;
    const std::int32_t end = begin + Shape::kRows < total ? begin + Shape::kRows : total;
    const std::int32_t seen_by_all = visible(begin);  // kept rows ascend
    seen_ = visible(end - 1);
    kv_head_ = kv_head;
    const std::int32_t quad = lane_.thread() % 32 / 4;
    CUDA_ENGINE_UNROLL for (int half = 0; half < 2; ++half) {
      row_[half] = begin + lane_.thread() / 32 * 16 + quad + 8 * half;
      // Rows behind the last compute what nobody reads.
      visible_[half] = row_[half] < total ? visible(row_[half]) : 1;
      largest_[half] = -INFINITY;
      sum_[half] = 0;
    }
    load_queries(total);
    CUDA_ENGINE_UNROLL for (auto& fragment : out_) { CUDA_ENGINE_UNROLL for (float& x : fragment) x = 0; }

    fetch(0);
    for (std::int32_t key = 0, stage = 0; key < seen_; key += Shape::kKeys, stage ^= 1) {
      if (key + Shape::kKeys < seen_) {
        fetch(key + Shape::kKeys);
        lane_.wait(1);
      } else {
        lane_.wait(0);
      }
      lane_.sync();
      score(stage);
      if (key + Shape::kKeys > seen_by_all) mask(key);
      weigh();
      add_values(stage);
      lane_.sync();  // the next fetch writes where this one was read
    }
    store(total);
  }

 private:
  [[nodiscard]] KVBLEND_HOST_DEVICE std::int32_t visible(std::int32_t row) const {
    return args_.rows[args_.kept[row / args_.group].value].value + 1;
  }
  [[nodiscard]] KVBLEND_HOST_DEVICE std::int32_t pair() const { return 2 * (lane_.thread() % 4); }
  // 16-byte piece of a row of shared keys or values; pieces are exchanged so that 8 rows' lie in different banks.
  [[nodiscard]] KVBLEND_HOST_DEVICE BFloat16* piece(int stage, int part, int row, int at) const {
    return shared_ + (2 * stage + part) * Shape::kPart + row * Shape::kDim + ((at ^ (row & 7)) * 8);
  }

  KVBLEND_HOST_DEVICE void load_queries(std::int32_t total) {
    CUDA_ENGINE_UNROLL for (int half = 0; half < 2; ++half) {
      const bool real = row_[half] < total;
      const std::int32_t i = real ? row_[half] / args_.group : 0;
      const std::int32_t head = kv_head_ * args_.group + (real ? row_[half] % args_.group : 0);
      const BFloat16* from = args_.qkv + args_.kept[i].value * args_.qkv_stride + head * Shape::kDim + pair();
      CUDA_ENGINE_UNROLL for (int step = 0; step < Shape::kDim / 16; ++step) {
        query_[step][half] = *reinterpret_cast<const std::uint32_t*>(from + 16 * step);
        query_[step][half + 2] = *reinterpret_cast<const std::uint32_t*>(from + 16 * step + 8);
      }
    }
  }

  KVBLEND_HOST_DEVICE void fetch(std::int32_t first) {
    const int stage = first / Shape::kKeys % 2;
    CUDA_ENGINE_UNROLL for (int n = 0; n < Shape::kKeys * Shape::kPieces / Shape::kThreads; ++n) {
      const int at = n * Shape::kThreads + lane_.thread();
      const int row = at / Shape::kPieces;
      const int column = at % Shape::kPieces;
      const std::int32_t key = first + row < seen_ ? first + row : seen_ - 1;  // masked, but a number
      const std::int64_t at_key = offset(key) + 16 * column;
      lane_.copy(piece(stage, 0, row, column), args_.keys.base + at_key);
      lane_.copy(piece(stage, 1, row, column), args_.values.base + at_key);
    }
    lane_.commit();
  }

  // layout.offset(key, kv_head_, 0) with a division of 32 bits, which takes a GPU a third of the time of one of 64.
  [[nodiscard]] KVBLEND_HOST_DEVICE std::int64_t offset(std::int32_t key) const {
    const kvblend::PagedLayout& layout = args_.keys.layout;
    const auto block = static_cast<std::uint32_t>(key) / static_cast<std::uint32_t>(layout.block_size);
    const auto within = static_cast<std::uint32_t>(key) - block * static_cast<std::uint32_t>(layout.block_size);
    return layout.block_table[block] * layout.block_stride + within * layout.row_stride + layout.origin +
           kv_head_ * layout.head_stride;
  }

  KVBLEND_HOST_DEVICE void score(int stage) {
    const int lane = lane_.thread() % 32;
    CUDA_ENGINE_UNROLL for (int keys = 0; keys < Shape::kKeys / 16; ++keys) {
      CUDA_ENGINE_UNROLL for (int i = 0; i < 4; ++i) score_[2 * keys][i] = score_[2 * keys + 1][i] = 0;
      CUDA_ENGINE_UNROLL for (int step = 0; step < Shape::kDim / 16; ++step) {
        std::uint32_t b[4];  // 8 keys by 16 values, and the next 8 keys
        lane_.load(b, piece(stage, 0, 16 * keys + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2), false);
        lane_.multiply(score_[2 * keys], query_[step], b[0], b[1]);
        lane_.multiply(score_[2 * keys + 1], query_[step], b[2], b[3]);
      }
    }
  }

  KVBLEND_HOST_DEVICE void mask(std::int32_t first) {
    CUDA_ENGINE_UNROLL for (int n = 0; n < Shape::kKeys / 8; ++n) {
      CUDA_ENGINE_UNROLL for (int i = 0; i < 4; ++i) {
        if (first + 8 * n + pair() + i % 2 >= visible_[i / 2]) score_[n][i] = -INFINITY;
      }
    }
  }

  // Scores become weights against the largest so far; what was summed before is scaled to it.
  KVBLEND_HOST_DEVICE void weigh() {
    CUDA_ENGINE_UNROLL for (int half = 0; half < 2; ++half) {
      float most = largest_[half];
      CUDA_ENGINE_UNROLL for (int n = 0; n < Shape::kKeys / 8; ++n) {
        CUDA_ENGINE_UNROLL for (int i = 2 * half; i < 2 * half + 2; ++i) {
          most = score_[n][i] > most ? score_[n][i] : most;
        }
      }
      most = lane_.quad_max(most);  // each row sees row 0, so it is a number
      const float factor = exp2f((largest_[half] - most) * args_.scale);
      largest_[half] = most;
      float sum = 0;
      CUDA_ENGINE_UNROLL for (int n = 0; n < Shape::kKeys / 8; ++n) {
        CUDA_ENGINE_UNROLL for (int i = 2 * half; i < 2 * half + 2; ++i) {
          score_[n][i] = exp2f((score_[n][i] - most) * args_.scale);
          sum += score_[n][i];
        }
      }
      sum_[half] = sum_[half] * factor + sum;
      CUDA_ENGINE_UNROLL for (int n = 0; n < Shape::kDim / 8; ++n) {
        out_[n][2 * half] *= factor;
        out_[n][2 * half + 1] *= factor;
      }
    }
  }

  KVBLEND_HOST_DEVICE void add_values(int stage) {
    const int lane = lane_.thread() % 32;
    CUDA_ENGINE_UNROLL for (int keys = 0; keys < Shape::kKeys / 16; ++keys) {
      const float(&low)[4] = score_[2 * keys];
      const float(&high)[4] = score_[2 * keys + 1];
      const std::uint32_t weights[4] = {lane_.pack(low[0], low[1]), lane_.pack(low[2], low[3]),
                                        lane_.pack(high[0], high[1]), lane_.pack(high[2], high[3])};
      CUDA_ENGINE_UNROLL for (int step = 0; step < Shape::kDim / 16; ++step) {
        std::uint32_t b[4];  // 16 keys by 8 values, and the next 8 values
        lane_.load(b, piece(stage, 1, 16 * keys + lane / 8 % 2 * 8 + lane % 8, 2 * step + lane / 16), true);
        lane_.multiply(out_[2 * step], weights, b[0], b[1]);
        lane_.multiply(out_[2 * step + 1], weights, b[2], b[3]);
      }
    }
  }

  KVBLEND_HOST_DEVICE void store(std::int32_t total) {
    CUDA_ENGINE_UNROLL for (int half = 0; half < 2; ++half) {
      const float inverse = 1.0f / lane_.quad_sum(sum_[half]);
      if (row_[half] >= total) continue;
      const std::int32_t head = kv_head_ * args_.group + row_[half] % args_.group;
      BFloat16* to = args_.out + row_[half] / args_.group * args_.out_stride + head * Shape::kDim + pair();
      CUDA_ENGINE_UNROLL for (int n = 0; n < Shape::kDim / 8; ++n) {
        *reinterpret_cast<std::uint32_t*>(to + 8 * n) =
            lane_.pack(out_[n][2 * half] * inverse, out_[n][2 * half + 1] * inverse);
      }
    }
  }

  const FlashAttention& args_;
  const Lane& lane_;
  BFloat16* shared_;
  std::int32_t kv_head_ = 0, seen_ = 0;
  // Of the warp's rows lane / 4 and 8 more: fragments as the tensor cores have them.
  std::int32_t row_[2], visible_[2];
  float largest_[2], sum_[2];
  std::uint32_t query_[Shape::kDim / 16][4];
  float score_[Shape::kKeys / 8][4];
  float out_[Shape::kDim / 8][4];
};

}  // namespace cuda_engine
