"""prepro/text.py: every kind of source gives the same documents, any number of workers the same bytes, and a run that was
interrupted goes on to what it would have written."""

import glob
import gzip
import json
import os
import pty
import random
import re
import signal
import struct
import sys
import time

from harness import *

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(ROOT, "prepro"))
import shards
import text
import tinystories

TEXT = [sys.executable, "-B", "prepro/text.py"]
# text.py in small portions: batches of 2 kB, what is done is saved all the time
HASTY = [sys.executable, "-B", "-c", "import sys; sys.path.insert(0, 'prepro'); import sources, text, shards; text.SAVE_EVERY = 0.05; "
         "text.BATCH = 2000; sys.argv[0] = 'text.py'; shards.run_main(text.main)"]
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def some_documents(n, seed=1):
    rng = random.Random(seed)
    words = ["one", "two", "drei", "Größe", "雪が", "🙂", "it's", "1984", "a\nb", '"q"', "\\n", "tab\there"]
    return [" ".join(rng.choice(words) for _ in range(rng.randrange(1, 60))) for _ in range(n)]


def as_text(path, documents):
    return write(path, "<|endoftext|>".join(documents))


def as_jsonl(path, documents, field="text"):
    return write(path, "".join(json.dumps({"id": i, field: d}, ensure_ascii=i % 2 == 0) + "\n" for i, d in enumerate(documents)))


def as_parquet(path, documents, field="text", **columns):
    import pyarrow
    import pyarrow.parquet

    os.makedirs(os.path.dirname(path), exist_ok=True)
    table = pyarrow.table({"id": list(range(len(documents))), field: documents, **columns})
    pyarrow.parquet.write_table(table, path, row_group_size=7)
    return path


def as_gzip(path):
    with open(path, "rb") as f, gzip.open(path + ".gz", "wb") as g:
        g.write(f.read())
    return path + ".gz"


def dataset(path, train, validation=None):
    """A folder as datasets have it on the hub: data/SPLIT-00000-of-00002.parquet."""
    half = len(train) // 2
    as_parquet(f"{path}/data/train-00000-of-00002.parquet", train[:half])
    as_parquet(f"{path}/data/train-00001-of-00002.parquet", train[half:])
    if validation:
        as_parquet(f"{path}/data/validation-00000-of-00001.parquet", validation)
    return path


def shard_files(out):
    return {n: read(os.path.join(out, n)) for n in sorted(os.listdir(out)) if n.endswith(".bin")}


def check_same_shards(a, b, what):
    a, b = shard_files(a), shard_files(b)
    check(a and a == b, f"{what}: {sorted(a)} and {sorted(b)} differ")


# ----------------------------------------------------------------------------
# kinds of sources


@test
def every_kind_of_file_gives_the_same_shards():
    documents = some_documents(300)
    base = as_text(folder("in/a.txt"), documents)
    others = {
        "jsonl": as_jsonl(folder("in/a.jsonl"), documents),
        "parquet": as_parquet(folder("in/a.parquet"), documents),
        "txt.gz": as_gzip(base),
        "ndjson.gz": as_gzip(as_jsonl(folder("in/a.ndjson"), documents)),
        "named": as_jsonl(folder("in/rows.dat"), documents, "content"),
    }
    run(TEXT + ["--out", folder("o"), base])
    check(len(list(shards.read_split(folder("o"), "train"))) == 285, "not 285 documents to train on")
    for name, path in others.items():
        more = ["--format", "jsonl", "--field", "content"] if name == "named" else []
        run(TEXT + ["--out", folder(name), *more, path])
        check_same_shards(folder("o"), folder(name), name)


@test
def a_byte_order_mark_is_no_text():  # neither here nor where a trainer tokenizes
    documents = some_documents(9)
    plain, marked = as_text(folder("plain/a.txt"), documents), as_text(folder("marked/a.txt"), documents)
    write(marked, b"\xef\xbb\xbf" + read(marked))
    for path, out in ((plain, "a"), (marked, "b")):
        run([*TEXT, "--out", folder(out), "--val-fraction", 0, path])
    check_same_shards(folder("a"), folder("b"), "marked")
    train = [os.path.join(ROOT, "train_moe_cpu"), "--model", "tiny", "--batch-size", 1, "--seq-len", 16, "--steps", 3, "--metrics"]
    run([*train, folder("a.jsonl"), "--train-data", folder("a") + "/train_*.bin"])
    run([*train, folder("b.jsonl"), "--tokenize", "inline", "--train-data", marked])
    loss = [[json.loads(line)["loss"] for line in read(folder(n)).splitlines()] for n in ("a.jsonl", "b.jsonl")]
    check(loss[0] == loss[1] and len(loss[0]) == 3, f"{loss}")


