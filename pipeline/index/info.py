"""Typed metadata of the columns of an index, which is stored as JSON."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
from pydantic import ValidationError
from pydantic.dataclasses import dataclass

from pipeline.config import WEIGHTS_HASH, ComponentSpec, SpecError, describe, dump, within
from pipeline.index.positions import EXTENTS
from pipeline.registry import CODECS, COMPRESSORS, short_name
from pipeline.schema import FORMAT_VERSION, WORD_CONFIDENCES, column_metadata
from pipeline.taps import Tap

if TYPE_CHECKING:  # reading an index does not need torch
    from pipeline.encoders import Encoder
    from pipeline.registry import EncoderSpec

#: Encoding of a stored token assignment, see `token_columns.assignment_column`.
AssignmentForm = Literal["assignment", "indices"]
#: Separator of the column and the length of a prefix. Names of columns cannot contain it.
PREFIX_SEPARATOR = "@"


@dataclass(frozen=True)
class EncoderInfo:
    """Description of an encoder. It can be read without loading the encoder.

    Attributes:
        spec: Resolved settings of the encoder as JSON values.
        fingerprint: Hash of the weights and of the settings that affect the vectors.
        dim: Dimensions of the token vectors.
        pooled_dim: Dimensions of the single vectors, or None without them.
        normalised: Whether token vectors have unit length.
        has_spans: Whether tokens have character ranges.
        has_extents: Whether tokens have boxes or times.
        has_confidence: Whether tokens have recognition confidences.
        num_layers: Number of layers with attention statistics, or None without them.
        query_kinds: Supported members of `QUERY_KINDS`, or empty if queries must be vectors.
        see: Encoder of the item field `image`, or None without one.
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
    see: EncoderInfo | None = None

    @classmethod
    def from_encoder(cls, encoder: Encoder, spec: EncoderSpec) -> EncoderInfo:
        """Returns the info of a loaded encoder."""
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

    def of_field(self, field: str) -> EncoderInfo:
        """Returns the encoder of an item field: `see` for images, else this one."""
        return self.see if field == "image" and self.see is not None else self

    def for_field(self, field: str) -> EncoderInfo:
        """Returns the info for an item field. Each has a separate column prefix."""
        if field == "content":
            return self
        encoder = self.of_field(field)
        info = replace(encoder, prefix=f"{encoder.prefix}_{field}")
        return replace(info, has_extents=False, has_confidence=False) if encoder is self else info

    @property
    def pooled_column(self) -> str | None:
        """Name of the column with single vectors, or None if the encoder has none."""
        return f"{self.prefix}_pooled" if self.pooled_dim else None

    @property
    def position_types(self) -> dict[str, pa.DataType]:
        """In-memory types of the token positions by `TokenBatch` field. See `stored_type`."""
        types = {}
        if self.has_spans:
            types["spans"] = pa.list_(pa.list_(pa.int32(), 2))
        if self.has_extents:
            types["extents"] = EXTENTS
        if self.has_confidence:
            types["confidence"] = WORD_CONFIDENCES
        return types

    def position_column(self, kind: str) -> str:
        """Returns the name of a column of token positions: `spans`, `extents` or `confidence`."""
        return f"{self.prefix}_{kind}"

    def tap_column(self, tap: Tap) -> str:
        """Returns the name of the column of an attention statistic of one layer."""
        return f"{self.prefix}_{tap.statistic}_{tap.heads}_{tap.layers}_tap"


