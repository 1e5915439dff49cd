// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// cuda::Fusor: LayerwiseFusor for KV in a device's memory. The steps are the same; each only queues work, and how many
// rows run at each layer is known before which ones, so that nothing ever waits for the device.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/cuda/choose.hpp>
#include <kvblend/cuda/execution.hpp>
#include <kvblend/cuda/operations.hpp>
#include <kvblend/cuda/pick.hpp>
#include <kvblend/cuda/planes.hpp>
#include <kvblend/cuda/score.hpp>
#include <kvblend/cuda/staging.hpp>
#include <kvblend/cuda/workspace.hpp>
#include <kvblend/fuse/active_rows.hpp>
#include <kvblend/fuse/checks.hpp>
#include <kvblend/fuse/fusor.hpp>
#include <kvblend/fuse/host.hpp>
#include <kvblend/fuse/placed_runs.hpp>
#include <kvblend/fuse/portable_backend.hpp>
#include <kvblend/fuse/workspace.hpp>
#include <kvblend/prompt/prompt.hpp>
#include <kvblend/rope/angles.hpp>
#include <kvblend/select/selector.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {
namespace cuda {

// One blend of one prompt; see LayerwiseFusor for the order of the steps. What differs:
//   Planes, and the tables and scales they point to, are device memory, as are the spans that active() and kept() give:
//     their sizes are true at once, their contents when the work queued so far is done. The engine queues its own work
//     on the same execution.
//   A before-load selector chooses on the host. One that scores during the pass or after a probe chooses on the device,
//     so its budget must know how many rows to keep without reading scores, and its score have a DeviceScore (score.hpp,
//     combined_score.hpp). What is stored with the chunks it reads in begin().
//   attention_mass() is device memory, which the engine adds to by work that it queues between fuse() of a layer and of
//     the next, or choose_after_probe().
//   Rows whose block is not in a table of blocks are passed over: the host cannot check them.
//   report() has no seconds, as the steps take none.
// From begin() on, all that is queued has fixed sizes and addresses, so that a whole blend can be captured in a CUDA
// Graph, and replayed as long as the workspace stays untouched. A source's wait() is part of that if it only queues, as
// LayerLoader's does. After any error the blend is over; what was queued still runs.
template <class Selector, Execution E, AngleRule Angles = ExactAngles>
class Fusor {
 public:
  using Memory = Workspace;
  static constexpr ScoreTiming timing = Selector::timing;

  explicit Fusor(Selector selector, E execution = E()) : selector_(selector), execution_(execution) {}

  // `heads`: KV heads of a layer, the most. `tables` as for LayerwiseFusor. Layers that follow one another with other
  // ropes have tables uploaded anew: there is room for all layers' with tables per run, for one layer's with tables per
  // row. What `host` has beyond is room for more.
  [[nodiscard]] WorkspaceBytes workspace_bytes(const Prompt& prompt, const BlendShape& shape, std::int32_t heads,
                                               RopeTables tables = RopeTables::per_run) const;

  Status begin(const Prompt& prompt, const BlendShape& shape, std::span<const Row> outputs, const Workspace& memory);

  [[nodiscard]] std::span<const Row> active() const { return active_; }
  [[nodiscard]] std::span<const ActiveIndex> kept() const { return kept_; }
  [[nodiscard]] bool probing() const { return probing_; }
  [[nodiscard]] const FusorReport& report() const { return report_; }
  [[nodiscard]] std::span<float> attention_mass() const requires(timing == ScoreTiming::after_probe) {
    return space_.mass;
  }
  Status choose_after_probe() requires(timing == ScoreTiming::after_probe) { return choose_probed(); }
  [[nodiscard]] std::int32_t first_probe_row() const { return rows_.first_probe_row(); }

  template <KvSource Source, WritablePlane Keys, WritablePlane Values>
  Status place(std::int32_t layer, const RopeSpec& spec, Source& source, const Keys& keys, const Values& values);

  template <ReadablePlane FreshKeys, ReadablePlane FreshValues, WritablePlane Keys, WritablePlane Values>
  Status fuse(std::int32_t layer, const FreshKeys& fresh_keys, const FreshValues& fresh_values, const Keys& keys,
              const Values& values);

  void narrow() {
    active_ = next_active_;
    candidates_ = next_candidates_;
  }

