"""Reads the vectors of indexed items, with their token positions, and uses them as queries.

A search with the vectors of an item finds similar items ("more like this"). With the vectors of a
region or of a time interval, it finds items that are similar to this part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from pipeline.config import SpecError
from pipeline.index.info import RepresentationInfo
from pipeline.index.reader import IndexReader
from pipeline.search.explain import NO_SPAN, assigned_vectors, prefix_assignment
from pipeline.search.query import Queries

#: Maximum number of vectors of an item that are used as a query.
MAX_QUERY_VECTORS = 4096


@dataclass(frozen=True)
class StoredItem:
    """Stored columns of one item that belong to a representation.

    Attributes:
        row: Table with one row.
        info: Representation.
        num_tokens: Number T of input tokens, or None if the index has no token positions.
    """

    row: pa.Table
    info: RepresentationInfo
    num_tokens: int | None

    def value(self, column: str | None) -> Any:
        """Returns the value of a column, or None if it is missing or null."""
        return self.row[column][0].as_py() if column in self.row.column_names else None

    def vectors(self, index: IndexReader) -> np.ndarray:
        """Returns all stored vectors of the column, (N, D) float32."""
        codec, info = index.codec(self.info.name), self.info
        return codec.decode(self.row[info.column], info.dim)[0].astype(np.float32)

    def assigned_vectors(self, stored_ND: np.ndarray) -> np.ndarray:
        """Returns the vector that each input token is assigned to, -1 for none: (T,)."""
        info, num_tokens = self.info, self._require_positions()
        if info.is_uncompressed:
            return np.arange(num_tokens)
        assignment = self.value(info.assignment_column)
        if assignment is None or info.assignment_form is None:
            rule = "a representation with stored token assignments (keep_assignment)"
            note = "; memtok and seqresize do not assign tokens to vectors"
            raise SpecError("representation", info.name, rule, "has no token assignments", note)
        assignment = prefix_assignment(
            assignment, info.assignment_form, stored_ND, info.max_vectors
        )
        return assigned_vectors(assignment, info.assignment_form, num_tokens)

    def positions(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the spans (T, 2), extents (T, 6) and confidences (T,) of the input tokens."""
        size = self._require_positions()
        spans, extents, confidence = (
            self.value(self.info.positions.get(kind)) for kind in ("spans", "extents", "confidence")
        )
        return (
            np.full((size, 2), NO_SPAN) if spans is None else np.array(spans),
            np.full((size, 6), np.nan) if extents is None else np.array(extents, float),
            np.full(size, np.nan) if confidence is None else np.array(confidence, float),
        )

    def _require_positions(self) -> int:
        if self.num_tokens is None:
            rule = "an item with stored token positions (keep_positions)"
            item_id = self.row["item_id"][0].as_py()
            raise SpecError("item_id", item_id, rule, "has no token positions")
        return self.num_tokens


def read_stored_item(index: IndexReader, item_id: str, info: RepresentationInfo) -> StoredItem:
    """Reads the columns of an item that belong to a representation."""
    names = index.schema.names
    columns = [*info.positions.values(), info.assignment_column, info.column, info.text_column]
    if info.pooled_column is not None:
        columns.append(info.pooled_column)
    stored = [column for column in columns if column is not None and column in names]
    row = index.item(item_id, stored)
    if not row[info.column].is_valid()[0].as_py():
        rule = f"an item with vectors in {info.name}"
        raise SpecError("item_id", item_id, rule, "has no vectors")
    item = StoredItem(row.combine_chunks(), info, None)
    positions = (item.value(column) for column in info.positions.values())
    num_tokens = next((len(values) for values in positions if values is not None), None)
    return StoredItem(item.row, info, num_tokens)


def token_representation(index: IndexReader, info: RepresentationInfo) -> RepresentationInfo | None:
    """Returns the uncompressed representation of the same tokens, or None without one.

    A merged vector does not tell which of its words matches a query; the vectors of the words do.

    Args:
        info: Representation. The result is None unless its vectors represent several tokens.
    """
    if info.assignment_form != "assignment":
        return None
    return next(
        (
            other
            for other in index.representations().values()
            if other.is_uncompressed
            and (other.encoder.fingerprint, other.field, other.positions, other.dim)
            == (info.encoder.fingerprint, info.field, info.positions, info.dim)
        ),
        None,
    )


