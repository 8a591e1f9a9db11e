"""Contract of all registered codecs."""

from __future__ import annotations

import functools
import json

import numpy as np
import pyarrow as pa
import pytest
import torch

from pipeline.compression.codecs import Codec
from pipeline.config import SpecError, parse
from pipeline.registry import CODECS
from pipeline.search.maxsim import best_tokens, maxsim, maxsim_oracle
from pipeline.search.packed import PackedVectors, Segment, join_blocks
from pipeline.tokens import TokenBatch, pad

#: All codecs with their defaults, and further settings.
SPECS = [
    *({"name": name} for name in CODECS.names()),
    {"name": "bits", "bits": 2},
    {"name": "bits", "bits": 4},
    {"name": "residual", "bits": 2, "num_centroids": 5},
]
DIM = 13  # not divisible by 4
LENGTHS = [9, 1, 0, 23, 4]


def vectors(num_tokens: int, dim: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(num_tokens, dim, generator=generator), dim=1)


@functools.cache
def built(text: str, dim: int) -> Codec:
    spec = CODECS.resolve(json.loads(text))
    cls = CODECS.load(spec.name)
    if not cls.needs_fit:
        return cls(spec)
    return cls(spec, cls.fit(spec, vectors(300, dim, seed=9).numpy()))


@pytest.fixture(params=SPECS, ids=lambda spec: "_".join(map(str, spec.values())))
def build(request):
    """Factory of the codec for vectors of a given dimension, fitted if necessary."""
    return functools.partial(built, json.dumps(request.param))


def assert_equal(parts: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert parts.keys() == others.keys()
    assert all(torch.equal(part, others[name]) for name, part in parts.items())


@pytest.mark.parametrize("dim", [1, 7, 48, 128, 384, 1000])
def test_shapes_types_and_bytes(build, dim):
    codec = build(dim)
    tokens = vectors(6, dim)
    parts = codec.quantise(tokens)
    assert {n: (part.dtype, part.shape[1]) for n, part in parts.items()} == codec.parts(dim)
    assert all(part.shape == (6, width) for part, (_, width) in zip(
        parts.values(), codec.parts(dim).values(), strict=True))  # fmt: skip
    assert codec.token_bytes(dim) * 6 == sum(part.nbytes for part in parts.values())
    found = codec.dequantise(parts, dim)
    assert found.shape == tokens.shape and found.dtype == torch.float32
    assert found.isfinite().all()
    numbers, scales = codec.factors(parts, dim)
    assert torch.equal(numbers.float() * (1 if scales is None else scales), found)
    # Each stored vector is most similar to its original.
    assert ((found @ tokens.T).argmax(dim=1) == torch.arange(6)).all() or dim < 48


def test_runs_are_bit_identical(build):
    tokens = vectors(50, DIM)
    assert_equal(build(DIM).quantise(tokens), build(DIM).quantise(tokens))


def test_vectors_are_independent(build):
    codec, tokens = build(DIM), vectors(50, DIM)
    together = codec.quantise(tokens)
    for rows in (slice(0, 1), slice(7, 20), slice(49, 50)):
        expected = {name: part[rows] for name, part in together.items()}
        assert_equal(codec.quantise(tokens[rows]), expected)
        dequantised = codec.dequantise(together, DIM)[rows]
        torch.testing.assert_close(codec.dequantise(expected, DIM), dequantised)


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_zero_and_one_token(build, num_tokens):
    parts = build(DIM).quantise(vectors(num_tokens, DIM))
    assert all(len(part) == num_tokens for part in parts.values())
    assert build(DIM).dequantise(parts, DIM).shape == (num_tokens, DIM)
    assert build(DIM).transform_queries(vectors(num_tokens, DIM)).shape == (num_tokens, DIM)


@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-20, 1.0, 6e4])
def test_vectors_of_any_norm(build, scale):
    codec, tokens = build(DIM), vectors(3, DIM) * scale
    for given in (codec.quantise(tokens), codec.quantise(codec.transform_queries(tokens))):
        assert codec.dequantise(given, DIM).isfinite().all()


