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

from pipeline.compression import TIE_TOLERANCE, first_minimum
from tests.conftest import ROOT

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

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

    constants = {"TOLERANCE": TIE_TOLERANCE, "ROWS": 16, "COLUMNS": 128}
    signature = {"values_OSC": "*fp32", "result_OC": "*i64", "size": "i32", "num_columns": "i32"}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(triton_kernels._first_minimum, signature, constants)
    assert "ld.global" in compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


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
