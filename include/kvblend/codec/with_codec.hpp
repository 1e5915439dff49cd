// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// From a DType known at run time to its codec. Only codecs that need nothing else: scales and Hadamard turns are the
// caller's to add.
#pragma once

#include <kvblend/codec/floats.hpp>
#include <kvblend/codec/fp8.hpp>
#include <kvblend/codec/ggml_blocks.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>

#include <concepts>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// Calls use(C{}) with the codec of `dtype` and returns what it returns, a Status or a Result. Once per plane, not per
// value: the loops within know their codec at compile time. A dtype that is none of ours is an error.
template <class Use>
[[nodiscard]] auto with_codec(DType dtype, Use&& use) -> decltype(use(F32Codec{})) {
  static_assert(std::convertible_to<Status, decltype(use(F32Codec{}))>, "`use` must return a Status or a Result");
  switch (dtype) {
    case DType::f32: return use(F32Codec{});
    case DType::f16: return use(F16Codec{});
    case DType::bf16: return use(Bf16Codec{});
    case DType::f8_e4m3: return use(Fp8E4M3Codec{});
    case DType::f8_e5m2: return use(Fp8E5M2Codec{});
    case DType::q8_0: return use(Q8_0Codec{});
    case DType::q4_0: return use(Q4_0Codec{});
  }
  return Status::error(StatusCode::unsupported, "no codec for dtype %d", static_cast<int>(dtype)).at("dtype");
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
