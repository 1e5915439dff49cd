// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The loader: every layer arrives whole and in order, whatever the depth; errors name where; nothing ever hangs.
#include "fixtures.hpp"

#include <kvblend/fuse/host.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

using namespace kvblend_test;

static_assert(KvSource<LayerwiseLoader<F32Codec>>);
static_assert(KvSource<LayerwiseLoader<Bf16Codec>>);
static_assert(ChunkReader<ChunkReaderArchetype>);
static_assert(ChunkReader<MemoryReader> && ChunkReader<FileReader>);
static_assert(ChunkReader<ThrottledReader<ChunkReaderArchetype>>);
static_assert(Launcher<ThreadLauncher>);

namespace {

constexpr std::int32_t kLayers = 6;

// Fails at one layer, and counts reads.
struct FaultyReader {
  MemoryReader inner;
  std::int32_t fails_at = -1;
  int reads = 0;
  [[nodiscard]] const ChunkIdentity& identity() const { return inner.identity(); }
  [[nodiscard]] ChunkInfo info() const { return inner.info(); }
  Status read_layer(std::int32_t layer, std::span<std::byte> destination) {
    ++reads;
    if (layer == fails_at) return Status::error(StatusCode::io_error, "disk on fire").at("layers.%d.key", layer);
    return inner.read_layer(layer, destination);
  }
};

// Reads only once a test lets it.
struct GatedReader {
  MemoryReader inner;
  std::mutex mutex;
  std::condition_variable changed;
  int allowed = 0;
  int entered = 0;
  explicit GatedReader(ChunkHandle chunk) : inner(std::move(chunk)) {}
  [[nodiscard]] const ChunkIdentity& identity() const { return inner.identity(); }
  [[nodiscard]] ChunkInfo info() const { return inner.info(); }
  Status read_layer(std::int32_t layer, std::span<std::byte> destination) {
    std::unique_lock<std::mutex> lock(mutex);
    ++entered;
    changed.notify_all();
    changed.wait(lock, [this, layer] { return layer < allowed; });
    return inner.read_layer(layer, destination);
  }
  void allow(int layers) {
    const std::lock_guard<std::mutex> lock(mutex);
    allowed = layers;
    changed.notify_all();
  }
  void await_entered(int count) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this, count] { return entered >= count; });
  }
};

// fresh | chunk a | chunk b, rows 1 and 2 of 4 | fresh | chunk a again
struct Scene {
  ChunkHandle a = share(filled_chunk(small_identity({1, 2, 3}, DType::f16, kLayers), 1));
  ChunkHandle b = share(filled_chunk(small_identity({4, 5, 6, 7}, DType::f16, kLayers), 2));
  ModelIdentity model = a->identity().model;
  ChunkInfo info_a = a->info();
  ChunkInfo info_b = b->info();
  std::array<TokenId, 2> fresh = {8, 9};
  std::array<Segment, 5> segments = {fresh_segment(fresh), cached_segment(info_a), cached_segment(info_b, 1, 2),
                                     fresh_segment(fresh), cached_segment(info_a)};
  Result<Prompt> made = Prompt::make(segments, Position(1000));
  const Prompt& prompt = made.value;

  Scene() { REQUIRE(made.ok()); }

  [[nodiscard]] const Chunk* chunk_of(std::size_t segment) const {
    return segment == 1 || segment == 4 ? a.get() : segment == 2 ? b.get() : nullptr;
  }
};

template <class Loader>
bool shows_layer(const Loader& loader, const Scene& scene, std::int32_t layer) {
  for (std::size_t i = 0; i < 5; ++i) {
    const Chunk* chunk = scene.chunk_of(i);
    const auto segment = static_cast<std::int32_t>(i);
    const auto keys = loader.keys(segment, layer);
    const auto values = loader.values(segment, layer);
    if (chunk == nullptr) {
      if (keys.layout.contains(0) || values.layout.contains(0)) return false;
      continue;
    }
    if (keys.layout.row_count != chunk->tokens() || values.layout.row_count != chunk->tokens()) return false;
    const std::size_t plane = chunk->layer(layer).size() / 2;
    if (std::memcmp(keys.base, chunk->layer(layer).data(), plane) != 0) return false;
    if (std::memcmp(values.base, chunk->layer(layer).data() + plane, plane) != 0) return false;
    if (!(loader.rope(segment, layer) == chunk->identity().rope(layer))) return false;
  }
  return true;
}

