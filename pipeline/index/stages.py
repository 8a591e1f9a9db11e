"""The stages of the index job: encode, compress into every representation, write fragments."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence

import lance
import numpy as np
import pyarrow as pa
import torch
from lance.fragment import FragmentMetadata, write_fragments

from pipeline.compression import MAX_TOKENS, Compressor
from pipeline.config import Spec
from pipeline.index.codecs import Float16
from pipeline.index.columns import (
    TOKEN_COLUMNS,
    EncoderFacts,
    Representation,
    has_support,
    pooled_id,
    position_columns,
)
from pipeline.index.reader import ITEMS, part
from pipeline.registry import CODECS, COMPRESSORS, ENCODERS
from pipeline.schema import ITEM, Reject
from pipeline.stage import Stage, Unit, to_ipc
from pipeline.tokens import TokenBatch, flat_from_arrow, pad, ragged_to_arrow

#: Padded numbers in one batch of a compressing actor: 256 MiB of float32.
COMPRESS_NUMBERS = 1 << 26


class Encode(Stage):
    """Turns items into token vectors, as columns of Arrow lists."""

    name = "encode"

    def __init__(self, spec: Spec, facts: EncoderFacts):
        self.spec, self.facts = spec, facts
        self.needs = ENCODERS.load(spec.name).needs
        self.adds = ("vectors", *position_columns(facts), *(["pooled"] if facts.pooled_dim else []))

    def setup(self) -> None:
        self._encoder = ENCODERS.build(self.spec)

    def batches(self, items: pa.Table) -> Iterator[tuple[np.ndarray, TokenBatch, list[Reject]]]:
        """The encoder's batches without the items that cannot be indexed, and why not."""
        for rows, batch in self._encoder.encode(items):
            yield drop_unusable(items, rows, batch)

    def process(self, items: pa.Table) -> tuple[pa.Table, list[Reject]]:
        parts, rows, rejects = [], [], []
        for batch_rows, batch, bad in self.batches(items):
            columns = {"vectors": ragged_to_arrow(batch.vectors, batch.mask, pa.float32())}
            for kind, type in position_columns(self.facts).items():
                columns[kind] = positions_column(batch, kind, type)
            if self.facts.pooled_dim:
                columns["pooled"] = fixed_lists(batch.pooled, pa.float32())
            parts.append(pa.table(columns))
            rows.append(batch_rows)
            rejects += bad
        return with_columns(items.select(ITEM.names), rows, parts), rejects


class Compress(Stage):
    """Turns token vectors into the columns of every representation."""

    name = "compress"

    def __init__(
        self,
        facts: EncoderFacts,
        representations: Sequence[Representation],
        artefacts: dict[str, dict[str, np.ndarray]],
        encoder_columns: Sequence[str],
    ):
        self.facts, self.representations, self.artefacts = facts, representations, artefacts
        self.encoder_columns = encoder_columns  # those of the encoder that are stored
        self.needs = ("vectors",)
        self.adds = (
            *encoder_columns,
            *(r.id for r in representations),
            *(r.support_id for r in representations if has_support(r)),
        )

    def setup(self) -> None:
        self._compressors: list[tuple[Representation, Compressor, Float16]] = [
            (
                r,
                COMPRESSORS.build(r.compressor, self.artefacts.get(r.id)),
                CODECS.build(r.codec),
            )
            for r in self.representations
        ]

    def columns(self, batch: TokenBatch) -> pa.Table:
        """The stored columns of a batch of token vectors."""
        columns: dict[str, pa.Array] = {}
        if pooled_id(self.facts) in self.encoder_columns:
            columns[pooled_id(self.facts)] = fixed_lists(batch.pooled, pa.float16())
        for kind, type in position_columns(self.facts).items():
            if (name := f"{self.facts.prefix}_{kind}") in self.encoder_columns:
                columns[name] = positions_column(batch, kind, type)
        for representation, compressor, codec in self._compressors:
            result = compressor.compress(batch)
            columns[representation.id] = codec.encode(result)
            if has_support(representation):
                columns[representation.support_id] = support_column(result, batch, compressor)
        return pa.table(columns)

    def process(self, items: pa.Table) -> tuple[pa.Table, list[Reject]]:
        rows, parts = [], []
        for batch_rows, batch in batches_of(items, self.facts):
            rows.append(batch_rows)
            parts.append(self.columns(batch))
        return with_columns(items.drop_columns(token_columns(items)), rows, parts), []


class Represent(Stage):
    """`Encode` and `Compress` in one actor: the full token vectors never leave its device."""

    name = "represent"

    def __init__(self, encode: Encode, compress: Compress):
        self.encode, self.compress = encode, compress
        self.needs, self.adds = encode.needs, compress.adds

    def setup(self) -> None:
        self.encode.setup()
        self.compress.setup()

    def process(self, items: pa.Table) -> tuple[pa.Table, list[Reject]]:
        rows, parts, rejects = [], [], []
        compressing = 0.0
        started = time.perf_counter()
        for batch_rows, batch, bad in self.encode.batches(items):
            start = time.perf_counter()
            rows.append(batch_rows)
            parts.append(self.compress.columns(batch))
            rejects += bad
            compressing += time.perf_counter() - start
        encoding = time.perf_counter() - started - compressing
        self._seconds = {"encode": encoding, "compress": compressing}
        return with_columns(items.select(ITEM.names), rows, parts), rejects

    def seconds(self, elapsed: float) -> dict[str, float]:
        """Encoding and compression apart, for the progress line."""
        return self._seconds


