"""dev/bench/plot.py: draws every picture of one run and of several, survives what metrics files may lack, and says what is
wrong with files that are none. A picture counts as drawn if it has the colours it must have."""

import json
import math
import random

from harness import *

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
               "dead_experts": [0] * layers, "mem": 123456789}
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
def one_run_gives_four_pictures():
    metrics = synthetic(folder("run/metrics.jsonl"))
    result = run(PLOT + [metrics, "--floor", "0.91", "--out", folder("pictures")])
    check(len(result.out.splitlines()) == 4, result.out)
    check_drawn(folder("pictures/loss.png"), [BLUE])
    check_drawn(folder("pictures/throughput.png"), [BLUE])
    image = check_drawn(folder("pictures/phases.png"), [PINK, ORANGE])
    check(share_of(image, PINK) > 0.5, "`other`, 3% of the time, is not to be seen")
    check_drawn(folder("pictures/experts.png"), [])


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


main()
