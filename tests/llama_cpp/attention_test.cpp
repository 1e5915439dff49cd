// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Where attention goes: read from one attention of ggml's against plain arithmetic; and of small models with and
// without flash attention, whose caches a probe must leave as they were. tests/engine has it against another engine's.
#include <llama_cpp/attention_reader.hpp>

#include "llama_fixture.hpp"

#include <limits>

#include "ggml-backend.h"

using namespace llama_fixture;
using llama_cpp::AttentionReader;
using llama_cpp::Engine;
using llama_cpp::Route;

namespace {

// ---- one attention of ggml's ----------------------------------------------------------------------------------------

constexpr std::int64_t kWidth = 32;
constexpr std::int64_t kHeads = 6;
constexpr std::int64_t kKvHeads = 2;
constexpr std::int64_t kCells = 50;
constexpr std::int64_t kRows = 5;  // in the cells from kFirst on
constexpr std::int64_t kFirst = 40;
constexpr float kScale = 0.4f;
constexpr float kHiddenCell = -std::numeric_limits<float>::infinity();

struct Kind {
  bool flash = false;
  ggml_type type = GGML_TYPE_F16;
  float cap = 0;
  std::int64_t window = kCells;
  float max_bias = 0;
  bool sinks = false;
  std::int64_t hole = -1;  // a cell that is hidden though its neighbours are not
};

class OneAttention {
 public:
  explicit OneAttention(const Kind& kind) : kind_(kind), context_(ggml_init({std::size_t{1} << 20, nullptr, true})) {
    ggml_context* c = context_.get();
    const auto cache = [&](const char* name) {
      ggml_tensor* tensor = ggml_new_tensor_2d(c, kind.type, kWidth * kKvHeads, kCells);
      ggml_set_name(tensor, name);
      return tensor;
    };
    ggml_tensor* keys = cache("cache_k_l0");
    ggml_tensor* values = cache("cache_v_l0");
    ggml_tensor* queries = ggml_new_tensor_3d(c, GGML_TYPE_F32, kWidth, kHeads, kRows);
    ggml_tensor* mask = ggml_new_tensor_2d(c, GGML_TYPE_F16, kCells, kRows);
    ggml_tensor* sinks = ggml_new_tensor_1d(c, GGML_TYPE_F32, kHeads);
    const auto heads_of = [&](ggml_tensor* all) {
      return ggml_view_3d(c, all, kWidth, kCells, kKvHeads, all->nb[1], ggml_row_size(kind.type, kWidth), 0);
    };
    ggml_tensor* q = ggml_permute(c, queries, 0, 2, 1, 3);
    if (kind.flash) {
      node_ = ggml_flash_attn_ext(c, q, heads_of(keys), heads_of(values), mask, kScale, kind.max_bias, kind.cap);
      if (kind.sinks) ggml_flash_attn_ext_add_sinks(node_, sinks);
    } else {
      node_ = ggml_soft_max_ext(c, ggml_mul_mat(c, heads_of(keys), q), mask, kScale, kind.max_bias);
      if (kind.sinks) ggml_soft_max_add_sinks(node_, sinks);
    }
    backend_.reset(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    buffer_.reset(ggml_backend_alloc_ctx_tensors(c, backend_.get()));
    std::mt19937 random(3);
    std::normal_distribution<float> draw(0, 1);
    for (ggml_tensor* tensor : {keys, values, queries, sinks}) {
      std::vector<float> numbers(static_cast<std::size_t>(ggml_nelements(tensor)));
      for (float& number : numbers) number = draw(random);
      set(tensor, numbers);
      if (tensor == keys) keys_ = get(tensor);  // as they were rounded
      if (tensor == queries) queries_ = kind.type == GGML_TYPE_Q8_0 ? rounded(kind.type, numbers) : numbers;
    }
    std::vector<float> shown;
    for (std::int64_t row = 0; row < kRows; ++row) {
      for (std::int64_t cell = 0; cell < kCells; ++cell) shown.push_back(sees(row, cell) ? 0.0f : kHiddenCell);
    }
    set(mask, shown);
    ggml_cgraph* graph = ggml_new_graph(c);
    ggml_build_forward_expand(graph, node_);
    REQUIRE(ggml_backend_graph_compute(backend_.get(), graph) == GGML_STATUS_SUCCESS);
  }

  [[nodiscard]] ggml_tensor* node() const { return node_; }
  [[nodiscard]] bool sees(std::int64_t row, std::int64_t cell) const {
    return cell != kind_.hole && cell <= kFirst + row && cell > kFirst + row - kind_.window;
  }

  // What the first `cells` get of rows [first, end).
  [[nodiscard]] std::vector<double> mass(std::int64_t cells, std::int64_t first, std::int64_t end) const {
    std::vector<double> out(static_cast<std::size_t>(cells), 0.0);
    for (std::int64_t row = first; row < end; ++row) {
      for (std::int64_t head = 0; head < kHeads; ++head) {
        std::vector<double> weights;
        double sum = 0;
        for (std::int64_t cell = 0; cell < kCells; ++cell) {
          double score = 0;
          for (std::int64_t d = 0; d < kWidth; ++d) {
            score += static_cast<double>(queries_[index((row * kHeads + head) * kWidth + d)]) *
                     static_cast<double>(keys_[index((cell * kKvHeads + head / (kHeads / kKvHeads)) * kWidth + d)]);
          }
          score *= static_cast<double>(kScale);
          const auto cap = static_cast<double>(kind_.cap);
          if (cap != 0) score = cap * std::tanh(score / cap);
          weights.push_back(sees(row, cell) ? std::exp(score) : 0.0);
          sum += weights.back();
        }
        for (std::size_t cell = 0; cell < out.size(); ++cell) out[cell] += weights[cell] / sum;
      }
    }
    return out;
  }

 private:
  struct Free {
    void operator()(ggml_context* context) const { ggml_free(context); }
    void operator()(ggml_backend* backend) const { ggml_backend_free(backend); }
    void operator()(ggml_backend_buffer* buffer) const { ggml_backend_buffer_free(buffer); }
  };
  static std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }
  // ggml multiplies q8_0 keys with queries that it rounds to the same.
  static std::vector<float> rounded(ggml_type type, const std::vector<float>& numbers) {
    const auto count = static_cast<std::int64_t>(numbers.size());
    std::vector<std::byte> bytes(ggml_row_size(type, count));
    ggml_quantize_chunk(type, numbers.data(), bytes.data(), 0, count / kWidth, kWidth, nullptr);
    std::vector<float> out(numbers.size());
    ggml_get_type_traits(type)->to_float(bytes.data(), out.data(), count);
    return out;
  }
  static void set(ggml_tensor* tensor, const std::vector<float>& numbers) {
    std::vector<std::byte> bytes(ggml_nbytes(tensor));
    ggml_quantize_chunk(tensor->type, numbers.data(), bytes.data(), 0, ggml_nrows(tensor), tensor->ne[0], nullptr);
    ggml_backend_tensor_set(tensor, bytes.data(), 0, bytes.size());
  }
  static std::vector<float> get(const ggml_tensor* tensor) {
    std::vector<std::byte> bytes(ggml_nbytes(tensor));
    ggml_backend_tensor_get(tensor, bytes.data(), 0, bytes.size());
    std::vector<float> numbers(index(ggml_nelements(tensor)));
    if (tensor->type == GGML_TYPE_F32) {
      std::memcpy(numbers.data(), bytes.data(), bytes.size());
    } else {
      ggml_get_type_traits(tensor->type)->to_float(bytes.data(), numbers.data(), ggml_nelements(tensor));
    }
    return numbers;
  }

