"""SigLIP 2, SigLIP and CLIP, compared with transformers: states, single vectors, attention."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from pipeline.config import SpecError
from pipeline.data.decode import Unreadable
from pipeline.encoders.dual import CLASSES
from pipeline.registry import ENCODERS
from pipeline.schema import FRAME, SPAN
from pipeline.search.options import SearchOptions
from pipeline.search.query import Queries
from pipeline.taps import Tap
from pipeline.tokens import SPECIAL, VISUAL, normalise
from tests.images import make_images, noise, png
from tests.tiny.checkpoints import siglip

FAMILIES = ["siglip", "siglip2", "clip"]
SIZES = [(50, 60), (100, 20), (33, 33), (64, 64)]
TEXTS = ["Heat at the Wing", "lift", "a"]


@pytest.fixture(scope="module")
def build(checkpoint):
    def build(family, **fields):
        given = {"name": "dual", "model": checkpoint(family), "dtype": "float32"}
        return ENCODERS.build(ENCODERS.resolve({**given, **fields}))

    return build


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def encoder(build, family):
    return build(family)


@pytest.fixture(scope="module")
def reference(checkpoint, family):
    """The transformers model and processor, applied to one image or text."""
    model_class, processor_class = CLASSES[family]
    folder = checkpoint(family)
    model = model_class.from_pretrained(folder, attn_implementation="eager").eval()
    processor = processor_class.from_pretrained(folder)

    @torch.no_grad()
    def run(image=None, text=None):
        if text is not None:
            inputs = processor.tokenizer(text, padding="max_length", max_length=16)["input_ids"]
            return model.get_text_features(torch.tensor([inputs]))
        inputs = processor.image_processor(images=[image], return_tensors="pt")
        options = {"output_hidden_states": True, "output_attentions": True}
        output = model.get_image_features(**inputs, **options)
        # NaFlex has padding after the patches, and CLIP a class token before them.
        first = int(family == "clip")
        last = int(inputs["spatial_shapes"][0].prod()) if family == "siglip2" else first + 16
        return output, slice(first, last)

    return run


def encode_items(encoder, items, taps=()):
    """Returns the tokens of each item, in order."""
    found = {
        int(row): batch.take(slice(i, i + 1))
        for rows, batch in encoder.encode(items, taps)
        for i, row in enumerate(rows)
    }
    return [found[row] for row in sorted(found)]


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_tokens_are_the_states_used_by_edje(encoder, reference, family):
    images, items = make_images(*SIZES)
    for image, batch in zip(images, encode_items(encoder, items), strict=True):
        output, patches = reference(image)
        states = output.hidden_states[-2] if family == "clip" else output.last_hidden_state
        assert_close(batch.vectors[batch.mask], states[0, patches])
        assert (batch.kind[batch.mask] == VISUAL).all() and not batch.normalised


def test_layer_single_is_the_single_vector(build, reference, family):
    encoder = build(family, layer="single")
    images, items = make_images(*SIZES)
    for image, batch in zip(images, encode_items(encoder, items), strict=True):
        output, _ = reference(image)
        assert batch.mask.sum() == 1 and batch.pooled is None and batch.normalised
        assert_close(batch.vectors[batch.mask], normalise(output.pooler_output))
        assert (batch.kind[batch.mask] == VISUAL).all()
    encoded = encoder.encode_queries(TEXTS)
    assert encoded.token_texts == [[text] for text in TEXTS]
    for text, vectors, mask in zip(TEXTS, encoded.tokens.vectors, encoded.tokens.mask, strict=True):
        expected = reference(text=text.lower()).pooler_output
        assert mask.sum() == 1
        assert_close(vectors[mask], normalise(expected))


def test_single_vectors_match_transformers(encoder, reference):
    images, items = make_images(*SIZES)
    for image, batch in zip(images, encode_items(encoder, items), strict=True):
        output, _ = reference(image)
        assert_close(batch.pooled, normalise(output.pooler_output))
    queries = encoder.encode_queries(TEXTS)
    for text, pooled in zip(TEXTS, queries.tokens.pooled, strict=True):
        assert_close(pooled, normalise(reference(text=text.lower()).pooler_output[0]))


def test_texts_as_documents_have_the_vectors_of_queries(build, encoder, family):
    texts = build(family, documents="text")
    assert texts.fingerprint == encoder.fingerprint
    assert type(texts).supported_inputs(texts.spec) == ("text",)
    with pytest.raises(Unreadable, match="text too long"):
        encode_items(texts, pa.table({"item_id": ["a"], "text": ["heat " * 40]}))
    items = pa.table({"item_id": ["a", "b", "c"], "text": [*TEXTS[:2], None]})
    *found, empty = encode_items(texts, items)
    queries = encoder.encode_queries(TEXTS[:2]).tokens
    assert not empty.mask.any()
    for batch, pooled, vectors, mask in zip(
        found, queries.pooled, queries.vectors, queries.mask, strict=True
    ):
        assert_close(batch.pooled[0], pooled)
        expected = vectors[mask] if mask.any() else torch.zeros(1, encoder.dim)
        assert_close(batch.vectors[batch.mask], expected)


def test_long_texts_are_truncated_as_by_transformers(build, checkpoint, encoder, family):
    text = "heat " * 40
    with pytest.raises(SpecError, match="at most 16 tokens unless `overlong` is truncate"):
        encoder.encode_queries([text])
    truncating = build(family, documents="text", overlong="truncate")
    assert truncating.fingerprint == encoder.fingerprint
    model_class, processor_class = CLASSES[family]
    processor = processor_class.from_pretrained(checkpoint(family))
    options = {"truncation": True, "padding": "max_length", "max_length": 16}
    inputs = processor.tokenizer([text], return_tensors="pt", **options)["input_ids"]
    with torch.no_grad():
        model = model_class.from_pretrained(checkpoint(family)).eval()
        expected = normalise(model.get_text_features(inputs).pooler_output)
    assert_close(truncating.encode_queries([text]).tokens.pooled, expected)
    (batch,) = encode_items(truncating, pa.table({"item_id": ["a"], "text": [text]}))
    assert_close(batch.pooled, expected)


@pytest.mark.parametrize("layer", [0, 1, 2, 3, -1, -4])
def test_selects_the_layer(build, reference, family, layer):
    (image,), items = make_images((40, 30))
    (batch,) = encode_items(build(family, layer=layer), items)
    output, patches = reference(image)
    states = output.last_hidden_state if layer in (3, -1) else output.hidden_states[layer]
    assert_close(batch.vectors[0], states[0, patches])


@pytest.mark.parametrize("heads", ["mean", "max"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_attention_matches_eager_attention(build, reference, family, heads, layer):
    images, items = make_images(*SIZES)
    has_class = family == "clip"
    statistics = ("column_sums", *(("pooled_row",) if has_class else ()))
    encoder = build(family, keep_class=has_class)
    assert type(encoder).attention(encoder.spec) == (statistics, 3)
    taps = [Tap(statistic, heads, str(layer)) for statistic in statistics]
    reduce_heads = torch.mean if heads == "mean" else torch.amax
    for image, batch in zip(images, encode_items(encoder, items, taps), strict=True):
        output, patches = reference(image)
        attention_HNN = output.attentions[layer][0, :, :, : patches.stop]
        rows = (attention_HNN[:, patches].sum(dim=1), attention_HNN[:, 0])
        for tap, head_values in zip(taps, rows, strict=False):
            assert_close(batch.taps[tap.name][batch.mask], reduce_heads(head_values, dim=0))


def test_class_token(build):
    _, items = make_images((40, 40))
    (plain,), (whole,) = (
        encode_items(build("clip", keep_class=keep), items) for keep in (False, True)
    )
    assert_close(whole.vectors[:, 1:], plain.vectors)
    assert whole.kind[0].tolist() == [SPECIAL] + [VISUAL] * 16
    assert whole.extents[0, 0].isnan().all()
    names = build("clip", keep_class=True).encode_media([{"image": png(noise(40, 40))}]).token_texts
    assert names[0][:2] == ["[CLASS]", "[12,12]"]


def test_normalise(build):
    _, items = make_images(*SIZES[:1])
    (plain,), (unit,) = (encode_items(build("siglip", normalise=on), items) for on in (False, True))
    assert_close(unit.vectors, normalise(plain.vectors))
    assert unit.normalised and not plain.normalised


def test_naflex_grid_preserves_the_aspect_ratio(build):
    _, items = make_images((80, 40), (40, 40))
    wide, square = encode_items(build("siglip2"), items)
    # The largest grid of aspect ratio 2 with at most 20 patches has 3 rows of 6.
    assert [int(batch.lengths[0]) for batch in (wide, square)] == [18, 16]
    assert wide.extents[0, 7, :4].tolist() == pytest.approx([1 / 6, 1 / 3, 2 / 6, 2 / 3])
    (fewer,) = encode_items(build("siglip2", max_patches=8), items.slice(0, 1))
    assert fewer.lengths.tolist() == [8]


@pytest.mark.parametrize(
    ("size", "first", "last"),
    [
        ((64, 64), [0, 0, 0.25, 0.25], [0.75, 0.75, 1, 1]),
        ((64, 32), [0.25, 0, 0.375, 0.25], [0.625, 0.75, 0.75, 1]),
        ((32, 128), [0, 0.375, 0.25, 0.4375], [0.75, 0.5625, 1, 0.625]),
    ],
)
def test_clip_extents_account_for_the_crop(build, size, first, last):
    _, items = make_images(size)
    (batch,) = encode_items(build("clip"), items)
    assert batch.extents[0, [0, -1], :4].tolist() == [first, last]


def test_clip_ignores_content_outside_the_crop(build):
    encoder = build("clip")
    first, second = noise(64, 32), noise(64, 32)
    second.paste(noise(14, 32, seed=5), (0, 0))  # the crop starts at column 16
    assert_close(
        *(encoder.encode_media([{"image": png(image)}]).tokens.vectors for image in (first, second))
    )
    second.paste(noise(16, 32, seed=5), (18, 0))
    vectors = [
        encoder.encode_media([{"image": png(image)}]).tokens.vectors for image in (first, second)
    ]
    assert not torch.allclose(*vectors, atol=1e-3)


def test_text_tokens_of_towers_of_equal_width(build, checkpoint):
    for family in ("siglip", "siglip2"):
        encoder = build(family)
        queries = encoder.encode_queries(["lift off"])
        assert "".join(queries.token_texts[0]).replace(" ", "") == "liftoff"
        ids = encoder._reader.read_text_query("lift off")[0].sequence["input_ids"]
        with torch.no_grad():
            states = encoder.model.text_model(ids[None]).last_hidden_state
        assert_close(queries.tokens.vectors[0], states[0, : queries.tokens.vectors.shape[1]])


def test_text_with_single_vector_of_vision_width(build, tmp_path):
    siglip(tmp_path / "unequal", text_width=16)
    encoder = build("siglip", model=str(tmp_path / "unequal"))
    queries = encoder.encode_queries(["lift off", "heat"])
    assert queries.token_texts == [["lift off"], ["heat"]]
    assert_close(normalise(queries.tokens.vectors[:, 0]), queries.tokens.pooled)


def test_text_without_comparable_tokens_has_only_a_single_vector(build):
    queries = Queries.from_encoded(build("clip").encode_queries(["lift", "heat transfer"]))
    assert [tuple(tokens.shape) for tokens in queries.tokens] == [(0, 32), (0, 32)]
    assert queries.pooled.shape == (2, 24)
    SearchOptions(score="single_vector").check_vectors(queries, "clip_pooled")
    for score in ("maxsim", "hybrid"):
        with pytest.raises(SpecError, match="needs token vectors"):
            SearchOptions(score=score).check_vectors(queries, "clip_pooled")


def test_lowercase(build):
    def pooled(text, **fields):
        return build("siglip", **fields).encode_queries([text]).tokens.pooled

    assert_close(pooled("HEAT"), pooled("heat"))
    assert not torch.allclose(pooled("HEAT", lowercase=False), pooled("heat"), atol=1e-3)


def test_special_tokens_in_queries_are_plain_text(encoder):
    reader = encoder.reader(encoder.spec)
    token = reader.processor.tokenizer.eos_token
    spelled, blank = (
        reader.read_text_query(text)[0].sequence["input_ids"] for text in (token, "a")
    )
    number = reader.processor.tokenizer.eos_token_id
    assert spelled.tolist().count(number) == blank.tolist().count(number)


def test_image_query_matches_item(encoder):
    (image,), items = make_images((40, 24))
    (batch,) = encode_items(encoder, items)
    queries = encoder.encode_media([{"image": png(image)}])
    assert_close(queries.tokens.vectors, batch.vectors)
    assert_close(queries.tokens.pooled, batch.pooled)
    assert len(queries.token_texts[0]) == batch.lengths[0]


def test_encodes_frames_separately(encoder):
    images = [noise(32, 32, seed) for seed in range(2)]
    frames = [
        {"index": i, "seconds": float(i), "height": 32, "width": 32, "pixels": image.tobytes()}
        for i, image in enumerate(images)
    ]
    span = {"unit": "seconds", "start": 0.0, "end": 5.0}
    items = pa.table(
        {
            "item_id": ["clip", "silent"],
            "frames": pa.array([frames, []], pa.list_(FRAME)),
            "span": pa.array([span, None], SPAN),
        }
    )
    video, silent = encode_items(encoder, items)
    assert silent.lengths.tolist() == [0]
    alone = encoder.encode_media([{"image": png(image)} for image in images]).tokens
    assert_close(video.vectors[0], alone.vectors.flatten(0, 1))
    assert_close(video.pooled[0], normalise(alone.pooled.sum(dim=0)))
    assert video.extents[0, [0, -1], 4:].tolist() == [[0, 1], [1, 5]]


def test_fingerprints(build):
    plain = build("clip").fingerprint
    assert build("clip", max_batch_tokens=64, layer=-2).fingerprint == plain
    assert build("clip", layer=2).fingerprint == plain
    for change in ({"layer": -1}, {"lowercase": False}, {"attention": "eager"}):
        assert build("clip", **change).fingerprint != plain


@pytest.mark.parametrize(
    ("family", "fields", "field"),
    [
        ("siglip", {"layer": 4}, "layer"),
        ("clip", {"layer": -5}, "layer"),
        ("siglip", {"keep_class": True}, "keep_class"),
        ("clip", {"max_patches": 9}, "max_patches"),
        ("colpali", {}, "model"),
    ],
)
def test_check_rejects_unsupported_settings(checkpoint, family, fields, field):
    spec = ENCODERS.resolve({"name": "dual", "model": checkpoint(family), **fields})
    with pytest.raises(SpecError) as caught:
        ENCODERS.load("dual").check(spec)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("tokenizer.json", "one of tokenizer.json"),
        ("*processor_config.json", "one of preprocessor_config.json"),
        ("*.safetensors", "has no safetensors file"),
        ("config.json", "in its config.json"),
    ],
)
def test_missing_files(checkpoint, tmp_path, missing, message):
    folder = Path(shutil.copytree(checkpoint("siglip"), tmp_path / "copy"))
    for path in folder.glob(missing):
        path.unlink()
    spec = ENCODERS.resolve({"name": "dual", "model": str(folder)})
    with pytest.raises(SpecError, match=message):
        ENCODERS.load("dual").check(spec)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("siglip", {"size": {"height": 24, "width": 32}}, "images of shape 3 x 24 x 32"),
        ("siglip2", {"patch_size": 4}, "patches of shape 48"),
    ],
)
def test_check_rejects_image_processor_of_another_model(
    checkpoint, tmp_path, family, change, message
):
    folder = Path(shutil.copytree(checkpoint(family), tmp_path / "copy"))
    settings = json.loads((folder / "processor_config.json").read_text())
    settings["image_processor"] |= change
    (folder / "processor_config.json").write_text(json.dumps(settings))
    spec = ENCODERS.resolve({"name": "dual", "model": str(folder)})
    with pytest.raises(SpecError, match=message):
        ENCODERS.load("dual").check(spec)


def test_check_rejects_vision_tower_without_head(checkpoint, tmp_path):
    folder = Path(shutil.copytree(checkpoint("siglip"), tmp_path / "copy"))
    settings = json.loads((folder / "config.json").read_text())
    settings["vision_config"]["vision_use_head"] = False
    (folder / "config.json").write_text(json.dumps(settings))
    spec = ENCODERS.resolve({"name": "dual", "model": str(folder)})
    with pytest.raises(SpecError, match="pooling head"):
        ENCODERS.load("dual").check(spec)


def test_rejects_queries_that_are_too_long(encoder):
    with pytest.raises(SpecError, match="at most 16 tokens"):
        encoder.encode_queries(["heat " * 20])
