"""Comparison of the outputs on GPU and CPU for all model families."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from pipeline.registry import ENCODERS
from pipeline.taps import Tap
from tests.encoders.test_contract import CHECKPOINTS, ITEMS

pytestmark = pytest.mark.gpu


@pytest.fixture(params=CHECKPOINTS)
def encoders(request, checkpoint):
    """An encoder on the GPU and the same encoder on the CPU."""
    family, given = CHECKPOINTS[request.param]
    given = {"name": request.param, "model": checkpoint(family), "dtype": "float32", **given}
    spec = ENCODERS.resolve(given)
    with mock.patch("torch.cuda.is_available", return_value=False):
        on_cpu = ENCODERS.build(spec)
    return ENCODERS.build(spec), on_cpu


def test_items_match_the_cpu(encoders):
    on_gpu, on_cpu = encoders
    assert on_gpu.fingerprint == on_cpu.fingerprint
    info = on_cpu.attention(on_cpu.spec)
    statistics = info.statistics if info else ()
    taps = [Tap(name, heads, "1") for name in statistics for heads in ("mean", "max")]
    pairs = zip(on_gpu.encode(ITEMS, taps), on_cpu.encode(ITEMS, taps), strict=True)
    for (rows, gpu_batch), (other_rows, cpu_batch) in pairs:
        assert rows.tolist() == other_rows.tolist()
        assert gpu_batch.vectors.is_cuda and not cpu_batch.vectors.is_cuda
        gpu_batch = gpu_batch.to("cpu")
        assert torch.equal(gpu_batch.mask, cpu_batch.mask)
        if cpu_batch.kind is not None:
            assert torch.equal(gpu_batch.kind, cpu_batch.kind)
        torch.testing.assert_close(
            gpu_batch.vectors[gpu_batch.mask],
            cpu_batch.vectors[cpu_batch.mask],
            atol=1e-3,
            rtol=1e-3,
        )
        for name, values in cpu_batch.taps.items():
            torch.testing.assert_close(
                gpu_batch.taps[name][gpu_batch.mask], values[cpu_batch.mask], atol=1e-3, rtol=1e-3
            )


def test_queries_match_the_cpu(encoders):
    gpu_batch, cpu_batch = (
        encoder.encode_queries(["lift of a wing", "heat"]).tokens for encoder in encoders
    )
    gpu_batch = gpu_batch.to("cpu")
    assert torch.equal(gpu_batch.mask, cpu_batch.mask)
    torch.testing.assert_close(
        gpu_batch.vectors[gpu_batch.mask], cpu_batch.vectors[cpu_batch.mask], atol=1e-3, rtol=1e-3
    )


def test_splits_batches_that_exceed_memory(checkpoint):
    """Exhausts the GPU memory with allocations proportional to the batch size."""
    spec = ENCODERS.resolve({"name": "colpali", "model": checkpoint("colpali"), "dtype": "float32"})
    encoder = ENCODERS.build(spec)
    whole = [batch.to("cpu") for _, batch in encoder.encode(ITEMS)]
    forward, sizes = encoder.forward, []

    def allocate_and_forward(inputs, mask):
        allocation = torch.empty(len(mask) * (20 << 30), dtype=torch.uint8, device="cuda")
        sizes.append(len(mask))
        result = forward(inputs, mask)
        del allocation
        return result

    encoder.forward = allocate_and_forward
    halves = list(encoder.encode(ITEMS))
    assert max(sizes) < max(len(batch) for batch in whole)
    assert sum(len(rows) for rows, _ in halves) == ITEMS.num_rows
