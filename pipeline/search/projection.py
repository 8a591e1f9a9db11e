"""Projects the items of an index onto a plane, for a map of the collection."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from pipeline.index.info import RepresentationInfo
from pipeline.index.reader import IndexReader
from pipeline.search.options import representation_info

#: Maximum number of projected items, and of items that are read at once.
MAX_ITEMS, BATCH_ITEMS = 10_000, 1024
#: Columns of the result, beside the position.
COLUMNS = ("item_id", "title", "source", "modality")


def project_items(index: IndexReader) -> pa.Table:
    """Returns items with their positions `x` and `y` in [-1, 1], in storage order.

    Positions are the first two principal components of the single vectors of the items, or of the
    means of their vectors if the encoder has no single vectors. An item without a vector of the
    default representation has that of another field, such as its caption. Items without any vector
    are omitted, and of more than `MAX_ITEMS` items evenly spaced ones are projected.
    """
    info = representation_info(index)
    fields = {info.field: info}
    for other in index.representations().values():
        if (other.encoder.fingerprint, other.dim) == (info.encoder.fingerprint, info.dim):
            fields.setdefault(other.field, other)
    tables, means = zip(*_read(index, list(fields.values())), strict=True)
    table, mean_BD = pa.concat_tables(tables), np.concatenate(means)
    has_vector_B = ~np.isnan(mean_BD).any(axis=1)
    table, mean_BD = table.filter(pa.array(has_vector_B)), mean_BD[has_vector_B]
    for name, values in zip("xy", principal_components(mean_BD).T, strict=True):
        table = table.append_column(name, pa.array(values))
    return table


def _read(
    index: IndexReader, infos: list[RepresentationInfo]
) -> Iterator[tuple[pa.Table, np.ndarray]]:
    """Yields columns of items, and their mean vectors (B, D); NaN without any."""
    columns = [info.pooled_column or info.column for info in infos]
    num_items = len(index)
    rows = np.unique(np.linspace(0, max(num_items - 1, 0), MAX_ITEMS).astype(int))[:num_items]
    for start in range(0, max(len(rows), 1), BATCH_ITEMS):
        with index.corruption_errors():
            batch = rows[start : start + BATCH_ITEMS].tolist()
            table = index.dataset.take(batch, columns=[*COLUMNS, *columns]).combine_chunks()
        mean_BD = np.full((len(table), infos[0].encoder.pooled_dim or infos[0].dim), np.nan)
        for info, name in zip(infos, columns, strict=True):
            missing_B = np.isnan(mean_BD).any(axis=1) & table[name].is_valid().to_numpy()
            column = table[name].filter(pa.array(missing_B)).combine_chunks()
            if not len(column):
                continue
            if info.pooled_column is not None:
                mean_BD[missing_B] = np.reshape(column.flatten(), (len(column), -1))
            else:
                flat_TD, length_B = index.codec(info.name).decode(column, info.dim)
                items = np.split(flat_TD, np.cumsum(length_B)[:-1])
                mean_BD[missing_B] = [vectors_ND.mean(axis=0) for vectors_ND in items]
        yield table.select(COLUMNS), mean_BD


def principal_components(values_ND: np.ndarray) -> np.ndarray:
    """Returns the first two principal components (N, 2), scaled to [-1, 1] with 4 decimals.

    The largest coefficient of a component is positive, so the result is deterministic.

    >>> principal_components(np.array([[0.0, 1.0, 0.0], [2.0, 1.0, 0.0], [4.0, 1.0, 0.0]])).tolist()
    [[-1.0, 0.0], [0.0, 0.0], [1.0, 0.0]]
    """
    centred_ND = values_ND - values_ND.mean(axis=0) if len(values_ND) else values_ND
    axes_D2 = np.linalg.eigh(centred_ND.T @ centred_ND)[1][:, :-3:-1]
    largest_2 = np.take_along_axis(axes_D2, np.abs(axes_D2).argmax(axis=0)[None], axis=0)
    position_N2 = centred_ND @ (axes_D2 * np.sign(largest_2))
    return np.round(position_N2 / max(np.abs(position_N2).max(initial=0), 1e-12), 4) + 0.0
