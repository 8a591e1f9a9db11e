"""Triton kernels of attention statistics, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch

from pipeline.encoders import attention
from pipeline.encoders.attention import weighted_rows
from tests.interpreter import DEVICE, INTERPRETED, kernel_test, needs_triton, run_in_interpreter

DTYPES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
#: Shared memory per program on Hopper and on GPUs of compute capability 8.6 and 8.9, in bytes.
HOPPER_SHARED, SMALL_SHARED = 227 << 10, 99 << 10
LENGTHS = torch.tensor([150, 93, 1])

pytestmark = needs_triton


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Uses the interpreted kernels on the CPU if the interpreter is enabled."""
    if INTERPRETED:
        from pipeline.encoders import triton_kernels

        monkeypatch.setattr(attention, "kernel_module", lambda tensor: triton_kernels)


@pytest.mark.skipif(INTERPRETED, reason="runs in the interpreter already")
def test_interpreter():
    run_in_interpreter(__file__)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize(("capability", "limit"), [(90, HOPPER_SHARED), (89, SMALL_SHARED)])
@pytest.mark.parametrize("width", [64, 80, 128, 256])
def test_compiles_without_a_gpu(width, capability, limit, monkeypatch):
    """Compiles the kernels for all kinds of masks."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.runtime.errors import OutOfResources

    from pipeline.encoders import triton_kernels

    types = {torch.float32: "fp32", torch.bfloat16: "bf16"}
    types |= {torch.uint8: "u8", torch.int64: "i64"}
    compiled_names = []

    class Compiler:
        """Replaces a kernel and compiles it for the arguments of a launch."""

        def __init__(self, name):
            self.name, self.kernel = name, getattr(triton_kernels, name)

        def __getitem__(self, grid):
            return self

        def __call__(self, *args, num_warps, num_stages=1, **constants):
            names = self.kernel.arg_names
            signature, attributes = {}, {}
            for i, (name, arg) in enumerate(zip(names, args, strict=False)):
                if isinstance(arg, torch.Tensor):
                    signature[name] = "*" + types[arg.dtype]
                else:
                    signature[name] = "fp32" if isinstance(arg, float) else "i32"
                # A launch specialises integers that are 1 or divisible by 16.
                is_integer = isinstance(arg, int) and name != "num_tokens"
                if is_integer and arg == 1:
                    constants[name] = arg
                elif isinstance(arg, torch.Tensor) or (is_integer and arg % 16 == 0):
                    attributes[i,] = [["tt.divisibility", 16]]
            signature |= dict.fromkeys(constants, "constexpr")
            values = {(names.index(name),): value for name, value in constants.items()}
            compiled = compile(
                ASTSource(self.kernel, signature, values, attributes),
                target=GPUTarget("cuda", capability, 32),
                options={"num_warps": num_warps, "num_stages": num_stages},
            )
            if compiled.metadata.shared > limit:
                raise OutOfResources(compiled.metadata.shared, limit, "shared memory")
            if self.name != "_pack_mask":
                product = "wgmma.mma_async" if capability == 90 else "mma.sync"
                assert product in compiled.asm["ptx"] and "cp.async" in compiled.asm["ptx"]
            compiled_names.append(self.name)

    for name in ("_pack_mask", "_row_log_sums", "_column_sums"):
        monkeypatch.setattr(triton_kernels, name, Compiler(name))
    query = torch.zeros(2, 200, 4, width, dtype=torch.bfloat16).transpose(1, 2)
    key = torch.zeros(2, 2, 200, width, dtype=torch.bfloat16)
    for mask in (None, torch.ones(2, 1, 1, 200) > 0, torch.ones(1, 1, 200, 200) > 0):
        for is_causal in (False, True) if mask is None else (False,):
            triton_kernels.weighted_rows(
                query, key, mask, torch.ones(1, 2, 200), scaling=0.1, is_causal=is_causal
            )
    expected = {"_pack_mask": 2, "_row_log_sums": 4, "_column_sums": 4}
    assert {name: compiled_names.count(name) for name in expected} == expected


def inputs(num_tokens, width, num_heads, num_groups, dtype, seed=0):
    """Returns queries and keys, as transposed views of three items."""
    generator = torch.Generator().manual_seed(seed)
    query, key = (
        torch.randn(3, num_tokens, number, width, generator=generator).to(dtype).transpose(1, 2)
        for number in (num_heads, num_groups)
    )
    return 2 * query, key


def masks(num_tokens):
    """Returns masks of three items: without padding, with padding and with a single token."""
    position = torch.arange(num_tokens)
    padding = position < LENGTHS.clamp_max(num_tokens)[:, None, None, None]
    causal = (position <= position[:, None])[None, None]
    window = ((position - position[:, None]).abs() < 40)[None, None]
    return {
        "none": (None, False),
        "causal": (None, True),
        "padding": (padding, False),
        "causal padding": (padding & causal, False),
        "left padding": ((padding & causal).flip(2, 3), False),
        "window": (window, False),
        "expanded": (window.expand(3, 1, -1, -1), False),
        "causal is ignored": (padding, True),
    }


def weightings(num_tokens):
    """Returns weightings of all rows, of the last row and of few rows, without padding."""
    position = torch.arange(num_tokens)
    is_token = position < LENGTHS.clamp_max(num_tokens).unsqueeze(1)
    generator = torch.Generator().manual_seed(1)
    last = position == LENGTHS.clamp_max(num_tokens).unsqueeze(1) - 1
    some = torch.rand(3, num_tokens, generator=generator) * (position % 3 == 1)
    some[0, 5:] = 0
    return torch.stack([is_token.float(), last.float(), some * is_token])


def oracle(query, key, mask, weights, scaling, is_causal):
    """Computes the sums from the whole attention matrix in float64."""
    num_heads, num_tokens = query.shape[1:3]
    key = key.double().repeat_interleave(num_heads // key.shape[1], dim=1)
    logits = scaling * query.double() @ key.mT
    if mask is None and is_causal:
        mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    return torch.einsum("sbi,bhij->sbhj", weights.double(), logits.softmax(dim=3).nan_to_num(0.0))


def sums(query, key, mask, weights, **options):
    """Returns the sums of the kernels, on the CPU."""
    on_device = [None if t is None else t.to(DEVICE) for t in (query, key, mask, weights)]
    module = attention.kernel_module(on_device[0])
    assert module is not None and module.can_sum(*on_device[:3])
    return weighted_rows(*on_device, **options).cpu()


def check(query, key, mask, is_causal, weights, scaling=None):
    found = sums(query, key, mask, weights, scaling=scaling, is_causal=is_causal)
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    expected = oracle(query, key, mask, weights, scaling, is_causal).float()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", masks(1))
@pytest.mark.parametrize("num_tokens", [150, 300])
def test_masks(mask, num_tokens, dtype):
    query, key = inputs(num_tokens, 64, 4, 2, dtype)
    check(query, key, *masks(num_tokens)[mask], weightings(num_tokens))


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("width", [4, 64, 72, 80, 128, 256])
def test_widths(width, is_causal, dtype):
    query, key = inputs(201, width, 2, 1, dtype)
    check(query, key, None, is_causal, weightings(201), scaling=0.07)


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 128, 129])
def test_numbers_of_tokens_and_groups(num_tokens, dtype):
    for (heads, groups), is_causal in itertools.product([(3, 3), (6, 2), (4, 1)], [False, True]):
        query, key = inputs(num_tokens, 64, heads, groups, dtype)
        for weights in (weightings(num_tokens), weightings(num_tokens)[:1]):
            check(query, key, None, is_causal, weights)


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_without_allowed_columns_add_nothing(dtype):
    query, key = inputs(150, 64, 2, 2, dtype)
    mask = torch.rand(3, 1, 150, 150, generator=torch.Generator().manual_seed(2)) < 0.5
    mask[:, :, 3] = mask[:, :, 140:] = False
    mask[1] = False
    check(query, key, mask, False, torch.ones(1, 3, 150))


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padding_may_be_nan(dtype):
    query, key = inputs(150, 64, 2, 1, dtype)
    mask, is_causal = masks(150)["causal padding"]
    is_padding = torch.arange(150) >= LENGTHS.unsqueeze(1)
    weights = weightings(150)
    expected = oracle(query, key, mask, weights, 0.125, is_causal).float()
    query, key = (t.masked_fill(is_padding[:, None, :, None], torch.nan) for t in (query, key))
    found = sums(query, key, mask, weights)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@kernel_test
def test_extreme_logits():
    """Covers rows whose maximum is far below or above that of others."""
    query, key = inputs(150, 64, 2, 1, torch.float16)
    query, weights = 100 * query, weightings(150)
    expected = oracle(query, key, None, weights, 0.125, True).float()
    found = sums(query, key, None, weights, is_causal=True)
    # float32 logits in the thousands have errors of 1e-4.
    torch.testing.assert_close(found, expected, rtol=5e-3, atol=1e-3)


@kernel_test
def test_zero_weights():
    query, key = inputs(150, 64, 2, 1, torch.float16)
    assert not sums(query, key, None, torch.zeros(2, 3, 150)).any()


@kernel_test
def test_unsupported_inputs_use_torch():
    query, key = inputs(40, 64, 2, 1, torch.float16)
    bias = torch.zeros(3, 1, 40, 40).masked_fill(~masks(40)["padding"][0], -1e30)
    weights = weightings(40)
    module = attention.kernel_module(query.to(DEVICE))
    assert not module.can_sum(query, key, bias)
    assert not module.can_sum(query.float(), key.float(), None)
    found = weighted_rows(*(t.to(DEVICE) for t in (query.float(), key, bias, weights))).cpu()
    expected = sums(query, key, masks(40)["padding"][0], weights)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "groups", "width"), [(8, 1, 256), (12, 2, 128), (4, 4, 80)])
@pytest.mark.parametrize("mask", ["none", "causal", "causal padding"])
def test_bfloat16_equals_torch(mask, heads, groups, width, monkeypatch):
    query, key = inputs(1000, width, heads, groups, torch.bfloat16)
    mask, is_causal = masks(1000)[mask]
    weights = torch.cat([weightings(1000), torch.ones(1, 3, 1000)])
    found = sums(query, key, mask, weights, is_causal=is_causal)
    assert torch.equal(found, sums(query, key, mask, weights, is_causal=is_causal))
    monkeypatch.setattr(attention, "kernel_module", lambda tensor: None)
    on_device = [None if t is None else t.cuda() for t in (query, key, mask, weights)]
    expected = weighted_rows(*on_device, is_causal=is_causal).cpu()
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-6)


@pytest.mark.gpu
def test_memory_is_linear():
    peaks = []
    for num_tokens in (2048, 8192):
        query, key = (torch.randn(1, 8, num_tokens, 128, device="cuda").half() for _ in range(2))
        weights = torch.ones(1, 1, num_tokens, device="cuda")
        weighted_rows(query, key, None, weights)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        weighted_rows(query, key, None, weights)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 5 * peaks[0] and peaks[1] < 2 << 20
