"""Comparison of all compressors on GPU and CPU."""

import pytest
import torch

from tests.compression.test_contract import LENGTHS, METHODS, build, make_batch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", METHODS)
def test_gpu_equals_cpu(name, ragged):
    compressor = build(name, ragged)
    batch = make_batch(compressor, ragged, LENGTHS, boxes=True)
    expected, found = compressor.compress(batch), compressor.compress(batch.to("cuda"))
    assert found.vectors.device.type == "cuda"
    assert torch.equal(expected.mask, found.mask.cpu())
    if expected.assignment is not None:
        assert torch.equal(expected.assignment, found.assignment.cpu())
    torch.testing.assert_close(
        expected.vectors[expected.mask], found.vectors.cpu()[expected.mask], atol=1e-4, rtol=0
    )
