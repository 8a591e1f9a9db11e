"""Post-hoc compressors: the N token vectors of an item -> at most K, one file a method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Annotated, ClassVar, Generic, Literal, Self, TypeVar

import numpy as np
import torch
from pydantic import Field, model_validator

from pipeline.config import ComponentSpec, ComponentSpecT, MissingField, SpecError
from pipeline.taps import Tap
from pipeline.tokens import TokenBatch, unit_vectors

#: Tokens of one item, at most: support is stored as uint16, its last value stands for "none".
MAX_TOKENS = 65534

#: A budget K.
NumVectors = Annotated[int, Field(ge=1, le=MAX_TOKENS)]

#: Numbers of the largest tensor that a method makes of a block of items, by kind of device. On a
#: CPU 8 MiB of float32, which stays in the caches; elsewhere 256 MiB, which keeps a GPU busy and a
#: batch of any size within its memory.
BLOCK_NUMBERS = {"cpu": 1 << 21}
BLOCK_NUMBERS_ELSEWHERE = 1 << 26


class Compressor(ABC, Generic[ComponentSpecT]):
    """Maps a TokenBatch of N tokens to one of fewer.

    Subclasses carry a nested `Spec` whose first field is `name: Literal["..."]`, and write
    `_compress`; those with a budget of vectors derive from `Budgeted`. Any device, batched, no
    Python loop over tokens. An item's result does not depend on the rest of its batch, nor on what
    lies under `mask == False`. Vectors of real tokens and their taps are taken to be finite: the
    index job rejects other items before they come here.

    Every kind of token counts: what is not to be indexed (special tokens, prompts) the encoder's
    own mask has left out already. A method that keeps fewer kinds says so.

    Constructing one is cheap. Without the artefact that `needs_fit` asks for it can describe
    itself, and not compress.
    """

    Spec: ClassVar[type[ComponentSpec]]
    spec: ComponentSpecT
    needs_fit: bool = False
    #: Of the result's support: "assignment", in which a token may stand in no output (-1), or
    #: "indices": each output is one input token.
    support_form: Literal["assignment", "indices"] = "assignment"
    normalised: bool = True  # whether the stored vectors have unit length
    keeps_tokens: bool = True  # whether an item within its budget keeps its tokens' own vectors

    def __init__(self, spec: ComponentSpecT, artefact: dict[str, np.ndarray] | None = None):
        self.spec, self.artefact = spec, artefact

    @property
    def needs_taps(self) -> tuple[Tap, ...]:
        """The attention statistics that a batch must bring."""
        return ()

    @property
    def fitted(self) -> dict[str, np.ndarray]:
        """The artefact of a method that `needs_fit`, which must have been given."""
        assert self.artefact is not None, "fit first"
        return self.artefact

    @classmethod
    def fit(cls, spec: ComponentSpecT, sample: Iterable[TokenBatch]) -> dict[str, np.ndarray]:
        """Learns from a seeded sample of the corpus what the method needs; stored with a hash."""
        raise AssertionError(f"{cls.__name__} declares needs_fit and has no fit")

    def output_dim(self, dim: int) -> int:
        """The width of the vectors it makes of vectors of width `dim`."""
        return dim

    def transform_queries(self, tokens_QD: torch.Tensor) -> torch.Tensor:
        """Query tokens (Q, D) as they are to be compared with this method's vectors."""
        return tokens_QD

    def compress(self, batch: TokenBatch) -> TokenBatch:
        """Compresses each item; one whose budget covers its tokens keeps what it has.

        Returns:
            A batch of (B, <= K, D) vectors with its mask, `normalised` as the compressor says, and
            `support` (B, N): for each input position the output position that stands for it. The
            real outputs come first in each row.

        Raises:
            ValueError: the batch lacks a tap that the method needs.
        """
        assert not self.needs_fit or self.artefact is not None, "fit first"
        for tap in self.needs_taps:
            if tap.name not in batch.taps:
                field, problem = f"taps of {self.spec.name}", "is not in the batch"
                raise SpecError.unknown_name(field, tap.name, batch.taps, problem)
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

    def remark(self, extents_N6: np.ndarray) -> str | None:
        """Describes a setting that does not suit items like this one, if there is any.

        Args:
            extents_N6: `TokenBatch.extents` of one item's tokens.
        """
        return None

    @abstractmethod
    def _compress(self, batch: TokenBatch) -> TokenBatch:
        """`compress` for a batch whose real tokens come first in each row."""


