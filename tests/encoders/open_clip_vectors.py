"""Vectors of OpenCLIP for tiny checkpoints, whose weights are a function of their names.

Run it in an environment that has open_clip, which the suite does not need:

    python -m tests.encoders.open_clip_vectors   # writes open_clip.json
"""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.images import make_images
from tests.tiny.checkpoints import clip

FILE = Path(__file__).with_name("open_clip.json")
SIZES = ((64, 48), (43, 64), (31, 77), (20, 20))
TEXTS = ("lift", "the drag of a wing at mach 3?")
VISION = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8}
TEXT = {"context_length": 77, "vocab_size": 600, "width": 16, "heads": 2, "layers": 2}
#: Configurations, and settings of the image processor.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "quick_gelu": ({"quick_gelu": True}, {"interpolation": "bicubic", "resize_mode": "shortest"}),
    "squash": (
        {"vision_cfg": {**VISION, "mlp_ratio": 3.3}},
        {"interpolation": "bilinear", "resize_mode": "squash"},
    ),
    "custom_text": ({"custom_text": True, "quick_gelu": False}, {}),
}
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def settings(name: str) -> dict[str, Any]:
    """Returns the content of the open_clip_config.json of a case."""
    model, images = CASES[name]
    tokenizer = {"hf_tokenizer_name": "some/tokenizer"}
    whole = {"embed_dim": 24, "vision_cfg": VISION, "text_cfg": {**TEXT, **tokenizer}, **model}
    return {"model_cfg": whole, "preprocess_cfg": {"mean": MEAN, "std": STD, **images}}


def weight(name: str, shape: list[int]) -> torch.Tensor:
    """Returns the weight of this name."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    raw = np.random.PCG64(seed).random_raw(int(np.prod(shape))) >> np.uint64(40)
    values = torch.from_numpy((raw.astype(np.float64) / 2**23 - 1).astype(np.float32))
    is_norm = len(shape) == 1 and "bias" not in name
    return (1 + values / 4 if is_norm else values / 4).reshape(shape)


def main() -> None:
    """Writes names and shapes of the weights, and the vectors of images and texts."""
    from open_clip.model import CLIP, CustomTextCLIP
    from open_clip.tokenizer import HFTokenizer
    from open_clip.transform import PreprocessCfg, image_transform_v2

    stored: dict[str, Any] = {"open_clip_torch": importlib.metadata.version("open_clip_torch")}
    tokenizer = HFTokenizer(str(clip(Path(tempfile.mkdtemp()))), context_length=77)
    for name in CASES:
        whole = copy.deepcopy(settings(name))
        is_custom = whole["model_cfg"].pop("custom_text", False)
        model = (CustomTextCLIP if is_custom else CLIP)(**whole["model_cfg"]).eval()
        shapes = {key: list(value.shape) for key, value in model.state_dict().items()}
        model.load_state_dict({key: weight(key, shape) for key, shape in shapes.items()})
        transform = image_transform_v2(PreprocessCfg(size=32, **whole["preprocess_cfg"]), False)
        images, _ = make_images(*SIZES)
        with torch.no_grad():
            pixels = torch.stack([transform(image) for image in images])
            vectors = {
                "images": model.encode_image(pixels, normalize=True).tolist(),
                "texts": model.encode_text(tokenizer(list(TEXTS)), normalize=True).tolist(),
            }
        stored[name] = {"weights": shapes, **vectors}
    FILE.write_text(json.dumps(stored, indent=None) + "\n")


if __name__ == "__main__":
    main()
