"""Definition of the columns of an index: representations, and columns that they share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import numpy as np
import pyarrow as pa
from pydantic import Field, field_validator, model_validator

from pipeline.config import (
    WEIGHTS_HASH,
    ComponentSpec,
    Spec,
    SpecError,
    TrainedSpec,
    dump,
    expand_sweep,
    parse,
    within,
)
from pipeline.index.info import EncoderInfo, RepresentationInfo
from pipeline.index.positions import decode_positions, stored_type
from pipeline.registry import CODECS, COMPRESSORS, CodecSpec, CompressorSpec, short_name
from pipeline.schema import FORMAT_VERSION, ITEM, with_metadata
from pipeline.taps import Tap, single_layer_taps

if TYPE_CHECKING:  # without torch, processes that list or read items start faster
    import lance


#: Suffixes of the columns that accompany a representation or an encoder.
COMPANION_SUFFIXES = (
    "_assignment",
    "_pooled",
    "_spans",
    "_extents",
    "_confidence",
    "_tap",
    "_candidates",
)
#: Field of an item that a representation encodes: its content, its caption, or its image or frames,
#: which the encoder `see` of the spec encodes.
ItemField = Literal["content", "caption", "image"]
ITEM_FIELDS: tuple[str, ...] = get_args(ItemField)
#: Token columns that a separate encoding actor passes to the compressing actor.
TOKEN_COLUMNS = ("vectors", "spans", "extents", "confidence", "pooled", "appended")


def token_column(item_field: str, name: str) -> str:
    """Returns the name of a token column of an item field."""
    return name if item_field == "content" else f"{item_field}_{name}"


#: Column of the tokens of an EDJE adapter, see `rerank_tokens`.
RERANK_TOKENS = "rerank_tokens"
#: End of the message about a representation whose settings differ from those of its column.
OTHER_COLUMN = "; set `id` to store it as another column"
#: Names that representations cannot have: stored and intermediate columns.
RESERVED_NAMES = (
    *ITEM.names,
    *(token_column(item_field, name) for item_field in ITEM_FIELDS for name in TOKEN_COLUMNS),
    RERANK_TOKENS,
)


class Representation(Spec):
    """Column of token vectors, which is defined by a compressor and a codec."""

    compressor: CompressorSpec
    """Compressor of the token vectors."""
    codec: CodecSpec = Field(default="float16", validate_default=True)
    """Codec of the stored vectors."""
    field: ItemField = "content"
    """Field of the items to represent."""
    id: str = ""
    """Name of the column. By default it consists of method, budget and codec, such as
    `hpool_32_int8`. The character `@` is reserved for prefixes (`NAME@K`)."""
    keep_assignment: bool = True
    """Whether to store the assignment of tokens to vectors, for highlights and similarity maps."""

    @model_validator(mode="before")
    @classmethod
    def _check_compressor(cls, data: Any) -> Any:
        """Reports an error of the compressor before options of it in the wrong place."""
        if isinstance(data, Mapping) and data.keys() - cls.model_fields and "compressor" in data:
            with within("compressor"):
                COMPRESSORS.resolve(data["compressor"])
        return data

    @field_validator("id")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if value and not re.fullmatch(r"[a-z][a-z0-9_]*", value):
            raise SpecError("", value, "lower-case letters, digits and _, starting with a letter")
        if value in RESERVED_NAMES or value.endswith(COMPANION_SUFFIXES):
            names, suffixes = ", ".join(RESERVED_NAMES), ", ".join(COMPANION_SUFFIXES)
            rule = f"a name other than {names}, without any of the suffixes {suffixes}"
            raise SpecError("", value, rule, "is reserved")
        return value

    @model_validator(mode="after")
    def _default_id(self) -> Representation:
        if not self.id:
            name = "_".join([default_id(self.compressor), *codec_id(self.codec)])
            object.__setattr__(self, "id", token_column(self.field, name))
        return self

    @property
    def assignment_id(self) -> str:
        """Name of the column that stores the assignment of tokens to vectors."""
        return f"{self.id}_assignment"


def default_id(compressor: Spec, with_budget: bool = True) -> str:
    """Builds the default column name from the method, its non-default settings and the budget.

    >>> default_id(COMPRESSORS.resolve({"name": "hpool", "num_vectors": 32}))
    'hpool_32'
    >>> default_id(COMPRESSORS.resolve({"name": "hpool", "ratio": 0.125, "linkage": "rows"}))
    'hpool_rows_12_5pct'
    """
    values = dict(compressor)
    parts = ["full" if values["name"] == "none" else short_name(values["name"])]
    for name, field in type(compressor).model_fields.items():
        value = values[name]
        is_default = field.is_required() or value == field.get_default(call_default_factory=True)
        if name in ("name", "num_vectors", "ratio", *type(compressor).unnamed):
            continue
        if is_default and name != "method":
            continue
        if isinstance(value, Spec):
            parts.append(default_id(value, with_budget=False))
        elif isinstance(value, str):
            parts.append(value)
        else:
            numbers = value if isinstance(value, list | tuple) else [value]
            shown = "_".join("" if n is True else str(n) for n in numbers)
            parts.append(name + shown)
    if with_budget and (num_vectors := values.get("num_vectors")):
        parts.append(str(num_vectors))
    if with_budget and (ratio := values.get("ratio")):
        parts.append(f"{100 * ratio:g}pct")
    return re.sub("[^a-z0-9]+", "_", "_".join(parts).lower()).strip("_")


def codec_settings(codec: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a codec that are part of its name: the bits and non-default values.

    >>> codec_settings({"name": "residual", "bits": 4, "num_centroids": 256})
    {'bits': 4}
    """
    if len(codec) == 1:  # avoids importing the codec
        return {}
    try:
        fields = CODECS.load(codec["name"]).Spec.model_fields
    except SpecError:  # a former codec, or one whose package is not installed
        fields = {}
    return {
        key: value
        for key, value in codec.items()
        if key != "name" and (key == "bits" or key not in fields or value != fields[key].default)
    }


