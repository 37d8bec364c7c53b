"""Stopping and going on, with the whole trainer: a resumed run is the unbroken one bit for bit, and no kill, full disk, damaged
file or second process costs more than the steps since the last checkpoint. (The same of the saving functions alone, at more
moments: test_checkpoint.c.) run.sh runs this again with the sanitized build, and what is marked @test with the GPU trainer."""

import os
import shutil
import signal
import subprocess
import time

from program import *

TINY = [PROGRAM, "--model", "tiny", "--batch-size", 2, "--seq-len", 16, "--lr", "1e-2"]
LONG = ["--steps", 100000, "--schedule", "constant", "--warmup-steps", 0]
PAUSE = 1 if GPU else 0.04  # seconds in which a step and its save fit


def stories():
    return shard(folder("data/train.bin"), tokens_of(text_of(60)))


def cut_back(source, target, steps):
    """What a run that was killed after `steps` steps has left, as a copy."""
    shutil.copytree(source, target)
    for step in steps_in(target):
        if step > steps:
            shutil.rmtree(step_folder(target, step))
    return target


def check_resumed_equals_unbroken(data, *options, resume_from_folder=False):
    """5 steps = 2 + resume + 3: weights, moments, place in the data, and what metrics.jsonl says."""
    whole, part = folder("whole"), folder("part")
    run([*TINY, *data, *options, "--steps", 5, "--save-every", 1, "--out", whole, "--metrics", folder("whole.jsonl")])
    cut_back(whole, part, 2)
    shutil.copy(folder("whole.jsonl"), folder("part.jsonl"))  # lines 3 to 5 are of steps that will be run again
    where = [step_folder(part, 2)] if resume_from_folder else []
    run([PROGRAM, "--resume", *where, "--out", part, "--metrics", folder("part.jsonl")])
    check(steps_in(part) == [1, 2, 3, 4, 5], f"saved steps {steps_in(part)}")
    check_same_metrics(metrics(folder("whole.jsonl")), metrics(folder("part.jsonl")))
    for step in (3, 4, 5):
        check_same_checkpoint(step_folder(whole, step), step_folder(part, step))


@test
def five_steps_are_two_and_resume_and_three():
    check_resumed_equals_unbroken(["--train-data", stories()])


@cpu_test
def a_checkpoint_may_be_named():
    check_resumed_equals_unbroken(["--train-data", stories()], resume_from_folder=True)


@test
def a_resumed_run_keeps_its_switches():  # which round at other places
    check_resumed_equals_unbroken(["--train-data", stories()], "--attention", "naive", "--experts", "loop", "--optimizer", "simple", "--loader", "inline")
    both = [json.loads(read(step_folder(folder(name), 5) + "/trainer_state.json"))["options"] for name in ("whole", "part")]
    check(both[0]["experts"] == both[1]["experts"] == "loop", f"{both[1]}")


@cpu_test
def resume_crosses_an_epochs_end():  # 7 sequences: an epoch has 3 batches of 2, and the seventh is dropped
    data = shard(folder("data/train.bin"), tokens_of(text_of(60))[:7 * 16 + 1])
    check_resumed_equals_unbroken(["--train-data", data])
    check(state_of(step_folder(folder("whole"), 5))["data_position"] == "11", "the position is not that of the second epoch")


@test
def resume_holds_with_everything_switched_on():
    data = ["--train-data", stories(), "--val-data", shard(folder("data/val.bin"), tokens_of(text_of(9, seed=2)))]
    check_resumed_equals_unbroken(data, "--doc-mask", "--grad-accum", 2, "--z-loss-coef", "1e-3", "--val-every", 2,
                                  "--sample-every", 2, "--schedule", "wsd", "--warmup-steps", 2)


@cpu_test
def resume_holds_in_bf16():  # which the checkpoint says, not the command line; the weights of a checkpoint are fp32
    if not bf16_here():
        return
    check_resumed_equals_unbroken(["--train-data", stories(), "--precision", "bf16"], "--grad-accum", 2, "--sample-every", 2)
    weights = load_file(os.path.join(step_folder(folder("whole"), 5), "model.safetensors"))["lm_head.weight"]
    check(np.mean(weights != round_bf16(weights)) > 0.9, "the weights were rounded")


