"""Text and speech recognised by other programs: JSON lines, or CSV files of MultiVENT 2.0.

The files are read once per machine into an SQLite database in the temporary folder, in which all
processes look up ids.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import itertools
import json
import math
import os
import re
import sqlite3
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, ClassVar, Literal, TypeGuard
from urllib.parse import quote

from fsspec import AbstractFileSystem
from pydantic import Field

from pipeline import config
from pipeline.config import SpecError, reading
from pipeline.data.decode import Unreadable
from pipeline.data.decode.untrusted import (
    MAX_LINE_BYTES,
    TAR_ERRORS,
    TarArchive,
    check_regular,
    open_file,
)
from pipeline.data.recognise import NAN, Line, Recogniser, Word, filter_words, make_line
from pipeline.paths import locate
from pipeline.tokens import AUDIO, TEXT

#: Lines up to this duration are sentences, which are not divided between windows.
MAX_SENTENCE_SECONDS = 10.0

#: Incremented when the schema or the content of the table changes.
TABLE_VERSION = 2
LOCATION_COLUMNS = ("x0", "y0", "x1", "y1", "start", "stop")
COLUMNS = ("id", "text", *LOCATION_COLUMNS, "confidence", "frame", "is_multivent")
#: A row of the table. A null text records that a file exists for an id or frame.
LineRecord = tuple[Any, ...]

JSONL, CSV, ZIP, TARS = ".jsonl", ".csv", ".zip", (".tar", ".tar.gz", ".tgz")
#: Names of MultiVENT 2.0 files with visible text: key of the video, and number of the frame.
FRAME_FILE = re.compile(r"(?:.*/)?([^/]+)_frame_(\d{1,18})\.\w+\.csv", re.DOTALL | re.IGNORECASE)
#: Names of MultiVENT 2.0 files with speech.
SPEECH_FILE = re.compile(r"(?:.*/)?([^/]+)\.(?:m4a|mp3|wav|flac)\.csv", re.DOTALL | re.IGNORECASE)

#: Exclusive upper bound of numbers: smaller integers are exact as floats, and fit SQLite integers.
MAX_NUMBER = 1 << 53
#: Errors of reading a corrupted file, in addition to `TAR_ERRORS`.
READ_ERRORS = (zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error, EOFError, OSError)
#: Maximum nesting depth of archives. Each level decompresses the levels above again.
MAX_ARCHIVE_DEPTH = 4

LINE_RULE = (
    'a line {"id": "...", "text": "..."} with the optional fields "box": [x0, y0, x1, y1] with'
    ' 0 <= x0 <= x1 <= 1 and 0 <= y0 <= y1 <= 1, "start", "end" with 0 <= start <= end,'
    ' and "confidence" from 0 to 1'
)


class Precomputed(Recogniser["Precomputed.Spec"]):
    """Base class of recognisers that look up items in files.

    **JSON lines.** `{"id": ..., "text": ...}` (or `doc_id`, as in MultiVENT 2.0) with the optional
    fields `"box": [x0, y0, x1, y1]` in [0, 1] of the upright image, `"start"` and `"end"` in
    seconds of the file, and `"confidence"`, the probability that the text is correct. An id may
    have many lines, for example one per word. If a line has several words, every word has its box,
    and for visible text its times; spoken words divide its duration in proportion to their
    characters. Other fields are ignored.

    **MultiVENT 2.0.** CSV files whose ids are keys of videos. Boxes are ignored, because they are
    in pixels of frames of unknown size. Frames have times only if the metadata of the item contains
    `fps`. Then equal lines of successive frames are one line that appears and disappears halfway
    between the frames around the change. Without `fps`, equal lines of all frames are one line
    without times.

    An item has the lines of its id, or else of its parent (for MultiVENT also by the file name of
    the parent without folder and suffix). A window of a video has the lines of the parent whose
    middle is in the window. Lines longer than 10 s are divided between words. Lines of a parent
    without times belong to the first window or page only, so that they are found once and not
    repeated everywhere.

    Args:
        skip_unreadable: Whether to skip unreadable files. See `unreadable_files`.
    """

    kind: ClassVar[int]
    """The kind of the words, `tokens.TEXT` or `tokens.AUDIO`."""
    has_ids = True

    class Spec(config.ComponentSpec):
        """Options of precomputed text."""

        name: Literal["precomputed"] = "precomputed"
        path: config.Uri
        """Local path or fsspec URI of a file, a folder or an archive (.tar, .tar.gz, .zip,
        possibly nested)."""
        form: Literal["jsonl", "multivent"] | None = None
        """Format of the files, "jsonl" or "multivent"; None: by suffix, .jsonl or .csv."""
        min_confidence: float = Field(0.0, ge=0, le=1)
        """Minimum confidence of a word. Other words are omitted, except words without confidence.
        """

    def __init__(self, spec: Spec, *, skip_unreadable: bool = False):
        self.spec = spec
        table = prepare_table(spec, self.kind, skip_unreadable=skip_unreadable)
        self._table = _connect(table)
        self._matches_names = bool(self._table.execute("PRAGMA user_version").fetchone()[0])

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Reads all files. Raises `SpecError` if one is missing, or a line is invalid."""
        prepare_table(spec, cls.kind)

    @classmethod
    def wants(cls, spec: Spec) -> tuple[str, ...]:
        """Returns nothing: images and audio are not decoded."""
        return ()

    @classmethod
    def find_unmatched(cls, spec: Spec, known_ids: Iterable[str]) -> tuple[int, list[str]]:
        """Counts the ids that belong to no item or parent, and returns the first five of them."""
        table = _connect(prepare_table(spec, cls.kind))
        by_name = table.execute("PRAGMA user_version").fetchone()[0]
        names = (name for known in known_ids for name in (_names(known) if by_name else [known]))
        table.execute("CREATE TEMP TABLE known (id TEXT PRIMARY KEY) WITHOUT ROWID")
        table.executemany("INSERT OR IGNORE INTO known VALUES (?)", ((name,) for name in names))
        unmatched = "FROM lines WHERE id NOT IN known"
        (number,) = table.execute(f"SELECT count(DISTINCT id) {unmatched}").fetchone()
        examples = table.execute(f"SELECT DISTINCT id {unmatched} ORDER BY id LIMIT 5").fetchall()
        return number, [id for (id,) in examples]

    def lines(self, item: dict[str, Any]) -> list[Line]:
        """Returns the lines of an item, in the order of the files."""
        return filter_words(self._all_lines(item), self.spec.min_confidence)

    def _all_lines(self, item: dict[str, Any]) -> list[Line]:
        item_id, parent = item["item_id"], item.get("parent_id") or item["item_id"]
        fps = _frames_per_second(item)
        if rows := self._rows(item_id):
            return self._lines(rows, fps)
        names = _names(parent) if self._matches_names else [parent]
        rows = next((rows for name in names if (rows := self._rows(name))), [])
        lines = self._lines(rows, fps)
        return lines if parent == item_id else _lines_in_span(lines, item.get("span"))

    def _rows(self, id: str) -> list[LineRecord]:
        query = f"SELECT {', '.join(COLUMNS)} FROM lines WHERE id = ? ORDER BY frame, rowid"
        return self._table.execute(query, (id,)).fetchall()

    def _lines(self, rows: list[LineRecord], fps: float | None) -> list[Line]:
        located: dict[Any, tuple[Any, ...]] = {}
        frames: dict[int, list[str]] = {}
        for number, (_, text, *place, confidence, frame, is_multivent) in enumerate(rows):
            if frame is not None:
                frames.setdefault(frame, []).extend([text] if text else [])
            elif text:
                # A video may be in two archives. JSON lines are duplicates only if they have a
                # location, because a word without one may occur twice.
                is_unique = is_multivent or any(value is not None for value in place)
                key = (text, *place) if is_unique else number
                *box, start, end = (NAN if value is None else value for value in place)
                confidence = NAN if confidence is None else confidence
                located.setdefault(key, (text, (start, end), tuple(box), self.kind, confidence))
        lines = [make_line(*line) for line in located.values()]
        lines += [
            make_line(text, times, kind=self.kind) for text, times in _merge_frames(frames, fps)
        ]
        return [line for line in lines if line.words]


