"""dev/bench/plot.py: draws every picture of one run and of several, follows a job that runs, survives what metrics files may
lack, and says what is wrong with files that are none. A picture counts as drawn if it has the colours it must have. And
dev/bench/to_tensorboard.py, whose files the tensorboard package reads back."""

import json
import math
import random
import re
import time

from harness import *

TENSORBOARD = [sys.executable, os.path.join(ROOT, "dev/bench/to_tensorboard.py")]
PLOT = [sys.executable, os.path.join(ROOT, "dev/bench/plot.py")]
PHASES = {"data": 1, "embedding": 2, "attention": 21, "qkv_o": 14, "router": 3, "permute": 4, "experts": 30, "lm_head": 25,
          "norms": 5, "grad_norm": 2, "optimizer": 8, "allreduce": 0, "checkpoint": 0, "eval": 0, "other": 3}
PINK, BLUE, ORANGE = (0xff, 0x4f, 0xa3), (0x25, 0x63, 0xeb), (0xea, 0x58, 0x0c)


def synthetic(path, steps=300, seed=1, speed=1.0, layers=6, floor=0.91):
    """A run such as `make demo` writes, made up."""
    rng = random.Random(seed)
    lines = []
    for step in range(1, steps + 1):
        x = step / steps
        loss = floor + 0.07 + 4.6 * math.exp(-9 * x ** 0.7) + 0.05 * rng.gauss(0, 1)
        ms = {name: value * (1 + 0.08 * rng.random()) / speed for name, value in PHASES.items()}
        if step % 50 == 0:
            ms["eval"] = 40.0
        if step % 150 == 0:
            ms["checkpoint"] = 60.0
        total = sum(ms.values())
        row = {"step": step, "tokens": step * 8192, "loss": loss + 0.02, "ce_loss": loss, "aux_loss": 0.02,
               "grad_norm": 1 + rng.random(), "lr": 3e-3 * (1 - x), "step_ms": total, "tokens_per_s": 8192 / total * 1e3,
               "mfu": None, "gemm_share": 0.78 + 0.02 * rng.random(), "phases": ms,
               "expert_load": [1.1 + (1.6 + 0.3 * l) * math.exp(-12 * x) + 0.15 * rng.random() for l in range(layers)],
               "dead_experts": [0] * layers, "router_entropy": [1.38 - 0.1 * l * x for l in range(layers)], "mem": 123456789}
        if step % 50 == 0:
            row["val_loss"] = floor + 0.06 + 4.6 * math.exp(-9 * x ** 0.7)
        lines.append(json.dumps(row))
    return write(path, "\n".join(lines) + "\n")


def pixels(path):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib.image import imread
    return (imread(path)[:, :, :3] * 255).round().astype(int)


def share_of(image, color):
    """Share of pixels with this colour, in percent."""
    return 100 * float((abs(image - list(color)).max(axis=2) <= 3).mean())


def check_drawn(path, colors):
    check(os.path.exists(path), f"{path} is not there")
    image = pixels(path)
    check(image.shape[0] > 300 and image.shape[1] > 1000, f"{path}: only {image.shape[1]} x {image.shape[0]} pixels")
    white = share_of(image, (255, 255, 255))
    check(white < 97, f"{path}: {white:.1f}% white, nearly blank")
    for color in colors:
        check(share_of(image, color) > 0.02, f"{path}: nothing in colour {color}")
    return image


@test
def one_run_gives_five_pictures():
    metrics = synthetic(folder("run/metrics.jsonl"))
    result = run(PLOT + [metrics, "--floor", "0.91", "--out", folder("pictures")])
    check(len(result.out.splitlines()) == 5, result.out)
    check_drawn(folder("pictures/loss.png"), [BLUE])
    check_drawn(folder("pictures/throughput.png"), [BLUE])
    image = check_drawn(folder("pictures/phases.png"), [PINK, ORANGE])
    check(share_of(image, PINK) > 0.5, "`other`, 3% of the time, is not to be seen")
    check_drawn(folder("pictures/experts.png"), [])
    check_drawn(folder("pictures/entropy.png"), [])


