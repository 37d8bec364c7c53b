"""ladder.json as words, Markdown and one self-contained HTML page: no file beside it, nothing from the network."""

import html
import json
import math
import os

from plot import FAINT, GRID, INK, PHASE_COLORS, phase_order

GREEN, RED, BLUE, ORANGE, GREY, DARK_PINK = "#059669", "#dc2626", "#2563eb", "#ea580c", "#9aa3ad", "#d6187a"
VERDICT_COLORS = {"keep": GREEN, "revert": RED, "no difference": GREY}
WAYS = {  # of averaging gradients: colour, words
    "naive": (RED, "after every microbatch, then wait (naive)"),
    "naive, overlapped": (ORANGE, "after every microbatch, during backward"),
    "last": (BLUE, "after the last microbatch, then wait"),
    "last, overlapped": (GREEN, "after the last microbatch, during backward"),
}
FIGURES = ("all_reduce", "speedup", "waiting", "hours")  # of the reference run, in the order they are shown
HERE = os.path.dirname(os.path.abspath(__file__))


def el(name, *content, **attributes):
    """An HTML element; content is HTML (see esc). class_ and aria_label become class and aria-label; None: no such attribute."""
    words = "".join(f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value), quote=True)}"'
                    for key, value in attributes.items() if value is not None)
    return f"<{name}{words}>{''.join(map(str, content))}</{name}>"


def esc(text):
    return html.escape(str(text), quote=True)


def small(text):
    return el("span", esc(text), class_="why")


def number(x, digits=3):
    """1234.5 -> 1,230; 12.345 -> 12.3; 0.08 -> 0.08"""
    if x is None or not math.isfinite(x):
        return ""
    if x == 0:
        return "0"
    decimals = digits - 1 - math.floor(math.log10(abs(x)))
    return f"{round(x, decimals):,.{max(0, decimals)}f}"


def percent(ratio):
    return f"{100 * (ratio - 1):+.1f}%".replace("-", "−")


def apart(difference):
    if difference is None:
        return "not finite"
    return "identical" if difference == 0 else f"{difference:.1e} apart"


# ----------------------------------------------------------------------------
# words

def measured(ladder):
    return [row for row in ladder["rungs"] if row["status"] == "measured" and row.get("hours")]


def kept(ladder):
    return [row for row in ladder["rungs"] if row["verdict"] == "keep" and row.get("hours")]


def summary(ladder):
    """Two or three sentences: from where to where, what brought most, what nothing."""
    rows, up = measured(ladder), kept(ladder)
    if ladder["trainer"] == "emu":
        compared = [row for row in ladder["rungs"] if row["status"] == "no times"]
        bad = [row["title"] for row in compared if not row["loss"]["agree"]]
        if bad:
            return f"In the emulator these rungs compute another loss: {', '.join(bad)}."
        return f"{len(compared)} rungs compute the same loss in the emulator, which has no clock."
    if not rows:
        return "No rung was measured."
    start = rows[0]["hours"]
    if not up:
        return f"No rung made a step surely faster: {number(start)} h to 10B tokens."
    best, last = min(up, key=lambda row: row["ratio"]), min(row["hours"] for row in up)
    text = (f"{number(start)} h to 10B tokens became {number(last)} h, {start / last:.2f} times as fast. "
            f"The largest gain: {best['title']} ({percent(best['ratio'])} of the step's time).")
    for word, verdict in (("No difference", "no difference"), ("Reverted", "revert")):
        titles = [row["title"] for row in rows if row["verdict"] == verdict]
        text += f" {word}: {', '.join(titles)}." if titles else ""
    return text


def from_to(values):
    return f"{min(values)}" if min(values) == max(values) else f"{min(values)} to {max(values)}"


def method_text(ladder):
    rows = [row for row in ladder["rungs"] if row.get("rounds")]
    if not rows:
        return ""
    rounds, steps = from_to([row["rounds"] for row in rows]), from_to([row["steps"] for row in rows])
    return (f"Each rung in turns with the one it stands on: {rounds} rounds of two runs of {steps} steps after "
            f"{ladder['warmup']} for warming up. Times are medians over runs of the mean step (quartiles); a change is the "
            f"Hodges-Lehmann estimate of the rounds' ratios with its {100 * (1 - ladder['error_rate']):g}% interval, and the "
            f"verdict is Wilcoxon's signed-rank test: of {1 / ladder['error_rate']:.0f} rungs that change nothing, one would "
            "be called keep or revert. Hours are the start's times the changes that were kept.")


