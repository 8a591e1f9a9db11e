"""Embedders based on Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

from typing import Any, Literal

import torch
from transformers import PretrainedConfig, PreTrainedModel

from pipeline.encoders.loading import check_checkpoint
from pipeline.encoders.qwen_model import MODELS, load_backbone, run
from pipeline.encoders.qwen_spec import Positions, Preprocessing, StatesSpec
from pipeline.encoders.qwen_states import StatesEncoder, StatesReader


class QwenVL(StatesEncoder["QwenVL.Spec"]):
    """Encoder with hidden states of an image, video and text embedder, see `StatesEncoder`."""

    class Spec(StatesSpec):
        """Checkpoint, the content and prompts of items, and the tokens that are kept."""

        name: Literal["qwen_vl"] = "qwen_vl"
        output_tokens: Literal["code", "paper", "visual", "all"] = "code"
        """"paper" drops only the pooled token (SMART, eq. 4). "code" drops special tokens and keeps
        image tokens, as SMART's public code does. "visual" keeps only image tokens, or for inputs
        without images the same as "code". "all" drops none, as OmniColPress does.
        """
        documents: Literal["images", "text", "both"] = "images"
        """Content of an item that is encoded: `images` (the images, or the text of items without
        images), "text", or "both" in one sequence, the text after the images.
        """
        frames: Literal["video", "images"] = "video"
        """Encode the frames of a video as a "video", where two frames form one grid of tokens, or
        as separate "images" in one sequence.
        """
        preprocessing: Preprocessing | None = None
        """Library whose steps on images, videos and instructions are reproduced:

        - "transformers": The image and video processors of the checkpoint.
        - "gme": Images are resized twice, the second time to 256 to 1280 tokens.
        - "vlm2vec": Images and videos have no boundary tokens. Images smaller than a token are
          resized to two tokens per side.
        - "qwen3_vl_embedding": Videos have a budget of tokens, which also scales them up. An
          instruction without a final punctuation mark ends with a full stop, and an empty text is
          "NULL".

        Null: "gme" if config.json names a class of GME, "qwen3_vl_embedding" for a Qwen3-VL,
        otherwise "transformers".
        """
        positions: Positions | None = None
        """Positions of image tokens: in time, row and column ("3d"), or numbered like text ("1d").
        Null: "1d" for the preprocessing of GME and VLM2Vec, otherwise "3d".
        """

    ITEM_FIELDS = ("documents", "frames", "document_prompt", "max_frames", "max_item_tokens")
    empty_reason = "no image and no text"

    @classmethod
    def settings(cls, spec: Spec) -> PretrainedConfig:
        """Returns the configuration of the model."""
        return check_checkpoint(spec, *MODELS)

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Checks that the checkpoint and its preprocessing support the spec."""
        if spec.preprocessing == "vlm2vec" and spec.frames == "images":
            rule = "1d for separate images without boundaries"
            spec.require(spec.positions != "3d", "positions", rule)
        super().check(spec)

    @classmethod
    def supported_inputs(cls, spec: Spec) -> tuple[str, ...]:
        """Returns the inputs selected by `documents`."""
        return ("text",) if spec.documents == "text" else ("text", "image", "frames")

    @classmethod
    def load(cls, spec: Spec, device_map: str | None) -> PreTrainedModel:
        """Loads the model without its language modelling head."""
        return load_backbone(spec, device_map)

    @classmethod
    def reader(cls, spec: Spec) -> QwenVLReader:
        """Returns the reader of images, videos, texts and queries."""
        return QwenVLReader(spec, cls.settings(spec))

    def run(self, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
        """Runs the model and returns its output."""
        reader: Any = self._reader
        return run(self.model, inputs, reader.positions, **options)


class QwenVLReader(StatesReader["QwenVL.Spec"]):
    """Reader of items and queries with prompts.

    Attributes:
        positions: Positions of image tokens.
    """

    def __init__(self, spec: QwenVL.Spec, settings: PretrainedConfig):
        self.preprocessing = spec.preprocessing or _find_preprocessing(settings)
        is_1d = self.preprocessing in ("gme", "vlm2vec")
        self.positions: Positions = spec.positions or ("1d" if is_1d else "3d")
        self.as_images = spec.frames == "images"
        super().__init__(spec, settings)

    def differences(self) -> dict[str, Any]:
        """Returns the preprocessing and the positions, as far as they differ from the default."""
        return super().differences() | ({"positions": "1d"} if self.positions == "1d" else {})


def _find_preprocessing(settings: PretrainedConfig) -> Preprocessing:
    """Returns the preprocessing of the library that a checkpoint belongs to."""
    classes = [
        *(settings.architectures or ()),
        *(getattr(settings, "auto_map", None) or {}).values(),
    ]
    if any("gme" in str(name).lower() for name in classes):
        return "gme"
    return "qwen3_vl_embedding" if settings.model_type == "qwen3_vl" else "transformers"
