"""The benches: tiny runs give well-formed figures (how fast is not for a test to say)."""

from __future__ import annotations

import json
import subprocess
import sys

import lance
import numpy as np
import pytest

from pipeline import config
from pipeline.index import job
from pipeline.index.reader import ITEMS, part_uri
from pipeline.index.spec import IndexResources, IndexSpec
from tests.bench import efficiency
from tests.bench.efficiency_run import STEPS
from tests.bench.efficiency_systems import SYSTEMS, Data, Exact
from tests.bench.index_run import bare_loop
from tests.conftest import ROOT, start_job
from tests.tiny import SLEEPING


def bench(address: str, *arguments: str) -> tuple[str, str, int]:
    """Runs the pipeline bench on a cluster that is there; (stdout, stderr, exit code)."""
    process = start_job("tests.bench", "pipeline", *arguments, address=address)
    out, error = process.communicate(timeout=280)
    return out, error, process.returncode


def test_plain_loop_writes_the_rows_of_the_ray_job(cluster, tmp_path, collection):
    source = {"name": "text", "path": str(collection(**{f"d{i}": f"text {i}" for i in range(9)}))}
    rows = {}
    for side in ("bare", "ray"):
        spec = config.parse(
            IndexSpec,
            {
                "index": str(tmp_path / side),
                "source": source,
                "encoder": {
                    "class": SLEEPING,
                    "seconds": 0,
                    "num_tokens": 12,
                    "dim": 16,
                },
                "representations": [
                    {"compressor": "none"},
                    {"compressor": {"name": "samer", "num_vectors": 4}},
                ],
                "unit_items": 2,
                "fragment_items": 4,
                "commit_items": 4,
            },
        )
        if side == "bare":
            progress = bare_loop(spec, num_threads=1)
        else:
            progress = job.run(spec, IndexResources(), job="test", report=lambda line: None)
        assert (progress.new, progress.commits) == (9, 3)
        dataset = lance.dataset(part_uri(spec.index, ITEMS))
        # A fragment is committed when it is written, whichever comes first.
        assert sorted(f.count_rows() for f in dataset.get_fragments()) == [1, 4, 4]
        rows[side] = dataset.to_table().sort_by("item_id")
    assert rows["bare"].equals(rows["ray"])


@pytest.mark.heavy
def test_comparison_has_both_sides_and_their_ratio(cluster, tmp_path):
    record = tmp_path / "figures.json"
    sizes = ("--sleeping-items", "128", "--commit-items", "64", "--repeats", "1")
    out, error, code = bench(cluster, "--only", "sleeping", *sizes, "--out", str(record))
    assert code == 0, error
    written = json.loads(record.read_text())
    assert written["command"].startswith("python -m tests.bench pipeline --only sleeping")
    assert written["versions"]["ray"] and written["machine"]["cores"] >= 1
    assert set(written["figures"]) == {"sleeping_spatial", "sleeping_samer"}
    for figure in written["figures"].values():
        assert {run["new"] for side in figure["runs"].values() for run in side} == {128}
        for start, ratio in figure["ratio"].items():
            (ray,), (bare,) = (figure[side][start]["values"] for side in ("ray", "bare"))
            assert ratio["values"] == pytest.approx([ray / bare])
        ((_, first), (_, last)) = figure["runs"]["bare"][0]["commits"]
        assert (first, last) == (64, 128)
    assert out.count("| **ratio** | **") == 2


@pytest.mark.heavy
def test_a_resume_is_split_into_its_steps(cluster, tmp_path):
    record = tmp_path / "figures.json"
    chosen = ("--only", "resume", "memory", "--small-items", "3000")
    _, error, code = bench(cluster, *chosen, "--out", str(record))
    assert code == 0, error
    figures = json.loads(record.read_text())["figures"]
    resume = figures["resume"]
    assert resume["run"]["unchanged"] == 2048  # two of three commits
    assert resume["run"]["indexed"] == 3000
    assert resume["seconds"] == pytest.approx(sum(resume["steps"].values()))
    assert all(seconds >= 0 for seconds in resume["steps"].values())
    assert set(figures["memory"]["peak_bytes"]) == {"300", "3000"}
    assert min(figures["memory"]["peak_bytes"].values()) > 50 << 20  # a Python with Ray and torch


