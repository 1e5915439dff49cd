// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Files by descriptor: whole reads at an offset, whole writes, and replacing a file in one step. Chunk files and the
// file tier stand on it.
#pragma once

#include <kvblend/core/status.hpp>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <utility>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// A file descriptor that closes itself.
class PosixFile {
 public:
  PosixFile() = default;
  explicit PosixFile(int descriptor) : descriptor_(descriptor) {}
  PosixFile(PosixFile&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  PosixFile& operator=(PosixFile&& other) noexcept {
    if (this != &other) {
      close();
      descriptor_ = std::exchange(other.descriptor_, -1);
    }
    return *this;
  }
  PosixFile(const PosixFile&) = delete;
  PosixFile& operator=(const PosixFile&) = delete;
  ~PosixFile() { close(); }

  [[nodiscard]] bool is_open() const { return descriptor_ >= 0; }

  // A regular file, to be read. A missing one is StatusCode::not_found.
  static Result<PosixFile> open_for_reading(const std::string& path);

  Result<std::int64_t> size() const;
  // Fills `bytes` from `offset` on. A file that ends before is StatusCode::corrupt.
  Status read_at(std::int64_t offset, std::span<std::byte> bytes) const;
  // Appends all of `bytes`.
  Status write(std::span<const std::byte> bytes) const;
  // Returns once what was written is on the device.
  Status sync() const;
  // Closing may report a write that failed late.
  Status close_checked();

 private:
  void close() {
    if (descriptor_ >= 0) ::close(descriptor_);
    descriptor_ = -1;
  }

  int descriptor_ = -1;
};

// Writes a file beside `path` that takes its place at commit(), in one step: readers see the old file or the new one.
// Until then, and after any failure, the old one stays; without commit the new one is removed. It can be read by its
// owner only.
class ReplacementFile {
 public:
  ReplacementFile() = default;
  ReplacementFile(ReplacementFile&& other) noexcept
      : file_(std::move(other.file_)),
        path_(std::move(other.path_)),
        temporary_(std::exchange(other.temporary_, std::string())) {}
  ReplacementFile& operator=(ReplacementFile&& other) noexcept {
    std::swap(file_, other.file_);
    std::swap(path_, other.path_);
    std::swap(temporary_, other.temporary_);
    return *this;
  }
  ~ReplacementFile() {
    if (!temporary_.empty()) ::unlink(temporary_.c_str());
  }

  static Result<ReplacementFile> create(const std::string& path);
  Status write(std::span<const std::byte> bytes) { return named(file_.write(bytes)); }
  Status commit();

 private:
  // The same with the path in it.
  Status named(const Status& status) const;