def warnings(ladder):
    result = []
    cores, drift = ladder.get("others_cores"), ladder.get("drift")
    if cores is not None and cores > 0.15 and ladder["trainer"] != "emu":
        result.append(f"Other programs kept {cores:.1f} cores busy meanwhile, so spreads are wide and small gains cannot be "
                      "seen. Measure again when the machine is quiet.")
    if drift and not 0.9 < drift < 1.1:
        result.append(f"The machine changed meanwhile: the last kept rung took {drift:.2f} times what the start and the kept "
                      "changes say. Changes are of runs side by side and hold; hours are those of the machine at the start.")
    if ladder.get("stopped"):
        result.append("Stopped before the end.")
    return result


def conclusion(section):
    """Is there a bandwidth that gives all of the reference run's figures?"""
    tables = [table for ways in section["figures"].values() for table in ways.values()]
    at_once = sorted({row["bandwidth"] for table in tables for row in table["rows"] if all(row[f]["reproduced"] for f in FIGURES)})
    if at_once:
        return f"All four figures at once: at {', '.join(map(str, at_once))} GB/s."
    needs = tables[0]["needs"]
    each = [f"{section['figure_text'][f]}: {number(needs[f], 2)} GB/s" if needs[f] else f"{section['figure_text'][f]}: none" for f in FIGURES]
    return f"No single bandwidth gives all four. {'; '.join(each)}."


def counted_sentence(section):
    counted = section["counted"]
    if "why" in counted:
        return f"Not counted in the emulator: {counted['why']}."
    runs = "; ".join(f"{row['ranks']} ranks, {row['allreduce']}: {row['all_reduces']} all-reduces of {row['bytes']:,} bytes "
                     f"in a step of {row['microbatches']} microbatches" for row in counted["rows"])
    verdict = "exactly the model's" if counted["as_modelled"] else "NOT what the model assumes, so do not trust it"
    return f"Counted in the emulator with {counted['model']} ({runs}): {verdict}."


def network_markdown(section):
    at = next(s for s in section["scaling"] if s["bandwidth"] == section["bandwidth"])
    lines = [f"Several cards, predicted: {section['model']} on {section['card']} (compute time: roofline.py, realistic), "
             f"{section['network']}: {section['bandwidth']:g} GB/s, {section['latency_us']:g} us a hop. {counted_sentence(section)}", "",
             "| all-reduce | 2 ranks | 4 ranks | 8 ranks | hours with 4 | waiting with 4 |", "| --- | --- | --- | --- | --- | --- |"]
    for way, points in at["ways"].items():
        p = {point["ranks"]: point for point in points}
        lines.append(f"| {WAYS[way][1]} | " + " | ".join(f"{p[r]['speedup']:.2f}x" for r in (2, 4, 8))
                     + f" | {p[4]['hours']:.1f} | {p[4]['waiting']:.0%} |")
    lines += ["", f"Which bandwidth gives the reference run's figures? {conclusion(section)}", "",
              "| compute time | overlap | 0.08 s an all-reduce | 2.6x, naive | half of it waiting, naive | 13.2 h |",
              "| --- | --- | --- | --- | --- | --- |"]
    for compute, ways in section["figures"].items():
        for way, table in ways.items():
            needs = [f"{number(table['needs'][f], 2)} GB/s" if table["needs"][f] else "none" for f in FIGURES]
            lines.append(f"| {compute} | {way} | " + " | ".join(needs) + " |")
    return lines


# ----------------------------------------------------------------------------
# the page: rungs

def chip(row):
    if row["status"] == "cannot run":
        return el("span", "cannot run here", class_="chip no")
    if row["verdict"] is None:
        return el("span", "no times", class_="chip no") if row["status"] == "no times" else ""
    return el("span", esc(row["verdict"]), class_="chip", style=f"background:{VERDICT_COLORS[row['verdict']]}")


def whisker(row, reach):
    """The change with its interval, around a line for no change; left of it is faster."""
    if not row.get("ratio"):
        return ""
    width, middle, color = 150, 75, VERDICT_COLORS[row["verdict"]]
    x = lambda ratio: round(middle + max(-1.0, min(1.0, math.log(ratio) / reach)) * (middle - 6), 1)
    return el("svg", el("title", esc(row["why"])), el("line", x1=middle, x2=middle, y1=1, y2=21, stroke=FAINT),
              el("line", x1=x(row["low"]), x2=x(row["high"]), y1=11, y2=11, stroke=color, stroke_width=5, stroke_opacity=0.4),
              el("circle", cx=x(row["ratio"]), cy=11, r=4.5, fill=color), width=width, height=22, role="img")


