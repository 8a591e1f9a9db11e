"""Which columns an index has, and what their metadata says: everything a search must know."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import numpy as np
import pyarrow as pa
from pydantic import Field, field_validator, model_validator

from pipeline.config import Spec, SpecError, dump, expand_sweep, parse, within
from pipeline.index.positions import EXTENTS, stored_type
from pipeline.registry import CODECS, COMPRESSORS, CodecSpec, CompressorSpec, EncoderSpec
from pipeline.schema import FORMAT_VERSION, ITEM, WORD_CONFIDENCES, metadata_of, with_metadata
from pipeline.taps import Tap, single_taps

if TYPE_CHECKING:  # listing and reading go without torch: each of their processes starts sooner
    import lance

    from pipeline.encoders import Encoder


#: How the names of columns end that come with a representation or an encoder.
COMPANIONS = ("_support", "_pooled", "_spans", "_extents", "_confidence", "_tap")
#: What of an item a representation stands for: what is in it, or what somebody said of it.
Aspect = Literal["content", "caption"]
ASPECTS: tuple[str, ...] = get_args(Aspect)
#: Token columns between an encoding and a compressing actor, where those are apart.
TOKEN_COLUMNS = ("vectors", "spans", "extents", "confidence", "pooled")


def token_column(aspect: str, name: str) -> str:
    """What a token column is called that is of this aspect of the items."""
    return name if aspect == "content" else f"{aspect}_{name}"


#: The column of what EDJE's adapter makes of an item, see `rerank_tokens`.
RERANK_TOKENS = "rerank_tokens"
#: Columns that are there already: stored, or on the way from encoder to compressor.
TAKEN = (
    *ITEM.names,
    *(token_column(aspect, name) for aspect in ASPECTS for name in TOKEN_COLUMNS),
    RERANK_TOKENS,
)


class Representation(Spec):
    """One column of token vectors: a compressor, a codec and the column's name."""

    compressor: CompressorSpec
    codec: CodecSpec = Field(default="float16")
    of: Aspect = "content"
    id: str = ""  # the column's name; default: of method, budget and codec, such as hpool_32_int8
    keep_support: bool = (
        True  # which input tokens each vector stands for, for marked words and maps
    )

    @field_validator("id")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if value and not re.fullmatch(r"[a-z][a-z0-9_]*", value):
            raise SpecError("", value, "lower-case letters, digits and _, a letter first")
        if value in TAKEN or value.endswith(COMPANIONS):
            legal = f"none of {', '.join(TAKEN)}, and no ending {', '.join(COMPANIONS)}"
            raise SpecError("", value, legal, "is the name of another column")
        return value

    @model_validator(mode="after")
    def _default_id(self) -> Representation:
        if not self.id:
            own = "_".join([default_id(self.compressor), *codec_id(self.codec)])
            object.__setattr__(self, "id", token_column(self.of, own))
        return self

    @property
    def support_id(self) -> str:
        """The column that holds the support."""
        return f"{self.id}_support"


def default_id(compressor: Spec, with_budget: bool = True) -> str:
    """The name of a column: the method, its settings that are not the defaults, the budget.

    >>> default_id(COMPRESSORS.resolve({"name": "hpool", "num_vectors": 32}))
    'hpool_32'
    >>> default_id(COMPRESSORS.resolve({"name": "hpool", "ratio": 0.125, "linkage": "rows"}))
    'hpool_rows_12_5pct'
    """
    parts = ["full" if compressor.name == "none" else compressor.name]
    for name, field in type(compressor).model_fields.items():
        value = getattr(compressor, name)
        is_default = field.is_required() or value == field.get_default(call_default_factory=True)
        if name in ("name", "num_vectors", "ratio") or (is_default and name != "method"):
            continue
        if isinstance(value, Spec):
            parts.append(default_id(value, with_budget=False))
        elif isinstance(value, str):
            parts.append(value)
        else:
            numbers = value if isinstance(value, list | tuple) else [value]
            parts.append(name + "_".join("" if n is True else str(n) for n in numbers))
    if with_budget and getattr(compressor, "num_vectors", None):
        parts.append(str(compressor.num_vectors))
    if with_budget and getattr(compressor, "ratio", None):
        parts.append(f"{100 * compressor.ratio:g}pct")
    return re.sub("[^a-z0-9]+", "_", "_".join(parts).lower()).strip("_")


