"""Tests of indexes with the trained compressors AGC, MemTok and SeqResize."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import config
from pipeline.compression import Compressor
from pipeline.compression.seqresize import SequenceMLP
from pipeline.config import SpecError
from pipeline.encoders.appended import AppendedTokens
from pipeline.encoders.trained import SUBFOLDER, weight_hashes, write_trained_compressor
from pipeline.index import add, job, recompress
from pipeline.index.columns import Representation
from pipeline.index.reader import IndexReader
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.index.status import status
from pipeline.index.trained import check_compressors
from pipeline.registry import COMPRESSORS, ENCODERS
from pipeline.search.maps import similarity_map
from pipeline.search.searcher import open_index
from pipeline.taps import Tap
from tests.conftest import TEXTS

NUM_TOKENS = 3
ENCODER = {"name": "minilm"}
SIZES = {"num_vectors": 4, "sequence_length": 12, "hidden_size": 5}


def write_folder(
    folder: Path, *, seed: int = 0, dim: int = 384, weights: Sequence[str] = (), **sizes: Any
) -> str:
    """Writes the folder of a training run of SeqResize with appended tokens."""
    spec = ENCODERS.resolve(ENCODER)
    sizes = {**SIZES, **sizes}
    torch.manual_seed(seed)
    folder.mkdir(exist_ok=True)
    write_trained_compressor(
        folder,
        config.dump(COMPRESSORS.resolve({"name": "seqresize", **sizes})),
        "minilm",
        list(weights) or weight_hashes(ENCODERS.load("minilm"), spec),
        dim,
        AppendedTokens(0.1 * torch.randn(NUM_TOKENS, 384)),
        SequenceMLP(
            sizes["sequence_length"], sizes["hidden_size"], sizes["num_vectors"], bias=False
        ),
    )
    return str(folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> str:
    """Folder of a training run."""
    return write_folder(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def collection(tmp_path_factory) -> str:
    """Folder of a collection of short texts."""
    folder = tmp_path_factory.mktemp("collection")
    lines = [json.dumps({"_id": i.replace("/", "-"), "text": t}) for i, t in TEXTS.items()]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    return str(folder)


def representations(trained: str) -> list[dict[str, Any]]:
    seqresize = {"name": "seqresize", **SIZES, "weights": trained}
    return [
        {"compressor": "none", "codec": "float32"},
        {"compressor": "memtok", "codec": "float32"},
        {"compressor": {"name": "agc", "num_vectors": 4}, "codec": "float32"},
        {"compressor": {"name": "agc", "num_vectors": 4, "reading": "code"}, "codec": "float32"},
        {"compressor": seqresize, "codec": "float32"},
        {
            "compressor": seqresize,
            "codec": {"name": "residual", "num_centroids": 4},
            "id": "seqresize_4_residual",
        },
    ]


def index_spec(uri: Path, collection: str, wanted: list[dict[str, Any]], **fields: Any):
    given = {
        "index": str(uri),
        "source": {"name": "text", "path": collection},
        "encoder": ENCODER,
        "representations": wanted,
        **fields,
    }
    return config.parse(IndexSpec, given)


def run(spec: IndexSpec, **resources: Any) -> None:
    profile = config.parse(IndexResources, resources)
    job.run(spec, profile, job="1", report=lambda line: None)


def recompressed(uri: str, *wanted: dict[str, Any]) -> None:
    given = {"index": uri, "source": "full_float32", "representations": list(wanted)}
    spec = config.parse(recompress.RecompressSpec, given)
    add.run(
        recompress.Recompression(spec, recompress.RecompressResources()),
        job="2",
        report=lambda line: None,
    )


def rows(uri: str) -> dict[str, dict[str, Any]]:
    return {row["item_id"]: row for row in IndexReader(uri).dataset.to_table().to_pylist()}


@pytest.fixture(scope="module")
def indexed(cluster, tmp_path_factory, collection, trained) -> str:
    """Index with all trained compressors and the stored saliency of AGC."""
    uri = tmp_path_factory.mktemp("indexed")
    encoder = {**ENCODER, "appended_tokens": trained}
    keep_taps = ["appended_rows/mean/last"]
    wanted = representations(trained)
    run(index_spec(uri, collection, wanted, encoder=encoder, keep_taps=keep_taps))
    return str(uri)


def compressors(trained: str) -> dict[str, Compressor[Any]]:
    """Returns the compressors of the float32 columns, by id."""
    module = SequenceMLP(SIZES["sequence_length"], SIZES["hidden_size"], 4, bias=False)
    from safetensors.numpy import load_file

    weights = load_file(Path(trained, SUBFOLDER, "compressor.safetensors"))
    assert weights.keys() == module.state_dict().keys()
    build = COMPRESSORS.build
    return {
        "memtok_float32": build(COMPRESSORS.resolve("memtok")),
        "agc_4_float32": build(COMPRESSORS.resolve({"name": "agc", "num_vectors": 4})),
        "seqresize_4_float32": build(COMPRESSORS.resolve({"name": "seqresize", **SIZES}), weights),
    }


def test_columns_equal_the_compressors(indexed, trained):
    spec = ENCODERS.resolve({**ENCODER, "appended_tokens": trained})
    stored = rows(indexed)
    items = IndexReader(indexed).dataset.to_table(columns=["item_id", "text"])
    tap = Tap("appended_rows", layers="5")
    for numbers, batch in ENCODERS.build(spec).encode(items, [tap]):
        batch.taps["appended_rows/mean/last"] = batch.taps.pop(tap.name)
        for name, compressor in compressors(trained).items():
            with torch.no_grad():
                result = compressor.compress(batch)
            for i, number in enumerate(numbers):
                row = stored[items["item_id"][int(number)].as_py()]
                expected = result.vectors[i, result.mask[i]].numpy()
                np.testing.assert_allclose(np.array(row[name]), expected, atol=1e-5)
    for row in stored.values():
        assert len(row["memtok_float32"]) == 3 and len(row["seqresize_4_float32"]) == 4
        assert len(row["seqresize_4_residual"]) == 4
    schema = IndexReader(indexed).schema
    assert "agc_4_float32_assignment" in schema.names and "agc_code_4_float32" in schema.names
    assert not {"memtok_float32_assignment", "seqresize_4_float32_assignment"} & set(schema.names)


def test_metadata_has_the_hash_of_the_weights(indexed, trained):
    index = IndexReader(indexed)
    described = json.loads(Path(trained, SUBFOLDER, "compressor.json").read_text())
    info = index.representation("seqresize_4_float32")
    digest = described["sha256"]["compressor.safetensors"]
    assert info.compressor["weights"] == f"sha256:{digest}"
    assert info.artefact and not info.is_fitted
    residual = index.representation("seqresize_4_residual")
    assert residual.artefact == info.artefact and residual.is_fitted
    summary = status(indexed)["representations"]
    assert summary["seqresize_4_float32"]["vectors"] == 4
    assert summary["memtok_float32"]["filled"] == 1.0


def test_search_and_explanations(indexed):
    searcher = open_index(indexed)
    text = TEXTS["shell/1"]
    for name in ("memtok_float32", "agc_4_float32", "seqresize_4_float32", "seqresize_4_residual"):
        hits = searcher.search(text, name, k=3)
        assert len(hits) == 3
        has_spans = any(match.spans for match in hits[0].matches)
        assert has_spans == bool(hits[0].passages) == name.startswith("agc")
    with pytest.raises(SpecError, match="must be a representation with stored token assignments"):
        similarity_map(searcher, text, hits[0].item_id, "memtok_float32")


def test_separate_compression_actors(indexed, tmp_path, collection, trained):
    wanted = representations(trained)[:5]
    encoder = {**ENCODER, "appended_tokens": trained}
    uri = tmp_path / "apart"
    run(index_spec(uri, collection, wanted, encoder=encoder), compress={"num_cpus": 0.5})
    expected = rows(indexed)
    for item_id, row in rows(str(uri)).items():
        for name in ("memtok_float32", "agc_4_float32", "agc_code_4_float32"):
            np.testing.assert_allclose(row[name], expected[item_id][name], atol=1e-6)


def test_recompression(indexed, trained):
    index = IndexReader(indexed)
    seqresize = {"compressor": {"name": "seqresize", **SIZES, "weights": trained}}
    agc = {"compressor": {"name": "agc", "num_vectors": 4}}
    wanted = [{**seqresize, "id": "again"}, {**agc, "id": "agc_again"}]
    recompressed(indexed, *({**r, "codec": "float32"} for r in wanted))
    for row in rows(indexed).values():
        np.testing.assert_allclose(row["again"], row["seqresize_4_float32"], atol=1e-6)
        np.testing.assert_allclose(row["agc_again"], row["agc_4_float32"], atol=1e-6)
    assert IndexReader(indexed).representation("again").artefact == (
        index.representation("seqresize_4_float32").artefact
    )
    with pytest.raises(SpecError, match="memtok.*needs the vectors of the appended tokens"):
        recompressed(indexed, {"compressor": "memtok", "id": "memtok_again"})
    with pytest.raises(
        SpecError, match=r"stores \(appended_rows/mean/5\).*keep_taps: \[appended_softmax/mean/last"
    ):
        recompressed(indexed, {"compressor": {**agc["compressor"], "reading": "code"}, "id": "x"})


def test_other_weights_are_not_mixed_into_a_column(indexed, tmp_path, collection, trained):
    other = write_folder(tmp_path / "other", seed=1)
    encoder = {**ENCODER, "appended_tokens": trained}
    wanted = representations(trained)
    wanted[4]["compressor"] = {"name": "seqresize", **SIZES, "weights": other}
    spec = index_spec(Path(indexed), collection, wanted, encoder=encoder)
    with pytest.raises(SpecError, match="compressor must be .*as in the index.*set `id`"):
        run(spec)
    # The same weights elsewhere are the same representation.
    same = write_folder(tmp_path / "same")
    wanted[4]["compressor"] = {"name": "seqresize", **SIZES, "weights": same}
    spec = index_spec(Path(indexed), collection, wanted, encoder=encoder)
    job.run(spec, IndexResources(), job="3", report=lambda line: None)


def problem(tmp_path: Path, collection: str, compressor: Any, **fields: Any) -> str:
    """Returns the error of an index job, without loading the encoder."""
    from pipeline.index.checks import check

    with pytest.raises(SpecError) as error:
        spec = index_spec(tmp_path / "new", collection, [{"compressor": compressor}], **fields)
        check(spec)
    return str(error.value)


def test_checks_before_the_encoder_is_loaded(tmp_path, collection, trained):
    for name, fields in (("memtok", {}), ("agc", {"num_vectors": 4})):
        assert problem(tmp_path, collection, {"name": name, **fields}) == (
            f"compressor {name} must be used with an encoder with appended_tokens, got 'minilm',"
            " which appends none"
        )
    encoder = {**ENCODER, "appended_tokens": trained}
    found = problem(tmp_path, collection, {"name": "memtok", "num_vectors": 8}, encoder=encoder)
    assert found == (
        "representations.memtok_8.compressor.num_vectors must be 3, the number of tokens that the"
        " encoder was trained to append, got 8; MemTok cannot change its budget after training"
    )

    def seqresize(**changes: Any) -> str:
        compressor = {"name": "seqresize", **SIZES, "weights": trained, **changes}
        return problem(tmp_path, collection, compressor)

    assert seqresize(num_vectors=5) == (
        f"representations.seqresize_5.compressor.num_vectors must be 4, as in {trained}, got 5;"
        " it cannot be changed after training"
    )
    assert "reading must be paper" in seqresize(reading="code")
    assert "weights must be the folder of a training run" in seqresize(weights=None)
    assert "got '/missing', which does not exist" in seqresize(weights="/missing")
    backbone = write_folder(tmp_path / "backbone", weights=["0" * 64])
    assert seqresize(weights=backbone).endswith(
        "which was trained with other weights; the encoder must load the model, adapter and"
        " projection of the same run"
    )


def test_missing_weights_of_the_encoder_are_its_error(tmp_path):
    """Recompression does not load the encoder, whose folder may have been removed."""
    folder = write_folder(tmp_path / "run")
    compressor = {"name": "seqresize", **SIZES, "weights": folder}
    wanted = [config.parse(Representation, {"compressor": compressor})]
    encoder = ENCODERS.resolve({"name": "colpali", "model": "/missing"})
    with pytest.raises(SpecError, match="^encoder.model must be .*, got '/missing'"):
        check_compressors(wanted, encoder)


def test_weights_of_another_dimension_are_refused(cluster, tmp_path, collection):
    narrow = write_folder(tmp_path / "narrow", dim=128)
    compressor = {"name": "seqresize", **SIZES, "weights": narrow}
    spec = index_spec(tmp_path / "new", collection, [{"compressor": compressor}])
    with pytest.raises(
        SpecError, match="vectors of dimension 384, .*, which was trained for dimension 128"
    ):
        run(spec)
