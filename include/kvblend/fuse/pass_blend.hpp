// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// blend() over a PassHost: score, place all layers, load, probe, then one pass over what was selected; or one for each
// group of layers, where the budget narrows and the host can run ranges.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/fuse/blend.hpp>
#include <kvblend/fuse/fusor.hpp>
#include <kvblend/fuse/host.hpp>
#include <kvblend/fuse/pass_host.hpp>
#include <kvblend/fuse/stopwatch.hpp>
#include <kvblend/prompt/prompt.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

struct PassOptions {
  // Passes that a budget which narrows is spread over, each over a group of layers with a set of rows of its own: the
  // rows that the budget keeps at the middle of the group, the lower of two. One group misses the budget's mean.
  std::int32_t groups = 3;
};

// Seconds by what they went to.
struct PassReport {
  FusorReport fusor;
  double score_pass_s = 0;  // the host's score()
  double load_cache_s = 0;  // the host's load()
  double probe_s = 0;       // the host's probe()
  double compute_s = 0;     // the host's compute(), less fusor.merge_s
  double total_s = 0;       // the whole call
  std::int32_t passes = 0;  // calls of compute()
};

namespace detail {

// Where the group ends that starts at `layer`. The last group starts where the budget narrows for the last time; what
// is before it is cut evenly, into single layers at most.
template <class Selector>
std::int32_t end_of_group(const Selector& selector, LayerRange model, std::int32_t layer, std::int32_t groups) {
  std::int32_t last_choice = model.first;
  for (std::int32_t l = model.first; l < model.end; ++l) {
    if (selector.chooses_at(l)) last_choice = l;
  }
  if (groups <= 1 || layer >= last_choice) return model.end;
  const std::int64_t narrowing = last_choice - model.first;
  const std::int64_t parts = (std::min)(std::int64_t{groups} - 1, narrowing);
  // Part i ends at narrowing * i / parts; the first one that ends behind `layer`.
  const std::int64_t part = ((layer - model.first + 1) * parts + narrowing - 1) / narrowing;
  return model.first + static_cast<std::int32_t>(narrowing * part / parts);
}

template <class Host, class Source, class Fusor>
Status score_and_place(Host& host, Source& source, Fusor& fusor, PassReport& out) {
  const std::int32_t scored = fusor.scored_layer();
  if (scored >= 0) {
    if constexpr (ScoringPassHost<Host>) {
      Stopwatch watch(out.score_pass_s);
      KVBLEND_RETURN_IF_ERROR(host.score(scored, fusor.active()));
    }
  }
  // Loading went on while the host scored. All rows are placed, also those that a pass will compute: until then others
  // may read them.
  for (std::int32_t layer = 0; layer < host.layers(); ++layer) {
    KVBLEND_RETURN_IF_ERROR(
        fusor.place(layer, host.rope(layer), source, host.keys(layer), host.values(layer), layer > scored));
    if (layer > scored) continue;
    if constexpr (ScoringPassHost<Host>) {
      KVBLEND_RETURN_IF_ERROR(
          fusor.fuse(layer, host.fresh_keys(layer), host.fresh_values(layer), host.keys(layer), host.values(layer)));
    }
    fusor.narrow();
  }
  return {};
}

// Asks where the attention of the rows that run anyway goes, and chooses by it.
template <class Host, class Fusor>
Status probe_and_choose(Host& host, Fusor& fusor, std::int32_t prompt_rows, PassReport& out) {
  if (fusor.active().empty()) return fusor.choose_after_probe();
  {
    Stopwatch watch(out.probe_s);
    KVBLEND_RETURN_IF_ERROR(host.probe(fusor.active(), fusor.first_probe_row()));
  }
  fusor.count_pass(host.layers());
  for (std::int32_t layer = 0; layer < host.layers(); ++layer) {
    const std::span<const float> mass = host.attention_mass(layer);
    if (mass.size() != static_cast<std::size_t>(prompt_rows)) {
      return Status::error(StatusCode::mismatch, "has %zu floats, the prompt has %d rows", mass.size(), prompt_rows)
          .at("attention_mass(%d)", layer);
    }
    fusor.add_probed_layer(mass, host.values(layer));
  }
  return fusor.choose_after_probe();
}

template <class Host, class Fusor>
Status compute(Host& host, Fusor& fusor, LayerRange range, std::span<const Row> outputs) {
  if constexpr (Fusor::moves_rows) {
    if (!fusor.moves_rest()) return host.compute(range, fusor.active(), outputs);
    const auto settle = [&](std::int32_t layer, Row first, Row end, std::span<const Row> ran, const auto& fresh_keys,
                            const auto& fresh_values) -> Status {
      return fusor.settle(layer, first, end, ran, fresh_keys, fresh_values, host.keys(layer), host.values(layer));
    };
    return host.compute(range, fusor.active(), outputs, settle);
  } else {
    return host.compute(range, fusor.active(), outputs);
  }
}

template <class Host, class Source, class Fusor, class Selector>
Status run_passes(Host& host, Source& source, Fusor& fusor, const Selector& selector, const Prompt& prompt,
                  std::span<const Row> outputs, const PassOptions& options, PassReport& out) {
  // What was scored starts at the scored layer, if the host can go on from there.
  const std::int32_t scored = fusor.scored_layer();
  LayerRange range{scored >= 0 && host.runs_ranges() ? scored : 0, host.layers()};
  const LayerRange model{selector.first_layer(), host.layers()};
  const bool narrows = fusor.narrows();
  if (narrows && !host.runs_ranges()) {
    return Status::error(StatusCode::unsupported, "narrows over the layers, and the host runs all layers at once")
        .at("budget");
  }
  KVBLEND_RETURN_IF_ERROR(score_and_place(host, source, fusor, out));
  {
    Stopwatch watch(out.load_cache_s);
    KVBLEND_RETURN_IF_ERROR(host.load());
  }
  if constexpr (Fusor::timing == ScoreTiming::after_probe) {
    if (fusor.probing()) KVBLEND_RETURN_IF_ERROR(probe_and_choose(host, fusor, prompt.rows(), out));
  }
  while (range.first < host.layers()) {
    if (narrows) {
      range.end = end_of_group(selector, model, range.first, options.groups);
      KVBLEND_RETURN_IF_ERROR(fusor.narrow_at((range.first + range.end - 1) / 2));
    }
    if (!fusor.active().empty()) {
      const double merged_s = fusor.report().merge_s;
      const bool last = range.end == host.layers();
      Status computed;
      {
        Stopwatch watch(out.compute_s);
        computed = compute(host, fusor, range, last ? outputs : std::span<const Row>{});
      }
      out.compute_s -= fusor.report().merge_s - merged_s;
      KVBLEND_RETURN_IF_ERROR(computed);
      ++out.passes;
    }
    fusor.count_pass(range.size());
    range = {range.end, host.layers()};
  }
  return {};
}

}  // namespace detail

