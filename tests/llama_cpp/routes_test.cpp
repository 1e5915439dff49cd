// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Sets of rows computed anew: in place as by documented calls alone, looking at nothing behind them, as many as suits
// the kernels; and what is said where the first way is not open. The cache holds KV of other tokens at the start.
#include "llama_fixture.hpp"

using namespace llama_fixture;
using llama_cpp::Engine;
using llama_cpp::Route;

namespace {

using Cells = std::vector<std::int32_t>;

Cells range(std::int32_t first, std::int32_t end) {
  Cells cells;
  for (std::int32_t cell = first; cell < end; ++cell) cells.push_back(cell);
  return cells;
}

// Runs of `length` with gaps of `gap`, from `first` on, up to `end`, and the last row.
Cells runs(std::int32_t first, std::int32_t length, std::int32_t gap, std::int32_t end) {
  Cells cells;
  for (std::int32_t start = first; start + length <= end; start += length + gap) {
    for (std::int32_t i = 0; i < length; ++i) cells.push_back(start + i);
  }
  return cells;
}

Cells random_cells(std::int32_t count, double share, unsigned seed) {
  std::mt19937 random(seed);
  std::bernoulli_distribution drawn(share);
  Cells cells;
  for (std::int32_t cell = 0; cell < count; ++cell) {
    if (drawn(random) || cell + 1 == count) cells.push_back(cell);
  }
  return cells;
}

struct Work {
  Tokens tokens;
  Bytes stale;
};

Work make_work(Engine& engine, std::int32_t count) {
  return {random_tokens(count, engine.model(), 1), prefill(engine, {random_tokens(count, engine.model(), 2)}).blob};
}

// `cells` anew over a stale cache; logits of the last of them.
Outcome compute(Engine& engine, const Work& work, const Cells& cells) {
  require_ok(engine.load(work.stale, static_cast<std::int32_t>(work.tokens.size())));
  const std::vector<Row> rows = rows_of(cells);
  require_ok(engine.compute({0, engine.model().layers()}, rows, work.tokens, std::span<const Row>(rows).last(1)));
  return outcome_of(engine);
}

llama_cpp::EngineOptions by_runs(llama_cpp::EngineOptions options) {
  options.route = Route::runs;
  return options;
}

// Single tokens take kernels of their own, which add up in another order. How much that can be is what llama.cpp shows
// of itself: the same prompt in one batch and token by token.
void check_single_rows(Engine& in_place, Engine& slow, std::int32_t count) {
  const Work work = make_work(in_place, count);
  const Outcome whole = prefill(in_place, {work.tokens});
  std::vector<Tokens> single;
  for (const TokenId token : work.tokens) single.push_back({token});
  const double own = relative_error(prefill(in_place, single).logits, whole.logits);

  const Cells cells = random_cells(count, 0.15, 7);
  const Outcome a = compute(in_place, work, cells);
  const Outcome b = compute(slow, work, cells);
  const double difference = relative_error(a.logits, b.logits);
  // Another set of as many rows.
  Cells wrong = cells;
  for (std::size_t i = 0; i + 1 < wrong.size(); ++i) {
    if (wrong[i] + 1 < wrong[i + 1]) ++wrong[i];
  }
  REQUIRE(wrong != cells);
  const double wrong_difference = relative_error(compute(in_place, work, wrong).logits, b.logits);
  MESSAGE(in_place.model().architecture()
          << ", relative L2 of logits: one batch against single tokens " << own << ", in place against runs "
          << difference << ", of wrong rows " << wrong_difference);
  CHECK(difference <= own);
  CHECK(wrong_difference > own);  // the bound tells them apart
  CHECK(in_place.route() == Route::in_place);
}

void check_runs(Engine& in_place, Engine& slow, std::int32_t count) {
  const Work work = make_work(in_place, count);
  for (const std::int32_t length : {16, 64}) {
    CAPTURE(length);
    const Cells cells = runs(5, length, 13, count);
    const Outcome a = compute(in_place, work, cells);
    const Outcome b = compute(slow, work, cells);
    REQUIRE(in_place.route() == Route::in_place);
    check_same(a, b);
    // And all other cells are as they were.
    for (const std::int32_t layer : {0, in_place.model().layers() - 1}) {
      CHECK(changed_cells(in_place, work.stale, a.blob, layer, count) == cells);
    }
  }
}

}  // namespace

