// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Stands in for libFuzzer where the compiler has none: runs a fuzz target on the files of a corpus, then on a fixed
// number of mutations of them, the same on every machine.
//   replay <corpus folder> <mutations>
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using Input = std::vector<std::uint8_t>;

constexpr std::size_t kLongest = 4096;

std::vector<Input> read_corpus(const char* folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<Input> corpus;
  for (const auto& path : paths) {
    std::ifstream stream(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
  }
  return corpus;
}

class Mutator {
 public:
  explicit Mutator(const std::vector<Input>& corpus) : corpus_(corpus) {}

  Input next() {
    Input input = corpus_[below(corpus_.size())];
    for (std::size_t steps = 1 + below(6); steps > 0; --steps) change(input);
    if (input.size() > kLongest) input.resize(kLongest);
    return input;
  }

 private:
  // Not std::uniform_int_distribution, whose numbers are the library's choice.
  std::size_t below(std::size_t count) { return static_cast<std::size_t>(random_() % count); }
  std::uint8_t byte() { return static_cast<std::uint8_t>(random_()); }

  void change(Input& input) {
    if (input.empty()) input.push_back(byte());
    const std::size_t at = below(input.size());
    const auto place = input.begin() + static_cast<std::ptrdiff_t>(at);
    switch (below(6)) {
      case 0: input[at] = byte(); return;
      case 1: input[at] = static_cast<std::uint8_t>(input[at] ^ (1u << below(8))); return;
      case 2: input.insert(place, byte()); return;
      case 3: input.erase(place); return;
      case 4:
        std::generate(place, input.begin() + static_cast<std::ptrdiff_t>((std::min)(at + 8, input.size())),
                      [this] { return byte(); });
        return;
      default: {  // goes on as another file does
        const Input& other = corpus_[below(corpus_.size())];
        input.resize(at);
        const std::size_t from = (std::min)(at, other.size());
        input.insert(input.end(), other.begin() + static_cast<std::ptrdiff_t>(from), other.end());
        return;
      }
    }
  }

  const std::vector<Input>& corpus_;
  std::mt19937 random_{20241130};
};

void run(const Input& input) {
  // A copy of its own, exactly as long as it is said to be.
  const Input copy(input);
  LLVMFuzzerTestOneInput(copy.data(), copy.size());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s <corpus folder> <mutations>\n", argv[0]);
    return 2;
  }
  const std::vector<Input> corpus = read_corpus(argv[1]);
  if (corpus.empty()) {
    std::fprintf(stderr, "no files in %s\n", argv[1]);
    return 1;
  }
  for (const Input& input : corpus) run(input);
  const long mutations = std::strtol(argv[2], nullptr, 10);
  Mutator mutator(corpus);
  for (long i = 0; i < mutations; ++i) {
    // What a crash leaves behind is the number of the mutation that did it.
    const Input input = mutator.next();
    if (std::getenv("KVBLEND_FUZZ_TRACE") != nullptr) std::fprintf(stderr, "mutation %ld\n", i);
    run(input);
  }
  std::printf("%zu files and %ld mutations\n", corpus.size(), mutations);
  return 0;
}