 private:
  static constexpr bool kOnDevice = timing != ScoreTiming::before_load;
  static constexpr FusorSpace::Needs kNeeds = detail::needs_of<decltype(Selector::score)>();
  static_assert(!kOnDevice || DeviceScored<decltype(Selector::score)>,
                "kvblend: this score is made on the device and needs a DeviceScore");
  static_assert(!kOnDevice || !kReadsScores<decltype(Selector::budget)>,
                "kvblend: this budget counts rows by their scores, which the host does not know");

  [[nodiscard]] bool chooses_at(std::int32_t layer) const {
    const bool at_start = timing != ScoreTiming::during_pass && layer == 0;
    return chooses_ && !probing_ && !at_start && selector_.chooses_at(layer);
  }
  [[nodiscard]] RowList mandatory() const { return RowList::of(space_.mandatory.first(mandatory_)); }
  // The one of the two arrays that `now` is not in.
  template <class T>
  [[nodiscard]] static std::span<T> other(std::span<T> (&arrays)[2], std::span<const T> now) {
    return arrays[now.data() == arrays[0].data() ? 1 : 0];
  }

  Status start(const Prompt& prompt, const BlendShape& shape, std::span<const Row> outputs, const Workspace& memory);
  // Of inputs.rows go on those that the selector picks, by what the host knows: compacts host_rows_.
  Status choose_on_host(std::int32_t layer);
  template <class FreshKeys, class FreshValues, class Keys, class Values>
  Status choose_on_device(const FreshKeys& fresh_keys, const FreshValues& fresh_values, const Keys& keys,
                          const Values& values, std::span<Row> chosen);
  Status choose_probed();
  Status upload_stored_part();
  // While a probe runs: all rows to choose from.
  [[nodiscard]] std::span<const Row> probed() const { return space_.candidates[0].first(host_rows_.size()); }
  template <class FreshKeys, class FreshValues, class Keys, class Values>
  Status choose(std::int32_t layer, const FreshKeys& fresh_keys, const FreshValues& fresh_values, const Keys& keys,
                const Values& values);
  // From mandatory rows and `chosen`: next_active_, and its places among active_ if `kept`.
  Status keep(std::span<const Row> chosen, ActiveIndex* kept);

