#!/usr/bin/env python3
"""The ladder: what each switch of the trainers brings on this machine, kept only if the whole step got faster.

    make ladder                                         train_moe_cpu, model demo, ten minutes
    python3 dev/bench/ladder.py --trainer gpu           train_moe, model smol-500m, as many cards as there are
    python3 dev/bench/ladder.py --trainer emu           no times: do all rungs compute the same, and what do ranks send?
    python3 dev/bench/ladder.py --minutes 3 --rungs flash,grouped --against build/ladder/ladder.json --out build/again
    python3 dev/bench/ladder.py --from build/ladder/ladder.json --against old.json    draws again, measures nothing

It begins with everything done the simple way and climbs one switch at a time. A rung is run in turns with the one that it stands
on (A B, B A, ...), short runs from the same start; the verdict (keep, revert, no difference) comes from the spread of the rounds
(stats.py), and only `keep` changes what the next rung stands on. The losses of both must agree. Writes ladder.md, ladder.json and
ladder.html into --out. What several cards would take is predicted where there are none (network.py). Standard library only.
"""

import argparse
import array
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections import namedtuple

import ladder_page
import network
import roofline
import stats

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TOKENS_GOAL = 10e9


class LadderError(Exception):
    """What ends the program with one line."""


# ----------------------------------------------------------------------------
# the rungs

# switches: options that change. ranks: None: as before. reference: what the reference run tells of it, and its hours where told.
Rung = namedtuple("Rung", "id title switches ranks reference reference_hours")

START = {"attention": "naive", "tokenize": "inline", "loader": "inline", "pinned": "0", "optimizer": "simple", "experts": "loop",
         "allreduce": "every", "overlap": "0"}
GPU_ONLY = ("pinned", "allreduce", "overlap") # switches that train_moe_cpu does not have

RUNGS = [
    Rung("start", "everything the simple way", {}, None, "62 h", 62.0),
    Rung("flash", "flash attention", {"attention": "flash"}, None, "−30%", None),
    Rung("prefetch", "the next batch is prepared meanwhile", {"loader": "prefetch"}, None, "", None),
    Rung("shards", "tokens made ahead", {"tokenize": "ahead"}, None, "with pinned memory: “other” from 8-9% to 3%", None),
    Rung("pinned", "pinned memory", {"pinned": "1"}, None, "", None),
    Rung("fused", "fused AdamW", {"optimizer": "fused"}, None, "“other” below 1%", 43.0),
    Rung("grouped", "all experts at once", {"experts": "grouped"}, None, "nothing", None),
    Rung("ranks2", "2 ranks, naive", {}, 2, "", None),
    Rung("ranks4", "4 ranks, naive", {}, 4, "43 h / 2.6, told as under 18 h; half of it waiting", 43.0 / 2.6),
    Rung("last", "all-reduce after the last microbatch", {"allreduce": "last"}, None, "13.2 h", 13.2),
    Rung("overlap", "all-reduce while backward goes on", {"overlap": "1"}, None, "", None),
]

Config = namedtuple("Config", "switches ranks") # what one run of a trainer is: {option: value}, and how many processes


def climb(config, rung):
    return Config({**config.switches, **{k: v for k, v in rung.switches.items()}}, rung.ranks or config.ranks)


def switch_text(rung):
    words = [f"--{name} {value}" for name, value in rung.switches.items()]
    if rung.ranks:
        words.append(f"mpirun -n {rung.ranks}")
    return " ".join(words)


# ----------------------------------------------------------------------------
# the trainers

