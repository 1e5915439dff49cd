// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// LayerwiseFusor: puts reused and fresh KV together, layer by layer, and leaves one coherent cache. This is the step
// API for engines that own their layer loop; blend.hpp drives it for those that hand the loop over.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/fuse/active_rows.hpp>
#include <kvblend/fuse/backend.hpp>
#include <kvblend/fuse/checks.hpp>
#include <kvblend/fuse/drift.hpp>
#include <kvblend/fuse/host.hpp>
#include <kvblend/fuse/placed_runs.hpp>
#include <kvblend/fuse/portable_backend.hpp>
#include <kvblend/fuse/stopwatch.hpp>
#include <kvblend/fuse/workspace.hpp>
#include <kvblend/prompt/prompt.hpp>
#include <kvblend/rope/angles.hpp>
#include <kvblend/select/norm.hpp>
#include <kvblend/select/selector.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// Seconds of a blend by what they went to, and what it did. load_s is the time the blend stood still for a layer that
// was not there yet: loading that hides behind recompute is not in it.
struct FusorReport {
  double load_s = 0;
  double shift_s = 0;  // rotating keys and copying values into the cache
  double score_s = 0;
  double select_s = 0;
  double merge_s = 0;              // writing fresh rows into the cache, and moving the others by their drift
  std::int32_t rows_selected = 0;  // reused rows among those kept at the last layer
  std::int64_t rows_computed = 0;  // rows that ran, summed over the layers
  const char* selector = "none";   // name of the score that chose; "none" where nothing was to choose
};

// One blend of one prompt. Per layer, in this order:
//
//   fusor.begin(prompt, shape, outputs, memory)       once; before-load selectors choose here
//   for layer in 0 … layers - 1:
//     (the engine computes fresh K, V of the rows fusor.active())
//     fusor.place(layer, rope, source, keys, values)    reused rows come into the cache, at their positions
//     fusor.fuse(layer, fresh_keys, fresh_values, keys, values)
//                                                       scores and selects where due; fresh rows come into the cache
//     (the engine runs attention and the rest of the layer for fusor.active()[fusor.kept()[i]], all i)
//     fusor.narrow()                                    active() is now what was kept
//
// With an after-probe selector those steps are gone through twice: probing() is true the first time, when the active
// rows are the mandatory ones and the engine adds their attention to attention_mass(); choose_after_probe() then makes
// the choice, and the second time place() is left out.
// After any error the blend is over: begin() starts the next one, with the same fusor and memory if wanted.
// `Drift`: what becomes of reused rows that are not recomputed (drift.hpp).
template <class Selector, class Backend = PortableBackend, AngleRule Angles = ExactAngles, class Drift = NoDrift>
class LayerwiseFusor {
 public:
  using Shape = BlendShape;
  using Memory = std::span<std::byte>;
  static constexpr ScoreTiming timing = Selector::timing;
  static constexpr bool moves_rows = Drift::moves;

  explicit LayerwiseFusor(Selector selector, Backend backend = {}, Drift drift = {})
      : selector_(selector), backend_(backend), drift_(drift) {}

  // `tables`: per_row if some chunk's stored frequencies are others than the host's (place() says so if it must).
  [[nodiscard]] static std::size_t workspace_bytes(const Prompt& prompt, std::int32_t head_dim,
                                                   RopeTables tables = RopeTables::per_run) {
    return FusorWorkspace::bytes<Angles>(prompt, head_dim, tables);
  }

  // `outputs`: rows whose logits are wanted, ascending; they are computed whatever the selector says. The prompt, its
  // segments, `outputs` and `memory` (workspace_bytes()) must live until the blend ends.
  // Errors: a selector's bad field, an output outside the prompt or resident, too little memory, missing scores.
  Status begin(const Prompt& prompt, Shape shape, std::span<const Row> outputs, std::span<std::byte> memory);

  [[nodiscard]] std::span<const Row> active() const { return rows_.active(); }
  [[nodiscard]] std::span<const ActiveIndex> kept() const { return rows_.kept(); }
  [[nodiscard]] bool probing() const { return probing_; }
  [[nodiscard]] const FusorReport& report() const { return report_; }

