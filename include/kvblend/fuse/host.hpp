// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What an engine offers to be blended on: LayerwiseHost, which can run one layer for any set of rows. KvSource is what
// store/ offers in turn: the layers of the cached segments, one after the other.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/memory/plane.hpp>
#include <kvblend/prompt/prompt.hpp>
#include <kvblend/rope/spec.hpp>

#include <concepts>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// A LayerwiseHost keeps a KV cache with one row a token, and the hidden states of the active rows. A blend calls
//
//   begin(prompt)                 room for prompt.rows() rows, of which the resident ones hold KV; nothing of the blend
//                                 is part of the cache until commit. The prompt lives until commit or abort
//   embed(rows)                   the active set is now `rows`; their hidden states are their tokens' embeddings
//   for each layer
//     project(layer, rows)        queries, keys and values of the active rows, rotated to their positions, into the
//                                 host's scratch: fresh_keys() and fresh_values(), planes over ActiveIndex
//     keys(layer), values(layer)  planes over Row: the cache, which the blend writes
//     attend(layer, rows, kept)   the active set narrows to rows[kept[i]] (kept ascends); each row attends to every
//                                 cached row at a position ≤ its own; then the rest of the layer
//   commit(rows)                  rows [0, rows) are the cache now; decoding can go on. Only called after success.
//   abort()                       forget the blend; resident rows stay. Called after any failure but begin's own
//
// rows and kept may be empty, where nothing runs or no logits are wanted.
// The host reports a failure of its own as StatusCode::host_error; the blend then aborts and passes it on.
template <class H>
concept LayerwiseHost = requires(H& host, const Prompt& prompt, std::int32_t layer, std::span<const Row> rows,
                                 std::span<const ActiveIndex> kept, std::int32_t row_count) {
  { host.layers() } -> std::same_as<std::int32_t>;
  { host.rope(layer) } -> std::same_as<const RopeSpec&>;
  { host.begin(prompt) } -> std::same_as<Status>;
  { host.embed(rows) } -> std::same_as<Status>;
  { host.project(layer, rows) } -> std::same_as<Status>;
  { host.fresh_keys() } -> ReadablePlane;
  { host.fresh_values() } -> ReadablePlane;
  { host.keys(layer) } -> WritablePlane;
  { host.values(layer) } -> WritablePlane;
  { host.attend(layer, rows, kept) } -> std::same_as<Status>;
  { host.commit(row_count) } -> std::same_as<Status>;
  { host.abort() } -> std::same_as<void>;
};

// A host that can also report where attention goes, for selectors that ask by a probe pass.
//   attend_and_report(layer, rows, kept, first, mass)   as attend; adds to mass[r] the attention weight that the kept
//                                                       rows from kept[first] on pay to cached row r, summed over heads
//                                                       and those rows; mass has one float per row of the prompt
template <class H>
concept AttentionReportingHost = LayerwiseHost<H> &&
    requires(H& host, std::int32_t layer, std::span<const Row> rows, std::span<const ActiveIndex> kept,
             std::int32_t first, std::span<float> mass) {
  { host.attend_and_report(layer, rows, kept, first, mass) } -> std::same_as<Status>;
};

// Where the KV of the cached segments comes from, layer by layer in ascending order.
//   wait(layer)               returns once the layer of every cached segment is in memory and verified
//   keys(segment, layer), values(segment, layer)   planes over the rows of the segment's chunk, valid from wait(layer)
//                             until release(layer); `segment` is an index into prompt.segments()
//                             Back ends call them from several threads at once
//   release(layer)            the blend is done with the layer: its memory may be used for a later one
//   rope(segment, layer)      the spec the stored keys were rotated by, at any time; it stays what it is during a blend
template <class S>
concept KvSource = requires(S& source, std::int32_t layer, std::int32_t segment) {
  { source.wait(layer) } -> std::same_as<Status>;
  { source.keys(segment, layer) } -> ReadablePlane;
  { source.values(segment, layer) } -> ReadablePlane;
  { source.release(layer) } -> std::same_as<void>;
  { source.rope(segment, layer) } -> std::same_as<const RopeSpec&>;
};

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
