"""The stages of the index job: encode, compress into every representation, write fragments."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import torch
from lance.fragment import FragmentMetadata, write_fragments

from pipeline.codecs import Codec
from pipeline.compression import MAX_TOKENS, Compressor
from pipeline.config import Spec, digest, dump
from pipeline.index.columns import (
    ASPECTS,
    RERANK_TOKENS,
    TOKEN_COLUMNS,
    EncoderFacts,
    Representation,
    aspects_of,
    has_support,
    pooled_id,
    position_columns,
    tap_column,
    token_column,
)
from pipeline.index.fitting import Learned
from pipeline.index.positions import as_stored
from pipeline.index.reader import ITEMS, part
from pipeline.index.rerank_tokens import tokens_column
from pipeline.registry import CODECS, COMPRESSORS, ENCODERS
from pipeline.schema import ITEM, Reject, detail_in, file_in
from pipeline.stage import Stage, Unit, to_ipc
from pipeline.taps import Tap, average
from pipeline.tokens import TokenBatch, flat_from_arrow, pad, ragged_to_arrow

#: Padded numbers in one batch of a compressing actor: 256 MiB of float32.
COMPRESS_NUMBERS = 1 << 26

#: How a token column is called that holds a tap: so, and the tap's name.
TAP = "tap "

#: How the reason begins of an item that has nothing of what is encoded.
NOTHING = "nothing to index"
#: What is wrong with items, by their row.
Problems = dict[int, str]


class Prepare(Stage):
    """Gives items all that their encoder reads, in processes without its weights."""

    name = "prepare"

    def __init__(self, spec: Spec):
        self.spec = spec

    def setup(self) -> None:
        self._prepare = ENCODERS.load(self.spec.name).preparer(self.spec)

    def process(self, items: pa.Table) -> tuple[pa.Table, list[Reject]]:
        return self._prepare(items), []


class Encode(Stage):
    """Turns items into token vectors, as columns of Arrow lists, for each wanted aspect of them."""

    name = "encode"

    def __init__(
        self,
        spec: Spec,
        facts: EncoderFacts,
        aspects: Sequence[str] = ("content",),
        taps: Sequence[Tap] = (),
        rerank: str | None = None,
    ):
        self.spec, self.facts, self.aspects = spec, facts, aspects
        self.taps = taps  # of one layer each
        self.rerank = rerank  # the folder of an EDJE, whose adapter's tokens are added
        # Unless a stage before this one does.
        self.prepares = "content" in aspects and ENCODERS.load(spec.name).prepares
        self.placement: dict[str, Any] = {}  # on which devices; said by the resources profile
        needs = ENCODERS.load(spec.name).needs_of(spec)
        self.needs = needs if "content" in aspects else ("caption",)
        self.adds = tuple(
            token_column(aspect, name)
            for aspect in aspects
            for name in (*token_columns_of(facts.about(aspect)), *(TAP + tap.name for tap in taps))
        )
        self.cached = (RERANK_TOKENS,) if rerank else ()
        self.adds += self.cached

    def setup(self) -> None:
        self._encoder = ENCODERS.build(self.spec, **self.placement)
        self._prepare = self._encoder.preparer(self.spec) if self.prepares else None
        why = self._encoder.nothing if "content" in self.aspects else "no caption"
        self.nothing = f"{NOTHING}: {why}"
        if self.rerank is not None:
            from pipeline.rerank.edje import load_adapter

            self.adapter = load_adapter(self.rerank, "rerank")

    def prepare(self, items: pa.Table) -> pa.Table:
        """The items with all that the encoder reads."""
        start = time.perf_counter()
        if self._prepare is not None:
            items = self._prepare(items)
        self.preparing = time.perf_counter() - start
        return items

    def batches(self, items: pa.Table) -> Iterator[tuple[str, np.ndarray, TokenBatch, Problems]]:
        """(aspect, rows, tokens) of what can be indexed, and why other rows cannot."""
        for aspect in self.aspects:
            rows, own = _items_of(items, aspect)
            if not len(rows):
                continue
            for batch_rows, batch in self._encoder.encode(own, *([self.taps] if self.taps else [])):
                usable, problems = usable_rows(batch, self.nothing)
                of_items = rows[batch_rows]
                bad = {int(of_items[i]): problem for i, problem in problems.items()}
                kept = usable.nonzero().squeeze(1)
                yield aspect, of_items[usable.numpy()], batch.take(kept) if bad else batch, bad

    def with_cached(self, table: pa.Table, batch: TokenBatch, aspect: str) -> pa.Table:
        """The columns of a batch and, of the content, the adapter's tokens if they are wanted."""
        if self.rerank is None or aspect != "content":
            return table
        return table.append_column(RERANK_TOKENS, tokens_column(self.adapter, batch))

    def process(self, items: pa.Table) -> tuple[pa.Table, list[Reject]]:
        items = self.prepare(items)
        found = Found()
        start = time.perf_counter()
        for aspect, rows, batch, problems in self.batches(items):
            columns = {"vectors": ragged_to_arrow(batch.vectors, batch.mask, pa.float32())}
            for kind, type in position_columns(self.facts.about(aspect)).items():
                columns[kind] = positions_column(batch, kind, type)
            if self.facts.pooled_dim:
                columns["pooled"] = fixed_lists(batch.pooled, pa.float32())
            for tap in self.taps:
                columns[TAP + tap.name] = tap_values(batch, tap)
            named = {token_column(aspect, name): column for name, column in columns.items()}
            found.add(aspect, rows, self.with_cached(pa.table(named), batch, aspect), problems)
        self._seconds = {"encode": time.perf_counter() - start, **preparing(self)}
        return found.join(items.select(ITEM.names), self.aspects, self.nothing)

    def seconds(self, elapsed: float) -> dict[str, float]:
        """Preparing and encoding apart, for the progress line."""
        return self._seconds


