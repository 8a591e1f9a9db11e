"""ColBERT: late interaction of texts, one projected vector a token (Khattab and Zaharia, 2020).

Checkpoints are those of the original code, such as `colbert-ir/colbertv2.0`, and of PyLate, such as
`lightonai/GTE-ModernColBERT-v1`, over BERT or ModernBERT.
"""

from __future__ import annotations

import dataclasses
import json
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from pydantic import Field, field_validator
from transformers import AutoModel, AutoTokenizer, PretrainedConfig, PreTrainedModel

from pipeline import config
from pipeline.config import SpecError
from pipeline.encoders import Attention
from pipeline.encoders.layers import attention_info
from pipeline.encoders.loading import (
    NOT_IN_FINGERPRINTS,
    SETTINGS,
    TOKENIZER_FILES,
    WEIGHTS,
    CheckpointSpec,
    check_checkpoint,
    fingerprint_of,
    folder_of,
    hashed,
    linear_in,
    load_model,
    load_processor,
    require_one_of,
    settings_of,
)
from pipeline.encoders.model_inputs import ModelInput
from pipeline.encoders.reader import Reader
from pipeline.encoders.sequences import SequenceEncoder
from pipeline.encoders.words import Words
from pipeline.taps import Tap
from pipeline.tokens import PROMPT, SPECIAL, TEXT, TokenBatch

TYPES = ("bert", "modernbert")
#: What says how a checkpoint is to be used: of PyLate, and of the original code.
PYLATE, ORIGINAL = "config_sentence_transformers.json", "artifact.metadata"
MODULES = "modules.json"
USAGE = [PYLATE, ORIGINAL, MODULES, "*_Dense/config.json"]
#: A linear layer without an activation behind it.
IDENTITY = "torch.nn.modules.linear.Identity"


