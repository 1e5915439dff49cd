// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// GraphHook: what is done to llama.cpp's graphs while they run, through the evaluation callback of a context (cb_eval).
// The callback sees every node before any is computed (unless it asked for an earlier one's result), and may stop a
// graph; both are documented. What it is told apart by - op, inputs, the names cache_k_l<layer>, cache_v_l<layer> and
// l_out-<layer> - is not promised: hence the checks here, and the engine's self-test.
#pragma once

#include <llama_cpp/state_blob.hpp>

#include <kvblend/core/status.hpp>
#include <kvblend/fuse/pass_host.hpp>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

struct ggml_tensor;

namespace llama_cpp {

class AttentionReader;

// Hidden rows between two layers, [rows, width], by cell.
struct HiddenRows {
  std::vector<float> values;
  std::int64_t width = 0;
  std::int32_t first_cell = 0;
  std::vector<std::int32_t> entry;  // by row: the layer that the row waits before; -1: it has none
};

class GraphHook {
 public:
  // For llama_context_params: cb_eval, with this object as its data. It must not move afterwards.
  static bool callback(ggml_tensor* node, bool ask, void* self);

  // Graphs run as they are.
  void idle() { mode_ = Mode::idle; }

  // ---- what the attention of a one-token graph sees, layer by layer ----
  struct Observation {
    std::vector<std::vector<bool>> visible;  // [layer][cell]
    bool alibi = false;
  };
  void observe(Observation& out);

  // ---- scoring: graphs stop once keys and values of `layer` are there ----
  struct Capture {
    std::int32_t layer = 0;
    std::int64_t width = 0;                  // values of a row, kv_heads * head_dim
    std::vector<std::vector<float>> keys;    // [layer up to the scored one][token * width]
    std::vector<std::vector<float>> values;  // the same
    HiddenRows* hidden = nullptr;            // rows at the entry of `layer`, if wanted
    std::int32_t tokens = 0;                 // room in all of those
    std::int32_t done = 0;                   // tokens of the graphs that were stopped so far
  };
  void capture(Capture& out);

  // ---- a batch in scratch cells becomes one over any cells ----
  struct Rewrite {
    kvblend::LayerRange range;
    std::int32_t layers = 0;                 // of the model
    std::int32_t cells = 0;                  // of the sequence; the batch is in those that follow
    std::span<const std::int32_t> rows;      // the batch's true cells, which are their positions, ascending
    std::span<const std::uint8_t> windowed;  // by layer of the model
    std::int32_t window = 0;
    HiddenRows* hidden = nullptr;  // read where the range starts, written where it ends
  };
  void rewrite(const Rewrite& what);

  // ---- besides: before a layer attends, cells of the cache become what is decided from its fresh keys and values ----
  struct Settling {
    // Fresh rows are [tokens, width], as they are stored. Says where in a blob of as many cells as the sequence has the
    // layer lies; that is copied for the cells [first, end), the batch's own among them.
    std::function<kvblend::Result<BlobReader::Rows>(std::int32_t layer, std::span<const float> keys,
                                                    std::span<const float> values)>
        decide;
    std::int32_t first = 0;
    std::int32_t end = 0;
    std::int64_t width = 0;  // values of a row
    bool transposed_values = false;
  };
  void settle(Settling settling);

  // ---- besides, while graphs run as they are or are rewritten: where attention goes; the last layer's ends them ----
  void report(AttentionReader& reader) { reader_ = &reader; }

  // Before each decode.
  void begin_graph();
  // After the decode: undoes what must be undone, and says what was wrong. A graph that failed a check did nothing, but
  // where attention was read the KV of the rows that ran is undefined, and where layers settled that of all their cells.
  kvblend::Status finish();
  [[nodiscard]] double patch_seconds() const { return patch_seconds_; }

 private:
  enum class Mode : std::uint8_t { idle, observe, capture, rewrite };

  bool ask(ggml_tensor* node);
  bool done(ggml_tensor* node);
  void ask_observing(ggml_tensor* node);
  bool ask_capturing(ggml_tensor* node);
  bool ask_rewriting(ggml_tensor* node);
  void rewrite_inputs(ggml_tensor* node);
  void rewrite_positions(ggml_tensor* positions);
  void rewrite_cells(ggml_tensor* cells, const ggml_tensor* cache);
  void rewrite_mask(ggml_tensor* mask, std::int32_t layer);
  void shorten(ggml_tensor* cache_view);
  bool holds_hidden(const ggml_tensor* node);
  void enter(ggml_tensor* node);
  void leave(ggml_tensor* node);
  bool settle_layer(const ggml_tensor* node);
  void copy_to_cells(const ggml_tensor* cache, const std::byte* rows);
  void copy_to_columns(const ggml_tensor* cache, const std::byte* columns);
  bool read_fresh(const ggml_tensor* node, std::int64_t width, std::int64_t room, float* to);
  bool is_new_input(ggml_tensor* input, const char* what);
  void skip(ggml_tensor* node);
  void fail(const char* format, ...) __attribute__((format(printf, 2, 3)));

  Mode mode_ = Mode::idle;
  Observation* observation_ = nullptr;
  Capture* capture_ = nullptr;
  Rewrite rewrite_;
  Settling settling_;
  kvblend::Status decide_error_;
  std::int32_t settled_ = 0;                    // layers
  std::vector<float> fresh_keys_;               // of the layer that settles
  std::vector<float> fresh_values_;             // the same
  const ggml_tensor* stored_keys_ = nullptr;    // the node that stored them, once it has
  const ggml_tensor* stored_values_ = nullptr;  // the same
  AttentionReader* reader_ = nullptr;
  std::vector<ggml_tensor*> nodes_;                               // of the graph so far
  std::vector<ggml_tensor*> skipped_;                             // whose flag to be computed was taken
  std::vector<ggml_tensor*> inputs_;                              // rewritten ones
  std::vector<std::pair<ggml_tensor*, std::int64_t>> shortened_;  // and the cells they had
  bool stopped_ = false;  // a graph of several pieces: those that follow are not to run
  bool entered_ = false;
  bool left_ = false;
  bool saw_positions_ = false;
  bool saw_cells_ = false;
  bool saw_mask_ = false;
  bool key_done_ = false;
  bool value_done_ = false;
  std::string failure_;
  std::vector<std::byte> scratch_;
  double patch_seconds_ = 0;
};

}  // namespace llama_cpp
