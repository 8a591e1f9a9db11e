"""Embedders based on the thinker of Qwen2.5-Omni: images, video, audio and text in one sequence.

As in `qwen_vl`, the hidden state of the last token is the pooled vector and the preceding states
are the token vectors. The frames and the audio of a video are interleaved by time: the frames of
two seconds, the audio of the same two seconds, and so on.
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

from pipeline.data.recognise.audio import decode_samples
from pipeline.encoders.images import grid_extents
from pipeline.encoders.loading import check_checkpoint, load_processor
from pipeline.encoders.model_inputs import ModelInput
from pipeline.encoders.qwen_model import load_backbone
from pipeline.encoders.qwen_reader import TEXT_TYPE, SequenceWriter, TimedImage
from pipeline.encoders.qwen_spec import StatesSpec
from pipeline.encoders.qwen_states import StatesEncoder, StatesReader
from pipeline.tokens import AUDIO, SPECIAL, VISUAL

#: Model classes by model type. The speech decoder of the first type is not loaded.
MODELS = dict.fromkeys(
    ("qwen2_5_omni", "qwen2_5_omni_thinker"), Qwen2_5OmniThinkerForConditionalGeneration
)

#: Frames of the spectrogram per token: a convolution and a mean pooling each halve their number.
FRAMES_PER_TOKEN = 4


class QwenOmni(StatesEncoder["QwenOmni.Spec"]):
    """Encoder with hidden states of the thinker, see `StatesEncoder`.

    An audio token has the times of the 40 ms that it covers, and no box.

    Audio longer than `max_audio_seconds` or than the checkpoint's window (300 s in published
    checkpoints) is truncated. A video that exceeds the token limit is subsampled. Its audio is not.
    An item is rejected if its audio exceeds the limit, alone or with a single pair of frames.
    """

    class Spec(StatesSpec):
        """Checkpoint, the content and prompts of items, and the tokens that are kept.

        Audio is resampled to the rate of the checkpoint's feature extractor, 16 kHz.
        """

        name: Literal["qwen_omni"] = "qwen_omni"
        output_tokens: Literal["code", "paper", "media", "all"] = "code"
        """"paper" drops only the pooled token (SMART, eq. 4). "code" drops special tokens,
        including the boundaries of images and audio. "media" keeps only image and audio tokens, or
        for inputs without media the same as "code". "all" drops none, as OmniColPress does.
        """
        documents: Literal["media", "text", "both"] = "media"
        """Content of an item that is encoded: "media" (images, video and audio, or the text of
        items without media), "text", or "both" in one sequence, the text last.
        """
        interleave: bool = True
        """Interleave the frames of a video with its audio by time, as in training of the model.
        Otherwise the audio follows the frames.
        """
        max_audio_seconds: float = Field(300.0, gt=0)
        """Maximum length of the audio of an item, in seconds. Longer audio is truncated."""
        audio_rate: int | None = Field(None, ge=1000, le=16_000)
        """Sample rate in Hz to which audio is resampled, or null for that of the model's feature
        extractor (16 kHz). The samples reach the extractor as if they had its rate, so that 4000
        gives a quarter of the tokens, as in AGC (section 6.2 and its public code)."""

    ITEM_FIELDS = (
        *("documents", "interleave", "document_prompt", "max_frames", "max_audio_seconds"),
        *("max_item_tokens", "audio_rate"),
    )
    default_query_kinds = ("text", "image", "audio", "video", "composed")
    empty_reason = "no image, no audio and no text"

    @classmethod
    def settings(cls, spec: Spec) -> PretrainedConfig:
        """Returns the configuration of the thinker."""
        settings = check_checkpoint(spec, *MODELS)
        return getattr(settings, "thinker_config", settings)

    @classmethod
    def supported_inputs(cls, spec: Spec) -> tuple[str, ...]:
        """Returns the inputs selected by `documents`."""
        return ("text",) if spec.documents == "text" else ("text", "image", "frames", "audio")

    @classmethod
    def load(cls, spec: Spec, device_map: str | None) -> PreTrainedModel:
        """Loads the thinker without its language modelling head."""
        return load_backbone(spec, device_map, MODELS)

    @classmethod
    def reader(cls, spec: Spec) -> QwenOmniReader:
        """Returns the reader of images, videos, audio, texts and queries."""
        return QwenOmniReader(spec, cls.settings(spec))

    def run(self, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
        """Runs the thinker with the positions computed by the reader."""
        return self.model(**thinker_inputs(inputs), use_cache=False, **options)


def thinker_inputs(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the model's inputs from those of the reader: padded spectrograms, and positions."""
    inputs = dict(inputs)
    if "columns" in inputs:
        lengths = inputs.pop("num_columns")
        columns = inputs.pop("columns").split(lengths.tolist())
        features = torch.nn.utils.rnn.pad_sequence(list(columns), batch_first=True)
        position = torch.arange(features.shape[1], device=features.device)
        inputs["input_features"] = features.transpose(1, 2)
        inputs["feature_attention_mask"] = (position < lengths.unsqueeze(1)).long()
    inputs["position_ids"] = inputs["position_ids"].permute(2, 0, 1)
    return inputs


