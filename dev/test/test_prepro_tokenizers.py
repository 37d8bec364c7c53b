"""prepro/'s tokenizers: Qwen's vocabulary out of its ranks, any tokenizer.json, names on the hub, BPE that is learned; and that the
trainer takes what was made with them, or says why not."""

import base64
import json
import math
import os
import random
import re
import struct
import subprocess
import sys
import unicodedata
import zipfile

import tiktoken
import tokenizers

from harness import *

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(ROOT, "prepro"))
import qwen
import shards
import text
import vocab

TEXT = [sys.executable, "-B", "prepro/text.py"]
QWEN = [sys.executable, "-B", "prepro/qwen.py"]
TRAINER = os.path.join(ROOT, "train_moe_cpu")
FORTUNES = "/usr/share/games/fortunes"
QWEN_FOLDER = os.path.join(ROOT, "build", "qwen")


def qwen_folder():
    """Qwen's tokenizer, fetched once."""
    if not os.path.exists(os.path.join(QWEN_FOLDER, "tokenizer.json")):
        run(QWEN + ["--out", QWEN_FOLDER])
    return QWEN_FOLDER


def some_texts(n, seed=1):
    """Of everything that tokenizers treat in its own way."""
    rng = random.Random(seed)
    pool = [chr(c) for c in range(0x20, 0x500)] + [chr(c) for c in range(0x4E00, 0x5200)]
    pool += [chr(c) for c in range(0x1F600, 0x1F640)] + list("  \n\n\r\t") + ["\u0301", "\u0e33", "\u3000", "\u00a0", "\u200d"]
    words = ["'re", "'LL", "don't", "123", "12345678", "   ", "\n\n  \n", "<|im_start|>", "<think>", "der", "The", "été", "雪が降る", "...!!"]
    return ["".join(rng.choice(pool if rng.random() < 0.5 else words) for _ in range(rng.randrange(1, 40))) for _ in range(n)]


def split_tokens(out, split):
    """The documents of a split, in token ids."""
    manifest, stream = json.loads(read(out + "/manifest.json")), []
    for shard in manifest["splits"][split]["shards"]:
        stream += struct.unpack(f"<{shard['tokens']}I", read(os.path.join(out, shard["file"]))[1024:])
    documents = []
    for token in stream:
        if token == manifest["eot_id"]:
            documents.append([])
        else:
            documents[-1].append(token)
    return documents


def fortunes():
    if not os.path.isdir(FORTUNES):
        return None
    return [os.path.join(FORTUNES, n) for n in sorted(os.listdir(FORTUNES)) if "." not in n]


# ----------------------------------------------------------------------------
# Qwen


@test
def qwens_ranks_become_a_tokenizer_with_tiktokens_ids():
    t = tokenizers.Tokenizer.from_file(qwen_folder() + "/tokenizer.json")
    check(t.get_vocab_size() == 151669 and t.token_to_id("<|endoftext|>") == 151643 and t.token_to_id("</think>") == 151668, "size")
    content = json.loads(read(QWEN_FOLDER + "/tokenizer.json"))
    check(len(content["model"]["merges"]) == 151643 - 256, "merges")
    # tiktoken takes the ranks as they are; they are the places in the vocabulary
    byte_of = {c: b for b, c in enumerate(shards.byte_alphabet())}
    ranks = {bytes(byte_of[c] for c in token): rank for token, rank in content["model"]["vocab"].items()}
    again = qwen.tokenizer_json(sorted(ranks, key=ranks.get))
    check(again == content, "build/qwen is not what prepro/qwen.py makes today: remove it")
    theirs = tiktoken.Encoding(
        "qwen", pat_str=qwen.WORDS, mergeable_ranks=ranks, special_tokens={n: 151643 + i for i, (n, _) in enumerate(qwen.ADDED)}
    )
    names, texts = "|".join(re.escape(n) for n, _ in qwen.ADDED), some_texts(10000)
    for path in fortunes() or []:
        texts += read(path).decode().split("\n%\n")
    largest = 0
    for x in texts:
        ours = t.encode(x, add_special_tokens=False).ids
        parts = re.split(f"({names})", x)  # the added tokens are found first, then what is between them is normalized
        x = "".join(p if i % 2 else unicodedata.normalize("NFC", p) for i, p in enumerate(parts))
        check(ours == [i for p in re.split(f"({names})", x) for i in theirs.encode(p, allowed_special="all")], f"{x!r}: {ours}")
        check(t.decode(ours, skip_special_tokens=False) == x, f"{x!r} does not come back")
        largest = max(largest, *ours, 0)
    check(largest > 151000, f"no id above {largest}")


