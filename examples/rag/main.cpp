// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// kvblend-rag: answers questions from passages by full recompute, prefix caching, full KV reuse and CacheBlend, and
// shows what each costs and how close it comes.
#include <rag/eigen_host.hpp>
#include <rag/llama_host.hpp>
#include <rag/session.hpp>

#include <CLI/CLI.hpp>

#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <utility>

namespace {

int fail(const kvblend::Status& status) {
  std::fprintf(stderr, "kvblend-rag: %s: %s\n", status.where(), status.message());
  return 1;
}

const std::map<std::string, kvblend::DType> kCacheTypes = {{"f32", kvblend::DType::f32},
                                                           {"f16", kvblend::DType::f16},
                                                           {"bf16", kvblend::DType::bf16},
                                                           {"q8_0", kvblend::DType::q8_0}};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Answers questions from passages on a real model, four ways side by side.", "kvblend-rag");
  rag::Options options;
  std::string prompt_path = KVBLEND_DEFAULT_PROMPT;
  std::string json_path;
  std::string context = rag::kUsualContext;
  double ratio = -1;
  std::string host_name = "eigen";
  std::string cache_type = "f16";
  std::string flash_attention = "on";
  app.add_option("--model", options.model, "GGUF file; of a llama or qwen2 model for eigen")->required();
  app.add_option("--host", host_name, "the engine: kvblend's small example, or llama.cpp as released")
      ->check(CLI::IsMember({"eigen", "llama.cpp"}))
      ->capture_default_str();
  app.add_option("--prompt", prompt_path, "JSON of instructions, passages and questions")->capture_default_str();
  auto* context_option = app.add_option("--context", context, rag::kContextHelp)->capture_default_str();
  app.add_option("--json", json_path, "write the results to this file as well");
  auto* ratio_option =
      app.add_option("--ratio", ratio, "share of the reused tokens to recompute, in [0, 1]; default: the planner's");
  auto* selector_option = app.add_option("--selector", options.selector,
                                         "what chooses them; default: drift(attention_value_mass) if the KV is in "
                                         "memory, else first_k")
                              ->check(CLI::IsMember(rag::selector_names()));
  auto* schedule_option =
      app.add_option("--schedule", options.schedule, "the same share in every layer, or wide to narrow")
          ->check(CLI::IsMember({"flat", "gradual"}))
          ->capture_default_str();
  app.add_option("--calibration", options.calibration,
                 "of kvblend-calibrate, for this model and host: sets selector and least ratio, and is planned by")
      ->excludes(selector_option)
      ->excludes(ratio_option)
      ->excludes(schedule_option)
      ->excludes(context_option);
  app.add_option("--store", options.store,
                 "where passages' KV waits: in memory, or in safetensors files loaded by layer")
      ->check(CLI::IsMember({"memory", "file"}))
      ->capture_default_str();
  app.add_option("--store-dir", options.store_directory, "directory of the file store; default: kvblend-store here");
  auto* cache_option = app.add_option("--cache-type", cache_type, "of llama.cpp's KV cache")
                           ->check(CLI::IsMember(kCacheTypes))
                           ->capture_default_str();
  auto* flash_option = app.add_option("--flash-attention", flash_attention, "of llama.cpp")
                           ->check(CLI::IsMember({"on", "off"}))
                           ->capture_default_str();
  app.add_option("--threads", options.threads, "compute threads")->check(CLI::Range(1, 256))->capture_default_str();
  app.add_option("--repeats", options.repeats, "timed runs of each mode; the median counts")
      ->check(CLI::Range(1, 99))
      ->capture_default_str();
  app.add_flag("--plan", options.print_plan, "print the planner's plan");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    std::fprintf(stderr, "kvblend-rag: %s\n", error.what());
    return 1;
  }
  if (ratio_option->count() > 0) {
    if (!(ratio >= 0 && ratio <= 1)) {
      std::fprintf(stderr, "kvblend-rag: ratio: %g is not in [0, 1]\n", ratio);
      return 1;
    }
    options.ratio = ratio;
  }
  if (host_name == "eigen" && cache_option->count() + flash_option->count() > 0) {
    std::fprintf(stderr, "kvblend-rag: --cache-type and --flash-attention are for --host llama.cpp\n");
    return 1;
  }
  if (options.store_directory.empty()) options.store_directory = "kvblend-store";

  // Better told now than after minutes of work.
  if (!json_path.empty()) {
    if (const kvblend::Status status = rag::check_writable(json_path); !status.ok()) return fail(status);
  }
  auto file = rag::read_prompt_file(prompt_path);
  if (!file.ok()) return fail(file.status);
  if (options.calibration.empty()) {
    auto read = rag::read_context(context);
    if (!read.ok()) return fail(read.status);
    file.value.context = std::move(read.value);
  }
  auto host =
      host_name == "eigen"
          ? rag::EigenHost::open(options.model, options.threads)
          : rag::LlamaHost::open(options.model, {options.threads, kCacheTypes.at(cache_type), flash_attention == "on"});
  if (!host.ok()) return fail(host.status);
  const auto session = rag::Session::open(options, std::move(host.value));
  if (!session.ok()) return fail(session.status);
  rag::Report report;
  if (const kvblend::Status status = session.value->run(file.value, report); !status.ok()) return fail(status);
  rag::print_table(report);
  if (!json_path.empty()) {
    if (const kvblend::Status status = rag::write_json(report, json_path); !status.ok()) return fail(status);
  }
  return 0;
}
