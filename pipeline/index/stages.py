"""Stages of the index job, which prepare and encode items and compress their vectors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from pipeline.codecs import Codec
from pipeline.compression import MAX_TOKENS, Compressor
from pipeline.config import ComponentSpec, digest, dump_stored
from pipeline.encoders import Encoder
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
from pipeline.progress import counting
from pipeline.registry import CODECS, COMPRESSORS, ENCODERS
from pipeline.schema import ITEM, Reject, detail_with_file, metadata_file
from pipeline.stage import LoadedStage, Processed, Stage
from pipeline.taps import Tap
from pipeline.tokens import TokenBatch, ragged_to_arrow

if TYPE_CHECKING:
    from pipeline.rerank.adapter import Adapter

#: Prefix of the reject reason of items without tokens.
NOTHING = "nothing to index"
#: Problems of items by row.
Problems = dict[int, str]


class EncodedRows(NamedTuple):
    """Tokens of some rows of a unit.

    Attributes:
        item_field: Encoded field of the items.
        rows: Rows with tokens to index, in the order of `batch`.
        batch: Tokens of these rows.
        problems: Problems of other rows.
    """

    item_field: str
    rows: np.ndarray
    batch: TokenBatch
    problems: Problems


def needs_preparing(spec: ComponentSpec, item_fields: Sequence[str]) -> bool:
    """Checks whether the encoder requires items with these fields to be prepared first."""
    return "content" in item_fields and ENCODERS.load(spec.name).has_preprocessor


@dataclass(frozen=True)
class Prepare(Stage):
    """Stage that computes the inputs of the encoder. It does not load the weights."""

    spec: ComponentSpec

    name: ClassVar[str] = "prepare"
    needs: ClassVar[tuple[str, ...]] = ()
    adds: ClassVar[tuple[str, ...]] = ()

    def load(self) -> Preparer:
        """Builds the encoder's preparer."""
        return Preparer(ENCODERS.load(self.spec.name).preprocessor(self.spec))


class Preparer(LoadedStage):
    """A loaded `Prepare`."""

    name = Prepare.name

    def __init__(self, prepare: Callable[[pa.Table], pa.Table]):
        self._prepare = prepare

    def process(self, items: pa.Table) -> Processed:
        """Prepares items."""
        with counting(self.name):
            return Processed(self._prepare(items), [])


@dataclass(frozen=True)
class Encode(Stage):
    """Stage that encodes the fields of items and adds the results as token columns.

    Attributes:
        spec: Spec of the encoder.
        encoder_info: Description of the encoder.
        item_fields: Fields to encode.
        taps: Single-layer attention statistics to add.
        appended: Whether to add the vectors of the appended tokens.
        rerank: Folder of an EDJE whose adapter tokens are added, or None for none.
        prepare: Whether this stage prepares the items itself, without an earlier `Prepare`.
        placement: Options of the encoder's constructor that place its weights on devices.
    """

    spec: ComponentSpec
    encoder_info: EncoderInfo
    item_fields: Sequence[str] = ("content",)
    taps: Sequence[Tap] = ()
    appended: bool = False
    rerank: str | None = None
    prepare: bool = True
    placement: Mapping[str, Any] = field(default_factory=dict)

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
            for name in (*encoder_token_columns(self.encoder_info.for_field(item_field)), *others)
        )
        return (*tokens, *self.adds_for_rerank)

    @property
    def adds_for_rerank(self) -> tuple[str, ...]:
        """Columns with the tokens of the adapter, which are stored without compression."""
        return (RERANK_TOKENS,) if self.rerank else ()

    def load(self) -> TokenEncoder:
        """Loads the encoder and, if `rerank` is set, the adapter of the EDJE model."""
        encoder = ENCODERS.build(self.spec, **self.placement)
        prepares = self.prepare and needs_preparing(self.spec, self.item_fields)
        preparer = encoder.preprocessor(self.spec) if prepares else None
        adapter = None
        if self.rerank is not None:
            from pipeline.rerank.edje import load_adapter

            adapter = load_adapter(self.rerank, "rerank")
        return TokenEncoder(self, encoder, preparer, adapter)


