#!/usr/bin/env python3
"""Builds every file of dev/cpu, checks and times it, and writes the tables of dev/cpu/README.md.

    python3 dev/bench/bench_cpu_ops.py                   all files (make bench-cpu-ops)
    python3 dev/bench/bench_cpu_ops.py rmsnorm exp       those whose name contains one of the words; other rows stay as they are

A file whose checks fail keeps its old times. OMP_NUM_THREADS=1 counts processor time, which a busy machine does not stretch.
"""
import glob
import os
import re
import sys

from lessons import ROOT, Op, Readme, cpu_name, row, run

README = Readme("dev", "cpu", "README.md")
HEAD = ["file", "what", "kernel 1", "2", "3", "4", "5", "the trainer's", "in bf16", "machine"]
LINE = re.compile(r"bench (.*) kernel (\d+): ([\d.]+) ms, ([\d.]+) (\w+/s) = ([\d.]+) % of (\w+) ([\d.]+)")


def ms(text):
    """Milliseconds with three digits."""
    return "%.3g" % float(text) if float(text) < 1000 else "%.0f" % float(text)


def table_rows(op, out):
    """A row for each shape: milliseconds by kernel (in bold the trainer's), and the rate that the trainer's reach."""
    shapes = {}
    for match in filter(None, map(LINE.match, out.splitlines())):
        shapes.setdefault(match.group(1), {})[int(match.group(2))] = match.groups()[2:]
    winner, rows = op.winners[0], []
    bf16 = re.search(r"BF16 = (\d)", open(op.path, encoding="utf-8").read())
    for what, kernels in shapes.items():
        times = [ms(kernels[k][0]) if k in kernels else "" for k in range(1, 6)]
        times[winner - 1] = "**%s**" % times[winner - 1]
        _, rate, unit, share, of, _ = kernels[winner]
        in_bf16 = kernels.get(int(bf16.group(1))) if bf16 else None
        rows.append(row(op.link, what, *times, "%s %s, %.0f %% of %s" % (rate, unit, float(share), of),
                        "%s, %.0f %%" % (in_bf16[1], float(in_bf16[3])) if in_bf16 else "", machine_of(out)))
    return rows


def machine_of(out):
    """What a program says at its end about threads and neighbours."""
    threads, others = re.search(r"(\d+ threads?), .* others used (-?[\d.]+|-?nan) cores", out).groups()
    return "%s, others %s cores" % (threads, others)


def time_op(op):
    """Rows of one file, or None."""
    print("timing %s" % op.name, flush=True)
    code, out, err = run(["make", "-s", "build/dev_cpu/" + op.name])
    if code == 0:
        code, out, err = run([os.path.join("build", "dev_cpu", op.name)], env={"GOMP_SPINCOUNT": "3000"})  # as the trainer
    if code == 0:
        print(out, end="", flush=True)
        return table_rows(op, out)
    print("FAIL %s: exit code %d\n%s%s" % (op.name, code, out[-2000:], err[-2000:]), file=sys.stderr)
    return None


def main():
    every = [Op(path) for path in sorted(glob.glob(os.path.join(ROOT, "dev", "cpu", "*.c")))]
    words = sys.argv[1:]
    ops = [op for op in every if not words or any(word in op.name for word in words)]
    if not ops:
        sys.exit("bench_cpu_ops.py: error: no file of dev/cpu has %s in its name" % " or ".join(words))
    README.write_files(every)
    rows, ok = README.read_table("times"), True
    compiler = run([os.environ.get("CC", "cc"), "--version"])[1].splitlines()[0]
    note = "On %s, %s; medians in milliseconds." % (cpu_name(), compiler)
    for op in ops:
        timed = time_op(op)
        ok = ok and timed is not None
        rows[op.name] = timed or rows.get(op.name, [])
        README.write_table("times", note, HEAD, rows)
    print("wrote the tables of dev/cpu/README.md")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
