#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# Draws the shoot-out: kl.svg, KL to full recompute over the ratio with the standard error as a band, and cost.svg, KL over
# the share of full recompute's FLOPs with the Pareto front. Needs matplotlib.
import argparse
import io
import json
import os
import re
import sys

try:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter
except ImportError as problem:
    sys.exit(f"plot.py: matplotlib is needed: Debian's python3-matplotlib, for /usr/bin/python3 ({problem})")

# As in bench/ttft/plot.py: no background, and a grey that is read on a light and on a dark page.
TEXT = "#767d86"
SELECTORS = {
    "random": ("#9aa5b1", "x"),
    "first_k": ("#59a14f", "s"),
    "key_value_deviation": ("#f28e2b", "o"),
    "gradual_key_value_deviation": ("#edc948", "o"),
    "stored_score": ("#4e79a7", "D"),
    "saliency": ("#76b7b2", "D"),
    "attention_mass": ("#ff9da7", "^"),
    "attention_value_mass": ("#e15759", "^"),
}
MORE = ["#b07aa1", "#9c755f", "#bab0ac", "#86bcb6", "#d37295", "#a0cbe8"]


def read(path, prompts):
    try:
        with open(path, encoding="utf-8") as file:
            entries = json.load(file)["summary"]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        sys.exit(f"plot.py: {path}: {problem}")
    if prompts:
        entries = [entry for entry in entries if entry["prompts"] == prompts]
    models = {}
    for entry in entries:
        models.setdefault((entry["model"], entry["prompts"]), []).append(entry)
    if not models:
        sys.exit(f"plot.py: {path}: nothing to draw")
    return models


def style_of(selector, others):
    if selector in SELECTORS:
        return SELECTORS[selector]
    if selector not in others:
        others.append(selector)
    return MORE[others.index(selector) % len(MORE)], "."


def panels_of(models, label):
    columns = min(len(models), 3)
    lines = -(-len(models) // columns)
    figure, axes = pyplot.subplots(lines, columns, squeeze=False, figsize=(3.4 * columns + 1, 3.3 * lines + 0.9))
    for axis, ((model, prompts), entries) in zip(axes.flat, models.items()):
        count = max(entry["n"] for entry in entries)
        name = re.sub(r"\.gguf$", "", model)
        axis.set_title(f"{name}\n{prompts.replace('_', ' ')}, {count} prompts", loc="left", fontsize=9)
        axis.set_xlabel(label)
        axis.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    for axis in list(axes.flat)[len(models) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("KL to full recompute, nats a token")
    return figure, list(axes.flat)


def legend(figure, shown):
    columns = 3
    rows = -(-len(shown) // columns)
    figure.tight_layout(rect=(0, (0.2 * rows + 0.15) / figure.get_figheight(), 1, 1))
    style = {"frameon": False, "fontsize": 8.5, "handlelength": 1.8, "columnspacing": 1.2}
    figure.legend(list(shown.values()), list(shown), loc="lower center", ncol=columns, **style)
    return figure


def wanted(entries, selectors):
    curves = {}
    for entry in entries:
        if entry["selector"] != "none" and (not selectors or entry["selector"] in selectors):
            curves.setdefault(entry["selector"], []).append(entry)
    order = list(SELECTORS)
    names = sorted(curves, key=lambda name: (order.index(name) if name in order else len(order), name))
    return {name: sorted(curves[name], key=lambda entry: entry["ratio"]) for name in names}


def draw_kl(models, selectors):
    figure, axes = panels_of(models, "reused tokens computed anew")
    shown, others = {}, []
    for axis, entries in zip(axes, models.values()):
        for selector, points in wanted(entries, selectors).items():
            colour, mark = style_of(selector, others)
            ratios = [point["ratio"] for point in points]
            kls = [point["kl_mean"] for point in points]
            low = [max(point["kl_mean"] - point["kl_se"], 1e-4) for point in points]
            high = [point["kl_mean"] + point["kl_se"] for point in points]
            axis.fill_between(ratios, low, high, color=colour, alpha=0.13, linewidth=0)
            line = axis.plot(ratios, kls, color=colour, marker=mark, markersize=4, linewidth=1.5)[0]
            shown.setdefault(selector.replace("_", " "), line)
        for entry in entries:
            if entry["selector"] == "none":
                line = axis.axhline(entry["kl_mean"], color=TEXT, linestyle="--", linewidth=1.2)
                shown.setdefault("full KV reuse", line)
        axis.set_yscale("log")
    return legend(figure, shown)


def draw_cost(models, selectors):
    figure, axes = panels_of(models, "FLOPs, of full recompute's")
    shown, others = {}, []
    for axis, entries in zip(axes, models.values()):
        points = []
        for selector, found in wanted(entries, selectors).items():
            colour, mark = style_of(selector, others)
            # Hollow: all stored KV must be there before it chooses, so that loading hides behind nothing.
            hollow = found[0]["selector"].find("attention") >= 0
            for entry in found:
                dot = axis.plot(
                    entry["flops_share"],
                    entry["kl_mean"],
                    color=colour,
                    marker=mark,
                    markersize=5,
                    linestyle="none",
                    markerfacecolor="none" if hollow else colour,
                )[0]
                shown.setdefault(selector.replace("_", " "), dot)
                points.append((entry["flops_share"], entry["kl_mean"]))
        points += [(entry["flops_share"], entry["kl_mean"]) for entry in entries if entry["selector"] == "none"]
        front, best = [], float("inf")
        for cost, kl in sorted(points):
            if kl < best:
                best = kl
                front.append((cost, kl))
        shown["Pareto front"] = axis.step(*zip(*front), where="post", color=TEXT, linewidth=1, linestyle="--")[0]
        axis.set_yscale("log")
    return legend(figure, shown)


def shorten(tag):
    """The tag with two decimals, which are enough for coordinates."""
    return re.sub(r"-?\d+\.\d{3,}", lambda value: f"{float(value[0]):.2f}".rstrip("0").rstrip("."), tag[0])


def save(figure, path, title):
    for axis in figure.axes:
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    text = io.StringIO()
    metadata = {"Date": None, "Creator": "bench/shootout/plot.py", "Title": title}
    figure.savefig(text, format="svg", transparent=True, metadata=metadata)
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write(re.sub(r"<[^>]*>", shorten, text.getvalue()))
    print(path)


def main():
    parser = argparse.ArgumentParser(description="Draws kl.svg and cost.svg from what kvblend_bench_shootout measured.")
    parser.add_argument("json", help="build/bench/shootout.json")
    parser.add_argument("--out", help="folder for the pictures; default: that of the JSON file")
    parser.add_argument("--prompts", help="of several sets of prompts, the one to draw, such as musique_confirming")
    parser.add_argument("--selector", nargs="+", default=list(SELECTORS), help="those to draw; 'all' for all")
    options = parser.parse_args()
    models = read(options.json, options.prompts)
    selectors = None if options.selector == ["all"] else options.selector
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
    os.makedirs(folder, exist_ok=True)
    save(draw_kl(models, selectors), os.path.join(folder, "kl.svg"), "KL to full recompute by ratio and selector")
    save(draw_cost(models, selectors), os.path.join(folder, "cost.svg"), "KL to full recompute by cost")


if __name__ == "__main__":
    main()
