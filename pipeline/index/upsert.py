"""Adds vectors that the caller computed: the stages of the index job, and one commit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from pipeline.config import ComponentSpec, Spec, SpecError, Uri, first_line, parse
from pipeline.data.base import ItemSize, items_table
from pipeline.index.artefacts import Sample
from pipeline.index.columns import Representation, current_code, taps_by_representation
from pipeline.index.executor import Executor, Stream
from pipeline.index.fitting import (
    LearnedState,
    fit,
    fitted_fields,
    load_learned_state,
    needs_fit,
    trained_state,
)
from pipeline.index.fragments import Pending
from pipeline.index.info import EncoderInfo, RepresentationInfo, representation_infos
from pipeline.index.listing import LOOKUP, chunks, content_hashes, id_hash, stored_rows
from pipeline.index.reader import part_uri
from pipeline.index.session import Session
from pipeline.index.spec import IndexResources
from pipeline.index.stage import Unit
from pipeline.index.stages import Compress, Encode, Represent
from pipeline.index.trained import check_compressors
from pipeline.index.units import UnitLimits, UnitRange
from pipeline.registry import CODECS, COMPRESSORS, ENCODERS
from pipeline.schema import ITEM, SURROGATES, Item, item_id_problem, vectors_type
from pipeline.tokens import TokenBatch

#: Collection of the items whose vectors are given.
COLLECTION = "given"
#: Encoder of the items.
PRECOMPUTED = "precomputed"
#: Size of the vectors of a unit, units per fragment, and maximum size of a fragment, in bytes.
UNIT_BYTES, FRAGMENT_UNITS, FRAGMENT_BYTES = 32 << 20, 16, 256 << 20
#: Number of items to which representations are fitted, and the seed of their sample.
FIT_ITEMS, FIT_SEED = 256, 0
#: Number of added items from which the index of the ids is updated. Lookups scan other ids.
INDEXED_ITEMS = 4096


class UpsertSpec(Spec):
    """Record of a call."""

    index: Uri
    """Path or URI of the index."""
    num_items: int
    """Number of given items."""


@dataclass(frozen=True)
class Given:
    """Items with their vectors.

    Attributes:
        vectors: Vectors (N, D) of each item, float32, with N >= 1.
        texts: Texts by item, or None without.
        titles: Titles by item, or None without.
        metadata: JSON objects by item, or None without.
    """

    ids: Sequence[str]
    vectors: Sequence[np.ndarray]
    texts: Sequence[str | None] | None = None
    titles: Sequence[str | None] | None = None
    metadata: Sequence[Mapping[str, Any] | None] | None = None

    def check(self) -> None:
        """Raises `SpecError` if ids, vectors or the other lists are invalid."""
        for field in ("vectors", "texts", "titles", "metadata"):
            values = getattr(self, field)
            if values is not None and len(values) != len(self.ids):
                rule = f"a list of {len(self.ids)} values, one per id"
                raise SpecError(field, f"a list of {len(values)}", rule)
        seen: set[str] = set()
        for number, item_id in enumerate(self.ids):
            if problem := item_id_problem(item_id):
                raise SpecError(f"ids[{number}]", item_id, "a valid id", f"is invalid: {problem}")
            if item_id in seen:
                raise SpecError(f"ids[{number}]", item_id, "a list of distinct ids", "occurs twice")
            seen.add(item_id)
        dim = self.vectors[0].shape[-1] if len(self.vectors) and self.vectors[0].ndim else 0
        for number, vectors_ND in enumerate(self.vectors):
            if vectors_ND.ndim != 2 or vectors_ND.shape[1] != dim or not len(vectors_ND):
                rule = f"an array (number of vectors, {dim}) with at least one vector"
                raise SpecError(f"vectors[{number}]", f"the shape {vectors_ND.shape}", rule)
            norm = np.vdot(vectors_ND, vectors_ND)
            if not np.isfinite(norm) or not norm:
                value = "only zeros" if norm == 0 else "NaN, infinity or numbers that are too large"
                rule = "finite numbers in float32 that are not all zero"
                raise SpecError(f"vectors[{number}]", value, rule)
        for field in ("texts", "titles"):
            for number, text in enumerate(getattr(self, field) or ()):
                if not isinstance(text, str | None) or SURROGATES.search(text or ""):
                    raise SpecError(f"{field}[{number}]", text, "a text in valid Unicode, or None")
        for number, values in enumerate(self.metadata or ()):
            _check_metadata(f"metadata[{number}]", values)

    @property
    def dim(self) -> int:
        """Width of the vectors."""
        return self.vectors[0].shape[1]

    def item(self, number: int, revision: str) -> Item:
        """Returns an item with its vectors."""
        metadata = self.metadata[number] if self.metadata else None
        return Item(
            item_id=self.ids[number],
            parent_id=self.ids[number],
            source=COLLECTION,
            modality="vectors",
            revision=revision,
            title=self.titles[number] if self.titles else None,
            text=self.texts[number] if self.texts else None,
            metadata=dict(metadata) if metadata else None,
            payload={"vectors": self.vectors[number]},
        )


def _check_metadata(field: str, value: Any) -> None:
    if not isinstance(value, Mapping | None):
        raise SpecError(field, value, "a JSON object or None")
    try:
        json.dumps(value and dict(value), ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(
            field, "a dict", "a JSON object", f"cannot be stored ({first_line(error)})"
        ) from None


def upsert(
    index: str,
    given: Given,
    representations: Sequence[Representation],
    label: str,
    executor: Executor,
    *,
    job: str,
) -> None:
    """Adds or replaces items in one commit.

    Args:
        representations: Columns of a new index. An existing index keeps its columns.
        label: Name of the model that computed the vectors, for a new index.

    Raises:
        SpecError: The items are invalid, or differ from those of the index.
        LeaseHeld: Another job is writing to the index.
    """
    given.check()
    if not given.ids:
        raise SpecError("ids", [], "a list with at least one id")
    spec = parse(UpsertSpec, {"index": index, "num_items": len(given.ids)})
    with Session(index, spec, "upsert", job, dict, executor=executor) as session:
        writer = session.writer
        columns = _columns(session, given, representations, label)
        stage = Represent(
            Encode(columns.encoder, columns.info, prepare=False),
            Compress(columns.info, columns.representations, columns.learned, ()),
        )
        fragments = {
            item_id: fragment
            for ids in chunks(given.ids, LOOKUP)
            for item_id, (_, _, fragment) in stored_rows(writer.dataset, ids).items()
        }
        payload = pa.schema([pa.field("vectors", vectors_type(given.dim, pa.float32()))])
        stream = Stream(
            part_uri(index),
            lambda _: _units(given, job, fragments, payload),
            [UnitRange(0)],
            [([stage], IndexResources().encode)],
            [*ITEM.names, *payload.names],
            units_per_fragment=FRAGMENT_UNITS,
            fragment_bytes=FRAGMENT_BYTES,
        )
        written = Pending()
        parts = closing(executor.written(stream, IndexResources()))
        with session.monitor.phase("add", total=len(given.ids)), parts as generator:
            for part in generator:
                if part is not None:
                    written.add(part)
                    session.monitor.update(written.num_items)
                session.check()
        for reject in pa.concat_tables(written.rejects).to_pylist():
            raise SpecError(f"vectors of {reject['item_id']}", reject["reason"], "valid vectors")
        writer.commit(written.fragments, written.replaced)
        if len(given.ids) >= INDEXED_ITEMS:
            writer.index_ids()


class _Columns(NamedTuple):
    """Columns to fill.

    Attributes:
        learned: State of the representations, by id.
    """

    encoder: ComponentSpec
    info: EncoderInfo
    representations: list[Representation]
    learned: dict[str, LearnedState]


def _columns(
    session: Session, given: Given, representations: Sequence[Representation], label: str
) -> _Columns:
    """Returns the columns of the index, to which a new index adds those that are wanted."""
    stored = representation_infos(session.writer.dataset.schema)
    if stored:
        encoder = _stored_encoder(session.index, next(iter(stored.values())).encoder, given)
        wanted = [stored_representation(info) for info in stored.values()]
        learned = {name: load_learned_state(session.index, info) for name, info in stored.items()}
        if taps := taps_by_representation(wanted):
            problem = f"has {next(iter(taps))}, which needs attention statistics"
            rule = "an index whose representations need token vectors only"
            raise SpecError("index", session.index, rule, problem)
        return _Columns(encoder, _info(encoder), wanted, learned)
    settings = {"dim": given.dim, "label": label}
    encoder = ENCODERS.resolve({"name": PRECOMPUTED, **settings})
    info, learned, fields = _info(encoder), {}, list[pa.Field]()
    check_compressors(representations, encoder)
    for r in representations:
        if needs_fit(r):
            with session.monitor.phase(f"fit {r.id}"):
                learned[r.id] = session.call(_fit, r, encoder, info, given)
        else:
            learned[r.id] = trained_state(r, info)
        fields += fitted_fields(session.index, r, info, learned[r.id])
    session.writer.add_columns(fields)
    return _Columns(encoder, info, list(representations), learned)


def _info(encoder: ComponentSpec) -> EncoderInfo:
    return EncoderInfo.from_encoder(ENCODERS.build(encoder), encoder)


def _stored_encoder(index: str, info: EncoderInfo, given: Given) -> ComponentSpec:
    if info.name != PRECOMPUTED:
        problem = f"was made with the encoder {info.name}, whose vectors it computes itself"
        rule = "an index of given vectors"
        raise SpecError("index", index, rule, problem, "; add files or texts with `add_files`")
    if info.dim != given.dim:
        raise SpecError("vectors", f"the width {given.dim}", f"{info.dim} wide, as in the index")
    return ENCODERS.resolve(info.spec)


def stored_representation(info: RepresentationInfo) -> Representation:
    """Returns the definition of a stored representation.

    Raises:
        SpecError: The code of its compressor has changed.
    """
    if (code := current_code(info)) != info.code:
        rule, note = f"{info.code}, as in the index", "; restore it, or use a new index"
        raise SpecError(f"representations.{info.column}.code", code, rule, note=note)
    return Representation(
        id=info.column,
        compressor=COMPRESSORS.resolve(info.compressor),
        codec=CODECS.resolve(info.codec),
        field=info.field,
        keep_assignment=info.assignment_column is not None,
    )


def _fit(
    representation: Representation, encoder: ComponentSpec, info: EncoderInfo, given: Given
) -> LearnedState:
    """Fits a representation to a sample of the items."""
    keys = {number: id_hash(f"{FIT_SEED} {item_id}") for number, item_id in enumerate(given.ids)}
    chosen = sorted(sorted(keys, key=keys.__getitem__)[:FIT_ITEMS])
    payload = pa.schema([pa.field("vectors", vectors_type(given.dim, pa.float32()))])
    table = items_table([given.item(number, "") for number in chosen], payload)
    stage = Encode(encoder, info, prepare=False).load()

    def sample() -> Iterator[TokenBatch]:
        return (batch for _, _, batch, _ in stage.batches(table))

    learned = fit(representation, info, sample, FIT_SEED)
    hashes = np.unique(content_hashes(table))
    return learned._replace(sample=Sample({}, hashes))


def _units(
    given: Given, revision: str, fragments: Mapping[str, int], payload: pa.Schema
) -> Iterator[Unit]:
    limits = UnitLimits(items=len(given.ids), num_bytes=UNIT_BYTES)
    sizes = ((n, ItemSize(vectors.nbytes)) for n, vectors in enumerate(given.vectors))
    for number, numbers in enumerate(limits.split(sizes)):
        items = [given.item(n, revision) for n in numbers]
        replaces: dict[str, list[str]] = {}
        for item in items:
            if (fragment := fragments.get(item.item_id)) is not None:
                replaces.setdefault(str(fragment), []).append(item.item_id)
        extra = {"replaces": replaces, "gone": 0}
        yield Unit(f"{number:06d}", items_table(items, payload), extra=extra)
