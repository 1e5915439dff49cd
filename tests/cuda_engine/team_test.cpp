// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The engine's row work done by teams of threads, as blocks of a GPU do it: the same rows as one thread alone makes.
#include <doctest/doctest.h>
#include <cuda_engine/cpu_device.hpp>
#include <cuda_engine/functors.hpp>
#include <kvblend/memory/layouts.hpp>

#include <barrier>
#include <cmath>
#include <random>
#include <thread>
#include <vector>

using namespace cuda_engine;

namespace {

constexpr int kThreads = 5;  // divides none of the widths

struct Shared {
  std::barrier<> barrier{kThreads};
  float slots[kThreads] = {};
};

class ThreadTeam {
 public:
  ThreadTeam(Shared& shared, int rank) : shared_(&shared), rank_(rank) {}
  [[nodiscard]] std::int32_t rank() const { return rank_; }
  [[nodiscard]] std::int32_t size() const { return kThreads; }
  void sync() const { shared_->barrier.arrive_and_wait(); }
  [[nodiscard]] float sum(float x) const {
    return reduce(x, [](float a, float b) { return a + b; });
  }
  [[nodiscard]] float max(float x) const {
    return reduce(x, [](float a, float b) { return a > b ? a : b; });
  }

 private:
  template <class Join>
  [[nodiscard]] float reduce(float x, Join join) const {
    sync();
    shared_->slots[rank_] = x;
    sync();
    x = shared_->slots[0];
    for (int i = 1; i < kThreads; ++i) x = join(x, shared_->slots[i]);
    return x;
  }
  Shared* shared_;
  int rank_;
};

template <class F>
void by_teams(std::int64_t count, const F& f) {
  Shared shared;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kThreads; ++rank) {
    threads.emplace_back([&shared, &f, count, rank] {
      const ThreadTeam team(shared, rank);
      for (std::int64_t row = 0; row < count; ++row) f(row, team);
    });
  }
  for (std::thread& thread : threads) thread.join();
}
template <class F>
void alone(std::int64_t count, const F& f) {
  for (std::int64_t row = 0; row < count; ++row) f(row, SoloTeam{});
}

// Four's alignment.
std::vector<float> numbers(std::size_t count, std::uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<float> out(count);
  for (float& x : out) x = static_cast<float>(generator()) / 1e9f - 2.0f;
  return out;
}

constexpr std::int32_t kRows = 7, kHeads = 6, kGroup = 3, kHeadDim = 12, kQueries = kHeads * kHeadDim;
constexpr std::int32_t kStride = kQueries + 2 * 2 * kHeadDim;

// run(mode, out) makes rows in `out`, which starts as `initial`; both ways must agree.
template <class Run>
void compare(const std::vector<float>& initial, const Run& run) {
  std::vector<float> solo = initial, teams = initial;
  run(solo, [](std::int64_t count, const auto& f) { alone(count, f); });
  run(teams, [](std::int64_t count, const auto& f) { by_teams(count, f); });
  CHECK(solo != initial);
  for (std::size_t i = 0; i < solo.size(); ++i) {
    REQUIRE(std::fabs(static_cast<double>(solo[i]) - static_cast<double>(teams[i])) <= 1e-6);
  }
}

}  // namespace

