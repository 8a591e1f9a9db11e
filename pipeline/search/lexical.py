"""BM25 scores of the items of an index."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from pipeline.candidates import TextGenerator
from pipeline.index.reader import files_with
from pipeline.search.selection import Items

if TYPE_CHECKING:
    from pipeline.candidates.bm25 import Postings


def open_postings(items: Items, column: str) -> Postings:
    """Builds the postings of the items, which are held in memory with 8 bytes per term of an item.

    The texts of items without a code, which were added since the generator was built, are read
    and encoded.

    Args:
        items: Items of an index or of one of its shards.
        column: Column of the codes of a generator of texts.
    """
    generator = items.index.text_generator(column)
    return generator.postings(_codes(items, column, generator))


def _codes(items: Items, column: str, generator: TextGenerator) -> Iterator[pa.Array]:
    """Yields the codes of all items in storage order."""
    index = items.index
    text_column = index.candidates_columns[column].representation
    (field_ids,) = index.field_ids([column]).values()
    for fragment in items.fragments:
        is_coded = bool(files_with(fragment, field_ids))
        for batch in index.batches([column if is_coded else text_column], fragments=[fragment]):
            yield batch[0] if is_coded else generator.encode(batch[0].to_pylist())