  // Waits for the layer, rotates keys and copies values of the cached segments into the cache; rows that fuse() will
  // write at this layer are left out if nothing compares them. Keys go from the source's spec at their old positions to
  // `spec` at the new ones.
  // Errors: the source's own; a stored spec that cannot be moved to `spec`; planes whose heads, head_dim or rows do not
  // fit; stored frequencies that differ, in a workspace with tables per run. Nothing of the layer is written then.
  // `all_rows`: leave none out.
  template <KvSource Source, WritablePlane Keys, WritablePlane Values>
  Status place(std::int32_t layer, const RopeSpec& spec, Source& source, const Keys& keys, const Values& values,
               bool all_rows = false);

  // Scores and selects if this layer is where the selector looks, then writes the fresh rows of all active tokens, also
  // of those that go no further: fresh KV is never worse than reused. fresh_* are planes over ActiveIndex.
  // Errors: fresh planes of another shape than the cache's or with fewer rows than are active; the selector's own; too
  // little memory for the drift. Nothing of the layer is written then.
  template <ReadablePlane FreshKeys, ReadablePlane FreshValues, WritablePlane Keys, WritablePlane Values>
  Status fuse(std::int32_t layer, const FreshKeys& fresh_keys, const FreshValues& fresh_values, const Keys& keys,
              const Values& values);

  void narrow() {
    if (Selector::weighs_values && probing_) weigh_mass();
    rows_.narrow();
  }

  // For engines that run many layers in one pass (pass_blend.hpp), which place all layers first and fuse only the early
  // ones that scores come from.
  //   scored_layer()      the layer up to which they must be fused; -1: none, active() is what runs
  //   narrows()           whether fewer rows are kept at some later layer
  //   narrow_at(layer)    narrows active() to those rows that the budget keeps at `layer`, by the scores of the first
  //                       choice
  //   count_pass(layers)  the active rows ran that many layers
  //   add_probed_layer(mass, values)   of a probe pass that ran all layers at once: what one of them paid to each row
  //                       of the prompt, and its values as placed
  //   moves_rest()        whether reused rows are to be moved by their drift in the pass that comes
  //   settle(layer, first, end, rows, …)   writes the fresh rows of a pass that ran `rows`, all of the active ones in
  //                       [first, end) and maybe more, and moves the reused rows in there. Errors: rows that do not
  //                       ascend in there, and fuse()'s
  [[nodiscard]] std::int32_t scored_layer() const {
    return chooses_ && Selector::timing == ScoreTiming::during_pass ? selector_.first_layer() : -1;
  }
  [[nodiscard]] bool narrows() const {
    for (std::int32_t layer = selector_.first_layer() + 1; chooses_ && layer < shape_.layers; ++layer) {
      if (selector_.chooses_at(layer)) return true;
    }
    return false;
  }
  Status narrow_at(std::int32_t layer);
  void count_pass(std::int32_t layers) {
    report_.rows_computed += std::int64_t{layers} * static_cast<std::int64_t>(rows_.active().size());
    // fuse() counted them if scores come from the last layer, and only outputs are active now.
    if (scored_layer() == shape_.layers - 1) return;
    rows_.keep_all();
    report_.rows_selected = rows_.kept_reused();
  }
  template <ReadablePlane Values>
  void add_probed_layer(std::span<const float> mass, const Values& values);
  [[nodiscard]] bool moves_rest() const { return Drift::moves && chooses_ && !probing_ && rows_.some_reused_rest(); }
  template <ReadablePlane FreshKeys, ReadablePlane FreshValues, WritablePlane Keys, WritablePlane Values>
  Status settle(std::int32_t layer, Row first, Row end, std::span<const Row> rows, const FreshKeys& fresh_keys,
                const FreshValues& fresh_values, const Keys& keys, const Values& values) {
    KVBLEND_RETURN_IF_ERROR(detail::check_part(first, end, rows, prompt_->rows()));
    const auto count = static_cast<std::int64_t>(rows.size());
    KVBLEND_RETURN_IF_ERROR(detail::check_fresh<HostPlanes>(count, fresh_keys, fresh_values, keys, values));
    return merge(layer, first, end, rows, fresh_keys, fresh_values, keys, values);
  }
  [[nodiscard]] const Selector& selector() const { return selector_; }

  // Probe pass: attention paid to each row, which the engine adds to; only rows active()[kept()[i]] with
  // i ≥ first_probe_row() count, those behind the last reused row.
  [[nodiscard]] std::span<float> attention_mass() const { return space_.attention_mass; }
  [[nodiscard]] std::int32_t first_probe_row() const { return rows_.first_probe_row(); }
  Status choose_after_probe();

