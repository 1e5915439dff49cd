// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Host: an Engine as kvblend sees it, a ScoringPassHost, ProbingPassHost and SettlingPassHost. Reused KV is placed into
// a state blob, which the engine loads in one call.
#pragma once

#include <llama_cpp/engine.hpp>
#include <llama_cpp/state_blob.hpp>

#include <kvblend/codec/ggml_blocks.hpp>
#include <kvblend/codec/hadamard.hpp>
#include <kvblend/fuse/pass_host.hpp>
#include <kvblend/memory/plane.hpp>
#include <kvblend/prompt/prompt.hpp>
#include <kvblend/store/chunk.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

namespace llama_cpp {

namespace detail {

// A layer's keys or values in a blob of `cells` cells.
template <kvblend::Codec C, class Byte>
kvblend::Plane<C, kvblend::ContiguousLayout, Byte> blob_plane(Byte* base, const Model& model, std::int32_t cells,
                                                              bool transposed) {
  const std::int32_t heads = model.kv_heads();
  const std::int32_t head_dim = model.head_dim();
  const std::int64_t head_bytes = std::int64_t{head_dim} / C::block_values * C::block_bytes;
  if (!transposed) return {base, kvblend::ContiguousLayout(cells, heads, head_dim, heads * head_bytes, head_bytes)};
  const std::int64_t column = std::int64_t{cells} * C::block_bytes;
  const kvblend::HeadShape shape(heads, head_dim, head_dim * column, 1, column);
  return {base, kvblend::ContiguousLayout(cells, shape, C::block_bytes)};
}

// Rows of a blob that nobody places are computed before any row should look at them. But attention multiplies what its
// mask hides by 0, so that they must not be NaN.
template <class P>
void zero_rows(const P& plane, std::int64_t first, std::int64_t count) {
  if (plane.layout.tiles() == 1) {
    std::memset(plane.at(first, 0), 0, static_cast<std::size_t>(count * plane.layout.row_stride));
    return;
  }
  for (std::int32_t head = 0; head < plane.layout.heads(); ++head) {
    for (std::int32_t tile = 0; tile < plane.layout.tiles(); ++tile) {
      std::memset(plane.base + plane.layout.offset(first, head, tile), 0,
                  static_cast<std::size_t>(count * plane.layout.row_stride));
    }
  }
}

}  // namespace detail

// Stored: the cache's codec. Fresh: that of scored rows, floats, turned by Hadamard's matrix if the cache's are.
template <kvblend::Codec Stored, kvblend::Codec Fresh = kvblend::F32Codec>
class Host {
 public:
  using stored_codec = Stored;

  // `staging` holds the KV of one prompt; it is kept between blends, by whoever owns it.
  Host(Engine& engine, BlobWriter& staging) : engine_(engine), staging_(staging) {}

  [[nodiscard]] std::int32_t layers() { return engine_.model().layers(); }
  [[nodiscard]] const kvblend::RopeSpec& rope(std::int32_t layer) { return engine_.model().rope(layer); }