@test
def the_floor_is_a_line_below_the_curve():
    metrics = synthetic(folder("metrics.jsonl"))
    run(PLOT + [metrics, "--out", folder("without")])
    run(PLOT + [metrics, "--floor", "0.5", "--out", folder("with")])
    a, b = pixels(folder("without/loss.png")), pixels(folder("with/loss.png"))
    ink = (0x1f, 0x29, 0x33)
    rows = [(abs(image - list(ink)).max(axis=2) <= 60).sum(axis=1).max() for image in (a, b)]
    check(rows[1] > 0.4 * b.shape[1] and rows[0] < rows[1], f"longest dark rows: {rows}")


@test
def several_runs_share_the_pictures():
    paths = [synthetic(folder(f"{name}.jsonl"), seed=i, speed=speed)
             for i, (name, speed) in enumerate((("naive", 1.0), ("flash", 1.6), ("grouped", 2.4)))]
    labels = [word for name in ("naive", "naive + flash", "naive + flash + grouped") for word in ("--label", name)]
    run(PLOT + paths + labels + ["--out", folder("out")])
    check_drawn(folder("out/loss.png"), [BLUE, ORANGE])
    check_drawn(folder("out/throughput.png"), [BLUE, ORANGE])
    check_drawn(folder("out/phases.png"), [PINK, ORANGE])
    check_drawn(folder("out/experts.png"), [])


@test
def missing_fields_and_nulls_leave_their_picture_out():
    lines = [{"step": s, "tokens": s * 10, "loss": None if s == 2 else 5.0 / s, "step_ms": 1, "tokens_per_s": 10.0,
              "mfu": None, "expert_load": [None, None]} for s in range(1, 5)]
    metrics = write(folder("m.jsonl"), "\n".join(json.dumps(row) for row in lines))
    result = run(PLOT + [metrics, "--out", folder("out")])
    check("no phases.png" in result.out and "no experts.png" in result.out, result.out)
    check(os.path.exists(folder("out/loss.png")) and not os.path.exists(folder("out/phases.png")), "wrong pictures")


@test
def a_single_step_and_a_dense_layer_can_be_drawn():
    metrics = synthetic(folder("one.jsonl"), steps=1)
    run(PLOT + [metrics, "--out", folder("one")])
    check(os.path.exists(folder("one/phases.png")) and os.path.exists(folder("one/experts.png")), "no picture")
    rows = [json.loads(line) for line in read(synthetic(folder("d.jsonl"), steps=40)).decode().splitlines()]
    for row in rows:
        row["expert_load"][2] = None
        row["dead_experts"][0] = 2
    metrics = write(folder("d.jsonl"), "\n".join(json.dumps(row) for row in rows))
    run(PLOT + [metrics, "--out", folder("d")])
    check(share_of(pixels(folder("d/experts.png")), (0xee, 0xf0, 0xf2)) > 3, "the dense layer is not grey")


@test
def the_half_line_of_a_running_run_is_ignored():
    metrics = synthetic(folder("m.jsonl"), steps=30)
    write(metrics, read(metrics).decode() + '{"step":31,"tok')
    run(PLOT + [metrics, "--out", folder("out")])


@test
def bad_input_is_one_clear_line():
    empty, foreign = write(folder("empty.jsonl"), ""), write(folder("foreign.jsonl"), "hello\nworld\n")
    good = synthetic(folder("good.jsonl"), steps=3)
    binary = write(folder("binary.jsonl"), b"\xff\xfe\x00\n")
    expect_error(PLOT + [folder("none.jsonl")], "cannot read", "none.jsonl")
    expect_error(PLOT + [empty], "holds no step yet")
    expect_error(PLOT + [foreign], "foreign.jsonl, line 1: no line of a metrics.jsonl")
    expect_error(PLOT + [binary], "cannot read", "binary.jsonl")
    expect_error(PLOT + [good, "--floor", "nan"], "--floor nan is not a finite number")
    expect_error(PLOT + [good, good, "--label", "a"], "1 --label for 2 runs")
    expect_error(PLOT + [good, "--out", good], "cannot write into")
    expect_error(PLOT + ["--live", good, good], "--live follows one run, here are 2")
    expect_error(PLOT + ["--live", good, "--every", "0"], "--every must be 0.05 seconds or more")
    expect_error(PLOT + ["--live", foreign, "--times", "1"], "foreign.jsonl: no line of a metrics.jsonl")