using Loader = LayerwiseLoader<F16Codec>;

}  // namespace

TEST_CASE("chunks in memory are ready at once, where they lie") {
  const Scene scene;
  const std::array<ChunkSource, 5> sources = {ChunkSource(), scene.a, scene.b, ChunkSource(), scene.a};
  CHECK(Loader::staging_bytes(scene.prompt, sources, 2) == 0);
  Loader loader;
  REQUIRE(loader.open(scene.model, scene.prompt, sources, 2, {}).ok());
  REQUIRE(loader.start().ok());
  for (std::int32_t layer = kLayers - 1; layer >= 0; --layer) {
    REQUIRE(loader.wait(layer).ok());
    CHECK(shows_layer(loader, scene, layer));
    CHECK(loader.keys(1, layer).base == scene.a->layer(layer).data());
    CHECK(loader.load_seconds(layer) == 0.0);
  }
  CHECK(loader.layer_read_bytes() == 0);
}

TEST_CASE("layers come through the ring whole and in order, at any depth") {
  const Scene scene;
  for (const std::int32_t depth : {1, 2, 3, kLayers, 100}) {
    CAPTURE(depth);
    MemoryReader reader_a(scene.a);
    FaultyReader reader_b{MemoryReader(scene.b)};
    const ChunkReaderRef a(reader_a);
    const std::array<ChunkSource, 5> sources = {ChunkSource(), a, ChunkReaderRef(reader_b), ChunkSource(), a};
    std::vector<std::byte> staging(static_cast<std::size_t>(Loader::staging_bytes(scene.prompt, sources, depth)));
    Loader loader;
    REQUIRE(loader.open(scene.model, scene.prompt, sources, depth, staging).ok());
    REQUIRE(loader.start().ok());
    for (std::int32_t layer = 0; layer < kLayers; ++layer) {
      REQUIRE(loader.wait(layer).ok());
      CHECK(shows_layer(loader, scene, layer));
      CHECK(loader.keys(1, layer).base == loader.keys(4, layer).base);  // read once for both
      if (depth < kLayers || layer % 2 == 0) loader.release(layer);
    }
    CHECK(reader_b.reads == kLayers);
    CHECK(loader.layer_read_bytes() == static_cast<std::int64_t>(scene.a->layer(0).size() + scene.b->layer(0).size()));
    if (depth >= kLayers) CHECK(shows_layer(loader, scene, 0));
  }
}

TEST_CASE("memory and files mix in one prompt, and staging may be unaligned") {
  const Scene scene;
  const TemporaryDirectory directory;
  Result<FileTier<>> tier = FileTier<>::open(directory.path());
  REQUIRE(tier.ok());
  REQUIRE(tier.value.insert(*scene.b).ok());
  Result<FileReader> reader = tier.value.find(scene.b->identity());
  REQUIRE(reader.ok());
  const std::array<ChunkSource, 5> sources = {ChunkSource(), scene.a, ChunkReaderRef(reader.value), ChunkSource(),
                                              scene.a};
  std::vector<std::byte> staging(static_cast<std::size_t>(Loader::staging_bytes(scene.prompt, sources, 2)) + 3);
  Loader loader;
  REQUIRE(loader.open(scene.model, scene.prompt, sources, 2, std::span(staging).subspan(3)).ok());
  REQUIRE(loader.start().ok());
  for (std::int32_t layer = 0; layer < kLayers; ++layer) {
    REQUIRE(loader.wait(layer).ok());
    CHECK(shows_layer(loader, scene, layer));
    CHECK(reinterpret_cast<std::uintptr_t>(loader.keys(2, layer).base) % 64 == 0);
    loader.release(layer);
  }
}

