"""Maps of the attention of appended tokens."""

from __future__ import annotations

import io
import json
import shutil

import numpy as np
import pyarrow as pa
import pytest
import torch
import yaml
from PIL import Image

import jobs
from jobs import draw
from pipeline import config
from pipeline.encoders.appended import AppendedTokens
from pipeline.encoders.trained import trained_encoder, weight_hashes, write_trained_compressor
from pipeline.registry import COMPRESSORS, ENCODERS
from pipeline.search.attention_maps import (
    AppendedAttention,
    AttentionMap,
    draw_map,
    draw_text,
    encoder_spec,
    group_colour,
    read_item,
)
from pipeline.search.map_images import COLOUR, MAX_OPACITY
from pipeline.search.map_sheets import SHEET_STEP
from pipeline.taps import Tap
from tests.conftest import ROOT
from tests.images import noise, png

NUM_TOKENS, BUDGET = 5, 3
#: A document of several pages.
PDF = ROOT / "jobs/data/pages/pdf/us-001.pdf"
TEXT = "The flow of air around a thin wing at high speed.\n\nA second paragraph."


@pytest.fixture(scope="module")
def models(checkpoint, tmp_path_factory):
    """Specs of encoders with appended tokens, by name: AGC on images and texts, and MemTok."""
    folder, found = tmp_path_factory.mktemp("models"), {}
    cases = {
        "visual": ("colpali", checkpoint("colpali"), {"name": "agc", "num_vectors": BUDGET}),
        "textual": ("minilm", "bundled", {"name": "agc", "num_vectors": BUDGET}),
        "memtok": ("minilm", "bundled", {"name": "memtok"}),
    }
    for name, (encoder_name, model, compressor) in cases.items():
        spec = ENCODERS.resolve({"name": encoder_name, "model": model, "dtype": "float32"})
        encoder = ENCODERS.build(spec)
        torch.manual_seed(0)
        appended = AppendedTokens.create(NUM_TOKENS, encoder.embedding)
        hashes = weight_hashes(type(encoder), spec)
        (folder / name).mkdir()
        write_trained_compressor(
            folder / name, compressor, encoder_name, hashes, encoder.dim, appended, None
        )
        fields = config.dump(spec) | {"appended_tokens": str(folder / name)}
        found[name] = str(folder / f"{name}.yaml")
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(fields))
    return found


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "image.png"
    path.write_bytes(png(noise(40, 30)))
    return str(path)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.mark.parametrize("name", ["visual", "textual"])
def test_map_equals_the_statistics_of_the_encoder(name, models, image, text):
    appended = AppendedAttention(encoder_spec(models[name]))
    item = read_item(image if name == "visual" else text, appended.spec)
    found = appended.map(item)
    encoder = ENCODERS.build(appended.spec)
    last = encoder.attention(appended.spec).num_layers - 1
    tap = Tap("appended_rows", layers=str(last))
    ((_, batch),) = encoder.encode(item.inputs, [tap])
    saliency = batch.taps[tap.name][0].numpy()
    np.testing.assert_array_equal(found.saliency, saliency)
    assert found.attention.shape == (len(saliency), NUM_TOKENS)
    np.testing.assert_allclose(found.attention.mean(axis=1), saliency, rtol=1e-5)
    assert np.ptp(found.attention, axis=1).max() > 1e-5  # the tokens differ
    batch.taps["appended_rows/mean/last"] = batch.taps[tap.name]
    agc = COMPRESSORS.build(COMPRESSORS.resolve({"name": "agc", "num_vectors": BUDGET}))
    np.testing.assert_array_equal(found.groups, agc.compress(batch).assignment[0].numpy())
    if name == "visual":
        np.testing.assert_array_equal(found.boxes, batch.extents[0, :, :4].numpy())


def test_long_texts_are_read_in_windows(models, tmp_path):
    path = tmp_path / "long.txt"
    path.write_text(TEXT * 60)
    appended = AppendedAttention(encoder_spec(models["textual"]))
    found = appended.map(read_item(str(path), appended.spec))
    assert len(found.saliency) > 512
    np.testing.assert_allclose(found.attention.mean(axis=1), found.saliency, rtol=1e-5)