def bar(hours, most, color, note="", pale=False):
    if hours is None:
        return small(note) if note else ""
    look = f"width:{max(2, 130 * hours / most):.0f}px;background:{color}" + (";opacity:.35" if pale else "")
    return el("span", class_="bar", style=look) + el("span", f"{number(hours)} h", class_="val") + (f"<br>{small(note)}" if note else "")


def reference_cell(row, rows):
    most = max([r["reference_hours"] or 0 for r in rows]) or 62
    hours = row["reference_hours"]
    note = "" if hours and row["reference"] == f"{hours:g} h" else row["reference"]  # else the bar says it
    return el("td", bar(hours, most, ORANGE, note), class_="bars")


def title_cell(row):
    switches = el("code", esc(row["switches"]))
    if row["id"] == "start":
        switches = el("details", el("summary", "switches", class_="why"), switches)
    return el("td", el("b", esc(row["title"])), "<br>" if row["id"] != "start" else "", switches)


def rungs_table(ladder):
    rows = ladder["rungs"]
    most = max([row["hours"] for row in rows if row.get("hours")] or [1])
    reach = 1.05 * max([abs(math.log(row[end])) for row in rows if row.get("ratio") for end in ("low", "high", "ratio")] or [0.1])
    lines = [el("tr", el("th", "rung"), el("th", "verdict"),
                el("th", "time of a step against the rung before<br>&nbsp; ◀ faster &nbsp; slower ▶", colspan=2),
                el("th", "hours to 10B tokens here"), el("th", "in the reference run<br>(500M model, RTX PRO 6000)"))]
    for row in rows:
        if row["status"] == "cannot run":
            middle = el("td", small(row["why"]), colspan=3)
        else:
            change = ""
            if row.get("ratio"):
                change = f"{percent(row['ratio'])} " + small(f"({percent(row['low'])} to {percent(row['high'])})")
            if "cannot tell" in row["why"] or "computes something else" in row["why"]:
                change += "<br>" + small(row["why"])
            pale = row["verdict"] in ("revert", "no difference")
            middle = el("td", whisker(row, reach)) + el("td", change) + el("td", bar(row.get("hours"), most, BLUE, pale=pale), class_="bars")
        lines.append(el("tr", title_cell(row), el("td", chip(row)), middle, reference_cell(row, rows),
                        class_="gone" if row["status"] == "cannot run" else None))
    return el("table", *lines, id="rungs")


def predicted_hours(section):
    """{id of a rung: hours with smol-500m} at the network's bandwidth"""
    ways = next(s for s in section["scaling"] if s["bandwidth"] == section["bandwidth"])["ways"]
    hours = {way: {point["ranks"]: point["hours"] for point in points} for way, points in ways.items()}
    return {"grouped": hours["naive"][1], "ranks2": hours["naive"][2], "ranks4": hours["naive"][4], "last": hours["last"][4],
            "overlap": hours["last, overlapped"][4]}


def emulated_table(ladder):
    """The rungs of the emulated trainer: losses, and hours from the model where it has any."""
    hours, rows = predicted_hours(ladder["network"]), ladder["rungs"]
    lines = [el("tr", el("th", "rung"), el("th", "check"), el("th", "loss against the rung before"),
                el("th", "hours to 10B tokens, predicted<br>(smol-500m; the model below)"),
                el("th", "in the reference run<br>(500M model, RTX PRO 6000)"))]
    for row in rows:
        mark = "" if row["id"] == "start" else chip(row)
        if row["status"] == "no times" and row["loss"]["agree"]:
            mark = el("span", "the same", class_="chip", style=f"background:{GREEN}")
        note = apart(row["loss"]["difference"]) if row.get("loss") else esc(row["why"])
        hint = "all that one card can do" if row["id"] == "grouped" else ""
        lines.append(el("tr", title_cell(row), el("td", mark), el("td", note),
                        el("td", bar(hours.get(row["id"]), max(hours.values()), BLUE, hint), class_="bars"), reference_cell(row, rows)))
    return el("table", *lines, id="rungs")