  Kind kind_;
  std::unique_ptr<ggml_context, Free> context_;
  std::unique_ptr<ggml_backend, Free> backend_;
  std::unique_ptr<ggml_backend_buffer, Free> buffer_;
  ggml_tensor* node_ = nullptr;
  std::vector<float> keys_, queries_;
};

// Reads attention that went before to the first kFirst cells, of all rows but the first and the last.
Status read(AttentionReader& reader, const OneAttention& attention) {
  std::vector<std::int32_t> own;
  for (std::int64_t row = 0; row < kRows; ++row) own.push_back(static_cast<std::int32_t>(kFirst + row));
  reader.begin(1, kFirst, own, 1, kRows - 1);
  reader.begin_graph();
  CHECK_FALSE(reader.wants(attention.node()->src[0]));
  REQUIRE(reader.wants(attention.node()));
  const bool fine = reader.read(attention.node());
  const Status status = reader.finish();
  CHECK(fine == status.ok());
  CHECK(reader.complete() == fine);
  return status;
}

void check_read(const Kind& kind, double tolerance) {
  CAPTURE(kind.flash);
  CAPTURE(static_cast<int>(kind.type));
  const OneAttention attention(kind);
  AttentionReader reader;
  require_ok(read(reader, attention));
  const std::vector<double> expected = attention.mass(kFirst, 1, kRows - 1);
  CHECK(relative_error(reader.mass(0), expected) <= tolerance);
}

// ---- models ---------------------------------------------------------------------------------------------------------

std::vector<std::vector<float>> masses(const Engine& engine) {
  std::vector<std::vector<float>> out;
  for (std::int32_t layer = 0; layer < engine.model().layers(); ++layer) {
    const auto mass = engine.attention_mass(layer);
    out.emplace_back(mass.begin(), mass.end());
  }
  return out;
}

// Behind a prefilled prompt; the cache and what follows stay as they were.
std::vector<std::vector<float>> probed(Engine& engine, const Tokens& tokens, const Tokens& probe) {
  const Outcome before = prefill(engine, {tokens});
  const Tokens answer = greedy(engine, 8);
  prefill(engine, {tokens});
  require_ok(engine.probe(probe));
  CHECK(engine.rows() == static_cast<std::int32_t>(tokens.size()));
  check_same(outcome_of(engine), before);
  std::vector<std::vector<float>> out = masses(engine);
  CHECK(greedy(engine, 8) == answer);
  return out;
}

double worst_error(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b) {
  double worst = 0;
  for (std::size_t layer = 0; layer < a.size(); ++layer) {
    worst = std::max(worst, relative_error(a[layer], b[layer]));
  }
  return worst;
}

DeviationSelector<AttentionValueMass, RatioBudget> attending(double ratio) {
  return DeviationSelector<AttentionValueMass, RatioBudget>(AttentionValueMass{}, RatioBudget(ratio));
}

}  // namespace