def ranks_file(path, n=300):
    """A file like qwen.tiktoken, but small: bytes, and then pairs of what came before."""
    tokens = [bytes([b]) for b in range(256)] + [b"ab", b"abab", b"ca", b"cab"]
    lines = [base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)]
    return write(path, b"".join(lines)), tokens


@test
def merges_are_what_bpe_makes_of_a_tokens_bytes():
    tokens = [bytes([b]) for b in range(256)] + [b"ab", b"bc", b"abc", b"abab", b"bcabc"]
    ranks = {t: r for r, t in enumerate(tokens)}
    for token, pair in [(b"ab", [b"a", b"b"]), (b"abc", [b"ab", b"c"]), (b"abab", [b"ab", b"ab"]), (b"bcabc", [b"bc", b"abc"])]:
        check(qwen.merge_of(token, ranks, ranks[token]) == pair, f"{token}: {qwen.merge_of(token, ranks, ranks[token])}")
    try:
        qwen.merge_of(b"xyz", ranks, 300)
        check(False, "a token that cannot be made")
    except shards.Error as e:
        check("cannot be put together" in str(e), str(e))


@test
def other_ranks_than_qwens_are_refused():
    path, _ = ranks_file(folder("small.tiktoken"))
    expect_error(QWEN + ["--out", folder("o"), "--ranks", path], "not Qwen's 151643 ranks")
    expect_error(QWEN + ["--out", folder("o"), "--ranks", folder("nowhere")], "nowhere")
    with zipfile.ZipFile(folder("other.whl"), "w") as z:
        z.writestr("other/x.txt", "x")
    expect_error(QWEN + ["--out", folder("o"), "--ranks", folder("other.whl")], "other.whl", "qwen.tiktoken")
    for data, part in [(b"IQ== 0\nIg== 2\n", "line 2"), (b"IQ==\n", "line 1"), (b"!!!! 0\n", "line 1"), (b"IQ== 0\n", "256 bytes")]:
        try:
            qwen.parse_ranks(data, "x")
            check(False, f"{data} was taken")
        except shards.Error as e:
            check(part in str(e), f"{data}: {e}")
    check(not os.path.exists(folder("o")), "left something behind")


@test
def ids_above_65535_survive_and_the_vocabulary_is_compared():  # D4 D5 D6
    documents = [x for x in some_texts(400, seed=3) if x.strip("\r\n")]
    write(folder("a.jsonl"), "".join(json.dumps({"text": x}) + "\n" for x in documents))
    run(TEXT + ["--out", folder("o"), "--tokenizer", qwen_folder(), "--val-fraction", "0", folder("a.jsonl")])
    t = tokenizers.Tokenizer.from_file(QWEN_FOLDER + "/tokenizer.json")
    wanted = [t.encode(x.strip("\r\n"), add_special_tokens=False).ids for x in documents]
    got = split_tokens(folder("o"), "train")
    check(got == wanted, "other tokens than tokenizers gives")
    large = [i for d in got for i in d if i >= 65536]
    check(len(large) > 500, f"only {len(large)} ids above 65535")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        check(read(folder("o/" + name)) == read(os.path.join(QWEN_FOLDER, name)), name)
    # a model of 151,936 rows trains on the 151,669 tokens; one with fewer rows than there are tokens does not begin
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 16,
              "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_experts": 2,
              "num_experts_per_tok": 1, "moe_intermediate_size": 8, "intermediate_size": 16, "max_position_embeddings": 64,
              "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "norm_topk_prob": True, "tie_word_embeddings": True,
              "eos_token_id": 151643}  # fmt: skip
    for rows, parts in ((151936, None), (151669, None), (151668, ["made with a tokenizer of 151669 tokens", "151668"]),
                        (151643, ["151643"])):  # fmt: skip
        path = write(folder(f"{rows}/config.json"), json.dumps(dict(config, vocab_size=rows, eos_token_id=min(151643, rows - 1))))
        command = [TRAINER, "--config", path, "--train-data", folder("o/train_*.bin"), "--steps", 1, "--batch-size", 1, "--seq-len", 32]
        if parts is None:
            check("step 1/1" in run(command).out, f"{rows} rows")
        else:
            expect_error(command, *parts)


