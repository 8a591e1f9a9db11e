"""TokenBatch: the padded token vectors of one batch, to and from Arrow without Python loops."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import torch

#: Codes of `TokenBatch.kind`.
KINDS = ("visual", "audio", "text", "prompt", "special")
VISUAL, AUDIO, TEXT, PROMPT, SPECIAL = range(len(KINDS))


@dataclass(frozen=True)
class TokenBatch:
    """The token vectors of B items, padded to N tokens of D numbers.

    Attributes:
        vectors: (B, N, D) float. Rows under `mask == False` hold no meaning and may hold anything.
        mask: (B, N) bool, True where a token is real. Real tokens need not be contiguous.
        extents: (B, N, 6) float32 x0 y0 x1 y1 in [0, 1], t0 t1 in seconds; NaN = none. Or None.
        spans: (B, N, 2) int32 character offsets into the item's text; -1 = none. Or None.
        kind: (B, N) int8, an index into `KINDS`. Or None.
        confidence: (B, N) float32, the probability that the token's word was recognised right; NaN
            of words that were not recognised. Or None.
        pooled: (B, P) float: the model's own single vector, unit length. Or None.
        normalised: whether the vectors under the mask have unit length.
        support: (B, M) int64, only on a compressor's output: for each of the M *input* positions
            the output position that stands for it (for soft assignments: most), or -1. Or None.
        grid: per-item token grid (B, 3) int32 as (t, y, x) where tokens form one. Or None.
        objects: (B, N) int64, in training only: the annotated object that each token lies in, from
            1; 0 is background. Or None.
        taps: attention statistics (B, N) by the name of their `Tap`, those that were asked for.
    """

    vectors: torch.Tensor
    mask: torch.Tensor
    normalised: bool
    extents: torch.Tensor | None = None
    spans: torch.Tensor | None = None
    kind: torch.Tensor | None = None
    confidence: torch.Tensor | None = None
    pooled: torch.Tensor | None = None
    support: torch.Tensor | None = None
    grid: torch.Tensor | None = None
    objects: torch.Tensor | None = None
    taps: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self):
        assert self.vectors.ndim == 3 and self.mask.shape == self.vectors.shape[:2]
        assert self.mask.dtype == torch.bool

    def __len__(self) -> int:
        return self.vectors.shape[0]

    @property
    def lengths(self) -> torch.Tensor:
        """(B,) int64: the number of real tokens of each item."""
        return self.mask.sum(dim=1)

    def to(self, device: torch.device | str) -> TokenBatch:
        """The batch with every tensor on `device`."""
        moved: dict[str, Any] = {
            f.name: value.to(device)
            for f in dataclasses.fields(self)
            if isinstance(value := getattr(self, f.name), torch.Tensor)
        }
        taps = {name: tap.to(device) for name, tap in self.taps.items()}
        return dataclasses.replace(self, **moved, taps=taps)

    def take(self, rows: torch.Tensor | slice) -> TokenBatch:
        """The batch of the items at `rows` (int64; of a slice views), padding as it was."""

        def take(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[rows if isinstance(rows, slice) else rows.to(tensor.device)]

        taken: dict[str, Any] = {
            f.name: take(value)
            for f in dataclasses.fields(self)
            if isinstance(value := getattr(self, f.name), torch.Tensor)
        }
        taps = {name: take(tap) for name, tap in self.taps.items()}
        return dataclasses.replace(self, **taken, taps=taps)


def normalise(vectors: torch.Tensor) -> torch.Tensor:
    """Unit length along the last axis; a zero vector stays zero."""
    return vectors / vectors.norm(dim=-1, keepdim=True).clamp_min(1e-12)


def unit_vectors(batch: TokenBatch) -> torch.Tensor:
    """(B, N, D) float32 vectors of unit length under the mask and zero elsewhere."""
    vectors = batch.vectors.float()
    vectors = vectors if batch.normalised else normalise(vectors)
    if bool(batch.mask.all()):  # without padding, a copy less
        return vectors
    return vectors.masked_fill(~batch.mask.unsqueeze(-1), 0.0)


def ragged_to_arrow(padded: torch.Tensor, mask: torch.Tensor, type: pa.DataType) -> pa.ListArray:
    """A padded tensor (B, N) or (B, N, D) -> a list array of the rows under `mask`.

    >>> values = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [0.0, 0.0]]])
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> ragged_to_arrow(values, mask, pa.float16()).to_pylist()
    [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0]]]
    """
    flat, lengths = flat_rows(padded.detach().cpu(), mask.cpu())
    return lists_of(flat.to(_TORCH_TYPES[type]).numpy(), lengths, type)


def flat_rows(padded: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
    """A padded tensor (B, N, ...) -> the rows under `mask` (T, ...), lengths (B,) int64."""
    return padded[mask], mask.sum(dim=1).cpu().numpy()


def lists_of(
    flat: np.ndarray, lengths: np.ndarray, type: pa.DataType | None = None
) -> pa.ListArray:
    """Flat rows (T,) or (T, D) and lengths (B,) -> a list array, of fixed-size lists if (T, D).

    >>> lists_of(np.array([[1, 2], [3, 4], [5, 6]]), np.array([2, 0, 1])).to_pylist()
    [[[1, 2], [3, 4]], [], [[5, 6]]]
    """
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    values = pa.array(flat.reshape(-1), type)
    if flat.ndim == 2:
        values = pa.FixedSizeListArray.from_arrays(values, flat.shape[1])
    return pa.ListArray.from_arrays(pa.array(offsets), values)


_TORCH_TYPES = {
    pa.float16(): torch.float16,
    pa.float32(): torch.float32,
    pa.int32(): torch.int32,
    pa.int16(): torch.int16,
    pa.uint16(): torch.uint16,
    pa.int8(): torch.int8,
}


def flat_from_arrow(column: pa.ListArray | pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """A list column -> (flat values (T,) or (T, D), lengths (B,)); null lists have length 0.

    >>> flat, lengths = flat_from_arrow(pa.array([[1, 2], None, [3]], pa.list_(pa.int32())))
    >>> flat.tolist(), lengths.tolist()
    ([1, 2, 3], [2, 0, 1])
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):  # no chunk at all
            column = pa.array([], column.type)
    lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    values = column.flatten()  # leaves out what lies under null lists and outside a slice
    if pa.types.is_fixed_size_list(values.type):
        dim = values.type.list_size
        return values.flatten().to_numpy(zero_copy_only=False).reshape(-1, dim), lengths
    return values.to_numpy(zero_copy_only=False), lengths


def pad(
    flat: np.ndarray | torch.Tensor, lengths: np.ndarray, fill: float = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat rows (T, ...) and lengths (B,) -> padded (B, max length, ...) and its mask.

    Both are on the device of `flat`.

    >>> padded, mask = pad(np.array([1, 2, 3]), np.array([1, 2]))
    >>> padded.tolist(), mask.tolist()
    ([[1, 0], [2, 3]], [[True, False], [True, True]])
    """
    if isinstance(flat, np.ndarray):
        flat = torch.from_numpy(np.ascontiguousarray(flat) if flat.flags.writeable else flat.copy())
    size = int(lengths.max()) if len(lengths) else 0
    lengths_B = torch.as_tensor(lengths, device=flat.device)
    mask = torch.arange(size, device=flat.device) < lengths_B.unsqueeze(1)
    padded = flat.new_full((len(lengths), size, *flat.shape[1:]), fill)
    padded[mask] = flat
    return padded, mask
