"""Preprocessing of texts, images and videos for the Qwen models."""

from __future__ import annotations

import bisect
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from PIL import Image
from transformers import AutoTokenizer, PretrainedConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from pipeline.config import SpecError, reading
from pipeline.data.decode import Unreadable
from pipeline.encoders.images import grid_extents, item_images
from pipeline.encoders.loading import (
    SETTINGS,
    CheckpointSpec,
    check_patches,
    check_tokenizer,
    load_json,
    load_processor,
    processor_folder,
)
from pipeline.encoders.model_inputs import ModelInput
from pipeline.encoders.qwen_spec import CONTENT, Preprocessing, QwenSpecT
from pipeline.encoders.reader import Reader
from pipeline.encoders.tokenizing import TOKENIZER_LOCK, token_names
from pipeline.tokens import PROMPT, SPECIAL, TEXT, VISUAL

#: Tokens treated as special even if a tokenizer does not list them. SMART's code drops them.
BOUNDARIES = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>"),
    *("<|vision_bos|>", "<|vision_eos|>", "<|audio_bos|>", "<|audio_eos|>"),  # Qwen2.5-Omni
)

#: Codes of `mm_token_type_ids`.
TEXT_TYPE, IMAGE_TYPE, VIDEO_TYPE = range(3)

#: An image with the start and end of its display, in seconds.
TimedImage = tuple[Image.Image, float, float]


class SequenceWriter:
    """Builder of a sequence, from its first token to its last.

    Attributes:
        ids, kinds, types, spans: Values per token. `types` are `mm_token_type_ids`.
        extents: Start index of each image, and the extents of its tokens.
    """

    def __init__(self, reader: QwenReader):
        self._reader = reader
        self._pending: list[str] = []  # text since the last special token, tokenised as a whole
        self._content = (0, 0)  # range of the item's text within the pending text
        self.ids: list[int] = []
        self.kinds: list[int] = []
        self.types: list[int] = []
        self.spans: list[tuple[int, int]] = []
        self.extents: list[tuple[int, torch.Tensor]] = []

    def add_prompt(self, template: str) -> None:
        """Appends a part of a prompt."""
        for piece in self._reader.split_prompt(template):
            if isinstance(piece, str):
                self.add_text(piece)
            else:
                self.flush()
                self.add_ids([piece], SPECIAL if piece in self._reader.special else PROMPT)

    def add_text(self, text: str, is_content: bool = False) -> None:
        """Appends text without special tokens. Only tokens of content have spans."""
        if is_content:
            start = sum(map(len, self._pending))
            self._content = (start, start + len(text))
        self._pending.append(text)

    def add_vision(self, pad: int, type: int, extents: torch.Tensor) -> None:
        """Appends the tokens of an image or a video between their boundaries.

        `pad` is repeated per row of `extents` (n, 6), and `type` is a code of `mm_token_type_ids`.
        """
        self.flush()
        boundaries = self._reader.vision_boundaries
        self.add_ids(boundaries[:1], SPECIAL)
        self.extents.append((len(self.ids), extents))
        self.add_ids([pad] * len(extents), VISUAL, type)
        self.add_ids(boundaries[1:], SPECIAL)

    def finish(self) -> None:
        """Appends the tokens that the tokenizer adds to every text, unless already present."""
        self.flush()
        suffix_ids = self._reader.suffix_ids
        if self.ids[len(self.ids) - len(suffix_ids) :] != suffix_ids:
            self.add_ids(suffix_ids, SPECIAL)

    def flush(self) -> None:
        """Tokenises the text since the last special token."""
        text, (first, last) = "".join(self._pending), self._content
        self._pending, self._content = [], (0, 0)
        if not text:
            return
        with TOKENIZER_LOCK:
            encoded = self._reader.tokenizer(
                text,
                add_special_tokens=False,
                split_special_tokens=True,
                return_offsets_mapping=True,
                verbose=False,  # the reader reports texts that are too long
            )
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        for token_id, (start, stop) in zip(ids, offsets, strict=True):
            if start < last and stop > first:
                span = (max(start, first) - first, min(stop, last) - first)
                self.add_ids([token_id], TEXT, span=span)
            else:
                self.add_ids([token_id], PROMPT)

    def add_ids(
        self,
        ids: list[int],
        kind: int,
        type: int = TEXT_TYPE,
        span: tuple[int, int] = (-1, -1),
    ) -> None:
        """Appends tokens of a kind and a type by their ids."""
        self.ids += ids
        self.kinds += [kind] * len(ids)
        self.types += [type] * len(ids)
        self.spans += [span] * len(ids)

    def position_inputs(self) -> dict[str, torch.Tensor]:
        """Returns the model inputs per position."""
        return {
            "input_ids": torch.tensor(self.ids),
            "mm_token_type_ids": torch.tensor(self.types),
        }

    def build(
        self,
        media: dict[str, torch.Tensor],
        keep: torch.Tensor | None = None,
        kind: torch.Tensor | None = None,
        **sequence: torch.Tensor,
    ) -> ModelInput:
        """Returns the finished sequence.

        By default all positions become tokens, of the kinds of the builder. `sequence` has
        additional model inputs per position.
        """
        extents = torch.full((len(self.ids), 6), torch.nan)
        for start, values in self.extents:
            extents[start : start + len(values)] = values
        return ModelInput.create(
            {**self.position_inputs(), **sequence},
            media,
            torch.tensor(self.kinds) if kind is None else kind,
            keep=keep,
            extents=extents,
            spans=torch.tensor(self.spans),
        )


