"""Tests of SeqResize against section 4.1 of the paper, computed in float64 with scalar loops."""

import dataclasses
import math

import pytest
import torch

from pipeline.compression.seqresize import SeqResize
from pipeline.config import SpecError
from pipeline.registry import COMPRESSORS
from pipeline.tokens import TokenBatch

#: Fewer tokens than m = 3, than n0 = 6, exactly n0, and more.
LENGTHS = [2, 5, 6, 9, 0, 1, 23]
SIZES = {"num_vectors": 3, "sequence_length": 6, "hidden_size": 4}


def build(reading="paper", **sizes):
    compressor = SeqResize(SeqResize.Spec(reading=reading, **{**SIZES, **sizes}))
    torch.manual_seed(0)
    assert compressor.module is compressor.module  # initialised once
    return compressor


def pad_trunc(states, size, dim, reading):
    zeros = [[0.0] * dim for _ in range(max(0, size - len(states)))]
    if reading == "paper":
        return states[:size] + zeros
    return zeros + states[max(0, len(states) - size) :]


def layer(inputs, weight, bias):
    """Returns W x + b for the vector x."""
    rows = []
    for k, row in enumerate(weight):
        total = 0.0 if bias is None else bias[k]
        for w, x in zip(row, inputs, strict=True):
            total += w * x
        rows.append(total)
    return rows


def reference(states, dim, parameters, reading):
    """Computes C = (sigma(Z^T W1^T) W2^T)^T of one item, normalised to unit length."""
    padded = pad_trunc(states, SIZES["sequence_length"], dim, reading)
    columns = []
    for d in range(dim):
        channel = [z[d] for z in padded]
        hidden = layer(channel, parameters["hidden.weight"], parameters.get("hidden.bias"))
        hidden = [max(0.0, x) for x in hidden]
        columns.append(layer(hidden, parameters["output.weight"], parameters.get("output.bias")))
    vectors = [list(vector) for vector in zip(*columns, strict=True)]
    return [[x / math.hypot(*c) for x in c] for c in vectors]


def lists(module):
    return {name: tensor.double().tolist() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("reading", ["paper", "code"])
@pytest.mark.parametrize("unit", [True, False])
def test_equals_the_equation(reading, unit, ragged):
    batch = ragged(LENGTHS, unit=unit)
    compressor = build(reading)
    result = compressor.compress(batch)
    parameters = lists(compressor.module)
    assert set(parameters) == {"hidden.weight", "output.weight"} | (
        {"hidden.bias", "output.bias"} if reading == "code" else set()
    )
    assert result.lengths.tolist() == [3 if length else 0 for length in LENGTHS]
    assert result.assignment is None and result.normalised
    for i, mask in enumerate(batch.mask):
        if not mask.any():
            continue
        states = batch.vectors[i, mask].double().tolist()
        vectors = reference(states, 8, parameters, reading)
        expected = torch.tensor(vectors, dtype=torch.float64)
        torch.testing.assert_close(result.vectors[i].double(), expected, atol=1e-5, rtol=0)


def test_readings_truncate_and_pad_at_opposite_ends():
    tokens = torch.arange(1.0, 5).reshape(1, 4, 1)
    longer = TokenBatch(tokens, torch.ones(1, 4, dtype=torch.bool), False)
    shorter = dataclasses.replace(longer, mask=torch.tensor([[True, True, False, False]]))
    for reading, truncated, padded in (
        ("paper", [1, 2, 3], [1, 2, 0]),
        ("code", [2, 3, 4], [0, 1, 2]),
    ):
        compressor = build(reading, sequence_length=3)
        assert compressor.resized(longer).flatten().tolist() == truncated
        assert compressor.resized(shorter).flatten().tolist() == padded


@pytest.mark.parametrize("reading", ["paper", "code"])
def test_gradients_equal_central_differences(reading, ragged):
    """Gradients of a random projection, with respect to the vectors and the weights."""
    batch = ragged([2, 9, 0], dim=3, garbage=0.5)
    compressor = build(reading)
    direction = torch.randn(3, 3, 3, generator=torch.Generator().manual_seed(3))
    vectors = batch.vectors.clone().requires_grad_()
    result = compressor.compress(dataclasses.replace(batch, vectors=vectors))
    result.vectors[result.mask].mul(direction[result.mask]).sum().backward()

    def loss(states, parameters):
        total = 0.0
        for i, mask in enumerate(batch.mask):
            if mask.any():
                item = states[i, mask].tolist()
                found = reference(item, 3, {n: p.tolist() for n, p in parameters.items()}, reading)
                found = torch.tensor(found, dtype=torch.float64)
                total += (found * direction[i]).sum().item()
        return total

    states = batch.vectors.double()
    parameters = {name: p.detach().double() for name, p in compressor.module.named_parameters()}
    gradients = {name: p.grad for name, p in compressor.module.named_parameters()}
    for tensor, gradient in (
        (states, vectors.grad),
        *((parameters[name], gradients[name]) for name in parameters),
    ):
        flat = tensor.reshape(-1)
        for j in range(len(flat)):
            value, differences = flat[j].item(), []
            for step in (1e-6, -1e-6):
                flat[j] = value + step
                differences.append(loss(states, parameters))
            flat[j] = value
            expected = (differences[0] - differences[1]) / 2e-6
            assert gradient.reshape(-1)[j].item() == pytest.approx(expected, rel=5e-5, abs=5e-5)


def test_module_is_initialised_by_the_seed_of_torch_or_loaded():
    first, second = build(), build()
    for name, tensor in first.module.state_dict().items():
        assert torch.equal(tensor, second.module.state_dict()[name])
    assert first.module.hidden.weight.shape == (4, 6)
    assert first.module.output.weight.shape == (3, 4)
    artefact = {name: t.numpy().copy() for name, t in first.module.state_dict().items()}
    torch.manual_seed(5)
    loaded = SeqResize(first.spec, artefact)
    assert torch.equal(loaded.module.hidden.weight, first.module.hidden.weight)


def test_spec():
    with pytest.raises(SpecError, match="sequence_length must be at least num_vectors=8, got 6"):
        COMPRESSORS.resolve({"name": "seqresize", **SIZES, "num_vectors": 8})
    with pytest.raises(SpecError, match="sequence_length must be less than or equal to 65536"):
        COMPRESSORS.resolve({"name": "seqresize", **SIZES, "sequence_length": 1 << 20})
    large = {"num_vectors": 64, "sequence_length": 1 << 16, "hidden_size": 4096}
    rule = "hidden_size must be at most 4092 with sequence_length=65536, for 2.28 weights, got 4096"
    with pytest.raises(SpecError, match=rule):
        COMPRESSORS.resolve({"name": "seqresize", **large})
    COMPRESSORS.resolve({"name": "seqresize", **large, "hidden_size": 4092})
    relative = COMPRESSORS.resolve({"name": "seqresize", **SIZES, "weights": "run/best"})
    assert relative.weights.startswith("/") and relative.weights.endswith("/run/best")
    stored = COMPRESSORS.resolve({"name": "seqresize", **SIZES, "weights": "sha256:ab"})
    assert stored.weights == "sha256:ab"
