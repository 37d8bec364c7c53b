#!/usr/bin/env python3
"""Text, JSON lines, Parquet files or a Hugging Face dataset -> token shards to train on.

    python3 prepro/text.py --out data/mine book.txt letters.txt
    python3 prepro/text.py --out data/fortunes --document-separator % --skip '*.dat' --skip '*.u8' \\
        /usr/share/games/fortunes/*
    python3 prepro/text.py --out data/mine --train-bpe 8192 notes/*.jsonl.gz
    python3 prepro/text.py --out data/mine --tokenizer Qwen/Qwen3-0.6B --dataset ORG/NAME

A text file is one document, or several: the literal <|endoftext|> ends one, and so does a line that is exactly the
--document-separator. Of .jsonl and .parquet files and of datasets each row is a document, its --field. Newlines around
a document are dropped, empty documents too. The token stream is, for each document, <|endoftext|> and then its tokens,
which is also what the trainers read from text with --tokenize inline. Some documents, drawn by --seed, are kept for
validation. Memory does not grow with the input. Nothing appears in --out until all is whole; the same command goes on
where an interrupted one was. Bytes need nothing but Python; what needs more says what.
"""

import codecs
import collections
import fnmatch
import hashlib
import math
import multiprocessing
import os
import random
import re
import signal
import sys
import threading
import time
from concurrent import futures

import sources
import vocab
from shards import Error, OutputFolder, add_output_options, amount, check_shard_tokens, parser_of, run_main

BATCH = 1 << 18  # bytes of text that a worker gets at once
PIECE = 1 << 20  # a longer document is encoded in pieces, cut between words
SAVE_EVERY = 10  # seconds
REDRAW = (0.2, 30)  # seconds between two looks of the bar, between two lines in a file


# ----------------------------------------------------------------------------
# the split: of each 1 / fraction documents one, at a place that the seed draws. No document's lot depends on how many
# there are, or on the others.


class ValidationDraw:
    def __init__(self, seed, fraction):
        self.seed, self.rare = seed, fraction > 0.5  # which of the two splits is drawn
        self.fraction = 1 - fraction if self.rare else fraction

    def __call__(self, number):
        """Is document `number` one for validation?"""
        return self._drawn(number) != self.rare

    def _drawn(self, number):
        block = int(number * self.fraction)
        return self.fraction > 0 and any(number == self._place(b) for b in (block - 1, block, block + 1) if b >= 0)

    def _place(self, block):
        return int((block + random.Random(f"{self.seed} {block}").random()) / self.fraction)


# ----------------------------------------------------------------------------
# documents -> batches of pieces, the unit of work


class Batch:
    """Pieces (split, opens, bytes): split 1 is validation; `begin` is where it begins, None: within a document;
    `fraction`: how much of everything had been read by then, None: who knows."""

    def __init__(self, begin, fraction):
        self.begin, self.fraction, self.pieces, self.size = begin, fraction, [], 0


class Reader:
    """All documents of all sources in order, in batches that depend on nothing but them and the options."""

    def __init__(self, inputs, draw, cut_anywhere, at=None):
        self.inputs, self.draw, self.cut_anywhere = inputs, draw, cut_anywhere
        self.number, self.source = (at["number"], at["source"]) if at else (0, 0)  # of the next document, of its source
        self.counts = at["documents"] if at else [0] * len(inputs)  # documents of each source
        self.state = [at["state"]] if at else []

    def documents(self):
        """(where, split, opens, piece); where: what Reader takes to begin there, None within a document"""
        for self.source in range(self.source, len(self.inputs)):
            source, split = self.inputs[self.source]
            for state, piece in source.documents(*self.state):
                if state is not None:
                    counts = list(self.counts)
                    where = {"source": self.source, "state": state, "number": self.number, "documents": counts}
                    chosen = split if split is not None else int(self.draw(self.number))
                    self.number += split is None
                    self.counts[self.source] += 1
                yield (where if state is not None else None), chosen, state is not None, piece
            self.state = []

    def pieces(self):
        """The same, each piece what can be encoded alone."""
        if self.cut_anywhere:
            yield from self.documents()
            return
        held = None
        for where, split, opens, piece in self.documents():
            if opens and held is not None:
                yield held
            held = (where, split, opens, piece) if opens else (*held[:3], held[3] + piece)
            while len(held[3]) > PIECE:
                at = place_to_cut(held[3])
                yield (*held[:3], held[3][:at])
                held = (None, held[1], False, held[3][at:])
        if held is not None:
            yield held

    def batches(self):
        batch = None
        for where, split, opens, piece in self.pieces():
            if batch is None:
                batch = Batch(where, self.fraction())
            elif batch.size >= (4 * BATCH if where is None else BATCH):  # within a document only if it is long
                yield batch
                batch = Batch(where, self.fraction())
            batch.pieces.append((split, opens, piece))
            batch.size += len(piece)
        if batch is not None:
            yield batch

    def fraction(self):
        sizes = [source.size for source, _ in self.inputs]
        if None in sizes or sum(sizes) == 0:
            return None
        return (sum(sizes[: self.source]) + self.inputs[self.source][0].done()) / sum(sizes)


