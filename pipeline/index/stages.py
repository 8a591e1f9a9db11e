"""Stages of the index job, which prepare and encode items and compress their vectors."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from pipeline.compression import MAX_TOKENS, Compressor
from pipeline.compression.codecs import Codec
from pipeline.config import ComponentSpec, digest, dump
from pipeline.data.decode import Unreadable
from pipeline.encoders import Encoder
from pipeline.encoders.shared import load_encoder
from pipeline.index.columns import (
    RERANK_TOKENS,
    Representation,
    has_assignment,
    represented_fields,
    token_column,
)
from pipeline.index.fitting import LearnedState
from pipeline.index.info import EncoderInfo
from pipeline.index.rerank_tokens import tokens_column
from pipeline.index.stage import Processed, Stage
from pipeline.index.token_columns import (
    TAP,
    assignment_column,
    fixed_lists,
    positions_column,
    tap_values,
    token_batches,
    token_columns,
    with_taps,
)
from pipeline.registry import CODECS, COMPRESSORS, ENCODERS
from pipeline.runtime.progress import counting
from pipeline.schema import ITEM, Reject, detail_with_file, metadata_file
from pipeline.taps import Tap
from pipeline.tokens import TokenBatch, ragged_to_arrow

#: Prefix of the reject reason of items without tokens.
NOTHING = "nothing to index"
#: Problems of items by row, and computed columns by name.
Problems = dict[int, str]
Columns = dict[str, pa.Array]


class EncodedRows(NamedTuple):
    """Tokens of some rows of a unit, and the problems of other rows."""

    item_field: str
    rows: np.ndarray
    batch: TokenBatch
    problems: Problems


def needs_preparing(spec: ComponentSpec, item_fields: Sequence[str]) -> bool:
    """Checks whether the encoder requires items with these fields to be prepared first."""
    return "content" in item_fields and ENCODERS.load(spec.name).has_preprocessor


@dataclass
class Prepare(Stage):
    """Stage that computes the inputs of the encoder. It does not load the weights."""

    spec: ComponentSpec

    name: ClassVar[str] = "prepare"

    def load(self) -> Prepare:
        """Builds the encoder's preparer."""
        self._prepare = ENCODERS.load(self.spec.name).preprocessor(self.spec)
        return self

    def process(self, items: pa.Table) -> Processed:
        """Prepares items."""
        with counting(self.name):
            return Processed(self._prepare(items), [])