  // Errors: more rows than the context has, a gap between positions (which llama.cpp's batches do not know), more
  // resident rows than there are, or resident rows that a sliding window has passed.
  kvblend::Status begin(const kvblend::Prompt& prompt);
  kvblend::Status score(std::int32_t layer, std::span<const kvblend::Row> rows);
  [[nodiscard]] auto fresh_keys(std::int32_t layer) { return fresh(engine_.fresh_keys(layer), scored_); }
  [[nodiscard]] auto fresh_values(std::int32_t layer) { return fresh(engine_.fresh_values(layer), scored_); }
  [[nodiscard]] kvblend::ContiguousPlane<Stored> keys(std::int32_t layer) {
    return detail::blob_plane<Stored>(rows_of(layer).keys, engine_.model(), staging_.cells(), false);
  }
  [[nodiscard]] kvblend::ContiguousPlane<Stored> values(std::int32_t layer) {
    return detail::blob_plane<Stored>(rows_of(layer).values, engine_.model(), staging_.cells(),
                                      engine_.blob_format().transposed_values);
  }
  kvblend::Status load() { return engine_.load(staging_.bytes(), staging_.cells()); }
  // `staging` goes on holding what was placed.
  kvblend::Status probe(std::span<const kvblend::Row> rows, std::int32_t first) {
    return engine_.probe(rows, first, tokens_);
  }
  [[nodiscard]] std::span<const float> attention_mass(std::int32_t layer) const {
    return engine_.attention_mass(layer);
  }
  [[nodiscard]] bool runs_ranges() const { return engine_.runs_ranges(); }
  kvblend::Status compute(kvblend::LayerRange range, std::span<const kvblend::Row> rows,
                          std::span<const kvblend::Row> outputs) {
    return engine_.compute(range, rows, tokens_, outputs, resident_);
  }
  // Errors: the engine's can_settle().
  template <class Settle>
  kvblend::Status compute(kvblend::LayerRange range, std::span<const kvblend::Row> rows,
                          std::span<const kvblend::Row> outputs, const Settle& settle);
  kvblend::Status commit(std::int32_t) { return {}; }
  void abort() { static_cast<void>(engine_.truncate((std::min)(resident_, engine_.rows()))); }

 private:
  [[nodiscard]] BlobRows rows_of(std::int32_t layer) const {
    const Engine::Place place = engine_.place_of(layer);
    return staging_.rows(place.body, place.layer);
  }
  [[nodiscard]] kvblend::Plane<Fresh, kvblend::ContiguousLayout, const std::byte> fresh(std::span<const float> floats,
                                                                                        std::int32_t rows) {
    return detail::blob_plane<Fresh>(reinterpret_cast<const std::byte*>(floats.data()), engine_.model(), rows, false);
  }
  kvblend::Status keep_resident();

