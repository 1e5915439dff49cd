// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The benchmark of the GPU engine, from its options to its JSON, without a GPU.
#include <doctest/doctest.h>
#include <cuda_engine/bench.hpp>
#include <cuda_engine/check.hpp>
#include <cuda_engine/cpu_machine.hpp>
#include <nlohmann/json.hpp>

#include <vector>

using cuda_engine::Bench;
using cuda_engine::CpuMachine;

namespace {

kvblend::Result<cuda_engine::BenchOptions> parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "kvblend-cuda-bench");
  return cuda_engine::parse_bench_options(static_cast<int>(arguments.size()), arguments.data());
}

}  // namespace

TEST_CASE("the benchmark of the GPU engine runs through and compares logits") {
  const auto options = parse({"--cpu", "--shape", "tiny", "--tokens", "150", "--passage", "40", "--question", "11",
                              "--ratios", "1,0.15,0", "--rounds", "2", "--attention-mb", "1"});
  REQUIRE(options.ok());
  CpuMachine machine;
  Bench<CpuMachine> bench(machine, options.value);
  auto status = bench.open();
  if (status.ok()) status = bench.run();
  INFO(status.where() << ": " << status.message());
  REQUIRE(status.ok());
  const auto json = nlohmann::json::parse(bench.json());
  CHECK(json["attention"] == "own");
  CHECK(json["tokens"] == 150);
  CHECK(json["passages"] == 3);
  CHECK(json["full_prefill"]["median_ms"] >= json["full_prefill"]["min_ms"]);
  REQUIRE(json["blends"].size() == 12);
  for (std::size_t i = 0; i < 12; ++i) {
    const auto& blend = json["blends"][i];
    CHECK(blend["kv"] == std::vector<std::string>{"device", "device, graph", "pinned", "pinned, graph"}[i % 4]);
    CHECK(blend["min_ms"] > 0);
    const double difference = blend["logits_difference"];
    if (i < 4) CHECK(difference <= 1e-4);
    if (i >= 8) CHECK(difference > 0.01);
  }
}

TEST_CASE("the benchmark of the GPU engine refuses options that it does not know") {
  CHECK(parse({}).value.shape == "llama3-8b");
  CHECK(parse({"--help"}).value.help);
  for (const std::vector<const char*>& arguments : std::vector<std::vector<const char*>>{{"--token", "4"},
                                                                                         {"--tokens"},
                                                                                         {"--tokens", "x"},
                                                                                         {"--tokens", "1"},
                                                                                         {"--rounds", "0"},
                                                                                         {"--ratios", "0.1,"},
                                                                                         {"--ratios", "2"},
                                                                                         {"--attention", "other"},
                                                                                         {"--question", "4096"}}) {
    CHECK_FALSE(parse(arguments).ok());
  }
  CHECK(parse({"--attention", "products"}).value.attention == cuda_engine::AttentionBy::products);
  CpuMachine machine;
  const auto flashinfer = parse({"--shape", "tiny", "--tokens", "150", "--attention", "flashinfer"});
  REQUIRE(flashinfer.ok());
  CHECK(Bench<CpuMachine>(machine, flashinfer.value).open().code() == kvblend::StatusCode::unsupported);
  const auto unknown = parse({"--shape", "huge"});
  REQUIRE(unknown.ok());
  CHECK(Bench<CpuMachine>(machine, unknown.value).open().code() == kvblend::StatusCode::invalid_argument);
}

TEST_CASE("with a GPU's bf16 logits are float32's but for rounding") {
  const cuda_engine::CheckCase of{64, true, cuda_engine::AttentionBy::own};
  cuda_engine::CheckLogits floats, halves;
  cuda_engine::CpuDevice<float> float_device;
  cuda_engine::CpuDevice<kvblend::BFloat16> half_device;
  REQUIRE(cuda_engine::logits_to_check(float_device, of, floats).ok());
  REQUIRE(cuda_engine::logits_to_check(half_device, of, halves).ok());
  REQUIRE(floats.full.size() == 205 * 256);
  REQUIRE(floats.blended.size() == 3 * 256);
  const double full = cuda_engine::relative_difference(halves.full, floats.full);
  CHECK(full > 0.001);
  CHECK(full <= 0.02);
  CHECK(cuda_engine::relative_difference(halves.blended, floats.blended) <= 0.02);
  REQUIRE(floats.mass.size() == 205);
  CHECK(cuda_engine::relative_difference(halves.mass, floats.mass) <= 0.02);
  // What was blended is not what was computed in full.
  halves.full.erase(halves.full.begin(), halves.full.end() - 256);
  halves.blended.erase(halves.blended.begin(), halves.blended.begin() + 256);
  halves.blended.resize(256);
  CHECK(cuda_engine::relative_difference(halves.blended, halves.full) > 0.05);
}
