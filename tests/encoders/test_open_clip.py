"""OpenCLIP folders give the vectors of OpenCLIP once they are converted, or are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pipeline.config import SpecError
from pipeline.encoders.open_clip import convert_to_clip
from pipeline.registry import ENCODERS
from pipeline.runtime.conversion import convert
from tests.encoders.open_clip_vectors import CASES, FILE, SIZES, TEXTS, settings, weight
from tests.images import make_images

STORED = json.loads(FILE.read_text())


@pytest.fixture
def make(checkpoint, tmp_path):
    """Returns a function that writes the folder of a case, as OpenCLIP saves it."""

    def write(name: str, pickled: bool = False) -> Path:
        folder = tmp_path / "open_clip"
        folder.mkdir()
        for path in Path(checkpoint("clip")).glob("tokenizer*"):
            shutil.copy(path, folder)
        (folder / "open_clip_config.json").write_text(json.dumps(settings(name)))
        weights = {key: weight(key, shape) for key, shape in STORED[name]["weights"].items()}
        if pickled:
            torch.save(weights, folder / "open_clip_pytorch_model.bin")
        else:
            save_file(weights, folder / "open_clip_model.safetensors")
        return folder

    return write


def change(folder: Path, section: str, field: str, value: Any) -> None:
    """Changes a field of the configuration."""
    path = folder / "open_clip_config.json"
    whole = json.loads(path.read_text())
    part = whole
    for name in section.split(".") if section else ():
        part = part[name]
    part[field] = value
    path.write_text(json.dumps(whole))


@pytest.mark.parametrize(
    ("name", "pickled"), [*((name, False) for name in CASES), ("custom_text", True)]
)
def test_vectors_equal_those_of_open_clip(make, tmp_path, name, pickled):
    convert(str(make(name, pickled)), str(tmp_path / "clip"), None, convert_to_clip, print)
    spec = {"name": "dual", "model": str(tmp_path / "clip"), "dtype": "float32"}
    encoder = ENCODERS.build(ENCODERS.resolve(spec))
    images, items = make_images(*SIZES)
    pooled = torch.empty(len(images), 24)
    for rows, batch in encoder.encode(items):
        pooled[torch.as_tensor(rows)] = batch.pooled
    np.testing.assert_allclose(pooled, STORED[name]["images"], atol=1e-5)
    texts = encoder.encode_queries(list(TEXTS)).tokens.pooled
    np.testing.assert_allclose(texts, STORED[name]["texts"], atol=1e-5)


def test_boxes_of_patches_follow_the_crop(make, tmp_path):
    """A crop of 32 of 57 columns begins at column 12, where transformers truncates 12.5."""
    make("quick_gelu")
    convert(str(tmp_path / "open_clip"), str(tmp_path / "clip"), None, convert_to_clip, print)
    encoder = ENCODERS.build(ENCODERS.resolve({"name": "dual", "model": str(tmp_path / "clip")}))
    _, items = make_images((43 * 2, 32 * 2))  # resized to 43 x 32: the margins are 5.5 pixels
    ((_, batch),) = encoder.encode(items)
    assert batch.extents[0, 0, 0].item() == pytest.approx(6 / 43)


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        (
            *("model_cfg.vision_cfg", "timm_model_name", "eva02_large_patch14_clip_336"),
            "has vision_cfg.timm_model_name 'eva02_large_patch14_clip_336', which transformers' C",
        ),
        ("model_cfg.vision_cfg", "layers", [3, 4, 6, 3], "has vision_cfg.layers [3, 4, 6, 3]"),
        ("model_cfg.vision_cfg", "pool_type", "avg", "has vision_cfg.pool_type 'avg'"),
        ("model_cfg.vision_cfg", "image_size", [32, 64], "has vision_cfg.image_size [32, 64]"),
        ("model_cfg.text_cfg", "pool_type", "eos", "has text_cfg.pool_type 'eos'"),
        ("model_cfg.text_cfg", "no_causal_mask", True, "has text_cfg.no_causal_mask True"),
        ("model_cfg.text_cfg", "hf_model_name", "xlm-roberta-base", "has text_cfg.hf_model_name"),
        ("model_cfg", "multimodal_cfg", {"layers": 2}, "has model_cfg.multimodal_cfg"),
        ("preprocess_cfg", "resize_mode", "longest", "has preprocess_cfg.resize_mode 'longest'"),
        ("model_cfg.vision_cfg", "layers", 3, "has no weights vision_model.encoder.layers.2."),
        ("model_cfg.vision_cfg", "layers", 1, "has other weights vision_model.encoder.layers.1."),
        ("model_cfg", "embed_dim", 8, "of shape 24 x 16 instead of 8 x 16"),
        ("model_cfg", "vision_cfg", 3, "a checkpoint with a valid open_clip_config.json"),
        ("", "model_cfg", None, "a checkpoint with a valid open_clip_config.json"),
        ("model_cfg.vision_cfg", "head_width", 0, "a checkpoint with a valid open_clip_config"),
        ("preprocess_cfg", "mean", [0.5], "a checkpoint with a valid open_clip_config.json"),
        ("preprocess_cfg", "size", "big", "a checkpoint with a valid open_clip_config.json"),
        ("model_cfg.text_cfg", "heads", 7, "a checkpoint with a valid open_clip_config.json"),
        ("model_cfg", "embed_dim", "wide", "a checkpoint with a valid open_clip_config.json"),
    ],
)
def test_rejects_other_architectures(make, tmp_path, section, field, value, message):
    folder = make("quick_gelu")
    change(folder, section, field, value)
    with pytest.raises(SpecError) as caught:
        convert(str(folder), str(tmp_path / "clip"), None, convert_to_clip, print)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.field == "model" and caught.value.value == str(folder)
    assert not (tmp_path / "clip").exists()


@pytest.mark.parametrize("content", [None, b"", b"x" * 9999])
def test_rejects_corrupted_weights(make, tmp_path, content):
    folder = make("quick_gelu")
    path = folder / "open_clip_model.safetensors"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        convert(str(folder), str(tmp_path / "clip"), None, convert_to_clip, print)
    assert caught.value.field == "model" and "\n" not in str(caught.value)


def test_rejects_a_folder_without_tokenizer(make, tmp_path):
    folder = make("quick_gelu")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(SpecError, match="add the tokenizer files of openai/clip-vit-base-patch32"):
        convert(str(folder), str(tmp_path / "clip"), None, convert_to_clip, print)


def test_dual_names_the_conversion(make):
    folder = make("quick_gelu")
    spec = ENCODERS.resolve({"name": "dual", "model": str(folder)})
    with pytest.raises(SpecError, match="is a checkpoint of OpenCLIP; convert it with `maxray con"):
        ENCODERS.load("dual").check(spec)