// Blends `prompt` into the host's cache; afterwards rows [0, prompt.rows()) are committed, and the host holds the
// logits of `outputs` (rows ascending). All else is as with a LayerwiseHost (blend.hpp). Also errors: a budget that
// narrows, on a host that cannot run ranges of layers; options.groups below 1; a probe that reports another number of
// rows. A budget that narrows chooses every group's rows by the scores of the first choice, as nothing newer is known.
template <PassHost Host, KvSource Source, class Selector, class Backend, AngleRule Angles, class Drift>
requires(!LayerwiseHost<Host>) Status
    blend(Host& host, Source& source, LayerwiseFusor<Selector, Backend, Angles, Drift>& fusor, const Prompt& prompt,
          std::span<const Row> outputs, std::span<std::byte> memory, PassReport* report = nullptr,
          const PassOptions& options = {}) {
  static_assert(Selector::timing != ScoreTiming::after_probe || ProbingPassHost<Host>,
                "kvblend: this selector scores by a probe pass, which a PassHost does not offer without probe()");
  static_assert(Selector::timing != ScoreTiming::during_pass || ScoringPassHost<Host>,
                "kvblend: this selector looks at fresh keys and values, so the host must have score()");
  static_assert(!Drift::moves || SettlingPassHost<Host>,
                "kvblend: reused rows drift by what a layer computes, which a PassHost does not show without settle");
  PassReport unused;
  PassReport& out = report != nullptr ? *report : unused;
  out = {};
  if (options.groups < 1) return Status::error(StatusCode::invalid_argument, "is %d", options.groups).at("groups");
  Status status;
  {
    Stopwatch watch(out.total_s);
    KVBLEND_RETURN_IF_ERROR(fusor.begin(prompt, {host.layers(), detail::largest_head_dim(host)}, outputs, memory));
    KVBLEND_RETURN_IF_ERROR(host.begin(prompt));
    if (!prompt.empty()) {
      status = detail::run_passes(host, source, fusor, fusor.selector(), prompt, outputs, options, out);
    }
    if (status.ok()) status = host.commit(prompt.rows());
    if (!status.ok()) host.abort();
  }
  out.fusor = fusor.report();
  return status;
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
