"""Prefixes of representations with nested vectors."""

import numpy as np
import pytest

from pipeline.compression.random import Random
from pipeline.config import SpecError
from pipeline.index.info import is_nested
from pipeline.index.reader import IndexReader
from pipeline.index.status import representation_stats


@pytest.fixture(scope="module")
def index(nested_uri) -> IndexReader:
    return IndexReader(nested_uri)


def test_prefix_of_a_nested_representation(index):
    whole, prefix = (index.representation(name) for name in ("nested_8", "nested_8@3"))
    assert (whole.name, whole.column, whole.num_vectors) == ("nested_8", "nested_8", 8)
    assert (prefix.name, prefix.column, prefix.num_vectors) == ("nested_8@3", "nested_8", 3)
    assert prefix.to_metadata() == whole.to_metadata()
    assert index.codec("nested_8@3") is index.codec("nested_8")
    assert "nested_8@3" not in index.representations()


def test_representations_with_nested_vectors(index):
    nested = [name for name, info in index.representations().items() if is_nested(info)]
    assert nested == ["nested_8", "nested_8_int8", "nested_3", "nested_3_int8", "nested_half"]


@pytest.mark.parametrize("length", ["", "0", "-1", "1.5", "03", "x", "²", "9", "1" * 5000])
def test_invalid_lengths(index, length):
    rule = "representation must be nested_8@K with an integer K from 1 to 8, its stored budget, got"
    with pytest.raises(SpecError, match=rule):
        index.representation(f"nested_8@{length}")


def test_budget_that_is_a_ratio_has_no_limit(index):
    info = index.representation("nested_half@50000")
    assert (info.num_vectors, info.ratio) == (50000, None)
    assert index.representation("nested_half").ratio == 0.5
    with pytest.raises(SpecError, match="nested_half@K with an integer K >= 1, got"):
        index.representation("nested_half@0")


def test_vectors_that_are_not_nested(index):
    rule = r"a prefix of nested_8 or .*, got 'hpool_4@2', which stores no nested vectors$"
    with pytest.raises(SpecError, match=rule):
        index.representation("hpool_4@2")
    with pytest.raises(SpecError, match=r"one of full, .*, got 'nested_9@2'.*not in the index"):
        index.representation("nested_9@2")


def test_index_without_nested_vectors(index_uri):
    rule = "must be a name without @K, got 'full@2', which stores no nested vectors"
    with pytest.raises(SpecError, match=rule):
        IndexReader(index_uri).representation("full@2")


@pytest.mark.parametrize("codec", ["", "_int8"])
def test_tokens_of_a_prefix_equal_a_smaller_column(index, codec):
    prefix, smaller = (
        list(index.tokens(name, batch_rows=3))
        for name in (f"nested_8{codec}@3", f"nested_3{codec}")
    )
    for (ids, *arrays), (expected_ids, *expected) in zip(prefix, smaller, strict=True):
        assert ids.equals(expected_ids)
        for array, other in zip(arrays, expected, strict=True):
            np.testing.assert_array_equal(array, other)


@pytest.mark.parametrize("filter", [None, "parent_id = 'wing'"])
def test_sizes_of_a_prefix_equal_a_smaller_column(index, filter):
    prefix, smaller = (
        representation_stats(index, name, filter) for name in ("nested_8@3", "nested_3")
    )
    assert prefix == smaller


def test_prefix_of_selected_tokens_has_one_assignment_per_vector(index_uri, monkeypatch):
    monkeypatch.setattr(Random, "is_nested", True)
    index = IndexReader(index_uri)
    sizes = [
        representation_stats(index, name)["bytes_assignment"] for name in ("random_4", "random_4@2")
    ]
    assert sizes == [4 * 2, 2 * 2]  # uint16
