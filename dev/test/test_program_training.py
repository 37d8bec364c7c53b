"""What a run computes, says and writes, with the whole trainer: the same for the same command, however it is split, whatever it
is switched to; learning rates, sizes and memory against independent sums; a run that goes wrong stops in time. run.sh runs what is
marked @test with the GPU trainer, too; of its numbers test_gpu_trainer.py says more."""

import glob
import math
import resource
import subprocess

from program import *

TINY = [PROGRAM, "--model", "tiny", "--batch-size", 2, "--seq-len", 16, "--lr", "1e-2"]
GOLDENS = os.path.join(ROOT, "dev", "test", "goldens")
FEW = 2 if GPU else 8  # steps, where a few would prove as much


def stories(name="train", seed=1, documents=60):
    return shard(folder(f"data/{name}.bin"), tokens_of(text_of(documents, seed)))


def train(name, *options, steps=5, data=True, base=TINY):
    """A run that writes name.jsonl; returns its metrics."""
    os.makedirs(folder(), exist_ok=True)
    run([*base, *(["--train-data", stories()] if data else []), "--steps", steps, "--metrics", folder(name + ".jsonl"), *options])
    return metrics(folder(name + ".jsonl"))


# ----------------------------------------------------------------------------
# the same numbers


@test
def the_same_command_twice_gives_the_same_bytes():  # N22; relative paths, so that the command lines kept in the checkpoints agree
    stories()
    for name in ("a", "b"):
        os.makedirs(folder(name))
        run([*TINY, "--train-data", "../data/train.bin", "--steps", 2 * FEW, "--save-every", FEW, "--out", "out", "--metrics", "m.jsonl"],
            cwd=folder(name))
    check_same_metrics(metrics(folder("a/m.jsonl")), metrics(folder("b/m.jsonl")))
    a, b = files_in(folder("a/out")), files_in(folder("b/out"))
    different = [name for name in a if name != ".lock" and a[name] != b.get(name)]
    check(a.keys() == b.keys() and not different, f"they differ in {different}")


@test
def sampling_and_validation_change_no_bit_of_training():  # U4, N8, M18
    plain = train("plain", steps=FEW)
    seen = train("seen", "--val-data", stories("val", seed=2), "--val-every", 1, "--val-steps", FEW, "--sample-every", 1, steps=FEW)
    check(all("val_loss" in line for line in seen), "there was no validation")
    check_same_metrics(plain, [{k: v for k, v in line.items() if k != "val_loss"} for line in seen])


@cpu_test
def each_speed_switch_alone_gives_the_same_losses():
    default = [line["loss"] for line in train("default", steps=8)]
    for switch in (["--attention", "naive"], ["--experts", "loop"], ["--optimizer", "simple"], ["--loader", "inline"], ["--threads", 1]):
        losses = [line["loss"] for line in train(switch[0], *switch, steps=8)]
        for step, (a, b) in enumerate(zip(default, losses), 1):
            check_near(a, b, 1e-5 * step * a, f"{' '.join(map(str, switch))}, loss of step {step}")


def real_text():
    """Sayings of Debian's package `fortunes`, or what this project says about itself, as documents."""
    files = [f for f in sorted(glob.glob("/usr/share/games/fortunes/*")) if "." not in os.path.basename(f)]
    files = files or sorted(glob.glob(os.path.join(ROOT, "**", "*.md"), recursive=True))
    text = b"\n%\n".join(read(f) for f in files)[:500000].decode(errors="ignore")
    return write(folder("real.txt"), "<|endoftext|>".join(text.split("\n%\n")))


@cpu_test
def bf16_follows_the_curve_of_fp32_over_200_steps_of_real_text():
    if not bf16_here():
        return
    data = ["--tokenize", "inline", "--train-data", real_text(), "--batch-size", 16, "--seq-len", 64, "--lr", "1e-3"]
    curves = []
    for precision in ("fp32", "bf16"):
        run([PROGRAM, "--model", "tiny", *data, "--steps", 200, "--precision", precision, "--metrics", folder(precision)])
        curves.append(np.convolve(column(folder(precision), "ce_loss"), np.ones(20) / 20, "valid"))
    check(curves[0][0] > 3.5 and curves[0][-1] < 2.8, f"it learned nothing: {curves[0][0]} .. {curves[0][-1]}")
    check(0 < np.abs(curves[0] - curves[1]).max() <= 0.01, f"means of 20 steps differ by {np.abs(curves[0] - curves[1]).max()}")


