"""The embedded default for every modality: what is written or said, as text, and MiniLM over it.

It needs no hub and no GPU, and finds words only: printed text and clear English speech by the
default recognisers. A photo without text has nothing to index.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from pydantic import Field

from pipeline import config
from pipeline.config import SpecError, within
from pipeline.encoders import Attention, EncodedQueries, Encoder
from pipeline.encoders.minilm import MiniLM
from pipeline.registry import OCR, SPEECH, OcrSpec, Registry, SpeechSpec
from pipeline.schema import ITEM, WORD_BOXES, WORD_CONFIDENCES, WORD_KINDS, WORD_SPANS, WORD_TIMES
from pipeline.taps import Tap
from pipeline.tokens import TEXT, TokenBatch
from pipeline.transcribe import Line, Recogniser

#: What recognisers read, and nobody behind them.
PAYLOAD = ("scan", "frames", "audio")


class Transcript(Encoder["Transcript.Spec"]):
    """Words from text layers, pictures and sound, and MiniLM's vectors of their tokens.

    `preparer` turns an item into text: its own text if it has one, else what the OCR reads in it;
    then, behind an empty line, what is said. `encode` gives the vectors of that text, each token
    with the box and the times of its word, and of kind `TEXT` or `AUDIO`. An item without a word
    has no token.

    The vectors are MiniLM's, of one space with those of the encoder `minilm` of equal settings.
    """

    class Spec(config.ComponentSpec):
        """Which model encodes the words, and what finds them.

        Attributes:
            text: the settings of the text encoder.
            ocr: what finds text to be seen; None: nothing.
            speech: what finds speech; None: nothing.
        """

        name: Literal["transcript"] = "transcript"
        text: MiniLM.Spec = MiniLM.Spec()
        ocr: OcrSpec = Field("rapidocr", validate_default=True)
        speech: SpeechSpec = Field("pocketsphinx", validate_default=True)

    needs = ()
    prepares = True
    nothing = "no text, no speech"
    has_spans = True
    has_extents = True
    has_confidence = True

    def __init__(self, spec: Spec):
        self.spec = spec
        self._minilm = MiniLM(spec.text)
        self.dim, self.pooled_dim = self._minilm.dim, self._minilm.pooled_dim
        self.normalised = self._minilm.normalised
        self.fingerprint = self._minilm.fingerprint

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Raises `SpecError` if the model or a recogniser is not there, or none is named."""
        if not _parts(spec):
            rule = "a recogniser, unless `speech` is set or the encoder is minilm"
            raise SpecError("ocr", None, rule, "leaves nothing to encode")
        cls.check_queries(spec)
        for field, part in _parts(spec):
            with within(field):
                _registry(field).load(part.name).check(part)

    @classmethod
    def check_queries(cls, spec: Spec) -> None:
        """Raises `SpecError` if the model is not there: queries need no recogniser."""
        with within("text"):
            MiniLM.check(spec.text)

    @classmethod
    def wants(cls, spec: Spec) -> tuple[str, ...]:
        """Text, and what the recognisers read; of those that look items up, the ids."""
        wanted = [_registry(field).load(part.name).wants(part) for field, part in _parts(spec)]
        read = [name for names in wanted for name in names or ("item_id",)]
        return tuple(dict.fromkeys(["text", *read]))

    @classmethod
    def attention(cls, spec: Spec) -> Attention | None:
        """That of the text encoder."""
        return MiniLM.attention(spec.text)

    @classmethod
    def columns_prefix(cls, spec: Spec) -> str:
        """That of the text encoder, whose vectors these are."""
        return spec.text.name

    @classmethod
    def has_remarks(cls, spec: Spec) -> bool:
        """Returns whether files stand in for a recogniser."""
        return any(_registry(field).load(part.name).has_ids for field, part in _parts(spec))

    @classmethod
    def remarks(cls, spec: Spec, ids: Callable[[], Iterable[str]]) -> list[str]:
        """Reports the ids in files of precomputed text or speech that belong to no item."""
        found = []
        for field, part in _parts(spec):
            number, some = _registry(field).load(part.name).unmatched(part, ids())
            if number:
                path = getattr(part, "path", part.name)
                more = ", ..." if number > len(some) else ""
                found.append(
                    f"{field}: {number:,} ids of {path} belong to no item: {', '.join(some)}{more}"
                )
        return found

    @classmethod
    def preparer(cls, spec: Spec) -> Callable[[pa.Table], pa.Table]:
        """Gives items their words in `text` and the columns of `Words`, and drops their payload."""
        return _Recognition(spec).recognise

    def encode(
        self, items: pa.Table, taps: Sequence[Tap] = ()
    ) -> Iterator[tuple[np.ndarray, TokenBatch]]:
        """MiniLM's tokens of the column `text`; an item without a word has none."""
        if "text" not in items.column_names:
            items = pa.table({"text": pa.nulls(items.num_rows, pa.string())})
        for rows, batch in self._minilm.encode(items, taps):
            if batch.extents is None:
                shape = (*batch.mask.shape, 6)
                extents = torch.full(shape, torch.nan, device=batch.mask.device)
                batch = dataclasses.replace(batch, extents=extents)
            # Of a text without a word MiniLM keeps its pooled vector.
            is_word = batch.mask
            if batch.spans is not None:
                is_word = is_word & (batch.spans[..., 0] >= 0)
            has_words = is_word.any(dim=1)
            yield rows, dataclasses.replace(batch, mask=batch.mask & has_words.unsqueeze(1))

    def encode_queries(self, texts: Sequence[str]) -> EncodedQueries:
        """Encodes query texts, in order, as MiniLM does.

        Raises:
            ValueError: there is no query, or one is empty or has no token.
        """
        return self._minilm.encode_queries(texts)


