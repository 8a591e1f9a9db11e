"""The retrieval classes equal transformers' own path: vectors, attention, queries.

ColPali, ColQwen2 and ColModernVBert: what they have in common; and of each what is its own.
"""

from __future__ import annotations

import io
import json
import shutil

import numpy as np
import pyarrow as pa
import pytest
import torch
import transformers
from PIL import Image

from pipeline.config import SpecError
from pipeline.decoding import Unreadable
from pipeline.decoding.image import decode
from pipeline.encoders.images import open_query_image
from pipeline.registry import ENCODERS
from pipeline.schema import FRAME, SPAN
from pipeline.search.maxsim import maxsim
from pipeline.search.packed import PackedVectors
from pipeline.sources.images import Images
from pipeline.taps import Tap
from pipeline.tokens import PROMPT, VISUAL
from tests.encoders.batches import of_items
from tests.pictures import noise, pictures, png

#: Transformers' class of each, without the ending that its model and its processor have.
CLASSES = {"colpali": "ColPali", "colqwen2": "ColQwen2", "colmodernvbert": "ColModernVBert"}
#: Settings of the source of pictures.
LIMITS = ("max_pixels", "max_input_pixels")
SIZES = [(50, 60), (100, 40), (33, 33), (64, 96)]


@pytest.fixture(scope="module")
def build(checkpoint):
    def build(name, **fields):
        given = {"name": name, "model": checkpoint(name), "dtype": "float32", **fields}
        return ENCODERS.build(ENCODERS.resolve(given))

    return build


@pytest.fixture(scope="module", params=CLASSES)
def encoder(request, build):
    return build(request.param)


@pytest.fixture(scope="module")
def reference(encoder):
    """The model with eager attention, over one picture or text at a time: no padding."""
    name, folder = CLASSES[encoder.spec.name], encoder.spec.model
    model_class = getattr(transformers, f"{name}ForRetrieval")
    model = model_class.from_pretrained(folder, attn_implementation="eager").eval()
    processor = getattr(transformers, f"{name}Processor").from_pretrained(folder)

    @torch.no_grad()
    def run(picture=None, text=None):
        if text is None:
            read = processor.process_images([picture], return_tensors="pt")
        else:
            read = processor.process_queries([text], return_tensors="pt")
        read.pop("labels", None)
        return read, model(**read, output_attentions=True)

    return run


def test_vectors_are_those_of_the_model(encoder, reference):
    images, items = pictures(*SIZES)
    seen = []
    for rows, batch in encoder.encode(items):
        for vectors, mask, row in zip(batch.vectors, batch.mask, rows, strict=True):
            _, expected = reference(images[row])
            torch.testing.assert_close(vectors[mask], expected.embeddings[0], atol=1e-5, rtol=0)
            seen.append(row)
    assert sorted(seen) == list(range(len(SIZES)))


@pytest.mark.parametrize("heads", ["mean", "max"])
def test_attention_is_that_of_eager_layers(encoder, reference, heads):
    images, items = pictures(*SIZES[:3])
    layers = range(encoder.attention(encoder.spec).num_layers)
    statistics = ("column_sums", "eos_row")
    taps = [Tap(name, heads, str(layer)) for layer in layers for name in statistics]
    over_heads = torch.mean if heads == "mean" else torch.amax
    for rows, batch in encoder.encode(items, taps):
        for i, row in enumerate(rows):
            _, expected = reference(images[row])
            mask = batch.mask[i]
            is_visual = batch.kind[i][mask] == VISUAL
            for layer in layers:
                own_HNN = expected.attentions[layer][0]
                rows_of = {"column_sums": own_HNN[:, is_visual].sum(dim=1)}
                rows_of["eos_row"] = own_HNN[:, -1]
                for name in statistics:
                    torch.testing.assert_close(
                        batch.taps[Tap(name, heads, str(layer)).name][i][mask],
                        over_heads(rows_of[name], dim=0),
                        atol=1e-5,
                        rtol=1e-4,
                    )


