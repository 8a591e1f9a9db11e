"""Stages of the index job: prepare and encode items, compress their token vectors."""

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
from pipeline.config import ComponentSpec, digest, dump
from pipeline.encoders import Encoder
from pipeline.index.columns import (
    RERANK_TOKENS,
    Representation,
    aspects_of,
    has_support,
    token_column,
)
from pipeline.index.fitting import Learned
from pipeline.index.info import EncoderInfo
from pipeline.index.rerank_tokens import tokens_column
from pipeline.index.token_columns import (
    TAP,
    batches_of,
    fixed_lists,
    positions_column,
    support_column,
    tap_values,
    token_columns,
    with_taps,
)
from pipeline.registry import CODECS, COMPRESSORS, ENCODERS
from pipeline.schema import ITEM, Reject, detail_with_file, metadata_file
from pipeline.stage import LoadedStage, Processed, Stage
from pipeline.taps import Tap
from pipeline.tokens import TokenBatch, ragged_to_arrow

if TYPE_CHECKING:
    from pipeline.rerank.adapter import Adapter

#: First words of the reason for which an item without the wanted content is rejected.
NOTHING = "nothing to index"
#: Problems of items, by their row.
Problems = dict[int, str]


class EncodedRows(NamedTuple):
    """Tokens of some rows of a unit.

    Attributes:
        aspect: The aspect of the items that was encoded.
        rows: Rows with tokens that can be indexed, in the order of `batch`.
        batch: Their tokens.
        problems: Problems of other rows.
    """

    aspect: str
    rows: np.ndarray
    batch: TokenBatch
    problems: Problems


def needs_preparing(spec: ComponentSpec, aspects: Sequence[str]) -> bool:
    """Returns whether items of these aspects are prepared before the encoder reads them."""
    return "content" in aspects and ENCODERS.load(spec.name).has_preprocessor


@dataclass(frozen=True)
class Prepare(Stage):
    """Adds to the items what their encoder reads, in processes without its weights."""

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
        return Processed(self._prepare(items), [])


@dataclass(frozen=True)
class Encode(Stage):
    """Encodes the wanted aspects of items into token columns.

    Attributes:
        taps: Attention statistics to add, of one layer each.
        rerank: Folder of an EDJE whose adapter's tokens are added; None: none are.
        prepare: Whether items are prepared here rather than by an earlier `Prepare`.
        placement: Options of the encoder's constructor that place its weights on devices.
    """

    spec: ComponentSpec
    encoder_info: EncoderInfo
    aspects: Sequence[str] = ("content",)
    taps: Sequence[Tap] = ()
    rerank: str | None = None
    prepare: bool = True
    placement: Mapping[str, Any] = field(default_factory=dict)

    name: ClassVar[str] = "encode"

    @property
    def needs(self) -> tuple[str, ...]:
        """Columns that the items must have."""
        if "content" not in self.aspects:
            return ("caption",)
        return ENCODERS.load(self.spec.name).required_inputs(self.spec)

    @property
    def adds(self) -> tuple[str, ...]:
        """Columns that the stage adds."""
        taps = tuple(TAP + tap.name for tap in self.taps)
        tokens = (
            token_column(aspect, name)
            for aspect in self.aspects
            for name in (*token_columns_of(self.encoder_info.for_field(aspect)), *taps)
        )
        return (*tokens, *self.adds_for_rerank)

    @property
    def adds_for_rerank(self) -> tuple[str, ...]:
        """The columns that are stored as they are, without compression."""
        return (RERANK_TOKENS,) if self.rerank else ()

    def load(self) -> TokenEncoder:
        """Loads the encoder, and the adapter of the EDJE if one is named."""
        encoder = ENCODERS.build(self.spec, **self.placement)
        prepares = self.prepare and needs_preparing(self.spec, self.aspects)
        preparer = encoder.preprocessor(self.spec) if prepares else None
        adapter = None
        if self.rerank is not None:
            from pipeline.rerank.edje import load_adapter

            adapter = load_adapter(self.rerank, "rerank")
        return TokenEncoder(self, encoder, preparer, adapter)


