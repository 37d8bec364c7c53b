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
    "bin/make": """case "$*" in *USE_CUDNN*) exit 1 ;; esac; echo '✗ MPI: no (one GPU only; make deps installs Open MPI)'""",
    "bin/nvcc": "echo 'Cuda compilation tools, release 13.0, V13.0.88'",
    "bin/nvidia-smi": """case "$*" in
        *timestamp*) while :; do echo "now, 1500, 250, 60, 99"; sleep 0.1; done ;;
        *=memory.total*) echo 40960 ;;
        *) echo 'Some GPU, 9.0, 40960 MiB, 580.1, 300 W, 1980 MHz' ;;
        esac""",
    "bin/compute-sanitizer": """case "$*" in
        --help) echo '  --kernel-name arg   only kernels that match' ;;
        *racecheck*kns=_kernel*train_moe* | *memcheck*) case "$*" in *memcheck*kns=*) exit 1 ;; esac ;;
        *) exit 1 ;;
        esac""",
    "build/make_shard": "exit 0",
    "build/test_moe": "sleep 0.5; echo '12 passed, 0 failed'",
    "build/peaks": "sleep 0.5; echo 'cards: 1, 38.00 GiB free'; echo 'peak copy: 3000 GB/s'; echo 'peak gemm: 500.0 TFLOP/s'; echo 'peak lm_head dW: 400.0 TFLOP/s'",
    "build/dev/rmsnorm": """echo "given $*"; echo 'bench rmsnorm 4: forward: 0.1000 ms, 2500 GB/s = 83.3 % of copy 3000'
        echo 'bench rmsnorm 4: both: 0.2000 ms, 60 GB/s = 2.0 % of copy 3000, 50.0 TFLOP/s = 10.0 % of GEMM 500'
        echo 'library copy: 0.3000 ms, 9 GB/s on the bus'
        echo 'bench embedding_backward kernel 3, N 32768, C 896, all the same token: 0.4000 ms, 100 GB/s = 3.3 % of copy 3000'
        echo 'bench embedding_backward kernel 3, N 32768, C 896, all the same: 0.5000 ms, 90 GB/s = 3.0 % of copy 3000'
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


def stage(without=(), replace={}, edit=lambda text: text):
    """A copy of the script in a folder where all it calls are the programs of its list, and stubs. replace: other stubs than STUBS;
    edit: what is changed in the script."""
    text = read(SCRIPT).decode()
    needs = re.search(r'^needs="(.*)"$', text, re.M).group(1).split()
    shutil.rmtree(folder("bin"), ignore_errors=True)
    write(folder("dev/bench/gpu_check.sh"), edit(text).encode())
    for name in ("rmsnorm", "router", "nccl_all_reduce"):
        write(folder(f"dev/cuda/{name}.cu"), b"// kernel 9: no\n//\n// winner: 3 (forward of 2), 1 (the rest)\n")
    for name, body in {**STUBS, **replace}.items():
        if name not in without:
            os.chmod(write(folder(name), "#!/bin/sh\n" + body + "\n"), 0o755)
    for name in needs + ["bash", "sh", "sleep"]:
        check(shutil.which(name), f"{name}, which the script needs, is not here")
        if "bin/" + name not in without and not os.path.lexists(folder("bin/" + name)):
            os.symlink(shutil.which(name), folder("bin/" + name))
    return run([folder("bin/bash"), folder("dev/bench/gpu_check.sh")], code=1, env={"PATH": folder("bin"), "OUT": ""}, cwd="/")


@test
def every_program_it_calls_exists():
    result = stage()
    check(result.err == "", f"stderr: {result.err}")
    for wanted in ("✓ build_trainer", "12 passed, 0 failed", "✓ sanitizer_memcheck", "✓ sanitizer_racecheck", "meanwhile 1500 MHz, 250 W",
                   "- nccl_all_reduce: there is no", "✓ rmsnorm", "✗ router: exit code 1", "FAIL router: wrong", "1 failed, 0 left out"):
        check(wanted in result.out, f"'{wanted}' is missing in\n{result.out}")


@test
def it_ends_with_one_table():
    out = stage().out
    table = [line for line in out.splitlines() if line.startswith("|")]
    check("\n".join(table) + "\n" == read(folder("build/gpu_check/table.md")).decode(), "table.md is another table than the printed one")
    check("\n".join(table) in out and max(map(len, table)) <= 130, "the table is in pieces, or wider than 130 columns")
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
              "library copy": ["0.3000", "9", "GB/s", "-", "-"],
              "embedding_backward kernel 3, N 32768, C 896, all the same token": ["0.4000", "100", "GB/s", "3.3", "-"],
              "embedding_backward kernel 3, N 32768, C 896, all the same": ["0.5000", "90", "GB/s", "3.0", "-"]}
    for name, cells in wanted.items():
        check(found.get(name) == cells, f"{name}: {found.get(name)}, expected {cells}")
    shares = [float(row[5]) for row in rows[2:] if row[0].startswith("phase: ")]
    check(len(shares) == 3 and abs(sum(shares) - 100) <= 1, f"shares of the phases: {shares}")


@test
def only_the_trainers_kernels_are_checked_at_full_size():
    stage()
    check(b"given --large 3,1\n" in read(folder("build/gpu_check/rmsnorm.log")), "the winners are not handed on")


@test
def what_takes_too_long_is_cut_off_and_its_times_are_in_the_table():
    slow = "echo 'bench router 3: 0.7000 ms, 70 GB/s = 2.3 % of copy 3000'; exec sleep 60"
    out = stage(replace={"build/dev/router": slow}, edit=lambda text: text.replace('step "$k" 60', 'step "$k" 1')).out
    check("✗ router: cut off after 1 s" in out, out)
    row = [line for line in out.splitlines() if line.startswith("| router 3 ")]
    check(row and "0.7000" in row[0] and "2.3" in row[0], f"{row} in\n{out}")


TWO_CARDS = {"build/peaks": STUBS["build/peaks"].replace("cards: 1", "cards: 2"), "bin/make": 'case "$*" in *USE_CUDNN*) exit 1 ;; esac',
             "bin/mpirun": 'shift 2; [ "$1 $2" = "-n 2" ] || exit 1; shift 2; exec "$@"',
             "build/dev/nccl_all_reduce": "echo 'bench all_reduce 2 over 2 GPUs: 0.2000 ms, 300 GB/s = 80.0 % of peer copy 375'"}


@test
def with_two_cards_it_trains_and_averages_on_both():
    out = stage(replace=TWO_CARDS).out
    for wanted in ("✓ train_all_gpus", "✓ nccl_all_reduce", "training on 2 cards: "):
        check(wanted in out, f"'{wanted}' is missing in\n{out}")
    row = [line for line in out.splitlines() if line.startswith("| all_reduce 2 over 2 GPUs ")]
    check(row and "80.0" in row[0], f"{row} in\n{out}")
    out = stage(replace=TWO_CARDS, without=["bin/mpirun"]).out
    check("- 2 GPUs, but no MPI or no NCCL: only one is used" in out and "train_all_gpus" not in out, out)


@test
def memory_that_nobody_knows_is_said():
    no_cards = STUBS["build/peaks"].replace("cards: 1, 38.00 GiB free", "")
    out = stage(replace={"build/peaks": no_cards}).out
    check("nvidia-smi says that the card has 40.00 GiB" in out and "training: B = 19," in out, out)
    smi = STUBS["bin/nvidia-smi"].replace("echo 40960", "echo '[N/A]'")
    out = stage(replace={"build/peaks": no_cards, "bin/nvidia-smi": smi}).out
    check("the card has an unknown number of GiB" in out and "tries 1" in out and "training: B = 1," in out, out)
    small = STUBS["train_moe"].replace("largest batch in 36.0 GiB at T = 4096: --batch-size 19", "not even --batch-size 1 fits into 34.2 GiB")
    check("not one sequence is known to fit into 38.00 GiB; tries 1" in stage(replace={"train_moe": small}).out, "a small card")


@test
def cudnn_is_timed_where_it_is():
    library = "[ \"$*\" = '--large 0' ] && echo 'library attention_forward cuDNN: 0.9000 ms, 400.0 TFLOP/s = 80.0 % of GEMM 500'"
    alone = "echo '✗ MPI: no'"
    here = {"bin/make": alone, "build/cudnn/dev/attention_forward": library, "build/cudnn/dev/attention_backward": "exit 3"}
    out = stage(replace=here).out
    check("✓ attention_forward_cudnn" in out and "✗ attention_backward_cudnn: exit code 3" in out, out)
    check(any("cuDNN" in line and "0.9000" in line for line in out.splitlines() if line.startswith("|")), f"no row of cuDNN in\n{out}")
    out = stage(replace={"bin/make": f'case "$*" in *USE_CUDNN*attention*) exit 2 ;; esac; {alone}'}).out
    check("- cuDNN: it is here, but attention does not build with it" in out and "1 failed" in out, out)
    check("- cuDNN: not here" in stage().out, "no word of the missing cuDNN")


@test
def peaks_prints_what_the_script_reads():
    out = run([emulated("fast", "dev/bench/peaks.cu"), "0.01"]).out
    for name in ("copy", "gemm", "lm_head", "lm_head dX", "lm_head dW"):
        check(re.search(rf"^peak {name}: [0-9.]+ (GB|TFLOP)/s$", out, re.M), f"{name} is missing in\n{out}")
    check(re.search(r"^cards: 1, [0-9.]+ GiB free$", out, re.M), f"cards and memory are missing in\n{out}")


@test
def where_it_stops_it_says_why():
    check("nvidia-smi finds no GPU" in stage(without=["bin/nvidia-smi"]).out, "no word of the missing GPU")
    check("this script needs xargs" in stage(without=["bin/xargs"]).out, "no word of the missing xargs")


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
