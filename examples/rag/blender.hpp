// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Blender: one call of kvblend::blend with what it takes, which is the same on every engine: a loader over the stored
// chunks, a fusor, and their memory.
#pragma once

#include <rag/host.hpp>

#include <eigen_engine/thread_pool.hpp>
#include <kvblend/eigen.hpp>
#include <kvblend/kvblend.hpp>
#include <kvblend/store.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace rag {

using Backend = kvblend::EigenBackend<eigen_engine::PoolExecutor>;

class Blender {
 public:
  // The pool must outlive it.
  explicit Blender(eigen_engine::ThreadPool& pool) : pool_(pool) {}

  // Stored: the chunks' codec. Engine: a LayerwiseHost or a PassHost; Report: what its blend() fills. Drift: NoDrift or
  // CommonDrift.
  template <kvblend::Codec Stored, class Drift = kvblend::NoDrift, class Engine, class Selector, class Report>
  kvblend::Status run(Engine& engine, const Selector& selector, const kvblend::ModelIdentity& identity,
                      const kvblend::Prompt& prompt, std::span<const kvblend::ChunkSource> sources,
                      std::span<const kvblend::Row> outputs, Report& report) {
    using namespace kvblend;
    LayerwiseLoader<Stored> loader;
    const std::int64_t staging = loader.staging_bytes(prompt, sources, kStagingLayers);
    if (static_cast<std::int64_t>(staging_.size()) < staging) staging_.resize(static_cast<std::size_t>(staging));
    KVBLEND_RETURN_IF_ERROR(loader.open(identity, prompt, sources, kStagingLayers, staging_));
    KVBLEND_RETURN_IF_ERROR(loader.start());

    Drift drift;
    if constexpr (Drift::moves) {
      drift_.resize(Drift::floats(prompt, std::int64_t{identity.kv_heads} * identity.head_dim));
      drift.memory = drift_;
    }
    LayerwiseFusor<Selector, Backend, ExactAngles, Drift> fusor(selector, Backend(eigen_engine::PoolExecutor(pool_)),
                                                                drift);
    const std::size_t bytes = fusor.workspace_bytes(prompt, identity.head_dim);
    if (workspace_.size() < bytes) workspace_.resize(bytes);
    return blend(engine, loader, fusor, prompt, outputs, workspace_, &report);
  }

 private:
  eigen_engine::ThreadPool& pool_;
  std::vector<std::byte> staging_;  // of the loader
  std::vector<std::byte> workspace_;
  std::vector<float> drift_;
};

}  // namespace rag
