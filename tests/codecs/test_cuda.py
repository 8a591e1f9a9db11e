"""Every codec on a GPU beside the CPU."""

import pytest
import torch

from pipeline.registry import CODECS
from tests.codecs.test_contract import built, vectors

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CODECS.names())
def test_a_gpu_gives_what_the_cpu_gives(name):
    codec = built(f'{{"name": "{name}"}}', 48)
    tokens = vectors(500, 48)
    here, there = codec.quantise(tokens), codec.quantise(tokens.cuda())
    for part, (dtype, _) in codec.parts(48).items():
        assert there[part].is_cuda and there[part].dtype == dtype
        # A number at a rounding boundary may fall on its other side.
        assert (here[part] == there[part].cpu()).double().mean() > 0.99
    same = {part: values.cuda() for part, values in here.items()}
    torch.testing.assert_close(codec.dequantise(same, 48).cpu(), codec.dequantise(here, 48))
    query = codec.transform_queries(tokens.cuda())
    torch.testing.assert_close(query.cpu(), codec.transform_queries(tokens), atol=1e-2, rtol=0)
