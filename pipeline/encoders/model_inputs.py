"""Sequences as a model reads them: one at a time, serialised, and padded into batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import safetensors.torch
import torch


@dataclass(frozen=True)
class ModelInput:
    """One sequence of L positions as a model reads it, without a batch axis or padding.

    Attributes:
        sequence: (L,) tensors that a batch pads, such as `input_ids` and `token_type_ids`.
        media: Tensors that a batch joins along their first axis, such as pixels and grids.
        kind: (L,) int8 codes of `tokens.KINDS`.
        keep: (L,) bool, True for positions that become tokens of the item.
        extents: (L, 6) float32 x0 y0 x1 y1 t0 t1; NaN: none.
        spans: (L, 2) int32 character offsets in the item's text; -1: none.
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
        """Returns an input; by default all positions are kept, and none has extents or a span."""
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
    def of_tensors(cls, named: Mapping[str, torch.Tensor]) -> ModelInput:
        """Returns the input whose `tensors` these are."""
        parts: dict[str, dict[str, torch.Tensor]] = {"sequence": {}, "media": {}}
        rest = {}
        for name, tensor in named.items():
            part, _, own = name.partition(".")
            if own:
                parts[part][own] = tensor
            else:
                rest[name] = tensor
        return cls(parts["sequence"], parts["media"], **rest)


def pack(inputs: Iterable[ModelInput]) -> bytes:
    """Serialises the sequences of an item in the format of safetensors."""
    named = {
        f"{number}.{name}": tensor.contiguous()
        for number, read in enumerate(inputs)
        for name, tensor in read.tensors().items()
    }
    return safetensors.torch.save(named)


def unpack(data: bytes) -> list[ModelInput]:
    """Returns the sequences that `pack` serialised."""
    parts: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in safetensors.torch.load(data).items():
        number, _, own = name.partition(".")
        parts.setdefault(int(number), {})[own] = tensor
    return [ModelInput.of_tensors(parts[number]) for number in sorted(parts)]


@dataclass(frozen=True)
class Collated:
    """B sequences of one forward pass, padded to L positions.

    Attributes:
        given: Arguments of the model.
        mask_BL: True for positions that are not padding.
        kind, keep, extents, spans: As in `ModelInput`, with a first axis of B.
    """

    given: dict[str, torch.Tensor]
    mask_BL: torch.Tensor
    kind: torch.Tensor
    keep: torch.Tensor
    extents: torch.Tensor
    spans: torch.Tensor

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Collated:
        """Returns the same with a function applied to every tensor."""
        names = ("mask_BL", "kind", "keep", "extents", "spans")
        given = {name: function(tensor) for name, tensor in self.given.items()}
        return Collated(given, *(function(getattr(self, name)) for name in names))


def collate(
    inputs: Sequence[ModelInput], media: Mapping[str, torch.Tensor], padding_side: str
) -> Collated:
    """Pads sequences to one batch.

    Args:
        inputs: Sequences of the batch.
        media: The media of the batch, joined as the model reads them.
        padding_side: Side on which short sequences are padded: "left" or "right".
    """

    def padded(values: Sequence[torch.Tensor], fill: float = 0) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(
            list(values), batch_first=True, padding_value=fill, padding_side=padding_side
        )

    mask_BL = padded([torch.ones(len(read), dtype=torch.bool) for read in inputs])
    given = {name: padded([read.sequence[name] for read in inputs]) for name in inputs[0].sequence}
    return Collated(
        {**given, "attention_mask": mask_BL.long(), **media},
        mask_BL,
        kind=padded([read.kind for read in inputs]),
        keep=padded([read.keep for read in inputs]),
        extents=padded([read.extents for read in inputs], torch.nan),
        spans=padded([read.spans for read in inputs], -1),
    )
