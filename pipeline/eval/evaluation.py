"""Evaluates the representations of an index under each score on one benchmark."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import platform
import posixpath
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field, PositiveInt, field_validator, model_validator

import pipeline
from pipeline.atomic import check_writable
from pipeline.config import Spec, SpecError, Uri, digest, dump
from pipeline.encoders import EncodedQueries
from pipeline.eval import JudgedQueries, bm25
from pipeline.eval.cells import Cell, Cells, Diagnosed, Grounded
from pipeline.eval.diagnose import Diagnoser, full_tokens_of
from pipeline.eval.diagnostics import Diagnosis
from pipeline.eval.example_selection import NUM_HITS, Pictures, choose, compared, describe
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
from pipeline.eval.metrics import DEFAULT_MEASURES, parse_measure, per_query, write_run
from pipeline.eval.results import (
    BM25,
    EDJE,
    SINGLE,
    SIZES,
    Evaluation,
    Result,
    in_order,
    merge_seeds,
    method_name,
)
from pipeline.eval.topics import read_query_vectors
from pipeline.index.columns import RERANK_TOKENS, codec_fitted_for
from pipeline.index.filters import filtering
from pipeline.index.fitting import is_fitted, stored_sample
from pipeline.index.listing import CONTENT, content_hashes
from pipeline.index.reader import Index, both
from pipeline.index.status import stored, stored_tokens
from pipeline.registry import BENCHMARKS, COMPRESSORS, BenchmarkSpec
from pipeline.schema import ITEM, POOL, Hit, Precision
from pipeline.search.searcher import (
    EQUAL,
    LEGAL_WEIGHTS,
    SCORES,
    Score,
    Searcher,
    Weights,
    are_weights,
    open_index,
)

if TYPE_CHECKING:
    from pipeline.search.rerank import Reranker

AnyQueries = EncodedQueries | list[np.ndarray]

#: So many queries are scored one at a time for the latency.
ALONE = 50
#: Random pruning stands for so many seeds, as in SAP's appendix C.
NUM_SEEDS = 5


class RerankSpec(Spec):
    """A second stage that has a row of the table.

    Attributes:
        model: the folder of an EDJE, whose adapter's tokens are in the index.
        pool: how many items (of parents, each the best) of the first stage are reranked.
        add_first_stage: whether its score is added.
        precision: in which the joint encoder computes; null: as its folder says.
        representation, score: the first stage; default: the single score if there is one, else the
            late one of `full` or the first.
        label: what the row is called; default: of the above, such as edje_10 or edje_10_int8.
    """

    name: Literal["edje"] = "edje"
    model: Uri
    pool: PositiveInt = POOL
    add_first_stage: bool = False
    precision: Precision | None = None
    representation: str | None = None
    score: Score | None = None
    label: str = Field("", pattern=r"^[\w.-]*$")

    @property
    def row(self) -> str:
        """The name of its row."""
        parts = [EDJE, str(self.pool)]
        if self.add_first_stage:
            parts.append("added")
        if self.precision:
            parts.append(self.precision)
        return self.label or "_".join(parts)


class EvaluateSpec(Spec):
    """What `jobs.evaluate` computes.

    Attributes:
        index: the URI of an index.
        benchmark: where the judged queries come from.
        output: the folder of the results.
        representations: their names; empty for all of the index.
        query_vectors: for an index of your own vectors, the queries' too: Parquet with the columns
            `id` and `vectors`; empty: the encoder reads the queries' texts.
        scores: late, hybrid, single; empty for all that the index has vectors for.
        weights: of the single and the late score in the hybrid one, such as [1, 0.25].
        measures: names of ir-measures.
        k: hits per query: no measure sees deeper.
        judged: what the judgments name: items, or their parents, of which the best item counts;
            auto: the level at which their ids are in the index.
        bm25: whether BM25 over the items' texts has a row.
        text: what BM25 reads: the texts, or the captions.
        where: a Lance filter over the items' columns, such as "source = 'letters'": the benchmark
            is about these items alone, and no others are searched.
        diagnostics: whether late rows are diagnosed: score retention, use of the vectors, evenness
            and similarity; takes about as long again as ranking.
        grounding: phrases with the boxes in which they stand, for how well late rows locate them: a
            JSONL file, or how to draw phrases from the items' own text; null for none.
        rerank: second stages, each with a row of its own.
        kinds: an item column such as modality, or metadata.KEY: the report has a table by kind of
            the relevant documents; null for none.
    """

    index: str
    benchmark: BenchmarkSpec
    output: str
    query_vectors: str = ""
    representations: list[str] = Field(default_factory=list)
    scores: list[Score] = Field(default_factory=list)
    weights: Weights = EQUAL
    measures: list[str] = Field(default_factory=lambda: list(DEFAULT_MEASURES))
    k: PositiveInt = 100
    judged: Literal["auto", "parent", "item"] = "auto"
    bm25: bool = True
    text: Literal["text", "caption"] = "text"
    where: str | None = None
    diagnostics: bool = True
    grounding: Generated | str | None = None
    kinds: str | None = None
    rerank: list[RerankSpec] = Field(default_factory=list)

    @field_validator("rerank")
    @classmethod
    def _other_names(cls, rerank: list[RerankSpec]) -> list[RerankSpec]:
        names = [each.row for each in rerank]
        for name in names:
            if names.count(name) > 1:
                raise SpecError("", name, "a different `label` for each", "is named twice")
        return rerank

    @field_validator("measures")
    @classmethod
    def _some_measure(cls, names: list[str]) -> list[str]:
        if not names:
            raise SpecError("", names, "at least one name of ir-measures")
        return names

    @field_validator("weights", mode="before")
    @classmethod
    def _legal_weights(cls, weights: Any) -> Any:
        if not are_weights(weights):
            raise SpecError("", weights, LEGAL_WEIGHTS)
        return weights

    @model_validator(mode="after")
    def _weights_of_something(self) -> EvaluateSpec:
        if self.weights != EQUAL and self.scores and "hybrid" not in self.scores:
            problem = "mean nothing without the score hybrid"
            raise SpecError("weights", list(self.weights), "hybrid among the scores", problem)
        return self

    @model_validator(mode="after")
    def _deep_enough(self) -> EvaluateSpec:
        for name in self.measures:  # a name that is no measure says so itself
            depth = parse_measure(name).params.get("cutoff", 0)
            if depth > self.k:
                raise SpecError("k", self.k, f"at least {depth}, for {name}")
        return self


class Row(NamedTuple):
    """What a row of the table ranks by: a representation and a score, or BM25 twice.

    Of a reranker these are what its first stage ranks by.
    """

    representation: str
    score: Score | Literal["bm25"]
    rerank: RerankSpec | None = None


def run(
    spec: EvaluateSpec, say: Callable[[str], None], pictures: Pictures | None = None
) -> Evaluation:
    """Evaluates rows that are not cached in the output folder, and writes their runs there.

    Args:
        pictures: Draws the images of a hit in the examples, see `Pictures`.

    Raises:
        SpecError: The benchmark, the index or a representation is missing or invalid.
    """
    check_writable(spec.output, "output")
    judged = BENCHMARKS.build(spec.benchmark).load()
    searcher = open_index(spec.index)
    num_items = _count(searcher.index, spec.where)
    level = judged_level(searcher.index, judged, spec.judged, spec.where)
    spec = spec.model_copy(update={"judged": level})
    ranker = _Ranker(spec, judged, searcher)
    notes = list(_left_out(spec, judged, searcher.index))
    plan = list(_plan(spec, searcher))
    if spec.bm25 and bm25.has_texts(searcher.index, spec.text, spec.where):
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
        by_kind = queries_by_kind(searcher.index, judged, spec.kinds, spec.judged, spec.where)
    phrases = _phrases(spec, searcher, plan)
    if isinstance(spec.grounding, Generated) and len(phrases) < spec.grounding.num_phrases:
        notes.append(f"grounding: {len(phrases)} phrases found in the items' texts")
        say(notes[-1])
    grounder = Grounder(searcher, phrases)

    samples = _Samples(searcher.index, spec.where)
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
    """The samples that representations were fitted on, beside the items that are evaluated."""

    def __init__(self, index: Index, where: str | None):
        self._index, self._where = index, where

    def fitted(self, representation: str) -> dict[str, Any]:
        """Returns what a representation was fitted on, see `Result.fitted`."""
        metadata = self._index.representation(representation)
        if not is_fitted(metadata):
            return {}
        sample = stored_sample(self._index.uri, metadata)
        if sample is None:
            return {"num_items": None, "evaluated": None, "origin": {}}
        number = int(np.isin(sample.items_N, self._evaluated_N).sum())
        return {"num_items": len(sample.items_N), "evaluated": number, "origin": sample.origin}

    @functools.cached_property
    def _evaluated_N(self) -> np.ndarray:
        """(N,) uint64 hashes of the items that are evaluated."""
        batches = self._index.batches(CONTENT, where=self._where)
        return np.concatenate([np.zeros(0, np.uint64), *map(content_hashes, batches)])


def _diagnosis(ranker: _Ranker, representation: str, cells: Cells) -> Diagnosis:
    """The diagnosis of a representation, as it was kept if all that decides it is as before."""
    key = ranker.diagnosis_key(representation)
    kept = cells.read(key, Diagnosed)
    if kept is None:
        kept = Diagnosed(diagnosis=ranker.diagnosis(representation))
        cells.write(key, kept)
    return kept.diagnosis


def _phrases(spec: EvaluateSpec, searcher: Searcher, plan: Sequence[Row]) -> list[Phrase]:
    """The phrases to ground, if any are asked for.

    Raises:
        SpecError: they are not legal, or their items are not there or have no places.
    """
    if spec.grounding is None:
        return []
    names = [row.representation for row in plan if row.score == "late"]
    if isinstance(spec.grounding, Generated):
        return generate_phrases(spec.grounding, searcher.index, names, spec.where)
    phrases = read_phrases(spec.grounding)
    check_phrases(phrases, searcher.index, names)
    return phrases


def _grounding(
    index: Index, grounder: Grounder, phrases: Sequence[Phrase], name: str, cells: Cells
) -> dict[str, float]:
    """The grounding measures of a representation, as they were kept if all is as before."""
    columns = grounder.columns(name)
    if columns is None:
        return {}
    about = index.representation(name)
    key = Cells.key(
        grounding=phrases,
        content=index.content_key(["item_id", *columns]),
        made=_made(about),
    )
    kept = cells.read(key, Grounded)
    if kept is None:
        kept = Grounded(numbers=grounder.measure(name))
        cells.write(key, kept)
    return kept.numbers


def _remarks(results: Sequence[Result]) -> Iterator[str]:
    """What is to be known of the diagnostics and of the rows that stand for seeds."""
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
    ranker: _Ranker,
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
    """What an evaluation was made with."""
    packages = {"torch": "torch", "lance": "pylance", "ray": "ray", "transformers": "transformers"}
    return {
        "maxray": pipeline.__version__,
        **{name: importlib.metadata.version(package) for name, package in packages.items()},
        "platform": f"{platform.platform()}, Python {platform.python_version()}",
    }


class _Ranker:
    """Ranks the judged queries by one row after the other; loads what that takes when it must."""

    def __init__(self, spec: EvaluateSpec, judged: JudgedQueries, searcher: Searcher):
        self._spec, self._judged, self._searcher = spec, judged, searcher
        self._group_by = "parent" if spec.judged == "parent" else None
        self._encoded: dict[str, EncodedQueries] = {}
        self._vectors = _own_vectors(spec, judged) if spec.query_vectors else None
        self._hash_of_vectors = self._vectors and _hash_of(self._vectors)
        self._diagnoser: Diagnoser | None = None
        self._rerankers: dict[str, Reranker] = {}
        self._joints: dict[tuple[str, str | None], Reranker] = {}  # by folder and precision
        self.judgments = digest([judged.queries, judged.qrels, spec.judged])

    def key(self, row: Row) -> str:
        """The hash of all that decides what `cell` gives."""
        index = self._searcher.index
        if row.score == BM25:
            columns = ["item_id", "parent_id", self._spec.text, *self._filtered]
            decides: dict[str, Any] = {
                "content": index.content_key(columns),
                "text": self._spec.text,
            }
        else:
            about = index.representation(row.representation)
            columns = ["item_id", "parent_id", *_columns(row, about), *self._filtered]
            decides = {
                "content": index.content_key(columns),
                "encoder": about["fingerprint"],
                "codec": None if row.score == SINGLE else about["codec"],
                "vectors": self._hash_of_vectors,
            }
        return Cells.key(
            **decides,
            score=row.score,
            judgments=self.judgments,
            measures=self._spec.measures,
            k=self._spec.k,
            **({"where": self._spec.where} if self._spec.where else {}),
            **({"weights": weights} if (weights := self.weights(row.score)) else {}),
            **({"rerank": self._decides(row.rerank)} if row.rerank else {}),
        )

    def reranker(self, spec: RerankSpec) -> Reranker:
        """The second stage of a row, loaded once.

        Raises:
            SpecError: it is not there, or cannot read what the index has.
        """
        if spec.row not in self._rerankers:
            loaded = self._joint(spec)
            self._rerankers[spec.row] = loaded.with_pool(spec.pool, spec.add_first_stage)
        return self._rerankers[spec.row]

    def _joint(self, spec: RerankSpec) -> Reranker:
        """What the rows of a folder and precision share, whatever their pools."""
        which = spec.model, spec.precision
        if which not in self._joints:
            from pipeline.search.rerank import Reranker

            try:
                reranker = Reranker(spec.model, precision=spec.precision)
                reranker.check(self._searcher.index, list(self._judged.queries.values()))
            except SpecError as error:  # of one of several
                field = f"rerank.{self._spec.rerank.index(spec)}.model"
                raise SpecError(field, error.value, error.legal, error.problem) from None
            self._joints[which] = reranker
        return self._joints[which]

    def _decides(self, spec: RerankSpec) -> list[Any]:
        """All of a second stage that decides what it gives."""
        index, reranker = self._searcher.index, self.reranker(spec)
        stored = index.content_key([RERANK_TOKENS])
        decides = [stored, reranker.about["fingerprints"], spec.pool, spec.add_first_stage]
        return [*decides, spec.precision] if spec.precision else decides

    def weights(self, score: str) -> list[float] | None:
        """The weights of a score, where they are not equal."""
        weighted = score == "hybrid" and self._spec.weights != EQUAL
        return list(self._spec.weights) if weighted else None

    def diagnosis_key(self, representation: str) -> str:
        """The hash of all that decides what `diagnosis` gives."""
        index = self._searcher.index
        names = [representation, full_tokens_of(index, representation)]
        columns = ["item_id", "parent_id", *filter(None, names), *self._filtered]
        abouts = [index.representation(name) for name in names if name]
        return Cells.key(
            diagnosis=names,
            content=index.content_key(columns),
            made=[_made(about) for about in abouts],
            vectors=self._hash_of_vectors,
            judgments=self.judgments,
            where=self._spec.where,
        )

    def diagnosis(self, representation: str) -> Diagnosis:
        """Diagnoses a representation on all judged queries."""
        if self._diagnoser is None:
            spec, everyone = self._spec, range(len(self._judged.queries))
            assert spec.judged != "auto"
            self._diagnoser = Diagnoser(
                self._searcher,
                self._judged,
                spec.judged,
                spec.where,
                lambda name: self._queries(name, everyone),
            )
        return self._diagnoser.diagnose(representation)

    @property
    def _filtered(self) -> list[str]:
        """Columns that may decide which items take part."""
        return ITEM.names if self._spec.where else []

    def cell(self, row: Row) -> Cell:
        """Ranks every query by the row: all at once, then some one at a time."""
        rank = self._by_words() if row.score == BM25 else self._by_vectors(row)
        everyone = range(len(self._judged.queries))
        rank(everyone[:1])  # whatever is done once is done now
        start = time.perf_counter()
        ranked = rank(everyone)
        seconds = time.perf_counter() - start
        alone = []
        for place in everyone[:ALONE]:
            start_alone = time.perf_counter()
            rank([place])
            alone.append(1000 * (time.perf_counter() - start_alone))
        rankings = dict(zip(self._judged.queries, ranked, strict=True))
        return Cell(
            rankings=rankings,
            values=per_query(rankings, self._judged.qrels, self._spec.measures),
            **self._all_sizes(row),
            queries_per_second=len(everyone) / seconds,
            median_ms=float(np.median(alone)),
            p95_ms=float(np.percentile(alone, 95)),
        )

    def _all_sizes(self, row: Row) -> dict[str, float]:
        """What a row's score reads of an item; of a reranker with its tokens."""
        index, where = self._searcher.index, self._spec.where
        sizes = _sizes(index, row, where)
        if row.rerank is not None:
            tokens = stored_tokens(index, where)
            assert tokens is not None, "the reranker was checked against the index"
            sizes["vectors_per_item"] += tokens["tokens"]
            for name in ("vector_bytes", "all_bytes"):
                sizes[name] += tokens["bytes"]
        return sizes

    def hits(self, result: Result, query_ids: Sequence[str]) -> list[list[Hit]]:
        """The best hits of some queries with all that explains them."""
        if not query_ids:
            return []
        places = {query_id: place for place, query_id in enumerate(self._judged.queries)}
        queries = self._queries(result.representation, [places[q] for q in query_ids])
        how = {"k": NUM_HITS, **self._how(result.score)}
        return self._searcher.search(queries, result.representation, **how)

    def _by_words(self) -> Callable[[Sequence[int]], list[dict[str, float]]]:
        spec = self._spec
        ranker = bm25.Bm25(self._searcher.index, spec.judged, spec.text, spec.where)
        texts = list(self._judged.queries.values())
        return lambda places: ranker.rank([texts[place] for place in places], self._spec.k)

    def _by_vectors(self, row: Row) -> Callable[[Sequence[int]], list[dict[str, float]]]:
        name = row.representation
        assert row.score != BM25
        self._searcher.load(name, row.score)
        second, texts = row.rerank, list(self._judged.queries.values())
        depth = self._spec.k if second is None else max(self._spec.k, second.pool)
        how = {"k": depth, **self._how(row.score)}

        def rank(places: Sequence[int]) -> list[dict[str, float]]:
            rankings = self._searcher.rank(self._queries(name, places), name, **how)
            if second is not None:
                given = self._searcher, [texts[place] for place in places]
                rankings = self.reranker(second).rerank(*given, rankings, self._spec.k)
            if self._group_by:
                return [ranking.scores_by_parent() for ranking in rankings]
            return [ranking.scores_by_item() for ranking in rankings]

        return rank

    def _how(self, score: str) -> dict[str, Any]:
        how = {"score": score, "group_by": self._group_by, "where": self._spec.where}
        return {**how, "weights": self.weights(score) or EQUAL}

    def _queries(self, representation: str, places: Sequence[int]) -> AnyQueries:
        """Some of the judged queries as vectors: the caller's, or those of the encoder."""
        if self._vectors is not None:
            return [self._vectors[place] for place in places]
        encoder = self._searcher.index.representation(representation)["fingerprint"]
        if encoder not in self._encoded:
            texts = list(self._judged.queries.values())
            self._encoded[encoder] = self._searcher.encoder(representation).encode_queries(texts)
        encoded = self._encoded[encoder]
        tokens = encoded.tokens.take(torch.tensor(places))
        return EncodedQueries(tokens, [encoded.token_texts[place] for place in places])


