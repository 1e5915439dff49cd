// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// All of kvblend that needs the standard library alone. eigen.hpp and store.hpp add the parts that need more.
#pragma once

#include <kvblend/codec/hadamard.hpp>
#include <kvblend/codec/scaled.hpp>
#include <kvblend/codec/with_codec.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/fuse/blend.hpp>
#include <kvblend/fuse/pass_blend.hpp>
#include <kvblend/memory/engines.hpp>
#include <kvblend/memory/layouts.hpp>
#include <kvblend/plan/calibration.hpp>
#include <kvblend/plan/gate.hpp>
#include <kvblend/plan/planner.hpp>
#include <kvblend/plan/quality.hpp>
#include <kvblend/prompt/prompt.hpp>
#include <kvblend/rope/builders.hpp>
#include <kvblend/rope/scaling.hpp>
#include <kvblend/rope/shifter.hpp>
#include <kvblend/select/budgets.hpp>
#include <kvblend/select/chunk_rules.hpp>
#include <kvblend/select/scores.hpp>
#include <kvblend/select/selector.hpp>
