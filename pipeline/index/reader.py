"""Read access to an index, including its rejects and its lease."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import posixpath
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import lance
import numpy as np
import pyarrow as pa
from fsspec import AbstractFileSystem

from pipeline import config
from pipeline.config import JobError, SpecError, absolute, digest, within
from pipeline.extras import MissingExtra
from pipeline.index import ITEMS, LEASE, PARTS, REJECTS, missing_index
from pipeline.index.artefacts import load_artefact
from pipeline.index.info import (
    CandidatesInfo,
    PooledInfo,
    RepresentationInfo,
    RerankInfo,
    candidates_infos,
    find_representation,
    format_versions,
    pooled_infos,
    representation_infos,
    rerank_infos,
)
from pipeline.index.lease import Lease
from pipeline.index.positions import STORED_EXTENTS, decode_positions
from pipeline.paths import is_uri, locate
from pipeline.registry import CANDIDATES, CODECS
from pipeline.runtime.atomic import check_writable
from pipeline.schema import FORMAT_VERSION, REJECT

if TYPE_CHECKING:  # these import torch, which most readers do not need
    from pipeline.compression.codecs import Codec

#: URI schemes of an index: those that both Lance and fsspec can write.
SCHEMES = ("file", "s3", "gs", "az")


def part_uri(uri: str, *names: str) -> str:
    """Returns the absolute URI of a part of an index.

    `file://` URIs become paths, because Lance decodes `%20` in them and fsspec does not.
    """
    if uri.startswith("file://"):
        uri = locate(uri)[1]
    return posixpath.join(absolute(uri), *names)


def open_folder(uri: str, *names: str) -> tuple[AbstractFileSystem, str]:
    """Returns the file system and the path of a folder of an index. Listings are not cached."""
    return locate(part_uri(uri, *names))


def check_location(uri: str) -> None:
    """Raises `SpecError` if no index can be written at the URI. Does not write."""
    scheme = _check_scheme(uri)
    with access_errors(uri):
        open_folder(uri)  # raises if the package of the storage is not installed
    if scheme != "file":
        return
    check_writable(uri, "index")
    check_contents(uri)


def check_contents(uri: str) -> None:
    """Raises `SpecError` if the URI is neither an index nor new or empty."""
    if exists(uri) and not contains_index(uri):
        raise SpecError("index", uri, "an index, or a new or empty folder", "has other contents")


def _check_scheme(uri: str) -> str:
    if not is_uri(uri):
        return "file"
    scheme = uri.partition("://")[0]
    if scheme not in SCHEMES:
        rule = f"a local path, or a URI with one of the schemes {', '.join(SCHEMES)}"
        raise SpecError("index", uri, rule, f"has the scheme {scheme}")
    return scheme


def open_dataset(uri: str, version: int | None = None) -> lance.LanceDataset:
    """Opens the dataset of the items in the given version, or in the latest version.

    Raises:
        SpecError: The index or the version does not exist, or the index is corrupted.
    """
    _check_scheme(uri)
    with within("index"):
        items = part_uri(uri, ITEMS)
    try:
        dataset = lance.dataset(items, version=version)
    except (ValueError, OSError, OverflowError) as error:
        if version is not None:
            last = open_dataset(uri).version
            rule = f"a stored version from 1 to {last}"
            raise SpecError("version", version, rule, "does not exist") from None
        if contains_index(uri):
            raise _corrupted(uri, first_line(error)) from None
        raise missing_index(uri) from None
    for version in format_versions(dataset.schema) - {FORMAT_VERSION}:
        rule = f"an index of format {FORMAT_VERSION}"
        raise SpecError("index", uri, rule, f"has format {version}")
    return dataset


def check_data_files(uri: str, dataset: lance.LanceDataset) -> None:
    """Raises `SpecError` if data files are missing or truncated, with a single listing."""
    expected_sizes = {
        file.path: file.file_size_bytes
        for fragment in dataset.get_fragments()
        for file in fragment.data_files()
    }
    if not expected_sizes:
        return
    filesystem, path = open_folder(uri, ITEMS, "data")
    sizes = {}
    if filesystem.exists(path):
        entries = filesystem.ls(path, detail=True)
        sizes = {posixpath.basename(entry["name"]): entry["size"] for entry in entries}
    missing = [name for name in expected_sizes if name not in sizes]
    resized = [n for n, size in expected_sizes.items() if size and size != sizes.get(n)]
    for problem, files in (("are missing", missing), ("have another size", resized)):
        if files:
            detail = f"{len(files)} of {len(expected_sizes)} data files {problem}"
            raise _corrupted(uri, detail)


def exists(uri: str) -> bool:
    """Checks whether the URI is a file or a folder that is not empty."""
    with access_errors(uri):
        filesystem, path = open_folder(uri)
        return filesystem.exists(path) and bool(filesystem.ls(path))


def contains_index(uri: str) -> bool:
    """Checks whether the URI contains an index. The index may be incomplete."""
    with access_errors(uri):
        filesystem, path = open_folder(uri)
        return any(filesystem.exists(posixpath.join(path, name)) for name in PARTS)


@contextlib.contextmanager
def access_errors(uri: str, field: str = "index") -> Iterator[None]:
    """Translates the errors of storage libraries to `SpecError`."""
    try:
        yield
    except MissingExtra:
        raise
    except Exception as error:
        is_denied = isinstance(error, PermissionError) and is_uri(uri)  # such as wrong keys
        if isinstance(error, OSError) and not is_denied:
            raise
        problem = f"cannot be reached ({type(error).__name__}: {first_line(error)})"
        raise SpecError(field, uri, "a reachable URI", problem) from None


def first_line(error: Exception) -> str:
    """Shortens an error message to its first line and removes the source locations of Lance."""
    return re.sub(r",? \S+\.rs:\d+:\d+", "", config.first_line(error))[:200]


@contextlib.contextmanager
def corruption_errors(uri: str) -> Iterator[None]:
    """Translates read errors of data files to `SpecError`.

    The body must not raise Arrow errors for other reasons.
    """
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise _corrupted(uri, first_line(error)) from None


def _corrupted(uri: str, detail: str) -> SpecError:
    return SpecError("index", uri, "an intact index", f"is corrupted ({detail})")


class Edition(NamedTuple):
    """Identifies a version of an index, even if another index has replaced it at the same URI.

    `content` hashes the schema and the names of the data files, which are random.
    """

    version: int
    content: str


class IndexReader:
    """Read-only view of one version of an index.

    Args:
        uri: URI of the index.
        version: Version to read. Defaults to the latest one.

    Raises:
        SpecError: See `open_dataset`.
    """

    def __init__(self, uri: str, version: int | None = None):
        self.uri = uri
        self.dataset = open_dataset(uri, version)
        self._codecs: dict[str, Codec] = {}
        self._generators: dict[str, Any] = {}

    @property
    def version(self) -> int:
        """Lance version of this view."""
        return self.dataset.version

    @property
    def edition(self) -> Edition:
        """Identifier of the version.

        Another index at the same URI may have the same number.
        """
        names = [file.path for f in self.dataset.get_fragments() for file in f.data_files()]
        names.append(str(self.dataset.schema))
        return Edition(self.version, hashlib.sha256("\n".join(names).encode()).hexdigest()[:16])

    @functools.cached_property
    def _num_items(self) -> int:
        return self.dataset.count_rows()

    def __len__(self) -> int:
        return self._num_items

    @functools.cached_property
    def schema(self) -> pa.Schema:
        """Schema of this version."""
        return self.dataset.schema

    @functools.cached_property
    def _representations(self) -> dict[str, RepresentationInfo]:
        return representation_infos(self.schema)  # cached: there may be hundreds of columns

    def representations(self) -> dict[str, RepresentationInfo]:
        """Returns the stored representations by name, without their prefixes."""
        return self._representations

    def representation(self, name: str) -> RepresentationInfo:
        """Returns a representation, or the prefix of a nested one for a name such as `NAME@16`.

        Raises:
            SpecError: The index has no such representation, see `find_representation`.
        """
        return find_representation(self.representations(), name)

    @functools.cached_property
    def pooled_columns(self) -> dict[str, PooledInfo]:
        """Columns of single vectors by name."""
        return pooled_infos(self.schema)

    @functools.cached_property
    def candidates_columns(self) -> dict[str, CandidatesInfo]:
        """Columns with codes of candidate generators by name."""
        return candidates_infos(self.schema)

    @functools.cached_property
    def rerank_columns(self) -> dict[str, RerankInfo]:
        """Columns for reranking by name."""
        return rerank_infos(self.schema)

    def codec(self, name: str) -> Codec:
        """Returns the codec of a representation in its fitted state. Codecs are cached."""
        info = self.representation(name)
        if info.column not in self._codecs:
            state = None
            if info.codec_artefact:
                state = load_artefact(self.uri, info.codec_artefact, info.codec_fit)
            self._codecs[info.column] = CODECS.build(CODECS.resolve(info.codec), state)
        return self._codecs[info.column]

    def generator(self, name: str) -> Any:
        """Returns the candidate generator of a column in its fitted state.

        Raises:
            SpecError: Its artefact is missing or corrupted, or was fitted for other vectors.
        """
        if name not in self._generators:
            info = self.candidates_columns[name]
            state = load_artefact(self.uri, info.artefact, info.fit)
            spec = CANDIDATES.resolve(info.generator)
            self._generators[name] = CANDIDATES.build(spec, state)
        return self._generators[name]

    def corruption_errors(self) -> contextlib.AbstractContextManager[None]:
        """Returns the context `corruption_errors` of this index."""
        return corruption_errors(self.uri)

    def fragments(self, shard: tuple[int, int] | None = None) -> list[lance.LanceFragment]:
        """Returns the fragments of the index, or of one of its shards, in storage order.

        Args:
            shard: (i, n) for the i-th of n contiguous groups of fragments with about the same
                number of rows. Groups can be empty if n exceeds the number of fragments.

        Raises:
            SpecError: The shard is invalid.
        """
        fragments = self.dataset.get_fragments()
        if shard is None:
            return fragments
        index, num_shards = shard
        if num_shards < 1 or not 0 <= index < num_shards:
            raise SpecError("shard", shard, "a pair (i, n) with n >= 1 and 0 <= i < n")
        rows = np.array([fragment.count_rows() for fragment in fragments], np.int64)
        # The middle row of a fragment determines its shard.
        middles = 2 * rows.cumsum() - rows
        shards = middles * num_shards // (2 * max(int(rows.sum()), 1))
        return [f for f, s in zip(fragments, shards.tolist(), strict=True) if s == index]

    def batches(
        self,
        columns: Sequence[str],
        *,
        filter: str | None = None,
        batch_rows: int = 1024,
        fragments: Sequence[lance.LanceFragment] | None = None,
        with_address: bool = False,
        ahead: int | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yields the rows in storage order in batches. The memory use is constant.

        Args:
            columns: Columns to read.
            filter: SQL condition.
            batch_rows: Maximum number of rows per batch.
            fragments: Fragments to read, ascending. Defaults to all fragments.
            with_address: Whether to add a column `_rowaddr`, whose lower 32 bits are the offset of
                the row in its fragment; deleted rows leave gaps.
            ahead: Number of batches to read ahead, or None for the default of Lance.

        Raises:
            SpecError: Data files are missing or corrupted.
        """
        scanner = self.dataset.scanner(
            columns=list(columns),
            filter=filter,
            batch_size=batch_rows,
            scan_in_order=True,
            fragments=fragments,
            with_row_address=with_address,
            batch_readahead=ahead,
        )
        with self.corruption_errors():
            yield from scanner.to_batches()

    def tokens(
        self, representation: str, *, filter: str | None = None, batch_rows: int = 1024
    ) -> Iterator[tuple[pa.RecordBatch, np.ndarray, np.ndarray]]:
        """Yields the decoded vectors of all rows that have the representation.

        Args:
            representation: Name of the representation.
            filter: SQL condition.
            batch_rows: Maximum number of rows per batch.

        Yields:
            (items, vectors, lengths): Columns `item_id` and `parent_id`, vectors (T, D) as returned
            by `Codec.decode`, and number of vectors per row (B,) int64.
        """
        info, codec = self.representation(representation), self.codec(representation)
        filter = combine_filters(filter, f"`{info.column}` IS NOT NULL")
        ids = ["item_id", "parent_id"]
        for batch in self.batches([*ids, info.column], filter=filter, batch_rows=batch_rows):
            vectors, lengths = codec.decode(batch[info.column], info.dim)
            yield batch.select(ids), *first_vectors(vectors, lengths, info.max_vectors)

    def items(self, item_ids: Sequence[str], columns: Sequence[str] | None = None) -> pa.Table:
        """Returns the rows of the given items, in the given order. Unknown ids are skipped.

        Token positions have their in-memory types, see `pipeline.index.positions`.
        """
        columns = list(columns) if columns else None
        if columns is not None and "item_id" not in columns:
            columns.append("item_id")
        with self.corruption_errors():
            table = self.dataset.to_table(columns=columns, filter=id_filter(item_ids))
        row_by_id = {item_id: i for i, item_id in enumerate(table["item_id"].to_pylist())}
        rows = [row_by_id[item_id] for item_id in item_ids if item_id in row_by_id]
        table = table.take(pa.array(rows, pa.int64()))
        return decode_positions(table) if STORED_EXTENTS in table.schema.types else table

    def item(self, item_id: str, columns: Sequence[str]) -> pa.Table:
        """Returns the row of an item.

        Raises:
            SpecError: The item does not exist.
        """
        row = self.items([item_id], columns)
        if not row.num_rows:
            raise SpecError("item_id", item_id, "the id of an item in the index")
        return row

    def content_key(self, columns: Iterable[str]) -> str:
        """Returns a hash that changes with the content of the columns. Unknown ones are skipped.

        It is computed from fragment numbers and the names of deletion files and data files with the
        columns. It therefore reads no data, and does not change when other columns are added or a
        commit changes no row.
        """
        ids = self.field_ids(columns)
        wanted = set(itertools.chain(*ids.values()))
        fragments = [
            [fragment.fragment_id, files_with(fragment, wanted), fragment.deletion_file()]
            for fragment in self.dataset.get_fragments()
        ]
        return digest([ids, fragments])

    def field_ids(self, columns: Iterable[str]) -> dict[str, list[int]]:
        """Returns the Lance field ids of columns by name.

        Unknown columns are skipped.
        """
        fields = {field.name(): field for field in self.dataset.lance_schema.fields()}
        return {name: nested_ids(fields[name]) for name in columns if name in fields}

    def rejects(self) -> pa.Table:
        """Returns the table of rejects, see `pipeline.schema.REJECT`."""
        try:
            return lance.dataset(part_uri(self.uri, REJECTS)).to_table()
        except (ValueError, OSError):
            return REJECT.empty_table()

    def lease(self) -> Lease | None:
        """Returns the lease of the current writer.

        Returns None if it is free or its holder has died.
        """
        lease = Lease.from_dataset(self.dataset)
        if lease is None or not lease.owner:
            return None
        lease = lease.renewed(part_uri(self.uri, LEASE))
        return None if lease.is_free(time.time()) else lease


