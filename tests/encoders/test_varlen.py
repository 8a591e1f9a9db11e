"""Attention within segments, and towers that use it."""

from __future__ import annotations

import pytest
import torch

from pipeline.encoders.varlen import NAME, attend
from pipeline.registry import ENCODERS
from tests.encoders.test_contract import CHECKPOINTS, ITEMS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_equals_attention_with_a_mask(device):
    lengths = torch.tensor([5, 1, 16, 9], device=device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    inputs = torch.randn(3, 1, 2, 31, 16, device=device, dtype=dtype)
    segment_T = torch.repeat_interleave(torch.arange(4, device=device), lengths)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *inputs.float(), attn_mask=segment_T[:, None] == segment_T
    )
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    found, _ = attend(torch.nn.Module(), *inputs, None, cu_seq_lens_q=bounds, max_length_q=16)
    atol = 1e-5 if device == "cpu" else 2e-2
    torch.testing.assert_close(found.transpose(1, 2).float(), expected, atol=atol, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["jina_v4", "qwen_omni", "qwen_vl"])
def test_vectors_equal_those_of_separate_calls(name, checkpoint):
    family, more = CHECKPOINTS[name]
    spec = ENCODERS.resolve(
        {"name": name, "model": checkpoint(family), "dtype": "bfloat16", **more}
    )
    encoder = ENCODERS.build(spec)
    modules = [m for m in encoder.model.modules() if hasattr(m, "config")]
    towers = {id(m.config): m.config for m in modules if m.config._attn_implementation == NAME}
    assert towers
    found = [batch.to("cpu") for _, batch in encoder.encode(ITEMS)]
    for settings in towers.values():
        settings._attn_implementation = "sdpa"
    for batch, (_, other) in zip(found, encoder.encode(ITEMS), strict=True):
        other = other.to("cpu")
        torch.testing.assert_close(
            batch.vectors[batch.mask].float(), other.vectors[other.mask].float(), atol=0.05, rtol=0
        )
