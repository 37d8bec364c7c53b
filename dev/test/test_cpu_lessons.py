"""Each lesson of dev/cpu: all of its kernels agree with the definition in double, built as `make` builds them and under ASan and UBSan;
a fault in the trainer's function, which the lesson calls, is found; and its times can be read by the table's script."""

import glob
import re

from harness import *
from emulate import at_once

sys.path.insert(0, os.path.join(ROOT, "dev", "bench"))
import bench_cpu_ops
from lessons import Op

LESSONS = sorted(os.path.basename(p)[:-2] for p in glob.glob(os.path.join(ROOT, "dev", "cpu", "*.c")))
OPENMP = os.environ.get("OPENMP", "-fopenmp").split()
TEXT = os.environ.get("TEXT_FLAGS", "").split()
LIBS = ["-lcjson", *os.environ.get("TEXT_LIBS", "").split(), "-lm", "-lpthread"]
SANITIZE = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
ENV = {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "passive"}  # more threads than many a loop has rounds

# name: what is wrong in the trainer's function (before, after), and what the lesson must say about it
FAULTS = {
    "adamw": ("inv_c2 = 1 / sqrt(a.correction2);", "inv_c2 = 1;", "params"),
    "attention": ("lse + (b * s.NH + h) * T + i, j0, begin, i + 1, i1", "lse + (b * s.NH + h) * T + i, j0, begin, i1, i1", "out"),
    "cross_entropy": ("    logits[target] -= d_loss;\n", "", "d_logits"),
    "exp": ("    f = f - n * 1.42860677e-6f;\n", "", "ulp off"),
    "experts": ("d_router_weights[slot] = dot;", "d_router_weights[slot] = dot + d_row[0];", "d_router_weights"),
    "matmul": ("for (size_t k = 0; k < K; k++) { sum += a_i[k] * b_j[k]; }", "for (size_t k = 1; k < K; k++) { sum += a_i[k] * b_j[k]; }", "NT"),
    "rmsnorm": ("real k = dot * s * s / (real)C;", "real k = dot * s / (real)C;", "d_residual"),
}


def build(name, folder_of="", *flags):
    """The lesson without a library, from this source tree or a changed one; a warning is an error."""
    out = folder(f"{name}_{len(flags)}_{len(folder_of)}")
    run([os.environ.get("CC", "cc"), "-std=c11", "-O0", "-Wall", "-Wextra", "-Werror", "-I.", "-fno-math-errno", *OPENMP, *TEXT, *flags,
         os.path.join(folder_of, f"dev/cpu/{name}.c"), "-o", out, *LIBS])  # fmt: skip
    return out


def passed(result):
    """How many checks a program says have passed; all of them must have."""
    last = result.out.splitlines()[-1] if result.out else ""
    found = re.fullmatch(r"(\d+) passed, 0 failed", last)
    check(result.code == 0 and found and int(found.group(1)) > 0, f"exit code {result.code}: {(result.out + result.err)[-800:]}")
    return int(found.group(1))


@test
def every_kernel_is_right_as_make_builds_it():
    run(["make", "-s", "-j2", *(f"build/dev_cpu/{name}" for name in LESSONS)])
    for name in LESSONS:
        r = run([f"build/dev_cpu/{name}", "--check"], env=ENV, code=None)
        check(passed(r) > 10, f"{name} hardly checks anything: {r.out[-200:]}")


@test
def every_kernel_stays_within_its_arrays():
    def check_lesson(name):
        passed(run([build(name, "", *SANITIZE), "--check"], env=ENV, code=None))

    at_once(*(lambda name=name: check_lesson(name) for name in LESSONS))


def changed_trainer(before, after):
    """A source tree whose trainer differs; the rest is this one's."""
    top = folder(f"tree_{abs(hash((before, after)))}")
    os.makedirs(os.path.join(top, "dev"))
    for part in ("llmc", "dev/cpu", "dev/bench"):
        shutil.copytree(os.path.join(ROOT, part), os.path.join(top, part))
    text = read(os.path.join(ROOT, "train_moe_cpu.c")).decode()
    check(before in text, f"train_moe_cpu.c has no {before!r} any more: plant another fault")
    write(os.path.join(top, "train_moe_cpu.c"), text.replace(before, after, 1))
    return top


