// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows turned by a Walsh-Hadamard matrix, against the matrix itself.
#include <kvblend/codec/floats.hpp>
#include <kvblend/codec/ggml_blocks.hpp>
#include <kvblend/codec/hadamard.hpp>

#include <doctest/doctest.h>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

using namespace kvblend;

namespace {

std::vector<float> random_values(unsigned seed, std::size_t count) {
  std::mt19937 random(seed);
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(random()) / 2147483648.0f - 1.0f;
  return values;
}

// H x, by the matrix, in blocks of n.
std::vector<double> turned(const std::vector<float>& values, std::size_t n) {
  std::vector<double> result(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::size_t start = i / n * n;
    double sum = 0;
    for (std::size_t j = 0; j < n; ++j) {
      const double value = static_cast<double>(values[start + j]);
      sum += std::popcount((i - start) & j) % 2 != 0 ? -value : value;
    }
    result[i] = sum / std::sqrt(static_cast<double>(n));
  }
  return result;
}

template <std::int32_t N>
void check_against_matrix() {
  CAPTURE(N);
  using Codec = HadamardCodec<F32Codec, N>;
  constexpr std::size_t kCount = 2 * N;
  const std::vector<float> values = random_values(86 + N, kCount);
  std::vector<std::byte> bytes(kCount * 4);
  Codec::encode(values.data(), bytes.data(), kCount);
  std::vector<float> stored(kCount);
  F32Codec::decode(bytes.data(), stored.data(), kCount);
  const std::vector<double> expected = turned(values, N);
  for (std::size_t i = 0; i < kCount; ++i) CHECK(std::abs(static_cast<double>(stored[i]) - expected[i]) < 2e-6);
  std::vector<float> back(kCount);
  Codec::decode(bytes.data(), back.data(), kCount);
  for (std::size_t i = 0; i < kCount; ++i) CHECK(std::abs(back[i] - values[i]) < 2e-6f);
}

}  // namespace

TEST_CASE("the turn is that of the matrix, and its own inverse") {
  check_against_matrix<2>();
  check_against_matrix<4>();
  check_against_matrix<8>();
  check_against_matrix<64>();
  check_against_matrix<128>();
  check_against_matrix<256>();
  check_against_matrix<512>();
  check_against_matrix<1024>();
}

TEST_CASE("quantised rows are the inner codec's, of turned values") {
  using Codec = HadamardCodec<Q8_0Codec, 64>;
  static_assert(Codec::block_values == 64 && Codec::block_bytes == 68 && Codec::dtype == DType::q8_0);
  const std::vector<float> values = random_values(87, 192);
  std::vector<float> exact(192);
  const std::vector<double> expected = turned(values, 64);
  for (std::size_t i = 0; i < 192; ++i) exact[i] = static_cast<float>(expected[i]);
  std::vector<std::byte> bytes(static_cast<std::size_t>(bytes_of<Codec>(192)));
  Codec::encode(values.data(), bytes.data(), 192);
  std::vector<float> stored(192);
  Q8_0Codec::decode(bytes.data(), stored.data(), 192);
  std::vector<float> back(192);
  Codec::decode(bytes.data(), back.data(), 192);
  for (std::size_t i = 0; i < 192; ++i) {
    CHECK(std::abs(stored[i] - exact[i]) < 0.02f);
    CHECK(std::abs(back[i] - values[i]) < 0.05f);
  }
  Codec::decode(bytes.data(), back.data(), 0);
  Codec::encode(back.data(), bytes.data(), 0);
}

TEST_CASE("an outlier is spread over its block, which is what the turn is for") {
  std::vector<float> values = random_values(88, 64);
  values[13] = 100.0f;
  std::vector<std::byte> plain(static_cast<std::size_t>(bytes_of<Q4_0Codec>(64)));
  std::vector<std::byte> spread(plain.size());
  std::vector<float> back(64);
  const auto error = [&] {
    double sum = 0;
    for (std::size_t i = 0; i < 64; ++i) sum += std::abs(static_cast<double>(back[i] - values[i]));
    return sum;
  };
  Q4_0Codec::encode(values.data(), plain.data(), 64);
  Q4_0Codec::decode(plain.data(), back.data(), 64);
  const double without = error();
  HadamardCodec<Q4_0Codec, 64>::encode(values.data(), spread.data(), 64);
  Q4_0Codec::decode(spread.data(), back.data(), 64);
  CHECK(error() > 100.0);  // read without the turn it is nonsense
  HadamardCodec<Q4_0Codec, 64>::decode(spread.data(), back.data(), 64);
  CHECK(error() < 2 * without);
}

TEST_CASE("the block of keys is the largest 64 * 2^k that divides a head") {
  CHECK(hadamard_values(64) == 64);
  CHECK(hadamard_values(128) == 128);
  CHECK(hadamard_values(192) == 64);
  CHECK(hadamard_values(256) == 256);
  CHECK(hadamard_values(384) == 128);
  CHECK(hadamard_values(576) == 64);
  for (const std::int32_t head_dim : {0, -64, 32, 80, 96, 100}) CHECK(hadamard_values(head_dim) == 0);
}
