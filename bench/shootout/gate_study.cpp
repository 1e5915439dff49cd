// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "gate_study.hpp"

#include <kvblend/plan/statistics.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <string>
#include <tuple>
#include <vector>

namespace shootout {

using nlohmann::json;

namespace {

constexpr double kBase = 0.15;        // the ratio that is gated
constexpr double kRaised = 0.30;      // what a high signal raises it to
constexpr double kShareRaised = 0.2;  // of requests
constexpr double kShareFull = 0.1;
constexpr double kTail = 0.05;

// A request's KL over the ratio, linear between those measured, 0 at 1.
class Curve {
 public:
  void add(double ratio, double kl) { points_[ratio] = kl; }
  [[nodiscard]] bool has(double ratio) const { return points_.count(ratio) > 0; }
  [[nodiscard]] double at(double ratio) const {
    const auto right = points_.lower_bound(ratio);
    if (right != points_.end() && right->first == ratio) return right->second;
    const auto left = std::prev(right);
    const double end = right == points_.end() ? 1.0 : right->first;
    const double kl = right == points_.end() ? 0.0 : right->second;
    return left->second + (kl - left->second) * (ratio - left->first) / (end - left->first);
  }

 private:
  std::map<double, double> points_;
};

struct Request {
  Curve curve;
  std::map<std::string, double> signals;
};

using Key = std::tuple<std::string, std::string, std::string>;  // model, prompts, selector

std::map<Key, std::vector<Request>> requests_of(const json& items) {
  std::map<Key, std::vector<Request>> out;
  for (const json& item : items) {
    std::map<std::string, Request> by_selector;
    for (const json& run : item["runs"]) {
      Request& request = by_selector[run["selector"].get<std::string>()];
      const auto ratio = run["ratio"].get<double>();
      request.curve.add(ratio, run["kl"].get<double>());
      if (std::abs(ratio - kBase) > 1e-9) continue;
      for (const char* signal : {"moved", "entropy", "spread"}) request.signals[signal] = run[signal].get<double>();
    }
    for (auto& [selector, request] : by_selector) {
      if (!request.curve.has(kBase) || !request.curve.has(kRaised)) continue;
      if (item.contains("signals")) {
        for (const auto& [name, value] : item["signals"].items()) request.signals[name] = value.get<double>();
      }
      const Key key(item["model"].get<std::string>(), item["prompts"].get<std::string>(), selector);
      out[key].push_back(request);
    }
  }
  return out;
}

// 95th percentile of KL where the `share` of requests with the highest signals run at `ratio` and the others at kBase.
double gated_tail(const std::vector<Request>& requests, const std::vector<double>& signals, double share,
                  double ratio) {
  std::vector<std::size_t> order(requests.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return signals[a] > signals[b]; });
  const auto raised = static_cast<std::size_t>(std::lround(share * static_cast<double>(order.size())));
  std::vector<double> kls;
  for (std::size_t i = 0; i < order.size(); ++i) kls.push_back(requests[order[i]].curve.at(i < raised ? ratio : kBase));
  return kvblend::upper_quantile(kls, kTail);
}

double flat_tail(const std::vector<Request>& requests, double share, double ratio) {
  const double n = static_cast<double>(requests.size());
  const double raised = std::round(share * n) / n;
  std::vector<double> kls;
  for (const Request& request : requests) kls.push_back(request.curve.at(kBase + raised * (ratio - kBase)));
  return kvblend::upper_quantile(kls, kTail);
}

}  // namespace

json gate_study(const json& items) {
  json out = json::array();
  for (auto& [key, requests] : requests_of(items)) {
    if (requests.size() < 8) continue;
    std::vector<double> kls;
    for (const Request& request : requests) kls.push_back(request.curve.at(kBase));
    std::map<std::string, std::vector<double>> signals;
    for (const Request& request : requests) {
      for (const auto& [name, value] : request.signals) signals[name].push_back(value);
    }
    signals["the KL itself"] = kls;  // what no signal can beat
    for (const auto& [name, values] : signals) {
      const auto correlation = kvblend::rank_correlation(values, kls);
      if (values.size() != kls.size() || !correlation.ok()) continue;
      out.push_back({{"model", std::get<0>(key)},
                     {"prompts", std::get<1>(key)},
                     {"selector", std::get<2>(key)},
                     {"ratio", kBase},
                     {"signal", name},
                     {"n", kls.size()},
                     {"rank_correlation", correlation.value.rho},
                     {"p", correlation.value.p_value},
                     {"kl_p95", kvblend::upper_quantile(kls, kTail)},
                     {"kl_p95_raised", gated_tail(requests, values, kShareRaised, kRaised)},
                     {"kl_p95_flat_at_that_cost", flat_tail(requests, kShareRaised, kRaised)},
                     {"kl_p95_recomputed", gated_tail(requests, values, kShareFull, 1.0)},
                     {"kl_p95_flat_at_that_cost_too", flat_tail(requests, kShareFull, 1.0)}});
    }
  }
  return out;
}

void print_gate_study(const json& study) {
  if (study.empty()) return;
  std::printf(
      "\nsignals of a request at %.0f %%: rank correlation with its KL (p); 95th percentile of KL as it is, with %.0f "
      "%% of"
      "\nrequests raised to %.0f %% by the signal | none raised, at the same cost; with %.0f %% recomputed | the "
      "same\n",
      100 * kBase, 100 * kShareRaised, 100 * kRaised, 100 * kShareFull);
  std::string before;
  for (const json& entry : study) {
    const std::string head = entry["model"].get<std::string>() + ", " + entry["prompts"].get<std::string>() + ", " +
                             entry["selector"].get<std::string>();
    if (head != before) std::printf("%s, %d prompts\n", head.c_str(), entry["n"].get<int>());
    before = head;
    std::printf("  %-16s %+.2f (%.3f)   %.3f   %.3f | %.3f   %.3f | %.3f\n", entry["signal"].get<std::string>().c_str(),
                entry["rank_correlation"].get<double>(), entry["p"].get<double>(), entry["kl_p95"].get<double>(),
                entry["kl_p95_raised"].get<double>(), entry["kl_p95_flat_at_that_cost"].get<double>(),
                entry["kl_p95_recomputed"].get<double>(), entry["kl_p95_flat_at_that_cost_too"].get<double>());
  }
}

}  // namespace shootout
