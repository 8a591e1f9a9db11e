"""Where the words of items are, for encoders whose tokens lie in words."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import torch

from pipeline.tokens import TEXT, TokenBatch, flat_from_arrow


@dataclass(frozen=True)
class Words:
    """The words of items, and where each is to be seen or heard.

    Attributes:
        first: (B + 1,) int64: the number of the first word of each item.
        spans: (W, 2) int32 characters in the item's text, ascending.
        extents: (W, 6) float32 x0 y0 x1 y1 t0 t1; NaN for what is not known.
        kinds: (W,) int8, what a token of text is that lies in the word.
        confidences: (W,) float32; NaN for what is not known.
    """

    first: np.ndarray
    spans: np.ndarray
    extents: np.ndarray
    kinds: np.ndarray
    confidences: np.ndarray

    @classmethod
    def of(cls, items: pa.Table) -> Words:
        """Reads the words of a table of items.

        Args:
            items: Table with the column `word_spans`, and optionally `word_boxes`, `word_times`,
                `word_kinds` and `word_confidences`.
        """
        spans, lengths = flat_from_arrow(items["word_spans"])
        extents = np.full((len(spans), 6), np.nan, dtype=np.float32)
        kinds = np.full(len(spans), TEXT, dtype=np.int8)
        confidences = np.full(len(spans), np.nan, dtype=np.float32)
        names = ("word_boxes", "word_times", "word_kinds", "word_confidences")
        targets: tuple[np.ndarray, ...] = (extents[:, :4], extents[:, 4:], kinds, confidences)
        for name, target in zip(names, targets, strict=True):
            if name in items.column_names:
                values, own_lengths = flat_from_arrow(items[name])
                # A row may lack the column: the words of that row have no such place.
                has = np.repeat(own_lengths > 0, lengths)
                target[has] = values
        return cls(np.concatenate([[0], np.cumsum(lengths)]), spans, extents, kinds, confidences)

    def place(self, rows: np.ndarray, batch: TokenBatch) -> TokenBatch:
        """Returns a batch of some items whose tokens have extents, kinds and confidences.

        They are found by the tokens' spans. What lies in no word has no extent and no confidence,
        NaN, and the kind that it had.

        >>> spans = np.array([[0, 2], [3, 5]])
        >>> extents = np.array([[0, 0, 0.5, 1, 7, 8], [0.5, 0, 1, 1, 8, 9]], np.float32)
        >>> words = Words(np.array([0, 2]), spans, extents, np.array([1, 1]), np.array([0.5, 1.0]))
        >>> tokens, kinds = torch.tensor([[[3, 4], [-1, -1]]]), torch.tensor([[2, 4]])
        >>> mask = torch.ones(1, 2, dtype=torch.bool)
        >>> batch = TokenBatch(torch.ones(1, 2, 3), mask, True, spans=tokens, kind=kinds)
        >>> batch = words.place(np.array([0]), batch)
        >>> batch.extents[0, :, 3:].tolist(), batch.kind.tolist(), batch.confidence.tolist()
        ([[1.0, 8.0, 9.0], [nan, nan, nan]], [[1, 4]], [[1.0, nan]])
        """
        if batch.spans is None or batch.kind is None:
            raise ValueError("the batch has no spans or no kinds, by which words are found")
        starts_BN = batch.spans[..., 0].cpu().numpy()
        extents = np.full((*starts_BN.shape, 6), np.nan, dtype=np.float32)
        confidences = np.full(starts_BN.shape, np.nan, dtype=np.float32)
        kinds = batch.kind.cpu().numpy().copy()
        for number, row in enumerate(rows):
            own, starts_N = slice(self.first[row], self.first[row + 1]), starts_BN[number]
            spans_W2 = self.spans[own]
            if len(spans_W2):
                word_N = np.searchsorted(spans_W2[:, 0], starts_N, side="right") - 1
                is_inside = (word_N >= 0) & (starts_N < spans_W2[word_N, 1])
                inside = word_N[is_inside]
                extents[number, is_inside] = self.extents[own][inside]
                kinds[number, is_inside] = self.kinds[own][inside]
                confidences[number, is_inside] = self.confidences[own][inside]
        device = batch.spans.device
        return replace(
            batch,
            extents=torch.from_numpy(extents).to(device),
            kind=torch.from_numpy(kinds).to(device),
            confidence=torch.from_numpy(confidences).to(device),
        )
