"""Embedders on the thinker of Qwen2.5-Omni: pictures, video, sound and text in one sequence.

As in `qwen_vl`, the last token's state is the pooled vector and the states before it are the token
vectors. The frames of a video and its sound lie in one sequence by time: the video's tokens of two
seconds, then those of the same two seconds' sound, and so on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    Qwen2_5OmniThinkerForConditionalGeneration,
    WhisperFeatureExtractor,
)

from pipeline.encoders.images import grid_extents
from pipeline.encoders.loading import check_checkpoint, load_processor
from pipeline.encoders.model_inputs import ModelInput
from pipeline.encoders.qwen_model import load_backbone
from pipeline.encoders.qwen_reader import OF_TEXT, SequenceWriter, Shown
from pipeline.encoders.qwen_spec import CONTENT, StatesSpec
from pipeline.encoders.qwen_states import StatesEncoder, StatesReader
from pipeline.tokens import AUDIO, SPECIAL, VISUAL
from pipeline.transcribe.sound import samples_of

#: The thinker by type, of which the first also has a part that speaks, which is not loaded.
MODELS = dict.fromkeys(
    ("qwen2_5_omni", "qwen2_5_omni_thinker"), Qwen2_5OmniThinkerForConditionalGeneration
)

#: Columns of the spectrogram that become one token: a convolution and a mean halve them each.
COLUMNS = 4


class QwenOmni(StatesEncoder["QwenOmni.Spec"]):
    """Hidden states of the thinker as token vectors, beside its own vector.

    See `StatesEncoder`. A token of sound has the seconds that it stands for, 40 ms,
    and no box.

    Of sound that is longer than `max_audio_seconds` or than the checkpoint's own window (300 s in
    those that were published) the beginning is heard. A video that does not fit is thinned, its
    sound is not; if one pair of frames does not fit beside the sound, it is not readable, nor is
    sound alone that does not fit.
    """

    class Spec(StatesSpec):
        """Which checkpoint, how items and queries are put to it, and what is kept.

        Sound is brought to the rate that the checkpoint's feature extractor is made for, 16 kHz.

        Attributes:
            keep: "paper" drops the token that is pooled alone (SMART, eq. 4); "code" drops special
                tokens, those around pictures and sound among them; "media" is "code" of what is
                text alone, and of all else keeps the tokens of pictures and sound alone.
            documents: what is read of an item: its "media", pictures, video and sound, and the
                text of those that have none; its "text"; or "both" in one sequence, the text last.
            interleave: whether the frames of a video and its sound alternate by time, as the model
                is trained to hear a video's own sound; else the sound is behind the frames.
            max_audio_seconds: what is heard of an item, from its beginning.
        """

        name: Literal["qwen_omni"] = "qwen_omni"
        keep: Literal["code", "paper", "media"] = "code"
        documents: Literal["media", "text", "both"] = "media"
        interleave: bool = True
        max_audio_seconds: float = Field(300.0, gt=0)

    OF_ITEMS = (
        *("documents", "interleave", "document_prompt", "max_frames", "max_audio_seconds"),
        "max_item_tokens",
    )
    nothing = "no picture, no sound and no text"

    @classmethod
    def settings(cls, spec: Spec) -> PretrainedConfig:
        """The settings of the thinker.

        Raises:
            SpecError: the checkpoint is not there, or another.
        """
        settings = check_checkpoint(spec, *MODELS)
        return getattr(settings, "thinker_config", settings)

    @classmethod
    def wants(cls, spec: Spec) -> tuple[str, ...]:
        """What `documents` says; the text of an item needs no work."""
        return ("text",) if spec.documents == "text" else ("text", "image", "frames", "audio")

    @classmethod
    def load(cls, spec: Spec, device_map: str | None) -> PreTrainedModel:
        """The thinker without the layer that would name the next word."""
        return load_backbone(spec, device_map, MODELS)

    @classmethod
    def reader(cls, spec: Spec) -> QwenOmniReader:
        """What reads pictures, videos, sound, texts and queries."""
        return QwenOmniReader(spec, cls.settings(spec))

    def run(self, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
        """The output of the thinker, with the positions that the reader gave."""
        if "columns" in inputs:
            lengths = inputs.pop("num_columns")
            columns = inputs.pop("columns").split(lengths.tolist())
            features = torch.nn.utils.rnn.pad_sequence(list(columns), batch_first=True)
            number = torch.arange(features.shape[1], device=features.device)
            inputs["input_features"] = features.transpose(1, 2)
            inputs["feature_attention_mask"] = (number < lengths.unsqueeze(1)).long()
        positions = inputs.pop("position_ids").permute(2, 0, 1)
        return self.model(**inputs, position_ids=positions, use_cache=False, **options)


@dataclass(frozen=True)
class Sound:
    """What is heard of an item.

    Attributes:
        columns: (F, mel) columns of its spectrogram.
        start, end: seconds of the parent.
        begin: when the item begins; a frame that is shown since before counts from here.
    """

    columns: torch.Tensor
    start: float
    end: float
    begin: float

    @property
    def media(self) -> dict[str, torch.Tensor]:
        """What the audio tower reads."""
        return {"columns": self.columns, "num_columns": torch.tensor([len(self.columns)])}


@dataclass(frozen=True)
class Stretch:
    """Tokens of pictures or of sound.

    Attributes:
        pad: the token that stands in their places.
        kind: a code of `tokens.KINDS`.
        cells: (n, 6) extents.
        places: (n, 3) positions in time, row and column, counted from where it is written.
    """

    pad: int
    kind: int
    cells: torch.Tensor
    places: torch.Tensor

    def chunk(self, is_own: torch.Tensor) -> Stretch:
        """A part of it."""
        return dataclasses.replace(self, cells=self.cells[is_own], places=self.places[is_own])


def num_audio_tokens(num_columns: int) -> int:
    """How many tokens the columns of a spectrogram become, four each.

    >>> [num_audio_tokens(columns) for columns in (2, 3, 4, 6, 7, 100)]
    [0, 1, 1, 1, 2, 25]
    """
    return (num_columns + 1) // 2 // 2


def chunks_of(times: Iterable[int], length: int) -> torch.Tensor:
    """The number of the chunk that each position in time is in.

    As in the model's own processor a token opens one chunk at most, so that of frames that are
    more than a chunk apart the first tokens come early.

    >>> chunks_of([0, 0, 50, 50, 150, 150, 150], 50).tolist()
    [0, 0, 1, 1, 2, 3, 3]
    """
    numbers, number = [], 0
    for time in times:
        number += time >= (number + 1) * length
        numbers.append(number)
    return torch.tensor(numbers)


def grid_places(times: Sequence[int], rows: int, columns: int) -> torch.Tensor:
    """(len(times) * rows * columns, 3) places of the tokens of grids, one behind the other."""
    axes = (torch.tensor(times), torch.arange(rows), torch.arange(columns))
    return torch.cartesian_prod(*axes)


class Timed(SequenceWriter):
    """A sequence with the positions of its tokens in time, row and column."""

    _reader: QwenOmniReader

    def __init__(self, reader: QwenOmniReader):
        super().__init__(reader)
        self._positions: list[torch.Tensor] = []
        self._next = 0

    def alone(self, stretch: Stretch, ends: Sequence[int]) -> None:
        """Writes pictures or sound between their two boundaries."""
        self.flush()
        self._add([ends[0]], SPECIAL)
        self._put(stretch, self._next)
        self._add([ends[1]], SPECIAL)

    def together(self, video: Stretch, sound: Stretch, length: int) -> None:
        """Writes a video and its sound, chunk by chunk of `length` positions in time."""
        self.flush()
        ends = tuple(zip(self._reader.vision_ends, self._reader.audio_ends, strict=True))
        self._at_once(ends[0])
        origin = self._next
        chunks = [chunks_of(part.places[:, 0].tolist(), length) for part in (video, sound)]
        for number in range(int(torch.cat(chunks).max()) + 1):
            for part, own in zip((video, sound), chunks, strict=True):
                if (is_own := own == number).any():
                    self._put(part.chunk(is_own), origin)
        self._at_once(reversed(ends[1]))

    def _at_once(self, ids: Iterable[int]) -> None:
        """Boundaries of a video and of its sound share a position."""
        at = torch.full((1, 3), self._next)
        for number in ids:
            self._add([number], SPECIAL, at=at)

    def _put(self, stretch: Stretch, origin: int) -> None:
        self.cells.append((len(self.ids), stretch.cells))
        ids = [stretch.pad] * len(stretch.cells)
        self._add(ids, stretch.kind, at=stretch.places + origin)

    def _add(
        self,
        ids: list[int],
        kind: int,
        type: int = OF_TEXT,
        span: tuple[int, int] = (-1, -1),
        at: torch.Tensor | None = None,
    ) -> None:
        if not ids:
            return
        super()._add(ids, kind, type, span)
        if at is None:
            at = torch.arange(self._next, self._next + len(ids)).unsqueeze(1).expand(-1, 3)
        self._positions.append(at)
        # Behind what was written last, though a picture before it may reach further: as the model.
        self._next = int(at.max()) + 1

    def columns(self) -> dict[str, torch.Tensor]:
        """What the model reads of each position."""
        return {
            "input_ids": torch.tensor(self.ids),
            "position_ids": torch.cat(self._positions),
        }


class QwenOmniReader(StatesReader["QwenOmni.Spec"]):
    """Items and queries in their prompts, with sound."""

    VISION_ENDS = ("<|vision_bos|>", "<|vision_eos|>")
    AUDIO_ENDS: ClassVar[tuple[str, str]] = ("<|audio_bos|>", "<|audio_eos|>")
    PADS: ClassVar[dict[str, str]] = {
        "<|IMAGE|>": "image_token_id",
        "<|VIDEO|>": "video_token_id",
        "<|AUDIO|>": "audio_token_id",
    }
    MEDIA = (VISUAL, AUDIO)

    def __init__(self, spec: QwenOmni.Spec, settings: PretrainedConfig):
        super().__init__(spec, settings)
        self.audio_ends = self.ids_of(self.AUDIO_ENDS)
        self.sounds = load_processor(spec, WhisperFeatureExtractor)

    def item(self, item: Mapping[str, Any]) -> list[ModelInput]:
        """One sequence: the pictures or the video, the sound, and the text.

        Raises:
            Unreadable: a picture is too long and narrow, or the item has too many tokens.
        """
        shown, text = self.content_of(item)
        sound = None if self.spec.documents == "text" else self.sound_of(item)
        if sound and self.spec.documents == "media":
            text = ""
        if not shown and not sound and not text:
            return []
        read = self._read(self.spec.document_prompt, text, shown, sound=sound)
        media = sound.media if sound else {}
        return [dataclasses.replace(read, media={**read.media, **media})]

    def sound_of(self, item: Mapping[str, Any]) -> Sound | None:
        """The sound of an item, if it has enough for a token."""
        audio = item.get("audio")
        if not audio:
            return None
        extractor = self.sounds
        rate, hop = extractor.sampling_rate, extractor.hop_length
        seconds = min(self.spec.max_audio_seconds, extractor.n_samples / rate)
        samples = samples_of(audio, rate)[: round(seconds * rate)]
        # The model is trained with silence up to its longest sound. What is near enough to be in
        # a column of the samples' own gives the same numbers.
        padded = math.ceil((len(samples) + 2 * extractor.n_fft) / hop) * hop
        read = extractor(
            samples,
            sampling_rate=rate,
            padding="max_length",
            max_length=min(padded, extractor.n_samples),
            return_attention_mask=True,
            return_tensors="pt",
        )
        columns = read["input_features"][0].T[read["attention_mask"][0].bool()]
        if not num_audio_tokens(len(columns)):
            return None
        span = item.get("span") or {}
        begin = span["start"] if span.get("unit") == "seconds" else -math.inf
        start = audio["start"]
        return Sound(columns, start, start + len(samples) / rate, begin)

    def write(
        self,
        prompt: str,
        text: str = "",
        images: Sequence[Shown] = (),
        video: Sequence[Sequence[Shown]] = (),
        sound: Sound | None = None,
    ) -> Timed:
        """Builds the sequence of a prompt with images, a video, audio and a text in it.

        Args:
            prompt: A text that contains `{content}`.
            text: Text of the content.
            images: Images of the content.
            video: Frames of a video, grouped by the grid that they form.
            sound: Audio of the content, or None.
        """
        before, after = prompt.split(CONTENT)
        writer = Timed(self)
        writer.prompt(before)
        for picture, start, stop in images:
            rows, columns = self.grid(picture)
            cells, places = (
                grid_extents(rows, columns, (start, stop)),
                grid_places([0], rows, columns),
            )
            seen = Stretch(self.settings.image_token_id, VISUAL, cells, places)
            writer.alone(seen, self.vision_ends)
        if video and sound and self.spec.interleave:
            starts = [max(own[0][1], sound.begin) for own in video]
            origin = min(starts[0], sound.start)
            per_chunk = self.settings.position_id_per_seconds * self.settings.seconds_per_chunk
            heard = self._heard(sound, self._position(sound.start - origin))
            writer.together(self._seen(video, starts, origin), heard, int(per_chunk))
        else:
            if video:
                starts = [own[0][1] for own in video]
                writer.alone(self._seen(video, starts, starts[0]), self.vision_ends)
            if sound:
                writer.alone(self._heard(sound), self.audio_ends)
        writer.plain(text, is_own=True)
        writer.prompt(after)
        writer.end()
        return writer

    def _position(self, seconds: float) -> int:
        """A position in time; what is a hair below the next is the next."""
        return math.floor(round(seconds * self.settings.position_id_per_seconds, 3))

    def _seen(
        self, video: Sequence[Sequence[Shown]], starts: Sequence[float], origin: float
    ) -> Stretch:
        """The tokens of a video whose grids begin at `starts`, counted from `origin`."""
        rows, columns = self.grid(video[0][0][0])
        cells = torch.cat([grid_extents(rows, columns, (own[0][1], own[-1][2])) for own in video])
        times = [self._position(start - origin) for start in starts]
        places = grid_places(times, rows, columns)
        return Stretch(self.settings.video_token_id, VISUAL, cells, places)

    def _heard(self, sound: Sound, first: int = 0) -> Stretch:
        """The tokens of sound; `first` is the position of its first."""
        number = np.arange(num_audio_tokens(len(sound.columns)))
        seconds = COLUMNS * self.sounds.hop_length / self.sounds.sampling_rate
        cells = torch.full((len(number), 6), torch.nan)
        cells[:, 4] = torch.from_numpy(sound.start + number * seconds)
        cells[:, 5] = torch.from_numpy(np.minimum(sound.start + (number + 1) * seconds, sound.end))
        places = torch.from_numpy(number + first).unsqueeze(1).expand(-1, 3)
        return Stretch(self.settings.audio_token_id, AUDIO, cells, places)
