"""Serialisation of model inputs."""

import pyarrow as pa
import pytest
import torch

from pipeline.encoders.model_inputs import DTYPES, ModelInput, pack, unpack_column


def make_input(seed: int, dtype: torch.dtype = torch.float32) -> ModelInput:
    generator = torch.Generator().manual_seed(seed)
    media = {
        "pixels": torch.randint(0, 2, (3, 5, 2), generator=generator).to(dtype),
        "empty": torch.empty(0, 4, dtype=dtype),
    }
    sequence = {"input_ids": torch.randint(0, 99, (7 + seed,), generator=generator)}
    return ModelInput.create(sequence, media, torch.zeros(7 + seed))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_sequences_of_slices_and_chunks(dtype):
    items = [[make_input(3 * i + j, dtype) for j in range(i % 3)] for i in range(6)]
    values = pa.array([pack(item) for item in items], pa.large_binary())
    column = pa.chunked_array([values.slice(1, 3), values.slice(0, 0), values.slice(4)])
    found = list(unpack_column(column))
    assert [len(item) for item in found] == [1, 2, 0, 1, 2]
    for item, expected in zip(found, items[1:], strict=True):
        for one, other in zip(item, expected, strict=True):
            tensors, others = one.tensors(), other.tensors()
            assert tensors.keys() == others.keys()
            for name, tensor in tensors.items():
                assert tensor.dtype == others[name].dtype
                torch.testing.assert_close(tensor, others[name], equal_nan=True)
