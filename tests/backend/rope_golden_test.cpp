// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Every back end against keys that Hugging Face transformers' own code rotated, in double, at the old and at the new
// position (tests/data/rope_golden.json; what its fields mean: tests/data/README.md).
#include <kvblend/codec/floats.hpp>
#include <kvblend/rope/builders.hpp>
#include <kvblend/rope/shifter.hpp>

#include <doctest/doctest.h>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>
#include "support.hpp"

using namespace kvblend;
using kvblend_test::Rows;

namespace {

struct GoldenPair {
  std::string name;
  std::string family;
  RopeSpec spec;          // frequencies in double
  RopeSpec float32_spec;  // frequencies as transformers computes them in float32
  std::int32_t old_position = 0;
  std::int32_t new_position = 0;
  bool identity = false;
  std::vector<double> key;  // before rope
  std::vector<double> old_key;
  std::vector<double> new_key;
};

RopeSpec spec_of(const nlohmann::json& test_case, const nlohmann::json& set, const char* frequencies) {
  const auto head_dim = test_case["head_dim"].get<std::int32_t>();
  const auto rotary_dim = test_case["rotary_dim"].get<std::int32_t>();
  if (rotary_dim == 0) return no_rope(head_dim).value;
  const auto pairing = test_case["style"] == "neox" ? RopePairing::neox : RopePairing::interleaved;
  const auto values = set[frequencies].get<std::vector<double>>();
  const auto spec = rope_from_frequencies<double>(head_dim, rotary_dim, pairing, values,
                                                  test_case["rotary_offset"].get<std::int32_t>(),
                                                  set["attention_factor"].get<double>());
  REQUIRE_MESSAGE(spec.ok(), spec.status.where() << ": " << spec.status.message());
  return spec.value;
}

const nlohmann::json& golden() {
  static const nlohmann::json data = [] {
    std::ifstream file(KVBLEND_TEST_DATA_DIR "/rope_golden.json");
    return nlohmann::json::parse(file);
  }();
  return data;
}

// The pairs this library has words for: one position a token, the same frequencies at both places.
std::vector<GoldenPair> golden_pairs() {
  std::vector<GoldenPair> pairs;
  for (const auto& test_case : golden()["cases"]) {
    for (const auto& pair : test_case["pairs"]) {
      if (!pair["p_old"].is_number() || !pair["p_new"].is_number()) continue;
      GoldenPair golden_pair;
      golden_pair.name = test_case["name"];
      golden_pair.family = test_case["family"];
      golden_pair.old_position = pair["p_old"];
      golden_pair.new_position = pair["p_new"];
      golden_pair.identity = pair["identity"];
      golden_pair.key = pair["x"].get<std::vector<double>>();
      golden_pair.old_key = pair["k_old"].get<std::vector<double>>();
      golden_pair.new_key = pair["k_new"].get<std::vector<double>>();
      const bool rope = test_case["style"] != "none";
      const nlohmann::json none;
      const auto& sets = test_case["freq_sets"];
      const auto& old_set = rope ? sets[pair["old_set"].get<std::size_t>()] : none;
      const auto& new_set = rope ? sets[pair["new_set"].get<std::size_t>()] : none;
      golden_pair.spec = spec_of(test_case, new_set, "inv_freq");
      golden_pair.float32_spec = spec_of(test_case, new_set, "inv_freq_peer_fp32");
      if (!can_shift(spec_of(test_case, old_set, "inv_freq"), golden_pair.spec).ok()) continue;
      pairs.push_back(golden_pair);
    }
  }
  return pairs;
}

std::vector<float> to_floats(const std::vector<double>& values) { return {values.begin(), values.end()}; }

template <class Values>
double largest_difference(const Values& actual, const std::vector<double>& expected) {
  double largest = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    largest = (std::max)(largest, std::abs(static_cast<double>(actual[i]) - expected[i]));
  }
  return largest;
}

// x as float32 code has it in its cache at `position`: angle, cosine, sine and products in float32.
std::vector<float> float32_engine_key(const RopeSpec& spec, const std::vector<double>& x, std::int32_t position) {
  std::vector<float> key = to_floats(x);
  const std::int32_t half = spec.rotary_dim / 2;
  for (std::int32_t pair = 0; pair < half; ++pair) {
    const float angle =
        static_cast<float>(position) * static_cast<float>(spec.inv_freq[static_cast<std::size_t>(pair)]);
    const auto factor = static_cast<float>(spec.attention_factor);
    const float cosine = static_cast<float>(std::cos(static_cast<double>(angle))) * factor;
    const float sine = static_cast<float>(std::sin(static_cast<double>(angle))) * factor;
    const bool neox = spec.pairing == RopePairing::neox;
    const auto first = static_cast<std::size_t>(spec.rotary_offset + (neox ? pair : 2 * pair));
    const auto second = first + static_cast<std::size_t>(neox ? half : 1);
    const float a = key[first];
    const float b = key[second];
    key[first] = a * cosine - b * sine;
    key[second] = b * cosine + a * sine;
  }
  return key;
}

