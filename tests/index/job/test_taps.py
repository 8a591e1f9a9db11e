"""Tests of attention statistics in the index job and in recompression."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline import config
from pipeline.config import SpecError
from pipeline.eval.diagnose import uncompressed_representation
from pipeline.index import add, job, recompress
from pipeline.index.add import Progress
from pipeline.index.reader import IndexReader
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.schema import column_metadata
from pipeline.search.searcher import open_index
from tests.conftest import CRANFIELD, TEXTS
from tests.tiny import SLEEPING

pytestmark = pytest.mark.usefixtures("cluster")

METHODS = [
    {"name": "sap", "num_vectors": 4},
    {"name": "sap", "num_vectors": 4, "heads": "max", "layers": [1, -1]},
    {"name": "eos", "ratio": 0.2},
    {"name": "adaptive_eos", "ratio": 0.2},
    {"name": "attention_clustering", "num_vectors": 4, "saliency": "column_sums/max/last"},
    {"name": "adaptive", "num_vectors": 4, "method": "attention_clustering"},
    {"name": "hpc", "num_vectors": 4, "num_centroids": 8, "binary": True},
]
REPRESENTATIONS = [{"compressor": method} for method in METHODS]
IDS = [
    "sap_4",
    "sap_max_layers1_1_4",
    "eos_20pct",
    "adaptive_eos_20pct",
    "attention_clustering_column_sums_max_last_4",
    "adaptive_attention_clustering_4",
    "hpc_num_centroids8_binary_4",
]
STORED_TAPS = [
    "column_sums/mean/0.4-0.6",
    "column_sums/max/1,-1",
    "eos_row",
    "pooled_row/mean/last",
]


@pytest.fixture(scope="module")
def collection(tmp_path_factory) -> Path:
    """Folder of a collection of short texts and eight abstracts."""
    folder = tmp_path_factory.mktemp("collection")
    with (CRANFIELD / "corpus.jsonl").open(encoding="utf-8") as file:
        abstracts = [json.loads(line)["text"] for line in itertools.islice(file, 8)]
    texts = {**TEXTS, **{f"abstract-{i}": text for i, text in enumerate(abstracts)}}
    lines = [json.dumps({"_id": i.replace("/", "-"), "text": t}) for i, t in texts.items()]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    return folder


def index(uri: Path, collection: Path, *representations, resources=None, **fields) -> None:
    given = {
        "index": str(uri),
        "source": {"name": "text", "path": str(collection)},
        "encoder": {"name": "minilm", "window": 64, "overlap_tokens": 16},
        "representations": [{"compressor": "none"}, *representations],
        "unit_items": 6,
        "fragment_items": 6,
        **fields,
    }
    spec = config.parse(IndexSpec, given)
    resources = config.parse(IndexResources, resources or {})
    job.run(spec, resources, job="1", report=lambda line: None)


def recompressed(uri: Path, *representations) -> Progress:
    given = {"index": str(uri), "representations": list(representations)}
    spec = config.parse(recompress.RecompressSpec, given)
    return add.run(
        recompress.Recompression(spec, recompress.RecompressResources()),
        job="2",
        report=lambda line: None,
    )


def rows(uri: Path) -> dict[str, dict]:
    return {row["item_id"]: row for row in IndexReader(str(uri)).dataset.to_table().to_pylist()}


@pytest.fixture(scope="module")
def at_once(cluster, tmp_path_factory, collection) -> Path:
    """Index with all methods, without stored attention statistics."""
    uri = tmp_path_factory.mktemp("at_once")
    index(uri, collection, *REPRESENTATIONS)
    return uri


def test_all_methods_have_a_column(at_once):
    schema = IndexReader(str(at_once)).dataset.schema
    assert [name for name in schema.names if name in IDS] == IDS
    assert not [name for name in schema.names if name.endswith("_tap")]
    for item_id, row in rows(at_once).items():
        num_tokens = len(row["full"])
        for name in ("sap_4", "sap_max_layers1_1_4", "attention_clustering_column_sums_max_last_4"):
            assert len(row[name]) == min(4, num_tokens), item_id
        assert len(row["eos_20pct"]) == max(1, num_tokens // 5)
        tokens = np.array(row["full"], dtype=np.float64)
        expected = tokens[row["sap_4_assignment"]]
        np.testing.assert_allclose(np.array(row["sap_4"], np.float64), expected, atol=1e-3)
    assert column_metadata(schema.field("adaptive_eos_20pct"))["artefact"]


def test_binary_vectors_are_searched_with_binary_queries(at_once):
    name = "hpc_num_centroids8_binary_4"
    searcher = open_index(str(at_once))
    info = searcher.index.representation(name)
    assert (info.dim, info.encoder.dim) == (3, 384)
    text = TEXTS["shell/1"]
    (hits,) = searcher.search([text], name, k=16)
    (query,) = searcher.queries([text], name).tokens
    assert query.shape[1] == 3
    torch.testing.assert_close(query.abs(), torch.full_like(query, 3**-0.5))
    bits = {i: np.array(row[name], np.float32) for i, row in rows(at_once).items()}
    scores = {i: float((query.numpy() @ b.T).max(axis=1).sum()) for i, b in bits.items()}
    for hit in hits:
        assert hit.score == pytest.approx(scores[hit.item_id], abs=1e-2)
    assert (
        uncompressed_representation(searcher.index, name) is None
    )  # the scores of the two are not comparable
    assert uncompressed_representation(searcher.index, "sap_4") == "full"


@pytest.mark.heavy
def test_separate_compression_actors(tmp_path, collection, at_once):
    resources = {"compress": {"num_cpus": 0.5}}
    index(tmp_path / "apart", collection, *REPRESENTATIONS, resources=resources)
    actual = rows(tmp_path / "apart")
    for item_id, row in rows(at_once).items():
        assert {name: actual[item_id][name] for name in IDS} == {name: row[name] for name in IDS}


@pytest.mark.heavy
def test_recompression_from_stored_attention_statistics(tmp_path, collection, at_once):
    uri = tmp_path / "index"
    index(uri, collection, keep_taps=STORED_TAPS)
    schema = IndexReader(str(uri)).dataset.schema
    assert [name for name in schema.names if name.endswith("_tap")] == [
        "minilm_column_sums_max_1_tap",
        "minilm_column_sums_max_5_tap",
        "minilm_column_sums_mean_2_tap",
        "minilm_column_sums_mean_3_tap",
        "minilm_eos_row_mean_5_tap",
        "minilm_pooled_row_mean_5_tap",
    ]
    assert column_metadata(schema.field("minilm_eos_row_mean_5_tap"))["tap"] == "eos_row/mean/5"
    assert recompressed(uri, *REPRESENTATIONS).rows == 16
    actual = rows(uri)
    for item_id, row in rows(at_once).items():
        assert len(actual[item_id]["minilm_eos_row_mean_5_tap"]) == len(row["full"])
        for name in IDS:
            vectors = np.array(actual[item_id][name], dtype=np.float64)
            if name.startswith(("adaptive", "hpc")):  # fitted on another sample
                continue
            np.testing.assert_allclose(vectors, np.array(row[name], dtype=np.float64), atol=2e-3)
            assert actual[item_id][f"{name}_assignment"] == row[f"{name}_assignment"]

    index(
        uri, collection, *REPRESENTATIONS, keep_taps=STORED_TAPS[:2]
    )  # fewer columns: nothing to do
    with pytest.raises(
        SpecError,
        match="keep_taps must be an attention statistic that the index stores, got"
        " 'eos_row/mean/0', which can only be added while the index is empty",
    ):
        index(uri, collection, *REPRESENTATIONS, keep_taps=["eos_row/mean/0"])
    with pytest.raises(SpecError) as error:
        recompressed(uri, {"compressor": {"name": "sap", "num_vectors": 4, "layers": [0]}})
    assert str(error.value) == (
        "representations.sap_layers0_4 must be an attention statistic that the index stores ("
        "column_sums/max/1, column_sums/max/5, column_sums/mean/2,"
        " column_sums/mean/3, eos_row/mean/5, pooled_row/mean/5), got"
        " 'column_sums/mean/0'; index with `keep_taps: [column_sums/mean/all]` to store it"
    )
    assert "sap_layers0_4" not in IndexReader(str(uri)).dataset.schema.names


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"encoder": {"class": SLEEPING}},
            "representations.sap_4 must be an attention statistic that the encoder provides"
            " (none), got 'column_sums/mean/0.4-0.6', which is not provided by the encoder",
        ),
        (
            {"encoder": {"name": "minilm", "pooling": "none"}, "keep_taps": ["pooled_row"]},
            "keep_taps must be an attention statistic that the encoder provides"
            " (column_sums, eos_row), got 'pooled_row/mean/last', which is not provided by the"
            " encoder minilm",
        ),
        (
            {"keep_taps": ["eos_row/mean/6"]},
            "keep_taps.layers must be from -6 to 5 (the model has 6 layers), got 6",
        ),
        (
            {"keep_taps": ["rows"]},
            "keep_taps[0] must be STATISTIC/HEADS/LAYERS with ",
        ),
    ],
)
def test_rejects_unavailable_attention_statistics(tmp_path, collection, fields, message):
    with pytest.raises(SpecError) as error:
        index(tmp_path / "index", collection, REPRESENTATIONS[0], **fields)
    assert str(error.value).startswith(message)
    assert not (tmp_path / "index").exists()
