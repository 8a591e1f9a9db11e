"""Source of text documents in text files, JSON lines files and BEIR corpora."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, Literal

from fsspec import AbstractFileSystem
from pydantic import Field, model_validator

from pipeline import config
from pipeline.config import SpecError
from pipeline.data.base import Source
from pipeline.data.decode import Unreadable
from pipeline.data.decode.untrusted import MAX_LINE_BYTES, open_file
from pipeline.data.files import (
    SPECIAL_FILE_SIZE,
    check_suffix,
    escape,
    existing_root,
    first_file,
    open_root,
    resolve_folder,
    walk,
)
from pipeline.data.texts import UNSPACED, decode
from pipeline.schema import Item, Reject, item_id_problem

TEXT_SUFFIXES = (".txt", ".md")
LINES_SUFFIXES = (".jsonl", ".jsonl.gz")
FILES_PER_SHARD = 10_000
BYTES_PER_SHARD = 16 << 20
#: Number of bytes that are read at a time.
BLOCK_BYTES = 1 << 20

#: A longer line ends the reading of its file: a few megabytes of gzip may contain terabytes.
MAX_SKIPPED_BYTES = 1 << 30
#: The parser accepts deeper values, but serialising them overflows the stack.
MAX_JSON_DEPTH = 100

#: A word is one Chinese or Japanese character, 5 characters of a script without spaces such as Thai
#: (words have 4 to 5 on average) with the marks after them, 8 of Tibetan, or a sequence of other
#: non-space characters. At most 100 of them are one word: URLs and encoded data have no spaces.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_MARKS = (
    "\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u0eb1\u0eb4-\u0ebc\u0ec8-\u0ece\u102b-\u103e\u17b4-\u17d3"
)
_TIBETAN = "\u0f00-\u0fff"
_WORD = re.compile(
    rf"[{_CJK}]|[{UNSPACED}]{{1,5}}[{_MARKS}]*|[{_TIBETAN}]{{1,8}}|[^\s{_CJK}{UNSPACED}{_TIBETAN}]{{1,100}}"
)

#: Errors of reading a file. Truncated and corrupted gzip files raise the last two.
UNREADABLE = (OSError, EOFError, zlib.error)


class Passages(config.Spec):
    """Options for dividing long documents into overlapping windows of words."""

    max_words: int = Field(400, gt=0)
    """Maximum number of words per window. A Chinese or Japanese character, 5 characters of a script
    without spaces between words, such as Thai, and 100 characters of any other text without spaces
    count as one word."""
    overlap_words: int = Field(50, ge=0)
    """Number of words shared by adjacent windows."""

    @model_validator(mode="after")
    def _check_overlap(self) -> Passages:
        rule = f"an integer below max_words ({self.max_words})"
        self.require(self.overlap_words < self.max_words, "overlap_words", rule)
        return self


class Text(Source["Text.Spec"]):
    """Text documents, whole or divided into passages.

    `path` is a folder that contains .txt, .md, .jsonl and .jsonl.gz files at any depth, or a single
    such file, or a BEIR folder. Of a BEIR folder, only corpus.jsonl (or corpus.jsonl.gz) is read.

    **Documents.** A .txt or .md file is a document. Its id is its path relative to `path`, and its
    text is the content of the file without a byte order mark: UTF-8, or UTF-16 or UTF-32 with such
    a mark. Files in other encodings are rejected (`not UTF-8`). Each non-blank line of a .jsonl
    file is a document: an object with an id (a string or an integer), a text and an optional title.
    All other fields become metadata of the item.

    **Title.** The encoded text includes the title: a text that begins with its title is unchanged;
    to all others the title and a newline are prepended. Character offsets refer to this text. The
    title is also stored in its own column.

    **Passages.** Without `passages` each document is one item. With `passages`, a document of more
    than `max_words` words is divided into windows of `max_words` words (the last may be shorter).
    Each window begins `overlap_words` words before the end of the previous one, so every word is in
    at least one window. The text of a window is `document[start:end]`, with offsets in code points,
    its id is `<document id>#<start>-<end>`, and its parent is the document.

    **Revision.** A hash of the stored title, text and metadata. Changing an option re-encodes only
    the documents whose stored content changes.
    """

    class Spec(config.ComponentSpec):
        """Options of the text source."""

        name: Literal["text"] = "text"
        path: config.Uri
        """Local path or fsspec URI."""
        collection: str = ""
        """Name of the collection. Defaults to the last part of the path."""
        id_field: str | None = None
        """JSON field with the id. Defaults to `_id` if present, else `id`."""
        text_field: str = "text"
        """JSON field with the text."""
        title_field: str = "title"
        """JSON field with the title, which may be missing or null."""
        passages: Passages | None = None
        """Division of long documents into passages. By default, documents are not divided."""
        max_document_bytes: int = Field(MAX_LINE_BYTES, ge=1024, le=1 << 30)
        """Maximum size of a document (a file or a line), in bytes."""

    provides = ("item_id", "text")

    def check(self) -> None:
        """Raises `SpecError` if there are no documents."""
        path = self.spec.path
        fs, root = existing_root(path)
        kinds = ", ".join(TEXT_SUFFIXES + LINES_SUFFIXES)
        check_suffix(fs, root, path, TEXT_SUFFIXES + LINES_SUFFIXES)
        if fs.isdir(root) and not self._corpus and fs.exists(f"{root}/queries.jsonl"):
            raise SpecError(
                "path", path, "a BEIR folder with its corpus", "contains no corpus.jsonl"
            )
        _, num_bytes = first_file(self._files(), path, f"a folder with {kinds} files")
        if num_bytes == 0 and (self._corpus or not fs.isdir(root)):
            raise SpecError("path", path, "a corpus of at least one document", "is an empty file")

    def shards(self) -> Iterator[dict[str, Any]]:
        """Yields groups of files `{"files": [...]}`, and byte ranges of JSON lines files.

        The latter are `{"lines": file, "start": offset, "end": offset or None}`.
        """
        group: list[str] = []
        for file, num_bytes in self._files():
            if not _is_lines(file):
                group.append(file)
                if len(group) == FILES_PER_SHARD:
                    yield {"files": group}
                    group = []
            elif file.lower().endswith(".gz") or num_bytes == SPECIAL_FILE_SIZE:  # not seekable
                yield {"lines": file, "start": 0, "end": None}
            else:
                num_bytes = num_bytes or 0
                for start in range(0, num_bytes, BYTES_PER_SHARD):
                    end = min(start + BYTES_PER_SHARD, num_bytes)
                    yield {"lines": file, "start": start, "end": end}
        if group:
            yield {"files": group}

    def scan(self, shard: dict[str, Any]) -> Iterator[Item | Reject]:
        """Yields the documents of a shard in order. A line belongs to the range in which it begins.

        The reject of a line without a valid id is named `<file>:<line number>`, with numbers from
        1. The reject of a file that cannot be read to its end is named `<file>#byte=<offset>`.
        """
        if "files" in shard:
            for file in shard["files"]:
                yield from self._scan_file(file)
        else:
            yield from self._scan_lines(shard["lines"], shard["start"], shard["end"])

    @functools.cached_property
    def _corpus(self) -> str | None:
        """Name of the corpus file in a BEIR folder, or None for other paths."""
        fs, root = open_root(self.spec.path)
        names = ("corpus.jsonl", "corpus.jsonl.gz")
        return next((name for name in names if fs.isfile(f"{root}/{name}")), None)

    @functools.cached_property
    def _folder(self) -> tuple[Any, str]:
        return resolve_folder(self.spec.path)

    def _files(self) -> Iterator[tuple[str, int | None]]:
        """Yields (path relative to the folder, size in bytes) of all files."""
        fs, root = open_root(self.spec.path)
        if self._corpus:
            yield self._corpus, fs.size(f"{root}/{self._corpus}")
        elif fs.isdir(root):
            for file, num_bytes in walk(fs, root):
                if num_bytes is None or _is_text(file) or _is_lines(file):
                    yield file, num_bytes
        else:
            yield root.rpartition("/")[2], fs.size(root)

    def _scan_file(self, file: str) -> Iterator[Item | Reject]:
        fs, folder = self._folder
        max_bytes = self.spec.max_document_bytes
        try:
            with open_file(fs, f"{folder}/{file}") as stream:
                content = stream.read(max_bytes + 1)
        except (Unreadable, OSError) as error:
            yield self._unreadable(file, error)
            return
        if len(content) > max_bytes:
            detail = f"file must be at most {max_bytes:,} bytes, got more"
            yield self._reject(file, "too long", detail, content)
            return
        problem = item_id_problem(file)
        if problem:
            yield self._reject(file, "bad id", problem, content)
            return
        try:
            text = decode(content)
        except UnicodeError as error:
            yield self._reject(file, "not UTF-8", str(error), content)
            return
        yield from self._items(file, None, text, None, content)

    def _scan_lines(self, file: str, start: int, end: int | None) -> Iterator[Item | Reject]:
        fs, folder = self._folder
        lines = Lines(fs, f"{folder}/{file}", start, end, self.spec.max_document_bytes)
        try:
            for line in lines:
                yield from self._scan_line(file, lines, line)
        except Unreadable as error:
            yield self._unreadable(file, error)
        except UNREADABLE as error:
            yield self._unreadable(f"{file}#byte={lines.offset}", error)

    def _scan_line(self, file: str, lines: Lines, line: bytes) -> Iterator[Item | Reject]:
        try:
            record = parse_object(line, self.spec.max_document_bytes)
            document_id = self._document_id(record)
        except Unreadable as error:
            yield self._reject(f"{file}:{lines.number}", error.reason, error.detail, line)
            return
        title = record.pop(self.spec.title_field, None)
        text = record.pop(self.spec.text_field, None)
        if not isinstance(text, str):
            detail = f"field {self.spec.text_field}: {type(text).__name__}"
            yield self._reject(document_id, "text is not a string", detail, line)
        elif not isinstance(title, str | None):
            detail = f"field {self.spec.title_field}: {type(title).__name__}"
            yield self._reject(document_id, "title is not a string", detail, line)
        else:
            text = join_title(title or "", text)
            yield from self._items(document_id, title or None, text, record or None, line)

    def _document_id(self, record: dict[str, Any]) -> str:
        id_field = self.spec.id_field or ("_id" if "_id" in record else "id")
        document_id = record.pop(id_field, None)
        if document_id is None:
            raise Unreadable("missing id", f"no field {self.spec.id_field or '_id or id'}")
        if isinstance(document_id, int) and not isinstance(document_id, bool):
            document_id = str(document_id)
        if problem := item_id_problem(document_id):
            raise Unreadable("bad id", f"{document_id!r}: {problem}")
        return document_id

    def _items(
        self,
        document_id: str,
        title: str | None,
        text: str,
        metadata: dict[str, Any] | None,
        content: bytes,
    ) -> Iterator[Item | Reject]:
        if not text.strip():
            yield self._reject(document_id, "empty text", "", content)
            return
        passages = windows(text, self.spec.passages) if self.spec.passages else []
        spans: Sequence[tuple[int, int] | None] = passages or [None]
        for window in spans:
            start, end = window or (0, len(text))
            item_id = f"{document_id}#{start}-{end}" if window else document_id
            if problem := item_id_problem(item_id):
                yield self._reject(item_id, "bad id", problem, content)
                continue
            yield Item(
                item_id=item_id,
                parent_id=document_id,
                source=self.collection,
                modality="text",
                revision=_revision(title, text[start:end], metadata),
                span=("characters", start, end) if window else None,
                title=title,
                text=text[start:end],
                metadata=metadata,
            )

    def _reject(self, item_id: str, reason: str, detail: str, content: bytes) -> Reject:
        revision = hashlib.blake2b(content, digest_size=8).hexdigest()
        return self._list_reject(item_id, reason, detail, revision)

    def _unreadable(self, item_id: str, error: Exception) -> Reject:
        if isinstance(error, Unreadable):
            return self._list_reject(item_id, error.reason, error.detail)
        detail = f"{type(error).__name__}: {error}"
        return self._list_reject(item_id, "unreadable file", detail, retryable=True)

    def _list_reject(
        self, item_id: str, reason: str, detail: str, revision: str = "", retryable: bool = False
    ) -> Reject:
        item_id, detail = escape(item_id), escape(detail[:500])
        return Reject(item_id, self.collection, "list", reason, detail, revision, retryable)


def join_title(title: str, text: str) -> str:
    r"""Combines title and text to the text that is encoded. It begins with the title.

    >>> join_title("On wings", "On wings. They lift."), join_title("On wings", "They lift.")
    ('On wings. They lift.', 'On wings\nThey lift.')
    """
    if not title.strip():
        return text
    if not text.strip():
        return title
    has_title = text.startswith(title) and not text[len(title) : len(title) + 1].isalnum()
    return text if has_title else f"{title}\n{text}"


def windows(text: str, passages: Passages) -> list[tuple[int, int]]:
    """Returns (start, end) of each window in code points, or empty if the text is not divided.

    >>> windows("a bc d ef", Passages(max_words=3, overlap_words=1))
    [(0, 6), (5, 9)]
    >>> windows("a bc d", Passages(max_words=3, overlap_words=1))
    []
    """
    words = [match.span() for match in _WORD.finditer(text)]
    size, overlap = passages.max_words, passages.overlap_words
    if len(words) <= size:
        return []
    # No window begins in the last `overlap` words, which the previous window contains.
    firsts = range(0, len(words) - overlap, size - overlap)
    return [(words[i][0], words[min(i + size, len(words)) - 1][1]) for i in firsts]


def read_lines(
    stream: BinaryIO, start: int, end: int | None, max_bytes: int = MAX_LINE_BYTES
) -> Iterator[tuple[int, bytes]]:
    """Yields (byte offset, line) of the lines that begin in a byte range.

    A line longer than `max_bytes` is truncated to `max_bytes` + 1 bytes.

    Raises:
        OSError: A line does not end within `MAX_SKIPPED_BYTES`.
    """
    offset = start
    if start:
        stream.seek(start - 1)
        newline = stream.read(-1 if end is None else end - start + 1).find(b"\n")
        if newline < 0:  # the range is in the middle of a line
            return
        offset = start + newline
        stream.seek(offset)
    while (end is None or offset < end) and (line := stream.readline(max_bytes + 1)):
        yield offset, line
        offset += len(line)
        if len(line) > max_bytes and not line.endswith(b"\n"):
            offset += _skip_line(stream)


def _skip_line(stream: BinaryIO) -> int:
    """Skips the rest of the line and returns the number of bytes that were read."""
    num_bytes = 0
    while data := stream.readline(1 << 20):
        num_bytes += len(data)
        if data.endswith(b"\n"):
            break
        if num_bytes > MAX_SKIPPED_BYTES:
            raise OSError(f"a line must end within {MAX_SKIPPED_BYTES:,} bytes, got a longer one")
    return num_bytes


class Lines:
    """Iterator over the non-blank lines in a byte range of a file.

    Args:
        start: Start of the range, in bytes of the decompressed content.
        end: End of the range, in bytes. None is the end of the file. A line belongs to the range in
            which it begins.
        max_bytes: Maximum size of a line, in bytes. Longer lines are truncated to `max_bytes` + 1.

    Attributes:
        offset: Offset of the current line, in bytes, or of the line that could not be read.
    """

    def __init__(
        self,
        fs: AbstractFileSystem,
        path: str,
        start: int,
        end: int | None,
        max_bytes: int = MAX_LINE_BYTES,
    ):
        self._fs, self._path, self._start, self._end = fs, path, start, end
        self._max_bytes = max_bytes
        self.offset = start
        self._first, self._row = start, -1

    def __iter__(self) -> Iterator[bytes]:
        compression = "gzip" if self._path.lower().endswith(".gz") else None
        with open_file(
            self._fs, self._path, compression=compression, block_size=BLOCK_BYTES
        ) as stream:
            for offset, line in read_lines(stream, self._start, self._end, self._max_bytes):
                self.offset = offset
                self._row += 1
                if not self._row:
                    self._first = self.offset
                if line.strip():
                    yield line
                self.offset += len(line)

    @property
    def number(self) -> int:
        """Number of the current line, from 1. Computing it reads the file up to the line."""
        return count_newlines(self._fs, self._path, self._first) + self._row + 1


def count_newlines(fs: AbstractFileSystem, path: str, end: int) -> int:
    """Returns the number of newlines in the first `end` bytes of a file.

    Counts are cached per process: if `end` increases from call to call, each part is read once.
    """
    if not end:
        return 0
    cached = _cached_count(path, fs.ukey(path))
    if end < cached[0]:
        cached[:] = 0, 0
    with fs.open(path, "rb", block_size=BLOCK_BYTES) as stream:
        stream.seek(cached[0])
        while cached[0] < end and (data := stream.read(min(BLOCK_BYTES, end - cached[0]))):
            cached[:] = cached[0] + len(data), cached[1] + data.count(b"\n")
    return cached[1]


@functools.lru_cache(maxsize=16)
def _cached_count(path: str, state: str) -> list[int]:
    """Returns the mutable cache entry [bytes, newlines in them] of a file in one state."""
    return [0, 0]


def parse_object(line: bytes, max_bytes: int = MAX_LINE_BYTES) -> dict[str, Any]:
    """Returns the JSON object of a line.

    Raises:
        Unreadable: The line is too long, not UTF-8, not JSON, or not an object.
    """
    if len(line) > max_bytes:
        raise Unreadable("too long", f"line must be at most {max_bytes:,} bytes, got more")
    try:
        value = parse_line(line)
    except UnicodeError as error:
        raise Unreadable("not UTF-8", str(error)) from None
    except json.JSONDecodeError as error:  # str(error) would name line 1
        raise Unreadable("not JSON", f"{error.msg}, column {error.colno}") from None
    except ValueError as error:
        raise Unreadable("not JSON", str(error)) from None
    if not isinstance(value, dict):
        raise Unreadable("not a JSON object", f"got a {type(value).__name__}")
    return value


def parse_line(line: bytes) -> Any:
    """Returns the JSON value of a line.

    Raises:
        UnicodeError: The line is not UTF-8, or contains an escaped half of a surrogate pair.
        ValueError: The line is not JSON, is nested too deeply, or contains an integer with too many
            digits.
    """
    text = line.decode("utf-8").removeprefix("\ufeff")
    too_deep = ValueError(f"JSON must be nested at most {MAX_JSON_DEPTH} levels deep, got more")
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise too_deep from None
    except ValueError as error:
        if str(error).startswith("Exceeds the limit"):  # Python's limit on integer digits
            digits = sys.get_int_max_str_digits()
            raise ValueError(f"integers must have at most {digits:,} digits, got more") from None
        raise
    if text.count("[") + text.count("{") > MAX_JSON_DEPTH and _is_deep(value):
        raise too_deep
    if "\\u" in text:  # raises UnicodeEncodeError for an escaped half of a surrogate pair
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _is_deep(value: Any) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_JSON_DEPTH):
        values = (v.values() if isinstance(v, dict) else v for v in level)
        level = [child for v in values for child in v if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _revision(title: str | None, text: str, metadata: dict[str, Any] | None) -> str:
    stored = json.dumps([title, text, metadata], ensure_ascii=False)
    return hashlib.blake2b(stored.encode(), digest_size=8).hexdigest()


def _is_text(path: str) -> bool:
    return path.lower().endswith(TEXT_SUFFIXES)


def _is_lines(path: str) -> bool:
    return path.lower().endswith(LINES_SUFFIXES)
