// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// config.json as public models have it, older and newer: what each layer turns by, and what is refused by which name.
#include <doctest/doctest.h>
#include <kvblend/rope/builders.hpp>
#include <kvblend/rope/can_shift.hpp>
#include <kvblend/rope/scaling.hpp>
#include <rope_config/hf_config.hpp>

#include <cstdint>
#include <string>
#include <vector>

using kvblend::kWholeHead;
using kvblend::Result;
using kvblend::RopePairing;
using kvblend::RopeSpec;
using kvblend::StatusCode;
using rope_config::HfOptions;
using rope_config::LatentKeys;
using rope_config::ModelRope;
using rope_config::read_hf_config;

namespace {

constexpr auto kNeox = RopePairing::neox;
constexpr auto kInterleaved = RopePairing::interleaved;

RopeSpec value_of(const Result<RopeSpec>& spec) {
  REQUIRE_MESSAGE(spec.ok(), spec.status.where() << ": " << spec.status.message());
  return spec.value;
}

ModelRope read_ok(const std::string& text, const HfOptions& options = {}) {
  const auto read = read_hf_config(text, options);
  REQUIRE_MESSAGE(read.ok(), read.status.where() << ": " << read.status.message());
  return read.value;
}

// A configuration of llama's kin with one layer, and `fields` besides.
std::string small(const std::string& fields, const std::string& type = "llama") {
  return R"({"model_type": ")" + type + R"(", "hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1,
             "max_position_embeddings": 4096)" +
         (fields.empty() ? "" : ", " + fields) + "}";
}

std::string list_of(int count, double first, double step) {
  std::string text = "[";
  for (int i = 0; i < count; ++i) text += (i > 0 ? ", " : "") + std::to_string(first + i * step);
  return text + "]";
}
std::vector<double> numbers_of(int count, double first, double step) {
  std::vector<double> numbers;
  for (int i = 0; i < count; ++i) numbers.push_back(std::stod(std::to_string(first + i * step)));
  return numbers;
}

}  // namespace

