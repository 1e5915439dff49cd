// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What the engine and the host refuse, and that they are as usable afterwards as before: a failed blend leaves the
// resident rows, and plain decoding goes on from them to the bit.
#include "llama_fixture.hpp"

using namespace llama_fixture;
using llama_cpp::Engine;
using llama_cpp::EngineOptions;

namespace {

void check_refused(const llama_cpp::Model& model, const EngineOptions& options, StatusCode code,
                   const std::string& where) {
  CAPTURE(where);
  const Status status = Engine::open(model, options).status;
  INFO(text_of(status));
  CHECK(status.code() == code);
  CHECK(std::string(status.where()) == where);
}

// Fails in one of its calls.
template <class Host>
struct FailingHost : Host {
  enum class Call : std::uint8_t { none, score, load, compute, commit };

  FailingHost(Host host, Call fails) : Host(std::move(host)), call(fails) {}
  Status fail(Call at) const {
    return at == call ? Status::error(StatusCode::host_error, "on purpose").at("test") : Status();
  }
  Status score(std::int32_t layer, std::span<const Row> rows) {
    KVBLEND_RETURN_IF_ERROR(Host::score(layer, rows));
    return fail(Call::score);
  }
  Status load() {
    KVBLEND_RETURN_IF_ERROR(Host::load());
    return fail(Call::load);
  }
  Status compute(LayerRange range, std::span<const Row> rows, std::span<const Row> outputs) {
    KVBLEND_RETURN_IF_ERROR(Host::compute(range, rows, outputs));
    return fail(Call::compute);
  }
  Status commit(std::int32_t) { return fail(Call::commit); }

  Call call;
};

}  // namespace

TEST_CASE("engine: options that cannot be are refused") {
  const llama_cpp::Model model = tiny_model("llama");
  const EngineOptions good = options_for(128);
  require_ok(Engine::open(model, good).status);
  EngineOptions options = good;
  options.batch = 63;
  check_refused(model, options, StatusCode::invalid_argument, "batch");
  options.batch = 64;
  require_ok(Engine::open(model, options).status);
  options = good;
  options.threads = 0;
  check_refused(model, options, StatusCode::invalid_argument, "threads");
  options = good;
  options.context = 0;
  check_refused(model, options, StatusCode::invalid_argument, "context");
  options = good;
  options.fill_from = -1;
  check_refused(model, options, StatusCode::invalid_argument, "fill_from");
  options = good;
  options.cache_type = DType::q8_0;
  check_refused(model, options, StatusCode::unsupported, "cache_type");
  options.flash_attention = true;
  require_ok(Engine::open(model, options).status);
  options.cache_type = DType::q4_0;
  check_refused(model, options, StatusCode::unsupported, "cache_type");
}

TEST_CASE("engine: calls that cannot be are refused and change nothing") {
  const llama_cpp::Model model = tiny_model("llama");
  const auto engine = open_engine(model, options_for(100));
  const Tokens tokens = random_tokens(100, model, 1);
  const Tokens too_many = random_tokens(101, model, 1);
  const Outcome expected = prefill(*engine, {tokens});

  engine->clear();
  CHECK(engine->prefill(too_many).code() == StatusCode::insufficient_space);
  CHECK(engine->rows() == 0);
  require_ok(engine->prefill(std::span(tokens).first(40)));
  CHECK(engine->prefill(std::span(tokens).first(61)).code() == StatusCode::insufficient_space);
  CHECK(engine->truncate(41).code() == StatusCode::out_of_range);
  CHECK(engine->truncate(-1).code() == StatusCode::out_of_range);
  CHECK(engine->score(-1, tokens).code() == StatusCode::out_of_range);
  CHECK(engine->score(model.layers(), tokens).code() == StatusCode::out_of_range);
  // A token that there is not.
  const Tokens foreign = {5, model.vocabulary()};
  CHECK(engine->prefill(foreign).code() == StatusCode::host_error);
  const std::array<Row, 1> last = {Row(39)};
  const std::array<Row, 1> behind = {Row(40)};
  const LayerRange all{0, model.layers()};
  CHECK(engine->compute(all, last, std::span(tokens).first(39), last).code() == StatusCode::out_of_range);
  CHECK(engine->compute(all, last, std::span(tokens).first(41), last).code() == StatusCode::out_of_range);
  CHECK(engine->compute(all, behind, std::span(tokens).first(40), behind).code() == StatusCode::out_of_range);
  // Scoring is no part of the cache.
  require_ok(engine->score(1, std::span(tokens).last(30)));
  CHECK(engine->rows() == 40);
  require_ok(engine->prefill(std::span(tokens).subspan(40)));
  check_same(outcome_of(*engine), expected);
}