@cpu_test
def threads_change_no_bit():
    check_same_metrics(train("one", "--threads", 1, steps=8), train("two", "--threads", 2, steps=8))


@cpu_test
def accumulation_of_the_same_tokens_gives_the_same_loss_and_norm():  # N7; the balance loss is per microbatch by definition
    def first(name, B, A):
        line = train(name, "--grad-accum", A, "--aux-loss-coef", 0, base=[*TINY[:3], "--batch-size", B, *TINY[5:]], steps=3)
        return [(x["loss"], x["grad_norm"]) for x in line]
    whole = first("1", 8, 1)
    for B, A in ((4, 2), (2, 4), (1, 8)):
        for step, (a, b) in enumerate(zip(whole, first(str(A), B, A)), 1):
            check_near(a[0], b[0], 2e-6 * step * a[0], f"accumulation {A}, loss of step {step}")
            check_near(a[1], b[1], 2e-5 * step * a[1], f"accumulation {A}, gradient norm of step {step}")


@cpu_test
def accumulation_of_one_batch_file_changes_nothing():  # N7
    batch = batch_file(folder("batch.safetensors"), 3, 12)
    runs = [train(f"{A}", "--batch", batch, "--grad-accum", A, data=False, base=[*TINY[:3], "--lr", "1e-2"]) for A in (1, 2, 4)]
    for lines in runs[1:]:
        for a, b in zip(runs[0], lines):
            check_near(a["loss"], b["loss"], 1e-5 * a["loss"], f"loss of step {a['step']}")
            check_near(a["grad_norm"], b["grad_norm"], 1e-4 * a["grad_norm"], f"gradient norm of step {a['step']}")
            check(a["expert_load"] == b["expert_load"], "the load of the experts depends on the split")


@test
def document_mask_on_shards_is_that_of_a_batch_with_doc_ids():  # D10: an EOT opens its document
    tokens = tokens_of("<|endoftext|>".join(["a tale", "of", "two", "short and long documents", "in rows", "of 24 tokens"]))[:49]
    x = np.array(tokens[:48], np.int32).reshape(2, 24)
    y = np.array(tokens[1:49], np.int32).reshape(2, 24)
    ids = np.cumsum(x == EOT, axis=1).astype(np.int32)
    check(len(set(ids.ravel())) > 3 and x[1, 0] != EOT, "the rows prove too little")
    data = shard(folder("data/two.bin"), tokens)
    batch = batch_file(folder("batch.safetensors"), 2, 24, tokens=x, targets=y, doc_ids=ids)
    start = [PROGRAM, "--model", "tiny", "--steps", 3, "--doc-mask"]
    run([*start, "--train-data", data, "--batch-size", 2, "--seq-len", 24, "--dump", folder("a")])
    run([*start, "--batch", batch, "--dump", folder("b")])
    a, b = load_file(folder("a")), load_file(folder("b"))
    order = [0, 1] if np.allclose(a["logits"][0], b["logits"][0], atol=1e-5) else [1, 0]  # the shard's rows are shuffled
    diff = np.abs(a["logits"] - b["logits"][order]).max()
    check(diff <= 1e-5, f"logits differ by {diff}")
    check_near(a["loss"][0], b["loss"][0], 1e-5, "loss")
    run([o for o in [*start, "--batch", batch, "--dump", folder("c")] if o != "--doc-mask"])
    check(np.abs(load_file(folder("c"))["logits"] - b["logits"]).max() > 1e-3, "the mask makes no difference")


@test
def a_dump_is_of_one_microbatch_however_many_a_step_has():
    os.makedirs(folder(), exist_ok=True)
    command = [PROGRAM, "--model", "tiny", "--train-data", stories(), "--batch-size", 2, "--seq-len", 24, "--aux-loss-coef", 1, "--z-loss-coef", 1]
    for accum in (1, 3):
        run([*command, "--grad-accum", accum, "--dump", folder(f"{accum}")])
    check(read(folder("1")) == read(folder("3")), "loss or gradients depend on --grad-accum")