TEST_CASE("runs of rows: in place as by documented calls") {
  for (const std::string architecture : {"llama", "qwen2"}) {
    CAPTURE(architecture);
    const llama_cpp::Model model = tiny_model(architecture);
    for (const DType type : {DType::f16, DType::f32, DType::bf16}) {
      const auto options = options_for(200, type);
      check_runs(*open_engine(model, options), *open_engine(model, by_runs(options)), 180);
    }
  }
}

TEST_CASE("runs of rows: in place as by documented calls on SmolLM2") {
  const std::string path = model_path(kSmolLm2);
  if (path.empty()) return;
  const llama_cpp::Model model = open_model(path);
  const auto options = options_for(200);
  check_runs(*open_engine(model, options), *open_engine(model, by_runs(options)), 150);
}

TEST_CASE("random rows: in place as by documented calls up to kernels of single tokens") {
  for (const std::string architecture : {"llama", "qwen2"}) {
    const llama_cpp::Model model = tiny_model(architecture);
    const auto options = options_for(200);
    check_single_rows(*open_engine(model, options), *open_engine(model, by_runs(options)), 180);
  }
  const std::string path = model_path(kSmolLm2);
  if (path.empty()) return;
  const llama_cpp::Model model = open_model(path);
  const auto options = options_for(120);
  check_single_rows(*open_engine(model, options), *open_engine(model, by_runs(options)), 100);
}

TEST_CASE("the other route keeps the order of cells: chunks and conversations go on from there") {
  const llama_cpp::Model model = tiny_model("llama");
  const auto engine = open_engine(model, by_runs(options_for(256)));
  std::vector<Part> parts = {{SegmentKind::fresh, random_tokens(21, model, 1)},
                             {SegmentKind::cached, random_tokens(40, model, 2)},
                             {SegmentKind::fresh, random_tokens(19, model, 3)}};
  const Tokens all = tokens_of(parts);
  const Outcome expected = prefill(*engine, {all});
  llama_cpp::BlobWriter staging;
  const auto chunks = make_chunks(*engine, parts);
  engine->clear();
  const Outcome blended = blend_parts(*engine, staging, parts, chunks, first_rows(1));
  require_ok(blended.status);
  check_same(blended, expected);
  const Outcome half = blend_parts(*engine, staging, parts, chunks, first_rows(0.5));
  require_ok(half.status);
  const auto reader = llama_cpp::BlobReader::open(engine->blob_format(), half.blob);
  require_ok(reader.status);
  CHECK(reader.value.cells(0) == static_cast<std::int32_t>(all.size()));
  // A second turn.
  std::vector<Part> turn = {{SegmentKind::resident, all}, parts[1], {SegmentKind::fresh, random_tokens(9, model, 4)}};
  const Outcome second = blend_parts(*engine, staging, turn, {nullptr, chunks[1], nullptr}, first_rows(0.5));
  require_ok(second.status);
}

