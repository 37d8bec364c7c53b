"""Whatever is wrong with files or options ends the program with one line that says what, where and what to do, with exit code 1,
and changes nothing that was there. A row: a name, a function that gives the command's options, what the line must contain.
run.sh runs this table with train_moe_cpu, with its sanitized build, and with the GPU trainer. The C tests know more variants of the
same faults; here the claim is that they arrive at the user."""

import atexit
import os
import shutil
import tempfile

from program import *

HOME = tempfile.mkdtemp(prefix="moe-test-input-")  # good files that all rows share
atexit.register(shutil.rmtree, HOME, ignore_errors=True)
TOKENS = tokens_of(text_of(40))
GOOD = shard(HOME + "/good.bin", TOKENS)
BATCH = batch_file(HOME + "/batch.safetensors", 2, 8)
MODEL = HOME + "/model/step_00000001"
CHECKPOINTS = HOME + "/checkpoints"
TINY = ["--model", "tiny", "--batch-size", 2, "--seq-len", 8, "--steps", 1]
RUN = [*TINY, "--train-data", GOOD]
OLD_METRICS = HOME + "/old.jsonl"
FOREIGN = write(HOME + "/letter.txt", "Dear reader, this is no file of ours.\n" * 100)


def prepare():
    run([CPU_TRAINER, *RUN, "--out", os.path.dirname(MODEL)])  # in F32, which numpy can read and write
    run([PROGRAM, *TINY[:-1], 2, "--train-data", GOOD, "--save-every", 1, "--out", CHECKPOINTS, "--metrics", OLD_METRICS])


def snapshot():
    """Every file there is, except lock files: --out is locked before it is known whether the run can begin."""
    found = {}
    for place in (HOME, folder()):
        found.update({place + "/" + name: content for name, content in files_in(place).items() if not name.endswith(".lock")})
        found.update({os.path.join(at, name): "a folder" for at, names, _ in os.walk(place) for name in names})
    return found


def row(name, options, *parts):
    """One line of the table. options: a list, or a function that makes the bad files first."""
    def claim():
        os.makedirs(folder(), exist_ok=True)
        command = [PROGRAM, *(options() if callable(options) else options)]
        before = snapshot()
        expect_error(command, *parts)
        after = snapshot()
        changed = [path for path in before if after.get(path) != before[path]]
        check(not changed, f"{' '.join(str(c) for c in command)} changed {changed}")
        check(set(after) == set(before), f"it left {sorted(set(after) - set(before))}")
    claim.__name__ = name
    test(claim)


# ----------------------------------------------------------------------------
# data


def data(**how):
    tokens = how.pop("tokens", TOKENS)
    return lambda: [*TINY, "--train-data", shard(folder("bad.bin"), tokens, **how)]


def two_tokenizers():
    shard(folder("d/a.bin"), TOKENS)
    return os.path.dirname(shard(folder("d/b.bin"), TOKENS, eot=10)) + "/*.bin"


def cut(path, size):
    return write(folder(os.path.basename(path)), read(path)[:size])


row("data_missing", [*TINY, "--train-data", HOME + "/nothing_*.bin"], "no file matches", "nothing_*.bin")
row("data_empty_file", lambda: [*TINY, "--train-data", write(folder("bad.bin"), b"")], "bad.bin is empty")
row("data_shorter_than_a_header", lambda: [*TINY, "--train-data", cut(GOOD, 1000)], "good.bin has 1000 bytes", "header")
row("data_cut_in_the_tokens", lambda: [*TINY, "--train-data", cut(GOOD, 1024 + 401)], "its header says", "401 bytes follow")
row("data_of_another_program", [*TINY, "--train-data", FOREIGN], "letter.txt is not a token shard", "--tokenize inline")
row("data_is_a_folder", [*TINY, "--train-data", HOME], "is a folder", "name the files in it")
row("data_of_an_unknown_version", data(version=8), "bad.bin: shard version 8")
row("data_that_counts_too_much", data(count=2 * len(TOKENS)), "its header says")
row("data_that_counts_below_zero", data(count=-5), "-5 tokens")
row("data_token_beyond_the_vocabulary", data(tokens=TOKENS[:50] + [257] + TOKENS[50:], vocab_size=0),
    "bad.bin: token 50 (byte offset 1224) has id 257", "ends at 256")
