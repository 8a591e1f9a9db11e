"""The Triton kernel against the oracle, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from pipeline.search import maxsim as maxsim_module
from pipeline.search.maxsim import backends, best_tokens, maxsim
from pipeline.search.packed import PackedVectors, Segment
from tests.interpreter import DEVICE, INTERPRETED, kernel_test, needs_triton, run_in_interpreter
from tests.search.maxsim.test_backends import (
    CODEC_SPECS,
    FLOATS,
    oracle,
    quantise,
    queries,
    vectors,
)

#: Documents with zero, one and many tokens, some longer than a tile.
LENGTHS = [3, 0, 1, 7, 0, 25, 1, 64, 65, 130, 31, 0]
#: Tolerances for the similarity of unit vectors, with values rounded to float16 (to be divided by
#: the square root of the dimension) and without rounding.
ROUNDED, EXACT = 2e-3, 3e-6

#: Shared memory per program on Hopper, in bytes.
HOPPER_SHARED = 227 << 10

spec_ids = {"ids": lambda spec: "-".join(map(str, spec.values()))}


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Uses the interpreted kernel on the CPU if the interpreter is enabled."""
    if INTERPRETED:
        import numpy as np
        from triton.runtime import interpreter
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

        from pipeline.search import triton_kernels

        dot = InterpreterBuilder.create_dot

        def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
            def widen(handle):  # the interpreter represents bfloat16 as integers
                if handle.dtype.scalar != interpreter.tl.bfloat16:
                    return handle
                values = (handle.data.astype(np.uint32) << 16).view(np.float32)
                return TensorHandle(values, interpreter.tl.float32)

            return dot(self, widen(a), widen(b), d, input_precision, max_num_imprecise_acc)

        monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
        monkeypatch.setattr(maxsim_module, "_kernels", lambda packed: triton_kernels)


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="runs in the interpreter already")
@pytest.mark.timeout(900)
def test_interpreter():
    run_in_interpreter(__file__)


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize("num_queries", [1, 40])
@pytest.mark.parametrize("spec", CODEC_SPECS, **spec_ids)
def test_compiles_for_hopper(spec, num_queries, monkeypatch):
    """Compiles the kernel for one query and for full panels, without a GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from pipeline.search import triton_kernels

    kernel, shared = triton_kernels._kernel, []
    types = {torch.uint8: "u8", torch.int8: "i8", torch.int32: "i32", torch.int64: "i64"}
    types |= {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}

    class Compiler:
        """Replaces the kernel and compiles it for the arguments of a launch."""

        def __getitem__(self, grid):
            return self

        def __call__(self, *args, num_warps, num_stages, **constants):
            names = kernel.arg_names
            signature = {
                name: "*" + types[arg.dtype] if isinstance(arg, torch.Tensor) else "i32"
                for name, arg in zip(names, args, strict=False)
            }
            # A launch specialises integers equal to 1.
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
            compiled = compile(
                ASTSource(kernel, signature, values, aligned),
                target=GPUTarget("cuda", 90, 32),
                options={"num_warps": num_warps, "num_stages": num_stages},
            )
            shared.append(compiled.metadata.shared)
            assert "wgmma.mma_async" in compiled.asm["ptx"]

    monkeypatch.setattr(triton_kernels, "_kernel", Compiler())
    monkeypatch.setattr(triton_kernels, "_INTERPRETED", True)
    for dim in (128, 200, 500):
        packed = quantise(spec, vectors(64, dim), [64])
        query_MD = torch.cat(queries(dim, (32,) * num_queries))
        lengths = torch.full((num_queries,), 32)
        triton_kernels.score(query_MD, lengths, packed, None, torch.empty(num_queries, 1), "triton")
    triton_kernels.best(query_MD, packed, torch.tensor([0]), "triton")
    assert len(shared) == 4 and max(shared) <= HOPPER_SHARED, shared


def on_device(packed: PackedVectors) -> PackedVectors:
    """Copies vectors to the device of the kernels."""
    return PackedVectors([segment.to(DEVICE) for segment in packed.segments])


def kernel_scores(query_tokens, packed, **options) -> torch.Tensor:
    """Returns the scores of the kernel, on the CPU."""
    packed = on_device(packed)
    assert backends(packed) == ("torch", "triton")
    query_tokens = [query.to(DEVICE) for query in query_tokens]
    return maxsim(query_tokens, packed, backend="triton", **options).cpu()


def close(actual, expected, query_tokens, atol) -> None:
    """Compares scores with a tolerance proportional to the number of query tokens."""
    counts_Q1 = torch.tensor([[max(len(query), 1)] for query in query_tokens])
    torch.testing.assert_close(actual / counts_Q1, expected / counts_Q1, rtol=1e-6, atol=atol)


def check(query_tokens, packed, rows, atol) -> None:
    expected, best = oracle(query_tokens, packed)
    close(kernel_scores(query_tokens, packed), expected, query_tokens, atol)
    close(kernel_scores(query_tokens, packed, rows=rows), expected[:, rows], query_tokens, atol)
    tolerance = {"rtol": 1e-6, "atol": atol}
    query_MD = torch.cat(query_tokens)
    blocks = list(best_tokens(query_MD.to(DEVICE), on_device(packed), backend="triton"))
    similarity_BM = torch.cat([similarity.cpu() for _, similarity, _ in blocks])
    token_BM = torch.cat([token.cpu() for _, _, token in blocks])
    assert (token_BM < 0).equal(best < 0) and torch.isneginf(similarity_BM).equal(best < 0)
    for row, length in enumerate(packed.lengths.tolist()):
        if length:
            sim_MN = query_MD @ packed.item(row).T
            sim_M = sim_MN.gather(1, token_BM[row].unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(similarity_BM[row], sim_MN.amax(dim=1), **tolerance)
            torch.testing.assert_close(sim_M, similarity_BM[row], **tolerance)


@kernel_test
@pytest.mark.parametrize("dim", [48, 64, 130, 384, 1000])
@pytest.mark.parametrize("spec", CODEC_SPECS, **spec_ids)
def test_codecs_equal_the_oracle(spec, dim):
    lengths = LENGTHS if dim < 300 else LENGTHS[:8]  # because the interpreter is slow
    packed = quantise(spec, vectors(sum(lengths), dim), lengths)
    query_tokens = [packed.codec.transform_queries(query) for query in queries(dim)]
    exact = spec["name"] in ("int8", "bits", "bfloat16", "float32")
    check(
        query_tokens, packed, torch.tensor([0, 1, 3, 4, 6]), EXACT if exact else ROUNDED / dim**0.5
    )


@kernel_test
@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
@pytest.mark.parametrize("dim", [20, 64, 130, 300])
def test_floats_equal_the_oracle(dtype, dim):
    values = vectors(sum(LENGTHS), dim).to(dtype)
    packed = PackedVectors.from_values(values, torch.tensor(LENGTHS))
    atol = ROUNDED / dim**0.5 if dtype == torch.float16 else EXACT
    check(queries(dim), packed, torch.tensor([5, 9, 10]), atol)


@kernel_test
@pytest.mark.parametrize("spec", CODEC_SPECS, **spec_ids)
def test_prefixes_equal_the_oracle(spec):
    packed = quantise(spec, vectors(sum(LENGTHS), 64), LENGTHS).prefix(5)
    query_tokens = [packed.codec.transform_queries(query) for query in queries(64)]
    exact = spec["name"] in ("int8", "bits", "bfloat16", "float32")
    check(query_tokens, packed, torch.tensor([0, 1, 3, 4, 6]), EXACT if exact else ROUNDED / 8)


@kernel_test
@pytest.mark.parametrize("spec", CODEC_SPECS, **spec_ids)
def test_all_similarities_negative(spec):
    packed = quantise(spec, vectors(sum(LENGTHS), 64, shift=-2.0), LENGTHS)
    query_tokens = [packed.codec.transform_queries(query.abs()) for query in queries(64)]
    scores = kernel_scores(query_tokens, packed)
    close(scores, oracle(query_tokens, packed)[0], query_tokens, ROUNDED / 8)
    assert (scores[[i for i, query in enumerate(query_tokens) if len(query)]] < 0).all()


@kernel_test
@pytest.mark.parametrize("spec", CODEC_SPECS, **spec_ids)
def test_scores_do_not_depend_on_other_documents_and_queries(spec):
    document, other = vectors(37, 128), vectors(301, 128, seed=5)
    values = torch.cat([document, other[:100], document, other[100:], document])
    packed = quantise(spec, values, [37, 100, 37, 1, 200, 37])
    query_tokens = [packed.codec.transform_queries(query) for query in queries(128, (3, 20, 150))]
    scores = kernel_scores(query_tokens, packed)
    assert scores[:, 0].equal(scores[:, 2]) and scores[:, 0].equal(scores[:, 5])
    segment = Segment(packed.codec, 128, packed.codec.quantise(document), torch.tensor([37]))
    # NumPy's products, used by the interpreter, depend on the shape of the matrices.
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if INTERPRETED else {"rtol": 0, "atol": 0}
    single = kernel_scores(query_tokens, PackedVectors([segment]))
    torch.testing.assert_close(single[:, 0], scores[:, 0], **tolerance)
    for i, query in enumerate(query_tokens):
        torch.testing.assert_close(kernel_scores([query], packed)[0], scores[i], **tolerance)


@kernel_test
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_ties_resolve_to_the_first_token(dtype):
    tokens = torch.eye(32)[[0, 1, 2, 1, *[3] * 150, 1, 2]]
    packed = PackedVectors.from_values(tokens.to(dtype), torch.tensor([156]))
    query = torch.eye(32)[[3, 1, 2, 0, 9]]
    [(first, similarity, token)] = best_tokens(
        query.to(DEVICE), on_device(packed), backend="triton"
    )
    assert first == 0 and similarity.tolist() == [[1, 1, 1, 1, 0]]
    assert token.tolist() == [[4, 1, 2, 0, 0]]


@kernel_test
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_many_queries_in_many_panels(dtype):
    """Covers more queries than fit in a panel, queries longer than a panel, and long documents."""
    lengths = torch.randint(0, 20, (20,), generator=torch.Generator().manual_seed(3)).tolist()
    values = vectors(sum(lengths) + 140, 64).to(dtype)
    packed = PackedVectors.from_values(values, torch.tensor([*lengths, 140]))
    query_tokens = queries(64, (1,) * 20 + (150, 0, 20, 21, 22, 23, 300, 5, 0))
    expected = oracle(query_tokens, packed)[0]
    atol = ROUNDED / 8 if dtype == torch.float16 else EXACT
    close(kernel_scores(query_tokens, packed), expected, query_tokens, atol)
    counts_Q1 = torch.tensor([[max(len(query), 1)] for query in query_tokens])
    mean = kernel_scores(query_tokens, packed, reduce="mean")
    torch.testing.assert_close(mean, expected / counts_Q1, rtol=1e-6, atol=atol)


@kernel_test
def test_segments_and_deleted_documents():
    live = torch.tensor([0, 1, 3, 5, 8, 11])
    first = quantise({"name": "int8"}, vectors(sum(LENGTHS), 64), LENGTHS, live=live).segments[0]
    second = quantise({"name": "int8"}, vectors(5, 64, seed=9), [2, 0, 3]).segments[0]
    packed = PackedVectors([first, second, first])
    query_tokens = [packed.codec.transform_queries(query) for query in queries(64)]
    check(query_tokens, packed, torch.tensor([2, 5, 6, 8, 11, 14]), EXACT)


@kernel_test
def test_no_tokens():
    packed = PackedVectors.from_values(torch.empty(0, 64), torch.tensor([0, 0]))
    assert torch.isneginf(kernel_scores(queries(64), packed)).all()


@kernel_test
def test_vectors_of_any_norm():
    values = vectors(sum(LENGTHS), 64) * 300
    packed = PackedVectors.from_values(values.half(), torch.tensor(LENGTHS))
    query_tokens = [1e5 * query for query in queries(64)]  # out of range for float16
    expected = oracle(query_tokens, packed)[0]
    torch.testing.assert_close(kernel_scores(query_tokens, packed), expected, rtol=1e-3, atol=3e4)


@pytest.mark.gpu
@needs_triton
def test_memory_does_not_grow_with_documents():
    """Only the scores themselves grow."""
    extra = []
    query_tokens = [query.cuda() for query in queries(128, (32,) * 8)]
    for num_docs in (1000, 20_000):
        values = torch.randn(num_docs * 64, 128, device="cuda", dtype=torch.float16)
        lengths = torch.full((num_docs,), 64, device="cuda")
        packed = PackedVectors.from_values(values, lengths)
        maxsim(query_tokens, packed)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        scores = maxsim(query_tokens, packed)
        extra.append(torch.cuda.max_memory_allocated() - before - scores.nbytes)
    assert abs(extra[1] - extra[0]) < 1 << 20
