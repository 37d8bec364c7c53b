"""llmc/tokenizer.h gives the ids of Hugging Face's `tokenizers`, for byte-level BPE of every kind that is read: small
vocabularies learned here from Debian's fortunes, cut and normalized as GPT-2, Llama 3, GPT-4o, DeepSeek, SmolLM, GPT-NeoX
and Qwen do it, and Qwen's own vocabulary. What a tokenizer.json asks for beyond that is refused by name, and a hostile
one costs neither time nor memory.

Characters younger than Unicode 3.2 are left out, but for emoji: PCRE2, libutf8proc and `tokenizers` each know another
version of Unicode, and of characters that one of them does not know yet they think differently."""

import glob
import json
import random
import re
import struct
import sys
import time
import unicodedata

from harness import *

sys.path.insert(0, os.path.join(ROOT, "prepro"))
BUILD = os.path.join(ROOT, "build", "test")
PROGRAM = os.path.join(BUILD, "tokenize")
FORTUNES = "/usr/share/games/fortunes"
TEXT_FLAGS = os.environ.get("TEXT_FLAGS", "-DUSE_PCRE2 -DUSE_UTF8PROC").split()  # make test says what it found
TEXT_LIBS = os.environ.get("TEXT_LIBS", "-lpcre2-8 -lutf8proc").split()
EOT = "<|endoftext|>"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|")
GPT4O = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")  # fmt: skip
DEEPSEEK = [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
            r"\s*[\r\n]+|\s+(?!\S)|\s+"]  # fmt: skip


def byte_level(space=False, regex=False):
    return {"type": "ByteLevel", "add_prefix_space": space, "trim_offsets": True, "use_regex": regex}


def split(pattern, behavior="Isolated", invert=False, kind="Regex"):
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": invert}


def sequence(*parts):
    return {"type": "Sequence", "pretokenizers": list(parts)}


def added(content, special=False, **flags):
    return {"content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": not special, "special": special, **flags}


SPECIAL = [added(EOT, True), added("<|im_start|>", True), added("<|im_end|>", True), added("<tool_call>", normalized=False),
           added("<think>"), added("<|im_start|>user", True)]  # fmt: skip
STRIP = [added("<mask>", True, lstrip=True), added("[END]", True, rstrip=True), added("<both>", lstrip=True, rstrip=True),
         added("  ", normalized=True), added("    "), added("\t\t"), added("café—"), added("cafe\u0301 au lait", normalized=False)]  # fmt: skip
NFC = {"type": "NFC"}

# name: vocabulary size, pre-tokenizer, normalizer, added tokens, more of the model
KINDS = {
    "gpt2": (2000, byte_level(regex=True), None, SPECIAL[:1], {}),
    "gpt2_space": (600, byte_level(True, True), None, SPECIAL, {}),
    "qwen": (3000, sequence(split(QWEN), byte_level()), NFC, SPECIAL, {}),
    "llama3": (2500, sequence(split(LLAMA3), byte_level()), None, SPECIAL, {"ignore_merges": True}),
    "gpt4o": (1500, sequence(split(GPT4O), byte_level()), None, SPECIAL, {}),
    "deepseek": (1500, sequence(*map(split, DEEPSEEK), byte_level()), {"type": "Sequence", "normalizers": []}, SPECIAL, {}),
    "smollm": (1500, sequence({"type": "Digits", "individual_digits": True}, byte_level(regex=True)), None, SPECIAL, {}),
    "digits": (1000, sequence({"type": "Digits", "individual_digits": False}, byte_level(True, True)), None, SPECIAL, {}),
    "neox": (1500, byte_level(regex=True), {"type": "Sequence", "normalizers": [NFC]}, SPECIAL + STRIP, {}),
    "old_split": (1500, sequence(split(GPT2, "Removed", True), byte_level()), NFC, SPECIAL + STRIP, {}),
    "words": (600, sequence(split(" ", "Removed", kind="String"), split("-->", kind="String"), byte_level(True)), None, [], {}),
    "letters": (600, sequence(split(r"\p{L}+|\p{N}", "Removed", True), byte_level()), None, SPECIAL, {}),
    "one_word": (600, byte_level(), None, SPECIAL, {}),
}


