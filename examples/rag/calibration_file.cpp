// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <rag/calibration_file.hpp>

#include <nlohmann/json.hpp>

#include <array>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <stdexcept>
#include <utility>

namespace rag {

using namespace kvblend;
using nlohmann::json;

namespace {

constexpr int kVersion = 2;
const std::array<const char*, kSituations> kSituationKeys = {"kv_in_memory", "hide_loading", "no_stored_scores"};
const std::array<const char*, 3> kTimings = {"before_load", "during_pass", "after_probe"};

json limit_to_json(double limit) { return std::isfinite(limit) ? json(limit) : json(nullptr); }
double limit_of(const json& value) {
  return value.is_null() ? std::numeric_limits<double>::infinity() : value.get<double>();
}

json to_json(const SelectorQuality& selector) {
  json points = json::array();
  for (const KlPoint& p : selector.points) {
    points.push_back({{"ratio", p.ratio}, {"kl_mean", p.kl_mean}, {"kl_se", p.kl_se}, {"n", p.n}});
  }
  return {{"name", selector.name},
          {"timing", kTimings[static_cast<std::size_t>(selector.timing)]},
          {"needs_stored_scores", selector.needs_stored_scores},
          {"points", std::move(points)}};
}

json to_json(const SelectorDefault& d, const std::vector<SelectorQuality>& selectors) {
  if (d.selector < 0) return nullptr;  // do not blend
  return {
      {"selector", selectors[static_cast<std::size_t>(d.selector)].name},
      {"r_min", d.r_min},
      {"healthy",
       {{"mean", d.healthy.mean}, {"log_mean", d.healthy.log_mean}, {"log_sd", d.healthy.log_sd}, {"n", d.healthy.n}}}};
}

// As json's own: throws what read_calibration() catches.
SelectorQuality selector_of(const json& in) {
  SelectorQuality out;
  out.name = in.at("name").get<std::string>();
  const auto timing = in.at("timing").get<std::string>();
  std::size_t at = 0;
  while (at < kTimings.size() && timing != kTimings[at]) ++at;
  if (at == kTimings.size()) throw std::out_of_range("timing is " + timing);
  out.timing = static_cast<ScoreTiming>(at);
  out.needs_stored_scores = in.at("needs_stored_scores").get<bool>();
  for (const json& p : in.at("points")) {
    out.points.push_back({p.at("ratio").get<double>(), p.at("kl_mean").get<double>(), p.at("kl_se").get<double>(),
                          p.at("n").get<std::int32_t>()});
  }
  return out;
}

SelectorDefault default_of(const json& in, const std::vector<SelectorQuality>& selectors) {
  SelectorDefault out;
  if (in.is_null()) return out;
  const auto name = in.at("selector").get<std::string>();
  for (std::size_t i = 0; i < selectors.size(); ++i) {
    if (selectors[i].name == name) out.selector = static_cast<std::int32_t>(i);
  }
  if (out.selector < 0) throw std::out_of_range("a default is " + name + ", which was not measured");
  out.r_min = in.at("r_min").get<double>();
  const json& healthy = in.at("healthy");
  out.healthy.mean = healthy.at("mean").get<double>();
  out.healthy.log_mean = healthy.at("log_mean").get<double>();
  out.healthy.log_sd = healthy.at("log_sd").get<double>();
  out.healthy.n = healthy.at("n").get<std::int32_t>();
  return out;
}

CalibrationFile calibration_of(const json& in) {
  if (const int version = in.at("kvblend_calibration").get<int>(); version != kVersion) {
    throw std::out_of_range("is of version " + std::to_string(version) + ", not " + std::to_string(kVersion) +
                            ": calibrate again");
  }
  CalibrationFile out;
  out.host = in.at("host").get<std::string>();
  out.prompts = in.at("prompts").get<std::string>();
  if (const json& context = in.at("context"); !context.is_null()) out.context = context.get<std::vector<std::string>>();
  QualityCalibration& q = out.quality;
  q.model = in.at("model").get<std::string>();
  q.fingerprint = in.at("fingerprint").get<std::string>();
  q.target_kl = in.at("target_kl").get<double>();
  for (const json& selector : in.at("selectors")) q.selectors.push_back(selector_of(selector));
  for (std::size_t s = 0; s < kSituations; ++s) {
    q.defaults[s] = default_of(in.at("defaults").at(kSituationKeys[s]), q.selectors);
  }
  const json& prior = in.at("prior");
  if (!prior.is_null()) {
    const auto distance = prior.at("distance").get<std::vector<double>>();
    const auto value = prior.at("value").get<std::vector<double>>();
    const auto made = BinnedPrior::make(distance, value);
    if (!made.ok()) throw std::out_of_range(made.status.message());
    q.prior = made.value;
  }
  const json& cost = in.at("cost");
  q.cost = LinearCostModel(cost.at("fixed_s").get<double>(), cost.at("per_row_s").get<double>(),
                           cost.at("per_pair_s").get<double>(), cost.at("per_context_s").get<double>());
  q.signal = in.at("signal").at("name").get<std::string>();
  q.signal_limits.raise_at = limit_of(in.at("signal").at("raise_at"));
  q.signal_limits.recompute_at = limit_of(in.at("signal").at("recompute_at"));
  for (const auto& [name, speed] : in.at("tiers").items()) out.tiers.push_back({name, speed.get<double>()});
  return out;
}

}  // namespace

Status write_calibration(const CalibrationFile& calibration, const std::string& path) {
  const QualityCalibration& q = calibration.quality;
  json selectors = json::array();
  for (const SelectorQuality& selector : q.selectors) selectors.push_back(to_json(selector));
  json defaults = json::object();
  for (std::size_t s = 0; s < kSituations; ++s) defaults[kSituationKeys[s]] = to_json(q.defaults[s], q.selectors);
  json prior;
  if (q.prior.bins > 0) {
    prior = {{"distance", std::vector<double>(q.prior.distance.begin(), q.prior.distance.begin() + q.prior.bins)},
             {"value", std::vector<double>(q.prior.value.begin(), q.prior.value.begin() + q.prior.bins)}};
  }
  json tiers = json::object();
  for (const TierSpeed& tier : calibration.tiers) tiers[tier.name] = tier.bytes_per_s;
  const json out = {{"kvblend_calibration", kVersion},
                    {"model", q.model},
                    {"fingerprint", q.fingerprint},
                    {"host", calibration.host},
                    {"prompts", calibration.prompts},
                    {"context", calibration.context ? json(*calibration.context) : json(nullptr)},
                    {"target_kl", q.target_kl},
                    {"blend", q.blending_allowed()},
                    {"defaults", std::move(defaults)},
                    {"selectors", std::move(selectors)},
                    {"prior", std::move(prior)},
                    {"cost",
                     {{"fixed_s", q.cost.fixed_s},
                      {"per_row_s", q.cost.per_row_s},
                      {"per_pair_s", q.cost.per_pair_s},
                      {"per_context_s", q.cost.per_context_s}}},
                    {"tiers", std::move(tiers)},
                    {"signal",
                     {{"name", q.signal},
                      {"raise_at", limit_to_json(q.signal_limits.raise_at)},
                      {"recompute_at", limit_to_json(q.signal_limits.recompute_at)}}}};
  const std::string other = path + ".new";
  std::ofstream file(other, std::ios::trunc);
  file << out.dump(1) << '\n';
  file.close();
  if (!file.fail() && std::rename(other.c_str(), path.c_str()) == 0) return {};
  return Status::error(StatusCode::io_error, "cannot be written: %s", std::strerror(errno)).at("%.60s", path.c_str());
}

Result<CalibrationFile> read_calibration(const std::string& path) {
  std::ifstream file(path);
  if (!file) {
    return Status::error(StatusCode::io_error, "cannot be read: %s", std::strerror(errno)).at("%.60s", path.c_str());
  }
  try {
    CalibrationFile out = calibration_of(json::parse(file));
    const Status status = out.quality.validate();
    if (status.ok()) return out;
    return Status::error(StatusCode::corrupt, "%s: %s", status.where(), status.message()).at("%.60s", path.c_str());
  } catch (const std::exception& error) {
    return Status::error(StatusCode::corrupt, "%.150s", error.what()).at("%.60s", path.c_str());
  }
}

}  // namespace rag
