"""Default encoder for all modalities, which encodes recognised text with MiniLM.

It needs neither the hub nor a GPU. It finds only words: printed text, and clear English speech with
the default recognisers. A photo without text cannot be indexed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import torch
from pydantic import Field

from pipeline import config
from pipeline.config import SpecError, within
from pipeline.data.recognise import Line, Recogniser, Word
from pipeline.encoders import AttentionInfo, EncodedQueries, Encoder
from pipeline.encoders.minilm import MiniLM
from pipeline.encoders.templates import Templates
from pipeline.registry import OCR, SPEECH, OcrSpec, Registry, SpeechSpec
from pipeline.runtime.progress import counted_rows
from pipeline.schema import ITEM, WORD_BOXES, WORD_CONFIDENCES, WORD_KINDS, WORD_SPANS, WORD_TIMES
from pipeline.taps import Tap
from pipeline.tokens import TEXT, TokenBatch

#: Columns that only recognisers read.
PAYLOAD = ("scan", "frames", "audio")


class Transcript(Encoder["Transcript.Spec"]):
    """Encodes the words in text layers, images and audio with MiniLM.

    `preprocessor` converts an item to text: its own text if it has any, otherwise the text that OCR
    recognises, followed by an empty line and the recognised speech. If the source passes an image
    to OCR although the item has a text, such as a scanned page with a stamp, the words that OCR
    finds in other places follow the text. `encode` encodes that text.
    Each token has the box and times of its word and the kind `TEXT` or `AUDIO`. An item without
    words has no tokens.

    The vectors are in the same space as those of the encoder `minilm` with equal settings.
    """

    class Spec(config.ComponentSpec):
        """The text encoder and the recognisers."""

        name: Literal["transcript"] = "transcript"
        text: MiniLM.Spec = MiniLM.Spec()
        """Settings of the text encoder."""
        ocr: OcrSpec = Field("rapidocr", validate_default=True)
        """Text recogniser (OCR) of images and video frames. Null disables OCR."""
        speech: SpeechSpec = Field("pocketsphinx", validate_default=True)
        """Speech recogniser (ASR) of audio. Null disables speech recognition."""

    default_inputs = ()
    has_preprocessor = True
    empty_reason = "no text, no speech"
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
        """Checks that the model and at least one recogniser are available."""
        if not _recognisers(spec):
            rule = "a recogniser, unless `speech` is set or the encoder is minilm"
            raise SpecError("ocr", None, rule, "leaves nothing to encode")
        cls.check_queries(spec)
        for field, part in _recognisers(spec):
            with within(field):
                _registry(field).load(part.name).check(part)

    @classmethod
    def check_queries(cls, spec: Spec) -> None:
        """Checks that the model is available. Queries need no recogniser."""
        with within("text"):
            MiniLM.check(spec.text)

    @classmethod
    def supported_inputs(cls, spec: Spec) -> tuple[str, ...]:
        """Returns `text` and the inputs of the recognisers, none for those that look up ids."""
        wanted = [
            _registry(field).load(part.name).wants(part) for field, part in _recognisers(spec)
        ]
        read = [name for names in wanted for name in names or ("item_id",)]
        return tuple(dict.fromkeys(["text", *read]))

    @classmethod
    def query_kinds(cls, spec: Spec) -> tuple[str, ...]:
        """Returns texts, and audio and videos if a recogniser reads them."""
        read = cls.supported_inputs(spec)
        audio = ("audio",) if "audio" in read else ()
        is_recognised = "audio" in read or "frames" in read
        return ("text", *audio, "video", "composed") if is_recognised else ("text",)

    @classmethod
    def attention(cls, spec: Spec) -> AttentionInfo | None:
        """Returns the attention statistics of the text encoder."""
        return MiniLM.attention(spec.text)

    @classmethod
    def column_prefix(cls, spec: Spec) -> str:
        """Returns the prefix of the text encoder, which computes the vectors."""
        return spec.text.name

    @classmethod
    def has_warnings(cls, spec: Spec) -> bool:
        """Checks whether one of the recognisers reads precomputed results from files."""
        return any(_registry(field).load(part.name).has_ids for field, part in _recognisers(spec))

    @classmethod
    def warnings(cls, spec: Spec, ids: Callable[[], Iterable[str]]) -> list[str]:
        """Returns warnings about ids in files of precomputed results that match no item."""
        found = []
        for field, part in _recognisers(spec):
            number, some = _registry(field).load(part.name).find_unmatched(part, ids())
            if number:
                path = getattr(part, "path", part.name)
                more = ", ..." if number > len(some) else ""
                found.append(
                    f"{field}: {number:,} ids of {path} belong to no item: {', '.join(some)}{more}"
                )
        return found

    @classmethod
    def preprocessor(cls, spec: Spec) -> Callable[[pa.Table], pa.Table]:
        """Returns a function that replaces media columns with `text` and the columns of `Words`."""
        return _Recognition(spec).recognise

    def encode(
        self, items: pa.Table, taps: Sequence[Tap] = ()
    ) -> Iterator[tuple[np.ndarray, TokenBatch]]:
        """Encodes the column `text` with MiniLM. An item without words has no tokens."""
        if "text" not in items.column_names:
            items = pa.table({"text": pa.nulls(items.num_rows, pa.string())})
        for rows, batch in self._minilm.encode(items, taps):
            if batch.extents is None:
                shape = (*batch.mask.shape, 6)
                extents = torch.full(shape, torch.nan, device=batch.mask.device)
                batch = dataclasses.replace(batch, extents=extents)
            # For a text without words, MiniLM returns the pooled vector as a token.
            is_word = batch.mask
            if batch.spans is not None:
                is_word = is_word & (batch.spans[..., 0] >= 0)
            has_words = is_word.any(dim=1)
            yield rows, dataclasses.replace(batch, mask=batch.mask & has_words.unsqueeze(1))

    def with_instruction(self, instruction: str) -> Self:
        """Returns the encoder with an instruction in the query template of the inner encoder."""
        instructed = super().with_instruction(instruction)
        instructed._minilm = self._minilm.with_instruction(instruction)
        return instructed

    def templates(self) -> Templates:
        """Returns the templates of MiniLM."""
        return self._minilm.templates()

    def encode_queries(self, texts: Sequence[str]) -> EncodedQueries:
        """Encodes query texts with MiniLM, in order."""
        return self._minilm.encode_queries(texts)

    def encode_media(self, queries: Sequence[Mapping[str, Any]]) -> EncodedQueries:
        """Encodes the texts of queries and the words that are recognised in their media."""
        texts = [self._recognition.read_query(query) for query in queries]
        encoded = self.encode_queries(texts)
        return dataclasses.replace(encoded, texts=list(texts))

    @functools.cached_property
    def _recognition(self) -> _Recognition:
        return _Recognition(self.spec)


def _recognisers(spec: Transcript.Spec) -> list[tuple[str, config.ComponentSpec]]:
    return [(f, part) for f in ("ocr", "speech") if (part := getattr(spec, f)) is not None]


def _registry(field: str) -> Registry[Recogniser[Any]]:
    return {"ocr": OCR, "speech": SPEECH}[field]


class _Recognition:
    def __init__(self, spec: Transcript.Spec):
        self._ocr, self._speech = (
            None if part is None else registry.build(part)
            for registry, part in ((OCR, spec.ocr), (SPEECH, spec.speech))
        )

    def recognise(self, items: pa.Table) -> pa.Table:
        """Replaces the media columns of items with `text` and the columns of `Words`."""
        # One row at a time, because the images of one item may be large.
        names = (*ITEM.names, "word_spans", "word_boxes", *PAYLOAD)
        columns = [name for name in names if name in items.column_names]
        transcripts = [
            self._transcribe({name: items[name][row].as_py() for name in columns})
            for row in counted_rows(items)
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

    def read_query(self, query: Mapping[str, Any]) -> str:
        """Returns the text of a query, followed by the words that are recognised in its media."""
        words = self._transcribe({**query, "item_id": "", "parent_id": "", "text": None}).text
        if not words:
            rule = "audio with speech, or a video with speech or text"
            raise SpecError("query", "the media", rule, "has no recognised word")
        return "\n".join(filter(None, [query.get("text"), words]))

    def _transcribe(self, item: dict[str, Any]) -> _Transcript:
        transcript = _Transcript(item)
        if self._ocr is not None and (item.get("scan") or not transcript.text):
            transcript.add(self._ocr.lines(item))
        if self._speech is not None:
            transcript.add(self._speech.lines(item))
        return transcript


class _Transcript:
    """Text of an item and the spans, boxes, times, kinds and confidences of its words.

    It starts with the text of the item and, if known, the locations of its words.
    """

    def __init__(self, item: dict[str, Any]):
        text = item.get("text") or ""
        self._parts = [text] if text.strip() else []
        self._length = len(text) if self._parts else 0
        self.spans = list(item.get("word_spans") or []) if self._parts else []
        no_boxes = [[np.nan] * 4] * len(self.spans)
        self.boxes = list(item.get("word_boxes") or no_boxes) if self.spans else []
        self._known_boxes = np.array(self.boxes, np.float64).reshape(-1, 4)
        self.times: list[Sequence[float]] = [[np.nan] * 2] * len(self.spans)
        self.kinds = [TEXT] * len(self.spans)
        self.confidences = [np.nan] * len(self.spans)

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def add(self, lines: Sequence[Line]) -> None:
        """Appends lines after an empty line, without words in the boxes of words of the item."""
        gap = "\n\n" if self._parts else ""
        for line in lines:
            for word in itertools.filterfalse(self._is_known, line.words):
                self._parts += [gap, word.text]
                start = self._length + len(gap)
                self._length = start + len(word.text)
                self.spans.append((start, self._length))
                self.boxes.append(word.box)
                self.times.append(word.times)
                self.kinds.append(word.kind)
                self.confidences.append(word.confidence)
                gap = " "
            gap = "\n" if gap == " " else gap

    def _is_known(self, word: Word) -> bool:
        """Checks whether the middle of a word is in the box of a word of the item."""
        x, y = (word.box[0] + word.box[2]) / 2, (word.box[1] + word.box[3]) / 2
        x0, y0, x1, y1 = self._known_boxes.T
        return bool(((x0 <= x) & (x <= x1) & (y0 <= y) & (y <= y1)).any())
