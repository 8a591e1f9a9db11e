"""What the families of models share that read pictures, sound and text as one sequence of tokens.

A `Reader` turns an item into what the model reads, without its weights, so that this may be done in
processes ahead of the GPU. A `SequenceEncoder` runs the model over batches of that.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
import pyarrow as pa
import safetensors.torch
import torch
from PIL import Image
from pydantic import BeforeValidator

from pipeline.config import SpecError
from pipeline.decoding import Unreadable
from pipeline.decoding.image import decode
from pipeline.encoders import Attention, EncodedQueries, Trainable, batches_by_size
from pipeline.encoders.attention import recording
from pipeline.encoders.loading import CheckpointSpec
from pipeline.schema import PAYLOAD
from pipeline.taps import Tap
from pipeline.tokens import AUDIO, SPECIAL, TEXT, VISUAL, TokenBatch, normalise, pad

T = TypeVar("T")
R = TypeVar("R")

#: The column that holds what a model reads of an item.
READ = "model_inputs"
#: What is to be encoded of an item, as distinct from prompts and boundaries.
CONTENT = (VISUAL, AUDIO, TEXT)
#: Pictures that a query may be.
PICTURES = ("PNG", "JPEG", "WEBP")
#: Pixels of a query picture as a model is given it, and of its file.
MOST_PIXELS, MOST_INPUT_PIXELS = 4_000_000, 200_000_000


def _are_numbers(layer: Any) -> Any:
    each = layer if isinstance(layer, list | tuple) else [layer]
    if not each or not all(type(number) is int for number in each):
        raise SpecError("", layer, "the number of a layer, or a list of such")
    return layer


#: Which hidden states give the token vectors: one, or several side by side.
Layers = Annotated[int | tuple[int, ...], BeforeValidator(_are_numbers)]


def check_layers(layer: int | tuple[int, ...], depth: int) -> None:
    """Raises `SpecError` if a model of so many layers has not all of these."""
    for number in (layer,) if isinstance(layer, int) else layer:
        if not -depth - 1 <= number <= depth:
            legal = f"{-depth - 1} to {depth} (the model has {depth} layers)"
            raise SpecError("layer", number, legal)


def states_of(hidden_states: Sequence[torch.Tensor], layer: int | tuple[int, ...]) -> torch.Tensor:
    """The states of a layer; of N layers (..., N D) float32, each of them of unit length.

    So the cosine of two tokens is the mean of those of their layers.
    """
    if isinstance(layer, int):
        return hidden_states[layer]
    return torch.cat([normalise(hidden_states[number].float()) for number in layer], dim=-1)


@dataclass(frozen=True)
class ModelInput:
    """One sequence of L positions as a model reads it: no batch, no padding.

    Attributes:
        sequence: (L,) tensors that a batch pads: `input_ids`, `token_type_ids`.
        media: tensors that a batch joins along their first axis: pixels, grids.
        kind: (L,) int8 codes of `tokens.KINDS`.
        keep: (L,) bool: which positions become tokens of the item.
        extents: (L, 6) float32 x0 y0 x1 y1 t0 t1; NaN: none.
        spans: (L, 2) int32 characters in the item's text; -1: none.
    """

    sequence: dict[str, torch.Tensor]
    media: dict[str, torch.Tensor]
    kind: torch.Tensor
    keep: torch.Tensor
    extents: torch.Tensor
    spans: torch.Tensor

    def __len__(self) -> int:
        return len(self.kind)

    @classmethod
    def of(
        cls,
        sequence: Mapping[str, torch.Tensor],
        media: Mapping[str, torch.Tensor],
        kind: torch.Tensor,
        keep: torch.Tensor | None = None,
        extents: torch.Tensor | None = None,
        spans: torch.Tensor | None = None,
    ) -> ModelInput:
        """What is not given: all positions are kept, and none has a place."""
        length = len(kind)
        return cls(
            dict(sequence),
            dict(media),
            kind.to(torch.int8),
            torch.ones(length, dtype=torch.bool) if keep is None else keep,
            torch.full((length, 6), torch.nan) if extents is None else extents.float(),
            torch.full((length, 2), -1, dtype=torch.int32) if spans is None else spans.int(),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of it by name."""
        named = {f"sequence.{name}": tensor for name, tensor in self.sequence.items()}
        named |= {f"media.{name}": tensor for name, tensor in self.media.items()}
        for name in ("kind", "keep", "extents", "spans"):
            named[name] = getattr(self, name)
        return named

    @classmethod
    def of_tensors(cls, named: Mapping[str, torch.Tensor]) -> ModelInput:
        """The inverse of `tensors`."""
        parts: dict[str, dict[str, torch.Tensor]] = {"sequence": {}, "media": {}}
        rest = {}
        for name, tensor in named.items():
            part, _, own = name.partition(".")
            if own:
                parts[part][own] = tensor
            else:
                rest[name] = tensor
        return cls(**parts, **rest)