def _own_vectors(spec: EvaluateSpec, judged: JudgedQueries) -> list[np.ndarray]:
    """The caller's vectors of the judged queries, in order."""
    vectors = read_query_vectors(spec.query_vectors)
    for query_id in judged.queries:
        if query_id not in vectors:
            legal = "vectors for every judged query"
            raise SpecError("query_vectors", query_id, legal, "is judged and has no vectors")
    return [vectors[query_id] for query_id in judged.queries]


def _hash_of(vectors: Sequence[np.ndarray]) -> str:
    hashed = hashlib.blake2b(digest_size=8)
    for array in vectors:
        hashed.update(repr(array.shape).encode() + np.ascontiguousarray(array).tobytes())
    return hashed.hexdigest()


def _made(about: dict[str, Any]) -> list[Any]:
    """How a representation was made, for the hash of what is computed of it."""
    codec_artefact = about.get("codec_artefact")
    return [*codec_fitted_for(about).values(), *([codec_artefact] if codec_artefact else [])]


def _columns(row: Row, about: dict[str, Any]) -> list[str]:
    """The columns that a row's vectors and its sizes are read from."""
    pooled = [] if row.score == "late" else [about["pooled"]]
    if row.score == SINGLE:
        return pooled
    others = [about.get("support"), *about["positions"].values()]
    return [row.representation, *filter(None, others), *pooled]


