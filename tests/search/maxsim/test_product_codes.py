"""Scores of product codes at all levels of the library, against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pipeline.compression.codecs.product_codes import ProductCodes
from pipeline.search import native
from pipeline.search.maxsim import backends, best_tokens, maxsim
from pipeline.search.packed import PackedVectors, Segment
from tests.search.maxsim.test_centroid_codes import BACKENDS, LENGTHS, oracle, queries, vectors

#: Rounding error of the sum of similarities in the int16 table of the library.
TOLERANCE = 2e-4


def pack(num_parts: int, num_centroids: int, size: int, lengths=LENGTHS, live=None, dim=None):
    """Returns random codes of vectors with `dim` dimensions, by default `num_parts * size`."""
    centroids_TS = vectors(num_parts * num_centroids, size, seed=7) / num_parts**0.5
    centroids = centroids_TS.view(num_parts, num_centroids, size).numpy()
    codec = ProductCodes(ProductCodes.Spec(), {"centroids": centroids})
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(num_centroids, (sum(lengths), num_parts), generator=generator)
    parts = {"codes": codes.to(torch.uint8)}
    segment = Segment(codec, dim or num_parts * size, parts, torch.tensor(lengths), live=live)
    return PackedVectors([segment])


def check(scores: torch.Tensor, expected: torch.Tensor, query_tokens: list[torch.Tensor]) -> None:
    for found, row, query in zip(scores.double(), expected, query_tokens, strict=True):
        torch.testing.assert_close(found, row, rtol=0, atol=TOLERANCE * max(len(query), 1))


@pytest.mark.parametrize(
    ("num_parts", "num_centroids", "size", "dim"),
    [(16, 256, 8, 128), (3, 20, 5, 13), (1, 1, 6, 6), (12, 200, 2, 24)],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_equal_float64(backend, num_parts, num_centroids, size, dim):
    packed = pack(num_parts, num_centroids, size, dim=dim)
    query_tokens = queries(dim)
    expected = oracle(query_tokens, packed)
    check(maxsim(query_tokens, packed, backend=backend), expected, query_tokens)
    rows = torch.tensor([0, 1, 3, 4, 6, 10, 12, 13])
    scores = maxsim(query_tokens, packed, rows=rows, backend=backend)
    check(scores, expected[:, rows], query_tokens)


@pytest.mark.parametrize("backend", BACKENDS)
def test_largest_sums_and_zero_tokens(backend):
    """All parts of a vector have the largest similarity, whose sum must not overflow."""
    codec = ProductCodes(ProductCodes.Spec(), {"centroids": torch.eye(64)[:, None, :1].numpy()})
    codec.artefact["centroids"][:] = 1.0
    parts = {"codes": torch.zeros(2, 64, dtype=torch.uint8)}
    packed = PackedVectors([Segment(codec, 64, parts, torch.tensor([2]))])
    query = torch.stack([torch.full((64,), 0.7), torch.full((64,), -0.3), torch.zeros(64)])
    scores = [maxsim([token], packed, backend=backend).item() for token in query.split(1)]
    assert scores == pytest.approx([0.7 * 64, -0.3 * 64, 0], rel=2e-3)


@pytest.mark.parametrize("max_vectors", [None, 1, 16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_segments_prefixes_and_deleted_documents(backend, max_vectors):
    first = pack(4, 30, 6, live=torch.tensor([0, 1, 3, 6, 11, 12, 13])).segments[0]
    packed = PackedVectors([first, dataclasses.replace(first, live=None)])
    packed = packed if max_vectors is None else packed.prefix(max_vectors)
    query_tokens = queries(24)
    scores = maxsim(query_tokens, packed, backend=backend)
    check(scores, oracle(query_tokens, packed), query_tokens)


@pytest.mark.parametrize("backend", BACKENDS)
def test_best_tokens(backend):
    packed = pack(3, 3, 8)  # few codes, so that there are ties
    query_MD = torch.cat(queries(24))
    blocks = list(best_tokens(query_MD, packed, backend=backend))
    similarity_BM = torch.cat([similarity for _, similarity, _ in blocks])
    token_BM = torch.cat([token for _, _, token in blocks])
    codes = packed.segments[0].parts["codes"].tolist()
    for row, length in enumerate(packed.lengths.tolist()):
        if not length:
            assert torch.isneginf(similarity_BM[row]).all() and (token_BM[row] == -1).all()
            continue
        sim_MN = query_MD @ packed.item(row).T
        best_M = sim_MN.amax(dim=1)
        torch.testing.assert_close(similarity_BM[row], best_M, rtol=0, atol=TOLERANCE)
        found_M = sim_MN.gather(1, token_BM[row].unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(found_M, best_M, rtol=0, atol=2 * TOLERANCE)
        start = int(packed.starts[row])
        item_codes = codes[start : start + length]  # equal codes resolve to the first token
        assert token_BM[row].tolist() == [item_codes.index(item_codes[i]) for i in token_BM[row]]


def test_backends_are_named():
    assert backends(pack(2, 5, 4)) == ("torch", *native.available())
