// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The reference host against a naive forward pass in double, and against itself: pieces, threads, scattered rows.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <kvblend/core/executor.hpp>
#include <kvblend/fuse/host.hpp>
#include <limits>
#include <numeric>

#include "engine/engine_fixture.hpp"
#include "engine/naive_model.hpp"

using namespace engine_fixture;
using eigen_engine::Engine;
using eigen_engine::Model;
using eigen_engine::ModelConfig;
using eigen_engine::ThreadPool;
using eigen_engine::Wanted;
using kvblend::ActiveIndex;
using kvblend::Position;
using kvblend::Prompt;
using kvblend::RopePairing;
using kvblend::Row;
using kvblend::Segment;
using kvblend::StatusCode;

static_assert(kvblend::LayerwiseHost<Engine>);
static_assert(kvblend::AttentionReportingHost<Engine>);
static_assert(kvblend::Executor<eigen_engine::PoolExecutor>);

namespace {

double error_of(const std::vector<float>& logits, const std::vector<naive::Vector>& expected) {
  double worst = 0;
  std::size_t at = 0;
  for (const naive::Vector& row : expected) {
    for (const double value : row) worst = std::max(worst, std::fabs(static_cast<double>(logits.at(at++)) - value));
  }
  return at == logits.size() ? worst : std::numeric_limits<double>::infinity();
}

double max_difference(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    worst = std::max(worst, std::fabs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
  }
  return worst;
}

bool same_bits(const float* a, const float* b, std::size_t count) {
  return std::memcmp(a, b, count * sizeof(float)) == 0;
}
bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && same_bits(a.data(), b.data(), a.size());
}

std::vector<int> consecutive(int count) {
  std::vector<int> values(static_cast<std::size_t>(count));
  std::iota(values.begin(), values.end(), 0);
  return values;
}

// A prompt that is one fresh segment; what a test calls fresh or reused is its own affair.
struct OnePrompt {
  explicit OnePrompt(const std::vector<int>& tokens) : segments{kvblend::fresh_segment(tokens)} {
    auto made = Prompt::make(segments, Position(100000));
    require_ok(made.status);
    prompt = made.value;
  }
  std::vector<Segment> segments;
  Prompt prompt;
};

void copy_fresh(Engine& engine, std::int32_t layer, const std::vector<Row>& rows) {
  const auto bytes = static_cast<std::size_t>(engine.config().key_values()) * sizeof(float);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto active = static_cast<std::int64_t>(i);
    std::memcpy(engine.keys(layer).at(rows[i].value, 0), engine.fresh_keys().at(active, 0), bytes);
    std::memcpy(engine.values(layer).at(rows[i].value, 0), engine.fresh_values().at(active, 0), bytes);
  }
}

// Runs `rows` through all layers of a blend that was begun. `merge` decides whether their fresh KV goes into the cache.
void run_rows(Engine& engine, const std::vector<Row>& rows, bool merge) {
  require_ok(engine.embed(rows));
  const auto kept = first_indices(rows.size());
  for (std::int32_t layer = 0; layer < engine.layers(); ++layer) {
    require_ok(engine.project(layer, rows));
    if (merge) copy_fresh(engine, layer, rows);
    require_ok(engine.attend(layer, rows, kept));
  }
}

// Keys and values of `cached()` back into the planes.
void restore(Engine& engine, std::int32_t layer, const std::vector<float>& saved) {
  const std::size_t half = saved.size() / 2;
  std::memcpy(engine.keys(layer).at(0, 0), saved.data(), half * sizeof(float));
  std::memcpy(engine.values(layer).at(0, 0), saved.data() + half, half * sizeof(float));
}

}  // namespace

