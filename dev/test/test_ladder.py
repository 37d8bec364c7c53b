"""The ladder (dev/bench/ladder.py): its statistics on timings whose truth is planted, a short real ladder, the model of several cards, the page."""

import json
import math
import os
import random
import sys

from harness import *

sys.path.insert(0, os.path.join(ROOT, "dev", "bench"))
import ladder
import ladder_page
import network
import roofline
import stats
from browser import open_page, page_test, picture

LADDER = [sys.executable, "dev/bench/ladder.py"]
TINY = ["--trainer", "cpu", "--model", "tiny", "--batch-size", "2", "--seq-len", "64", "--no-count"]
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


# ----------------------------------------------------------------------------
# statistics

def planted(rng, gain, rounds=12, steps=20, noise=0.10):
    """Timings of A and of B, which takes (1 - gain) of A's time: every step is off by 10%, and the machine drifts from round to round."""
    before, after = [], []
    for _ in range(rounds):
        machine = rng.lognormvariate(0, 0.2)
        for times, mean in ((before, 1.0), (after, 1.0 - gain)):
            times.append(sum(machine * mean * rng.lognormvariate(0, noise) for _ in range(steps)) / steps)
    return before, after


def verdicts(gain, count=300, **more):
    rng = random.Random(1)
    found = [stats.compare(*planted(rng, gain, **more)).verdict for _ in range(count)]
    return {v: found.count(v) / count for v in (stats.KEEP, stats.REVERT, stats.SAME)}


@test
def a_gain_of_5_percent_in_10_percent_noise_is_kept():
    share = verdicts(0.05)
    check(share[stats.KEEP] > 0.97 and share[stats.REVERT] == 0, share)


@test
def noise_is_not_kept():
    share = verdicts(0.0, count=1500)
    wrong = share[stats.KEEP] + share[stats.REVERT]
    check(wrong <= stats.ERROR_RATE + 3 * math.sqrt(stats.ERROR_RATE / 1500), f"{share}, promised are {stats.ERROR_RATE}")


@test
def a_loss_of_5_percent_is_reverted():
    share = verdicts(-0.05)
    check(share[stats.REVERT] > 0.97 and share[stats.KEEP] == 0, share)


@test
def rounds_that_met_a_busy_machine_change_no_verdict():
    rng = random.Random(2)
    for gain, wanted in ((0.1, stats.KEEP), (-0.1, stats.REVERT)):
        before, after = planted(rng, gain, rounds=20, noise=0.05)
        after[3] *= 8
        before[7] *= 8
        c = stats.compare(before, after)
        check(c.verdict == wanted and c.low <= 1 - gain <= c.high, f"{gain}: {c}")


@test
def the_interval_holds_the_truth_as_often_as_it_says():
    rng, inside = random.Random(3), 0
    for _ in range(1000):
        c = stats.compare(*planted(rng, 0.05, rounds=9, steps=5))
        inside += c.low <= 0.95 <= c.high
    check(inside >= 1000 * (1 - stats.ERROR_RATE) - 15, f"{inside} of 1000")


@test
def signed_ranks_are_those_of_the_tables():
    # critical values of Wilcoxon's test, two-sided 0.05 and 0.02 (the cut is one more: the interval's k)
    for n, five, two in ((6, 0, None), (8, 3, 1), (10, 8, 5), (12, 13, 9), (20, 52, 43)):
        check(stats.cut_of(n, 0.05) == five + 1, f"n = {n}, 5%: {stats.cut_of(n, 0.05)}")
        check(stats.cut_of(n, 0.02) == (0 if two is None else two + 1), f"n = {n}, 2%: {stats.cut_of(n, 0.02)}")
    check(sum(stats.signed_rank_counts(10)) == 1024, "not all signs are counted")


@test
def one_number_gives_no_verdict():
    for n in range(1, stats.fewest_rounds()):
        c = stats.compare([1.0] * n, [0.5] * n)
        check(c.verdict == stats.SAME and "cannot tell" in c.why, f"{n} rounds: {c}")
    check(stats.compare([1.0] * stats.fewest_rounds(), [0.5] * stats.fewest_rounds()).verdict == stats.KEEP, "enough rounds")