class TokenEncoder(LoadedStage):
    """A loaded `Encode`.

    Attributes:
        stage: What was loaded.
        nothing: The reason for which items without tokens are rejected.
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
        reason = encoder.empty_reason if "content" in stage.aspects else "no caption"
        self.nothing = f"{NOTHING}: {reason}"

    def prepare(self, items: pa.Table) -> tuple[pa.Table, dict[str, float]]:
        """Returns the items with all that the encoder reads, and the time if it took any."""
        start = time.perf_counter()
        if self._prepare is not None:
            items = self._prepare(items)
        seconds = time.perf_counter() - start
        return items, {"prepare": seconds} if seconds > 1e-3 else {}

    def batches(self, items: pa.Table) -> Iterator[EncodedRows]:
        """Yields the tokens of prepared items, and the problems of those without usable ones."""
        taps = [self.stage.taps] if self.stage.taps else []
        for aspect in self.stage.aspects:
            rows, texts = _items_of(items, aspect)
            if not len(rows):
                continue
            for batch_rows, batch in self._encoder.encode(texts, *taps):
                usable, problems = usable_rows(batch, self.nothing)
                item_rows = rows[batch_rows]
                bad = {int(item_rows[i]): problem for i, problem in problems.items()}
                chosen = usable.nonzero().squeeze(1)
                batch = batch.take(chosen) if bad else batch
                yield EncodedRows(aspect, item_rows[usable.numpy()], batch, bad)

    def rerank_tokens(self, batch: TokenBatch) -> pa.Array:
        """Returns the tokens that the adapter of the stage's EDJE makes of a batch."""
        if self._adapter is None:
            raise ValueError("this stage was made without `rerank`")
        return tokens_column(self._adapter, batch)

    def with_rerank_tokens(self, table: pa.Table, encoded: EncodedRows) -> pa.Table:
        """Returns the columns of a batch and, for content, the adapter's tokens if wanted."""
        if self.stage.rerank is None or encoded.aspect != "content":
            return table
        return table.append_column(RERANK_TOKENS, self.rerank_tokens(encoded.batch))

    def process(self, items: pa.Table) -> Processed:
        """Encodes items into token columns."""
        items, preparing = self.prepare(items)
        found = Found()
        start = time.perf_counter()
        for encoded in self.batches(items):
            aspect, rows, batch, problems = encoded
            columns = {"vectors": ragged_to_arrow(batch.vectors, batch.mask, pa.float32())}
            for kind, type in self.stage.encoder_info.for_field(aspect).position_types.items():
                columns[kind] = positions_column(batch, kind, type)
            if self.stage.encoder_info.pooled_dim:
                columns["pooled"] = fixed_lists(batch.pooled, pa.float32())
            for tap in self.stage.taps:
                columns[TAP + tap.name] = tap_values(batch, tap)
            named = {token_column(aspect, name): column for name, column in columns.items()}
            found.add(aspect, rows, self.with_rerank_tokens(pa.table(named), encoded), problems)
        seconds = {"encode": time.perf_counter() - start, **preparing}
        return Processed(
            *found.join(items.select(ITEM.names), self.stage.aspects, self.nothing), seconds
        )


@dataclass(frozen=True)
class Compress(Stage):
    """Compresses token vectors into the columns of every representation.

    Attributes:
        learned: Learned state of the representations that need it, by id.
        encoder_columns: The encoder's own columns that are stored.
    """

    encoder_info: EncoderInfo
    representations: Sequence[Representation]
    learned: Mapping[str, Learned]
    encoder_columns: Sequence[str]

    name: ClassVar[str] = "compress"

    @property
    def aspects(self) -> tuple[str, ...]:
        """Aspects of the items that the representations stand for."""
        return aspects_of(self.representations)

    @property
    def needs(self) -> tuple[str, ...]:
        """Columns that the items must have."""
        return tuple(token_column(aspect, "vectors") for aspect in self.aspects)

    @property
    def adds(self) -> tuple[str, ...]:
        """Columns that the stage adds."""
        return (
            *self.encoder_columns,
            *(r.id for r in self.representations),
            *(r.support_id for r in self.representations if has_support(r)),
        )

    def load(self) -> TokenCompressor:
        """Builds the compressors and codecs."""
        return TokenCompressor(self)


