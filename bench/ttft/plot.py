#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# Draws what kvblend_bench_ttft measured: ttft.svg, the time to the first token by variant, and kl.svg, the closeness to
# full prefill by ratio and selector. The same JSON gives the same bytes (with the same matplotlib).
import argparse
import collections
import io
import json
import math
import os
import re
import statistics
import sys

try:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter
except ImportError as problem:
    sys.exit(f"plot.py: matplotlib is needed: Debian's python3-matplotlib, for /usr/bin/python3 ({problem})")

# The pictures have no background. This grey has a contrast of about 4 against a white page and against a dark one; the
# colours are of middle brightness and told apart by the colour-blind too.
TEXT = "#767d86"
PARTS = {
    "load": "#56b4e9",
    "shift": "#009e73",
    "score": "#e69f00",
    "select": "#cc79a7",
    "recompute": "#2f7fc1",
    "suffix": "#d55e00",
    "prefill": "#8c959f",
}
DEVIATIONS = ["key_value_deviation", "value_deviation", "key_deviation"]
SELECTORS = {  # colour and mark
    "key_value_deviation": ("#d55e00", "o"),
    "value_deviation": ("#e69f00", "s"),
    "key_deviation": ("#cc79a7", "^"),
    "first_k": ("#2f7fc1", "D"),
    "random": ("#8c959f", "v"),
}
NAMES = {
    "full": "full prefill",
    "prefix": "prefix cache",
    "cache_reuse": "cache reuse (K-shift)",
    "reuse": "full KV reuse",
}
SETTINGS = ("tokens", "threads", "flash_attention", "cache_type")


