// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What the shoot-out measured: a JSON file that a stopped run continues from, and the tables made of it.
#pragma once

#include <rag/trial.hpp>

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace shootout {

// A way to choose rows, by the name that it has in the results: a selector of rag/selectors.hpp, that with "gradual_"
// before it, or "none" for full reuse.
struct Contestant {
  std::string name;
  std::string selector;
  std::string schedule;
};
[[nodiscard]] Contestant contestant(const std::string& name);

// One prompt of one model, which all runs of it are under.
struct ItemKey {
  std::string model;
  std::string prompts;  // name of the file, without .json
  std::int32_t id = 0;  // from 1 on, in the file
};

class Results {
 public:
  // Takes over what the file holds, if it was measured with the same settings; errors say which differ. A file that is
  // not there is empty.
  kvblend::Status open(const std::string& path, const nlohmann::json& settings, bool restart);

  // Drops what the item has if it is of another question: prompts are changed at times, and keep their numbers.
  void forget_other(const ItemKey& key, const std::string& question);
  // The item's entry, a new one if there is none.
  nlohmann::json& item(const ItemKey& key);
  [[nodiscard]] bool has(const ItemKey& key, const std::string& selector, double ratio) const;
  static void add(nlohmann::json& item, const std::string& selector, double ratio, const rag::Outcome& outcome);

  [[nodiscard]] bool prior(const std::string& model, kvblend::BinnedPrior& out) const;
  void set_prior(const std::string& model, const kvblend::BinnedPrior& prior, const std::string& source);

  // Writes another file and moves it into place, so that no stop leaves half of one.
  kvblend::Status write();
  // Means, paired differences to key_value_deviation, signals and what a gate on them would save, of the models and
  // prompts that there are.
  void summarise();
  void print() const;

 private:
  void summarise_groups();
  void print_together() const;
  void print_groups() const;
  [[nodiscard]] const nlohmann::json* find(const ItemKey& key) const;

  std::string path_;
  nlohmann::json json_;
};

}  // namespace shootout