TEST_CASE("host: prompts that do not fit are refused before anything is lost") {
  const llama_cpp::Model model = tiny_model("llama");
  const auto engine = open_engine(model, options_for(100));
  const Tokens turn = random_tokens(30, model, 1);
  const Tokens question = random_tokens(20, model, 2);
  const Outcome expected = prefill(*engine, {turn, question});
  const Tokens answer = greedy(*engine, 8);
  engine->clear();
  require_ok(engine->prefill(turn));

  llama_cpp::BlobWriter staging;
  llama_cpp::Host<F16Codec> host(*engine, staging);
  const auto begun = [&](std::vector<Segment> segments) {
    const Result<Prompt> prompt = Prompt::make(segments, Position(100000));
    require_ok(prompt.status);
    return host.begin(prompt.value);
  };
  const Tokens long_text = random_tokens(71, model, 3);
  const Tokens longer_turn = random_tokens(31, model, 1);
  Status status = begun({resident_segment(std::span(turn)), fresh_segment(std::span(long_text))});
  CHECK(status.code() == StatusCode::insufficient_space);
  CHECK(std::string(status.where()) == "rows");
  status = begun({resident_segment(std::span(longer_turn)), fresh_segment(std::span(question))});
  CHECK(status.code() == StatusCode::out_of_range);
  CHECK(std::string(status.where()) == "resident rows");
  status = begun({resident_segment(std::span(turn)), fresh_segment(std::span(question), Position(31))});
  CHECK(status.code() == StatusCode::unsupported);
  CHECK(std::string(status.where()) == "segment 1");
  status = begun({fresh_segment(std::span(question), Position(1))});
  CHECK(status.code() == StatusCode::unsupported);

  CHECK(engine->rows() == 30);
  require_ok(engine->prefill(question));
  check_same(outcome_of(*engine), expected);
  CHECK(greedy(*engine, 8) == answer);
}

TEST_CASE("host: a blend that fails leaves the resident rows to go on from") {
  for (const std::string architecture : {"llama", "gemma3"}) {
    CAPTURE(architecture);
    const llama_cpp::Model model = tiny_model(architecture);
    const auto engine = open_engine(model, options_for(200));
    const std::vector<Part> parts = {{SegmentKind::resident, random_tokens(30, model, 1)},
                                     {SegmentKind::cached, random_tokens(35, model, 2)},
                                     {SegmentKind::fresh, random_tokens(19, model, 3)}};
    const Tokens& turn = parts.front().tokens;
    const Tokens& question = parts.back().tokens;
    const auto chunks = make_chunks(*engine, parts);
    const Outcome expected = prefill(*engine, {turn, question});
    const Tokens answer = greedy(*engine, 8);
    llama_cpp::BlobWriter staging;
    using Host = FailingHost<llama_cpp::Host<F16Codec>>;
    using Call = Host::Call;
    PassReport report;
    for (const Call call : {Call::score, Call::load, Call::compute, Call::commit}) {
      CAPTURE(static_cast<int>(call));
      engine->clear();
      require_ok(engine->prefill(turn));
      Host host(llama_cpp::Host<F16Codec>(*engine, staging), call);
      const Status status = blend_parts(host, *engine, parts, chunks, deviating(0.5), report);
      CHECK(status.code() == StatusCode::host_error);
      CHECK(engine->rows() == 30);
      require_ok(engine->prefill(question));
      check_same(outcome_of(*engine), expected);
      CHECK(greedy(*engine, 8) == answer);
    }
    // The control: it is that call that fails.
    engine->clear();
    require_ok(engine->prefill(turn));
    Host host(llama_cpp::Host<F16Codec>(*engine, staging), Call::none);
    require_ok(blend_parts(host, *engine, parts, chunks, deviating(0.5), report));
    CHECK(engine->rows() == 84);
  }
}