@cpu_test
def resume_holds_with_the_loader_inline():
    check_resumed_equals_unbroken(["--train-data", stories()], "--loader", "inline")


@cpu_test
def text_tokenized_inline_or_ahead_gives_equal_bits_also_resumed():
    text = write(folder("text/a.txt"), text_of(60))
    run(["python3", "prepro/text.py", "--out", folder("data"), "--val-fraction", 0, text])
    check_resumed_equals_unbroken(["--tokenize", "inline", "--train-data", text], "--doc-mask")
    data = folder("data") + "/*.bin"
    run([*TINY, "--train-data", data, "--doc-mask", "--steps", 5, "--out", folder("ahead"), "--metrics", folder("ahead.jsonl")])
    check_same_metrics(metrics(folder("ahead.jsonl")), metrics(folder("part.jsonl")))
    check_same_checkpoint(step_folder(folder("ahead"), 5), step_folder(folder("part"), 5))


@cpu_test
def both_loaders_give_equal_bits():
    for loader in ("inline", "prefetch"):
        run([*TINY, "--train-data", stories(), "--loader", loader, "--steps", 9, "--out", folder(loader)])
    check_same_checkpoint(step_folder(folder("inline"), 9), step_folder(folder("prefetch"), 9))


@test
def a_run_that_was_prolonged_is_the_longer_run():
    data = ["--train-data", stories(), "--schedule", "constant", "--warmup-steps", 0]
    run([*TINY, *data, "--steps", 5, "--out", folder("whole")])
    run([*TINY, *data, "--steps", 2, "--out", folder("part")])
    run([PROGRAM, "--resume", "--out", folder("part"), "--steps", 5])
    check_same_checkpoint(step_folder(folder("whole"), 5), step_folder(folder("part"), 5))
    expect_error([PROGRAM, "--resume", "--out", folder("part")], "step_00000005 has done 5 steps (160 tokens) already", "--steps is 5")


@test
def another_batch_size_makes_the_same_steps():  # D13: as many tokens a step, as many in all
    data = ["--train-data", stories(), "--schedule", "cosine", "--tokens", 320, "--aux-loss-coef", 0]
    run([*TINY[:3], "--batch-size", 4, *TINY[5:], *data, "--save-every", 2, "--out", folder("whole"), "--metrics", folder("whole.jsonl")])
    cut_back(folder("whole"), folder("part"), 2)
    r = run([PROGRAM, "--resume", "--out", folder("part"), "--batch-size", 1, "--metrics", folder("part.jsonl")])
    check("grad-accum 4" in r.out and "from now on" not in r.out, r.out)
    a, b = metrics(folder("whole.jsonl"))[2:], metrics(folder("part.jsonl"))
    check([(m["step"], m["tokens"], m["lr"]) for m in a] == [(m["step"], m["tokens"], m["lr"]) for m in b], f"{b}")
    for x, y in zip(a, b):
        check_near(x["loss"], y["loss"], 2e-3 if GPU else 1e-5, f"loss of step {x['step']}")
    shutil.rmtree(folder("part"))
    cut_back(folder("whole"), folder("part"), 2)
    r = run([PROGRAM, "--resume", "--out", folder("part"), "--grad-accum", 2])  # asked for: said, and the tokens end where they should
    check("a step is 128 tokens from now on, it was 64 until now" in r.out, r.out)
    check(state_of(step_folder(folder("part"), 4))["tokens"] == str(2 * 64 + 2 * 128), f"{steps_in(folder('part'))}")
    expect_error([PROGRAM, "--resume", "--out", folder("part"), "--batch-size", 3, "--tokens", 1000], "as before --resume", "3 x 16 x 1")


@cpu_test
def steps_of_another_size_go_on_along_the_same_schedule():
    data = ["--train-data", stories(), "--schedule", "cosine", "--tokens", 3000, "--aux-loss-coef", 0]
    run([*TINY, *data, "--save-every", 20, "--out", folder("whole"), "--metrics", folder("whole.jsonl")])
    cut_back(folder("whole"), folder("part"), 40)
    run([PROGRAM, "--resume", "--out", folder("part"), "--grad-accum", 4, "--metrics", folder("part.jsonl")])
    rate = {m["tokens"]: m["lr"] for m in metrics(folder("whole.jsonl"))}
    for m in metrics(folder("part.jsonl"))[:-2]:
        check_near(m["lr"], rate[m["tokens"] - 96], 0.03 * 1e-2, f"rate of the step that ends at {m['tokens']} tokens")
    check([m["tokens"] for m in metrics(folder("part.jsonl"))][-1] == 3072, "3000 tokens are not the end")