@dataclass(frozen=True)
class RepresentationInfo:
    """Metadata of a stored representation, which has a column of vectors and companion columns.

    Attributes:
        encoder: Encoder of the token vectors. Its `has_*` flags refer to columns in the index.
        compressor: Resolved settings of the compressor as JSON values.
        codec: Resolved settings of the codec as JSON values.
        artefact: Hash of the fitted state or the trained weights of the compressor, or None without
            one.
        codec_artefact: Hash of the fitted state of the codec, or None without one.
        dim: Dimensions of the stored vectors.
        normalised: Whether vectors have unit length before the codec encodes them.
        field: Encoded item field, "content" or "caption".
        text_column: Column of the text to which the token spans refer.
        pooled_column: Column of the single vectors of the encoder, or None without one.
        positions: Columns of token positions, by `TokenBatch` field.
        assignment_column: Column of the assignment of tokens to vectors, or None without one.
        assignment_form: Encoding of the assignment, or None if the index lacks the column.
        max_vectors: Length of the prefix, for a representation that consists of the first vectors
            of each item in the column. None if it consists of all of them.
        code: Hash of the code of a compressor that is not registered, or None.
    """

    column: str
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
    assignment_column: str | None = None
    assignment_form: AssignmentForm | None = None
    max_vectors: int | None = None
    code: str | None = None

    @classmethod
    def from_schema(cls, schema: pa.Schema, name: str) -> RepresentationInfo:
        """Parses the metadata of a column of vectors. Unknown keys are ignored."""
        stored = column_metadata(schema.field(name))
        try:
            positions, pooled = stored["positions"], stored["pooled"]
            assignment = stored.get("assignment")  # absent if no assignment is stored
            encoder = EncoderInfo(
                spec=stored["encoder"],
                fingerprint=stored["fingerprint"],
                dim=stored["query_dim"],
                pooled_dim=schema.field(pooled).type.list_size if pooled in schema.names else None,
                normalised=stored["normalised"],
                has_spans=positions.get("spans") in schema.names,
                has_extents=positions.get("extents") in schema.names,
                prefix=stored["columns"],
                num_layers=stored["num_layers"],
                query_kinds=stored["queries"],
                has_confidence=positions.get("confidence") in schema.names,
            )
            return cls(
                column=name,
                encoder=encoder,
                compressor=stored["compressor"],
                codec=stored["codec"],
                artefact=stored["artefact"],
                codec_artefact=stored["codec_artefact"],
                dim=stored["dim"],
                normalised=stored["normalised"],
                field=stored["field"],
                text_column=stored["text"],
                pooled_column=pooled,
                positions=positions,
                assignment_column=assignment,
                assignment_form=(
                    column_metadata(schema.field(assignment))["form"]
                    if assignment in schema.names
                    else None
                ),
                code=stored.get("code"),
            )
        except (KeyError, TypeError, AttributeError, ValidationError) as error:
            raise _malformed(name, error) from None

    def to_metadata(self) -> dict[str, Any]:
        """Converts the metadata of the column to JSON types."""
        metadata = {
            "format_version": FORMAT_VERSION,
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
            "field": self.field,
            "text": self.text_column,
            "columns": self.encoder.prefix,
            "pooled": self.pooled_column,
            "num_layers": self.encoder.num_layers,
            "queries": list(self.encoder.query_kinds),
            "positions": self.positions,
        }
        if self.assignment_column is not None:
            metadata["assignment"] = self.assignment_column
        if self.code is not None:
            metadata["code"] = self.code
        return metadata

    @property
    def name(self) -> str:
        """Name of the representation in requests: the column, or `COLUMN@K` for a prefix."""
        if self.max_vectors is None:
            return self.column
        return f"{self.column}{PREFIX_SEPARATOR}{self.max_vectors}"

    @property
    def num_vectors(self) -> int | None:
        """Vector budget, or None if it is not a fixed number."""
        return self.max_vectors or self.compressor.get("num_vectors")

    @property
    def ratio(self) -> float | None:
        """Vector budget as a fraction of the tokens of an item, or None if it is none."""
        return None if self.max_vectors else self.compressor.get("ratio")

    @property
    def token_columns(self) -> list[str]:
        """Columns of token positions and, if it is stored, of the token assignment."""
        assignment = [] if self.assignment_column is None else [self.assignment_column]
        return [*assignment, *self.positions.values()]

    @property
    def is_uncompressed(self) -> bool:
        """True if the representation contains one vector per token."""
        return self.compressor["name"] == "none"

    @property
    def is_fitted(self) -> bool:
        """True if the compressor or the codec was fitted to a sample."""
        has_fitted_compressor = self.artefact and not self.has_trained_weights
        return bool(has_fitted_compressor or self.codec_artefact)

    @property
    def has_trained_weights(self) -> bool:
        """True if the artefact of the compressor are weights from a training run."""
        return str(self.compressor.get("weights")).startswith(WEIGHTS_HASH)

    @property
    def compressor_fit(self) -> dict[str, Any]:
        """Settings for which the artefact of the compressor was fitted."""
        return {"fingerprint": self.encoder.fingerprint, "compressor": self.compressor}

    def resolve_codec(self) -> ComponentSpec:
        """Returns the settings of the codec.

        Raises:
            SpecError: The codec no longer exists, or its package is not installed.
        """
        with within(f"representations.{self.column}.codec"):
            return CODECS.resolve(self.codec)

    @property
    def codec_fit(self) -> dict[str, Any]:
        """Settings for which the artefact of the codec was fitted."""
        return {**self.compressor_fit, "artefact": self.artefact, "codec": self.codec}

    @property
    def sources(self) -> dict[str, dict[str, Any]]:
        """Columns to which candidate generators can be fitted, with what determines their values.

        Vectors depend on these settings. A generator of texts does not depend on their values.
        """
        vectors = {**self.codec_fit, "codec_artefact": self.codec_artefact}
        return {self.column: vectors, self.text_column: {"text": self.text_column}}


