// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <rope_config/hf_config.hpp>

#include <rope_config/hf_models.hpp>
#include <rope_config/hf_scaling.hpp>
#include <rope_config/json_fields.hpp>

#include <kvblend/rope/builders.hpp>

#include <nlohmann/json.hpp>

#include <cstddef>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace rope_config {

using kvblend::Result;
using kvblend::RopePairing;
using kvblend::RopeSpec;
using kvblend::Status;
using kvblend::StatusCode;
using nlohmann::json;

namespace {

constexpr std::int32_t kMaxLayers = 1024;
const std::string kFull = "full_attention";
const std::string kSliding = "sliding_attention";

const json& empty_object() {
  static const json empty = json::object();
  return empty;
}

class ConfigReader {
 public:
  ConfigReader(const Fields& fields, const HfModel& model, const HfOptions& options, ModelRope& out)
      : fields_(fields), model_(model), options_(options), out_(out) {}
  Status read();

 private:
  Status positive(std::initializer_list<const char*> names, std::int32_t& out) const;
  Status read_pairing();
  Status read_common();
  Status read_head_dim(std::int32_t& head_dim) const;
  Status read_rotary_dim();
  Status read_kinds();
  Status read_latent();

  // The object of `field`, or an empty one if it is absent.
  Status object_of(const char* field, const Fields& parent, std::optional<Fields>& out) const;
  Status add(const std::string& kind, const Fields& rope, const RopeContext& context);
  Status read_alike();
  Status read_local_and_global();
  Status read_gemma4();
  Status read_without_rope();
  Status read_head_dims_of_gemma4(std::vector<std::int32_t>& head_dims) const;
  Status finish(const std::vector<bool>& has_rope);

