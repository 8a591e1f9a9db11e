"""Compression and scoring of the candidates in memory."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.eval.recommend.measure import measured_candidates
from pipeline.eval.recommend.sample import Sample
from pipeline.search.maxsim import maxsim_oracle
from tests.eval.recommend.vectors import ENCODER, measured, random_sample, representation


class LiveTensors(TorchDispatchMode):
    """Records the largest total size of the tensors that operations returned and that exist."""

    def __init__(self):
        super().__init__()
        self.peak_bytes, self._references = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        self._references += map(weakref.ref, tensors)
        self._references = [reference for reference in self._references if reference() is not None]
        storages = [reference().untyped_storage() for reference in self._references]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        self.peak_bytes = max(self.peak_bytes, sum(sizes.values()))
        return result


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


@pytest.mark.parametrize("candidate", [("none",), ("spatial", 90), ("samer", 90), ("hpool", 90)])
def test_memory_of_compression(candidate):
    """Stored vectors take 0.5 (float16) and 0.3 (int8) times the memory of single precision.

    All vectors in single precision and their concatenation would take twice the memory.
    """
    batches = [random_sample(12, 100, seed).batches[0] for seed in range(60)]
    sample = Sample([f"item{i}" for i in range(300)], batches, 300)
    representations = [representation(*candidate, codec=codec) for codec in ("float16", "int8")]
    with LiveTensors() as live:
        for result in measured_candidates(representations, sample, ENCODER):
            assert len(result.packed) == 300
    assert 0 < live.peak_bytes < 1.5 * 300 * 100 * 16 * 4