@test
def text_that_is_mostly_for_validation_is_said():
    write(folder("a.txt"), "short"), write(folder("b.txt"), "long " * 1000)
    said = [run([*TEXT, "--out", folder(f"out{seed}"), "--seed", seed, folder("a.txt"), folder("b.txt")]).out for seed in range(8)]
    check({"is for validation" in s for s in said} == {True, False}, f"{said}")


@test
def a_dataset_gives_the_same_shards_as_files():
    documents, validation = some_documents(300), some_documents(40, seed=2)
    dataset(folder("in"), documents, validation)
    run(TEXT + ["--out", folder("a"), as_text(folder("a.txt"), documents), "--val-files", as_text(folder("v.txt"), validation)])
    run(TEXT + ["--out", folder("b"), "--dataset", folder("in"), "--val-split", "validation"], env=OFFLINE)
    check_same_shards(folder("a"), folder("b"), "with a split of its own")
    check(list(shards.read_split(folder("b"), "val")) == [d.encode() for d in validation], "other documents to validate")
    run(TEXT + ["--out", folder("c"), folder("a.txt")])
    run(TEXT + ["--out", folder("d"), "--dataset", folder("in")], env=OFFLINE)
    check_same_shards(folder("c"), folder("d"), "drawn")
    manifest = json.loads(read(folder("d/manifest.json")))
    check(manifest["source"] == folder("in") and manifest["files"][0]["documents"] == 300, f"{manifest}")


@test
def a_dataset_on_the_hub_is_found_in_its_cache():
    """As huggingface_hub lays it out: datasets--ORG--NAME/refs/REVISION names a folder in snapshots."""
    documents, hub = some_documents(60), folder("hf/hub/datasets--some-lab--their-stories")
    for revision, commit, rows in (("main", "a" * 40, documents), ("v2", "b" * 40, documents[:30])):
        write(f"{hub}/refs/{revision}", commit)
        dataset(f"{hub}/snapshots/{commit}", rows)
        run(TEXT + ["--out", folder("file_" + revision), as_text(folder(revision + ".txt"), rows)])
    env, command = {**OFFLINE, "HF_HOME": folder("hf")}, TEXT + ["--dataset", "some-lab/their-stories", "--out"]
    run(command + [folder("main")], env=env)
    run(command + [folder("v2"), "--revision", "v2"], env=env)
    for revision in ("main", "v2"):
        check_same_shards(folder(revision), folder("file_" + revision), revision)
    check(json.loads(read(folder("main/manifest.json")))["source"] == "some-lab/their-stories", "name in the manifest")
    expect_error(command + [folder("v3"), "--revision", "v3"], "--dataset some-lab/their-stories", env=env)


@test
def rows_without_text_are_left_out_and_an_eot_in_a_row_cuts_it():
    rows = ["one", "", None, "\n\n", "two<|endoftext|>three\n", "<|endoftext|>"]
    write(folder("a.jsonl"), "\n".join(json.dumps({"text": r}) for r in rows) + "\n\n")
    as_parquet(folder("b.parquet"), rows)
    dataset(folder("c"), rows)
    for name, source in (("a", [folder("a.jsonl")]), ("b", [folder("b.parquet")]), ("c", ["--dataset", folder("c")])):
        run(TEXT + ["--out", folder("o" + name), "--val-fraction", "0", *source], env=OFFLINE)
        got = list(shards.read_split(folder("o" + name), "train"))
        check(got == [b"one", b"two", b"three"], f"{name}: {got}")


