"""Text documents: a folder of .txt and .md files, JSON lines, or the corpus of a BEIR folder."""

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
from pipeline.decoding import Unreadable
from pipeline.decoding.untrusted import MAX_LINE_BYTES, open_file
from pipeline.schema import Item, Reject, item_id_problem
from pipeline.sources import Source
from pipeline.sources.files import SPECIAL, escaped, existing_root, folder_of, open_root, walk

TEXT_SUFFIXES = (".txt", ".md")
LINES_SUFFIXES = (".jsonl", ".jsonl.gz")
FILES_PER_SHARD = 1000
BYTES_PER_SHARD = 1 << 20

#: A line that goes on for so long ends the reading of its file: a few megabytes of gzip may hold
#: terabytes.
MAX_SKIPPED_BYTES = 1 << 30
#: Deeper values pass the parser, and exhaust the stack of what writes them.
MAX_JSON_DEPTH = 100

#: A word is one Chinese or Japanese character, or a run of anything else but white space.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_CJK}]|[^\s{_CJK}]+")

#: What reading a file may raise: a truncated or damaged gzip file raises the last two.
UNREADABLE = (OSError, EOFError, zlib.error)


class Passages(config.Spec):
    """How long documents are cut: into windows of `max_words` that share `overlap_words`."""

    max_words: int = Field(400, gt=0)
    """Maximum number of words per passage."""
    overlap_words: int = Field(50, ge=0)
    """Number of words that neighbouring passages share."""

    @model_validator(mode="after")
    def _windows_advance(self) -> Passages:
        if self.overlap_words >= self.max_words:
            rule = f"an integer below max_words ({self.max_words})"
            raise SpecError("overlap_words", self.overlap_words, rule)
        return self