def _plan(spec: EvaluateSpec, searcher: Searcher) -> Iterator[Row]:
    """The rows of the table; each encoder's single vector once, first.

    Raises:
        SpecError: a representation is not there, or has no single vectors and a score needs them.
    """
    names = spec.representations or _filled(searcher.index, spec.where)
    if not names:
        raise SpecError("index", spec.index, "an index with a representation", "has none")
    abouts = {name: searcher.representation(name)[1] for name in names}
    for name, about in abouts.items():
        needy = [score for score in spec.scores if score != "late"]
        if needy and about["pooled"] is None:
            problem = f"needs single vectors, and {name} has none"
            raise SpecError("scores", needy[0], "late", problem)
    scores = spec.scores or SCORES
    if SINGLE in scores:
        by_column = {about["pooled"]: name for name, about in abouts.items() if about["pooled"]}
        yield from (Row(name, SINGLE) for name in by_column.values())
    for name, about in abouts.items():
        for score in scores:
            if score != SINGLE and (score == "late" or about["pooled"]):
                yield Row(name, score)
    for second in spec.rerank:
        yield _first_stage(second, searcher, names)


def _first_stage(second: RerankSpec, searcher: Searcher, names: Sequence[str]) -> Row:
    """The row of a reranker, with what its first stage ranks by.

    Raises:
        SpecError: the representation is not there, or has no single vectors and the score needs
            them.
    """
    name = second.representation or ("full" if "full" in names else names[0])
    name, about = searcher.representation(name)
    score: Score = second.score or (SINGLE if about["pooled"] else "late")
    if score != "late" and about["pooled"] is None:
        problem = f"needs single vectors, and {name} has none"
        raise SpecError("rerank.score", score, "late", problem)
    return Row(name, score, second)