TEST_CASE("public models whose layers are alike") {
  const kvblend::Llama3Scaling llama3{8, 1, 4, 8192};
  kvblend::YarnScaling yarn;
  yarn.factor = 4;
  yarn.original_length = 32768;
  kvblend::YarnScaling gpt_oss;
  gpt_oss.factor = 32;
  gpt_oss.original_length = 4096;
  gpt_oss.truncate = false;
  const struct {
    const char* name;
    std::string text;
    int layers;
    Result<RopeSpec> expected;
  } cases[] = {
      {"Llama-3.1-8B",
       R"({"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
           "max_position_embeddings": 131072, "rope_theta": 500000.0, "rope_scaling": {"factor": 8.0,
           "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
           "rope_type": "llama3"}})",
       32, kvblend::llama3_rope(128, 5e5, llama3)},
      {"Qwen2.5-7B",
       R"({"model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28, "num_hidden_layers": 28,
           "max_position_embeddings": 131072, "rope_theta": 1000000.0, "use_sliding_window": false})",
       28, kvblend::plain_rope(128, 1e6)},
      {"Qwen2.5-7B as its card says for long texts",
       R"({"model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28, "num_hidden_layers": 28,
           "max_position_embeddings": 32768, "rope_theta": 1000000.0, "rope_scaling": {"factor": 4.0,
           "original_max_position_embeddings": 32768, "type": "yarn"}})",
       28, kvblend::yarn_rope(128, 1e6, yarn)},
      {"Mistral-7B",
       R"({"model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
           "max_position_embeddings": 32768, "rope_theta": 10000.0, "sliding_window": 4096})",
       32, kvblend::plain_rope(128, 1e4)},
      {"Mistral-Nemo, whose heads are not hidden_size / heads",
       R"({"model_type": "mistral", "hidden_size": 5120, "num_attention_heads": 32, "head_dim": 128,
           "num_hidden_layers": 40, "rope_theta": 1000000.0})",
       40, kvblend::plain_rope(128, 1e6)},
      {"Yi-6B",
       R"({"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
           "rope_theta": 5000000.0, "rope_scaling": null})",
       32, kvblend::plain_rope(128, 5e6)},
      {"Llama-2, without rope_theta",
       R"({"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32})", 32,
       kvblend::plain_rope(128, 1e4)},
      {"gpt-neox-20b",
       R"({"model_type": "gpt_neox", "hidden_size": 6144, "num_attention_heads": 64, "num_hidden_layers": 44,
           "rotary_emb_base": 10000, "rotary_pct": 0.25})",
       44, kvblend::plain_rope(96, 1e4, kNeox, 24)},
      {"gpt-j-6b", R"({"model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_layer": 28, "rotary_dim": 64})", 28,
       kvblend::plain_rope(256, 1e4, kInterleaved, 64)},
      {"phi-2",
       R"({"model_type": "phi", "hidden_size": 2560, "num_attention_heads": 32, "num_hidden_layers": 32,
           "partial_rotary_factor": 0.4, "rope_theta": 10000.0})",
       32, kvblend::plain_rope(80, 1e4, kNeox, 32)},
      {"GLM-4-9B",
       R"({"model_type": "glm4", "hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128,
           "num_hidden_layers": 40, "partial_rotary_factor": 0.5, "rope_theta": 10000.0})",
       40, kvblend::plain_rope(128, 1e4, kInterleaved, 64)},
      {"Command R",
       R"({"model_type": "cohere", "hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 40,
           "rope_theta": 8000000.0})",
       40, kvblend::plain_rope(128, 8e6, kInterleaved)},
      {"gpt-oss-20b",
       R"({"model_type": "gpt_oss", "hidden_size": 2880, "num_attention_heads": 64, "head_dim": 64,
           "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "rope_theta": 150000,
           "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
           "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": false}})",
       2, kvblend::yarn_rope(64, 150000, gpt_oss)},
      {"MiniMax-M2",
       R"({"model_type": "minimax_m2", "hidden_size": 3072, "num_attention_heads": 48, "head_dim": 128,
           "num_hidden_layers": 62, "rotary_dim": 64, "rope_theta": 5000000})",
       62, kvblend::plain_rope(128, 5e6, kNeox, 64)},
      {"longchat: linear", small(R"("rope_scaling": {"type": "linear", "factor": 8.0}, "rope_theta": 10000)"), 1,
       kvblend::linear_rope(64, 1e4, 8)},
      {"HunYuan: dynamic by name alone",
       small(R"("rope_theta": 10000.0, "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "factor": 1.0,
                "mscale": 1.0, "type": "dynamic"})",
             "hunyuan_v1_dense"),
       1, kvblend::ntk_alpha_rope(64, 1e4, 1000)},
      {"a LLaVA", R"({"model_type": "llava", "text_config": {"model_type": "mistral", "hidden_size": 4096,
           "num_attention_heads": 32, "num_hidden_layers": 32, "rope_theta": 1000000.0}, "vision_config": {}})",
       32, kvblend::plain_rope(128, 1e6)},
  };
  for (const auto& c : cases) {
    INFO(c.name);
    const ModelRope model = read_ok(c.text);
    CHECK(model.layers.size() == static_cast<std::size_t>(c.layers));
    const RopeSpec expected = value_of(c.expected);
    for (const auto& layer : model.layers) CHECK(layer.spec == expected);
  }
}

TEST_CASE("Phi-3 of 128k, under both names of its scaling, at both sides of the original length") {
  const auto short_factors = numbers_of(48, 1, 0.03);  // made up, shaped like the published ones
  const auto long_factors = numbers_of(48, 1, 1.3);
  kvblend::LongropeScaling scaling;
  scaling.short_factors = short_factors;
  scaling.long_factors = long_factors;
  scaling.original_length = 4096;
  scaling.factor = 32;
  for (const char* type : {"su", "longrope"}) {
    const std::string text = R"({"model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 32,
        "num_hidden_layers": 32, "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
        "rope_theta": 10000.0, "rope_scaling": {"type": ")" +
                             std::string(type) + R"(", "short_factor": )" + list_of(48, 1, 0.03) +
                             R"(, "long_factor": )" + list_of(48, 1, 1.3) + "}}";
    const ModelRope any = read_ok(text);
    CHECK(any.layers[0].spec == value_of(kvblend::longrope(96, 1e4, scaling, 0)));
    CHECK(any.notes.size() == 1);
    HfOptions options;
    for (const std::int64_t length : {4096, 4097}) {
      options.length = length;
      const ModelRope model = read_ok(text, options);
      CHECK(model.layers[31].spec == value_of(kvblend::longrope(96, 1e4, scaling, length)));
      CHECK(model.layers[31].family == std::string("longrope"));
      CHECK(model.notes.empty());
    }
  }
}

