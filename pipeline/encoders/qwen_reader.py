"""Sequences of texts, images and videos for the Qwen models."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from PIL import Image
from transformers import AutoTokenizer, PretrainedConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from pipeline.config import SpecError
from pipeline.decoding import Unreadable
from pipeline.encoders.images import grid_extents, item_images
from pipeline.encoders.loading import check_patches, load_processor
from pipeline.encoders.model_inputs import ModelInput
from pipeline.encoders.qwen_spec import CONTENT, QwenSpecT
from pipeline.encoders.reader import Reader
from pipeline.encoders.tokenizing import token_names
from pipeline.tokens import PROMPT, SPECIAL, TEXT, VISUAL

#: Special tokens, whether or not a tokenizer lists them as such; SMART's code drops them.
BOUNDARIES = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>"),
    *("<|vision_bos|>", "<|vision_eos|>", "<|audio_bos|>", "<|audio_eos|>"),  # of Qwen2.5-Omni
)

#: Codes of `mm_token_type_ids`.
OF_TEXT, OF_IMAGES, OF_VIDEOS = range(3)

#: An image with the start and end of its display, in seconds.
Shown = tuple[Image.Image, float, float]


class QwenReader(Reader[QwenSpecT]):
    """Builds sequences of texts, images and videos, without the parts that need torchvision."""

    #: Tokens around images, and placeholder tokens with the setting that holds their id.
    VISION_ENDS: ClassVar[tuple[str, str]] = ("<|vision_start|>", "<|vision_end|>")
    PADS: ClassVar[dict[str, str]] = {
        "<|image_pad|>": "image_token_id",
        "<|video_pad|>": "video_token_id",
    }

    def __init__(self, spec: QwenSpecT, settings: PretrainedConfig):
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
        #: Token ids that the tokenizer appends to every text.
        self.ending = whole[whole.index(plain[-1]) + 1 :]
        names = self._marker_ids = self.tokenizer.get_added_vocab()
        self.vision_ends = self.ids_of(self.VISION_ENDS)
        self.ids_of(self.PADS)
        if not self.tokenizer.is_fast:
            rule = "a model with a fast tokenizer (one that gives character offsets)"
            raise SpecError("model", spec.model, rule, "has none")
        pads = {getattr(settings, field) for field in self.PADS.values()}
        boundaries = {names[name] for name in BOUNDARIES if name in names}
        self.special = ({*self.tokenizer.all_special_ids} | boundaries) - pads
        self._markers = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))

    def ids_of(self, names: Iterable[str]) -> list[int]:
        """Returns the ids of added tokens.

        Raises:
            SpecError: The tokenizer has no such token.
        """
        if missing := [name for name in names if name not in self._marker_ids]:
            rule = "a checkpoint with the tokenizer of this model family"
            raise SpecError("model", self.spec.model, rule, f"has no token {missing[0]}")
        return [self._marker_ids[name] for name in names]

    def content_of(self, item: Mapping[str, Any]) -> tuple[list[Shown], str]:
        """The pictures and the text of an item that are read, as `documents` of the spec says."""
        documents = self.spec.documents
        shown = [] if documents == "text" else item_images(item)
        text = (item.get("text") or "") if documents in ("text", "both") or not shown else ""
        return shown, text if text.strip() else ""

    def pieces(self, template: str) -> Iterable[int | str]:
        """Yields the parts of a prompt: the ids of its special tokens and the text between them."""
        start = 0
        for found in self._markers.finditer(template):
            if found.start() > start:
                yield template[start : found.start()]
            yield self._marker_ids[found.group()]
            start = found.end()
        if start < len(template):
            yield template[start:]

    def grid(self, picture: Image.Image) -> tuple[int, int]:
        """Returns the rows and columns of tokens of an image.

        Raises:
            Unreadable: The image is too long and narrow.
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
    ) -> SequenceWriter:
        """Builds the sequence of a prompt with images, a video and a text in it.

        Args:
            prompt: A text that contains `{content}`.
            text: Text of the content.
            images: Images of the content.
            video: Frames of a video, grouped by the grid that they form.
        """
        before, after = prompt.split(CONTENT)
        writer = SequenceWriter(self)
        writer.prompt(before)
        for picture, start, stop in images:
            cells = grid_extents(*self.grid(picture), (start, stop))
            writer.vision(self.settings.image_token_id, OF_IMAGES, cells)
        grids = [grid_extents(*self.grid(own[0][0]), (own[0][1], own[-1][2])) for own in video]
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

    def fitting(
        self, most: int, write: Callable[[int], SequenceWriter]
    ) -> tuple[int, SequenceWriter]:
        """Finds the largest number up to `most` for which the sequence does not exceed the limit.

        Raises:
            Unreadable: Even the sequence of one exceeds the limit.
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
        """Returns a query with the names of its tokens: text tokens by their own characters."""
        names = token_names(self.tokenizer, read)
        for number, (start, stop) in enumerate(read.spans[read.keep].tolist()):
            if start >= 0:
                names[number] = text[start:stop]
        return read, names

    def pixels_of(self, images: Sequence[Shown]) -> dict[str, torch.Tensor]:
        """Returns the inputs of the vision tower for images, each its own grid."""
        if not images:
            return {}
        read = self.images([picture for picture, _, _ in images], return_tensors="pt")
        return {name: read[name] for name in ("pixel_values", "image_grid_thw")}

    def pixels_of_video(self, video: Sequence[Sequence[Shown]]) -> dict[str, torch.Tensor]:
        """Returns the inputs of the vision tower for a video.

        A patch holds the same location in two consecutive frames; that of an image holds it twice.
        The patches of a pair of frames are therefore halves of those of the two images.
        """
        depth, size = self.images.temporal_patch_size, self.images.patch_size
        # An incomplete last grid repeats its last frame.
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


class SequenceWriter:
    """Builder of a sequence, from its first token to its last.

    Attributes:
        ids, kinds, types, spans: Values of its tokens; `types` are `mm_token_type_ids`.
        cells: Start of each image, and the extents of its tokens.
    """

    def __init__(self, reader: QwenReader):
        self._reader = reader
        self._run: list[str] = []  # text between two special tokens, tokenised as one
        self._own = (0, 0)  # its part that is the item's own text
        self.ids: list[int] = []
        self.kinds: list[int] = []
        self.types: list[int] = []
        self.spans: list[tuple[int, int]] = []
        self.cells: list[tuple[int, torch.Tensor]] = []

    def prompt(self, template: str) -> None:
        """Appends a part of a prompt."""
        for piece in self._reader.pieces(template):
            if isinstance(piece, str):
                self.plain(piece)
            else:
                self.flush()
                self._add([piece], SPECIAL if piece in self._reader.special else PROMPT)

    def plain(self, text: str, is_own: bool = False) -> None:
        """Appends text without special tokens."""
        if is_own:
            start = sum(map(len, self._run))
            self._own = (start, start + len(text))
        self._run.append(text)

    def vision(self, pad: int, type: int, cells: torch.Tensor) -> None:
        """Appends the tokens of an image or a video, `pad` for each cell, and their boundaries."""
        self.flush()
        start, end = self._reader.vision_ends
        self._add([start], SPECIAL)
        self.cells.append((len(self.ids), cells))
        self._add([pad] * len(cells), VISUAL, type)
        self._add([end], SPECIAL)

    def end(self) -> None:
        """Appends the tokenizer's own ending, unless the prompt contains it."""
        self.flush()
        ending = self._reader.ending
        if self.ids[len(self.ids) - len(ending) :] != ending:
            self._add(ending, SPECIAL)

    def flush(self) -> None:
        """Tokenises the text since the last special token."""
        text, (first, last) = "".join(self._run), self._own
        self._run, self._own = [], (0, 0)
        if not text:
            return
        read = self._reader.tokenizer(
            text,
            add_special_tokens=False,
            split_special_tokens=True,
            return_offsets_mapping=True,
            verbose=False,  # the reader reports texts that are too long
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
        """Returns the model's inputs of each position."""
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
        """Returns the finished sequence."""
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
