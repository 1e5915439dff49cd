// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Chunk files: a chunk as a plain safetensors file that other programs can open (its contents: store/chunk_header.hpp).
// A file is replaced in one step or not at all, and read layer by layer with every byte verified.
#pragma once

#include <kvblend/store/chunk_header.hpp>
#include <kvblend/store/posix_file.hpp>
#include <kvblend/store/reader.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

static_assert(std::endian::native == std::endian::little, "chunk files are little-endian and are not converted");

// Writes `chunk` to `path`, replacing what is there; on an error that stays as it was. Errors: an empty Chunk that was
// never allocated, texts that are not UTF-8, or what the system reports.
Status write_chunk_file(const std::string& path, const Chunk& chunk);

// An open chunk file: a ChunkReader. Everything but keys and values was read and verified when it opened; a layer is
// verified when it is read. The file stays readable if it is replaced or removed meanwhile.
class FileReader {
 public:
  FileReader() = default;

  // Errors name the tensor, key or field, and the file: StatusCode::not_found if there is none; corrupt if it is short,
  // changed, or no chunk file; mismatch if it holds another chunk than the one wanted.
  static Result<FileReader> open(const std::string& path);
  static Result<FileReader> open(const std::string& path, const ChunkIdentity& wanted);

  [[nodiscard]] const ChunkIdentity& identity() const { return identity_; }
  [[nodiscard]] ChunkInfo info() const {
    return {identity_.tokens, identity_.first_position, identity_.context, scores_};
  }
  Status read_layer(std::int32_t layer, std::span<std::byte> destination);

 private:
  struct Place {
    std::int64_t offset;  // of the tensor in the file
    std::uint64_t checksum;
  };

  Status read_header(SafetensorsHeader& header) const;
  Status read_all(const SafetensorsHeader& header);
  // Reads and verifies one tensor.
  Status read_tensor(const Place& place, std::span<std::byte> destination) const;
  template <class T>
  Status read_list(const SafetensorsHeader& header, const char* name, std::vector<T>& out) const;
  [[nodiscard]] Status in_file(const Status& status) const {
    return Status::error(status.code(), "%s, in %s", status.message(), detail::tail_of(path_)).at("%s", status.where());
  }

  PosixFile file_;
  std::string path_;
  ChunkIdentity identity_;
  std::vector<float> scores_;
  std::vector<Place> places_;  // keys and values of layer 0, of layer 1, …
};

// ---------------------------------------------------------------------------------------------------------------------

inline Status write_chunk_file(const std::string& path, const Chunk& chunk) {
  KVBLEND_RETURN_IF_ERROR(validate(chunk.identity()));
  Result<SafetensorsHeader> header = make_chunk_header(chunk.identity());
  if (!header.ok()) return header.status;

  // The tensors' bytes in the order of the header.
  std::vector<std::span<const std::byte>> parts;
  const auto plane = static_cast<std::size_t>(plane_bytes(chunk.identity()));
  for (std::int32_t layer = 0; layer < chunk.layers(); ++layer) {
    parts.push_back(chunk.layer(layer).first(plane));
    parts.push_back(chunk.layer(layer).subspan(plane));
  }
  parts.push_back(std::as_bytes(std::span(chunk.identity().tokens)));
  parts.push_back(std::as_bytes(std::span(chunk.identity().context)));
  if (!chunk.identity().recipe.empty()) parts.push_back(std::as_bytes(chunk.scores()));
  for (std::size_t i = 0; i < parts.size(); ++i) {
    header.value.metadata.emplace_back("xxh3." + header.value.tensors[i].name, to_hex(checksum_of(parts[i])));
  }

  Result<ReplacementFile> file = ReplacementFile::create(path);
  if (!file.ok()) return file.status;
  const std::string text = make_safetensors_header(header.value);
  KVBLEND_RETURN_IF_ERROR(file.value.write(std::as_bytes(std::span(text.data(), text.size()))));
  for (const std::span<const std::byte> part : parts) KVBLEND_RETURN_IF_ERROR(file.value.write(part));
  return file.value.commit();
}

inline Status FileReader::read_header(SafetensorsHeader& header) const {
  const Result<std::int64_t> size = file_.size();
  if (!size.ok()) return size.status;
  std::uint64_t header_size = 0;
  KVBLEND_RETURN_IF_ERROR(file_.read_at(0, std::as_writable_bytes(std::span(&header_size, 1))));
  KVBLEND_RETURN_IF_ERROR(check_safetensors_length(header_size, size.value));
  std::string text(static_cast<std::size_t>(header_size), ' ');
  KVBLEND_RETURN_IF_ERROR(
      file_.read_at(kSafetensorsPrefix, std::as_writable_bytes(std::span(text.data(), text.size()))));
  Result<SafetensorsHeader> parsed = parse_safetensors_header(text, size.value);
  header = std::move(parsed.value);
  return parsed.status;
}

