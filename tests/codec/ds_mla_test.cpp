// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The latents of vLLM's fp8_ds_mla: bytes where vLLM has them, errors no larger than 8-bit floats make, edges.
#include <kvblend/codec/ds_mla.hpp>

#include <doctest/doctest.h>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

using namespace kvblend;

namespace {

float scale_of(const std::vector<std::byte>& bytes, std::size_t group) {
  float scale;
  std::memcpy(&scale, bytes.data() + 512 + 4 * group, sizeof scale);
  return scale;
}

}  // namespace

TEST_CASE("fp8_ds_mla latents are 512 bytes and a scale for each 128 of them") {
  const unsigned seed = 81;
  CAPTURE(seed);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(1024), back(1024);
  std::vector<std::byte> bytes(1 + 2 * 528);  // at an odd address
  for (int round = 0; round < 200; ++round) {
    CAPTURE(round);
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = std::ldexp(normal(random), static_cast<int>(i / 128) - 4);
    DsMlaLatentCodec::encode(values.data(), bytes.data() + 1, 1024);
    DsMlaLatentCodec::decode(bytes.data() + 1, back.data(), 1024);
    bool right = true;
    for (std::size_t group = 0; group < 8; ++group) {
      double largest = 0;
      for (std::size_t i = 0; i < 128; ++i) largest = std::fmax(largest, std::fabs(values[group * 128 + i]));
      float scale;
      std::memcpy(&scale, bytes.data() + 1 + group / 4 * 528 + 512 + group % 4 * 4, sizeof scale);
      right = right && scale == static_cast<float>(largest) / 448.0f;
      for (std::size_t i = group * 128; i < group * 128 + 128; ++i) {
        const double error = std::fabs(static_cast<double>(back[i]) - static_cast<double>(values[i]));
        // Half of the last of 4 bits, or of the least subnormal, 2^-9, in units of the scale.
        right = right && error <= std::fmax(std::fabs(values[i]) / 16.0, 0x1p-10 * largest / 448) * 1.0001;
      }
    }
    CHECK(right);
  }
}

TEST_CASE("fp8_ds_mla latents that are zero, tiny, infinite or no number") {
  std::vector<float> values(512, 0.0f), back(512);
  std::vector<std::byte> bytes(528);
  values[128] = FLT_MIN;
  values[256] = -std::numeric_limits<float>::infinity();
  values[257] = 1;
  values[384] = std::numeric_limits<float>::quiet_NaN();
  values[385] = 448;
  DsMlaLatentCodec::encode(values.data(), bytes.data(), 512);
  DsMlaLatentCodec::decode(bytes.data(), back.data(), 512);
  CHECK(scale_of(bytes, 0) == FLT_MIN);
  CHECK(scale_of(bytes, 1) == FLT_MIN);
  CHECK(scale_of(bytes, 2) == FLT_MAX / 448);
  CHECK(scale_of(bytes, 3) == 1);
  for (std::size_t i = 0; i < 128; ++i) CHECK(back[i] == 0);
  CHECK(back[128] == FLT_MIN);
  CHECK(back[256] < -FLT_MAX / 2);
  CHECK(back[257] == 0);
  CHECK(std::isnan(back[384]));
  CHECK(back[385] == 448);
}
