"""Attention statistics ("taps"), which encoders can return in addition to token vectors.

A statistic has one value per token. Specs refer to it as `statistic/heads/layers`, which is also
its key in `TokenBatch.taps`. The following statistics are available:

- `column_sums`: Attention that a token receives from all content tokens (SAP, eq. 2).
- `eos_row`: Attention from the last token of the sequence (SAP, eq. 11).
- `pooled_row`: Attention from the pooled vector of the model. This is the attention row of the
  pooled token or, for models with mean pooling, the mean of all rows.
- `appended_rows`: Mean attention from the learned tokens that the encoder appends to an item (AGC,
  section 5.1). Only encoders with `appended_tokens` have it.
- `appended_softmax`: The same with a softmax over the tokens of the sequence for each appended
  token, as in the public code of AGC.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, NamedTuple

from pydantic import AfterValidator

from pipeline.config import SpecError

if TYPE_CHECKING:
    from torch import Tensor

#: Statistics of every model, and those of models with appended tokens.
MODEL_STATISTICS = ("column_sums", "eos_row", "pooled_row")
APPENDED_STATISTICS = ("appended_rows", "appended_softmax")
#: Attention from each of the M appended tokens, (B, N, M), for analyses. Not valid in specs.
APPENDED_MATRIX = "appended_matrix"
STATISTICS = (*MODEL_STATISTICS, *APPENDED_STATISTICS)
HEADS = ("mean", "max")
#: Layers that SAP uses, as fractions of the depth of the model (eq. 9).
MIDDLE = "0.4-0.6"


class Tap(NamedTuple):
    """Attention statistic that is aggregated over the heads of a layer and averaged over layers.

    Attributes:
        statistic: One of `STATISTICS`.
        heads: Aggregation over the heads of a layer, "mean" or "max".
        layers: "last", "all", a comma-separated list of layer indices such as "2,3", where negative
            indices count from the end, or a window such as "0.4-0.6". For a model with L layers,
            this window comprises layers floor(0.4 L) to floor(0.6 L), inclusive.
    """

    statistic: str
    heads: str = "mean"
    layers: str = "last"

    @classmethod
    def parse(cls, name: str) -> Tap:
        """Parses the name of a statistic. The heads and the layers may be omitted.

        Raises:
            SpecError: The name is invalid.

        >>> Tap.parse("eos_row")
        Tap(statistic='eos_row', heads='mean', layers='last')
        """
        parts = name.split("/")
        tap = cls(*parts) if len(parts) <= 3 else None
        layers = r"last|all|-?\d+(,-?\d+)*|[01](\.\d+)?-[01](\.\d+)?"
        is_valid = tap is not None and tap.statistic in STATISTICS and tap.heads in HEADS
        if tap is None or not is_valid or not re.fullmatch(layers, tap.layers):
            rule = (
                f"STATISTIC/HEADS/LAYERS with {', '.join(STATISTICS)}, {', '.join(HEADS)} and"
                f" layers last, all, 2,3 or a window such as {MIDDLE}"
            )
            raise SpecError("", name, rule)
        return tap

    @property
    def name(self) -> str:
        """Complete name of the statistic, including heads and layers.

        >>> Tap("column_sums", "max", "2,3").name
        'column_sums/max/2,3'
        """
        return "/".join(self)

    def layer_indices(self, num_layers: int) -> tuple[int, ...]:
        """Returns the layer indices for a model with `num_layers` layers, in ascending order.

        Raises:
            SpecError: The model does not have enough layers.

        >>> Tap("column_sums", layers="0.4-0.6").layer_indices(18)
        (7, 8, 9, 10)
        >>> Tap("eos_row").layer_indices(6)
        (5,)
        """
        if self.layers == "last":
            return (num_layers - 1,)
        if self.layers == "all":
            return tuple(range(num_layers))
        if window := re.fullmatch(r"(\d[.\d]*)-(\d[.\d]*)", self.layers):
            # The tolerance compensates for rounding errors, for example in 0.3 * 10 layers.
            low, high = (math.floor(float(bound) * num_layers + 1e-9) for bound in window.groups())
            return tuple(range(low, min(high, num_layers - 1) + 1))
        numbers = [int(number) for number in self.layers.split(",")]
        for number in numbers:
            if not -num_layers <= number < num_layers:
                rule = f"from {-num_layers} to {num_layers - 1} (the model has {num_layers} layers)"
                raise SpecError("layers", number, rule)
        return tuple(sorted({number % num_layers for number in numbers}))

    def split_layers(self, num_layers: int) -> tuple[Tap, ...]:
        """Returns the statistics of single layers whose mean is this statistic.

        >>> [tap.name for tap in Tap("column_sums", layers="-2,-1").split_layers(6)]
        ['column_sums/mean/4', 'column_sums/mean/5']
        """
        indices = self.layer_indices(num_layers)
        return tuple(self._replace(layers=str(index)) for index in indices)


#: Type of spec fields that name an attention statistic. Names are stored in their complete form.
TapName = Annotated[str, AfterValidator(lambda name: Tap.parse(name).name)]


def single_layer_taps(taps: Iterable[Tap], num_layers: int) -> tuple[Tap, ...]:
    """Returns the single-layer statistics that are needed to compute `taps`, without duplicates."""
    return tuple(sorted({part for tap in taps for part in tap.split_layers(num_layers)}))


def average_layers(tap: Tap, taps: Mapping[str, Tensor], num_layers: int) -> Tensor:
    """Computes a statistic as the mean of statistics of single layers, by name (SAP, eq. 6).

    >>> import torch
    >>> taps = {"eos_row/mean/0": torch.tensor([[1.0]]), "eos_row/mean/1": torch.tensor([[3.0]])}
    >>> average_layers(Tap("eos_row", layers="all"), taps, 2).tolist()
    [[2.0]]
    """
    parts = tap.split_layers(num_layers)
    total = taps[parts[0].name]
    for part in parts[1:]:
        total = total + taps[part.name]
    return total / len(parts)
