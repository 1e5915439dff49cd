// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A host and a source that satisfy their concepts, for cases that each get one thing wrong. Nothing here is ever run.
#pragma once

#include <kvblend/codec/floats.hpp>
#include <kvblend/fuse/blend.hpp>
#include <kvblend/memory/layouts.hpp>
#include <kvblend/select/budgets.hpp>
#include <kvblend/select/scores.hpp>

using Plane = kvblend::ContiguousPlane<kvblend::F32Codec>;
using Rows = std::span<const kvblend::Row>;
using Kept = std::span<const kvblend::ActiveIndex>;

// All but project and attend.
struct HostBase {
  kvblend::RopeSpec spec;

  std::int32_t layers() { return 1; }
  const kvblend::RopeSpec& rope(std::int32_t) { return spec; }
  kvblend::Status begin(const kvblend::Prompt&) { return {}; }
  kvblend::Status embed(Rows) { return {}; }
  Plane fresh_keys() { return {}; }
  Plane fresh_values() { return {}; }
  Plane keys(std::int32_t) { return {}; }
  Plane values(std::int32_t) { return {}; }
  kvblend::Status commit(std::int32_t) { return {}; }
  void abort() {}
};

struct CompleteHost : HostBase {
  kvblend::Status project(std::int32_t, Rows) { return {}; }
  kvblend::Status attend(std::int32_t, Rows, Kept) { return {}; }
};

struct CompleteSource {
  kvblend::RopeSpec spec;

  kvblend::Status wait(std::int32_t) { return {}; }
  Plane keys(std::int32_t, std::int32_t) { return {}; }
  Plane values(std::int32_t, std::int32_t) { return {}; }
  void release(std::int32_t) {}
  const kvblend::RopeSpec& rope(std::int32_t, std::int32_t) { return spec; }
};

template <class Drift = kvblend::NoDrift, class Host, class Score>
int blend_on(Host host, Score score) {
  CompleteSource source;
  using Selector = kvblend::DeviationSelector<Score, kvblend::RatioBudget>;
  kvblend::LayerwiseFusor<Selector, kvblend::PortableBackend, kvblend::ExactAngles, Drift> fusor{Selector(score)};
  return kvblend::blend(host, source, fusor, kvblend::Prompt(), {}, {}).ok() ? 0 : 1;
}
