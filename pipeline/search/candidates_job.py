"""Job that builds, completes, refits or drops a candidate generator of an index.

The codes describe the vectors of a representation, or the texts of a column.

The codes of the items are a column of the index, which is filled fragment by fragment. The job is
therefore resumable, rows that were added since are coded without fitting again, and removed rows
disappear. A refit fills a column with the next revision, which replaces the former column in a
single commit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import lance
import numpy as np
import pyarrow as pa
import ray
import torch
from pydantic import Field, PositiveInt

from pipeline.candidates import Generator, TextGenerator
from pipeline.config import Spec, SpecError, Uri, dump_stored, within
from pipeline.index.artefacts import save_artefact
from pipeline.index.capacity import check_capacity
from pipeline.index.fill import FilledFragment, Progress, commit_filled, fill_fragments
from pipeline.index.info import CandidatesInfo, vectors_identity
from pipeline.index.reader import Index, get_fragment, part_uri
from pipeline.index.recompress import incomplete_fragments
from pipeline.index.session import Session
from pipeline.registry import CANDIDATES, GeneratorSpec
from pipeline.schema import with_metadata
from pipeline.search.candidates_sample import draw_sample
from pipeline.search.query import AnyQuery
from pipeline.search.representations import representation_info
from pipeline.stage import Profile, Resources

log = logging.getLogger("maxray.candidates")

#: Number of rows whose codes are computed together.
BATCH_ROWS = 1024
#: Maximum number of items on which the remarks about a generator are based.
REMARK_ITEMS = 4096


class CandidatesJobSpec(Spec):
    """Settings of `jobs.candidates`."""

    index: Uri
    """Path or URI of the index."""
    generator: GeneratorSpec
    """Candidate generator."""
    representation: str | None = None
    """Representation whose exact scores the generator approximates. Defaults to that of searches:
    `full` if it exists, otherwise the first. `bm25` serves all representations of the same texts.
    """
    queries: Uri | None = None
    """File with past queries to which the generator is fitted: texts as for `--queries` of
    `jobs.search`, or vectors (.npy or .parquet) as for `--query-vectors`. By default, passages of
    the items' texts are used, or vectors of the items."""
    fit_items: PositiveInt = 16384
    """Maximum number of items of the sample. It also ends when it has a million vectors."""
    fit_tokens: PositiveInt = 16384
    """Number of token vectors of queries in the sample."""
    fit_seed: int = Field(0, ge=0, lt=2**32)
    """Seed of the sample."""
    commit_fragments: PositiveInt = 8
    """Number of fragments per commit."""


class CandidatesResources(Profile):
    """Resources profile of the job."""

    fit: Resources = Resources(num_cpus=1.0, num_threads=2)
    """Task that fits the generator. It encodes queries."""
    encode: Resources = Resources(num_cpus=1.0, num_threads=2)
    """Actors that compute codes and write fragments."""


def run(
    spec: CandidatesJobSpec,
    resources: CandidatesResources,
    *,
    job: str,
    queries: Sequence[AnyQuery] = (),
    refit: bool = False,
    report: Callable[[str], None] = log.info,
    lease_seconds: float | None = None,
) -> Progress:
    """Fits a generator unless it exists, and computes the missing codes.

    Ray must be connected to a cluster.

    Args:
        spec: Spec of the job.
        resources: Resources profile of the job.
        job: Identifier of the job.
        queries: Past queries to which the generator is fitted, all of the same kind.
        refit: Whether to fit the generator again.
        report: Called with each sentence about the job.
        lease_seconds: Lifetime of the lease without renewal, see `Session`.

    Raises:
        SpecError: The index or the representation is invalid, or the stored generator has other
            settings.
        LeaseHeld: Another job is writing to the index.
        Stopped: SIGTERM was received. Finished work is committed and the lease is released.
    """
    check(spec, refit=refit)
    check_capacity(resources)
    progress = Progress(seconds={"read": 0.0, "encode": 0.0, "write": 0.0})
    with Session(spec.index, spec, "candidates", job, progress.summary, lease_seconds) as session:
        column, former = _prepare(session, spec, resources, queries, refit, report)
        dataset = session.writer.dataset
        progress.fragments = len(dataset.get_fragments())
        missing = missing_fragments(dataset, Index(spec.index).candidates_columns[column])
        progress.done_before = progress.fragments - len(missing)
        report(f"{len(missing)} of {progress.fragments} fragments have items without codes")
        if missing:
            constructor_kwargs = {
                "index": part_uri(spec.index),
                "version": dataset.version,
                "column": column,
                "num_threads": resources.encode.num_threads,
            }
            rows = [{"fragment": number} for number in missing]
            filled = fill_fragments(
                FillCodes, constructor_kwargs, rows, resources.encode, resources
            )
            commit_filled(
                session, filled, resources.encode, spec.commit_fragments, progress, report
            )
        for sentence in _remarks(Index(spec.index), column):
            report(sentence)
        if former:
            session.writer.drop_columns(former)
            report(f"dropped {', '.join(former)}")
    return progress


