// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Every back end against keys that Hugging Face transformers' own code rotated, in double, at the old and at the new
// position (tests/data/rope_golden.json; what its fields mean: tests/data/README.md). One test a case, by its name,
// with specs from the builders and the case's configuration.
#include <kvblend/codec/floats.hpp>
#include <kvblend/rope/builders.hpp>
#include <kvblend/rope/scaling.hpp>
#include <kvblend/rope/shifter.hpp>

#include <doctest/doctest.h>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>
#include "support.hpp"

using namespace kvblend;
using kvblend_test::Rows;
using nlohmann::json;

namespace {

// The cases of the file, each of which has a test below.
constexpr std::string_view kCases[] = {"llama_plain",
                                       "llama31_llama3",
                                       "llama32_1b_llama3",
                                       "linear",
                                       "dynamic_ntk",
                                       "yarn_qwen25",
                                       "yarn_gpt_oss_no_truncate",
                                       "yarn_explicit_attention_factor",
                                       "deepseek_v3_rope_part",
                                       "deepseek_v3_hf_cache_layout",
                                       "deepseek_v3_full_192",
                                       "longrope_phi3",
                                       "longrope_phi4_partial",
                                       "partial_gpt_neox",
                                       "partial_phi_05",
                                       "partial_phi_04",
                                       "partial_glm4",
                                       "gemma3_sliding",
                                       "gemma3_full",
                                       "gptj",
                                       "nope_smollm3",
                                       "nope_llama4",
                                       "llama4_rope_layer",
                                       "mrope_qwen2vl_text",
                                       "mrope_qwen2vl_thw",
                                       "mrope_qwen3vl_thw_interleaved_axes",
                                       "proportional_gemma4_full",
                                       "ntk_alpha_hunyuan"};

const json& golden() {
  static const json data = [] {
    std::ifstream file(KVBLEND_TEST_DATA_DIR "/rope_golden.json");
    return json::parse(file);
  }();
  return data;
}

const json& case_named(std::string_view name) {
  for (const json& test_case : golden()["cases"]) {
    if (test_case["name"] == name) return test_case;
  }
  REQUIRE_MESSAGE(false, "no case " << name);
  return golden();
}

RopeSpec must(const Result<RopeSpec>& spec) {
  REQUIRE_MESSAGE(spec.ok(), spec.status.where() << ": " << spec.status.message());
  return spec.value;
}

double number(const json& object, const char* key, double otherwise) {
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? otherwise : found->get<double>();
}

// What the case's rotated part is by the builders, from its configuration; `length` matters to some.
RopeSpec built_part(const json& test_case, std::int32_t head_dim, std::int64_t length) {
  const json& config = test_case["config"];
  json rope = config.value("rope_parameters", json::object());
  if (test_case["layer_type"].is_string()) rope = rope[test_case["layer_type"].get<std::string>()];
  const std::string type = rope.value("rope_type", "default");
  const double theta = number(rope, "rope_theta", 10000);
  const double partial = number(rope, "partial_rotary_factor", 1);
  const double factor = number(rope, "factor", 1);
  const double original =
      number(rope, "original_max_position_embeddings",
             number(config, "original_max_position_embeddings", number(config, "max_position_embeddings", 0)));
  const auto pairing = test_case["style"] == "interleaved" ? RopePairing::interleaved : RopePairing::neox;
  auto rotary_dim = static_cast<std::int32_t>(partial * head_dim);
  if (config.contains("rotary_dim")) rotary_dim = config["rotary_dim"].get<std::int32_t>();
  if (test_case["style"] == "none") return must(no_rope(head_dim));
  if (type == "default") return must(plain_rope(head_dim, theta, pairing, rotary_dim));
  if (type == "linear") return must(linear_rope(head_dim, theta, factor, pairing, rotary_dim));
  if (type == "proportional") return must(proportional_rope(head_dim, theta, partial, factor, pairing));
  if (type == "llama3") {
    return must(
        llama3_rope(head_dim, theta,
                    {factor, rope["low_freq_factor"].get<double>(), rope["high_freq_factor"].get<double>(), original},
                    pairing, rotary_dim));
  }
  if (type == "dynamic" && rope.contains("alpha")) {
    return must(ntk_alpha_rope(head_dim, theta, rope["alpha"].get<double>(), pairing, rotary_dim));
  }
  if (type == "dynamic") {
    return must(dynamic_ntk_rope(head_dim, theta, {factor, original}, length, pairing, rotary_dim));
  }
  if (type == "yarn") {
    YarnScaling scaling;
    scaling.factor = factor;
    scaling.original_length = original;
    scaling.beta_fast = number(rope, "beta_fast", 32);
    scaling.beta_slow = number(rope, "beta_slow", 1);
    scaling.truncate = rope.value("truncate", true);
    scaling.mscale = number(rope, "mscale", 0);
    scaling.mscale_all_dim = number(rope, "mscale_all_dim", 0);
    scaling.attention_factor = number(rope, "attention_factor", 0);
    return must(yarn_rope(head_dim, theta, scaling, pairing, rotary_dim));
  }
  REQUIRE(type == "longrope");
  const auto short_factors = rope["short_factor"].get<std::vector<double>>();
  const auto long_factors = rope["long_factor"].get<std::vector<double>>();
  LongropeScaling scaling;
  scaling.short_factors = short_factors;
  scaling.long_factors = long_factors;
  scaling.original_length = original;
  scaling.factor = number(config, "max_position_embeddings", 0) / original;
  return must(longrope(head_dim, theta, scaling, length, pairing, rotary_dim));
}

RopeSpec built_spec(const json& test_case, const json& set) {
  const std::int64_t length = set["seq_len"].is_null() ? 0 : set["seq_len"].get<std::int64_t>();
  const auto head_dim = test_case["head_dim"].get<std::int32_t>();
  const auto offset = test_case["rotary_offset"].get<std::int32_t>();
  RopeSpec spec = built_part(test_case, head_dim - offset, length);
  if (offset > 0) spec = must(within_head(spec, head_dim, offset));
  if (test_case["axis_of_pair"].is_null()) return spec;
  const auto sections = test_case["config"]["rope_parameters"]["mrope_section"].get<std::vector<std::int32_t>>();
  const bool apart = test_case["config_class"] == "Qwen3VLTextConfig";
  return must(with_axes(spec, sections, apart ? AxisOrder::interleaved : AxisOrder::sectioned));
}

// The case's spec by the file's own frequencies.
RopeSpec listed_spec(const json& test_case, const json& set, const char* frequencies) {
  const auto head_dim = test_case["head_dim"].get<std::int32_t>();
  if (test_case["style"] == "none") return must(no_rope(head_dim));
  const auto pairing = test_case["style"] == "neox" ? RopePairing::neox : RopePairing::interleaved;
  const auto values = set[frequencies].get<std::vector<double>>();
  RopeSpec spec = must(rope_from_frequencies<double>(head_dim, test_case["rotary_dim"].get<std::int32_t>(), pairing,
                                                     values, test_case["rotary_offset"].get<std::int32_t>(),
                                                     set["attention_factor"].get<double>()));
  if (test_case["axis_of_pair"].is_null()) return spec;
  const auto axes = test_case["axis_of_pair"].get<std::vector<std::uint8_t>>();
  std::copy(axes.begin(), axes.end(), spec.axis_of_pair.begin());
  return spec;
}

// The specs of one frequency set.
struct Specs {
  RopeSpec built;    // by the builders
  RopeSpec listed;   // by the file's frequencies, in double
  RopeSpec float32;  // by those that transformers computes in float32
};

struct GoldenPair {
  bool one_position = false;  // the file gives one for all axes
  AxisPositions old_position;
  AxisPositions new_position;
  std::size_t old_set = 0;
  std::size_t new_set = 0;
  bool identity = false;
  std::vector<double> key;  // before rope
  std::vector<double> old_key;
  std::vector<double> new_key;
  double peer_old_error = 0;  // of transformers' own float32 key at either position
  double peer_new_error = 0;
};

struct GoldenCase {
  std::string family;
  std::vector<Specs> sets;
  std::vector<GoldenPair> pairs;
};

AxisPositions positions_of(const json& position) {
  if (position.is_array()) return {position.get<std::array<std::int32_t, 3>>()};
  const auto p = position.get<std::int32_t>();
  return {{p, p, p}};
}

GoldenCase load(std::string_view name) {
  const json& test_case = case_named(name);
  GoldenCase loaded;
  loaded.family = test_case["family"];
  for (const json& set : test_case["freq_sets"]) {
    loaded.sets.push_back({built_spec(test_case, set), listed_spec(test_case, set, "inv_freq"),
                           listed_spec(test_case, set, "inv_freq_peer_fp32")});
  }
  for (const json& pair : test_case["pairs"]) {
    loaded.pairs.push_back({pair["p_old"].is_number(), positions_of(pair["p_old"]), positions_of(pair["p_new"]),
                            pair["old_set"], pair["new_set"], pair["identity"], pair["x"], pair["k_old"], pair["k_new"],
                            pair["err"]["peer_fp32_k_old"], pair["err"]["peer_fp32_k_new"]});
  }
  return loaded;
}

std::vector<float> to_floats(const std::vector<double>& values) { return {values.begin(), values.end()}; }
std::vector<double> to_doubles(const std::vector<float>& values) { return {values.begin(), values.end()}; }

double difference(const std::vector<double>& actual, const std::vector<double>& expected) {
  double largest = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) largest = std::max(largest, std::abs(actual[i] - expected[i]));
  return largest;
}

