"""Post-hoc compressors: the N token vectors of an item -> at most K, one file a method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field

from pipeline.config import Spec
from pipeline.tokens import TokenBatch, unit_vectors

#: Tokens of one item, at most: support is stored as uint16, its last value stands for "none".
MAX_TOKENS = 65534

#: A budget K.
NumVectors = Annotated[int, Field(ge=1, le=MAX_TOKENS)]


class Compressor(ABC):
    """Maps a TokenBatch of N tokens to one of at most `num_vectors` tokens.

    Subclasses carry a nested `Spec` whose first field is `name: Literal["..."]`, and write
    `_compress`. Any device, batched, no Python loop over tokens. An item's result does not depend
    on the rest of its batch, nor on what lies under `mask == False`. Vectors of real tokens are
    taken to be finite: the index job rejects other items before they come here.

    Every kind of token counts: what is not to be indexed (special tokens, prompts) the encoder's
    own mask has left out already. A method that keeps fewer kinds says so.
    """

    Spec: ClassVar[type[Spec]]
    needs_fit: ClassVar[bool] = False
    needs_taps: ClassVar[tuple[str, ...]] = ()
    support_form: ClassVar[str] = "assignment"  # or "indices": each output is one input token

    #: Whether the stored vectors have unit length; may depend on the spec.
    normalised: bool = True

    def __init__(self, spec: Spec, artefact: dict[str, np.ndarray] | None = None):
        assert not self.needs_fit or artefact is not None, "fit first"
        self.spec, self.artefact = spec, artefact

    @classmethod
    def fit(cls, spec: Spec, sample: Iterable[TokenBatch]) -> dict[str, np.ndarray]:
        """Learns from a seeded sample of the corpus what the method needs; stored with a hash."""
        raise AssertionError(f"{cls.__name__} declares needs_fit and has no fit")

    def compress(self, batch: TokenBatch) -> TokenBatch:
        """Compresses each item; one with at most K tokens keeps what it has.

        Returns:
            A batch of (B, <= K, D) vectors with its mask, `normalised` as the class says, and
            `support` (B, N): for each input position the output position that stands for it. The
            real outputs come first in each row.
        """
        packed, order = pack_left(batch)
        # Distances and means are float32 also inside a training loop's half-precision region.
        with torch.autocast(batch.vectors.device.type, enabled=False):
            result = self._compress(packed)
        if result.support is None:
            return result
        # Back from packed positions to those of the caller's batch.
        support = torch.full_like(batch.mask, -1, dtype=torch.int64)
        support.scatter_(1, order, result.support.masked_fill(~packed.mask, -1))
        return replace(result, support=support)

    @abstractmethod
    def _compress(self, batch: TokenBatch) -> TokenBatch:
        """`compress` for a batch whose real tokens come first in each row."""


def pack_left(batch: TokenBatch) -> tuple[TokenBatch, torch.Tensor]:
    """Moves the real tokens of each row to the front, in order, and cuts off what is all padding.

    Returns:
        The packed batch (N' = the longest item) and `order` (B, N'): the input position of each.
    """
    num_kept = int(batch.lengths.max()) if len(batch) else 0
    order = torch.argsort((~batch.mask).to(torch.int8), dim=1, stable=True)[:, :num_kept]

    def take(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        index = order.reshape(*order.shape, *[1] * (tensor.ndim - 2))
        return tensor.gather(1, index.expand(*order.shape, *tensor.shape[2:]))

    packed = replace(
        batch,
        vectors=take(batch.vectors),
        mask=take(batch.mask),
        extents=take(batch.extents),
        spans=take(batch.spans),
        kind=take(batch.kind),
        taps={name: take(tap) for name, tap in batch.taps.items()},
    )
    return packed, order


def select(batch: TokenBatch, index: torch.Tensor, index_mask: torch.Tensor) -> TokenBatch:
    """Keeps the tokens at `index` (B, K) where `index_mask` (B, K) is True: what pruners end with.

    Returns:
        A batch of (B, K, D) unit vectors with `support`.
    """
    dim = batch.vectors.shape[2]
    vectors = batch.vectors.gather(1, index.unsqueeze(-1).expand(-1, -1, dim))
    support = torch.full(batch.mask.shape, -1, dtype=torch.int64, device=batch.mask.device)
    outputs = torch.arange(index.shape[1], device=index.device).expand_as(index)
    # Slots outside the mask write into a spare column that is cut off again.
    spare = torch.cat([support, support.new_full((len(batch), 1), -1)], dim=1)
    spare.scatter_(1, torch.where(index_mask, index, batch.mask.shape[1]), outputs)
    kept = TokenBatch(
        vectors, index_mask, batch.normalised, pooled=batch.pooled, support=spare[:, :-1]
    )
    return replace(kept, vectors=unit_vectors(kept), normalised=True)


def memberships(support: torch.Tensor, num_groups: int) -> torch.Tensor:
    """(B, N) group numbers -> (B, N, K) float32, 1 where a token is in a group; -1 is in none.

    >>> memberships(torch.tensor([[1, 0, -1]]), 2).tolist()
    [[[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]]
    """
    groups = torch.arange(num_groups, device=support.device)
    return (support.unsqueeze(-1) == groups).float()