TEST_CASE("full prefill equals a naive forward pass in double") {
  for (const RopePairing pairing : {RopePairing::neox, RopePairing::interleaved}) {
    for (const bool bias : {false, true}) {
      for (const bool tied : {false, true}) {
        const std::uint32_t seed = 7u + (bias ? 1u : 0u) + (tied ? 2u : 0u);
        INFO("pairing " << static_cast<int>(pairing) << " bias " << bias << " tied " << tied << " seed " << seed);
        const ModelConfig config = small_config(bias, tied);
        const auto tensors = eigen_engine::random_tensors(config, pairing, seed);
        auto copy = tensors;
        auto model = Model::make(config, std::move(copy));
        require_ok(model.status);
        ThreadPool pool(2);
        Engine engine(model.value, 64, pool);
        const auto tokens = random_tokens(61, config.vocabulary, seed);
        const auto expected = naive::forward(config, tensors, tokens, consecutive(61));
        CHECK(error_of(prefill_logits(engine, tokens), expected.logits) <= 1e-4);
      }
    }
  }
}

TEST_CASE("heads may be single, all shared, or wider than the hidden state's share") {
  const struct {
    int heads, kv_heads, head_dim, hidden, feed_forward;
  } shapes[] = {{1, 1, 8, 24, 33}, {6, 1, 10, 64, 200}, {3, 3, 32, 48, 97}, {14, 2, 4, 56, 48}};
  for (const auto& shape : shapes) {
    INFO("heads " << shape.heads << " over " << shape.kv_heads);
    ModelConfig config = small_config(true, false);
    config.heads = shape.heads;
    config.kv_heads = shape.kv_heads;
    config.head_dim = shape.head_dim;
    config.hidden = shape.hidden;
    config.feed_forward = shape.feed_forward;
    const auto tensors = eigen_engine::random_tensors(config, RopePairing::neox, 5);
    auto copy = tensors;
    auto model = Model::make(config, std::move(copy));
    require_ok(model.status);
    ThreadPool pool(1);
    Engine engine(model.value, 64, pool);
    const auto tokens = random_tokens(30, config.vocabulary, 6);
    CHECK(error_of(prefill_logits(engine, tokens), naive::forward(config, tensors, tokens, consecutive(30)).logits) <=
          1e-4);
  }
}

TEST_CASE("a prefill in pieces and a decode equal one pass") {
  const Model model = small_model(RopePairing::interleaved, true);
  ThreadPool pool(2);
  Engine engine(model, 64, pool);
  const auto tokens = random_tokens(50, 101, 3);
  const auto whole = prefill_logits(engine, tokens);
  const auto vocabulary = static_cast<std::size_t>(engine.config().vocabulary);
  const std::vector<float> last(whole.end() - static_cast<std::ptrdiff_t>(vocabulary), whole.end());

  engine.clear();
  require_ok(engine.prefill(std::span(tokens).first(17), Wanted::none));
  CHECK(engine.active_rows() == 0);
  require_ok(engine.prefill(std::span(tokens).subspan(17, 32)));
  CHECK(engine.active_rows() == 1);
  require_ok(engine.decode(tokens[49]));
  CHECK(engine.rows() == 50);
  CHECK(max_difference(logits_of(engine), last) <= 1e-4);

  require_ok(engine.truncate(49));  // the last step again
  require_ok(engine.decode(tokens[49]));
  CHECK(max_difference(logits_of(engine), last) <= 1e-4);
}

TEST_CASE("a prefill that wants one row's logits leaves the same cache as one that wants all") {
  const Model model = small_model();
  ThreadPool pool(2);
  Engine engine(model, 64, pool);
  const auto tokens = random_tokens(33, 101, 4);
  const auto all = prefill_logits(engine, tokens);
  const auto keys = cached(engine, 3);
  engine.clear();
  require_ok(engine.prefill(tokens));
  CHECK(same_bits(cached(engine, 3), keys));
  const std::vector<float> last(all.end() - 101, all.end());
  CHECK(max_difference(logits_of(engine), last) <= 1e-4);
}