@test
def what_a_resumed_run_cannot_change_is_refused():
    out = folder("out")
    run([*TINY, "--train-data", stories(), "--steps", 2, "--out", out, "--metrics", folder("m.jsonl")])
    again = [PROGRAM, "--resume", "--out", out, "--steps", 3]
    expect_error([*again, "--seq-len", 32, "--batch-size", 1], "sequences of 16 tokens", "--seq-len is 32")
    expect_error([*again, "--seed", 7], "--seed 42", "7")
    expect_error([*again, "--model", "demo"], "--model demo", "leave that out")
    expect_error([*again, "--config", out], "--config", "leave that out")
    expect_error([PROGRAM, "--resume", "--out", out, "--tokens", 50], "2 steps (64 tokens)", "--tokens is 50")
    r = run(again)
    check("--metrics " + folder("m.jsonl") in r.out, r.out)
    run([*again[:-1], 4, "--model", "tiny"])  # the same command with --resume


@test
def a_checkpoint_of_a_batch_file_can_be_looked_at_without_it():
    batch_file(folder("batch"), 3, 20)
    val = shard(folder("data/val.bin"), tokens_of(text_of(20, seed=2)))
    run([*TINY[:3], "--batch", folder("batch"), "--steps", 1, "--out", folder("out")])
    os.remove(folder("batch"))
    checkpoint = step_folder(folder("out"), 1)
    check("sequences of 20" in run([PROGRAM, "--resume", checkpoint, "--eval", "--val-data", val]).out, "not the file's length")
    run([PROGRAM, "--resume", checkpoint, "--generate", 2])
    shards = ["--train-data", stories(), "--batch-size", 4, "--seq-len", 16]
    run([PROGRAM, "--resume", checkpoint, *shards, "--steps", 2, "--out", folder("a")])
    batch_file(folder("batch"), 4, 16)  # and on a batch in between: the place in the shards is kept
    run([PROGRAM, "--resume", "--batch", folder("batch"), "--steps", 3, "--out", folder("a")])
    run([PROGRAM, "--resume", *shards, "--steps", 4, "--out", folder("a")])
    places = [state_of(step_folder(folder("a"), step))["data_position"] for step in (2, 3, 4)]
    check(places == ["4", "4", "8"], f"{places}")


@test
def a_checkpoint_can_be_looked_at_without_out():
    val = shard(folder("data/val.bin"), tokens_of(text_of(20, seed=2)))
    run([*TINY, "--train-data", stories(), "--val-data", val, "--steps", 2, "--save-every", 1, "--keep", 2, "--out", folder("out")])
    before, checkpoint = files_in(folder("out")), step_folder(folder("out"), 1)
    check("validation loss" in run([PROGRAM, "--resume", checkpoint, "--eval"]).out, "no loss")
    check("step 2/2" in run([PROGRAM, "--resume", checkpoint, "--steps", 2]).out.replace("  ", " "), "no step")
    run([PROGRAM, "--resume", checkpoint, "--dump", folder("dump")])
    run([PROGRAM, "--resume", checkpoint, "--generate", 3])
    check(files_in(folder("out")) == before, "the checkpoints have changed")


# ----------------------------------------------------------------------------
# kills, signals, full disks


def start_and_wait(command, lines=1, env=None):
    """Starts the trainer and returns once it has printed that many step lines."""
    process = start(command, env=env)
    seen = 0
    while seen < lines:
        line = process.stdout.readline()
        if not line:
            raise Failure(f"it ended early: {process.stderr.read()[-600:]}")
        seen += line.startswith("step ")
    return process


def end(process, number=signal.SIGKILL):
    process.send_signal(number)
    try:
        out, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise Failure("it did not end within a minute")
    return process.returncode, out, err


