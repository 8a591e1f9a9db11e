"""Reranking of search results with EDJE's joint encoder, for text and image queries."""

from __future__ import annotations

import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image, ImageOps

from jobs import search
from pipeline import config
from pipeline.config import SpecError
from pipeline.eval.evaluation import run
from pipeline.eval.metrics import read_run
from pipeline.eval.report.files import write
from pipeline.eval.spec import EvaluateSpec
from pipeline.eval.views import depth_scans
from pipeline.index.reader import IndexReader
from pipeline.schema import Composed
from pipeline.search.map_sheets import HIT_STEP
from pipeline.search.rerankers.contents import NO_TEXT
from pipeline.search.rerankers.edje import NO_TOKENS
from pipeline.search.searcher import open_index
from pipeline.search.sharded import ShardedSearcher
from tests.encoders.edje.models import edje_of, reranker_of
from tests.images import index_captioned, noise, png

pytestmark = pytest.mark.usefixtures("cluster")

NUM_PHOTOS = 7
TEXT = "heat at the wing"
SINGLE = {"representation": "hpool_4", "score": "single_vector", "explain": False}


@pytest.fixture(scope="module")
def dual(checkpoint) -> dict[str, Any]:
    return {"name": "dual", "model": checkpoint("siglip"), "dtype": "float32"}


@pytest.fixture(scope="module")
def model(dual, tmp_path_factory) -> str:
    return edje_of(tmp_path_factory.mktemp("edje"), dual)


@pytest.fixture(scope="module")
def photos() -> dict[str, bytes]:
    return {f"{seed}.png": png(noise(60 + seed, 50, seed)) for seed in range(NUM_PHOTOS)}


@pytest.fixture(scope="module")
def uri(cluster, tmp_path_factory, dual, model, photos) -> str:
    """Returns an index of images with tokens; all but one have captions."""
    return index_captioned(tmp_path_factory.mktemp("photos"), dual, photos, rerank=model)


def stored_tokens(uri: str) -> dict[str, torch.Tensor | None]:
    table = IndexReader(uri).dataset.to_table(columns=["item_id", "rerank_tokens"])
    return {
        row["item_id"]: row["rerank_tokens"]
        and torch.tensor(np.array(row["rerank_tokens"], np.float16)).unsqueeze(0)
        for row in table.to_pylist()
    }


def joint_scores(reranker: Any, text: str, uri: str) -> dict[str, float]:
    """Returns the joint scores of all items, computed one by one."""
    scores = {}
    for name, tokens in stored_tokens(uri).items():
        if tokens is not None:
            mask = torch.ones(tokens.shape[:2], dtype=torch.bool)
            scores[name] = reranker.joint.scores([text], tokens, mask).item()
    return scores


@pytest.mark.parametrize("add_first_stage", [False, True])
@pytest.mark.parametrize("depth", [1, 4, 100])
def test_order_by_joint_encoder(uri, model, depth, add_first_stage):
    searcher, reranker = open_index(uri), reranker_of(model, depth, add_first_stage)
    first = searcher.search(TEXT, k=NUM_PHOTOS, **SINGLE)
    joint = joint_scores(reranker, TEXT, uri)
    value = {h.item_id: joint[h.item_id] + add_first_stage * h.score for h in first}
    expected = sorted(first[:depth], key=lambda h: -value[h.item_id]) + first[depth:]
    reranked = searcher.search(TEXT, k=NUM_PHOTOS, rerank=reranker, **SINGLE)
    assert [h.item_id for h in reranked] == [h.item_id for h in expected]
    assert [h.rank for h in reranked] == list(range(1, NUM_PHOTOS + 1))
    for hit, before in zip(reranked, expected, strict=True):
        record = hit.rerank
        assert (hit.first_stage.rank, hit.first_stage.score) == (before.rank, before.score)
        assert record.num_truncated_tokens == 0 and record.problem is None
        if before.rank <= depth:
            assert record.score == pytest.approx(joint[hit.item_id], abs=1e-5)
            assert hit.score == pytest.approx(value[hit.item_id], abs=1e-5)
        else:
            assert record.score is None and hit.score == before.score
    fewer = searcher.search(TEXT, k=2, rerank=reranker, **SINGLE)
    assert [h.item_id for h in fewer] == [h.item_id for h in reranked[:2]]
    if depth == 100 and not add_first_stage:
        assert [h.item_id for h in reranked] != [h.item_id for h in first]


