// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// On paper: the time to the first token on one H200, for Llama-3-8B's shapes in bf16, from bytes and floating-point
// operations. What bench/gpu_check.sh measures is to be held against it.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

namespace {

// --- assumptions ---

// The card: rates that a product of 8192 x 8192 matrices and a large copy reach on it, and the share reached here.
constexpr double kMatrixFlops = 790e12;
constexpr double kMatrixShare = 0.8;
constexpr double kMemoryBytes = 4.3e12;  // a second, read and written; 4.8e12 on the data sheet
constexpr double kMemoryShare = 0.85;
constexpr double kAttentionFlops = 300e12;  // of the engine's kernel, which has no wgmma
constexpr double kPinnedBytes = 50e9;       // a second, PCIe 5 x16
constexpr double kLaunch = 1.5e-6;          // from the end of a kernel to the start of the next
constexpr std::int64_t kMultiprocessors = 132;
constexpr std::int64_t kTileRows = 128;  // matrix products and attention take as long for fewer rows

// The model.
constexpr std::int64_t kLayers = 32, kHidden = 4096, kFeedForward = 14336, kVocabulary = 128256;
constexpr std::int64_t kHeads = 32, kKvHeads = 8, kHeadDim = 128;
constexpr std::int64_t kKvValues = kKvHeads * kHeadDim;
constexpr std::int64_t kQkvWeights = kHidden * (kHidden + 2 * kKvValues);
constexpr std::int64_t kOtherWeights = kHidden * (kHidden + 3 * kFeedForward);
constexpr std::int64_t kBytes = 2;                          // of a value
constexpr std::int64_t kRowBytes = 2 * kKvValues * kBytes;  // keys and values of a token in one layer
// Kernels beside products and attention, read and written for a row: two norms, rope, the gate, the merge.
constexpr std::int64_t kRowWork = kBytes * (4 * kHidden + 2 * (kHidden + kKvValues) + 3 * kFeedForward + 4 * kKvValues);
constexpr std::int64_t kLaunches = 16;       // of a layer
constexpr std::size_t kLoadDepth = 3;        // layers that loading may be ahead of the blend
constexpr std::int64_t kScoreLaunches = 24;  // deviations, top-k and lists

// The prompt.
constexpr std::int64_t kPassage = 512;
constexpr std::int64_t kQuestion = 64;

// --- seconds ---

double memory_time(double bytes) { return bytes / (kMemoryBytes * kMemoryShare); }
std::int64_t tiles(std::int64_t rows) { return (rows + kTileRows - 1) / kTileRows; }

// The larger of the two: operations for the rows, or all weights read once.
double product_time(std::int64_t rows, std::int64_t weights) {
  const double operations = 2.0 * static_cast<double>(tiles(rows) * kTileRows) * static_cast<double>(weights);
  return (std::max)(operations / (kMatrixFlops * kMatrixShare), memory_time(static_cast<double>(kBytes * weights)));
}

// A tile is kTileRows queries of one key head: fewer tiles than multiprocessors leave the others idle.
double attention_time(std::int64_t rows, double visible) {
  const double operations = 4.0 * static_cast<double>(kHeads * kHeadDim) * static_cast<double>(rows) * visible;
  const std::int64_t blocks = tiles(rows * (kHeads / kKvHeads)) * kKvHeads;
  const double busy = (std::min)(1.0, static_cast<double>(blocks) / static_cast<double>(kMultiprocessors));
  return operations / (kAttentionFlops * busy);
}

struct Layer {
  double compute = 0;
  double load = 0;
};

// `in` rows are projected, `kept` go on; `visible` cells to each of these on average; `placed` cached rows of `cached`.
Layer layer_time(std::int64_t in, std::int64_t kept, double visible, std::int64_t placed, std::int64_t cached) {
  Layer layer;
  const std::int64_t passages = (cached + kPassage - 1) / kPassage;
  layer.compute = product_time(in, kQkvWeights) + product_time(kept, kOtherWeights) + attention_time(kept, visible) +
                  memory_time(static_cast<double>(kept * kRowWork)) +
                  memory_time(static_cast<double>(2 * placed * kRowBytes)) +
                  static_cast<double>(kLaunches + 2 * passages) * kLaunch;  // a passage's keys, and its values
  layer.load = static_cast<double>(cached * kRowBytes) / kPinnedBytes;
  return layer;
}

struct Prediction {
  std::int64_t tokens;
  std::string work;
  double resident = 0;       // KV in the device's memory
  double pinned = 0;         // KV comes from pinned memory, layer by layer, while layers before it are computed
  double load = 0;           // by itself
  double layer_load = 0;     // of one layer
  double layer_compute = 0;  // of one layer behind the choice
};

Prediction sum(std::int64_t tokens, const std::string& work, const std::vector<Layer>& layers) {
  Prediction p{tokens, work};
  std::vector<double> starts;  // of computing a layer, from pinned memory; its staging memory is soon free again
  double loaded = 0;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (i >= kLoadDepth) loaded = (std::max)(loaded, starts[i - kLoadDepth]);
    loaded += layers[i].load;
    starts.push_back((std::max)(p.pinned, loaded));
    p.pinned = starts.back() + layers[i].compute;
    p.load += layers[i].load;
    p.resident += layers[i].compute;
  }
  p.layer_load = layers.back().load;
  p.layer_compute = layers.back().compute;
  const double logits = memory_time(static_cast<double>(kBytes * kHidden * kVocabulary)) + 2 * kLaunch;
  p.resident += logits;
  p.pinned += logits;
  return p;
}