TEST_CASE("the step interface over all rows equals prefill bit for bit") {
  const Model model = small_model(RopePairing::neox, true, false);
  ThreadPool pool(2);
  Engine engine(model, 64, pool);
  const auto tokens = random_tokens(40, 101, 11);
  const auto expected = prefill_logits(engine, tokens);
  engine.clear();
  const OnePrompt one(tokens);
  require_ok(engine.begin(one.prompt));
  run_rows(engine, rows_of(consecutive(40)), true);
  require_ok(engine.commit(40));
  CHECK(same_bits(logits_of(engine), expected));
  require_ok(engine.decode(5));
  CHECK(engine.rows() == 41);
}

TEST_CASE("a scattered row sees all rows up to itself and none behind") {
  const Model model = small_model();
  ThreadPool pool(2);
  Engine engine(model, 16, pool);
  const auto tokens = random_tokens(7, 101, 21);
  const auto full = prefill_logits(engine, tokens);
  std::vector<std::vector<float>> saved;
  for (std::int32_t layer = 0; layer < engine.layers(); ++layer) saved.push_back(cached(engine, layer));
  const OnePrompt one(tokens);
  const auto rows = rows_of({2, 5});

  // Logits of rows 2 and 5 over the stored KV, of which row `changed` is made another.
  const auto run = [&](int changed) {
    engine.clear();
    require_ok(engine.begin(one.prompt));
    for (std::int32_t layer = 0; layer < engine.layers(); ++layer) {
      restore(engine, layer, saved[static_cast<std::size_t>(layer)]);
      if (changed < 0) continue;
      for (std::int32_t head = 0; head < engine.config().kv_heads; ++head) {
        for (auto* values : {reinterpret_cast<float*>(engine.keys(layer).at(changed, head)),
                             reinterpret_cast<float*>(engine.values(layer).at(changed, head))}) {
          for (int i = 0; i < engine.config().head_dim; ++i) values[i] += 1.0f;
        }
      }
    }
    run_rows(engine, rows, false);
    auto logits = logits_of(engine);
    engine.abort();
    return logits;
  };

  const auto unchanged = run(-1);
  REQUIRE(unchanged.size() == 2 * 101);
  CHECK(max_difference({unchanged.begin(), unchanged.begin() + 101}, {full.begin() + 202, full.begin() + 303}) <= 1e-4);
  CHECK(max_difference({unchanged.begin() + 101, unchanged.end()}, {full.begin() + 505, full.begin() + 606}) <= 1e-4);
  for (int changed = 0; changed < 7; ++changed) {
    INFO("changed row " << changed);
    const auto logits = run(changed);
    CHECK(same_bits(logits.data(), unchanged.data(), 101) == (changed > 2));
    CHECK(same_bits(logits.data() + 101, unchanged.data() + 101, 101) == (changed > 5));
  }
}

TEST_CASE("changing a later token changes no earlier bit") {
  const Model model = small_model(RopePairing::interleaved);
  ThreadPool pool(2);
  Engine engine(model, 256, pool);
  auto tokens = random_tokens(150, 101, 31);
  const auto before = prefill_logits(engine, tokens);
  for (const int changed : {149, 100, 1}) {
    INFO("token " << changed);
    auto other = tokens;
    other[static_cast<std::size_t>(changed)] = (other[static_cast<std::size_t>(changed)] + 1) % 101;
    engine.clear();
    const auto after = prefill_logits(engine, other);
    const auto unchanged = static_cast<std::size_t>(changed) * 101;
    CHECK(same_bits(after.data(), before.data(), unchanged));
    CHECK_FALSE(same_bits(after.data() + unchanged, before.data() + unchanged, 101));
  }
}

