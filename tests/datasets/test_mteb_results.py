"""The mteb benchmark: queries, judgments, pools and results in mteb's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config import SpecError, parse
from pipeline.datasets.mteb import Queries
from pipeline.datasets.mteb_results import MEASURES, measure_name
from pipeline.encoders.qwen_spec import QUERY_PROMPT
from pipeline.eval import BenchmarkRow, JudgedQueries
from pipeline.eval.evaluation import run
from pipeline.eval.metrics import means, parse_measure, per_query, read_run
from pipeline.eval.results import Evaluation
from pipeline.eval.spec import EvaluateSpec
from pipeline.index import job
from pipeline.index.checks import check
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.registry import BENCHMARKS, ENCODERS
from pipeline.schema import Composed
from pipeline.search.searcher import open_index
from tests.bench.index_run import bare_loop
from tests.datasets import mteb_data
from tests.encoders.edje.models import edje_of, reranker_of

pytestmark = mteb_data.NEEDS_MTEB

CUTOFFS = (1, 3, 5, 10, 20, 100, 1000)


def benchmark(task: str, folder: Path, **fields: Any) -> Queries:
    spec = {"name": "mteb", "task": task, "data": str(folder), **fields}
    return BENCHMARKS.build(BENCHMARKS.resolve(spec))


def load(task: str, folder: Path, **fields: Any) -> JudgedQueries:
    return benchmark(task, folder, **fields).load()


def test_grades_instruction_and_main_score(tmp_path):
    judged = load("SciFact", mteb_data.standard(tmp_path, "SciFact"))
    assert judged.queries == {"q0": mteb_data.text(0), "q1": mteb_data.text(1)}
    assert judged.qrels == {"q0": {"d0": 2, "d1": 0}, "q1": {"d1": 1, "d3": 1}}
    assert judged.measure == "nDCG@10" and judged.pools is None
    assert judged.instruction.startswith("Given a scientific claim")
    assert load("SciFact", tmp_path, instruction="none").instruction is None


def test_image_and_composed_queries(tmp_path):
    judged = load("CUB200I2IRetrieval", mteb_data.standard(tmp_path / "a", "CUB200I2IRetrieval"))
    assert list(judged.inputs(judged.queries)) == [mteb_data.image(i)["bytes"] for i in range(2)]
    assert judged.skip_first and judged.measure == "Success@1"
    judged = load("CIRRIT2IRetrieval", mteb_data.standard(tmp_path / "b", "CIRRIT2IRetrieval"))
    _, query = judged.inputs(judged.queries)
    assert query == Composed(mteb_data.text(1), mteb_data.image(1)["bytes"])


def test_queries_of_audio_and_videos(tmp_path):
    judged = load("ClothoA2TRetrieval", mteb_data.captions(tmp_path / "a", "ClothoA2TRetrieval"))
    (query, *_) = judged.inputs(judged.queries)
    assert query == Composed(audio=mteb_data.audio(0)["bytes"])
    assert judged.options()["audios"].keys() == judged.queries.keys()
    task = "AudioCapsAVVT2ARetrieval"
    judged = load(task, mteb_data.pairs(tmp_path / "b", task))
    (query, *_) = judged.inputs(judged.queries)
    video = mteb_data.video(0)["bytes"]
    assert query.text == mteb_data.text(0) and query.parts == ("text", "video")
    assert len(query.video) == len(video)


def test_instructions_of_queries_are_appended(tmp_path):
    task = "Core17InstructionRetrieval"
    folder = mteb_data.standard(tmp_path, task, instructions=True, pools=True)
    judged = load(task, folder)
    assert judged.queries["q1"] == f"{mteb_data.text(1)} Ignore document 1."
    assert judged.pools == {"q0": ["d0", "d1", "d2"], "q1": ["d1", "d2", "d3"]}
    assert judged.measure is None  # p-MRR


def test_categories_are_columns_of_queries(tmp_path):
    queries = [{"id": f"q{i}", "text": "a", "kind": "table" if i % 2 else "text"} for i in range(8)]
    qrels = [{"query-id": f"q{i}", "corpus-id": "d0", "score": 1} for i in range(8)]
    parts = {**mteb_data.standard_parts(["text"], ["text"]), "queries": queries, "qrels": qrels}
    folder = mteb_data.write_snapshot(tmp_path, {n: {"test": rows} for n, rows in parts.items()})
    categories = load("SciFact", folder).categories
    assert categories == {
        "kind": {"table": ["q1", "q3", "q5", "q7"], "text": ["q0", "q2", "q4", "q6"]}
    }


@pytest.mark.parametrize("score", ["ndcg_at_7", "map_at_1000", "mrr_at_5", "accuracy"])
def test_measure_names(score):
    assert str(parse_measure(measure_name(score))) == measure_name(score)


def random_collection() -> tuple[dict[str, dict[str, int]], dict[str, dict[str, float]]]:
    """Returns judgments with grades from -2 to 3, and a run with many ties.

    One query has only judgments of grade 0, one only negative ones, one no relevant document in the
    run, and one an empty ranking.
    """
    random = np.random.default_rng(0)
    documents = [f"d{i}" for i in range(150)]
    qrels = {
        f"q{q}": {d: int(random.integers(-2, 4)) for d in random.choice(documents, 30, False)}
        for q in range(20)
    }
    qrels["q0"] = dict.fromkeys(qrels["q0"], 0)
    qrels["q1"] = dict.fromkeys(qrels["q1"], -1)
    qrels["q2"] = {"missing": 3}
    run: dict[str, dict[str, float]] = {}
    for query_id in qrels:
        scores = {d: float(random.integers(0, 25)) / 8 for d in documents}
        run[query_id] = dict(sorted(scores.items(), key=lambda entry: -entry[1]))
    run["q3"] = {}
    return qrels, run


def test_metrics_equal_those_of_mteb():
    from mteb._evaluators.retrieval_metrics import calculate_retrieval_scores

    qrels, run = random_collection()
    expected = calculate_retrieval_scores(run, qrels, list(CUTOFFS))
    names = {
        "nDCG": "ndcg_cut",
        "AP": "map_cut",
        "R": "recall",
        "P": "P",
        "Success": "success",
    }
    measures = [f"{name}@{k}" for name in (*names, "RR") for k in CUTOFFS]
    assert {name for name in MEASURES.values()} == {*names, "RR"}
    values = per_query(run, qrels, measures)
    for query_id, scores in expected.all_scores.items():
        for name, other in names.items():
            for k in CUTOFFS:
                difference = values[query_id][f"{name}@{k}"] - scores[f"{other}_{k}"]
                assert abs(difference) < 1e-6, (query_id, name, k)
    assert values.keys() == expected.all_scores.keys()
    mean = means(values)
    for k in CUTOFFS:
        assert mean[f"RR@{k}"] == pytest.approx(expected.mrr[f"MRR@{k}"], abs=1e-6)
        assert mean[f"nDCG@{k}"] == pytest.approx(expected.ndcg[f"NDCG@{k}"], abs=6e-6)  # rounded


def read_result(path: str | Path) -> dict[str, Any]:
    from mteb.results import TaskResult

    TaskResult.from_disk(Path(path))
    return json.loads(Path(path).read_text())


def test_result_in_the_format_of_mteb(tmp_path):
    """Results of several subsets are merged. A repeated evaluation replaces its scores."""
    task = "Vidore3HrRetrieval"
    folder = mteb_data.standard(tmp_path / "data", task, subsets=["english", "french"])
    rankings = {"q0": {"d1": 3.0, "d0": 2.0}, "q1": {"d1": 3.0, "d3": 1.0}}
    row = BenchmarkRow("hpool_4.maxsim", "abc", rankings, 1000, 0.5)
    results = str(tmp_path / "results")
    for subset in ("english", "french", "french"):
        path = benchmark(task, folder, subset=subset, results=results).write_result("out", row)
    expected = tmp_path / "results/maxray__hpool_4.maxsim/abc" / f"{task}.json"
    assert Path(path) == expected
    content = read_result(path)
    assert content["task_name"] == task and content["dataset_revision"]
    scores = content["scores"]["test"]
    assert [s["hf_subset"] for s in scores] == ["english", "french"]
    assert scores[0]["languages"] == ["eng-Latn"]
    gains = 2 / np.log2(3)
    assert scores[0]["main_score"] == pytest.approx((gains / 2 + 1) / 2, abs=1e-5)
    assert scores[0]["ndcg_at_1000"] == scores[0]["main_score"]
    meta = json.loads((expected.parent / "model_meta.json").read_text())
    assert (meta["name"], meta["revision"]) == ("maxray/hpool_4.maxsim", "abc")


def test_scores_beyond_the_ranking_are_left_out(tmp_path):
    folder = mteb_data.standard(tmp_path / "data", "SciFact")
    rankings = {"q0": {f"d{i}": 9.0 - i for i in range(4)}, "q1": {"d1": 3.0}}
    writer = benchmark("SciFact", folder)
    path = writer.write_result(str(tmp_path), BenchmarkRow("full", "", rankings, 3, 0.5))
    (scores,) = read_result(path)["scores"]["test"]
    cutoffs = {int(name.rpartition("_")[2]) for name in scores if name.startswith("ndcg")}
    assert cutoffs == {1, 3}
    path = writer.write_result(str(tmp_path), BenchmarkRow("full", "", rankings, 1000, 0.5))
    (scores,) = read_result(path)["scores"]["test"]
    assert scores["main_score"] == scores["ndcg_at_10"] and "nauc_mrr_at_10_std" in scores


# -- evaluations of an index ----------------------------------------------------------------------


def index(folder: Path, source: dict[str, Any], **fields: Any) -> str:
    """Builds an index of a source without Ray and returns its URI."""
    spec = {
        "index": str(folder / "index"),
        "source": {"name": "mteb", **source},
        "representations": [{"compressor": "none"}],
        **fields,
    }
    parsed = parse(IndexSpec, spec)
    check(parsed)
    assert bare_loop(parsed, num_threads=1).new == mteb_data.NUM_DOCUMENTS
    return spec["index"]


def evaluate(folder: Path, uri: str, source: dict[str, Any], **fields: Any) -> Evaluation:
    spec = {
        "index": uri,
        "benchmark": {"name": "mteb", **source},
        "output": str(folder / "out"),
        "k": 1000,
        **fields,
    }
    return run(parse(EvaluateSpec, spec), lambda line: None)


def read_runs(folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    files = (folder / "out/runs").glob("*.trec")
    return {file.name.removesuffix(".trec"): read_run(str(file)) for file in files}


def test_text_task_from_source_to_result(tmp_path):
    """Every row has the main score of the task, and equals the score that mteb computes."""
    source = {"task": "SciFact", "data": str(mteb_data.standard(tmp_path / "data", "SciFact"))}
    encoder = {"name": "minilm", "query_prefix": "{instruction} "}
    uri = index(tmp_path, source, encoder=encoder)
    evaluation = evaluate(tmp_path, uri, source, measures=["R@5"])
    assert evaluation.headline == "nDCG@10" and evaluation.measures == ["nDCG@10", "R@5"]
    assert len(evaluation.results) == 4
    for result in evaluation.results:
        (file,) = (tmp_path / "out/mteb" / f"maxray__{result.name}").glob("*/SciFact.json")
        (scores,) = read_result(file)["scores"]["test"]
        for measure, name in (("nDCG@10", "main_score"), ("R@5", "recall_at_5")):
            assert result.means[measure] == pytest.approx(scores[name], abs=6e-6)  # rounded

    # The instruction is part of the queries, and the report names the templates.
    judged = load("SciFact", tmp_path / "data")
    found = evaluation.templates["minilm"]
    words = judged.instruction.lower().replace(" ", "")  # the tokenizer separates punctuation
    assert found["query"].replace(" ", "") == f"[CLS]{words}{{query}}[SEP]"
    assert found["text"] == "[CLS] {text} [SEP]"
    assert evaluate(tmp_path, uri, source).templates == evaluation.templates  # from the cache
    encoder = ENCODERS.build(ENCODERS.resolve(encoder)).with_instruction(judged.instruction)
    searcher = open_index(uri)
    queries = list(judged.inputs(judged.queries))
    ranking, _ = searcher.rank(encoder.encode_queries(queries), "full", k=4)
    expected = ranking.scores_by_item()
    assert read_runs(tmp_path)["full.maxsim"]["q0"] == pytest.approx(expected, rel=1e-6)
    without, _ = searcher.rank(queries, "full", k=4)
    assert without.scores_by_item() != pytest.approx(expected, rel=1e-3)


def test_only_the_pools_are_ranked(tmp_path):
    """Rows, and the examples of the report, contain only the documents of the pools."""
    task = "AskUbuntuDupQuestions"
    data = mteb_data.standard(tmp_path / "data", task, pools=True)
    source = {"task": task, "data": str(data)}
    evaluation = evaluate(tmp_path, index(tmp_path, source), source)
    pools = load(task, data).pools
    assert pools is not None and evaluation.headline == "AP@1000"
    for name, rankings in read_runs(tmp_path).items():
        for query_id, scores in rankings.items():
            assert set(scores) <= set(pools[query_id]) and (name == "bm25") >= (len(scores) < 3)
    shown = [
        (example.query_id, hit.document_id)
        for example in evaluation.examples
        for hits in example.hits.values()
        for hit in hits
    ]
    assert all(document_id in pools[query_id] for query_id, document_id in shown)
    with pytest.raises(SpecError, match="^k must be at least 1000 for AP@1000, the main metric"):
        evaluate(tmp_path, str(tmp_path / "index"), source, k=100)


def test_pools_are_reranked(cluster, tmp_path, checkpoint):
    """Rows rank the documents of the pools, and EDJE reranks them."""
    task = "Vidore3HrBGEm3Reranking.v2"
    data = mteb_data.standard(tmp_path / "data", task, subsets=["english"], pools=True)
    source = {"task": task, "data": str(data), "subset": "english"}
    encoder = {"name": "dual", "model": checkpoint("siglip"), "dtype": "float32"}
    model = edje_of(tmp_path / "edje", encoder)
    spec = {
        "index": str(tmp_path / "index"),
        "source": {"name": "mteb", **source},
        "encoder": encoder,
        "representations": [{"compressor": "none"}],
        "rerank": model,
    }
    progress = job.run(parse(IndexSpec, spec), IndexResources(), job="1", report=lambda line: None)
    assert progress.new == mteb_data.NUM_DOCUMENTS
    uri = spec["index"]
    rerank = [{"name": "edje", "model": model, "top": 3}]
    evaluation = evaluate(tmp_path, uri, source, rerank=rerank)
    pools = load(task, data, subset="english").pools
    assert pools is not None
    runs = read_runs(tmp_path)
    assert {"bm25", "full.maxsim", "edje_3"} <= runs.keys()
    for name, rankings in runs.items():
        for query_id, scores in rankings.items():
            found, pool = set(scores), set(pools[query_id])
            assert found <= pool if name == "bm25" else found == pool, name

    searcher, reranker = open_index(uri), reranker_of(model, 3)
    (query_id, text), *_ = load(task, data, subset="english").queries.items()
    rankings = searcher.rank([text], "full", k=3, score="single_vector", ids=pools[query_id])
    (expected,) = reranker.rerank(searcher, [text], rankings, 3)
    assert list(runs["edje_3"][query_id]) == expected.item_ids
    assert {result.name for result in evaluation.results} == runs.keys()


def test_image_and_composed_queries_are_encoded(tmp_path, checkpoint):
    """The best document of an image query is the image itself, which the task ignores."""
    encoder = {"name": "qwen_vl", "model": checkpoint("qwen3_vl"), "dtype": "float32"}
    folder = tmp_path / "images"
    source = {
        "task": "CUB200I2IRetrieval",
        "data": str(mteb_data.standard(folder / "data", "CUB200I2IRetrieval")),
    }
    prompt = {"document_prompt": QUERY_PROMPT}  # so that an image has the same vectors as a query
    uri = index(folder, source, encoder={**encoder, **prompt})
    evaluate(folder, uri, source, representations=["full"], scores=["single_vector"])
    (rankings,) = read_runs(folder).values()
    assert {query_id: len(scores) for query_id, scores in rankings.items()} == {"q0": 3, "q1": 3}
    assert "d0" not in rankings["q0"] and "d1" not in rankings["q1"]

    folder = tmp_path / "composed"
    source = {
        "task": "CIRRIT2IRetrieval",
        "data": str(mteb_data.standard(folder / "data", "CIRRIT2IRetrieval")),
    }
    uri = index(folder, source, encoder=encoder)
    evaluation = evaluate(folder, uri, source)
    assert all(len(scores) == 4 for scores in read_runs(folder)["full.maxsim"].values())
    assert "nDCG@10" in evaluation.results[0].means
    colpali = {"name": "colpali", "model": checkpoint("colpali"), "dtype": "float32"}
    uri = index(tmp_path / "colpali", source, encoder=colpali)
    with pytest.raises(SpecError, match="got 'a text with an image', which is not supported by"):
        evaluate(tmp_path / "colpali", uri, source)


def test_encoder_that_cannot_read_the_documents_is_refused(tmp_path):
    task = "VidoreDocVQARetrieval"
    source = {"task": task, "data": str(mteb_data.vidore_v1(tmp_path / "data", task))}
    rule = "encoder must be an encoder that reads item_id or image or scan, which the source mteb"
    with pytest.raises(SpecError, match=rule):
        index(tmp_path, source, encoder="minilm")


def test_video_queries_are_encoded(tmp_path, checkpoint):
    """A task whose queries have a column of audio and one of videos."""
    encoder = {
        "name": "qwen_omni",
        "model": checkpoint("qwen2_5_omni"),
        "dtype": "float32",
        "document_prompt": QUERY_PROMPT,
    }
    task = "AudioCapsAVVA2TRetrieval"
    folder = mteb_data.pairs(tmp_path / "data", task)
    uri = index(tmp_path, {"task": task, "data": str(folder)}, encoder=encoder)
    source = {"task": task, "data": str(folder)}
    evaluation = evaluate(tmp_path, uri, source, representations=["full"], bm25=False)
    runs = read_runs(tmp_path)
    assert {len(scores) for rankings in runs.values() for scores in rankings.values()} == {4}
    assert "nDCG@10" in evaluation.results[0].means
