"""Single-vector embedders based on Qwen models, whose hidden states serve as token vectors.

Such a model (GME, VLM2Vec, Qwen3-VL-Embedding) is trained only with the hidden state of its last
token. The use of the preceding states as multi-vectors follows SMART (section 3.2, eq. 4).
"""

from __future__ import annotations

import math
import unicodedata
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from transformers import PretrainedConfig, PreTrainedModel

from pipeline.data.decode import Unreadable
from pipeline.encoders import AttentionInfo, readable_query
from pipeline.encoders.images import item_images
from pipeline.encoders.layers import attention_info, check_layers, layer_states, make_bidirectional
from pipeline.encoders.loading import NOT_IN_FINGERPRINTS, checkpoint_fingerprint
from pipeline.encoders.model_inputs import ModelInput
from pipeline.encoders.qwen_reader import (
    QwenReader,
    SequenceWriter,
    TimedImage,
    VideoSettings,
)
from pipeline.encoders.qwen_spec import StatesSpecT
from pipeline.encoders.sequences import SequenceEncoder
from pipeline.encoders.templates import (
    DEFAULT_INSTRUCTION,
    check_special_tokens,
    fill_template,
)
from pipeline.encoders.trained import appended_hashes, check_appended_tokens
from pipeline.taps import MODEL_STATISTICS
from pipeline.tokens import SPECIAL, VISUAL

#: Fields whose effect `StatesReader.differences` returns.
PREPROCESSING_FIELDS = ("preprocessing", "positions")


