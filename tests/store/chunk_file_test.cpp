// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Chunk files: what is written comes back, and whatever was done to a file in between is noticed and named.
#include "fixtures.hpp"

#include <sys/resource.h>

#include <csignal>
#include <random>

using namespace kvblend_test;

namespace {

ChunkIdentity rich_identity(DType dtype) {
  ChunkIdentity identity = small_identity({11, -1, 13, 2000000000}, dtype);
  identity.recipe = "saliency";
  identity.context = {1, 2, 3, 4, 5};
  identity.first_position = Position(5);
  identity.tenant = "\"quoted\" \xc3\xa9\n";
  identity.ropes[1].pairing = RopePairing::interleaved;
  identity.ropes[1].attention_factor = 1.1386294361119891;
  identity.ropes[1].inv_freq[1] = 5e-324;
  identity.ropes[1].axis_of_pair[1] = 2;
  return identity;
}

}  // namespace

TEST_CASE("a chunk comes back from its file, every bit of it") {
  const TemporaryDirectory directory;
  const std::string path = directory / "chunk.safetensors";
  for (const DType dtype : kAllDTypes) {
    CAPTURE(to_string(dtype));
    const Chunk chunk = filled_chunk(rich_identity(dtype));
    REQUIRE(write_chunk_file(path, chunk).ok());
    Chunk back;
    const Status status = load_file(path, chunk.identity(), back);
    REQUIRE_MESSAGE(status.ok(), text_of(status));
    CHECK(same_bytes(chunk, back));
    CHECK(directory.entries() == 1);
  }
}

TEST_CASE("the data begin at a multiple of 8, keys and values of a layer beside each other") {
  const TemporaryDirectory directory;
  const std::string path = directory / "chunk.safetensors";
  const Chunk chunk = filled_chunk(rich_identity(DType::bf16));
  REQUIRE(write_chunk_file(path, chunk).ok());
  const std::string bytes = read_file(path);
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  CHECK(length % 8 == 0);
  CHECK(bytes.compare(8 + length, chunk.layer(0).size(), reinterpret_cast<const char*>(chunk.layer(0).data()),
                      chunk.layer(0).size()) == 0);
}

TEST_CASE("a file's tensors have the type and shape that its dtype has in safetensors") {
  struct Case {
    DType dtype;
    const char* name;
    std::vector<std::int64_t> shape;
    std::int64_t bytes;  // of a layer's keys
  };
  const Case cases[] = {
      {DType::f32, "F32", {4, 2, 4}, 128},        {DType::f16, "F16", {4, 2, 4}, 64},
      {DType::bf16, "BF16", {4, 2, 4}, 64},       {DType::f8_e4m3, "F8_E4M3", {4, 2, 4}, 32},
      {DType::f8_e5m2, "F8_E5M2", {4, 2, 4}, 32}, {DType::q8_0, "U8", {4, 2, 68}, 544},
      {DType::q4_0, "U8", {4, 2, 36}, 288},
  };
  for (const Case& c : cases) {
    CAPTURE(to_string(c.dtype));
    const ChunkIdentity identity = rich_identity(c.dtype);
    const Result<SafetensorsHeader> header = make_chunk_header(identity);
    REQUIRE(header.ok());
    const SafetensorsTensor* keys = header.value.tensor("layers.1.key");
    REQUIRE(keys != nullptr);
    CHECK(keys->dtype == c.name);
    CHECK(keys->shape == c.shape);
    CHECK(keys->size() == c.bytes);
    CHECK(plane_bytes(identity) == c.bytes);
    CHECK(*header.value.text("dtype") == to_string(c.dtype));
  }
}

TEST_CASE("blocks stored as bytes are not taken for blocks of another kind") {
  const TemporaryDirectory directory;
  const std::string path = directory / "chunk.safetensors";
  const Chunk chunk = filled_chunk(rich_identity(DType::q8_0));
  REQUIRE(write_chunk_file(path, chunk).ok());
  std::string bytes = read_file(path);
  const std::size_t at = bytes.find("\"q8_0\"");
  REQUIRE(at != std::string::npos);
  bytes[at + 2] = '5';
  write_file(path, bytes);
  CHECK(says(FileReader::open(path).status, "metadata dtype"));
  bytes[at + 2] = '4';
  write_file(path, bytes);
  CHECK(says(FileReader::open(path).status, "layers.0.key | has another shape"));
}

