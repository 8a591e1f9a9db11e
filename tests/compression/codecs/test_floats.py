"""Floating-point codecs, whose columns other programs can read."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from pipeline.registry import CODECS
from pipeline.search.packed import FLOATS
from pipeline.tokens import TokenBatch


@pytest.mark.parametrize("name", ["float16", "float32"])
def test_columns_hold_floats(name):
    codec = CODECS.build(CODECS.resolve(name))
    given = torch.tensor([[[1.0, 0.1], [3.0, 1e-5]]])
    column = codec.encode(TokenBatch(given, torch.ones(1, 2, dtype=torch.bool), False))
    assert column.type.value_type.value_type == getattr(pa, name)()
    expected = given[0].numpy().astype(name)
    assert np.array_equal(column.to_pylist()[0], expected.astype(float))
    decoded, _ = codec.decode(column, 2)
    assert decoded.dtype == expected.dtype and np.array_equal(decoded, expected)
    assert codec.token_bytes(384) == 384 * np.dtype(name).itemsize


def test_parts_may_have_any_float_dtype():
    given = torch.rand(3, 4, dtype=torch.float64)
    assert FLOATS.dequantise({"values": given}, 4).dtype == torch.float32
    values, scales = FLOATS.factors({"values": given}, 4)
    assert values is given and scales is None