@test
def what_is_wrong_with_a_row_is_said_with_its_place():
    good = json.dumps({"text": "fine"}) + "\n"
    for line, *parts in [
        ('{"text": "cut', "line 3", "not JSON"),
        ('["text"]', "line 3", "list"),
        ('{"body": "x", "id": 1}', 'no field "text" but body, id', "--field"),
        ('{"text": 7}', '"text" is no text but int'),
        ('{"text": "\\ud800"}', "lone surrogate", "--errors replace"),
        ('{"text": ' + "[" * 100000, "not JSON"),
        (b'{"text": "gr\xfc"}', "not UTF-8 (byte 12", "--errors replace"),
    ]:
        line = line if isinstance(line, bytes) else line.encode()
        write(folder("a.jsonl"), good.encode() * 2 + line + b"\n" + good.encode())
        expect_error(TEXT + ["--out", folder("o"), folder("a.jsonl")], *parts)
        check(os.listdir(folder("o")) == [], "left something behind")
    for line, wanted in [(b'{"text": "gr\xfc"}', "gr\ufffd"), (b'{"text": "a\\ud800"}', "a\ufffd\ufffd\ufffd")]:
        write(folder("a.jsonl"), line)
        run(TEXT + ["--out", folder("o"), "--overwrite", "--val-fraction", "0", "--errors", "replace", folder("a.jsonl")])
        got = next(shards.read_split(folder("o"), "train")).decode()
        check(got == wanted, f"{line}: {got!r}")


@test
def what_is_wrong_with_a_file_or_dataset_is_one_line():
    as_parquet(folder("in/a.parquet"), ["one"], field="body")
    as_parquet(folder("in/n.parquet"), [1, 2])
    whole = read(as_parquet(folder("in/good.parquet"), some_documents(50)))
    write(folder("in/cut.parquet"), whole[:-100])
    write(folder("in/flipped.parquet"), whole[:200] + bytes(300) + whole[500:])
    write(folder("in/no.parquet"), "hello\n" * 100)
    write(folder("in/cut.jsonl.gz"), gzip.compress(b'{"text": "a"}\n' * 1000)[:-20])
    write(folder("in/no.txt.gz"), "not compressed")
    dataset(folder("set"), ["a", "b"])
    write(folder("in/rows.json"), '[{"text": "a"}]'), write(folder("in/rows.csv"), "text\na\n")
    out = TEXT + ["--out", folder("o")]
    for options, *parts in [
        ([folder("in/rows.json")], "rows.json", "JSON lines", "--format text"),
        ([folder("in/rows.csv")], "rows.csv", "JSON lines"),
        ([folder("in/good.parquet"), "--max-tokens", "1.5"], "--max-tokens", "1.5"),
        ([folder("in/a.parquet")], 'no column "text" but id, body'),
        ([folder("in/n.parquet")], "row 1", "no text but int"),
        ([folder("in/cut.parquet")], "cut.parquet"),
        ([folder("in/flipped.parquet")], "flipped.parquet"),
        ([folder("in/no.parquet")], "not a whole Parquet file"),
        ([folder("in/cut.jsonl.gz")], "not a whole gzip file"),
        ([folder("in/no.txt.gz")], "not a whole gzip file"),
        (["--dataset", folder("set"), "--field", "body"], 'no column "body" but id, text'),
        (["--dataset", folder("set"), "--dataset-split", "test"], "--dataset", "test"),
        (["--dataset", "nobody/nothing"], "--dataset nobody/nothing"),
        (["--dataset", folder("set"), folder("in/a.parquet")], "Give FILEs"),
        (["--dataset", folder("set"), "--val-files", "x"], "--val-files"),
        ([folder("in/a.parquet"), "--val-split", "x"], "--val-split"),
        ([folder("in/a.parquet"), "--val-files", "x", "--val-fraction", "0.1"], "--val-fraction"),
        ([folder("in/a.parquet"), "--workers", "0"], "--workers 0"),
        ([folder("in/a.parquet"), "--max-tokens", "0"], "--max-tokens 0"),
        ([folder("in/a.parquet"), "--train-bpe", "100"], "--train-bpe 100", "257"),
        ([folder("in/a.parquet"), "--train-bpe", "300", "--tokenizer", "bytes"], "neither --tokenizer"),
        ([folder("in/a.parquet"), "--eot", "</s>"], "--eot </s>"),
        ([folder("in/a.parquet"), "--format", "csv"], "csv"),
    ]:
        expect_error(out + options, *parts, env=OFFLINE)
        check(not os.path.exists(folder("o")) or os.listdir(folder("o")) == [], f"{options}: left something behind")


