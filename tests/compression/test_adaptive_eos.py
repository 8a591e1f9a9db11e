import numpy as np
import pytest

from pipeline.compression.adaptive_eos import TAP, AdaptiveEos
from pipeline.config import SpecError
from pipeline.registry import COMPRESSORS

LENGTHS = [9, 1, 0, 23, 5, 40]


def z_scores(scores):
    """z of each token of an item: the standard deviation divides by N - 1."""
    mean = sum(scores) / len(scores)
    deviation = (sum((s - mean) ** 2 for s in scores) / max(len(scores) - 1, 1)) ** 0.5 + 1e-8
    return [(s - mean) / deviation for s in scores]


def items_of(batch):
    pairs = zip(batch.taps[TAP.name], batch.mask, strict=True)
    return [scores[mask].double().tolist() for scores, mask in pairs]


@pytest.fixture
def batch(ragged):
    return ragged(LENGTHS, taps=[TAP.name])


@pytest.mark.parametrize("ratio", [0.05, 0.1, 0.5, 0.9])
def test_equals_the_equations(ratio, batch, ragged):
    sample = [ragged([30, 12], seed=1, taps=[TAP.name]), ragged([50], seed=2, taps=[TAP.name])]
    spec = AdaptiveEos.Spec(ratio=ratio)
    artefact = AdaptiveEos.fit(spec, sample)
    every = sorted(z for b in sample for item in items_of(b) for z in z_scores(item))
    # Equation 14: the quantile 1 - ratio, linear between the values around it.
    place = (1 - ratio) * (len(every) - 1)
    low = int(place)
    k = every[low] + (place - low) * (every[min(low + 1, len(every) - 1)] - every[low])
    assert artefact["k"][0] == pytest.approx(k, abs=1e-5)

    result = AdaptiveEos(spec, artefact).compress(batch)
    for i, item in enumerate(items_of(batch)):
        kept = [j for j, z in enumerate(z_scores(item)) if z > k] if item else []  # equation 13
        kept = kept or ([item.index(max(item))] if item else [])
        there = (result.support[i, batch.mask[i]] >= 0).nonzero().squeeze(1).tolist()
        assert there == kept


def test_keeps_the_ratio_of_the_sample(ragged):
    sample = ragged([100] * 20, taps=[TAP.name])
    spec = AdaptiveEos.Spec(ratio=0.2)
    result = AdaptiveEos(spec, AdaptiveEos.fit(spec, [sample])).compress(sample)
    assert result.lengths.sum() == pytest.approx(400, abs=1)
    assert len(set(result.lengths.tolist())) > 3  # of one item more, of another less


def test_equal_scores_keep_one_token(ragged):
    batch = ragged([7, 3], taps=[TAP.name])
    batch.taps[TAP.name][:] = 0.25
    result = AdaptiveEos(AdaptiveEos.Spec(ratio=0.5), {"k": np.array([0.1])}).compress(batch)
    assert result.lengths.tolist() == [1, 1]
    first = [row[mask].tolist() for row, mask in zip(result.support, batch.mask, strict=True)]
    assert first == [[0] + [-1] * 6, [0, -1, -1]]


@pytest.mark.parametrize("ratio", [0, 1, 1.5])
def test_ratio_is_between_0_and_1(ratio):
    with pytest.raises(SpecError, match="ratio must be "):
        COMPRESSORS.resolve({"name": "adaptive_eos", "ratio": ratio})
