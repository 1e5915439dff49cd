// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// LayerTime: runs one layer of a blend for given numbers of rows, which is how the planner's cost model is calibrated.
#pragma once

#include <rag/blender.hpp>

#include <eigen_engine/engine.hpp>
#include <eigen_engine/thread_pool.hpp>
#include <kvblend/kvblend.hpp>
#include <kvblend/store.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace rag {

// A prompt of `context` reused rows is made of the chunk as often as it takes; `rows` of them, spread over it, run.
struct LayerTime {
  eigen_engine::Engine& engine;
  eigen_engine::ThreadPool& pool;
  kvblend::ChunkHandle chunk;

  kvblend::Result<double> operator()(std::int32_t rows, std::int32_t context) const {
    using namespace kvblend;
    const ChunkInfo info = chunk->info();
    std::vector<Segment> segments;
    for (std::int32_t left = context; left > 0; left -= chunk->tokens()) {
      // Not from position 0 on, where the chunk would be an exact prefix.
      segments.push_back(
          cached_segment(info, 0, (std::min)(left, chunk->tokens()), segments.empty() ? Position(1) : kNextPosition));
    }
    const Result<Prompt> prompt = Prompt::make(segments, Position(engine.config().context - 1));
    KVBLEND_RETURN_IF_ERROR(prompt.status);
    LayerwiseLoader<F32Codec> source;
    const std::vector<ChunkSource> sources(segments.size(), ChunkSource(chunk));
    KVBLEND_RETURN_IF_ERROR(source.open(chunk->identity().model, prompt.value, sources, 1, {}));

    using Selector = DeviationSelector<RandomScore, CountBudget>;
    LayerwiseFusor<Selector, Backend> fusor(Selector(RandomScore{}, CountBudget{rows - 1}),
                                            Backend(eigen_engine::PoolExecutor(pool)));
    std::vector<std::byte> workspace(fusor.workspace_bytes(prompt.value, engine.config().head_dim));
    const std::array<Row, 1> outputs = {Row(context - 1)};
    KVBLEND_RETURN_IF_ERROR(fusor.begin(prompt.value, {engine.layers(), engine.config().head_dim}, outputs, workspace));
    const std::int32_t layer = engine.layers() / 2;
    engine.clear();
    KVBLEND_RETURN_IF_ERROR(engine.begin(prompt.value));
    KVBLEND_RETURN_IF_ERROR(engine.embed(fusor.active()));

    const auto start = std::chrono::steady_clock::now();
    KVBLEND_RETURN_IF_ERROR(engine.project(layer, fusor.active()));
    KVBLEND_RETURN_IF_ERROR(fusor.place(layer, engine.rope(layer), source, engine.keys(layer), engine.values(layer)));
    KVBLEND_RETURN_IF_ERROR(
        fusor.fuse(layer, engine.fresh_keys(), engine.fresh_values(), engine.keys(layer), engine.values(layer)));
    KVBLEND_RETURN_IF_ERROR(engine.attend(layer, fusor.active(), fusor.kept()));
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    engine.abort();
    return seconds;
  }
};

}  // namespace rag
