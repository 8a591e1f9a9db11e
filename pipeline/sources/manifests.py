"""Manifests: files whose rows name other files, or hold them: JSON lines, Parquet, COCO's JSON."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.decoding import Unreadable
from pipeline.decoding.untrusted import open_file
from pipeline.sources.files import SPECIAL
from pipeline.sources.media import BYTES_PER_SHARD
from pipeline.sources.text import UNREADABLE, Lines, parse_line, parse_object

LINES = (".jsonl", ".jsonl.gz")
TABLE = ".parquet"
ONE_VALUE = ".json"
#: A shard is a task's work; the files that a row names are larger than the row.
ROWS_PER_SHARD = 256
LINE_BYTES_PER_SHARD = 64 << 10
#: Rows of a table that are larger than this hold files: their row groups are read as a whole.
FILE_BYTES = 16 << 10
#: Rows of a table that are in memory together.
ROWS_AT_ONCE = 16
#: A manifest that is one JSON value is in memory as a whole.
MAX_VALUE_BYTES = 1 << 30
#: The footer of a table of a few bytes can claim 2^63 rows, each of which would be listed.
MAX_TABLE_ROWS = 100_000_000


@dataclass(frozen=True)
class ManifestEntry:
    """The fields of one file in a manifest.

    Attributes:
        location: Returns the location of the entry, for errors about an entry without an id.
        fields: The fields by name.
        number: Number of the row, in a table.
    """

    location: Callable[[], str]
    fields: dict[str, Any]
    number: int | None = None


@dataclass(frozen=True)
class MalformedEntry:
    """An entry of a manifest, or a whole manifest, that cannot be read.

    Attributes:
        where: Location of the entry.
        problem: The reason.
    """

    location: str
    problem: Unreadable | OSError


def shards(fs: Any, folder: str, manifest: str, num_bytes: int | None) -> Iterator[dict[str, Any]]:
    """Yields the shards of a manifest, `{"manifest": path below the folder, ...}`.

    A shard of lines is a byte range, a shard of a table a range of rows. The shards of a COCO file
    contain its entries, because captions are stored apart from images and only the whole file can
    be read.
    """
    name = manifest.lower()
    if name.endswith(".gz") or (num_bytes == SPECIAL and name.endswith(LINES)):  # not entered
        yield {"manifest": manifest, "start": 0, "end": None}
    elif name.endswith(LINES):
        for start in range(0, num_bytes or 0, LINE_BYTES_PER_SHARD):
            end = min(start + LINE_BYTES_PER_SHARD, num_bytes or 0)
            yield {"manifest": manifest, "start": start, "end": end}
    elif name.endswith(TABLE):
        try:
            with Table(fs, f"{folder}/{manifest}") as table:
                yield from ({"manifest": manifest, "rows": rows} for rows in table.row_ranges())
        except (Unreadable, OSError) as error:
            yield {"manifest": manifest, "problem": _told(error)}
    else:
        try:
            with open_file(fs, f"{folder}/{manifest}") as stream:
                data = stream.read(MAX_VALUE_BYTES + 1)
            if len(data) > MAX_VALUE_BYTES:
                problem = f"a manifest must be at most {MAX_VALUE_BYTES:,} bytes, got more"
                raise Unreadable("too long", problem)
            rows = _read_value(data, manifest)
        except (Unreadable, OSError) as error:
            yield {"manifest": manifest, "problem": _told(error)}
            return
        for first in range(0, len(rows), ROWS_PER_SHARD):
            yield {"manifest": manifest, "listed": rows[first : first + ROWS_PER_SHARD]}


def read(fs: Any, folder: str, shard: dict[str, Any]) -> Iterator[ManifestEntry | MalformedEntry]:
    """The rows of a shard that are not a table's, in order."""
    manifest = shard["manifest"]
    if "problem" in shard:
        yield MalformedEntry(manifest, Unreadable(*shard["problem"]))
    elif "listed" in shard:
        yield from (
            ManifestEntry(partial(str, location), fields) for location, fields in shard["listed"]
        )
    else:
        yield from _read_lines(fs, folder, manifest, shard["start"], shard["end"])


