"""Prefetching, grouping and concatenation of encoder batches."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image

from pipeline.config import ComponentSpecT
from pipeline.encoders import EncodedQueries, Encoder
from pipeline.encoders.images import item_images
from pipeline.encoders.model_inputs import ModelInput
from pipeline.tokens import TokenBatch, normalise, pad

T = TypeVar("T")
R = TypeVar("R")


def prefetch(values: Iterable[T], function: Callable[[T], R]) -> Iterator[tuple[T, R]]:
    """Yields `(value, function(value))`, prefetching the next result in a background thread.

    >>> list(prefetch([1, 2, 3], str))
    [(1, '1'), (2, '2'), (3, '3')]
    """
    with ThreadPoolExecutor(1) as pool:
        pending: deque[tuple[T, Future[R]]] = deque()
        for value in values:
            pending.append((value, pool.submit(function, value)))
            if len(pending) > 1:
                earlier, result = pending.popleft()
                yield earlier, result.result()
        for value, result in pending:
            yield value, result.result()


def group_passes(inputs: Sequence[ModelInput], max_tokens: int) -> Iterator[Sequence[ModelInput]]:
    """Yields the sequences of each forward pass, in order.

    The number of sequences times the length of the longest is at most `max_tokens`, unless a pass
    has a single sequence.
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


def join_parts(
    parts: Sequence[torch.Tensor],
    counts: Sequence[int],
    dim: int,
    pooled: Sequence[torch.Tensor] | None = None,
) -> TokenBatch:
    """Joins the vectors (M, D) of the texts and images of each item, normalised to unit length.

    `counts` has the number of parts of each item. `pooled` has a single vector (P,) of each part,
    whose mean is that of the item.

    >>> join_parts([torch.tensor([[2.0]]), torch.tensor([[-3.0]])], [2, 0], 1).vectors.tolist()
    [[[1.0], [-1.0]], [[0.0], [0.0]]]
    """
    sizes = np.array([len(part) for part in parts], dtype=np.int64)
    groups = np.split(sizes, np.cumsum(counts)[:-1])
    lengths = np.array([group.sum() for group in groups], dtype=np.int64)
    vectors_BND, mask_BN = pad(torch.cat(list(parts)) if parts else torch.zeros(0, dim), lengths)
    pooled_BP = None
    if pooled is not None:
        flat = torch.stack(list(pooled)) if pooled else torch.zeros(0, dim)
        pooled_BP = normalise(pad(flat, np.array(counts))[0].sum(dim=1))
    return TokenBatch(normalise(vectors_BND), mask_BN, normalised=True, pooled=pooled_BP)


class PartsEncoder(Encoder[ComponentSpecT]):
    """Base class of encoders that leave the tokens of texts and images to another program.

    The spec selects "text" or "images" in its field `documents`.
    """

    default_inputs = ()
    normalised = True
    has_spans = False
    has_extents = False
    empty_reason = "no content"

    @classmethod
    def supported_inputs(cls, spec: Any) -> tuple[str, ...]:
        """Returns the inputs selected by `documents`."""
        return ("text",) if spec.documents == "text" else ("image", "frames")

    @classmethod
    def query_kinds(cls, spec: Any) -> tuple[str, ...]:
        """Returns "text" and, for models of images, "image" and "video"."""
        return ("text",) if spec.documents == "text" else ("text", "image", "video")

    def encode_media(self, queries: Sequence[Mapping[str, Any]]) -> EncodedQueries:
        """Encodes images, and the frames of videos, like items, in order."""
        if self.query_kinds(self.spec) == ("text",):
            raise self._texts_only()
        images = [[image for image, _, _ in item_images(query)] for query in queries]
        encoded = self._encode_opened(list(itertools.chain(*images)))
        counts = [len(each) for each in images]
        if set(counts) == {1}:
            return encoded
        tokens, names = encoded.tokens, iter(encoded.token_texts)
        parts = [row[mask] for row, mask in zip(tokens.vectors, tokens.mask, strict=True)]
        pooled = None if tokens.pooled is None else list(tokens.pooled)
        texts = [list(itertools.chain(*itertools.islice(names, count))) for count in counts]
        return EncodedQueries(join_parts(parts, counts, self.dim, pooled), texts)

    @abstractmethod
    def _encode_opened(self, images: Sequence[Image.Image]) -> EncodedQueries:
        """Encodes decoded images like items, in order."""


def concatenate(batches: Sequence[TokenBatch]) -> TokenBatch:
    """Concatenates batches, padded to the longest."""
    longest = max(batch.mask.shape[1] for batch in batches)

    def pad_to_longest(tensor: torch.Tensor, fill: float = 0) -> torch.Tensor:
        shape = (len(tensor), longest - tensor.shape[1], *tensor.shape[2:])
        return torch.cat([tensor, tensor.new_full(shape, fill)], dim=1)

    def concatenate_field(name: str, fill: float = 0) -> torch.Tensor | None:
        values = [getattr(batch, name) for batch in batches]
        if values[0] is None:
            return None
        return torch.cat([pad_to_longest(tensor, fill) for tensor in values])

    pooled = [batch.pooled for batch in batches if batch.pooled is not None]
    appended = [batch.appended for batch in batches if batch.appended is not None]
    return TokenBatch(
        torch.cat([pad_to_longest(batch.vectors) for batch in batches]),
        torch.cat([pad_to_longest(batch.mask) for batch in batches]),
        normalised=batches[0].normalised,
        extents=concatenate_field("extents", torch.nan),
        spans=concatenate_field("spans", -1),
        kind=concatenate_field("kind"),
        pooled=torch.cat(pooled) if pooled else None,
        appended=torch.cat(appended) if appended else None,
        taps={
            name: torch.cat([pad_to_longest(batch.taps[name]) for batch in batches])
            for name in batches[0].taps
        },
    )