TEST_CASE("nothing behind a row changes it") {
  for (const std::string architecture : {"llama", "qwen2", "gemma3"}) {
    for (const bool flash_attention : {false, true}) {
      CAPTURE(architecture);
      CAPTURE(flash_attention);
      const llama_cpp::Model model = tiny_model(architecture);
      const auto engine = open_engine(model, options_for(128, DType::f16, flash_attention));
      // Within gemma3's window, or its blob would not hold the first cells; past it in exact_test.cpp.
      const std::int32_t count = model.window() > 0 ? 64 : 120;
      const std::int32_t half = count / 2;
      const Work work = make_work(*engine, count);
      Work noisy = work;
      const Tokens other = random_tokens(count, model, 3);
      std::mt19937 random(4);
      for (std::int32_t cell = half; cell < count; ++cell) {
        noisy.tokens[static_cast<std::size_t>(cell)] = other[static_cast<std::size_t>(cell)];
        for (std::int32_t layer = 0; layer < model.layers(); ++layer) {
          visit_cell(*engine, noisy.stale, layer, cell, [&](std::ptrdiff_t at, std::int64_t bytes) {
            for (std::int64_t i = 0; i + 1 < bytes; i += 2) {
              const auto bits = static_cast<std::uint16_t>(random() & 0xbfff);  // any below 2 in size
              std::memcpy(noisy.stale.data() + at + i, &bits, sizeof bits);
            }
          });
        }
      }
      // One pass; and three, each over fewer rows than the one before.
      const Cells wide = random_cells(count, 0.5, 5);
      Cells narrow;
      Cells narrower;
      for (std::size_t i = 0; i < wide.size(); ++i) {
        if (i % 3 != 0 || i + 1 == wide.size()) narrow.push_back(wide[i]);
        if (i % 3 == 1 || i + 1 == wide.size()) narrower.push_back(wide[i]);
      }
      const auto gradual = [&](const Work& what) {
        require_ok(engine->load(what.stale, count));
        require_ok(engine->compute({0, 1}, rows_of(wide), what.tokens, {}));
        require_ok(engine->compute({1, 3}, rows_of(narrow), what.tokens, {}));
        const std::vector<Row> rows = rows_of(narrower);
        require_ok(engine->compute({3, model.layers()}, rows, what.tokens, std::span<const Row>(rows).last(1)));
        return outcome_of(*engine);
      };
      const auto check = [&](const Outcome& clean, const Outcome& disturbed, const Cells& last_rows) {
        for (std::int32_t layer = 0; layer < model.layers(); ++layer) {
          // All behind the half, none before.
          CHECK(changed_cells(*engine, clean.blob, disturbed.blob, layer, count) == range(half, count));
        }
        // Rows before the half did run, in the last layer too.
        Cells ran = changed_cells(*engine, work.stale, clean.blob, model.layers() - 1, half);
        CHECK(std::includes(ran.begin(), ran.end(), last_rows.begin(),
                            std::lower_bound(last_rows.begin(), last_rows.end(), half)));
        CHECK_FALSE(same_bits(clean.logits, disturbed.logits));
      };
      check(compute(*engine, work, wide), compute(*engine, noisy, wide), wide);
      check(gradual(work), gradual(noisy), narrower);
      CHECK(engine->route() == Route::in_place);
    }
  }
}

TEST_CASE("flash attention gets enough rows for its fast kernel where it has one") {
  const llama_cpp::Model model = tiny_model("llama");
  const std::int32_t count = 200;
  const std::int32_t last_layer = model.layers() - 1;
  Cells wanted;  // 20 rows, 9 apart
  for (std::int32_t i = 0; i < 20; ++i) wanted.push_back(7 + 9 * i);
  // With the 44 last rows before the last wanted one that are not wanted themselves.
  Cells filled = wanted;
  for (std::int32_t cell = wanted.back(); filled.size() < 64; --cell) {
    if (std::find(wanted.begin(), wanted.end(), cell) == wanted.end()) filled.push_back(cell);
  }
  std::sort(filled.begin(), filled.end());
  const auto check = [&](DType type, bool flash_attention, const Cells& asked, const Cells& expected,
                         std::int32_t fill_from = 5) {
    CAPTURE(std::string(to_string(type)));
    CAPTURE(fill_from);
    llama_cpp::EngineOptions options = options_for(256, type, flash_attention);
    options.fill_from = fill_from;
    const auto engine = open_engine(model, options);
    CHECK(engine->fill_from() == fill_from);
    const Work work = make_work(*engine, count);
    const Outcome outcome = compute(*engine, work, asked);
    CHECK(changed_cells(*engine, work.stale, outcome.blob, last_layer, count) == expected);
    CHECK(outcome.logits.size() == static_cast<std::size_t>(model.vocabulary()));
    check_same(outcome, compute(*engine, work, expected));
  };
  check(DType::f16, true, wanted, filled);
  check(DType::f32, true, wanted, filled);
  check(DType::q8_0, true, wanted, wanted);
  check(DType::bf16, true, wanted, wanted);
  check(DType::f16, false, wanted, wanted);
  // As few as no kernel is faster for.
  check(DType::f16, true, {10, 50, 90, 130}, {10, 50, 90, 130});
  check(DType::f16, true, wanted, filled, 20);
  check(DType::f16, true, wanted, wanted, 21);
}

TEST_CASE("how many rows the fast kernel pays for is measured and leaves nothing behind") {
  const llama_cpp::Model model = tiny_model("llama");
  const Tokens tokens = random_tokens(100, model, 1);
  for (const DType type : {DType::f16, DType::bf16}) {
    llama_cpp::EngineOptions options = options_for(256, type, true);
    const auto plain = open_engine(model, options);
    options.fill_from = 0;
    const auto measured = open_engine(model, options);
    if (type == DType::f16) {
      CHECK(measured->fill_from() >= 1);
      CHECK(measured->fill_from() <= 64);
    } else {
      CHECK(measured->fill_from() == 64);  // it has no fast kernel
    }
    CHECK(measured->rows() == 0);
    CHECK(measured->route() == Route::in_place);
    check_same(prefill(*measured, {tokens}), prefill(*plain, {tokens}));
  }
}

