"""Text and speech that another program recognised: JSON lines, or the CSV files of MultiVENT 2.0.

The files are read once on each machine, into an SQLite file of the temporary folder in which every
process looks ids up.
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

import fsspec
from pydantic import Field

from pipeline import config
from pipeline.config import SpecError
from pipeline.decoding import Unreadable
from pipeline.decoding.untrusted import (
    MAX_LINE_BYTES,
    TAR_ERRORS,
    TarArchive,
    check_regular,
    open_file,
)
from pipeline.extras import require_storage
from pipeline.tokens import AUDIO, TEXT
from pipeline.transcribe import NAN, Line, Recogniser, Word, confident, spread

#: Lines of at most so many seconds are sentences, which are not divided between windows.
LONGEST_SENTENCE = 10.0

#: Counted up when the table changes or is filled in another way.
TABLE_VERSION = 2
PLACE = ("x0", "y0", "x1", "y1", "start", "stop")
COLUMNS = ("id", "text", *PLACE, "confidence", "frame", "is_multivent")
#: A line; or with a null text the mere fact that there is a file of an id or frame.
LineRecord = tuple[Any, ...]

JSONL, CSV, ZIP, TARS = ".jsonl", ".csv", ".zip", (".tar", ".tar.gz", ".tgz")
#: A file of text in MultiVENT 2.0: the video's key, and the number of the frame.
FRAME_FILE = re.compile(r"(?:.*/)?([^/]+)_frame_(\d{1,18})\.\w+\.csv", re.DOTALL | re.IGNORECASE)
#: A file of speech.
SPEECH_FILE = re.compile(r"(?:.*/)?([^/]+)\.(?:m4a|mp3|wav|flac)\.csv", re.DOTALL | re.IGNORECASE)

#: Numbers are smaller.
MOST = 1 << 53
#: What reading a damaged file may raise, besides `TAR_ERRORS`.
BROKEN = (zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error, EOFError, OSError)
#: Archives inside each other, at most. Each level is decompressed again to search the one in it.
MAX_ARCHIVE_DEPTH = 4

LINE_RULE = (
    'a line {"id": "...", "text": "..."} with the optional fields "box": [x0, y0, x1, y1] with'
    ' 0 <= x0 <= x1 <= 1 and 0 <= y0 <= y1 <= 1, "start", "end" with 0 <= start <= end,'
    ' and "confidence" from 0 to 1'
)


class Precomputed(Recogniser["Precomputed.Spec"]):
    """Looks up what the files at a path say of an item.

    JSON lines: `{"id": ..., "text": ...}`, with `"box": [x0, y0, x1, y1]` in [0, 1] of the upright
    picture where it is known, with `"start"` and `"end"` in seconds of the file, and with
    `"confidence"`, the probability that it is right. An id may have
    many lines, as many as words where each word has its place. Of a longer line each word has the
    box, and text the time; words of speech share the time out by their characters. Other fields
    are not read.

    CSV files of MultiVENT 2.0: an id is the key of a video. Boxes are not kept: they are in pixels
    of frames whose size is not told. A frame has a time only if the item's metadata tell `fps`, and
    then a line in successive frames is one line, which appears and disappears halfway between the
    frames around the change. Without `fps` a line of several frames is there once, without a time.

    An item has the lines of its id. If there are none, it has those of its parent (in MultiVENT
    also by the name of the parent's file without folder and ending): of a window of a video, the
    lines whose middle lies in it; lines of more than 10 s are divided between words. Lines of a
    parent that have no time belong to the first window or page only: they are found once, and do
    not fill up every window.
    """

    kind: ClassVar[int]  # of the words
    has_ids = True

    class Spec(config.ComponentSpec):
        """Where the files are.

        Attributes:
            path: a file, a folder or an archive (.tar, .tar.gz, .zip, also inside each other); a
                local path or an fsspec URI.
            form: "jsonl" or "multivent"; None: files .jsonl are one, files .csv the other.
            min_confidence: Least confidence of a word; others are left out. Words without a
                confidence stay.
        """

        name: Literal["precomputed"] = "precomputed"
        path: config.Uri
        form: Literal["jsonl", "multivent"] | None = None
        min_confidence: float = Field(0.0, ge=0, le=1)

    def __init__(self, spec: Spec):
        self.spec = spec
        self._table = _connect(prepare_table(spec, self.kind))
        self._names_count = bool(self._table.execute("PRAGMA user_version").fetchone()[0])

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Reads all files; raises `SpecError` if one is missing or a line is invalid."""
        prepare_table(spec, cls.kind)

    @classmethod
    def wants(cls, spec: Spec) -> tuple[str, ...]:
        """Nothing: pictures and sound need not be decoded."""
        return ()

    @classmethod
    def unmatched(cls, spec: Spec, known_ids: Iterable[str]) -> tuple[int, list[str]]:
        """Which ids of the files belong to no item or parent: how many, and the first five."""
        table = _connect(prepare_table(spec, cls.kind))
        by_name = table.execute("PRAGMA user_version").fetchone()[0]
        names = (name for known in known_ids for name in (_names(known) if by_name else [known]))
        table.execute("CREATE TEMP TABLE known (id TEXT PRIMARY KEY) WITHOUT ROWID")
        table.executemany("INSERT OR IGNORE INTO known VALUES (?)", ((name,) for name in names))
        found = "FROM lines WHERE id NOT IN known"
        (number,) = table.execute(f"SELECT count(DISTINCT id) {found}").fetchone()
        examples = table.execute(f"SELECT DISTINCT id {found} ORDER BY id LIMIT 5").fetchall()
        return number, [id for (id,) in examples]

    def lines(self, item: dict[str, Any]) -> list[Line]:
        """The item's lines, as they follow each other in the files."""
        return confident(self._all_lines(item), self.spec.min_confidence)

    def _all_lines(self, item: dict[str, Any]) -> list[Line]:
        own, parent = item["item_id"], item.get("parent_id") or item["item_id"]
        fps = _frames_per_second(item)
        if rows := self._rows(own):
            return self._lines(rows, fps)
        names = _names(parent) if self._names_count else [parent]
        rows = next((rows for name in names if (rows := self._rows(name))), [])
        lines = self._lines(rows, fps)
        return lines if parent == own else _lines_in_span(lines, item.get("span"))

    def _rows(self, id: str) -> list[LineRecord]:
        query = f"SELECT {', '.join(COLUMNS)} FROM lines WHERE id = ? ORDER BY frame, rowid"
        return self._table.execute(query, (id,)).fetchall()

    def _lines(self, rows: list[LineRecord], fps: float | None) -> list[Line]:
        placed: dict[Any, tuple[Any, ...]] = {}
        frames: dict[int, list[str]] = {}
        for number, (_, text, *place, confidence, frame, is_multivent) in enumerate(rows):
            if frame is not None:
                frames.setdefault(frame, []).extend([text] if text else [])
            elif text:
                # A video may lie in two archives. Of JSON lines only those at one place are equal:
                # a word without one may well be said twice.
                is_once = is_multivent or any(value is not None for value in place)
                key = (text, *place) if is_once else number
                *box, start, end = (NAN if value is None else value for value in place)
                sure = NAN if confidence is None else confidence
                placed.setdefault(key, (text, (start, end), tuple(box), self.kind, sure))
        lines = [spread(*line) for line in placed.values()]
        lines += [spread(text, times, kind=self.kind) for text, times in _over_time(frames, fps)]
        return [line for line in lines if line.words]


class PrecomputedText(Precomputed):
    """Text to be seen, as another program read it."""

    kind = TEXT


class PrecomputedSpeech(Precomputed):
    """Speech, as another program heard it."""

    kind = AUDIO


def prepare_table(spec: Precomputed.Spec, kind: int) -> Path:
    """The SQLite file with the lines at `spec.path`, made if no process has made it yet.

    It lies in the temporary folder, under a name that changes with the names, sizes and dates of
    the files; nothing else is there than whole tables and their locks.

    Raises:
        SpecError: No file exists, one cannot be read, or a line is invalid.
    """
    fs, files = _files(spec)
    key = config.digest([spec.path, spec.form, kind, TABLE_VERSION, files])
    folder = Path(tempfile.gettempdir()) / f"maxray-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():  # on a shared machine anybody may make it first
        raise SpecError(
            "TMPDIR", str(folder), "a folder of the current user", "belongs to another user"
        )
    table = folder / f"transcript-{key}.sqlite"
    if table.exists():
        return table
    with open(folder / f"transcript-{key}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go when the file is closed, also by a crash
        unfinished = table.with_suffix(f".{os.getpid()}.tmp")
        try:
            if not table.exists():
                _fill(unfinished, spec, kind, fs, [path for path, *_ in files])
                os.replace(unfinished, table)
        finally:
            unfinished.unlink(missing_ok=True)
    return table


def _connect(table: Path) -> sqlite3.Connection:
    return sqlite3.connect(
        f"file:{quote(str(table))}?mode=ro&immutable=1", uri=True, check_same_thread=False
    )


def _files(spec: Precomputed.Spec) -> tuple[fsspec.AbstractFileSystem, list[tuple[str, ...]]]:
    """The files to read, each as (path, size, date), sorted by path."""
    endings = (*_parsers(spec), ZIP, *TARS)
    require_storage(spec.path)
    try:
        fs, root = fsspec.url_to_fs(spec.path, use_listings_cache=False)
        found = fs.find(root, detail=True)
    except Exception as error:  # of whatever library the file system stands on
        problem = f"cannot be read ({type(error).__name__}: {error})"
        raise SpecError("path", spec.path, "a readable path", problem) from None
    if not found:
        rule = "a file or a non-empty folder"
        raise SpecError("path", spec.path, rule, "does not exist or is empty")
    is_file = list(found) == [root]
    if not (is_file and spec.form):  # a file whose form is told may have any name
        found = {path: about for path, about in found.items() if path.lower().endswith(endings)}
    if not found:
        raise SpecError(
            "path", spec.path, f"a file or folder with {', '.join(endings)} files", "has none"
        )
    for path in found:
        with contextlib.suppress(OSError):  # opening it says why
            _check_regular(fs, path)
    dates = ("mtime", "LastModified", "ETag", "created", "updated")
    return fs, [
        (path, str(about["size"]), *(str(about[date]) for date in dates if date in about))
        for path, about in sorted(found.items())
    ]


def _check_regular(fs: fsspec.AbstractFileSystem, path: str) -> None:
    try:
        check_regular(fs, path)
    except Unreadable as error:
        kind = error.detail.rpartition(", ")[2]
        raise SpecError("path", path, "a regular file", kind) from None


Parser = Callable[[str, IO[bytes], int], Iterator[LineRecord]]


def _parsers(spec: Precomputed.Spec) -> dict[str, Parser]:
    """What reads files by their endings."""
    parsers = {JSONL: _read_jsonl, CSV: _read_csv}
    return {
        ending: parser
        for ending, parser in parsers.items()
        if spec.form is None or ending == {"jsonl": JSONL, "multivent": CSV}[spec.form]
    }


def _fill(
    table: Path,
    spec: Precomputed.Spec,
    kind: int,
    fs: fsspec.AbstractFileSystem,
    paths: list[str],
) -> None:
    """Writes the lines of all files into a new table."""
    table.unlink(missing_ok=True)  # of a process of the same number that was killed
    parsers = _parsers(spec)
    num_read = 0
    database = sqlite3.connect(table)
    try:
        database.execute("PRAGMA synchronous = OFF")
        database.execute(f"CREATE TABLE lines ({', '.join(COLUMNS)})")
        insert = f"INSERT INTO lines VALUES ({', '.join('?' * len(COLUMNS))})"
        for path in paths:
            name = path
            try:
                with open_file(fs, path) as file:
                    for name, document in _documents(path, file):
                        ending = PurePosixPath(name).suffix.lower()
                        only = next(iter(parsers.values())) if name == paths[0] else None
                        parser = parsers.get(ending, only)
                        if parser is not None:
                            num_read += 1
                            database.executemany(insert, parser(name, document, kind))
            except SpecError:
                raise
            except (*TAR_ERRORS, *BROKEN) as error:
                problem = f"cannot be read ({type(error).__name__}: {error})"
                raise SpecError("path", name, "a readable file", problem) from None
        if not num_read:
            raise SpecError(
                "path", spec.path, f"a file or folder with {', '.join(parsers)} files", "has none"
            )
        database.execute("CREATE INDEX by_id ON lines (id)")
        by_name = database.execute("SELECT max(is_multivent) FROM lines").fetchone()[0] or 0
        database.execute(f"PRAGMA user_version = {by_name}")
        database.commit()
    finally:
        database.close()


def _documents(name: str, file: IO[bytes], depth: int = 0) -> Iterator[tuple[str, IO[bytes]]]:
    """The files in an archive and in the archives that it holds; other files as they are.

    Raises:
        SpecError: archives are nested too deeply, or a member of one is a sparse file.
    """
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
                    assert content is not None  # of a regular file
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
    """The lines of a JSON lines file.

    Raises:
        SpecError: A line is invalid.
    """
    for number, line in enumerate(_lines(name, file), start=1):
        if not (line := line.replace(b"\0", b"").removeprefix(b"\xef\xbb\xbf").strip()):
            continue
        try:
            yield _line_record(json.loads(line.decode()))
        except (ValueError, RecursionError) as error:  # also no UTF-8, and no JSON
            problem = str(error) if type(error) is ValueError else "is not UTF-8 JSON"
            raise SpecError("path", f"{name}:{number}", LINE_RULE, problem) from None


def _lines(name: str, file: IO[Any]) -> Iterator[Any]:
    """The lines of a file.

    Raises:
        SpecError: one is too long.
    """
    for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), file.read(0)), 1):
        if len(line) > MAX_LINE_BYTES:
            rule = f"a line of at most {MAX_LINE_BYTES:,} bytes"
            raise SpecError("path", f"{name}:{number}", rule, "is longer")
        yield line


