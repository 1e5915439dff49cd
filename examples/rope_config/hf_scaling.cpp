// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Which fields a rope type has, which are required and what stands in for an absent one: as in Hugging Face
// transformers, modeling_rope_utils.py. The formulas are kvblend's builders.
#include <rope_config/hf_scaling.hpp>

#include <kvblend/rope/builders.hpp>
#include <kvblend/rope/scaling.hpp>

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstring>
#include <span>
#include <string>

namespace rope_config {

using kvblend::Result;
using kvblend::RopeSpec;
using kvblend::Status;
using kvblend::StatusCode;

namespace {

class RopeObject {
 public:
  RopeObject(const Fields& fields, const RopeContext& context) : fields_(fields), context_(context) {}
  Result<LayerRope> read();

 private:
  Status required(const char* name, double& out) const;
  Status optional(const char* name, double& out) const;  // leaves `out` if absent; 0 is as good as absent
  Status original_length(double& out) const;
  // factor, or the ratio of the longest to the original length where it is absent.
  Status factor_or_ratio(double original, double& out) const;
  Status read_type(std::string& type, std::string& path) const;
  Status read_theta();
  Status read_rotary_dim();
  Status read_axes(RopeSpec& spec) const;

  Result<RopeSpec> linear() const;
  Result<RopeSpec> dynamic(const char*& family) const;
  Result<RopeSpec> yarn() const;
  Result<RopeSpec> longrope() const;
  Result<RopeSpec> llama3() const;
  Result<RopeSpec> proportional() const;

