// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <rag/host.hpp>

#include <algorithm>
#include <cstddef>
#include <vector>

namespace rag {

using namespace kvblend;

Status Host::probe(std::span<const TokenId>, ProbeSums&) {
  return Status::error(StatusCode::unsupported, "%s does not report attention", name()).at("probe");
}

Status Host::store_scores(std::vector<std::vector<TokenId>>) {
  return Status::error(StatusCode::unsupported, "%s does not report attention", name()).at("stored scores");
}

ChunkIdentity Host::chunk_identity(std::span<const TokenId> tokens, std::span<const TokenId> context) const {
  ChunkIdentity out;
  out.model = identity();
  for (std::int32_t layer = 0; layer < out.model.layers; ++layer) out.add_layer_rope(rope(layer));
  out.tokens.assign(tokens.begin(), tokens.end());
  out.context.assign(context.begin(), context.end());
  out.first_position = Position(static_cast<std::int32_t>(context.size()));
  out.recipe = recipe();
  return out;
}

// The fingerprint is the file's XXH3, so that a store tells models of one name apart.
Result<ModelIdentity> identity_of_file(const std::string& path) {
  const Result<PosixFile> file = PosixFile::open_for_reading(path);
  KVBLEND_RETURN_IF_ERROR(file.status);
  const Result<std::int64_t> size = file.value.size();
  KVBLEND_RETURN_IF_ERROR(size.status);
  Xxh3Hash hash;
  std::vector<std::byte> piece(std::size_t{1} << 20);
  for (std::int64_t done = 0; done < size.value; done += static_cast<std::int64_t>(piece.size())) {
    piece.resize(static_cast<std::size_t>(std::min(size.value - done, static_cast<std::int64_t>(piece.size()))));
    KVBLEND_RETURN_IF_ERROR(file.value.read_at(done, piece));
    hash.update(piece);
  }
  ModelIdentity out;
  out.name = path.substr(path.find_last_of('/') + 1);
  out.fingerprint = to_hex(hash.finish());
  return out;
}

}  // namespace rag