@test
def no_token_sees_the_document_before_its_own():  # D10
    x = np.array([[EOT, 65, 66, 67, EOT, 70, 71, 72]], np.int32)
    other = np.array([[EOT, 97, 98, 99, EOT, 70, 71, 72]], np.int32)
    ids = np.cumsum(x == EOT, axis=1).astype(np.int32)
    logits = {}
    for mask in (["--doc-mask"], []):
        for name, tokens in (("a", x), ("b", other)):
            batch = batch_file(folder(name), 1, 8, tokens=tokens, targets=tokens, doc_ids=ids)
            run([PROGRAM, "--model", "tiny", "--batch", batch, "--dump", folder("dump"), *mask])
            logits[name] = load_file(folder("dump"))["logits"][0, 4:]
        equal = logits["a"].tobytes() == logits["b"].tobytes()
        check(equal == bool(mask), f"with {mask} the second document's logits are {'equal' if equal else 'different'}")


# ----------------------------------------------------------------------------
# it learns, it stops


@cpu_test
def one_batch_is_overfitted_below_a_tenth_in_200_steps():  # U5
    batch = batch_file(folder("batch.safetensors"), 4, 16)
    lines = train("over", "--batch", batch, steps=200, data=False, base=[PROGRAM, "--model", "tiny", "--lr", "5e-3"])
    check(lines[-1]["ce_loss"] < 0.1, f"loss {lines[-1]['ce_loss']} after 200 steps")
    check(lines[0]["ce_loss"] > 5, f"loss {lines[0]['ce_loss']} before the first")


@test
def a_loss_that_is_not_finite_stops_before_the_update():  # N12, N14
    out = folder("out")
    line = expect_error([*TINY[:-1], "1e30", "--train-data", stories(), "--steps", 9, "--warmup-steps", 0, "--save-every", 1,
                         "--out", out, "--metrics", folder("m.jsonl"), "--trace", folder("t.json"), "--grad-accum", 2],
                        "not finite", out)
    step = int(line.split("step ")[1].split(":")[0])
    check(2 <= step <= 4, line)
    check(steps_in(out) == list(range(1, step)) and column(folder("m.jsonl"), "step") == list(range(1, step)), f"{steps_in(out)}")
    check(not [n for n in os.listdir(out) if n.startswith(".saving")], "it left half a checkpoint")
    for tensor in tensors_of(step_folder(out, step - 1) + "/model.safetensors").values():
        check(np.isfinite(tensor).all(), "the last checkpoint is not finite")
    json.loads(read(folder("t.json")))


@test
def weights_that_are_not_finite_are_not_saved():
    out = folder("out")
    expect_error([*TINY[:-1], "1e39", "--train-data", stories(), "--steps", 1, "--warmup-steps", 0, "--out", out], "is not saved")
    check(os.listdir(out) == [".lock"], f"left: {os.listdir(out)}")


# ----------------------------------------------------------------------------
# against independent formulas


def rate(schedule, step, steps, warmup, lr, low):
    """Step counts from 0."""
    if step < warmup:
        return lr * (step + 1) / warmup
    if schedule == "cosine":
        return low + (lr - low) * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
    first = max(warmup, steps - round(steps * 0.2))
    return lr if schedule == "constant" or step < first else low + (lr - low) * (1 - (step - first) / (steps - first))


@cpu_test
def learning_rates_are_those_of_the_formula():  # N23 to N25
    for schedule in ("constant", "cosine", "wsd"):
        for warmup in (0, 1, 4, 10, 11):
            lines = train("m", "--schedule", schedule, "--warmup-steps", warmup, "--lr=3e-3", "--min-lr", "1e-4", steps=10, base=TINY[:-2])
            for line in lines:
                want = rate(schedule, line["step"] - 1, 10, warmup, 3e-3, 1e-4)
                check_near(line["lr"], want, 1e-8 * 3e-3 + 1e-9 * want, f"{schedule}, warm-up {warmup}, step {line['step']}")


def parameters(c):
    """Total, active and matmul parameters of a config.json without dense layers, counted anew."""
    C, V, L, HD = c["hidden_size"], c["vocab_size"], c["num_hidden_layers"], c["head_dim"]
    attention = HD * C * (2 * c["num_attention_heads"] + 2 * c["num_key_value_heads"])
    expert, router, norms = 3 * C * c["moe_intermediate_size"], c["num_experts"] * C, 2 * C + 2 * HD
    def model(experts, embeddings, norm_share):
        return L * (attention + router + experts * expert + norm_share * norms) + embeddings * V * C + norm_share * C
    K = c["num_experts_per_tok"]
    return model(c["num_experts"], 2, 1), model(K, 2, 1), model(K, 1, 0)


