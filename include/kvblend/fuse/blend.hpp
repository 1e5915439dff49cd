// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// blend: runs a LayerwiseFusor, or the CUDA back end's, over a LayerwiseHost from the first layer to the last. One call
// for engines that hand their layer loop over.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/fuse/fusor.hpp>
#include <kvblend/fuse/host.hpp>
#include <kvblend/fuse/stopwatch.hpp>
#include <kvblend/prompt/prompt.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// The steps that LayerwiseFusor documents, whatever memory they work on. Memory is what begin() takes.
template <class F>
concept StepFusor = requires(F& fusor, const Prompt& prompt, std::span<const Row> outputs,
                             const typename F::Memory& memory) {
  { F::timing } -> std::convertible_to<ScoreTiming>;
  { fusor.begin(prompt, BlendShape{}, outputs, memory) } -> std::same_as<Status>;
  { fusor.active() } -> std::same_as<std::span<const Row>>;
  { fusor.kept() } -> std::same_as<std::span<const ActiveIndex>>;
  { fusor.probing() } -> std::same_as<bool>;
  { fusor.report() } -> std::same_as<const FusorReport&>;
  fusor.narrow();
};

struct BlendReport {
  FusorReport fusor;
  double host_s = 0;   // embedding, projection, attention: the host's compute
  double total_s = 0;  // the whole call
};

namespace detail {

template <class Host>
std::int32_t largest_head_dim(Host& host) {
  std::int32_t largest = 0;
  for (std::int32_t layer = 0; layer < host.layers(); ++layer) {
    if (host.rope(layer).head_dim > largest) largest = host.rope(layer).head_dim;
  }
  return largest;
}

template <class Host, class Source, class Fusor>
Status run_layers(Host& host, Source& source, Fusor& fusor, bool place, double& host_s) {
  {
    Stopwatch watch(host_s);
    KVBLEND_RETURN_IF_ERROR(host.embed(fusor.active()));
  }
  for (std::int32_t layer = 0; layer < host.layers(); ++layer) {
    {
      Stopwatch watch(host_s);
      KVBLEND_RETURN_IF_ERROR(host.project(layer, fusor.active()));
    }
    // Waiting for the layer only now lets its loading go on while the host projects.
    if (place) {
      KVBLEND_RETURN_IF_ERROR(fusor.place(layer, host.rope(layer), source, host.keys(layer), host.values(layer)));
    }
    KVBLEND_RETURN_IF_ERROR(
        fusor.fuse(layer, host.fresh_keys(), host.fresh_values(), host.keys(layer), host.values(layer)));
    {
      Stopwatch watch(host_s);
      if (fusor.probing()) {
        if constexpr (AttentionReportingHost<Host> && requires { fusor.attention_mass(); }) {
          KVBLEND_RETURN_IF_ERROR(host.attend_and_report(layer, fusor.active(), fusor.kept(), fusor.first_probe_row(),
                                                         fusor.attention_mass()));
        }
      } else {
        KVBLEND_RETURN_IF_ERROR(host.attend(layer, fusor.active(), fusor.kept()));
      }
    }
    fusor.narrow();
  }
  return {};
}

template <class Host, class Source, class Fusor>
Status run_passes(Host& host, Source& source, Fusor& fusor, double& host_s) {
  const bool probed = fusor.probing();
  if (probed) {
    KVBLEND_RETURN_IF_ERROR(run_layers(host, source, fusor, true, host_s));
    if constexpr (requires { fusor.choose_after_probe(); }) KVBLEND_RETURN_IF_ERROR(fusor.choose_after_probe());
  }
  // After a probe pass the reused rows are in the cache already.
  return run_layers(host, source, fusor, !probed, host_s);
}

}  // namespace detail

// Blends `prompt` into the host's cache; afterwards rows [0, prompt.rows()) are committed, and the host holds the
// hidden states of `outputs` (rows ascending) behind the last layer, ready for its output head. `memory` is the
// workspace, Fusor::workspace_bytes(prompt, head_dim) bytes with the largest head_dim of the host's ropes, and with
// RopeTables::per_row if stored frequencies are others than the host's. On an error the host's cache is what it was
// before. An empty prompt commits nothing and is no error.
template <LayerwiseHost Host, KvSource Source, StepFusor Fusor>
Status blend(Host& host, Source& source, Fusor& fusor, const Prompt& prompt, std::span<const Row> outputs,
             const typename Fusor::Memory& memory, BlendReport* report = nullptr) {
  static_assert(Fusor::timing != ScoreTiming::after_probe || AttentionReportingHost<Host>,
                "kvblend: this selector scores by a probe pass, so the host must have attend_and_report()");
  BlendReport unused;
  BlendReport& out = report != nullptr ? *report : unused;
  out = {};
  Status status;
  {
    Stopwatch watch(out.total_s);
    KVBLEND_RETURN_IF_ERROR(fusor.begin(prompt, {host.layers(), detail::largest_head_dim(host)}, outputs, memory));
    KVBLEND_RETURN_IF_ERROR(host.begin(prompt));
    if (!prompt.empty()) status = detail::run_passes(host, source, fusor, out.host_s);
    if (status.ok()) status = host.commit(prompt.rows());
    if (!status.ok()) host.abort();
  }
  out.fusor = fusor.report();
  return status;
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
