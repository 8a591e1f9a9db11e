"""Samples of an index to which candidate generators are fitted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import torch

from pipeline.config import SpecError
from pipeline.index.info import RepresentationInfo
from pipeline.index.reader import IndexReader
from pipeline.search.generators import Sample
from pipeline.search.query import AnyQuery, QueryEncoders

#: Number of words of the passages of items whose token vectors are sampled.
PASSAGE_WORDS = 16
#: Number of queries per batch of the encoder.
QUERY_BATCH = 64
#: Number of vectors of the items at which the sample ends: 512 MiB of float32 at 128 dimensions.
MAX_VECTORS = 1 << 20
#: Number of rows that are read together.
READ_ROWS = 256
#: Minimum number of distinct token vectors of queries. Below it, vectors of items are added.
MIN_QUERY_TOKENS = 1024


def draw_sample(
    index: IndexReader,
    representation: str,
    queries: Sequence[AnyQuery],
    *,
    num_items: int,
    num_tokens: int,
    seed: int,
    max_vectors: int = MAX_VECTORS,
) -> Sample:
    """Draws a sample of items, and token vectors that resemble those of queries.

    The token vectors are those of `queries`. Without any, they are those of passages of the items'
    texts if the query encoder accepts texts, and otherwise vectors of the items.

    Args:
        num_items: Maximum number of items. There are fewer if they have `max_vectors` vectors.
        num_tokens: Maximum number of token vectors.

    Raises:
        SpecError: The representation has no vectors, or the query encoder is not available.
    """
    info = index.representation(representation)
    rng = np.random.default_rng(seed)
    has_texts = "text" in info.encoder.query_kinds and info.text_column in index.schema.names
    columns = [info.column, *([info.text_column] if has_texts and not queries else [])]
    table = _draw_items(index, info, columns, rng.permutation(len(index))[:num_items], max_vectors)
    vectors_TD, lengths_B = index.codec(representation).decode(table[info.column], info.dim)
    if not len(vectors_TD):
        problem = "has no vectors"
        raise SpecError("representation", representation, "a filled representation", problem)
    if not queries and has_texts:
        queries = passages(table[info.text_column].to_pylist(), PASSAGE_WORDS, rng)
    tokens = list(_query_tokens(index, info, queries, num_tokens))
    if sum(map(len, tokens)) < MIN_QUERY_TOKENS:
        chosen = rng.permutation(len(vectors_TD))[:num_tokens]
        tokens.append(torch.from_numpy(vectors_TD[chosen]).float())
    queries_SD = torch.cat(tokens).unique(dim=0)
    order = torch.from_numpy(rng.permutation(len(queries_SD))[:num_tokens])
    filled = lengths_B > 0
    return Sample(
        queries_SD[order].float(),
        torch.from_numpy(vectors_TD).float(),
        torch.from_numpy(lengths_B[filled]),
        len(index),
    )


def _draw_items(
    index: IndexReader,
    info: RepresentationInfo,
    columns: list[str],
    rows: np.ndarray,
    max_vectors: int,
) -> pa.Table:
    """Reads rows that have the representation until there are `max_vectors` vectors."""
    tables = [index.schema.empty_table().select(columns)]
    num_vectors = 0
    for first in range(0, len(rows), READ_ROWS):
        with index.corruption_errors():
            chunk = np.sort(rows[first : first + READ_ROWS]).tolist()
            table = index.dataset.take(chunk, columns=columns)
        table = table.filter(pa.compute.field(info.column).is_valid())
        tables.append(table)
        num_vectors += pa.compute.sum(pa.compute.list_value_length(table[info.column])).as_py() or 0
        if num_vectors >= max_vectors:
            break
    return pa.concat_tables(tables)


def passages(texts: Sequence[str | None], num_words: int, rng: np.random.Generator) -> list[str]:
    """Returns a random passage of each text, in random order."""
    found = []
    for text in texts:
        words = re.findall(r"\S+", text or "")
        start = int(rng.integers(max(len(words) - num_words, 0) + 1))
        found.append(" ".join(words[start : start + num_words]))
    found = [passage for passage in found if passage]
    return [found[i] for i in rng.permutation(len(found))]


def _query_tokens(
    index: IndexReader, info: RepresentationInfo, queries: Sequence[AnyQuery], num_tokens: int
) -> Iterator[torch.Tensor]:
    encoders = QueryEncoders(index)
    num_encoded = 0
    for first in range(0, len(queries), QUERY_BATCH):
        if num_encoded >= num_tokens:
            return
        for tokens_MD in encoders.encode(queries[first : first + QUERY_BATCH], info.name).tokens:
            num_encoded += len(tokens_MD)
            yield tokens_MD
