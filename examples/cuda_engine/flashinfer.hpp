// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The engine's side of FlashInfer's batch prefill: scattered rows over a paged cache as a batch of one sequence, with a
// mask of bits. All that its kernel reads is made on the device, of numbers that are known before the pass;
// FlashInfer's own plan would be copied from pinned memory. What includes FlashInfer is flashinfer_attention.cuh.
#pragma once

#include <cuda_engine/attention_shape.hpp>
#include <cuda_engine/device.hpp>
#include <cuda_engine/functors.hpp>
#include <kvblend/core/config.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace cuda_engine {

// --- how the work is cut ---------------------------------------------------------------------------------------------

inline constexpr std::int32_t kFlashInferTile = 128;  // query rows, times the query heads of a key head

// Each tile of query rows goes through all cached rows, or, where that leaves the device idle, through one of several
// chunks of them, whose results are merged.
struct FlashInferPlan {
  std::int32_t tiles = 0;
  std::int32_t chunks = 1;
  std::int32_t chunk_rows = 0;  // whole pages
  [[nodiscard]] std::int32_t entries() const { return tiles * chunks; }
};

// `blocks` of threads per key head keep the device busy. As FlashInfer's PrefillSplitQOKVIndptr has it for one
// sequence: the smallest chunks that need no more blocks, but none below 128 rows.
inline FlashInferPlan flashinfer_plan(std::int64_t count, std::int32_t group, std::int64_t cached,
                                      std::int32_t page_size, std::int32_t blocks) {
  const std::int64_t pages = (cached + page_size - 1) / page_size;
  const std::int64_t tiles = (count * group + kFlashInferTile - 1) / kFlashInferTile;
  const std::int64_t most_chunks = (std::max)(blocks / tiles, std::int64_t{1});
  const std::int64_t least_pages = (std::max)(128 / page_size, 1);
  const std::int64_t chunk_pages = (std::max)((pages + most_chunks - 1) / most_chunks, least_pages);
  FlashInferPlan plan;
  plan.tiles = static_cast<std::int32_t>(tiles);
  plan.chunks = static_cast<std::int32_t>((pages + chunk_pages - 1) / chunk_pages);
  plan.chunk_rows = static_cast<std::int32_t>(chunk_pages * page_size);
  return plan;
}

// --- what the kernel reads, on the device ----------------------------------------------------------------------------

// paged_kv_t of one sequence. Its indices are the cache's own block table. Strides are values.
template <class T>
struct FlashInferPages {
  T* keys = nullptr;
  T* values = nullptr;
  const std::int32_t* indices = nullptr;
  std::uint32_t page_size = 0;
  std::int64_t page_stride = 0, row_stride = 0, head_stride = 0;
};

// Errors: a layout that FlashInfer cannot say, whose strides are 32 bits and the same for keys and values.
template <class T, class Plane>
kvblend::Result<FlashInferPages<T>> flashinfer_pages(const Plane& keys, const Plane& values) {
  const auto& layout = keys.layout;
  const auto& other = values.layout;
  constexpr auto kSize = static_cast<std::int64_t>(sizeof(T));
  if (layout.tiles() != 1) {
    return kvblend::Status::error(kvblend::StatusCode::unsupported, "has heads in pieces").at("layout of keys");
  }
  if (layout.block_table != other.block_table || layout.block_size != other.block_size ||
      layout.block_stride != other.block_stride || layout.row_stride != other.row_stride ||
      layout.head_stride != other.head_stride) {
    return kvblend::Status::error(kvblend::StatusCode::unsupported, "differs from that of keys").at("layout of values");
  }
  const std::int64_t strides[] = {layout.block_stride, layout.row_stride, layout.head_stride};
  for (const std::int64_t stride : strides) {
    if (stride >= 0 && stride % kSize == 0 && stride / kSize <= (std::numeric_limits<std::uint32_t>::max)()) continue;
    return kvblend::Status::error(kvblend::StatusCode::unsupported, "of %lld bytes is none of FlashInfer's",
                                  static_cast<long long>(stride))
        .at("stride of the cache");
  }
  FlashInferPages<T> pages;
  pages.keys = reinterpret_cast<T*>(keys.base + layout.origin);
  pages.values = reinterpret_cast<T*>(values.base + other.origin);
  pages.indices = layout.block_table;
  pages.page_size = static_cast<std::uint32_t>(layout.block_size);
  pages.page_stride = strides[0] / kSize;
  pages.row_stride = strides[1] / kSize;
  pages.head_stride = strides[2] / kSize;
  return pages;
}