class Compress(Stage):
    """Turns token vectors into the columns of every representation.

    Args:
        learned: what representations learned, by their id, of those that need it.
        encoder_columns: the encoder's own columns that are stored.
    """

    name = "compress"

    def __init__(
        self,
        facts: EncoderFacts,
        representations: Sequence[Representation],
        learned: Mapping[str, Learned],
        encoder_columns: Sequence[str],
    ):
        self.facts, self.representations = facts, representations
        self.learned = {r.id: learned.get(r.id, Learned()) for r in representations}
        self.encoder_columns = encoder_columns
        self.aspects = aspects_of(representations)
        self.needs = tuple(token_column(aspect, "vectors") for aspect in self.aspects)
        self.adds = (
            *encoder_columns,
            *(r.id for r in representations),
            *(r.support_id for r in representations if has_support(r)),
        )

    def setup(self) -> None:
        # What differs in its codec alone is compressed once.
        self._compressors: dict[str, tuple[Compressor, list[tuple[Representation, Codec]]]] = {}
        for r in self.representations:
            learned = self.learned[r.id]
            own = [r.id] if learned.compressor is not None else []
            key = digest([r.of, dump(r.compressor), own])
            if key not in self._compressors:
                compressor = COMPRESSORS.build(r.compressor, learned.compressor)
                self._compressors[key] = compressor, []
            self._compressors[key][1].append((r, CODECS.build(r.codec, learned.codec)))

    def columns(self, batch: TokenBatch, aspect: str = "content") -> pa.Table:
        """The stored columns of a batch of token vectors of an aspect of the items."""
        columns: dict[str, pa.Array] = {}
        facts = self.facts.about(aspect)
        if pooled_id(facts) in self.encoder_columns:
            columns[pooled_id(facts)] = fixed_lists(batch.pooled, pa.float16())
        for kind, type in position_columns(facts).items():
            if (name := f"{facts.prefix}_{kind}") in self.encoder_columns:
                columns[name] = positions_column(batch, kind, type)
        for name in batch.taps:
            if (column := tap_column(facts, Tap.parse(name))) in self.encoder_columns:
                columns[column] = tap_values(batch, Tap.parse(name))
        for compressor, representations in self._compressors.values():
            if representations[0][0].of != aspect:
                continue
            result = compressor.compress(with_taps(batch, compressor.needs_taps, facts))
            for representation, codec in representations:
                columns[representation.id] = codec.encode(result)
                if has_support(representation):
                    columns[representation.support_id] = support_column(result, batch, compressor)
        return pa.table(columns)

    def process(self, items: pa.Table) -> tuple[pa.Table, list[Reject]]:
        found = Found()
        for aspect in self.aspects:
            for rows, batch in batches_of(items, self.facts, aspect):
                found.add(aspect, rows, self.columns(batch, aspect))
        return found.join(items.drop_columns(list(token_columns(items))), self.aspects)