QWEN_30B = dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_size=2048, vocab_size=151936, num_hidden_layers=48,
                num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
                moe_intermediate_size=768, intermediate_size=6144, norm_topk_prob=True, rope_theta=1e6, rms_norm_eps=1e-6,
                tie_word_embeddings=False)
SMOL = dict(hidden_size=896, vocab_size=151936, num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=16, head_dim=64,
            num_experts=16, num_experts_per_tok=2, moe_intermediate_size=512)


def plan(*options):
    """What --dry-run prints: its text, and MiB a family."""
    text = run([PROGRAM, *options, "--dry-run"]).out
    rows = {line.rsplit(None, 1)[0].strip(): float(line.split()[-1]) for line in text.splitlines() if line.startswith("  ")}
    return text, rows


@cpu_test
def dry_run_counts_as_an_independent_sum_does():  # N3; without allocating: the address space is limited
    config = write(folder("config.json"), json.dumps(QWEN_30B))
    for options, c in ((["--model", "smol-500m"], SMOL), (["--config", config], QWEN_30B)):
        text, rows = plan(*options, "--batch-size", 4, "--seq-len", 4096)
        total, active, matmul = parameters(c)
        check(f"parameters   {total} total, {active} active a token, {matmul} of them in matrix products" in text, text)
        for family, size in (("weights", 4 * total), ("gradients", 4 * total), ("AdamW moments", 8 * total)):
            check_near(rows[family], size / 2**20, 0.06, family)
        check_near(sum(v for k, v in rows.items() if k != "total"), rows["total"], 0.5, "the sum of the families")
        flop = 6 * matmul + 6 * c["num_hidden_layers"] * c["num_attention_heads"] * c["head_dim"] * 4096
        check(f"FLOP         {flop:.4g} a token" in text, text)
    limited = ["bash", "-c", 'ulimit -v 500000; exec "$@"', "bash", PROGRAM, "--config", config, "--batch-size", 64, "--seq-len", 8192, "--dry-run"]
    check("  total " in run(limited).out, "no plan")


@cpu_test
def dry_run_names_the_largest_batch_that_fits():  # U2
    _, rows = plan("--model", "demo", "--batch-size", 16, "--seq-len", 256)
    def advice(gib):
        return run([PROGRAM, "--model", "demo", "--seq-len", 256, "--dry-run", "--memory", f"{gib:.6f}"]).out.splitlines()[-1]
    check("--batch-size 16" in advice((rows["total"] + 0.1) / 1024), advice((rows["total"] + 0.1) / 1024))
    check("--batch-size 15" in advice((rows["total"] - 0.1) / 1024), advice((rows["total"] - 0.1) / 1024))
    check("not even --batch-size 1" in advice(0.001), advice(0.001))


@cpu_test
def a_run_that_cannot_fit_into_the_machine_is_told_what_would():  # U2; not left to the kernel, which kills
    most = int(run([PROGRAM, "--model", "demo", "--seq-len", 256, "--dry-run"]).out.rsplit("--batch-size ", 1)[1])
    data = shard(folder("data/long.bin"), np.zeros((most + 2) * 256, np.uint32))
    expect_error([PROGRAM, "--model", "demo", "--seq-len", 256, "--batch-size", most + 1, "--train-data", data],
                 "GiB of memory", f"at most --batch-size {most} fits")


@cpu_test
def peak_memory_is_what_dry_run_says():
    stories(documents=900)
    check_peak_memory(0.9)
    if bf16_here():
        check_peak_memory(0.75, "--precision", "bf16")  # room for copies of all activations, of which about half is used