// Named as FlashInfer's parameters are. entry = tile · chunks + chunk is a block of threads' work for a key head.
struct FlashInferTables {
  std::int32_t *request_indices, *qo_tile_indices, *kv_tile_indices;  // [entries]
  std::int32_t* merge_indptr;                                         // [count + 1]
  std::int32_t *q_indptr, *o_indptr, *page_indptr, *mask_indptr;      // [2]
  std::int32_t *last_page_len, *kv_chunk_size;                        // [1]

  static std::int64_t size(std::int64_t entries, std::int64_t count) { return 3 * entries + count + 1 + 4 * 2 + 2; }
  static FlashInferTables in(std::int32_t* memory, std::int64_t entries, std::int64_t count) {
    const auto next = [&memory](std::int64_t values) {
      std::int32_t* const here = memory;
      memory += values;
      return here;
    };
    FlashInferTables tables{};
    tables.request_indices = next(entries);
    tables.qo_tile_indices = next(entries);
    tables.kv_tile_indices = next(entries);
    tables.merge_indptr = next(count + 1);
    tables.q_indptr = next(2);
    tables.o_indptr = next(2);
    tables.page_indptr = next(2);
    tables.mask_indptr = next(2);
    tables.last_page_len = next(1);
    tables.kv_chunk_size = next(1);
    return tables;
  }
};

// For each i in [0, size()).
struct FillFlashInferTables {
  FlashInferTables to;
  FlashInferPlan plan;
  std::int32_t count;
  std::int32_t cached;
  std::int32_t page_size;

  [[nodiscard]] std::int64_t size() const { return (std::max)({plan.entries(), count + 1, 2}); }
  KVBLEND_HOST_DEVICE void operator()(std::int64_t at) const {
    const auto i = static_cast<std::int32_t>(at);
    if (i < plan.tiles * plan.chunks) {
      to.request_indices[i] = 0;
      to.qo_tile_indices[i] = i / plan.chunks;
      to.kv_tile_indices[i] = i % plan.chunks;
    }
    if (i <= count) to.merge_indptr[i] = i * plan.chunks;
    if (i >= 2) return;
    to.q_indptr[i] = i * count;
    to.o_indptr[i] = i * count * plan.chunks;
    to.page_indptr[i] = i * ((cached + page_size - 1) / page_size);
    to.mask_indptr[i] = 0;
    to.last_page_len[0] = (cached - 1) % page_size + 1;
    to.kv_chunk_size[0] = plan.chunk_rows;
  }
};

// Word `at` of the mask: bit q · cached + c, from the lowest of each byte on, says whether kept row q sees cached row
// c, which is at a position up to its own. Positions ascend strictly with the rows of a cache, so that these are the
// rows up to itself: see MaskedSoftmax.
struct PackMaskWord {
  std::uint32_t* to;
  const Row* rows;
  const ActiveIndex* kept;
  std::int64_t count, cached;

  [[nodiscard]] static std::int64_t words(std::int64_t count, std::int64_t cached) {
    return (count * cached + 31) / 32;
  }
  KVBLEND_HOST_DEVICE void operator()(std::int64_t at) const {
    std::int64_t query = 32 * at / cached;
    std::int64_t first = 32 * at % cached;
    std::uint32_t word = 0;
    for (std::int64_t bit = 0; bit < 32 && query < count; ++query, first = 0) {
      const std::int64_t room = 32 - bit < cached - first ? 32 - bit : cached - first;
      const std::int64_t visible = std::int64_t{rows[kept[query].value].value} + 1 - first;
      const std::int64_t ones = visible < room ? visible : room;
      if (ones > 0) word |= static_cast<std::uint32_t>(0xffffffffu >> (32 - ones)) << bit;
      bit += room;
    }
    to[at] = word;
  }
};

// A call of the kernel: all pointers are the device's.
template <class T>
struct FlashInferCall {
  AttentionShape shape;
  const T* queries = nullptr;  // [count, heads · head_dim], rows at a stride
  std::int64_t query_stride = 0;
  T* out = nullptr;  // [count, heads · head_dim]
  std::int32_t count = 0;
  float scale = 0;  // of scores
  FlashInferPages<T> pages;
  FlashInferPlan plan;
  FlashInferTables tables{};
  const std::uint32_t* mask = nullptr;  // or null: the rows are the cache's last ones
  T* partial_out = nullptr;             // [count, chunks, heads · head_dim], and
  float* partial_sums = nullptr;        // [count, chunks, heads] log2 of sums: where there are several chunks
};

// --- the adaptor -----------------------------------------------------------------------------------------------------

