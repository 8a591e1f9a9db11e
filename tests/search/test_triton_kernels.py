"""The Triton kernel against the oracle: on a GPU, and anywhere in Triton's interpreter.

The interpreter shows what is computed, not how fast, nor with which instructions; it is chosen
where Triton is imported, hence the process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from pipeline.search import maxsim as maxsim_module
from pipeline.search.maxsim import backends, best_tokens, maxsim
from pipeline.search.packed import PackedVectors, Segment
from tests.conftest import ROOT
from tests.search.maxsim.test_backends import FLOATS, OF_CODECS, oracle, queries, stored, vectors

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
#: Documents of no, one and many tokens; longer than a tile.
LENGTHS = [3, 0, 1, 7, 0, 25, 1, 64, 65, 130, 31, 0]
#: What the similarity of unit vectors may be off, with numbers rounded to float16 (this over the
#: root of their number) and without.
ROUNDED, EXACT = 2e-3, 3e-6

#: Bytes of shared memory that a program can have on Hopper.
HOPPER_SHARED = 227 << 10

named = {"ids": lambda spec: "-".join(map(str, spec.values()))}
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
on_device = [needs_triton, *([] if INTERPRETED else [pytest.mark.gpu])]


def of_kernel(test):
    """A test of the kernel: on a GPU, and by `test_in_the_interpreter`."""
    for mark in on_device:
        test = mark(test)
    return test


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Lets the kernel score on the CPU, where it is interpreted."""
    if INTERPRETED:
        import numpy as np
        from triton.runtime import interpreter
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

        from pipeline.search import triton_kernels

        dot = InterpreterBuilder.create_dot

        def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
            def widened(handle):  # the interpreter would multiply the bits of a bfloat16
                if handle.dtype.scalar != interpreter.tl.bfloat16:
                    return handle
                numbers = (handle.data.astype(np.uint32) << 16).view(np.float32)
                return TensorHandle(numbers, interpreter.tl.float32)

            return dot(self, widened(a), widened(b), d, input_precision, max_num_imprecise_acc)

        monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
        monkeypatch.setattr(maxsim_module, "_kernels", lambda packed: triton_kernels)


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
@pytest.mark.timeout(900)
def test_in_the_interpreter():
    found = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, "-p", "no:cacheprovider", "--no-header"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-5000:]
    assert " passed" in found.stdout and "failed" not in found.stdout


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize("num_queries", [1, 40])
@pytest.mark.parametrize("spec", OF_CODECS, **named)
def test_what_is_launched_compiles_for_hopper_and_fits(spec, num_queries, monkeypatch):
    """For one query and for full panels, with the compiler alone: needs no GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from pipeline.search import triton_kernels

    kernel, shared = triton_kernels._kernel, []
    types = {torch.uint8: "u8", torch.int8: "i8", torch.int32: "i32", torch.int64: "i64"}
    types |= {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}

    class Compiler:
        """Takes the arguments of a launch, and compiles."""

        def __getitem__(self, grid):
            return self

        def __call__(self, *args, num_warps, num_stages, **constants):
            names = kernel.arg_names
            signature = {
                name: "*" + types[arg.dtype] if isinstance(arg, torch.Tensor) else "i32"
                for name, arg in zip(names, args, strict=False)
            }
            # As a launch does it, a 1 is a constant.
            ones = {
                n: 1 for n, arg in zip(names, args, strict=False) if type(arg) is int and arg == 1
            }
            constants |= ones
            signature |= dict.fromkeys(constants, "constexpr")
            values = {(names.index(name),): value for name, value in constants.items()}
            aligned = {
                (i,): [["tt.divisibility", 16]]
                for i, arg in enumerate(args)
                if isinstance(arg, torch.Tensor)
            }
            made = compile(
                ASTSource(kernel, signature, values, aligned),
                target=GPUTarget("cuda", 90, 32),
                options={"num_warps": num_warps, "num_stages": num_stages},
            )
            shared.append(made.metadata.shared)
            assert "wgmma.mma_async" in made.asm["ptx"]

    monkeypatch.setattr(triton_kernels, "_kernel", Compiler())
    monkeypatch.setattr(triton_kernels, "_INTERPRETED", True)
    for dim in (128, 200, 500):
        packed = stored(spec, vectors(64, dim), [64])
        asked = torch.cat(queries(dim, (32,) * num_queries))
        lengths = torch.full((num_queries,), 32)
        chosen = [(packed.segments[0], None)]
        triton_kernels.score(asked, lengths, chosen, torch.empty(num_queries, 1), "triton")
    triton_kernels.best(asked, packed.segments[0], torch.tensor([0]), "triton")
    assert len(shared) == 4 and max(shared) <= HOPPER_SHARED, shared


def scored(asked, packed, **options) -> torch.Tensor:
    """Scores by the kernel, brought back."""
    moved = packed.to(DEVICE)
    assert backends(moved) == ("torch", "triton")
    return maxsim([query.to(DEVICE) for query in asked], moved, backend="triton", **options).cpu()


def close(found, expected, asked, atol) -> None:
    """Compares scores; what they may be off grows with the tokens of a query."""
    counts_Q1 = torch.tensor([[max(len(query), 1)] for query in asked])
    torch.testing.assert_close(found / counts_Q1, expected / counts_Q1, rtol=1e-6, atol=atol)


def check(asked, packed, rows, atol) -> None:
    expected, best = oracle(asked, packed)
    close(scored(asked, packed), expected, asked, atol)
    close(scored(asked, packed, rows=rows), expected[:, rows], asked, atol)
    of_sim = {"rtol": 1e-6, "atol": atol}
    query_MD = torch.cat(asked)
    found = list(best_tokens(query_MD.to(DEVICE), packed.to(DEVICE), backend="triton"))
    similarity_BM = torch.cat([similarity.cpu() for _, similarity, _ in found])
    token_BM = torch.cat([token.cpu() for _, _, token in found])
    assert (token_BM < 0).equal(best < 0) and torch.isneginf(similarity_BM).equal(best < 0)
    for row, length in enumerate(packed.lengths.tolist()):
        if length:
            sim_MN = query_MD @ packed.item(row).T
            chosen = sim_MN.gather(1, token_BM[row].unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(similarity_BM[row], sim_MN.amax(dim=1), **of_sim)
            torch.testing.assert_close(chosen, similarity_BM[row], **of_sim)


@of_kernel
@pytest.mark.parametrize("dim", [48, 64, 130, 384, 2048])
@pytest.mark.parametrize("spec", OF_CODECS, **named)
def test_codecs_equal_the_oracle(spec, dim):
    lengths = LENGTHS if dim < 300 else LENGTHS[:8]  # for the interpreter is slow
    packed = stored(spec, vectors(sum(lengths), dim), lengths)
    asked = [packed.codec.transform_queries(query) for query in queries(dim)]
    exact = spec["name"] in ("int8", "bfloat16", "float32")
    check(asked, packed, torch.tensor([0, 1, 3, 4, 6]), EXACT if exact else ROUNDED / dim**0.5)


@of_kernel
@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
@pytest.mark.parametrize("dim", [20, 64, 130, 300])
def test_floats_equal_the_oracle(dtype, dim):
    values = vectors(sum(LENGTHS), dim).to(dtype)
    packed = PackedVectors.from_values(values, torch.tensor(LENGTHS))
    atol = ROUNDED / dim**0.5 if dtype == torch.float16 else EXACT
    check(queries(dim), packed, torch.tensor([5, 9, 10]), atol)


@of_kernel
@pytest.mark.parametrize("spec", OF_CODECS, **named)
def test_all_similarities_negative(spec):
    packed = stored(spec, vectors(sum(LENGTHS), 64, shift=-2.0), LENGTHS)
    asked = [packed.codec.transform_queries(query.abs()) for query in queries(64)]
    scores = scored(asked, packed)
    close(scores, oracle(asked, packed)[0], asked, ROUNDED / 8)
    assert (scores[[i for i, query in enumerate(asked) if len(query)]] < 0).all()


@of_kernel
@pytest.mark.parametrize("spec", OF_CODECS, **named)
def test_equal_documents_have_equal_scores_in_any_company(spec):
    document, other = vectors(37, 128), vectors(301, 128, seed=5)
    values = torch.cat([document, other[:100], document, other[100:], document])
    packed = stored(spec, values, [37, 100, 37, 1, 200, 37])
    asked = [packed.codec.transform_queries(query) for query in queries(128, (3, 20, 150))]
    scores = scored(asked, packed)
    assert scores[:, 0].equal(scores[:, 2]) and scores[:, 0].equal(scores[:, 5])
    alone = Segment(packed.codec, 128, packed.codec.quantise(document), torch.tensor([37]))
    # numpy's products, which are the interpreter's, depend on the shape of the matrices.
    same = {"rtol": 1e-6, "atol": 1e-6} if INTERPRETED else {"rtol": 0, "atol": 0}
    found = scored(asked, PackedVectors([alone]))
    torch.testing.assert_close(found[:, 0], scores[:, 0], **same)
    for i, query in enumerate(asked):
        torch.testing.assert_close(scored([query], packed)[0], scores[i], **same)


@of_kernel
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_first_of_equal_tokens_is_the_best(dtype):
    tokens = torch.eye(32)[[0, 1, 2, 1, *[3] * 150, 1, 2]]
    packed = PackedVectors.from_values(tokens.to(dtype), torch.tensor([156]))
    query = torch.eye(32)[[3, 1, 2, 0, 9]]
    [(first, similarity, token)] = best_tokens(
        query.to(DEVICE), packed.to(DEVICE), backend="triton"
    )
    assert first == 0 and similarity.tolist() == [[1, 1, 1, 1, 0]]
    assert token.tolist() == [[4, 1, 2, 0, 0]]


@of_kernel
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_many_queries_in_many_panels(dtype):
    """More than fit a panel, of one token and of more than a panel; short and long documents."""
    lengths = torch.randint(0, 20, (20,), generator=torch.Generator().manual_seed(3)).tolist()
    values = vectors(sum(lengths) + 140, 64).to(dtype)
    packed = PackedVectors.from_values(values, torch.tensor([*lengths, 140]))
    asked = queries(64, (1,) * 20 + (150, 0, 20, 21, 22, 23, 300, 5, 0))
    expected = oracle(asked, packed)[0]
    atol = ROUNDED / 8 if dtype == torch.float16 else EXACT
    close(scored(asked, packed), expected, asked, atol)
    counts_Q1 = torch.tensor([[max(len(query), 1)] for query in asked])
    mean = scored(asked, packed, reduce="mean")
    torch.testing.assert_close(mean, expected / counts_Q1, rtol=1e-6, atol=atol)


@of_kernel
def test_segments_and_deleted_documents():
    live = torch.tensor([0, 1, 3, 5, 8, 11])
    first = stored({"name": "int8"}, vectors(sum(LENGTHS), 64), LENGTHS, live=live).segments[0]
    second = stored({"name": "int8"}, vectors(5, 64, seed=9), [2, 0, 3]).segments[0]
    packed = PackedVectors([first, second, first])
    asked = [packed.codec.transform_queries(query) for query in queries(64)]
    check(asked, packed, torch.tensor([2, 5, 6, 8, 11, 14]), EXACT)


@of_kernel
def test_no_tokens_at_all():
    packed = PackedVectors.from_values(torch.empty(0, 64), torch.tensor([0, 0]))
    assert torch.isneginf(scored(queries(64), packed)).all()


@of_kernel
def test_queries_and_documents_of_any_length_of_vector():
    values = vectors(sum(LENGTHS), 64) * 300
    packed = PackedVectors.from_values(values.half(), torch.tensor(LENGTHS))
    asked = [1e5 * query for query in queries(64)]  # beyond float16
    expected = oracle(asked, packed)[0]
    torch.testing.assert_close(scored(asked, packed), expected, rtol=1e-3, atol=3e4)


@pytest.mark.gpu
@needs_triton
def test_memory_does_not_grow_with_documents():
    """Beside the scores themselves."""
    extra = []
    asked = [query.cuda() for query in queries(128, (32,) * 8)]
    for num_docs in (1000, 20_000):
        values = torch.randn(num_docs * 64, 128, device="cuda", dtype=torch.float16)
        lengths = torch.full((num_docs,), 64, device="cuda")
        packed = PackedVectors.from_values(values, lengths)
        maxsim(asked, packed)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        scores = maxsim(asked, packed)
        extra.append(torch.cuda.max_memory_allocated() - before - scores.nbytes)
    assert abs(extra[1] - extra[0]) < 1 << 20