@test
def a_kill_at_any_moment_costs_no_more_than_the_step_under_way():
    rng, out, torn = random.Random(1), folder("out"), 0
    data = ["--train-data", stories()]
    command = [*TINY, *data, *LONG, "--save-every", 1, "--keep", 2, "--out", out]
    kills = 6 if GPU else 24
    for kill in range(kills):
        before = steps_in(out)[-1] if kill > 0 else 0
        process = start_and_wait(command, rng.randint(1, 3))
        if kill % 2 == 0 or GPU:
            time.sleep(rng.uniform(0, PAUSE))  # a step takes 2 ms, saving it 10 to 100
        else:
            while process.poll() is None and not any(n.startswith(".saving") for n in os.listdir(out)):
                pass  # in the midst of a save
        end(process)
        saved, names = steps_in(out), os.listdir(out)
        torn += any(n.startswith(".saving") or n.startswith(".removing") for n in names)
        check(saved and saved[-1] > before, f"kill {kill}: after step {before} came {saved}")
        check(1 <= len(saved) <= 3, f"kill {kill}: {sorted(names)}")
        command = [PROGRAM, "--resume", "--out", out]
    check(torn >= 3 or GPU, f"only {torn} of {kills} kills met a save: the test proves too little")
    last = steps_in(out)[-1] + 2
    r = run([PROGRAM, "--resume", "--out", out, "--steps", last])
    check(f"resumed    {step_folder(out, last - 2)}: step {last - 2}," in r.out, r.out)
    check(sorted(os.listdir(out)) == [".lock", f"step_{last - 1:08d}", f"step_{last:08d}"], f"left: {sorted(os.listdir(out))}")
    run([*TINY, *data, *LONG[2:], "--steps", last, "--out", folder("unbroken")])
    check_same_checkpoint(step_folder(folder("unbroken"), last), step_folder(out, last))


@test
def ctrl_c_finishes_the_step_saves_and_exits_130():
    data, out = ["--train-data", stories()], folder("out")
    process = start_and_wait([*TINY, *data, *LONG, "--out", out, "--metrics", folder("m.jsonl")], 3)
    code, printed, _ = end(process, signal.SIGINT)
    check(code == 130, f"exit code {code}")
    step = steps_in(out)[-1]
    check(f"interrupted after step {step}, saved in {out}" in printed, printed[-300:])
    check(steps_in(out) == [step] and metrics(folder("m.jsonl"))[-1]["step"] == step, "metrics and checkpoint disagree")
    run([PROGRAM, "--resume", "--out", out, "--steps", step + 3])
    run([*TINY, *data, *LONG[2:], "--steps", step + 3, "--out", folder("unbroken")])
    check_same_checkpoint(step_folder(folder("unbroken"), step + 3), step_folder(out, step + 3))


@cpu_test
def what_a_signal_says_is_saved_is_saved():  # also when it comes in the midst of validating, sampling or saving
    rng = random.Random(2)
    val = shard(folder("data/val.bin"), tokens_of(text_of(20, seed=2)))
    for i in range(8):
        out = folder(f"out{i}")
        process = start_and_wait([*TINY, "--train-data", stories(), *LONG, "--val-data", val, "--val-every", 1, "--sample-every", 1,
                                  "--save-every", 10, "--out", out, "--metrics", folder("m.jsonl")], rng.randint(1, 4))
        time.sleep(rng.uniform(0, 0.03))
        code, printed, err = end(process, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)[i % 3])
        check(code == 130, f"exit code {code}: {err}")
        said = int(printed.rsplit("interrupted after step ", 1)[1].split(",")[0])
        check(steps_in(out) and steps_in(out)[-1] == said, f"it says step {said}, saved are {steps_in(out)}")
        check(metrics(folder("m.jsonl"))[-1]["step"] == said, "the metrics end elsewhere")


@cpu_test
def a_signal_within_a_matrix_product_harms_nothing():  # oneDNN's code has its stack in the heap: a handler's frame there would overwrite it
    rng, out = random.Random(3), folder("out")
    for i in range(6):
        process = start_and_wait([PROGRAM, "--model", "demo", "--batch-size", 8, "--seq-len", 256, "--train-data", os.path.join(ROOT, "README.md"),
                                  "--tokenize", "inline", "--steps", 1000, "--out", f"{out}{i}"], 2)
        time.sleep(rng.uniform(0, 0.5))
        code, printed, err = end(process, signal.SIGINT)
        check(code == 130 and steps_in(f"{out}{i}"), f"run {i}: exit code {code}: {err[-200:]} {printed[-200:]}")


