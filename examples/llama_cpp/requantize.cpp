// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// kvblend-requantize: writes a GGUF file with its weights in another type, by llama.cpp's own quantiser. Some types
// have no fast kernel on a CPU, and a full prefill on those would be an easy one to beat.
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <string>
#include <system_error>

#include "llama.h"

namespace {

namespace fs = std::filesystem;

int fail(const std::string& what, const std::string& why) {
  std::fprintf(stderr, "kvblend-requantize: %s: %s\n", what.c_str(), why.c_str());
  return 1;
}

// Keeps the first error that llama.cpp logs, which is the cause of the others, as one line; drops all else.
void keep_error(ggml_log_level level, const char* text, void* kept) {
  auto& line = *static_cast<std::string*>(kept);
  if (level != GGML_LOG_LEVEL_ERROR || !line.empty()) return;
  line = text;
  line.erase(line.find_last_not_of(" \n") + 1);
  std::replace(line.begin(), line.end(), '\n', ' ');
}

// Removes the unfinished file, whichever way the program leaves; after the rename there is none.
struct Unfinished {
  fs::path path;
  explicit Unfinished(const fs::path& out) : path(out) { path += ".unfinished"; }
  Unfinished(const Unfinished&) = delete;
  Unfinished& operator=(const Unfinished&) = delete;
  ~Unfinished() {
    std::error_code ignored;
    fs::remove(path, ignored);
  }
};

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, llama_ftype> types = {{"q4_0", LLAMA_FTYPE_MOSTLY_Q4_0},
                                                    {"q8_0", LLAMA_FTYPE_MOSTLY_Q8_0},
                                                    {"f16", LLAMA_FTYPE_MOSTLY_F16},
                                                    {"bf16", LLAMA_FTYPE_MOSTLY_BF16},
                                                    {"f32", LLAMA_FTYPE_ALL_F32}};
  CLI::App app("Writes a GGUF model with its weights in another type.", "kvblend-requantize");
  std::string in;
  std::string out;
  std::string type;
  llama_model_quantize_params params = llama_model_quantize_default_params();
  params.nthread = 0;
  app.add_option("in", in, "GGUF file to read")->required();
  app.add_option("out", out, "GGUF file to write; replaced if it is there")->required();
  app.add_option("type", type, "of the weights; norms and the like stay as they are")
      ->required()
      ->check(CLI::IsMember(types));
  app.add_option("--threads", params.nthread, "0: as many as the machine has")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    std::fprintf(stderr, "kvblend-requantize: %s\n", error.what());
    return 1;
  }

  std::error_code code;
  if (!fs::is_regular_file(in, code)) return fail(in, "is no file");
  if (fs::exists(out, code) && !fs::is_regular_file(out, code)) return fail(out, "is there, and is no file");
  if (fs::equivalent(in, out, code)) return fail(out, "is the file to read");
  const fs::path folder = fs::path(out).parent_path();
  if (!folder.empty() && !fs::is_directory(folder, code)) return fail(folder.string(), "is no folder");

  // A file under the final name is always whole, so that scripts may take it for one.
  const Unfinished unfinished(out);
  std::string error;
  llama_log_set(keep_error, &error);
  params.ftype = types.at(type);
  params.allow_requantize = true;
  if (llama_model_quantize(in.c_str(), unfinished.path.string().c_str(), &params) != 0) {
    return fail(in + " to " + out, error.empty() ? "llama.cpp gave no reason" : error);
  }
  fs::rename(unfinished.path, out, code);
  if (code) return fail(out, code.message());

  const auto before = static_cast<double>(fs::file_size(in, code));
  const auto after = static_cast<double>(fs::file_size(out, code));
  std::printf("%s: %s, %.1f MB of %.1f MB\n", out.c_str(), type.c_str(), after / 1e6, before / 1e6);
  return 0;
}