TEST_CASE("bits are the same at any number of threads") {
  ModelConfig config = small_config(true, false);
  config.hidden = 80;
  config.feed_forward = 300;
  auto model = eigen_engine::random_model(config, RopePairing::neox, 41);
  require_ok(model.status);
  const auto tokens = random_tokens(450, 101, 42);
  std::vector<std::vector<float>> logits, masses;
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    Engine engine(model.value, 500, pool);
    std::vector<float> result = prefill_logits(engine, tokens);
    require_ok(engine.decode(7));
    const auto next = logits_of(engine);
    result.insert(result.end(), next.begin(), next.end());
    for (std::int32_t layer = 0; layer < engine.layers(); ++layer) {
      const auto kv = cached(engine, layer);
      result.insert(result.end(), kv.begin(), kv.end());
    }
    logits.push_back(std::move(result));

    engine.clear();
    const OnePrompt one(tokens);
    const auto rows = rows_of(consecutive(450));
    const auto kept = first_indices(rows.size());
    std::vector<float> mass(450, 0.0f);
    require_ok(engine.begin(one.prompt));
    require_ok(engine.embed(rows));
    for (std::int32_t layer = 0; layer < 2; ++layer) {
      require_ok(engine.project(layer, rows));
      copy_fresh(engine, layer, rows);
      require_ok(engine.attend_and_report(layer, rows, kept, 13, mass));
    }
    masses.push_back(mass);
  }
  CHECK(same_bits(logits[0], logits[1]));
  CHECK(same_bits(logits[0], logits[2]));
  CHECK(same_bits(masses[0], masses[1]));
  CHECK(same_bits(masses[0], masses[2]));
}

TEST_CASE("positions may leave gaps") {
  const ModelConfig config = small_config();
  const auto tensors = eigen_engine::random_tensors(config, RopePairing::neox, 51);
  auto copy = tensors;
  auto model = Model::make(config, std::move(copy));
  require_ok(model.status);
  ThreadPool pool(1);
  Engine engine(model.value, 32, pool);
  const auto tokens = random_tokens(12, 101, 52);
  const std::vector<int> positions = {3, 4, 5, 6, 7, 40, 41, 42, 43, 44, 45, 300};
  const auto expected = naive::forward(config, tensors, tokens, positions);
  require_ok(engine.prefill(std::span(tokens).first(5), Wanted::none, Position(3)));
  require_ok(engine.prefill(std::span(tokens).subspan(5, 6), Wanted::none, Position(40)));
  require_ok(engine.prefill(std::span(tokens).last(1), Wanted::last, Position(300)));
  CHECK(error_of(logits_of(engine), {expected.logits.back()}) <= 1e-4);
  CHECK(engine.positions()[10].value == 45);

  engine.clear();
  std::vector<Segment> segments = {kvblend::fresh_segment(std::span(tokens).first(5), Position(3)),
                                   kvblend::fresh_segment(std::span(tokens).subspan(5, 6), Position(40)),
                                   kvblend::fresh_segment(std::span(tokens).last(1), Position(300))};
  auto prompt = Prompt::make(segments, Position(511));
  require_ok(prompt.status);
  require_ok(engine.begin(prompt.value));
  run_rows(engine, rows_of(consecutive(12)), true);
  require_ok(engine.commit(12));
  CHECK(error_of(logits_of(engine), expected.logits) <= 1e-4);
}

