#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# Draws what the shoot-out and kvblend_bench_deviation measured, with one panel a model:
#   kl.svg         KL to full recompute over the ratio; bands are the standard error of the selectors that are defaults;
#                  dotted is what the same prompts gave with `--context alone`, if they were measured so too
#   cost.svg       KL over the share of full recompute's FLOPs, with the Pareto front; hollow marks wait for all KV
#   cdf.svg        how the deviation of reused KV is spread over the tokens
#   adjacent.svg   how alike the order of the tokens' deviations is from layer to layer
#   attention.svg  how much of the attention deviation recomputing leaves
# Needs matplotlib.
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
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, PercentFormatter
except ImportError as problem:
    sys.exit(f"plot.py: matplotlib is needed: Debian's python3-matplotlib, for /usr/bin/python3 ({problem})")

# As in bench/ttft/plot.py: no background, a grey that is read on a light and on a dark page, and the same colours.
TEXT = "#767d86"
SELECTORS = {
    "random": ("#8c959f", "v"),
    "first_k": ("#2f7fc1", "D"),
    "key_value_deviation": ("#d55e00", "o"),
    "gradual_key_value_deviation": ("#e69f00", "o"),
    "floor(stored_score)": ("#009e73", "s"),
    "attention_value_mass": ("#a05cd6", "^"),
    "drift(floor(stored_score))": ("#006b4f", "P"),
    "drift(attention_value_mass)": ("#5b21b6", "*"),
}
MORE = ["#cc79a7", "#56b4e9", "#9c755f", "#b0a21b", "#e15759", "#76b7b2"]
DEPTHS = [("layer 1", "#d55e00"), ("a quarter up", "#e69f00"), ("half-way", "#009e73"), ("last layer", "#2f7fc1")]


ALONE = ", alone"  # behind the name of prompts whose passages were encoded so


def read(paths, prompts):
    """The shoot-out's summary by model and prompts, that with passages alone, and the deviations by model."""
    models, alone, deviations = {}, {}, {}
    for path in paths:
        try:
            with open(path, encoding="utf-8") as file:
                found = json.load(file)
            for entry in found.get("summary", []):
                key = (entry["model"], entry["prompts"])
                if prompts == key[1] or (prompts is None and not key[1].endswith(ALONE)):
                    models.setdefault(key, []).append(entry)
                if key[1].endswith(ALONE):
                    alone.setdefault((key[0], key[1].removesuffix(ALONE)), []).append(entry)
            deviations.update((entry["model"], entry) for entry in found.get("models", []))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
            sys.exit(f"plot.py: {path}: {problem}")
    return models, alone, deviations


def panels(titles, height):
    """A figure of GitHub's width with up to three panels a line."""
    columns = min(len(titles), 3)
    lines = -(-len(titles) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, squeeze=False, figsize=(8.4 if columns > 1 else 5.6, height * lines + 0.6)
    )
    for axis, (model, note) in zip(axes.flat, titles):
        name, _, kind = re.sub(r"\.gguf$", "", model).partition(".Q")
        axis.set_title(f"{name}\n{'Q' + kind + ', ' if kind else ''}{note}", loc="left", fontsize=8.5)
    for axis in list(axes.flat)[len(titles) :]:
        axis.set_visible(False)
    return figure, list(axes.flat)[: len(titles)], list(axes[:, 0])


def shootout_panels(models):
    counts = [max(entry["n"] for entry in entries) for entries in models.values()]
    notes = [f"{count} of {prompts.replace('_', ' ')}" for (_, prompts), count in zip(models, counts)]
    figure, axes, left = panels([(model, note) for (model, _), note in zip(models, notes)], 2.9)
    for axis in left:
        axis.set_ylabel("KL to full recompute, nats a token")
    return figure, axes


def deviation_panels(deviations):
    counts = {model: entry["n"] for model, entry in deviations.items()}
    return panels([(model, f"{n} prompt{'' if n == 1 else 's'}") for model, n in counts.items()], 2.5)


