"""Every compressor on a GPU beside the CPU."""

import pytest
import torch

from tests.compression.test_contract import LENGTHS, METHODS, build, make

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", METHODS)
def test_a_gpu_gives_what_the_cpu_gives(name, ragged):
    compressor = build(name, ragged)
    batch = make(compressor, ragged, LENGTHS, boxes=True)
    here, there = compressor.compress(batch), compressor.compress(batch.to("cuda"))
    assert there.vectors.device.type == "cuda"
    assert torch.equal(here.mask, there.mask.cpu())
    if here.support is not None:
        assert torch.equal(here.support, there.support.cpu())
    torch.testing.assert_close(
        here.vectors[here.mask], there.vectors.cpu()[here.mask], atol=1e-4, rtol=0
    )