class Text(Source["Text.Spec"]):
    """Text documents, whole or as passages.

    `path` is a folder of .txt, .md, .jsonl and .jsonl.gz files at any depth, or one such file, or a
    BEIR folder, of which only corpus.jsonl (or corpus.jsonl.gz) is read.

    **Documents.** A .txt or .md file is a document, its path below `path` its id, its text taken as
    it is but for a byte order mark. A line of a .jsonl file is a document: an object with an id (a
    string, or an integer taken as a string), a text, often a title; all other fields are kept as
    the item's metadata. Blank lines are no documents.

    **Title.** The text of an item is what is encoded, so it holds the title: a text that starts
    with its title stays as it is, any other becomes title, newline, text. Every character offset
    refers to this joined text. The title stands in its own column too.

    **Passages.** Without `passages` each document is one item. With it a document of more than
    `max_words` words becomes windows of `max_words` words (the last may be shorter), each of which
    starts `overlap_words` words before the one before it ends; every word lies in one or more. A
    window is the exact slice `document[start:end]`, offsets in code points, with the id
    `<document id>#<start>-<end>` and the document as its parent.

    **Revision.** A hash of what the item stores: title, text and metadata. Settings change it by
    changing those, so a document that a setting leaves as it was is not encoded again.
    """

    class Spec(config.ComponentSpec):
        """Options of the text source.

        Attributes:
            path: a local path or an fsspec URI.
            collection: the name of what is read here; default: the last part of the path.
            id_field: the JSON field of the id; None = `_id`, or `id` where there is no `_id`.
            text_field: the JSON field of the text.
            title_field: the JSON field of the title, which may be missing or null.
            passages: how long documents are cut; None = never.
            max_document_bytes: Maximum size of a document, as a file or as a line, in bytes.
        """

        name: Literal["text"] = "text"
        path: config.Uri
        collection: str = ""
        id_field: str | None = None
        text_field: str = "text"
        title_field: str = "title"
        passages: Passages | None = None
        max_document_bytes: int = Field(MAX_LINE_BYTES, ge=1024, le=1 << 30)

    gives = ("item_id", "text")

    def check(self) -> None:
        """Raises `SpecError` if there is no document to read."""
        path = self.spec.path
        fs, root = existing_root(path)
        kinds = ", ".join(TEXT_SUFFIXES + LINES_SUFFIXES)
        if not fs.isdir(root):
            if not _is_text(root) and not _is_lines(root):
                raise SpecError("path", path, f"a folder, or a file that ends in {kinds}")
        elif not self._corpus and fs.exists(f"{root}/queries.jsonl"):
            raise SpecError(
                "path", path, "a BEIR folder with its corpus", "contains no corpus.jsonl"
            )
        first = next(self._files(), None)
        if first in (None, ("", None)):  # the latter: the folder itself cannot be listed
            raise SpecError("path", path, f"a folder with {kinds} files", "contains none")
        if first[1] == 0 and (self._corpus or not fs.isdir(root)):
            raise SpecError("path", path, "a corpus of at least one document", "is an empty file")

    def shards(self) -> Iterator[dict[str, Any]]:
        """Groups of files `{"files": [...]}`, and byte ranges `{"lines": file, "start", "end"}`."""
        group: list[str] = []
        for file, num_bytes in self._files():
            if not _is_lines(file):
                group.append(file)
                if len(group) == FILES_PER_SHARD:
                    yield {"files": group}
                    group = []
            elif file.lower().endswith(".gz") or num_bytes == SPECIAL:  # cannot be entered
                yield {"lines": file, "start": 0, "end": None}
            else:
                num_bytes = num_bytes or 0
                for start in range(0, num_bytes, BYTES_PER_SHARD):
                    end = min(start + BYTES_PER_SHARD, num_bytes)
                    yield {"lines": file, "start": start, "end": end}
        if group:
            yield {"files": group}

    def scan(self, shard: dict[str, Any]) -> Iterator[Item | Reject]:
        """Lists documents in order; a line belongs to the byte range in which it starts.

        A line without a valid id is named `<file>:<line number>` in its reject, counted from 1; a
        file that cannot be read any further is named `<file>#byte=<offset>`.
        """
        if "files" in shard:
            for file in shard["files"]:
                yield from self._scan_file(file)
        else:
            yield from self._scan_lines(shard["lines"], shard["start"], shard["end"])

    @functools.cached_property
    def _corpus(self) -> str | None:
        """The name of the corpus in a BEIR folder, None for other paths."""
        fs, root = open_root(self.spec.path)
        names = ("corpus.jsonl", "corpus.jsonl.gz")
        return next((name for name in names if fs.isfile(f"{root}/{name}")), None)

    @functools.cached_property
    def _folder(self) -> tuple[Any, str]:
        return folder_of(self.spec.path)

    def _files(self) -> Iterator[tuple[str, int | None]]:
        """(path relative to the folder, bytes) of all that is read."""
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
        most = self.spec.max_document_bytes
        try:
            with open_file(fs, f"{folder}/{file}") as stream:
                content = stream.read(most + 1)
        except (Unreadable, OSError) as error:
            yield self._unreadable(file, error)
            return
        if len(content) > most:
            detail = f"file must be at most {most:,} bytes, got more"
            yield self._reject(file, "too long", detail, content)
            return
        problem = item_id_problem(file)
        if problem:
            yield self._reject(file, "bad id", problem, content)
            return
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
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
        """Takes the id out of a record.

        Raises:
            Unreadable: there is no valid id.
        """
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
        """The items of one document: the whole, or its windows."""
        if not text.strip():
            yield self._reject(document_id, "empty text", "", content)
            return
        passages = windows(text, self.spec.passages) if self.spec.passages else []
        cuts: Sequence[tuple[int, int] | None] = passages or [None]
        for window in cuts:
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
        item_id, detail = escaped(item_id), escaped(detail[:500])
        return Reject(item_id, self.collection, "list", reason, detail, revision, retryable)


def join_title(title: str, text: str) -> str:
    r"""Returns the text to encode, which starts with the title.

    >>> join_title("On wings", "On wings. They lift."), join_title("On wings", "They lift.")
    ('On wings. They lift.', 'On wings\nThey lift.')
    """
    if not title.strip():
        return text
    if not text.strip():
        return title
    starts_with_it = text.startswith(title) and not text[len(title) : len(title) + 1].isalnum()
    return text if starts_with_it else f"{title}\n{text}"


def windows(text: str, passages: Passages) -> list[tuple[int, int]]:
    """The (start, end) of each window in code points; none for a text that stays whole.

    >>> windows("a bc d ef", Passages(max_words=3, overlap_words=1))
    [(0, 6), (5, 9)]
    >>> windows("a bc d", Passages(max_words=3, overlap_words=1))
    []
    """
    words = [match.span() for match in _WORD.finditer(text)]
    size, overlap = passages.max_words, passages.overlap_words
    if len(words) <= size:
        return []
    # No window starts within the last `overlap` words: the one before holds them already.
    firsts = range(0, len(words) - overlap, size - overlap)
    return [(words[i][0], words[min(i + size, len(words)) - 1][1]) for i in firsts]


