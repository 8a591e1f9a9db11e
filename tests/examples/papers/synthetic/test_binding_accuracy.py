"""Tests of the accuracy of encoders on local bindings."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from examples.papers.synthetic.binding import MIN_SIDE, PANELS
from examples.papers.synthetic.binding_accuracy import (
    check_form,
    compute_scores,
    measure,
    pair_scores,
    summarise,
)
from examples.papers.synthetic.binding_data import evaluation_pairs
from pipeline.config import SpecError
from pipeline.encoders import EncodedQueries, Encoder
from pipeline.encoders.minilm import MiniLM
from pipeline.registry import ENCODERS
from pipeline.tokens import TokenBatch, normalise, pad
from tests.tiny import SLEEPING


def random_tokens(seed: int, count: int, length: int, dim: int = 8) -> TokenBatch:
    """Returns ragged tokens without unit length, and pooled vectors."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(count, length, generator=generator) < 0.7
    mask[:, 0] = True
    vectors = torch.randn(count, length, dim, generator=generator) * 3
    pooled = normalise(torch.randn(count, dim, generator=generator))
    return TokenBatch(vectors, mask, normalised=False, pooled=pooled)


def reference_scores(queries: TokenBatch, documents: TokenBatch) -> dict[str, np.ndarray]:
    """Computes eq. 2, 4 and 5 of the SMART paper with scalar loops."""
    shape = (len(queries), len(documents))
    single, late = np.zeros(shape), np.zeros(shape)
    for q, d in np.ndindex(shape):
        single[q, d] = float(queries.pooled[q].double() @ documents.pooled[d].double())
        best = []
        for q_i in queries.vectors[q][queries.mask[q]].double():
            cosines = [
                float(q_i @ d_j / q_i.norm() / d_j.norm())
                for d_j in documents.vectors[d][documents.mask[d]].double()
            ]
            best.append(max(cosines))
        late[q, d] = sum(best) / len(best)
    return {"single_vector": single, "maxsim": late, "hybrid": single + late}


def test_scores_and_accuracy_equal_reference():
    parts, references = {}, {}
    for pair in range(5):
        queries, documents = random_tokens(pair, 25, 6), random_tokens(100 + pair, 2, 9)
        for name, scores in compute_scores(queries, documents).items():
            parts.setdefault(name, []).append(scores)
        for name, scores in reference_scores(queries, documents).items():
            references.setdefault(name, []).append(scores)
    for name in ("single_vector", "maxsim", "hybrid"):
        found = torch.stack(parts[name])
        np.testing.assert_allclose(found, np.stack(references[name]), atol=1e-6)
        num_correct = sum(p > n for scores in references[name] for p, n in scores)
        row = summarise(found, "text", name)
        assert row.accuracy == pytest.approx(num_correct / 125)
        assert row.low <= row.accuracy <= row.high
        assert (row.num_pairs, row.num_queries, row.ties) == (5, 125, 0.0)


def test_ties_are_incorrect():
    scores = torch.tensor([[[1.0, 1.0], [2.0, 1.0]], [[0.0, 0.0], [0.0, 1.0]]])
    row = summarise(scores, "text", "maxsim")
    assert (row.accuracy, row.ties) == (0.25, 0.5)
    assert (row.low, row.high) == (0.0, 0.5)  # accuracies per pair: 0.5 and 0


def test_scores_require_vectors():
    queries, documents = random_tokens(0, 3, 4), random_tokens(1, 2, 4)
    without = TokenBatch(documents.vectors, documents.mask, normalised=False)
    assert list(compute_scores(queries, without)) == ["maxsim"]
    empty = TokenBatch(
        queries.vectors, torch.zeros_like(queries.mask), False, pooled=queries.pooled
    )
    assert list(compute_scores(empty, documents)) == ["single_vector"]


class OneHotEncoder(Encoder):
    """Encoder with one dimension per word, or per binding of a code and a marker."""

    def __init__(self, encodes_bindings: bool):
        self.spec = ENCODERS.resolve("minilm")
        self._encodes_bindings, self._ids = encodes_bindings, {}

    @classmethod
    def check(cls, spec):
        pass

    @classmethod
    def supported_inputs(cls, spec):
        return ("text",)

    def _batch(self, texts) -> TokenBatch:
        pattern = r"\w+ labels the \w+ \w+" if self._encodes_bindings else r"\w+"
        terms = [re.findall(pattern, text) for text in texts]
        ids = [[self._ids.setdefault(term, len(self._ids)) for term in row] for row in terms]
        lengths = np.array([len(row) for row in ids])
        vectors, mask = pad(torch.eye(2000)[[i for row in ids for i in row]], lengths)
        return TokenBatch(vectors, mask, True, pooled=normalise(vectors.sum(dim=1)))

    def encode(self, items, taps=()):
        yield np.arange(items.num_rows), self._batch(items["text"].to_pylist())

    def encode_queries(self, texts):
        return EncodedQueries(self._batch(texts), [])


def test_only_bindings_distinguish_reports():
    pairs = evaluation_pairs(6)
    for row in measure(OneHotEncoder(encodes_bindings=False), pairs, "text"):
        assert (row.ties, row.accuracy, row.low, row.high) == (1.0, 0.0, 0.0, 0.0)
    for row in measure(OneHotEncoder(encodes_bindings=True), pairs, "text"):
        assert (row.ties, row.accuracy, row.low, row.high) == (0.0, 1.0, 1.0, 1.0)


def test_scores_of_pairs_are_independent(checkpoint):
    from pipeline.encoders.colpali import ColPali

    encoders = {
        "text": MiniLM(MiniLM.Spec()),
        "rendered": ColPali(ColPali.Spec(model=checkpoint("colpali"), dtype="float32")),
    }
    pairs = evaluation_pairs(5)
    for form, encoder in encoders.items():
        scores_by_name = pair_scores(encoder, pairs, form, MIN_SIDE)
        last = pair_scores(encoder, pairs[4:], form, MIN_SIDE)
        assert list(scores_by_name) == (
            ["single_vector", "maxsim", "hybrid"] if form == "text" else ["maxsim"]
        )
        for name, scores in scores_by_name.items():
            assert scores.shape == (5, PANELS, 2)
            torch.testing.assert_close(scores[4:], last[name], atol=1e-5, rtol=0)


def test_rejects_encoder_without_form():
    with pytest.raises(
        SpecError,
        match="^--form must be .*, got 'text', which is not supported by the encoder tests.tiny",
    ):
        check_form(ENCODERS.resolve(SLEEPING), "text")
