"""dev/bench/gpu_check.sh and the Makefile's rules for GPUs, as far as they can be proven without one: the script is
read, not run (it takes minutes), and everything it names has to exist."""

import glob
import re

from harness import *

SCRIPT = os.path.join(ROOT, "dev/bench/gpu_check.sh")
# what it looks for itself before it uses it
OPTIONAL = {"nvcc", "nvidia-smi", "compute-sanitizer", "mpirun", "git"}


def script():
    return "\n".join(re.sub(r"(^|\s)#.*", "", line) for line in read(SCRIPT).decode().splitlines())


@test
def the_script_parses():
    run(["bash", "-n", SCRIPT])
    run(["sh", "-n", os.path.join(ROOT, "dev/deps.sh")])


@test
def every_program_it_calls_exists():
    text = re.sub(r"'[^']*'", "''", script())  # programs of awk and sed
    text = re.sub(r"\$\(\(.*?\)\)", "0", text)  # arithmetic
    text = re.sub(r'"[^"$]*"', '""', text)
    text = re.sub(r'\bsay "[^"]*"', "say", text)
    words = set(re.findall(r"(?:^|[|;&(]|\$\(|\bif|\bthen|\bdo|!)[ \t]*([a-z][a-z_-]*)(?=[ \t\n;)]|$)", text, re.M))
    known = set(run(["bash", "-c", "compgen -k; compgen -b"]).out.split())
    own = set(re.findall(r"^(\w+)\(\)", script(), re.M))
    programs = words - known - own - OPTIONAL
    check({"make", "awk", "timeout", "sed", "grep", "tee"} <= programs, f"the pattern no longer finds programs: {programs}")
    missing = [p for p in sorted(programs) if not shutil.which(p)]
    check(not missing, f"not programs, or not here: {missing}")


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
