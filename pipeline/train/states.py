"""States of a frozen model, kept in Lance: where a projection alone trains, the model runs once.

An epoch then costs a read and a product. `python -m jobs.bench train` says how much less that is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import lance
import numpy as np
import pyarrow as pa
import torch

from pipeline.config import SpecError, absolute
from pipeline.tokens import TokenBatch, flat_from_arrow, lists_of, pad

TAP = "tap:"
ABOUT = b"maxray.states"
DTYPES = {"float16": (pa.float16(), np.float16), "float32": (pa.float32(), np.float32)}


class States:
    """The states of queries and documents by their keys.

    Args:
        uri: of a Lance dataset, which is made with the first rows.
        about: what the states depend on: the model, its settings, the taps.

    Raises:
        SpecError: for `states`: the dataset is one of another model.
    """

    def __init__(
        self, uri: str, about: dict[str, Any], dtype: Literal["float16", "float32"] = "float16"
    ):
        self.uri, self._dtype = absolute(uri), dtype
        self._about = json.dumps({**about, "dtype": dtype}, sort_keys=True)
        self.reopen()

    def reopen(self) -> None:
        """Sees what others have added."""
        self._dataset: lance.LanceDataset | None = None
        self._rows: dict[str, int] = {}
        try:
            self._dataset = lance.dataset(self.uri)
        except (ValueError, OSError):
            return
        there = (self._dataset.schema.metadata or {}).get(ABOUT, b"").decode()
        if there != self._about:
            rule = "a new folder or the cached states of this model and spec"
            raise SpecError("states", self.uri, rule, "has those of another")
        keys = self._dataset.to_table(["key"])["key"].to_pylist()
        self._rows = {key: row for row, key in enumerate(keys)}

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, keys: Sequence[str], batch: TokenBatch) -> None:
        """Appends rows, in one commit."""
        table = self._table(keys, batch.to("cpu"))
        try:
            mode = "append" if self._dataset is not None else "create"
            self._dataset = lance.write_dataset(table, self.uri, mode=mode)
        except OSError:
            if self._dataset is not None:
                raise
            self.reopen()  # another run was faster to create it
            self._dataset = lance.write_dataset(table, self.uri, mode="append")
        # Other workers may have appended too.
        self.reopen()

    def _table(self, keys: Sequence[str], batch: TokenBatch) -> pa.Table:
        arrow, numpy = DTYPES[self._dtype]
        mask, lengths, kind = batch.mask, batch.lengths.numpy(), batch.kind
        assert kind is not None
        columns = {
            "key": pa.array(keys, pa.string()),
            "states": lists_of(batch.vectors[mask].numpy().astype(numpy), lengths, arrow),
            "kind": lists_of(kind[mask].numpy(), lengths, pa.int8()),
        }
        if batch.extents is not None:
            columns["extents"] = lists_of(batch.extents[mask].numpy(), lengths, pa.float32())
        if batch.pooled is not None:
            columns["pooled"] = pa.FixedSizeListArray.from_arrays(
                pa.array(batch.pooled.float().numpy().reshape(-1)), batch.pooled.shape[1]
            )
        for name, tap in batch.taps.items():
            columns[TAP + name] = lists_of(tap[mask].float().numpy(), lengths, pa.float32())
        return pa.table(columns).replace_schema_metadata({ABOUT: self._about.encode()})

    def read(self, keys: Sequence[str]) -> TokenBatch:
        """The states of these keys as float32, in their order.

        Raises:
            KeyError: one is not there.
        """
        distinct = list(dict.fromkeys(keys))
        rows = [self._rows[key] for key in distinct]
        assert self._dataset is not None
        table = self._dataset.take(rows)
        states, lengths = flat_from_arrow(table["states"])
        vectors, mask = pad(states.astype(np.float32), lengths)

        def padded(name: str, fill: float = 0) -> torch.Tensor:
            return pad(flat_from_arrow(table[name])[0], lengths, fill)[0]

        there = table.column_names
        batch = TokenBatch(
            vectors,
            mask,
            normalised=False,
            kind=padded("kind"),
            extents=padded("extents", np.nan) if "extents" in there else None,
            pooled=_rows(table["pooled"]) if "pooled" in there else None,
            taps={name.removeprefix(TAP): padded(name) for name in there if name.startswith(TAP)},
        )
        place = {key: row for row, key in enumerate(distinct)}
        return batch.take(torch.tensor([place[key] for key in keys], dtype=torch.int64))


def _rows(column: pa.ChunkedArray) -> torch.Tensor:
    """A column of lists of one length as a matrix."""
    flat = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return torch.from_numpy(flat.reshape(len(column), -1).copy())
