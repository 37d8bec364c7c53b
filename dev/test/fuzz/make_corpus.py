"""Writes what the fuzz targets begin with: corpus/TARGET/seed_*, small files that are right, each of another kind, and
near_*, which are wrong in a way that one change does not lead to. What else lies there was found by fuzzing and stays."""

import json
import os
import struct

HERE = os.path.dirname(os.path.abspath(__file__))
BETWEEN = b"\n====\n"
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 5, "hidden_size": 4, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1,
    "moe_intermediate_size": 3, "intermediate_size": 5, "max_position_embeddings": 64, "mlp_only_layers": [1], "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": True, "norm_topk_prob": True, "hidden_act": "silu", "eos_token_id": 4,
}  # fmt: skip
OLD_CONFIG = dict(CONFIG, num_experts=None, num_local_experts=4, num_key_value_heads=None, head_dim=None, hidden_size=16,
                  rope_theta=None, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}, rope_scaling={"type": "default"},
                  tie_word_embeddings=False, mlp_only_layers=[], decoder_sparse_step=2, eos_token_id=[4, 3], sliding_window=4096,
                  use_sliding_window=False, layer_types=["full_attention"] * 2, dtype="bfloat16", torch_dtype="bfloat16",
                  output_router_logits=True, router_aux_loss_coef=0.01, initializer_range=0.02, use_cache=True)  # fmt: skip


def put(target, name, *parts, kind="seed_"):
    folder = os.path.join(HERE, "corpus", target)
    os.makedirs(folder, exist_ok=True)
    parts = [p.encode() if isinstance(p, str) else p for p in parts]
    with open(os.path.join(folder, kind + name), "wb") as f:
        f.write(BETWEEN.join(parts))


def text(x):
    return json.dumps(x, ensure_ascii=False, separators=(",", ":"))


SIZES = {"F32": 4, "BF16": 2, "F16": 2, "I32": 4, "I64": 8, "U8": 1}


def safetensors(tensors, metadata=None):
    """tensors: {name: (dtype, shape[, numbers])}"""
    header, data = {}, b""
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, (dtype, shape, *numbers) in tensors.items():
        n = 1
        for d in shape:
            n *= d
        if numbers:
            piece = struct.pack(f"<{n}i", *numbers[0])
        else:
            piece = bytes(n * SIZES[dtype])
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(piece)]}
        data += piece
    head = text(header).encode()
    return struct.pack("<Q", len(head)) + head + data


def parameters(c):
    """{name: shape} of the model that CONFIG describes"""
    C, q, kv = c["hidden_size"], c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    shapes = {"model.embed_tokens.weight": [c["vocab_size"], C], "model.norm.weight": [C]}
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {at + "input_layernorm.weight": [C], at + "post_attention_layernorm.weight": [C], at + "self_attn.q_proj.weight": [q, C],
                   at + "self_attn.k_proj.weight": [kv, C], at + "self_attn.v_proj.weight": [kv, C], at + "self_attn.o_proj.weight": [C, q],
                   at + "self_attn.q_norm.weight": [c["head_dim"]], at + "self_attn.k_norm.weight": [c["head_dim"]]}  # fmt: skip
        dense = layer in c["mlp_only_layers"]
        mlps = [(at + "mlp.", c["intermediate_size"])] if dense else []
        if not dense:
            shapes[at + "mlp.gate.weight"] = [c["num_experts"], C]
            mlps = [(f"{at}mlp.experts.{e}.", c["moe_intermediate_size"]) for e in range(c["num_experts"])]
        for name, F in mlps:
            shapes |= {name + "gate_proj.weight": [F, C], name + "up_proj.weight": [F, C], name + "down_proj.weight": [C, F]}
    return shapes


def fused(shapes, E):
    out = {n: s for n, s in shapes.items() if ".experts." not in n}
    F, C = shapes["model.layers.0.mlp.experts.0.gate_proj.weight"]
    return out | {"model.layers.0.mlp.experts.gate_up_proj": [E, 2 * F, C], "model.layers.0.mlp.experts.down_proj": [E, C, F]}


