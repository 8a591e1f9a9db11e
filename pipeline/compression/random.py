"""Reproducible random pruning, uniform without replacement (SAP, appendix C, eq. 10)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeVar

import numpy as np
import torch
from pydantic import Field

from pipeline.compression import Budget, Budgeted, largest, pack_left, select
from pipeline.tokens import TokenBatch, unit_vectors


class Random(Budgeted["Random.Spec"]):
    """Keeps K randomly drawn tokens in their original order.

    The random numbers are a hash of the seed and the item. Unlike the output of a generator, they
    do not depend on the batch size, the device, or whether a job has been resumed.
    """

    class Spec(Budget):
        """Options of `Random`."""

        name: Literal["random"] = "random"
        seed: int = Field(0, ge=0, lt=2**32)
        """Random seed."""

    assignment_form = "indices"

    def reduce(self, batch: TokenBatch, budgets_B: torch.Tensor) -> TokenBatch:
        """Compresses each item to its budget."""
        # The draws are less than 2^32, which float64 represents exactly.
        draws_BN = -random_draws(batch, self.spec.seed).double()
        return select(batch, *largest(draws_BN, batch.mask, budgets_B))


def random_draws(batch: TokenBatch, seed: int) -> torch.Tensor:
    """Computes a pseudo-random integer in [0, 2^32) for each token, (B, N) int64.

    The numbers are a hash of the seed, the item and the position of the token. The hash of an item
    covers its length and the signs of its vectors. Signs are not affected by rounding: they are the
    same on all devices, before and after normalisation, and before and after conversion to float16.
    Two items of the same length get the same numbers if none of their vectors has a negative
    element. Padding is at the end of each row, where numbers are undefined.
    """
    _, num_tokens, dim = batch.vectors.shape
    device = batch.vectors.device
    mixed = mix(torch.arange(1, max(num_tokens, dim) + 1, device=device))
    position_N, dimension_D = mixed[:num_tokens], mixed[:dim]
    token_BN = torch.where(torch.signbit(batch.vectors), dimension_D, 0).sum(dim=2)
    token_BN = mix(mix(token_BN & _MAX) ^ position_N).masked_fill(~batch.mask, 0)
    mixed_seed = mix(seed ^ 0x9E3779B9)  # because mix maps 0 to 0
    item_B1 = mix(token_BN.sum(dim=1, keepdim=True) & _MAX) ^ mixed_seed
    return mix(mix(item_B1) ^ position_N)


def sample_tokens(
    sample: Iterable[TokenBatch], seed: int, num_tokens: int, *, normalised: bool = True
) -> np.ndarray:
    """Draws at most `num_tokens` tokens (T, D) float32 uniformly at random from a sample.

    The result does not depend on the order of the items or on how they are batched. At most
    `num_tokens` tokens and one batch are in memory at any time.
    """
    tokens, draws = np.zeros((0, 0), np.float32), np.zeros(0, np.int64)
    for batch in sample:
        packed, _ = pack_left(batch)
        mask = packed.mask.cpu()
        if not mask.any():
            continue
        vectors = unit_vectors(packed) if normalised else packed.vectors.float()
        new_tokens = vectors.cpu()[mask].numpy()
        tokens = np.concatenate([tokens, new_tokens]) if len(tokens) else new_tokens
        draws = np.concatenate([draws, random_draws(packed, seed).cpu()[mask].numpy()])
        order = np.lexsort((tokens[:, 0], draws))[:num_tokens]  # several draws may be equal
        tokens, draws = tokens[order], draws[order]
    return tokens


Bits = TypeVar("Bits", int, torch.Tensor)

_MAX = 2**32 - 1


def mix(bits: Bits) -> Bits:
    """Applies a bijective mixing function to 32-bit integers, stored as int64 in tensors.

    Intermediate products are less than 2^59, so they do not overflow.
    """
    for _ in range(2):
        bits = (bits ^ (bits >> 16)) * 0x45D9F3B & _MAX
    return bits ^ (bits >> 16)