@test
def a_package_that_is_missing_is_named_only_where_it_is_needed():
    for name in ("tokenizers", "pyarrow", "datasets", "huggingface_hub"):
        write(folder(f"without/{name}.py"), "raise ImportError('not installed')\n")
    without = dict(OFFLINE, PYTHONPATH=folder("without"))
    a = as_text(folder("a.txt"), some_documents(30))
    run(TEXT + ["--out", folder("o"), a], env=without)
    run(TEXT + ["--out", folder("p"), as_jsonl(folder("a.jsonl"), ["one", "two"])], env=without)
    for options, package in [
        (["--train-bpe", "300", a], "tokenizers"),
        (["--tokenizer", folder("o/tokenizer.json"), "--eot", "!", a], "tokenizers"),
        (["--tokenizer", "nobody/nothing", a], "huggingface_hub"),
        ([as_parquet(folder("a.parquet"), ["one"])], "pyarrow"),
        (["--dataset", folder("x")], "datasets"),
    ]:
        expect_error(TEXT + ["--out", folder("q"), *options], f"needs the Python package {package}", "pip install", env=without)


@test
def the_wrappers_choose_dataset_split_and_tokenizer():
    dataset(folder("set"), some_documents(60), some_documents(7, seed=3))
    tiny, fine = ([sys.executable, "-B", f"prepro/{name}.py"] for name in ("tinystories", "fineweb"))
    expect_error(tiny + ["--out", folder("a")], "--dataset roneneldan/TinyStories", env=OFFLINE)
    expect_error(fine + ["--out", folder("a"), "--tokenizer", "bytes"], "HuggingFaceFW/fineweb-edu", env=OFFLINE)
    expect_error(fine + ["--out", folder("a"), as_text(folder("x.txt"), ["a"])], "--tokenizer Qwen/Qwen3", env={**OFFLINE, "HF_HOME": folder("hf")})
    run(tiny + ["--out", folder("b"), "--dataset", folder("set"), "--val-split", "validation", "--train-bpe", "300"], env=OFFLINE)
    check(json.loads(read(folder("b/manifest.json")))["splits"]["val"]["documents"] == 7, "its own validation split")
    run(tiny + ["--out", folder("c"), "--tokenizer", "bytes", as_text(folder("t.txt"), ["a"] * 9), "--val-files", as_text(folder("v.txt"), ["b"])])
    check(list(shards.read_split(folder("c"), "val")) == [b"b"], "files")
    config = json.loads(read(os.path.join(ROOT, "prepro/tinystories.json")))
    check(config["vocab_size"] == tinystories.BPE, "tinystories.json is a model for another vocabulary")
    run([os.path.join(ROOT, "train_moe_cpu"), "--config", "prepro/tinystories.json", "--train-data", folder("b/train_*.bin"), "--dry-run"])
    run(fine + ["--out", folder("d"), "--tokenizer", "bytes", as_parquet(folder("p/x.parquet"), some_documents(4000))])
    check(json.loads(read(folder("d/manifest.json")))["splits"]["val"]["documents"] == 2, "one of 2,000")


# ----------------------------------------------------------------------------
# workers


@test
def any_number_of_workers_writes_the_same_bytes():
    path = as_jsonl(folder("a.jsonl"), some_documents(2000))
    for workers in (1, 2, 7):
        out = folder(f"o{workers}")
        run(HASTY + ["--out", out, "--train-bpe", "400", "--shard-tokens", "20000", "--workers", workers, path])
        check_same_shards(folder("o1"), out, f"{workers} workers")
        check(read(out + "/manifest.json") == read(folder("o1/manifest.json")), f"{workers} workers: the manifest")
    check(len(shard_files(folder("o1"))) > 3, "not several shards")


@test
def a_worker_that_dies_is_one_line():
    path = as_text(folder("a.txt"), some_documents(500))
    code = HASTY[3].replace("sys.argv[0]", "text.worker_encode = die; sys.argv[0]")
    code = "import os\ndef die(pieces): os._exit(9)\n" + code
    expect_error([*HASTY[:3], code, "--out", folder("o"), "--workers", "2", path], "a worker process died", "--workers")


def children(pid):
    return [int(p) for p in read(f"/proc/{pid}/task/{pid}/children").split()] if os.path.exists(f"/proc/{pid}") else []


