// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What the reader makes of GGUF files equals what llama.cpp does with them. Small random models of several
// architectures are run over one token, many times: all that tells the keys of a layer apart then is where they stand.
// So the key at position p, caught as llama.cpp's graph computes it, is the key at 0 turned by the spec.
#include <doctest/doctest.h>
#include <kvblend/rope/builders.hpp>
#include <rope_config/gguf_rope.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <sstream>

#include "engine/gguf_fixture.hpp"

#include "ggml-backend.h"

using gguf_fixture::TemporaryFile;
using kvblend::RopePairing;
using kvblend::RopeSpec;
using kvblend::Status;
using kvblend::StatusCode;
using rope_config::GgufOptions;
using rope_config::ModelRope;
using rope_config::read_gguf_rope;

namespace {

constexpr std::int32_t kHidden = 256;
constexpr std::int32_t kHeads = 4;
constexpr std::int32_t kKeyHeads = 2;
constexpr std::int32_t kForward = 96;
constexpr std::int32_t kVocabulary = 64;
constexpr std::int32_t kTokens = 200;
constexpr std::int32_t kRank = 128;  // DeepSeek's latent
constexpr std::int32_t kRopePart = 32;

using Change = std::function<void(gguf_context*)>;
using Divisors = std::map<std::string, std::vector<float>>;

struct Architecture {
  std::string name;
  std::int32_t layers;
  std::string tensors;  // of a layer, less ".weight"
  Change keys;
};

const char* const kLlama = "attn_norm attn_q attn_k attn_v attn_output ffn_norm ffn_gate ffn_down ffn_up";
const char* const kGemma =
    "attn_norm attn_q attn_k attn_v attn_output post_attention_norm ffn_norm ffn_gate ffn_down ffn_up post_ffw_norm";

void set_number(gguf_context* f, const std::string& key, double value) {
  gguf_set_val_f32(f, key.c_str(), static_cast<float>(value));
}
void set_integer(gguf_context* f, const std::string& key, std::int32_t value) {
  gguf_set_val_u32(f, key.c_str(), static_cast<std::uint32_t>(value));
}

// Rows after columns, as ggml has them.
std::vector<std::int64_t> shape_of(const Architecture& a, const std::string& tensor, std::int32_t head_dim) {
  const std::int32_t keys = (a.name == "gptneox" ? kHeads : kKeyHeads) * head_dim;
  const bool whole = a.name == "olmo2";  // norms over all heads
  const std::map<std::string, std::vector<std::int64_t>> shapes = {
      {"attn_q", {kHidden, kHeads * head_dim}},
      {"attn_k", {kHidden, keys}},
      {"attn_v", {kHidden, keys}},
      {"attn_qkv", {kHidden, kHeads * head_dim + 2 * keys}},
      {"attn_output", {kHeads * head_dim, kHidden}},
      {"ffn_gate", {kHidden, kForward}},
      {"ffn_up", {kHidden, kForward}},
      {"ffn_down", {kForward, kHidden}},
      {"attn_q_norm", {whole ? kHidden : head_dim}},
      {"attn_k_norm", {whole ? keys : head_dim}},
      {"attn_q_a", {kHidden, 64}},
      {"attn_q_a_norm", {64}},
      {"attn_q_b", {64, kHeads * (64 + kRopePart)}},
      {"attn_kv_a_mqa", {kHidden, kRank + kRopePart}},
      {"attn_kv_a_norm", {kRank}},
      {"attn_k_b", {64, kRank, kHeads}},
      {"attn_v_b", {kRank, 64, kHeads}},
  };
  const auto found = shapes.find(tensor);
  if (found != shapes.end()) return found->second;
  return {kHidden};
}

void write_model(const char* path, const Architecture& a, const Change& change, const Divisors& divisors) {
  const std::unique_ptr<ggml_context, decltype(&ggml_free)> tensors(ggml_init({std::size_t{64} << 20, nullptr, false}),
                                                                    ggml_free);
  const std::unique_ptr<gguf_context, decltype(&gguf_free)> file(gguf_init_empty(), gguf_free);
  gguf_context* f = file.get();
  gguf_set_val_str(f, "general.architecture", a.name.c_str());
  const auto key = [&](const char* suffix) { return a.name + "." + suffix; };
  const std::int32_t head_dim = kHidden / kHeads;
  set_integer(f, key("block_count"), a.layers);
  set_integer(f, key("embedding_length"), kHidden);
  set_integer(f, key("feed_forward_length"), kForward);
  set_integer(f, key("attention.head_count"), kHeads);
  set_integer(f, key("attention.head_count_kv"), kKeyHeads);
  set_integer(f, key("context_length"), 4096);
  set_integer(f, key("vocab_size"), kVocabulary);
  set_number(f, key("attention.layer_norm_rms_epsilon"), 1e-5);
  set_number(f, key("attention.layer_norm_epsilon"), 1e-5);
  gguf_set_val_str(f, "tokenizer.ggml.model", "no_vocab");
  if (a.keys) a.keys(f);
  if (change) change(f);

  std::mt19937 generator(7);
  const auto add = [&](const std::string& name, const std::vector<std::int64_t>& shape, const float* values) {
    ggml_tensor* tensor = ggml_new_tensor(tensors.get(), GGML_TYPE_F32, static_cast<int>(shape.size()), shape.data());
    ggml_set_name(tensor, name.c_str());
    auto* data = static_cast<float*>(tensor->data);
    const bool is_norm = shape.size() == 1;
    const float scale = is_norm ? 0.2f : 2.0f / std::sqrt(static_cast<float>(shape[0]));
    for (std::int64_t i = 0; i < ggml_nelements(tensor); ++i) {
      const float random = static_cast<float>(generator()) * 0x1p-32f - 0.5f;
      data[i] = values != nullptr ? values[i] : (is_norm ? 1.0f : 0.0f) + scale * random;
    }
    gguf_add_tensor(f, tensor);
  };
  add("token_embd.weight", {kHidden, kVocabulary}, nullptr);
  add("output_norm.weight", {kHidden}, nullptr);
  const bool has_biases = a.name == "gptneox";
  if (has_biases) add("output_norm.bias", {kHidden}, nullptr);
  if (has_biases || a.name == "olmo2") add("output.weight", {kHidden, kVocabulary}, nullptr);
  for (std::int32_t i = 0; i < a.layers; ++i) {
    std::istringstream names(a.tensors);
    for (std::string name; names >> name;) {
      const std::string full = "blk." + std::to_string(i) + "." + name;
      const auto shape = shape_of(a, name, head_dim);
      add(full + ".weight", shape, nullptr);
      if (has_biases) add(full + ".bias", {shape.back()}, nullptr);
    }
  }
  for (const auto& [name, values] : divisors) {
    add(name, {static_cast<std::int64_t>(values.size())}, values.data());
  }
  REQUIRE(gguf_write_to_file(f, path, false));
}

// By layer, the keys that llama.cpp rotated: [tokens, heads, values].
struct Keys {
  std::map<int, std::vector<float>> of_layer;
  std::map<int, std::int64_t> width;
};

bool catch_keys(ggml_tensor* tensor, bool ask, void* into) {
  const bool is_key = std::strncmp(tensor->name, "Kcur-", 5) == 0 || std::strncmp(tensor->name, "k_pe-", 5) == 0;
  if (tensor->op != GGML_OP_ROPE || !is_key) return !ask;
  if (ask) return true;
  const int layer = std::atoi(tensor->name + 5);
  auto& keys = *static_cast<Keys*>(into);
  auto& values = keys.of_layer[layer];
  values.resize(static_cast<std::size_t>(ggml_nelements(tensor)));
  ggml_backend_tensor_get(tensor, values.data(), 0, ggml_nbytes(tensor));
  keys.width[layer] = tensor->ne[0];
  return true;
}

Keys run_llama(const char* path, std::uint32_t context_size) {
  eigen_engine::silence_llama();
  llama_model_params model_params = llama_model_default_params();
  model_params.use_extra_bufts = false;
  const std::unique_ptr<llama_model, decltype(&llama_model_free)> model(llama_model_load_from_file(path, model_params),
                                                                        llama_model_free);
  REQUIRE(model != nullptr);
  Keys keys;
  llama_context_params params = llama_context_default_params();
  params.n_ctx = context_size;
  params.n_batch = params.n_ubatch = 256;
  params.n_threads = params.n_threads_batch = 2;
  params.type_k = params.type_v = GGML_TYPE_F32;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
  params.cb_eval = catch_keys;
  params.cb_eval_user_data = &keys;
  const std::unique_ptr<llama_context, decltype(&llama_free)> context(llama_init_from_model(model.get(), params),
                                                                      llama_free);
  REQUIRE(context != nullptr);
  llama_batch batch = llama_batch_init(kTokens, 0, 1);
  batch.n_tokens = kTokens;
  for (std::int32_t i = 0; i < kTokens; ++i) {
    batch.token[i] = 5;
    batch.pos[i] = i;
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = 0;
    batch.logits[i] = i == kTokens - 1;
  }
  const int status = llama_decode(context.get(), batch);
  llama_batch_free(batch);
  REQUIRE(status == 0);
  return keys;
}

// Largest difference of the keys llama.cpp has at each position from its key at 0, turned by the spec; relative to the
// key's length. A reader that is wrong in a frequency, the pairing or an offset is off by far more than its rounding.
double worst_turn(const RopeSpec& whole, const std::vector<float>& keys, std::int64_t width) {
  RopeSpec spec = whole;
  if (width < spec.head_dim) spec.rotary_offset -= spec.head_dim - static_cast<std::int32_t>(width);  // the rope part
  const auto values = static_cast<std::size_t>(width);
  const std::size_t row = keys.size() / kTokens;
  double worst = 0;
  for (std::size_t at = 0; at < row; at += values) {
    double length = 0;
    for (std::size_t j = 0; j < values; ++j)
      length += static_cast<double>(keys[at + j]) * static_cast<double>(keys[at + j]);
    length = std::sqrt(length / static_cast<double>(values));
    for (std::size_t p = 0; p < kTokens; ++p) {
      std::vector<double> turned(keys.begin() + static_cast<std::ptrdiff_t>(at),
                                 keys.begin() + static_cast<std::ptrdiff_t>(at + values));
      for (std::int32_t pair = 0; pair < spec.pairs(); ++pair) {
        const bool neox = spec.pairing == RopePairing::neox;
        const auto first = static_cast<std::size_t>(spec.rotary_offset + (neox ? pair : 2 * pair));
        const auto second = first + static_cast<std::size_t>(neox ? spec.pairs() : 1);
        const double angle = static_cast<double>(p) * spec.inv_freq[static_cast<std::size_t>(pair)];
        const double a = turned[first];
        const double b = turned[second];
        turned[first] = a * std::cos(angle) - b * std::sin(angle);
        turned[second] = b * std::cos(angle) + a * std::sin(angle);
      }
      for (std::size_t j = 0; j < values; ++j) {
        worst = std::max(worst, std::abs(turned[j] - static_cast<double>(keys[p * row + at + j])) / length);
      }
    }
  }
  return worst;
}

// The magnitude llama.cpp has at position 0, where nothing turns: the rotated values of `keys` over those of `plain`.
double magnitude(const RopeSpec& whole, const std::vector<float>& keys, const std::vector<float>& plain,
                 std::int64_t width) {
  const auto begin = static_cast<std::size_t>(width < whole.head_dim ? 0 : whole.rotary_offset);
  double up = 0;
  double down = 0;
  for (std::size_t i = begin; i < begin + static_cast<std::size_t>(whole.rotary_dim); ++i) {
    up += static_cast<double>(keys[i]) * static_cast<double>(plain[i]);
    down += static_cast<double>(plain[i]) * static_cast<double>(plain[i]);
  }
  return up / down;
}

std::vector<float> rising(std::size_t count, float step) {
  std::vector<float> values;
  for (std::size_t i = 0; i < count; ++i) values.push_back(1 + step * static_cast<float>(i));
  return values;
}

Change yarn(const std::string& name, double factor, std::int32_t original) {
  return [=](gguf_context* f) {
    gguf_set_val_str(f, (name + ".rope.scaling.type").c_str(), "yarn");
    set_number(f, name + ".rope.scaling.factor", factor);
    set_integer(f, name + ".rope.scaling.original_context_length", original);
  };
}

Change both(const Change& a, const Change& b) {
  return [=](gguf_context* f) {
    a(f);
    b(f);
  };
}

Architecture llama() { return {"llama", 2, kLlama, {}}; }
Architecture gemma3() {
  return {"gemma3", 6, std::string(kGemma) + " attn_q_norm attn_k_norm", [](gguf_context* f) {
            set_integer(f, "gemma3.attention.sliding_window", 512);
            set_number(f, "gemma3.rope.freq_base", 1e6);
          }};
}
Architecture olmo2() {
  return {"olmo2", 4,
          "attn_q attn_k attn_v attn_output attn_q_norm attn_k_norm post_attention_norm ffn_gate ffn_up "
          "ffn_down post_ffw_norm",
          [](gguf_context* f) { set_integer(f, "olmo2.attention.sliding_window", 512); }};
}
Architecture cohere2() {
  return {"cohere2", 4, "attn_norm attn_q attn_k attn_v attn_output ffn_gate ffn_up ffn_down", [](gguf_context* f) {
            set_integer(f, "cohere2.attention.sliding_window", 512);
            set_number(f, "cohere2.logit_scale", 1);
          }};
}
Architecture gptneox() {
  return {"gptneox", 2, "attn_norm attn_qkv attn_output ffn_norm ffn_down ffn_up", [](gguf_context* f) {
            gguf_set_val_bool(f, "gptneox.use_parallel_residual", true);
            set_integer(f, "gptneox.attention.head_count_kv", kHeads);
            set_integer(f, "gptneox.rope.dimension_count", 16);
          }};
}
Architecture with_sections(const std::string& name, std::vector<std::int32_t> sections) {
  const std::string tensors = std::string(kLlama) + (name == "qwen3vl" ? " attn_q_norm attn_k_norm" : "");
  return {name, 2, tensors, [=](gguf_context* f) {
            gguf_set_arr_data(f, (name + ".rope.dimension_sections").c_str(), GGUF_TYPE_INT32, sections.data(),
                              sections.size());
          }};
}
Architecture deepseek2() {
  return {"deepseek2", 2,
          "attn_norm attn_q_a attn_q_a_norm attn_q_b attn_kv_a_mqa attn_kv_a_norm attn_k_b attn_v_b "
          "attn_output ffn_norm ffn_gate ffn_down ffn_up",
          [](gguf_context* f) {
            const std::string n = "deepseek2.";
            set_integer(f, n + "attention.head_count_kv", 1);
            set_integer(f, n + "attention.q_lora_rank", 64);
            set_integer(f, n + "attention.kv_lora_rank", kRank);
            set_integer(f, n + "attention.key_length", kRank + kRopePart);
            set_integer(f, n + "attention.value_length", kRank);
            set_integer(f, n + "attention.key_length_mla", 64 + kRopePart);
            set_integer(f, n + "attention.value_length_mla", 64);
            set_integer(f, n + "rope.dimension_count", kRopePart);
            set_integer(f, n + "leading_dense_block_count", 2);
            set_integer(f, n + "expert_feed_forward_length", kForward);
            set_integer(f, n + "expert_shared_count", 1);
          }};
}

}  // namespace