def _read_lines(
    fs: Any, folder: str, manifest: str, start: int, end: int | None
) -> Iterator[ManifestEntry | MalformedEntry]:
    lines = Lines(fs, f"{folder}/{manifest}", start, end)

    def location() -> str:
        return f"{manifest}:{lines.number}"

    try:
        for line in lines:
            try:
                fields = parse_object(line)
            except Unreadable as error:
                yield MalformedEntry(location(), error)
                continue
            yield ManifestEntry(location, fields)
    except Unreadable as error:
        yield MalformedEntry(manifest, error)
    except UNREADABLE as error:
        problem = f"{type(error).__name__}: {error}"
        yield MalformedEntry(f"{manifest}#byte={lines.offset}", Unreadable("unreadable", problem))


def _told(error: Unreadable | OSError) -> list[str]:
    if isinstance(error, Unreadable):
        return [error.reason, error.detail]
    return ["unreadable", str(error)]


# -- one JSON value ----------------------------------------------------------------------------


def _read_value(data: bytes, manifest: str) -> list[tuple[str, dict[str, Any]]]:
    """(location, fields) of each image of a JSON file in one of its forms."""
    try:
        rows = rows_of_value(parse_line(data))
    except ValueError as error:  # a UnicodeError is a ValueError
        raise Unreadable("damaged manifest", str(error)) from None
    return [(f"{manifest}#{number}", image) for number, image in enumerate(rows)]


def rows_of_value(value: Any) -> list[dict[str, Any]]:
    """The images of a JSON value in one of its forms, each with its `captions`.

    Raises:
        Unreadable: it has another form.
    """
    images = value.get("images") if isinstance(value, dict) else value
    if not isinstance(images, list) or not all(isinstance(image, dict) for image in images):
        forms = "neither a list of objects nor COCO's {images: [...], annotations: [...]}"
        raise Unreadable("damaged manifest", forms)
    if not isinstance(value, dict):
        return images
    is_karpathy = any("sentences" in image for image in images)
    return _karpathy(images) if is_karpathy else _coco(images, value.get("annotations"))


def _coco(images: list[dict[str, Any]], annotations: Any) -> list[dict[str, Any]]:
    """COCO's form: captions stand apart and name their image; other annotations are not read."""
    captions: dict[Any, list[Any]] = {}
    for annotation in annotations if isinstance(annotations, list) else []:
        if isinstance(annotation, dict) and "caption" in annotation:
            captions.setdefault(_key(annotation.get("image_id")), []).append(annotation["caption"])
    return [{**image, "captions": captions.get(_key(image.get("id")), [])} for image in images]