@test
def workers_do_not_outlive_a_killed_run():
    if not os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children"):
        return
    os.mkfifo(folder("pipe"))  # never ends
    p = start(HASTY + ["--out", folder("o"), "--workers", "2", folder("pipe")])
    feed = os.open(folder("pipe"), os.O_WRONLY)
    os.write(feed, b"word " * 13000)
    workers = []
    for _ in range(200):
        workers = children(p.pid)
        if len(workers) == 2:
            break
        try:
            os.write(feed, b"<|endoftext|>" + b"word " * 800)
        except BlockingIOError:
            pass
        time.sleep(0.05)
    check(len(workers) == 2, f"workers {workers}")
    p.send_signal(signal.SIGKILL)
    p.wait()
    os.close(feed)
    for _ in range(100):
        if not any(os.path.exists(f"/proc/{w}") for w in workers):
            return
        time.sleep(0.1)
    for w in workers:
        os.kill(w, signal.SIGKILL)
    check(False, "workers are still there after 10 s")


@test
def memory_does_not_grow_with_the_rows_for_two_workers():  # D14
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    usage = []
    for name, rows in (("small", 100), ("large", 40000)):
        path = write(folder(name + ".jsonl"), json.dumps({"text": "all work and no play " * 50}) + "\n")
        with open(path, "ab") as f:
            f.write(read(path) * (rows - 1))
        command = [*TEXT, "--workers", "2", "--val-fraction", "0.1", "--shard-tokens", "10000000", "--out", folder(name), path]
        usage.append(int(run([sys.executable, "-c", code, *command]).out) * (1 if sys.platform == "darwin" else 1024))
    check(usage[1] - usage[0] < 24e6, f"peak memory {usage[0] / 1e6:.0f} MB for 100 rows, {usage[1] / 1e6:.0f} MB for 42 MB")
    counts = json.loads(read(folder("large/manifest.json")))["splits"]
    check(sum(s["documents"] for s in counts.values()) == 40000 and counts["val"]["documents"] == 4000, f"{counts}")


# ----------------------------------------------------------------------------
# interrupted runs


def whole_or_no_shard(path):
    data = read(path)
    magic, _, count = struct.unpack("<3i", data[:12]) if len(data) >= 12 else (0, 0, 0)
    return magic == 0 or (magic == shards.MAGIC and len(data) == 1024 + 4 * count)


def kill_until_done(command, out, rng):
    """Runs it again and again, killed after ever longer; true if a run went on from where another was."""
    went_on, wait = False, 0.4
    for _ in range(60):
        p = start(command)
        try:
            err = p.communicate(timeout=wait * rng.uniform(0.8, 1.2))[1]
        except Exception:
            p.send_signal(signal.SIGKILL)
            err = p.communicate()[1]
        went_on |= "going on" in err
        if p.returncode == 0:
            return went_on
        check(p.returncode == -signal.SIGKILL, f"exit code {p.returncode}: {err}")
        names = os.listdir(out) if os.path.exists(out) else []
        if "manifest.json" in names:
            return went_on  # it had done everything
        if os.path.exists(out + "/.partial/manifest.json"):  # but for putting its files in place, perhaps some of them
            expect_error(command, "already holds", "an interrupted run was finished")
            return went_on
        check(not any(n.endswith(".bin") for n in names), f"shards of half a run: {names}")
        for n in os.listdir(out + "/.partial") if ".partial" in names else []:
            check(not n.endswith(".bin") or whole_or_no_shard(f"{out}/.partial/{n}"), f"{n} looks whole and is not")
        wait *= 1.1
    raise Failure("60 runs were not enough")


