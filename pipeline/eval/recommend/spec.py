"""Options of a recommendation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator

from pipeline.compression import NumVectors
from pipeline.config import Spec, SpecError
from pipeline.registry import CODECS, COMPRESSORS, IMPORT_PATH, BenchmarkSpec, CodecSpec

#: Methods that are compared by default. They need nothing but the vectors and the positions of the
#: tokens.
DEFAULT_METHODS = ("none", "hpool", "samer", "spatial", "kcenter")
DEFAULT_BUDGETS = (1, 2, 4, 8, 16, 32, 64)
DEFAULT_CODECS = ("float16", "int8")

Limit = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RecommendSpec(Spec):
    """Options of `maxray plan recommend`."""

    index: str
    """URI of the index."""
    representation: str = "full"
    """Name of the uncompressed representation."""
    retain: float = Field(0.95, gt=0, le=1)
    """Fraction of the uncompressed quality that must be retained."""
    max_bytes: Limit | None = None
    """Maximum number of vector bytes per item, or None for no limit."""
    max_milliseconds: Limit | None = None
    """Maximum scoring time per query in milliseconds, or None for no limit."""
    methods: Annotated[list[str], Field(min_length=1)] = Field(
        default_factory=lambda: list(DEFAULT_METHODS)
    )
    """Names of the compressors to compare."""
    budgets: Annotated[list[NumVectors], Field(min_length=1)] = Field(
        default_factory=lambda: list(DEFAULT_BUDGETS)
    )
    """Numbers of vectors per item to compare."""
    codecs: Annotated[list[CodecSpec], Field(min_length=1)] = Field(
        default_factory=lambda: [CODECS.resolve(name) for name in DEFAULT_CODECS]
    )
    """Codecs to compare."""
    benchmark: BenchmarkSpec | None = None
    """Judged queries, or None to use pseudo-queries."""
    query_vectors: str = ""
    """Parquet file with the vectors of the judged queries; empty to encode their texts."""
    judged: Literal["auto", "parent", "item"] = "auto"
    """Level of the judged ids, see `EvaluateSpec.judged`."""
    filter: str | None = None
    """SQL condition on the item columns, which restricts the items."""
    sample: PositiveInt = 500
    """Number of items that are sampled, in addition to the judged items."""
    num_queries: PositiveInt = 300
    """Maximum number of queries or pseudo-queries."""
    validate_estimate: bool = False
    """Whether to validate the recommendations with half of the queries and without queries."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of the sample, the pseudo-queries and the bootstrap."""

    @field_validator("methods")
    @classmethod
    def _check_methods(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in COMPRESSORS.names() and not IMPORT_PATH.fullmatch(name):
                raise SpecError.unknown_name("", name, COMPRESSORS.names())
        return names

    @field_validator("methods", "budgets", "codecs")
    @classmethod
    def _drop_duplicates(cls, values: list[Any]) -> list[Any]:
        return [value for number, value in enumerate(values) if value not in values[:number]]
