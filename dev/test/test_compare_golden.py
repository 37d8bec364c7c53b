"""Does compare_golden.py notice? The golden numbers must pass as a dump, every forgery of them must fail.
Needs numpy and safetensors, no trainer."""

import json
import os
import sys

import numpy as np
from safetensors.numpy import load_file, save_file

from compare_golden import compare, compare_ten_steps, Table
from harness import *

GOLDENS = os.path.join(ROOT, "dev", "test", "goldens")


def honest(name):
    """(golden folder, its tensors, its scalars, the dump of a perfect trainer)"""
    golden = os.path.join(GOLDENS, name)
    tensors, scalars = load_file(os.path.join(golden, "golden.safetensors")), json.loads(read(f"{golden}/golden.json"))
    dump = {n: t.copy() for n, t in tensors.items() if n.startswith(("logits", "router.", "grad."))}
    for n in ("loss", "ce_loss", "aux_loss", "grad_norm"):
        dump[n] = np.array([scalars[n] or 0], np.float32)
    return golden, tensors, scalars, dump


def save(name, tensors):
    os.makedirs(os.path.dirname(folder(name)), exist_ok=True)
    save_file({n: np.ascontiguousarray(t) for n, t in tensors.items()}, folder(name))
    return folder(name)


def check_caught(name, quantity, change):
    """change(dump) forges; exactly the rows whose name contains `quantity` may and must fail."""
    golden, _, _, dump = honest(name)
    change(dump)
    failed = [q for q, *_ in compare(golden, save("dump.safetensors", dump)).failed()]
    check(failed and all(quantity in q for q in failed), f"failed: {failed}, expected {quantity}")


def run_of(tensors, scalars, metrics=None, step10=None):
    """Saves what ten perfect steps leave (or the given step 10 and metrics) and returns compare's arguments."""
    for step in (1, 10):
        weights = {n[len(f"step{step}."):]: t for n, t in tensors.items() if n.startswith(f"step{step}.")}
        save(f"out/step_{step:08d}/model.safetensors", step10 if step == 10 and step10 is not None else weights)
    lines = metrics or [{"step": i + 1, "loss": l, "grad_norm": n} for i, (l, n) in
                        enumerate(zip(scalars["step_losses"], scalars["grad_norms"]))]
    write(folder("steps.jsonl"), "".join(json.dumps(line) + "\n" for line in lines))
    return {"metrics": folder("steps.jsonl"), "out": folder("out")}, lines


@test
def golden_numbers_pass():
    for name in ("aux", "docs", "mha_top2", "mixed", "odd", "tied", "wide"):
        golden, tensors, scalars, dump = honest(name)
        failed = compare(golden, save("dump.safetensors", dump), **run_of(tensors, scalars)[0]).failed()
        check(not failed, f"{name}: {failed}")


@test
def nan_fails_wherever_it_is():
    check_caught("aux", "logits", lambda d: d["logits"].__setitem__((0, 3, 5), np.nan))
    check_caught("aux", "loss", lambda d: d["loss"].__setitem__(0, np.nan))
    check_caught("aux", "grad", lambda d: d["grad.model.norm.weight"].__setitem__(3, np.nan))
    check_caught("aux", "topk_weight", lambda d: d["router.layers.0.topk_weight"].__setitem__((1, 1), np.nan))
    check_caught("tied", "grad", lambda d: d["grad.model.layers.1.mlp.experts.2.up_proj.weight"].fill(np.nan))


@test
def missing_quantities_fail():
    for name in ("logits", "ce_loss", "aux_loss", "grad_norm", "router.layers.2.topk_weight", "grad.lm_head.weight"):
        check_caught("aux", name, lambda d: d.pop(name))


@test
def wrong_shape_fails():
    check_caught("aux", "logits", lambda d: d.__setitem__("logits", d["logits"].reshape(-1, 128)))


@test
def parameter_that_the_model_lacks_fails():
    check_caught("tied", "grad.lm_head.weight", lambda d: d.__setitem__("grad.lm_head.weight", d["logits"]))


@test
def swapped_experts_fail():
    check_caught("aux", "topk_index", lambda d: d["router.layers.1.topk_index"].__setitem__(
        7, d["router.layers.1.topk_index"][7][::-1].copy()))


@test
def transposed_gradient_fails():
    name = "grad.model.layers.0.self_attn.q_proj.weight"
    check_caught("aux", "grad", lambda d: d.__setitem__(name, d[name].T))


@test
def gradient_off_by_a_part_in_ten_thousand_fails():
    check_caught("aux", "grad", lambda d: d["grad.model.layers.0.self_attn.k_norm.weight"].__imul__(np.float32(1.0001)))


@test
def gradient_of_an_idle_expert_must_be_exactly_zero():
    name = "grad.model.layers.1.mlp.experts.2.up_proj.weight"
    check_caught("tied", "grad", lambda d: d[name].__setitem__((0, 0), 1e-20))


@test
def missing_step_fails():
    golden, tensors, scalars, _ = honest("aux")
    lines = run_of(tensors, scalars)[1]
    check(compare(golden, metrics=run_of(tensors, scalars, metrics=lines[:9])[0]["metrics"]).failed(), "9 steps passed")


@test
def wrong_norm_or_nan_loss_of_a_step_fails():
    golden, tensors, scalars, _ = honest("aux")
    for key, value in (("grad_norm", 0.974), ("loss", float("nan"))):
        lines = run_of(tensors, scalars)[1]
        lines[1][key] = value
        files = run_of(tensors, scalars, metrics=lines)[0]
        check(compare(golden, metrics=files["metrics"]).failed(), f"{key} {value} passed")