def test_default_rerank_depth(model):
    reranker = reranker_of(model)
    assert reranker.spec.top == 10 and not reranker.spec.add_first_stage


def test_batches_and_shards_equal_single_queries(uri, model):
    searcher, reranker = open_index(uri), reranker_of(model, 4)
    texts = [TEXT, "lift", "a cone in a stream"]
    together = searcher.search(texts, rerank=reranker, **SINGLE)
    for text, hits in zip(texts, together, strict=True):
        single = searcher.search(text, rerank=reranker, **SINGLE)
        assert [h.item_id for h in hits] == [h.item_id for h in single]
        for hit, other in zip(hits, single, strict=True):
            assert hit.score == pytest.approx(other.score, abs=1e-5)
    with ShardedSearcher(uri, num_shards=2, num_cpus=0.5) as sharded:
        assert sharded.search(texts, rerank=reranker, **SINGLE) == together
    assert searcher.search([], "hpool_4", rerank=reranker) == []


def test_image_query_is_scored_with_texts(uri, model, photos):
    """An image has the same tokens as query and as item; items without text are flagged."""
    searcher, reranker = open_index(uri), reranker_of(model, 5)
    tokens, mask = reranker.image_tokens(searcher, [photos["3.png"]])
    torch.testing.assert_close(tokens, stored_tokens(uri)["3.png"], atol=2e-3, rtol=2e-3)
    assert mask.all()

    first = searcher.search(photos["3.png"], k=NUM_PHOTOS, **SINGLE)
    reranked = searcher.search(photos["3.png"], k=NUM_PHOTOS, rerank=reranker, **SINGLE)
    captions = {name: f"a wing with {i} engines" for i, name in enumerate(photos) if i}
    value = {n: reranker.joint.scores([text], tokens, mask).item() for n, text in captions.items()}
    candidates = [h.item_id for h in first[:5]]
    best = iter(sorted((n for n in candidates if n in value), key=lambda name: -value[name]))
    expected = [next(best) if name in value else name for name in candidates]
    assert [h.item_id for h in reranked] == expected + [h.item_id for h in first[5:]]
    for hit in reranked:
        is_flagged = hit.item_id == "0.png" and hit.first_stage.rank <= 5
        assert hit.rerank.problem == (NO_TEXT if is_flagged else None)


def test_item_without_tokens_keeps_its_rank(tmp_path, uri, model):
    uri = str(shutil.copytree(uri, tmp_path / "index"))
    searcher, reranker = open_index(uri), reranker_of(model, 5)
    first = searcher.search(TEXT, k=NUM_PHOTOS, **SINGLE)
    second, sixth = first[1].item_id, first[5].item_id
    dataset = IndexReader(uri).dataset
    table = dataset.to_table()
    column = table["rerank_tokens"].to_pylist()
    ids = table["item_id"].to_pylist()
    column = [None if i in (second, sixth) else v for i, v in zip(ids, column, strict=True)]
    field = table.schema.field("rerank_tokens")
    position = table.schema.get_field_index("rerank_tokens")
    table = table.set_column(position, field, pa.array(column, field.type))
    lance.write_dataset(table, dataset.uri, mode="overwrite")
    searcher = open_index(uri)
    reranked = searcher.search(TEXT, k=NUM_PHOTOS, rerank=reranker, **SINGLE)
    assert reranked[1].item_id == second and reranked[1].rerank.problem == NO_TOKENS
    assert reranked[1].score == first[1].score and reranked[1].rerank.score is None
    value = joint_scores(reranker, TEXT, uri)
    others = sorted((first[i].item_id for i in (0, 2, 3, 4)), key=lambda name: -value[name])
    assert [reranked[i].item_id for i in (0, 2, 3, 4)] == others
    # Items below the rerank depth are not scored or flagged.
    assert reranked[5].item_id == sixth and reranked[5].rerank.problem is None


