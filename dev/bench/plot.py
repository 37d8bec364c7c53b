#!/usr/bin/env python3
"""Draws the metrics.jsonl of one or several runs: loss, tokens a second, where the time goes, how the experts are used.

    python3 dev/bench/plot.py out/metrics.jsonl --floor 0.91            -> loss.png throughput.png phases.png experts.png
    python3 dev/bench/plot.py a.jsonl b.jsonl --label naive --label flash --out pictures
    python3 dev/bench/plot.py --live out/metrics.jsonl                  a running job, in the terminal, until Ctrl-C
    python3 dev/bench/plot.py --live --out pictures out/metrics.jsonl   its pictures, drawn anew as it goes

Pictures need matplotlib (pip install matplotlib); --live in the terminal needs nothing. What a metrics file lacks is not drawn,
and said so.
"""

import argparse
import json
import math
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import live

INK, FAINT, GRID = "#1f2933", "#8a94a0", "#e6e9ed"
RUN_COLORS = ["#2563eb", "#ea580c", "#059669", "#9333ea", "#dc2626", "#0891b2", "#a16207", "#4b5563"]
# In the order of a step, phases of one kind in shades of one colour; pink is what nobody has named.
PHASE_COLORS = {
    "data": "#94a3b8", "embedding": "#67e8f9", "norms": "#a5b4fc", "qkv_o": "#60a5fa", "attention": "#1d4ed8",
    "router": "#fde68a", "permute": "#fbbf24", "experts": "#ea580c", "lm_head": "#15803d", "grad_norm": "#86efac",
    "optimizer": "#7c3aed", "allreduce": "#b91c1c", "checkpoint": "#78716c", "eval": "#d6d3d1", "other": "#ff4fa3",
}


def fail(message):
    print(f"plot.py: error: {message}", file=sys.stderr)
    sys.exit(1)


# ----------------------------------------------------------------------------
# reading

class Run:
    """One metrics.jsonl: a list of values a field, None where a step has none."""

    def __init__(self, path, label):
        self.path, self.label, self.rows = path, label, []
        try:
            with open(path, encoding="utf-8") as file:
                lines = file.read().split("\n")
        except (OSError, UnicodeDecodeError) as error:
            fail(f"cannot read {path}: {getattr(error, 'strerror', None) or error}")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                row["step"] + row["tokens"]
            except (ValueError, TypeError, KeyError):
                if number == len(lines):  # the run is still writing it, or was killed in it
                    continue
                fail(f"{path}, line {number}: no line of a metrics.jsonl")
            self.rows.append(row)
        if not self.rows:
            fail(f"{path}: holds no step yet")

    @property
    def tokens(self):
        return [row["tokens"] for row in self.rows]

    def series(self, field):
        """Tokens and values of the steps that have the field as a finite number."""
        pairs = [(row["tokens"], row[field]) for row in self.rows if is_number(row.get(field))]
        return [x for x, _ in pairs], [y for _, y in pairs]


def is_number(x):
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