struct PairIndices {
  std::size_t first;
  std::size_t second;
};
PairIndices pair_at(const RopeSpec& spec, std::int32_t pair) {
  const bool neox = spec.pairing == RopePairing::neox;
  const auto first = static_cast<std::size_t>(spec.rotary_offset + (neox ? pair : 2 * pair));
  return {first, first + static_cast<std::size_t>(neox ? spec.rotary_dim / 2 : 1)};
}

// The move in double, by the library's exact angle.
std::vector<double> moved_in_double(const RopeSpec& stored, const RopeSpec& wanted, const GoldenPair& pair) {
  std::vector<double> key = pair.old_key;
  for (std::int32_t i = 0; i < wanted.pairs(); ++i) {
    const auto at = static_cast<std::size_t>(i);
    const std::size_t axis = wanted.axis_of_pair[at];
    const double angle = ExactAngles::angle(stored.inv_freq[at], pair.old_position.axis[axis], wanted.inv_freq[at],
                                            pair.new_position.axis[axis]);
    const PairIndices in = pair_at(wanted, i);
    const double a = key[in.first];
    const double b = key[in.second];
    key[in.first] = a * std::cos(angle) - b * std::sin(angle);
    key[in.second] = b * std::cos(angle) + a * std::sin(angle);
  }
  return key;
}