//   multiprocessors()          that share the blocks of a launch
//   has_flashinfer(head_dim)
//   attend(call)
template <class D>
concept FlashInferDevice = Device<D> &&
    requires(D& device, const FlashInferCall<typename D::Scalar>& call, std::int32_t head_dim) {
  { device.multiprocessors() } -> std::same_as<std::int32_t>;
  { D::has_flashinfer(head_dim) } -> std::same_as<bool>;
  { device.attend(call) } -> std::same_as<kvblend::Status>;
};

// It has the memory of a call; open() is all that allocates. open() and attend() are for a FlashInferDevice.
template <Device D>
class FlashInfer {
 public:
  using T = typename D::Scalar;
  using Status = kvblend::Status;

  Status open(D& device, const AttentionShape& shape, std::int64_t max_rows) {
    shape_ = shape;
    if (!D::has_flashinfer(shape.head_dim)) {
      return Status::error(kvblend::StatusCode::unsupported, "FlashInfer is not built for heads of %d values here",
                           shape.head_dim)
          .at("attention");
    }
    blocks_ = 2 * device.multiprocessors() / shape.kv_heads;
    const std::int64_t tiles = (max_rows * shape.group() + kFlashInferTile - 1) / kFlashInferTile;
    const std::int64_t partial = std::int64_t{kFlashInferTile} * blocks_ * shape.kv_heads;
    KVBLEND_RETURN_IF_ERROR(tables_.allocate(FlashInferTables::size((std::max)(tiles, std::int64_t{blocks_}), max_rows),
                                             "FlashInfer's tables"));
    // Of rows behind the last, to the end of its tile, the kernel reads bits too, and uses none.
    KVBLEND_RETURN_IF_ERROR(
        mask_.allocate(PackMaskWord::words(max_rows + kFlashInferTile, max_rows), "FlashInfer's mask"));
    KVBLEND_RETURN_IF_ERROR(partial_out_.allocate(partial * shape.head_dim, "FlashInfer's partial outputs"));
    return partial_sums_.allocate(partial, "FlashInfer's partial sums");
  }

  // See Attention::attend. `packed` is scratch for the queries of the kept rows.
  template <class Plane>
  Status attend(D& device, const T* qkv, std::span<const Row> rows, std::span<const ActiveIndex> kept,
                const Plane& keys, const Plane& values, std::int64_t cached, std::int64_t fixed, T* packed, T* out) {
    const kvblend::Result<FlashInferPages<T>> pages = flashinfer_pages<T>(keys, values);
    KVBLEND_RETURN_IF_ERROR(pages.status);
    const auto count = static_cast<std::int64_t>(kept.size());
    const auto page_size = static_cast<std::int32_t>(pages.value.page_size);
    FlashInferCall<T> call;
    call.shape = shape_;
    call.out = out;
    call.count = static_cast<std::int32_t>(count);
    call.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape_.head_dim)));
    call.pages = pages.value;
    call.plan = flashinfer_plan(count, shape_.group(), cached, page_size, blocks_);
    call.tables = FlashInferTables::in(tables_.data(), call.plan.entries(), count);
    call.partial_out = partial_out_.data();
    call.partial_sums = partial_sums_.data();
    const FillFlashInferTables fill{call.tables, call.plan, call.count, static_cast<std::int32_t>(cached), page_size};
    KVBLEND_RETURN_IF_ERROR(device.execution().for_each(fill.size(), fill));
    call.queries = qkv;
    call.query_stride = shape_.qkv_values();
    if (kept.size() < rows.size()) {  // else they are the same, since they ascend
      call.queries = packed;
      call.query_stride = shape_.query_values();
      KVBLEND_RETURN_IF_ERROR(device.rows(count, PackQueries<T>{qkv, kept.data(), packed, count, shape_.qkv_values(),
                                                                shape_.heads, shape_.heads, shape_.head_dim}));
    }
    if (count == cached - fixed) return device.attend(call);  // all rows behind the fixed ones
    if ((count + kFlashInferTile) * cached > (std::numeric_limits<std::uint32_t>::max)()) {
      return Status::error(kvblend::StatusCode::unsupported, "FlashInfer numbers them with 32 bits")
          .at("mask of %lld rows and %lld cached ones", static_cast<long long>(count), static_cast<long long>(cached));
    }
    call.mask = mask_.data();
    KVBLEND_RETURN_IF_ERROR(device.execution().for_each(
        PackMaskWord::words(count, cached), PackMaskWord{mask_.data(), rows.data(), kept.data(), count, cached}));
    return device.attend(call);
  }

 private:
  AttentionShape shape_;
  std::int32_t blocks_ = 0;
  Array<D, std::int32_t> tables_;
  Array<D, std::uint32_t> mask_;
  Array<D, T> partial_out_;
  Array<D, float> partial_sums_;
};

}  // namespace cuda_engine