class Trainer:
    """One of the three: its program, its defaults, and which rungs it cannot run, and why."""

    def __init__(self, kind, args):
        self.kind = kind
        self.program = args.program or {"cpu": "./train_moe_cpu", "gpu": "./train_moe", "emu": "./train_moe_emu"}[kind]
        if not os.access(os.path.join(ROOT, self.program), os.X_OK):
            raise LadderError(f"{self.program} is not there: make {os.path.basename(self.program)}")
        self.model = args.model or {"cpu": "demo", "gpu": "smol-500m", "emu": "tiny"}[kind]
        self.T = args.seq_len or {"cpu": 1024, "gpu": 4096, "emu": 32}[kind]
        self.batch = args.batch_size or {"cpu": 1, "gpu": 24, "emu": 4}[kind] # sequences a microbatch, over all ranks
        self.accum = args.grad_accum or {"cpu": 1, "gpu": 10, "emu": 2}[kind]
        self.gpus = len(gpu_names()) if kind == "gpu" else 0
        self.times = kind != "emu"
        self.tolerance = 0.002 if kind == "cpu" else 0.02 # of losses: sums in another order, in fp32 and in bf16
        self.minutes = args.minutes or {"cpu": 10, "gpu": 40, "emu": 10}[kind]

    def start(self):
        switches = {k: v for k, v in START.items() if self.kind != "cpu" or k not in GPU_ONLY}
        return Config(switches, 1)

    def why_not(self, rung):
        """None, or why this rung cannot run here."""
        if self.kind == "cpu" and (rung.ranks or "allreduce" in rung.switches or "overlap" in rung.switches):
            return "train_moe_cpu is one process; predicted below"
        if self.kind == "cpu" and rung.switches.keys() & set(GPU_ONLY):
            return "train_moe_cpu copies nothing to a card"
        needs = rung.ranks or (2 if rung.id in ("last", "overlap") else 1)
        if needs > 1 and not shutil.which("mpirun"):
            return "there is no mpirun here"
        if self.kind == "gpu" and needs > self.gpus:
            return f"this machine has {self.gpus} GPU{'s' if self.gpus != 1 else ''}; predicted below"
        if self.batch % needs:
            return f"--batch-size {self.batch} cannot be split over {needs} ranks"
        return None

    def command(self, config, data, steps, metrics):
        text = config.switches["tokenize"] == "inline"
        command = network.mpirun(config.ranks) if config.ranks > 1 else []
        command += [self.program, "--model" if self.model in roofline.PRESETS else "--config", self.model]
        command += ["--train-data", data.text if text else data.shards, "--batch-size", self.batch // config.ranks, "--seq-len", self.T]
        command += ["--grad-accum", self.accum, "--doc-mask", "--steps", steps, "--log-every", steps, "--metrics", metrics]
        command += ["--schedule", "constant", "--warmup-steps", 0] # so that a step is the same in a short run and in a long one
        for name, value in config.switches.items():
            if config.ranks > 1 or name not in ("allreduce", "overlap"):
                command += [f"--{name}", value]
        return [str(word) for word in command]


def gpu_names():
    try:
        out = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in out.stdout.splitlines() if line.strip()] if out.returncode == 0 else []


def best_trainer():
    return "gpu" if gpu_names() and os.access(os.path.join(ROOT, "train_moe"), os.X_OK) else "cpu"


# ----------------------------------------------------------------------------
# data: the same stories as token shards and as text, so that both give the same batches in the same order

Data = namedtuple("Data", "shards text")


def prepare_data(folder, documents):
    stories, text = os.path.join(folder, f"stories_{documents}"), os.path.join(folder, f"stories_{documents}.txt")
    if not os.path.exists(os.path.join(stories, "manifest.json")):
        made = subprocess.run([sys.executable, "prepro/stories.py", "--out", stories, "--documents", str(documents)], cwd=ROOT,
                              capture_output=True, text=True)
        if made.returncode != 0:
            raise LadderError(f"prepro/stories.py failed: {(made.stderr or made.stdout).strip()[-300:]}")
    if not os.path.exists(text):
        with open(text + ".new", "wb") as out:
            for name in sorted(os.listdir(stories)):
                if name.startswith("train_") and name.endswith(".bin"):
                    out.write(text_of_shard(os.path.join(stories, name)))
        os.replace(text + ".new", text)
    return Data(os.path.join(stories, "train_*.bin"), text)


def text_of_shard(path):
    """A shard of the byte tokenizer as text: each document opens with the end-of-text token."""
    with open(path, "rb") as file:
        content = file.read()
    header, tokens = array.array("i"), array.array("I")
    header.frombytes(content[:1024])
    tokens.frombytes(content[1024:])
    if header[1] != 7 or header[4] != 257:
        raise LadderError(f"{path} holds no bytes")
    return b"".join(b"<|endoftext|>" if t == 256 else bytes((t,)) for t in tokens)


# ----------------------------------------------------------------------------
# running