TEST_CASE("the loop may run on a thread of the caller's") {
  const Scene scene;
  MemoryReader a(scene.a);
  const std::array<ChunkSource, 5> sources = {ChunkSource(), ChunkReaderRef(a), scene.b, ChunkSource(),
                                              ChunkReaderRef(a)};
  std::vector<std::byte> staging(static_cast<std::size_t>(Loader::staging_bytes(scene.prompt, sources, 2)));
  Loader loader;
  CHECK(loader.run().code() == StatusCode::invalid_argument);
  CHECK(loader.start().code() == StatusCode::invalid_argument);
  CHECK(loader.wait(0).code() == StatusCode::out_of_range);
  REQUIRE(loader.open(scene.model, scene.prompt, sources, 2, staging).ok());
  Status outcome = Status::error(StatusCode::host_error, "did not run");
  std::thread thread([&loader, &outcome] { outcome = loader.run(); });
  for (std::int32_t layer = 0; layer < kLayers; ++layer) {
    REQUIRE(loader.wait(layer).ok());
    CHECK(shows_layer(loader, scene, layer));
    loader.release(layer);
  }
  thread.join();
  CHECK(outcome.ok());
}

TEST_CASE("a read that fails is named, layers before it stay good, those after it end at once") {
  const Scene scene;
  FaultyReader a{MemoryReader(scene.a), 3};
  const std::array<ChunkSource, 5> sources = {ChunkSource(), scene.a, scene.b, ChunkSource(), ChunkReaderRef(a)};
  std::vector<std::byte> staging(static_cast<std::size_t>(Loader::staging_bytes(scene.prompt, sources, kLayers)));
  Loader loader;
  REQUIRE(loader.open(scene.model, scene.prompt, sources, kLayers, staging).ok());
  REQUIRE(loader.start().ok());
  const Status status = loader.wait(5);
  CHECK(text_of(status) == "i/o error | segment 4, layer 3 | layers.3.key: disk on fire");
  CHECK(loader.wait(4).code() == StatusCode::io_error);
  CHECK(loader.wait(3).code() == StatusCode::io_error);
  REQUIRE(loader.wait(2).ok());
  CHECK(shows_layer(loader, scene, 2));
}

TEST_CASE("a byte flipped in a file ends the load at its layer, with segment, tensor and file named") {
  const Scene scene;
  const TemporaryDirectory directory;
  REQUIRE(write_chunk_file(directory / "b.safetensors", *scene.b).ok());
  std::string bytes = read_file(directory / "b.safetensors");
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  bytes[8 + length + scene.b->layer(0).size() * 3 / 2 + 1] ^= 0x10;  // values of layer 1
  write_file(directory / "b.safetensors", bytes);
  Result<FileReader> b = FileReader::open(directory / "b.safetensors", scene.b->identity());
  REQUIRE(b.ok());
  const std::array<ChunkSource, 5> sources = {ChunkSource(), scene.a, ChunkReaderRef(b.value), ChunkSource(), scene.a};
  std::vector<std::byte> staging(static_cast<std::size_t>(Loader::staging_bytes(scene.prompt, sources, 2)));
  Loader loader;
  REQUIRE(loader.open(scene.model, scene.prompt, sources, 2, staging).ok());
  REQUIRE(loader.start().ok());
  REQUIRE(loader.wait(0).ok());
  CHECK(shows_layer(loader, scene, 0));
  const Status status = loader.wait(1);
  CHECK(status.code() == StatusCode::corrupt);
  CHECK(std::string(status.where()) == "segment 2, layer 1");
  CHECK(says(status, "layers.1.value: checksum differs"));
  CHECK(says(status, "b.safetensors"));
}

TEST_CASE("waiting for what can never come, or is gone, is an error and does not hang") {
  const Scene scene;
  MemoryReader a(scene.a);
  const std::array<ChunkSource, 5> sources = {ChunkSource(), ChunkReaderRef(a), scene.b, ChunkSource(),
                                              ChunkReaderRef(a)};
  std::vector<std::byte> staging(static_cast<std::size_t>(Loader::staging_bytes(scene.prompt, sources, 2)));
  Loader loader;
  REQUIRE(loader.open(scene.model, scene.prompt, sources, 2, staging).ok());
  REQUIRE(loader.start().ok());
  CHECK(says(loader.wait(2), "cannot be loaded before layer 0 is released"));
  REQUIRE(loader.wait(1).ok());
  loader.release(0);
  REQUIRE(loader.wait(2).ok());
  CHECK(says(loader.wait(0), "was released"));
  CHECK(loader.wait(-1).code() == StatusCode::out_of_range);
  CHECK(loader.wait(kLayers).code() == StatusCode::out_of_range);
  CHECK_FALSE(loader.keys(1, kLayers).layout.contains(0));
  CHECK_FALSE(loader.keys(5, 0).layout.contains(0));
  CHECK_FALSE(loader.keys(-1, 0).layout.contains(0));
  CHECK(loader.rope(-1, 0).rotary_dim == 0);
}

