"""Hidden states of frozen encoders, computed or read from the cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import torch

from pipeline import config
from pipeline.config import SpecError
from pipeline.encoders import Encoder
from pipeline.encoders.batching import concatenate
from pipeline.runtime import distributed
from pipeline.taps import Tap
from pipeline.tokens import TokenBatch
from pipeline.train.data.base import Batch, TrainingData

if TYPE_CHECKING:
    from pipeline.train.hidden_states import HiddenStates

#: Queries or documents per commit to the cache.
CACHE_BATCH = 256


def encoded(
    encoder: Encoder, inputs: Sequence[str] | Sequence[Mapping[str, Any]], taps: Sequence[Tap] = ()
) -> TokenBatch:
    """Encodes texts as queries or mappings as items, a row each; taps of queries are zeros."""
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


class FrozenEncoder:
    """Hidden states of an encoder that is not trained, read from a cache or else computed.

    A cache may contain the hidden states of several models and settings.
    """

    def __init__(
        self, encoder: Any, cache: str | None, dtype: Literal["float16", "float32"] = "float16"
    ):
        self.encoder, self._cache, self._dtype = encoder, cache, dtype
        self._cached: HiddenStates | None = None

    def read_queries(self, texts: Sequence[str]) -> Sequence[Any]:
        """Returns the model inputs of queries: the texts, which the encoder reads itself."""
        return texts

    def read_items(self, items: Sequence[Mapping[str, Any]]) -> Sequence[Any]:
        """Returns the model inputs of items: the items, which the encoder reads itself."""
        return items

    def compute(self, inputs: Sequence[Any], taps: Sequence[Tap] = ()) -> TokenBatch:
        """Computes the hidden states of model inputs."""
        return encoded(self.encoder, inputs, taps)

    def queries(self, texts: Sequence[str]) -> Sequence[Any] | TokenBatch:
        """Returns the cached hidden states of queries, or their model inputs without a cache."""
        if self._cached is None:
            return self.read_queries(texts)
        return self._cached.read([query_key(text) for text in texts])

    def documents(
        self, items: Sequence[Mapping[str, Any]], keys: Sequence[str]
    ) -> Sequence[Any] | TokenBatch:
        """Returns the cached hidden states of items, or their model inputs without a cache."""
        return self.read_items(items) if self._cached is None else self._cached.read(keys)

    def states(self, inputs: Sequence[Any] | TokenBatch, taps: Sequence[Tap] = ()) -> TokenBatch:
        """Returns the hidden states of a result of `queries` or `documents`."""
        return inputs if isinstance(inputs, TokenBatch) else self.compute(inputs, taps)

    def prepare(self, data: TrainingData, taps: Sequence[Tap] = ()) -> None:
        """Caches the missing hidden states of all data, also validation data, if there is a cache.

        Later batches of the data do not contain what only the model reads.
        """
        if self._cache is None:
            return
        if not data.repeats:
            rule = "null for data whose queries or documents differ between epochs"
            raise SpecError("learner.hidden_states_cache", self._cache, rule)
        from pipeline.train.hidden_states import HiddenStates

        origin = {
            "encoder": config.dump(self.encoder.spec) | {"max_batch_tokens": None},
            "weights": self.encoder.fingerprint,
            "taps": [tap.name for tap in taps],
        }
        uri = f"{self._cache}/{config.digest(origin)}.lance"
        self._cached = data.cached_keys = states = HiddenStates(uri, origin, self._dtype)
        texts: dict[str, str] = {}
        items: dict[str, Mapping[str, Any]] = {}

        def flush(at_least: int = 1) -> None:
            if len(texts) >= at_least:
                inputs = self.read_queries(list(texts.values()))
                states.add(list(texts), self.compute(inputs, taps))
                texts.clear()
            if len(items) >= at_least:
                inputs = self.read_items(list(items.values()))
                states.add(list(items), self.compute(inputs, taps))
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


def _batches(data: TrainingData) -> Iterator[Batch]:
    """Yields the share of the training data of this worker. The first one adds validation data."""
    yield from data.full_pass(distributed.rank(), distributed.num_workers())
    validation = data.validation()
    if validation is not None and distributed.rank() == 0:
        yield validation


def query_key(text: str) -> str:
    """Returns the key under which the hidden states of a query are stored."""
    return f"query: {text}"
