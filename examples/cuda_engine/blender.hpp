// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Blender: cuda::Fusor and its memory, for blends of one prompt at one ratio.
#pragma once

#include <cuda_engine/engine.hpp>
#include <kvblend/cuda/fusor.hpp>
#include <kvblend/fuse/blend.hpp>
#include <kvblend/select/budgets.hpp>
#include <kvblend/select/scores.hpp>
#include <kvblend/select/selector.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace cuda_engine {

using BenchSelector = kvblend::DeviationSelector<kvblend::KeyValueDeviation, kvblend::RatioBudget>;

template <Device D, class Selector = BenchSelector>
class Blender {
 public:
  explicit Blender(D& device, Selector selector) : fusor_(selector, device.execution()) {}

  Status open(const Engine<D>& engine, const Prompt& prompt) {
    const ModelConfig& c = engine.config();
    const kvblend::cuda::WorkspaceBytes bytes =
        fusor_.workspace_bytes(prompt, kvblend::BlendShape{c.layers, c.head_dim}, c.kv_heads);
    KVBLEND_RETURN_IF_ERROR(host_.allocate(static_cast<std::int64_t>(bytes.host), "workspace.host"));
    return device_.allocate(static_cast<std::int64_t>(bytes.device), "workspace.device");
  }

  // Device memory: what a probe pass of the last blend paid to each row, until the next one begins. A selector that
  // weighs attention by values takes each layer's away as it goes on.
  [[nodiscard]] std::span<const float> attention_mass() const { return fusor_.attention_mass(); }

  // The device must have finished with the blend before.
  template <class Source>
  Status run(Engine<D>& engine, Source& source, const Prompt& prompt, std::span<const Row> outputs) {
    const kvblend::cuda::Workspace memory{{host_.data(), static_cast<std::size_t>(host_.size())},
                                          {device_.data(), static_cast<std::size_t>(device_.size())}};
    return kvblend::blend(engine, source, fusor_, prompt, outputs, memory);
  }

 private:
  kvblend::cuda::Fusor<Selector, typename D::Execution> fusor_;
  Array<D, std::byte, Where::host> host_;
  Array<D, std::byte> device_;
};

}  // namespace cuda_engine