 private:
  Status choose(const ScoreInputs& inputs);
  std::span<const float> mass_of(std::span<const Row> rows);
  void weigh_mass();
  template <class FreshKeys, class FreshValues, class Keys, class Values>
  Status choose_among_active(std::int32_t layer, const FreshKeys& fresh_keys, const FreshValues& fresh_values,
                             const Keys& keys, const Values& values);
  // Choices during the pass; what is known before or by a probe was chosen at the start.
  [[nodiscard]] bool chooses_at(std::int32_t layer) const {
    const bool at_start = Selector::timing != ScoreTiming::during_pass && layer == 0;
    return chooses_ && !probing_ && !at_start && selector_.chooses_at(layer);
  }

  // Whether reused rows are moved at this layer, which place() and fuse() must know alike. Up to the layer that scores
  // come from all rows are fresh.
  [[nodiscard]] bool drifts_at(std::int32_t layer) const {
    return layer > (std::max)(scored_layer(), 0) && moves_rest();
  }
  template <class FreshKeys, class FreshValues, class Keys, class Values>
  Status merge(std::int32_t layer, Row first, Row end, std::span<const Row> rows, const FreshKeys& fresh_keys,
               const FreshValues& fresh_values, const Keys& keys, const Values& values);

  Selector selector_;
  Backend backend_;
  [[no_unique_address]] Drift drift_;
  const Prompt* prompt_ = nullptr;
  Shape shape_;
  FusorWorkspace space_;
  ActiveRows rows_;
  PlacedRuns<Angles> runs_;
  std::span<const ActiveIndex> picked_;  // into rows_.candidates()
  bool probing_ = false;
  bool chooses_ = false;  // there is something to choose from, and a budget to choose with
  FusorReport report_;
};

// ---------------------------------------------------------------------------------------------------------------------

template <class Selector, class Backend, AngleRule Angles, class Drift>
Status LayerwiseFusor<Selector, Backend, Angles, Drift>::begin(const Prompt& prompt, Shape shape,
                                                               std::span<const Row> outputs,
                                                               std::span<std::byte> memory) {
  KVBLEND_RETURN_IF_ERROR(validate(shape));
  KVBLEND_RETURN_IF_ERROR(selector_.validate(shape.layers));
  if constexpr (Drift::moves) KVBLEND_RETURN_IF_ERROR(drift_.validate());
  Result<FusorWorkspace> space = FusorWorkspace::make<Angles>(prompt, shape.head_dim, memory);
  KVBLEND_RETURN_IF_ERROR(space.status);

  prompt_ = &prompt;
  shape_ = shape;
  space_ = space.value;
  runs_.begin(prompt, space_);
  picked_ = {};
  probing_ = false;
  report_ = {};
  KVBLEND_RETURN_IF_ERROR(rows_.begin(prompt, outputs, space_));

  chooses_ = !rows_.candidates().empty() && selector_.most_rows(prompt.reused_rows()) > 0;
  if (chooses_) report_.selector = selector_.name_for(prompt);
  if (chooses_ && Selector::timing == ScoreTiming::during_pass) {
    rows_.start_with_all();
    return {};
  }
  if (chooses_ && Selector::timing == ScoreTiming::before_load) {
    KVBLEND_RETURN_IF_ERROR(choose({prompt, rows_.candidates(), {}, {}, {}, 0}));
  }
  probing_ = chooses_ && Selector::timing == ScoreTiming::after_probe;
  rows_.start_with_picked(picked_);
  return {};
}

// Leaves the best of inputs.rows in picked_, as indices into them.
template <class Selector, class Backend, AngleRule Angles, class Drift>
Status LayerwiseFusor<Selector, Backend, Angles, Drift>::choose(const ScoreInputs& inputs) {
  Stopwatch watch(report_.select_s);
  auto picked = selector_.choose(backend_, inputs, shape_.layers, {space_.scores, space_.top_k_scratch, space_.picked});
  picked_ = picked.value;
  return picked.status;
}

template <class Selector, class Backend, AngleRule Angles, class Drift>
std::span<const float> LayerwiseFusor<Selector, Backend, Angles, Drift>::mass_of(std::span<const Row> rows) {
  if (Selector::timing != ScoreTiming::after_probe) return {};
  const std::span<float> mass = space_.key_deviation.first(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i)
    mass[i] = space_.attention_mass[static_cast<std::size_t>(rows[i].value)];
  return mass;
}

