"""The evaluate job: as a user runs it, and what it says of a spec that cannot be."""

import csv
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from jobs import evaluate
from pipeline.config import SpecError
from pipeline.eval.beir import read_qrels
from pipeline.eval.metrics import means, per_query, read_run
from pipeline.registry import ENCODERS

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
    expected = {(name, score) for name in names for score in ("late", "hybrid")}
    assert set(rows) == expected | {("minilm_pooled", "single")}

    # Every number follows from the written run.
    qrels = read_qrels(str(tmp_path / "benchmark/qrels/test.tsv"))
    for (name, score), row in rows.items():
        stem = name if score == "single" else f"{name}.{score}"
        run = read_run(str(out / "runs" / f"{stem}.trec"))
        assert {len(scores) for scores in run.values()} == {5}  # every parent once
        for measure, value in means(per_query(run, qrels, ["nDCG@10", "R@5"])).items():
            assert float(row[measure]) == pytest.approx(value)
    assert float(rows["full", "late"]["R@5"]) == pytest.approx((1 + 1 / 2) / 2)

    # 384 numbers of 2 bytes a vector; the hybrid score reads the pooled vector too.
    assert float(rows["minilm_pooled", "single"]["vector_bytes"]) == 768
    for name in names:
        late, hybrid = rows[name, "late"], rows[name, "hybrid"]
        vectors = float(late["vectors_per_item"])
        assert float(late["vector_bytes"]) == pytest.approx(768 * vectors)
        assert float(hybrid["vector_bytes"]) == pytest.approx(768 * (vectors + 1))
        assert float(late["all_bytes"]) > float(late["vector_bytes"])
    assert float(rows["hpool_4", "late"]["vectors_per_item"]) == 4

    with (out / "per_query.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 2 * len(rows)
    assert (out / "table.md").read_text().count("\n") == 2 + len(rows)
    assert (out / "quality_bytes.png").read_bytes().startswith(b"\x89PNG")
    resolved = yaml.safe_load((out / "spec.yaml").read_text())
    assert (resolved["k"], resolved["benchmark"]["split"]) == (50, "test")
    assert done.stdout.splitlines()[-1] == str(out / "spec.yaml")
    assert not list(out.rglob("*.tmp"))


def test_what_is_asked_for_alone(spec_file, tmp_path):
    evaluate.main([spec_file, "representations=[hpool_4]", "scores=[late]", "measures=[RR@10]"])
    assert [file.name for file in (tmp_path / "out/runs").iterdir()] == ["hpool_4.late.trec"]


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("representations=[hpool_99]", "representation"),
        ("scores=[best]", "scores.0"),
        ("measures=[nDGC@10]", "measures"),
        ("measures=[]", "measures"),
        ("k=50", "k"),
        ("benchmark.split=dev", "benchmark.split"),
        ("benchmark.name=bier", "benchmark.name"),
        ("index=nowhere", "index"),
    ],
)
def test_illegal_specs(spec_file, tmp_path, override, field):
    with pytest.raises(SpecError) as caught:
        evaluate.main([spec_file, override])
    assert caught.value.field == field
    assert not (tmp_path / "out").exists()


def test_query_vectors_of_ones_own(spec_file, tmp_path):
    """Vectors that the encoder itself made give the very runs of the texts."""
    encoder = ENCODERS.build(ENCODERS.resolve("minilm"))
    texts = {"1": "the lift of a wing", "b": "how to bake bread"}
    tokens = encoder.encode_queries(list(texts.values())).tokens
    rows = [row[mask].tolist() for row, mask in zip(tokens.vectors, tokens.mask, strict=True)]
    path = tmp_path / "queries.parquet"
    pq.write_table(pa.table({"id": list(texts), "vectors": rows}), path)
    for output, more in (("texts", []), ("vectors", [f"query_vectors={path}"])):
        given = [f"output={tmp_path / output}", "scores=[late]", "representations=[full]", *more]
        evaluate.main([spec_file, *given])
    runs = [read_run(str(tmp_path / name / "runs/full.late.trec")) for name in ("texts", "vectors")]
    assert {q: pytest.approx(scores) for q, scores in runs[0].items()} == runs[1]

    pq.write_table(pa.table({"id": ["1"], "vectors": rows[:1]}), path)
    with pytest.raises(SpecError, match="query_vectors: 'b' is judged and has no vectors"):
        evaluate.main([spec_file, f"query_vectors={path}", f"output={tmp_path / 'none'}"])