def token_vectors(
    index: IndexReader, tokens: RepresentationInfo | None, item_ids: Sequence[str]
) -> dict[str, np.ndarray]:
    """Returns the vectors (T, D) float32 of the input tokens of items, by item id.

    Args:
        tokens: Result of `token_representation`. The result is empty if it is None.
    """
    if tokens is None:
        return {}
    table = index.items(item_ids, [tokens.column])
    table = table.filter(table[tokens.column].is_valid()).combine_chunks()
    if not table.num_rows:
        return {}
    flat_TD, lengths = index.codec(tokens.name).decode(table[tokens.column], tokens.dim)
    vectors = np.split(flat_TD.astype(np.float32), np.cumsum(lengths)[:-1])
    return dict(zip(table["item_id"].to_pylist(), vectors, strict=True))


def stored_query(
    index: IndexReader,
    item_id: str,
    representation: str,
    box: Sequence[float] | None = None,
    times: Sequence[float] | None = None,
) -> Queries:
    """Returns the stored vectors of an item, or of a part of it, as a query.

    Vectors of unit length are normalised, because the codec has rounded them. Others keep their
    length, which weights their terms of the MaxSim score. A query for the whole item also has its
    single vector.

    Args:
        box: x0, y0, x1, y1 in [0, 1]. Selects the vectors of tokens whose centre is in the box.
        times: Start and end in seconds of the parent. Selects the vectors of tokens that overlap
            with the interval.

    Raises:
        SpecError: The item does not exist or has no such vectors (field `query.item`), the part
            contains no token (`query.box` or `query.times`), or the representation has vectors in
            a different space than its queries (`representation`).
    """
    info = index.representation(representation)
    if info.dim != info.encoder.dim:
        rule = f"a representation with vectors of dimension {info.encoder.dim} for a stored item"
        raise SpecError("representation", info.name, rule, f"has dimension {info.dim}")
    try:
        item = read_stored_item(index, item_id, info)
        stored_ND = item.vectors(index)
        tokens = _tokens_of_vectors(item, stored_ND)
        selected = np.arange(len(stored_ND[: info.max_vectors]))
        if box is not None or times is not None:
            selected = _selected_vectors(item, stored_ND, box, times)
    except SpecError as error:
        raise error.at("query.item") if error.field == "item_id" else error from None
    vectors_MD = stored_ND[selected]
    norms_M = np.linalg.norm(vectors_MD.astype(np.float64), axis=1)
    vectors_MD, norms_M, selected = (
        values[norms_M > 0][:MAX_QUERY_VECTORS] for values in (vectors_MD, norms_M, selected)
    )
    is_unit = np.allclose(norms_M, 1, atol=0.01)
    queries = Queries.from_vectors([vectors_MD]).tokens if is_unit else [torch.tensor(vectors_MD)]
    pooled = item.value(info.pooled_column) if box is None and times is None else None
    return Queries(
        queries,
        None if pooled is None else torch.tensor([pooled], dtype=torch.float32),
        [[tokens.get(vector, f"#{vector}") for vector in selected.tolist()]],
    )


def _selected_vectors(
    item: StoredItem,
    stored_ND: np.ndarray,
    box: Sequence[float] | None,
    times: Sequence[float] | None,
) -> np.ndarray:
    """Returns the ascending positions of the vectors of the tokens in a part of an item."""
    _, extents_T6, _ = item.positions()
    is_inside_T = np.ones(len(extents_T6), bool)
    if box is not None:
        x_T = extents_T6[:, [0, 2]].mean(axis=1)
        y_T = extents_T6[:, [1, 3]].mean(axis=1)
        is_inside_T &= (x_T >= box[0]) & (x_T <= box[2]) & (y_T >= box[1]) & (y_T <= box[3])
    if times is not None:
        is_inside_T &= (extents_T6[:, 4] <= times[1]) & (extents_T6[:, 5] >= times[0])
    vectors = np.unique(item.assigned_vectors(stored_ND)[is_inside_T])
    vectors = vectors[vectors >= 0]
    if not len(vectors):
        field, value = ("query.box", box) if box is not None else ("query.times", times)
        raise SpecError(field, list(value or ()), "a part of the item that contains a token")
    return vectors


def _tokens_of_vectors(item: StoredItem, stored_ND: np.ndarray) -> dict[int, str]:
    """Returns the text of the first word that is assigned to each vector, where known."""
    text = item.value(item.info.text_column)
    if text is None or item.num_tokens is None:
        return {}
    try:
        vectors_T = item.assigned_vectors(stored_ND)
    except SpecError:  # the assignment is not stored
        return {}
    spans_T2, _, _ = item.positions()
    texts: dict[int, str] = {}
    for vector, (start, end) in zip(vectors_T.tolist(), spans_T2.tolist(), strict=True):
        if vector >= 0 and 0 <= start < end:
            texts.setdefault(vector, text[start:end])
    return texts