def check_peak_memory(at_least, *options):
    size = ["--model", "demo", "--batch-size", 32, "--seq-len", 256, *options]
    planned = plan(*size)[1]["total"] * 2**20
    check(3e8 < planned < 9e8, f"{planned} bytes are no size for this test")
    code = ("import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); "
            "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)")
    peak = 1024 * int(run(["python3", "-c", code, PROGRAM, *size, "--train-data", folder("data/train.bin"), "--steps", 3,
                           "--out", folder("out" + "".join(options))]).out)
    check(at_least * planned <= peak <= 1.1 * planned, f"peak {peak / 2**20:.0f} MiB, planned {planned / 2**20:.0f} MiB")


# ----------------------------------------------------------------------------
# other modes


def trained_model(steps=30):
    """A tiny model that has learnt a little, with a tokenizer, and its text."""
    text = write(folder("text/a.txt"), text_of(60))
    run([*TINY, "--tokenize", "inline", "--train-data", text, "--steps", steps, "--out", folder("out")])
    return step_folder(folder("out"), steps)


@cpu_test
def generation_at_temperature_zero_is_greedy():
    model = trained_model()
    command = [PROGRAM, "--init", model, "--seq-len", 24, "--generate", 20, "--temperature", 0, "--prompt", "ab"]
    text = run(command).out
    check(text == run([*command, "--seed", 7]).out, "two runs differ")
    tokens = [EOT, *b"ab"]
    while len(tokens) < 23 and tokens[-1] != EOT or len(tokens) == 1:
        x = np.array([tokens], np.int32)
        batch = batch_file(folder("batch"), 1, len(tokens), tokens=x, targets=x)
        run([PROGRAM, "--init", model, "--batch", batch, "--dump", folder("dump")])
        tokens.append(int(load_file(folder("dump"))["logits"][0, -1].argmax()))
    want = bytes(t for t in tokens if t != EOT).decode(errors="replace")
    check(text.split("\n")[0].startswith(want), f"printed {text!r}, greedy is {want!r}")


@test
def generation_follows_its_seed_and_stays_inside_the_context():  # D7
    model = trained_model(steps=FEW)
    command = [PROGRAM, "--init", model, "--seq-len", 8, "--generate", 20 if GPU else 60]
    a, b, c = (run([*command, "--seed", seed]).out for seed in (1, 1, 2))
    check(a == b and a != c, "the seed does not decide")
    check(max(len(line) for line in a.splitlines()) <= 8, "a document is longer than the context")


@test
def eval_equals_the_validation_loss_of_training():  # N26: also with all of the data, and none of it twice
    val = ["--val-data", stories("val", seed=2, documents=4 if GPU else 30)]
    lines = train("m", *val, "--val-every", 2, "--val-steps", 0, "--save-every", 2, "--out", folder("out"), steps=5)
    check([("val_loss" in line) for line in lines] == [False, True, False, True, True], "validated at other steps")
    for step in (2, 4, 5):
        said = run([PROGRAM, "--init", step_folder(folder("out"), step), "--batch-size", 2, "--seq-len", 16, *val, "--eval"]).out
        check_near(float(said.split("validation loss ")[1].split()[0]), lines[step - 1]["val_loss"], 1e-6, f"step {step}")
    again = run([PROGRAM, "--resume", "--out", folder("out"), "--steps", 5, "--eval"]).out
    check_near(float(again.split("validation loss ")[1].split()[0]), lines[-1]["val_loss"], 1e-6, "--resume --eval")


@test
def a_run_of_no_steps_saves_what_it_began_with():
    r = run([*TINY, "--train-data", stories(), "--steps", 0, "--out", folder("out"), "--profile", "--metrics", folder("m.jsonl")])
    check(steps_in(folder("out")) == [0] and read(folder("m.jsonl")) == b"", r.out)
    again = run([PROGRAM, "--resume", "--out", folder("out"), "--steps", 1])
    check("step 1/1" in again.out and steps_in(folder("out")) == [0, 1], again.out)


@cpu_test
def a_folder_name_with_spaces_works():  # U1
    out = folder("a folder with spaces/and another")
    run([*TINY, "--train-data", stories(), "--steps", 1, "--out", out])
    run([PROGRAM, "--resume", "--out", out, "--steps", 2])
    check(steps_in(out) == [1, 2], f"{steps_in(out)}")


# ----------------------------------------------------------------------------
# what a run says


