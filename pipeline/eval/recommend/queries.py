"""Queries by which the candidates are compared: those of a benchmark, or pseudo-queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from pipeline.eval.metrics import per_query
from pipeline.eval.recommend.sample import Sample
from pipeline.search.packed import PackedVectors
from pipeline.tokens import normalise

#: Metric of each query, as in `jobs.evaluate`.
MEASURE, DEPTH = "nDCG@10", 10
#: Number of tokens of a pseudo-query.
NUM_TOKENS = 12


class QuerySet(NamedTuple):
    """Queries with relevance judgments of the sampled items or their parents.

    Attributes:
        tokens: Unit vectors (M, D) of each query.
        grades: Grades by item or parent id of each query.
        is_judged: False for pseudo-queries.
        ignored: Id of a document that is removed from the ranking of each query because it is the
            query itself, or None; empty to remove none.
    """

    tokens: Sequence[torch.Tensor]
    grades: Sequence[Mapping[str, int]]
    is_judged: bool
    ignored: Sequence[str | None] = ()

    def measure(self, scores_QB: torch.Tensor, ids: Sequence[str]) -> np.ndarray:
        """Computes the metric (Q,) float64 of each query; parents score as their best item."""
        documents = sorted(set(ids))
        numbers = {document: number for number, document in enumerate(documents)}
        document_B = torch.tensor([numbers[document] for document in ids])
        scores_QD = torch.full((len(scores_QB), len(documents)), -torch.inf)
        scores_QD.scatter_reduce_(1, document_B.expand(len(scores_QB), -1), scores_QB, "amax")
        for query, document in enumerate(self.ignored):
            if document in numbers:
                scores_QD[query, numbers[document]] = -torch.inf
        best = scores_QD.topk(min(2 * DEPTH, len(documents)))
        run = {
            str(query): {documents[number]: score for number, score in zip(*ranked, strict=True)}
            for query, ranked in enumerate(
                zip(best.indices.tolist(), best.values.tolist(), strict=True)
            )
        }
        qrels = {str(query): grades for query, grades in enumerate(self.grades)}
        values = per_query(run, qrels, [MEASURE])
        return np.array([values[query][MEASURE] for query in qrels])


def pseudo_queries(
    sample: Sample, full: PackedVectors, *, num_queries: int, noise: float, seed: int
) -> QuerySet:
    """Generates queries from the token vectors of random items.

    A pseudo-query consists of consecutive tokens of one item. Gaussian noise is added to each
    token, so that finding the item is not trivial; `noise` is its expected norm relative to that of
    a token. The only relevant item is the one from which the tokens were taken.
    """
    rng = np.random.default_rng(seed)
    tokens, grades = [], []
    for row in rng.permutation(len(sample))[:num_queries].tolist():
        vectors_ND = normalise(full.item(row))
        first = int(rng.integers(max(1, len(vectors_ND) - NUM_TOKENS + 1)))
        span_MD = vectors_ND[first : first + NUM_TOKENS]
        noise_MD = torch.from_numpy(rng.standard_normal(span_MD.shape, np.float32))
        tokens.append(normalise(span_MD + noise * noise_MD / span_MD.shape[1] ** 0.5))
        grades.append({sample.ids[row]: 1})
    return QuerySet(tokens, grades, is_judged=False)