TEST_CASE("attention of one node is read as plain arithmetic has it") {
  for (const bool flash : {false, true}) {
    check_read({flash, GGML_TYPE_F16}, 2e-3);
    check_read({flash, GGML_TYPE_BF16}, 1e-2);
    check_read({flash, GGML_TYPE_F16, 0, 20}, 2e-3);
  }
  // Without flash attention a cap is a node of its own before the softmax, and llama.cpp takes no q8_0 values.
  check_read({true, GGML_TYPE_F16, 3}, 1e-5);
  check_read({true, GGML_TYPE_Q8_0}, 1e-5);
}

TEST_CASE("attention that cannot be read is refused with the reason") {
  const auto refused = [](const Kind& kind, const char* why) {
    CAPTURE(kind.flash);
    const OneAttention attention(kind);
    AttentionReader reader;
    const Status status = read(reader, attention);
    CHECK(status.code() == StatusCode::host_error);
    INFO(text_of(status));
    CHECK(std::string(status.message()).find(why) != std::string::npos);
  };
  for (const bool flash : {false, true}) {
    Kind kind;
    kind.flash = flash;
    Kind sinks = kind;
    sinks.sinks = true;
    refused(sinks, "sinks");
    Kind bias = kind;
    bias.max_bias = 8;
    refused(bias, "biased by distance");
    Kind hole = kind;
    hole.hole = 17;
    refused(hole, "sees others than the cells before it");
    {
      // Another result than that of the node's inputs.
      const OneAttention attention(kind);
      std::vector<float> wrong(static_cast<std::size_t>(ggml_nelements(attention.node())), 0.3f);
      ggml_backend_tensor_set(attention.node(), wrong.data(), 0, wrong.size() * sizeof(float));
      AttentionReader reader;
      const Status status = read(reader, attention);
      INFO(text_of(status));
      CHECK(std::string(status.message()).find(flash ? "off by" : "sum to") != std::string::npos);
    }
  }
  AttentionReader reader;
  const std::array<std::int32_t, 1> own = {40};
  reader.begin(1, 40, own, 0, 1);
  reader.begin_graph();
  CHECK(std::string(reader.finish().message()).find("no attention") != std::string::npos);
}

