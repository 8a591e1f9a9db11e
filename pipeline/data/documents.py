"""Documents of the source `folder` that are read as text: texts, tables and office documents."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeline.data.decode import Unreadable
from pipeline.data.decode.process import Limits, decoding_process
from pipeline.data.decode.untrusted import MAX_LINE_BYTES, check_regular, open_file
from pipeline.data.files import escape, local_copy
from pipeline.data.text import Lines, Text, join_title, parse_object
from pipeline.schema import Item, Reject, item_id_problem

#: Kinds of files that `pipeline.data.decode.document` reads.
CONVERTED = ("HTML", "e-mail", "DOCX", "PPTX", "XLSX", "OpenDocument", "EPUB")
#: Limits of time and memory per document.
LIMITS = Limits(max_seconds=120.0)
#: Delimiters of tables. The most frequent in the first line is taken.
DELIMITERS = ",;\t|"
#: First line of tables of spreadsheet programs that names the delimiter.
SEPARATOR = re.compile(r"sep=(.)[\r\n]*", re.IGNORECASE)


class Documents(Text):
    """Texts in files of known kinds.

    Shards are `{"files": [[path, size, kind, reason, detail], ...]}`. A file with a reason is
    rejected.

    A row of a table and a line of a JSON lines file are items `<file>#row=<number>`, with numbers
    from 1. So are the slides, sheets and chapters of a document. All parts of a file have it as
    parent, and are divided into passages.
    """

    def scan(self, shard: dict[str, Any]) -> Iterator[Item | Reject]:
        """Yields the passages of each document. A document that cannot be read is one reject."""
        for file, _, kind, *problem in shard["files"]:
            entries: Iterator[Item | Reject]
            if any(problem):
                error = Unreadable(*problem)
                entries = iter([self.reject(escape(file), "", error, "list")])
            elif kind in CONVERTED:
                entries = self._scan_document(file, kind)
            elif kind == "CSV":
                entries = self._scan_table(file)
            else:
                is_lines = kind == "JSON lines"
                entries = self._scan_lines(file, 0, None) if is_lines else self._scan_file(file)
            for entry in entries:
                yield replace(entry, parent_id=file) if isinstance(entry, Item) else entry

    def _scan_document(self, file: str, kind: str) -> Iterator[Item | Reject]:
        try:
            if problem := item_id_problem(f"{file}#chapter=1000"):
                raise Unreadable("bad id", problem)
            fs, folder = self._folder
            check_regular(fs, f"{folder}/{file}")
            with local_copy(fs, f"{folder}/{file}") as path:
                process = decoding_process("document", LIMITS)
                document = process.call("read_document", path, kind)
        except (Unreadable, OSError) as error:
            yield self._unreadable(file, error)
            return
        metadata = document["metadata"] or None
        sections = [section for section in document["sections"] if section[2]]
        for suffix, title, text in sections or [("", None, "")]:
            text = join_title(title or "", text)
            yield from self._items(f"{file}{suffix}", title, text, metadata, text.encode())

    def _scan_table(self, file: str) -> Iterator[Item | Reject]:
        fs, folder = self._folder
        try:
            with open_file(fs, f"{folder}/{file}") as stream:
                is_utf16 = stream.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
                stream.seek(0)
                encoding = "utf-16" if is_utf16 else "utf-8-sig"
                table = io.TextIOWrapper(stream, encoding, newline="")
                header = table.readline(MAX_LINE_BYTES)
                if mark := SEPARATOR.fullmatch(header):
                    delimiter = mark[1]
                else:
                    delimiter = max(DELIMITERS, key=header.count)  # the first if there is none
                    table.seek(0)
                rows = csv.reader(_lines(table), delimiter=delimiter)
                names = _unique(next(rows, []))
                number = 0
                for number, row in enumerate(filter(any, rows), 1):
                    numbers = map(str, range(len(names) + 1, len(row) + 1))  # of further columns
                    fields = dict(zip([*names, *numbers], row, strict=False))
                    yield from self._row(file, number, fields, "")
                if not number:  # the header is all there is
                    yield from self._row(file, 1, {}, "\t".join(names))
        except UnicodeError as error:
            yield self._list_reject(file, "not UTF-8", str(error))
        except csv.Error as error:
            yield self._list_reject(file, "corrupted CSV file", str(error))
        except (Unreadable, OSError) as error:
            yield self._unreadable(file, error)

    def _scan_line(self, file: str, lines: Lines, line: bytes) -> Iterator[Item | Reject]:
        number = lines.number
        try:
            record = parse_object(line, self.spec.max_document_bytes)
        except Unreadable as error:
            yield self._reject(f"{file}#row={number}", error.reason, error.detail, line)
            return
        text = record.pop("text") if isinstance(record.get("text"), str) else ""
        yield from self._row(file, number, record, text)

    def _row(
        self, file: str, number: int, fields: Mapping[str, Any], text: str
    ) -> Iterator[Item | Reject]:
        """Yields the passages of a row: its `text`, or else its fields, one per line."""
        title = fields.get("title") if isinstance(fields.get("title"), str) else None
        values = {k: v for k, v in fields.items() if isinstance(v, str | int | float) and v != ""}
        listed = "\n".join(f"{name}: {value}" for name, value in values.items())
        text = join_title(title or "", text) if text else listed
        yield from self._items(f"{file}#row={number}", title or None, text, values, text.encode())


def _lines(table: io.TextIOWrapper) -> Iterator[str]:
    """Yields lines of limited length."""
    while line := table.readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES:
            raise Unreadable("too long", f"line must be shorter than {MAX_LINE_BYTES:,} characters")
        yield line


def _unique(names: Sequence[str]) -> list[str]:
    """Appends the number of its column to a name that occurs twice or is empty.

    >>> _unique(["a", "b", "a", ""])
    ['a 1', 'b', 'a 3', '4']
    """
    counts = Counter(names)
    return [
        name if name and counts[name] == 1 else f"{name} {number}".strip()
        for number, name in enumerate(names, 1)
    ]
