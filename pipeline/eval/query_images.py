"""Encodes texts and images of queries in small batches."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.encoders import EncodedQueries, Encoder
from pipeline.encoders.batching import concatenate
from pipeline.search.query import Unencoded, encode

#: Number of images in memory at the same time.
IMAGES_PER_BATCH = 32


def encode_all(encoder: Encoder, queries: Iterable[Unencoded]) -> EncodedQueries:
    """Encodes queries of any kinds, in order. Consecutive texts are encoded in one batch."""
    parts: list[EncodedQueries] = []
    batch: list[Unencoded] = []
    for query in queries:
        is_full = len(batch) == IMAGES_PER_BATCH and not isinstance(query, str)
        if batch and (is_full or type(query) is not type(batch[0])):
            parts.append(encode(encoder, batch))
            batch = []
        batch.append(query)
    parts.append(encode(encoder, batch))
    if len(parts) == 1:
        return parts[0]
    texts = [text for part in parts for text in part.token_texts]
    return EncodedQueries(concatenate([part.tokens for part in parts]), texts)
