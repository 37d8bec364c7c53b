"""What every script in prepro/ shares: the byte tokenizer's files, and an output folder that is whole or not there.

The files are those of design.md, section 5; llmc/dataloader.h reads the shards, llmc/tokenizer.h the tokenizer.
"""

import fcntl
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


def run_main(main):
    """Runs a script's main(); errors become one line on stderr and exit code 1, Ctrl-C exit code 130."""
    name = os.path.basename(sys.argv[0])
    try:
        sys.exit(main())
    except Error as e:
        message = str(e)
    except OSError as e:
        message = f"{e.filename}: {e.strerror}" if e.filename else str(e.strerror or e)
    except KeyboardInterrupt:
        sys.exit(130)
    print(f"{name}: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(1)


# ----------------------------------------------------------------------------
# tokenizers: an object with name, vocab_size, eot_id, encode(bytes) -> uint32 tokens, write_files(folder).
# encode is called piece by piece, a document never has to fit in memory. Other vocabularies get a class like this one.


class ByteTokenizer:
    name, vocab_size, eot_id = "bytes", 257, 256

    def encode(self, piece):
        tokens = bytearray(4 * len(piece))
        tokens[0::4] = piece
        return tokens

    def write_files(self, folder):
        """tokenizer.json and tokenizer_config.json, byte for byte what llmc/tokenizer.h writes."""
        vocab = ",\n".join(f'   "\\u{ord(c):04x}": {b}' for b, c in enumerate(byte_alphabet()))
        with open(os.path.join(folder, "tokenizer.json"), "w", newline="\n") as f:
            f.write(TOKENIZER_JSON.replace("VOCAB", vocab))
        with open(os.path.join(folder, "tokenizer_config.json"), "w", newline="\n") as f:
            f.write(TOKENIZER_CONFIG_JSON)


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

TOKENIZER_CONFIG_JSON = """{
 "tokenizer_class": "PreTrainedTokenizerFast",
 "bos_token": "<|endoftext|>",
 "eos_token": "<|endoftext|>",
 "clean_up_tokenization_spaces": false,
 "model_input_names": ["input_ids", "attention_mask"]
}
"""


# ----------------------------------------------------------------------------
# the output folder


class OutputFolder:
    """Writes shards, tokenizer files and manifest.json to a hidden folder in `path`, moves them out when all are whole.

        with OutputFolder(path, overwrite) as out:
            train = out.split("train", tokenizer, shard_tokens)
            train.write(tokens) ...
            out.finish(tokenizer, manifest)

    Without finish (an error, Ctrl-C, a kill) nothing that looks like a shard appears; a later run sweeps up.
    """

    OURS = ("manifest.json", "tokenizer.json", "tokenizer_config.json")

    def __init__(self, path, overwrite=False):
        self.path, self.overwrite, self.splits = path, overwrite, []
        self.partial = os.path.join(path, ".partial")

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
            old = self._ours()
            if old and not self.overwrite:
                raise Error(f"{self.path} already holds {old[0]}; take another --out, or --overwrite to replace it")
            shutil.rmtree(self.partial, ignore_errors=True)  # left by a run that was killed
            os.mkdir(self.partial)
        except BaseException:
            os.close(self.lock)
            raise
        return self

    def split(self, name, tokenizer, shard_tokens):
        writer = ShardWriter(self.partial, name, tokenizer, shard_tokens)
        self.splits.append(writer)
        return writer

    def finish(self, tokenizer, manifest):
        """Completes the files and puts them in place; manifest gets tokenizer and split counts added."""
        manifest = dict(manifest, tokenizer=tokenizer.name, vocab_size=tokenizer.vocab_size, eot_id=tokenizer.eot_id)
        manifest["splits"] = {w.name: w.close() for w in self.splits}
        tokenizer.write_files(self.partial)
        with open(os.path.join(self.partial, "manifest.json"), "w") as f:
            json.dump(manifest, f, indent=1)
            f.write("\n")
        names = sorted(os.listdir(self.partial))
        for name in names:
            _fsync(os.path.join(self.partial, name))
        for name in self._ours():  # the manifest goes last of the old and comes last of the new
            os.remove(os.path.join(self.path, name))
        for name in sorted(names, key=lambda n: n == "manifest.json"):
            os.replace(os.path.join(self.partial, name), os.path.join(self.path, name))
        _fsync(self.path)

    def __exit__(self, kind, value, trace):
        for w in self.splits:
            w.abandon()
        shutil.rmtree(self.partial, ignore_errors=True)
        os.close(self.lock)
        return False


def _fsync(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class ShardWriter:
    """One split's token stream, cut into shards of at most shard_tokens; documents may span shards."""

    def __init__(self, folder, name, tokenizer, shard_tokens):
        self.folder, self.name, self.tokenizer, self.limit = folder, name, tokenizer, shard_tokens
        self.shards, self.file, self.count = [], None, 0
        self.documents = self.tokens = 0
        self.eot = struct.pack("<I", tokenizer.eot_id)

    def begin_document(self):
        self.documents += 1
        self._write(self.eot)

    def text(self, piece):
        """Some bytes of the current document, in UTF-8."""
        self._write(self.tokenizer.encode(piece))

    def _write(self, tokens):
        at = 0
        while at < len(tokens):
            if self.file is None:
                path = os.path.join(self.folder, f"{self.name}_{len(self.shards):06d}.bin")
                self.file, self.count = open(path, "wb"), 0
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
        self.shards.append({"file": os.path.basename(self.file.name), "tokens": self.count})
        self.file.close()
        self.file = None

    def close(self):
        """Completes the last shard; returns what the manifest says about the split."""
        if self.file is not None:
            self._close_shard()
        return {"documents": self.documents, "tokens": self.tokens, "shards": self.shards}

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
        "--shard-tokens", type=int, default=10**8, metavar="N", help="tokens a shard at most (default 10^8)"
    )


def check_shard_tokens(n):
    if not 1 <= n <= MAX_SHARD_TOKENS:
        raise Error(f"--shard-tokens {n} is not between 1 and {MAX_SHARD_TOKENS}")