def read_lines(
    stream: BinaryIO, start: int, end: int | None, max_bytes: int = MAX_LINE_BYTES
) -> Iterator[tuple[int, bytes]]:
    """(byte offset, line) of the lines that start in [start, end); None = the stream's end.

    Of a line of more than `max_bytes` the first `max_bytes` + 1 are yielded; the rest is skipped.

    Raises:
        OSError: a line does not end within `MAX_SKIPPED_BYTES`.
    """
    offset = start
    if start:
        stream.seek(start - 1)
        newline = stream.read(-1 if end is None else end - start + 1).find(b"\n")
        if newline < 0:  # inside a line that began before and goes on behind
            return
        offset = start + newline
        stream.seek(offset)
    while (end is None or offset < end) and (line := stream.readline(max_bytes + 1)):
        yield offset, line
        offset += len(line)
        if len(line) > max_bytes and not line.endswith(b"\n"):
            offset += _skip_line(stream)


def _skip_line(stream: BinaryIO) -> int:
    """Reads up to the end of a line; returns the number of bytes."""
    num_bytes = 0
    while data := stream.readline(1 << 20):
        num_bytes += len(data)
        if data.endswith(b"\n"):
            break
        if num_bytes > MAX_SKIPPED_BYTES:
            raise OSError(f"a line must end within {MAX_SKIPPED_BYTES:,} bytes, got a longer one")
    return num_bytes


class Lines:
    """The lines of a byte range of a file that are not blank.

    Args:
        start, end: The range, in bytes of the content; a line belongs to the range in which it
            starts. None as the end is the end of the file.
        max_bytes: Maximum size of a line; of a longer one the first `max_bytes` + 1 are given.

    Attributes:
        offset: Offset in bytes of the current line, or of the one that could not be read.
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
            self._fs, self._path, compression=compression, block_size=BYTES_PER_SHARD
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
        """Number of the current line in the file, counted from 1.

        What lies before the range is read only here: most ranges have no line to report.
        """
        return count_newlines(self._fs, self._path, self._first) + self._row + 1


def count_newlines(fs: AbstractFileSystem, path: str, end: int) -> int:
    """Returns the number of newlines in the first `end` bytes of a file.

    A process reads each part of a file once as long as `end` ascends from call to call: a large
    file with malformed lines in all its ranges is not read from its beginning for each of them.
    """
    if not end:
        return 0
    counted = _counted(path, fs.ukey(path))
    if end < counted[0]:
        counted[:] = 0, 0
    with fs.open(path, "rb", block_size=BYTES_PER_SHARD) as stream:
        stream.seek(counted[0])
        while counted[0] < end and (data := stream.read(min(BYTES_PER_SHARD, end - counted[0]))):
            counted[:] = counted[0] + len(data), counted[1] + data.count(b"\n")
    return counted[1]


@functools.lru_cache(maxsize=16)
def _counted(path: str, state: str) -> list[int]:
    """[bytes, newlines in them] of the part of a file, in one state of it, that was counted."""
    return [0, 0]


def parse_object(line: bytes, max_bytes: int = MAX_LINE_BYTES) -> dict[str, Any]:
    """Returns the JSON object of a line.

    Raises:
        Unreadable: The line is too long, not UTF-8, not JSON, or another JSON value.
    """
    if len(line) > max_bytes:
        raise Unreadable("too long", f"line must be at most {max_bytes:,} bytes, got more")
    try:
        value = parse_line(line)
    except UnicodeError as error:
        raise Unreadable("not UTF-8", str(error)) from None
    except json.JSONDecodeError as error:  # its text would call every line "line 1"
        raise Unreadable("not JSON", f"{error.msg}, column {error.colno}") from None
    except ValueError as error:
        raise Unreadable("not JSON", str(error)) from None
    if not isinstance(value, dict):
        raise Unreadable("not a JSON object", f"a {type(value).__name__}")
    return value


def parse_line(line: bytes) -> Any:
    """Returns the value of a line of JSON.

    Raises:
        UnicodeError: The line is not UTF-8, or names characters that are not text.
        ValueError: The line is not JSON, nested too deeply, or has too long an integer.
    """
    text = line.decode("utf-8").removeprefix("\ufeff")
    too_deep = ValueError(f"JSON must be nested at most {MAX_JSON_DEPTH} levels deep, got more")
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise too_deep from None
    except ValueError as error:
        if str(error).startswith("Exceeds the limit"):  # Python's, of the digits of an integer
            digits = sys.get_int_max_str_digits()
            raise ValueError(f"integers must have at most {digits:,} digits, got more") from None
        raise
    if text.count("[") + text.count("{") > MAX_JSON_DEPTH and _is_deep(value):
        raise too_deep
    if "\\u" in text:  # an escaped half of a surrogate pair is no text: raises UnicodeEncodeError
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
