"""Base class of encoders that process images, audio and text as one token sequence.

A `Reader` turns items into model inputs without loading weights, so it can run in processes ahead
of the GPU. A `SequenceEncoder` runs the model over batches of those inputs.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import pyarrow as pa
import torch
from transformers import PreTrainedModel

from pipeline.config import SpecError
from pipeline.encoders import (
    EncodedQueries,
    Trainable,
    batches_by_size,
    check_query_texts,
    readable_query,
)
from pipeline.encoders.appended import APPENDED, AppendedTokens, append_positions
from pipeline.encoders.attention import input_layers, recording, tap_rows, tap_values
from pipeline.encoders.batching import concatenate, group_passes, prefetch
from pipeline.encoders.loading import CheckpointSpecT, weight_files
from pipeline.encoders.model_inputs import Collated, ModelInput, collate, unpack_column
from pipeline.encoders.reader import MODEL_INPUTS, Reader
from pipeline.encoders.templates import Templates
from pipeline.encoders.trained import load_appended_tokens
from pipeline.taps import Tap
from pipeline.tokens import TokenBatch, normalise, pad


class SequenceEncoder(Trainable[CheckpointSpecT]):
    """Encoder that runs a transformers model on sequences of images, audio and text.

    Subclasses define the preprocessing (`reader`), the computation of hidden states (`forward`) and
    the module whose attention is recorded (`attention_module`).

    An item may consist of several sequences, such as the frames of a video for a model that
    processes one image at a time. Its tokens are those of its sequences in order. Its pooled vector
    is the normalised mean of theirs.

    The next batch is collated in pinned memory while the model runs. A batch that exceeds the GPU
    memory is split in half. An item that exceeds it by itself raises an error, and the job rejects
    the item.

    Attributes:
        padding_side: Side on which sequences are padded.
        pooled_position: Position whose hidden state the model pools, used by the tap `pooled_row`.
    """

    padding_side: ClassVar[str] = "right"
    #: Position of a sequence that the model pools, for the tap `pooled_row`.
    pooled_position: ClassVar[Literal["first", "last"]] = "last"
    default_inputs: ClassVar[tuple[str, ...]] = ()
    has_preprocessor = True
    supports_device_map = True
    has_spans = False
    has_extents = True

    def __init__(self, spec: CheckpointSpecT, device_map: str | None = None):
        self.spec = spec
        self.normalised = bool(getattr(spec, "normalise", True))
        self.model = self.load(spec, device_map)
        self.device = self.model.device
        if (appended := load_appended_tokens(self, spec)) is not None:
            self.append_tokens(appended)

    # -- defined by each family --------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def load(cls, spec: CheckpointSpecT, device_map: str | None) -> Any:
        """Loads the model; the device map "auto" distributes it over the visible GPUs."""

    @classmethod
    @abstractmethod
    def reader(cls, spec: CheckpointSpecT) -> Reader[CheckpointSpecT]:
        """Returns the reader of items and queries, without loading weights."""

    @abstractmethod
    def forward(
        self, inputs: dict[str, torch.Tensor], mask_BL: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes vectors (B, L, D) of all positions, and pooled vectors (B, P) or None.

        Args:
            inputs: Keyword arguments of the model, by name.
            mask_BL: False at padding and at appended tokens.
        """

    def attention_module(self) -> PreTrainedModel:
        """Returns the module whose attention layers are numbered. Defaults to the whole model."""
        return self.model

    # -- items -------------------------------------------------------------------------------------

    @classmethod
    def preprocessor(cls, spec: CheckpointSpecT) -> Callable[[pa.Table], pa.Table]:
        """Returns the `prepare` method of the reader."""
        return cls.reader(spec).prepare

    @functools.cached_property
    def _reader(self) -> Reader[CheckpointSpecT]:
        return self.reader(self.spec)

    def encode(
        self, items: pa.Table, taps: Sequence[Tap] = ()
    ) -> Iterator[tuple[np.ndarray, TokenBatch]]:
        """Encodes items, batching those of similar length."""
        if MODEL_INPUTS not in items.column_names:
            items = self._reader.prepare(items)
        inputs = [self._appended_to(each) for each in unpack_column(items[MODEL_INPUTS])]
        sizes = np.array([sum(map(len, sequences)) for sequences in inputs], dtype=np.int64)
        batches = batches_by_size(sizes, self.spec.max_batch_tokens)
        for rows, passes in prefetch(
            batches, lambda rows: self._collate_passes([inputs[r] for r in rows])
        ):
            yield from self._encode(inputs, rows, passes, taps)

    def _encode(
        self,
        inputs: Sequence[Sequence[ModelInput]],
        rows: np.ndarray,
        passes: Sequence[Collated],
        taps: Sequence[Tap],
    ) -> Iterator[tuple[np.ndarray, TokenBatch]]:
        """Yields a batch. If it exceeds the GPU memory, yields its halves instead."""
        batch = None
        try:
            batch = self._embed([inputs[row] for row in rows], passes, taps)
        except torch.OutOfMemoryError:
            if len(rows) == 1:
                raise
        if batch is not None:
            yield rows, batch
            return
        if self.device.type == "cuda":  # frees the memory of the failed pass
            torch.cuda.empty_cache()
        middle = len(rows) // 2
        for half in (rows[:middle], rows[middle:]):
            passes = self._collate_passes([inputs[row] for row in half])
            yield from self._encode(inputs, half, passes, taps)

    # -- queries -----------------------------------------------------------------------------------

    def with_instruction(self, instruction: str) -> Self:
        """Returns the encoder with an instruction in its query template, if it has a slot."""
        instructed = copy.copy(self)
        instructed.__dict__["_reader"] = self._reader.with_instruction(instruction)
        return instructed

    def templates(self) -> Templates:
        """Returns the templates of the reader."""
        return self._reader.templates(self.supported_inputs(self.spec))

    def encode_queries(self, texts: Sequence[str]) -> EncodedQueries:
        """Encodes query texts, in order."""
        check_query_texts(texts)
        read = (self._reader.read_text_query(text) for text in texts)
        return self._encode_inputs([([inputs], names) for inputs, names in read])

    def encode_media(self, queries: Sequence[Mapping[str, Any]]) -> EncodedQueries:
        """Encodes queries with media, in order."""
        if self.query_kinds(self.spec) == ("text",):
            raise self._texts_only()
        read = []
        for query in queries:
            value = query.get("text") or "the media"
            with readable_query(value):
                read.append(self._reader.read_media_query(query))
            if not read[-1][0]:
                raise SpecError("query", value, "a readable input", "is too short")
        return self._encode_inputs(read)

    def _encode_inputs(
        self, queries: Sequence[tuple[list[ModelInput], list[str]]]
    ) -> EncodedQueries:
        sizes = np.array([sum(map(len, inputs)) for inputs, _ in queries])
        batches, order = [], []
        for rows in batches_by_size(sizes, self.spec.max_batch_tokens):
            inputs = [queries[row][0] for row in rows]
            batches.append(self._embed(inputs, self._collate_passes(inputs), ()))
            order += rows.tolist()
        tokens = concatenate(batches).take(torch.from_numpy(np.argsort(order)))
        return EncodedQueries(tokens, [names for _, names in queries])

    # -- the model ---------------------------------------------------------------------------------

    @classmethod
    def weight_files(cls, spec: CheckpointSpecT) -> list[Path]:
        """Returns the weight files of the model, its adapter and its projection."""
        projection = getattr(spec, "projection", None)
        return weight_files(spec, *([Path(projection)] if projection else []))

    @property
    def embedding(self) -> torch.nn.Module:
        """Module that maps token ids to input embeddings."""
        return self.attention_module().get_input_embeddings()

    def append_tokens(self, tokens: AppendedTokens) -> None:
        """Appends learned tokens to each sequence of an item, in place of those of the spec."""
        self.appended = tokens.to(self.device)

    def _appended_to(self, sequences: list[ModelInput]) -> list[ModelInput]:
        if self.appended is None:
            return sequences
        return [append_positions(sequence, len(self.appended)) for sequence in sequences]

    def _collate_passes(self, items: Sequence[Sequence[ModelInput]]) -> list[Collated]:
        inputs = [sequence for sequences in items for sequence in sequences]
        passes = []
        for group in group_passes(inputs, self.spec.max_batch_tokens):
            collated = collate(group, self.join_media(group), self.padding_side)
            if self.device.type == "cuda":
                collated = collated.map(torch.Tensor.pin_memory)
            passes.append(collated)
        return passes

    # -- training ----------------------------------------------------------------------------------

    def read_queries(self, texts: Sequence[str]) -> list[list[ModelInput]]:
        """Returns one sequence per query."""
        return [[self._reader.read_text_query(text)[0]] for text in texts]

    def read_items(self, items: Sequence[Mapping[str, Any]]) -> list[list[ModelInput]]:
        """Returns the sequences of each item."""
        return [self._appended_to(self._reader.read_item(item)) for item in items]

    def tokens(self, items: Sequence[Sequence[ModelInput]], taps: Sequence[Tap] = ()) -> TokenBatch:
        """Computes the tokens of items of several sequences each, in order and with gradients."""
        return self._compute_tokens(items, self._collate_passes(items), taps)

    def save(self, folder: Path) -> None:
        """Saves the model and its processor."""
        self.model.save_pretrained(folder)
        self._reader.save(folder)

    @torch.no_grad()
    def states(self, items: Sequence[Sequence[ModelInput]], taps: Sequence[Tap] = ()) -> TokenBatch:
        """Returns `tokens` with the inputs of the projection instead of its outputs.

        They can be cached if only the projection is trained, because the rest of the model is
        frozen.
        """
        recorded: list[torch.Tensor] = []
        handle = self.projection.register_forward_pre_hook(lambda _, args: recorded.append(args[0]))
        try:
            passes = self._collate_passes(items)
            batch = self._compute_tokens(items, passes, taps)
        finally:
            handle.remove()
        states = torch.cat(
            [
                states_BLD[collated.keep.to(states_BLD.device)]
                for states_BLD, collated in zip(recorded, passes, strict=True)
            ]
        )
        lengths = batch.lengths.cpu().numpy()
        return replace(batch, vectors=pad(states.float(), lengths)[0], normalised=False)

    @torch.inference_mode()
    def _embed(
        self,
        items: Sequence[Sequence[ModelInput]],
        passes: Sequence[Collated],
        taps: Sequence[Tap],
    ) -> TokenBatch:
        return self._compute_tokens(items, passes, taps)

    def _compute_tokens(
        self,
        items: Sequence[Sequence[ModelInput]],
        passes: Sequence[Collated],
        taps: Sequence[Tap],
    ) -> TokenBatch:
        flat: dict[str, list[torch.Tensor]] = {}
        for collated in passes:
            for name, tensor in self._run_pass(collated, taps).items():
                flat.setdefault(name, []).append(tensor)
        values = {name: torch.cat(tensors) for name, tensors in flat.items()}
        return self._assemble(items, values, taps)

    def _empty(self, taps: Sequence[Tap]) -> dict[str, torch.Tensor]:
        """Returns the outputs of `_run_pass` for no sequences."""
        none = torch.zeros(0, device=self.device)
        flat = {tap.name: none for tap in taps}
        flat |= {"vectors": none.new_zeros(0, self.dim), "kind": none.to(torch.int8)}
        flat |= {"extents": none.new_zeros(0, 6), "spans": none.new_zeros(0, 2, dtype=torch.int32)}
        flat["pooled"] = none.new_zeros(0, self.pooled_dim or 0)
        if self.appended is not None:
            flat["appended"] = none.new_zeros(0, len(self.appended), self.dim)
        return flat

    def _assemble(
        self,
        items: Sequence[Sequence[ModelInput]],
        flat: Mapping[str, torch.Tensor],
        taps: Sequence[Tap],
    ) -> TokenBatch:
        lengths = np.array(
            [sum(int(sequence.keep.sum()) for sequence in sequences) for sequences in items]
        )
        flat = flat or self._empty(taps)  # no item has content
        per_sequence = ("pooled", "appended")
        padded = {
            name: pad(tensor, lengths)[0]
            for name, tensor in flat.items()
            if name not in per_sequence
        }
        _, mask = pad(flat["kind"], lengths)
        pooled = appended = None
        num_sequences = np.array([len(sequences) for sequences in items])
        if self.pooled_dim is not None:
            sums, _ = pad(flat["pooled"], num_sequences)
            pooled = normalise(sums.sum(dim=1))
        if "appended" in flat:
            counts_S = [int(sequence.keep.sum()) for sequences in items for sequence in sequences]
            weights_S11 = flat["appended"].new_tensor(counts_S).clamp_min(1)[:, None, None]
            appended_BSMD, _ = pad(flat["appended"] * weights_S11, num_sequences)
            weights_BS11, _ = pad(weights_S11, num_sequences)
            appended = appended_BSMD.sum(dim=1) / weights_BS11.sum(dim=1).clamp_min(1)
            appended = normalise(appended) if self.normalised else appended
        return TokenBatch(
            padded["vectors"],
            mask,
            normalised=self.normalised,
            extents=padded["extents"] if self.has_extents else None,
            spans=padded["spans"] if self.has_spans else None,
            kind=padded["kind"],
            pooled=pooled,
            appended=appended,
            taps={tap.name: padded[tap.name] for tap in taps},
        )

    def _run_pass(self, collated: Collated, taps: Sequence[Tap]) -> dict[str, torch.Tensor]:
        """Runs one forward pass and returns the outputs (T, ...) of the kept positions by name.

        Per sequence, there may be the pooled vectors `pooled` (S, P) and those of appended tokens,
        `appended` (S, M, D).
        """
        is_extended = bool((collated.kind == APPENDED).any())  # unlike those of queries
        batch = collated.map(lambda tensor: tensor.to(self.device, non_blocking=True))
        keep, is_appended_BL = batch.keep, batch.kind == APPENDED
        content_BL = batch.mask_BL & ~is_appended_BL
        rows = tap_rows(batch.kind, content_BL, taps, self.pooled_position)
        with contextlib.ExitStack() as stack:
            if is_extended:
                assert self.appended is not None
                stack.enter_context(self.appended.inserted(self.embedding, is_appended_BL))
            recorded = None
            if taps:
                recorded = stack.enter_context(
                    recording(self.attention_module(), rows, input_layers(taps))
                )
            states_BLD, pooled_BP = self.forward(dict(batch.kwargs), content_BL)
        vectors = states_BLD[keep].float()
        is_query = self.appended is not None and not is_extended
        result = {
            "vectors": normalise(vectors) if self.normalised or is_query else vectors,
            "kind": batch.kind[keep],
            "extents": batch.extents[keep],
            "spans": batch.spans[keep],
        }
        if pooled_BP is not None:
            result["pooled"] = normalise(pooled_BP.float())
        appended_BM = None
        if is_extended:
            appended_BM = is_appended_BL.nonzero()[:, 1].reshape(len(states_BLD), -1)
            appended = states_BLD[is_appended_BL].float().reshape(*appended_BM.shape, -1)
            result["appended"] = normalise(appended) if self.normalised else appended
        if recorded is not None:
            values = tap_values(recorded, taps, appended_BM, keep)
            result |= {name: values_BL[keep] for name, values_BL in values.items()}
        return result

    def join_media(self, inputs: Sequence[ModelInput]) -> dict[str, torch.Tensor]:
        """Returns the media inputs of a batch: by default, those of its sequences concatenated."""
        names = {name for sequence in inputs for name in sequence.media}
        return {
            name: torch.cat([sequence.media[name] for sequence in inputs if name in sequence.media])
            for name in sorted(names)
        }
