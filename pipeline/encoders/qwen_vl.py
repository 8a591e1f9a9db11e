"""Embedders on Qwen2-VL, Qwen2.5-VL and Qwen3-VL: one pooled vector, and the states before it."""

from __future__ import annotations

from typing import Any, Literal

import torch
from transformers import PretrainedConfig, PreTrainedModel

from pipeline.encoders.loading import check_checkpoint
from pipeline.encoders.qwen_model import MODELS, load_backbone, run
from pipeline.encoders.qwen_spec import StatesSpec
from pipeline.encoders.qwen_states import StatesEncoder, StatesReader


class QwenVL(StatesEncoder["QwenVL.Spec"]):
    """Hidden states of an embedder of images, videos and texts, see `StatesEncoder`."""

    class Spec(StatesSpec):
        """Which checkpoint, how items and queries are put to it, and what is kept.

        Attributes:
            keep: "paper" drops the token that is pooled alone (SMART, eq. 4); "code" drops special
                tokens and keeps those of pictures, as SMART's public code does; "visual" is "code"
                of what has no picture, and of what has one keeps its tokens alone.
            documents: what is read of an item: "pictures", and the text of those that have none;
                its "text"; or "both" in one sequence, the text behind the pictures.
            frames: whether the frames of a video are read as a "video", where two make one grid of
                tokens, or one by one as "images" in one sequence.
        """

        name: Literal["qwen_vl"] = "qwen_vl"
        keep: Literal["code", "paper", "visual"] = "code"
        documents: Literal["pictures", "text", "both"] = "pictures"
        frames: Literal["video", "images"] = "video"

    OF_ITEMS = ("documents", "frames", "document_prompt", "max_frames", "max_item_tokens")
    nothing = "no picture and no text"

    @classmethod
    def settings(cls, spec: Spec) -> PretrainedConfig:
        """The settings of the model.

        Raises:
            SpecError: the checkpoint is not there, or another.
        """
        return check_checkpoint(spec, *MODELS)

    @classmethod
    def wants(cls, spec: Spec) -> tuple[str, ...]:
        """What `documents` says; the text of an item needs no work."""
        return ("text",) if spec.documents == "text" else ("text", "image", "frames")

    @classmethod
    def load(cls, spec: Spec, device_map: str | None) -> PreTrainedModel:
        """The model without the layer that would name the next word."""
        return load_backbone(spec, device_map)

    @classmethod
    def reader(cls, spec: Spec) -> QwenVLReader:
        """What reads pictures, videos, texts and queries."""
        return QwenVLReader(spec, cls.settings(spec))

    def run(self, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
        """The model's output."""
        return run(self.model, inputs, **options)


class QwenVLReader(StatesReader["QwenVL.Spec"]):
    """Items and queries in their prompts."""

    @property
    def _as_images(self) -> bool:
        return self.spec.frames == "images"
