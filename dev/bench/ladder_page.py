"""ladder.json as words, Markdown and one self-contained HTML page: no file beside it, nothing from the network."""

import html
import json
import math

from plot import FAINT, GRID, INK, PHASE_COLORS, phase_order

GREEN, RED, BLUE, ORANGE, GREY = "#059669", "#dc2626", "#2563eb", "#ea580c", "#9aa3ad"
VERDICT_COLORS = {"keep": GREEN, "revert": RED, "no difference": GREY}
WAY_STYLE = {"naive": (RED, "after every microbatch, then wait (naive)"), "naive, overlapped": (ORANGE, "after every microbatch, during backward"),
             "last": (BLUE, "after the last microbatch, then wait"), "last, overlapped": (GREEN, "after the last microbatch, during backward")}


def esc(text):
    return html.escape(str(text), quote=True)


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


# ----------------------------------------------------------------------------
# words

def measured(ladder):
    return [row for row in ladder["rungs"] if row["status"] == "measured" and row.get("hours")]


def kept(ladder):
    return [row for row in ladder["rungs"] if row["verdict"] == "keep" and row.get("hours")]


def summary(ladder):
    """Two or three sentences: from where to where, and what brought most."""
    rows, up = measured(ladder), kept(ladder)
    if ladder["trainer"] == "emu":
        apart = [row for row in ladder["rungs"] if row["status"] == "no times"]
        bad = [row["title"] for row in apart if not row["loss"]["agree"]]
        return (f"{len(apart)} rungs compute the same loss in the emulator, which has no clock." if not bad else
                f"In the emulator these rungs compute another loss: {', '.join(bad)}.")
    if not rows:
        return "No rung was measured."
    start = rows[0]["hours"]
    if not up:
        return f"No rung made a step surely faster: {number(start)} h to 10B tokens."
    best = min(up, key=lambda row: row["ratio"])
    text = (f"{number(start)} h to 10B tokens became {number(up[-1]['hours'])} h, {start / up[-1]['hours']:.2f} times as fast. "
            f"The largest gain: {best['title']} ({percent(best['ratio'])} of the step's time).")
    nothing = [row["title"] for row in rows if row["verdict"] == "no difference"]
    slower = [row["title"] for row in rows if row["verdict"] == "revert"]
    if nothing:
        text += f" No difference: {', '.join(nothing)}."
    if slower:
        text += f" Reverted: {', '.join(slower)}."
    return text


def method_text(ladder):
    rows = [row for row in ladder["rungs"] if row.get("rounds")]
    if not rows:
        return ""
    rounds, steps = [row["rounds"] for row in rows], [row["steps"] for row in rows]
    between = lambda v: f"{min(v)}" if min(v) == max(v) else f"{min(v)} to {max(v)}"
    return (f"Each rung in turns with the one it stands on: {between(rounds)} rounds of two runs of {between(steps)} steps "
            f"after {ladder['warmup']} for warming up. Medians of the runs' means (quartiles); the change is the Hodges-Lehmann estimate of the "
            f"rounds' ratios with its {100 * (1 - ladder['error_rate']):g}% interval, and the verdict is Wilcoxon's signed-rank test: "
            f"one rung in {1 / ladder['error_rate']:.0f} that changes nothing would be called keep or revert. "
            f"Hours are the start's times the kept changes.")


def warnings(ladder):
    result = []
    cores = ladder.get("others_cores")
    if cores is not None and cores > 0.15 and ladder["trainer"] != "emu":
        result.append(f"Other programs kept {cores:.1f} cores busy meanwhile, so spreads are wide and small gains cannot be seen. "
                      "Measure again when the machine is quiet.")
    drift = ladder.get("drift")
    if drift and not 0.9 < drift < 1.1:
        result.append(f"The machine changed meanwhile: the last kept rung took {drift:.2f} times what the start and the kept changes say. "
                      "Changes are of runs side by side and hold; hours are those of the machine as it was at the start.")
    if ladder.get("stopped"):
        result.append("Stopped before the end.")
    return result


def needs_sentence(needs):
    parts = [f"{text} needs {number(needs[name], 2)} GB/s" if needs[name] else f"{text} comes at no bandwidth"
             for name, text in (("all_reduce", "0.08 s an all-reduce"), ("speedup", "2.6x"), ("waiting", "half of the step waiting"),
                                ("hours", "13.2 h"))]
    return ", ".join(parts)


