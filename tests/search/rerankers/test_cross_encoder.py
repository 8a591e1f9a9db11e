"""Cross-encoders as rerankers, compared with sentence-transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import CrossEncoder

from jobs import search
from pipeline import config
from pipeline.config import SpecError
from pipeline.eval.evaluation import run
from pipeline.eval.report.files import write
from pipeline.eval.spec import EvaluateSpec
from pipeline.search.rerankers import load_rerankers, rerank_in_turn
from pipeline.search.searcher import open_index
from tests.images import noise, png
from tests.search.rerankers.conftest import TEXTS

QUERIES = ["lift of a wing", "cone"]


def peer_scores(model: str, query: str) -> dict[str, float]:
    """Returns the scores of all texts by the library."""
    scores = CrossEncoder(model).predict([(query, text) for text in TEXTS.values()])
    return dict(zip(TEXTS, scores.tolist(), strict=True))


def test_scores_equal_the_library(texts, cross_encoder):
    searcher = open_index(texts)
    spec = {"name": "cross_encoder", "model": cross_encoder, "top": 3, "batch_size": 2}
    first = searcher.search(QUERIES, k=5)
    reranked = searcher.search(QUERIES, k=5, rerank=spec)
    for query, before, after in zip(QUERIES, first, reranked, strict=True):
        expected = peer_scores(cross_encoder, query)
        assert len({round(score, 4) for score in expected.values()}) > 3
        best = sorted(before[:3], key=lambda hit: -expected[hit.item_id]) + before[3:]
        assert [hit.item_id for hit in after] == [hit.item_id for hit in best]
        for hit, old in zip(after, best, strict=True):
            assert (hit.first_stage.rank, hit.first_stage.score) == (old.rank, old.score)
            if old.rank <= 3:
                assert hit.rerank.score == pytest.approx(expected[hit.item_id], abs=1e-6)
                assert hit.score == hit.rerank.score
            else:
                assert hit.rerank.score is None and hit.score == old.score


def test_rerankers_in_a_row(texts, cross_encoder):
    """The second reorders the best of the first; ranks of the first stage are kept."""
    searcher = open_index(texts)
    spec = {"name": "cross_encoder", "model": cross_encoder}
    first = searcher.search(QUERIES[0], k=5, explain=False)
    chain = [{**spec, "top": 5}, {**spec, "top": 2, "add_first_stage": True}]
    for k in (5, 1):
        hits = searcher.search(QUERIES[0], k=k, explain=False, rerank=chain)
        expected = peer_scores(cross_encoder, QUERIES[0])
        order = sorted(first, key=lambda hit: -expected[hit.item_id])[:k]
        assert [hit.item_id for hit in hits] == [hit.item_id for hit in order]
        for hit, old in zip(hits, order, strict=True):
            assert hit.first_stage.rank == old.rank
            double = 2 if hit.rank <= 2 else 1
            assert hit.score == pytest.approx(double * expected[hit.item_id], abs=1e-5)
    models = load_rerankers(chain)
    assert models[0]._model is models[1]._model
    rankings = rerank_in_turn(models, searcher, QUERIES, searcher.rank(QUERIES, k=5), 5)
    assert [models[n].usage.pairs for n in (0, 1)] == [10, 4]
    assert rankings[0].item_ids[0] == hits[0].item_id


def test_the_search_job(texts, cross_encoder, capsys):
    rerank = ["--rerank", "cross_encoder", f"model={cross_encoder}"]
    search.main([texts, QUERIES[0], "--json", *rerank, "top=5", *rerank, "top=2"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    expected = peer_scores(cross_encoder, QUERIES[0])
    assert [row["item_id"] for row in rows] == sorted(expected, key=lambda name: -expected[name])
    assert rows[0]["rerank"]["score"] == pytest.approx(expected[rows[0]["item_id"]], abs=1e-6)


def test_rows_of_an_evaluation(texts, cross_encoder, tmp_path):
    """Each row reports the gain and the cost; a list is one row of several rerankers."""
    folder = tmp_path / "benchmark"
    (folder / "qrels").mkdir(parents=True)
    queries = {str(n): text for n, text in enumerate([*QUERIES, "a boat", "hot air"])}
    relevant = dict(zip(queries, ["a", "e", "d", "c"], strict=True))
    lines = [f"{query}\t{item}\t1\n" for query, item in relevant.items()]
    (folder / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
    lines = [json.dumps({"_id": query, "text": text}) for query, text in queries.items()]
    (folder / "queries.jsonl").write_text("\n".join(lines))
    spec = {"name": "cross_encoder", "model": cross_encoder}
    fields = {
        "index": texts,
        "benchmark": {"name": "beir", "path": str(folder)},
        "output": str(tmp_path / "out"),
        "measures": ["nDCG@5"],
        "bm25": False,
        "diagnostics": False,
        "k": 5,
        "rerank": [{**spec, "top": 3}, [{**spec, "top": 5}, {**spec, "top": 2}]],
    }
    evaluation = run(config.parse(EvaluateSpec, fields), lambda line: None)
    row = evaluation.row("cross_encoder_3")
    assert (row.method, row.score, row.first_stage) == (
        "cross_encoder",
        "cross_encoder",
        "full.maxsim",
    )
    assert (row.rerank["queries"], row.rerank["pairs"], row.rerank["unread"]) == (4, 12, 0)
    assert row.rerank["seconds"] > 0 and row.rerank["requests"] == 0
    assert row.rerank["parameters"] > 1000
    for query, text in queries.items():
        hits = open_index(texts).search(text, k=5, rerank={**spec, "top": 3}, explain=False)
        rank = [hit.item_id for hit in hits].index(relevant[query]) + 1
        assert row.values[query]["nDCG@5"] == pytest.approx(1 / np.log2(rank + 1))
    both = evaluation.row("cross_encoder_5-cross_encoder_2")
    assert both.rerank["pairs"] == 4 * 5 + 4 * 2
    write(evaluation, fields["output"])
    table = (tmp_path / "out/reranking.md").read_text()
    assert "| cross_encoder_3" in table and "pairs/s" in table
    lines: list[str] = []
    again = run(config.parse(EvaluateSpec, fields), lines.append)
    assert all("(cached)" in line for line in lines if line.startswith("["))
    assert again.row("cross_encoder_3").rerank["pairs"] == 12


def test_long_texts(texts, cross_encoder):
    """Texts are truncated by the library; queries that leave no place for a text are refused."""
    (reranker,) = load_rerankers({"name": "cross_encoder", "model": cross_encoder})
    searcher, query = open_index(texts), " ".join(["wing"] * 40)
    (found,) = reranker.score(searcher, [query], [[*TEXTS]])
    expected = peer_scores(cross_encoder, query)
    tokenizer = reranker._model.tokenizer
    for item_id, record in found.items():
        assert record.score == pytest.approx(expected[item_id], abs=1e-6)
        size = len(tokenizer(query, TEXTS[item_id], truncation=False)["input_ids"])
        assert record.num_truncated_tokens == max(0, size - 64)
    assert max(record.num_truncated_tokens for record in found.values()) > 0
    with pytest.raises(SpecError, match=r"^query must be a text of at most 63 tokens with an item"):
        reranker.score(searcher, [" ".join(["wing"] * 80)], [["a"]])


def test_errors(texts, cross_encoder, checkpoint, tmp_path):
    searcher = open_index(texts)

    def check(rule: str, **fields):
        with pytest.raises(SpecError, match=rule):
            searcher.search("wing", rerank={"name": "cross_encoder", **fields})

    check(r"^rerank.model must be the path of an existing folder, .*", model=str(tmp_path / "no"))
    check(r"^rerank.model must be a cross-encoder .*HF_ColBERT", model=checkpoint("colbert_bert"))
    check(r"^field 'model' is required in rerank")
    check(r"^rerank.top must be greater than or equal to 1, got 0", model=cross_encoder, top=0)
    check(r"^rerank.trust_remote_code must be ", model=cross_encoder, trust_remote_code=True)
    code = Path(shutil.copytree(cross_encoder, tmp_path / "code"))
    parts = [{"idx": 0, "name": "0", "path": "", "type": "os.path.join"}]
    (code / "modules.json").write_text(json.dumps(parts))
    check(r"^rerank.model must be a checkpoint whose modules .* os.path.join", model=str(code))
    with pytest.raises(SpecError, match=r"^rerank\[1\].name must be one of blip, "):
        searcher.search("wing", rerank=[{"name": "cross_encoder", "model": cross_encoder}, "x"])
    models = load_rerankers({"name": "cross_encoder", "model": cross_encoder})
    with pytest.raises(SpecError, match="^query must be a text to be reranked by cross_encoder"):
        models[0].check(searcher.index, [png(noise(8, 8))])


@pytest.mark.hub
def test_published_cross_encoder():
    """The score of the model card's relevant passage is the higher one."""
    spec = {"name": "cross_encoder", "model": "cross-encoder/ms-marco-MiniLM-L6-v2"}
    (reranker,) = load_rerankers(spec)
    query = "How many people live in Berlin?"
    passages = ["Berlin had a population of 3,520,031 registered inhabitants.", "Paris is old."]
    scores = reranker._model.predict([(query, passage) for passage in passages])
    assert scores[0] > 5 > -5 > scores[1]
    assert isinstance(reranker._model, CrossEncoder)