def smooth(values, share=0.02):
    """Mean over about `share` of the run around each step; narrower towards both ends, so that a steep start stays steep."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    half, last = max(1, int(share * len(values) / 2)), len(values) - 1
    result = []
    for i in range(len(values)):
        reach = min(half, i, last - i)
        result.append((sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1))
    return result


def running_median(values, width):
    half = width // 2
    result = []
    for i in range(len(values)):
        window = sorted(values[max(0, i - half):i + half + 1])
        result.append(window[len(window) // 2])
    return result


def bins(rows, most=240):
    """Neighbouring steps put together, so that a long run becomes at most `most` columns of equal width in steps."""
    size = -(-len(rows) // most)
    return [rows[i:i + size] for i in range(0, len(rows), size)]


def phase_means(rows):
    """Milliseconds a step by phase, over rows that have phases."""
    total, n = {}, 0
    for row in rows:
        if isinstance(row.get("phases"), dict):
            n += 1
            for name, ms in row["phases"].items():
                if is_number(ms):
                    total[name] = total.get(name, 0.0) + ms
    return {name: ms / n for name, ms in total.items()} if n else {}


def phase_order(names):
    """As in PHASE_COLORS, unknown ones after those, `other` last (on top)."""
    known = [name for name in PHASE_COLORS if name in names and name != "other"]
    unknown = sorted(name for name in names if name not in PHASE_COLORS)
    return known + unknown + (["other"] if "other" in names else [])


# ----------------------------------------------------------------------------
# drawing

def human(x, _=None):
    """98304 -> 98.3K"""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(x) >= unit * 0.9995:
            return f"{x / unit:.3g}{name}"
    return f"{x:.3g}"


def new_figure(plt, title, subtitle, height=4.6):
    figure, axes = plt.subplots(figsize=(9, height))
    dress(axes)
    figure.subplots_adjust(left=0.09, right=0.96, top=1 - 0.85 / height, bottom=0.62 / height)
    figure.text(0.02, 1 - 0.33 / height, title, fontsize=14, fontweight="bold", color=INK)
    figure.text(0.02, 1 - 0.60 / height, subtitle, fontsize=10, color=FAINT)
    return figure, axes


def dress(axes):
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, labelcolor=INK, labelsize=9)


def tokens_axis(axes, runs):
    first = min(run.tokens[0] for run in runs)
    last = max(run.tokens[-1] for run in runs)
    axes.set_xlim(0 if first < 0.2 * last else first, last if last > first else first + 1)
    axes.xaxis.set_major_formatter(human)
    axes.set_xlabel("tokens", color=INK)


def legend(axes, **where):
    box = axes.legend(frameon=False, fontsize=9, labelcolor=INK, **where)
    return box


def draw_loss(plt, runs, floor):
    vals = [run.series("val_loss") for run in runs]
    notes = []
    for run, (_, val) in zip(runs, vals):
        curve = run.series("loss")[1]
        if curve:
            notes.append(f"{'validation' if val else 'training'} {(val or curve)[-1]:.3f}")
    if not notes:
        return None
    subtitle = "nats a token" + (f"; at the end {notes[0]}" if len(runs) == 1 else "")
    if floor is not None:
        subtitle += f"; floor {floor:g}"
    figure, axes = new_figure(plt, "Loss", subtitle)
    lows, highs = [], []
    for i, run in enumerate(runs):
        color = RUN_COLORS[i % len(RUN_COLORS)]
        x, y = run.series("loss")
        if not x:
            continue
        smoothed = smooth(y)
        axes.plot(x, y, color=color, alpha=0.22, linewidth=0.8)
        ends = notes[i] if len(notes) == len(runs) else ""
        axes.plot(x, smoothed, color=color, linewidth=2,
                  label=f"{run.label}: {ends}" if len(runs) > 1 else "training, smoothed")
        lows.append(min(smoothed))
        highs.append(max(y[:1] + smoothed))
        if vals[i][0]:
            axes.plot(*vals[i], color=color, linewidth=1, linestyle=(0, (1, 2)), marker="o", markersize=6.5,
                      markerfacecolor="white", markeredgewidth=1.8, markeredgecolor=color, zorder=4, clip_on=False,
                      label="validation" if len(runs) == 1 else None)
            lows.append(min(vals[i][1]))
    if floor is not None:
        axes.axhline(floor, color=INK, linewidth=1.2, linestyle=(0, (6, 3)), zorder=3, label="floor")
        lows.append(floor)
    low, high = min(lows), max(highs)
    room = 0.06 * (high - low) or 0.1
    axes.set_ylim(low - room, high + room)
    axes.set_ylabel("loss", color=INK)
    tokens_axis(axes, runs)
    legend(axes, loc="upper right")
    return figure


def draw_throughput(plt, runs):
    found = [(run, *run.series("tokens_per_s")) for run in runs]
    found = [(run, x, y) for run, x, y in found if x]
    if not found:
        return None
    notes = []
    for run, _, y in found:
        name = f"{run.label} " if len(runs) > 1 else "median "
        notes.append(f"{name}{human(sorted(y)[len(y) // 2])}")
        for field, word in (("mfu", "mfu"), ("gemm_share", "of the machine's GEMM rate")):
            shares = sorted(run.series(field)[1])
            if shares and len(runs) == 1:
                notes.append(f"{100 * shares[len(shares) // 2]:.1f}% {word}")
    figure, axes = new_figure(plt, "Tokens a second", ", ".join(notes))
    highest = 0.0
    for i, (run, x, y) in enumerate(found):
        color = RUN_COLORS[runs.index(run) % len(RUN_COLORS)]
        median = running_median(y, max(3, len(y) // 40))
        axes.plot(x, y, color=color, alpha=0.25, linewidth=0.8)
        axes.plot(x, median, color=color, linewidth=2, label=run.label)
        highest = max(highest, max(median), sorted(y)[int(0.98 * (len(y) - 1))])
    axes.set_ylim(0, highest * 1.12)
    axes.yaxis.set_major_formatter(human)
    axes.set_ylabel("tokens / s", color=INK)
    tokens_axis(axes, runs)
    if len(runs) > 1:
        legend(axes, loc="lower right")
    return figure


def draw_phases_of_one(plt, run):
    """Stacked shares over the run."""
    columns = [(group[0]["tokens"], phase_means(group)) for group in bins(run.rows)]
    columns = [(x, ms) for x, ms in columns if sum(ms.values()) > 0]
    means = phase_means(run.rows)
    names = [name for name in phase_order(means) if means[name] > 0]
    if not columns or not names:
        return None
    columns.append((max(run.tokens[-1], columns[-1][0] + 1), columns[-1][1]))  # the right edge of the last column
    total = sum(means.values())
    figure, axes = new_figure(plt, "Where the time goes", f"share of a step by phase; a step takes {total:.4g} ms on average", 5)
    figure.subplots_adjust(right=0.76)
    x = [tokens for tokens, _ in columns]
    shares = [[100 * ms.get(name, 0.0) / sum(ms.values()) for _, ms in columns] for name in names]
    colors = [PHASE_COLORS.get(name, "#d4d4d4") for name in names]
    axes.stackplot(x, shares, colors=colors, linewidth=0, step="post")
    axes.set_ylim(0, 100)
    axes.set_xlim(x[0], x[-1])
    axes.xaxis.set_major_formatter(human)
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:.0f}%")
    axes.set_xlabel("tokens", color=INK)
    axes.grid(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in colors]
    labels = [f"{name}  {100 * means[name] / total:.1f}%" for name in names]
    axes.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.01, 1.01), frameon=False, fontsize=9,
                labelcolor=INK, handlelength=1.1, handleheight=1.1, borderaxespad=0.2)
    return figure


def draw_phases_of_many(plt, runs):
    """A bar a run, as long as its mean step, cut into phases: what each rung of the ladder bought."""
    means = [(run, phase_means(run.rows[1:] or run.rows)) for run in runs]  # the first step pays for first touches
    means = [(run, ms) for run, ms in means if sum(ms.values()) > 0]
    if not means:
        return None
    names = [name for name in phase_order({name for _, ms in means for name in ms}) if any(ms.get(name) for _, ms in means)]
    figure, axes = new_figure(plt, "Where the time goes", "milliseconds a step by phase, mean without the first step",
                              2.5 + 0.55 * len(means))
    left_space = min(0.3, 0.03 + 0.011 * max(len(run.label) for run, _ in means))
    figure.subplots_adjust(left=left_space, bottom=1.15 / figure.get_figheight())
    longest = max(sum(ms.values()) for _, ms in means)
    for y, (run, ms) in enumerate(means):
        left = 0.0
        for name in names:
            width = ms.get(name, 0.0)
            axes.barh(y, width, left=left, height=0.62, color=PHASE_COLORS.get(name, "#d4d4d4"), edgecolor="white",
                      linewidth=0.6)
            left += width
        axes.text(left + 0.01 * longest, y, f"{left:.4g}", va="center", fontsize=9, color=INK)
    axes.set_yticks(range(len(means)), [run.label for run, _ in means])
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.1)
    axes.set_xlabel("ms a step", color=INK)
    axes.grid(False, axis="y")
    handles = [plt.Rectangle((0, 0), 1, 1, color=PHASE_COLORS.get(name, "#d4d4d4")) for name in names]
    figure.legend(handles, names, loc="lower center", frameon=False, fontsize=9, labelcolor=INK, handlelength=1.1,
                  handleheight=1.1, ncols=min(8, len(names)))
    return figure


def load_columns(run):
    """x edges in tokens and a [layers][columns] table of the busiest expert's load over the mean; None: a dense layer."""
    rows = [row for row in run.rows if isinstance(row.get("expert_load"), list) and row["expert_load"]]
    if not rows:
        return None, None
    groups = bins(rows)
    layers = max(len(row["expert_load"]) for row in rows)
    table = [[None] * len(groups) for _ in range(layers)]
    for c, group in enumerate(groups):
        for l in range(layers):
            values = [row["expert_load"][l] for row in group if l < len(row["expert_load"]) and is_number(row["expert_load"][l])]
            if values:
                table[l][c] = sum(values) / len(values)
    edges = [0 if group is groups[0] else group[0]["tokens"] for group in groups] + [rows[-1]["tokens"]]
    if edges[-1] <= edges[-2]:
        edges[-1] = edges[-2] + 1
    return edges, table