def test_deleted_items_and_no_candidates(tmp_path, uri, model, photos):
    uri = str(shutil.copytree(uri, tmp_path / "index"))
    searcher, reranker = open_index(uri), reranker_of(model)
    before = searcher.search(TEXT, rerank=reranker, **SINGLE)
    best = before[0].item_id
    IndexReader(uri).dataset.delete(f"item_id = '{best}'")
    assert searcher.search(TEXT, rerank=reranker, **SINGLE) == before  # still at the old version
    after = open_index(uri).search(TEXT, rerank=reranker, **SINGLE)
    assert [h.item_id for h in after] == [h.item_id for h in before[1:]]
    for restricted in ({"filter": "modality = 'text'"}, {"ids": [best]}, {"ids": []}):
        assert open_index(uri).search(TEXT, rerank=reranker, **restricted, **SINGLE) == []
        assert (
            open_index(uri).search(photos["3.png"], rerank=reranker, **restricted, **SINGLE) == []
        )


def test_long_text_is_truncated(tmp_path, uri, dual):
    short = reranker_of(edje_of(tmp_path, dual, max_text_tokens=6))
    # The adapter and therefore the tokens are those of the index.
    hits = open_index(uri).search(TEXT, rerank=short, **SINGLE)
    num_tokens = len(short.joint.tokenizer(TEXT)["input_ids"])
    assert num_tokens > 6
    assert {hit.rerank.num_truncated_tokens for hit in hits} == {num_tokens - 6}


def test_rejects_invalid_requests(tmp_path, uri, dual, model, photos):
    """Errors are reported before queries are encoded."""
    searcher, reranker = open_index(uri), reranker_of(model)
    plain = index_captioned(tmp_path / "plain", dual, photos)
    with pytest.raises(
        SpecError,
        match=r"^rerank.model must be an EDJE whose rerank_tokens the index has, got '.*';"
        r" .*`maxray add tokens SPEC.yaml rerank=.*`$",
    ):
        open_index(plain).search(TEXT, rerank=reranker, **SINGLE)
    other = reranker_of(edje_of(tmp_path / "other", dual, seed=1))
    adapters = "an EDJE model with the adapter of the index, .*, which has the adapter "
    with pytest.raises(SpecError, match=f"^rerank.model must be {adapters}"):
        searcher.search(TEXT, rerank=other, **SINGLE)
    rule = "null unless every query is a text or an image"
    for query in (np.ones((2, 32)), Composed(TEXT, photos["1.png"]), searcher.queries([TEXT])):
        with pytest.raises(
            SpecError, match=f"^rerank must be {rule}, got .*, which does not support other"
        ):
            searcher.search(query, "hpool_4", rerank=reranker)
    with pytest.raises(SpecError, match="^rerank.top must be greater than or equal to 1, got 0$"):
        reranker_of(model, 0)
    with pytest.raises(
        SpecError, match="^rerank.model must be a folder .*, which has no edje.json$"
    ):
        reranker_of(str(tmp_path))
    with pytest.raises(SpecError, match="^k must be greater than or equal to 1, got 0$"):
        searcher.search(TEXT, k=0, rerank=reranker)
    # Image queries do not use stored tokens.
    assert open_index(plain).search(photos["1.png"], rerank=reranker, **SINGLE)[0].rerank


def test_runs_have_the_order_of_the_second_stage(uri, model):
    searcher, reranker = open_index(uri), reranker_of(model, 4)
    options = {name: value for name, value in SINGLE.items() if name != "explain"}
    rankings = searcher.rank([TEXT], k=NUM_PHOTOS, **options)
    (ranking,) = reranker.rerank(searcher, [TEXT], rankings, NUM_PHOTOS)
    scores = ranking.scores_by_item()
    reranked = searcher.search(TEXT, k=NUM_PHOTOS, rerank=reranker, **SINGLE)
    assert list(scores) == [hit.item_id for hit in reranked]
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    assert len(set(scores.values())) == NUM_PHOTOS
    assert replace(ranking, first_stage=None).scores_by_item() != scores


