"""Selects example queries: where compression lost, where it won, and where every row fails."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence

from pipeline.eval import JudgedQueries
from pipeline.eval.examples import MARKS, Document, Example, Examples, Picture, Why
from pipeline.eval.results import Evaluation, Result, differences
from pipeline.index.reader import Index, quote
from pipeline.schema import Hit
from pipeline.search.explain import highlights, snippet
from pipeline.search.searcher import Searcher

#: Draws a hit: (searcher, query text, hit, representation) -> captions and PNG files. A function
#: with a name: under another name it draws the examples anew, else they are kept.
Pictures = Callable[[Searcher, str, Hit, str], list[tuple[str, bytes]]]

#: How many examples of a kind there are at most, and hits and judged documents of each.
NUM_DIFFERENT, NUM_FAILED, NUM_HITS, NUM_JUDGED = 3, 2, 3, 5
#: A query fails if no row reaches this much of the headline measure on it.
FAILED = 0.2


def compared(evaluation: Evaluation) -> list[Result]:
    """The rows whose hits are shown: a compressed one after the reference that it is held against.

    It is the cheapest that keeps the quality of the full tokens, else the best. Without a
    compressed row the best of token vectors stands alone; without token vectors there is none.
    """
    tokens = [result for result in evaluation.results if result.score in ("late", "hybrid")]
    compressed = [result for result in tokens if result.is_compressed]
    shown = evaluation.frugal(compressed) or evaluation.best(compressed)
    if shown is None:
        best = evaluation.best(tokens)
        return [] if best is None else [best]
    reference = evaluation.of(evaluation.standing(shown).reference)
    return [shown] if reference is shown else [reference, shown]


def choose(evaluation: Evaluation, shown: list[Result]) -> dict[str, Why]:
    """The queries to show and why: most lost first, then most won, then those that all fail."""
    chosen: dict[str, Why] = {}
    if len(shown) == 2:
        reference, compressed = shown
        gains = differences(compressed, reference, evaluation.headline).tolist()
        by_gain = sorted(zip(gains, compressed.values, strict=True), key=lambda pair: pair[0])
        lost = [query_id for gain, query_id in by_gain if gain < 0][:NUM_DIFFERENT]
        won = [query_id for gain, query_id in reversed(by_gain) if gain > 0][:NUM_DIFFERENT]
        chosen = {**dict.fromkeys(lost, "lost"), **dict.fromkeys(won, "won")}
    if shown:
        best = {
            query_id: max(evaluation.value(r.name, query_id) for r in evaluation.results)
            for query_id in shown[0].values
            if query_id not in chosen
        }
        failed = [
            query_id for query_id in sorted(best, key=best.__getitem__) if best[query_id] < FAILED
        ]
        chosen |= dict.fromkeys(failed[:NUM_FAILED], "failed")
    return chosen


def describe(
    evaluation: Evaluation,
    judged: JudgedQueries,
    searcher: Searcher,
    chosen: Mapping[str, Why],
    hits: Mapping[str, list[list[Hit]]],
    rankings: Mapping[str, Mapping[str, Mapping[str, float]]],
    pictures: Pictures | None,
) -> Examples:
    """Returns everything that the chosen examples show.

    Args:
        evaluation: Evaluation that the examples belong to.
        judged: Queries and their relevance judgments.
        searcher: Searcher of the evaluated index.
        chosen: Ids of the chosen queries, with the reason for each choice.
        hits: Best hits of each chosen query, by the name of a compared row.
        rankings: Scores by document id, best first, by row name and query id.
        pictures: Function that draws the best hit of each compared row; None to draw nothing.
    """
    id_column = f"{evaluation.spec['judged']}_id"
    best_grades = {
        query_id: sorted(judged.qrels[query_id].items(), key=lambda entry: -entry[1])[:NUM_JUDGED]
        for query_id in chosen
    }
    wanted = {document_id for grades in best_grades.values() for document_id, _ in grades}
    texts = _texts(searcher.index, id_column, wanted)
    examples = []
    for place, (query_id, why) in enumerate(chosen.items()):
        query, grades = judged.queries[query_id], judged.qrels[query_id]
        ranks = {name: _ranks(rankings[name][query_id]) for name in hits}
        found: dict[str, list[Document]] = {}
        for name, of_queries in hits.items():
            found[name] = []
            for hit in of_queries[place]:
                drawn = []
                if pictures is not None and hit.rank == 1:
                    drawn = pictures(searcher, query, hit, evaluation.of(name).representation)
                shown = getattr(hit, id_column), hit.title or "", _matched(hit)
                found[name].append(_document(*shown, grades, ranks, drawn))
        examples.append(
            Example(
                why=why,
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
    shown: str,
    grades: Mapping[str, int],
    ranks: Mapping[str, Mapping[str, int]],
    pictures: Sequence[tuple[str, bytes]] = (),
) -> Document:
    return Document(
        document_id=document_id,
        title=title,
        snippet=shown,
        grade=grades.get(document_id),
        ranks={name: of_documents.get(document_id) for name, of_documents in ranks.items()},
        pictures=[Picture(caption=c, png=base64.b64encode(png).decode()) for c, png in pictures],
    )


def _texts(index: Index, id_column: str, ids: set[str]) -> dict[str, tuple[str, str]]:
    """Title and beginning of the text of documents, by id; of a parent those of its first item."""
    texts: dict[str, tuple[str, str]] = {}
    if ids:
        filter = f"{id_column} IN ({', '.join(map(quote, sorted(ids)))})"
        for batch in index.batches([id_column, "title", "text"], filter=filter):
            for row in batch.to_pylist():
                title, text = row["title"] or "", row["text"] or ""
                shown = snippet(text.removeprefix(title).lstrip(), [])
                texts.setdefault(row[id_column], (title, shown))
    return texts


def _matched(hit: Hit) -> str:
    """Returns the stretch of the hit's text with its best passage, the matched words marked."""
    spans = highlights(hit.passages[0]) if hit.passages else []
    return snippet(hit.text or "", spans, marks=MARKS)
