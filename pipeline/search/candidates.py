"""Selection of the items that are scored exactly, see `pipeline.candidates`."""

from __future__ import annotations

import numpy as np

from pipeline.config import SpecError
from pipeline.index.info import RepresentationInfo
from pipeline.index.reader import Index

#: Value of the option `candidates` that scores all items.
EXACT = "exact"
#: Generator that scores the single vectors of the items. It needs no column of codes.
SINGLE = "single"
#: Generator of the BM25 scores of fused search.
BM25 = "bm25"
#: Separators of the generators of a union, and of the steps of one of its members.
UNION, STEP = "+", ":"
#: Number of items that a step finds per candidate, if another step follows.
ITEMS_PER_CANDIDATE = 32
#: Default minimum number of candidates, and their number per hit. On 117,659 definitions, `lemur`
#: then finds 97 % of the 100 best items.
MIN_CANDIDATES, CANDIDATES_PER_HIT = 1000, 16
#: Number of scores from which a lower bound of the best scores is estimated.
SELECTION_SAMPLE = 16384


def generators(index: Index, info: RepresentationInfo) -> dict[str, str]:
    """Returns the columns of the generators that can be used for a representation, by name.

    While a generator is refitted, its former column is used. Generators that were fitted to other
    vectors, which the representation had before it was replaced, are omitted.
    """
    columns = {} if info.pooled_column is None else {SINGLE: info.pooled_column}
    infos = index.candidates_columns.values()
    for codes in sorted(infos, key=lambda codes: codes.revision):
        source = info.text_column if codes.is_lexical else info.column
        if codes.representation == source and (codes.is_lexical or codes.is_fitted_to(info)):
            columns.setdefault(codes.generator_name, codes.name)
    return columns


def generator_steps(candidates: str) -> list[list[str]]:
    """Returns the generators of the steps of each member of a union.

    >>> generator_steps("lemur:pq+bm25")
    [['lemur', 'pq'], ['bm25']]
    """
    return [member.split(STEP) for member in candidates.split(UNION)]


def generator_columns(index: Index, info: RepresentationInfo, candidates: str) -> dict[str, str]:
    """Returns the columns of the generators of a value such as `lemur:pq+bm25`, by generator.

    Raises:
        SpecError: A generator was not built for the representation or for other vectors, occurs
            twice, or cannot follow another.
    """
    columns = generators(index, info)
    members = generator_steps(candidates)
    names = [name for steps in members for name in steps]
    for name in names:
        if name not in columns:
            problem = f"was not built for {info.column}"
            note = f"; build it with `maxray add candidates INDEX GENERATOR` for {info.column}"
            infos = index.candidates_columns.values()
            if any((c.generator_name, c.representation) == (name, info.column) for c in infos):
                problem = f"was fitted to other vectors than those of {info.column}"
                note = "; fit it again with `maxray add candidates INDEX GENERATOR --refit`"
            if len(names) > 1:
                problem = f"contains {name!r}, which {problem}"
                rule = f"generators of {', '.join(columns)}, joined by {UNION} or {STEP}"
            else:
                rule = f"one of {', '.join((EXACT, *columns))}"
            raise SpecError("candidates", candidates, rule, problem, note)
    if len(set(names)) < len(names):
        raise SpecError("candidates", candidates, "different generators", "repeats a generator")
    if any(BM25 in steps[1:] for steps in members):
        problem = f"has {BM25} after {STEP}"
        raise SpecError("candidates", candidates, "a generator of vectors", problem)
    return {name: columns[name] for name in names}


def best_rows(
    scores: np.ndarray,
    rows: np.ndarray | None,
    num: int,
    groups: np.ndarray | None = None,
) -> np.ndarray:
    """Returns the items with the `num` best scores in ascending order. Ties are all included.

    Args:
        scores: (S,) float. Items with -inf are excluded.
        rows: (S,) ascending indices of the scored items, or None for all items.
        num: Number of items.
        groups: (B,) group of each item, or None. If given, the best item of each of the `num` best
            groups is included as well, so that candidates of few groups do not replace the others.

    >>> best_rows(np.array([3.0, 1.0, 2.0, 2.0]), None, 2).tolist()
    [0, 2, 3]
    >>> scores, groups = np.array([3.0, 2.5, 1.0, 0.5]), np.array([0, 0, 1, 1])
    >>> best_rows(scores, None, 2, groups).tolist()
    [0, 1, 2]
    """
    selected = (scores >= _limit(scores, num)) & (scores > -np.inf)
    if groups is not None and len(scores):
        groups = groups if rows is None else groups[rows]
        best = np.full(groups.max() + 1, -np.inf, scores.dtype)
        np.maximum.at(best, groups, scores)
        selected |= (scores >= max(_limit(best, num), -1e38)) & (scores == best[groups])
    chosen = np.flatnonzero(selected)
    return chosen if rows is None else rows[chosen]


def _limit(scores: np.ndarray, num: int) -> float:
    """Returns the `num`-th best score, or -inf if there are fewer.

    Selecting among a million scores takes longer than computing them, so scores below a bound that
    is estimated on a sample are left out.
    """
    if num >= len(scores):
        return -np.inf
    sample = scores[:: max(len(scores) // SELECTION_SAMPLE, 1)]
    # Twice the expected number of sampled scores, plus four standard deviations.
    expected = num * len(sample) / len(scores)
    rank = int(2 * expected + 4 * expected**0.5) + 4
    if rank < len(sample) // 4:
        above = scores[scores >= np.partition(sample, -rank)[-rank]]
        scores = above if len(above) >= num else scores
    return float(np.partition(scores, -num)[-num])