TEST_CASE("reported attention is the attention paid, and each row pays one a head") {
  const ModelConfig config = small_config(true);
  const auto tensors = eigen_engine::random_tensors(config, RopePairing::interleaved, 61);
  auto copy = tensors;
  auto model = Model::make(config, std::move(copy));
  require_ok(model.status);
  ThreadPool pool(2);
  Engine engine(model.value, 64, pool);
  const auto tokens = random_tokens(60, 101, 62);
  const auto expected = naive::forward(config, tensors, tokens, consecutive(60));
  const OnePrompt one(tokens);
  const auto rows = rows_of(consecutive(60));
  const auto kept = first_indices(rows.size());
  for (const int first : {0, 1, 45, 59, 60}) {
    INFO("first " << first);
    engine.clear();
    require_ok(engine.begin(one.prompt));
    require_ok(engine.embed(rows));
    for (std::int32_t layer = 0; layer < engine.layers(); ++layer) {
      std::vector<float> mass(60, 0.5f);  // added to, not overwritten
      require_ok(engine.project(layer, rows));
      copy_fresh(engine, layer, rows);
      require_ok(engine.attend_and_report(layer, rows, kept, first, mass));
      double sum = 0;
      double worst = 0;
      for (std::size_t r = 0; r < 60; ++r) {
        double paid = 0.5;
        for (std::size_t q = static_cast<std::size_t>(first); q < 60; ++q) {
          paid += expected.mass[static_cast<std::size_t>(layer)][q][r];
        }
        worst = std::max(worst, std::fabs(static_cast<double>(mass[r]) - paid));
        sum += static_cast<double>(mass[r]) - 0.5;
      }
      CHECK(worst <= 1e-3);
      CHECK(sum == doctest::Approx(4.0 * (60 - first)).epsilon(1e-5));
    }
  }
}

TEST_CASE("rows that were narrowed away do not disturb those that stay") {
  const Model model = small_model();
  ThreadPool pool(2);
  Engine engine(model, 64, pool);
  const auto tokens = random_tokens(30, 101, 71);
  const auto full = prefill_logits(engine, tokens);
  std::vector<std::vector<float>> saved;
  for (std::int32_t layer = 0; layer < engine.layers(); ++layer) saved.push_back(cached(engine, layer));
  engine.clear();
  const OnePrompt one(tokens);
  require_ok(engine.begin(one.prompt));
  auto rows = rows_of(consecutive(30));
  require_ok(engine.embed(rows));
  for (std::int32_t layer = 0; layer < engine.layers(); ++layer) {
    restore(engine, layer, saved[static_cast<std::size_t>(layer)]);  // as if the others were reused, and exact
    require_ok(engine.project(layer, rows));
    std::vector<ActiveIndex> kept;
    std::vector<Row> next;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (rows[i].value % (layer + 1) != 0 && rows[i].value != 29) continue;
      kept.emplace_back(static_cast<std::int32_t>(i));
      next.push_back(rows[i]);
    }
    require_ok(engine.attend(layer, rows, kept));
    rows = next;
  }
  REQUIRE(engine.active_rows() == static_cast<std::int32_t>(rows.size()));
  const auto logits = logits_of(engine);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto at = rows[i].value * 101;
    CHECK(max_difference({logits.begin() + static_cast<std::ptrdiff_t>(i) * 101,
                          logits.begin() + static_cast<std::ptrdiff_t>(i + 1) * 101},
                         {full.begin() + at, full.begin() + at + 101}) <= 1e-4);
  }
  require_ok(engine.commit(30));
}

TEST_CASE("a pass may end with no row") {
  const Model model = small_model();
  ThreadPool pool(2);
  Engine engine(model, 8, pool);
  const auto tokens = random_tokens(5, 101, 73);
  const OnePrompt one(tokens);
  const auto rows = rows_of({1, 3});
  require_ok(engine.begin(one.prompt));
  require_ok(engine.embed(rows));
  require_ok(engine.project(0, rows));
  require_ok(engine.attend(0, rows, {}));
  CHECK(engine.active_rows() == 0);
  require_ok(engine.project(1, {}));
  require_ok(engine.attend(1, {}, {}));
  require_ok(engine.logits({}));
  require_ok(engine.embed({}));
  engine.abort();
  require_ok(engine.prefill({}));
  CHECK(engine.rows() == 0);
}