def codec_settings(codec: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a codec that a name of it must tell: its bits, and what is no default.

    >>> codec_settings({"name": "residual", "bits": 4, "num_centroids": 256})
    {'bits': 4}
    """
    if len(codec) == 1:  # nothing is imported to learn that
        return {}
    fields = CODECS.load(codec["name"]).Spec.model_fields
    return {
        key: value
        for key, value in codec.items()
        if key != "name" and (key == "bits" or key not in fields or value != fields[key].default)
    }


def codec_name(codec: Mapping[str, Any]) -> str:
    """A codec's name for readers.

    >>> codec_name({"name": "binary", "query": "binary"}), codec_name({"name": "float16"})
    ('binary query=binary', 'float16')
    """
    told = (f"{key}={value}" for key, value in codec_settings(codec).items())
    return " ".join([codec["name"], *told])


def codec_id(codec: Spec) -> list[str]:
    """What a codec adds to the name of a column: nothing if it is the default.

    >>> codec_id(CODECS.resolve({"name": "residual", "bits": 2, "num_centroids": 64}))
    ['residual', '2', 'num_centroids64']
    >>> codec_id(CODECS.resolve({"name": "binary", "query": "binary"}))
    ['binary', 'query_binary']
    """
    if codec.name == Representation.model_fields["codec"].default:
        return []
    parts = [codec.name]
    for key, value in codec_settings(dump(codec)).items():
        name = "" if key == "bits" else f"{key}_" if isinstance(value, str) else key
        parts.append(f"{name}{value}")
    return [re.sub("[^a-z0-9]+", "_", part.lower()).strip("_") for part in parts]


#: Fields of a representation -> their values, of which the product is taken; or several such.
Sweep = dict[str, Any] | list[dict[str, Any]]


class ListsRepresentations(Protocol):
    """What `every_representation` reads of a spec."""

    representations: list[Representation]
    sweep: Sweep


def every_representation(spec: ListsRepresentations) -> list[Representation]:
    """The listed representations and those of the sweeps, each name once.

    Raises:
        SpecError: none at all, two of the same name, or a swept one that is not legal.
    """
    every = list(spec.representations)
    for sweep in [spec.sweep] if isinstance(spec.sweep, dict) else spec.sweep:
        for fields in expand_sweep(sweep) if sweep else []:
            with within("sweep"):
                every.append(parse(Representation, fields))
    if not every:
        raise SpecError("representations", [], "at least one, here or in `sweep`")
    names = [r.id for r in every]
    for name in names:
        if names.count(name) > 1:
            legal = "a different `id` for each"
            raise SpecError("representations", name, legal, "is named twice")
    return every


@dataclass(frozen=True)
class EncoderFacts:
    """What the index must know of an encoder without loading it again."""

    spec: dict[str, Any]
    dim: int
    pooled_dim: int | None
    normalised: bool
    has_spans: bool
    has_extents: bool
    fingerprint: str
    prefix: str  # how the encoder's own columns begin (pooled vector and positions)
    num_layers: int | None = None  # of a model that gives attention statistics
    query_kinds: tuple[str, ...] = ("text",)  # what it reads as a query
    has_confidence: bool = False

    @classmethod
    def of(cls, encoder: Encoder, spec: EncoderSpec) -> EncoderFacts:
        """The facts of a loaded encoder."""
        names = ("dim", "pooled_dim", "normalised", "has_spans", "has_extents", "has_confidence")
        names += ("fingerprint",)
        known = {name: getattr(encoder, name) for name in names}
        attention = encoder.attention(spec)
        return cls(
            dump(spec),
            **known,
            prefix=encoder.columns_prefix(spec),
            num_layers=attention and attention.num_layers,
            query_kinds=encoder.query_kinds(spec),
        )

    def about(self, aspect: str) -> EncoderFacts:
        """The facts as they are of one aspect of the items: captions have columns of their own."""
        if aspect == "content":
            return self
        return replace(
            self, has_extents=False, has_confidence=False, prefix=f"{self.prefix}_{aspect}"
        )


def query_kinds(about: Mapping[str, Any]) -> tuple[str, ...]:
    """What a representation's encoder reads as a query, of `QUERY_KINDS`; none: only vectors."""
    default = [] if about["encoder"]["name"] == "precomputed" else ["text"]  # of older indexes
    return tuple(about.get("queries", default))


def fitted_for(about: dict[str, Any]) -> dict[str, Any]:
    """What of a representation's metadata its artefact is for."""
    return {name: about[name] for name in ("fingerprint", "compressor")}


def codec_fitted_for(about: dict[str, Any]) -> dict[str, Any]:
    """What of a representation's metadata the artefact of its codec is for."""
    return {name: about[name] for name in ("fingerprint", "compressor", "artefact", "codec")}


def pooled_id(facts: EncoderFacts) -> str | None:
    """The column of the encoder's single vectors, if it has any."""
    return f"{facts.prefix}_pooled" if facts.pooled_dim else None


def position_columns(facts: EncoderFacts) -> dict[str, pa.DataType]:
    """The columns of token positions that the encoder's batches fill, by `TokenBatch` field.

    Their types are those in use; `stored_type` says how they are stored.
    """
    columns = {}
    if facts.has_spans:
        columns["spans"] = pa.list_(pa.list_(pa.int32(), 2))
    if facts.has_extents:
        columns["extents"] = EXTENTS
    if facts.has_confidence:
        columns["confidence"] = WORD_CONFIDENCES
    return columns


def tap_column(facts: EncoderFacts, tap: Tap) -> str:
    """The stored column of a tap of one layer."""
    return f"{facts.prefix}_{tap.statistic}_{tap.heads}_{tap.layers}_tap"


def needed_taps(representations: Iterable[Representation]) -> dict[str, tuple[Tap, ...]]:
    """The attention statistics that representations need, by their id."""
    compressors = {r.id: COMPRESSORS.build(r.compressor) for r in representations}
    return {name: c.needs_taps for name, c in compressors.items() if c.needs_taps}


def taps_of(representations: Iterable[Representation], num_layers: int | None) -> tuple[Tap, ...]:
    """The taps of one layer each that representations are made of."""
    needed = [tap for taps in needed_taps(representations).values() for tap in taps]
    return single_taps(needed, num_layers or 0)


def encoder_fields(
    facts: EncoderFacts, keep_positions: bool, keep_taps: Sequence[Tap] = ()
) -> list[pa.Field]:
    """The columns an encoder fills once for all representations of an aspect of the items."""
    about = {
        "format_version": FORMAT_VERSION,
        "encoder": facts.spec,
        "fingerprint": facts.fingerprint,
    }
    fields = []
    if name := pooled_id(facts):
        column = pa.field(name, pa.list_(pa.float16(), facts.pooled_dim))
        fields.append(
            with_metadata(
                column, {**about, "role": "single", "dim": facts.pooled_dim, "normalised": True}
            )
        )
    if keep_positions:
        for kind, type in position_columns(facts).items():
            column = pa.field(f"{facts.prefix}_{kind}", stored_type(type))
            fields.append(with_metadata(column, {**about, "role": "positions", "positions": kind}))
    for tap in keep_taps:
        column = pa.field(tap_column(facts, tap), pa.list_(pa.float32()))
        fields.append(with_metadata(column, {**about, "role": "tap", "tap": tap.name}))
    return fields


def representation_fields(
    representation: Representation,
    facts: EncoderFacts,
    artefact: str | None,
    codec_artefact: str | None = None,
) -> list[pa.Field]:
    """The column of a representation, and that of its support where it has one.

    Args:
        artefact: the name of what its compressor learned.
        codec_artefact: the name of what its codec learned.
    """
    compressor = COMPRESSORS.build(representation.compressor)
    dim = compressor.output_dim(facts.dim)
    prefix, facts = facts.prefix, facts.about(representation.of)
    about = {
        "format_version": FORMAT_VERSION,
        "role": "search",
        "encoder": facts.spec,
        "fingerprint": facts.fingerprint,
        "compressor": dump(representation.compressor),
        "codec": dump(representation.codec),
        "artefact": artefact,
        "codec_artefact": codec_artefact,
        "dim": dim,
        "query_dim": facts.dim,  # of what the encoder gives; the compressor makes `dim` of it
        "normalised": compressor.normalised,
        "score": "sum",
        "of": representation.of,
        "text": "text" if representation.of == "content" else representation.of,
        "columns": prefix,
        "pooled": pooled_id(facts),
        "num_layers": facts.num_layers,
        "queries": list(facts.query_kinds),
        "positions": {kind: f"{facts.prefix}_{kind}" for kind in position_columns(facts)},
    }
    codec = CODECS.build(representation.codec)
    fields = []
    if has_support(representation):
        about["support"] = representation.support_id
        support = pa.field(representation.support_id, pa.list_(pa.uint16()))
        form = {"role": "support", "form": compressor.support_form, "of": representation.id}
        fields.append(with_metadata(support, {"format_version": FORMAT_VERSION, **form}))
    column = pa.field(representation.id, codec.column_type(dim))
    return [with_metadata(column, about), *fields]


def aspects_of(representations: Iterable[Representation]) -> tuple[str, ...]:
    """The parts of the items that representations stand for, content first."""
    wanted = {representation.of for representation in representations}
    return tuple(aspect for aspect in ASPECTS if aspect in wanted)


def other_setting(
    representation: Representation, facts: EncoderFacts, there: dict[str, Any]
) -> tuple[str, Any] | None:
    """The first setting, and its value here, in which a stored column differs from the spec.

    Args:
        there: the metadata of the column of this name in the index.
    """
    here = {
        "fingerprint": facts.fingerprint,
        "compressor": dump(representation.compressor),
        "codec": dump(representation.codec),
        "of": representation.of,
    }
    there = {"of": "content", **there}
    with contextlib.suppress(SpecError, KeyError):  # settings that are newer have their defaults
        there["compressor"] = dump(COMPRESSORS.resolve(there["compressor"]))
        there["codec"] = dump(CODECS.resolve(there["codec"]))
    return next(((key, value) for key, value in here.items() if there.get(key) != value), None)


def refuse_other_settings(
    representation: Representation, facts: EncoderFacts, there: dict[str, Any]
) -> None:
    """Raises `SpecError` if a stored column was made otherwise than the spec says."""
    if other := other_setting(representation, facts, there):
        key, value = other
        raise SpecError(
            f"representations.{representation.id}.{key}",
            value,
            f"{there.get(key)} as in the index, or another `id`",
            "differs from the index's",
        )


def compressor_remarks(
    dataset: lance.LanceDataset, representations: Iterable[Representation]
) -> list[str]:
    """Returns sentences about settings of compressors that do not suit the first item.

    Items without stored extents are not judged.
    """
    ids_by_sentence: dict[str, list[str]] = {}
    for r in representations:
        name = metadata_of(dataset.schema.field(r.id))["positions"].get("extents")
        if name not in dataset.schema.names:
            continue
        first = dataset.to_table([name], filter=f"`{name}` IS NOT NULL", limit=1)[name]
        compressor = COMPRESSORS.build(r.compressor)
        if len(first) and (sentence := compressor.remark(np.array(first[0].as_py()))):
            ids_by_sentence.setdefault(sentence, []).append(r.id)
    return [f"{', '.join(ids)}: {sentence}" for sentence, ids in ids_by_sentence.items()]


def has_support(representation: Representation) -> bool:
    """Whether the representation stores its support: not where each token stands for itself."""
    return representation.keep_support and representation.compressor.name != "none"


def by_role(schema: pa.Schema, *roles: str) -> dict[str, dict[str, Any]]:
    """The metadata of the columns that have one of the roles, by column name."""
    about = {column.name: metadata_of(column) for column in schema}
    return {name: data for name, data in about.items() if data.get("role") in roles}


def adapter_of(about: dict[str, Any]) -> str:
    """The fingerprint of the adapter that wrote `rerank_tokens`, by its metadata."""
    return about.get("adapter", {}).get("fingerprint", "unknown")
