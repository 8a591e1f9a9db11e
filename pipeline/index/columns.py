"""Columns of an index: representations and their names, and what an encoder stores for all."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import numpy as np
import pyarrow as pa
from pydantic import Field, field_validator, model_validator

from pipeline.config import ComponentSpec, Spec, SpecError, dump, expand_sweep, parse, within
from pipeline.index.info import EncoderInfo, RepresentationInfo
from pipeline.index.positions import as_used, stored_type
from pipeline.registry import CODECS, COMPRESSORS, CodecSpec, CompressorSpec
from pipeline.schema import FORMAT_VERSION, ITEM, with_metadata
from pipeline.taps import Tap, single_layer_taps

if TYPE_CHECKING:  # listing and reading go without torch: each of their processes starts sooner
    import lance


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
    """Compressor of the token vectors."""
    codec: CodecSpec = Field(default="float16", validate_default=True)
    """Format of each stored vector."""
    of: Aspect = "content"
    """Field of the items that is encoded."""
    id: str = ""
    """Name of the column; by default from method, budget and codec, such as `hpool_32_int8`."""
    keep_support: bool = True
    """Whether to store the assignment of tokens to vectors, for marked words and maps."""

    @field_validator("id")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if value and not re.fullmatch(r"[a-z][a-z0-9_]*", value):
            raise SpecError("", value, "lower-case letters, digits and _, starting with a letter")
        if value in TAKEN or value.endswith(COMPANIONS):
            taken, endings = ", ".join(TAKEN), ", ".join(COMPANIONS)
            rule = f"a name other than {taken}, without an ending {endings}"
            raise SpecError("", value, rule, "is reserved")
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
    """Returns the default name of a column: the method, its non-default settings, the budget.

    Args:
        compressor: Spec of a compressor, or of a component of one.
        with_budget: Adds `num_vectors` or `ratio`.

    >>> default_id(COMPRESSORS.resolve({"name": "hpool", "num_vectors": 32}))
    'hpool_32'
    >>> default_id(COMPRESSORS.resolve({"name": "hpool", "ratio": 0.125, "linkage": "rows"}))
    'hpool_rows_12_5pct'
    """
    values = dict(compressor)
    parts = ["full" if values["name"] == "none" else values["name"]]
    for name, field in type(compressor).model_fields.items():
        value = values[name]
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
    if with_budget and (num_vectors := values.get("num_vectors")):
        parts.append(str(num_vectors))
    if with_budget and (ratio := values.get("ratio")):
        parts.append(f"{100 * ratio:g}pct")
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


def codec_id(codec: ComponentSpec) -> list[str]:
    """Returns the parts that a codec adds to the name of a column: none for the default codec.

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
    """A spec that lists representations."""

    @property
    def representations(self) -> list[Representation]:
        """Listed representations."""
        ...

    @property
    def sweep(self) -> Sweep:
        """Further representations as products of values."""
        ...


def every_representation(spec: ListsRepresentations) -> list[Representation]:
    """The listed representations and those of the sweeps, each name once.

    Raises:
        SpecError: There is none, two have the same name, or a swept one is invalid.
    """
    every = list(spec.representations)
    for sweep in [spec.sweep] if isinstance(spec.sweep, dict) else spec.sweep:
        for fields in expand_sweep(sweep) if sweep else []:
            with within("sweep"):
                every.append(parse(Representation, fields))
    if not every:
        raise SpecError(
            "representations", [], "a non-empty list, unless `sweep` has representations"
        )
    names = [r.id for r in every]
    for name in names:
        if names.count(name) > 1:
            rule = "unique (set a different `id`)"
            raise SpecError("representations", name, rule, "occurs twice")
    return every


def needed_taps(representations: Iterable[Representation]) -> dict[str, tuple[Tap, ...]]:
    """The attention statistics that representations need, by their id."""
    compressors = {r.id: COMPRESSORS.build(r.compressor) for r in representations}
    return {name: c.needs_taps for name, c in compressors.items() if c.needs_taps}


def taps_of(representations: Iterable[Representation], num_layers: int | None) -> tuple[Tap, ...]:
    """The taps of one layer each that representations are made of."""
    needed = [tap for taps in needed_taps(representations).values() for tap in taps]
    return single_layer_taps(needed, num_layers or 0)


def encoder_fields(
    encoder_info: EncoderInfo, keep_positions: bool, keep_taps: Sequence[Tap] = ()
) -> list[pa.Field]:
    """Returns the columns that an encoder fills once for all representations of a field."""
    metadata = {
        "format_version": FORMAT_VERSION,
        "encoder": encoder_info.spec,
        "fingerprint": encoder_info.fingerprint,
    }
    fields = []
    if name := encoder_info.pooled_column:
        single = {"role": "single", "dim": encoder_info.pooled_dim, "normalised": True}
        column = pa.field(name, pa.list_(pa.float16(), encoder_info.pooled_dim))
        fields.append(with_metadata(column, {**metadata, **single}))
    if keep_positions:
        for kind, type in encoder_info.position_types.items():
            column = pa.field(encoder_info.position_column(kind), stored_type(type))
            position = {"role": "positions", "positions": kind}
            fields.append(with_metadata(column, {**metadata, **position}))
    for tap in keep_taps:
        column = pa.field(encoder_info.tap_column(tap), pa.list_(pa.float32()))
        fields.append(with_metadata(column, {**metadata, "role": "tap", "tap": tap.name}))
    return fields


