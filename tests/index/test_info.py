"""Tests of the typed metadata of columns against the JSON stored by an older version."""

from __future__ import annotations

import json
import pickle
from dataclasses import FrozenInstanceError
from pathlib import Path

import lance
import pyarrow as pa
import pytest

from pipeline.config import SpecError
from pipeline.index.info import (
    EncoderInfo,
    PooledInfo,
    RepresentationInfo,
    RerankInfo,
    newest_format,
    pooled_infos,
    representation_infos,
    rerank_infos,
    tap_names,
)
from pipeline.registry import COMPRESSORS
from pipeline.schema import column_metadata, with_metadata
from pipeline.taps import Tap

OLD = Path(__file__).parent / "fixtures/old_index"

#: Metadata of a representation as stored by the first versions.
FIRST = {
    "role": "search",
    "encoder": {"name": "minilm"},
    "fingerprint": "f",
    "compressor": {"name": "hpool", "num_vectors": 4},
    "codec": {"name": "float16"},
    "artefact": None,
    "dim": 8,
    "normalised": True,
    "pooled": None,
    "positions": {},
}


@pytest.fixture(scope="module")
def schema() -> pa.Schema:
    """Schema of the old index of texts."""
    return lance.dataset(str(OLD / "texts/items.lance")).schema


def column(**changes: object) -> pa.Schema:
    """Returns a schema with one representation `r` whose metadata is changed."""
    return pa.schema([with_metadata(pa.field("r", pa.list_(pa.float16())), {**FIRST, **changes})])


def test_stored_json_round_trip(schema):
    infos = representation_infos(schema)
    assert len(infos) == 8 and list(infos)[:2] == ["full", "caption_full"]
    for name, info in infos.items():
        assert info.name == name
        stored = column_metadata(schema.field(name))
        former_names = {"field": "of", "assignment": "support"}
        metadata = {former_names.get(key, key): value for key, value in info.to_metadata().items()}
        assert json.dumps(metadata) == json.dumps(stored)
        present = with_metadata(schema.field(name), info.to_metadata())
        columns = [present, *(column for column in schema if column.name != name)]
        assert RepresentationInfo.from_schema(pa.schema(columns), name) == info


def test_representation_infos(schema):
    infos = representation_infos(schema)
    full, caption, hpc = infos["full"], infos["caption_full"], infos["hpc_num_centroids8_4"]
    assert full.encoder == EncoderInfo(
        spec=full.encoder.spec,
        fingerprint="d68843c85abab758",
        dim=384,
        pooled_dim=384,
        normalised=True,
        has_spans=True,
        has_extents=True,
        prefix="minilm",
        num_layers=6,
        query_kinds=("text",),
        has_confidence=True,
    )
    assert full.encoder.name == "transcript" and full.is_uncompressed and not full.is_fitted
    assert (full.field, full.text_column, full.assignment_column) == ("content", "text", None)
    assert (caption.field, caption.text_column) == ("caption", "caption")
    assert caption.pooled_column == "minilm_caption_pooled"
    assert not caption.encoder.has_extents and caption.encoder.prefix == "minilm"
    assert hpc.is_fitted and hpc.artefact == "b84971aa32746cb5"
    assert (hpc.assignment_column, hpc.assignment_form) == (f"{hpc.name}_support", "assignment")
    assert infos["full_residual_2_num_centroids8"].codec_artefact == "a3b71ce7b7d50494"


def test_infos_of_other_columns(schema):
    pooled = pooled_infos(schema)
    assert list(pooled) == ["minilm_pooled", "minilm_caption_pooled"]
    first = pooled["minilm_pooled"]
    encoder = representation_infos(schema)["full"].encoder
    assert first == PooledInfo("minilm_pooled", encoder.name, encoder.fingerprint)
    assert tap_names(schema) == ["eos_row/mean/5"]
    assert rerank_infos(schema) == {}
    adapter = {"role": "rerank", "encoder": {"name": "dual"}, "adapter": {"fingerprint": "a"}}
    for metadata, expected in (
        ({**adapter, "dim": 4}, RerankInfo("t", "a", "dual", 4)),
        ({"role": "rerank"}, RerankInfo("t", "unknown", None, None)),
    ):
        stored = with_metadata(pa.field("t", pa.list_(pa.float16())), metadata)
        assert rerank_infos(pa.schema([stored])) == {"t": expected}