// Of the layer that was just probed: the candidates' attention times the norms that fuse() left, on to the sum of the
// layers before. A probe needs no deviations, so their arrays hold the sum and the norms, both by row.
template <class Selector, class Backend, AngleRule Angles, class Drift>
void LayerwiseFusor<Selector, Backend, Angles, Drift>::weigh_mass() {
  for (const Row row : rows_.candidates()) {
    const auto r = static_cast<std::size_t>(row.value);
    space_.key_deviation[r] =
        detail::add_weighed(space_.key_deviation[r], space_.attention_mass[r], space_.value_deviation[r]);
  }
  std::fill(space_.attention_mass.begin(), space_.attention_mass.end(), 0.0f);
}

template <class Selector, class Backend, AngleRule Angles, class Drift>
Status LayerwiseFusor<Selector, Backend, Angles, Drift>::choose_after_probe() {
  if (!probing_) return Status::error(StatusCode::invalid_argument, "no probe pass is under way").at("probe");
  if (Selector::weighs_values) {
    std::copy(space_.key_deviation.begin(), space_.key_deviation.end(), space_.attention_mass.begin());
  }
  KVBLEND_RETURN_IF_ERROR(choose({*prompt_, rows_.candidates(), {}, {}, mass_of(rows_.candidates()), 0}));
  probing_ = false;
  rows_.start_with_picked(picked_);
  return {};
}

template <class Selector, class Backend, AngleRule Angles, class Drift>
template <KvSource Source, WritablePlane Keys, WritablePlane Values>
Status LayerwiseFusor<Selector, Backend, Angles, Drift>::place(std::int32_t layer, const RopeSpec& spec, Source& source,
                                                               const Keys& keys, const Values& values, bool all_rows) {
  using Stored = decltype(source.keys(0, layer));
  static_assert(BackendFor<Backend, Stored, Keys>, "kvblend: the back end cannot move stored rows into these planes");
  if (prompt_ == nullptr) return Status::error(StatusCode::invalid_argument, "was not called").at("begin");
  if (runs_.empty()) return {};  // nothing is cached: the source is not asked
  {
    Stopwatch watch(report_.load_s);
    KVBLEND_RETURN_IF_ERROR(source.wait(layer));
  }
  Stopwatch watch(report_.shift_s);
  // Whatever can be wrong is found before anything is written.
  KVBLEND_RETURN_IF_ERROR(detail::check_place<HostPlanes>(*prompt_, runs_.all(), layer, spec, source, keys, values));
  KVBLEND_RETURN_IF_ERROR(runs_.refresh_tables(layer, spec, source));
  // Rows that run at this layer get fresh KV in fuse(); only deviations want to see what it replaces.
  std::fill(space_.computed.begin(), space_.computed.end(), std::uint8_t{0});
  if (!chooses_at(layer) && !drifts_at(layer) && !all_rows) {
    for (const Row row : rows_.active()) space_.computed[static_cast<std::size_t>(row.value)] = 1;
  }
  backend_.place(spec, runs_.all(), StoredLayer<Source>{&source, layer}, keys, values, space_.computed);
  source.release(layer);
  return {};
}

template <class Selector, class Backend, AngleRule Angles, class Drift>
template <ReadablePlane FreshKeys, ReadablePlane FreshValues, WritablePlane Keys, WritablePlane Values>
Status LayerwiseFusor<Selector, Backend, Angles, Drift>::fuse(std::int32_t layer, const FreshKeys& fresh_keys,
                                                              const FreshValues& fresh_values, const Keys& keys,
                                                              const Values& values) {
  const auto active = static_cast<std::int64_t>(rows_.active().size());
  KVBLEND_RETURN_IF_ERROR(detail::check_fresh<HostPlanes>(active, fresh_keys, fresh_values, keys, values));
  report_.rows_computed += active;
  rows_.keep_all();
  if (Selector::weighs_values && probing_) {
    Stopwatch watch(report_.score_s);
    for (const Row row : rows_.candidates()) {
      space_.value_deviation[static_cast<std::size_t>(row.value)] = row_norm(values, row.value);
    }
  }
  if (chooses_at(layer)) {
    KVBLEND_RETURN_IF_ERROR(choose_among_active(layer, fresh_keys, fresh_values, keys, values));
    rows_.keep_picked(picked_);
  }
  KVBLEND_RETURN_IF_ERROR(
      merge(layer, Row(0), Row(prompt_->rows()), rows_.active(), fresh_keys, fresh_values, keys, values));
  if (layer == shape_.layers - 1 && !probing_) {
    report_.rows_selected = rows_.kept_reused();
    rows_.keep_outputs();  // nobody reads the other rows' hidden states any more
  }
  return {};
}

