"""Codes of a candidate generator: a column that an index gets, completes, refits or drops.

The codes describe the vectors of a representation, or the texts of a column. Rows that were added
since are coded without fitting again, and removed rows disappear. A refit fills a column with the
next revision, which replaces the former column in a single commit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import lance
import numpy as np
import pyarrow as pa
from pydantic import Field, PositiveInt

from pipeline.config import Spec, SpecError, Uri, dump, within
from pipeline.index.add import AddedColumns, Progress, Work, incomplete_fragments
from pipeline.index.artefacts import save_artefact
from pipeline.index.filling import FragmentActor
from pipeline.index.info import CandidatesInfo
from pipeline.index.isotropy import sample_vectors
from pipeline.index.reader import IndexReader
from pipeline.index.session import Session
from pipeline.index.stage import Profile, Resources
from pipeline.registry import CANDIDATES, GeneratorSpec, short_name
from pipeline.schema import with_metadata
from pipeline.search.candidates import BM25, BUILT, DEPTHS, Numbers
from pipeline.search.generators.ivf import MIN_SAMPLE, VECTORS_PER_CENTROID
from pipeline.search.num_candidates import measure
from pipeline.search.options import representation_info
from pipeline.search.query import AnyQuery

log = logging.getLogger("maxray.candidates")

#: Default minimum number of items of the sample to which `ivf` is fitted, and their share.
FIT_ITEMS, FIT_SHARE = 16384, MIN_SAMPLE * 2**0.5 / VECTORS_PER_CENTROID
#: Maximum number of vectors of the sample: 2 GiB of float32 at 128 dimensions.
FIT_VECTORS = 1 << 22
#: Number of items by which their mean number of vectors is estimated.
LENGTH_ITEMS = 256


class CandidatesJobSpec(Spec):
    """Settings of `maxray add candidates`."""

    index: Uri
    """Path or URI of the index."""
    generator: GeneratorSpec
    """Candidate generator."""
    representation: str | None = None
    """Representation whose exact scores the generator approximates. Defaults to that of searches:
    `full` if it exists, otherwise the first. `bm25` serves all representations of the same texts.
    """
    queries: Uri | None = None
    """File with past queries with which the recall is measured: texts as for `--queries` of
    `jobs.search`, or vectors (.npy or .parquet) as for `--query-vectors`. By default, short
    passages of the items' texts are used, or vectors of the items."""
    fit_items: PositiveInt | None = None
    """Number of evenly spaced items to which `ivf` is fitted. The default is 35 % of the items, but
    at least 16,384. There are fewer if they have more than about four million vectors."""
    recall: float = Field(0.98, ge=0.5, lt=1)
    """Wanted recall of the exact results, which determines the default number of candidates."""
    commit_fragments: PositiveInt = 8
    """Number of fragments per commit."""


class CandidatesResources(Profile):
    """Resources profile of the job."""

    fit: Resources = Resources(num_cpus=1.0, num_threads=2)
    """Task that fits the generator, and measures its recall."""
    encode: Resources = Resources(num_cpus=1.0, num_threads=2)
    """Actors that compute codes and write fragments."""


