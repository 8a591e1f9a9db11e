"""All codecs on all backends of this machine, against the oracle on decoded vectors."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.registry import CODECS
from pipeline.search import native
from pipeline.search import packed as packed_module
from pipeline.search.maxsim import backends, best_tokens, maxsim, maxsim_oracle
from pipeline.search.packed import PackedVectors, Segment
from pipeline.tokens import normalise, pad
from tests.conftest import ROOT

#: Documents with zero, one and many tokens, within a block and across blocks of 32.
LENGTHS = [3, 0, 1, 7, 0, 0, 25, 1, 4, 0, 64, 65, 100, 31, 1, 0]
FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CODEC_SPECS = [
    {"name": name, **options}
    for name in CODECS.names()
    for options in {
        "bits": [{"bits": 1}, {"bits": 2}, {"bits": 4}],
        "residual": [{"bits": 2, "num_centroids": 8}, {"bits": 4, "num_centroids": 8}],
    }.get(name, [{}])
]
BACKENDS = ("torch", *native.available())


def vectors(num: int, dim: int, seed: int = 0, shift: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return normalise(torch.randn(num, dim, generator=generator) + shift)


def queries(dim: int, lengths: tuple[int, ...] = (4, 1, 0, 33, 20)) -> list[torch.Tensor]:
    return [vectors(length, dim, seed=1 + i) for i, length in enumerate(lengths)]


def quantise(spec: dict, values_TD: torch.Tensor, lengths=LENGTHS, live=None) -> PackedVectors:
    """Quantises vectors with a codec."""
    kind, spec = CODECS.load(spec["name"]), CODECS.resolve(spec)
    codec = kind(spec, kind.fit(spec, values_TD.numpy()) if kind.needs_fit else None)
    parts = codec.quantise(values_TD)
    return PackedVectors(
        [Segment(codec, values_TD.shape[1], parts, torch.tensor(lengths), live=live)]
    )


def oracle(
    query_tokens: list[torch.Tensor], packed: PackedVectors
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scores (Q, B) and best tokens (B, M) of decoded vectors."""
    items = [packed.item(row) for row in range(len(packed))]
    padded, mask = pad(torch.cat(items), packed.lengths.numpy(), fill=99.0)
    results = [maxsim_oracle(query, padded, mask) for query in query_tokens]
    return torch.stack([s for s, _ in results]), torch.cat([b for _, b in results], dim=1)


@pytest.mark.parametrize("dim", [48, 64, 130, 384, 1000])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", CODEC_SPECS, ids=lambda spec: "-".join(map(str, spec.values())))
def test_codecs_equal_the_oracle(spec, backend, dim):
    packed = quantise(spec, vectors(sum(LENGTHS), dim))
    query_tokens = [packed.codec.transform_queries(query) for query in queries(dim)]
    expected, best = oracle(query_tokens, packed)
    torch.testing.assert_close(maxsim(query_tokens, packed, backend=backend), expected)
    rows = torch.tensor([0, 1, 3, 4, 6, 10, 12, 13])
    torch.testing.assert_close(
        maxsim(query_tokens, packed, rows=rows, backend=backend), expected[:, rows]
    )
    check_best(torch.cat(query_tokens), packed, backend, best)


@pytest.mark.parametrize("backend", BACKENDS)
def test_vectors_of_one_bfloat16_lose_nothing(backend):
    """bfloat16 vectors have the error of sums in float32 only: 1e-7 per token."""
    values = vectors(sum(LENGTHS), 128)
    packed = PackedVectors.from_values(values.bfloat16(), torch.tensor(LENGTHS))
    query_tokens = queries(128)
    scores_QB = maxsim(query_tokens, packed, backend=backend)
    for tokens, scores in zip(query_tokens, scores_QB, strict=True):
        for row, score in enumerate(scores.tolist()):
            item = packed.item(row).double()
            if len(item) and len(tokens):
                exact = (tokens.double() @ item.T).amax(dim=1).sum().item()
                assert abs(score - exact) < 1e-7 * len(tokens)