def drop_unusable(
    items: pa.Table, rows: np.ndarray, batch: TokenBatch
) -> tuple[np.ndarray, TokenBatch, list[Reject]]:
    """Leaves out items with no token, too many, or vectors that are not finite, and says so."""
    finite = (batch.vectors.isfinite().all(dim=2) | ~batch.mask).all(dim=1)
    if batch.pooled is not None:
        finite &= batch.pooled.isfinite().all(dim=1)
    fits = (batch.lengths > 0) & (batch.lengths <= MAX_TOKENS)
    usable = (finite & fits).cpu()
    if bool(usable.all()):
        return rows, batch, []
    rejects = []
    for i in np.flatnonzero(~usable.numpy()):
        reason = "non-finite vectors" if not finite[i] else "nothing to index: no tokens"
        if batch.lengths[i] > MAX_TOKENS:
            reason = f"more than {MAX_TOKENS:,} tokens: have the source cut it into passages"
        item_id, source, revision = (
            items[name][int(rows[i])].as_py() for name in ("item_id", "source", "revision")
        )
        rejects.append(Reject(item_id, source, "encode", reason, revision=revision))
    return rows[usable.numpy()], batch.take(usable.nonzero().squeeze(1)), rejects


def positions_column(batch: TokenBatch, kind: str, type: pa.ListType) -> pa.Array:
    """The `spans` or `extents` of the tokens, null where the items give their tokens none."""
    positions = getattr(batch, kind)
    if positions is None:
        return pa.nulls(len(batch), type)
    return ragged_to_arrow(positions, batch.mask, type.value_type.value_type)


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


def with_columns(items: pa.Table, rows: list[np.ndarray], parts: list[pa.Table]) -> pa.Table:
    """The items that were processed, in their old order, with the new columns.

    `rows[j]` are the rows of `items` that the table `parts[j]` is about.
    """
    if not parts:
        return items.slice(0, 0)
    every = np.concatenate(rows)
    order = np.argsort(every, kind="stable")
    added = pa.concat_tables(parts).take(order)
    kept = items.take(every[order])
    for name in added.column_names:
        kept = kept.append_column(name, added[name])
    return kept


def token_columns(items: pa.Table) -> list[str]:
    """Which columns of a table `Encode` put there."""
    return [name for name in TOKEN_COLUMNS if name in items.column_names]


def batches_of(items: pa.Table, facts: EncoderFacts) -> Iterator[tuple[np.ndarray, TokenBatch]]:
    """Padded batches from the token columns of `Encode`, items of like length together."""
    lengths = flat_lengths(items["vectors"])
    by_length = np.argsort(lengths, kind="stable")
    start = 0
    while start < len(by_length):
        stop = start + 1
        while stop < len(by_length) and (
            (stop + 1 - start) * lengths[by_length[stop]] * facts.dim <= COMPRESS_NUMBERS
        ):
            stop += 1
        rows = by_length[start:stop]
        yield rows, batch_from(items.take(rows), facts)
        start = stop


def batch_from(items: pa.Table, facts: EncoderFacts) -> TokenBatch:
    """The token columns of a table as one padded batch."""
    vectors, mask = pad(*flat_from_arrow(items["vectors"]))
    others = {
        name: padded_positions(items[name], mask, fill)
        for name, fill in (("spans", -1), ("extents", float("nan")))
        if name in items.column_names
    }
    pooled = None
    if "pooled" in items.column_names:
        column = items["pooled"].combine_chunks()
        pooled = torch.from_numpy(column.flatten().to_numpy().reshape(len(column), -1))
    return TokenBatch(vectors.float(), mask, facts.normalised, pooled=pooled, **others)


def padded_positions(
    column: pa.ChunkedArray, mask: torch.Tensor, fill: float
) -> torch.Tensor | None:
    """A column of positions under the mask of its tokens; `fill` in null rows; None if all are."""
    if column.null_count == len(column):
        return None
    flat, lengths = flat_from_arrow(column)
    there = mask & torch.from_numpy(lengths > 0).unsqueeze(1)
    padded = torch.full((*mask.shape, flat.shape[1]), fill, dtype=torch.from_numpy(flat[:0]).dtype)
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
            table = pa.concat_tables(tables)
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
            "rejects": to_ipc(pa.concat_tables([unit.rejects for unit in units])),
        }
        return pa.Table.from_pylist([row], schema=WRITTEN)


def write_table(table: pa.Table, uri: str) -> list[FragmentMetadata]:
    """Writes rows as one fragment of the dataset at `uri`; columns it lacks are null."""
    schema = lance.dataset(uri).schema
    schema = pa.schema([column for column in schema if column.name in table.column_names])
    table = table.select(schema.names).cast(schema)
    return write_fragments(table, uri, schema=schema, max_rows_per_file=max(1, table.num_rows))