class FillCodes(FragmentActor):
    """Actor that computes the codes of the items of fragments."""

    step = "encode"

    def __init__(self, index: str, version: int, column: str):
        super().__init__(index, version)
        self.columns = (column,)
        self.info = self.index.candidates_columns[column]
        self.generator = self.index.generator(column)

    def read(self, fragment: lance.LanceFragment) -> pa.Table:
        """Reads the vectors or the texts of the rows that have them."""
        name = self.info.representation
        return fragment.to_table(columns=[name], filter=f"`{name}` IS NOT NULL", with_row_id=True)

    def compute(self, number: int, table: pa.Table) -> tuple[pa.Table, int]:
        """Computes the codes in batches, whose rows do not depend on what was interrupted."""
        tables, size = [], self.generator.batch_rows
        for first in range(0, table.num_rows, size):
            rows = table.slice(first, size)
            codes = self.generator.codes(rows[self.info.representation], self._decode)
            tables.append(pa.table([rows["_rowid"], codes], names=["_rowid", self.info.name]))
        return pa.concat_tables(tables), 0

    def _decode(self, column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
        name = self.info.representation
        return self.index.codec(name).decode(column, self.index.representation(name).dim)


class Candidates(AddedColumns):
    """Codes of a candidate generator, which is fitted unless it exists.

    Args:
        queries: Past queries with which the recall is measured, all of the same kind.
        refit: Whether to fit the generator again.
    """

    kind, actor = "candidates", FillCodes
    spec: CandidatesJobSpec
    resources: CandidatesResources

    def __init__(
        self,
        spec: CandidatesJobSpec,
        resources: CandidatesResources,
        queries: Sequence[AnyQuery] = (),
        *,
        refit: bool = False,
    ):
        super().__init__(spec.index, spec, resources, resources.encode, spec.commit_fragments)
        self.queries, self.refit = queries, refit
        self.title = f"codes of {spec.generator.name}"
        _check(spec, refit=refit)

    def prepare(self, session: Session, report: Callable[[str], None]) -> list[Work]:
        """Fits the generator and adds its column if necessary."""
        index = IndexReader(self.index)
        source, generator = _source(index, self.spec), short_name(self.spec.generator.name)
        columns = _columns(index, source, generator)
        # An interrupted refit left its column beside the former one. It is resumed.
        is_resumed = len(columns) > 1
        if columns and (is_resumed or not self.refit):
            *self.former, self.column = columns
        else:
            self.former = list(columns)
            revision = max((info.revision for info in columns.values()), default=0) + 1
            self.column = f"{source}_{generator}_{revision}_candidates"
            start = time.perf_counter()
            self._fit(session, index, source, revision, report)
            report(f"fitted {generator} ({time.perf_counter() - start:.1f} s)")
        info = IndexReader(self.index).candidates_columns[self.column]
        missing = missing_fragments(session.writer.dataset, info)
        return [Work(missing, {"column": self.column})] if missing else []

    def _fit(
        self,
        session: Session,
        index: IndexReader,
        source: str,
        revision: int,
        report: Callable[[str], None],
    ) -> None:
        spec, pool = self.spec, self.resources.fit
        fit = _fit_texts if spec.generator.name == BM25 else _fit_vectors
        report(f"fitting {spec.generator.name}")
        with session.monitor.phase(f"fit {spec.generator.name}"):
            artefact = session.run(pool, fit, spec, source)
        info = CandidatesInfo(
            name=self.column,
            generator=dump(spec.generator),
            representation=source,
            fitted=representation_info(index, spec.representation).sources[source],
            artefact="",
            revision=revision,
        )
        info = replace(info, artefact=save_artefact(spec.index, artefact, info.fit))
        type = CANDIDATES.build(spec.generator, artefact).column_type
        session.writer.add_columns([with_metadata(pa.field(info.name, type), info.to_metadata())])

    def finish(self, session: Session, progress: Progress, report: Callable[[str], None]) -> None:
        """Measures the numbers of candidates, and drops the column that the codes replace."""
        index = IndexReader(self.index)
        info = index.candidates_columns[self.column]
        if info.representation in index.representations() and info.numbers is None:
            self._measure(session, index, info, report)
        if self.former:
            session.writer.drop_columns(self.former)
            report(f"dropped {', '.join(self.former)}")

    def _measure(
        self,
        session: Session,
        index: IndexReader,
        info: CandidatesInfo,
        report: Callable[[str], None],
    ) -> None:
        """Measures and stores the default numbers of candidates."""
        start = time.perf_counter()
        with session.monitor.phase(f"measure {info.generator_name}"):
            queries = list(self.queries)
            numbers = session.run(self.resources.fit, _measure, self.spec, info.name, queries)
        if numbers is None:
            return
        info = replace(info, numbers=numbers._asdict())
        session.writer.set_metadata(
            with_metadata(index.schema.field(info.name), info.to_metadata())
        )
        pairs = zip(numbers.counts, DEPTHS, strict=True)
        found = " and ".join(f"{count:,} for {depth} hits" for count, depth in pairs)
        found += f", from {' and '.join(map(str, numbers.probes))} lists per query token"
        seconds = f"{time.perf_counter() - start:.1f} s"
        name, recall = info.generator_name, f"{numbers.recall:g}"
        report(f"{name} needs these candidates for recall {recall}: {found} ({seconds})")


def drop(spec: CandidatesJobSpec, *, job: str, report: Callable[[str], None] = log.info) -> None:
    """Drops all columns of a generator in a single commit."""
    index = IndexReader(spec.index)
    source = _source(index, spec)
    columns = _columns(index, source, short_name(spec.generator.name))
    if not columns:
        problem = f"was not built for {source}"
        raise SpecError("generator", spec.generator.name, "a generator of the index", problem)
    with Session(spec.index, spec, "candidates", job, dict) as session:
        session.writer.drop_columns(list(columns))
    report(f"dropped {', '.join(columns)}")


def _check(spec: CandidatesJobSpec, *, refit: bool) -> None:
    if spec.generator.name not in BUILT:  # searches know only these
        raise SpecError("generator.name", spec.generator.name, " or ".join(BUILT))
    index = IndexReader(spec.index)
    info = representation_info(index, spec.representation)
    if info.max_vectors is not None:
        rule = "the name of a column; its codes also serve its prefixes"
        raise SpecError("representation", info.name, rule)
    source = _source(index, spec)
    if spec.queries is not None and source != info.column:
        raise SpecError("queries", spec.queries, f"omitted for {spec.generator.name}")
    columns = list(_columns(index, source, short_name(spec.generator.name)).values())
    is_resumed = len(columns) > 1  # an interrupted refit, which has its settings already
    if not columns or (refit and not is_resumed):
        return
    newest = columns[-1]
    if not newest.is_fitted_to(info):
        problem = f"was fitted to other vectors than those of {info.column}"
        advice = "drop it with --drop" if is_resumed else "fit it again with --refit"
        rule = "a generator of the present vectors"
        raise SpecError("generator", spec.generator.name, rule, problem, f"; {advice}")
    stored = CANDIDATES.resolve(newest.generator)
    if stored != spec.generator:
        problem = "differs from the stored generator"
        rule = f"{dump(stored)}, or --refit"
        if is_resumed:
            problem = "differs from that of the interrupted refit"
            rule = f"{dump(stored)}, or --drop before"
        raise SpecError("generator", dump(spec.generator), rule, problem)


def _source(index: IndexReader, spec: CandidatesJobSpec) -> str:
    info = representation_info(index, spec.representation)
    return getattr(info, CANDIDATES.load(spec.generator.name).source)


def missing_fragments(dataset: lance.LanceDataset, info: CandidatesInfo) -> list[int]:
    """Returns the fragments that have vectors of the representation, or texts, but no codes."""
    without: dict[str, set[int]] = {info.name: set(), info.representation: set()}
    for names, fragments in incomplete_fragments(dataset, list(without)).items():
        for name in names:
            without[name].update(fragments)
    return sorted(without[info.name] - without[info.representation])


def _columns(index: IndexReader, representation: str, generator: str) -> dict[str, CandidatesInfo]:
    infos = index.candidates_columns.values()
    found = [
        info
        for info in infos
        if info.representation == representation and info.generator_name == generator
    ]
    return {info.name: info for info in sorted(found, key=lambda info: info.revision)}


def _fit_vectors(spec: CandidatesJobSpec, representation: str) -> dict[str, np.ndarray]:
    kind: Any = CANDIDATES.load(spec.generator.name)
    index = IndexReader(spec.index)
    num_items = spec.fit_items or max(FIT_ITEMS, round(FIT_SHARE * len(index)))
    _, lengths = sample_vectors(index, representation, LENGTH_ITEMS)
    if lengths.any():
        num_items = min(num_items, int(FIT_VECTORS / lengths.mean()))
    vectors_TD, lengths_B = sample_vectors(index, representation, num_items)
    if not len(vectors_TD):
        problem = "has no vectors"
        raise SpecError("representation", representation, "a filled representation", problem)
    with within("generator"):
        share = np.count_nonzero(lengths_B) / len(index)
        return kind.fit(spec.generator, np.ascontiguousarray(vectors_TD, np.float32), share)


def _measure(spec: CandidatesJobSpec, column: str, queries: list[AnyQuery]) -> Numbers | None:
    return measure(IndexReader(spec.index), column, queries, recall=spec.recall)


def _fit_texts(spec: CandidatesJobSpec, column: str) -> dict[str, np.ndarray]:
    kind: Any = CANDIDATES.load(spec.generator.name)
    batches = IndexReader(spec.index).batches([column])
    artefact = kind.fit(spec.generator, (batch[column].to_pylist() for batch in batches))
    if not artefact["totals"][0]:
        rule = f"used with an index whose items have a {column}"
        raise SpecError("generator", spec.generator.name, rule)
    return artefact
