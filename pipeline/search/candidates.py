"""Selection of the items that are scored exactly, see `pipeline.search.generators`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, NamedTuple

from pipeline.config import SpecError

if TYPE_CHECKING:  # imports Lance
    from pipeline.index.info import RepresentationInfo
    from pipeline.index.reader import IndexReader

#: Value of the option `candidates` that chooses by the size of the index, see `default_candidates`,
#: and value that scores all items.
AUTO, EXACT = "auto", "exact"
#: Generator that is used by default.
IVF = "ivf"
#: Maximum number of vectors that are all scored by default. On two cores, 2 million vectors take 25
#: ms with AVX-512 and 117 ms with AVX2, and the search with `ivf` takes 4 ms with AVX-512.
EXACT_VECTORS = 2_000_000
#: Default number of probed lists per query token of `ivf`, if it was not measured.
DEFAULT_PROBES = 32
#: Times in microseconds with AVX-512 on a million items of a probed list, and of the exact score of
#: a vector of a candidate and of one of many items (docs/results/candidates.md).
PROBE_TIME, VECTOR_TIME, EXACT_TIME = 2.2, 0.041, 0.022
#: Number of tokens of a query for which times are estimated.
QUERY_TOKENS = 16
#: Vectors of an item whose number is not fixed, as an estimate: the tokens of a passage of text.
VECTORS_PER_ITEM = 200
#: Generator that scores the single vectors of the items. It needs no column of codes.
SINGLE = "single"
#: Generator of the BM25 scores of fused search.
BM25 = "bm25"
#: Generators with a column of codes.
BUILT = (IVF, BM25)
#: Separator of the generators of a union.
UNION = "+"
#: Numbers of hits for which numbers of items are measured.
DEPTHS = (10, 100)
#: Minimum number of candidates where it was not measured, and their number per hit. On 117,659
#: definitions, `ivf` then finds 92 % of the 100 best items.
MIN_CANDIDATES, CANDIDATES_PER_HIT = 1000, 16
#: One of this many items is a candidate if that is more.
ITEMS_PER_DEFAULT_CANDIDATE = 40


class Numbers(NamedTuple):
    """Numbers of items that `ivf` finds, see `pipeline.search.num_candidates`.

    Attributes:
        recall: Wanted share of the exact results.
        items: Number of items of the index when they were measured.
        counts: Number of found items for each of `DEPTHS`.
        probes: Number of probed lists per query token for each of `DEPTHS`.
    """

    recall: float
    items: int
    counts: list[int]
    probes: list[int]

    def for_hits(self, k: int, num_items: int) -> tuple[int, int]:
        """Returns both numbers for k hits in an index that may have grown since.

        >>> Numbers(0.98, 1000, [50, 150], [16, 32]).for_hits(400, 2000)
        (1200, 64)
        """
        depth = next((i for i, depth in enumerate(DEPTHS) if k <= depth), len(DEPTHS) - 1)
        more = max(1, k / DEPTHS[depth])
        growth = max(1, num_items / max(self.items, 1))  # lists grow as well
        probes = round(more**0.5 * self.probes[depth])
        return max(k, round(growth * more * self.counts[depth])), probes


def default_number(k: int, num_items: int) -> int:
    """Returns the default number of candidates for k hits if it was not measured."""
    return max(MIN_CANDIDATES, CANDIDATES_PER_HIT * k, num_items // ITEMS_PER_DEFAULT_CANDIDATE)


def numbers_for(
    index: IndexReader, column: str, k: int, num: int | None, share: float = 1.0
) -> tuple[int, int]:
    """Returns the number of candidates of a generator for k hits, and of probed lists per token.

    They are the measured ones. If more than the measured number of candidates are requested,
    the number of probed lists grows in proportion.

    Args:
        share: Share of the items that satisfy a filter. The lists are probed for the k best of
            them, which are among the k / share best of all if they resemble the others.
    """
    info = index.candidates_columns.get(column)
    if info is None or not info.numbers:
        return num or default_number(k, len(index)), DEFAULT_PROBES
    numbers = Numbers(**info.numbers)
    measured, probes = numbers.for_hits(k, len(index))
    if share < 1:
        _, probes = numbers.for_hits(round(k / share), len(index))
    more = 1 if num is None else max(1, num / measured)
    return num or measured, round(more * probes)


def ivf_time(
    num_probes: float, num_tokens: float, num_candidates: float, item_vectors: float
) -> float:
    """Estimates the time of a query with `ivf` in microseconds."""
    return PROBE_TIME * num_probes * num_tokens + VECTOR_TIME * num_candidates * item_vectors


def exact_time(info: RepresentationInfo, num_rows: int) -> float:
    """Estimates the time of scoring all of some items in microseconds."""
    return EXACT_TIME * num_rows * (info.num_vectors or VECTORS_PER_ITEM)


def most_probes(info: RepresentationInfo, num_rows: int) -> int:
    """Estimates how many probed lists per token take as long as scoring all of some items."""
    return int(exact_time(info, num_rows) / (PROBE_TIME * QUERY_TOKENS))


def is_exact_faster(
    index: IndexReader,
    info: RepresentationInfo,
    k: int,
    num: int | None,
    num_rows: int,
    num_items: int,
) -> bool:
    """Estimates whether scoring all items that satisfy a filter is faster than `ivf`.

    The fewer items there are, the more lists are probed.

    Args:
        num_rows: Number of items that satisfy the filter, of the index or of one of its shards.
        num_items: Number of all items, of the index or of the shard.
    """
    share = num_rows / max(num_items, 1)
    column = generator_columns(index, info, IVF)[IVF]
    num, num_probes = numbers_for(index, column, k, num, share)
    item_vectors = info.num_vectors or VECTORS_PER_ITEM
    return exact_time(info, num_rows) < ivf_time(num_probes, QUERY_TOKENS, num, item_vectors)


def generators(index: IndexReader, info: RepresentationInfo) -> dict[str, str]:
    """Returns the columns of the generators that can be used for a representation, by name.

    While a generator is refitted, its former column is used. Generators that were fitted to vectors
    that have been replaced are omitted, and those of former versions that no longer exist.
    """
    columns = {} if info.pooled_column is None else {SINGLE: info.pooled_column}
    infos = index.candidates_columns.values()
    for codes in sorted(infos, key=lambda codes: codes.revision):
        if codes.is_fitted_to(info) and codes.generator_name in BUILT:
            columns.setdefault(codes.generator_name, codes.name)
    return columns


def default_candidates(index: IndexReader, info: RepresentationInfo, device: str = "cpu") -> str:
    """Returns the default of the option `candidates` for the score `maxsim`.

    It is `ivf` if that was built and an exact search is slow: on a CPU, above `EXACT_VECTORS`
    vectors. A GPU scores 16 million vectors in 15 ms.
    """
    return IVF if _is_slow(index, info, device) and IVF in generators(index, info) else EXACT


def slow_search_hint(
    index: IndexReader, info: RepresentationInfo, device: str = "cpu"
) -> str | None:
    """Returns a line that suggests a candidate generator if all searches are exact and slow."""
    if not _is_slow(index, info, device) or IVF in generators(index, info):
        return None
    uri = shlex.quote(index.uri)
    command = f"maxray add candidates {uri} {IVF} representation={info.column}"
    return f"each search scores all {len(index):,} items; `{command}` makes searches faster"


def _is_slow(index: IndexReader, info: RepresentationInfo, device: str) -> bool:
    num_vectors = len(index) * (info.num_vectors or VECTORS_PER_ITEM)
    return device == "cpu" and num_vectors > EXACT_VECTORS


def generator_columns(
    index: IndexReader, info: RepresentationInfo, candidates: str
) -> dict[str, str]:
    """Returns the columns of the generators of a value such as `ivf+bm25`, by generator.

    Raises:
        SpecError: A generator was not built for the representation or for other vectors, or occurs
            twice.
    """
    columns = generators(index, info)
    names = candidates.split(UNION)
    for name in names:
        if name not in columns:
            problem = f"was not built for {info.column}"
            note = f"; build it with `maxray add candidates INDEX GENERATOR` for {info.column}"
            infos = index.candidates_columns.values()
            built = {(c.generator_name, c.representation) for c in infos}
            if name in BUILT and (name, info.column) in built:
                problem = f"was fitted to other vectors than those of {info.column}"
                note = "; fit it again with `maxray add candidates INDEX GENERATOR --refit`"
            if len(names) > 1:
                problem = f"contains {name!r}, which {problem}"
                rule = f"generators of {', '.join(columns)}, joined by {UNION}"
            else:
                rule = f"one of {', '.join((EXACT, *columns))}"
            raise SpecError("candidates", candidates, rule, problem, note)
    if len(set(names)) < len(names):
        raise SpecError("candidates", candidates, "different generators", "repeats a generator")
    return {name: columns[name] for name in names}
