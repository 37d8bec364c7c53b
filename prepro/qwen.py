#!/usr/bin/env python3
"""Qwen's own vocabulary without the hub: writes the tokenizer.json and tokenizer_config.json of Qwen2, 2.5 and 3.

    python3 prepro/qwen.py --out data/qwen                           pip fetches the PyPI package dashscope (2.4 MB)
    python3 prepro/qwen.py --out data/qwen --ranks qwen.tiktoken     or from its file of ranks, or its wheel
    python3 prepro/text.py --out data/mine --tokenizer data/qwen *.txt

Alibaba's Python package dashscope carries Qwen's vocabulary as tiktoken writes it: 151,643 byte strings, each with its
rank. Hugging Face's BPE wants the merges instead, pairs of tokens in the order in which they are to be joined. They can
be had back: a token of rank r came from two tokens of lower ranks, and which two is what BPE itself makes of the
token's bytes when only the ranks below r may be used. Above the ranks come 26 tokens that text has to name to get
(<|endoftext|> is 151,643); models have 151,936 rows, so that their number divides well. Standard library only.
"""

import argparse
import base64
import binascii
import glob
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile

from shards import EOT, Error, byte_alphabet, parser_of, run_main, tokenizer_config

PACKAGE, MEMBER = "dashscope==2.0.2", "dashscope/resources/qwen.tiktoken"
SHA256 = "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186"
NUM_RANKS = 151643

# their ids follow on the ranks; "special" ones are left out where text is shown without special tokens
ADDED = [(name, True) for name in (
    EOT, "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>",
    "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>",
    "<|video_pad|>")]  # fmt: skip
ADDED += [(name, False) for name in (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
    "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>")]  # fmt: skip

# what cuts text into words, inside which tokens are joined: contractions, words with the character before them, single
# digits, punctuation, line ends, other white space
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_ranks(path):
    """The file's bytes: of qwen.tiktoken itself, or of the wheel that contains it."""
    if not zipfile.is_zipfile(path):
        with open(path, "rb") as f:
            return f.read()
    with zipfile.ZipFile(path) as wheel:
        if MEMBER not in wheel.namelist():
            raise Error(f"{path}: there is no {MEMBER} in it")
        return wheel.read(MEMBER)


def download():
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
        r = subprocess.run(command + ["--dest", folder, PACKAGE], capture_output=True, text=True)
        wheels = glob.glob(os.path.join(folder, "dashscope-*.whl"))
        if r.returncode != 0 or not wheels:
            reason = (r.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise Error(f"pip cannot fetch {PACKAGE}: {reason}; where there is no network, give --ranks FILE")
        return read_ranks(wheels[0])


def parse_ranks(data, path):
    """Lines of base64 and a rank -> the tokens' bytes, in order of rank."""
    tokens = []
    for number, line in enumerate(data.splitlines()):
        try:
            token, rank = line.split()
            token = base64.b64decode(token, validate=True)
            good = int(rank) == number and token
        except (ValueError, binascii.Error):
            good = False
        if not good:
            raise Error(f"{path}: line {number + 1} is not a token in base64 and its rank {number}")
        tokens.append(token)
    if sorted(tokens[:256]) != [bytes([b]) for b in range(256)]:
        raise Error(f"{path}: the first 256 ranks are not the 256 bytes")
    return tokens


def merge_of(token, ranks, rank):
    """The two tokens that BPE joins last on the way to `token`, with ranks below its own."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        best, at = min((ranks.get(a + b, rank), i) for i, (a, b) in enumerate(zip(parts, parts[1:])))
        if best >= rank:
            raise Error(f"the token {token!r} of rank {rank} cannot be put together from those before it")
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def tokenizer_json(tokens):
    chars = byte_alphabet()
    ranks = {token: rank for rank, token in enumerate(tokens)}

    def spelled(token):
        return "".join(chars[b] for b in token)

    def byte_level(**more):
        return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False, **more}

    merges = [" ".join(map(spelled, merge_of(t, ranks, r))) for r, t in enumerate(tokens) if len(t) > 1]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": len(tokens) + i, "content": name, **flags, "special": s} for i, (name, s) in enumerate(ADDED)]
    split = {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level()]},
        "post_processor": byte_level(),
        "decoder": byte_level(),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {spelled(token): rank for rank, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def write(path, text):
    part = f"{path}.{os.getpid()}"
    with open(part, "w", encoding="utf-8", newline="\n") as f:
        f.write(text)
    os.replace(part, path)


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for tokenizer.json, tokenizer_config.json")
    parser.add_argument("--ranks", metavar="FILE", help="qwen.tiktoken, or the wheel of dashscope [pip fetches it]")
    args = parser.parse_args()
    data = read_ranks(args.ranks) if args.ranks else download()
    if hashlib.sha256(data).hexdigest() != SHA256:
        path = args.ranks or PACKAGE
        raise Error(f"{path}: these are not Qwen's {NUM_RANKS} ranks (SHA-256 {hashlib.sha256(data).hexdigest()})")
    tokens = parse_ranks(data, args.ranks or PACKAGE)
    os.makedirs(args.out, exist_ok=True)
    text = json.dumps(tokenizer_json(tokens), ensure_ascii=False, indent=0)
    write(os.path.join(args.out, "tokenizer.json"), text + "\n")
    write(os.path.join(args.out, "tokenizer_config.json"), tokenizer_config(EOT))
    print(f"{args.out}: Qwen's tokenizer, {len(tokens)} ranks and {len(ADDED)} added tokens, the last one's id is "
          f"{len(tokens) + len(ADDED) - 1}")  # fmt: skip
    return 0


if __name__ == "__main__":
    run_main(main)
