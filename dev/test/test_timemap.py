"""dev/bench/timemap.py: the page's numbers against sums made here, of a made-up trace and of traces of both trainers; areas
are times; the advice names the right block; no script error in a browser."""

import html
import json
import re

from browser import open_page, page_test
from emulate import emulated
from program import *

sys.path.insert(0, os.path.join(ROOT, "dev/bench"))
import roofline
import timemap

TIMEMAP = [sys.executable, os.path.join(ROOT, "dev/bench/timemap.py")]
FIXED = ["--gflops", "100", "--bandwidth", "50"]  # a machine that does not change from test to test
MODEL = {"vocab_size": 257, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
         "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "tie_word_embeddings": False, "mlp_only_layers": [], "decoder_sparse_step": 1}
OPTIONS = {"batch-size": 2, "seq-len": 64, "grad-accum": 2, "attention": "flash", "experts": "grouped", "optimizer": "fused", "loader": "prefetch",
           "tokenize": "ahead", "pinned": True, "allreduce": "last", "overlap": True, "doc-mask": False}


def event(name, ts, dur, tid=0, layer=None, pid=0):
    more = {} if layer is None else {"args": {"layer": layer}}
    return {"ph": "X", "pid": pid, "tid": tid, "ts": ts, "dur": dur, "name": name, **more}


def made_up(path, program="train_moe_cpu", rank=0, clock_us=1000.0, steps=(900, 1000, 1100, 5000), machine="2 threads", model=MODEL, options=(), scale=1.0):
    """A trace whose times are known: every step is a microbatch of 650 us, whatever its length. Returns the path."""
    track, at, events = 1 if program == "train_moe" else 0, 0.0, []
    for number, length in enumerate(steps, 1):
        t = at
        def add(name, dur, layer=None, tid=track):
            nonlocal t
            events.append(event(name, t, dur * scale, tid, layer, rank))
            t += dur * scale
        events.append(event(f"step {number}", t, length, 0, None, rank))
        add("data", 20)
        events.append(event("forward", t, 230 * scale, track, None, rank))
        add("embedding", 10)
        for layer in range(2):
            events.append(event(f"layer {layer}", t, 110 * scale, track, layer, rank))
            add("norms", 10, layer)
            add("attention", 40, layer)
            add("experts", 60, layer)
        events.append(event("backward", t, 350 * scale, track, None, rank))
        add("lm_head", 50)
        for layer in (1, 0):
            add("experts", 100 + 10 * layer, layer)
            add("attention", 50 - 10 * layer, layer)
        add("optimizer", 50)
        if program == "train_moe": # while layer 0's backward runs, and beyond backward's end
            events.append(event("allreduce", t - 120 * scale, 150 * scale, 2, None, rank))
        events.append(event("prepare batch", at - 30 if number > 1 else 0.0, 60, 3, None, rank))
        at += length + 50
    about = {"program": program, "rank": rank, "clock_us": clock_us}
    if model:
        about["run"] = {"ranks": 1, "machine": machine, "measured_peak": 1e11, "nominal_peak": None, "model": model, "options": {**OPTIONS, **dict(options)}}
    names = [{"ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": {"name": name}} for tid, name in ((0, "host"), (1, "compute stream"))]
    return write(path, json.dumps({"traceEvents": names + events, "otherData": about}))


def page_of(path):
    """The numbers in a page, and its text without tags."""
    text = read(path).decode()
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.S).group(1)), html.unescape(re.sub(r"<[^>]+>", " ", text))


def draw(trace, *options):
    run([*TIMEMAP, trace, *options, "--out", folder("page.html")])
    return page_of(folder("page.html"))


def blocks(page):
    return {(b["phase"], b["direction"]): b for b in page["blocks"]}


# ----------------------------------------------------------------------------
# a made-up trace


@test
def blocks_are_the_sums_of_their_events():
    page, _ = draw(made_up(folder("t.json")), *FIXED)
    check(page["step"] == 3, f"step {page['step']}: of 2, 3 and 4 the median is 3")
    wanted = {("data", "step"): 20, ("embedding", "forward"): 10, ("norms", "forward"): 20, ("attention", "forward"): 80, ("experts", "forward"): 120,
              ("lm_head", "backward"): 50, ("experts", "backward"): 210, ("attention", "backward"): 90, ("optimizer", "step"): 50, ("other", "step"): 450}
    found = {key: b["ms"] * 1e3 for key, b in blocks(page).items()}
    check(set(found) == set(wanted) and all(abs(found[k] - wanted[k]) < 0.01 for k in wanted), f"{found}")
    check_near(sum(found.values()), 1100, 0.01, "all blocks together are the step")
    layers = {layer: ms for layer, ms, _ in blocks(page)["experts", "backward"]["layers"]}
    check(abs(layers[0] - 0.1) < 1e-6 and abs(layers[1] - 0.11) < 1e-6, f"{layers}")
    gains = [b["gain_ms"] for b in page["blocks"] if b["gain_ms"] is not None]
    check(gains == sorted(gains, reverse=True) and page["blocks"][0]["phase"] == "other", f"{gains}")


