// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The attention kernel's tile on the CPU: its threads are fibres that take turns, and the tensor cores are what PTX
// says of them, fragment by fragment. Against attention in double.
#include <doctest/doctest.h>
#include <cuda_engine/flash_attention.hpp>
#include <kvblend/codec/floats.hpp>
#include <kvblend/memory/layouts.hpp>

#include <ucontext.h>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

using namespace cuda_engine;
using kvblend::to_bfloat16;
using kvblend::to_float;

namespace {

using Plane = FlashAttention::Plane;

// A block of threads. Each runs up to a point where it waits for others, then the next one runs: when the first one
// goes on, all have come to the same point. A warp waits for itself alone until the block waits, so that warps drift
// apart as far as they can.
class Block {
 public:
  template <class Body>
  Block(int threads, const Body& body) : mail_(static_cast<std::size_t>(threads)) {
    contexts_.resize(mail_.size());
    stacks_.resize(mail_.size(), std::vector<char>(std::size_t{1} << 16));
    run_ = [](void* context, Block& block) { (*static_cast<const Body*>(context))(block); };
    body_ = const_cast<void*>(static_cast<const void*>(&body));
    for (std::size_t i = 0; i < contexts_.size(); ++i) {
      getcontext(&contexts_[i]);
      contexts_[i].uc_stack.ss_sp = stacks_[i].data();
      contexts_[i].uc_stack.ss_size = stacks_[i].size();
      contexts_[i].uc_link = nullptr;
      makecontext(&contexts_[i], &Block::enter, 0);
    }
    started_ = this;
    swapcontext(&outside_, &contexts_[0]);
  }

  [[nodiscard]] int thread() const { return static_cast<int>(now_); }
  void wait_for_warp() { go_to(now_ / 32 * 32 + (now_ + 1) % 32); }
  void wait_for_block() { go_to((now_ + 1) % contexts_.size()); }
  // What each thread shows the others; they read it between two waits.
  struct Mail {
    const void* address = nullptr;
    std::uint32_t a[4] = {}, b[2] = {};
    float x = 0;
  };
  [[nodiscard]] Mail& mail(int thread) { return mail_[static_cast<std::size_t>(thread)]; }

 private:
  void go_to(std::size_t next) {
    const std::size_t was = now_;
    now_ = next;
    swapcontext(&contexts_[was], &contexts_[next]);
  }
  static void enter() {
    Block& block = *started_;
    block.run_(block.body_, block);
    // All end in the same round, in order.
    const std::size_t was = block.now_++;
    if (block.now_ == block.contexts_.size()) setcontext(&block.outside_);
    swapcontext(&block.contexts_[was], &block.contexts_[block.now_]);
  }

  inline static Block* started_ = nullptr;
  void (*run_)(void*, Block&) = nullptr;
  void* body_ = nullptr;
  std::vector<ucontext_t> contexts_;
  std::vector<std::vector<char>> stacks_;
  std::vector<Mail> mail_;
  ucontext_t outside_{};
  std::size_t now_ = 0;
};

float half_of(std::uint32_t both, int which) {
  return to_float(BFloat16{static_cast<std::uint16_t>(which == 0 ? both & 0xffff : both >> 16)});
}

// What is under way is copied at once, so that a wait too few for the block is seen, or else only when it is waited
// for, so that a wait too few for the copy is.
class TestLane {
 public:
  TestLane(Block& block, bool at_once) : block_(&block), thread_(block.thread()), at_once_(at_once) {}

