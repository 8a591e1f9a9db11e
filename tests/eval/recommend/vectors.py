"""Samples of random items."""

from __future__ import annotations

import torch

from pipeline.eval.recommend.choose import Row
from pipeline.eval.recommend.measure import Measured, measured_candidates
from pipeline.eval.recommend.sample import Sample
from pipeline.index.columns import Representation
from pipeline.index.info import EncoderInfo
from pipeline.registry import COMPRESSORS
from pipeline.tokens import TokenBatch, normalise

ENCODER = EncoderInfo({"name": "any"}, "f", 16, None, True, False, False, "any")


def random_sample(num_items: int = 12, num_tokens: int = 10, seed: int = 0) -> Sample:
    """Returns items of equal length in two batches."""
    generator = torch.Generator().manual_seed(seed)
    vectors = normalise(torch.randn(num_items, num_tokens, 16, generator=generator))
    mask = torch.ones(num_items, num_tokens, dtype=torch.bool)
    batches = [
        TokenBatch(vectors[part], mask[part], normalised=True)
        for part in (slice(0, 5), slice(5, num_items))
    ]
    return Sample([f"item{i}" for i in range(num_items)], batches, num_items)


def representation(method: str, num_vectors: int | None = None, codec: str = "float16"):
    """Returns the representation of a candidate."""
    fields = {"name": method} | ({"num_vectors": num_vectors} if num_vectors else {})
    return Representation(compressor=COMPRESSORS.resolve(fields), codec={"name": codec})


def measured(sample: Sample, *representations: Representation) -> list[Measured]:
    """Compresses a sample with several candidates."""
    return list(measured_candidates(representations, sample, ENCODER))


def row(name: str, size: float, low: float, **values) -> Row:
    """Returns the measurements of a candidate with the given bounds."""
    fields = {
        "method": "hpool",
        "num_vectors": 1,
        "codec": {"name": "float16"},
        "vectors_per_item": 1.0,
        "milliseconds": 1.0,
        "quality": low,
        "retained": low,
        "high": 1.0,
        "mean_distance": 0.0,
        "max_distance": 0.0,
    }
    return Row(name=name, bytes_per_item=size, low=low, **{**fields, **values})