TEST_CASE("an empty chunk round-trips") {
  const TemporaryDirectory directory;
  const Chunk chunk = filled_chunk(small_identity({}));
  REQUIRE(write_chunk_file(directory / "empty", chunk).ok());
  Chunk back = chunk_of_sevens(small_identity({1}));
  REQUIRE(load_file(directory / "empty", chunk.identity(), back).ok());
  CHECK(same_bytes(chunk, back));
}

TEST_CASE("a file of another chunk is not data: the field is named") {
  const TemporaryDirectory directory;
  const std::string path = directory / "chunk.safetensors";
  const ChunkIdentity identity = small_identity({1, 2, 3}, DType::f16);
  REQUIRE(write_chunk_file(path, filled_chunk(identity)).ok());
  const auto refused = [&](auto&& change) {
    ChunkIdentity wanted = identity;
    change(wanted);
    Chunk destination = chunk_of_sevens(identity);
    const Status status = load_file(path, wanted, destination);
    CHECK(status.code() == StatusCode::mismatch);
    CHECK(says(status, "chunk.safetensors"));
    CHECK(all_sevens(destination));
    return std::string(status.where());
  };
  CHECK(refused([](ChunkIdentity& id) { id.tokens = {4, 5, 6}; }) == "tokens[0]");
  CHECK(refused([](ChunkIdentity& id) { id.model.dtype = DType::bf16; }) == "model.dtype");
  CHECK(refused([](ChunkIdentity& id) { id.model.name = "another"; }) == "model.name");
  CHECK(refused([](ChunkIdentity& id) { id.tenant = "bob"; }) == "tenant");
  CHECK(refused([](ChunkIdentity& id) { id.ropes[0].inv_freq[0] = 0.5; }) == "rope of layer 0");
}

TEST_CASE("a file cut anywhere is an error, and the destination stays") {
  const TemporaryDirectory directory;
  const std::string path = directory / "chunk.safetensors";
  const ChunkIdentity identity = rich_identity(DType::f16);
  REQUIRE(write_chunk_file(path, filled_chunk(identity)).ok());
  const std::string whole = read_file(path);
  Chunk destination = chunk_of_sevens(identity);
  for (std::size_t size = 0; size < whole.size(); ++size) {
    CAPTURE(size);
    write_file(path, whole.substr(0, size));
    const Status status = load_file(path, identity, destination);
    REQUIRE(status.code() == StatusCode::corrupt);
  }
  CHECK(all_sevens(destination));
  write_file(path, whole + "x");
  const Status status = load_file(path, identity, destination);
  CHECK(status.code() == StatusCode::corrupt);
  CHECK(says(status, "1 bytes follow the last tensor"));
  CHECK(all_sevens(destination));
}

TEST_CASE("a byte flipped in layer 1 names the tensor and the file") {
  const TemporaryDirectory directory;
  const std::string path = directory / "chunk.safetensors";
  const Chunk chunk = filled_chunk(small_identity({1, 2, 3}));
  REQUIRE(write_chunk_file(path, chunk).ok());
  std::string bytes = read_file(path);
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  bytes[8 + length + chunk.layer(0).size() + 5] ^= 1;
  write_file(path, bytes);
  Result<FileReader> reader = FileReader::open(path, chunk.identity());
  REQUIRE(reader.ok());
  std::vector<std::byte> layer(chunk.layer(0).size());
  CHECK(reader.value.read_layer(0, layer).ok());
  Chunk destination = chunk_of_sevens(chunk.identity());
  const Status status = load_chunk(reader.value, destination);
  CHECK(status.code() == StatusCode::corrupt);
  CHECK(std::string(status.where()) == "layers.1.key");
  CHECK(says(status, "checksum differs"));
  CHECK(says(status, "chunk.safetensors"));
  CHECK(all_sevens(destination));
}

TEST_CASE("any bit flipped anywhere is an error or does no harm") {
  const TemporaryDirectory directory;
  const std::string path = directory / "chunk.safetensors";
  const Chunk chunk = filled_chunk(rich_identity(DType::f16));
  REQUIRE(write_chunk_file(path, chunk).ok());
  const std::string whole = read_file(path);
  int harmless = 0;
  Chunk destination = chunk_of_sevens(chunk.identity());
  for (std::size_t at = 0; at < whole.size(); ++at) {
    std::string bytes = whole;
    bytes[at] = static_cast<char>(bytes[at] ^ (1 << (at * 5 % 8)));
    write_file(path, bytes);
    const Status status = load_file(path, chunk.identity(), destination);
    if (!status.ok()) {
      CHECK(all_sevens(destination));
      continue;
    }
    CAPTURE(at);
    CHECK(same_bytes(chunk, destination));
    ++harmless;
    destination = chunk_of_sevens(chunk.identity());
  }
  CHECK(harmless < 10);  // in the padding behind the JSON
}

