// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Scales of every kind around a codec: where they are found, what is stored under them, and that one which is missing
// is an error with its name.
#include <kvblend/codec/fp8.hpp>
#include <kvblend/codec/ggml_blocks.hpp>
#include <kvblend/codec/scaled.hpp>
#include <kvblend/codec/with_codec.hpp>

#include <doctest/doctest.h>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>
#include "float_oracle.hpp"

using namespace kvblend;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Scales in pages, as a cache's rows are: row -> slots[row], `heads` to a slot, the slots in order but `gap` apart.
struct PagedScales {
  const std::int64_t* slots = nullptr;
  std::int64_t rows = 0;
  std::int32_t head_count = 1;
  std::int64_t gap = 0;  // bytes

  std::int32_t heads() const { return head_count; }
  std::int32_t head_dim() const { return 1; }
  std::int32_t tiles() const { return 1; }
  std::int32_t tile_values() const { return 1; }
  bool contains(std::int64_t row) const { return row >= 0 && row < rows && slots[row] >= 0; }
  std::int64_t offset(std::int64_t row, std::int32_t head, std::int32_t) const {
    return slots[row] * (4 * head_count + gap) + 4 * head;
  }
};

using PerToken = Scaled<Fp8E4M3Codec, TokenScales<PagedScales>>;
using PerTokenReadOnly = Scaled<Fp8E4M3Codec, TokenScales<PagedScales, const std::byte>>;

static_assert(LocatedCodec<Scaled<Fp8E4M3Codec, TensorScale>> && !RunCodec<Scaled<Fp8E4M3Codec, TensorScale>>);
static_assert(!SelfScalingCodec<Scaled<Fp8E4M3Codec, TensorScale>>);
static_assert(!SelfScalingCodec<Scaled<Fp8E4M3Codec, HeadScales>>);
static_assert(SelfScalingCodec<PerToken> && LocatedCodec<PerTokenReadOnly> && !SelfScalingCodec<PerTokenReadOnly>);
static_assert(LaneCodec<ScaledRun<Fp8E5M2Codec>> && !LaneCodec<ScaledRun<Q8_0Codec>>);
static_assert(std::is_trivially_copyable_v<PerToken>);

template <class Codec>
std::vector<std::byte> encoded(const Codec& codec, const std::vector<float>& values) {
  std::vector<std::byte> bytes(values.size());
  codec.encode(values.data(), bytes.data(), static_cast<std::int64_t>(values.size()));
  return bytes;
}

template <class Codec>
std::vector<float> decoded(const Codec& codec, const std::vector<std::byte>& bytes) {
  std::vector<float> values(bytes.size());
  codec.decode(bytes.data(), values.data(), static_cast<std::int64_t>(bytes.size()));
  return values;
}

float scale_at(const std::vector<std::byte>& memory, std::size_t offset) {
  float value = 0;
  std::memcpy(&value, memory.data() + offset, 4);
  return value;
}

}  // namespace

TEST_CASE_TEMPLATE("a value is what is stored times the scale", Inner, Fp8E4M3Codec, Fp8E5M2Codec) {
  const auto& format = Inner::dtype == DType::f8_e4m3 ? float_oracle::kFloat8E4M3 : float_oracle::kFloat8E5M2;
  std::vector<std::byte> words;
  for (int word = 0; word < 256; ++word) words.push_back(static_cast<std::byte>(word));
  for (const float scale : {1.0f, 0.0371f, 12.5f, 1e-20f, 1e20f}) {
    CAPTURE(scale);
    const Scaled<Inner, TensorScale> codec(TensorScale{scale});
    const auto values = decoded(codec.at(3, 5), words);
    for (int word = 0; word < 256; ++word) {
      if (!format.is_number(word)) continue;
      const auto expected = static_cast<float>(format.value(word) * static_cast<double>(scale));
      CHECK(values[static_cast<std::size_t>(word)] == expected);
    }
    const auto back = encoded(codec.at(0, 0), values);
    for (int word = 0; word < 256; ++word) {
      if (format.is_number(word)) CHECK(back[static_cast<std::size_t>(word)] == words[static_cast<std::size_t>(word)]);
    }
  }
}

