"""--eval and --eval-choices of a whole trainer: bits per byte, and multiple choice by likelihood, against sums made here."""

import math
import sys

from program import *

QUESTIONS = os.path.join(ROOT, "dev", "test", "choices", "stories.jsonl")
CLOSE = 0.05 if GPU else 1e-4  # nats of a choice; bf16 rounds each of some 45 logits to 3 digits


def model(steps=20):
    """A tiny model that has seen a few words of the questions' kind, with a byte tokenizer."""
    text = "<|endoftext|>".join(json.loads(line)["ctx"] for line in read(QUESTIONS).splitlines())
    write(folder("text/a.txt"), text)
    run([PROGRAM, "--model", "tiny", "--batch-size", 4, "--seq-len", 128, "--lr", 3e-3, "--tokenize", "inline", "--train-data",
         folder("text/a.txt"), "--steps", 4 if GPU else steps, "--out", folder("out")])  # fmt: skip
    return step_folder(folder("out"), 4 if GPU else steps)


def questions(limit=12, name="choices.jsonl", tokenizer="bytes"):
    """The committed questions as tokens, by prepro/hellaswag.py. Returns (path, header, questions)."""
    path = folder(name)
    run([sys.executable, "-B", "prepro/hellaswag.py", "--tokenizer", tokenizer, "--limit", limit, "--out", path, QUESTIONS])
    header, *rest = map(json.loads, read(path).splitlines())
    return path, header, rest


def answers(folder_of_model, path, T, B, name):
    """(what it said, the numbers it wrote)"""
    r = run([PROGRAM, "--init", folder_of_model, "--eval-choices", path, "--seq-len", T, "--batch-size", B, "--metrics", folder(name)])
    return r.out, metrics(folder(name))


def nats_of_row(folder_of_model, context, choice, T):
    """-log p(choice | context) by way of --batch and --dump: one row, only the choice's tokens are counted."""
    row = [EOT, *context, *choice][-(T + 1):]
    tokens, targets = row[:-1], [-100] * (len(row) - 1 - len(choice)) + list(choice)
    batch = folder("row.safetensors")
    save_file({"tokens": np.array([tokens], np.int32), "targets": np.array([targets], np.int32)}, batch)
    run([PROGRAM, "--init", folder_of_model, "--batch", batch, "--dump", folder("row.dump")])
    return float(load_file(folder("row.dump"))["ce_loss"][0]) * len(choice)


def accuracies(lines, rows):
    """By likelihood, per token, per byte, in percent; ties go to the first choice."""
    right = [0, 0, 0]
    for line, q in zip(lines, rows):
        for how in range(3):
            per = [n / (1, len(c), b)[how] for n, c, b in zip(line["nats"], q["choices"], q["bytes"])]
            right[how] += per.index(min(per)) == q["label"]
    return [100 * r / len(rows) for r in right]


def check_accuracies(said, lines, rows):
    said = [float(x.split("%")[0]) for x in said.split("accuracy ")[1].replace("by likelihood, ", "").replace("per token, ", "").split(" ")[:3]]
    for a, b in zip(said, accuracies(lines, rows)):
        check_near(a, b, 0.00501, "accuracy")


# ----------------------------------------------------------------------------
# multiple choice


@test
def a_choice_costs_what_its_tokens_cost_after_the_context():
    m = model()
    path, header, rows = questions()
    check(header["questions"] == len(rows) == 12 and header["vocab_size"] == 257 and header["eot_id"] == EOT, f"{header}")
    said, lines = answers(m, path, 256, 3, "a")
    for q, line in list(zip(rows, lines))[:2 if GPU else 5]:
        check(line["label"] == q["label"] and line["tokens"] == [len(c) for c in q["choices"]], f"{line}")
        for choice, nats in zip(q["choices"], line["nats"]):
            check_near(nats, nats_of_row(m, q["context"], choice, 256), CLOSE, f"question {line['question']}")
    check(len({n for line in lines for n in line["nats"]}) > 40, "all choices cost the same")
    check_accuracies(said, lines, rows)
    check("(chance 25.00%) over 12 questions, 48 rows" in said, said)


