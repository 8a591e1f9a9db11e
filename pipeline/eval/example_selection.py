"""Selection of example queries: losses and gains by compression, and failures of all rows."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence

from pipeline.eval import JudgedQueries
from pipeline.eval.examples import (
    HIGHLIGHT_DELIMITERS,
    Document,
    Example,
    Examples,
    HitImage,
    Reason,
)
from pipeline.eval.results import Evaluation, Result, query_differences
from pipeline.index.reader import IndexReader, quote
from pipeline.search.explain import highlighted_spans, snippet
from pipeline.search.results import Hit
from pipeline.search.searcher import Searcher

#: Function that draws a hit: (searcher, query text, hit, representation) -> captions and PNG files.
#: Its qualified name is part of the cache key of the examples.
DrawHit = Callable[[Searcher, str, Hit, str], list[tuple[str, bytes]]]

#: Maximum number of examples that lost, that won and that failed, and of hits and judged documents
#: per example.
NUM_CHANGED, NUM_FAILED, NUM_HITS, NUM_JUDGED = 3, 2, 3, 5
#: A query fails if the headline metric of every row is below this value.
FAILURE_THRESHOLD = 0.2


def compared_rows(evaluation: Evaluation) -> list[Result]:
    """Selects the rows whose hits are shown, which are the reference and a compressed row.

    The compressed row is the cheapest one that retains the quality of the uncompressed rows. If
    there is none, it is the best compressed row. If no row is compressed, only the best
    multi-vector row is shown.
    """
    tokens = [result for result in evaluation.results if result.score in ("maxsim", "hybrid")]
    compressed = [result for result in tokens if result.is_compressed]
    shown = evaluation.cheapest(compressed) or evaluation.best(compressed)
    if shown is None:
        best = evaluation.best(tokens)
        return [] if best is None else [best]
    reference = evaluation.row(evaluation.comparison(shown).reference)
    return [shown] if reference is shown else [reference, shown]


def select_queries(evaluation: Evaluation, shown: list[Result]) -> dict[str, Reason]:
    """Selects the queries with the largest losses and gains, and those on which all rows fail."""
    chosen: dict[str, Reason] = {}
    if len(shown) == 2:
        reference, compressed = shown
        gains = query_differences(compressed, reference, evaluation.headline).tolist()
        by_gain = sorted(zip(gains, compressed.values, strict=True), key=lambda pair: pair[0])
        lost = [query_id for gain, query_id in by_gain if gain < 0][:NUM_CHANGED]
        won = [query_id for gain, query_id in reversed(by_gain) if gain > 0][:NUM_CHANGED]
        chosen = {**dict.fromkeys(lost, "lost"), **dict.fromkeys(won, "won")}
    if shown:
        best = {
            query_id: max(evaluation.value(row.name, query_id) for row in evaluation.results)
            for query_id in shown[0].values
            if query_id not in chosen
        }
        failed = [
            query_id
            for query_id in sorted(best, key=best.__getitem__)
            if best[query_id] < FAILURE_THRESHOLD
        ]
        chosen |= dict.fromkeys(failed[:NUM_FAILED], "failed")
    return chosen


def build_examples(
    evaluation: Evaluation,
    judged: JudgedQueries,
    searcher: Searcher,
    chosen: Mapping[str, Reason],
    hits: Mapping[str, list[list[Hit]]],
    rankings: Mapping[str, Mapping[str, Mapping[str, float]]],
    draw_hit: DrawHit | None,
) -> Examples:
    """Builds the examples of a report.

    `hits` are by the name of a compared row, `rankings` by row name, query id and document id, best
    first. If `draw_hit` is None, nothing is drawn.
    """
    id_column = f"{evaluation.spec['judged']}_id"
    best_grades = {
        query_id: sorted(judged.qrels[query_id].items(), key=lambda entry: -entry[1])[:NUM_JUDGED]
        for query_id in chosen
    }
    wanted = {document_id for grades in best_grades.values() for document_id, _ in grades}
    texts = _texts(searcher.index, id_column, wanted)
    examples = []
    for i, (query_id, reason) in enumerate(chosen.items()):
        query, grades = judged.queries[query_id], judged.qrels[query_id]
        has_media = any(query_id in files for files in judged.media.values())
        ranks = {name: _ranks(rankings[name][query_id]) for name in hits}
        found: dict[str, list[Document]] = {}
        for name, row_hits in hits.items():
            found[name] = []
            for hit in row_hits[i]:
                images = []
                if draw_hit is not None and hit.rank == 1 and not has_media:
                    images = draw_hit(searcher, query, hit, evaluation.row(name).representation)
                text = getattr(hit, id_column), hit.title or "", _best_passage(hit)
                found[name].append(_document(*text, grades, ranks, images))
        examples.append(
            Example(
                reason=reason,
                query_id=query_id,
                query=query,
                values={name: evaluation.value(name, query_id) for name in hits},
                judged=[
                    _document(document_id, *texts.get(document_id, ("", "")), grades, ranks)
                    for document_id, _ in best_grades[query_id]
                ],
                hits=found,
            )
        )
    return Examples(examples=examples)


def _ranks(ranking: Mapping[str, float]) -> dict[str, int]:
    return {document_id: rank for rank, document_id in enumerate(ranking, start=1)}


def _document(
    document_id: str,
    title: str,
    snippet: str,
    grades: Mapping[str, int],
    ranks: Mapping[str, Mapping[str, int]],
    images: Sequence[tuple[str, bytes]] = (),
) -> Document:
    return Document(
        document_id=document_id,
        title=title,
        snippet=snippet,
        grade=grades.get(document_id),
        ranks={name: row_ranks.get(document_id) for name, row_ranks in ranks.items()},
        images=[HitImage(caption=c, png=base64.b64encode(png).decode()) for c, png in images],
    )


def _texts(index: IndexReader, id_column: str, ids: set[str]) -> dict[str, tuple[str, str]]:
    """Returns title and beginning of the text by id; parents use their first item."""
    texts: dict[str, tuple[str, str]] = {}
    if ids:
        filter = f"{id_column} IN ({', '.join(map(quote, sorted(ids)))})"
        for batch in index.batches([id_column, "title", "text"], filter=filter):
            for row in batch.to_pylist():
                title, text = row["title"] or "", row["text"] or ""
                beginning = snippet(text.removeprefix(title).lstrip(), [])
                texts.setdefault(row[id_column], (title, beginning))
    return texts


def _best_passage(hit: Hit) -> str:
    spans = highlighted_spans(hit.passages[0]) if hit.passages else []
    return snippet(hit.text or "", spans, delimiters=HIGHLIGHT_DELIMITERS)
