"""Reading an index: what it holds, its rows and its representations."""

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

import fsspec
import lance
import numpy as np
import pyarrow as pa
from fsspec import AbstractFileSystem

from pipeline import config
from pipeline.atomic import check_writable
from pipeline.config import JobError, SpecError, absolute, digest, within
from pipeline.extras import MissingExtra, require_storage
from pipeline.index import ITEMS, PARTS, REJECTS, no_index
from pipeline.index.artefacts import load_artefact
from pipeline.index.info import (
    PooledInfo,
    RepresentationInfo,
    RerankInfo,
    newest_format,
    pooled_infos,
    representation_infos,
    rerank_infos,
)
from pipeline.index.lease import Lease
from pipeline.index.positions import as_used
from pipeline.registry import CODECS
from pipeline.schema import FORMAT_VERSION, REJECT

if TYPE_CHECKING:  # it needs torch, and most that is read of an index does not
    from pipeline.codecs import Codec

#: Where an index may lie: what both Lance and fsspec can write.
SCHEMES = ("file", "s3", "gs", "az")


def part(uri: str, *names: str) -> str:
    """The URI of a part of an index."""
    return posixpath.join(absolute(uri), *names)


def open_folder(uri: str, *names: str) -> tuple[AbstractFileSystem, str]:
    """Returns the file system and path of a part of an index; writes of others are visible in it.

    Raises:
        MissingExtra: The package of its storage is not installed.
    """
    require_storage(uri)
    return fsspec.url_to_fs(part(uri, *names), use_listings_cache=False)


def check_location(uri: str) -> None:
    """Raises `SpecError` if no index can be written at the URI; looks without writing.

    Of a remote store only the scheme is looked at.
    """
    scheme = _check_scheme(uri)
    with _reaching(uri):
        open_folder(uri)  # its package may not be installed
    if scheme != "file":
        return
    check_writable(uri, "index")
    if exists(uri) and not holds_parts(uri):
        raise SpecError("index", uri, "an index, or a new or empty folder", "has other contents")


def _check_scheme(uri: str) -> str:
    """The scheme of an index's URI, if it is one that an index may have."""
    scheme, separator, _ = uri.partition("://")
    if separator and scheme not in SCHEMES:
        rule = f"a local path, or a URI with one of the schemes {', '.join(SCHEMES)}"
        raise SpecError("index", uri, rule, f"has the scheme {scheme}")
    return scheme if separator else "file"


def open_dataset(uri: str, version: int | None = None) -> lance.LanceDataset:
    """Opens the items of an index.

    Raises:
        SpecError: there is no index, or it is damaged (half deleted), or of a newer format.
    """
    _check_scheme(uri)
    with within("index"):
        items = part(uri, ITEMS)
    try:
        dataset = lance.dataset(items, version=version)
    except (ValueError, OSError, OverflowError) as error:
        if version is not None:
            last = open_dataset(uri).version
            rule = f"a stored version from 1 to {last}"
            raise SpecError("version", version, rule, "does not exist") from None
        if holds_parts(uri):
            raise SpecError(
                "index", uri, "an intact index", f"is corrupted ({first_line(error)})"
            ) from None
        raise no_index(uri) from None
    if newest_format(dataset.schema) > FORMAT_VERSION:
        raise SpecError(
            "index", uri, f"an index of format {FORMAT_VERSION} or older", "has a newer format"
        )
    return dataset


def check_whole(uri: str, dataset: lance.LanceDataset) -> None:
    """Raises `SpecError` if data files that the current version names are missing or cut.

    One listing of the data folder: a half-deleted index is found before a job works on it.
    """
    named = {
        file.path: file.file_size_bytes
        for fragment in dataset.get_fragments()
        for file in fragment.data_files()
    }
    if not named:
        return
    filesystem, path = open_folder(uri, ITEMS, "data")
    there = {}
    if filesystem.exists(path):
        entries = filesystem.ls(path, detail=True)
        there = {posixpath.basename(entry["name"]): entry["size"] for entry in entries}
    for problem, files in (
        ("are missing", [name for name in named if name not in there]),
        ("have another size", [n for n, size in named.items() if size and size != there.get(n)]),
    ):
        if files:
            detail = f"is corrupted ({len(files)} of {len(named)} data files {problem})"
            raise SpecError("index", uri, "an intact index", detail)


def exists(uri: str) -> bool:
    """Whether anything lies at the index's URI."""
    with _reaching(uri):
        filesystem, path = open_folder(uri)
        return filesystem.exists(path) and bool(filesystem.ls(path))


def holds_parts(uri: str) -> bool:
    """Whether what lies at the URI is an index, or what is left of one."""
    with _reaching(uri):
        filesystem, path = open_folder(uri)
        return any(filesystem.exists(posixpath.join(path, name)) for name in PARTS)


