"""Moment retrieval on a miniature in the published format of QVHighlights."""

from __future__ import annotations

import json

import pytest
import yaml

from jobs import evaluate, index
from pipeline.config import SpecError
from pipeline.eval.metrics import read_run
from pipeline.eval.results import read_results
from pipeline.index.reader import IndexReader
from tests.datasets import ROOT
from tests.datasets.loading import benchmark, load
from tests.media import frame_times, write_video

SPECS = ROOT / "examples/papers/specs/benchmarks"
VIDEOS = ("NUsG9BgSes0_210.0_360.0", "bP5KfdFJzC4_660.0_810.0")
#: Videos of 12 s, whose windows are 0-4, 2-6, 4-8, 6-10 and 8-12.
QUERIES = [
    {
        "qid": 2579,
        "query": "A girl and her mother cooked.",
        "duration": 12,
        "vid": VIDEOS[0],
        "relevant_windows": [[4, 8]],
        "relevant_clip_ids": [2, 3],
        "saliency_scores": [[4, 1, 1], [4, 1, 1]],
    },
    {"qid": "tvr_1", "query": "A game.", "vid": VIDEOS[1], "relevant_windows": [[0, 4], [6, 12]]},
    {"qid": 3, "query": "No video.", "duration": 12, "vid": "none", "relevant_windows": [[0, 2.5]]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qvhighlights")
    (folder / "videos").mkdir()
    for video in VIDEOS:
        write_video(folder / "videos" / f"{video}.mp4", frame_times(12.0, 2.0), size=(64, 48))
    write(folder / "highlight_val_release.jsonl", QUERIES)
    return folder


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


@pytest.fixture(scope="module")
def indexed(folder, checkpoint):
    """The shipped spec, with a tiny checkpoint and shorter windows."""
    source = {"path": str(folder / "videos"), "window_seconds": 4, "overlap_seconds": 2}
    encoder = {"name": "dual", "model": checkpoint("siglip"), "dtype": "float32"}
    overrides = [f"source.{name}={value}" for name, value in source.items()]
    overrides += [f"encoder={json.dumps(encoder)}", f"index={folder / 'index'}"]
    index.main([str(SPECS / "qvhighlights.yaml"), *overrides])
    return str(folder / "index")


def run(indexed, folder, output, *overrides):
    given = [f"index={indexed}", f"output={output}", "benchmark.num_queries=3"]
    given.append(f"benchmark.path={folder / 'highlight_val_release.jsonl'}")
    evaluate.main([str(SPECS / "qvhighlights_evaluate.yaml"), *given, *overrides])
    return read_results(str(output), "evaluation")


@pytest.mark.usefixtures("blank_figures")
def test_qvhighlights(indexed, folder, tmp_path):
    evaluation = run(indexed, folder, tmp_path / "out")
    assert evaluation.headline == "mAP"
    assert "1 of 3 videos are not in the index" in evaluation.notes
    assert "1 queries have no item with an IoU of at least 0.5" in evaluation.notes
    row = evaluation.results[0]
    ranked = read_run(str(tmp_path / "out/runs" / f"{row.name}.trec"))
    lines = (tmp_path / "out/moments" / f"{row.name}.jsonl").read_text().splitlines()
    first, second, third = map(json.loads, lines)
    assert list(first) == ["qid", "query", "vid", "pred_relevant_windows"]
    assert (first["qid"], second["qid"], third["qid"]) == (2579, "tvr_1", 3)
    assert first["vid"] == VIDEOS[0] and second["query"] == "A game."
    assert third["pred_relevant_windows"] == [[0.0, 0.0, 0.0]]
    windows = first["pred_relevant_windows"]
    names = [f"{VIDEOS[0]}.mp4#t={start:g},{end:g}" for start, end, _ in windows]
    assert ranked["2579"] == pytest.approx(
        dict(zip(names, (score for *_, score in windows), strict=True))
    )
    assert sorted(window[:2] for window in windows) == [[s, s + 4] for s in range(0, 9, 2)]
    rank = [window[:2] for window in windows].index([4, 8]) + 1
    assert row.values["2579"] == pytest.approx(
        {"mAP": 1 / rank, "mAP@0.5": 1 / rank, "mAP@0.75": 1 / rank}
        | dict.fromkeys(["R1@0.5", "R1@0.7"], float(rank == 1))
    )
    assert row.values["3"] == dict.fromkeys(row.values["3"], 0.0)
    metrics = json.loads((tmp_path / "out/moments" / f"{row.name}_metrics.json").read_text())
    assert {name: values["queries"] for name, values in metrics.items()} == {"full": 3, "short": 3}
    means = {name: sum(values[name] for values in row.values.values()) / 3 for name in row.means}
    assert metrics["full"] == pytest.approx({"queries": 3, **means})


@pytest.mark.usefixtures("blank_figures")
def test_windows_of_all_videos(indexed, folder, tmp_path):
    federation = {"members": {"a": {"index": indexed}, "b": {"index": indexed}}, "join": "overlap"}
    (tmp_path / "federation.yaml").write_text(yaml.safe_dump(federation))
    measures = "measures=[nDCG@10, R1@0.5, R10@0.5]"
    for name, uri in (("index", indexed), ("both", str(tmp_path / "federation.yaml"))):
        ranked = "benchmark.ranked=corpus"
        evaluation = run(uri, folder, tmp_path / name, measures, ranked)
        values = evaluation.results[-1].values
        assert values["2579"]["R10@0.5"] == values["tvr_1"]["R10@0.5"] == 1
        assert 0 < values["2579"]["nDCG@10"] <= 1
        assert not list((tmp_path / name / "moments").glob("*.jsonl"))
        ranking = read_run(str(tmp_path / name / "runs" / f"{evaluation.results[-1].name}.trec"))
        assert len(ranking["2579"]) == 10


def test_judgments_are_the_items_that_overlap(indexed, folder):
    queries = load("moments", path=str(folder / "highlight_val_release.jsonl"))
    judged = queries.located([IndexReader(indexed)], None)
    assert judged.qrels["2579"] == {f"{VIDEOS[0]}.mp4#t=4,8": 1}
    assert list(judged.qrels["tvr_1"]) == [
        f"{VIDEOS[1]}.mp4#t={window}" for window in ("0,4", "6,10", "8,12")
    ]
    assert (judged.qrels["3"], judged.pools["3"], len(judged.pools["2579"])) == ({}, (), 5)
    with pytest.raises(
        SpecError, match="^benchmark must be videos whose time ranges the index has"
    ):
        queries.located([IndexReader(indexed)], "parent_id = 'x'")


def test_unlabelled_and_invalid_files(tmp_path):
    path = tmp_path / "test.jsonl"
    rows = [{"qid": n, "query": "a b", "vid": "v"} for n in (1, 2)]
    judged = load("moments", path=write(path, rows))
    assert judged.qrels == {"1": {}, "2": {}} and not any(judged.moments.ranges.values())
    judged = load("moments", path=write(path, [rows[0], {**rows[1], "relevant_windows": [[0, 2]]}]))
    assert (list(judged.queries), judged.num_unjudged) == (["2"], 1)
    for change, message in (
        ({"qid": 1}, r"benchmark.path must be a unique qid, got 1, which occurs twice \(line 2 of"),
        ({"vid": 7}, r'benchmark.path must be a line {"qid": 1, "query": .*\(line 2 of'),
        ({"query": " "}, "benchmark.path must be a text with at least one word, got ' '"),
        ({"relevant_windows": [[3, 1]]}, "benchmark.path must be a line .* has invalid relevant_w"),
        ({"relevant_windows": 3}, "benchmark.path must be a line .* has invalid relevant_windows"),
    ):
        with pytest.raises(SpecError, match=f"^{message}"):
            load("moments", path=write(path, [rows[0], {**rows[1], **change}]))
    with pytest.raises(SpecError, match=r"^benchmark.num_queries must be the number of judged qu"):
        load("moments", path=write(path, rows), num_queries=3)
    assert benchmark("moments", path="p").spec.ranked == "video"