@test
def work_is_that_of_an_independent_sum():
    page, _ = draw(made_up(folder("t.json")), *FIXED)
    tokens, A, C, F, V, E, K, L, T = 2 * 2 * 64, 64, 64, 32, 257, 4, 2, 2, 64
    work = {("attention", "forward"): L * tokens * 2 * T * A, ("attention", "backward"): L * tokens * 5 * T * A, # the causal half of 4 and 10 T A
            ("experts", "forward"): L * tokens * K * 2 * 3 * C * F, ("experts", "backward"): L * tokens * K * 4 * 3 * C * F, ("lm_head", "backward"): tokens * 6 * C * V}
    found = blocks(page)
    for key, flops in work.items():
        check_near(found[key]["flops"] / flops, 1, 1e-9, f"FLOPs of {key}")
    parameters = 2 * V * C + C + L * (C * (A + 2 * 32) + A * C + E * C + E * 3 * C * F + 2 * C + 2 * 16)
    check_near(found["optimizer", "step"]["bytes"], 28 * parameters, 1, "AdamW reads gradient, weight, m, v and writes the last three")
    check_near(found["lm_head", "backward"]["possible_ms"], roofline_ms("lm_head"), 1e-9, "lm_head")
    check(found["data", "step"]["possible_ms"] == 0 and found["other", "step"]["possible_ms"] == 0, "waiting needs no time")
    for b in page["blocks"]:
        check_near(b["gain_ms"], max(0, b["ms"] - b["possible_ms"]), 1e-12, "gain")
        check_near(sum(ms for _, ms, _ in b["layers"]), b["ms"], 1e-9, "layers")
        if b["phase"] in ("attention", "experts"):
            check_near(sum(possible for _, _, possible in b["layers"]), b["possible_ms"], 1e-9, "possible times of the layers")


@test
def dense_layers_have_their_own_work(): # layer 0 has one MLP of 48, layer 1 experts
    page, _ = draw(made_up(folder("t.json"), model={**MODEL, "mlp_only_layers": [0], "intermediate_size": 48}), *FIXED)
    tokens, C, F, K = 2 * 2 * 64, 64, 32, 2
    found = blocks(page)
    for direction, factor in (("forward", 2), ("backward", 4)):
        check_near(found["experts", direction]["flops"] / (factor * tokens * 3 * C * (K * F + 48)), 1, 1e-9, f"FLOPs {direction}")
    layers = {layer: possible for layer, _, possible in found["experts", "forward"]["layers"]}
    check(0 < layers[0] < layers[1], f"{layers}: 48 are fewer than 2 x 32")
    s = roofline.shape_of_config({**MODEL, "decoder_sparse_step": 2, "intermediate_size": 48})
    check(s.dense == (0,), f"every second layer has experts, the first has none: {s.dense}")
    check(roofline.shape_of_config({**MODEL, "mlp_only_layers": [0, 1], "intermediate_size": 48}).dense == (0, 1), "no layer with experts")


def roofline_ms(phase):
    """roofline.py's own sum for that phase, of both microbatches."""
    return roofline.phases(roofline.PRESETS["tiny"], 2, 64, roofline.cpu_card(100, 50), 2, "ambitious")[phase]["possible_ms"]


