"""Typed metadata of the columns of an index: parsed from the stored JSON here, and written here."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
from pydantic import ValidationError
from pydantic.dataclasses import dataclass

from pipeline.config import SpecError, describe, dump
from pipeline.index.positions import EXTENTS
from pipeline.schema import FORMAT_VERSION, WORD_CONFIDENCES, column_metadata
from pipeline.taps import Tap

if TYPE_CHECKING:  # reading an index does not need torch
    from pipeline.encoders import Encoder
    from pipeline.registry import EncoderSpec

#: How a stored assignment is to be read, see `stages.support_column`.
SupportForm = Literal["assignment", "indices"]


@dataclass(frozen=True)
class EncoderInfo:
    """An encoder as an index knows it, without loading it.

    Attributes:
        spec: Settings of the encoder, with its name.
        fingerprint: Hash of the weights and of the settings that change vectors.
        dim: Number of dimensions of a token vector.
        pooled_dim: Number of dimensions of the single vector; None without one.
        normalised: Whether token vectors have unit length.
        has_spans: Whether tokens have character ranges.
        has_extents: Whether tokens have boxes or times.
        has_confidence: Whether tokens have the confidence of a recogniser.
        prefix: Prefix of the names of the encoder's own columns.
        num_layers: Number of layers of a model that gives attention statistics.
        query_kinds: Kinds of queries that it reads, of `QUERY_KINDS`; empty: only vectors.
    """

    spec: dict[str, Any]
    fingerprint: str
    dim: int
    pooled_dim: int | None
    normalised: bool
    has_spans: bool
    has_extents: bool
    prefix: str
    num_layers: int | None = None
    query_kinds: tuple[str, ...] = ("text",)
    has_confidence: bool = False

    @classmethod
    def from_encoder(cls, encoder: Encoder, spec: EncoderSpec) -> EncoderInfo:
        """Describes a loaded encoder."""
        attention = encoder.attention(spec)
        return cls(
            spec=dump(spec),
            fingerprint=encoder.fingerprint,
            dim=encoder.dim,
            pooled_dim=encoder.pooled_dim,
            normalised=encoder.normalised,
            has_spans=encoder.has_spans,
            has_extents=encoder.has_extents,
            prefix=encoder.column_prefix(spec),
            num_layers=attention.num_layers if attention else None,
            query_kinds=encoder.query_kinds(spec),
            has_confidence=encoder.has_confidence,
        )

    @property
    def name(self) -> str:
        """Registered name of the encoder."""
        return self.spec["name"]

    def for_field(self, field: str) -> EncoderInfo:
        """Returns the info for a field of the items: captions have columns of their own."""
        if field == "content":
            return self
        prefix = f"{self.prefix}_{field}"
        return replace(self, has_extents=False, has_confidence=False, prefix=prefix)

    @property
    def pooled_column(self) -> str | None:
        """Name of the column of single vectors; None without them."""
        return f"{self.prefix}_pooled" if self.pooled_dim else None

    @property
    def position_types(self) -> dict[str, pa.DataType]:
        """Types in use of the token positions, by `TokenBatch` field; see `stored_type`."""
        types = {}
        if self.has_spans:
            types["spans"] = pa.list_(pa.list_(pa.int32(), 2))
        if self.has_extents:
            types["extents"] = EXTENTS
        if self.has_confidence:
            types["confidence"] = WORD_CONFIDENCES
        return types

    def position_column(self, kind: str) -> str:
        """Returns the name of the column of one kind of token positions."""
        return f"{self.prefix}_{kind}"

    def tap_column(self, tap: Tap) -> str:
        """Returns the name of the column of an attention statistic of one layer."""
        return f"{self.prefix}_{tap.statistic}_{tap.heads}_{tap.layers}_tap"


@dataclass(frozen=True)
class RepresentationInfo:
    """A stored representation: one column of token vectors and the columns that go with it.

    Attributes:
        name: Name of the column.
        encoder: Encoder of the token vectors; its `has_*` hold for columns that the index has.
        compressor: Settings of the compressor, with its name.
        codec: Settings of the codec, with its name.
        artefact: Name of the file with the fitted state of the compressor; None without one.
        codec_artefact: Name of the file with the fitted state of the codec; None without one.
        dim: Number of dimensions of a stored vector.
        normalised: Whether the vectors have unit length before the codec encodes them.
        field: Field of the items that it represents, "content" or "caption".
        text_column: Column of the text in which the spans count characters.
        pooled_column: Column of the encoder's single vectors; None without one.
        positions: Columns of token positions, by `TokenBatch` field.
        support_column: Column of the assignment of tokens to vectors; None without one.
        support_form: Form of that column; None where the index lacks it.
        format_version: Version of the index format that wrote the column.
    """

    name: str
    encoder: EncoderInfo
    compressor: dict[str, Any]
    codec: dict[str, Any]
    artefact: str | None
    codec_artefact: str | None
    dim: int
    normalised: bool
    field: str
    text_column: str
    pooled_column: str | None
    positions: dict[str, str]
    support_column: str | None = None
    support_form: SupportForm | None = None
    format_version: int = FORMAT_VERSION

    @classmethod
    def from_schema(cls, schema: pa.Schema, name: str) -> RepresentationInfo:
        """Parses the metadata of a representation's column; keys of newer versions are ignored.

        Raises:
            SpecError: The metadata is malformed.
        """
        stored = column_metadata(schema.field(name))
        try:
            positions, pooled = stored["positions"], stored["pooled"]
            encoder_name, support = stored["encoder"]["name"], stored.get("support")
            # Older versions did not store the keys that have a default here.
            query_kinds = () if encoder_name == "precomputed" else ("text",)
            encoder = EncoderInfo(
                spec=stored["encoder"],
                fingerprint=stored["fingerprint"],
                dim=stored.get("query_dim", stored["dim"]),
                pooled_dim=schema.field(pooled).type.list_size if pooled in schema.names else None,
                normalised=stored["normalised"],
                has_spans=positions.get("spans") in schema.names,
                has_extents=positions.get("extents") in schema.names,
                prefix=stored.get("columns", encoder_name),
                num_layers=stored.get("num_layers"),
                query_kinds=stored.get("queries", query_kinds),
                has_confidence=positions.get("confidence") in schema.names,
            )
            return cls(
                name=name,
                encoder=encoder,
                compressor=stored["compressor"],
                codec=stored["codec"],
                artefact=stored["artefact"],
                codec_artefact=stored.get("codec_artefact"),
                dim=stored["dim"],
                normalised=stored["normalised"],
                field=stored.get("of", "content"),
                text_column=stored.get("text", "text"),
                pooled_column=pooled,
                positions=positions,
                support_column=support,
                support_form=(
                    column_metadata(schema.field(support))["form"]
                    if support in schema.names
                    else None
                ),
                format_version=stored.get("format_version", 0),
            )
        except (KeyError, TypeError, AttributeError, ValidationError) as error:
            raise _malformed(name, error) from None

    def to_metadata(self) -> dict[str, Any]:
        """Returns the metadata to store with the column."""
        support = {} if self.support_column is None else {"support": self.support_column}
        return {
            "format_version": self.format_version,
            "role": "search",
            "encoder": self.encoder.spec,
            "fingerprint": self.encoder.fingerprint,
            "compressor": self.compressor,
            "codec": self.codec,
            "artefact": self.artefact,
            "codec_artefact": self.codec_artefact,
            "dim": self.dim,
            "query_dim": self.encoder.dim,
            "normalised": self.normalised,
            "score": "sum",
            "of": self.field,
            "text": self.text_column,
            "columns": self.encoder.prefix,
            "pooled": self.pooled_column,
            "num_layers": self.encoder.num_layers,
            "queries": list(self.encoder.query_kinds),
            "positions": self.positions,
            **support,
        }

    @property
    def token_columns(self) -> list[str]:
        """Columns beside the vectors: the assignment, if it is stored, and the positions."""
        support = [] if self.support_column is None else [self.support_column]
        return [*support, *self.positions.values()]

    @property
    def is_uncompressed(self) -> bool:
        """Whether every token has a vector of its own."""
        return self.compressor["name"] == "none"

    @property
    def is_fitted(self) -> bool:
        """Whether the compressor or the codec was fitted on a sample."""
        return bool(self.artefact or self.codec_artefact)

    @property
    def compressor_fit(self) -> dict[str, Any]:
        """What the artefact of the compressor was fitted for."""
        return {"fingerprint": self.encoder.fingerprint, "compressor": self.compressor}

    @property
    def codec_fit(self) -> dict[str, Any]:
        """What the artefact of the codec was fitted for."""
        return {**self.compressor_fit, "artefact": self.artefact, "codec": self.codec}


@dataclass(frozen=True)
class PooledInfo:
    """A column of an encoder's single vectors.

    Attributes:
        name: Name of the column.
        encoder: Registered name of the encoder.
        fingerprint: Hash of the weights and of the settings that change vectors.
    """

    name: str
    encoder: str
    fingerprint: str

    @classmethod
    def from_schema(cls, schema: pa.Schema, name: str) -> PooledInfo:
        """Parses the metadata of the column.

        Raises:
            SpecError: The metadata is malformed.
        """
        stored = column_metadata(schema.field(name))
        try:
            return cls(name, stored["encoder"]["name"], stored["fingerprint"])
        except (KeyError, TypeError, ValidationError) as error:
            raise _malformed(name, error) from None


@dataclass(frozen=True)
class RerankInfo:
    """The column of what an EDJE's adapter makes of the items.

    Attributes:
        name: Name of the column.
        adapter: Fingerprint of the adapter; "unknown" if it was not stored.
        encoder: Registered name of the encoder that the adapter reads.
        dim: Number of dimensions of a token.
    """

    name: str
    adapter: str
    encoder: str | None
    dim: int | None

    @classmethod
    def from_schema(cls, schema: pa.Schema, name: str) -> RerankInfo:
        """Parses the metadata of the column.

        Raises:
            SpecError: The metadata is malformed.
        """
        stored = column_metadata(schema.field(name))
        try:
            adapter = stored.get("adapter", {}).get("fingerprint", "unknown")
            return cls(name, adapter, stored.get("encoder", {}).get("name"), stored.get("dim"))
        except (AttributeError, ValidationError) as error:
            raise _malformed(name, error) from None


def columns_with_role(schema: pa.Schema, role: str) -> list[str]:
    """Returns the names of the columns that have a role in the index."""
    return [column.name for column in schema if column_metadata(column).get("role") == role]


def representation_infos(schema: pa.Schema) -> dict[str, RepresentationInfo]:
    """Returns the stored representations by name.

    Raises:
        SpecError: The metadata of a column is malformed.
    """
    names = columns_with_role(schema, "search")
    return {name: RepresentationInfo.from_schema(schema, name) for name in names}


def pooled_infos(schema: pa.Schema) -> dict[str, PooledInfo]:
    """Returns the columns of single vectors by name.

    Raises:
        SpecError: The metadata of a column is malformed.
    """
    names = columns_with_role(schema, "single")
    return {name: PooledInfo.from_schema(schema, name) for name in names}


def rerank_infos(schema: pa.Schema) -> dict[str, RerankInfo]:
    """Returns the columns for reranking by name.

    Raises:
        SpecError: The metadata of a column is malformed.
    """
    names = columns_with_role(schema, "rerank")
    return {name: RerankInfo.from_schema(schema, name) for name in names}


def tap_names(schema: pa.Schema) -> list[str]:
    """Returns the names of the attention statistics that the index stores, each once."""
    names = columns_with_role(schema, "tap")
    return list(dict.fromkeys(column_metadata(schema.field(name))["tap"] for name in names))


def newest_format(schema: pa.Schema) -> int:
    """Returns the highest format version of a representation; 0 if there is none."""
    names = columns_with_role(schema, "search")
    versions = (column_metadata(schema.field(name)).get("format_version", 0) for name in names)
    return max(versions, default=0)


def _malformed(column: str, error: Exception) -> SpecError:
    """Returns the error of a column whose metadata cannot be parsed."""
    if isinstance(error, ValidationError):
        cause = describe(error)
        detail = f"{cause.field} must be {cause.rule}"
    else:
        detail = f"{type(error).__name__}: {error}"
    return SpecError("index", column, "a column with valid metadata", f"is malformed ({detail})")