  [[nodiscard]] int thread() const { return thread_; }
  void sync() const { block_->wait_for_block(); }
  void copy(void* to, const void* from) const {
    if (at_once_) {
      std::memcpy(to, from, 16);
    } else {
      copies_.push_back({to, from, groups_});
    }
  }
  void commit() const { ++groups_; }
  void wait(int newest) const {
    for (const Copy& copy : copies_) {
      if (copy.group < groups_ - newest) std::memcpy(copy.to, copy.from, 16);
    }
    std::erase_if(copies_, [&](const Copy& copy) { return copy.group < groups_ - newest; });
  }
  void load(std::uint32_t (&out)[4], const void* from, bool across) const {
    block_->mail(thread_).address = from;
    block_->wait_for_warp();
    const int warp = thread_ / 32 * 32, g = thread_ % 32 / 4, t = thread_ % 4;
    for (int m = 0; m < 4; ++m) {
      std::uint32_t both = 0;
      for (int e = 0; e < 2; ++e) {
        const int row = across ? 2 * t + e : g;
        const int column = across ? g : 2 * t + e;
        const auto* values = static_cast<const BFloat16*>(block_->mail(warp + 8 * m + row).address);
        both |= static_cast<std::uint32_t>(values[column].bits) << (16 * e);
      }
      out[m] = both;
    }
    block_->wait_for_warp();
  }
  void multiply(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) const {
    Block::Mail& own = block_->mail(thread_);
    std::copy_n(a, 4, own.a);
    own.b[0] = b0;
    own.b[1] = b1;
    block_->wait_for_warp();
    const int warp = thread_ / 32 * 32, g = thread_ % 32 / 4, t = thread_ % 4;
    for (int i = 0; i < 4; ++i) {
      const int row = g + i / 2 * 8;
      const int column = 2 * t + i % 2;
      for (int k = 0; k < 16; ++k) {
        // PTX: a's register r of lane 4g + t holds row g + 8 (r % 2), columns 2t + 8 (r / 2) and one more.
        const Block::Mail& left = block_->mail(warp + row % 8 * 4 + k % 8 / 2);
        const Block::Mail& right = block_->mail(warp + column * 4 + k % 8 / 2);
        c[i] += half_of(left.a[row / 8 + k / 8 * 2], k % 2) * half_of(right.b[k / 8], k % 2);
      }
    }
    block_->wait_for_warp();
  }
  [[nodiscard]] std::uint32_t pack(float low, float high) const {
    return to_bfloat16(low).bits | static_cast<std::uint32_t>(to_bfloat16(high).bits) << 16;
  }
  [[nodiscard]] float quad_max(float x) const {
    return quad(x, [](float a, float b) { return a > b ? a : b; });
  }
  [[nodiscard]] float quad_sum(float x) const {
    return quad(x, [](float a, float b) { return a + b; });
  }