def codec_name(codec: Mapping[str, Any]) -> str:
    """Returns the display name of a codec.

    >>> codec_name({"name": "bits", "bits": 1}), codec_name({"name": "float16"})
    ('bits bits=1', 'float16')
    """
    settings = (f"{key}={value}" for key, value in codec_settings(codec).items())
    return " ".join([short_name(codec["name"]), *settings])


def codec_id(codec: ComponentSpec) -> list[str]:
    """Returns the parts of a column name that identify the codec. The default codec has none.

    >>> codec_id(CODECS.resolve({"name": "residual", "bits": 2, "num_centroids": 64}))
    ['residual', '2', 'num_centroids64']
    >>> codec_id(CODECS.resolve({"name": "bits", "bits": 2}))
    ['bits', '2']
    """
    if codec.name == Representation.model_fields["codec"].default:
        return []
    parts = [short_name(codec.name)]
    for key, value in codec_settings(dump(codec)).items():
        name = "" if key == "bits" else f"{key}_" if isinstance(value, str) else key
        parts.append(f"{name}{value}")
    return [re.sub("[^a-z0-9]+", "_", part.lower()).strip("_") for part in parts]


#: Values by field of a representation, whose Cartesian product is taken; or a list of such maps.
Sweep = dict[str, Any] | list[dict[str, Any]]


class ListsRepresentations(Protocol):
    """A spec that lists representations."""

    @property
    def representations(self) -> list[Representation]:
        """Explicit representations."""
        ...

    @property
    def sweep(self) -> Sweep:
        """Definition of additional representations as Cartesian products of values."""
        ...


def all_representations(spec: ListsRepresentations) -> list[Representation]:
    """Returns the explicit representations and those defined by the sweeps, in this order."""
    representations = list(spec.representations)
    for sweep in [spec.sweep] if isinstance(spec.sweep, dict) else spec.sweep:
        for fields in expand_sweep(sweep) if sweep else []:
            with within("sweep"):
                representations.append(parse(Representation, fields))
    check_representations(representations)
    return representations


def check_representations(representations: Sequence[Representation]) -> None:
    """Raises `SpecError` if there are no representations, or two of the same id."""
    if not representations:
        rule = "a non-empty list, unless `sweep` has representations"
        raise SpecError("representations", [], rule)
    names = [r.id for r in representations]
    for name in names:
        if names.count(name) > 1:
            rule = "unique (set a different `id`)"
            raise SpecError("representations", name, rule, "occurs twice")


def taps_by_representation(representations: Iterable[Representation]) -> dict[str, tuple[Tap, ...]]:
    """Returns the attention statistics of each representation that requires any, by id."""
    compressors = {r.id: COMPRESSORS.build(r.compressor) for r in representations}
    return {name: c.needs_taps for name, c in compressors.items() if c.needs_taps}


def required_taps(
    representations: Iterable[Representation], num_layers: int | None
) -> tuple[Tap, ...]:
    """Returns the single-layer attention statistics from which the required ones are computed."""
    required = [tap for taps in taps_by_representation(representations).values() for tap in taps]
    return single_layer_taps(required, num_layers or 0)


def needs_appended_vectors(representations: Iterable[Representation]) -> bool:
    """Returns True for compressors that need more of appended tokens than attention statistics."""
    compressors = (COMPRESSORS.build(r.compressor) for r in representations)
    return any(c.needs_appended and not c.needs_taps for c in compressors)


def stored_settings(compressor: ComponentSpec) -> dict[str, Any]:
    """Returns the settings for the metadata of a column, with the hash of trained weights."""
    settings = dump(compressor)
    if isinstance(compressor, TrainedSpec):
        # Imports transformers, which few jobs need.
        from pipeline.encoders.trained import MODULE, TrainedCompressor

        folder = compressor.weights
        if folder is not None and not folder.startswith(WEIGHTS_HASH):
            described, _ = TrainedCompressor.read(folder, "weights")
            settings["weights"] = WEIGHTS_HASH + described.sha256[MODULE]
    return settings