TEST_CASE("a probe is the same with flash attention and without and leaves the cache") {
  for (const std::string architecture : {"llama", "qwen2", "gemma3"}) {
    CAPTURE(architecture);
    const llama_cpp::Model model = tiny_model(architecture);
    const Tokens tokens = random_tokens(150, model, 1);
    const Tokens probe = random_tokens(13, model, 2);
    const auto plain = probed(*open_engine(model, options_for(256)), tokens, probe);
    for (std::size_t layer = 0; layer < plain.size(); ++layer) {
      CAPTURE(layer);
      double sum = 0;
      for (const float mass : plain[layer]) sum += static_cast<double>(mass);
      // Some of every row's attention goes to the probe itself.
      const double heads = tiny_gguf::kHidden / tiny_gguf::kHeadDim;
      CHECK(sum > 0);
      CHECK(sum < 13 * heads);
    }
    CHECK(worst_error(probed(*open_engine(model, options_for(256, DType::f32)), tokens, probe), plain) < 1e-2);
    CHECK(worst_error(probed(*open_engine(model, options_for(256, DType::f16, true)), tokens, probe), plain) < 1e-2);
    CHECK(worst_error(probed(*open_engine(model, options_for(256, DType::q8_0, true)), tokens, probe), plain) < 0.1);
    llama_cpp::EngineOptions small = options_for(256);
    small.batch = 64;
    const Tokens longer = random_tokens(70, model, 3);  // two batches
    CHECK(worst_error(probed(*open_engine(model, small), tokens, longer),
                      probed(*open_engine(model, options_for(256)), tokens, longer)) < 1e-2);
  }
}

TEST_CASE("attention to rows that a window has passed comes from the other layers alone") {
  const llama_cpp::Model model = tiny_model("gemma3");
  const Tokens tokens = random_tokens(150, model, 1);
  const Tokens probe = random_tokens(7, model, 2);
  for (const bool flash : {false, true}) {
    CAPTURE(flash);
    const auto engine = open_engine(model, options_for(256, DType::f16, flash));
    require_ok(engine->prefill(tokens));
    require_ok(engine->probe(probe));
    for (std::int32_t layer = 0; layer < model.layers(); ++layer) {
      CAPTURE(layer);
      const auto mass = engine->attention_mass(layer);
      for (std::int32_t row = 0; row < 150; ++row) {
        CAPTURE(row);
        // The probe's first row, at 150, sees its own position and those of window - 1 before it.
        const bool seen = (layer + 1) % 6 == 0 || row > 150 - tiny_gguf::kWindow;
        CHECK((mass[static_cast<std::size_t>(row)] > 0) == seen);
      }
    }
  }
}

