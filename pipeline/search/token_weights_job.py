"""Job that counts in how many items each token occurs, see `pipeline.search.token_weights`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from pydantic import PositiveInt

from pipeline.config import Spec, SpecError, Uri
from pipeline.encoders import Encoder
from pipeline.index.artefacts import save_artefact
from pipeline.index.info import RepresentationInfo
from pipeline.index.reader import Index
from pipeline.index.session import Session
from pipeline.search.query import QueryEncoders
from pipeline.search.representations import representation_info
from pipeline.search.token_weights import TokenFrequencies, config_key, metadata

#: Number of words of a text that are tokenised together as one query, and of items per batch.
CHUNK_WORDS, BATCH_ITEMS = 32, 256
#: Texts whose common tokens are those that the encoder adds to every query.
MARKER_TEXTS = ("a", "7")


class TokenFrequenciesSpec(Spec):
    """Settings of `jobs.token_frequencies`."""

    index: Uri
    """Path or URI of the index."""
    representation: str | None = None
    """Representation whose query encoder tokenises the texts. Defaults to that of searches: `full`
    if it exists, otherwise the first. All representations of the encoder use the result."""
    max_items: PositiveInt = 100_000
    """Maximum number of items, drawn at random, whose texts are read."""


def run(
    spec: TokenFrequenciesSpec,
    *,
    job: str,
    report: Callable[[str], None] = print,
    lease_seconds: float | None = None,
) -> TokenFrequencies:
    """Counts the tokens of the items and stores the result. Former counts are replaced.

    Raises:
        SpecError: The index or the representation is invalid, or its encoder supports no texts.
        LeaseHeld: Another job is writing to the index.
        Stopped: SIGTERM was received. The lease is released.
    """
    index = Index(spec.index)
    info = representation_info(index, spec.representation)
    if "text" not in info.encoder.query_kinds or info.text_column not in index.schema.names:
        rule = "a representation with texts, whose encoder supports text queries"
        raise SpecError("representation", info.name, rule)
    encoder = QueryEncoders(index).encoder(info.name)
    summary: dict[str, Any] = {"commits": 0, "rates": {}}
    with Session(spec.index, spec, "token_frequencies", job, lambda: summary, lease_seconds) as s:
        texts = _texts(index, info, spec.max_items)
        frequencies = s.call(count_tokens, encoder, texts)
        artefact = save_artefact(spec.index, frequencies.to_artefact(), metadata(info))
        s.writer.set_config({config_key(info): artefact})
    num_tokens = f"{len(frequencies.counts):,} tokens"
    report(f"counted {num_tokens} of {frequencies.num_items:,} items for {info.encoder.name}")
    return frequencies


def _texts(index: Index, info: RepresentationInfo, max_items: int) -> Iterator[str | None]:
    """Yields the texts of at most `max_items` random items."""
    rows = np.sort(np.random.default_rng(0).permutation(len(index))[:max_items])
    for first in range(0, len(rows), BATCH_ITEMS):
        with index.corruption_errors():
            chunk = rows[first : first + BATCH_ITEMS].tolist()
            table = index.dataset.take(chunk, columns=[info.text_column])
        yield from table[info.text_column].to_pylist()


def count_tokens(encoder: Encoder, texts: Iterator[str | None]) -> TokenFrequencies:
    """Counts the items that contain each token.

    Args:
        encoder: Query encoder.
        texts: Text of each item, or None.
    """
    counts: Counter[str] = Counter()
    num_items = 0
    markers = set.intersection(*(set(encoder.query_token_texts([t])[0]) for t in MARKER_TEXTS))
    for batch in _batches(texts):
        num_items += len(batch)
        chunks = [(i, chunk) for i, text in enumerate(batch) for chunk in _chunks(text or "")]
        tokens: list[set[str]] = [set() for _ in batch]
        names = _token_texts(encoder, [chunk for _, chunk in chunks])
        for (i, _), chunk_tokens in zip(chunks, names, strict=True):
            tokens[i].update(token.lower() for token in chunk_tokens if token not in markers)
        for item_tokens in tokens:
            counts.update(item_tokens)
    return TokenFrequencies(num_items, dict(counts), frozenset(markers))


def _batches(texts: Iterator[str | None]) -> Iterator[list[str | None]]:
    batch: list[str | None] = []
    for text in texts:
        batch.append(text)
        if len(batch) == BATCH_ITEMS:
            yield batch
            batch = []
    if batch:
        yield batch


def _chunks(text: str) -> Iterator[str]:
    """Splits a text into parts that are short enough for a query."""
    words = re.findall(r"\S+", text)
    for first in range(0, len(words), CHUNK_WORDS):
        yield " ".join(words[first : first + CHUNK_WORDS])


def _token_texts(encoder: Encoder, chunks: list[str]) -> list[list[str]]:
    """Returns the tokens of each chunk. Chunks that the encoder rejects are halved."""
    try:
        return encoder.query_token_texts(chunks) if chunks else []
    except SpecError:
        if len(chunks) > 1:
            middle = len(chunks) // 2
            return _token_texts(encoder, chunks[:middle]) + _token_texts(encoder, chunks[middle:])
        words = chunks[0].split()
        if len(words) == 1:  # too long or without tokens
            return [[]]
        halves = [" ".join(part) for part in np.array_split(np.array(words), 2)]
        first, second = _token_texts(encoder, halves)
        return [first + second]