def draw_experts(plt, runs):
    found = [(run, *load_columns(run)) for run in runs]
    found = [(run, edges, table) for run, edges, table in found if table]
    if not found:
        return None
    values = sorted(v for _, _, table in found for row in table for v in row if v is not None)
    if not values:
        return None
    top = max(2.0, values[int(0.995 * (len(values) - 1))])
    layers = max(len(table) for _, _, table in found)
    each = max(1.5, min(5.0, 0.8 + 0.22 * layers))
    height = 1.15 + (each + 0.45) * len(found)
    figure, grid = plt.subplots(len(found), 1, figsize=(9, height), squeeze=False)
    figure.subplots_adjust(left=0.09, right=0.955, top=1 - 0.95 / height, bottom=0.62 / height, hspace=0.45 / each)
    figure.text(0.02, 1 - 0.33 / height, "Expert load", fontsize=14, fontweight="bold", color=INK)
    figure.text(0.02, 1 - 0.60 / height, "tokens of the busiest expert over the mean, layer by layer; 1 is perfectly even"
                + dead_note([run for run, _, _ in found]), fontsize=10, color=FAINT)
    colormap = plt.get_cmap("magma_r").copy()
    colormap.set_bad("#eef0f2")
    for (run, edges, table), axes in zip(found, grid[:, 0]):
        cells = [[float("nan") if v is None else v for v in row] for row in table]
        mesh = axes.pcolormesh(edges, [l - 0.5 for l in range(len(table) + 1)], cells, cmap=colormap, vmin=1.0, vmax=top,
                               rasterized=True)
        for l, row in enumerate(table):
            if all(v is None for v in row):
                axes.text((edges[0] + edges[-1]) / 2, l, "dense", ha="center", va="center", fontsize=8, color=FAINT)
        axes.invert_yaxis()
        axes.set_yticks(range(0, len(table), 1 if len(table) <= 16 else 4))
        axes.set_ylabel("layer", color=INK)
        axes.tick_params(colors=FAINT, labelcolor=INK, labelsize=9, length=0)
        axes.xaxis.set_major_formatter(human)
        for side in axes.spines.values():
            side.set_visible(False)
        if len(runs) > 1:
            axes.set_title(run.label, fontsize=10, color=INK, loc="left")
    grid[-1, 0].set_xlabel("tokens", color=INK)
    bar = figure.colorbar(mesh, ax=list(grid[:, 0]), pad=0.02, fraction=0.03, aspect=8 * len(found) * each / 1.5,
                          extend="max" if values[-1] > top else "neither")
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=FAINT, labelcolor=INK, labelsize=9)
    return figure