def test_rejects_too_few_items_for_a_steady_state(cluster):
    _, error, code = bench(cluster, "--items", "64", "--commit-items", "64")
    assert code == 2
    assert "items must be more than commit_items (64), two commits at least, got 64" in error


@pytest.mark.heavy
def test_the_pages_bench(cluster, tmp_path):
    record = tmp_path / "figures.json"
    sizes = ("--copies", "1", "--repeats", "1", "--pages", "30", "--processes", "1")
    process = start_job("tests.bench", "pages", *sizes, "--out", str(record), address=cluster)
    out, error = process.communicate(timeout=280)
    assert process.returncode == 0, error
    speed, memory = json.loads(record.read_text())["figures"].values()
    assert speed["ray"]["median"] > 0 and speed["bare"]["median"] > 0
    assert "| source stage |" in out and "MiB of all processes" in out
    assert list(memory["MiB"])[-1] == "30"


@pytest.mark.heavy
def test_the_driver_bench(cluster, tmp_path):
    record = tmp_path / "figures.json"
    sizes = ("--units", "80", "--shards", "2", "--actors", "1", "2", "--sleep", "0.05")
    few = ("--in-flight", "2", "--ratios", "4", "--block-bytes", "1", "65536")
    process = start_job(
        "tests.bench", "driver", *sizes, *few, "--out", str(record), address=cluster
    )
    out, error = process.communicate(timeout=280)
    assert process.returncode == 0, error
    figures = json.loads(record.read_text())["figures"]
    assert set(figures) == {"empty", "scheduling", "sleeping"}
    runs = [run for figure in figures.values() for run in figure["runs"]]
    assert all(run["rates"]["median"] > 0 for run in runs)
    assert {run["block_bytes"] for run in figures["empty"]["runs"]} == {1, 65536}
    for run in figures["sleeping"]["runs"]:  # actors cannot be faster than their sleep
        assert run["rates"]["median"] < 1.2 * run["actors"] / 0.05
    assert "of the ideal" in out


@pytest.mark.heavy
def test_the_listing_bench(cluster, tmp_path):
    record = tmp_path / "figures.json"
    sizes = ("--videos", "4000", "--files", "2000", "--latency", "0.2")
    process = start_job("tests.bench", "listing", *sizes, "--out", str(record), address=cluster)
    out, error = process.communicate(timeout=280)
    assert process.returncode == 0, error
    at_once, delayed = json.loads(record.read_text())["figures"]["listing"]["runs"]
    assert at_once["shards"]["median"] == delayed["shards"]["median"] == 4000
    # One request for the folders, and two for each of them, which are listed at the same time.
    assert delayed["seconds"]["median"] > 3 * 0.2
    assert "| shards | videos |" in out


@pytest.mark.heavy
def test_the_nodes_bench(tmp_path):
    record = tmp_path / "figures.json"
    sizes = ("--nodes", "1", "2", "--sleep", "0.5", "--seconds", "8", "--repeats", "1")
    process = start_job("tests.bench", "nodes", *sizes, "--out", str(record))
    out, error = process.communicate(timeout=280)
    assert process.returncode == 0, error
    measured = json.loads(record.read_text())["figures"]["nodes"]["nodes"]
    for num_nodes, figure in measured.items():  # nodes cannot be faster than their encoders
        assert 0 < figure["rates"]["median"] < 1.2 * int(num_nodes) * 32 / 0.5
        assert figure["runs"][0]["summary"]["new"] == int(num_nodes) * 16 * 32
    assert "| nodes |" in out