def open_edition(uri: str, edition: Edition) -> IndexReader:
    """Opens a version of an index, or raises `SpecError` if it no longer exists."""
    index = IndexReader(uri, edition.version)
    if index.edition != edition:
        raise SpecError("index", uri, "the index being served", "was replaced by another")
    return index


def get_fragment(dataset: lance.LanceDataset, number: int) -> lance.LanceFragment:
    """Returns a fragment of a dataset, or raises `JobError` without one."""
    fragment = dataset.get_fragment(number)
    if fragment is None:
        raise JobError(f"{dataset.uri} has no fragment {number} in version {dataset.version}")
    return fragment


def nested_ids(field: Any) -> list[int]:
    """Returns the ids of a Lance field and of all fields that are nested in it."""
    return [field.id(), *(i for child in field.children() for i in nested_ids(child))]


def files_with(fragment: lance.LanceFragment, field_ids: Iterable[int]) -> list[str]:
    """Returns the names of the data files of a fragment that contain any of the fields, sorted."""
    wanted = set(field_ids)
    return sorted(file.path for file in fragment.data_files() if wanted & set(file.fields))


def first_vectors(
    vectors_TD: np.ndarray, lengths_B: np.ndarray, max_vectors: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most the first `max_vectors` vectors of each item, and their numbers.

    >>> vectors = np.arange(5).reshape(5, 1)
    >>> [part.tolist() for part in first_vectors(vectors, np.array([3, 0, 2]), 2)]
    [[[0], [1], [3], [4]], [2, 0, 2]]
    """
    if max_vectors is None:
        return vectors_TD, lengths_B
    starts_B = lengths_B.cumsum() - lengths_B
    position_T = np.arange(len(vectors_TD)) - np.repeat(starts_B, lengths_B)
    return vectors_TD[position_T < max_vectors], np.minimum(lengths_B, max_vectors)


def id_filter(item_ids: Iterable[str]) -> str:
    """Builds a Lance filter that matches items by their ids.

    >>> id_filter(["a", "it's"])
    "item_id IN ('a', 'it''s')"
    """
    return f"item_id IN ({', '.join(map(quote, item_ids))})"


def combine_filters(filter: str | None, condition: str) -> str:
    """Combines an optional filter with a condition. Items must satisfy both.

    >>> combine_filters("a = 1 OR b = 2", "text <> ''")
    "(a = 1 OR b = 2) AND text <> ''"
    >>> combine_filters(None, "text <> ''")
    "text <> ''"
    """
    return f"({filter}) AND {condition}" if filter else condition


def quote(text: str) -> str:
    """Returns a string literal for a Lance filter.

    >>> quote("it's")
    "'it''s'"
    """
    return "'" + text.replace("'", "''") + "'"
