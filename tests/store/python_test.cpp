// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Chunk files in the hands of Python's safetensors package, where that is installed.
#include "fixtures.hpp"

#include <cstdlib>

using namespace kvblend_test;

namespace {

bool run_python(const TemporaryDirectory& directory, const std::string& script) {
  write_file(directory / "script.py", script);
  const std::string command = "cd '" + directory.path() + "' && python3 script.py";
  return std::system(command.c_str()) == 0;
}

bool has_safetensors(const TemporaryDirectory& directory) {
  write_file(directory / "probe.py", "import numpy, safetensors.numpy\n");
  const std::string command = "cd '" + directory.path() + "' && python3 probe.py > probe.log 2>&1";
  if (std::system(command.c_str()) == 0) return true;
  MESSAGE("skipped: python3 has no safetensors package");
  return false;
}

}  // namespace

TEST_CASE("the safetensors package opens a chunk file and sees the same arrays") {
  const TemporaryDirectory directory;
  if (!has_safetensors(directory)) return;
  for (const DType dtype : {DType::f32, DType::f16}) {
    ChunkIdentity identity = small_identity({11, 12, 13}, dtype);
    identity.recipe = "saliency";
    identity.context = {7};
    identity.first_position = Position(1);
    const Chunk chunk = filled_chunk(identity);
    REQUIRE(write_chunk_file(directory / "chunk.safetensors", chunk).ok());
    for (std::int32_t layer = 0; layer < 2; ++layer) {
      write_file(directory / ("layer" + std::to_string(layer)),
                 std::string(reinterpret_cast<const char*>(chunk.layer(layer).data()), chunk.layer(layer).size()));
    }
    CHECK(run_python(directory, R"(
import safetensors, safetensors.numpy, numpy
arrays = safetensors.numpy.load_file("chunk.safetensors")
assert sorted(arrays) == ["context", "layers.0.key", "layers.0.value", "layers.1.key", "layers.1.value", "scores", "tokens"]
assert arrays["tokens"].tolist() == [11, 12, 13] and arrays["tokens"].dtype == numpy.int32
assert arrays["context"].tolist() == [7]
assert arrays["scores"].tolist() == [0.5, 1.5, 2.5]
for layer in (0, 1):
    key, value = arrays[f"layers.{layer}.key"], arrays[f"layers.{layer}.value"]
    assert key.shape == value.shape == (3, 2, 4)
    assert key.tobytes() + value.tobytes() == open(f"layer{layer}", "rb").read()
with safetensors.safe_open("chunk.safetensors", "np") as file:
    metadata = file.metadata()
assert metadata["format"] == "kvblend-chunk" and metadata["model"] == "toy" and metadata["first_position"] == "1"
safetensors.numpy.save_file(arrays, "bare.safetensors")
safetensors.numpy.save_file(arrays, "copy.safetensors", metadata)
arrays["layers.1.key"][0, 0, 0] = 1
safetensors.numpy.save_file(arrays, "edited.safetensors", metadata)
)"));
    // Written back with its metadata, the order of tensors changed, it is still the chunk.
    Chunk copy;
    const Status status = load_file(directory / "copy.safetensors", identity, copy);
    CHECK_MESSAGE(status.ok(), text_of(status));
    CHECK(same_bytes(chunk, copy));
    CHECK(says(FileReader::open(directory / "bare.safetensors").status, "metadata format | is missing"));
    Chunk edited = chunk_of_sevens(identity);
    CHECK(says(load_file(directory / "edited.safetensors", identity, edited), "layers.1.key | checksum differs"));
    CHECK(all_sevens(edited));
  }
}

TEST_CASE("the safetensors package opens a chunk without tokens, and lists bf16") {
  const TemporaryDirectory directory;
  if (!has_safetensors(directory)) return;
  REQUIRE(write_chunk_file(directory / "empty.safetensors", filled_chunk(small_identity({}))).ok());
  REQUIRE(write_chunk_file(directory / "bf16.safetensors", filled_chunk(small_identity({1}, DType::bf16))).ok());
  CHECK(run_python(directory, R"(
import safetensors, safetensors.numpy
assert safetensors.numpy.load_file("empty.safetensors")["layers.0.key"].shape == (0, 2, 4)
with safetensors.safe_open("bf16.safetensors", "np") as file:
    assert file.get_slice("layers.1.value").get_dtype() == "BF16"
    assert file.get_slice("layers.1.value").get_shape() == [1, 2, 4]
)"));
}