@contextlib.contextmanager
def _reaching(uri: str) -> Iterator[None]:
    """Raises `SpecError` if a storage cannot be asked: each has errors of its own library."""
    try:
        yield
    except (OSError, MissingExtra):
        raise
    except Exception as error:
        problem = f"cannot be reached ({type(error).__name__}: {first_line(error)})"
        raise SpecError("index", uri, "a reachable URI", problem) from None


def first_line(error: Exception) -> str:
    """The first line of an error's message, shortened, without places in Lance's source."""
    return re.sub(r",? \S+\.rs:\d+:\d+", "", config.first_line(error))[:200]


@contextlib.contextmanager
def reading(uri: str) -> Iterator[None]:
    """Raises `SpecError` if data files turn out to be missing or damaged while they are read.

    What is done with the rows inside must not raise errors of Arrow itself.
    """
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        problem = f"is corrupted ({first_line(error)})"
        raise SpecError("index", uri, "an intact index", problem) from None


class Edition(NamedTuple):
    """A version of an index, told from that of another one at the same place.

    Attributes:
        content: a hash of the names of the data files, which are random, and of the columns.
    """

    version: int
    content: str


class Index:
    """A read view of one version of an index."""

    def __init__(self, uri: str, version: int | None = None):
        self.uri = uri
        self.dataset = open_dataset(uri, version)
        self._codecs: dict[str, Codec] = {}

    @property
    def version(self) -> int:
        """The Lance version this view reads."""
        return self.dataset.version

    @property
    def edition(self) -> Edition:
        """The version, and which index it is of: another in its place may have the same number."""
        names = [file.path for f in self.dataset.get_fragments() for file in f.data_files()]
        names.append(str(self.dataset.schema))
        return Edition(self.version, hashlib.sha256("\n".join(names).encode()).hexdigest()[:16])

    def __len__(self) -> int:
        return self.dataset.count_rows()

    @functools.cached_property
    def schema(self) -> pa.Schema:
        """The columns of this version."""
        return self.dataset.schema

    @functools.cached_property
    def _representations(self) -> dict[str, RepresentationInfo]:
        return representation_infos(self.schema)  # read once: there may be hundreds of columns

    def representations(self) -> dict[str, RepresentationInfo]:
        """Returns the searchable multi-vector columns by name."""
        return self._representations

    def representation(self, name: str) -> RepresentationInfo:
        """Returns one representation.

        Raises:
            SpecError: There is no such representation; the message lists the valid ones.
        """
        infos = self.representations()
        if name not in infos:
            raise SpecError.unknown_name("representation", name, infos, "is not in the index")
        return infos[name]

    @functools.cached_property
    def pooled_columns(self) -> dict[str, PooledInfo]:
        """Columns of single vectors by name."""
        return pooled_infos(self.schema)

    @functools.cached_property
    def rerank_columns(self) -> dict[str, RerankInfo]:
        """Columns for reranking by name."""
        return rerank_infos(self.schema)

    def codec(self, name: str) -> Codec:
        """What reads the vectors of a representation, with what it learned; built once."""
        if name not in self._codecs:
            info = self.representation(name)
            learned = None
            if info.codec_artefact:
                learned = load_artefact(self.uri, info.codec_artefact, info.codec_fit)
            self._codecs[name] = CODECS.build(CODECS.resolve(info.codec), learned)
        return self._codecs[name]

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """`reading` of this index."""
        return reading(self.uri)

    def fragments(self, shard: tuple[int, int] | None = None) -> list[lance.LanceFragment]:
        """The Lance fragments in storage order: all, or those of a shard.

        Args:
            shard: (i, n), the i-th of n runs of fragments with about as many rows each; some are
                empty where there are fewer fragments than shards.

        Raises:
            SpecError: no such shard.
        """
        every = self.dataset.get_fragments()
        if shard is None:
            return every
        place, number = shard
        if number < 1 or not 0 <= place < number:
            raise SpecError("shard", shard, "a pair (i, n) with n >= 1 and 0 <= i < n")
        rows = np.array([fragment.count_rows() for fragment in every], np.int64)
        # Where the middle of each fragment lies among all rows says which run it is in.
        middles = 2 * rows.cumsum() - rows
        shard_of = middles * number // (2 * max(int(rows.sum()), 1))
        return [f for f, own in zip(every, shard_of.tolist(), strict=True) if own == place]

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
        """Yields the rows in storage order, in batches, in constant memory.

        Args:
            columns: Columns to read.
            filter: SQL condition.
            batch_rows: Maximum number of rows per batch.
            fragments: Fragments to read, ascending; all by default.
            with_address: Adds a column `_rowaddr`, whose lower half is the offset of a row in its
                fragment; deleted rows leave gaps.
            ahead: Number of batches to read ahead; Lance's default if None.

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
        with self.reading():
            yield from scanner.to_batches()

    def tokens(
        self, representation: str, *, filter: str | None = None, batch_rows: int = 1024
    ) -> Iterator[tuple[pa.RecordBatch, np.ndarray, np.ndarray]]:
        """The token vectors of the rows that have any.

        Yields:
            (rows with item_id and parent_id, vectors (T, D) as `Codec.decode` gives them,
            lengths (B,) int64).
        """
        dim = self.representation(representation).dim
        codec = self.codec(representation)
        filter = both(filter, f"`{representation}` IS NOT NULL")
        ids = ["item_id", "parent_id"]
        for batch in self.batches([*ids, representation], filter=filter, batch_rows=batch_rows):
            yield batch.select(ids), *codec.decode(batch[representation], dim)

    def items(self, item_ids: Sequence[str], columns: Sequence[str] | None = None) -> pa.Table:
        """Returns the rows of the given items, in the given order; unknown ids are left out.

        Positions have the form in which they are used, see `positions`.
        """
        columns = list(columns) if columns else None
        if columns is not None and "item_id" not in columns:
            columns.append("item_id")
        with self.reading():
            table = self.dataset.to_table(columns=columns, filter=with_ids(item_ids))
        row_of = {item_id: i for i, item_id in enumerate(table["item_id"].to_pylist())}
        rows = [row_of[item_id] for item_id in item_ids if item_id in row_of]
        return as_used(table.take(pa.array(rows, pa.int64())))

    def content_key(self, columns: Iterable[str]) -> str:
        """A hash that changes with what the columns hold; unknown ones are left out.

        It is made of names: the fragments, their deletion files, and their data files that hold
        the columns. So it reads no data, and it stays when other columns are added or when a commit
        touches no row.
        """
        ids = self.field_ids(columns)
        wanted = set(itertools.chain(*ids.values()))
        fragments = [
            [fragment.fragment_id, files_with(fragment, wanted), fragment.deletion_file()]
            for fragment in self.dataset.get_fragments()
        ]
        return digest([ids, fragments])

    def field_ids(self, columns: Iterable[str]) -> dict[str, list[int]]:
        """The numbers by which data files know the columns; unknown columns are left out."""
        fields = {field.name(): field for field in self.dataset.lance_schema.fields()}
        return {name: nested_ids(fields[name]) for name in columns if name in fields}

    def rejects(self) -> pa.Table:
        """Everything that was rejected, with reasons."""
        try:
            return lance.dataset(part(self.uri, REJECTS)).to_table()
        except (ValueError, OSError):
            return REJECT.empty_table()

    def lease(self) -> Lease | None:
        """Who writes at present; None if nobody, or nobody who is known to live."""
        lease = Lease.of(self.dataset)
        return None if lease is None or lease.is_free(time.time()) else lease


def open_edition(uri: str, edition: Edition) -> Index:
    """Opens a version of an index.

    Raises:
        SpecError: It is not there any more; another index may be in its place.
    """
    index = Index(uri, edition.version)
    if index.edition != edition:
        raise SpecError("index", uri, "the index being served", "was replaced by another")
    return index


def get_fragment(dataset: lance.LanceDataset, number: int) -> lance.LanceFragment:
    """Returns a fragment of a dataset.

    Raises:
        JobError: The version of the dataset has no such fragment.
    """
    fragment = dataset.get_fragment(number)
    if fragment is None:
        raise JobError(f"{dataset.uri} has no fragment {number} in version {dataset.version}")
    return fragment


def nested_ids(field: Any) -> list[int]:
    """The numbers of a Lance field and of all fields in it."""
    return [field.id(), *(i for child in field.children() for i in nested_ids(child))]


def files_with(fragment: lance.LanceFragment, field_ids: Iterable[int]) -> list[str]:
    """The names of a fragment's data files that hold any of the fields, which never change."""
    wanted = set(field_ids)
    return sorted(file.path for file in fragment.data_files() if wanted & set(file.fields))


def with_ids(item_ids: Iterable[str]) -> str:
    """A Lance filter for the rows of these items.

    >>> with_ids(["a", "it's"])
    "item_id IN ('a', 'it''s')"
    """
    return f"item_id IN ({', '.join(map(quote, item_ids))})"


def both(filter: str | None, condition: str) -> str:
    """A Lance filter of the rows that an optional filter lets through and that meet a condition.

    >>> both(None, "text <> ''"), both("a = 1 OR b = 2", "text <> ''")
    ("text <> ''", "(a = 1 OR b = 2) AND text <> ''")
    """
    return f"({filter}) AND {condition}" if filter else condition


def quote(text: str) -> str:
    """A string literal for a Lance filter.

    >>> quote("it's")
    "'it''s'"
    """
    return "'" + text.replace("'", "''") + "'"
