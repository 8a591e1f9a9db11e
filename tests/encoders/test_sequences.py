"""Tiny and extremely narrow images in all model families."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
import torch
from PIL import Image

from pipeline.config import SpecError
from pipeline.data.decode import Unreadable
from pipeline.registry import ENCODERS
from pipeline.schema import FRAME
from pipeline.tokens import VISUAL
from tests.encoders.batches import encode_items
from tests.images import make_images, noise, png

#: Encoders by the model family of their tiny checkpoint.
FAMILIES = {
    "colpali": "colpali",
    "colqwen2": "colpali",
    "colmodernvbert": "colpali",
    "siglip": "dual",
    "siglip2": "dual",
    "clip": "dual",
    "qwen2_vl": "qwen_vl",
    "qwen2_5_vl": "qwen_vl",
    "qwen3_vl": "qwen_vl",
    "qwen2_5_omni": "qwen_omni",
    "jina_v4": "jina_v4",
}
#: Encoders with Qwen's processor, which rejects aspect ratios above 200.
STRICT = ("colqwen2", "qwen_vl", "qwen_omni", "jina_v4")
#: Sizes include 1 and 3, which a processor may confuse with a number of channels.
SIZES = [(1, 1), (2, 2), (1, 3), (3, 1), (3, 3), (1, 30), (30, 1), (30, 3)]
RED = (255, 0, 30)


@pytest.fixture(scope="module", params=FAMILIES)
def encoder(request, checkpoint):
    given = {"name": FAMILIES[request.param], "model": checkpoint(request.param)}
    return ENCODERS.build(ENCODERS.resolve({**given, "dtype": "float32"}))


def test_tiny_images_yield_tokens(encoder):
    images, items = make_images(*SIZES)
    found = encode_items(encoder, items)
    for row, image in enumerate(images):
        is_visual = (found[row].kind[0] == VISUAL) & found[row].mask[0]
        assert is_visual.any() and found[row].vectors[found[row].mask].isfinite().all()
        boxes = found[row].extents[0][is_visual, :4]
        assert (boxes >= 0).all() and (boxes <= 1).all() and (boxes[:, 2:] > boxes[:, :2]).all()
        assert encoder.encode_media([{"image": png(image)}]).tokens.lengths[0] > 0


def test_tiny_images_keep_their_colours(encoder):
    for width, height in SIZES:
        colours = []
        for scale in (1, 40):
            image = Image.new("RGB", (scale * width, scale * height), RED)
            (inputs,), _ = encoder._reader.read_media_query({"image": png(image)})
            colours.append(inputs.media["pixel_values"].unique())
        assert len(colours[0]) == 3
        torch.testing.assert_close(*colours, atol=1e-4, rtol=0)


@pytest.mark.parametrize("size", [(1, 300), (300, 1)])
def test_extreme_aspect_ratios(encoder, size):
    (image,), items = make_images(size)
    if not {encoder.spec.name, Path(encoder.spec.model).name} & set(STRICT):
        found = encode_items(encoder, items)[0]
        assert found.lengths[0] > 0 and found.vectors.isfinite().all()
        assert encoder.encode_media([{"image": png(image)}]).tokens.lengths[0] > 0
        return
    detail = "aspect ratio must be smaller than 200, got 300"
    with pytest.raises(Unreadable, match=f"image not supported by the model: .*{detail}"):
        encode_items(encoder, items)
    with pytest.raises(SpecError, match=f"^query must be .*{detail}"):
        encoder.encode_media([{"image": png(image)}])


def test_video_frames_of_one_pixel(encoder):
    image = noise(1, 1)
    frames = [
        {"index": i, "seconds": float(i), "height": 1, "width": 1, "pixels": image.tobytes()}
        for i in range(3)
    ]
    items = pa.table({"item_id": ["clip"], "frames": pa.array([frames], pa.list_(FRAME))})
    found = encode_items(encoder, items)[0]
    extents = found.extents[0][found.kind[0] == VISUAL]
    assert len(extents) and extents.isfinite().all() and found.vectors.isfinite().all()
