"""Tests of precomputed vectors."""

import numpy as np
import pyarrow as pa
import pytest

from pipeline import config
from pipeline.config import SpecError
from pipeline.encoders.precomputed import Precomputed
from pipeline.schema import vectors_type

ITEMS = [[[3.0, 4.0], [0.0, 2.0]], [[1.0, 0.0]], None, []]


def build(**fields) -> Precomputed:
    return Precomputed(config.parse(Precomputed.Spec, {"dim": 2, "label": "mine", **fields}))


def table(items, type=None) -> pa.Table:
    return pa.table({"vectors": pa.array(items, type or vectors_type(2, pa.float32()))})


def encode_vectors(encoder, items: pa.Table) -> dict[int, list]:
    return {
        int(row): batch.vectors[i][batch.mask[i]].tolist()
        for rows, batch in encoder.encode(items)
        for i, row in enumerate(rows)
    }


def test_normalises_vectors():
    expected = {0: [[0.6, 0.8], [0.0, 1.0]], 1: [[1.0, 0.0]], 2: [], 3: []}
    result = encode_vectors(build(), table(ITEMS))
    assert {row: np.round(vectors, 6).tolist() for row, vectors in result.items()} == expected


@pytest.mark.parametrize("value_type", [pa.float16(), pa.float32(), pa.float64()])
def test_returns_vectors_unchanged_without_normalisation(value_type):
    raw = build(normalise=False)
    assert not raw.normalised
    result = encode_vectors(raw, table(ITEMS, vectors_type(2, value_type)))
    assert result == {row: vectors or [] for row, vectors in enumerate(ITEMS)}


def test_reads_sliced_and_chunked_tables():
    whole = pa.concat_tables([table(ITEMS), table(ITEMS)])
    result = encode_vectors(build(normalise=False), whole.slice(1, 5))
    assert result == {i: (ITEMS * 2)[i + 1] or [] for i in range(5)}


def test_batches_respect_the_token_budget():
    items = table([[[1.0, 0.0]] * (i % 7 + 1) for i in range(50)])
    batches = list(build(max_batch_tokens=12).encode(items))
    assert all(batch.mask.numel() <= 12 for _, batch in batches)
    assert sorted(np.concatenate([rows for rows, _ in batches])) == list(range(50))


@pytest.mark.parametrize(
    "type", [vectors_type(3, pa.float32()), vectors_type(2, pa.int32()), pa.list_(pa.float32())]
)
def test_rejects_other_widths_and_types(type):
    with pytest.raises(
        SpecError,
        match=r"must be list<fixed_size_list<float>\[2\]>"
        r" \(dim=2\), got ",
    ):
        list(build().encode(table([None], type)))


def test_rejects_null_vectors():
    with pytest.raises(SpecError, match="^vectors must be "):
        list(build().encode(table([[[1.0, 0.0], None]])))


def test_rejects_text_queries():
    encoder = build()
    with pytest.raises(ValueError, match="query must be query vectors, got "):
        encoder.encode_queries(["lift"])


def test_fingerprint_depends_on_label_width_and_normalisation():
    reference = build().fingerprint
    assert build(max_batch_tokens=5).fingerprint == reference
    others = [build(label="other"), build(dim=3), build(normalise=False)]
    assert len({reference, *(other.fingerprint for other in others)}) == 4


@pytest.mark.parametrize("field", ["dim", "label"])
def test_required_fields(field):
    fields = {"dim": 2, "label": "mine"}
    del fields[field]
    with pytest.raises(SpecError, match=f"field '{field}' is required"):
        Precomputed(config.parse(Precomputed.Spec, fields))