# ----------------------------------------------------------------------------
# any tokenizer.json


def small_tokenizer(path, eot="<|endoftext|>", **changes):
    """A small byte-level BPE in a folder; `changes` replace parts of the file. Returns the folder."""
    t = tokenizers.Tokenizer(tokenizers.models.BPE())
    t.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=[eot], show_progress=False,
                                             initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    t.train_from_iterator(["the cat and the dog and the other dogs " * 3, "there and then"], trainer)
    content = json.loads(t.to_str())
    content.update(changes)
    write(os.path.join(path, "tokenizer.json"), json.dumps(content))
    return path


DOCUMENTS = ["the cat and the dog " * 50, "and then there", "other dogs\n\nthen", "größe 雪 🙂"]


def encode_with(tokenizer, *options):
    out = folder("out")
    write(folder("a.txt"), "<|endoftext|>".join(DOCUMENTS))
    run(TEXT + ["--out", out, "--overwrite", "--val-fraction", "0", "--tokenizer", tokenizer, *options, folder("a.txt")])
    return split_tokens(out, "train"), json.loads(read(out + "/manifest.json"))


@test
def a_tokenizer_json_is_used_as_a_file_or_a_folder_without_its_additions():
    plain = small_tokenizer(folder("plain"))
    t = tokenizers.Tokenizer.from_file(plain + "/tokenizer.json")
    wanted = [t.encode(d, add_special_tokens=False).ids for d in DOCUMENTS]
    for where in (plain, plain + "/tokenizer.json"):
        got, manifest = encode_with(where)
        check(got == wanted, f"{where}: other tokens")
        check(manifest["vocab_size"] == t.get_vocab_size() and manifest["eot_id"] == t.token_to_id("<|endoftext|>"), f"{manifest}")
    check(json.loads(read(folder("out/tokenizer_config.json")))["eos_token"] == "<|endoftext|>", "config made up")
    # what such files may ask for beside: at most 5 tokens of a text, padding, a token before and after, dropout
    template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}}  # fmt: skip
    additions = {
        "truncation": {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 512}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "!"},
        "post_processor": template,
        "model": dict(json.loads(t.to_str())["model"], dropout=0.5),
    }
    for name, value in additions.items():
        got, _ = encode_with(small_tokenizer(folder(name), **{name: value}))
        check(got == wanted, f"{name} was taken into the data")


@test
def the_token_that_opens_documents_is_found_or_asked_for():
    other = small_tokenizer(folder("other"), eot="</s>")
    line = expect_error(TEXT + ["--out", folder("o"), "--tokenizer", other, write(folder("b.txt"), "a<|endoftext|>b")], "--eot")
    check("which token opens a document" in line, line)
    got, manifest = encode_with(other, "--eot", "</s>")
    check(len(got) == 4 and manifest["eot_id"] == 0, f"{manifest}")
    for eos in ("</s>", {"content": "</s>", "special": True}):
        write(other + "/tokenizer_config.json", json.dumps({"eos_token": eos}))
        got, manifest = encode_with(other)
        check(len(got) == 4 and manifest["eot_id"] == 0, f"{eos}: {manifest}")
        check(read(folder("out/tokenizer_config.json")) == read(other + "/tokenizer_config.json"), "config not kept")
    expect_error(TEXT + ["--out", folder("o"), "--tokenizer", other, "--eot", "<eot>", folder("b.txt")], "--eot <eot>", "no such token")


