// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Host: what the demo asks of an engine, whichever it is. A KV cache with one row a token, filled by prefill() or by a
// blend, that decoding goes on from; and a prefilled text as a chunk for the store.
#pragma once

#include <rag/report.hpp>

#include <kvblend/kvblend.hpp>
#include <kvblend/store.hpp>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace rag {

// Which rows' logits a prefill is run for.
enum class Wanted : std::uint8_t { none, last, all };

// What a blend's first choice looked at.
struct ScoresSeen {
  std::int32_t rows = 0;       // candidates; 0: nothing was scored
  double mean = 0;             // of the scores
  double sd = 0;               // of the scores
  double key_deviation = 0;    // mean over the candidates, where they were measured
  double value_deviation = 0;  // the same
  double attention = 0;        // paid to all candidates together, where it was asked for
};

// How a blend chooses the rows it recomputes.
struct Selection {
  std::string selector = "key_value_deviation";
  std::string schedule = "flat";    // or gradual
  double ratio = 0;                 // share of the reused rows
  kvblend::BinnedPrior prior = {};  // of stored scores; bins 0: none was measured
  ScoresSeen* seen = nullptr;       // filled in if given
};

// Attention that a probe pays to each cached row, summed over heads and the probe's rows.
struct ProbeSums {
  std::vector<float> mass;        // over all layers
  std::vector<float> value_mass;  // over the layers behind the first, times ‖the row's value‖₂
};

// What a row of a layer costs, in multiply-adds times two.
struct LayerFlops {
  double row = 0;   // products with the weights
  double pair = 0;  // attention to one row
};

inline constexpr std::int32_t kStagingLayers = 4;  // layers that loading may be ahead of a blend

class Host {
 public:
  virtual ~Host() = default;

  [[nodiscard]] virtual const char* name() const = 0;
  // What chunks of this host are stamped with; its dtype is the cache's.
  [[nodiscard]] virtual const kvblend::ModelIdentity& identity() const = 0;
  [[nodiscard]] virtual std::int32_t vocabulary() const = 0;
  [[nodiscard]] virtual std::int32_t context() const = 0;  // positions the model has
  [[nodiscard]] virtual const kvblend::RopeSpec& rope(std::int32_t layer) const = 0;

  // Makes room for that many rows, of a prompt with its answer, or of a chunk with its context. Called once, before all
  // that follows.
  virtual kvblend::Status reserve(std::int32_t rows) = 0;
  // A line about the way blends take on this host, for the report; may be empty.
  [[nodiscard]] virtual std::string note() const { return {}; }
  // Errors: this host cannot blend so, and why.
  [[nodiscard]] virtual kvblend::Status check(const Selection&) const { return {}; }
  // Whether layer_time() says what a blend takes; if not, no plan is made.
  [[nodiscard]] virtual bool can_plan() const { return true; }
  virtual void clear() = 0;
  virtual kvblend::Status truncate(std::int32_t rows) = 0;
  // Appends tokens to the cache.
  virtual kvblend::Status prefill(std::span<const kvblend::TokenId> tokens, Wanted wanted) = 0;
  kvblend::Status decode(kvblend::TokenId token) { return prefill({&token, 1}, Wanted::last); }
  // Of the last prefill: [rows wanted, vocabulary()].
  virtual kvblend::Status logits(std::span<float> out) = 0;

  // The tokens prefilled behind `context`, whose own KV is not kept; without one, alone from position 0 on. Many chunks
  // in a row behind the same context cost its prefill once.
  virtual kvblend::Result<kvblend::ChunkHandle> encode(std::span<const kvblend::TokenId> tokens,
                                                       std::span<const kvblend::TokenId> context) = 0;
  // Fills the cache, which is empty, with the prompt; `sources` has one entry a segment. Sets the run's times but for
  // ttft_s, rows_recomputed, and the logits of the prompt's last row.
  virtual kvblend::Status blend(const kvblend::Prompt& prompt, std::span<const kvblend::ChunkSource> sources,
                                const Selection& selection, Run& run, std::span<float> logits) = 0;
  // Seconds that a layer takes of a blend of `context` rows, made of the chunk as often as it takes, of which `rows`
  // run: what the planner's cost model is calibrated with.
  virtual kvblend::Result<double> layer_time(const kvblend::ChunkHandle& chunk, std::int32_t rows,
                                             std::int32_t context) = 0;

  // Attention of `tokens`, run behind the cached rows, each of which must be at its own number as position, and
  // forgotten again. Errors: a host that cannot tell.
  [[nodiscard]] virtual bool reports_attention() const { return false; }
  virtual kvblend::Status probe(std::span<const kvblend::TokenId> tokens, ProbeSums& out);
  // From now on chunks are stored with scores, if the host can, by the recipe of saliency.hpp with these probes. Called
  // before reserve().
  virtual kvblend::Status store_scores(std::vector<std::vector<kvblend::TokenId>> probes);
  // What chunks' scores are computed by; empty: they have none.
  [[nodiscard]] virtual std::string recipe() const { return {}; }
  [[nodiscard]] virtual LayerFlops layer_flops() const = 0;

  // What a chunk of these tokens, encoded so, is stored under.
  [[nodiscard]] kvblend::ChunkIdentity chunk_identity(std::span<const kvblend::TokenId> tokens,
                                                      std::span<const kvblend::TokenId> context) const;
};

// Name and fingerprint of a model file; the rest is the host's to fill in.
kvblend::Result<kvblend::ModelIdentity> identity_of_file(const std::string& path);

}  // namespace rag