def _parts(spec: Transcript.Spec) -> list[tuple[str, config.ComponentSpec]]:
    """The recognisers of a spec, by their fields."""
    return [(f, part) for f in ("ocr", "speech") if (part := getattr(spec, f)) is not None]


def _registry(field: str) -> Registry[Recogniser[Any]]:
    return {"ocr": OCR, "speech": SPEECH}[field]


class _Recognition:
    """The recognisers of a spec over items."""

    def __init__(self, spec: Transcript.Spec):
        self._ocr, self._speech = (
            None if part is None else registry.build(part)
            for registry, part in ((OCR, spec.ocr), (SPEECH, spec.speech))
        )

    def recognise(self, items: pa.Table) -> pa.Table:
        """The items with their words in `text` and the columns of `Words`, payload left out."""
        # Row by row: the pictures of one item may be large.
        read = (*ITEM.names, "word_spans", "word_boxes", *PAYLOAD)
        columns = [name for name in read if name in items.column_names]
        transcripts = [
            self._transcribe({name: items[name][row].as_py() for name in columns})
            for row in range(items.num_rows)
        ]
        added = {
            "text": (pa.string(), [t.text or None for t in transcripts]),
            "word_spans": (WORD_SPANS, [t.spans for t in transcripts]),
            "word_boxes": (WORD_BOXES, [t.boxes for t in transcripts]),
            "word_times": (WORD_TIMES, [t.times for t in transcripts]),
            "word_kinds": (WORD_KINDS, [t.kinds for t in transcripts]),
            "word_confidences": (WORD_CONFIDENCES, [t.confidences for t in transcripts]),
        }
        items = items.drop_columns([name for name in PAYLOAD if name in items.column_names])
        for name, (type, values) in added.items():
            column = pa.array(values, type)
            if name in items.column_names:
                items = items.set_column(items.column_names.index(name), name, column)
            else:
                items = items.append_column(name, column)
        return items

    def _transcribe(self, item: dict[str, Any]) -> _Transcript:
        transcript = _Transcript(item)
        if self._ocr is not None and not transcript.text:
            transcript.add(self._ocr.lines(item))
        if self._speech is not None:
            transcript.add(self._speech.lines(item))
        return transcript


class _Transcript:
    """The text of an item and its words: characters, boxes, times, kinds and confidences.

    Begins with what the item brings itself: its text, and where its words are if it tells that.
    """

    def __init__(self, item: dict[str, Any]):
        text = item.get("text") or ""
        self._parts = [text] if text.strip() else []
        self._length = len(text) if self._parts else 0
        self.spans = list(item.get("word_spans") or []) if self._parts else []
        nowhere = [[np.nan] * 4] * len(self.spans)
        self.boxes = list(item.get("word_boxes") or nowhere) if self.spans else []
        self.times: list[Sequence[float]] = [[np.nan] * 2] * len(self.spans)
        self.kinds = [TEXT] * len(self.spans)
        self.confidences = [np.nan] * len(self.spans)

    @property
    def text(self) -> str:
        """What has been put together so far."""
        return "".join(self._parts)

    def add(self, lines: Sequence[Line]) -> None:
        """Puts lines behind the text, with an empty line between."""
        gap = "\n\n" if self._parts else ""
        for line in lines:
            for word in line.words:
                self._parts += [gap, word.text]
                start = self._length + len(gap)
                self._length = start + len(word.text)
                self.spans.append((start, self._length))
                self.boxes.append(word.box)
                self.times.append(word.times)
                self.kinds.append(word.kind)
                self.confidences.append(word.confidence)
                gap = " "
            gap = "\n"