def _line_record(entry: Any) -> LineRecord:
    """The row of a parsed line; a ValueError says what is wrong with it."""
    if not isinstance(entry, dict):
        raise ValueError("is not a JSON object")
    id, text = entry.get("id"), entry.get("text")
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
    sure = entry.get("confidence")
    if sure is not None and not (_is_number(sure) and 0 <= sure <= 1):
        raise ValueError(f"has the confidence {sure!r}")
    return (_clean(id), _clean(text) or None, *box, start, end, sure, None, 0)


def _read_csv(name: str, file: IO[bytes], kind: int) -> Iterator[LineRecord]:
    """The lines of a CSV file of MultiVENT 2.0; none if it is of another kind.

    Raises:
        SpecError: it has no column `text`, or does not say of which video it is.
    """
    frame_file, speech_file = FRAME_FILE.fullmatch(name), SPEECH_FILE.fullmatch(name)
    if (kind == AUDIO and frame_file) or (kind == TEXT and speech_file):
        return
    key = next((match[1] for match in (frame_file, speech_file) if match), None)
    frame = int(frame_file[2]) if frame_file else None
    nowhere = [None] * (len(PLACE) + 1)
    if key:
        yield (key, None, *nowhere, frame, 1)  # empty files are files of this video too
    csv.field_size_limit(MAX_LINE_BYTES)  # hours of speech stand in one field
    text = io.TextIOWrapper(file, "utf-8-sig", errors="replace", newline="")
    rows = csv.reader(line.replace("\0", "") for line in _lines(name, text))
    try:
        header = [column.strip().lower() for column in next(filter(None, rows), [])]
        if not header:
            return
        if "text" not in header or not (key or "video_id" in header):
            rule = "a MultiVENT 2.0 CSV file with the columns video_id and text"
            raise SpecError("path", name, rule, f"has the columns {', '.join(header)}")
        for values in rows:
            row = dict(zip(header, values, strict=False))
            of = key or PurePosixPath(row["video_id"].strip()).stem
            if of and (said := _clean(row.get("text", "")).strip()):
                yield (_clean(of), said, *nowhere, frame, 1)
    except csv.Error as error:
        problem = f"cannot be read at line {rows.line_num} ({error})"
        raise SpecError("path", name, "a CSV file", problem) from None