class Run:
    """One run of a trainer: the lines of its metrics.jsonl, and how long the whole program took."""

    def __init__(self, rows, seconds, warmup):
        self.rows, self.steps = rows, rows[warmup:]
        self.ms = statistics.fmean(row["step_ms"] for row in self.steps) # a mean: a step that waits for data counts, too
        self.losses = [row["loss"] for row in rows]
        self.overhead = max(0.0, seconds - sum(row["step_ms"] for row in rows) / 1e3)


class Runner:
    def __init__(self, trainer, data, folder):
        self.trainer, self.data, self.folder, self.count = trainer, data, folder, 0
        self.busy_before, self.mine_before, self.clock_before = busy_seconds(), children_seconds(), time.monotonic()

    def run(self, config, steps, warmup):
        """RuntimeError holds the trainer's last words."""
        self.count += 1
        metrics = os.path.join(self.folder, "runs", f"{self.count:04d}.jsonl")
        if os.path.exists(metrics):
            os.remove(metrics)
        command = self.trainer.command(config, self.data, warmup + steps, metrics)
        env = dict(os.environ, NO_PROGRESS="1")
        if self.trainer.kind == "emu":
            env.update(EMU_DEVICES=str(config.ranks), OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
        begin = time.monotonic()
        result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        seconds = time.monotonic() - begin
        if result.returncode != 0:
            said = [line for line in (result.stderr or result.stdout).splitlines() if line.strip()]
            mine = [line for line in said if line.startswith("train_moe")]
            raise RuntimeError((mine or said or [f"exit code {result.returncode}"])[-1])
        with open(metrics, encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        if len(rows) != warmup + steps or not all(isinstance(row["loss"], (int, float)) for row in rows):
            raise RuntimeError(f"{metrics} has not {warmup + steps} steps with a loss")
        return Run(rows, seconds, warmup)

    def others_cores(self):
        """Cores that other programs have kept busy since this one began; None where the system does not say."""
        if self.busy_before is None:
            return None
        mine = children_seconds() - self.mine_before
        return max(0.0, (busy_seconds() - self.busy_before - mine) / (time.monotonic() - self.clock_before))


def busy_seconds():
    try:
        with open("/proc/stat", encoding="ascii") as file:
            t = [int(word) for word in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    return (t[0] + t[1] + t[2] + t[5] + t[6] + t[7]) / os.sysconf("SC_CLK_TCK")


def children_seconds():
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


def plan_rounds(seconds, overhead, ms, warmup, fewest, target=20, least_steps=4, most_steps=200):
    """(rounds, steps a run) for comparing A with B in so many seconds. overhead: seconds that a pair of runs takes besides its
    steps, ms: of a step of A and one of B. More rounds before longer ones, up to `target`; never fewer steps than least_steps."""
    pair = overhead + (warmup + least_steps) * ms / 1e3
    rounds = max(1, min(target, int(seconds / pair)))
    if rounds < fewest and seconds / (overhead + (warmup + 1) * ms / 1e3) >= fewest:
        rounds = fewest # shorter runs rather than no verdict
    steps = int((seconds / rounds - overhead) / (ms / 1e3)) - warmup
    return rounds, max(1, min(most_steps, steps))


def losses_agree(a, b, tolerance):
    """(the largest relative difference of the common steps, whether it is small enough)"""
    differences = [abs(x - y) / max(abs(x), 1e-9) for x, y in zip(a, b)]
    largest = max(differences) if all(map(math.isfinite, differences)) else math.inf
    return largest, largest <= tolerance


def phase_shares(runs):
    """{phase: share of the step}, from all measured steps of these runs; empty where a trainer tells no phases."""
    sums = {}
    for run in runs:
        for row in run.steps:
            for name, ms in row.get("phases", {}).items():
                if name not in ("eval", "checkpoint"):
                    sums[name] = sums.get(name, 0.0) + ms
    total = sum(sums.values())
    return {name: ms / total for name, ms in sums.items() if ms / total >= 1e-6 or name == "other"} if total > 0 else {}


# ----------------------------------------------------------------------------
# climbing

def spread(values):
    low, middle, high = stats.quartiles(values)
    return {"median": middle, "low": low, "high": high, "runs": [round(v, 6) for v in values]}


def rung_row(rung, **more):
    return {"id": rung.id, "title": rung.title, "switches": switch_text(rung), "reference": rung.reference,
            "reference_hours": rung.reference_hours, "status": "measured", "why": "", "verdict": None, **more}


class Ladder:
    def __init__(self, args, trainer, runner):
        self.args, self.trainer, self.runner = args, trainer, runner
        self.tokens = trainer.batch * trainer.T * trainer.accum
        self.rows, self.several, self.warmup = [], None, 2

    def say(self, text):
        print(text, flush=True)

    def chosen(self):
        """The rungs to climb; the start is always one."""
        if not self.args.rungs:
            return RUNGS
        return [rung for rung in RUNGS if rung.id == "start" or rung.id in self.args.rungs]

    def climb(self):
        deadline = time.monotonic() + 60 * self.trainer.minutes
        rungs, config = self.chosen(), self.trainer.start()
        runnable = [rung for rung in rungs[1:] if self.trainer.why_not(rung) is None]
        # what is not climbed is not held back either: with --rungs grouped all else is as the trainers do it by default
        for rung in RUNGS[1:]:
            if rung not in rungs and not rung.ranks and self.trainer.why_not(rung) is None:
                config = climb(config, rung)
        self.say(f"{os.path.basename(self.trainer.program)}, model {self.trainer.model}, {self.trainer.batch} x {self.trainer.T} tokens a microbatch, "
                 f"{self.trainer.accum} a step; " + (f"{self.trainer.minutes:g} minutes" if self.trainer.times else "no times"))
        try:
            first = self.runner.run(config, 2, self.warmup)
        except RuntimeError as error:
            raise LadderError(str(error))
        self.warmup = 1 if first.ms > 1000 else 2
        before = {"config": config, "ms": first.ms, "overhead": first.overhead, "first": first, "hours": None}
        self.rows.append(rung_row(rungs[0], ms=None, hours=None, phases={}, switches=" ".join(f"--{k} {v}" for k, v in config.switches.items())))
        for rung in rungs[1:]:
            why = self.trainer.why_not(rung)
            if why is None and rung.id in ("last", "overlap") and before["config"].ranks == 1:
                before = self.several or before # naive ranks were not kept: perhaps they gain with this
                if before["config"].ranks == 1:
                    why = "no rung with several ranks has run"
            if why is not None:
                self.rows.append(rung_row(rung, status="cannot run", why=why))
                self.say(f"  {rung.id:<10} cannot run here: {why}")
                continue
            share = (deadline - time.monotonic()) / (len(runnable) - runnable.index(rung))
            try:
                before = self.rung(rung, before, share)
            except RuntimeError as error: # the trainer's last words
                self.rows.append(rung_row(rung, status="cannot run", why=str(error)))
                self.say(f"  {rung.id:<10} cannot run here: {error}")
        return self.rows

    def rung(self, rung, before, seconds):
        """One rung against the configuration it stands on; returns what the next one stands on."""
        config, begin = climb(before["config"], rung), time.monotonic()
        trial = self.runner.run(config, 2, self.warmup) # warms up files and caches, and shows that it runs at all
        if not self.trainer.times:
            return self.rung_without_times(rung, before, config, trial)
        left = seconds - (time.monotonic() - begin)
        fewest = stats.fewest_rounds(self.args.error_rate)
        rounds, steps = plan_rounds(left, before["overhead"] + trial.overhead, before["ms"] + trial.ms, self.warmup, fewest)
        rounds, steps = self.args.rounds or rounds, self.args.steps or steps
        old, new = [], []
        for i in range(rounds):
            for side in ((old, new) if i % 2 == 0 else (new, old)):
                side.append(self.runner.run(before["config"] if side is old else config, steps, self.warmup))
        c = stats.compare([r.ms for r in old], [r.ms for r in new], self.args.error_rate, self.args.least / 100)
        difference, agree = losses_agree(old[0].losses, new[0].losses, self.trainer.tolerance)
        verdict, why = c.verdict, c.why
        if not agree:
            verdict, why = stats.REVERT, f"its loss differs by {100 * difference:.2g}%: it computes something else"
        hours = before["hours"]
        if hours is None: # the first comparison also measures the start
            ms = statistics.median(r.ms for r in old)
            hours = before["hours"] = roofline.hours(self.tokens / ms * 1e3, TOKENS_GOAL)
            self.rows[0].update(ms=spread([r.ms for r in old]), hours=hours, phases=phase_shares(old))
        self.rows.append(rung_row(
            rung, verdict=verdict, why=why, ratio=c.ratio, low=c.low, high=c.high, rounds=rounds, steps=steps,
            ms=spread([r.ms for r in new]), ms_before=spread([r.ms for r in old]), hours=hours * c.ratio,
            phases=phase_shares(new),
            loss={"difference": difference if math.isfinite(difference) else None, "tolerance": self.trainer.tolerance, "agree": agree,
                  "before": old[0].losses, "after": new[0].losses}, ranks=config.ranks))
        self.say(f"  {rung.id:<10} {self.rows[-1]['ms_before']['median']:9.4g} -> {self.rows[-1]['ms']['median']:9.4g} ms a step  "
                 f"{change_text(c.ratio, c.low, c.high):<28} {verdict:<14} ({rounds} x {steps} steps, loss {difference:.1e} apart)"
                 + (f": {why}" if "cannot tell" in why else ""))
        after = {"config": config, "ms": self.rows[-1]["ms"]["median"], "overhead": trial.overhead, "first": trial, "hours": hours * c.ratio}
        if config.ranks > 1 and agree:
            self.several = after
        return after if verdict == stats.KEEP else before

    def rung_without_times(self, rung, before, config, trial):
        difference, agree = losses_agree(before["first"].losses, trial.losses, self.trainer.tolerance)
        self.rows.append(rung_row(rung, status="no times", verdict=None if agree else stats.REVERT,
                                  why="the emulator has no clock" if agree else f"its loss differs by {100 * difference:.2g}%",
                                  loss={"difference": difference if math.isfinite(difference) else None, "tolerance": self.trainer.tolerance,
                                        "agree": agree, "before": before["first"].losses, "after": trial.losses}, ranks=config.ranks))
        self.say(f"  {rung.id:<10} loss {difference:.1e} apart: {'the same' if agree else 'NOT the same'}")
        return {**before, "config": config, "ms": trial.ms, "overhead": trial.overhead, "first": trial} if agree else before


def change_text(ratio, low, high):
    """0.58, 0.56, 0.6 -> -42.0% (-44.0 .. -40.0)"""
    return f"{100 * (ratio - 1):+.1f}% ({100 * (low - 1):+.1f} .. {100 * (high - 1):+.1f})".replace("-", "−")


# ----------------------------------------------------------------------------
# several cards, predicted

def network_section(args, folder):
    """What the page shows of the network model, as plain data."""
    shape = roofline.shape_of("smol-500m")
    card = roofline.CARDS[args.card]
    net = network.NETWORKS[args.network]
    net = net._replace(bandwidth=args.bandwidth or net.bandwidth, latency_us=net.latency_us if args.latency_us is None else args.latency_us)
    ours = network.Workload(shape, 24, 4096, card, 10)
    theirs = network.Workload(shape, 24, 4096, roofline.CARDS["maxq"], 10,
                              tokens_per_second=TOKENS_GOAL / network.REFERENCE_HOURS_ONE_CARD / 3600)
    section = {
        "model": "smol-500m", "card": card.name, "network": net.name, "bandwidth": net.bandwidth, "latency_us": net.latency_us,
        "numbers": sum(b.numbers for b in network.buckets(shape)), "buckets": len(network.buckets(shape)),
        "counted": count_section(args, folder), "scaling": [], "figures": {}, "tolerance": network.TOLERANCE,
        "figure_text": {name: text for name, (_, text, _) in network.FIGURES.items()},
        "figure_value": {name: value for name, (value, _, _) in network.FIGURES.items()},
    }
    for bandwidth in sorted({net.bandwidth, 2.0, 4.0, 8.0, 12.0, 20.0, 40.0, 300.0}):
        at = net._replace(bandwidth=bandwidth)
        lines = {}
        for way, (every, overlap) in network.WAYS.items():
            lines[way] = []
            for ranks in (1, 2, 3, 4, 6, 8):
                step = ours.step(ranks, at, every, overlap)
                lines[way].append({"ranks": ranks, "speedup": ours.speedup(ranks, at, every, overlap), "hours": ours.hours(step),
                                   "waiting": step.waiting, "all_reduce": step.all_reduce})
        section["scaling"].append({"bandwidth": bandwidth, "ways": lines})
    for name, workload in (("as in the reference run, 43 h on one card", theirs), (f"from roofline.py, {card.name}", ours)):
        section["figures"][name] = {
            way: {"rows": network.figures_by_bandwidth(workload, net.latency_us, overlap),
                  "needs": {figure: network.bandwidth_for(figure, workload, net.latency_us, overlap) for figure in network.FIGURES}}
            for way, overlap in (("no overlap", False), ("overlap", True))}
    return section


def count_section(args, folder):
    """The emulated trainer's collectives, and whether the model's are the same; or why they were not counted."""
    program = os.path.join(ROOT, "train_moe_emu")
    if args.no_count:
        return {"why": "--no-count"}
    if not os.access(program, os.X_OK) or not shutil.which("mpirun"):
        return {"why": "there is no train_moe_emu (make train_moe_emu) or no mpirun"}
    data, rows = prepare_data(folder, 500), []
    wanted = [b.numbers for b in network.buckets(roofline.shape_of("tiny"))]
    for ranks, way, times in ((2, "every", 2), (4, "last", 1)):
        options = ["--model", "tiny", "--train-data", data.shards, "--batch-size", "1", "--seq-len", "16", "--grad-accum", "2",
                   "--allreduce", way, "--overlap", "0"]
        try:
            got = network.count(program, ranks, options, folder)
        except RuntimeError as error:
            return {"why": str(error)}
        rows.append({"ranks": ranks, "allreduce": way, "microbatches": 2, "all_reduces": len(got), "bytes": sum(n * size for n, size in got),
                     "as_modelled": [n for n, _ in got] == times * wanted and all(size == 2 for _, size in got)})
    return {"model": "tiny", "rows": rows, "as_modelled": all(row["as_modelled"] for row in rows)}


# ----------------------------------------------------------------------------
# output

def machine_text(trainer):
    names = gpu_names() if trainer.kind == "gpu" else []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            cpu = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "CPU")
    except OSError:
        cpu = "CPU"
    cpu = f"{cores} core{'s' if cores > 1 else ''} of {cpu}"
    return (", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) + "; " if names else "") + cpu


def git_commit():
    try:
        out = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, timeout=10)
        return out.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def against(new, old):
    """Two ladders: for each rung of both its gain then and now, and whether the intervals leave room for it to be the same."""
    rows, there = [], {row["id"]: row for row in old["rungs"]}
    for row in new["rungs"]:
        was = there.get(row["id"])
        if not was:
            continue
        both = row["status"] == was["status"] == "measured" and row.get("ratio") and was.get("ratio")
        word = ""
        if both and "cannot tell" in row["why"] + was["why"]:
            word = "too few rounds to say"
        elif both:
            word = "gains more now" if row["high"] < was["low"] else "gains less now" if row["low"] > was["high"] else "the same"
        rows.append({"id": row["id"], "title": row["title"], "word": word, "verdict": row["verdict"], "verdict_before": was["verdict"],
                     "change": change_text(row["ratio"], row["low"], row["high"]) if row.get("ratio") else "",
                     "change_before": change_text(was["ratio"], was["low"], was["high"]) if was.get("ratio") else "",
                     "hours": row.get("hours"), "hours_before": was.get("hours")})
    same = all(new[k] == old[k] for k in ("machine", "model", "batch_size", "seq_len", "grad_accum", "trainer"))
    return {"rows": rows, "made": old["made"], "commit": old["commit"], "machine": old["machine"], "comparable": same}


def markdown(ladder):
    lines = [f"{ladder['program']}, model {ladder['model']}, {ladder['batch_size']} x {ladder['seq_len']} tokens a microbatch, "
             f"{ladder['grad_accum']} a step, on {ladder['machine']}. {ladder_page.method_text(ladder)}", "",
             "| rung | switch | ms a step | against the rung before | verdict | hours to 10B tokens | reference run |",
             "| --- | --- | --- | --- | --- | --- | --- |"]
    for row in ladder["rungs"]:
        if row["status"] == "cannot run":
            cells = ["", f"cannot run here: {row['why']}", "", ""]
        elif row["status"] == "no times":
            cells = ["", f"loss {ladder_page.apart(row['loss']['difference'])}", row["verdict"] or "no times: the emulator has no clock", ""]
        else:
            ms, note = row["ms"], f" ({row['why']})" if "cannot tell" in row["why"] or "computes something else" in row["why"] else ""
            cells = [f"{ms['median']:.4g} ({ms['low']:.4g} .. {ms['high']:.4g})" if ms else "",
                     change_text(row["ratio"], row["low"], row["high"]) if "ratio" in row else "",
                     f"**{row['verdict']}**{note}" if row["verdict"] else "",
                     f"{row['hours']:.4g}" if row["hours"] and row["verdict"] in (None, stats.KEEP) else ""]
        switches = "" if row["id"] == "start" else f"`{row['switches']}`"
        told = [f"{row['reference_hours']:.3g} h"] if row["reference_hours"] else []
        told += [row["reference"]] if row["reference"] not in ("", *told) else []
        lines.append(f"| {row['title']} | {switches} | " + " | ".join(cells) + f" | {'; '.join(told)} |")
    if "against" in ladder:
        lines += ["", f"Against the ladder of {ladder['against']['made']} ({ladder['against']['commit']}, {ladder['against']['machine']}):", "",
                  "| rung | then | now | |", "| --- | --- | --- | --- |"]
        lines += [f"| {r['title']} | {r['change_before']} {r['verdict_before'] or ''} | {r['change']} {r['verdict'] or ''} | {r['word']} |"
                  for r in ladder["against"]["rows"] if r["change"] or r["change_before"]]
    lines += ["", *ladder_page.network_markdown(ladder["network"])]
    return "\n".join(lines) + "\n"


def read_ladder(path):
    try:
        with open(path, encoding="utf-8") as file:
            ladder = json.load(file)
        if ladder["version"] != 1 or not ladder["rungs"]:
            raise ValueError
    except OSError as error:
        raise LadderError(f"cannot read {path}: {error.strerror}")
    except (ValueError, KeyError, TypeError):
        raise LadderError(f"{path} is no ladder.json")
    return ladder


def write_all(ladder, folder):
    paths = []
    for name, text in (("ladder.json", json.dumps(ladder, indent=1) + "\n"), ("ladder.md", markdown(ladder)),
                       ("ladder.html", ladder_page.page(ladder))):
        paths.append(os.path.join(folder, name))
        with open(paths[-1] + ".new", "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(paths[-1] + ".new", paths[-1])
    return paths


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog="rungs: " + ", ".join(r.id for r in RUNGS[1:]))
    parser.add_argument("--trainer", choices=("cpu", "gpu", "emu"), help="[gpu where there is one and train_moe is built, else cpu]")
    parser.add_argument("--program", metavar="PATH", help="another build of that trainer")
    parser.add_argument("--model", help="a preset or a config.json [cpu: demo, gpu: smol-500m, emu: tiny]")
    parser.add_argument("--minutes", type=float, help="how long it may take [cpu 10, gpu 40]")
    parser.add_argument("--batch-size", type=int, metavar="B", help="sequences a microbatch, over all ranks [cpu 1, gpu 24, emu 4]")
    parser.add_argument("--seq-len", type=int, metavar="T", help="[cpu 1024, gpu 4096, emu 32]")
    parser.add_argument("--grad-accum", type=int, metavar="N", help="microbatches a step [cpu 1, gpu 10, emu 2]")
    parser.add_argument("--rungs", metavar="A,B", help="only these; all other switches as the trainers have them by default")
    parser.add_argument("--rounds", type=int, metavar="N", help="so many rounds a rung, whatever the time [as many as fit, up to 20]")
    parser.add_argument("--steps", type=int, metavar="N", help="measured steps a run [as many as fit]")
    parser.add_argument("--error-rate", type=float, default=stats.ERROR_RATE, metavar="P",
                        help=f"how often a rung that changes nothing may be kept or reverted [{stats.ERROR_RATE}]")
    parser.add_argument("--least", type=float, default=100 * stats.LEAST_GAIN, metavar="PERCENT",
                        help=f"a gain below this is no difference [{100 * stats.LEAST_GAIN:g}]")
    parser.add_argument("--out", default="build/ladder", metavar="DIR", help="[build/ladder]")
    parser.add_argument("--against", metavar="OLD.json", help="compares with an earlier ladder")
    parser.add_argument("--from", dest="source", metavar="LADDER.json", help="measures nothing, draws this one again")
    several = parser.add_argument_group("several cards, predicted for smol-500m")
    several.add_argument("--network", choices=network.NETWORKS, default="pcie4-host", help="[pcie4-host: PCIe 4 without P2P]")
    several.add_argument("--bandwidth", type=float, metavar="GB/S", help="what a rank sends and receives at a time [the network's]")
    several.add_argument("--latency-us", type=float, metavar="US", help="of a hop [the network's]")
    several.add_argument("--card", choices=roofline.CARDS, default="maxq", help="whose compute time [maxq]")
    several.add_argument("--no-count", action="store_true", help="do not count collectives in the emulator")
    args = parser.parse_args(argv)
    for name, least in (("minutes", 0), ("batch_size", 1), ("seq_len", 1), ("grad_accum", 1), ("rounds", 1), ("steps", 1), ("bandwidth", 0)):
        value = getattr(args, name)
        if value is not None and not (least <= value < 1e9 and value > 0):
            raise LadderError(f"--{name.replace('_', '-')} {value:g} is too small or too large")
    if not 0 < args.error_rate < 1 or not 0 <= args.least < 100:
        raise LadderError("--error-rate must lie between 0 and 1, --least between 0 and 100")
    if args.latency_us is not None and not 0 <= args.latency_us < 1e9:
        raise LadderError(f"--latency-us {args.latency_us:g} is too small or too large")
    args.rungs = args.rungs.split(",") if args.rungs else None
    for name in args.rungs or []:
        if name not in [rung.id for rung in RUNGS]:
            raise LadderError(f"--rungs {name}: there are {', '.join(r.id for r in RUNGS[1:])}")
    return args


def measure(args, folder):
    """Climbs and returns the ladder; what is done when Ctrl-C comes is kept."""
    trainer = Trainer(args.trainer or best_trainer(), args)
    os.makedirs(os.path.join(folder, "runs"), exist_ok=True)
    copy = os.path.join(folder, os.path.basename(trainer.program)) # all runs are of one program, also if it is built anew meanwhile
    shutil.copy2(os.path.join(ROOT, trainer.program), copy)
    trainer.program = copy
    data = prepare_data(folder, 500 if trainer.kind == "emu" else 20000)
    section = network_section(args, folder)
    runner = Runner(trainer, data, folder)
    climber, stopped, begin = Ladder(args, trainer, runner), False, time.monotonic()
    try:
        climber.climb()
    except KeyboardInterrupt:
        stopped = True
        print("stopped: what is done is written", flush=True)
    if not climber.rows:
        raise LadderError("stopped before the first rung")
    start, last = climber.rows[0], [row for row in climber.rows if row["verdict"] == stats.KEEP]
    return {
        "version": 1, "made": time.strftime("%Y-%m-%d %H:%M"), "commit": git_commit(), "trainer": trainer.kind,
        "program": os.path.basename(trainer.program), "machine": machine_text(trainer), "model": trainer.model, "batch_size": trainer.batch,
        "seq_len": trainer.T, "grad_accum": trainer.accum, "minutes": (time.monotonic() - begin) / 60, "stopped": stopped,
        "error_rate": args.error_rate, "least": args.least / 100, "warmup": climber.warmup, "others_cores": runner.others_cores(),
        "drift": last[-1]["ms"]["median"] / (start["ms"]["median"] * last[-1]["hours"] / start["hours"]) if last else None,
        "rungs": climber.rows, "network": section,
    }


def main():
    try:
        args = parse(sys.argv[1:])
        folder = os.path.abspath(args.out)
        os.makedirs(folder, exist_ok=True)
        old = read_ladder(args.against) if args.against else None # before it is written over
        ladder = read_ladder(args.source) if args.source else measure(args, folder)
        ladder.pop("against", None)
        if old:
            ladder["against"] = against(ladder, old)
        paths = write_all(ladder, folder)
        print("\n" + ladder_page.summary(ladder) + "\n" + " ".join(os.path.relpath(path) for path in paths))
    except (LadderError, OSError) as error:
        print(f"ladder.py: error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
