// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// kvblend-rope: prints how a model turns its keys, layer by layer, and whether kvblend can move keys between two
// models, or between two prompts of one whose frequencies depend on the length.
#include <rope_config/hf_config.hpp>
#include <rope_config/model_rope.hpp>

#include <kvblend/rope/can_shift.hpp>

#include <CLI/CLI.hpp>

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#ifdef KVBLEND_ROPE_GGUF
#include <rope_config/gguf_rope.hpp>

#include "ggml.h"
#endif

namespace {

using kvblend::Result;
using kvblend::RopePairing;
using kvblend::RopeSpec;
using kvblend::Status;
using kvblend::StatusCode;
using rope_config::ModelRope;

int fail(const Status& status) {
  std::fprintf(stderr, "kvblend-rope: %s: %s\n", status.where(), status.message());
  return 1;
}

Result<ModelRope> read(const std::string& path, const rope_config::HfOptions& options) {
  std::error_code ignored;
  const std::filesystem::path file(path);
  if (file.extension() == ".gguf") {
#ifdef KVBLEND_ROPE_GGUF
    ggml_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    rope_config::GgufOptions gguf;
    gguf.context = options.length;
    return rope_config::read_gguf_rope(path.c_str(), gguf);
#else
    return Status::error(StatusCode::unsupported, "is a GGUF file: built without ggml").at("%s", path.c_str());
#endif
  }
  const bool folder = std::filesystem::is_directory(file, ignored);
  return rope_config::read_hf_config_file(folder ? (file / "config.json").string() : path, options);
}

// "0-4, 6": the layers whose mark is `mark`.
std::string ranges(const std::vector<std::size_t>& marks, std::size_t mark) {
  std::string text;
  for (std::size_t i = 0; i < marks.size(); ++i) {
    if (marks[i] != mark || (i > 0 && marks[i - 1] == mark)) continue;
    std::size_t last = i;
    while (last + 1 < marks.size() && marks[last + 1] == mark) ++last;
    text += (text.empty() ? "" : ", ") + std::to_string(i) + (last > i ? "-" + std::to_string(last) : "");
  }
  return text;
}

void print_spec(const rope_config::LayerRope& layer, const std::string& layers) {
  const RopeSpec& spec = layer.spec;
  if (spec.rotary_dim == 0) {
    std::printf("  no rope      head_dim %d, layers %s\n", spec.head_dim, layers.c_str());
    return;
  }
  const auto last = static_cast<std::size_t>(spec.pairs() - 1);
  std::printf("  %-12s head_dim %d, rotary %d@%d, %s, frequencies %.6g to %.6g, attention factor %.6g", layer.family,
              spec.head_dim, spec.rotary_dim, spec.rotary_offset, to_string(spec.pairing), spec.inv_freq[0],
              spec.inv_freq[last], spec.attention_factor);
  int counts[kvblend::kRopeAxes] = {};
  for (const std::uint8_t axis : spec.axes()) ++counts[axis];
  if (counts[1] + counts[2] > 0) std::printf(", pairs t %d h %d w %d", counts[0], counts[1], counts[2]);
  std::printf(", layers %s\n", layers.c_str());
}

void print_model(const std::string& path, const ModelRope& model) {
  std::printf("%s: %s, %zu layers\n", path.c_str(), model.model.c_str(), model.layers.size());
  std::vector<std::size_t> marks;  // the first layer with the same spec
  for (std::size_t i = 0; i < model.layers.size(); ++i) {
    std::size_t first = 0;
    while (!(model.layers[first].spec == model.layers[i].spec)) ++first;
    marks.push_back(first);
  }
  for (std::size_t i = 0; i < marks.size(); ++i) {
    if (marks[i] == i) print_spec(model.layers[i], ranges(marks, i));
  }
  for (const std::string& note : model.notes) std::printf("  note: %s\n", note.c_str());
}

// What can_shift says of each layer's keys, one line for layers of which it says the same.
void print_moves(const ModelRope& stored, const ModelRope& wanted) {
  std::vector<std::string> answers;
  std::vector<std::size_t> marks;
  for (std::size_t i = 0; i < wanted.layers.size(); ++i) {
    const auto kind = kvblend::can_shift(stored.layers[i].spec, wanted.layers[i].spec);
    std::string answer = kind.ok() ? (kind.value == kvblend::ShiftKind::copy ? "copied as they are" : "rotated")
                                   : std::string("no: ") + kind.status.where() + ": " + kind.status.message();
    std::size_t mark = 0;
    while (mark < answers.size() && answers[mark] != answer) ++mark;
    if (mark == answers.size()) answers.push_back(answer);
    marks.push_back(mark);
  }
  for (std::size_t mark = 0; mark < answers.size(); ++mark) {
    std::printf("keys of layers %s: %s\n", ranges(marks, mark).c_str(), answers[mark].c_str());
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Prints how a model turns its keys, and whether kvblend can move them.", "kvblend-rope");
  std::string model_path;
  std::string from_path;
  std::string pairing;
  std::string latent = "row";
  rope_config::HfOptions options;
  std::int64_t from_length = 0;
  app.add_option("model", model_path, "config.json, a folder with one, or a GGUF file")->required();
  app.add_option("--length", options.length,
                 "tokens of the prompt (GGUF: of the context); some frequencies depend on it. Default: within the "
                 "model's original length (GGUF: what it was trained for)")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--pairing", pairing, "the engine's, where it is not the model's")
      ->check(CLI::IsMember({"neox", "interleaved"}));
  app.add_option("--latent-keys", latent, "what an engine of latent attention (DeepSeek) caches as a key")
      ->check(CLI::IsMember({"row", "part", "expanded"}))
      ->capture_default_str();
  app.add_option("--model-type", options.model_type, "where config.json has none");
  auto* from = app.add_option("--from", from_path, "where the keys were stored: can they be moved to MODEL?");
  app.add_option("--from-length", from_length, "the prompt's or context's length there; default: --length")
      ->check(CLI::NonNegativeNumber)
      ->needs(from);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    std::fprintf(stderr, "kvblend-rope: %s\n", error.what());
    return 1;
  }
  if (!pairing.empty()) options.pairing = pairing == "neox" ? RopePairing::neox : RopePairing::interleaved;
  if (latent == "part") options.latent_keys = rope_config::LatentKeys::part;
  if (latent == "expanded") options.latent_keys = rope_config::LatentKeys::expanded;

  const Result<ModelRope> model = read(model_path, options);
  if (!model.ok()) return fail(model.status);
  print_model(model_path, model.value);
  if (from_path.empty()) return 0;
  if (from_length > 0) options.length = from_length;
  const Result<ModelRope> stored = read(from_path, options);
  if (!stored.ok()) return fail(stored.status);
  print_model(from_path, stored.value);
  if (stored.value.layers.size() != model.value.layers.size()) {
    return fail(Status::error(StatusCode::mismatch, "has %zu layers, %s %zu", stored.value.layers.size(),
                              model_path.c_str(), model.value.layers.size())
                    .at("%s", from_path.c_str()));
  }
  print_moves(stored.value, model.value);
  return 0;
}
