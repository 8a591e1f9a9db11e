"""Contract of all registered encoders.

A new encoder needs an entry in `SPECS` or `CHECKPOINTS`.
"""

import re
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from pipeline.config import SpecError, parse
from pipeline.encoders import QUERY_KINDS
from pipeline.encoders.smart import Adapter
from pipeline.registry import ENCODERS
from pipeline.schema import vectors_type
from pipeline.tokens import KINDS, unit_vectors
from tests.encoders.endpoints import MODEL, TextModel, serve
from tests.images import noise, png
from tests.tiny import SLEEPING

#: Small specs of encoders, without their names.
SPECS = {
    "minilm": {"window": 32, "overlap_tokens": 8},
    "precomputed": {"dim": 4, "label": "random"},
    SLEEPING: {"seconds": 0, "batch_size": 3, "num_tokens": 6, "dim": 4},
    "transcript": {"text": {"window": 32, "overlap_tokens": 8}},
}

#: Tiny checkpoints and further settings of encoders without bundled weights.
CHECKPOINTS = {
    "colbert": ("colbert_modernbert", {}),
    "colpali": ("colpali", {}),
    "dual": ("siglip", {}),
    "jina_v4": ("jina_v4", {}),
    "qwen_omni": ("qwen2_5_omni", {"query_prompt": "{content}<|im_end|>"}),
    "qwen_vl": ("qwen2_5_vl", {"query_prompt": "{content}<|im_end|>"}),
    "sentence_transformers": ("colbert_modernbert", {}),
}
#: Sizes of the images of the items; None: no image.
SIZES = [(40, 40), (32, 64), (90, 50), None, (33, 47), (64, 64)]

TEXTS = [
    "A slender delta wing at low speed.",
    "lift",
    " ".join(f"word{i}" for i in range(60)),
    "",
    "Überschall 超音速 🙂",
    "drag",
]


def make_items() -> pa.Table:
    """Returns items of different lengths with all columns that an encoder may read."""
    generator = np.random.default_rng(0)
    vectors = [generator.normal(size=(n, 4)).tolist() for n in (3, 1, 40, 0, 2, 1)]
    spans = [[list(word.span()) for word in re.finditer(r"\S+", text)] for text in TEXTS]
    boxes = [[[0.1, i / 100, 0.2, (i + 1) / 100] for i in range(len(words))] for words in spans]
    return pa.table(
        {
            "item_id": [f"item-{i}" for i in range(len(TEXTS))],
            "text": TEXTS,
            "vectors": pa.array(vectors, vectors_type(4, pa.float32())),
            "word_spans": pa.array(spans, pa.list_(pa.list_(pa.int32(), 2))),
            "word_boxes": pa.array(boxes, pa.list_(pa.list_(pa.float32(), 4))),
            "image": pa.array([size and png(noise(*size)) for size in SIZES], pa.binary()),
        }
    )


ITEMS = make_items()


@pytest.fixture(scope="module")
def server(checkpoint):
    with serve(TextModel(checkpoint("colbert_bert"))) as server:
        yield server


@pytest.fixture(scope="module", params=[*ENCODERS.names(), SLEEPING])
def encoder(request, checkpoint, tmp_path_factory):
    given = SPECS.get(request.param)
    if request.param == "http":
        server = request.getfixturevalue("server")
        given = {"url": server.url, "model": MODEL, "dim": server.model.dim, "api": "pooling"}
    if request.param == "sentence_transformers":
        pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
    if request.param == "smart":
        folder = tmp_path_factory.mktemp("adapter")
        Adapter(384, 16).save(folder)
        given = {"encoder": "minilm", "adapter": str(folder)}
    if given is None:
        family, given = CHECKPOINTS[request.param]
        given = {"model": checkpoint(family), "dtype": "float32", **given}
    return ENCODERS.build(ENCODERS.resolve({"name": request.param, **given}))


def test_spec_round_trip(encoder):
    assert parse(type(encoder.spec), encoder.spec.model_dump(mode="json")) == encoder.spec


def test_check_accepts_valid_specs(encoder):
    type(encoder).check(encoder.spec)


def test_required_inputs_suffice(encoder):
    required = type(encoder).required_inputs(encoder.spec)
    list(encoder.encode(ITEMS.select(list({"item_id", *required}))))


def test_encodes_each_item_once(encoder):
    rows = np.concatenate([rows for rows, _ in encoder.encode(ITEMS)])
    assert sorted(rows.tolist()) == list(range(len(TEXTS)))


def test_shapes_and_types(encoder):
    for rows, batch in encoder.encode(ITEMS):
        B, N, D = batch.vectors.shape
        assert len(rows) == B and encoder.dim == D
        assert batch.vectors.dtype in (torch.float32, torch.float16)
        assert batch.normalised == encoder.normalised
        assert (batch.pooled is None) == (encoder.pooled_dim is None)
        assert (batch.spans is not None) == encoder.has_spans
        assert (batch.extents is not None) == encoder.has_extents
        if batch.pooled is not None:
            assert batch.pooled.shape == (B, encoder.pooled_dim)
            norms = batch.pooled[batch.lengths > 0].norm(dim=-1)
            torch.testing.assert_close(norms, torch.ones_like(norms))
        if batch.extents is not None:
            assert batch.extents.shape == (B, N, 6) and batch.extents.dtype == torch.float32
        if batch.spans is not None:
            assert batch.spans.shape == (B, N, 2) and batch.spans.dtype == torch.int32
        if batch.kind is not None:
            assert batch.kind.shape == (B, N) and batch.kind.dtype == torch.int8
            assert batch.kind.max() < len(KINDS)