class Budget(ComponentSpec):
    """Base of the specs of methods with a budget: so many vectors, or a share of the tokens.

    Attributes:
        num_vectors: at most so many vectors of each item.
        ratio: or this share of its tokens, at least one.
        rounding: of that share. Neither the papers nor their code agree; rounding down is the one
            that never exceeds the ratio.
    """

    num_vectors: NumVectors | None = None
    ratio: float | None = Field(None, gt=0, le=1)
    rounding: Literal["floor", "half_even"] = "floor"

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if self.num_vectors is None and self.ratio is None:
            raise MissingField("num_vectors", None, "an integer >= 1 unless ratio is given")
        if self.num_vectors is not None and self.ratio is not None:
            raise SpecError("ratio", self.ratio, "null when num_vectors is given")
        return self

    def budgets(self, lengths: torch.Tensor) -> torch.Tensor:
        """(B,) int64: how many vectors items of these lengths may have, at most their length.

        >>> Budget(name="any", ratio=0.1).budgets(torch.tensor([0, 4, 30, 39])).tolist()
        [0, 1, 3, 3]
        """
        if self.num_vectors is not None:
            return lengths.clamp(max=self.num_vectors)
        assert self.ratio is not None  # see _one_of_both
        shares = lengths.double() * self.ratio
        # 0.29 of 100 is 28.999...96 in binary.
        shares = (shares + 1e-9).floor() if self.rounding == "floor" else shares.round()
        return torch.minimum(shares.long().clamp_min(1), lengths)


BudgetT = TypeVar("BudgetT", bound=Budget)


class Budgeted(Compressor[BudgetT]):
    """A compressor whose spec is a `Budget`."""

    def _compress(self, batch: TokenBatch) -> TokenBatch:
        return self.reduce(batch, self.spec.budgets(batch.lengths))

    @abstractmethod
    def reduce(self, batch: TokenBatch, budgets_B: torch.Tensor) -> TokenBatch:
        """`_compress` with a budget for each item.

        Args:
            batch: real tokens first in each row.
            budgets_B: int64, from 0 (an item without tokens) to the length of each item. Items
                whose budget is their length keep their tokens, if the method `keeps_tokens`.
        """


