"""On a GPU every family gives what it gives on a CPU."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from pipeline.registry import ENCODERS
from pipeline.taps import Tap
from tests.encoders.test_contract import CHECKPOINTS, ITEMS

pytestmark = pytest.mark.gpu


@pytest.fixture(params=CHECKPOINTS)
def both(request, checkpoint):
    """An encoder on the GPU, and the same on the CPU."""
    family, given = CHECKPOINTS[request.param]
    given = {"name": request.param, "model": checkpoint(family), "dtype": "float32", **given}
    spec = ENCODERS.resolve(given)
    with mock.patch("torch.cuda.is_available", return_value=False):
        on_cpu = ENCODERS.build(spec)
    return ENCODERS.build(spec), on_cpu


def test_equal_to_the_cpu(both):
    on_gpu, on_cpu = both
    assert on_gpu.device.type == "cuda" and on_cpu.device.type == "cpu"
    assert on_gpu.fingerprint == on_cpu.fingerprint
    statistics = on_cpu.attention(on_cpu.spec).statistics
    taps = [Tap(name, heads, "1") for name in statistics for heads in ("mean", "max")]
    pairs = zip(on_gpu.encode(ITEMS, taps), on_cpu.encode(ITEMS, taps), strict=True)
    for (rows, there), (other_rows, here) in pairs:
        assert rows.tolist() == other_rows.tolist()
        there = there.to("cpu")
        assert torch.equal(there.mask, here.mask) and torch.equal(there.kind, here.kind)
        torch.testing.assert_close(
            there.vectors[there.mask], here.vectors[here.mask], atol=1e-3, rtol=1e-3
        )
        for name, values in here.taps.items():
            torch.testing.assert_close(
                there.taps[name][there.mask], values[here.mask], atol=1e-3, rtol=1e-3
            )


def test_queries_equal_those_of_the_cpu(both):
    there, here = (each.encode_queries(["lift of a wing", "heat"]).tokens for each in both)
    there = there.to("cpu")
    assert torch.equal(there.mask, here.mask)
    torch.testing.assert_close(
        there.vectors[there.mask], here.vectors[here.mask], atol=1e-3, rtol=1e-3
    )


def test_what_does_not_fit_is_halved(checkpoint):
    """By a real lack of memory: all that is free is taken but for a little."""
    spec = ENCODERS.resolve({"name": "colpali", "model": checkpoint("colpali"), "dtype": "float32"})
    encoder = ENCODERS.build(spec)
    whole = [batch.to("cpu") for _, batch in encoder.encode(ITEMS)]
    forward, sizes = encoder.forward, []

    def hungry(inputs, mask):
        room = torch.empty(len(mask) * (20 << 30), dtype=torch.uint8, device="cuda")
        sizes.append(len(mask))
        found = forward(inputs, mask)
        del room
        return found

    encoder.forward = hungry
    halves = list(encoder.encode(ITEMS))
    assert max(sizes) < max(len(batch) for batch in whole)
    assert sum(len(rows) for rows, _ in halves) == ITEMS.num_rows