def _filled(index: Index, where: str | None) -> list[str]:
    """The representations that any of the items has."""
    filled = {name: both(where, f"`{name}` IS NOT NULL") for name in index.representations()}
    return [
        name
        for name, has in filled.items()
        if any(batch.num_rows for batch in index.batches(["item_id"], where=has))
    ]


def _result(searcher: Searcher, row: Row, cell: Cell) -> Result:
    measured = cell.model_dump(exclude={"rankings"})
    if row.score == BM25:
        return Result(BM25, BM25, None, BM25, "", **measured)
    about = searcher.index.representation(row.representation)
    encoder = about["fingerprint"]
    if row.score == SINGLE:
        return Result(about["pooled"], SINGLE, 1, SINGLE, encoder, **measured)
    compressor = about["compressor"]
    with contextlib.suppress(SpecError):  # settings that are newer than the index have defaults
        compressor = dump(COMPRESSORS.resolve(compressor))
    method = method_name(compressor, about["codec"], about.get("of", "content"))
    budget = compressor.get("num_vectors")
    named = row.representation, method, budget, row.score, encoder
    return Result(*named, **measured, compressor=compressor, codec=about["codec"])


def _reranked(result: Result, second: RerankSpec) -> Result:
    """The row of a reranker, from that of its first stage as it was measured with it."""
    how = {"model": second.model, "pool": second.pool, "add_first_stage": second.add_first_stage}
    how |= {"precision": second.precision}
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