inline Status FileReader::read_tensor(const Place& place, std::span<std::byte> destination) const {
  // In pieces that stay in the processor's cache from the read to the checksum.
  constexpr std::size_t kPiece = std::size_t{256} << 10;
  Checksum checksum;
  for (std::size_t done = 0; done < destination.size(); done += kPiece) {
    const std::span<std::byte> piece = destination.subspan(done, (std::min)(kPiece, destination.size() - done));
    KVBLEND_RETURN_IF_ERROR(file_.read_at(place.offset + static_cast<std::int64_t>(done), piece));
    checksum.update(piece);
  }
  if (checksum.value() != place.checksum) return Status::error(StatusCode::corrupt, "checksum differs");
  return {};
}

template <class T>
Status FileReader::read_list(const SafetensorsHeader& header, const char* name, std::vector<T>& out) const {
  const SafetensorsTensor* tensor = header.tensor(name);
  const Result<std::uint64_t> checksum = stated_checksum(header, name);
  if (tensor == nullptr || !checksum.ok()) return detail::bad_tensor(name, "is missing");
  out.resize(static_cast<std::size_t>(tensor->size()) / sizeof(T));
  const Status status = read_tensor({tensor->begin, checksum.value}, std::as_writable_bytes(std::span(out)));
  return status.ok() ? Status() : Status::error(status.code(), "%s", status.message()).at("%s", name);
}

inline Status FileReader::read_all(const SafetensorsHeader& header) {
  Result<ChunkIdentity> identity = parse_chunk_identity(header);
  if (!identity.ok()) return identity.status;
  identity_ = std::move(identity.value);
  KVBLEND_RETURN_IF_ERROR(check_chunk_tensors(header, identity_));
  KVBLEND_RETURN_IF_ERROR(read_list(header, "tokens", identity_.tokens));
  KVBLEND_RETURN_IF_ERROR(read_list(header, "context", identity_.context));
  if (!identity_.recipe.empty()) KVBLEND_RETURN_IF_ERROR(read_list(header, "scores", scores_));
  if (const Status status = validate(identity_); !status.ok()) {
    return Status::error(StatusCode::corrupt, "%s", status.message()).at("%s", status.where());
  }
  const std::string* digest = header.text("digest");
  if (digest == nullptr || *digest != to_hex(digest_of(identity_))) {
    return detail::bad_metadata("digest", "does not agree with the identity beside it");
  }
  for (std::int32_t layer = 0; layer < identity_.model.layers; ++layer) {
    for (const std::string& name : {key_tensor(layer), value_tensor(layer)}) {
      const SafetensorsTensor* tensor = header.tensor(name);
      const Result<std::uint64_t> checksum = stated_checksum(header, name);
      if (tensor == nullptr || !checksum.ok()) return detail::bad_tensor(name, "is missing");
      places_.push_back({tensor->begin, checksum.value});
    }
  }
  return {};
}

inline Result<FileReader> FileReader::open(const std::string& path) {
  Result<PosixFile> file = PosixFile::open_for_reading(path);
  if (!file.ok()) return file.status;
  FileReader reader;
  reader.file_ = std::move(file.value);
  reader.path_ = path;
  SafetensorsHeader header;
  if (const Status status = reader.read_header(header); !status.ok()) return reader.in_file(status);
  if (const Status status = reader.read_all(header); !status.ok()) return reader.in_file(status);
  return Result<FileReader>(std::move(reader));  // spelled out for nvcc, which would copy
}

inline Result<FileReader> FileReader::open(const std::string& path, const ChunkIdentity& wanted) {
  Result<FileReader> reader = open(path);
  if (!reader.ok()) return reader;
  if (const Status status = check_same(wanted, reader.value.identity_); !status.ok()) {
    return reader.value.in_file(status);
  }
  return reader;
}

inline Status FileReader::read_layer(std::int32_t layer, std::span<std::byte> destination) {
  KVBLEND_RETURN_IF_ERROR(detail::check_layer_read(identity_, layer, destination.size()));
  const std::size_t plane = destination.size() / 2;
  for (std::size_t which = 0; which < 2; ++which) {
    const Place& place = places_[2 * static_cast<std::size_t>(layer) + which];
    const Status status = read_tensor(place, destination.subspan(which * plane, plane));
    if (!status.ok()) {
      return Status::error(status.code(), "%s, in %s", status.message(), detail::tail_of(path_))
          .at("layers.%d.%s", layer, which == 0 ? "key" : "value");
    }
  }
  return {};
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
