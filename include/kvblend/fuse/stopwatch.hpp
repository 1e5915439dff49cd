// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Stopwatch: adds the seconds between its construction and its end to a counter of the report.
#pragma once

#include <kvblend/core/config.hpp>

#include <chrono>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds), start_(std::chrono::steady_clock::now()) {}
  ~Stopwatch() { seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& seconds_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
