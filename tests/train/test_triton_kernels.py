"""Triton kernels of MaxSim in training, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from pipeline.train import losses
from pipeline.train.losses import LOWEST, late_scores
from tests.interpreter import DEVICE, INTERPRETED, kernel_test, needs_triton, run_in_interpreter

#: The interpreter has no products of bfloat16.
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]
#: Queries, query tokens, documents, document tokens, dimensions.
SHAPES = [(3, 5, 4, 70, 16), (2, 40, 3, 64, 130), (5, 7, 2, 1, 128), (1, 1, 6, 129, 320)]

pytestmark = needs_triton


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Uses the interpreted kernels on the CPU if the interpreter is enabled."""
    if INTERPRETED:
        from pipeline.train import triton_kernels

        monkeypatch.setattr(losses, "triton_module", lambda name, device: triton_kernels)


@pytest.mark.skipif(INTERPRETED, reason="runs in the interpreter already")
def test_interpreter():
    run_in_interpreter(__file__)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize("dim", [128, 256, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiles_for_hopper(dtype, dim):
    """Compiles the kernels without a GPU. Tiles fit into the shared memory of 99 KiB."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from pipeline.train import triton_kernels

    tiles = triton_kernels._tiles(torch.zeros(1, dim, dtype=dtype))
    options = {name: tiles.pop(name) for name in ("num_warps", "num_stages")}
    vectors = "*bf16" if dtype == torch.bfloat16 else "*fp32"
    types = dict.fromkeys(("queries_TD", "docs_BND", "out_TD", "out_BND"), vectors)
    types |= {"mask_BN": "*u8", "winner_BT": "*i32", "best_BT": "*fp32", "grad_BT": "*fp32"}
    types |= {"lowest": "fp32"} | dict.fromkeys(tiles, "constexpr")
    for name in ("_best", "_query_gradients", "_doc_gradients"):
        kernel = getattr(triton_kernels, name)
        signature = {argument: types.get(argument, "i32") for argument in kernel.arg_names}
        constants = {key: value for key, value in tiles.items() if key in kernel.arg_names}
        if name == "_doc_gradients":
            constants["STEP"] = constants["ROWS"]
        aligned = {
            (number,): [["tt.divisibility", 16]]
            for number, argument in enumerate(kernel.arg_names)
            if signature[argument].startswith("*")
        }
        source = ASTSource(kernel, signature, constants, aligned)
        compiled = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert compiled.metadata.shared <= 99 << 10
        if name != "_query_gradients":
            assert "mma" in compiled.asm["ptx"]


@kernel_test
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_and_gradients_equal_those_in_float64(shape, dtype):
    num_queries, query_tokens, num_docs, doc_tokens, dim = shape
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(num_queries, query_tokens, dim, generator=generator).to(dtype)
    docs = torch.randn(num_docs, doc_tokens, dim, generator=generator).to(dtype)
    upstream = torch.randn(num_queries, num_docs, generator=generator)
    query_mask = torch.rand(num_queries, query_tokens, generator=generator) < 0.8
    doc_mask = torch.rand(num_docs, doc_tokens, generator=generator) < 0.8
    doc_mask[-1] = False  # a document without tokens
    masks = query_mask.to(DEVICE), doc_mask.to(DEVICE)
    leaves = [tensor.to(DEVICE).requires_grad_() for tensor in (queries, docs)]
    scores = late_scores(leaves[0], masks[0], leaves[1], masks[1], reduction="sum")
    (scores * upstream.to(DEVICE)).sum().backward()

    exact = [tensor.detach().double().requires_grad_() for tensor in (queries, docs)]
    similarity = torch.einsum("qmd,bnd->qmbn", *exact).masked_fill(~doc_mask, LOWEST)
    best = similarity.amax(dim=3) * (query_mask[..., None] & doc_mask.any(dim=1))
    (best.sum(dim=1) * upstream).sum().backward()

    torch.testing.assert_close(scores.cpu().double(), best.sum(dim=1), atol=2e-4, rtol=2e-5)
    for found, expected in zip(leaves, exact, strict=True):
        assert found.grad.dtype == dtype
        # Each of up to 35 terms of a sum is rounded to bfloat16.
        atol, rtol = (0.06, 2**-8) if dtype == torch.bfloat16 else (2e-5, 2e-5)
        torch.testing.assert_close(found.grad.cpu().double(), expected.grad, atol=atol, rtol=rtol)


@kernel_test
def test_gradient_of_equal_similarities_is_that_of_the_first():
    queries = torch.ones(1, 1, 16, device=DEVICE, requires_grad=True)
    docs = torch.ones(1, 200, 16, device=DEVICE, requires_grad=True)
    mask = torch.ones(1, 200, dtype=torch.bool, device=DEVICE)
    mask[0, :70] = False
    late_scores(queries, mask[:, -1:], docs, mask).sum().backward()
    assert docs.grad.sum(dim=2).nonzero().tolist() == [[0, 70]]
    assert queries.grad.tolist() == [[[1.0] * 16]]
