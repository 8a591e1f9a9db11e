"""New representations from a stored full-token column: by fragment, resumable, without the encoder.

A column is added empty (metadata only), then filled fragment by fragment; a fragment is done when
one of its data files holds the column. The result equals that of the index job up to the rounding
of the stored vectors, which are float16 or what the codec of their column makes of them.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

import lance
import numpy as np
import pyarrow as pa
import ray
from pydantic import Field, PositiveInt

from pipeline.codecs import Codec
from pipeline.config import Spec, SpecError, Uri
from pipeline.index.artefacts import Sample
from pipeline.index.columns import (
    Representation,
    Sweep,
    compressor_remarks,
    every_representation,
    needed_taps,
    refuse_other_settings,
    taps_of,
)
from pipeline.index.fill import Filled, Progress, commit_filled, fill_fragments
from pipeline.index.filters import matching_ids
from pipeline.index.fitting import Learned, fit, fitted_fields, needs_fit, stored_learned
from pipeline.index.info import EncoderInfo, RepresentationInfo, tap_names
from pipeline.index.listing import CONTENT, content_hashes
from pipeline.index.positions import as_used
from pipeline.index.reader import Index, get_fragment, part
from pipeline.index.session import Session
from pipeline.index.stages import Compress, Found
from pipeline.index.token_columns import TAP, batches_of, with_taps
from pipeline.registry import COMPRESSORS
from pipeline.stage import Resources
from pipeline.taps import Tap
from pipeline.tokens import TokenBatch, lists_of

log = logging.getLogger("maxray.recompress")


class RecompressSpec(Spec):
    """Spec of `jobs.recompress`."""

    renamed: ClassVar[Mapping[str, str]] = {"fit_where": "fit_filter"}

    index: Uri
    """Path or URI of the index."""
    source: str = "full"
    """Representation that is compressed; it must hold all token vectors."""
    representations: list[Representation] = Field(default_factory=list)
    """Columns of token vectors to add."""
    sweep: Sweep = Field(default_factory=dict)
    """Further representations: values by field, of which the product is taken."""
    commit_fragments: PositiveInt = 8
    """Number of fragments after which the driver commits."""
    fit_items: PositiveInt = 256
    """Number of items on which compressors and codecs that need it are fitted."""
    fit_seed: int = Field(0, ge=0, lt=2**32)
    """Seed of the sample."""
    fit_index: Uri | None = None
    """Index with a separate calibration sample; by default this one."""
    fit_filter: str | None = None
    """SQL condition on the items from which the sample is drawn."""


class RecompressResources(Spec):
    """How much hardware the job takes: a resources profile."""

    compress: Resources = Resources(num_cpus=1.0, num_threads=2)
    """Actors that read, compress and write."""


def run(
    spec: RecompressSpec,
    resources: RecompressResources,
    *,
    job: str,
    report: Callable[[str], None] = log.info,
    lease_seconds: float = 60.0,
) -> Progress:
    """Runs the job to its end in a Ray cluster that is connected already.

    Raises:
        SpecError: the index, its source column or a representation is invalid.
        LeaseHeld: another job writes to the index.
        Stopped: SIGTERM came; what was finished is committed and the lease is free.
    """
    wanted = every_representation(spec)
    index = Index(spec.index)
    encoder_info, aspect = stored_encoder(index, spec.source)
    for r in wanted:
        if r.of != aspect:
            rule = f"{aspect}, as in {spec.source}"
            raise SpecError(f"representations.{r.id}.of", r.of, rule)
    check_taps(index, encoder_info.for_field(aspect), wanted)
    learning = [r for r in wanted if needs_fit(r)]
    if learning:
        check_sample(spec, encoder_info, aspect, learning)
    progress = Progress()
    with Session(spec.index, spec, "recompress", job, progress.summary, lease_seconds) as session:
        learned = _prepare_columns(session, spec, encoder_info, wanted)
        dataset = session.writer.dataset
        left = columns_left(dataset, [r.id for r in wanted])
        progress.fragments = len(dataset.get_fragments())
        progress.done_before = progress.fragments - sum(map(len, left.values()))
        report(
            f"{progress.fragments - progress.done_before} of {progress.fragments} fragments to do,"
            f" {len(wanted)} representations"
        )
        for names, fragments in left.items():
            missing = [r for r in wanted if r.id in names]
            given = {
                "index": part(spec.index),
                "version": session.writer.dataset.version,
                "source": spec.source,
                "stage": Compress(encoder_info, missing, learned, encoder_columns=()),
                "num_threads": resources.compress.num_threads,
            }
            rows = [{"fragment": fragment} for fragment in fragments]
            filled = fill_fragments(FillFragment, given, rows, resources.compress)
            commit_filled(session, filled, spec.commit_fragments, progress, report)
        for sentence in compressor_remarks(dataset, wanted):
            report(sentence)
    return progress


def stored_encoder(index: Index, source: str) -> tuple[EncoderInfo, str]:
    """Returns the encoder of a representation with all tokens, and its field of the items.

    Raises:
        SpecError: `source` is no representation with all tokens.
    """
    there = index.representations()
    if source not in there:
        raise SpecError.unknown_name("source", source, there, "is not in the index")
    info = there[source]
    if not info.is_uncompressed:
        raise SpecError(
            "source", source, "a representation of the compressor none", "is compressed"
        )
    return info.encoder, info.field


def check_taps(index: Index, encoder_info: EncoderInfo, wanted: Sequence[Representation]) -> None:
    """Raises `SpecError` if a representation needs attention that the index does not keep."""
    schema = index.dataset.schema
    for name, taps in needed_taps(wanted).items():
        for tap in taps:
            ones = tap.split_layers(encoder_info.num_layers) if encoder_info.num_layers else ()
            if not ones or any(encoder_info.tap_column(one) not in schema.names for one in ones):
                there = ", ".join(tap_names(schema)) or "none"
                rule = f"attention that the index stores ({there})"
                note = f"; index with `keep_taps: [{tap.statistic}/{tap.heads}/all]` to store it"
                raise SpecError(f"representations.{name}", tap.name, rule, note=note)


def check_sample(
    spec: RecompressSpec, encoder_info: EncoderInfo, aspect: str, wanted: Sequence[Representation]
) -> None:
    """Raises `SpecError` if representations cannot be fitted on the sample that the spec names."""
    index = Index(spec.index)
    if spec.fit_index is not None:
        with _naming("fit_index", spec.fit_index):
            index = Index(spec.fit_index)
            others, other = stored_encoder(index, spec.source)
            if (others.fingerprint, other) != (encoder_info.fingerprint, aspect):
                rule = f"an index whose {spec.source} has the same encoder and `of: {aspect}`"
                raise SpecError("fit_index", spec.fit_index, rule, "has another")
            check_taps(index, others.for_field(aspect), wanted)
    if spec.fit_filter is not None:
        with _naming("fit_filter", spec.fit_filter):
            there = matching_ids(index, spec.fit_filter)
        if not len(there):
            rule = "a filter that matches items"
            raise SpecError("fit_filter", spec.fit_filter, rule, "matches none")


@contextlib.contextmanager
def _naming(field: str, value: str) -> Iterator[None]:
    """Makes errors inside speak of a field of the spec."""
    try:
        yield
    except SpecError as error:
        raise SpecError(field, value, error.rule, error.problem, error.note) from None


def columns_left(
    dataset: lance.LanceDataset, columns: Sequence[str]
) -> dict[tuple[str, ...], list[int]]:
    """The columns that have no data yet, and the fragments in which it is these that have none."""
    ids = {
        f.name(): {c.id() for c in f.children()} | {f.id()} for f in dataset.lance_schema.fields()
    }
    left: dict[tuple[str, ...], list[int]] = {}
    for fragment in dataset.get_fragments():
        there = {field for file in fragment.data_files() for field in file.fields}
        if missing := tuple(name for name in columns if not ids[name] & there):
            left.setdefault(missing, []).append(fragment.fragment_id)
    return left


def _prepare_columns(
    session: Session,
    spec: RecompressSpec,
    encoder_info: EncoderInfo,
    wanted: Sequence[Representation],
) -> dict[str, Learned]:
    schema = session.writer.dataset.schema
    learned, added = {}, []
    for r in wanted:
        if r.id in schema.names:
            there = RepresentationInfo.from_schema(schema, r.id)
            refuse_other_settings(r, encoder_info, there)
            learned[r.id] = stored_learned(spec.index, there)
            continue
        learned[r.id] = ray.get(_fit.remote(spec, encoder_info, r)) if needs_fit(r) else Learned()
        added += fitted_fields(spec.index, r, encoder_info, learned[r.id])
    session.writer.add_columns(added)
    return learned


class FillFragment:
    """Reads a fragment's full tokens, compresses them and writes the new columns' data file."""

    def __init__(self, index: str, version: int, source: str, stage: Compress, num_threads: int):
        import torch

        torch.set_num_threads(num_threads)
        self.index = Index(index, version)
        self.source, self.stage, self.compressor = source, stage, stage.load()
        (self.aspect,) = stage.aspects

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, list[str]]:
        """Fills the fragments of a batch; returns the JSON of a `Filled` for each."""
        return {"filled": [self.fill(int(number)).to_json() for number in batch["fragment"]]}

    def fill(self, number: int) -> Filled:
        """Fills one fragment; rows without full tokens keep null."""
        start = time.perf_counter()
        fragment = get_fragment(self.index.dataset, number)
        with self.index.reading():
            encoder_info = self.stage.encoder_info
            taps = taps_of(self.stage.representations, encoder_info.num_layers)
            table = read_tokens(fragment, self.source, encoder_info.for_field(self.aspect), taps)
        table = with_vectors(table, self.index.codec(self.source), encoder_info.dim)
        read = time.perf_counter()
        found = Found()
        for rows, tokens in batches_of(table, self.stage.encoder_info):
            found.add(self.aspect, rows, self.compressor.columns(tokens, self.aspect))
        if table.num_rows:
            filled, _ = found.join(table.select(["_rowid"]), (self.aspect,))
        else:  # a null in one row: the columns have data then, and the fragment is done
            filled = fragment.to_table(columns=[], with_row_id=True, limit=1)
            for name in self.stage.adds:
                filled = filled.append_column(name, pa.nulls(1))
        schema = self.index.dataset.schema
        fields = [pa.field("_rowid", pa.uint64()), *(schema.field(n) for n in self.stage.adds)]
        filled = filled.select([column.name for column in fields]).cast(pa.schema(fields))
        compressed = time.perf_counter()
        metadata, modified = fragment.update_columns(filled)
        seconds = {
            "read": read - start,
            "compress": compressed - read,
            "write": time.perf_counter() - compressed,
        }
        return Filled(metadata.to_json(), modified, table.num_rows, 0, seconds)


def read_tokens(
    fragment: lance.LanceFragment, source: str, encoder_info: EncoderInfo, taps: Sequence[Tap]
) -> pa.Table:
    """The rows of a fragment that have full tokens, as the token columns of `stages.Encode`.

    The vectors are as they are stored.
    """
    schema = fragment.schema
    columns = {"vectors": source}
    for kind in ("spans", "extents"):
        if (name := encoder_info.position_column(kind)) in schema.names:
            columns[kind] = name
    columns |= {TAP + tap.name: encoder_info.tap_column(tap) for tap in taps}
    table = fragment.to_table(
        columns=list(columns.values()), filter=f"`{source}` IS NOT NULL", with_row_id=True
    )
    table = table.select([*columns.values(), "_rowid"]).rename_columns([*columns, "_rowid"])
    return as_used(table)


def with_vectors(table: pa.Table, codec: Codec, dim: int) -> pa.Table:
    """The rows of a table with their stored `vectors` as lists of numbers."""
    place = table.schema.get_field_index("vectors")
    numbers = lists_of(*codec.decode(table["vectors"], dim))
    return table.set_column(place, "vectors", numbers)


@ray.remote
def _fit(
    spec: RecompressSpec, encoder_info: EncoderInfo, representation: Representation
) -> Learned:
    index = Index(spec.fit_index or spec.index)
    own = encoder_info.for_field(representation.of)
    columns = {"vectors": spec.source}
    taps = taps_of([representation], encoder_info.num_layers)
    columns |= {TAP + tap.name: own.tap_column(tap) for tap in taps}
    columns |= {name: name for name in CONTENT}
    table = _sample(index, spec, list(columns.values())).rename_columns(list(columns))
    table = table.filter(pa.compute.field("vectors").is_valid())
    content_N = np.unique(content_hashes(table))
    table = with_vectors(
        table.drop_columns(list(CONTENT)), index.codec(spec.source), encoder_info.dim
    )
    taps = COMPRESSORS.build(representation.compressor).needs_taps

    def sample() -> Iterator[TokenBatch]:
        return (
            with_taps(batch, taps, encoder_info) for _, batch in batches_of(table, encoder_info)
        )

    origin = {"index": spec.fit_index, "where": spec.fit_filter}
    origin = {name: value for name, value in origin.items() if value is not None}
    learned = fit(representation, sample, spec.fit_seed)
    return learned._replace(sample=Sample(origin, content_N))


def _sample(index: Index, spec: RecompressSpec, columns: list[str]) -> pa.Table:
    """Returns a seeded sample of the rows, in the order of the index."""
    dataset = index.dataset
    rows = np.arange(dataset.count_rows())
    if spec.fit_filter is not None:
        every = dataset.to_table(columns=["item_id"])["item_id"]
        there = matching_ids(index, spec.fit_filter).combine_chunks()
        rows = np.flatnonzero(pa.compute.is_in(every, there).to_numpy())
    chosen = np.random.default_rng(spec.fit_seed).permutation(rows)[: spec.fit_items]
    return dataset.take(np.sort(chosen).tolist(), columns=columns)
