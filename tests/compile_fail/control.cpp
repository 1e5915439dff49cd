// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: success
//
// The control: what the cases beside it get wrong, done right. If this fails, their failing shows nothing.
#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>

kvblend::Status check(kvblend::Row row);

kvblend::Status check(kvblend::Row row) {
  if (row.value < 0) {
    return kvblend::Status::error(kvblend::StatusCode::out_of_range, "row %d", row.value);
  }
  return {};
}

int main() { return check(kvblend::Row(1)).ok() ? 0 : 1; }
