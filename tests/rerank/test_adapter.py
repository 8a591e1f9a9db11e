"""The adapter against the paper's equations, read literally in float64; frames and bounds."""

from __future__ import annotations

import math

import pytest
import torch

from pipeline.config import SpecError, parse
from pipeline.rerank.adapter import Adapter, frame_numbers
from pipeline.tokens import PROMPT, VISUAL, TokenBatch

WIDTH, DIM = 8, 6
SMALL = {"num_tokens": 4, "hidden": 20, "heads": 2}


def adapter(**spec) -> Adapter:
    torch.manual_seed(0)
    made = Adapter(parse(Adapter.Spec, {**SMALL, **spec}), WIDTH, DIM)
    for weights in made.parameters():
        torch.nn.init.normal_(weights, std=0.5)
    return made.eval().requires_grad_(False)


def activated(name: str, x: float) -> float:
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


def mlp(own: Adapter, x: list[float]) -> list[float]:
    hidden = [activated(own.spec.activation, value) for value in linear(own.mlp[0], x)]
    return linear(own.mlp[2], hidden)


def standardised(own: Adapter, x: list[float]) -> list[float]:
    mean = sum(x) / WIDTH
    deviation = math.sqrt(sum((value - mean) ** 2 for value in x) / WIDTH + own.spec.norm_eps)
    return [(value - mean) / deviation for value in x]


def compressed(own: Adapter, states: list[list[float]]) -> list[list[float]]:
    """Eq. 1-4 of one frame, number by number."""
    keys = [linear(own.key, x) for x in states]
    values = [linear(own.value, x) for x in states]
    size = WIDTH // own.spec.heads
    tokens = []
    for query in own.queries.double().tolist():
        query = linear(own.query, query)
        attended: list[float] = []
        for head in range(own.spec.heads):
            part = slice(head * size, (head + 1) * size)
            logits = [
                sum(q * k for q, k in zip(query[part], key[part], strict=True)) / math.sqrt(size)
                for key in keys
            ]
            total = sum(math.exp(logit) for logit in logits)
            weights = [math.exp(logit) / total for logit in logits]
            for place in range(part.start, part.stop):
                attended.append(sum(w * v[place] for w, v in zip(weights, values, strict=True)))
        h = linear(own.output, attended)
        scale, shift = own.norm.weight.double().tolist(), own.norm.bias.double().tolist()
        normed = [x * g + b for x, g, b in zip(standardised(own, h), scale, shift, strict=True)]
        o = [x + y for x, y in zip(h, mlp(own, normed), strict=True)]
        tokens.append(linear(own.projection, o))
    return tokens


