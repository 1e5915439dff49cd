// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Executor: the caller's threads. Back ends start none of their own: the CPU ones hand their blocks to this policy.
#pragma once

#include <kvblend/core/config.hpp>

#include <concepts>
#include <cstdint>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

namespace detail {
struct ExecutorProbe {
  void operator()(std::int64_t) const {}
};
}  // namespace detail

// An executor is a copyable handle with
//   parallel_for(count, body)   calls body(i) once for each i in [0, count), in any order and on any thread; returns
//                               when all are done
// The bodies are independent and do not throw. Which thread runs which decides no bit of any result.
template <class E>
concept Executor = requires(const E& executor, std::int64_t count, const detail::ExecutorProbe& body) {
  { executor.parallel_for(count, body) } -> std::same_as<void>;
};

// One after the other, on the calling thread.
struct SerialExecutor {
  template <class Body>
  void parallel_for(std::int64_t count, const Body& body) const {
    for (std::int64_t i = 0; i < count; ++i) body(i);
  }
};

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
