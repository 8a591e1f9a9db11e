"""Locations of the words of items, which determine the extents of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import torch

from pipeline.tokens import TEXT, TokenBatch, flat_from_arrow


@dataclass(frozen=True)
class Words:
    """Words of B items and their locations on pages and in time.

    Attributes:
        first: Index of the first word of each item, (B + 1,) int64.
        spans: Character offsets in the item's text, (W, 2) int32 in ascending order.
        extents: Boxes and times x0 y0 x1 y1 t0 t1, (W, 6) float32, or NaN if unknown.
        kinds: Kind of the text tokens in each word, (W,) int8.
        confidences: Confidence of the recogniser, (W,) float32, or NaN if unknown.
    """

    first: np.ndarray
    spans: np.ndarray
    extents: np.ndarray
    kinds: np.ndarray
    confidences: np.ndarray

    @classmethod
    def from_items(cls, items: pa.Table) -> Words:
        """Reads the words of items from `word_spans` and optional columns such as `word_boxes`."""
        spans, lengths = flat_from_arrow(items["word_spans"])
        extents = np.full((len(spans), 6), np.nan, dtype=np.float32)
        kinds = np.full(len(spans), TEXT, dtype=np.int8)
        confidences = np.full(len(spans), np.nan, dtype=np.float32)
        names = ("word_boxes", "word_times", "word_kinds", "word_confidences")
        targets: tuple[np.ndarray, ...] = (extents[:, :4], extents[:, 4:], kinds, confidences)
        for name, target in zip(names, targets, strict=True):
            if name in items.column_names:
                values, value_lengths = flat_from_arrow(items[name])
                # The value of a row may be null, in which case its words keep the default.
                target[np.repeat(value_lengths > 0, lengths)] = values
        return cls(np.concatenate([[0], np.cumsum(lengths)]), spans, extents, kinds, confidences)

    def annotate(self, rows: np.ndarray, batch: TokenBatch) -> TokenBatch:
        """Adds extents, kinds and confidences to the tokens of a batch, located by their spans.

        Tokens outside words have extents and confidence NaN and keep their kind.

        >>> spans = np.array([[0, 2], [3, 5]])
        >>> extents = np.array([[0, 0, 0.5, 1, 7, 8], [0.5, 0, 1, 1, 8, 9]], np.float32)
        >>> words = Words(np.array([0, 2]), spans, extents, np.array([1, 1]), np.array([0.5, 1.0]))
        >>> tokens, kinds = torch.tensor([[[3, 4], [-1, -1]]]), torch.tensor([[2, 4]])
        >>> mask = torch.ones(1, 2, dtype=torch.bool)
        >>> batch = TokenBatch(torch.ones(1, 2, 3), mask, True, spans=tokens, kind=kinds)
        >>> batch = words.annotate(np.array([0]), batch)
        >>> batch.extents[0, :, 3:].tolist(), batch.kind.tolist(), batch.confidence.tolist()
        ([[1.0, 8.0, 9.0], [nan, nan, nan]], [[1, 4]], [[1.0, nan]])
        """
        if batch.spans is None or batch.kind is None:
            raise ValueError("cannot locate tokens: the batch has no spans or no kinds")
        starts_BN = batch.spans[..., 0].cpu().numpy()
        extents = np.full((*starts_BN.shape, 6), np.nan, dtype=np.float32)
        confidences = np.full(starts_BN.shape, np.nan, dtype=np.float32)
        kinds = batch.kind.cpu().numpy().copy()
        for number, row in enumerate(rows):
            words, starts_N = slice(self.first[row], self.first[row + 1]), starts_BN[number]
            spans_W2 = self.spans[words]
            if len(spans_W2):
                word_N = np.searchsorted(spans_W2[:, 0], starts_N, side="right") - 1
                is_inside = (word_N >= 0) & (starts_N < spans_W2[word_N, 1])
                inside = word_N[is_inside]
                extents[number, is_inside] = self.extents[words][inside]
                kinds[number, is_inside] = self.kinds[words][inside]
                confidences[number, is_inside] = self.confidences[words][inside]
        device = batch.spans.device
        return replace(
            batch,
            extents=torch.from_numpy(extents).to(device),
            kind=torch.from_numpy(kinds).to(device),
            confidence=torch.from_numpy(confidences).to(device),
        )
