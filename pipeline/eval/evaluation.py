"""Evaluation of the representations of an index on a benchmark, with each type of score."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import platform
import posixpath
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline import __version__, extras
from pipeline.config import SpecError, dump
from pipeline.eval import Benchmark, BenchmarkRow, JudgedQueries, Phrase, bm25
from pipeline.eval.cache import Cache, Measurements, cache_key
from pipeline.eval.diagnostics import Diagnosis
from pipeline.eval.example_selection import DrawHit, build_examples, compared_rows, select_queries
from pipeline.eval.examples import Examples
from pipeline.eval.grounding import (
    BENCHMARK_PHRASES,
    GeneratedPhrases,
    Grounder,
    check_phrases,
    generate_phrases,
    indexed_phrases,
    read_phrases,
)
from pipeline.eval.level import judged_level
from pipeline.eval.metrics import write_run
from pipeline.eval.ranker import Ranker, fitting_key
from pipeline.eval.results import (
    BM25,
    CANDIDATES,
    COSTS,
    SINGLE_VECTOR,
    Evaluation,
    Result,
    merge_seeds,
    method_name,
    sort_results,
)
from pipeline.eval.rows import Candidates, Row, planned_rows
from pipeline.eval.spec import (
    EvaluateSpec,
    RerankRow,
    headline_measure,
    with_main_measure,
)
from pipeline.eval.topics import queries_by_document_category
from pipeline.index.filters import check_matches, filtering
from pipeline.index.fitting import load_fit_sample
from pipeline.index.isotropy import isotropy_remark
from pipeline.index.languages import index_language_warnings, language_warning
from pipeline.index.listing import CONTENT, content_hashes
from pipeline.index.reader import IndexReader
from pipeline.registry import BENCHMARKS
from pipeline.runtime.atomic import check_writable
from pipeline.search.fusion import FUSED
from pipeline.search.searcher import Searcher, open_index

if TYPE_CHECKING:  # imported for evaluations with rerankers only
    from pipeline.search.rerankers import Reranker

#: Recommended number of seeds of random pruning, as in SAP's appendix C.
NUM_SEEDS = 5
#: Depths at which the recall of a candidate generator is measured.
RECALL_DEPTHS = (10, 100)


@dataclass(frozen=True)
class _Inputs:
    """Inputs of an evaluation, which are valid.

    Attributes:
        spec: Spec with the judged level and the main metric of the benchmark.
        headline: Main metric of the benchmark, or of the spec.
    """

    spec: EvaluateSpec
    benchmark: Benchmark
    judged: JudgedQueries
    headline: str
    searcher: Searcher
    num_items: int
    ranker: Ranker
    plan: list[Row]
    notes: list[str]


def run(
    spec: EvaluateSpec,
    report: Callable[[str], None],
    draw_hit: DrawHit | None = None,
    benchmark: Benchmark | None = None,
) -> Evaluation:
    """Evaluates the rows that are not cached in the output folder and writes their runs.

    Args:
        spec: Spec of the evaluation.
        report: Function that reports a line of progress.
        draw_hit: Function that draws the images of a hit in the examples. See `DrawHit`.
        benchmark: Benchmark to use in place of that of the spec.

    Raises:
        SpecError: The benchmark, the index or a representation is missing or invalid.
    """
    check_writable(spec.output, "output")
    inputs = _load(spec, benchmark or BENCHMARKS.build(spec.benchmark))
    for line in inputs.notes:
        report(line)
    inputs.ranker.report = report
    _check_names(inputs)
    categories = _document_categories(inputs)
    phrases = _phrases(inputs, report)
    cache = Cache(spec.output)
    evaluator = _Evaluator(inputs, phrases, cache)
    templates = _templates(inputs, cache)
    for name, by_kind in templates.items():
        report(f"{name}: queries are encoded as {by_kind['query']!r}")
    rows = []
    for number, row in enumerate(inputs.plan, start=1):
        result, speed = evaluator.evaluate(row)
        rows.append(result)
        quality = f"{inputs.headline} {result.means[inputs.headline]:.4f}"
        report(f"[{number}/{len(inputs.plan)}] {result.name}  {quality}  {speed}")
    results = sort_results(merge_seeds(rows))
    for line in _result_notes(results):
        inputs.notes.append(line)
        report(line)
    evaluation = _evaluation(inputs, results, categories, templates)
    examples = _examples(evaluation, inputs, cache, evaluator.keys, draw_hit)
    return replace(evaluation, examples=examples.examples)


def _load(spec: EvaluateSpec, benchmark: Benchmark) -> _Inputs:
    if spec.bm25:
        extras.require("bm25s", "Stemmer")
    judged = benchmark.load()
    spec = with_main_measure(spec, judged)
    if spec.rerank and judged.vectors is not None and not judged.has_texts:
        problem = f"needs texts, which the benchmark {spec.benchmark.name} does not contain"
        raise SpecError("rerank", spec.rerank[0].row, "absent", problem)
    searcher = open_index(spec.index)
    judged = judged.located([searcher.index], spec.filter)
    num_items = _count(searcher.index, spec.filter)
    level = judged_level(searcher.index, judged, spec.judged, spec.filter)
    spec = spec.model_copy(update={"judged": level})
    judged, num_documents = _ignored_queries(judged, searcher.index, spec)
    ranker = Ranker(spec, judged, searcher)
    notes = list(_benchmark_notes(spec, judged, searcher.index))
    if num_documents:
        notes.append(
            f"{num_documents} queries have the id of a document, which is removed from their "
            "rankings (ignore_identical_ids)"
        )
    plan = _plan(spec, judged, searcher, notes)
    compared = (row.representation for row in reversed(plan) if row.score == "maxsim")
    first = {searcher.representation(name).encoder.fingerprint: name for name in compared}
    notes += filter(None, (isotropy_remark(searcher.index, name) for name in first.values()))
    notes += index_language_warnings(searcher.index, first.values())
    if judged.vectors is None and not spec.query_vectors:
        encoders = [searcher.representation(name).encoder for name in first.values()]
        texts = list(judged.queries.values())
        found = (language_warning(texts, encoder, "queries") for encoder in encoders)
        notes += dict.fromkeys(filter(None, found))
    for row in plan:
        if row.rerank is not None:  # fails before any row is scored
            ranker.rerankers(row.rerank)
    headline = headline_measure(spec, judged)
    return _Inputs(spec, benchmark, judged, headline, searcher, num_items, ranker, plan, notes)


def _plan(
    spec: EvaluateSpec, judged: JudgedQueries, searcher: Searcher, notes: list[str]
) -> list[Row]:
    encodes = judged.vectors is None and not spec.query_vectors
    plan = list(planned_rows(spec, searcher, encodes=encodes, notes=notes))
    if spec.bm25 and not judged.has_texts:
        notes.append("no BM25 row: the queries have no texts")
    elif spec.bm25 and bm25.has_texts(searcher.index, spec.text, spec.filter):
        plan.insert(0, Row(BM25, BM25))
    elif spec.bm25:
        notes.append(f"no BM25 row: no item has a {spec.text}")
    return plan


def _document_categories(inputs: _Inputs) -> dict[str, list[str]]:
    spec = inputs.spec
    if spec.document_categories is None:
        return {}
    return queries_by_document_category(
        inputs.searcher.index, inputs.judged, spec.document_categories, spec.judged, spec.filter
    )


class _Evaluator:
    """Evaluates rows. Their measurements are cached in the output folder.

    Attributes:
        keys: Cache keys of the measurements, by result.
    """

    def __init__(self, inputs: _Inputs, phrases: Sequence[Phrase], cache: Cache):
        self._inputs, self._phrases, self._cache = inputs, phrases, cache
        self._grounder = Grounder(inputs.searcher, phrases)
        self._samples = _Samples(inputs.searcher.index, inputs.spec.filter)
        self.keys: dict[str, str] = {}

    def evaluate(self, row: Row) -> tuple[Result, str]:
        """Measures a row unless it is cached, writes its run, and returns its speed as text."""
        inputs, cache, name = self._inputs, self._cache, row.representation
        spec, ranker, index = inputs.spec, inputs.ranker, inputs.searcher.index
        key, speed = ranker.key(row), "(cached)"
        entry = cache.read(key, Measurements)
        if entry is None:
            entry = ranker.measure(row)
            cache.write(key, entry)
            speed = f"{entry.queries_per_second:,.0f} queries/s"
        exact = entry
        if row.candidates is not None:
            found = cache.read(ranker.key(row._replace(candidates=None)), Measurements)
            assert found is not None, "the exact row precedes those of its generators"
            exact = found
        result = _row_result(inputs, row, entry, exact)
        if spec.diagnostics and result.score == "maxsim":
            result = replace(result, diagnosis=_diagnosis(ranker, name, cache))
        if self._phrases and result.score == "maxsim":
            metrics = _grounding(index, self._grounder, self._phrases, name, cache)
            result = replace(result, grounding=metrics)
        if result.score in ("maxsim", "hybrid", FUSED):
            result = replace(result, fit_sample=self._samples.fit_sample(name))
        self.keys[result.name] = key
        run_file = posixpath.join(spec.output, "runs", f"{result.name}.trec")
        write_run(run_file, entry.rankings, result.name)
        seconds = len(entry.rankings) / entry.queries_per_second
        row_fields = entry.rankings, spec.k, seconds, inputs.judged.spans
        official = BenchmarkRow(result.name, result.encoder, *row_fields)
        inputs.benchmark.write_result(spec.output, official)
        return result, speed


def _evaluation(
    inputs: _Inputs,
    results: list[Result],
    document_categories: dict[str, list[str]],
    templates: dict[str, dict[str, str]],
) -> Evaluation:
    return Evaluation(
        spec=dump(inputs.spec),
        headline=inputs.headline,
        judgments=inputs.ranker.judgments,
        num_items=inputs.num_items,
        notes=inputs.notes,
        created=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        versions=versions(),
        results=results,
        document_categories=document_categories,
        query_categories=inputs.judged.categories,
        templates=templates,
    )


def _templates(inputs: _Inputs, cache: Cache) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    if inputs.judged.vectors is not None:
        return found
    names = dict.fromkeys(row.representation for row in inputs.plan if row.score != BM25)
    for representation in names:
        info = inputs.searcher.index.representation(representation).encoder
        if info.prefix in found:
            continue

        def compute(representation: str = representation) -> dict[str, str]:
            templates = inputs.ranker.query_encoder(representation).templates()
            filled = {} if templates is None else asdict(templates)
            return {name: text for name, text in filled.items() if text is not None}

        key = cache_key(templates=info.spec, instruction=inputs.judged.instruction)
        with contextlib.suppress(SpecError):  # all rows may be cached, which needs no encoder
            found[info.prefix] = cache.get(key, dict[str, str], compute)
    return {name: templates for name, templates in found.items() if templates}


class _Samples:
    """Overlap between the evaluated items and the samples on which representations were fitted."""

    def __init__(self, index: IndexReader, filter: str | None):
        self._index, self._filter = index, filter

    def fit_sample(self, representation: str) -> dict[str, Any]:
        info = self._index.representation(representation)
        sample = load_fit_sample(self._index.uri, info)
        if sample is None:
            return {}
        num_evaluated = int(np.isin(sample.items_N, self._evaluated_N).sum())
        return {
            "num_items": len(sample.items_N),
            "num_evaluated": num_evaluated,
            "origin": sample.origin,
        }

    @functools.cached_property
    def _evaluated_N(self) -> np.ndarray:
        """Content hashes of the evaluated items (N,) uint64."""
        batches = self._index.batches(CONTENT, filter=self._filter)
        return np.concatenate([np.zeros(0, np.uint64), *map(content_hashes, batches)])


def _diagnosis(ranker: Ranker, representation: str, cache: Cache) -> Diagnosis:
    key = ranker.diagnosis_key(representation)
    return cache.get(key, Diagnosis, lambda: ranker.diagnosis(representation))


def _phrases(inputs: _Inputs, report: Callable[[str], None]) -> list[Phrase]:
    """Returns the phrases for grounding, restricted to the items of the index."""
    spec, index, notes = inputs.spec, inputs.searcher.index, inputs.notes
    if spec.grounding is None:
        return []
    names = [row.representation for row in inputs.plan if row.score == "maxsim"]
    if not names:
        notes.append("no grounding: no row has the score maxsim")
        return []
    if isinstance(spec.grounding, GeneratedPhrases):
        phrases = generate_phrases(spec.grounding, index, names, spec.filter)
        if len(phrases) < spec.grounding.num_phrases:
            notes.append(f"grounding: {len(phrases)} phrases found in the texts of the items")
            report(notes[-1])
        return phrases
    if spec.grounding == BENCHMARK_PHRASES:
        phrases = inputs.benchmark.phrases()
        indexed = indexed_phrases(phrases, index, spec.filter)
        if len(indexed) < len(phrases):
            number = f"{len(phrases) - len(indexed)} of {len(phrases)} phrases"
            notes.append(f"grounding: the items of {number} are not in the index")
        phrases = indexed
    else:
        phrases = read_phrases(spec.grounding)
    check_phrases(phrases, index, names)
    return phrases


def _grounding(
    index: IndexReader, grounder: Grounder, phrases: Sequence[Phrase], name: str, cache: Cache
) -> dict[str, float]:
    columns = grounder.columns(name)
    if columns is None:
        return {}
    info = index.representation(name)
    key = cache_key(
        grounding=phrases,
        content=index.content_key(["item_id", *columns]),
        fitted=fitting_key(info),
    )
    return cache.get(key, dict[str, float], lambda: grounder.measure(name))


def _result_notes(results: Sequence[Result]) -> Iterator[str]:
    maxsim = [result for result in results if result.score == "maxsim"]
    ungrounded = [result.representation for result in maxsim if not result.grounding]
    if len(ungrounded) < len(maxsim) and ungrounded:
        yield f"no grounding for {', '.join(ungrounded)}: no stored assignments or regions"
    diagnosed = [(result, result.diagnosis) for result in results if result.diagnosis]
    if without := [result.representation for result, diagnosis in diagnosed if not diagnosis.full]:
        yield (
            f"no OSR for {', '.join(without)}: the index has no uncompressed representation "
            "(compressor none) of the encoder, or the scores are not comparable with a cosine"
        )
    retentions = [result.retention for result, _ in diagnosed if result.retention]
    if most := max((retention.num_left_out for retention in retentions), default=0):
        yield (
            f"up to {most} relevant pairs are left out of OSR: their uncompressed score is negative"
        )
    if missing := max((diagnosis.num_missing for _, diagnosis in diagnosed), default=0):
        yield f"up to {missing} relevant pairs are left out of diagnostics: the item has no vectors"
    random = [result for result in results if result.is_random and result.score == "maxsim"]
    few = {r.representation: len(r.seeds) for r in random if len(r.seeds) < NUM_SEEDS}
    if few:
        counts = ", ".join(f"{name}: {number}" for name, number in few.items())
        yield f"random pruning was measured with fewer than {NUM_SEEDS} seeds ({counts})"


def _examples(
    evaluation: Evaluation,
    inputs: _Inputs,
    cache: Cache,
    keys: dict[str, str],
    draw_hit: DrawHit | None,
) -> Examples:
    judged, searcher, ranker = inputs.judged, inputs.searcher, inputs.ranker
    shown = compared_rows(evaluation)
    key = cache_key(
        rows=keys,
        shown=[result.name for result in shown],
        texts=searcher.index.content_key(["title", "text"]),
        draw_hit=draw_hit and f"{draw_hit.__module__}.{draw_hit.__qualname__}",
    )

    def compute() -> Examples:
        chosen = select_queries(evaluation, shown)
        hits = {result.name: ranker.hits(result, list(chosen)) for result in shown}
        rankings = {}
        for name in hits:
            entry = cache.read(keys[name], Measurements)
            assert entry is not None, "every row of this run is in the cache"
            rankings[name] = entry.rankings
        return build_examples(evaluation, judged, searcher, chosen, hits, rankings, draw_hit)

    return cache.get(key, Examples, compute)


def versions() -> dict[str, str]:
    """Returns the versions of Maxray and its main dependencies, and the platform."""
    packages = {"torch": "torch", "lance": "pylance", "ray": "ray", "transformers": "transformers"}
    return {
        "maxray": __version__,
        **{name: importlib.metadata.version(package) for name, package in packages.items()},
        "platform": f"{platform.platform()}, Python {platform.python_version()}",
    }


def hardware() -> str:
    """Returns the names of the GPUs of this process, or of the processor without one."""
    import torch  # a report does not need it

    if gpus := [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]:
        return ", ".join(gpus)
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _check_names(inputs: _Inputs) -> None:
    """Raises `SpecError` if the spec names a row or a method that the evaluation will not have."""
    if not (inputs.spec.comparisons or inputs.spec.labels):
        return
    costs: dict[str, Any] = dict.fromkeys(COSTS, 0.0)
    empty = Measurements(rankings={}, values={}, **costs)
    rows = merge_seeds([_row_result(inputs, row, empty, empty) for row in inputs.plan])
    names = [result.name for result in rows]
    for number, pair in enumerate(inputs.spec.comparisons):
        for name in pair:
            if name not in names:
                raise SpecError.unknown_name(f"comparisons[{number}]", name, names)
    methods = dict.fromkeys(result.method for result in rows)
    for name in inputs.spec.labels.keys() - methods:
        raise SpecError.unknown_name("labels", name, methods)


def _row_result(inputs: _Inputs, row: Row, entry: Measurements, exact: Measurements) -> Result:
    """Builds a row from its measurements and, for a candidate generator, those of exact search."""
    spec, weights = inputs.spec, inputs.ranker.weights(row.score)
    result = replace(_result(inputs.searcher, row, entry), weights=weights)
    if row.score == FUSED:
        maxsim = row._replace(score="maxsim")
        first_stage = f"{row.representation}.maxsim" if maxsim in inputs.plan else ""
        result = replace(result, fusion=dump(spec.fusion), first_stage=first_stage)
    if row.rerank is not None:
        result = reranked_result(result, row.rerank, inputs.ranker.rerankers(row.rerank), entry)
    if row.candidates is not None:
        result = _from_candidates(result, row.candidates, entry, exact, spec.k)
    return result


def _result(searcher: Searcher, row: Row, entry: Measurements) -> Result:
    measured = entry.model_dump(exclude={"rankings", "rerank_usage"})
    if row.score == BM25:
        return Result(BM25, BM25, None, BM25, "", **measured)
    info = searcher.index.representation(row.representation)
    encoder = info.encoder.fingerprint
    if row.score == SINGLE_VECTOR and info.pooled_column is not None:
        return Result(info.pooled_column, SINGLE_VECTOR, 1, SINGLE_VECTOR, encoder, **measured)
    compressor = info.compressor
    method = method_name(compressor, info.codec, info.field)
    if info.max_vectors is not None:  # has the budget of the prefix
        compressor = {**compressor, "num_vectors": info.num_vectors, "ratio": info.ratio}
    return Result(
        row.representation,
        method,
        compressor.get("num_vectors"),
        row.score,
        encoder,
        **measured,
        compressor=compressor,
        codec=info.codec,
    )


def reranked_result(
    result: Result, row: RerankRow, rerankers: Sequence[Reranker[Any]], entry: Measurements
) -> Result:
    """Returns the row of rerankers, given a row with its measurements and the first stage."""
    known = [r.num_parameters for r in rerankers if r.num_parameters is not None]
    settings = {
        "rerankers": [dump(reranker.spec) for reranker in rerankers],
        "parameters": sum(known) if len(known) == len(rerankers) else None,
    }
    return replace(
        result,
        representation=row.row,
        method=row.method,
        score=row.method,
        num_vectors=None,
        compressor={},
        codec={"name": "float16"},
        weights=None,
        first_stage=result.name,
        rerank={**settings, **entry.rerank_usage},
    )


def _from_candidates(
    result: Result, candidates: Candidates, entry: Measurements, exact: Measurements, k: int
) -> Result:
    settings = {"generator": candidates.generator, "num_candidates": candidates.number}
    recall = {
        f"recall@{depth}": exact_recall(entry.rankings, exact.rankings, depth)
        for depth in RECALL_DEPTHS
        if depth <= k
    }
    return replace(
        result,
        representation=f"{result.representation}.{candidates.generator}-{candidates.number}",
        method=CANDIDATES,
        score=CANDIDATES,
        first_stage=result.name,
        candidates={**settings, **recall},
    )


def exact_recall(
    rankings: Mapping[str, Mapping[str, float]],
    exact: Mapping[str, Mapping[str, float]],
    depth: int,
) -> float:
    """Returns the mean share of the `depth` best exact results that the rankings contain.

    Results with the score of the last one count as equal. Rankings hold scores, best first.

    >>> exact_recall({"q": {"a": 3.0, "c": 1.0}}, {"q": {"a": 3.0, "b": 2.0}}, 2)
    0.5
    >>> exact_recall({"q": {"c": 2.0}}, {"q": {"b": 2.0, "c": 2.0}}, 1)
    1.0
    """
    shares = []
    for query_id, scores in exact.items():
        wanted = sorted(scores.values(), reverse=True)[:depth]
        if wanted:
            limit = wanted[-1] - 1e-6 * abs(wanted[-1])
            found = sum(score >= limit for score in rankings[query_id].values())
            shares.append(min(found, len(wanted)) / len(wanted))
    return float(np.mean(shares)) if shares else 1.0


def _count(index: IndexReader, filter: str | None) -> int:
    with filtering(index, filter) as condition:
        number = index.dataset.count_rows(filter=condition)
    if filter is not None:
        check_matches(number, filter)
    return number


def _benchmark_notes(
    spec: EvaluateSpec, judged: JudgedQueries, index: IndexReader
) -> Iterator[str]:
    yield f"{len(judged.queries)} judged queries"
    if judged.num_unjudged:
        yield f"{judged.num_unjudged} queries without judgments are left out"
    if judged.num_without_text:
        yield f"{judged.num_without_text} judged query ids without a text or vectors are left out"
    relevant = {
        document
        for grades in judged.qrels.values()
        for document, grade in grades.items()
        if grade > 0
    }
    if judged.moments is not None:
        yield from judged.moments.notes()
    elif not relevant:
        rule = "a benchmark with a grade above 0 for at least one query"
        raise SpecError("benchmark", spec.benchmark.name, rule, "has no relevant document")
    if judged.pools is not None:
        sizes = [len(pool) for pool in judged.pools.values()]
        yield f"each query ranks a candidate pool of {_range(sizes)} documents"
    num_without = sum(max(grades.values(), default=0) <= 0 for grades in judged.qrels.values())
    if num_without and judged.moments is None:
        yield f"{num_without} queries have no relevant document and score 0 in every row"
    pooled = {document for pool in (judged.pools or {}).values() for document in pool}
    indexed = set()
    column = f"{spec.judged}_id"
    for batch in index.batches([column], filter=spec.filter):
        indexed |= (relevant | pooled) & set(batch[column].to_pylist())
    if missing := len(relevant) - len(relevant & indexed):
        yield f"{missing} of {len(relevant)} relevant documents are not in the index"
    if missing := len(pooled) - len(pooled & indexed):
        yield f"{missing} of {len(pooled)} documents of the pools are not in the index"


def _ignored_queries(
    judged: JudgedQueries, index: IndexReader, spec: EvaluateSpec
) -> tuple[JudgedQueries, int]:
    """Counts the queries that are documents themselves and are removed from their rankings.

    Without any, the rankings do not depend on `ignore_query_id`, so that it is set to False and
    their cache keys are those of a benchmark without the option.
    """
    if not judged.ignore_query_id:
        return judged, 0
    column = f"{spec.judged}_id"
    queries = {query_id for query_id in judged.queries if judged.is_query(query_id, query_id)}
    found: set[str] = set()
    for batch in index.batches([column], filter=spec.filter):
        found |= queries & set(batch[column].to_pylist())
    return replace(judged, ignore_query_id=bool(found)), len(found)


def _range(numbers: Sequence[int]) -> str:
    """Formats the range of numbers.

    >>> _range([10, 10]), _range([2, 1000])
    ('10', '2 to 1,000')
    """
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