def against_part(ladder):
    if "against" not in ladder:
        return ""
    a = ladder["against"]
    note = "" if a["comparable"] else " Machine, model or sizes are others than now: compare the changes, not the hours."
    lines = [el("tr", *(el("th", word) for word in ("rung", "then", "", "now", "", "", "hours then", "now")))]
    for row in a["rows"]:
        lines.append(el("tr", el("td", esc(row["title"])), el("td", row["change_before"]), el("td", small(row["verdict_before"] or "")),
                        el("td", row["change"]), el("td", small(row["verdict"] or "")), el("td", el("b", row["word"])),
                        el("td", number(row["hours_before"]), class_="n"), el("td", number(row["hours"]), class_="n")))
    return (el("h2", "Against an earlier ladder")
            + el("p", esc(f"{a['made']}, commit {a['commit']}, {a['machine']}.{note} “The same”: the intervals overlap."), class_="sub")
            + el("table", *lines, id="against"))


# ----------------------------------------------------------------------------
# the page: phases and losses

def phase_block(name, share, ms):
    color = PHASE_COLORS.get(name, "#d4d4d4")
    bright = sum(int(color[i:i + 2], 16) * weight for i, weight in ((1, 0.3), (3, 0.6), (5, 0.1))) > 150
    look = f"width:{100 * share:.3f}%;background:{color}" + (";color:#333" if bright else "") + (";min-width:2px" if name == "other" else "")
    return el("div", esc(name) if share > 0.09 else "", style=look, title=f"{name}: {100 * share:.2f}%, {number(share * ms)} ms")


def phases_part(ladder):
    rows = [row for row in measured(ladder) if row.get("phases")]
    if not rows:
        return ""
    names = phase_order({name for row in rows for name in row["phases"]})
    longest = max(row["ms"]["median"] for row in rows)
    lines = []
    for row in rows:
        ms, other = row["ms"]["median"], 100 * row["phases"].get("other", 0)
        blocks = [phase_block(name, row["phases"][name], ms) for name in names if row["phases"].get(name, 0) > 0]
        note = "" if row["verdict"] in (None, "keep") else " " + small(f"({row['verdict']})")
        lines.append(el("tr", el("td", esc(row["title"]), note, style="width:250px"),
                        el("td", el("div", *blocks, class_="stack", data_ms=f"{100 * ms / longest:.3f}")),
                        el("td", f"{number(ms)} ms", class_="n", style="width:90px"),
                        el("td", f"other {other:.1f}%", class_="n", style=f"width:110px;color:{DARK_PINK}")))
    key = [el("span", el("i", style=f"background:{PHASE_COLORS.get(name, '#d4d4d4')}"), esc(name)) for name in names]
    return (el("h2", "Where the time of a step goes")
            + el("p", "Every millisecond belongs to a named phase or to ", el("b", "other", style=f"color:{DARK_PINK}"),
                 " (pink), the time that nobody has named. ", el("button", "shares", id="as_share", class_="on"), " ",
                 el("button", "milliseconds", id="as_ms"), class_="sub")
            + el("p", *key, class_="legend") + el("table", *lines, id="phases"))


def loss_part(ladder):
    rows = [row for row in ladder["rungs"] if row.get("loss")]
    if not rows:
        return ""
    bad = [row["title"] for row in rows if not row["loss"]["agree"]]
    text = f"Rungs whose loss differs compute something else and are reverted: {', '.join(bad)}."
    if not bad:
        text = (f"All rungs train alike: step by step, no loss is further than {max(row['loss']['difference'] for row in rows):.1e} of its "
                f"value from that of the rung before (allowed: {rows[0]['loss']['tolerance']:g}, for sums in another order).")
    curves = [(rows[0]["title"] + ", before", rows[0]["loss"]["before"])] + [(row["title"], row["loss"]["after"]) for row in rows]
    values = [v for _, curve in curves for v in curve if isinstance(v, (int, float)) and math.isfinite(v)]
    room = 0.06 * (max(values) - min(values)) or 0.1
    low, high, most = min(values) - room, max(values) + room, max(len(curve) for _, curve in curves)
    width, height, left = 560, 190, 56
    x = lambda i: round(left + (width - left - 10) * i / max(1, most - 1), 1)
    y = lambda v: round(8 + (height - 38) * (high - v) / (high - low), 1)
    drawing = []
    for v in (low + room, (low + high) / 2, high - room):
        drawing += [el("line", x1=left, x2=width - 10, y1=y(v), y2=y(v), stroke=GRID), el("text", f"{v:.2f}", x=left - 6, y=y(v) + 4, text_anchor="end")]
    drawing += [el("text", "step 1", x=left, y=height - 6), el("text", f"step {most}", x=width - 10, y=height - 6, text_anchor="end")]
    for title, curve in curves:
        points = " ".join(f"{x(i)},{y(v)}" for i, v in enumerate(curve))
        drawing.append(el("polyline", el("title", esc(title)), points=points, fill="none", stroke=BLUE, stroke_opacity=0.45, stroke_width=2))
    return (el("h2", "Do they compute the same?") + el("p", esc(text), class_="sub")
            + el("svg", *drawing, width=width, height=height, role="img", aria_label="loss of all rungs"))