@test
def every_phase_of_roofline_has_its_place():
    for key, options in (("tiny", {"batch-size": 2, "seq-len": 64, "grad-accum": 3}), ("smol-500m", {"batch-size": 8, "seq-len": 4096, "grad-accum": 10})):
        s = roofline.PRESETS[key]
        model = {**MODEL, "vocab_size": s.V, "hidden_size": s.C, "num_hidden_layers": s.L, "num_attention_heads": s.NH, "num_key_value_heads": s.NKV,
                 "head_dim": s.HD, "num_experts": s.E, "num_experts_per_tok": s.K, "moe_intermediate_size": s.F}
        card = roofline.CARDS["maxq"]
        table, bounds = timemap.work({"model": model, "options": options}, card, "realistic")
        wanted = roofline.phases(s, options["batch-size"], options["seq-len"], card, options["grad-accum"], "realistic")
        for i, name in enumerate(("flops", "bytes", "possible_ms")):
            for phase in wanted:
                found = sum(row[i] for (p, _), rows in table.items() if p == phase for row in rows.values())
                check_near(found, wanted[phase][name], 1e-9 * (1 + wanted[phase][name]), f"{name} of {phase}")
        check({p for p, _ in table} == set(wanted) and set(bounds) == set(table), f"{sorted(table)}")
        check(set(table["experts", "forward"]) == set(range(s.L)) and None in table["norms", "forward"] and set(table["lm_head", "backward"]) == {None}, "layers")


@test
def areas_are_in_the_ratio_of_times():
    for values in ([5.0], [6, 6, 4, 3, 2, 2, 1], [100, 1e-3, 1e-6, 0], [1] * 50):
        rectangles = timemap.squarify(values, 10, 20, 300, 200)
        for value, (x, y, w, h) in zip(values, rectangles, strict=True):
            check_near(w * h, value / sum(values) * 60000, 1e-6, f"area of {value}")
            check(x >= 10 - 1e-9 and y >= 20 - 1e-9 and x + w <= 310 + 1e-6 and y + h <= 220 + 1e-6, f"{x} {y} {w} {h} sticks out")
        for i, (x, y, w, h) in enumerate(rectangles):
            for X, Y, W, H in rectangles[:i]:
                check(min(x + w, X + W) - max(x, X) < 1e-6 or min(y + h, Y + H) - max(y, Y) < 1e-6, "two overlap")
    worst = max(max(w / h, h / w) for _, _, w, h in timemap.squarify([6, 6, 4, 3, 2, 2, 1], 0, 0, 6, 4))
    check(worst < 3, f"the paper's example has no rectangle thinner than {worst}")


@test
def the_map_shows_every_block_with_its_area():
    page, _ = draw(made_up(folder("t.json")), *FIXED)
    text = read(folder("page.html")).decode()
    drawn = re.findall(r'<g class="block" data-block="(\d+)"><rect x="[^"]*" y="[^"]*" width="([\d.]+)" height="([\d.]+)"', text)
    check(sorted(int(n) for n, _, _ in drawn) == list(range(len(page["blocks"]))), f"{drawn}")
    check(text.count("<tr data-block=") == len(page["blocks"]), "a row a block")
    for n, w, h in drawn:  # headings and gaps take a little
        block = page["blocks"][int(n)]
        check_near(float(w) * float(h) / (1080 * 470), block["ms"] / page["step_ms"], 0.18 * block["ms"] / page["step_ms"] + 0.0005, f"area of {block['phase']}")


@test
def the_sentence_names_the_block_with_most_to_gain_and_its_switch():
    page, text = draw(made_up(folder("t.json")), *FIXED)
    check("Attack other (no phase claims it) next" in re.sub(" +", " ", text) and "put a phase() around" in text, text[:900])
    quiet = made_up(folder("q.json"), steps=(650, 650, 650), options={"attention": "naive", "experts": "loop"})
    said = run([*TIMEMAP, quiet, *FIXED, "--out", folder("page.html")]).out
    gain = max(page_of(folder("page.html"))[0]["blocks"], key=lambda b: b["gain_ms"])
    check(gain["phase"] == "attention" and said.startswith("Attack attention, forward next: it takes 0.08 of 0.65 ms and could take 0.05, "), said)
    check(f"{100 * gain['gain_ms'] / 0.65:.1f}% shorter" in said and "GFLOP/s and is bound by compute" in said, said)
    check("This run has --attention naive: try --attention flash first." in page_of(folder("page.html"))[1], "no hint")
    for b in page["blocks"]:
        b["gain_ms"] = 0.01 * b["ms"]
    check(timemap.sentence(page)[0].startswith("Nothing big is left"), timemap.sentence(page)[0])


@test
def a_rate_that_was_measured_too_low_is_not_believed():
    trace = made_up(folder("t.json"), scale=0.01, steps=(100, 100))
    _, text = draw(trace, "--bandwidth", "50")
    check("so the measurement met a busy machine" in text, "a step of 6.5 us beats 100 GFLOP/s")
    _, text = draw(made_up(folder("t.json"), scale=6, steps=(4000, 4000)), "--bandwidth", "50")
    check("busy machine" not in text and "matrix products 100 GFLOP/s (measured by the trainer at its start)" in text, "nothing is wrong there")


