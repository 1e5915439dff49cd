// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "results.hpp"

#include "gate_study.hpp"

#include <kvblend/plan/quality.hpp>
#include <kvblend/plan/situation.hpp>
#include <kvblend/plan/statistics.hpp>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <span>
#include <tuple>
#include <utility>

namespace shootout {

using kvblend::Status;
using kvblend::StatusCode;
using nlohmann::json;

namespace {

const char* const kReference = "key_value_deviation";  // what paired differences are to
const char* const kAlone = ", alone";                  // behind the name of prompts whose passages were encoded so

// The default of each situation, as chosen on the choosing half, until a calibration of the model says otherwise.
// `drifts`: whether the same was measured with drift, which then is it.
json default_for(const std::string& selector, bool drifts) {
  const auto is = [&](const std::string& name) {
    return selector == "drift(" + name + ")" || (selector == name && !drifts);
  };
  if (is("attention_value_mass")) return to_string(kvblend::Situation::kv_in_memory);
  if (is("floor(stored_score)")) return to_string(kvblend::Situation::hide_loading);
  if (selector == "first_k") return to_string(kvblend::Situation::no_stored_scores);
  return nullptr;
}

bool same_ratio(double a, double b) { return std::abs(a - b) < 1e-9; }

std::string text_of(const json& value) { return value.is_string() ? value.get<std::string>() : ""; }

// The runs of one model, set of prompts, selector and ratio, by the prompt's number.
using GroupKey = std::tuple<std::string, std::string, std::string, double>;
using Group = std::map<int, const json*>;

std::map<GroupKey, Group> groups_of(const json& items) {
  std::map<GroupKey, Group> groups;
  for (const json& item : items) {
    for (const json& run : item["runs"]) {
      const GroupKey key(text_of(item["model"]), text_of(item["prompts"]), text_of(run["selector"]),
                         run["ratio"].get<double>());
      groups[key][item["id"].get<int>()] = &run;
    }
  }
  return groups;
}

// Whether the same selector was measured with drift on all prompts and at all ratios that it was measured on without.
bool drifts(const std::map<GroupKey, Group>& groups, const GroupKey& key) {
  const auto& [model, prompts, selector, unused] = key;
  for (const auto& [other, runs] : groups) {
    if (std::tie(std::get<0>(other), std::get<1>(other), std::get<2>(other)) != std::tie(model, prompts, selector))
      continue;
    const auto found = groups.find(GroupKey(model, prompts, "drift(" + selector + ")", std::get<3>(other)));
    if (found == groups.end()) return false;
    for (const auto& run : runs) {
      if (!found->second.contains(run.first)) return false;
    }
  }
  return true;
}

std::vector<double> values(const Group& group, const char* field) {
  std::vector<double> out;
  for (const auto& [id, run] : group) out.push_back((*run)[field].get<double>());
  return out;
}

double mean(const std::vector<double>& numbers) {
  double sum = 0;
  for (const double number : numbers) sum += number;
  return numbers.empty() ? 0 : sum / static_cast<double>(numbers.size());
}

// KL of a selector and of the reference, prompt by prompt.
struct Pairs {
  std::vector<int> ids;
  std::vector<double> own;
  std::vector<double> reference;

