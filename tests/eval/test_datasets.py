"""Benchmarks of published data sets on miniatures in the format of their distribution."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from pipeline.config import SpecError
from pipeline.datasets.multivent import MEASURES, Judgments, read_judgments, split_scores
from pipeline.eval import BenchmarkRow, JudgedQueries
from pipeline.eval.metrics import means, per_query
from pipeline.registry import BENCHMARKS
from pipeline.schema import Composed
from tests import datasets


def benchmark(name: str, **fields: Any) -> Any:
    return BENCHMARKS.build(BENCHMARKS.resolve({"name": name, **fields}))


def load(name: str, **fields: Any) -> JudgedQueries:
    return benchmark(name, **fields).load()


def test_multivent(tmp_path):
    datasets.multivent(tmp_path)
    fields = {
        "path": str(tmp_path / "queries.csv"),
        "judgments": str(tmp_path / "judgments.jsonl"),
    }
    judged = load("multivent", **fields)
    assert judged.queries == {"q1": "City council vote, spring 2021", "q2": "flood"}
    assert judged.qrels == {"q1": {"200": 3, "201": 1, "202": 0}, "q2": {"201": 2}}
    assert judged.num_unjudged == 1 and judged.measure == "nDCG@10"
    with pytest.raises(SpecError, match=r"num_queries must be the number of judged queries .*2"):
        load("multivent", **fields, num_queries=2546)


def test_multivent_train_categories(tmp_path):
    ids = [
        f"internvid_{language}_{category}_edited_base_{number}"
        for language in ("korean", "arabic")
        for category in ("political", "sports")
        for number in range(2)
    ]
    rows = [[query_id, f"query, {query_id}"] for query_id in ids]
    (tmp_path / "q.csv").write_bytes(datasets.csv_text(["Query_id", "query"], rows, "\r\n"))
    lines = [{"query_id": query_id, "doc_id": "aB3_dE-fG12", "relevance": 1} for query_id in ids]
    (tmp_path / "j.jsonl").write_text("\n".join(map(json.dumps, lines)))
    judged = load("multivent", path=str(tmp_path / "q.csv"), judgments=str(tmp_path / "j.jsonl"))
    assert set(judged.categories) == {"language", "category"}
    assert judged.categories["language"]["korean"] == sorted(ids[:4])


def test_multivent_results(tmp_path):
    datasets.multivent(tmp_path)
    fields = {
        "path": str(tmp_path / "queries.csv"),
        "judgments": str(tmp_path / "judgments.jsonl"),
    }
    run = {"q1": {"201": 3.0, "999": 2.0, "200": 1.0}, "q2": {"202": 1.0, "201": 0.5}}
    row = BenchmarkRow("full", "e", run, 1000, 1.0)
    path = benchmark("multivent", **fields).write_result(str(tmp_path / "out"), row)
    with open(path) as file:
        assert json.load(file) == run
    splits = json.loads((tmp_path / "out/multivent/full_splits.json").read_text())
    assert set(splits) == {"video_language"}
    # Korean: 201 is relevant under another value and is removed, so 200 is second.
    assert splits["video_language"]["korean"]["RR"] == 0.5
    assert splits["video_language"]["korean"]["nDCG@10"] == pytest.approx(1 / np.log2(3))
    assert splits["video_language"]["arabic"]["RR"] == pytest.approx((1 + 1 / 2) / 2)


def literal_scores(ranked: list[str], grades: dict[str, int], k: int = 10) -> dict[str, float]:
    """Computes the official metrics of a query by their definitions, in float64."""
    gains = [float(grades.get(video, 0)) for video in ranked]
    ideal = sorted((float(g) for g in grades.values()), reverse=True)
    dcg = sum(gain / np.log2(rank + 2) for rank, gain in enumerate(gains[:k]))
    best = sum(gain / np.log2(rank + 2) for rank, gain in enumerate(ideal[:k]))
    relevant = {video for video, grade in grades.items() if grade > 0}
    hits = [video in relevant for video in ranked]
    precisions = [sum(hits[: i + 1]) / (i + 1) for i, hit in enumerate(hits) if hit]
    return {
        "nDCG@10": dcg / best if best else 0.0,
        **{f"R@{n}": sum(hits[:n]) / len(relevant) if relevant else 0.0 for n in (10, 100, 1000)},
        "AP": sum(precisions) / len(relevant) if relevant else 0.0,
        "RR": next((1 / (i + 1) for i, hit in enumerate(hits) if hit), 0.0),
        "Judged@10": sum(video in grades for video in ranked[:10]) / min(10, len(ranked)),
    }


def test_split_scores_equal_a_literal_implementation():
    rng = np.random.default_rng(0)
    videos = [str(number) for number in range(40)]
    judgments = Judgments()
    run: dict[str, dict[str, float]] = {}
    values = judgments.values.setdefault("video_type", {})
    for number in range(12):
        query_id = f"q{number}"
        judged = rng.choice(videos, 15, replace=False).tolist()
        judgments.qrels[query_id] = {video: int(rng.integers(4)) for video in judged}
        for video in judged:
            if kind := ("news", "raw", "")[rng.integers(3)]:
                values[query_id, video] = kind
        order = rng.permutation(videos)[:30].tolist()
        run[query_id] = {video: -float(rank) for rank, video in enumerate(order)}
    splits = split_scores(run, judgments)["video_type"]
    assert set(splits) == {"news", "raw"}
    for value, found in splits.items():
        expected = []
        for query_id, grades in judgments.qrels.items():
            selected = {v: g for v, g in grades.items() if values.get((query_id, v)) == value}
            others = {v for v, g in grades.items() if g > 0 and v not in selected}
            if selected:
                ranked = [video for video in run[query_id] if video not in others]
                expected.append(literal_scores(ranked, selected))
        for measure in MEASURES:
            mean = float(np.mean([scores[measure] for scores in expected]))
            assert found[measure] == pytest.approx(mean, abs=1e-9), (value, measure)
    whole = means(per_query(run, judgments.qrels, MEASURES))
    literal = [literal_scores(list(run[q]), grades) for q, grades in judgments.qrels.items()]
    for measure in MEASURES:
        assert whole[measure] == pytest.approx(np.mean([s[measure] for s in literal]))


@pytest.mark.parametrize(
    "line",
    [
        '{"query_id": "q", "doc_id": "1", "relevance": 4}',
        '{"query_id": "q"}',
        "[]",
        "{",
        "[" * 9999,
    ],
)
def test_malformed_judgments_name_the_line(tmp_path, line):
    path = tmp_path / "judgments.jsonl"
    path.write_text('{"query_id": "q", "doc_id": "1", "relevance": 1}\n' + line)
    with pytest.raises(SpecError, match=r"judgments must be .* \(line 2 of "):
        read_judgments(str(path), "judgments")


def test_msrvtt(tmp_path):
    folder = datasets.msrvtt(tmp_path)
    judged = load("msrvtt", path=str(folder / "MSRVTT_JSFUSION_test.csv"), num_queries=2)
    assert judged.queries == {"ret0": "a person is fixing a bike, slowly", "ret1": "a car drives"}
    assert judged.qrels == {"ret0": {"video9770": 1}, "ret1": {"video9771": 1}}
    fields = {"path": str(folder / "MSRVTT_data.json")}
    train = load("msrvtt", **fields, video_ids=str(folder / "MSRVTT_train.9k.csv"))
    assert train.queries == {"0": "a dog"} and train.qrels == {"0": {"video0": 1}}


def test_karpathy_in_both_directions(tmp_path):
    folder = datasets.karpathy(tmp_path)
    path = str(folder / "dataset_coco.json")
    texts = load("karpathy", path=path)
    assert list(texts.queries) == [f"{100 + i}#{j}" for i in range(4) for j in range(2)]
    assert texts.queries["101#1"] == "Photo 1, sentence 1." and texts.pools is None
    assert texts.qrels["101#1"] == {"101": 1} and texts.measure == "R@1"
    images = load("karpathy", path=path, direction="image_to_text")
    assert images.qrels["103"] == {"103#0": 1, "103#1": 1} and images.measure == "Success@1"
    inputs = list(images.inputs(["100", "102"]))
    assert inputs == [datasets.photos(3)[0], datasets.photos(3)[2]]
    first_captions = load("karpathy", path=path, max_captions=1)
    assert list(first_captions.queries) == [f"{100 + i}#0" for i in range(4)]


def test_images_of_queries_in_an_archive(tmp_path):
    folder = datasets.karpathy(tmp_path, as_zip=True)
    fields = {"path": str(folder / "dataset_coco.json"), "direction": "image_to_text"}
    judged = load("karpathy", **fields, images=str(folder / "val2014.zip"))
    assert list(judged.inputs(["101"])) == [datasets.photos(2)[1]]
    with pytest.raises(SpecError, match=r"benchmark must be .*all query images.*does not exist"):
        list(load("karpathy", **fields).inputs(["101"]))


@pytest.mark.parametrize("direction", ["text_to_image", "image_to_text"])
def test_folds_are_pools(tmp_path, direction):
    path = str(datasets.karpathy(tmp_path) / "dataset_coco.json")
    judged = load("karpathy", path=path, direction=direction, folds=2)
    assert judged.pools is not None
    for number, query_id in enumerate(judged.queries):
        fold = number * 2 // len(judged.queries)
        images = [str(100 + 2 * fold), str(101 + 2 * fold)]
        captions = [f"{image}#{i}" for image in images for i in range(2)]
        expected = images if direction == "text_to_image" else captions
        assert list(judged.pools[query_id]) == expected
        assert judged.qrels[query_id].keys() <= set(expected)
        assert query_id in judged.categories["fold"][f"fold {fold}"]
    with pytest.raises(SpecError, match=r"benchmark\.folds must be a divisor of the 4 images"):
        load("karpathy", path=path, folds=3)


def test_entities_are_phrases(tmp_path):
    folder = datasets.flickr30k(tmp_path)
    fields = {"path": str(folder / "dataset_flickr30k.json")}
    (phrase,) = benchmark("karpathy", **fields, entities=str(folder)).phrases()
    assert (phrase.item_id, phrase.text) == ("11", "Two men")
    np.testing.assert_allclose(phrase.boxes, [[0.1, 0.0, 0.5, 1.0]], atol=1e-6)
    with pytest.raises(SpecError, match=r"entities.*required"):
        benchmark("karpathy", **fields).phrases()


def test_imagecode(tmp_path):
    folder = datasets.imagecode(tmp_path)
    valid = benchmark("imagecode", path=str(folder / "valid_data.json"), num_queries=3)
    judged = valid.load()
    still, video = datasets.SETS
    assert list(judged.queries) == [f"{still}/7", f"{video}/0", f"{video}/9"]
    assert judged.qrels[f"{video}/9"] == {f"{video}/9": 1}
    assert judged.pools[f"{video}/9"] == tuple(f"{video}/{i}" for i in range(10))
    assert judged.categories["media"] == {
        "image": [f"{still}/7"],
        "video": list(judged.queries)[1:],
    }
    run = {f"{still}/7": {f"{still}/3": 0.1, f"{still}/7": 0.2}, f"{video}/0": {f"{video}/4": 1.0}}
    path = valid.write_result(str(tmp_path), BenchmarkRow("full", "e", run, 10, 1.0))
    with open(path) as file:
        assert json.load(file) == {still: {"7": 7}, video: {"0": 4}}
    with pytest.raises(SpecError, match=r"has no labels"):
        load("imagecode", path=str(folder / "test_data_unlabeled.json"))


def test_mmeb(tmp_path):
    folder = datasets.mmeb(tmp_path)
    fields = {"path": str(folder / "CIRR"), "images": str(folder / "image-tasks")}
    judged = load("mmeb", **fields)
    instruction = "Given an image, find a similar image:"
    assert judged.queries["0"] == f"{instruction} Show three bottles."
    assert judged.pools == {
        "0": ("CIRR/1.jpg", "CIRR/2.jpg", "CIRR/3.jpg"),
        "1": ("CIRR/3.jpg", "CIRR/2.jpg:a caption"),
    }
    assert judged.qrels == {"0": {"CIRR/1.jpg": 1}, "1": {"CIRR/3.jpg": 1}}
    (query,) = judged.inputs(["0"])
    assert query == Composed(judged.queries["0"], datasets.photos(1)[0])
    template = load("mmeb", **fields, instruction="template")
    assert template.queries["0"] == "Show three bottles." and template.instruction == instruction
    assert judged.instruction is None and judged.measure == "Success@1"
    images = {"path": str(folder / "ImageNet"), "instruction": "none"}
    classes = load("mmeb", **images, images=fields["images"])
    assert list(classes.inputs(["0"])) == [datasets.photos(1)[0]]
    with pytest.raises(SpecError, match=r"images.*is required in benchmark"):
        load("mmeb", **images)


def test_mmeb_videos(tmp_path):
    path = str(datasets.mmeb(tmp_path) / "MSR-VTT")
    judged = load("mmeb", path=path, video_instruction="Find a video:")
    assert judged.queries["1"] == "Find a video: caption of video2"
    assert judged.qrels["1"] == {"video2": 1} and judged.pools is None


def test_vidore_boxes_are_phrases(tmp_path):
    folder = datasets.vidore(tmp_path)
    german = benchmark("vidore", path=str(folder), language="german")
    judged = german.load()
    assert judged.queries == {"8": "Welche Dosis?"} and judged.qrels == {"8": {"0": 2, "1": 1}}
    (phrase,) = german.phrases()
    assert (phrase.item_id, phrase.text) == ("0", "Welche Dosis?")
    np.testing.assert_allclose(phrase.boxes, [[0.1, 0.1, 0.5, 0.5]])
    scaled = benchmark("vidore", path=str(folder), language="german", box_size=[1000, 1000])
    np.testing.assert_allclose(scaled.phrases()[0].boxes, [[0.02, 0.01, 0.1, 0.05]])
    with pytest.raises(SpecError, match=r"language must be one of english, german"):
        load("vidore", path=str(folder), language="klingon")


def test_a_box_outside_its_page_is_named(tmp_path):
    box = {"annotator": 0, "x1": 20, "x2": 900, "y1": 10, "y2": 50}
    path = str(datasets.vidore(tmp_path, box))
    with pytest.raises(SpecError, match=r"box_size must be a box within .*200 x 100.*page 0"):
        benchmark("vidore", path=path).phrases()


def test_a_missing_file_is_named(tmp_path):
    for name, fields in {
        "multivent": {"judgments": "j"},
        "msrvtt": {},
        "karpathy": {},
        "imagecode": {},
        "mmeb": {},
        "vidore": {},
    }.items():
        absent = str(tmp_path / "absent.csv")
        with pytest.raises(SpecError, match=r"benchmark\.path .*absent\.csv.*does not exist"):
            load(name, path=absent, **fields)
