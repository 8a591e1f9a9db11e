"""Candidate pools and queries with images in an evaluation."""

from __future__ import annotations

import numpy as np
import torch

from pipeline.datasets.queries import ImageFiles
from pipeline.eval.ranker import map_by_pool
from pipeline.registry import ENCODERS
from pipeline.search.query import IMAGES_PER_BATCH, encode
from tests.images import noise, png
from tests.tiny import checkpoints


def test_each_pool_is_ranked_once_and_the_order_is_kept():
    calls = []

    def rank(numbers, pool):
        calls.append((numbers, pool))
        return [(number, pool) for number in numbers]

    ids = [f"q{i}" for i in range(6)]
    pools = {query_id: ("a", "b") if i % 2 else ("c",) for i, query_id in enumerate(ids[:5])}
    found = map_by_pool(rank, [5, 0, 1, 2, 3], ids, pools)
    assert found == [(5, ()), (0, ("c",)), (1, ("a", "b")), (2, ("c",)), (3, ("a", "b"))]
    assert len(calls) == 3
    assert map_by_pool(rank, [1, 0], ids, None) == [(1, None), (0, None)]


def test_images_are_read_when_needed(tmp_path):
    (tmp_path / "a.png").write_bytes(png(noise(20, 20)))
    images = ImageFiles({"a": str(tmp_path / "a.png"), "b": str(tmp_path / "absent.png")})
    assert list(images) == ["a", "b"] and len(images) == 2
    assert images["a"] == png(noise(20, 20))


def test_batches_of_queries_equal_single_queries(tmp_path):
    encoder = ENCODERS.build(
        ENCODERS.resolve({"name": "dual", "model": str(checkpoints.siglip(tmp_path))})
    )
    images = [png(noise(32, 32, seed)) for seed in range(IMAGES_PER_BATCH + 2)]
    queries = ["a wing", *images, "two wings of a plane", images[0]]
    encoded = encode(encoder, queries)
    assert len(encoded.token_texts) == len(queries) == len(encoded.tokens.mask)
    for row in (0, 1, IMAGES_PER_BATCH + 2, len(queries) - 1):
        single = encode(encoder, [queries[row]])
        mask = encoded.tokens.mask[row]
        np.testing.assert_allclose(
            encoded.tokens.vectors[row][mask].float().numpy(),
            single.tokens.vectors[0][single.tokens.mask[0]].float().numpy(),
            atol=1e-4,
        )
        assert torch.equal(mask.sum(), single.tokens.mask.sum())
