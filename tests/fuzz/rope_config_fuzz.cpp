// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Fuzzes the reader of config.json with any text: it never throws, an error names a field, and a spec that it gives is
// one that can be shifted by.
#include "bytes.hpp"

#include <rope_config/hf_config.hpp>

#include <kvblend/rope/can_shift.hpp>
#include <kvblend/rope/spec.hpp>

#include <cstddef>
#include <cstdint>
#include <string_view>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Bytes in(data, size);
  // The options are the last bytes, so that a corpus is made of plain files.
  rope_config::HfOptions options;
  std::string_view text(reinterpret_cast<const char*>(in.rest()), in.size());
  if (const std::size_t end = text.rfind('\0'); end != std::string_view::npos) {
    fuzz::Bytes tail(in.rest() + end, in.size() - end);
    text = text.substr(0, end);
    tail.byte();
    options.length = tail.seldom() ? tail.odd64() : tail.odd32();
    options.latent_keys = static_cast<rope_config::LatentKeys>(tail.below(3));
    if (tail.flag()) options.pairing = static_cast<kvblend::RopePairing>(tail.below(2));
    if (tail.flag()) options.model_type = "llama";
  }
  const kvblend::Result<rope_config::ModelRope> model = rope_config::read_hf_config(text, options);
  if (!fuzz::is_ok(model.status)) return 0;
  fuzz::require(!model.value.layers.empty(), "a model has layers");
  for (const rope_config::LayerRope& layer : model.value.layers) {
    const kvblend::Status status = kvblend::validate(layer.spec);
    fuzz::require(status.ok(), "a spec that is read is valid:", status.where());
    fuzz::require(kvblend::can_shift(layer.spec, layer.spec).ok(), "keys can be moved by it");
  }
  return 0;
}