TEST_CASE("row work by a team of threads gives what one thread gives") {
  std::vector<Row> rows;
  std::vector<ActiveIndex> kept;
  std::vector<TokenId> tokens;
  std::vector<std::int32_t> positions;
  for (int i = 0; i < kRows; ++i) {
    rows.emplace_back(3 * i + 1);
    kept.emplace_back(i);
  }
  for (int i = 0; i < 3 * kRows; ++i) {
    tokens.push_back((i * 5) % 11);
    positions.push_back(i);
  }
  const auto qkv = numbers(std::size_t{kRows} * kStride, 1);
  const auto weights = numbers(kStride, 2);
  const auto empty = std::vector<float>(qkv.size(), 0.0f);

  compare(empty, [&](std::vector<float>& out, auto mode) {
    mode(kRows, EmbedRow<float>{rows.data(), tokens.data(), qkv.data(), out.data(), 52});
  });
  compare(empty, [&](std::vector<float>& out, auto mode) {
    mode(kRows, NormaliseRow<float>{qkv.data(), weights.data(), out.data(), kStride, 1e-5f});
  });
  const auto table = numbers(std::size_t{3 * kRows} * 2 * 5, 3);
  for (const bool halves : {false, true}) {
    compare(qkv, [&](std::vector<float>& out, auto mode) {
      mode(kRows, TurnRow<float>{rows.data(), positions.data(), table.data(), weights.data(), out.data(), kStride,
                                 kHeads + 2, kHeadDim, 5, 2, halves});
    });
  }
  compare(empty, [&](std::vector<float>& out, auto mode) {
    mode(kRows, PackQueries<float>{qkv.data(), kept.data(), out.data(), kRows, kStride, kHeads, kGroup, kHeadDim});
  });
  compare(empty, [&](std::vector<float>& out, auto mode) {
    mode(kRows, UnpackOutputs<float>{qkv.data(), out.data(), kRows, kHeads, kGroup, kHeadDim});
  });
  compare(empty, [&](std::vector<float>& out, auto mode) {
    mode(kRows, KeepRow<float>{qkv.data(), kept.data(), out.data(), kStride});
  });
  compare(empty, [&](std::vector<float>& out, auto mode) {
    mode(kRows, GateRow<float>{qkv.data(), out.data(), kStride / 2});
  });
  const auto from =
      kvblend::dense_plane<kvblend::F32Codec>(reinterpret_cast<const std::byte*>(qkv.data()), kRows, 8, kHeadDim);
  compare(empty, [&](std::vector<float>& out, auto mode) {
    const auto to =
        kvblend::dense_plane<kvblend::F32Codec>(reinterpret_cast<std::byte*>(out.data()), kRows, 8, kHeadDim);
    mode(kRows, CopyRow<float, decltype(from), decltype(to)>{from, to, nullptr});
  });
}

TEST_CASE("the masked softmax weighs the rows that a row sees and no other") {
  // Two key heads, two query rows of a group of three, over 24 columns.
  const std::vector<Row> rows = {Row(2), Row(5), Row(19)};
  const std::vector<ActiveIndex> kept = {ActiveIndex(1), ActiveIndex(2)};
  const auto scores = numbers(2 * 2 * 3 * 24, 9);
  const std::vector<float> untouched(scores.size(), -1.0f);
  const auto run = [&](std::vector<float>& out, auto mode) {
    mode(2 * 2 * 3, MaskedSoftmax<float>{scores.data(), out.data(), rows.data(), kept.data(), 2, 3, 20, 24});
  };
  compare(untouched, run);
  std::vector<float> weights = untouched;
  run(weights, [](std::int64_t count, const auto& f) { alone(count, f); });
  for (int head = 0; head < 2; ++head) {
    for (int query = 0; query < 2; ++query) {
      for (int g = 0; g < 3; ++g) {
        const auto base = static_cast<std::size_t>(((head * 2 + query) * 3 + g) * 24);
        const int visible = query == 0 ? 6 : 20;
        double sum = 0;
        for (int i = 0; i < visible; ++i)
          sum += std::exp(static_cast<double>(scores[base + static_cast<std::size_t>(i)]));
        for (int i = 0; i < 24; ++i) {
          const std::size_t at = base + static_cast<std::size_t>(i);
          const double expected = i < visible ? std::exp(static_cast<double>(scores[at])) / sum : i < 20 ? 0.0 : -1.0;
          REQUIRE(std::fabs(static_cast<double>(weights[at]) - expected) <= 1e-6);
        }
      }
    }
  }
}