def drop(spec: CandidatesJobSpec, *, job: str, report: Callable[[str], None] = log.info) -> None:
    """Drops all columns of a generator in a single commit.

    Raises:
        SpecError: The index has no such generator.
        LeaseHeld: Another job is writing to the index.
    """
    index = Index(spec.index)
    source = _source(index, spec)
    columns = _columns(index, source, spec.generator.name)
    if not columns:
        problem = f"was not built for {source}"
        raise SpecError("generator", spec.generator.name, "a generator of the index", problem)
    with Session(spec.index, spec, "candidates", job, dict) as session:
        session.writer.drop_columns(list(columns))
    report(f"dropped {', '.join(columns)}")


def check(spec: CandidatesJobSpec, *, refit: bool = False) -> None:
    """Checks the representation and the settings of the generator.

    Raises:
        SpecError: The job cannot succeed.
    """
    index = Index(spec.index)
    info = representation_info(index, spec.representation)
    if info.max_vectors is not None:
        rule = "the name of a column; its codes also serve its prefixes"
        raise SpecError("representation", info.name, rule)
    if _is_lexical(spec) and spec.queries is not None:
        raise SpecError("queries", spec.queries, f"omitted for {spec.generator.name}")
    columns = list(_columns(index, _source(index, spec), spec.generator.name).values())
    is_resumed = len(columns) > 1  # an interrupted refit, which has its settings already
    if not columns or (refit and not is_resumed):
        return
    newest = columns[-1]
    if not newest.is_lexical and not newest.is_fitted_to(info):
        problem = f"was fitted to other vectors than those of {info.column}"
        advice = "drop it with --drop" if is_resumed else "fit it again with --refit"
        rule = "a generator of the present vectors"
        raise SpecError("generator", spec.generator.name, rule, problem, f"; {advice}")
    stored = CANDIDATES.resolve(newest.generator, stored=True)
    if stored != spec.generator:
        problem = "differs from the stored generator"
        rule = f"{dump_stored(stored)}, or --refit"
        if is_resumed:
            problem = "differs from that of the interrupted refit"
            rule = f"{dump_stored(stored)}, or --drop before"
        raise SpecError("generator", dump_stored(spec.generator), rule, problem)


def _is_lexical(spec: CandidatesJobSpec) -> bool:
    return issubclass(CANDIDATES.load(spec.generator.name), TextGenerator)


def _source(index: Index, spec: CandidatesJobSpec) -> str:
    """Returns the column of the vectors or texts to which the generator is fitted."""
    info = representation_info(index, spec.representation)
    return info.text_column if _is_lexical(spec) else info.column


def missing_fragments(dataset: lance.LanceDataset, info: CandidatesInfo) -> list[int]:
    """Returns the fragments that have vectors of the representation, or texts, but no codes."""
    without: dict[str, set[int]] = {info.name: set(), info.representation: set()}
    for names, fragments in incomplete_fragments(dataset, list(without)).items():
        for name in names:
            without[name].update(fragments)
    return sorted(without[info.name] - without[info.representation])


def _columns(index: Index, representation: str, generator: str) -> dict[str, CandidatesInfo]:
    """Returns the columns of a generator, in the order of their revisions."""
    infos = index.candidates_columns.values()
    found = [
        info
        for info in infos
        if info.representation == representation and info.generator_name == generator
    ]
    return {info.name: info for info in sorted(found, key=lambda info: info.revision)}


def _prepare(
    session: Session,
    spec: CandidatesJobSpec,
    resources: CandidatesResources,
    queries: Sequence[AnyQuery],
    refit: bool,
    report: Callable[[str], None],
) -> tuple[str, list[str]]:
    """Returns the column to fill, which is added if necessary, and the columns it replaces."""
    index = Index(spec.index)
    representation = representation_info(index, spec.representation)
    source = _source(index, spec)
    columns = _columns(index, source, spec.generator.name)
    # An interrupted refit left its column beside the former one. It is resumed.
    is_resumed = len(columns) > 1
    if columns and (is_resumed or not refit):
        *former, column = columns
        return column, former
    revision = max((info.revision for info in columns.values()), default=0) + 1
    generator = spec.generator.name
    is_lexical = _is_lexical(spec)
    num_items = len(index) if is_lexical else min(spec.fit_items, len(index))
    report(f"fitting {generator} to {num_items:,} items")
    start = time.perf_counter()
    if is_lexical:
        call = _fit_texts.options(**resources.fit.task_options).remote(spec, source)
    else:
        task = _fit.options(**resources.fit.task_options)
        call = task.remote(spec, representation.name, list(queries), resources.fit.num_threads)
    with session.monitor.phase(f"fit {generator}"):
        artefact = session.call(ray.get, call)
    info = CandidatesInfo(
        name=f"{source}_{generator}_{revision}_candidates",
        generator=dump_stored(spec.generator),
        representation=source,
        fitted={"text": source} if is_lexical else vectors_identity(representation),
        artefact="",
        revision=revision,
    )
    fitted = CANDIDATES.build(spec.generator, artefact)
    info = replace(info, artefact=save_artefact(spec.index, artefact, info.fit))
    if isinstance(fitted, TextGenerator):
        type = fitted.column_type
    else:
        type = fitted.codec.column_type(fitted.dim)
    session.writer.add_columns([with_metadata(pa.field(info.name, type), info.to_metadata())])
    report(f"fitted {generator} ({time.perf_counter() - start:.1f} s)")
    return info.name, list(columns)


