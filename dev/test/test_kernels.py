"""Each lesson of dev/cuda, emulated: all of its kernels agree with the CPU trainer's loops, and the checker for races, bounds and
uninitialised memory is silent. (What a lesson checks, over which shapes, stands in its file.) `test_kernels.py NAME` runs those
whose name contains NAME; LONG=1 (make test-long) adds other orders of threads and AddressSanitizer. (The orders of the trainer's
own kernels are compared bit by bit in test_gpu_trainer.py.)"""

import glob

from harness import *
from emulate import at_once, emulated

LESSONS = sorted(os.path.basename(p)[:-3] for p in glob.glob(os.path.join(ROOT, "dev", "cuda", "*.cu")))
QUIET = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "ASAN_OPTIONS": "detect_leaks=0"}


def checks(name, mode="fast", ranks=1, **env):
    """Runs a lesson in one mode and order; returns how many checks it made."""
    command = [emulated(mode, f"dev/cuda/{name}.cu")]
    if ranks > 1:
        command = ["mpirun", *(["--allow-run-as-root"] if os.geteuid() == 0 else []), "--oversubscribe", "--bind-to", "none", "-np", ranks, *command]
    r = run(command, env={**QUIET, "EMU_DEVICES": str(ranks), **env}, code=None)
    what = f"{name} --{mode} {env}"
    check(r.code == 0, f"{what}: exit code {r.code}: {(r.out + r.err)[-800:]}")
    for word in ("emu:", "runtime error", "AddressSanitizer"):
        check(word not in r.err, f"{what}: {r.err[-1500:]}")
    found = [line.split() for line in r.out.splitlines() if line.endswith(" failed") and " passed, " in line]
    check(found and all(int(line[0]) > 0 and line[2] == "0" for line in found), f"{what}: it ends with {r.out[-200:]!r}")
    return int(found[-1][0])


def check_lesson(name):
    ranks = 2 if name == "nccl_all_reduce" else 1
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


@test
def a_lesson_for_each_operation_that_the_trainer_launches():
    wanted = {"embedding", "rmsnorm", "qk_norm_rope", "attention_forward", "attention_backward", "router", "permute", "grouped_matmul", "matmul",
              "swiglu", "combine", "cross_entropy", "grad_norm", "adamw", "nccl_all_reduce"}
    check(wanted <= set(LESSONS), f"missing: {sorted(wanted - set(LESSONS))}")


main()
