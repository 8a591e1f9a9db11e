"""The evaluate job: as a user runs it, and what it says of a spec that cannot be."""

import csv
import shutil
import subprocess
import sys
from dataclasses import replace

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from jobs import evaluate
from pipeline import config
from pipeline.config import SpecError
from pipeline.eval.bm25 import Bm25
from pipeline.eval.evaluation import run
from pipeline.eval.metrics import means, per_query, read_run
from pipeline.eval.report.files import write
from pipeline.eval.results import read_results
from pipeline.eval.spec import EvaluateSpec
from pipeline.eval.topics import read_qrels
from pipeline.index.artefacts import Sample, save_artefact
from pipeline.index.listing import CONTENT, content_hashes
from pipeline.index.reader import ITEMS, IndexReader
from pipeline.registry import ENCODERS
from pipeline.schema import with_metadata
from pipeline.search.fusion import Fusion, FusionWeights
from pipeline.search.searcher import Searcher, open_index

pytestmark = pytest.mark.usefixtures("blank_figures")

QRELS = {"1": {"wing": 1, "flow": 0}, "b": {"bread": 2, "gone": 1}}


@pytest.fixture
def spec_file(index_uri, tmp_path) -> str:
    folder = tmp_path / "benchmark"
    (folder / "qrels").mkdir(parents=True)
    lines = [f"{q}\t{d}\t{g}\n" for q, grades in QRELS.items() for d, g in grades.items()]
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
    (folder / "queries.jsonl").write_text(
        '{"_id": "1", "text": "the lift of a wing"}\n'
        '{"_id": "b", "text": "how to bake bread"}\n'
        '{"_id": "c", "text": "never judged"}\n'
    )
    spec = {
        "index": index_uri,
        "benchmark": {"name": "beir", "path": str(folder)},
        "output": str(tmp_path / "out"),
    }
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    return str(tmp_path / "spec.yaml")


