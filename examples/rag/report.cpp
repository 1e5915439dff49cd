// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <rag/report.hpp>

#include <nlohmann/json.hpp>

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <utility>

namespace rag {

using kvblend::Status;
using kvblend::StatusCode;

namespace {

// An answer as one line of at most `width` bytes, cut between characters.
std::string one_line(const std::string& text, std::size_t width) {
  std::string line;
  for (const char c : text) line += c == '\n' || c == '\r' || c == '\t' ? ' ' : c;
  if (line.size() <= width) return line;
  std::size_t end = width - 3;
  while (end > 0 && (static_cast<unsigned char>(line[end]) & 0xc0u) == 0x80u) --end;
  return line.substr(0, end) + "...";
}

void print_means(const Report& report) {
  std::map<std::string, std::pair<double, double>> sums;  // seconds, KL by mode
  double own_s = 0;                                       // kvblend's part of the blends
  for (const Run& run : report.runs) {
    sums[run.mode].first += run.ttft_s;
    sums[run.mode].second += run.kl_vs_full;
    if (run.mode == "blend") own_s += run.shift_s + run.score_s + run.select_s + run.merge_s;
  }
  const auto items = static_cast<double>(report.runs.size()) / 4.0;
  const double full = sums["full"].first;
  const double reuse_kl = sums["reuse"].second;
  std::printf("\nmean over %d item%s\n", static_cast<int>(items), items > 1 ? "s" : "");
  for (const char* mode : {"full", "prefix", "reuse", "blend"}) {
    const auto [seconds, kl] = sums[mode];
    std::printf("  %-7s TTFT %7.3f s, %5.2fx faster than full recompute, KL %.4f", mode, seconds / items,
                full / seconds, kl / items);
    if (reuse_kl > 0) std::printf(", %.2f of full reuse's", kl / reuse_kl);
    std::printf("\n");
  }
  std::printf("  of the blend's TTFT %.1f %% is kvblend's own work: shift, score, select, merge\n",
              100 * own_s / sums["blend"].first);
}

}  // namespace

void print_table(const Report& report) {
  std::printf("\n%s, %d threads. TTFT in seconds, all-in; KL to full recompute in nats a token.\n",
              report.model.c_str(), report.threads);
  std::printf("Passages encoded behind: %s\n", report.context.c_str());
  if (!report.note.empty()) std::printf("%s: %s\n", report.host.c_str(), report.note.c_str());
  std::printf("\n");
  std::printf(
      "item mode    tokens recomputed   TTFT  speedup  load  shift score+select engine     KL  top-1  answer\n");
  double full_s = 0;
  for (const Run& run : report.runs) {
    if (run.mode == "full") full_s = run.ttft_s;
    std::printf("%4d %-7s %6d %10d %6.3f %7.2fx %5.3f %6.3f %12.3f %6.3f %6.4f %6.2f  %s\n", run.item, run.mode.c_str(),
                run.tokens, run.rows_recomputed, run.ttft_s, full_s / run.ttft_s, run.load_s, run.shift_s + run.merge_s,
                run.score_s + run.select_s, run.recompute_s, run.kl_vs_full, run.top1_agreement,
                one_line(run.answer, 48).c_str());
  }
  print_means(report);
  for (const Run& run : report.runs) {
    if (run.mode != "blend" || run.ratio == 0) continue;
    std::printf("item %d blended by %s at %.1f %%\n", run.item, run.selector.c_str(), 100 * run.ratio);
  }
}

Status check_writable(const std::string& path) {
  const bool existed = ::access(path.c_str(), F_OK) == 0;
  if (std::ofstream(path, std::ios::binary | std::ios::app)) {
    if (!existed) ::unlink(path.c_str());
    return {};
  }
  return Status::error(StatusCode::io_error, "cannot write %.150s", path.c_str()).at("json");
}

Status write_json(const Report& report, const std::string& path) {
  nlohmann::ordered_json json;
  json["model"] = report.model;
  json["host"] = report.host;
  if (!report.note.empty()) json["note"] = report.note;
  json["context"] = report.context;
  json["threads"] = report.threads;
  json["tokens"] = report.tokens;
  for (const Run& run : report.runs) {
    json["runs"].push_back({{"item", run.item},
                            {"mode", run.mode},
                            {"ratio", run.ratio},
                            {"selector", run.selector},
                            {"tokens", run.tokens},
                            {"ttft_s", run.ttft_s},
                            {"load_s", run.load_s},
                            {"shift_s", run.shift_s},
                            {"score_s", run.score_s},
                            {"select_s", run.select_s},
                            {"merge_s", run.merge_s},
                            {"recompute_s", run.recompute_s},
                            {"rows_recomputed", run.rows_recomputed},
                            {"kl_vs_full", run.kl_vs_full},
                            {"top1_agreement", run.top1_agreement},
                            {"answer", run.answer}});
  }
  std::ofstream stream(path, std::ios::binary);
  stream << json.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << '\n';
  stream.close();
  if (stream) return {};
  return Status::error(StatusCode::io_error, "cannot write %.150s", path.c_str()).at("json");
}

Progress::Progress(int steps) : steps_(std::max(steps, 1)), terminal_(::isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  if (terminal_) std::fprintf(stderr, "\r\033[K");
}

void Progress::step(const std::string& what) {
  const int percent = 100 * std::min(done_, steps_) / steps_;
  if (terminal_) {
    std::string bar(30, '.');
    std::fill_n(bar.begin(), 30 * percent / 100, '#');
    std::fprintf(stderr, "\r\033[K[%s] %3d %% %s", bar.c_str(), percent, what.c_str());
  } else {
    std::fprintf(stderr, "[%3d %%] %s\n", percent, what.c_str());
  }
  std::fflush(stderr);
  ++done_;
}

}  // namespace rag