def build(sanitized):
    """The C program under test; the sanitized one is for the strings where something may be touched that is not there."""
    os.makedirs(BUILD, exist_ok=True)
    out = PROGRAM + ("_asan" if sanitized else "")
    flags = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"] if sanitized else ["-O2"]
    run([os.environ.get("CC", "cc"), "-std=c11", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-I.", *flags, *TEXT_FLAGS,
         "dev/test/tokenize.c", "-o", out, "-lcjson", *TEXT_LIBS, "-lm"])  # fmt: skip
    return out


def fortunes():
    names = [p for p in sorted(glob.glob(FORTUNES + "/*")) if not p.endswith((".dat", ".u8")) and os.path.isfile(p)]
    check(names, f"there are no texts in {FORTUNES}: apt-get install fortunes")
    return [read(p).decode("utf-8", "replace") for p in names]


_learned = {}


def learned(size):
    """vocab and merges of a byte-level BPE learned from a part of the fortunes."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    if size not in _learned:
        t = Tokenizer(models.BPE())
        t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
        t.train_from_iterator([x[:60000] for x in fortunes()] + SAMPLES * 20, trainer)
        model = json.loads(t.to_str())["model"]
        _learned[size] = model["vocab"], model["merges"]
    return _learned[size]


def tokenizer_json(kind):
    size, pre, normalizer, more, options = KINDS[kind]
    vocab, merges = learned(size)
    if kind in ("gpt2", "words"):  # as older files write them
        merges = [" ".join(m) for m in merges]
    options = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": "", **options}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [dict(a, id=size + i) for i, a in enumerate(more)],
            "normalizer": normalizer, "pre_tokenizer": pre, "post_processor": None, "decoder": byte_level(),
            "model": {**options, "vocab": vocab, "merges": merges}}  # fmt: skip


# ----------------------------------------------------------------------------
# strings

SAMPLES = [
    "Hello, world! It's the 21st century; we've 3.14159 reasons, don't we? I'LL SAY SO. They'Re 'S 'ſ 'K ''re",
    "naïve café — “quoted” ‘text’ … ½ ⅔ Ⅷ ² ① 100,000 € 5₹",
    "你好，世界！今天天气不错，我们去公园吧。2024年3月14日",
    "こんにちは世界。カタカナ、ひらがな、漢字が混ざった文。ｶﾞｷﾞ がぎ",
    "안녕하세요 세계! 각 각 ᄒ",
    "Привет, мир! Ёлка й й 12 обезьян",
    "नमस्ते दुनिया क़ क़ ড় மொழி ภาษาไทย ພາສາລາວ",
    "مرحبا بالعالم أإآ ١٢٣ שלום עולם שָׁלוֹם",
    "😀 👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷 ☎️ 1️⃣ 🤷🏾‍♀️",
    "e\u0301 a\u0323\u0307 a\u0307\u0323 q\u0307\u0323 \u0301x Å Å \u212B \u2126 ế ế u\u0308\u0304 ﬁ ǆ",
    "def f(x):\n\treturn x**2  # comment\n\n\n    if x == 1:\r\n        pass\r\n",
    "   leading, trailing   \n \n\t \t\u00a0\u2003\u3000 \u0085\u180e\u200b end  ",
    "a\x00b\x01\x7f\x1b[2J \ufeff\ufffd\u2028\u2029",
    "<html><!-- --> &amp; https://example.com/?q=1&r=%20 foo_bar-baz@qux.org C++ C# $$$ ===>>> ~~~```",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" + "ab" * 50 + "=" * 70 + " " * 90 + "x",
    "0123456789 12345678901234567890 1 22 333 4444 55555",
    "<|endoftext|><|im_start|>user\nHi<|im_end|><tool_call>{}<think> <|im_start|> <|im_en <|endoftext|",
    "x <mask> y  [END]  z <both> \n[END]\t<mask><mask>  <both>  [END] [END]",
]


def old_characters():
    """The characters that Unicode 3.2 had, but for those it took as unassigned."""
    return [chr(c) for c in range(1, 0x110000) if not 0xD800 <= c < 0xE000 and unicodedata.ucd_3_2_0.category(chr(c)) not in ("Cn", "Co")]


def marks(characters):
    return [c for c in characters if unicodedata.ucd_3_2_0.combining(c)]


def strings(count, seed):
    """Varied strings; and beside them as bytes some that are not UTF-8."""
    rng = random.Random(seed)
    old = old_characters()
    emoji = [chr(c) for c in (*range(0x1F300, 0x1F6C6), *range(0x1F900, 0x1F9C0))]
    accents, letters = marks(old), "abcdeinouyAEIOUq가각각киеआकがか"
    words = " ".join(SAMPLES).split(" ") + "\n".join(fortunes()[0:8])[:200000].split()
    spaces = [" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n", "\n ", "\u00a0", "\u2003", "\u3000", "\u0085", " " * 17]
    contractions = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'RE", "'Ll", "'ſ", "'", "''", "’s"]
    special = [a["content"] for a in SPECIAL + STRIP] + [a["content"][:-1] for a in SPECIAL]
    sources = [
        lambda: rng.choice(words),
        lambda: rng.choice(words),
        lambda: rng.choice(spaces),
        lambda: " " * (rng.random() < 0.8),
        lambda: rng.choice(contractions),
        lambda: str(rng.randrange(10 ** rng.randrange(1, 12))),
        lambda: rng.choice(emoji) + rng.choice(["", "\ufe0f", "\u200d" + rng.choice(emoji), "🏽"]),
        lambda: chr(rng.randrange(0x4E00, 0x9FA6)) * rng.randrange(1, 4),
        lambda: "".join(chr(rng.randrange(0xAC00, 0xD7A4)) for _ in range(3)),
        lambda: rng.choice(letters) + "".join(rng.choice(accents) for _ in range(rng.randrange(1, 4))),
        lambda: rng.choice(old),
        lambda: rng.choice(old) + rng.choice(old),
        lambda: rng.choice(special),
        lambda: "".join(rng.choice("!?.,;:-_/\\()[]{}<>|@#$%^&*+=~`\"") for _ in range(rng.randrange(1, 6))),
        lambda: rng.choice("abcxyz=-. é") * rng.randrange(1, 120),
    ]
    out = list(SAMPLES) + ["", " ", "\n", "a", "é", "<", EOT, EOT * 2]
    while len(out) < count:
        k = rng.choice((1, 2, 3, 4, 6, 10, 20))
        out.append("".join(rng.choice(sources)() for _ in range(k)))
    for i in range(0, count, 7):  # cut in characters, bytes replaced, continuation bytes alone
        b = bytearray(out[i].encode())
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(b) + 1)
            b[at : at + rng.randrange(3)] = rng.choice([b"", b"\xff", b"\x80", b"\xf0\x9f\x98", b"\xe4\xbd", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90"])
        out[i] = bytes(b)
    return [s if isinstance(s, bytes) else s.encode() for s in out]


def ours(path, texts, program=PROGRAM):
    """What the C program makes of the texts: a list of (ids, decoded bytes)."""
    stdin = write(folder("texts"), b"".join(struct.pack("<I", len(t)) + t for t in texts))
    p = subprocess.run([program, path], stdin=open(stdin), capture_output=True, cwd=ROOT)
    check(p.returncode == 0, f"exit code {p.returncode}: {p.stderr.decode(errors='replace')[-600:]}")
    out, at, results = p.stdout, 0, []
    while at < len(out):
        (n,) = struct.unpack_from("<I", out, at)
        ids = list(struct.unpack_from(f"<{n}i", out, at + 4))
        (m,) = struct.unpack_from("<I", out, at + 4 + 4 * n)
        at += 8 + 4 * n + m
        results.append((ids, out[at - m : at]))
    check(len(results) == len(texts), f"{len(results)} results for {len(texts)} texts")
    return results


def compare(path, texts, program=PROGRAM):
    """Fails unless ids and decoded text are those of `tokenizers`."""
    from tokenizers import Tokenizer

    hf = Tokenizer.from_file(path)
    replaced = [t.decode("utf-8", "replace") for t in texts]
    theirs = [e.ids for e in hf.encode_batch(replaced, add_special_tokens=False)]
    wrong = []
    for text, shown, mine, ids in zip(texts, replaced, ours(path, texts, program), theirs):
        if mine[0] != ids:
            wrong.append(f"{shown!r}: {hf.decode_batch([[i] for i in mine[0]], skip_special_tokens=False)} in place of "
                         f"{hf.decode_batch([[i] for i in ids], skip_special_tokens=False)}")  # fmt: skip
        elif mine[1].decode("utf-8", "replace") != hf.decode(ids, skip_special_tokens=False):
            wrong.append(f"{shown!r} decodes to {mine[1]!r}")
    check(not wrong, f"{len(wrong)} of {len(texts)} strings differ; the shortest: {min(wrong, key=len, default='')}")
    return sum(map(len, theirs))


def file_of(kind):
    return write(folder(f"{kind}.json"), json.dumps(tokenizer_json(kind)))



# ----------------------------------------------------------------------------
# the same ids


def ids_are_those_of_tokenizers(kind, count, seed):
    path, texts = file_of(kind), strings(count, seed)
    n = compare(path, texts)
    compare(path, texts[: count // 8], SANITIZED)
    print(f"     {kind}: {len(texts)} strings, {n} tokens")


for _seed, _kind in enumerate(KINDS):

    def _test(kind=_kind, seed=_seed):
        ids_are_those_of_tokenizers(kind, 12000 if kind in ("gpt2", "qwen") else 3000, seed)

    _test.__name__ = f"{_kind}_ids_are_those_of_tokenizers"
    test(_test)


def qwen():
    """The path of Qwen's own tokenizer.json, which prepro/qwen.py makes of a package on PyPI; made once."""
    out = os.path.join(ROOT, "build", "qwen")
    if not os.path.exists(out + "/tokenizer.json"):
        run([sys.executable, "prepro/qwen.py", "--out", out])
    return out + "/tokenizer.json"