def test_evaluation_as_a_user_runs_it(spec_file, tmp_path):
    command = [sys.executable, "-m", "jobs.evaluate", spec_file, "k=50", "measures=[nDCG@10, R@5]"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 queries without judgments are left out" in done.stdout
    assert "1 of 3 relevant documents are not in the index" in done.stdout
    out = tmp_path / "out"

    with (out / "metrics.csv").open() as file:
        rows = {(row["representation"], row["score"]): row for row in csv.DictReader(file)}
    names = ("full", "hpool_4", "hpool_2", "random_4")
    expected = {(name, score) for name in names for score in ("maxsim", "hybrid")}
    assert set(rows) == expected | {("minilm_pooled", "single_vector"), ("bm25", "bm25")}

    # Every number follows from the written run.
    qrels = read_qrels(str(tmp_path / "benchmark/qrels/test.tsv"))
    for (name, score), row in rows.items():
        stem = name if score in ("single_vector", "bm25") else f"{name}.{score}"
        run = read_run(str(out / "runs" / f"{stem}.trec"))
        # Every parent once; BM25 finds those that share a word with the query.
        assert {len(scores) for scores in run.values()} == ({1} if name == "bm25" else {5})
        for measure, value in means(per_query(run, qrels, ["nDCG@10", "R@5"])).items():
            assert float(row[measure]) == pytest.approx(value)
    assert float(rows["full", "maxsim"]["R@5"]) == pytest.approx((1 + 1 / 2) / 2)

    # 384 numbers of 2 bytes a vector; the hybrid score reads the pooled vector too.
    assert float(rows["minilm_pooled", "single_vector"]["vector_bytes"]) == 768
    for name in names:
        maxsim, hybrid = rows[name, "maxsim"], rows[name, "hybrid"]
        vectors = float(maxsim["vectors_per_item"])
        assert float(maxsim["vector_bytes"]) == pytest.approx(768 * vectors)
        assert float(hybrid["vector_bytes"]) == pytest.approx(768 * (vectors + 1))
        assert float(maxsim["all_bytes"]) > float(maxsim["vector_bytes"])
    assert float(rows["hpool_4", "maxsim"]["vectors_per_item"]) == 4
    assert float(rows["bm25", "bm25"]["all_bytes"]) == 0

    # Each row is held against the full tokens under its score.
    full = float(rows["full", "hybrid"]["nDCG@10"])
    retention = float(rows["hpool_2", "hybrid"]["nDCG@10"]) / full
    assert float(rows["hpool_2", "hybrid"]["retention"]) == pytest.approx(retention)
    assert rows["hpool_2", "hybrid"]["reference"] == "full.hybrid"
    assert {row["pareto"] for row in rows.values()} == {"True", "False"}
    for row in rows.values():
        assert 0 < float(row["median_ms"]) <= float(row["p95_ms"])

    with (out / "per_query.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 2 * len(rows)
    assert (out / "table.md").read_text().count("\n") == 2 + len(rows)
    assert (out / "quality_bytes.png").read_bytes().startswith(b"\x89PNG")
    resolved = yaml.safe_load((out / "spec.yaml").read_text())
    assert (resolved["k"], resolved["benchmark"]["split"]) == (50, "test")
    assert done.stdout.splitlines()[-1] == str(out / "spec.yaml")
    assert not list(out.rglob("*.tmp"))


def test_selected_representations_and_scores(spec_file, tmp_path):
    evaluate.main([spec_file, "representations=[hpool_4]", "scores=[maxsim]", "measures=[RR@10]"])
    names = {file.name for file in (tmp_path / "out/runs").iterdir()}
    assert names == {"hpool_4.maxsim.trec", "bm25.trec"}


def progress(spec_file, capsys, *overrides) -> dict[str, bool]:
    """Evaluates; for each row of the plan whether it was computed."""
    evaluate.main([spec_file, "scores=[maxsim, single_vector]", *overrides])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert [line.split("]")[0] for line in lines] == [
        f"[{number}/{len(lines)}" for number in range(1, len(lines) + 1)
    ]
    return {line.split()[1]: not line.endswith("(cached)") for line in lines}


@pytest.fixture
def own_index(index_uri, tmp_path) -> str:
    """A copy of the index that a test may change."""
    shutil.copytree(index_uri, tmp_path / "index")
    return str(tmp_path / "index")


def add_copy(uri: str, source: str, name: str) -> None:
    """Adds a representation that equals another one."""
    dataset = lance.dataset(f"{uri}/{ITEMS}")
    field = dataset.schema.field(source)
    table = dataset.to_table(columns=[source]).rename_columns([name])
    schema = pa.schema([field.with_name(name)])
    dataset.add_columns(table.cast(schema).combine_chunks().to_reader())


def test_report_states_the_fitting_sample(spec_file, own_index, capsys, tmp_path):
    """The sample of an artefact is held against the items that are evaluated."""
    lance.dataset(f"{own_index}/{ITEMS}").update({"revision": "item_id"})  # as if of the content
    index = IndexReader(own_index)
    info = index.representation("hpool_4")
    (batch,) = index.batches(
        ["item_id", *CONTENT], filter="item_id LIKE 'wing%' OR item_id = 'flow'"
    )
    lost = np.array([7], np.uint64)  # of an item that the index has no more
    sample = Sample({}, np.sort(np.concatenate([content_hashes(batch), lost])))
    artefact = save_artefact(own_index, {"k": np.zeros(1)}, info.compressor_fit, sample)
    dataset = lance.dataset(f"{own_index}/{ITEMS}")
    fitted = replace(info, artefact=artefact).to_metadata()
    field = with_metadata(dataset.schema.field("hpool_4"), fitted)
    table = dataset.to_table(columns=["hpool_4"]).rename_columns(["fitted"])
    schema = pa.schema([field.with_name("fitted")])
    dataset.add_columns(table.cast(schema).combine_chunks().to_reader())
    asked = [spec_file, f"index={own_index}", "representations=[fitted, full]", "scores=[maxsim]"]
    evaluate.main(asked)
    sample = "4 items of the index, 3 of them evaluated"
    assert f"Fitted on {sample}: fitted.\n" in capsys.readouterr().out
    page = (tmp_path / "out/report.html").read_text()
    assert f"<dt>fitted</dt><dd>{sample}</dd>" in page
    evaluate.main([*asked, "filter=parent_id <> 'wing'"])
    assert "Fitted on 4 items of the index, 1 of them evaluated" in capsys.readouterr().out
    evaluate.main([*asked, "filter=parent_id = 'bread'"])
    assert "Fitted on" not in capsys.readouterr().out
    page = (tmp_path / "out/report.html").read_text()
    assert "4 items of the index, none of them evaluated" in page


@pytest.mark.heavy
def test_cached_results_are_not_recomputed(spec_file, own_index, tmp_path, capsys, monkeypatch):
    given = f"index={own_index}"
    first = progress(spec_file, capsys, given)
    assert all(first.values())
    report = (tmp_path / "out/metrics.csv").read_text()

    with monkeypatch.context() as patch:  # neither the encoder nor vectors are touched
        for name in ("encoder", "load", "search", "rank"):
            patch.setattr(Searcher, name, None)
        patch.setattr(Bm25, "__init__", None)
        again = progress(spec_file, capsys, given)
    assert again == dict.fromkeys(first, False)
    assert (tmp_path / "out/metrics.csv").read_text() == report

    add_copy(own_index, "hpool_4", "hpool_4_copy")
    more = progress(spec_file, capsys, given)
    assert more == {**again, "hpool_4_copy.maxsim": True}

    paths = sorted((tmp_path / "out/entries").iterdir(), key=lambda path: path.stat().st_mtime)
    entries = [path for path in paths if path.read_text().startswith('{"rankings"')]  # of rows
    entries[0].write_text(entries[0].read_text()[:-20])
    entries[1].write_text("{}")
    assert sum(progress(spec_file, capsys, given).values()) == 2

    qrels = tmp_path / "benchmark/qrels/test.tsv"
    qrels.write_text(qrels.read_text().replace("b\tgone\t1", "b\theat\t1"))
    assert all(progress(spec_file, capsys, given).values())
    assert all(progress(spec_file, capsys, given, "k=200").values())

    lance.dataset(f"{own_index}/{ITEMS}").delete("item_id = 'flow'")
    assert all(progress(spec_file, capsys, given).values())


def test_judgments_of_items(spec_file, tmp_path, capsys):
    qrels = "1\twing/2\t1\n1\theat/1\t0\nb\tbread\t1\nb\tbread/2\t0\n"
    (tmp_path / "benchmark/qrels/test.tsv").write_text(qrels)
    asked = [spec_file, "scores=[maxsim]", "representations=[full]"]
    with pytest.raises(
        SpecError,
        match="judged must be parent or item, got 'auto', which is"
        " ambiguous .of 4 judged ids, 1 are par",
    ):
        evaluate.main(asked)
    evaluate.main([*asked, "judged=item"])
    assert "1 of 2 relevant documents are not in the index" in capsys.readouterr().out
    for name in ("full.maxsim", "bm25"):
        run = read_run(str(tmp_path / f"out/runs/{name}.trec"))
        assert {"wing/1", "wing/2"} <= set(run["1"])
    page = (tmp_path / "out/report.html").read_text()  # query b, on which every row fails
    assert "On bread/2" in page and '<span class="badge irrelevant">grade 0</span>' in page


def test_no_bm25_without_texts(spec_file, own_index, capsys):
    lance.dataset(f"{own_index}/{ITEMS}").update({"text": "''"})
    rows = progress(spec_file, capsys, f"index={own_index}")
    assert "bm25" not in rows and len(rows) == 5
    assert "bm25" not in progress(spec_file, capsys, "bm25=false")


def test_images_of_examples(spec_file, tmp_path):
    qrels = tmp_path / "benchmark/qrels/test.tsv"
    qrels.write_text(qrels.read_text().replace("b\tbread\t2\n", ""))  # every row fails on b
    maps = []

    def draw(searcher, query, hit, representation):
        maps.append((query, hit.rank, representation))
        return [(f"a map of {hit.item_id}", b"\x89PNG")]

    spec = config.load(EvaluateSpec, spec_file)
    for _ in range(2):
        evaluation = run(spec, lambda line: None, draw_hit=draw)
    write(evaluation, spec.output)
    assert maps and {rank for _, rank, _ in maps} == {1}
    assert len(maps) == len(set(maps))  # kept with the examples
    page = (tmp_path / "out/report.html").read_text()
    assert page.count('src="data:image/png;base64,iVBORw=="') == len(maps)


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("representations=[hpool_99]", "representation"),
        ("scores=[best]", "scores[0]"),
        ("measures=[nDGC@10]", "measures"),
        ("measures=[]", "measures"),
        ("k=50", "k"),
        ("judged=page", "judged"),
        ("benchmark.split=dev", "benchmark.split"),
        ("benchmark.name=bier", "benchmark.name"),
        ("index=nowhere", "index"),
        ("search_page=ftp://host/", "search_page"),
        ("weights=[0, 0]", "weights"),
        ("weights=[1]", "weights"),
        ("weights=[1, -1]", "weights"),
        ("weights=2", "weights"),
        ("candidates=[{generator: single, num_candidates: [99]}]", "candidates[0].num_candidates"),
        ("candidates=[{generator: single, num_candidates: []}]", "candidates[0].num_candidates"),
    ],
)
def test_invalid_specs(spec_file, tmp_path, override, field):
    with pytest.raises(SpecError) as caught:
        evaluate.main([spec_file, override])
    assert caught.value.field == field
    assert not (tmp_path / "out").exists()


