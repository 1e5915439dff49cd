// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "my_engine.hpp"

#include <kvblend/kvblend.hpp>

#include <cstdio>
#include <vector>

int main() {
  my::Engine engine;  // yours: satisfies kvblend::LayerwiseHost
  const std::vector<kvblend::TokenId> instructions = {1, 2, 3}, passage = {10, 11, 12, 13, 14, 15}, question = {20, 21};
  my::StoredKv stored(engine.rope(0), passage.size());  // yours, or kvblend::LayerwiseLoader

  kvblend::ChunkInfo chunk;  // the passage was prefilled alone before
  chunk.tokens = passage;
  std::vector<kvblend::Segment> segments = {kvblend::fresh_segment(instructions), kvblend::cached_segment(chunk),
                                            kvblend::fresh_segment(question)};
  const auto prompt = kvblend::Prompt::make(segments, kvblend::Position(2047));
  if (!prompt.ok()) return std::fprintf(stderr, "%s: %s\n", prompt.status.where(), prompt.status.message()), 1;

  const kvblend::DeviationSelector selector(kvblend::KeyValueDeviation{}, kvblend::RatioBudget{0.15});
  kvblend::LayerwiseFusor fusor(selector);
  std::vector<std::byte> workspace(fusor.workspace_bytes(prompt.value, my::kHeadDim));
  const std::vector<kvblend::Row> outputs = {kvblend::Row(prompt.value.rows() - 1)};  // whose logits you want
  kvblend::BlendReport report;
  const kvblend::Status status = kvblend::blend(engine, stored, fusor, prompt.value, outputs, workspace, &report);
  if (!status.ok()) return std::fprintf(stderr, "%s: %s\n", status.where(), status.message()), 1;

  std::printf("%d rows cached, %d of %d reused ones recomputed\n", engine.cached_rows(), report.fusor.rows_selected,
              prompt.value.reused_rows());  // now decode as after any prefill
}