@test
def qwens_own_vocabulary_gives_the_ids_of_tokenizers():
    n = compare(qwen(), strings(12000, 99) + [t.encode() for t in fortunes()])
    print(f"     {n} tokens")


@test
def every_character_is_cut_and_normalized_as_tokenizers_do_it():
    old = old_characters()
    texts = ["".join(f"a{c}1{c}{c} {c}b\u0301" for c in old[i : i + 20]).encode() for i in range(0, len(old), 20)]
    for kind in ("gpt2", "qwen", "gpt4o", "deepseek", "smollm"):
        compare(file_of(kind), texts)


@test
def long_words_and_runs_give_the_ids_of_tokenizers():
    rng = random.Random(4)
    texts = [c * n for c in ("a", " ", "\n", "=", "7", "的", "e\u0301", "\u0301\u0323", "ab", "🤷") for n in (47, 48, 49, 50, 5000)]
    texts += ["".join(rng.choice(alphabet) for _ in range(20000)) for alphabet in ("ab", "etaoinshr", "的一是在", "\u0301\u0323\u0327\u0345", " \n", "ACGT")]
    for kind in ("gpt2", "qwen", "one_word", "neox"):
        compare(file_of(kind), [t.encode() for t in texts])


@test
def a_learned_vocabulary_with_everything_else_in_it_survives_being_saved_again():
    """As `tokenizers` writes a file that it has read: merges as pairs, all defaults spelled out."""
    from tokenizers import Tokenizer

    for kind in ("gpt2", "neox"):
        path = folder("again.json")
        Tokenizer.from_file(file_of(kind)).save(path)
        compare(path, strings(500, 5))