def test_vectors_are_finite_and_normalised_as_declared(encoder):
    for _, batch in encoder.encode(ITEMS):
        vectors = batch.vectors[batch.mask].float()
        assert torch.isfinite(vectors).all()
        if encoder.normalised:
            norms = vectors.norm(dim=-1)
            torch.testing.assert_close(norms, torch.ones_like(norms), atol=2e-3, rtol=0)


def test_equal_inputs_give_bit_identical_outputs(encoder):
    rebuilt = type(encoder)(encoder.spec)
    assert rebuilt.fingerprint == encoder.fingerprint
    pairs = zip(encoder.encode(ITEMS), rebuilt.encode(ITEMS), strict=True)
    for (rows, batch), (other_rows, other) in pairs:
        assert np.array_equal(rows, other_rows) and torch.equal(batch.mask, other.mask)
        assert torch.equal(unit_vectors(batch), unit_vectors(other))


def test_batching_does_not_change_vectors(encoder):
    for rows, batch in encoder.encode(ITEMS):
        for i, row in enumerate(rows):
            _, alone = next(iter(encoder.encode(ITEMS.slice(row, 1))))
            assert len(alone) == 1 and alone.lengths[0] == batch.lengths[i]
            torch.testing.assert_close(
                alone.vectors[0][alone.mask[0]],
                batch.vectors[i][batch.mask[i]],
                atol=1e-5,
                rtol=0,
            )


def test_empty_table_yields_no_batches(encoder):
    assert list(encoder.encode(ITEMS.slice(0, 0))) == []


def test_media_queries(encoder):
    kinds = encoder.query_kinds(encoder.spec)
    assert set(kinds) <= QUERY_KINDS.keys()
    frame = {"index": 0, "height": 40, "width": 40, "pixels": noise(40, 40).tobytes()}
    video = {
        "frames": [{**frame, "seconds": 0.0}, {**frame, "seconds": 1.0}],
        "span": {"unit": "seconds", "start": 0.0, "end": 2.0},
    }
    samples = np.random.default_rng(0).normal(0, 0.1, 8000).astype("<f4").tobytes()
    contents = {
        "image": {"image": png(noise(40, 40))},
        "audio": {"audio": {"start": 0.0, "sample_rate": 16_000, "samples": samples}},
        "video": video,
    }
    queries = [content for kind, content in contents.items() if kind in kinds]
    if "image" in kinds and "composed" in kinds:
        queries.append({"text": "but in red", **contents["image"]})
    if encoder.spec.name == "transcript":
        return  # requires words, see `test_transcript`
    if queries:
        encoded = encoder.encode_media(queries)
        assert len(encoded.tokens) == len(queries) and (encoded.tokens.lengths > 0).all()
        names = map(len, encoded.token_texts)
        assert list(names) == encoded.tokens.lengths.tolist()
        return
    rule = " or ".join(QUERY_KINDS[kind] for kind in kinds) or "query vectors"
    with pytest.raises(SpecError, match=f"must be {rule}, got .*, which is not supported by "):
        encoder.encode_media([contents["image"]])


def test_text_queries(encoder):
    texts = ["wing lift", "drag"]
    if not encoder.query_kinds(encoder.spec):  # queries are vectors
        with pytest.raises(SpecError, match="cannot be encoded"):
            encoder.encode_queries(texts)
        return
    queries = encoder.encode_queries(texts)
    tokens = queries.tokens
    assert len(tokens) == 2 and tokens.vectors.shape[2] == encoder.dim
    assert tokens.normalised == encoder.normalised
    assert [len(names) for names in queries.token_texts] == tokens.lengths.tolist()
    if tokens.spans is not None:
        for text, spans, names in zip(
            texts, tokens.spans.tolist(), queries.token_texts, strict=True
        ):
            named_spans = list(zip(names, spans[: len(names)], strict=True))
            assert all(text[start:end] == name for name, (start, end) in named_spans if start >= 0)
            assert any(start >= 0 for _, (start, _) in named_spans)


class WaitingTokenizer:
    """Tokenizer that waits before it encodes, so that another thread can change its settings."""

    def __init__(self, tokenizer):
        vars(self)["tokenizer"] = tokenizer

    def __getattr__(self, name):
        if name == "encode_batch":
            time.sleep(2e-3)
        return getattr(self.tokenizer, name)

    def __setattr__(self, name, value):
        setattr(self.tokenizer, name, value)


def test_queries_and_items_are_encoded_in_two_threads(encoder, monkeypatch):
    """A validation encodes queries while the next batch is read."""
    if "text" not in encoder.query_kinds(encoder.spec):
        pytest.skip("has no text queries")

    def encode_items() -> list[torch.Tensor]:
        return [unit_vectors(batch) for _, batch in encoder.encode(ITEMS)]

    def encode_queries() -> torch.Tensor:
        return unit_vectors(encoder.encode_queries(["lift <image> [SEP]", "drag"]).tokens)

    items, queries = encode_items(), encode_queries()
    waiting = property(lambda tokenizer: WaitingTokenizer(vars(tokenizer)["_tokenizer"]))
    monkeypatch.setattr(PreTrainedTokenizerFast, "_tokenizer", waiting, raising=False)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(5):
            pending = pool.submit(encode_items)
            while not pending.done():
                torch.testing.assert_close(encode_queries(), queries)
            torch.testing.assert_close(pending.result(), items)


def test_templates(encoder):
    """The templates have slots in place of the content."""
    templates = encoder.templates()
    if encoder.spec.name in ("precomputed", SLEEPING):
        assert templates is None
        return
    assert templates.query.count("{query}") == 1
    for slot, template in (("{text}", templates.text), ("{image}", templates.image)):
        assert template is None or slot in template
    inputs = encoder.supported_inputs(encoder.spec)
    assert (templates.image is not None) <= ("image" in inputs)