@test
def answers_do_not_depend_on_the_batch_or_the_length():  # D16
    m = model()
    path, _, rows = questions(6)
    said, wanted = answers(m, path, 256, 4, "wanted")
    for T, B in ((256, 1), (700, 3), (300, 5), (256, 64)) if not GPU else ((300, 3),):
        other, lines = answers(m, path, T, B, f"{T}_{B}")
        check(other == said, f"T={T}, B={B}: {other!r}, not {said!r}")
        for a, b in zip(wanted, lines):
            check(all(abs(x - y) <= CLOSE for x, y in zip(a["nats"], b["nats"])), f"T={T}, B={B}: {a} and {b}")
    one, header, _ = questions(1, "one.jsonl")  # fewer rows than a batch has
    _, lines = answers(m, one, 256, 32, "one")
    check(all(abs(x - y) <= CLOSE for x, y in zip(wanted[0]["nats"], lines[0]["nats"])), "one question alone")


if GPU:

    @test
    def ranks_share_the_questions():  # D16: also where there are fewer batches than ranks
        from gpu import ranks

        m = model()
        path, _, rows = questions(3)
        said, wanted = answers(m, path, 240, 2, "one")
        for count, B in ((4, 2), (2, 32)):
            command = [PROGRAM, "--init", m, "--eval-choices", path, "--seq-len", 240, "--batch-size", B, "--metrics", folder(f"{count}")]
            out = ranks(count, command).out
            check(out == said, f"{count} ranks: {out!r}, not {said!r}")
            check(metrics(folder(f"{count}")) == wanted, f"{count} ranks: other numbers")


@test
def a_long_context_loses_its_beginning():
    m = model()
    path, _, rows = questions(3)
    T = max(len(c) for q in rows for c in q["choices"]) + 20
    said, lines = answers(m, path, T, 2, "a")
    check("12 of 12 rows were longer than --seq-len" in said, said)
    for choice, nats in zip(rows[1]["choices"], lines[1]["nats"]):
        check_near(nats, nats_of_row(m, rows[1]["context"], choice, T), CLOSE, "a cut row")
    expect_error([PROGRAM, "--init", m, "--eval-choices", path, "--seq-len", 20], "line 2", "does not fit into a context of 20", "--seq-len")


@test
def choices_of_unequal_length_are_compared_in_three_ways():
    m = model()
    header = {"format": "choices", "vocab_size": 257, "eot_id": EOT, "questions": 2}
    rows = [{"context": list(b"Once there "), "choices": [list(b"was"), list(b"was a brave mouse named Lily"), list(b"were")],
             "bytes": [3, 100, 4], "label": 0}, {"context": [], "choices": [list(b"O"), list(b"zzz")], "bytes": [1, 3], "label": 0}]  # fmt: skip
    write(folder("c.jsonl"), "\n".join(map(json.dumps, [header, *rows])))
    said, lines = answers(m, folder("c.jsonl"), 64, 1, "a")
    check_accuracies(said, lines, rows)
    check("chance 41.67%" in said, said)
    check_near(lines[1]["nats"][0], nats_of_row(m, [], list(b"O"), 64), CLOSE, "after no context")
    for label in (0, 1, 2):  # the label decides, not the order
        rows[0]["label"] = label
        write(folder("c.jsonl"), "\n".join(map(json.dumps, [header, *rows])))
        said, lines = answers(m, folder("c.jsonl"), 64, 1, f"label{label}")
        check_accuracies(said, lines, rows)


@test
def a_checkpoint_answers_whatever_it_was_trained_with():
    m = model()
    path, _, _ = questions(3)
    before = files_in(folder("out"))
    a = run([PROGRAM, "--init", m, "--eval-choices", path, "--seq-len", 256]).out
    b = run([PROGRAM, "--resume", m, "--eval-choices", path, "--seq-len", 256]).out
    check(a == b, f"{a!r} and {b!r}")
    check(files_in(folder("out")) == before, "changed")