TEST_CASE("random damage is an error or does no harm") {
  const TemporaryDirectory directory;
  const std::string path = directory / "chunk.safetensors";
  const Chunk chunk = filled_chunk(rich_identity(DType::bf16));
  REQUIRE(write_chunk_file(path, chunk).ok());
  const std::string whole = read_file(path);
  constexpr unsigned kSeed = 20261130;
  INFO("seed ", kSeed);
  std::mt19937 random(kSeed);
  for (int round = 0; round < 2000; ++round) {
    CAPTURE(round);
    std::string bytes = whole;
    const std::size_t at = random() % bytes.size();
    const std::size_t count = 1 + random() % 12;
    switch (random() % 4) {
      case 0: bytes.erase(at, count); break;
      case 1: bytes.insert(at, count, static_cast<char>(random())); break;
      case 2: bytes.replace(at, count, whole.substr(random() % whole.size(), count)); break;
      default:
        for (std::size_t i = at; i < std::min(bytes.size(), at + count); ++i) bytes[i] = static_cast<char>(random());
    }
    write_file(path, bytes);
    Chunk destination = chunk_of_sevens(chunk.identity());
    const Status status = load_file(path, chunk.identity(), destination);
    CHECK((status.ok() ? same_bytes(chunk, destination) : all_sevens(destination)));
  }
}

TEST_CASE("headers that lie are refused, and what is wrong with them is said") {
  struct Case {
    const char* what;
    std::string json;
    std::string data;
    const char* says;
  };
  const std::string meta = R"("__metadata__":{"format":"kvblend-chunk"})";
  const Case cases[] = {
      {"no JSON", "hello", "", "is not JSON"},
      {"a list", "[]", "", "is not a JSON object"},
      {"empty object", "{}", "", "metadata format"},
      {"another program's file", R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "1234",
       "metadata format | is missing"},
      {"format of another", R"({"__metadata__":{"format":"pt"}})", "", "is not kvblend-chunk"},
      {"newer version", R"({"__metadata__":{"format":"kvblend-chunk","version":"2"}})", "", "unsupported"},
      {"metadata that is no object", R"({"__metadata__":[1]})", "", "__metadata__"},
      {"metadata value that is no string", R"({"__metadata__":{"format":7}})", "", "metadata is not a string"},
      {"key twice", R"({"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},
                        "a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}})",
       "", "has a key twice"},
      {"metadata key twice", R"({"__metadata__":{"format":"kvblend-chunk","format":"kvblend-chunk"}})", "",
       "has a key twice"},
      {"outside the file", "{" + meta + R"(,"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "1234",
       "a | lies outside the file"},
      {"offset past 2^63", "{" + meta + R"(,"a":{"dtype":"F32","shape":[2],"data_offsets":[0,18446744073709551615]}})",
       "1234", "data_offsets are not"},
      {"backwards", "{" + meta + R"(,"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", "1234",
       "data_offsets are not"},
      {"negative", "{" + meta + R"(,"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}})", "1234",
       "data_offsets are not"},
      {"fraction", "{" + meta + R"(,"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}})", "1234",
       "shape is not a list"},
      {"overlap", "{" + meta + R"(,"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
                       "b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
       "123412341234", "b | overlaps another tensor"},
      {"gap", "{" + meta + R"(,"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},
                   "b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}})",
       "123412341234", "b | leaves a gap"},
      {"shape and size disagree", "{" + meta + R"(,"a":{"dtype":"F16","shape":[2],"data_offsets":[0,8]}})", "12341234",
       "do not agree"},
      {"shape that overflows",
       "{" + meta + R"(,"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", "",
       "shape passes 2^63"},
      {"unknown dtype", "{" + meta + R"(,"a":{"dtype":"F7","shape":[1],"data_offsets":[0,4]}})", "1234", "dtype"},
      {"extra field", "{" + meta + R"(,"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1}})", "1234",
       "must have dtype"},
      {"number too large for a double", R"({"a":1e999})", "", "is not JSON"},
      {"deep nesting", std::string(100000, '['), "", "is not JSON"},
  };
  const TemporaryDirectory directory;
  for (const Case& c : cases) {
    CAPTURE(c.what);
    write_file(directory / "f", with_length(c.json) + c.data);
    const Result<FileReader> reader = FileReader::open(directory / "f");
    CHECK_FALSE(reader.ok());
    CHECK_MESSAGE(says(reader.status, c.says), text_of(reader.status));
    CHECK(says(reader.status, "/f"));
  }
  for (const std::uint64_t length : {std::uint64_t{3}, std::uint64_t{1} << 40, ~std::uint64_t{0}}) {
    std::string bytes(8, '\0');
    std::memcpy(bytes.data(), &length, 8);
    write_file(directory / "f", bytes + "{}");
    CHECK(says(FileReader::open(directory / "f").status, "does not fit the file"));
  }
}

