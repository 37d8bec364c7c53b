#!/usr/bin/env python3
"""How fast does llmc/tokenizer.h encode, against Hugging Face's `tokenizers`? One core each, in turns, in one process each
that stays loaded, so both meet the same noise; processor time, medians. `tokenizers` gets its quickest call,
encode_batch_fast, on one thread.

    build/venv/bin/python dev/bench/bench_tokenizer.py [--tokenizer tokenizer.json] [--rounds 9] [--also FILE]...

Without --tokenizer: Qwen's vocabulary, which prepro/qwen.py fetches. The texts: Debian's fortunes, whole files; the
fortunes one by one; Python's standard library; Chinese characters drawn at random, whose words no cache has seen; letters
with accents that NFC has to put together; each FILE.
"""

import argparse
import glob
import os
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"
from tokenizers import Tokenizer  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def texts():
    names = [p for p in sorted(glob.glob("/usr/share/games/fortunes/*")) if not p.endswith((".dat", ".u8")) and os.path.isfile(p)]
    files = [open(p, encoding="utf-8", errors="replace").read() for p in names]
    modules = [open(p, encoding="utf-8", errors="replace").read() for p in sorted(glob.glob(os.path.dirname(os.__file__) + "/*.py"))]
    rng = random.Random(1)
    chinese = ["".join(chr(rng.randrange(0x4E00, 0x9FA6)) + "，" * (rng.random() < 0.1) for _ in range(1000)) for _ in range(300)]
    accents = ["".join(rng.choice("aeiou nrst") + "\u0301" * (rng.random() < 0.3) for _ in range(4000)) for _ in range(100)]
    return {
        "fortunes, whole files": files,
        "fortunes, one by one": [t for f in files for t in f.split("\n%\n")],
        "Python source": modules,
        "random Chinese": chinese,
        "accents apart": accents,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", help="a tokenizer.json [Qwen's]")
    parser.add_argument("--also", metavar="FILE", action="append", default=[], help="a text of your own")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.tokenizer
        if path is None:
            path = os.path.join(ROOT, "build", "qwen", "tokenizer.json")
            if not os.path.exists(path):
                subprocess.run([sys.executable, os.path.join(ROOT, "prepro", "qwen.py"), "--out", os.path.dirname(path)], check=True)
        program = os.path.join(folder, "bench_tokenizer")
        subprocess.run([os.environ.get("CC", "cc"), "-O3", "-march=native", "-std=c11", "-Wno-unknown-pragmas", "-DUSE_PCRE2", "-DUSE_UTF8PROC",
                        "-I" + ROOT, os.path.join(ROOT, "dev/bench/bench_tokenizer.c"), "-o", program, "-lcjson", "-lpcre2-8", "-lutf8proc",
                        "-lm"], check=True)  # fmt: skip
        begin = time.process_time()
        theirs = Tokenizer.from_file(path)
        print(f"{path}: {theirs.get_vocab_size()} tokens; tokenizers loads it in {time.process_time() - begin:.3f} s", end="")
        print(f"; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        print("| text | MB | ids | ours, MB/s | tokenizers, MB/s | ratio |\n| --- | --- | --- | --- | --- | --- |")
        own = {os.path.basename(p): [open(p, encoding="utf-8", errors="replace").read()] for p in args.also}
        for name, documents in {**texts(), **own}.items():
            data = [d.encode() for d in documents]
            size = sum(map(len, data)) / 1e6
            file = os.path.join(folder, "texts")
            with open(file, "wb") as f:
                f.write(b"".join(struct.pack("<I", len(d)) + d for d in data))
            p = subprocess.Popen([program, path, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            p.stdout.readline()
            mine, hf, ratios = [], [], []
            for turn in range(args.rounds + 1):  # the first warms up
                p.stdin.write("go\n")
                p.stdin.flush()
                seconds, ids = p.stdout.readline().split()
                begin = time.process_time()
                encodings = theirs.encode_batch_fast(documents, add_special_tokens=False)
                spent = time.process_time() - begin
                n = sum(len(e) for e in encodings)
                if n != int(ids):
                    sys.exit(f"{name}: {ids} ids, but {n} from tokenizers")
                if turn > 0:
                    mine.append(size / float(seconds))
                    hf.append(size / spent)
                    ratios.append(mine[-1] / hf[-1])
            p.stdin.close()
            p.wait()
            print(f"| {name} | {size:.2f} | {n} | {statistics.median(mine):.1f} | {statistics.median(hf):.1f} | {statistics.median(ratios):.1f} |", flush=True)


main()