  PosixFile file_;
  std::string path_;
  std::string temporary_;
};

// ---------------------------------------------------------------------------------------------------------------------

namespace detail {

// The end of a path, as much as Status::where() has room for.
inline const char* tail_of(const std::string& path) {
  constexpr std::size_t kRoom = 63;
  return path.c_str() + (path.size() > kRoom ? path.size() - kRoom : 0);
}

// strerror_r comes in two kinds; overloads tell which one this system has.
inline const char* error_text(int, const char* buffer) { return buffer; }
inline const char* error_text(const char* text, const char*) { return text; }

inline Status system_error(int error, const char* what, const char* where) {
  char buffer[96] = "";
  const char* text = error_text(::strerror_r(error, buffer, sizeof buffer), buffer);
  const StatusCode code = error == ENOENT ? StatusCode::not_found : StatusCode::io_error;
  return Status::error(code, "%s: %s", what, text).at("%s", where);
}

inline std::string directory_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

}  // namespace detail

inline Result<PosixFile> PosixFile::open_for_reading(const std::string& path) {
  if (path.empty() || path.find('\0') != std::string::npos) {
    return Status::error(StatusCode::invalid_argument, "empty, or has a zero byte in it").at("path");
  }
  int descriptor = -1;
  do {  // O_NONBLOCK, so that opening a pipe returns, to be refused below
    descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  } while (descriptor < 0 && errno == EINTR);
  if (descriptor < 0) return detail::system_error(errno, "cannot open", detail::tail_of(path));
  PosixFile file(descriptor);
  struct stat info {};
  if (::fstat(descriptor, &info) != 0) return detail::system_error(errno, "cannot stat", detail::tail_of(path));
  if (!S_ISREG(info.st_mode)) {
    return Status::error(StatusCode::invalid_argument, "is not a regular file").at("%s", detail::tail_of(path));
  }
  return Result<PosixFile>(std::move(file));  // spelled out for nvcc, which would copy
}

inline Result<std::int64_t> PosixFile::size() const {
  struct stat info {};
  if (::fstat(descriptor_, &info) != 0) return detail::system_error(errno, "cannot stat", "file");
  return static_cast<std::int64_t>(info.st_size);
}

inline Status PosixFile::read_at(std::int64_t offset, std::span<std::byte> bytes) const {
  while (!bytes.empty()) {
    const ssize_t got = ::pread(descriptor_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return detail::system_error(errno, "cannot read", "file");
    if (got == 0) {
      return Status::error(StatusCode::corrupt, "ends %zu bytes before byte %lld", bytes.size(),
                           static_cast<long long>(offset) + static_cast<long long>(bytes.size()))
          .at("file");
    }
    offset += got;
    bytes = bytes.subspan(static_cast<std::size_t>(got));
  }
  return {};
}

inline Status PosixFile::write(std::span<const std::byte> bytes) const {
  while (!bytes.empty()) {
    const ssize_t put = ::write(descriptor_, bytes.data(), bytes.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return detail::system_error(errno, "cannot write", "file");
    bytes = bytes.subspan(static_cast<std::size_t>(put));
  }
  return {};
}

inline Status PosixFile::sync() const {
  int result = 0;
  do {
    result = ::fsync(descriptor_);
  } while (result != 0 && errno == EINTR);
  return result == 0 ? Status() : detail::system_error(errno, "cannot sync", "file");
}

inline Status PosixFile::close_checked() {
  // Not repeated after EINTR: on Linux the descriptor is gone by then.
  const int result = ::close(std::exchange(descriptor_, -1));
  return result == 0 || errno == EINTR ? Status() : detail::system_error(errno, "cannot close", "file");
}

inline Result<ReplacementFile> ReplacementFile::create(const std::string& path) {
  if (path.empty() || path.find('\0') != std::string::npos) {
    return Status::error(StatusCode::invalid_argument, "empty, or has a zero byte in it").at("path");
  }
  ReplacementFile replacement;
  std::string temporary = path + ".tmp-XXXXXX";
  const int descriptor = ::mkostemp(temporary.data(), O_CLOEXEC);
  if (descriptor < 0) return detail::system_error(errno, "cannot create", detail::tail_of(temporary));
  replacement.file_ = PosixFile(descriptor);
  replacement.path_ = path;
  replacement.temporary_ = std::move(temporary);
  return Result<ReplacementFile>(std::move(replacement));  // spelled out for nvcc, which would copy
}

inline Status ReplacementFile::named(const Status& status) const {
  if (status.ok()) return {};
  return Status::error(status.code(), "%s", status.message()).at("%s", detail::tail_of(path_));
}

inline Status ReplacementFile::commit() {
  KVBLEND_RETURN_IF_ERROR(named(file_.sync()));
  KVBLEND_RETURN_IF_ERROR(named(file_.close_checked()));
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
    return detail::system_error(errno, "cannot replace", detail::tail_of(path_));
  }
  temporary_.clear();
  // The new name is only safe once its directory is. Some file systems cannot sync directories: not an error.
  const int directory = ::open(detail::directory_of(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory >= 0) {
    const PosixFile handle(directory);
    if (::fsync(directory) != 0 && errno != EINVAL && errno != ENOTSUP && errno != EINTR) {
      return detail::system_error(errno, "cannot sync directory of", detail::tail_of(path_));
    }
  }
  return {};
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