// Moves `key`, in both heads of row 1 of three, to row 2 of another three. The rows beside must keep their bytes.
template <class Codec, class Angles, class Backend>
std::vector<float> move_key(const RopeSpec& spec, const GoldenPair& pair, const std::vector<float>& key,
                            bool* same_bytes = nullptr) {
  Rows<Codec> source(3, 2, spec.head_dim);
  Rows<Codec> destination(3, 2, spec.head_dim);
  source.set_head(1, 0, key);
  source.set_head(1, 1, key);
  std::fill(destination.bytes.begin(), destination.bytes.end(), std::byte{0x5a});
  const auto before = destination.bytes;

  ShiftRun run;
  run.source = 1;
  run.destination = Row(2);
  run.count = 1;
  run.old_first = Position(pair.old_position);
  run.new_first = Position(pair.new_position);
  std::vector<float> scratch(static_cast<std::size_t>(RopeShifter<Angles>::scratch_size(spec, run)));
  const RopeShifter<Angles, Backend> shifter;
  const Status status = shifter.shift(spec, spec, run, source.plane(), destination.plane(), scratch);
  REQUIRE_MESSAGE(status.ok(), status.where() << ": " << status.message());

  const auto row_bytes = static_cast<std::ptrdiff_t>(destination.bytes.size() / 3);
  CHECK(std::equal(before.begin(), before.begin() + 2 * row_bytes, destination.bytes.begin()));
  CHECK(destination.head(2, 0) == destination.head(2, 1));
  if (same_bytes != nullptr) {
    *same_bytes = std::equal(source.bytes.begin() + row_bytes, source.bytes.begin() + 2 * row_bytes,
                             destination.bytes.begin() + 2 * row_bytes);
  }
  return destination.head(2, 0);
}

}  // namespace

TEST_CASE("the golden data covers the families this library has") {
  const auto pairs = golden_pairs();
  std::vector<std::string> families;
  for (const GoldenPair& pair : pairs) families.push_back(pair.family);
  std::sort(families.begin(), families.end());
  families.erase(std::unique(families.begin(), families.end()), families.end());
  std::string names;
  for (const std::string& family : families) names += family + " ";
  MESSAGE(pairs.size() << " of 202 golden pairs, families: " << names);
  CHECK(pairs.size() >= 170);
  CHECK(families.size() == 14);
}

TEST_CASE("the exact angle in double gives the golden keys within 1e-9") {
  double largest = 0;
  for (const GoldenPair& pair : golden_pairs()) {
    CAPTURE(pair.name);
    CAPTURE(pair.old_position);
    CAPTURE(pair.new_position);
    std::vector<double> key = pair.old_key;
    const std::int32_t half = pair.spec.rotary_dim / 2;
    for (std::int32_t i = 0; i < half; ++i) {
      const double angle = ExactAngles::angle(pair.spec, Position(pair.old_position), Position(pair.new_position), i);
      const bool neox = pair.spec.pairing == RopePairing::neox;
      const auto first = static_cast<std::size_t>(pair.spec.rotary_offset + (neox ? i : 2 * i));
      const auto second = first + static_cast<std::size_t>(neox ? half : 1);
      const double a = key[first];
      const double b = key[second];
      key[first] = a * std::cos(angle) - b * std::sin(angle);
      key[second] = b * std::cos(angle) + a * std::sin(angle);
    }
    const double difference = largest_difference(key, pair.new_key);
    CHECK(difference < 1e-9);
    largest = (std::max)(largest, difference);
  }
  MESSAGE("largest difference " << largest);
}

TEST_CASE_TEMPLATE("exactly moved keys match the golden keys", Backend, KVBLEND_TEST_BACKENDS) {
  double largest_f32 = 0;
  double largest_f16 = 0;
  double largest_bf16 = 0;
  for (const GoldenPair& pair : golden_pairs()) {
    CAPTURE(pair.name);
    CAPTURE(pair.old_position);
    CAPTURE(pair.new_position);
    const std::vector<float> key = to_floats(pair.old_key);
    const auto f32 = move_key<F32Codec, ExactAngles, Backend>(pair.spec, pair, key);
    const auto f16 = move_key<F16Codec, ExactAngles, Backend>(pair.spec, pair, key);
    const auto bf16 = move_key<Bf16Codec, ExactAngles, Backend>(pair.spec, pair, key);
    CHECK(largest_difference(f32, pair.new_key) < 2e-6);
    CHECK(largest_difference(f16, pair.new_key) < 2.5e-3);
    CHECK(largest_difference(bf16, pair.new_key) < 0.02);
    largest_f32 = (std::max)(largest_f32, largest_difference(f32, pair.new_key));
    largest_f16 = (std::max)(largest_f16, largest_difference(f16, pair.new_key));
    largest_bf16 = (std::max)(largest_bf16, largest_difference(bf16, pair.new_key));
  }
  MESSAGE("largest difference: f32 " << largest_f32 << ", f16 " << largest_f16 << ", bf16 " << largest_bf16);
}

