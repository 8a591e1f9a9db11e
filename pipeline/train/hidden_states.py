"""Hidden states of a frozen model that are cached in a Lance dataset.

If only a projection or an adapter is trained, the model has to be run only once per query and
document. An epoch then consists of reading the cache and a matrix product. The speed-up can be
measured with `python -m tests.bench train`.
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
#: Key of the schema metadata that holds what the hidden states depend on.
METADATA = b"maxray.states"
DTYPES = {"float16": (pa.float16(), np.float16), "float32": (pa.float32(), np.float32)}


class HiddenStates:
    """Cached hidden states of queries and documents, by key.

    Args:
        uri: Lance dataset. It is created with the first rows.
        origin: JSON object of what the hidden states depend on: the model, its settings, the taps.
        dtype: Stored precision.

    Raises:
        SpecError: For `hidden_states_cache`: the dataset is of another model or other settings.
    """

    def __init__(
        self, uri: str, origin: dict[str, Any], dtype: Literal["float16", "float32"] = "float16"
    ):
        self.uri, self._dtype = absolute(uri), dtype
        self._origin = json.dumps({**origin, "dtype": dtype}, sort_keys=True)
        self.reopen()

    def reopen(self) -> None:
        """Opens the latest version, which includes the rows that other workers have added."""
        self._dataset: lance.LanceDataset | None = None
        self._rows: dict[str, int] = {}
        try:
            self._dataset = lance.dataset(self.uri)
        except (ValueError, OSError):
            return
        stored = (self._dataset.schema.metadata or {}).get(METADATA, b"").decode()
        if stored != self._origin:
            rule = "a new folder or the cached states of this model and spec"
            raise SpecError("hidden_states_cache", self.uri, rule, "has those of another")
        keys = self._dataset.to_table(["key"])["key"].to_pylist()
        self._rows = {key: row for row, key in enumerate(keys)}

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, keys: Sequence[str], batch: TokenBatch) -> None:
        """Appends the hidden states of one batch in one commit, one row per key."""
        table = self._table(keys, batch.to("cpu"))
        try:
            mode = "append" if self._dataset is not None else "create"
            self._dataset = lance.write_dataset(table, self.uri, mode=mode)
        except OSError:
            if self._dataset is not None:
                raise
            self.reopen()  # another run created it first
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
        return pa.table(columns).replace_schema_metadata({METADATA: self._origin.encode()})

    def read(self, keys: Sequence[str]) -> TokenBatch:
        """Returns the hidden states (float32), one row per key, in order; keys may repeat.

        Raises:
            KeyError: A key is not cached.
        """
        distinct = list(dict.fromkeys(keys))
        rows = [self._rows[key] for key in distinct]
        assert self._dataset is not None
        table = self._dataset.take(rows)
        states, lengths = flat_from_arrow(table["states"])
        vectors, mask = pad(states.astype(np.float32), lengths)

        def padded(name: str, fill: float = 0) -> torch.Tensor:
            return pad(flat_from_arrow(table[name])[0], lengths, fill)[0]

        names = table.column_names
        batch = TokenBatch(
            vectors,
            mask,
            normalised=False,
            kind=padded("kind"),
            extents=padded("extents", np.nan) if "extents" in names else None,
            pooled=_rows(table["pooled"]) if "pooled" in names else None,
            taps={name.removeprefix(TAP): padded(name) for name in names if name.startswith(TAP)},
        )
        row_of_key = {key: row for row, key in enumerate(distinct)}
        return batch.take(torch.tensor([row_of_key[key] for key in keys], dtype=torch.int64))


def _rows(column: pa.ChunkedArray) -> torch.Tensor:
    flat = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return torch.from_numpy(flat.reshape(len(column), -1).copy())
