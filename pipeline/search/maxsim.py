"""Exact MaxSim (late-interaction) scoring without padding.

    maxsim(q, d) = sum over the query tokens i of max over the document tokens j of <q_i, d_j>

Multi-vector models are trained with this sum; SMART (eq. 4) divides it by the number of query
tokens. The score of a document without tokens is -inf.

Shapes: Q queries, M query tokens, B documents, T document tokens in total, N tokens of one
document, D dimensions.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Literal, NamedTuple

import numpy as np
import torch

from pipeline.runtime.kernels import triton_module
from pipeline.search import native
from pipeline.search.packed import PackedVectors, Segment

#: Bytes of float32 working memory per block, which should fit in the last-level cache. For 260,000
#: tokens of 384 dimensions and 20 query tokens on 2 cores, 6 MB take 47 ms and 100 MB take 100 ms.
BLOCK_BYTES = 8 << 20
#: Number of sampled documents whose scores bound those of the best ones, and minimum number of
#: documents per sampled one.
SAMPLE, MIN_STEP = 4096, 16
#: Minimum number of queries of a sample. For one query of 300,000 items of one vector, the sample
#: takes a millisecond longer than writing all scores.
MIN_BATCH = 4
#: Smallest finite score.
LOWEST = float(np.finfo(np.float32).min)


def maxsim_oracle(
    query_MD: torch.Tensor,
    docs_BND: torch.Tensor,
    mask_BN: torch.Tensor,
    *,
    query_mask_M: torch.Tensor | None = None,
    reduce: Literal["sum", "mean"] = "sum",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores padded documents. This slow reference implementation is used to test the others.

    Returns:
        Scores (B,) and the index of the best document token per query token (B, M). Ties resolve to
        the first token. The index is -1 for a document without tokens.

    >>> query = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> docs = torch.tensor([[[0.5, 0.0], [-1.0, -2.0]], [[9.0, 9.0], [9.0, 9.0]]])
    >>> mask = torch.tensor([[True, True], [False, False]])
    >>> scores, best = maxsim_oracle(query, docs, mask)
    >>> scores.tolist(), best.tolist()
    ([0.5, -inf], [[0, 0], [-1, -1]])
    """
    if query_mask_M is None:
        query_mask_M = torch.ones(len(query_MD), dtype=torch.bool)
    scores, matches = [], []
    for doc_ND, mask_N in zip(docs_BND.float(), mask_BN, strict=True):
        if not mask_N.any():
            scores.append(torch.tensor(-torch.inf))
            matches.append(torch.full((len(query_MD),), -1))
            continue
        sim_MN = (query_MD.float() @ doc_ND.T).masked_fill(~mask_N, -torch.inf)
        best_M = sim_MN.amax(dim=1)[query_mask_M]
        scores.append(best_M.sum() / (max(len(best_M), 1) if reduce == "mean" else 1))
        matches.append(sim_MN.argmax(dim=1))
    return torch.stack(scores), torch.stack(matches)


