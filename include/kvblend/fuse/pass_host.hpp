// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What an engine offers to be blended on if it cannot run one layer for a set of rows: PassHost, which runs whole
// passes, all layers in one call. blend() for it is in pass_blend.hpp.
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

// Layers [first, end) of a model.
struct LayerRange {
  std::int32_t first = 0;
  std::int32_t end = 0;

  [[nodiscard]] std::int32_t size() const { return end - first; }
};

// A PassHost keeps a KV cache with one row a token, and memory of its own that this can be loaded from. A blend calls
//
//   begin(prompt)                 room for prompt.rows() rows, of which the resident ones hold KV; nothing of the blend
//                                 is part of the cache until commit. The prompt lives until commit or abort
//   keys(layer), values(layer)    planes over Row: the memory that reused KV is placed into, for all layers
//   load()                        the rows from prompt.resident_rows() on are in the cache now, as placed. All rows of
//                                 cached segments were; those of fresh ones hold nothing, and are computed first thing
//   compute(range, rows, outputs) runs the layers of `range` for `rows` (ascending, at their positions): their KV
//                                 replaces what the cache holds, each attends to every cached row at a position ≤ its
//                                 own. `rows` is not empty; `outputs`, a part of it, are those whose logits are wanted:
//                                 none but where the range ends at the last layer
//   commit(rows)                  rows [0, rows) are the cache now; decoding can go on. Only called after success
//   abort()                       forget the blend; resident rows stay, unless it was the host that failed. Called after any
//                                 failure but begin's own
//
// runs_ranges() says whether ranges other than all layers can be run. Those of a blend follow one another, each for rows
// of the one before. Where the first starts behind layer 0, the rows go on from what score() left.
// The host may compute more rows than it was told, where that suits its kernels: fresh KV is never worse than reused.
// It reports a failure of its own as StatusCode::host_error; the blend then aborts and passes it on.
template <class H>
concept PassHost = requires(H& host, const H& constant, const Prompt& prompt, std::int32_t layer, LayerRange range,
                            std::span<const Row> rows, std::int32_t row_count) {
  { host.layers() } -> std::same_as<std::int32_t>;
  { host.rope(layer) } -> std::same_as<const RopeSpec&>;
  { host.begin(prompt) } -> std::same_as<Status>;
  { host.keys(layer) } -> WritablePlane;
  { host.values(layer) } -> WritablePlane;
  { host.load() } -> std::same_as<Status>;
  { host.compute(range, rows, rows) } -> std::same_as<Status>;
  { constant.runs_ranges() } -> std::same_as<bool>;
  { host.commit(row_count) } -> std::same_as<Status>;
  { host.abort() } -> std::same_as<void>;
};

// A host that can also say what the keys and values of an early layer would be, for selectors that look at deviations.
//   score(layer, rows)            between begin and load: runs the layers before `layer` for `rows`, all that are not
//                                 exact, and projects at `layer`. Each row attends to exact KV of the rows before it:
//                                 those of `rows`, and the exact ones, which the host runs too or has
//   fresh_keys(layer), fresh_values(layer)   planes over the index into `rows`, of each layer up to the scored one,
//                                 until load: keys rotated to their positions
template <class H>
concept ScoringPassHost = PassHost<H> && requires(H& host, std::int32_t layer, std::span<const Row> rows) {
  { host.score(layer, rows) } -> std::same_as<Status>;
  { host.fresh_keys(layer) } -> ReadablePlane;
  { host.fresh_values(layer) } -> ReadablePlane;
};

// A host that can also say where attention goes, for selectors that ask by a probe pass.
//   probe(rows, first)            once, between load and the first compute: runs all layers for `rows` (ascending, not
//                                 empty: those that are computed whatever is chosen) over the cache as placed, each row
//                                 attending as in compute. Their KV may stay in the cache, as the computes that follow
//                                 replace it; no other row's may change
//   attention_mass(layer)         from then until the first compute: one float a row of the prompt, the softmax weights
//                                 that rows[first], rows[first + 1], … pay to it in that layer, summed over heads and
//                                 those rows; a weight is a share of all that the row attends to, so that the layer's
//                                 sum over the rows is heads * (rows that are counted). 0 for what no row attends to
// values(layer) must be readable, as placed, until the first compute: some selectors weigh attention by them.
template <class H>
concept ProbingPassHost = PassHost<H> &&
    requires(H& host, std::int32_t layer, std::span<const Row> rows, std::int32_t first) {
  { host.probe(rows, first) } -> std::same_as<Status>;
  { host.attention_mass(layer) } -> std::convertible_to<std::span<const float>>;
};

namespace detail {

// What settle may be: any callable of this kind.
struct AnySettle {
  template <ReadablePlane Keys, ReadablePlane Values>
  Status operator()(std::int32_t, Row, Row, std::span<const Row>, const Keys&, const Values&) const {
    return {};
  }
};

}  // namespace detail

// A host that can also show what a layer computes before anything attends to it, so that rows which are not computed can
// move with it (drift.hpp).
//   compute(range, rows, outputs, settle)   as compute, and asks in each layer, once it has keys and values there and
//                                 before any row attends to them:
//                                   settle(layer, first, end, ran, fresh_keys, fresh_values)
//                                 `ran` are the rows that run, ascending: those of `rows` in [first, end), and others
//                                 that the host adds. fresh_* are planes over the index into them, keys rotated. If
//                                 settle returns ok, the rows [first, end) of keys(layer) and values(layer) are what
//                                 the cache is to hold, but for resident ones, and the host copies them there; if not,
//                                 compute ends with that status. A host that cannot run all rows at once runs parts, in
//                                 ascending order: their [first, end) follow one another, from 0 to the prompt's rows
// keys(layer) and values(layer) must stay as placed until then.
template <class H>
concept SettlingPassHost = PassHost<H> && requires(H& host, LayerRange range, std::span<const Row> rows) {
  { host.compute(range, rows, rows, detail::AnySettle{}) } -> std::same_as<Status>;
};

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
