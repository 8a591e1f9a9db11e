"""Padded batches of token vectors and their conversion to and from Arrow arrays."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import torch

#: Names of the kinds of tokens. `TokenBatch.kind` contains indices into this tuple.
KINDS = ("visual", "audio", "text", "prompt", "special")
VISUAL, AUDIO, TEXT, PROMPT, SPECIAL = range(len(KINDS))


@dataclass(frozen=True)
class TokenBatch:
    """Token vectors of B items, padded to N tokens of dimension D.

    Attributes:
        vectors: Token vectors, (B, N, D) float. The values at padding are undefined.
        mask: True for tokens and False for padding, (B, N) bool. Padding may occur anywhere in a
            row.
        normalised: Whether the token vectors have unit length.
        extents: Bounding box x0, y0, x1, y1 in [0, 1] and time interval t0, t1 in seconds of each
            token, (B, N, 6) float32. Undefined values are NaN.
        spans: Start and end offset of each token in the text of the item, in characters, (B, N, 2)
            int32. Undefined values are -1.
        kind: Kind of each token as an index into `KINDS`, (B, N) int8.
        confidence: Probability that the word of a token was recognised correctly, (B, N) float32.
            NaN for words that do not come from OCR or ASR.
        pooled: One vector per item, as computed by the model, (B, P) float of unit length.
        appended: Vectors of the learned tokens that the encoder appended to each item, (B, M, D)
            float; None for queries and for encoders without such tokens.
        assignment: Assignment of input tokens, (B, M) int64; only set by compressors. For each of
            the M input positions, the output position with the largest weight, or -1 for none.
        grid: Shape (t, y, x) of the token grid of each item, (B, 3) int32.
        objects: Index of the annotated object that contains each token, starting from 1, or 0 for
            the background, (B, N) int64. Set only during training.
        taps: Attention statistics that were requested from the encoder, (B, N) each, by the name of
            their `Tap`; (B, N, M) for `taps.APPENDED_MATRIX`.
    """

    vectors: torch.Tensor
    mask: torch.Tensor
    normalised: bool
    extents: torch.Tensor | None = None
    spans: torch.Tensor | None = None
    kind: torch.Tensor | None = None
    confidence: torch.Tensor | None = None
    pooled: torch.Tensor | None = None
    appended: torch.Tensor | None = None
    assignment: torch.Tensor | None = None
    grid: torch.Tensor | None = None
    objects: torch.Tensor | None = None
    taps: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self):
        assert self.vectors.ndim == 3 and self.mask.shape == self.vectors.shape[:2]
        assert self.mask.dtype == torch.bool

    def __len__(self) -> int:
        return self.vectors.shape[0]

    @cached_property
    def lengths(self) -> torch.Tensor:
        """Number of tokens per item without padding, (B,) int64.

        It is cached, so the mask must not be changed in place.
        """
        return self.mask.sum(dim=1)

    @cached_property
    def is_full(self) -> bool:
        """True if the batch has no padding.

        It is cached, because reading a value from a GPU waits for all preceding kernels.
        """
        return bool(self.mask.all())

    def to(self, device: torch.device | str) -> TokenBatch:
        """Returns a copy of the batch with all tensors on `device`."""
        moved: dict[str, Any] = {
            f.name: value.to(device)
            for f in dataclasses.fields(self)
            if isinstance(value := getattr(self, f.name), torch.Tensor)
        }
        taps = {name: tap.to(device) for name, tap in self.taps.items()}
        return dataclasses.replace(self, **moved, taps=taps)

    def take(self, rows: torch.Tensor | slice) -> TokenBatch:
        """Selects items without changing their padding.

        A slice returns views of the tensors, and one of all items the batch itself.
        """
        if isinstance(rows, slice) and rows.indices(len(self)) == (0, len(self), 1):
            return self

        def take(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[rows if isinstance(rows, slice) else rows.to(tensor.device)]

        selected: dict[str, Any] = {
            f.name: take(value)
            for f in dataclasses.fields(self)
            if isinstance(value := getattr(self, f.name), torch.Tensor)
        }
        taps = {name: take(tap) for name, tap in self.taps.items()}
        result = dataclasses.replace(self, **selected, taps=taps)
        if vars(self).get("is_full"):
            vars(result)["is_full"] = True
        return result


def normalise(vectors: torch.Tensor) -> torch.Tensor:
    """Normalises vectors to unit length along the last axis. Zero vectors remain zero."""
    return vectors / vectors.norm(dim=-1, keepdim=True).clamp_min(1e-12)


def masked_vectors(batch: TokenBatch) -> torch.Tensor:
    """Returns the vectors as a (B, N, D) float32 tensor that is zero at padding."""
    vectors = batch.vectors.float()
    if batch.is_full:  # avoids a copy
        return vectors
    return vectors.masked_fill(~batch.mask.unsqueeze(-1), 0.0)


def unit_vectors(batch: TokenBatch) -> torch.Tensor:
    """Returns unit vectors (B, N, D) float32, zero at padding."""
    vectors = masked_vectors(batch)
    return vectors if batch.normalised else normalise(vectors)


def ragged_to_arrow(padded: torch.Tensor, mask: torch.Tensor, type: pa.DataType) -> pa.ListArray:
    """Converts the rows of a padded (B, N) or (B, N, D) tensor that `mask` selects to a list array.

    >>> values = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [0.0, 0.0]]])
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> ragged_to_arrow(values, mask, pa.float16()).to_pylist()
    [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0]]]
    """
    flat, lengths = flat_rows(padded.detach().cpu(), mask.cpu())
    return lists_of(flat.to(_TORCH_TYPES[type]).numpy(), lengths, type)


def flat_rows(padded: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
    """Selects the rows (T, ...) of a padded (B, N, ...) tensor at which `mask` is True.

    Also returns the number of rows per item, (B,) int64.
    """
    return padded[mask], mask.sum(dim=1).cpu().numpy()


def lists_of(
    flat: np.ndarray, lengths: np.ndarray, type: pa.DataType | None = None
) -> pa.ListArray:
    """Builds a list array from values (T,), or rows (T, D), and the length of each list.

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
    """Flattens a list column to values (T,) or (T, D) and lengths (B,) int64.

    Nulls are treated as empty lists.

    >>> flat, lengths = flat_from_arrow(pa.array([[1, 2], None, [3]], pa.list_(pa.int32())))
    >>> flat.tolist(), lengths.tolist()
    ([1, 2, 3], [2, 0, 1])
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):  # there are no chunks
            column = pa.array([], column.type)
    lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    values = column.flatten()  # unlike `values`, respects nulls and slices
    if pa.types.is_fixed_size_list(values.type):
        dim = values.type.list_size
        return values.flatten().to_numpy(zero_copy_only=False).reshape(-1, dim), lengths
    return values.to_numpy(zero_copy_only=False), lengths


def pad(
    flat: np.ndarray | torch.Tensor, lengths: np.ndarray, fill: float = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pads flat rows (T, ...) to a tensor (B, max length, ...) and returns it with its mask.

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