row("data_token_of_32_bits", data(tokens=TOKENS[:50] + [4294967295] + TOKENS[50:], vocab_size=0), "token 50", "id 4294967295")
row("data_of_a_larger_tokenizer", data(tokens=TOKENS + [151642], vocab_size=151936, eot=151643), "tokenizer of 151936 tokens", "--vocab-size 151936")
row("data_with_an_eot_beyond_its_own_vocabulary", data(eot=300), "header is damaged")
row("data_16_bit_and_odd_in_length", lambda: [*TINY, "--train-data", cut(shard(folder("w.bin"), TOKENS, magic=20240520, version=1,
                                                                              dtype=np.uint16), 1024 + 31)], "its header says")
row("data_of_two_tokenizers", lambda: [*TINY, "--train-data", two_tokenizers()], "b.bin", "different tokenizers")
row("sequence_longer_than_the_data", [*TINY[:-4], "--seq-len", 4096, "--train-data", GOOD], "tokens in 1 file", "at most --seq-len")
row("batch_larger_than_the_data", [*TINY[:2], "--batch-size", 1024, "--train-data", GOOD], "a batch of 1024", "at most --batch-size")
row("validation_data_shorter_than_a_sequence", lambda: [*RUN, "--val-data", shard(folder("val.bin"), TOKENS[:8])], "val.bin: 8 tokens", "validation needs 1 (9 tokens)", "--seq-len 7 fits")
row("validation_data_missing", [*RUN, "--val-data", HOME + "/no.bin"], "no file matches")
row("text_that_is_not_utf8", lambda: [*TINY, "--tokenize", "inline", "--train-data", write(folder("bad.txt"), b"abc\xff" * 99)],
    "bad.txt is not UTF-8", "byte offset 3", "--encoding")
row("text_that_is_jsonl", lambda: [*TINY, "--tokenize", "inline", "--train-data", write(folder("bad.jsonl"), '{"text": "x"}\n')], "bad.jsonl", "prepro/text.py")
row("text_without_a_document", lambda: [*TINY, "--tokenize", "inline", "--train-data", write(folder("bad.txt"), "\n<|endoftext|>\n")],
    "no text in")
row("doc_mask_without_an_eot", lambda: ["--config", config(eos_token_id=None, bos_token_id=None), *TINY[2:], "--doc-mask",
                                        "--train-data", shard(folder("bad.bin"), TOKENS, eot=-1)], "--doc-mask", "which token opens")


# ----------------------------------------------------------------------------
# --batch


def batch(change):
    """The options for a batch file that `change` has had its way with: tensors in, tensors out."""
    def options():
        tensors = load_file(BATCH)
        save_file(change(tensors) or tensors, folder("bad.safetensors"))
        return ["--model", "tiny", "--steps", 1, "--batch", folder("bad.safetensors")]
    return options


def put(name, at, value):
    def change(tensors):
        tensors[name][at] = value
    return change


def with_doc_ids(tensors):
    return {**tensors, "doc_ids": np.array([[0, 0, 1, 1, 2, 2, 2, 3], [0, 0, 0, 5, 5, 4, 4, 4]], np.int32)}


def with_routing(tensors, expert=1):
    index = np.tile(np.array([0, 1], np.int32), (16, 1))
    index[7, 1] = expert
    return {**tensors, **{f"router.layers.{l}.topk_index": index for l in range(2)}}