@dataclass
class Encode(Stage):
    """Stage that encodes the fields of items and adds the results as token columns.

    Attributes:
        taps: Single-layer attention statistics to add.
        appended: Whether to add the vectors of the appended tokens.
        rerank: Folder of an EDJE whose adapter tokens are added, or None for none.
        prepare: Whether this stage prepares the items itself, without an earlier `Prepare`.
        placement: Options of the encoder's constructor that place its weights on devices.
        see: Encoder of the item field `image`, or None without that field.
    """

    spec: ComponentSpec
    encoder_info: EncoderInfo
    item_fields: Sequence[str] = ("content",)
    taps: Sequence[Tap] = ()
    appended: bool = False
    rerank: str | None = None
    prepare: bool = True
    placement: Mapping[str, Any] = field(default_factory=dict)
    see: ComponentSpec | None = None

    name: ClassVar[str] = "encode"

    @property
    def needs(self) -> tuple[str, ...]:
        """Columns that the items must have."""
        if "content" not in self.item_fields:
            return ("caption",)
        return ENCODERS.load(self.spec.name).required_inputs(self.spec)

    @property
    def adds(self) -> tuple[str, ...]:
        """Columns that the stage adds."""
        others = [TAP + tap.name for tap in self.taps]
        if self.appended:
            others.append("appended")
        tokens = (
            token_column(item_field, name)
            for item_field in self.item_fields
            for name in (
                *encoder_token_columns(self.encoder_info.for_field(item_field)),
                *(others if item_field != "image" else ()),
            )
        )
        return (*tokens, *self.adds_for_rerank)

    @property
    def adds_for_rerank(self) -> tuple[str, ...]:
        """Columns with the tokens of the adapter, which are stored without compression."""
        return (RERANK_TOKENS,) if self.rerank else ()

    def load(self) -> Encode:
        """Loads the encoder and, if `rerank` is set, the adapter of the EDJE model."""
        return self.with_encoder(load_encoder(self.spec, **self.placement))

    def with_encoder(self, encoder: Encoder) -> Encode:
        """Loads the stage with an encoder that is loaded already."""
        self._encoder = encoder
        prepares = self.prepare and needs_preparing(self.spec, self.item_fields)
        self._prepare = encoder.preprocessor(self.spec) if prepares else None
        if self.rerank is not None:
            from pipeline.encoders.edje.model import load_adapter

            self._adapter = load_adapter(self.rerank, "rerank")
        self._see: Encode | None = None
        if self.see is not None:
            info = self.encoder_info.of_field("image")
            self._see = Encode(self.see, info, placement=self.placement).load()
        reason = encoder.empty_reason if "content" in self.item_fields else "no caption"
        self._empty_reason = f"{NOTHING}: {reason}"
        return self

    def prepared(self, items: pa.Table) -> pa.Table:
        """Adds the inputs of the encoder to the items, unless an earlier stage has done so."""
        if self._prepare is None:
            return items
        with counting("prepare"):
            return self._prepare(items)

    def batches(self, items: pa.Table) -> Iterator[EncodedRows]:
        """Yields the tokens of prepared items and the problems of items without valid tokens."""
        taps = [self.taps] if self.taps else []
        for item_field in self.item_fields:
            if item_field == "image":
                continue
            rows, texts = _items_of(items, item_field)
            if not len(rows):
                continue
            for batch_rows, batch in self._encoder.encode(texts, *taps):
                usable, problems = usable_rows(batch, self._empty_reason)
                item_rows = rows[batch_rows]
                row_problems = {int(item_rows[i]): problem for i, problem in problems.items()}
                if row_problems:
                    batch = batch.take(usable.nonzero().squeeze(1))
                yield EncodedRows(item_field, item_rows[usable.numpy()], batch, row_problems)

    def _seen(self, items: pa.Table) -> Iterator[EncodedRows]:
        """Yields the vectors of the images and frames of items, except those it cannot read."""
        names = [name for name in ("image", "frames") if name in items.column_names]
        if self._see is None or not names:
            return
        has_media = np.any([items[name].is_valid().to_numpy() for name in names], axis=0)
        for rows, prepared in self._see.readable(items, np.flatnonzero(has_media)):
            for _, seen, batch, _ in self._see.batches(prepared):
                yield EncodedRows("image", rows[seen], batch, {})

    def readable(self, items: pa.Table, rows: np.ndarray) -> Iterator[tuple[np.ndarray, pa.Table]]:
        """Yields prepared rows: all of them, or if some cannot be read, the others one by one."""
        try:
            yield rows, self.prepared(items.take(rows))
            return
        except Unreadable:
            pass
        for row in rows:
            with contextlib.suppress(Unreadable):
                yield np.array([row]), self.prepared(items.take([row]))

    def process(self, items: pa.Table) -> Processed:
        """Encodes items into token columns."""
        return self.collect(items, self._token_columns, self.name)

    def collect(
        self, items: pa.Table, columns: Callable[[TokenBatch, str], Columns], step: str
    ) -> Processed:
        """Encodes items and adds columns that are computed from their tokens.

        Args:
            columns: Returns the columns of the tokens of an item field.
        """
        started = time.perf_counter()
        media, items = items, self.prepared(items)
        prepared = time.perf_counter()
        collector, computing = ColumnCollector(), 0.0
        encoded = itertools.chain(self.batches(items), self._seen(media))
        for item_field, rows, batch, problems in encoded:
            start = time.perf_counter()
            added = columns(batch, item_field)
            if self.rerank is not None and item_field == "content":
                added[RERANK_TOKENS] = tokens_column(self._adapter, batch)
            collector.add(item_field, rows, pa.table(added), problems)
            computing += time.perf_counter() - start
        seconds = {"prepare": prepared - started} if prepared - started > 1e-3 else {}
        seconds["encode"] = time.perf_counter() - prepared - computing
        seconds[step] = seconds.get(step, 0.0) + computing
        items = items.select(ITEM.names)
        return Processed(*collector.join(items, self.item_fields, self._empty_reason), seconds)

    def _token_columns(self, batch: TokenBatch, item_field: str) -> Columns:
        columns = {"vectors": ragged_to_arrow(batch.vectors, batch.mask, pa.float32())}
        for kind, type in self.encoder_info.for_field(item_field).position_types.items():
            columns[kind] = positions_column(batch, kind, type)
        if self.encoder_info.pooled_dim:
            columns["pooled"] = fixed_lists(batch.pooled, pa.float32())
        if self.appended and batch.appended is not None:
            columns["appended"] = fixed_lists(batch.appended.flatten(1), pa.float32())
        for tap in self.taps if item_field != "image" else ():
            columns[TAP + tap.name] = tap_values(batch, tap)
        return {token_column(item_field, name): column for name, column in columns.items()}


