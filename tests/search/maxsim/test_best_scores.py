"""Scores of the best items, on every backend, against NumPy."""

import numpy as np
import pytest
import torch

import pipeline.search.maxsim as module
from pipeline.compression.codecs.bits import Bits
from pipeline.compression.codecs.int8 import Int8
from pipeline.search import native
from pipeline.search.maxsim import best_scores, maxsim
from pipeline.search.packed import PackedVectors, Segment

BACKENDS = ("torch", *native.available())
DIM = 48


def packed(lengths, *, levels=127, seed=0, codec="int8") -> PackedVectors:
    """Returns items in two segments. Few levels of the values make ties frequent."""
    rng = np.random.default_rng(seed)
    segments = []
    for part in np.array_split(np.array(lengths), 2):
        values = rng.integers(-levels, levels + 1, (int(part.sum()), DIM))
        if codec == "bits":
            bits = Bits(Bits.Spec(), Bits.fit(Bits.Spec(), np.ones((1, DIM), np.float32)))
            parts = bits.quantise(torch.from_numpy(values.astype(np.float32)))
            segments.append(Segment(bits, DIM, parts, torch.from_numpy(part)))
        else:
            parts = {
                "values": torch.from_numpy(values.astype(np.int8)),
                "scales": torch.ones(len(values), 1),
            }
            segments.append(Segment(Int8(Int8.Spec()), DIM, parts, torch.from_numpy(part)))
    return PackedVectors(segments)


def queries(lengths, seed=1) -> list[torch.Tensor]:
    """Returns query tokens of small integers."""
    rng = np.random.default_rng(seed)
    tokens = (rng.integers(-9, 10, (length, DIM)).astype(np.float32) for length in lengths)
    return [torch.from_numpy(token) for token in tokens]


def check(found, scores_QR, rows, num, groups=None) -> None:
    """Checks that the found items are scored items, and contain the best ones and all ties."""
    for (items, scores), all_scores, part in zip(found, scores_QR, rows, strict=True):
        assert items.dtype == np.int64 and scores.dtype == np.float32
        assert (np.diff(items) > 0).all()
        position = np.searchsorted(part, items)
        assert (part[position] == items).all() and (all_scores[position] == scores).all()
        valid = all_scores[all_scores > -np.inf]
        best = valid
        if groups is not None:
            best = np.array([all_scores[groups[part] == g].max() for g in np.unique(groups[part])])
        limit = np.sort(best[best > -np.inf])[::-1][:num][-1] if len(valid) else np.inf
        assert set(items) >= set(part[all_scores >= limit])
        assert (scores > -np.inf).all()