  const Fields& fields_;
  const HfModel& model_;
  const HfOptions& options_;
  ModelRope& out_;
  RopeContext context_;
  std::int32_t layers_ = 0;
  std::optional<std::int32_t> latent_rank_;
  std::int32_t nope_dim_ = 0;
  std::vector<std::string> kinds_;          // one a layer
  std::map<std::string, LayerRope> ropes_;  // one a kind of layer
};

// A whole number above zero, under the first of several names that is there.
Status ConfigReader::positive(std::initializer_list<const char*> names, std::int32_t& out) const {
  std::optional<std::int32_t> value;
  std::string path;
  KVBLEND_RETURN_IF_ERROR(fields_.read_first(names, value, &path));
  if (!value) return fields_.missing(*names.begin());
  if (*value <= 0) return at_path(Status::error(StatusCode::invalid_argument, "is %d, must be positive", *value), path);
  out = *value;
  return {};
}

Status ConfigReader::read_pairing() {
  std::optional<bool> interleave;
  if (model_.pairing == HfPairing::by_field) {
    KVBLEND_RETURN_IF_ERROR(fields_.read("rope_interleave", interleave));
  }
  const bool interleaved =
      model_.pairing == HfPairing::interleaved || (model_.pairing == HfPairing::by_field && interleave.value_or(true));
  const auto own = interleaved ? RopePairing::interleaved : RopePairing::neox;
  context_.pairing = options_.pairing.value_or(own);
  if (context_.pairing != own) {
    out_.notes.push_back(std::string("pairing ") + to_string(context_.pairing) + " as asked for; the model's own is " +
                         to_string(own));
  }
  return {};
}

Status ConfigReader::read_head_dim(std::int32_t& head_dim) const {
  std::optional<std::int32_t> given;
  KVBLEND_RETURN_IF_ERROR(fields_.read("head_dim", given));
  if (given) return positive({"head_dim"}, head_dim);
  if (model_.head_dim > 0) {
    head_dim = model_.head_dim;
    return {};
  }
  std::int32_t hidden = 0;
  std::int32_t heads = 0;
  KVBLEND_RETURN_IF_ERROR(positive({"hidden_size", "n_embd"}, hidden));
  KVBLEND_RETURN_IF_ERROR(positive({"num_attention_heads", "n_head"}, heads));
  if (hidden % heads != 0) {
    return at_path(
        Status::error(StatusCode::invalid_argument,
                      "is %d, which does not divide the hidden size %d, and there is no head_dim", heads, hidden),
        fields_.path("num_attention_heads"));
  }
  head_dim = hidden / heads;
  return {};
}

Status ConfigReader::read_rotary_dim() {
  std::int32_t rotary_dim = 0;
  KVBLEND_RETURN_IF_ERROR(positive({"rotary_dim"}, rotary_dim));
  if (rotary_dim > context_.head_dim || rotary_dim % 2 != 0) {
    return at_path(Status::error(StatusCode::invalid_argument, "is %d, must be even and fit a head of %d", rotary_dim,
                                 context_.head_dim),
                   fields_.path("rotary_dim"));
  }
  context_.rotary_dim = rotary_dim;
  return {};
}

// Latent attention rotates a part of the key that all heads share; head_dim is something else there.
Status ConfigReader::read_latent() {
  KVBLEND_RETURN_IF_ERROR(positive({"qk_rope_head_dim"}, context_.head_dim));
  latent_rank_.emplace();
  KVBLEND_RETURN_IF_ERROR(positive({"kv_lora_rank"}, *latent_rank_));
  if (options_.latent_keys == LatentKeys::expanded) {
    KVBLEND_RETURN_IF_ERROR(positive({"qk_nope_head_dim"}, nope_dim_));
  }
  return {};
}

Status ConfigReader::read_common() {
  KVBLEND_RETURN_IF_ERROR(positive({"num_hidden_layers", "n_layer"}, layers_));
  if (layers_ > kMaxLayers) {
    return at_path(Status::error(StatusCode::invalid_argument, "is %d, more than %d", layers_, kMaxLayers),
                   fields_.path("num_hidden_layers"));
  }
  KVBLEND_RETURN_IF_ERROR(read_pairing());

  std::optional<double> theta;
  KVBLEND_RETURN_IF_ERROR(fields_.read_first({"rope_theta", "rotary_emb_base"}, theta, &context_.theta_path));
  context_.theta = theta.value_or(model_.theta);
  std::optional<double> partial;
  KVBLEND_RETURN_IF_ERROR(fields_.read_first({"partial_rotary_factor", "rotary_pct"}, partial, &context_.partial_path));
  context_.takes_partial = model_.partial > 0;
  context_.partial = partial.value_or(context_.takes_partial ? model_.partial : 1.0);

  const bool is_latent = model_.latent;
  KVBLEND_RETURN_IF_ERROR(is_latent ? read_latent() : read_head_dim(context_.head_dim));
  const bool has_rotary_dim = context_.takes_partial && !partial && fields_.holds("rotary_dim");
  if (model_.by_rotary_dim || has_rotary_dim) KVBLEND_RETURN_IF_ERROR(read_rotary_dim());

  const char* longest = fields_.find("max_position_embeddings") != nullptr ? "max_position_embeddings" : "n_positions";
  KVBLEND_RETURN_IF_ERROR(fields_.read(longest, context_.longest));
  if (context_.longest) KVBLEND_RETURN_IF_ERROR(fields_.check_positive(longest, *context_.longest));
  KVBLEND_RETURN_IF_ERROR(fields_.read("original_max_position_embeddings", context_.original_length));
  if (context_.original_length) {
    KVBLEND_RETURN_IF_ERROR(fields_.check_positive("original_max_position_embeddings", *context_.original_length));
  }
  const std::string_view type = model_.type;
  context_.yarn_is_longrope = type == "phi3";
  if (context_.yarn_is_longrope && !context_.original_length) context_.original_length = 4096;
  context_.takes_alpha = type.starts_with("hunyuan");
  if (model_.sections != nullptr) context_.sections.emplace(model_.sections, model_.sections + 3);
  context_.axes_interleaved = model_.axes_interleaved;
  context_.length = options_.length;
  return {};
}

// layer_types, or what the model's code makes of their absence.
Status ConfigReader::read_kinds() {
  std::optional<std::vector<std::string>> kinds;
  KVBLEND_RETURN_IF_ERROR(fields_.read("layer_types", kinds));
  if (kinds) {
    if (kinds->size() != static_cast<std::size_t>(layers_)) {
      return at_path(Status::error(StatusCode::mismatch, "has %zu entries for %d layers", kinds->size(), layers_),
                     fields_.path("layer_types"));
    }
    for (std::size_t i = 0; i < kinds->size(); ++i) {
      const std::string& kind = (*kinds)[i];
      if (kind == kFull || kind == kSliding || kind == "chunked_attention") continue;
      return at_path(
          Status::error(StatusCode::unsupported, "\"%.40s\" layers keep no keys that this reader knows", kind.c_str()),
          fields_.path("layer_types[") + std::to_string(i) + "]");
    }
    kinds_ = *kinds;
  } else {
    std::int32_t period = model_.layers == HfLayers::no_rope_list ? 0 : model_.period;
    if (period > 0 && model_.period_field != nullptr && fields_.find(model_.period_field) != nullptr) {
      KVBLEND_RETURN_IF_ERROR(positive({model_.period_field}, period));
    }
    for (std::int32_t i = 0; i < layers_; ++i) {
      kinds_.push_back(period > 0 && (i + 1) % period != 0 ? kSliding : kFull);
    }
  }
  if (model_.layers == HfLayers::gemma4) kinds_.back() = kFull;  // whatever the file says
  return {};
}

Status ConfigReader::object_of(const char* field, const Fields& parent, std::optional<Fields>& out) const {
  const json* value = parent.find(field);
  if (value != nullptr && !value->is_object()) return parent.wrong(field, "is not an object");
  out.emplace(value == nullptr ? empty_object() : *value, parent.path(field) + ".");
  return {};
}

Status ConfigReader::add(const std::string& kind, const Fields& rope, const RopeContext& context) {
  Result<LayerRope> layer = read_rope_object(rope, context);
  if (!layer.ok()) return layer.status;
  if (depends_on_length(layer.value) && options_.length == 0) {
    out_.notes.push_back("frequencies depend on the prompt's length: these hold within the original length");
  }
  if (latent_rank_) {
    const std::int32_t part = context.head_dim;
    Result<RopeSpec> placed = layer.value.spec;
    if (options_.latent_keys == LatentKeys::row) {
      placed = kvblend::within_head(layer.value.spec, *latent_rank_ + part, *latent_rank_);
    } else if (options_.latent_keys == LatentKeys::expanded) {
      placed = kvblend::within_head(layer.value.spec, nope_dim_ + part, nope_dim_);
    }
    if (!placed.ok()) return in_file(placed.status, fields_.path("kv_lora_rank"));
    layer.value.spec = placed.value;
  }
  ropes_[kind] = layer.value;
  return {};
}

// One object for all layers, or one for each kind of them. The older rope_scaling goes before rope_parameters.
Status ConfigReader::read_alike() {
  const json* older = fields_.find("rope_scaling");
  const bool has_older = older != nullptr && !(older->is_object() && older->empty());
  const char* name = has_older ? "rope_scaling" : "rope_parameters";
  std::optional<Fields> object;
  KVBLEND_RETURN_IF_ERROR(object_of(name, fields_, object));
  bool nested = false;
  for (const json& member : object->object()) nested = nested || member.is_object();
  for (const std::string& kind : kinds_) {
    if (ropes_.count(kind) > 0) continue;
    if (!nested) {
      KVBLEND_RETURN_IF_ERROR(add(kind, *object, context_));
      continue;
    }
    if (object->find(kind.c_str()) == nullptr) return object->missing(kind.c_str());
    std::optional<Fields> of_kind;
    KVBLEND_RETURN_IF_ERROR(object_of(kind.c_str(), *object, of_kind));
    RopeContext context = context_;
    context.original_length.reset();  // stands within each object
    KVBLEND_RETURN_IF_ERROR(add(kind, *of_kind, context));
  }
  return {};
}

// Gemma 3 and its kin: rope_scaling is that of the full attention layers alone.
Status ConfigReader::read_local_and_global() {
  std::optional<Fields> parameters;
  std::optional<Fields> scaling;
  KVBLEND_RETURN_IF_ERROR(object_of("rope_parameters", fields_, parameters));
  KVBLEND_RETURN_IF_ERROR(object_of("rope_scaling", fields_, scaling));
  std::optional<Fields> full;
  std::optional<Fields> sliding;
  KVBLEND_RETURN_IF_ERROR(object_of(kFull.c_str(), *parameters, full));
  KVBLEND_RETURN_IF_ERROR(object_of(kSliding.c_str(), *parameters, sliding));
  if (!parameters->object().empty() && full->object().empty() && sliding->object().empty()) {
    return parameters->missing(kFull.c_str());
  }
  json merged = full->object();
  merged.update(scaling->object());
  const Fields& named = full->object().empty() ? *scaling : *full;

  RopeContext context = context_;
  context.original_length.reset();
  KVBLEND_RETURN_IF_ERROR(add(kFull, Fields(merged, named.prefix()), context));

  std::optional<double> local;
  KVBLEND_RETURN_IF_ERROR(fields_.read("rope_local_base_freq", local));
  context.theta = local.value_or(model_.local_theta);
  context.theta_path = fields_.path("rope_local_base_freq");
  return add(kSliding, *sliding, context);
}

// Per layer: head_dim, unless full attention layers have global_head_dim or per_layer_config says otherwise.
Status ConfigReader::read_head_dims_of_gemma4(std::vector<std::int32_t>& head_dims) const {
  std::int32_t global = 512;
  if (fields_.find("global_head_dim") != nullptr) KVBLEND_RETURN_IF_ERROR(positive({"global_head_dim"}, global));
  const bool listed = fields_.find("per_layer_config") != nullptr;
  std::optional<Fields> list;
  KVBLEND_RETURN_IF_ERROR(object_of("per_layer_config", fields_, list));
  for (std::int32_t i = 0; i < layers_; ++i) {
    std::int32_t head_dim = kinds_[static_cast<std::size_t>(i)] == kFull && !listed ? global : context_.head_dim;
    std::optional<Fields> own;
    KVBLEND_RETURN_IF_ERROR(object_of(std::to_string(i).c_str(), *list, own));
    std::optional<std::int32_t> given;
    KVBLEND_RETURN_IF_ERROR(own->read("head_dim", given));
    if (given) KVBLEND_RETURN_IF_ERROR(own->check_positive("head_dim", *given));
    head_dims.push_back(given.value_or(head_dim));
  }
  return {};
}

Status ConfigReader::read_gemma4() {
  std::vector<std::int32_t> head_dims;
  KVBLEND_RETURN_IF_ERROR(read_head_dims_of_gemma4(head_dims));
  static const json defaults = {
      {kSliding, {{"rope_type", "default"}, {"rope_theta", 1e4}}},
      {kFull, {{"rope_type", "proportional"}, {"partial_rotary_factor", 0.25}, {"rope_theta", 1e6}}}};
  const bool given = fields_.find("rope_parameters") != nullptr;
  std::optional<Fields> parameters;
  KVBLEND_RETURN_IF_ERROR(object_of("rope_parameters", fields_, parameters));
  if (!given) parameters.emplace(defaults, fields_.path("rope_parameters."));
  for (std::size_t i = 0; i < kinds_.size(); ++i) {
    // Heads may differ in width within a kind: each width is a kind of its own from here on.
    const std::string kind = kinds_[i];
    kinds_[i] += " " + std::to_string(head_dims[i]);
    if (ropes_.count(kinds_[i]) > 0) continue;
    if (parameters->find(kind.c_str()) == nullptr) return parameters->missing(kind.c_str());
    std::optional<Fields> of_kind;
    KVBLEND_RETURN_IF_ERROR(object_of(kind.c_str(), *parameters, of_kind));
    RopeContext context = context_;
    context.head_dim = head_dims[i];
    context.original_length.reset();
    KVBLEND_RETURN_IF_ERROR(add(kinds_[i], *of_kind, context));
  }
  return {};
}

// Which layers have rope at all.
Status ConfigReader::read_without_rope() {
  std::vector<bool> has_rope(static_cast<std::size_t>(layers_), true);
  const bool null_window = fields_.holds("sliding_window") && fields_.find("sliding_window") == nullptr;
  if (model_.layers == HfLayers::sliding_only || (model_.layers == HfLayers::sliding_if_window && !null_window)) {
    for (std::size_t i = 0; i < kinds_.size(); ++i) has_rope[i] = kinds_[i] == kSliding;
  }
  if (model_.layers == HfLayers::no_rope_list) {
    std::int32_t period = model_.period;
    if (fields_.find(model_.period_field) != nullptr) KVBLEND_RETURN_IF_ERROR(positive({model_.period_field}, period));
    std::optional<std::vector<std::int32_t>> list;
    KVBLEND_RETURN_IF_ERROR(fields_.read("no_rope_layers", list));
    const bool listed = list && !list->empty();
    if (listed && list->size() != has_rope.size()) {
      return at_path(Status::error(StatusCode::mismatch, "has %zu entries for %d layers", list->size(), layers_),
                     fields_.path("no_rope_layers"));
    }
    for (std::size_t i = 0; i < has_rope.size(); ++i) {
      has_rope[i] = listed ? (*list)[i] != 0 : (i + 1) % static_cast<std::size_t>(period) != 0;
    }
  }
  return finish(has_rope);
}

Status ConfigReader::finish(const std::vector<bool>& has_rope) {
  for (std::size_t i = 0; i < kinds_.size(); ++i) {
    LayerRope layer = ropes_[kinds_[i]];
    if (!has_rope[i]) {
      layer.family = "none";
      const Result<RopeSpec> none = kvblend::no_rope(layer.spec.head_dim);
      if (!none.ok()) return none.status;
      layer.spec = none.value;
    }
    out_.layers.push_back(layer);
  }
  std::optional<std::int32_t> shared;
  KVBLEND_RETURN_IF_ERROR(fields_.read("num_kv_shared_layers", shared));
  if (shared.value_or(0) > 0) {
    out_.notes.push_back("the last " + std::to_string(*shared) + " layers keep no keys of their own");
  }
  return {};
}

Status ConfigReader::read() {
  std::optional<bool> alibi;
  KVBLEND_RETURN_IF_ERROR(fields_.read("alibi", alibi));
  if (alibi.value_or(false)) {
    return at_path(Status::error(StatusCode::unsupported, "%s", why_no_rope("bloom")), fields_.path("alibi"));
  }
  KVBLEND_RETURN_IF_ERROR(read_common());
  KVBLEND_RETURN_IF_ERROR(read_kinds());
  switch (model_.layers) {
    case HfLayers::local_and_global: KVBLEND_RETURN_IF_ERROR(read_local_and_global()); break;
    case HfLayers::gemma4: KVBLEND_RETURN_IF_ERROR(read_gemma4()); break;
    default: KVBLEND_RETURN_IF_ERROR(read_alike());
  }
  return read_without_rope();
}

// A model_type that is not in the table, by the rules most models follow.
HfModel general_model(const Fields& fields) {
  HfModel model{"general"};
  model.partial = 1;
  model.latent = fields.find("kv_lora_rank") != nullptr && fields.find("qk_rope_head_dim") != nullptr;
  if (fields.find("no_rope_layers") != nullptr) {
    model.layers = HfLayers::no_rope_list;
    model.period = 4;
    model.period_field = "no_rope_layer_interval";
  }
  return model;
}

}  // namespace

