// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// ggml's blocks of 32 values as their description says, one plain step after the other, and values to try them on. For
// tests. Each single-precision result is volatile: nothing is fused or folded, whatever this is compiled with.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include "float_oracle.hpp"

namespace block_oracle {

inline float magnitude(float value) { return float_oracle::float_of(float_oracle::bits_of(value) & 0x7fffffffu); }

inline void put_scale(float scale, std::byte* block) {
  const int sign = static_cast<int>(float_oracle::bits_of(scale) >> 31);  // also that of -0 under fast math
  const auto word =
      static_cast<std::uint16_t>(float_oracle::kFloat16.nearest(static_cast<double>(magnitude(scale))) | sign << 15);
  std::memcpy(block, &word, 2);
}

// The first of the finite values whose magnitude is the largest.
inline float extreme(const float* values) {
  float found = 0;
  for (int i = 0; i < 32; ++i) {
    if (magnitude(values[i]) > magnitude(found)) found = values[i];
  }
  return found;
}

// 1 / scale in single precision, 0 for 0.
inline float inverse(float scale) {
  const volatile float one = 1;
  const volatile float divisor = scale;
  if (magnitude(scale) == 0) return 0;
  const volatile float result = one / divisor;
  return result;
}

inline float product(float a, float b) {
  const volatile float result = a * b;
  return result;
}

inline void q8_0(const float* values, std::byte* block) {
  const volatile float parts = 127;
  const volatile float scale = magnitude(extreme(values)) / parts;
  put_scale(scale, block);
  const float factor = inverse(scale);
  for (int i = 0; i < 32; ++i) {
    const float quotient = product(values[i], factor);
    const auto exact = static_cast<double>(magnitude(quotient));
    int number = static_cast<int>(exact);
    if (exact - number >= 0.5) ++number;
    block[2 + i] = static_cast<std::byte>(std::signbit(quotient) ? -number : number);
  }
}

inline void q4_0(const float* values, std::byte* block) {
  const volatile float parts = -8;
  const volatile float scale = extreme(values) / parts;
  put_scale(scale, block);
  const float factor = inverse(scale);
  int numbers[32];
  for (int i = 0; i < 32; ++i) {
    const volatile float raised = product(values[i], factor) + 8.5f;
    const int number = static_cast<int>(raised);
    numbers[i] = number > 15 ? 15 : number;
  }
  for (int i = 0; i < 16; ++i) block[2 + i] = static_cast<std::byte>(numbers[i] + 16 * numbers[i + 16]);
}

// 32 finite values of the kind that `round` picks, the same for the same round.
inline void fill(unsigned round, float* values) {
  std::mt19937 random(round);
  const auto unit = [&random] { return static_cast<float>(random()) / 2147483648.0f - 1.0f; };
  for (int i = 0; i < 32; ++i) {
    const int whole = static_cast<int>(random() % 255u) - 127;
    switch (round % 8) {
      case 0: values[i] = unit(); break;
      case 1: values[i] = random() % 2 != 0 ? 0.0f : -0.0f; break;
      case 2: values[i] = static_cast<float>(static_cast<int>(random() % 17) - 8) * 0.5f; break;  // equal extremes
      case 3: values[i] = unit() * 1e-6f; break;                                                  // subnormal scales
      case 4: values[i] = unit() * 1e7f; break;                                                   // infinite scales
      case 5: values[i] = std::ldexp(unit(), static_cast<int>(random() % 60) - 40); break;
      case 6: values[i] = i == 0 ? 127.0f : static_cast<float>(whole) * 0.5f; break;    // halves in q8_0
      default: values[i] = i == 31 ? -8.0f : static_cast<float>(whole) / 16.0f; break;  // halves in q4_0
    }
  }
}

}  // namespace block_oracle
