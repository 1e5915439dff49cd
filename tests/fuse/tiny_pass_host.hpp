// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// TinyPassHost: a PassHost over the model of tiny_model.hpp, with the arithmetic of the LayerwiseHost there, so that
// both must give the same bits. It keeps record of what it was asked for and counts what PassHost does not allow.
#pragma once

#include <kvblend/fuse/pass_blend.hpp>

#include "scene.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <set>
#include <utility>
#include <vector>

// Allocations of the whole program so far (robustness_test.cpp).
long allocations_so_far();

namespace tiny {

class TinyPassHost {
 public:
  using Planes = std::vector<std::vector<float>>;  // per layer, dense
  // What lies in memory that nothing was placed or computed into. Finite, as PassHost asks for.
  static constexpr float kPoison = 31234.5f;

  struct Pass {
    LayerRange range;
    std::vector<int> rows, outputs;
  };
  // The committed cache, for scene.hpp's cache_error.
  struct Cache {
    TinyPassHost* host;
    [[nodiscard]] auto keys(std::int32_t layer) { return host->plane(host->committed_keys[at(layer)]); }
    [[nodiscard]] auto values(std::int32_t layer) { return host->plane(host->committed_values[at(layer)]); }
  };

  TinyPassHost(const Model& model, bool ranges) : committed_keys(planes(model)), committed_values(planes(model)) {
    model_ = &model;
    ranges_ = ranges;
  }

  // What a test may set: the call whose countdown reaches 0 fails; rows to compute besides those asked for.
  int fail_after = -1;
  std::set<int> extra;
  std::vector<int> cuts;  // of passes that settle
  // What it may look at.
  Planes committed_keys, committed_values;
  std::vector<Pass> passes;
  std::vector<int> scored_rows, probed_rows;
  std::vector<std::vector<float>> logits;  // of the outputs
  int calls = 0, loads = 0, scores = 0, probes = 0, settled = 0, commits = 0, aborts = 0;
  int misuses = 0;           // calls that PassHost rules out
  long own_allocations = 0;  // made in here, by no fault of the library

  [[nodiscard]] Cache cache() { return {this}; }

  // ---- PassHost

  [[nodiscard]] std::int32_t layers() const { return model_->config.layers; }
  [[nodiscard]] const RopeSpec& rope(std::int32_t layer) const { return model_->ropes[at(layer)]; }
  [[nodiscard]] bool runs_ranges() const { return ranges_; }
  [[nodiscard]] ContiguousPlane<F32Codec> keys(std::int32_t layer) {
    expect(state_ == State::begun || settling_);
    return plane(staged_keys_[at(layer)]);
  }
  [[nodiscard]] ContiguousPlane<F32Codec> values(std::int32_t layer) {
    expect(state_ == State::begun || is_probed() || settling_);
    return plane(staged_values_[at(layer)]);
  }
  [[nodiscard]] ContiguousPlane<F32Codec> fresh_keys(std::int32_t layer) {
    expect(state_ == State::begun && layer <= scored_layer_);
    return plane(fresh_keys_[at(layer)]);
  }
  [[nodiscard]] ContiguousPlane<F32Codec> fresh_values(std::int32_t layer) {
    expect(state_ == State::begun && layer <= scored_layer_);
    return plane(fresh_values_[at(layer)]);
  }

  Status begin(const Prompt& prompt) {
    const Own own(this);
    expect(state_ == State::idle);
    if (fails()) return failure("begin");
    state_ = State::begun;
    prompt_ = &prompt;
    passes.clear();
    scored_rows.clear();
    probed_rows.clear();
    logits.clear();
    scored_layer_ = -1;
    keys_ = committed_keys;
    values_ = committed_values;
    for (Planes* all : {&keys_, &values_}) {
      for (auto& one : *all) {
        one.resize(static_cast<std::size_t>(prompt.resident_rows() * width()));
        one.resize(static_cast<std::size_t>(prompt.rows() * width()), -kPoison);
      }
    }
    staged_keys_ = staged_values_ =
        Planes(model_->layers.size(), std::vector<float>(static_cast<std::size_t>(prompt.rows() * width()), kPoison));
    fresh_keys_ = fresh_values_ = planes(*model_);
    hidden_.assign(static_cast<std::size_t>(prompt.rows()), {});
    return {};
  }

