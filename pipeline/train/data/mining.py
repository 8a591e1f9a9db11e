"""Mines hard negatives, which rank high for a query in an index but are not relevant."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from pipeline.config import SpecError
from pipeline.runtime.atomic import open_atomic
from pipeline.search.candidates import EXACT
from pipeline.search.scores import Score
from pipeline.search.searcher import Searcher
from pipeline.train.data.rows import Listing

#: Number of queries that are encoded and searched together.
QUERIES_PER_BATCH = 256


class Mined(NamedTuple):
    """Result of mining."""

    queries: int
    negatives: int


def mine(
    searcher: Searcher,
    data: Listing,
    output: str,
    *,
    representation: str | None = None,
    ranks: tuple[int, int] = (10, 50),
    score: Score = "maxsim",
    report: Callable[[str], None] = print,
) -> Mined:
    """Searches an index for each query and writes its hard negatives to a file.

    The index must use the same document ids as the data. Relevant documents, and their copies under
    other ids, are removed before ranks are counted. Items that are not part of the data are removed
    afterwards.

    The file is written atomically, with lines {"query": ..., "negatives": [ids, best first]}. Ranks
    count from 1; the best few documents are often relevant but unjudged.
    """
    first, last = ranks
    if not 1 <= first <= last:
        raise SpecError("ranks", ranks, "two ascending integers >= 1, the first and the last rank")
    ids_by_label: dict[int, set[str]] = {}
    for document in data.documents:
        ids_by_label.setdefault(document.label, set()).add(document.id)
    positives = {
        query: set().union(*(ids_by_label[data.documents[number].label] for number in numbers))
        for query, numbers in data.positives().items()
    }
    relevant = set().union(*positives.values())
    num_known = searcher.num_known(sorted(relevant))
    if not num_known:
        rule = "an index with documents of the data under the same ids"
        raise SpecError("index", searcher.index.uri, rule, "contains no relevant document")
    report(f"{num_known:,} of {len(relevant):,} relevant documents are in the index")
    queries = list(positives)
    num_queries = num_negatives = num_unknown = 0
    with open_atomic(output) as file:
        for start in range(0, len(queries), QUERIES_PER_BATCH):
            texts = queries[start : start + QUERIES_PER_BATCH]
            k = last + max(len(positives[text]) for text in texts)
            found = searcher.rank(texts, representation, k=k, score=score, candidates=EXACT)
            for text, ranking in zip(texts, found, strict=True):
                others = [item_id for item_id in ranking.item_ids if item_id not in positives[text]]
                candidates = others[first - 1 : last]
                known = [item_id for item_id in candidates if item_id in data.numbers]
                num_unknown += len(candidates) - len(known)
                num_queries += bool(known)
                num_negatives += len(known)
                line = {"query": text, "negatives": known}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            report(f"{min(start + len(texts), len(queries)):,} of {len(queries):,} queries")
        if not num_negatives:
            rule = "ranks of search results in this index"
            raise SpecError("ranks", list(ranks), rule, "yield no negatives")
    if num_unknown:
        report(f"{num_unknown:,} items were left out: they are in the index, but not in the data")
    return Mined(num_queries, num_negatives)