class PrecomputedText(Precomputed):
    """Visible text recognised by another program."""

    kind = TEXT


class PrecomputedSpeech(Precomputed):
    """Speech recognised by another program."""

    kind = AUDIO


def prepare_table(spec: Precomputed.Spec, kind: int, *, skip_unreadable: bool = False) -> Path:
    """Returns the SQLite database with the lines at `spec.path`, created by the first process.

    Its name in the temporary folder depends on the names, sizes and dates of the files. The folder
    contains only complete databases and their locks.

    With `skip_unreadable`, unreadable files and archive members are recorded in the table
    `problems`, and the others are read. See `unreadable_files`.

    Raises:
        SpecError: No file exists, one cannot be read, or a line is invalid.
    """
    fs, files = _files(spec)
    tolerance = ["skip_unreadable"] if skip_unreadable else []
    key = config.digest([spec.path, spec.form, kind, TABLE_VERSION, files, *tolerance])
    folder = Path(tempfile.gettempdir()) / f"maxray-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():  # another user may have created it
        raise SpecError(
            "TMPDIR", str(folder), "a folder of the current user", "belongs to another user"
        )
    table = folder / f"transcript-{key}.sqlite"
    if table.exists():
        return table
    with open(folder / f"transcript-{key}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, also by a crash
        unfinished = table.with_suffix(f".{os.getpid()}.tmp")
        try:
            if not table.exists():
                paths = [path for path, *_ in files]
                _fill(unfinished, spec, kind, fs, paths, skip_unreadable)
                os.replace(unfinished, table)
        finally:
            unfinished.unlink(missing_ok=True)
    return table


def unreadable_files(spec: Precomputed.Spec, kind: int) -> list[tuple[str, str]]:
    """Returns the name and the problem of all files and archive members that cannot be read."""
    table = _connect(prepare_table(spec, kind, skip_unreadable=True))
    return table.execute("SELECT name, detail FROM problems ORDER BY name").fetchall()


def _connect(table: Path) -> sqlite3.Connection:
    return sqlite3.connect(
        f"file:{quote(str(table))}?mode=ro&immutable=1", uri=True, check_same_thread=False
    )


def _files(spec: Precomputed.Spec) -> tuple[AbstractFileSystem, list[tuple[str, ...]]]:
    """Returns the file system and the files to read as (path, size, date), sorted by path."""
    suffixes = (*_parsers(spec), ZIP, *TARS)
    rule = f"a file or folder with {', '.join(suffixes)} files"
    with reading("path", spec.path, rule, Exception):  # any of the library behind the file system
        fs, root = locate(spec.path)
        infos = fs.find(root, detail=True)
    problem = "contains no such file" if infos else "does not exist or is empty"
    is_file = list(infos) == [root]
    if not (is_file and spec.form):  # a file with an explicit `form` may have any name
        infos = {path: info for path, info in infos.items() if path.lower().endswith(suffixes)}
    if not infos:
        raise SpecError("path", spec.path, rule, problem)
    for path in infos:
        with contextlib.suppress(OSError):  # raised again on opening
            _check_regular(fs, path)
    dates = ("mtime", "LastModified", "ETag", "created", "updated")
    return fs, [
        (path, str(info["size"]), *(str(info[date]) for date in dates if date in info))
        for path, info in sorted(infos.items())
    ]


def _check_regular(fs: AbstractFileSystem, path: str) -> None:
    try:
        check_regular(fs, path)
    except Unreadable as error:
        kind = error.detail.rpartition(", ")[2]
        raise SpecError("path", path, "a regular file", kind) from None


Parser = Callable[[str, IO[bytes], int], Iterator[LineRecord]]


def _parsers(spec: Precomputed.Spec) -> dict[str, Parser]:
    parsers = {JSONL: _read_jsonl, CSV: _read_csv}
    return {
        suffix: parser
        for suffix, parser in parsers.items()
        if spec.form is None or suffix == {"jsonl": JSONL, "multivent": CSV}[spec.form]
    }


def _fill(
    table: Path,
    spec: Precomputed.Spec,
    kind: int,
    fs: AbstractFileSystem,
    paths: list[str],
    skip_unreadable: bool,
) -> None:
    """Writes the lines of all files into a new database."""
    table.unlink(missing_ok=True)  # left by a killed process with the same id
    parsers = _parsers(spec)
    num_read = 0
    database = sqlite3.connect(table)
    try:
        database.execute("PRAGMA synchronous = OFF")
        database.execute(f"CREATE TABLE lines ({', '.join(COLUMNS)})")
        insert = f"INSERT INTO lines VALUES ({', '.join('?' * len(COLUMNS))})"
        database.execute("CREATE TABLE problems (name, detail)")

        def skip(name: str, error: Exception) -> None:
            problem = f"cannot be read ({type(error).__name__}: {error})"
            if isinstance(error, SpecError):
                problem = str(error)
            if not skip_unreadable and isinstance(error, SpecError):
                raise error
            if not skip_unreadable:
                raise SpecError("path", name, "a readable file", problem) from None
            row = (_clean(name), _clean(problem))
            database.execute("INSERT INTO problems VALUES (?, ?)", row)

        for path in paths:
            name = path
            try:
                with open_file(fs, path) as file:
                    for name, document in _documents(path, file):
                        suffix = PurePosixPath(name).suffix.lower()
                        only = next(iter(parsers.values())) if name == paths[0] else None
                        parser = parsers.get(suffix, only)
                        if parser is None:
                            continue
                        num_read += 1
                        try:
                            database.executemany(insert, parser(name, document, kind))
                        except (SpecError, *TAR_ERRORS, *READ_ERRORS) as error:
                            skip(name, error)  # reading continues with the next member
            except (SpecError, *TAR_ERRORS, *READ_ERRORS) as error:
                skip(name, error)
        if not num_read:
            raise SpecError(
                "path",
                spec.path,
                f"a file or folder with {', '.join(parsers)} files",
                "contains no such file",
            )
        database.execute("CREATE INDEX by_id ON lines (id)")
        by_name = database.execute("SELECT max(is_multivent) FROM lines").fetchone()[0] or 0
        database.execute(f"PRAGMA user_version = {by_name}")
        database.commit()
    finally:
        database.close()


def _documents(name: str, file: IO[bytes], depth: int = 0) -> Iterator[tuple[str, IO[bytes]]]:
    """Yields the name and the content of a file, or of all files in an archive."""
    if name.lower().endswith((*TARS, ZIP)) and depth == MAX_ARCHIVE_DEPTH:
        rule = f"an archive nested at most {MAX_ARCHIVE_DEPTH} deep"
        raise SpecError("path", name, rule, "is nested deeper")
    if name.lower().endswith(TARS):
        with TarArchive.open(fileobj=file) as archive:
            for member in archive:
                if member.issparse():
                    inside = f"{name}/{member.name}"
                    raise SpecError("path", inside, "a regular archive member", "is a sparse file")
                if member.isfile():
                    content = archive.extractfile(member)
                    assert content is not None  # None only for irregular files
                    yield from _documents(f"{name}/{member.name}", content, depth + 1)
    elif name.lower().endswith(ZIP):
        with zipfile.ZipFile(file) as zipped:
            for entry in zipped.infolist():
                if not entry.is_dir():
                    with zipped.open(entry) as content:
                        yield from _documents(f"{name}/{entry.filename}", content, depth + 1)
    else:
        yield name, file


def _read_jsonl(name: str, file: IO[bytes], kind: int) -> Iterator[LineRecord]:
    for number, line in enumerate(_lines(name, file), start=1):
        if not (line := line.replace(b"\0", b"").removeprefix(b"\xef\xbb\xbf").strip()):
            continue
        try:
            yield _line_record(json.loads(line.decode()))
        except (ValueError, RecursionError) as error:  # includes invalid UTF-8 and JSON
            problem = str(error) if type(error) is ValueError else "is not UTF-8 JSON"
            raise SpecError("path", f"{name}:{number}", LINE_RULE, problem) from None


def _lines(name: str, file: IO[Any]) -> Iterator[Any]:
    for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), file.read(0)), 1):
        if len(line) > MAX_LINE_BYTES:
            rule = f"a line of at most {MAX_LINE_BYTES:,} bytes"
            raise SpecError("path", f"{name}:{number}", rule, "is longer")
        yield line


