"""prepro/: stories whose probabilities add up, text that arrives whole, bad input, full disks and kills."""

import json
import math
import os
import random
import signal
import struct
import sys
import time

from harness import *

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(ROOT, "prepro"))
import shards
import sources
import stories

STORIES = [sys.executable, "-B", "prepro/stories.py"]
TEXT = [sys.executable, "-B", "prepro/text.py"]
GRAMMAR = stories.Grammar()


def some_stories(n, seed=1):
    rng = random.Random(seed)
    return [GRAMMAR.story(rng) for _ in range(n)]


def shard_tokens(path):
    """(header's first five numbers, tokens) after checking that the file has exactly as many as its header says."""
    data = read(path)
    header = struct.unpack("<5i", data[:20])
    check(len(data) == 1024 + 4 * header[2], f"{path}: {header[2]} tokens announced, {len(data)} bytes")
    return header, list(struct.unpack(f"<{header[2]}I", data[1024:]))


def stream(out, split):
    """All tokens of a split, from its shards."""
    names = sorted(n for n in os.listdir(out) if n.startswith(split + "_"))
    return [t for n in names for t in shard_tokens(os.path.join(out, n))[1]]


def tokens_of(documents):
    return [t for d in documents for t in [256, *d]]


def manifest(out):
    return json.loads(read(os.path.join(out, "manifest.json")))


# ----------------------------------------------------------------------------
# the grammar


@test
def stories_parse_and_their_draws_add_up_to_log_p():
    for story, cost in some_stories(3000):
        log_p = GRAMMAR.log_probability(story)
        check(log_p is not None, f"does not parse: {story}")
        check_near(-log_p, cost, 1e-9, story)


@test
def sentences_of_a_node_are_distinct_and_their_probabilities_sum_to_one():
    rng = random.Random(3)
    for _ in range(6):  # six walks, each with its names and things
        node, values = "open", {}
        while node != "END":
            options = list(GRAMMAR.expand(node, values))
            check_near(sum(p for _, p, _, _ in options), 1.0, 1e-9, f"probabilities at {node}")
            check(len({s for s, _, _, _ in options}) == len(options), f"two derivations of one sentence at {node}")
            _, _, values, node = rng.choice(options)


def small_grammar():
    """Two or three words a slot and every third edge: few enough stories to list them all."""
    slots = {name: words[:2] for name, words in stories.SLOTS.items()}
    slots["name"] = ["Lily", "Tom"]
    slots["animal"] = ["mouse", "frog"]
    for slot in ("trait", "weather", "place", "food"):
        slots[slot] = slots[slot][:1]
    return stories.Grammar(slots)


def all_stories(grammar, node="open", values={}, begin="", p=1.0):
    if node == "END":
        yield begin, p
        return
    for sentence, q, after, target in grammar.expand(node, values):
        yield from all_stories(grammar, target, after, f"{begin} {sentence}".strip(), p * q)