TEST_CASE("keys that llama.cpp rotates turn by the spec read from the file") {
  const auto number = [](const std::string& key, double value) {
    return Change([=](gguf_context* f) { set_number(f, key, value); });
  };
  const auto text = [](const std::string& key, const std::string& value) {
    return Change([=](gguf_context* f) { gguf_set_val_str(f, key.c_str(), value.c_str()); });
  };
  const Divisors divided = {{"rope_freqs.weight", rising(32, 0.3f)}};
  const Divisors lists = {{"rope_factors_short.weight", rising(32, 0.05f)},
                          {"rope_factors_long.weight", rising(32, 0.9f)}};
  const Change longrope = both(text("llama.rope.scaling.type", "longrope"),
                               both(number("llama.rope.scaling.attn_factor", 1.19), [](gguf_context* f) {
                                 set_integer(f, "llama.rope.scaling.original_context_length", 512);
                               }));
  struct Case {
    std::string name;
    Architecture architecture;
    Change change;
    Divisors divisors;
    std::uint32_t context;
    const char* family;  // of the first layer
  };
  const Case cases[] = {
      {"llama", llama(), {}, {}, 512, "plain"},
      {"llama, base", llama(), number("llama.rope.freq_base", 5e5), {}, 512, "plain"},
      {"llama, linear",
       llama(),
       both(text("llama.rope.scaling.type", "linear"), number("llama.rope.scaling.factor", 4)),
       {},
       512,
       "linear"},
      {"llama, linear by the old key", llama(), number("llama.rope.scale_linear", 4), {}, 512, "linear"},
      {"llama, a factor without a type that takes it",
       llama(),
       both(text("llama.rope.scaling.type", "none"), number("llama.rope.scaling.factor", 4)),
       {},
       512,
       "plain"},
      {"llama 3", llama(), {}, divided, 512, "llama3"},
      {"llama, yarn", llama(), yarn("llama", 4, 256), {}, 512, "yarn"},
      {"llama, yarn with a factor on the magnitude",
       llama(),
       both(yarn("llama", 4, 256), number("llama.rope.scaling.attn_factor", 0.8)),
       {},
       512,
       "yarn"},
      {"llama, yarn with keys it does not read",
       llama(),
       both(yarn("llama", 4, 256), both(number("llama.rope.scaling.yarn_beta_fast", 8),
                                        number("llama.rope.scaling.yarn_log_multiplier", 0.7))),
       {},
       512,
       "yarn"},
      {"longrope, short", llama(), longrope, lists, 512, "longrope"},
      {"longrope, long", llama(), longrope, lists, 768, "longrope"},
      {"qwen2", {"qwen2", 2, kLlama, {}}, number("qwen2.rope.freq_base", 1e6), {}, 512, "plain"},
      {"qwen2, yarn", {"qwen2", 2, kLlama, {}}, yarn("qwen2", 4, 128), {}, 512, "yarn"},
      {"mistral3, yarn with its own betas and multiplier",
       {"mistral3", 2, kLlama, {}},
       both(yarn("mistral3", 16, 256), both(number("mistral3.rope.scaling.yarn_beta_fast", 4),
                                            number("mistral3.rope.scaling.yarn_log_multiplier", 0.5))),
       {},
       512,
       "yarn"},
      {"smollm3: layers without rope", {"smollm3", 5, kLlama, {}}, {}, {}, 512, "plain"},
      {"cohere2: only sliding layers", cohere2(), {}, {}, 512, "plain"},
      {"gemma3: local and global",
       gemma3(),
       both(text("gemma3.rope.scaling.type", "linear"), number("gemma3.rope.scaling.factor", 8)),
       {},
       512,
       "plain"},
      {"gemma3: a local base", gemma3(), number("gemma3.rope.freq_base_swa", 500), {}, 512, "plain"},
      {"gemma2",
       {"gemma2", 2, kGemma, [](gguf_context* f) { set_integer(f, "gemma2.attention.sliding_window", 512); }},
       {},
       {},
       512,
       "plain"},
      {"olmo2: only full attention layers are scaled", olmo2(), yarn("olmo2", 8, 256), {}, 512, "plain"},
      {"gptneox: part of the head", gptneox(), {}, {}, 512, "plain"},
      {"qwen2vl", with_sections("qwen2vl", {8, 12, 12, 0}), {}, {}, 512, "plain"},
      {"qwen3vl", with_sections("qwen3vl", {12, 10, 10, 0}), {}, {}, 512, "plain"},
      {"deepseek2", deepseek2(), {}, {}, 512, "plain"},
      {"deepseek2, yarn",
       deepseek2(),
       both(yarn("deepseek2", 40, 256), number("deepseek2.rope.scaling.yarn_log_multiplier", 0.0707)),
       {},
       512,
       "yarn"},
  };
  std::ostringstream summary;
  for (const Case& c : cases) {
    INFO(c.name);
    const TemporaryFile file("rope.gguf");
    write_model(file.path(), c.architecture, c.change, c.divisors);
    GgufOptions options;
    options.context = c.context;
    const auto read = read_gguf_rope(file.path(), options);
    INFO(std::string(read.status.where()) << ": " << std::string(read.status.message()));
    REQUIRE(read.ok());
    const Keys keys = run_llama(file.path(), c.context);
    write_model(file.path(), c.architecture, {}, {});
    const Keys plain = run_llama(file.path(), c.context);

    REQUIRE(read.value.layers.size() == static_cast<std::size_t>(c.architecture.layers));
    CHECK(read.value.layers[0].family == std::string(c.family));
    int turning = 0;
    double worst = 0;
    for (int layer = 0; layer < c.architecture.layers; ++layer) {
      CAPTURE(layer);
      const RopeSpec& spec = read.value.layers[static_cast<std::size_t>(layer)].spec;
      const bool turns = keys.of_layer.count(layer) > 0;
      CHECK(turns == (spec.rotary_dim > 0));
      if (!turns || spec.rotary_dim == 0) continue;
      ++turning;
      const auto& values = keys.of_layer.at(layer);
      worst = std::max(worst, worst_turn(spec, values, keys.width.at(layer)));
      const double found = magnitude(spec, values, plain.of_layer.at(layer), keys.width.at(layer));
      CHECK(spec.attention_factor == doctest::Approx(found).epsilon(1e-4));
    }
    CHECK(turning > 0);
    summary << c.name << " " << worst << ", ";
    CHECK(worst < 2e-4);
  }
  MESSAGE("largest differences: " << summary.str());
}