def legend(figure, shown):
    columns = 2 if figure.get_figwidth() < 8 else 4 if max(map(len, shown)) < 32 else 3
    if len(shown) <= columns + 1:
        columns = len(shown)
    rows = -(-len(shown) // columns)
    figure.set_figheight(figure.get_figheight() + 0.19 * max(rows - 2, 0))
    figure.tight_layout(rect=(0, (0.19 * rows + 0.12) / figure.get_figheight(), 1, 1))
    style = {"frameon": False, "fontsize": 8.5, "handlelength": 1.8, "columnspacing": 1.2}
    figure.legend(list(shown.values()), list(shown), loc="lower center", ncol=columns, **style)
    return figure


def log_axis(axis, lowest, highest):
    axis.set_yscale("log")
    axis.set_ylim(0.7 * lowest, 1.25 * highest)  # a band may reach 0
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.minorticks_off()


def curves_of(entries, selectors):
    """Ascending points by selector: those wanted, or the usual ones and what the shoot-out takes as a default."""
    curves = {}
    for entry in entries:
        name = entry["selector"]
        usual = name in SELECTORS or entry.get("default")
        if name != "none" and (usual if not selectors else selectors == ["all"] or name in selectors):
            curves.setdefault(name, []).append(entry)
    order = list(SELECTORS)
    names = sorted(curves, key=lambda name: (order.index(name) if name in order else len(order), name))
    return {name: sorted(curves[name], key=lambda entry: entry["ratio"]) for name in names}


def style_of(selector, others):
    if selector in SELECTORS:
        return SELECTORS[selector]
    if selector not in others:
        others.append(selector)
    return MORE[others.index(selector) % len(MORE)], "."


def draw_kl(models, alone, selectors):
    figure, axes = shootout_panels(models)
    shown, others = {}, []
    for axis, (key, entries) in zip(axes, models.items()):
        means = [entry["kl_mean"] for entry in entries if entry["selector"] == "none"]
        ticks = set()
        for selector, points in curves_of(entries, selectors).items():
            colour, mark = style_of(selector, others)
            ratios = [100 * point["ratio"] for point in points]
            kls = [point["kl_mean"] for point in points]
            if points[0].get("default"):
                low = [max(point["kl_mean"] - point["kl_se"], 1e-6) for point in points]
                high = [point["kl_mean"] + point["kl_se"] for point in points]
                axis.fill_between(ratios, low, high, color=colour, alpha=0.15, linewidth=0)
            line = axis.plot(ratios, kls, color=colour, marker=mark, markersize=4, linewidth=1.5)[0]
            shown.setdefault(selector.replace("_", " "), line)
            means += kls
            ticks.update(ratios)
        for entry in entries:
            if entry["selector"] == "none":
                line = axis.axhline(entry["kl_mean"], color=TEXT, linestyle="--", linewidth=1.2)
                shown["full KV reuse"] = line
        for entry in alone.get(key, []):
            if entry["selector"] == "none":
                line = axis.axhline(entry["kl_mean"], color=TEXT, linestyle=":", linewidth=1.2)
                shown["full KV reuse, encoded alone"] = line
                means.append(entry["kl_mean"])
        points = curves_of(alone.get(key, []), ["key_value_deviation"]).get("key_value_deviation", [])
        if points:
            kls = [point["kl_mean"] for point in points]
            style = {"color": SELECTORS["key_value_deviation"][0], "linestyle": ":", "linewidth": 1.2}
            line = axis.plot([100 * point["ratio"] for point in points], kls, **style)[0]
            shown["key value deviation, encoded alone: the paper's"] = line
            means += kls
        log_axis(axis, min(means), max(means))
        axis.set_xticks(sorted(ticks))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
        axis.set_xlabel("% of reused tokens computed anew")
    return legend(figure, shown)


def pareto(points):
    front, best = [], float("inf")
    for cost, kl in sorted(points):
        if kl < best:
            best = kl
            front.append((cost, kl))
    return front


def draw_cost(models, selectors):
    def place(entry):
        return 100 * entry["flops_share"], entry["kl_mean"]

    figure, axes = shootout_panels(models)
    shown, others = {}, []
    for axis, entries in zip(axes, models.values()):
        points = [place(entry) for entry in entries if entry["selector"] == "none"]
        shown["full KV reuse"] = axis.plot(*zip(*points), color=TEXT, marker="*", markersize=7, linestyle="none")[0]
        for selector, found in curves_of(entries, selectors).items():
            colour, mark = style_of(selector, others)
            # Hollow: all stored KV must be there before it chooses, so that loading hides behind nothing.
            hollow = "attention" in selector
            curve = [place(entry) for entry in found]
            line = axis.plot(
                *zip(*curve), color=colour, marker=mark, markersize=4.5, linewidth=0.6, mfc="none" if hollow else colour
            )[0]
            shown.setdefault(selector.replace("_", " ") + (" (KV first)" if hollow else ""), line)
            points += curve
        front = pareto(points)
        shown["Pareto front"] = axis.step(*zip(*front), where="post", color=TEXT, linewidth=1.1, linestyle="--")[0]
        kls = [kl for _, kl in points]
        log_axis(axis, min(kls), max(kls))
        axis.set_xlabel("% of full recompute's FLOPs")
    shown["Pareto front"] = shown.pop("Pareto front")  # the last of the legend
    return legend(figure, shown)


def draw_cdf(deviations):
    figure, axes, left = deviation_panels(deviations)
    shown = {}
    for axis, entry in zip(axes, deviations.values()):
        highest = 0
        for (label, colour), layer in zip(DEPTHS, entry["concentration"]):
            quantiles = layer["quantiles"]
            steps = len(quantiles) - 1
            shares = [i / steps for i in range(steps + 1)]
            shown[label] = axis.plot(quantiles, shares, color=colour, linewidth=1.5)[0]
            highest = max(highest, quantiles[-2])
        shown["85 % of tokens"] = axis.axhline(0.85, color=TEXT, linestyle="--", linewidth=1)
        axis.set_xlim(0, highest)
        axis.set_ylim(0, 1)
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
        axis.set_xlabel("K+V deviation, of the layer's mean")
    for axis in left:
        axis.set_ylabel("tokens with at most that")
    return legend(figure, shown)


def draw_adjacent(deviations):
    figure, axes, left = deviation_panels(deviations)
    shown = {}
    for axis, entry in zip(axes, deviations.values()):
        for key, label, colour, mark in (
            ("adjacent", "with the next layer", "#2f7fc1", "o"),
            ("with_check_layer", "with layer 1", "#d55e00", "s"),
        ):
            points = [(point["layer"], point["rho"]) for point in entry[key]]
            shown[label] = axis.plot(*zip(*points), color=colour, marker=mark, markersize=3.2, linewidth=1.2)[0]
        shown["0.9"] = axis.axhline(0.9, color=TEXT, linestyle="--", linewidth=1)
        axis.set_ylim(min(0, axis.get_ylim()[0]), 1.02)
        axis.set_xlabel("layer")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in left:
        axis.set_ylabel("Spearman correlation\nof the tokens' deviations")
    return legend(figure, shown)


def draw_attention(deviations):
    figure, axes, left = deviation_panels(deviations)
    shown = {}
    for axis, entry in zip(axes, deviations.values()):
        for selector in ("key_value_deviation", "attention_value_mass"):
            colour, mark = SELECTORS[selector]
            ratios, means, low, high = [0], [1], [1], [1]
            for run in entry["attention_summed_over_heads_and_question_rows"]:
                if run["selector"] != selector:
                    continue
                layers = sorted(run["left_from_layer_1_on"][1:])
                ratios.append(100 * run["ratio"])
                means.append(1 - run["removed"])
                low.append(layers[len(layers) // 10])
                high.append(layers[-1 - len(layers) // 10])
            axis.fill_between(ratios, low, high, color=colour, alpha=0.15, linewidth=0)
            line = axis.plot(ratios, means, color=colour, marker=mark, markersize=4, linewidth=1.5)[0]
            shown[selector.replace("_", " ")] = line
        shown["eight in ten layers"] = pyplot.Rectangle((0, 0), 1, 1, color=TEXT, alpha=0.3, linewidth=0)
        axis.set_ylim(0, 1.02)
        axis.set_xticks(ratios)
        axis.set_xlabel("% of reused tokens computed anew")
    for axis in left:
        axis.set_ylabel("attention deviation left,\nof full KV reuse's")
    return legend(figure, shown)


def shorten(tag):
    """The tag with one decimal, which is enough for coordinates, and without turns by nothing."""
    tag = re.sub(r' transform="rotate\(-0 [^"]*"', "", tag[0])
    return re.sub(r"-?\d+\.\d{3,}", lambda value: f"{float(value[0]):.1f}".removesuffix(".0"), tag)


def save(figure, path, title):
    for axis in figure.axes:
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    text = io.StringIO()
    metadata = {"Date": None, "Creator": "bench/shootout/plot.py", "Title": title}
    figure.savefig(text, format="svg", transparent=True, metadata=metadata)
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write(re.sub(r"\n +", "\n", re.sub(r"<[^>]*>", shorten, text.getvalue())))
    print(path)


def main():
    parser = argparse.ArgumentParser(description="Draws what the shoot-out and kvblend_bench_deviation measured.")
    parser.add_argument("json", nargs="+", help="build/bench/shootout.json, build/bench/deviation.json")
    parser.add_argument("--out", help="folder for the pictures; default: that of the first JSON file")
    parser.add_argument("--prompts", help="of several sets of prompts, the one to draw, such as musique_confirming")
    parser.add_argument("--selector", nargs="+", help="those to draw; 'all' for all; default: some, and the defaults")
    options = parser.parse_args()
    models, alone, deviations = read(options.json, options.prompts)
    if not models and not deviations:
        sys.exit("plot.py: nothing to draw")
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
    folder = options.out or os.path.dirname(options.json[0]) or "."
    pictures = []
    if models:
        pictures.append(("kl", draw_kl(models, alone, options.selector), "KL to full recompute by ratio and selector"))
        pictures.append(("cost", draw_cost(models, options.selector), "KL to full recompute by cost"))
    if deviations:
        pictures.append(("cdf", draw_cdf(deviations), "Deviation of reused KV over the tokens"))
        pictures.append(("adjacent", draw_adjacent(deviations), "Rank correlation of deviations between layers"))
        pictures.append(("attention", draw_attention(deviations), "Attention deviation left by ratio"))
    try:
        os.makedirs(folder, exist_ok=True)
        for name, figure, title in pictures:
            save(figure, os.path.join(folder, name + ".svg"), title)
    except OSError as problem:
        sys.exit(f"plot.py: {folder}: {problem}")


if __name__ == "__main__":
    main()
