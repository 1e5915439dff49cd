// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Arithmetic with one meaning on host and device: the standard library's functions cannot be called by the latter, and
// what a compiler may fuse or reorder under its flags would round differently from one to the other.
#pragma once

#include <kvblend/core/config.hpp>

#include <cstdint>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

namespace detail {

// Of numbers or of lanes of them.
template <class Int>
[[nodiscard]] KVBLEND_HOST_DEVICE constexpr Int smaller(const Int& a, const Int& b) {
  return a < b ? a : b;
}
template <class Int>
[[nodiscard]] KVBLEND_HOST_DEVICE constexpr Int larger(const Int& a, const Int& b) {
  return a < b ? b : a;
}

// The same number, of which the host's compiler knows nothing: what it came from is not fused with or folded into what
// is done to it, whatever the flags allow. Not even that it is the same each time (volatile): a divisor that is would
// have its reciprocal taken once for all.
[[nodiscard]] inline float as_computed(float value) {
#if defined(__x86_64__)
  __asm__ volatile("" : "+x"(value));
  return value;
#else
  auto bits = __builtin_bit_cast(std::uint32_t, value);
  __asm__ volatile("" : "+r"(bits));
  return __builtin_bit_cast(float, bits);
#endif
}
[[nodiscard]] inline double as_computed(double value) {
#if defined(__x86_64__)
  __asm__ volatile("" : "+x"(value));
  return value;
#elif defined(__aarch64__)
  __asm__ volatile("" : "+w"(value));
  return value;
#else
  volatile double kept = value;
  return kept;
#endif
}

// One operation, rounded to nearest, whatever comes before or after it.
[[nodiscard]] KVBLEND_HOST_DEVICE inline double rounded_sum(double a, double b) {
#if KVBLEND_ON_DEVICE
  return __dadd_rn(a, b);
#else
  return as_computed(a + b);
#endif
}
[[nodiscard]] KVBLEND_HOST_DEVICE inline double rounded_product(double a, double b) {
#if KVBLEND_ON_DEVICE
  return __dmul_rn(a, b);
#else
  return as_computed(a * b);
#endif
}
[[nodiscard]] KVBLEND_HOST_DEVICE inline float rounded_sum(float a, float b) {
#if KVBLEND_ON_DEVICE
  return __fadd_rn(a, b);
#else
  return as_computed(a + b);
#endif
}
[[nodiscard]] KVBLEND_HOST_DEVICE inline float rounded_product(float a, float b) {
#if KVBLEND_ON_DEVICE
  return __fmul_rn(a, b);
#else
  return as_computed(a * b);
#endif
}
[[nodiscard]] KVBLEND_HOST_DEVICE inline float rounded_quotient(float a, float b) {
#if KVBLEND_ON_DEVICE
  return __fdiv_rn(a, b);
#else
  return as_computed(a / as_computed(b));
#endif
}

}  // namespace detail

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
