"""The GPU trainer as a whole, emulated: what must be equal is equal, whatever the order of threads, the split of a step, the number
of ranks or the switches; it starts where the CPU trainer starts and each resumes the other; every failing call of CUDA, cuBLAS and
NCCL ends it with one message. (Goldens, resume, bad input: test_goldens.py and test_program_*.py, with TRAINER.)"""

import threading
import math
import signal
import time

from compare_golden import BF16, Table, compare_gradients, l2_relative
from gpu import *

TINY = [PROGRAM, "--model", "tiny", "--batch-size", 2, "--seq-len", 16, "--lr", "1e-3", "--schedule", "constant", "--warmup-steps", 0]
RANKS = [*TINY[:3], "--batch-size", 1, *TINY[5:], "--doc-mask"]
GOLDENS = os.path.join(ROOT, "dev", "test", "goldens")
LONG = bool(os.environ.get("LONG"))  # make test-long
making = threading.Lock()
SILENT = ("emu:", "runtime error", "AddressSanitizer", "WARNING")


def stories(name="train", seed=1, documents=60):
    path = folder(f"data/{name}.bin")
    with making:  # runs start side by side
        return path if os.path.exists(path) else shard(path, tokens_of(text_of(documents, seed)))


def golden(name, *options):
    """A command that trains on a golden folder's batch."""
    batch = os.path.join(GOLDENS, name, "golden.safetensors")
    mask = ["--doc-mask"] if name == "docs" else []
    return [PROGRAM, "--init", os.path.join(GOLDENS, name), "--batch", batch, *mask, "--lr", "1e-3", "--schedule", "constant",
            "--warmup-steps", 0, *options]


def train(name, command, steps, count=1, env=None):
    """A run into folder NAME, its metrics beside it; returns its last checkpoint."""
    os.makedirs(folder(), exist_ok=True)
    ranks(count, [*command, "--steps", steps, "--out", folder(name), "--metrics", folder(name + ".jsonl")], env=env or {})
    return step_folder(folder(name), steps)


def untrained():
    """A folder with the tiny model, and a tokenizer."""
    if not os.path.exists(folder("model")):
        text = write(folder("text/a.txt"), text_of(60))
        run([CPU_TRAINER, *TINY[1:], "--tokenize", "inline", "--train-data", text, "--steps", 0, "--out", folder("model")])
    return step_folder(folder("model"), 0)


def heads_of_128():
    """The tiny model's config with heads of 128, which take other kernels."""
    return write(folder("heads/config.json"), json.dumps({**json.loads(read(untrained() + "/config.json")), "head_dim": 128}))


def choices():
    return write(folder("choices.jsonl"), '{"format": "choices", "vocab_size": 257, "eot_id": 256, "questions": 1}\n'
                 '{"context": [72, 105], "choices": [[33], [63, 33]], "bytes": [1, 2], "label": 0}\n')


def losses(name):
    return column(folder(name + ".jsonl"), "loss")


def masters(checkpoint):
    """The fp32 weights of a checkpoint by either trainer, as one vector."""
    tensors = tensors_of(checkpoint + "/trainer_state.safetensors")
    if not any(n.startswith("master.") for n in tensors):
        tensors = {"master." + n: t for n, t in tensors_of(checkpoint + "/model.safetensors").items()}
    return np.concatenate([tensors[n].ravel() for n in sorted(tensors) if n.startswith("master.")]).astype(np.float64)


def check_close(a, b, relative, what):
    """Two runs: losses, gradient norms and weights are equal up to this."""
    for key in ("loss", "grad_norm"):
        for step, (x, y) in enumerate(zip(column(folder(a + ".jsonl"), key), column(folder(b + ".jsonl"), key)), 1):
            check(abs(x - y) <= relative * abs(x), f"{what}: {key} of step {step} is {x} and {y}")
    x, y = (masters(step_folder(folder(n), steps_in(folder(n))[-1])) for n in (a, b))
    off = np.linalg.norm(x - y) / np.linalg.norm(x)
    check(off <= relative, f"{what}: weights differ by {off:.1e} in L2")


# ----------------------------------------------------------------------------
# the same bits


@emu_test
def every_order_of_threads_gives_the_same_bits():
    environments = {"reverse": {"EMU_ORDER": "reverse"}, "lazy": {"EMU_LAZY_STREAM": "1"}}
    data, rounded = ["--train-data", stories(), "--grad-accum", 2], ["--z-loss-coef", "1e-3", "--master", 0]
    commands = {"shards": (1, [*TINY, *data, "--doc-mask", "--z-loss-coef", "1e-3"]), "rounded": (1, [*TINY, *data, "--doc-mask", *rounded]),
                "odd": (1, golden("odd", "--aux-loss-coef", "1e-2")), "mixed": (1, golden("mixed", "--recompute", "moe")),
                "plain": (1, golden("docs", "--attention", "naive", "--experts", "loop", "--optimizer", "simple")),
                "two": (2, [*RANKS, *data]), "every": (2, [*RANKS, *data, *rounded, "--allreduce", "every"])}
    for i, (name, (count, command)) in enumerate(commands.items()):
        seeds = range(5) if LONG else (i, i + 10, i + 20) if name in ("shards", "odd") else (i,)  # to each command others
        environments.update({f"random{k}": {"EMU_ORDER": f"random:{seed}"} for k, seed in enumerate(seeds)})
        wanted, *others = at_once(lambda: train(name, command, 2, count, {"EMU_ORDER": "forward"}), *(
            lambda order=order, env=env: train(f"{name}-{order}", command, 2, count, env) for order, env in environments.items()))
        for other in others:
            check_same_checkpoint(wanted, other)


@test
def switches_that_only_move_work_change_no_bit():
    text = write(folder("text/a.txt"), text_of(60))
    data = ["--train-data", stories(), "--doc-mask"]
    runs = {"default": data, "recompute": [*data, "--recompute", "moe"], "loader": [*data, "--loader", "inline"],
            "pinned": [*data, "--pinned", 0], "text": ["--train-data", text, "--tokenize", "inline", "--doc-mask"]}
    at_once(*(lambda name=name, options=options: train(name, [*TINY, *options], 3) for name, options in runs.items()))
    for name in runs:
        check_same_metrics(metrics(folder("default.jsonl")), metrics(folder(name + ".jsonl")))
        wanted, found = (files_in(step_folder(folder(n), 3)) for n in ("default", name))
        for file in ("model.safetensors", "trainer_state.safetensors"):
            check(wanted[file] == found[file], f"{name}: {file} differs")


@test
def recomputing_changes_no_bit_of_a_model_with_dense_layers():
    train("none", golden("mixed"), 2)
    check_same_checkpoint(step_folder(folder("none"), 2), train("moe", golden("mixed", "--recompute", "moe"), 2))


@test
def each_speed_switch_alone_gives_the_same_losses():
    batch = ["--train-data", stories(), "--doc-mask"]
    switches = {"default": [], "attention": ["--attention", "naive"], "experts": ["--experts", "loop"], "optimizer": ["--optimizer", "simple"],
                "master": ["--master", 0]}
    at_once(*(lambda name=name, s=s: train(name, [*TINY, *batch, *s], 3) for name, s in switches.items()))
    check_close("default", "optimizer", 1e-5, "--optimizer simple")
    for name, tolerance in (("attention", 5e-3), ("experts", 5e-3), ("master", 2e-2)):  # bf16 rounds at other places
        for step, (a, b) in enumerate(zip(losses("default"), losses(name)), 1):
            check_near(a, b, tolerance, f"{name}: loss of step {step}")
    state = tensors_of(step_folder(folder("master"), 3) + "/trainer_state.safetensors")
    check(not [n for n in state if n.startswith("master.")], "--master 0 has master weights")


@test
def accumulation_of_the_same_tokens_gives_the_same_step():  # N6, N7; the balance loss is per microbatch by definition
    def run_split(B, A):
        command = [*TINY[:3], "--batch-size", B, *TINY[5:], "--train-data", stories(), "--grad-accum", A, "--aux-loss-coef", 0, "--doc-mask"]
        return train(f"{B}x{A}", command, 2)
    at_once(*(lambda B=B, A=A: run_split(B, A) for B, A in ((4, 1), (2, 2), (1, 4))))
    whole = metrics(folder("4x1.jsonl"))
    for name in ("2x2", "1x4"):
        first, second = metrics(folder(name + ".jsonl"))
        check_near(whole[0]["loss"], first["loss"], 1e-5, f"{name}: first loss")
        check_near(whole[0]["grad_norm"], first["grad_norm"], 1e-5 * first["grad_norm"], f"{name}: first gradient norm")
        check_near(whole[1]["loss"], second["loss"], 1e-4, f"{name}: second loss")


@test
def accumulation_of_one_batch_counts_its_ignored_targets_once():
    at_once(*(lambda A=A: train(f"{A}", golden("mixed", "--grad-accum", A), 2) for A in (1, 2, 3)))
    check_close("1", "2", 1e-6, "twice the same batch")  # halves are exact
    for key, tolerance in (("loss", 1e-6), ("grad_norm", 2**-8)):  # thirds are not: each gradient is rounded to bf16 at another place
        once, thrice = (column(folder(n + ".jsonl"), key)[0] for n in ("1", "3"))
        check_near(once, thrice, tolerance * once, f"three times: {key}")


