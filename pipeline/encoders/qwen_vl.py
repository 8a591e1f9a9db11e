"""Embedders on Qwen2-VL, Qwen2.5-VL and Qwen3-VL: one pooled vector, and the states before it.

Such a model (GME, VLM2Vec, Qwen3-VL-Embedding) is trained with the last token's state alone. That
the states of the tokens before it serve as multi-vectors is SMART's finding (sec. 3.2, eq. 4).
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from PIL import Image
from pydantic import AfterValidator, Field
from transformers import (
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from pipeline.config import SpecError
from pipeline.decoding import Unreadable
from pipeline.encoders import Attention, EncodedQueries
from pipeline.encoders.loading import (
    NOT_IN_FINGERPRINTS,
    CheckpointSpec,
    check_checkpoint,
    check_patches,
    fingerprint_of,
    load_model,
    load_processor,
)
from pipeline.encoders.sequences import (
    Layers,
    ModelInput,
    Reader,
    SequenceEncoder,
    check_layers,
    layers_of,
    make_bidirectional,
    names_of,
    opened,
    pictures_of,
    raster,
    states_of,
)
from pipeline.taps import STATISTICS
from pipeline.tokens import PROMPT, SPECIAL, TEXT, VISUAL

#: By type: the model that names the next word, within which is that of states.
MODELS = {
    "qwen2_vl": Qwen2VLForConditionalGeneration,
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": Qwen3VLForConditionalGeneration,
}

#: Where in a prompt the pictures and the text go.
CONTENT = "{content}"
CHAT = (
    "<|im_start|>system\n{instruction}<|im_end|>\n"
    "<|im_start|>user\n{content}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
DOCUMENT_PROMPT = CHAT.replace("{instruction}", "Represent the user's input.")
QUERY_PROMPT = CHAT.replace(
    "{instruction}", "Retrieve images or text relevant to the user's query."
)
#: Special whether or not a tokenizer lists them as such; SMART's code drops them.
BOUNDARIES = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>"),
    *("<|vision_bos|>", "<|vision_eos|>", "<|audio_bos|>", "<|audio_eos|>"),  # of Qwen2.5-Omni
)
#: Stand where pictures and sound go, for each of their tokens: of Qwen-VL, and of Qwen2.5-Omni.
PLACES = ("<|image_pad|>", "<|video_pad|>", "<|IMAGE|>", "<|VIDEO|>", "<|AUDIO|>")
#: Codes of `mm_token_type_ids`.
OF_TEXT, OF_IMAGES, OF_VIDEOS = range(3)

#: A picture, and the seconds from and to which it is shown.
Shown = tuple[Image.Image, float, float]


def _check_prompt(prompt: str) -> str:
    if prompt.count(CONTENT) != 1:
        raise SpecError("", prompt, f"a text with {CONTENT} in it once")
    for place in PLACES:
        if place in prompt:
            legal = f"a text in which {CONTENT} alone stands for pictures and sound"
            raise SpecError("", prompt, legal, f"has {place}")
    return prompt


Prompt = Annotated[str, AfterValidator(_check_prompt)]


class QwenSpec(CheckpointSpec):
    """What the specs of all families on these models have in common.

    Attributes:
        min_pixels, max_pixels: of a picture as the model sees it; null: the checkpoint's own. That
            of Qwen3-VL allows 16384 tokens a picture; the code of Qwen3-VL-Embedding sets 4096 and
            1843200, of which 1800 tokens are the most.
        max_item_tokens: the most tokens of an item or a query, the prompt's included, if the
            model's window is not shorter.
    """

    min_pixels: int | None = Field(None, ge=1)
    max_pixels: int | None = Field(None, ge=1)
    max_item_tokens: int = Field(8192, ge=1)


class StatesSpec(QwenSpec):
    """What the specs of single-vector embedders that are read SMART's way have in common.

    The prompts are by default those of Qwen3-VL-Embedding. Other models have others, with
    `{content}` in them: GME has "You are a helpful assistant." as the system's words before
    items, and `<|endoftext|>` as the last token, which is written out at the prompt's end. A
    token that the checkpoint's tokenizer puts behind every text need not be.

    Attributes:
        layer: the hidden state that gives the token vectors: 0 is the embeddings' output, -1
            the last layer's; or a list of such, which stand side by side. The pooled vector is
            always the last layer's.
        document_prompt, query_prompt: what is put around an item or a query, which takes the
            place of `{content}`.
        mask_composed: of a query of a text and a picture, whether the picture's tokens are
            dropped (SMART, appendix B). The others have seen them.
        bidirectional: whether all tokens see each other.
        max_frames: of a video.
    """

    layer: Layers = -1
    document_prompt: Prompt = DOCUMENT_PROMPT
    query_prompt: Prompt = QUERY_PROMPT
    mask_composed: bool = True
    bidirectional: bool = False
    max_frames: int = Field(64, ge=1)


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
        return layers_of(cls.settings(spec).get_text_config(), STATISTICS)

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
            self._read_by.composed(text, opened(data))
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
            states_BLD = states_of(output.hidden_states, self.spec.layer)
        position = torch.arange(mask_BL.shape[1], device=mask_BL.device)
        pooled_BD = last_BLD[torch.arange(len(last_BLD)), (mask_BL * position).argmax(dim=1)]
        # Of what has no other token; else this position may be one of another layer.
        alone_BL1 = is_pooled_BL.unsqueeze(2)
        alone_B1D = pooled_BD.unsqueeze(1).repeat(1, 1, self.num_states)
        return torch.where(alone_BL1, alone_B1D.to(states_BLD.dtype), states_BLD), pooled_BD

    def run(self, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
        """The model's output."""
        return run(self.model, inputs, **options)