BEFORE_MAIN = """#include <pthread.h>
#include <unistd.h>
static void* idle(void* unused) { for (;;) { pause(); } return unused; }
__attribute__((constructor)) static void begin(void) { pthread_t thread; pthread_create(&thread, NULL, idle, NULL); }
"""


@cpu_test
def a_thread_that_a_library_began_before_main_is_no_way_round():  # OpenBLAS with its own threads
    write(folder("before.c"), BEFORE_MAIN)
    run(["cc", "-shared", "-fPIC", "-pthread", folder("before.c"), "-o", folder("before.so")])
    env = {"LD_PRELOAD": folder("before.so"), "ASAN_OPTIONS": "verify_asan_link_order=0:detect_leaks=0"}
    for i, number in enumerate((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1) * 2):
        process = start_and_wait([*TINY, "--train-data", stories(), *LONG, "--out", folder(f"out{i}")], 2, env=env)
        code, printed, err = end(process, number)
        check(code == 130 and steps_in(folder(f"out{i}")), f"{number}: exit code {code}: {err[-200:]} {printed[-200:]}")


@cpu_test
def who_reads_no_more_ends_the_run_and_it_is_saved():  # Ctrl-C ends `| tee`, too; `| head`
    val = shard(folder("data/val.bin"), tokens_of(text_of(20, seed=2)))
    process = start_and_wait([*TINY, "--train-data", stories(), *LONG, "--val-data", val, "--val-every", 1, "--out", folder("out")], 2)
    process.stdout.close()
    try:
        code = process.wait(timeout=60)
    finally:
        process.kill()
    check(code == 130 and steps_in(folder("out")), f"exit code {code}: {process.stderr.read()[-300:]}, saved {steps_in(folder('out'))}")


@test
def closed_streams_leave_the_files_alone():  # a daemon's
    command = [*TINY, "--train-data", stories(), *LONG[2:], "--steps", 3, "--out", folder("out"), "--metrics", folder("m.jsonl")]
    run(["bash", "-c", 'exec "$@" >&- 2>&- <&-', "-", *command])
    check(len(metrics(folder("m.jsonl"))) == 3 and steps_in(folder("out")) == [3], "metrics or checkpoints are wrong")
    check(len(read(folder("out/.lock"))) < 20, f"the lock has {read(folder('out/.lock'))[:200]}")


@cpu_test
def results_that_cannot_be_printed_are_an_error():
    run([*TINY, "--train-data", stories(), *LONG[2:], "--steps", 1, "--out", folder("out")])
    for options in (["--generate", 3], ["--eval", "--val-data", stories()], ["--dry-run"]):
        r = run(["bash", "-c", 'exec "$@" >/dev/full', "-", PROGRAM, "--init", step_folder(folder("out"), 1), *options], code=1)
        check("cannot write to stdout" in r.err, r.err)


@cpu_test
def a_second_ctrl_c_ends_at_once():
    command = [PROGRAM, "--model", "demo", "--batch-size", 32, "--seq-len", 512, "--train-data", os.path.join(ROOT, "README.md"),
               "--tokenize", "inline", "--steps", 1000]  # steps that take a second
    for attempt in range(5):
        out = folder(f"out{attempt}")
        process = start_and_wait([*command, "--out", out], 1)
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        code, printed, _ = end(process, signal.SIGINT)
        if "interrupted" not in printed:
            check(code == -signal.SIGINT, f"exit code {code}: {printed[-300:]}")
            check(steps_in(out) == [], f"saved: {steps_in(out)}")
            return
    raise Failure("five times a step ended between two signals 0.1 s apart")


@cpu_test
def without_out_ctrl_c_claims_nothing():
    process = start_and_wait([*TINY, "--train-data", stories(), *LONG], 2)
    code, printed, _ = end(process, signal.SIGINT)
    check(code == 130 and "interrupted after step" in printed and "saved" not in printed, printed[-300:])


