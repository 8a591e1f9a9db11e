"""Tests of the small models, untrained and as shipped with the package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.papers.synthetic.shapes_data import Shapes, png, validation_scenes
from examples.papers.synthetic.shapes_files import write_collection
from examples.papers.verbs import shapes
from pipeline import config
from pipeline.encoders.batching import concatenate
from pipeline.encoders.edje.candidates import candidate_pairs, rerank_scores
from pipeline.encoders.edje.model import load_adapter, load_joint, read_metadata
from pipeline.index import job
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.registry import COMPRESSORS, ENCODERS
from pipeline.search.searcher import open_index
from pipeline.train.data.quality import ranking
from pipeline.train.losses import late_scores
from tests.conftest import ROOT
from tests.tiny import untrained as tiny

SHIPPED = ROOT / "jobs" / "data" / "models"
COLPALI = {
    "name": "colpali",
    "model": str(SHIPPED / "shapes_colpali"),
    "dtype": "float32",
    "output_tokens": "visual",
    "query_prefix": "",
    "num_augmentation": 0,
}


#: Number of scenes that the shipped models rank.
NUM_SCENES = 150
HPOOL = {"compressor": {"name": "hpool", "num_vectors": 16}}


@pytest.fixture(scope="module")
def colpali():
    return ENCODERS.build(ENCODERS.resolve(COLPALI))


@pytest.fixture(scope="module")
def siglip():
    model = str(SHIPPED / "shapes_siglip")
    return ENCODERS.build(ENCODERS.resolve({"name": "dual", "model": model, "dtype": "float32"}))


@pytest.fixture(scope="module")
def documents(colpali):
    """Tokens of the scenes."""
    scenes, _, _ = validation_scenes(NUM_SCENES)
    return encode_images(colpali, [scenes.render(row) for row in range(NUM_SCENES)])


def encode_images(encoder, images):
    import pyarrow as pa

    table = pa.table({"image": pa.array(list(map(png, images)), pa.binary())})
    rows, batches = zip(*encoder.encode(table), strict=True)
    return concatenate(batches).take(torch.from_numpy(np.argsort(np.concatenate(rows))))


@pytest.mark.parametrize(("make", "name"), [(tiny.colpali, "colpali"), (tiny.siglip, "dual")])
def test_initialisation_is_deterministic_given_seed(make, name, tmp_path):
    for folder, seed in (("one", 0), ("two", 0), ("three", 1)):
        make(tmp_path / folder, seed)
    weights = [(tmp_path / f / "model.safetensors").read_bytes() for f in ("one", "two", "three")]
    assert weights[0] == weights[1] != weights[2]
    spec = ENCODERS.resolve({"name": name, "model": str(tmp_path / "one"), "dtype": "float32"})
    ENCODERS.load(name).check(spec)
    assert ENCODERS.load(name).attention(spec).num_layers == 6


def test_captions_have_no_unknown_tokens(colpali):
    _, captions, _ = validation_scenes(50)
    tokenizer = colpali.reader(colpali.spec).processor.tokenizer
    for text in captions.texts:
        assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"]


def test_shipped_colpali_quality(colpali, documents):
    _, captions, _ = validation_scenes(NUM_SCENES)
    assert documents.vectors.shape == (NUM_SCENES, 196, 64)
    queries = colpali.encode_queries(captions.texts).tokens
    scores = late_scores(queries.vectors, queries.mask, documents.vectors, documents.mask)
    batch = Shapes(Shapes.Spec(validation=NUM_SCENES), batch_size=2, seed=0).validation()
    quality = ranking(scores, Shapes.relevant(batch.query_labels, batch.document_labels))
    # With 1,000 scenes, R@1 is between 0.50 and 0.85; fewer scenes are easier.
    assert 0.6 < quality["R@1"].mean() < 0.99
    assert quality["R@10"].mean() > 0.95


def test_shipped_dual_encoder_quality(siglip):
    """The single-vector model has a much higher R@10 than R@1."""
    scenes, captions, _ = validation_scenes(NUM_SCENES)
    documents = encode_images(siglip, [scenes.render(row) for row in range(NUM_SCENES)])
    scores = siglip.encode_queries(captions.texts).tokens.pooled @ documents.pooled.T
    batch = Shapes(Shapes.Spec(validation=NUM_SCENES), batch_size=2, seed=0).validation()
    quality = ranking(scores, Shapes.relevant(batch.query_labels, batch.document_labels))
    # With 1,000 scenes, the values are 0.18 and 0.65; fewer scenes are easier.
    assert 0.2 < quality["R@1"].mean() < 0.6
    assert quality["R@10"].mean() > 0.75


def test_shipped_edje_improves_ranking(colpali, documents):
    """Reranks the results of eight SaMer vectors per scene with tokens as stored in an index."""
    folder = SHIPPED / "shapes_edje"
    assert read_metadata(folder)["vision"]["fingerprint"] == colpali.fingerprint
    _, captions, _ = validation_scenes(NUM_SCENES)
    samer = {"name": "samer", "num_vectors": 8}
    compressed = COMPRESSORS.build(COMPRESSORS.resolve(samer)).compress(documents)
    queries = colpali.encode_queries(captions.texts).tokens
    first = late_scores(queries.vectors, queries.mask, compressed.vectors, compressed.mask)
    tokens, mask = load_adapter(folder).cache_tokens(documents)
    assert tokens.shape == (NUM_SCENES, 32, 128)
    joint = load_joint(folder)
    batch = Shapes(Shapes.Spec(validation=NUM_SCENES), batch_size=2, seed=0).validation()
    relevant = Shapes.relevant(batch.query_labels, batch.document_labels)
    for scores, labels, is_reversed in ((first, relevant, False), (first.T, relevant.T, True)):
        pairs = candidate_pairs(scores, 10)
        text_item = pairs.flip(1) if is_reversed else pairs
        logits = joint.scores(captions.texts, tokens, mask, text_item)
        before = ranking(scores, labels)
        after = ranking(rerank_scores(scores, pairs, logits, False), labels)
        assert after["R@10"].mean() == before["R@10"].mean()
        for measure in ("R@1", "R@5"):
            assert after[measure].mean() > before[measure].mean() + 0.05


@pytest.mark.parametrize("name", ["shapes_colpali", "shapes_siglip", "shapes_edje"])
def test_shipped_models_record_their_training(name):
    training = json.loads((SHIPPED / name / "training.json").read_text("utf-8"))
    assert training["spec"]["seed"] == 0 and training["spec"]["data"]["name"] == "shapes"
    assert training["spec"]["output"] == f"out/models/{name}"
    size = sum(path.stat().st_size for path in (SHIPPED / name).iterdir())
    assert size < 8 << 20


@pytest.mark.heavy
def test_index_and_search_scenes(cluster, tmp_path):
    write_collection(tmp_path / "shapes", 40)
    fields = {
        "index": str(tmp_path / "index"),
        "source": {"name": "images", "path": str(tmp_path / "shapes" / "images")},
        "encoder": COLPALI,
        "representations": [{"compressor": "none"}, HPOOL],
    }
    job.run(config.parse(IndexSpec, fields), IndexResources(), job="1", report=lambda _: 0)
    queries = [json.loads(line) for line in (tmp_path / "shapes" / "queries.jsonl").open()]
    qrels = [line.split("\t") for line in (tmp_path / "shapes/qrels/test.tsv").open()][1:]
    searcher = open_index(str(tmp_path / "index"))
    for representation, min_recall in (("full", 0.85), ("hpool", 0.7)):
        name = next(n for n in searcher.index.representations() if n.startswith(representation))
        hits = 0
        for query in queries:
            found = searcher.search(query["text"], representation=name, k=1)[0].item_id
            hits += [query["_id"], found] in [row[:2] for row in qrels]
        assert hits / len(queries) > min_recall
    image = (tmp_path / "shapes" / "images" / "scene-00003.png").read_bytes()
    assert searcher.search(image, representation="full", k=1)[0].item_id == "scene-00003.png"


@pytest.mark.heavy
def test_job_is_deterministic(tmp_path, capsys):
    command = [
        sys.executable,
        "-m",
        "examples.papers.verbs.shapes",
        str(tmp_path / "one"),
        "--count",
        "5",
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    shapes.main([str(tmp_path / "two"), "--count", "5"])
    first, second = (
        {
            path.relative_to(tmp_path / name): path.read_bytes()
            for path in list_files(tmp_path / name)
        }
        for name in ("one", "two")
    )
    assert first == second and len(first) == 5 + 3
    with pytest.raises(SystemExit) as exit:
        shapes.main([str(tmp_path / "two"), "--count", "0"])
    assert exit.value.code == 2
    assert "must be an integer >= 1, got '0'" in capsys.readouterr().err


def list_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