# ----------------------------------------------------------------------------
# a job that runs


@test
def live_shows_a_growing_file_and_a_resumed_one():
    sys.path.insert(0, os.path.join(ROOT, "dev/bench"))
    import live
    whole = read(synthetic(folder("whole.jsonl"), steps=60)).decode().splitlines(keepends=True)
    path = folder("m.jsonl")
    tail = live.Tail(path)
    check(not tail.read() and tail.rows == [] and "no step yet" in live.draw(tail, 80, 30, False, {}), "before the run")
    write(path, "".join(whole[:10]) + whole[10][:40])
    check(tail.read() and len(tail.rows) == 10, f"{len(tail.rows)} steps of 10 and a half")
    check(not tail.read(), "nothing was new")
    write(path, "".join(whole[:30]))
    check(tail.read() and [r["step"] for r in tail.rows] == list(range(1, 31)), f"{len(tail.rows)} steps of 30")
    write(path, "".join(whole[:20])) # resumed from step 20
    check(tail.read() and len(tail.rows) == 20, f"{len(tail.rows)} steps of 20 after a resume")
    write(path, "".join(whole[:12] + whole[12:60])) # cut to 12 and grown beyond what was read, between two looks
    check(tail.read() and [r["step"] for r in tail.rows] == list(range(1, 61)), f"{len(tail.rows)} steps of 60")
    write(path, "".join(whole[40:44])) # another run
    check(tail.read() and [r["step"] for r in tail.rows] == [41, 42, 43, 44], "a run that began anew")


@test
def live_draws_what_the_last_line_says():
    path = synthetic(folder("m.jsonl"), steps=120)
    last = json.loads(read(path).splitlines()[-1])
    env = {"COLUMNS": "100", "LINES": "40"}
    shown = run(PLOT + ["--live", path, "--times", "1"], env=env).out
    check(max(len(line) for line in shown.splitlines()) <= 100, "wider than the terminal")
    for words in ("step 120", f"loss {last['loss']:.4f}", f"lr {last['lr']:.1e}", "983k tokens", "running", "experts ", "entropy"):
        check(words in shown, f'"{words}" is not in {shown}')
    check(any(0x2800 < ord(c) < 0x2900 for c in shown) and shown.count("o") > 2, "no curve, or no validation")
    check("\033" not in shown, "colours where no terminal is")
    layer = next(line for line in shown.splitlines() if line.startswith("load "))
    for cell, load in zip(layer.split()[1:], last["expert_load"], strict=True):
        check_near(float(cell), load, 0.006, "load")
    time_bar = next(line for line in shown.splitlines() if line.startswith("time "))
    rows = [json.loads(line)["phases"] for line in read(path).splitlines()[-20:]]
    share = sum(r["experts"] for r in rows) / sum(sum(r.values()) for r in rows)
    check(f"experts {100 * share:.1f}%" in shown, f"experts take {100 * share:.1f}%")
    check_near(sum(map(len, time_bar.split()[1:])), 91, 1, "cells of the bar")


@test
def live_follows_a_job_and_ends_on_ctrl_c():
    whole = read(synthetic(folder("whole.jsonl"), steps=40)).decode().splitlines(keepends=True)
    path = folder("m.jsonl")
    p = start(PLOT + ["--live", path, "--every", "0.1"], env={"COLUMNS": "90", "LINES": "30", "PYTHONUNBUFFERED": "1"})
    def shows(words):
        for line in p.stdout:
            if words in line:
                return
        raise Failure(f"it ended without having shown {words!r}: {p.stderr.read()[-300:]}")
    shows("no step yet")
    for end in (10, 25, 40):
        write(path, "".join(whole[:end]))
        shows(f"step {end} ")
    p.send_signal(signal.SIGINT)
    _, err = p.communicate(timeout=60)
    check(p.returncode == 0 and err == "", f"exit code {p.returncode}: {err[-300:]}")


@test
def live_pictures_are_drawn_anew():
    path = synthetic(folder("m.jsonl"), steps=30)
    r = run(PLOT + ["--live", path, "--times", "2", "--every", "0.1", "--out", folder("pictures"), "--dpi", "60"])
    check(r.out == "step 30\n", f"{r.out}: once, since nothing was new")
    check(sorted(os.listdir(folder("pictures"))) == ["entropy.png", "experts.png", "loss.png", "phases.png", "throughput.png"], f"{os.listdir(folder('pictures'))}")