Prediction full_prefill(std::int64_t tokens) {
  const Layer layer = layer_time(tokens, tokens, static_cast<double>(tokens) / 2, 0, 0);
  return sum(tokens, "full prefill", std::vector<Layer>(kLayers, layer));
}

// Layer 0 and the projection of layer 1 run for all rows; then the rows of the largest deviation and the question.
Prediction blend(std::int64_t tokens, double ratio) {
  const std::int64_t cached = tokens - kQuestion;
  const auto picked = static_cast<std::int64_t>(static_cast<double>(cached) * ratio);
  const std::int64_t active = picked + kQuestion;
  const double all = static_cast<double>(tokens);
  const double visible =
      (static_cast<double>(picked) * all / 2 + static_cast<double>(kQuestion) * all) / static_cast<double>(active);
  if (picked == 0) {
    return sum(tokens, "full reuse", std::vector<Layer>(kLayers, layer_time(active, active, visible, cached, cached)));
  }
  std::vector<Layer> layers(kLayers, layer_time(active, active, visible, cached - picked, cached));
  layers[0] = layer_time(tokens, tokens, all / 2, 0, cached);
  layers[1] = layer_time(tokens, active, visible, cached, cached);
  layers[1].compute += memory_time(2.0 * static_cast<double>(cached * kRowBytes)) + kScoreLaunches * kLaunch;
  return sum(tokens, "blend " + std::to_string(static_cast<int>(ratio * 100 + 0.5)) + " %", layers);
}

}  // namespace

// --json FILE
int main(int argc, char** argv) {
  std::FILE* json = nullptr;
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::strcmp(argv[i], "--json") == 0) json = std::fopen(argv[i + 1], "w");
    if (std::strcmp(argv[i], "--json") == 0 && json == nullptr) {
      std::fprintf(stderr, "%s: cannot write\n", argv[i + 1]);
      return 1;
    }
  }
  std::printf(
      "Llama-3-8B, bf16, one H200; passages of %d tokens, a question of %d. Milliseconds.\n\n"
      "%7s  %-12s %9s %8s %9s %8s %8s %9s  %s\n",
      static_cast<int>(kPassage), static_cast<int>(kQuestion), "tokens", "work", "resident", "speed-up", "pinned",
      "load", "layer", "its load", "hidden");
  if (json != nullptr) std::fputs("[", json);
  for (const std::int64_t tokens : {4096, 8192, 16384, 32768}) {
    const Prediction full = full_prefill(tokens);
    for (const Prediction& p : {full, blend(tokens, 0), blend(tokens, 0.05), blend(tokens, 0.15), blend(tokens, 0.3)}) {
      std::printf("%7d  %-12s %9.1f %8.2f %9.1f %8.1f %8.2f %9.2f  ", static_cast<int>(tokens), p.work.c_str(),
                  p.resident * 1e3, full.resident / p.resident, p.pinned * 1e3, p.load * 1e3, p.layer_compute * 1e3,
                  p.layer_load * 1e3);
      if (p.load > 0) {
        std::printf("%.0f %%\n", 100 * (1 - (p.pinned - p.resident) / p.load));
      } else {
        std::printf("-\n");
      }
      if (json == nullptr) continue;
      std::fprintf(json,
                   "%s\n {\"tokens\": %d, \"work\": \"%s\", \"resident_ms\": %.2f, \"pinned_ms\": %.2f, "
                   "\"load_ms\": %.2f}",
                   tokens == 4096 && p.work == full.work ? "" : ",", static_cast<int>(tokens), p.work.c_str(),
                   p.resident * 1e3, p.pinned * 1e3, p.load * 1e3);
    }
  }
  if (json == nullptr) return 0;
  std::fputs("\n]\n", json);
  return std::fclose(json) == 0 ? 0 : 1;
}