def ragged(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    states = torch.randn(len(lengths), max(lengths), WIDTH)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    states[~mask] = 1e6  # padding holds anything
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
def test_it_is_what_the_equations_say(spec):
    own = adapter(**spec)
    states, mask = ragged(5, 1, 0, 3)
    tokens, tokens_mask = own.double()(states.double(), mask)
    for row, real in enumerate(mask):
        there = states[row, real].double().tolist()
        if own.spec.norm_states:
            there = [standardised(own, x) for x in there]
        if own.spec.kind == "local":
            expected = [mlp(own, x) for x in there]
        else:
            expected = compressed(own, there) if there else []
        assert int(tokens_mask[row].sum()) == len(expected)
        assert tokens_mask[row, : len(expected)].all()
        got = tokens[row, : len(expected)]
        wanted = torch.tensor(expected, dtype=torch.float64).reshape(-1, DIM)
        torch.testing.assert_close(got, wanted, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", ["compressed", "local"])
def test_an_item_is_what_it_is_alone(kind):
    own = adapter(kind=kind)
    states, mask = ragged(5, 1, 3)
    tokens, tokens_mask = own(states, mask)
    for row, length in enumerate((5, 1, 3)):
        alone, _ = own(states[row : row + 1, :length], mask[row : row + 1, :length])
        torch.testing.assert_close(tokens[row, tokens_mask[row]], alone[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(0, 0), (2, 0), (2, 3)])
@pytest.mark.parametrize("kind", ["compressed", "local"])
def test_nothing_becomes_nothing(kind, shape):
    tokens, mask = adapter(kind=kind)(torch.ones(*shape, WIDTH), torch.zeros(shape).bool())
    assert tokens.shape == (shape[0], 0, DIM) and mask.shape == (shape[0], 0)


def video(*frames: int) -> TokenBatch:
    """One item of frames of so many tokens, two seconds each."""
    times = torch.cat([torch.full((n,), 2.0 * f) for f, n in enumerate(frames)])
    extents = torch.full((1, len(times), 6), torch.nan)
    extents[0, :, 4], extents[0, :, 5] = times, times + 2
    torch.manual_seed(2)
    vectors = torch.randn(1, len(times), WIDTH)
    kind = torch.full((1, len(times)), VISUAL, dtype=torch.int8)
    mask = torch.ones(1, len(times), dtype=torch.bool)
    return TokenBatch(vectors, mask, False, extents=extents, kind=kind)


def of_frames(own: Adapter, batch: TokenBatch, frames: list[int]) -> torch.Tensor:
    """The tokens of frames, each by itself."""
    number = frame_numbers(batch.extents, batch.mask)[0]
    return torch.cat(
        [own(batch.vectors[:, number == f], batch.mask[:, number == f])[0][0] for f in frames]
    )


@pytest.mark.parametrize(
    ("kind", "frames", "most", "stay"),
    [
        ("compressed", [3, 5, 1], 12, [0, 1, 2]),  # 4 tokens each
        ("compressed", [3, 5, 1], 11, [0, 2]),  # the middles of two halves
        ("compressed", [3] * 5, 9, [1, 3]),
        ("compressed", [3] * 6, 7, [3]),
        ("local", [3, 5, 1], 15, [0, 1, 2]),
        ("local", [3, 5, 1], 14, [0, 2]),  # as many as would fit if all were as the longest
        ("local", [2] * 10, 6, [1, 5, 8]),
    ],
)
def test_each_frame_has_its_tokens_and_too_many_are_thinned_evenly(kind, frames, most, stay):
    own, batch = adapter(kind=kind, max_tokens=most), video(*frames)
    tokens, mask = own.tokens(batch)
    assert mask.all() and tokens.shape[1] <= most
    torch.testing.assert_close(tokens[0], of_frames(own, batch, stay), atol=1e-5, rtol=1e-5)


def test_one_frame_that_is_too_long_keeps_every_so_many_of_its_tokens():
    own, one = adapter(kind="local", max_tokens=3), video(9)
    tokens, _ = own.tokens(one)
    torch.testing.assert_close(tokens[0], own.mlp(one.vectors[0, [1, 4, 7]]))
    two = video(9, 2)  # of which one remains, the middle, which is the second
    tokens, _ = own.tokens(two)
    torch.testing.assert_close(tokens[0], own.mlp(two.vectors[0, 9:]))


def test_items_of_other_numbers_of_frames_are_thinned_each_for_itself():
    own = adapter(max_tokens=8)
    several = [video(2, 2, 2), video(6), video(1, 1)]
    size = max(batch.mask.shape[1] for batch in several)
    vectors, mask = torch.zeros(3, size, WIDTH), torch.zeros(3, size, dtype=torch.bool)
    extents = torch.full((3, size, 6), torch.nan)
    for row, batch in enumerate(several):
        length = batch.mask.shape[1]
        vectors[row, :length], extents[row, :length] = batch.vectors[0], batch.extents[0]
        mask[row, :length] = True
    tokens, tokens_mask = own.tokens(TokenBatch(vectors, mask, False, extents=extents))
    assert tokens_mask.sum(dim=1).tolist() == [8, 4, 8]
    for row, batch in enumerate(several):
        alone, _ = own.tokens(batch)
        torch.testing.assert_close(tokens[row, tokens_mask[row]], alone[0], atol=1e-5, rtol=1e-5)


def test_the_words_of_a_prompt_are_left_out():
    own, batch = adapter(), video(6)
    batch.kind[0, :2] = PROMPT
    expected, _ = own(batch.vectors[:, 2:], batch.mask[:, 2:])
    torch.testing.assert_close(own.tokens(batch)[0], expected, atol=1e-5, rtol=1e-5)


def test_what_is_cached_is_half_precision_and_of_the_size_that_the_paper_says():
    own = Adapter(Adapter.Spec(hidden=16), 768, 384)
    batch = TokenBatch(torch.randn(2, 10, 768), torch.ones(2, 10, dtype=torch.bool), False)
    tokens, mask = own.cache_tokens(batch)
    assert tokens.dtype == torch.float16 and mask.all()
    assert tokens[0].numel() * 2 == 64 * 384 * 2  # 49 kB, Table 2
    expected = own.tokens(batch)[0].detach()
    torch.testing.assert_close(tokens.float(), expected, atol=1e-3, rtol=1e-3)


def test_training_begins_with_queries_as_far_apart_as_the_spec_says():
    for std in (0.02, 1.0):
        own = Adapter(Adapter.Spec(num_tokens=64, hidden=8, queries_std=std), 64, 8)
        assert own.queries.std().item() == pytest.approx(std, rel=0.1)


def test_gradients_reach_every_weight():
    for kind in ("compressed", "local"):
        own = adapter(kind=kind).requires_grad_(True)
        tokens, mask = own.tokens(video(4, 4))
        tokens[mask].square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in own.parameters())


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"heads": 3}, "heads must be a divisor of 8, .*, got 3"),
        ({"max_tokens": 3}, "max_tokens must be at least num_tokens=4, got 3"),
        ({"num_tokens": 0}, "num_tokens must be .*, got 0"),
        ({"kind": "linear"}, "kind must be one of .*, got 'linear'"),
    ],
)
def test_invalid_specs(spec, said):
    with pytest.raises(SpecError, match=said):
        adapter(**spec)