class TokenEncoder(LoadedStage):
    """A loaded `Encode`.

    Attributes:
        stage: Settings of the stage.
        empty_reason: Reject reason of items without tokens.
    """

    name = Encode.name

    def __init__(
        self,
        stage: Encode,
        encoder: Encoder,
        prepare: Callable[[pa.Table], pa.Table] | None,
        adapter: Adapter | None,
    ):
        self.stage, self._encoder = stage, encoder
        self._prepare, self._adapter = prepare, adapter
        reason = encoder.empty_reason if "content" in stage.item_fields else "no caption"
        self.empty_reason = f"{NOTHING}: {reason}"

    def prepare(self, items: pa.Table) -> tuple[pa.Table, dict[str, float]]:
        """Adds the inputs of the encoder to the items.

        Also returns the time by stage, if it is known.
        """
        start = time.perf_counter()
        if self._prepare is not None:
            with counting("prepare"):
                items = self._prepare(items)
        seconds = time.perf_counter() - start
        return items, {"prepare": seconds} if seconds > 1e-3 else {}

    def batches(self, items: pa.Table) -> Iterator[EncodedRows]:
        """Yields the tokens of prepared items and the problems of items without valid tokens."""
        taps = [self.stage.taps] if self.stage.taps else []
        for item_field in self.stage.item_fields:
            rows, texts = _items_of(items, item_field)
            if not len(rows):
                continue
            for batch_rows, batch in self._encoder.encode(texts, *taps):
                usable, problems = usable_rows(batch, self.empty_reason)
                item_rows = rows[batch_rows]
                row_problems = {int(item_rows[i]): problem for i, problem in problems.items()}
                if row_problems:
                    batch = batch.take(usable.nonzero().squeeze(1))
                yield EncodedRows(item_field, item_rows[usable.numpy()], batch, row_problems)

    def rerank_tokens(self, batch: TokenBatch) -> pa.Array:
        """Returns the adapter tokens of a batch."""
        if self._adapter is None:
            raise ValueError("rerank must be set to compute adapter tokens, got None")
        return tokens_column(self._adapter, batch)

    def with_rerank_tokens(self, table: pa.Table, encoded: EncodedRows) -> pa.Table:
        """Adds the tokens of the adapter to the columns of a batch if `rerank` is set."""
        if self.stage.rerank is None or encoded.item_field != "content":
            return table
        return table.append_column(RERANK_TOKENS, self.rerank_tokens(encoded.batch))

    def process(self, items: pa.Table) -> Processed:
        """Encodes items into token columns."""
        items, preparing = self.prepare(items)
        collector = ColumnCollector()
        start = time.perf_counter()
        for encoded in self.batches(items):
            item_field, rows, batch, problems = encoded
            columns = {"vectors": ragged_to_arrow(batch.vectors, batch.mask, pa.float32())}
            for kind, type in self.stage.encoder_info.for_field(item_field).position_types.items():
                columns[kind] = positions_column(batch, kind, type)
            if self.stage.encoder_info.pooled_dim:
                columns["pooled"] = fixed_lists(batch.pooled, pa.float32())
            if self.stage.appended and batch.appended is not None:
                columns["appended"] = fixed_lists(batch.appended.flatten(1), pa.float32())
            for tap in self.stage.taps:
                columns[TAP + tap.name] = tap_values(batch, tap)
            named = {token_column(item_field, name): column for name, column in columns.items()}
            collector.add(
                item_field, rows, self.with_rerank_tokens(pa.table(named), encoded), problems
            )
        seconds = {**preparing, "encode": time.perf_counter() - start}
        accepted, rejects = collector.join(
            items.select(ITEM.names), self.stage.item_fields, self.empty_reason
        )
        return Processed(accepted, rejects, seconds)


@dataclass(frozen=True)
class Compress(Stage):
    """Stage that compresses token vectors and adds the columns of all representations.

    Attributes:
        encoder_info: Description of the encoder.
        representations: Representations to compute.
        learned: Learned state of the fitted representations, by id.
        encoder_columns: Names of the shared columns of the encoder to store.
        assignment_columns: Names of stored columns of token assignments by representation; others
            have their default name.
    """

    encoder_info: EncoderInfo
    representations: Sequence[Representation]
    learned: Mapping[str, LearnedState]
    encoder_columns: Sequence[str]
    assignment_columns: Mapping[str, str] = field(default_factory=dict)

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
            *(self.assignment_column(r) for r in self.representations if has_assignment(r)),
        )

    def assignment_column(self, representation: Representation) -> str:
        """Returns the name of the column with the token assignment of a representation."""
        return self.assignment_columns.get(representation.id, representation.assignment_id)

    def load(self) -> TokenCompressor:
        """Builds the compressors and codecs."""
        return TokenCompressor(self)


class Method(NamedTuple):
    """Compressor, and the representations that store its result with different codecs."""

    item_field: str
    compressor: Compressor
    outputs: list[tuple[Representation, Codec]]