@pytest.mark.heavy
def test_the_reload_bench(tmp_path):
    record = tmp_path / "figures.json"
    few = ("--items", "20000", "--repeats", "1")
    process = start_job("tests.bench", "reload", *few, "--out", str(record))
    out, error = process.communicate(timeout=280)
    assert process.returncode == 0, error
    figures = json.loads(record.read_text())["figures"]["reload"]
    for change, growth in (("5 % appended", 1.05), ("5 % deleted", 1.0)):
        (shared,), (separate,) = figures[change]["shared"], figures[change]["separate"]
        before, during, after = shared["vector_bytes"]
        assert during == after == pytest.approx(growth * before)
        assert separate["vector_bytes"][1] > 1.9 * before
        assert shared["resident_bytes"][1] < 1.2 * shared["resident_bytes"][0]
        assert separate["resident_bytes"][1] > 1.5 * separate["resident_bytes"][0]
    assert "| 5 % appended | shared |" in out


METHODS = ("samer", "attention_clustering", "hpool,linkage=rows", "spatial", "adaptive_eos")


@pytest.mark.heavy
def test_the_compress_bench(tmp_path):
    record = tmp_path / "figures.json"
    sizes = ("--tokens", "40", "--dim", "8", "--vectors", "4", "--batch", "1", "3")
    few = ("--repeats", "2", "--methods", *METHODS, "--items", "3")
    process = start_job("tests.bench", "compress", *sizes, *few, "--out", str(record))
    out, error = process.communicate(timeout=280)
    assert process.returncode == 0, error
    methods, index = json.loads(record.read_text())["figures"].values()
    for name, run in methods["methods"].items():
        assert [batch["size"] for batch in run["batches"]] == [1, 3]
        for batch in run["batches"]:
            for side in ("seconds", "cpu_seconds"):
                assert len(batch[side]) == 2 and min(batch[side]) > 0
            assert batch["peak_bytes"] >= run["before_bytes"] > 50 << 20
            assert ("ratio" in batch) == ("bare" in batch) == (name in METHODS[:3])
            if "ratio" in batch:
                ratios = [a / b for a, b in zip(batch["seconds"], batch["bare"], strict=True)]
                assert batch["ratio"]["values"] == pytest.approx(ratios)
    assert list(methods["methods"]) == list(METHODS)
    assert index["methods"] == ["samer", "attention_clustering", "spatial", "adaptive_eos"]
    assert index["left_out"] == ["hpool"] and index["compress"]["median"] > 0
    assert "| spatial | 3 |" in out and "**attention and methods, in encodes**" in out


def test_compressors_are_measured_without_ray_and_lance():
    """Also on a bare GPU machine, which has neither."""
    code = """
import sys
import tests.bench.harness
from tests.bench.compress_run import Run, measure
run = Run("samer", (1, 2), 1, 1.0, num_tokens=9, dim=4, num_vectors=3, device="cpu")
assert [batch["size"] for batch in measure(run)["batches"]] == [1, 2]
import tests.bench.compress
loaded = {"ray", "lance"} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


@pytest.mark.heavy
def test_the_rerank_bench(tmp_path):
    record = tmp_path / "figures.json"
    only = ("--only", "paths", "passes", "latency", "--layers", "1", "--tokens", "4")
    few = (
        "--queries",
        "2",
        "--rerank-depth",
        "3",
        "--batch-tokens",
        "60",
        "--repeats",
        "1",
        "--calls",
    )
    process = start_job("tests.bench", "rerank", *only, *few, "2", "--out", str(record))
    out, error = process.communicate(timeout=280)
    assert process.returncode == 0, error
    paths, passes, latency = json.loads(record.read_text())["figures"].values()
    runs = paths["paths"]
    assert {"plain loop, float32", "scores, float32", "scores, int8"} <= set(runs)
    for name, run in runs.items():
        assert run["pairs_a_second"]["median"] > 0
        assert run["max_off"] < (1e-5 if "float32" in name else 0.2)
    assert runs["scores, float32"]["ranks"] == pytest.approx(1)
    sides = {"plain loop", "scores", "a pass, eager", "a pass, compiled"}
    assert set(passes) == {"title", "peaks", *(f"4 {side}" for side in sides)}
    assert len(latency["3 scores, int8"]["milliseconds"]) == 2
    assert "| path | pairs/s |" in out and "| rerank depth | path |" in out


def test_reranking_is_measured_without_ray_and_lance():
    code = """
