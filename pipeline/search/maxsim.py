"""MaxSim, the late-interaction score: exact, and never padded to the longest document.

    late(q, d) = sum over the query tokens i of max over the document tokens j of <q_i, d_j>

This is the sum that multi-vector models are trained with; SMART (eq. 4) divides it by the number of
query tokens. A padding position never wins, and a document without tokens scores -inf.

Shapes: Q queries, M query tokens, B documents, T document tokens in all, N of one, D numbers each.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Literal, NamedTuple

import numpy as np
import torch

from pipeline.search import native
from pipeline.search.packed import PackedVectors, Segment

#: Bytes of float32 working memory of one block. About a last-level cache: on 2 cores, 260,000
#: tokens of 384 numbers and a query of 20 tokens, 6 MB take 47 ms, 100 MB take 100 ms.
BLOCK_BYTES = 8 << 20


def maxsim_oracle(
    query_MD: torch.Tensor,
    docs_BND: torch.Tensor,
    mask_BN: torch.Tensor,
    *,
    query_mask_M: torch.Tensor | None = None,
    reduce: Literal["sum", "mean"] = "sum",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores padded documents in the slow and obvious way that every fast path is tested against.

    Args:
        query_MD: Query tokens.
        docs_BND: Document tokens.
        mask_BN: bool, the real document tokens.
        query_mask_M: bool, the real query tokens; None for all. The others add 0 to the sum and do
            not count in the mean.
        reduce: Sum over the query tokens, or their mean.

    Returns:
        Scores (B,), and the best document token of each query token (B, M): the first of equals, -1
        for a document without tokens.

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
    """Scores many queries against many documents, exactly.

    A document's score does not depend on its position: equal documents have bit-identical scores.

    Args:
        queries: Q tensors (M_i, D) of real tokens, as `Codec.transform_queries` returned them.
        packed: B documents on one device.
        rows: (R,) int64, ascending, the documents to score; None for all.
        reduce: Sum over the query tokens, or their mean; 0 for a query without tokens.
        backend: One of `backends(packed)`; default the last, which is the fastest.
        block_bytes: Working memory of a block of the torch backend, in bytes; a block has at least
            one document.

    Returns:
        (Q, B) float32, or (Q, R); -inf for a document without tokens.

    Raises:
        ValueError: A query does not have the documents' dimension, or the backend does not exist.

    >>> query = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> tokens = torch.tensor([[0.5, 0.0], [-1.0, -2.0], [3.0, 4.0]])
    >>> packed = PackedVectors.of_values(tokens, torch.tensor([2, 0, 1]))
    >>> maxsim([query, query[:1]], packed).tolist()
    [[0.5, -inf, 7.0], [0.5, -inf, 3.0]]
    """
    kernels, level = _backend(backend, packed)
    num_docs = len(packed) if rows is None else len(rows)
    device = packed.device
    scores_QB = torch.zeros(len(queries), num_docs, device=device)
    if not len(queries) or not num_docs:
        return scores_QB
    query_MD = _joined(queries, packed)
    query_lengths = torch.tensor([len(query) for query in queries], device=device)
    chosen = list(packed.chosen(rows))
    if kernels is None:
        first = 0
        for segment, documents in chosen:
            last = first + (len(segment.lengths) if documents is None else len(documents))
            own_QB = scores_QB[:, first:last]
            _score(query_MD, query_lengths, segment, documents, block_bytes, own_QB)
            first = last
    else:
        kernels.score(query_MD, query_lengths, chosen, scores_QB, level)
    if reduce == "mean":
        scores_QB /= query_lengths.clamp_min(1).unsqueeze(1)
    return scores_QB


def best_tokens(
    query_MD: torch.Tensor,
    packed: PackedVectors,
    *,
    rows: torch.Tensor | None = None,
    backend: str | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Finds the best token of each document for each query token: `maxsim` before its sums.

    Args:
        query_MD: The real tokens of any number of queries, one after the other.
        packed: Documents on one device.
        rows: As in `maxsim`.
        backend: As in `maxsim`.
        block_bytes: Memory of a block of results, in bytes.

    Yields:
        For each block of documents the position of its first one among those asked for, the
        similarities (b, M) float32, and the tokens (b, M) int64, counted from the start of each
        document, the first of equals; -inf and -1 for a document without tokens.

    >>> query = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> tokens = torch.tensor([[0.5, 0.0], [-1.0, 2.0], [3.0, 4.0]])
    >>> packed = PackedVectors.of_values(tokens, torch.tensor([2, 1]))
    >>> [(first, sim.tolist(), token.tolist()) for first, sim, token in best_tokens(query, packed)]
    [(0, [[0.5, 2.0], [3.0, 4.0]], [[0, 1], [0, 0]])]
    """
    if not len(query_MD):
        return
    kernels, level = _backend(backend, packed)
    query_MD = _joined([query_MD], packed)
    done = 0
    for segment, chosen in packed.chosen(rows):
        num_docs = len(segment.lengths) if chosen is None else len(chosen)
        if kernels is None:
            for block in _similarities(query_MD, segment, chosen, block_bytes):
                yield done + block.first, block.best_bM, _first_best(block)
        else:
            if chosen is None:
                chosen = torch.arange(num_docs, device=packed.device)
            size = max(block_bytes // (8 * len(query_MD)), 1)
            for first in range(0, num_docs, size):
                documents = chosen[first : first + size]
                best_bM, token_bM = kernels.best(query_MD, segment, documents, level)
                yield done + first, best_bM, token_bM.long()
        done += num_docs


def backends(packed: PackedVectors) -> tuple[str, ...]:
    """Returns the backends that can score these vectors on their device, the fastest last.

    "torch" anywhere; the levels of `native` on a CPU; "triton" on a CUDA device.
    """
    kernels = _kernels(packed)
    if kernels and all(kernels.can_score(segment) for segment in packed.segments):
        return ("torch", *kernels.available())
    return ("torch",)


def _kernels(packed: PackedVectors) -> ModuleType | None:
    """Returns the kernels for the device of the vectors; None without kernels."""
    if packed.device.type == "cuda" and importlib.util.find_spec("triton"):
        return importlib.import_module("pipeline.search.triton_kernels")
    return native if packed.device.type == "cpu" else None


def _backend(wanted: str | None, packed: PackedVectors) -> tuple[ModuleType | None, str]:
    """Returns the kernels of a backend, None for torch, and the level at which they score.

    Raises:
        ValueError: The backend cannot score these vectors.
    """
    valid = backends(packed)
    if wanted is not None and wanted not in valid:
        raise ValueError(f"backend must be one of {', '.join(valid)}, got {wanted!r}")
    level = wanted or valid[-1]
    return (None if level == "torch" else _kernels(packed)), level


def _joined(queries: Sequence[torch.Tensor], packed: PackedVectors) -> torch.Tensor:
    """Returns the tokens (M, D) float32 of all queries, on the device of the documents."""
    for query in queries:
        if query.ndim != 2 or query.shape[1] != packed.dim:
            shape = tuple(query.shape)
            raise ValueError(f"queries must have the shape (tokens, {packed.dim}), got {shape}")
    return torch.cat(list(queries)).to(packed.device, torch.float32)


def _score(
    query_MD: torch.Tensor,
    query_lengths: torch.Tensor,
    segment: Segment,
    documents: torch.Tensor | None,
    block_bytes: int,
    out_QB: torch.Tensor,
) -> None:
    """Writes sums of maxima, block by block, with torch on any device.

    Blocks of whole documents are made float32 and multiplied with all query tokens at once; a
    maximum over each document's rows and a sum over each query's columns follow. Of the ways to
    take the maximum over rows of ragged segments, `scatter_reduce` with an index expanded along the
    columns was the quickest on 2 cores (31,000 tokens x 600 query tokens: 2 ms; a loop over equal
    lengths 6 ms, `numpy.maximum.reduceat` 11 ms, `torch.segment_reduce` 56 ms, gathering into a
    padded block 94 ms; the multiplication itself takes 100 ms). It needs no sorting and takes
    empty documents as they are.
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
    """Returns the best document token for each document and query token, the first of equals."""
    num_tokens = block.sim_nM.shape[1]
    # The few places where a similarity is its document's best; as they come in the order of
    # the tokens, a minimum over equals is all that is left.
    is_best_nM = block.sim_nM == block.best_bM[block.doc_of_n]
    if is_best_nM.is_cpu:  # numpy takes a tenth of the time of torch here
        found = torch.from_numpy(np.flatnonzero(is_best_nM.numpy()))
    else:
        found = is_best_nM.view(-1).nonzero().squeeze(1)
    at_n = found // num_tokens
    doc = block.doc_of_n[at_n]
    position = at_n - (block.lengths_b.cumsum(0) - block.lengths_b)[doc]
    none = torch.iinfo(torch.int64).max
    token_bM = torch.full_like(block.best_bM, none, dtype=torch.int64).view(-1)
    token_bM.scatter_reduce_(0, doc * num_tokens + found % num_tokens, position, "amin")
    return token_bM.view_as(block.best_bM).masked_fill_(block.lengths_b[:, None] == 0, -1)


class _Block(NamedTuple):
    """Similarities of some documents with all query tokens, and the best of each document."""

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
    """Yields similarities by block; the best of a document without tokens is -inf."""
    starts_B, lengths_B = segment.starts, segment.lengths
    if documents is not None:
        starts_B, lengths_B = starts_B[documents], lengths_B[documents]
    if not len(lengths_B):
        return
    num_tokens, dim = query_MD.shape
    device = query_MD.device
    blocks = list(_blocks(lengths_B, max_tokens=block_bytes // (4 * (dim + num_tokens))))
    size = max(block_tokens for _, _, block_tokens in blocks)
    buffer_nD = torch.empty(size, dim, device=device)  # reused: fresh pages cost more than the copy
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
    """Yields runs of documents of at most `max_tokens` tokens: (first, last + 1, tokens)."""
    ends = lengths_B.cumsum(0)
    first, done = 0, 0
    while first < len(lengths_B):
        last = int(torch.searchsorted(ends, done + max_tokens, right=True))
        last = max(last, first + 1)
        end = int(ends[last - 1])
        yield first, last, end - done
        first, done = last, end


def _rows(
    segment: Segment, starts_b: torch.Tensor, lengths_b: torch.Tensor, num_tokens: int
) -> dict[str, torch.Tensor]:
    """Returns the parts of some documents' tokens: views if they are contiguous, else copies."""
    segment.touch(starts_b, lengths_b)
    start, end = int(starts_b[0]), int(starts_b[-1] + lengths_b[-1])
    if end - start == num_tokens:
        return {name: part[start:end] for name, part in segment.parts.items()}
    # Token t of the block lies `shift` of its document behind t.
    shift_b = starts_b - (lengths_b.cumsum(0) - lengths_b)
    shift_n = torch.repeat_interleave(shift_b, lengths_b, output_size=num_tokens)
    index_n = torch.arange(num_tokens, device=starts_b.device) + shift_n
    return {name: part[index_n] for name, part in segment.parts.items()}
