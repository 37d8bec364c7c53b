#!/usr/bin/env python3
"""HellaSwag, or any questions in its format, as tokens: what --eval-choices of the trainers reads.

    python3 prepro/hellaswag.py --out data/hellaswag.jsonl --tokenizer data/mine                       from the hub
    python3 prepro/hellaswag.py --out data/hellaswag.jsonl --tokenizer data/mine hellaswag_val.jsonl   from a file
    ./train_moe_cpu --init out/mine/step_00001000 --eval-choices data/hellaswag.jsonl

A question is a JSON object a line: ctx_a and ctx_b (or ctx alone), endings, label, and perhaps activity_label. The texts
are put together as lm-evaluation-harness does, whose numbers people compare: activity_label: ctx_a Ctx_b, [markup] taken
out, and a space before the ending. Context and endings are encoded apart, which is the same for every tokenizer that
cuts text at white space. The tokenizer must be the model's: give the folder of its shards, or of the model.
"""

import json
import os
import re

import sources
import vocab
from shards import Error, parser_of, run_main

DATASET, SPLIT = "Rowan/hellaswag", "validation"


def clean(text):
    """As lm-evaluation-harness does."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def read_question(row, where):
    """(context, endings, label) of a question in HellaSwag's format"""

    def text(name):
        value = row.get(name, "")
        if not isinstance(value, str):
            raise Error(f'{where}: "{name}" is no text')
        return value

    endings, label = row.get("endings"), row.get("label")
    if not isinstance(endings, list) or len(endings) < 2 or not all(isinstance(e, str) for e in endings):
        raise Error(f'{where}: "endings" is no list of at least two texts')
    if not re.fullmatch(r"\d+", str(label)) or int(label) >= len(endings):
        raise Error(f'{where}: "label" is {label!r}, not the number of an ending from 0 (test sets have none)')
    if "ctx" not in row and "ctx_a" not in row:
        raise Error(f'{where}: there is neither "ctx" nor "ctx_a"')
    context = f"{text('ctx_a')} {text('ctx_b').capitalize()}" if "ctx_a" in row else text("ctx")
    if text("activity_label"):
        context = f"{text('activity_label')}: {context}"
    context, endings = clean(context), [clean(e) for e in endings]
    if not all(endings):
        raise Error(f"{where}: an ending is empty")
    try:
        "".join([context, *endings]).encode()
    except UnicodeEncodeError:
        raise Error(f"{where}: there is half a character in it (a lone surrogate)")
    return context, endings, int(label)


def rows_of_file(path):
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            where = f"{path}: line {number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as e:
                raise Error(f"{where} is not JSON: {e}")
            if not isinstance(row, dict):
                raise Error(f"{where} is not a JSON object but {type(row).__name__}")
            yield where, row


def rows_of_dataset(name):
    stream = sources.load_stream(name, None, SPLIT, None)
    try:
        for number, row in enumerate(stream, 1):
            yield f"{name}: row {number}", row
    except Exception as e:
        raise Error(sources.said(name, e))


def encode(tokenizer, context, endings, label):
    first, *choices = tokenizer.encode([context.encode()] + [f" {e}".encode() for e in endings])
    return {
        "context": list(memoryview(first).cast("I")),
        "choices": [list(memoryview(c).cast("I")) for c in choices],
        "bytes": [len(f" {e}".encode()) for e in endings],
        "label": label,
    }


def main():
    parser = parser_of(__doc__)
    parser.add_argument("file", nargs="?", metavar="FILE", help=f"questions (default: {DATASET}, {SPLIT}, from the hub)")
    parser.add_argument("--out", required=True, metavar="FILE", help="the file to write")
    parser.add_argument("--tokenizer", required=True, metavar="WHAT", help="as in text.py; bytes, a folder, a name")
    parser.add_argument("--eot", metavar="TOKEN", help="the token that opens documents, as in text.py")
    parser.add_argument("--dataset", default=DATASET, metavar="NAME", help="another dataset in that format, or a folder")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N questions")
    args = parser.parse_args()
    if args.limit is not None and args.limit < 1:
        raise Error(f"--limit {args.limit} is not at least 1")
    if os.path.isdir(args.out):
        raise Error(f"--out {args.out} is a folder: name a file in it")
    tokenizer = vocab.open_tokenizer(args.tokenizer, args.eot)
    lines = []
    for where, row in rows_of_file(args.file) if args.file else rows_of_dataset(args.dataset):
        lines.append(json.dumps(encode(tokenizer, *read_question(row, where)), separators=(",", ":")))
        if len(lines) == args.limit:
            break
    if not lines:
        raise Error(f"no question in {args.file or args.dataset}")
    header = {
        "format": "choices",
        "source": os.path.basename(args.file) if args.file else args.dataset,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eot_id": tokenizer.eot_id,
        "questions": len(lines),
    }
    os.makedirs(os.path.dirname(os.path.abspath(args.out)), exist_ok=True)
    with open(args.out + ".tmp", "w", newline="\n") as f:
        f.write("\n".join([json.dumps(header), *lines]) + "\n")
    os.replace(args.out + ".tmp", args.out)
    print(f"{args.out}: {len(lines)} questions, {tokenizer.name}")
    return 0


if __name__ == "__main__":
    run_main(main)