def test_in_bfloat16(encoder, build):
    """Pixels that travel in the model's own type change nothing."""
    images, items = pictures(*SIZES)
    half = build(encoder.spec.name, dtype="bfloat16")
    name, folder = CLASSES[encoder.spec.name], encoder.spec.model
    model = getattr(transformers, f"{name}ForRetrieval").from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    processor = getattr(transformers, f"{name}Processor").from_pretrained(folder)
    for row, image in enumerate(images):  # one by one: padding changes the sums of half precision
        ((_, batch),) = half.encode(items.slice(row, 1))
        read = processor.process_images([image], return_tensors="pt")
        read.pop("labels", None)
        if encoder.spec.name != "colpali":  # whose class does so itself
            read["pixel_values"] = read["pixel_values"].to(torch.bfloat16)
        with torch.no_grad():
            expected = model(**read).embeddings[0].float()
        torch.testing.assert_close(batch.vectors[0], expected, atol=1e-2, rtol=0)


def test_queries(encoder, reference):
    texts = ["heat transfer in a cone", "lift"]
    queries = encoder.encode_queries(texts)
    for i, text in enumerate(texts):
        read, expected = reference(text=text)
        tokens = queries.tokens.vectors[i][queries.tokens.mask[i]]
        torch.testing.assert_close(tokens, expected.embeddings[0], atol=1e-5, rtol=0)
        assert len(queries.token_texts[i]) == read["input_ids"].shape[1]
    for none in ([], [" "]):
        with pytest.raises(SpecError, match="query"):
            encoder.encode_queries(none)


def test_scores_are_those_of_the_library(encoder):
    """MaxSim as a sum over query tokens, as the processors' own `score_retrieval` has it.

    That pads with zeros and has no mask, so that a zero can win against tokens that are all unlike
    the query. One query and one picture at a time nothing is padded, and both must agree.
    """
    _, items = pictures(*SIZES)
    found = of_items(encoder, items)
    passages = [found[row].vectors[0][found[row].mask[0]] for row in range(len(SIZES))]
    encoded = encoder.encode_queries(["heat transfer in a cone", "lift"]).tokens
    queries = [vectors[mask] for vectors, mask in zip(encoded.vectors, encoded.mask, strict=True)]
    lengths = torch.tensor([len(passage) for passage in passages])
    own = maxsim(queries, PackedVectors.of_values(torch.cat(passages), lengths))
    score = encoder._read_by.processor.score_retrieval
    torch.testing.assert_close(own, score(queries, passages, batch_size=1), atol=1e-4, rtol=0)
    # The difference that padding makes: one token, unlike the query, beside a longer passage.
    query, unlike = queries[0][:1], -queries[0][:1]
    (alone, _), (padded, _) = (
        score([query], [unlike, passages[0]], batch_size=size)[0] for size in (1, 2)
    )
    packed = PackedVectors.of_values(
        torch.cat([unlike, passages[0]]), torch.tensor([1, lengths[0]])
    )
    assert maxsim([query], packed)[0, 0] == pytest.approx(-1, abs=1e-5)
    assert (alone, padded) == (pytest.approx(-1, abs=1e-5), 0)


def test_special_tokens_spelled_out_in_a_query_are_its_own_characters(encoder):
    processor = encoder.reader(encoder.spec).processor
    tokenizer = processor.tokenizer
    (plain,) = encoder.encode_queries(["drag"]).token_texts
    every = {processor.image_token, *tokenizer.all_special_tokens}
    for token in every:
        queries = encoder.encode_queries([f"drag {token} lift"])
        (names,) = queries.token_texts
        assert names.count(token) == plain.count(token)
        own = tokenizer(token, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert len(own) > 1 and len(names) >= len(plain) + len(own)
        assert queries.tokens.mask.all() and queries.tokens.vectors.isfinite().all()


def test_a_query_that_is_too_long(encoder):
    most = encoder.model.config.vlm_config.text_config.max_position_embeddings
    with pytest.raises(SpecError, match=f"at most {most} tokens") as caught:
        encoder.encode_queries(["drag " * most])
    assert caught.value.field == "query"


@pytest.mark.parametrize(("name", "token"), [("colpali", "bos"), ("colqwen2", "pad")])
def test_a_tokenizer_that_lacks_a_token_of_queries(checkpoint, tmp_path, name, token):
    shutil.copytree(checkpoint(name), tmp_path / "model")
    path = tmp_path / "model" / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {f"{token}_token": None}))
    spec = ENCODERS.resolve({"name": name, "model": str(tmp_path / "model")})
    with pytest.raises(SpecError, match=f"whose tokenizer has a {token}_token"):
        ENCODERS.load(name).check(spec)


