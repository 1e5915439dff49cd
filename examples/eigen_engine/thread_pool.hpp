// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// ThreadPool: a fixed crew that shares out numbered tasks. What a task computes never depends on who runs it, so results
// have the same bits whatever the number of threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace eigen_engine {

class ThreadPool {
 public:
  // The caller of run() works too: `threads` - 1 are started.
  explicit ThreadPool(std::int32_t threads) : threads_(threads < 1 ? 1 : threads) {
    for (std::int32_t worker = 1; worker < threads_; ++worker) {
      crew_.emplace_back([this, worker] { serve(worker); });
    }
  }
  ~ThreadPool() {
    stop_.store(true, std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    for (std::thread& thread : crew_) thread.join();
  }
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  [[nodiscard]] std::int32_t threads() const { return threads_; }

  // Calls task(i, worker) once for each i in [0, count), in any order; worker in [0, threads()) names the scratch memory
  // that nobody else uses meanwhile. Returns when all are done. Tasks must not throw, nor call run() themselves.
  template <class Task>
  void run(std::int64_t count, Task&& task) {
    if (threads_ == 1 || count <= 1) {
      for (std::int64_t i = 0; i < count; ++i) task(i, 0);
      return;
    }
    using Callable = std::remove_reference_t<Task>;
    const std::lock_guard<std::mutex> one_at_a_time(mutex_);
    call_ = [](void* context, std::int64_t i, std::int32_t worker) { (*static_cast<Callable*>(context))(i, worker); };
    context_ = const_cast<void*>(static_cast<const void*>(&task));
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    busy_.store(threads_ - 1, std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    work(0);
    for (std::int32_t left = await_change(busy_, 0, true); left != 0; left = await_change(busy_, 0, true)) {
    }
  }

 private:
  // Watches for a little while before going to sleep: passes come in quick succession. Returns the value seen; with
  // `until_equal` that is `value` or an intermediate one, else one that differs from `value`.
  template <class T>
  static T await_change(const std::atomic<T>& watched, T value, bool until_equal) {
    for (int spin = 0; spin < 4000; ++spin) {
      const T seen = watched.load(std::memory_order_acquire);
      if ((seen == value) == until_equal) return seen;
#if defined(__x86_64__) || defined(__i386__)
      __builtin_ia32_pause();
#endif
    }
    const T seen = watched.load(std::memory_order_acquire);
    if ((seen == value) == until_equal) return seen;
    watched.wait(seen, std::memory_order_acquire);
    return watched.load(std::memory_order_acquire);
  }

  void work(std::int32_t worker) {
    for (std::int64_t i = next_.fetch_add(1, std::memory_order_relaxed); i < count_;
         i = next_.fetch_add(1, std::memory_order_relaxed)) {
      call_(context_, i, worker);
    }
  }

  void serve(std::int32_t worker) {
    std::uint32_t seen = 0;
    while (true) {
      std::uint32_t now = seen;
      while (now == seen) now = await_change(generation_, seen, false);
      seen = now;
      if (stop_.load(std::memory_order_relaxed)) return;
      work(worker);
      if (busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) busy_.notify_one();
    }
  }

  const std::int32_t threads_;
  std::mutex mutex_;
  std::vector<std::thread> crew_;
  // Written before generation_ is raised, read after: one job at a time.
  void (*call_)(void*, std::int64_t, std::int32_t) = nullptr;
  void* context_ = nullptr;
  std::int64_t count_ = 0;
  std::atomic<std::int64_t> next_{0};
  std::atomic<std::int32_t> busy_{0};
  std::atomic<std::uint32_t> generation_{0};
  std::atomic<bool> stop_{false};
};

// The pool as kvblend's back ends take it: a handle that satisfies kvblend::Executor.
struct PoolExecutor {
  ThreadPool* pool = nullptr;

  explicit PoolExecutor(ThreadPool& threads) : pool(&threads) {}

  template <class Body>
  void parallel_for(std::int64_t count, const Body& body) const {
    pool->run(count, [&body](std::int64_t i, std::int32_t) { body(i); });
  }
};

}  // namespace eigen_engine
