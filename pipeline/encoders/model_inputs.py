"""Serialises the model inputs of single sequences and collates them into padded batches."""

from __future__ import annotations

import itertools
import json
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import safetensors.torch
import torch

#: Data types by their names in the safetensors format.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class ModelInput:
    """Model inputs of one sequence of L positions, without batch axis or padding.

    Attributes:
        sequence: Tensors (L,) that collation pads, such as `input_ids` and `token_type_ids`.
        media: Tensors that collation concatenates along the first axis, such as pixels and grids.
        kind: Codes of `tokens.KINDS`, (L,) int8.
        keep: True for positions that become tokens of the item, (L,) bool.
        extents: Boxes and times x0 y0 x1 y1 t0 t1, (L, 6) float32, or NaN if unknown.
        spans: Character offsets in the item's text, (L, 2) int32, or -1 if none.
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
    def create(
        cls,
        sequence: Mapping[str, torch.Tensor],
        media: Mapping[str, torch.Tensor],
        kind: torch.Tensor,
        keep: torch.Tensor | None = None,
        extents: torch.Tensor | None = None,
        spans: torch.Tensor | None = None,
    ) -> ModelInput:
        """Creates an input whose positions, by default, are kept and have no extents or spans."""
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
        """Returns all tensors by name."""
        named = {f"sequence.{name}": tensor for name, tensor in self.sequence.items()}
        named |= {f"media.{name}": tensor for name, tensor in self.media.items()}
        for name in ("kind", "keep", "extents", "spans"):
            named[name] = getattr(self, name)
        return named

    @classmethod
    def from_tensors(cls, named: Mapping[str, torch.Tensor]) -> ModelInput:
        """Creates an input from the result of `tensors`."""
        groups: dict[str, dict[str, torch.Tensor]] = {"sequence": {}, "media": {}}
        fields = {}
        for name, tensor in named.items():
            group, _, key = name.partition(".")
            if key:
                groups[group][key] = tensor
            else:
                fields[name] = tensor
        return cls(groups["sequence"], groups["media"], **fields)


def pack(inputs: Iterable[ModelInput]) -> bytes:
    """Serialises the sequences of an item in the safetensors format."""
    named = {
        f"{number}.{name}": tensor.contiguous()
        for number, sequence in enumerate(inputs)
        for name, tensor in sequence.tensors().items()
    }
    return safetensors.torch.save(named)


def unpack_column(column: pa.ChunkedArray) -> Iterator[list[ModelInput]]:
    """Deserialises the sequences of each item of a column of `large_binary` without nulls.

    The values of the column are not accessed one by one, because Arrow would copy each of them.
    """
    for chunk in filter(len, column.chunks):
        _, offsets, data = chunk.buffers()
        bounds = np.frombuffer(offsets, np.int64)[chunk.offset : chunk.offset + len(chunk) + 1]
        for first, last in itertools.pairwise(bounds.tolist()):
            yield unpack(data.slice(first, last - first))


def unpack(data: pa.Buffer | bytes) -> list[ModelInput]:
    """Deserialises the sequences of an item. The tensors are views of `data` and must not change.

    The library's own function copies every tensor, which for the 14 MB of a page is a large part of
    the time between two forward passes on a GPU.
    """
    view = memoryview(data)
    (header_bytes,) = struct.unpack_from("<Q", view)
    header = json.loads(bytes(view[8 : 8 + header_bytes]))
    sequences: dict[int, dict[str, torch.Tensor]] = {}
    with warnings.catch_warnings():  # the buffer is not writable
        warnings.simplefilter("ignore", UserWarning)
        for name, entry in header.items():
            first, last = (8 + header_bytes + offset for offset in entry["data_offsets"])
            dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
            is_empty = first == last  # `frombuffer` rejects empty buffers
            number, _, key = name.partition(".")
            sequences.setdefault(int(number), {})[key] = (
                torch.empty(shape, dtype=dtype)
                if is_empty
                else torch.frombuffer(view[first:last], dtype=dtype).view(shape)
            )
    return [ModelInput.from_tensors(sequences[number]) for number in sorted(sequences)]


@dataclass(frozen=True)
class Collated:
    """Model inputs of one forward pass: B sequences padded to L positions.

    Attributes:
        kwargs: Keyword arguments of the model.
        mask_BL: False at padding.
        kind, keep, extents, spans: As in `ModelInput`, with a leading batch axis.
    """

    kwargs: dict[str, torch.Tensor]
    mask_BL: torch.Tensor
    kind: torch.Tensor
    keep: torch.Tensor
    extents: torch.Tensor
    spans: torch.Tensor

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Collated:
        """Returns a copy with `function` applied to every tensor."""
        names = ("mask_BL", "kind", "keep", "extents", "spans")
        kwargs = {name: function(tensor) for name, tensor in self.kwargs.items()}
        return Collated(kwargs, *(function(getattr(self, name)) for name in names))


def collate(
    inputs: Sequence[ModelInput], media: Mapping[str, torch.Tensor], padding_side: str
) -> Collated:
    """Pads sequences, on the side "left" or "right", and collates them into one batch."""

    def pad(values: Sequence[torch.Tensor], fill: float = 0) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(
            list(values), batch_first=True, padding_value=fill, padding_side=padding_side
        )

    mask_BL = pad([torch.ones(len(sequence), dtype=torch.bool) for sequence in inputs])
    kwargs = {
        name: pad([sequence.sequence[name] for sequence in inputs]) for name in inputs[0].sequence
    }
    return Collated(
        {**kwargs, "attention_mask": mask_BL.long(), **media},
        mask_BL,
        kind=pad([sequence.kind for sequence in inputs]),
        keep=pad([sequence.keep for sequence in inputs]),
        extents=pad([sequence.extents for sequence in inputs], torch.nan),
        spans=pad([sequence.spans for sequence in inputs], -1),
    )