# ----------------------------------------------------------------------------
# the page: several cards

def scaling_part(ladder):
    section = ladder["network"]
    points = [{"ranks": row["ranks"], "speedup": ladder["rungs"][0]["hours"] / row["hours"], "title": row["title"]}
              for row in measured(ladder) if (row.get("ranks") or 1) > 1]
    data = json.dumps({"scaling": section["scaling"], "at": section["bandwidth"], "ways": WAYS, "measured": points}).replace("<", "\\u003c")
    text = (f"Predicted, not measured: {section['model']} at T=4096, 98,304 tokens a microbatch over all cards, 10 microbatches a step, "
            f"compute time of {section['card']} from roofline.py (realistic). A step sends {section['numbers'] / 1e6:.0f}M gradients in "
            f"bf16, in {section['buckets']} all-reduces. {counted_sentence(section)}")
    key = [(f"background:{color}", words) for color, words in WAYS.values()]
    key += [(f"background:#fff;border:2px dashed {GREY};width:8px;height:8px", "as many times as cards"),
            (f"background:{INK};border-radius:50%", "the reference run")]
    if points:
        key.append((f"background:#fff;border:3px solid {INK};border-radius:50%;width:7px;height:7px", "measured here, from the start on"))
    slider = el("label", "bandwidth of the network: ", f'<input type="range" id="bandwidth" min="0" max="{len(section["scaling"]) - 1}" step="1">')
    return (el("h2", "What more cards bring") + el("p", esc(text), class_="sub")
            + el("p", slider, " ", el("b", id="bandwidth_text"))
            + el("p", *(el("span", el("i", style=look), esc(words)) for look, words in key), class_="legend")
            + el("div", el("svg", id="scaling", width=560, height=360, role="img", aria_label="speed-up against ranks"),
                 el("table", id="at4", style="width:auto"), class_="two")
            + f'<script type="application/json" id="network_data">{data}</script>')


