"""Sample of the items of an index."""

import pytest
import torch

from pipeline.config import SpecError
from pipeline.eval.recommend.sample import draw_sample
from pipeline.index.reader import IndexReader
from pipeline.search.searcher import open_index
from tests.conftest import write_index


def draw(index_uri, **options):
    index = IndexReader(index_uri)
    return draw_sample(index, index.representation("full"), **{"seed": 0, "size": 3, **options})


def test_all_items_have_their_stored_vectors(index_uri, texts):
    sample = draw(index_uri, size=100)
    assert sorted(sample.ids) == sorted(texts) and sample.num_items == len(texts)
    searcher = open_index(index_uri)
    packed = searcher.packed("full")
    stored_ids = searcher.index.dataset.to_table(columns=["item_id"])["item_id"].to_pylist()
    vectors = [v[m] for b in sample.batches for v, m in zip(b.vectors, b.mask, strict=True)]
    for item_id, vectors_ND in zip(sample.ids, vectors, strict=True):
        torch.testing.assert_close(vectors_ND.float(), packed.item(stored_ids.index(item_id)))


@pytest.mark.parametrize("codec", ["float16", "float32", "int8"])
def test_vectors_are_in_half_precision_only_if_stored_so(codec, tmp_path):
    write_index(str(tmp_path), [{"id": "full", "compressor": "none", "codec": codec}])
    sample = draw(str(tmp_path), size=100)
    expected = torch.float16 if codec == "float16" else torch.float32
    assert {batch.vectors.dtype for batch in sample.batches} == {expected}
    packed = open_index(str(tmp_path)).packed("full")
    stored = torch.cat([packed.item(row) for row in range(len(packed))])
    sampled = torch.cat([batch.vectors[batch.mask] for batch in sample.batches])
    assert torch.equal(sampled.float().sort(dim=0).values, stored.sort(dim=0).values)


@pytest.mark.parametrize("max_values", [1, 10_000, 1 << 24])
def test_batches_are_bounded(index_uri, texts, monkeypatch, max_values):
    monkeypatch.setattr("pipeline.eval.recommend.sample.MAX_BATCH_VALUES", max_values)
    sample = draw(index_uri, size=100)
    assert sum(len(batch) for batch in sample.batches) == len(texts)
    for batch in sample.batches:
        assert len(batch) == 1 or batch.vectors.numel() <= max_values


def test_judged_items_are_added(index_uri, texts):
    sample = draw(index_uri, level="parent", judged={"wing", "gone"})
    assert sample.ids.count("wing") == 2 and len(sample) == 5
    assert sample.num_items == len(texts)
    again = draw(index_uri, level="parent", judged={"wing", "gone"})
    assert again.ids == sample.ids


def test_filter(index_uri):
    assert sorted(draw(index_uri, filter="parent_id = 'heat'").ids) == ["heat/1", "heat/2"]
    with pytest.raises(SpecError, match="vectors of at least one item"):
        draw(index_uri, filter="parent_id = 'gone'")
