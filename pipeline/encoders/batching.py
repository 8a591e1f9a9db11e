"""Batches of encoders: grouped by a token budget, prefetched, and joined again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from pipeline.encoders.model_inputs import ModelInput
from pipeline.tokens import TokenBatch

T = TypeVar("T")
R = TypeVar("R")


def prefetch(values: Iterable[T], function: Callable[[T], R]) -> Iterator[tuple[T, R]]:
    """Yields `(value, function(value))`, computing one value ahead in a background thread.

    >>> list(prefetch([1, 2, 3], str))
    [(1, '1'), (2, '2'), (3, '3')]
    """
    with ThreadPoolExecutor(1) as pool:
        waiting: deque[tuple[T, Future[R]]] = deque()
        for value in values:
            waiting.append((value, pool.submit(function, value)))
            if len(waiting) > 1:
                earlier, result = waiting.popleft()
                yield earlier, result.result()
        for value, result in waiting:
            yield value, result.result()


def group_passes(inputs: Sequence[ModelInput], max_tokens: int) -> Iterator[Sequence[ModelInput]]:
    """Yields the sequences of each forward pass, in order.

    Args:
        inputs: Sequences of a batch.
        max_tokens: Maximum of sequences x longest sequence; a longer sequence is passed alone.
    """
    start = 0
    while start < len(inputs):
        stop, longest = start, 0
        while stop < len(inputs):
            longest = max(longest, len(inputs[stop]))
            if stop > start and longest * (stop + 1 - start) > max_tokens:
                break
            stop += 1
        yield inputs[start:stop]
        start = stop


def join(batches: Sequence[TokenBatch]) -> TokenBatch:
    """Concatenates batches, padded to the longest."""
    size = max(batch.mask.shape[1] for batch in batches)

    def longer(tensor: torch.Tensor, fill: float = 0) -> torch.Tensor:
        shape = (len(tensor), size - tensor.shape[1], *tensor.shape[2:])
        return torch.cat([tensor, tensor.new_full(shape, fill)], dim=1)

    def joined(name: str, fill: float = 0) -> torch.Tensor | None:
        values = [getattr(batch, name) for batch in batches]
        if values[0] is None:
            return None
        return torch.cat([longer(tensor, fill) for tensor in values])

    pooled = [batch.pooled for batch in batches if batch.pooled is not None]
    return TokenBatch(
        torch.cat([longer(batch.vectors) for batch in batches]),
        torch.cat([longer(batch.mask) for batch in batches]),
        normalised=batches[0].normalised,
        extents=joined("extents", torch.nan),
        spans=joined("spans", -1),
        kind=joined("kind"),
        pooled=torch.cat(pooled) if pooled else None,
        taps={
            name: torch.cat([longer(batch.taps[name]) for batch in batches])
            for name in batches[0].taps
        },
    )
