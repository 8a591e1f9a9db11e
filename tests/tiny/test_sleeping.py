"""Tests of the sleeping encoder."""

import time

import pyarrow as pa
import pytest
import torch

from pipeline.config import SpecError
from tests.tiny.sleeping import Sleeping


def test_sleeps_once_per_batch():
    encoder = Sleeping(Sleeping.Spec(seconds=0.05, batch_size=4, num_tokens=5, dim=8))
    start = time.perf_counter()
    batches = list(encoder.encode(pa.table({"item_id": [str(i) for i in range(10)]})))
    assert 0.15 <= time.perf_counter() - start < 1
    assert [rows.tolist() for rows, _ in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_default_item_has_264_kilobytes():
    encoder = Sleeping(Sleeping.Spec(seconds=0))
    _, batch = next(encoder.encode(pa.table({"item_id": ["a", "b"]})))
    assert batch.vectors.nbytes == 2 * 263_680
    assert not torch.equal(batch.vectors[0], batch.vectors[1])


def test_vectors_depend_only_on_the_id():
    encoder = Sleeping(Sleeping.Spec(seconds=0, num_tokens=6, dim=4))
    _, one = next(encoder.encode(pa.table({"item_id": ["x", "y"]})))
    _, other = next(
        Sleeping(encoder.spec.model_copy(update={"batch_size": 1})).encode(
            pa.table({"item_id": ["y"]})
        )
    )
    assert torch.equal(one.vectors[1], other.vectors[0])


def test_queries_have_one_vector_per_word():
    encoder = Sleeping(Sleeping.Spec())
    queries = encoder.encode_queries(["wing lift", "lift"])
    assert queries.token_texts == [["wing", "lift"], ["lift"]]
    assert torch.equal(queries.tokens.vectors[0, 1], queries.tokens.vectors[1, 0])
    with pytest.raises(SpecError, match="^query must be "):
        encoder.encode_queries([" "])
