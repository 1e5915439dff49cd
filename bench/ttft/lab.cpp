// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "lab.hpp"

#include <rag/closeness.hpp>
#include <rag/host.hpp>

#include <kvblend/eigen.hpp>
#include <llama_cpp/host.hpp>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

namespace lab {

using namespace kvblend;
using llama_cpp::Wanted;
using rag::divergence;
using rag::most_likely;

namespace {

constexpr std::int32_t kStagingLayers = 4;  // layers that loading may be ahead
constexpr std::int32_t kAnswerTokens = 24;
constexpr std::size_t kFastRows = 64;  // fewer query rows over a long cache take llama.cpp's slow kernel

class Clock {
 public:
  [[nodiscard]] double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// Calls body(selector) with the selector of that name.
template <class Body>
Status with_selector(const Variant& variant, Body&& body) {
  const RatioBudget budget(variant.ratio);
  if (variant.name == "reuse") return body(DeviationSelector(FirstK{}, RatioBudget(0.0)));
  if (variant.gradual) return body(DeviationSelector(KeyValueDeviation{}, GradualBudget(variant.ratio)));
  if (variant.selector == "first_k") return body(DeviationSelector(FirstK{}, budget));
  if (variant.selector == "random") return body(DeviationSelector(RandomScore{}, budget));
  if (variant.selector == "key_deviation") return body(DeviationSelector(KeyDeviation{}, budget));
  if (variant.selector == "value_deviation") return body(DeviationSelector(ValueDeviation{}, budget));
  if (variant.selector == "key_value_deviation") return body(DeviationSelector(KeyValueDeviation{}, budget));
  return Status::error(StatusCode::invalid_argument, "there is none of the name %s", variant.selector.c_str())
      .at("selector");
}

}  // namespace

std::vector<TokenId> Request::all() const {
  std::vector<TokenId> tokens = instructions;
  for (const auto& passage : passages) tokens.insert(tokens.end(), passage.begin(), passage.end());
  tokens.insert(tokens.end(), question.begin(), question.end());
  return tokens;
}

// The prompt as the library sees it, with whatever its segments point to.
struct Lab::Parts {
  std::vector<FileReader> readers;
  std::vector<ChunkInfo> infos;
  std::vector<ChunkSource> sources;
  std::vector<Segment> segments;
  Prompt prompt;
};

Result<std::unique_ptr<Lab>> Lab::open(const Settings& settings) {
  auto model = llama_cpp::Model::open(settings.model);
  KVBLEND_RETURN_IF_ERROR(model.status);
  auto tokenizer = eigen_engine::Tokenizer::load(settings.model.c_str());
  KVBLEND_RETURN_IF_ERROR(tokenizer.status);
  auto identity = rag::identity_of_file(settings.model);
  KVBLEND_RETURN_IF_ERROR(identity.status);
  std::unique_ptr<Lab> lab(new Lab(settings, std::move(model.value), std::move(tokenizer.value)));

  llama_cpp::EngineOptions options;
  options.context = 2 * settings.tokens;  // an answer, and the passage that cache_reuse drops
  options.threads = settings.threads;
  options.cache_type = settings.cache_type;
  options.flash_attention = settings.flash_attention;
  options.fill_from = 0;
  auto engine = llama_cpp::Engine::open(*lab->model_, options);
  KVBLEND_RETURN_IF_ERROR(engine.status);
  lab->engine_ = std::move(engine.value);

  lab->identity_ = std::move(identity.value);
  lab->identity_.dtype = settings.cache_type;
  lab->identity_.layers = lab->model_->layers();
  lab->identity_.kv_heads = lab->model_->kv_heads();
  lab->identity_.head_dim = lab->model_->head_dim();
  lab->identity_.fingerprint += " llama.cpp";  // another engine's KV of the same model differs
  if (lab->engine_->key_hadamard() > 0) {
    lab->identity_.fingerprint += " hadamard " + std::to_string(lab->engine_->key_hadamard());
  }
  if (!settings.store_directory.empty()) {
    auto tier = FileTier<>::open(settings.store_directory);
    KVBLEND_RETURN_IF_ERROR(tier.status);
    lab->files_ = std::move(tier.value);
  }
  return lab;
}

Result<std::vector<std::vector<TokenId>>> Lab::passages(const rag::PromptFile& file) const {
  std::vector<std::vector<TokenId>> out;
  for (const rag::Item& item : file.items) {
    for (const std::string& passage : item.passages) {
      auto tokens = tokenizer_.tokenize(passage + "\n\n", false, false);
      KVBLEND_RETURN_IF_ERROR(tokens.status);
      out.push_back(std::move(tokens.value));
    }
  }
  return out;
}

Result<std::vector<Request>> Lab::requests(const rag::PromptFile& file) const {
  std::vector<Request> requests;
  for (const rag::Item& item : file.items) {
    Request request;
    auto tokens = tokenizer_.tokenize(file.instructions + "\n\n", true, true);
    KVBLEND_RETURN_IF_ERROR(tokens.status);
    request.instructions = std::move(tokens.value);
    tokens = tokenizer_.tokenize("Question: " + item.question + "\nAnswer:", false, false);
    KVBLEND_RETURN_IF_ERROR(tokens.status);
    request.question = std::move(tokens.value);
    rag::PromptFile one;
    one.items.push_back(item);
    auto passages = this->passages(one);
    KVBLEND_RETURN_IF_ERROR(passages.status);
    const std::size_t fixed = request.instructions.size() + request.question.size();
    std::size_t room = static_cast<std::size_t>(settings_.tokens) -
                       std::min<std::size_t>(fixed, static_cast<std::size_t>(settings_.tokens));
    std::size_t total = fixed;
    for (auto& passage : passages.value) {
      if (passage.size() > room) passage.resize(room);
      room -= passage.size();
      total += passage.size();
      if (passage.size() > 1) request.passages.push_back(std::move(passage));
    }
    // The engine's own prefill must not end in a part that its slow kernel gets.
    const std::size_t rest = total % static_cast<std::size_t>(engine_->options().batch);
    if (rest > 0 && rest < kFastRows && !request.passages.empty() && request.passages.back().size() > rest) {
      request.passages.back().resize(request.passages.back().size() - rest);
    }
    if (request.passages.empty()) return Status::error(StatusCode::invalid_argument, "too few").at("tokens");
    requests.push_back(std::move(request));
  }
  return requests;
}

ChunkIdentity Lab::identity_of(std::span<const TokenId> tokens) const {
  ChunkIdentity identity;
  identity.model = identity_;
  for (std::int32_t layer = 0; layer < identity_.layers; ++layer) identity.add_layer_rope(model_->rope(layer));
  identity.tokens.assign(tokens.begin(), tokens.end());
  return identity;
}

double Lab::row_bytes() const {
  return static_cast<double>(std::int64_t{2} * identity_.layers * identity_.kv_heads * head_bytes(identity_));
}

bool Lab::stores(std::span<const TokenId> tokens) { return memory_.find(identity_of(tokens)) != nullptr; }

Status Lab::encode(std::span<const TokenId> tokens) {
  engine_->clear();
  KVBLEND_RETURN_IF_ERROR(engine_->prefill(tokens, Wanted::none));
  return llama_cpp::with_host(*engine_, staging_blob_, [&]<class Host>(Host) -> Status {
    auto chunk = llama_cpp::export_chunk<typename Host::stored_codec>(*engine_, identity_of(tokens));
    KVBLEND_RETURN_IF_ERROR(chunk.status);
    ChunkHandle handle = share(std::move(chunk.value));
    if (!settings_.store_directory.empty()) KVBLEND_RETURN_IF_ERROR(files_.insert(*handle));
    return memory_.insert(std::move(handle));
  });
}

Status Lab::store(const Request& request) {
  if (!stores(request.instructions)) KVBLEND_RETURN_IF_ERROR(encode(request.instructions));
  for (const auto& passage : request.passages) {
    if (!stores(passage)) KVBLEND_RETURN_IF_ERROR(encode(passage));
  }
  return {};
}

// The system forgets what it holds of the files.
Status Lab::make_cold(const Request& request) {
  std::vector<std::span<const TokenId>> chunks = {request.instructions};
  for (const auto& passage : request.passages) chunks.emplace_back(passage);
  for (const std::span<const TokenId> tokens : chunks) {
    const std::string path = files_.path_of(identity_of(tokens));
    const int file = ::open(path.c_str(), O_RDONLY);
    if (file < 0) return Status::error(StatusCode::io_error, "cannot be opened").at("%s", path.c_str());
    ::fsync(file);
    ::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    ::close(file);
  }
  return {};
}

// What the variant finds: it is not timed.
Status Lab::prepare(const Request& request, const Variant& variant) {
  if (variant.tier == "cold_file") KVBLEND_RETURN_IF_ERROR(make_cold(request));
  if (variant.name == "prefix") {
    engine_->clear();
    return engine_->prefill(request.instructions, Wanted::none);
  }
  if (variant.name != "cache_reuse") {
    engine_->clear();
    return {};
  }
  // A passage more stands before the others; its last one does, so that it is of a passage's size.
  std::vector<TokenId> tokens = request.instructions;
  tokens.insert(tokens.end(), request.passages.back().begin(), request.passages.back().end());
  for (const auto& passage : request.passages) tokens.insert(tokens.end(), passage.begin(), passage.end());
  if (old_slot_of_ != tokens) {
    engine_->clear();
    KVBLEND_RETURN_IF_ERROR(engine_->prefill(tokens, Wanted::none));
    KVBLEND_RETURN_IF_ERROR(engine_->save(old_slot_));
    old_rows_ = engine_->rows();
    old_slot_of_ = std::move(tokens);
  }
  return engine_->load(old_slot_, old_rows_);
}

Status Lab::run(const Request& request, const Variant& variant, Timing& timing) {
  timing = {};
  KVBLEND_RETURN_IF_ERROR(prepare(request, variant));
  const std::vector<TokenId> all = request.all();
  const std::span<const TokenId> tokens(all);
  const Clock clock;
  if (variant.name == "full") {
    KVBLEND_RETURN_IF_ERROR(engine_->prefill(tokens));
    timing.recompute_s = clock.seconds();
  } else if (variant.name == "prefix") {
    KVBLEND_RETURN_IF_ERROR(engine_->prefill(tokens.subspan(request.instructions.size())));
    timing.recompute_s = clock.seconds();
  } else if (variant.name == "cache_reuse") {
    const auto first = static_cast<std::int32_t>(request.instructions.size());
    KVBLEND_RETURN_IF_ERROR(engine_->drop(first, first + static_cast<std::int32_t>(request.passages.back().size())));
    KVBLEND_RETURN_IF_ERROR(engine_->prefill(request.question));
    timing.suffix_s = clock.seconds();  // the keys are shifted in it
  } else {
    KVBLEND_RETURN_IF_ERROR(run_blend(request, variant, timing));
  }
  timing.ttft_s = clock.seconds();
  return {};
}

Status Lab::look_up(const Request& request, const Variant& variant, Parts& parts) {
  const std::size_t most = request.passages.size() + 1;
  parts.infos.reserve(most);  // segments and sources point into these
  parts.readers.reserve(most);
  const auto add = [&](const std::vector<TokenId>& tokens, bool may_reuse) -> Status {
    if (!may_reuse) {
      parts.segments.push_back(fresh_segment(tokens));
      parts.sources.emplace_back();
      return {};
    }
    if (variant.tier == "memory") {
      ChunkHandle chunk = memory_.find(identity_of(tokens));
      if (chunk == nullptr) {
        parts.segments.push_back(fresh_segment(tokens));
        parts.sources.emplace_back();
        return {};
      }
      parts.infos.push_back(chunk->info());
      parts.sources.emplace_back(std::move(chunk));
    } else {
      auto reader = files_.find(identity_of(tokens));
      KVBLEND_RETURN_IF_ERROR(reader.status);
      parts.readers.push_back(std::move(reader.value));
      parts.infos.push_back(parts.readers.back().info());
      parts.sources.emplace_back(ChunkReaderRef(parts.readers.back()));
    }
    parts.segments.push_back(cached_segment(parts.infos.back()));
    return {};
  };
  // At ratio 1 nothing is reused, the instructions neither: llama.cpp's kernels round by how rows are cut into batches.
  KVBLEND_RETURN_IF_ERROR(add(request.instructions, variant.ratio < 1));
  for (const auto& passage : request.passages) KVBLEND_RETURN_IF_ERROR(add(passage, true));
  parts.segments.push_back(fresh_segment(request.question));
  parts.sources.emplace_back();
  auto prompt = Prompt::make(parts.segments, Position(engine_->options().context - 1));
  parts.prompt = prompt.value;
  return prompt.status;
}

Status Lab::run_blend(const Request& request, const Variant& variant, Timing& timing) {
  Parts parts;
  KVBLEND_RETURN_IF_ERROR(look_up(request, variant, parts));
  const Prompt& prompt = parts.prompt;
  const double patched = engine_->patch_seconds();
  PassReport report;
  const Status status = llama_cpp::with_host(*engine_, staging_blob_, [&]<class Host>(Host host) -> Status {
    LayerwiseLoader<typename Host::stored_codec> loader;
    const std::int64_t staging = loader.staging_bytes(prompt, parts.sources, kStagingLayers);
    if (static_cast<std::int64_t>(staging_.size()) < staging) staging_.resize(static_cast<std::size_t>(staging));
    KVBLEND_RETURN_IF_ERROR(loader.open(identity_, prompt, parts.sources, kStagingLayers, staging_));
    KVBLEND_RETURN_IF_ERROR(loader.start());
    return with_selector(variant, [&]<class Selector>(Selector selector) -> Status {
      using Backend = EigenBackend<eigen_engine::PoolExecutor>;
      LayerwiseFusor<Selector, Backend> fusor(selector, Backend(eigen_engine::PoolExecutor(pool_)));
      const std::size_t bytes = fusor.workspace_bytes(prompt, identity_.head_dim);
      if (workspace_.size() < bytes) workspace_.resize(bytes);
      const std::array<Row, 1> outputs = {Row(prompt.rows() - 1)};
      return blend(host, loader, fusor, prompt, outputs, workspace_, &report);
    });
  });
  KVBLEND_RETURN_IF_ERROR(status);
  timing.load_s = report.fusor.load_s + report.load_cache_s;
  timing.shift_s = report.fusor.shift_s;
  timing.score_s = report.score_pass_s + report.fusor.score_s;
  timing.select_s = report.fusor.select_s;
  timing.merge_s = report.fusor.merge_s;
  timing.patch_s = engine_->patch_seconds() - patched;
  (variant.name == "reuse" ? timing.suffix_s : timing.recompute_s) = report.compute_s - timing.patch_s;
  timing.rows_selected = report.fusor.rows_selected;
  return {};
}

// Greedy, until the model's end token.
Status Lab::answer(std::int32_t tokens, Reference& out) {
  out = {};
  for (std::int32_t i = 0; i < kAnswerTokens; ++i) {
    out.logits.emplace_back(engine_->logits().begin(), engine_->logits().end());
    const TokenId token = most_likely(out.logits.back());
    out.answer.push_back(token);
    if (model_->is_end(token) || i + 1 == kAnswerTokens) break;
    KVBLEND_RETURN_IF_ERROR(engine_->prefill({&token, 1}));
  }
  return engine_->truncate(tokens);
}

// One token at a time, as the answer was made: other batches round otherwise.
Result<Closeness> Lab::judge(const Reference& reference) {
  const std::int32_t rows = engine_->rows();
  Closeness closeness;
  for (std::size_t i = 0; i < reference.answer.size(); ++i) {
    closeness.kl += divergence(reference.logits[i], engine_->logits());
    closeness.top1_agreement += most_likely(reference.logits[i]) == most_likely(engine_->logits()) ? 1 : 0;
    if (i + 1 < reference.answer.size()) {
      KVBLEND_RETURN_IF_ERROR(engine_->prefill({&reference.answer[i], 1}));
    }
  }
  closeness.kl /= static_cast<double>(reference.answer.size());
  closeness.top1_agreement /= static_cast<double>(reference.answer.size());
  KVBLEND_RETURN_IF_ERROR(engine_->truncate(rows));
  return closeness;
}

}  // namespace lab