def place_to_cut(text):
    """Where a long text may be cut so that its parts have the tokens of the whole: between a letter and white space."""
    window, end = 1 << 16, PIECE
    while text[end] & 0xC0 == 0x80:
        end -= 1  # not within a character
    begin = end - window
    while text[begin] & 0xC0 == 0x80:
        begin += 1
    part = text[begin:end].decode("utf-8", "replace")
    last = None
    for last in re.finditer(r"[^\W\d_](?=\s)", part):
        pass
    return begin + len(part[: last.end()].encode()) if last else end


# ----------------------------------------------------------------------------
# batches -> tokens, in worker processes


def encode_batch(tokenizer, batch_pieces):
    """[tokens to train on, tokens to validate on], each document opened by the EOT"""
    eot = tokenizer.eot_id.to_bytes(4, "little")
    result = [bytearray(), bytearray()]
    encoded = tokenizer.encode([piece for _, _, piece in batch_pieces])
    for (split, opens, _), tokens in zip(batch_pieces, encoded):
        if opens:
            result[split] += eot
        result[split] += tokens
    return result


_worker_tokenizer = None


def start_worker(tokenizer, parent):
    global _worker_tokenizer
    _worker_tokenizer = tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's business

    def watch():
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)  # it was killed: nobody else would tell us

    threading.Thread(target=watch, daemon=True).start()


def worker_encode(pieces):
    return encode_batch(_worker_tokenizer, pieces)


def encoded_batches(batches, tokenizer, workers):
    """(batch, its tokens), in order; a few batches are on their way at any time"""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes, not threads: there are as many as --workers says
    if workers == 1:
        for batch in batches:
            yield batch, encode_batch(tokenizer, batch.pieces)
        return
    method = "fork" if sys.platform == "linux" else "spawn"
    pool = futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context(method), start_worker, (tokenizer, os.getpid())
    )
    under_way = collections.deque()
    try:
        for batch in batches:
            under_way.append((batch, pool.submit(worker_encode, batch.pieces)))
            if len(under_way) > 2 * workers:
                batch, future = under_way.popleft()
                yield batch, future.result()
        while under_way:
            batch, future = under_way.popleft()
            yield batch, future.result()
    except futures.process.BrokenProcessPool:
        raise Error("a worker process died, most likely for want of memory: fewer --workers need less")
    finally:
        pool.shutdown(cancel_futures=True)


# ----------------------------------------------------------------------------
# progress: a bar on a terminal, else a line now and then


class Progress:
    def __init__(self, what, out=sys.stderr):
        self.what, self.out, self.tty = what, out, out.isatty()
        self.begin = self.shown = time.monotonic()
        self.begin_fraction, self.drawn = None, False
        self.bytes = self.tokens = 0

    def add(self, num_bytes, tokens, fraction):
        self.bytes += num_bytes
        self.tokens += tokens
        if self.begin_fraction is None:
            self.begin_fraction = fraction  # a run that goes on has done part of the work before
        now = time.monotonic()
        if now - self.shown >= REDRAW[0 if self.tty else 1]:
            self.shown = now
            line = self.line(now - self.begin, fraction)
            self.out.write(f"\r{line}\x1b[K" if self.tty else line + "\n")
            self.out.flush()
            self.drawn = self.tty

    def line(self, seconds, fraction):
        rate = self.bytes / max(seconds, 1e-9) / 1e6
        said = f"{self.bytes / 1e6:.1f} MB | {rate:.2f} MB/s | {self.tokens / 1e6:.2f}M tokens"
        if fraction is None:
            return f"{self.what} | {said}"
        bar, since = "#" * int(20 * min(fraction, 1)), fraction - self.begin_fraction
        eta = f" | eta {duration(seconds * (1 - fraction) / since)}" if since > 0 else ""
        return f"{self.what} [{bar:<20}] {100 * fraction:3.0f}% | {said}{eta}"

    def clear(self):
        if self.drawn:
            self.out.write("\r\x1b[K")
            self.out.flush()


