// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Status and Result: how every function of the library reports bad input, without throwing, allocating or printing.
#pragma once

#include <kvblend/core/config.hpp>

#include <cstdarg>
#include <cstdio>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

enum class StatusCode {
  ok = 0,
  invalid_argument,    // a value that no call accepts: NaN ratio, odd rotary_dim, empty plane
  out_of_range,        // an index, row or position outside its space
  mismatch,            // two things that must agree do not: model, dtype, rope, tokens
  not_found,           // no such chunk, or it went away between look-up and load
  corrupt,             // stored bytes are not what was written
  io_error,            // the operating system refused
  insufficient_space,  // a workspace or destination too small
  unsupported,         // asked for something this combination cannot do
  host_error,          // the engine's own call failed
  cancelled,           // stopped by the caller
};

[[nodiscard]] constexpr const char* to_string(StatusCode code) {
  switch (code) {
    case StatusCode::ok: return "ok";
    case StatusCode::invalid_argument: return "invalid argument";
    case StatusCode::out_of_range: return "out of range";
    case StatusCode::mismatch: return "mismatch";
    case StatusCode::not_found: return "not found";
    case StatusCode::corrupt: return "corrupt";
    case StatusCode::io_error: return "i/o error";
    case StatusCode::insufficient_space: return "insufficient space";
    case StatusCode::unsupported: return "unsupported";
    case StatusCode::host_error: return "host error";
    case StatusCode::cancelled: return "cancelled";
  }
  return "unknown";
}

// Outcome of a call. `where` names the field or index at fault ("segment 2", "bandwidth"), `message` says what is wrong
// with it. Both are text inside the object, so a Status outlives whatever it speaks of.
class [[nodiscard]] Status {
 public:
  Status() { where_[0] = message_[0] = '\0'; }  // ok

  [[nodiscard]] bool ok() const { return code_ == StatusCode::ok; }
  [[nodiscard]] StatusCode code() const { return code_; }
  [[nodiscard]] const char* message() const { return message_; }
  [[nodiscard]] const char* where() const { return where_; }

  // printf-style: Status::error(StatusCode::out_of_range, "position %d exceeds %d", p, limit).at("segment %d", s)
#if defined(__GNUC__)
  __attribute__((format(printf, 2, 3)))
#endif
  static Status
  error(StatusCode code, const char* format, ...) {
    Status status;
    status.code_ = code;
    std::va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(status.message_, sizeof status.message_, format, arguments);
    va_end(arguments);
    return status;
  }

#if defined(__GNUC__)
  __attribute__((format(printf, 2, 3)))
#endif
  Status&&
  at(const char* format, ...) && {
    std::va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(where_, sizeof where_, format, arguments);
    va_end(arguments);
    return static_cast<Status&&>(*this);
  }

 private:
  StatusCode code_ = StatusCode::ok;
  // Only the first byte must be set for a valid empty text: a Status is returned per layer and should cost nothing.
  char where_[64];
  char message_[192];
};

// A value, or the Status that says why there is none. `value` is only meaningful if `status.ok()`.
template <class T>
struct [[nodiscard]] Result {
  Status status;
  T value{};

  Result() = default;
  Result(T v) : value(static_cast<T&&>(v)) {}             // NOLINT: implicit by design, `return value;`
  Result(Status s) : status(static_cast<Status&&>(s)) {}  // NOLINT: implicit by design, `return Status::error(…);`

  [[nodiscard]] bool ok() const { return status.ok(); }
};

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE

// Returns the Status of `expression` from the enclosing function unless it is ok.
#define KVBLEND_RETURN_IF_ERROR(expression)                                        \
  do {                                                                             \
    if (::kvblend::Status kvblend_status_ = (expression); !kvblend_status_.ok()) { \
      return kvblend_status_;                                                      \
    }                                                                              \
  } while (false)