template <class Selector, class Backend, AngleRule Angles, class Drift>
template <class FreshKeys, class FreshValues, class Keys, class Values>
Status LayerwiseFusor<Selector, Backend, Angles, Drift>::choose_among_active(std::int32_t layer,
                                                                             const FreshKeys& fresh_keys,
                                                                             const FreshValues& fresh_values,
                                                                             const Keys& keys, const Values& values) {
  rows_.list_active_candidates();
  const std::span<const Row> rows = rows_.candidates();
  const std::span<const ActiveIndex> which = rows_.in_active();
  ScoreInputs inputs{*prompt_, rows, {}, {}, mass_of(rows), layer};
  {
    Stopwatch watch(report_.score_s);
    if constexpr (Selector::uses_keys) {
      backend_.deviation(fresh_keys, which, rows, keys, space_.key_deviation.first(rows.size()));
      inputs.key_deviation = space_.key_deviation.first(rows.size());
    }
    if constexpr (Selector::uses_values) {
      backend_.deviation(fresh_values, which, rows, values, space_.value_deviation.first(rows.size()));
      inputs.value_deviation = space_.value_deviation.first(rows.size());
    }
  }
  return choose(inputs);
}

// `rows` ran. Reused rows in [first, end) that did not are moved.
template <class Selector, class Backend, AngleRule Angles, class Drift>
template <class FreshKeys, class FreshValues, class Keys, class Values>
Status LayerwiseFusor<Selector, Backend, Angles, Drift>::merge(std::int32_t layer, Row first, Row end,
                                                               std::span<const Row> rows, const FreshKeys& fresh_keys,
                                                               const FreshValues& fresh_values, const Keys& keys,
                                                               const Values& values) {
  static_assert(BackendFor<Backend, FreshKeys, Keys>, "kvblend: the back end cannot move fresh rows into these planes");
  Stopwatch watch(report_.merge_s);
  if constexpr (Drift::moves) {  // first, as it reads what is overwritten then
    if (drifts_at(layer)) {
      KVBLEND_RETURN_IF_ERROR(drift_.move(backend_, rows_.drift_roles(first, end), runs_.all(), rows, fresh_keys, keys,
                                          fresh_values, values));
    }
  }
  backend_.merge(fresh_keys, rows, keys);
  backend_.merge(fresh_values, rows, values);
  return {};
}

// All candidates of the first choice are scored again: with fewer of them a score that weighs one kind of deviation
// against another would weigh anew.
template <class Selector, class Backend, AngleRule Angles, class Drift>
Status LayerwiseFusor<Selector, Backend, Angles, Drift>::narrow_at(std::int32_t layer) {
  const std::size_t count = rows_.candidates().size();
  ScoreInputs inputs{*prompt_, rows_.candidates(), {}, {}, mass_of(rows_.candidates()), layer};
  if constexpr (Selector::uses_keys) inputs.key_deviation = space_.key_deviation.first(count);
  if constexpr (Selector::uses_values) inputs.value_deviation = space_.value_deviation.first(count);
  KVBLEND_RETURN_IF_ERROR(choose(inputs));
  rows_.narrow_to(picked_);
  return {};
}

template <class Selector, class Backend, AngleRule Angles, class Drift>
template <ReadablePlane Values>
void LayerwiseFusor<Selector, Backend, Angles, Drift>::add_probed_layer(std::span<const float> mass,
                                                                        const Values& values) {
  Stopwatch watch(report_.score_s);
  // Weighed sums lie where weigh_mass() collects them.
  const std::span<float> sums = Selector::weighs_values ? space_.key_deviation : space_.attention_mass;
  for (const Row row : rows_.candidates()) {
    const auto r = static_cast<std::size_t>(row.value);
    if constexpr (Selector::weighs_values) {
      sums[r] = detail::add_weighed(sums[r], mass[r], row_norm(values, row.value));
    } else {
      sums[r] += mass[r];
    }
  }
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