# ----------------------------------------------------------------------------
# refusals, hostile files


def refusal(content, program=PROGRAM):
    return run([program, write(folder("t.json"), content if isinstance(content, str) else json.dumps(content)), "--refusal"]).out.strip()


@test
def without_the_libraries_a_file_that_needs_them_says_what_to_install():
    out = folder("tokenize")
    os.makedirs(folder(), exist_ok=True)
    run([os.environ.get("CC", "cc"), "-std=c11", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-I.", "dev/test/tokenize.c", "-o", out,
         "-lcjson", "-lm"])  # fmt: skip
    check("install libutf8proc-dev" in refusal(tokenizer_json("qwen"), out), "NFC")
    check("install libpcre2-dev" in refusal(tokenizer_json("gpt2"), out), "a pattern")
    check(refusal(tokenizer_json("one_word"), out) == "", "what needs neither is not read")
    compare(file_of("one_word"), strings(200, 1), out)


@test
def what_is_not_implemented_is_refused_by_name():
    base = tokenizer_json("gpt2")

    def word(name, **changes):
        said = refusal({**base, **changes})
        check(name in said and "t.json" in said and "\n" not in said, f"{name}: {said!r}")

    word("Prepend", normalizer={"type": "Prepend", "prepend": "x"})
    word("NFKC", normalizer={"type": "Sequence", "normalizers": [NFC, {"type": "NFKC"}]})
    word("Metaspace", pre_tokenizer={"type": "Metaspace", "replacement": "_"})
    word("Contiguous", pre_tokenizer=sequence(split("a", "Contiguous"), byte_level()))
    word("ByteLevel", pre_tokenizer=split(GPT2))
    word(r'at "\h+b"', pre_tokenizer=sequence(split(r"a\h+b"), byte_level()))
    word("dropout", model={**base["model"], "dropout": 0.1})
    word("single_word", added_tokens=[dict(added("x", single_word=True), id=2000)])
    word("(2000)", added_tokens=[dict(added("<x>"), id=2001)])
    check(refusal(base) == "", "the file itself is refused")


