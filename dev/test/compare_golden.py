#!/usr/bin/env python3
"""Compares what a trainer computed with a golden folder, under the tolerances that goldens/README.md derives.
Prints a table (quantity, measured, tolerance, ok or FAIL); exit code 1 if anything fails, is missing or is NaN.

    ./train_moe_cpu --init DIR --batch DIR/golden.safetensors --dump dump.safetensors
    ./train_moe_cpu --init DIR --batch DIR/golden.safetensors --steps 10 --lr 0.001 --schedule constant \\
        --warmup-steps 0 --out OUT --save-every 1 --metrics steps.jsonl
    python3 dev/test/compare_golden.py DIR dump.safetensors --metrics steps.jsonl --out OUT

--bf16 takes the wider limits for a bf16 path, which must have been dumped with --force-routing.
Needs numpy and safetensors.
"""
import argparse
import json
import os
import sys

import numpy as np
from safetensors.numpy import load_file

FP32 = {"loss": 1e-5, "logits": 2e-5, "router weights": 2e-5, "gradient": 5e-5, "gradients": 2e-5, "norm": 5e-5,
        "step losses": 2e-5, "step norms": 5e-5, "step1 q999": 3e-6, "step1 l2": 1e-2, "step10 q999": 2e-5,
        "step10 l2": 2e-3, "element": 2e-3}
BF16 = {"loss": 1e-2, "logits": 3e-2, "gradient": 1.5e-1, "gradients": 5e-2, "norm": 5e-2}  # L2, relative
# Ten steps in bf16 beside ten in fp32, both with the experts they are told, in L2 relative to the fp32 run's: (a tensor alone, all
# together); "update" is what the ten steps changed of the weights. About twice the worst of what was seen on the seven folders, of
# train_moe (emulated) and of train_moe_cpu --precision bf16: loss 0.0057, norm 0.0072, update 0.135 (a q_norm of `mixed`, whose gradient
# is almost nothing) and 0.017, m 0.066 and 0.015, v 0.102 and 0.017. Rounding to bf16 costs 0.002 of a number; an update is nearly the
# sign of the gradient, so that of an element close to 0 may be anything.
TEN_STEPS = {"loss": 1e-2, "norm": 1.5e-2, "update": (2.5e-1, 3.5e-2), "m": (1.3e-1, 3e-2), "v": (2e-1, 3.5e-2)}


class Table:
    """Rows of (quantity, measured, tolerance, note). A row is ok only if measured <= tolerance, so NaN fails."""

    def __init__(self):
        self.rows = []

    def add(self, quantity, measured, tolerance, note=""):
        self.rows.append((quantity, float(measured), float(tolerance), note))

    def missing(self, quantity, why):
        self.rows.append((quantity, float("nan"), 0.0, why))

    def failed(self):
        return [r for r in self.rows if not r[1] <= r[2]]

    def print(self, only_failures=False):
        for quantity, measured, tolerance, note in self.failed() if only_failures else self.rows:
            mark = "ok  " if measured <= tolerance else "FAIL"
            print(f"{mark} {quantity:<34} {measured:10.2e}  tolerance {tolerance:8.1e}  {note}".rstrip())


def ratio(a, b):
    """a / b, where nothing over nothing is nothing: exactly zero in the golden file must be exactly zero."""
    return float(a / b) if b else (0.0 if a == 0 else float("nan") if np.isnan(a) else float("inf"))


def max_relative(a, b):
    return ratio(np.abs(a - b).max(), np.abs(b).max())


def l2_relative(a, b):
    return ratio(np.linalg.norm(a - b), np.linalg.norm(b))


def fetch(table, tensors, name, shape, quantity=None):
    """A tensor in fp64, or None after saying in the table that it is missing or has another shape."""
    t = tensors.get(name)
    if t is None:
        table.missing(quantity or name, "not in the file")
    elif t.shape != tuple(shape):
        table.missing(quantity or name, f"shape {list(t.shape)}, expected {list(shape)}")
    else:
        return t.astype(np.float64)
    return None