def pack_left(batch: TokenBatch) -> tuple[TokenBatch, torch.Tensor]:
    """Moves the real tokens of each row to the front, in order, and cuts off what is all padding.

    Returns:
        The packed batch (N' = the longest item) and `order` (B, N'): the input position of each.
    """
    num_kept = int(batch.lengths.max()) if len(batch) else 0
    if bool(batch.mask[:, :num_kept].sum() == batch.mask.sum()) and bool(
        (batch.mask[:, : max(0, num_kept - 1)] >= batch.mask[:, 1:num_kept]).all()
    ):  # so it is already, as batches read from an index are
        order = torch.arange(num_kept, device=batch.mask.device).expand(len(batch), -1)

        def take(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[:, :num_kept]
    else:
        order = torch.argsort((~batch.mask).to(torch.int8), dim=1, stable=True)[:, :num_kept]

        def take(tensor: torch.Tensor) -> torch.Tensor:
            index = order.reshape(*order.shape, *[1] * (tensor.ndim - 2))
            return tensor.gather(1, index.expand(*order.shape, *tensor.shape[2:]))

    def take_any(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else take(tensor)

    packed = replace(
        batch,
        vectors=take(batch.vectors),
        mask=take(batch.mask),
        extents=take_any(batch.extents),
        spans=take_any(batch.spans),
        kind=take_any(batch.kind),
        confidence=take_any(batch.confidence),
        objects=take_any(batch.objects),
        taps={name: take(tap) for name, tap in batch.taps.items()},
    )
    return packed, order


def blocks(items_B: torch.Tensor, numbers_an_item: int) -> Iterator[slice]:
    """Slices of some items of which a tensor of so many numbers an item stays a small block.

    They are of about equal size: a block costs the more an item the smaller it is.
    """
    numbers = BLOCK_NUMBERS.get(items_B.device.type, BLOCK_NUMBERS_ELSEWHERE)
    most = max(1, numbers // max(1, numbers_an_item))
    size = -(-len(items_B) // max(1, -(-len(items_B) // most)))
    for start in range(0, len(items_B), max(1, size)):
        yield slice(start, start + size)


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


def largest(
    scores_BN: torch.Tensor, mask_BN: torch.Tensor, budgets_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the positions of the largest scores of each item; ties go to the first position.

    Args:
        scores_BN: Scores, finite where the mask is True; real tokens first in each row.
        mask_BN: bool, real tokens.
        budgets_B: Number of positions per item.

    Returns:
        (B, K) int64 positions, ascending, with K the largest budget, and their (B, K) mask.

    >>> scores, mask = torch.tensor([[1.0, 3.0, 3.0, 2.0]]), torch.ones(1, 4, dtype=torch.bool)
    >>> largest(scores, mask, torch.tensor([2]))[0].tolist()
    [[1, 2]]
    """
    size = int(budgets_B.max()) if len(budgets_B) else 0
    lowest = scores_BN.masked_fill(~mask_BN, -torch.inf)
    order_BN = lowest.argsort(dim=1, descending=True, stable=True)
    slot_mask = torch.arange(size, device=budgets_B.device) < budgets_B.unsqueeze(1)
    # What is not wanted goes behind every position, so that sorting leaves it behind.
    index_BK = order_BN[:, :size].masked_fill(~slot_mask, scores_BN.shape[1])
    index_BK = index_BK.sort(dim=1).values
    return index_BK.masked_fill(~slot_mask, 0), slot_mask


def memberships(support: torch.Tensor, num_groups: int) -> torch.Tensor:
    """(B, N) group numbers -> (B, N, K) float32, 1 where a token is in a group; -1 is in none.

    >>> memberships(torch.tensor([[1, 0, -1]]), 2).tolist()
    [[[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]]
    """
    groups = torch.arange(num_groups, device=support.device)
    return (support.unsqueeze(-1) == groups).float()


def first_minimum(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Where the minimum along `dim` is: the first of those within 1e-5 of it.

    Equal tokens make equal representatives, whose distances differ by rounding alone, and that
    depends on the batch's shape. So such differences must not count.

    >>> first_minimum(torch.tensor([[0.5, 0.2000001, 0.2]]), dim=1).tolist()
    [1]
    """
    # The maximum of descending ranks finds the first; argmax and argmin are several times slower,
    # and so is comparing into booleans. Float32 holds every rank exactly.
    size = values.shape[dim]
    ranks = torch.arange(size, 0, -1, dtype=torch.float32, device=values.device)
    ranks = ranks.reshape(-1, *[1] * (values.ndim - 1 - dim))
    is_least = torch.empty_like(values)
    torch.le(values, values.amin(dim=dim, keepdim=True) + 1e-5, out=is_least)
    return size - is_least.mul_(ranks).amax(dim=dim).long()


def group_sums(values_BNV: torch.Tensor, groups_BN: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Sums the values of each group, in the precision of the values.

    Args:
        values_BNV: Values of the tokens, finite also outside the groups.
        groups_BN: Group of each token, or -1 for none.
        num_groups: Number of groups, K.

    Returns:
        (B, K, V) sums.

    >>> tokens = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]]])
    >>> group_sums(tokens, torch.tensor([[0, 1, 0]]), 2).tolist()
    [[[3.0, 0.0], [0.0, 1.0]]]
    """
    num_items, num_tokens, width = values_BNV.shape
    if values_BNV.device.type != "cpu":
        # There index_add is atomic additions in any order: two runs would differ.
        parts = [values_BNV.new_zeros(0, num_groups, width)]  # for an empty batch
        for rows in blocks(values_BNV, num_tokens * num_groups):
            parts.append(memberships(groups_BN[rows], num_groups).mT @ values_BNV[rows])
        return torch.cat(parts)
    # Each item has a spare group behind its own, for what is in none.
    first_B1 = torch.arange(0, num_items * (num_groups + 1), num_groups + 1).unsqueeze(1)
    place_BN = first_B1 + torch.where(groups_BN < 0, num_groups, groups_BN)
    sums = values_BNV.new_zeros(num_items * (num_groups + 1), width)
    flat = values_BNV.reshape(num_items * num_tokens, width)
    sums = sums.index_add(0, place_BN.reshape(-1), flat)
    return sums.reshape(num_items, num_groups + 1, width)[:, :num_groups]


def group_sizes(groups_BN: torch.Tensor, num_groups: int) -> torch.Tensor:
    """(B, K) float32: how many tokens each group has; -1 is no group.

    >>> group_sizes(torch.tensor([[0, 1, 0, -1]]), 2).tolist()
    [[2.0, 1.0]]
    """
    ones_BN1 = torch.ones_like(groups_BN, dtype=torch.float32).unsqueeze(2)
    return group_sums(ones_BN1, groups_BN, num_groups).squeeze(2)


def close_ranks(
    vectors_BKD: torch.Tensor, mask_BK: torch.Tensor, support_BN: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs, mask and support with what is masked behind the rest of its row.

    >>> vectors, mask = torch.tensor([[[1.0], [0.0], [2.0]]]), torch.tensor([[True, False, True]])
    >>> [part.tolist() for part in close_ranks(vectors, mask, torch.tensor([[2, 0, -1]]))]
    [[[[1.0], [2.0], [0.0]]], [[True, True, False]], [[1, 0, -1]]]
    """
    if bool((mask_BK[:, 1:] <= mask_BK[:, :-1]).all()):
        return vectors_BKD, mask_BK, support_BN
    order_BK = (~mask_BK).to(torch.int8).argsort(dim=1, stable=True)
    rank_BK = order_BK.argsort(dim=1).masked_fill(~mask_BK, -1)
    support_BN = rank_BK.gather(1, support_BN.clamp_min(0)).masked_fill(support_BN < 0, -1)
    index_BKD = order_BK.unsqueeze(2).expand_as(vectors_BKD)
    return vectors_BKD.gather(1, index_BKD), mask_BK.gather(1, order_BK), support_BN