def _line_record(entry: Any) -> LineRecord:
    """Returns the row of a parsed line. The message of its `ValueError` is a verb phrase."""
    if not isinstance(entry, dict):
        raise ValueError("is not a JSON object")
    id, text = entry.get("id", entry.get("doc_id")), entry.get("text")
    if not isinstance(id, str) or not id:
        raise ValueError("has no id" if id is None else f"has the id {id!r}")
    if not isinstance(text, str):
        raise ValueError("has no text" if text is None else f"has the text {text!r}")
    box = entry.get("box") or [None] * 4
    start, end = entry.get("start"), entry.get("end")
    if entry.get("box") is not None:
        is_box = isinstance(box, list) and len(box) == 4 and all(map(_is_number, box))
        if not is_box or not (0 <= box[0] <= box[2] <= 1 and 0 <= box[1] <= box[3] <= 1):
            raise ValueError(f"has the box {entry['box']!r}")
    if (start, end) != (None, None) and not (
        _is_number(start) and _is_number(end) and 0 <= start <= end
    ):
        raise ValueError(f"has the start {start!r} and the end {end!r}")
    confidence = entry.get("confidence")
    if confidence is not None and not (_is_number(confidence) and 0 <= confidence <= 1):
        raise ValueError(f"has the confidence {confidence!r}")
    return (_clean(id), _clean(text) or None, *box, start, end, confidence, None, 0)