TEST_CASE_TEMPLATE("keys moved like the engine match those a float32 engine computes", Backend, KVBLEND_TEST_BACKENDS) {
  double largest = 0;
  for (const GoldenPair& pair : golden_pairs()) {
    CAPTURE(pair.name);
    CAPTURE(pair.old_position);
    CAPTURE(pair.new_position);
    const std::vector<float> old_key = float32_engine_key(pair.float32_spec, pair.key, pair.old_position);
    const std::vector<float> expected = float32_engine_key(pair.float32_spec, pair.key, pair.new_position);
    const auto moved = move_key<F32Codec, EngineAngles, Backend>(pair.float32_spec, pair, old_key);
    const double difference = largest_difference(moved, std::vector<double>(expected.begin(), expected.end()));
    CHECK(difference < 1e-6);
    largest = (std::max)(largest, difference);
  }
  MESSAGE("largest difference " << largest);
}

TEST_CASE_TEMPLATE("keys that stay or have no rope keep their bytes", Backend, KVBLEND_TEST_BACKENDS) {
  int count = 0;
  for (const GoldenPair& pair : golden_pairs()) {
    if (!pair.identity) continue;
    CAPTURE(pair.name);
    const std::vector<float> key = to_floats(pair.old_key);
    bool same = false;
    move_key<F32Codec, ExactAngles, Backend>(pair.spec, pair, key, &same);
    CHECK(same);
    move_key<F32Codec, EngineAngles, Backend>(pair.spec, pair, key, &same);
    CHECK(same);
    move_key<F16Codec, ExactAngles, Backend>(pair.spec, pair, key, &same);
    CHECK(same);
    move_key<Bf16Codec, EngineAngles, Backend>(pair.spec, pair, key, &same);
    CHECK(same);
    ++count;
  }
  CHECK(count > 20);
}

// The golden data must be able to tell right from wrong.
TEST_CASE("a wrong pairing or direction or position fails the golden data") {
  for (const GoldenPair& pair : golden_pairs()) {
    if (pair.identity || pair.spec.rotary_dim < 4) continue;
    CAPTURE(pair.name);
    const std::vector<float> key = to_floats(pair.old_key);
    const auto worst = [&](const RopeSpec& spec, const GoldenPair& positions) {
      return largest_difference(move_key<F32Codec, ExactAngles, PortableBackend>(spec, positions, key), pair.new_key);
    };
    RopeSpec wrong = pair.spec;
    wrong.pairing = wrong.pairing == RopePairing::neox ? RopePairing::interleaved : RopePairing::neox;
    CHECK(worst(wrong, pair) > 0.02);

    GoldenPair backwards = pair;
    std::swap(backwards.old_position, backwards.new_position);
    CHECK(worst(pair.spec, backwards) > 0.02);

    GoldenPair off_by_one = pair;
    ++off_by_one.old_position;
    CHECK(worst(pair.spec, off_by_one) > 0.02);
  }
}

TEST_CASE("frequencies that differ between the two lengths are refused by name") {
  int refused = 0;
  for (const auto& test_case : golden()["cases"]) {
    for (const auto& pair : test_case["pairs"]) {
      if (!pair["p_old"].is_number() || pair["old_set"] == pair["new_set"]) continue;
      const auto& sets = test_case["freq_sets"];
      const RopeSpec stored = spec_of(test_case, sets[pair["old_set"].get<std::size_t>()], "inv_freq");
      const RopeSpec wanted = spec_of(test_case, sets[pair["new_set"].get<std::size_t>()], "inv_freq");
      if (stored == wanted) continue;
      const Status status = can_shift(stored, wanted);
      CHECK(status.code() == StatusCode::mismatch);
      CHECK(std::string(status.where()).find("rope inv_freq[") == 0);
      ++refused;
    }
  }
  CHECK(refused > 0);
}

TEST_CASE("the builders give the golden frequencies") {
  int checked = 0;
  for (const auto& test_case : golden()["cases"]) {
    const std::string name = test_case["name"];
    const auto head_dim = test_case["head_dim"].get<std::int32_t>();
    const auto number = [&](const char* key) { return test_case["config"]["rope_parameters"][key].get<double>(); };
    Result<RopeSpec> spec;
    if (name == "llama_plain") {
      spec = plain_rope(head_dim, number("rope_theta"));
    } else if (name == "linear") {
      spec = linear_rope(head_dim, number("rope_theta"), number("factor"));
    } else if (name == "llama31_llama3" || name == "llama32_1b_llama3") {
      spec = llama3_rope(head_dim, number("rope_theta"),
                         {number("factor"), number("low_freq_factor"), number("high_freq_factor"),
                          number("original_max_position_embeddings")});
    } else {
      continue;
    }
    CAPTURE(name);
    REQUIRE(spec.ok());
    const auto expected = test_case["freq_sets"][0]["inv_freq"].get<std::vector<double>>();
    REQUIRE(static_cast<std::size_t>(spec.value.pairs()) == expected.size());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      CHECK(std::abs(spec.value.inv_freq[i] - expected[i]) <= 1e-14 * expected[i]);
    }
    ++checked;
  }
  CHECK(checked == 4);
}
