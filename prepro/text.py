#!/usr/bin/env python3
"""Any text files -> token shards to train on, with the byte tokenizer. Python's standard library only.

    python3 prepro/text.py --out data/mine book.txt letters.txt
    python3 prepro/text.py --out data/fortunes --document-separator % --skip '*.dat' --skip '*.u8' \\
        /usr/share/games/fortunes/*

A file is one document, or several: the literal <|endoftext|> ends one, and so does a line that is exactly the
--document-separator. Newlines around a document are dropped, empty documents too. The token stream is, for each
document, <|endoftext|> and then its bytes, which is also what the trainers read from text with --tokenize inline. Some
documents, drawn by --seed, are kept for validation. Memory does not grow with the input; nothing appears in --out until
all is whole.
"""

import argparse
import codecs
import fnmatch
import os
import random
import re

from shards import ByteTokenizer, EOT, Error, OutputFolder, add_output_options, check_shard_tokens, run_main

CHUNK = 1 << 20


# ----------------------------------------------------------------------------
# reading: files -> pieces of documents, never a whole one


def decoded_chunks(path, encoding, errors):
    """The file's text in UTF-8, chunk by chunk; Error with the byte's place where it is not in the encoding."""
    decoder = codecs.getincrementaldecoder(encoding)(errors)
    begin = 0  # of the chunk in the file
    with open(path, "rb") as f:
        while True:
            chunk = f.read(CHUNK)
            held = len(decoder.getstate()[0])  # bytes of an unfinished character from before
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as e:
                raise Error(
                    f"{path} is not {encoding} text (byte offset {begin - held + e.start}); name another "
                    "--encoding, such as latin-1, or put U+FFFD in its place with --errors replace"
                )
            if "\0" in text:
                raise Error(f"{path} contains zero bytes; if it is not text, leave it out with --skip")
            if text:
                yield text.encode("utf-8", "surrogatepass")
            if not chunk:
                return
            begin += len(chunk)


def separator_pattern(separator):
    """What ends a document, and how many bytes of a chunk's end may be the beginning of it."""
    pattern, reach = re.escape(EOT.encode()), len(EOT)
    if separator is not None:
        line = separator.encode()
        pattern += rb"|\n" + re.escape(line) + rb"(?=\r?\n)"  # leaves the newline, which may begin the next separator
        reach = max(reach, len(line) + 3)
    return re.compile(pattern), reach


def cut(chunks, separator):
    """Cuts one file's chunks at the separators: yields pieces of text, and None after each document."""
    pattern, reach = separator_pattern(separator)
    buffer = b"\n"  # so that a separator may be the first line, and the last below
    for chunk in chunks:
        buffer += chunk
        at = 0
        for m in pattern.finditer(buffer):
            if len(buffer) - m.start() < reach:
                break  # too near the end to be sure; comes again with the next chunk
            yield buffer[at : m.start()]
            yield None
            at = m.end()
        keep = max(at, len(buffer) - reach + 1)
        yield buffer[at:keep]
        buffer = buffer[keep:]
    at = 0
    buffer += b"\n"
    for m in pattern.finditer(buffer):
        yield buffer[at : m.start()]
        yield None
        at = m.end()
    yield buffer[at:]
    yield None


def documents(path, args):
    """(True, piece) for a document's first piece, (False, piece) for the others; not empty, no newlines around it."""
    first, newlines = True, b""  # newlines: seen last, part of the document only if text follows
    for piece in cut(decoded_chunks(path, args.encoding, args.errors), args.document_separator):
        if piece is None:
            first, newlines = True, b""
            continue
        if first:
            piece = piece.lstrip(b"\r\n")
        body = piece.rstrip(b"\r\n")
        if body:
            yield first, newlines + body
            first, newlines = False, piece[len(body) :]
        elif not first:
            newlines += piece


# ----------------------------------------------------------------------------
# the split: a seeded draw of exactly so many documents, in one pass and without a list (Knuth's selection sampling)


class ValidationDraw:
    def __init__(self, seed, num_documents, num_val):
        self.rng, self.left, self.wanted = random.Random(f"{seed} split"), num_documents, num_val

    def __call__(self):
        """Is the next document one for validation?"""
        chosen = self.rng.random() * self.left < self.wanted
        self.left -= 1
        self.wanted -= chosen
        return chosen


