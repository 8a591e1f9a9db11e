"""Evaluates the representations of an index under each score on one benchmark."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import platform
import posixpath
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pipeline import extras
from pipeline.atomic import check_writable
from pipeline.config import SpecError, dump
from pipeline.eval import JudgedQueries, bm25
from pipeline.eval.cells import Cell, Cells, Diagnosed, Grounded
from pipeline.eval.diagnostics import Diagnosis
from pipeline.eval.example_selection import Pictures, choose, compared, describe
from pipeline.eval.examples import Examples
from pipeline.eval.grounding import (
    Generated,
    Grounder,
    Phrase,
    check_phrases,
    generate_phrases,
    read_phrases,
)
from pipeline.eval.kinds import queries_by_kind
from pipeline.eval.level import judged_level
from pipeline.eval.metrics import write_run
from pipeline.eval.plan import Row, planned_rows
from pipeline.eval.ranker import Ranker, fitting_key
from pipeline.eval.results import (
    BM25,
    EDJE,
    SINGLE,
    Evaluation,
    Result,
    in_order,
    merge_seeds,
    method_name,
)
from pipeline.eval.spec import EvaluateSpec, RerankSpec
from pipeline.index.filters import filtering
from pipeline.index.fitting import stored_sample
from pipeline.index.listing import CONTENT, content_hashes
from pipeline.index.reader import Index
from pipeline.registry import BENCHMARKS, COMPRESSORS
from pipeline.search.searcher import Searcher, open_index
from pipeline.version import __version__

#: Number of seeds of random pruning, as in SAP's appendix C.
NUM_SEEDS = 5


def run(
    spec: EvaluateSpec, say: Callable[[str], None], pictures: Pictures | None = None
) -> Evaluation:
    """Evaluates rows that are not cached in the output folder, and writes their runs there.

    Args:
        spec: Spec of the evaluation.
        say: Function that reports a line of progress.
        pictures: Draws the images of a hit in the examples, see `Pictures`.

    Raises:
        SpecError: The benchmark, the index or a representation is missing or invalid.
    """
    check_writable(spec.output, "output")
    if spec.bm25:
        extras.require("bm25s", "Stemmer")
    judged = BENCHMARKS.build(spec.benchmark).load()
    searcher = open_index(spec.index)
    num_items = _count(searcher.index, spec.filter)
    level = judged_level(searcher.index, judged, spec.judged, spec.filter)
    spec = spec.model_copy(update={"judged": level})
    ranker = Ranker(spec, judged, searcher)
    notes = list(_left_out(spec, judged, searcher.index))
    plan = list(planned_rows(spec, searcher))
    if spec.bm25 and bm25.has_texts(searcher.index, spec.text, spec.filter):
        plan.insert(0, Row(BM25, BM25))
    elif spec.bm25:
        notes.append(f"no item has a {spec.text}: there is no row of BM25")
    for row in plan:
        if row.rerank is not None:  # before any row is scored
            ranker.reranker(row.rerank)
    for line in notes:
        say(line)

    by_kind = {}
    if spec.kinds is not None:
        by_kind = queries_by_kind(searcher.index, judged, spec.kinds, spec.judged, spec.filter)
    phrases = _phrases(spec, searcher, plan)
    if isinstance(spec.grounding, Generated) and len(phrases) < spec.grounding.num_phrases:
        notes.append(f"grounding: {len(phrases)} phrases found in the items' texts")
        say(notes[-1])
    grounder = Grounder(searcher, phrases)

    samples = _Samples(searcher.index, spec.filter)
    headline = "nDCG@10" if "nDCG@10" in spec.measures else spec.measures[0]
    cells = Cells(spec.output)
    results, keys = [], {}
    for number, row in enumerate(plan, start=1):
        key = ranker.key(row)
        cell = cells.read(key, Cell)
        speed = "(as before)"
        if cell is None:
            cell = ranker.cell(row)
            cells.write(key, cell)
            speed = f"{cell.queries_per_second:,.0f} queries/s"
        result = replace(_result(searcher, row, cell), weights=ranker.weights(row.score))
        if row.rerank is not None:
            result = _reranked(result, row.rerank)
        if spec.diagnostics and result.score == "late":
            result = replace(result, diagnosis=_diagnosis(ranker, row.representation, cells))
        if phrases and result.score == "late":
            numbers = _grounding(searcher.index, grounder, phrases, row.representation, cells)
            result = replace(result, grounding=numbers)
        if row.score in ("late", "hybrid"):
            result = replace(result, fitted=samples.fitted(row.representation))
        results.append(result)
        keys[result.name] = key
        run_file = posixpath.join(spec.output, "runs", f"{result.name}.trec")
        write_run(run_file, cell.rankings, result.name)
        quality = f"{headline} {result.means[headline]:.4f}"
        say(f"[{number}/{len(plan)}] {result.name}  {quality}  {speed}")

    results = in_order(merge_seeds(results))
    for line in _remarks(results):
        notes.append(line)
        say(line)
    evaluation = Evaluation(
        spec=dump(spec),
        headline=headline,
        judgments=ranker.judgments,
        num_items=num_items,
        notes=notes,
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        versions=versions(),
        results=results,
        kinds=by_kind,
        categories=judged.categories,
    )
    examples = _examples(evaluation, judged, searcher, ranker, cells, keys, pictures)
    return replace(evaluation, examples=examples.examples)


class _Samples:
    """Compares the samples that representations were fitted on with the evaluated items."""

    def __init__(self, index: Index, filter: str | None):
        self._index, self._filter = index, filter

    def fitted(self, representation: str) -> dict[str, Any]:
        """Returns what a representation was fitted on, see `Result.fitted`."""
        info = self._index.representation(representation)
        if not info.is_fitted:
            return {}
        sample = stored_sample(self._index.uri, info)
        if sample is None:
            return {"num_items": None, "evaluated": None, "origin": {}}
        number = int(np.isin(sample.items_N, self._evaluated_N).sum())
        return {"num_items": len(sample.items_N), "evaluated": number, "origin": sample.origin}

    @functools.cached_property
    def _evaluated_N(self) -> np.ndarray:
        """(N,) uint64 hashes of the evaluated items."""
        batches = self._index.batches(CONTENT, filter=self._filter)
        return np.concatenate([np.zeros(0, np.uint64), *map(content_hashes, batches)])


def _diagnosis(ranker: Ranker, representation: str, cells: Cells) -> Diagnosis:
    """Returns the diagnosis of a representation, from the cache if nothing changed."""
    key = ranker.diagnosis_key(representation)
    kept = cells.read(key, Diagnosed)
    if kept is None:
        kept = Diagnosed(diagnosis=ranker.diagnosis(representation))
        cells.write(key, kept)
    return kept.diagnosis


def _phrases(spec: EvaluateSpec, searcher: Searcher, plan: Sequence[Row]) -> list[Phrase]:
    """Returns the phrases to ground, if the spec asks for grounding.

    Raises:
        SpecError: They are invalid, or their items are missing or have no regions.
    """
    if spec.grounding is None:
        return []
    names = [row.representation for row in plan if row.score == "late"]
    if isinstance(spec.grounding, Generated):
        return generate_phrases(spec.grounding, searcher.index, names, spec.filter)
    phrases = read_phrases(spec.grounding)
    check_phrases(phrases, searcher.index, names)
    return phrases


def _grounding(
    index: Index, grounder: Grounder, phrases: Sequence[Phrase], name: str, cells: Cells
) -> dict[str, float]:
    """Returns the grounding of a representation, from the cache if nothing changed."""
    columns = grounder.columns(name)
    if columns is None:
        return {}
    info = index.representation(name)
    key = Cells.key(
        grounding=phrases,
        content=index.content_key(["item_id", *columns]),
        made=fitting_key(info),
    )
    kept = cells.read(key, Grounded)
    if kept is None:
        kept = Grounded(numbers=grounder.measure(name))
        cells.write(key, kept)
    return kept.numbers


def _remarks(results: Sequence[Result]) -> Iterator[str]:
    """Yields notes on missing diagnostics, and on rows with few seeds."""
    late = [result for result in results if result.score == "late"]
    ungrounded = [result.representation for result in late if not result.grounding]
    if len(ungrounded) < len(late) and ungrounded:
        yield f"no grounding for {', '.join(ungrounded)}: they store no support, or no places"
    diagnosed = [(result, result.diagnosis) for result in results if result.diagnosis]
    if without := [result.representation for result, diagnosis in diagnosed if not diagnosis.full]:
        yield (
            f"no OSR for {', '.join(without)}: the index has no full tokens (compressor none) "
            "of the encoder, or their scores are no share of a cosine"
        )
    retentions = [result.retention for result, _ in diagnosed if result.retention]
    if most := max((retention.num_left_out for retention in retentions), default=0):
        yield (
            f"{most} relevant pairs have a negative score with the full tokens and are left out of "
            "OSR"
        )
    if missing := max((diagnosis.num_missing for _, diagnosis in diagnosed), default=0):
        yield f"up to {missing} relevant pairs are left out of diagnoses: the item has no vectors"
    random = [result for result in results if result.is_random and result.score == "late"]
    few = {r.representation: len(r.seeds) for r in random if len(r.seeds) < NUM_SEEDS}
    if few:
        shown = ", ".join(f"{name}: {number}" for name, number in few.items())
        yield f"random stands for fewer than {NUM_SEEDS} seeds ({shown})"


def _examples(
    evaluation: Evaluation,
    judged: JudgedQueries,
    searcher: Searcher,
    ranker: Ranker,
    cells: Cells,
    keys: dict[str, str],
    pictures: Pictures | None,
) -> Examples:
    """Returns the example queries, from the cache if everything they depend on is unchanged."""
    shown = compared(evaluation)
    key = Cells.key(
        rows=keys,
        shown=[result.name for result in shown],
        texts=searcher.index.content_key(["title", "text"]),
        pictures=pictures and f"{pictures.__module__}.{pictures.__qualname__}",
    )
    examples = cells.read(key, Examples)
    if examples is None:
        chosen = choose(evaluation, shown)
        hits = {result.name: ranker.hits(result, list(chosen)) for result in shown}
        rankings = {}
        for name in hits:
            cell = cells.read(keys[name], Cell)
            assert cell is not None, "every row of this run is in the cache"
            rankings[name] = cell.rankings
        examples = describe(evaluation, judged, searcher, chosen, hits, rankings, pictures)
        cells.write(key, examples)
    return examples


def versions() -> dict[str, str]:
    """Returns the versions of this software, its dependencies and the platform."""
    packages = {"torch": "torch", "lance": "pylance", "ray": "ray", "transformers": "transformers"}
    return {
        "maxray": __version__,
        **{name: importlib.metadata.version(package) for name, package in packages.items()},
        "platform": f"{platform.platform()}, Python {platform.python_version()}",
    }


def _result(searcher: Searcher, row: Row, cell: Cell) -> Result:
    measured = cell.model_dump(exclude={"rankings"})
    if row.score == BM25:
        return Result(BM25, BM25, None, BM25, "", **measured)
    info = searcher.index.representation(row.representation)
    encoder = info.encoder.fingerprint
    if row.score == SINGLE and info.pooled_column is not None:
        return Result(info.pooled_column, SINGLE, 1, SINGLE, encoder, **measured)
    compressor = info.compressor
    with contextlib.suppress(SpecError):  # settings that are newer than the index have defaults
        compressor = dump(COMPRESSORS.resolve(compressor))
    method = method_name(compressor, info.codec, info.field)
    budget = compressor.get("num_vectors")
    named = row.representation, method, budget, row.score, encoder
    return Result(*named, **measured, compressor=compressor, codec=info.codec)


def _reranked(result: Result, second: RerankSpec) -> Result:
    """Returns the row of a reranker, given that of its first stage measured with it."""
    how = {
        "model": second.model,
        "pool": second.rerank_depth,
        "add_first_stage": second.add_first_stage,
        "precision": second.precision,
    }
    return replace(
        result,
        representation=second.row,
        method=EDJE,
        score=EDJE,
        num_vectors=None,
        compressor={},
        codec={"name": "float16"},
        weights=None,
        first_stage=result.name,
        rerank=how,
    )


def _count(index: Index, filter: str | None) -> int:
    """Returns the number of evaluated items.

    Raises:
        SpecError: The filter is invalid or selects no item.
    """
    with filtering(index, filter) as condition:
        number = index.dataset.count_rows(filter=condition)
    if filter is not None and not number:
        raise SpecError("filter", filter, "a filter that matches items", "matches none")
    return number


def _left_out(spec: EvaluateSpec, judged: JudgedQueries, index: Index) -> Iterator[str]:
    """Yields notes on queries and relevant documents that are left out.

    Raises:
        SpecError: No query has a relevant document.
    """
    yield f"{len(judged.queries)} judged queries"
    if judged.num_unjudged:
        yield f"{judged.num_unjudged} queries without judgments are left out"
    if judged.num_orphans:
        yield f"{judged.num_orphans} judged query ids without a text are left out"
    relevant = {
        document
        for grades in judged.qrels.values()
        for document, grade in grades.items()
        if grade > 0
    }
    if not relevant:
        rule = "a benchmark with a grade above 0 for at least one query"
        raise SpecError("benchmark", spec.benchmark.name, rule, "has no relevant document")
    hopeless = sum(max(grades.values(), default=0) <= 0 for grades in judged.qrels.values())
    if hopeless:
        yield f"{hopeless} queries have no relevant document and score 0 in every row"
    indexed = set()
    column = f"{spec.judged}_id"
    for batch in index.batches([column], filter=spec.filter):
        indexed |= relevant & set(batch[column].to_pylist())
    if missing := len(relevant) - len(indexed):
        yield f"{missing} of {len(relevant)} relevant documents are not in the index"
