// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Launcher: where a loader's loading loop runs. An engine with threads of its own passes one that uses those.
#pragma once

#include <kvblend/core/status.hpp>

#include <pthread.h>

#include <concepts>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

//   launch(task, argument)   has task(argument) called once on another thread; an error if it cannot
//   join()                   returns after the task did; at once if none was launched
template <class L>
concept Launcher = requires(L& launcher, void (*task)(void*), void* argument) {
  { launcher.launch(task, argument) } -> std::same_as<Status>;
  { launcher.join() } -> std::same_as<void>;
};

// The default: a thread for each launch. By pthread_create, which reports a failure where std::thread would throw.
class ThreadLauncher {
 public:
  ThreadLauncher() = default;
  ThreadLauncher(const ThreadLauncher&) = delete;
  ThreadLauncher& operator=(const ThreadLauncher&) = delete;
  ~ThreadLauncher() { join(); }

  Status launch(void (*task)(void*), void* argument) {
    join();
    task_ = task;
    argument_ = argument;
    const int error = ::pthread_create(&thread_, nullptr, &enter, this);
    if (error != 0) return Status::error(StatusCode::io_error, "cannot start a thread, error %d", error).at("launcher");
    launched_ = true;
    return {};
  }
  void join() {
    if (launched_) ::pthread_join(thread_, nullptr);
    launched_ = false;
  }

 private:
  static void* enter(void* self) {
    const auto* launcher = static_cast<const ThreadLauncher*>(self);
    launcher->task_(launcher->argument_);
    return nullptr;
  }

  pthread_t thread_{};
  void (*task_)(void*) = nullptr;
  void* argument_ = nullptr;
  bool launched_ = false;
};

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