class Represent(Stage):
    """`Encode` and `Compress` in one actor: the full token vectors never leave its device."""

    name = "represent"

    def __init__(self, encode: Encode, compress: Compress):
        self.encode, self.compress = encode, compress
        self.needs, self.adds = encode.needs, (*compress.adds, *encode.cached)
        self.num_tokens = 0  # of the last `process`

    def setup(self) -> None:
        self.encode.setup()
        self.compress.setup()

    def process(self, items: pa.Table) -> tuple[pa.Table, list[Reject]]:
        items = self.encode.prepare(items)
        found = Found()
        compressing, self.num_tokens = 0.0, 0
        started = time.perf_counter()
        for aspect, rows, batch, problems in self.encode.batches(items):
            start = time.perf_counter()
            table = self.compress.columns(batch, aspect)
            found.add(aspect, rows, self.encode.with_cached(table, batch, aspect), problems)
            self.num_tokens += int(batch.mask.sum())
            compressing += time.perf_counter() - start
        encoding = time.perf_counter() - started - compressing
        self._seconds = {**preparing(self.encode), "encode": encoding, "compress": compressing}
        return found.join(items.select(ITEM.names), self.encode.aspects, self.encode.nothing)

    def seconds(self, elapsed: float) -> dict[str, float]:
        """Preparing, encoding and compressing apart, for the progress line."""
        return self._seconds


def preparing(encode: Encode) -> dict[str, float]:
    """The time of the last `prepare` by name, if it took any."""
    return {"prepare": encode.preparing} if encode.preparing > 1e-3 else {}


def token_columns_of(facts: EncoderFacts) -> tuple[str, ...]:
    """The token columns that an encoder's batches fill."""
    return ("vectors", *position_columns(facts), *(["pooled"] if facts.pooled_dim else []))


def _items_of(items: pa.Table, aspect: str) -> tuple[np.ndarray, pa.Table]:
    """The rows that have an aspect, and the items as an encoder of that aspect reads them."""
    if aspect == "content":
        return np.arange(items.num_rows), items
    rows = np.flatnonzero(items[aspect].is_valid().to_numpy())
    own = items.select(["item_id", aspect]).take(rows)
    return rows, own.rename_columns(["item_id", "text"])