// x as float32 code has it in its cache: angle, cosine, sine and products in float32.
std::vector<float> float32_engine_key(const RopeSpec& spec, const std::vector<double>& x, const AxisPositions& at) {
  std::vector<float> key = to_floats(x);
  const auto factor = static_cast<float>(spec.attention_factor);
  for (std::int32_t pair = 0; pair < spec.pairs(); ++pair) {
    const auto i = static_cast<std::size_t>(pair);
    const float angle = static_cast<float>(at.axis[spec.axis_of_pair[i]]) * static_cast<float>(spec.inv_freq[i]);
    const float cosine = static_cast<float>(std::cos(static_cast<double>(angle))) * factor;
    const float sine = static_cast<float>(std::sin(static_cast<double>(angle))) * factor;
    const PairIndices in = pair_at(spec, pair);
    const float a = key[in.first];
    const float b = key[in.second];
    key[in.first] = a * cosine - b * sine;
    key[in.second] = b * cosine + a * sine;
  }
  return key;
}

// Moves `key`, in both heads of row 1 of three, to row 2 of another three. The rows beside must keep their bytes. By
// `listed` positions, or by a run.
template <class Codec, class Angles, class Backend>
std::vector<double> move_key(const RopeSpec& stored, const RopeSpec& wanted, const GoldenPair& pair,
                             const std::vector<float>& key, bool listed, bool* same_bytes = nullptr) {
  Rows<Codec> source(3, 2, wanted.head_dim);
  Rows<Codec> destination(3, 2, wanted.head_dim);
  source.set_head(1, 0, key);
  source.set_head(1, 1, key);
  std::fill(destination.bytes.begin(), destination.bytes.end(), std::byte{0x5a});
  const auto before = destination.bytes;

  const RopeShifter<Angles, Backend> shifter;
  std::vector<float> scratch(static_cast<std::size_t>(shifter.least_scratch(wanted)));
  const auto shift = [&] {
    if (listed) {
      return shifter.shift(stored, wanted, RowMove{Row(2), 1, 1}, std::span(&pair.old_position, 1),
                           std::span(&pair.new_position, 1), source.plane(), destination.plane(), scratch);
    }
    const ShiftRun run{Row(2), 1, 1, Position(pair.old_position.axis[0]), Position(pair.new_position.axis[0])};
    return shifter.shift(stored, wanted, run, source.plane(), destination.plane(), scratch);
  };
  const Status status = shift();
  REQUIRE_MESSAGE(status.ok(), status.where() << ": " << status.message());

  const auto row_bytes = static_cast<std::ptrdiff_t>(destination.bytes.size() / 3);
  CHECK(std::equal(before.begin(), before.begin() + 2 * row_bytes, destination.bytes.begin()));
  CHECK(destination.head(2, 0) == destination.head(2, 1));
  if (same_bytes != nullptr) {
    *same_bytes = std::equal(source.bytes.begin() + row_bytes, source.bytes.begin() + 2 * row_bytes,
                             destination.bytes.begin() + 2 * row_bytes);
  }
  return to_doubles(destination.head(2, 0));
}