@test
def a_sure_gain_too_small_to_matter_is_no_difference():
    c = stats.compare([1.0, 2.0, 3.0] * 4, [0.999, 1.998, 2.997] * 4)
    check(c.verdict == stats.SAME and c.high < 1, c)


@test
def the_time_is_shared_out():
    for seconds, overhead, ms in ((100, 0.3, 100), (20, 0.3, 700), (3, 0.3, 100), (5000, 60, 20000)):
        rounds, steps = ladder.plan_rounds(seconds, overhead, ms, 2, stats.fewest_rounds())
        takes = rounds * (overhead + (2 + steps) * ms / 1e3)
        check(1 <= rounds <= 20 and steps >= 1, f"{rounds} x {steps}")
        check(takes <= 1.05 * seconds, f"{rounds} rounds of {steps} steps take {takes:.1f} s of {seconds}")
        check(rounds >= stats.fewest_rounds() or seconds < 10, f"{seconds} s: only {rounds} rounds")


# ----------------------------------------------------------------------------
# a ladder

@test
def a_ladder_of_two_rungs():
    out = folder("out")
    result = run(LADDER + TINY + ["--rungs", "flash,grouped", "--rounds", "7", "--steps", "6", "--out", out])
    found = json.loads(read(out + "/ladder.json"))
    check([row["id"] for row in found["rungs"]] == ["start", "flash", "grouped"], found["rungs"])
    for row in found["rungs"][1:]:
        check(row["status"] == "measured" and row["rounds"] == 7 and row["verdict"] in (stats.KEEP, stats.REVERT, stats.SAME), row)
        check(len(row["ms"]["runs"]) == len(row["ms_before"]["runs"]) == 7 and row["low"] <= row["ratio"] <= row["high"], row)
        check(row["loss"]["agree"] and len(row["loss"]["after"]) == 8 and row["loss"]["difference"] < 1e-3, row["loss"])
        check_near(sum(row["phases"].values()), 1, 1e-6, "phase shares")
        check("other" in row["phases"] and row["phases"]["attention"] > 0, row["phases"])
        if row["verdict"] == stats.KEEP:
            check(row["high"] < 1, row)
    hours = found["rungs"][0]["hours"]
    check_near(hours, 1e10 / (2 * 64) * found["rungs"][0]["ms"]["median"] / 1e3 / 3600, 1e-6 * hours, "hours to 10B tokens")
    check_near(found["rungs"][1]["hours"], hours * found["rungs"][1]["ratio"], 1e-6 * hours, "hours of the first rung")
    table = read(out + "/ladder.md").decode()
    check("| flash attention | `--attention flash` |" in table and "| all experts at once |" in table, table)
    check("7 x 6 steps" in result.out and "ladder.html" in result.out, result.out)


@test
def text_and_shards_give_the_same_batches_and_rungs_that_cannot_run_say_why():
    out = folder("out")
    run(LADDER + TINY + ["--rungs", "shards,pinned,ranks2,overlap", "--rounds", "1", "--steps", "2", "--out", out])
    rows = {row["id"]: row for row in json.loads(read(out + "/ladder.json"))["rungs"]}
    check(rows["shards"]["loss"]["difference"] == 0, rows["shards"])
    check(rows["shards"]["verdict"] == stats.SAME and "cannot tell" in rows["shards"]["why"], rows["shards"])
    for name, why in (("pinned", "copies nothing to a card"), ("ranks2", "one process"), ("overlap", "one process")):
        check(rows[name]["status"] == "cannot run" and why in rows[name]["why"], rows[name])
    check("cannot run here: train_moe_cpu is one process" in read(out + "/ladder.md").decode(), "ladder.md")