Result<ModelRope> read_hf_config(std::string_view text, const HfOptions& options) {
  if (options.length < 0) {
    return Status::error(StatusCode::invalid_argument, "is %lld", static_cast<long long>(options.length)).at("length");
  }
  const Result<json> parsed = parse_object(text);
  if (!parsed.ok()) return parsed.status;
  const Fields root(parsed.value, "");
  // A multimodal model keeps its language model's fields in an object of their own.
  const json* nested = root.find("text_config");
  if (nested != nullptr && !nested->is_object()) return root.wrong("text_config", "is not an object");
  const Fields fields = nested == nullptr ? root : Fields(*nested, "text_config.");

  ModelRope out;
  std::optional<std::string> type;
  std::string path = "model_type";
  KVBLEND_RETURN_IF_ERROR(fields.read_first({"model_type"}, type, &path));
  if (!type) KVBLEND_RETURN_IF_ERROR(root.read_first({"model_type"}, type, &path));
  if (!type && !options.model_type.empty()) type = options.model_type;
  if (!type) return root.missing("model_type");
  out.model = *type;
  if (const char* reason = why_no_rope(*type); reason != nullptr) {
    return at_path(Status::error(StatusCode::unsupported, "%.24s %s", type->c_str(), reason), path);
  }
  const HfModel* known = find_hf_model(*type);
  if (known == nullptr && !options.pairing) {
    return at_path(
        Status::error(StatusCode::unsupported,
                      "\"%.40s\" is not known; with its pairing given it is read by the general rules", type->c_str()),
        path);
  }
  HfModel general = general_model(fields);
  general.pairing = options.pairing == RopePairing::interleaved ? HfPairing::interleaved : HfPairing::neox;
  if (known == nullptr) out.notes.push_back(*type + " is not known: read by the general rules");
  const HfModel& model = known == nullptr ? general : *known;
  KVBLEND_RETURN_IF_ERROR(ConfigReader(fields, model, options, out).read());
  return out;
}

Result<ModelRope> read_hf_config_file(const std::string& path, const HfOptions& options) {
  std::ifstream stream(path, std::ios::binary);
  stream.peek();  // a directory opens, but cannot be read
  if (!stream) return Status::error(StatusCode::io_error, "cannot be read: %.150s", path.c_str()).at("configuration");
  std::string text(kMaxConfigBytes + 1, '\0');  // one more than is taken
  stream.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(stream.gcount()));
  return read_hf_config(text, options);
}

}  // namespace rope_config
