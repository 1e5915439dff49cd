// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What the tests of all back ends share: the list of back ends, an executor that uses two threads, and planes in memory
// of their own.
#pragma once

#include <kvblend/core/executor.hpp>
#include <kvblend/fuse/portable_backend.hpp>
#include <kvblend/memory/layouts.hpp>

#include <doctest/doctest.h>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <thread>
#include <vector>

#if !defined(__CUDACC__)
#include <kvblend/eigen/backend.hpp>
#endif
#if KVBLEND_TEST_CUDA
#include "cuda/executions.hpp"
#endif

namespace kvblend_test {

// The even bodies on one thread, the odd ones on another.
struct TwoThreads {
  template <class Body>
  void parallel_for(std::int64_t count, const Body& body) const {
    std::thread other([&body, count] {
      for (std::int64_t i = 1; i < count; i += 2) body(i);
    });
    for (std::int64_t i = 0; i < count; i += 2) body(i);
    other.join();
  }
};

#if !defined(__CUDACC__)
using SerialEigen = kvblend::EigenBackend<>;
using TwoThreadEigen = kvblend::EigenBackend<TwoThreads>;
#endif

#if KVBLEND_TEST_CUDA
// The CUDA back end, with scratch of its own.
template <class Execution>
class DeviceBackend : public kvblend::cuda::Backend<Execution> {
 public:
  DeviceBackend() : kvblend::cuda::Backend<Execution>(Execution{}, scratch()) {}

 private:
  static std::span<std::byte> scratch() {
    static std::vector<std::byte> memory(1 << 20);
    return memory;
  }
};
#endif
#if defined(__CUDACC__)
using DeviceStream = DeviceBackend<WaitingStream>;
#define KVBLEND_TEST_BACKENDS kvblend::PortableBackend, kvblend_test::DeviceStream
#define KVBLEND_TEST_ANY_LAYOUT_BACKENDS KVBLEND_TEST_BACKENDS
#elif KVBLEND_TEST_CUDA
using DeviceCpp = DeviceBackend<ThrustCpp>;
using DeviceOmp = DeviceBackend<ThrustOmp>;
#define KVBLEND_TEST_BACKENDS                                                                                 \
  kvblend::PortableBackend, kvblend_test::SerialEigen, kvblend_test::TwoThreadEigen, kvblend_test::DeviceCpp, \
      kvblend_test::DeviceOmp
#define KVBLEND_TEST_ANY_LAYOUT_BACKENDS kvblend::PortableBackend, kvblend_test::TwoThreadEigen, kvblend_test::DeviceCpp
#else
#define KVBLEND_TEST_BACKENDS kvblend::PortableBackend, kvblend_test::SerialEigen, kvblend_test::TwoThreadEigen
#define KVBLEND_TEST_ANY_LAYOUT_BACKENDS kvblend::PortableBackend, kvblend_test::TwoThreadEigen
#endif

// A stored layer of one segment, with the same plane for keys and values.
template <class P>
struct OnePlane {
  P plane;
  [[nodiscard]] P keys(std::int32_t) const { return plane; }
  [[nodiscard]] P values(std::int32_t) const { return plane; }
};

// Places a run's values; its keys, unturned, go where nobody looks.
template <class Backend, class P, class Q>
void place_values(const kvblend::ShiftRun& run, const P& source, const Q& destination) {
  using Codec = typename Q::codec_type;
  const std::int32_t heads = source.layout.heads();
  const std::int32_t head_dim = source.layout.head_dim();
  const std::int64_t rows = std::int64_t{run.destination.value} + run.count;
  std::vector<std::byte> keys(static_cast<std::size_t>(kvblend::bytes_of<Codec>(rows * heads * head_dim)));
  kvblend::RopeSpec spec;
  spec.head_dim = head_dim;
  kvblend::PlacedRun placed;
  placed.run = run;
  Backend{}.place(spec, std::span<const kvblend::PlacedRun>(&placed, 1), OnePlane<P>{source},
                  kvblend::dense_plane<Codec>(keys.data(), rows, heads, head_dim), destination,
                  std::span<const std::uint8_t>());
}

// Dense rows [rows, heads, head_dim] that own their memory.
template <class Codec>
struct Rows {
  std::int64_t rows;
  std::int32_t heads;
  std::int32_t head_dim;
  std::vector<std::byte> bytes;

  Rows(std::int64_t row_count, std::int32_t head_count, std::int32_t values)
      : rows(row_count),
        heads(head_count),
        head_dim(values),
        bytes(static_cast<std::size_t>(kvblend::bytes_of<Codec>(row_count * head_count * values))) {}

  auto plane() { return kvblend::dense_plane<Codec>(bytes.data(), rows, heads, head_dim); }
  auto plane() const { return kvblend::dense_plane<Codec>(bytes.data(), rows, heads, head_dim); }

  void fill(std::mt19937& random) {
    std::normal_distribution<float> normal;
    std::vector<float> values(static_cast<std::size_t>(rows * heads * head_dim));
    for (float& value : values) value = normal(random);
    Codec::encode(values.data(), bytes.data(), rows * heads * head_dim);
  }
  std::vector<float> head(std::int64_t row, std::int32_t head_index) const {
    std::vector<float> values(static_cast<std::size_t>(head_dim));
    kvblend::decode_head(plane(), row, head_index, values.data());
    return values;
  }
  void set_head(std::int64_t row, std::int32_t head_index, const std::vector<float>& values) {
    kvblend::encode_head(plane(), row, head_index, values.data());
  }
};

}  // namespace kvblend_test

TYPE_TO_STRING_AS("portable", kvblend::PortableBackend);
#if defined(__CUDACC__)
TYPE_TO_STRING_AS("cuda on a stream", kvblend_test::DeviceStream);
#else
TYPE_TO_STRING_AS("eigen serial", kvblend_test::SerialEigen);
TYPE_TO_STRING_AS("eigen on two threads", kvblend_test::TwoThreadEigen);
#endif
#if KVBLEND_TEST_CUDA && !defined(__CUDACC__)
TYPE_TO_STRING_AS("cuda on thrust cpp", kvblend_test::DeviceCpp);
TYPE_TO_STRING_AS("cuda on thrust omp", kvblend_test::DeviceOmp);
#endif
