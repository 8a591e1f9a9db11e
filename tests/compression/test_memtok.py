"""Tests of MemTok."""

import dataclasses
import math

import pytest
import torch

from pipeline.compression.memtok import MemTok
from pipeline.config import SpecError

LENGTHS = [9, 1, 0, 2]


def with_appended(batch, num_tokens=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    appended = torch.randn(len(batch), num_tokens, 8, generator=generator)
    return dataclasses.replace(batch, appended=appended)


@pytest.mark.parametrize("num_vectors", [None, 4])
def test_returns_the_unit_vectors_of_the_appended_tokens(num_vectors, ragged):
    batch = with_appended(ragged(LENGTHS))
    result = MemTok(MemTok.Spec(num_vectors=num_vectors)).compress(batch)
    assert result.normalised and result.assignment is None
    # Items with fewer tokens have as many vectors; items without tokens have none.
    assert result.lengths.tolist() == [4, 4, 0, 4]
    for i in (0, 1, 3):
        for k in range(4):
            z = batch.appended[i, k].double().tolist()
            expected = torch.tensor([x / math.hypot(*z) for x in z])
            torch.testing.assert_close(result.vectors[i, k], expected, atol=1e-6, rtol=0)


def test_gradients_flow_to_the_appended_tokens(ragged):
    batch = with_appended(ragged(LENGTHS))
    appended = batch.appended.double().requires_grad_()

    def vectors(states):
        return MemTok(MemTok.Spec()).compress(dataclasses.replace(batch, appended=states)).vectors

    direction = torch.randn(4, 4, 8)
    vectors(appended).mul(direction).sum().backward()
    # The Jacobian of z / |z| is (I - u u^T) / |z|.
    z, length = appended.detach(), appended.detach().norm(dim=2, keepdim=True)
    u, direction = z / length, direction.double()
    expected = (direction - u * (u * direction).sum(dim=2, keepdim=True)) / length
    torch.testing.assert_close(appended.grad, expected, atol=1e-5, rtol=0)


def test_rejects_another_budget(ragged):
    with pytest.raises(SpecError) as error:
        MemTok(MemTok.Spec(num_vectors=8)).compress(with_appended(ragged(LENGTHS)))
    assert str(error.value) == (
        "num_vectors must be 4, the number of tokens that the encoder was trained to append,"
        " got 8; MemTok cannot change its budget after training"
    )


def test_rejects_batches_without_appended_tokens(ragged):
    with pytest.raises(
        SpecError, match="compressor memtok must be used with an encoder with appended_tokens"
    ):
        MemTok(MemTok.Spec()).compress(ragged(LENGTHS))