TEST_CASE("encoding divides by the scale, rounds to the nearest and saturates") {
  const unsigned seed = 89;
  CAPTURE(seed);
  std::mt19937 random(seed);
  for (const float scale : {1.0f, 0.0123f, 3.7f, 1e-30f}) {
    std::vector<float> values{kInfinity, -kInfinity, 3e38f, -3e38f, 0.0f, -0.0f};
    while (values.size() < 1001) {
      values.push_back((static_cast<float>(random()) / 2147483648.0f - 1.0f) * scale * 600.0f);
    }
    const auto words = encoded(Scaled<Fp8E4M3Codec, TensorScale>(TensorScale{scale}).at(0, 0), values);
    for (std::size_t i = 0; i < values.size(); ++i) {
      CAPTURE(values[i]);
      const float quotient = values[i] / scale;
      CHECK(static_cast<int>(words[i]) == float_oracle::kFloat8E4M3.nearest(static_cast<double>(quotient)));
    }
  }
}

TEST_CASE("each head has its scale") {
  const float scales[] = {1.0f, 2.0f, 0.5f};
  const Scaled<Fp8E5M2Codec, HeadScales> codec(HeadScales{scales, 3});
  CHECK(codec.check(3).ok());
  for (std::int32_t head = 0; head < 3; ++head) {
    CHECK(codec.at(7, head).scale == scales[head]);
    CHECK(static_cast<int>(encoded(codec.at(7, head), {4.0f})[0]) == to_float8_e5m2(4.0f / scales[head]).bits);
  }
}

TEST_CASE("each row, or row and head, has its scale, wherever its layout puts it") {
  const std::int64_t slots[] = {2, 0, -1, 1};
  for (const std::int32_t heads : {1, 3}) {
    CAPTURE(heads);
    const PagedScales layout{slots, 4, heads, 5};
    std::vector<std::byte> memory(3 * static_cast<std::size_t>(4 * heads + 5) + 1);
    const PerToken codec(TokenScales<PagedScales>(memory.data() + 1, layout));  // unaligned
    CHECK(codec.check(3).ok());
    CHECK(codec.scale_per_head() == (heads != 1));
    for (const std::int64_t row : {0, 1, 3}) {
      CHECK_FALSE(codec.scales.check_row(row).ok());
      for (std::int32_t head = 0; head < heads; ++head) {
        codec.put_scale(row, head, {static_cast<float>(10 * row + head + 1)});
      }
      CHECK(codec.scales.check_row(row).ok());
    }
    for (const std::int64_t row : {0, 1, 3}) {
      for (std::int32_t head = 0; head < 3; ++head) {
        const std::int32_t own = heads == 1 ? 0 : head;
        CHECK(codec.at(row, head).scale == static_cast<float>(10 * row + own + 1));
        const auto offset = static_cast<std::size_t>(1 + slots[row] * (4 * heads + 5) + 4 * own);
        CHECK(scale_at(memory, offset) == static_cast<float>(10 * row + own + 1));
      }
    }
    CHECK(codec.scales.check_row(2).code() == StatusCode::out_of_range);
    CHECK(std::string(codec.scales.check_row(9).where()) == "scales of row 9");
    codec.copy_scale(0, 0, codec, 3, 0);
    CHECK(codec.at(0, 0).scale == 31.0f);
    const PerTokenReadOnly same(TokenScales<PagedScales, const std::byte>(memory.data() + 1, layout));
    CHECK(same.at(3, 0).scale == 31.0f);
    codec.copy_scale(1, 0, same, 0, 0);
    CHECK(codec.at(1, 0).scale == 31.0f);
    CHECK(same.stores_like(codec));
    CHECK_FALSE(codec.stores_like(same));  // to where the scales cannot be written along
  }
}

