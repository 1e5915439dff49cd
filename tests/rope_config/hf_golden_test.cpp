// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// config.json against what Hugging Face transformers made of it: the 28 configurations of tests/data/rope_golden.json,
// from the fields to the frequencies.
#include <doctest/doctest.h>
#include <nlohmann/json.hpp>
#include <rope_config/hf_config.hpp>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <string>
#include <vector>

using kvblend::RopePairing;
using kvblend::RopeSpec;
using nlohmann::json;
using rope_config::HfOptions;
using rope_config::LatentKeys;

namespace {

const json& golden() {
  static const json data = [] {
    std::ifstream file(KVBLEND_TEST_DATA_DIR "/rope_golden.json");
    return json::parse(file);
  }();
  return data;
}

// The configurations are arguments of a class; a file has the class's model_type.
const std::map<std::string, std::string> kTypes = {
    {"LlamaConfig", "llama"},
    {"Qwen2Config", "qwen2"},
    {"GptOssConfig", "gpt_oss"},
    {"DeepseekV3Config", "deepseek_v3"},
    {"Phi3Config", "phi3"},
    {"GPTNeoXConfig", "gpt_neox"},
    {"PhiConfig", "phi"},
    {"Glm4Config", "glm4"},
    {"Gemma3TextConfig", "gemma3_text"},
    {"GPTJConfig", "gptj"},
    {"SmolLM3Config", "smollm3"},
    {"Llama4TextConfig", "llama4_text"},
    {"Qwen2VLTextConfig", "qwen2_vl_text"},
    {"Qwen3VLTextConfig", "qwen3_vl_text"},
    {"Gemma4TextConfig", "gemma4_text"},
    {"HunYuanDenseV1Config", "hunyuan_v1_dense"},
};

// What each family of the data is called by the reader.
const std::map<std::string, std::string> kFamilies = {
    {"plain", "plain"},         {"llama3", "llama3"}, {"linear", "linear"},     {"dynamic", "dynamic"},
    {"yarn", "yarn"},           {"yarn_mla", "yarn"}, {"longrope", "longrope"}, {"partial", "plain"},
    {"gptj", "plain"},          {"nope", "none"},     {"mrope", "plain"},       {"proportional", "proportional"},
    {"ntk_alpha", "ntk_alpha"},
};

}  // namespace

TEST_CASE("each golden configuration gives the golden frequencies, layout and factor") {
  double largest = 0;
  std::string names;
  for (const json& c : golden()["cases"]) {
    const std::string name = c["name"];
    CAPTURE(name);
    json config = c["config"];
    config["model_type"] = kTypes.at(c["config_class"]);
    if (!config.contains("num_hidden_layers")) config["num_hidden_layers"] = 6;

    HfOptions options;
    options.latent_keys = name == "deepseek_v3_full_192" ? LatentKeys::expanded : LatentKeys::part;
    if (name == "deepseek_v3_hf_cache_layout") options.pairing = RopePairing::neox;
    std::size_t layer = 0;
    if (c["layer_idx"].is_number()) layer = c["layer_idx"].get<std::size_t>();
    if (c["layer_type"] == "full_attention") layer = 5;

    for (const json& set : c["freq_sets"]) {
      options.length = set["seq_len"].is_null() ? 0 : set["seq_len"].get<std::int64_t>();
      CAPTURE(options.length);
      const auto read = rope_config::read_hf_config(config.dump(), options);
      REQUIRE_MESSAGE(read.ok(), read.status.where() << ": " << read.status.message());
      REQUIRE(read.value.layers.size() == config["num_hidden_layers"].get<std::size_t>());
      const RopeSpec& spec = read.value.layers[layer].spec;

      CHECK(spec.head_dim == c["head_dim"].get<int>());
      CHECK(spec.rotary_dim == c["rotary_dim"].get<int>());
      CHECK(spec.rotary_offset == c["rotary_offset"].get<int>());
      if (c["style"] != "none") CHECK(to_string(spec.pairing) == c["style"].get<std::string>());
      const std::string family = read.value.layers[layer].family;
      if (c["family"] == "gemma3") {
        CHECK(family == (c["layer_type"] == "full_attention" ? "linear" : "plain"));
      } else {
        CHECK(family == kFamilies.at(c["family"]));
      }
      if (spec.rotary_dim == 0) continue;

      CHECK(std::abs(spec.attention_factor - set["attention_factor"].get<double>()) <= 1e-15 * spec.attention_factor);
      const auto expected = set["inv_freq"].get<std::vector<double>>();
      REQUIRE(static_cast<std::size_t>(spec.pairs()) == expected.size());
      for (std::size_t i = 0; i < expected.size(); ++i) {
        CAPTURE(i);
        const double difference = std::abs(spec.inv_freq[i] - expected[i]);
        CHECK(difference <= 1e-12 * expected[i]);
        if (expected[i] > 0) largest = std::max(largest, difference / expected[i]);
        CHECK(spec.axis_of_pair[i] == (c["axis_of_pair"].is_null() ? 0 : c["axis_of_pair"][i].get<int>()));
      }
    }
    names += name + " ";
  }
  MESSAGE("largest relative difference " << largest << " in " << names);
  CHECK(golden()["cases"].size() == 28);
}
