#!/usr/bin/env python3
"""Draws where one training step went, as a page that needs nothing else, and says which block to attack next.

    ./train_moe_cpu ... --steps 10 --trace trace.json
    python3 dev/bench/timemap.py trace.json                       -> trace.html
    python3 dev/bench/timemap.py trace.json --step 7 --card h200  another step, another machine to compare with
    python3 dev/bench/timemap.py trace.json --merge all.json      several ranks: one timeline for ui.perfetto.dev

The step is the one of median length unless --step names another. A block is a phase in one direction; what it must do and
what it could take is roofline.py's arithmetic, against the matrix product rate that the trainer measured at its start and
the memory bandwidth that is measured here (so run it on the machine that made the trace, or say --bandwidth). trace.rank1.json
and so on beside trace.json are the other ranks. Only Python's standard library (and numpy to measure the bandwidth).
"""

import argparse
import glob
import html
import json
import math
import os
import statistics
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import roofline

# In the order of a step, as in plot.py; pink is what nobody has named.
PHASE_COLORS = {
    "data": "#94a3b8", "embedding": "#67e8f9", "norms": "#a5b4fc", "qkv_o": "#60a5fa", "attention": "#1d4ed8",
    "router": "#fde68a", "permute": "#fbbf24", "experts": "#ea580c", "lm_head": "#15803d", "grad_norm": "#86efac",
    "optimizer": "#7c3aed", "allreduce": "#b91c1c", "checkpoint": "#78716c", "eval": "#d6d3d1", "other": "#ff4fa3",
}
NOT_TRAINING = ("checkpoint", "eval") # part of the step's clock, but not what --steps would be faster by
TRACK_HOST, TRACK_COMPUTE, TRACK_ALLREDUCE, TRACK_LOADER = range(4) # llmc/profiler.h
INF = float("inf")


def fail(message):
    print(f"timemap.py: error: {message}", file=sys.stderr)
    sys.exit(1)


# ----------------------------------------------------------------------------
# reading