@test
def what_is_wrong_with_a_file_of_choices_is_said_with_its_line():
    good = '{"format": "choices", "vocab_size": 257, "eot_id": 256, "questions": 1}\n'
    one = '{"context": [1], "choices": [[2], [3, 4]], "bytes": [1, 2], "label": 1}\n'
    command = [PROGRAM, "--model", "tiny", "--seq-len", 16, "--batch-size", 1, "--eval-choices", folder("c.jsonl")]
    for content, *parts in [
        ("", "0 questions"),
        ("hello\n", "line 1", "not valid JSON"),
        ("{}\n", "line 1", "prepro/hellaswag.py"),
        (good.replace("choices", "chances") + one, "line 1", "prepro/hellaswag.py"),
        (good.replace("256", "257") + one, "line 1", "eot_id"),
        (good.replace('"questions": 1', '"questions": 0') + one, "line 1", "number of questions"),
        (good.replace('"vocab_size": 257', '"vocab_size": 151669') + one, "tokenizer of 151669 tokens", "vocabulary has 257"),
        (good, "has 0 questions", "says 1"),
        (good + one + one, "line 3", "more questions"),
        (good + one[:-20], "line 2", "not valid JSON"),
        (good + "\n", "line 2"),
        (good + one.replace("[1]", "1", 1), "line 2", '"context"'),
        (good + one.replace("[[2], [3, 4]]", "[[2]]"), "line 2", '2 to 1000 "choices"'),
        (good + one.replace("[2]", "[]"), "line 2", "a choice"),
        (good + one.replace("[2]", "2"), "line 2", "a choice"),
        (good + one.replace("[2]", "[257]"), "line 2", "from 0 to 256"),
        (good + one.replace("[2]", "[-1]"), "line 2", "from 0 to 256"),
        (good + one.replace("[2]", "[1.5]"), "line 2", "from 0 to 256"),
        (good + one.replace("[1, 2]", "[1]"), "line 2", '"bytes"'),
        (good + one.replace("[1, 2]", "[0, 2]"), "line 2", '"bytes"'),
        (good + one.replace('"label": 1', '"label": 2'), "line 2", '"label"'),
        (good + one.replace('"label": 1', '"label": "1"'), "line 2", '"label"'),
    ]:
        write(folder("c.jsonl"), content)
        expect_error(command, "--eval-choices", *parts)
    write(folder("c.jsonl"), good + one)
    write(folder("metrics"), "of a long run")
    expect_error(command + ["--metrics", folder("metrics")], folder("metrics"), "exists")
    check(read(folder("metrics")) == b"of a long run", "metrics written over")
    expect_error([PROGRAM, "--model", "tiny", "--eval-choices", folder("no")], folder("no"))
    expect_error(command + ["--eval", "--val-data", "x"], "--eval and --eval-choices exclude each other")


@test
def hellaswag_puts_texts_together_as_the_harness_does():
    rows = [
        {"activity_label": "Roof", "ctx_a": "A man is  up. [title] He ", "ctx_b": "the Man", "endings": ["[x]goes.", "[substeps] stays"], "label": "1"},
        {"ctx": "Plain context.", "endings": [" one", "two  three", "4"], "label": 2, "ind": 7},
    ]
    write(folder("h.jsonl"), "\n".join(map(json.dumps, rows)))
    script = [sys.executable, "-B", "prepro/hellaswag.py", "--tokenizer", "bytes", "--out"]
    run(script + [folder("c.jsonl"), folder("h.jsonl")])
    header, a, b = map(json.loads, read(folder("c.jsonl")).splitlines())
    check(bytes(a["context"]) == b"Roof: A man is up.. He The man", f"{bytes(a['context'])}")
    check([bytes(c) for c in a["choices"]] == [b" goes.", b"  stays"] and a["label"] == 1 and a["bytes"] == [6, 7], f"{a}")
    check(bytes(b["context"]) == b"Plain context." and [bytes(c) for c in b["choices"]] == [b" one", b" two three", b" 4"], f"{b}")
    for change, part in [
        ({"label": ""}, '"label"'), ({"label": 3}, '"label"'), ({"endings": ["x"]}, '"endings"'), ({"endings": "xy"}, '"endings"'),
        ({"endings": ["a", "[b]"], "label": 0}, "empty"), ({"ctx": 5}, '"ctx"'), ({"ctx": None}, '"ctx"'),
        ({"ctx": "a\ud800"}, "half a character"), ({"endings": ["a", "\udc00", "c"]}, "half a character"),
    ]:  # fmt: skip
        write(folder("h.jsonl"), json.dumps(rows[1]) + "\n" + json.dumps({**rows[1], **change}))
        expect_error(script + [folder("d.jsonl"), folder("h.jsonl")], "h.jsonl: line 2", part)
    write(folder("h.jsonl"), "{}\n[")
    expect_error(script + [folder("d.jsonl"), folder("h.jsonl")], "line 1", "endings")
    write(folder("h.jsonl"), "\n")
    expect_error(script + [folder("d.jsonl"), folder("h.jsonl")], "no question")
    check(not os.path.exists(folder("d.jsonl")), "left something behind")
    committed = read(QUESTIONS).decode()
    check(run([sys.executable, "-B", "prepro/stories.py", "--questions", committed.count("\n")]).out == committed, "the committed questions")