def test_page_of_a_pdf_file(models, tmp_path):
    """A text encoder reads the text layer, whose tokens have the location of their word."""
    appended = AppendedAttention(encoder_spec(models["textual"]))
    item = read_item(f"{PDF}#page=2", appended.spec)
    (text,), (spans,), (boxes,) = (
        item.inputs[name].to_pylist() for name in ("text", "word_spans", "word_boxes")
    )
    found = appended.map(item)
    encoder = appended.encoder
    ((_, batch),) = encoder.encode(pa.table({"item_id": ["page"], "text": [text]}))
    for (start, _), box in zip(batch.spans[0].tolist(), found.boxes, strict=True):
        (word,) = [i for i, (first, end) in enumerate(spans) if first <= start < end]
        np.testing.assert_allclose(box, boxes[word], atol=1e-6)
    assert found.groups.max() + 1 == BUDGET
    first = read_item(str(PDF), appended.spec)
    assert first.inputs["text"][0].as_py() != text
    visual = encoder_spec(models["visual"])
    image = read_item(f"{PDF}#page=2", visual)
    assert image.inputs["image"][0].as_py() == image.image == item.image
    out = str(tmp_path / "out.png")
    draw.main(["attention", out, f"{PDF}#page=2", "--model", models["textual"]])
    with Image.open(out) as sheet:
        assert sheet.width > sheet.height / 2


def test_values_and_groups_are_drawn():
    page = png(Image.new("RGB", (448, 448), "white"))
    boxes = np.array([[0, 0, 0.4, 0.4], [0.6, 0, 1, 0.4], [0, 0.6, 0.4, 1], [np.nan] * 4])
    saliency = np.array([0.0, 1.0, 4.0, 9.0])
    attention_NM = np.stack([saliency[[2, 0, 1, 3]], saliency], axis=1)
    map = AttentionMap(boxes, saliency, attention_NM, np.array([0, 1, 1, 0]))
    cells = draw_map(page, map, 1)
    titles, images = zip(*cells, strict=True)
    assert titles == ("item", "mean attention", "2 groups", "appended token 1")
    places = [(90, 90), (358, 90), (90, 358), (358, 358)]
    item, mean, groups, token = ([i.getpixel(place) for place in places] for i in images)

    def tint(colour):
        mixed = np.array([255] * 3) + (np.array(colour) - 255) * (MAX_OPACITY / 255)
        return pytest.approx(mixed.tolist(), abs=1)

    white = (255, 255, 255)
    assert item == [white] * 4
    # The median of the located tokens is transparent, the maximum opaque.
    assert mean == [white, white, tint(COLOUR), white]
    assert token == [tint(COLOUR), white, white, white]
    assert groups == [*(tint(group_colour(group)) for group in (0, 1, 1)), white]
    frame = [images[2].getpixel((int(448 * x), 200)) for x in np.linspace(0, 1, 8, endpoint=False)]
    assert set(frame) == {white}  # only centroids have a frame: 0, and 2 of group 1
    assert images[2].getpixel((90, 267)) == (0, 0, 0)


def test_each_character_of_a_text_has_a_box():
    drawing, boxes = draw_text(TEXT)
    pixels = np.asarray(Image.open(io.BytesIO(drawing)).convert("L"))
    height, width = pixels.shape
    for character, box in zip(TEXT, boxes, strict=True):
        if character.isspace():
            assert np.isnan(box).all()
            continue
        x0, y0, x1, y1 = box * [width, height, width, height]
        assert pixels[int(y0) : int(y1) + 6, int(x0) : int(np.ceil(x1))].min() < 100, character
    first, last = TEXT.index("flow"), TEXT.index("flow") + 3
    assert boxes[first, 2] == pytest.approx(boxes[first + 1, 0])
    assert boxes[last, 2] > boxes[first, 2]