class ColBERT(SequenceEncoder["ColBERT.Spec"]):
    """One vector a token of a text: a BERT's last states through a linear projection.

    A document is `[CLS]`, its marker, its tokens and `[SEP]`, all of which are kept but those of
    the skiplist. One longer than `document_length` is read in windows one behind the other, each
    with marks of its own: the item has every token of its text once, the marks at the beginning
    from its first window and the one at the end from its last. An item without text has no token.

    A query is read likewise and filled up to `query_length` with `[MASK]`, whose vectors count in
    MaxSim. A query longer than that is read whole and not filled up.

    Of a single row of the attention a token gets the less the longer its window is, so `eos_row` is
    scaled by the length of the window over that of the item's longest.
    """

    class Spec(CheckpointSpec):
        """Which checkpoint, and how queries and documents are put to it.

        Attributes:
            query_prefix, document_prefix: the marker behind `[CLS]`: a word of the vocabulary, or a
                text; null: the checkpoint's own, or `[unused0]` and `[unused1]`.
            query_length: tokens to which a query is filled up, marks included; null: the
                checkpoint's own, or 32.
            document_length: tokens of a window, marks included; null: the checkpoint's own, or 180.
            augment: whether queries are filled up; null: as the checkpoint says, or true.
            attend_to_augmentation: whether the other tokens of a query see what fills it up; null:
                as the checkpoint says, or false.
            overlong: "windows" reads a long document to its end; "truncate" its first window
                alone, as the original does.
            skiplist: words of the vocabulary whose tokens are not kept of documents; null: the
                checkpoint's own, or punctuation.
            projection: a folder with a projection in a safetensors file, `weight` and perhaps
                `bias`, in place of the checkpoint's own.
        """

        name: Literal["colbert"] = "colbert"
        # The tokens that fill up a query are not seen and yet have vectors; the flash kernel would
        # leave them out.
        attention: Literal["sdpa", "eager"] = "sdpa"
        query_prefix: str | None = None
        document_prefix: str | None = None
        query_length: int | None = Field(None, ge=1)
        document_length: int | None = Field(None, ge=1)
        augment: bool | None = None
        attend_to_augmentation: bool | None = None
        overlong: Literal["windows", "truncate"] = "windows"
        skiplist: tuple[str, ...] | None = None
        projection: str | None = None

        @field_validator("projection")
        @classmethod
        def _make_absolute(cls, projection: str | None) -> str | None:
            # Actors run in other working directories.
            return None if projection is None else config.absolute(projection)

    needs = ("text",)
    prepares = False
    nothing = "no text"
    normalised = True
    pooled_dim = None
    has_spans = True
    has_extents = True  # of items whose words have places

    def __init__(self, spec: Spec, device_map: str | None = None):
        super().__init__(spec, device_map)
        layers = projection_of(spec)
        self._projection = torch.nn.Sequential(*layers).to(self.device, self.model.dtype)
        self.dim = layers[-1].out_features
        usage = Usage.of(spec)
        # Nulls and what they stand for give the same queries; documents are none.
        ignored = {field.name for field in dataclasses.fields(Usage)} | {"overlong", "projection"}
        self.fingerprint = fingerprint_of(
            spec,
            ignored=(*NOT_IN_FINGERPRINTS, *ignored),
            usage=usage.of_queries(),
            projection=[hashed(folder, WEIGHTS) for folder in projection_folders(spec)],
        )

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Raises `SpecError` if the checkpoint is not there, is none, or lacks what is asked."""
        settings = check_checkpoint(spec, *TYPES)
        reader = cls.reader(spec)
        most = settings.max_position_embeddings
        for field in ("query_length", "document_length"):
            value = getattr(reader.usage, field)
            if value > most:
                raise SpecError(field, value, f"at most {most} (the model's positions)")
        least = reader.num_marks + 1
        if reader.usage.document_length < least:
            rule = f"at least {least} (one token between the marker tokens)"
            raise SpecError("document_length", reader.usage.document_length, rule)
        if Path(spec.model).is_dir() or spec.projection is not None:
            projection_of(spec)  # of a model on the hub, the weights are not there yet

    @classmethod
    def attention(cls, spec: Spec) -> Attention:
        """Column sums, and the row of the token at the end; it has no pooled vector."""
        return attention_info(check_checkpoint(spec, *TYPES), ("column_sums", "eos_row"))

    @classmethod
    def preparer(cls, spec: Spec) -> Callable[[pa.Table], pa.Table]:
        """Nothing: texts are quickly read, and `encode` needs to know where their words are."""
        return lambda items: items

    @classmethod
    def load(cls, spec: Spec, device_map: str | None) -> PreTrainedModel:
        """The model without its projection."""
        return load_model(spec, AutoModel, device_map, may_lack=("pooler.",))

    @classmethod
    def reader(cls, spec: Spec) -> ColBERTReader:
        """What reads texts and queries."""
        return ColBERTReader(spec)

    def encode(
        self, items: pa.Table, taps: Sequence[Tap] = ()
    ) -> Iterator[tuple[np.ndarray, TokenBatch]]:
        """Encodes the column `text`, items of like length together.

        With the columns of `Words` (pages, transcripts) each token gets the place and the kind of
        its word.
        """
        words = Words.of(items) if "word_spans" in items.column_names else None
        for rows, batch in super().encode(items, taps):
            if words is not None:
                batch = words.place(rows, batch)
            yield rows, batch

    def forward(
        self, inputs: dict[str, torch.Tensor], mask_BL: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """The projected states."""
        states = self.model(inputs["input_ids"], attention_mask=inputs["seen"]).last_hidden_state
        # In training the model has float32 master weights, whatever the dtype of the spec.
        return self._projection(states.to(self._projection[0].weight.dtype)), None

    def _assemble(
        self,
        items: Sequence[Sequence[ModelInput]],
        flat: Mapping[str, torch.Tensor],
        taps: Sequence[Tap],
    ) -> TokenBatch:
        scaled = dict(flat)
        rows = [tap.name for tap in taps if tap.statistic == "eos_row" and tap.name in flat]
        if rows:
            shares = [
                torch.full((int(window.keep.sum()),), len(window) / max(map(len, windows)))
                for windows in items
                for window in windows
            ]
            shares_T = torch.cat(shares).to(self.device)
            scaled |= {name: flat[name] * shares_T for name in rows}
        return super()._assemble(items, scaled, taps)


@dataclass(frozen=True)
class Usage:
    """How queries and documents are put to a model; see `ColBERT.Spec`."""

    query_prefix: str
    document_prefix: str
    query_length: int
    document_length: int
    augment: bool
    attend_to_augmentation: bool
    skiplist: tuple[str, ...]

    @classmethod
    def of(cls, spec: ColBERT.Spec) -> Usage:
        """What the spec says, else the checkpoint, else the original code.

        Raises:
            SpecError: what the checkpoint says cannot be read.
        """
        folder = folder_of(spec, USAGE)
        pylate, original = (_json(spec, folder / name) or {} for name in (PYLATE, ORIGINAL))
        punctuation = tuple(string.punctuation)
        values = {
            "query_prefix": (pylate.get("query_prefix"), original.get("query_token_id")),
            "document_prefix": (pylate.get("document_prefix"), original.get("doc_token_id")),
            "query_length": (pylate.get("query_length"), original.get("query_maxlen")),
            "document_length": (pylate.get("document_length"), original.get("doc_maxlen")),
            "augment": (pylate.get("do_query_expansion"),),
            "attend_to_augmentation": (
                pylate.get("attend_to_expansion_tokens"),
                original.get("attend_to_mask_tokens"),
            ),
            "skiplist": (
                pylate.get("skiplist_words"),
                () if original.get("mask_punctuation") is False else None,
            ),
        }
        last = cls("[unused0]", "[unused1]", 32, 180, True, False, punctuation)
        found = {
            name: next(
                value
                for value in (getattr(spec, name), *given, getattr(last, name))
                if value is not None
            )
            for name, given in values.items()
        }
        return cls(**found | {"skiplist": tuple(found["skiplist"])})

    def of_queries(self) -> dict[str, Any]:
        """Those that change what a query is."""
        names = ("query_prefix", "query_length", "augment", "attend_to_augmentation")
        return {name: getattr(self, name) for name in names}


class ColBERTReader(Reader["ColBERT.Spec"]):
    """Texts through the checkpoint's tokenizer, with marks around them.

    Special tokens that are spelled out in a text are its own characters.
    """

    def __init__(self, spec: ColBERT.Spec):
        super().__init__(spec)
        self.usage = Usage.of(spec)
        require_one_of(spec, TOKENIZER_FILES)
        tokenizer = load_processor(spec, AutoTokenizer)
        if not tokenizer.is_fast:
            rule = "a model with a fast tokenizer (one that gives character offsets)"
            raise SpecError("model", spec.model, rule, "has none")
        for name in ("cls_token_id", "sep_token_id", "mask_token_id"):
            if getattr(tokenizer, name) is None:
                rule = f"a model whose tokenizer has a {name.removesuffix('_id')}"
                raise SpecError("model", spec.model, rule, "has none")
        self.tokenizer = tokenizer
        self.most = settings_of(spec, folder_of(spec, SETTINGS)).max_position_embeddings
        self._query_marker = self._ids_of(self.usage.query_prefix)
        self._document_marker = self._ids_of(self.usage.document_prefix)
        words = tokenizer.convert_tokens_to_ids(list(self.usage.skiplist))
        numbers = sorted(set(words) - {tokenizer.unk_token_id, None})
        self._skipped = torch.tensor(numbers, dtype=torch.int64)

    @property
    def num_marks(self) -> int:
        """Tokens around a document's own."""
        return len(self._document_marker) + 2

    def _ids_of(self, marker: str) -> list[int]:
        """The ids of a marker: of a word of the vocabulary that, of another text its tokens'."""
        number = self.tokenizer.get_vocab().get(marker)
        if number is not None:
            return [number]
        return self.tokenizer(marker, add_special_tokens=False)["input_ids"]

    def item(self, item: Mapping[str, Any]) -> list[ModelInput]:
        """A sequence a window; none of a text without a token."""
        ids, spans = self._tokens_of(item["text"] or "")
        room = self.usage.document_length - self.num_marks
        starts = range(0, len(ids), room)
        if self.spec.overlong == "truncate":
            starts = starts[:1]
        return [
            self._window(
                ids[start : start + room],
                spans[start : start + room],
                is_first=start == 0,
                is_last=start == starts[-1],
            )
            for start in starts
        ]

    def _window(
        self, ids: torch.Tensor, spans: torch.Tensor, is_first: bool, is_last: bool
    ) -> ModelInput:
        read = self._marked(self._document_marker, ids, spans)
        read.keep[: self.num_marks - 1] = is_first
        read.keep[-1] = is_last
        is_skipped = torch.isin(read.sequence["input_ids"], self._skipped)
        read.keep[is_skipped & (read.kind == TEXT)] = False  # a marker may be spelled like a word
        return read

    def _marked(self, marker: list[int], ids: torch.Tensor, spans: torch.Tensor) -> ModelInput:
        """A text's tokens and the marks around them."""
        begin = torch.tensor([self.tokenizer.cls_token_id, *marker])
        every = torch.cat([begin, ids, torch.tensor([self.tokenizer.sep_token_id])])
        kind = torch.full((len(every),), TEXT)
        kind[0] = kind[-1] = SPECIAL
        kind[1 : len(begin)] = PROMPT
        nowhere = torch.full((1, 2), -1)
        all_spans = torch.cat([nowhere.expand(len(begin), 2), spans, nowhere])
        sequence = {"input_ids": every, "seen": torch.ones_like(every)}
        return ModelInput.of(sequence, {}, kind, spans=all_spans)

    def _tokens_of(self, text: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids of a text's tokens, and the characters of each without the space before it."""
        read = self.tokenizer(
            text,
            add_special_tokens=False,
            split_special_tokens=True,
            return_offsets_mapping=True,
            verbose=False,
        )
        spans = [
            (stop - (len(text[start:stop].lstrip()) or stop - start), stop)
            for start, stop in read["offset_mapping"]
        ]
        return (
            torch.tensor(read["input_ids"], dtype=torch.int64),
            torch.tensor(spans, dtype=torch.int32).reshape(-1, 2),
        )

    def text(self, text: str) -> tuple[ModelInput, list[str]]:
        """A query, filled up.

        Raises:
            SpecError: the model has no place for that many tokens, or the text has none.
        """
        ids, spans = self._tokens_of(text)
        if not len(ids):
            raise SpecError("query", text, "a text with at least one token")
        read = self._marked(self._query_marker, ids, spans)
        if len(read) > self.most:
            rule = f"a text of at most {self.most} tokens with its marker tokens"
            raise SpecError("query", text, rule, f"has {len(read)} tokens")
        missing = max(0, self.usage.query_length - len(read)) if self.usage.augment else 0
        mask = self.tokenizer.mask_token_id
        sequence = {
            "input_ids": _longer(read.sequence["input_ids"], missing, mask),
            "seen": _longer(read.sequence["seen"], missing, int(self.usage.attend_to_augmentation)),
        }
        kind, spans = _longer(read.kind, missing, SPECIAL), _longer(read.spans, missing, -1)
        names = self.tokenizer.convert_ids_to_tokens(sequence["input_ids"].tolist())
        shown = [
            text[start:stop] if start >= 0 else name
            for (start, stop), name in zip(spans.tolist(), names, strict=True)
        ]
        return ModelInput.of(sequence, {}, kind, spans=spans), shown


def _longer(tensor: torch.Tensor, number: int, fill: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_full((number, *tensor.shape[1:]), fill)])


