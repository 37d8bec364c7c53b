"""Where documents come from: text, JSON lines and Parquet files, and Hugging Face datasets.

A source has a name, a size (bytes, or rows of a dataset; None: not known), done() of it, and documents(state): pieces of
documents as (state, piece), never a whole file. state is None except at a document's first piece, where documents(state)
would begin with that document: anything JSON can hold. No document is empty, none begins or ends with a newline.
"""

import codecs
import gzip
import itertools
import json
import os
import re
import zlib

from shards import EOT, Error, package

CHUNK = 1 << 18


# ----------------------------------------------------------------------------
# text -> pieces of documents


def separator_pattern(separator):
    """What ends a document, and how many bytes of a chunk's end may be the beginning of it."""
    pattern, reach = re.escape(EOT.encode()), len(EOT)
    if separator is not None:
        line = separator.encode()
        pattern += rb"|\n" + re.escape(line) + rb"(?=\r?\n)"  # leaves the newline, which may begin the next separator
        reach = max(reach, len(line) + 3)
    return re.compile(pattern), reach


def cut(chunks, separator):
    """Cuts a text's chunks at the separators: yields pieces of text, and None after each document."""
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


def trim(pieces):
    """(True, piece) for a document's first piece, (False, piece) for the others; not empty, no newlines around it."""
    first, newlines = True, b""  # newlines: seen last, part of the document only if text follows
    for piece in pieces:
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


def records_to_documents(records):
    """A record's text (bytes) is a document, or several where <|endoftext|> stands in it."""
    for record in records:
        yield from trim(cut([record], None) if EOT.encode() in record else [record, None])


# ----------------------------------------------------------------------------
# files


class FileSource:
    """A file of some kind. state: how many of its documents were before."""

    def __init__(self, path, options):
        self.name, self.options = path, options
        self.size, self.at = os.path.getsize(path), 0

    def key(self):
        """What tells the file from a changed one."""
        return [self.name, self.size, os.stat(self.name).st_mtime_ns]

    def done(self):
        return self.at

    def documents(self, state=0):
        count = -1
        for first, piece in self.pieces():
            count += first
            if count >= state:
                yield (count if first else None), piece

    def _read(self, size=None):
        """The file's bytes, unpacked: pieces of `size`, or lines; self.at follows. A pipe will do, too."""
        packed = self.name.endswith(".gz")
        with open(self.name, "rb") as raw:
            file = gzip.GzipFile(fileobj=raw) if packed else raw
            while True:
                try:
                    data = file.read(size) if size else file.readline()
                except (EOFError, gzip.BadGzipFile, zlib.error) as e:
                    raise Error(f"{self.name}: not a whole gzip file: {e}")
                self.at = raw.tell() if packed else self.at + len(data)
                if not data:
                    return
                yield data


class TextFile(FileSource):
    """Documents end at <|endoftext|>, and at lines that are exactly options.document_separator."""

    def pieces(self):
        return trim(cut(self.chunks(), self.options.document_separator))

    def chunks(self):
        """The file's text in UTF-8, chunk by chunk; Error with the byte's place where it is not in the encoding."""
        encoding, path = self.options.encoding, self.name
        decoder = codecs.getincrementaldecoder(encoding)(self.options.errors)
        begin, fresh = 0, True  # of the chunk in the file; nothing has been decoded yet
        for chunk in itertools.chain(self._read(CHUNK), [b""]):
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
                yield (text.removeprefix("\ufeff") if fresh else text).encode("utf-8", "replace")
                fresh = False
            begin += len(chunk)


def text_of(value, where, field, errors):
    """A text field's value in UTF-8; what holds no text is no document."""
    if value is None:
        return b""
    if not isinstance(value, str):
        raise Error(f'{where}: "{field}" is no text but {type(value).__name__}')
    try:
        return value.encode("utf-8", "strict" if errors == "strict" else "surrogatepass")
    except UnicodeEncodeError:
        raise Error(f'{where}: "{field}" has half a character (a lone surrogate); --errors replace puts U+FFFD there')


def clean(text, errors):
    return text if errors == "strict" else text.decode("utf-8", "replace").encode()


class JsonLines(FileSource):
    """One JSON object a line; its text is the field options.field."""

    def pieces(self):
        return records_to_documents(self.records())

    def records(self):
        field, errors = self.options.field, self.options.errors
        for number, line in enumerate(self._read(), 1):
            where = f"{self.name}: line {number}"
            if line.strip():
                yield clean(text_of(self.value(line, where, field), where, field, errors), errors)

    def value(self, line, where, field):
        try:
            row = json.loads(line.decode("utf-8-sig", self.options.errors))
        except UnicodeDecodeError as e:
            raise Error(f"{where} is not UTF-8 (byte {e.start} of it); --errors replace puts U+FFFD there")
        except (ValueError, RecursionError) as e:
            raise Error(f"{where} is not JSON: {e}")
        if not isinstance(row, dict):
            raise Error(f"{where} is not a JSON object but {type(row).__name__}")
        if field not in row:
            raise Error(f'{where} has no field "{field}" but {names(row)}: name one with --field')
        return row[field]


