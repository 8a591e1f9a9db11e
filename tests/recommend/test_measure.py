"""Compression and scoring of the candidates in memory."""

import torch

from pipeline.search.maxsim import maxsim_oracle
from tests.recommend.vectors import measured, random_sample, representation


def test_scores_equal_those_of_the_compressed_items():
    sample = random_sample()
    full, half, codes = measured(
        sample,
        representation("none"),
        representation("spatial", 5),
        representation("spatial", 5, "int8"),
    )
    queries = [full.packed.item(3)[:4], full.packed.item(7)[:2]]
    vectors = torch.stack([half.packed.item(row) for row in range(len(sample))])
    mask = torch.ones(vectors.shape[:2], dtype=torch.bool)
    for query, scores in zip(queries, half.scores(queries), strict=True):
        torch.testing.assert_close(scores, maxsim_oracle(query, vectors, mask)[0])
    assert full.scores(queries).argmax(dim=1).tolist() == [3, 7]
    assert (full.vectors_per_item, half.vectors_per_item) == (10, 5)
    assert (full.bytes_per_item, half.bytes_per_item) == (320, 160)
    assert codes.bytes_per_item == 5 * (16 + 4)
    assert half.compressor is codes.compressor  # compressed once
    assert half.milliseconds(queries, num_items=1000) > 0