import sys
import tests.bench.rerank
loaded = {"ray", "lance"} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_unavailable_device_is_one_sentence():
    process = start_job("tests.bench", "compress", "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    _, error = process.communicate(timeout=120)
    assert process.returncode == 2
    assert error == "error: device must be cpu, got 'cuda', which is not available\n"


@pytest.mark.heavy
def test_the_media_bench(cluster, tmp_path):
    record = tmp_path / "figures.json"
    sizes = ("--copies", "5", "--seconds", "24", "--minutes", "2", "--pages", "1")
    few = ("--repeats", "1", "--processes", "1", "--only", "video", "memory", "recognition")
    arguments = ("media", *sizes, *few, "--out", str(record))
    process = start_job("tests.bench", *arguments, address=cluster)
    out, error = process.communicate(timeout=280)
    assert process.returncode == 0, error
    video, memory, recognition = json.loads(record.read_text())["figures"].values()
    assert video["processes"]["1"]["ray"]["median"] > 0
    assert memory["ratio"] < 1.3
    assert recognition["pocketsphinx"]["words"] == 22
    assert 0.5 < recognition["rapidocr"]["accuracy"] <= 1
    assert "source stage, frames/s" in out and "word accuracy" in out


def test_the_efficiency_bench(tmp_path, monkeypatch):
    """Systems find their own items, and one that fails has a row with the reason."""
    monkeypatch.setenv("MAXRAY_CACHE", str(tmp_path / "cache"))
    rng, data = np.random.default_rng(0), tmp_path / "data"
    lengths, asked = rng.integers(3, 9, 40), [3, 17, 38]
    documents = [efficiency.unit(rng.normal(size=(length, 16))) for length in lengths]
    singles = efficiency.unit(np.stack([document.mean(0) for document in documents]))
    queries = [documents[row][:2] for row in asked]
    data.mkdir()
    for name, array in {
        "vectors": np.concatenate(documents).astype(np.float16),
        "lengths": lengths,
        "singles": singles,
        "query_vectors": np.concatenate(queries),
        "query_lengths": np.array([2, 2, 2]),
        "query_singles": singles[asked],
    }.items():
        np.save(data / f"{name}.npy", array)
    texts = [f"word{row} and more" for row in range(40)]
    (data / "texts.json").write_text(json.dumps([texts, [texts[row][:6] for row in asked]]))
    exact = Exact(Data(data), "float16")
    best = [exact.best(number).tolist() for number in range(3)]
    assert [rows[0] for rows in best] == asked
    judgments = {"qrels": {str(row): {str(row): 1} for row in asked}, "exact": best}
    rows = {}
    for name in (
        "Maxray, int8",
        "Maxray, single vector",
        "MUVERA in NumPy",
        "bm25s",
        "Lance, full-text",
    ):
        folder, system = tmp_path / name, SYSTEMS[name]
        (folder / "files").mkdir(parents=True)
        given = system, Data(data), folder / "files"
        results = {step: [run(*given)] for step, run in STEPS.items()}
        rows[name] = efficiency.measures(folder, results, judgments)
    rows["x"] = efficiency.measures(tmp_path / "x", {"error": "build: exceeds 5 s"}, judgments)
    for name, (row, *_) in rows.items():
        if name != "x":
            assert row["ndcg"] == 1 and row["p50"].median > 0 and row["bytes"] > 16, name
    assert rows["Maxray, int8"][0]["recall"] > 0.9
    assert [row["recall"] for row in rows["MUVERA in NumPy"]] == [
        rows["Maxray, int8"][0]["recall"]
    ] * 3
    lines = efficiency.cells([row for group in rows.values() for row in group])
    names = [line[0].split(",")[0].split(" ")[0] for line in lines[:5]]
    assert names == ["Maxray", "Maxray", "MUVERA", "", ""]
    assert lines[-1] == ["x", "build: exceeds 5 s", *[""] * 9]
    assert all(len(line) == len(efficiency.HEADER) for line in lines)
    efficiency.write_figure(
        tmp_path / "figure.png", [row for group in rows.values() for row in group]
    )
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