# ----------------------------------------------------------------------------
# the loss on all of the data


@test
def validation_does_not_depend_on_batches_or_ranks():  # D16: also where the last batch is not full, or ranks outnumber batches
    m, T = model(), 32
    tokens = tokens_of(text_of(20, seed=7))[:13 * T + 5]  # 13 sequences, and a rest that is none
    data = ["--val-data", shard(folder("data/val.bin"), tokens), "--seq-len", T]
    rows = np.array([tokens[i * T:i * T + T + 1] for i in range(13)], np.int32)
    save_file({"tokens": rows[:, :-1].copy(), "targets": rows[:, 1:].copy()}, folder("all"))
    run([PROGRAM, "--init", m, "--batch", folder("all"), "--dump", folder("dump")])
    wanted, wanted_bits = float(load_file(folder("dump"))["ce_loss"][0]), None
    from gpu import ranks
    for B, count in ((1, 1), (4, 1), (13, 1), (64, 1)) + (((2, 2), (4, 3), (8, 4)) if GPU else ()):
        said = ranks(count, [PROGRAM, "--init", m, *data, "--batch-size", B, "--eval"]).out
        check("over 13 sequences of 32 tokens" in said, said)
        loss, bits = (float(said.split(word)[1].split()[0]) for word in ("validation loss ", "), " if "), " in said else ", "))
        check_near(loss, wanted, 2e-5, f"B = {B}, {count} ranks")  # bf16 rounds the same whatever the batch
        check(wanted_bits in (None, bits), f"B = {B}, {count} ranks: {bits} bits per byte, not {wanted_bits}")
        wanted_bits = bits
    some = [ranks(count, [PROGRAM, "--init", m, *data, "--batch-size", 2, "--eval", "--val-steps", 3]).out for count in ((1, 2) if GPU else (1,))]
    check("over 6 sequences" in some[0] and len(set(some)) == 1, f"{some}")


@test
def eval_takes_all_whatever_training_validated_on():
    val = shard(folder("data/val.bin"), tokens_of(text_of(20, seed=7))[:13 * 32 + 5])
    data = ["--train-data", shard(folder("data/train.bin"), tokens_of(text_of(20))), "--val-data", val, "--batch-size", 4, "--seq-len", 32]
    run([PROGRAM, "--model", "tiny", *data, "--steps", 1, "--val-steps", 1, "--out", folder("out")])
    check("over 13 sequences" in run([PROGRAM, "--resume", step_folder(folder("out"), 1), "--eval"]).out, "not all of them")


# ----------------------------------------------------------------------------
# tokenizers that do not belong together


@test
def tokens_of_different_tokenizers_are_refused():
    m = model()  # with a tokenizer of bytes beside it
    tokens = tokens_of(text_of(40, seed=2))
    other, same = shard(folder("data/other.bin"), tokens, vocab_size=300, eot=256), shard(folder("data/same.bin"), tokens)
    expect_error([PROGRAM, "--init", m, "--eval", "--val-data", other, "--seq-len", 32], "made with a tokenizer of 300 tokens", "vocabulary has 257")
    smaller = shard(folder("data/smaller.bin"), [t % 200 for t in tokens], vocab_size=201, eot=200)
    expect_error([PROGRAM, "--init", m, "--eval", "--val-data", smaller, "--seq-len", 32], "tokenizer of 201 tokens", "tokenizer.json has 257")
    expect_error([PROGRAM, "--model", "tiny", "--train-data", same, "--val-data", smaller, "--seq-len", 32], "tokenizer of 257", "201", "the same")
    write(folder("c.jsonl"), '{"format": "choices", "vocab_size": 201, "eot_id": 200, "questions": 1}\n'
          '{"context": [1], "choices": [[2], [3, 4]], "bytes": [1, 2], "label": 1}\n')
    expect_error([PROGRAM, "--init", m, "--eval-choices", folder("c.jsonl"), "--seq-len", 32], "c.jsonl", "201", "257")