def single_bandwidth(section):
    """The bandwidths of the tables that reproduce all figures at once."""
    return sorted({row["bandwidth"] for ways in section["figures"].values() for way in ways.values() for row in way["rows"]
                   if all(row[name]["reproduced"] for name in section["figure_text"])})


def conclusion(section):
    all_at_once = single_bandwidth(section)
    if all_at_once:
        return f"All four figures at once: at {', '.join(map(str, all_at_once))} GB/s."
    return "No single bandwidth gives all four."


def counted_sentence(section):
    counted = section["counted"]
    if "why" in counted:
        return f"Not counted in the emulator: {counted['why']}."
    first = "; ".join(f"{row['ranks']} ranks, {row['allreduce']}: {row['all_reduces']} all-reduces of {row['bytes']:,} bytes in a step of "
                      f"{row['microbatches']} microbatches" for row in counted["rows"])
    verdict = "exactly the model's" if counted["as_modelled"] else "NOT what the model assumes, so do not trust it"
    return f"Counted in the emulator with {counted['model']} ({first}): {verdict}."


def network_markdown(section):
    at = next(s for s in section["scaling"] if s["bandwidth"] == section["bandwidth"])
    lines = [f"Several cards, predicted: {section['model']} on {section['card']} (compute time: roofline.py, realistic), {section['network']}: "
             f"{section['bandwidth']:g} GB/s, {section['latency_us']:g} us a hop. {counted_sentence(section)}", "",
             "| all-reduce | 2 ranks | 4 ranks | 8 ranks | hours with 4 | waiting with 4 |", "| --- | --- | --- | --- | --- | --- |"]
    for way, points in at["ways"].items():
        p = {point["ranks"]: point for point in points}
        lines.append(f"| {WAY_STYLE[way][1]} | {p[2]['speedup']:.2f}x | {p[4]['speedup']:.2f}x | {p[8]['speedup']:.2f}x | "
                     f"{p[4]['hours']:.1f} | {p[4]['waiting']:.0%} |")
    lines += ["", f"Which bandwidth gives the reference run's figures? {conclusion(section)}", "",
              "| compute time | overlap | 0.08 s an all-reduce | 2.6x, naive | half of it waiting, naive | 13.2 h |", "| --- | --- | --- | --- | --- | --- |"]
    for compute, ways in section["figures"].items():
        for way, table in ways.items():
            cells = [f"{number(table['needs'][f], 2)} GB/s" if table["needs"][f] else "none" for f in ("all_reduce", "speedup", "waiting", "hours")]
            lines.append(f"| {compute} | {way} | " + " | ".join(cells) + " |")
    return lines


# ----------------------------------------------------------------------------
# the page

CSS = """
body { font: 15px/1.5 system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif; color: INK; max-width: 1180px; margin: 28px auto 60px; padding: 0 20px; background: #fff }
h1 { font-size: 28px; margin: 0 0 4px } h2 { font-size: 20px; margin: 44px 0 4px } .sub { color: #5b6672; margin: 0 0 14px; max-width: 62em }
.lead { font-size: 17px; margin: 10px 0 4px; max-width: 58em } .warn { background: #fff7d6; border-left: 4px solid #eab308; padding: 8px 12px; margin: 10px 0; max-width: 62em }
table { border-collapse: collapse; width: 100% } th { text-align: left; font-weight: 600; color: #5b6672; font-size: 13px; padding: 4px 10px; border-bottom: 1px solid #cfd5db; vertical-align: bottom }
td { padding: 6px 10px; border-bottom: 1px solid GRID; vertical-align: middle } td.n { text-align: right; font-variant-numeric: tabular-nums }
code { font: 12px ui-monospace, 'DejaVu Sans Mono', monospace; color: #5b6672 } .why { color: #5b6672; font-size: 13px }
.chip { display: inline-block; color: #fff; border-radius: 10px; padding: 1px 10px; font-size: 13px; white-space: nowrap } .chip.no { color: #5b6672; background: none; border: 1px dashed #9aa3ad }
.bar { height: 20px; border-radius: 2px; display: inline-block; vertical-align: middle } .val { margin-left: 6px; font-variant-numeric: tabular-nums; white-space: nowrap; font-size: 14px }
.stack { display: flex; height: 24px; border-radius: 2px; overflow: hidden } .stack div { height: 100%; overflow: hidden; color: #fff; font-size: 12px; line-height: 24px; text-align: center; white-space: nowrap }
.legend span { display: inline-block; margin-right: 16px; font-size: 13px; white-space: nowrap } .legend i { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 5px; vertical-align: -1px }
.gone td { color: #6b7580 } .yes { background: #d1fae5; font-weight: 600 } button { font: inherit; font-size: 13px; padding: 2px 10px; border: 1px solid #cfd5db; background: #fff; border-radius: 4px; cursor: pointer }
button.on { background: INK; color: #fff } input[type=range] { width: 320px; vertical-align: middle } summary { cursor: pointer; color: BLUE; margin: 10px 0 } svg text { font: 13px system-ui, 'DejaVu Sans', sans-serif; fill: INK }
.two { display: flex; gap: 30px; flex-wrap: wrap; align-items: flex-start }
""".replace("INK", INK).replace("GRID", GRID).replace("BLUE", BLUE)