TEST_CASE("probed rows of a prompt are as those run behind it and no other row changes") {
  const llama_cpp::Model model = tiny_model("llama");
  for (const bool flash : {false, true}) {
    CAPTURE(flash);
    const auto engine = open_engine(model, options_for(256, DType::f16, flash));
    const Tokens tokens = random_tokens(150, model, 1);
    const Outcome full = prefill(*engine, {tokens});
    const std::vector<std::int32_t> cells = {0, 1, 2, 60, 130, 131, 132, 133, 134, 135, 136, 137, 138, 139, 140, 149};
    require_ok(engine->probe(rows_of(cells), 4, tokens));
    const auto in_place = masses(*engine);
    for (std::int32_t layer = 0; layer < model.layers(); ++layer) {
      for (const std::int32_t cell : changed_cells(*engine, outcome_of(*engine).blob, full.blob, layer, 150)) {
        CHECK(std::find(cells.begin(), cells.end(), cell) != cells.end());
      }
    }
    // Row 149 alone, behind the others.
    require_ok(engine->probe(rows_of({149}), 0, tokens));
    const auto last = masses(*engine);
    require_ok(engine->truncate(149));
    require_ok(engine->probe(std::span(tokens).last(1)));
    for (std::int32_t layer = 0; layer < model.layers(); ++layer) {
      const auto at = static_cast<std::size_t>(layer);
      const std::vector<float> before(last[at].begin(), last[at].end() - 1);
      CHECK(relative_error(engine->attention_mass(layer), before) < 1e-3);
      double sum = 0;
      for (const float mass : last[at]) sum += static_cast<double>(mass);
      CHECK(sum == doctest::Approx(tiny_gguf::kHidden / tiny_gguf::kHeadDim).epsilon(1e-4));
      sum = 0;
      for (const float mass : in_place[at]) sum += static_cast<double>(mass);
      CHECK(sum == doctest::Approx(12.0 * tiny_gguf::kHidden / tiny_gguf::kHeadDim).epsilon(1e-4));
    }
  }
}

TEST_CASE("ratio 1 by attention equals the engine's own prefill") {
  for (const std::string architecture : {"llama", "gemma3"}) {
    CAPTURE(architecture);
    const llama_cpp::Model model = tiny_model(architecture);
    const auto engine = open_engine(model, options_for(256));
    const std::vector<Part> parts = {{SegmentKind::fresh, random_tokens(21, model, 1)},
                                     {SegmentKind::cached, random_tokens(37, model, 2)},
                                     {SegmentKind::cached, random_tokens(40, model, 3)},
                                     {SegmentKind::fresh, random_tokens(19, model, 4)}};
    const std::vector<ChunkHandle> chunks = make_chunks(*engine, parts);
    const Outcome expected = prefill(*engine, {tokens_of(parts)});
    llama_cpp::BlobWriter staging;
    engine->clear();
    const Outcome blended = blend_parts(*engine, staging, parts, chunks, attending(1));
    require_ok(blended.status);
    CHECK(blended.report.probe_s > 0);
    CHECK(blended.report.passes == 1);
    check_same(blended, expected);
    // At a lower ratio rows are chosen, and only those and the fresh ones change.
    engine->clear();
    const Outcome some = blend_parts(*engine, staging, parts, chunks, attending(0.3));
    require_ok(some.status);
    CHECK(some.report.fusor.rows_selected == 23);
    const Outcome none = blend_parts(*engine, staging, parts, chunks, first_rows(0));
    const std::int32_t last = architecture == "gemma3" ? 5 : model.layers() - 1;  // without a window
    CHECK(changed_cells(*engine, some.blob, none.blob, last, 117).size() <= 23 + 19);
  }
}

TEST_CASE("an engine that cannot read attention says why") {
  const llama_cpp::Model model = tiny_model("llama");
  llama_cpp::EngineOptions options = options_for(100);
  options.route = Route::runs;
  const auto runs = open_engine(model, options);
  const Tokens tokens = random_tokens(30, model, 1);
  require_ok(runs->prefill(tokens));
  CHECK(runs->can_probe().code() == StatusCode::unsupported);
  CHECK(text_of(runs->probe(tokens)) == "probe: rows are computed by runs");

  options.route = Route::in_place;
  options.batch = 64;
  const auto engine = open_engine(model, options);
  require_ok(engine->can_probe());
  require_ok(engine->prefill(tokens));
  CHECK(engine->probe(random_tokens(135, model, 2)).code() == StatusCode::insufficient_space);
  CHECK(engine->probe(rows_of({30}), 0, tokens).code() == StatusCode::out_of_range);
  CHECK(engine->probe(rows_of({3}), 2, tokens).code() == StatusCode::out_of_range);
  require_ok(engine->probe(tokens));
  require_ok(engine->drop(3, 9));
  CHECK(engine->probe(tokens).code() == StatusCode::unsupported);
}