@test
def killed_runs_go_on_to_the_same_bytes():
    documents = some_documents(8000)
    as_text(folder("in/a.txt"), documents[:3000])
    as_jsonl(folder("in/b.jsonl"), documents[3000:5500])
    as_parquet(folder("in/c.parquet"), documents[5500:])
    files = [folder(f"in/{n}") for n in ("a.txt", "b.jsonl", "c.parquet")]
    rng = random.Random(4)
    for name, options in [
        ("files", [*files, "--shard-tokens", "200000"]),
        ("bpe", [*files, "--train-bpe", "500", "--shard-tokens", "50000", "--workers", "2"]),
    ]:
        command = HASTY + options + ["--out"]
        run(command + [folder("whole_" + name)])
        interrupted(folder(name), options, rng.randint(1, 4))  # killed in a save: however fast the machine, there is one to go on from
        check(kill_until_done(command + [folder(name)], folder(name), rng), f"{name}: every run began anew")
        for file in sorted(os.listdir(folder("whole_" + name))):
            check(read(folder(f"{name}/{file}")) == read(folder(f"whole_{name}/{file}")), f"{name}: {file} differs")
        check(sorted(os.listdir(folder(name))) == sorted(os.listdir(folder("whole_" + name))), f"{os.listdir(folder(name))}")


def interrupted(out, options, after=3):
    """A run that saves what it has done `after` times and is then killed."""
    code = HASTY[3].replace("EVERY = 0.05", "EVERY = 0").replace("sys.argv[0]", "shards.OutputFolder.save = dying(shards.OutputFolder.save); sys.argv[0]")
    code = f"""import os
left = [{after}]
def dying(save):
    def dead(self, state):
        save(self, state)
        left[0] -= 1
        if left[0] == 0: os._exit(99)
    return dead
""" + code
    r = run([*HASTY[:3], code, *options, "--out", out], code=99, env=OFFLINE)
    check(os.path.exists(out + "/.partial/progress.json"), "nothing was saved")
    return r


@test
def a_dataset_goes_on_at_the_row_where_it_was():
    documents = some_documents(1500)
    documents[700] = "<|endoftext|>".join(some_documents(30, seed=3))  # a row of several documents
    options = ["--dataset", dataset(folder("set"), documents, some_documents(200, seed=2)), "--val-split", "validation"]
    run(HASTY + options + ["--out", folder("whole")], env=OFFLINE)
    for after in (1, 55, 30, 25, 20):  # about 130 batches, and half of the last ones are of the other split
        r = interrupted(folder("o"), options, after)
        check(after == 1 or "going on" in r.err, "began anew")
    run(HASTY + options + ["--out", folder("o")], env=OFFLINE)
    check_same_shards(folder("whole"), folder("o"), "gone on")
    check(read(folder("whole/manifest.json")) == read(folder("o/manifest.json")), "the manifest")


@test
def an_unfinished_run_goes_on_only_with_the_same_options_and_files():
    path = as_text(folder("a.txt"), some_documents(600))
    run(TEXT + ["--out", folder("fresh"), "--seed", "5", path])
    run(TEXT + ["--out", folder("other"), "--seed", "6", path])
    interrupted(folder("o"), ["--seed", "5", path])
    r = run(TEXT + ["--out", folder("o"), "--seed", "6", path])  # other options: from the beginning
    check("going on" not in r.err, "went on with another seed")
    check_same_shards(folder("o"), folder("other"), "another seed")
    interrupted(folder("p"), ["--seed", "5", path])
    r = run(TEXT + ["--out", folder("p"), "--seed", "5", "--workers", "2", path])  # how many work on it does not matter
    check("going on" in r.err, "began anew")
    check_same_shards(folder("p"), folder("fresh"), "gone on")
    interrupted(folder("q"), ["--seed", "5", path])
    write(path, read(path) + b"<|endoftext|>more")
    r = run(TEXT + ["--out", folder("q"), "--seed", "5", path])
    check("going on" not in r.err, "went on with a file that has changed")
    run(TEXT + ["--out", folder("changed"), "--seed", "5", path])
    check_same_shards(folder("q"), folder("changed"), "a changed file")


@test
def what_was_written_after_the_last_save_is_forgotten():
    path = as_text(folder("a.txt"), some_documents(600))
    options = ["--shard-tokens", "3000", path]
    run(TEXT + ["--out", folder("fresh"), *options])
    interrupted(folder("o"), options)
    progress = json.loads(read(folder("o/.partial/progress.json")))
    train = progress["splits"]["train"]
    open_shard = folder(f"o/.partial/train_{len(train['shards']):06d}.bin")
    check(train["open"] > 0 and os.path.exists(open_shard), f"{train}")
    data = read(open_shard) + b"\1\0\0\0" * (3000 - train["open"])  # it was completed, and a later one begun
    write(open_shard, struct.pack("<5i", shards.MAGIC, shards.VERSION, 3000, 257, 257) + data[20:])
    write(folder(f"o/.partial/train_{len(train['shards']) + 1:06d}.bin"), bytes(5000))
    write(folder("o/.partial/train_000099.bin"), bytes(5000))
    interrupted(folder("o"), options, 1)
    check(whole_or_no_shard(open_shard), "half a shard looks whole")
    run(TEXT + ["--out", folder("o"), *options])
    check_same_shards(folder("o"), folder("fresh"), "gone on")