def file_hash(data):
    """file_hash of llmc/checkpoint.h"""
    mask, h = (1 << 64) - 1, 0xCBF29CE484222325
    for i in range(0, len(data), 8):
        h = (h ^ int.from_bytes(data[i : i + 8], "little")) * 0x100000001B3 & mask
        h ^= h >> 32
    return (h ^ len(data)) * 0x100000001B3 & mask


put("safetensors", "empty", safetensors({}))
put("safetensors", "kinds", safetensors({"b": ("F32", [2, 3]), "a": ("BF16", [3]), "c": ("I32", []), "d": ("I64", [1]), "e": ("F16", [2, 0, 3]),
                                         'ü"\n': ("U8", [1, 1, 1, 1, 1, 1, 1, 5])}, {"format": "pt"}))  # fmt: skip

put("config", "new", json.dumps(CONFIG, indent=1))
put("config", "old", text(OLD_CONFIG))

SHAPES = parameters(CONFIG)
names = sorted(SHAPES)
half = len(names) // 2


def of(names, dtype, shapes=SHAPES, prefix=""):
    return {prefix + n: (dtype, shapes[n]) for n in names}


index = {"metadata": {"total_size": 1}, "weight_map": {n: "ab"[i >= half] + ".safetensors" for i, n in enumerate(names)}}
put("index", "two_shards", text(CONFIG), text(index), safetensors(of(names[:half], "BF16")), safetensors(of(names[half:], "F16"), {"format": "pt"}))
FUSED = fused(SHAPES, 2)
put("index", "fused", text(CONFIG), text({"weight_map": {n: "a.safetensors" for n in FUSED}}), safetensors(of(FUSED, "BF16", FUSED)))
tied = dict(of(names, "BF16"), **{"lm_head.weight": ("BF16", SHAPES["model.embed_tokens.weight"])})
put("index", "tied_head", text(CONFIG), text({"weight_map": {n: "b.safetensors" for n in tied}}), b"", safetensors(tied))

short = dict(of(names, "F32"), **{"model.norm.weight": ("F32", [3])})
put("index", "other_shape", text(CONFIG), text({"weight_map": {n: "a.safetensors" for n in names}}), safetensors(short), kind="near_")

HEADER_32, HEADER_16 = struct.pack("<5i", 20240801, 7, 40, 257, 257), struct.pack("<5i", 20240520, 1, 41, 0, 0)
put("shard", "32", HEADER_32.ljust(1024, b"\0") + struct.pack("<40I", *[256 if i % 9 == 0 else i for i in range(40)]))
put("shard", "16", HEADER_16.ljust(1024, b"\0") + struct.pack("<41H", *range(41)))
put("shard", "both", HEADER_32.ljust(1024, b"\0") + struct.pack("<40I", *range(40)), HEADER_16.ljust(1024, b"\0") + struct.pack("<41H", *range(41)))

put("text", "documents", "<|endoftext|>\nOnce upon a time.\n\n<|endoftext|>Grüße, 世界! 🙂<|endoftext|>\r\n\r\n<|endoftext|>end <| here<|endoftext")


def alphabet():
    plain = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    rest = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}


LETTERS = alphabet()
VOCAB = {LETTERS[b]: b for b in range(256)}
MERGES = ["h e", "l l", "he ll", "Ġ w", "o r", "Ġw or", "hell o", "Ã ¼"]
for merge in MERGES:
    VOCAB[merge.replace(" ", "")] = len(VOCAB)


def added(id, content, special, **flags):
    return dict({"id": id, "content": content, "special": special}, **flags)