row("batch_file_missing", ["--model", "tiny", "--batch", HOME + "/no.safetensors"], "--batch: cannot open", "no.safetensors")
row("batch_file_of_another_kind", ["--model", "tiny", "--batch", FOREIGN], "--batch:", "letter.txt")
row("batch_without_targets", batch(lambda t: {"tokens": t["tokens"]}), "has no tensor 'targets'")
row("batch_of_another_dtype", batch(lambda t: {n: v.astype(np.int64) for n, v in t.items()}), "'tokens' must be I32", "I64")
row("batch_with_unequal_shapes", batch(lambda t: {"tokens": t["tokens"], "targets": t["targets"][:, :4].copy()}), "shape [2, 4]", "[2, 8]")
row("batch_token_beyond_the_vocabulary", batch(put("tokens", (1, 3), 257)), "token 257 at row 1, position 3")
row("batch_token_below_zero", batch(put("tokens", (0, 0), -1)), "token -1 at row 0, position 0")
row("batch_target_beyond_the_vocabulary", batch(put("targets", (1, 7), 300)), "target 300 at row 1, position 7")
row("batch_target_below_zero", batch(put("targets", (1, 7), -99)), "target -99")
row("batch_with_no_target_counted", batch(put("targets", (slice(None), slice(None)), -100)), "every target is -100")
row("batch_without_documents", lambda: [*batch(lambda t: t)(), "--doc-mask"], "has no tensor 'doc_ids'")
row("batch_documents_that_fall", lambda: [*batch(with_doc_ids)(), "--doc-mask"], "doc_ids fall at row 1, position 5")
row("batch_without_routing", lambda: [*batch(lambda t: t)(), "--force-routing"], "has no tensor 'router.layers.0.topk_index'")
row("batch_with_an_expert_too_many", lambda: [*batch(lambda t: with_routing(t, 4))(), "--force-routing"], "gives token 7 expert 4", "0..3")
row("batch_with_an_expert_twice", lambda: [*batch(lambda t: with_routing(t, 0))(), "--force-routing"], "gives token 7 expert 0", "once")


# ----------------------------------------------------------------------------
# config.json


def config(**changes):
    """A model folder's config.json with some fields changed (None: null; `...`: removed). Returns its path."""
    json_config = json.loads(read(MODEL + "/config.json"))
    for name, value in changes.items():
        if value is ...:
            for spelling in (name, {"num_experts": "num_local_experts"}.get(name)):
                json_config.pop(spelling, None)
        else:
            json_config[name] = value
    return write(folder("bad/config.json"), json.dumps(json_config))


def configured(**changes):
    return lambda: ["--config", config(**changes), *TINY[2:], "--train-data", GOOD]


row("config_missing", ["--config", HOME + "/no.json", *RUN[2:]], "no.json")
row("config_not_json", ["--config", FOREIGN, *RUN[2:]], "letter.txt", "not valid JSON")
row("config_cut", lambda: ["--config", cut(MODEL + "/config.json", 200), *RUN[2:]], "config.json: not valid JSON near byte")
row("config_with_a_name_twice", lambda: ["--config", write(folder("c.json"), '{"vocab_size": 1, "vocab_size": 2}'), *RUN[2:]], "vocab_size", "twice")
row("config_of_another_architecture", configured(model_type="llama"), "model_type", "llama")
row("config_field_unknown_and_on", configured(use_mamba_layers=True), "use_mamba_layers")
row("config_attention_bias", configured(attention_bias=True), "attention_bias")
row("config_sliding_window", configured(use_sliding_window=True, sliding_window=64), "use_sliding_window")
row("config_rope_scaling", configured(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "rope", "yarn")
row("config_other_activation", configured(hidden_act="gelu"), "hidden_act", "gelu")
row("config_two_numbers_of_experts", configured(num_experts=4, num_local_experts=8), "num_experts", "num_local_experts")
row("config_two_rope_thetas", configured(rope_theta=123.0, rope_parameters={"rope_type": "default", "rope_theta": 5.0}), "rope_theta")
row("config_without_a_size", configured(hidden_size=...), "hidden_size", "missing")
row("config_more_experts_a_token_than_experts", configured(num_experts_per_tok=5), "num_experts_per_tok")
row("config_heads_that_do_not_divide", configured(num_key_value_heads=3), "num_key_value_heads")
row("config_head_dim_not_a_multiple_of_8", configured(head_dim=12), "head_dim", "8")
row("config_size_zero", configured(moe_intermediate_size=0), "moe_intermediate_size")
row("config_size_negative", configured(hidden_size=-64), "hidden_size")
row("config_size_a_fraction", configured(hidden_size=64.5), "hidden_size")
row("config_size_a_text", configured(vocab_size="257"), "vocab_size")
row("config_sizes_that_overflow", configured(hidden_size=2147483647, moe_intermediate_size=2147483647, num_experts=65536,
                                              num_local_experts=65536), "")
row("config_dense_layer_that_is_not_there", configured(mlp_only_layers=[7]), "mlp_only_layers")
row("config_eot_beyond_the_vocabulary", configured(eos_token_id=1000), "eos_token_id")


# ----------------------------------------------------------------------------
# weights


def weights(change, *options):
    """--init of a folder whose tensors `change` has had its way with."""
    def made():
        shutil.copytree(MODEL, folder("bad"))
        tensors = load_file(MODEL + "/model.safetensors")
        save_file(change(tensors) or tensors, folder("bad") + "/model.safetensors")
        return ["--init", folder("bad"), *RUN[2:], *options]
    return made


def header_of(content):
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8:8 + size]), content[8 + size:]