@test
def hostile_files_take_little_time_and_memory():
    import resource

    vocab, merges = learned(600)
    base = tokenizer_json("one_word")
    big = 36 << 20
    cases = {
        "nested": "[" * big,
        "nested_object": '{"a":' * (big // 5),
        "many_values": '{"added_tokens":[' + "[]," * (big // 3) + "[]]}",
        "many_numbers": '{"model":{"vocab":{"a":0},"merges":[' + "1," * (big // 2) + "1]}}",
        "one_long_name": '{"model":{"vocab":{"' + "a" * big + '":0}}}',
        "largest_id": '{"model":{"vocab":{"a":16777215}}}',
        "same_merge": json.dumps({**base, "model": {**base["model"], "merges": [merges[0]] * 500000}}),
        "added_prefixes": json.dumps({**base, "added_tokens": [dict(added("a" * (i % 250 + 1) + str(i)), id=600 + i) for i in range(100000)]}),
        "too_large": " " * (41 << 20),
    }  # fmt: skip
    text = b"a" * 300000
    stdin = write(folder("stdin"), struct.pack("<I", len(text)) + text)  # a pipe would break where a program ends early
    for name, content in cases.items():
        path, begin = write(folder(name + ".json"), content), time.time()
        p = subprocess.run([PROGRAM, path], stdin=open(stdin), capture_output=True, timeout=300,
                           preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30)))  # fmt: skip
        err = p.stderr.decode()
        check(p.returncode in (0, 1) and err.count("\n") == p.returncode and "out of memory" not in err, f"{name}: exit code {p.returncode}: {err[:300]}")
        check(time.time() - begin < 60, f"{name} took {time.time() - begin:.0f} s")


@test
def damaged_files_give_one_line_and_exit_code_1():
    rng = random.Random(6)
    base = json.dumps(tokenizer_json("neox")).encode()
    stdin = write(folder("stdin"), struct.pack("<I", 40) + b"ab" * 20)
    values = [b"null", b"true", b"-1", b"1e300", b'""', b'"\\ud800"', b"[]", b"{}", b'"a"', b"[[[]]]", b"0.5", b'"\\u0000"']
    outside = [m.start() for m in re.finditer(rb'[:,] ', base[:6000])] + [base.find(b'"vocab"'), base.find(b'"merges"')]
    refused = 0
    for i in range(400):
        b = bytearray(base)
        at = rng.choice(outside) + 2
        end = at + len(re.match(rb'("(\\.|[^"\\])*"|[^,}\]]*)', bytes(b[at : at + 300])).group())
        kind = i % 4
        if kind == 0:
            b[at:end] = rng.choice(values)  # another value
        elif kind == 1:
            b[rng.randrange(len(b))] = rng.randrange(256)
        elif kind == 2:
            del b[rng.randrange(len(b)) :]
        else:
            del b[at : at + rng.randrange(30)]
        path = write(folder("damaged.json"), bytes(b))
        p = subprocess.run([SANITIZED, path], stdin=open(stdin), capture_output=True, timeout=100)
        err = p.stderr.decode(errors="replace")
        check(p.returncode in (0, 1) and "Sanitizer" not in err and err.count("\n") == p.returncode, f"{bytes(b[at - 60 : at + 60])}: {p.returncode}: {err[-1500:]}")
        refused += p.returncode
    check(refused > 150, f"only {refused} of 400 were refused")


# ----------------------------------------------------------------------------
# the trainer

CONFIG = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
          "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "intermediate_size": 32,
          "norm_topk_prob": True, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 256, "tie_word_embeddings": False,
          "hidden_act": "silu", "initializer_range": 0.02}  # fmt: skip