def _read_csv(name: str, file: IO[bytes], kind: int) -> Iterator[LineRecord]:
    """Yields the lines of a MultiVENT 2.0 CSV file, none if it has the other kind of text."""
    frame_file, speech_file = FRAME_FILE.fullmatch(name), SPEECH_FILE.fullmatch(name)
    if (kind == AUDIO and frame_file) or (kind == TEXT and speech_file):
        return
    key = next((match[1] for match in (frame_file, speech_file) if match), None)
    frame = int(frame_file[2]) if frame_file else None
    no_location = [None] * (len(LOCATION_COLUMNS) + 1)
    if key:
        yield (key, None, *no_location, frame, 1)  # records empty files, too
    csv.field_size_limit(MAX_LINE_BYTES)  # one field may contain hours of speech
    text = io.TextIOWrapper(file, "utf-8-sig", errors="replace", newline="")
    rows = csv.reader(line.replace("\0", "") for line in _lines(name, text))
    with reading("path", name, "a CSV file", csv.Error):
        header = [column.strip().lower() for column in next(filter(None, rows), [])]
        if not header:
            return
        if "text" not in header or not (key or "video_id" in header):
            rule = "a MultiVENT 2.0 CSV file with the columns video_id and text"
            raise SpecError("path", name, rule, f"has the columns {', '.join(header)}")
        for values in rows:
            row = dict(zip(header, values, strict=False))
            video = key or PurePosixPath(row["video_id"].strip()).stem
            if video and (content := _clean(row.get("text", "")).strip()):
                yield (_clean(video), content, *no_location, frame, 1)


