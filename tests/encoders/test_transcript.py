"""The transcript encoder on real images and speech: words, extents, times and kinds."""

import io
import json
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
import soundfile
import torch
from PIL import Image, ImageDraw, ImageFont

from pipeline.config import SpecError, dump, parse
from pipeline.encoders.minilm import MiniLM
from pipeline.encoders.transcript import Transcript
from pipeline.schema import AUDIO as AUDIO_TYPE
from pipeline.schema import (
    FRAME,
    ITEM,
    WORD_BOXES,
    WORD_KINDS,
    WORD_SPANS,
    WORD_TIMES,
    Item,
)
from pipeline.tokens import AUDIO, TEXT
from tests.conftest import ROOT

PAYLOAD = pa.schema(
    [
        pa.field("word_spans", WORD_SPANS),
        pa.field("word_boxes", WORD_BOXES),
        pa.field("scan", pa.binary()),
        pa.field("frames", pa.list_(FRAME)),
        pa.field("audio", AUDIO_TYPE),
    ]
)


def table(*items: Item) -> pa.Table:
    return pa.Table.from_pylist([item.row() for item in items], pa.schema([*ITEM, *PAYLOAD]))


def item(item_id: str, text: str | None = None, span=None, **payload) -> Item:
    return Item(item_id, item_id, "s", "any", "r", text=text, span=span, payload=payload)


def draw(text: str) -> Image.Image:
    image = Image.new("RGB", (400, 120), "white")
    font = ImageFont.load_default(24)
    ImageDraw.Draw(image).text((20, 40), text, font=font, fill="black")
    return image


def draw_png(text: str) -> bytes:
    data = io.BytesIO()
    draw(text).save(data, "PNG")
    return data.getvalue()


def speech() -> dict:
    samples, rate = soundfile.read(ROOT / "jobs/data/speech/jfk.flac", dtype="float32")
    samples = samples[8 * rate :].mean(axis=1)
    return {"start": 8.0, "sample_rate": rate, "samples": samples.astype("<f4").tobytes()}


@pytest.fixture(scope="module")
def encoder() -> Transcript:
    return build()


def build(**fields) -> Transcript:
    return Transcript(parse(Transcript.Spec, {"name": "transcript", **fields}))


@pytest.fixture(scope="module")
def preprocessor(encoder) -> Callable[[pa.Table], pa.Table]:
    """Recognisers of the encoder, which are loaded once."""
    return type(encoder).preprocessor(encoder.spec)


@pytest.fixture(scope="module")
def prepared(preprocessor) -> pa.Table:
    pixels = np.asarray(draw("Wind tunnel news")).tobytes()
    frames = [
        {"index": i, "seconds": float(i), "height": 120, "width": 400, "pixels": pixels}
        for i in (4, 6)
    ]
    layer = {"word_spans": [[0, 4], [5, 9]], "word_boxes": [[0, 0, 0.5, 1], [0.5, 0, 1, 1]]}
    return preprocessor(
        table(
            item("page", "page text", **layer),
            item("scan", scan=draw_png("Delta wing")),
            item("clip", span=("seconds", 4.0, 8.0), frames=frames, audio=speech()),
            item("plain", "plain words"),
            item("photo", scan=draw_png("")),
            item("blank", " \n"),
        )
    )


def tokens(encoder: Transcript, items: pa.Table) -> list[dict[str, torch.Tensor]]:
    found = {}
    for rows, batch in encoder.encode(items):
        for i, row in enumerate(rows):
            names = ("vectors", "spans", "extents", "kind", "confidence")
            fields = {name: getattr(batch, name) for name in names}
            found[row] = {k: v[i][batch.mask[i]] for k, v in fields.items() if v is not None}
    return [found[row] for row in range(items.num_rows)]