def test_queries_without_a_relevant_document(spec_file, tmp_path, capsys):
    qrels = tmp_path / "benchmark/qrels/test.tsv"
    qrels.write_text("1\twing\t0\nb\tbread\t-3\n")
    with pytest.raises(
        SpecError,
        match="benchmark must be a benchmark with a grade above 0"
        " .*'beir', which has no relevant document",
    ):
        evaluate.main([spec_file])
    qrels.write_text("1\twing\t1\nb\tbread\t-3\n")
    evaluate.main([spec_file, "scores=[maxsim]", "representations=[full]"])
    assert "1 queries have no relevant document and score 0 in every row" in capsys.readouterr().out


def test_evaluates_given_query_vectors(spec_file, tmp_path):
    """Vectors that the encoder itself made give the very runs of the texts."""
    encoder = ENCODERS.build(ENCODERS.resolve("minilm"))
    texts = {"1": "the lift of a wing", "b": "how to bake bread"}
    tokens = encoder.encode_queries(list(texts.values())).tokens
    rows = [row[mask].tolist() for row, mask in zip(tokens.vectors, tokens.mask, strict=True)]
    path = tmp_path / "queries.parquet"
    pq.write_table(pa.table({"id": list(texts), "vectors": rows}), path)
    for output, more in (("texts", []), ("vectors", [f"query_vectors={path}"])):
        given = [f"output={tmp_path / output}", "scores=[maxsim]", "representations=[full]", *more]
        evaluate.main([spec_file, *given])
    runs = [
        read_run(str(tmp_path / name / "runs/full.maxsim.trec")) for name in ("texts", "vectors")
    ]
    assert {q: pytest.approx(scores) for q, scores in runs[0].items()} == runs[1]

    pq.write_table(pa.table({"id": ["1"], "vectors": rows[:1]}), path)
    with pytest.raises(
        SpecError,
        match="query_vectors must be vectors for every judged query, got 'b', which has no vectors",
    ):
        evaluate.main([spec_file, f"query_vectors={path}", f"output={tmp_path / 'none'}"])