class Method(NamedTuple):
    """A compressor and the representations that store its result, each through its codec."""

    aspect: str
    compressor: Compressor
    outputs: list[tuple[Representation, Codec]]


class TokenCompressor(LoadedStage):
    """A loaded `Compress`; representations that differ only in their codec share a compression."""

    name = Compress.name

    def __init__(self, stage: Compress):
        self.stage = stage
        methods: dict[str, Method] = {}
        for r in stage.representations:
            learned = stage.learned.get(r.id, Learned())
            owner = [r.id] if learned.compressor is not None else []
            key = digest([r.of, dump(r.compressor), owner])
            if key not in methods:
                compressor = COMPRESSORS.build(r.compressor, learned.compressor)
                methods[key] = Method(r.of, compressor, [])
            methods[key].outputs.append((r, CODECS.build(r.codec, learned.codec)))
        self._methods = tuple(methods.values())

    def columns(self, batch: TokenBatch, aspect: str = "content") -> pa.Table:
        """Returns the stored columns of a batch of token vectors of an aspect of the items."""
        columns: dict[str, pa.Array] = {}
        encoder_info, stored = self.stage.encoder_info.for_field(aspect), self.stage.encoder_columns
        if (pooled := encoder_info.pooled_column) is not None and pooled in stored:
            columns[pooled] = fixed_lists(batch.pooled, pa.float16())
        for kind, type in encoder_info.position_types.items():
            if (name := encoder_info.position_column(kind)) in stored:
                columns[name] = positions_column(batch, kind, type)
        for name in batch.taps:
            if (column := encoder_info.tap_column(Tap.parse(name))) in stored:
                columns[column] = tap_values(batch, Tap.parse(name))
        for method in self._methods:
            if method.aspect != aspect:
                continue
            compressor = method.compressor
            result = compressor.compress(with_taps(batch, compressor.needs_taps, encoder_info))
            for representation, codec in method.outputs:
                columns[representation.id] = codec.encode(result)
                if has_support(representation):
                    columns[representation.support_id] = support_column(result, batch, compressor)
        return pa.table(columns)

    def process(self, items: pa.Table) -> Processed:
        """Compresses the token columns of items."""
        found = Found()
        for aspect in self.stage.aspects:
            for rows, batch in batches_of(items, self.stage.encoder_info, aspect):
                found.add(aspect, rows, self.columns(batch, aspect))
        others = items.drop_columns(list(token_columns(items)))
        return Processed(*found.join(others, self.stage.aspects))


@dataclass(frozen=True)
class Represent(Stage):
    """`Encode` and `Compress` in one actor: uncompressed token vectors never leave its device."""

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
        found = Found()
        compressing = 0.0
        started = time.perf_counter()
        for encoded in self._encoder.batches(items):
            start = time.perf_counter()
            table = self._compressor.columns(encoded.batch, encoded.aspect)
            table = self._encoder.with_rerank_tokens(table, encoded)
            found.add(encoded.aspect, encoded.rows, table, encoded.problems)
            compressing += time.perf_counter() - start
        encoding = time.perf_counter() - started - compressing
        seconds = {**preparing, "encode": encoding, "compress": compressing}
        aspects, nothing = self._encoder.stage.aspects, self._encoder.nothing
        return Processed(*found.join(items.select(ITEM.names), aspects, nothing), seconds)