TEST_CASE("a blend that fails leaves the cache as it was") {
  const Model model = small_model();
  ThreadPool pool(1);
  Engine engine(model, 16, pool);
  const auto resident = random_tokens(6, 101, 81);
  const auto fresh = random_tokens(5, 101, 82);
  require_ok(engine.prefill(resident));
  const auto before = cached(engine, 2);

  std::vector<Segment> segments = {kvblend::resident_segment(resident), kvblend::fresh_segment(fresh)};
  auto prompt = Prompt::make(segments, Position(511));
  require_ok(prompt.status);
  require_ok(engine.begin(prompt.value));
  CHECK(engine.keys(0).layout.row_count == 11);
  CHECK(engine.rows() == 6);
  const auto rows = rows_of({6, 7, 8, 9, 10});
  require_ok(engine.embed(rows));
  require_ok(engine.project(0, rows));
  copy_fresh(engine, 0, rows);
  CHECK(engine.attend(0, rows, std::vector<ActiveIndex>{ActiveIndex(5)}).code() == StatusCode::out_of_range);
  engine.abort();
  CHECK(engine.rows() == 6);
  CHECK(same_bits(cached(engine, 2), before));
  CHECK(std::equal(resident.begin(), resident.end(), engine.tokens().begin(), engine.tokens().end()));

  // Going on afterwards gives what it would have given without the failure.
  require_ok(engine.prefill(fresh));
  const auto after = logits_of(engine);
  Engine other(model, 16, pool);
  require_ok(other.prefill(resident));
  require_ok(other.prefill(fresh));
  CHECK(same_bits(after, logits_of(other)));
}

TEST_CASE("begin refuses what does not fit and changes nothing") {
  const Model model = small_model();
  ThreadPool pool(1);
  Engine engine(model, 8, pool);
  const auto tokens = random_tokens(9, 101, 91);
  {
    const OnePrompt one(tokens);
    CHECK(engine.begin(one.prompt).code() == StatusCode::out_of_range);
  }
  require_ok(engine.prefill(std::span(tokens).first(4)));
  const auto before = cached(engine, 1);
  const auto refuse = [&](std::vector<Segment> segments, StatusCode code) {
    auto prompt = Prompt::make(segments, Position(100000));
    require_ok(prompt.status);
    CHECK(engine.begin(prompt.value).code() == code);
    CHECK(engine.rows() == 4);
    CHECK(same_bits(cached(engine, 1), before));
  };
  const auto all = std::span<const int>(tokens);
  refuse({kvblend::fresh_segment(all.first(4))}, StatusCode::mismatch);     // the cache holds something else
  refuse({kvblend::resident_segment(all.first(3))}, StatusCode::mismatch);  // … or more
  const std::vector<int> wrong = {tokens[0], (tokens[1] + 1) % 101, tokens[2], tokens[3]};
  refuse({kvblend::resident_segment(wrong)}, StatusCode::mismatch);
  const std::vector<int> unknown = {101};
  refuse({kvblend::resident_segment(all.first(4)), kvblend::fresh_segment(unknown)}, StatusCode::out_of_range);
  refuse({kvblend::resident_segment(all.first(4)), kvblend::fresh_segment(all.first(1), Position(512))},
         StatusCode::out_of_range);
  refuse({kvblend::resident_segment(all.first(4)), kvblend::fresh_segment(all.first(5))}, StatusCode::out_of_range);
  require_ok(engine.decode(3));
}

