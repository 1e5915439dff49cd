// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <rope_config/gguf_architectures.hpp>
#include <rope_config/model_rope.hpp>

namespace rope_config {

namespace {

using Layers = GgufLayers;
using Pairing = GgufPairing;

constexpr GgufArchitecture layered(const char* name, Pairing pairing, Layers layers, std::int32_t period,
                                   bool needs_window = false) {
  GgufArchitecture architecture{name, pairing};
  architecture.layers = layers;
  architecture.period = period;
  architecture.needs_window = needs_window;
  return architecture;
}

constexpr GgufArchitecture granite(const char* name) {
  GgufArchitecture architecture{name, Pairing::norm};
  architecture.may_lack_rope = true;
  return architecture;
}

constexpr GgufArchitecture gemma4() {
  GgufArchitecture architecture = layered("gemma4", Pairing::neox, Layers::sliding_own, 0);
  architecture.divides_full_only = true;
  return architecture;
}

constexpr GgufArchitecture deepseek2() {
  GgufArchitecture architecture{"deepseek2", Pairing::norm};
  architecture.log_multiplier_scale = 10;  // converters write a tenth of it
  architecture.mscale_cancels = true;
  return architecture;
}

constexpr GgufArchitecture mistral3() {
  GgufArchitecture architecture{"mistral3", Pairing::norm};
  architecture.reads_betas = true;
  architecture.log_multiplier_scale = 1;
  return architecture;
}

constexpr GgufArchitecture kArchitectures[] = {
    {"llama", Pairing::norm},
    {"internlm2", Pairing::norm},
    {"minicpm", Pairing::norm},
    {"xverse", Pairing::norm},
    {"command-r", Pairing::norm},
    {"olmo", Pairing::norm},
    {"arctic", Pairing::norm},
    {"deepseek", Pairing::norm},
    {"chatglm", Pairing::norm},
    {"chameleon", Pairing::norm},
    {"bailingmoe", Pairing::norm},
    {"arcee", Pairing::norm},
    {"ernie4_5", Pairing::norm},
    {"ernie4_5-moe", Pairing::norm},
    {"maincoder", Pairing::norm},
    {"falcon", Pairing::neox},
    {"gptneox", Pairing::neox},
    {"stablelm", Pairing::neox},
    {"qwen", Pairing::neox},
    {"qwen2", Pairing::neox},
    {"qwen2moe", Pairing::neox},
    {"qwen3", Pairing::neox},
    {"qwen3moe", Pairing::neox},
    {"dream", Pairing::neox},
    {"olmoe", Pairing::neox},
    {"phi2", Pairing::neox},
    {"phi3", Pairing::neox},
    {"phimoe", Pairing::neox},
    {"gemma", Pairing::neox},
    {"starcoder2", Pairing::neox},
    {"openelm", Pairing::neox},
    {"codeshell", Pairing::neox},
    {"orion", Pairing::neox},
    {"nemotron", Pairing::neox},
    {"exaone", Pairing::neox},
    {"seed_oss", Pairing::neox},
    {"dots1", Pairing::neox},
    {"hunyuan-moe", Pairing::neox},
    {"hunyuan-dense", Pairing::neox},
    {"apertus", Pairing::neox},
    {"minimax-m2", Pairing::neox},
    {"bitnet", Pairing::neox},
    {"jais2", Pairing::neox},
    {"minicpm3", Pairing::neox},
    {"qwen2vl", Pairing::mrope},
    {"qwen3vl", Pairing::imrope},
    {"qwen3vlmoe", Pairing::imrope},
    {"glm4", Pairing::norm_or_mrope},
    {"glm4moe", Pairing::neox_or_mrope},
    granite("granite"),
    granite("granitemoe"),
    deepseek2(),
    mistral3(),
    layered("smollm3", Pairing::norm, Layers::every_fourth_without, 0),
    layered("llama4", Pairing::norm, Layers::sliding_only, 4),
    layered("cohere2", Pairing::norm, Layers::sliding_only, 4),
    layered("exaone-moe", Pairing::neox, Layers::sliding_only, 4),
    layered("exaone4", Pairing::neox, Layers::sliding_only_of_64, 4),
    layered("gemma2", Pairing::neox, Layers::sliding_alike, 2),
    layered("gpt-oss", Pairing::neox, Layers::sliding_alike, 2),
    layered("gemma3", Pairing::neox, Layers::sliding_own, 6, true),
    layered("gemma3n", Pairing::neox, Layers::sliding_own, 5),
    gemma4(),
    layered("olmo2", Pairing::neox, Layers::sliding_plain, 4, true),
};

struct Reason {
  const char* name;
  const char* reason;
};

constexpr Reason kReasons[] = {
    {"bloom", kAlibi},     {"mpt", kAlibi},        {"jais", kAlibi},      {"refact", kAlibi},
    {"gpt2", kAdded},      {"starcoder", kAdded},  {"t5", kBias},         {"t5encoder", kBias},
    {"mamba", kRecurrent}, {"mamba2", kRecurrent}, {"rwkv6", kRecurrent}, {"rwkv6qwen2", kRecurrent},
    {"rwkv7", kRecurrent}, {"arwkv7", kRecurrent},
};

}  // namespace

const GgufArchitecture* find_gguf_architecture(std::string_view name) {
  for (const GgufArchitecture& architecture : kArchitectures) {
    if (name == architecture.name) return &architecture;
  }
  return nullptr;
}

const char* why_gguf_has_no_rope(std::string_view name) {
  for (const Reason& reason : kReasons) {
    if (name == reason.name) return reason.reason;
  }
  return nullptr;
}

}  // namespace rope_config
