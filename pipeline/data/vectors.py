"""Source of precomputed vectors in .npy, Parquet or Arrow files."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.data.base import Source
from pipeline.data.files import escape, existing_root, open_root
from pipeline.data.vector_files import (
    UNREADABLE,
    Block,
    ColumnFiles,
    DocumentFiles,
    NpyFiles,
    VectorsSpec,
    start_offsets,
)
from pipeline.schema import Item, Reject, item_id_problem, vectors_type


class Vectors(Source[VectorsSpec]):
    """Items with precomputed token vectors: N vectors of `dim` dimensions each.

    `path` is one of

    - a folder with `vectors.npy` of shape (n, N, D), or (n, D) for one vector per item, and
      `ids.txt` with one id per line;
    - for items of different lengths, a folder with `vectors.npy` of shape (T, D), which contains
      the concatenated vectors of all items, `lengths.npy` (n,) with the number of vectors per item,
      and `ids.txt`;
    - a folder with `documents.npy` (T, D), `doclens.npy` (n,) with the number of vectors per item,
      and optionally `doc_ids.npy` (n,), as in published multi-vector data sets. Without
      `doc_ids.npy`, the ids are the row numbers. Other files, such as the queries, are not read;
    - a .parquet or Arrow IPC file (.arrow, .feather, .ipc), or a folder of such files at any depth,
      with a column of ids (strings or integers) and a column of vectors (lists of lists of floats).
      The string columns `title`, `text` and `parent_id` are optional. Other columns are not read.

    Vectors are converted to float32 and otherwise unchanged. The revision of an item is a hash of
    its vectors, title, text and parent, so listing reads all files once, a few hundred rows at a
    time; `check` and `shards` read no vectors. The reject of a row without a valid id is named
    `<file>:<row>`, with rows from 0.

    A shard is about a thousand rows, or at least one row group (Parquet) or record batch (Arrow),
    which can only be decoded as a whole. Row groups of a few thousand rows distribute best.
    """

    Spec = VectorsSpec
    provides = ("item_id", "vectors")

    @property
    def dim(self) -> int:
        """Width of the vectors, which is read from the files if the spec has none."""
        return self.spec.dim or self._files.dim

    @functools.cached_property
    def payload(self) -> pa.Schema:
        """The column of the vectors."""
        return pa.schema([pa.field("vectors", vectors_type(self.dim, pa.float32()))])

    def check(self) -> None:
        """Raises `SpecError` if the files contain no vectors or contradict the option `dim`."""
        existing_root(self.spec.path)
        self._files.check()

    def shards(self) -> Iterator[dict[str, Any]]:
        """Yields ranges of rows `{"file": path, "row": first row, ...}`."""
        return self._files.shards()

    def scan(self, shard: dict[str, Any]) -> Iterator[Item | Reject]:
        """Yields one item or reject per row, in order."""
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
        """Yields items with `payload["vectors"]`, an array (N, D) float32.

        Reads only the row groups, record batches or byte ranges that contain the items.
        """
        num_done = 0
        try:
            for vectors in self._files.vectors(shard, [position for position, _ in items]):
                yield replace(items[num_done][1], payload={"vectors": vectors})
                num_done += 1
            if num_done < len(items):
                raise OSError(f"{shard['file']} has fewer rows than when it was listed")
        except UNREADABLE as error:
            for _, item in items[num_done:]:
                yield self._unreadable(item.item_id, "decode", error, item.revision)

    @functools.cached_property
    def _files(self) -> NpyFiles | ColumnFiles:
        fs, root = open_root(self.spec.path)
        if fs.isdir(root):
            for layout in (NpyFiles, DocumentFiles):
                if layout.is_in(fs, root):
                    return layout(fs, root, self.spec)
        return ColumnFiles(fs, root, self.spec)

    def _list(self, block: Block, file: str, first_row: int) -> Iterator[Item | Reject]:
        """Yields the items and rejects of a block without a Python loop over vectors."""
        dim = self.dim
        num_wrong_widths = np.diff(start_offsets(block.widths != dim)[block.row_starts])
        num_non_finite = np.diff(start_offsets(~np.isfinite(block.values))[block.value_starts])
        for i in range(len(block)):
            location = f"{file}:{first_row + i}"
            try:
                columns = {name: _text(values[i]) for name, values in block.strings.items()}
            except UnicodeDecodeError as error:
                yield self._reject(location, "not UTF-8", str(error))
                continue
            item_id = columns.pop("id")
            problem = item_id_problem(item_id)
            if item_id is None or problem:
                yield self._reject(location, "bad id", f"{item_id!r}: {problem}")
                continue
            revision = _revision(block.flat_vectors(i), columns)
            if block.lengths[i] == 0:
                yield self._reject(item_id, "no vectors", "", revision)
            elif num_wrong_widths[i]:
                widths = block.widths[block.row_starts[i] : block.row_starts[i + 1]]
                width = widths[widths != dim][0]
                yield self._reject(item_id, "wrong width", f"{width}, expected {dim}", revision)
            elif num_non_finite[i]:
                detail = f"{num_non_finite[i]} numbers are NaN or infinite as float32"
                yield self._reject(item_id, "non-finite vectors", detail, revision)
            else:
                yield Item(
                    item_id=item_id,
                    parent_id=columns.get("parent_id") or item_id,
                    source=self.collection,
                    modality="vectors",
                    revision=revision,
                    title=columns.get("title"),
                    text=columns.get("text"),
                )

    def _reject(self, item_id: str, reason: str, detail: str, revision: str = "") -> Reject:
        return Reject(escape(item_id), self.collection, "list", reason, detail[:500], revision)

    def _unreadable(self, item_id: str, stage: str, error: Exception, revision: str = "") -> Reject:
        return Reject(
            item_id=escape(item_id),
            source=self.collection,
            stage=stage,
            reason="unreadable file",
            detail=escape(f"{type(error).__name__}: {error}"[:500]),
            revision=revision,
            retryable=True,
        )


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def _revision(numbers: np.ndarray, columns: dict[str, str | None]) -> str:
    content = hashlib.blake2b(np.ascontiguousarray(numbers).data, digest_size=8)
    content.update(json.dumps(sorted(columns.items()), ensure_ascii=False).encode())
    return content.hexdigest()