@test
def metrics_have_the_fields_of_the_design():
    lines = train("m", "--val-data", stories("val", seed=2), "--val-every", 2, "--grad-accum", 2)
    names = {"step", "tokens", "loss", "ce_loss", "aux_loss", "grad_norm", "lr", "step_ms", "tokens_per_s", "mfu", "phases",
             "expert_load", "mem", "gemm_share", "dead_experts", "router_entropy"}
    phases = {"data", "embedding", "attention", "qkv_o", "router", "permute", "experts", "lm_head", "norms", "grad_norm", "optimizer",
              "allreduce", "checkpoint", "eval", "other"}
    for line in lines:
        fields = set(line) - {"val_loss"} | ({"gemm_share"} if GPU else set()) # the emulator's rate is not measured
        check(fields == names, f"fields {sorted(fields ^ names)}")
        check(set(line["phases"]) == phases, f"phases {sorted(set(line['phases']) ^ phases)}")
        check(line["tokens"] == line["step"] * 64, "tokens")
        check_near(line["loss"], line["ce_loss"] + 0.01 * line["aux_loss"], 1e-5, "loss = ce_loss + coefficient x aux_loss")
        check_near(line["tokens_per_s"], 64e3 / line["step_ms"], 1e-3 * line["tokens_per_s"], "tokens a second")
        check(len(line["expert_load"]) == 2 and all(1 <= load <= 2 for load in line["expert_load"]), "4 experts top-2: 1 to 2")
        check(1e6 < line["mem"] < 1e9, "mem")
    check(lines[1]["phases"]["eval"] > 0 and lines[0]["phases"]["eval"] == 0, "validation has no time of its own")


@test
def load_is_measured_without_a_balance_loss_and_where_it_is_there():  # M10, M23
    golden = os.path.join(GOLDENS, "mixed")
    batch = os.path.join(golden, "golden.safetensors")
    line = train("m", "--init", golden, "--batch", batch, "--force-routing", "--aux-loss-coef", 0, steps=1, data=False, base=[PROGRAM])[0]
    dense = [l for l in range(len(line["expert_load"])) if f"router.layers.{l}.logits" not in load_file(batch)]
    check(dense and "aux_loss" not in line, "this golden has no dense layer")
    for l, load in enumerate(line["expert_load"]):
        if l in dense:
            check(load is None and line["dead_experts"][l] == 0, f"dense layer {l} has a load of {load}")
            continue
        index = load_file(batch)[f"router.layers.{l}.topk_index"]
        counts = np.bincount(index.ravel(), minlength=load_file(batch)[f"router.layers.{l}.logits"].shape[1])
        check_near(load, counts.max() / counts.mean(), 1e-4, f"load of layer {l}")
        check(line["dead_experts"][l] == int((counts == 0).sum()), f"experts without a token in layer {l}")


@cpu_test
def a_collapsed_router_shows_in_the_metrics_and_the_balance_loss_prevents_it():  # M19
    text = write(folder("text/a.txt"), ("<|endoftext|>" + "the cat sat on the mat. ") * 800)
    text = ["--tokenize", "inline", "--train-data", text]
    run([PROGRAM, "--model", "tiny", *text, "--steps", 0, "--out", folder("model")])
    config = json.loads(read(step_folder(folder("model"), 0) + "/config.json"))
    write(folder("config.json"), json.dumps({**config, "num_experts": 16, "num_local_experts": 16}))
    def last(coefficient):
        options = ["--config", folder("config.json"), *text, "--batch-size", 4, "--seq-len", 64, "--lr", "3e-3", "--aux-loss-coef", coefficient]
        return train(coefficient, *options, steps=100, data=False, base=[PROGRAM])[-1]
    without, balanced = last("0"), last("0.01")
    check(max(without["expert_load"]) > 5 and max(without["dead_experts"]) >= 6, f"of 16 experts top-2, without: {without}")
    check(max(balanced["expert_load"]) < 3 and max(balanced["dead_experts"]) <= 4, f"with: {balanced}")


@test
def router_entropy_is_that_of_the_probabilities():
    golden = os.path.join(GOLDENS, "mixed")
    batch = os.path.join(golden, "golden.safetensors")
    line = train("m", "--init", golden, "--batch", batch, "--force-routing", steps=1, data=False, base=[PROGRAM])[0]
    for l, entropy in enumerate(line["router_entropy"]):
        logits = load_file(batch).get(f"router.layers.{l}.logits")
        check((entropy is None) == (logits is None), f"layer {l}: {entropy}, and its logits are {logits}")
        if logits is not None:
            p = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
            p /= p.sum(axis=-1, keepdims=True)
            check_near(entropy, -(p * np.log(p)).sum(axis=-1).mean(), 5e-3 if GPU else 1e-4, f"entropy of layer {l}") # bf16


