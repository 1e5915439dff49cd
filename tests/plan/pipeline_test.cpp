// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The pipeline's formula against a small discrete event simulation.
#include <doctest/doctest.h>

#include <kvblend/plan/pipeline.hpp>

#include <algorithm>
#include <cstddef>
#include <queue>
#include <random>
#include <vector>

using namespace kvblend;

namespace {

std::vector<LayerPlan> make_layers(const std::vector<double>& load, const std::vector<double>& recompute) {
  std::vector<LayerPlan> layers(load.size());
  for (std::size_t l = 0; l < load.size(); ++l) {
    layers[l].load_s = load[l];
    layers[l].recompute_s = recompute[l];
  }
  return layers;
}

// Two machines that start whatever may start, at every event: a loader with `room` buffers (0: no limit), a compute.
double simulate(const std::vector<double>& load, const std::vector<double>& recompute, std::size_t room,
                double compute_from) {
  struct Event {
    double time;
    bool is_load;
    bool operator>(const Event& other) const { return time > other.time; }
  };
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events;
  std::size_t loads_started = 0;
  std::size_t loads_done = 0;
  std::size_t runs_started = 0;
  std::size_t runs_done = 0;
  bool loading = false;
  bool running = false;
  bool open = compute_from <= 0.0;
  double now = 0.0;
  if (!open) events.push({compute_from, false});  // a run that ends when compute may begin
  const std::size_t n = load.size();
  while (true) {
    if (!loading && loads_started < n && (room == 0 || loads_started < runs_done + room)) {
      events.push({now + load[loads_started++], true});
      loading = true;
    }
    if (open && !running && runs_started < loads_done) {
      events.push({now + recompute[runs_started++], false});
      running = true;
    }
    if (events.empty()) return now;
    const Event event = events.top();
    events.pop();
    now = event.time;
    if (event.is_load) {
      ++loads_done;
      loading = false;
    } else if (!open) {
      open = true;
    } else {
      ++runs_done;
      running = false;
    }
  }
}

}  // namespace

TEST_CASE("equal layers: one load, then the slower of the two for each but the last, then one recompute") {
  for (const double load : {0.5, 1.0, 2.0}) {
    std::vector<LayerPlan> layers = make_layers(std::vector<double>(30, load), std::vector<double>(30, 1.0));
    const double expected = load + 29.0 * (std::max)(load, 1.0) + 1.0;
    CHECK(run_pipeline(layers, 0) == doctest::Approx(expected).epsilon(1e-12));
    CHECK(run_pipeline(layers, 2) == doctest::Approx(expected).epsilon(1e-12));
    CHECK(run_pipeline(layers, 1) == doctest::Approx(30.0 * (load + 1.0)).epsilon(1e-12));
    CHECK(layers[0].ready_s == load);
  }
  CHECK(run_pipeline({}, 0) == 0.0);
  CHECK(run_pipeline({}, 3, 5.0) == 0.0);
}

TEST_CASE("any layers: the same as simulating the two machines") {
  const unsigned seed = 5;
  INFO("seed ", seed);
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  for (int round = 0; round < 2000; ++round) {
    const std::size_t n = 1 + random() % 40;
    std::vector<double> load(n);
    std::vector<double> recompute(n);
    for (double& x : load) x = uniform(random) * (random() % 4 == 0 ? 5.0 : 1.0);
    for (double& x : recompute) x = uniform(random) * (random() % 6 == 0 ? 5.0 : 1.0);
    const std::size_t staging = random() % 5;
    const double from = staging == 0 && round % 3 == 0 ? 10.0 * uniform(random) : 0.0;
    CAPTURE(n);
    CAPTURE(staging);
    CAPTURE(from);
    std::vector<LayerPlan> layers = make_layers(load, recompute);
    const double time = run_pipeline(layers, static_cast<std::int32_t>(staging), from);
    REQUIRE(time == doctest::Approx(simulate(load, recompute, staging, from)).epsilon(1e-12));
    if (staging == 0 && from <= 0.0) {
      // The longest path: load up to some layer, recompute from it on.
      double longest = 0.0;
      for (std::size_t j = 0; j < n; ++j) {
        double path = 0.0;
        for (std::size_t l = 0; l <= j; ++l) path += load[l];
        for (std::size_t l = j; l < n; ++l) path += recompute[l];
        longest = (std::max)(longest, path);
      }
      REQUIRE(time == doctest::Approx(longest).epsilon(1e-12));
    }
  }
}