def chip(row):
    if row["status"] == "cannot run":
        return '<span class="chip no">cannot run here</span>'
    if row["status"] == "no times" and row["verdict"] is None:
        return '<span class="chip no">no times</span>'
    if row["verdict"] is None:
        return ""
    return f'<span class="chip" style="background:{VERDICT_COLORS[row["verdict"]]}">{esc(row["verdict"])}</span>'


def whisker(row, reach):
    """The change with its interval, around a line for no change; left of it is faster."""
    if not row.get("ratio"):
        return ""
    width, middle = 150, 75
    x = lambda ratio: middle + max(-1.0, min(1.0, math.log(ratio) / reach)) * (middle - 6)
    color = VERDICT_COLORS[row["verdict"]]
    return (f'<svg width="{width}" height="22" role="img"><title>{esc(row["why"])}</title><line x1="{middle}" x2="{middle}" y1="1" y2="21" stroke="{FAINT}"/>'
            f'<line x1="{x(row["low"]):.1f}" x2="{x(row["high"]):.1f}" y1="11" y2="11" stroke="{color}" stroke-width="5" stroke-opacity=".4"/>'
            f'<circle cx="{x(row["ratio"]):.1f}" cy="11" r="4.5" fill="{color}"/></svg>')


def bar(hours, most, color, note="", pale=False):
    if hours is None:
        return f'<span class="why">{esc(note)}</span>' if note else ""
    opacity = ";opacity:.35" if pale else ""
    return (f'<span class="bar" style="width:{max(2, 130 * hours / most):.0f}px;background:{color}{opacity}"></span>'
            f'<span class="val">{number(hours)} h</span>' + (f'<br><span class="why">{esc(note)}</span>' if note else ""))


def rungs_table(ladder):
    rows = ladder["rungs"]
    if ladder["trainer"] == "emu":
        return emulated_table(ladder)
    most = max([row["hours"] for row in rows if row.get("hours")] or [1])
    reference = max(row["reference_hours"] or 0 for row in rows) or 62
    reach = max([abs(math.log(r)) for row in rows if row.get("ratio") for r in (row["low"], row["high"], row["ratio"])] or [0.1]) * 1.05
    out = [f'<table id="rungs"><tr><th>rung</th><th>verdict</th><th>time of a step against the rung before<br>◀ faster &nbsp; slower ▶</th><th></th>'
           f'<th>hours to 10B tokens here</th><th>in the reference run<br>(500M model, RTX PRO 6000)</th></tr>']
    for row in rows:
        gone = row["status"] == "cannot run"
        change = f'{percent(row["ratio"])} <span class="why">({percent(row["low"])} to {percent(row["high"])})</span>' if row.get("ratio") else ""
        if gone:
            change = f'<span class="why">{esc(row["why"])}</span>'
        if "cannot tell" in row["why"] or "computes something else" in row["why"]:
            change += f'<br><span class="why">{esc(row["why"])}</span>'
        pale = row["verdict"] in ("revert", "no difference")
        told = row["reference"]
        if row["reference_hours"] and told == f"{row['reference_hours']:g} h":
            told = "" # the bar says so
        span = ' colspan="3"' if gone else ""
        middle = "" if gone else f"<td>{whisker(row, reach)}</td>"
        hours = "" if gone else f'<td>{bar(row.get("hours"), most, BLUE, pale=pale)}</td>'
        change_cell = f"<td{span}>{change}</td>" if gone else middle + f"<td>{change}</td>"
        switch = f'<details><summary class="why">switches</summary><code>{esc(row["switches"])}</code></details>' if row["id"] == "start" else f'<br><code>{esc(row["switches"])}</code>'
        out.append(f'<tr class="{"gone" if gone else ""}"><td><b>{esc(row["title"])}</b>{switch}</td><td>{chip(row)}</td>{change_cell}{hours}'
                   f'<td>{bar(row["reference_hours"], reference, ORANGE, told)}</td></tr>')
    return "\n".join(out) + "</table>"