TEST_CASE("loading stops wherever it is, and the consumer is told") {
  const Scene scene;
  for (int stop_after = 0; stop_after <= kLayers; ++stop_after) {
    CAPTURE(stop_after);
    GatedReader a(scene.a);
    const std::array<ChunkSource, 5> sources = {ChunkSource(), ChunkReaderRef(a), scene.b, ChunkSource(),
                                                ChunkReaderRef(a)};
    std::vector<std::byte> staging(static_cast<std::size_t>(Loader::staging_bytes(scene.prompt, sources, kLayers)));
    Loader loader;
    REQUIRE(loader.open(scene.model, scene.prompt, sources, kLayers, staging).ok());
    REQUIRE(loader.start().ok());
    a.allow(stop_after);
    a.await_entered(std::min(stop_after + 1, kLayers));
    std::atomic<bool> cancelled = false;
    std::thread consumer(
        [&loader, &cancelled] { cancelled = loader.wait(kLayers - 1).code() == StatusCode::cancelled; });
    std::thread opener([&a] { a.allow(kLayers); });
    loader.stop();
    consumer.join();
    opener.join();
    if (stop_after > 0) CHECK(loader.wait(0).ok());
    CHECK((cancelled || loader.wait(kLayers - 1).ok()));
    loader.stop();
  }
}

TEST_CASE("a consumer may leave at any layer, released or not") {
  const Scene scene;
  for (std::int32_t depth = 1; depth <= 3; ++depth) {
    for (std::int32_t leave = 0; leave <= kLayers; ++leave) {
      MemoryReader a(scene.a);
      const std::array<ChunkSource, 5> sources = {ChunkSource(), ChunkReaderRef(a), scene.b, ChunkSource(),
                                                  ChunkReaderRef(a)};
      std::vector<std::byte> staging(static_cast<std::size_t>(Loader::staging_bytes(scene.prompt, sources, depth)));
      Loader loader;
      REQUIRE(loader.open(scene.model, scene.prompt, sources, depth, staging).ok());
      REQUIRE(loader.start().ok());
      for (std::int32_t layer = 0; layer < leave; ++layer) {
        REQUIRE(loader.wait(layer).ok());
        CHECK(shows_layer(loader, scene, layer));
        if (layer + 1 < leave) loader.release(layer);
      }
    }
  }
}

TEST_CASE("a loader that was opened and never started, or started and stopped at once, ends") {
  const Scene scene;
  MemoryReader a(scene.a);
  const std::array<ChunkSource, 5> sources = {ChunkSource(), ChunkReaderRef(a), scene.b, ChunkSource(),
                                              ChunkReaderRef(a)};
  std::vector<std::byte> staging(static_cast<std::size_t>(Loader::staging_bytes(scene.prompt, sources, 2)));
  for (int round = 0; round < 50; ++round) {
    Loader loader;
    REQUIRE(loader.open(scene.model, scene.prompt, sources, 2, staging).ok());
    if (round % 2 == 0) REQUIRE(loader.start().ok());
    loader.stop();
    if (round % 2 == 1) CHECK(loader.wait(0).code() == StatusCode::cancelled);
    // It can be opened again for another prompt.
    REQUIRE(loader.open(scene.model, scene.prompt, sources, 2, staging).ok());
    REQUIRE(loader.start().ok());
    REQUIRE(loader.wait(1).ok());
    CHECK(shows_layer(loader, scene, 1));
  }
}

