// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Model files: what the loader reads equals what llama.cpp reads, and a bad file is one clear line.
#include <doctest/doctest.h>
#include <eigen_engine/tokenizer.hpp>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>

#include "engine/engine_fixture.hpp"
#include "engine/gguf_fixture.hpp"

using namespace engine_fixture;
using gguf_fixture::llama_logits;
using gguf_fixture::TemporaryFile;
using gguf_fixture::write_gguf;
using kvblend::RopePairing;
using kvblend::Status;
using kvblend::StatusCode;

namespace {

eigen_engine::ModelConfig file_config(const char* architecture, bool bias, bool tied) {
  auto config = small_config(bias, tied);
  config.architecture = architecture;
  config.feed_forward = 96;  // rows of a quantised matrix are multiples of 32
  return config;
}

std::vector<float> engine_logits(const char* path, const std::vector<int>& tokens) {
  auto model = eigen_engine::load_gguf(path);
  require_ok(model.status);
  eigen_engine::ThreadPool pool(2);
  eigen_engine::Engine engine(model.value, 512, pool);
  return prefill_logits(engine, tokens);
}

double max_difference(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size() || a.empty()) return std::numeric_limits<double>::infinity();
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    worst = std::max(worst, std::fabs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
  }
  return worst;
}

std::string read_file(const char* path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}
void write_file(const char* path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

Status load_status(const char* path) { return eigen_engine::load_gguf(path).status; }

}  // namespace

TEST_CASE("a model read from a file gives llama.cpp's logits") {
  const std::vector<float> divisors = {1, 1, 1, 1.5f, 2, 4, 8, 8};
  const struct {
    std::string name;
    const char* architecture;
    RopePairing pairing;
    bool bias, tied;
    ggml_type type;
    bool llama3;
    float linear_factor;
    double tolerance;
  } cases[] = {
      {"llama, tied", "llama", RopePairing::interleaved, false, true, GGML_TYPE_F32, false, 1, 1e-4},
      {"llama, own head", "llama", RopePairing::interleaved, false, false, GGML_TYPE_F32, false, 1, 1e-4},
      {"llama, bias", "llama", RopePairing::interleaved, true, true, GGML_TYPE_F32, false, 1, 1e-4},
      {"qwen2, bias", "qwen2", RopePairing::neox, true, false, GGML_TYPE_F32, false, 1, 1e-4},
      {"qwen2, tied", "qwen2", RopePairing::neox, true, true, GGML_TYPE_F32, false, 1, 1e-4},
      {"llama3's divisors", "llama", RopePairing::interleaved, false, true, GGML_TYPE_F32, true, 1, 1e-4},
      {"linear scaling", "llama", RopePairing::interleaved, false, true, GGML_TYPE_F32, false, 4, 1e-4},
      // llama.cpp rounds the activations as well: to 11 bits beside f16, to 8 bits a block beside q8_0.
      {"f16", "llama", RopePairing::interleaved, false, false, GGML_TYPE_F16, false, 1, 3e-2},
      {"q8_0", "qwen2", RopePairing::neox, true, false, GGML_TYPE_Q8_0, false, 1, 3e-1},
  };
  for (const auto& c : cases) {
    INFO(c.name);
    const auto config = file_config(c.architecture, c.bias, c.tied);
    const auto tensors = eigen_engine::random_tensors(config, c.pairing, 17);
    const TemporaryFile file("model.gguf");
    write_gguf(file.path(), config, tensors, c.type, c.llama3 ? divisors : std::vector<float>{}, [&](gguf_context* f) {
      if (c.linear_factor == 1) return;
      gguf_set_val_str(f, "llama.rope.scaling.type", "linear");
      gguf_set_val_f32(f, "llama.rope.scaling.factor", c.linear_factor);
    });
    const auto tokens = random_tokens(100, config.vocabulary, 18);
    const auto expected = llama_logits(file.path(), tokens, config.vocabulary);
    REQUIRE(!expected.empty());
    const double difference = max_difference(engine_logits(file.path(), tokens), expected);
    INFO("max difference " << difference);
    CHECK(difference <= c.tolerance);
  }
}

TEST_CASE("files that are no model are refused in one line that says why") {
  const TemporaryFile missing("missing.gguf");
  CHECK(load_status(missing.path()).code() == StatusCode::not_found);
  CHECK(load_status(std::filesystem::temp_directory_path().string().c_str()).code() == StatusCode::invalid_argument);

  const TemporaryFile file("bad.gguf");
  for (const char* bytes : {"", "G", "GGUF", "This is a text and no model.\n"}) {
    INFO("bytes: " << bytes);
    write_file(file.path(), bytes);
    const Status status = load_status(file.path());
    CHECK(status.code() == StatusCode::corrupt);
    CHECK(std::string(status.message()).find('\n') == std::string::npos);
    CHECK_FALSE(eigen_engine::Tokenizer::load(file.path()).ok());
  }
}

