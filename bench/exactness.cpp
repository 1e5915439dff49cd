// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// How close a blend is to full prefill as the ratio rises: largest difference of the last row's logits and mean error of
// the KV cache. Ratio 1 is full prefill, ratio 0 full reuse.
#include "workload.hpp"

#include <cmath>
#include <cstdio>
#include <vector>

namespace {

using namespace bench;

std::vector<float> copy_cache(Workload& work) {
  std::vector<float> out;
  const auto head_dim = static_cast<std::size_t>(work.identity.head_dim);
  std::vector<float> values(head_dim);
  for (std::int32_t layer = 0; layer < work.identity.layers; ++layer) {
    for (const auto& plane : {work.engine->keys(layer), work.engine->values(layer)}) {
      for (std::int32_t row = 0; row < work.prompt.rows(); ++row) {
        for (std::int32_t head = 0; head < work.identity.kv_heads; ++head) {
          decode_head(plane, row, head, values.data());
          out.insert(out.end(), values.begin(), values.end());
        }
      }
    }
  }
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Closeness of a blend to full prefill, by ratio");
  const Options options = parse(app, argc, argv);
  Workload work(options);
  work.full_prefill();
  const std::vector<float> full_logits = work.logits();
  const std::vector<float> full_cache = copy_cache(work);

  std::printf("%s, item %d, %d tokens, %d of them reusable, %d threads, selector key_value_deviation\n",
              work.identity.name.c_str(), options.item, work.prompt.rows(), work.prompt.reused_rows(), options.threads);
  std::printf("ratio  rows recomputed  max |logit difference|  mean |KV error|\n");
  nlohmann::ordered_json json = {{"model", work.identity.name}, {"tokens", work.prompt.rows()}};
  for (const double ratio : {0.0, 0.1, 0.25, 0.5, 0.75, 1.0}) {
    BlendReport report;
    work.blend(DeviationSelector<KeyValueDeviation, RatioBudget>(KeyValueDeviation{}, RatioBudget{ratio}),
               work.sources(), 1, report);
    double logit_difference = 0;
    for (std::size_t i = 0; i < full_logits.size(); ++i) {
      logit_difference = std::max(logit_difference, std::abs(static_cast<double>(full_logits[i]) - work.logits()[i]));
    }
    const std::vector<float> cache = copy_cache(work);
    double error = 0;
    for (std::size_t i = 0; i < cache.size(); ++i) error += std::abs(static_cast<double>(cache[i]) - full_cache[i]);
    error /= static_cast<double>(cache.size());
    std::printf("%5.2f %16d %23.3g %16.4g\n", ratio, report.fusor.rows_selected, logit_difference, error);
    json["runs"].push_back({{"ratio", ratio},
                            {"rows_recomputed", report.fusor.rows_selected},
                            {"max_logit_difference", logit_difference},
                            {"mean_kv_error", error}});
  }
  write(options, json);
  return 0;
}