TEST_CASE("a launcher that cannot launch is an error for the waiting too") {
  struct NoThreads {
    Status launch(void (*)(void*), void*) { return Status::error(StatusCode::host_error, "no thread to spare"); }
    void join() {}
  };
  const Scene scene;
  MemoryReader a(scene.a);
  const std::array<ChunkSource, 5> sources = {ChunkSource(), ChunkReaderRef(a), scene.b, ChunkSource(),
                                              ChunkReaderRef(a)};
  std::vector<std::byte> staging(static_cast<std::size_t>(Loader::staging_bytes(scene.prompt, sources, 2)));
  LayerwiseLoader<F16Codec, NoThreads> loader;
  REQUIRE(loader.open(scene.model, scene.prompt, sources, 2, staging).ok());
  CHECK(loader.start().code() == StatusCode::host_error);
  CHECK(loader.wait(0).code() == StatusCode::host_error);
}

TEST_CASE("sources that are not what the prompt or the model says are refused by segment and field") {
  const Scene scene;
  const std::array<ChunkSource, 5> good = {ChunkSource(), scene.a, scene.b, ChunkSource(), scene.a};
  Loader loader;
  const auto refused = [&](const ChunkHandle& chunk) {
    std::array<ChunkSource, 5> sources = good;
    sources[4] = chunk;
    const Status status = loader.open(scene.model, scene.prompt, sources, 2, {});
    CHECK_FALSE(status.ok());
    CHECK(loader.wait(0).code() == StatusCode::out_of_range);  // nothing is open
    return text_of(status);
  };
  const auto changed = [&](auto&& change) {
    ChunkIdentity identity = scene.a->identity();
    change(identity);
    return refused(share(filled_chunk(identity)));
  };
  CHECK(refused(nullptr) == "invalid argument | segment 4 | cached segment has no source");
  CHECK(refused(scene.b).find("segment 4, tokens") != std::string::npos);
  CHECK(changed([](ChunkIdentity& id) { id.tokens[1] = 77; }).find("segment 4, tokens[1]") != std::string::npos);
  CHECK(changed([](ChunkIdentity& id) { id.context = {1}; }).find("segment 4, context") != std::string::npos);
  CHECK(changed([](ChunkIdentity& id) { id.first_position = Position(3); }).find("segment 4, first_position") !=
        std::string::npos);
  CHECK(changed([](ChunkIdentity& id) { id.model.name = "x"; }).find("segment 4, model.name") != std::string::npos);
  CHECK(changed([](ChunkIdentity& id) { id.model.fingerprint = "x"; }).find("segment 4, model.fingerprint") !=
        std::string::npos);
  CHECK(changed([](ChunkIdentity& id) { id.model.dtype = DType::bf16; }).find("segment 4, model.dtype") !=
        std::string::npos);
  CHECK(changed([](ChunkIdentity& id) { id.model.kv_heads = 1; }).find("segment 4, model.kv_heads") !=
        std::string::npos);
  CHECK(changed([](ChunkIdentity& id) {
          id.model.layers = 2;
          id.layer_rope.resize(2);
        }).find("segment 4, model.layers") != std::string::npos);

  CHECK(says(loader.open(scene.model, scene.prompt, std::span(good).first(4), 2, {}), "sources"));
  CHECK(says(loader.open(scene.model, scene.prompt, good, 0, {}), "depth"));
  LayerwiseLoader<F32Codec> other;
  CHECK(says(other.open(scene.model, scene.prompt, good, 2, {}), "model.dtype"));
  MemoryReader a(scene.a);
  std::array<ChunkSource, 5> read = good;
  read[1] = ChunkReaderRef(a);
  std::vector<std::byte> staging(static_cast<std::size_t>(Loader::staging_bytes(scene.prompt, read, 2)) - 1);
  CHECK(loader.open(scene.model, scene.prompt, read, 2, staging).code() == StatusCode::insufficient_space);
  CHECK(loader.open(scene.model, scene.prompt, good, 2, {}).ok());
}