def test_only_visual_tokens(encoder, build):
    _, items = pictures(*SIZES)
    visual = build(encoder.spec.name, keep="visual")
    for (rows, batch), (_, own) in zip(encoder.encode(items), visual.encode(items), strict=True):
        for i in range(len(rows)):
            of_patches = (batch.kind[i] == VISUAL) & batch.mask[i]
            expected = batch.vectors[i][of_patches]
            torch.testing.assert_close(own.vectors[i][own.mask[i]], expected)
            assert (own.kind[i][own.mask[i]] == VISUAL).all()
            extents = own.extents[i][own.mask[i]]
            assert (extents[:, :4] >= 0).all() and (extents[:, :4] <= 1).all()
            assert (extents[:, 2:4] > extents[:, :2]).all()
            assert batch.extents[i][batch.mask[i] & ~of_patches].isnan().all()


def test_what_is_put_around_a_query(build, encoder):
    name = encoder.spec.name
    (names,) = build(name, query_prefix="", num_augmentation=2).encode_queries(["lift"]).token_texts
    assert "lift" in "".join(names) and "Question" not in "".join(names)
    (longer,) = (
        build(name, query_prefix="", num_augmentation=5).encode_queries(["lift"]).token_texts
    )
    assert len(longer) == len(names) + 3


def test_a_picture_as_a_query_is_read_as_a_page(encoder):
    images, items = pictures((40, 40))
    ((_, batch),) = encoder.encode(items)
    queries = encoder.encode_pictures([png(images[0])])
    torch.testing.assert_close(queries.tokens.vectors, batch.vectors, atol=1e-6, rtol=0)
    assert len(queries.token_texts[0]) == batch.lengths[0]
    with pytest.raises(SpecError, match="cannot be read"):
        encoder.encode_pictures([b"GIF89a"])


def test_a_query_picture_is_seen_as_the_source_of_pictures_gives_it():
    seen = noise(40, 30)
    transparent = seen.convert("RGBA")
    transparent.putalpha(Image.linear_gradient("L").resize(seen.size))
    deep = Image.fromarray(np.asarray(seen.convert("L")).astype(np.uint16) * 257)
    palette = seen.quantize(16)
    palette.info["transparency"] = 3
    turned = Image.Exif()
    turned[0x0112] = 6
    for picture, options in (
        (transparent, {}),
        (deep, {}),
        (palette, {}),
        (seen, {"exif": turned}),
        (noise(2500, 2000), {}),
    ):
        file = io.BytesIO()
        picture.save(file, "PNG", **options)
        limits = {name: Images.Spec.model_fields[name].default for name in LIMITS}
        expected = Image.open(io.BytesIO(decode(file.getvalue(), **limits)["image"]))
        assert np.array_equal(np.asarray(open_query_image(file.getvalue())), np.asarray(expected))


def test_frames_are_read_one_by_one(encoder):
    images = [noise(32, 32, seed) for seed in range(3)]
    frames = [
        {"index": i, "seconds": 2.0 + i, "height": 32, "width": 32, "pixels": image.tobytes()}
        for i, image in enumerate(images)
    ]
    span = {"unit": "seconds", "start": 2.0, "end": 6.0}
    items = pa.table(
        {
            "item_id": ["clip", "silent"],
            "frames": pa.array([frames, []], pa.list_(FRAME)),
            "span": pa.array([span, None], SPAN),
        }
    )
    found = of_items(encoder, items)
    assert found[1].lengths.tolist() == [0]
    length = int(found[0].lengths[0]) // 3
    for i, image in enumerate(images):
        own = found[0].vectors[0, i * length : (i + 1) * length]
        alone = encoder.encode_pictures([png(image)]).tokens.vectors[0]
        torch.testing.assert_close(own, alone, atol=1e-5, rtol=0)
        is_visual = found[0].kind[0, :length] == VISUAL
        times = found[0].extents[0, i * length : (i + 1) * length, 4:][is_visual]
        assert times.unique(dim=0).tolist() == [[2 + i, 3 + i if i < 2 else 6]]


def test_fingerprints(build, encoder):
    name = encoder.spec.name
    assert build(name, max_batch_tokens=64).fingerprint == encoder.fingerprint
    for change in ({"num_augmentation": 3}, {"query_prefix": "q"}, {"attention": "eager"}):
        assert build(name, **change).fingerprint != encoder.fingerprint