  Engine& engine_;
  BlobWriter& staging_;
  std::vector<kvblend::TokenId> tokens_;
  std::vector<kvblend::Row> ran_;  // of the part that settles
  std::int32_t resident_ = 0;
  std::int32_t scored_ = 0;  // rows of the fresh planes
};

// The KV of sequence 0 as a chunk, from the identity's first position on. The identity is the caller's: of this model,
// and of the tokens that were prefilled, the context's and then the chunk's. Errors: a window that has passed some of
// the chunk's tokens, whose KV llama.cpp gives out no more.
template <kvblend::Codec Stored>
kvblend::Result<kvblend::Chunk> export_chunk(const Engine& engine, kvblend::ChunkIdentity identity);

// ---------------------------------------------------------------------------------------------------------------------

// Calls read(layer, first, keys, values), which returns a Status, for each layer, with planes over the rows from
// `first` on: those that no window has passed.
template <kvblend::Codec Stored, class Read>
kvblend::Status read_held(const Engine& engine, const Read& read) {
  using namespace kvblend;
  std::vector<std::byte> blob;
  KVBLEND_RETURN_IF_ERROR(engine.save(blob));
  const Result<BlobReader> reader = BlobReader::open(engine.blob_format(), blob);
  KVBLEND_RETURN_IF_ERROR(reader.status);
  for (std::int32_t layer = 0; layer < engine.model().layers(); ++layer) {
    const Engine::Place place = engine.place_of(layer);
    const std::int32_t cells = reader.value.cells(place.body);
    const BlobReader::Rows rows = reader.value.rows(place.body, place.layer);
    const auto keys = detail::blob_plane<Stored>(rows.keys, engine.model(), cells, false);
    const auto values =
        detail::blob_plane<Stored>(rows.values, engine.model(), cells, engine.blob_format().transposed_values);
    KVBLEND_RETURN_IF_ERROR(read(layer, reader.value.first_position(place.body).value, keys, values));
  }
  return {};
}

// Calls copy(layer, keys, values, at), which returns a Status, for each layer, with planes that hold the rows
// [first, first + count) of the engine from their row `at` on.
template <kvblend::Codec Stored, class Copy>
kvblend::Status read_layers(const Engine& engine, std::int32_t first, std::int32_t count, const Copy& copy) {
  using namespace kvblend;
  return read_held<Stored>(
      engine, [&](std::int32_t layer, std::int32_t held_from, const auto& keys, const auto& values) -> Status {
        if (held_from > first || engine.rows() < first + count) {
          return Status::error(StatusCode::unsupported, "its window of %d has passed the first of %d tokens",
                               engine.model().window(), count)
              .at("layer %d", layer);
        }
        return copy(layer, keys, values, first - held_from);
      });
}

template <kvblend::Codec Stored>
kvblend::Result<kvblend::Chunk> export_chunk(const Engine& engine, kvblend::ChunkIdentity identity) {
  using namespace kvblend;
  Result<Chunk> chunk = Chunk::allocate(std::move(identity));
  KVBLEND_RETURN_IF_ERROR(chunk.status);
  const std::int32_t first = chunk.value.identity().first_position.value;
  const std::int32_t count = engine.rows() - first;
  KVBLEND_RETURN_IF_ERROR(read_layers<Stored>(
      engine, first, count, [&](std::int32_t layer, const auto& keys, const auto& values, std::int32_t at) {
        return import_rows<Stored>(chunk.value, layer, keys, values, at, 0, count);
      }));
  return chunk;
}

template <kvblend::Codec Stored, kvblend::Codec Fresh>
kvblend::Status Host<Stored, Fresh>::begin(const kvblend::Prompt& prompt) {
  using namespace kvblend;
  if (prompt.rows() > engine_.options().context) {
    return Status::error(StatusCode::insufficient_space, "%d, the context has %d", prompt.rows(),
                         engine_.options().context)
        .at("rows");
  }
  if (prompt.resident_rows() > engine_.rows()) {
    return Status::error(StatusCode::out_of_range, "%d, the cache holds %d", prompt.resident_rows(), engine_.rows())
        .at("resident rows");
  }
  tokens_.clear();
  for (const Segment& segment : prompt.segments()) {
    if (segment.size() > 0 && segment.first_position.value != segment.first_row.value) {
      return Status::error(StatusCode::unsupported, "position %d is not row %d: llama.cpp's batches know no gap",
                           segment.first_position.value, segment.first_row.value)
          .at("segment %td", &segment - prompt.segments().data());
    }
    tokens_.insert(tokens_.end(), segment.tokens.begin(), segment.tokens.end());
  }
  resident_ = prompt.resident_rows();
  KVBLEND_RETURN_IF_ERROR(engine_.truncate(resident_));
  if (prompt.empty()) return {};
  // Memory for the longest prompt, once: growing would lose what the system has mapped.
  if (staging_.cells() == 0) {
    KVBLEND_RETURN_IF_ERROR(staging_.lay_out(engine_.blob_format(), engine_.options().context, Position(0)));
  }
  KVBLEND_RETURN_IF_ERROR(staging_.lay_out(engine_.blob_format(), prompt.rows(), Position(0)));
  for (const Segment& segment : prompt.segments()) {
    if (segment.kind != SegmentKind::fresh || segment.size() == 0) continue;
    for (std::int32_t layer = 0; layer < layers(); ++layer) {
      detail::zero_rows(keys(layer), segment.first_row.value, segment.size());
      detail::zero_rows(values(layer), segment.first_row.value, segment.size());
    }
  }
  return keep_resident();
}

template <kvblend::Codec Stored, kvblend::Codec Fresh>
kvblend::Status Host<Stored, Fresh>::keep_resident() {
  if (resident_ == 0) return {};
  return read_layers<Stored>(
      engine_, 0, resident_,
      [this](std::int32_t layer, const auto& keys, const auto& values, std::int32_t at) -> kvblend::Status {
        kvblend::copy_rows(keys, at, this->keys(layer), 0, resident_);
        kvblend::copy_rows(values, at, this->values(layer), 0, resident_);
        return {};
      });
}

// Exact rows are run as well: the engine does not hold them yet.
template <kvblend::Codec Stored, kvblend::Codec Fresh>
kvblend::Status Host<Stored, Fresh>::score(std::int32_t layer, std::span<const kvblend::Row> rows) {
  KVBLEND_RETURN_IF_ERROR(engine_.score(layer, std::span(tokens_).subspan(static_cast<std::size_t>(resident_))));
  const std::size_t width =
      static_cast<std::size_t>(engine_.model().kv_heads()) * static_cast<std::size_t>(engine_.model().head_dim());
  for (std::int32_t l = 0; l <= layer; ++l) {
    for (const std::span<float> plane : {engine_.fresh_keys(l), engine_.fresh_values(l)}) {
      for (std::size_t i = 0; i < rows.size(); ++i) {
        const auto from = static_cast<std::size_t>(rows[i].value - resident_);
        if (from == i) continue;
        std::copy_n(plane.begin() + static_cast<std::ptrdiff_t>(from * width), width,
                    plane.begin() + static_cast<std::ptrdiff_t>(i * width));
      }
    }
  }
  scored_ = static_cast<std::int32_t>(rows.size());
  return {};
}

template <kvblend::Codec Stored, kvblend::Codec Fresh>
template <class Settle>
kvblend::Status Host<Stored, Fresh>::compute(kvblend::LayerRange range, std::span<const kvblend::Row> rows,
                                             std::span<const kvblend::Row> outputs, const Settle& settle) {
  using namespace kvblend;
  const auto decide = [&](std::int32_t layer, std::int32_t first, std::int32_t end, std::span<const std::int32_t> cells,
                          std::span<const float> keys, std::span<const float> values) -> Result<BlobReader::Rows> {
    ran_.clear();
    for (const std::int32_t cell : cells) ran_.push_back(Row(cell));
    const auto count = static_cast<std::int32_t>(cells.size());
    KVBLEND_RETURN_IF_ERROR(settle(layer, Row(first), Row(end), ran_, fresh(keys, count), fresh(values, count)));
    return BlobReader::Rows{rows_of(layer).keys, rows_of(layer).values};
  };
  return engine_.compute(range, rows, tokens_, outputs, resident_, decide);
}

// Calls body(host) with the host of the engine's cache type.
template <class Body>
kvblend::Status with_host(Engine& engine, BlobWriter& staging, Body&& body) {
  using namespace kvblend;
  switch (engine.options().cache_type) {
    case DType::f32: return body(Host<F32Codec>(engine, staging));
    case DType::f16: return body(Host<F16Codec>(engine, staging));
    case DType::bf16: return body(Host<Bf16Codec>(engine, staging));
    case DType::q8_0: break;
    default: return Status::error(StatusCode::unsupported, "has no host").at("cache_type");
  }
  switch (engine.key_hadamard()) {
    case 0: return body(Host<Q8_0Codec>(engine, staging));
    case 64: return body(Host<HadamardCodec<Q8_0Codec, 64>, HadamardCodec<F32Codec, 64>>(engine, staging));
    case 128: return body(Host<HadamardCodec<Q8_0Codec, 128>, HadamardCodec<F32Codec, 128>>(engine, staging));
    case 256: return body(Host<HadamardCodec<Q8_0Codec, 256>, HadamardCodec<F32Codec, 256>>(engine, staging));
    default:
      return Status::error(StatusCode::unsupported, "is %d: q8_0 keys are turned over 64, 128 or 256 values",
                           engine.model().head_dim())
          .at("head_dim");
  }
}

}  // namespace llama_cpp