def load_backbone(
    spec: CheckpointSpec,
    device_map: str | None,
    models: Mapping[str, type[PreTrainedModel]] = MODELS,
) -> PreTrainedModel:
    """The model of states of a checkpoint, whichever of the two it was saved from.

    Raises:
        SpecError: the weights cannot be loaded, or some are missing.
    """
    # Names have changed over the versions: only the whole model knows all of its own, and adapters
    # are trained around it. The layer for the next word is not used.
    whole = models[check_checkpoint(spec, *models).model_type]
    model = load_model(spec, whole, device_map, may_lack=("lm_head.",)).model
    if device_map:  # as the whole has it, the output comes to the device of the input
        from accelerate.hooks import AlignDevicesHook, add_hook_to_module

        add_hook_to_module(model, AlignDevicesHook(io_same_device=True))
    return model


def run(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
    """The output of a model of states, its positions counted from the first real token.

    They are always given: left to itself the model counts a batch of texts from its padding.
    """
    grids = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    positions, _ = model.get_rope_index(
        inputs["input_ids"],
        mm_token_type_ids=inputs.pop("mm_token_type_ids"),
        attention_mask=inputs["attention_mask"],
        **{name: inputs[name] for name in grids if name in inputs},
    )
    inputs.pop("second_per_grid_ts", None)  # which has no other use
    return model(**inputs, position_ids=positions, use_cache=False, **options)


class QwenReader(Reader):
    """Writes sequences of texts, pictures and videos, without the parts that need torchvision."""

    #: The tokens around pictures, and those in their places by name and by the field that has them.
    VISION_ENDS: ClassVar[tuple[str, str]] = ("<|vision_start|>", "<|vision_end|>")
    PADS: ClassVar[dict[str, str]] = {
        "<|image_pad|>": "image_token_id",
        "<|video_pad|>": "video_token_id",
    }

    def __init__(self, spec: QwenSpec, settings: PretrainedConfig):
        super().__init__(spec)
        bounds = {"min_pixels": spec.min_pixels, "max_pixels": spec.max_pixels}
        given = {name: value for name, value in bounds.items() if value is not None}
        self.images = load_processor(spec, Qwen2VLImageProcessorPil, **given)
        check_patches(spec, self.images, settings.vision_config)
        self.tokenizer = load_processor(spec, AutoTokenizer)
        self.settings = settings
        self.limit = min(spec.max_item_tokens, settings.get_text_config().max_position_embeddings)
        whole, plain = (
            self.tokenizer("a", add_special_tokens=both)["input_ids"] for both in (True, False)
        )
        #: What the tokenizer by itself puts behind a text.
        self.ending = whole[whole.index(plain[-1]) + 1 :]
        names = self._marker_ids = self.tokenizer.get_added_vocab()
        self.vision_ends = self.ids_of(self.VISION_ENDS)
        self.ids_of(self.PADS)
        if not self.tokenizer.is_fast:
            legal = "a model with a fast tokenizer (one that gives character offsets)"
            raise SpecError("model", spec.model, legal, "has none")
        pads = {getattr(settings, field) for field in self.PADS.values()}
        bounds = {names[name] for name in BOUNDARIES if name in names}
        self.special = ({*self.tokenizer.all_special_ids} | bounds) - pads
        self._markers = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))

    def ids_of(self, names: Iterable[str]) -> list[int]:
        """The numbers of added tokens.

        Raises:
            SpecError: the tokenizer has no such token.
        """
        if missing := [name for name in names if name not in self._marker_ids]:
            legal = "a checkpoint with the tokenizer of a model of this family"
            raise SpecError("model", self.spec.model, legal, f"has no token {missing[0]}")
        return [self._marker_ids[name] for name in names]

    def content_of(self, item: Mapping[str, Any]) -> tuple[list[Shown], str]:
        """The pictures and the text of an item that are read, as `documents` of the spec says."""
        documents = self.spec.documents
        shown = [] if documents == "text" else pictures_of(item)
        text = (item.get("text") or "") if documents in ("text", "both") or not shown else ""
        return shown, text if text.strip() else ""

    def pieces(self, template: str) -> Iterable[int | str]:
        """The parts of a prompt: the numbers of its special tokens, and the text between them."""
        start = 0
        for found in self._markers.finditer(template):
            if found.start() > start:
                yield template[start : found.start()]
            yield self._marker_ids[found.group()]
            start = found.end()
        if start < len(template):
            yield template[start:]

    def grid(self, picture: Image.Image) -> tuple[int, int]:
        """Rows and columns of tokens that a picture becomes.

        Raises:
            Unreadable: it is too long and narrow.
        """
        factor = self.images.patch_size * self.images.merge_size
        size = self.images.size
        try:
            height, width = smart_resize(
                picture.height, picture.width, factor, size["shortest_edge"], size["longest_edge"]
            )
        except ValueError as error:
            raise Unreadable("picture not legal for the model", str(error)) from None
        return height // factor, width // factor

    def write(
        self,
        prompt: str,
        text: str = "",
        images: Sequence[Shown] = (),
        video: Sequence[Sequence[Shown]] = (),
    ) -> Sequenced:
        """The sequence of a prompt with pictures, a video and a text in it.

        Args:
            prompt: with `{content}` in it.
            video: its frames, those together that make one grid.
        """
        before, after = prompt.split(CONTENT)
        writer = Sequenced(self)
        writer.prompt(before)
        for picture, start, stop in images:
            cells = raster(*self.grid(picture), (start, stop))
            writer.vision(self.settings.image_token_id, OF_IMAGES, cells)
        grids = [raster(*self.grid(own[0][0]), (own[0][1], own[-1][2])) for own in video]
        if self.settings.model_type == "qwen3_vl":  # says when each grid is seen
            for own, cells in zip(video, grids, strict=True):
                seconds = (own[0][1] + own[-1][1]) / 2 - video[0][0][1]
                writer.plain(f"<{seconds:.1f} seconds>")
                writer.vision(self.settings.video_token_id, OF_VIDEOS, cells)
        elif grids:
            writer.vision(self.settings.video_token_id, OF_VIDEOS, torch.cat(grids))
        writer.plain(text, is_own=True)
        writer.prompt(after)
        writer.end()
        return writer

    def fitting(self, most: int, write: Callable[[int], Sequenced]) -> tuple[int, Sequenced]:
        """The largest number up to `most` of whatever is written so that all of it fits.

        Raises:
            Unreadable: not even one fits.
        """
        written = write(most)
        if len(written.ids) <= self.limit:
            return most, written
        numbers = range(1, most)
        number = bisect.bisect_right(numbers, self.limit, key=lambda n: len(write(n).ids))
        if not number:
            detail = f"{len(write(1).ids)} tokens, at most {self.limit}"
            raise Unreadable("too many tokens", detail)
        return number, write(number)

    def named(self, read: ModelInput, text: str = "") -> tuple[ModelInput, list[str]]:
        """A query, and what its tokens are called: those of the text by its own characters."""
        names = names_of(self.tokenizer, read)
        for number, (start, stop) in enumerate(read.spans[read.keep].tolist()):
            if start >= 0:
                names[number] = text[start:stop]
        return read, names

    def pixels_of(self, images: Sequence[Shown]) -> dict[str, torch.Tensor]:
        """What the vision tower reads of pictures, each its own grid."""
        if not images:
            return {}
        read = self.images([picture for picture, _, _ in images], return_tensors="pt")
        return {name: read[name] for name in ("pixel_values", "image_grid_thw")}

    def pixels_of_video(self, video: Sequence[Sequence[Shown]]) -> dict[str, torch.Tensor]:
        """What the vision tower reads of a video.

        A patch holds the same place in two frames, one behind the other; that of a picture holds
        it twice. So the patches of a pair are halves of those of its pictures.
        """
        depth, size = self.images.temporal_patch_size, self.images.patch_size
        # A last grid that is not full repeats its last frame.
        full = [[*own, *[own[-1]] * (depth - len(own))] for own in video]
        read = self.pixels_of([shown for own in full for shown in own])
        patches = read["pixel_values"].view(len(video), depth, -1, 3, depth, size * size)
        halves = [patches[:, half, :, :, half] for half in range(depth)]
        _, rows, columns = read["image_grid_thw"][0].tolist()
        media = {
            "pixel_values_videos": torch.stack(halves, dim=3).flatten(2).flatten(0, 1),
            "video_grid_thw": torch.tensor([[len(video), rows, columns]]),
        }
        if self.settings.model_type == "qwen2_5_vl":  # counts positions in time by it
            starts = [start for own in video for _, start, _ in own]
            apart = (starts[-1] - starts[0]) / max(1, len(starts) - 1)
            media["second_per_grid_ts"] = torch.tensor([apart * depth], dtype=torch.float32)
        return media


