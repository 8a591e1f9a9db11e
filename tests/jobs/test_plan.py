"""The job jobs.plan on small collections and without any files."""

from __future__ import annotations

import csv
import json

import pytest
import yaml

from jobs import plan
from pipeline.config import JobError, SpecError
from tests.conftest import CRANFIELD, ROOT
from tests.pdfs import Page, pdf

pytestmark = pytest.mark.usefixtures("blank_figures")

GIVEN = {
    "num_items": 1_000_000,
    "tokens": 1000,
    "dim": 128,
    "source_bytes": 2e5,
    "other_bytes": 1000,
    "startup_seconds": 60,
    "rates": {"read": 25, "prepare": 20, "encode": 10, "compress": 100, "write": 500},
    "prices": {"cpu_hour": 0.05, "gpu_hour": 2, "gb_month": 0.02},
}
PROFILE = {
    "read": {"num_cpus": 1, "max_actors": 64},
    "prepare": {"num_cpus": 1, "max_actors": 48},
    "encode": {"num_cpus": 2, "num_gpus": 1, "max_actors": 8},
    "write": {"num_cpus": 1, "max_actors": 8},
}

SOURCES = [("text", "letters"), ("pages", "papers")]


@pytest.fixture
def files(tmp_path):
    """Function that writes values as YAML files and returns their paths."""

    def write(**values):
        paths = []
        for name, value in values.items():
            (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(value))
            paths.append(str(tmp_path / f"{name}.yaml"))
        return paths

    return write


def pages(**fields):
    return {
        "index": "/nowhere/index",
        "source": {"name": "pages", "path": "/nowhere/pages"},
        "encoder": {"name": "colpali", "model": "/nowhere/model"},
        "representations": [
            {"compressor": {"name": "hpool", "num_vectors": 32}, "codec": {"name": "int8"}},
            {"compressor": {"name": "sap", "ratio": 0.1}},
        ],
        **fields,
    }