@test
def a_rung_that_computes_something_else_is_reverted():
    # a trainer whose flash attention is twice as fast, and wrong
    fake = write(folder("trainer.py"), f"""#!{sys.executable}
import json, sys
a = dict(zip(sys.argv[1::1], sys.argv[2::1]))
flash = a["--attention"] == "flash"
with open(a["--metrics"], "w") as f:
    for s in range(1, int(a["--steps"]) + 1):
        f.write(json.dumps(dict(step=s, tokens=s, loss=5.0 / s + 0.1 * flash, step_ms=1.0 - 0.5 * flash, phases=dict(attention=1.0, other=0.1))) + "\\n")
""")
    os.chmod(fake, 0o755)
    run(LADDER + TINY + ["--program", fake, "--rungs", "flash,fused", "--rounds", "8", "--steps", "3", "--out", folder("out")])
    rows = {row["id"]: row for row in json.loads(read(folder("out/ladder.json")))["rungs"]}
    check(rows["flash"]["ratio"] == 0.5 and rows["flash"]["verdict"] == stats.REVERT and "computes something else" in rows["flash"]["why"], rows["flash"])
    check(rows["fused"]["ms_before"]["median"] == 1.0, "the next rung stands on the reverted one")


@test
def bad_options_are_one_clear_line():
    expect_error(LADDER + ["--rungs", "flash,nonsense"], "--rungs nonsense: there are flash, prefetch")
    expect_error(LADDER + TINY + ["--rounds", "0", "--out", folder("o")], "--rounds 0 is too small")
    expect_error(LADDER + ["--program", "./none", "--out", folder("o")], "./none is not there")
    expect_error(LADDER + ["--from", folder("none.json"), "--out", folder("o")], "cannot read", "none.json")
    expect_error(LADDER + ["--from", write(folder("x.json"), "{}"), "--out", folder("o")], "is no ladder.json")
    expect_error(LADDER + TINY + ["--model", "nonsense", "--out", folder("o")], "nonsense")


# ----------------------------------------------------------------------------
# roofline and network

@test
def the_roofline_counts_what_the_trainer_counts():
    for model in roofline.PRESETS:
        shape = roofline.shape_of(model)
        said = run(["./train_moe_cpu", "--model", model, "--dry-run", "-b", "1", "-t", "256"]).out
        check(f"{roofline.parameters(shape)} total" in said, f"{model}: {roofline.parameters(shape)} parameters; {said}")
        check(f"{roofline.matmul_parameters(shape)} of them in matrix products" in said, f"{model}: {roofline.matmul_parameters(shape)}; {said}")
        check(f"{roofline.model_flops_per_token(shape, 256):.3e} a token" in said, f"{model}: {roofline.model_flops_per_token(shape, 256)}; {said}")


@test
def the_rooflines_operations_add_up():
    B, T = 2, 4096
    for s in (roofline.shape_of("smol-500m")._replace(dense=(0, 3), dense_F=1000), roofline.shape_of("smol-500m")):
        ops = roofline.operations(s, B, T)
        attention = 7 * s.L * s.NH * s.HD * T # backward computes the scores again: 7 products for the 6 of model_flops_per_token
        expected = B * T * (6 * roofline.matmul_parameters(s) + attention)
        check_near(sum(op.flops for op in ops), expected, 1e-9 * expected, "FLOPs of a microbatch")
    card = roofline.CARDS["maxq"]
    by_phase = roofline.phases(s, B, T, card, grad_accum=3)
    total = 3 * sum(roofline.possible_ms(op, card) for op in ops) + roofline.update_ms(s, card, "sustained")
    check_near(sum(row["possible_ms"] for row in by_phase.values()), total, 1e-6 * total, "ms by phase")
    check(by_phase["lm_head"]["bound"] == "compute" and by_phase["optimizer"]["bound"] == "memory", by_phase)
    one = roofline.Operation("qkv_o", "forward", "", (0,), "matmul", 273e9, 1)
    check_near(roofline.possible_ms(one, card), 1.0, 1e-9, "273 GFLOP at 273 TFLOP/s, in ms")
    one = roofline.Operation("norms", "forward", "", (0,), "memory", 0, 1792e6 * 0.9)
    check_near(roofline.possible_ms(one, card), 1.0, 1e-9, "a millisecond of bandwidth")
    check_near(roofline.hours(1e10 / 3600), 1.0, 1e-12, "hours")