def usable_rows(batch: TokenBatch, nothing: str) -> tuple[torch.Tensor, Problems]:
    """Which items have tokens that can be indexed, (B,) bool, and what is wrong with the others.

    An item must have a token, not too many, and vectors that are finite.
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
    """What was computed of the items of a unit, aspect by aspect, and what is wrong with some."""

    def __init__(self):
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
        """The items with the columns of every aspect, null where one has none of an aspect.

        An item that has no aspect at all is a reject, and so is one with an aspect that is spoilt.
        """
        has_any = np.zeros(items.num_rows, dtype=bool)
        order: dict[str, np.ndarray] = {}
        for aspect, rows in self._rows.items():
            every = np.concatenate(rows)
            order[aspect] = np.full(items.num_rows, -1)
            order[aspect][every] = np.arange(len(every))
            has_any[every] = True
        for row, problem in self._problems.items():
            has_any[row] &= problem == nothing
        kept = np.flatnonzero(has_any)
        table = items.take(kept)
        for aspect in aspects:
            if aspect not in order:
                continue
            place = order[aspect][kept]
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
    detail = detail_in(detail, file_in(*(items[n][row].as_py() for n in ("modality", "metadata"))))
    return Reject(item_id, source, "encode", problem, detail, revision)


def with_taps(batch: TokenBatch, taps: Sequence[Tap], facts: EncoderFacts) -> TokenBatch:
    """A batch with taps of one layer each -> with the taps that a compressor needs."""
    if not taps:
        return batch
    return replace(batch, taps={t.name: average(t, batch.taps, facts.num_layers) for t in taps})


def tap_values(batch: TokenBatch, tap: Tap) -> pa.Array:
    """The values of a tap as `list<float32>`."""
    return ragged_to_arrow(batch.taps[tap.name], batch.mask, pa.float32())


def positions_column(batch: TokenBatch, kind: str, type: pa.ListType) -> pa.Array:
    """The `spans`, `extents` or `confidence` of the tokens, null where the items give none."""
    positions = getattr(batch, kind)
    if positions is None:
        return pa.nulls(len(batch), type)
    is_nested = pa.types.is_fixed_size_list(type.value_type)
    value_type = type.value_type.value_type if is_nested else type.value_type
    return ragged_to_arrow(positions, batch.mask, value_type)


def support_column(result: TokenBatch, batch: TokenBatch, compressor: Compressor) -> pa.Array:
    """The support as `list<uint16>`, in the compressor's form; 65535 stands for no output.

    "assignment": for each input token the output that stands for it. "indices": for each output the
    input token it is.
    """
    if compressor.support_form == "assignment":
        support = result.support.masked_fill(result.support < 0, MAX_TOKENS + 1)
        return ragged_to_arrow(support, batch.mask, pa.uint16())
    # Positions are counted over real tokens: padding is not stored.
    ordinal = batch.mask.cumsum(dim=1) - 1
    num_outputs = result.mask.shape[1]
    indices = result.support.new_zeros((len(batch), num_outputs + 1))
    slot = result.support.masked_fill(result.support < 0, num_outputs)
    indices.scatter_(1, slot, ordinal)
    return ragged_to_arrow(indices[:, :num_outputs], result.mask, pa.uint16())


def fixed_lists(vectors: torch.Tensor, type: pa.DataType) -> pa.FixedSizeListArray:
    """A (B, P) tensor as a column of lists of P numbers."""
    values = vectors.detach().float().cpu().numpy().astype(type.to_pandas_dtype())
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1), type), vectors.shape[1])


def token_columns(items: pa.Table, aspects: Sequence[str] = ASPECTS) -> dict[str, str]:
    """Which columns of a table `Encode` put there, and what they are of an item's tokens."""
    there = {}
    for aspect in aspects:
        prefix = token_column(aspect, "")
        for column in items.column_names:
            name = column.removeprefix(prefix)
            is_own = column == prefix + name
            if is_own and (name in TOKEN_COLUMNS or name.startswith(TAP)):
                there[column] = name
    return there


def batches_of(
    items: pa.Table, facts: EncoderFacts, aspect: str = "content"
) -> Iterator[tuple[np.ndarray, TokenBatch]]:
    """Padded batches from the token columns of `Encode`, items of like length together.

    Yields:
        (rows, batch): rows of `items` that have tokens, and these.
    """
    if (vectors := token_column(aspect, "vectors")) not in items.column_names:
        return
    names = token_columns(items, [aspect])
    own = items.select(list(names)).rename_columns(list(names.values()))
    lengths = flat_lengths(items[vectors])
    by_length = np.argsort(lengths, kind="stable")
    start = int((lengths == 0).sum())
    while start < len(by_length):
        stop = start + 1
        while stop < len(by_length) and (
            (stop + 1 - start) * lengths[by_length[stop]] * facts.dim <= COMPRESS_NUMBERS
        ):
            stop += 1
        rows = by_length[start:stop]
        yield rows, batch_from(own.take(rows), facts)
        start = stop