TEST_CASE("metadata that contradict themselves or the tensors are refused by name") {
  const TemporaryDirectory directory;
  const Chunk chunk = filled_chunk(rich_identity(DType::f32));
  REQUIRE(write_chunk_file(directory / "whole", chunk).ok());
  const std::string whole = read_file(directory / "whole");
  std::uint64_t length = 0;
  std::memcpy(&length, whole.data(), 8);
  const nlohmann::ordered_json header = nlohmann::ordered_json::parse(whole.substr(8, length));
  const std::string data = whole.substr(8 + length);
  const auto refused = [&](auto&& change) {
    nlohmann::ordered_json changed = header;
    change(changed);
    write_file(directory / "f", with_length(changed.dump()) + data);
    const Result<FileReader> reader = FileReader::open(directory / "f");
    CHECK_FALSE(reader.ok());
    return text_of(reader.status);
  };
  const auto contains = [](const std::string& text, const char* part) {
    CHECK_MESSAGE(text.find(part) != std::string::npos, text);
  };
  using Json = nlohmann::ordered_json;
  for (const char* key : {"format", "version", "model", "fingerprint", "tenant", "recipe", "dtype", "layers",
                          "kv_heads", "head_dim", "first_position", "ropes", "layer_rope", "digest"}) {
    contains(refused([key](Json& json) { json["__metadata__"].erase(key); }), key);
  }
  for (const char* name : {"tokens", "context", "scores", "layers.0.key", "layers.1.value"}) {
    const std::string key = std::string("xxh3.") + name;
    contains(refused([&key](Json& json) { json["__metadata__"].erase(key); }), name);
    contains(refused([&key](Json& json) { json["__metadata__"][key] = "12"; }), name);
    contains(refused([name](Json& json) {
               json[std::string("x") + name] = json[name];
               json.erase(name);
             }),
             name);
  }
  const auto meta = [&](const char* key, const char* value) {
    return refused([key, value](Json& json) { json["__metadata__"][key] = value; });
  };
  contains(meta("model", "other"), "digest");
  contains(meta("dtype", "f16"), "layers.0.key");
  contains(meta("dtype", "q3"), "dtype");
  contains(meta("layers", "1"), "layer_rope");
  contains(meta("layers", "4294967298"), "layers");
  contains(meta("layers", "2x"), "layers");
  contains(meta("layers", "-2"), "layers");
  contains(meta("kv_heads", "4"), "layers.0.key");
  contains(meta("first_position", "-3"), "first_position");
  contains(meta("first_position", "2147483647"), "tokens");
  contains(meta("recipe", ""), "tensors");
  contains(meta("ropes", "[]"), "layer_rope");
  contains(meta("ropes", "[{}]"), "ropes");
  contains(meta("ropes", "{"), "ropes");
  contains(meta("ropes", R"([{"head_dim":4,"rotary_dim":-2147483648,"rotary_offset":0,"pairing":"neox",
                             "attention_factor":1.0,"inv_freq":[],"axis_of_pair":[]}])"),
           "ropes");
  contains(meta("ropes", R"([{"head_dim":4,"rotary_dim":4,"rotary_offset":0,"pairing":"zigzag",
                             "attention_factor":1.0,"inv_freq":[1.0,0.1],"axis_of_pair":[0,0]}])"),
           "ropes");
  contains(meta("ropes", R"([{"head_dim":4,"rotary_dim":4,"rotary_offset":0,"pairing":"neox",
                             "attention_factor":1.0,"inv_freq":[1.0,0.1],"axis_of_pair":[0,3]}])"),
           "ropes");
  contains(meta("layer_rope", "[0,7]"), "layer_rope");
  contains(meta("layer_rope", "[0,-1]"), "layer_rope");
  contains(meta("layer_rope", "[0,4294967296]"), "layer_rope");
}

TEST_CASE("texts that a file cannot hold are refused before anything is written") {
  const TemporaryDirectory directory;
  ChunkIdentity identity = small_identity({1});
  identity.tenant = "\xff\xfe";
  const Status status = write_chunk_file(directory / "f", filled_chunk(identity));
  CHECK(status.code() == StatusCode::invalid_argument);
  CHECK(std::string(status.where()) == "tenant");
  CHECK(directory.entries() == 0);
  CHECK(write_chunk_file(directory / "f", Chunk()).code() == StatusCode::invalid_argument);
  CHECK(directory.entries() == 0);
}

