"""Assumptions of a plan: what is known about a corpus and about the machines."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt

from pipeline.config import Spec

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Rates(Spec):
    """Throughput of one actor per stage, in items/s. A null rate is measured."""

    read: Positive | None = None
    """Reading and decoding files."""
    prepare: Positive | None = None
    """OCR, speech recognition and preprocessing; only for encoders that need it."""
    encode: Positive | None = None
    """Forward pass of the encoder."""
    compress: Positive | None = None
    """All compressors and codecs of the spec."""
    write: Positive | None = None
    """Writing fragments."""

    def given(self) -> dict[str, float]:
        """Returns the given rates by stage."""
        return {name: rate for name, rate in dict(self).items() if rate is not None}


class Prices(Spec):
    """Prices in any currency."""

    cpu_hour: NonNegative = 0.0
    """Price of one CPU core for one hour."""
    gpu_hour: NonNegative = 0.0
    """Price of one GPU for one hour."""
    gb_month: NonNegative = 0.0
    """Price of storing 10^9 bytes for one month."""


class Assumptions(Spec):
    """Known properties of a corpus and of the machines, which replace measurements.

    If `num_items`, `tokens`, `dim` and the rates of all stages are given, nothing is measured, and
    the files of the corpus are not needed.
    """

    num_items: PositiveInt | None = None
    """Number of items of the corpus."""
    tokens: Positive | None = None
    """Mean number of token vectors per item."""
    dim: PositiveInt | None = None
    """Dimensions of the token vectors."""
    source_bytes: NonNegative | None = None
    """Mean size of an item's file."""
    payload_bytes: NonNegative | None = None
    """Mean size of a decoded item, which passes through the object store."""
    other_bytes: NonNegative | None = None
    """Mean size of the stored columns other than vectors, such as text and token positions."""
    startup_seconds: NonNegative | None = None
    """Time until the actors have loaded their models."""
    num_cpus: PositiveInt | None = None
    """CPU cores that the stages share. By default those of the Ray cluster if a rate is measured,
    else those that the actors of the resources profile reserve."""
    rates: Rates = Rates()
    """Throughput of one actor per stage."""
    prices: Prices = Prices()
    """Prices of the resources."""
