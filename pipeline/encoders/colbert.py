"""ColBERT, a late-interaction model for texts (Khattab and Zaharia, 2020).

Supported checkpoints are those of the original code, such as `colbert-ir/colbertv2.0`, and of
PyLate, such as `lightonai/GTE-ModernColBERT-v1`, based on BERT or ModernBERT.
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
import safetensors.torch
import torch
from pydantic import Field, field_validator
from transformers import AutoModel, AutoTokenizer, PretrainedConfig, PreTrainedModel

from pipeline import config
from pipeline.config import SpecError
from pipeline.encoders import AttentionInfo, check_query_size
from pipeline.encoders.appended import AppendedTokens, AppendedTokensSpec
from pipeline.encoders.layers import attention_info
from pipeline.encoders.loading import (
    NOT_IN_FINGERPRINTS,
    SETTINGS,
    TOKENIZER_FILES,
    WEIGHTS,
    CheckpointSpec,
    check_checkpoint,
    check_tokenizer,
    checkpoint_fingerprint,
    checkpoint_folder,
    hash_files,
    load_json,
    load_linear,
    load_model,
    load_model_config,
    load_processor,
    require_one_of,
    weight_files,
)
from pipeline.encoders.model_inputs import ModelInput
from pipeline.encoders.reader import Reader
from pipeline.encoders.sequences import SequenceEncoder
from pipeline.encoders.templates import (
    PROMPTS_FILE,
    TemplateSpec,
    check_declared,
    check_special_tokens,
    prompt_texts,
)
from pipeline.encoders.tokenizing import TOKENIZER_LOCK
from pipeline.encoders.trained import appended_hashes, check_appended_tokens, check_positions
from pipeline.encoders.words import Words
from pipeline.taps import Tap
from pipeline.tokens import PROMPT, SPECIAL, TEXT, TokenBatch

TYPES = ("bert", "modernbert")
#: Configuration files of PyLate and of the original code.
PYLATE, ORIGINAL = PROMPTS_FILE, "artifact.metadata"
MODULES = "modules.json"
USAGE = [PYLATE, ORIGINAL, MODULES, "*_Dense/config.json"]
#: Names of the fields of `Usage` in these two files.
SETTING_NAMES = {
    "query_prefix": ("query_prefix", "query_token_id"),
    "document_prefix": ("document_prefix", "doc_token_id"),
    "query_length": ("query_length", "query_maxlen"),
    "document_length": ("document_length", "doc_maxlen"),
    "augment": ("do_query_expansion", ""),
    "attend_to_augmentation": ("attend_to_expansion_tokens", "attend_to_mask_tokens"),
    "skiplist": ("skiplist_words", "skiplist"),
}
#: Activation of a linear layer in PyLate's configuration.
LINEAR = "torch.nn.modules.linear.Identity"
#: Types of modules in PyLate's list.
TRANSFORMERS, PYLATE_DENSE = "sentence_transformers.models", "pylate.models.Dense.Dense"
#: Value of `projection` for hidden states as token vectors.
IDENTITY = "identity"


class ColBERT(SequenceEncoder["ColBERT.Spec"]):
    """Text encoder that projects the last hidden states of a BERT model to one vector per token.

    A document consists of `[CLS]`, its marker token, its text tokens and `[SEP]`. All of them are
    kept except those in the skiplist. A document longer than `document_length` is split into
    consecutive windows, each with marker and special tokens. The item has each text token once, the
    leading special tokens of its first window and the `[SEP]` of its last. An item without text has
    no tokens.

    A query has the same form and is padded to `query_length` with `[MASK]` tokens, whose vectors
    contribute to MaxSim (query augmentation). A longer query is neither truncated nor padded.

    Attention received from a single row decreases with the window length, so `eos_row` is
    multiplied by the ratio of the window length to that of the item's longest window.
    """

    class Spec(TemplateSpec, AppendedTokensSpec, CheckpointSpec):
        """Checkpoint, and the formatting of queries and documents."""

        name: Literal["colbert"] = "colbert"
        # No flash attention: its kernel skips masked positions, but the masked augmentation tokens
        # of a query have vectors.
        attention: Literal["sdpa", "eager"] = "sdpa"
        query_prefix: str | None = None
        """Marker after the `[CLS]` of queries, a vocabulary entry or a text. Null: the checkpoint's
        marker, or `[unused0]`.
        """
        document_prefix: str | None = None
        """Marker after the `[CLS]` of documents, a vocabulary entry or a text. Null: the
        checkpoint's marker, or `[unused1]`.
        """
        query_length: int | None = Field(None, ge=1)
        """Number of tokens to which queries are padded, including markers. Null: the checkpoint's
        value, or 32.
        """
        document_length: int | None = Field(None, ge=1)
        """Maximum number of tokens per window of a document, including markers. Null: the
        checkpoint's value, or 180.
        """
        augment: bool | None = None
        """Pad queries with `[MASK]` tokens (query augmentation). Null: the checkpoint's value, or
        true.
        """
        attend_to_augmentation: bool | None = None
        """Let the other tokens of a query attend to its `[MASK]` tokens. Null: the checkpoint's
        value, or false.
        """
        overlong: Literal["windows", "truncate"] = "windows"
        """Encode all "windows" of a long document, or "truncate" it to the first, as the original
        code does.
        """
        skiplist: tuple[str, ...] | None = None
        """Vocabulary entries whose tokens are dropped from documents. Null: those of the
        checkpoint, or punctuation.
        """
        projection: str | None = None
        """Folder with a projection in a safetensors file, `weight` and optionally `bias`; or
        "identity", for hidden states as token vectors, as of a single-vector BERT. Null: the
        checkpoint's projection.
        """

        @field_validator("projection")
        @classmethod
        def _make_absolute(cls, projection: str | None) -> str | None:
            # Actors have other working directories.
            return projection if projection in (None, IDENTITY) else config.absolute(projection)

    default_inputs = ("text",)
    has_preprocessor = False
    empty_reason = "no text"
    pooled_dim = None
    has_spans = True
    has_extents = True  # for items with word locations

    def __init__(self, spec: Spec, device_map: str | None = None):
        super().__init__(spec, device_map)
        layers = load_projection(spec)
        self._projection = torch.nn.Sequential(*layers).to(self.device, self.model.dtype)
        self.head = self._projection if layers else None
        self.dim = layers[-1].out_features if layers else self.model.config.hidden_size
        usage = Usage.resolve(spec)
        # Resolved values are hashed instead of null. Settings of documents do not affect queries.
        ignored = {field.name for field in dataclasses.fields(Usage)} | {"overlong", "projection"}
        self.fingerprint = checkpoint_fingerprint(
            spec,
            ignored=(*NOT_IN_FINGERPRINTS, *ignored),
            usage=usage.query_settings(),
            projection=[hash_files(folder, WEIGHTS) for folder in projection_folders(spec)],
            **appended_hashes(spec),
        )

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Checks that the checkpoint exists and supports the settings of the spec."""
        settings = check_checkpoint(spec, *TYPES)
        reader = cls.reader(spec)
        max_positions = settings.max_position_embeddings
        smallest = {"query_length": 1, "document_length": reader.num_markers + 1}
        for field, low in smallest.items():
            value = getattr(reader.usage, field)
            if not low <= value <= max_positions:
                rule = f"from {low} to {max_positions} (the maximum length of the model)"
                raise SpecError(field, value, rule)
        size = reader.usage.document_length
        check_appended_tokens(spec, settings.hidden_size, "document_length", size, max_positions)
        if Path(spec.model).is_dir() or spec.projection is not None:
            load_projection(spec)  # the weights of a hub model may not have been downloaded yet

    @classmethod
    def attention(cls, spec: Spec) -> AttentionInfo:
        """Returns column sums and the row of the last token."""
        return attention_info(check_checkpoint(spec, *TYPES), ("column_sums", "eos_row"), spec)

    @classmethod
    def preprocessor(cls, spec: Spec) -> Callable[[pa.Table], pa.Table]:
        """Returns the identity: tokenisation is fast, and `encode` needs the locations of words."""
        return lambda items: items

    @classmethod
    def load(cls, spec: Spec, device_map: str | None) -> PreTrainedModel:
        """Loads the model without its projection."""
        return load_model(spec, AutoModel, device_map, optional_weights=("pooler.", "linear."))

    @classmethod
    def weight_files(cls, spec: Spec) -> list[Path]:
        """Returns the weight files of the model, its adapter and its projection."""
        return weight_files(spec, *projection_folders(spec))

    def save(self, folder: Path) -> None:
        """Saves the model, its tokenizer, its projection and the formatting of texts, as PyLate."""
        self.model.save_pretrained(folder)
        self.reader(self.spec).tokenizer.save_pretrained(folder)
        settings = Usage.resolve(self.spec).pylate_settings()
        (folder / PYLATE).write_text(json.dumps(settings, indent=1), "utf-8")
        if not len(self._projection):
            return
        modules = [{"idx": 0, "name": "0", "path": "", "type": f"{TRANSFORMERS}.Transformer"}]
        for number, layer in enumerate(self._projection, start=1):
            path = folder / f"{number}_Dense"
            path.mkdir()
            weights = {f"linear.{name}": t.cpu() for name, t in layer.state_dict().items()}
            safetensors.torch.save_file(weights, path / "model.safetensors")
            dense = {"activation_function": LINEAR, "bias": "linear.bias" in weights}
            dense |= {"in_features": layer.in_features, "out_features": layer.out_features}
            (path / "config.json").write_text(json.dumps(dense, indent=1), "utf-8")
            modules.append(
                {"idx": number, "name": str(number), "path": path.name, "type": PYLATE_DENSE}
            )
        (folder / MODULES).write_text(json.dumps(modules, indent=1), "utf-8")

    @classmethod
    def reader(cls, spec: Spec) -> ColBERTReader:
        """Returns the reader of documents and queries."""
        return ColBERTReader(spec)

    def append_tokens(self, tokens: AppendedTokens) -> None:
        """Appends learned tokens to each window of an item, in place of those of the spec.

        Raises:
            SpecError: For `document_length`: the tokens exceed the positions of the model.
        """
        size = self.reader(self.spec).usage.document_length
        limit = self.model.config.max_position_embeddings
        check_positions(len(tokens), "document_length", size, limit)
        super().append_tokens(tokens)

    def encode(
        self, items: pa.Table, taps: Sequence[Tap] = ()
    ) -> Iterator[tuple[np.ndarray, TokenBatch]]:
        """Encodes the column `text`, with extents and kinds of words if it has those of `Words`."""
        words = Words.from_items(items) if "word_spans" in items.column_names else None
        for rows, batch in super().encode(items, taps):
            if words is not None:
                batch = words.annotate(rows, batch)
            yield rows, batch

    def forward(
        self, inputs: dict[str, torch.Tensor], mask_BL: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Returns the projected hidden states."""
        states = self.model(
            inputs["input_ids"], attention_mask=inputs["attended"]
        ).last_hidden_state
        if len(self._projection):
            # In training the model has float32 master weights, regardless of the spec's dtype.
            states = self._projection(states.to(self._projection[0].weight.dtype))
        return states, None

    def _assemble(
        self,
        items: Sequence[Sequence[ModelInput]],
        flat: Mapping[str, torch.Tensor],
        taps: Sequence[Tap],
    ) -> TokenBatch:
        scaled = dict(flat)
        rows = [tap.name for tap in taps if tap.statistic == "eos_row" and tap.name in flat]
        if rows:
            ratios = [
                torch.full((int(window.keep.sum()),), len(window) / max(map(len, windows)))
                for windows in items
                for window in windows
            ]
            ratios_T = torch.cat(ratios).to(self.device)
            scaled |= {name: flat[name] * ratios_T for name in rows}
        return super()._assemble(items, scaled, taps)


@dataclass(frozen=True)
class Usage:
    """Formatting of queries and documents with defaults applied, see `ColBERT.Spec`."""

    query_prefix: str = "[unused0]"
    document_prefix: str = "[unused1]"
    query_length: int = 32
    document_length: int = 180
    augment: bool = True
    attend_to_augmentation: bool = False
    skiplist: tuple[str, ...] = tuple(string.punctuation)

    @classmethod
    def resolve(cls, spec: ColBERT.Spec) -> Usage:
        """Fills in missing fields of a spec from the checkpoint, or else from the original code."""
        folder = checkpoint_folder(spec, USAGE)
        _check_format(spec, folder)
        files = {name: load_json(folder / name, spec.model) or {} for name in (PYLATE, ORIGINAL)}
        if files[ORIGINAL].get("mask_punctuation") is False:
            files[ORIGINAL]["skiplist"] = ()
        resolved: dict[str, Any] = {}
        for field, names in SETTING_NAMES.items():
            value = getattr(spec, field)
            for (origin, settings), name in zip(files.items(), names, strict=True):
                if field in ("query_prefix", "document_prefix"):
                    check_declared(spec, field, getattr(spec, field), settings.get(name), origin)
                value = settings.get(name) if value is None else value
            if value is not None:
                resolved[field] = tuple(value) if field == "skiplist" else value
        return cls(**resolved)

    def query_settings(self) -> dict[str, Any]:
        """Returns the settings that affect queries."""
        names = ("query_prefix", "query_length", "augment", "attend_to_augmentation")
        return {name: getattr(self, name) for name in names}

    def pylate_settings(self) -> dict[str, Any]:
        """Returns the settings under PyLate's names, from which `resolve` reads them."""
        return {names[0]: getattr(self, field) for field, names in SETTING_NAMES.items()}


class ColBERTReader(Reader["ColBERT.Spec"]):
    """Reader of texts that adds marker and special tokens.

    Special tokens spelled out in a text are plain text.
    """

    def __init__(self, spec: ColBERT.Spec):
        super().__init__(spec)
        self.usage = Usage.resolve(spec)
        require_one_of(spec, TOKENIZER_FILES)
        tokenizer = load_processor(spec, AutoTokenizer)
        check_tokenizer(spec.model, tokenizer, "cls_token", "sep_token", "mask_token")
        self.tokenizer = tokenizer
        folder = checkpoint_folder(spec, SETTINGS)
        self.max_positions = load_model_config(spec.model, folder).max_position_embeddings
        for field in ("query_prefix", "document_prefix"):
            marker = getattr(self.usage, field)
            check_special_tokens(field, marker, tokenizer.get_vocab(), spec.model)
        self._query_marker = self._marker_ids(self.usage.query_prefix)
        self._document_marker = self._marker_ids(self.usage.document_prefix)
        skiplist = set(tokenizer.convert_tokens_to_ids(list(self.usage.skiplist)))
        ids = sorted(skiplist - {tokenizer.unk_token_id, None})
        self._skipped_ids = torch.tensor(ids, dtype=torch.int64)

    @property
    def num_markers(self) -> int:
        """Number of marker and special tokens of a document."""
        return len(self._document_marker) + 2

    def _marker_ids(self, marker: str) -> list[int]:
        """Returns the id of a marker, or the ids of its tokens if the vocabulary lacks it."""
        token_id = self.tokenizer.get_vocab().get(marker)
        if token_id is not None:
            return [token_id]
        return self.tokenizer(marker, add_special_tokens=False)["input_ids"]

    def read_item(self, item: Mapping[str, Any]) -> list[ModelInput]:
        """Splits a text into one sequence per window. A text without tokens has none."""
        ids, spans = self._tokenise(item["text"] or "")
        window = self.usage.document_length - self.num_markers
        starts = range(0, len(ids), window)
        if self.spec.overlong == "truncate":
            starts = starts[:1]
        return [
            self._read_window(
                ids[start : start + window],
                spans[start : start + window],
                is_first=start == 0,
                is_last=start == starts[-1],
            )
            for start in starts
        ]

    def _read_window(
        self, ids: torch.Tensor, spans: torch.Tensor, is_first: bool, is_last: bool
    ) -> ModelInput:
        inputs = self._add_markers(self._document_marker, ids, spans)
        inputs.keep[: self.num_markers - 1] = is_first
        inputs.keep[-1] = is_last
        is_skipped = torch.isin(inputs.sequence["input_ids"], self._skipped_ids)
        # Markers are kept even if they are in the skiplist.
        inputs.keep[is_skipped & (inputs.kind == TEXT)] = False
        return inputs

    def _add_markers(self, marker: list[int], ids: torch.Tensor, spans: torch.Tensor) -> ModelInput:
        begin = torch.tensor([self.tokenizer.cls_token_id, *marker])
        all_ids = torch.cat([begin, ids, torch.tensor([self.tokenizer.sep_token_id])])
        kind = torch.full((len(all_ids),), TEXT)
        kind[0] = kind[-1] = SPECIAL
        kind[1 : len(begin)] = PROMPT
        no_span = torch.full((1, 2), -1)
        all_spans = torch.cat([no_span.expand(len(begin), 2), spans, no_span])
        sequence = {"input_ids": all_ids, "attended": torch.ones_like(all_ids)}
        return ModelInput.create(sequence, {}, kind, spans=all_spans)

    def _tokenise(self, text: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the token ids and spans of a text. Spans exclude the space before a token."""
        with TOKENIZER_LOCK:
            encoded = self.tokenizer(
                text,
                add_special_tokens=False,
                split_special_tokens=True,
                return_offsets_mapping=True,
                verbose=False,
            )
        spans = [
            (stop - (len(text[start:stop].lstrip()) or stop - start), stop)
            for start, stop in encoded["offset_mapping"]
        ]
        return (
            torch.tensor(encoded["input_ids"], dtype=torch.int64),
            torch.tensor(spans, dtype=torch.int32).reshape(-1, 2),
        )

    def read_text_query(self, text: str) -> tuple[ModelInput, list[str]]:
        """Returns the sequence of a query, padded with `[MASK]` tokens."""
        ids, spans = self._tokenise(text)
        if not len(ids):
            raise SpecError("query", text, "a text with at least one token")
        inputs = self._add_markers(self._query_marker, ids, spans)
        check_query_size(text, len(inputs), self.max_positions, " with its marker tokens")
        padding = max(0, self.usage.query_length - len(inputs)) if self.usage.augment else 0
        ids, attended = inputs.sequence["input_ids"], inputs.sequence["attended"]
        sequence = {
            "input_ids": _pad(ids, padding, self.tokenizer.mask_token_id),
            "attended": _pad(attended, padding, int(self.usage.attend_to_augmentation)),
        }
        kind, spans = _pad(inputs.kind, padding, SPECIAL), _pad(inputs.spans, padding, -1)
        names = self.tokenizer.convert_ids_to_tokens(sequence["input_ids"].tolist())
        token_texts = [
            text[start:stop] if start >= 0 else name
            for (start, stop), name in zip(spans.tolist(), names, strict=True)
        ]
        return ModelInput.create(sequence, {}, kind, spans=spans), token_texts


def _check_format(spec: ColBERT.Spec, folder: Path) -> None:
    """Checks that a checkpoint has no settings that only sentence-transformers reads."""
    settings = load_json(folder / PYLATE, spec.model) or {}
    note = "; use the encoder sentence_transformers"
    if settings.get("model_type") == "MultiVectorEncoder":
        rule = "a checkpoint of PyLate or of ColBERT's original code"
        problem = "is in the format of sentence-transformers"
        raise SpecError("model", spec.model, rule, problem, note)
    markers = (settings.get("query_prefix"), settings.get("document_prefix"))
    for prompt, marker in zip(prompt_texts(settings), markers, strict=True):
        if prompt and prompt != marker and not spec.custom_template:
            rule = "a checkpoint without prompts besides its markers"
            raise SpecError("model", spec.model, rule, f"has the prompt {prompt!r}", note)


def _pad(tensor: torch.Tensor, length: int, fill: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_full((length, *tensor.shape[1:]), fill)])


def projection_folders(spec: ColBERT.Spec) -> list[Path]:
    """Returns the folders of the projection's layers, in order.

    They are those of the spec, of PyLate, or of the model, in order of preference.

    Raises:
        SpecError: A PyLate layer is not linear.
    """
    if spec.projection is not None:
        return [] if spec.projection == IDENTITY else [Path(spec.projection)]
    folder = checkpoint_folder(spec, [*USAGE, *WEIGHTS])
    modules = load_json(folder / MODULES, spec.model) or []
    layers = [folder / module["path"] for module in modules if module["type"].endswith(".Dense")]
    for layer in layers:
        settings = load_json(layer / "config.json", spec.model) or {}
        activation = settings.get("activation_function", LINEAR)
        if activation != LINEAR or settings.get("use_residual"):
            rule = "a checkpoint whose projection is linear"
            raise SpecError("model", spec.model, rule, f"has a different {layer.name}")
    return layers or [folder]


def load_projection(spec: ColBERT.Spec) -> list[torch.nn.Linear]:
    """Loads the linear layers between the model's hidden states and the token vectors, if any.

    Raises:
        SpecError: The folder has no layer, or the layers do not fit the model or each other.
    """
    is_replaced = spec.projection is not None
    field = "projection" if is_replaced else "model"
    value = spec.projection or spec.model
    settings: PretrainedConfig = load_model_config(spec.model, checkpoint_folder(spec, SETTINGS))
    width, layers = settings.hidden_size, []
    for folder in projection_folders(spec):
        layer = load_linear(folder, width, field, value, prefix="" if is_replaced else "linear.")
        layers.append(layer.requires_grad_(False))
        width = layer.out_features
    return layers
