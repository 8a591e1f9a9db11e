"""Scores, objectives and their gradients against a literal reading in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from pipeline.train import losses
from pipeline.train.losses import info_nce, kl_divergence, late_scores, margin_mse


def literal_late(queries, query_mask, docs, doc_mask, reduction="mean"):
    """SMART, eq. 4, pair by pair."""
    rows = []
    for query, is_word in zip(queries, query_mask, strict=True):
        row = []
        for doc, is_token in zip(docs, doc_mask, strict=True):
            words, tokens = query[is_word], doc[is_token]
            if len(words) == 0 or len(tokens) == 0:
                row.append(query.sum() * 0)
                continue
            best = (words @ tokens.T).max(dim=1).values
            row.append(best.mean() if reduction == "mean" else best.sum())
        rows.append(torch.stack(row))
    return torch.stack(rows)


def some_tokens(seed: int, dim: int = 5):
    random = torch.Generator().manual_seed(seed)
    queries = torch.randn(4, 6, dim, generator=random, dtype=torch.float64)
    docs = torch.randn(7, 9, dim, generator=random, dtype=torch.float64)
    query_mask = torch.rand(4, 6, generator=random) < 0.7
    doc_mask = torch.rand(7, 9, generator=random) < 0.7
    doc_mask[3] = False  # a document without tokens
    query_mask[2] = False  # a query without words
    return queries, query_mask, docs, doc_mask


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("block", [1, 100, 1 << 22])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_scores_and_gradients_equal_the_equation(seed, block, reduction, monkeypatch):
    monkeypatch.setitem(losses.BLOCK_NUMBERS, "cpu", block)
    queries, query_mask, docs, doc_mask = some_tokens(seed)
    weights = torch.randn(4, 7, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in (queries, docs)]
    expected = literal_late(leaves[0], query_mask, leaves[1], doc_mask, reduction)
    (expected * weights).sum().backward()
    inputs = [t.float().requires_grad_() for t in (queries, docs)]
    scores = late_scores(inputs[0], query_mask, inputs[1], doc_mask, reduction=reduction)
    (scores * weights.float()).sum().backward()
    torch.testing.assert_close(scores.double(), expected, atol=1e-5, rtol=0)
    for one, other in zip(inputs, leaves, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, atol=1e-5, rtol=0)


def test_padding_has_no_score_and_no_gradient():
    queries, query_mask, docs, doc_mask = some_tokens(0)
    docs = docs.masked_fill(~doc_mask.unsqueeze(2), 1e6).requires_grad_()
    late_scores(queries, query_mask, docs, doc_mask).sum().backward()
    assert (docs.grad[~doc_mask] == 0).all()
    assert docs.grad[doc_mask].abs().sum() > 0


def test_gradients_do_not_depend_on_the_memory_layout():
    queries, query_mask, docs, doc_mask = some_tokens(0)
    grads = []
    for layout in (torch.Tensor.contiguous, lambda tensor: tensor.mT.contiguous().mT):
        leaves = [layout(tensor.float()).requires_grad_() for tensor in (queries, docs)]
        late_scores(leaves[0], query_mask, leaves[1], doc_mask).sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(*grads)
    assert grads[0][1].abs().sum() > 0


def test_no_documents_give_no_scores():
    queries, query_mask, docs, doc_mask = some_tokens(0)
    assert late_scores(queries, query_mask, docs[:0], doc_mask[:0]).shape == (4, 0)
    none = late_scores(queries, query_mask, docs[:, :0], doc_mask[:, :0])
    assert (none == 0).all()


def test_losses_are_float32_under_autocast():
    queries, query_mask, docs, doc_mask = some_tokens(1)
    plain = late_scores(queries, query_mask, docs, doc_mask)
    with torch.autocast("cpu", torch.bfloat16):
        within = late_scores(queries, query_mask, docs, doc_mask)
    torch.testing.assert_close(within, plain, atol=0, rtol=0)


def literal_info_nce(scores, positive, temperature, positives):
    """The loss of each query with a positive, in float64."""
    losses = []
    for row, flags in zip(scores.tolist(), positive.tolist(), strict=True):
        if not any(flags):
            continue
        exponentials = [math.exp(score / temperature) for score in row]
        p = [e / sum(exponentials) for e, flag in zip(exponentials, flags, strict=True) if flag]
        if positives == "any":
            losses.append(-math.log(sum(p)))
        else:
            losses.append(-sum(map(math.log, p)) / len(p))
    return losses


def some_relevance(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and relevance of queries with no, one, several and only positives."""
    random = torch.Generator().manual_seed(seed)
    scores = torch.randn(6, 8, generator=random, dtype=torch.float64)
    positive = torch.rand(6, 8, generator=random) < 0.3
    positive[0] = False
    positive[1] = torch.arange(8) == 2
    positive[2, :3] = True
    positive[3] = True
    return scores, positive