def make_batch(lengths: list[int], dim: int) -> TokenBatch:
    """Returns a batch with real tokens anywhere in a row and NaN at padding."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.zeros(len(lengths), max(lengths, default=0) + 2, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, torch.randperm(mask.shape[1], generator=generator)[:length]] = True
    padded = torch.full((*mask.shape, dim), torch.nan)
    padded[mask] = vectors(sum(lengths), dim)
    return TokenBatch(padded, mask, normalised=True)


@pytest.mark.parametrize("lengths", [LENGTHS, [1], [0], [], [0, 1, 0]], ids=str)
@pytest.mark.parametrize("dim", [3, DIM, 64])
def test_column_holds_parts(build, lengths, dim):
    codec, batch = build(dim), make_batch(lengths, dim)
    expected = codec.quantise(batch.vectors[batch.mask])
    column = codec.encode(batch)
    assert column.cast(codec.column_type(dim)).type == codec.column_type(dim)
    assert column.value_lengths().to_pylist() == lengths
    # Columns read from an index may have nulls, several chunks and offsets.
    nulls = pa.nulls(1, column.type)
    stored = pa.chunked_array([nulls, column, nulls, column.slice(len(column))])
    stored_lengths = [0, *lengths, 0]
    parts, found = codec.unpack(stored, dim)
    assert found.tolist() == stored_lengths
    assert_equal({name: torch.from_numpy(part) for name, part in parts.items()}, expected)
    decoded, found = codec.decode(stored, dim)
    assert found.tolist() == stored_lengths and decoded.shape == (sum(lengths), dim)
    torch.testing.assert_close(
        torch.from_numpy(decoded).float(), codec.dequantise(expected, dim), rtol=0, atol=0
    )
    if len(lengths) > 1:
        sliced, found = codec.decode(stored.slice(2), dim)
        assert found.tolist() == stored_lengths[2:] and np.array_equal(
            sliced, decoded[lengths[0] :]
        )


def test_column_bytes(build):
    values = build(DIM).encode(make_batch(LENGTHS, DIM)).values.flatten()
    assert values.nbytes == sum(LENGTHS) * build(DIM).token_bytes(DIM)


@pytest.mark.parametrize("dim", [DIM, 48, 384])
@pytest.mark.parametrize("block_bytes", [1, 8 << 20])
def test_maxsim_equals_maxsim_of_dequantised_vectors(build, dim, block_bytes):
    codec, lengths = build(dim), torch.tensor(LENGTHS)
    parts = codec.quantise(vectors(sum(LENGTHS), dim))
    packed = PackedVectors([Segment(codec, dim, parts, lengths)])
    queries = [codec.transform_queries(vectors(m, dim, seed=m)) for m in (4, 1)]
    padded, mask = pad(codec.dequantise(parts, dim), lengths.numpy(), fill=99.0)
    oracle = torch.stack([maxsim_oracle(query, padded, mask)[0] for query in queries])
    torch.testing.assert_close(maxsim(queries, packed, block_bytes=block_bytes), oracle)
    rows = torch.tensor([0, 2, 3])
    torch.testing.assert_close(maxsim(queries, packed, rows=rows), oracle[:, rows])
    best = torch.cat([block for _, block, _ in best_tokens(queries[0], packed)])
    torch.testing.assert_close(best.sum(dim=1), oracle[0])
    torch.testing.assert_close(packed.item(3), padded[3][mask[3]])


def test_packs_blocks_of_column(build):
    codec, batch = build(DIM), make_batch(LENGTHS, DIM)
    column = codec.encode(batch)
    packed = join_blocks(codec, DIM, [codec.unpack(column.slice(i, 2), DIM) for i in (0, 2, 4)])
    assert packed.lengths.tolist() == LENGTHS
    expected = codec.quantise(batch.vectors[batch.mask])
    assert_equal(packed.segments[0].parts, expected)


def test_transform_queries_is_idempotent(build):
    codec, tokens = build(DIM), vectors(9, DIM)
    once = codec.transform_queries(tokens)
    assert once.dtype == torch.float32
    torch.testing.assert_close(codec.transform_queries(once), once)


@pytest.mark.parametrize("name", CODECS.names())
def test_rejects_unknown_field(name):
    cls = CODECS.load(name)
    with pytest.raises(SpecError) as error:
        parse(cls.Spec, {"name": name, "bit": 3})
    assert str(error.value).startswith("unknown field 'bit'; ")
    assert str(error.value).endswith(f" valid fields: {', '.join(cls.Spec.model_fields)}")


def test_unfitted_codec_has_sizes_and_types():
    for name in CODECS.names():
        codec = CODECS.build(CODECS.resolve(name))
        assert codec.token_bytes(128) > 0 and codec.column_type(128)
        assert codec.needs_fit == (codec.num_fit_tokens > 0)
        if codec.needs_fit:
            with pytest.raises(AssertionError, match="fit first"):
                codec.quantise(vectors(2, 128))