def with_header(change):
    """--init of a folder whose model.safetensors has another header, over the same data."""
    def made():
        shutil.copytree(MODEL, folder("bad"))
        header, rest = header_of(read(MODEL + "/model.safetensors"))
        text = change(header)
        text = text if isinstance(text, str) else json.dumps(header)
        write(folder("bad/model.safetensors"), len(text).to_bytes(8, "little") + text.encode() + rest)
        return ["--init", folder("bad"), *RUN[2:]]
    return made


def without(name):
    return lambda tensors: {n: v for n, v in tensors.items() if n != name}


GATE = "model.layers.0.mlp.experts.3.gate_proj.weight"


def lying(name, offsets):
    def change(header):
        header[name]["data_offsets"] = offsets(header[name]["data_offsets"], header)
    return change


row("weights_missing_folder", ["--init", HOME + "/no", *RUN[2:]], HOME + "/no")
row("weights_that_are_a_file", ["--init", MODEL + "/model.safetensors", *RUN[2:]], "--init", "is not a folder")
row("weights_missing_file", lambda: ["--init", os.path.dirname(config()), *RUN[2:]], "neither model.safetensors nor")
row("weights_without_an_expert", weights(without(GATE)), GATE, "missing")
row("weights_without_a_head", weights(without("lm_head.weight")), "lm_head.weight is missing", "tie_word_embeddings")
row("weights_of_one_tensor_too_many", weights(lambda t: {**t, "model.layers.0.bias": np.zeros(3, np.float32)}), "model.layers.0.bias")
row("weights_of_another_shape", weights(lambda t: {**t, "model.norm.weight": np.ones(65, np.float32)}), "model.norm.weight", "[65]", "[64]")
row("weights_transposed", weights(lambda t: {**t, GATE: t[GATE].T.copy()}), GATE, "[64, 32]", "[32, 64]")
row("weights_with_a_nan", weights(put(GATE, (1, 2), np.nan)), GATE, "nan at element 66")
row("weights_with_an_infinity", weights(put(GATE, (0, 2), -np.inf)), GATE, "-inf at element 2")
row("weights_that_overflow_and_are_asked_to_speak", lambda: [*weights(lambda t: {**t, "model.norm.weight": np.full(64, 3e38, np.float32),
    "lm_head.weight": t["lm_head.weight"] * 1e30})()[:2], "--generate", 3], "logits are not numbers")
row("weights_in_double", weights(lambda t: {**t, GATE: t[GATE].astype(np.float64)}), GATE, "F64")
row("weights_cut", lambda: [*weights(lambda t: t)()[:1], os.path.dirname(cut_weights(-100)), *RUN[2:]], "model.safetensors", "cut off")
row("weights_longer", with_header(lambda h: h.pop("lm_head.weight") and None), "belong to no tensor")
row("weights_that_overlap", with_header(lying("model.norm.weight", lambda o, h: [o[0] - 4, o[1] - 4])), "overlap")
row("weights_that_end_before_they_begin", with_header(lying("model.norm.weight", lambda o, h: [o[1], o[0]])), "model.norm.weight", "data_offsets")
row("weights_beyond_the_file", with_header(lying("model.norm.weight", lambda o, h: [o[0], 1 << 50])), "model.norm.weight", "cut off")
row("weights_with_a_name_twice", with_header(lambda h: json.dumps(h)[:-1] + ', "lm_head.weight": ' + json.dumps(h["lm_head.weight"]) + "}"),
    '"lm_head.weight" stands there twice')