@test
def what_a_save_counts_on_is_on_the_disk():  # else a power cut could leave a whole shard's name on half of it
    synced, fsync = set(), os.fsync

    def noting(fd):
        synced.add(os.fstat(fd).st_ino)
        fsync(fd)

    with shards.OutputFolder(folder("o"), key="x") as out:
        writer = out.split("train", shards.ByteTokenizer(), 10)
        os.fsync = noting
        try:
            writer.append(bytes(4 * 25), 1, 24)
            out.save(0)
        finally:
            os.fsync = fsync
        written = glob.glob(folder("o/.partial/train_*.bin"))
        missing = [p for p in written if os.stat(p).st_ino not in synced]
    check(len(written) == 3 and not missing, f"{len(written)} shards, not on the disk: {missing}")


@test
def an_error_or_ctrl_c_keeps_what_was_saved():
    good = "".join(json.dumps({"text": d}) + "\n" for d in some_documents(500))
    write(folder("a.jsonl"), good + "{broken\n")
    hasty = [*HASTY[:3], HASTY[3].replace("EVERY = 0.05", "EVERY = 0")]
    expect_error(hasty + ["--out", folder("o"), folder("a.jsonl")], "line 501")
    check(os.path.exists(folder("o/.partial/progress.json")), "nothing is left to go on from")
    os.mkfifo(folder("pipe"))
    p = start(hasty + ["--out", folder("p"), as_text(folder("b.txt"), some_documents(500)), folder("pipe")])
    while not os.path.exists(folder("p/.partial/progress.json")):
        time.sleep(0.02)
    time.sleep(0.3)
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=20)
    check(p.returncode == 130 and "the same command goes on" in err and len(err.splitlines()) == 1, f"{p.returncode}: {err}")


@test
def a_run_killed_while_it_moves_its_files_out_is_completed():
    path = as_text(folder("a.txt"), some_documents(200))
    command = ["--shard-tokens", "3000", path, "--overwrite", "--out"]
    run(TEXT + command + [folder("fresh")])
    names = sorted(os.listdir(folder("fresh")))
    for moves in range(len(names)):
        out = folder(f"o{moves}")
        run(TEXT + ["--shard-tokens", "2000", as_text(folder("old.txt"), some_documents(300, seed=9)), "--out", out])
        code = HASTY[3].replace("sys.argv[0]", "shards.os.replace = dying(shards.os.replace); sys.argv[0]")
        code = f"""import os
left = [{moves}]
def dying(replace):
    def dead(a, b):
        if '.partial' in b: return replace(a, b)
        left[0] -= 1
        if left[0] < 0: os._exit(99)
        return replace(a, b)
    return dead
""" + code.replace("text.SAVE_EVERY = 0.05; ", "")
        run([*HASTY[:3], code, *command, out], code=99)
        check(not os.path.exists(out + "/manifest.json"), "a manifest before all is there")
        expect_error(TEXT + ["--out", out, path], "already holds", "an interrupted run was finished")  # and completes it
        check(sorted(os.listdir(out)) == names, f"{moves} moves: {sorted(os.listdir(out))}")
        check(all(read(f"{out}/{n}") == read(folder(f"fresh/{n}")) for n in names), f"{moves} moves: other bytes")
        shards.check_folder(out)


# ----------------------------------------------------------------------------
# the manifest, limits, progress