def needs_plot(section):
    """A row a figure, a dot for each assumption: were there one bandwidth, the dots would stand above each other."""
    low, high, left, width, height = 0.4, 60.0, 330, 1060, 46 + 44 * len(FIGURES)
    x = lambda b: round(left + (width - left - 20) * math.log(b / low) / math.log(high / low), 1)
    drawing = []
    for b in [m * 10 ** e for e in range(-1, 2) for m in (1, 2, 5) if low <= m * 10 ** e <= high]:
        drawing += [el("line", x1=x(b), x2=x(b), y1=6, y2=height - 40, stroke=GRID),
                    el("text", f"{b:g}", x=x(b), y=height - 22, text_anchor="middle")]
    drawing.append(el("text", "bandwidth, GB/s", x=(left + width) // 2, y=height - 4, text_anchor="middle"))
    if low <= section["bandwidth"] <= high:
        at = x(section["bandwidth"])
        drawing.append(el("line", x1=at, x2=at, y1=6, y2=height - 40, stroke=FAINT, stroke_dasharray="4 3"))
    for i, figure in enumerate(FIGURES):
        y, name = 26 + 44 * i, section["figure_text"][figure]
        drawing += [el("line", x1=left, x2=width - 20, y1=y, y2=y, stroke="#cfd5db"), el("text", esc(name), x=left - 10, y=y + 5, text_anchor="end")]
        for (compute, ways), color in zip(section["figures"].items(), (ORANGE, BLUE)):
            for way, table in ways.items():
                need, filled = table["needs"][figure], way == "no overlap"
                once = figure != "all_reduce" or (color == ORANGE and filled)  # it is the same under all assumptions
                if once and need and low <= need <= high:
                    drawing.append(el("circle", el("title", esc(f"{name}: {number(need)} GB/s, compute {compute}, {way}")), cx=x(need), cy=y,
                                      r=7, fill=color if filled else "#fff", stroke=color, stroke_width=2.5))
    return el("svg", *drawing, width=width, height=height, role="img", aria_label="the bandwidth that each figure needs")


def figures_table(rows):
    show = {"all_reduce": "{:.3f} s", "speedup": "{:.2f}x", "waiting": "{:.0%}", "hours": "{:.1f} h"}
    heads = ("GB/s", "an all-reduce (0.08 s)", "4 cards, naive (2.6x)", "of it waiting (50%)", "last of 10 (13.2 h)")
    lines = [el("tr", *(el("th", head) for head in heads))]
    for row in rows:
        cells = [el("td", show[f].format(row[f]["value"]), " ✓" if row[f]["reproduced"] else "", class_="n yes" if row[f]["reproduced"] else "n")
                 for f in FIGURES]
        lines.append(el("tr", el("td", f"{row['bandwidth']:g}", class_="n"), *cells))
    return el("table", *lines, style="width:auto")


def figures_part(section):
    first, second = (el("b", esc(name), style=f"color:{color}") for name, color in zip(section["figures"], (ORANGE, BLUE)))
    tables = [el("div", el("p", el("b", esc(f"Compute {compute}; {way}"))), figures_table(table["rows"]))
              for compute, ways in section["figures"].items() for way, table in ways.items()]
    return (el("h2", "Which network did the reference run have?") + el("p", esc(conclusion(section)), class_="lead")
            + el("p", "The same model, asked backwards: at which bandwidth does it give each figure that is told? If the figures came from one "
                 f"network, the dots would stand above each other. Compute time {first}, or {second}; filled: cards wait for each all-reduce, "
                 f"hollow: it runs during backward. Dashed: {section['bandwidth']:g} GB/s, {esc(section['network'])}. So at least one figure has "
                 "another cause than the network: cards that slow each other down (heat, power), or a loader that shares the CPU.", class_="sub")
            + needs_plot(section)
            + el("details", el("summary", f"Each bandwidth, and which figures it gives (✓: within {100 * section['tolerance']:.0f}%)"),
                 el("div", *tables, class_="two")))


# ----------------------------------------------------------------------------

def beside(name):
    with open(os.path.join(HERE, name), encoding="utf-8") as file:
        return file.read()


def page(ladder):
    where = (f"{ladder['program']}, model {ladder['model']}, {ladder['batch_size']} x {ladder['seq_len']} tokens a microbatch, "
             f"{ladder['grad_accum']} a step, on {ladder['machine']}; {ladder['made']}, commit {ladder['commit']}, {ladder['minutes']:.1f} minutes")
    rows, up, emulated = measured(ladder), kept(ladder), ladder["trainer"] == "emu"
    title = f"The ladder: {number(rows[0]['hours'])} h → {number(min(r['hours'] for r in up))} h to 10B tokens" if rows and up else "The ladder"
    explain = "Each row adds one switch; the loss must stay what it was."
    if not emulated:
        explain = ("Each row adds one switch and is kept only if the whole step got surely faster. Left the hours on this machine with this "
                   "model, right what the reference run tells: two scales, compare the shapes.")
        if any(row["verdict"] in ("revert", "no difference") for row in rows):
            explain += " A pale bar was tried and not kept: the next rung does not stand on it."
    method = method_text(ladder) or "The emulator runs the GPU trainer on a CPU: it counts and compares, and has no clock."
    parts = [el("h1", esc(title)), el("p", esc(where), class_="sub"), el("p", esc(summary(ladder)), class_="lead")]
    parts += [el("p", esc(text), class_="warn") for text in warnings(ladder)]
    parts += [el("h2", "Rung by rung"), el("p", explain, class_="sub"), emulated_table(ladder) if emulated else rungs_table(ladder),
              el("p", esc(method), class_="sub", style="margin-top:10px"), against_part(ladder), phases_part(ladder), loss_part(ladder),
              scaling_part(ladder), figures_part(ladder["network"])]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return ("<!DOCTYPE html>\n" + el("html", el("head", head, el("title", esc(title)), el("style", beside("ladder_page.css"))),
                                     el("body", "\n".join(parts), el("script", beside("ladder_page.js"))), lang="en") + "\n")