TEST_CASE("a file whose rope cannot be right, or is not known, is refused by the key") {
  const TemporaryFile file("refused.gguf");
  const auto status_of = [&](const Architecture& architecture, const Change& change, const Divisors& divisors = {}) {
    write_model(file.path(), architecture, change, divisors);
    return read_gguf_rope(file.path()).status;
  };
  const auto integer = [](const char* key, std::int32_t value) {
    return Change([=](gguf_context* f) { set_integer(f, key, value); });
  };
  const auto number = [](const char* key, double value) {
    return Change([=](gguf_context* f) { set_number(f, key, value); });
  };
  const auto text = [](const char* key, const char* value) {
    return Change([=](gguf_context* f) { gguf_set_val_str(f, key, value); });
  };
  const auto without = [](const char* key) { return Change([=](gguf_context* f) { gguf_remove_key(f, key); }); };
  const struct {
    Architecture architecture;
    Change change;
    StatusCode code;
    const char* where;
  } cases[] = {
      {llama(), text("general.architecture", "unheard-of"), StatusCode::unsupported, "general.architecture"},
      {llama(), text("general.architecture", "bloom"), StatusCode::unsupported, "general.architecture"},
      {llama(), text("general.architecture", "gpt2"), StatusCode::unsupported, "general.architecture"},
      {llama(), text("general.architecture", "mamba"), StatusCode::unsupported, "general.architecture"},
      {llama(), integer("general.architecture", 7), StatusCode::corrupt, "general.architecture"},
      {llama(), without("general.architecture"), StatusCode::unsupported, "general.architecture"},
      {llama(), without("llama.block_count"), StatusCode::not_found, "llama.block_count"},
      {llama(), integer("llama.block_count", 0), StatusCode::corrupt, "llama.block_count"},
      {llama(), integer("llama.block_count", 1 << 29), StatusCode::corrupt, "llama.block_count"},
      {llama(), text("llama.block_count", "two"), StatusCode::corrupt, "llama.block_count"},
      {llama(), without("llama.context_length"), StatusCode::not_found, "llama.context_length"},
      {llama(), integer("llama.attention.head_count", 0), StatusCode::corrupt, "llama.attention.head_count"},
      {llama(), integer("llama.rope.dimension_count", 17), StatusCode::corrupt, "llama.rope.dimension_count"},
      {llama(), integer("llama.rope.dimension_count", 128), StatusCode::corrupt, "llama.rope.dimension_count"},
      {llama(), integer("llama.rope.dimension_count", 0), StatusCode::corrupt, "llama.rope.dimension_count"},
      {llama(), integer("llama.attention.key_length", 4096), StatusCode::invalid_argument, "llama.rope"},
      {llama(), number("llama.rope.freq_base", -1), StatusCode::corrupt, "llama.rope.freq_base"},
      {llama(), number("llama.rope.freq_base", std::nan("")), StatusCode::corrupt, "llama.rope.freq_base"},
      {llama(), integer("llama.rope.freq_base", 10000), StatusCode::corrupt, "llama.rope.freq_base"},
      {llama(), text("llama.rope.scaling.type", "dynamic"), StatusCode::unsupported, "llama.rope.scaling.type"},
      {llama(), integer("llama.rope.scaling.type", 1), StatusCode::corrupt, "llama.rope.scaling.type"},
      {llama(), number("llama.rope.scaling.factor", -4), StatusCode::corrupt, "llama.rope.scaling.factor"},
      {llama(), number("llama.rope.scaling.attn_factor", 0), StatusCode::corrupt, "llama.rope.scaling.attn_factor"},
      {llama(), integer("llama.nextn_predict_layers", 2), StatusCode::corrupt, "llama.block_count"},
      {{"qwen2vl", 2, kLlama, {}}, {}, StatusCode::not_found, "qwen2vl.rope.dimension_sections"},
      {with_sections("qwen2vl", {8, 12, 11, 0}), {}, StatusCode::unsupported, "qwen2vl.rope.dimension_sections"},
      {with_sections("qwen2vl", {8, 12, 8, 4}), {}, StatusCode::unsupported, "qwen2vl.rope.dimension_sections"},
      {with_sections("qwen2vl", {-8, 20, 20, 0}), {}, StatusCode::corrupt, "qwen2vl.rope.dimension_sections"},
      {gemma3(), integer("gemma3.rope.dimension_count_swa", 65), StatusCode::corrupt,
       "gemma3.rope.dimension_count_swa"},
      {gemma3(), number("gemma3.rope.freq_base_swa", 0), StatusCode::corrupt, "gemma3.rope.freq_base_swa"},
      {gemma3(),
       [](gguf_context* f) {
         const std::int32_t one = 1;
         gguf_set_arr_data(f, "gemma3.attention.sliding_window_pattern", GGUF_TYPE_INT32, &one, 1);
       },
       StatusCode::mismatch, "gemma3.attention.sliding_window_pattern"},
      {{"gemma4", 2, kLlama, {}}, {}, StatusCode::not_found, "gemma4.attention.sliding_window_pattern"},
      {{"llama4", 2, kLlama, {}},
       integer("llama4.attention.sliding_window", 0),
       StatusCode::unsupported,
       "llama4.attention.sliding_window"},
  };
  for (const auto& c : cases) {
    const Status status = status_of(c.architecture, c.change);
    INFO(std::string(c.where) << ", got " << std::string(status.where()) << ": " << std::string(status.message()));
    CHECK(status.code() == c.code);
    CHECK(status.where() == std::string(c.where));
  }
  const Status few = status_of(llama(), {}, {{"rope_freqs.weight", rising(31, 1)}});
  CHECK(few.code() == StatusCode::mismatch);
  CHECK(few.where() == std::string("rope_freqs.weight"));
  const Status zero = status_of(llama(), {}, {{"rope_freqs.weight", std::vector<float>(32, 0.0f)}});
  CHECK(zero.code() == StatusCode::corrupt);
  CHECK(zero.where() == std::string("rope_freqs.weight"));
  CHECK(read_gguf_rope("/no/such/file.gguf").status.code() == StatusCode::not_found);
  GgufOptions negative;
  negative.context = -1;
  write_model(file.path(), llama(), {}, {});
  CHECK(read_gguf_rope(file.path(), negative).status.where() == std::string("context"));
}