def draw_entropy(plt, runs):
    """The router's entropy, a line a layer, the last layer the darkest."""
    found = [(run, [row for row in run.rows if isinstance(row.get("router_entropy"), list)]) for run in runs]
    found = [(run, rows) for run, rows in found if any(is_number(x) for row in rows for x in row["router_entropy"])]
    if not found:
        return None
    figure, axes = new_figure(plt, "Router entropy", "nats, mean over the tokens, a line a layer (darker: later); ln(experts) is a router "
                              "that does not choose, 0 one that is certain")
    shades = plt.get_cmap("Blues") if len(found) == 1 else None
    for i, (run, rows) in enumerate(found):
        layers = max(len(row["router_entropy"]) for row in rows)
        for l in range(layers):
            points = [(row["tokens"], row["router_entropy"][l]) for row in rows if l < len(row["router_entropy"]) and is_number(row["router_entropy"][l])]
            if not points:
                continue
            color = shades(0.35 + 0.6 * l / max(1, layers - 1)) if shades else RUN_COLORS[runs.index(run) % len(RUN_COLORS)]
            last = l == layers - 1
            axes.plot([x for x, _ in points], smooth([y for _, y in points]), color=color, linewidth=2 if last else 1,
                      alpha=1 if shades else 0.35 + 0.65 * last, label=run.label if last and len(runs) > 1 else None)
    axes.set_ylim(0, None)
    axes.set_ylabel("nats", color=INK)
    tokens_axis(axes, [run for run, _ in found])
    if len(runs) > 1:
        legend(axes, loc="lower left")
    return figure


