"""Speech by a Whisper checkpoint, through the transformers library."""

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
from pipeline.checkpoint import find_checkpoint
from pipeline.config import SpecError
from pipeline.tokens import AUDIO
from pipeline.transcribe import NAN, Line, Recogniser, Word, confident, spread
from pipeline.transcribe.sound import RATE, samples_of, utterances
from pipeline.transcribe.sphinx import lines_of

#: Seconds that Whisper hears at once.
LONGEST = 30.0
#: Seconds without a word that end a line, where each word has its times.
PAUSE = 0.5

SETTINGS = ["*.json", "*.txt"]
WEIGHTS = ["*.safetensors"]


class Whisper(Recogniser["Whisper.Spec"]):
    """Speech recognition by any checkpoint of Whisper's form, in the languages that it knows.

    Sound is heard in stretches of at most 30 s, cut where it is quietest, each by itself. If the
    checkpoint's generation config names alignment heads, each word has its own times. Otherwise the
    words of a segment share its time out by their characters.

    It runs on a CUDA device if there is one.
    """

    class Spec(config.ComponentSpec):
        """Which checkpoint, and what it is told.

        Attributes:
            model: a hub name, or a local folder as `save_pretrained` writes it.
            revision: branch, tag or commit of a model from the hub.
            language: a code such as "en"; None: what the model takes each stretch for.
            min_confidence: Least confidence of a word, the mean probability of its tokens; others
                are left out.
        """

        name: Literal["whisper"] = "whisper"
        model: str
        revision: str | None = None
        language: str | None = None
        min_confidence: float = Field(0.0, ge=0, le=1)

        @field_validator("model")
        @classmethod
        def _make_folder_absolute(cls, model: str) -> str:
            # Actors run in other working directories.
            return config.absolute(model) if Path(model).expanduser().is_dir() else model

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
        self._first_time = no_timestamps + 1
        self._by_word = getattr(generation, "alignment_heads", None) is not None
        self._arguments: dict[str, Any] = {"do_sample": False, "num_beams": 1}
        if getattr(generation, "is_multilingual", False):  # others refuse to be told
            self._arguments |= {"task": "transcribe", "language": spec.language}

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Raises `SpecError` if the checkpoint is not there or does not suit the spec.

        Reads the checkpoint's settings; loads no weights (of a model on the hub, downloads none).
        """
        folder = _find_folder(spec, SETTINGS)
        _check_folder(spec, folder, with_weights=Path(spec.model).is_dir())

    @classmethod
    def wants(cls, spec: Spec) -> tuple[str, ...]:
        """Sound."""
        return ("audio",)

    def lines(self, item: dict[str, Any]) -> list[Line]:
        """What is said: a line a segment, or between two pauses if each word has its times."""
        audio = item.get("audio")
        if audio is None:
            return []
        lines = [
            line
            for start, samples in utterances(samples_of(audio), LONGEST)
            for line in self._hear(samples, audio["start"] + start)
        ]
        return confident(lines, self.spec.min_confidence)

    def _hear(self, samples: np.ndarray, start: float) -> list[Line]:
        """The lines of a stretch that starts at `start` seconds of the file."""
        generated = _Generated(self._first_time)
        processors = LogitsProcessorList([generated])
        result = self._recognise(
            {"raw": samples, "sampling_rate": RATE},
            return_timestamps="word" if self._by_word else True,
            generate_kwargs={**self._arguments, "logits_processor": processors},
        )
        end = start + len(samples) / RATE
        timed = []
        for chunk in result["chunks"]:
            first, last = chunk["timestamp"]
            # The model may see times behind the sound, which it hears with silence up to 30 s.
            first = min(end, start + (first or 0.0))
            last = end if last is None else max(first, min(end, start + last))
            timed.append((chunk["text"], (first, last)))
        if self._by_word:
            words = [
                Word("".join(text.split()), (NAN,) * 4, times, AUDIO)
                for text, times in timed
                if text.strip()
            ]
            lines = lines_of(words, PAUSE)
        else:
            lines = [spread(text, times, kind=AUDIO) for text, times in timed if text.strip()]
        return self._with_confidence(lines, generated.tokens)

    def _with_confidence(self, lines: list[Line], tokens: list[tuple[int, float]]) -> list[Line]:
        """Returns the lines; each word has the mean probability of its characters' tokens."""
        tokenizer = self._recognise.tokenizer
        ids = [token for token, _ in tokens]
        sure: list[float] = []  # of each character
        for number, (_, probability) in enumerate(tokens, start=1):
            text = tokenizer.decode(ids[:number], skip_special_tokens=True)
            sure += [probability] * (len("".join(text.split())) - len(sure))
        if len(sure) != sum(len(word.text) for line in lines for word in line.words):
            return lines
        known, start = [], 0
        for line in lines:
            words = []
            for word in line.words:
                stop = start + len(word.text)
                words.append(replace(word, confidence=float(np.mean(sure[start:stop]))))
                start = stop
            known.append(Line(tuple(words)))
        return known


class _Generated(LogitsProcessor):
    """Records the generated tokens and their probabilities; changes none.

    Long-form generation runs once per window. A window's text counts up to its last pair of
    adjacent time tokens, as the next window starts there; all of it counts where there is no pair
    or where it ends with a single time.
    """

    def __init__(self, first_time: int):
        self._first_time = first_time
        self._windows: list[list[tuple[int, float]]] = []
        self._length = 0
        self._probabilities: torch.Tensor | None = None

    @property
    def tokens(self) -> list[tuple[int, float]]:
        """(id, probability) of the text tokens that the transcript consists of."""
        tokens = []
        for window in self._windows:
            is_time = [token >= self._first_time for token, _ in window]
            pairs = [i for i in range(1, len(window)) if is_time[i - 1] and is_time[i]]
            end = pairs[-1] if pairs and is_time[-2:] != [False, True] else len(window)
            tokens += [entry for entry in window[:end] if entry[0] < self._first_time]
        return tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Records the token chosen from the previous scores, and keeps these scores for the next.

        The last token of a window is never recorded; it is the one that ends the text.
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
    """Returns the generation config of a checkpoint, and the id of its last token before times."""
    try:
        model_type = json.loads((folder / "config.json").read_bytes())["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        rule = "a checkpoint with a config.json that names its model_type"
        raise SpecError("model", spec.model, rule, "has none") from None
    if model_type != "whisper":
        raise SpecError("model", spec.model, "a Whisper checkpoint", f"is a {model_type}")
    if with_weights and not any(folder.glob("*.safetensors")):
        rule = "a checkpoint with weights as *.safetensors (pickled weights are not loaded)"
        raise SpecError("model", spec.model, rule, "has no safetensors file")
    try:
        generation = GenerationConfig.from_pretrained(folder)
        WhisperProcessor.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = "a checkpoint with generation_config.json, a tokenizer and a feature extractor"
        problem = f"lacks one of them ({str(error).splitlines()[0]})"
        raise SpecError("model", spec.model, rule, problem) from None
    no_timestamps = getattr(generation, "no_timestamps_token_id", None)
    if no_timestamps is None:
        rule = "a checkpoint whose generation_config.json has no_timestamps_token_id"
        raise SpecError("model", spec.model, rule, "has none")
    if spec.language is not None:
        known = getattr(generation, "lang_to_id", None) or {}
        if f"<|{spec.language}|>" not in known:
            codes = sorted(code.strip("<|>") for code in known)
            raise SpecError.unknown_name("language", spec.language, codes)
    return generation, no_timestamps