@dataclass(frozen=True)
class PooledInfo:
    """Metadata of a column of single vectors.

    Attributes:
        encoder: Registered name of the encoder.
        fingerprint: Hash of the weights and of the settings that affect the vectors.
    """

    name: str
    encoder: str
    fingerprint: str

    @classmethod
    def from_schema(cls, schema: pa.Schema, name: str) -> PooledInfo:
        """Parses the metadata of the column."""
        stored = column_metadata(schema.field(name))
        try:
            return cls(name, stored["encoder"]["name"], stored["fingerprint"])
        except (KeyError, TypeError, ValidationError) as error:
            raise _malformed(name, error) from None


@dataclass(frozen=True)
class RerankInfo:
    """Metadata of the column with the tokens of an EDJE adapter.

    Attributes:
        adapter: Fingerprint of the adapter.
        encoder: Registered name of the encoder whose vectors the adapter reads.
        dim: Dimensions of the tokens.
    """

    name: str
    adapter: str
    encoder: str
    dim: int

    @classmethod
    def from_schema(cls, schema: pa.Schema, name: str) -> RerankInfo:
        """Parses the metadata of the column."""
        stored = column_metadata(schema.field(name))
        try:
            adapter, encoder = stored["adapter"]["fingerprint"], stored["encoder"]["name"]
            return cls(name, adapter, encoder, stored["dim"])
        except (KeyError, TypeError, ValidationError) as error:
            raise _malformed(name, error) from None


@dataclass(frozen=True)
class CandidatesInfo:
    """Metadata of the codes of a candidate generator.

    Attributes:
        generator: Resolved settings of the generator as JSON values.
        representation: Column of the vectors that the codes approximate, or of the texts that they
            describe.
        fitted: Identity of this column, see `RepresentationInfo.sources`.
        artefact: Hash of the fitted state of the generator.
        revision: Number of the fit. A refit has the next number.
        numbers: Fields of `pipeline.search.candidates.Numbers`, or None if they were not measured.
    """

    name: str
    generator: dict[str, Any]
    representation: str
    fitted: dict[str, Any]
    artefact: str
    revision: int
    numbers: dict[str, Any] | None = None

    @property
    def generator_name(self) -> str:
        """Name of the generator in searches."""
        return short_name(self.generator["name"])

    @property
    def fit(self) -> dict[str, Any]:
        """Settings for which the artefact was fitted."""
        return {"vectors": self.fitted, "generator": self.generator}

    def is_fitted_to(self, info: RepresentationInfo) -> bool:
        """Checks whether the generator was fitted to the vectors or texts of a representation."""
        return self.fitted == info.sources.get(self.representation)

    @classmethod
    def from_schema(cls, schema: pa.Schema, name: str) -> CandidatesInfo:
        """Parses the metadata of the column."""
        stored = column_metadata(schema.field(name))
        try:
            keys = ("generator", "representation", "fitted", "artefact", "revision")
            fields = {key: stored[key] for key in keys}
            return cls(name, **fields, numbers=stored.get("numbers"))
        except (KeyError, TypeError, ValidationError) as error:
            raise _malformed(name, error) from None

    def to_metadata(self) -> dict[str, Any]:
        """Converts the metadata of the column to JSON types."""
        return {
            "format_version": FORMAT_VERSION,
            "role": "candidates",
            "numbers": self.numbers,
            "generator": self.generator,
            "representation": self.representation,
            "fitted": self.fitted,
            "artefact": self.artefact,
            "revision": self.revision,
        }


