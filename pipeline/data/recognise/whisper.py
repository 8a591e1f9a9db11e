"""Speech recognition with Whisper checkpoints, through the transformers library."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, field_validator
from transformers import (
    AutomaticSpeechRecognitionPipeline,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    WhisperForConditionalGeneration,
    WhisperProcessor,
)

from pipeline import config
from pipeline.config import SpecError, reading
from pipeline.data.recognise import NAN, Line, Recogniser, Word, filter_words, make_line
from pipeline.data.recognise.audio import SAMPLE_RATE, decode_samples, split_utterances
from pipeline.data.recognise.sphinx import split_at_pauses
from pipeline.paths import local_path
from pipeline.runtime.checkpoint import LOAD_ERRORS, check_safetensors, find_checkpoint
from pipeline.tokens import AUDIO

#: Maximum duration of Whisper's input, in seconds.
MAX_SECONDS = 30.0
#: Minimum pause between lines, in seconds, for checkpoints with word times.
MIN_PAUSE_SECONDS = 0.5

SETTINGS = ["*.json", "*.txt"]
WEIGHTS = ["*.safetensors"]


class Whisper(Recogniser["Whisper.Spec"]):
    """Speech recognition with Whisper checkpoints, in the languages that they support.

    Audio is divided at its quietest times into utterances of at most 30 s, which are recognised
    independently. If the generation config of the checkpoint has alignment heads, words have
    individual times. Otherwise, the words of a segment divide its duration in proportion to their
    characters.

    Runs on a CUDA device if available.
    """

    class Spec(config.ComponentSpec):
        """Options of Whisper."""

        name: Literal["whisper"] = "whisper"
        model: str
        """Name of a model on the hub, or a local folder in the format of `save_pretrained`."""
        revision: str | None = None
        """Branch, tag or commit of a model on the hub."""
        language: str | None = None
        """Language code such as "en"; None: the language is detected for each utterance."""
        min_confidence: float = Field(0.0, ge=0, le=1)
        """Minimum confidence of a word, the mean probability of its tokens. Other words are
        omitted."""

        @field_validator("model")
        @classmethod
        def _make_folder_absolute(cls, model: str) -> str:
            # Actors run in different working directories.
            return config.absolute(model) if Path(local_path(model)).is_dir() else model

    def __init__(self, spec: Spec):
        self.spec = spec
        folder = _find_folder(spec, WEIGHTS + SETTINGS)
        generation, no_timestamps = _check_folder(spec, folder, with_weights=True)
        model = WhisperForConditionalGeneration.from_pretrained(
            folder, use_safetensors=True, trust_remote_code=False, dtype=torch.float32
        )
        processor = WhisperProcessor.from_pretrained(folder)
        self._recognise: Any = AutomaticSpeechRecognitionPipeline(
            model=model.eval(),
            tokenizer=processor.tokenizer,
            feature_extractor=processor.feature_extractor,
            device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        )
        self._first_timestamp = no_timestamps + 1
        self._has_word_times = getattr(generation, "alignment_heads", None) is not None
        self._arguments: dict[str, Any] = {"do_sample": False, "num_beams": 1}
        if getattr(generation, "is_multilingual", False):  # other models reject these arguments
            self._arguments |= {"task": "transcribe", "language": spec.language}

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Raises `SpecError` if the checkpoint is missing or does not support the options.

        Reads the configuration of the checkpoint, but neither loads nor downloads its weights.
        """
        folder = _find_folder(spec, SETTINGS)
        _check_folder(spec, folder, with_weights=Path(spec.model).is_dir())

    @classmethod
    def wants(cls, spec: Spec) -> tuple[str, ...]:
        """Returns "audio"."""
        return ("audio",)

    def lines(self, item: dict[str, Any]) -> list[Line]:
        """Returns the speech: a line per segment, or if words have times, between pauses."""
        audio = item.get("audio")
        if audio is None:
            return []
        lines = [
            line
            for start, samples in split_utterances(decode_samples(audio), MAX_SECONDS)
            for line in self._recognise_utterance(samples, audio["start"] + start)
        ]
        return filter_words(lines, self.spec.min_confidence)

    def _recognise_utterance(self, samples: np.ndarray, start: float) -> list[Line]:
        """Recognises an utterance that begins at `start` seconds of the file."""
        recorder = _TokenRecorder(self._first_timestamp)
        processors = LogitsProcessorList([recorder])
        result = self._recognise(
            {"raw": samples, "sampling_rate": SAMPLE_RATE},
            return_timestamps="word" if self._has_word_times else True,
            generate_kwargs={**self._arguments, "logits_processor": processors},
        )
        end = start + len(samples) / SAMPLE_RATE
        timed = []
        for chunk in result["chunks"]:
            first, last = chunk["timestamp"]
            # The input is padded with silence to 30 s, so times may exceed the audio.
            first = min(end, start + (first or 0.0))
            last = end if last is None else max(first, min(end, start + last))
            timed.append((chunk["text"], (first, last)))
        if self._has_word_times:
            words = [
                Word("".join(text.split()), (NAN,) * 4, times, AUDIO)
                for text, times in timed
                if text.strip()
            ]
            lines = split_at_pauses(words, MIN_PAUSE_SECONDS)
        else:
            lines = [make_line(text, times, kind=AUDIO) for text, times in timed if text.strip()]
        return self._with_confidence(lines, recorder.tokens)

    def _with_confidence(self, lines: list[Line], tokens: list[tuple[int, float]]) -> list[Line]:
        """Sets the confidence of each word to the mean token probability over its characters."""
        tokenizer = self._recognise.tokenizer
        ids = [token for token, _ in tokens]
        probabilities: list[float] = []  # per character
        for number, (_, probability) in enumerate(tokens, start=1):
            text = tokenizer.decode(ids[:number], skip_special_tokens=True)
            num_new = len("".join(text.split())) - len(probabilities)
            probabilities += [probability] * num_new
        if len(probabilities) != sum(len(word.text) for line in lines for word in line.words):
            return lines
        result, start = [], 0
        for line in lines:
            words = []
            for word in line.words:
                stop = start + len(word.text)
                confidence = float(np.mean(probabilities[start:stop]))
                words.append(replace(word, confidence=confidence))
                start = stop
            result.append(Line(tuple(words)))
        return result


