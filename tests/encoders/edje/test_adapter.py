"""The adapter against a literal float64 implementation of the equations; frames and limits."""

from __future__ import annotations

import math

import pytest
import torch

from pipeline.config import SpecError, parse
from pipeline.encoders.edje.adapter import Adapter, frame_numbers
from pipeline.tokens import PROMPT, VISUAL, TokenBatch

WIDTH, DIM = 8, 6
SMALL = {"num_tokens": 4, "hidden": 20, "heads": 2}


def build(**spec) -> Adapter:
    torch.manual_seed(0)
    adapter = Adapter(parse(Adapter.Spec, {**SMALL, **spec}), WIDTH, DIM)
    for weights in adapter.parameters():
        torch.nn.init.normal_(weights, std=0.5)
    return adapter.eval().requires_grad_(False)


def activation(name: str, x: float) -> float:
    return {
        "gelu": x * (1 + math.erf(x / math.sqrt(2))) / 2,
        "relu": max(x, 0.0),
        "silu": x / (1 + math.exp(-x)),
    }[name]


def linear(layer: torch.nn.Module, x: list[float]) -> list[float]:
    if isinstance(layer, torch.nn.Identity):
        return x
    weight = layer.weight.double().tolist()
    bias = [0.0] * len(weight) if layer.bias is None else layer.bias.double().tolist()
    return [
        sum(w * v for w, v in zip(row, x, strict=True)) + b
        for row, b in zip(weight, bias, strict=True)
    ]


def mlp(adapter: Adapter, x: list[float]) -> list[float]:
    hidden = [activation(adapter.spec.activation, value) for value in linear(adapter.mlp[0], x)]
    return linear(adapter.mlp[2], hidden)


def layer_norm(adapter: Adapter, x: list[float]) -> list[float]:
    mean = sum(x) / WIDTH
    deviation = math.sqrt(sum((value - mean) ** 2 for value in x) / WIDTH + adapter.spec.norm_eps)
    return [(value - mean) / deviation for value in x]


def compress(adapter: Adapter, states: list[list[float]]) -> list[list[float]]:
    """Computes eq. 1-4 for one frame."""
    keys = [linear(adapter.key, x) for x in states]
    values = [linear(adapter.value, x) for x in states]
    size = WIDTH // adapter.spec.heads
    tokens = []
    for query in adapter.queries.double().tolist():
        query = linear(adapter.query, query)
        attended: list[float] = []
        for head in range(adapter.spec.heads):
            part = slice(head * size, (head + 1) * size)
            logits = [
                sum(q * k for q, k in zip(query[part], key[part], strict=True)) / math.sqrt(size)
                for key in keys
            ]
            total = sum(math.exp(logit) for logit in logits)
            weights = [math.exp(logit) / total for logit in logits]
            for i in range(part.start, part.stop):
                attended.append(sum(w * v[i] for w, v in zip(weights, values, strict=True)))
        h = linear(adapter.output, attended)
        scale, shift = adapter.norm.weight.double().tolist(), adapter.norm.bias.double().tolist()
        normalised = [
            x * g + b for x, g, b in zip(layer_norm(adapter, h), scale, shift, strict=True)
        ]
        o = [x + y for x, y in zip(h, mlp(adapter, normalised), strict=True)]
        tokens.append(linear(adapter.projection, o))
    return tokens


def ragged(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    states = torch.randn(len(lengths), max(lengths), WIDTH)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    states[~mask] = 1e6  # padding is arbitrary
    return states, mask


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"project_queries": False, "project_output": False, "attention_bias": False},
        {"activation": "relu", "heads": 1, "norm_eps": 0.1},
        {"activation": "silu", "heads": 8, "num_tokens": 1},
        {"norm_states": True, "norm_eps": 0.01},
        {"kind": "local"},
        {"kind": "local", "norm_states": True},
    ],
)
def test_equals_the_equations(spec):
    adapter = build(**spec)
    states, mask = ragged(5, 1, 0, 3)
    tokens, tokens_mask = adapter.double()(states.double(), mask)
    for row, is_state in enumerate(mask):
        item_states = states[row, is_state].double().tolist()
        if adapter.spec.norm_states:
            item_states = [layer_norm(adapter, x) for x in item_states]
        if adapter.spec.kind == "local":
            reference = [mlp(adapter, x) for x in item_states]
        else:
            reference = compress(adapter, item_states) if item_states else []
        assert int(tokens_mask[row].sum()) == len(reference)
        assert tokens_mask[row, : len(reference)].all()
        actual = tokens[row, : len(reference)]
        expected = torch.tensor(reference, dtype=torch.float64).reshape(-1, DIM)
        torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", ["compressed", "local"])
def test_batch_equals_single_items(kind):
    adapter = build(kind=kind)
    states, mask = ragged(5, 1, 3)
    tokens, tokens_mask = adapter(states, mask)
    for row, length in enumerate((5, 1, 3)):
        expected, _ = adapter(states[row : row + 1, :length], mask[row : row + 1, :length])
        actual = tokens[row, tokens_mask[row]]
        torch.testing.assert_close(actual, expected[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(0, 0), (2, 0), (2, 3)])
@pytest.mark.parametrize("kind", ["compressed", "local"])
def test_empty_items(kind, shape):
    tokens, mask = build(kind=kind)(torch.ones(*shape, WIDTH), torch.zeros(shape).bool())
    assert tokens.shape == (shape[0], 0, DIM) and mask.shape == (shape[0], 0)