def token_columns_of(encoder_info: EncoderInfo) -> tuple[str, ...]:
    """Returns the token columns that an encoder's batches fill."""
    return (
        "vectors",
        *encoder_info.position_types,
        *(["pooled"] if encoder_info.pooled_dim else []),
    )


def _items_of(items: pa.Table, aspect: str) -> tuple[np.ndarray, pa.Table]:
    """Returns the rows that have an aspect, and their items as an encoder of it reads them."""
    if aspect == "content":
        return np.arange(items.num_rows), items
    rows = np.flatnonzero(items[aspect].is_valid().to_numpy())
    texts = items.select(["item_id", aspect]).take(rows)
    return rows, texts.rename_columns(["item_id", "text"])


def usable_rows(batch: TokenBatch, nothing: str) -> tuple[torch.Tensor, Problems]:
    """Returns which items have tokens that can be indexed, (B,) bool, and the others' problems.

    An item must have at least one token, at most `MAX_TOKENS`, and finite vectors.
    """
    finite = (batch.vectors.isfinite().all(dim=2) | ~batch.mask).all(dim=1)
    if batch.pooled is not None:
        finite &= batch.pooled.isfinite().all(dim=1)
    lengths = batch.lengths
    usable = (finite & (lengths > 0) & (lengths <= MAX_TOKENS)).cpu()
    problems = {}
    for i in np.flatnonzero(~usable.numpy()).tolist():
        problems[i] = "non-finite vectors" if not finite[i] else nothing
        if lengths[i] > MAX_TOKENS:
            problems[i] = f"more than {MAX_TOKENS:,} tokens: have the source cut it into passages"
    return usable, problems


class Found:
    """Columns computed for the items of a unit, aspect by aspect, and the problems of some."""

    def __init__(self) -> None:
        self._rows: dict[str, list[np.ndarray]] = {}
        self._tables: dict[str, list[pa.Table]] = {}
        self._problems: Problems = {}

    def add(
        self, aspect: str, rows: np.ndarray, table: pa.Table, problems: Problems | None = None
    ) -> None:
        """Adds the columns of an aspect for some rows."""
        if len(rows):
            self._rows.setdefault(aspect, []).append(rows)
            self._tables.setdefault(aspect, []).append(table)
        self._problems.update(problems or {})

    def join(
        self, items: pa.Table, aspects: Sequence[str], nothing: str = ""
    ) -> tuple[pa.Table, list[Reject]]:
        """Returns the items with the columns of every aspect, null where an item lacks the aspect.

        An item without any aspect is rejected, and so is one with an unusable aspect.
        """
        has_any = np.zeros(items.num_rows, dtype=bool)
        order: dict[str, np.ndarray] = {}
        for aspect, rows in self._rows.items():
            present = np.concatenate(rows)
            order[aspect] = np.full(items.num_rows, -1)
            order[aspect][present] = np.arange(len(present))
            has_any[present] = True
        for row, problem in self._problems.items():
            has_any[row] &= problem == nothing
        chosen = np.flatnonzero(has_any)
        table = items.take(chosen)
        for aspect in aspects:
            if aspect not in order:
                continue
            place = order[aspect][chosen]
            added = pa.concat_tables(self._tables[aspect]).take(pa.array(place, mask=place < 0))
            for name in added.column_names:
                table = table.append_column(name, added[name])
        bad = np.flatnonzero(~has_any).tolist()
        return table, [_reject(items, row, self._problems.get(row, nothing)) for row in bad]


def _reject(items: pa.Table, row: int, problem: str) -> Reject:
    item_id, source, revision = (
        items[name][row].as_py() for name in ("item_id", "source", "revision")
    )
    detail = ""
    if problem.startswith(NOTHING) and items["caption"][row].is_valid:
        detail = "it has a caption, which a representation `of: caption` would hold"
    detail = detail_with_file(
        detail, metadata_file(*(items[n][row].as_py() for n in ("modality", "metadata")))
    )
    return Reject(item_id, source, "encode", problem, detail, revision)