@pytest.mark.parametrize("max_vectors", [1, 5, 16, 40])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", CODEC_SPECS, ids=lambda spec: "-".join(map(str, spec.values())))
def test_prefixes_equal_documents_that_end_there(spec, backend, max_vectors):
    packed = quantise(spec, vectors(sum(LENGTHS), 64))
    (segment,) = packed.segments
    lengths = segment.lengths.clamp(max=max_vectors)
    pairs = zip(segment.starts.tolist(), lengths.tolist(), strict=True)
    index = torch.cat([torch.arange(start, start + length) for start, length in pairs])
    parts = {name: part[index] for name, part in segment.parts.items()}
    query_tokens = [packed.codec.transform_queries(query) for query in queries(64)]
    for live in (None, torch.tensor([0, 1, 3, 6, 11, 12, 13])):
        whole = dataclasses.replace(segment, live=live)
        prefix = PackedVectors([whole]).prefix(max_vectors)
        smaller = PackedVectors([Segment(packed.codec, 64, parts, lengths, live)])
        assert prefix.num_vectors == smaller.num_vectors
        for rows in (None, torch.tensor([0, 2, 3, 6])):
            options = {"rows": rows, "backend": backend}
            scores, expected = (maxsim(query_tokens, p, **options) for p in (prefix, smaller))
            assert scores.equal(expected)
            best, expected_best = (
                list(best_tokens(query_tokens[0], p, **options)) for p in (prefix, smaller)
            )
            for (_, *found), (_, *other) in zip(best, expected_best, strict=True):
                assert all(map(torch.equal, found, other))