  // Exact rows are run with the others, but for resident ones, whose KV is there.
  Status score(std::int32_t layer, std::span<const Row> rows) {
    const Own own(this);
    expect(state_ == State::begun && scored_layer_ < 0 && !rows.empty());
    if (fails()) return failure("score");
    ++scores;
    scored_layer_ = layer;
    for (const Row row : rows) scored_rows.push_back(row.value);
    const Planes keys = keys_, values = values_;
    std::vector<int> run;
    for (int row = prompt_->resident_rows(); row < prompt_->rows(); ++row) run.push_back(row);
    embed(run);
    for (std::int32_t l = 0; l <= layer; ++l) {
      project(l, run);
      for (const Row row : rows) {
        append(fresh_keys_[at(l)], row_of(keys_[at(l)], row.value));
        append(fresh_values_[at(l)], row_of(values_[at(l)], row.value));
      }
      if (l < layer) attend(l, run);
    }
    // The scoring pass had the cache for its own use: what load() brings must not depend on what it left.
    keys_ = keys;
    values_ = values;
    return {};
  }

  Status load() {
    const Own own(this);
    expect(state_ == State::begun);
    if (fails()) return failure("load");
    ++loads;
    state_ = State::loaded;
    const auto resident = static_cast<std::ptrdiff_t>(prompt_->resident_rows() * width());
    for (std::size_t l = 0; l < keys_.size(); ++l) {
      std::copy(staged_keys_[l].begin() + resident, staged_keys_[l].end(), keys_[l].begin() + resident);
      std::copy(staged_values_[l].begin() + resident, staged_values_[l].end(), values_[l].begin() + resident);
    }
    return {};
  }

  Status probe(std::span<const Row> rows, std::int32_t first) {
    const Own own(this);
    expect(state_ == State::loaded && passes.empty() && probed_rows.empty() && !rows.empty());
    expect(first >= 0 && at(first) < rows.size());
    if (fails()) return failure("probe");
    ++probes;
    for (const Row row : rows) probed_rows.push_back(row.value);
    mass_.assign(model_->layers.size(), std::vector<float>(at(prompt_->rows()), 0.0f));
    embed(probed_rows);
    for (std::int32_t l = 0; l < layers(); ++l) {
      project(l, probed_rows);
      attend(l, probed_rows, at(first), mass_[at(l)].data());
      // Nobody may rely on what a probe leaves of its rows.
      for (const Row row : rows) {
        for (Planes* all : {&keys_, &values_}) {
          std::fill_n((*all)[at(l)].begin() + row.value * width(), width(), kPoison);
        }
      }
    }
    return {};
  }
  [[nodiscard]] std::span<const float> attention_mass(std::int32_t layer) {
    expect(is_probed());
    return mass_[at(layer)];
  }

  Status compute(LayerRange range, std::span<const Row> rows, std::span<const Row> outputs) {
    const Own own(this);
    const auto nothing = [](const Part&, std::int32_t) { return Status(); };
    return run_pass(range, rows, outputs, {prompt_->rows()}, nothing);
  }

  // In parts that end before the rows in `cuts`.
  template <class Settle>
  Status compute(LayerRange range, std::span<const Row> rows, std::span<const Row> outputs, const Settle& settle) {
    const Own own(this);
    std::vector<int> ends(cuts);
    ends.push_back(prompt_->rows());
    return run_pass(range, rows, outputs, ends, [&](const Part& part, std::int32_t layer) {
      std::vector<Row> ran;
      std::vector<float> fresh_keys, fresh_values;
      for (const int row : part.rows) {
        ran.push_back(Row(row));
        append(fresh_keys, row_of(keys_[at(layer)], row));
        append(fresh_values, row_of(values_[at(layer)], row));
      }
      settling_ = true;
      const long before = allocations_so_far();
      const Status status = settle(layer, Row(part.first), Row(part.end), ran, plane(fresh_keys), plane(fresh_values));
      own_allocations -= allocations_so_far() - before;  // those are the library's
      settling_ = false;
      const auto from = std::max(part.first, prompt_->resident_rows()) * width();
      for (auto [cache, staged] : {std::pair(&keys_, &staged_keys_), std::pair(&values_, &staged_values_)}) {
        std::copy((*staged)[at(layer)].begin() + from, (*staged)[at(layer)].begin() + part.end * width(),
                  (*cache)[at(layer)].begin() + from);
      }
      ++settled;
      return status;
    });
  }

 private:
  struct Part {
    int first, end;
    std::vector<int> rows;  // that run, in [first, end)
  };