# ----------------------------------------------------------------------------
# TensorBoard


def read_events(path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(path, size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value, e.wall_time) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def tensorboard_test(function):
    try:
        import tensorboard
    except ImportError:
        print(f"left out, no tensorboard here: {function.__name__}", flush=True)
        return function
    return test(function)


@tensorboard_test
def tensorboard_reads_back_every_number():
    path = synthetic(folder("run/metrics.jsonl"), steps=60)
    rows = [json.loads(line) for line in read(path).splitlines()]
    rows[5]["loss"] = None
    rows[7]["expert_load"][2] = None
    write(path, "".join(json.dumps(row) + "\n" for row in rows))
    check(f"{folder('tb')}/run: 60 steps" in run(TENSORBOARD + [path, "--out", folder("tb")]).out, "what it says")
    found = read_events(folder("tb/run"))
    float32 = lambda x: __import__("struct").unpack("f", __import__("struct").pack("f", x))[0]
    for field, tag in (("loss", "loss/train"), ("val_loss", "loss/validation"), ("lr", "optimizer/lr"), ("tokens_per_s", "speed/tokens_per_s")):
        wanted = [(row["step"], float32(row[field])) for row in rows if row.get(field) is not None]
        check([e[:2] for e in found[tag]] == wanted, f"{tag}: {found[tag][:3]}, not {wanted[:3]}")
    for layer in range(6):
        wanted = [float32(row["expert_load"][layer]) for row in rows if row["expert_load"][layer] is not None]
        check([e[1] for e in found[f"expert_load/layer_{layer}"]] == wanted, f"load of layer {layer}")
    check([e[1] for e in found["phase_ms/experts"]] == [float32(row["phases"]["experts"]) for row in rows], "phases")
    check(len(found["router_entropy/mean"]) == 60 and found["dead_experts/all"][-1][1] == 0 and "speed/mfu" not in found, f"{sorted(found)}")
    times = [e[2] for e in found["speed/step_ms"]]
    check_near(times[-1] - times[0], sum(sum(row["phases"].values()) for row in rows[1:]) / 1e3, 1e-3, "seconds from the first to the last step")
    check_near(times[-1], os.stat(path).st_mtime, 1e-3, "the last step's time")


@tensorboard_test
def tensorboard_follows_and_begins_anew_after_a_resume():
    whole = read(synthetic(folder("whole.jsonl"), steps=40)).decode().splitlines(keepends=True)
    other = read(synthetic(folder("other.jsonl"), steps=40, seed=2)).decode().splitlines(keepends=True)
    path = folder("run/metrics.jsonl")
    p = start(TENSORBOARD + [path, "--out", folder("tb"), "--follow", "--every", "0.1", "--x", "tokens"], env={"PYTHONUNBUFFERED": "1"})
    said = []
    for lines in (whole[:10], whole[:25], whole[:20] + other[20:40]):
        write(path, "".join(lines))
        said.append(p.stdout.readline().strip()) # it has seen them
    p.send_signal(signal.SIGINT)
    _, err = p.communicate(timeout=20)
    check(p.returncode == 0 and err == "", f"exit code {p.returncode}: {err[-300:]}")
    check([int(re.search(r": (\d+) steps", s).group(1)) for s in said] == [10, 15, 40], f"{said}")
    wanted = [(row["tokens"], row["loss"]) for row in map(json.loads, whole[:20] + other[20:40])]
    found = [(step, value) for step, value, _ in read_events(folder("tb/run"))["loss/train"]]
    check(len(found) == 40 and all(a[0] == b[0] and abs(a[1] - b[1]) < 1e-5 for a, b in zip(found, wanted)), f"{found[18:23]}, not {wanted[18:23]}")


@test
def tensorboard_that_is_not_there_is_one_clear_line():
    write(folder("tensorboard.py"), "raise ImportError\n")
    expect_error(TENSORBOARD + [synthetic(folder("m.jsonl"), steps=3), "--out", folder("tb")], "needs the tensorboard package: pip install tensorboard",
                 env={"PYTHONPATH": folder()})


main()