def _remarks(index: Index, column: str) -> list[str]:
    """Returns remarks about the first codes of the index."""
    if index.candidates_columns[column].is_lexical:
        return []
    generator = index.generator(column)
    with index.corruption_errors():
        table = index.dataset.to_table(
            columns=[column], filter=f"`{column}` IS NOT NULL", limit=REMARK_ITEMS
        )
    parts, lengths = generator.codec.unpack(table[column], generator.dim)
    tensors = {name: torch.from_numpy(part) for name, part in parts.items()}
    return generator.remarks(tensors, torch.from_numpy(lengths))


@ray.remote
def _fit(
    spec: CandidatesJobSpec, representation: str, queries: list[AnyQuery], num_threads: int
) -> dict[str, np.ndarray]:
    """Fits the generator to a sample of the index."""
    torch.set_num_threads(num_threads)  # sums of products are rounded by their number
    sample = draw_sample(
        Index(spec.index),
        representation,
        queries,
        num_items=spec.fit_items,
        num_tokens=spec.fit_tokens,
        seed=spec.fit_seed,
    )
    with within("generator"):
        kind = CANDIDATES.load(spec.generator.name)
        assert issubclass(kind, Generator)
        return kind.fit(spec.generator, sample)


@ray.remote
def _fit_texts(spec: CandidatesJobSpec, column: str) -> dict[str, np.ndarray]:
    """Fits a generator of texts to all items of the index.

    Raises:
        SpecError: No item has a text.
    """
    index = Index(spec.index)
    num_texts = 0

    def texts() -> Iterator[list[str | None]]:
        nonlocal num_texts
        for batch in index.batches([column]):
            values = batch[column].to_pylist()
            num_texts += sum(map(bool, values))
            yield values

    kind = CANDIDATES.load(spec.generator.name)
    assert issubclass(kind, TextGenerator)
    artefact = kind.fit(spec.generator, texts())
    if not num_texts:
        rule = f"used with an index whose items have a {column}"
        raise SpecError("generator", spec.generator.name, rule)
    return artefact


class FillCodes:
    """Actor that computes the codes of the items of a fragment and writes their column."""

    def __init__(self, index: str, version: int, column: str, num_threads: int):
        torch.set_num_threads(num_threads)
        self.index = Index(index, version)
        self.info = self.index.candidates_columns[column]
        if self.info.is_lexical:
            self.text_generator = self.index.text_generator(column)
            return
        self.generator = self.index.generator(column)
        self.representation = self.index.representation(self.info.representation)
        self.codec = self.index.codec(self.info.representation)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, list[str]]:
        """Fills the fragments of a batch and returns the JSON of a `FilledFragment` for each."""
        return {"filled": [self.fill(int(number)).to_json() for number in batch["fragment"]]}

    def fill(self, number: int) -> FilledFragment:
        """Fills one fragment. Rows without the representation or a text remain null.

        The codes depend on the order of the rows only, so that a resumed job writes the same bits.
        """
        seconds = {"read": 0.0, "encode": 0.0, "write": 0.0}
        fragment = get_fragment(self.index.dataset, number)
        name = self.info.representation
        tables = []
        before = time.perf_counter()
        with self.index.corruption_errors():
            table = fragment.to_table(
                columns=[name], filter=f"`{name}` IS NOT NULL", with_row_id=True
            )
        seconds["read"] += time.perf_counter() - before
        before = time.perf_counter()
        for first in range(0, table.num_rows, BATCH_ROWS):
            rows = table.slice(first, BATCH_ROWS)
            codes = self._codes(rows[name])
            tables.append(pa.table([rows["_rowid"], codes], names=["_rowid", self.info.name]))
        if not tables:  # an explicit null in one row marks the fragment as complete
            marked = fragment.to_table(columns=[], with_row_id=True, limit=1)
            tables.append(marked.append_column(self.info.name, pa.nulls(1)))
        field = self.index.schema.field(self.info.name)
        filled = pa.concat_tables(tables)
        filled = filled.cast(pa.schema([pa.field("_rowid", pa.uint64()), field]))
        seconds["encode"] += time.perf_counter() - before
        before = time.perf_counter()
        metadata, modified = fragment.update_columns(filled)
        seconds["write"] += time.perf_counter() - before
        return FilledFragment(metadata.to_json(), modified, table.num_rows, 0, seconds, number)

    def _codes(self, column: pa.ChunkedArray) -> pa.Array:
        """Returns the codes of the items with the given vectors or texts."""
        if self.info.is_lexical:
            return self.text_generator.encode(column.to_pylist())
        vectors_TD, lengths_B = self.codec.decode(column, self.representation.dim)
        with torch.no_grad():
            codes_VF, counts_B = self.generator.encode(
                torch.from_numpy(vectors_TD).float(), torch.from_numpy(lengths_B)
            )
            return self.generator.codec.encode_rows(codes_VF, counts_B.numpy())