def compare_dump(table, dump, golden, scalars, bf16=False):
    limit, distance = (BF16, l2_relative) if bf16 else (FP32, max_relative)
    for name in ("loss", "ce_loss", "aux_loss", "grad_norm"):
        if scalars[name] is None:  # the balance loss is off
            continue
        x = dump.get(name)
        if x is None or x.size != 1:
            table.missing(name, "not in the file" if x is None else f"shape {list(x.shape)}, expected [1]")
        elif name == "grad_norm":
            table.add(name, ratio(abs(float(x.item()) - scalars[name]), scalars[name]), limit["norm"])
        else:
            table.add(name, abs(float(x.item()) - scalars[name]), limit["loss"])
    for name in sorted(golden):
        want = golden[name]
        wanted = name == "logits" or name.startswith("router.") or (name.startswith("act.") and name in dump)
        got = fetch(table, dump, name, want.shape) if wanted else None
        if got is None:
            continue
        if name.endswith("topk_index"):
            wrong = (got != want).any(axis=1)
            where = f"first at token {int(np.argmax(wrong))}" if wrong.any() else f"{len(wrong)} tokens"
            table.add(name, wrong.sum(), 0, where)
        elif name.endswith("topk_weight"):
            table.add(name, np.abs(got - want).max(), limit.get("router weights", np.inf))
        else:
            table.add(name, distance(got, want), limit["logits"] if not bf16 or name == "logits" else np.inf)
    compare_gradients(table, dump, golden, limit, distance)


def compare_gradients(table, dump, golden, limit, distance):
    worst, worst_name, square, total, zeros, tensors = 0.0, "", 0.0, 0.0, 0, 0
    names = sorted(n for n in golden if n.startswith("grad."))
    for name in names:
        want = golden[name].astype(np.float64)
        got = fetch(table, dump, name, want.shape)
        if got is None:
            continue
        d = distance(got, want)
        tensors, zeros = tensors + 1, zeros + (not want.any())
        if not d <= limit["gradient"]:
            table.add(name, d, limit["gradient"], "" if want.any() else "must be exactly zero")
        if not d <= worst:
            worst, worst_name = d, name
        square, total = square + np.square(got - want).sum(), total + np.square(want).sum()
    for name in sorted(n for n in dump if n.startswith("grad.") and n not in golden):
        table.missing(name, "the golden folder has no such parameter")
    if tensors:
        table.add("gradients, worst tensor", worst, limit["gradient"], f"{worst_name} ({tensors} tensors)")
        table.add("gradients, all together", ratio(square ** 0.5, total ** 0.5), limit["gradients"],
                  f"{zeros} are exactly zero" if zeros else "")


def compare_metrics(table, path, scalars):
    """The losses and norms of metrics.jsonl: line i is step i + 1, with loss and norm from before its update."""
    with open(path) as f:
        steps = [s for s in map(json.loads, f) if "loss" in s and "grad_norm" in s]
    want = len(scalars["step_losses"])
    if len(steps) != want:
        return table.missing("steps", f"{path} has {len(steps)} steps, expected {want}")
    losses, norms = (np.array([s[k] for s in steps], np.float64) for k in ("loss", "grad_norm"))
    off, off_norm = np.abs(losses - scalars["step_losses"]), np.abs(norms / scalars["grad_norms"] - 1)
    table.add("losses of the steps", off.max(), FP32["step losses"], f"worst at step {int(off.argmax()) + 1}")
    table.add("gradient norms of the steps", off_norm.max(), FP32["step norms"],
              f"worst at step {int(off_norm.argmax()) + 1}")


def compare_parameters(table, folder, step, golden, start):
    path, label = os.path.join(folder, f"step_{step:08d}", "model.safetensors"), f"parameters after {step}"
    if not os.path.exists(path):
        return table.missing(label, f"no {path}")
    weights, diffs, updates, worst, worst_name = load_file(path), [], [], 0.0, ""
    prefix = f"step{step}."
    for name in sorted(n[len(prefix):] for n in golden if n.startswith(prefix)):
        want = golden[prefix + name].astype(np.float64)
        got = fetch(table, weights, name, want.shape, f"{label}: {name}")
        if got is None:
            continue
        diffs.append(np.abs(got - want).ravel())
        updates.append((want - start[name]).ravel())
        if not diffs[-1].max() <= worst:
            worst, worst_name = diffs[-1].max(), name
    for name in sorted(n for n in weights if prefix + n not in golden):
        table.missing(f"{label}: {name}", "the golden folder has no such parameter")
    if diffs:
        diff, update = np.concatenate(diffs), np.concatenate(updates)
        table.add(f"{label}, 99.9%", np.quantile(diff, 0.999), FP32[f"step{step} q999"])
        table.add(f"{label}, L2", ratio(np.linalg.norm(diff), np.linalg.norm(update)), FP32[f"step{step} l2"],
                  "relative to the update")
        table.add(f"{label}, worst element", diff.max(), FP32["element"], worst_name)


