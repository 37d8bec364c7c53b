#!/usr/bin/env python3
"""What every script in prepro/ shares: the byte tokenizer's files, and an output folder that is whole or not there.

    python3 prepro/shards.py data/mine      compares a folder with its manifest.json: sizes, counts, hashes

llmc/dataloader.h reads the shards, llmc/tokenizer.h the tokenizer. Python's standard library is all it needs.
"""

import argparse
import errno
import fcntl
import hashlib
import importlib
import json
import os
import shutil
import struct
import sys

EOT = "<|endoftext|>"  # opens each document in the token stream
MAGIC, VERSION = 20240801, 7  # shards of uint32
HEADER_BYTES = 1024
MAX_SHARD_TOKENS = 2**31 - 1  # the count in the header is an int32


class Error(Exception):
    """A mistake in the input: the message is the one line that the user sees."""


def parser_of(doc):
    """An ArgumentParser whose mistakes are Errors; its help begins with a script's docstring."""
    title, _, rest = doc.partition("\n")
    parser = argparse.ArgumentParser(
        description=title, epilog=rest.strip("\n"), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = lambda message: (_ for _ in ()).throw(Error(message + "; see --help"))
    return parser


def package(name, what):
    """A Python package that only some inputs need."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        name = name.split(".")[0]
        raise Error(f"{what} needs the Python package {name} ({e}): pip install {name}")


def run_main(main):
    """Runs a script's main(); errors become one line on stderr and exit code 1, Ctrl-C exit code 130."""
    name = os.path.basename(sys.argv[0])
    try:
        sys.exit(main())
    except Error as e:
        message = str(e)
    except BrokenPipeError:  # whoever read what is printed has enough: stories.py --show 100 | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # write() does not name its file
        where = e.filename or ("while writing to --out" if full else None)
        message = f"{where}: {e.strerror}" if where else str(e.strerror or e)
    except KeyboardInterrupt as e:
        if e.args:  # what to know about it
            print(f"{name}: {e}", file=sys.stderr)
        sys.exit(130)
    print(f"{name}: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(1)


def amount(text):
    """98304, 100K, 1.5M, 10B: a whole number, as the trainers take it."""
    factor = {"k": 10**3, "m": 10**6, "b": 10**9}.get(text[-1:].lower(), 1)
    number = float(text[:-1] if factor > 1 else text) * factor
    if number % 1 != 0:  # nor is it of an infinity or NaN
        raise ValueError(text)
    return int(number)


# ----------------------------------------------------------------------------
# tokenizers: an object with name, vocab_size, eot_id, encode([bytes]) -> [uint32 tokens], write_files(folder), and
# cut_anywhere: may a document be encoded in pieces? vocab.py has the other ones.


class ByteTokenizer:
    name, vocab_size, eot_id, cut_anywhere = "bytes", 257, 256, True

    def encode(self, pieces):
        return [self._encode(piece) for piece in pieces]

    def _encode(self, piece):
        tokens = bytearray(4 * len(piece))
        tokens[0::4] = piece
        return tokens

    def json(self):
        vocab = ",\n".join(f'   "\\u{ord(c):04x}": {b}' for b, c in enumerate(byte_alphabet()))
        return TOKENIZER_JSON.replace("VOCAB", vocab)

    def write_files(self, folder):
        """tokenizer.json and tokenizer_config.json, byte for byte what llmc/tokenizer.h writes."""
        with open(os.path.join(folder, "tokenizer.json"), "w", newline="\n") as f:
            f.write(self.json())
        with open(os.path.join(folder, "tokenizer_config.json"), "w", newline="\n") as f:
            f.write(tokenizer_config(EOT))


def byte_alphabet():
    """The character of each byte in byte-level tokenizer files: printable Latin-1 itself, the others U+0100 and on."""
    itself = set(range(33, 127)) | set(range(161, 173)) | set(range(174, 256))
    others = iter(range(256, 512))
    return [chr(b) if b in itself else chr(next(others)) for b in range(256)]


TOKENIZER_JSON = """{
 "version": "1.0",
 "truncation": null,
 "padding": null,
 "added_tokens": [
  {"id": 256, "content": "<|endoftext|>", "single_word": false, "lstrip": false, "rstrip": false, \
"normalized": false, "special": true}
 ],
 "normalizer": null,
 "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
 "post_processor": null,
 "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
 "model": {
  "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
  "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
  "vocab": {
VOCAB
  },
  "merges": []
 }
}
"""

def tokenizer_config(eot):
    """tokenizer_config.json for a tokenizer whose documents open with the token `eot`."""
    return f"""{{
 "tokenizer_class": "PreTrainedTokenizerFast",
 "bos_token": {json.dumps(eot)},
 "eos_token": {json.dumps(eot)},
 "clean_up_tokenization_spaces": false,
 "model_input_names": ["input_ids", "attention_mask"]
}}
"""


# ----------------------------------------------------------------------------
# the output folder


class OutputFolder:
    """Writes shards, tokenizer files and manifest.json to a hidden folder in `path`, moves them out when all are whole.

        with OutputFolder(path, overwrite) as out:
            train = out.split("train", tokenizer, shard_tokens)
            train.append(tokens, documents, num_bytes) ...
            out.finish(tokenizer, manifest)

    Without finish (an error, Ctrl-C, a kill) nothing that looks like a shard appears, and a later run sweeps up. A run
    that has a `key`, which must name all that decides what is written, may save(state) now and then: the next run with
    that key finds the state in out.saved, its writers continue the shards they had then, and it goes on from there.
    """

    OURS = ("manifest.json", "tokenizer.json", "tokenizer_config.json")

    def __init__(self, path, overwrite=False, key=None):
        self.path, self.overwrite, self.splits, self.key = path, overwrite, [], json.loads(json.dumps(key))
        self.partial = os.path.join(path, ".partial")
        self.progress = os.path.join(self.partial, "progress.json")
        self.saved, self.kept = None, {}  # the state of an unfinished run, and what its splits had

    def _ours(self):
        shards = [n for n in os.listdir(self.path) if n.startswith(("train_", "val_")) and n.endswith(".bin")]
        return sorted(shards) + [n for n in self.OURS if os.path.exists(os.path.join(self.path, n))]

    def __enter__(self):
        try:
            os.makedirs(self.path, exist_ok=True)
        except FileExistsError:
            raise Error(f"--out {self.path} is a file, not a folder")
        self.lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self.lock)
            raise Error(f"another process is writing to {self.path}")
        try:
            finished = os.path.exists(os.path.join(self.partial, "manifest.json"))
            if finished:
                self._publish()  # a run was killed between its last word and its end
            old = self._ours()
            if old and not self.overwrite:
                why = ": an interrupted run was finished but for putting its files in place, and they are there now" if finished else ""
                raise Error(f"{self.path} already holds {old[0]}{why}; take another --out, or --overwrite to replace it")
            if not self._continue():
                shutil.rmtree(self.partial, ignore_errors=True)  # left by a run that was killed
                os.mkdir(self.partial)
        except BaseException:
            os.close(self.lock)
            raise
        return self

    def _continue(self):
        """Is there an unfinished run with our key?"""
        try:
            with open(self.progress) as f:
                progress = json.load(f)
            if self.key is None or progress["key"] != self.key:
                return False
            self.saved, self.kept = progress["state"], progress["splits"]
            return True
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def save(self, state):
        """Everything written so far is on the disk and belongs to `state` (anything JSON can hold)."""
        progress = {"key": self.key, "state": state, "splits": {w.name: w.sync() for w in self.splits}}
        self._write("progress.json", progress)
        self.saved = state

    def restart(self):
        """Forgets all that was written."""
        for w in self.splits:
            w.abandon()
        self.splits, self.saved, self.kept = [], None, {}
        shutil.rmtree(self.partial)
        os.mkdir(self.partial)

    def split(self, name, tokenizer, shard_tokens):
        writer = ShardWriter(self.partial, name, tokenizer, shard_tokens, self.kept.get(name))
        self.splits.append(writer)
        return writer

    def finish(self, tokenizer, manifest):
        """Completes the files and puts them in place; manifest gets tokenizer and split counts added."""
        splits = {w.name: w.close() for w in self.splits}
        tokenizer.write_files(self.partial)
        manifest = dict(manifest, tokenizer=tokenizer.name, vocab_size=tokenizer.vocab_size, eot_id=tokenizer.eot_id)
        manifest["tokenizer_sha256"] = sha256_of(os.path.join(self.partial, "tokenizer.json"))
        tokens, count = (sum(split[what] for split in splits.values()) for what in ("tokens", "bytes"))
        manifest["tokens_per_byte"] = tokens / count if count else 0
        manifest["splits"] = splits
        if os.path.exists(self.progress):
            os.remove(self.progress)
        for name in os.listdir(self.partial):
            _fsync(os.path.join(self.partial, name))
        self._write("manifest.json", manifest)  # from here on the run can no longer fail, only be finished
        self._publish()

    def _write(self, name, content):
        path = os.path.join(self.partial, name)
        with open(path + ".tmp", "w") as f:
            json.dump(content, f, indent=1)
            f.write("\n")
            f.flush()
            os.fsync(f.fileno())
        os.replace(path + ".tmp", path)
        _fsync(self.partial)

    def _publish(self):
        """Puts whole files in the place of the old ones: the manifest goes last of the old and comes last of the new."""
        names = sorted(os.listdir(self.partial), key=lambda n: (n == "manifest.json", n))
        with open(os.path.join(self.partial, "manifest.json")) as f:
            wanted = {s["file"] for split in json.load(f)["splits"].values() for s in split["shards"]}
        for name in self._ours():
            stale = name.endswith(".bin") and name not in wanted
            if stale or name in names:  # the others are new, put in place before the run was killed
                os.remove(os.path.join(self.path, name))
        for name in names:
            os.replace(os.path.join(self.partial, name), os.path.join(self.path, name))
        os.rmdir(self.partial)
        _fsync(self.path)

    def __exit__(self, kind, value, trace):
        for w in self.splits:
            w.abandon()
        finished = os.path.exists(os.path.join(self.partial, "manifest.json"))
        if kind is None or not (finished or self.saved is not None):
            shutil.rmtree(self.partial, ignore_errors=True)
        os.close(self.lock)
        return False


def _fsync(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


class ShardWriter:
    """One split's token stream, cut into shards of at most shard_tokens; documents may span shards."""

    def __init__(self, folder, name, tokenizer, shard_tokens, kept=None):
        self.folder, self.name, self.tokenizer, self.limit = folder, name, tokenizer, shard_tokens
        self.shards, self.file, self.count = [], None, 0
        self.documents = self.tokens = self.bytes = 0
        self.eot = struct.pack("<I", tokenizer.eot_id)
        if kept is not None:
            self._continue(kept)

    def _continue(self, kept):
        """Goes back to what sync() said: whole shards, and the first tokens of one more."""
        self.documents, self.tokens, self.bytes, self.shards = (
            kept[k] for k in ("documents", "tokens", "bytes", "shards")
        )
        self.count = kept["open"]
        if self.count > 0:
            self.file = open(self._path(), "r+b")
            self.file.write(bytes(HEADER_BYTES))  # it may have been completed since
            self.file.truncate(HEADER_BYTES + 4 * self.count)
            self.file.seek(0, os.SEEK_END)
        later = len(self.shards) + (self.count > 0)
        for name in os.listdir(self.folder):
            if name.startswith(self.name + "_") and name >= f"{self.name}_{later:06d}":
                os.remove(os.path.join(self.folder, name))

    def _path(self):
        return os.path.join(self.folder, f"{self.name}_{len(self.shards):06d}.bin")

    def begin_document(self):
        self.append(self.eot, 1, 0)

    def text(self, piece):
        """Some bytes of the current document, in UTF-8."""
        self.append(self.tokenizer.encode([piece])[0], 0, len(piece))

    def append(self, tokens, documents, num_bytes):
        """Tokens (uint32) in which so many documents begin, and of how many bytes of text they were made."""
        self.documents += documents
        self.bytes += num_bytes
        at = 0
        while at < len(tokens):
            if self.file is None:
                self.file, self.count = open(self._path(), "wb"), 0
                self.file.write(bytes(HEADER_BYTES))  # the magic comes last, so that half a shard is not a shard
            take = min(len(tokens) - at, 4 * (self.limit - self.count))
            self.file.write(tokens[at : at + take] if take < len(tokens) else tokens)
            at += take
            self.count += take // 4
            self.tokens += take // 4
            if self.count == self.limit:
                self._close_shard()

    def _close_shard(self):
        header = struct.pack("<5i", MAGIC, VERSION, self.count, self.tokenizer.vocab_size, self.tokenizer.eot_id + 1)
        self.file.seek(0)
        self.file.write(header)
        self.sync()  # a later save() counts on it
        path, file = self.file.name, self.file
        self.file = None
        file.close()
        self.shards.append({"file": os.path.basename(path), "tokens": self.count, "sha256": sha256_of(path)})
        self.count = 0

    def sync(self):
        """Brings everything to the disk; returns what a later writer needs to continue."""
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())
        counts = {"documents": self.documents, "tokens": self.tokens, "bytes": self.bytes}
        return dict(counts, shards=self.shards, open=self.count)

    def close(self):
        """Completes the last shard; returns what the manifest says about the split."""
        if self.file is not None:
            self._close_shard()
        return {"documents": self.documents, "tokens": self.tokens, "bytes": self.bytes, "shards": self.shards}

    def abandon(self):
        if self.file is not None:
            try:
                self.file.close()
            except OSError:
                pass  # a full disk is being reported already
            self.file = None


def read_split(folder, name):
    """The documents (bytes) of a split of byte tokens, in order."""
    shards = sorted(n for n in os.listdir(folder) if n.startswith(name + "_") and n.endswith(".bin"))
    if not shards:
        raise Error(f"no {name}_*.bin in {folder}")
    document = None
    for shard in shards:
        path = os.path.join(folder, shard)
        with open(path, "rb") as f:
            data = f.read()
        if len(data) < HEADER_BYTES or struct.unpack("<2i", data[:8]) != (MAGIC, VERSION):
            raise Error(f"{path} is not a shard of prepro/")
        for token in memoryview(data)[HEADER_BYTES:].cast("I"):
            if token == ByteTokenizer.eot_id:
                if document is not None:
                    yield bytes(document)
                document = bytearray()
            elif document is None or token > 255:
                raise Error(f"{path}: token {token} where a document of bytes was expected")
            else:
                document.append(token)
    if document is not None:
        yield bytes(document)


def add_output_options(parser):
    parser.add_argument("--overwrite", action="store_true", help="replace shards that are already there")
    parser.add_argument(
        "--shard-tokens", type=amount, default=10**8, metavar="N", help="tokens a shard at most (default 10^8)"
    )


def check_shard_tokens(n):
    if not 1 <= n <= MAX_SHARD_TOKENS:
        raise Error(f"--shard-tokens {n} is not between 1 and {MAX_SHARD_TOKENS}")


# ----------------------------------------------------------------------------
# checking a folder


def shard_header(path):
    """The first five numbers of a shard; Error if it is none, or not whole."""
    with open(path, "rb") as f:
        data = f.read(HEADER_BYTES)
        size = os.fstat(f.fileno()).st_size
    header = struct.unpack("<5i", data[:20]) if len(data) == HEADER_BYTES else (0, 0, 0, 0, 0)
    if header[:2] != (MAGIC, VERSION) or size != HEADER_BYTES + 4 * header[2]:
        raise Error(f"{path} is not a whole shard of prepro/")
    return header


def check_folder(folder):
    """Is everything there that manifest.json names, and is it what was written then? Returns a line of counts."""
    path = os.path.join(folder, "manifest.json")
    try:
        with open(path) as f:
            manifest = json.load(f)
        splits, tokenizer = manifest["splits"], manifest["tokenizer_sha256"]
    except (ValueError, KeyError, TypeError) as e:
        raise Error(f"{path} is not a manifest of prepro/ ({type(e).__name__}: {e})")
    if sha256_of(os.path.join(folder, "tokenizer.json")) != tokenizer:
        raise Error(f"{folder}/tokenizer.json is not the one that the shards were made with")
    for shard in (s for split in splits.values() for s in split["shards"]):
        path = os.path.join(folder, shard["file"])
        header = shard_header(path)
        if header[2:] != (shard["tokens"], manifest["vocab_size"], manifest["eot_id"] + 1):
            raise Error(f"{path}: its header does not say what the manifest says")
        if sha256_of(path) != shard["sha256"]:
            raise Error(f"{path} has changed since it was written (SHA-256)")
    what = [f"{name}: {s['documents']} documents, {s['tokens']} tokens" for name, s in splits.items()]
    return f"{folder}: as written; {'; '.join(what)}; {manifest['tokens_per_byte']:.4f} tokens a byte"


def main():
    parser = parser_of(__doc__)
    parser.add_argument("folder", metavar="DIR", help="what text.py or stories.py wrote with --out")
    print(check_folder(parser.parse_args().folder))
    return 0


if __name__ == "__main__":
    run_main(main)