// The largest differences of a case.
struct Worst {
  double in_double = 0, f32 = 0, f16 = 0, bf16 = 0, engine = 0;
};

void keep(double& largest, double value) { largest = std::max(largest, value); }

void check_builder(const RopeSpec& built, const RopeSpec& listed) {
  REQUIRE(built.pairs() == listed.pairs());
  CHECK(can_shift(built, listed).ok() == (built.attention_factor == listed.attention_factor));
  CHECK(built.head_dim == listed.head_dim);
  CHECK(built.rotary_offset == listed.rotary_offset);
  CHECK((built.pairs() == 0 || built.pairing == listed.pairing));
  CHECK(std::abs(built.attention_factor - listed.attention_factor) <= 1e-14);
  CHECK(std::equal(built.axes().begin(), built.axes().end(), listed.axes().begin()));
  for (std::size_t i = 0; i < listed.frequencies().size(); ++i) {
    CHECK(std::abs(built.inv_freq[i] - listed.inv_freq[i]) <= 1e-14 * listed.inv_freq[i]);
  }
}

template <class Backend>
void check_moves(const GoldenCase& golden_case, const GoldenPair& pair, Worst& worst) {
  const RopeSpec& stored = golden_case.sets[pair.old_set].built;
  const RopeSpec& wanted = golden_case.sets[pair.new_set].built;
  const std::vector<float> key = to_floats(pair.old_key);
  const RopeSpec& stored_f32 = golden_case.sets[pair.old_set].float32;
  const RopeSpec& wanted_f32 = golden_case.sets[pair.new_set].float32;
  const std::vector<float> engine_key = float32_engine_key(stored_f32, pair.key, pair.old_position);
  const std::vector<double> engine_expected = to_doubles(float32_engine_key(wanted_f32, pair.key, pair.new_position));
  for (const bool listed : {false, true}) {
    if (!listed && !pair.one_position) continue;
    const double f32 =
        difference(move_key<F32Codec, ExactAngles, Backend>(stored, wanted, pair, key, listed), pair.new_key);
    const double f16 =
        difference(move_key<F16Codec, ExactAngles, Backend>(stored, wanted, pair, key, listed), pair.new_key);
    const double bf16 =
        difference(move_key<Bf16Codec, ExactAngles, Backend>(stored, wanted, pair, key, listed), pair.new_key);
    const double engine = difference(
        move_key<F32Codec, EngineAngles, Backend>(stored_f32, wanted_f32, pair, engine_key, listed), engine_expected);
    CHECK(f32 < 2e-6);
    CHECK(f16 < 2.5e-3);
    CHECK(bf16 < 0.02);
    CHECK(engine < 1e-6);
    keep(worst.f32, f32);
    keep(worst.f16, f16);
    keep(worst.bf16, bf16);
    keep(worst.engine, engine);
    if (!pair.identity) continue;
    bool same = false;
    move_key<F32Codec, ExactAngles, Backend>(stored, wanted, pair, key, listed, &same);
    CHECK(same);
    move_key<F32Codec, EngineAngles, Backend>(stored, wanted, pair, key, listed, &same);
    CHECK(same);
    move_key<F16Codec, ExactAngles, Backend>(stored, wanted, pair, key, listed, &same);
    CHECK(same);
    move_key<Bf16Codec, EngineAngles, Backend>(stored, wanted, pair, key, listed, &same);
    CHECK(same);
  }
}