@dataclass(frozen=True)
class Audio:
    """Audio of an item.

    Attributes:
        columns: Frames of the log-mel spectrogram, (F, mel).
        start, end: Times in the parent, in seconds.
        begin: Start of the item, in seconds, from which positions of frames displayed earlier are
            counted.
        speed: Seconds of audio per second that the feature extractor assumes.
    """

    columns: torch.Tensor
    start: float
    end: float
    begin: float
    speed: float = 1.0

    @property
    def media(self) -> dict[str, torch.Tensor]:
        """Inputs of the audio tower."""
        return {"columns": self.columns, "num_columns": torch.tensor([len(self.columns)])}


@dataclass(frozen=True)
class MediaTokens:
    """Consecutive image or audio tokens.

    Attributes:
        pad: Placeholder token.
        kind: Code of `tokens.KINDS`.
        extents: Extents of the tokens, (n, 6).
        positions: Positions in time, row and column, (n, 3), relative to the start of the tokens.
    """

    pad: int
    kind: int
    extents: torch.Tensor
    positions: torch.Tensor

    def chunk(self, mask: torch.Tensor) -> MediaTokens:
        """Returns the selected tokens."""
        return dataclasses.replace(self, extents=self.extents[mask], positions=self.positions[mask])


def num_audio_tokens(num_columns: int) -> int:
    """Returns the number of tokens of a spectrogram, one per four frames.

    >>> [num_audio_tokens(columns) for columns in (2, 3, 4, 6, 7, 100)]
    [0, 1, 1, 1, 2, 25]
    """
    return (num_columns + 1) // 2 // 2


def chunk_indices(times: Iterable[int], length: int) -> torch.Tensor:
    """Returns the index of the chunk of `length` positions that each ascending position is in.

    As in the model's own processor, a token starts at most one chunk, so if frames are more than a
    chunk apart, the first tokens are assigned to earlier chunks.

    >>> chunk_indices([0, 0, 50, 50, 150, 150, 150], 50).tolist()
    [0, 0, 1, 1, 2, 3, 3]
    """
    numbers, number = [], 0
    for time in times:
        number += time >= (number + 1) * length
        numbers.append(number)
    return torch.tensor(numbers)


def grid_positions(times: Sequence[int], rows: int, columns: int) -> torch.Tensor:
    """Returns the positions (len(times) * rows * columns, 3) of the tokens of consecutive grids."""
    axes = (torch.tensor(times), torch.arange(rows), torch.arange(columns))
    return torch.cartesian_prod(*axes)