class StatesEncoder(SequenceEncoder[StatesSpecT]):
    """Base class of encoders whose token vectors are hidden states of a single-vector embedder.

    The pooled vector is the state of the last token in `pooled_layer`, by default the last layer.
    Special tokens spelled out in a text are plain text.

    If no token is kept, the pooled vector is the only token, of kind `SPECIAL`. An item without
    media and words has no tokens.

    A video that exceeds the token limit is subsampled to evenly spaced frames including the first
    and the last, as many as `max_frames` and the limit allow. `frames_read` in the item's metadata
    is their number. An image or text that exceeds the limit is rejected.

    Attributes:
        ITEM_FIELDS: Fields of the spec that do not affect queries.
    """

    ITEM_FIELDS: ClassVar[tuple[str, ...]]

    default_query_kinds: ClassVar[tuple[str, ...]] = ("text", "image", "video", "composed")
    padding_side = "left"
    checkpoint_prefix = "model."
    has_spans = True

    def __init__(self, spec: StatesSpecT, device_map: str | None = None):
        super().__init__(spec, device_map)
        if spec.bidirectional:
            make_bidirectional(self.attention_module())
        settings = self.model.config.get_text_config()
        self.num_states = 1 if isinstance(spec.layer, int) else len(spec.layer)
        self.pooled_dim = settings.hidden_size
        self.dim = settings.hidden_size * self.num_states
        last = (-1, settings.num_hidden_layers)
        self._is_last_layer, self._pools_last_layer = spec.layer in last, spec.pooled_layer in last
        reader: Any = self._reader
        # The fingerprints of indexes without these fields do not change.
        pooled = {} if self._pools_last_layer else {"pooled_layer": spec.pooled_layer}
        self.fingerprint = checkpoint_fingerprint(
            spec,
            (
                *(*NOT_IN_FINGERPRINTS, *self.ITEM_FIELDS, "pooled_layer"),
                *PREPROCESSING_FIELDS,
            ),
            **pooled,
            **reader.differences(),
            **appended_hashes(spec),
        )

    @classmethod
    @abstractmethod
    def settings(cls, spec: StatesSpecT) -> PretrainedConfig:
        """Returns the configuration of the model.

        Raises:
            SpecError: The checkpoint does not exist or has another type.
        """

    @classmethod
    def check(cls, spec: StatesSpecT) -> None:
        """Checks that the checkpoint exists, has the expected type and has the selected layers."""
        settings = cls.settings(spec).get_text_config()
        check_layers(spec.layer, settings.num_hidden_layers)
        check_layers(spec.pooled_layer, settings.num_hidden_layers, "pooled_layer")
        check_appended_tokens(spec, settings.hidden_size)
        cls.reader(spec)

    @classmethod
    def attention(cls, spec: StatesSpecT) -> AttentionInfo:
        """Returns all statistics. The last token is the pooled one."""
        return attention_info(cls.settings(spec).get_text_config(), MODEL_STATISTICS, spec)

    def attention_module(self) -> PreTrainedModel:
        """Returns the language model."""
        return self.model.language_model

    def forward(
        self, inputs: dict[str, torch.Tensor], mask_BL: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the selected hidden states, and those of the last token in the pooled layer."""
        is_pooled_BL = inputs.pop("is_pooled")
        needs_others = not (self._is_last_layer and self._pools_last_layer)
        output = self.run(inputs, output_hidden_states=needs_others)
        states_BLD = pooling_BLD = output.last_hidden_state
        if not self._is_last_layer:
            states_BLD = layer_states(output.hidden_states, self.spec.layer)
        if not self._pools_last_layer:
            pooling_BLD = output.hidden_states[self.spec.pooled_layer]
        position = torch.arange(mask_BL.shape[1], device=mask_BL.device)
        pooled_BD = pooling_BLD[torch.arange(len(pooling_BLD)), (mask_BL * position).argmax(dim=1)]
        # The pooled vector is the only token of inputs without kept tokens. At other positions the
        # states may be those of another layer.
        is_pooled_BL1 = is_pooled_BL.unsqueeze(2)
        repeated_B1D = pooled_BD.unsqueeze(1).repeat(1, 1, self.num_states)
        return torch.where(is_pooled_BL1, repeated_B1D.to(states_BLD.dtype), states_BLD), pooled_BD

    @abstractmethod
    def run(self, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
        """Runs the model and returns its output."""


def end_sentence(instruction: str) -> str:
    """Adds a full stop, unless the instruction ends with a punctuation mark.

    >>> [end_sentence(text) for text in ("Find a page ", "Find a page?", "")]
    ['Find a page.', 'Find a page?', '']
    """
    instruction = instruction.strip()
    is_open = instruction and not unicodedata.category(instruction[-1]).startswith("P")
    return f"{instruction}." if is_open else instruction


class StatesReader(QwenReader[StatesSpecT]):
    """Reader of items and queries with prompts.

    Attributes:
        MEDIA: Kinds of media tokens, as opposed to text.
        as_images: Whether the frames of a video are separate images.
    """

    MEDIA: ClassVar[tuple[int, ...]] = (VISUAL,)
    as_images = False

    def __init__(self, spec: StatesSpecT, settings: PretrainedConfig):
        super().__init__(spec, settings)
        for field in ("document_prompt", "query_prompt"):
            vocabulary = self.tokenizer.get_vocab()
            check_special_tokens(field, getattr(spec, field), vocabulary, spec.model)

    def differences(self) -> dict[str, Any]:
        """Returns the preprocessing, as far as it differs from that of images by transformers."""
        images = self.images.size
        same = VideoSettings(images["shortest_edge"], images["longest_edge"], None, 4, 2**31)
        found: dict[str, Any] = {}
        if self.preprocessing != "transformers":
            found["preprocessing"] = self.preprocessing
        if self.video and self.video._replace(min_frames=4) != same:
            found["video"] = self.video
        return found

    def read_item(self, item: Mapping[str, Any]) -> list[ModelInput]:
        """Returns one sequence: the images or the video, and the text."""
        images, text = self.item_content(item)
        if self.preprocessing == "qwen3_vl_embedding" and not images and item.get("text") == "":
            text = "NULL"
        return [self._build(self.spec.document_prompt, text, images)] if images or text else []

    def read_note(self, item: Mapping[str, Any], inputs: Sequence[ModelInput]) -> dict[str, Any]:
        """Returns the number of encoded frames of a video that was subsampled."""
        frames = item.get("frames") or []
        media = inputs[0].media if inputs else {}
        if not frames or self.spec.documents == "text":
            return {}
        if self.as_images:
            number = len(media["image_grid_thw"])
        else:  # an incomplete last grid repeats its frame
            number = int(media["video_grid_thw"][0, 0]) * self.images.temporal_patch_size
            number = min(number, len(frames), self.spec.max_frames)
        return {"frames_read": number} if number < len(frames) else {}

    def _build(
        self,
        prompt: str,
        text: str,
        images: Sequence[TimedImage] = (),
        is_composed: bool = False,
        **options: Any,
    ) -> ModelInput:
        """Builds the sequence of a prompt. Videos are subsampled to satisfy the token limit."""
        if not images or np.isnan(images[0][1]):
            return self._build_still(prompt, text, images, is_composed, **options)
        if len({image.size for image, _, _ in images}) > 1:
            raise Unreadable("frames of several sizes")
        depth = 1 if self.as_images else self.images.temporal_patch_size
        max_frames = min(len(images), self.spec.max_frames)
        if self.video:
            max_frames = min(max_frames, self.video.num_frames(images[-1][2] - images[0][1]))

        def subsample(num_grids: int) -> dict[str, Any]:
            num_frames = min(num_grids * depth, max_frames)
            rows = np.linspace(0, len(images) - 1, num_frames).round().astype(int)
            ends = [*(images[row][1] for row in rows[1:]), images[-1][2]]
            frames = [(*images[row][:2], end) for row, end in zip(rows, ends, strict=True)]
            if self.as_images:
                return {"images": frames}
            return {"video": [frames[i : i + depth] for i in range(0, len(frames), depth)]}

        num_grids, writer = self.fit_to_limit(
            math.ceil(max_frames / depth),
            lambda number: self.write(prompt, text, **subsample(number), **options),
        )
        read = self.image_inputs if self.as_images else self.video_inputs
        (grids,) = subsample(num_grids).values()
        return self._select_tokens(writer, read(grids), is_composed)

    def _build_still(
        self,
        prompt: str,
        text: str,
        images: Sequence[TimedImage],
        is_composed: bool = False,
        **options: Any,
    ) -> ModelInput:
        """Builds the sequence of a prompt with images that are not frames of one video."""
        _, writer = self.fit_to_limit(
            1, lambda _: self.write(prompt, text, images=images, **options)
        )
        return self._select_tokens(writer, self.image_inputs(images), is_composed)

    def _select_tokens(
        self, writer: SequenceWriter, media: dict[str, torch.Tensor], is_composed: bool
    ) -> ModelInput:
        kind = torch.tensor(writer.kinds)
        is_media = torch.isin(kind, torch.tensor(self.MEDIA))
        is_last = torch.arange(len(kind)) == len(kind) - 1
        is_masked = is_composed and self.spec.mask_composed
        if self.spec.output_tokens == "paper":
            keep = ~is_last
        elif self.spec.output_tokens == "all":
            keep = torch.ones_like(is_last)
        elif self.spec.output_tokens in ("visual", "media") and is_media.any() and not is_masked:
            keep = is_media
        else:
            keep = kind != SPECIAL
        if is_masked:
            keep &= ~is_media
        is_pooled = is_last & ~keep.any()
        kind = torch.where(is_pooled, SPECIAL, kind)
        return writer.build(media, keep | is_pooled, kind, is_pooled=is_pooled)

    @property
    def query_prompt(self) -> str:
        """Prompt of queries with the instruction, which replaces that of the default prompt."""
        instruction = self.instruction
        if self.preprocessing == "qwen3_vl_embedding":
            instruction = end_sentence(instruction)
        prompt = fill_template(self.spec.query_prompt, instruction)
        return prompt.replace(DEFAULT_INSTRUCTION, instruction)

    def read_still(self, image: Image.Image, start: float, stop: float) -> ModelInput:
        """Returns the sequence of a single image, displayed from `start` to `stop` s, or NaN."""
        return self._build_still(self.spec.document_prompt, "", [(image, start, stop)])

    def read_text_query(self, text: str) -> tuple[ModelInput, list[str]]:
        """Returns the sequence of a text query."""
        with readable_query(text):
            return self.with_token_names(self._build(self.query_prompt, text), text)

    def read_media_query(self, query: Mapping[str, Any]) -> tuple[list[ModelInput], list[str]]:
        """Returns the sequence of the media of a query, followed by its text."""
        text, images, media = query.get("text") or "", item_images(query), self.read_media(query)
        if not images and not any(media.values()):
            return [], []
        inputs = self._build(self.query_prompt, text, images, is_composed=bool(text), **media)
        inputs, names = self.with_token_names(inputs, text)
        return [inputs], names

    def read_media(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the content of an item besides images and text, as arguments of `_build`."""
        return {}
