"""Embedders on Qwen2-VL, Qwen2.5-VL and Qwen3-VL: one pooled vector, and the states before it.

Such a model (GME, VLM2Vec, Qwen3-VL-Embedding) is trained with the last token's state alone. That
the states of the tokens before it serve as multi-vectors is SMART's finding (sec. 3.2, eq. 4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from PIL import Image
from transformers import PretrainedConfig, PreTrainedModel

from pipeline.config import SpecError
from pipeline.decoding import Unreadable
from pipeline.encoders import Attention, EncodedQueries
from pipeline.encoders.images import open_query_image
from pipeline.encoders.layers import attention_info, check_layers, layer_states, make_bidirectional
from pipeline.encoders.loading import NOT_IN_FINGERPRINTS, check_checkpoint, fingerprint_of
from pipeline.encoders.model_inputs import ModelInput
from pipeline.encoders.qwen_model import MODELS, load_backbone, run
from pipeline.encoders.qwen_reader import QwenReader, SequenceWriter, Shown
from pipeline.encoders.qwen_spec import StatesSpec
from pipeline.encoders.sequences import SequenceEncoder
from pipeline.taps import STATISTICS
from pipeline.tokens import SPECIAL, VISUAL


class QwenVL(SequenceEncoder):
    """Hidden states of a single-vector embedder as token vectors, beside its own vector.

    The pooled vector is the last layer's state of the last token. Special tokens that are spelled
    out in a text are the text's own characters, not special.

    Where nothing is left to be kept, the pooled vector is the only token, of kind `SPECIAL`. An
    item without a picture and without a word has none.

    A video that does not fit is thinned: of its frames as many are read as `max_frames` and the
    tokens allow, in even distances, the first and the last among them; the item's metadata then
    says how many (`frames_read`). A picture or a text that does not fit is not readable.
    """

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

    #: Fields that change no query.
    OF_ITEMS: ClassVar[tuple[str, ...]] = (
        *("documents", "frames", "document_prompt", "max_frames", "max_item_tokens"),
    )

    normalised = True
    nothing = "no picture and no text"
    padding_side = "left"
    part_of_checkpoint = "model."
    has_spans = True

    def __init__(self, spec: StatesSpec, device_map: str | None = None):
        super().__init__(spec, device_map)
        if spec.bidirectional:
            make_bidirectional(self.attending())
        settings = self.model.config.get_text_config()
        self.num_states = 1 if isinstance(spec.layer, int) else len(spec.layer)
        self.pooled_dim = settings.hidden_size
        self.dim = settings.hidden_size * self.num_states
        self._is_last_layer = spec.layer in (-1, settings.num_hidden_layers)
        self.fingerprint = fingerprint_of(spec, (*NOT_IN_FINGERPRINTS, *self.OF_ITEMS))

    @classmethod
    def settings(cls, spec: StatesSpec) -> PretrainedConfig:
        """The settings of the model.

        Raises:
            SpecError: the checkpoint is not there, or another.
        """
        return check_checkpoint(spec, *MODELS)

    @classmethod
    def check(cls, spec: StatesSpec) -> None:
        """Raises `SpecError` if the checkpoint is not there, is another, or has no such layer."""
        depth = cls.settings(spec).get_text_config().num_hidden_layers
        check_layers(spec.layer, depth)
        cls.reader(spec)

    @classmethod
    def wants(cls, spec: Spec) -> tuple[str, ...]:
        """What `documents` says; the text of an item needs no work."""
        return ("text",) if spec.documents == "text" else ("text", "image", "frames")

    @classmethod
    def attention(cls, spec: StatesSpec) -> Attention:
        """All statistics; the last token is the one that is pooled."""
        return attention_info(cls.settings(spec).get_text_config(), STATISTICS)

    @classmethod
    def query_kinds(cls, spec: StatesSpec) -> tuple[str, ...]:
        """Texts, pictures, and both together."""
        return ("text", "image", "composed")

    @classmethod
    def load(cls, spec: StatesSpec, device_map: str | None) -> PreTrainedModel:
        """The model without the layer that would name the next word."""
        return load_backbone(spec, device_map)

    @classmethod
    def reader(cls, spec: Spec) -> QwenVLReader:
        """What reads pictures, videos, texts and queries."""
        return QwenVLReader(spec, cls.settings(spec))

    def attending(self) -> torch.nn.Module:
        """The language model, behind the vision tower."""
        return self.model.language_model

    def encode_composed(self, texts: Sequence[str], pictures: Sequence[bytes]) -> EncodedQueries:
        """Encodes queries of a text and a picture each, in order.

        Raises:
            SpecError: there is no query, or a part of one is not legal.
        """
        if not texts or len(texts) != len(pictures):
            raise SpecError("query", len(texts), "as many texts as pictures, and at least one")
        read = [
            self._read_by.composed(text, open_query_image(data))
            for text, data in zip(texts, pictures, strict=True)
        ]
        return self._queries(read)

    def forward(
        self, inputs: dict[str, torch.Tensor], mask_BL: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The states of the layers, and the last layer's of the last token."""
        is_pooled_BL = inputs.pop("is_pooled")
        output = self.run(inputs, output_hidden_states=not self._is_last_layer)
        last_BLD = output.last_hidden_state
        states_BLD = last_BLD
        if not self._is_last_layer:
            states_BLD = layer_states(output.hidden_states, self.spec.layer)
        position = torch.arange(mask_BL.shape[1], device=mask_BL.device)
        pooled_BD = last_BLD[torch.arange(len(last_BLD)), (mask_BL * position).argmax(dim=1)]
        # Of what has no other token; else this position may be one of another layer.
        alone_BL1 = is_pooled_BL.unsqueeze(2)
        alone_B1D = pooled_BD.unsqueeze(1).repeat(1, 1, self.num_states)
        return torch.where(alone_BL1, alone_B1D.to(states_BLD.dtype), states_BLD), pooled_BD

    def run(self, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
        """The model's output."""
        return run(self.model, inputs, **options)


class QwenVLReader(QwenReader):
    """Items and queries in their prompts."""

    #: What is pictures (and sound), as distinct from words.
    MEDIA: ClassVar[tuple[int, ...]] = (VISUAL,)

    @property
    def _as_images(self) -> bool:
        """Whether frames are read one by one."""
        return self.spec.frames == "images"

    def item(self, item: Mapping[str, Any]) -> list[ModelInput]:
        """One sequence: the pictures or the video, and the text.

        Raises:
            Unreadable: a picture is too long and narrow, or the item has too many tokens.
        """
        shown, text = self.content_of(item)
        return [self._read(self.spec.document_prompt, text, shown)] if shown or text else []

    def note(self, item: Mapping[str, Any], read: Sequence[ModelInput]) -> dict[str, Any]:
        """How many frames of a video are read, where those are not all."""
        frames = item.get("frames") or []
        media = read[0].media if read else {}
        if not frames or self.spec.documents == "text":
            return {}
        if self._as_images:
            number = len(media["image_grid_thw"])
        else:  # the last grid may repeat its frame
            number = int(media["video_grid_thw"][0, 0]) * self.images.temporal_patch_size
            number = min(number, len(frames), self.spec.max_frames)
        return {"frames_read": number} if number < len(frames) else {}

    def _read(
        self,
        prompt: str,
        text: str,
        shown: Sequence[Shown] = (),
        is_composed: bool = False,
        **more: Any,
    ) -> ModelInput:
        """The sequence of a prompt with all of that in it; `write` is given what there is more."""
        if not shown or np.isnan(shown[0][1]):
            _, written = self.fitting(1, lambda _: self.write(prompt, text, shown, **more))
            return self._kept(written, self.pixels_of(shown), is_composed)
        if len({picture.size for picture, _, _ in shown}) > 1:
            raise Unreadable("frames of several sizes")
        as_images = self._as_images
        depth = 1 if as_images else self.images.temporal_patch_size
        most = min(len(shown), self.spec.max_frames)

        def grids(number: int) -> list[Sequence[Shown]]:
            rows = np.linspace(0, len(shown) - 1, min(number * depth, most)).round().astype(int)
            ends = [*(shown[row][1] for row in rows[1:]), shown[-1][2]]
            picked = [(*shown[row][:2], end) for row, end in zip(rows, ends, strict=True)]
            return [picked[start : start + depth] for start in range(0, len(picked), depth)]

        def write(number: int) -> SequenceWriter:
            own = grids(number)
            if as_images:
                return self.write(prompt, text, images=[frame for (frame,) in own], **more)
            return self.write(prompt, text, video=own, **more)

        number, written = self.fitting(math.ceil(most / depth), write)
        own = grids(number)
        if as_images:
            return self._kept(written, self.pixels_of([frame for (frame,) in own]), is_composed)
        return self._kept(written, self.pixels_of_video(own), is_composed)

    def _kept(
        self, written: SequenceWriter, media: dict[str, torch.Tensor], is_composed: bool
    ) -> ModelInput:
        kind = torch.tensor(written.kinds)
        is_media = torch.isin(kind, torch.tensor(self.MEDIA))
        is_last = torch.arange(len(kind)) == len(kind) - 1
        is_masked = is_composed and self.spec.mask_composed
        if self.spec.keep == "paper":
            keep = ~is_last
        elif self.spec.keep in ("visual", "media") and is_media.any() and not is_masked:
            keep = is_media
        else:
            keep = kind != SPECIAL
        if is_masked:
            keep &= ~is_media
        is_pooled = is_last & ~keep.any()
        kind = torch.where(is_pooled, SPECIAL, kind)
        return written.read(media, keep | is_pooled, kind, is_pooled=is_pooled)

    def picture(self, picture: Image.Image) -> tuple[ModelInput, list[str]]:
        """A query picture in the prompt of queries."""
        shown = [(picture, np.nan, np.nan)]
        return self.named(self._read(self.spec.query_prompt, "", shown))

    def text(self, text: str) -> tuple[ModelInput, list[str]]:
        """A query text in the prompt of queries."""
        return self.named(self._of_query(text), text)

    def composed(self, text: str, picture: Image.Image) -> tuple[ModelInput, list[str]]:
        """A query of a text and a picture, which stands before it.

        Raises:
            SpecError: the text is empty, or the model cannot read the two.
        """
        if not text.strip():
            raise SpecError("query", text, "a text with at least one word")
        shown = [(picture, np.nan, np.nan)]
        return self.named(self._of_query(text, shown, is_composed=True), text)

    def _of_query(self, *read: Any, **options: Any) -> ModelInput:
        try:
            return self._read(self.spec.query_prompt, *read, **options)
        except Unreadable as error:
            raise SpecError("query", read[0], "what the model reads", error.detail) from None