def test_encoder_columns():
    info = EncoderInfo({"name": "minilm"}, "f", 8, 4, True, True, True, "own", has_confidence=True)
    assert (info.pooled_column, list(info.position_types)) == (
        "own_pooled",
        ["spans", "extents", "confidence"],
    )
    assert info.tap_column(Tap("eos_row", "mean", "5")) == "own_eos_row_mean_5_tap"
    caption = info.for_field("caption")
    assert (caption.pooled_column, list(caption.position_types)) == (
        "own_caption_pooled",
        ["spans"],
    )
    assert caption.position_column("spans") == "own_caption_spans"
    assert info.for_field("content") is info


def test_keys_missing_in_the_first_versions():
    info = RepresentationInfo.from_schema(column(), "r")
    assert (info.field, info.text_column, info.codec_artefact) == ("content", "text", None)
    encoder = info.encoder
    assert (encoder.prefix, encoder.dim, encoder.num_layers) == ("minilm", 8, None)
    assert encoder.query_kinds == ("text",) and encoder.pooled_dim is None
    vectors = RepresentationInfo.from_schema(column(encoder={"name": "precomputed"}), "r")
    assert vectors.encoder.query_kinds == ()
    assert newest_format(column()) == 0 and newest_format(column(format_version=7)) == 7


def test_former_agc_is_attention_clustering():
    former = {"name": "agc", "num_vectors": 4, "saliency": "eos_row/mean/last", "reading": "paper"}
    present = {**former, "name": "attention_clustering"}
    info = RepresentationInfo.from_schema(column(compressor=former), "r")
    assert info.compressor == present
    assert COMPRESSORS.resolve(info.compressor).name == "attention_clustering"
    adaptive = {"name": "adaptive", "num_vectors": 4, "method": former}
    info = RepresentationInfo.from_schema(column(compressor=adaptive), "r")
    assert info.compressor == {**adaptive, "method": present}
    trained = {"name": "agc", "num_vectors": 4}
    assert RepresentationInfo.from_schema(column(compressor=trained), "r").compressor == trained


def test_dropped_columns_remain_in_the_metadata():
    positions = {"spans": "minilm_spans", "confidence": "minilm_confidence"}
    lost = column(positions=positions, pooled="minilm_pooled", assignment="r_support")
    info = RepresentationInfo.from_schema(lost, "r")
    assert info.positions == positions and not info.encoder.has_spans
    assert info.pooled_column == "minilm_pooled" and info.encoder.pooled_dim is None
    assert info.assignment_column == "r_support" and info.assignment_form is None


def test_unknown_keys_are_ignored():
    assert representation_infos(column(colour="red")) == representation_infos(column())


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"encoder": {}}, "KeyError: 'name'"),
        ({"encoder": "minilm"}, "TypeError: .*"),
        ({"positions": None}, "AttributeError: .*"),
        ({"dim": "wide"}, "dim must be an integer"),
        ({"compressor": "none"}, "compressor must be a mapping"),
    ],
)
def test_rejects_malformed_metadata(changes, detail):
    with pytest.raises(
        SpecError,
        match=rf"^index must be a column with valid metadata, got 'r', which is malformed"
        rf" \({detail}\)$",
    ):
        representation_infos(column(**changes))


def test_infos_are_immutable_and_pickle(schema):
    info = representation_infos(schema)["hpool_4"]
    assert pickle.loads(pickle.dumps(info)) == info
    with pytest.raises(FrozenInstanceError):
        info.dim = 3  # type: ignore[misc]  # tests that it fails