TEST_CASE("the wider heads of Gemma 4, and an operator's own sliding pattern") {
  const TemporaryFile file("gemma4.gguf");
  const Architecture gemma4{"gemma4", 3, kLlama, [](gguf_context* f) {
                              const bool slides[] = {true, true, false};
                              gguf_set_arr_data(f, "gemma4.attention.sliding_window_pattern", GGUF_TYPE_BOOL, slides,
                                                3);
                              set_integer(f, "gemma4.attention.key_length", 64);
                              set_integer(f, "gemma4.attention.key_length_swa", 32);
                              set_integer(f, "gemma4.rope.dimension_count", 64);
                              set_integer(f, "gemma4.rope.dimension_count_swa", 32);
                              set_number(f, "gemma4.rope.freq_base", 1e6);
                              set_integer(f, "gemma4.attention.shared_kv_layers", 1);
                            }};
  std::vector<float> divisors(32, 1e30f);
  std::fill(divisors.begin(), divisors.begin() + 8, 1.0f);
  write_model(file.path(), gemma4, {}, {{"rope_freqs.weight", divisors}});
  const auto read = read_gguf_rope(file.path());
  REQUIRE(read.ok());
  CHECK(read.value.layers[1].spec == kvblend::plain_rope(32, 1e4).value);
  const RopeSpec& full = read.value.layers[2].spec;
  CHECK(read.value.layers[2].family == std::string("proportional"));
  CHECK(full.head_dim == 64);
  CHECK(full.rotary_dim == 64);
  CHECK(full.inv_freq[7] == doctest::Approx(std::pow(1e6, -14.0 / 64)));
  CHECK(full.inv_freq[8] < 1e-30);  // at no position does it turn
  CHECK(read.value.notes.size() == 1);
}
