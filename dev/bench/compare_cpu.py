"""train_moe_cpu against PyTorch, in turns, and their ratios: the second half of `make bench-cpu`.

    python3 dev/bench/compare_cpu.py [S] [M] [SEED1] [--rounds 3] [--steps 5] [--compile] [--python PYTHON]

In a round everybody has a turn: a process of its own that makes one step to warm up and then --steps steps, of which the median
counts. So all meet the same noise; a ratio is taken within a round, and the table has the median of the rounds' ratios with the
smallest and largest. PyTorch runs as it comes and in its best ways (torch_cpu.py), for which glibc is told not to hand memory
back to the system. What others used meanwhile is printed: on a machine that has other work, believe ratios only, and those little.
Needs a Python with torch and transformers ($HF_PYTHON, python3 or build/venv-hf); where there is none it says so and ends well."""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections import namedtuple

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
HERE = os.path.join(ROOT, "dev", "bench")
WAYS = ["as-it-comes", "fp32", "bf16-autocast", "bf16-weights"]
TOKENS = {"S": 4 * 256, "M": 4 * 512, "SEED1": 512}
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "100000000000", "MALLOC_TRIM_THRESHOLD_": "100000000000"}
Turn = namedtuple("Turn", "ms, first_s, peak_gib")


def find_python(given):
    for python in filter(None, (given, os.environ.get("HF_PYTHON"), "python3", os.path.join(ROOT, "build/venv-hf/bin/python"))):
        try:
            if subprocess.run([python, "-c", "import torch, transformers"], capture_output=True).returncode == 0:
                return python
        except OSError:
            pass
    return None


def command(who, size, steps, python):
    """(command line, what to set in the environment)"""
    side, way = who.split(" ", 1)
    if side == "ours":
        return [os.path.join(ROOT, "build/bench_cpu"), "turn", size, way, str(steps)], {"GOMP_SPINCOUNT": "3000"}  # as the trainer sets it
    return [python, os.path.join(HERE, "torch_cpu.py"), size, way, str(steps)], {} if way == "as-it-comes" else KEEP_MEMORY


def turn(who, size, steps, python):
    """One process: median milliseconds of its steps, seconds until its first was done, its peak memory; None: it failed."""
    argv, env = command(who, size, steps, python)
    begin = time.monotonic()
    p = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **{k: os.environ.get(k, v) for k, v in env.items()}})
    first, ms = p.stdout.readline(), []
    first_s = time.monotonic() - begin
    ms = [float(line) for line in p.stdout]
    errors = p.stderr.read().strip().splitlines()
    _, status, usage = os.wait4(p.pid, 0)
    p.returncode = os.waitstatus_to_exitcode(status)
    if p.returncode != 0 or not first or len(ms) != steps:
        print(f"  {who} at {size} failed ({p.returncode}): {errors[-1] if errors else 'no word'}", flush=True)
        return None
    return Turn(statistics.median(ms), first_s, usage.ru_maxrss / 2**20)


def busy_seconds():
    """Processor time that this machine has spent on anything, and that this process's children have."""
    with open("/proc/stat") as f:
        t = [int(x) for x in f.readline().split()[1:9]]
    mine = os.times()
    return (sum(t) - t[3] - t[4]) / os.sysconf("SC_CLK_TCK"), mine.children_user + mine.children_system


def ratio(turns, theirs, ours):
    """'1.23 (1.20 .. 1.30)': how many times as fast as the best of theirs, round by round."""
    pairs = zip(*(turns[w] for w in theirs if w in turns), turns[ours])
    r = sorted(min(t.ms for t in pair[:-1]) / pair[-1].ms for pair in pairs)
    return f"{statistics.median(r):.2f} ({r[0]:.2f} .. {r[-1]:.2f})"


def compare(size, contenders, rounds, steps, python):
    print(f"\n{size}: {rounds} rounds of {steps} steps", flush=True)
    turns, began, (busy, mine) = {who: [] for who in contenders}, time.monotonic(), busy_seconds()
    for n in range(rounds):
        for who in list(turns) if n % 2 == 0 else reversed(list(turns)):
            t = turn(who, size, steps, python)
            if t is None:
                del turns[who]
            else:
                turns[who].append(t)
    busy_now, mine_now = busy_seconds()
    others = (busy_now - busy - (mine_now - mine)) / (time.monotonic() - began)
    print(f"| {size} | ms a step | tokens/s | first step after | peak memory |\n| --- | --- | --- | --- | --- |")
    for who, all_turns in turns.items():
        ms = statistics.median(t.ms for t in all_turns)
        print(f"| {who} | {ms:.0f} | {TOKENS[size] / ms * 1e3:.0f} | {statistics.median(t.first_s for t in all_turns):.1f} s "
              f"| {max(t.peak_gib for t in all_turns):.2f} GiB |")
    torch = [w for w in turns if w.startswith("torch")]
    for ours, theirs, words in (("ours fp32", ["torch as-it-comes"], "PyTorch as it comes"),
                                ("ours fp32", [w for w in torch if " fp32" in w], "PyTorch's best fp32"),
                                ("ours bf16", torch, "PyTorch's best in any precision")):
        if ours in turns and any(w in turns for w in theirs):
            print(f"{ours} / {words}: {ratio(turns, theirs, ours)}")
    print(f"others used {max(others, 0):.2f} cores", flush=True)


def main():
    parser = argparse.ArgumentParser(description="train_moe_cpu against PyTorch, in turns")
    parser.add_argument("sizes", nargs="*", metavar="SIZE", help="S, M, SEED1 (10 GiB); S and M if none is named")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="also with torch.compile, which takes a minute a turn")
    parser.add_argument("--python", help="a Python that has torch and transformers")
    a = parser.parse_args()
    sizes = [s for s in a.sizes if s in TOKENS] or ["S", "M"]
    python = find_python(a.python)
    if python is None:
        print("no Python here has torch and transformers, so PyTorch is left out (make bench-cpu HF_PYTHON=...)")
        return
    ways = WAYS + [w + "-compile" for w in WAYS[1:] if a.compile]
    about = "import torch, transformers as t; print('torch', torch.__version__, 'transformers', t.__version__, torch.get_num_threads(), 'threads')"
    print(subprocess.run([python, "-c", about], capture_output=True, text=True).stdout.strip(), flush=True)
    for size in sizes:
        compare(size, ["ours fp32", "ours bf16", *(f"torch {w}" for w in ways)], a.rounds, a.steps, python)


if __name__ == "__main__":
    sys.exit(main())