  Selector selector_;
  E execution_;
  Operations<E> operations_;
  const Prompt* prompt_ = nullptr;
  BlendShape shape_;
  FusorWorkspace host_space_;
  Staging<E> staging_;  // of pinned memory, behind host_space_
  FusorSpace space_;    // device memory
  ActiveRows rows_;
  PlacedRuns<Angles> runs_;
  std::span<Row> host_rows_;  // on the host: candidates that are active, before_load; else all there were at first
  std::size_t mandatory_ = 0, outputs_ = 0;
  // On the device. The active rows are the mandatory ones and the candidates; `next` is what narrow() makes of them.
  std::span<const Row> active_, next_active_;
  std::span<const Row> candidates_, next_candidates_;
  std::span<const ActiveIndex> kept_;
  bool probing_ = false, chooses_ = false;
  FusorReport report_;
};

// ---------------------------------------------------------------------------------------------------------------------

template <class Selector, Execution E, AngleRule Angles>
WorkspaceBytes Fusor<Selector, E, Angles>::workspace_bytes(const Prompt& prompt, const BlendShape& shape,
                                                           std::int32_t heads, RopeTables tables) const {
  const bool per_row = tables == RopeTables::per_row || !Angles::uniform;
  const std::size_t floats = FusorWorkspace::table_floats(prompt, shape.head_dim, per_row);
  const auto rows = static_cast<std::size_t>(prompt.rows());
  WorkspaceBytes bytes;

  detail::Carver host;
  std::span<Row> list;
  std::span<float> values;
  for (int i = 0; i < 3; ++i) host.take(list, rows);  // mandatory rows, candidates, outputs
  if (kNeeds.stored) host.take(values, rows);
  for (std::int32_t layer = 1; layer < shape.layers && !kOnDevice; ++layer) {
    if (selector_.chooses_at(layer)) host.take(list, static_cast<std::size_t>(prompt.reused_rows()));
  }
  for (std::int32_t layer = 0; layer < (per_row ? 1 : shape.layers); ++layer) host.take(values, floats);
  bytes.host = FusorWorkspace::bytes<ExactAngles>(prompt, shape.head_dim) + host.bytes();

  detail::Carver device;
  FusorSpace space;
  space.carve(device, prompt, kNeeds, floats);
  bytes.device = device.bytes();
  if (kOnDevice) bytes.device += Operations<E>(execution_).scratch_bytes(prompt.reused_rows(), heads);
  return bytes;
}

template <class Selector, Execution E, AngleRule Angles>
Status Fusor<Selector, E, Angles>::begin(const Prompt& prompt, const BlendShape& shape, std::span<const Row> outputs,
                                         const Workspace& memory) {
  const Status status = start(prompt, shape, outputs, memory);
  if (status.ok()) return status;
  prompt_ = nullptr;  // no step goes on from here
  probing_ = false;
  return status;
}

template <class Selector, Execution E, AngleRule Angles>
Status Fusor<Selector, E, Angles>::start(const Prompt& prompt, const BlendShape& shape, std::span<const Row> outputs,
                                         const Workspace& memory) {
  KVBLEND_RETURN_IF_ERROR(validate(shape));
  KVBLEND_RETURN_IF_ERROR(selector_.validate(shape.layers));
  const std::size_t host_bytes = FusorWorkspace::bytes<ExactAngles>(prompt, shape.head_dim);
  Result<FusorWorkspace> host_space = FusorWorkspace::make<ExactAngles>(
      prompt, shape.head_dim, memory.host.first((std::min)(host_bytes, memory.host.size())));
  if (!host_space.ok())
    return Status::error(host_space.status.code(), "%s", host_space.status.message()).at("workspace.host");
  detail::Carver device(memory.device);
  FusorSpace space;
  const std::size_t floats = FusorWorkspace::table_floats(prompt, shape.head_dim, !Angles::uniform);
  space.carve(device, prompt, kNeeds, floats);
  if (!device.fits()) {
    return Status::error(StatusCode::insufficient_space, "needs %zu bytes and scratch, has %zu", device.bytes(),
                         memory.device.size())
        .at("workspace.device");
  }

  shape_ = shape;
  host_space_ = host_space.value;
  staging_ = Staging<E>(execution_, memory.host.subspan(host_bytes));
  space_ = space;
  operations_ = Operations<E>(execution_, device.rest());
  report_ = {};
  runs_.begin(prompt, host_space_);
  KVBLEND_RETURN_IF_ERROR(rows_.begin(prompt, outputs, host_space_));
  chooses_ = !rows_.candidates().empty() && selector_.most_rows(prompt.reused_rows()) > 0;
  if (chooses_) report_.selector = selector_.name_for(prompt);
  probing_ = chooses_ && kNeeds.mass;

  // Rows that the host knows: the mandatory ones, in the host's array of active rows, and the first candidates.
  prompt_ = &prompt;
  mandatory_ = 0;
  for (Row row; row.value < prompt.rows(); ++row) {
    if (host_space_.mandatory[static_cast<std::size_t>(row.value)] != 0) host_space_.active[mandatory_++] = row;
  }
  host_rows_ = host_space_.candidate_rows.first(chooses_ ? rows_.candidates().size() : 0);
  if (chooses_ && !kOnDevice) KVBLEND_RETURN_IF_ERROR(choose_on_host(0));
  outputs_ = outputs.size();
  KVBLEND_RETURN_IF_ERROR(staging_.template upload<Row>(host_space_.active.first(mandatory_), space_.mandatory));
  KVBLEND_RETURN_IF_ERROR(staging_.template upload<Row>(host_rows_, space_.candidates[0]));
  KVBLEND_RETURN_IF_ERROR(staging_.template upload<Row>(outputs, space_.outputs));
  KVBLEND_RETURN_IF_ERROR(execution_.for_each(prompt.rows(), CountUp{space_.all.data()}));
  for (const std::span<float> mass : {space_.mass, space_.weighed_mass}) {
    KVBLEND_RETURN_IF_ERROR(execution_.for_each(static_cast<std::int64_t>(mass.size()), Fill<float>{mass.data(), 0}));
  }
  if constexpr (kNeeds.stored) KVBLEND_RETURN_IF_ERROR(upload_stored_part());

  active_ = {};
  candidates_ = {};
  KVBLEND_RETURN_IF_ERROR(keep(space_.candidates[0].first(probing_ ? 0 : host_rows_.size()), nullptr));
  narrow();
  kept_ = {};
  return {};
}

template <class Selector, Execution E, AngleRule Angles>
Status Fusor<Selector, E, Angles>::keep(std::span<const Row> chosen, ActiveIndex* kept) {
  const std::size_t count = mandatory_ + chosen.size();
  const std::span<Row> rows = other(space_.active, active_).first(count);
  KVBLEND_RETURN_IF_ERROR(
      execution_.for_each(static_cast<std::int64_t>(count),
                          KeepChosen{mandatory(), RowList::of(candidates_), RowList::of(chosen), kept, rows.data()}));
  // What runs at the next layer need not be placed there.
  KVBLEND_RETURN_IF_ERROR(execution_.for_each(prompt_->rows(), Fill<std::uint8_t>{space_.computed.data(), 0}));
  KVBLEND_RETURN_IF_ERROR(execution_.for_each(static_cast<std::int64_t>(count),
                                              FillRows{rows.data(), space_.computed.data(), std::uint8_t{1}}));
  next_active_ = rows;
  next_candidates_ = chosen;
  return {};
}

template <class Selector, Execution E, AngleRule Angles>
template <KvSource Source, WritablePlane Keys, WritablePlane Values>
Status Fusor<Selector, E, Angles>::place(std::int32_t layer, const RopeSpec& spec, Source& source, const Keys& keys,
                                         const Values& values) {
  if (prompt_ == nullptr) return Status::error(StatusCode::invalid_argument, "was not called").at("begin");
  if (runs_.empty()) return {};  // nothing is cached: the source is not asked
  KVBLEND_RETURN_IF_ERROR(source.wait(layer));
  KVBLEND_RETURN_IF_ERROR(
      kvblend::detail::check_place<DevicePlanes>(*prompt_, runs_.all(), layer, spec, source, keys, values));
  runs_.make_tables_in(staging_.rest());
  KVBLEND_RETURN_IF_ERROR(runs_.refresh_tables(layer, spec, source));
  KVBLEND_RETURN_IF_ERROR(staging_.upload_tables(runs_.new_tables(), space_.table_values));
  runs_.use_copy(space_.table_values.data());
  // A deviation wants to see what fresh rows replace.
  const std::uint8_t* const computed = chooses_at(layer) ? nullptr : space_.computed.data();
  KVBLEND_RETURN_IF_ERROR(
      place_runs(operations_, spec, runs_.all(), StoredLayer<Source>{&source, layer}, keys, values, computed));
  source.release(layer);
  return {};
}

template <class Selector, Execution E, AngleRule Angles>
template <ReadablePlane FreshKeys, ReadablePlane FreshValues, WritablePlane Keys, WritablePlane Values>
Status Fusor<Selector, E, Angles>::fuse(std::int32_t layer, const FreshKeys& fresh_keys,
                                        const FreshValues& fresh_values, const Keys& keys, const Values& values) {
  if (prompt_ == nullptr) return Status::error(StatusCode::invalid_argument, "was not called").at("begin");
  const auto active = static_cast<std::int64_t>(active_.size());
  KVBLEND_RETURN_IF_ERROR(kvblend::detail::check_fresh<DevicePlanes>(active, fresh_keys, fresh_values, keys, values));
  report_.rows_computed += active;
  kept_ = space_.all.first(active_.size());
  next_active_ = active_;
  next_candidates_ = candidates_;
  if constexpr (Selector::weighs_values) {
    // What was paid at the layer before is there now.
    if (probing_ && layer > 0) KVBLEND_RETURN_IF_ERROR(detail::weigh_mass(execution_, space_, probed()));
    if (probing_) KVBLEND_RETURN_IF_ERROR(operations_.norms(values, probed(), space_.value_deviation));
  }
  if (chooses_at(layer)) KVBLEND_RETURN_IF_ERROR(choose(layer, fresh_keys, fresh_values, keys, values));
  KVBLEND_RETURN_IF_ERROR(operations_.merge(fresh_keys, active_, keys));
  KVBLEND_RETURN_IF_ERROR(operations_.merge(fresh_values, active_, values));
  if (layer == shape_.layers - 1 && !probing_) {
    report_.rows_selected = static_cast<std::int32_t>(next_candidates_.size());
    kept_ = space_.kept.first(outputs_);  // nobody reads the other rows' hidden states any more
    next_active_ = space_.outputs.first(outputs_);
    next_candidates_ = {};
    return execution_.for_each(
        static_cast<std::int64_t>(outputs_),
        PlaceRows{space_.outputs.data(), mandatory(), RowList::of(candidates_), space_.kept.data()});
  }
  return {};
}

template <class Selector, Execution E, AngleRule Angles>
template <class FreshKeys, class FreshValues, class Keys, class Values>
Status Fusor<Selector, E, Angles>::choose(std::int32_t layer, const FreshKeys& fresh_keys,
                                          const FreshValues& fresh_values, const Keys& keys, const Values& values) {
  const std::size_t count = candidates_.size();
  std::span<Row> chosen = other(space_.candidates, candidates_);
  if constexpr (kOnDevice) {
    const std::span<const float> scores = space_.scores.first(count);
    chosen = chosen.first(selector_.rows_to_keep(*prompt_, layer, shape_.layers, scores));
    if (chosen.size() == count) return {};
    if (!chosen.empty()) {
      KVBLEND_RETURN_IF_ERROR(choose_on_device(fresh_keys, fresh_values, keys, values, chosen));
    }
  } else {
    KVBLEND_RETURN_IF_ERROR(choose_on_host(layer));
    if (host_rows_.size() == count) return {};
    chosen = chosen.first(host_rows_.size());
    KVBLEND_RETURN_IF_ERROR(staging_.template upload<Row>(host_rows_, chosen));
  }
  kept_ = space_.kept.first(mandatory_ + chosen.size());
  return keep(chosen, space_.kept.data());
}

template <class Selector, Execution E, AngleRule Angles>
Status Fusor<Selector, E, Angles>::choose_on_host(std::int32_t layer) {
  const auto picked = selector_.choose(PortableBackend{}, {*prompt_, host_rows_, {}, {}, {}, layer}, shape_.layers,
                                       {host_space_.scores, host_space_.top_k_scratch, host_space_.picked});
  KVBLEND_RETURN_IF_ERROR(picked.status);
  for (std::size_t i = 0; i < picked.value.size(); ++i) {
    host_rows_[i] = host_rows_[static_cast<std::size_t>(picked.value[i].value)];
  }
  host_rows_ = host_rows_.first(picked.value.size());
  return {};
}

template <class Selector, Execution E, AngleRule Angles>
template <class FreshKeys, class FreshValues, class Keys, class Values>
Status Fusor<Selector, E, Angles>::choose_on_device(const FreshKeys& fresh_keys, const FreshValues& fresh_values,
                                                    const Keys& keys, const Values& values, std::span<Row> chosen) {
  const std::size_t count = candidates_.size();
  const std::span<ActiveIndex> in_active = space_.in_active.first(count);
  KVBLEND_RETURN_IF_ERROR(execution_.for_each(
      static_cast<std::int64_t>(count), PlaceCandidates{mandatory(), RowList::of(candidates_), in_active.data()}));
  DeviceScoreInputs inputs;
  if constexpr (Selector::uses_keys) {
    const auto out = space_.key_deviation.first(count);
    KVBLEND_RETURN_IF_ERROR(operations_.deviation(fresh_keys, in_active, candidates_, keys, out));
    inputs.key_deviation = out;
  }
  if constexpr (Selector::uses_values) {
    const auto out = space_.value_deviation.first(count);
    KVBLEND_RETURN_IF_ERROR(operations_.deviation(fresh_values, in_active, candidates_, values, out));
    inputs.value_deviation = out;
  }
  return detail::pick_rows(operations_, selector_.score, space_, inputs, candidates_, chosen);
}

template <class Selector, Execution E, AngleRule Angles>
Status Fusor<Selector, E, Angles>::choose_probed() {
  if (!probing_) return Status::error(StatusCode::invalid_argument, "no probe pass is under way").at("probe");
  std::span<const Row> chosen = probed();
  if constexpr (Selector::weighs_values) {
    KVBLEND_RETURN_IF_ERROR(detail::weigh_mass(execution_, space_, chosen));
  }
  const std::size_t count = selector_.rows_to_keep(*prompt_, 0, shape_.layers, space_.scores.first(chosen.size()));
  if (count < chosen.size()) {
    const std::span<Row> some = space_.candidates[1].first(count);
    KVBLEND_RETURN_IF_ERROR(detail::pick_rows(operations_, selector_.score, space_, {}, chosen, some));
    chosen = some;
  }
  KVBLEND_RETURN_IF_ERROR(keep(chosen, nullptr));
  narrow();
  probing_ = false;
  return {};
}

template <class Selector, Execution E, AngleRule Angles>
Status Fusor<Selector, E, Angles>::upload_stored_part() {
  const std::span<float> scores = host_space_.scores.first(host_rows_.size());
  const std::span<float> by_row = host_space_.key_deviation;  // the device's is used
  KVBLEND_RETURN_IF_ERROR(
      kvblend::detail::run_score(selector_.score.second, {*prompt_, host_rows_, {}, {}, {}, 0}, scores));
  for (std::size_t i = 0; i < scores.size(); ++i) by_row[static_cast<std::size_t>(host_rows_[i].value)] = scores[i];
  return staging_.template upload<float>(by_row, space_.stored_by_row);
}

}  // namespace cuda
}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