def expect_fault(name, before, after, word):
    """The lesson, built with that fault in the trainer, fails at the trainer's kernel and says `word`."""
    winner = Op(os.path.join(ROOT, "dev", "cpu", name + ".c")).winners[0]
    r = run([build(name, changed_trainer(before, after)), winner, "--check"], env=ENV, code=None)
    fails = [line for line in r.out.splitlines() if line.startswith("FAIL ")]
    check(r.code == 1, f"{name} with a fault planted: exit code {r.code}: {r.out[-400:]}")
    check(any(word in line for line in fails), f"{name} does not mention {word}: {fails[:3]}")
    check(re.fullmatch(r"\d+ passed, %d failed" % len(fails), r.out.splitlines()[-1]), f"{name} counts otherwise: {r.out[-200:]}")


@test
def a_fault_in_the_trainer_is_found_by_its_lesson():
    check(sorted(FAULTS) == LESSONS, f"a fault for each lesson: {sorted(set(LESSONS) ^ set(FAULTS))}")
    at_once(*(lambda name=name: expect_fault(name, *FAULTS[name]) for name in LESSONS))


@test
def what_is_not_written_is_found():  # arrays begin as NaNs
    expect_fault("rmsnorm", "        rstd[n] = s;\n", "        if (n > 0) { rstd[n] = s; }\n", "rstd: element 0 of 1 is nan")


@test
def times_become_rows_of_the_table():
    op = Op(os.path.join(ROOT, "dev", "cpu", "exp.c"))
    r = run([build("exp")], env={**ENV, "OMP_NUM_THREADS": "1"})
    rows = bench_cpu_ops.table_rows(op, r.out)
    check(len(rows) == 2, f"not two shapes: {rows}")
    for line in rows:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        check(len(cells) == len(bench_cpu_ops.HEAD) and cells[0] == "[exp](exp.c)", f"other columns: {line}")
        check(all(float(x.strip("*")) > 0 for x in cells[2:5]) and cells[4].startswith("**") and cells[5:7] == ["", ""], f"times: {line}")
        check(re.fullmatch(r"[\d.]+ GB/s, \d+ % of memory", cells[7]) and cells[9].startswith("1 thread, others "), f"rates: {line}")


@test
def the_readme_lists_every_lesson_with_the_trainer_kernel():  # else: make bench-cpu-ops
    text = read(os.path.join(ROOT, "dev", "cpu", "README.md")).decode()
    for name in LESSONS:
        op = Op(os.path.join(ROOT, "dev", "cpu", name + ".c"))
        source = read(op.path).decode()
        kernels = int(re.search(r"NUM_KERNELS = (\d+)", source).group(1))
        check(len(op.winners) == 1 and 1 <= op.winners[0] <= kernels, f"{name}: winner {op.winners} of {kernels}")
        told = {int(n) for n in re.findall(r"(?m)^// kernel (\d+): ", source)}
        check(told == set(range(1, kernels + 1)), f"{name}: the opening note tells of kernels {sorted(told)}, there are {kernels}")
        check(f"| {op.link} | {op.about} | {op.winners[0]} |" in text, f"{name} is not, or otherwise, in the table of files")
        check(re.search(r"(?m)^\| %s \|.*\*\*" % re.escape(op.link), text), f"{name} has no times")


@test
def wrong_arguments_are_one_line():
    program = build("exp")
    for wrong in ("4", "0", "x", "", "--chek", "3x"):
        expect_error([program, wrong], f"'{wrong}' is no argument", "1 to 3")
    expect_error([build("matmul"), "5"], "kernel 5 cannot run", "built without oneDNN")
    expect_error(["python3", "dev/bench/bench_cpu_ops.py", "no-such"], "no file of dev/cpu has no-such in its name")


main()