TEST_CASE("a write that fails leaves the old file and nothing else") {
  const TemporaryDirectory directory;
  const Chunk chunk = filled_chunk(small_identity({1, 2, 3}));
  CHECK(write_chunk_file(directory / "no/such/directory", chunk).code() == StatusCode::not_found);
  std::filesystem::create_directory(directory / "taken");
  CHECK(write_chunk_file(directory / "taken", chunk).code() == StatusCode::io_error);  // rename over a directory
  CHECK(directory.entries() == 1);
  CHECK(write_chunk_file("", chunk).code() == StatusCode::invalid_argument);
  CHECK(write_chunk_file(std::string("a\0b", 3), chunk).code() == StatusCode::invalid_argument);

  REQUIRE(write_chunk_file(directory / "f", chunk).ok());
  {
    Result<ReplacementFile> unfinished = ReplacementFile::create(directory / "f");
    REQUIRE(unfinished.ok());
    REQUIRE(unfinished.value.write(std::as_bytes(std::span("half", 4))).ok());
    CHECK(directory.entries() == 3);
  }
  CHECK(directory.entries() == 2);
  Chunk back;
  CHECK(load_file(directory / "f", chunk.identity(), back).ok());
}

TEST_CASE("what is not a file is refused") {
  const TemporaryDirectory directory;
  CHECK(FileReader::open(directory / "missing").status.code() == StatusCode::not_found);
  CHECK(says(FileReader::open(directory / "missing").status, "missing"));
  CHECK(FileReader::open(directory.path()).status.code() == StatusCode::invalid_argument);
  CHECK(FileReader::open("").status.code() == StatusCode::invalid_argument);
  REQUIRE(::mkfifo((directory / "pipe").c_str(), 0600) == 0);
  CHECK(FileReader::open(directory / "pipe").status.code() == StatusCode::invalid_argument);
}

TEST_CASE("a layer is read only into room of its size") {
  const TemporaryDirectory directory;
  const Chunk chunk = filled_chunk(small_identity({1, 2, 3}));
  REQUIRE(write_chunk_file(directory / "f", chunk).ok());
  Result<FileReader> reader = FileReader::open(directory / "f");
  REQUIRE(reader.ok());
  std::vector<std::byte> room(chunk.layer(0).size());
  CHECK(reader.value.read_layer(2, room).code() == StatusCode::out_of_range);
  CHECK(reader.value.read_layer(-1, room).code() == StatusCode::out_of_range);
  room.pop_back();
  CHECK(reader.value.read_layer(0, room).code() == StatusCode::invalid_argument);
}

TEST_CASE("an error ends with the file's name, however long the path") {
  const TemporaryDirectory directory;
  const std::string path = directory / std::string(120, 'd') + "/the_chunk.safetensors";
  CHECK(says(FileReader::open(path).status, "the_chunk.safetensors |"));
}

TEST_CASE("a header of nothing but brackets is refused") {
  const TemporaryDirectory directory;
  const std::string path = directory / "deep.safetensors";
  for (const char* unit : {"[", "{\"a\":"}) {
    std::string json;
    while (json.size() < 4000000) json += unit;
    write_file(path, with_length(json));
    CHECK(says(FileReader::open(path).status, "is not JSON"));
    const std::string closing(json.size() / std::strlen(unit), unit[0] == '[' ? ']' : '}');
    write_file(path, with_length(json + (unit[0] == '[' ? "" : "1") + closing));
    CHECK(FileReader::open(path).status.code() == StatusCode::corrupt);
  }
}

TEST_CASE("a file that cannot grow is an error with its name, and the old one stays") {
  const TemporaryDirectory directory;
  const Chunk chunk = filled_chunk(small_identity({1, 2, 3}));
  REQUIRE(write_chunk_file(directory / "f", chunk).ok());
  const std::string before = read_file(directory / "f");
  rlimit old{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &old) == 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit tight{1000, old.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &tight) == 0);
  const Status status = write_chunk_file(directory / "f", filled_chunk(small_identity({4, 5, 6}), 1));
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &old) == 0);
  std::signal(SIGXFSZ, handler);
  CHECK(status.code() == StatusCode::io_error);
  CHECK(says(status, "/f | cannot write"));
  CHECK(read_file(directory / "f") == before);
  CHECK(directory.entries() == 1);
}