TEST_CASE("empty prompts and empty chunks have nothing to load") {
  const ChunkHandle empty = share(filled_chunk(small_identity({}, DType::f16, kLayers)));
  MemoryReader reader(empty);
  const ChunkInfo info = empty->info();
  std::array<Segment, 1> segments = {cached_segment(info)};
  const Result<Prompt> prompt = Prompt::make(segments, Position(10));
  REQUIRE(prompt.ok());
  const std::array<ChunkSource, 1> sources = {ChunkReaderRef(reader)};
  Loader loader;
  REQUIRE(loader.open(empty->identity().model, prompt.value, sources, 2, {}).ok());
  REQUIRE(loader.start().ok());
  CHECK(loader.wait(kLayers - 1).ok());
  CHECK(loader.keys(0, 0).layout.row_count == 0);
  REQUIRE(loader.open(empty->identity().model, Prompt(), {}, 2, {}).ok());
  REQUIRE(loader.start().ok());
  CHECK(loader.wait(kLayers - 1).ok());
}

TEST_CASE("times are told for each layer") {
  const Scene scene;
  GatedReader a(scene.a);
  const std::array<ChunkSource, 5> sources = {ChunkSource(), ChunkReaderRef(a), scene.b, ChunkSource(),
                                              ChunkReaderRef(a)};
  std::vector<std::byte> staging(static_cast<std::size_t>(Loader::staging_bytes(scene.prompt, sources, kLayers)));
  Loader loader;
  REQUIRE(loader.open(scene.model, scene.prompt, sources, kLayers, staging).ok());
  REQUIRE(loader.start().ok());
  a.await_entered(1);
  std::thread opener([&a] { a.allow(kLayers); });
  REQUIRE(loader.wait(0).ok());
  opener.join();
  REQUIRE(loader.wait(kLayers - 1).ok());
  CHECK(loader.load_seconds(0) > 0.0);
  CHECK(loader.load_seconds(kLayers - 1) >= 0.0);
  CHECK(loader.wait_seconds(0) >= 0.0);
  CHECK(loader.wait_seconds(1) == 0.0);  // never waited for
  CHECK(loader.load_seconds(kLayers) == 0.0);
  CHECK(loader.load_seconds(-1) == 0.0);
}

TEST_CASE("starting a second time is an error, not a wait for layers that nobody releases") {
  const Scene scene;
  MemoryReader a(scene.a);
  const std::array<ChunkSource, 5> sources = {ChunkSource(), ChunkReaderRef(a), scene.b, ChunkSource(),
                                              ChunkReaderRef(a)};
  std::vector<std::byte> staging(static_cast<std::size_t>(Loader::staging_bytes(scene.prompt, sources, 1)));
  Loader loader;
  for (int round = 0; round < 2; ++round) {
    REQUIRE(loader.open(scene.model, scene.prompt, sources, 1, staging).ok());
    REQUIRE(loader.start().ok());
    CHECK(says(loader.start(), "started already"));
    for (std::int32_t layer = 0; layer < kLayers; ++layer) {
      REQUIRE(loader.wait(layer).ok());
      CHECK(shows_layer(loader, scene, layer));
      loader.release(layer);
    }
    CHECK(says(loader.start(), "started already"));
  }
}

TEST_CASE("a reader whose identity contradicts itself is refused") {
  struct LyingReader {
    ChunkIdentity stated;
    [[nodiscard]] const ChunkIdentity& identity() const { return stated; }
    [[nodiscard]] ChunkInfo info() const { return {stated.tokens, stated.first_position, stated.context, {}}; }
    Status read_layer(std::int32_t, std::span<std::byte>) { return {}; }
  };
  LyingReader reader{small_identity({1, 2, 3}, DType::f16, kLayers)};
  reader.stated.layer_rope.pop_back();
  const ChunkInfo info = reader.info();
  std::array<Segment, 1> segments = {cached_segment(info)};
  const Result<Prompt> prompt = Prompt::make(segments, Position(10));
  REQUIRE(prompt.ok());
  const std::array<ChunkSource, 1> sources = {ChunkReaderRef(reader)};
  std::vector<std::byte> staging(static_cast<std::size_t>(Loader::staging_bytes(prompt.value, sources, 1)));
  Loader loader;
  CHECK(says(loader.open(reader.stated.model, prompt.value, sources, 1, staging), "segment 0, layer_rope"));
}