def _clean(text: str) -> str:
    """Returns text that SQLite and Arrow can store."""
    return text.replace("\0", "").encode("utf-8", "replace").decode()


def _is_number(value: Any) -> TypeGuard[float]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) < MAX_NUMBER  # False for NaN


def _names(parent: str) -> list[str]:
    """Returns the names of a parent in MultiVENT.

    >>> _names("000003/247.mp4")
    ['000003/247.mp4', '247']
    """
    return list(dict.fromkeys([parent, PurePosixPath(parent).stem]))


def _frames_per_second(item: dict[str, Any]) -> float | None:
    metadata = item.get("metadata")
    fps = (json.loads(metadata) if metadata else {}).get("fps")
    return fps if _is_number(fps) and fps > 0 else None


def _merge_frames(
    frames: dict[int, list[str]], fps: float | None
) -> Iterator[tuple[str, tuple[float, float]]]:
    """Merges equal lines of successive frames and yields the text and the times of each line.

    >>> list(_merge_frames({0: ["a"], 30: ["a", "b"], 60: ["b"]}, fps=30))
    [('a', (0.0, 1.5)), ('b', (0.5, 2.0))]
    >>> list(_merge_frames({0: ["a"], 30: ["a", "b"], 60: ["a"]}, fps=None))
    [('a', (nan, nan)), ('b', (nan, nan))]
    """
    if fps is None:
        unique = dict.fromkeys(text for frame in frames.values() for text in frame)
        yield from ((text, (NAN, NAN)) for text in unique)
        return
    numbers = list(frames)
    between = [(a + b) / 2 for a, b in itertools.pairwise(numbers)]
    borders = [*numbers[:1], *between, *numbers[-1:]]
    lines: list[list[Any]] = []  # [text, first and last frame number in which it is visible]
    current: dict[str, list[Any]] = {}
    for texts, (start, until) in zip(frames.values(), itertools.pairwise(borders), strict=True):
        previous, current = current, {}
        for text in dict.fromkeys(texts):
            current[text] = previous.get(text) or [text, start, until]
            current[text][2] = until
            if text not in previous:
                lines.append(current[text])
    yield from ((text, (start / fps, end / fps)) for text, start, end in lines)


