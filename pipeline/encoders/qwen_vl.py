"""Embedders based on Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

from typing import Any, Literal

import torch
from transformers import PretrainedConfig, PreTrainedModel

from pipeline.encoders.loading import check_checkpoint
from pipeline.encoders.qwen_model import MODELS, load_backbone, run
from pipeline.encoders.qwen_spec import StatesSpec
from pipeline.encoders.qwen_states import StatesEncoder, StatesReader


class QwenVL(StatesEncoder["QwenVL.Spec"]):
    """Encoder with hidden states of an image, video and text embedder, see `StatesEncoder`."""

    class Spec(StatesSpec):
        """Checkpoint, the content and prompts of items, and the tokens that are kept."""

        name: Literal["qwen_vl"] = "qwen_vl"
        output_tokens: Literal["code", "paper", "visual"] = "code"
        """"paper" drops only the pooled token (SMART, eq. 4). "code" drops special tokens and keeps
        image tokens, as SMART's public code does. "visual" keeps only image tokens, or for inputs
        without images the same as "code".
        """
        documents: Literal["images", "text", "both"] = "images"
        """Content of an item that is encoded: `images` (the images, or the text of items without
        images), "text", or "both" in one sequence, the text after the images.
        """
        frames: Literal["video", "images"] = "video"
        """Encode the frames of a video as a "video", where two frames form one grid of tokens, or
        as separate "images" in one sequence.
        """

    ITEM_FIELDS = ("documents", "frames", "document_prompt", "max_frames", "max_item_tokens")
    empty_reason = "no image and no text"

    @classmethod
    def settings(cls, spec: Spec) -> PretrainedConfig:
        """Returns the configuration of the model."""
        return check_checkpoint(spec, *MODELS)

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
        return run(self.model, inputs, **options)


class QwenVLReader(StatesReader["QwenVL.Spec"]):
    """Reader of items and queries with prompts."""

    @property
    def _as_images(self) -> bool:
        return self.spec.frames == "images"