def predicted_hours(section):
    """{id of a rung: hours with smol-500m}, at the network's bandwidth"""
    ways = next(s for s in section["scaling"] if s["bandwidth"] == section["bandwidth"])["ways"]
    hours = {way: {point["ranks"]: point["hours"] for point in points} for way, points in ways.items()}
    return {"start": None, "grouped": hours["naive"][1], "ranks2": hours["naive"][2], "ranks4": hours["naive"][4], "last": hours["last"][4],
            "overlap": hours["last, overlapped"][4]}


def apart(difference):
    return "identical" if difference == 0 else f"{difference:.1e} apart" if difference is not None else "not finite"


def emulated_table(ladder):
    """The rungs of the emulated trainer: losses, and hours from the model where it has any."""
    hours = predicted_hours(ladder["network"])
    most = max(h for h in hours.values() if h)
    reference = max(row["reference_hours"] or 0 for row in ladder["rungs"]) or 62
    out = ['<table id="rungs"><tr><th>rung</th><th>check</th><th>loss against the rung before</th><th>hours to 10B tokens, predicted<br>(smol-500m; the model below)</th>'
           '<th>in the reference run<br>(500M model, RTX PRO 6000)</th></tr>']
    for row in ladder["rungs"]:
        good = row["status"] == "no times" and row["loss"]["agree"]
        mark = f'<span class="chip" style="background:{GREEN}">the same</span>' if good else "" if row["id"] == "start" else chip(row)
        note = apart(row["loss"]["difference"]) if row.get("loss") else esc(row["why"])
        told = "" if row["reference"] == f"{row['reference_hours'] or 0:g} h" else row["reference"]
        hint = "all switches of one card" if row["id"] == "grouped" else ""
        out.append(f'<tr><td><b>{esc(row["title"])}</b><br><code>{esc(row["switches"])}</code></td><td>{mark}</td><td>{note}</td>'
                   f'<td>{bar(hours.get(row["id"]), most, BLUE, hint)}</td><td>{bar(row["reference_hours"], reference, ORANGE, told)}</td></tr>')
    return "\n".join(out) + "</table>"


def phases_part(ladder):
    rows = [row for row in measured(ladder) if row.get("phases")]
    if not rows:
        return ""
    names = phase_order({name for row in rows for name in row["phases"]})
    longest = max(row["ms"]["median"] for row in rows)
    out = ['<h2>Where the time of a step goes</h2><p class="sub">Every millisecond belongs to a named phase or to <b style="color:#d6187a">other</b> (pink), the time that '
           'nobody has named. <button id="as_share" class="on">shares</button> <button id="as_ms">milliseconds</button></p><p class="legend">']
    out += [f'<span><i style="background:{PHASE_COLORS.get(name, "#d4d4d4")}"></i>{esc(name)}</span>' for name in names]
    out.append('</p><table id="phases">')
    for row in rows:
        cells = []
        for name in names:
            share = row["phases"].get(name, 0.0)
            if share <= 0:
                continue
            dark = PHASE_COLORS.get(name, "#d4d4d4") in ("#67e8f9", "#fde68a", "#86efac", "#d6d3d1", "#a5b4fc", "#fbbf24")
            label = esc(name) if share > 0.09 else ""
            least = ";min-width:2px" if name == "other" else ""
            cells.append(f'<div style="width:{100 * share:.3f}%;background:{PHASE_COLORS.get(name, "#d4d4d4")}{";color:#333" if dark else ""}{least}" '
                         f'title="{esc(name)}: {100 * share:.2f}%, {number(share * row["ms"]["median"])} ms">{label}</div>')
        scale = 100 * row["ms"]["median"] / longest
        note = "" if row["verdict"] in (None, "keep") else f' <span class="why">({esc(row["verdict"])})</span>'
        out.append(f'<tr><td style="width:250px">{esc(row["title"])}{note}</td><td><div class="stack" data-ms="{scale:.3f}">{"".join(cells)}</div></td>'
                   f'<td class="n" style="width:90px">{number(row["ms"]["median"])} ms</td><td class="n" style="width:110px;color:#d6187a">other {100 * row["phases"].get("other", 0):.1f}%</td></tr>')
    return "\n".join(out) + "</table>"


