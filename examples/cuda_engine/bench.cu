// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// kvblend-cuda-bench: see kBenchUsage.
#include <cuda_engine/bench.hpp>
#include <cuda_engine/bench_options.hpp>
#include <cuda_engine/check.hpp>
#include <cuda_engine/cpu_machine.hpp>
#include <cuda_engine/cuda_machine.cuh>

#include <cstdio>
#include <string>

namespace {

using kvblend::Status;

template <class Machine>
Status run(Machine& machine, const cuda_engine::BenchOptions& options) {
  cuda_engine::Bench<Machine> bench(machine, options);
  KVBLEND_RETURN_IF_ERROR(bench.open());
  KVBLEND_RETURN_IF_ERROR(bench.run());
  std::fputs(bench.json().c_str(), stdout);
  return {};
}

template <class Machine>
Status check(Machine& machine) {
  cuda_engine::CpuDevice<kvblend::BFloat16> reference;
  std::string json;
  const Status status = cuda_engine::check_device(machine.device(), reference, json);
  std::fputs(json.c_str(), stdout);
  return status;
}

Status run(const cuda_engine::BenchOptions& options) {
  if (options.cpu) {
    cuda_engine::CpuMachine machine;
    return options.check ? check(machine) : run(machine, options);
  }
  cuda_engine::CudaMachine machine;
  KVBLEND_RETURN_IF_ERROR(machine.status());
  return options.check ? check(machine) : run(machine, options);
}

}  // namespace

int main(int count, char** arguments) {
  const auto options = cuda_engine::parse_bench_options(count, arguments);
  if (options.status.ok() && options.value.help) {
    std::fputs(cuda_engine::kBenchUsage, stdout);
    return 0;
  }
  const Status status = options.status.ok() ? run(options.value) : options.status;
  if (status.ok()) return 0;
  std::fprintf(stderr, "kvblend-cuda-bench: %s: %s\n", status.where(), status.message());
  return 1;
}