@test
def kinds_that_are_not_byte_level_make_shards_too():
    t = tokenizers.Tokenizer(tokenizers.models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("\u2581the", -1.0), ("\u2581", -2.0)] +
                                                       [(c, -3.0) for c in "abcdefghijklmnopqrstuvwxyz"], unk_id=0, byte_fallback=False))  # fmt: skip
    t.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    write(folder("u/tokenizer.json"), t.to_str())
    got, manifest = encode_with(folder("u"), "--eot", "</s>")
    check(got == [t.encode(d, add_special_tokens=False).ids for d in DOCUMENTS] and manifest["vocab_size"] == 30, "unigram")
    # the trainer cannot spell such tokens, but trains on them, and the file goes along
    command = [TRAINER, "--model", "tiny", "--train-data", folder("out/train_*.bin"), "--batch-size", 1, "--seq-len", 32, "--steps", 1]
    r = run(command + ["--out", folder("model")])
    check("is not byte-level BPE" in r.out and "step 1/1" in r.out, r.out)
    check(read(folder("model/step_00000001/tokenizer.json")) == read(folder("u/tokenizer.json")), "tokenizer.json in the checkpoint")
    said = run([TRAINER, "--init", folder("model/step_00000001"), "--val-data", folder("out/train_*.bin"), "--eval", "--batch-size", 1, "--seq-len", 32]).out
    loss = float(said.split("validation loss ")[1].split()[0])
    split = manifest["splits"]["train"]
    bits = loss / math.log(2) * split["tokens"] / split["bytes"]
    check_near(float(said.split(", ")[-1].split()[0]), bits, 1e-3, "bits per byte by the manifest")
    expect_error([TRAINER, "--init", folder("model/step_00000001"), "--generate", 5, "--prompt", "the"], "tokenizer.json", "byte-level")


@test
def a_byte_tokenizers_folder_is_the_byte_tokenizer():
    shards.ByteTokenizer().write_files(folder())
    check(isinstance(vocab.open_tokenizer(folder()), shards.ByteTokenizer), "through the package tokenizers")
    write(folder("a.txt"), "größe<|endoftext|>x")
    run(TEXT + ["--out", folder("a"), "--tokenizer", folder(), folder("a.txt")])
    run(TEXT + ["--out", folder("b"), folder("a.txt")])
    check(read(folder("a/train_000000.bin")) == read(folder("b/train_000000.bin")), "other shards")


@test
def a_broken_tokenizer_is_one_line():
    plain = small_tokenizer(folder("plain"))
    a = write(folder("a.txt"), "a<|endoftext|>b")
    for name, content, *parts in [
        ("cut", read(plain + "/tokenizer.json")[:-50], "no tokenizer that"),
        ("empty", "", "no tokenizer that"),
        ("other", '{"hello": 1}', "no tokenizer that"),
        ("bytes", b"\xff\xfe{}", "not UTF-8"),
    ]:
        write(folder(f"{name}/tokenizer.json"), content)
        expect_error(TEXT + ["--out", folder("o"), "--tokenizer", folder(name), a], f"{name}", *parts)
    write(plain + "/tokenizer_config.json", "{")
    expect_error(TEXT + ["--out", folder("o"), "--tokenizer", plain, a], "tokenizer_config.json", "not JSON")
    other = small_tokenizer(folder("list"), eot="</s>")
    write(other + "/tokenizer_config.json", '{"eos_token": ["</s>"]}')
    expect_error(TEXT + ["--out", folder("o"), "--tokenizer", other, a], "which token opens a document")
    os.makedirs(folder("nothing"))
    expect_error(TEXT + ["--out", folder("o"), "--tokenizer", folder("nothing"), a], "no tokenizer.json in that folder")
    expect_error(TEXT + ["--out", folder("o"), "--tokenizer", folder("x/tokenizer.json"), a], "there is no such file")
    check(not os.path.exists(folder("o")) or os.listdir(folder("o")) == [], "left something behind")