TEST_CASE("an empty rope_scaling is none") {
  const ModelRope model = read_ok(small(R"("rope_scaling": {}, "rope_parameters": {"rope_theta": 500})"));
  CHECK(model.layers[0].spec == value_of(kvblend::plain_rope(64, 500)));
}

TEST_CASE("dynamic NTK: keys of one length can be moved to another by the specs of both") {
  const std::string text = small(R"("rope_scaling": {"type": "dynamic", "factor": 2.0})");
  HfOptions options;
  options.length = 4096;
  const RopeSpec within = read_ok(text, options).layers[0].spec;
  CHECK(within == value_of(kvblend::plain_rope(64, 1e4)));
  options.length = 12000;
  const RopeSpec beyond = read_ok(text, options).layers[0].spec;
  CHECK(beyond == value_of(kvblend::dynamic_ntk_rope(64, 1e4, {2, 4096}, 12000)));
  CHECK_FALSE(within == beyond);
  CHECK(kvblend::can_shift(within, beyond).ok());
}

TEST_CASE("DeepSeek-V3: the row, the rope part and the expanded key") {
  const std::string text = R"({"model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128,
      "num_hidden_layers": 61, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
      "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 163840, "rope_theta": 10000,
      "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
      "original_max_position_embeddings": 4096, "type": "yarn"}})";
  kvblend::YarnScaling yarn;
  yarn.factor = 40;
  yarn.original_length = 4096;
  yarn.mscale = yarn.mscale_all_dim = 1;
  const RopeSpec part = value_of(kvblend::yarn_rope(64, 1e4, yarn, kInterleaved));
  CHECK(part.attention_factor == 1);
  CHECK(read_ok(text).layers[60].spec == value_of(kvblend::within_head(part, 576, 512)));
  HfOptions options;
  options.latent_keys = LatentKeys::part;
  CHECK(read_ok(text, options).layers[0].spec == part);
  options.latent_keys = LatentKeys::expanded;
  CHECK(read_ok(text, options).layers[0].spec == value_of(kvblend::within_head(part, 192, 128)));
  options.latent_keys = LatentKeys::part;
  options.pairing = kNeox;  // transformers' own cache
  const ModelRope neox = read_ok(text, options);
  CHECK(neox.layers[0].spec == value_of(kvblend::yarn_rope(64, 1e4, yarn, kNeox)));
  CHECK(neox.notes.size() == 1);
  CHECK(std::string(kvblend::can_shift(part, neox.layers[0].spec).status.where()) == "rope pairing");

  std::string halves = text;
  halves.insert(1, R"("rope_interleave": false, )");
  options.pairing.reset();
  CHECK(read_ok(halves, options).layers[0].spec.pairing == kNeox);
}

TEST_CASE("Gemma 3: five local layers, one global, in the older and in the newer way") {
  const RopeSpec local = value_of(kvblend::plain_rope(256, 1e4));
  const RopeSpec global = value_of(kvblend::linear_rope(256, 1e6, 8));
  const char* texts[] = {
      // gemma-3-4b, as published: most fields are left to the class
      R"({"model_type": "gemma3", "text_config": {"hidden_size": 2560, "model_type": "gemma3_text",
          "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
          "sliding_window": 1024}})",
      R"({"model_type": "gemma3_text", "hidden_size": 2560, "num_attention_heads": 8, "head_dim": 256,
          "num_hidden_layers": 34, "sliding_window_pattern": 6, "rope_theta": 1000000.0,
          "rope_local_base_freq": 10000.0, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}})",
      R"({"model_type": "gemma3_text", "hidden_size": 2560, "head_dim": 256, "num_hidden_layers": 34,
          "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
          "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0}}})"};
  for (const char* text : texts) {
    const ModelRope model = read_ok(text);
    REQUIRE(model.layers.size() == 34);
    for (std::size_t i = 0; i < 34; ++i) {
      CHECK(model.layers[i].spec == (i % 6 == 5 ? global : local));
      CHECK(model.layers[i].family == std::string(i % 6 == 5 ? "linear" : "plain"));
    }
  }
}