class Trace:
    """One rank's file: its finished events, sorted so that a box comes before what it holds."""

    def __init__(self, path):
        try:
            with open(path, encoding="utf-8") as file:
                content = json.load(file)
            all_events = content["traceEvents"]
            self.events = sorted((e for e in all_events if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"]))
            self.names = {e["tid"]: e["args"]["name"] for e in all_events if e["ph"] == "M" and e["name"] == "thread_name"}
        except (OSError, UnicodeDecodeError) as error:
            fail(f"cannot read {path}: {getattr(error, 'strerror', None) or error}")
        except (ValueError, TypeError, KeyError):
            fail(f"{path} is no trace of train_moe or train_moe_cpu (--trace FILE), or was cut")
        about = content.get("otherData") or {}
        self.path, self.content = path, content
        self.rank, self.clock_us, self.run = about.get("rank", 0), about.get("clock_us", 0.0), about.get("run")
        self.program = about.get("program", "?")
        self.steps = {int(e["name"][5:]): e for e in self.events if e["tid"] == TRACK_HOST and e["name"].startswith("step ")}
        # a GPU's phases are on its stream's row, a CPU's on the host's
        self.work_track = TRACK_COMPUTE if any(e["tid"] == TRACK_COMPUTE for e in self.events) else TRACK_HOST


def read_ranks(path):
    """The trace and those of the other ranks that lie beside it."""
    stem, end = (path[:-5], ".json") if path.endswith(".json") else (path, "")
    others = sorted(glob.glob(glob.escape(stem) + ".rank*" + end), key=lambda p: (len(p), p))
    return [Trace(p) for p in [path, *others]]


def merge(traces, path):
    """All ranks as one timeline: their clocks began at different moments."""
    first = min(trace.clock_us for trace in traces)
    events = []
    for trace in traces:
        for e in trace.content["traceEvents"]:
            events.append(dict(e, ts=round(e["ts"] + trace.clock_us - first, 3)) if "ts" in e else e)
    content = dict(traces[0].content, traceEvents=events)
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(content, file)
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror or error}")


def choose_step(trace, wanted):
    """The step of median length, of those after the first without validation or a checkpoint if there are such."""
    if not trace.steps:
        fail(f"{trace.path} has no whole step yet")
    if wanted is not None:
        if wanted not in trace.steps:
            fail(f"--step {wanted}: the trace has {min(trace.steps)} to {max(trace.steps)}")
        return wanted
    numbers = sorted(trace.steps)[1:] or list(trace.steps) # the first pays for first touches of memory
    ends = [(e["ts"], e["ts"] + e["dur"]) for e in trace.events if e["name"] in NOT_TRAINING]
    plain = [n for n in numbers if not any(contains(trace.steps[n], begin, end) for begin, end in ends)]
    ordered = sorted(plain or numbers, key=lambda n: trace.steps[n]["dur"])
    return ordered[(len(ordered) - 1) // 2]


def contains(box, begin, end):
    slack = 0.01 # times are written with three decimals of a microsecond
    return box["ts"] - slack <= begin and end <= box["ts"] + box["dur"] + slack


# ----------------------------------------------------------------------------
# measuring a step

def phase_times(trace, step):
    """{(phase, direction): {layer: ms}} of the step. direction: forward, backward, or step for what is in neither; layer
    None: of no layer. ("other", "step") is what is left."""
    box = trace.steps[step]
    inside = [e for e in trace.events if e["tid"] == trace.work_track and contains(box, e["ts"], e["ts"] + e["dur"])]
    times, open_boxes = {}, []
    held = [e for e in trace.events if e["tid"] == TRACK_HOST and e["name"] == "eval" and contains(box, e["ts"], e["ts"] + e["dur"])]
    named = 0.0

    def count(phase, direction, layer, us):
        layers = times.setdefault((phase, direction), {})
        layers[layer] = layers.get(layer, 0.0) + us / 1e3

    for e in held: # validation is one thing, whatever phases ran in it
        count("eval", "step", None, e["dur"])
        named += e["dur"]
    for e in inside:
        begin, end = e["ts"], e["ts"] + e["dur"]
        while open_boxes and not contains(open_boxes[-1], begin, end):
            open_boxes.pop()
        if e["name"] not in PHASE_COLORS:
            open_boxes.append(e)
            continue
        if e["name"] == "eval" or any(contains(h, begin, end) for h in held):
            continue
        directions = [b["name"] for b in open_boxes if b["name"] in ("forward", "backward")]
        count(e["name"], directions[-1] if directions else "step", (e.get("args") or {}).get("layer"), e["dur"])
        named += e["dur"]
    count("other", "step", None, max(0.0, box["dur"] - named))
    return times


def merged_intervals(intervals):
    result = []
    for begin, end in sorted(intervals):
        if result and begin <= result[-1][1]:
            result[-1][1] = max(result[-1][1], end)
        else:
            result.append([begin, end])
    return result


def length(intervals):
    return sum(end - begin for begin, end in merged_intervals(intervals))


def overlap(trace, step, track):
    """(ms of the track's work in the step, ms of it while a phase other than `allreduce` and `data` was computing)"""
    box = trace.steps[step]
    begin, end = box["ts"], box["ts"] + box["dur"]
    clip = lambda events: [(max(begin, e["ts"]), min(end, e["ts"] + e["dur"])) for e in events if e["ts"] < end and e["ts"] + e["dur"] > begin]
    work = clip(e for e in trace.events if e["tid"] == track)
    computing = clip(e for e in trace.events if e["tid"] == trace.work_track and e["name"] in PHASE_COLORS
                     and e["name"] not in ("allreduce", "data", "eval"))
    both = length(work) + length(computing) - length(work + computing)
    return length(work) / 1e3, both / 1e3


# ----------------------------------------------------------------------------
# what it must do, and could take

def is_emulated(run):
    return "emulated" in run["machine"].lower()


def card_of_run(trace, args):
    """(card, a sentence on where its figures come from)"""
    run = trace.run
    cpu, measured = trace.program == "train_moe_cpu", run.get("measured_peak")
    if args.card:
        card = roofline.CARDS[args.card]
        source = f"{card.name}, as roofline.py has it"
    elif cpu:
        shape, options = roofline.shape_of_config(run["model"]), run["options"]
        ops = roofline.operations(shape, int(options["batch-size"]), int(options["seq-len"]), 4, 4)
        bandwidth = args.bandwidth or roofline.measured_bandwidth(statistics.median(op.bytes / len(op.layers) for op in ops) / 1e6)
        card = roofline.cpu_card(args.gflops or measured / 1e9, bandwidth, run["machine"])
        said = "given" if args.gflops else "measured by the trainer at its start"
        return card, (f"matrix products {card.sustained * 1e3:.4g} GFLOP/s ({said}), memory {bandwidth:.4g} GB/s "
                      f"({'given' if args.bandwidth else 'a copy of tensors of this size, measured by timemap.py'})")
    else:
        names = {"max-q": "maxq", "rtx pro 6000": "pro6000", "4090": "4090", "h100": "h100", "h200": "h200"}
        key = next((key for word, key in names.items() if word in run["machine"].lower()), None)
        if key is None and not is_emulated(run) and not (measured and args.bandwidth):
            fail(f"roofline.py does not know the card \"{run['machine']}\": say --card, or --bandwidth beside the measured rate")
        card = roofline.CARDS[key or "maxq"]
        source = f"{card.name}, as roofline.py has it"
        if measured:
            card, source = card._replace(sustained=measured / 1e12), f"matrix products {measured / 1e12:.4g} TFLOP/s (measured by the trainer at its start)"
            source += f", memory {(args.bandwidth or card.bandwidth * card.usable):.4g} GB/s"
    if args.gflops:
        card = card._replace(sustained=args.gflops / 1e3)
    if args.bandwidth:
        card = card._replace(bandwidth=args.bandwidth, usable=1.0)
    return card, source


def card_at_least(card, source, times, run, args):
    """A block of matrix products that ran faster than the rate that was measured shows that other programs ran beside the
    measurement: then its own rate is what the machine can do."""
    if args.gflops or args.card or is_emulated(run):
        return card, source
    table, _ = work(run, card, "sustained")
    rates = {(sum(row[0] for row in rows.values()) / sum(times[key].values()) / 1e9, key) for key, rows in table.items()
             if sum(times.get(key, {}).values()) > 0}
    rate, key = max(rates)
    if rate <= card.sustained:
        return card, source
    return card._replace(sustained=rate), (
        f"{source}; but {', '.join(key)} reached {scaled(rate * 1e12, 'FLOP/s')}, so the measurement met a busy machine, and that is taken")


def direction_of(op):
    """Where the trainers do it: the loss is the beginning of their backward."""
    return "step" if op.direction == "update" else "backward" if op.phase == "lm_head" else op.direction


def work(run, card, mode):
    """{(phase, direction): {layer: [flops, bytes, possible ms]}} of one step on one rank, and {...: bound}"""
    shape, options = roofline.shape_of_config(run["model"]), run["options"]
    element, gradient = roofline.elements_of(card) if card.arch == "cpu" else (2, 4)
    micro = roofline.operations(shape, int(options["batch-size"]), int(options["seq-len"]), element, gradient)
    table, bounds = {}, {}
    for times, ops in ((int(options["grad-accum"]), micro), (1, roofline.update_operations(shape, element, gradient))):
        for op in ops:
            key = (op.phase, direction_of(op))
            ms = times * roofline.possible_ms(op, card, mode)
            for layer in op.layers:
                row = table.setdefault(key, {}).setdefault(layer, [0.0, 0.0, 0.0])
                for i, value in enumerate((times * op.flops, times * op.bytes, ms)):
                    row[i] += value / len(op.layers)
            side = bounds.setdefault(key, {"compute": 0.0, "memory": 0.0})
            side[roofline.bound(op, card)] += ms
    return table, {key: "compute" if side["compute"] > side["memory"] else "memory" for key, side in bounds.items()}


def blocks_of(times, table, bounds, emulated):
    """The page's rows, by what could be gained. A block without work of its own (data, other, all-reduce) should take no
    time at all; of validation and checkpoints nothing is said, and nothing is to be gained from an emulator."""
    result = []
    for (phase, direction), layers in times.items():
        ms = sum(layers.values())
        rows = (table or {}).get((phase, direction), {})
        flops, size, possible = (sum(row[i] for row in rows.values()) for i in range(3))
        idle = phase in ("data", "other", "allreduce") or (table and (phase, direction) == ("router", "step")) # the log's
        known = phase not in NOT_TRAINING and (rows or idle)
        gain = max(0.0, ms - possible) if known and not emulated else None
        result.append({
            "phase": phase, "direction": direction, "ms": ms, "flops": flops, "bytes": size,
            "possible_ms": possible if known else None, "bound": bounds.get((phase, direction)) if bounds else None, "gain_ms": gain,
            "layers": [[layer, layers[layer], rows[layer][2] if layer in rows else None]
                       for layer in sorted(layers, key=lambda l: -1 if l is None else l)],
        })
    by = "possible_ms" if emulated else "gain_ms"
    return sorted((b for b in result if b["ms"] > 0), key=lambda b: (-(b[by] if b[by] is not None else -1), -b["ms"]))


# ----------------------------------------------------------------------------
# words

def title_of(block):
    names = {"lm_head": "lm_head and loss", "other": "other (no phase claims it)", "data": "waiting for data", "allreduce": "waiting for the all-reduce"}
    name = names.get(block["phase"], block["phase"])
    if block["phase"] not in DIRECTED:
        return name
    return f"{name}, {block['direction'] if block['direction'] != 'step' else 'between passes'}"


DIRECTED = ("embedding", "norms", "qkv_o", "attention", "router", "permute", "experts")


def hint(block, options):
    """What to do about a block, where a switch of the trainer is the answer."""
    said = {
        "attention": [("attention", "naive", "--attention flash")],
        "experts": [("experts", "loop", "--experts grouped")],
        "optimizer": [("optimizer", "simple", "--optimizer fused")],
        "data": [("tokenize", "inline", "shards made ahead by prepro/"), ("loader", "inline", "--loader prefetch"), ("pinned", False, "--pinned 1")],
        "allreduce": [("allreduce", "every", "--allreduce last"), ("overlap", False, "--overlap 1")],
    }
    for option, value, advice in said.get(block["phase"], []):
        if options.get(option) == value:
            given = str(int(value)) if isinstance(value, bool) else value
            return f"This run has --{option} {given}: try {advice} first."
    if block["phase"] == "other":
        return "Name it: put a phase() around what runs there, or look for launches, allocations and waits between two phases."
    return ""


def percent(share):
    return f"{100 * share:.1f}%" if share < 0.0995 else f"{100 * share:.0f}%"


def number(x):
    """Three digits: 1234, 123, 48.0, 7.49, 0.36; what is too small to matter is 0"""
    return f"{x:.0f}" if x >= 99.95 else f"{x:.1f}" if x >= 9.995 else f"{x:.2f}" if x >= 0.005 else f"{x:.1g}" if x >= 1e-5 else "0"


def scaled(x, unit):
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if x >= factor:
            return f"{number(x / factor)} {prefix}{unit}"
    return f"{number(x)} {unit}"


def rate_of(block):
    """What it reached, in the unit of what bounds it."""
    if not block["flops"] and not block["bytes"]:
        return ""
    if block["bound"] == "compute":
        return scaled(block["flops"] / block["ms"] * 1e3, "FLOP/s")
    return scaled(block["bytes"] / block["ms"] * 1e3, "B/s")


def sentence(page):
    """(the headline as HTML, the line below it)"""
    total = page["step_ms"] - sum(b["ms"] for b in page["blocks"] if b["phase"] in NOT_TRAINING)
    if page["emulated"] and page["modelled"]:
        longest = page["blocks"][0]
        possible = sum(b["possible_ms"] or 0.0 for b in page["blocks"])
        return (f"Emulated, so the times say nothing. On {html.escape(page['card'])} this step could take {number(possible)} ms, "
                f"{percent(longest['possible_ms'] / possible)} of it <b>{html.escape(title_of(longest))}</b>.",
                "The emulator shows what runs in which order and beside what; its times are those of a CPU that pretends to be a GPU.")
    blocks = [b for b in page["blocks"] if b["gain_ms"] is not None]
    if not blocks or not page["modelled"]:
        largest = max(page["blocks"], key=lambda b: b["ms"])
        return (f"The largest block is <b>{html.escape(title_of(largest))}</b>: {percent(largest['ms'] / total)} of the step.",
                "What each block could take is not known for this trace.")
    first = blocks[0]
    name = f"<b>{html.escape(title_of(first))}</b>"
    if first["gain_ms"] < 0.02 * total:
        return (f"Nothing big is left: no block would make the step even 2% shorter; the first is {name}.", "")
    share = f"{number(first['ms'])} of {number(total)} ms"
    if first["possible_ms"] > 0:
        rate = f" It reaches {rate_of(first)} and is bound by {first['bound']}." if first["bound"] else ""
        says = (f"Attack {name} next: it takes {share} and could take {number(first['possible_ms'])}{page['on']}, which would make the "
                f"step {percent(first['gain_ms'] / total)} shorter.{rate}")
    else:
        says = f"Attack {name} next: it takes {share}, and all of its {percent(first['gain_ms'] / total)} could be gained."
    after = ", ".join(f"{html.escape(title_of(b))} ({percent(b['gain_ms'] / total)})" for b in blocks[1:4] if b["gain_ms"] > 0.01 * total)
    below = " ".join(part for part in (html.escape(hint(first, page["options"])), f"After it: {after}." if after else "") if part)
    return says, below


# ----------------------------------------------------------------------------
# the tree map: squarified (Bruls, Huizing, van Wijk 2000), largest first

def squarify(values, x, y, width, height):
    """Rectangles (x, y, w, h) with areas in the ratio of values (largest first), as square as they will be."""
    total = sum(values)
    if total <= 0 or width <= 0 or height <= 0:
        return [(x, y, 0, 0) for _ in values]
    areas, result, i = [v / total * width * height for v in values], [], 0
    while i < len(areas):
        side = min(width, height)
        count, best = 0, INF
        while i + count < len(areas): # one more in this row while that makes its worst rectangle squarer
            row = areas[i:i + count + 1]
            depth = sum(row) / side
            worst = max(max(depth * depth / a, a / (depth * depth)) if a > 0 else INF for a in row)
            if worst > best:
                break
            best, count = worst, count + 1
        count = max(count, 1)
        row = areas[i:i + count]
        depth, at = sum(row) / side, 0.0
        for a in row:
            along = a / depth if depth > 0 else 0.0
            result.append((x, y + at, depth, along) if width >= height else (x + at, y, along, depth))
            at += along
        if width >= height:
            x, width = x + depth, width - depth
        else:
            y, height = y + depth, height - depth
        i += count
    return result


def rect(x, y, w, h, fill, more=""):
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(w, 0):.2f}" height="{max(h, 0):.2f}" fill="{fill}"{more}/>'


def label(x, y, words, size=12, weight=400, anchor="start", color="#1f2933"):
    plain = ' stroke="none"' if color == "#fff" else ""
    return (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{color}"{plain}>'
            f'{html.escape(words)}</text>')


def is_dark(color):
    return sum(w * int(color[i:i + 2], 16) for i, w in ((1, 0.3), (3, 0.59), (5, 0.11))) < 140


def pale(color, strength=0.22):
    channels = [int(color[i:i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - (255 - c) * strength):02x}" for c in channels)


def fitting(words, width, size):
    """The longest of the words that fits into so many pixels, or ''."""
    return next((w for w in words if 0.58 * size * len(w) <= width - 8), "")


def draw_block(block, index, x, y, w, h, phase=""):
    """A block: a column a layer, each filled from below as high as it must be at least; the pale rest could be gained. phase:
    its name where no heading says it."""
    color = PHASE_COLORS[block["phase"]]
    out, left = [f'<g class="block" data-block="{index}">', rect(x, y, w, h, pale(color))], x
    for _, ms, possible in block["layers"]:
        width = w * ms / block["ms"]
        if block["gain_ms"] is None:
            share = 1.0
        elif possible is None:
            share = 0.0
        else:
            share = min(1.0, possible / ms) if ms > 0 else 0.0
        out.append(rect(left, y + h * (1 - share), width, h * share, color))
        if left > x and width > 3:
            out.append(f'<path d="M{left:.2f} {y:.2f}V{y + h:.2f}" stroke="#fff" stroke-opacity=".55" stroke-width=".7"/>')
        left += width
    out.append(rect(x, y, w, h, "none", ' stroke="#fff" stroke-width="1.5" class="edge"'))
    direction = block["direction"] if block["phase"] in DIRECTED else ""
    full = block["gain_ms"] is None or block["gain_ms"] * h < 5 * block["ms"] # nothing pale behind the words
    ink = "#fff" if full and is_dark(color) else "#1f2933"
    time = f"{number(block['ms'])} ms"
    choices = [f"{phase} {direction} {time}", f"{phase} {time}", phase] if phase else [f"{direction} {time}", time, number(block["ms"])]
    words = fitting([" ".join(choice.split()) for choice in choices], w, 12)
    if words and h > 20:
        out.append(label(x + 5, y + 15, words, color=ink))
        gain = block["gain_ms"]
        if gain is not None and h > 37:
            more = fitting([f"{number(gain)} ms to gain", f"{number(gain)} to gain"], w, 11)
            if more and gain >= 0.001 * block["ms"]:
                out.append(label(x + 5, y + 30, more, 11, color=ink))
    out.append("</g>")
    return "".join(out)


def draw_map(page, width=1080, height=470, head=19):
    phases = {}
    for i, block in enumerate(page["blocks"]):
        phases.setdefault(block["phase"], []).append((i, block))
    order = sorted(phases, key=lambda p: -sum(b["ms"] for _, b in phases[p]))
    totals = [sum(b["ms"] for _, b in phases[p]) for p in order]
    out = [f'<svg viewBox="0 0 {width} {height}" class="map" role="img" aria-label="tree map of the step">']
    for phase, total, (x, y, w, h) in zip(order, totals, squarify(totals, 0, 0, width, height)):
        top = head if h > 6 * head and w > 60 else 0 # a heading takes room; small phases are named in their blocks
        out.append(rect(x, y, w, h, "#fff"))
        rest_x, inner = x + 1, w - 2
        rows = sorted(phases[phase], key=lambda item: ("forward", "backward", "step").index(item[1]["direction"]))
        tall = (h - top) > inner
        at = y + top if tall else rest_x
        for i, block in rows:
            share = block["ms"] / total
            if tall:
                out.append(draw_block(block, i, rest_x, at, inner, (h - top - 1) * share, "" if top else phase))
                at += (h - top - 1) * share
            else:
                out.append(draw_block(block, i, at, y + top, inner * share, h - top - 1, "" if top else phase))
                at += inner * share
        if top:
            share = percent(total / page["step_ms"])
            words = fitting([f"{phase}  {share}", phase, phase[:4]], w, 13)
            out.append(label(x + 5, y + 14, words, 13, 700))
    out.append("</svg>")
    return "".join(out)


# ----------------------------------------------------------------------------
# the timeline

def draw_row(events, begin, span, left, width, y, height):
    """The events of one row; what is too narrow to be seen is drawn together, in the colour of its longest."""
    out, pending = [], []

    def flush():
        if pending:
            longest = max(pending, key=lambda e: e["dur"])
            x0, x1 = (left + (t - begin) / span * width for t in (pending[0]["ts"], pending[-1]["ts"] + pending[-1]["dur"]))
            out.append(rect(x0, y, max(x1 - x0, 0.4), height, PHASE_COLORS.get(longest["name"], "#475569"),
                            f'><title>{html.escape(longest["name"])} {number(longest["dur"] / 1e3)} ms</title></rect')[:-2] + ">")
            pending.clear()

    for e in events:
        if pending and (e["ts"] + e["dur"] - pending[0]["ts"]) / span * width > 0.8 and e["name"] != pending[-1]["name"]:
            flush()
        elif pending and e["ts"] - pending[-1]["ts"] - pending[-1]["dur"] > 0.002 * span:
            flush()
        pending.append(e)
    flush()
    return "".join(out)


def draw_timeline(traces, step, width=1080):
    """The step's rows, one below the other: boxes, phases, all-reduce, data loader; of every rank."""
    base = min(t.clock_us for t in traces)
    shift = {t.rank: t.clock_us - base for t in traces}
    at = lambda t: dict(t.steps[step], ts=t.steps[step]["ts"] + shift[t.rank])
    shown = [t for t in traces if step in t.steps]
    begin = min(at(t)["ts"] for t in shown)
    end = max(at(t)["ts"] + at(t)["dur"] for t in shown)
    span, left, y, out = end - begin, 118, 4, []
    room = width - left - 4
    for t in shown:
        events = [dict(e, ts=e["ts"] + shift[t.rank]) for e in t.events]
        events = [e for e in events if e["ts"] < end and e["ts"] + e["dur"] > begin]
        for e in events: # the loader may have begun before the step did
            over = max(0.0, begin - e["ts"])
            e["ts"], e["dur"] = e["ts"] + over, min(e["dur"] - over, end - e["ts"] - over)
        boxes = [e for e in events if e["tid"] == t.work_track and e["name"].split(" ")[0] in ("forward", "backward", "eval")]
        who = f"rank {t.rank}: " if len(traces) > 1 else ""
        for i, e in enumerate(boxes):
            x, w = left + (e["ts"] - begin) / span * room, e["dur"] / span * room
            out.append(rect(x, y, w - 0.6, 15, "#e4e7eb"))
            if fitting([e["name"]], w, 10):
                out.append(label(x + 4, y + 11, e["name"], 10, color="#52606d"))
        y += 17
        rows = [(t.work_track, who + ("GPU" if t.work_track == TRACK_COMPUTE else "CPU"), 26)]
        rows += [(track, name, 13) for track, name in ((TRACK_ALLREDUCE, "all-reduce"), (TRACK_LOADER, "data loader"))
                 if any(e["tid"] == track for e in t.events)]
        for track, name, height in rows:
            inner = [e for e in events if e["tid"] == track and (track != t.work_track or e["name"] in PHASE_COLORS)]
            if track == t.work_track: # the box of a validation is above already
                inner = [e for e in inner if e["name"] != "eval"]
            out.append(rect(left, y, room, height, "#f1f3f5"))
            out.append(label(left - 8, y + height / 2 + 4, name, 12, anchor="end"))
            out.append(draw_row(inner, begin, span, left, room, y, height))
            y += height + 4
        y += 8
    out.append(label(left, y + 8, "0", 11, color="#7b8794") + label(width - 4, y + 8, f"{number(span / 1e3)} ms", 11, anchor="end", color="#7b8794"))
    return f'<svg viewBox="0 0 {width} {y + 14}" class="line" role="img" aria-label="timeline of the step">' + "".join(out) + "</svg>"


# ----------------------------------------------------------------------------
# the page

KEY = """<span class="sample" style="background:linear-gradient(#fbded0 45%,#ea580c 45%)"></span> Area is time, colour is the phase; one
column is one layer. The <b>full</b> colour at the bottom is the time it needs at least on {card}, the <b>pale</b> part above it could be gained."""
KEY_EMULATED = "Area is time, colour is the phase; one column is one layer."
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; color: #1f2933; max-width: 1080px; margin: 28px auto; padding: 0 16px; }}
h1 {{ font-size: 15px; font-weight: 600; color: #52606d; margin: 0; }}
h2 {{ font-size: 17px; margin: 30px 0 4px; }}
.says {{ font-size: 23px; line-height: 1.35; margin: 8px 0 6px; }}
.small {{ color: #52606d; font-size: 13.5px; margin: 3px 0 10px; }}
.warn {{ background: #fff3c4; border-left: 4px solid #f0b429; padding: 8px 12px; margin: 12px 0; }}
svg {{ width: 100%; height: auto; display: block; font-family: system-ui, sans-serif; }}
svg text:not([stroke]) {{ paint-order: stroke; stroke: #fff; stroke-width: 3px; stroke-opacity: .85; stroke-linejoin: round; }}
svg text {{ pointer-events: none; }}
.block {{ cursor: pointer; }}
.block.on .edge {{ stroke: #1f2933; stroke-width: 3; }}
table {{ border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }}
th {{ text-align: right; font-weight: 600; color: #52606d; border-bottom: 2px solid #cbd2d9; padding: 5px 8px; vertical-align: bottom; }}
td {{ text-align: right; border-bottom: 1px solid #e4e7eb; padding: 4px 8px; white-space: nowrap; }}
th.l, td.l {{ text-align: left; }}
tr.on td {{ background: #f0f4f8; }}
.key {{ display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 7px; vertical-align: -1px; }}
.name {{ white-space: nowrap; margin-right: 14px; }}
.bar {{ display: inline-block; width: 110px; height: 11px; background: #f1f3f5; vertical-align: -1px; text-align: left; line-height: 0; }}
.bar i {{ display: inline-block; height: 11px; }}
#tip {{ position: fixed; display: none; background: #1f2933; color: #fff; font-size: 13px; padding: 7px 10px; border-radius: 4px; pointer-events: none; max-width: 340px; white-space: pre-line; z-index: 2; }}
.sample {{ display: inline-block; width: 26px; height: 14px; vertical-align: -2px; border: 1px solid #fff; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p class="says">{says}</p>
<p class="small">{below}</p>
{warnings}
<h2>Where the {step_ms} ms went</h2>
<p class="small">{key} Point at a block for its numbers.</p>
{map}
<h2>As it ran</h2>
<p class="small">{overlaps}</p>
{timeline}
<p class="small">{legend}</p>
<h2>Block by block, {order}</h2>
{table}
<p class="small">{notes}</p>
<div id="tip"></div>
<script type="application/json" id="data">{data}</script>
<script>
"use strict";
const blocks = JSON.parse(document.getElementById("data").textContent).blocks;
const tip = document.getElementById("tip");
const both = n => document.querySelectorAll('[data-block="' + n + '"]');
document.querySelectorAll("[data-block]").forEach(node => {{
    const n = node.dataset.block;
    node.addEventListener("mouseenter", () => {{
        both(n).forEach(other => other.classList.add("on"));
        if (node.tagName === "g") {{ tip.textContent = blocks[n].tip; tip.style.display = "block"; }}
    }});
    node.addEventListener("mousemove", event => {{
        tip.style.left = Math.min(event.clientX + 14, window.innerWidth - 350) + "px";
        tip.style.top = event.clientY + 16 + "px";
    }});
    node.addEventListener("mouseleave", () => {{
        both(n).forEach(other => other.classList.remove("on"));
        tip.style.display = "none";
    }});
    if (node.tagName === "g") {{
        node.addEventListener("click", () => document.querySelector('tr[data-block="' + n + '"]').scrollIntoView({{ block: "center", behavior: "smooth" }}));
    }}
}});
</script>
</body>
</html>
"""


def tip_of(block, total):
    lines = [f"{title_of(block)}: {number(block['ms'])} ms, {percent(block['ms'] / total)} of the step"]
    if block["flops"] or block["bytes"]:
        lines.append(f"{scaled(block['flops'], 'FLOP')}, {scaled(block['bytes'], 'B')}")
        lines.append(f"reached: {scaled(block['flops'] / block['ms'] * 1e3, 'FLOP/s')}, {scaled(block['bytes'] / block['ms'] * 1e3, 'B/s')}")
    if block["possible_ms"] is not None:
        by = f" (bound by {block['bound']})" if block["bound"] else ""
        lines.append(f"possible: {number(block['possible_ms'])} ms{by}")
    if block["gain_ms"] is not None:
        lines.append(f"to gain: {number(block['gain_ms'])} ms, {percent(block['gain_ms'] / total)} of the step")
    layers = [(ms, layer) for layer, ms, _ in block["layers"] if layer is not None]
    if len(layers) > 1:
        low, high = min(layers), max(layers)
        lines.append(f"layer by layer: {number(low[0])} ms (layer {low[1]}) to {number(high[0])} ms (layer {high[1]})")
    return "\n".join(lines)


def draw_table(page):
    total, most = page["step_ms"], max(b["ms"] for b in page["blocks"])
    out = ['<table><tr><th class="l">block</th><th>took<br>ms</th><th>of the<br>step</th><th>FLOPs</th><th>bytes</th><th>reached</th>'
           '<th>bound by</th><th>possible<br>ms</th><th class="l">&nbsp;</th>'
           + ("" if page["emulated"] else "<th>to gain<br>ms</th><th>to gain<br>of the step</th>") + "</tr>"]
    for i, b in enumerate(page["blocks"]):
        color, known = PHASE_COLORS[b["phase"]], b["gain_ms"] is not None
        floor = min(b["ms"], b["possible_ms"]) if known else b["ms"]
        bar = (f'<span class="bar"><i style="width:{110 * floor / most:.1f}px;background:{color}"></i>'
               f'<i style="width:{110 * (b["ms"] - floor) / most:.1f}px;background:{pale(color, 0.3)}"></i></span>')
        cells = [number(b["ms"]), percent(b["ms"] / total), scaled(b["flops"], "FLOP") if b["flops"] else "", scaled(b["bytes"], "B") if b["bytes"] else "",
                 rate_of(b), b["bound"] or "", number(b["possible_ms"]) if b["possible_ms"] is not None else "", None,
                 number(b["gain_ms"]) if known else "", percent(b["gain_ms"] / total) if known else ""][:8 if page["emulated"] else 10]
        out.append(f'<tr data-block="{i}"><td class="l"><span class="key" style="background:{color}"></span>{html.escape(title_of(b))}</td>'
                   + "".join(f'<td class="l">{bar}</td>' if c is None else f"<td>{c}</td>" for c in cells) + "</tr>")
    gains = [b["gain_ms"] for b in page["blocks"] if b["gain_ms"] is not None]
    possible = total - sum(gains) if gains else sum(b["possible_ms"] or 0.0 for b in page["blocks"])
    flops, size = sum(b["flops"] for b in page["blocks"]), sum(b["bytes"] for b in page["blocks"])
    cells = [number(total), "100%", scaled(flops, "FLOP") if flops else "", scaled(size, "B") if size else "", "", "",
             number(possible) if page["modelled"] else "", ""]
    cells += [] if page["emulated"] else [number(sum(gains)), percent(sum(gains) / total)] if gains else ["", ""]
    out.append('<tr><td class="l"><b>the step</b></td>' + "".join(f"<td><b>{c}</b></td>" for c in cells) + "</tr></table>")
    return "".join(out)


def overlap_words(trace, step):
    words = []
    for track, name, hidden in ((TRACK_ALLREDUCE, "all-reduce", "hidden behind backward"), (TRACK_LOADER, "data loader", "beside the computation")):
        if any(e["tid"] == track for e in trace.events):
            busy, both = overlap(trace, step, track)
            share = f", {percent(both / busy)} of it {hidden}" if busy > 1e-4 * trace.steps[step]["dur"] / 1e3 else ""
            words.append(f"The {name} works {number(busy)} ms{share}.")
    return " ".join(words)


def build(traces, args):
    """The page's numbers, and the page."""
    trace = traces[0]
    step = choose_step(trace, args.step)
    run = trace.run
    times = phase_times(trace, step)
    shape = roofline.shape_of_config(run["model"]) if run else None
    table = bounds = None
    warnings, notes = [], []
    if shape:
        card, source = card_of_run(trace, args)
        card, source = card_at_least(card, source, times, run, args)
        table, bounds = work(run, card, args.mode)
        notes.append(f"{'Compared with' if args.card else 'The machine'}: {source}.")
        notes.append({"ambitious": "Possible is the longer of FLOPs / rate and bytes / bandwidth, at the share of them that the best kernels known for such an operation reach.",
                      "realistic": "Possible is the longer of FLOPs / rate and bytes / bandwidth, at the share of them that good kernels reach.",
                      "sustained": "Possible is the longer of FLOPs / rate and bytes / bandwidth.",
                      "nominal": "Possible is the longer of FLOPs / rate and bytes / bandwidth, both by the data sheet."}[args.mode])
        notes.append("FLOPs are those that must be executed (attention's backward computes its scores again), bytes those that memory must move if nothing is found in a cache.")
        if run["options"].get("doc-mask"):
            notes.append("With --doc-mask attention may skip what other documents hold: its possible time is shorter than said here.")
    else:
        warnings.append("This trace does not say what was run (an older trainer wrote it): the map shows where the time went, not what could be gained.")
    blocks = blocks_of(times, table, bounds, bool(run and is_emulated(run)))
    box = trace.steps[step]
    page = {"step": step, "step_ms": box["dur"] / 1e3, "modelled": bool(shape), "emulated": bool(run and is_emulated(run)),
            "card": card.name if shape else None, "on": f" on {card.name}" if shape and args.card else "", "options": run["options"] if run else {}, "blocks": blocks}
    for b in blocks:
        b["tip"] = tip_of(b, page["step_ms"])
    if shape and not page["emulated"]:
        loose = [t for t in trace.steps.values() if t["dur"] > 2 * box["dur"]]
        if len(loose) > 1 + len(trace.steps) // 4:
            warnings.append(f"{len(loose)} of {len(trace.steps)} steps took more than twice as long as this one: the machine was busy with something else.")
    says, below = sentence(page)
    looked = [e for e in trace.events if e["tid"] == TRACK_HOST and e["name"] in NOT_TRAINING]
    lengths = sorted((e["dur"] - sum(x["dur"] for x in looked if contains(e, x["ts"], x["ts"] + x["dur"]))) / 1e3
                     for n, e in trace.steps.items() if n != min(trace.steps)) or [page["step_ms"]]
    if len(trace.steps) == 1:
        warnings.append("The trace has one step, and the first one pays for first touches of memory: trace ten.")
    which = f"step {step}" + (f" of {len(trace.steps)}; they took {number(lengths[0])} to {number(lengths[-1])} ms" if len(lengths) > 1 else "")
    model = ""
    if run:
        c, o = run["model"], run["options"]
        model = (f"{c['num_hidden_layers']} layers of {c['hidden_size']}, {c['num_experts']} experts top-{c['num_experts_per_tok']}, vocabulary {c['vocab_size']}, "
                 f"B={o['batch-size']:.0f} T={o['seq-len']:.0f}, {o['grad-accum']:.0f} microbatch{'es' if o['grad-accum'] != 1 else ''}, {run['machine']}")
        if run["ranks"] > 1:
            model += f", rank {trace.rank} of {run['ranks']}"
    legend = " ".join(f'<span class="name"><span class="key" style="background:{c}"></span>{p}</span>' for p, c in PHASE_COLORS.items() if any(b["phase"] == p for b in blocks))
    data = json.dumps(page).replace("<", "\\u003c")
    text = PAGE.format(title=html.escape(" · ".join(part for part in (trace.program, which, model) if part)), says=says, below=below,
                       warnings="".join(f'<p class="warn">{w}</p>' for w in warnings), step_ms=number(page["step_ms"]), map=draw_map(page),
                       order="by what could be gained" if not page["emulated"] else "by what it could take on a real card",
                       key=KEY_EMULATED if page["emulated"] or not shape else KEY.format(card=html.escape(card.name) if args.card else "this machine"), overlaps=overlap_words(trace, step), timeline=draw_timeline(traces, step), legend=legend, table=draw_table(page),
                       notes=html.escape(" ".join(notes)), data=data)
    return page, text


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trace", help="what train_moe or train_moe_cpu wrote with --trace")
    parser.add_argument("--out", metavar="FILE", help="the page [the trace's name, .html]")
    parser.add_argument("--step", type=int, metavar="N", help="this step [the one of median length]")
    parser.add_argument("--card", metavar="NAME", help=f"compare with {', '.join(roofline.CARDS)} [the machine that ran it]")
    parser.add_argument("--gflops", type=float, metavar="X", help="GFLOP/s of matrix products [as the trainer measured]")
    parser.add_argument("--bandwidth", type=float, metavar="X", help="GB/s of memory [the card's; a CPU's is measured now]")
    parser.add_argument("--mode", default="ambitious", choices=["nominal", "sustained", "realistic", "ambitious"],
                        help="what counts as possible: see roofline.py [ambitious]")
    parser.add_argument("--merge", metavar="FILE", help="write all ranks as one timeline for ui.perfetto.dev, and nothing else")
    args = parser.parse_args()
    if args.card and args.card not in roofline.CARDS:
        fail(f"--card {args.card}: there are {', '.join(roofline.CARDS)}")
    for name in ("gflops", "bandwidth"):
        value = getattr(args, name)
        if value is not None and not 0 < value < INF:
            fail(f"--{name} {value:g}: must be above 0")
    traces = read_ranks(args.trace)
    if args.merge:
        merge(traces, args.merge)
        print(args.merge)
        return
    page, text = build(traces, args)
    path = args.out or os.path.splitext(args.trace)[0] + ".html"
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror or error}")
    says, _ = sentence(page)
    print(html.unescape(says.replace("<b>", "").replace("</b>", "")))
    print(path)


if __name__ == "__main__":
    main()