def test_evaluates_only_filtered_items(spec_file, tmp_path, texts):
    filter = "filter=parent_id <> 'bread'"
    evaluate.main([spec_file, filter, "representations=[full]", "scores=[maxsim]"])
    others = {name.split("/")[0] for name in texts} - {"bread"}
    for name in ("full.maxsim", "bm25"):
        found = read_run(str(tmp_path / f"out/runs/{name}.trec"))
        assert found and {document for scores in found.values() for document in scores} <= others
    with (tmp_path / "out/metrics.csv").open() as file:
        row = next(row for row in csv.DictReader(file) if row["representation"] == "full")
    spec = config.load(EvaluateSpec, spec_file, ["representations=[full]", "scores=[maxsim]"])
    everyone = next(r for r in run(spec, lambda line: None).results if r.name == "full.maxsim")
    assert float(row["vectors_per_item"]) != everyone.vectors_per_item  # bread's are longer


@pytest.mark.heavy
def test_weights_of_the_hybrid_score(spec_file, index_uri, tmp_path, capsys):
    """They are named by the rows that they are of, decide what is kept, and rank."""
    asked = ["representations=[full]", "scores=[maxsim, hybrid]"]
    first = progress(spec_file, capsys, *asked)
    assert set(first) == {"full.maxsim", "full.hybrid", "bm25"}
    weighted = progress(spec_file, capsys, *asked, "weights=[1, 0.25]")
    assert weighted == {"full.maxsim": False, "full.hybrid-1-0.25": True, "bm25": False}
    assert not any(progress(spec_file, capsys, *asked, "weights=[1, 0.25]").values())
    with (tmp_path / "out/metrics.csv").open() as file:
        assert {row["score"] for row in csv.DictReader(file)} == {"bm25", "maxsim", "hybrid 1:0.25"}
    assert "| hybrid 1:0.25 |" in (tmp_path / "out/table.md").read_text()
    assert "full.hybrid-1-0.25" in (tmp_path / "out/report.html").read_text()
    stored = read_results(str(tmp_path / "out"), "output")
    assert {result.name: result.weights for result in stored.results} == {
        "bm25": None, "full.maxsim": None, "full.hybrid-1-0.25": [1.0, 0.25]
    }  # fmt: skip
    run = read_run(str(tmp_path / "out/runs/full.hybrid-1-0.25.trec"))
    options = {"score": "hybrid", "weights": (1, 0.25), "group_by": "parent", "k": 100}
    (ranking,) = open_index(index_uri).rank(["the lift of a wing"], "full", **options)
    assert run["1"] == pytest.approx(ranking.scores_by_parent())
    assert not any(progress(spec_file, capsys, *asked, "weights=[1, 1]").values())

    with pytest.raises(SpecError) as caught:
        evaluate.main([spec_file, "scores=[maxsim]", "weights=[1, 2]"])
    assert str(caught.value) == (
        "weights must be [1.0, 1.0] unless hybrid is among the scores, got [1.0, 2.0]"
    )