  const Fields& fields_;
  const RopeContext& context_;
  double theta_ = 0;
  std::int32_t rotary_dim_ = 0;
};

Status RopeObject::required(const char* name, double& out) const {
  std::optional<double> value;
  KVBLEND_RETURN_IF_ERROR(fields_.read(name, value));
  if (!value) return fields_.missing(name);
  out = *value;
  return fields_.check_positive(name, out);
}

Status RopeObject::optional(const char* name, double& out) const {
  std::optional<double> value;
  KVBLEND_RETURN_IF_ERROR(fields_.read(name, value));
  if (!value || *value == 0) return {};
  out = *value;
  return fields_.check_positive(name, out);
}

Status RopeObject::original_length(double& out) const {
  constexpr const char* kName = "original_max_position_embeddings";
  out = context_.original_length.value_or(0);
  if (out > 0) return {};
  out = context_.longest.value_or(0);
  KVBLEND_RETURN_IF_ERROR(optional(kName, out));
  return out > 0 ? Status{} : fields_.missing(kName);
}

Status RopeObject::factor_or_ratio(double original, double& out) const {
  out = context_.longest.value_or(0) / original;
  KVBLEND_RETURN_IF_ERROR(optional("factor", out));
  return out > 0 ? Status{} : fields_.missing("factor");
}

Status RopeObject::read_type(std::string& type, std::string& path) const {
  std::optional<std::string> name;
  path = fields_.path("rope_type");
  KVBLEND_RETURN_IF_ERROR(fields_.read_first({"rope_type", "type"}, name, &path));
  type = name.value_or("default");
  return {};
}

Status RopeObject::read_theta() {
  constexpr const char* kName = "rope_theta";
  std::optional<double> given;
  KVBLEND_RETURN_IF_ERROR(fields_.read(kName, given));
  theta_ = given.value_or(context_.theta);
  if (theta_ > 0) return {};
  return at_path(Status::error(StatusCode::invalid_argument, "is %g, must be positive", theta_),
                 given || context_.theta_path.empty() ? fields_.path(kName) : context_.theta_path);
}

Status RopeObject::read_rotary_dim() {
  if (context_.rotary_dim) {
    rotary_dim_ = *context_.rotary_dim;
    return {};
  }
  constexpr const char* kName = "partial_rotary_factor";
  std::optional<double> given;
  KVBLEND_RETURN_IF_ERROR(fields_.read(kName, given));
  const double partial = given.value_or(context_.partial);
  const std::string path = given || context_.partial_path.empty() ? fields_.path(kName) : context_.partial_path;
  if (!(partial > 0) || partial > 1) {
    return at_path(Status::error(StatusCode::invalid_argument, "is %g, must be above 0 and at most 1", partial), path);
  }
  if (partial != 1 && !context_.takes_partial) {
    return at_path(Status::error(StatusCode::unsupported, "is %g, but models of this type turn whole heads", partial),
                   path);
  }
  rotary_dim_ = static_cast<std::int32_t>(context_.head_dim * partial);  // rounds down, as transformers does
  if (rotary_dim_ > 0 && rotary_dim_ % 2 == 0) return {};
  return at_path(Status::error(StatusCode::invalid_argument, "turns %d of %d values, must turn pairs", rotary_dim_,
                               context_.head_dim),
                 path);
}

Result<RopeSpec> RopeObject::linear() const {
  double factor = 0;
  KVBLEND_RETURN_IF_ERROR(required("factor", factor));
  return kvblend::linear_rope(context_.head_dim, theta_, factor, context_.pairing, rotary_dim_);
}

Result<RopeSpec> RopeObject::dynamic(const char*& family) const {
  double alpha = 0;
  if (context_.takes_alpha) KVBLEND_RETURN_IF_ERROR(optional("alpha", alpha));
  if (alpha > 0) {
    family = "ntk_alpha";
    return kvblend::ntk_alpha_rope(context_.head_dim, theta_, alpha, context_.pairing, rotary_dim_);
  }
  kvblend::DynamicNtkScaling scaling;
  KVBLEND_RETURN_IF_ERROR(required("factor", scaling.factor));
  if (!context_.longest) return Status::error(StatusCode::not_found, "is missing").at("max_position_embeddings");
  scaling.original_length = *context_.longest;
  return kvblend::dynamic_ntk_rope(context_.head_dim, theta_, scaling, context_.length, context_.pairing, rotary_dim_);
}

Result<RopeSpec> RopeObject::yarn() const {
  kvblend::YarnScaling scaling;
  KVBLEND_RETURN_IF_ERROR(original_length(scaling.original_length));
  if (!fields_.holds("factor")) return fields_.missing("factor");  // null asks for the ratio
  KVBLEND_RETURN_IF_ERROR(factor_or_ratio(scaling.original_length, scaling.factor));
  KVBLEND_RETURN_IF_ERROR(optional("beta_fast", scaling.beta_fast));
  KVBLEND_RETURN_IF_ERROR(optional("beta_slow", scaling.beta_slow));
  KVBLEND_RETURN_IF_ERROR(optional("mscale", scaling.mscale));
  KVBLEND_RETURN_IF_ERROR(optional("mscale_all_dim", scaling.mscale_all_dim));
  KVBLEND_RETURN_IF_ERROR(optional("attention_factor", scaling.attention_factor));
  std::optional<bool> truncate;
  KVBLEND_RETURN_IF_ERROR(fields_.read("truncate", truncate));
  scaling.truncate = truncate.value_or(true);
  return kvblend::yarn_rope(context_.head_dim, theta_, scaling, context_.pairing, rotary_dim_);
}

Result<RopeSpec> RopeObject::longrope() const {
  kvblend::LongropeScaling scaling;
  std::optional<std::vector<double>> short_factors;
  std::optional<std::vector<double>> long_factors;
  KVBLEND_RETURN_IF_ERROR(fields_.read("short_factor", short_factors));
  KVBLEND_RETURN_IF_ERROR(fields_.read("long_factor", long_factors));
  if (!short_factors) return fields_.missing("short_factor");
  if (!long_factors) return fields_.missing("long_factor");
  scaling.short_factors = *short_factors;
  scaling.long_factors = *long_factors;
  KVBLEND_RETURN_IF_ERROR(original_length(scaling.original_length));
  KVBLEND_RETURN_IF_ERROR(factor_or_ratio(scaling.original_length, scaling.factor));
  KVBLEND_RETURN_IF_ERROR(optional("attention_factor", scaling.attention_factor));
  return kvblend::longrope(context_.head_dim, theta_, scaling, context_.length, context_.pairing, rotary_dim_);
}

Result<RopeSpec> RopeObject::llama3() const {
  kvblend::Llama3Scaling scaling;
  KVBLEND_RETURN_IF_ERROR(required("factor", scaling.factor));
  KVBLEND_RETURN_IF_ERROR(required("low_freq_factor", scaling.low_frequency_factor));
  KVBLEND_RETURN_IF_ERROR(required("high_freq_factor", scaling.high_frequency_factor));
  KVBLEND_RETURN_IF_ERROR(original_length(scaling.original_length));
  return kvblend::llama3_rope(context_.head_dim, theta_, scaling, context_.pairing, rotary_dim_);
}

Result<RopeSpec> RopeObject::proportional() const {
  double factor = 1;
  KVBLEND_RETURN_IF_ERROR(optional("factor", factor));
  std::optional<double> partial;
  KVBLEND_RETURN_IF_ERROR(fields_.read("partial_rotary_factor", partial));
  return kvblend::proportional_rope(context_.head_dim, theta_, partial.value_or(context_.partial), factor,
                                    context_.pairing);
}

Status RopeObject::read_axes(RopeSpec& spec) const {
  std::optional<std::vector<std::int32_t>> sections = context_.sections;
  KVBLEND_RETURN_IF_ERROR(fields_.read("mrope_section", sections));
  if (!sections) return {};
  std::optional<bool> interleaved = context_.axes_interleaved;
  if (!context_.axes_interleaved) KVBLEND_RETURN_IF_ERROR(fields_.read("mrope_interleaved", interleaved));
  const auto order = *interleaved ? kvblend::AxisOrder::interleaved : kvblend::AxisOrder::sectioned;
  const Result<RopeSpec> with_axes = kvblend::with_axes(spec, *sections, order);
  if (!with_axes.ok()) return in_file(with_axes.status, fields_.path("mrope_section"));
  spec = with_axes.value;
  return {};
}

Result<LayerRope> RopeObject::read() {
  std::string type;
  std::string type_path;
  KVBLEND_RETURN_IF_ERROR(read_type(type, type_path));
  KVBLEND_RETURN_IF_ERROR(read_theta());

  LayerRope layer;
  Result<RopeSpec> spec;
  if (type == "proportional") {
    layer.family = "proportional";
    spec = proportional();
  } else {
    KVBLEND_RETURN_IF_ERROR(read_rotary_dim());
    if (type == "default" || type == "mrope") {
      layer.family = "plain";
      spec = kvblend::plain_rope(context_.head_dim, theta_, context_.pairing, rotary_dim_);
    } else if (type == "linear") {
      layer.family = "linear";
      spec = linear();
    } else if (type == "dynamic") {
      layer.family = "dynamic";
      spec = dynamic(layer.family);
    } else if (type == "longrope" || (context_.yarn_is_longrope && (type == "su" || type == "yarn"))) {
      layer.family = "longrope";
      spec = longrope();
    } else if (type == "yarn") {
      layer.family = "yarn";
      spec = yarn();
    } else if (type == "llama3") {
      layer.family = "llama3";
      spec = llama3();
    } else {
      return at_path(
          Status::error(StatusCode::unsupported, "\"%.40s\" is no rope type this reader knows", type.c_str()),
          type_path);
    }
  }
  if (!spec.ok()) {
    // A fault of the fields names its path already; one of the formula names the builder's parameter.
    const bool of_builder = std::strncmp(spec.status.where(), "rope ", 5) == 0;
    std::string object = fields_.prefix();
    if (!object.empty()) object.pop_back();
    return of_builder ? in_file(spec.status, object) : spec.status;
  }
  KVBLEND_RETURN_IF_ERROR(read_axes(spec.value));
  layer.spec = spec.value;
  return layer;
}

}  // namespace

Result<LayerRope> read_rope_object(const Fields& rope, const RopeContext& context) {
  return RopeObject(rope, context).read();
}

bool depends_on_length(const LayerRope& layer) {
  return std::strcmp(layer.family, "dynamic") == 0 || std::strcmp(layer.family, "longrope") == 0;
}

}  // namespace rope_config