class _TokenRecorder(LogitsProcessor):
    """Records the generated tokens and their probabilities without changing them.

    Long-form generation runs once per window. The text of a window counts up to its last pair of
    adjacent timestamp tokens, where the next window begins. It counts entirely if it has no such
    pair or ends with a single timestamp.
    """

    def __init__(self, first_timestamp: int):
        self._first_timestamp = first_timestamp
        self._windows: list[list[tuple[int, float]]] = []
        self._length = 0
        self._probabilities: torch.Tensor | None = None

    @property
    def tokens(self) -> list[tuple[int, float]]:
        """(id, probability) of the text tokens of the transcript."""
        tokens = []
        for window in self._windows:
            is_time = [token >= self._first_timestamp for token, _ in window]
            pairs = [i for i in range(1, len(window)) if is_time[i - 1] and is_time[i]]
            end = pairs[-1] if pairs and is_time[-2:] != [False, True] else len(window)
            tokens += [entry for entry in window[:end] if entry[0] < self._first_timestamp]
        return tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Records the token that was chosen from the previous scores, and stores these scores.

        The last token of a window, end of text, is never recorded.
        """
        length = input_ids.shape[1]
        if self._probabilities is None or length != self._length + 1:
            self._windows.append([])
        else:
            chosen = int(input_ids[0, -1])
            self._windows[-1].append((chosen, float(self._probabilities[chosen])))
        self._length, self._probabilities = length, scores[0].float().softmax(dim=-1)
        return scores


def _find_folder(spec: Whisper.Spec, hub_files: list[str]) -> Path:
    rule = "the path of an existing folder, or the hub name of a Whisper model"
    return find_checkpoint(spec.model, spec.revision, hub_files, rule)


def _check_folder(
    spec: Whisper.Spec, folder: Path, with_weights: bool
) -> tuple[GenerationConfig, int]:
    """Validates a checkpoint. Returns its generation config and the last id before timestamps."""
    rule = "a checkpoint with a config.json that names its model_type"
    with reading("model", spec.model, rule, *LOAD_ERRORS):
        model_type = json.loads((folder / "config.json").read_bytes())["model_type"]
    if model_type != "whisper":
        raise SpecError("model", spec.model, "a Whisper checkpoint", f"is a {model_type}")
    if with_weights:
        check_safetensors(spec.model, folder)
    rule = (
        "a checkpoint with no_timestamps_token_id in generation_config.json, a tokenizer and a"
        " feature extractor"
    )
    with reading("model", spec.model, rule, *LOAD_ERRORS, problem="lacks one of them"):
        generation = GenerationConfig.from_pretrained(folder)
        WhisperProcessor.from_pretrained(folder)
        no_timestamps = generation.to_dict()["no_timestamps_token_id"]
    if spec.language is not None:
        known = getattr(generation, "lang_to_id", None) or {}
        if f"<|{spec.language}|>" not in known:
            codes = sorted(code.strip("<|>") for code in known)
            raise SpecError.unknown_name("language", spec.language, codes)
    return generation, no_timestamps