class Method(NamedTuple):
    """Compressor, and the representations that store its result with different codecs."""

    item_field: str
    compressor: Compressor
    outputs: list[tuple[Representation, Codec]]


@dataclass
class Compress(Stage):
    """Stage that compresses token vectors and adds the columns of all representations.

    Representations that differ only in the codec are compressed once.

    Attributes:
        learned: Learned state of the fitted representations, by id.
        encoder_columns: Names of the shared columns of the encoder to store.
        device: Device for vectors from the object store or an index, when loaded.
    """

    encoder_info: EncoderInfo
    representations: Sequence[Representation]
    learned: Mapping[str, LearnedState]
    encoder_columns: Sequence[str]

    name: ClassVar[str] = "compress"

    @property
    def item_fields(self) -> tuple[str, ...]:
        """Item fields that the representations encode."""
        return represented_fields(self.representations)

    @property
    def needs(self) -> tuple[str, ...]:
        """Columns that the items must have."""
        return tuple(token_column(item_field, "vectors") for item_field in self.item_fields)

    @property
    def adds(self) -> tuple[str, ...]:
        """Columns that the stage adds."""
        return (
            *self.encoder_columns,
            *(r.id for r in self.representations),
            *(r.assignment_id for r in self.representations if has_assignment(r)),
        )

    def load(self) -> Compress:
        """Builds the compressors and codecs."""
        # Ray shows a GPU only to processes that reserve one.
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._methods: dict[str, Method] = {}
        for r in self.representations:
            learned = self.learned.get(r.id, LearnedState())
            fitted_id = [r.id] if learned.compressor is not None else []
            key = digest([r.field, dump(r.compressor), fitted_id])
            if key not in self._methods:
                compressor = COMPRESSORS.build(r.compressor, learned.compressor)
                self._methods[key] = Method(r.field, compressor, [])
            self._methods[key].outputs.append((r, CODECS.build(r.codec, learned.codec)))
        return self

    @torch.no_grad()
    def columns(self, batch: TokenBatch, item_field: str = "content") -> Columns:
        """Computes the stored columns from the token vectors of an item field."""
        columns: Columns = {}
        encoder_info, stored = self.encoder_info.for_field(item_field), self.encoder_columns
        if (pooled := encoder_info.pooled_column) is not None and pooled in stored:
            columns[pooled] = fixed_lists(batch.pooled, pa.float16())
        for kind, type in encoder_info.position_types.items():
            if (name := encoder_info.position_column(kind)) in stored:
                columns[name] = positions_column(batch, kind, type)
        for name in batch.taps:
            if (column := encoder_info.tap_column(Tap.parse(name))) in stored:
                columns[column] = tap_values(batch, Tap.parse(name))
        for method in self._methods.values():
            if method.item_field != item_field:
                continue
            compressor = method.compressor
            result = compressor.compress(with_taps(batch, compressor.needs_taps, encoder_info))
            for representation, codec in method.outputs:
                columns[representation.id] = codec.encode(result)
                if has_assignment(representation):
                    name = representation.assignment_id
                    columns[name] = assignment_column(result, batch, compressor)
        return columns

    def process(self, items: pa.Table) -> Processed:
        """Compresses the token columns of items."""
        collector = ColumnCollector()
        for item_field in self.item_fields:
            for rows, batch in token_batches(items, self.encoder_info, item_field):
                columns = self.columns(batch.to(self.device), item_field)
                collector.add(item_field, rows, pa.table(columns))
        others = items.drop_columns(list(token_columns(items)))
        return Processed(*collector.join(others, self.item_fields))


@dataclass
class Represent(Stage):
    """Combination of `Encode` and `Compress` in one actor, which keeps vectors on the device."""

    encode: Encode
    compress: Compress

    name: ClassVar[str] = "represent"

    @property
    def needs(self) -> tuple[str, ...]:
        """Columns that the items must have."""
        return self.encode.needs

    @property
    def adds(self) -> tuple[str, ...]:
        """Columns that the stage adds."""
        return (*self.compress.adds, *self.encode.adds_for_rerank)

    def load(self) -> Represent:
        """Loads both stages."""
        self.encode.load()
        self.compress.load()
        return self

    def process(self, items: pa.Table) -> Processed:
        """Encodes and compresses items."""
        return self.encode.collect(items, self.compress.columns, "compress")


