"""Validation metrics, compared with loops."""

from __future__ import annotations

import pytest
import torch

from pipeline.tokens import TokenBatch, normalise
from pipeline.train.data.quality import utilisation


def test_utilisation_equals_loops():
    torch.manual_seed(0)
    queries = TokenBatch(
        normalise(torch.randn(3, 4, 8)),
        torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]], dtype=torch.bool),
        True,
    )
    documents = TokenBatch(
        normalise(torch.randn(3, 5, 8)),
        torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0] * 5], dtype=torch.bool),
        True,
    )
    positive_QB = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0]], dtype=torch.bool)
    sums = [[0.0] * 4 for _ in range(5)]
    counts, used = [0] * 4, set()
    for q in range(3):
        for d in range(2):  # the third document has no vectors
            for i in range(int(queries.mask[q].sum()) if positive_QB[q, d] else 0):
                token = queries.vectors[q, i].double()
                similarities = [
                    float(token @ documents.vectors[d, j].double())
                    for j in range(int(documents.mask[d].sum()))
                ]
                best = max(range(len(similarities)), key=similarities.__getitem__)
                sums[best][i] += similarities[best]
                counts[i] += 1
                used.add((d, best))
    strengths = sorted(max(sums[j][i] / counts[i], 0.0) for j in range(5) for i in range(4))
    mean = sum(strengths) / 20
    deviation = (sum((x - mean) ** 2 for x in strengths) / 20) ** 0.5
    ranked = sum(rank * x for rank, x in enumerate(strengths, start=1))
    expected = {
        "CV": 100 * deviation / mean,
        "Gini": 2 * ranked / (20 * sum(strengths)) - 21 / 20,
        "Used": len(used) / 8,
    }
    found = utilisation(queries, documents, positive_QB)
    assert {name: values.item() for name, values in found.items()} == pytest.approx(
        expected, rel=1e-5
    )


def test_utilisation_without_relevant_pairs():
    batch = TokenBatch(torch.ones(1, 1, 2), torch.ones(1, 1, dtype=torch.bool), False)
    assert utilisation(batch, batch, torch.tensor([[False]])) == {}