CASES = {
    "one vector": [1, 0, 1, 1] * 100,
    "three items": [2, 0, 1],
    "long": [3, 2000, 1, 0, 40],
    "mixed": [3, 1, 0, 70, 1, 32, 33, 8] * 20,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("levels", [1, 127])
def test_best_scores_equal_numpy(backend, name, levels, monkeypatch):
    """The sample makes the bound, in particular with ties, and for a selection of rows."""
    monkeypatch.setattr(module, "SAMPLE", 16)
    items = packed(CASES[name], levels=levels)
    rng = np.random.default_rng(2)
    for lengths in ([1] * 40, [1], [4, 1, 33]):
        tokens = queries(lengths)
        scores = maxsim(tokens, items, backend=backend).numpy()
        all_rows = np.arange(len(items))
        for num in (1, 3, 10**6):
            found = best_scores(tokens, items, num, backend=backend)
            check(found, scores, [all_rows] * len(tokens), num)
            rows = np.flatnonzero(rng.random(len(items)) < 0.6)
            found = best_scores(tokens, items, num, rows=torch.from_numpy(rows), backend=backend)
            check(found, scores[:, rows], [rows] * len(tokens), num)
            parts = [np.flatnonzero(rng.random(len(items)) < share) for share in (0, 0.3, 1)]
            parts = [parts[i % 3] for i in range(len(tokens))]
            tensors = [torch.from_numpy(part) for part in parts]
            found = best_scores(tokens, items, num, rows=tensors, backend=backend)
            check(found, [scores[i, part] for i, part in enumerate(parts)], parts, num)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", ["int8", "bits"])
def test_scores_of_a_few_or_many_queries_are_equal(backend, codec, monkeypatch):
    """Many queries of one token are multiplied in panels, with scores equal to the last bit."""
    monkeypatch.setattr(module, "SAMPLE", 64)
    torch.manual_seed(0)
    values, lengths = torch.randn(2000, 130), torch.tensor([1] * 1999 + [0] + [1])
    kind = {"int8": Int8, "bits": Bits}[codec]
    artefact = Bits.fit(Bits.Spec(), values[:9].numpy()) if codec == "bits" else None
    fitted = kind(kind.Spec(), artefact)
    items = PackedVectors([Segment(fitted, 130, fitted.quantise(values), lengths)])
    tokens = [fitted.transform_queries(token) for token in torch.randn(70, 1, 130)]
    expected = maxsim(tokens, items, backend=backend).numpy()
    torch_scores = maxsim(tokens, items, backend="torch").numpy()
    np.testing.assert_allclose(expected, torch_scores, atol=5e-3 if codec == "int8" else 2e-4)
    for num in (1, 20):
        found = best_scores(tokens, items, num, backend=backend)
        check(found, expected, [np.arange(2001)] * 70, num)
        if backend != "torch":
            assert max(len(index) for index, _ in found) < 1500
            for query, (index, scores) in zip(tokens, found, strict=True):
                ((single, single_scores),) = best_scores([query], items, num, backend=backend)
                assert index.tolist() == single.tolist()
                assert scores.tolist() == single_scores.tolist()


@pytest.mark.skipif(not native.available(), reason="the library is not built")
def test_levels_find_equal_items_and_scores(monkeypatch):
    monkeypatch.setattr(module, "SAMPLE", 16)
    for lengths, num_tokens in (([1] * 900, 1), ([3, 0, 40] * 100, 1)):
        items, tokens = packed(lengths), queries([num_tokens] * 33)
        generic, *others = (best_scores(tokens, items, 9, backend=b) for b in native.available())
        for found in others:
            for pair, expected in zip(found, generic, strict=True):
                assert all(map(np.array_equal, pair, expected))


@pytest.mark.parametrize("backend", BACKENDS)
def test_bits(backend):
    items, tokens = packed([5, 0, 1, 32] * 30, codec="bits"), queries([3, 1])
    rows = [np.arange(0, 120, 2), np.arange(100)]
    tensors = [torch.from_numpy(part) for part in rows]
    scores = [
        maxsim([query], items, rows=part, backend=backend)[0].numpy()
        for query, part in zip(tokens, tensors, strict=True)
    ]
    check(best_scores(tokens, items, 5, rows=tensors, backend=backend), scores, rows, 5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_few_items_reach_the_bound(backend, monkeypatch):
    """The sample has all of the best items, so that the bound is too high."""
    monkeypatch.setattr(module, "SAMPLE", 16)
    values = torch.zeros(320, DIM, dtype=torch.int8)
    values[::20, 0] = 100
    values[1, 0] = 50
    parts = {"values": values, "scales": torch.ones(320, 1)}
    items = PackedVectors([Segment(Int8(Int8.Spec()), DIM, parts, torch.ones(320).long())])
    for count in (1, 40):
        tokens = queries([1] * count)
        scores = maxsim(tokens, items, backend=backend).numpy()
        found = best_scores(tokens, items, 17, backend=backend)
        check(found, scores, [np.arange(320)] * count, 17)


@pytest.mark.parametrize("backend", BACKENDS)
def test_best_scores_of_groups(backend, monkeypatch):
    monkeypatch.setattr(module, "SAMPLE", 16)
    items, tokens = packed([1] * 600, levels=3), queries([1] * 20)
    scores = maxsim(tokens, items, backend=backend).numpy()
    for groups in (np.arange(600) // 5, (np.arange(600) > 500) * np.arange(600)):
        found = best_scores(tokens, items, 4, groups=groups, backend=backend)
        check(found, scores, [np.arange(600)] * 20, 4, groups)
