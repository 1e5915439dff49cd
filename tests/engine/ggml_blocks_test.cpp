// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// kvblend's block codecs and Hadamard turn against ggml's own code, bit by bit.
#include <doctest/doctest.h>
#include <ggml-cpu.h>
#include <ggml.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <kvblend/codec/floats.hpp>
#include <kvblend/codec/ggml_blocks.hpp>
#include <kvblend/codec/hadamard.hpp>
#include <random>
#include <type_traits>
#include <vector>

#include "codec/block_oracle.hpp"

using namespace kvblend;

namespace {

constexpr unsigned kRounds = 50000;
constexpr unsigned kBlocks = 4;  // a round

template <class Codec>
constexpr ggml_type ggml_type_of() {
  return std::is_same_v<Codec, Q8_0Codec> ? GGML_TYPE_Q8_0 : GGML_TYPE_Q4_0;
}

// Blocks of several kinds side by side.
std::vector<float> values_of(unsigned round) {
  std::vector<float> values(32 * kBlocks);
  for (unsigned block = 0; block < kBlocks; ++block) {
    block_oracle::fill(round * kBlocks + block, values.data() + 32 * block);
  }
  return values;
}

template <class Codec>
std::vector<std::byte> encoded(const std::vector<float>& values) {
  const auto count = static_cast<std::int64_t>(values.size());
  std::vector<std::byte> bytes(static_cast<std::size_t>(bytes_of<Codec>(count)));
  Codec::encode(values.data(), bytes.data(), count);
  return bytes;
}

}  // namespace

TEST_CASE_TEMPLATE("blocks have the bits of ggml's reference quantiser", Codec, Q8_0Codec, Q4_0Codec) {
  const ggml_type type = ggml_type_of<Codec>();
  CHECK(ggml_blck_size(type) == Codec::block_values);
  CHECK(ggml_type_size(type) == Codec::block_bytes);
  for (unsigned round = 0; round < kRounds; ++round) {
    CAPTURE(round);
    const std::vector<float> values = values_of(round);
    const auto count = static_cast<std::int64_t>(values.size());
    const std::vector<std::byte> ours = encoded<Codec>(values);
    std::vector<std::byte> theirs(ours.size());
    ggml_get_type_traits(type)->from_float_ref(values.data(), theirs.data(), count);
    REQUIRE(ours == theirs);
    ggml_quantize_chunk(type, values.data(), theirs.data(), 0, 1, count, nullptr);
    REQUIRE(ours == theirs);
    std::vector<float> our_values(values.size());
    std::vector<float> their_values(values.size());
    Codec::decode(ours.data(), our_values.data(), count);
    ggml_get_type_traits(type)->to_float(ours.data(), their_values.data(), count);
    for (std::size_t i = 0; i < values.size(); ++i) {
      // 0 times an infinite scale is a NaN, the sign of which is no one's.
      if (std::isnan(our_values[i]) && std::isnan(their_values[i])) continue;
      REQUIRE(std::memcmp(&our_values[i], &their_values[i], sizeof(float)) == 0);
    }
  }
}

TEST_CASE("what ggml's CPU code writes to a q4_0 cache is bit-equal") {
  const auto from_float = ggml_get_type_traits_cpu(GGML_TYPE_Q4_0)->from_float;
  for (unsigned round = 0; round < kRounds; ++round) {
    const std::vector<float> values = values_of(round);
    std::vector<std::byte> theirs(static_cast<std::size_t>(bytes_of<Q4_0Codec>(32 * kBlocks)));
    from_float(values.data(), theirs.data(), 32 * kBlocks);
    REQUIRE(encoded<Q4_0Codec>(values) == theirs);
  }
}

// Vector code of some CPUs rounds halves to even, or multiplies by 127 / max in place of 1 / scale.
TEST_CASE("what ggml's CPU code writes to a q8_0 cache has the same scale, and numbers that differ at halves only") {
  const auto from_float = ggml_get_type_traits_cpu(GGML_TYPE_Q8_0)->from_float;
  const unsigned seed = 91;
  CAPTURE(seed);
  std::mt19937 random(seed);
  long differing = 0;
  for (unsigned round = 0; round < kRounds; ++round) {
    std::vector<float> values(32);
    for (float& value : values) value = static_cast<float>(random()) / 2147483648.0f - 1.0f;
    std::vector<std::byte> theirs(34);
    from_float(values.data(), theirs.data(), 32);
    const std::vector<std::byte> ours = encoded<Q8_0Codec>(values);
    REQUIRE(std::memcmp(ours.data(), theirs.data(), 2) == 0);
    for (std::size_t i = 2; i < 34; ++i) {
      const int step = static_cast<std::int8_t>(ours[i]) - static_cast<std::int8_t>(theirs[i]);
      REQUIRE(std::abs(step) <= 1);
      differing += step != 0 ? 1 : 0;
    }
  }
  MESSAGE(differing, " of ", 32 * kRounds, " q8_0 numbers differ from this CPU's code");
  CHECK(differing < kRounds / 1000);
}

namespace {

template <std::int32_t N>
void check_turn() {
  CAPTURE(N);
  constexpr std::int64_t kRows = 64;
  std::mt19937 random(92 + N);
  ggml_init_params params{};
  params.mem_size = std::size_t{16} << 20;
  ggml_context* context = ggml_init(params);
  REQUIRE(context != nullptr);
  ggml_tensor* matrix = ggml_new_tensor_2d(context, GGML_TYPE_F32, N, N);
  ggml_tensor* rows = ggml_new_tensor_2d(context, GGML_TYPE_F32, N, kRows);
  auto* element = static_cast<float*>(matrix->data);
  for (std::int32_t i = 0; i < N * N; ++i) {
    element[i] = (__builtin_popcount(static_cast<unsigned>((i / N) & (i % N))) % 2 != 0 ? -1.0f : 1.0f) /
                 std::sqrt(static_cast<float>(N));
  }
  std::vector<float> values(N * kRows);
  for (float& value : values) value = static_cast<float>(random()) / 2147483648.0f - 1.0f;
  std::memcpy(rows->data, values.data(), values.size() * sizeof(float));
  ggml_tensor* turned = ggml_mul_mat(context, matrix, rows);
  ggml_mul_mat_set_hint(turned, GGML_HINT_SRC0_IS_HADAMARD);  // as llama.cpp does
  ggml_cgraph* graph = ggml_new_graph(context);
  ggml_build_forward_expand(graph, turned);
  REQUIRE(ggml_graph_compute_with_ctx(context, graph, 1) == GGML_STATUS_SUCCESS);
  std::vector<std::byte> ours(values.size() * sizeof(float));
  HadamardCodec<F32Codec, N>::encode(values.data(), ours.data(), N * kRows);
  CHECK(std::memcmp(ours.data(), turned->data, ours.size()) == 0);
  ggml_free(context);
}

}  // namespace

TEST_CASE("the Hadamard turn has the bits of ggml's") {
  check_turn<64>();
  check_turn<128>();
  check_turn<256>();
}