@test
def a_name_on_the_hub_is_looked_up_in_its_cache():
    """The hub's cache as huggingface_hub lays it out: models--ORG--NAME/refs/REVISION names a folder in snapshots."""
    small_tokenizer(folder("plain"))
    content, hub = read(folder("plain/tokenizer.json")), folder("hf/hub/models--some-lab--their-model")
    for revision, commit in (("main", "a" * 40), ("v2", "b" * 40)):
        write(f"{hub}/refs/{revision}", commit)
        write(f"{hub}/snapshots/{commit}/tokenizer.json", content)
    write(f"{hub}/snapshots/{'b' * 40}/tokenizer_config.json", '{"eos_token": "!"}')
    a = write(folder("a.txt"), "<|endoftext|>".join(DOCUMENTS))
    env = {"HF_HOME": folder("hf"), "HF_HUB_OFFLINE": "1"}
    command = TEXT + ["--val-fraction", "0", a, "--tokenizer"]
    run(command + ["some-lab/their-model", "--out", folder("hub")], env=env)
    run(command + ["some-lab/their-model@v2", "--out", folder("v2")], env=env)
    run(command + [folder("plain"), "--out", folder("file")])
    for out in ("hub", "v2"):
        check(read(folder(out + "/train_000000.bin")) == read(folder("file/train_000000.bin")), f"{out}: other tokens")
        check(read(folder(out + "/tokenizer.json")) == content, f"{out}: tokenizer.json is not the hub's")
    check(json.loads(read(folder("hub/manifest.json")))["tokenizer"] == "some-lab/their-model", "name in the manifest")
    check(read(folder("v2/tokenizer_config.json")) == b'{"eos_token": "!"}', "its config")
    for name in ("some-lab/other-model", "some-lab/their-model@v3"):
        expect_error(command + [name, "--out", folder("o")], f"--tokenizer {name}", "hub", env=env)


# ----------------------------------------------------------------------------
# learned


@test
def a_learned_bpe_is_the_same_every_time_and_has_not_seen_the_validation_documents():
    words = [x + y + z for x in "bdfglmn" for y in "aeiou" for z in ("", "ck", "st", "ndle")]
    rng = random.Random(8)
    documents = [" ".join(rng.choice(words) for _ in range(40)) for _ in range(800)]
    draw = text.ValidationDraw(1, 0.05)
    changed = [("zzyzx zzyzx " * 40 if draw(i) else d) for i, d in enumerate(documents)]
    for name, content in (("a", documents), ("b", documents), ("c", changed)):
        write(folder(name + ".txt"), "<|endoftext|>".join(content))
        run(TEXT + ["--out", folder(name), "--train-bpe", "300", folder(name + ".txt")])
    tokenizer = read(folder("a/tokenizer.json"))
    check(read(folder("b/tokenizer.json")) == tokenizer, "another one the second time")
    check(read(folder("b/train_000000.bin")) == read(folder("a/train_000000.bin")), "other tokens the second time")
    check(read(folder("c/tokenizer.json")) == tokenizer, "it knows the validation documents")
    check(sum(draw(i) for i in range(len(documents))) == 40, "drawn")
    manifest = json.loads(read(folder("a/manifest.json")))
    check(manifest["vocab_size"] == 300 and manifest["tokenizer"] == "bpe 300" and manifest["tokens_per_byte"] < 0.6, f"{manifest}")
    t = tokenizers.Tokenizer.from_file(folder("a/tokenizer.json"))
    check(t.token_to_id("<|endoftext|>") == manifest["eot_id"], "EOT")
    got = [t.decode(d) for d in split_tokens(folder("a"), "train") + split_tokens(folder("a"), "val")]
    check(sorted(got) == sorted(d for d in documents), "text that does not come back")
    for x in some_texts(300):
        check(t.decode(t.encode(x).ids) == x, f"{x!r} does not come back")