def mounted(size):
    """A small file system of its own, or None where that is not allowed."""
    os.makedirs(folder("disk"), exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder("disk")], capture_output=True)
    return folder("disk") if done.returncode == 0 else None


@test
def a_full_disk_ends_the_run_and_leaves_the_last_checkpoint():  # a checkpoint takes 1.4 MB, a GPU's 1.6; then a limit on the size of files
    data = ["--train-data", stories(), *LONG[2:], "--steps", 5, "--save-every", 1]
    disk = mounted("4778k" if GPU else "4m")  # room for three
    if disk is not None:
        try:
            out = os.path.join(disk, "out")
            expect_error([*TINY, *data, "--out", out], "step_00000004", "No space left on device")
            check(sorted(os.listdir(out)) == [".lock", "step_00000001", "step_00000002", "step_00000003"], f"left: {os.listdir(out)}")
            expect_error([PROGRAM, "--resume", "--out", out], "GB free", "a checkpoint takes")  # told before the first step
            shutil.rmtree(step_folder(out, 1))  # someone makes room
            shutil.rmtree(step_folder(out, 2))
            run([PROGRAM, "--resume", "--out", out, "--steps", 4])
            check(steps_in(out) == [3, 4], f"saved: {steps_in(out)}")
        finally:
            subprocess.run(["umount", disk], check=True)
    out = folder("out")
    run([*TINY, *LONG[2:], "--train-data", stories(), "--steps", 2, "--out", out])
    before = files_in(step_folder(out, 2))
    line = expect_error(["bash", "-c", 'ulimit -f 600; exec "$@"', "bash", PROGRAM, "--resume", "--out", out, "--steps", 5])
    check("step_00000005" in line and "File too large" in line, line)
    check(sorted(os.listdir(out)) == [".lock", "step_00000002"] and files_in(step_folder(out, 2)) == before, f"left: {os.listdir(out)}")
    run([PROGRAM, "--resume", "--out", out, "--steps", 5])


# ----------------------------------------------------------------------------
# what is in --out


@test
def keep_leaves_exactly_these_files():
    out = folder("out")
    files = {"checksums.json", "config.json", "generation_config.json", "model.safetensors", "trainer_state.json", "trainer_state.safetensors"}
    run([*TINY, "--train-data", stories(), *LONG[2:], "--steps", 10, "--save-every", 3, "--keep", 2, "--out", out])
    check(sorted(os.listdir(out)) == [".lock", "step_00000009", "step_00000010"], f"{sorted(os.listdir(out))}")
    check(set(os.listdir(step_folder(out, 10))) == files, f"{sorted(os.listdir(step_folder(out, 10)))}")
    run([PROGRAM, "--resume", "--out", out, "--steps", 16])
    check(sorted(os.listdir(out)) == [".lock", "step_00000015", "step_00000016"], f"{sorted(os.listdir(out))}")
    run([PROGRAM, "--resume", "--out", out, "--steps", 18, "--keep", 1])
    check(sorted(os.listdir(out)) == [".lock", "step_00000018"], f"{sorted(os.listdir(out))}")


@cpu_test
def the_tokenizer_goes_along_also_when_its_folder_is_pruned():
    out, text = folder("out"), write(folder("a.txt"), text_of(60))
    run([*TINY, "--tokenize", "inline", "--train-data", text, *LONG[2:], "--steps", 2, "--out", out])
    files = {name: read(step_folder(out, 2) + "/" + name) for name in ("tokenizer.json", "tokenizer_config.json")}
    run([PROGRAM, "--resume", "--out", out, "--steps", 6, "--save-every", 1, "--keep", 1])
    check(steps_in(out) == [6], f"{steps_in(out)}")
    check(all(read(step_folder(out, 6) + "/" + name) == content for name, content in files.items()), "they have changed")


@test
def two_processes_cannot_share_out():
    out = folder("out")
    command = [*TINY, "--train-data", stories(), *LONG, "--out", out]
    process = start_and_wait(command)
    expect_error(command, "another process", str(process.pid), out)
    code, _, _ = end(process, signal.SIGINT)
    check(code == 130 and len(steps_in(out)) == 1, "the first process was disturbed")