@test
def an_all_reduce_is_a_ring():
    net = network.Network("", 10.0, 5.0)
    # 4 ranks: 6 hops of a quarter of 400 MB at 10 GB/s, and 6 x 5 us
    check_near(network.all_reduce_seconds(400e6, 4, net), 6 * (0.01 + 5e-6), 1e-12, "4 ranks")
    check_near(network.all_reduce_seconds(400e6, 2, net), 2 * (0.02 + 5e-6), 1e-12, "2 ranks")
    check(network.all_reduce_seconds(400e6, 1, net) == 0, "1 rank")


@test
def steps_wait_as_worked_out_by_hand():
    net = network.Network("", 1.0, 0.0)
    # two buckets of 1 s each on 2 ranks (1 GB: 2 hops of half of it); backward takes 4 s, the buckets are ready after 1 s and 4 s of it
    buckets = [network.Bucket("a", 0.5e9, 0.25), network.Bucket("b", 0.5e9, 1.0)]
    step = lambda every, overlap, ranks=2: network.Step(2.0, 4.0, 0.5, 10, buckets, ranks, net, every, overlap)
    check_near(step(False, False).seconds, 60.5 + 2, 1e-9, "last, then wait")
    check_near(step(False, True).seconds, 60.5 + 1, 1e-9, "last: the first bucket hides behind backward, the second cannot")
    check_near(step(True, False).seconds, 60.5 + 20, 1e-9, "every, then wait")
    check_near(step(True, True).seconds, 60.5 + 10, 1e-9, "every, overlapped")
    check_near(step(True, False).waiting, 20 / 80.5, 1e-9, "share of waiting")
    check(step(True, False).all_reduces == 20 and step(False, True).bytes == 2 * 1e9, "counts")
    check(step(True, False, ranks=1).seconds == 60.5, "one rank waits for nobody")
    slow = network.Network("", 0.1, 0.0) # 10 s a bucket: sent from 1 s to 21 s, and backward ends at 4 s
    check_near(network.Step(2.0, 4.0, 0.5, 10, buckets, 2, slow, False, True).exposed, 17, 1e-9, "buckets queue up")


@test
def the_reference_figures_come_from_different_bandwidths():
    theirs = network.Workload(roofline.shape_of("smol-500m"), 24, 4096, roofline.CARDS["maxq"], 10, tokens_per_second=1e10 / 43 / 3600)
    one = network.Network("", 8, 0)
    check_near(theirs.hours(theirs.step(1, one, False, False)), 43, 1e-6, "one card, as told")
    # by hand: an all-reduce moves 1.5 x 1.161 GB; one microbatch of the four takes 43 h / 101,725 / 4 = 0.3804 s
    gigabytes, microbatch = 1.5 * 2 * 0.580746624, 43 * 3600 / (1e10 / 98304) / 4
    needs = {figure: network.bandwidth_for(figure, theirs, 0.0, False) for figure in network.FIGURES}
    check_near(needs["all_reduce"], gigabytes / 0.08, 1e-3, "0.08 s")
    check_near(needs["waiting"], gigabytes / microbatch, 0.05, "half of the step: as long as a microbatch")
    check_near(needs["speedup"], gigabytes / (4 / 2.6 * microbatch - microbatch), 0.15, "2.6x")
    check(needs["hours"] < 2.5, needs)
    for row in network.figures_by_bandwidth(theirs, 0.0, False):
        check(sum(row[figure]["reproduced"] for figure in network.FIGURES) <= 1, row)


@test
def the_log_of_collectives_is_read_as_steps():
    log = [("ncclAllReduce", 100, 4), ("ncclAllReduce", 100, 2), ("ncclAllReduce", 7, 2), ("ncclAllReduce", 11, 8),
           ("ncclAllReduce", 7, 2), ("ncclAllReduce", 5, 2), ("ncclAllReduce", 11, 8)]
    check(network.second_step(log) == [(7, 2), (5, 2)], network.second_step(log))
    for bad in (log[:4], log + log, [("ncclBroadcast", 1, 8), ("ncclBroadcast", 1, 8)]):
        try:
            network.second_step(bad)
        except RuntimeError:
            continue
        raise Failure(f"{bad} was accepted")