TEST_CASE("Gemma 4: wide proportional heads in full attention layers") {
  const RopeSpec local = value_of(kvblend::plain_rope(256, 1e4));
  const RopeSpec global = value_of(kvblend::proportional_rope(512, 1e6, 0.25));
  const char* texts[] = {
      R"({"model_type": "gemma4_text", "head_dim": 256, "num_hidden_layers": 12, "global_head_dim": 512,
          "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
          "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0,
          "partial_rotary_factor": 0.25}}})",
      R"({"model_type": "gemma4", "text_config": {"num_hidden_layers": 12, "num_kv_shared_layers": 2}})",
      R"({"model_type": "gemma4_text", "num_hidden_layers": 12, "per_layer_config": {"5": {"head_dim": 512},
          "11": {"head_dim": 512, "num_key_value_heads": 2}}})"};
  for (const char* text : texts) {
    const ModelRope model = read_ok(text);
    REQUIRE(model.layers.size() == 12);
    for (std::size_t i = 0; i < 12; ++i) CHECK(model.layers[i].spec == (i % 6 == 5 ? global : local));
  }
  CHECK(read_ok(texts[1]).notes.size() == 1);
}

TEST_CASE("Olmo 3: only full attention layers are scaled") {
  const ModelRope model = read_ok(
      R"({"model_type": "olmo3", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 4,
          "max_position_embeddings": 65536, "rope_theta": 500000, "rope_scaling": {"rope_type": "yarn",
          "factor": 8.0, "original_max_position_embeddings": 8192, "attention_factor": 1.2079441541679836,
          "beta_fast": 32.0, "beta_slow": 1.0}})");
  kvblend::YarnScaling yarn;
  yarn.factor = 8;
  yarn.original_length = 8192;
  yarn.attention_factor = 1.2079441541679836;
  CHECK(model.layers[2].spec == value_of(kvblend::plain_rope(128, 5e5)));
  CHECK(model.layers[3].spec == value_of(kvblend::yarn_rope(128, 5e5, yarn)));
}

TEST_CASE("models with layers without rope") {
  struct Case {
    const char* name;
    std::string text;
    std::vector<int> without;
  };
  const std::string eight = R"("hidden_size": 256, "num_attention_heads": 2, "num_hidden_layers": 8)";
  const Case cases[] = {
      {"SmolLM3-3B",
       R"({"model_type": "smollm3", "rope_theta": 5000000.0, "no_rope_layers": [1, 1, 1, 0, 1, 1, 1, 0],
           "no_rope_layer_interval": 4, )" +
           eight + "}",
       {3, 7}},
      {"by the default interval", R"({"model_type": "smollm3", )" + eight + "}", {3, 7}},
      {"by an interval", R"({"model_type": "smollm3", "no_rope_layer_interval": 3, )" + eight + "}", {2, 5}},
      {"Llama 4",
       R"({"model_type": "llama4", "text_config": {"model_type": "llama4_text", "no_rope_layers": [], )" + eight + "}}",
       {3, 7}},
      {"Command R7B",
       R"({"model_type": "cohere2", "sliding_window_pattern": 4, "rope_theta": 50000, )" + eight + "}",
       {3, 7}},
      {"EXAONE 4.0 of 32B",
       R"({"model_type": "exaone4", "sliding_window": 4096, "sliding_window_pattern": "LLLG",
         "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
         "sliding_attention", "sliding_attention", "sliding_attention", "full_attention"], )" +
           eight + "}",
       {3, 7}},
      {"EXAONE 4.0 of 1.2B", R"({"model_type": "exaone4", "sliding_window": null, )" + eight + "}", {}},
  };
  for (const Case& c : cases) {
    INFO(c.name);
    const ModelRope model = read_ok(c.text);
    std::vector<int> without;
    for (std::size_t i = 0; i < model.layers.size(); ++i) {
      if (model.layers[i].spec.rotary_dim == 0) without.push_back(static_cast<int>(i));
    }
    CHECK(without == c.without);
    CHECK(model.layers[0].spec.rotary_dim == 128);
    CHECK(model.layers[3].spec.head_dim == 128);
  }
}