class QwenReader(Reader[QwenSpecT]):
    """Reader of texts, images and videos that needs no torchvision.

    Attributes:
        VISION_BOUNDARIES: Boundary tokens of images and videos.
        PADS: Placeholder tokens, with the configuration field that holds their id.
        preprocessing: Library whose steps on images and videos are reproduced.
        writer_class: Class of the builder of sequences.
    """

    preprocessing: Preprocessing = "transformers"
    writer_class: ClassVar[type[SequenceWriter]] = SequenceWriter

    VISION_BOUNDARIES: ClassVar[tuple[str, str]] = ("<|vision_start|>", "<|vision_end|>")
    PADS: ClassVar[dict[str, str]] = {
        "<|image_pad|>": "image_token_id",
        "<|video_pad|>": "video_token_id",
    }

    def __init__(self, spec: QwenSpecT, settings: PretrainedConfig):
        super().__init__(spec)
        vision = settings.vision_config
        self._factor = vision.patch_size * vision.spatial_merge_size  # pixels per token
        limits = {"min_pixels": spec.min_pixels, "max_pixels": spec.max_pixels}
        options = {name: value for name, value in limits.items() if value is not None}
        if self.preprocessing == "gme":
            options = {
                "min_pixels": 256 * self._factor**2,
                "max_pixels": 1280 * self._factor**2,
            } | options
        self.images = load_processor(spec, Qwen2VLImageProcessorPil, **options)
        check_patches(spec, self.images, vision)
        #: Settings of the checkpoint's video processor, unless those of images apply.
        self.video: VideoSettings | None = None
        if self.preprocessing != "qwen3_vl_embedding":  # whose code has its own
            self.video = read_video_settings(spec)
        self.tokenizer = load_processor(spec, AutoTokenizer)
        self.settings = settings
        self.limit = min(spec.max_item_tokens, settings.get_text_config().max_position_embeddings)
        whole, plain = (
            self.tokenizer("a", add_special_tokens=both)["input_ids"] for both in (True, False)
        )
        #: Token ids that the tokenizer appends to every text.
        self.suffix_ids = whole[whole.index(plain[-1]) + 1 :]
        names = self._marker_ids = self.tokenizer.get_added_vocab()
        has_boundaries = self.preprocessing != "vlm2vec"
        self.vision_boundaries = self.token_ids(self.VISION_BOUNDARIES) if has_boundaries else []
        self.token_ids(self.PADS)
        check_tokenizer(spec.model, self.tokenizer)
        pads = {getattr(settings, field) for field in self.PADS.values()}
        boundaries = {names[name] for name in BOUNDARIES if name in names}
        self.special = ({*self.tokenizer.all_special_ids} | boundaries) - pads
        self._markers = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))

    def save(self, folder: Path) -> None:
        """Copies the preprocessing files of the checkpoint to those of a trained model.

        Images and audio share a file, which their processors would overwrite.
        """
        source = processor_folder(self.spec)
        of_model = ("config.json", "model.safetensors.index.json")
        for path in (path for pattern in SETTINGS for path in source.glob(pattern)):
            if path.name not in of_model:
                shutil.copyfile(path, folder / path.name)

    def token_ids(self, names: Iterable[str]) -> list[int]:
        """Returns the ids of added tokens."""
        if missing := [name for name in names if name not in self._marker_ids]:
            rule = "a checkpoint with the tokenizer of this model family"
            raise SpecError("model", self.spec.model, rule, f"has no token {missing[0]}")
        return [self._marker_ids[name] for name in names]

    def item_content(self, item: Mapping[str, Any]) -> tuple[list[TimedImage], str]:
        """Returns the images and the text of an item that `documents` of the spec selects."""
        documents = self.spec.documents
        images = [] if documents == "text" else item_images(item)
        text = (item.get("text") or "") if documents in ("text", "both") or not images else ""
        return images, text if text.strip() else ""

    def split_prompt(self, template: str) -> Iterable[int | str]:
        """Splits a prompt into the ids of its special tokens and the texts between them."""
        start = 0
        for found in self._markers.finditer(template):
            if found.start() > start:
                yield template[start : found.start()]
            yield self._marker_ids[found.group()]
            start = found.end()
        if start < len(template):
            yield template[start:]

    def video_limits(self, num_frames: int) -> tuple[float, float]:
        """Returns the minimum and maximum number of pixels of each frame of a video."""
        if self.preprocessing == "qwen3_vl_embedding":
            # 128 to 768 tokens per pair of frames, and ten times the latter per video.
            token = self._factor**2
            low = 128 * token
            high = max(min(768 * token, 7680 * token / num_frames * 2), int(low * 1.05))
            high = min(high, self.spec.max_pixels or high)
        else:  # those of Qwen3-VL are for the whole video
            share = num_frames if self.settings.model_type == "qwen3_vl" else 1
            images = self.images.size
            low, high = images["shortest_edge"], images["longest_edge"]
            if self.video:
                low, high = self.video.min_pixels / share, self.video.max_pixels / share
            low, high = self.spec.min_pixels or low, self.spec.max_pixels or high
        return min(low, high), high

    def sizes(self, image: Image.Image, num_frames: int | None = None) -> list[tuple[int, int]]:
        """Returns the heights and widths to which an image is resized, one after another.

        `num_frames` is the number of frames of its video, or None for an image.
        """
        token = self._factor**2
        sizes = [(image.height, image.width)]
        steps: list[tuple[Any, ...]] = []  # limits of pixels need not be whole numbers
        if num_frames is None:
            if self.preprocessing == "gme":
                steps = [(self._factor, 4 * token, 16384 * token)]
            if self.preprocessing == "vlm2vec" and min(image.size) < self._factor:
                sizes.append((2 * self._factor, 2 * self._factor))
            limits = self.images.size
            steps.append((self._factor, limits["shortest_edge"], limits["longest_edge"]))
        else:
            if self.preprocessing == "qwen3_vl_embedding":
                steps = [(2 * self._factor, 16 * token, 65536 * token)]
            steps.append((self._factor, *self.video_limits(num_frames)))
        try:
            for step in steps:
                sizes.append(smart_resize(*sizes[-1], *step))
        except ValueError as error:
            raise Unreadable("image not supported by the model", str(error)) from None
        return sizes[1:]

    def grid(self, image: Image.Image, num_frames: int | None = None) -> tuple[int, int]:
        """Returns the number of rows and columns of tokens of an image or a frame of a video."""
        height, width = self.sizes(image, num_frames)[-1]
        return height // self._factor, width // self._factor

    def write(self, prompt: str, text: str = "", **media: Any) -> SequenceWriter:
        """Builds the sequence of a prompt, whose `{content}` are media and a text."""
        before, after = prompt.split(CONTENT)
        writer = self.writer_class(self)
        writer.add_prompt(before)
        self.write_media(writer, **media)
        writer.add_text(text, is_content=True)
        writer.add_prompt(after)
        writer.finish()
        return writer

    def write_media(
        self,
        writer: Any,
        images: Sequence[TimedImage] = (),
        video: Sequence[Sequence[TimedImage]] = (),
    ) -> None:
        """Appends images and a video, whose frames are grouped by temporal patch."""
        for image, start, stop in images:
            extents = grid_extents(*self.grid(image), (start, stop))
            writer.add_vision(self.settings.image_token_id, IMAGE_TYPE, extents)
        num_frames = len(video) * self.images.temporal_patch_size
        grids = [
            grid_extents(*self.grid(frames[0][0], num_frames), (frames[0][1], frames[-1][2]))
            for frames in video
        ]
        if self.settings.model_type == "qwen3_vl":  # a timestamp precedes each grid
            for frames, extents in zip(video, grids, strict=True):
                seconds = (frames[0][1] + frames[-1][1]) / 2 - video[0][0][1]
                writer.add_text(f"<{seconds:.1f} seconds>")
                writer.add_vision(self.settings.video_token_id, VIDEO_TYPE, extents)
        elif grids:
            writer.add_vision(self.settings.video_token_id, VIDEO_TYPE, torch.cat(grids))

    def fit_to_limit(
        self, maximum: int, write: Callable[[int], SequenceWriter]
    ) -> tuple[int, SequenceWriter]:
        """Finds the largest number up to `maximum` whose sequence does not exceed the token limit.

        Returns it and the sequence that `write` builds for it, whose length grows with the number.

        Raises:
            Unreadable: Even the sequence for 1 exceeds the limit.
        """
        writer = write(maximum)
        if len(writer.ids) <= self.limit:
            return maximum, writer
        numbers = range(1, maximum)
        number = bisect.bisect_right(numbers, self.limit, key=lambda n: len(write(n).ids))
        if not number:
            detail = f"{len(write(1).ids)} tokens, at most {self.limit}"
            raise Unreadable("too many tokens", detail)
        return number, write(number)

    def with_token_names(self, inputs: ModelInput, text: str = "") -> tuple[ModelInput, list[str]]:
        """Returns a query with the names of its tokens. Text tokens are named by their text."""
        names = token_names(self.tokenizer, inputs)
        for number, (start, stop) in enumerate(inputs.spans[inputs.keep].tolist()):
            if start >= 0:
                names[number] = text[start:stop]
        return inputs, names

    def image_inputs(
        self, images: Sequence[TimedImage], num_frames: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Returns the inputs of the vision tower for images, one grid per image.

        `num_frames` is the number of frames of the video that they belong to.
        """
        if not images:
            return {}
        resized = []
        for image, _, _ in images:
            for height, width in self.sizes(image, num_frames):
                image = image.resize((width, height), self.images.resample)
            resized.append(image)
        output = self.images(resized, do_resize=False, return_tensors="pt")
        return {name: output[name] for name in ("pixel_values", "image_grid_thw")}

    def video_inputs(self, video: Sequence[Sequence[TimedImage]]) -> dict[str, torch.Tensor]:
        """Returns the inputs of the vision tower for a video.

        A patch covers the same location in two consecutive frames. A patch of an image contains the
        image twice. The patches of a pair of frames are therefore halves of those of the two
        images.
        """
        depth, size = self.images.temporal_patch_size, self.images.patch_size
        # An incomplete last grid repeats its last frame.
        grids = [[*frames, *[frames[-1]] * (depth - len(frames))] for frames in video]
        frames = [frame for frames in grids for frame in frames]
        inputs = self.image_inputs(frames, len(frames))
        patches = inputs["pixel_values"].view(len(video), depth, -1, 3, depth, size * size)
        halves = [patches[:, half, :, :, half] for half in range(depth)]
        _, rows, columns = inputs["image_grid_thw"][0].tolist()
        media = {
            "pixel_values_videos": torch.stack(halves, dim=3).flatten(2).flatten(0, 1),
            "video_grid_thw": torch.tensor([[len(video), rows, columns]]),
        }
        if self.settings.model_type == "qwen2_5_vl":  # scales the positions in time
            starts = [start for frames in video for _, start, _ in frames]
            interval = (starts[-1] - starts[0]) / max(1, len(starts) - 1)
            media["second_per_grid_ts"] = torch.tensor([interval * depth], dtype=torch.float32)
        return media


class VideoSettings(NamedTuple):
    """Settings of a video processor. The rate of frames per second, if any, is a maximum."""

    min_pixels: float
    max_pixels: float
    fps: float | None
    min_frames: int
    max_frames: int

    def num_frames(self, seconds: float) -> int:
        """Returns the maximum number of frames of a video.

        >>> VideoSettings(0, 0, 2.0, 4, 768).num_frames(10.7)
        20
        """
        number = self.max_frames if self.fps is None else seconds * self.fps
        return int(min(max(number, self.min_frames), self.max_frames) / 2) * 2


def read_video_settings(spec: CheckpointSpec) -> VideoSettings | None:
    """Reads the settings of a checkpoint's video processor, or returns None without a size."""
    folder = processor_folder(spec)
    rule = "a checkpoint with a valid video processor"
    with reading("model", spec.model, rule, AttributeError, KeyError, TypeError, ValueError):
        files = [
            load_json(folder / f"{name}.json", spec.model) or {}
            for name in ("processor_config", "video_preprocessor_config")
        ]
        settings = files[0].get("video_processor") or files[1]
        size = settings.get("size") or {}
        low = settings.get("min_pixels") or size.get("shortest_edge")
        high = settings.get("max_pixels") or size.get("longest_edge")
        if not low or not high:
            return None
        samples = bool(settings.get("do_sample_frames"))  # otherwise the source's frames are read
        fps = settings.get("fps") if samples else None
        least = settings.get("min_frames") or 4
        most = (settings.get("max_frames") or 768) if samples else 2**31
        return VideoSettings(float(low), float(high), fps and float(fps), int(least), int(most))