def compare_ten_steps(table, ours, exact, start):
    """A run in bf16 beside one in fp32. Each is (losses, norms, weights, trainer state) after the last step, the state with m.NAME, v.NAME
    and master.NAME where the weights are rounded; `start` is what both started from."""
    for i, (quantity, limit) in enumerate((("loss", TEN_STEPS["loss"]), ("norm", TEN_STEPS["norm"]))):
        if len(ours[i]) != 10 or len(exact[i]) != 10:
            table.missing(f"{quantity} of ten steps", f"{len(ours[i])} and {len(exact[i])} steps")
            continue
        off = np.abs(np.array(ours[i]) - exact[i]) / (1 if quantity == "loss" else np.array(exact[i]))
        table.add(f"{quantity} of ten steps", off.max(), limit, f"worst at step {int(off.argmax()) + 1}")
    master = "master." if any(n.startswith("master.") for n in ours[3]) else ""
    for quantity in ("update", "m", "v"):
        worst, square, total, tensors = [(0.0, "")], 0.0, 0.0, 0
        for name in sorted(exact[2]):
            if quantity == "update":
                found, prefix, want, at = ours[3] if master else ours[2], master, exact[2][name], start[name]
            else:
                found, prefix, want, at = ours[3], quantity + ".", exact[3][f"{quantity}.{name}"], 0
            got = fetch(table, found, prefix + name, want.shape)
            if got is None:
                continue
            got, want = got - at, want.astype(np.float64) - at
            worst.append((l2_relative(got, want), name))
            square, total, tensors = square + np.square(got - want).sum(), total + np.square(want).sum(), tensors + 1
        off, name = max(worst, key=lambda w: (np.isnan(w[0]), w[0]))
        table.add(f"{quantity} of ten steps, worst", off, TEN_STEPS[quantity][0], f"{name} ({tensors} tensors)")
        table.add(f"{quantity} of ten steps, all", ratio(square ** 0.5, total ** 0.5), TEN_STEPS[quantity][1])
    if sorted(ours[2]) != sorted(exact[2]):
        table.missing("weights after ten steps", "other tensors")


def compare(folder, dump=None, metrics=None, out=None, bf16=False):
    """A Table for what was given: a dump file, a metrics.jsonl, a folder with step_00000001 and step_00000010."""
    table, golden = Table(), load_file(os.path.join(folder, "golden.safetensors"))
    with open(os.path.join(folder, "golden.json")) as f:
        scalars = json.load(f)
    if dump:
        compare_dump(table, load_file(dump), golden, scalars, bf16)
    if metrics:
        compare_metrics(table, metrics, scalars)
    if out:
        start = load_file(os.path.join(folder, "model.safetensors"))
        for step in (1, 10):
            compare_parameters(table, out, step, golden, start)
    return table


def main():
    a = argparse.ArgumentParser(description="compare a trainer's numbers with a golden folder")
    a.add_argument("golden", help="folder with golden.safetensors and golden.json")
    a.add_argument("dump", nargs="?", help="file written by --dump")
    a.add_argument("--metrics", metavar="FILE.jsonl", help="metrics of the ten steps")
    a.add_argument("--out", metavar="DIR", help="folder of the checkpoints step_00000001 and step_00000010")
    a.add_argument("--bf16", action="store_true", help="limits for a bf16 path with forced routing")
    a.add_argument("--quiet", action="store_true", help="print only what fails")
    a = a.parse_args()
    if not (a.dump or a.metrics or a.out):
        sys.exit("compare_golden.py: nothing to compare: give a dump file, --metrics or --out")
    try:
        table = compare(a.golden, a.dump, a.metrics, a.out, a.bf16)
    except Exception as e:  # a missing or broken file: one line, no traceback
        sys.exit(f"compare_golden.py: {type(e).__name__}: {e}")
    table.print(a.quiet)
    failed = len(table.failed())
    print(f"{a.golden}: {len(table.rows) - failed} ok, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
