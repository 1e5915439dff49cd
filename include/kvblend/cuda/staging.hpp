// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Staging: pinned memory that uploads read from, taken piece by piece and never twice, since what lies there may be
// read long after the upload was queued.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/cuda/execution.hpp>
#include <kvblend/cuda/workspace.hpp>

#include <cstddef>
#include <cstring>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {
namespace cuda {

template <Execution E>
class Staging {
 public:
  Staging() = default;
  Staging(E execution, std::span<std::byte> pinned) : execution_(execution), carver_(pinned) {}

  // Copies `values` to the pinned memory at once, from there to `device` when their turn comes.
  template <class T>
  Status upload(std::span<const T> values, std::span<T> device) {
    if (values.empty()) return {};
    std::span<T> staged;
    carver_.take(staged, values.size());
    if (!carver_.fits()) {
      return Status::error(StatusCode::insufficient_space, "too little for what is uploaded").at("workspace.host");
    }
    std::memcpy(static_cast<void*>(staged.data()), values.data(), values.size_bytes());
    return execution_.upload(device.data(), staged.data(), staged.size_bytes());
  }

  // What is left, for tables that are made in it, from its first float on; upload_tables() takes what they fill.
  [[nodiscard]] std::span<float> rest() const {
    const std::span<std::byte> free = carver_.rest();
    return {reinterpret_cast<float*>(free.data()), free.size() / sizeof(float)};
  }
  Status upload_tables(std::span<const float> made, std::span<float> device) {
    if (made.empty()) return {};
    std::span<float> staged;
    carver_.take(staged, made.size());
    if (made.size() > device.size()) {
      return Status::error(StatusCode::insufficient_space, "rotation tables need %zu floats, have %zu", made.size(),
                           device.size())
          .at("workspace.device");
    }
    return execution_.upload(device.data(), made.data(), made.size_bytes());
  }

 private:
  E execution_{};
  detail::Carver carver_;
};

}  // namespace cuda
}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
