// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Engine: one llama.cpp context, through llama.h, ggml.h and ggml-backend.h alone, with what a blend needs besides
// plain decoding: a sequence loaded from a blob, scoring by a graph that is stopped early, where attention goes, and a
// pass over any set of cells.
#pragma once

#include <llama_cpp/attention_reader.hpp>
#include <llama_cpp/graph_hook.hpp>
#include <llama_cpp/model.hpp>
#include <llama_cpp/state_blob.hpp>

#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/fuse/pass_host.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

struct llama_context;

namespace llama_cpp {

// How a set of cells is computed anew.
enum class Route : std::uint8_t {
  in_place,  // one decode of any set, whose inputs (positions, cells, mask) are rewritten before it runs
  runs,      // one decode for each run of consecutive cells, by documented calls alone
};

struct EngineOptions {
  std::int32_t context = 4096;  // positions that a prompt and its answer may take
  std::int32_t batch = 512;     // rows of a decode, at most; at least 64
  std::int32_t threads = 2;
  kvblend::DType cache_type = kvblend::DType::f16;  // f32, f16, bf16; q8_0 with flash attention
  bool flash_attention = true;
  Route route = Route::in_place;
  bool self_test = true;  // whether in_place is tried before it is trusted
  // With flash attention and f16 or f32, a pass of fewer than 64 rows takes another kernel of llama.cpp's, row by row. One
  // of at least so many is filled up to 64 rows instead. 0: measured when the engine opens, which takes some passes.
  std::int32_t fill_from = 5;
};

// What of a prefill's logits is wanted.
enum class Wanted : std::uint8_t { none, last, all };

class Engine {
 public:
  // The model must outlive the engine. Errors: an option that is out of range or does not go with another; a context
  // that llama.cpp cannot make; attention that is neither full nor a plain sliding window.
  static kvblend::Result<std::unique_ptr<Engine>> open(const Model& model, const EngineOptions& options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  [[nodiscard]] const Model& model() const { return model_; }
  [[nodiscard]] const EngineOptions& options() const { return options_; }
  // The route taken, and why it is not the one asked for (empty: it is).
  [[nodiscard]] Route route() const { return route_; }
  [[nodiscard]] bool runs_ranges() const { return route_ == Route::in_place && ranges_ && in_order_; }
  [[nodiscard]] const std::string& route_reason() const { return route_reason_; }
  [[nodiscard]] std::int32_t fill_from() const { return fill_from_; }

  // ---- plain use of sequence 0 ----
  void clear();
  [[nodiscard]] std::int32_t rows() const { return rows_; }  // positions [0, rows()) are in the cache
  kvblend::Status truncate(std::int32_t rows);
  // Takes rows [first, end) out and moves what is behind them forward, as llama.cpp does it (its K-shift): keys are turned
  // in place when the next token is decoded. From then on, until clear() or load(), cells are in another order than
  // positions: save() is refused, and rows are computed by runs. Errors: no such rows; a model that llama.cpp does not
  // shift.
  kvblend::Status drop(std::int32_t first, std::int32_t end);
  kvblend::Status prefill(std::span<const kvblend::TokenId> tokens, Wanted wanted = Wanted::last);
  // [wanted tokens, vocabulary], of the last prefill or compute.
  [[nodiscard]] std::span<const float> logits() const { return logits_; }
  kvblend::Status save(std::vector<std::byte>& blob) const;

  // ---- blobs ----
  [[nodiscard]] const BlobFormat& blob_format() const { return blob_format_; }
  // Where a layer of the model lies in a blob.
  struct Place {
    std::int32_t body = 0;
    std::int32_t layer = 0;
  };
  [[nodiscard]] Place place_of(std::int32_t layer) const { return places_[static_cast<std::size_t>(layer)]; }
  // Values that rows were turned by Hadamard's matrix over before they were quantised; 0: they were not.
  [[nodiscard]] std::int32_t key_hadamard() const;

  // ---- a blend ----
  // Sequence 0 is what the blob says, cells 0, 1, … On an error it is empty.
  kvblend::Status load(std::span<const std::byte> blob, std::int32_t rows);
  // Runs `tokens` behind rows() up to the keys and values of `layer`, and takes them out of the cache again.
  kvblend::Status score(std::int32_t layer, std::span<const kvblend::TokenId> tokens);
  // What score() computed, [tokens, kv_heads * head_dim], as it would go into the cache, of layers up to the scored one.
  [[nodiscard]] std::span<float> fresh_keys(std::int32_t layer);
  [[nodiscard]] std::span<float> fresh_values(std::int32_t layer);
  // Computes `rows` (ascending) of sequence 0 in the layers of `range`; `tokens` are those of all its rows. Logits of
  // `outputs` are behind logits(). Adds rows before the last one, from `first_row` on, where fewer would take longer.
  // `settle`, if given, is asked in each layer before any row attends, once for each part of the rows that runs at a
  // time: [first, end) are the part's cells, `cells` those of them that run, with their fresh rows. It says where the
  // layer lies in a blob of rows() cells; that is copied for [first, end). Errors: can_settle()'s, and settle's own.
  using Settle = std::function<kvblend::Result<BlobReader::Rows>(
      std::int32_t layer, std::int32_t first, std::int32_t end, std::span<const std::int32_t> cells,
      std::span<const float> keys, std::span<const float> values)>;
  kvblend::Status compute(kvblend::LayerRange range, std::span<const kvblend::Row> rows,
                          std::span<const kvblend::TokenId> tokens, std::span<const kvblend::Row> outputs,
                          std::int32_t first_row = 0, const Settle& settle = {});
  // Ok, or why compute() takes no `settle`: rows are not computed in place, or the self-test found something wrong.
  [[nodiscard]] kvblend::Status can_settle() const { return only_in_place("settle", settles_); }

  // ---- where attention goes ----
  // Ok, or why it cannot be read: rows are not computed in place, or the self-test found something wrong.
  [[nodiscard]] kvblend::Status can_probe() const { return only_in_place("probe", probes_); }
  // Runs `tokens` behind rows() and takes them out of the cache again. Errors: can_probe()'s; a context without room
  // for them; rows that were dropped; attention that does not add up, or has sinks.
  kvblend::Status probe(std::span<const kvblend::TokenId> tokens);
  // Runs `rows` as compute() does, in all layers and for no logits; attention of those from rows[first] on counts.
  // Their KV stays as computed, no other row's changes. Errors: as above; no such rows.
  kvblend::Status probe(std::span<const kvblend::Row> rows, std::int32_t first,
                        std::span<const kvblend::TokenId> tokens);
  // Of the last probe, [rows()]: the softmax weights paid to each row, summed over query heads and the rows that count.
  [[nodiscard]] std::span<const float> attention_mass(std::int32_t layer) const { return reader_.mass(layer); }

  [[nodiscard]] double patch_seconds() const { return hook_.patch_seconds(); }  // spent rewriting inputs, in all

 private:
  struct Free {
    void operator()(llama_context* context) const;
  };
  Engine(const Model& model, const EngineOptions& options) : model_(model), options_(options) {}

  kvblend::Status make_context();
  kvblend::Status learn();
  kvblend::Status learn_windows();
  kvblend::Status test_itself();
  kvblend::Status measure_filling();
  void take_other_route(const kvblend::Status& why);
  // What the self-test said of `what`, which runs do not have.
  [[nodiscard]] kvblend::Status only_in_place(const char* what, const kvblend::Status& tested) const;

  // Decodes tokens of one sequence at positions first, first + 1, …; wants[i] != 0: logits of token i, appended.
  kvblend::Status decode(std::int32_t sequence, std::int32_t first, std::span<const kvblend::TokenId> tokens,
                         std::span<const std::uint8_t> wants);
  void fill_up(kvblend::LayerRange range, std::int32_t rows, std::int32_t first_row);
  [[nodiscard]] std::int32_t missing_rows(std::size_t rows) const;
  kvblend::Status compute_in_place(kvblend::LayerRange range, std::span<const kvblend::TokenId> tokens,
                                   AttentionReader* reader = nullptr, const Settle& settle = {},
                                   std::int32_t first_row = 0);
  kvblend::Status compute_by_runs(std::span<const kvblend::TokenId> tokens);
  [[nodiscard]] bool wants_many_rows() const;
  [[nodiscard]] std::size_t part_of(std::size_t done, bool settles) const;

  const Model& model_;
  EngineOptions options_;
  GraphHook hook_;  // before the context, which calls it
  AttentionReader reader_;
  std::unique_ptr<llama_context, Free> context_;
  Route route_ = Route::in_place;
  std::int32_t fill_from_ = 0;
  bool ranges_ = true;
  bool scores_ = true;      // scoring passed the self-test, or was not put to it
  kvblend::Status probes_;  // of the self-test
  kvblend::Status settles_;
  bool in_order_ = true;  // cell = position
  std::string route_reason_;
  BlobFormat blob_format_;
  std::vector<Place> places_;
  std::vector<std::uint8_t> windowed_;  // by layer
  std::int32_t rows_ = 0;
  bool poisoned_ = false;  // logits were no numbers, so that some cell is none
  std::vector<float> logits_;
  GraphHook::Capture capture_;
  HiddenRows hidden_;
  // Of compute: the rows it runs, and whether their logits are wanted.
  std::vector<std::int32_t> cells_;
  std::vector<std::uint8_t> wanted_;
  std::vector<kvblend::TokenId> batch_;
};

}  // namespace llama_cpp
