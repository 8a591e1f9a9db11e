"""Random pruning (SAP appendix, eq. 10): uniform without replacement, repeatable to the bit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from pipeline.compression import Budget, Budgeted, largest, pack_left, select
from pipeline.tokens import TokenBatch, unit_vectors


class Random(Budgeted["Random.Spec"]):
    """Keeps the K tokens with the smallest random draws, in their original order.

    The draws come from a hash and not from a generator: they depend on the seed and on the item
    alone, so resuming, batching otherwise or moving to another device changes nothing.
    """

    class Spec(Budget):
        """Settings of the compressor."""

        name: Literal["random"] = "random"
        seed: int = Field(0, ge=0, lt=2**32)
        """Seed of the draws."""

    support_form = "indices"

    def reduce(self, batch: TokenBatch, budgets_B: torch.Tensor) -> TokenBatch:
        """`_compress` with a budget for each item."""
        # The smallest draws win, as whole numbers: float64 holds them exactly.
        draws_BN = -random_draws(batch, self.spec.seed).double()
        return select(batch, *largest(draws_BN, batch.mask, budgets_B))


def random_draws(batch: TokenBatch, seed: int) -> torch.Tensor:
    """(B, N) int64 draws from [0, 2^32), one a token: a hash of seed, item and position.

    What is hashed of the item is its length and the sign bits of its vectors. Signs need no
    arithmetic, hence no rounding: they are the same on every device, before and after scaling to
    unit length, and before and after storing as float16. Vectors without a negative number share
    the draws of their length.

    Args:
        batch: real tokens first in each row; draws at padding have no meaning.
        seed: from [0, 2^32).
    """
    _, num_tokens, dim = batch.vectors.shape
    device = batch.vectors.device
    position_N = mix(torch.arange(1, num_tokens + 1, device=device))
    coordinate_D = mix(torch.arange(1, dim + 1, device=device))
    token_BN = torch.where(torch.signbit(batch.vectors), coordinate_D, 0).sum(dim=2)
    token_BN = mix(mix(token_BN & _MAX) ^ position_N).masked_fill(~batch.mask, 0)
    seed_ = mix(torch.tensor(seed ^ 0x9E3779B9, device=device))  # 0 would mix to 0
    item_B1 = mix(token_BN.sum(dim=1, keepdim=True) & _MAX) ^ seed_
    return mix(mix(item_B1) ^ position_N)


def drawn(
    sample: Iterable[TokenBatch], seed: int, num_tokens: int, *, scaled: bool = True
) -> np.ndarray:
    """Samples tokens: those with the smallest random draws.

    Draws are a hash of item and position, so that at most `num_tokens` tokens are in memory, and
    neither their choice nor their order depends on how items are batched.

    Args:
        sample: Batches of items.
        seed: Seed of the draws.
        num_tokens: Maximum number of tokens.
        scaled: Scales the tokens to unit length.

    Returns:
        (n, D) float32 token vectors.
    """
    tokens, draws = np.zeros((0, 0), np.float32), np.zeros(0, np.int64)
    for batch in sample:
        packed, _ = pack_left(batch)
        mask = packed.mask.cpu()
        if not mask.any():
            continue
        vectors = unit_vectors(packed) if scaled else packed.vectors.float()
        more = vectors.cpu()[mask].numpy()
        tokens = np.concatenate([tokens, more]) if len(tokens) else more
        draws = np.concatenate([draws, random_draws(packed, seed).cpu()[mask].numpy()])
        order = np.lexsort((tokens[:, 0], draws))[:num_tokens]  # some draws may be equal
        tokens, draws = tokens[order], draws[order]
    return tokens


_MAX = 2**32 - 1


def mix(bits: torch.Tensor) -> torch.Tensor:
    """Scrambles 32-bit numbers held in int64, one to one; the products stay below 2^59."""
    for _ in range(2):
        bits = (bits ^ (bits >> 16)) * 0x45D9F3B & _MAX
    return bits ^ (bits >> 16)