TEST_CASE_TEMPLATE("a scale made from the largest magnitude takes it to the largest number", Inner, Fp8E4M3Codec,
                   Fp8E5M2Codec) {
  const Scaled<Inner, TokenScales<PagedScales>> codec{};
  for (const float amax : {1.0f, 0.3f, 448.0f, 7.77f, 1e-10f, 1e30f, 3e38f, -2.0f}) {
    CAPTURE(amax);
    const auto run = codec.fitted(amax);
    CHECK(run.scale == std::abs(amax) / Inner::largest);
    const auto back = decoded(run, encoded(run, {amax, -amax, amax / 3}));
    CHECK(std::abs(back[0] - amax) <= std::abs(amax) * 1e-6f);
    CHECK(back[1] == -back[0]);
    CHECK(std::abs(back[2] - amax / 3) <= std::abs(amax) / 3 * (Inner::dtype == DType::f8_e4m3 ? 0.0626f : 0.126f));
  }
}

TEST_CASE_TEMPLATE("zeros, tiny rows and rows with infinities or NaNs keep their finite values finite", Inner,
                   Fp8E4M3Codec, Fp8E5M2Codec) {
  const Scaled<Inner, TokenScales<PagedScales>> codec{};
  CHECK(codec.fitted(0.0f).scale == 1.0f);
  CHECK(codec.fitted(-0.0f).scale == 1.0f);
  for (const float amax : {0.0f, 1e-44f, 1e-38f, 1e-36f, kInfinity, -kInfinity, kNaN, 3.4e38f}) {
    CAPTURE(amax);
    const auto run = codec.fitted(amax);
    CHECK(is_scale(run.scale));
    for (const float back : decoded(run, encoded(run, {0.0f, 1.0f, -3e38f, 3.4e38f, 1e-44f})))
      CHECK(std::isfinite(back));
    const auto special = decoded(run, encoded(run, {kInfinity, -kInfinity, kNaN}));
    CHECK(std::isfinite(special[0]));
    CHECK(special[1] == -special[0]);
    CHECK(std::isnan(special[2]));
  }
}

TEST_CASE("a missing scale is an error that names it") {
  using Tensor = Scaled<Fp8E4M3Codec, TensorScale>;
  using Heads = Scaled<Fp8E4M3Codec, HeadScales>;
  CHECK(std::string(Tensor().check(2).where()) == "scale");
  for (const float scale : {0.0f, -0.0f, -1.0f, kInfinity, kNaN, 1e-40f}) {
    CAPTURE(scale);
    CHECK(Tensor(TensorScale{scale}).check(2).code() == StatusCode::invalid_argument);
    const float scales[] = {1.0f, 2.0f, scale};
    CHECK(Heads(HeadScales{scales, 2}).check(2).ok());
    CHECK(std::string(Heads(HeadScales{scales, 3}).check(3).where()) == "scales[2]");
    const std::int64_t slots[] = {0};
    std::vector<std::byte> memory(12);
    std::memcpy(memory.data(), scales, 12);
    const PerToken codec(TokenScales<PagedScales>(memory.data(), PagedScales{slots, 1, 3, 0}));
    CHECK(std::string(codec.scales.check_row(0).where()) == "scale of row 0, head 2");
  }
  const float two[] = {1.0f, 2.0f};
  CHECK(std::string(Heads().check(2).where()) == "scales");
  CHECK(Heads(HeadScales{two, 2}).check(3).code() == StatusCode::mismatch);
  CHECK(Heads(HeadScales{two, 2}).check(1).code() == StatusCode::mismatch);
  CHECK(std::string(PerToken().check(2).where()) == "scales");
  CHECK_FALSE(PerToken().scales.check_row(0).ok());
  const std::int64_t slots[] = {0};
  std::vector<std::byte> memory(16);
  const PagedScales four{slots, 1, 4, 0};
  CHECK(PerToken(TokenScales<PagedScales>(memory.data(), four)).check(2).code() == StatusCode::mismatch);
  CHECK(PerToken(TokenScales<PagedScales>(memory.data(), four)).check(4).ok());
}

