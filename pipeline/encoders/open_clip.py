"""Conversion of OpenCLIP checkpoints to the CLIP of transformers, which `dual` loads.

Only vision transformers with a class token and causal text transformers have a counterpart there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPConfig, CLIPModel
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from pipeline.config import SpecError, reading
from pipeline.encoders.loading import TOKENIZER_FILES
from pipeline.runtime.checkpoint import LOAD_ERRORS, OPEN_CLIP_CONFIG, OPEN_CLIP_WEIGHTS

RULE = "an OpenCLIP model whose architecture is the CLIP of transformers"
#: Fields that are read below, or that do not affect the vectors of a trained model.
KNOWN = {
    *("embed_dim", "vision_cfg", "text_cfg", "quick_gelu", "custom_text", "init_logit_scale"),
    *("init_logit_bias", "image_size", "layers", "width", "head_width", "patch_size", "mlp_ratio"),
    *("context_length", "vocab_size", "heads", "hf_tokenizer_name", "pad_id", "eos_id"),
    *("mean", "std", "interpolation", "size", "patch_dropout", "pos_embed_type", "output_tokens"),
}
#: The only values of other fields, besides null and false, with which a model is a CLIP.
VALUES = {
    "vision_cfg.pool_type": ("tok",),
    "text_cfg.pool_type": ("argmax",),
    "text_cfg.proj_type": ("linear",),
    "preprocess_cfg.mode": ("RGB",),
    "preprocess_cfg.fill_color": (0,),
    "preprocess_cfg.resize_mode": ("shortest", "squash"),
}
#: Weights that do not affect vectors.
UNUSED = ("logit_bias", "attn_mask")
#: Substitutions that rename weights, applied in order.
RENAMES = {
    r"^text\.": "",
    r"^visual\.proj$": "visual_projection.weight",
    r"^text_projection$": "text_projection.weight",
    r"^visual\.": "vision_model.",
    r"^(?=transformer|token_embedding|positional_embedding|ln_final)": "text_model.",
    r"transformer\.resblocks": "encoder.layers",
    r"\.(?=class_embedding|token_embedding)": ".embeddings.",
    r"positional_embedding": "embeddings.position_embedding.weight",
    r"conv1": "embeddings.patch_embedding",
    r"ln_pre": "pre_layrnorm",
    r"ln_post": "post_layernorm",
    r"ln_final": "final_layer_norm",
    r"\.ln_([12])": r".layer_norm\1",
    r"\.attn\.": ".self_attn.",
    r"mlp\.c_fc": "mlp.fc1",
    r"mlp\.c_proj": "mlp.fc2",
}


def convert_to_clip(model: str, folder: Path) -> None:
    """Replaces an OpenCLIP model in a folder by a CLIP, with its tokenizer as it is.

    `model` names the checkpoint in messages.

    Raises:
        SpecError: The files are invalid, or transformers has no such architecture.
    """
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        rule = f"an OpenCLIP model with one of {', '.join(TOKENIZER_FILES)}"
        note = "; add the tokenizer files of openai/clip-vit-base-patch32, if it is CLIP's"
        raise SpecError("model", model, rule, "has none of these files", note)
    rule = f"a checkpoint with a valid {OPEN_CLIP_CONFIG}"
    with reading("model", model, rule, *LOAD_ERRORS):
        settings = json.loads((folder / OPEN_CLIP_CONFIG).read_text("utf-8"))
        settings = {"preprocess_cfg": {}, **settings}
        for name in ("model_cfg", "model_cfg.vision_cfg", "model_cfg.text_cfg", "preprocess_cfg"):
            _check_fields(model, name, settings)
        clip = _config(settings["model_cfg"])
        images = _image_processor(clip["vision_config"]["image_size"], settings["preprocess_cfg"])
        with torch.device("meta"):
            expected = CLIPModel(CLIPConfig(**clip)).state_dict()
    with reading("model", model, RULE, *LOAD_ERRORS):
        weights = _rename(load_file(folder / OPEN_CLIP_WEIGHTS))
    for name in sorted(expected.keys() | weights.keys()):
        if name not in weights or name not in expected:
            problem = f"has {'no' if name not in weights else 'other'} weights {name}"
            raise SpecError("model", model, RULE, problem)
        if weights[name].shape != expected[name].shape:
            shapes = [" x ".join(map(str, found[name].shape)) for found in (weights, expected)]
            problem = f"has {name} of shape {shapes[0]} instead of {shapes[1]}"
            raise SpecError("model", model, RULE, problem)
    (folder / "config.json").write_text(json.dumps(clip, indent=2), "utf-8")
    (folder / "preprocessor_config.json").write_text(json.dumps(images, indent=2), "utf-8")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / OPEN_CLIP_WEIGHTS).unlink()


def _check_fields(model: str, path: str, settings: Mapping[str, Any]) -> None:
    section: Any = settings
    for name in path.split("."):
        section = section[name]
    for name, value in section.items():
        field = f"{path.removeprefix('model_cfg.')}.{name}"
        valid = (None, False, *VALUES.get(field, ()))
        is_list = name in ("image_size", "size", "layers") and isinstance(value, list)
        if is_list or (name not in KNOWN and value not in valid):
            problem = f"has {field} {value!r:.60}, which transformers' CLIP lacks"
            raise SpecError("model", model, RULE, problem)


def _config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration of a CLIP; defaults are those of OpenCLIP."""
    vision, text = settings["vision_cfg"], settings["text_cfg"]
    towers = []
    for tower, width in ((vision, 768), (text, 512)):
        width = tower.get("width", width)
        heads = width // tower.get("head_width", 64) if tower is vision else tower.get("heads", 8)
        towers.append(
            {
                "hidden_size": width,
                "intermediate_size": int(width * tower.get("mlp_ratio", 4.0)),
                "num_hidden_layers": tower.get("layers", 12),
                "num_attention_heads": heads,
                "hidden_act": "quick_gelu" if settings.get("quick_gelu") else "gelu",
                "projection_dim": settings["embed_dim"],
            }
        )
    image_sizes = {
        "image_size": vision.get("image_size", 224),
        "patch_size": vision.get("patch_size", 16),
    }
    text_sizes = {
        "max_position_embeddings": text.get("context_length", 77),
        "vocab_size": text.get("vocab_size", 49408),
        "bos_token_id": None,
        "eos_token_id": 2,  # pools at the largest id, as OpenCLIP does
    }
    return {
        "model_type": "clip",
        "architectures": ["CLIPModel"],
        "projection_dim": settings["embed_dim"],
        "vision_config": towers[0] | image_sizes,
        "text_config": towers[1] | text_sizes,
    }


