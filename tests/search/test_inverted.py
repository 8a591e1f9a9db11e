"""Inverted lists against loops over all items."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from pipeline.codecs.centroid_codes import CentroidCodes
from pipeline.search.inverted import InvertedIndex, InvertedLists
from pipeline.search.maxsim import maxsim
from pipeline.search.packed import PackedVectors, Segment
from pipeline.tokens import normalise

DIM = 24


def vectors(num: int, seed: int) -> torch.Tensor:
    return normalise(torch.randn(num, DIM, generator=torch.Generator().manual_seed(seed)))


def pack(num_centroids: int, sizes=(60, 0, 25), seed: int = 0) -> PackedVectors:
    """Returns segments of random codes; some items are deleted, have no vectors or repeat codes."""
    rng = np.random.default_rng(seed)
    codec = CentroidCodes(CentroidCodes.Spec(), {"centroids": vectors(num_centroids, seed).numpy()})
    segments = []
    for number, size in enumerate(sizes):
        lengths = rng.integers(0, 9, size) * (rng.random(size) > 0.2)
        codes = rng.integers(num_centroids, size=(lengths.sum(), 1)).astype(np.uint16)
        live = torch.from_numpy(np.flatnonzero(rng.random(size) > 0.3)) if number else None
        segments.append(
            Segment(codec, DIM, {"codes": torch.from_numpy(codes)}, torch.from_numpy(lengths), live)
        )
    return PackedVectors(segments)


def index(packed: PackedVectors, num_centroids: int) -> InvertedIndex:
    lists = [InvertedLists.build(segment, num_centroids) for segment in packed.segments]
    return InvertedIndex(packed, lists)


def codes_of(packed: PackedVectors) -> list[set[int]]:
    """Returns the codes of each item that is not deleted."""
    codes = []
    for segment, selected in packed.select():
        documents = range(len(segment.lengths)) if selected is None else selected.tolist()
        for document in documents:
            start, length = int(segment.starts[document]), int(segment.lengths[document])
            codes.append(set(segment.parts["codes"][start : start + length].flatten().tolist()))
    return codes


def test_lists_by_hand():
    codes = torch.tensor([[2], [0], [2], [2], [4]]).to(torch.uint16)
    lengths = torch.tensor([3, 0, 1, 1])
    segment = Segment(CentroidCodes(CentroidCodes.Spec()), DIM, {"codes": codes}, lengths)
    lists = InvertedLists.build(segment, 6)
    assert lists.offsets.tolist() == [0, 1, 1, 3, 3, 4, 4]
    assert lists.documents.tolist() == [0, 0, 2, 3]
    assert lists.offsets.dtype == np.int64 and lists.documents.dtype == np.int32


@pytest.mark.parametrize("max_vectors", [None, 1, 3])
@pytest.mark.parametrize("num_centroids", [1, 10, 40])
def test_probes_find_all_items_of_the_best_centroids(num_centroids, max_vectors):
    packed = pack(num_centroids)
    packed = packed if max_vectors is None else packed.prefix(max_vectors)
    inverted, item_codes = index(packed, num_centroids), codes_of(packed)
    assert len(item_codes) == len(packed)
    for seed, num_tokens in enumerate([1, 5, 0, 12]):
        query_MD = vectors(num_tokens, 10 + seed)
        sim_MC = query_MD @ packed.codec.centroids(query_MD.device).T
        for num_probes in (1, 3, 100):
            best = set(sim_MC.argsort(dim=1, descending=True)[:, :num_probes].flatten().tolist())
            expected = [row for row, codes in enumerate(item_codes) if codes & best]
            rows = inverted.probe(sim_MC, num_probes)
            assert rows.dtype == torch.int64 and rows.tolist() == expected
            scores = maxsim([query_MD], packed, rows=rows)
            assert scores.equal(maxsim([query_MD], packed)[:, rows])


def test_deletions_after_the_lists_were_built():
    packed = pack(10, sizes=(40,))
    lists = [InvertedLists.build(segment, 10) for segment in packed.segments]
    live = torch.tensor([3, 4, 17, 39])
    remaining = PackedVectors([dataclasses.replace(packed.segments[0], live=live)])
    rows = InvertedIndex(remaining, lists).probe(torch.ones(1, 10), 10)
    assert rows.tolist() == [i for i, codes in enumerate(codes_of(remaining)) if codes]


def test_memory_mapped_lists(tmp_path):
    packed = pack(10)
    mapped = []
    for number, segment in enumerate(packed.segments):
        arrays = []
        for name, array in InvertedLists.build(segment, 10)._asdict().items():
            np.save(tmp_path / f"{name}{number}.npy", array)
            arrays.append(np.load(tmp_path / f"{name}{number}.npy", mmap_mode="r"))
        mapped.append(InvertedLists(*arrays))
    sim_MC = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
    rows = InvertedIndex(packed, mapped).probe(sim_MC, 2)
    assert rows.equal(index(packed, 10).probe(sim_MC, 2)) and len(rows)


def test_codes_are_verified_before_they_are_read():
    verified = []
    segment = dataclasses.replace(
        pack(10).segments[0], verify=lambda starts, lengths: verified.append(int(lengths.sum()))
    )
    InvertedLists.build(segment, 10)
    assert verified == [segment.num_vectors]
