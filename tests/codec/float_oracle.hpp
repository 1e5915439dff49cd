// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What 16-bit and 8-bit floats mean, written from their definition: sign, exponent, fraction, in double arithmetic. For
// tests.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace float_oracle {

inline std::uint32_t bits_of(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float float_of(std::uint32_t bits) {
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// A format of 1 sign bit, `exponent_bits` and `fraction_bits`, 16 together.
struct Format {
  int exponent_bits;
  int fraction_bits;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  int largest_exponent() const { return (1 << exponent_bits) - 1; }  // all ones: infinity or NaN

  bool is_nan(std::uint16_t word) const { return exponent(word) == largest_exponent() && fraction(word) != 0; }
  int exponent(std::uint16_t word) const { return (word >> fraction_bits) & largest_exponent(); }
  int fraction(std::uint16_t word) const { return word & ((1 << fraction_bits) - 1); }

  // Value of a finite word.
  double value(std::uint16_t word) const {
    const int e = exponent(word);
    const double magnitude = e == 0 ? std::ldexp(fraction(word), 1 - bias() - fraction_bits)
                                    : std::ldexp((1 << fraction_bits) + fraction(word), e - bias() - fraction_bits);
    return (word >> 15) != 0 ? -magnitude : magnitude;
  }

  // The word nearest to a finite value, ties to the even fraction: by bisection over the words of its sign, which
  // ascend with their magnitude.
  std::uint16_t nearest(double wanted) const {
    const double magnitude = std::abs(wanted);
    const int infinity = largest_exponent() << fraction_bits;
    int low = 0;
    int high = infinity;  // stands for the next value beyond the largest, as rounding has it
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (value(static_cast<std::uint16_t>(middle)) <= magnitude ? low : high) = middle;
    }
    const double below = value(static_cast<std::uint16_t>(low));
    const double above =
        high == infinity ? std::ldexp(1.0, largest_exponent() - bias()) : value(static_cast<std::uint16_t>(high));
    const double middle = (below + above) / 2;
    const bool up = magnitude > middle || (magnitude == middle && low % 2 != 0);
    return static_cast<std::uint16_t>((up ? high : low) | (std::signbit(wanted) ? 0x8000 : 0));
  }
};

inline constexpr Format kFloat16{5, 10};
inline constexpr Format kBFloat16{8, 7};

// A format of 8 bits together, the numbers of which end at `largest`; the words behind it are no numbers.
struct SmallFormat {
  int exponent_bits;
  int fraction_bits;
  int largest;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  bool is_number(int word) const { return (word & 0x7f) <= largest; }

  double value(int word) const {
    const int e = (word & 0x7f) >> fraction_bits;
    const int fraction = word & ((1 << fraction_bits) - 1);
    const double magnitude = e == 0 ? std::ldexp(fraction, 1 - bias() - fraction_bits)
                                    : std::ldexp((1 << fraction_bits) + fraction, e - bias() - fraction_bits);
    return word >= 0x80 ? -magnitude : magnitude;
  }

  // The number nearest to a value that is no NaN, ties to the even word; the largest for all beyond. All are tried.
  std::uint8_t nearest(double wanted) const {
    const double magnitude = std::abs(wanted);
    int best = 0;
    for (int word = 1; word <= largest && !std::isinf(magnitude); ++word) {
      const double step = std::abs(value(word) - magnitude) - std::abs(value(best) - magnitude);
      if (step < 0 || (step == 0 && word % 2 == 0)) best = word;
    }
    if (magnitude > value(largest)) best = largest;
    return static_cast<std::uint8_t>(best | (std::signbit(wanted) ? 0x80 : 0));
  }
};

inline constexpr SmallFormat kFloat8E4M3{4, 3, 0x7e};
inline constexpr SmallFormat kFloat8E5M2{5, 2, 0x7b};

}  // namespace float_oracle