class ParquetFile(FileSource):
    """Rows; the text is the column options.field."""

    def pieces(self):
        return records_to_documents(self.records())

    def records(self):
        parquet = package("pyarrow.parquet", self.name)
        field, errors, rows = self.options.field, self.options.errors, 0
        try:
            with parquet.ParquetFile(self.name) as file:
                columns = file.schema_arrow
                if field not in columns.names:
                    raise Error(f'{self.name} has no column "{field}" but {names(columns.names)}: name one with --field')
                for batch in file.iter_batches(batch_size=256, columns=[field]):
                    for value in batch.column(0).to_pylist():
                        rows += 1
                        self.at = self.size * rows // file.metadata.num_rows
                        yield clean(text_of(value, f"{self.name}: row {rows}", field, errors), errors)
        except Error:
            raise
        except Exception as e:  # pyarrow has several kinds
            if getattr(e, "filename", None):
                raise
            raise Error(f"{self.name}: not a whole Parquet file: {e}")


def names(columns):
    shown = ", ".join(list(columns)[:10])
    return shown + (", ..." if len(columns) > 10 else "") or "none at all"


KINDS = {"text": TextFile, "jsonl": JsonLines, "parquet": ParquetFile}


def open_file(path, options):
    """The source for a file, by --format or else by its name."""
    kind = options.format
    if kind is None:
        end = os.path.splitext(path[:-3] if path.endswith(".gz") else path)[1].lower()
        if end in (".json", ".csv", ".tsv"):
            raise Error(f"{path}: {end} is not read as rows: make JSON lines (.jsonl) or Parquet of it, or say --format text")
        kind = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}.get(end, "text")
    return KINDS[kind](path, options)


# ----------------------------------------------------------------------------
# datasets


def said(where, e):
    """One line of what a library says: there are a network, a hub and a dozen file formats behind it."""
    return f"{where}: {type(e).__name__}: {' '.join(str(e).split())[:300]}"


def place_of(name, revision):
    """Where the hub must not be asked (HF_HUB_OFFLINE=1) the dataset's folder in the hub's cache; else its name."""
    hub = package("huggingface_hub", f"--dataset {name}")
    if os.path.exists(name) or not hub.constants.HF_HUB_OFFLINE:
        return name
    return hub.snapshot_download(name, repo_type="dataset", revision=revision)


def load_stream(name, config, split, revision):
    datasets = package("datasets", f"--dataset {name}")
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    try:
        return datasets.load_dataset(place_of(name, revision), config, split=split, streaming=True, revision=revision)
    except Exception as e:
        raise Error(said(f"--dataset {name}", e))


ROWS_A_STATE = 100  # asking the stream for its state at every row takes longer than reading it


class Dataset:
    """A split of a Hugging Face dataset (a name on the hub, or a folder), streamed: rows come as they are needed.

    state: [the stream's own state at some row, how many documents have come since].
    """

    def __init__(self, split, options):
        self.name, self.options, self.rows, self.split = f"{options.dataset}:{split}", options, 0, split
        self.stream = load_stream(options.dataset, options.dataset_config, split, options.revision)
        info = (self.stream.info.splits or {}).get(split)
        self.size = info.num_examples if info else None
        try:
            columns = self.stream.column_names or list(next(iter(self.stream)))
        except Exception as e:
            raise Error(said(self.name, e))
        if options.field not in columns:
            raise Error(f'{self.name} has no column "{options.field}" but {names(columns)}: name one with --field')
        self.stream = self.stream.select_columns([options.field])

    def key(self):
        o = self.options
        return [o.dataset, o.dataset_config, self.split, o.revision, self.size]

    def done(self):
        return self.rows

    def documents(self, state=None):
        before, skip = state or (None, 0)
        count, resumed = -1, True
        for snapshot, record in self.records(before):
            if snapshot is not None:
                skip = skip if resumed else 0
                before, count, resumed = snapshot, -1, False
            for first, piece in trim(cut([record], None)):
                count += first
                if count >= skip:
                    yield ([before, count] if first else None), piece

    def records(self, state):
        """(the stream's state before this row, or None where it would cost time, the row's text)"""
        field, errors = self.options.field, self.options.errors
        try:
            snapshot = state or {"stream": None, "row": 0}
            if snapshot["stream"] is not None:
                self.stream.load_state_dict(snapshot["stream"])
            self.rows = snapshot["row"]
            for row in self.stream:
                self.rows += 1
                where = f"{self.name}: row {self.rows}"
                yield snapshot, clean(text_of(row[field], where, field, errors), errors)
                snapshot = None
                if self.rows % ROWS_A_STATE == 0:  # not before the first row: the stream's state is not yet that then
                    snapshot = {"stream": self.stream.state_dict(), "row": self.rows}
        except Error:
            raise
        except Exception as e:
            raise Error(said(f"{self.name}: after row {self.rows}", e))