def encoder_fields(
    encoder_info: EncoderInfo, keep_positions: bool, keep_taps: Sequence[Tap] = ()
) -> list[pa.Field]:
    """Returns the columns that all representations of an item field share."""
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
    """Returns the metadata of a representation that has not been fitted yet."""
    compressor = COMPRESSORS.build(representation.compressor)
    field_info = encoder_info.for_field(representation.field)
    return RepresentationInfo(
        column=representation.id,
        encoder=(encoder := encoder_info.of_field(representation.field)),
        compressor=stored_settings(representation.compressor),
        codec=dump(representation.codec),
        artefact=None,
        codec_artefact=None,
        dim=compressor.output_dim(encoder.dim),
        normalised=compressor.normalised,
        field=representation.field,
        text_column="caption" if representation.field == "caption" else "text",
        pooled_column=field_info.pooled_column,
        positions={kind: field_info.position_column(kind) for kind in field_info.position_types},
        assignment_column=representation.assignment_id if has_assignment(representation) else None,
        assignment_form=compressor.assignment_form if has_assignment(representation) else None,
        code=COMPRESSORS.code(representation.compressor.name),
    )


def representation_fields(
    representation: Representation,
    encoder_info: EncoderInfo,
    artefact: str | None,
    codec_artefact: str | None = None,
) -> list[pa.Field]:
    """Returns the column of a representation and, if it is stored, the column of its assignment."""
    info = representation_info(representation, encoder_info)
    info = replace(info, artefact=artefact, codec_artefact=codec_artefact)
    codec = CODECS.build(representation.codec)
    fields = [with_metadata(pa.field(info.column, codec.column_type(info.dim)), info.to_metadata())]
    if info.assignment_column is not None:
        metadata = {
            "format_version": FORMAT_VERSION,
            "role": "assignment",
            "form": info.assignment_form,
            "representation": info.column,
        }
        column = pa.field(info.assignment_column, pa.list_(pa.uint16()))
        fields.append(with_metadata(column, metadata))
    return fields


def represented_fields(representations: Iterable[Representation]) -> tuple[str, ...]:
    """Returns the item fields that the representations encode. The content comes first."""
    fields = {representation.field for representation in representations}
    return tuple(item_field for item_field in ITEM_FIELDS if item_field in fields)


def changed_setting(
    representation: Representation, encoder_info: EncoderInfo, stored: RepresentationInfo
) -> tuple[str, Any, Any] | None:
    """Finds the first setting that differs from the index. Returns its name and both values."""
    settings = (
        (
            "fingerprint",
            encoder_info.of_field(representation.field).fingerprint,
            stored.encoder.fingerprint,
        ),
        ("compressor", stored_settings(representation.compressor), stored.compressor),
        ("codec", dump(representation.codec), stored.codec),
        ("field", representation.field, stored.field),
        ("code", current_code(stored), stored.code),
    )
    return next((setting for setting in settings if setting[1] != setting[2]), None)


def current_code(stored: RepresentationInfo) -> str | None:
    """Returns the present hash of a compressor's code, or None if none is stored."""
    return stored.code and COMPRESSORS.code(stored.compressor["name"])


def check_same_settings(
    representation: Representation, encoder_info: EncoderInfo, stored: RepresentationInfo
) -> None:
    """Raises `SpecError` if a column with other settings is stored under the same name."""
    if setting := changed_setting(representation, encoder_info, stored):
        name, value, stored_value = setting
        field = f"representations.{representation.id}.{name}"
        raise SpecError(field, value, f"{stored_value}, as in the index", note=OTHER_COLUMN)


def compressor_remarks(
    dataset: lance.LanceDataset, representations: Iterable[Representation]
) -> list[str]:
    """Returns warnings about compressor settings that do not suit the first item."""
    ids_by_sentence: dict[str, list[str]] = {}
    for r in representations:
        name = RepresentationInfo.from_schema(dataset.schema, r.id).positions.get("extents")
        if name is None or name not in dataset.schema.names:
            continue
        first = decode_positions(dataset.to_table([name], filter=f"`{name}` IS NOT NULL", limit=1))[
            name
        ]
        compressor = COMPRESSORS.build(r.compressor)
        if len(first) and (sentence := compressor.remark(np.array(first[0].as_py()))):
            ids_by_sentence.setdefault(sentence, []).append(r.id)
    return [f"{', '.join(ids)}: {sentence}" for sentence, ids in ids_by_sentence.items()]


def has_assignment(representation: Representation) -> bool:
    """Checks whether the token assignment is stored. Without compression it is the identity."""
    if not representation.keep_assignment or representation.compressor.name == "none":
        return False
    return COMPRESSORS.build(representation.compressor).assignment_form is not None
