"""Tokenizers beyond bytes: any tokenizer.json, from a file, a folder or Hugging Face's hub, and BPE learned from a text.

They are objects like shards.ByteTokenizer and need the Python package `tokenizers`. The shards get its ids; the file
itself is copied beside them byte for byte, so that whoever trains on them can read them.
"""

import json
import logging
import os
import re
from array import array

from qwen import WORDS
from shards import EOT, ByteTokenizer, Error, byte_alphabet, package, tokenizer_config

MIN_BPE = 257  # 256 bytes and the EOT


class JsonTokenizer:
    """A tokenizer.json through the package `tokenizers`."""

    cut_anywhere = False

    def __init__(self, name, content, config=None, eot=None):
        self.name, self.content, self.config = name, content, config
        self.encoder = None
        self._load()
        vocabulary = self.encoder.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise Error(f"{name}: its vocabulary is empty")
        self.eot = self._choose_eot(eot, vocabulary)
        self.vocab_size, self.eot_id = max(vocabulary.values()) + 1, vocabulary[self.eot]

    def _load(self):
        tokenizers = package("tokenizers", f"the tokenizer {self.name}")
        try:
            self.encoder = tokenizers.Tokenizer.from_str(self.content)
        except Exception as e:  # its own type is not exported
            raise Error(f"{self.name}: no tokenizer that `tokenizers` {tokenizers.__version__} can read: {e}")
        self.encoder.no_truncation()  # some files ask for 512 tokens of each text, all padded
        self.encoder.no_padding()
        if getattr(self.encoder.model, "dropout", None):
            self.encoder.model.dropout = None

    def __getstate__(self):  # for worker processes
        return dict(self.__dict__, encoder=None)

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._load()

    def _choose_eot(self, wanted, vocabulary):
        """The token that opens documents: --eot, else <|endoftext|>, else what the config calls the end of a text."""
        if wanted is not None:
            if wanted not in vocabulary:
                raise Error(f"--eot {wanted}: {self.name} has no such token")
            return wanted
        config = json.loads(self.config) if self.config else {}
        eos = config.get("eos_token") if isinstance(config, dict) else None
        eos = eos.get("content") if isinstance(eos, dict) else eos
        for token in (EOT, eos):
            if isinstance(token, str) and token in vocabulary:
                return token
        raise Error(f"{self.name}: which token opens a document? There is no {EOT}, name one with --eot")

    def encode(self, pieces):
        texts = [piece.decode("utf-8", "replace") for piece in pieces]
        encode = getattr(self.encoder, "encode_batch_fast", self.encoder.encode_batch)  # without places in the text
        try:
            return [array("I", e.ids).tobytes() for e in encode(texts, add_special_tokens=False)]
        except Exception as e:
            raise Error(f"{self.name}: {e}")

    def json(self):
        return self.content

    def write_files(self, folder):
        config = self.config if self.config is not None else tokenizer_config(self.eot)
        for name, content in (("tokenizer.json", self.content), ("tokenizer_config.json", config)):
            with open(os.path.join(folder, name), "w", encoding="utf-8", newline="\n") as f:
                f.write(content)


# ----------------------------------------------------------------------------
# where tokenizers come from


def open_tokenizer(where, eot=None):
    """bytes, a tokenizer.json, a folder with one in it, or a name on the hub (@revision may follow)."""
    if where == "bytes":
        if eot not in (None, EOT):
            raise Error(f"--eot {eot}: the byte tokenizer's only token for it is {EOT}")
        return ByteTokenizer()
    content, config = _read_pair(where) if os.path.exists(where) else _fetch_pair(where)
    if content == _bytes_json() and eot in (None, EOT):
        return ByteTokenizer()
    return JsonTokenizer(where, content, config, eot)


def _bytes_json():
    return ByteTokenizer().json()


def _read(path):
    try:
        with open(path, encoding="utf-8", newline="") as f:
            return f.read()
    except UnicodeDecodeError:
        raise Error(f"{path} is not UTF-8 text")


def _read_pair(where):
    path = os.path.join(where, "tokenizer.json") if os.path.isdir(where) else where
    if not os.path.exists(path):
        raise Error(f"--tokenizer {where}: there is no tokenizer.json in that folder")
    config = os.path.join(os.path.dirname(path), "tokenizer_config.json")
    return _read(path), _valid(_read(config), config) if os.path.exists(config) else None


def _valid(config, path):
    try:
        json.loads(config)
        return config
    except ValueError as e:
        raise Error(f"{path}: not JSON: {e}")


def _fetch_pair(where):
    """From the hub, or from its cache on this machine (HF_HOME; with HF_HUB_OFFLINE=1 only from there)."""
    name, _, revision = where.partition("@")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.endswith(".json"):
        raise Error(f"--tokenizer {where}: there is no such file")
    hub = package("huggingface_hub", f"the tokenizer {where}, which is no file here,")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it has a word to say about every retry
    paths = {}
    for file in ("tokenizer.json", "tokenizer_config.json"):
        try:
            paths[file] = hub.hf_hub_download(name, file, revision=revision or None)
        except Exception as e:
            if file == "tokenizer.json":  # the other one is a courtesy
                raise Error(
                    f"--tokenizer {where}: there is no such file, and Hugging Face's hub gives no tokenizer.json of "
                    f"that name ({type(e).__name__}: {first_sentence(e)})"
                )
    config = paths.get("tokenizer_config.json")
    return _read(paths["tokenizer.json"]), _valid(_read(config), config) if config else None


def first_sentence(e):
    """The beginning of a library's many-lined explanation."""
    text = " ".join(str(e).split())
    return re.split(r"(?<=[.!?]) ", text)[0][:300]


# ----------------------------------------------------------------------------
# learning one


def learn_bpe(size, pieces, name):
    """Byte-level BPE of `size` tokens, <|endoftext|> and the 256 bytes among them, from pieces of text (bytes)."""
    tokenizers = package("tokenizers", "--train-bpe")
    t = tokenizers.Tokenizer(tokenizers.models.BPE())
    words = tokenizers.pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated")
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    t.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([words, level])
    t.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, min_frequency=2, special_tokens=[EOT], initial_alphabet=byte_alphabet(), show_progress=False
    )
    t.train_from_iterator((piece.decode("utf-8", "replace") for piece in pieces), trainer)
    return JsonTokenizer(name, t.to_str(pretty=True) + "\n", tokenizer_config(EOT))