def test_the_search_job(uri, dual, model, photos, tmp_path, capsys):
    """Covers printed hits, JSON, runs, image queries and invalid options."""
    edje = ["--score", "single_vector", "--rerank", "edje", f"model={model}", "top=4"]
    command = [uri, *edje]
    reranker = reranker_of(model, 4)
    reranked = open_index(uri).search(TEXT, rerank=reranker, score="single_vector")
    search.main([uri, TEXT, *edje])
    lines = [line for line in capsys.readouterr().out.splitlines() if line[:3].strip()]
    for line, hit in zip(lines, reranked, strict=True):
        assert hit.item_id in line and f"(was {hit.first_stage.rank})" in line
    search.main([uri, TEXT, *edje, "--json"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["first_stage"]["rank"] for row in rows] == [h.first_stage.rank for h in reranked]

    (tmp_path / "queries.tsv").write_text(f"q\t{TEXT}\n")
    (tmp_path / "3.png").write_bytes(photos["3.png"])
    out = str(tmp_path / "edje.trec")
    search.main([*command, "--queries", str(tmp_path / "queries.tsv"), "--run", out])
    assert list(read_run(out)["q"]) == [hit.item_id for hit in reranked]
    assert " queries/s\n" in capsys.readouterr().out
    search.main([*command, "--image", str(tmp_path / "3.png")])
    assert "(was 1" in capsys.readouterr().out
    search.main([uri, TEXT, *edje, "precision=int8", "--json"])
    in_int8 = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    joint = {row["item_id"]: row["rerank"]["score"] for row in rows}
    errors = [abs(row["rerank"]["score"] - joint[row["item_id"]]) for row in in_int8[:4]]
    assert 0 < max(errors) < 0.2
    short = edje_of(tmp_path / "short", dual, max_text_tokens=6)
    search.main([uri, TEXT, "--score", "single_vector", "--rerank", "edje", f"model={short}"])
    assert re.search(r"reranker truncated the query by \d+ tokens", capsys.readouterr().out)
    for invalid, message in (
        (["maxsim"], "rerank.name must be one of blip, .*, got 'maxsim'"),
        (["edje"], "field 'model' is required in rerank"),
        (["edje", "depth=3"], "unknown field 'depth' in rerank"),
        (["edje", model], "override must be of the form dotted.field=value"),
    ):
        with pytest.raises(SpecError, match=f"^{message}"):
            search.main([uri, TEXT, "--rerank", *invalid])


def test_sheet_shows_hits_of_both_stages(uri, model, photos, tmp_path, capsys):
    """The first row shows the hits of the first stage, in order."""
    image = Path(uri).parent / "1.png"
    written = tmp_path / "sheet.png"
    command = [uri, TEXT, "--score", "single_vector", "--k", "3", "--save-sheet", str(written)]
    search.main([*command, "--rerank", "edje", f"model={model}", "top=5"])
    assert f"sheet: {written}" in capsys.readouterr().out
    searcher = open_index(uri)
    rows = [
        searcher.search(TEXT, k=3, score="single_vector", rerank=second)
        for second in (None, reranker_of(model, 5))
    ]
    assert [hit.item_id for hit in rows[0]] != [hit.item_id for hit in rows[1]]

    def most_similar(sheet: Image.Image, row: int, column: int) -> str:
        left, top = 6 + column * HIT_STEP, 34 + row * (HIT_STEP + 52) + 48
        width, height = HIT_STEP - 10, HIT_STEP - 2
        crop = np.asarray(sheet.crop((left, top, left + width, top + height)), float)
        distance = {}
        for name, photo in photos.items():
            expected = Image.new("RGB", (width, height), "white")
            photo = Image.open(io.BytesIO(photo)).convert("RGB")
            expected.paste(ImageOps.contain(photo, (width, height)), (0, 0))
            distance[name] = np.abs(np.asarray(expected, float) - crop).mean()
        return min(distance, key=distance.get)

    both = Image.open(written).convert("RGB")
    for row, hits in enumerate(rows):
        names = [most_similar(both, row, column) for column in range(3)]
        assert names == [hit.item_id for hit in hits]
    search.main(command)
    one = Image.open(written).convert("RGB")
    assert one.width == both.width and both.height - one.height == HIT_STEP + 52

    image.rename(image.with_suffix(".gone"))  # replaced by its id
    try:
        search.main([*command[:-3], "7", *command[-2:]])
    finally:
        image.with_suffix(".gone").rename(image)
    assert Image.open(written).width > one.width
    assert f"sheet: {written}; 1 hits have no readable image" in capsys.readouterr().out
    written.unlink()
    search.main([*command, "--filter", "item_id = 'x'"])
    assert "sheet: not written; the query has no hits" in capsys.readouterr().out
    assert not written.exists()
    with pytest.raises(
        SpecError, match=r"^save-sheet must be a file that ends with .png, got '.*y.txt'$"
    ):
        search.main([*command[:-1], str(tmp_path / "y.txt")])
    for options, rule in (
        (["--json"], "a single query and no --run or --json"),
        (["--run", "x"], "a single query and no --run or --json"),
        (["--image", str(image)], "a text query"),
    ):
        with pytest.raises(SystemExit) as exit:
            search.main([*command, *options])
        message = f"--save-sheet requires {rule}"
        assert exit.value.code == 2 and message in capsys.readouterr().err


def test_evaluation_has_a_row_per_reranker(uri, model, photos, tmp_path):
    """Each row has latency, bytes and the metrics of its ranking."""
    folder, queries = tmp_path / "benchmark", {"a": TEXT, "b": "lift", "c": "a cone"}
    (folder / "qrels").mkdir(parents=True)
    relevant = dict(zip(queries, ["3.png", "1.png", "5.png"], strict=True))
    lines = [f"{query}\t{item}\t1\n" for query, item in relevant.items()]
    (folder / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
    lines = [json.dumps({"_id": query, "text": text}) for query, text in queries.items()]
    (folder / "queries.jsonl").write_text("\n".join(lines))
    rerank = [
        {"name": "edje", "model": model, "top": 3},
        {"name": "edje", "model": model, "top": 7, "add_first_stage": True},
    ]
    rerank += [
        {"name": "edje", "model": model, "score": "maxsim", "label": "after_maxsim"},
        {"name": "edje", "model": model, "top": 5},
        {"name": "edje", "model": model, "top": 5, "precision": "bfloat16"},
    ]
    fields = {
        "index": uri,
        "benchmark": {"name": "beir", "path": str(folder)},
        "output": str(tmp_path / "out"),
        "measures": ["R@1", "RR"],
        "judged": "item",
        "rerank": rerank,
    }
    spec = config.parse(EvaluateSpec, fields)
    evaluation = run(spec, lambda line: None)
    names = [result.name for result in evaluation.results]
    assert names[-5:] == ["after_maxsim", "edje_3", "edje_5", "edje_5_bfloat16", "edje_7_added"]
    (scan,) = depth_scans(evaluation)  # one reranker with one first stage
    assert {depth: row.name for depth, row in scan.rows.items()} == {3: "edje_3", 5: "edje_5"}
    write(evaluation, spec.output)
    assert Image.open(tmp_path / "out/reranking_by_depth.png").width > 800
    searcher = open_index(uri)
    for name, reranker, score in (
        ("edje_3", reranker_of(model, 3), "single_vector"),
        ("edje_7_added", reranker_of(model, 7, add_first_stage=True), "single_vector"),
        ("after_maxsim", reranker_of(model), "maxsim"),
    ):
        row = evaluation.row(name)
        for query, text in queries.items():
            hits = searcher.search(text, score=score, rerank=reranker, explain=False)
            rank = [hit.item_id for hit in hits].index(relevant[query]) + 1
            assert row.values[query] == {"R@1": float(rank == 1), "RR": pytest.approx(1 / rank)}
        first = evaluation.row(row.first_stage)
        assert first.score == score and evaluation.comparison(row).reference == first.name
        assert row.median_ms > 0 and row.queries_per_second > 0
        # Three tokens of 32 dimensions in float16.
        assert row.vector_bytes - first.vector_bytes == 3 * 32 * 2
        assert row.vectors_per_item - first.vectors_per_item == 3
    lines = []
    run(spec, lines.append)
    assert all("(cached)" in line for line in lines if line.startswith("["))
    assert "edje_3" in (tmp_path / "out/table.md").read_text()
    assert (tmp_path / "out/runs/edje_3.trec").is_file()
    for invalid, message in (
        (
            [rerank[0], rerank[0]],
            "rerank must be unique .*, got 'edje_3', which occurs twice",
        ),
        (
            [{"name": "edje", "model": str(tmp_path)}],
            r"^rerank\[0\].model must be .*, which has no edje.json",
        ),
    ):
        with pytest.raises(SpecError, match=message):
            run(config.parse(EvaluateSpec, {**fields, "rerank": invalid}), lines.append)