void check_case(std::string_view name) {
  const GoldenCase golden_case = load(name);
  REQUIRE(!golden_case.pairs.empty());
  for (const Specs& specs : golden_case.sets) check_builder(specs.built, specs.listed);
  Worst worst;
  for (const GoldenPair& pair : golden_case.pairs) {
    CAPTURE(pair.old_position.axis[0]);
    CAPTURE(pair.new_position.axis[0]);
    const Specs& old_specs = golden_case.sets[pair.old_set];
    const Specs& new_specs = golden_case.sets[pair.new_set];
    const double by_builders = difference(moved_in_double(old_specs.built, new_specs.built, pair), pair.new_key);
    const double by_list = difference(moved_in_double(old_specs.listed, new_specs.listed, pair), pair.new_key);
    CHECK(by_builders < 1e-9);
    CHECK(by_list < 1e-9);
    keep(worst.in_double, std::max(by_builders, by_list));
    // The peer as computed here is the peer as recorded (to three digits).
    const auto peer_error = [&pair](const RopeSpec& spec, const AxisPositions& at, const std::vector<double>& truth) {
      return difference(to_doubles(float32_engine_key(spec, pair.key, at)), truth);
    };
    CHECK(std::abs(peer_error(old_specs.float32, pair.old_position, pair.old_key) - pair.peer_old_error) <
          1e-6 + 0.006 * pair.peer_old_error);
    CHECK(std::abs(peer_error(new_specs.float32, pair.new_position, pair.new_key) - pair.peer_new_error) <
          1e-6 + 0.006 * pair.peer_new_error);
    check_moves<PortableBackend>(golden_case, pair, worst);
    check_moves<kvblend_test::SerialEigen>(golden_case, pair, worst);
    check_moves<kvblend_test::TwoThreadEigen>(golden_case, pair, worst);
  }
  MESSAGE(name << " (" << golden_case.family << "), " << golden_case.pairs.size() << " pairs: double "
               << worst.in_double << ", f32 " << worst.f32 << ", f16 " << worst.f16 << ", bf16 " << worst.bf16
               << ", like the engine " << worst.engine);
}

}  // namespace

TEST_CASE("rope golden: llama_plain") { check_case("llama_plain"); }
TEST_CASE("rope golden: llama31_llama3") { check_case("llama31_llama3"); }
TEST_CASE("rope golden: llama32_1b_llama3") { check_case("llama32_1b_llama3"); }
TEST_CASE("rope golden: linear") { check_case("linear"); }
TEST_CASE("rope golden: dynamic_ntk") { check_case("dynamic_ntk"); }
TEST_CASE("rope golden: yarn_qwen25") { check_case("yarn_qwen25"); }
TEST_CASE("rope golden: yarn_gpt_oss_no_truncate") { check_case("yarn_gpt_oss_no_truncate"); }
TEST_CASE("rope golden: yarn_explicit_attention_factor") { check_case("yarn_explicit_attention_factor"); }
TEST_CASE("rope golden: deepseek_v3_rope_part") { check_case("deepseek_v3_rope_part"); }
TEST_CASE("rope golden: deepseek_v3_hf_cache_layout") { check_case("deepseek_v3_hf_cache_layout"); }
TEST_CASE("rope golden: deepseek_v3_full_192") { check_case("deepseek_v3_full_192"); }
TEST_CASE("rope golden: longrope_phi3") { check_case("longrope_phi3"); }
TEST_CASE("rope golden: longrope_phi4_partial") { check_case("longrope_phi4_partial"); }
TEST_CASE("rope golden: partial_gpt_neox") { check_case("partial_gpt_neox"); }
TEST_CASE("rope golden: partial_phi_05") { check_case("partial_phi_05"); }
TEST_CASE("rope golden: partial_phi_04") { check_case("partial_phi_04"); }
TEST_CASE("rope golden: partial_glm4") { check_case("partial_glm4"); }
TEST_CASE("rope golden: gemma3_sliding") { check_case("gemma3_sliding"); }
TEST_CASE("rope golden: gemma3_full") { check_case("gemma3_full"); }
TEST_CASE("rope golden: gptj") { check_case("gptj"); }
TEST_CASE("rope golden: nope_smollm3") { check_case("nope_smollm3"); }
TEST_CASE("rope golden: nope_llama4") { check_case("nope_llama4"); }
TEST_CASE("rope golden: llama4_rope_layer") { check_case("llama4_rope_layer"); }
TEST_CASE("rope golden: mrope_qwen2vl_text") { check_case("mrope_qwen2vl_text"); }
TEST_CASE("rope golden: mrope_qwen2vl_thw") { check_case("mrope_qwen2vl_thw"); }
TEST_CASE("rope golden: mrope_qwen3vl_thw_interleaved_axes") { check_case("mrope_qwen3vl_thw_interleaved_axes"); }
TEST_CASE("rope golden: proportional_gemma4_full") { check_case("proportional_gemma4_full"); }
TEST_CASE("rope golden: ntk_alpha_hunyuan") { check_case("ntk_alpha_hunyuan"); }