def tokenizer(pre_tokenizer, merges=MERGES, normalizer=None, more=(), **model):
    vocab = VOCAB if merges else {LETTERS[b]: b for b in range(256)}
    n = len(vocab)
    tokens = [added(n, "<|endoftext|>", True)] + [added(n + 1 + i, content, **flags) for i, (content, flags) in enumerate(more)]
    return text({"version": "1.0", "added_tokens": tokens, "normalizer": normalizer, "pre_tokenizer": pre_tokenizer,
                 "decoder": {"type": "ByteLevel"}, "model": dict({"type": "BPE", "vocab": vocab, "merges": merges}, **model)})  # fmt: skip


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SAMPLE = "hello world, it's 12345 Gru\u0308ße <mask> <|endoftext|>\n\n  世界 ﷺ hellohello" + "lo" * 30
put("tokenizer", "bytes", tokenizer(BYTE_LEVEL, []), SAMPLE)
put("tokenizer", "gpt2", tokenizer({"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}), SAMPLE)
put("tokenizer", "qwen", tokenizer({"type": "Sequence", "pretokenizers": [
    {"type": "Split", "pattern": {"Regex": QWEN}, "behavior": "Isolated", "invert": False}, BYTE_LEVEL]}, normalizer={"type": "NFC"}), SAMPLE)  # fmt: skip
put("tokenizer", "removed", tokenizer({"type": "Sequence", "pretokenizers": [
    {"type": "Digits", "individual_digits": True}, {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False},
    {"type": "Split", "pattern": {"Regex": r"[a-z\-]+"}, "behavior": "Removed", "invert": True}, BYTE_LEVEL]}, [m.split() for m in MERGES],
    {"type": "Sequence", "normalizers": [{"type": "NFC"}]}, [("<mask>", dict(special=False, lstrip=True, rstrip=True)),
    ("<m", dict(special=True)), ("ü ", dict(special=False, normalized=True))], ignore_merges=True), SAMPLE.encode() + b"\xe2\x82 \xff\xed\xa0\x80")  # fmt: skip

OPTIONS = {"given": ["lr", "steps", "train-data", "val-data", "val-every", "sample-every", "prompt", "seq-len"], "lr": 0.0003, "steps": 100,
           "train-data": "data/*.bin", "val-data": "v.bin", "val-every": 10, "sample-every": 5, "prompt": "Once", "seq-len": 64, "batch-size": 4}  # fmt: skip
STATE = {"format": 1, "step": "2", "tokens": "512", "data_position": "8", "data_tokens": "100000", "data_hash": "12345678901234567890",
         "sampler_rng": "1", "seed": "42", "has_master": False, "options": OPTIONS}  # fmt: skip
for master in [False, True]:
    weights = safetensors(of(names, "BF16" if master else "F32"))
    moments = safetensors({k: v for p in ["m.", "v."] + ["master."] * master for k, v in of(names, "F32", SHAPES, p).items()})
    if not master:
        sums = {"config.json": str(file_hash(text(CONFIG).encode())), "model.safetensors": str(file_hash(weights))}
        put("state", "checksums", text(CONFIG), text(STATE), text(sums), weights, moments)
    put("state", "master" if master else "plain", text(CONFIG), text(dict(STATE, has_master=master)), b"", weights, moments)

ROWS, COLS = 2, 6
put("batch", "all", safetensors({
    "tokens": ("I32", [ROWS, COLS], list(range(12))), "targets": ("I32", [ROWS, COLS], [-100, *range(100, 111)]),
    "doc_ids": ("I32", [ROWS, COLS], [0, 0, 1, 1, 1, 2] * 2),
    "router.layers.0.topk_index": ("I32", [ROWS * COLS, 2], [0, 1, 2, 3, 3, 0] * 4)}))  # fmt: skip

put("batch", "other_shape", safetensors({"tokens": ("I32", [2, 6], list(range(12))), "targets": ("I32", [2, 3], list(range(6))),
                                         "doc_ids": ("I32", [2, 6], [0] * 12)}), kind="near_")  # fmt: skip

QUESTIONS = [{"context": [72, 105, 256], "choices": [[33], [63, 33], [1, 2, 3]], "bytes": [1, 2, 3.5], "label": 2},
             {"context": list(range(30)), "choices": [[5], [6]], "bytes": [1, 1], "label": 0},
             {"context": [], "choices": [[9, 9], [8, 8, 8]], "bytes": [2, 3], "label": 1}]  # fmt: skip
HEAD = {"format": "choices", "vocab_size": 257, "eot_id": 256, "questions": len(QUESTIONS), "source": "test"}
put("choices", "three", "\n".join(text(x) for x in [HEAD] + QUESTIONS) + "\n")
