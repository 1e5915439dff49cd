// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <rope_config/gguf_rope.hpp>

#include <rope_config/gguf_architectures.hpp>

#include <kvblend/rope/builders.hpp>
#include <kvblend/rope/scaling.hpp>

#include <cmath>
#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace rope_config {

using kvblend::Result;
using kvblend::RopePairing;
using kvblend::RopeSpec;
using kvblend::Status;
using kvblend::StatusCode;

namespace {

constexpr std::int32_t kMaxLayers = 1024;

// What one kind of layer turns by.
struct Turn {
  std::int32_t head_dim = 0;
  std::int32_t rotary_dim = 0;
  double base = 10000;
  double factor = 1;    // frequencies are divided by it; YaRN divides those of slow pairs
  bool scaled = true;   // false: neither YaRN nor a magnitude
  bool divided = true;  // by rope_freqs or longrope's lists
};

class RopeReader {
 public:
  RopeReader(GgufFile& file, const GgufArchitecture& architecture, const GgufOptions& options, ModelRope& out)
      : file_(file), architecture_(architecture), options_(options), out_(out) {}
  Status read();

 private:
  Status fault(StatusCode code, const char* suffix, const char* what) const {
    return Status::error(code, "%s", what).at("%s", file_.key(suffix).c_str());
  }
  Status read_sizes();
  Status read_scaling();
  Status read_divisors();
  Status read_sliding();
  Status read_sections();
  [[nodiscard]] double magnitude(const Turn& turn) const;
  Status set_axes(RopeSpec& spec);
  Status make(const Turn& turn, LayerRope& out);

  GgufFile& file_;
  const GgufArchitecture& architecture_;
  const GgufOptions& options_;
  ModelRope& out_;