@test
def the_trace_says_what_was_run_and_shows_the_loader():
    train("m", "--trace", folder("t.json"), "--grad-accum", 2, steps=3)
    trace = json.loads(read(folder("t.json")))
    about = trace["otherData"]["run"]
    check(about["model"]["num_hidden_layers"] == 2 and about["options"]["grad-accum"] == 2, f"{about}")
    check((about["measured_peak"] or 0) > 1e8 or "emulated" in about["machine"], f"{about}")
    check(about["ranks"] == 1, f"{about}")
    names = {(e["tid"], e["args"]["name"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    check(names == {(0, "host"), (3, "data loader")} | ({(1, "compute stream")} if GPU else set()), f"{names}")
    loaded = [e for e in trace["traceEvents"] if e["name"] == "prepare batch"]
    check(4 <= len(loaded) <= 6 and all(e["tid"] == 3 for e in loaded), f"{len(loaded)} batches of 6 (the first may lie before the trace)")
    layers = [e for e in trace["traceEvents"] if e["name"] == "layer 1"]
    check(len(layers) == 3 * 2 * 2, f"{len(layers)} boxes of layer 1: 3 steps, 2 microbatches, forward and backward")


@cpu_test
def the_profile_adds_up_to_the_step():
    text = run([*TINY, "--train-data", stories(), "--steps", 6, "--profile"]).out
    table = [line.split() for line in text[text.index("profile: mean of 5 steps"):].splitlines()[2:]]
    ms = {row[0]: float(row[1]) for row in table}
    check(abs(sum(v for k, v in ms.items() if k != "step") - ms["step"]) <= 0.002 * len(ms), f"{ms}")
    check(ms["other"] <= 0.1 * ms["step"] + 0.1, f"{ms['other']} of {ms['step']} ms belong to no phase")


@test
def the_trace_is_json_with_phases_inside_their_boxes():
    train("m", "--trace", folder("t.json"), "--grad-accum", 2, "--val-data", stories("val", seed=2), "--val-every", 2, steps=3)
    events = [e for e in json.loads(read(folder("t.json")))["traceEvents"] if e["ph"] == "X"]
    def inside(outer):
        return [e["name"] for e in events if e is not outer and outer["ts"] - 0.01 <= e["ts"] and e["ts"] + e["dur"] <= outer["ts"] + outer["dur"] + 0.01]
    for step in (1, 2, 3):
        box = [e for e in events if e["name"] == f"step {step}"]
        check(len(box) == 1, f"{len(box)} boxes for step {step}")
        names = inside(box[0])
        check({"microbatch 0", "microbatch 1", "forward", "backward", "attention", "experts", "lm_head", "optimizer"} <= set(names), f"{names}")
        check(("eval" in names) == (step != 1), f"validation in step {step}")
    for e in [e for e in events if e["name"] == "microbatch 1"]:
        check({"forward", "backward", "data", "router"} <= set(inside(e)) and "optimizer" not in inside(e), f"{inside(e)}")
    for track in {e["tid"] for e in events}:
        stack = []
        for e in sorted((e for e in events if e["tid"] == track), key=lambda e: (e["ts"], -e["dur"])):
            while stack and stack[-1] <= e["ts"] + 0.002:
                stack.pop()
            check(not stack or e["ts"] + e["dur"] <= stack[-1] + 0.002, f"{e['name']} sticks out of its box")
            stack.append(e["ts"] + e["dur"])


@test
def the_last_line_is_the_last_step():  # U9
    r = run([*TINY, "--train-data", stories(), "--steps", FEW, "--metrics", folder("m.jsonl")])
    last = [line for line in r.out.splitlines() if line.startswith("step ")][-1]
    check(last.startswith(f"step {FEW}/{FEW} | loss ") and f"{metrics(folder('m.jsonl'))[-1]['loss']:.4f}" in last, last)
    check(column(folder("m.jsonl"), "step") == list(range(1, FEW + 1)), "steps in the metrics")


main()
