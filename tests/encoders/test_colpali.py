"""ColPali equals transformers' own path: vectors, attention, queries."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import ColPaliForRetrieval, ColPaliProcessor

from pipeline.config import SpecError
from pipeline.registry import ENCODERS
from pipeline.taps import Tap
from pipeline.tokens import PROMPT, VISUAL
from tests.encoders.conftest import noise, pictures, png

SIZES = [(50, 60), (100, 20), (33, 33), (1, 300)]


@pytest.fixture(scope="module")
def build(checkpoint):
    def build(**fields):
        given = {"name": "colpali", "model": checkpoint("colpali"), "dtype": "float32"}
        return ENCODERS.build(ENCODERS.resolve({**given, **fields}))

    return build


@pytest.fixture(scope="module")
def encoder(build):
    return build()


@pytest.fixture(scope="module")
def reference(checkpoint):
    folder = checkpoint("colpali")
    model = ColPaliForRetrieval.from_pretrained(folder, attn_implementation="eager").eval()
    processor = ColPaliProcessor.from_pretrained(folder)

    @torch.no_grad()
    def run(**given):
        read = processor(**given, return_tensors="pt")
        read.pop("labels", None)
        return read, model(**read, output_attentions=True)

    return run


def test_vectors_are_those_of_the_model(encoder, reference):
    images, items = pictures(*SIZES)
    for rows, batch in encoder.encode(items):
        for vectors, mask, row in zip(batch.vectors, batch.mask, rows, strict=True):
            _, expected = reference(images=[images[row]])
            torch.testing.assert_close(vectors[mask], expected.embeddings[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("heads", ["mean", "max"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_attention_is_that_of_eager_layers(encoder, reference, heads, layer):
    images, items = pictures(*SIZES[:2])
    taps = [Tap(statistic, heads, str(layer)) for statistic in ("column_sums", "eos_row")]
    ((rows, batch),) = encoder.encode(items, taps)
    for i, row in enumerate(rows):
        read, expected = reference(images=[images[row]])
        is_visual = batch.kind[i] == VISUAL
        attention_HNN = expected.attentions[layer][0]
        over_heads = torch.mean if heads == "mean" else torch.amax
        for tap, of_heads in zip(
            taps, (attention_HNN[:, is_visual].sum(dim=1), attention_HNN[:, -1]), strict=True
        ):
            torch.testing.assert_close(
                batch.taps[tap.name][i], over_heads(of_heads, dim=0), atol=1e-5, rtol=1e-4
            )


def test_the_grid_is_that_of_the_patches(encoder, build):
    _, items = pictures((64, 64))
    ((_, batch),) = encoder.encode(items)
    kind, extents = batch.kind[0], batch.extents[0]
    assert kind.tolist() == [VISUAL] * 16 + [PROMPT] * (len(kind) - 16)
    assert extents[1, :4].tolist() == [0.25, 0, 0.5, 0.25]
    assert extents[4, :4].tolist() == [0, 0.25, 0.25, 0.5]
    assert extents[:16, 4:].isnan().all() and extents[16:].isnan().all()
    ((_, visual),) = build(keep="visual").encode(items)
    assert torch.equal(visual.vectors[0], batch.vectors[0, :16]) and visual.mask.all()


def test_queries(encoder, reference):
    texts = ["heat transfer in a cone", "lift"]
    queries = encoder.encode_queries(texts)
    for i, text in enumerate(texts):
        read, expected = reference(text=[text])
        tokens = queries.tokens.vectors[i][queries.tokens.mask[i]]
        torch.testing.assert_close(tokens, expected.embeddings[0], atol=1e-5, rtol=0)
        assert len(queries.token_texts[i]) == read["input_ids"].shape[1]
    assert queries.token_texts[1][-11:] == ["<pad>"] * 10 + ["\n"]


def test_what_is_put_around_a_query(build):
    (names,) = build(query_prefix="", num_augmentation=2).encode_queries(["lift"]).token_texts
    assert "".join(names) == "<bos>lift<pad><pad>\n"
    plain, causal = (
        build(bidirectional_queries=both).encode_queries(["lift off"]).tokens.vectors
        for both in (True, False)
    )
    assert not torch.allclose(plain[0, 0], causal[0, 0])  # which sees nothing but itself


def test_a_picture_as_a_query_is_read_as_a_page(encoder):
    images, items = pictures((40, 40))
    ((_, batch),) = encoder.encode(items)
    queries = encoder.encode_pictures([png(images[0])])
    torch.testing.assert_close(queries.tokens.vectors, batch.vectors, atol=1e-6, rtol=0)
    assert queries.token_texts[0][:5] == ["[12,12]", "[38,12]", "[62,12]", "[88,12]", "[12,38]"]
    with pytest.raises(SpecError, match="cannot be read"):
        encoder.encode_pictures([b"GIF89a"])


def test_frames_are_read_one_by_one(encoder):
    images = [noise(32, 32, seed) for seed in range(3)]
    frames = [
        {"index": i, "seconds": 2.0 + i, "height": 32, "width": 32, "pixels": image.tobytes()}
        for i, image in enumerate(images)
    ]
    import pyarrow as pa

    from pipeline.schema import FRAME, SPAN

    span = {"unit": "seconds", "start": 2.0, "end": 6.0}
    items = pa.table(
        {
            "item_id": ["clip", "silent"],
            "frames": pa.array([frames, []], pa.list_(FRAME)),
            "span": pa.array([span, None], SPAN),
        }
    )
    found = {int(row): batch.take(slice(i, i + 1)) for rows, batch in encoder.encode(items)
             for i, row in enumerate(rows)}  # fmt: skip
    assert found[1].lengths.tolist() == [0]
    length = int(found[0].lengths[0]) // 3
    for i, image in enumerate(images):
        own = found[0].vectors[0, i * length : (i + 1) * length]
        alone = encoder.encode_pictures([png(image)]).tokens.vectors[0]
        torch.testing.assert_close(own, alone, atol=1e-5, rtol=0)
    times = found[0].extents[0, [0, length, 2 * length], 4:]
    assert times.tolist() == [[2, 3], [3, 4], [4, 6]]


def test_fingerprints(build, encoder):
    assert build(max_batch_tokens=64).fingerprint == encoder.fingerprint
    for change in ({"num_augmentation": 3}, {"query_prefix": "q"}, {"attention": "eager"}):
        assert build(**change).fingerprint != encoder.fingerprint


def test_a_batch_that_does_not_fit_is_halved(build):
    encoder, (_, items) = build(), pictures(*SIZES)
    whole = list(encoder.encode(items))
    forward = encoder.forward

    def small(inputs, mask):
        if len(mask) > 1:
            raise torch.OutOfMemoryError
        return forward(inputs, mask)

    encoder.forward = small
    halves = list(encoder.encode(items))
    assert [len(rows) for rows, _ in halves] == [1] * len(SIZES)
    order = np.concatenate([rows for rows, _ in halves])
    assert order.tolist() == whole[0][0].tolist()
    for i, (_, batch) in enumerate(halves):
        expected = whole[0][1].take(slice(i, i + 1))
        torch.testing.assert_close(batch.vectors, expected.vectors, atol=1e-5, rtol=0)
        assert replace(batch, vectors=expected.vectors).kind.tolist() == expected.kind.tolist()
    encoder.forward = lambda inputs, mask: (_ for _ in ()).throw(torch.OutOfMemoryError("too much"))
    with pytest.raises(torch.OutOfMemoryError):
        list(encoder.encode(items))