def duration(seconds):
    s = max(0, math.ceil(seconds))
    return f"{s // 3600}h{s // 60 % 60:02d}m" if s >= 3600 else f"{s // 60}m{s % 60:02d}s" if s >= 60 else f"{s}s"


# ----------------------------------------------------------------------------
# options


def build_parser(doc):
    parser = parser_of(doc)
    add = parser.add_argument
    add("files", nargs="*", metavar="FILE", help="text; .jsonl, .parquet; each also as .gz")
    add("--dataset", metavar="NAME", help="instead of files: a dataset on Hugging Face's hub, or a folder of one")
    add("--dataset-config", metavar="NAME", help="which of its configurations")
    add("--dataset-split", default="train", metavar="NAME", help="which of its splits (default train)")
    add("--val-split", metavar="NAME", help="validate on this split of it, instead of drawing documents")
    add("--revision", metavar="REV", help="of the dataset: a tag or commit")
    add("--val-files", nargs="+", default=[], metavar="FILE", help="validate on these, instead of drawing documents")
    add("--out", required=True, metavar="DIR", help="folder for shards, tokenizer files, manifest.json")
    add_output_options(parser)
    add("--tokenizer", metavar="WHAT", help="bytes (default), a tokenizer.json, its folder, or a name on the hub")
    add("--train-bpe", type=amount, metavar="N", help="learn a byte-level BPE of N tokens from the documents to train on")
    add("--bpe-bytes", type=amount, default=10**8, metavar="N", help="learn it from so much text (default 10^8 bytes)")
    add("--eot", metavar="TOKEN", help="the token that opens documents (default <|endoftext|>, else the tokenizer's EOS)")
    add("--format", choices=sorted(sources.KINDS), help="of all files (default: what their names say)")
    add("--field", default="text", metavar="NAME", help="of JSON lines, Parquet, datasets: where the text is (text)")
    add(
        "--document-separator",
        metavar="LINE",
        help="of text files: a line that is exactly this ends a document ('' is an empty line); default: only the "
        "file's end and <|endoftext|> do",
    )
    add(
        "--val-fraction",
        type=float,
        metavar="X",
        help="share of the documents to validate on (default 0.05, at least one document; 0: none)",
    )
    add("--seed", type=int, default=1, help="draws the validation documents (default 1)")
    add("--max-tokens", type=amount, metavar="N", help="stop soon after so many tokens to train on")
    add("--skip", action="append", default=[], metavar="GLOB", help="leave out files of such names; may be repeated")
    add("--encoding", default="utf-8", help="of text files (default utf-8)")
    add(
        "--errors",
        choices=["strict", "replace"],
        default="strict",
        help="what is not in the encoding: stop (default), or replace it with U+FFFD",
    )
    add("--workers", type=int, metavar="N", help="processes that encode (default: one a core; for bytes 1)")
    return parser