def projection_folders(spec: ColBERT.Spec) -> list[Path]:
    """Where the projection's layers lie, in order: that of the spec, PyLate's, or the model's.

    Raises:
        SpecError: a layer of PyLate's has an activation.
    """
    if spec.projection is not None:
        return [Path(spec.projection)]
    folder = folder_of(spec, [*USAGE, *WEIGHTS])
    modules = _json(spec, folder / MODULES) or []
    found = [folder / one["path"] for one in modules if one["type"].endswith(".Dense")]
    for part in found:
        settings = _json(spec, part / "config.json") or {}
        activation = settings.get("activation_function", IDENTITY)
        if activation != IDENTITY or settings.get("use_residual"):
            rule = "a checkpoint whose projection is linear"
            raise SpecError("model", spec.model, rule, f"has a different {part.name}")
    return found or [folder]


def projection_of(spec: ColBERT.Spec) -> list[torch.nn.Linear]:
    """The layers between the model's states and the vectors.

    Raises:
        SpecError: there is none, or they do not fit the model or each other.
    """
    is_own = spec.projection is not None
    field = "projection" if is_own else "model"
    value = spec.projection or spec.model
    settings: PretrainedConfig = settings_of(spec, folder_of(spec, SETTINGS))
    width, layers = settings.hidden_size, []
    for folder in projection_folders(spec):
        layer = linear_in(folder, width, field, value, prefix="" if is_own else "linear.")
        layers.append(layer.requires_grad_(False))
        width = layer.out_features
    return layers


def _json(spec: ColBERT.Spec, path: Path) -> Any:
    """What a file of a checkpoint says; None: it is not there.

    Raises:
        SpecError: it is no JSON.
    """
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError:
        rule = f"a checkpoint with a valid {path.name}"
        raise SpecError("model", spec.model, rule, "has an invalid one") from None
