"""Single-vector embedders of the Qwen models, whose hidden states serve as token vectors.

Such a model (GME, VLM2Vec, Qwen3-VL-Embedding) is trained only with the state of its last token.
That the states of the tokens before it serve as multi-vectors is a finding of SMART (section 3.2,
eq. 4).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from transformers import PretrainedConfig, PreTrainedModel

from pipeline.config import SpecError
from pipeline.decoding import Unreadable
from pipeline.encoders import Attention, EncodedQueries
from pipeline.encoders.images import open_query_image
from pipeline.encoders.layers import attention_info, check_layers, layer_states, make_bidirectional
from pipeline.encoders.loading import NOT_IN_FINGERPRINTS, fingerprint_of
from pipeline.encoders.model_inputs import ModelInput
from pipeline.encoders.qwen_reader import QwenReader, SequenceWriter, Shown
from pipeline.encoders.qwen_spec import StatesSpecT
from pipeline.encoders.sequences import SequenceEncoder
from pipeline.taps import STATISTICS
from pipeline.tokens import SPECIAL, VISUAL


class StatesEncoder(SequenceEncoder[StatesSpecT]):
    """Base of the encoders whose token vectors are the hidden states of a single-vector embedder.

    The pooled vector is the last layer's state of the last token. Special tokens that are spelled
    out in a text are plain text.

    Where no token is kept, the pooled vector is the only token, of kind `SPECIAL`. An item without
    media and words has none.

    A video that exceeds the token limit is thinned: as many of its frames are read as `max_frames`
    and the limit allow, evenly spaced and including the first and the last; `frames_read` in the
    item's metadata is their number. An image or a text that exceeds the limit is unreadable.
    """

    #: Fields that do not change queries.
    OF_ITEMS: ClassVar[tuple[str, ...]]

    normalised = True
    padding_side = "left"
    part_of_checkpoint = "model."
    has_spans = True

    def __init__(self, spec: StatesSpecT, device_map: str | None = None):
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
    @abstractmethod
    def settings(cls, spec: StatesSpecT) -> PretrainedConfig:
        """Returns the settings of the model.

        Raises:
            SpecError: The checkpoint does not exist or is of another model.
        """

    @classmethod
    def check(cls, spec: StatesSpecT) -> None:
        """Raises `SpecError` if the checkpoint is not there, is another, or has no such layer."""
        depth = cls.settings(spec).get_text_config().num_hidden_layers
        check_layers(spec.layer, depth)
        cls.reader(spec)

    @classmethod
    def attention(cls, spec: StatesSpecT) -> Attention:
        """All statistics; the last token is the one that is pooled."""
        return attention_info(cls.settings(spec).get_text_config(), STATISTICS)

    @classmethod
    def query_kinds(cls, spec: StatesSpecT) -> tuple[str, ...]:
        """Texts, pictures, and both together."""
        return ("text", "image", "composed")

    def attending(self) -> PreTrainedModel:
        """The language model, behind the vision tower."""
        return self.model.language_model

    def encode_composed(self, texts: Sequence[str], pictures: Sequence[bytes]) -> EncodedQueries:
        """Encodes queries of a text and a picture each, in order.

        Raises:
            SpecError: There are no queries, or one is invalid.
        """
        if not texts or len(texts) != len(pictures):
            raise SpecError("query", len(texts), "one text per image, and at least one")
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

    @abstractmethod
    def run(self, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
        """Returns the model's output."""


class StatesReader(QwenReader[StatesSpecT]):
    """Items and queries in their prompts."""

    #: Kinds of tokens that are media, as distinct from words.
    MEDIA: ClassVar[tuple[int, ...]] = (VISUAL,)

    @property
    def _as_images(self) -> bool:
        """Whether the frames of a video are read one by one."""
        return False

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
            raise SpecError(
                "query", read[0], "a readable input", note=f" ({error.detail})"
            ) from None
