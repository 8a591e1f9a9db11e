"""Reads manifests, whose rows contain images or their names.

JSON lines, Parquet and COCO JSON are supported.
"""

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

from pipeline.data.decode import Unreadable
from pipeline.data.decode.untrusted import open_file
from pipeline.data.files import SPECIAL_FILE_SIZE
from pipeline.data.media import BYTES_PER_SHARD
from pipeline.data.rows import to_rows
from pipeline.data.text import UNREADABLE, Lines, parse_line, parse_object

LINES_SUFFIXES = (".jsonl", ".jsonl.gz")
TABLE_SUFFIX = ".parquet"
JSON_SUFFIX = ".json"
#: Maximum numbers of rows and bytes per shard. Rows are small, but the files they name are not.
ROWS_PER_SHARD = 4096
LINE_BYTES_PER_SHARD = 1 << 20
#: Table rows above this size contain files. Their row groups are not divided between shards.
FILE_BYTES = 16 << 10
#: Number of table rows in memory at the same time.
ROWS_PER_BATCH = 16
#: Maximum size of a JSON manifest, which is read into memory.
MAX_VALUE_BYTES = 1 << 30
#: Maximum number of rows: the footer of a tiny file may claim 2^63 rows, which would all be listed.
MAX_TABLE_ROWS = 100_000_000


@dataclass(frozen=True)
class ManifestEntry:
    """The fields of one file in a manifest.

    Attributes:
        number: Number of the row in a table, or None for other manifests.
    """

    location: Callable[[], str]
    fields: dict[str, Any]
    number: int | None = None


@dataclass(frozen=True)
class MalformedEntry:
    """Entry of a manifest, or a complete manifest, that cannot be read."""

    location: str
    problem: Unreadable | OSError


def shards(fs: Any, folder: str, manifest: str, num_bytes: int | None) -> Iterator[dict[str, Any]]:
    """Yields the shards of a manifest, `{"manifest": path below the folder, ...}`.

    A shard of lines is a byte range, and a shard of a table is a range of rows. Shards of JSON
    manifests contain their entries, because COCO files store captions separately from images and
    must be parsed as a whole.
    """
    name = manifest.lower()
    is_lines = name.endswith(LINES_SUFFIXES)
    if name.endswith(".gz") or (num_bytes == SPECIAL_FILE_SIZE and is_lines):  # not seekable
        yield {"manifest": manifest, "start": 0, "end": None}
    elif is_lines:
        for start in range(0, num_bytes or 0, LINE_BYTES_PER_SHARD):
            end = min(start + LINE_BYTES_PER_SHARD, num_bytes or 0)
            yield {"manifest": manifest, "start": start, "end": end}
    elif name.endswith(TABLE_SUFFIX):
        try:
            with Table(fs, f"{folder}/{manifest}") as table:
                yield from ({"manifest": manifest, "rows": rows} for rows in table.row_ranges())
        except (Unreadable, OSError) as error:
            yield {"manifest": manifest, "problem": _error_fields(error)}
    else:
        try:
            with open_file(fs, f"{folder}/{manifest}") as stream:
                data = stream.read(MAX_VALUE_BYTES + 1)
            if len(data) > MAX_VALUE_BYTES:
                problem = f"a manifest must be at most {MAX_VALUE_BYTES:,} bytes, got more"
                raise Unreadable("too long", problem)
            rows = _read_value(data, manifest)
        except (Unreadable, OSError) as error:
            yield {"manifest": manifest, "problem": _error_fields(error)}
            return
        for first in range(0, len(rows), ROWS_PER_SHARD):
            yield {"manifest": manifest, "listed": rows[first : first + ROWS_PER_SHARD]}


def read(fs: Any, folder: str, shard: dict[str, Any]) -> Iterator[ManifestEntry | MalformedEntry]:
    """Yields the entries of a shard in order. See `Table` for tables."""
    manifest = shard["manifest"]
    if "problem" in shard:
        yield MalformedEntry(manifest, Unreadable(*shard["problem"]))
    elif "listed" in shard:
        for location, fields in shard["listed"]:
            yield ManifestEntry(partial(str, location), fields)
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


def _error_fields(error: Unreadable | OSError) -> list[str]:
    if isinstance(error, Unreadable):
        return [error.reason, error.detail]
    return ["unreadable", str(error)]


# -- one JSON value ----------------------------------------------------------------------------