@pytest.mark.parametrize("positives", ["any", "all"])
@pytest.mark.parametrize("seed", range(5))
def test_info_nce_equals_the_equations(seed, positives):
    scores, positive = some_relevance(seed)
    losses = info_nce(scores, positive, 0.2, positives)
    assert losses.tolist() == pytest.approx(
        literal_info_nce(scores, positive, 0.2, positives), abs=1e-5
    )
    if positives == "all":  # cross entropy with probabilities as targets
        has_positive = positive.any(dim=1)
        target = positive.double() / positive.sum(dim=1, keepdim=True).clamp_min(1)
        logits, target = (scores / 0.2)[has_positive], target[has_positive]
        expected = torch.nn.functional.cross_entropy(logits, target, reduction="none")
        torch.testing.assert_close(losses.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("positives", ["any", "all"])
def test_gradients_of_info_nce_equal_finite_differences(positives):
    scores, positive = some_relevance(0)
    leaf = scores.float().requires_grad_()
    info_nce(leaf, positive, 0.5, positives).sum().backward()
    step = 1e-6
    for query, document in itertools.product(range(6), range(8)):
        shift = torch.zeros_like(scores)
        shift[query, document] = step
        above, below = (
            sum(literal_info_nce(scores + sign * shift, positive, 0.5, positives))
            for sign in (1, -1)
        )
        slope = (above - below) / (2 * step)
        assert leaf.grad[query, document].item() == pytest.approx(slope, abs=1e-5)


@pytest.mark.parametrize("positives", ["any", "all"])
def test_one_positive_has_one_loss(positives):
    """Both targets agree, and padding documents do not count."""
    scores = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    positive = torch.eye(4, 5, dtype=torch.bool)
    padded = torch.cat([scores, torch.full((4, 2), losses.LOWEST)], dim=1)
    padding = torch.zeros(4, 2, dtype=torch.bool)
    expected = info_nce(scores, positive, 1.0)
    found = info_nce(padded, torch.cat([positive, padding], dim=1), 1.0, positives)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


@pytest.mark.parametrize("positives", ["any", "all"])
def test_query_without_positive_gives_no_nan(positives):
    scores = torch.randn(3, 4, requires_grad=True)
    positive = torch.zeros(3, 4, dtype=torch.bool)
    losses = info_nce(scores, positive, 0.1, positives)
    assert losses.shape == (0,)
    losses.sum().backward()
    assert (scores.grad == 0).all()


@pytest.mark.parametrize("seed", range(3))
def test_distillation_losses_equal_the_equations(seed):
    random = torch.Generator().manual_seed(seed)
    scores = torch.randn(4, 6, generator=random, dtype=torch.float64)
    teacher = torch.randn(4, 6, generator=random, dtype=torch.float64)
    teacher[torch.rand(4, 6, generator=random) < 0.3] = torch.nan
    teacher[1, 1:] = torch.nan  # nothing to be compared with
    positive = torch.zeros(4, 6, dtype=torch.bool)
    positive[:, 0] = positive[2, 3] = True
    divergences, squares = [], []
    for s, t, p in zip(scores.tolist(), teacher.tolist(), positive.tolist(), strict=True):
        scored = [i for i in range(6) if not math.isnan(t[i])]
        if len(scored) > 1:
            total_t = sum(math.exp(t[i]) for i in scored)
            total_s = sum(math.exp(s[i] / 0.5) for i in scored)
            divergences.append(
                sum(
                    math.exp(t[i]) / total_t
                    * (t[i] - math.log(total_t) - s[i] / 0.5 + math.log(total_s))
                    for i in scored
                )
            )  # fmt: skip
        squares += [
            ((s[i] - s[j]) - (t[i] - t[j])) ** 2
            for i in scored
            for j in scored
            if p[i] and not p[j]
        ]
    assert kl_divergence(scores, teacher, 0.5).tolist() == pytest.approx(divergences, abs=1e-5)
    found = margin_mse(scores, teacher, positive).tolist()
    assert sorted(found) == pytest.approx(sorted(squares), rel=1e-4, abs=1e-6)