def encoder_token_columns(encoder_info: EncoderInfo) -> tuple[str, ...]:
    """Returns the token columns that are filled when an encoder processes a batch."""
    return (
        "vectors",
        *encoder_info.position_types,
        *(["pooled"] if encoder_info.pooled_dim else []),
    )


def _items_of(items: pa.Table, item_field: str) -> tuple[np.ndarray, pa.Table]:
    if item_field == "content":
        return np.arange(items.num_rows), items
    rows = np.flatnonzero(items[item_field].is_valid().to_numpy())
    texts = items.select(["item_id", item_field]).take(rows)
    return rows, texts.rename_columns(["item_id", "text"])


def usable_rows(batch: TokenBatch, empty_reason: str) -> tuple[torch.Tensor, Problems]:
    """Returns a mask (B,) of the usable items, and the problems of the others.

    Usable items have 1 to `MAX_TOKENS` tokens and finite vectors.
    """
    # A sum is finite if all numbers are, and five times faster than a test of each.
    finite = (batch.vectors.sum(dim=2).isfinite() | ~batch.mask).all(dim=1)
    if batch.pooled is not None:
        finite &= batch.pooled.isfinite().all(dim=1)
    if batch.appended is not None:
        finite &= batch.appended.isfinite().all(dim=2).all(dim=1)
    lengths = batch.lengths
    usable = (finite & (lengths > 0) & (lengths <= MAX_TOKENS)).cpu()
    problems = {}
    for i in np.flatnonzero(~usable.numpy()).tolist():
        problems[i] = "non-finite vectors" if not finite[i] else empty_reason
        if lengths[i] > MAX_TOKENS:
            problems[i] = f"more than {MAX_TOKENS:,} tokens: have the source cut it into passages"
    return usable, problems


class ColumnCollector:
    """Collects the columns and problems of the items of a unit for all item fields."""

    def __init__(self) -> None:
        self._rows: dict[str, list[np.ndarray]] = {}
        self._tables: dict[str, list[pa.Table]] = {}
        self._problems: Problems = {}

    def add(
        self, item_field: str, rows: np.ndarray, table: pa.Table, problems: Problems | None = None
    ) -> None:
        """Adds the columns that were computed for an item field of some rows."""
        if len(rows):
            self._rows.setdefault(item_field, []).append(rows)
            self._tables.setdefault(item_field, []).append(table)
        self._problems.update(problems or {})

    def join(
        self, items: pa.Table, item_fields: Sequence[str], empty_reason: str = ""
    ) -> tuple[pa.Table, list[Reject]]:
        """Returns the items with the columns of all fields, and the rejects.

        Columns are null for items without the field. Items without any field and items with a
        problem are rejected.

        Args:
            empty_reason: Problem that does not reject an item with another field.
        """
        has_any = np.zeros(items.num_rows, dtype=bool)
        order: dict[str, np.ndarray] = {}
        for item_field, rows in self._rows.items():
            present = np.concatenate(rows)
            order[item_field] = np.full(items.num_rows, -1)
            order[item_field][present] = np.arange(len(present))
            has_any[present] = True
        for row, problem in self._problems.items():
            has_any[row] &= problem == empty_reason
        accepted = np.flatnonzero(has_any)
        table = items.take(accepted)
        for item_field in item_fields:
            if item_field not in order:
                continue
            indices = order[item_field][accepted]
            columns = pa.concat_tables(self._tables[item_field])
            added = columns.take(pa.array(indices, mask=indices < 0))
            for name in added.column_names:
                table = table.append_column(name, added[name])
        rejected = np.flatnonzero(~has_any).tolist()
        rejects = [_reject(items, row, self._problems.get(row, empty_reason)) for row in rejected]
        return table, rejects


def _reject(items: pa.Table, row: int, problem: str) -> Reject:
    item_id, source, revision = (
        items[name][row].as_py() for name in ("item_id", "source", "revision")
    )
    detail = ""
    if problem.startswith(NOTHING) and items["caption"][row].is_valid:
        detail = "it has a caption; add a representation with `field: caption` to index it"
    detail = detail_with_file(
        detail, metadata_file(*(items[n][row].as_py() for n in ("modality", "metadata")))
    )
    return Reject(item_id, source, "encode", problem, detail, revision)
