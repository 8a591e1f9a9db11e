"""Comparison of the int8 codec with NumPy in float64, and its error bound."""

import numpy as np
import pytest
import torch

from pipeline.registry import CODECS

CODEC = CODECS.build(CODECS.resolve("int8"))


def reference(vector: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns the integers and the scale of one vector."""
    scale = np.abs(vector).max() / 127
    return np.rint(vector / scale) if scale else np.zeros_like(vector), scale


@pytest.mark.parametrize("dim", [1, 48, 128, 2048])
def test_equals_reference(dim):
    given = torch.randn(40, dim, generator=torch.Generator().manual_seed(dim))
    parts = CODEC.quantise(given)
    for vector, values, scale in zip(given.double().numpy(), *parts.values(), strict=True):
        expected, expected_scale = reference(vector)
        assert np.array_equal(values.numpy(), expected)
        assert scale.item() == pytest.approx(expected_scale, rel=1e-6)
    assert parts["values"].abs().amax(dim=1).eq(127).all()
    error = (CODEC.dequantise(parts, dim) - given).abs()
    assert (error <= parts["scales"] / 2 * (1 + 1e-5)).all()


def test_halves_are_rounded_to_even_for_both_signs():
    halves = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0]])
    values = CODEC.quantise(halves)["values"]
    assert values.tolist() == [[127, 0, 2, 2, 0, -2, -127]]
    assert torch.equal(CODEC.quantise(-halves)["values"], -values)


@pytest.mark.parametrize("vector", [[0.0, 0.0], [1e-42, -1e-42]])
def test_zero_and_subnormal_vectors_become_zero(vector):
    parts = CODEC.quantise(torch.tensor([vector]))
    assert parts["values"].tolist() == [[0, 0]] and (parts["scales"] > 0).all()
    assert CODEC.dequantise(parts, 2).tolist() == [[0.0, 0.0]]


def test_similarity_is_integer_product_times_scales():
    generator = torch.Generator().manual_seed(0)
    queries, docs = torch.randn(7, 96, generator=generator), torch.randn(9, 96, generator=generator)
    on_grid = CODEC.transform_queries(queries)
    query, again, doc = (CODEC.quantise(v) for v in (queries, on_grid, docs))
    assert torch.equal(again["values"], query["values"])
    torch.testing.assert_close(again["scales"], query["scales"], rtol=1e-6, atol=0)
    integers = query["values"].long() @ doc["values"].long().T
    expected = integers.double() * query["scales"].double() * doc["scales"].double().T
    similarity = on_grid @ CODEC.dequantise(doc, 96).T
    torch.testing.assert_close(similarity.double(), expected, rtol=1e-5, atol=1e-5)
