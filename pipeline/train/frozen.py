"""Hidden states of frozen encoders, computed or read from the cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import torch

from pipeline import config, distributed
from pipeline.config import SpecError
from pipeline.encoders import Encoder
from pipeline.encoders.batching import concatenate
from pipeline.taps import Tap
from pipeline.tokens import TokenBatch
from pipeline.training_data.base import Batch, TrainingData

if TYPE_CHECKING:
    from pipeline.train.hidden_states import HiddenStates

#: Queries or documents per commit to the cache.
CACHE_BATCH = 256


def encoded(
    encoder: Encoder, inputs: Sequence[str] | Sequence[Mapping[str, Any]], taps: Sequence[Tap] = ()
) -> TokenBatch:
    """Encodes queries or items without gradients.

    Args:
        encoder: Frozen encoder.
        inputs: Queries as texts, or items as mappings of payload columns.
        taps: Attention statistics of items. Those of queries are zeros.

    Returns:
        One row per input, in order.
    """
    if not inputs:
        pooled = None if encoder.pooled_dim is None else torch.zeros(0, encoder.pooled_dim)
        mask = torch.zeros(0, 0, dtype=torch.bool)
        return TokenBatch(torch.zeros(0, 0, encoder.dim), mask, False, pooled=pooled)
    texts = [text for text in inputs if isinstance(text, str)]
    if texts:
        states = encoder.encode_queries(texts).tokens
        # Nothing reads a query's attention. All cached rows have the same columns.
        nothing = {tap.name: torch.zeros(states.mask.shape) for tap in taps}
        states = dataclasses.replace(states, taps=nothing)
    else:
        table = pa.Table.from_pylist([dict(i) for i in inputs if not isinstance(i, str)])
        rows, batches = zip(*encoder.encode(table, *([taps] if taps else [])), strict=True)
        order = torch.from_numpy(np.argsort(np.concatenate(rows)))
        states = concatenate(batches).take(order)
    # Outside of inference mode, whose tensors no gradient may need.
    pooled = None if states.pooled is None else states.pooled.clone()
    return dataclasses.replace(states, vectors=states.vectors.clone(), pooled=pooled)


def cached_hidden_states(
    folder: str,
    dtype: Literal["float16", "float32"],
    origin: dict[str, Any],
    data: TrainingData,
    queries: Callable[[Sequence[str]], TokenBatch],
    documents: Callable[[Sequence[Mapping[str, Any]]], TokenBatch],
) -> HiddenStates:
    """Returns the hidden states of all training and validation data. Computes those not cached.

    Args:
        folder: Folder of the cache. It may hold those of several models and settings.
        dtype: Stored precision.
        origin: JSON object of the model and the settings that the hidden states depend on.
        data: Training data; later, its batches leave out what only the model needs.
        queries: Computes the hidden states of queries.
        documents: Computes the hidden states of documents.

    Raises:
        SpecError: For `learner.hidden_states_cache`: the queries and documents of the data differ
            between epochs.
    """
    if not data.repeats:
        rule = "null for data whose queries or documents differ between epochs"
        raise SpecError("learner.hidden_states_cache", folder, rule)
    from pipeline.train.hidden_states import HiddenStates

    states = HiddenStates(f"{folder}/{config.digest(origin)}.lance", origin, dtype)
    data.cached_keys = states
    texts: dict[str, str] = {}
    items: dict[str, Mapping[str, Any]] = {}

    def flush(at_least: int = 1) -> None:
        if len(texts) >= at_least:
            states.add(list(texts), queries(list(texts.values())))
            texts.clear()
        if len(items) >= at_least:
            states.add(list(items), documents(list(items.values())))
            items.clear()

    for batch in _batches(data):
        for text in (*batch.queries, *(batch.phrases.texts if batch.phrases else ())):
            if query_key(text) not in states:
                texts[query_key(text)] = text
        for key, item in zip(batch.document_keys, batch.documents, strict=True):
            if key not in states:
                items[key] = item
        flush(at_least=CACHE_BATCH)
    flush()
    distributed.wait_for_all()
    states.reopen()
    data.is_fully_cached = True
    return states


def _batches(data: TrainingData) -> Iterator[Batch]:
    """Yields the share of the training data of this worker. The first one adds validation data."""
    yield from data.full_pass(distributed.rank(), distributed.num_workers())
    validation = data.validation()
    if validation is not None and distributed.rank() == 0:
        yield validation


def query_key(text: str) -> str:
    """Returns the key under which the hidden states of a query are stored."""
    return f"query: {text}"
