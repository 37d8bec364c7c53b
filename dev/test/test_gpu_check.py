"""dev/bench/gpu_check.sh and the Makefile's rules for GPUs, as far as they can be proven without one: the script is
read, not run (it takes minutes), and everything it names has to exist."""

import glob
import re

from emulate import emulated
from harness import *

SCRIPT = os.path.join(ROOT, "dev/bench/gpu_check.sh")


def script():
    return "\n".join(re.sub(r"(^|\s)#.*", "", line) for line in read(SCRIPT).decode().splitlines())


@test
def the_script_parses():
    run(["bash", "-n", SCRIPT])
    run(["sh", "-n", os.path.join(ROOT, "dev/deps.sh")])


STUBS = {  # the programs that the script builds or asks, as far as it looks at what they say
    "bin/make": "echo '✗ MPI: no (one GPU only; make deps installs Open MPI)'",
    "bin/nvcc": "echo 'Cuda compilation tools, release 13.0, V13.0.88'",
    "bin/nvidia-smi": """case "$*" in
        *timestamp*) while :; do echo "now, 1500, 250, 60, 99"; sleep 0.1; done ;;
        *memory.free*) echo 40960 ;;
        *) echo 'Some GPU, 9.0, 40960 MiB, 580.1, 300 W, 1980 MHz' ;;
        esac""",
    "bin/compute-sanitizer": "exit 0",
    "build/make_shard": "exit 0",
    "build/test_moe": "sleep 0.5; echo '12 passed, 0 failed'",
    "build/peaks": "sleep 0.5; echo 'peak copy: 3000 GB/s'; echo 'peak gemm: 500.0 TFLOP/s'; echo 'peak lm_head dW: 400.0 TFLOP/s'",
    "build/dev/rmsnorm": """echo 'bench rmsnorm 4: forward: 0.1000 ms, 2500 GB/s = 83.3 % of copy 3000'
        echo 'bench rmsnorm 4: both: 0.2000 ms, 60 GB/s = 2.0 % of copy 3000, 50.0 TFLOP/s = 10.0 % of GEMM 500'
        echo 'library copy: 0.3000 ms, 9 GB/s on the bus'
        echo '7 passed, 0 failed'""",
    "build/dev/router": "echo 'FAIL router: wrong'; exit 1",
    "train_moe": r"""case "$*" in
        *--dry-run*) echo 'largest batch in 36.0 GiB at T = 4096: --batch-size 19' ;;
        *) while [ "$1" != --metrics ]; do shift; done
           for i in 1 2 3 4; do
               echo '{"step":1,"loss":5.5,"step_ms":800.0,"tokens_per_s":100000.0,"mfu":0.32,"gemm_share":0.4,"phases":{}}'
           done >"$2"
           sleep 0.5
           echo 'profile: mean of 2 steps; the first, 609.6 ms, is left out'
           echo '  phase          ms a step    share         min         max'
           echo '  lm_head          480.000    60.0%     479.000     481.000  ▇▇▇▇▇▇'
           echo '  grad_norm        312.000    39.0%     310.000     314.000  ▇▇▇▇'
           echo '  other              8.000     1.0%       7.000       9.000  '
           echo '  step             800.000   100.0%     799.000     801.000' ;;
        esac""",
}


def stage(without=()):
    """A copy of the script in a folder where all it calls are the programs of its list, and stubs."""
    needs = re.search(r'^needs="(.*)"$', read(SCRIPT).decode(), re.M).group(1).split()
    write(folder("dev/bench/gpu_check.sh"), read(SCRIPT))
    for name in ("rmsnorm", "router", "nccl_all_reduce"):
        write(folder(f"dev/cuda/{name}.cu"), "")
    for name, body in STUBS.items():
        if name not in without:
            os.chmod(write(folder(name), "#!/bin/sh\n" + body + "\n"), 0o755)
    for name in needs + ["bash", "sh", "sleep"]:
        check(shutil.which(name), f"{name}, which the script needs, is not here")
        if not os.path.lexists(folder("bin/" + name)):
            os.symlink(shutil.which(name), folder("bin/" + name))
    return run([folder("bin/bash"), folder("dev/bench/gpu_check.sh")], code=1, env={"PATH": folder("bin"), "OUT": ""}, cwd="/")


@test
def every_program_it_calls_exists():
    result = stage()
    check(result.err == "", f"stderr: {result.err}")
    for wanted in ("✓ build_trainer", "12 passed, 0 failed", "✓ sanitizer_racecheck", "meanwhile 1500 MHz, 250 W",
                   "- nccl_all_reduce: there is no", "✓ rmsnorm", "✗ router: exit code 1", "FAIL router: wrong", "1 failed, 0 left out"):
        check(wanted in result.out, f"'{wanted}' is missing in\n{result.out}")


