"""Post-hoc compressors, which reduce the N token vectors of an item to at most K vectors.

Each module of this package implements one method from the literature, or a baseline.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Annotated, ClassVar, Generic, Literal, Self, TypeVar

import numpy as np
import torch
from pydantic import Field, model_validator

from pipeline.config import ComponentSpec, ComponentSpecT, MissingField, SpecError
from pipeline.runtime.kernels import triton_module
from pipeline.taps import Tap
from pipeline.tokens import TokenBatch, normalise, unit_vectors

#: Maximum number of tokens per item. Assignments are stored as uint16, where 65535 means "none".
MAX_TOKENS = 65534

#: Type of spec fields with the vector budget K.
NumVectors = Annotated[int, Field(ge=1, le=MAX_TOKENS)]

#: Maximum number of elements of the largest intermediate tensor by device type. 8 MiB of float32
#: fit into the cache of a CPU. 256 MiB are enough to keep a GPU busy, and limit the memory that
#: large batches need.
MAX_BLOCK_ELEMENTS = {"cpu": 1 << 21}
DEFAULT_MAX_BLOCK_ELEMENTS = 1 << 26

#: Number of elements of a tensor from which the tensors derived from it are computed in parts. They
#: would otherwise exceed the memory for items of many tokens and a large budget.
LARGE = 1 << 26

#: Values that differ by less from the minimum are considered equal to it.
TIE_TOLERANCE = 1e-5


class Compressor(ABC, Generic[ComponentSpecT]):
    """Base class of compressors, which reduce the number of tokens in a `TokenBatch`.

    Subclasses define a nested `Spec` whose first field is `name: Literal["..."]` and implement
    `_compress`. Methods with a vector budget should derive from `Budgeted` instead. Compressors
    process whole batches on any device, without Python loops over tokens. The result for an item
    must not depend on the other items in the batch or on the values at padding. Compressors can
    rely on finite vectors and attention statistics, because the index job rejects all other items
    before compression.

    Unless documented otherwise, compressors treat all kinds of tokens alike. Tokens that should not
    be indexed, such as special tokens and prompts, have already been masked by the encoder.

    Constructing a compressor is cheap. A compressor with `needs_fit` can be constructed without its
    artefact, but `compress` must not be called in this case.

    Args:
        spec: Options of the compressor.
        artefact: Result of `fit` for compressors with `needs_fit`, or the weights that a
            `config.TrainedSpec` names.
    """

    Spec: ClassVar[type[ComponentSpec]]
    spec: ComponentSpecT
    #: Whether the compressor must be fitted to a sample of the corpus before it can be used.
    needs_fit: bool = False
    #: Whether the compressor needs an encoder that appends learned tokens to items.
    needs_appended: bool = False
    #: Whether the compressor reads `TokenBatch.objects`, the annotated object of each token.
    uses_objects: bool = False
    #: Stored form of the token assignment: "assignment" stores the output of each input token, or
    #: none; "indices" stores the input token of each output, for methods that select tokens; None
    #: if tokens are not assigned to outputs.
    assignment_form: Literal["assignment", "indices"] | None = "assignment"
    #: Whether output vectors have unit length.
    normalised: bool = True
    #: Whether items with no more tokens than their budget keep their vectors unchanged.
    keeps_tokens: bool = True

    def __init__(self, spec: ComponentSpecT, artefact: dict[str, np.ndarray] | None = None):
        self.spec, self.artefact = spec, artefact

    @property
    def needs_taps(self) -> tuple[Tap, ...]:
        """Attention statistics that the compressor reads from `TokenBatch.taps`."""
        return ()

    @property
    def is_nested(self) -> bool:
        """True if the first k vectors of an item form a representation with budget k."""
        return False

    @property
    def module(self) -> torch.nn.Module | None:
        """Trainable module that `compress` applies; None for compressors without parameters.

        Without an artefact, its parameters are initialised at random by torch's generator.
        """
        return None

    @property
    def fitted(self) -> dict[str, np.ndarray]:
        """Artefact of a fitted compressor. Raises an error if it was constructed without one."""
        assert self.artefact is not None, "fit first"
        return self.artefact

    @classmethod
    def fit(cls, spec: ComponentSpecT, sample: Iterable[TokenBatch]) -> dict[str, np.ndarray]:
        """Fits the compressor to a random sample of the corpus.

        Returns:
            The artefact, which is stored in the index together with its hash.
        """
        raise AssertionError(f"{cls.__name__} sets needs_fit but does not implement fit")

    def output_dim(self, dim: int) -> int:
        """Returns the dimension of the output vectors for input vectors of dimension `dim`."""
        return dim

    def transform_queries(self, tokens_QD: torch.Tensor) -> torch.Tensor:
        """Transforms query tokens (Q, D) for comparison with the compressed vectors."""
        return tokens_QD

    def compress(self, batch: TokenBatch) -> TokenBatch:
        """Compresses the items of a batch.

        If `keeps_tokens` is set, items with no more tokens than their budget are returned
        unchanged.

        Returns:
            A batch with vectors (B, <= K, D) and `assignment` (B, N), the output position to which
            each input token is assigned, or None if `assignment_form` is None. Real outputs come
            first in each row. Items without tokens have no outputs.

        Raises:
            SpecError: The batch lacks an attention statistic or the appended tokens that the
                compressor needs.
        """
        assert not self.needs_fit or self.artefact is not None, "fit first"
        for tap in self.needs_taps:
            if tap.name not in batch.taps:
                field, problem = f"taps of {self.spec.name}", "is not in the batch"
                raise SpecError.unknown_name(field, tap.name, batch.taps, problem)
        packed, order = pack_left(batch)
        # Distances and means are computed in float32, even inside the autocast region of a training
        # loop.
        with torch.autocast(batch.vectors.device.type, enabled=False):
            result = self._compress(packed)
        if result.assignment is None:
            return result
        assignment = result.assignment
        if not packed.is_full:
            assignment = assignment.masked_fill(~packed.mask, -1)
        # Convert positions in the packed batch back to positions in `batch`.
        if order is not None:
            unassigned = torch.full_like(batch.mask, -1, dtype=torch.int64)
            assignment = unassigned.scatter_(1, order, assignment)
        elif num_missing := batch.mask.shape[1] - assignment.shape[1]:
            assignment = torch.nn.functional.pad(assignment, (0, num_missing), value=-1)
        return replace(result, assignment=assignment)

    def check_encoder(self, encoder: ComponentSpec) -> None:
        """Checks that the compressor can be used with an encoder, without loading it.

        Raises:
            SpecError: It needs appended tokens, and the encoder appends none.
        """
        if self.needs_appended and getattr(encoder, "appended_tokens", None) is None:
            rule, problem = "used with an encoder with appended_tokens", "appends none"
            raise SpecError(f"compressor {self.spec.name}", encoder.name, rule, problem)

    def remark(self, extents_N6: np.ndarray) -> str | None:
        """Returns a warning if an option is unsuitable for the given item, or None.

        Args:
            extents_N6: Extents of the tokens of the item, see `TokenBatch.extents`.
        """
        return None

    @abstractmethod
    def _compress(self, batch: TokenBatch) -> TokenBatch:
        """Compresses a batch in which padding is at the end of each row."""


class Budget(ComponentSpec):
    """Base class of the specs of compressors that have a vector budget.

    Exactly one of `num_vectors` and `ratio` must be set.
    """

    num_vectors: NumVectors | None = None
    """Maximum number of vectors per item."""
    ratio: float | None = Field(None, gt=0, le=1)
    """Fraction of the tokens of an item to keep. At least one vector is kept."""
    rounding: Literal["floor", "half_even"] = "floor"
    """Rounding of the number of vectors when `ratio` is used. Published methods and their
    implementations round differently. With "floor", the ratio is never exceeded.
    """

    @property
    def requires_budget(self) -> bool:
        """True if `num_vectors` or `ratio` must be set."""
        return True

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        if self.requires_budget and self.num_vectors is None and self.ratio is None:
            raise MissingField("num_vectors", None, "an integer >= 1 unless ratio is given")
        is_valid = self.num_vectors is None or self.ratio is None
        self.require(is_valid, "ratio", "null when num_vectors is given")
        return self

    def budgets(self, lengths: torch.Tensor) -> torch.Tensor:
        """Returns the budgets (B,) int64 of items, at most their numbers of tokens.

        >>> Budget(name="any", ratio=0.1).budgets(torch.tensor([0, 4, 30, 39])).tolist()
        [0, 1, 3, 3]
        """
        if self.num_vectors is not None:
            return lengths.clamp(max=self.num_vectors)
        assert self.ratio is not None  # guaranteed by _check_budget
        counts = lengths.double() * self.ratio
        # In float64, 100 * 0.29 evaluates to 28.999...96.
        counts = (counts + 1e-9).floor() if self.rounding == "floor" else counts.round()
        return torch.minimum(counts.long().clamp_min(1), lengths)


BudgetT = TypeVar("BudgetT", bound=Budget)


class Budgeted(Compressor[BudgetT]):
    """Base class of compressors that have a vector budget."""

    Spec: ClassVar[type[Budget]] = Budget

    def _compress(self, batch: TokenBatch) -> TokenBatch:
        if not batch.is_full or not batch.mask.numel():
            return self.reduce(batch, self.spec.budgets(batch.lengths))
        budget = int(self.spec.budgets(torch.tensor([batch.mask.shape[1]])))
        return self.reduce_uniform(batch, budget)

    @abstractmethod
    def reduce(self, batch: TokenBatch, budgets_B: torch.Tensor) -> TokenBatch:
        """Compresses a batch with an individual budget for each item.

        If `keeps_tokens` is set, items with no more tokens than their budget are returned
        unchanged.

        Args:
            batch: Items to compress. Padding must be at the end of each row.
            budgets_B: Number of output vectors per item, int64. It is at most the number of tokens
                of the item, and 0 only if the item has no tokens.
        """

    def reduce_uniform(self, batch: TokenBatch, budget: int) -> TokenBatch:
        """Compresses a batch without padding with the same budget for all items.

        Methods override it if they need fewer operations when the budget is known on the host.

        Args:
            batch: At least one item, and at least one token per item.
            budget: Number of output vectors per item, at least 1 and at most the number of tokens.
        """
        return self.reduce(batch, batch.lengths.clamp(max=budget))


def pack_left(batch: TokenBatch) -> tuple[TokenBatch, torch.Tensor | None]:
    """Moves padding to the end of each row and truncates it to the longest item (N').

    The order of the tokens is preserved. Also returns the input position of each packed token
    (B, N'), or None if all tokens keep their positions.
    """
    if batch.is_full:
        return batch, None
    # A single transfer, because reading values from a GPU waits for all preceding kernels.
    ranks_N = torch.arange(1, batch.mask.shape[1] + 1, device=batch.mask.device)
    ends_B = (batch.mask * ranks_N).amax(dim=1)
    lengths, ends = torch.stack([batch.lengths, ends_B]).tolist()
    max_length = max(lengths)
    order: torch.Tensor | None = None
    if lengths == ends:  # the case for all batches read from an index

        def take(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[:, :max_length]
    else:
        order_BN = torch.argsort((~batch.mask).to(torch.int8), dim=1, stable=True)
        order = index_BN = order_BN[:, :max_length]

        def take(tensor: torch.Tensor) -> torch.Tensor:
            index = index_BN.reshape(*index_BN.shape, *[1] * (tensor.ndim - 2))
            return tensor.gather(1, index.expand(*index_BN.shape, *tensor.shape[2:]))

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
    vars(packed)["is_full"] = min(lengths) == max_length
    return packed, order


def blocks(items_B: torch.Tensor, elements_per_item: int) -> Iterator[slice]:
    """Yields slices of the items that are small enough to limit the size of intermediate tensors.

    All slices have about the same size, because the cost per item is higher for small slices. For
    an empty batch, there is one slice.

    items_B: Tensor whose first dimension is the batch. Its device determines the limit.
    elements_per_item: Number of elements of the largest intermediate tensor per item.
    """
    max_elements = MAX_BLOCK_ELEMENTS.get(items_B.device.type, DEFAULT_MAX_BLOCK_ELEMENTS)
    max_items = max(1, max_elements // max(1, elements_per_item))
    size = -(-len(items_B) // max(1, -(-len(items_B) // max_items)))
    for start in range(0, max(1, len(items_B)), max(1, size)):
        yield slice(start, start + size)


def concatenate(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenates the results of blocks, without a copy if there is only one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def is_cpu(tensor: torch.Tensor) -> bool:
    """Returns True if the tensor is in the memory of a CPU."""
    return tensor.device.type == "cpu"


def kernel_module(tensor: torch.Tensor) -> ModuleType | None:
    """Returns the module of Triton kernels if they can process the tensor, else None."""
    return triton_module("pipeline.compression.triton_kernels", tensor.device)


def select(batch: TokenBatch, index: torch.Tensor, index_mask: torch.Tensor) -> TokenBatch:
    """Selects the tokens at the positions `index` (B, K) for which `index_mask` (B, K) is True.

    Returns unit vectors (B, K, D) and the assignment of tokens.
    """
    dim = batch.vectors.shape[2]
    vectors = batch.vectors.gather(1, index.unsqueeze(-1).expand(-1, -1, dim))
    num_tokens = batch.mask.shape[1]
    outputs = torch.arange(index.shape[1], device=index.device).expand_as(index)
    # Masked slots are written to an additional column, which is dropped at the end.
    padded = index.new_full((len(batch), num_tokens + 1), -1)
    padded.scatter_(1, torch.where(index_mask, index, num_tokens), outputs)
    selected = TokenBatch(
        vectors, index_mask, batch.normalised, pooled=batch.pooled, assignment=padded[:, :-1]
    )
    return replace(selected, vectors=unit_vectors(selected), normalised=True)


def largest(
    scores_BN: torch.Tensor, mask_BN: torch.Tensor, budgets_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the positions (B, K) of the largest scores of each item, ascending, and their mask.

    K is the largest budget. Tokens come first in each row, and their scores are finite. Ties are
    broken in favour of the earlier position.

    >>> scores, mask = torch.tensor([[1.0, 3.0, 3.0, 2.0]]), torch.ones(1, 4, dtype=torch.bool)
    >>> largest(scores, mask, torch.tensor([2]))[0].tolist()
    [[1, 2]]
    """
    size = int(budgets_B.max()) if len(budgets_B) else 0
    masked_BN = scores_BN.masked_fill(~mask_BN, -torch.inf)
    order_BN = masked_BN.argsort(dim=1, descending=True, stable=True)
    slot_mask = torch.arange(size, device=budgets_B.device) < budgets_B.unsqueeze(1)
    # N is larger than any position, so unused slots stay last after sorting.
    index_BK = torch.where(slot_mask, order_BN[:, :size], scores_BN.shape[1])
    return index_BK.sort(dim=1).values * slot_mask, slot_mask


def top_positions(scores_BN: torch.Tensor, num_positions: int) -> torch.Tensor:
    """Computes `largest` without padding, with the same number of positions for all items.

    >>> top_positions(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 2).tolist()
    [[1, 2]]
    """
    order_BN = scores_BN.argsort(dim=1, descending=True, stable=True)
    return order_BN[:, :num_positions].sort(dim=1).values


def memberships(groups_BN: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Returns the one-hot encoding (B, N, K) float32 of group indices, all zeros for -1.

    >>> memberships(torch.tensor([[1, 0, -1]]), 2).tolist()
    [[[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]]
    """
    result = torch.empty((*groups_BN.shape, num_groups), device=groups_BN.device)
    groups_K = torch.arange(num_groups, device=groups_BN.device)
    return torch.eq(groups_BN.unsqueeze(-1), groups_K, out=result)


def large_parts(values: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
    """Splits a large tensor along a dimension into views of about `LARGE / 4` elements."""
    return values.split(max(1, values.shape[dim] * LARGE // (4 * values.numel())), dim)


def in_parts(
    function: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor, dim: int
) -> torch.Tensor:
    """Computes `function(values)`, which has the same shape and type.

    A large tensor without a gradient is split along `dim` and overwritten part by part.
    """
    if values.numel() <= LARGE or values.requires_grad:
        return function(values)
    for part in large_parts(values, dim):
        part.copy_(function(part))
    return values


def first_minimum(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns the first index along `dim` whose value is within 1e-5 of the minimum.

    Equal tokens form equal representatives, whose distances differ only by rounding errors. These
    depend on the shape of the batch, so the tolerance makes the result independent of it.

    >>> first_minimum(torch.tensor([[0.5, 0.2000001, 0.2]]), dim=1).tolist()
    [1]
    """
    if not is_cpu(values):
        is_supported = values.dtype == torch.float32 and 0 <= dim < values.ndim - 1
        if is_supported and values.is_contiguous() and (kernels := kernel_module(values)):
            return kernels.first_minimum(values, dim, TIE_TOLERANCE)
        # Boolean values need less memory bandwidth. argmax is not implemented for them.
        is_minimum = values <= values.amin(dim=dim, keepdim=True).add_(TIE_TOLERANCE)
        return is_minimum.view(torch.uint8).argmax(dim=dim)
    if values.numel() > LARGE and values.ndim == 3 and dim > 0 and values.shape[3 - dim] > 1:
        parts = large_parts(values, 3 - dim)
        return torch.cat([first_minimum(part, dim) for part in parts], dim=1)
    # The maximum of descending ranks is the first match. argmax, argmin and boolean comparisons are
    # several times slower on a CPU. float32 represents the ranks exactly.
    size = values.shape[dim]
    ranks = torch.arange(size, 0, -1, dtype=torch.float32, device=values.device)
    ranks = ranks.reshape(-1, *[1] * (values.ndim - 1 - dim))
    is_minimum = torch.empty_like(values)
    torch.le(values, values.amin(dim=dim, keepdim=True) + TIE_TOLERANCE, out=is_minimum)
    return size - is_minimum.mul_(ranks).amax(dim=dim).long()


def group_sums(
    values_BNV: torch.Tensor,
    groups_BN: torch.Tensor,
    num_groups: int,
    weights_BN: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the weighted sum of the values of each group, (B, K, V), in their precision.

    Args:
        values_BNV: Values per token; must be finite, including those of tokens without a group.
        groups_BN: Group index of each token, or -1 for none.
        num_groups: Number of groups K.
        weights_BN: Weights of the tokens, 0 for tokens without a group; None if all are 1.

    >>> tokens = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]]])
    >>> group_sums(tokens, torch.tensor([[0, 1, 0]]), 2).tolist()
    [[[3.0, 0.0], [0.0, 1.0]]]
    """
    num_items, num_tokens, width = values_BNV.shape
    if not is_cpu(values_BNV):
        # On GPUs, index_add uses atomic additions in arbitrary order and is not deterministic.
        parts = [
            _group_products(
                values_BNV[rows],
                groups_BN[rows],
                num_groups,
                None if weights_BN is None else weights_BN[rows],
            )
            for rows in blocks(values_BNV, num_tokens * num_groups)
        ]
        return concatenate(parts)
    if weights_BN is not None:
        values_BNV = values_BNV * weights_BN.unsqueeze(2)
    # Each item has an additional last group for tokens without a group.
    offset_B1 = torch.arange(0, num_items * (num_groups + 1), num_groups + 1).unsqueeze(1)
    row_BN = offset_B1 + torch.where(groups_BN < 0, num_groups, groups_BN)
    sums = values_BNV.new_zeros(num_items * (num_groups + 1), width)
    flat = values_BNV.reshape(num_items * num_tokens, width)
    sums = sums.index_add(0, row_BN.reshape(-1), flat)
    return sums.reshape(num_items, num_groups + 1, width)[:, :num_groups]


def _group_products(
    values_BNV: torch.Tensor,
    groups_BN: torch.Tensor,
    num_groups: int,
    weights_BN: torch.Tensor | None,
) -> torch.Tensor:
    if weights_BN is None:
        return memberships(groups_BN, num_groups).mT @ values_BNV
    weights_BKN = weights_BN.new_zeros(len(groups_BN), num_groups, groups_BN.shape[1])
    index_B1N = groups_BN.clamp_min(0).unsqueeze(1)
    return weights_BKN.scatter_(1, index_B1N, weights_BN.unsqueeze(1)) @ values_BNV


def group_sizes(groups_BN: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Returns the number of tokens of each group, (B, K) float32. A group index of -1 is ignored.

    >>> group_sizes(torch.tensor([[0, 1, 0, -1]]), 2).tolist()
    [[2.0, 1.0]]
    """
    ones_BN1 = torch.ones_like(groups_BN, dtype=torch.float32).unsqueeze(2)
    return group_sums(ones_BN1, groups_BN, num_groups).squeeze(2)


def group_means(
    batch: TokenBatch,
    tokens_BND: torch.Tensor,
    assignment_BN: torch.Tensor,
    budgets_B: torch.Tensor,
) -> TokenBatch:
    """Returns a batch that contains the normalised mean of the vectors of each group.

    Args:
        batch: Batch that is compressed.
        tokens_BND: Vectors to average, such as `unit_vectors(batch)`.
        assignment_BN: Group of each token, below its budget, or -1 for none.
        budgets_B: Number of groups per item. Groups without tokens have no vector.
    """
    num_outputs = int(budgets_B.max()) if len(batch) else 0
    sums_BKD = group_sums(tokens_BND, assignment_BN, num_outputs)
    return TokenBatch(
        vectors=normalise(sums_BKD),  # division by the counts would not change the direction
        mask=group_sizes(assignment_BN, num_outputs) > 0,
        normalised=True,
        pooled=batch.pooled,
        assignment=assignment_BN,
    )


def pack_outputs(
    vectors_BKD: torch.Tensor, mask_BK: torch.Tensor, assignment_BN: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Moves masked outputs to the end of each row and updates the assignment accordingly.

    >>> vectors, mask = torch.tensor([[[1.0], [0.0], [2.0]]]), torch.tensor([[True, False, True]])
    >>> [part.tolist() for part in pack_outputs(vectors, mask, torch.tensor([[2, 0, -1]]))]
    [[[[1.0], [2.0], [0.0]]], [[True, True, False]], [[1, 0, -1]]]
    """
    if bool((mask_BK[:, 1:] <= mask_BK[:, :-1]).all()):
        return vectors_BKD, mask_BK, assignment_BN
    order_BK = (~mask_BK).to(torch.int8).argsort(dim=1, stable=True)
    rank_BK = order_BK.argsort(dim=1).masked_fill(~mask_BK, -1)
    new_BN = rank_BK.gather(1, assignment_BN.clamp_min(0)).masked_fill(assignment_BN < 0, -1)
    index_BKD = order_BK.unsqueeze(2).expand_as(vectors_BKD)
    return vectors_BKD.gather(1, index_BKD), mask_BK.gather(1, order_BK), new_BN