TEST_CASE("the golden data is whole and has a test for each of its cases") {
  CHECK(golden()["schema"] == "rope-golden/1");
  std::size_t pairs = 0;
  std::vector<std::string> names;
  for (const json& test_case : golden()["cases"]) {
    names.push_back(test_case["name"]);
    pairs += test_case["pairs"].size();
  }
  CHECK(names == std::vector<std::string>(std::begin(kCases), std::end(kCases)));
  CHECK(names.size() == 28);
  CHECK(pairs == 202);
}

// The golden data must be able to tell right from wrong.
TEST_CASE("a wrong pairing, direction, position, axis or length fails the golden data") {
  int other_lengths = 0;
  int axes = 0;
  for (const std::string_view name : kCases) {
    const GoldenCase golden_case = load(name);
    for (const GoldenPair& pair : golden_case.pairs) {
      const RopeSpec& stored = golden_case.sets[pair.old_set].built;
      const RopeSpec& wanted = golden_case.sets[pair.new_set].built;
      if (pair.identity || wanted.rotary_dim == 0) continue;
      CAPTURE(name);
      const auto worst = [](const RopeSpec& from, const RopeSpec& to, const GoldenPair& positions) {
        const std::vector<float> key = to_floats(positions.old_key);
        return difference(move_key<F32Codec, ExactAngles, PortableBackend>(from, to, positions, key, true),
                          positions.new_key);
      };
      RopeSpec old_wrong = stored;
      RopeSpec new_wrong = wanted;
      old_wrong.pairing = new_wrong.pairing =
          wanted.pairing == RopePairing::neox ? RopePairing::interleaved : RopePairing::neox;
      CHECK(worst(old_wrong, new_wrong, pair) > 0.02);

      GoldenPair off_by_one = pair;
      for (std::int32_t& position : off_by_one.old_position.axis) ++position;
      CHECK(worst(stored, wanted, off_by_one) > 0.02);

      if (same_frequencies(stored, wanted)) {
        GoldenPair backwards = pair;
        std::swap(backwards.old_position, backwards.new_position);
        CHECK(worst(stored, wanted, backwards) > 0.02);
      } else if (pair.old_position.axis[0] != 0) {
        CHECK(worst(wanted, wanted, pair) > 0.02);
        ++other_lengths;
      }
      const auto& old_axis = pair.old_position.axis;
      const auto& new_axis = pair.new_position.axis;
      if (new_axis[1] - old_axis[1] != new_axis[0] - old_axis[0]) {
        old_wrong = stored;
        new_wrong = wanted;
        old_wrong.axis_of_pair = new_wrong.axis_of_pair = {};
        CHECK(worst(old_wrong, new_wrong, pair) > 0.02);
        ++axes;
      }
    }
  }
  CHECK(other_lengths == 12);
  CHECK(axes == 2);
}
