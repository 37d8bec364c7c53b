"""A run as it goes, in the terminal: what `plot.py --live` shows. Only Python's standard library."""

import json
import math
import os
import shutil
import sys
import time

BRAILLE = (0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80) # dots of a character: left column, right column, from above
EIGHTHS = " ▏▎▍▌▋▊▉█"


class Tail:
    """A metrics.jsonl that grows: its whole lines so far. A resumed run cuts lines, a fresh one begins anew: then the file is
    read again from its start."""

    def __init__(self, path):
        self.path, self.rows, self.offset, self.head = path, [], 0, b""
        self.changed = None # when there was something new

    def read(self):
        """Reads what is new; True if there was something."""
        before = self.offset
        try:
            with open(self.path, "rb") as file:
                head = file.read(64)
                size = file.seek(0, os.SEEK_END)
                if size < self.offset or head[:len(self.head)] != self.head or not self.at_line_end(file):
                    self.rows, self.offset, before = [], 0, -1
                self.head = head if self.offset == 0 else self.head
                file.seek(self.offset)
                text = file.read()
        except FileNotFoundError: # the run has not begun yet
            self.rows, self.offset = [], 0
            return before != 0
        whole = text.rfind(b"\n") + 1
        for number, line in enumerate(text[:whole].splitlines(), 1):
            try:
                row = json.loads(line)
                row["step"] + row["tokens"]
            except (ValueError, TypeError, KeyError):
                raise ValueError(f"{self.path}: no line of a metrics.jsonl after step {self.rows[-1]['step'] if self.rows else 0}")
            if self.rows and row["step"] <= self.rows[-1]["step"]: # cut and grown again between two looks
                self.rows = [r for r in self.rows if r["step"] < row["step"]]
            self.rows.append(row)
        self.offset += whole
        if self.offset != before:
            self.changed = os.path.getmtime(self.path)
        return self.offset != before

    def at_line_end(self, file):
        """What has been read ended with a line, and should still do so."""
        if self.offset == 0:
            return True
        file.seek(self.offset - 1)
        return file.read(1) == b"\n"


def is_number(x):
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


def human(x):
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(x) >= unit * 0.9995:
            return f"{x / unit:.3g}{name}"
    return f"{x:.3g}"


def ago(seconds):
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


class Screen:
    """Lines with colours, or without where no terminal will show them."""

    def __init__(self, width, colors):
        self.width, self.colors, self.lines = width, colors, []

    def paint(self, text, color=None, bold=False):
        if not self.colors or not (color or bold):
            return text
        codes = ["1"] if bold else []
        if color:
            codes.append("38;2;" + ";".join(str(int(color[i:i + 2], 16)) for i in (1, 3, 5)))
        return f"\033[{';'.join(codes)}m{text}\033[0m"

    def add(self, text=""):
        self.lines.append(text)


def column_means(points, columns, low, high):
    """The mean of the values whose x falls into each column; None before the first and after the last."""
    sums, counts = [0.0] * columns, [0] * columns
    for x, y in points:
        c = min(columns - 1, max(0, int((x - low) / (high - low) * columns))) if high > low else 0
        sums[c] += y
        counts[c] += 1
    means = [s / n if n else None for s, n in zip(sums, counts)]
    known = [c for c, mean in enumerate(means) if mean is not None]
    for a, b in zip(known, known[1:]): # a straight line where a column has no step
        for c in range(a + 1, b):
            means[c] = means[a] + (means[b] - means[a]) * (c - a) / (b - a)
    return means


