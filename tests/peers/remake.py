"""Remakes the checkpoints of other libraries, whose weights are a function of their names.

`make.py` wrote a manifest per family: the files, and names, shapes and types of the tensors as the
library itself saved them. The vectors that the library computed from these weights are beside it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

DATA = Path(__file__).parent / "data"
#: Number of coordinates that are stored per vector, evenly spaced.
NUM_COORDINATES = 32
DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
}
SAMPLE_RATE = 16_000
QUERIES = ("lift", "What is the drag of a wing?", "Überschall at Mach 3")
INSTRUCTION = "Retrieve images relevant to the user's query"
TEXTS = ("The boundary layer of a flat plate.", "heat transfer, in a cone")
SIZES = ((64, 48), (40, 112))


def uniform(seed: str, count: int) -> np.ndarray:
    """Returns reproducible numbers between -1 and 1 from the raw output of a generator."""
    state = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little")
    raw = np.random.PCG64(state).random_raw(count)
    return ((raw >> np.uint64(40)).astype(np.float64) / 2**23 - 1).astype(np.float32)


def weight(name: str, shape: list[int], kind: str = "F32") -> torch.Tensor:
    """Returns the weight of this name: norms near 1, all else as an initialiser scales it."""
    values = uniform(name, int(np.prod(shape))).reshape(shape)
    if len(shape) > 1:
        scale = (3 / np.prod(shape[1:])) ** 0.5
        if "lora_B" in name:  # adapters are small changes; rounding of merged weights is as well
            scale *= 0.3
        values = values * np.float32(scale)
    elif name.endswith("bias"):
        values = values * np.float32(0.2)
    else:  # norms, magnitudes and factors
        values = 1 + values * np.float32(0.3)
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(DTYPES[kind])


def load_manifest(family: str, data: Path = DATA) -> dict[str, Any]:
    """Returns the files and tensors of a family's checkpoints."""
    return json.loads((data / f"{family}.json").read_text("utf-8"))


def checkpoint(family: str, folder: Path) -> Path:
    """Writes all layouts of a family's checkpoint into subfolders of a folder, and returns it."""
    manifest = load_manifest(family)
    for path, stored in manifest["files"].items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        text = (DATA / "files" / stored).read_text("utf-8")
        target.write_text(text.replace("{folder}", str(folder)), "utf-8")
    for path, tensors in manifest["weights"].items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        save_file(make_weights(tensors), folder / path, {"format": "pt"})
    return folder


def make_weights(tensors: dict[str, list]) -> dict[str, torch.Tensor]:
    """Returns the tensors of a file: type and shape by name, and the name that they are made of."""
    return {
        name: weight(source[0] if source else name, shape, kind)
        for name, (kind, shape, *source) in tensors.items()
    }


def expected(family: str, variant: str) -> dict[str, np.ndarray]:
    """Returns the vectors of a variant: `images.0`, `queries.2`, `audio.0`, ..., as stored."""
    with np.load(DATA / f"{family}.npz") as arrays:
        prefix = f"{variant}/"
        return {
            name.removeprefix(prefix): arrays[name] for name in arrays if name.startswith(prefix)
        }


def stored_coordinates(vectors: np.ndarray) -> np.ndarray:
    """Returns the coordinates of vectors (..., D) that are stored."""
    step = max(vectors.shape[-1] // NUM_COORDINATES, 1)
    return np.ascontiguousarray(vectors[..., ::step][..., :NUM_COORDINATES], dtype=np.float32)


def image(seed: str, width: int, height: int) -> Image.Image:
    """Returns an image of noise."""
    pixels = (uniform(seed, width * height * 3) + 1) * 127.5
    return Image.fromarray(pixels.reshape(height, width, 3).astype(np.uint8))


def images() -> list[Image.Image]:
    """Returns the two images."""
    return [image(f"image {index}", *size) for index, size in enumerate(SIZES)]


def grid_images() -> list[Image.Image]:
    """Returns two images whose sides are multiples of 28."""
    return [image(f"grid image {index}", *size) for index, size in enumerate(((84, 56), (56, 112)))]


def frames() -> list[Image.Image]:
    """Returns the four frames of the clip, two per second."""
    return [image(f"frame {index}", 64, 48) for index in range(4)]


def large_frames() -> list[Image.Image]:
    """Returns the four frames of a clip that no library resizes."""
    return [image(f"large frame {index}", 384, 384) for index in range(4)]


def audio() -> np.ndarray:
    """Returns 1.3 seconds of noise."""
    return uniform("audio", round(1.3 * SAMPLE_RATE)) * np.float32(0.3)