@test
def it_ends_with_one_table():
    out = stage().out
    table = [line for line in out.splitlines() if line.startswith("|")]
    check("\n".join(table) + "\n" == read(folder("build/gpu_check/table.md")).decode(), "table.md is another table than the printed one")
    check("\n".join(table) in out and max(map(len, table)) <= 100, "the table is in pieces, or wider than 100 columns")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    check(rows[0] == ["what", "ms", "rate", "unit", "% peak", "% step"], f"{rows[0]}")
    found = {row[0]: row[1:] for row in rows[2:]}
    for row in rows[2:]:
        check(len(row) == 6 and all(re.fullmatch(r"-|[0-9]+(\.[0-9]+)?", c) for c in row[1:3] + row[4:]), f"no numbers: {row}")
        check(row[3] in ("-", "GB/s", "TFLOP/s", "tok/s", "%", "hours", "nats"), f"unit: {row}")
    wanted = {"peak: copy": ["-", "3000.0", "GB/s", "100.0", "-"], "peak: gemm": ["-", "500.0", "TFLOP/s", "100.0", "-"],
              "peak: lm_head dW": ["-", "400.0", "TFLOP/s", "80.0", "-"],
              "training: B = 19, 4 microbatches, T = 4096": ["800.0", "100000", "tok/s", "31.6", "100.0"],
              "training: of the nominal peak": ["-", "32.0", "%", "-", "-"], "training: 10B tokens": ["-", "27.8", "hours", "-", "-"],
              "training: loss at the end": ["-", "5.500", "nats", "-", "-"], "phase: grad_norm": ["312.000", "-", "-", "-", "39.0"],
              "rmsnorm 4: forward": ["0.1000", "2500", "GB/s", "83.3", "-"], "rmsnorm 4: both": ["0.2000", "50.0", "TFLOP/s", "10.0", "-"],
              "library copy": ["0.3000", "9", "GB/s", "-", "-"]}
    for name, cells in wanted.items():
        check(found.get(name) == cells, f"{name}: {found.get(name)}, expected {cells}")
    shares = [float(row[5]) for row in rows[2:] if row[0].startswith("phase: ")]
    check(len(shares) == 3 and abs(sum(shares) - 100) <= 1, f"shares of the phases: {shares}")


@test
def peaks_prints_what_the_script_reads():
    out = run([emulated("fast", "dev/bench/peaks.cu"), "0.01"]).out
    for name in ("copy", "gemm", "lm_head", "lm_head dX", "lm_head dW"):
        check(re.search(rf"^peak {name}: [0-9.]+ (GB|TFLOP)/s$", out, re.M), f"{name} is missing in\n{out}")


@test
def where_it_stops_it_says_why():
    check("nvidia-smi finds no GPU" in stage(without=["bin/nvidia-smi"]).out, "no word of the missing GPU")
    os.remove(folder("bin/xargs"))
    os.symlink("/nowhere", folder("bin/xargs"))
    check("this script needs xargs" in stage().out, "no word of the missing xargs")


@test
def make_has_a_rule_for_all_it_builds():
    targets = set(re.findall(r"\bbuild/(?:test_moe|peaks|make_shard)\b", script())) | {"train_moe"}
    check(len(targets) == 4, f"the pattern no longer finds targets: {targets}")
    kernels = [os.path.basename(p)[:-3] for p in glob.glob(os.path.join(ROOT, "dev/cuda/*.cu"))]
    check(kernels, "no kernel files in dev/cuda")
    for target in sorted(targets - {"train_moe", "build/test_moe"}) + ["build/dev/" + k for k in kernels] + \
            ["train_moe_emu", "build/test_moe_emu"]:
        run(["make", "-n", target])
    for target in ("train_moe", "build/test_moe"):  # these need nvcc, cuBLASLt and cJSON, or say which of them is missing
        result = run(["make", "-n", target], code=None)
        check("No rule" not in result.err, result.err)


@test
def every_option_it_gives_is_one():
    calls = re.findall(r"\$trainer ((?:[^\n\\]|\\\n)*)", script())
    check(len(calls) == 4, f"{len(calls)} calls of the trainer are found")
    known = read(os.path.join(ROOT, "llmc/cli.h")).decode()
    for call in calls:
        for option in re.findall(r"\s--([a-z-]+)", " " + call):
            check(f'"{option}"' in known, f"--{option} is no option")
        for letter in re.findall(r"\s-([a-z])\b", " " + call):
            check(f"'{letter}'" in known, f"-{letter} is no option")


@test
def a_made_up_shard_trains():
    shard = folder("made_0.bin")
    run(["make", "-s", "build/make_shard"])
    run(["build/make_shard", shard, "20000", "257", "256"])
    again = folder("again_0.bin")
    run(["build/make_shard", again, "20000", "257", "256"])
    check(read(shard) == read(again), "two runs made different shards")
    result = run(["./train_moe_cpu", "--model", "tiny", "-b", "2", "-t", "64", "-n", "2", "-d", shard, "--doc-mask"])
    check("20000 tokens" in result.out, result.out)
    for arguments in (["x.bin"], ["x.bin", "0", "257", "256"], ["x.bin", "9", "257", "257"], ["/nowhere/x", "9", "257", "1"]):
        check("error: " in run(["build/make_shard"] + arguments, code=1).err, str(arguments))


main()