TEST_CASE("bytes may be copied where the scales are the same") {
  using Tensor = Scaled<Fp8E4M3Codec, TensorScale>;
  CHECK(Tensor(TensorScale{2.0f}).stores_like(Tensor(TensorScale{2.0f})));
  CHECK_FALSE(Tensor(TensorScale{2.0f}).stores_like(Tensor(TensorScale{2.5f})));
  using Heads = Scaled<Fp8E4M3Codec, HeadScales>;
  const float a[] = {1.0f, 2.0f};
  const float b[] = {1.0f, 2.0f, 3.0f};
  const float c[] = {1.0f, 2.5f};
  CHECK(Heads(HeadScales{a, 2}).stores_like(Heads(HeadScales{b, 2})));
  CHECK_FALSE(Heads(HeadScales{a, 2}).stores_like(Heads(HeadScales{b, 3})));
  CHECK_FALSE(Heads(HeadScales{a, 2}).stores_like(Heads(HeadScales{c, 2})));
  CHECK(stores_alike(Heads(HeadScales{a, 2}), Heads(HeadScales{b, 2})));
  // A row's own scale goes along with it, unless one side has more of them.
  const PerToken row(TokenScales<PagedScales>(nullptr, PagedScales{nullptr, 0, 1, 0}));
  const PerToken heads(TokenScales<PagedScales>(nullptr, PagedScales{nullptr, 0, 4, 0}));
  CHECK(row.stores_like(row));
  CHECK_FALSE(row.stores_like(heads));
}

TEST_CASE_TEMPLATE("lanes and runs of any length and address have the same bits", Inner, Fp8E4M3Codec, Fp8E5M2Codec) {
  const ScaledRun<Inner> codec{0.37f};
  const unsigned seed = 90;
  CAPTURE(seed);
  std::mt19937 random(seed);
  std::vector<float> values(100);
  for (float& value : values) value = static_cast<float>(random()) / 1e7f - 200.0f;
  const auto words = encoded(codec, values);
  const auto back = decoded(codec, words);
  for (std::size_t at = 0; at + kLanes <= values.size(); at += 3) {
    FloatLanes lanes;
    std::byte stored[kLanes];
    std::memcpy(&lanes, values.data() + at, sizeof lanes);
    codec.store(lanes, stored);
    CHECK(std::memcmp(stored, words.data() + at, kLanes) == 0);
    codec.load(words.data() + at, lanes);
    CHECK(std::memcmp(&lanes, back.data() + at, sizeof lanes) == 0);
  }
  for (std::size_t at = 0; at < 5; ++at) {
    for (std::size_t count = 0; count < 90; ++count) {
      std::vector<std::byte> part(count + 4, std::byte{0xaa});
      codec.encode(values.data() + at, part.data() + 1, static_cast<std::int64_t>(count));
      CHECK(std::memcmp(part.data() + 1, words.data() + at, count) == 0);
      CHECK((part[0] == std::byte{0xaa} && part[count + 1] == std::byte{0xaa}));
      std::vector<float> floats(count + 1, -1.0f);
      codec.decode(words.data() + at, floats.data(), static_cast<std::int64_t>(count));
      CHECK(std::memcmp(floats.data(), back.data() + at, count * 4) == 0);
      CHECK(floats[count] == -1.0f);
    }
  }
}

TEST_CASE("a scale may stand around blocks as well") {
  const ScaledRun<Q8_0Codec> codec{4.0f};
  std::vector<float> values(96);
  for (std::size_t i = 0; i < 96; ++i) values[i] = static_cast<float>(i);
  std::vector<std::byte> bytes(102);
  codec.encode(values.data(), bytes.data(), 96);
  std::vector<float> back(96);
  codec.decode(bytes.data(), back.data(), 96);
  for (std::size_t i = 0; i < 96; ++i) CHECK(std::abs(back[i] - values[i]) < 0.5f);
}

namespace {

struct BlocksAgree {
  template <class Codec>
  Status operator()(Codec) const {
    CHECK(Codec::block_values == block_values(Codec::dtype));
    CHECK(Codec::block_bytes == block_bytes(Codec::dtype));
    return {};
  }
};

}  // namespace

TEST_CASE("every dtype's blocks are its codec's") {
  for (const DType dtype : kAllDTypes) CHECK(with_codec(dtype, BlocksAgree{}).ok());
}
