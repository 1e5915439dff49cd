// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Where attention goes, asked of an engine: a pass whose attention an AttentionReader reads.
#include <llama_cpp/engine.hpp>

#include "llama.h"

namespace llama_cpp {

using namespace kvblend;

// The rows that the fast kernel lacks come behind those that were asked for, which do not see them.
Status Engine::probe(std::span<const TokenId> tokens) {
  KVBLEND_RETURN_IF_ERROR(can_probe());
  if (!in_order_) return Status::error(StatusCode::unsupported, "rows were dropped before").at("probe");
  const auto count = static_cast<std::int32_t>(tokens.size());
  const std::int32_t missing = missing_rows(tokens.size() % static_cast<std::size_t>(options_.batch));
  const std::int64_t room = std::int64_t{options_.context} + options_.batch - rows_;
  if (std::int64_t{count} + missing > room) {
    return Status::error(StatusCode::insufficient_space, "%d tokens behind %d rows, there is room for %lld",
                         count + missing, rows_, static_cast<long long>(room))
        .at("probe");
  }
  batch_.assign(tokens.begin(), tokens.end());
  batch_.resize(tokens.size() + static_cast<std::size_t>(missing), 0);
  cells_.clear();
  for (std::int32_t i = 0; i < count + missing; ++i) cells_.push_back(rows_ + i);
  reader_.begin(model_.layers(), rows_, cells_, 0, count);
  hook_.idle();
  hook_.report(reader_);
  const Status status = decode(0, rows_, batch_, {});
  const Status hooked = hook_.finish();
  llama_memory_seq_rm(llama_get_memory(context_.get()), 0, rows_, -1);
  KVBLEND_RETURN_IF_ERROR(status);
  KVBLEND_RETURN_IF_ERROR(hooked);
  return reader_.finish();
}

// Here they come behind the sequence, in the cells that the pass has for scratch.
Status Engine::probe(std::span<const Row> rows, std::int32_t first, std::span<const TokenId> tokens) {
  KVBLEND_RETURN_IF_ERROR(can_probe());
  if (!in_order_) return Status::error(StatusCode::unsupported, "rows were dropped before").at("probe");
  if (rows.empty() || static_cast<std::int32_t>(tokens.size()) != rows_ || rows.front().value < 0 ||
      rows.back().value >= rows_ || first < 0 || static_cast<std::size_t>(first) > rows.size()) {
    return Status::error(StatusCode::out_of_range, "%zu tokens and %zu rows from the %d-th on, the sequence has %d",
                         tokens.size(), rows.size(), first, rows_)
        .at("rows");
  }
  cells_.clear();
  for (const Row row : rows) cells_.push_back(row.value);
  const std::int32_t missing = missing_rows(rows.size());
  for (std::int32_t i = 0; i < missing; ++i) cells_.push_back(rows_ + i);
  wanted_.assign(cells_.size(), 0);
  reader_.begin(model_.layers(), rows_, cells_, first, static_cast<std::int32_t>(rows.size()));
  KVBLEND_RETURN_IF_ERROR(compute_in_place({0, model_.layers()}, tokens, &reader_));
  return reader_.finish();
}

}  // namespace llama_cpp