class TimedSequenceWriter(SequenceWriter):
    """Builds a sequence whose tokens have positions in time, row and column."""

    _reader: QwenOmniReader

    def __init__(self, reader: QwenOmniReader):
        super().__init__(reader)
        self._positions: list[torch.Tensor] = []
        self._next = 0

    def add_media(self, tokens: MediaTokens, boundaries: Sequence[int]) -> None:
        """Appends image or audio tokens between the ids of their boundary tokens."""
        self.flush()
        self.add_ids([boundaries[0]], SPECIAL)
        self._add_media_tokens(tokens, self._next)
        self.add_ids([boundaries[1]], SPECIAL)

    def add_interleaved(self, video: MediaTokens, audio: MediaTokens, length: int) -> None:
        """Appends a video and its audio, interleaved in chunks of `length` positions in time."""
        self.flush()
        boundaries = tuple(
            zip(self._reader.vision_boundaries, self._reader.audio_boundaries, strict=True)
        )
        self._add_boundaries(boundaries[0])
        origin = self._next
        chunks = [
            chunk_indices(tokens.positions[:, 0].tolist(), length) for tokens in (video, audio)
        ]
        for number in range(int(torch.cat(chunks).max()) + 1):
            for tokens, indices in zip((video, audio), chunks, strict=True):
                if (mask := indices == number).any():
                    self._add_media_tokens(tokens.chunk(mask), origin)
        self._add_boundaries(reversed(boundaries[1]))

    def _add_boundaries(self, ids: Iterable[int]) -> None:
        """Appends boundary tokens that share one position."""
        position = torch.full((1, 3), self._next)
        for token_id in ids:
            self.add_ids([token_id], SPECIAL, positions=position)

    def _add_media_tokens(self, tokens: MediaTokens, origin: int) -> None:
        self.extents.append((len(self.ids), tokens.extents))
        ids = [tokens.pad] * len(tokens.extents)
        self.add_ids(ids, tokens.kind, positions=tokens.positions + origin)

    def add_ids(
        self,
        ids: list[int],
        kind: int,
        type: int = TEXT_TYPE,
        span: tuple[int, int] = (-1, -1),
        positions: torch.Tensor | None = None,
    ) -> None:
        """Appends tokens by their ids, at given positions or after the last one."""
        if not ids:
            return
        super().add_ids(ids, kind, type, span)
        if positions is None:
            positions = torch.arange(self._next, self._next + len(ids)).unsqueeze(1).expand(-1, 3)
        self._positions.append(positions)
        # As in the model, positions continue after the last token, even if an earlier image extends
        # further.
        self._next = int(positions.max()) + 1

    def position_inputs(self) -> dict[str, torch.Tensor]:
        """Returns the model inputs per position."""
        return {
            "input_ids": torch.tensor(self.ids),
            "position_ids": torch.cat(self._positions),
        }