class Sequenced:
    """A sequence while it is written, from its first token to its last.

    Attributes:
        ids, kinds, types, spans: of its tokens; `types` are `mm_token_type_ids`.
        cells: where pictures start, and the extents of their tokens.
    """

    def __init__(self, reader: QwenReader):
        self._reader = reader
        self._run: list[str] = []  # text between two special tokens, which is tokenised as one
        self._own = (0, 0)  # the part of it that is the item's own
        self.ids: list[int] = []
        self.kinds: list[int] = []
        self.types: list[int] = []
        self.spans: list[tuple[int, int]] = []
        self.cells: list[tuple[int, torch.Tensor]] = []

    def prompt(self, template: str) -> None:
        """Writes a part of a prompt."""
        for piece in self._reader.pieces(template):
            if isinstance(piece, str):
                self.plain(piece)
            else:
                self.flush()
                self._add([piece], SPECIAL if piece in self._reader.special else PROMPT)

    def plain(self, text: str, is_own: bool = False) -> None:
        """Writes text in which nothing is special."""
        if is_own:
            start = sum(map(len, self._run))
            self._own = (start, start + len(text))
        self._run.append(text)

    def vision(self, pad: int, type: int, cells: torch.Tensor) -> None:
        """Writes the tokens of a picture or a video, `pad` for each cell, and their boundaries."""
        self.flush()
        start, end = self._reader.vision_ends
        self._add([start], SPECIAL)
        self.cells.append((len(self.ids), cells))
        self._add([pad] * len(cells), VISUAL, type)
        self._add([end], SPECIAL)

    def end(self) -> None:
        """Writes the tokenizer's own ending, unless the prompt did."""
        self.flush()
        ending = self._reader.ending
        if self.ids[len(self.ids) - len(ending) :] != ending:
            self._add(ending, SPECIAL)

    def flush(self) -> None:
        """Turns the text since the last special token into tokens."""
        text, (first, last) = "".join(self._run), self._own
        self._run, self._own = [], (0, 0)
        if not text:
            return
        read = self._reader.tokenizer(
            text,
            add_special_tokens=False,
            split_special_tokens=True,
            return_offsets_mapping=True,
            verbose=False,  # of what is too long the reader says so
        )
        for number, (start, stop) in zip(read["input_ids"], read["offset_mapping"], strict=True):
            if start < last and stop > first:
                span = (max(start, first) - first, min(stop, last) - first)
                self._add([number], TEXT, span=span)
            else:
                self._add([number], PROMPT)

    def _add(
        self,
        ids: list[int],
        kind: int,
        type: int = OF_TEXT,
        span: tuple[int, int] = (-1, -1),
    ) -> None:
        self.ids += ids
        self.kinds += [kind] * len(ids)
        self.types += [type] * len(ids)
        self.spans += [span] * len(ids)

    def columns(self) -> dict[str, torch.Tensor]:
        """What the model reads of each position."""
        return {
            "input_ids": torch.tensor(self.ids),
            "mm_token_type_ids": torch.tensor(self.types),
        }

    def read(
        self,
        media: dict[str, torch.Tensor],
        keep: torch.Tensor | None = None,
        kind: torch.Tensor | None = None,
        **sequence: torch.Tensor,
    ) -> ModelInput:
        """What the model reads."""
        extents = torch.full((len(self.ids), 6), torch.nan)
        for start, cells in self.cells:
            extents[start : start + len(cells)] = cells
        return ModelInput.of(
            {**self.columns(), **sequence},
            media,
            torch.tensor(self.kinds) if kind is None else kind,
            keep=keep,
            extents=extents,
            spans=torch.tensor(self.spans),
        )


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

        def write(number: int) -> Sequenced:
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
        self, written: Sequenced, media: dict[str, torch.Tensor], is_composed: bool
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
