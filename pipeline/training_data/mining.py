"""Hard negatives from an index: documents that rank high for a query and are not relevant to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from pipeline.atomic import open_atomic
from pipeline.config import SpecError
from pipeline.search.options import Score
from pipeline.search.searcher import Searcher
from pipeline.training_data.rows import Listing

#: Queries that are encoded and searched for together.
QUERIES_AT_ONCE = 256


class Mined(NamedTuple):
    """How many queries got negatives, and how many negatives there are."""

    queries: int
    negatives: int


def mine(
    searcher: Searcher,
    data: Listing,
    output: str,
    *,
    representation: str | None = None,
    ranks: tuple[int, int] = (10, 50),
    score: Score = "late",
    say: Callable[[str], None] = print,
) -> Mined:
    """Searches an index for each query and writes its hard negatives.

    The index must use the ids of the data. Relevant documents are left out before ranks are
    counted; items that are not in the data are left out afterwards.

    Args:
        searcher: Searcher of the index.
        data: Queries, documents and relevance judgments.
        output: Path or URI of the file to write, with lines
            {"query": ..., "negatives": [ids, best first]}; it appears only when it is complete.
        representation: Representation to search; default: `full` if it exists, else the first.
        ranks: First and last rank to take, from 1. The best few are often relevant but unjudged.
        score: Score to rank by.
        say: Function that reports a line of progress.

    Raises:
        SpecError: The ranks are invalid, the index has none of the documents, or cannot be searched
            in this way.
    """
    first, last = ranks
    if not 1 <= first <= last:
        raise SpecError("ranks", ranks, "two integers first, last with 1 <= first <= last")
    positives = {
        query: {data.documents[number].id for number in numbers}
        for query, numbers in data.positives().items()
    }
    relevant = set().union(*positives.values())
    num_known = searcher.num_known(sorted(relevant))
    if not num_known:
        rule = "an index with documents of the data under the same ids"
        raise SpecError("index", searcher.index.uri, rule, "has none")
    say(f"{num_known:,} of {len(relevant):,} relevant documents are in the index")
    queries = list(positives)
    num_queries = num_negatives = num_strange = 0
    with open_atomic(output) as file:
        for start in range(0, len(queries), QUERIES_AT_ONCE):
            texts = queries[start : start + QUERIES_AT_ONCE]
            k = last + max(len(positives[text]) for text in texts)
            found = searcher.rank(texts, representation, k=k, score=score)
            for text, ranking in zip(texts, found, strict=True):
                others = [own for own in ranking.item_ids if own not in positives[text]]
                taken = others[first - 1 : last]
                known = [own for own in taken if own in data.numbers]
                num_strange += len(taken) - len(known)
                num_queries += bool(known)
                num_negatives += len(known)
                line = {"query": text, "negatives": known}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            say(f"{min(start + len(texts), len(queries)):,} of {len(queries):,} queries")
        if not num_negatives:
            rule = "ranks of search results in this index"
            raise SpecError("ranks", list(ranks), rule, "leave no negatives")
    if num_strange:
        say(f"{num_strange:,} items of the index are none of the data's documents: left out")
    return Mined(num_queries, num_negatives)
