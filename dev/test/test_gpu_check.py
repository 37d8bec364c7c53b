"""dev/bench/gpu_check.sh and the Makefile's rules for GPUs, as far as they can be proven without one: the script is
read, not run (it takes minutes), and everything it names has to exist."""

import glob
import re

from harness import *

SCRIPT = os.path.join(ROOT, "dev/bench/gpu_check.sh")


def script():
    return "\n".join(re.sub(r"(^|\s)#.*", "", line) for line in read(SCRIPT).decode().splitlines())


@test
def the_script_parses():
    run(["bash", "-n", SCRIPT])
    run(["sh", "-n", os.path.join(ROOT, "dev/deps.sh")])


STUBS = {  # the programs that the script builds or asks, as far as it looks at what they say
    "bin/make": "exit 0",
    "bin/nvcc": "echo 'Cuda compilation tools, release 13.0, V13.0.88'",
    "bin/nvidia-smi": """case "$*" in
        *timestamp*) while :; do echo "now, 1500, 250, 60, 99"; sleep 0.1; done ;;
        *memory.free*) echo 40960 ;;
        *) echo 'Some GPU, 9.0, 40960 MiB, 580.1, 300 W, 1980 MHz' ;;
        esac""",
    "bin/compute-sanitizer": "exit 0",
    "build/make_shard": "exit 0",
    "build/test_moe": "sleep 0.5; echo '12 passed, 0 failed'",
    "build/peaks": "sleep 0.5; echo 'peak copy: 3000 GB/s'; echo 'peak gemm: 500.0 TFLOP/s'",
    "build/dev/rmsnorm": "echo 'bench rmsnorm: 0.1 ms, 2500 GB/s = 83.3 % of copy 3000'; echo '7 passed, 0 failed'",
    "build/dev/router": "echo 'FAIL router: wrong'; exit 1",
    "train_moe": r"""case "$*" in
        *--dry-run*) echo 'largest batch in 36.0 GiB at T = 4096: --batch-size 19' ;;
        *) while [ "$1" != --metrics ]; do shift; done
           for i in 1 2 3 4; do
               echo '{"step":1,"loss":5.5,"step_ms":800.0,"tokens_per_s":100000.0,"mfu":0.32,"gemm_share":0.4,"phases":{}}'
           done >"$2"
           sleep 0.5
           echo 'profile: mean' ;;
        esac""",
}


def stage(without=()):
    """A copy of the script in a folder where all it calls are the programs of its list, and stubs."""
    needs = re.search(r'^needs="(.*)"$', read(SCRIPT).decode(), re.M).group(1).split()
    write(folder("dev/bench/gpu_check.sh"), read(SCRIPT))
    for name in ("rmsnorm", "router"):
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
    for wanted in ("✓ build_trainer", "12 passed, 0 failed", "✓ sanitizer_racecheck", "copy: 3000 GB/s", "meanwhile 1500 MHz, 250 W",
                   "B = 19, 4 microbatches a step", "100000 tok/s, 800.0 ms a step; 10B tokens take 27.8 h", "32.0 % of the nominal peak",
                   "31.6 % of the sustained GEMM peak", "profile: mean", "✓ rmsnorm", "2500 GB/s = 83.3 %", "✗ router: exit code 1",
                   "FAIL router: wrong", "1 failed, 0 left out"):
        check(wanted in result.out, f"'{wanted}' is missing in\n{result.out}")


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