def test_command_draws_a_row_per_item_and_model(models, text, tmp_path, capsys):
    out = tmp_path / "out.png"
    arguments = [str(out), text, "--model", models["textual"], "--model", models["memtok"]]
    draw.main(["attention", *arguments, "--tokens", "2"])
    assert capsys.readouterr().out == f"{out}\n"
    sheet = Image.open(out)
    assert sheet.size == (5 * SHEET_STEP, 2 * (SHEET_STEP + 44))
    # MemTok has no groups, so that its row is one cell shorter.
    last = np.asarray(sheet.convert("L"))[:, 4 * SHEET_STEP :]
    top, bottom = np.split(last, 2)
    assert top.min() < 100 and bottom[30:].min() == 255


def test_folder_of_a_trained_model(checkpoint, models, tmp_path, image):
    """The folder is the model and has the settings of the run."""
    with open(models["visual"]) as file:
        fields = yaml.safe_load(file)
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("colpali"), folder)
    shutil.copytree(fields["appended_tokens"], folder, dirs_exist_ok=True)
    trained = fields | {"model": "the pretrained model", "appended_tokens": None}
    trained["output_tokens"] = "visual"
    learner = {"encoder": trained, "trainable": "all"}
    (folder / "training.json").write_text(json.dumps({"spec": {"learner": learner}}))
    spec = trained_encoder(str(folder), "model")
    assert (spec.model, spec.appended_tokens) == (str(folder), str(folder))
    assert spec.output_tokens == "visual"
    attended = AppendedAttention(encoder_spec(str(folder)))
    assert attended.map(read_item(image, spec)).attention.shape[1] == NUM_TOKENS
    learner["trainable"] = "lora"
    learner["encoder"] = trained | {"model": str(folder)}
    (folder / "training.json").write_text(json.dumps({"spec": {"learner": learner}}))
    assert trained_encoder(str(folder), "model").adapter == str(folder)
    (folder / "training.json").write_text("{}")
    with pytest.raises(config.SpecError, match="has an invalid training.json"):
        trained_encoder(str(folder), "model")


@pytest.mark.parametrize(
    ("model", "file", "message"),
    [
        ("plain", "text.txt", "error: model must be an encoder with the field appended_tokens, "),
        ("folder", "text.txt", "error: model must be the folder of a trained compressor, "),
        ("visual", "text.txt", "error: items must be files of the inputs of colpali (image), "),
        ("visual", "broken.png", "error: items must be an image file "),
        ("textual", "image.png", "error: items must be files of the inputs of minilm (text), "),
        ("textual", "latin1.txt", "error: items must be an image, a text in UTF-8 or a PDF file, "),
        ("textual", "empty.txt", "error: items must be files with tokens that have a location, "),
        ("textual", "one.pdf#page=9", "error: items must be a page of a readable PDF file, got "),
        ("textual", "broken.pdf", "error: items must be a page of a readable PDF file, got "),
        ("textual", "none.txt", "error: items must be the path of an existing file, "),
    ],
)
def test_invalid_input(model, file, message, models, image, text, tmp_path, capsys):
    (tmp_path / "broken.png").write_bytes(b"no image")
    (tmp_path / "latin1.txt").write_bytes(b"\xe9")
    (tmp_path / "empty.txt").write_text(" ")
    (tmp_path / "broken.pdf").write_bytes(b"no document")
    shutil.copy(PDF, tmp_path / "one.pdf")
    (tmp_path / "plain.yaml").write_text("name: minilm")
    (tmp_path / "folder").mkdir()
    others = {"plain": str(tmp_path / "plain.yaml"), "folder": str(tmp_path / "folder")}
    path = (models | others)[model]
    arguments = [str(tmp_path / "out.png"), str(tmp_path / file), "--model", path]
    with pytest.raises(SystemExit) as stopped:
        jobs.run(draw.main, ["attention", *arguments])
    assert stopped.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]  # after the progress of loading
    assert error.startswith(message)
    assert not (tmp_path / "out.png").exists()


def test_number_of_tokens_must_not_be_negative(text, capsys):
    with pytest.raises(SystemExit) as stopped:
        draw.main(["attention", "out.png", text, "--model", text, "--tokens", "-1"])
    assert stopped.value.code == 2
    assert "--tokens: must be an integer >= 0, got '-1'" in capsys.readouterr().err
