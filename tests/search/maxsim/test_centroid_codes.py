"""Scores of centroid codes at all levels of the library, against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pipeline.compression.codecs.centroid_codes import CentroidCodes
from pipeline.search import native
from pipeline.search.maxsim import backends, best_tokens, maxsim
from pipeline.search.packed import PackedVectors, Segment
from pipeline.tokens import normalise

LENGTHS = [3, 0, 1, 7, 0, 0, 25, 1, 4, 0, 64, 65, 100, 31, 1, 0]
BACKENDS = ("torch", *native.available())
#: Rounding error of a similarity in the int16 table of the library.
TOLERANCE = 2e-5


def vectors(num: int, dim: int, seed: int = 0, shift: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return normalise(torch.randn(num, dim, generator=generator) + shift)


def pack(centroids_CD: torch.Tensor, lengths=LENGTHS, live=None, seed: int = 0) -> PackedVectors:
    """Returns random codes."""
    codec = CentroidCodes(CentroidCodes.Spec(), {"centroids": centroids_CD.numpy()})
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(len(centroids_CD), (sum(lengths), 1), generator=generator)
    parts = {"codes": codes.to(torch.uint16)}
    segment = Segment(codec, centroids_CD.shape[1], parts, torch.tensor(lengths), live=live)
    return PackedVectors([segment])


def queries(dim: int, lengths=(4, 1, 0, 33, 70, 32)) -> list[torch.Tensor]:
    return [vectors(length, dim, seed=1 + i) for i, length in enumerate(lengths)]


def oracle(query_tokens: list[torch.Tensor], packed: PackedVectors) -> torch.Tensor:
    """Returns scores (Q, B) float64."""
    scores = torch.full((len(query_tokens), len(packed)), -torch.inf, dtype=torch.float64)
    for row in range(len(packed)):
        item_ND = packed.item(row).double()
        for number, query_MD in enumerate(query_tokens):
            if len(item_ND):
                scores[number, row] = (query_MD.double() @ item_ND.T).amax(dim=1).sum()
    return scores


def check(scores: torch.Tensor, expected: torch.Tensor, query_tokens: list[torch.Tensor]) -> None:
    for found, row, query in zip(scores.double(), expected, query_tokens, strict=True):
        torch.testing.assert_close(found, row, rtol=0, atol=TOLERANCE * max(len(query), 1))


@pytest.mark.parametrize("num_centroids", [1, 50, 65_536])
@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_equal_float64(backend, num_centroids):
    packed = pack(vectors(num_centroids, 48))
    query_tokens = queries(48)
    expected = oracle(query_tokens, packed)
    check(maxsim(query_tokens, packed, backend=backend), expected, query_tokens)
    rows = torch.tensor([0, 1, 3, 4, 6, 10, 12, 13])
    scores = maxsim(query_tokens, packed, rows=rows, backend=backend)
    check(scores, expected[:, rows], query_tokens)


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_similarities_negative(backend):
    packed = pack(vectors(40, 32, shift=-2.0))
    query_tokens = [query.abs() for query in queries(32)]
    scores = maxsim(query_tokens, packed, backend=backend)
    assert (scores[0] < 0).all()
    check(scores, oracle(query_tokens, packed), query_tokens)


@pytest.mark.parametrize("backend", BACKENDS)
def test_orthogonal_and_zero_query_tokens(backend):
    packed = pack(torch.eye(4)[:2], [2, 1])
    query = torch.tensor([[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert maxsim([query], packed, backend=backend).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("max_vectors", [None, 1, 16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_segments_prefixes_and_deleted_documents(backend, max_vectors):
    first = pack(vectors(30, 24), live=torch.tensor([0, 1, 3, 6, 11, 12, 13])).segments[0]
    second = dataclasses.replace(first, live=None)
    packed = PackedVectors([first, second])
    packed = packed if max_vectors is None else packed.prefix(max_vectors)
    query_tokens = queries(24)
    scores = maxsim(query_tokens, packed, backend=backend)
    check(scores, oracle(query_tokens, packed), query_tokens)


@pytest.mark.parametrize("backend", native.available())
def test_scores_do_not_depend_on_positions_queries_or_threads(backend, monkeypatch):
    document = pack(vectors(500, 32), [37]).segments[0]
    codes = torch.cat([document.parts["codes"]] * 300)
    lengths = torch.full((300,), 37)
    packed = PackedVectors([dataclasses.replace(document, parts={"codes": codes}, lengths=lengths)])
    query_tokens = queries(32)
    scores = maxsim(query_tokens, packed, backend=backend)
    assert (scores == scores[:, :1]).all()
    monkeypatch.setattr(native, "TASK_PAIRS", 4096)
    monkeypatch.setattr(native, "MAX_PACKED_BYTES", 1)
    torch.set_num_threads(3)
    try:
        assert maxsim(query_tokens, packed, backend=backend).equal(scores)
    finally:
        torch.set_num_threads(1)
    for query, expected in zip(query_tokens, scores, strict=True):
        assert maxsim([query], packed, backend=backend)[0].equal(expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_best_tokens(backend):
    packed = pack(vectors(50, 24))
    query_MD = torch.cat(queries(24))
    blocks = list(best_tokens(query_MD, packed, backend=backend, block_bytes=2000))
    assert len(blocks) > 1
    similarity_BM = torch.cat([similarity for _, similarity, _ in blocks])
    token_BM = torch.cat([token for _, _, token in blocks])
    for row, length in enumerate(packed.lengths.tolist()):
        if not length:
            assert torch.isneginf(similarity_BM[row]).all() and (token_BM[row] == -1).all()
            continue
        sim_MN = query_MD @ packed.item(row).T
        best_M = sim_MN.amax(dim=1)
        torch.testing.assert_close(similarity_BM[row], best_M, rtol=0, atol=TOLERANCE)
        token_M = token_BM[row].unsqueeze(1)
        found_M = sim_MN.gather(1, token_M).squeeze(1)
        torch.testing.assert_close(found_M, best_M, rtol=0, atol=2 * TOLERANCE)
        # Equal codes are ties, which resolve to the first token.
        start = int(packed.starts[row])
        codes = packed.segments[0].parts["codes"].flatten().tolist()[start : start + length]
        assert token_M.flatten().tolist() == [codes.index(codes[i]) for i in token_M]


def test_backends_are_named():
    assert backends(pack(vectors(5, 8))) == BACKENDS