@test
def the_emulated_trainer_sends_what_the_model_assumes():
    import emulate
    import shutil
    check(shutil.which("mpirun"), "no mpirun (make test-deps)")
    program = emulate.emulated()
    os.makedirs(folder("data"))
    data = ladder.prepare_data(folder("data"), 60)
    buckets = [b.numbers for b in network.buckets(roofline.shape_of("tiny"))]
    for way, times, dtype, size in (("every", 2, "bf16", 2), ("last", 1, "fp32", 4)):
        got = network.count(program, 2, ["--model", "tiny", "--train-data", data.shards, "--batch-size", "1", "--seq-len", "16", "--grad-accum", "2",
                                         "--allreduce", way, "--allreduce-dtype", dtype], folder())
        check(got == times * [(n, size) for n in buckets], f"{way}: {got}, modelled {buckets}")


# ----------------------------------------------------------------------------
# the page

def synthetic(trainer="cpu", machine="2 cores of a test"):
    """A ladder as the program writes it, with every kind of row."""
    args = ladder.parse(["--no-count"])
    rng, rows, hours = random.Random(4), [], 120.0
    phases = {"data": 0.02, "attention": 0.4, "experts": 0.3, "lm_head": 0.2, "optimizer": 0.05, "other": 0.03}
    for rung in ladder.RUNGS:
        row = ladder.rung_row(rung, ms=ladder.spread([hours / 2]), hours=hours, phases=phases)
        if rung.id in ("ranks2", "ranks4", "last", "overlap"):
            row = ladder.rung_row(rung, status="cannot run", why="one process <b>&</b> no cards")
        elif rung.id != "start":
            gain = {"flash": 0.4, "pinned": -0.1}.get(rung.id, 0.0)
            c = stats.compare(*planted(rng, gain, noise=0.02))
            losses = [5.0 - 0.1 * i for i in range(12)]
            row.update(verdict=c.verdict, why=c.why, ratio=c.ratio, low=c.low, high=c.high, rounds=12, steps=20, hours=hours * c.ratio, ranks=1,
                       ms=ladder.spread([hours * c.ratio / 2] * 3), ms_before=ladder.spread([hours / 2] * 3),
                       loss={"difference": 1e-6, "tolerance": 0.002, "agree": True, "before": losses, "after": losses})
            hours *= c.ratio if c.verdict == stats.KEEP else 1
        rows.append(row)
    return {"version": 1, "made": "2026-01-01 12:00", "commit": "abc", "trainer": trainer, "program": "train_moe_cpu", "machine": machine, "model": "demo",
            "batch_size": 1, "seq_len": 1024, "grad_accum": 1, "minutes": 10.0, "stopped": False, "error_rate": 0.02, "least": 0.005, "warmup": 2,
            "others_cores": 1.2, "drift": 1.5, "rungs": rows, "network": ladder.network_section(args, folder())}


@page_test
def the_page_opens_without_script_errors_and_says_it_all():
    old = write(folder("old.json"), json.dumps(synthetic(machine="another")))
    new = write(folder("new.json"), json.dumps(synthetic()))
    run(LADDER + ["--from", new, "--against", old, "--out", folder("out")])
    dom, errors = open_page(folder("out/ladder.html"))
    check(not errors, errors)
    check('data-ready="yes"' in dom, "the script has not run to its end")
    for part in ("flash attention", "no difference", "keep", "revert", "cannot run here", "one process &lt;b&gt;&amp;&lt;/b&gt; no cards", "8 GB/s",
                 "No single bandwidth gives all four", "naive 2.6x", "Against an earlier ladder", "compare the changes, not the hours", "1.2 cores busy"):
        check(part in dom, f"the page does not say: {part}")
    source = read(folder("out/ladder.html")).decode()
    check("src=" not in source and "http" not in source.replace("http://www.w3.org/2000/svg", ""), "the page asks for something else than itself")
    check(not picture(folder("out/ladder.html"), folder("page.png")) and os.path.getsize(folder("page.png")) > 100000, "no picture")


@page_test
def a_script_error_would_be_noticed():
    bad = write(folder("bad.html"), "<!DOCTYPE html><p>hi</p><script>nobody_knows_this();</script>")
    check(any("nobody_knows_this" in line for line in open_page(bad)[1]), "it was not")


main()
