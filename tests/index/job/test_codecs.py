"""Tests of codecs in an index: fitting, reuse and validation."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import config
from pipeline.config import SpecError
from pipeline.eval.planning.trial import dry_run
from pipeline.index import add, job, recompress
from pipeline.index.add import Progress
from pipeline.index.artefacts import Sample, load_artefact
from pipeline.index.columns import Representation, all_representations
from pipeline.index.export import export
from pipeline.index.fitting import load_fit_sample
from pipeline.index.listing import CONTENT, content_hashes
from pipeline.index.reader import IndexReader
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.index.status import status
from pipeline.registry import CODECS
from pipeline.search.searcher import open_index
from tests.tiny import SLEEPING

FULL = {"compressor": "none"}
CODEC = {"name": "residual", "num_centroids": 8}
RESIDUAL = {**FULL, "codec": CODEC, "id": "residual"}
DOCUMENTS = {f"d{i}": f"{i}" for i in range(9)}
DIM, NUM_TOKENS = 24, 6


def index_spec(uri: Path, collection: Path, *representations: dict, **fields: Any) -> IndexSpec:
    given = {
        "index": str(uri),
        "source": {"name": "text", "path": str(collection)},
        "encoder": {
            "class": SLEEPING,
            "seconds": 0.0,
            "num_tokens": NUM_TOKENS,
            "dim": DIM,
        },
        "representations": list(representations),
        "unit_items": 2,
        "fragment_items": 2,
        "fit": {"num_items": 5, "seed": 3},
        **fields,
    }
    return config.parse(IndexSpec, given)


def make_index(spec: IndexSpec, **options: Any) -> None:
    job.run(spec, IndexResources(), job="1", report=lambda line: None, **options)


def run_recompress(uri: Path, *representations: dict, **fields: Any) -> Progress:
    given = {"index": str(uri), "representations": list(representations), **fields}
    spec = config.parse(recompress.RecompressSpec, given)
    resources = recompress.RecompressResources()
    return add.run(recompress.Recompression(spec, resources), job="2", report=lambda line: None)


def artefacts(uri: Path) -> set[str]:
    return {path.stem for path in (uri / "artefacts").iterdir()}


def vectors(uri: Path, name: str) -> dict[str, np.ndarray]:
    """Returns the decoded vectors by item id."""
    by_id = {}
    for rows, flat, lengths in IndexReader(str(uri)).tokens(name):
        items = np.split(flat.astype(np.float64), np.cumsum(lengths)[:-1])
        by_id |= dict(zip(rows["item_id"].to_pylist(), items, strict=True))
    return by_id


def test_column_names_distinguish_codecs():
    sweep = {
        "compressor": ["none", {"name": "hpool", "num_vectors": 32}],
        "codec": [
            *CODECS.names(),
            {"name": "residual", "bits": 2},
            {"name": "residual", "num_centroids": 16},
            {"name": "bits", "bits": 2},
        ],
    }
    given = {"index": "somewhere", "sweep": sweep}
    names = [r.id for r in all_representations(config.parse(recompress.RecompressSpec, given))]
    assert names[:8] == [
        "full_bits_1",
        "full",
        "full_float32",
        "full_int8",
        "full_residual_4",
        "full_residual_2",
        "full_residual_4_num_centroids16",
        "full_bits_2",
    ]
    assert names[8:] == ["hpool_32" + name.removeprefix("full") for name in names[:8]]
    caption = config.parse(Representation, {**FULL, "codec": "int8", "field": "caption"})
    assert caption.id == "caption_full_int8"


@pytest.fixture(scope="module")
def original(cluster, tmp_path_factory) -> Path:
    """Index written by two runs, the second with the codebooks of the first."""
    folder = tmp_path_factory.mktemp("codecs")
    source = folder / "collection"
    source.mkdir()
    lines = [f'{{"_id": "{name}", "text": "{text}"}}' for name, text in DOCUMENTS.items()]
    (source / "corpus.jsonl").write_text("\n".join(lines))
    pooled = {"name": "hpool", "num_vectors": 3}
    pooled = {"compressor": pooled, "codec": CODEC, "id": "pooled_residual"}
    int8 = {**FULL, "codec": "int8"}
    spec = index_spec(folder / "index", source, FULL, RESIDUAL, pooled, int8)
    make_index(spec, limit=4)
    first = artefacts(folder / "index")
    make_index(spec)
    assert artefacts(folder / "index") == first and len(first) == 2
    return folder / "index"


@pytest.fixture
def uri(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "index"))


def test_codebook_is_fitted_once_for_all_runs(uri):
    index = IndexReader(str(uri))
    info = index.representation("residual")
    assert info.artefact is None and info.codec_artefact in artefacts(uri)
    assert index.representation("full").codec_artefact is None
    assert index.representation("pooled_residual").codec_artefact != info.codec_artefact
    learned = load_artefact(str(uri), info.codec_artefact, {})
    assert learned["centroids"].shape == (8, DIM) and bool(learned["normalised"])
    codec = CODECS.build(CODECS.resolve(info.codec), learned)

    # The rows of both runs equal the uncompressed vectors quantised with this codebook.
    assert len(index) == len(DOCUMENTS)
    full, found = vectors(uri, "full"), vectors(uri, "residual")
    assert full.keys() == found.keys() == DOCUMENTS.keys()
    for item_id, item in full.items():
        parts = codec.quantise(torch.from_numpy(item).float())
        expected = codec.dequantise(parts, DIM).numpy()
        # The stored vectors are rounded, so values near a cutoff can differ.
        assert np.isclose(found[item_id], expected, atol=1e-3).mean() > 0.97
    stored = status(str(uri))["representations"]["residual"]
    assert stored["codec"] == "residual bits=4 num_centroids=8"
    assert stored["codec_artefact"] == info.codec_artefact
    assert stored["bytes_vectors"] == NUM_TOKENS * (4 + DIM // 2)


@pytest.mark.parametrize("name", ["residual", "pooled_residual", "full_int8"])
def test_search_scores_decoded_vectors(uri, name):
    """The score is that of the transformed query and the decoded vectors."""
    query = np.random.default_rng(0).normal(size=(3, DIM)).astype(np.float32)
    query /= np.linalg.norm(query, axis=1, keepdims=True)
    hits = open_index(str(uri)).search([query], name, k=len(DOCUMENTS))[0]
    transformed = (
        IndexReader(str(uri))
        .codec(name)
        .transform_queries(torch.from_numpy(query))
        .double()
        .numpy()
    )
    assert np.array_equal(transformed, query) == (name != "full_int8")
    scores = {i: (transformed @ item.T).max(axis=1).sum() for i, item in vectors(uri, name).items()}
    assert {hit.item_id: hit.score for hit in hits} == pytest.approx(scores, rel=1e-5)


def test_recompress_fits_and_resumes(uri):
    more = {"compressor": {"name": "hpool", "num_vectors": 2}, "codec": CODEC, "id": "more"}
    before = artefacts(uri)
    assert run_recompress(uri, more, fit_items=6).rows == len(DOCUMENTS)
    info = IndexReader(str(uri)).representation("more")
    assert artefacts(uri) - before == {info.codec_artefact}
    expected = vectors(uri, "more")
    progress = run_recompress(
        uri, more, fit_items=3
    )  # all fragments are complete, nothing is fitted
    assert progress.rows == 0 and artefacts(uri) - before == {info.codec_artefact}
    actual = vectors(uri, "more")
    assert all(np.array_equal(actual[item_id], expected[item_id]) for item_id in expected)


def load_sample(uri: Path, name: str) -> Sample:
    return load_fit_sample(str(uri), IndexReader(str(uri)).representation(name))


def hashes(uri: Path, filter: str | None = None) -> set[int]:
    """Returns the content hashes of the items of an index."""
    batches = IndexReader(str(uri)).batches(CONTENT, filter=filter)
    return {value for batch in batches for value in content_hashes(batch).tolist()}


def test_sample_is_recorded(uri):
    sample = load_sample(uri, "residual")
    assert sample.origin == {} and len(sample.items_N) == 4  # the first run listed only four items
    assert set(sample.items_N.tolist()) <= hashes(uri)
    assert not IndexReader(str(uri)).representation("full").is_fitted


@pytest.mark.heavy
def test_separate_calibration_source(tmp_path, uri, collection):
    """The codebook is fitted on the calibration items and records them."""
    calibration = collection(**{f"c{i}": f"calibration {i}" for i in range(6)})
    make_index(index_spec(tmp_path / "apart", calibration, FULL, RESIDUAL, fit={"num_items": 6}))
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "corpus.jsonl").write_text('{"_id": "c0", "text": "another text with this id"}')
    fit = {"num_items": 6, "source": {"name": "text", "path": str(calibration)}}
    make_index(index_spec(tmp_path / "new", corpus, FULL, RESIDUAL, fit=fit))
    sample = load_sample(tmp_path / "new", "residual")
    assert sample.origin["source"]["path"] == str(calibration)
    assert set(sample.items_N.tolist()) == hashes(tmp_path / "apart")
    assert not set(sample.items_N.tolist()) & hashes(tmp_path / "new")
    learned, expected = (
        IndexReader(str(tmp_path / name)).codec("residual") for name in ("new", "apart")
    )
    for key in ("centroids", "cutoffs", "weights"):
        assert np.array_equal(learned.artefact[key], expected.artefact[key])


def test_recompress_fits_on_a_separate_sample(uri, original):
    """The sample is drawn from another index, or from the items that match a filter."""
    before = artefacts(uri)
    filter = "item_id > 'd4'"
    run_recompress(uri, {**RESIDUAL, "id": "filtered"}, fit_filter=filter)
    filtered = load_sample(uri, "filtered")
    assert filtered.origin == {"filter": filter}
    assert set(filtered.items_N.tolist()) == hashes(uri, filter)
    fields = {"fit_index": str(original), "fit_filter": filter}
    run_recompress(uri, {**RESIDUAL, "id": "elsewhere"}, **fields)
    sample = load_sample(uri, "elsewhere")
    assert sample.origin == {"index": str(original), "filter": filter}
    assert np.array_equal(sample.items_N, filtered.items_N)
    assert len(artefacts(uri) - before) == 2  # equal samples with different origins
    learned, expected = (
        IndexReader(str(uri)).codec(name).artefact for name in ("elsewhere", "filtered")
    )
    assert all(np.array_equal(learned[key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"fit_index": "nowhere"},
            "fit_index must be the URI of an index .*, got .*nowhere', which does not exist",
        ),
        (
            {"fit_filter": "item_id = ''"},
            "fit_filter must be a condition that matches items, got .*, which matches no items",
        ),
        (
            {"fit_filter": "nonsense"},
            "fit_filter must be a condition on .*, got 'nonsense', which names the unknown column",
        ),
    ],
)
def test_rejects_invalid_sample(uri, fields, message):
    with pytest.raises(SpecError, match=message):
        run_recompress(uri, {**RESIDUAL, "id": "more"}, **fields)
    assert "more" not in IndexReader(str(uri)).representations()


def test_rejects_missing_calibration_source(tmp_path, collection):
    fit = {"source": {"name": "text", "path": str(tmp_path / "nowhere")}}
    spec = index_spec(tmp_path / "index", collection(d="text"), RESIDUAL, fit=fit)
    with pytest.raises(SpecError) as caught:
        make_index(spec)
    assert caught.value.field == "fit.source.path"
    assert not (tmp_path / "index").exists()


@pytest.mark.heavy
def test_fitted_compressor_with_fitted_codec(cluster, tmp_path, collection):
    hpc = {"name": "hpc", "num_vectors": 4, "num_centroids": 16, "saliency": "eos_row/mean/last"}
    spec = index_spec(
        tmp_path / "index",
        collection(**{name: f"The wings number {name} of birds" for name in DOCUMENTS}),
        {"compressor": hpc, "codec": CODEC},
        encoder="minilm",
    )
    make_index(spec)
    (info,) = IndexReader(str(tmp_path / "index")).representations().values()
    assert artefacts(tmp_path / "index") == {info.artefact, info.codec_artefact}
    learned = load_artefact(str(tmp_path / "index"), info.codec_artefact, info.codec_fit)
    # The codec is fitted on compressed vectors, so its centroids are near those of the compressor.
    codebook = load_artefact(str(tmp_path / "index"), info.artefact, {})["codebook"]
    similarity = learned["centroids"] @ codebook.T
    assert similarity.max() == pytest.approx(1.0, abs=1e-3)


def test_recompression_from_quantised_vectors(cluster, tmp_path, collection):
    uri = tmp_path / "index"
    make_index(index_spec(uri, collection(**DOCUMENTS), {**FULL, "codec": "int8"}))
    others = [
        {"compressor": {"name": "hpool", "num_vectors": NUM_TOKENS}},  # keeps all tokens
        {"compressor": {"name": "hpool", "num_vectors": 2}, "codec": "float32"},
        RESIDUAL,
        {**FULL, "codec": {"name": "bits", "bits": 4}},
    ]
    progress = run_recompress(uri, *others, source="full_int8", fit_items=5)
    assert progress.rows == len(DOCUMENTS)
    source = vectors(uri, "full_int8")
    pooled, bits = vectors(uri, f"hpool_{NUM_TOKENS}"), vectors(uri, "full_bits_4")
    for item_id, item in source.items():
        np.testing.assert_allclose(pooled[item_id], item, atol=4e-3)
        np.testing.assert_allclose(bits[item_id], item, atol=0.1)
    assert bool(IndexReader(str(uri)).codec("residual").artefact["normalised"])
    export(str(uri), str(tmp_path / "out"), "full_int8", form="npy", report=lambda line: None)
    exported = np.load(tmp_path / "out/documents.npy")
    assert exported.dtype == np.float32
    np.testing.assert_array_equal(exported, np.concatenate(list(source.values())))


def test_dry_run_estimates_the_size_of_unfitted_codecs(cluster, tmp_path, collection):
    spec = index_spec(tmp_path / "index", collection(**DOCUMENTS), FULL, RESIDUAL)
    lines: list[str] = []
    dry_run(spec, IndexResources(), None, lines.append)
    (line,) = (line for line in lines if line.startswith("  residual "))
    assert line.split()[1:5] == [f"{NUM_TOKENS * (4 + DIM // 2)}", "bytes", "per", "item"]
    assert not (tmp_path / "index").exists()


def test_rejects_small_sample_before_storing_anything(cluster, tmp_path, collection):
    big = {**FULL, "codec": "residual"}
    spec = index_spec(tmp_path / "index", collection(**DOCUMENTS), big)
    rule = f"at most {5 * NUM_TOKENS}, the number of vectors in the sample to fit on"
    field = "representations.full_residual_4.codec.num_centroids"
    with pytest.raises(SpecError, match=f"{field} must be {rule}, got 256"):
        make_index(spec)
    assert IndexReader(str(tmp_path / "index")).representations() == {}


def test_rejects_other_settings_and_corrupted_codebooks(uri):
    name = "residual"
    with pytest.raises(
        SpecError,
        match=rf"representations.{name}.codec must be .*, as in the index, got .*; set `id`",
    ):
        run_recompress(uri, {**FULL, "codec": {"name": "residual", "num_centroids": 4}, "id": name})
    artefact = IndexReader(str(uri)).representation(name).codec_artefact
    other = IndexReader(str(uri)).representation("pooled_residual").codec_artefact
    shutil.copy(uri / f"artefacts/{other}.npz", uri / f"artefacts/{artefact}.npz")
    with pytest.raises(
        SpecError, match="index must be an index with the artefact .*contains another art"
    ):
        open_index(str(uri)).load(name)
    with pytest.raises(
        SpecError, match="index must be an index with the artefact .*contains another art"
    ):
        run_recompress(uri, RESIDUAL)
