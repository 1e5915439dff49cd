// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Whether a signal that is known of each request tells which blends are far off: its rank correlation with the
// request's KL, and the 95th percentile of KL if the requests with the highest signal are blended at a raised ratio or
// recomputed in full, against no signal at the same mean cost.
#pragma once

#include <nlohmann/json.hpp>

namespace shootout {

// One entry a model, set of prompts, selector, ratio and signal.
[[nodiscard]] nlohmann::json gate_study(const nlohmann::json& items);
void print_gate_study(const nlohmann::json& study);

}  // namespace shootout
