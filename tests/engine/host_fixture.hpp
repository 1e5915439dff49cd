// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The hosts of examples/rag in tests.
#pragma once

#include <rag/eigen_host.hpp>
#include <rag/llama_host.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine_fixture.hpp"

namespace engine_fixture {

inline std::unique_ptr<rag::Host> opened(kvblend::Result<std::unique_ptr<rag::Host>> host) {
  require_ok(host.status);
  return std::move(host.value);
}

inline double relative_error(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  double off = 0;
  double norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    off += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  return std::sqrt(off / norm);
}

inline rag::LlamaOptions llama(bool flash_attention) {
  rag::LlamaOptions options;
  options.threads = 1;
  options.flash_attention = flash_attention;
  return options;
}

}  // namespace engine_fixture