  template <class LayerReady>
  Status run_pass(LayerRange range, std::span<const Row> rows, std::span<const Row> outputs,
                  const std::vector<int>& ends, const LayerReady& layer_ready) {
    if (fails()) return failure("compute");
    Pass pass{range, {}, {}};
    for (const Row row : rows) pass.rows.push_back(row.value);
    for (const Row row : outputs) pass.outputs.push_back(row.value);
    check(pass);
    std::set<int> set(extra);
    set.insert(pass.rows.begin(), pass.rows.end());
    int first = 0;
    for (const int end : ends) {
      const Part part{first, end, {set.lower_bound(first), set.lower_bound(end)}};
      first = end;
      if (range.first == 0) embed(part.rows);
      for (std::int32_t l = range.first; l < range.end; ++l) {
        project(l, part.rows);
        const Status status = layer_ready(part, l);
        if (!status.ok()) return status;
        attend(l, part.rows);
      }
    }
    for (const Row row : outputs) logits.push_back(output_head(*model_, hidden_[at(row.value)]));
    passes.push_back(pass);
    return {};
  }

 public:
  Status commit(std::int32_t rows) {
    const Own own(this);
    expect(state_ == State::loaded || prompt_->empty());
    expect(rows == prompt_->rows());
    if (fails()) return failure("commit");
    ++commits;
    state_ = State::idle;
    committed_keys = keys_;
    committed_values = values_;
    return {};
  }

  void abort() {
    expect(state_ != State::idle);
    ++aborts;
    state_ = State::idle;
  }

 private:
  enum class State : std::uint8_t { idle, begun, loaded };

  struct Own {
    explicit Own(TinyPassHost* h) : host(h), before(allocations_so_far()) { ++host->calls; }
    Own(const Own&) = delete;
    Own& operator=(const Own&) = delete;
    ~Own() { host->own_allocations += allocations_so_far() - before; }
    TinyPassHost* host;
    long before;
  };

  static std::size_t at(std::int32_t i) { return static_cast<std::size_t>(i); }
  static Planes planes(const Model& model) { return Planes(model.layers.size()); }
  [[nodiscard]] std::int32_t width() const { return model_->config.kv_heads * model_->config.head_dim; }
  [[nodiscard]] bool is_probed() const { return state_ == State::loaded && !probed_rows.empty() && passes.empty(); }
  void expect(bool right) { misuses += right ? 0 : 1; }
  bool fails() { return fail_after >= 0 && fail_after-- == 0; }
  static Status failure(const char* call) {
    return Status::error(StatusCode::host_error, "engine failed").at("%s", call);
  }
  [[nodiscard]] ContiguousPlane<F32Codec> plane(std::vector<float>& values) const {
    const auto rows = static_cast<std::int64_t>(values.size()) / width();
    return dense_plane<F32Codec>(reinterpret_cast<std::byte*>(values.data()), rows, model_->config.kv_heads,
                                 model_->config.head_dim);
  }
  [[nodiscard]] std::vector<float> row_of(const std::vector<float>& plane, int row) const {
    return {plane.begin() + row * width(), plane.begin() + (row + 1) * width()};
  }
  static void append(std::vector<float>& to, const std::vector<float>& values) {
    to.insert(to.end(), values.begin(), values.end());
  }

  // The rules of compute().
  void check(const Pass& pass) {
    const auto ascends = [](const std::vector<int>& rows) {
      return std::adjacent_find(rows.begin(), rows.end(), std::greater_equal<>()) == rows.end();
    };
    expect(state_ == State::loaded);
    expect(!pass.rows.empty() && ascends(pass.rows) && pass.rows.front() >= prompt_->resident_rows());
    expect(ascends(pass.outputs));
    expect(std::includes(pass.rows.begin(), pass.rows.end(), pass.outputs.begin(), pass.outputs.end()));
    expect(pass.range.first < pass.range.end && pass.range.end <= layers());
    expect(pass.outputs.empty() || pass.range.end == layers());
    expect(ranges_ || pass.range.size() == layers());
    // What a probe ran is computed in every layer.
    expect(std::includes(pass.rows.begin(), pass.rows.end(), probed_rows.begin(), probed_rows.end()));
    if (passes.empty()) {
      expect(pass.range.first == (ranges_ ? std::max(scored_layer_, 0) : 0));
      if (scored_layer_ >= 0) {
        expect(std::includes(scored_rows.begin(), scored_rows.end(), pass.rows.begin(), pass.rows.end()));
      }
    } else {
      const Pass& before = passes.back();
      expect(pass.range.first == before.range.end);
      expect(std::includes(before.rows.begin(), before.rows.end(), pass.rows.begin(), pass.rows.end()));
    }
  }

