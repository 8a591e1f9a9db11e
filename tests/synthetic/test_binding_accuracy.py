"""The accuracy of encoders on local bindings."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from pipeline.config import SpecError
from pipeline.encoders import EncodedQueries, Encoder
from pipeline.encoders.minilm import MiniLM
from pipeline.registry import ENCODERS
from pipeline.synthetic.binding import PANELS, SMALLEST_SIDE
from pipeline.synthetic.binding_accuracy import (
    accuracy_of,
    check_form,
    measure,
    pair_scores,
    scores_of,
)
from pipeline.synthetic.binding_data import evaluation_pairs
from pipeline.tokens import TokenBatch, normalise, pad


def random_tokens(seed: int, count: int, length: int, dim: int = 8) -> TokenBatch:
    """Ragged tokens that are not of unit length, with pooled vectors."""
    made = torch.Generator().manual_seed(seed)
    mask = torch.rand(count, length, generator=made) < 0.7
    mask[:, 0] = True
    vectors = torch.randn(count, length, dim, generator=made) * 3
    pooled = normalise(torch.randn(count, dim, generator=made))
    return TokenBatch(vectors, mask, normalised=False, pooled=pooled)


def slow_scores(queries: TokenBatch, documents: TokenBatch) -> dict[str, np.ndarray]:
    """SMART's equations 2, 4 and 5, one number after the other."""
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
    return {"single": single, "late": late, "hybrid": single + late}


def test_scores_and_accuracy_equal_a_slow_loop():
    parts, slow = {}, {}
    for pair in range(5):
        queries, documents = random_tokens(pair, 25, 6), random_tokens(100 + pair, 2, 9)
        for name, scores in scores_of(queries, documents).items():
            parts.setdefault(name, []).append(scores)
        for name, scores in slow_scores(queries, documents).items():
            slow.setdefault(name, []).append(scores)
    for name in ("single", "late", "hybrid"):
        fast = torch.stack(parts[name])
        np.testing.assert_allclose(fast, np.stack(slow[name]), atol=1e-6)
        right = sum(p > n for scores in slow[name] for p, n in scores)
        row = accuracy_of(fast, "text", name)
        assert row.accuracy == pytest.approx(right / 125)
        assert row.low <= row.accuracy <= row.high
        assert (row.num_pairs, row.num_queries, row.ties) == (5, 125, 0.0)


def test_ties_are_wrong():
    scores = torch.tensor([[[1.0, 1.0], [2.0, 1.0]], [[0.0, 0.0], [0.0, 1.0]]])
    row = accuracy_of(scores, "text", "late")
    assert (row.accuracy, row.ties) == (0.25, 0.5)
    assert (row.low, row.high) == (0.0, 0.5)  # by pair: 0.5 and 0


def test_what_has_no_vectors_has_no_score():
    queries, documents = random_tokens(0, 3, 4), random_tokens(1, 2, 4)
    without = TokenBatch(documents.vectors, documents.mask, normalised=False)
    assert list(scores_of(queries, without)) == ["late"]
    empty = TokenBatch(
        queries.vectors, torch.zeros_like(queries.mask), False, pooled=queries.pooled
    )
    assert list(scores_of(empty, documents)) == ["single"]


class Told(Encoder):
    """One number a word of the vocabulary; or, if it sees bindings, one a code and marker."""

    def __init__(self, sees_bindings: bool):
        self.spec = ENCODERS.resolve("minilm")
        self._sees_bindings, self._numbers = sees_bindings, {}

    @classmethod
    def check(cls, spec):
        pass

    @classmethod
    def wants(cls, spec):
        return ("text",)

    def _batch(self, texts) -> TokenBatch:
        pattern = r"\w+ labels the \w+ \w+" if self._sees_bindings else r"\w+"
        said = [re.findall(pattern, text) for text in texts]
        ids = [[self._numbers.setdefault(w, len(self._numbers)) for w in own] for own in said]
        lengths = np.array([len(own) for own in ids])
        vectors, mask = pad(torch.eye(2000)[[i for own in ids for i in own]], lengths)
        return TokenBatch(vectors, mask, True, pooled=normalise(vectors.sum(dim=1)))

    def encode(self, items, taps=()):
        yield np.arange(items.num_rows), self._batch(items["text"].to_pylist())

    def encode_queries(self, texts):
        return EncodedQueries(self._batch(texts), [])


def test_who_knows_words_alone_cannot_tell_them_apart_and_who_knows_bindings_can():
    pairs = evaluation_pairs(6)
    for row in measure(Told(sees_bindings=False), pairs, "text"):
        assert (row.ties, row.accuracy, row.low, row.high) == (1.0, 0.0, 0.0, 0.0)
    for row in measure(Told(sees_bindings=True), pairs, "text"):
        assert (row.ties, row.accuracy, row.low, row.high) == (0.0, 1.0, 1.0, 1.0)


def test_pairs_are_scored_each_for_itself(checkpoint):
    """A pair's scores do not depend on which others are measured, in whatever form."""
    from pipeline.encoders.colpali import ColPali

    encoders = {
        "text": MiniLM(MiniLM.Spec()),
        "rendered": ColPali(ColPali.Spec(model=checkpoint("colpali"), dtype="float32")),
    }
    pairs = evaluation_pairs(5)
    for form, encoder in encoders.items():
        every = pair_scores(encoder, pairs, form, SMALLEST_SIDE)
        last = pair_scores(encoder, pairs[4:], form, SMALLEST_SIDE)
        assert list(every) == (["single", "late", "hybrid"] if form == "text" else ["late"])
        for name, scores in every.items():
            assert scores.shape == (5, PANELS, 2)
            torch.testing.assert_close(scores[4:], last[name], atol=1e-5, rtol=0)


def test_an_encoder_that_reads_neither_form():
    with pytest.raises(
        SpecError,
        match="^--form must be .*, got 'text', which is not supported by the encoder sleeping",
    ):
        check_form(ENCODERS.resolve("sleeping"), "text")