def number(row, key):
    """The field as a float, or None if it is absent or no finite number."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def middle(rows, key):
    values = [value for value in (number(row, key) for row in rows) if value is not None]
    return statistics.median(values) if values else None


def read(path):
    try:
        with open(path, encoding="utf-8") as file:
            rows = json.load(file)
    except (OSError, ValueError) as problem:
        sys.exit(f"plot.py: {path}: {problem}")
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "variant" in row for row in rows):
        sys.exit(f"plot.py: {path}: is no list of measurements")
    models = {}  # in the order of the file
    for row in rows:
        if row.get("schedule", "flat") == "flat":
            models.setdefault(str(row.get("model", "")), []).append(row)
    return {model: usual(rows) for model, rows in models.items()}


def usual(rows):
    """The rows with the settings that most rows have, so that all compared were measured alike."""
    count = collections.Counter(tuple(row.get(key) for key in SETTINGS) for row in rows)

    def rank(settings):
        tokens, threads, flash_attention, cache_type = settings
        return (count[settings], flash_attention is True, cache_type == "f16", tokens or 0, threads or 0)

    best = max(count, key=rank)
    return [row for row in rows if tuple(row.get(key) for key in SETTINGS) == best]


def title(model, rows):
    row = rows[0]
    parts = []
    if number(row, "tokens"):
        parts.append(f"{row['tokens']} tokens")
    if number(row, "threads"):
        parts.append(f"{row['threads']} thread" + ("s" if row["threads"] != 1 else ""))
    if isinstance(row.get("flash_attention"), bool):
        parts.append("flash attention" if row["flash_attention"] else "no flash attention")
    if row.get("cache_type"):
        parts.append(f"{row['cache_type']} cache")
    name = os.path.basename(model)
    return name[: -len(".gguf")] if name.endswith(".gguf") else name, ", ".join(parts)


def percent(ratio):
    return f"{100 * ratio:.3g} %"


def near(rows, ratio):
    """The rows whose ratio is the wanted one."""
    return [row for row in rows if number(row, "ratio") is not None and abs(row["ratio"] - ratio) < 0.005]


def bars(rows, ratios):
    """[(label, rows of that bar)], top to bottom."""
    result = []
    for variant, name in NAMES.items():
        chosen = [row for row in rows if row["variant"] == variant]
        in_memory = [row for row in chosen if row.get("tier") in (None, "", "none", "memory")]
        if chosen:
            result.append((name, in_memory or chosen))
    blends = [row for row in rows if row["variant"] == "blend"]
    deviation = next((name for name in DEVIATIONS if any(row.get("selector") == name for row in blends)), None)
    for index, ratio in enumerate(ratios):
        # All selectors' way of working costs alike but for the scoring, so two show it, and other tiers one.
        for selector in [deviation, "first_k"] if index == 0 else [deviation]:
            chosen = [row for row in near(blends, ratio) if row.get("selector") == selector]
            tiers = list(dict.fromkeys(str(row.get("tier", "memory")) for row in chosen))
            tiers.sort(key=lambda tier: tier != "memory")
            for tier in tiers if index == 0 and selector == deviation else tiers[:1]:
                label = f"blend {percent(ratio)}, {str(selector).replace('_', ' ')}"
                if tier != "memory":
                    label = f"the same, {tier.replace('_', ' ')}"
                result.append((label, [row for row in chosen if str(row.get("tier", "memory")) == tier]))
    return [(label, chosen) for label, chosen in result if middle(chosen, "ttft_s") is not None]


def split(chosen):
    """[(part, seconds)] that add up to the time; what is in no part is prefill."""
    total = middle(chosen, "ttft_s")
    seconds = {part: max(middle(chosen, part + "_s") or 0.0, 0.0) for part in PARTS if part != "prefill"}
    if all(row["variant"] == "full" for row in chosen):
        seconds = dict.fromkeys(seconds, 0.0)
    measured = sum(seconds.values())
    if measured > total:  # medians of the parts need not add up to the median
        seconds = {part: value * total / measured for part, value in seconds.items()}
        measured = total
    seconds["prefill"] = total - measured
    return [(part, value) for part, value in seconds.items() if value > 0]


def draw_ttft(models, ratios):
    panels = [(model, rows, bars(rows, ratios)) for model, rows in models.items()]
    panels = [panel for panel in panels if panel[2]]
    if not panels:
        return None
    heights = [len(panel[2]) + 2.2 for panel in panels]
    figure, axes = pyplot.subplots(
        len(panels), 1, squeeze=False, figsize=(8.4, 0.24 * sum(heights) + 0.6), gridspec_kw={"height_ratios": heights}
    )
    used = set()
    for axis, (model, rows, lines) in zip(axes[:, 0], panels):
        full = middle([row for row in rows if row["variant"] == "full"], "ttft_s") or middle(rows, "full_ttft_s")
        longest = max(middle(chosen, "ttft_s") for _, chosen in lines)
        for place, (_, chosen) in enumerate(lines):
            total = middle(chosen, "ttft_s")
            left = 0.0
            for part, seconds in split(chosen):
                if seconds >= 0.001 * longest:  # thinner than a line
                    axis.barh(place, seconds, left=left, height=0.72, color=PARTS[part])
                    used.add(part)
                left += seconds
            speedup = middle(chosen, "speedup") or (full / total if full and total > 0 else None)
            text = f"{total:#.3g}".rstrip(".") + " s"
            if speedup and not all(row["variant"] == "full" for row in chosen):
                text += f", {speedup:.1f}×"
            axis.text(total + 0.012 * longest, place, text, va="center", fontsize=9)
        axis.set_yticks(range(len(lines)), [label for label, _ in lines])
        axis.set_ylim(len(lines) - 0.4, -0.6)
        axis.set_xlim(0, 1.16 * longest)
        axis.tick_params(axis="y", length=0)
        axis.grid(False, axis="y")
        name, settings = title(model, rows)
        axis.set_title(f"{name}: {settings}", loc="left", fontsize=10)
    axes[-1, 0].set_xlabel("time to first token, seconds")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=PARTS[part]) for part in PARTS if part in used]
    labels = ["prefill, other" if part == "prefill" else part for part in PARTS if part in used]
    figure.tight_layout(rect=(0, 0.3 / figure.get_figheight(), 1, 1), h_pad=0.8)
    figure.legend(handles, labels, loc="lower center", ncol=len(labels), frameon=False, handlelength=1)
    return figure


def draw_kl(models):
    panels = []
    for model, rows in models.items():
        curves = {}
        for row in rows:  # of any tier: where chunks came from changes no number
            if row["variant"] == "blend" and number(row, "ratio") is not None and number(row, "kl_vs_full") is not None:
                curves.setdefault(str(row.get("selector")), {}).setdefault(number(row, "ratio"), []).append(row)
        if curves:
            panels.append((model, rows, curves))
    if not panels:
        return None
    columns = min(len(panels), 3)
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(lines, columns, squeeze=False, figsize=(8.4, 3.1 * lines + 0.5), sharex=True)
    order = list(SELECTORS) + sorted({name for _, _, curves in panels for name in curves} - set(SELECTORS))
    shown = {}
    for axis, (model, rows, curves) in zip(axes.flat, panels):
        positive = False
        for selector in (name for name in order if name in curves):
            points = sorted((ratio, middle(found, "kl_vs_full")) for ratio, found in curves[selector].items())
            points = [(ratio, kl) for ratio, kl in points if kl > 0]  # 0, as at ratio 1, has no place on this axis
            if not points:
                continue
            positive = True
            colour, mark = SELECTORS.get(selector, (TEXT, "x"))
            shown[selector.replace("_", " ")] = axis.plot(
                *zip(*points), color=colour, marker=mark, markersize=4.5, linewidth=1.5
            )[0]
        reuse = middle([row for row in rows if row["variant"] == "reuse"], "kl_vs_full")
        if reuse is not None and reuse > 0:
            positive = True
            shown["full KV reuse"] = axis.axhline(reuse, color=TEXT, linestyle="--", linewidth=1.2)
        if positive:
            axis.set_yscale("log")
            axis.minorticks_off()
        name, settings = title(model, rows)
        tokens = settings.split(",")[0]
        axis.set_title(f"{name}\n{tokens}", loc="left", fontsize=9)
        axis.set_xlabel("reused tokens computed anew")
        axis.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("KL to full prefill, nats")
    figure.tight_layout(rect=(0, 0.36 / figure.get_figheight(), 1, 1))
    columns = max(len(shown), 1)
    style = {"frameon": False, "fontsize": 8.5, "handlelength": 1.8, "columnspacing": 1.2}
    figure.legend(list(shown.values()), list(shown), loc="lower center", ncol=columns, **style)
    return figure


def shorten(tag):
    """The tag with two decimals, which are enough for coordinates and make the file smaller by a fifth."""
    return re.sub(r"-?\d+\.\d{3,}", lambda value: f"{float(value[0]):.2f}".rstrip("0").rstrip("."), tag[0])


def save(figure, path, title_text):
    if figure is None:
        print(f"plot.py: nothing to draw for {path}", file=sys.stderr)
        return False
    for axis in figure.axes:
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    text = io.StringIO()
    metadata = {"Date": None, "Creator": "bench/ttft/plot.py", "Title": title_text}
    figure.savefig(text, format="svg", transparent=True, metadata=metadata)
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write(re.sub(r"<[^>]*>", shorten, text.getvalue()))
    print(path)
    return True


def main():
    parser = argparse.ArgumentParser(description="Draws ttft.svg and kl.svg from what kvblend_bench_ttft measured.")
    parser.add_argument("json", help="build/bench/ttft.json")
    parser.add_argument("--out", help="folder for the pictures; default: that of the JSON file")
    parser.add_argument(
        "--ratios", type=float, nargs="+", default=[0.15, 0.05], metavar="RATIO", help="of the blends among the bars"
    )
    options = parser.parse_args()
    models = read(options.json)
    matplotlib.rcParams.update(
        {
            "svg.hashsalt": "kvblend",
            "svg.fonttype": "none",
            "font.family": "sans-serif",
            "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
            "font.size": 9,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.alpha": 0.25,
            **dict.fromkeys(
                ["text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"], TEXT
            ),
        }
    )
    folder = options.out or os.path.dirname(options.json) or "."
    try:
        os.makedirs(folder, exist_ok=True)
        drawn = [
            save(draw_ttft(models, options.ratios), os.path.join(folder, "ttft.svg"), "Time to first token by variant"),
            save(draw_kl(models), os.path.join(folder, "kl.svg"), "KL to full prefill by ratio and selector"),
        ]
    except OSError as problem:
        sys.exit(f"plot.py: {folder}: {problem}")
    if not any(drawn):
        sys.exit(1)


if __name__ == "__main__":
    main()