def maxsim(
    queries: Sequence[torch.Tensor],
    packed: PackedVectors,
    *,
    rows: torch.Tensor | None = None,
    reduce: Literal["sum", "mean"] = "sum",
    backend: str | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> torch.Tensor:
    """Computes exact scores of queries against documents.

    The score of a document does not depend on its position: equal documents have bit-identical
    scores.

    Args:
        queries: Q tensors (M_i, D) without padding, as returned by `Codec.transform_queries`.
        packed: B documents on one device.
        rows: (R,) int64, ascending indices of the documents to score, or None for all.
        reduce: Reduction over the query tokens. The score of a query without tokens is 0.
        backend: One of `backends(packed)`. Defaults to the last, which is the fastest.
        block_bytes: Working memory per block of the torch backend, in bytes. A block has at least
            one document.

    Returns:
        (Q, B) or (Q, R) float32, or -inf for a document without tokens.

    Raises:
        ValueError: A query has another dimension than the documents, or the backend is unavailable.

    >>> query = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> tokens = torch.tensor([[0.5, 0.0], [-1.0, -2.0], [3.0, 4.0]])
    >>> packed = PackedVectors.from_values(tokens, torch.tensor([2, 0, 1]))
    >>> maxsim([query, query[:1]], packed).tolist()
    [[0.5, -inf, 7.0], [0.5, -inf, 3.0]]
    """
    kernels, level = _backend(backend, packed)
    num_docs = len(packed) if rows is None else len(rows)
    device = packed.device
    scores_QB = torch.zeros(len(queries), num_docs, device=device)
    if not len(queries) or not num_docs:
        return scores_QB
    query_MD, lengths = _concatenate(queries, packed)
    query_lengths = torch.tensor(lengths, device=device)
    if kernels is None:
        first = 0
        for segment, documents in packed.select(rows):
            last = first + (len(segment.lengths) if documents is None else len(documents))
            out_QB = scores_QB[:, first:last]
            _score(query_MD, query_lengths, segment, documents, block_bytes, out_QB)
            first = last
    else:
        kernels.score(query_MD, query_lengths, packed, rows, scores_QB, level)
    if reduce == "mean":
        scores_QB /= query_lengths.clamp_min(1).unsqueeze(1)
    return scores_QB


def best_scores(
    queries: Sequence[torch.Tensor],
    packed: PackedVectors,
    num: int,
    *,
    rows: torch.Tensor | Sequence[torch.Tensor] | None = None,
    groups: np.ndarray | None = None,
    backend: str | None = None,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Computes exact scores and returns those that can be among the best ones of a query.

    Scores below a bound, which is estimated on a sample, are dropped as soon as they are computed.
    If fewer than `num` reach it, which is rare, the documents are scored again without a bound.

    Args:
        queries: Q tensors (M_i, D) without padding, as returned by `Codec.transform_queries`.
        packed: B documents on one device.
        num: Number of best documents.
        rows: (R,) int64, ascending indices of the documents to score, None for all, or Q tensors.
        groups: (B,) int64, group of each document. If given, `num` is the number of groups.
        backend: One of `backends(packed)`. Defaults to the last, which is the fastest.

    Returns:
        Per query, the ascending indices (n,) int64 and scores (n,) float32 of documents. They have
        tokens, and include those with at least the `num`-th best score, or at least the `num`-th
        best of the maxima of the groups.

    >>> tokens = torch.tensor([[1.0], [3.0], [2.0]])
    >>> packed = PackedVectors.from_values(tokens, torch.tensor([1, 0, 2]))
    >>> best_scores([torch.ones(1, 1)], packed, num=1)
    [(array([0, 2]), array([1., 3.], dtype=float32))]
    """
    if not len(queries):
        return []
    kernels, level = _backend(backend, packed)
    _concatenate(queries, packed)  # raises if a query has another dimension
    is_shared = rows is None or isinstance(rows, torch.Tensor)
    parts: list[torch.Tensor | None] = [rows] if is_shared else list(rows)  # type: ignore[arg-type, list-item]
    if kernels is not native or (is_shared and len(queries) < MIN_BATCH):
        return list(_best_scores(queries, packed, num, parts, groups, backend))
    limits = np.full(len(queries), LOWEST, np.float32)
    num_rows = len(packed) if parts[0] is None else len(parts[0])
    step, rank = _sample(num, num_rows, groups) if is_shared else (1, 0)
    if rank:
        sample = torch.arange(0, num_rows, step) if parts[0] is None else parts[0][::step]
        scores_QS = maxsim(queries, packed, rows=sample, backend=backend).numpy()
        limits = np.maximum(limits, np.partition(scores_QS, -rank, axis=1)[:, -rank])
    tokens = [query.float() for query in queries]
    found = native.select(tokens, packed, parts, limits, level)
    for i, (items, _) in enumerate(found):
        if limits[i] > LOWEST and not _has_enough(items, num, groups):
            lowest = np.full(1, LOWEST, np.float32)
            (found[i],) = native.select(tokens[i : i + 1], packed, parts, lowest, level)
    return found


def _sample(num: int, num_rows: int, groups: np.ndarray | None) -> tuple[int, int]:
    """Returns the step of a sample and the rank in it that bounds the best scores, or rank 0."""
    step = num_rows // SAMPLE
    if groups is not None and len(groups):
        num *= -(-len(groups) // (int(groups.max()) + 1))
    # The expected number of better ones in the sample, plus four standard deviations.
    expected = num / max(step, 1)
    rank = int(expected + 4 * expected**0.5) + 4
    return (step, rank) if step >= MIN_STEP and rank <= SAMPLE // 4 else (1, 0)


def _has_enough(items: np.ndarray, num: int, groups: np.ndarray | None) -> bool:
    return len(items if groups is None else np.unique(groups[items])) >= num


def _best_scores(
    queries: Sequence[torch.Tensor],
    packed: PackedVectors,
    num: int,
    parts: Sequence[torch.Tensor | None],
    groups: np.ndarray | None,
    backend: str | None,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the result of `best_scores` for each query from all of its scores."""
    size = len(queries) if len(parts) == 1 else 1
    for first in range(0, len(queries), size):
        part = parts[first // size]
        scores_qR = maxsim(queries[first : first + size], packed, rows=part, backend=backend)
        step, rank = _sample(num, scores_qR.shape[1], groups)
        for scores_R in scores_qR:
            bounds = [max(float(scores_R[::step].topk(rank).values[-1]), LOWEST)] if rank else []
            for bound in (*bounds, LOWEST):
                index = np.flatnonzero((scores_R >= bound).numpy(force=True))
                items = index if part is None else part.numpy(force=True)[index]
                if _has_enough(items, num, groups):
                    break
            yield items, scores_R[torch.from_numpy(index).to(scores_R.device)].numpy(force=True)


def best_tokens(
    query_MD: torch.Tensor,
    packed: PackedVectors,
    *,
    rows: torch.Tensor | None = None,
    backend: str | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Finds the document token that matches each query token best, for every document.

    Yields:
        For each block of b documents: the index of its first document in `rows`, the similarities
        (b, M) float32, and the indices (b, M) int64 of the best tokens in their document. Ties
        resolve to the first token. Documents without tokens have -inf and -1.

    >>> query = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> tokens = torch.tensor([[0.5, 0.0], [-1.0, 2.0], [3.0, 4.0]])
    >>> packed = PackedVectors.from_values(tokens, torch.tensor([2, 1]))
    >>> [(first, sim.tolist(), token.tolist()) for first, sim, token in best_tokens(query, packed)]
    [(0, [[0.5, 2.0], [3.0, 4.0]], [[0, 1], [0, 0]])]
    """
    if not len(query_MD):
        return
    kernels, level = _backend(backend, packed)
    query_MD, _ = _concatenate([query_MD], packed)
    if kernels is not None:
        rows = torch.arange(len(packed)) if rows is None else rows
        size = max(block_bytes // (8 * len(query_MD)), 1)
        for first in range(0, len(rows), size):
            best_bM, token_bM = kernels.best(query_MD, packed, rows[first : first + size], level)
            yield first, best_bM, token_bM.long()
        return
    num_done = 0
    for segment, selected in packed.select(rows):
        for block in _similarities(query_MD, segment, selected, block_bytes):
            yield num_done + block.first, block.best_bM, _first_best(block)
        num_done += len(segment.lengths) if selected is None else len(selected)


def backends(packed: PackedVectors) -> tuple[str, ...]:
    """Returns the backends that can score these vectors on their device, fastest last.

    "torch" is always available. The levels of `native` require a CPU, "triton" a CUDA device.
    """
    kernels = _kernels(packed)
    if not kernels:
        return ("torch",)
    if packed not in _can_score:  # of thousands of segments, a millisecond
        _can_score[packed] = all(kernels.can_score(segment) for segment in packed.segments)
    return ("torch", *kernels.available()) if _can_score[packed] else ("torch",)


_can_score: weakref.WeakKeyDictionary[PackedVectors, bool] = weakref.WeakKeyDictionary()


def _kernels(packed: PackedVectors) -> ModuleType | None:
    if packed.device.type == "cpu":
        return native
    return triton_module("pipeline.search.triton_kernels", packed.device)


def _backend(name: str | None, packed: PackedVectors) -> tuple[ModuleType | None, str]:
    valid = backends(packed)
    if name is not None and name not in valid:
        raise ValueError(f"backend must be one of {', '.join(valid)}, got {name!r}")
    level = name or valid[-1]
    return (None if level == "torch" else _kernels(packed)), level


def _concatenate(
    queries: Sequence[torch.Tensor], packed: PackedVectors
) -> tuple[torch.Tensor, list[int]]:
    """Concatenates the tokens (M, D) of all queries, and counts the tokens per query."""
    shapes = [query.shape for query in queries]
    for shape in shapes:
        if len(shape) != 2 or shape[1] != packed.dim:
            rule = f"queries must have the shape (tokens, {packed.dim})"
            raise ValueError(f"{rule}, got {tuple(shape)}")
    tokens_MD = torch.cat(list(queries)).to(packed.device, torch.float32)
    return tokens_MD, [shape[0] for shape in shapes]


def _score(
    query_MD: torch.Tensor,
    query_lengths: torch.Tensor,
    segment: Segment,
    documents: torch.Tensor | None,
    block_bytes: int,
    out_QB: torch.Tensor,
) -> None:
    """Writes sums of maxima block by block, with torch on any device.

    Each block of whole documents is converted to float32 and multiplied by all query tokens. The
    maximum over the rows of each document is a `scatter_reduce` with an index expanded along the
    columns, which was the fastest option on 2 cores for 31,000 tokens and 600 query tokens: 2 ms,
    compared to 6 ms for a loop over equal lengths, 11 ms for `numpy.maximum.reduceat`, 56 ms for
    `torch.segment_reduce` and 94 ms for gathering into a padded block. The multiplication itself
    takes 100 ms. It requires no sorting and supports empty documents.
    """
    query_of_M = torch.repeat_interleave(query_lengths).unsqueeze(1)
    for block in _similarities(query_MD, segment, documents, block_bytes):
        block_Qb = torch.zeros(len(query_lengths), block.last - block.first, device=out_QB.device)
        best_Mb = block.best_bM.T.contiguous()
        block_Qb.scatter_add_(0, query_of_M.expand(-1, best_Mb.shape[1]), best_Mb)
        out_QB[:, block.first : block.last] = block_Qb.masked_fill_(
            block.lengths_b == 0, -torch.inf
        )


def _first_best(block: _Block) -> torch.Tensor:
    """Returns the first of the best document tokens for each query token, (b, M) int64."""
    num_tokens = block.sim_nM.shape[1]
    # Few similarities equal the maximum of their document. Ties are resolved by a minimum.
    is_best_nM = block.sim_nM == block.best_bM[block.doc_of_n]
    if is_best_nM.is_cpu:  # ten times faster with NumPy than with torch
        indices = torch.from_numpy(np.flatnonzero(is_best_nM.numpy()))
    else:
        indices = is_best_nM.view(-1).nonzero().squeeze(1)
    row = indices // num_tokens
    doc = block.doc_of_n[row]
    position = row - (block.lengths_b.cumsum(0) - block.lengths_b)[doc]
    none = torch.iinfo(torch.int64).max
    token_bM = torch.full_like(block.best_bM, none, dtype=torch.int64).view(-1)
    token_bM.scatter_reduce_(0, doc * num_tokens + indices % num_tokens, position, "amin")
    return token_bM.view_as(block.best_bM).masked_fill_(block.lengths_b[:, None] == 0, -1)


class _Block(NamedTuple):
    """Similarities between a block of documents and all query tokens, with their maxima.

    Attributes:
        lengths_b: Number of tokens per document.
        doc_of_n: Document of each token, relative to `first`.
        sim_nM: Similarities of document tokens and query tokens.
        best_bM: Maximum over the tokens of each document, or -inf without tokens.
    """

    first: int
    last: int
    lengths_b: torch.Tensor
    doc_of_n: torch.Tensor
    sim_nM: torch.Tensor
    best_bM: torch.Tensor


def _similarities(
    query_MD: torch.Tensor,
    segment: Segment,
    documents: torch.Tensor | None,
    block_bytes: int,
) -> Iterator[_Block]:
    starts_B, lengths_B = segment.starts, segment.lengths
    if documents is not None:
        starts_B, lengths_B = starts_B[documents], lengths_B[documents]
    if not len(lengths_B):
        return
    num_tokens, dim = query_MD.shape
    device = query_MD.device
    blocks = list(_blocks(lengths_B, max_tokens=block_bytes // (4 * (dim + num_tokens))))
    size = max(block_tokens for _, _, block_tokens in blocks)
    buffer_nD = torch.empty(size, dim, device=device)  # page faults cost more than the copy
    for first, last, block_tokens in blocks:
        lengths_b = lengths_B[first:last]
        docs_nD = buffer_nD[:block_tokens]
        parts = _rows(segment, starts_B[first:last], lengths_b, block_tokens)
        numbers_nD, scales_n1 = segment.codec.factors(parts, dim)
        docs_nD.copy_(numbers_nD)
        sim_nM = docs_nD @ query_MD.T
        if scales_n1 is not None:
            sim_nM *= scales_n1
        doc_of_n = torch.repeat_interleave(lengths_b, output_size=block_tokens)
        best_bM = torch.full((last - first, num_tokens), -torch.inf, device=device)
        best_bM.scatter_reduce_(0, doc_of_n.unsqueeze(1).expand(-1, num_tokens), sim_nM, "amax")
        yield _Block(first, last, lengths_b, doc_of_n, sim_nM, best_bM)


def _blocks(lengths_B: torch.Tensor, max_tokens: int) -> Iterator[tuple[int, int, int]]:
    """Yields (first, last + 1, tokens) of runs. A document of more tokens is a run by itself."""
    ends = lengths_B.cumsum(0)
    first, start = 0, 0
    while first < len(lengths_B):
        last = int(torch.searchsorted(ends, start + max_tokens, right=True))
        last = max(last, first + 1)
        end = int(ends[last - 1])
        yield first, last, end - start
        first, start = last, end


def _rows(
    segment: Segment, starts_b: torch.Tensor, lengths_b: torch.Tensor, num_tokens: int
) -> dict[str, torch.Tensor]:
    """Returns the parts of the tokens of documents. Views if they are contiguous, else copies."""
    segment.verify(starts_b.numpy(force=True), lengths_b.numpy(force=True))
    start, end = int(starts_b[0]), int(starts_b[-1] + lengths_b[-1])
    if end - start == num_tokens:
        return {name: part[start:end] for name, part in segment.parts.items()}
    # Token t of the block is row t + shift of the segment.
    shift_b = starts_b - (lengths_b.cumsum(0) - lengths_b)
    shift_n = torch.repeat_interleave(shift_b, lengths_b, output_size=num_tokens)
    index_n = torch.arange(num_tokens, device=starts_b.device) + shift_n
    return {name: part[index_n] for name, part in segment.parts.items()}
