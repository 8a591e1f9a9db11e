"""Base of the encoders that read images, audio and text as one sequence of tokens.

A `Reader` turns items into model inputs without the model's weights, so that this may run in
processes ahead of the GPU. A `SequenceEncoder` runs the model over batches of those inputs.
"""

from __future__ import annotations

import contextlib
import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import torch
from transformers import PreTrainedModel

from pipeline.config import SpecError
from pipeline.decoding import Unreadable
from pipeline.encoders import EncodedQueries, Trainable, batches_by_size
from pipeline.encoders.attention import recording, tap_rows, tap_values
from pipeline.encoders.batching import group_passes, join, prefetch
from pipeline.encoders.images import open_query_image
from pipeline.encoders.loading import CheckpointSpecT
from pipeline.encoders.model_inputs import Collated, ModelInput, collate, unpack
from pipeline.encoders.reader import READ, Reader
from pipeline.taps import Tap
from pipeline.tokens import TokenBatch, normalise, pad


class SequenceEncoder(Trainable[CheckpointSpecT]):
    """A model of the transformers library over sequences of images, audio and text.

    Subclasses define how items are read (`reader`), how the model computes hidden states
    (`forward`) and which of its modules computes attention (`attending`).

    An item may consist of several sequences, such as the frames of a video for a model that reads
    one image at a time: its tokens are theirs in order, its pooled vector is the normalised mean.

    The next batch is collated, in pinned memory, while the model runs. A batch that exceeds the
    memory of the GPU is halved; an item that exceeds it alone raises an error, upon which the job
    rejects that item.
    """

    padding_side: ClassVar[str] = "right"
    #: Position of a sequence that the model pools, for the tap `pooled_row`.
    pooled_position: ClassVar[Literal["first", "last"]] = "last"
    needs: ClassVar[tuple[str, ...]] = ()
    prepares = True
    can_be_spread = True
    has_spans = False
    has_extents = True

    def __init__(self, spec: CheckpointSpecT, device_map: str | None = None):
        self.spec = spec
        self.model = self.load(spec, device_map)
        self.device = self.model.device

    # -- defined by each family --------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def load(cls, spec: CheckpointSpecT, device_map: str | None) -> Any:
        """Loads the model."""

    @classmethod
    @abstractmethod
    def reader(cls, spec: CheckpointSpecT) -> Reader[CheckpointSpecT]:
        """Returns the reader of items and queries, without loading the weights."""

    @abstractmethod
    def forward(
        self, inputs: dict[str, torch.Tensor], mask_BL: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the states (B, L, D) of all positions and the pooled vectors (B, P), if any."""

    def attending(self) -> PreTrainedModel:
        """Returns the module whose attention the taps describe: by default the whole model."""
        return self.model

    # -- items -------------------------------------------------------------------------------------

    @classmethod
    def preparer(cls, spec: CheckpointSpecT) -> Callable[[pa.Table], pa.Table]:
        """Returns the reader's `prepare`."""
        return cls.reader(spec).prepare

    @functools.cached_property
    def _read_by(self) -> Reader[CheckpointSpecT]:
        return self.reader(self.spec)

    def encode(
        self, items: pa.Table, taps: Sequence[Tap] = ()
    ) -> Iterator[tuple[np.ndarray, TokenBatch]]:
        """Encodes items, those of similar length together."""
        if READ not in items.column_names:
            items = self._read_by.prepare(items)
        every = [unpack(data.as_py()) for data in items[READ]]
        sizes = np.array([sum(map(len, inputs)) for inputs in every], dtype=np.int64)
        batches = batches_by_size(sizes, self.spec.max_batch_tokens)
        for rows, passes in prefetch(batches, lambda rows: self._passes([every[r] for r in rows])):
            yield from self._encode(every, rows, passes, taps)

    def _encode(
        self,
        every: Sequence[Sequence[ModelInput]],
        rows: np.ndarray,
        passes: Sequence[Collated],
        taps: Sequence[Tap],
    ) -> Iterator[tuple[np.ndarray, TokenBatch]]:
        """Yields a batch, or its halves where the memory does not suffice."""
        batch = None
        try:
            batch = self._embed([every[row] for row in rows], passes, taps)
        except torch.OutOfMemoryError:
            if len(rows) == 1:
                raise
        if batch is not None:
            yield rows, batch
            return
        if self.device.type == "cuda":  # what the failed pass left
            torch.cuda.empty_cache()
        half = len(rows) // 2
        for part in (rows[:half], rows[half:]):
            passes = self._passes([every[row] for row in part])
            yield from self._encode(every, part, passes, taps)

    # -- queries -----------------------------------------------------------------------------------

    def encode_queries(self, texts: Sequence[str]) -> EncodedQueries:
        """Encodes query texts, in order.

        Raises:
            SpecError: There is no query, or one is empty or too long.
        """
        if not texts:
            raise SpecError("query", [], "at least one text")
        for text in texts:
            if not text.strip():
                raise SpecError("query", text, "a text with at least one word")
        return self._queries([self._read_by.text(text) for text in texts])

    def encode_pictures(self, pictures: Sequence[bytes]) -> EncodedQueries:
        """Encodes query images, in order.

        Raises:
            SpecError: One is not an image, or the model reads no image queries.
        """
        read = []
        for data in pictures:
            picture = open_query_image(data)
            try:
                read.append(self._read_by.picture(picture))
            except Unreadable as error:
                note = f" ({error.detail})"
                raise SpecError("query", "the image", "a readable image", note=note) from None
        return self._queries(read)

    def _queries(self, read: Sequence[tuple[ModelInput, list[str]]]) -> EncodedQueries:
        sizes = np.array([len(inputs) for inputs, _ in read])
        parts, order = [], []
        for rows in batches_by_size(sizes, self.spec.max_batch_tokens):
            own = [[read[row][0]] for row in rows]
            parts.append(self._embed(own, self._passes(own), ()))
            order += rows.tolist()
        joined = join(parts).take(torch.from_numpy(np.argsort(order)))
        return EncodedQueries(joined, [names for _, names in read])

    # -- the model ---------------------------------------------------------------------------------

    def _passes(self, items: Sequence[Sequence[ModelInput]]) -> list[Collated]:
        """Returns the sequences of items, in order, as forward passes within the budget."""
        inputs = [read for sequences in items for read in sequences]
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
        return [[self._read_by.text(text)[0]] for text in texts]

    def read_items(self, items: Sequence[Mapping[str, Any]]) -> list[list[ModelInput]]:
        """Returns the sequences of each item."""
        return [self._read_by.item(item) for item in items]

    def tokens(self, items: Sequence[Sequence[ModelInput]], taps: Sequence[Tap] = ()) -> TokenBatch:
        """Returns the tokens of items, each of several sequences, in order and with gradients."""
        return self._tokens(items, self._passes(items), taps)

    def save(self, folder: Path) -> None:
        """Saves the model and its processor."""
        self.model.save_pretrained(folder)
        self._read_by.processor.save_pretrained(folder)

    @torch.no_grad()
    def states(self, items: Sequence[Sequence[ModelInput]], taps: Sequence[Tap] = ()) -> TokenBatch:
        """Returns `tokens` with the inputs of the projection in place of its outputs.

        They can be cached where only the projection is trained: the rest of the model is constant.
        """
        seen: list[torch.Tensor] = []
        handle = self.projection.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        try:
            passes = self._passes(items)
            batch = self._tokens(items, passes, taps)
        finally:
            handle.remove()
        states = torch.cat(
            [
                given[collated.keep.to(given.device)]
                for given, collated in zip(seen, passes, strict=True)
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
        """Returns the tokens of items, without gradients."""
        return self._tokens(items, passes, taps)

    def _tokens(
        self,
        items: Sequence[Sequence[ModelInput]],
        passes: Sequence[Collated],
        taps: Sequence[Tap],
    ) -> TokenBatch:
        flat: dict[str, list[torch.Tensor]] = {}
        for collated in passes:
            for name, tensor in self._pass(collated, taps).items():
                flat.setdefault(name, []).append(tensor)
        return self._assemble(items, {name: torch.cat(own) for name, own in flat.items()}, taps)

    def _assemble(
        self,
        items: Sequence[Sequence[ModelInput]],
        flat: Mapping[str, torch.Tensor],
        taps: Sequence[Tap],
    ) -> TokenBatch:
        """Assembles the tokens of all passes by item."""
        lengths = np.array([sum(int(read.keep.sum()) for read in own) for own in items])
        if not flat:  # no item has anything to be read
            empty = torch.zeros(len(items), 0, self.dim, device=self.device)
            pooled = None
            if self.pooled_dim is not None:
                pooled = empty.new_zeros(len(items), self.pooled_dim)
            return TokenBatch(
                empty,
                empty.new_zeros(empty.shape[:2], dtype=torch.bool),
                normalised=self.normalised,
                pooled=pooled,
                kind=empty.new_zeros(empty.shape[:2], dtype=torch.int8),
                extents=empty.new_zeros((*empty.shape[:2], 6)) if self.has_extents else None,
                spans=(
                    empty.new_zeros((*empty.shape[:2], 2), dtype=torch.int32)
                    if self.has_spans
                    else None
                ),
                taps={tap.name: empty.new_zeros(empty.shape[:2]) for tap in taps},
            )
        padded = {
            name: pad(tensor, lengths)[0] for name, tensor in flat.items() if name != "pooled"
        }
        _, mask = pad(flat["kind"], lengths)
        pooled = None
        if self.pooled_dim is not None:
            sums, _ = pad(flat["pooled"], np.array([len(own) for own in items]))
            pooled = normalise(sums.sum(dim=1))
        return TokenBatch(
            padded["vectors"],
            mask,
            normalised=self.normalised,
            extents=padded["extents"] if self.has_extents else None,
            spans=padded["spans"] if self.has_spans else None,
            kind=padded["kind"],
            pooled=pooled,
            taps={tap.name: padded[tap.name] for tap in taps},
        )

    def _pass(self, collated: Collated, taps: Sequence[Tap]) -> dict[str, torch.Tensor]:
        """Runs one forward pass and returns values (T, ...) of the kept positions, by name."""
        read = collated.map(lambda tensor: tensor.to(self.device, non_blocking=True))
        keep = read.keep
        is_left = self.padding_side == "left"
        rows = tap_rows(read.kind, read.mask_BL, is_left, taps, self.pooled_position)
        with recording(self.attending(), rows) if taps else contextlib.nullcontext() as recorded:
            states_BLD, pooled_BP = self.forward(dict(read.given), read.mask_BL)
        vectors = states_BLD[keep].float()
        result = {
            "vectors": normalise(vectors) if self.normalised else vectors,
            "kind": read.kind[keep],
            "extents": read.extents[keep],
            "spans": read.spans[keep],
        }
        if pooled_BP is not None:
            result["pooled"] = normalise(pooled_BP.float())
        if recorded is not None:
            result |= {name: values[keep] for name, values in tap_values(recorded, taps).items()}
        return result

    def join_media(self, inputs: Sequence[ModelInput]) -> dict[str, torch.Tensor]:
        """Returns the media of a batch: by default those of its sequences, concatenated."""
        names = {name for read in inputs for name in read.media}
        return {
            name: torch.cat([read.media[name] for read in inputs if name in read.media])
            for name in sorted(names)
        }