def test_combines_text_ocr_and_speech(prepared):
    texts = prepared["text"].to_pylist()
    assert texts[:2] == ["page text", "Delta wing"]
    assert texts[3:] == ["plain words", None, None]
    visible, spoken = texts[2].split("\n\n")
    assert visible == "Wind tunnel news" and "country" in spoken


def test_words_of_scan_follow_its_stamp(preprocessor):
    layer = {"word_spans": [[0, 6]], "word_boxes": [[0.04, 0.3, 0.25, 0.6]]}
    items = table(item("a", "000123", **layer, scan=draw_png("Delta wing")))
    (row,) = preprocessor(items).to_pylist()
    assert row["text"] == "000123\n\nwing"  # the other word is in the box of the stamp
    assert [row["text"][slice(*span)] for span in row["word_spans"]] == ["000123", "wing"]
    confidences = row["word_confidences"]
    assert len(row["word_boxes"]) == 2 and np.isnan(confidences[0]) and confidences[1] > 0.5


def test_replaces_media_columns_with_word_columns(prepared):
    assert not {"scan", "frames", "audio"} & set(prepared.column_names)
    assert prepared.schema.field("word_spans").type == WORD_SPANS
    assert prepared.schema.field("word_times").type == WORD_TIMES
    assert prepared.schema.field("word_kinds").type == WORD_KINDS
    for row in prepared.to_pylist():
        names = ("word_spans", "word_boxes", "word_times", "word_kinds", "word_confidences")
        assert len({len(row[name]) for name in names}) == 1
        words = [row["text"][start:end] for start, end in row["word_spans"]]
        assert all(words) and not any(set(word) & set(" \n") for word in words)
    clip = prepared.to_pylist()[2]
    assert set(clip["word_kinds"]) == {TEXT, AUDIO}
    assert clip["word_kinds"] == sorted(clip["word_kinds"], reverse=True)  # visible text first


def test_tokens_have_the_extents_of_their_words(encoder, prepared):
    page, scan, clip, plain, photo, blank = tokens(encoder, prepared)
    assert page["extents"][:, :4].tolist() == [[0, 0, 0.5, 1], [0.5, 0, 1, 1]]
    assert page["extents"][:, 4:].isnan().all() and (page["kind"] == TEXT).all()
    assert page["confidence"].isnan().all()  # not recognised
    assert not scan["extents"][:, :4].isnan().any() and scan["extents"][:, 4:].isnan().all()
    assert plain["extents"].isnan().all() and len(plain["vectors"]) == 2
    assert len(photo["vectors"]) == len(blank["vectors"]) == 0

    text = prepared["text"][2].as_py()
    strings = [text[start:end] for start, end in clip["spans"].tolist()]
    tunnel, country = strings.index("tunnel"), strings.index("country")
    assert clip["kind"][tunnel] == TEXT and clip["kind"][country] == AUDIO
    assert 0 < clip["confidence"][country] < clip["confidence"][tunnel] <= 1
    assert clip["extents"][tunnel, 4:].tolist() == [4, 8]
    assert 0.1 < clip["extents"][tunnel, 0] < clip["extents"][tunnel, 2] < 0.6
    start, end = clip["extents"][country, 4:].tolist()
    assert 9.8 < start < end < 10.7  # spoken from 10.0 s to 10.5 s
    assert clip["extents"][country, :4].isnan().all()


def test_vectors_match_minilm(encoder, prepared):
    minilm = MiniLM(MiniLM.Spec())
    assert encoder.fingerprint == minilm.fingerprint
    assert Transcript.column_prefix(encoder.spec) == "minilm"
    texts = prepared.select(["text"]).slice(0, 4)
    expected, found = tokens(encoder, prepared.slice(0, 4)), {}
    for rows, batch in minilm.encode(texts):
        found |= {row: batch.vectors[i][batch.mask[i]] for i, row in enumerate(rows)}
    for row, item_tokens in enumerate(expected):
        torch.testing.assert_close(item_tokens["vectors"], found[row], atol=1e-6, rtol=0)
    ours, theirs = (e.encode_queries(["wing lift"]).tokens.vectors for e in (encoder, minilm))
    assert torch.equal(ours, theirs)