def dead_note(runs):
    """What the last step says of experts without a token; nothing where the file does not tell, or with several runs."""
    dead = runs[0].rows[-1].get("dead_experts") if len(runs) == 1 else None
    if not isinstance(dead, list):
        return ""
    layers = [str(l) for l, n in enumerate(dead) if is_number(n) and n > 0]
    if not layers:
        return "; at the end every expert has tokens"
    return f"; at the end {sum(n for n in dead if is_number(n))} without a token (layer {', '.join(layers)})"


# ----------------------------------------------------------------------------

def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("metrics", nargs="+", help="metrics.jsonl of a run")
    parser.add_argument("--out", metavar="DIR", help="where the pictures go [.]")
    parser.add_argument("--floor", type=float, metavar="NATS", help="the loss that cannot be beaten, as a dashed line")
    parser.add_argument("--label", action="append", default=[], metavar="NAME", help="name of a run, once a run [its path]")
    parser.add_argument("--dpi", type=int, default=150, help="dots an inch [150]")
    parser.add_argument("--live", action="store_true", help="follow a running job in the terminal; with --out, in pictures")
    parser.add_argument("--every", type=float, default=2, metavar="SECONDS", help="between two looks, with --live [2]")
    parser.add_argument("--times", type=int, default=0, metavar="N", help="end after so many looks, with --live [0: go on]")
    args = parser.parse_args()
    if args.label and len(args.label) != len(args.metrics):
        fail(f"{len(args.label)} --label for {len(args.metrics)} runs: give one each or none")
    if args.floor is not None and not math.isfinite(args.floor):
        fail(f"--floor {args.floor} is not a finite number")
    if args.live and len(args.metrics) != 1:
        fail(f"--live follows one run, here are {len(args.metrics)}")
    if not 0.05 <= args.every < 1e6 or args.times < 0:
        fail("--every must be 0.05 seconds or more, --times 0 or more")
    if args.live and args.out is None:
        try:
            live.watch(args.metrics[0], args.every, args.times, PHASE_COLORS)
        except (OSError, ValueError) as error:
            fail(getattr(error, "strerror", None) or error)
        return
    args.out = args.out or "."
    try:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        fail("needs matplotlib: pip install matplotlib, or apt install python3-matplotlib")
    names = args.label or [os.path.splitext(path)[0].replace("/metrics", "") for path in args.metrics]
    try:
        os.makedirs(args.out, exist_ok=True)
        if args.live:
            def draw_again(rows):
                run = Run.__new__(Run)
                run.path, run.label, run.rows = args.metrics[0], names[0], rows
                draw_pictures(plt, [run], args)
                print(f"step {rows[-1]['step']}", flush=True)
            live.watch(args.metrics[0], args.every, args.times, PHASE_COLORS, draw_again)
        else:
            draw_pictures(plt, [Run(path, name) for path, name in zip(args.metrics, names)], args)
    except OSError as error:
        fail(f"cannot write into {args.out}: {error.strerror or error}")
    except ValueError as error:
        fail(error)


def draw_pictures(plt, runs, args):
    pictures = {
        "loss": lambda: draw_loss(plt, runs, args.floor),
        "throughput": lambda: draw_throughput(plt, runs),
        "phases": lambda: draw_phases_of_one(plt, runs[0]) if len(runs) == 1 else draw_phases_of_many(plt, runs),
        "experts": lambda: draw_experts(plt, runs),
        "entropy": lambda: draw_entropy(plt, runs),
    }
    for name, draw in pictures.items():
        figure = draw()
        if figure is None:
            if not args.live:
                print(f"no {name}.png: the metrics have nothing to draw there")
            continue
        path = os.path.join(args.out, name + ".png")
        part = os.path.join(args.out, f".{name}.part.png") # so that who looks never sees half a picture
        figure.savefig(part, dpi=args.dpi, facecolor="white")
        plt.close(figure)
        os.replace(part, path)
        if not args.live:
            print(path)


if __name__ == "__main__":
    main()