TEST_CASE("M-RoPE's sections and both orders of axes") {
  const ModelRope qwen2 = read_ok(
      R"({"model_type": "qwen2_vl", "hidden_size": 3584, "num_attention_heads": 28, "num_hidden_layers": 28,
          "rope_theta": 1000000.0, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
          "vision_config": {"depth": 32}})");
  const std::int32_t sections2[] = {16, 24, 24};
  const RopeSpec plain2 = value_of(kvblend::plain_rope(128, 1e6));
  CHECK(qwen2.layers[5].spec == value_of(kvblend::with_axes(plain2, sections2, kvblend::AxisOrder::sectioned)));

  const ModelRope qwen3 = read_ok(
      R"({"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text", "head_dim": 128,
          "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 36, "rope_theta": 5000000,
          "rope_scaling": {"mrope_interleaved": true, "mrope_section": [24, 20, 20], "rope_type": "default"}}})");
  const std::int32_t sections3[] = {24, 20, 20};
  const RopeSpec plain3 = value_of(kvblend::plain_rope(128, 5e6));
  CHECK(qwen3.layers[5].spec == value_of(kvblend::with_axes(plain3, sections3, kvblend::AxisOrder::interleaved)));
  CHECK(std::string(kvblend::can_shift(plain3, qwen3.layers[5].spec).status.where()) == "rope axis_of_pair[1]");
}

TEST_CASE("a model type nobody knows is read by the general rules if its pairing is given") {
  const std::string text = small(R"("rope_theta": 20000, "partial_rotary_factor": 0.5)", "my_model");
  CHECK(std::string(read_hf_config(text).status.where()) == "model_type");
  HfOptions options;
  options.pairing = kInterleaved;
  const ModelRope model = read_ok(text, options);
  CHECK(model.layers[0].spec == value_of(kvblend::plain_rope(64, 2e4, kInterleaved, 32)));
  CHECK(model.notes.size() == 1);
  options.model_type = "llama";
  options.pairing.reset();
  CHECK(read_ok(R"({"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1})", options).model == "llama");
}