row("weights_with_a_header_of_an_exabyte", lambda: ["--init", os.path.dirname(cut_weights(None, b"\xff" * 7 + b"\x0f")), *RUN[2:]],
    "header claims")
row("weights_with_nonsense_as_header", with_header(lambda h: "{" * 4000), "model.safetensors")
row("weights_in_an_index_that_lies", lambda: ["--init", index_folder(), *RUN[2:]], "index.json", "lm_head.weight")


def cut_weights(size, start=b""):
    """A model folder whose model.safetensors is cut, or begins with other bytes. Returns the file's path."""
    shutil.rmtree(folder("bad"), ignore_errors=True)
    shutil.copytree(MODEL, folder("bad"))
    content = read(MODEL + "/model.safetensors")[:size]
    return write(folder("bad/model.safetensors"), start + content[len(start):])


def index_folder():
    shutil.copytree(MODEL, folder("bad"))
    os.rename(folder("bad/model.safetensors"), folder("bad/model-00001-of-00001.safetensors"))
    names = [*header_of(read(MODEL + "/model.safetensors"))[0]]
    where = {n: "model-00001-of-00001.safetensors" for n in names if n not in ("lm_head.weight", "__metadata__")}
    write(folder("bad/model.safetensors.index.json"), json.dumps({"weight_map": where}))
    return folder("bad")


def tied(change):
    def options():
        made = weights(change)()
        json_config = {**json.loads(read(MODEL + "/config.json")), "tie_word_embeddings": True}
        write(folder("bad/config.json"), json.dumps(json_config))
        return made
    return options


row("weights_tied_with_a_head_of_its_own", tied(lambda t: t), "lm_head.weight differs from the embedding")


# ----------------------------------------------------------------------------
# options

row("no_options", [], "which model?", "--help")
row("no_data", ["--model", "tiny"], "which data?", "--help")
row("no_such_preset", ["--model", "huge", "--train-data", GOOD], "--model huge", "smol-500m, demo, tiny")
row("option_misspelt", [*RUN, "--learning-rate", 1], "--learning-rate")
row("option_nearly_right", [*RUN, "--sed", 1], "did you mean --seed?")
row("option_given_twice", [*RUN, "--seed", 1, "--seed=2"], "--seed is given twice")
row("option_in_both_forms", [*RUN, "-s", 1, "--seed", 2], "--seed is given twice")
row("option_without_its_value", [*RUN, "--seed"], "--seed needs a value")
row("option_that_is_no_number", [*RUN, "--lr", "fast"], "--lr: 'fast' is not a number")
row("option_nan", [*RUN, "--lr", "nan"], "--lr: 'nan'")
row("option_beyond_64_bits", [*RUN, "--seed", "99999999999999999999"], "--seed", "64 bits")
row("option_with_more_behind_it", [*RUN, "--keep", "3x"], "--keep: '3x' is not a whole number")
row("option_stray", [*RUN, "more"], "unexpected argument 'more'")
row("option_pattern_split_by_the_shell", [*RUN, "b.bin"], "quote the pattern")
if GPU:
    row("option_cpu_only", [*RUN, "--threads", 2], "--threads is honoured by train_moe_cpu alone")
    row("option_choice_not_built", [*RUN, "--attention", "cudnn"], "--attention cudnn", "USE_CUDNN=1")
    row("option_precision", [*RUN, "--precision", "fp32"], "--precision fp32", "train_moe computes in bf16")
    row("batch_beyond_a_grid", [*RUN[:2], "--batch-size", 65536, "--train-data", GOOD], "--batch-size: train_moe takes at most 65535", "--grad-accum")
    row("sequence_beyond_a_grid", [*RUN[:2], "--batch-size", 1, "--seq-len", "16M", "--train-data", GOOD], "at most 65535, not 250004: lower either")
    row("experts_beyond_a_block", lambda: ["--config", config(num_experts=1025, num_local_experts=1025), *RUN[2:]], "num_experts: train_moe takes at most 1024")
    row("recompute_without_the_grouped_products", [*RUN, "--recompute", "moe", "--experts", "loop"], "--recompute moe", "use --experts grouped")
