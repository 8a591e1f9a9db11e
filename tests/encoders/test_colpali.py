"""Visual retrieval models (ColPali, ColQwen2, ColModernVBert), compared with transformers."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
import transformers
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from pipeline.config import SpecError
from pipeline.data.decode import Unreadable
from pipeline.data.decode.image import decode
from pipeline.data.images import Images
from pipeline.encoders.images import open_query_image
from pipeline.registry import ENCODERS
from pipeline.schema import FRAME, SPAN
from pipeline.search.maxsim import maxsim
from pipeline.search.packed import PackedVectors
from pipeline.taps import Tap
from pipeline.tokens import PROMPT, VISUAL
from tests.encoders.batches import encode_items
from tests.images import make_images, noise, png

#: Prefix of the names of the model and processor classes in transformers.
CLASSES = {"colpali": "ColPali", "colqwen2": "ColQwen2", "colmodernvbert": "ColModernVBert"}
#: Size limits of the image source.
LIMITS = ("max_pixels", "max_input_pixels")
SIZES = [(50, 60), (100, 40), (33, 33), (64, 96)]


@pytest.fixture(scope="module")
def build(checkpoint):
    def build(name, **fields):
        given = {"name": "colpali", "model": checkpoint(name), "dtype": "float32"}
        return ENCODERS.build(ENCODERS.resolve({**given, "custom_template": True, **fields}))

    return build


def family(encoder) -> str:
    return Path(encoder.spec.model).name


def load_processor(encoder):
    processor_class = getattr(transformers, f"{CLASSES[family(encoder)]}Processor")
    return processor_class.from_pretrained(encoder.spec.model)


@pytest.fixture(scope="module", params=CLASSES)
def encoder(request, build):
    return build(request.param)


def positions(model, inputs) -> dict[str, torch.Tensor]:
    """Returns the positions of patches, with which ColQwen2 was trained (transformers 5 omits)."""
    if "image_grid_thw" not in inputs:
        return {}
    types = (inputs["input_ids"] == model.config.vlm_config.image_token_id).long()
    found, _ = model.vlm.get_rope_index(
        inputs["input_ids"],
        mm_token_type_ids=types,
        image_grid_thw=inputs["image_grid_thw"],
        attention_mask=inputs["attention_mask"],
    )
    return {"position_ids": found}


@pytest.fixture(scope="module")
def reference(encoder):
    """The transformers model with eager attention, applied to one input without padding."""
    name, folder = CLASSES[family(encoder)], encoder.spec.model
    model_class = getattr(transformers, f"{name}ForRetrieval")
    model = model_class.from_pretrained(folder, attn_implementation="eager").eval()
    processor = getattr(transformers, f"{name}Processor").from_pretrained(folder)

    @torch.no_grad()
    def run(image=None, text=None):
        if text is None:
            inputs = processor.process_images([image], return_tensors="pt")
        else:
            inputs = processor.process_queries([text], return_tensors="pt")
        inputs.pop("labels", None)
        return inputs, model(**inputs, **positions(model, inputs), output_attentions=True)

    return run


def test_vectors_match_transformers(encoder, reference):
    images, items = make_images(*SIZES)
    encoded_rows = []
    for rows, batch in encoder.encode(items):
        for vectors, mask, row in zip(batch.vectors, batch.mask, rows, strict=True):
            _, expected = reference(images[row])
            torch.testing.assert_close(vectors[mask], expected.embeddings[0], atol=1e-5, rtol=0)
            encoded_rows.append(row)
    assert sorted(encoded_rows) == list(range(len(SIZES)))


@pytest.mark.parametrize("heads", ["mean", "max"])
def test_attention_matches_eager_attention(encoder, reference, heads):
    images, items = make_images(*SIZES[:3])
    layers = range(encoder.attention(encoder.spec).num_layers)
    statistics = ("column_sums", "eos_row")
    taps = [Tap(name, heads, str(layer)) for layer in layers for name in statistics]
    reduce_heads = torch.mean if heads == "mean" else torch.amax
    for rows, batch in encoder.encode(items, taps):
        for i, row in enumerate(rows):
            _, expected = reference(images[row])
            mask = batch.mask[i]
            is_visual = batch.kind[i][mask] == VISUAL
            for layer in layers:
                attention_HNN = expected.attentions[layer][0]
                values = {"column_sums": attention_HNN[:, is_visual].sum(dim=1)}
                values["eos_row"] = attention_HNN[:, -1]
                for name in statistics:
                    torch.testing.assert_close(
                        batch.taps[Tap(name, heads, str(layer)).name][i][mask],
                        reduce_heads(values[name], dim=0),
                        atol=1e-5,
                        rtol=1e-4,
                    )


def test_bfloat16_matches_transformers(encoder, build):
    """Casting pixels to the dtype of the model does not change the vectors."""
    images, items = make_images(*SIZES)
    half = build(family(encoder), dtype="bfloat16")
    name, folder = CLASSES[family(encoder)], encoder.spec.model
    model = getattr(transformers, f"{name}ForRetrieval").from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    processor = getattr(transformers, f"{name}Processor").from_pretrained(folder)
    for row, image in enumerate(images):  # separately: padding changes sums in half precision
        ((_, batch),) = half.encode(items.slice(row, 1))
        inputs = processor.process_images([image], return_tensors="pt")
        inputs.pop("labels", None)
        if family(encoder) != "colpali":  # ColPali casts the pixels itself
            inputs["pixel_values"] = inputs["pixel_values"].to(torch.bfloat16)
        with torch.no_grad():
            expected = model(**inputs, **positions(model, inputs)).embeddings[0].float()
        torch.testing.assert_close(batch.vectors[0], expected, atol=1e-2, rtol=0)


def test_queries_match_transformers(encoder, reference):
    texts = ["heat transfer in a cone", "lift"]
    queries = encoder.encode_queries(texts)
    for i, text in enumerate(texts):
        inputs, expected = reference(text=text)
        tokens = queries.tokens.vectors[i][queries.tokens.mask[i]]
        torch.testing.assert_close(tokens, expected.embeddings[0], atol=1e-5, rtol=0)
        assert len(queries.token_texts[i]) == inputs["input_ids"].shape[1]
    for invalid in ([], [" "]):
        with pytest.raises(SpecError, match="query"):
            encoder.encode_queries(invalid)


def test_scores_match_the_processor(encoder):
    """MaxSim equals `score_retrieval` of the processor, which pads with zeros and has no mask.

    A zero of the padding can exceed the scores of all real tokens, so the results are equal only
    for a single query and image, which need no padding.
    """
    _, items = make_images(*SIZES)
    found = encode_items(encoder, items)
    passages = [found[row].vectors[0][found[row].mask[0]] for row in range(len(SIZES))]
    encoded = encoder.encode_queries(["heat transfer in a cone", "lift"]).tokens
    queries = [vectors[mask] for vectors, mask in zip(encoded.vectors, encoded.mask, strict=True)]
    lengths = torch.tensor([len(passage) for passage in passages])
    scores = maxsim(queries, PackedVectors.from_values(torch.cat(passages), lengths))
    score = load_processor(encoder).score_retrieval
    torch.testing.assert_close(scores, score(queries, passages, batch_size=1), atol=1e-4, rtol=0)
    # Effect of padding: a passage of one dissimilar token next to a longer passage.
    query, unlike = queries[0][:1], -queries[0][:1]
    (alone, _), (padded, _) = (
        score([query], [unlike, passages[0]], batch_size=size)[0] for size in (1, 2)
    )
    packed = PackedVectors.from_values(
        torch.cat([unlike, passages[0]]), torch.tensor([1, lengths[0]])
    )
    assert maxsim([query], packed)[0, 0] == pytest.approx(-1, abs=1e-5)
    assert (alone, padded) == (pytest.approx(-1, abs=1e-5), 0)


def test_special_tokens_in_queries_are_plain_text(encoder):
    processor = load_processor(encoder)
    tokenizer = processor.tokenizer
    (plain,) = encoder.encode_queries(["drag"]).token_texts
    special_tokens = {processor.image_token, *tokenizer.all_special_tokens}
    for token in special_tokens:
        queries = encoder.encode_queries([f"drag {token} lift"])
        (names,) = queries.token_texts
        assert names.count(token) == plain.count(token)
        pieces = tokenizer(token, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert len(pieces) > 1 and len(names) >= len(plain) + len(pieces)
        assert queries.tokens.mask.all() and queries.tokens.vectors.isfinite().all()


def test_rejects_queries_that_are_too_long(encoder):
    most = encoder.model.config.vlm_config.text_config.max_position_embeddings
    with pytest.raises(SpecError, match=f"at most {most} tokens") as caught:
        encoder.encode_queries(["drag " * most])
    assert caught.value.field == "query"


@pytest.mark.parametrize(("name", "token"), [("colpali", "bos"), ("colqwen2", "pad")])
def test_check_rejects_tokenizer_without_query_tokens(checkpoint, tmp_path, name, token):
    shutil.copytree(checkpoint(name), tmp_path / "model")
    path = tmp_path / "model" / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {f"{token}_token": None}))
    spec = ENCODERS.resolve({"name": "colpali", "model": str(tmp_path / "model")})
    with pytest.raises(SpecError, match=f"that has a .*{token}_token"):
        ENCODERS.load("colpali").check(spec)


def test_keep_visual(encoder, build):
    _, items = make_images(*SIZES)
    visual = build(family(encoder), output_tokens="visual")
    for (rows, batch), (_, visual_batch) in zip(
        encoder.encode(items), visual.encode(items), strict=True
    ):
        for i in range(len(rows)):
            is_patch = (batch.kind[i] == VISUAL) & batch.mask[i]
            expected = batch.vectors[i][is_patch]
            torch.testing.assert_close(visual_batch.vectors[i][visual_batch.mask[i]], expected)
            assert (visual_batch.kind[i][visual_batch.mask[i]] == VISUAL).all()
            extents = visual_batch.extents[i][visual_batch.mask[i]]
            assert (extents[:, :4] >= 0).all() and (extents[:, :4] <= 1).all()
            assert (extents[:, 2:4] > extents[:, :2]).all()
            assert batch.extents[i][batch.mask[i] & ~is_patch].isnan().all()


def test_query_prefix_and_augmentation(build, encoder):
    name = family(encoder)
    (names,) = build(name, query_prefix="", num_augmentation=2).encode_queries(["lift"]).token_texts
    assert "lift" in "".join(names) and "Question" not in "".join(names)
    (longer,) = (
        build(name, query_prefix="", num_augmentation=5).encode_queries(["lift"]).token_texts
    )
    assert len(longer) == len(names) + 3


def test_instruction_fills_the_slot_of_the_query_prefix(build, encoder):
    name = family(encoder)
    instructed = build(name, query_prefix="{instruction}: ").with_instruction("Find a page")
    expected = build(name, query_prefix="Find a page: ").encode_queries(["lift"])
    found = instructed.encode_queries(["lift"])
    assert found.token_texts == expected.token_texts
    assert torch.equal(found.tokens.vectors, expected.tokens.vectors)
    without = encoder.with_instruction("Find a page").encode_queries(["lift"])
    assert without.token_texts == encoder.encode_queries(["lift"]).token_texts


def test_image_query_matches_page(encoder):
    images, items = make_images((40, 40))
    ((_, batch),) = encoder.encode(items)
    queries = encoder.encode_media([{"image": png(images[0])}])
    torch.testing.assert_close(queries.tokens.vectors, batch.vectors, atol=1e-6, rtol=0)
    assert len(queries.token_texts[0]) == batch.lengths[0]


def test_query_images_are_decoded_like_items():
    image = noise(40, 30)
    transparent = image.convert("RGBA")
    transparent.putalpha(Image.linear_gradient("L").resize(image.size))
    deep = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    palette = image.quantize(16)
    palette.info["transparency"] = 3
    turned = Image.Exif()
    turned[0x0112] = 6
    comment = PngInfo()
    comment.add_text("Comment", "x" * (2 << 20), zip=True)
    for variant, options in (
        (image, {"pnginfo": comment}),
        (transparent, {}),
        (deep, {}),
        (palette, {}),
        (image, {"exif": turned}),
        (noise(2500, 2000), {}),
    ):
        file = io.BytesIO()
        variant.save(file, "PNG", **options)
        limits = {name: Images.Spec.model_fields[name].default for name in LIMITS}
        expected = Image.open(io.BytesIO(decode(file.getvalue(), **limits)["image"]))
        assert np.array_equal(np.asarray(open_query_image(file.getvalue())), np.asarray(expected))


def test_encodes_frames_separately(encoder):
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
    found = encode_items(encoder, items)
    assert found[1].lengths.tolist() == [0]
    length = int(found[0].lengths[0]) // 3
    for i, image in enumerate(images):
        frame_vectors = found[0].vectors[0, i * length : (i + 1) * length]
        alone = encoder.encode_media([{"image": png(image)}]).tokens.vectors[0]
        torch.testing.assert_close(frame_vectors, alone, atol=1e-5, rtol=0)
        is_visual = found[0].kind[0, :length] == VISUAL
        times = found[0].extents[0, i * length : (i + 1) * length, 4:][is_visual]
        assert times.unique(dim=0).tolist() == [[2 + i, 3 + i if i < 2 else 6]]


def test_fingerprint(build, encoder):
    name = family(encoder)
    assert build(name, max_batch_tokens=64).fingerprint == encoder.fingerprint
    for change in ({"num_augmentation": 3}, {"query_prefix": "q"}, {"attention": "eager"}):
        assert build(name, **change).fingerprint != encoder.fingerprint


def test_splits_batches_that_exceed_memory(build, encoder):
    small, (_, items) = build(family(encoder)), make_images(*SIZES)
    whole = {tuple(rows): batch for rows, batch in encoder.encode(items)}
    forward, sizes = small.forward, []

    def forward_single(inputs, mask):
        if len(mask) > 1:
            raise torch.OutOfMemoryError("too much")
        sizes.append(len(mask))
        return forward(inputs, mask)

    small.forward = forward_single
    halves = list(small.encode(items))
    assert sizes == [1] * len(SIZES) and [len(rows) for rows, _ in halves] == sizes
    expected = {row: (batch, i) for rows, batch in whole.items() for i, row in enumerate(rows)}
    for rows, batch in halves:
        expected_batch, i = expected[rows[0]]
        torch.testing.assert_close(
            batch.vectors[0], expected_batch.vectors[i][expected_batch.mask[i]], atol=1e-5, rtol=0
        )

    def fail(inputs, mask):
        raise torch.OutOfMemoryError("too much")

    small.forward = fail
    with pytest.raises(torch.OutOfMemoryError):
        list(small.encode(items))


# -- individual models -----------------------------------------------------------------------------


def test_colpali_grid(build):
    _, items = make_images((64, 30))
    ((_, batch),) = build("colpali").encode(items)
    kind, extents = batch.kind[0], batch.extents[0]
    assert kind.tolist() == [VISUAL] * 16 + [PROMPT] * (len(kind) - 16)
    assert extents[1, :4].tolist() == [0.25, 0, 0.5, 0.25]
    assert extents[4, :4].tolist() == [0, 0.25, 0.25, 0.5]


def test_colpali_causal_queries(build):
    plain, causal = (
        build("colpali", bidirectional_queries=is_bidirectional)
        .encode_queries(["lift off"])
        .tokens.vectors
        for is_bidirectional in (True, False)
    )
    assert not torch.allclose(
        plain[0, 0], causal[0, 0]
    )  # a causal first token attends only to itself
    other = build("colpali", bidirectional_queries=False).encode_queries(["lift on"])
    torch.testing.assert_close(other.tokens.vectors[0, 0], causal[0, 0])


def test_colqwen2_grid_preserves_the_aspect_ratio(build):
    encoder = build("colqwen2", output_tokens="visual")
    _, items = make_images((64, 32))
    ((_, batch),) = encoder.encode(items)
    columns, rows = 4, 2  # 16 pixels per merged patch
    assert batch.lengths.tolist() == [rows * columns]
    assert batch.extents[0, 1, :4].tolist() == [0.25, 0, 0.5, 0.5]
    assert batch.extents[0, columns, :4].tolist() == [0, 0.5, 0.25, 1]
    ((_, fewer),) = build("colqwen2", output_tokens="visual", max_pixels=4 * 256).encode(items)
    assert fewer.lengths[0] <= 4


def test_colqwen2_rejects_narrow_images(build):
    _, items = make_images((1, 10_000))
    with pytest.raises(Unreadable, match="not supported by the model"):
        list(build("colqwen2").encode(items))


def test_colqwen2_bidirectional(build):
    bidirectional = build("colqwen2", bidirectional=True)
    causal = build("colqwen2")
    assert bidirectional.fingerprint != causal.fingerprint
    first, other = (
        [encoder.encode_queries([text]).tokens.vectors[0, 0] for text in ("lift off", "lift on")]
        for encoder in (bidirectional, causal)
    )
    assert not torch.allclose(*first) and torch.allclose(*other)
    # A padded batch gives the same vectors.
    both = bidirectional.encode_queries(["lift off", "a longer text than that one"]).tokens
    assert torch.allclose(both.vectors[0, 0], first[0], atol=1e-5)


def test_colmodernvbert_tiles(build):
    _, items = make_images((96, 64))
    ((_, batch),) = build("colmodernvbert", output_tokens="visual").encode(items)
    extents = batch.extents[0][batch.mask[0], :4]
    assert len(extents) == 6 * 4 + 4  # 2 x 3 tiles of 2 x 2 tokens, and the downscaled image
    sixth = 1 / 6
    assert extents[1].tolist() == pytest.approx([sixth, 0, 2 * sixth, 0.25])
    assert extents[4].tolist() == pytest.approx([2 * sixth, 0, 3 * sixth, 0.25])  # second tile
    assert extents[12].tolist() == pytest.approx([0, 0.5, sixth, 0.75])  # second row
    assert extents[-4].tolist() == [0, 0, 0.5, 0.5]
    ((_, tiles),) = build("colmodernvbert", output_tokens="tiles").encode(items)
    assert tiles.lengths.tolist() == [24]
    torch.testing.assert_close(tiles.extents[0][tiles.mask[0], :4], extents[:24])
