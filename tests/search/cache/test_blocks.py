"""Copies of fragments in one block of memory, which are scored together."""

from __future__ import annotations

import lance
import pytest
import torch

from pipeline.compression.codecs.int8 import Int8
from pipeline.search import cache
from pipeline.search.maxsim import maxsim
from pipeline.search.packed import PackedVectors, Segment, join_adjacent
from pipeline.search.searcher import open_index
from pipeline.tokens import normalise
from tests.bench.maxsim_index import COLUMN, FRAGMENT_ITEMS, write_index

CODEC, DIM = Int8(Int8.Spec()), 8


def segment(lengths: list[int], live: list[int] | None = None) -> Segment:
    values = normalise(torch.randn(sum(lengths), DIM))
    parts = CODEC.quantise(values)
    indices = None if live is None else torch.tensor(live)
    return Segment(CODEC, DIM, parts, torch.tensor(lengths), indices)


def copies(segments: list[Segment], reserved: list[Segment]) -> list[Segment]:
    block = cache._Block(reserved, torch.device("cpu"))
    copied = (block.copy(each) for each in segments)
    return [
        Segment(CODEC, DIM, copy.parts, copy.lengths, each.live)
        for copy, each in zip(copied, segments, strict=True)
    ]


@pytest.mark.parametrize("has_deleted", [False, True])
def test_joined_copies_have_the_scores_of_their_segments(has_deleted):
    torch.manual_seed(0)
    segments = [segment([2, 0, 3]), segment([1, 4], [1] if has_deleted else None), segment([2])]
    (joined,) = join_adjacent(copies(segments, segments))
    queries = [normalise(torch.randn(3, DIM)), normalise(torch.randn(1, DIM))]
    expected = PackedVectors(segments)
    packed = PackedVectors([joined])
    for rows in (None, torch.tensor([0, 3, len(expected) - 1])):
        found = maxsim(queries, packed, rows=rows)
        assert torch.equal(found, maxsim(queries, expected, rows=rows))
    assert torch.equal(packed.item(len(packed) - 1), expected.item(len(expected) - 1))
    assert (joined.live is not None) == has_deleted


def test_segments_elsewhere_are_not_joined():
    segments = [segment([2]), segment([1, 1]), segment([3])]
    assert [len(each.lengths) for each in join_adjacent(segments)] == [1, 2, 1]
    # Memory for two of three.
    assert [len(each.lengths) for each in join_adjacent(copies(segments, segments[:2]))] == [3, 1]
    first, second, third = copies(segments, segments)
    assert len(join_adjacent([second, first, third])) == 3
    assert len(join_adjacent([first, third])) == 2
    assert join_adjacent([]) == []


@pytest.mark.gpu
def test_fragments_of_an_index_are_one_segment_and_shared_by_its_versions(tmp_path, monkeypatch):
    monkeypatch.setenv("MAXRAY_CACHE", str(tmp_path / "cache"))
    uri = str(tmp_path / "index")
    write_index(uri, 2 * FRAGMENT_ITEMS + 10, 8, 64)
    first = open_index(uri, device="cuda")
    (segment,) = first.scorer.packed(COLUMN).segments
    lance.dataset(f"{uri}/items.lance").delete("item_id = '000000003'")
    second = open_index(uri, device="cuda")
    before = torch.cuda.memory_allocated()
    (other,) = second.scorer.packed(COLUMN).segments
    assert other.parts["values"].data_ptr() == segment.parts["values"].data_ptr()
    assert torch.cuda.memory_allocated() - before < segment.parts["values"].nbytes / 2
    query = normalise(torch.randn(4, 64)).numpy()
    for index in (first, second):
        expected = open_index(uri, index.index.version).rank([query], COLUMN, k=20)[0]
        found = index.rank([query], COLUMN, k=20)[0]
        assert found.item_ids == expected.item_ids
        assert found.scores == pytest.approx(expected.scores, abs=1e-4)