def packed(inputs: Iterable[ModelInput]) -> bytes:
    """The sequences of an item as bytes, in the format of safetensors."""
    named = {
        f"{number}.{name}": tensor.contiguous()
        for number, read in enumerate(inputs)
        for name, tensor in read.tensors().items()
    }
    return safetensors.torch.save(named)


def unpacked(data: bytes) -> list[ModelInput]:
    """The inverse of `packed`."""
    parts: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in safetensors.torch.load(data).items():
        number, _, own = name.partition(".")
        parts.setdefault(int(number), {})[own] = tensor
    return [ModelInput.of_tensors(parts[number]) for number in sorted(parts)]


@dataclass(frozen=True)
class Collated:
    """B sequences as one forward pass has them, padded to L positions.

    Attributes:
        given: what the model reads, by name.
        mask_BL: where a position is real.
        kind, keep, extents, spans: as in `ModelInput`, with a first axis of B.
    """

    given: dict[str, torch.Tensor]
    mask_BL: torch.Tensor
    kind: torch.Tensor
    keep: torch.Tensor
    extents: torch.Tensor
    spans: torch.Tensor

    def each(self, do: Callable[[torch.Tensor], torch.Tensor]) -> Collated:
        """The same with something done to every tensor."""
        own = (do(getattr(self, name)) for name in ("mask_BL", "kind", "keep", "extents", "spans"))
        return Collated({name: do(tensor) for name, tensor in self.given.items()}, *own)


def ahead(values: Iterable[T], do: Callable[[T], R]) -> Iterator[tuple[T, R]]:
    """Values and what is made of each, which is made while the one before it is in use.

    >>> list(ahead([1, 2, 3], str))
    [(1, '1'), (2, '2'), (3, '3')]
    """
    with ThreadPoolExecutor(1) as pool:
        waiting: deque[tuple[T, Future[R]]] = deque()
        for value in values:
            waiting.append((value, pool.submit(do, value)))
            if len(waiting) > 1:
                earlier, made = waiting.popleft()
                yield earlier, made.result()
        for value, made in waiting:
            yield value, made.result()


class Reader(ABC):
    """Turns items and queries into what a model of a family reads."""

    def __init__(self, spec: CheckpointSpec):
        self.spec = spec

    @abstractmethod
    def item(self, item: Mapping[str, Any]) -> list[ModelInput]:
        """The sequences of an item, in order; none: there is nothing in it that the model reads.

        Raises:
            Unreadable: it cannot be read, or not by this model.
        """

    @abstractmethod
    def text(self, text: str) -> tuple[ModelInput, list[str]]:
        """A query text, and what each kept position is called.

        Raises:
            SpecError: the model has no place for that many tokens.
        """

    def picture(self, picture: Image.Image) -> tuple[ModelInput, list[str]]:
        """A query picture, and what each kept position is called.

        Raises:
            SpecError: the model reads none, or cannot read this one.
        """
        raise SpecError("query", "a picture", "a text", f"is not read by {self.spec.name}")

    def note(self, item: Mapping[str, Any], read: Sequence[ModelInput]) -> dict[str, Any]:
        """What of an item is not in its sequences, for its metadata; nothing: all of it is."""
        return {}

    def _lean(self, read: ModelInput) -> ModelInput:
        """The same with pixels of the type that the model would bring them to: half the bytes."""
        dtype = getattr(torch, self.spec.dtype)
        media = {
            name: tensor.to(dtype) if name.startswith("pixel_values") else tensor
            for name, tensor in read.media.items()
        }
        return replace(read, media=media)

    def prepare(self, items: pa.Table) -> pa.Table:
        """Adds the column `model_inputs`, and notes to the metadata; drops what it was made of."""
        there = [c.name for columns in PAYLOAD.values() for c in columns]
        payload = [name for name in there if name in items.column_names and name != "caption"]
        read = ["text", "span", *payload]
        names = [name for name in dict.fromkeys(read) if name in items.column_names]
        # Row by row: the pictures of one item may be large.
        values, notes = [], []
        for row in range(items.num_rows):
            item = {name: items[name][row].as_py() for name in names}
            inputs = self.item(item)
            values.append(packed(map(self._lean, inputs)))
            notes.append(self.note(item, inputs))
        items = noted(items, notes).drop_columns([name for name in payload if name != "item_id"])
        return items.append_column(READ, pa.array(values, pa.large_binary()))