else:
    row("option_gpu_only", [*RUN, "--master", 0], "--master is honoured by train_moe alone")
    row("option_choice_gpu_only", [*RUN, "--attention", "cudnn"], "--attention cudnn", "train_moe")
    row("option_precision_unknown", [*RUN, "--precision", "fp16"], "--precision must be one of fp32|bf16")


    @test
    def option_precision_on_a_processor_without_bf16():  # oneDNN is told that this were one
        expect_error([PROGRAM, *RUN, "--precision", "bf16", "--out", folder("out")], "--precision bf16", "bf16",
                     env={"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "DNNL_MAX_CPU_ISA": "AVX512_CORE"})
        check(not os.path.exists(folder("out")), "it left something")


    @test
    def option_precision_in_a_build_without_onednn():
        plain = folder("plain")
        run([os.environ.get("CC", "cc"), "-std=c11", "-I.", "-w", "train_moe_cpu.c", "-o", folder() + "/plain", "-lcjson", "-lm", "-lpthread"])
        expect_error([plain, *RUN, "--precision", "bf16"], "--precision bf16", "built without oneDNN")
        run([plain, *RUN, "--precision", "fp32"])
row("option_choice_unknown", [*RUN, "--experts", "magic"], "--experts must be one of loop|grouped")
row("options_for_two_models", [*RUN, "--config", "x"], "--model and --config exclude each other")
row("options_for_two_kinds_of_data", [*RUN[:2], "--train-data", GOOD, "--batch", BATCH], "--train-data and --batch exclude each other")
row("metrics_of_an_evaluation", [*RUN[:2], "--eval", "--val-data", GOOD, "--metrics", HOME + "/m"], "--metrics does nothing with --eval")
row("trace_of_samples", [*RUN[:2], "--generate", 5, "--trace", HOME + "/t"], "--trace does nothing with --generate")
row("profile_of_a_dump", [*RUN[:2], "--batch", BATCH, "--dump", HOME + "/d", "--profile"], "--profile does nothing with --dump")
row("checkpoints_of_an_evaluation", [*RUN[:2], "--eval", "--val-data", GOOD, "--out", HOME + "/o"], "--out does nothing with --eval")
row("clipping_below_fp32", [*RUN, "--grad-clip", "1e-300"], "--grad-clip 1e-300 is 0 in fp32", "1e-38 or more")
row("options_for_two_modes", [*RUN, "--generate", 5, "--eval"], "--generate and --eval exclude each other")
row("option_that_would_do_nothing", [*RUN, "--save-every", 5], "--save-every does nothing without --out")
row("force_routing_without_a_batch", [*RUN, "--force-routing"], "--force-routing does nothing without --batch")
row("eval_without_data", ["--model", "tiny", "--eval"], "--eval does nothing without --val-data")
row("tokens_per_step_that_do_not_divide", [*RUN, "--tokens-per-step", 40], "--tokens-per-step 40", "16", "32 and 48")
row("min_lr_above_lr", [*RUN, "--lr", "1e-4", "--min-lr", "1e-3"], "--min-lr 0.001 is above --lr 0.0001")
for option, value, bounds in [
        ("batch-size", 0, "[1,"), ("seq-len", 0, "[1,"), ("grad-accum", 0, "[1,"), ("steps", -1, "at least 0"),
        ("lr", -1, "at least 0"), ("warmup-steps", -1, "at least 0"), ("weight-decay", -0.1, "at least 0"), ("beta1", 1, "[0,1)"),
        ("beta2", 1.5, "[0,1)"), ("eps", 0, "above 1e-38"), ("eps", "1e-50", "above 1e-38"), ("grad-clip", -1, "at least 0"), ("seed", -1, "[0,"), *([] if GPU else [("threads", 0, "[1,")]),
        ("temperature", -1, "at least 0"), ("top-p", 0, "(0,1]"), ("top-k", -1, "[0,"), ("val-steps", -1, "at least 0"),
        ("keep", -1, "[0,"), ("aux-loss-coef", -1, "at least 0")]:
    start_of_run = [o for o in RUN if o != f"--{option}"]
    if f"--{option}" in RUN:
        at = RUN.index(f"--{option}")
        start_of_run = RUN[:at] + RUN[at + 2:]
    row(f"{option.replace('-', '_')}_out_of_range", [*start_of_run, f"--{option}", value], f"--{option} must be {'in ' if bounds[0] in '[(' else ''}{bounds}")

# ----------------------------------------------------------------------------
# sampling

row("prompt_longer_than_the_context", ["--init", MODEL, "--seq-len", 8, "--generate", 5, "--prompt", "much too long", "--tokenize",
                                       "inline", "--train-data", GOOD], "--prompt has 14 tokens", "--seq-len")
row("prompt_longer_than_the_context_while_training", lambda: [*TINY[:-2], "--steps", 5, "--tokenize", "inline", "--train-data",
    write(folder("a.txt"), text_of(40)), "--sample-every", 5, "--prompt", "much too long"], "--prompt has 14 tokens", "--seq-len")
row("prompt_without_a_tokenizer", ["--init", MODEL, "--generate", 5, "--prompt", "a"], "--prompt needs a tokenizer")
row("sample_without_a_beginning", lambda: ["--config", config(eos_token_id=None, bos_token_id=None), "--generate", 5], "eos_token_id", "--prompt")
row("tokenizer_broken", lambda: ["--init", with_tokenizer("{}"), "--generate", 5, "--prompt", "a"], "tokenizer.json")


def with_tokenizer(text):
    shutil.copytree(MODEL, folder("bad"))
    write(folder("bad/tokenizer.json"), text)
    return folder("bad")


# ----------------------------------------------------------------------------
# output

row("out_is_a_file", [*RUN, "--out", FOREIGN], "letter.txt is a file, not a folder")
row("out_in_a_file", [*RUN, "--out", FOREIGN + "/out"], "letter.txt")
row("out_that_cannot_be_made", [*RUN, "--out", "/proc/out"], "cannot make the folder /proc/out")
row("out_that_cannot_be_written", [*RUN, "--out", "/proc/self"], "cannot write to --out /proc/self")
row("out_of_5000_characters", [*RUN, "--out", HOME + "/" + 25 * ("x" * 199 + "/")], "cannot make the folder", "File name too long")
row("out_of_one_long_name", [*RUN, "--out", HOME + "/" + "x" * 5000], "File name too long")
row("out_empty", [*RUN, "--out="], "--out: its value is empty")
row("out_with_checkpoints", [*RUN, "--out", CHECKPOINTS], "holds checkpoints up to step 2", "--resume")
row("resume_with_nothing_there", ["--resume", "--out", HOME + "/nothing"], "--resume: there is no complete checkpoint")
row("resume_of_nothing", ["--resume", HOME + "/nothing"], "there is no complete checkpoint in")
row("resume_without_saying_which", ["--resume"], "--resume without a folder", "--out")
row("resume_when_all_is_done", ["--resume", "--out", CHECKPOINTS], "has done 2 steps (32 tokens) already", "--steps")
row("resume_with_another_model", lambda: ["--resume", other_sizes(), "--steps", 5], "config.json")
row("metrics_in_no_folder", [*RUN, "--metrics", HOME + "/no/m.jsonl"], "--metrics: cannot open", "No such file")
row("metrics_over_another_file", [*RUN, "--metrics", FOREIGN], "letter.txt is not empty and no metrics file")
row("metrics_is_a_folder", [*RUN, "--metrics", HOME], "--metrics: cannot open")
row("trace_in_no_folder", [*RUN, "--trace", HOME + "/no/t.json"], "--trace: cannot create")
row("trace_wrong_and_old_metrics_kept", [*RUN, "--metrics", OLD_METRICS, "--trace", HOME + "/no/t.json"], "--trace: cannot create")
row("metrics_wrong_and_old_trace_kept", lambda: [*RUN, "--metrics", HOME + "/no/m.jsonl", "--trace", write(folder("t.json"), "{}")], "--metrics")
row("dump_in_no_folder", [*RUN, "--dump", HOME + "/no/d.safetensors"], "no/d.safetensors", "No such file")


def other_sizes():
    shutil.copytree(CHECKPOINTS, folder("out"))
    for step in (1, 2):
        path = step_folder(folder("out"), step) + "/"
        os.unlink(path + "checksums.json")
        write(path + "config.json", json.dumps({**json.loads(read(path + "config.json")), "hidden_size": 128}))
    return step_folder(folder("out"), 2)


prepare()
main()
