"""What the tests of the whole trainer share: tiny data, short command lines, and comparing two runs bit for bit.

PROGRAM is the trainer under test, an absolute path; the environment's TRAINER names another one than train_moe_cpu. Most tests
say the same of every trainer; @cpu_test marks those that are left out with a GPU trainer, above all where it is emulated: a step
of the tiny model takes it not 2 ms but half a second.
Threads that wait do so asleep (OMP_WAIT_POLICY): on a machine that has other work, spinning ones make a step of a tiny model take
half a second in place of two milliseconds."""

import json
import os
import random

import numpy as np
from safetensors.numpy import load_file, save_file

from harness import *

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["ASAN_OPTIONS"] = "detect_leaks=0"  # a program that stops with an error does not tidy up
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the emulator's matrix products are small
CPU_TRAINER = os.path.join(ROOT, "train_moe_cpu")
PROGRAM = os.path.join(ROOT, os.environ.get("TRAINER", CPU_TRAINER))
GPU = not os.path.basename(PROGRAM).startswith("train_moe_cpu")
EOT = 256
TIMES = ("step_ms", "tokens_per_s", "mfu", "gemm_share", "phases", "mem")  # what no two runs have in common


def cpu_test(function):
    """Marks a test that is not for the GPU trainer: what it proves lies in code that both share, or is proved there in another way."""
    return function if GPU else test(function)


def bf16_here():
    """May the trainer be told to compute in bf16? A GPU trainer always does; train_moe_cpu needs oneDNN and a processor that can."""
    return GPU or run([PROGRAM, "--model", "tiny", "--train-data", "x", "--precision", "bf16", "--dry-run"], code=None).code == 0


def tensors_of(path):
    """The tensors of a safetensors file, BF16 ones as float32 (numpy has no such type)."""
    content = read(path)
    size = int.from_bytes(content[:8], "little")
    found = {}
    for name, t in json.loads(content[8:8 + size]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + size + at for at in t["data_offsets"])
        if t["dtype"] == "BF16":
            bits = np.frombuffer(content[begin:end], np.uint16).astype(np.uint32) << 16
            found[name] = bits.view(np.float32).reshape(t["shape"])
        else:
            dtype = {"F32": np.float32, "I32": np.int32, "F16": np.float16}[t["dtype"]]
            found[name] = np.frombuffer(content[begin:end], dtype).reshape(t["shape"])
    return found


def round_bf16(x):
    """float32 numbers rounded to the nearest bf16, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return (((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype(np.uint32) << 16).view(np.float32).reshape(x.shape)


def text_of(num_documents, seed=1):
    """Documents of lower-case words between <|endoftext|>."""
    rng = random.Random(seed)
    words = ["".join(rng.choice("abcdefgh") for _ in range(rng.randint(2, 6))) for _ in range(30)]
    return "<|endoftext|>".join(" ".join(rng.choice(words) for _ in range(rng.randint(1, 12))) for _ in range(num_documents))


def tokens_of(text):
    """What the byte tokenizer makes of a text: each document opens with an EOT."""
    return [t for document in text.split("<|endoftext|>") for t in [EOT, *document.encode()]]


def shard(path, tokens, vocab_size=257, eot=EOT, magic=20240801, version=7, count=None, dtype=np.uint32):
    """Writes a token shard (design.md section 5), on request one that lies. Returns the path."""
    header = np.zeros(256, np.int32)
    header[:5] = magic, version, len(tokens) if count is None else count, vocab_size, eot + 1
    return write(path, header.tobytes() + np.array(tokens, np.uint64).astype(dtype).tobytes())


def batch_file(path, B, T, seed=1, vocab_size=257, **tensors):
    """Writes a --batch file of random tokens, each predicting the next; more tensors by name. Returns the path."""
    stream = np.random.default_rng(seed).integers(0, vocab_size, (B, T + 1), np.int32)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    save_file({"tokens": stream[:, :-1].copy(), "targets": stream[:, 1:].copy(), **tensors}, path)
    return path


def metrics(path):
    """The lines of a metrics.jsonl."""
    return [json.loads(line) for line in read(path).splitlines()]


def without_times(lines):
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def column(path, name):
    return [line[name] for line in metrics(path)]


def step_folder(out, step):
    return os.path.join(out, f"step_{step:08d}")


def steps_in(out):
    """The steps saved in a folder, by name alone."""
    return sorted(int(n[5:]) for n in os.listdir(out) if n.startswith("step_"))


def files_in(path):
    """Every file below a folder: name -> bytes."""
    return {os.path.relpath(os.path.join(at, name), path): read(os.path.join(at, name))
            for at, _, names in os.walk(path) for name in names}


def state_of(checkpoint):
    """trainer_state.json without the command line that is echoed in it."""
    return {k: v for k, v in json.loads(read(checkpoint + "/trainer_state.json")).items() if k != "options"}


def check_same_checkpoint(a, b):
    """Two step folders hold the same bits, apart from the command lines they were made by."""
    files_a, files_b = files_in(a), files_in(b)
    check(sorted(files_a) == sorted(files_b), f"{a} has {sorted(files_a)}, {b} has {sorted(files_b)}")
    echoes = ("trainer_state.json", "checksums.json")  # the latter covers the former
    different = [name for name in files_a if name not in echoes and files_a[name] != files_b[name]]
    check(not different, f"{a} and {b} differ in {different}")
    check(state_of(a) == state_of(b), f"{a} has the state {state_of(a)}, {b} {state_of(b)}")


def check_same_metrics(a, b):
    """Two lists of metrics lines say the same, apart from times."""
    check(len(a) == len(b), f"{len(a)} and {len(b)} lines")
    for x, y in zip(without_times(a), without_times(b)):
        check(x == y, f"{x} and {y} differ")