def check_options(args):
    if args.val_fraction is None:
        args.val_fraction = 0.05
    elif args.val_split or args.val_files:
        raise Error("--val-fraction draws documents, --val-split and --val-files name them: give one of them")
    if not (args.val_fraction == 0 or 1e-9 <= args.val_fraction < 1):
        raise Error(f"--val-fraction {args.val_fraction:g} is neither 0 nor between 1e-9 and 1")
    check_shard_tokens(args.shard_tokens)
    for name, least in (("train_bpe", vocab.MIN_BPE), ("bpe_bytes", 1), ("max_tokens", 1), ("workers", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise Error(f"--{name.replace('_', '-')} {value} is not at least {least}")
    if args.train_bpe is not None and (args.tokenizer is not None or args.eot is not None):
        raise Error("--train-bpe learns a tokenizer with <|endoftext|>: it goes with neither --tokenizer nor --eot")
    if args.document_separator is not None and re.search(r"[\r\n]", args.document_separator):
        raise Error("--document-separator is one line; it cannot contain a line break")
    try:
        known = codecs.getincrementaldecoder(args.encoding)().decode(b"") == ""  # and not bytes to bytes, as "hex" is
    except LookupError:
        known = False
    if not known:
        raise Error(f"--encoding {args.encoding} is not one that Python knows")


def choose_files(files, args):
    """The sources to read, in the order given: without those to skip, each once even if it is linked twice."""
    chosen, seen = [], set()
    for path in files:
        if any(fnmatch.fnmatch(os.path.basename(path), pattern) for pattern in args.skip):
            continue
        if os.path.isdir(path):
            raise Error(f"{path} is a folder; name the files in it, as in {os.path.join(path, '*')}")
        if os.path.realpath(path) not in seen:
            seen.add(os.path.realpath(path))
            chosen.append(sources.open_file(path, args))
    if not chosen:
        raise Error("--skip leaves no file to read")
    return chosen


def choose_inputs(args):
    """[(source, split)]: 0 to train on, 1 to validate, None: its documents are drawn"""
    if bool(args.files) == bool(args.dataset):
        raise Error("what to read? Give FILEs or --dataset NAME; see --help")
    if args.dataset:
        if args.val_files:
            raise Error("--val-files goes with files; of a dataset give --val-split")
        train, val = [sources.Dataset(args.dataset_split, args)], []
        if args.val_split:
            val = [sources.Dataset(args.val_split, args)]
    else:
        if args.val_split:
            raise Error("--val-split goes with --dataset; of files give --val-files")
        train, val = choose_files(args.files, args), choose_files(args.val_files, args) if args.val_files else []
    return [(source, 0 if val else None) for source in train] + [(source, 1) for source in val]


def run_key(args, inputs):
    """All that decides what is written."""
    names = "shard_tokens train_bpe bpe_bytes format field document_separator val_fraction seed max_tokens encoding errors"
    key = {name: getattr(args, name) for name in names.split()}
    tokenizer = None if args.train_bpe else [args.opened.eot_id, hashlib.sha256(args.opened.json().encode()).hexdigest()]
    return dict(key, tokenizer=tokenizer, inputs=[[*source.key(), split] for source, split in inputs], version=1)


# ----------------------------------------------------------------------------
# the whole way


def learn(inputs, draw, args):
    """--train-bpe: from the documents to train on; where they are more than --bpe-bytes, from every k-th of them."""
    sizes = [source.size for source, split in inputs if split != 1]
    every = 1 if args.dataset else max(1, sum(sizes) // args.bpe_bytes)
    progress, reader = Progress("reading for --train-bpe"), Reader(inputs, draw, False)

    def chosen():
        left, number = args.bpe_bytes, -1
        for _, split, opens, piece in reader.pieces():
            number += opens and split == 0
            if split == 0 and number % every == 0:
                if left <= 0:
                    return
                left -= len(piece)
                progress.add(len(piece), 0, reader.fraction())
                yield piece

    try:
        return vocab.learn_bpe(args.train_bpe, chosen(), f"bpe {args.train_bpe}")
    finally:
        progress.clear()


def tokenizer_of(out, inputs, draw, args):
    """The one that is named, or the one that is learned, which a run that goes on has done before."""
    if args.train_bpe is None:
        return args.opened
    learned = os.path.join(out.partial, "learned.json")
    if out.saved is None or not os.path.exists(learned):
        content = learn(inputs, draw, args).content
        with open(learned, "w", encoding="utf-8") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
    with open(learned, encoding="utf-8") as f:
        return vocab.JsonTokenizer(f"bpe {args.train_bpe}", f.read())


def write_splits(out, inputs, fraction, args):
    """Every document to its split. Returns the tokenizer and the number of documents in each source."""
    draw = ValidationDraw(args.seed, fraction)
    tokenizer = tokenizer_of(out, inputs, draw, args)
    writers = [out.split(name, tokenizer, args.shard_tokens) for name in ("train", "val")]
    reader = Reader(inputs, draw, tokenizer.cut_anywhere, out.saved)
    progress, saved = Progress(args.out), time.monotonic()
    workers = args.workers or (1 if tokenizer.cut_anywhere else num_cores())
    encoded = encoded_batches(reader.batches(), tokenizer, workers)
    try:
        for batch, tokens in encoded:
            if batch.begin is not None:  # between two documents
                if args.max_tokens is not None and writers[0].tokens >= args.max_tokens:
                    return tokenizer, batch.begin["documents"]
                if time.monotonic() - saved >= SAVE_EVERY:
                    out.save(dict(batch.begin, fraction=fraction))
                    saved = time.monotonic()
            for split, writer in enumerate(writers):
                mine = [(opens, len(piece)) for s, opens, piece in batch.pieces if s == split]
                writer.append(tokens[split], sum(opens for opens, _ in mine), sum(size for _, size in mine))
            progress.add(batch.size, sum(map(len, tokens)) // 4, batch.fraction)
        return tokenizer, reader.counts
    except KeyboardInterrupt:
        said = ["interrupted: the same command goes on from here"] if out.saved is not None else []
        progress.clear()
        raise KeyboardInterrupt(*said)
    finally:
        encoded.close()
        progress.clear()


def num_cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_splits(train, val, inputs, args):
    count = train.documents + val.documents
    if count == 0:
        others = f" and the {len(inputs) - 1} other files" if len(inputs) > 1 else ""
        raise Error(f"no text in {inputs[0][0].name}{others}")
    drawn = any(split is None for _, split in inputs)
    if drawn and args.val_fraction > 0 and (count == 1 or train.documents == 0):
        raise Error(
            f"{count} document{'s' if count > 1 else ''} cannot be split into training and validation with "
            f"--val-fraction {args.val_fraction:g}; cut the text with --document-separator, or pass --val-fraction 0 "
            "and validate on other text"
        )
    if train.documents == 0:
        raise Error("no text to train on, only to validate")
    return drawn and args.val_fraction > 0 and val.documents == 0


def convert(args):
    """From options to shards; the last line says what was written."""
    check_options(args)
    inputs = choose_inputs(args)
    if args.train_bpe is None:
        args.opened = vocab.open_tokenizer(args.tokenizer or "bytes", args.eot)
    with OutputFolder(args.out, args.overwrite, run_key(args, inputs)) as out:
        if out.saved is not None:
            print(f"{args.out}: going on where an interrupted run was", file=sys.stderr)
        fraction = out.saved["fraction"] if out.saved is not None else args.val_fraction
        tokenizer, documents = write_splits(out, inputs, fraction, args)
        if check_splits(*out.splits, inputs, args):  # fewer than 1 / fraction documents, and none was drawn: one must
            count = out.splits[0].documents
            out.restart()
            inputs = choose_inputs(args)
            tokenizer, documents = write_splits(out, inputs, 1 / count, args)
        learned = os.path.join(out.partial, "learned.json")
        if os.path.exists(learned):
            os.remove(learned)
        files = [{"file": source.name, "documents": n} for (source, _), n in zip(inputs, documents)]
        source = {"source": args.dataset or "text", "seed": args.seed, "val_fraction": args.val_fraction}
        out.finish(tokenizer, dict(source, files=files))
    train, val = out.splits
    if args.train_bpe is not None and tokenizer.vocab_size < args.train_bpe:
        print(f"{args.out}: the text gave only {tokenizer.vocab_size} of {args.train_bpe} tokens")
    print(
        f"{args.out}: {train.documents} documents to train on ({train.tokens} tokens in {len(train.shards)} shards), "
        f"{val.documents} to validate ({val.tokens} tokens); {tokenizer.name}: "
        f"{(train.tokens + val.tokens) / (train.bytes + val.bytes):.4f} tokens a byte"
    )
    share = val.bytes / (train.bytes + val.bytes)
    if not args.val_files and not args.val_split and share > 0.1 + 2 * args.val_fraction:
        print(f"{args.out}: {share:.0%} of the text is for validation, because whole documents are: cut them with --document-separator, or name --val-files")
    return 0


def main():
    return convert(build_parser(__doc__).parse_args())


if __name__ == "__main__":
    run_main(main)