@pytest.fixture
def lexical_options(spec_file, lexical_uri) -> list[str]:
    """Arguments of an evaluation of an index with BM25."""
    return [spec_file, f"index={lexical_uri}", "k=3", "measures=[nDCG@3]", "judged=item"]


def test_fused_rows_are_compared_with_maxsim(lexical_options, lexical_uri, tmp_path):
    options = ["representations=[hpool_2, full]", "scores=[maxsim, fused]", "diagnostics=false"]
    options.append("fusion={weights: {bm25: 0.5}}")
    options.append("candidates=[{generator: single+bm25, num_candidates: [3]}]")
    evaluate.main([*lexical_options, *options])
    stored = read_results(str(tmp_path / "out"), "output")
    searcher = open_index(lexical_uri)
    for name in ("hpool_2", "full"):
        row = stored.row(f"{name}.fused")
        assert (row.score, row.fusion["weights"]["bm25"]) == ("fused", 0.5)
        assert row.first_stage == f"{name}.maxsim" == stored.comparison(row).reference
        fusion = Fusion(weights=FusionWeights(bm25=0.5))
        keywords = {"k": 3, "score": "fused", "fusion": fusion}
        (ranking,) = searcher.rank(["the lift of a wing"], name, **keywords)
        run_of_row = read_run(str(tmp_path / f"out/runs/{name}.fused.trec"))
        assert run_of_row["1"] == pytest.approx(ranking.scores_by_item())
        # 8 bytes for each of the terms
        assert row.vector_bytes > stored.row(f"{name}.maxsim").vector_bytes
    assert stored.row("full.single+bm25-3").candidates["generator"] == "single+bm25"
    assert (tmp_path / "out/report.html").stat().st_size > 1000

    # Settings are part of the cache keys.
    entries = len(list((tmp_path / "out/entries").iterdir()))
    evaluate.main([*lexical_options, *options[:-2], "fusion={weights: {}}"])
    assert len(list((tmp_path / "out/entries").iterdir())) == entries + 3