TEST_CASE("a file that was cut is refused wherever the cut is") {
  const auto config = file_config("llama", false, true);
  const TemporaryFile whole("whole.gguf");
  write_gguf(whole.path(), config, eigen_engine::random_tensors(config, RopePairing::interleaved, 17));
  require_ok(load_status(whole.path()));
  const std::string bytes = read_file(whole.path());
  const TemporaryFile cut("cut.gguf");
  for (std::size_t length = 0; length < bytes.size(); length += length < 6000 ? 97 : 20011) {
    INFO("cut at " << length << " of " << bytes.size());
    write_file(cut.path(), bytes.substr(0, length));
    CHECK(load_status(cut.path()).code() == StatusCode::corrupt);
  }
  write_file(cut.path(), bytes.substr(0, bytes.size() - 64));
  CHECK(load_status(cut.path()).code() == StatusCode::corrupt);
}

TEST_CASE("a model the engine cannot run is refused by the name of what it cannot do") {
  const auto config = file_config("llama", true, false);
  const auto tensors = eigen_engine::random_tensors(config, RopePairing::interleaved, 17);
  const TemporaryFile file("other.gguf");
  const auto status_of = [&](const std::function<void(gguf_context*)>& change, const std::string& left_out = {}) {
    write_gguf(file.path(), config, tensors, GGML_TYPE_F32, {}, change, left_out);
    return load_status(file.path());
  };
  const struct {
    const char* where;
    StatusCode code;
    std::function<void(gguf_context*)> change;
  } keys[] = {
      {"general.architecture", StatusCode::unsupported,
       [](gguf_context* f) { gguf_set_val_str(f, "general.architecture", "mamba"); }},
      {"general.architecture", StatusCode::unsupported,
       [](gguf_context* f) { gguf_remove_key(f, "general.architecture"); }},
      {"llama.block_count", StatusCode::not_found, [](gguf_context* f) { gguf_remove_key(f, "llama.block_count"); }},
      {"llama.block_count", StatusCode::corrupt,
       [](gguf_context* f) { gguf_set_val_str(f, "llama.block_count", "four"); }},
      {"blk.4.attn_norm.weight", StatusCode::not_found,
       [](gguf_context* f) { gguf_set_val_u32(f, "llama.block_count", 5); }},
      {"llama.attention.head_count", StatusCode::corrupt,
       [](gguf_context* f) { gguf_set_val_u32(f, "llama.attention.head_count", 0); }},
      {"kv_heads", StatusCode::invalid_argument,
       [](gguf_context* f) { gguf_set_val_u32(f, "llama.attention.head_count_kv", 3); }},
      {"blk.0.attn_q.weight", StatusCode::mismatch,
       [](gguf_context* f) { gguf_set_val_u32(f, "llama.attention.head_count", 8); }},
      {"token_embd.weight", StatusCode::mismatch,
       [](gguf_context* f) { gguf_set_val_u32(f, "llama.embedding_length", 32); }},
      {"llama.rope.dimension_count", StatusCode::corrupt,
       [](gguf_context* f) { gguf_set_val_u32(f, "llama.rope.dimension_count", 17); }},
      {"llama.rope.scaling.type", StatusCode::unsupported,
       [](gguf_context* f) { gguf_set_val_str(f, "llama.rope.scaling.type", "yarn"); }},
      {"llama.expert_count", StatusCode::unsupported,
       [](gguf_context* f) { gguf_set_val_u32(f, "llama.expert_count", 8); }},
      {"llama.attention.value_length", StatusCode::unsupported,
       [](gguf_context* f) { gguf_set_val_u32(f, "llama.attention.value_length", 8); }},
  };
  for (const auto& key : keys) {
    const Status status = status_of(key.change);
    INFO(key.where << ", got " << status.where() << ": " << status.message());
    CHECK(status.code() == key.code);
    const bool hidden_size = std::string(key.where) == "token_embd.weight";  // the first tensor read is named
    CHECK((hidden_size || std::string(status.where()) == key.where));
  }
  for (const char* tensor : {"token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight", "blk.3.ffn_down.weight",
                             "blk.1.attn_k.bias", "blk.2.attn_norm.weight"}) {
    const Status status = status_of({}, tensor);
    INFO(tensor << ", got " << status.where() << ": " << status.message());
    CHECK(status.code() == StatusCode::not_found);
    CHECK(std::string(status.where()) == tensor);
  }
}
