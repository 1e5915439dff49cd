// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Hosts of whole passes, for cases that each get one thing wrong. Nothing here is ever run.
#pragma once

#include <kvblend/fuse/pass_blend.hpp>

#include "host.hpp"

// All but compute and score.
struct PassHostBase {
  kvblend::RopeSpec spec;

  std::int32_t layers() { return 1; }
  const kvblend::RopeSpec& rope(std::int32_t) { return spec; }
  kvblend::Status begin(const kvblend::Prompt&) { return {}; }
  Plane keys(std::int32_t) { return {}; }
  Plane values(std::int32_t) { return {}; }
  kvblend::Status load() { return {}; }
  bool runs_ranges() const { return true; }
  kvblend::Status commit(std::int32_t) { return {}; }
  void abort() {}
};

struct PlainPassHost : PassHostBase {
  kvblend::Status compute(kvblend::LayerRange, Rows, Rows) { return {}; }
};

struct SettlingPassHost : PlainPassHost {
  using PlainPassHost::compute;
  template <class Settle>
  kvblend::Status compute(kvblend::LayerRange, Rows rows, Rows, const Settle& settle) {
    return settle(0, kvblend::Row(0), kvblend::Row(0), rows, Plane(), Plane());
  }
};

struct AskedPassHost : PlainPassHost {
  kvblend::Status probe(Rows, std::int32_t) { return {}; }
  std::span<const float> attention_mass(std::int32_t) { return {}; }
};

struct CompletePassHost : PlainPassHost {
  kvblend::Status score(std::int32_t, Rows) { return {}; }
  Plane fresh_keys(std::int32_t) { return {}; }
  Plane fresh_values(std::int32_t) { return {}; }
};
