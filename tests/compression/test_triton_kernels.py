"""Triton kernels of compressors, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from pipeline import compression
from pipeline.compression import TIE_TOLERANCE, first_minimum, geometry, group_sums, kcenter, samer
from pipeline.compression.kcenter import KCenter
from pipeline.compression.samer import SaMer
from pipeline.tokens import TokenBatch
from tests.interpreter import DEVICE, INTERPRETED, kernel_test, needs_triton, run_in_interpreter

KERNELS = {
    "_first_minimum": {"TOLERANCE": TIE_TOLERANCE, "ROWS": 16, "COLUMNS": 128},
    "_farthest_order": {"TOLERANCE": TIE_TOLERANCE, "IS_WEIGHTED": True, "N": 2048},
    "_merge_groups": {"TOLERANCE": TIE_TOLERANCE, "M": 128},
    "_coefficients": {"DIMS": 128, "AXES": 2, "HAS_SITES": True, "ROWS": 4, "E": 256},
    "_log_softmax": {"K": 64, "COLUMNS": 128},
}
FLOATS = "values_OSC", "distances_BNN", "weights_BN", "radii_BK", "costs_BMM", "sizes_BM"
FLOATS += "sums_RE", "offsets_R", "result_RE", "values_BKN", "result_BKN"
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

pytestmark = needs_triton


@pytest.mark.skipif(INTERPRETED, reason="runs in the interpreter already")
def test_interpreter():
    run_in_interpreter(__file__)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
def test_compiles_for_hopper():
    """Compiles the kernel without a GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from pipeline.compression import triton_kernels

    floats, integers = dict.fromkeys(FLOATS, "*fp32"), dict.fromkeys(INTEGERS, "*i64")
    for name, constants in KERNELS.items():
        kernel = getattr(triton_kernels, name)
        types = floats | integers | {"scale": "fp32"} | dict.fromkeys(constants, "constexpr")
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
@pytest.mark.parametrize("output", ["mean", "progressive"])
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


@kernel_test
@pytest.mark.parametrize("length", [90, 3])
@pytest.mark.parametrize("axes", [("x", "y"), ("t", "y", "x"), ()])
def test_samer_equals_torch(axes, length, monkeypatch):
    """Covers `coefficients` and `log_softmax` with and without padding and equal tokens.

    The last item has large coordinates, which the coefficients do not include.
    """
    from pipeline.compression import triton_kernels

    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([90, length, 40 if length < 90 else 90, 90])
    vectors = torch.randn(4, 90, 16, generator=generator)
    vectors[3, 1::2] = vectors[3, ::2]
    extents = torch.rand(4, 90, 6, generator=generator)
    extents[2, ::3, :4] = torch.nan
    mask = torch.arange(90) < lengths.unsqueeze(1)
    batch = TokenBatch(vectors, mask, normalised=False, extents=extents)
    large = TokenBatch(vectors, mask, normalised=False, extents=extents * 100)
    compressor = SaMer(SaMer.Spec(num_vectors=20, axes=axes))
    expected = [compressor.compress(tokens) for tokens in (batch, large)]
    for module in (compression, geometry, samer):
        monkeypatch.setattr(module, "kernel_module", lambda tensor: triton_kernels)
    monkeypatch.setattr(compression, "is_cpu", lambda tensor: False)
    for tokens, result in zip((batch, large), expected, strict=True):
        found = compressor.compress(tokens.to(DEVICE)).to("cpu")
        assert torch.equal(found.mask, result.mask)
        assert torch.equal(found.assignment, result.assignment)
        torch.testing.assert_close(
            found.vectors[found.mask], result.vectors[result.mask], atol=1e-5, rtol=0
        )


@kernel_test
@pytest.mark.parametrize("shape", [(2, 64, 300), (3, 1, 5), (2, 33, 17), (1, 512, 20), (0, 4, 4)])
def test_log_softmax_equals_torch(shape):
    from pipeline.compression import triton_kernels

    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values[:, -1] += samer.MASKED_DISTANCE
    found = triton_kernels.log_softmax(values.to(DEVICE), -1 / 0.07).cpu()
    torch.testing.assert_close(found, (values * (-1 / 0.07)).log_softmax(dim=1))


@kernel_test
@pytest.mark.parametrize("has_sites", [True, False])
@pytest.mark.parametrize("num_axes", [0, 1, 3])
def test_coefficients_equal_torch(num_axes, has_sites):
    from pipeline.compression import triton_kernels

    generator = torch.Generator().manual_seed(0)
    coords = torch.rand(3, 40, num_axes, generator=generator)
    coords[0, ::3] = torch.nan
    if not has_sites:
        coords *= 100
    tokens, mask = torch.randn(3, 40, 10, generator=generator), torch.ones(3, 40, dtype=torch.bool)
    points = geometry.Geometry(tokens, coords, mask, gamma=1.0)
    groups = torch.randint(0, 6, (3, 40), generator=generator)
    sums = group_sums(points.points_BNE, groups, 7)
    offsets = torch.rand(3, 7, generator=generator)
    expected = points._coefficients(sums, offsets)
    found = triton_kernels.coefficients(
        sums.to(DEVICE), offsets.to(DEVICE), 10, num_axes, has_sites and num_axes > 0
    )
    torch.testing.assert_close(found.cpu(), expected)
