// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A GGUF file opened for reading: its keys through ggml's reader, its tensors by bounded reads of our own.
#pragma once

#include <kvblend/core/status.hpp>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

struct gguf_context;

namespace rope_config {

class GgufFile {
 public:
  // Errors: a file that is missing, a directory, cut, or no GGUF. ggml may write to its log, which is the caller's.
  kvblend::Status open(const char* path);

  // Of general.architecture; empty if the file has none.
  [[nodiscard]] const std::string& architecture() const { return architecture_; }
  // The key of this architecture: "llama.block_count".
  [[nodiscard]] std::string key(const char* suffix) const { return architecture_ + "." + suffix; }
  [[nodiscard]] const gguf_context* header() const { return header_.get(); }
  [[nodiscard]] std::int64_t find(const std::string& key) const;
  [[nodiscard]] bool has(const char* suffix) const { return find(key(suffix)) >= 0; }
  [[nodiscard]] bool is_list(const char* suffix) const;
  [[nodiscard]] bool has_tensor(const std::string& tensor) const;

  // Values of this architecture's keys; `out` is left alone if the file has no such key. Errors name the key: one that
  // is required and missing, of another type, or no sensible value.
  kvblend::Status read(const char* suffix, std::int32_t& out, bool required = false) const;
  kvblend::Status read(const char* suffix, double& out) const;
  kvblend::Status read(const char* suffix, bool& out) const;
  kvblend::Status read(const char* suffix, std::vector<std::int32_t>& out) const;  // of integers, or of 0 and 1
  // By the whole key.
  kvblend::Status read_text(const std::string& key, std::string& out) const;

  // [rows, columns], or [columns] with rows 1, as floats whatever type it is stored in.
  kvblend::Status read_tensor(const std::string& tensor, std::int64_t rows, std::int64_t columns,
                              std::vector<float>& out);

 private:
  struct CloseFile {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  struct FreeHeader {
    void operator()(gguf_context* header) const;
  };
  [[nodiscard]] kvblend::Status corrupt(const char* what) const;

  std::string name_;  // the file's, without its folder, for messages
  std::uint64_t size_ = 0;
  std::unique_ptr<std::FILE, CloseFile> file_;
  std::unique_ptr<gguf_context, FreeHeader> header_;
  std::string architecture_;
  std::vector<char> raw_;
};

}  // namespace rope_config