@test
def without_master_weights_a_resumed_run_is_the_unbroken_one():
    command = [*TINY, "--train-data", stories(), "--master", 0, "--save-every", 1]
    train("whole", command, 3)
    shutil.copytree(step_folder(folder("whole"), 1), step_folder(folder("part"), 1))
    run([PROGRAM, "--resume", "--out", folder("part")])
    for step in (2, 3):
        check_same_checkpoint(step_folder(folder("whole"), step), step_folder(folder("part"), step))


# ----------------------------------------------------------------------------
# beside the CPU trainer


@test
def both_trainers_start_from_the_same_weights_and_loss():
    data = ["--train-data", stories(), "--seed", 1, "--metrics"]
    command = [*TINY[1:], *data]
    def start(program, name):
        run([program, *command, folder(name + ".jsonl"), "--steps", 0, "--out", folder(name)])
        run([program, *command, folder(name + ".jsonl"), "--steps", 1])
        return tensors_of(step_folder(folder(name), 0) + "/model.safetensors"), losses(name)[0]
    (gpu, gpu_loss), (cpu, cpu_loss) = start(PROGRAM, "gpu"), start(CPU_TRAINER, "cpu")
    check(sorted(gpu) == sorted(cpu), "other tensors")
    for name in cpu:
        check(gpu[name].tobytes() == round_bf16(cpu[name]).tobytes(), f"{name} is not the rounded tensor of train_moe_cpu")
    check_near(gpu_loss, cpu_loss, 5e-3, "first loss")
    state = tensors_of(step_folder(folder("gpu"), 0) + "/trainer_state.safetensors")
    for name in cpu:
        check(state["master." + name].tobytes() == cpu[name].tobytes(), f"the master of {name} is not what train_moe_cpu starts from")


@test
def each_trainer_resumes_the_other():
    data = ["--train-data", stories(), "--steps", 4, "--save-every", 2]
    for first, second in ((PROGRAM, CPU_TRAINER), (CPU_TRAINER, PROGRAM)):
        name = os.path.basename(first)
        for program in (first, second):
            run([program, *TINY[1:], *data, "--out", folder(f"{name}/{program == first}"), "--metrics", folder(f"{name}-{program == first}.jsonl")])
        shutil.copytree(step_folder(folder(f"{name}/True"), 2), step_folder(folder(f"{name}/both"), 2))
        r = run([second, "--resume", "--out", folder(f"{name}/both"), "--metrics", folder(f"{name}-both.jsonl")])
        check("step 3/4" in r.out and steps_in(folder(f"{name}/both")) == [2, 4], r.out)
        for a, b in zip(metrics(folder(f"{name}-False.jsonl"))[2:], metrics(folder(f"{name}-both.jsonl"))):
            check(a["step"] == b["step"] and a["tokens"] == b["tokens"], "steps or tokens differ")
            check_near(a["loss"], b["loss"], 1e-2, f"{name}, then the other: loss of step {a['step']}")
        weights = [masters(step_folder(folder(f"{name}/{n}"), 4)) for n in ("True", "both")]
        off = np.linalg.norm(weights[0] - weights[1]) / np.linalg.norm(weights[0])
        check(off <= 1e-2, f"{name}, then the other: weights differ by {off:.1e}")


@test
def two_hundred_steps_of_text_have_the_losses_of_the_cpu_trainer():
    # (At ten times this rate the two part by 0.1, as two runs of train_moe_cpu do whose first weights differ by a rounding to bf16.)
    text = ["--model", "tiny", "--batch-size", 2, "--seq-len", 32, "--tokenize", "inline", "--train-data", os.path.join(ROOT, "README.md"),
            "--lr", "3e-4", "--steps", 200]
    os.makedirs(folder(), exist_ok=True)
    at_once(*(lambda p=p, n=n: run([p, *text, "--metrics", folder(n + ".jsonl")]) for p, n in ((PROGRAM, "gpu"), (CPU_TRAINER, "cpu"))))
    off = [a - b for a, b in zip(losses("gpu"), losses("cpu"))]
    check(len(off) == 200 and np.abs(off).max() <= 0.005, f"step {np.abs(off).argmax() + 1} is off by {np.abs(off).max():.3f}")
    check(abs(np.mean(off)) <= 0.001, f"the mean of the differences is {np.mean(off):.4f}: they lean to one side")
    check(losses("gpu")[-1] < losses("gpu")[0] - 1, f"it has learnt little: {losses('gpu')[0]} to {losses('gpu')[-1]}")