def _karpathy(images: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Karpathy's form of COCO and Flickr30K.

    >>> _karpathy([{"filepath": "val", "filename": "7.jpg", "sentences": [{"raw": "A cat. "}]}])
    [{'id': '7', 'file_name': 'val/7.jpg', 'captions': ['A cat. ']}]
    """
    rows = []
    for image in images:
        rest = dict(image)
        name = str(rest.pop("filename", ""))
        sentences = rest.pop("sentences", None)
        sentences = sentences if isinstance(sentences, list) else []
        captions = [s.get("raw") if isinstance(s, dict) else s for s in sentences]
        path = "/".join(part for part in (str(rest.pop("filepath", "")), name) if part)
        rest.pop("sentids", None)
        image_id = rest.pop("cocoid", None) or PurePosixPath(name).stem
        rows.append({"id": image_id, "file_name": path or None, "captions": captions, **rest})
    return rows


def _key(image_id: Any) -> str:
    return f"{image_id}"  # some writers of COCO's form make strings of the numbers


# -- tables ------------------------------------------------------------------------------------


class Table:
    """A Parquet file whose rows are asked for one by one, forward; a few are in memory together.

    Raises:
        Unreadable: it is no Parquet file, or a damaged one.
    """

    def __init__(self, fs: Any, path: str):
        self.path = path
        self._stream = open_file(fs, path)
        try:
            # Not a whole row group at once: its rows may hold hundreds of pictures.
            self._file = pq.ParquetFile(self._stream, buffer_size=1 << 20, pre_buffer=False)
        except (pa.ArrowException, OSError, ValueError) as error:
            self._stream.close()
            raise _damage(error) from None
        groups = range(self._file.num_row_groups)
        counts = (self._file.metadata.row_group(i).num_rows for i in groups)
        self._starts = list(itertools.accumulate(counts, initial=0))
        if self._starts[-1] > MAX_TABLE_ROWS:
            self._stream.close()
            problem = f"a table must have at most {MAX_TABLE_ROWS:,} rows, got {self._starts[-1]:,}"
            raise Unreadable("damaged manifest", problem)
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._batch: pa.RecordBatch | None = None
        self._first, self._group_end = 0, 0

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stream.close()

    def row_ranges(self) -> Iterator[list[int]]:
        """Yields the [start, end) of row ranges that are read independently."""
        first = num_bytes = 0
        for group, (start, stop) in enumerate(itertools.pairwise(self._starts)):
            about = self._file.metadata.row_group(group)
            own = about.total_byte_size
            too_much = stop - first > ROWS_PER_SHARD or num_bytes + own > BYTES_PER_SHARD
            if start > first and too_much:
                yield [first, start]
                first, num_bytes = start, 0
            num_bytes += own
            # Of rows that only name files any range will do.
            while own < FILE_BYTES * about.num_rows and stop - first > ROWS_PER_SHARD:
                yield [first, first + ROWS_PER_SHARD]
                first += ROWS_PER_SHARD
        if first < self._starts[-1]:
            yield [first, self._starts[-1]]

    def row(self, number: int) -> dict[str, Any]:
        """A row as plain values.

        Raises:
            Unreadable: it is not there, or damaged.
            OSError: of the storage.
        """
        if not 0 <= number < self._starts[-1]:
            raise Unreadable("damaged manifest", f"{self.path} has no row {number}")
        try:
            while self._batch is None or not 0 <= number - self._first < len(self._batch):
                self._advance(number)
            return self._batch.slice(number - self._first, 1).to_pylist()[0]
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _damage(error) from None

    def _advance(self, number: int) -> None:
        """Reads the next rows, in the row group of the wanted one."""
        behind = self._first + (len(self._batch) if self._batch is not None else 0)
        if not behind <= number < self._group_end or self._batch is None:
            group = max(i for i, start in enumerate(self._starts[:-1]) if start <= number)
            self._batches = self._file.iter_batches(ROWS_AT_ONCE, row_groups=[group])
            behind, self._group_end = self._starts[group], self._starts[group + 1]
        batch = next(self._batches, None)
        if batch is None:
            raise Unreadable("damaged manifest", f"{self.path} ends before row {number}")
        self._batch, self._first = batch, behind


def _damage(error: Exception) -> Unreadable | OSError:
    """What an error in reading a table means: Arrow's have no number, those of a storage have."""
    if isinstance(error, OSError):
        is_transient = isinstance(error, ConnectionError | TimeoutError)
        if is_transient or error.errno is not None:
            return error
    return Unreadable("damaged manifest", f"{type(error).__name__}: {error}")


def plain(value: Any) -> Any:
    """A value as JSON can hold it: bytes are left out, other types become what they print as.

    >>> plain({"a": [1, float("nan")], "b": b"x"})
    {'a': [1, None]}
    """
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items() if not isinstance(v, bytes)}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value if not isinstance(v, bytes)]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
