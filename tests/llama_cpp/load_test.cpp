// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// State blobs that are cut, foreign or mangled are errors, and the context computes afterwards what a fresh one does.
#include "llama_fixture.hpp"

using namespace llama_fixture;
using llama_cpp::Engine;

namespace {

constexpr std::int32_t kCells = 20;

struct Scene {
  llama_cpp::Model model;
  std::unique_ptr<Engine> engine;
  Tokens tokens;
  Outcome expected;

  explicit Scene(const std::string& architecture, DType type = DType::f16, bool flash_attention = false)
      : model(tiny_model(architecture)), engine(open_engine(model, options_for(64, type, flash_attention))) {
    tokens = random_tokens(kCells, model, 1);
    expected = prefill(*engine, {tokens});
  }
  void check_usable() { check_same(prefill(*engine, {tokens}), expected); }
  void check_refused(const Bytes& blob, std::int32_t rows = kCells) {
    require_ok(engine->prefill(std::span(tokens).first(1)));
    const Status status = engine->load(blob, rows);
    CHECK_FALSE(status.ok());
    CHECK(engine->rows() == 0);
  }
};

}  // namespace

TEST_CASE("blobs: what was saved is loaded and goes on to the bit") {
  for (const std::string architecture : {"llama", "gemma3"}) {
    Scene scene(architecture);
    const Tokens answer = greedy(*scene.engine, 8);
    scene.engine->clear();
    require_ok(scene.engine->load(scene.expected.blob, kCells));
    CHECK(outcome_of(*scene.engine).blob == scene.expected.blob);
    // One token anew for its logits, then on.
    require_ok(scene.engine->truncate(kCells - 1));
    require_ok(scene.engine->prefill(std::span(scene.tokens).last(1)));
    CHECK(greedy(*scene.engine, 8) == answer);
  }
}

TEST_CASE("blobs: cut or longer ones and those of other caches are refused") {
  for (const std::string architecture : {"llama", "gemma3"}) {
    CAPTURE(architecture);
    Scene scene(architecture);
    const Bytes& good = scene.expected.blob;
    for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{4}, std::size_t{8}, std::size_t{40},
                                   good.size() / 2, good.size() - 1}) {
      CAPTURE(size);
      scene.check_refused(Bytes(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size)));
    }
    Bytes longer = good;
    longer.push_back(std::byte{0});
    scene.check_refused(longer);
    scene.check_refused(good, kCells - 1);
    scene.check_refused(good, kCells + 1);
    scene.check_refused(Scene(architecture, DType::f32).expected.blob);
    scene.check_refused(Scene(architecture, DType::bf16).expected.blob);
    scene.check_refused(Scene(architecture, DType::q8_0, true).expected.blob);
    scene.check_refused(Scene(architecture, DType::f16, true).expected.blob);  // values not transposed
    scene.check_refused(Scene(architecture == "llama" ? "gemma3" : "llama").expected.blob);
    scene.check_usable();
  }
}

TEST_CASE("blobs: mangled ones are refused or loaded and the context stays usable") {
  for (const std::string architecture : {"llama", "gemma3"}) {
    CAPTURE(architecture);
    Scene scene(architecture);
    const Bytes& good = scene.expected.blob;
    // Where rows are not: head, cells, and what stands before each layer's rows.
    std::vector<bool> is_row(good.size(), false);
    for (std::int32_t layer = 0; layer < scene.model.layers(); ++layer) {
      for (std::int32_t cell = 0; cell < kCells; ++cell) {
        visit_cell(*scene.engine, good, layer, cell,
                   [&](std::ptrdiff_t at, std::int64_t bytes) { std::fill_n(is_row.begin() + at, bytes, true); });
      }
    }
    std::vector<std::size_t> fields;
    for (std::size_t i = 0; i < good.size(); ++i) {
      if (!is_row[i]) fields.push_back(i);
    }
    std::mt19937 random(11);
    int refused = 0;
    int loaded = 0;
    for (int round = 0; round < 300; ++round) {
      CAPTURE(round);
      Bytes blob = good;
      const int changes = 1 + static_cast<int>(random() % 4);
      bool all_rows = true;
      for (int i = 0; i < changes; ++i) {
        // Three of four rounds hit fields: they are few among the rows.
        const std::size_t at = round % 4 != 0 ? fields[random() % fields.size()] : random() % blob.size();
        const auto flipped = static_cast<std::byte>(1 + random() % 255);
        blob[at] ^= flipped;
        all_rows = all_rows && is_row[at];
      }
      if (round % 10 == 0) blob.resize(random() % blob.size());
      const bool whole = blob.size() == good.size();
      const Status status = scene.engine->load(blob, kCells);
      (status.ok() ? loaded : refused) += 1;
      // Only rows may be other ones; what is in them nobody can tell.
      if (status.ok()) CHECK((whole && (all_rows || blob == good)));
      if (whole && all_rows) CHECK(status.ok());
      CHECK(scene.engine->rows() == (status.ok() ? kCells : 0));
      if (round % 10 == 9) scene.check_usable();
    }
    CHECK(refused > 200);
    CHECK(loaded > 20);
    scene.check_usable();
  }
}

TEST_CASE("blobs: rows that are no numbers do not outlive their sequence") {
  for (const std::string architecture : {"llama", "gemma3"}) {
    for (const bool flash_attention : {false, true}) {
      CAPTURE(architecture);
      CAPTURE(flash_attention);
      const llama_cpp::Model model = tiny_model(architecture);
      const auto engine = open_engine(model, options_for(200, DType::f16, flash_attention));
      const Tokens tokens = random_tokens(120, model, 1);
      // Few enough for the kernel of few rows, and enough for that of many; with cells left that they do not fill.
      for (const std::ptrdiff_t count : {5, 70}) {
        CAPTURE(count);
        const Tokens next(tokens.begin(), tokens.begin() + count);
        const Outcome expected = prefill(*engine, {next});
        llama_cpp::BlobWriter writer;
        require_ok(writer.lay_out(engine->blob_format(), 120, Position(0)));
        Bytes blob(writer.bytes().begin(), writer.bytes().end());
        for (std::int32_t layer = 0; layer < model.layers(); ++layer) {
          for (std::int32_t cell = 0; cell < 120; ++cell) {
            visit_cell(*engine, blob, layer, cell, [&](std::ptrdiff_t at, std::int64_t bytes) {
              std::fill_n(blob.begin() + at, bytes, std::byte{0xff});
            });
          }
        }
        require_ok(engine->load(blob, 120));
        require_ok(engine->prefill(std::span(tokens).first(1)));
        REQUIRE(std::isnan(engine->logits()[0]));
        check_same(prefill(*engine, {next}), expected);
      }
    }
  }
}