def _sizes(index: Index, row: Row, where: str | None) -> dict[str, float]:
    """Vectors and bytes per item of what the row's score reads."""
    sizes = dict.fromkeys(SIZES, 0.0)
    if row.score in ("late", "hybrid"):
        there = stored(index, row.representation, where)
        parts = ("vectors", "bytes_vectors", "bytes_assignment", "bytes_positions", "bytes_all")
        sizes = {name: float(there[kind]) for name, kind in zip(SIZES, parts, strict=True)}
    if row.score in (SINGLE, "hybrid"):
        pooled = index.representation(row.representation)["pooled"]
        type = index.schema.field(pooled).type
        sizes["vectors_per_item"] += 1
        for name in ("vector_bytes", "all_bytes"):
            sizes[name] += type.list_size * type.value_type.bit_width / 8
    return sizes


def _count(index: Index, where: str | None) -> int:
    """How many items take part.

    Raises:
        SpecError: the filter is none, or lets nothing through.
    """
    with filtering(index, where) as condition:
        number = index.dataset.count_rows(filter=condition)
    if where is not None and not number:
        raise SpecError("where", where, "a filter that lets items through", "lets none through")
    return number


def _left_out(spec: EvaluateSpec, judged: JudgedQueries, index: Index) -> Iterator[str]:
    """What of the benchmark does not take part, or cannot be found."""
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
    there = set()
    column = f"{spec.judged}_id"
    for batch in index.batches([column], where=spec.where):
        there |= relevant & set(batch[column].to_pylist())
    if missing := len(relevant) - len(there):
        yield f"{missing} of {len(relevant)} relevant documents are not in the index"
