// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What the demo found, as a table for people and as JSON for programs; and a progress bar while it works.
#pragma once

#include <kvblend/core/status.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace rag {

// One item in one mode. Seconds are medians over the repeats.
struct Run {
  std::int32_t item = 0;
  std::string mode;      // full, prefix, reuse, blend
  double ratio = 1;      // share of the stored tokens to recompute, not counting an exact prefix
  std::string selector;  // "none" but for blend
  std::int32_t tokens = 0;
  double ttft_s = 0;                 // from the request to the first token's logits, everything included
  double load_s = 0;                 // waiting for stored KV
  double shift_s = 0;                // rotating keys, copying values
  double score_s = 0;                // scoring
  double select_s = 0;               // selecting
  double merge_s = 0;                // writing fresh rows into the cache
  double recompute_s = 0;            // the engine's passes
  std::int32_t rows_recomputed = 0;  // tokens of stored parts that were computed again
  std::int64_t rows_computed = 0;    // rows that ran, summed over the layers; of blends
  double kl_vs_full = 0;             // nats a token, mean over the teacher-forced tokens
  double top1_agreement = 0;         // share of those tokens at which the most likely next token is the same
  std::string answer;
};

struct Report {
  std::string model;
  std::string host;
  std::string note;     // the host's; may be empty
  std::string context;  // what passages were encoded behind
  std::int32_t threads = 0;
  std::int32_t tokens = 0;  // of the longest prompt
  std::vector<Run> runs;
};

void print_table(const Report& report);
// Leaves no new file behind.
kvblend::Status check_writable(const std::string& path);
kvblend::Status write_json(const Report& report, const std::string& path);

class Progress {
 public:
  explicit Progress(int steps);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Says what comes next.
  void step(const std::string& what);

 private:
  int steps_;
  int done_ = 0;
  bool terminal_;
};

}  // namespace rag