TEST_CASE("rows that are added run from the layer that the others start at or not at all") {
  const llama_cpp::Model model = tiny_model("llama");
  const auto engine = open_engine(model, options_for(256, DType::f16, true));
  const std::int32_t resident = 30;
  const std::int32_t count = 200;
  const Work work = make_work(*engine, count);
  engine->clear();
  require_ok(engine->prefill(std::span(work.tokens).first(resident), llama_cpp::Wanted::none));
  require_ok(engine->score(1, std::span(work.tokens).subspan(resident)));
  require_ok(engine->load(work.stale, count));
  Cells wanted;
  for (std::int32_t cell = 31; cell < 70; cell += 2) wanted.push_back(cell);
  const std::vector<Row> rows = rows_of(wanted);
  require_ok(engine->compute({1, model.layers()}, rows, work.tokens, std::span<const Row>(rows).last(1)));
  const Outcome outcome = outcome_of(*engine);
  CHECK(engine->route() == Route::in_place);
  CHECK(changed_cells(*engine, work.stale, outcome.blob, 0, count).empty());
  for (std::int32_t layer = 1; layer < model.layers(); ++layer) {
    CHECK(changed_cells(*engine, work.stale, outcome.blob, layer, count) == range(resident, 70));
  }
}

TEST_CASE("a rewrite that fails its checks leaves the work to the other route and says so") {
  const llama_cpp::Model model = tiny_model("llama");
  const auto options = options_for(128);
  const auto engine = open_engine(model, options);
  const auto slow = open_engine(model, by_runs(options));
  const Work work = make_work(*engine, 100);
  const Cells cells = runs(5, 19, 10, 100);
  const std::vector<Row> rows = rows_of(cells);
  // Nobody has run these rows up to layer 2.
  engine->clear();
  require_ok(engine->score(1, work.tokens));
  require_ok(engine->load(work.stale, 100));
  require_ok(engine->compute({2, model.layers()}, rows, work.tokens, std::span<const Row>(rows).last(1)));
  check_same(outcome_of(*engine), compute(*slow, work, cells));
  CHECK(engine->route() == Route::runs);
  CHECK_FALSE(engine->runs_ranges());
  INFO(engine->route_reason());
  CHECK(engine->route_reason().find("no hidden row at layer 2") != std::string::npos);
  // Before the last layer there is no other way.
  const auto third = open_engine(model, options);
  require_ok(third->load(work.stale, 100));
  const Status status = third->compute({2, 3}, rows, work.tokens, {});
  CHECK(status.code() == StatusCode::host_error);
}

TEST_CASE("where ranges of layers cannot run a budget that narrows is refused and a flat one blends") {
  const llama_cpp::Model model = tiny_model("qwen2");
  const auto engine = open_engine(model, by_runs(options_for(256)));
  CHECK_FALSE(engine->runs_ranges());
  CHECK(engine->route_reason().empty());  // it is what was asked for
  const std::vector<Part> parts = {{SegmentKind::fresh, random_tokens(21, model, 1)},
                                   {SegmentKind::cached, random_tokens(40, model, 2)},
                                   {SegmentKind::fresh, random_tokens(19, model, 3)}};
  const Outcome expected = prefill(*engine, {tokens_of(parts)});
  llama_cpp::BlobWriter staging;
  const auto chunks = make_chunks(*engine, parts);
  engine->clear();
  for (const Status& status : {blend_parts(*engine, staging, parts, chunks, gradual_first_rows(1)).status,
                               blend_parts(*engine, staging, parts, chunks, gradual_deviating(1)).status}) {
    CHECK(status.code() == StatusCode::unsupported);
    CHECK(std::string(status.where()) == "budget");
    CHECK(engine->rows() == 0);
  }
  const Outcome blended = blend_parts(*engine, staging, parts, chunks, deviating(1));
  require_ok(blended.status);
  CHECK(blended.report.passes == 1);
  check_same(blended, expected);
}