def test_fit_fusion_writes_settings_that_searches_read(lexical_options, tmp_path, capsys):
    out = str(tmp_path / "fusion.yaml")
    evaluate.main([*lexical_options, "representations=[hpool_2]", "--fit-fusion", out])
    printed = capsys.readouterr().out
    assert "nDCG@3 on held-out queries:" in printed
    # Two queries do not suffice to prefer a fusion.
    fusion = config.load(Fusion, out)
    assert fusion.weights == FusionWeights(bm25=0)
    options = ["scores=[maxsim, fused]", f"fusion={out}", "representations=[hpool_2]"]
    evaluate.main([*lexical_options, *options, "diagnostics=false"])
    stored = read_results(str(tmp_path / "out"), "output")
    assert stored.row("hpool_2.fused").values == stored.row("hpool_2.maxsim").values


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["scores=[fused]"],
            "fusion.weights must be set for the score fused, got None; fit them with",
        ),
        (
            ["scores=[fused]", "fusion={weights: {}}"],
            "scores must be maxsim, got 'fused', which needs bm25, which was not",
        ),
        (["fusion={agreement: 0}"], "scores must be a list with fused if fusion is set, got []"),
        (["--fit-fusion", "out.yaml"], "score must be maxsim, got 'fused', which needs bm25"),
        (
            ["--fit-fusion", "out.yaml", "representations=[full, hpool_2]"],
            "representations must be a list of one representation for --fit-fusion",
        ),
    ],
)
def test_invalid_fusion(spec_file, options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as caught:
        evaluate.main([spec_file, *options])
    assert str(caught.value).startswith(message)


def test_recall_of_candidate_generators(spec_file, index_uri, tmp_path, capsys):
    """Rows of a generator are compared with the exact search of the same representation."""
    options = ["k=3", "measures=[nDCG@3]", "representations=[hpool_2]", "judged=item"]
    options.append("candidates=[{generator: single, num_candidates: [3, 100]}]")
    evaluate.main([spec_file, *options])
    printed = capsys.readouterr().out
    assert "single of hpool_2.maxsim" in printed
    stored = read_results(str(tmp_path / "out"), "output")
    rows = {row.candidates["num_candidates"]: row for row in stored.results if row.candidates}
    exact = stored.row("hpool_2.maxsim")
    assert rows[100].values == exact.values
    assert "recall@10" not in rows[100].candidates  # there are only three hits
    for row in rows.values():
        assert row.first_stage == exact.name
        assert stored.comparison(row).reference == exact.name
        # the single vector has 384 dimensions of two bytes
        assert row.vector_bytes == pytest.approx(exact.vector_bytes + 768, abs=100)
    searcher = open_index(index_uri)
    keywords = {"k": 3, "candidates": "single", "num_candidates": 3}
    (ranking,) = searcher.rank(["the lift of a wing"], "hpool_2", **keywords)
    run = read_run(str(tmp_path / "out/runs/hpool_2.single-3.trec"))
    assert run["1"] == pytest.approx(ranking.scores_by_item())
    with (tmp_path / "out/candidates.csv").open() as file:
        assert [row["candidates"] for row in csv.DictReader(file)] == ["3", "100"]
    assert (tmp_path / "out/candidates_recall.png").exists()
    assert "Candidate generators" in (tmp_path / "out/report.html").read_text()

    for override, sentence in (
        ("candidates=[{generator: ivf}]", "candidates[0].generator must be one of exact, single"),
        (
            "candidates=[{generator: single, representation: full}]",
            "candidates[0].representation must be one of hpool_2, got 'full', which is not",
        ),
    ):
        with pytest.raises(SpecError) as caught:
            evaluate.main([spec_file, *options[:-1], override])
        assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("filter", "sentence"),
    [
        ("nonsense", "filter must be a condition on "),
        ("item_id = ''", "which matches no items"),
    ],
)
def test_invalid_filters(spec_file, filter, sentence):
    spec = config.load(EvaluateSpec, spec_file, [f"filter={filter}"])
    with pytest.raises(SpecError, match=sentence):
        run(spec, lambda line: None)