@test
def all_stories_of_a_small_grammar_are_distinct_and_sum_to_one():
    grammar = small_grammar()
    listed = list(all_stories(grammar))
    check(len(listed) > 1000, f"only {len(listed)} stories")
    check_near(sum(p for _, p in listed), 1.0, 1e-9, "sum of probabilities")
    check(len({s for s, _ in listed}) == len(listed), "a story has two derivations")
    for story, p in listed[:: len(listed) // 500]:
        check_near(grammar.log_probability(story), math.log(p), 1e-9, story)


@test
def sampled_frequencies_are_the_probabilities():
    grammar, rng, n = small_grammar(), random.Random(5), 20000
    counts = {}
    for _ in range(n):
        story, cost = grammar.story(rng)
        counts[story] = counts.get(story, 0) + 1
    listed = dict(all_stories(grammar))
    check(set(counts) <= set(listed), "a story outside the list")
    chi2 = sum((counts.get(s, 0) - n * p) ** 2 / (n * p) for s, p in listed.items())
    check_near(
        chi2, len(listed), 5 * math.sqrt(2 * len(listed) * (1 + 1 / (2 * n * min(listed.values())))), "chi squared"
    )


@test
def a_story_with_its_eot_fits_in_256_tokens():
    # the longest of all: each slot at its longest, those that others depend on tried out
    fixed = {s: max(words, key=len) for s, words in stories.SLOTS.items()}
    longest = 0
    for name in (max(stories.GIRLS, key=len), max(stories.BOYS, key=len)):
        for animal in stories.ANIMALS:
            for friend in stories.ANIMALS:
                for thing in stories.THINGS:
                    values = dict(fixed, name=name, animal=animal, friend=friend, thing=thing)
                    far = {"END": -1}
                    for node in reversed(list(GRAMMAR.nodes)):  # each node's edges lead to later ones
                        far[node] = max(
                            len(e.write({s: GRAMMAR.derive(s, values) for s in e.slots})) + 1 + far[e.target]
                            for e in GRAMMAR.nodes[node]
                        )
                    longest = max(longest, far["open"])
    check(longest <= 255, f"{longest} bytes")
    lengths = [len(s) for s, _ in some_stories(2000)]
    check(min(lengths) >= 150, f"shortest {min(lengths)} bytes")
    check(max(lengths) <= longest, f"{max(lengths)} bytes")


@test
def stories_agree_with_themselves():
    for story, _ in some_stories(500, seed=9):
        sentences = stories.split_sentences(story)
        check(len(set(sentences)) == len(sentences) >= 4, f"a sentence stands twice: {story}")
        name = next(w for w in stories.SLOTS["name"] if w in story.split(".")[0] + story.split("?")[0])
        wrong = {"he", "him", "his", "He"} if name in stories.GIRLS else {"she", "her", "She"}
        check(not wrong & set(story.replace(".", " ").replace(",", " ").split()), f"wrong pronoun: {story}")
        check(not any(f" a {vowel}" in story for vowel in "aeiou"), f"article: {story}")


# ----------------------------------------------------------------------------
# --parse

STORY = (
    "Once there was a brave mouse named Lily. One sunny day she found a red bell. That night a lamb got lost in deep "
    "snow. So she rang the bell, and the lamb followed the sound. Now the red bell hangs by the door."
)


def verdict(text, *options, code=None):
    r = run(STORIES + ["--parse", "-", *options], input=text, code=code)
    return r.out.splitlines()


@test
def one_mistake_costs_one_sentence():
    check(verdict(STORY, code=0)[-1] == "5 of 5 sentences parse", "the story itself")
    for right, wrong in [
        ("she found", "he found"),
        ("Lily", "Lilly"),
        ("the lamb followed", "the pony followed"),
        ("rang the bell", "beat the drum"),
        ("a lamb", "a mouse"),
        ("hangs by the door", "sings every Sunday"),
        ("Now the red", "Now the blue"),
        ("deep snow", "depe snow"),
        ("That night", "That nihgt"),
    ]:
        lines = verdict(STORY.replace(right, wrong), code=1)
        n = int(lines[-1].split()[0])
        check(n == 4 or (n == 3 and right in ("a lamb",)), f"{right} -> {wrong}: {lines}")
        check(lines[-2] == "0 of 1 stories are whole", f"{lines}")


@test
def a_sentence_left_out_or_swapped_is_noticed():
    s = stories.split_sentences(STORY)
    check(verdict(" ".join(s[:2] + s[3:]), code=1)[-1].startswith(("2 of 4", "3 of 4")), "the third left out")
    check(verdict(" ".join([s[1], s[0], *s[2:]]), code=1)[-1].endswith("of 5 sentences parse"), "two swapped")
    check(verdict(" ".join(s[:4]), code=0)[-2:] == ["0 of 1 stories are whole", "4 of 4 sentences parse"], "no ending")
    check(verdict(STORY + " " + s[4], code=1)[-1] == "5 of 6 sentences parse", "goes on after its end")


@test
def a_cut_last_sentence_can_be_left_out():
    cut = STORY[:-12]
    check(verdict(cut, code=1)[-1] == "4 of 5 sentences parse", "counted by default")
    check(any("(cut)" in line for line in verdict(cut)), "and marked")
    lines = verdict(cut, "--drop-cut", code=0)
    check(lines[-2:] == ["0 of 1 stories are whole, 1 cut sentences left out", "4 of 4 sentences parse"], f"{lines}")


@test
def stories_end_at_the_eot_or_an_empty_line():
    for between in ("<|endoftext|>", "\n\n", "\n \n", "\r\n\r\n", "\n<|endoftext|>\n"):
        lines = verdict(between.join([STORY] * 3), code=0)
        check(lines[-2:] == ["3 of 3 stories are whole", "15 of 15 sentences parse"], f"{between!r}: {lines}")


@test
def the_exit_code_follows_the_share_asked_for():
    text = "\n\n".join([STORY, STORY.replace("lamb got", "lambb got")])
    check(verdict(text, "--min-share", "0.9", code=0)[-1] == "9 of 10 sentences parse", "9 of 10 is enough")
    verdict(text, "--min-share", "0.91", code=1)


@test
def only_the_first_sentences_count_if_asked():
    text = "\n\n".join([STORY, STORY, STORY.replace("bell", "ball")])
    check(verdict(text, "--sentences", "7", code=0)[-2:] == ["2 of 2 stories are whole", "7 of 7 sentences parse"], "7")
    check(verdict(text, "--sentences", "12", code=1)[-1] == "11 of 12 sentences parse", "12")
    check(verdict(text, "--sentences", "99", code=1)[-1].endswith("of 15 sentences parse"), "more than there are")
    expect_error(STORIES + ["--parse", "-", "--sentences", "0"], "--sentences 0", input=text)


@test
def nonsense_does_not_parse_and_does_not_crash():
    rng = random.Random(1)
    for _ in range(200):
        GRAMMAR.check_story("".join(rng.choice('aA .!?"\n<|') for _ in range(rng.randrange(1, 60))))
    story = STORY.encode()
    for _ in range(200):
        at = rng.randrange(len(story))
        GRAMMAR.check_story((story[:at] + bytes([rng.randrange(256)]) + story[at + 1 :]).decode(errors="replace"))
    check(verdict("zqx " * 20, code=1)[-1] == "0 of 1 sentences parse", "zqx")
    check(verdict(b"\xff\xfe\x00", code=1)[-1] == "0 of 1 sentences parse", "bytes that are no text")


@test
def nothing_to_parse_is_an_error():
    expect_error(STORIES + ["--parse", "-"], "no sentence", input="\n<|endoftext|>\n\n")
    expect_error(STORIES + ["--parse", "/nowhere/samples.txt"], "/nowhere/samples.txt")


# ----------------------------------------------------------------------------
# stories as shards


@test
def floor_is_the_mean_over_the_targets_of_the_packed_stream():
    out = folder("s")
    run(STORIES + ["--out", out, "--documents", "50", "--val-documents", "20", "--seed", "7"])
    m, val = manifest(out), list(shards.read_split(out, "val"))
    nats = -sum(GRAMMAR.log_probability(d.decode()) for d in val)
    targets = sum(1 + len(d) for d in val) - 1  # each EOT and byte but the very first
    check(len(val) == 20 and targets == m["val_targets"] == len(stream(out, "val")) - 1, f"{targets} targets")
    check_near(m["floor_nats_per_token"], nats / targets, 1e-9, "floor in the manifest")
    check_near(float(run(STORIES + ["--floor", out]).out.split()[1]), nats / targets, 1e-6, "floor printed")


@test
def floor_of_text_that_is_no_story_is_an_error():
    write(folder("a.txt"), "One.<|endoftext|>Two.<|endoftext|>Three.")
    run(TEXT + ["--out", folder("t"), folder("a.txt")])
    expect_error(STORIES + ["--floor", folder("t")], "not a story")
    expect_error(STORIES + ["--floor", folder("empty")], "empty")


@test
def same_seed_same_bytes_and_more_documents_only_add():
    for name, seed, n in (("a", 1, 40), ("b", 1, 40), ("c", 2, 40), ("d", 1, 60)):
        run(STORIES + ["--out", folder(name), "--documents", n, "--val-documents", 10, "--seed", seed])
    check(all(read(folder(f"a/{n}")) == read(folder(f"b/{n}")) for n in os.listdir(folder("a"))), "same seed")
    check(stream(folder("a"), "train") != stream(folder("c"), "train"), "other seed")
    a, d = stream(folder("a"), "train"), stream(folder("d"), "train")
    check(d[: len(a)] == a and stream(folder("a"), "val") == stream(folder("d"), "val"), "more documents")


@test
def stories_cut_into_small_shards_stay_one_stream():
    run(STORIES + ["--out", folder("a"), "--documents", 30])
    run(STORIES + ["--out", folder("b"), "--documents", 30, "--shard-tokens", 1000])
    check(stream(folder("a"), "train") == stream(folder("b"), "train"), "the streams differ")
    check(len(os.listdir(folder("b"))) > 8, "one shard only")


@test
def wrong_options_of_stories_are_named():
    for options, part in [
        (["--out", folder("o"), "--documents", "0"], "--documents 0"),
        (["--out", folder("o"), "--seed", "x"], "--seed"),
        ([], "--out"),
        (["--parse", "-", "--show", "1"], "--show"),
        (["--show", "1", "--frobnicate"], "--frobnicate"),
        (["--out", folder("o"), "--shard-tokens", "0"], "--shard-tokens"),
        (["--out", folder("o"), "--val-documents", "0"], "--val-documents"),
    ]:
        expect_error(STORIES + options, part)
    check(not os.path.exists(folder("o")), "left something behind")


# ----------------------------------------------------------------------------
# text: what documents are


def reference_documents(data, separator):
    """The definition, for a text in memory."""
    parts, begin, lines = [], 0, data.split(b"\n")
    for i, line in enumerate(lines):
        if separator is not None and line in (separator, separator + b"\r"):
            parts += b"\n".join(lines[begin:i]).split(b"<|endoftext|>")
            begin = i + 1
    parts += b"\n".join(lines[begin:]).split(b"<|endoftext|>")
    documents = [p.strip(b"\r\n") for p in parts]
    return [d for d in documents if d]


class Options:
    encoding, errors, format = "utf-8", "strict", None

    def __init__(self, separator):
        self.document_separator = separator


def read_documents(path, separator):
    result = []
    for state, piece in sources.open_file(path, Options(separator)).documents():
        if state is not None:
            check(state == len(result), f"state {state} at document {len(result)}")
            result.append(b"")
        result[-1] += piece
    return result


@test
def documents_are_the_same_whatever_the_chunk_size():
    rng, path, whole = random.Random(2), folder("x.txt"), sources.CHUNK
    words = ["a", "%", "%%", "\n", "\n", "\r\n", "<|endoftext|>", "<|endof", "\u20ac", " ", "\n%\n", "%\r\n"]
    try:
        for _ in range(400):
            data = "".join(rng.choice(words) for _ in range(rng.randrange(40))).encode()
            write(path, data)
            for separator in (None, "%", "", "%%"):
                expected = reference_documents(data, None if separator is None else separator.encode())
                for sources.CHUNK in (1, 3, 7, 1 << 20):
                    got = read_documents(path, separator)
                    check(
                        got == expected,
                        f"{data!r} cut at {separator!r} in chunks of {sources.CHUNK}: {got} not {expected}",
                    )
    finally:
        sources.CHUNK = whole


@test
def every_token_of_the_text_arrives_once():  # D15, around the size of a shard
    for size in (1, 2, 98, 99, 100, 101, 199, 200, 500):
        out = folder(f"o{size}")
        data = bytes(97 + i % 26 for i in range(size - 1)) if size > 1 else b""
        write(folder("a.txt"), data)
        if not data:
            expect_error(TEXT + ["--out", out, "--val-fraction", "0", folder("a.txt")], "no text")
            continue
        run(TEXT + ["--out", out, "--val-fraction", "0", "--shard-tokens", "100", folder("a.txt")])
        check(stream(out, "train") == tokens_of([data]), f"{size} tokens")
        parts = [s["tokens"] for s in manifest(out)["splits"]["train"]["shards"]]
        check(parts == [100] * (size // 100) + [size % 100] * (size % 100 > 0), f"{size} tokens: shards of {parts}")
        header, _ = shard_tokens(os.path.join(out, "train_000000.bin"))
        check(header == (20240801, 7, parts[0], 257, 257), f"header {header}")


@test
def the_split_is_by_document_seeded_and_exact():
    documents = [f"document number {i}".encode() for i in range(200)]
    write(folder("a.txt"), b"\n%\n".join(documents))
    splits = []
    for seed in (1, 1, 2):
        out = folder(f"o{len(splits)}")
        run(
            TEXT + ["--out", out, "--document-separator", "%", "--seed", seed, "--val-fraction", "0.1", folder("a.txt")]
        )
        train, val = (list(shards.read_split(out, split)) for split in ("train", "val"))
        check(len(val) == 20, f"{len(val)} documents to validate")
        check(sorted(train + val) == sorted(documents), "not all documents")
        check(train == [d for d in documents if d in set(train)], "order changed")
        splits.append(val)
    check(splits[0] == splits[1] != splits[2], "seeds")
    check(sum(documents.index(d) for d in splits[0]) / 20 > 40, "validation documents all from the beginning")


@test
def at_least_one_document_is_kept_for_validation():
    write(folder("a.txt"), "One.<|endoftext|>Two.<|endoftext|>Three.")
    run(TEXT + ["--out", folder("o"), "--val-fraction", "0.001", folder("a.txt")])
    check(len(list(shards.read_split(folder("o"), "val"))) == 1, "none")
    write(folder("b.txt"), "All in one.")
    line = expect_error(
        TEXT + ["--out", folder("p"), folder("b.txt")], "1 document", "--document-separator", "--val-fraction 0"
    )
    check(os.listdir(folder("p")) == [], f"left something behind after: {line}")
    run(TEXT + ["--out", folder("p"), "--val-fraction", "0", folder("b.txt")])
    check(not any(n.startswith("val") for n in os.listdir(folder("p"))), "a val shard")


@test
def files_are_skipped_by_name_and_read_once_if_linked():
    write(folder("in/a"), "one\n%\ntwo\n%\n")
    write(folder("in/a.dat"), b"\x00\x01\xff")
    os.symlink("a", folder("in/a.u8"))
    files = [folder(f"in/{n}") for n in ("a", "a.dat", "a.u8")]
    run(TEXT + ["--out", folder("o"), "--document-separator", "%", "--skip", "*.dat", *files])
    check(sum(s["documents"] for s in manifest(folder("o"))["splits"].values()) == 2, "documents")
    expect_error(TEXT + ["--out", folder("p"), "--skip", "*", *files], "--skip leaves no file")


@test
def tokenizer_files_are_those_that_the_trainers_write():
    shards.ByteTokenizer().write_files(folder())
    write(
        folder("main.c"),
        '#include "llmc/tokenizer.h"\nint main(int c, char** v) { (void)c; tokenizer_bytes_write(v[1]); return 0; }\n',
    )
    run([os.environ.get("CC", "cc"), "-std=c11", "-I.", folder("main.c"), "-o", folder("main"), "-lcjson", "-lm"])
    os.mkdir(folder("c"))
    run([folder("main"), folder("c")])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        check(read(folder(name)) == read(folder("c/" + name)), name)
        json.loads(read(folder(name)))


@test
def fortunes_become_as_many_documents_as_there_are():
    source = "/usr/share/games/fortunes"
    if not os.path.isdir(source):
        return  # the reader's example is not installed here
    files = sorted(os.path.join(source, n) for n in os.listdir(source))
    run(TEXT + ["--out", folder("o"), "--document-separator", "%", "--skip", "*.dat", "--skip", "*.u8", *files])
    expected = [d for f in files if "." not in os.path.basename(f) for d in reference_documents(read(f), b"%")]
    got = [d for split in ("train", "val") for d in shards.read_split(folder("o"), split)]
    check(sorted(got) == sorted(expected) and len(got) > 10000, f"{len(got)} documents, {len(expected)} expected")


# ----------------------------------------------------------------------------
# text: bad input, and what a crash leaves


@test
def bytes_that_are_no_utf8_are_named_converted_or_replaced():
    write(folder("a.txt"), b"x" * (1 << 20) + b"gr\xfc\xdfe<|endoftext|>b")  # after the first chunk
    command = TEXT + ["--val-fraction", "0", "--out"]
    expect_error(
        command + [folder("o"), folder("a.txt")], f"byte offset {(1 << 20) + 2}", "--encoding", "--errors replace"
    )
    run(command + [folder("p"), "--encoding", "latin-1", folder("a.txt")])
    check(next(shards.read_split(folder("p"), "train")).endswith("grüße".encode()), "latin-1")
    run(command + [folder("q"), "--errors", "replace", folder("a.txt")])
    check(next(shards.read_split(folder("q"), "train")).endswith("gr\ufffd\ufffde".encode()), "replace")
    write(
        folder("cut.txt"), b"x" * ((1 << 20) - 1) + b"\xe2\x82\xac" + b"y\xe2\x82"
    )  # over the chunk's edge, and unfinished
    expect_error(command + [folder("r"), folder("cut.txt")], f"byte offset {(1 << 20) + 3}")


@test
def bad_input_is_one_line_and_leaves_nothing():
    write(folder("a.txt"), "One.<|endoftext|>Two.")
    write(folder("zero.txt"), "One.\0Two.")
    write(folder("empty.txt"), "\n\n<|endoftext|>\r\n")
    a, out = folder("a.txt"), ["--out", folder("o")]
    cases = [
        ([*out, "/nowhere/x.txt"], "/nowhere/x.txt"),
        ([*out, a, folder()], "is a folder"),
        ([*out, folder("zero.txt")], "zero bytes"),
        ([*out, folder("empty.txt")], "no text"),
        ([*out], "FILE"),
        ([a], "--out"),
        ([*out, "--val-fraction", "1", a], "--val-fraction 1"),
        ([*out, "--val-fraction", "5e-324", a], "--val-fraction 4.94066e-324"),
        ([*out, "--val-fraction", "nan", a], "--val-fraction"),
        ([*out, "--shard-tokens", "0", a], "--shard-tokens 0"),
        ([*out, "--shard-tokens", "2147483648", a], "--shard-tokens"),
        ([*out, "--shard-tokens", "inf", a], "--shard-tokens"),
        ([*out, "--document-separator", "a\nb", a], "--document-separator"),
        ([*out, "--encoding", "klingon", a], "klingon"),
        ([*out, "--encoding", "hex", a], "hex"),
        (["--out", a, a], "not a folder"),
        (["--out", "/proc/x/y", a], "/proc"),
    ]
    for options, part in cases:
        expect_error(TEXT + options, part)
        check(
            not os.path.exists(folder("o")) or os.listdir(folder("o")) == [], f"{options}: left {os.listdir(folder())}"
        )
    if os.getuid() != 0:  # root may read everything
        os.chmod(a, 0)
        expect_error(TEXT + [*out, a], a)


@test
def existing_shards_are_replaced_only_when_asked_and_other_files_never():
    write(folder("a.txt"), "One.<|endoftext|>Two.<|endoftext|>Three.")
    write(folder("b.txt"), "1<|endoftext|>2")
    write(folder("o/mine.txt"), "keep")
    run(TEXT + ["--out", folder("o"), "--shard-tokens", "4", folder("a.txt")])
    before = {n: read(folder("o/" + n)) for n in os.listdir(folder("o"))}
    expect_error(TEXT + ["--out", folder("o"), folder("b.txt")], "already holds", "--overwrite")
    check({n: read(folder("o/" + n)) for n in os.listdir(folder("o"))} == before, "changed although refused")
    run(TEXT + ["--out", folder("o"), "--overwrite", folder("b.txt")])
    check(
        sorted(os.listdir(folder("o")))
        == [
            "manifest.json",
            "mine.txt",
            "tokenizer.json",
            "tokenizer_config.json",
            "train_000000.bin",
            "val_000000.bin",
        ],
        f"{os.listdir(folder('o'))}",
    )


@test
def memory_does_not_grow_with_the_text():  # D14: one document of 48 MB without a line break

    with open(folder("big.txt"), "wb") as f:
        for _ in range(48):
            f.write(b"all work and no play " * 49932)
    usage = []
    for name, source in (("small", write(folder("small.txt"), "a<|endoftext|>b")), ("large", folder("big.txt"))):
        code = (
            "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); "
            "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
        )
        r = run([sys.executable, "-c", code, *TEXT, "--val-fraction", "0", "--out", folder(name), source])
        usage.append(int(r.out) * (1 if sys.platform == "darwin" else 1024))
    check(
        usage[1] - usage[0] < 24e6,
        f"peak memory {usage[0] / 1e6:.0f} MB for nothing, {usage[1] / 1e6:.0f} MB for 48 MB",
    )
    header = struct.unpack("<5i", read(folder("large/train_000000.bin"))[:20])
    check(header[2] == 1 + 48 * 49932 * 21, f"{header[2]} tokens")


@test
def a_killed_run_leaves_no_shard_and_can_be_repeated():
    with open(folder("a.txt"), "wb") as f:
        for i in range(40000):
            f.write(b"number %d and some more of it\n%%\n" % i)
    command = TEXT + ["--out", folder("o"), "--document-separator", "%", "--shard-tokens", "50000", folder("a.txt")]
    run([c if c != folder("o") else folder("fresh") for c in command])
    for wait in (0.05, 0.1, 0.15, 0.2, 0.3):
        p = start(command)
        time.sleep(wait)
        p.send_signal(signal.SIGKILL)
        p.communicate()
        names = os.listdir(folder("o")) if os.path.exists(folder("o")) else []
        if "manifest.json" in names or os.path.exists(folder("o/.partial/manifest.json")):
            break  # it was faster than the kill, but perhaps for putting its files in place
        check(not any(n.endswith(".bin") for n in names), f"after {wait} s: {names}")
        half = folder("o/.partial")
        for n in os.listdir(half) if os.path.exists(half) else []:
            data = read(os.path.join(half, n))
            whole = (
                data[:4] == struct.pack("<i", 20240801) and len(data) == 1024 + 4 * struct.unpack("<i", data[8:12])[0]
            )
            check(
                whole or data[:4] in (b"", bytes(4)) or not n.endswith(".bin"),
                f"{n} looks like a shard but is not whole",
            )
    run(command + ["--overwrite"])
    check(
        all(read(folder("o/" + n)) == read(folder("fresh/" + n)) for n in os.listdir(folder("fresh"))), "not the same"
    )
    check(sorted(os.listdir(folder("o"))) == sorted(os.listdir(folder("fresh"))), f"{os.listdir(folder('o'))}")


@test
def a_full_disk_is_one_line_and_leaves_nothing():
    write(folder("a.txt"), b"abc " * 50000)
    limit = (
        "import os, resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000)); os.execv(sys.argv[1], sys.argv[1:])"
    )
    expect_error(
        [sys.executable, "-c", limit, *TEXT, "--val-fraction", "0", "--out", folder("o"), folder("a.txt")], "large"
    )
    check(os.listdir(folder("o")) == [], f"left {os.listdir(folder('o'))}")


@test
def two_runs_into_one_folder_do_not_mix():
    write(folder("a.txt"), "One.<|endoftext|>Two.")
    with shards.OutputFolder(folder("o")):
        expect_error(TEXT + ["--out", folder("o"), folder("a.txt")], "another process")
    run(TEXT + ["--out", folder("o"), folder("a.txt")])


@test
def ctrl_c_ends_quietly_with_130_and_leaves_nothing():
    os.mkfifo(folder("pipe"))  # never delivers
    p = start(TEXT + ["--out", folder("o"), folder("pipe")])
    while not os.path.exists(folder("o/.partial")):
        time.sleep(0.02)
    time.sleep(0.1)
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=20)
    check(p.returncode == 130 and err == "", f"exit code {p.returncode}: {err}")
    check(os.listdir(folder("o")) == [], f"left {os.listdir(folder('o'))}")


main()
