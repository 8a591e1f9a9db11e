"""Tests of the mteb adapter: scores equal those of an in-process search."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.search.searcher import open_index
from pipeline.serve.mteb import Endpoint
from tests.datasets.mteb_data import NEEDS_MTEB

pytestmark = NEEDS_MTEB

QUERIES = {"q1": "the lift of a wing", "q2": "heat", "q3": "bread with a crust"}
QRELS = {"q1": {"wing/1": 1}, "q2": {"heat/1": 1, "heat/2": 1}, "q3": {"bread/1": 1}}


def create_task(texts: dict[str, str]) -> Any:
    """Returns a retrieval task with the texts of the test index."""
    from datasets import Dataset
    from mteb.abstasks.retrieval import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata

    class Task(AbsTaskRetrieval):
        metadata = TaskMetadata(
            name="MaxrayTexts",
            description="eight texts",
            dataset={"path": "local/texts", "revision": "1"},
            type="Retrieval",
            category="t2t",
            eval_langs=["eng-Latn"],
            main_score="ndcg_at_10",
        )

        def load_data(self, *arguments, **options) -> None:
            documents = [{"id": i, "title": "", "text": text} for i, text in texts.items()]
            split = {
                "corpus": Dataset.from_list(documents),
                "queries": Dataset.from_list([{"id": i, "text": t} for i, t in QUERIES.items()]),
                "relevant_docs": QRELS,
                "top_ranked": None,
            }
            self.dataset = {"default": {"test": split}}
            self.data_loaded = True

    return Task()


def test_task_score_equals_in_process_search(client, index_uri, texts):
    import mteb

    task = create_task(texts)
    model = Endpoint(client, index="texts", representation="hpool_4", max_k=100)
    result = mteb.evaluate(model, task, cache=None)
    score = result.task_results[0].get_score()
    searcher = open_index(index_uri)
    ranked = {i: searcher.rank([text], "hpool_4", k=8)[0].item_ids for i, text in QUERIES.items()}

    def ndcg(query_id: str) -> float:
        from math import log2

        gains = [QRELS[query_id].get(i, 0) / log2(n + 2) for n, i in enumerate(ranked[query_id])]
        best = sum(1 / log2(n + 2) for n in range(len(QRELS[query_id])))
        return sum(gains) / best

    assert score == pytest.approx(sum(map(ndcg, QUERIES)) / len(QUERIES), abs=1e-4)


def test_index_rejects_missing_documents(client):
    with pytest.raises(ValueError, match="lacks the document 'nobody'"):
        Endpoint(client, index="texts").index([{"id": "nobody", "text": "x"}])
    Endpoint(client, index="texts", judged="parent").index([{"id": "wing", "text": "x"}])
    with pytest.raises(ValueError, match="lacks the document 'nobody'"):
        Endpoint(client, index="texts", judged="parent").index([{"id": "nobody", "text": "x"}])


def test_search_ranks_given_documents(client):
    model = Endpoint(client, index="texts")
    top_ranked = {"q1": ["flow", "wing/2"]}
    scores = model.search([{"id": "q1", "text": QUERIES["q1"]}], top_k=5, top_ranked=top_ranked)
    assert set(scores["q1"]) == {"flow", "wing/2"}