@test
def the_manifest_counts_and_hashes_what_was_written():
    documents = some_documents(200)
    run(TEXT + ["--out", folder("o"), "--shard-tokens", "5000", as_text(folder("a.txt"), documents)])
    manifest = json.loads(read(folder("o/manifest.json")))
    train, val = manifest["splits"]["train"], manifest["splits"]["val"]
    check(train["bytes"] + val["bytes"] == sum(len(d.encode()) for d in documents), "bytes")
    check(train["tokens"] == train["bytes"] + train["documents"], "tokens: a byte each and an EOT a document")
    check(len(train["shards"]) > 3 and sum(s["tokens"] for s in train["shards"]) == train["tokens"], "shards")
    check_near(manifest["tokens_per_byte"], (train["tokens"] + val["tokens"]) / (train["bytes"] + val["bytes"]), 1e-12, "ratio")
    check("as written" in run([sys.executable, "-B", "prepro/shards.py", folder("o")]).out, "check of the folder")
    for name in [s["file"] for s in train["shards"]][:2] + ["tokenizer.json"]:
        whole = read(folder("o/" + name))
        write(folder("o/" + name), whole[:-1] + bytes([whole[-1] ^ 1]))
        expect_error([sys.executable, "-B", "prepro/shards.py", folder("o")], name)
        write(folder("o/" + name), whole[:-4])
        expect_error([sys.executable, "-B", "prepro/shards.py", folder("o")], name)
        write(folder("o/" + name), whole)
    write(folder("o/manifest.json"), "{}")
    expect_error([sys.executable, "-B", "prepro/shards.py", folder("o")], "not a manifest")


@test
def max_tokens_stops_between_two_documents_for_any_number_of_workers():
    path = as_text(folder("a.txt"), some_documents(3000))
    for workers in (1, 3):
        run(HASTY + ["--out", folder(f"o{workers}"), "--max-tokens", "50K", "--workers", workers, path])
    check_same_shards(folder("o1"), folder("o3"), "3 workers")
    manifest = json.loads(read(folder("o1/manifest.json")))
    tokens = manifest["splits"]["train"]["tokens"]
    check(50000 <= tokens < 55000, f"{tokens} tokens")
    counted = sum(s["documents"] for s in manifest["splits"].values())
    check(manifest["files"][0]["documents"] == counted < 3000, "documents counted that were not written")
    whole = {d.encode() for d in some_documents(3000)}
    check(all(d in whole for d in shards.read_split(folder("o1"), "train")), "half a document")


@test
def a_document_drawn_for_validation_is_the_same_one_in_any_source():
    for fraction, count in ((0.05, 2000), (0.5, 200), (0.4, 1000), (0.9, 200), (1 / 3, 300)):
        draw = text.ValidationDraw(7, fraction)
        chosen = [i for i in range(count) if draw(i)]
        check(abs(len(chosen) - fraction * count) <= 0.05 * fraction * count + 1, f"{len(chosen)} of {count} at {fraction}")
        check(chosen == [i for i in range(count) if text.ValidationDraw(7, fraction)(i)], "another draw")
    check(not any(text.ValidationDraw(7, 0)(i) for i in range(100)), "drawn at 0")
    gaps = {b - a for a, b in zip(chosen, chosen[1:])}
    check(len(gaps) > 2, "every n-th document")


@test
def the_bar_says_rate_and_time_left_and_goes_away():
    path = as_text(folder("a.txt"), some_documents(4000))
    code = HASTY[3].replace("sys.argv[0]", "text.REDRAW = (0, 0); sources.CHUNK = 2000; sys.argv[0]")
    master, slave = pty.openpty()
    import subprocess

    p = subprocess.Popen([*HASTY[:3], code, "--out", folder("o"), path], stderr=slave, stdout=subprocess.PIPE, cwd=ROOT)
    os.close(slave)
    said = b""
    try:
        while chunk := os.read(master, 65536):
            said += chunk
    except OSError:
        pass  # the other side is closed
    check(p.wait() == 0, "failed")
    said = said.decode()
    lines = said.split("\r")
    check(any(re.search(r"\[#{8,12} *\] +(4|5)\d% \| [\d.]+ MB \| [\d.]+ MB/s \| [\d.]+M tokens \| eta \d+s", l) for l in lines), f"{lines[-5:]}")
    check(said.endswith("\r\x1b[K"), "the bar stays")
    fractions = [int(m) for m in re.findall(r"(\d+)%", said)]
    check(fractions == sorted(fractions) and fractions[-1] >= 97, f"{fractions[-5:]}")
    r = run([*HASTY[:3], code, "--out", folder("p"), path])
    check(all("MB/s" in l for l in r.err.splitlines()) and "\r" not in r.err, "in a file: plain lines")


main()
