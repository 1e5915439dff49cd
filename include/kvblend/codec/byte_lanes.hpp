// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Lanes of integers from and to bytes, for the codecs that store bytes: by the steps that g++ 12 makes the fewest
// instructions of.
#pragma once

#include <kvblend/codec/lanes.hpp>
#include <kvblend/core/config.hpp>

#include <cstdint>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

namespace detail {

inline void widen(const UInt8Lanes& bytes, Int32Lanes& wide) {
  if constexpr (kLanes > 4) {
    wide = __builtin_convertvector(__builtin_convertvector(bytes, UInt16Lanes), Int32Lanes);
  } else {
    wide = __builtin_convertvector(bytes, Int32Lanes);
  }
}

// Of each lane the low 8 bits.
inline void narrow(const Int32Lanes& wide, UInt8Lanes& bytes) {
  if constexpr (kLanes < 16) {
    bytes = __builtin_convertvector(__builtin_convertvector(wide, UInt16Lanes), UInt8Lanes);
  } else {
    bytes = __builtin_convertvector(wide, UInt8Lanes);
  }
}

}  // namespace detail

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