TEST_CASE("a configuration that cannot be right is refused by the path of the field") {
  const auto nested = [](const std::string& fields) {
    return R"({"model_type": "llava", "text_config": )" + small(fields) + "}";
  };
  const std::string deep(65, '[');
  constexpr auto kInvalid = StatusCode::invalid_argument;
  constexpr auto kMissing = StatusCode::not_found;
  constexpr auto kUnknown = StatusCode::unsupported;
  const struct {
    std::string text;
    StatusCode code;
    const char* where;
  } cases[] = {
      // no configuration
      {"", kInvalid, "configuration"},
      {"{", kInvalid, "configuration"},
      {"[]", kInvalid, "configuration"},
      {"null", kInvalid, "configuration"},
      {R"({"model_type": NaN})", kInvalid, "configuration"},
      {R"({"rope_theta": 1e999})", kInvalid, "configuration"},
      {"{\"model_type\": \"\xff\"}", kInvalid, "configuration"},
      {R"({"a": )" + deep + std::string(65, ']') + "}", kInvalid, "configuration"},
      {R"({"a": )" + std::string(1000000, '['), kInvalid, "configuration"},
      {std::string((std::size_t{16} << 20) + 1, ' '), kInvalid, "configuration"},
      // the model
      {"{}", kMissing, "model_type"},
      {R"({"model_type": 7})", kInvalid, "model_type"},
      {R"({"model_type": "unheard_of"})", kUnknown, "model_type"},
      {R"({"model_type": "bloom"})", kUnknown, "model_type"},
      {R"({"model_type": "mpt"})", kUnknown, "model_type"},
      {R"({"model_type": "gpt2"})", kUnknown, "model_type"},
      {R"({"model_type": "opt"})", kUnknown, "model_type"},
      {R"({"model_type": "t5"})", kUnknown, "model_type"},
      {R"({"model_type": "mamba"})", kUnknown, "model_type"},
      {R"({"model_type": "llava", "text_config": {"model_type": "opt"}})", kUnknown, "text_config.model_type"},
      {R"({"model_type": "llava", "text_config": "vicuna"})", kInvalid, "text_config"},
      {small(R"("alibi": true)", "falcon"), kUnknown, "alibi"},
      // sizes
      {R"({"model_type": "llama"})", kMissing, "num_hidden_layers"},
      {R"({"model_type": "llama", "num_hidden_layers": 2})", kMissing, "hidden_size"},
      {R"({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64})", kMissing, "num_attention_heads"},
      {R"({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 0})", kInvalid,
       "num_attention_heads"},
      {R"({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 5})", kInvalid,
       "num_attention_heads"},
      {R"({"model_type": "llama", "num_hidden_layers": "two"})", kInvalid, "num_hidden_layers"},
      {R"({"model_type": "llama", "num_hidden_layers": -1})", kInvalid, "num_hidden_layers"},
      {R"({"model_type": "llama", "num_hidden_layers": 1.5})", kInvalid, "num_hidden_layers"},
      {R"({"model_type": "llama", "num_hidden_layers": 100000})", kInvalid, "num_hidden_layers"},
      {R"({"model_type": "llama", "num_hidden_layers": 1e300})", kInvalid, "num_hidden_layers"},
      {small(R"("head_dim": -8)"), kInvalid, "head_dim"},
      {small(R"("head_dim": true)"), kInvalid, "head_dim"},
      {nested(R"("head_dim": "64")"), kInvalid, "text_config.head_dim"},
      {small(R"("head_dim": 4096)"), kInvalid, "rope_parameters"},  // more than kvblend's heads
      {small(R"("head_dim": 63)"), kInvalid, "rope_parameters.partial_rotary_factor"},
      {small(R"("max_position_embeddings": 0)"), kInvalid, "max_position_embeddings"},
      {R"({"model_type": "gptj", "n_embd": 64, "n_head": 2, "n_layer": 1})", kMissing, "rotary_dim"},
      {R"({"model_type": "gptj", "n_embd": 64, "n_head": 2, "n_layer": 1, "rotary_dim": 64})", kInvalid, "rotary_dim"},
      {R"({"model_type": "gptj", "n_embd": 64, "n_head": 2, "n_layer": 1, "rotary_dim": 7})", kInvalid, "rotary_dim"},
      // rope
      {small(R"("rope_theta": -1)"), kInvalid, "rope_theta"},
      {small(R"("rope_theta": "10000")"), kInvalid, "rope_theta"},
      {nested(R"("rope_theta": 0)"), kInvalid, "text_config.rope_theta"},
      {small(R"("rope_parameters": {"rope_theta": 0})"), kInvalid, "rope_parameters.rope_theta"},
      {small(R"("rope_scaling": "yarn")"), kInvalid, "rope_scaling"},
      {small(R"("rope_scaling": [])"), kInvalid, "rope_scaling"},
      {small(R"("rope_scaling": {"type": "ntk"})"), kUnknown, "rope_scaling.type"},
      {small(R"("rope_scaling": {"rope_type": "axial"})"), kUnknown, "rope_scaling.rope_type"},
      {small(R"("rope_parameters": {"rope_type": "xdrope"})"), kUnknown, "rope_parameters.rope_type"},
      {small(R"("rope_scaling": {"type": 3})"), kInvalid, "rope_scaling.type"},
      {small(R"("rope_scaling": {"type": "linear"})"), kMissing, "rope_scaling.factor"},
      {small(R"("rope_scaling": {"type": "linear", "factor": 0})"), kInvalid, "rope_scaling.factor"},
      {small(R"("rope_scaling": {"type": "linear", "factor": "8"})"), kInvalid, "rope_scaling.factor"},
      {small(R"("rope_scaling": {"type": "dynamic"})"), kMissing, "rope_scaling.factor"},
      {small(R"("rope_scaling": {"type": "yarn"})"), kMissing, "rope_scaling.factor"},
      {small(R"("rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": -1})"), kInvalid, "rope_scaling.beta_fast"},
      {small(R"("rope_scaling": {"type": "yarn", "factor": 4, "truncate": 1})"), kInvalid, "rope_scaling.truncate"},
      {small(R"("rope_scaling": {"type": "yarn", "factor": 4, "attention_factor": -2})"), kInvalid,
       "rope_scaling.attention_factor"},
      {small(R"("rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 1, "beta_slow": 32})"), kInvalid,
       "rope_scaling"},
      {small(R"("rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 1})"), kMissing,
       "rope_scaling.high_freq_factor"},
      {small(R"("rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4})"),
       kInvalid, "rope_scaling"},
      {small(R"("rope_scaling": {"type": "longrope", "short_factor": [1, 1]})"), kMissing, "rope_scaling.long_factor"},
      {small(R"("rope_scaling": {"type": "longrope", "short_factor": [1, "1"], "long_factor": []})"), kInvalid,
       "rope_scaling.short_factor[1]"},
      {small(R"("rope_scaling": {"type": "longrope", "short_factor": [1, 1], "long_factor": [1, 1]})"),
       StatusCode::mismatch, "rope_scaling"},
      {small(R"("partial_rotary_factor": 0.5)"), kUnknown, "partial_rotary_factor"},
      {small(R"("partial_rotary_factor": 1.5)", "phi"), kInvalid, "partial_rotary_factor"},
      {small(R"("rope_parameters": {"partial_rotary_factor": 0.01})", "phi"), kInvalid,
       "rope_parameters.partial_rotary_factor"},
      {small(R"("rope_parameters": {"partial_rotary_factor": 0.05})", "phi"), kInvalid,
       "rope_parameters.partial_rotary_factor"},
      {small(R"("rope_scaling": {"mrope_section": [16, 8]})"), kInvalid, "rope_scaling.mrope_section"},
      {small(R"("rope_scaling": {"mrope_section": [16, 8, 9]})"), StatusCode::mismatch, "rope_scaling.mrope_section"},
      {small(R"("rope_scaling": {"mrope_section": "16"})"), kInvalid, "rope_scaling.mrope_section"},
      // layers
      {small(R"("layer_types": ["full_attention", "full_attention"])"), StatusCode::mismatch, "layer_types"},
      {small(R"("layer_types": ["linear_attention"])"), kUnknown, "layer_types[0]"},
      {small(R"("layer_types": [1])"), kInvalid, "layer_types[0]"},
      {small(R"("rope_parameters": {"sliding_attention": {}})"), kMissing, "rope_parameters.full_attention"},
      {small(R"("no_rope_layers": [1, 0])", "smollm3"), StatusCode::mismatch, "no_rope_layers"},
      {small(R"("no_rope_layer_interval": 0)", "smollm3"), kInvalid, "no_rope_layer_interval"},
      {small(R"("sliding_window_pattern": "LLLG")", "exaone4"), kInvalid, "sliding_window_pattern"},
      {small(R"("rope_parameters": {"rope_theta": 1000})", "gemma3"), kMissing, "rope_parameters.full_attention"},
      {small(R"("rope_parameters": {"full_attention": 1})", "gemma3"), kInvalid, "rope_parameters.full_attention"},
      {small(R"("rope_parameters": {"rope_theta": 1000})", "gemma4"), kMissing, "rope_parameters.full_attention"},
      {small(R"("global_head_dim": 0)", "gemma4"), kInvalid, "global_head_dim"},
      {small(R"("per_layer_config": {"0": {"head_dim": -2}})", "gemma4"), kInvalid, "per_layer_config.0.head_dim"},
      // latent attention
      {small("", "deepseek_v3"), kMissing, "qk_rope_head_dim"},
      {small(R"("qk_rope_head_dim": 64)", "deepseek_v3"), kMissing, "kv_lora_rank"},
      {small(R"("qk_rope_head_dim": 64, "kv_lora_rank": 2000)", "deepseek_v3"), kInvalid, "kv_lora_rank"},
      {small(R"("qk_rope_head_dim": 64, "kv_lora_rank": 512, "rope_interleave": 1)", "deepseek_v3"), kInvalid,
       "rope_interleave"},
  };
  for (const auto& c : cases) {
    INFO(c.text.substr(0, 300));
    const auto read = read_hf_config(c.text);
    INFO("got " << std::string(read.status.where()) << ": " << std::string(read.status.message()));
    CHECK(read.status.code() == c.code);
    CHECK(read.status.where() == std::string(c.where));
    CHECK(std::string(read.status.message()).size() > 4);
  }
}

TEST_CASE("a path longer than a status holds keeps the field's name") {
  const std::string text = R"({"model_type": "llava", "text_config": )" +
                           small(R"("layer_types": ["full_attention"], "rope_parameters": {"full_attention":
                                 {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": "4k"}})") +
                           "}";
  const auto read = read_hf_config(text);
  const std::string where = read.status.where();
  CHECK(where.starts_with("..."));
  CHECK(where.ends_with("full_attention.original_max_position_embeddings"));
}

TEST_CASE("files that cannot be read, and a negative length") {
  CHECK(rope_config::read_hf_config_file("/no/such/config.json").status.code() == StatusCode::io_error);
  CHECK(rope_config::read_hf_config_file("/").status.code() == StatusCode::io_error);
  HfOptions options;
  options.length = -1;
  CHECK(read_hf_config("{}", options).status.where() == std::string("length"));
}