@test
def ranks_are_laid_side_by_side_by_their_clocks():
    trace = made_up(folder("t.json"), "train_moe", machine="NVIDIA H200")
    made_up(folder("t.rank1.json"), "train_moe", 1, 1250.0, machine="NVIDIA H200")
    page, text = draw(trace, "--step", "2", "--card", "h200")
    check("rank 0: GPU" in text and "rank 1: GPU" in text and "1.25 ms" in text, "two ranks, from 0 to 1000 + 250 us")
    busy, hidden = timemap.overlap(timemap.Trace(trace), 2, timemap.TRACK_ALLREDUCE)
    check_near(busy, 0.150, 1e-6, "ms of all-reduce")
    check_near(hidden, 0.120, 1e-6, "ms of it while something was computed")
    check("The all-reduce works 0.15 ms, 80% of it hidden behind backward." in text, "how much is hidden")
    run([*TIMEMAP, trace, "--merge", folder("all.json")])
    merged = json.loads(read(folder("all.json")))["traceEvents"]
    begin = {e["pid"]: e["ts"] for e in merged if e["name"] == "step 2"}
    check_near(begin[1] - begin[0], 250, 1e-6, "the ranks' clocks began 250 us apart")
    check(len(merged) == sum(len(json.loads(read(folder(n)))["traceEvents"]) for n in ("t.json", "t.rank1.json")), "events")


@test
def steps_with_validation_are_not_chosen_and_validation_is_one_block():
    content = json.loads(read(made_up(folder("t.json"), steps=(900, 1000, 1001, 1002))))
    box = next(e for e in content["traceEvents"] if e["name"] == "step 3")
    content["traceEvents"] += [event("eval", box["ts"] + 700, 250), event("experts", box["ts"] + 750, 100, layer=0), event("checkpoint", box["ts"] + 960, 30)]
    write(folder("t.json"), json.dumps(content))
    check(draw(folder("t.json"), *FIXED)[0]["step"] == 2, "step 3 is the median, but validates")
    page, _ = draw(folder("t.json"), "--step", "3", *FIXED)
    found = blocks(page)
    check_near(found["eval", "step"]["ms"], 0.25, 1e-9, "validation")
    check_near(found["experts", "forward"]["ms"], 0.12, 1e-9, "the experts of validation are not those of training")
    check(found["eval", "step"]["gain_ms"] is None and found["checkpoint", "step"]["gain_ms"] is None, "training would not get faster")


@test
def models_and_machines_that_are_not_known_still_have_a_map():
    page, text = draw(made_up(folder("o.json"), model=None)) # of an older trainer
    check(not page["modelled"] and "The largest block is" in text and "not what could be gained" in text, text[:800])
    check(blocks(page)["attention", "forward"]["possible_ms"] is None, "possible times of nobody knows what")
    gpu = made_up(folder("g.json"), "train_moe", machine="NVIDIA Unheard-of 9000")
    expect_error([*TIMEMAP, gpu], 'does not know the card "NVIDIA Unheard-of 9000": say --card')
    check("Compared with: RTX 4090" in draw(gpu, "--card", "4090")[1], "--card")


@test
def bad_input_is_one_clear_line():
    good = made_up(folder("t.json"))
    expect_error([*TIMEMAP, folder("none.json")], "cannot read", "No such file")
    expect_error([*TIMEMAP, write(folder("x.json"), "hello")], "is no trace of train_moe or train_moe_cpu")
    expect_error([*TIMEMAP, write(folder("y.json"), '{"traceEvents":[]}')], "has no whole step yet")
    expect_error([*TIMEMAP, good, "--step", 9], "--step 9: the trace has 1 to 4")
    expect_error([*TIMEMAP, good, "--card", "abacus"], "--card abacus: there are maxq")
    expect_error([*TIMEMAP, good, "--gflops", "nan"], "--gflops nan: must be above 0")
    expect_error([*TIMEMAP, good, *FIXED, "--out", folder()], "cannot write")
    evil = made_up(folder("e.json"), machine="</script><script>alert(1)</script>")
    draw(evil, *FIXED)
    check(b"<script>alert" not in read(folder("page.html")), "a name in the trace became a script")


