"""Files from strangers: libFuzzer changes small right files (fuzz/corpus) in every way it can think of and gives them to
the readers of llmc/, under ASan and UBSan, 10 s each (--long: a minute, and what was found to reach new code is kept in
build/fuzz for the next time). A reader may refuse a file, by its one line, or take it; it may not crash, read beyond the
file, leak, give wrong values, take 30 s (one or two, on a quiet machine), or ask for 512 MB of memory.

What is found: put the file into fuzz/corpus, mend the reader, and state in test_hostile_files.c what is right."""

import concurrent.futures
import glob
import random
import re
import shutil

from harness import *

BUILD = os.path.join(ROOT, "build", "fuzz")
PROGRAM = os.path.join(ROOT, "build", "test", "fuzz")
HERE = os.path.join(ROOT, "dev", "test", "fuzz")
TARGETS = re.findall(r'^    \{"(\w+)", read_', read(os.path.join(HERE, "fuzz.c")).decode(), re.M)
TEXT_FLAGS = os.environ.get("TEXT_FLAGS", "-DUSE_PCRE2 -DUSE_UTF8PROC").split()
TEXT_LIBS = os.environ.get("TEXT_LIBS", "-lpcre2-8 -lutf8proc").split()
LONG = bool(os.environ.get("LONG"))
MEMORY = tempfile.mkdtemp(prefix="moe-fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


def build():
    """Why there is no fuzzer here, or None."""
    command = ["clang", "-std=gnu11", "-O1", "-g", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=undefined", "-Wall",
               "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-I.", *TEXT_FLAGS, "dev/test/fuzz/fuzz.c", "-o", PROGRAM, "-lcjson",
               *TEXT_LIBS, "-lm", "-lpthread"]  # fmt: skip
    os.makedirs(os.path.dirname(PROGRAM), exist_ok=True)
    if shutil.which("clang") is None:
        return "clang is missing"
    r = run(command, code=None)
    return None if r.code == 0 else f"clang: {r.err.strip()[-600:]}"


def corpus(target):
    return os.path.join(HERE, "corpus", target)


def fuzz(target):
    seconds = 60 if LONG else 3 if target == "text" else 10  # that target is small
    grown = os.path.join(BUILD if LONG else MEMORY, target)
    os.makedirs(grown, exist_ok=True)
    os.makedirs(BUILD, exist_ok=True)
    seed = random.randrange(1, 1 << 31) if LONG else 1
    command = [PROGRAM, f"-max_total_time={seconds}", f"-seed={seed}", "-timeout=30", "-rss_limit_mb=1024", "-malloc_limit_mb=512",
               "-max_len=40000", "-mutate_depth=2", "-close_fd_mask=3", f"-dict={HERE}/words.dict", f"-artifact_prefix={BUILD}/{target}-",
               "-print_final_stats=1", grown, corpus(target)]  # fmt: skip
    r = run(command, code=None, env={"FUZZ": target, "TMPDIR": MEMORY}, timeout=1200)
    write(f"{BUILD}/{target}.log", r.err)
    return r


problem = build()
can_be_had = shutil.which("apt-get") is not None  # dev/deps.sh test brings clang and its runtime
if problem is None:
    two = concurrent.futures.ThreadPoolExecutor(2)
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    runs = {t: two.submit(fuzz, t) for t in TARGETS if part in f"the_{t}_reader_survives_any_file"}


def survives(target):
    def claim():
        r = runs[target].result()
        what = re.search(r"(.* does not hold|cannot write .*|SUMMARY: .*|ERROR: libFuzzer.*|libFuzzer: run interrupted.*)", r.err)
        file = re.search(r"Test unit written to (\S+)", r.err)
        again = f"; again with FUZZ={target} build/test/fuzz {file.group(1)}; log: {BUILD}/{target}.log" if file else ": " + r.err.strip()[-400:]
        check(r.code == 0, f"{what.group(1) if what else f'exit code {r.code}'}{again}")
        count = re.search(r"number_of_executed_units: (\d+)", r.err)
        check(count and int(count.group(1)) > 50, f"only {count and count.group(1)} files were tried")

    claim.__name__ = f"the_{target}_reader_survives_any_file"
    return claim


def seeds_are_files_that_the_readers_take():
    for target in TARGETS:
        seeds = glob.glob(corpus(target) + "/seed_*")
        check(len(seeds) > 0, f"there is none for {target}")
        if target == "tokenizer" and len(TEXT_FLAGS) < 2:
            continue  # this machine's program cannot encode
        for seed in seeds:
            r = run([PROGRAM, seed], env={"FUZZ": target, "TMPDIR": MEMORY})
            check("error:" not in r.err, f"{seed}: {r.err.strip()[-300:]}")


if problem is None:
    for name in TARGETS:
        test(survives(name))
    test(seeds_are_files_that_the_readers_take)
elif can_be_had:

    @test
    def the_fuzzer_can_be_built():
        check(False, problem + "; make test-deps installs what it needs")

else:
    print(f"not run: no fuzzer on this machine: {problem}")

try:
    main()
finally:
    shutil.rmtree(MEMORY, ignore_errors=True)
