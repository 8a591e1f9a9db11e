"""What a model gives that is not trained: run once for each query and document, and kept."""

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
from pipeline.encoders.batching import join
from pipeline.taps import Tap
from pipeline.tokens import TokenBatch
from pipeline.training_data.base import Batch, TrainingData

if TYPE_CHECKING:
    from pipeline.train.states import States

#: Queries or documents whose states are written at once.
STATES_AT_ONCE = 256


def encoded(
    encoder: Encoder, inputs: Sequence[str] | Sequence[Mapping[str, Any]], taps: Sequence[Tap] = ()
) -> TokenBatch:
    """Texts as an encoder reads queries, or items, in order; as constants to a gradient."""
    if not inputs:
        pooled = None if encoder.pooled_dim is None else torch.zeros(0, encoder.pooled_dim)
        mask = torch.zeros(0, 0, dtype=torch.bool)
        return TokenBatch(torch.zeros(0, 0, encoder.dim), mask, False, pooled=pooled)
    texts = [text for text in inputs if isinstance(text, str)]
    if texts:
        states = encoder.encode_queries(texts).tokens
        # Nothing reads a query's attention; the rows of what is kept have the same columns.
        nothing = {tap.name: torch.zeros(states.mask.shape) for tap in taps}
        states = dataclasses.replace(states, taps=nothing)
    else:
        table = pa.Table.from_pylist([dict(i) for i in inputs if not isinstance(i, str)])
        rows, batches = zip(*encoder.encode(table, *([taps] if taps else [])), strict=True)
        order = torch.from_numpy(np.argsort(np.concatenate(rows)))
        states = join(batches).take(order)
    # Outside of inference mode, whose tensors no gradient may need.
    pooled = None if states.pooled is None else states.pooled.clone()
    return dataclasses.replace(states, vectors=states.vectors.clone(), pooled=pooled)


def kept(
    where: tuple[str, Literal["float16", "float32"]],
    about: dict[str, Any],
    data: TrainingData,
    queries: Callable[[Sequence[str]], TokenBatch],
    documents: Callable[[Sequence[Mapping[str, Any]]], TokenBatch],
) -> States:
    """The states of all that is trained on and measured by; what is not there yet is computed.

    Args:
        where: a folder, and the dtype of what is kept in it. It has those of all models and
            settings that it was named for.
        about: the model and the settings that the states depend on.
        queries, documents: run the model.

    Raises:
        SpecError: for `learner.states`: the data have other queries and documents in each epoch.
    """
    folder, dtype = where
    if not data.repeats:
        rule = "null for data whose queries or documents differ between epochs"
        raise SpecError("learner.states", folder, rule)
    from pipeline.train.states import States

    states = States(f"{folder}/{config.digest(about)}.lance", about, dtype)
    data.known = states
    texts: dict[str, str] = {}
    items: dict[str, Mapping[str, Any]] = {}

    def keep(at_least: int = 1) -> None:
        if len(texts) >= at_least:
            states.add(list(texts), queries(list(texts.values())))
            texts.clear()
        if len(items) >= at_least:
            states.add(list(items), documents(list(items.values())))
            items.clear()

    for batch in _everything(data):
        for text in (*batch.queries, *(batch.phrases.texts if batch.phrases else ())):
            if query_key(text) not in states:
                texts[query_key(text)] = text
        for key, item in zip(batch.document_keys, batch.documents, strict=True):
            if key not in states:
                items[key] = item
        keep(at_least=STATES_AT_ONCE)
    keep()
    distributed.wait_for_all()
    states.reopen()
    data.knows_all = True
    return states


def _everything(data: TrainingData) -> Iterator[Batch]:
    """One worker's share of all that is trained on, and what quality is measured on."""
    yield from data.everything(distributed.rank(), distributed.num_workers())
    held_out = data.held_out()
    if held_out is not None and distributed.rank() == 0:
        yield held_out


def query_key(text: str) -> str:
    """The key of a query's states; documents have others."""
    return f"query: {text}"