def noted(items: pa.Table, notes: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Items with notes added to the metadata of each, if they have that column."""
    if "metadata" not in items.column_names or not any(notes):
        return items
    metadata = [
        json.dumps({**json.loads(before or "{}"), **note}, ensure_ascii=False) if note else before
        for before, note in zip(items["metadata"].to_pylist(), notes, strict=True)
    ]
    place = items.column_names.index("metadata")
    return items.set_column(place, items.field(place), pa.array(metadata, pa.string()))


class SequenceEncoder(Trainable):
    """A model of the transformers library over sequences of pictures, sound and text.

    Subclasses say how an item is read (`reader`), how the model gives states (`forward`) and which
    of its modules attends (`attending`).

    An item may be several sequences, such as the frames of a video for a model that reads one
    picture at a time: its tokens are theirs in order, its pooled vector the normalised mean.

    While the model works on a batch the next one is put together, in pinned memory. A batch that
    does not fit in the memory of the GPU is halved; an item that alone does not fit is an error,
    upon which the job rejects that item.
    """

    padding_side: ClassVar[str] = "right"
    #: Which position of a sequence the model pools, for the tap `pooled_row`.
    pooled_position: ClassVar[Literal["first", "last"]] = "last"
    needs = ()
    prepares = True
    can_be_spread = True
    has_spans = False
    has_extents = True

    Spec: ClassVar[type[CheckpointSpec]]

    def __init__(self, spec: CheckpointSpec, device_map: str | None = None):
        self.spec = spec
        self.model = self.load(spec, device_map)
        self.device = self.model.device
        self._reader: Reader | None = None

    # -- what a family says ------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def load(cls, spec: CheckpointSpec, device_map: str | None) -> Any:
        """The model."""

    @classmethod
    @abstractmethod
    def reader(cls, spec: CheckpointSpec) -> Reader:
        """What reads items and queries, without the weights."""

    @abstractmethod
    def forward(
        self, inputs: dict[str, torch.Tensor], mask_BL: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The states (B, L, D) of all positions, and the pooled vectors (B, P) if there are any."""

    def attending(self) -> torch.nn.Module:
        """The module whose layers' attention the taps are of: the language model."""
        return self.model

    @property
    def projection(self) -> torch.nn.Module:
        """What makes token vectors of the model's states, up to their length."""
        raise AssertionError(f"{type(self).__name__} has no projection")

    # -- items -------------------------------------------------------------------------------------

    @classmethod
    def preparer(cls, spec: CheckpointSpec) -> Callable[[pa.Table], pa.Table]:
        """What reads items."""
        return cls.reader(spec).prepare

    @property
    def _read_by(self) -> Reader:
        if self._reader is None:
            self._reader = self.reader(self.spec)
        return self._reader

    def encode(
        self, items: pa.Table, taps: Sequence[Tap] = ()
    ) -> Iterator[tuple[np.ndarray, TokenBatch]]:
        """Encodes items, those of like length together."""
        if READ not in items.column_names:
            items = self._read_by.prepare(items)
        every = [unpacked(data.as_py()) for data in items[READ]]
        sizes = np.array([sum(map(len, inputs)) for inputs in every], dtype=np.int64)
        batches = batches_by_size(sizes, self.spec.max_batch_tokens)
        for rows, passes in ahead(batches, lambda rows: self._passes([every[r] for r in rows])):
            yield from self._encode(every, rows, passes, taps)

    def _encode(
        self,
        every: Sequence[Sequence[ModelInput]],
        rows: np.ndarray,
        passes: Sequence[Collated],
        taps: Sequence[Tap],
    ) -> Iterator[tuple[np.ndarray, TokenBatch]]:
        """A batch; where the memory does not suffice, its halves."""
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
            SpecError: there is no query, or one is empty or too long.
        """
        if not texts:
            raise SpecError("query", [], "at least one text")
        for text in texts:
            if not text.strip():
                raise SpecError("query", text, "a text with at least one word")
        return self._queries([self._read_by.text(text) for text in texts])

    def encode_pictures(self, pictures: Sequence[bytes]) -> EncodedQueries:
        """Encodes query pictures, in order.

        Raises:
            SpecError: one is no picture, or the model reads none as a query.
        """
        read = []
        for data in pictures:
            picture = opened(data)
            try:
                read.append(self._read_by.picture(picture))
            except Unreadable as error:
                legal = "a picture that the model reads"
                raise SpecError("query", "the picture", legal, error.detail) from None
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
        """The sequences of items, in order, in as many forward passes as the budget needs."""
        inputs = [read for own in items for read in own]
        passes, start = [], 0
        while start < len(inputs):
            stop, longest = start, 0
            while stop < len(inputs):
                longest = max(longest, len(inputs[stop]))
                if stop > start and longest * (stop + 1 - start) > self.spec.max_batch_tokens:
                    break
                stop += 1
            passes.append(self._collated(inputs[start:stop]))
            start = stop
        return passes

    # -- training ----------------------------------------------------------------------------------

    def read_queries(self, texts: Sequence[str]) -> list[list[ModelInput]]:
        """A sequence a query."""
        return [[self._read_by.text(text)[0]] for text in texts]

    def read_items(self, items: Sequence[Mapping[str, Any]]) -> list[list[ModelInput]]:
        """The sequences of each item."""
        return [self._read_by.item(item) for item in items]

    def tokens(self, items: Sequence[Sequence[ModelInput]], taps: Sequence[Tap] = ()) -> TokenBatch:
        """The tokens of items in order, each of several sequences, with gradients: for training."""
        return self._tokens(items, self._passes(items), taps)

    def save(self, folder: Path) -> None:
        """Writes the model and its processor."""
        self.model.save_pretrained(folder)
        self._read_by.processor.save_pretrained(folder)

    @torch.no_grad()
    def states(self, items: Sequence[Sequence[ModelInput]], taps: Sequence[Tap] = ()) -> TokenBatch:
        """As `tokens`, with what the projection is given in the place of what it makes of it.

        Where a projection alone is trained, the model gives the same states again and again.
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
        """The tokens of items, without gradients."""
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
        return self._of_items(items, {name: torch.cat(own) for name, own in flat.items()}, taps)

    def _of_items(
        self,
        items: Sequence[Sequence[ModelInput]],
        flat: Mapping[str, torch.Tensor],
        taps: Sequence[Tap],
    ) -> TokenBatch:
        """The tokens of the passes, put together by item."""
        lengths = np.array([sum(int(read.keep.sum()) for read in own) for own in items])
        if not flat:  # no item has anything to be read
            empty = torch.zeros(len(items), 0, self.dim, device=self.device)
            pooled = self.pooled_dim and empty.new_zeros(len(items), self.pooled_dim)
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

    def _collated(self, inputs: Sequence[ModelInput]) -> Collated:
        """Sequences as one batch, in memory from which a GPU copies by itself."""

        def padded(values: Sequence[torch.Tensor], fill: float = 0) -> torch.Tensor:
            return torch.nn.utils.rnn.pad_sequence(
                list(values), batch_first=True, padding_value=fill, padding_side=self.padding_side
            )

        given = {
            name: padded([read.sequence[name] for read in inputs]) for name in inputs[0].sequence
        }
        mask_BL = padded([torch.ones(len(read), dtype=torch.bool) for read in inputs])
        given["attention_mask"] = mask_BL.long()
        given |= self.joined(inputs)
        collated = Collated(
            given,
            mask_BL,
            kind=padded([read.kind for read in inputs]),
            keep=padded([read.keep for read in inputs]),
            extents=padded([read.extents for read in inputs], torch.nan),
            spans=padded([read.spans for read in inputs], -1),
        )
        return collated.each(torch.Tensor.pin_memory) if self.device.type == "cuda" else collated

    def _pass(self, collated: Collated, taps: Sequence[Tap]) -> dict[str, torch.Tensor]:
        """One forward pass: what the kept positions have, (T, ...), sequence after sequence."""
        read = collated.each(lambda tensor: tensor.to(self.device, non_blocking=True))
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
        for tap in taps:
            statistics = tap_statistics(taps, int(tap.layers))
            of_heads = recorded.sums[int(tap.layers)][statistics.index(tap.statistic)]
            of_heads = of_heads.mean(dim=1) if tap.heads == "mean" else of_heads.amax(dim=1)
            result[tap.name] = of_heads[keep]
        return result

    def joined(self, inputs: Sequence[ModelInput]) -> dict[str, torch.Tensor]:
        """The media of a batch: those of its sequences one behind the other."""
        names = {name for read in inputs for name in read.media}
        return {
            name: torch.cat([read.media[name] for read in inputs if name in read.media])
            for name in sorted(names)
        }


def tap_statistics(taps: Sequence[Tap], layer: int) -> list[str]:
    """Which statistics of a layer taps ask for: each once, in a fixed order."""
    return sorted({tap.statistic for tap in taps if int(tap.layers) == layer})


def tap_rows(
    kind_BL: torch.Tensor,
    mask_BL: torch.Tensor,
    is_left: bool,
    taps: Sequence[Tap],
    pooled_position: Literal["first", "last"] = "last",
) -> dict[int, torch.Tensor]:
    """By layer, (S, B, L): how much each row of the attention counts for each statistic."""
    lengths = mask_BL.sum(dim=1, keepdim=True)
    position = torch.arange(mask_BL.shape[1], device=mask_BL.device)
    content = sum(kind_BL == kind for kind in CONTENT).bool() & mask_BL
    last = (position == mask_BL.shape[1] - 1) if is_left else position == lengths - 1
    first = (position == mask_BL.shape[1] - lengths) if is_left else position == 0
    pooled = first if pooled_position == "first" else last
    weights = {"column_sums": content, "eos_row": last, "pooled_row": pooled}
    return {
        layer: torch.stack(
            [
                weights[statistic].float().expand_as(mask_BL)
                for statistic in tap_statistics(taps, layer)
            ]
        )
        for layer in {int(tap.layers) for tap in taps}
    }


def layers_of(settings: Any, statistics: Sequence[str]) -> Attention:
    """What taps a model gives whose language model has these settings."""
    return Attention(tuple(statistics), settings.num_hidden_layers)


def join(batches: Sequence[TokenBatch]) -> TokenBatch:
    """Batches one behind the other, padded to the longest."""
    size = max(batch.mask.shape[1] for batch in batches)

    def longer(tensor: torch.Tensor, fill: float = 0) -> torch.Tensor:
        shape = (len(tensor), size - tensor.shape[1], *tensor.shape[2:])
        return torch.cat([tensor, tensor.new_full(shape, fill)], dim=1)

    def joined(name: str, fill: float = 0) -> torch.Tensor | None:
        own = [getattr(batch, name) for batch in batches]
        return None if own[0] is None else torch.cat([longer(tensor, fill) for tensor in own])

    pooled = [batch.pooled for batch in batches]
    return TokenBatch(
        joined("vectors"),
        joined("mask"),
        normalised=batches[0].normalised,
        extents=joined("extents", torch.nan),
        spans=joined("spans", -1),
        kind=joined("kind"),
        pooled=None if pooled[0] is None else torch.cat(pooled),
        taps={
            name: torch.cat([longer(batch.taps[name]) for batch in batches])
            for name in batches[0].taps
        },
    )


def opened(data: bytes) -> Image.Image:
    """A query picture as the source of pictures gives items by default.

    The same photo is the same picture then: upright, on white where it is transparent, of eight
    bits, and made smaller where it is large.

    Raises:
        SpecError: it is none.
    """
    legal = f"a file of {', '.join(PICTURES)}"
    try:
        Image.open(io.BytesIO(data), formats=PICTURES).close()
        seen = decode(data, max_pixels=MOST_PIXELS, max_input_pixels=MOST_INPUT_PIXELS)
    except Unreadable as error:
        raise SpecError("query", "the picture", legal, f"cannot be read ({error})") from None
    except (OSError, ValueError, SyntaxError):
        raise SpecError("query", "the picture", legal, "cannot be read") from None
    with Image.open(io.BytesIO(seen["image"])) as picture:
        return picture.convert("RGB")


def pictures_of(item: Mapping[str, Any]) -> list[tuple[Image.Image, float, float]]:
    """The pictures of an item in RGB, with the seconds from and to which each is shown.

    The picture of a page or a photo has no time, NaN. A frame of a video is shown until the next.
    """
    if item.get("image"):
        with Image.open(io.BytesIO(item["image"])) as picture:
            return [(picture.convert("RGB"), np.nan, np.nan)]
    frames = item.get("frames") or []
    starts = [frame["seconds"] for frame in frames]
    span = item.get("span") or {}
    end = span.get("end") if span.get("unit") == "seconds" else None
    if end is None:
        end = starts[-1] if starts else 0.0
    ends = [*starts[1:], max(end, starts[-1])] if starts else []
    shown = []
    for frame, start, stop in zip(frames, starts, ends, strict=True):
        size = (frame["width"], frame["height"])
        shown.append((Image.frombytes("RGB", size, frame["pixels"]), start, stop))
    return shown


def raster(rows: int, columns: int, times: tuple[float, float] = (np.nan, np.nan)) -> torch.Tensor:
    """(rows * columns, 6) extents of the cells of a grid over a picture, row by row.

    >>> raster(1, 2)[:, :4].tolist()
    [[0.0, 0.0, 0.5, 1.0], [0.5, 0.0, 1.0, 1.0]]
    """
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    x, y = x.reshape(-1).float(), y.reshape(-1).float()
    boxes = torch.stack([x / columns, y / rows, (x + 1) / columns, (y + 1) / rows], dim=1)
    return torch.cat([boxes, torch.tensor([times]).float().expand(len(boxes), 2)], dim=1)


def names_of(tokenizer: Any, read: ModelInput) -> list[str]:
    """What each kept position of a query is called: its text; of a patch its place in the picture.

    A patch is called by the middle of its cell, x and y in hundredths.
    """
    names = []
    ids = read.sequence["input_ids"].tolist()
    for number, kind, kept, box in zip(ids, read.kind, read.keep, read.extents, strict=True):
        if not kept:
            continue
        if kind == VISUAL:
            x, y = (50 * (box[0] + box[2])).round(), (50 * (box[1] + box[3])).round()
            names.append(f"[{x:.0f},{y:.0f}]" if torch.isfinite(x) else "[]")
        else:
            names.append(tokenizer.decode([number]).strip() or tokenizer.decode([number]))
    return names


def text_kinds(tokenizer: Any, ids: torch.Tensor) -> torch.Tensor:
    """(L,) int8: special tokens as `SPECIAL`, all others as `TEXT`."""
    special = torch.tensor(sorted(set(tokenizer.all_special_ids)), dtype=ids.dtype)
    return torch.where(torch.isin(ids, special), SPECIAL, TEXT)


def ids_between(tokenizer: Any, before: str, text: str, after: str) -> torch.Tensor:
    """(L,) the ids of a text between two parts of a prompt, which may have special tokens.

    None that is spelled out in the text is one.
    """
    names = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
    special = re.compile("|".join(map(re.escape, names)) or "(?!)")
    begin = max((found.end() for found in special.finditer(before)), default=0)
    found = special.search(after)
    end = found.start() if found else len(after)
    # What is plain around the text is read with it: a token may be of both.
    own = before[begin:] + text + after[:end]
    ids = []
    for part, is_own in ((before[:begin], False), (own, True), (after[end:], False)):
        options = {"add_special_tokens": False, "split_special_tokens": is_own, "verbose": False}
        ids += tokenizer(part, **options)["input_ids"]
    whole, plain = (tokenizer("a", add_special_tokens=both)["input_ids"] for both in (True, False))
    start = whole.index(plain[0])
    return torch.tensor(whole[:start] + ids + whole[start + len(plain) :])


def make_bidirectional(language_model: torch.nn.Module) -> None:
    """Lets every position of a causal model see all others."""
    language_model.config.is_causal = False  # by which the library makes its masks
    for module in language_model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