@cpu_test
def later_checkpoints_are_not_overwritten():
    out, data = folder("out"), ["--train-data", stories(), "--steps", 4, "--save-every", 2]
    run([*TINY, *data, "--out", out])
    before = files_in(out)
    expect_error([*TINY, *data, "--out", out], out, "step 4", "--resume")
    expect_error([PROGRAM, "--resume", step_folder(out, 2), "--out", out], out, "step 4")
    after = files_in(out)
    check({n: b for n, b in after.items() if n != ".lock"} == {n: b for n, b in before.items() if n != ".lock"}, "files were changed")
    run([PROGRAM, "--resume", step_folder(out, 2), "--out", folder("branch")])
    check_same_checkpoint(step_folder(out, 4), step_folder(folder("branch"), 4))


@cpu_test
def other_data_is_refused():  # C16: its place in other data means nothing
    out, tokens = folder("out"), tokens_of(text_of(60))
    run([*TINY, "--train-data", stories(), "--steps", 2, "--out", out])
    fewer = shard(folder("data/fewer.bin"), tokens[:-20])
    expect_error([PROGRAM, "--resume", "--out", out, "--steps", 4, "--train-data", fewer], "other data", "--init")
    other = shard(folder("data/other.bin"), tokens_of(text_of(90, seed=5))[:len(tokens)])  # as long, as shards of one size are
    expect_error([PROGRAM, "--resume", "--out", out, "--steps", 4, "--train-data", other], "other data", "--init")
    moved = shutil.copy(folder("data/train.bin"), folder("moved.bin"))
    run([PROGRAM, "--resume", "--out", out, "--steps", 4, "--train-data", moved])


def damage(path, rng, size):
    """Cuts, lengthens or changes one byte of the first `size` of a file; what a bad disk or a full one might leave."""
    content = bytearray(read(path))
    kind, at = rng.choice(("cut", "longer", "flip", "flip", "flip")), rng.randrange(min(size, len(content)))
    if kind == "cut":
        content = content[:at]
    elif kind == "longer":
        content += b"\0" * rng.randint(1, 9)
    else:
        content[at] ^= 1 << rng.randrange(8)
    write(path, bytes(content))
    return f"{kind} at byte {at} of {os.path.basename(path)}"


@test
def a_damaged_checkpoint_is_named_and_the_older_one_is_taken():
    whole, rng = folder("whole"), random.Random(3)
    run([*TINY, "--train-data", stories(), "--steps", 3, "--save-every", 1, "--out", whole])
    names = ("config.json", "model.safetensors", "trainer_state.json", "trainer_state.safetensors")
    for i in range(8 if GPU else 60):
        out = cut_back(whole, folder("out"), 2)
        path = os.path.join(step_folder(out, 2), names[i % 4])
        what = damage(path, rng, os.path.getsize(path) if i < (4 if GPU else 30) else 2000)  # the second half: in headers and JSON
        r = run([PROGRAM, "--resume", "--out", out, "--steps", 3, "--save-every", 0], code=None)
        check(r.code == 0, f"{what}: exit code {r.code}: {r.err}")
        warned = f"{step_folder(out, 2)} is not a complete checkpoint" in r.err and len(r.err.splitlines()) == 1
        check(warned and f"resumed    {step_folder(out, 1)}" in r.out, f"{what}: not found out; stderr: {r.err or 'empty'}")
        check_same_checkpoint(step_folder(whole, 3), step_folder(out, 3))
        shutil.rmtree(out)


@test
def a_missing_file_is_named_and_the_older_checkpoint_is_taken():
    whole = folder("whole")
    run([*TINY, "--train-data", stories(), "--steps", 3, "--save-every", 1, "--out", whole])
    for name in ("config.json", "model.safetensors", "trainer_state.json", "trainer_state.safetensors")[GPU and 3:]:
        out = cut_back(whole, folder("out"), 2)
        os.unlink(os.path.join(step_folder(out, 2), name))
        r = run([PROGRAM, "--resume", "--out", out])
        check("step_00000002 is not a complete checkpoint" in r.err and name in r.err, f"{name}: {r.err}")
        check_same_checkpoint(step_folder(whole, 3), step_folder(out, 3))
        shutil.rmtree(out)


main()