def check_best(query_MD, packed, backend, best) -> None:
    """Checks best tokens against the oracle, up to tokens with equal similarity."""
    blocks = list(best_tokens(query_MD, packed, backend=backend, block_bytes=2000))
    assert [first for first, _, _ in blocks][:1] == [0] and len(blocks) > 1
    token_BM = torch.cat([token for _, _, token in blocks])
    similarity_BM = torch.cat([similarity for _, similarity, _ in blocks])
    assert (token_BM < 0).equal(best < 0) and torch.isneginf(similarity_BM).equal(best < 0)
    for row, length in enumerate(packed.lengths.tolist()):
        if length:
            sim_MN = query_MD @ packed.item(row).T
            torch.testing.assert_close(similarity_BM[row], sim_MN.amax(dim=1))
            sim_M = sim_MN.gather(1, token_BM[row].unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(sim_M, similarity_BM[row])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
def test_float_types_equal_the_oracle(backend, dtype):
    generator = torch.Generator().manual_seed(2)
    for _ in range(15):
        dim = int(torch.randint(1, 200, (), generator=generator))
        size = int(torch.randint(1, 60, (), generator=generator))
        lengths = torch.randint(0, 40, (size,), generator=generator)
        lengths[0] += 1  # at least one token
        values = normalise(torch.randn(int(lengths.sum()), dim, generator=generator)).to(dtype)
        packed = PackedVectors.from_values(values, lengths)
        query_tokens = [normalise(torch.randn(m, dim, generator=generator)) for m in (1, 5, 32, 40)]
        scores = maxsim(query_tokens, packed, backend=backend)
        torch.testing.assert_close(scores, oracle(query_tokens, packed)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", CODEC_SPECS, ids=lambda spec: "-".join(map(str, spec.values())))
def test_all_similarities_negative(spec, backend):
    packed = quantise(spec, vectors(sum(LENGTHS), 64, shift=-2.0))
    query_tokens = [packed.codec.transform_queries(query.abs()) for query in queries(64)]
    scores = maxsim(query_tokens, packed, backend=backend)
    torch.testing.assert_close(scores, oracle(query_tokens, packed)[0], rtol=1e-4, atol=1e-4)
    has_tokens = [i for i, query in enumerate(query_tokens) if len(query)]
    assert (scores[has_tokens] < 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", CODEC_SPECS, ids=lambda spec: "-".join(map(str, spec.values())))
def test_scores_do_not_depend_on_positions(spec, backend):
    """Nor do scores depend on other documents and queries, so shards do not change rankings."""
    document, other = vectors(37, 128), vectors(1001, 128, seed=5)
    values = torch.cat([document, other[:500], document, other[500:], document])
    packed = quantise(spec, values, [37, 500, 37, 501, 37])
    single = quantise_like(packed, document, [37])
    query_tokens = [packed.codec.transform_queries(query) for query in queries(128)]
    scores = maxsim(query_tokens, packed, backend=backend)
    assert scores[:, 0].equal(scores[:, 2]) and scores[:, 0].equal(scores[:, 4])
    if backend != "torch":
        assert maxsim(query_tokens, single, backend=backend)[:, 0].equal(scores[:, 0])
        for i, query in enumerate(query_tokens):
            assert maxsim([query], packed, backend=backend)[0].equal(scores[i])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dim", [1, 31, 32, 100, 1024])
@pytest.mark.parametrize("name", ["int8", "bits", "float16", "float32"])
def test_queries_of_one_token(name, dim, backend):
    """These have kernels of their own, which also serve documents of several segments."""
    lengths = [1, 0, 1, 1, 3, 1, 1, 0, 40, 1]
    values = vectors(sum(lengths), dim)
    codec = quantise({"name": name}, values, lengths).codec
    packed = PackedVectors(
        [
            Segment(codec, dim, codec.quantise(values[:2]), torch.tensor([1, 0, 1])),
            Segment(codec, dim, codec.quantise(values[2:7]), torch.tensor([1, 3, 1])),
            Segment(codec, dim, codec.quantise(values[7:]), torch.tensor([1, 0, 40, 1])),
        ]
    )
    query_tokens = [vectors(1, dim, seed=seed) * seed for seed in range(5)]
    if name == "bits":
        query_tokens = [codec.transform_queries(query) for query in query_tokens]
    expected, _ = oracle(query_tokens, packed)
    scores = maxsim(query_tokens, packed, backend=backend)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)
    rows = torch.tensor([1, 2, 6, 8, 9])
    selected = maxsim(query_tokens, packed, rows=rows, backend=backend)
    torch.testing.assert_close(selected, expected[:, rows], rtol=1e-4, atol=1e-4)
    if backend != "torch":
        mixed = maxsim([vectors(4, dim), *query_tokens], packed, backend=backend)
        assert mixed[1:].equal(scores) and selected.equal(scores[:, rows])


def quantise_like(other: PackedVectors, values: torch.Tensor, lengths: list[int]) -> PackedVectors:
    parts = other.codec.quantise(values)
    return PackedVectors([Segment(other.codec, other.dim, parts, torch.tensor(lengths))])


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_documents_and_queries_in_many_tasks(backend, monkeypatch):
    monkeypatch.setattr(native, "TASK_PAIRS", 4096)
    monkeypatch.setattr(native, "QUERY_BYTES", 40 * 4 * 96)
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, 50, (300,), generator=generator).tolist()
    packed = quantise({"name": "float16"}, vectors(sum(lengths), 96), lengths)
    query_tokens = [vectors(m, 96, seed=m) for m in (1, 39, 40, 41, 2, 3, 200)]
    torch.testing.assert_close(
        maxsim(query_tokens, packed, backend=backend), oracle(query_tokens, packed)[0]
    )


@pytest.mark.parametrize("backend", native.available())
@pytest.mark.parametrize("task_pairs", [1, 1 << 18])
def test_best_tokens_with_several_threads(backend, task_pairs, monkeypatch):
    monkeypatch.setattr(native, "TASK_PAIRS", task_pairs)
    lengths = LENGTHS * 10
    packed = quantise({"name": "int8"}, vectors(sum(lengths), 48), lengths)
    query_MD = torch.cat(queries(48))
    (expected,) = best_tokens(query_MD, packed, backend=backend)
    torch.set_num_threads(3)
    try:
        (result,) = best_tokens(query_MD, packed, backend=backend)
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(result[1:], expected[1:], strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_segments_and_deleted_documents(backend):
    values = vectors(sum(LENGTHS), 64)
    live = torch.tensor([0, 1, 3, 6, 9, 11])
    first = quantise({"name": "float16"}, values, live=live).segments[0]
    second = quantise({"name": "float16"}, vectors(5, 64, seed=9), [2, 0, 3]).segments[0]
    packed = PackedVectors([first, second, first])
    assert packed.lengths.tolist() == [3, 0, 7, 25, 0, 65, 2, 0, 3, 3, 0, 7, 25, 0, 65]
    query_tokens = queries(64)
    expected, best = oracle(query_tokens, packed)
    torch.testing.assert_close(maxsim(query_tokens, packed, backend=backend), expected)
    rows = torch.tensor([2, 5, 6, 8, 11, 14])
    torch.testing.assert_close(
        maxsim(query_tokens, packed, rows=rows, backend=backend), expected[:, rows]
    )
    check_best(torch.cat(query_tokens), packed, backend, best)
    mean = maxsim(query_tokens, packed, reduce="mean", backend=backend)
    counts = torch.tensor([[max(len(query), 1)] for query in query_tokens])
    torch.testing.assert_close(mean, expected / counts)


def test_vectors_are_verified_before_they_are_read():
    verified: set[int] = set()

    def verify(starts: np.ndarray, lengths: np.ndarray) -> None:
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            verified.update(range(start, start + length))

    segment = quantise({"name": "float16"}, vectors(sum(LENGTHS), 64)).segments[0]
    packed = PackedVectors(
        [Segment(segment.codec, 64, segment.parts, segment.lengths, verify=verify)]
    )
    for backend in BACKENDS:
        verified.clear()
        maxsim(queries(64), packed, backend=backend)
        assert sorted(verified) == list(range(sum(LENGTHS)))
        verified.clear()
        maxsim(queries(64), packed, rows=torch.tensor([0, 6, 8]), backend=backend)
        assert sorted(verified) == [0, 1, 2, *range(11, 36), *range(37, 41)]


def test_documents_are_copied_to_a_device_in_pieces(monkeypatch):
    monkeypatch.setattr(packed_module, "COPY_BYTES", 1000)
    verified = []
    segment = quantise(
        {"name": "int8"}, vectors(sum(LENGTHS), 64), live=torch.tensor([0, 3, 10])
    ).segments[0]

    def verify(start: np.ndarray, length: np.ndarray) -> None:
        verified.append((int(start[0]), int(length[0])))

    copy = dataclasses.replace(segment, verify=verify).to("cpu")
    for name, part in segment.parts.items():
        assert copy.parts[name].equal(part) and copy.parts[name] is not part
    assert copy.lengths.equal(segment.lengths) and copy.live.equal(segment.live)
    assert verified[:2] == [(0, 15), (15, 15)] and sum(verified[-1]) == sum(LENGTHS)


def test_rejects_unknown_backend_and_wrong_dimension():
    packed = quantise({"name": "float16"}, vectors(sum(LENGTHS), 64))
    with pytest.raises(ValueError, match=r"backend must be one of torch.*, got 'abacus'"):
        maxsim(queries(64), packed, backend="abacus")
    with pytest.raises(ValueError, match=r"must have the shape \(tokens, 64\), got \(4, 48\)"):
        maxsim(queries(48), packed)


def test_torch_is_used_without_the_library(tmp_path: Path):
    """The package contains no library if it was installed without a compiler."""
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import torch
from pipeline.search import native
from pipeline.search import packed as packed_module
from pipeline.search.maxsim import backends, maxsim
from pipeline.search.packed import PackedVectors
assert native.__file__.startswith({str(tmp_path)!r}) and native.available() == ()
packed = PackedVectors.from_values(torch.eye(4), torch.tensor([1, 3]))
assert backends(packed) == ("torch",)
assert maxsim([torch.eye(4)[:2]], packed).tolist() == [[1.0, 1.0]]
"""
    for path in (ROOT / "pipeline").rglob("*.py"):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)


def test_backends_are_named():
    packed = quantise({"name": "float16"}, vectors(sum(LENGTHS), 64))
    assert backends(packed) == BACKENDS