def _lines_in_span(lines: list[Line], span: dict[str, Any] | None) -> list[Line]:
    """Returns the lines of a parent that belong to one of its items.

    >>> lines = [make_line("one two", (0.0, 12.0), kind=AUDIO), make_line("untimed")]
    >>> lines.append(make_line("a sentence", (3.0, 6.0), kind=AUDIO))
    >>> [line.text for line in _lines_in_span(lines, {"unit": "seconds", "start": 5, "end": 15})]
    ['two']
    >>> [line.text for line in _lines_in_span(lines, {"unit": "seconds", "start": 0, "end": 5})]
    ['one', 'untimed', 'a sentence']
    """
    if span is None or not span["unit"]:
        return lines
    is_first = span["start"] <= (1 if span["unit"] == "page" else 0)

    def belongs(times: tuple[float, float]) -> bool:
        middle = sum(times) / 2
        if span["unit"] != "seconds" or math.isnan(middle):
            return is_first
        return span["start"] <= middle < span["end"]

    def words_inside(line: Line) -> tuple[Word, ...]:
        whole = line.words[0].times[0], line.words[-1].times[1]
        if whole[1] - whole[0] <= MAX_SENTENCE_SECONDS:
            return line.words if belongs(whole) else ()
        return tuple(word for word in line.words if belongs(word.times))

    return [Line(words) for words in map(words_inside, lines) if words]