def trainer(*arguments):
    return [os.path.join(ROOT, os.environ.get("TRAINER", "train_moe_cpu")), *arguments]


def write_run(kind):
    """A model of the tokenizer's size, its tokenizer.json, and texts; returns the options that name them."""
    content = tokenizer_json(kind)
    vocab_size = len(content["model"]["vocab"]) + len(content["added_tokens"])
    write(folder("model/config.json"), json.dumps({**CONFIG, "vocab_size": vocab_size + 3, "eos_token_id": vocab_size - len(content["added_tokens"])}))
    write(folder("data/tokenizer.json"), json.dumps(content))
    for i, text in enumerate(fortunes()[:3]):
        write(folder(f"data/{i}.txt"), text[:20000].replace("\n%\n", EOT))
    return ["--config", folder("model/config.json"), "--seq-len", 32, "--batch-size", 2]


@test
def text_read_inline_trains_as_the_shards_that_prepro_makes_of_it():
    for kind in ("qwen", "gpt2_space"):
        options = write_run(kind) + ["--steps", 3, "--sample-every", 0]
        texts = sorted(glob.glob(folder("data/*.txt")))
        run([sys.executable, "prepro/text.py", "--out", folder(f"ahead_{kind}"), "--val-fraction", 0, "--tokenizer", folder("data/tokenizer.json"), *texts])
        lines = []
        for data in ([folder(f"ahead_{kind}/train_*.bin")], [folder("data/*.txt"), "--tokenize", "inline"]):
            r = run(trainer("--train-data", *data, *options))
            lines.append([" | ".join(x.split(" | ")[:3]) for x in r.out.splitlines() if x.startswith("step ")])
            check(len(lines[-1]) == 3, r.out[-500:])
        check(lines[0] == lines[1], f"{kind}: {lines}")


@test
def a_prompt_of_any_script_begins_the_sample_and_all_that_comes_out_is_utf8():
    options = write_run("qwen") + ["--steps", 1, "--sample-every", 0, "--out", folder("out")]
    run(trainer("--train-data", folder("data/*.txt"), "--tokenize", "inline", *options))
    prompt = "cafe\u0301 你好 😀 it's 12<|im_start|>user"
    p = subprocess.run([str(x) for x in trainer("--init", folder("out/step_00000001"), "--generate", 200, "--prompt", prompt, "--seq-len", 128)],
                       capture_output=True, cwd=ROOT)  # fmt: skip
    check(p.returncode == 0, p.stderr.decode())
    shown = p.stdout.decode("utf-8")  # fails where a character is cut
    check(unicodedata.normalize("NFC", prompt) in shown, shown[-2000:])


@test
def a_prompt_that_cannot_be_encoded_is_an_error_by_name_and_the_run_without_it_goes_on():
    options = write_run("gpt2") + ["--steps", 1]
    content = tokenizer_json("gpt2")
    run([sys.executable, "prepro/text.py", "--out", folder("ahead"), "--val-fraction", 0, "--tokenizer", folder("data/tokenizer.json"), folder("data/0.txt")])
    write(folder("ahead/tokenizer.json"), json.dumps({**content, "normalizer": {"type": "Lowercase"}}))
    data = ["--train-data", folder("ahead/train_*.bin")]
    run(trainer(*data, *options, "--sample-every", 0))
    expect_error(trainer(*data, *options, "--sample-every", 1, "--prompt", "Hello"), "--prompt", "ahead/tokenizer.json", '"Lowercase"')
    write(folder("data/tokenizer.json"), json.dumps({**content, "normalizer": {"type": "Lowercase"}}))
    expect_error(trainer("--train-data", folder("data/*.txt"), "--tokenize", "inline", "--sample-every", 0, *options), "--tokenize inline", '"Lowercase"')
    write(folder("data/tokenizer.json"), json.dumps({**content, "model": {**content["model"], "merges": ["a"]}}))
    expect_error(trainer("--train-data", folder("data/*.txt"), "--tokenize", "inline", "--sample-every", 0, *options), "data/tokenizer.json", "number 0 of its merges")


if __name__ == "__main__":
    build(False)
    SANITIZED = build(True)
    main()