def draw_curve(screen, rows, height):
    """The loss over tokens in dots (two columns, four rows a character), validation as rings."""
    curve = [(r["tokens"], r["loss"]) for r in rows if is_number(r.get("loss"))]
    val = [(r["tokens"], r["val_loss"]) for r in rows if is_number(r.get("val_loss"))]
    if not curve:
        return
    left = 9
    columns = max(10, screen.width - left - 1)
    first, last = rows[0]["tokens"], rows[-1]["tokens"]
    first = 0 if first < 0.2 * last else first
    means = column_means(curve, 2 * columns, first, last)
    shown = [m for m in means if m is not None] + [y for _, y in val]
    low, high = min(shown), max(shown)
    span = high - low or 1.0
    grid = [[0] * columns for _ in range(height)]
    marks = {}
    previous = None
    for c, mean in enumerate(means):
        if mean is None:
            continue
        dot = round((high - mean) / span * (4 * height - 1))
        reach = range(min(previous, dot), max(previous, dot) + 1) if previous is not None and abs(dot - previous) > 1 else (dot,)
        for d in reach:
            grid[d // 4][c // 2] |= BRAILLE[c % 2][d % 4]
        previous = dot
    for x, y in val:
        c = min(columns - 1, int((x - first) / (last - first) * columns)) if last > first else 0
        marks[round((high - y) / span * (height - 1)), c] = "o"
    for line in range(height):
        axis = f"{high:8.3f} " if line == 0 else f"{low:8.3f} " if line == height - 1 else " " * left
        cells = []
        for c in range(columns):
            mark = marks.get((line, c))
            cells.append(screen.paint(mark, "#ea580c", True) if mark else screen.paint(chr(0x2800 + grid[line][c]), "#60a5fa") if grid[line][c] else " ")
        screen.add(axis + "".join(cells).rstrip())
    end = f"{human(last)} tokens"
    screen.add(" " * left + human(first) + end.rjust(columns - len(human(first))))


def draw_phases(screen, rows, colors):
    """A bar cut into phases, mean of the last steps, and their shares in words."""
    last = [r["phases"] for r in rows[-20:] if isinstance(r.get("phases"), dict)]
    total = {}
    for phases in last:
        for name, ms in phases.items():
            if is_number(ms):
                total[name] = total.get(name, 0.0) + ms
    whole = sum(total.values())
    if whole <= 0:
        return
    order = [n for n in colors if total.get(n, 0) > 0] + sorted(n for n in total if n not in colors and total[n] > 0)
    bar, done, width = "", 0.0, screen.width - 9
    for name in order:
        cells = round((done + total[name]) / whole * width) - round(done / whole * width)
        letter = "█" if screen.colors else name[0]
        bar += screen.paint(letter * cells, colors.get(name))
        done += total[name]
    screen.add("time     " + bar)
    line, used = " " * 9, 9
    for name in sorted(order, key=lambda n: -total[n]):
        words = f"{name} {100 * total[name] / whole:.1f}%  "
        if used + len(words) > screen.width:
            screen.add(line)
            line, used = " " * 9, 9
        line += screen.paint(words, colors.get(name))
        used += len(words)
    screen.add(line)


def draw_experts(screen, row):
    """Layer by layer: the busiest expert's load, the router's entropy, experts without a token."""
    load, entropy, dead = (row.get(name) if isinstance(row.get(name), list) else [] for name in ("expert_load", "router_entropy", "dead_experts"))
    layers = [l for l, x in enumerate(load) if is_number(x)]
    if not layers:
        return
    a_line = max(1, (screen.width - 9) // 6)
    for begin in range(0, len(layers), a_line):
        part = layers[begin:begin + a_line]
        screen.add("layer    " + "".join(f"{l:6d}" for l in part))
        cells = [screen.paint(f"{load[l]:6.2f}", "#dc2626" if load[l] >= 3 else "#d97706" if load[l] >= 2 else None) for l in part]
        screen.add("load     " + "".join(cells))
        if entropy:
            screen.add("entropy  " + "".join(f"{entropy[l]:6.2f}" if l < len(entropy) and is_number(entropy[l]) else "     -" for l in part))
        if any(l < len(dead) and dead[l] for l in part):
            screen.add("no token " + "".join(screen.paint(f"{dead[l]:6d}", "#dc2626" if dead[l] else None) for l in part))


def draw(tail, width, height, use_colors, phase_colors):
    """The whole picture as text."""
    screen = Screen(max(40, width), use_colors)
    name = screen.paint(tail.path, bold=True)
    if not tail.rows:
        return f"{name}: no step yet"
    row = tail.rows[-1]
    idle = time.time() - tail.changed
    usual = sorted(r["step_ms"] for r in tail.rows[-20:] if is_number(r.get("step_ms")))
    quiet = idle > 10 + 20 * usual[len(usual) // 2] / 1e3 if usual else False
    state = screen.paint(f"nothing new for {ago(idle)}", "#d97706") if quiet else "running"
    screen.add(f"{name}   step {row['step']}   {human(row['tokens'])} tokens   {state}")
    val = next((r["val_loss"] for r in reversed(tail.rows) if is_number(r.get("val_loss"))), None)
    words = [f"{label} {row[field]:{form}}" for label, field, form in (("loss", "loss", ".4f"), ("norm", "grad_norm", ".3g"), ("lr", "lr", ".1e"))
             if is_number(row.get(field))]
    words[1:1] = [f"val {val:.4f}"] if val is not None else []
    words += [f"{human(row['tokens_per_s'])} tok/s"] if is_number(row.get("tokens_per_s")) else []
    words += [f"{label} {100 * row[field]:.1f}%" for label, field in (("mfu", "mfu"), ("gemm", "gemm_share")) if is_number(row.get(field))]
    words += [f"{row['mem'] / 2**30:.2f} GiB"] if is_number(row.get("mem")) else []
    screen.add("   ".join(words))
    screen.add()
    rest = Screen(screen.width, use_colors)
    draw_phases(rest, tail.rows, phase_colors)
    draw_experts(rest, row)
    draw_curve(screen, tail.rows, max(4, min(16, height - len(rest.lines) - 6)))
    screen.add()
    return "\n".join(screen.lines + rest.lines)


def watch(path, every, times, phase_colors, pictures=None):
    """Draws until Ctrl-C, or so many times. pictures: a function that is called with the rows whenever there are new ones,
    in place of drawing in the terminal."""
    terminal = sys.stdout.isatty()
    tail, drawn = Tail(path), 0
    try:
        while True:
            new = tail.read()
            if pictures:
                if new and tail.rows:
                    pictures(tail.rows)
            else:
                size = shutil.get_terminal_size((100, 32))
                picture = draw(tail, size.columns, size.lines, terminal and "NO_COLOR" not in os.environ, phase_colors)
                print("\033[H\033[J" + picture if terminal else picture, flush=True)
            drawn += 1
            if times and drawn >= times:
                return
            time.sleep(every)
    except KeyboardInterrupt:
        print()