@test
def a_bpe_is_learned_from_a_share_of_a_long_text():
    rng = random.Random(1)
    documents = ["alpha beta " * 20 if rng.random() < 0.5 else "gamma delta " * 20 for _ in range(3000)]
    write(folder("a.txt"), "<|endoftext|>".join(documents[:1500] + ["omega psi " * 20] * 1500))
    r = run(TEXT + ["--out", folder("o"), "--train-bpe", "290", "--bpe-bytes", "50000", folder("a.txt")])
    vocabulary = json.loads(read(folder("o/tokenizer.json")))["model"]["vocab"]
    check("omega" in vocabulary or "\u0120omega" in vocabulary, "only the beginning was read")
    check("alpha" in vocabulary or "\u0120alpha" in vocabulary, "only the end was read")
    write(folder("b.txt"), "one<|endoftext|>two")
    r = run(TEXT + ["--out", folder("p"), "--train-bpe", "5000", folder("b.txt")])
    check("only 257 of 5000 tokens" in r.out, r.out)


# ----------------------------------------------------------------------------
# documents longer than what is encoded at once


@test
def a_long_document_has_the_tokens_of_the_whole():
    rng, whole = random.Random(5), text.PIECE
    words = "the cat's 12 größe don't 雪が降る, well... (yes) été\n \n\n  x".split(" ")
    long = " ".join(rng.choice(words) for _ in range(40000)).strip()
    t = vocab.open_tokenizer(qwen_folder())
    wanted = t.encode([long.encode()])[0]
    args = type("Options", (), {"document_separator": None, "encoding": "utf-8", "errors": "strict", "format": None})
    import sources

    try:
        for text.PIECE in (100000, 70001):
            source = sources.open_file(write(folder("a.txt"), long), args)
            pieces = [piece for _, _, _, piece in text.Reader([(source, 0)], None, False).pieces()]
            check(len(pieces) >= 3 and b"".join(pieces) == long.encode(), f"{len(pieces)} pieces")
            check(b"".join(t.encode(pieces)) == wanted, f"other tokens in pieces of {text.PIECE}")
        chinese = "雪" * 200000  # nowhere to cut: at least no character is broken
        source = sources.open_file(write(folder("b.txt"), chinese), args)
        pieces = [piece for _, _, _, piece in text.Reader([(source, 0)], None, False).pieces()]
        check(len(pieces) > 3 and "".join(p.decode() for p in pieces) == chinese, "broken characters")
    finally:
        text.PIECE = whole


@test
def fortunes_with_qwens_vocabulary_are_as_many_tokens_as_tokenizers_counts():
    files = fortunes()
    if files is None:
        return  # the reader's example is not installed here
    run(TEXT + ["--out", folder("o"), "--document-separator", "%", "--tokenizer", qwen_folder(), "--workers", "2", *files])
    manifest = json.loads(read(folder("o/manifest.json")))
    t = tokenizers.Tokenizer.from_file(QWEN_FOLDER + "/tokenizer.json")
    got = split_tokens(folder("o"), "train") + split_tokens(folder("o"), "val")
    texts = [d.strip("\r\n") for f in files for d in re.split(r"(?m)^%\r?$", read(f).decode())]
    wanted = [e.ids for e in t.encode_batch([x for x in texts if x], add_special_tokens=False)]
    check(sorted(got) == sorted(wanted), f"{len(got)} documents, {len(wanted)} expected")
    check(0.25 < manifest["tokens_per_byte"] < 0.28, f"{manifest['tokens_per_byte']} tokens a byte")


main()
