"""Images and indexes of images for tests."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from pipeline import config


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """Returns an image of random pixels."""
    pixels = np.random.default_rng([seed, width, height]).integers(0, 255, (height, width, 3))
    return Image.fromarray(pixels.astype(np.uint8))


def png(image: Image.Image) -> bytes:
    """Returns an image encoded as PNG."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def make_images(*sizes: tuple[int, int]) -> tuple[list[Image.Image], pa.Table]:
    """Returns random images, and a table of items that contain them."""
    images = [noise(*size, seed=i) for i, size in enumerate(sizes)]
    names = [f"item-{i}" for i in range(len(images))]
    return images, pa.table({"item_id": names, "image": [png(image) for image in images]})


def index_photos(folder: Path, encoder: str, model: str, **fields: object) -> dict[str, bytes]:
    """Indexes five images, uncompressed and as eight vectors; returns them by id."""
    from pipeline.index import job  # tests of encoders need neither Lance nor Ray
    from pipeline.index.spec import IndexResources, IndexSpec

    (folder / "photos").mkdir()
    photos = {f"{seed}.png": png(noise(60 + seed, 50, seed)) for seed in range(5)}
    for name, photo in photos.items():
        (folder / "photos" / name).write_bytes(photo)
    spec_fields = {
        "index": str(folder / "index"),
        "source": {"name": "images", "path": str(folder / "photos")},
        "encoder": {"name": encoder, "model": model, "dtype": "float32", **fields},
        "representations": [
            {"compressor": "none"},
            {"compressor": {"name": "hpool", "num_vectors": 8}},
        ],
    }
    spec = config.parse(IndexSpec, spec_fields)
    job.run(spec, IndexResources(), job="1", report=lambda line: None)
    return photos


def index_captioned(
    folder: Path, encoder: dict[str, Any], photos: dict[str, bytes], **fields: Any
) -> str:
    """Indexes images as four vectors in two fragments, all but the first with a caption."""
    from pipeline.index import job
    from pipeline.index.spec import IndexResources, IndexSpec

    folder.mkdir(exist_ok=True)
    lines = []
    for number, (name, photo) in enumerate(photos.items()):
        (folder / name).write_bytes(photo)
        caption = {"caption": f"a wing with {number} engines"} if number else {}
        lines.append(json.dumps({"id": name, "image": name, **caption}))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    spec_fields = {
        "index": str(folder / "index"),
        "source": {"name": "images", "path": str(folder / "rows.jsonl")},
        "encoder": encoder,
        "representations": [{"compressor": {"name": "hpool", "num_vectors": 4}}],
        "unit_items": 4,
        **fields,
    }
    spec = config.parse(IndexSpec, spec_fields)
    progress = job.run(spec, IndexResources(), job="1", report=lambda line: None)
    assert progress.new == len(photos)
    return spec_fields["index"]