 private:
  struct Copy {
    void* to;
    const void* from;
    int group;
  };
  template <class Join>
  [[nodiscard]] float quad(float x, Join join) const {
    block_->mail(thread_).x = x;
    block_->wait_for_warp();
    const int first = thread_ / 4 * 4;
    x = block_->mail(first).x;
    for (int i = 1; i < 4; ++i) x = join(x, block_->mail(first + i).x);
    block_->wait_for_warp();
    return x;
  }
  Block* block_;
  int thread_;
  bool at_once_;
  mutable std::vector<Copy> copies_;
  mutable int groups_ = 0;
};

std::vector<BFloat16> numbers(std::size_t count, std::uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<BFloat16> out(count);
  for (BFloat16& x : out) x = to_bfloat16(static_cast<float>(generator()) / 2147483648.0f - 1.0f);
  return out;
}

// `kept` out of active rows 0, 3, 6, … of a cache in blocks of 16.
template <int head_dim>
void check(bool at_once, std::int32_t cached, std::int32_t kv_heads, std::int32_t group,
           const std::vector<int>& kept_indices) {
  using Shape = FlashShape<head_dim, 2>;
  const std::int32_t heads = kv_heads * group;
  const std::int64_t stride = (heads + 2 * kv_heads) * head_dim;
  std::vector<Row> rows;
  for (std::int32_t row = 0; row < cached; row += 3) rows.emplace_back(row);
  std::vector<ActiveIndex> kept;
  for (const int i : kept_indices) kept.emplace_back(i);
  const auto qkv = numbers(rows.size() * static_cast<std::size_t>(stride), 1);
  std::vector<std::int32_t> table;
  const std::int32_t blocks = (cached + 15) / 16;
  for (std::int32_t i = 0; i < blocks; ++i) table.push_back(blocks - 1 - i);
  const auto pool_values = static_cast<std::size_t>(blocks * 16 * kv_heads * head_dim);
  auto keys = numbers(pool_values, 2), values = numbers(pool_values, 3);
  const auto plane = [&](std::vector<BFloat16>& pool) {
    return Plane(reinterpret_cast<std::byte*>(pool.data()),
                 kvblend::PagedLayout(table.data(), blocks, 16, kv_heads, head_dim, 32 * kv_heads * head_dim,
                                      2 * kv_heads * head_dim, 2 * head_dim));
  };
  const auto count = static_cast<std::int32_t>(kept.size());
  std::vector<BFloat16> out(static_cast<std::size_t>(count * heads * head_dim));
  const double scale = 3 / std::sqrt(static_cast<double>(head_dim));  // some rows weigh much more than others
  const FlashAttention args{qkv.data(),
                            stride,
                            rows.data(),
                            kept.data(),
                            count,
                            group,
                            plane(keys),
                            plane(values),
                            out.data(),
                            heads * head_dim,
                            static_cast<float>(scale * 1.4426950408889634)};
  std::vector<BFloat16> shared(Shape::kSharedBytes / sizeof(BFloat16), to_bfloat16(NAN));
  for (std::int32_t tile = 0; tile * Shape::kRows < count * group; ++tile) {
    for (std::int32_t head = 0; head < kv_heads; ++head) {
      Block(Shape::kThreads, [&](Block& block) {
        const TestLane lane(block, at_once);
        FlashTile<Shape, TestLane>(args, lane, shared.data()).run(tile, head);
      });
    }
  }

  for (std::int32_t i = 0; i < count; ++i) {
    const std::int32_t active = kept[static_cast<std::size_t>(i)].value;
    for (std::int32_t head = 0; head < heads; ++head) {
      std::vector<double> expected(head_dim, 0.0);
      double sum = 0;
      for (std::int32_t row = 0; row <= 3 * active; ++row) {
        const auto* key = reinterpret_cast<const BFloat16*>(args.keys.at(row, head / group));
        const auto* value = reinterpret_cast<const BFloat16*>(args.values.at(row, head / group));
        double dot = 0;
        for (std::int32_t d = 0; d < head_dim; ++d) {
          dot += static_cast<double>(to_float(qkv[static_cast<std::size_t>(active * stride + head * head_dim + d)])) *
                 static_cast<double>(to_float(key[d]));
        }
        const double weight = std::exp(dot * scale);
        sum += weight;
        for (std::size_t d = 0; d < expected.size(); ++d) {
          expected[d] += weight * static_cast<double>(to_float(value[d]));
        }
      }
      double largest = 0;
      for (std::size_t d = 0; d < expected.size(); ++d) {
        const BFloat16 got = out[static_cast<std::size_t>((i * heads + head) * head_dim) + d];
        const double off = std::fabs(static_cast<double>(to_float(got)) - expected[d] / sum);
        if (!(off <= largest)) largest = off;
      }
      REQUIRE(largest <= 0.01);  // bf16 weights and outputs below 1: a few times 2^-9
    }
  }
}

}  // namespace

TEST_CASE("the attention kernel's tile gives attention: scattered rows over a paged cache") {
  for (const bool at_once : {false, true}) {
    // Two tiles of 32 rows, the second one not full; rows that see one key, whole tiles of keys, and parts.
    check<64>(at_once, 200, 2, 3, {0, 1, 2, 5, 20, 21, 22, 23, 40, 41, 42, 43, 60, 65, 66});
    // The first row alone; a cache that ends with a tile of keys; no grouping.
    check<64>(at_once, 1, 1, 1, {0});
    check<64>(at_once, 128, 1, 1, {1, 42});
    check<128>(at_once, 200, 1, 4, {7, 30, 31, 32, 33, 34, 35, 66});
  }
}