def number_of_val_documents(count, fraction):
    """At least one, unless the fraction is 0; an Error if none would be left to train on."""
    if fraction == 0:
        return 0
    wanted = max(1, round(fraction * count))
    if wanted >= count:
        raise Error(
            f"{count} document{'s' if count > 1 else ''} cannot be split into training and validation with "
            f"--val-fraction {fraction:g}; cut the text with --document-separator, or pass --val-fraction 0 and "
            "validate on other text"
        )
    return wanted


# ----------------------------------------------------------------------------


def choose_files(args):
    """The files to read, in the order given: without those to skip, each once even if it is linked twice."""
    chosen, seen = [], set()
    for path in args.files:
        if any(fnmatch.fnmatch(os.path.basename(path), pattern) for pattern in args.skip):
            continue
        if os.path.isdir(path):
            raise Error(f"{path} is a folder; name the files in it, as in {os.path.join(path, '*')}")
        if os.path.realpath(path) not in seen:
            seen.add(os.path.realpath(path))
            chosen.append(path)
    if not chosen:
        raise Error("--skip leaves no file to read")
    return chosen


def check_options(args):
    if not 0 <= args.val_fraction < 1:
        raise Error(f"--val-fraction {args.val_fraction:g} is not between 0 and 1")
    check_shard_tokens(args.shard_tokens)
    if args.document_separator is not None and re.search(r"[\r\n]", args.document_separator):
        raise Error("--document-separator is one line; it cannot contain a line break")
    try:
        known = codecs.getincrementaldecoder(args.encoding)().decode(b"") == ""  # and not bytes to bytes, as "hex" is
    except LookupError:
        known = False
    if not known:
        raise Error(f"--encoding {args.encoding} is not one that Python knows")


def write_documents(out, files, sources, tokenizer, draw, args):
    """The second pass: every document to its split. The first counted `sources`; a file changed since is an error."""
    train = out.split("train", tokenizer, args.shard_tokens)
    val = out.split("val", tokenizer, args.shard_tokens)
    for path, source in zip(files, sources):
        writer, count = None, 0
        for first, piece in documents(path, args):
            if first:
                writer = val if draw() else train
                writer.begin_document()
                count += 1
            writer.text(piece)
        if count != source["documents"]:
            raise Error(f"{path} changed while it was being read")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.error = lambda message: (_ for _ in ()).throw(Error(message + "; see --help"))
    parser.add_argument("files", nargs="+", metavar="FILE", help="text files")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for shards, tokenizer files, manifest.json")
    add_output_options(parser)
    parser.add_argument("--tokenizer", choices=["bytes"], default="bytes", help="bytes: 256 bytes and <|endoftext|>")
    parser.add_argument(
        "--document-separator",
        metavar="LINE",
        help="a line that is exactly this ends a document ('' is "
        "an empty line); default: only the file's end and <|endoftext|> do",
    )
    parser.add_argument(
        "--val-fraction",
        type=float,
        default=0.05,
        metavar="X",
        help="share of the documents to validate " "on (default 0.05, at least one document; 0: none)",
    )
    parser.add_argument("--seed", type=int, default=1, help="draws the validation documents (default 1)")
    parser.add_argument(
        "--skip", action="append", default=[], metavar="GLOB", help="leave out files of such names; may " "be repeated"
    )
    parser.add_argument("--encoding", default="utf-8", help="of the input (default utf-8)")
    parser.add_argument(
        "--errors",
        choices=["strict", "replace"],
        default="strict",
        help="bytes that are not in the " "encoding: stop (default), or replace them with U+FFFD",
    )
    args = parser.parse_args()
    check_options(args)
    files, tokenizer = choose_files(args), ByteTokenizer()
    with OutputFolder(args.out, args.overwrite) as out:
        sources = [{"file": path, "documents": sum(first for first, _ in documents(path, args))} for path in files]
        count = sum(s["documents"] for s in sources)
        if count == 0:
            raise Error(f"no text in {files[0]}" + (f" and the {len(files) - 1} other files" if len(files) > 1 else ""))
        draw = ValidationDraw(args.seed, count, number_of_val_documents(count, args.val_fraction))
        write_documents(out, files, sources, tokenizer, draw, args)
        manifest = {"source": "text", "seed": args.seed, "val_fraction": args.val_fraction, "files": sources}
        out.finish(tokenizer, manifest)
    train, val = out.splits
    print(
        f"{args.out}: {train.documents} documents to train on ({train.tokens} tokens in {len(train.shards)} shards), "
        f"{val.documents} to validate ({val.tokens} tokens)"
    )
    return 0


if __name__ == "__main__":
    run_main(main)
