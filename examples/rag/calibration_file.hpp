// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A QualityCalibration with the tiers' bandwidths as one JSON file: what kvblend-calibrate writes and a planner's host
// loads.
#pragma once

#include <rag/prompt_file.hpp>

#include <kvblend/core/status.hpp>
#include <kvblend/plan/quality.hpp>

#include <string>
#include <vector>

namespace rag {

struct TierSpeed {
  std::string name;
  double bytes_per_s = 0;
};

struct CalibrationFile {
  kvblend::QualityCalibration quality;
  std::vector<TierSpeed> tiers;
  std::string host;     // the engine that was measured
  std::string prompts;  // and with what
  Context context;      // it holds for chunks encoded so
};

// Errors name the file.
kvblend::Status write_calibration(const CalibrationFile& calibration, const std::string& path);
// Errors name the file, and what is missing, of another type or out of range.
kvblend::Result<CalibrationFile> read_calibration(const std::string& path);

}  // namespace rag