def loss_part(ladder):
    rows = [row for row in ladder["rungs"] if row.get("loss")]
    if not rows:
        return ""
    worst = max(row["loss"]["difference"] if row["loss"]["difference"] is not None else math.inf for row in rows)
    agree = all(row["loss"]["agree"] for row in rows)
    text = (f"All rungs train alike: step by step, no loss is further than {worst:.1e} of its value from that of the rung before "
            f"(allowed: {rows[0]['loss']['tolerance']:g}, for sums in another order)." if agree else
            "Rungs whose loss differs compute something else and are reverted: " + ", ".join(row["title"] for row in rows if not row["loss"]["agree"]) + ".")
    curves = [(rows[0]["title"] + ", before", rows[0]["loss"]["before"])] + [(row["title"], row["loss"]["after"]) for row in rows]
    most, values = max(len(c) for _, c in curves), [v for _, c in curves for v in c if isinstance(v, (int, float)) and math.isfinite(v)]
    low, high = min(values), max(values)
    room = (high - low) * 0.06 or 0.1
    low, high = low - room, high + room
    w, h, left, top = 560, 190, 56, 8
    x = lambda i: left + (w - left - 10) * i / max(1, most - 1)
    y = lambda v: top + (h - top - 30) * (high - v) / (high - low)
    lines = "".join(f'<polyline fill="none" stroke="{BLUE}" stroke-opacity=".45" stroke-width="2" points="'
                    + " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(c)) + f'"><title>{esc(name)}</title></polyline>' for name, c in curves)
    axis = "".join(f'<line x1="{left}" x2="{w - 10}" y1="{y(v):.1f}" y2="{y(v):.1f}" stroke="{GRID}"/><text x="{left - 6}" y="{y(v) + 4:.1f}" text-anchor="end">{v:.2f}</text>'
                   for v in (low + room, (low + high) / 2, high - room))
    axis += f'<text x="{left}" y="{h - 6}">step 1</text><text x="{w - 10}" y="{h - 6}" text-anchor="end">step {most}</text>'
    return f'<h2>Do they compute the same?</h2><p class="sub">{esc(text)}</p><svg width="{w}" height="{h}" role="img" aria-label="loss of all rungs">{axis}{lines}</svg>'


def log_ticks(low, high):
    return [m * 10 ** e for e in range(-2, 4) for m in (1, 2, 5) if low <= m * 10 ** e <= high]


def needs_plot(section):
    """A row a figure, a dot for each assumption: were there one bandwidth, the dots would stand above each other."""
    low, high, left, w = 0.4, 60.0, 330, 1060
    compute = list(section["figures"])
    order = ("all_reduce", "speedup", "waiting", "hours")
    h = 46 + 44 * len(order)
    x = lambda b: left + (w - left - 20) * math.log(b / low) / math.log(high / low)
    out = [f'<svg width="{w}" height="{h}" role="img" aria-label="bandwidth that each figure needs">']
    for b in log_ticks(low, high):
        out.append(f'<line x1="{x(b):.1f}" x2="{x(b):.1f}" y1="6" y2="{h - 40}" stroke="{GRID}"/><text x="{x(b):.1f}" y="{h - 22}" text-anchor="middle">{b:g}</text>')
    out.append(f'<text x="{(left + w) / 2:.0f}" y="{h - 4}" text-anchor="middle">bandwidth, GB/s</text>')
    b = section["bandwidth"]
    out.append(f'<line x1="{x(b):.1f}" x2="{x(b):.1f}" y1="6" y2="{h - 40}" stroke="{FAINT}" stroke-dasharray="4 3"/>')
    for i, name in enumerate(order):
        y = 26 + 44 * i
        out.append(f'<line x1="{left}" x2="{w - 20}" y1="{y}" y2="{y}" stroke="#cfd5db"/><text x="{left - 10}" y="{y + 5}" text-anchor="end">{esc(section["figure_text"][name])}</text>')
        for c, key in enumerate(compute):
            for way, filled in (("no overlap", True), ("overlap", False)):
                need = section["figures"][key][way]["needs"][name]
                if name == "all_reduce" and (c, filled) != (0, True):
                    continue # the same in all four
                if need and low <= need <= high:
                    color = ORANGE if c == 0 else BLUE
                    out.append(f'<circle cx="{x(need):.1f}" cy="{y}" r="7" fill="{color if filled else "#fff"}" stroke="{color}" stroke-width="2.5"><title>{esc(section["figure_text"][name])}: '
                               f'{number(need)} GB/s, compute {esc(key)}, {way}</title></circle>')
    return "".join(out) + "</svg>"


def figures_table(section, compute, way):
    rows = section["figures"][compute][way]["rows"]
    out = ['<table style="width:auto"><tr><th>GB/s</th><th>an all-reduce (0.08 s)</th><th>4 cards, naive (2.6x)</th><th>of it waiting (50%)</th><th>last of 10 (13.2 h)</th></tr>']
    show = {"all_reduce": lambda v: f"{v:.3f} s", "speedup": lambda v: f"{v:.2f}x", "waiting": lambda v: f"{100 * v:.0f}%", "hours": lambda v: f"{v:.1f} h"}
    for row in rows:
        cells = "".join(f'<td class="n{" yes" if row[name]["reproduced"] else ""}">{text(row[name]["value"])}{" ✓" if row[name]["reproduced"] else ""}</td>' for name, text in show.items())
        out.append(f'<tr><td class="n">{row["bandwidth"]:g}</td>{cells}</tr>')
    return "".join(out) + "</table>"


def network_part(ladder):
    section = ladder["network"]
    points = [{"ranks": row["ranks"], "speedup": ladder["rungs"][0]["hours"] / row["hours"], "title": row["title"]}
              for row in measured(ladder) if (row.get("ranks") or 1) > 1]
    compute = list(section["figures"])
    data = {"scaling": section["scaling"], "at": section["bandwidth"], "styles": WAY_STYLE, "measured": points}
    key = "".join(f'<span><i style="background:{color}"></i>{esc(text)}</span>' for color, text in WAY_STYLE.values())
    out = [f'<h2>What more cards bring</h2><p class="sub">Predicted, not measured: {esc(section["model"])} at T=4096, 98,304 tokens a microbatch over all cards, 10 microbatches a step, '
           f'compute time of {esc(section["card"])} from roofline.py (realistic). A step sends {section["numbers"] / 1e6:.0f}M gradients in bf16, in {section["buckets"]} all-reduces. '
           f'{esc(counted_sentence(section))}</p><p>bandwidth of the network: <input type="range" id="bandwidth" min="0" max="{len(section["scaling"]) - 1}" step="1" aria-label="bandwidth"> '
           f'<b id="bandwidth_text"></b></p><p class="legend">{key}<span><i style="background:#fff;border:2px dashed {GREY};width:8px;height:8px"></i>as many times as cards</span>'
           f'<span><i style="background:{INK};border-radius:50%"></i>the reference run: 2.6x naive, 3.3x with the last of 10</span>'
           + (f'<span><i style="background:#fff;border:3px solid {INK};border-radius:50%;width:7px;height:7px"></i>measured here</span>' if points else "")
           + '</p><div class="two"><svg id="scaling" width="560" height="360" role="img" aria-label="speed-up against ranks"></svg><table id="at4" style="width:auto"></table></div>',
           f'<script type="application/json" id="network_data">{json.dumps(data).replace("<", chr(92) + "u003c")}</script>',
           f'<h2>Which network did the reference run have?</h2><p class="lead">{esc(conclusion(section))}</p><p class="sub">The same model, asked backwards: at which bandwidth does it give each figure that '
           f'is told? If the figures came from one network, the dots would stand above each other. Compute time <b style="color:{ORANGE}">{esc(compute[0])}</b>, or <b style="color:{BLUE}">{esc(compute[1])}</b>; '
           f'filled: cards wait for each all-reduce, hollow: it runs during backward. Dashed: {section["bandwidth"]:g} GB/s, {esc(section["network"])}. So at least one figure has another '
           f'cause than the network: cards that slow each other down (heat, power), or a loader that shares the CPU.</p>', needs_plot(section)]
    out.append("<details><summary>Each bandwidth, and which figures it gives (✓: within "
               f"{100 * section['tolerance']:.0f}%)</summary><div class='two'>")
    for name in compute:
        for way in section["figures"][name]:
            out.append(f"<div><p><b>Compute {esc(name)}; {esc(way)}</b></p>{figures_table(section, name, way)}</div>")
    return "\n".join(out) + "</div></details>"


def against_part(ladder):
    if "against" not in ladder:
        return ""
    a = ladder["against"]
    note = "" if a["comparable"] else " Machine, model or sizes are others than now: compare the changes, not the hours."
    out = [f'<h2>Against an earlier ladder</h2><p class="sub">{esc(a["made"])}, commit {esc(a["commit"])}, {esc(a["machine"])}.{note} “The same”: the intervals overlap.</p>'
           '<table id="against"><tr><th>rung</th><th>then</th><th></th><th>now</th><th></th><th></th><th>hours then</th><th>now</th></tr>']
    for row in a["rows"]:
        out.append(f'<tr><td>{esc(row["title"])}</td><td>{esc(row["change_before"])}</td><td class="why">{esc(row["verdict_before"] or "")}</td><td>{esc(row["change"])}</td>'
                   f'<td class="why">{esc(row["verdict"] or "")}</td><td><b>{esc(row["word"])}</b></td><td class="n">{number(row["hours_before"])}</td><td class="n">{number(row["hours"])}</td></tr>')
    return "\n".join(out) + "</table>"


SCRIPT = """
'use strict';
(function () {
    var stacks = document.querySelectorAll('#phases .stack'), share = document.getElementById('as_share'), ms = document.getElementById('as_ms');
    function show(asShare) {
        stacks.forEach(function (s) { s.style.width = (asShare ? 100 : s.dataset.ms) + '%'; });
        share.className = asShare ? 'on' : ''; ms.className = asShare ? '' : 'on';
    }
    if (share) { share.onclick = function () { show(true); }; ms.onclick = function () { show(false); }; }

    var data = JSON.parse(document.getElementById('network_data').textContent), svg = document.getElementById('scaling');
    var slider = document.getElementById('bandwidth'), most = 8, W = 560, H = 360, left = 46, bottom = 44;
    function x(r) { return left + (W - left - 14) * (r - 1) / (most - 1); }
    function y(s) { return 10 + (H - 10 - bottom) * (1 - s / most); }
    function element(name, attributes, text) {
        var e = document.createElementNS('http://www.w3.org/2000/svg', name);
        for (var k in attributes) { e.setAttribute(k, attributes[k]); }
        if (text !== undefined) { e.textContent = text; }
        svg.appendChild(e);
        return e;
    }
    function titled(e, text) {
        var t = document.createElementNS('http://www.w3.org/2000/svg', 'title');
        t.textContent = text;
        e.appendChild(t);
    }
    function draw(at) {
        svg.textContent = '';
        [1, 2, 3, 4, 6, 8].forEach(function (r) {
            element('line', {x1: x(r), x2: x(r), y1: y(0), y2: y(most), stroke: '#e6e9ed'});
            element('text', {x: x(r), y: H - 24, 'text-anchor': 'middle'}, r);
        });
        [0, 1, 2, 4, 6, 8].forEach(function (s) {
            element('line', {x1: left, x2: W - 14, y1: y(s), y2: y(s), stroke: '#e6e9ed'});
            element('text', {x: left - 6, y: y(s) + 4, 'text-anchor': 'end'}, s + 'x');
        });
        element('text', {x: (left + W) / 2, y: H - 5, 'text-anchor': 'middle'}, 'cards');
        element('line', {x1: x(1), y1: y(1), x2: x(most), y2: y(most), stroke: '#9aa3ad', 'stroke-dasharray': '5 4'});
        var table = '<tr><th>with 4 cards</th><th>speed-up</th><th>waiting</th><th>hours</th></tr>';
        Object.keys(at.ways).forEach(function (way) {
            var color = data.styles[way][0], points = at.ways[way];
            element('polyline', {fill: 'none', stroke: color, 'stroke-width': 2.5, points: points.map(function (p) { return x(p.ranks) + ',' + y(p.speedup); }).join(' ')});
            points.forEach(function (p) {
                titled(element('circle', {cx: x(p.ranks), cy: y(p.speedup), r: 3.5, fill: color}), p.ranks + ' cards: ' + p.speedup.toFixed(2) + 'x, ' + p.hours.toFixed(1) + ' h, waiting ' +
                    (100 * p.waiting).toFixed(0) + '%');
                if (p.ranks === 4) {
                    table += '<tr><td style="color:' + color + '">' + data.styles[way][1] + '</td><td class="n">' + p.speedup.toFixed(2) + 'x</td><td class="n">' + (100 * p.waiting).toFixed(0) +
                        '%</td><td class="n">' + p.hours.toFixed(1) + '</td></tr>';
                }
            });
        });
        [[2.6, 'the reference run, naive: 2.6x'], [43 / 13.2, 'the reference run, the last of 10: 43 h became 13.2 h']].forEach(function (p) {
            titled(element('circle', {cx: x(4), cy: y(p[0]), r: 6, fill: '#1f2933', stroke: '#fff', 'stroke-width': 1.5}), p[1]);
        });
        data.measured.forEach(function (p) {
            titled(element('circle', {cx: x(p.ranks), cy: y(p.speedup), r: 6, fill: '#fff', stroke: '#1f2933', 'stroke-width': 3}), p.title + ': ' + p.speedup.toFixed(2) + 'x');
        });
        document.getElementById('at4').innerHTML = table;
        document.getElementById('bandwidth_text').textContent = at.bandwidth + ' GB/s';
    }
    slider.value = data.scaling.findIndex(function (s) { return s.bandwidth === data.at; });
    slider.oninput = function () { draw(data.scaling[+slider.value]); };
    draw(data.scaling[+slider.value]);
    document.body.dataset.ready = 'yes';
}());
"""


def page(ladder):
    where = (f'{ladder["program"]}, model {ladder["model"]}, {ladder["batch_size"]} x {ladder["seq_len"]} tokens a microbatch, {ladder["grad_accum"]} a step, on {ladder["machine"]}; '
             f'{ladder["made"]}, commit {ladder["commit"]}, {ladder["minutes"]:.1f} minutes')
    rows, up = measured(ladder), kept(ladder)
    title = f'The ladder: {number(rows[0]["hours"])} h → {number(up[-1]["hours"])} h to 10B tokens' if rows and up else "The ladder"
    method = method_text(ladder) or "The emulator runs the GPU trainer on a CPU: it counts and compares, and has no clock."
    warn = "".join(f'<p class="warn">{esc(text)}</p>' for text in warnings(ladder))
    explain = ("Each row adds one switch and is kept only if the whole step got surely faster. Left the hours on this machine with this model, right what the "
               "reference run tells: two scales, compare the shapes." if ladder["trainer"] != "emu" else "Each row adds one switch; the loss must stay what it was.")
    pale = ' A pale bar was tried and not kept: the next rung does not stand on it.' if any(r["verdict"] in ("revert", "no difference") for r in rows) else ""
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{esc(title)}</title><style>{CSS}</style></head><body>
<h1>{esc(title)}</h1><p class="sub">{esc(where)}</p><p class="lead">{esc(summary(ladder))}</p>{warn}
<h2>Rung by rung</h2><p class="sub">{explain}{pale}</p>
{rungs_table(ladder)}
<p class="sub" style="margin-top:10px">{esc(method)}</p>
{against_part(ladder)}
{phases_part(ladder)}
{loss_part(ladder)}
{network_part(ladder)}
<script>{SCRIPT}</script></body></html>
"""
