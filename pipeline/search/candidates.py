"""Selection of the items that are scored exactly, see `pipeline.search.generators`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.config import SpecError

if TYPE_CHECKING:  # imports Lance
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


def generators(index: Index, info: RepresentationInfo) -> dict[str, str]:
    """Returns the columns of the generators that can be used for a representation, by name.

    While a generator is refitted, its former column is used. Generators that were fitted to vectors
    that have been replaced are omitted.
    """
    columns = {} if info.pooled_column is None else {SINGLE: info.pooled_column}
    infos = index.candidates_columns.values()
    for codes in sorted(infos, key=lambda codes: codes.revision):
        if codes.is_fitted_to(info):
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