def test_a_batch_that_does_not_fit_is_halved(build, encoder):
    small, (_, items) = build(encoder.spec.name), pictures(*SIZES)
    whole = {tuple(rows): batch for rows, batch in encoder.encode(items)}
    forward, sizes = small.forward, []

    def fits(inputs, mask):
        if len(mask) > 1:
            raise torch.OutOfMemoryError("too much")
        sizes.append(len(mask))
        return forward(inputs, mask)

    small.forward = fits
    halves = list(small.encode(items))
    assert sizes == [1] * len(SIZES) and [len(rows) for rows, _ in halves] == sizes
    expected = {row: (batch, i) for rows, batch in whole.items() for i, row in enumerate(rows)}
    for rows, batch in halves:
        of_batch, i = expected[rows[0]]
        torch.testing.assert_close(
            batch.vectors[0], of_batch.vectors[i][of_batch.mask[i]], atol=1e-5, rtol=0
        )

    def fits_never(inputs, mask):
        raise torch.OutOfMemoryError("too much")

    small.forward = fits_never
    with pytest.raises(torch.OutOfMemoryError):
        list(small.encode(items))


# -- what is each one's own ------------------------------------------------------------------------


def test_the_grid_of_colpali(build):
    _, items = pictures((64, 30))
    ((_, batch),) = build("colpali").encode(items)
    kind, extents = batch.kind[0], batch.extents[0]
    assert kind.tolist() == [VISUAL] * 16 + [PROMPT] * (len(kind) - 16)
    assert extents[1, :4].tolist() == [0.25, 0, 0.5, 0.25]
    assert extents[4, :4].tolist() == [0, 0.25, 0.25, 0.5]


def test_queries_of_colpali_may_be_causal(build):
    plain, causal = (
        build("colpali", bidirectional_queries=both).encode_queries(["lift off"]).tokens.vectors
        for both in (True, False)
    )
    assert not torch.allclose(plain[0, 0], causal[0, 0])  # which sees nothing but itself
    other = build("colpali", bidirectional_queries=False).encode_queries(["lift on"])
    torch.testing.assert_close(other.tokens.vectors[0, 0], causal[0, 0])


def test_the_grid_of_colqwen2_has_the_shape_of_the_picture(build):
    encoder = build("colqwen2", keep="visual")
    _, items = pictures((64, 32))
    ((_, batch),) = encoder.encode(items)
    columns, rows = 4, 2  # 16 pixels a merged patch
    assert batch.lengths.tolist() == [rows * columns]
    assert batch.extents[0, 1, :4].tolist() == [0.25, 0, 0.5, 0.5]
    assert batch.extents[0, columns, :4].tolist() == [0, 0.5, 0.25, 1]
    ((_, fewer),) = build("colqwen2", keep="visual", max_pixels=4 * 256).encode(items)
    assert fewer.lengths[0] <= 4


def test_a_picture_too_narrow_for_colqwen2(build):
    _, items = pictures((1, 10_000))
    with pytest.raises(Unreadable, match="not legal for the model"):
        list(build("colqwen2").encode(items))


def test_colqwen2_in_both_directions(build):
    encoder = build("colqwen2", bidirectional=True)
    causal = build("colqwen2")
    assert encoder.fingerprint != causal.fingerprint
    first, other = (
        [each.encode_queries([text]).tokens.vectors[0, 0] for text in ("lift off", "lift on")]
        for each in (encoder, causal)
    )
    assert not torch.allclose(*first) and torch.allclose(*other)
    # In a batch with padding too: equal to each alone.
    both = encoder.encode_queries(["lift off", "a longer text than that one"]).tokens
    assert torch.allclose(both.vectors[0, 0], first[0], atol=1e-5)


def test_the_tiles_of_colmodernvbert(build):
    _, items = pictures((96, 64))
    ((_, batch),) = build("colmodernvbert", keep="visual").encode(items)
    extents = batch.extents[0][batch.mask[0], :4]
    assert len(extents) == 6 * 4 + 4  # 2 x 3 tiles of 2 x 2 tokens, and the whole
    sixth = 1 / 6
    assert extents[1].tolist() == pytest.approx([sixth, 0, 2 * sixth, 0.25])
    assert extents[4].tolist() == pytest.approx([2 * sixth, 0, 3 * sixth, 0.25])  # second tile
    assert extents[12].tolist() == pytest.approx([0, 0.5, sixth, 0.75])  # second row
    assert extents[-4].tolist() == [0, 0, 0.5, 0.5]
    ((_, tiles),) = build("colmodernvbert", keep="tiles").encode(items)
    assert tiles.lengths.tolist() == [24]
    torch.testing.assert_close(tiles.extents[0][tiles.mask[0], :4], extents[:24])
