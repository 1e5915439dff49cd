// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// FileTier: chunks as files in a directory, one each, named after the digest of their identity.
#pragma once

#include <kvblend/store/chunk_file.hpp>
#include <kvblend/store/digest.hpp>

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// Any number of threads and processes may use a directory at once. Files left by a writer that was killed have ".tmp-"
// in their names and are never read.
template <IdentityHash Hash = Xxh3Hash>
class FileTier {
 public:
  FileTier() = default;

  // Makes the directory if it is not there; the one it lies in must be.
  static Result<FileTier> open(std::string directory) {
    if (directory.empty() || directory.find('\0') != std::string::npos) {
      return Status::error(StatusCode::invalid_argument, "empty, or has a zero byte in it").at("directory");
    }
    if (::mkdir(directory.c_str(), 0777) != 0 && errno != EEXIST) {
      return detail::system_error(errno, "cannot make directory", detail::tail_of(directory));
    }
    struct stat info {};
    if (::stat(directory.c_str(), &info) != 0) {
      return detail::system_error(errno, "cannot stat", detail::tail_of(directory));
    }
    if (!S_ISDIR(info.st_mode)) {
      return Status::error(StatusCode::io_error, "is not a directory").at("%s", detail::tail_of(directory));
    }
    FileTier tier;
    tier.directory_ = std::move(directory);
    return tier;
  }

  // Replaces a chunk of the same identity, in one step.
  Status insert(const Chunk& chunk) const { return write_chunk_file(path_of(chunk.identity()), chunk); }

  // A reader of the chunk, its identity verified. StatusCode::not_found if there is none.
  [[nodiscard]] Result<FileReader> find(const ChunkIdentity& identity) const {
    return FileReader::open(path_of(identity), identity);
  }

  // Open readers can go on reading. StatusCode::not_found if there is none; a file that holds another chunk stays, and
  // so does one that cannot be opened to see.
  Status erase(const ChunkIdentity& identity) const {
    const std::string path = path_of(identity);
    const Status found = FileReader::open(path, identity).status;
    if (!found.ok() && found.code() != StatusCode::corrupt && found.code() != StatusCode::unsupported) return found;
    if (::unlink(path.c_str()) != 0) return detail::system_error(errno, "cannot remove", detail::tail_of(path));
    return {};
  }

  // Where the chunk lies, or would.
  [[nodiscard]] std::string path_of(const ChunkIdentity& identity) const {
    return directory_ + "/" + to_hex(digest_of<Hash>(identity)) + ".safetensors";
  }

 private:
  std::string directory_ = ".";
};

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