class QwenOmniReader(StatesReader["QwenOmni.Spec"]):
    """Reader of items with audio, and of queries, with prompts."""

    VISION_BOUNDARIES = ("<|vision_bos|>", "<|vision_eos|>")
    AUDIO_BOUNDARIES: ClassVar[tuple[str, str]] = ("<|audio_bos|>", "<|audio_eos|>")
    PADS: ClassVar[dict[str, str]] = {
        "<|IMAGE|>": "image_token_id",
        "<|VIDEO|>": "video_token_id",
        "<|AUDIO|>": "audio_token_id",
    }
    MEDIA = (VISUAL, AUDIO)

    def __init__(self, spec: QwenOmni.Spec, settings: PretrainedConfig):
        super().__init__(spec, settings)
        self.audio_boundaries = self.token_ids(self.AUDIO_BOUNDARIES)
        self.feature_extractor = load_processor(spec, WhisperFeatureExtractor)

    def read_item(self, item: Mapping[str, Any]) -> list[ModelInput]:
        """Returns one sequence: the images or the video, the audio, and the text."""
        images, text = self.item_content(item)
        audio = None if self.spec.documents == "text" else self.read_audio(item)
        if audio and self.spec.documents == "media":
            text = ""
        if not images and not audio and not text:
            return []
        return [self._build(self.spec.document_prompt, text, images, audio=audio)]

    def _build(self, *content: Any, audio: Audio | None = None, **options: Any) -> ModelInput:
        read = super()._build(*content, audio=audio, **options)
        media = audio.media if audio else {}
        return dataclasses.replace(read, media={**read.media, **media})

    def read_media(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the audio of an item."""
        return {"audio": self.read_audio(item)}

    def read_audio(self, item: Mapping[str, Any]) -> Audio | None:
        """Returns the audio of an item, or None if it is too short for a token."""
        audio = item.get("audio")
        if not audio:
            return None
        extractor = self.feature_extractor
        rate, hop = extractor.sampling_rate, extractor.hop_length
        audio_rate = self.spec.audio_rate or rate
        seconds = min(self.spec.max_audio_seconds, extractor.n_samples / audio_rate)
        samples = decode_samples(audio, audio_rate)[: round(seconds * audio_rate)]
        # The model is trained on audio padded with silence to the maximum length. Padding by two
        # FFT windows yields the same features, because later samples affect no frame of the audio.
        padded = math.ceil((len(samples) + 2 * extractor.n_fft) / hop) * hop
        # The extractor cannot convert the bfloat16 features of an autocast region to NumPy.
        with torch.autocast("cpu", enabled=False):
            output = extractor(
                samples,
                sampling_rate=rate,
                padding="max_length",
                max_length=min(padded, extractor.n_samples),
                return_attention_mask=True,
                return_tensors="pt",
            )
        columns = output["input_features"][0].T[output["attention_mask"][0].bool()]
        if not num_audio_tokens(len(columns)):
            return None
        span = item.get("span") or {}
        begin = span["start"] if span.get("unit") == "seconds" else -math.inf
        start = audio["start"]
        return Audio(columns, start, start + len(samples) / audio_rate, begin, rate / audio_rate)

    writer_class = TimedSequenceWriter

    def write_media(
        self,
        writer: TimedSequenceWriter,
        images: Sequence[TimedImage] = (),
        video: Sequence[Sequence[TimedImage]] = (),
        audio: Audio | None = None,
    ) -> None:
        """Appends images, a video, whose frames are grouped by temporal patch, and audio."""
        for image, start, stop in images:
            rows, columns = self.grid(image)
            extents = grid_extents(rows, columns, (start, stop))
            positions = grid_positions([0], rows, columns)
            tokens = MediaTokens(self.settings.image_token_id, VISUAL, extents, positions)
            writer.add_media(tokens, self.vision_boundaries)
        if video and audio and self.spec.interleave:
            starts = [max(frames[0][1], audio.begin) for frames in video]
            origin = min(starts[0], audio.start)
            per_chunk = self.settings.position_id_per_seconds * self.settings.seconds_per_chunk
            audio_tokens = self._audio_tokens(audio, self._position(audio.start - origin))
            writer.add_interleaved(
                self._video_tokens(video, starts, origin), audio_tokens, int(per_chunk)
            )
        else:
            if video:
                starts = [frames[0][1] for frames in video]
                writer.add_media(
                    self._video_tokens(video, starts, starts[0]), self.vision_boundaries
                )
            if audio:
                writer.add_media(self._audio_tokens(audio), self.audio_boundaries)

    def _position(self, seconds: float) -> int:
        """Returns a position in time. Values just below an integer are rounded up."""
        return math.floor(round(seconds * self.settings.position_id_per_seconds, 3))

    def _video_tokens(
        self, video: Sequence[Sequence[TimedImage]], starts: Sequence[float], origin: float
    ) -> MediaTokens:
        """Returns the tokens of a video; `origin` is the time of position 0, in seconds."""
        num_frames = len(video) * self.images.temporal_patch_size
        rows, columns = self.grid(video[0][0][0], num_frames)
        extents = [grid_extents(rows, columns, (frames[0][1], frames[-1][2])) for frames in video]
        times = [self._position(start - origin) for start in starts]
        positions = grid_positions(times, rows, columns)
        return MediaTokens(self.settings.video_token_id, VISUAL, torch.cat(extents), positions)

    def _audio_tokens(self, audio: Audio, first: int = 0) -> MediaTokens:
        """Returns the tokens of audio whose first position in time is `first`."""
        index = np.arange(num_audio_tokens(len(audio.columns)))
        seconds = (
            FRAMES_PER_TOKEN
            * self.feature_extractor.hop_length
            / self.feature_extractor.sampling_rate
            * audio.speed
        )
        extents = torch.full((len(index), 6), torch.nan)
        extents[:, 4] = torch.from_numpy(audio.start + index * seconds)
        extents[:, 5] = torch.from_numpy(np.minimum(audio.start + (index + 1) * seconds, audio.end))
        positions = torch.from_numpy(index + first).unsqueeze(1).expand(-1, 3)
        return MediaTokens(self.settings.audio_token_id, AUDIO, extents, positions)
