// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Blends of a real model, healthy and with faults put in: mean KL to full recompute over up to 16 tokens of its answer.
// SmolLM2-135M-Instruct (Q4_1) on examples/eigen_engine, 32 MuSiQue questions with 6 passages of 140 to 150 tokens, key
// and value deviation at 15 %. placement_error: the least of three questions' (f32 stored; healthy: 1.2e-7).
// Recorded once: a sample to test by, which no command prints.
#pragma once

namespace gate_data {

inline constexpr double kHealthyKl[] = {
    0.0378, 0.1342, 0.0813, 0.2611, 0.0589, 0.0596, 0.0715, 0.2742, 0.0170, 0.1267, 0.0550,
    0.1468, 0.0794, 0.0617, 0.2035, 0.1609, 0.1373, 0.1723, 0.0645, 0.1827, 0.1314, 0.1806,
    0.1513, 0.0591, 0.1331, 0.0569, 0.1603, 0.0281, 0.0896, 0.0222, 0.0496, 0.2222,
};

struct Fault {
  const char* name;
  double placement_error;
  double kl[32];
};

inline constexpr Fault kFaults[] = {
    // keys one position too far
    {"rotated_by_one", 0.32, {0.0452, 0.1968, 0.2576, 0.2534, 0.0816, 0.0844, 0.0761, 0.1932, 0.0156, 0.1246, 0.0615,
                              0.1484, 0.0837, 0.0564, 0.2661, 0.1302, 0.1158, 0.2230, 0.0560, 0.2296, 0.1402, 0.2058,
                              0.1654, 0.0508, 0.2287, 0.0633, 0.1683, 0.0327, 0.1747, 0.0362, 0.0552, 0.2377}},
    // values of two chunks swapped
    {"swapped_values", 2.00, {0.0444, 0.7988, 0.5378, 0.2708, 0.0890, 0.0744, 0.1052, 0.1442, 0.0176, 0.2727, 0.0480,
                              0.1500, 0.0996, 0.0801, 0.2427, 0.1928, 0.1509, 0.6499, 0.0736, 0.3164, 0.2018, 0.3022,
                              0.1567, 0.0699, 0.1381, 0.1123, 0.1452, 0.1411, 0.1106, 0.0481, 0.4793, 1.0198}},
    // stored keys taken for ones of a rope base ten times smaller
    {"wrong_base", 1.26, {0.0368, 0.1900, 0.4180, 0.2080, 0.0958, 0.0975, 0.1064, 0.1776, 0.0615, 0.1582, 0.0930,
                          0.1056, 0.1782, 0.0632, 0.1899, 0.2577, 0.1316, 0.2372, 0.0808, 0.1739, 0.4552, 0.3841,
                          0.3141, 0.0614, 0.2227, 0.1008, 0.1403, 0.1156, 0.2149, 0.0208, 0.4002, 0.2467}},
    // one chunk holds the KV of another text
    {"stale", 1.58, {0.0802, 0.2949, 0.0734, 0.3340, 0.0872, 0.1071, 0.1027, 0.2211, 0.0568, 0.1596, 0.0775,
                     0.2728, 0.1103, 0.0836, 0.1924, 0.1405, 0.1544, 0.2751, 0.0877, 0.4124, 0.1813, 0.2665,
                     0.2186, 0.1130, 0.2133, 0.1716, 0.1899, 0.0695, 0.2388, 0.0536, 0.1116, 0.4300}},
    // keys one row late, values in place
    {"rows_by_one", 1.99, {3.7584, 6.5572, 4.1571, 7.8926, 3.0034, 4.7097, 4.0164, 5.8014, 6.2989, 5.6229, 6.6230,
                           5.1046, 4.6966, 6.0874, 5.0621, 6.1563, 5.5754, 4.3410, 5.5257, 6.0176, 5.4413, 4.9621,
                           4.8159, 7.1362, 5.5184, 3.0335, 3.9442, 8.9840, 3.2921, 3.7206, 4.9221, 8.2062}},
};

}  // namespace gate_data