def stored_vectors(uri: str, name: str) -> dict[str, np.ndarray]:
    """The vectors of each item that has any, in float64."""
    table = lance.dataset(f"{uri}/{ITEMS}").to_table(columns=["item_id", name])
    rows = zip(table["item_id"].to_pylist(), table[name].to_pylist(), strict=True)
    return {item_id: np.array(vectors, float) for item_id, vectors in rows if vectors is not None}


def best_of(query: np.ndarray, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    similarity = query @ vectors.T
    return similarity.max(axis=1), similarity.argmax(axis=1)


def test_diagnostics_equal_those_of_stored_vectors(spec_file, index_uri, tmp_path, capsys):
    evaluate.main([spec_file, "scores=[maxsim]"])
    note = "random pruning was measured with fewer than 5 seeds (random_4: 1)"
    assert note in capsys.readouterr().out
    with (tmp_path / "out/metrics.csv").open() as file:
        rows = {row["representation"]: row for row in csv.DictReader(file)}
    encoder = ENCODERS.build(ENCODERS.resolve("minilm"))
    tokens = encoder.encode_queries(["the lift of a wing", "how to bake bread"]).tokens
    queries = [v[m].double().numpy() for v, m in zip(tokens.vectors, tokens.mask, strict=True)]

    # The score of a relevant parent is that of its best item with uncompressed tokens.
    full = stored_vectors(index_uri, "full")
    pairs = []
    for query, parent in zip(queries, ("wing", "bread"), strict=True):
        scores = {i: best_of(query, v)[0].sum() for i, v in full.items() if i.startswith(parent)}
        pairs.append((query, max(scores, key=scores.get), max(scores.values())))

    for name in ("full", "hpool_4", "random_4"):
        vectors = stored_vectors(index_uri, name)
        scores = [best_of(query, vectors[item])[0].sum() for query, item, _ in pairs]
        ratios = [score / whole for score, (_, _, whole) in zip(scores, pairs, strict=True)]
        assert float(rows[name]["OSR"]) == pytest.approx(np.mean(ratios), abs=1e-4)
        whole = sum(whole for _, _, whole in pairs)
        assert float(rows[name]["OSR ratio of means"]) == pytest.approx(sum(scores) / whole, 1e-4)
        used = {
            (item, int(place))
            for query in queries
            for item, vectors_of_item in vectors.items()
            for place in best_of(query, vectors_of_item)[1]
        }
        num_vectors = sum(map(len, vectors.values()))
        assert float(rows[name]["used"]) == pytest.approx(len(used) / num_vectors)
        cosines = [vectors_of_item @ vectors_of_item.T for vectors_of_item in vectors.values()]
        off = [(c.sum() - np.trace(c)) / (len(c) * (len(c) - 1)) for c in cosines]
        assert float(rows[name]["similarity_mean"]) == pytest.approx(np.mean(off), abs=1e-3)
    assert float(rows["full"]["OSR"]) == 1
    assert float(rows["full"]["OSR pairs"]) == 2
    assert float(rows["hpool_4"]["p_random"]) == 1 and rows["random_4"]["p_random"] == ""
    for name in ("index_utilisation", "diagnostics_quality"):
        assert (tmp_path / f"out/{name}.png").read_bytes().startswith(b"\x89PNG")


def test_no_osr_without_uncompressed_tokens(spec_file, own_index, tmp_path, capsys):
    lance.dataset(f"{own_index}/{ITEMS}").drop_columns(["full"])
    evaluate.main([spec_file, f"index={own_index}", "scores=[maxsim]", "bm25=false"])
    assert "no OSR for hpool_4, hpool_2, random_4: the index has" in capsys.readouterr().out
    with (tmp_path / "out/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["OSR"] for row in rows} == {""}
    assert all(0 < float(row["gini"]) < 1 and float(row["used_relevant"]) > 0 for row in rows)


def test_diagnostics_can_be_disabled(spec_file, tmp_path):
    evaluate.main([spec_file, "scores=[maxsim]", "diagnostics=false"])
    with (tmp_path / "out/metrics.csv").open() as file:
        assert {row["used"] for row in csv.DictReader(file)} == {""}
    assert "<h3>Diagnostics</h3>" not in (tmp_path / "out/report.html").read_text()


def test_table_by_category_of_document(spec_file, own_index, tmp_path):
    metadata = """'{"topic": "' || parent_id || '"}'"""
    lance.dataset(f"{own_index}/{ITEMS}").update({"metadata": metadata})
    spec = config.load(EvaluateSpec, spec_file, [f"index={own_index}", "scores=[maxsim]"])
    evaluation = run(
        spec.model_copy(update={"document_categories": "metadata.topic"}), lambda line: None
    )
    write(evaluation, spec.output)
    assert evaluation.document_categories == {"bread": ["b"], "wing": ["1"]}
    with (tmp_path / "out/document_categories.csv").open() as file:
        rows = {(row["row"], row["category"]): row for row in csv.DictReader(file)}
    assert len(rows) == 4 * 2
    for (name, kind), row in rows.items():
        query_id = {"bread": "b", "wing": "1"}[kind]
        assert float(row["nDCG@10"]) == evaluation.value(name, query_id)
        ((score, full),) = evaluation.row(name).diagnosis.pairs[query_id]
        assert float(row["OSR"]) == pytest.approx(score / full)
    page = (tmp_path / "out/report.html").read_text()
    assert "By category of document" in page and "nDCG@10, 1 query" in page

    given = [spec_file, f"index={own_index}", "document_categories=metadata.colour"]
    with pytest.raises(
        SpecError,
        match="document_categories must be .*metadata.topic.*, got"
        " 'metadata.colour', which is not in the metadata",
    ):
        evaluate.main(given)
    with pytest.raises(
        SpecError,
        match="document_categories must be one of item_id, .*, got 'span', which is not a text",
    ):
        evaluate.main([spec_file, "document_categories=span"])
    spec = config.load(EvaluateSpec, spec_file, ["scores=[maxsim]", "document_categories=modality"])
    assert run(spec, lambda line: None).document_categories == {"text": ["1", "b"]}
