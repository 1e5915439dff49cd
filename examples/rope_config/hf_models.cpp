// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <rope_config/hf_models.hpp>
#include <rope_config/model_rope.hpp>

namespace rope_config {

namespace {

constexpr auto kNeox = HfPairing::neox;
constexpr auto kInterleaved = HfPairing::interleaved;
constexpr auto kByField = HfPairing::by_field;

constexpr std::int32_t kQwen2Sections[] = {16, 24, 24};
constexpr std::int32_t kQwen3Sections[] = {24, 20, 20};

constexpr HfModel alike(const char* type, HfPairing pairing, double theta = 10000, std::int32_t head_dim = 0,
                        double partial = 0) {
  HfModel model{type};
  model.pairing = pairing;
  model.theta = theta;
  model.head_dim = head_dim;
  model.partial = partial;
  return model;
}

constexpr HfModel by_rotary_dim(const char* type) {
  HfModel model = alike(type, kInterleaved, 10000, 0, 1);
  model.by_rotary_dim = true;
  return model;
}

constexpr HfModel layered(const char* type, HfLayers layers, HfPairing pairing, double theta, std::int32_t head_dim,
                          std::int32_t period, const char* period_field) {
  HfModel model = alike(type, pairing, theta, head_dim);
  model.layers = layers;
  model.period = period;
  model.period_field = period_field;
  return model;
}

constexpr HfModel local_and_global(const char* type, HfLayers layers, double theta, double local_theta,
                                   std::int32_t head_dim, std::int32_t period, const char* period_field) {
  HfModel model = layered(type, layers, kNeox, theta, head_dim, period, period_field);
  model.local_theta = local_theta;
  return model;
}

constexpr HfModel latent(const char* type, HfPairing pairing, double theta = 10000) {
  HfModel model = alike(type, pairing, theta);
  model.latent = true;
  return model;
}

constexpr HfModel multimodal(const char* type, double theta, std::int32_t head_dim, const std::int32_t* sections,
                             bool axes_interleaved) {
  HfModel model = alike(type, kNeox, theta, head_dim);
  model.sections = sections;
  model.axes_interleaved = axes_interleaved;
  return model;
}

constexpr HfModel kModels[] = {
    alike("llama", kNeox),
    alike("mistral", kNeox),
    alike("ministral", kNeox),
    alike("ministral3", kNeox, 10000, 128),
    alike("mixtral", kNeox, 1e6),
    alike("qwen2", kNeox),
    alike("qwen2_moe", kNeox),
    alike("qwen3", kNeox, 10000, 128),
    alike("qwen3_moe", kNeox),
    alike("gemma", kNeox, 10000, 256),
    alike("gemma2", kNeox, 10000, 256),
    alike("vaultgemma", kNeox, 10000, 256),
    alike("phi", kNeox, 10000, 0, 0.5),
    alike("phi3", kNeox, 10000, 0, 1),
    alike("phimoe", kNeox, 1e6),
    alike("gpt_neox", kNeox, 10000, 0, 0.25),
    alike("gpt_neox_japanese", kNeox, 10000, 0, 1),
    alike("stablelm", kNeox, 10000, 0, 0.25),
    alike("persimmon", kNeox, 10000, 0, 0.5),
    alike("nemotron", kNeox, 10000, 0, 0.5),
    alike("falcon", kNeox),
    alike("starcoder2", kNeox),
    alike("olmo", kNeox),
    alike("olmo2", kNeox),
    alike("olmoe", kNeox),
    alike("flex_olmo", kNeox, 5e5),
    alike("granite", kNeox),
    alike("granitemoe", kNeox),
    alike("granitemoeshared", kNeox),
    alike("gpt_oss", kNeox, 150000, 64),
    alike("glm4_moe", kNeox, 10000, 0, 0.5),
    alike("seed_oss", kNeox, 10000, 128),
    alike("arcee", kNeox),
    alike("apertus", kNeox, 12e6),
    alike("bitnet", kNeox, 5e5),
    alike("cwm", kNeox, 1e6, 128),
    alike("diffllama", kNeox),
    alike("dots1", kNeox),
    alike("hunyuan_v1_dense", kNeox),
    alike("hunyuan_v1_moe", kNeox),
    alike("hy_v3", kNeox, 11158840, 128),
    alike("jais2", kNeox),
    alike("minimax_m2", kNeox, 5e6, 128, 1),
    alike("solar_open", kNeox, 1e6, 128, 1),
    by_rotary_dim("gptj"),
    by_rotary_dim("codegen"),
    alike("cohere", kInterleaved, 5e5),
    alike("glm", kInterleaved, 10000, 128, 0.5),
    alike("glm4", kInterleaved, 10000, 128, 0.5),
    alike("ernie4_5", kInterleaved, 5e5, 128),
    alike("ernie4_5_moe", kInterleaved, 5e5),
    alike("helium", kInterleaved, 1e5, 128),
    layered("smollm3", HfLayers::no_rope_list, kNeox, 2e6, 0, 4, "no_rope_layer_interval"),
    layered("llama4", HfLayers::no_rope_list, kInterleaved, 5e5, 128, 4, "no_rope_layer_interval"),
    layered("cohere2", HfLayers::sliding_only, kInterleaved, 10000, 0, 4, "sliding_window_pattern"),
    layered("afmoe", HfLayers::sliding_only, kNeox, 10000, 128, 4, "global_attn_every_n_layers"),
    layered("exaone4", HfLayers::sliding_if_window, kNeox, 10000, 0, 4, "sliding_window_pattern"),
    layered("exaone_moe", HfLayers::sliding_if_window, kNeox, 10000, 0, 4, "sliding_window_pattern"),
    local_and_global("gemma3", HfLayers::local_and_global, 1e6, 1e4, 256, 6, "sliding_window_pattern"),
    local_and_global("gemma3n", HfLayers::local_and_global, 1e6, 1e4, 256, 5, nullptr),
    local_and_global("olmo3", HfLayers::local_and_global, 5e5, 5e5, 0, 4, nullptr),
    local_and_global("gemma4", HfLayers::gemma4, 1e6, 1e4, 256, 6, nullptr),
    latent("deepseek_v2", kInterleaved),
    latent("deepseek_v3", kByField),
    latent("kimi_k2", kByField),  // deepseek_v3 by another name
    latent("glm4_moe_lite", kByField),
    latent("minicpm3", kNeox),
    multimodal("qwen2_vl", 1e6, 0, kQwen2Sections, false),
    multimodal("qwen2_5_vl", 1e6, 0, kQwen2Sections, false),
    multimodal("qwen3_vl", 5e5, 128, kQwen3Sections, true),
    multimodal("qwen3_vl_moe", 5e5, 0, kQwen3Sections, true),
};

struct Reason {
  const char* type;
  const char* reason;
};

constexpr Reason kReasons[] = {
    {"bloom", kAlibi},    {"mpt", kAlibi},         {"gpt2", kAdded},       {"openai-gpt", kAdded},
    {"gpt_neo", kAdded},  {"gpt_bigcode", kAdded}, {"opt", kAdded},        {"biogpt", kAdded},
    {"xglm", kAdded},     {"ctrl", kAdded},        {"bart", kAdded},       {"mbart", kAdded},
    {"pegasus", kAdded},  {"whisper", kAdded},     {"t5", kBias},          {"mt5", kBias},
    {"umt5", kBias},      {"mamba", kRecurrent},   {"mamba2", kRecurrent}, {"falcon_mamba", kRecurrent},
    {"rwkv", kRecurrent}, {"xlstm", kRecurrent},
};

}  // namespace

const HfModel* find_hf_model(std::string_view type) {
  constexpr std::string_view kText = "_text";
  if (type.ends_with(kText)) type.remove_suffix(kText.size());
  for (const HfModel& model : kModels) {
    if (type == model.type) return &model;
  }
  return nullptr;
}

const char* why_no_rope(std::string_view type) {
  for (const Reason& reason : kReasons) {
    if (type == reason.type) return reason.reason;
  }
  return nullptr;
}

}  // namespace rope_config