def _image_processor(image_size: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of the image processor."""
    size, is_square = (
        int(settings.get("size") or image_size),
        settings.get("resize_mode") == "squash",
    )
    mean, std = (
        torch.tensor(settings.get(name) or default, dtype=torch.float64).reshape(3).tolist()
        for name, default in (("mean", OPENAI_CLIP_MEAN), ("std", OPENAI_CLIP_STD))
    )
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"height": size, "width": size} if is_square else {"shortest_edge": size},
        "resample": 2 if settings.get("interpolation") == "bilinear" else 3,
        "do_center_crop": not is_square,
        "crop_size": {"height": size, "width": size},
        "rounds_crop": not is_square,  # read by `dual`; transformers truncates half pixels
        "do_rescale": True,
        "do_normalize": True,
        "image_mean": mean,
        "image_std": std,
    }


def _rename(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Renames weights and splits those of queries, keys and values."""
    renamed = {}
    for name, tensor in weights.items():
        if name in ("visual.proj", "text_projection", "text.text_projection"):
            tensor = tensor.T  # of a product from the right
        for pattern, replacement in RENAMES.items():
            name = re.sub(pattern, replacement, name)
        if name == "logit_scale":
            tensor = tensor.reshape(())
        if "in_proj_" in name:
            for part, split in zip("qkv", tensor.chunk(3), strict=True):
                renamed[name.replace("in_proj_", f"{part}_proj.")] = split.clone()
        elif name not in UNUSED:
            renamed[name] = tensor.contiguous()
    return renamed