  void embed(const std::vector<int>& rows) {
    for (const int row : rows) hidden_[at(row)] = tiny::embed<float>(*model_, prompt_->token(Row(row)));
  }

  // Queries of the rows; their keys and values go into the cache.
  void project(std::int32_t layer, const std::vector<int>& rows) {
    const LayerWeights& w = model_->layers[at(layer)];
    queries_.clear();
    for (const int row : rows) {
      const auto x = rms_norm(hidden_[at(row)], w.attention_norm);
      auto query = multiply(w.q, x, &w.q_bias);
      auto key = multiply(w.k, x, &w.k_bias);
      const auto value = multiply(w.v, x, &w.v_bias);
      rotate(rope(layer), query, prompt_->position(Row(row)).value);
      rotate(rope(layer), key, prompt_->position(Row(row)).value);
      queries_.push_back(query);
      std::copy(key.begin(), key.end(), keys_[at(layer)].begin() + row * width());
      std::copy(value.begin(), value.end(), values_[at(layer)].begin() + row * width());
    }
  }

  // Adds the weights that rows from rows[from] on pay to `mass`, if it is given.
  void attend(std::int32_t layer, const std::vector<int>& rows, std::size_t from = 0, float* mass = nullptr) {
    const LayerWeights& w = model_->layers[at(layer)];
    const Config& c = model_->config;
    const auto read = [this, &c](const std::vector<float>& plane, int row, int head) {
      const auto first = plane.begin() + row * width() + head * c.head_dim;
      return std::vector<float>(first, first + c.head_dim);
    };
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const Position own = prompt_->position(Row(rows[i]));
      const auto attended = attention(
          c, queries_[i], prompt_->rows(), [&](int r, int h) { return read(keys_[at(layer)], r, h); },
          [&](int r, int h) { return read(values_[at(layer)], r, h); },
          [&](int r) { return prompt_->position(Row(r)) <= own; }, i >= from ? mass : nullptr);
      auto& x = hidden_[at(rows[i])];
      const auto projected = multiply(w.o, attended);
      for (std::size_t j = 0; j < x.size(); ++j) x[j] += projected[j];
      const auto mlp = swiglu(w, rms_norm(x, w.mlp_norm));
      for (std::size_t j = 0; j < x.size(); ++j) x[j] += mlp[j];
    }
  }

  const Model* model_;
  bool ranges_;
  State state_ = State::idle;
  const Prompt* prompt_ = nullptr;
  bool settling_ = false;
  std::int32_t scored_layer_ = -1;
  Planes keys_, values_;  // the cache of this blend
  Planes staged_keys_, staged_values_, fresh_keys_, fresh_values_;
  Planes mass_;                                       // [layer][row of the prompt]
  std::vector<std::vector<float>> hidden_, queries_;  // by row of the prompt; of the rows that run
};

static_assert(ScoringPassHost<TinyPassHost> && ProbingPassHost<TinyPassHost> && SettlingPassHost<TinyPassHost> &&
              !LayerwiseHost<TinyPassHost>);

template <class Selector, class Backend = PortableBackend>
Status run_passes(Scene& scene, TinyPassHost& host, Selector selector, Backend backend = {},
                  PassReport* report = nullptr, PassOptions options = {}) {
  LayerwiseFusor<Selector, Backend> fusor(selector, backend);
  std::vector<std::byte> memory(fusor.workspace_bytes(scene.prompt, scene.model.config.head_dim));
  Source source = scene.source();
  const Status status = blend(host, source, fusor, scene.prompt, scene.outputs, memory, report, options);
  CHECK(host.misuses == 0);
  return status;
}

inline bool same_bits(const std::vector<std::byte>& bytes, const std::vector<float>& values) {
  return bytes.size() == values.size() * sizeof(float) && std::memcmp(bytes.data(), values.data(), bytes.size()) == 0;
}

inline double largest_difference_of(const std::vector<float>& x, const std::vector<float>& y) {
  REQUIRE(x.size() == y.size());
  double largest = 0;
  for (std::size_t i = 0; i < x.size(); ++i) largest = std::max(largest, static_cast<double>(std::abs(x[i] - y[i])));
  return largest;
}

}  // namespace tiny