def columns_with_role(schema: pa.Schema, role: str) -> list[str]:
    """Returns the names of all columns that have the given role in the index."""
    return [column.name for column in schema if column_metadata(column).get("role") == role]


def representation_infos(schema: pa.Schema) -> dict[str, RepresentationInfo]:
    """Returns the stored representations by name."""
    names = columns_with_role(schema, "search")
    return {name: RepresentationInfo.from_schema(schema, name) for name in names}


def find_representation(infos: Mapping[str, RepresentationInfo], name: str) -> RepresentationInfo:
    """Returns a stored representation, or for `NAME@K` the first K vectors of a nested one."""
    column, separator, length = name.partition(PREFIX_SEPARATOR)
    if column not in infos:
        raise SpecError.unknown_name("representation", name, infos, "is not in the index")
    info = infos[column]
    if not separator:
        return info
    if not is_nested(info):
        nested = [other for other, candidate in infos.items() if _may_be_nested(candidate)]
        rule = f"a prefix of {' or '.join(nested)}" if nested else "a name without @K"
        raise SpecError("representation", name, rule, "stores no nested vectors")
    budget = info.num_vectors
    is_valid = re.fullmatch("[1-9][0-9]{0,8}", length) and int(length) <= (budget or int(length))
    if not is_valid:
        limits = ">= 1" if budget is None else f"from 1 to {budget}, its stored budget"
        rule = f"{column}{PREFIX_SEPARATOR}K with an integer K {limits}"
        raise SpecError("representation", name, rule)
    return replace(info, max_vectors=int(length))


def is_nested(info: RepresentationInfo) -> bool:
    """Checks whether the first k vectors of each item form a representation with budget k."""
    return COMPRESSORS.build(COMPRESSORS.resolve(info.compressor)).is_nested


def _may_be_nested(info: RepresentationInfo) -> bool:
    with contextlib.suppress(SpecError):
        return is_nested(info)
    return False


def pooled_infos(schema: pa.Schema) -> dict[str, PooledInfo]:
    """Returns the metadata of all columns of single vectors by name."""
    names = columns_with_role(schema, "single")
    return {name: PooledInfo.from_schema(schema, name) for name in names}


def rerank_infos(schema: pa.Schema) -> dict[str, RerankInfo]:
    """Returns the columns for reranking by name."""
    names = columns_with_role(schema, "rerank")
    return {name: RerankInfo.from_schema(schema, name) for name in names}


def candidates_infos(schema: pa.Schema) -> dict[str, CandidatesInfo]:
    """Returns the codes of candidate generators by column."""
    names = columns_with_role(schema, "candidates")
    return {name: CandidatesInfo.from_schema(schema, name) for name in names}


def tap_names(schema: pa.Schema) -> list[str]:
    """Returns the names of all stored attention statistics without duplicates."""
    names = columns_with_role(schema, "tap")
    return list(dict.fromkeys(column_metadata(schema.field(name))["tap"] for name in names))


def format_versions(schema: pa.Schema) -> set[Any]:
    """Returns the format versions of all representations."""
    names = columns_with_role(schema, "search")
    return {column_metadata(schema.field(name)).get("format_version") for name in names}


def _malformed(column: str, error: Exception) -> SpecError:
    detail = f"{type(error).__name__}: {error}"
    if isinstance(error, ValidationError):
        detail = str(describe(error.errors()))
    return SpecError("index", column, "a column with valid metadata", f"is malformed ({detail})")