@test
def a_fresh_model_takes_the_vocabulary_it_is_told_and_the_end_of_text_of_its_data():
    tokens = [t if t != EOT else 3 for t in tokens_of(text_of(40, seed=2))]
    data = shard(folder("data/train.bin"), tokens, vocab_size=300, eot=3)
    expect_error([PROGRAM, "--model", "tiny", "--train-data", data, "--seq-len", 32], "--vocab-size 300")
    r = run([PROGRAM, "--model", "tiny", "--vocab-size", 320, "--train-data", data, "--seq-len", 32, "--batch-size", 2, "--steps", 1, "--out", folder("out")])
    check("eos_token_id is 3" in r.out, r.out)
    saved = json.loads(read(step_folder(folder("out"), 1) + "/config.json"))
    check(saved["vocab_size"] == 320 and saved["eos_token_id"] == saved["bos_token_id"] == 3, f"{saved}")
    expect_error([PROGRAM, "--init", step_folder(folder("out"), 1), "--vocab-size", 400, "--generate", 1], "--vocab-size does nothing without --model or --config")


# ----------------------------------------------------------------------------
# bits per byte


def evaluation(command):
    """(loss, bits per byte or None) of --eval"""
    said = run(command).out.split("validation loss ")[1]
    return float(said.split()[0]), float(said.split(", ")[1].split()[0]) if "bits per byte" in said else None


@test
def bits_per_byte_count_the_bytes_of_the_targets():
    m, text = model(), text_of(80, seed=5)
    tokens = tokens_of(text)
    shard(folder("data/val.bin"), tokens)
    T, B = 32, 4
    loss, bits = evaluation([PROGRAM, "--init", m, "--val-data", folder("data/val.bin"), "--eval", "--seq-len", T, "--batch-size", B])
    count = (len(tokens) - 1) // T * T  # whole sequences
    of_text = sum(t != EOT for t in tokens[1:count + 1])  # the EOT costs nats, but it is no text
    check(0 < count - of_text < count / 10, "no EOT among them")
    check_near(bits, loss * count / of_text / math.log(2), 1e-4, "bits per byte")
    loss, bits = evaluation([PROGRAM, "--init", m, "--val-data", folder("data/val.bin"), "--eval", "--seq-len", T, "--batch-size", B, "--val-steps", 1])
    of_text = sum(t != EOT for t in tokens[1:B * T + 1])
    check_near(bits, loss * B * T / of_text / math.log(2), 1e-4, "of one batch")


@test
def without_a_tokenizer_the_manifest_says_how_many_bytes_there_are():
    tokens = [int(t) for t in np.random.default_rng(1).integers(0, 200, 999)]
    shard(folder("data/val_000000.bin"), tokens, eot=-1)
    command = [PROGRAM, "--model", "tiny", "--val-data", folder("data/val_*.bin"), "--eval", "--seq-len", 32, "--batch-size", 4]
    loss, bits = evaluation(command)
    check(bits is None, "bits per byte of nobody knows what")
    splits = {"val": {"tokens": 999, "bytes": 3996, "shards": [{"file": "val_000000.bin"}]},
              "train": {"tokens": 10, "bytes": 7, "shards": [{"file": "train_000000.bin"}]}}  # fmt: skip
    write(folder("data/manifest.json"), json.dumps({"splits": splits}))
    again, bits = evaluation(command)
    check_near(bits, loss / 4 / math.log(2), 1e-4, "bits per byte")
    check(again == loss, "the loss changed")
    for broken in ("{", '{"splits": 5}', '{"splits": {"val": {"tokens": 0, "bytes": 1, "shards": [{"file": "val_000000.bin"}]}}}'):
        write(folder("data/manifest.json"), broken)
        check(evaluation(command) == (loss, None), f"{broken}")


main()
