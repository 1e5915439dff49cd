// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// DevicePlanes: the checks of planes whose memory, tables and scales only the device can read.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/memory/plane.hpp>

#include <cstdint>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {
namespace cuda {

// In the place of HostPlanes (memory/plane.hpp). Rows must be listed, but a block that a table does not have is seen by
// kernels alone, which pass over the row.
struct DevicePlanes {
  template <ReadablePlane P>
  static Status check_shape(const P& plane, const char* name) {
    return kvblend::detail::check_heads(plane, name);
  }

  template <ReadablePlane P>
  static Status check_rows(const P& plane, std::int64_t first, std::int64_t count, const char* name) {
    if (count > 0 && plane.base == nullptr) {
      return Status::error(StatusCode::invalid_argument, "plane has no memory").at("%s", name);
    }
    if constexpr (requires { plane.layout.lists_rows(first, count); }) {
      if (!plane.layout.lists_rows(first, count)) {
        return Status::error(StatusCode::out_of_range, "not all of %lld rows from %lld on are there",
                             static_cast<long long>(count), static_cast<long long>(first))
            .at("%s", name);
      }
    }
    return {};
  }

  template <ReadablePlane P>
  static Status check_stored_rows(const P& plane, std::int64_t first, std::int64_t count, const char* name) {
    return check_rows(plane, first, count, name);
  }
};

}  // namespace cuda
}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
