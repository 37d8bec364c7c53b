"""Each lesson of dev/cuda, emulated: all of its kernels agree with the CPU trainer's loops, and the checker for races, bounds and
uninitialised memory is silent. (What a lesson checks, over which shapes, stands in its file.) `test_kernels.py NAME` runs those
whose name contains NAME; LONG=1 (make test-long) adds other orders of threads, AddressSanitizer, and the large shapes of
smol-500m. (The orders of the trainer's own kernels are compared bit by bit in test_gpu_trainer.py.)"""

import glob
import re

from harness import *
from emulate import at_once, emulated

LESSONS = sorted(os.path.basename(p)[:-3] for p in glob.glob(os.path.join(ROOT, "dev", "cuda", "*.cu")))
QUIET = {"OMP_NUM_THREADS": "1", "EMU_COUNT": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "ASAN_OPTIONS": "detect_leaks=0"}


def checks(name, mode="fast", ranks=1, arguments=(), **env):
    """Runs a lesson in one mode and order; returns how many checks it made."""
    command = [emulated(mode, f"dev/cuda/{name}.cu"), *arguments]
    if ranks > 1:
        command = ["mpirun", *(["--allow-run-as-root"] if os.geteuid() == 0 else []), "--oversubscribe", "--bind-to", "none", "-np", ranks, *command]
    r = run(command, env={**QUIET, "EMU_DEVICES": str(ranks), **env}, code=None)
    what = f"{name} --{mode} {' '.join(arguments)} {env}"
    check(r.code == 0, f"{what}: exit code {r.code}: {(r.out + r.err)[-800:]}")
    for word in ("emu:", "runtime error", "AddressSanitizer"):
        check(word not in r.err, f"{what}: {r.err[-1500:]}")
    found = [line.split() for line in r.out.splitlines() if line.endswith(" failed") and " passed, " in line]
    check(found and all(int(line[0]) > 0 and line[2] == "0" for line in found), f"{what}: it ends with {r.out[-200:]!r}")
    return int(found[-1][0])


RANKS = {"nccl_all_reduce": 3}  # 1/3 is no number in bf16


def check_lesson(name):
    ranks = RANKS.get(name, 1)
    modes = ["check"] + (["fast", "asan"] if os.environ.get("LONG") else [])
    at_once(*(lambda m=m: emulated(m, f"dev/cuda/{name}.cu") for m in modes))
    orders = ["forward", "reverse", "random:7"] if "fast" in modes else []
    runs = [("check", {})] + [("fast", {"EMU_ORDER": order}) for order in orders] + ([("asan", {})] if "asan" in modes else [])
    counts = at_once(*(lambda m=m, env=env: checks(name, m, ranks, **env) for m, env in runs))
    check(len(set(counts)) == 1, f"the number of checks depends on the mode: {counts}")


for name in LESSONS:
    def claim(name=name):
        check_lesson(name)
    claim.__name__ = f"{name}_is_right_and_silent_under_the_checker"
    test(claim)


# What takes the emulator minutes at the sizes of smol-500m, where the others take up to one: lesson -> kernels that
# `make test-long` leaves out there. Run by hand: `--long` passed.
MINUTES = {"attention_forward": {2}, "attention_backward": {2}}


def check_large(name):
    """A kernel at a time: full width, as many tokens as the lesson gives the emulator (--long)."""
    source = read(os.path.join(ROOT, f"dev/cuda/{name}.cu")).decode()
    count = int(re.search(r"NUM_KERNELS = (\d+)|num_kernels = (\d+)|define NUM_KERNELS (\d+)", source).group(0).split()[-1])
    kernels = [k for k in range(1, count + 1) if k not in MINUTES.get(name, ())]
    at_once(*(lambda k=k: checks(name, "fast", RANKS.get(name, 1), [str(k), "--long"]) for k in kernels))


if os.environ.get("LONG"):
    for name in LESSONS:
        def claim(name=name):
            check_large(name)
        claim.__name__ = f"{name}_is_right_at_the_sizes_of_smol_500m"
        test(claim)


@test
def counters_stand_in_place_of_times():
    sources = b"".join(read(os.path.join(ROOT, "dev/cuda", file)) for file in ("swiglu.cu", "swiglu.h")).decode()
    kernels = sorted(re.findall(r"__global__ void (?:__launch_bounds__\(\d+\) )?(\w+_kernel\d+)\(", sources))
    check(len(kernels) == 4, f"kernels found in swiglu: {kernels}")
    for mode in ("check", "fast"):
        out = run([emulated(mode, "dev/cuda/swiglu.cu")], env={**QUIET, "EMU_COUNT": ""}).out
        lines = out.splitlines()
        check(lines[0].split()[:2] == ["counters", "launches"] and lines[-1].endswith(" passed, 0 failed"), f"{mode}: {out}")
        rows = {line.split()[0]: line.split()[1:] for line in lines if line.split()[0].endswith(("kernel1", "kernel2"))}
        check(sorted(rows) == kernels, f"{mode}: a row a kernel, but there is {sorted(rows)}")
        launches, *numbers = rows["swiglu_forward_kernel2"]
        check(int(launches) > 0, f"{mode}: {launches} launches")
        if mode == "check":  # gate and up are read once, act is written once, in whole sectors
            read_kib, a_byte, written_kib, a_byte_written, sectors = map(float, numbers[:5])
            check(read_kib == 2 * written_kib > 0 and a_byte == a_byte_written == 1 and 1 <= sectors < 1.1, f"{numbers}")
        else:
            check(int(numbers[1]) > int(numbers[0]) > 0, f"blocks and threads: {numbers}")
    quiet = run([emulated("check", "dev/cuda/swiglu.cu")], env=QUIET).out
    check("counters" not in quiet, "EMU_COUNT=0 prints counters")


@test
def arguments_that_are_none_are_refused():
    lesson = emulated("fast", "dev/cuda/swiglu.cu")
    for arguments in (["3"], ["0"], ["x"], [""], ["--large"], ["--large", ""], ["--large", "3"], ["--large", "1,"], ["--large", "1;2"], ["--short"]):
        result = run([lesson, *arguments], env=QUIET, code=1)
        check(result.err.count("\n") == 1 and "give" in result.err, f"{arguments}: {result.err}")


@test
def a_lesson_for_each_operation_that_the_trainer_launches():
    wanted = {"embedding", "rmsnorm", "qk_norm_rope", "attention_forward", "attention_backward", "router", "permute", "grouped_matmul", "matmul",
              "swiglu", "combine", "cross_entropy", "grad_norm", "adamw", "nccl_all_reduce"}
    check(wanted <= set(LESSONS), f"missing: {sorted(wanted - set(LESSONS))}")


main()
