// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Execution: where the device side of a blend runs - a CUDA stream (stream_execution.cuh), or one of Thrust's host
// systems (thrust_execution.hpp), on which the same functors are tested without a GPU.
#pragma once

#include <kvblend/core/config.hpp>
#include <kvblend/core/status.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {
namespace cuda {

namespace detail {
struct FunctorProbe {
  KVBLEND_HOST_DEVICE void operator()(std::int64_t) const {}
};
}  // namespace detail

// An execution is a copyable handle to an ordered queue of work. Its calls return as soon as the work is queued: they
// neither wait for the device nor allocate, and throw nothing. A Status is an error of queueing.
//   for_each(count, functor)       functor(i) for each i in [0, count), in any order and at the same time. A functor is
//                                  a named, trivially copyable struct, passed by value, with
//                                    KVBLEND_HOST_DEVICE void operator()(std::int64_t i) const
//   sort(keys, scratch)            ascending, in place
//   sort_bytes(count)              bytes of scratch that a sort of `count` keys needs; device memory, any alignment
//   upload(device, host, bytes)    copies from the host; `host` must stay as it is until the copy is done, and be
//                                  pinned for the copy to be asynchronous
// Work runs in the order in which it was queued: each piece sees the memory that the ones before it wrote. All memory
// but `host` is the device's.
template <class E>
concept Execution = std::copyable<E> &&
    requires(const E& execution, std::int64_t count, detail::FunctorProbe functor, std::span<std::uint64_t> keys,
             std::span<std::byte> scratch, void* device, const void* host, std::size_t bytes) {
  { execution.for_each(count, functor) } -> std::same_as<Status>;
  { execution.sort(keys, scratch) } -> std::same_as<Status>;
  { execution.sort_bytes(count) } -> std::same_as<std::size_t>;
  { execution.upload(device, host, bytes) } -> std::same_as<Status>;
};

}  // namespace cuda
}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