def _read_value(data: bytes, manifest: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns the location and the fields of each image in a JSON manifest."""
    try:
        rows = parse_rows(parse_line(data))
    except ValueError as error:  # includes UnicodeError
        raise Unreadable("corrupted manifest", str(error)) from None
    return [(f"{manifest}#{number}", image) for number, image in enumerate(rows)]


def parse_rows(value: Any) -> list[dict[str, Any]]:
    """Returns the images, with their `captions`, of a list of objects, or of COCO or Karpathy JSON.

    Raises:
        Unreadable: The value has a different format.
    """
    images = value.get("images") if isinstance(value, dict) else value
    if not isinstance(images, list) or not all(isinstance(image, dict) for image in images):
        problem = "neither a list of objects nor COCO's {images: [...], annotations: [...]}"
        raise Unreadable("corrupted manifest", problem)
    if not isinstance(value, dict):
        return images
    is_karpathy = any("sentences" in image for image in images)
    return _karpathy(images) if is_karpathy else _coco(images, value.get("annotations"))


def _coco(images: list[dict[str, Any]], annotations: Any) -> list[dict[str, Any]]:
    """Returns the images of a COCO file with their captions. Other annotations are ignored."""
    captions: dict[Any, list[Any]] = {}
    for annotation in annotations if isinstance(annotations, list) else []:
        if isinstance(annotation, dict) and "caption" in annotation:
            captions.setdefault(_key(annotation.get("image_id")), []).append(annotation["caption"])
    return [{**image, "captions": captions.get(_key(image.get("id")), [])} for image in images]


def _karpathy(images: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Converts a file in Karpathy's format, which has splits of COCO and Flickr30K, to images.

    >>> _karpathy([{"filepath": "val", "filename": "7.jpg", "sentences": [{"raw": "A cat. "}]}])
    [{'id': '7', 'file_name': 'val/7.jpg', 'captions': ['A cat. ']}]
    """
    rows = []
    for image in images:
        fields = dict(image)
        name = str(fields.pop("filename", ""))
        sentences = fields.pop("sentences", None)
        sentences = sentences if isinstance(sentences, list) else []
        captions = [s.get("raw") if isinstance(s, dict) else s for s in sentences]
        path = "/".join(part for part in (str(fields.pop("filepath", "")), name) if part)
        fields.pop("sentids", None)
        image_id = fields.pop("cocoid", None) or PurePosixPath(name).stem
        rows.append({"id": image_id, "file_name": path or None, "captions": captions, **fields})
    return rows


def _key(image_id: Any) -> str:
    return f"{image_id}"  # some COCO files store ids as strings in one of the two lists


# -- tables ------------------------------------------------------------------------------------


class Table:
    """Parquet file that is read in ascending order of rows, with few rows in memory at a time.

    Raises:
        Unreadable: The file is not a valid Parquet file.
    """

    def __init__(self, fs: Any, path: str):
        self.path = path
        self._stream = open_file(fs, path)
        try:
            # Without pre-buffering, because a row group may contain hundreds of images.
            self._file = pq.ParquetFile(self._stream, buffer_size=1 << 20, pre_buffer=False)
        except (pa.ArrowException, OSError, ValueError) as error:
            self._stream.close()
            raise _classify_error(error) from None
        groups = range(self._file.num_row_groups)
        counts = (self._file.metadata.row_group(i).num_rows for i in groups)
        self._starts = list(itertools.accumulate(counts, initial=0))
        if self._starts[-1] > MAX_TABLE_ROWS:
            self._stream.close()
            problem = f"a table must have at most {MAX_TABLE_ROWS:,} rows, got {self._starts[-1]:,}"
            raise Unreadable("corrupted manifest", problem)
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._batch: pa.RecordBatch | None = None
        self._first, self._group_end = 0, 0

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stream.close()

    def row_ranges(self) -> Iterator[list[int]]:
        """Yields the start and end of the ranges of rows that are read as shards."""
        first = num_bytes = 0
        for group, (start, stop) in enumerate(itertools.pairwise(self._starts)):
            row_group = self._file.metadata.row_group(group)
            group_bytes = row_group.total_byte_size
            too_many_rows = stop - first > ROWS_PER_SHARD
            if start > first and (too_many_rows or num_bytes + group_bytes > BYTES_PER_SHARD):
                yield [first, start]
                first, num_bytes = start, 0
            num_bytes += group_bytes
            # Row groups without files may be divided anywhere.
            has_files = group_bytes >= FILE_BYTES * row_group.num_rows
            while not has_files and stop - first > ROWS_PER_SHARD:
                yield [first, first + ROWS_PER_SHARD]
                first += ROWS_PER_SHARD
        if first < self._starts[-1]:
            yield [first, self._starts[-1]]

    def row(self, number: int) -> dict[str, Any]:
        """Returns the fields of row `number`, from 0. Reading in ascending order is fastest.

        Raises:
            Unreadable: The row does not exist or is corrupted.
            OSError: The storage fails.
        """
        if not 0 <= number < self._starts[-1]:
            raise Unreadable("corrupted manifest", f"{self.path} has no row {number}")
        try:
            while self._batch is None or not 0 <= number - self._first < len(self._batch):
                self._advance(number)
            return to_rows(self._batch.slice(number - self._first, 1))[0]
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _classify_error(error) from None

    def _advance(self, number: int) -> None:
        """Reads the next batch from the row group that contains a row."""
        batch_end = self._first + (len(self._batch) if self._batch is not None else 0)
        if not batch_end <= number < self._group_end or self._batch is None:
            group = max(i for i, start in enumerate(self._starts[:-1]) if start <= number)
            self._batches = self._file.iter_batches(ROWS_PER_BATCH, row_groups=[group])
            batch_end, self._group_end = self._starts[group], self._starts[group + 1]
        batch = next(self._batches, None)
        if batch is None:
            raise Unreadable("corrupted manifest", f"{self.path} ends before row {number}")
        self._batch, self._first = batch, batch_end


def _classify_error(error: Exception) -> Unreadable | OSError:
    """Converts Arrow errors to `Unreadable`. Storage errors, which have an errno, are unchanged."""
    if isinstance(error, OSError):
        is_transient = isinstance(error, ConnectionError | TimeoutError)
        if is_transient or error.errno is not None:
            return error
    return Unreadable("corrupted manifest", f"{type(error).__name__}: {error}")


def to_json_value(value: Any) -> Any:
    """Returns a JSON-compatible copy of a value, without bytes. Other types become strings.

    >>> to_json_value({"a": [1, float("nan")], "b": b"x"})
    {'a': [1, None]}
    """
    if isinstance(value, Mapping):
        return {str(k): to_json_value(v) for k, v in value.items() if not isinstance(v, bytes)}
    if isinstance(value, list | tuple):
        return [to_json_value(v) for v in value if not isinstance(v, bytes)]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