@page_test
def pages_open_without_script_errors_and_show_a_block_that_is_pointed_at():
    point = """<script>document.querySelector('g.block[data-block="0"]').dispatchEvent(new MouseEvent("mouseenter"));
               document.title = document.getElementById("tip").textContent + "/" + document.querySelectorAll(".on").length;</script></body>"""
    made_up(folder("m.rank1.json"), "train_moe", 1, machine="NVIDIA H200")
    for trace in (made_up(folder("t.json")), made_up(folder("m.json"), "train_moe", machine="NVIDIA H200"), made_up(folder("e.json"), "train_moe_emu", machine="emulated GPU")):
        page, _ = draw(trace, *([] if "_cpu" not in json.loads(read(trace))["otherData"]["program"] else FIXED))
        write(folder("page.html"), read(folder("page.html")).decode().replace("</body>", point))
        dom, errors = open_page(folder("page.html"))
        check(not errors, f"{errors}")
        title = html.unescape(re.search("<title>(.*?)</title>", dom, re.S).group(1))
        check(title == page["blocks"][0]["tip"] + "/2", f"{title}: the tip, and block and row marked")
        outside = re.findall(r'(?:src|href)="[^"]*"|url\([^)]*\)|https?://', dom)
        check(not outside, f"the page asks for {outside}")


# ----------------------------------------------------------------------------
# traces of the trainers


def nested(trace):
    """Within a row of a rank every event lies in the box that is open when it starts."""
    for track in {e["tid"] for e in trace.events}:
        stack = []
        for e in [e for e in trace.events if e["tid"] == track]:
            while stack and stack[-1][0] <= e["ts"] + 0.002:
                stack.pop()
            check(not stack or e["ts"] + e["dur"] <= stack[-1][0] + 0.002, f"{e['name']} sticks out of {stack[-1:]}")
            stack.append((e["ts"] + e["dur"], e["name"]))


@test
def the_cpu_trainers_trace_gives_its_metrics_and_its_flops():
    data = shard(folder("train.bin"), tokens_of(text_of(400)))
    trace = folder("t.json")
    run([CPU_TRAINER, "--model", "tiny", "--train-data", data, "-b", 2, "-t", 64, "--grad-accum", 2, "--steps", 4, "--trace", trace, "--metrics", folder("m.jsonl")])
    nested(timemap.Trace(trace))
    for step in (2, 4):
        page, _ = draw(trace, "--step", step, *FIXED)
        line = metrics(folder("m.jsonl"))[step - 1]
        for phase, ms in line["phases"].items():
            if phase != "other":
                found = sum(b["ms"] for b in page["blocks"] if b["phase"] == phase)
                check_near(found, ms, 0.02 * ms + 0.02, f"ms of {phase} in step {step}")
        check_near(sum(b["ms"] for b in page["blocks"]), page["step_ms"], 1e-6, "the whole step")
    about = json.loads(read(trace))["otherData"]["run"]
    flops = sum(b["flops"] for b in page["blocks"] if b["phase"] not in ("grad_norm", "optimizer"))
    again = 2 * 64 * 64  # layers x width of the heads x T: attention's backward computes its scores once more
    check_near(flops / (256 * (about["flops_per_token"] + again)), 1, 1e-9, "the trainer's own count of FLOPs, and the scores")
    check(about["parameters"] == roofline.parameters(roofline.PRESETS["tiny"]), f"{about['parameters']} parameters")


@test
def the_gpu_trainers_trace_has_streams_and_boxes():
    data = shard(folder("train.bin"), tokens_of(text_of(100)))
    trace = folder("t.json")
    run([emulated(), "--model", "tiny", "--train-data", data, "-b", 1, "-t", 64, "--steps", 2, "--trace", trace], env={"NO_PROGRESS": "1", "OMP_NUM_THREADS": "1"})
    nested(timemap.Trace(trace))
    page, text = draw(trace)
    found = blocks(page)
    for phase in ("norms", "qkv_o", "attention", "router", "permute", "experts", "embedding"):
        check((phase, "forward") in found and (phase, "backward") in found, f"{phase} is missing: {sorted(found)}")
    check({"lm_head", "grad_norm", "optimizer", "data"} <= {phase for phase, _ in found}, f"{sorted(found)}")
    check({layer for layer, _, _ in found["experts", "backward"]["layers"]} == {0, 1}, "layers")
    check_near(sum(b["ms"] for b in page["blocks"]), page["step_ms"], 1e-6, "the whole step")
    if "run" in json.loads(read(trace))["otherData"]:
        check("Emulated, so the times say nothing. On RTX PRO 6000" in text and all(b["gain_ms"] is None for b in page["blocks"]), text[:800])


main()
