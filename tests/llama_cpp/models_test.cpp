// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Which model files are taken, and why the others are not.
#include <fstream>
#include <functional>

#include "llama_fixture.hpp"

using namespace llama_fixture;

namespace {

Status opened(const std::function<void(const std::string&)>& write) {
  const tiny_gguf::TemporaryFile file("model.gguf");
  write(file.path());
  return llama_cpp::Model::open(file.path()).status;
}

void check_refused(const std::string& what, const std::string& why,
                   const std::function<void(const std::string&)>& write) {
  CAPTURE(what);
  const Status status = opened(write);
  INFO(text_of(status));
  CHECK(status.code() == StatusCode::unsupported);
  CHECK(text_of(status).find(why) != std::string::npos);
}

}  // namespace

TEST_CASE("models: what is known of one") {
  const llama_cpp::Model model = tiny_model("qwen2");
  CHECK(model.architecture() == "qwen2");
  CHECK(model.layers() == 4);
  CHECK(model.kv_heads() == tiny_gguf::kHidden / tiny_gguf::kHeadDim);
  CHECK(model.head_dim() == tiny_gguf::kHeadDim);
  CHECK(model.vocabulary() == tiny_gguf::kVocabulary);
  CHECK(model.context() == 4096);
  CHECK(model.window() == 0);
  CHECK(model.rope(3).pairing == RopePairing::neox);
  CHECK(tiny_model("llama").rope(0).pairing != RopePairing::neox);
  CHECK(tiny_model("gemma3").window() == tiny_gguf::kWindow);
}

TEST_CASE("models: kinds that cannot be blended are refused with the reason") {
  // The files are in order, or llama.cpp would not load them: the same ones are taken with another architecture.
  check_refused("M-RoPE", "M-RoPE", [](const auto& path) { tiny_gguf::write_decoder(path, "qwen2vl"); });
  check_refused("latent attention", "latent", [](const auto& path) { tiny_gguf::write_decoder(path, "llama", true); });
  check_refused("recurrent", "recurrent", [](const auto& path) { tiny_gguf::write_mamba(path); });
  check_refused("encoder", "encoder", [](const auto& path) { tiny_gguf::write_encoder(path); });
}

TEST_CASE("models: a file that is missing or cut or none") {
  const Status missing = llama_cpp::Model::open("/nowhere/model.gguf").status;
  CHECK(missing.code() == StatusCode::corrupt);
  CHECK(std::string(missing.where()) == "/nowhere/model.gguf");
  CHECK(opened([](const std::string& path) { std::ofstream(path) << "no model"; }).code() == StatusCode::corrupt);
  CHECK(opened([](const std::string& path) {
          tiny_gguf::write_decoder(path, "llama");
          std::filesystem::resize_file(path, std::filesystem::file_size(path) / 2);
        }).code() == StatusCode::corrupt);
}
