"""Tests of the projection of items onto a plane."""

from __future__ import annotations

import numpy as np

from pipeline import Index
from pipeline.index.reader import IndexReader
from pipeline.search import projection
from pipeline.search.projection import principal_components, project_items


def test_texts_are_projected_by_their_single_vectors(index_uri):
    index = IndexReader(index_uri)
    table = project_items(index)
    columns = ["item_id", "title", "source", "modality"]
    assert table.column_names == [*columns, "x", "y"]
    stored = index.dataset.to_table([*columns, "minilm_pooled"])
    assert table.select(columns).equals(stored.select(columns))
    pooled_ND = np.stack(stored["minilm_pooled"].to_numpy()).astype(np.float64)
    expected_N2 = principal_components(pooled_ND)
    assert np.array_equal(np.stack([table["x"], table["y"]], axis=1), expected_N2)
    assert np.abs(expected_N2).max() == 1
    # The first axis has the highest variance of all directions.
    variances = np.linalg.eigvalsh(np.cov(pooled_ND.T))[::-1]
    ratio = expected_N2[:, 1].var() / expected_N2[:, 0].var()
    np.testing.assert_allclose(ratio, variances[1] / variances[0], rtol=1e-3)


def test_items_without_single_vectors(tmp_path, monkeypatch):
    """Similar items are near each other, and items without vectors are omitted."""
    random = np.random.default_rng(0)
    centres = random.standard_normal((2, 16))
    vectors = [centres[i % 2] + 0.1 * random.standard_normal((3 + i, 16)) for i in range(9)]
    index = Index(str(tmp_path / "vectors"))
    index.add([f"item {i}" for i in range(9)], [v.astype(np.float32) for v in vectors])
    monkeypatch.setattr(projection, "BATCH_ITEMS", 4)
    table = project_items(index.reader)
    assert table["item_id"].to_pylist() == [f"item {i}" for i in range(9)]
    x_N = np.array(table["x"])
    assert {*np.sign(x_N[::2])} != {*np.sign(x_N[1::2])} and np.abs(x_N).min() > 0.5
    monkeypatch.setattr(projection, "MAX_ITEMS", 3)
    assert project_items(index.reader)["item_id"].to_pylist() == ["item 0", "item 4", "item 8"]