def representation_info(
    representation: Representation, encoder_info: EncoderInfo
) -> RepresentationInfo:
    """Returns the info of a representation of which nothing is fitted yet."""
    compressor = COMPRESSORS.build(representation.compressor)
    of_field = encoder_info.for_field(representation.of)
    return RepresentationInfo(
        name=representation.id,
        encoder=encoder_info,
        compressor=dump(representation.compressor),
        codec=dump(representation.codec),
        artefact=None,
        codec_artefact=None,
        dim=compressor.output_dim(encoder_info.dim),
        normalised=compressor.normalised,
        field=representation.of,
        text_column="text" if representation.of == "content" else representation.of,
        pooled_column=of_field.pooled_column,
        positions={kind: of_field.position_column(kind) for kind in of_field.position_types},
        support_column=representation.support_id if has_support(representation) else None,
        support_form=compressor.support_form if has_support(representation) else None,
    )


def representation_fields(
    representation: Representation,
    encoder_info: EncoderInfo,
    artefact: str | None,
    codec_artefact: str | None = None,
) -> list[pa.Field]:
    """Returns the column of a representation, and that of its support if it has one.

    Args:
        representation: Spec of the representation.
        encoder_info: Encoder of the token vectors.
        artefact: Name of the fitted state of the compressor.
        codec_artefact: Name of the fitted state of the codec.
    """
    info = representation_info(representation, encoder_info)
    info = replace(info, artefact=artefact, codec_artefact=codec_artefact)
    codec = CODECS.build(representation.codec)
    fields = [with_metadata(pa.field(info.name, codec.column_type(info.dim)), info.to_metadata())]
    if info.support_column is not None:
        metadata = {
            "format_version": FORMAT_VERSION,
            "role": "support",
            "form": info.support_form,
            "of": info.name,
        }
        column = pa.field(info.support_column, pa.list_(pa.uint16()))
        fields.append(with_metadata(column, metadata))
    return fields


def aspects_of(representations: Iterable[Representation]) -> tuple[str, ...]:
    """The parts of the items that representations stand for, content first."""
    wanted = {representation.of for representation in representations}
    return tuple(aspect for aspect in ASPECTS if aspect in wanted)


def other_setting(
    representation: Representation, encoder_info: EncoderInfo, stored: RepresentationInfo
) -> tuple[str, Any, Any] | None:
    """Returns the first setting that differs in the index: its name, and its new and stored value.

    Args:
        representation: Spec of the representation.
        encoder_info: Encoder of the token vectors.
        stored: Column of the same name in the index.
    """
    compressor, codec = stored.compressor, stored.codec
    with contextlib.suppress(SpecError, KeyError):  # settings that are newer have their defaults
        compressor = dump(COMPRESSORS.resolve(compressor))
        codec = dump(CODECS.resolve(codec))
    settings = (
        ("fingerprint", encoder_info.fingerprint, stored.encoder.fingerprint),
        ("compressor", dump(representation.compressor), compressor),
        ("codec", dump(representation.codec), codec),
        ("of", representation.of, stored.field),
    )
    return next((setting for setting in settings if setting[1] != setting[2]), None)


def refuse_other_settings(
    representation: Representation, encoder_info: EncoderInfo, stored: RepresentationInfo
) -> None:
    """Raises `SpecError` if the column in the index was made with other settings."""
    if other := other_setting(representation, encoder_info, stored):
        name, value, value_there = other
        raise SpecError(
            f"representations.{representation.id}.{name}",
            value,
            f"{value_there} as in the index, unless `id` is set to another name",
        )


def compressor_remarks(
    dataset: lance.LanceDataset, representations: Iterable[Representation]
) -> list[str]:
    """Returns sentences about settings of compressors that do not suit the first item.

    Items without stored extents are not judged.
    """
    ids_by_sentence: dict[str, list[str]] = {}
    for r in representations:
        name = RepresentationInfo.from_schema(dataset.schema, r.id).positions.get("extents")
        if name is None or name not in dataset.schema.names:
            continue
        first = as_used(dataset.to_table([name], filter=f"`{name}` IS NOT NULL", limit=1))[name]
        compressor = COMPRESSORS.build(r.compressor)
        if len(first) and (sentence := compressor.remark(np.array(first[0].as_py()))):
            ids_by_sentence.setdefault(sentence, []).append(r.id)
    return [f"{', '.join(ids)}: {sentence}" for sentence, ids in ids_by_sentence.items()]


def has_support(representation: Representation) -> bool:
    """Whether the representation stores its support: not where each token stands for itself."""
    return representation.keep_support and representation.compressor.name != "none"
