"""Taps: attention statistics that an encoder can give beside its vectors, one number a token.

A tap is named `statistic/heads/layers`, in specs and as a key of `TokenBatch.taps`. Statistics:

    column_sums   what a token receives from all content tokens (SAP, equation 2)
    eos_row       what the last token, the end of the sequence, gives to it (SAP, equation 11)
    pooled_row    what the model's pooled vector gives to it: the row of the token that is pooled,
                  or for mean pooling the mean of all rows
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

STATISTICS = ("column_sums", "eos_row", "pooled_row")
HEADS = ("mean", "max")
#: SAP's window of the middle layers, as shares of the depth (its equation 9).
MIDDLE = "0.4-0.6"


class Tap(NamedTuple):
    """One statistic, aggregated over the heads of each layer, then averaged over layers.

    Attributes:
        statistic: one of `STATISTICS`.
        heads: "mean" or "max" over the heads.
        layers: "last"; "all"; numbers from 0, such as "2,3", negative ones from the end; or a
            window such as "0.4-0.6": layers floor(0.4 L) to floor(0.6 L), both included, of L.
    """

    statistic: str
    heads: str = "mean"
    layers: str = "last"

    @classmethod
    def parse(cls, name: str) -> Tap:
        """The tap of that name; heads and layers may be left out.

        Raises:
            SpecError: no tap is called so.

        >>> Tap.parse("eos_row")
        Tap(statistic='eos_row', heads='mean', layers='last')
        """
        parts = name.split("/")
        tap = cls(*parts) if len(parts) <= 3 else None
        if tap is None or tap.statistic not in STATISTICS or tap.heads not in HEADS:
            rule = f"STATISTIC/HEADS/LAYERS with {', '.join(STATISTICS)} and {', '.join(HEADS)}"
            raise SpecError("", name, rule)
        if not re.fullmatch(r"last|all|-?\d+(,-?\d+)*|[01](\.\d+)?-[01](\.\d+)?", tap.layers):
            rule = f"STATISTIC/HEADS/LAYERS with layers last, all, 2,3 or a window such as {MIDDLE}"
            raise SpecError("", name, rule)
        return tap

    @property
    def name(self) -> str:
        """The name in full.

        >>> Tap("column_sums", "max", "2,3").name
        'column_sums/max/2,3'
        """
        return "/".join(self)

    def numbers(self, num_layers: int) -> tuple[int, ...]:
        """The layers in a model of that depth, ascending.

        Raises:
            SpecError: the model has no such layer.

        >>> Tap("column_sums", layers="0.4-0.6").numbers(18), Tap("eos_row").numbers(6)
        ((7, 8, 9, 10), (5,))
        """
        if self.layers == "last":
            return (num_layers - 1,)
        if self.layers == "all":
            return tuple(range(num_layers))
        if window := re.fullmatch(r"(\d[.\d]*)-(\d[.\d]*)", self.layers):
            # A hair more, so that 0.3 of 10 layers is 3 and not 2.
            low, high = (math.floor(float(share) * num_layers + 1e-9) for share in window.groups())
            return tuple(range(low, min(high, num_layers - 1) + 1))
        numbers = [int(number) for number in self.layers.split(",")]
        for number in numbers:
            if not -num_layers <= number < num_layers:
                rule = f"from {-num_layers} to {num_layers - 1} (the model has {num_layers} layers)"
                raise SpecError("layers", number, rule)
        return tuple(sorted({number % num_layers for number in numbers}))

    def single(self, num_layers: int) -> tuple[Tap, ...]:
        """The taps of one layer each of which this one is the mean.

        >>> [tap.name for tap in Tap("column_sums", layers="-2,-1").single(6)]
        ['column_sums/mean/4', 'column_sums/mean/5']
        """
        return tuple(self._replace(layers=str(number)) for number in self.numbers(num_layers))


#: A field of a spec that names a tap; written in full.
TapName = Annotated[str, AfterValidator(lambda name: Tap.parse(name).name)]


def single_taps(taps: Iterable[Tap], num_layers: int) -> tuple[Tap, ...]:
    """The taps of one layer that all these taps are made of, each once, in a fixed order."""
    return tuple(sorted({one for tap in taps for one in tap.single(num_layers)}))


def average(tap: Tap, taps: Mapping[str, Tensor], num_layers: int) -> Tensor:
    """A tap over some layers from those of one layer each (SAP, equation 6).

    >>> import torch
    >>> taps = {"eos_row/mean/0": torch.tensor([[1.0]]), "eos_row/mean/1": torch.tensor([[3.0]])}
    >>> average(Tap("eos_row", layers="all"), taps, 2).tolist()
    [[2.0]]
    """
    ones = tap.single(num_layers)
    total = taps[ones[0].name]
    for one in ones[1:]:
        total = total + taps[one.name]
    return total / len(ones)
