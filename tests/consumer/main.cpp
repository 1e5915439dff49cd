// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A program of another project: the umbrella headers of the components it has found, and one call.
#include <kvblend/kvblend.hpp>
#ifdef CONSUMER_HAS_EIGEN
#include <kvblend/eigen.hpp>
#endif
#ifdef CONSUMER_HAS_STORE
#include <kvblend/store.hpp>
#endif

#include <cstdio>

#ifndef CONSUMER_FLAG
#error "the project's own flags were lost"
#endif

int version_seen_by_other();

int main() {
  const int version = KVBLEND_VERSION_MAJOR * 100 + KVBLEND_VERSION_MINOR;
  std::printf("kvblend %d.%d.%d\n", KVBLEND_VERSION_MAJOR, KVBLEND_VERSION_MINOR, KVBLEND_VERSION_PATCH);
  return version == version_seen_by_other() ? 0 : 1;
}