def video(*frames: int) -> TokenBatch:
    """Returns one item with these numbers of tokens per frame, two seconds per frame."""
    times = torch.cat([torch.full((n,), 2.0 * f) for f, n in enumerate(frames)])
    extents = torch.full((1, len(times), 6), torch.nan)
    extents[0, :, 4], extents[0, :, 5] = times, times + 2
    torch.manual_seed(2)
    vectors = torch.randn(1, len(times), WIDTH)
    kind = torch.full((1, len(times)), VISUAL, dtype=torch.int8)
    mask = torch.ones(1, len(times), dtype=torch.bool)
    return TokenBatch(vectors, mask, False, extents=extents, kind=kind)


def frame_tokens(adapter: Adapter, batch: TokenBatch, frames: list[int]) -> torch.Tensor:
    """Computes the tokens of frames one by one."""
    number = frame_numbers(batch.extents, batch.mask)[0]
    return torch.cat(
        [adapter(batch.vectors[:, number == f], batch.mask[:, number == f])[0][0] for f in frames]
    )


@pytest.mark.parametrize(
    ("kind", "frames", "max_tokens", "expected_frames"),
    [
        ("compressed", [3, 5, 1], 12, [0, 1, 2]),  # 4 tokens per frame
        ("compressed", [3, 5, 1], 11, [0, 2]),  # the middle frames of two halves
        ("compressed", [3] * 5, 9, [1, 3]),
        ("compressed", [3] * 6, 7, [3]),
        ("local", [3, 5, 1], 15, [0, 1, 2]),
        ("local", [3, 5, 1], 14, [0, 2]),  # the longest frame determines how many fit
        ("local", [2] * 10, 6, [1, 5, 8]),
    ],
)
def test_frames_are_subsampled_evenly(kind, frames, max_tokens, expected_frames):
    adapter, batch = build(kind=kind, max_tokens=max_tokens), video(*frames)
    tokens, mask = adapter.tokens(batch)
    assert mask.all() and tokens.shape[1] <= max_tokens
    expected = frame_tokens(adapter, batch, expected_frames)
    torch.testing.assert_close(tokens[0], expected, atol=1e-5, rtol=1e-5)


def test_tokens_of_a_long_frame_are_subsampled_evenly():
    adapter, batch = build(kind="local", max_tokens=3), video(9)
    tokens, _ = adapter.tokens(batch)
    torch.testing.assert_close(tokens[0], adapter.mlp(batch.vectors[0, [1, 4, 7]]))
    batch = video(9, 2)  # only the second frame remains
    tokens, _ = adapter.tokens(batch)
    torch.testing.assert_close(tokens[0], adapter.mlp(batch.vectors[0, 9:]))


def test_items_are_subsampled_separately():
    adapter = build(max_tokens=8)
    items = [video(2, 2, 2), video(6), video(1, 1)]
    size = max(batch.mask.shape[1] for batch in items)
    vectors, mask = torch.zeros(3, size, WIDTH), torch.zeros(3, size, dtype=torch.bool)
    extents = torch.full((3, size, 6), torch.nan)
    for row, batch in enumerate(items):
        length = batch.mask.shape[1]
        vectors[row, :length], extents[row, :length] = batch.vectors[0], batch.extents[0]
        mask[row, :length] = True
    tokens, tokens_mask = adapter.tokens(TokenBatch(vectors, mask, False, extents=extents))
    assert tokens_mask.sum(dim=1).tolist() == [8, 4, 8]
    for row, batch in enumerate(items):
        expected, _ = adapter.tokens(batch)
        actual = tokens[row, tokens_mask[row]]
        torch.testing.assert_close(actual, expected[0], atol=1e-5, rtol=1e-5)


def test_prompt_tokens_are_ignored():
    adapter, batch = build(), video(6)
    batch.kind[0, :2] = PROMPT
    expected, _ = adapter(batch.vectors[:, 2:], batch.mask[:, 2:])
    torch.testing.assert_close(adapter.tokens(batch)[0], expected, atol=1e-5, rtol=1e-5)


def test_cached_tokens_are_float16_of_the_size_in_the_paper():
    adapter = Adapter(Adapter.Spec(hidden=16), 768, 384)
    batch = TokenBatch(torch.randn(2, 10, 768), torch.ones(2, 10, dtype=torch.bool), False)
    tokens, mask = adapter.cache_tokens(batch)
    assert tokens.dtype == torch.float16 and mask.all()
    assert tokens[0].numel() * 2 == 64 * 384 * 2  # 49 kB, Table 2
    expected = adapter.tokens(batch)[0].detach()
    torch.testing.assert_close(tokens.float(), expected, atol=1e-3, rtol=1e-3)


def test_queries_std():
    for std in (0.02, 1.0):
        adapter = Adapter(Adapter.Spec(num_tokens=64, hidden=8, queries_std=std), 64, 8)
        assert adapter.queries.std().item() == pytest.approx(std, rel=0.1)


def test_gradients_reach_all_weights():
    for kind in ("compressed", "local"):
        adapter = build(kind=kind).requires_grad_(True)
        tokens, mask = adapter.tokens(video(4, 4))
        tokens[mask].square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in adapter.parameters())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"heads": 3}, "^heads must be a divisor of 8, the dimension of .* hidden states, got 3$"),
        ({"max_tokens": 3}, "^max_tokens must be at least num_tokens=4, got 3$"),
        ({"num_tokens": 0}, "^num_tokens must be greater than or equal to 1, got 0$"),
        ({"kind": "linear"}, "^kind must be 'compressed' or 'local', got 'linear'$"),
    ],
)
def test_rejects_invalid_specs(spec, message):
    with pytest.raises(SpecError, match=message):
        build(**spec)