@test
def experts_of_any_number_of_tokens_do_what_the_cpu_does():  # M15, M16, M17, M22
    # around multiples of the tiles' 8 and 128 rows, none at all, and a group of 128 rows that would span two experts were they not padded
    counts, T = ([0, 1, 7, 8, 9, 127, 128, 129], [5, 130, 0, 121, 64, 63, 26, 0]), 409
    config = {**json.loads(read(untrained() + "/config.json")), "num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 1}
    write(folder("config.json"), json.dumps(config))
    rng = np.random.default_rng(4)
    experts = {f"router.layers.{l}.topk_index": rng.permutation(np.repeat(np.arange(8, dtype=np.int32), c)).reshape(T, 1)
               for l, c in enumerate(counts)}
    batch_file(folder("batch"), 1, T, **experts)
    def dump(program, name):
        run([program, "--config", folder("config.json"), "--batch", folder("batch"), "--force-routing", "--dump", folder(name)])
        return load_file(folder(name))
    gpu, cpu = at_once(lambda: dump(PROGRAM, "gpu"), lambda: dump(CPU_TRAINER, "cpu"))
    table = Table()
    compare_gradients(table, gpu, cpu, BF16, l2_relative)
    table.add("logits", l2_relative(gpu["logits"], cpu["logits"]), BF16["logits"])
    idle = [n for n, g in cpu.items() if n.startswith("grad.") and not g.any()]
    check(len(idle) == 9 + 2 and len(table.rows) == 3, f"{idle}, {table.rows}")  # three idle experts; routers whose one weight is always 1
    check(not table.failed(), f"{table.failed()}")


@test
def greedy_sampling_takes_what_forward_calls_the_likeliest():
    model, rng = untrained(), np.random.default_rng(5)
    tensors = load_file(model + "/model.safetensors")
    for name, t in tensors.items():  # attention that is sharp, experts that matter, and letters as the likeliest tokens
        if t.ndim == 2:
            t[:] = rng.standard_normal(t.shape) * (3 if "mlp.gate" in name else 1) / (1 if "embed" in name else t.shape[1] ** 0.5)
        elif "q_norm" in name:
            t[:] = 3
    likely = [ord(c) for c in "abcdefghijklmnop"]
    tensors["lm_head.weight"][[t for t in range(257) if t not in likely]] = 0
    save_file(tensors, model + "/model.safetensors")
    said = run([PROGRAM, "--init", model, "--seq-len", 80, "--generate", 74, "--temperature", 0, "--prompt", "ab"]).out.splitlines()[0]
    tokens = np.array([[EOT, *said.encode()]], np.int32)
    check(tokens.shape[1] >= 76 and len(set(said)) > 5, f"it said {said!r}")  # beyond the 64 that a forward pass begins with
    batch_file(folder("batch"), 1, tokens.shape[1], tokens=tokens, targets=tokens)
    run([PROGRAM, "--init", model, "--batch", folder("batch"), "--dump", folder("dump")])
    logits = load_file(folder("dump"))["logits"][0]
    for t in range(3, tokens.shape[1]):  # what the decoder chose, with its own rounding
        chosen, best = logits[t - 1, tokens[0, t]], logits[t - 1].max()
        check(chosen >= best - 0.05, f"token {t} of {said!r}: logit {chosen}, the largest is {best}")


# ----------------------------------------------------------------------------
# ranks


def on_ranks(name, count, *options, steps=2, env=None):
    """The same 4 sequences a step on any number of ranks; the z-loss is large enough for its share of a rank to show."""
    command = [*RANKS, "--train-data", stories(), "--grad-accum", 4 // count, "--z-loss-coef", "0.1", *options]
    return train(name, command, steps, count, env)


@test
def one_two_and_four_ranks_do_the_same_with_the_same_tokens():  # R1 to R3
    fp32 = ["--allreduce-dtype", "fp32"]
    at_once(lambda: on_ranks("1", 1), lambda: on_ranks("2", 2, *fp32), lambda: on_ranks("4", 4, *fp32),
            lambda: on_ranks("2-bf16", 2), *(lambda R=R: on_ranks(f"{R}-ring", R, env={"EMU_NCCL": "ring"}) for R in (2, 4)))
    for name, tolerance in (("2", 1e-5), ("4", 1e-5), ("2-bf16", 2 / 256), ("2-ring", 2 / 256), ("4-ring", 4 / 256)):
        check_close("1", name, tolerance, f"{name} ranks")
        first, alone = (metrics(folder(n + ".jsonl"))[0] for n in (name, "1"))
        check(all(first[key] == alone[key] for key in ("expert_load", "dead_experts")), f"load of the experts: {first}, on one rank {alone}")
        check(column(folder("1.jsonl"), "tokens") == column(folder(name + ".jsonl"), "tokens"), "tokens")
        check(state_of(step_folder(folder("1"), 2)) == state_of(step_folder(folder(name), 2)), "the places in the data differ")


@test
def three_ranks_average_without_a_bias():  # 1/3 is no number in bf16: a third of it too much or too little would be 0.2%
    def averaged(kind):
        return lambda: train(kind, [*RANKS, "--train-data", stories(), "--allreduce-dtype", kind], 1, 3)
    at_once(averaged("fp32"), averaged("bf16"))
    exact, rounded = (column(folder(kind + ".jsonl"), "grad_norm")[0] for kind in ("fp32", "bf16"))
    check_near(rounded, exact, 5e-4 * exact, "length of the averaged gradients")


@test
def ranks_that_use_other_experts_are_one_rank_with_all_rows():  # R5, R6, N6
    # rank 0 uses experts 0 and 1 alone, rank 1 experts 2 and 3; and rank 1 ignores most of its targets, rank 0 few (R6, N6)
    rng, T = np.random.default_rng(3), 40
    tokens, targets = (rng.integers(0, 256, (2, T), dtype=np.int32) for _ in range(2))
    targets[0, T // 5 * 4:] = targets[1, T // 10:] = -100
    experts = np.array([[[0, 1]] * T, [[2, 3]] * T], np.int32)
    def file(name, rows):
        return batch_file(folder(name), len(rows), T, tokens=tokens[rows], targets=targets[rows],
                          **{f"router.layers.{l}.topk_index": experts[rows].reshape(-1, 2) for l in range(2)})
    def command(name, rows, out):
        return [PROGRAM, "--model", "tiny", "--batch", file(name, rows), "--force-routing", "--aux-loss-coef", 0, "--lr", "1e-3", "--schedule",
                "constant", "--warmup-steps", 0, "--allreduce-dtype", "fp32", "--steps", 2, "--out", folder(out), "--metrics", folder(out + ".jsonl")]
    run(command("both", [0, 1], "one"))
    run([*MPIRUN, "-np", 1, *command("first", [0], "two"), ":", "-np", 1, *command("second", [1], "two")], env={"EMU_DEVICES": "2"})
    check_close("one", "two", 1e-5, "two ranks")


@test
def another_number_of_ranks_goes_on_with_the_same_steps():  # D13
    on_ranks("whole", 2, "--save-every", 1, "--allreduce-dtype", "fp32", steps=4)
    shutil.copytree(step_folder(folder("whole"), 2), step_folder(folder("part"), 2))
    r = run([PROGRAM, "--resume", "--out", folder("part"), "--metrics", folder("part.jsonl")])
    check("grad-accum 4" in r.out and "from now on" not in r.out, r.out)
    a, b = metrics(folder("whole.jsonl"))[2:], metrics(folder("part.jsonl"))
    check([(m["step"], m["tokens"], m["lr"]) for m in a] == [(m["step"], m["tokens"], m["lr"]) for m in b], f"{b}")
    for x, y in zip(a, b):
        check_near(x["loss"], y["loss"], 1e-5 * x["loss"], f"loss of step {x['step']}")
    check(state_of(step_folder(folder("whole"), 4))["data_position"] == state_of(step_folder(folder("part"), 4))["data_position"], "places in the data")


@test
def overlapping_changes_no_bit():
    a, b = at_once(lambda: on_ranks("0", 2, "--overlap", 0), lambda: on_ranks("1", 2, "--overlap", 1))
    check_same_checkpoint(a, b)
    if EMULATED:
        check_same_checkpoint(a, on_ranks("lazy", 2, env={"EMU_LAZY_STREAM": "1"}))


@emu_test
def streams_that_go_on_at_random_moments_change_no_bit():  # R9
    two = [*RANKS, "--train-data", stories(), "--grad-accum", 2]
    commands = [two, [*two, "--allreduce", "every", "--allreduce-dtype", "fp32"], [*two, "--loader", "inline", "--recompute", "moe"]]
    def trained(name, i, env):
        checkpoint = train(name, commands[i], 2, 2, env)
        content = {n: b for n, b in files_in(checkpoint).items() if n.endswith(".safetensors")}
        shutil.rmtree(folder(name))
        return content
    wanted = at_once(*(lambda i=i: trained(f"command{i}", i, {}) for i in range(3)))
    def same(seed):
        check(trained(f"seed{seed}", seed % 3, {"EMU_LAZY_STREAM": f"random:{seed}"}) == wanted[seed % 3], f"random:{seed} has other bits")
    at_once(*(lambda seed=seed: same(seed) for seed in range(200 if LONG else 9)))


@test
def gradients_are_averaged_by_buckets_while_backward_goes_on():  # R5, F3
    os.makedirs(folder(), exist_ok=True)
    for when, microbatches in (("last", 1), ("every", 2)):
        trace = folder(when + ".json")
        on_ranks(when, 2, "--allreduce", when, "--trace", trace)
        for file in (trace, trace.replace(".json", ".rank1.json")):  # the same on both, whatever experts they chose
            events = [e for e in json.loads(read(file))["traceEvents"] if e["ph"] == "X"]
            buckets = [e for e in events if e["name"] == "allreduce" and e["tid"] == 2]
            backward = [e for e in events if e["name"] == "backward"]
            count = 4 * microbatches  # the head, two layers, the embedding
            check(len(buckets) == 2 * count and len(backward) == 4, f"{when}: {len(buckets)} buckets, {len(backward)} backward passes")
            for step in range(2):
                first, last = buckets[step * count + count - 4], backward[2 * step + 1]
                check(first["ts"] < last["ts"] + last["dur"], f"{when}: step {step + 1} has its first bucket after the backward pass")


@test
def averaging_after_every_microbatch_is_averaging_after_the_last():
    at_once(*(lambda w=w, d=d: on_ranks(w + d, 2, "--allreduce", w, "--allreduce-dtype", d)
              for w in ("every", "last") for d in ("fp32", "bf16")))
    check_close("lastfp32", "everyfp32", 1e-5, "--allreduce every")
    check_close("lastbf16", "everybf16", 2 / 256, "--allreduce every in bf16")  # each of the two sums is rounded


@test
def two_ranks_resume_bit_for_bit_also_as_one():
    on_ranks("whole", 2, "--save-every", 1, steps=3)
    shutil.copytree(step_folder(folder("whole"), 1), step_folder(folder("part"), 1))
    shutil.copytree(step_folder(folder("whole"), 1), step_folder(folder("alone"), 1))
    ranks(2, [PROGRAM, "--resume", "--out", folder("part")])
    for step in (2, 3):
        check_same_checkpoint(step_folder(folder("whole"), step), step_folder(folder("part"), step))
    run([PROGRAM, "--resume", "--out", folder("alone"), "--grad-accum", 4])
    off = masters(step_folder(folder("alone"), 3)) - masters(step_folder(folder("whole"), 3))
    check(np.abs(off).max() <= 5e-3, f"weights differ by up to {np.abs(off).max()}")  # lr 1e-3, three steps at most
    check(state_of(step_folder(folder("alone"), 3))["data_position"] == state_of(step_folder(folder("whole"), 3))["data_position"], "data")


@test
def validation_and_samples_of_two_ranks_are_those_of_one():
    options = ["--val-data", stories("val", seed=2, documents=9), "--val-every", 1, "--val-steps", 0]
    at_once(lambda: on_ranks("1", 1, *options), lambda: on_ranks("2", 2, *options, "--allreduce-dtype", "fp32"))
    for a, b in zip(column(folder("1.jsonl"), "val_loss"), column(folder("2.jsonl"), "val_loss")):
        check_near(a, b, 1e-5, "validation loss")


@test
def a_run_that_becomes_infinite_stops_on_all_ranks_at_the_same_step():  # N14
    model = untrained()
    tensors = load_file(model + "/model.safetensors")
    tensors["model.embed_tokens.weight"][:] = 0  # all but one token make all activations 0; that one makes q k^T overflow
    tensors["model.embed_tokens.weight"][ord("z")] = 1
    for l in range(2):
        for n in ("q_norm", "k_norm"):
            tensors[f"model.layers.{l}.self_attn.{n}.weight"][:] = 3e38
    save_file(tensors, model + "/model.safetensors")
    plain, special = [ord("a")] * 16, [ord("z")] * 16
    data = {"bad": shard(folder("data/bad.bin"), [*plain * 3, *special, ord("a")]), "fine": shard(folder("data/fine.bin"), [*plain * 4, ord("a")])}
    patience = {"OMPI_MCA_odls_base_sigkill_timeout": "20"} if LONG else {}  # the other rank has that long to speak, too
    for count in (1, 2):  # four sequences, in two microbatches
        def command(name, steps):
            return [PROGRAM, "--init", model, "--batch-size", 2 // count, "--grad-accum", 2, "--seq-len", 16, "--train-data", data[name],
                    "--steps", steps, "--save-every", 1, "--out", folder(f"{name}{count}")]
        r = ranks(count, command("bad", 5), code=None, env=patience)
        check(r.code == 1 and len(said(r)) == 1, f"exit code {r.code}, messages {said(r)}")
        check("step 1" in said(r)[0] and "not finite" in said(r)[0], said(r)[0])
        check(steps_in(folder(f"bad{count}")) == [], f"saved {steps_in(folder(f'bad{count}'))}")
        ranks(count, command("fine", 1))  # without the token the same model does its first step


@test
def more_ranks_than_devices_are_refused():
    r = ranks(3, [*RANKS, "--train-data", stories(), "--steps", 1], devices=2, code=None)
    check(r.code == 1 and len(said(r)) == 1, f"exit code {r.code}, messages {said(r)}")
    check("3 ranks" in said(r)[0] and "2 GPU" in said(r)[0], said(r)[0])


@test
def mpi_runs_as_root_with_what_the_readme_says():  # R4
    root, quiet = "--allow-run-as-root", "--mca btl_vader_single_copy_mechanism none"
    readme = read(os.path.join(ROOT, "README.md")).decode()
    check(f"`{root}`" in readme and f"`{quiet}`" in readme, "README.md does not say what a container needs")
    command = ["mpirun", root, "--oversubscribe", *quiet.split(), "-np", 2, *RANKS, "--train-data", stories(), "--steps", 1]
    r = run(command, env={"EMU_DEVICES": "2"})
    check("step 1/1" in r.out and r.err == "", r.err[-600:])


@test
def wrong_options_of_several_ranks_are_reported_once():
    for options, part in (["--lr", "fast"], "'fast' is not a number"), (["--train-data", folder("no.bin")], "no file matches"):
        r = ranks(2, [PROGRAM, "--model", "tiny", *options], code=None)
        check(r.code == 1 and len(said(r)) == 1 and part in said(r)[0], f"exit code {r.code}, messages {said(r)}")
    for wrong in ("soon", "0", "inf"):
        r = ranks(2, [*RANKS, "--train-data", stories(), "--steps", 1], env={"MOE_NCCL_TIMEOUT": wrong}, code=None)
        check(r.code == 1 and len(said(r)) == 1 and f"MOE_NCCL_TIMEOUT={wrong}" in said(r)[0], f"exit code {r.code}, messages {said(r)}")


@test
def several_processes_of_the_cpu_trainer_are_refused():
    r = run([*MPIRUN, "-np", 2, CPU_TRAINER, "--model", "tiny", "--train-data", stories(), "--steps", 1], code=None)
    check(r.code == 1 and len(said(r)) == 1 and "started as 2 processes" in said(r)[0] and "env -u OMPI_COMM_WORLD_SIZE" in said(r)[0], f"exit code {r.code}, messages {said(r)}")


def two_ranks_after_two_steps(*options, env=None):
    """A run that has done two steps of 500: mpirun, and the process ids of the ranks."""
    command = [*MPIRUN, "-np", 2, *RANKS, "--train-data", stories(), "--steps", 500, "--out", folder("out"), *options]
    process = start(command, env={"EMU_DEVICES": "2", **(env or {})})
    while not re.match("step +2/", line := process.stdout.readline()):
        if not line:
            raise Failure(f"it ended early: {process.stderr.read()[-600:]}")
    children = [int(p) for p in run(["ps", "--ppid", process.pid, "-o", "pid="]).out.split()]
    check(len(children) == 2, f"mpirun has {len(children)} children")
    return process, children


@test
def a_killed_rank_ends_all():  # R7
    process, children = two_ranks_after_two_steps("--save-every", 1, "--keep", 2)
    os.kill(children[1], signal.SIGKILL)
    begin = time.time()
    try:
        process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
        raise Failure("the other rank and mpirun still run after a minute")
    check(process.returncode != 0, "exit code 0")
    left = [p for p in children if os.path.exists(f"/proc/{p}") and b"train_moe" in read(f"/proc/{p}/cmdline")]
    check(not left, f"still there after {time.time() - begin:.0f} s: {left}")
    step = steps_in(folder("out"))[-1]
    ranks(2, [PROGRAM, "--resume", "--out", folder("out"), "--steps", step + 1])


def preloaded(function, when, action):
    """A library whose `function` takes this action when this is true of its arguments a, b or of how many calls there were, and goes on."""
    name = folder(f"lib{abs(hash((function, when, action)))}")
    write(name + ".c", f"""
        int raise(int), usleep(unsigned), setitimer(int, void*, void*);
        char* strstr(const char*, const char*);
        void* dlsym(void*, const char*);
        long {function}(long a, long b, long c, long d, long e, long f, long g, long h) {{
            static int calls;
            calls++;
            if ({when}) {{ {action}; }}
            return ((long (*)(long, long, long, long, long, long, long, long))dlsym((void*)-1, "{function}"))(a, b, c, d, e, f, g, h);
        }}""")
    run(["cc", "-shared", "-fPIC", "-w", "-o", name + ".so", name + ".c", "-ldl"])  # -1 is RTLD_NEXT
    return name + ".so"


def with_preloaded(libraries, command, timeout, env={}):
    """Runs two ranks, each with the library of its own, if it has one."""
    both = [["-np", 1, *(["-x", "LD_PRELOAD=" + libraries[r]] if r in libraries else []), *command] for r in (0, 1)]
    return run([*MPIRUN, *both[0], ":", *both[1]], code=None, timeout=100, env={
        "EMU_DEVICES": "2", "MOE_NCCL_TIMEOUT": str(timeout), "EMU_NCCL_TIMEOUT": "300", **env})


STOP, KILL = (f"raise({s.value})" for s in (signal.SIGSTOP, signal.SIGKILL))


@emu_test
def a_rank_that_never_comes_to_an_all_reduce_is_given_up():  # R2, R10
    def changed(name, **sizes):
        return ["--config", write(folder(name + "/config.json"), json.dumps({**json.loads(read(untrained() + "/config.json")), **sizes}))]
    deep, every = changed("deep", num_hidden_layers=20), ["--allreduce", "every", "--grad-accum", 4]
    # whose launches fill a queue of a thousand: 16 heads and 16 experts one after the other, 60 layers of tensors one after the other
    heads, deepest = changed("heads", num_hidden_layers=8, num_attention_heads=16, num_experts=16, num_local_experts=16), changed("deepest", num_hidden_layers=60)
    one_by_one = ["--attention", "naive", "--experts", "loop", "--overlap", 0]
    def stopped(name, model, collectives, switches):  # rank 1 after so many of them; the emulator calls MPI twice for each
        lost = preloaded("MPI_Iallgather", f"calls == {2 * collectives + 1}", STOP)
        command = [PROGRAM, *model, "--batch-size", 1, "--seq-len", 8, "--train-data", stories(), "--steps", 3, "--save-every", 1,
                   "--out", folder(name), *switches]
        r = with_preloaded({1: lost}, command, 3, env={"EMU_LAZY_STREAM": "1"})
        check(r.code != 0 and "error: other ranks have not come to an all-reduce within 3 s" in r.err, f"{name}: exit code {r.code}: {r.err[:600]}")
    # all-reduces of the self-test, of a backward pass
    tests, layers, deep_layers, deepest_layers, heads_layers = 2, 2 + 2, 20 + 2, 60 + 2, 8 + 2
    at_once(lambda: stopped("last", ["--model", "tiny"], tests + (layers + 1) + 2, []),
            *(lambda k=k: stopped(f"far_ahead{k}", deep, tests + (deep_layers + 1) + k, []) for k in (2, 3)),  # of the 16 issued at once
            lambda: stopped("in_turn", deep, tests + deep_layers + 19, [*every, "--overlap", 0]),
            lambda: stopped("one_by_one", heads, tests + (heads_layers + 1) + 1, one_by_one),
            lambda: stopped("update", deepest, tests + (deepest_layers + 1) + deepest_layers, ["--optimizer", "simple"]),
            lambda: stopped("loop", ["--model", "tiny"], tests + layers + 1, [*every, "--experts", "loop"]))
    run([CPU_TRAINER, "--init", step_folder(folder("last"), steps_in(folder("last"))[-1]), "--generate", 1])


@test
def a_rank_that_hangs_before_it_is_connected_is_named_and_given_up():  # R2, R10
    command = [*RANKS, "--train-data", stories(), "--steps", 1]
    def stopped(rank, function):
        r = with_preloaded({rank: preloaded(function, "calls == 1", STOP)}, command, 0.2)
        check(r.code != 0 and f"waiting for rank {rank} for 0.2 s" in r.err, f"exit code {r.code}: {r.err[-400:]}")
        check(f"error: rank {rank} has not come for 12 s" in r.err, r.err[-400:])
    at_once(lambda: stopped(0, "MPI_Ibcast"), lambda: stopped(1, "MPI_Isend"))  # while rank 0 reads files, and after that


@test
def a_rank_that_hangs_at_the_very_end_is_given_up():  # and three that wait for it say so once
    command = [*RANKS, "--train-data", stories(), "--steps", 1, "--tokens-per-step", 16 * 4]
    sooner = preloaded("alarm", "1", "if (a > 48) a -= 48")
    lost = preloaded("MPI_Finalize", "calls == 1", STOP)
    each = [["-np", 1, "-x", "LD_PRELOAD=" + (lost if r == 0 else sooner), *command, "--out", folder("out")] for r in range(4)]
    r = run([*MPIRUN, *each[0], *(o for c in each[1:] for o in (":", *c))], code=None, timeout=100, env={
        "EMU_DEVICES": "4", "MOE_NCCL_TIMEOUT": "30", "EMU_NCCL_TIMEOUT": "300"})
    message = "error: taking leave of the other ranks (MPI) is not done after 50 s"
    check(r.code != 0 and r.err.count(message) == 1 and steps_in(folder("out")) == [1], f"exit code {r.code}: {r.err[:600]}")


@test
def a_rank_that_hangs_in_a_collective_of_mpi_is_given_up():  # R2, R10
    # The other one hangs in MPI itself, where nothing but an alarm wakes it: here after a twentieth of its 50 s.
    sooner = preloaded("alarm", "1", "long t[4] = {0, 0, a / 20, a % 20 * 50000}; return setitimer(0, t, 0)")
    command = [*RANKS, "--train-data", stories(), "--steps", 1]
    def stopped(rank, function, words, command=command):
        r = with_preloaded({rank: preloaded(function, "calls == 1", STOP), 1 - rank: sooner}, command, 30)
        said_so = f"error: {words} (MPI) is not done after 50 s (MOE_NCCL_TIMEOUT)" in r.err
        check(r.code != 0 and said_so, f"exit code {r.code}: {r.err[-600:]}")
    at_once(*(lambda rank=rank, job=job: stopped(rank, *job) for rank in (0, 1) for job in (
        ("MPI_Comm_split_type", "meeting the ranks of this machine"), ("MPI_Allgather", "comparing the GPUs of this machine"),
        ("MPI_Allreduce", "adding up over the ranks", golden("docs", "--steps", 1)))))


@test
def a_rank_that_reads_its_weights_slowly_is_waited_for():
    # fourth to come to rank 1 from rank 0: its weights and data, when both have read them
    command = [*RANKS, "--train-data", stories(), "--steps", 1]
    r = with_preloaded({1: preloaded("MPI_Ibcast", "calls == 4", "usleep(6000000)")}, command, 2)
    check(r.code == 0 and "waiting for rank 1 for 2 s: is it busy with files" in r.err, f"exit code {r.code}: {r.err[-400:]}")
    if LONG:
        r = with_preloaded({1: preloaded("MPI_Ibcast", "calls == 4", STOP)}, command, 1)
        check(r.code != 0 and "error: rank 1 has not come for 60 s" in r.err, f"exit code {r.code}: {r.err[-400:]}")


@test
def a_rank_that_is_lost_while_it_saves_leaves_the_last_checkpoint():  # R10
    for name, action in (("killed", KILL), *([("stopped", STOP)] if LONG else [])):
        out = folder(name)
        lost = preloaded("rename", 'strstr((char*)b, "step_00000002")', action)
        command = [*RANKS, "--train-data", stories(), "--steps", 3, "--save-every", 1, "--out", out]
        r = with_preloaded({0: lost}, command, 1)
        check(r.code != 0 and steps_in(out)[:1] == [1], f"exit code {r.code}: {r.err[-400:]}")
        check(action != STOP or "error: rank 0 has not come for 60 s" in r.err, r.err[-400:])
        last = steps_in(out)[-1]  # 1; mpirun wakes a stopped rank before it kills it, and that may be enough to finish
        ranks(2, [PROGRAM, "--resume", "--out", out, "--steps", last + 1])
        check(steps_in(out)[-1] == last + 1, f"it went on to {steps_in(out)}")


@test
def ranks_that_see_other_data_are_refused():  # as two machines with different files under one name
    command = [*RANKS, "--steps", 1, "--train-data"]
    mine, other, val, other_val = (stories(n, seed=i) for i, n in enumerate(("train", "other", "val", "other_val"), 1))
    for option, first, second in (("train-data", [mine], [other]), ("val-data", [mine, "--val-data", val], [mine, "--val-data", other_val])):
        r = run([*MPIRUN, "-np", 1, *command, *first, ":", "-np", 1, *command, *second], env={"EMU_DEVICES": "2"}, code=None, timeout=100)
        check(r.code == 1 and len(said(r)) == 1 and f"this rank sees other --{option} than rank 0" in said(r)[0], f"exit code {r.code}: {r.err[-400:]}")


@test
def ranks_that_were_told_something_else_are_refused():  # one would average what does not belong together, or wait for ever
    command = [*RANKS, "--train-data", stories()]
    run([*command, "--steps", 2, "--save-every", 1, "--out", folder("weights")])
    here, there = (["--init", step_folder(folder("weights"), step)] for step in (1, 2))
    def refused(words, first, second, command=[*command, "--steps", 1]):
        r = run([*MPIRUN, "-np", 1, *command, *first, ":", "-np", 1, *command, *second], env={"EMU_DEVICES": "2"}, code=None, timeout=100)
        check(r.code == 1 and len(said(r)) == 1 and words in said(r)[0], f"{words}: exit code {r.code}: {r.err[-400:]}")
    model, of_folder = [PROGRAM, *command[3:], "--steps", 1], json.loads(read(here[1] + "/config.json"))
    other = write(folder("other/config.json"), json.dumps({**of_folder, "rms_norm_eps": 1e-5}))
    shutil.copytree(folder("weights"), folder("shorter"))
    shutil.rmtree(step_folder(folder("shorter"), 2))
    at_once(*(lambda o=o, a=a, b=b: refused(f"this rank comes to another --{o} than rank 0", [f"--{o}", a], [f"--{o}", b]) for o, a, b in (
                ("seed", 1, 2), ("beta2", 0.9, 0.99), ("grad-accum", 1, 2), ("experts", "loop", "grouped"))),
            lambda: refused("this rank comes to another --out than rank 0", ["--out", folder("out")], []),
            lambda: refused("this rank has another model than rank 0", ["--config", here[1] + "/config.json"], ["--config", other], model),
            lambda: refused("this rank starts from other weights than rank 0", here, there, model),
            lambda: refused("rank 0 resumes step 2, this rank step 1", ["--out", folder("weights")], ["--out", folder("shorter")],
                            [PROGRAM, "--resume", "--steps", 4, "--tokens-per-step", 32]))
    differ = ["--loader", "inline", "--pinned", 0, "--profile", "--log-every", 2, "--trace", folder("trace.json")]
    run([*MPIRUN, "-np", 1, *command, "--steps", 1, ":", "-np", 1, *command, "--steps", 1, *differ], env={"EMU_DEVICES": "2"})
    os.symlink(folder("weights"), folder("mounted"))  # another name for the same on another machine
    resumed = [["-np", 1, PROGRAM, "--resume", step_folder(folder(name), 1), "--steps", 2, "--tokens-per-step", 32] for name in ("weights", "mounted")]
    run([*MPIRUN, *resumed[0], ":", *resumed[1]], env={"EMU_DEVICES": "2"})


@emu_test
def ranks_that_cannot_connect_are_told_what_to_try():  # R2, R3
    command = [*RANKS, "--train-data", stories(), "--steps", 1]
    env = {"EMU_DEVICES": "2", "MOE_NCCL_TIMEOUT": "3", "EMU_NCCL_TIMEOUT": "60"}
    r = run([*MPIRUN, "-np", 1, *command, ":", "-np", 1, "-x", "EMU_FAIL=ncclCommInitRank:1", *command], env=env, code=None)
    check(r.code == 1 and "NCCL_P2P_DISABLE" in r.err and "ncclCommInitRank" in r.err, f"exit code {r.code}: {r.err[-600:]}")


@test
def ctrl_c_ends_all_ranks_after_the_same_step():
    process, children = two_ranks_after_two_steps()
    os.kill(children[1], signal.SIGINT)  # one rank alone
    out, err = process.communicate(timeout=100)
    check("interrupted after step" in out and process.returncode != 0, out[-300:] + err[-300:])
    step = int(out.split("interrupted after step ")[1].split(",")[0])
    check(steps_in(folder("out")) == [step], f"saved {steps_in(folder('out'))}, said {step}")


# ----------------------------------------------------------------------------
# memory and devices


def families_of(text):
    """MiB a family, of a memory plan. What CUDA takes for itself is in the total; the emulator takes nothing."""
    return {line.rsplit(None, 1)[0].strip(): float(line.split()[-1]) for line in text.splitlines() if line.startswith("  ")}


def plan(*options):
    """What --dry-run prints: its text, and MiB a family."""
    text = run([PROGRAM, *options, "--dry-run"]).out
    return text, families_of(text)


@test
def dry_run_plans_the_memory_of_smol_500m():
    text, rows = plan("--model", "smol-500m", "--batch-size", 6, "--seq-len", 4096)
    parameters = 580893952 if "580893952 total" in text else int(text.split("parameters")[1].split()[0])
    check(5.80e8 < parameters < 5.82e8, text)
    for family, size in (("weights", 2), ("master weights", 4), ("gradients", 4), ("AdamW moments", 8)):
        check_near(rows[family], size * parameters / 2**20, 0.1, family)
    check_near(sum(v for k, v in rows.items() if k != "total"), rows["total"], 0.5, "the sum of the families")
    check_near(rows["logits"], 2 * 4096 * 151936 / 2**20, 0.1, "logits of one chunk")
    saved = plan("--model", "smol-500m", "--batch-size", 6, "--seq-len", 4096, "--recompute", "moe")[1]["activations"]
    check(rows["activations"] - saved > 0.8 * 11 * 2 * 6 * 4096 * 2 * 2 * 512 / 2**20, "--recompute moe saves nothing")
    check("master weights" not in plan("--model", "smol-500m", "--master", 0)[1] or
          plan("--model", "smol-500m", "--master", 0)[1]["master weights"] == 0, "--master 0 plans master weights")
    def advice(gib):
        return run([PROGRAM, "--model", "smol-500m", "--seq-len", 4096, "--dry-run", "--memory", f"{gib:.6f}"]).out.splitlines()[-1]
    check("--batch-size 6" in advice((rows["total"] + 0.1) / 1024) and "--batch-size 5" in advice((rows["total"] - 0.1) / 1024),
          advice(50))


@emu_test
def dry_run_needs_no_gpu():
    r = run([*TINY, "--dry-run"], env={"EMU_DEVICES": "0"})
    check("total" in r.out and "largest batch" in r.out and r.err == "", r.out + r.err)


@emu_test
def out_of_memory_prints_the_plan_and_the_plan_is_right():  # U2
    sizes = ["--batch-size", 4, "--seq-len", 64]
    command = [PROGRAM, "--model", "tiny", *sizes, "--train-data", stories(), "--steps", 1]
    def arrays(rows):
        return rows["total"] - rows["CUDA, about"]
    planned = arrays(plan("--model", "tiny", *sizes)[1])
    os.makedirs(folder(), exist_ok=True)
    run([*command, "--metrics", folder("m.jsonl")], env={"EMU_MEM": f"{(planned + 0.15) / 1024:.9f}"})  # MiB, printed to a tenth
    check_near(column(folder("m.jsonl"), "mem")[0] / 2**20, planned, 0.1, "memory taken and memory planned")
    r = run(command, env={"EMU_MEM": f"{(planned - 0.15) / 1024:.9f}"}, code=1)
    for part in ("weights", "activations", "total", "out of memory", "--batch-size"):
        check(part in r.err, f"{part!r} is not in {r.err}")
    check(len(said(r)) == 1, r.err)
    for mode in (["--eval", "--val-data", stories(), *sizes], ["--generate", 4, "--seq-len", 64],
                 ["--dump", folder("d.safetensors"), "--train-data", stories(), *sizes]):
        r = run([PROGRAM, "--model", "tiny", *mode], env={"EMU_MEM": "0.0001"}, code=1)
        rows = families_of(r.err)  # of this mode alone: without gradients, if it needs none
        check(len(said(r)) == 1 and "out of memory" in r.err, r.err)
        for family in ("gradients", "AdamW moments", "backward buffers"):
            check((rows[family] > 0) == (mode[0] == "--dump"), f"{family}: {r.err}")
        for more, code in ((0.15, 0), (-0.15, 1)):
            run([PROGRAM, "--model", "tiny", *mode], env={"EMU_MEM": f"{(arrays(rows) + more) / 1024:.9f}"}, code=code)


@emu_test
def without_a_gpu_it_says_what_to_do_instead():
    r = run([*TINY, "--train-data", stories()], env={"EMU_DEVICES": "0"}, code=1)
    check(len(said(r)) == 1 and "train_moe_cpu" in said(r)[0] and "train_moe_emu" in said(r)[0], r.err)


@emu_test
def a_gpu_that_cannot_run_the_program_is_told_from_no_gpu():  # P3, P4; the driver's answers are given by the test
    write(folder("answers.cu"), """
        #include <cuda_runtime.h>
        #include <stdlib.h>
        static int answer(const char* what, int other) { return getenv(what) ? atoi(getenv(what)) : other; }
        #define cudaGetDeviceCount(count) (*(count) = 1, (cudaError_t)answer("COUNT", cudaSuccess))
        #define cudaDriverGetVersion(version) (*(version) = answer("DRIVER", 13000), cudaSuccess)
        #define cudaGetDeviceProperties(p, device) ((p)->major = answer("MAJOR", 9), (p)->minor = 0, strcpy((p)->name, "Card"), cudaSuccess)
        #define cudaFuncGetAttributes(a, kernel) ((void)(kernel), (cudaError_t)answer("LOAD", cudaSuccess))
        #include "llmc/cuda_device.h"
        __global__ void kernel() {}
        int main() { cuda_count_devices(); cuda_use_device(0, kernel); }""")
    run([os.path.join(ROOT, "dev/emu/emucc"), "-I" + ROOT, "-o", folder("answers"), folder("answers.cu")])
    run([folder("answers")])
    for env, part in (({"COUNT": "35", "DRIVER": "11080"}, "too old: it knows CUDA up to 11.8"), ({"DRIVER": "0", "COUNT": "35"}, "not installed"),
                      ({"COUNT": "100"}, "the driver finds none"), ({"COUNT": "999"}, "no GPU can be used"), ({"MAJOR": "7"}, "needs 8.0"),
                      ({"LOAD": "209"}, "not built for Card (sm_90)"), ({"LOAD": "222"}, "GPU_ARCH=sm_90")):
        r = run([folder("answers")], env=env, code=1)
        check(r.err.count("\n") == 1 and part in r.err and "train_moe_cpu" in r.err and "train_moe_emu" in r.err, f"{env}: {r.err}")


@test
def the_profile_counts_launches_and_host_syncs():
    def profile(*options):
        text = run([*TINY, "--train-data", stories(), "--steps", 3, "--grad-accum", 2, "--profile", *options]).out
        line = re.search(r"a microbatch: ([0-9.]+) kernel launches and matrix products, the host waited ([0-9.]+) times within it", text)
        check(line and "attention" in text and "other" in text, text)
        return float(line.group(1)), float(line.group(2))
    launches, waits = profile()
    check(launches > 50 and waits * 2 <= 1, f"a step of two microbatches waits {2 * waits} times, once is enough; {launches} launches")
    loop_launches, loop_waits = profile("--experts", "loop")
    check(loop_waits >= 2 and loop_launches > launches, "--experts loop waits in each of two layers, and launches more")


@emu_test
def a_step_waits_for_nothing_but_the_batch_before_and_its_end():  # whatever --profile counts: all calls that block, after step 1 was saved
    (command, count), blocking = runs_of_one_rank()["default"], r"cuda(\w+Synchronize|Malloc\w*|Mem(cpy|set)\w*(?<!Async))"
    os.makedirs(folder(), exist_ok=True)
    def late(*options):
        sites, = traced([*command, "--grad-accum", 2, *options], count)
        return sorted((f, site.split(":")[0]) for (f, site), (_, late) in sites.items() if late and re.fullmatch(blocking, f))
    wanted = [("cudaEventSynchronize", "llmc/multi_gpu.h"), ("cudaMemcpy", "train_moe.cu")]  # the latter of the save after step 2
    check(late() == wanted, f"{late()}")
    check(late("--experts", "loop") == sorted([*wanted, ("cudaStreamSynchronize", "train_moe.cu")]), "--experts loop waits in no layer")


@emu_test
def shared_memory_and_blocks_fit_every_architecture():  # P6
    program = emulated("fast", "test_moe.cu")
    for sm in ("80", "89", "120"):  # at most 163, 99 and 99 KiB a block
        for claim in ("rd_matches_cpu[head_dim_128]", "rd_matches_cpu[gqa_8_to_1]", "hugging_face[tied]"):  # heads of 128, 16 and 64
            r = run([program, claim], env={"EMU_SM": sm})
            check(" 0 failed" in r.out and not r.out.startswith("0 passed") and "emu:" not in r.err, f"sm_{sm}: {r.out[-300:]}{r.err[-300:]}")


@emu_test
def flash_attention_leaves_out_tiles_that_are_masked():  # counted in products of tensor cores: that the result is right says nothing
    def products(T, doc_ids):
        batch = batch_file(folder("batch.safetensors"), 1, T, doc_ids=np.array([doc_ids], np.int32))
        run([PROGRAM, "--model", "tiny", "--batch", batch, "--doc-mask", "--dump", folder("dump.safetensors")],
            env={"EMU_COUNT": "1", "EMU_COUNT_OUT": folder("counts")})
        rows = [line.split() for line in read(folder("counts")).decode().splitlines() if line.startswith("attention")]
        return {row[0]: int(row[-1]) for row in rows if int(row[-1]) > 0}
    half, whole, apart = products(128, [0] * 128), products(256, [0] * 256), products(256, list(range(256)))
    check(len(whole) == 3, f"forward, d_k with d_v, and d_q have products: {whole}")
    for kernel, count in whole.items():  # with tiles of 128 x 64: 2 + 4 of 8 where there were 2 of 2, and the 4 on the diagonal
        check(count < 3.8 * half[kernel], f"{kernel}: {half[kernel]} products at T = 128, {count} at 256: as many above the diagonal as below?")
        check(apart[kernel] < 0.75 * count, f"{kernel}: {apart[kernel]} products where no token sees another, {count} where each sees all before it")


# ----------------------------------------------------------------------------
# silent under the checkers

EVERYTHING = ["--doc-mask", "--grad-accum", 2, "--z-loss-coef", "1e-3", "--batch-size", 1, "--seq-len", 12]


def check_silent(mode, count, *options, steps=3, command=None):
    program = emulated(mode)
    command = [program, *(command or ["--model", "tiny", *EVERYTHING, "--train-data", stories()]), *(["--steps", steps] if steps else []), *options]
    r = ranks(count, command, env={"ASAN_OPTIONS": "detect_leaks=0", "EMU_NCCL_TIMEOUT": "300", "MOE_NCCL_TIMEOUT": "300"})
    for word in SILENT:
        check(word not in r.err, f"--{mode}, {count} ranks, {options}: {r.err[-1500:]}")


def claim(name, function):
    function.__name__ = name
    emu_test(function)


def silent_training(mode):
    val = ["--val-data", stories("val", seed=2, documents=4), "--val-every", 2, "--val-steps", 1]
    looks = ["--init", untrained(), "--seq-len", 12]
    at_once(lambda: check_silent(mode, 1, *val, "--sample-every", 3, "--save-every", 2, "--out", folder("one")),
            lambda: check_silent(mode, 1, "--attention", "naive", "--experts", "loop", "--optimizer", "simple", "--pinned", 0, steps=1),
            lambda: check_silent(mode, 1, "--recompute", "moe", "--master", 0, steps=1),
            lambda: check_silent(mode, 1, steps=1, command=golden("odd", "--aux-loss-coef", "1e-2")[1:]),
            lambda: check_silent(mode, 1, steps=1, command=golden("mixed")[1:]),
            *(lambda options=options: check_silent(mode, 1, steps=None, command=[*looks, *options]) for options in (
                ["--batch-size", 3, "--eval-choices", choices()], ["--batch-size", 3, "--eval", *val[:2]], ["--generate", 3])))


def silent_ranks(mode):
    at_once(lambda: check_silent(mode, 2, "--out", folder("two")),
            lambda: check_silent(mode, 2, "--allreduce", "every", steps=1),
            lambda: check_silent(mode, 2, "--allreduce", "every", "--allreduce-dtype", "fp32", "--overlap", 0, steps=1))


for mode in ("check", "asan"):
    claim(f"training_is_silent_under_{mode}", lambda mode=mode: silent_training(mode))
    claim(f"two_ranks_are_silent_under_{mode}", lambda mode=mode: silent_ranks(mode))


# ----------------------------------------------------------------------------
# every call fails once

WAITING = {"EMU_LAZY_STREAM": "1"}  # so that ranks reach the calls that wait for others
# calls whose failure changes nothing that matters, and why
HARMLESS = {"cudaDriverGetVersion": "only words a message", "cudaRuntimeGetVersion": "only words a message"}


def harmless(function, site):
    file, line = site.split(":")
    text = read(os.path.join(ROOT, file)).decode().splitlines()[int(line) - 1]
    asked_again = "cudaEventQuery(g->" in text  # by a rank that waits; an error shows in the event it waits for
    return function in HARMLESS or asked_again or text.strip().startswith("cudaGetLastError();")  # forgets an error that was looked at


def resumable():
    """A folder with the checkpoint of step 1, for runs that start with --resume."""
    if not os.path.exists(folder("resumable")):
        run([*TINY, "--train-data", stories(), "--doc-mask", "--steps", 1, "--save-every", 1, "--out", folder("resumable")])
    return folder("resumable")


def place_for(command):
    """--out of a run of `command`, where it saves: a new folder, with the checkpoint of step 1 where the run resumes."""
    at = tempfile.mkdtemp(dir=folder())
    if "--resume" in command:
        shutil.copytree(resumable(), at, dirs_exist_ok=True)
    return at, ["--out", at] if "--save-every" in command else []


def runs_of_one_rank():
    """name -> command, and how many ranks. Those that save do so after each step."""
    data, saving = ["--train-data", stories(), "--doc-mask"], ["--steps", 2, "--save-every", 1]
    return {"default": ([*TINY, *data, *saving], 1),
            "plain": ([*TINY, *data, *saving, "--attention", "naive", "--experts", "loop", "--optimizer", "simple"], 1),
            "recompute": ([*TINY, *data, *saving, "--recompute", "moe", "--master", 0, "--pinned", 0], 1),
            "mixed": (golden("mixed", "--force-routing", *saving), 1),
            "profile": ([*TINY, *data, *saving, "--profile", "--trace", folder("t.json"), "--val-data", stories(), "--val-steps", 1], 1),
            "heads": ([PROGRAM, "--config", heads_of_128(), *TINY[3:], *data, *saving], 1),
            "dump": (golden("odd", "--dump", folder("dump.safetensors")), 1),
            "sample": ([PROGRAM, "--init", untrained(), "--seq-len", 8, "--generate", 3], 1),
            "choices": ([PROGRAM, "--init", untrained(), "--seq-len", 8, "--batch-size", 1, "--eval-choices", choices()], 1)}


def resumed_runs():
    """The same from a checkpoint. What a start calls fails while it is read; what a step calls fails in the runs above."""
    command = [PROGRAM, "--resume", "--steps", 2, "--save-every", 1]
    return {"resume": (command, 1), "resume_two": ([*command, "--batch-size", 1], 2)}


def runs_of_two_ranks():
    # three steps, because rank 1 may be in its second while rank 0 still saves the first
    command = [*RANKS, "--train-data", stories(), "--steps", 3, "--save-every", 1]
    return {"two": (command, 2), "every": ([*command, "--allreduce", "every", "--allreduce-dtype", "fp32", "--overlap", 0], 2)}


def traced(command, count):
    """The call sites of a run, of each rank: see call_sites. Of a run that resumes those it calls before its first step, when it opens
    its metrics; its checkpoint is there all the time."""
    (at, out), resumes = place_for(command), "--resume" in command
    metrics, saved = folder(os.path.basename(at) + ".jsonl"), step_folder(at, 1)
    env = {"TRACE_CALLS": at + ".trace", "CALLS_AFTER": metrics if resumes else saved, **(WAITING if count > 1 else {})}
    ranks(count, [*command, *out, *(["--metrics", metrics] if resumes else [])], env=env)
    traces = [f"{at}.trace" + (f".{r}" if count > 1 else "") for r in range(count)]
    if resumes:
        return [{key: (address, True) for key, (address, _) in call_sites(PROGRAM, [path], ("0",)).items()} for path in traces]
    return [call_sites(PROGRAM, [path]) for path in traces]


def failures_of(runs, known=()):
    """(function, site) -> address, whether step 1 is saved by then, rank, command, ranks: how each call site of the runs is to fail. In the
    first run, and on the last rank, that calls from there after step 1 was saved, or that calls from there at all."""
    jobs = {}
    os.makedirs(folder(), exist_ok=True)
    for (command, count), by_rank in zip(runs.values(), at_once(*(lambda r=r: traced(*r) for r in runs.values()))):
        for rank, sites in reversed(list(enumerate(by_rank))):
            for key, (address, late) in sites.items():
                if key not in known and (key not in jobs or late > jobs[key][1]):
                    jobs[key] = (address, late, rank, command, count)
    return jobs


def check_failure(function, site, address, late, rank, command, count, resume):
    """The first call (after the checkpoint of step 1, if `late`) from this address fails: one message that names it, exit code 1, no hang,
    and the last checkpoint opens: `resume` does the next step from it."""
    out, options = place_for(command)
    command = [*command, *options]
    env = {"EMU_NCCL_TIMEOUT": "20", "MOE_NCCL_TIMEOUT": "20", "OMP_NUM_THREADS": "1", "EMU_DEVICES": str(count)}
    env.update({"CALLS_AFTER": step_folder(out, 1)} if late else {})
    fail = {"EMU_FAIL": f"{function}:1", "FAIL_AT": address}
    if count == 1:
        r = run(command, env={**env, **fail}, code=None, timeout=120)
    else:  # one rank of them
        each = [[*(o for k, v in fail.items() for o in ("-x", f"{k}={v}") if i == rank), *command] for i in range(count)]
        r = run([*MPIRUN, "-np", 1, *each[0], *(o for c in each[1:] for o in (":", "-np", 1, *c))], env={**env, **WAITING}, code=None, timeout=120)
    what = f"{function} at {site}"
    polls = harmless(function, site) and site.startswith("llmc/multi_gpu.h:")  # a rank that waits: perhaps less often this time
    check("fails as asked" in r.err or polls, f"{what}: was not called")
    if harmless(function, site):
        return
    check(r.code == 1, f"{what}: exit code {r.code}; {r.err[-300:]}")
    check(len(said(r)) == 1, f"{what}: {len(said(r))} messages: {said(r)}")
    named = "launch of" if function == "cudaLaunchKernel" else function.removesuffix("_v2")
    check(named in said(r)[0] or function in ("cudaGetDeviceCount", "cudaGetLastError"), f"{what}: {said(r)[0]}")
    file, line = site.split(":")
    place = re.search(r"([\w.]+):(\d+)\)", said(r)[0])  # a launch is looked at behind its last line, a call at one of its lines
    check(function == "cudaGetDeviceCount" or (place and place[1] == os.path.basename(file) and abs(int(place[2]) - int(line)) <= 8),
          f"{what}: another place is named: {said(r)[0]}")
    steps = steps_in(out)
    check(steps or not late, f"{what}: no checkpoint is left")
    for step in steps:
        tensors_of(step_folder(out, step) + "/model.safetensors"), tensors_of(step_folder(out, step) + "/trainer_state.safetensors")
        check(int(state_of(step_folder(out, step))["step"]) == step, f"{what}: trainer_state.json")
    if steps:
        for _ in range(50):  # mpirun may be back before the last rank that it has killed is gone
            again = run([resume, "--resume", "--out", out, "--steps", steps[-1] + 1], code=None)
            if "another process" not in again.err:
                break
            time.sleep(0.2)
        check(again.code == 0 and steps_in(out)[-1] == steps[-1] + 1, f"{what}: no going on from step {steps[-1]}: {again.err[-300:]}")
    shutil.rmtree(out)


def each_fails(jobs, late):
    """Fails each of them once; at least `late` of them when there is a checkpoint. Every twelfth goes on in the GPU trainer, the others in
    train_moe_cpu, which takes a tenth of the time."""
    def attempt(i, key, job):
        try:
            check_failure(*key, *job, PROGRAM if i % 12 == 0 else CPU_TRAINER)
        except Failure as e:
            return str(e)
    most = 6 if any(job[-1] > 1 for job in jobs.values()) else 2  # several ranks mostly sleep: each gives the others time to speak
    failures = [f for f in at_once(*(lambda i=i, job=job: attempt(i, *job) for i, job in enumerate(jobs.items())), most=most) if f]
    check(not failures, f"{len(failures)} of {len(jobs)} calls: " + "\n     ".join(failures[:12]))
    saved = sum(job[1] for job in jobs.values())
    check(saved >= late, f"{saved} of {len(jobs)} calls fail after a checkpoint, expected {late}")


@emu_test
def every_call_that_fails_is_reported_and_ends_the_run():
    each_fails(failures_of(runs_of_one_rank()), 120)


@emu_test
def every_call_that_fails_on_one_rank_ends_all():
    alone = failures_of(dict(list(runs_of_one_rank().items())[:1]))
    each_fails(failures_of(runs_of_two_ranks(), alone), 20)


@emu_test
def every_call_that_fails_while_resuming_leaves_the_checkpoint():
    first, second = resumed_runs().items()
    alone = failures_of(dict([first]))
    both = failures_of(dict([second]), alone)
    for function in ("cudaGetDeviceCount", "cudaMalloc", "cudaMemcpy", "cudaStreamCreateWithFlags", "cublasLtCreate"):
        check(any(f == function for f, _ in alone), f"{function} is not among the calls of a resumed start: {sorted(alone)}")
    each_fails({**both, **alone}, 35)


# what none of these runs reaches, by function or name of the call, and why
UNREACHED = {"cudaMemset2DAsync": "a product over no terms at all: none of the trainer's is, its matrices have at least a column",
             "gemm_peak": "not in the emulator: it has no speed worth knowing",
             "dry_run": "asks whether there is a GPU, and goes on without: dry_run_needs_no_gpu"}
# files that none of these runs has, and why
NOT_HERE = {"llmc/cudnn_attention.cpp": "the emulator has no cuDNN: every_failing_call_of_cudnn_says_which_attention_needs_none",
            "llmc/cuda_check.h": "macros: what they check counts where they are used",
            "llmc/nccl_check.h": "asks NCCL for the words of a failure, when there is one"}
NOT_CALLS = ("cudaCheck", "cublasCheck", "ncclCheck", "cudaGetErrorString", "ncclGetErrorString")


def calls_in(file):
    """(function, first line, last line, where) of each call of CUDA, cuBLASLt and NCCL in a source file, launches and what our macros call."""
    lines = [re.sub(r"//.*", "", line) for line in read(os.path.join(ROOT, file)).decode().splitlines()]
    where, left_out = "", False
    for i, line in enumerate(lines, 1):
        if match := re.match(r"[a-z].*?(\w+)\(", line):
            where = match.group(1)
        if line.startswith("#"):  # without MPI or NCCL
            left_out = line.startswith(("#if defined(NO_MPI)", "#ifdef ONE_RANK_ONLY")) or (left_out and not line.startswith(("#else", "#endif")))
        if left_out or where in UNREACHED or any(name in line for name in UNREACHED):
            continue
        code = re.sub(r'"[^"]*"', "", line)
        names = [n for n in re.findall(r"\b((?:cuda|cublasLt|nccl)[A-Z]\w*)(?:<[^<>]*>)?\(", code) if n not in NOT_CALLS]
        for word, name in (("<<<", "cudaLaunchKernel"), ("launchCheck(", "cudaGetLastError"), ("streamWait(", "cudaStreamSynchronize")):
            names += [name] * (word in code)
        last = next((j for j in range(i, min(i + 6, len(lines))) if ";" in lines[j - 1]), i)
        for name in names:  # a kernel's name may stand above its <<<
            yield name, i - 3 * (name == "cudaLaunchKernel"), last, where


@emu_test
def no_call_site_is_left_out():
    failed, missed, count = {**failures_of(runs_of_one_rank()), **failures_of(runs_of_two_ranks())}, [], 0
    sources = [os.path.join("llmc", name) for name in sorted(os.listdir(os.path.join(ROOT, "llmc"))) if not name.endswith(".md")]
    for file in ["train_moe.cu", *(f for f in sources if f not in NOT_HERE)]:
        sites = {(function.removesuffix("_v2"), int(site.split(":")[1])) for function, site in failed if site.startswith(file + ":")}
        for name, first, last, where in calls_in(file):
            count += 1
            if not any((name, line) in sites for line in range(first, last + 1)):
                missed.append(f"{name} in {where}, {file}:{last}")
    check(count >= 195, f"only {count} calls are found in the sources")
    check(not missed, f"nobody makes {len(missed)} of {count} calls fail: " + "; ".join(missed))


@emu_test
def every_failing_call_of_cudnn_says_which_attention_needs_none():  # P5
    # with a cuDNN that computes nothing (cudnn_stub): whether the real one computes what it should, a machine with it has to show
    source = read(os.path.join(ROOT, "llmc/cudnn_attention.cpp")).decode()
    calls = set(re.findall(r"\b(cuda[A-Z]\w*|cudnn[A-Z]\w*|build|get_workspace_size|execute)\((?!Plan)", source))
    fails = {"cudnnCreate", "cudnnSetStream", "build", "get_workspace_size", "execute", "cudaStreamSynchronize", "cudaFree", "cudaMalloc"}
    check({c for c in calls if not c.startswith(("cudnnGet", "cudaCheck"))} == fails, f"it calls {calls}")
    stub = os.path.join(ROOT, "dev/test/cudnn_stub")
    os.makedirs(folder(), exist_ok=True)
    run([os.path.join(ROOT, "dev/emu/emucc"), "-I" + ROOT, "-I" + stub, "-o", folder("train_moe"), stub + "/calls.cu"])
    check(run([folder("train_moe")]).out == "done\n", "it does not run")
    twice = {"cudnnSetStream", "build", "get_workspace_size", "execute"}  # of forward, and of backward
    for function, call in [*((f, 1) for f in sorted(fails)), *((f, 2) for f in sorted(twice))]:
        r = run([folder("train_moe")], env={"EMU_FAIL": f"{function}:{call}"}, code=1)
        check(len(said(r)) == 1 and r.out == "", f"{function}: {r.out}{r.err}")
        parts = [function] if function.startswith("cuda") else ["--attention flash needs no cuDNN", "cuDNN 91000" if function in twice - {
            "cudnnSetStream"} else function]
        check(all(part in said(r)[0] for part in parts), f"{function}: {said(r)[0]}")
    old = said(run([folder("train_moe")], env={"EMU_CUDNN": "80900"}, code=1))
    check(len(old) == 1 and "needs cuDNN 9, this is 80900" in old[0], f"{old}")


main()
