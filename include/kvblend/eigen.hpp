// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Umbrella: the CPU back end. Needs Eigen (target kvblend::eigen).
#pragma once

#include <kvblend/eigen/backend.hpp>