def test_without_a_corpus(files, tmp_path, capsys):
    spec, profile, given = files(spec=pages(), profile=PROFILE, given=GIVEN)
    out = tmp_path / "out"
    plan.main([spec, "--resources", profile, "--assumptions", given, "--out", str(out)])
    printed = capsys.readouterr().out
    values = json.loads((out / "plan.json").read_text())
    # 8 GPUs at 1 / (1/10 + 1/100) items/s
    assert values["estimate"]["rate"] == pytest.approx(8 / 0.11)
    assert values["estimate"]["limit"] == "encode + compress"
    assert "limited by the stage encode + compress" in printed
    hours = values["seconds"] / 3600
    assert hours == pytest.approx((60 + 1e6 / (8 / 0.11)) / 3600, rel=0.01)
    assert values["estimate"]["gpu_hours"] == pytest.approx(8 * hours)
    assert values["estimate"]["cpu_hours"] == pytest.approx((64 + 48 + 16 + 8) * hours)
    assert values["price"] == pytest.approx(2 * 8 * hours + 0.05 * 136 * hours)
    int8, float16 = values["column_bytes"].values()
    assert (int8, float16) == (32 * (128 + 4), 100 * 128 * 2)
    assert values["stored_bytes"] == int8 + float16 + 1000
    assert values["storage_price"] == pytest.approx(0.02 * 1e6 * values["stored_bytes"] / 1e9)
    assert values["trial"] is None
    stages = list(csv.DictReader((out / "stages.csv").open()))
    assert [row["stage"] for row in stages] == ["read", "prepare", "encode + compress", "write"]
    assert {row["rates"] for row in stages} == {"given"}
    assert (out / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_trial_of_texts(cluster, files, tmp_path, capsys):
    spec = {
        "index": str(tmp_path / "index"),
        "source": {"name": "text", "path": str(CRANFIELD)},
        "encoder": {"name": "minilm"},
        "representations": [
            {"compressor": "none"},
            {"id": "few", "compressor": {"name": "hpool", "ratio": 0.2}},
        ],
    }
    given = {"num_items": 10_000_000, "rates": {"encode": 5000}}
    (path, assumptions) = files(spec=spec, given=given)
    out = tmp_path / "out"
    plan.main([path, "--assumptions", assumptions, "--sample", "6", "--out", str(out)])
    values = json.loads((out / "plan.json").read_text())
    assert not (tmp_path / "index").exists()
    assert values["trial"]["num_items"] == 6
    assert values["num_items"] == 10_000_000
    assert values["origins"] == {
        "encode": "given",
        "read": "measured",
        "compress": "measured",
        "write": "measured",
    }
    sizes = values["column_bytes"]
    assert sizes["full"] == pytest.approx(values["tokens"] * 384 * 2, rel=0.02)
    assert sizes["few"] == pytest.approx(sizes["full"] / 5, rel=0.1)
    assert {"minilm_pooled", "minilm_spans"} < set(sizes)
    assert 0.9 < values["stored_bytes"] / sum(sizes.values()) < 2
    size = sum(file.stat().st_size for file in CRANFIELD.rglob("*") if file.is_file())
    texts = [json.loads(line)["text"] for line in (CRANFIELD / "corpus.jsonl").open()]
    assert values["source_bytes"] == pytest.approx(size / sum(map(bool, map(str.strip, texts))))
    printed = capsys.readouterr().out
    assert "processed 6 items, 0 rejected" in printed and "10,000,000 items" in printed


def test_trial_of_sources_with_different_columns(cluster, files, tmp_path):
    (tmp_path / "letters").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / f"letters/{name}.txt").write_text("Dear Ada")
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers/a.pdf").write_bytes(pdf(*[Page([(10, 50, "page")])] * 3))
    spec = {
        "index": str(tmp_path / "index"),
        "source": [{"name": n, "path": str(tmp_path / p)} for n, p in SOURCES],
        "encoder": {"name": "transcript"},
        "representations": [{"compressor": "none"}],
    }
    (path,) = files(spec=spec)
    out = tmp_path / "out"
    plan.main([path, "--out", str(out)])
    values = json.loads((out / "plan.json").read_text())
    assert values["trial"]["num_items"] == 6 and not values["trial"]["rejects"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rates": {"encode": 0}}, "rates.encode must be greater than 0, got 0"),
        ({"rates": {"decode": 5}}, "unknown field 'decode' in rates"),
        ({"num_items": -1}, "num_items must be greater than 0, got -1"),
        ({"prices": {"gpu_hour": float("inf")}}, "prices.gpu_hour must be a finite number"),
        ({"rates": {"read": 5}}, "source.path must be an existing file or folder"),
    ],
)
def test_bad_assumptions(files, changes, message):
    given = {**GIVEN, **changes} if "rates" not in changes else changes
    spec, assumptions = files(spec=pages(), given=given)
    with pytest.raises(SpecError, match=message):
        plan.main([spec, "--assumptions", assumptions])


def test_rate_of_a_stage_that_the_job_does_not_have(files):
    fields = pages(encoder={"name": "minilm"}, source={"name": "text", "path": "/nowhere"})
    fields["representations"] = [{"compressor": "none"}]
    spec, assumptions = files(spec=fields, given=GIVEN)
    with pytest.raises(SpecError, match="rates.prepare must be null"):
        plan.main([spec, "--assumptions", assumptions])


def test_vectors_that_depend_on_the_content(files):
    fields = pages(representations=[{"compressor": {"name": "kcenter", "max_radius": 0.5}}])
    spec, assumptions = files(spec=fields, given=GIVEN)
    with pytest.raises(SpecError, match="num_vectors.*is required"):
        plan.main([spec, "--assumptions", assumptions])


def test_all_items_are_rejected(cluster, files, tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a.png").write_bytes(b"no image")
    model = str(ROOT / "jobs/data/models/shapes_colpali")
    spec = {
        "index": str(tmp_path / "index"),
        "source": {"name": "images", "path": str(tmp_path / "images")},
        "encoder": {"name": "colpali", "model": model, "dtype": "float32"},
        "representations": [{"compressor": "none"}],
    }
    (path,) = files(spec=spec)
    with pytest.raises(JobError, match="all 1 sampled items are rejected: not an image"):
        plan.main([path])