def test_encodes_captions_as_text(encoder):
    items = pa.table({"item_id": ["a", "b"], "text": ["A dog on a beach.", None]})
    first, second = tokens(encoder, items)
    assert len(first["vectors"]) == 6 and first["extents"].isnan().all()
    assert len(second["vectors"]) == 0


@pytest.mark.parametrize("fields", [{"keep_special": True}, {"document_prefix": "passage: "}])
def test_items_without_words_have_no_tokens(fields):
    quiet = build(text=fields, ocr=None, speech=None)
    empty, full = tokens(quiet, pa.table({"text": ["", "one"]}))
    assert len(empty["vectors"]) == 0 and len(full["vectors"]) > 1


def test_inputs_depend_on_the_recognisers(tmp_path):
    def inputs(**fields):
        return Transcript.supported_inputs(parse(Transcript.Spec, fields))

    files = {"name": "precomputed", "path": str(tmp_path)}
    assert inputs() == ("text", "scan", "frames", "audio")
    assert inputs(ocr=None) == ("text", "audio")
    assert inputs(ocr=files, speech=files) == ("text", "item_id")
    assert Transcript.default_inputs == ()


def test_precomputed_speech(tmp_path):
    (tmp_path / "asr.jsonl").write_text(
        json.dumps({"id": "clip", "text": "boundary layer", "start": 2, "end": 4})
    )
    speech = {"name": "precomputed", "path": str(tmp_path / "asr.jsonl")}
    encoder = build(ocr=None, speech=speech)
    items = type(encoder).preprocessor(encoder.spec)(table(item("clip"), item("other")))
    assert items["text"].to_pylist() == ["boundary layer", None]
    layer = tokens(encoder, items)[0]
    assert layer["kind"].tolist() == [AUDIO, AUDIO]
    assert layer["extents"][0, 4].item() == 2 and layer["extents"][-1, 5].item() == 4


def test_recognition_is_deterministic(preprocessor):
    items = table(item("scan", scan=draw_png("Delta wing")), item("plain", "x"))
    first, second = (str(preprocessor(items).to_pylist()) for _ in range(2))
    assert first == second and "'Delta wing'" in first
    assert preprocessor(items.slice(0, 0)).num_rows == 0


def test_errors_name_the_field(tmp_path):
    with pytest.raises(SpecError, match="^ocr.name must be one of .*, got 'tesseract'"):
        parse(Transcript.Spec, {"ocr": "tesseract"})
    with pytest.raises(SpecError, match="^speech.min_pause_seconds must be "):
        parse(Transcript.Spec, {"speech": {"name": "pocketsphinx", "min_pause_seconds": 0}})
    with pytest.raises(SpecError, match="^text.window must be "):
        parse(Transcript.Spec, {"text": {"window": 1}})
    spec = parse(Transcript.Spec, {"text": {"layer": 99}})
    with pytest.raises(SpecError, match="^text.layer must be .*99"):
        Transcript.check(spec)
    missing = {"name": "precomputed", "path": str(tmp_path / "a.jsonl")}
    spec = parse(Transcript.Spec, {"speech": missing})
    with pytest.raises(SpecError, match="^speech.path must be .*does not exist"):
        Transcript.check(spec)
    Transcript.check_queries(spec)
    assert parse(Transcript.Spec, dump(spec)) == spec


def test_only_precomputed_recognisers_have_warnings(tmp_path):
    path = tmp_path / "words.jsonl"
    path.write_text('{"id": "a", "text": "lift"}\n')
    given = {"ocr": {"name": "precomputed", "path": str(path)}}
    for fields, expected in (({}, False), ({"ocr": None}, False), (given, True)):
        assert Transcript.has_warnings(parse(Transcript.Spec, fields)) is expected