class TokenCompressor(LoadedStage):
    """A loaded `Compress`.

    Representations that differ only in the codec are compressed once.

    Attributes:
        device: Device for vectors from the object store or an index. Ray shows a GPU only to
            processes that reserve one.
    """

    name = Compress.name

    def __init__(self, stage: Compress):
        self.stage = stage
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        methods: dict[str, Method] = {}
        for r in stage.representations:
            learned = stage.learned.get(r.id, LearnedState())
            fitted_id = [r.id] if learned.compressor is not None else []
            key = digest([r.field, dump_stored(r.compressor), fitted_id])
            if key not in methods:
                compressor = COMPRESSORS.build(r.compressor, learned.compressor)
                methods[key] = Method(r.field, compressor, [])
            methods[key].outputs.append((r, CODECS.build(r.codec, learned.codec)))
        self._methods = tuple(methods.values())

    @torch.no_grad()
    def columns(self, batch: TokenBatch, item_field: str = "content") -> pa.Table:
        """Computes the stored columns from the token vectors of an item field."""
        columns: dict[str, pa.Array] = {}
        encoder_info, stored = (
            self.stage.encoder_info.for_field(item_field),
            self.stage.encoder_columns,
        )
        if (pooled := encoder_info.pooled_column) is not None and pooled in stored:
            columns[pooled] = fixed_lists(batch.pooled, pa.float16())
        for kind, type in encoder_info.position_types.items():
            if (name := encoder_info.position_column(kind)) in stored:
                columns[name] = positions_column(batch, kind, type)
        for name in batch.taps:
            if (column := encoder_info.tap_column(Tap.parse(name))) in stored:
                columns[column] = tap_values(batch, Tap.parse(name))
        for method in self._methods:
            if method.item_field != item_field:
                continue
            compressor = method.compressor
            result = compressor.compress(with_taps(batch, compressor.needs_taps, encoder_info))
            for representation, codec in method.outputs:
                columns[representation.id] = codec.encode(result)
                if has_assignment(representation):
                    name = self.stage.assignment_column(representation)
                    columns[name] = assignment_column(result, batch, compressor)
        return pa.table(columns)

    def process(self, items: pa.Table) -> Processed:
        """Compresses the token columns of items."""
        collector = ColumnCollector()
        for item_field in self.stage.item_fields:
            for rows, batch in token_batches(items, self.stage.encoder_info, item_field):
                columns = self.columns(batch.to(self.device), item_field)
                collector.add(item_field, rows, columns)
        others = items.drop_columns(list(token_columns(items)))
        return Processed(*collector.join(others, self.stage.item_fields))


@dataclass(frozen=True)
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

    def load(self) -> Representer:
        """Loads both stages."""
        return Representer(self.encode.load(), self.compress.load())


class Representer(LoadedStage):
    """A loaded `Represent`."""

    name = Represent.name

    def __init__(self, encoder: TokenEncoder, compressor: TokenCompressor):
        self._encoder, self._compressor = encoder, compressor

    def process(self, items: pa.Table) -> Processed:
        """Encodes and compresses items."""
        items, preparing = self._encoder.prepare(items)
        collector = ColumnCollector()
        compressing = 0.0
        started = time.perf_counter()
        for encoded in self._encoder.batches(items):
            start = time.perf_counter()
            table = self._compressor.columns(encoded.batch, encoded.item_field)
            table = self._encoder.with_rerank_tokens(table, encoded)
            collector.add(encoded.item_field, encoded.rows, table, encoded.problems)
            compressing += time.perf_counter() - start
        encoding = time.perf_counter() - started - compressing
        seconds = {**preparing, "encode": encoding, "compress": compressing}
        item_fields, empty_reason = self._encoder.stage.item_fields, self._encoder.empty_reason
        accepted, rejects = collector.join(items.select(ITEM.names), item_fields, empty_reason)
        return Processed(accepted, rejects, seconds)


def encoder_token_columns(encoder_info: EncoderInfo) -> tuple[str, ...]:
    """Returns the token columns that are filled when an encoder processes a batch."""
    return (
        "vectors",
        *encoder_info.position_types,
        *(["pooled"] if encoder_info.pooled_dim else []),
    )


def _items_of(items: pa.Table, item_field: str) -> tuple[np.ndarray, pa.Table]:
    """Returns the rows that have a field, and their items in the form that the encoder expects."""
    if item_field == "content":
        return np.arange(items.num_rows), items
    rows = np.flatnonzero(items[item_field].is_valid().to_numpy())
    texts = items.select(["item_id", item_field]).take(rows)
    return rows, texts.rename_columns(["item_id", "text"])


def usable_rows(batch: TokenBatch, empty_reason: str) -> tuple[torch.Tensor, Problems]:
    """Returns a mask (B,) of the items with valid tokens, and the problems of the others.

    An item must have between 1 and `MAX_TOKENS` tokens and finite vectors.
    """
    finite = (batch.vectors.isfinite().all(dim=2) | ~batch.mask).all(dim=1)
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
            items: Items of the unit.
            item_fields: Fields whose columns are appended.
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