def _clean(text: str) -> str:
    """Text that SQLite and Arrow can store."""
    return text.replace("\0", "").encode("utf-8", "replace").decode()


def _is_number(value: Any) -> TypeGuard[float]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) < MOST  # SQLite holds no larger integer; NaN is not less


def _names(parent: str) -> list[str]:
    """What a parent may be called in MultiVENT.

    >>> _names("000003/247.mp4")
    ['000003/247.mp4', '247']
    """
    return list(dict.fromkeys([parent, PurePosixPath(parent).stem]))


def _frames_per_second(item: dict[str, Any]) -> float | None:
    metadata = item.get("metadata")
    fps = (json.loads(metadata) if metadata else {}).get("fps")
    return fps if _is_number(fps) and fps > 0 else None


def _over_time(
    frames: dict[int, list[str]], fps: float | None
) -> Iterator[tuple[str, tuple[float, float]]]:
    """The lines of frames, each once as long as it stays; frames in ascending order.

    >>> list(_over_time({0: ["a"], 30: ["a", "b"], 60: ["b"]}, fps=30))
    [('a', (0.0, 1.5)), ('b', (0.5, 2.0))]
    >>> list(_over_time({0: ["a"], 30: ["a", "b"], 60: ["a"]}, fps=None))
    [('a', (nan, nan)), ('b', (nan, nan))]
    """
    if fps is None:
        every = dict.fromkeys(text for frame in frames.values() for text in frame)
        yield from ((text, (NAN, NAN)) for text in every)
        return
    numbers = list(frames)
    between = [(a + b) / 2 for a, b in itertools.pairwise(numbers)]
    borders = [*numbers[:1], *between, *numbers[-1:]]
    lines: list[list[Any]] = []  # text, frame numbers between which it is visible
    current: dict[str, list[Any]] = {}
    for texts, (start, until) in zip(frames.values(), itertools.pairwise(borders), strict=True):
        before, current = current, {}
        for text in dict.fromkeys(texts):
            current[text] = before.get(text) or [text, start, until]
            current[text][2] = until
            if text not in before:
                lines.append(current[text])
    yield from ((text, (start / fps, end / fps)) for text, start, end in lines)


def _lines_in_span(lines: list[Line], span: dict[str, Any] | None) -> list[Line]:
    """What belongs to a part of a parent, given the lines of the parent.

    >>> lines = [spread("one two", (0.0, 12.0), kind=AUDIO), spread("untimed")]
    >>> lines.append(spread("a sentence", (3.0, 6.0), kind=AUDIO))
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
        if whole[1] - whole[0] <= LONGEST_SENTENCE:
            return line.words if belongs(whole) else ()
        return tuple(word for word in line.words if belongs(word.times))

    return [Line(words) for words in map(words_inside, lines) if words]
