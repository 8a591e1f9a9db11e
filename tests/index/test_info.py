"""Tests of the typed metadata of columns against the JSON that is stored."""

from __future__ import annotations

import json
import pickle
from dataclasses import FrozenInstanceError

import pyarrow as pa
import pytest

from pipeline.config import SpecError, parse
from pipeline.index.columns import Representation, encoder_fields, representation_fields
from pipeline.index.info import (
    EncoderInfo,
    PooledInfo,
    RepresentationInfo,
    RerankInfo,
    format_versions,
    pooled_infos,
    representation_infos,
    rerank_infos,
    tap_names,
)
from pipeline.schema import FORMAT_VERSION, column_metadata, with_metadata
from pipeline.taps import Tap

#: Metadata of a representation.
STORED = {
    "format_version": FORMAT_VERSION,
    "role": "search",
    "encoder": {"name": "minilm"},
    "fingerprint": "f",
    "compressor": {"name": "hpool", "num_vectors": 4},
    "codec": {"name": "float16"},
    "artefact": None,
    "codec_artefact": None,
    "dim": 8,
    "query_dim": 8,
    "normalised": True,
    "score": "sum",
    "field": "content",
    "text": "text",
    "columns": "minilm",
    "pooled": None,
    "num_layers": None,
    "queries": ["text"],
    "positions": {},
}
ENCODER = EncoderInfo(
    spec={"name": "transcript"},
    fingerprint="f",
    dim=384,
    pooled_dim=384,
    normalised=True,
    has_spans=True,
    has_extents=True,
    prefix="minilm",
    num_layers=6,
    has_confidence=True,
)


@pytest.fixture(scope="module")
def schema() -> pa.Schema:
    """Schema of an index with content and captions, a fitted compressor and a fitted codec."""
    taps = [Tap("eos_row", layers="5")]
    fields = encoder_fields(ENCODER, keep_positions=True, keep_taps=taps)
    fields += encoder_fields(ENCODER.for_field("caption"), keep_positions=True)
    for given, artefact, codec_artefact in (
        ({"compressor": "none"}, None, None),
        ({"compressor": "none", "field": "caption"}, None, None),
        ({"compressor": {"name": "hpool", "num_vectors": 4}}, None, None),
        ({"compressor": {"name": "hpc", "num_vectors": 4, "num_centroids": 8}}, "a", None),
        ({"compressor": "none", "codec": {"name": "residual", "num_centroids": 8}}, None, "c"),
    ):
        wanted = parse(Representation, given)
        fields += representation_fields(wanted, ENCODER, artefact, codec_artefact)
    return pa.schema(fields)


def column(**changes: object) -> pa.Schema:
    """Returns a schema with one representation `r` whose metadata is changed."""
    return pa.schema([with_metadata(pa.field("r", pa.list_(pa.float16())), {**STORED, **changes})])


def test_stored_json_round_trip(schema):
    infos = representation_infos(schema)
    assert len(infos) == 5 and list(infos)[:2] == ["full", "caption_full"]
    for name, info in infos.items():
        assert info.name == name
        assert json.dumps(info.to_metadata()) == json.dumps(column_metadata(schema.field(name)))
    (info,) = representation_infos(column()).values()
    assert json.dumps(info.to_metadata()) == json.dumps(STORED)


def test_representation_infos(schema):
    infos = representation_infos(schema)
    full, caption, hpc = infos["full"], infos["caption_full"], infos["hpc_num_centroids8_4"]
    assert full.encoder == ENCODER and full.is_uncompressed and not full.is_fitted
    assert (full.field, full.text_column, full.assignment_column) == ("content", "text", None)
    assert (caption.field, caption.text_column) == ("caption", "caption")
    assert caption.pooled_column == "minilm_caption_pooled"
    assert not caption.encoder.has_extents and caption.encoder.prefix == "minilm"
    assert hpc.is_fitted and hpc.artefact == "a"
    assert (hpc.assignment_column, hpc.assignment_form) == (f"{hpc.name}_assignment", "assignment")
    assert infos["full_residual_4_num_centroids8"].codec_artefact == "c"


def test_infos_of_other_columns(schema):
    pooled = pooled_infos(schema)
    assert list(pooled) == ["minilm_pooled", "minilm_caption_pooled"]
    assert pooled["minilm_pooled"] == PooledInfo("minilm_pooled", "transcript", "f")
    assert tap_names(schema) == ["eos_row/mean/5"]
    assert rerank_infos(schema) == {}
    adapter = {"role": "rerank", "encoder": {"name": "dual"}, "adapter": {"fingerprint": "a"}}
    stored = with_metadata(pa.field("t", pa.list_(pa.float16())), {**adapter, "dim": 4})
    assert rerank_infos(pa.schema([stored])) == {"t": RerankInfo("t", "a", "dual", 4)}


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


def test_format_versions(schema):
    assert format_versions(schema) == {FORMAT_VERSION}
    assert format_versions(column(format_version=7)) == {7}


def test_dropped_columns_remain_in_the_metadata():
    positions = {"spans": "minilm_spans", "confidence": "minilm_confidence"}
    lost = column(positions=positions, pooled="minilm_pooled", assignment="r_assignment")
    info = RepresentationInfo.from_schema(lost, "r")
    assert info.positions == positions and not info.encoder.has_spans
    assert info.pooled_column == "minilm_pooled" and info.encoder.pooled_dim is None
    assert info.assignment_column == "r_assignment" and info.assignment_form is None


def test_unknown_keys_are_ignored():
    assert representation_infos(column(colour="red")) == representation_infos(column())


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"encoder": "minilm"}, "spec must be a valid dictionary, .*"),
        ({"positions": None}, "AttributeError: .*"),
        ({"dim": "wide"}, "dim must be a valid integer, .*, got 'wide'"),
        ({"compressor": "none"}, "compressor must be a valid dictionary, got 'none'"),
        ({"queries": None}, "query_kinds must be a .*"),
    ],
)
def test_rejects_malformed_metadata(changes, detail):
    with pytest.raises(
        SpecError,
        match=rf"^index must be a column with valid metadata, got 'r', which is malformed"
        rf" \({detail}\)$",
    ):
        representation_infos(column(**changes))


@pytest.mark.parametrize("key", ["field", "columns", "queries", "codec_artefact"])
def test_missing_keys_are_malformed(key):
    incomplete = {name: value for name, value in STORED.items() if name != key}
    schema = pa.schema([with_metadata(pa.field("r", pa.list_(pa.float16())), incomplete)])
    with pytest.raises(SpecError, match=f"is malformed .KeyError: '{key}'"):
        representation_infos(schema)


def test_infos_are_immutable_and_pickle(schema):
    info = representation_infos(schema)["hpool_4"]
    assert pickle.loads(pickle.dumps(info)) == info
    with pytest.raises(FrozenInstanceError):
        info.dim = 3  # type: ignore[misc]  # tests that it fails
