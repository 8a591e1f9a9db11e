"""The encoder `http` with a local server that runs a tiny model."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest

from pipeline.config import SpecError, parse
from pipeline.index.checks import check
from pipeline.index.job import run
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.registry import ENCODERS
from pipeline.search.searcher import open_index
from tests.bench.index_run import bare_loop
from tests.encoders.batches import assert_close, encode_items
from tests.encoders.endpoints import MODEL, ImageModel, TextModel, serve
from tests.images import noise, png

TEXTS = ["The lift of a wing.", "", "drag", "flow around a wing", None]
ITEMS = pa.table({"text": TEXTS})


@pytest.fixture(scope="module")
def texts(checkpoint):
    with serve(TextModel(checkpoint("colbert_bert"))) as server:
        yield server


@pytest.fixture(scope="module")
def images(checkpoint):
    with serve(ImageModel(checkpoint("colpali"))) as server:
        yield server


@pytest.fixture(autouse=True)
def reset(texts, images):
    yield
    texts.reset()
    images.reset()


def build(server, **fields):
    given = {"name": "http", "url": server.url, "model": MODEL, "dim": server.model.dim}
    return ENCODERS.build(ENCODERS.resolve({**given, "max_tries": 2, **fields}))


def real(batch):
    """Returns the vectors of the only item of a batch."""
    return batch.vectors[0][batch.mask[0]]


def test_token_embeddings(texts):
    encoder = build(texts, api="pooling", batch_size=2)
    found = encode_items(encoder, ITEMS)
    for row, text in enumerate(TEXTS):
        if not text:
            assert found[row].lengths.tolist() == [0]
            continue
        assert_close(real(found[row]), texts.model.tokens(text))
    assert sorted(len(body["input"]) for body in texts.requests) == [1, 2]
    queries = encoder.encode_queries(["wing lift", "drag"])
    assert_close(queries.tokens.vectors[0][queries.tokens.mask[0]], texts.model.tokens("wing lift"))
    assert queries.token_texts == [["#0", "#1", "#2", "#3"], ["#0", "#1", "#2"]]
    assert encoder.pooled_dim is None


def test_single_vectors(texts):
    encoder = build(texts)
    found = encode_items(encoder, ITEMS)
    mean = texts.model.tokens("drag").mean(dim=0)
    assert_close(real(found[2]), (mean / mean.norm())[None])
    assert_close(found[2].pooled, real(found[2]))
    queries = encoder.encode_queries(["drag"])
    assert_close(queries.tokens.pooled, found[2].pooled)
    assert queries.token_texts == [["drag"]]


def test_prompts(texts):
    encoder = build(
        texts, query_prompt="Query: {instruction} {content}.", document_prompt="Passage: {content}"
    )
    list(encoder.encode(ITEMS.slice(0, 1)))
    encoder.with_instruction("Find a wing").encode_queries(["lift"])
    inputs = [body["input"] for body in texts.requests]
    assert inputs == [["Passage: The lift of a wing."], ["Query: Find a wing lift."]]
    templates = encoder.with_instruction("Find a wing").templates()
    assert templates.query == "Query: Find a wing {query}."
    assert templates.text == "Passage: {text}" and templates.image is None


def test_images_are_sent_as_data_urls(images):
    """The vectors equal those of the encoder `colpali`, which runs the same model."""
    encoder = build(images, api="pooling", documents="images", image_prompt="Describe the image.")
    files = [png(noise(40, 40)), png(noise(64, 30))]
    items = pa.table({"image": pa.array([*files, None], pa.binary())})
    found = encode_items(encoder, items)
    for row, file in enumerate(files):
        assert len(real(found[row])) == 29
        assert_close(real(encoder.encode_media([{"image": file}]).tokens), real(found[row]))
    assert found[2].lengths.tolist() == [0]
    content = images.requests[0]["messages"][0]["content"]
    assert content[0]["type"] == "image_url" and content[1]["text"] == "Describe the image."
    assert encoder.query_kinds(encoder.spec) == ("text", "image", "video")
    assert encoder.templates().image == "{image}Describe the image."


def test_equals_colpali(images, checkpoint):
    folder = checkpoint("colpali")
    local = ENCODERS.build(
        ENCODERS.resolve({"name": "colpali", "model": folder, "dtype": "float32"})
    )
    prompt = f"<bos>Question: {{content}}{'<pad>' * 10}\n"
    remote = build(images, api="pooling", documents="images", query_prompt=prompt)
    items = pa.table({"image": pa.array([png(noise(40, 40))], pa.binary())})
    assert_close(encode_items(remote, items)[0].vectors, encode_items(local, items)[0].vectors)
    for found, expected in zip(
        (remote.encode_queries(["wing lift"]), remote.encode_media(items.to_pylist())),
        (local.encode_queries(["wing lift"]), local.encode_media(items.to_pylist())),
        strict=True,
    ):
        assert_close(found.tokens.vectors, expected.tokens.vectors)


def test_fingerprint(texts):
    """The model and what affects queries are part of it, the server and batching are not."""
    encoder = build(texts)
    same = {"url": "http://127.0.0.1:9", "batch_size": 1, "max_concurrency": 2, "timeout_s": 1}
    for name, value in same.items():
        assert build(texts, **{name: value}).fingerprint == encoder.fingerprint
    assert build(texts, document_prompt="p {content}").fingerprint == encoder.fingerprint
    for change in (
        {"model": "other"},
        {"revision": "2"},
        {"api": "pooling"},
        {"query_prompt": "q {content}"},
    ):
        assert build(texts, **change).fingerprint != encoder.fingerprint


def test_rejected_query(texts):
    texts.faults = [(413, {})]
    with pytest.raises(SpecError, match="^query must be a query that the endpoint accepts"):
        build(texts).encode_queries(["lift"])


@pytest.mark.parametrize("url", ["host:8000", "ftp://host", "http://host/v1"])
def test_rejects_urls(url):
    with pytest.raises(SpecError, match="^url must be ") as caught:
        ENCODERS.resolve({"name": "http", "url": url, "model": "m", "dim": 2})
    assert caught.value.value == url


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("url", "http://user:hidden-key@host"),
        ("url", "http://host?key=hidden-key"),
        ("api_key_variable", "sk-hidden-key"),
    ],
)
def test_rejects_keys_in_specs(field, value):
    """Without showing them."""
    given = {"name": "http", "url": "http://host", "model": "m", "dim": 2, field: value}
    with pytest.raises(SpecError, match=f"^{field} must be ") as caught:
        ENCODERS.resolve(given)
    assert "hidden-key" not in str(caught.value)


def write_collection(folder):
    folder.mkdir(exist_ok=True)
    lines = [
        json.dumps({"_id": f"d{i}", "text": text})
        for i, text in enumerate(["lift of a wing", "drag of a body", "flow", "wing flow and drag"])
    ]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    return str(folder)


def index_spec(folder, server, **fields):
    encoder = {"name": "http", "url": server.url, "model": MODEL, "dim": 32, "api": "pooling"}
    return parse(
        IndexSpec,
        {
            "index": str(folder / "index"),
            "source": {"name": "text", "path": write_collection(folder / "collection")},
            "encoder": {**encoder, "max_tries": 2, **fields},
            "representations": [{"compressor": "none"}],
        },
    )


def test_index_and_search(cluster, texts, tmp_path):
    """A job encodes a collection through the endpoint, in spite of transient failures."""
    spec = index_spec(tmp_path, texts)
    check(spec)
    texts.faults = [(429, {"Retry-After": "0.1"})]
    progress = run(spec, IndexResources(), job="1", report=lambda line: None)
    assert progress.new == 4 and not texts.faults
    searcher = open_index(spec.index)
    hits = searcher.search("wing drag", k=4)
    query = texts.model.tokens("wing drag")
    documents = ["lift of a wing", "drag of a body", "flow", "wing flow and drag"]
    scores = {
        f"d{i}": float((query @ texts.model.tokens(text).T).max(dim=1).values.sum())
        for i, text in enumerate(documents)
    }
    assert [hit.item_id for hit in hits] == sorted(scores, key=scores.get, reverse=True)
    found = [hit.score for hit in hits]
    np.testing.assert_allclose(found, sorted(scores.values(), reverse=True), atol=5e-3)


def test_key_is_not_stored(texts, tmp_path, monkeypatch):
    texts.key = "secret-key"
    monkeypatch.setenv("TINY_KEY", "secret-key")
    with pytest.raises(SpecError, match="^encoder.api_key_variable must be .* valid API key"):
        check(index_spec(tmp_path, texts))
    spec = index_spec(tmp_path, texts, api_key_variable="TINY_KEY")
    check(spec)
    assert bare_loop(spec, num_threads=1).new == 4
    files = [path for path in (tmp_path / "index").rglob("*") if path.is_file()]
    assert any(b"TINY_KEY" in path.read_bytes() for path in files)
    assert not any(b"secret-key" in path.read_bytes() for path in files)


@pytest.mark.heavy
def test_job_stops_if_the_model_changes(cluster, texts, tmp_path):
    spec = index_spec(tmp_path, texts)
    texts.change = lambda content: {**content, "model": "other"}
    with pytest.raises(Exception, match="answer with the model tiny/model, got other"):
        run(spec, IndexResources(), job="1", report=lambda line: None)
