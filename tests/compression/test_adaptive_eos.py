import numpy as np
import pytest

from pipeline.compression.adaptive_eos import TAP, AdaptiveEos
from pipeline.config import SpecError
from pipeline.registry import COMPRESSORS

LENGTHS = [9, 1, 0, 23, 5, 40]


def z_scores(scores):
    """Computes the z-scores of an item; the standard deviation divides by N - 1."""
    mean = sum(scores) / len(scores)
    deviation = (sum((s - mean) ** 2 for s in scores) / max(len(scores) - 1, 1)) ** 0.5 + 1e-8
    return [(s - mean) / deviation for s in scores]


def item_scores(batch):
    pairs = zip(batch.taps[TAP.name], batch.mask, strict=True)
    return [scores[mask].double().tolist() for scores, mask in pairs]


@pytest.fixture
def batch(ragged):
    return ragged(LENGTHS, taps=[TAP.name])


@pytest.mark.parametrize("ratio", [0.05, 0.1, 0.5, 0.9])
def test_equals_equations(ratio, batch, ragged):
    sample = [ragged([30, 12], seed=1, taps=[TAP.name]), ragged([50], seed=2, taps=[TAP.name])]
    spec = AdaptiveEos.Spec(ratio=ratio)
    artefact = AdaptiveEos.fit(spec, sample)
    scores = sorted(z for b in sample for item in item_scores(b) for z in z_scores(item))
    # Eq. 14: the quantile 1 - ratio with linear interpolation.
    position = (1 - ratio) * (len(scores) - 1)
    low = int(position)
    high = min(low + 1, len(scores) - 1)
    k = scores[low] + (position - low) * (scores[high] - scores[low])
    assert artefact["k"][0] == pytest.approx(k, abs=1e-5)

    result = AdaptiveEos(spec, artefact).compress(batch)
    for i, item in enumerate(item_scores(batch)):
        expected = [j for j, z in enumerate(z_scores(item)) if z > k] if item else []  # eq. 13
        expected = expected or ([item.index(max(item))] if item else [])
        found = (result.assignment[i, batch.mask[i]] >= 0).nonzero().squeeze(1).tolist()
        assert found == expected


def test_keeps_ratio_of_sample(ragged):
    sample = ragged([100] * 20, taps=[TAP.name])
    spec = AdaptiveEos.Spec(ratio=0.2)
    result = AdaptiveEos(spec, AdaptiveEos.fit(spec, [sample])).compress(sample)
    assert result.lengths.sum() == pytest.approx(400, abs=1)
    assert len(set(result.lengths.tolist())) > 3  # different numbers per item


def test_keeps_one_of_equal_scores(ragged):
    batch = ragged([7, 3], taps=[TAP.name])
    batch.taps[TAP.name][:] = 0.25
    result = AdaptiveEos(AdaptiveEos.Spec(ratio=0.5), {"k": np.array([0.1])}).compress(batch)
    assert result.lengths.tolist() == [1, 1]
    first = [row[mask].tolist() for row, mask in zip(result.assignment, batch.mask, strict=True)]
    assert first == [[0] + [-1] * 6, [0, -1, -1]]


@pytest.mark.parametrize("ratio", [0, 1, 1.5])
def test_rejects_ratio_outside_0_and_1(ratio):
    with pytest.raises(SpecError, match=f"ratio must be .*, got {ratio}$"):
        COMPRESSORS.resolve({"name": "adaptive_eos", "ratio": ratio})
