"""Triton kernels of compressors, on a GPU or in Triton's interpreter.

The interpreter must be enabled before Triton is imported, so it runs in a separate process.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from pipeline import compression
from pipeline.compression import TIE_TOLERANCE, first_minimum, kcenter
from pipeline.compression.kcenter import KCenter
from pipeline.tokens import TokenBatch
from tests.conftest import ROOT

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

KERNELS = {
    "_first_minimum": {"TOLERANCE": TIE_TOLERANCE, "ROWS": 16, "COLUMNS": 128},
    "_farthest_order": {"TOLERANCE": TIE_TOLERANCE, "IS_WEIGHTED": True, "N": 2048},
    "_merge_groups": {"TOLERANCE": TIE_TOLERANCE, "M": 128},
}
FLOATS = "values_OSC", "distances_BNN", "weights_BN", "radii_BK", "costs_BMM", "sizes_BM"
INTEGERS = "result_OC", "first_B", "lengths_B", "positions_BK", "budgets_B", "targets_BM"
SHAPES = [
    ((3, 64, 130), 1),
    ((2, 1, 5), 1),
    ((2, 33, 257), 1),
    ((7, 40), 0),
    ((0, 4, 4), 1),
    ((3, 5, 0), 1),
    ((2, 17, 3, 50), 1),
]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def kernel_test(test):
    """Marks a test to run on a GPU and in `test_interpreter`."""
    return test if INTERPRETED else pytest.mark.gpu(test)


@pytest.mark.skipif(INTERPRETED, reason="runs in the interpreter already")
def test_interpreter():
    result = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, "-p", "no:cacheprovider", "--no-header"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-5000:]
    assert " passed" in result.stdout and "failed" not in result.stdout


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
def test_compiles_for_hopper():
    """Compiles the kernel without a GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from pipeline.compression import triton_kernels

    floats, integers = dict.fromkeys(FLOATS, "*fp32"), dict.fromkeys(INTEGERS, "*i64")
    for name, constants in KERNELS.items():
        kernel = getattr(triton_kernels, name)
        types = floats | integers | dict.fromkeys(constants, "constexpr")
        signature = {argument: types.get(argument, "i32") for argument in kernel.arg_names}
        options = {"num_warps": 8}
        source = ASTSource(kernel, signature, constants)
        compiled = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        # Values are in registers, not in local memory.
        assert "ld.global" in compiled.asm["ptx"] and ".local" not in compiled.asm["ptx"]


@kernel_test
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_first_minimum_equals_torch(shape, dim):
    """Half of the values are close to others."""
    from pipeline.compression import triton_kernels

    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator)
    is_close = torch.rand(shape, generator=generator) < 0.5
    values = torch.where(is_close, (values * 2).round() / 2, values)
    values += torch.rand(shape, generator=generator) * TIE_TOLERANCE / 2
    found = triton_kernels.first_minimum(values.to(DEVICE), dim, TIE_TOLERANCE)
    assert torch.equal(found.cpu(), first_minimum(values, dim))


@kernel_test
@pytest.mark.parametrize("saliency", [None, "pooled_row/mean/last"])
@pytest.mark.parametrize("output", ["mean", "centre"])
def test_kcenter_equals_torch(output, saliency, monkeypatch):
    """Covers `farthest_order` and `merge_groups` with padding and equal tokens."""
    from pipeline.compression import triton_kernels

    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([90, 0, 1, 7, 40, 90])
    mask = torch.arange(90) < lengths.unsqueeze(1)
    vectors = torch.randn(6, 90, 16, generator=generator)
    vectors[5, 1::2] = vectors[5, ::2]
    taps = {"pooled_row/mean/last": torch.rand(6, 90, generator=generator)}
    batch = TokenBatch(vectors, mask, normalised=False, taps=taps)
    compressor = KCenter(KCenter.Spec(num_vectors=20, output=output, saliency=saliency))
    expected = compressor.compress(batch)
    for module in (compression, kcenter):
        monkeypatch.setattr(module, "kernel_module", lambda tensor: triton_kernels)
    monkeypatch.setattr(compression, "is_cpu", lambda tensor: False)
    found = compressor.compress(batch.to(DEVICE)).to("cpu")
    assert torch.equal(found.mask, expected.mask)
    assert torch.equal(found.assignment, expected.assignment)
    torch.testing.assert_close(
        found.vectors[found.mask], expected.vectors[expected.mask], atol=1e-5, rtol=0
    )