  std::int32_t layers_ = 0;
  std::int32_t trained_length_ = 0;
  std::int32_t original_length_ = 0;
  bool latent_ = false;  // the rotated values end the row
  bool yarn_ = false;
  const char* scaling_ = "plain";
  double attention_factor_ = 1;
  double beta_fast_ = 32;
  double beta_slow_ = 1;
  double log_multiplier_ = 0;
  Turn full_;
  Turn sliding_;
  std::vector<bool> is_sliding_;        // one a layer
  std::vector<std::int32_t> sections_;  // empty: one position a token
  bool axes_by_turns_ = false;
  std::vector<float> divisors_;  // one a pair of a full attention layer
};

Status RopeReader::read_sizes() {
  KVBLEND_RETURN_IF_ERROR(file_.read("block_count", layers_, true));
  std::int32_t predicting = 0;  // layers behind the model that guess tokens ahead
  KVBLEND_RETURN_IF_ERROR(file_.read("nextn_predict_layers", predicting));
  if (layers_ < 1 || layers_ > kMaxLayers || predicting >= layers_) {
    return fault(StatusCode::corrupt, "block_count", "is no sensible number of layers");
  }
  layers_ -= predicting;
  KVBLEND_RETURN_IF_ERROR(file_.read("context_length", trained_length_, true));
  if (file_.has("attention.key_length")) {
    KVBLEND_RETURN_IF_ERROR(file_.read("attention.key_length", full_.head_dim));
  } else {
    std::int32_t hidden = 0;
    std::int32_t heads = 0;
    KVBLEND_RETURN_IF_ERROR(file_.read("embedding_length", hidden, true));
    KVBLEND_RETURN_IF_ERROR(file_.read("attention.head_count", heads, true));
    if (heads < 1) return fault(StatusCode::corrupt, "attention.head_count", "must be at least 1");
    full_.head_dim = hidden / heads;
  }
  full_.rotary_dim = full_.head_dim;
  KVBLEND_RETURN_IF_ERROR(file_.read("rope.dimension_count", full_.rotary_dim));
  if (full_.rotary_dim < 2 || full_.rotary_dim % 2 != 0 || full_.rotary_dim > full_.head_dim) {
    return Status::error(StatusCode::corrupt, "is %d, heads have %d", full_.rotary_dim, full_.head_dim)
        .at("%s", file_.key("rope.dimension_count").c_str());
  }
  std::int32_t rank = 0;
  KVBLEND_RETURN_IF_ERROR(file_.read("attention.kv_lora_rank", rank));
  latent_ = rank > 0;
  KVBLEND_RETURN_IF_ERROR(file_.read("rope.freq_base", full_.base));
  if (!(full_.base > 0)) return fault(StatusCode::corrupt, "rope.freq_base", "must be positive");
  return {};
}

Status RopeReader::read_scaling() {
  std::string type = "linear";
  KVBLEND_RETURN_IF_ERROR(file_.read_text(file_.key("rope.scaling.type"), type));
  if (type != "none" && type != "linear" && type != "yarn" && type != "longrope") {
    return Status::error(StatusCode::unsupported, "\"%.40s\" is not known", type.c_str())
        .at("%s", file_.key("rope.scaling.type").c_str());
  }
  const char* factor_key = file_.has("rope.scaling.factor") ? "rope.scaling.factor" : "rope.scale_linear";
  double factor = 0;
  KVBLEND_RETURN_IF_ERROR(file_.read(factor_key, factor));
  if (factor < 0) return fault(StatusCode::corrupt, factor_key, "is negative");
  if (factor != 0 && type != "none") full_.factor = factor;  // converters write 0 for "no scaling"

  original_length_ = trained_length_;
  KVBLEND_RETURN_IF_ERROR(file_.read("rope.scaling.original_context_length", original_length_));
  if (original_length_ == 0) original_length_ = trained_length_;
  KVBLEND_RETURN_IF_ERROR(file_.read("rope.scaling.attn_factor", attention_factor_));
  if (!(attention_factor_ > 0)) return fault(StatusCode::corrupt, "rope.scaling.attn_factor", "must be positive");
  yarn_ = type == "yarn";
  if (yarn_) {
    scaling_ = "yarn";
  } else if (type == "longrope") {
    scaling_ = "longrope";
  } else if (full_.factor != 1) {
    scaling_ = "linear";
  }
  if (yarn_ && architecture_.reads_betas) {
    KVBLEND_RETURN_IF_ERROR(file_.read("rope.scaling.yarn_beta_fast", beta_fast_));
    KVBLEND_RETURN_IF_ERROR(file_.read("rope.scaling.yarn_beta_slow", beta_slow_));
  }
  if (yarn_ && architecture_.log_multiplier_scale != 0) {
    KVBLEND_RETURN_IF_ERROR(file_.read("rope.scaling.yarn_log_multiplier", log_multiplier_));
    log_multiplier_ *= architecture_.log_multiplier_scale;
  }
  return {};
}

// Divisors of the frequencies, one a pair: llama 3's and Gemma 4's, or the one of longrope's lists that holds.
Status RopeReader::read_divisors() {
  std::string tensor;
  const std::int64_t context = options_.context == 0 ? trained_length_ : options_.context;
  if (file_.has_tensor("rope_freqs.weight")) {
    tensor = "rope_freqs.weight";
    scaling_ = architecture_.divides_full_only ? "proportional" : "llama3";
  } else {
    tensor = context > original_length_ ? "rope_factors_long.weight" : "rope_factors_short.weight";
    if (!file_.has_tensor(tensor)) return {};
    scaling_ = "longrope";
    out_.notes.push_back("the " + std::string(context > original_length_ ? "long" : "short") +
                         " list, for a context of " + std::to_string(context));
  }
  KVBLEND_RETURN_IF_ERROR(file_.read_tensor(tensor, 1, full_.rotary_dim / 2, divisors_));
  for (std::size_t i = 0; i < divisors_.size(); ++i) {
    if (kvblend::is_finite(divisors_[i]) && divisors_[i] > 0) continue;
    return Status::error(StatusCode::corrupt, "entry %zu is %g, must be finite and positive", i,
                         static_cast<double>(divisors_[i]))
        .at("%s", tensor.c_str());
  }
  return {};
}

// Which layers slide, and what those turn by.
Status RopeReader::read_sliding() {
  is_sliding_.assign(static_cast<std::size_t>(layers_), false);
  sliding_ = full_;
  const GgufLayers rule = architecture_.layers;
  std::int32_t window = 0;
  KVBLEND_RETURN_IF_ERROR(file_.read("attention.sliding_window", window));
  if (rule == GgufLayers::sliding_only && file_.has("attention.sliding_window") && window == 0) {
    return fault(StatusCode::unsupported, "attention.sliding_window", "is 0: which layers have rope is not known");
  }
  const bool absent = rule == GgufLayers::alike || rule == GgufLayers::every_fourth_without ||
                      (rule == GgufLayers::sliding_only_of_64 && layers_ != 64) ||
                      (architecture_.needs_window && window == 0);
  if (absent) return {};
  const char* key = "attention.sliding_window_pattern";
  std::vector<std::int32_t> pattern;
  std::int32_t period = architecture_.period;
  if (file_.is_list(key)) {
    KVBLEND_RETURN_IF_ERROR(file_.read(key, pattern));
    if (pattern.size() < is_sliding_.size()) return fault(StatusCode::mismatch, key, "has fewer entries than layers");
  } else {
    KVBLEND_RETURN_IF_ERROR(file_.read(key, period, period == 0));
  }
  for (std::size_t i = 0; i < is_sliding_.size(); ++i) {
    is_sliding_[i] = pattern.empty()
                         ? period == 0 || i % static_cast<std::size_t>(period) + 1 < static_cast<std::size_t>(period)
                         : pattern[i] != 0;
  }

  if (rule == GgufLayers::sliding_own) {
    sliding_.base = 10000;
    sliding_.factor = 1;
  } else if (rule == GgufLayers::sliding_plain) {
    sliding_.factor = 1;
    sliding_.scaled = false;
    sliding_.divided = false;
  }
  if (architecture_.divides_full_only) sliding_.divided = false;
  if (rule != GgufLayers::sliding_plain) KVBLEND_RETURN_IF_ERROR(file_.read("rope.freq_base_swa", sliding_.base));
  if (!(sliding_.base > 0)) return fault(StatusCode::corrupt, "rope.freq_base_swa", "must be positive");
  KVBLEND_RETURN_IF_ERROR(file_.read("attention.key_length_swa", sliding_.head_dim));
  KVBLEND_RETURN_IF_ERROR(file_.read("rope.dimension_count_swa", sliding_.rotary_dim));
  if (sliding_.rotary_dim < 2 || sliding_.rotary_dim % 2 != 0 || sliding_.rotary_dim > sliding_.head_dim) {
    return Status::error(StatusCode::corrupt, "is %d, heads have %d", sliding_.rotary_dim, sliding_.head_dim)
        .at("%s", file_.key("rope.dimension_count_swa").c_str());
  }
  return {};
}

Status RopeReader::read_sections() {
  const GgufPairing pairing = architecture_.pairing;
  if (pairing == GgufPairing::norm || pairing == GgufPairing::neox) return {};
  const char* key = "rope.dimension_sections";
  std::vector<std::int32_t> sections;
  KVBLEND_RETURN_IF_ERROR(file_.read(key, sections));
  const bool required = pairing == GgufPairing::mrope || pairing == GgufPairing::imrope;
  if (sections.empty()) {
    return required ? fault(StatusCode::not_found, key, "the file has no such key") : Status{};
  }
  if (sections.size() < 3 || sections.size() > 4 || (sections.size() == 4 && sections[3] != 0)) {
    return fault(StatusCode::unsupported, key, "must be three sections, or four of which the last is 0");
  }
  sections.resize(3);
  if (!required && (sections[0] <= 0 || sections[1] <= 0)) return {};
  std::int64_t sum = 0;
  for (const std::int32_t section : sections) {
    if (section < 0) return fault(StatusCode::corrupt, key, "has a negative entry");
    sum += section;
  }
  if (sum != full_.rotary_dim / 2) {
    return fault(StatusCode::unsupported, key, "does not add up to half of rope.dimension_count");
  }
  sections_ = sections;
  axes_by_turns_ = pairing == GgufPairing::imrope;
  return {};
}

// What llama.cpp multiplies into cosines and sines: its context divides YaRN's own magnitude out beforehand, for the
// scaling of the full attention layers, and its kernel multiplies it in again for the layer's.
double RopeReader::magnitude(const Turn& turn) const {
  if (!turn.scaled) return 1;
  if (!yarn_) return attention_factor_;
  const auto yarn = [](double factor, double scale) { return factor <= 1 ? 1.0 : 1 + 0.1 * scale * std::log(factor); };
  double wanted = yarn(full_.factor, 1);
  if (log_multiplier_ != 0) {
    const double mscale = architecture_.mscale_cancels ? log_multiplier_ : 1.0;
    wanted = yarn(full_.factor, mscale) / yarn(full_.factor, log_multiplier_);
  }
  if (turn.factor != full_.factor) {
    wanted *= (1 + 0.1 * std::log(turn.factor)) / (1 + 0.1 * std::log(full_.factor));
  }
  return wanted * attention_factor_;
}

Status RopeReader::set_axes(RopeSpec& spec) {
  if (sections_.empty()) return {};
  if (!axes_by_turns_) {
    const Result<RopeSpec> with_axes = kvblend::with_axes(spec, sections_, kvblend::AxisOrder::sectioned);
    if (!with_axes.ok()) return with_axes.status;
    spec = with_axes.value;
    return {};
  }
  // Time's and the others' pairs alternate. Where the axis whose turn it is has its share, ggml takes a fourth
  // position, which llama.cpp sets to 0: such a pair does not turn.
  int still = 0;
  for (std::int32_t pair = 0; pair < spec.pairs(); ++pair) {
    const auto i = static_cast<std::size_t>(pair);
    const std::int32_t axis = pair % 3;
    if (pair < 3 * sections_[static_cast<std::size_t>(axis)]) {
      spec.axis_of_pair[i] = static_cast<std::uint8_t>(axis);
    } else {
      spec.axis_of_pair[i] = 0;
      spec.inv_freq[i] = 0;
      ++still;
    }
  }
  if (still > 0) {
    out_.notes.push_back(std::to_string(still) + " pairs do not turn in llama.cpp, which do in transformers");
  }
  return {};
}

Status RopeReader::make(const Turn& turn, LayerRope& out) {
  const GgufPairing pairing = architecture_.pairing;
  const bool interleaved = pairing == GgufPairing::norm || (pairing == GgufPairing::norm_or_mrope && sections_.empty());
  const auto how = interleaved ? RopePairing::interleaved : RopePairing::neox;
  Result<RopeSpec> spec;
  if (yarn_ && turn.scaled && turn.factor != 1) {
    kvblend::YarnScaling scaling;
    scaling.factor = turn.factor;
    scaling.original_length = original_length_;
    scaling.beta_fast = beta_fast_;
    scaling.beta_slow = beta_slow_;
    spec = kvblend::yarn_rope(turn.rotary_dim, turn.base, scaling, how);
  } else {
    spec = kvblend::linear_rope(turn.rotary_dim, turn.base, turn.factor, how);
  }
  if (!spec.ok()) {
    return Status::error(spec.status.code(), "%s: %s", spec.status.where(), spec.status.message())
        .at("%s", file_.key("rope").c_str());
  }
  spec.value.attention_factor = magnitude(turn);
  const bool divided = turn.divided && !divisors_.empty();
  if (divided && divisors_.size() != static_cast<std::size_t>(spec.value.pairs())) {
    return fault(StatusCode::mismatch, "rope.dimension_count_swa", "is not that of the divisors the file has");
  }
  for (std::size_t i = 0; divided && i < divisors_.size(); ++i) {
    spec.value.inv_freq[i] /= static_cast<double>(divisors_[i]);
  }
  KVBLEND_RETURN_IF_ERROR(set_axes(spec.value));
  spec = kvblend::within_head(spec.value, turn.head_dim, latent_ ? turn.head_dim - turn.rotary_dim : 0);
  if (!spec.ok()) return spec.status;
  out.spec = spec.value;
  out.family = divided || (turn.scaled && turn.factor != 1) || (yarn_ && turn.scaled) ? scaling_ : "plain";
  return {};
}

Status RopeReader::read() {
  KVBLEND_RETURN_IF_ERROR(read_sizes());
  KVBLEND_RETURN_IF_ERROR(read_scaling());
  KVBLEND_RETURN_IF_ERROR(read_divisors());
  KVBLEND_RETURN_IF_ERROR(read_sliding());
  KVBLEND_RETURN_IF_ERROR(read_sections());
  LayerRope full;
  LayerRope sliding;
  KVBLEND_RETURN_IF_ERROR(make(full_, full));
  bool any_sliding = false;
  for (const bool slides : is_sliding_) any_sliding = any_sliding || slides;
  if (any_sliding) KVBLEND_RETURN_IF_ERROR(make(sliding_, sliding));

  bool has_rope = true;
  if (architecture_.may_lack_rope) KVBLEND_RETURN_IF_ERROR(file_.read("rope.scaling.finetuned", has_rope));
  const bool sliding_only = any_sliding && (architecture_.layers == GgufLayers::sliding_only ||
                                            architecture_.layers == GgufLayers::sliding_only_of_64);
  for (std::size_t i = 0; i < is_sliding_.size(); ++i) {
    LayerRope layer = is_sliding_[i] ? sliding : full;
    const bool fourth = architecture_.layers == GgufLayers::every_fourth_without && i % 4 == 3;
    if (!has_rope || fourth || (sliding_only && !is_sliding_[i])) {
      layer.family = "none";
      layer.spec = kvblend::no_rope(layer.spec.head_dim).value;
    }
    out_.layers.push_back(layer);
  }
  std::int32_t shared = 0;
  KVBLEND_RETURN_IF_ERROR(file_.read("attention.shared_kv_layers", shared));
  if (shared > 0) out_.notes.push_back("the last " + std::to_string(shared) + " layers keep no keys of their own");
  return {};
}

}  // namespace

Result<ModelRope> read_gguf_rope(GgufFile& file, const GgufOptions& options) {
  if (options.context < 0) {
    return Status::error(StatusCode::invalid_argument, "is %lld", static_cast<long long>(options.context))
        .at("context");
  }
  ModelRope out;
  out.model = file.architecture();
  if (const char* reason = why_gguf_has_no_rope(out.model); reason != nullptr) {
    return Status::error(StatusCode::unsupported, "%.24s %s", out.model.c_str(), reason).at("general.architecture");
  }
  const GgufArchitecture* architecture = find_gguf_architecture(out.model);
  if (architecture == nullptr) {
    return Status::error(StatusCode::unsupported, "\"%.40s\" is not known", out.model.c_str())
        .at("general.architecture");
  }
  KVBLEND_RETURN_IF_ERROR(RopeReader(file, *architecture, options, out).read());
  return out;
}

Result<ModelRope> read_gguf_rope(const char* path, const GgufOptions& options) {
  GgufFile file;
  KVBLEND_RETURN_IF_ERROR(file.open(path));
  return read_gguf_rope(file, options);
}

}  // namespace rope_config
