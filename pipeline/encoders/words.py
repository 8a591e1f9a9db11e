"""Where the words of items are, for encoders whose tokens lie in words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from pipeline.tokens import TEXT, flat_from_arrow


@dataclass(frozen=True)
class Words:
    """The words of items, and where each is to be seen or heard.

    Attributes:
        first: (B + 1,) int64: the number of the first word of each item.
        spans: (W, 2) int32 characters in the item's text, ascending.
        extents: (W, 6) float32 x0 y0 x1 y1 t0 t1; NaN for what is not known.
        kinds: (W,) int8, what a token of text is that lies in the word.
    """

    first: np.ndarray
    spans: np.ndarray
    extents: np.ndarray
    kinds: np.ndarray

    @classmethod
    def of(cls, items: pa.Table) -> Words:
        """The column `word_spans` of a table, and of `word_boxes`, `word_times` and `word_kinds`
        those that it has."""
        spans, lengths = flat_from_arrow(items["word_spans"])
        extents = np.full((len(spans), 6), np.nan, dtype=np.float32)
        kinds = np.full(len(spans), TEXT, dtype=np.int8)
        names = ("word_boxes", "word_times", "word_kinds")
        for name, target in zip(names, (extents[:, :4], extents[:, 4:], kinds), strict=True):
            if name in items.column_names:
                values, own_lengths = flat_from_arrow(items[name])
                # A row may lack the column: the words of that row have no such place.
                has = np.repeat(own_lengths > 0, lengths)
                target[has] = values
        return cls(np.concatenate([[0], np.cumsum(lengths)]), spans, extents, kinds)

    def places_of(
        self, rows: np.ndarray, spans_BN2: torch.Tensor, kind_BN: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The extents (B, N, 6) and kinds (B, N) of tokens by their characters.

        What lies in no word has no extent, NaN, and the kind that it had.

        >>> spans = np.array([[0, 2], [3, 5]])
        >>> extents = np.array([[0, 0, 0.5, 1, 7, 8], [0.5, 0, 1, 1, 8, 9]], np.float32)
        >>> words = Words(np.array([0, 2]), spans, extents, np.array([1, 1]))
        >>> tokens, kinds = torch.tensor([[[3, 4], [-1, -1]]]), torch.tensor([[2, 4]])
        >>> extents, kinds = words.places_of(np.array([0]), tokens, kinds)
        >>> extents[0, :, 3:].tolist(), kinds.tolist()
        ([[1.0, 8.0, 9.0], [nan, nan, nan]], [[1, 4]])
        """
        starts_BN = spans_BN2[..., 0].cpu().numpy()
        extents = np.full((*starts_BN.shape, 6), np.nan, dtype=np.float32)
        kinds = kind_BN.cpu().numpy().copy()
        for extent_N6, kind_N, starts_N, row in zip(extents, kinds, starts_BN, rows, strict=True):
            own = slice(self.first[row], self.first[row + 1])
            spans_W2 = self.spans[own]
            if len(spans_W2):
                word_N = np.searchsorted(spans_W2[:, 0], starts_N, side="right") - 1
                is_inside = (word_N >= 0) & (starts_N < spans_W2[word_N, 1])
                extent_N6[is_inside] = self.extents[own][word_N[is_inside]]
                kind_N[is_inside] = self.kinds[own][word_N[is_inside]]
        device = spans_BN2.device
        return torch.from_numpy(extents).to(device), torch.from_numpy(kinds).to(device)