@test
def wrong_parameters_after_ten_steps_fail():
    golden, tensors, scalars, _ = honest("aux")
    right = {n[7:]: t for n, t in tensors.items() if n.startswith("step10.")}
    nan = dict(right, **{"model.norm.weight": right["model.norm.weight"] * np.nan})
    forgeries = {"norm that decayed": dict(right, **{"model.norm.weight": right["model.norm.weight"] * 0.999}),
                 "matrices off by 1e-4": {n: t * np.float32(1 if t.ndim < 2 else 1.0001) for n, t in right.items()},
                 "no lm_head": {n: t for n, t in right.items() if n != "lm_head.weight"}, "NaN": nan}
    for what, weights in forgeries.items():
        files = run_of(tensors, scalars, step10=weights)[0]
        check(compare(golden, out=files["out"]).failed(), f"{what}: passed")


@test
def bf16_limits_let_rounding_pass_and_no_more():
    name = "grad.model.layers.0.self_attn.k_norm.weight"  # too small to move the gradients as a whole
    def failed(change, fixture="aux"):
        golden, _, _, dump = honest(fixture)
        change(dump)
        return [q for q, *_ in compare(golden, save("dump.safetensors", dump), bf16=True).failed()]
    def scaled(tensor, by):
        return lambda d: d[tensor].__imul__(np.float32(1 + by))
    for change, limit in ((lambda d: d["loss"].__iadd__(np.float32(0.009)), None), (lambda d: d["loss"].__iadd__(np.float32(0.011)), "loss"),
                          (scaled("logits", 0.029), None), (scaled("logits", 0.031), "logits"),
                          (scaled(name, 0.14), None), (scaled(name, 0.16), name), (lambda d: d[name].fill(np.nan), name),
                          (lambda d: [scaled(n, 0.049)(d) for n in d if n.startswith("grad.")], None),
                          (lambda d: [scaled(n, 0.051)(d) for n in d if n.startswith("grad.")], "gradients, all together")):
        found = failed(change)
        check(bool(found) == bool(limit) and (not limit or limit in found), f"failed: {found}, expected {limit}")
    idle = "grad.model.layers.1.mlp.experts.2.up_proj.weight"
    check(idle in failed(lambda d: d[idle].__setitem__((0, 0), 1e-30), "tied"), "an idle expert's gradient need not be zero")


@test
def ten_steps_beside_each_other_let_rounding_pass_and_no_more():
    golden, tensors, scalars, _ = honest("aux")
    start = load_file(os.path.join(golden, "model.safetensors"))
    end = {n[7:]: t for n, t in tensors.items() if n.startswith("step10.")}
    moments = {f"{m}.{n}": tensors["grad." + n] ** (1 if m == "m" else 2) for n in end for m in "mv"}
    exact = ([float(i) for i in range(10)], [0.1] * 10, end, moments)
    name, norm = "model.layers.0.mlp.experts.1.up_proj.weight", "model.norm.weight"
    def failed(change):
        losses, norms, weights, state = ours = (list(exact[0]), list(exact[1]), {n: t.copy() for n, t in end.items()}, {
            **{n: t.copy() for n, t in moments.items()}, **{"master." + n: t.copy() for n, t in end.items()}})
        change(losses, norms, weights, state)
        table = Table()
        compare_ten_steps(table, ours, exact, start)
        check(len(table.rows) >= 8, f"{len(table.rows)} rows")
        return " ".join(q for q, *_ in table.failed())
    def scaled(part, by):
        return lambda l, n, w, state: [t.__imul__(np.float32(1 + by)) for key, t in state.items() if part in key]
    def moved(by):  # of what the steps changed
        return lambda l, n, w, state: state["master." + name].__iadd__(np.float32(by) * (end[name] - start[name]))
    for change, row in ((lambda *a: None, ""), (lambda l, *a: l.__setitem__(7, 7.009), ""), (lambda l, *a: l.__setitem__(7, 7.011), "loss"),
                        (lambda l, n, *a: n.__setitem__(3, 0.102), "norm"), (lambda l, *a: l.pop(), "loss"), (moved(0.2), ""), (moved(0.3), "update"),
                        (scaled("m." + name, 0.12), ""), (scaled("m." + name, 0.14), "m of"), (scaled("v.", 0.034), ""), (scaled("v.", 0.036), "v of"),
                        (scaled("v." + name, np.nan), "v of"), (scaled("master." + norm, -0.01), "update"),
                        (lambda l, n, w, s: s.pop("m." + norm), "m." + norm), (lambda l, n, w, s: w.pop(norm), "weights")):
        found = failed(change)
        check(row in found and bool(row) == bool(found), f"failed: {found!r}, expected {row!r}")


@test
def command_exits_1_on_failure_and_on_a_missing_file():
    golden, _, _, dump = honest("odd")
    command = [sys.executable, "dev/test/compare_golden.py", golden, save("dump.safetensors", dump)]
    run(command)
    dump["logits"][0, 0, 0] += 1
    save("dump.safetensors", dump)
    check("FAIL logits" in run(command, code=1).out, "the table does not show what failed")
    expect_error([sys.executable, "dev/test/compare_golden.py", golden, folder("absent")], "absent")


main()
