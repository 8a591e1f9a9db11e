"""Training losses against a literal float64 implementation of the equations."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from pipeline.encoders.edje import objectives


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_matching_loss():
    torch.manual_seed(0)
    logits, match = torch.randn(9) * 3, torch.arange(9) % 3 == 0
    for actual, x, y in zip(
        objectives.matching_loss(logits, match).tolist(),
        logits.tolist(),
        match.tolist(),
        strict=True,
    ):
        assert actual == pytest.approx(-math.log(sigmoid(x) if y else 1 - sigmoid(x)), abs=1e-5)


def test_distillation_loss():
    torch.manual_seed(1)
    student, teacher = torch.randn(2, 8) * 2
    for actual, s, t in zip(
        objectives.distillation_loss(student, teacher).tolist(),
        student.tolist(),
        teacher.tolist(),
        strict=True,
    ):
        y_t, y_s = sigmoid(t), sigmoid(s)
        expected = -(y_t * math.log(y_s) + (1 - y_t) * math.log(1 - y_s))
        assert actual == pytest.approx(expected, abs=1e-5)
    minimum = student.clone().requires_grad_()
    objectives.distillation_loss(minimum, student).sum().backward()
    assert minimum.grad.abs().max() < 1e-6


def test_recovery_loss():
    torch.manual_seed(2)
    predicted, target = torch.randn(2, 5, 7)
    for actual, f, g in zip(
        objectives.recovery_loss(predicted, target).tolist(),
        predicted.tolist(),
        target.tolist(),
        strict=True,
    ):
        dot = sum(a * b for a, b in zip(f, g, strict=True))
        norms = math.hypot(*f) * math.hypot(*g)
        assert actual == pytest.approx(1 - dot / norms, abs=1e-6)


def test_mask_words():
    torch.manual_seed(3)
    ids = torch.randint(10, 20, (50, 40))
    is_word = torch.rand(50, 40) < 0.7
    masked, is_masked = objectives.mask_words(ids, is_word, 4, 0.5)
    assert not (is_masked & ~is_word).any()
    assert (masked[is_masked] == 4).all() and (masked[~is_masked] == ids[~is_masked]).all()
    count = int(is_word.sum())
    assert abs(int(is_masked.sum()) / count - 0.5) < 4 * 0.5 / math.sqrt(count)


def test_masked_language_loss():
    torch.manual_seed(4)
    logits, ids = torch.randn(6, 11), torch.randint(11, (6,))
    for actual, row, token in zip(
        objectives.masked_language_loss(logits, ids).tolist(),
        logits.tolist(),
        ids.tolist(),
        strict=True,
    ):
        expected = -math.log(math.exp(row[token]) / sum(map(math.exp, row)))
        assert actual == pytest.approx(expected, abs=1e-5)


def test_hard_negatives_are_the_most_similar_candidates():
    torch.manual_seed(5)
    similarity, allowed = torch.randn(6, 9), torch.rand(6, 9) < 0.6
    allowed[0] = False
    allowed[1] = torch.arange(9) == 4
    rows, valid = objectives.hard_negatives(similarity, allowed, 3)
    for anchor in range(6):
        candidates = [b for b in range(9) if allowed[anchor, b]]
        expected = sorted(candidates, key=lambda b: -similarity[anchor, b].item())[:3]
        assert rows[anchor, valid[anchor]].tolist() == expected


def test_sampling_without_replacement():
    similarity = torch.tensor([0.3, -0.2, 0.9, 0.1, 0.8], dtype=torch.float64)
    allowed, temperature, draws = torch.tensor([1, 1, 0, 1, 1]).bool(), 0.5, 20_000
    torch.manual_seed(6)
    rows, valid = objectives.hard_negatives(
        similarity.expand(draws, 5), allowed.expand(draws, 5), 2, temperature
    )
    assert valid.all()
    weight = {b: math.exp(similarity[b].item() / temperature) for b in (0, 1, 3, 4)}
    total = sum(weight.values())
    for first, second in itertools.permutations(weight, 2):
        probability = weight[first] / total * weight[second] / (total - weight[first])
        frequency = ((rows[:, 0] == first) & (rows[:, 1] == second)).double().mean().item()
        assert abs(frequency - probability) < 5 * math.sqrt(probability * (1 - probability) / draws)


def test_fewer_candidates_than_negatives():
    rows, valid = objectives.hard_negatives(torch.zeros(2, 2), torch.eye(2).bool(), 3, 0.07)
    assert rows.shape == (2, 2)
    assert [rows[a, valid[a]].tolist() for a in range(2)] == [[0], [1]]


def test_sampling_from_the_most_similar():
    torch.manual_seed(7)
    similarity, allowed = torch.randn(4, 40), torch.rand(4, 40) < 0.8
    best = similarity.masked_fill(~allowed, -torch.inf).topk(5).indices
    sampled = [set() for _ in best]
    for _ in range(100):
        rows, valid = objectives.hard_negatives(similarity, allowed, 3, 100.0, top_k=5)
        assert valid.all() and rows.shape == (4, 3)
        for anchor, row in enumerate(rows.tolist()):
            assert len(set(row)) == 3
            sampled[anchor].update(row)
    assert [set(candidates.tolist()) for candidates in best] == sampled