def batch_from(items: pa.Table, facts: EncoderFacts) -> TokenBatch:
    """The token columns of a table as one padded batch."""
    vectors, mask = pad(*flat_from_arrow(items["vectors"]))
    others = {
        name: padded_positions(items[name], mask, fill)
        for name, fill in (("spans", -1), ("extents", float("nan")), ("confidence", float("nan")))
        if name in items.column_names
    }
    pooled = None
    if "pooled" in items.column_names:
        column = items["pooled"].combine_chunks()
        pooled = torch.from_numpy(column.flatten().to_numpy().reshape(len(column), -1))
    taps = {
        name.removeprefix(TAP): pad(*flat_from_arrow(items[name]))[0]
        for name in items.column_names
        if name.startswith(TAP)
    }
    return TokenBatch(vectors.float(), mask, facts.normalised, pooled=pooled, taps=taps, **others)


def padded_positions(
    column: pa.ChunkedArray, mask: torch.Tensor, fill: float
) -> torch.Tensor | None:
    """A column of positions under the mask of its tokens; `fill` in null rows; None if all are."""
    if column.null_count == len(column):
        return None
    flat, lengths = flat_from_arrow(column)
    there = mask & torch.from_numpy(lengths > 0).unsqueeze(1)
    padded = torch.full(
        (*mask.shape, *flat.shape[1:]), fill, dtype=torch.from_numpy(flat[:0]).dtype
    )
    padded[there] = torch.from_numpy(flat.copy())
    return padded


def flat_lengths(column: pa.ChunkedArray) -> np.ndarray:
    """(B,) int64: the lengths of a list column; 0 for null."""
    return flat_from_arrow(column)[1]


#: What a write comes back with: nothing of the data, all the driver needs to commit it.
WRITTEN = pa.schema(
    [
        pa.field("fragments", pa.string()),  # JSON, empty list if the units held rejects only
        pa.field("about", pa.string()),  # JSON: units, item ids, replaced rows, seconds, bytes
        pa.field("rejects", pa.large_binary()),
    ]
)


class WriteFragments:
    """Writes units as one Lance fragment: files that nobody sees before the driver's commit."""

    def __init__(self, index: str):
        self.uri = part(index, ITEMS)

    def __call__(self, block: pa.Table) -> pa.Table:
        start = time.perf_counter()
        units = [Unit.unpack(block, i) for i in range(block.num_rows)]
        tables = [unit.items for unit in units if unit.items.num_rows]
        fragments, item_ids, num_bytes = [], [], 0
        if tables:
            # An aspect that no item of a unit has is no column there.
            table = pa.concat_tables(tables, promote_options="default")
            item_ids = table["item_id"].to_pylist()
            num_bytes = table.nbytes
            fragments = write_table(table, self.uri)
        replaces: dict[str, list[str]] = {}
        kept = set(item_ids)  # an item whose new revision was rejected keeps its old row
        for unit in units:
            for fragment, ids in unit.extra["replaces"].items():
                replaces.setdefault(fragment, []).extend(i for i in ids if i in kept)
        seconds: dict[str, float] = {}
        for unit in units:
            for stage, spent in unit.seconds.items():
                seconds[stage] = seconds.get(stage, 0.0) + spent
        seconds["write"] = time.perf_counter() - start
        about = {
            "units": [unit.name for unit in units],
            "item_ids": item_ids,
            "replaces": {fragment: ids for fragment, ids in replaces.items() if ids},
            "gone": sum(unit.extra["gone"] for unit in units),
            "seconds": seconds,
            "bytes": num_bytes,
        }
        row = {
            "fragments": json.dumps([fragment.to_json() for fragment in fragments]),
            "about": json.dumps(about),
            "rejects": to_ipc(pa.concat_tables([unit.rejects for unit in units])).to_pybytes(),
        }
        return pa.Table.from_pylist([row], schema=WRITTEN)


def write_table(table: pa.Table, uri: str) -> list[FragmentMetadata]:
    """Writes rows as one fragment of the dataset at `uri`; columns it lacks are null."""
    schema = lance.dataset(uri).schema
    schema = pa.schema([column for column in schema if column.name in table.column_names])
    table = as_stored(table.select(schema.names), schema)
    return write_fragments(table, uri, schema=schema, max_rows_per_file=max(1, table.num_rows))
