"""Recompression: representations that are computed from stored uncompressed token vectors.

The encoder is not loaded. The result equals that of the index job up to the rounding of the stored
vectors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import lance
import numpy as np
import pyarrow as pa
from pydantic import Field, PositiveInt

from pipeline.compression.codecs import Codec
from pipeline.config import Spec, SpecError, Uri
from pipeline.index.add import AddedColumns, Progress, Work, incomplete_fragments
from pipeline.index.artefacts import Sample
from pipeline.index.columns import (
    Representation,
    Sweep,
    all_representations,
    check_same_settings,
    compressor_remarks,
    needs_appended_vectors,
    required_taps,
    taps_by_representation,
)
from pipeline.index.filling import FragmentActor
from pipeline.index.filters import check_matches, matching_ids
from pipeline.index.fitting import (
    LearnedState,
    fit,
    fitted_fields,
    load_learned_state,
    needs_fit,
    trained_state,
)
from pipeline.index.info import EncoderInfo, RepresentationInfo, tap_names
from pipeline.index.listing import CONTENT, content_hashes
from pipeline.index.positions import decode_positions
from pipeline.index.reader import IndexReader
from pipeline.index.session import Session
from pipeline.index.stage import Profile, Resources
from pipeline.index.stages import ColumnCollector, Compress
from pipeline.index.token_columns import TAP, token_batches, with_taps
from pipeline.index.trained import check_compressors
from pipeline.registry import COMPRESSORS, ENCODERS
from pipeline.taps import APPENDED_STATISTICS, Tap
from pipeline.tokens import TokenBatch, lists_of

#: Seed of the sample of items to fit on.
FIT_SEED = 0


class RecompressSpec(Spec):
    """Spec of `maxray add representations`."""

    index: Uri
    """Path or URI of the index."""
    source: str = "full"
    """Name of the uncompressed representation to read."""
    representations: list[Representation] = Field(default_factory=list)
    """Columns of token vectors to add."""
    sweep: Sweep = Field(default_factory=dict)
    """Additional representations: values by field, whose Cartesian product is taken."""
    commit_fragments: PositiveInt = 8
    """Number of fragments per commit."""
    fit_items: PositiveInt = 256
    """Number of items on which compressors and codecs are fitted."""
    fit_index: Uri | None = None
    """Index with a separate calibration sample. By default the sample is drawn from `index`."""
    fit_filter: str | None = None
    """SQL condition over the columns of the items, which restricts the sample."""


class RecompressResources(Profile):
    """Resources profile of the recompression job."""

    compress: Resources = Resources(num_cpus=1.0, num_threads=2)
    """Actors that read, compress and write fragments."""


class FillFragment(FragmentActor):
    """Actor that compresses the token vectors of fragments."""

    step = "compress"

    def __init__(self, index: str, version: int, source: str, stage: Compress):
        super().__init__(index, version)
        self.source, self.stage = source, stage.load()
        self.columns = stage.adds
        (self.item_field,) = stage.item_fields

    def read(self, fragment: lance.LanceFragment) -> pa.Table:
        """Reads the token vectors of the rows that have the source representation."""
        encoder_info = self.stage.encoder_info
        taps = required_taps(self.stage.representations, encoder_info.num_layers)
        table = read_tokens(fragment, self.source, encoder_info.for_field(self.item_field), taps)
        return with_vectors(table, self.index.codec(self.source), encoder_info.dim)

    def compute(self, number: int, table: pa.Table) -> tuple[pa.Table, int]:
        """Compresses the token vectors."""
        collector = ColumnCollector()
        for rows, tokens in token_batches(table, self.stage.encoder_info):
            tokens = tokens.to(self.stage.device)
            columns = self.stage.columns(tokens, self.item_field)
            collector.add(self.item_field, rows, pa.table(columns))
        return collector.join(table.select(["_rowid"]), (self.item_field,))[0], 0


class Recompression(AddedColumns):
    """Representations that are computed from stored token vectors.

    Raises:
        SpecError: The index, its source column or a representation is invalid.
    """

    kind, actor = "recompress", FillFragment
    spec: RecompressSpec

    def __init__(self, spec: RecompressSpec, resources: RecompressResources):
        super().__init__(spec.index, spec, resources, resources.compress, spec.commit_fragments)
        self.source = spec.source
        self.wanted = all_representations(spec)
        self.title = f"{len(self.wanted)} representations"
        index = IndexReader(spec.index)
        self.encoder_info, item_field = stored_encoder(index, spec.source)
        for r in self.wanted:
            if r.field != item_field:
                rule = f"{item_field}, the field of {spec.source}"
                raise SpecError(f"representations.{r.id}.field", r.field, rule)
            if needs_appended_vectors([r]):
                rule = "a compressor of stored token vectors"
                problem = "needs the vectors of the appended tokens, which no column stores"
                note = "; add it with `maxray index` to a new index"
                field = f"representations.{r.id}.compressor"
                raise SpecError(field, r.compressor.name, rule, problem, note)
        check_compressors(self.wanted, ENCODERS.resolve(self.encoder_info.spec))
        check_taps(index, self.encoder_info.for_field(item_field), self.wanted)
        if fitted := [r for r in self.wanted if needs_fit(r)]:
            check_sample(spec, self.encoder_info, item_field, fitted)

    def prepare(self, session: Session, report: Callable[[str], None]) -> list[Work]:
        """Fits the representations that the index lacks and adds their columns."""
        learned = self._add_columns(session)
        dataset = session.writer.dataset
        works = []
        for names, fragments in incomplete_fragments(dataset, [r.id for r in self.wanted]).items():
            missing = [r for r in self.wanted if r.id in names]
            stage = Compress(self.encoder_info, missing, learned, ())
            works.append(Work(fragments, {"source": self.source, "stage": stage}))
        return works

    def _add_columns(self, session: Session) -> dict[str, LearnedState]:
        schema = session.writer.dataset.schema
        learned, added = {}, []
        for r in self.wanted:
            if r.id in schema.names:
                stored = RepresentationInfo.from_schema(schema, r.id)
                check_same_settings(r, self.encoder_info, stored)
                learned[r.id] = load_learned_state(self.index, stored)
                continue
            if needs_fit(r):
                with session.monitor.phase(f"fit {r.id}"):
                    fit = _fit, self.spec, self.encoder_info, r
                    learned[r.id] = session.run(self.pool, *fit)
            else:
                learned[r.id] = trained_state(r, self.encoder_info)
            added += fitted_fields(self.index, r, self.encoder_info, learned[r.id])
        session.writer.add_columns(added)
        return learned

    def finish(self, session: Session, progress: Progress, report: Callable[[str], None]) -> None:
        """Reports settings that do not suit the items."""
        for sentence in compressor_remarks(session.writer.dataset, self.wanted):
            report(sentence)


def stored_encoder(index: IndexReader, source: str) -> tuple[EncoderInfo, str]:
    """Returns the encoder and the item field of an uncompressed representation."""
    infos = index.representations()
    if source not in infos:
        raise SpecError.unknown_name("source", source, infos, "is not in the index")
    info = infos[source]
    if not info.is_uncompressed:
        raise SpecError("source", source, "an uncompressed representation", "is compressed")
    return info.encoder, info.field


def check_taps(
    index: IndexReader, encoder_info: EncoderInfo, wanted: Sequence[Representation]
) -> None:
    """Raises `SpecError` if a representation needs an attention statistic that is not stored."""
    schema = index.dataset.schema
    for name, taps in taps_by_representation(wanted).items():
        for tap in taps:
            singles = tap.split_layers(encoder_info.num_layers) if encoder_info.num_layers else ()
            columns = [encoder_info.tap_column(single) for single in singles]
            if not columns or not set(columns) <= set(schema.names):
                stored = ", ".join(tap_names(schema)) or "none"
                rule = f"an attention statistic that the index stores ({stored})"
                layers = tap.layers if tap.statistic in APPENDED_STATISTICS else "all"
                name_to_store = tap._replace(layers=layers).name
                note = f"; index with `keep_taps: [{name_to_store}]` to store it"
                raise SpecError(f"representations.{name}", tap.name, rule, note=note)


def check_sample(
    spec: RecompressSpec,
    encoder_info: EncoderInfo,
    item_field: str,
    wanted: Sequence[Representation],
) -> None:
    """Raises `SpecError` if the sample of the spec cannot be used to fit the representations."""
    index = IndexReader(spec.index)
    if spec.fit_index is not None:
        with _errors_at("fit_index", spec.fit_index):
            index = IndexReader(spec.fit_index)
            fit_encoder, fit_field = stored_encoder(index, spec.source)
            if (fit_encoder.fingerprint, fit_field) != (encoder_info.fingerprint, item_field):
                rule = (
                    f"an index whose {spec.source} has the same encoder and `field: {item_field}`"
                )
                problem = f"has the fingerprint {fit_encoder.fingerprint} and the field {fit_field}"
                raise SpecError("fit_index", spec.fit_index, rule, problem)
            check_taps(index, fit_encoder.for_field(item_field), wanted)
    if spec.fit_filter is not None:
        with _errors_at("fit_filter", spec.fit_filter):
            item_ids = matching_ids(index, spec.fit_filter)
        check_matches(len(item_ids), spec.fit_filter, "fit_filter")


@contextlib.contextmanager
def _errors_at(field: str, value: str) -> Iterator[None]:
    """Converts errors inside the block to errors about a field of the spec and its value."""
    try:
        yield
    except SpecError as error:
        raise SpecError(field, value, error.rule, error.problem, error.note) from None


def read_tokens(
    fragment: lance.LanceFragment, source: str, encoder_info: EncoderInfo, taps: Sequence[Tap]
) -> pa.Table:
    """Reads the token columns of `stages.Encode`, with the vectors as stored, and `_rowid`."""
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
    return decode_positions(table)


def with_vectors(table: pa.Table, codec: Codec, dim: int) -> pa.Table:
    """Replaces the column `vectors` of a table by lists of decoded floats."""
    column = table.schema.get_field_index("vectors")
    vectors = lists_of(*codec.decode(table["vectors"], dim))
    return table.set_column(column, "vectors", vectors)


def _fit(
    spec: RecompressSpec,
    encoder_info: EncoderInfo,
    representation: Representation,
) -> LearnedState:
    index = IndexReader(spec.fit_index or spec.index)
    field_info = encoder_info.for_field(representation.field)
    columns = {"vectors": spec.source}
    taps = required_taps([representation], encoder_info.num_layers)
    columns |= {TAP + tap.name: field_info.tap_column(tap) for tap in taps}
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
            with_taps(batch, taps, encoder_info) for _, batch in token_batches(table, encoder_info)
        )

    origin = {"index": spec.fit_index, "filter": spec.fit_filter}
    origin = {name: value for name, value in origin.items() if value is not None}
    learned = fit(representation, encoder_info, sample, FIT_SEED)
    return learned._replace(sample=Sample(origin, content_N))


def _sample(index: IndexReader, spec: RecompressSpec, columns: list[str]) -> pa.Table:
    """Draws a random sample of the rows, in the order of the index."""
    dataset = index.dataset
    rows = np.arange(dataset.count_rows())
    if spec.fit_filter is not None:
        item_ids = dataset.to_table(columns=["item_id"])["item_id"]
        matches = matching_ids(index, spec.fit_filter).combine_chunks()
        rows = np.flatnonzero(pa.compute.is_in(item_ids, matches).to_numpy())
    sample = np.random.default_rng(FIT_SEED).permutation(rows)[: spec.fit_items]
    return dataset.take(np.sort(sample).tolist(), columns=columns)