TEST_CASE("calls out of turn and arguments out of range are errors") {
  const Model model = small_model();
  ThreadPool pool(1);
  Engine engine(model, 8, pool);
  const auto tokens = random_tokens(6, 101, 95);
  const auto rows = rows_of({0, 2, 5});
  CHECK(engine.embed(rows).code() == StatusCode::host_error);
  CHECK(engine.project(0, rows).code() == StatusCode::host_error);
  CHECK(engine.commit(0).code() == StatusCode::host_error);

  const OnePrompt one(tokens);
  require_ok(engine.begin(one.prompt));
  CHECK(engine.begin(one.prompt).code() == StatusCode::host_error);
  CHECK(engine.prefill(tokens).code() == StatusCode::host_error);
  CHECK(engine.truncate(0).code() == StatusCode::host_error);
  CHECK(engine.embed(rows_of({0, 6})).code() == StatusCode::out_of_range);
  CHECK(engine.embed(rows_of({2, 2})).code() == StatusCode::out_of_range);
  require_ok(engine.embed(rows));
  CHECK(engine.project(0, rows_of({0, 2})).code() == StatusCode::invalid_argument);
  CHECK(engine.project(4, rows).code() == StatusCode::out_of_range);
  CHECK(engine.project(-1, rows).code() == StatusCode::out_of_range);
  require_ok(engine.project(0, rows));
  std::vector<float> mass(5);
  CHECK(engine.attend_and_report(0, rows, first_indices(3), 0, mass).code() == StatusCode::invalid_argument);
  mass.resize(6);
  CHECK(engine.attend_and_report(0, rows, first_indices(3), -1, mass).code() == StatusCode::out_of_range);
  CHECK(engine.attend(0, rows, std::vector<ActiveIndex>{ActiveIndex(1), ActiveIndex(0)}).code() ==
        StatusCode::out_of_range);
  CHECK(engine.commit(7).code() == StatusCode::out_of_range);
  engine.abort();

  CHECK(engine.prefill(random_tokens(9, 101, 96)).code() == StatusCode::out_of_range);
  CHECK(engine.prefill(std::vector<int>{1, -1}).code() == StatusCode::out_of_range);
  CHECK(engine.prefill(std::vector<int>{1, 101}).code() == StatusCode::out_of_range);
  CHECK(engine.prefill(tokens, Wanted::last, Position(507)).code() == StatusCode::out_of_range);
  CHECK(engine.prefill(tokens, Wanted::last, Position(-2)).code() == StatusCode::out_of_range);
  CHECK(engine.rows() == 0);
  require_ok(engine.prefill(tokens, Wanted::last, Position(506)));
  CHECK(engine.decode(1).code() == StatusCode::out_of_range);  // behind the model's last position
  CHECK(engine.truncate(7).code() == StatusCode::out_of_range);
  CHECK(engine.truncate(-1).code() == StatusCode::out_of_range);
  std::vector<float> few(100);
  CHECK(engine.logits(few).code() == StatusCode::invalid_argument);
}

TEST_CASE("tensors that do not fit their config are refused by name") {
  const ModelConfig config = small_config(true, false);
  const auto make = [&](auto&& change) {
    ModelConfig changed = config;
    auto tensors = eigen_engine::random_tensors(config, RopePairing::neox, 1);
    change(changed, tensors);
    return Model::make(changed, std::move(tensors)).status;
  };
  using Tensors = eigen_engine::ModelTensors;
  const auto down = make([](ModelConfig&, Tensors& t) { t.layers[2].down.pop_back(); });
  CHECK(down.code() == StatusCode::mismatch);
  CHECK(std::string(down.where()) == "layer 2 down");
  CHECK(std::string(make([](ModelConfig&, Tensors& t) { t.layers.pop_back(); }).where()) == "layers");
  CHECK(std::string(make([](ModelConfig& c, Tensors&) { c.qkv_bias = false; }).where()) == "layer 0 query_bias");
  CHECK(std::string(make([](ModelConfig& c, Tensors&) { c.tied_output = true; }).where()) == "output");
  CHECK(std::string(make([](ModelConfig& c, Tensors&) { c.kv_heads = 3; }).where()) == "kv_heads");
  CHECK(std::string(make([](ModelConfig& c, Tensors&) { c.hidden = 0; }).where()) == "hidden");
  CHECK(std::string(make([](ModelConfig& c, Tensors&) { c.norm_epsilon = NAN; }).where()) == "norm_epsilon");
  CHECK(std::string(make([](ModelConfig&, Tensors& t) { t.layers[1].rope.rotary_dim = 18; }).where()) == "rope");
}
