"""Comparison of all codecs on GPU and CPU."""

import pytest
import torch

from pipeline.registry import CODECS
from tests.compression.codecs.test_contract import built, vectors

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CODECS.names())
def test_gpu_equals_cpu(name):
    codec = built(f'{{"name": "{name}"}}', 48)
    tokens = vectors(500, 48)
    expected, found = codec.quantise(tokens), codec.quantise(tokens.cuda())
    for part, (dtype, _) in codec.parts(48).items():
        assert found[part].is_cuda and found[part].dtype == dtype
        if dtype.is_floating_point:  # the GPU divides by multiplying with a reciprocal
            torch.testing.assert_close(found[part].cpu(), expected[part])
            continue
        # Values at a rounding boundary may be rounded differently.
        assert (expected[part] == found[part].cpu()).double().mean() > 0.99
    on_gpu = {part: values.cuda() for part, values in expected.items()}
    torch.testing.assert_close(codec.dequantise(on_gpu, 48).cpu(), codec.dequantise(expected, 48))
    query = codec.transform_queries(tokens.cuda())
    torch.testing.assert_close(query.cpu(), codec.transform_queries(tokens), atol=1e-2, rtol=0)