  // Of the prompts that both have.
  Pairs(const Group& group, const Group& other) {
    for (const auto& [id, run] : group) {
      const auto found = other.find(id);
      if (found == other.end()) continue;
      ids.push_back(id);
      own.push_back((*run)["kl"].get<double>());
      reference.push_back((*found->second)["kl"].get<double>());
    }
  }
  // Of several models: a prompt is one pair, the sums over those models, as what they make of it is not independent.
  explicit Pairs(const std::vector<Pairs>& models) {
    std::map<int, std::pair<double, double>> sums;
    for (const Pairs& model : models) {
      for (std::size_t i = 0; i < model.ids.size(); ++i) {
        sums[model.ids[i]].first += model.own[i];
        sums[model.ids[i]].second += model.reference[i];
      }
    }
    for (const auto& [id, sum] : sums) {
      ids.push_back(id);
      own.push_back(sum.first);
      reference.push_back(sum.second);
    }
  }
  [[nodiscard]] json compared() const {
    const auto comparison = kvblend::compare(own, reference);
    if (own.empty() || !comparison.ok()) return nullptr;
    const kvblend::PairedComparison& c = comparison.value;
    return {{"difference", c.mean_difference},
            {"se", c.standard_error},
            {"wins", c.wins},
            {"losses", c.losses},
            {"p", c.p_value},
            {"n", own.size()}};
  }
};

}  // namespace

Contestant contestant(const std::string& name) {
  const std::string gradual = "gradual_";
  if (name == "none") return {name, "first_k", "flat"};
  if (name.rfind(gradual, 0) == 0) return {name, name.substr(gradual.size()), "gradual"};
  return {name, name, "flat"};
}

Status Results::open(const std::string& path, const json& settings, bool restart) {
  path_ = path;
  json_ = {{"settings", settings}, {"summary", json::array()}, {"items", json::array()}, {"priors", json::object()}};
  std::ifstream file(path);
  if (restart || path.empty() || !file) return {};
  json found = json::parse(file, nullptr, false);
  if (found.is_discarded() || !found.is_object() || !found.contains("settings") || !found.contains("items")) {
    return Status::error(StatusCode::corrupt, "is no result of the shoot-out; --restart replaces it")
        .at("%.60s", path.c_str());
  }
  if (found["settings"] != settings) {
    return Status::error(StatusCode::mismatch, "was measured with %.80s, not %.80s; --restart replaces it",
                         found["settings"].dump().c_str(), settings.dump().c_str())
        .at("%.60s", path.c_str());
  }
  json_ = std::move(found);
  return {};
}

const json* Results::find(const ItemKey& key) const {
  for (const json& item : json_["items"]) {
    if (item["model"] == key.model && item["prompts"] == key.prompts && item["id"] == key.id) return &item;
  }
  return nullptr;
}

void Results::forget_other(const ItemKey& key, const std::string& question) {
  std::erase_if(json_["items"].get_ref<json::array_t&>(), [&](const json& item) {
    return item["model"] == key.model && item["prompts"] == key.prompts && item["id"] == key.id &&
           item["question"] != question;
  });
}

json& Results::item(const ItemKey& key) {
  for (json& item : json_["items"]) {
    if (item["model"] == key.model && item["prompts"] == key.prompts && item["id"] == key.id) return item;
  }
  json_["items"].push_back({{"model", key.model}, {"prompts", key.prompts}, {"id", key.id}, {"runs", json::array()}});
  return json_["items"].back();
}

bool Results::has(const ItemKey& key, const std::string& selector, double ratio) const {
  const json* item = find(key);
  if (item == nullptr) return false;
  const json& runs = (*item)["runs"];
  return std::any_of(runs.begin(), runs.end(), [&](const json& run) {
    return run["selector"] == selector && same_ratio(run["ratio"].get<double>(), ratio);
  });
}

void Results::add(json& item, const std::string& selector, double ratio, const rag::Outcome& o) {
  const double spread = o.seen.mean != 0 ? o.seen.sd / std::abs(o.seen.mean) : 0;
  item["runs"].push_back({{"selector", selector},
                          {"ratio", ratio},
                          {"kl", o.kl},
                          {"kl_first", o.kl_first},
                          {"kl_worst", o.kl_worst},
                          {"top1", o.top1},
                          {"correct", o.correct},
                          {"rows", o.run.rows_recomputed},
                          {"rows_computed", o.run.rows_computed},
                          {"flops", o.flops},
                          {"bytes_before", o.bytes_before},
                          {"seconds", o.seconds},
                          {"select_s", o.run.select_s},
                          {"moved", o.moved},
                          {"entropy", o.entropy},
                          {"spread", spread}});
}

bool Results::prior(const std::string& model, kvblend::BinnedPrior& out) const {
  const auto found = json_["priors"].find(model);
  if (found == json_["priors"].end()) return false;
  const auto distance = (*found)["distance"].get<std::vector<double>>();
  const auto value = (*found)["value"].get<std::vector<double>>();
  const auto prior = kvblend::BinnedPrior::make(distance, value);
  out = prior.value;
  return prior.ok();
}

void Results::set_prior(const std::string& model, const kvblend::BinnedPrior& prior, const std::string& source) {
  const auto bins = static_cast<std::size_t>(prior.bins);
  json_["priors"][model] = {
      {"distance", std::vector<double>(prior.distance.begin(), prior.distance.begin() + prior.bins)},
      {"value", std::vector<double>(prior.value.begin(), prior.value.begin() + prior.bins)},
      {"bins", bins},
      {"from", source}};
}

Status Results::write() {
  if (path_.empty()) return {};
  const std::string other = path_ + ".new";
  {
    std::ofstream file(other, std::ios::trunc);
    file << json_.dump(1) << '\n';
    file.close();
    if (file.fail()) {
      return Status::error(StatusCode::io_error, "cannot be written: %s", std::strerror(errno))
          .at("%.60s", other.c_str());
    }
  }
  if (std::rename(other.c_str(), path_.c_str()) == 0) return {};
  return Status::error(StatusCode::io_error, "cannot be replaced: %s", std::strerror(errno)).at("%.60s", path_.c_str());
}

void Results::summarise() {
  json& summary = json_["summary"] = json::array();
  const auto groups = groups_of(json_["items"]);
  using OfAllModels = std::map<std::tuple<std::string, std::string, double>, std::vector<Pairs>>;
  OfAllModels together;
  OfAllModels to_alone;
  for (const auto& [key, group] : groups) {
    const auto& [model, prompts, selector, ratio] = key;
    const std::vector<double> kls = values(group, "kl");
    const auto point = kvblend::kl_point(ratio, kls);
    const json usual = default_for(selector, drifts(groups, key));
    // Not every model has the same one, so they are put together under the situation's name too.
    std::vector<std::string> names = {selector};
    if (usual.is_string()) names.push_back("default, " + usual.get<std::string>());
    json entry = {{"model", model},
                  {"prompts", prompts},
                  {"selector", selector},
                  {"ratio", ratio},
                  {"kl_mean", point.value.kl_mean},
                  {"kl_se", point.value.kl_se},
                  {"kl_first", mean(values(group, "kl_first"))},
                  {"kl_p95", kvblend::upper_quantile(kls, 0.05)},
                  {"top1_agreement", mean(values(group, "top1"))},
                  {"n", kls.size()},
                  {"default", usual},
                  {"rows", mean(values(group, "rows"))},
                  {"bytes_before", mean(values(group, "bytes_before"))}};
    double flops = 0;
    int asked = 0;
    int correct = 0;
    for (const json& item : json_["items"]) {
      if (item["model"] != model || item["prompts"] != prompts) continue;
      const auto run = group.find(item["id"].get<int>());
      if (run == group.end()) continue;
      flops += (*run->second)["flops"].get<double>() / item["full_flops"].get<double>();
      if (!item["full_correct"].get<bool>()) continue;
      ++asked;
      correct += (*run->second)["correct"].get<bool>() ? 1 : 0;
    }
    entry["flops_share"] = flops / static_cast<double>(kls.size());  // of full recompute's
    entry["full_correct"] = asked;                                   // questions that full recompute answers
    entry["correct_of_these"] = correct;
    const auto reference = groups.find(GroupKey(model, prompts, kReference, ratio));
    entry["to_key_value_deviation"] = nullptr;
    if (reference != groups.end()) {
      const Pairs pairs(group, reference->second);
      entry["to_key_value_deviation"] = pairs.compared();
      for (const std::string& name : names) {
        if (selector != kReference) together[{prompts, name, ratio}].push_back(pairs);
      }
    }
    const auto paper = groups.find(GroupKey(model, prompts + kAlone, kReference, ratio));
    for (const std::string& name : names) {
      if (paper != groups.end()) to_alone[{prompts, name, ratio}].emplace_back(group, paper->second);
    }
    summary.push_back(std::move(entry));
  }
  json& all_models = json_["together"] = json::array();
  const auto add = [&](const OfAllModels& all, const char* encoded) {
    for (const auto& [key, models] : all) {
      all_models.push_back({{"prompts", std::get<0>(key)},
                            {"selector", std::get<1>(key)},
                            {"ratio", std::get<2>(key)},
                            {"encoded", encoded},
                            {"to_key_value_deviation", Pairs(models).compared()}});
    }
  };
  add(together, "as it");
  add(to_alone, "alone");
  json_["gate"] = gate_study(json_["items"]);
  summarise_groups();
}

// By the group that the prompt file puts a prompt in, such as where the answer stands.
void Results::summarise_groups() {
  std::map<std::tuple<GroupKey, std::string>, json> groups;
  for (const json& item : json_["items"]) {
    const std::string group = item.contains("group") ? text_of(item["group"]) : "";
    if (group.empty()) continue;
    for (const json& run : item["runs"]) {
      const GroupKey key(text_of(item["model"]), text_of(item["prompts"]), text_of(run["selector"]),
                         run["ratio"].get<double>());
      json& entry = groups[{key, group}];
      if (entry.is_null()) {
        entry = {{"model", item["model"]},
                 {"prompts", item["prompts"]},
                 {"group", group},
                 {"selector", run["selector"]},
                 {"ratio", run["ratio"]},
                 {"kl_mean", 0.0},
                 {"n", 0},
                 {"full_correct", 0},
                 {"correct_of_these", 0}};
      }
      const int n = entry["n"].get<int>() + 1;
      const auto before = entry["kl_mean"].get<double>();
      entry["n"] = n;
      entry["kl_mean"] = before + (run["kl"].get<double>() - before) / n;
      if (!item["full_correct"].get<bool>()) continue;
      entry["full_correct"] = entry["full_correct"].get<int>() + 1;
      entry["correct_of_these"] = entry["correct_of_these"].get<int>() + (run["correct"].get<bool>() ? 1 : 0);
    }
  }
  json& out = json_["groups"] = json::array();
  for (auto& [key, entry] : groups) out.push_back(std::move(entry));
}

void Results::print_together() const {
  if (!json_.contains("together") || json_["together"].empty()) return;
  std::printf(
      "\nall models together, a prompt's KL summed over them, paired to %s at the same ratio, of passages encoded\n"
      "as the selector's own or alone: wins:losses, p\n",
      kReference);
  for (const json& entry : json_["together"]) {
    const json& pair = entry["to_key_value_deviation"];
    if (pair.is_null()) continue;
    std::printf("%-20s %-42s %3.0f %%  %-5s %3d:%-3d  p %.2g\n", text_of(entry["prompts"]).c_str(),
                text_of(entry["selector"]).c_str(), 100 * entry["ratio"].get<double>(),
                text_of(entry["encoded"]).c_str(), pair["wins"].get<int>(), pair["losses"].get<int>(),
                pair["p"].get<double>());
  }
}

void Results::print_groups() const {
  if (!json_.contains("groups") || json_["groups"].empty()) return;
  std::printf("\nby group: KL, and of the questions that full recompute answers how many the blend does\n");
  for (const json& entry : json_["groups"]) {
    std::printf("%-24s %-20s %-36s %3.0f %%  %.4f  %d of %d  (n %d)\n", text_of(entry["model"]).substr(0, 24).c_str(),
                text_of(entry["group"]).c_str(), text_of(entry["selector"]).c_str(), 100 * entry["ratio"].get<double>(),
                entry["kl_mean"].get<double>(), entry["correct_of_these"].get<int>(), entry["full_correct"].get<int>(),
                entry["n"].get<int>());
  }
}

void Results::print() const {
  std::set<std::pair<std::string, std::string>> parts;
  std::set<double> ratios;
  for (const json& entry : json_["summary"]) {
    parts.insert({text_of(entry["model"]), text_of(entry["prompts"])});
    if (entry["ratio"].get<double>() > 0) ratios.insert(entry["ratio"].get<double>());
  }
  for (const auto& [model, prompts] : parts) {
    std::map<std::string, std::map<double, const json*>> rows;
    for (const json& entry : json_["summary"]) {
      if (entry["model"] == model && entry["prompts"] == prompts)
        rows[text_of(entry["selector"])][entry["ratio"].get<double>()] = &entry;
    }
    std::printf("\n%s, %s: KL to full recompute, nats a token (standard error)\n%-42s", model.c_str(), prompts.c_str(),
                "selector");
    for (const double ratio : ratios) std::printf(" %13.0f %%", 100 * ratio);
    std::printf("   n\n");
    for (const auto& [selector, entries] : rows) {
      std::printf("%-42s", selector.c_str());
      for (const double ratio : ratios) {
        const auto found = entries.find(selector == "none" ? 0.0 : ratio);
        if (found == entries.end()) {
          std::printf(" %15s", "");
        } else {
          std::printf("  %.4f (%.4f)", (*found->second)["kl_mean"].get<double>(),
                      (*found->second)["kl_se"].get<double>());
        }
      }
      const json& first = *entries.begin()->second;
      std::printf(" %3d  %s\n", first["n"].get<int>(), text_of(first["default"]).c_str());
    }
    std::printf("\npaired to %s at the same ratio: difference (se), wins:losses, p of the sign test\n", kReference);
    for (const auto& [selector, entries] : rows) {
      for (const auto& [ratio, entry] : entries) {
        const json& pair = (*entry)["to_key_value_deviation"];
        if (pair.is_null() || selector == kReference) continue;
        std::printf("%-42s %4.0f %%  %+.4f (%.4f)  %2d:%-2d  p %.4f   FLOPs %.3f of full, %.1f MB before the choice\n",
                    selector.c_str(), 100 * ratio, pair["difference"].get<double>(), pair["se"].get<double>(),
                    pair["wins"].get<int>(), pair["losses"].get<int>(), pair["p"].get<double>(),
                    (*entry)["flops_share"].get<double>(), (*entry)["bytes_before"].get<double>() / 1e6);
      }
    }
  }
  print_together();
  print_groups();
  if (json_.contains("gate")) print_gate_study(json_["gate"]);
}

}  // namespace shootout
