"""Bring your own vectors: what another model made, in .npy, Parquet or Arrow files."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.schema import Item, Reject, item_id_problem, vectors_type
from pipeline.sources import Source
from pipeline.sources.files import escaped, existing_root, open_root
from pipeline.sources.vector_files import (
    UNREADABLE,
    Block,
    ColumnFiles,
    NpyFiles,
    VectorsSpec,
    starts,
)


class Vectors(Source[VectorsSpec]):
    """Items whose token vectors are there already: N vectors of `dim` numbers each.

    `path` is one of

    - a folder with `vectors.npy` of shape (n, N, D), or (n, D) for one vector an item, and
      `ids.txt`, one id a line;
    - the same for items of different length: `vectors.npy` (T, D) holds the vectors of all items,
      one after the other, and `lengths.npy` (n,) says how many each item has;
    - a .parquet or Arrow IPC file (.arrow, .feather, .ipc), or a folder of such files at any depth,
      with a column of ids (strings or integers) and one of vectors (lists of lists of floats). The
      string columns `title`, `text` and `parent_id` are used where they are there;
      other columns are not read.

    Vectors become float32 and are otherwise taken as they are. The revision of an item is a hash of
    its vectors, title, text and parent, so listing reads all bytes once, a few hundred rows at a
    time. A row is named `<file>:<row, from 0>` in a reject if it has no valid id.

    A shard is about a thousand rows; of Parquet and Arrow files at least one row group or record
    batch, which are decoded as a whole: row groups of some thousand rows spread best.
    """

    Spec = VectorsSpec
    gives = ("item_id", "vectors")

    def __init__(self, spec: VectorsSpec, needs: tuple[str, ...] = ("vectors",)):
        super().__init__(spec, needs)
        self.payload = pa.schema([pa.field("vectors", vectors_type(spec.dim, pa.float32()))])

    def check(self) -> None:
        """Raises `SpecError` if there is nothing to read, or it does not fit `dim` or itself."""
        existing_root(self.spec.path)
        self._files.check()

    def shards(self) -> Iterator[dict[str, Any]]:
        """Ranges of rows: `{"file", "row": the first, ...}` and what the kind of file needs."""
        return self._files.shards()

    def scan(self, shard: dict[str, Any]) -> Iterator[Item | Reject]:
        """Lists the rows in order: each is one item or one reject."""
        file, row = shard["file"], shard["row"]
        try:
            for block in self._files.blocks(shard):
                yield from self._list(block, file, row)
                row += len(block)
        except UNREADABLE as error:
            yield self._unreadable(f"{file}:{row}", "list", error)

    def decode(
        self, shard: dict[str, Any], items: Sequence[tuple[int, Item]]
    ) -> Iterator[Item | Reject]:
        """Adds `payload["vectors"]`, an array (N, D) float32; reads only what holds wanted rows."""
        num_done = 0
        try:
            for vectors in self._files.vectors(shard, [position for position, _ in items]):
                yield replace(items[num_done][1], payload={"vectors": vectors})
                num_done += 1
            if num_done < len(items):
                raise OSError(f"{shard['file']} holds fewer rows than when it was listed")
        except UNREADABLE as error:
            for _, item in items[num_done:]:
                yield self._unreadable(item.item_id, "decode", error, item.revision)

    @functools.cached_property
    def _files(self) -> NpyFiles | ColumnFiles:
        fs, root = open_root(self.spec.path)
        names = (NpyFiles.VECTORS, NpyFiles.IDS, NpyFiles.LENGTHS)
        is_npy = fs.isdir(root) and any(fs.exists(f"{root}/{name}") for name in names)
        return (NpyFiles if is_npy else ColumnFiles)(fs, root, self.spec)

    def _list(self, block: Block, file: str, first_row: int) -> Iterator[Item | Reject]:
        """The items and rejects of a block; loops over items, never over vectors."""
        dim = self.spec.dim
        num_misfits = np.diff(starts(block.widths != dim)[block.row_starts])
        num_not_finite = np.diff(starts(~np.isfinite(block.values))[block.value_starts])
        for i in range(len(block)):
            location = f"{file}:{first_row + i}"
            try:
                about = {name: _text(values[i]) for name, values in block.strings.items()}
            except UnicodeDecodeError as error:
                yield self._reject(location, "not UTF-8", str(error))
                continue
            item_id = about.pop("id")
            problem = item_id_problem(item_id)
            if item_id is None or problem:
                yield self._reject(location, "bad id", f"{item_id!r}: {problem}")
                continue
            revision = _revision(block.numbers(i), about)
            if block.lengths[i] == 0:
                yield self._reject(item_id, "no vectors", "", revision)
            elif num_misfits[i]:
                widths = block.widths[block.row_starts[i] : block.row_starts[i + 1]]
                width = widths[widths != dim][0]
                yield self._reject(item_id, "wrong width", f"{width}, expected {dim}", revision)
            elif num_not_finite[i]:
                detail = f"{num_not_finite[i]} numbers are NaN or infinite as float32"
                yield self._reject(item_id, "non-finite vectors", detail, revision)
            else:
                yield Item(
                    item_id=item_id,
                    parent_id=about.get("parent_id") or item_id,
                    source=self.collection,
                    modality="vectors",
                    revision=revision,
                    title=about.get("title"),
                    text=about.get("text"),
                )

    def _reject(self, item_id: str, reason: str, detail: str, revision: str = "") -> Reject:
        return Reject(escaped(item_id), self.collection, "list", reason, detail[:500], revision)

    def _unreadable(self, item_id: str, stage: str, error: Exception, revision: str = "") -> Reject:
        return Reject(
            item_id=escaped(item_id),
            source=self.collection,
            stage=stage,
            reason="unreadable file",
            detail=escaped(f"{type(error).__name__}: {error}"[:500]),
            revision=revision,
            retryable=True,
        )


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def _revision(numbers: np.ndarray, about: dict[str, str | None]) -> str:
    content = hashlib.blake2b(np.ascontiguousarray(numbers).data, digest_size=8)
    content.update(json.dumps(sorted(about.items()), ensure_ascii=False).encode())
    return content.hexdigest()
