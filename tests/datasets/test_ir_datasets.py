"""The ir_datasets source and benchmark on a miniature of a BEIR archive."""

from __future__ import annotations

import importlib.util
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import SpecError
from pipeline.registry import BENCHMARKS, SOURCES
from pipeline.schema import Item, Reject

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ir_datasets") is None, reason="needs the extra ir"
)

DOCUMENTS = [
    {"_id": "31", "title": "On wings", "text": "They lift.", "metadata": {}},
    {"_id": "32", "title": "", "text": "Bread is baked.", "metadata": {}},
    {"_id": "33", "title": "", "text": " ", "metadata": {}},
]
QUERIES = [
    {"_id": "1", "text": "what lifts", "metadata": {}},
    {"_id": "2", "text": "what is baked", "metadata": {}},
    {"_id": "3", "text": "of the training set", "metadata": {}},
]


@pytest.fixture
def home(tmp_path: Path) -> str:
    """Folder of the package with the archive of SciFact, as downloaded."""
    archive = tmp_path / "home/beir/scifact/source.zip"
    archive.parent.mkdir(parents=True)
    header = "query-id\tcorpus-id\tscore\n"
    files = {
        "corpus.jsonl": "".join(json.dumps(row) + "\n" for row in DOCUMENTS),
        "queries.jsonl": "".join(json.dumps(row) + "\n" for row in QUERIES),
        "qrels/test.tsv": f"{header}1\t31\t2\n1\t32\t0\n2\t32\t1\n",
        "qrels/train.tsv": f"{header}3\t31\t1\n",
    }
    with zipfile.ZipFile(archive, "w") as file:
        for name, content in files.items():
            file.writestr(f"scifact/{name}", content)
    return str(tmp_path / "home")


def read(dataset: str, data: str) -> list[Item | Reject]:
    spec = SOURCES.resolve({"name": "ir_datasets", "dataset": dataset, "data": data})
    source = SOURCES.build(spec)
    source.check()
    return [entry for shard in source.shards() for entry in source.scan(shard)]


def load(dataset: str, data: str | None, **fields: Any) -> Any:
    spec = {"name": "ir_datasets", "dataset": dataset, "data": data, **fields}
    return BENCHMARKS.build(BENCHMARKS.resolve(spec)).load()


def test_documents(home):
    first, second, reject = read("beir/scifact", home)
    assert (first.item_id, first.title, first.text) == ("31", "On wings", "On wings\nThey lift.")
    assert (second.title, second.text, second.modality) == (None, "Bread is baked.", "text")
    assert first.source == "beir/scifact" and isinstance(reject, Reject)
    assert (reject.item_id, reject.reason) == ("33", "empty text")
    assert read("beir/scifact", home) == [first, second, reject]


def test_judged_queries(home):
    judged = load("beir/scifact/test", home)
    assert judged.queries == {"1": "what lifts", "2": "what is baked"}
    assert judged.qrels == {"1": {"31": 2, "32": 0}, "2": {"32": 1}}
    assert load("beir/scifact/test", home, query_field="text") == judged


def test_queries_without_a_text_are_left_out(home, tmp_path):
    queries = [*QUERIES[:2], {"_id": "4", "text": None, "metadata": {}}]
    archive = tmp_path / "other/beir/scifact/source.zip"
    archive.parent.mkdir(parents=True)
    with zipfile.ZipFile(archive, "w") as file:
        for name, rows in (("corpus", DOCUMENTS), ("queries", queries)):
            text = "".join(json.dumps(row) + "\n" for row in rows)
            file.writestr(f"scifact/{name}.jsonl", text)
        file.writestr("scifact/qrels/test.tsv", "query-id\tcorpus-id\tscore\n1\t31\t1\n4\t32\t1\n")
    for field in (None, "text"):
        judged = load("beir/scifact/test", str(tmp_path / "other"), query_field=field)
        assert judged.queries == {"1": "what lifts"} and judged.num_without_text == 1


def test_documents_with_the_id_of_the_query_are_removed(home):
    judged = load("beir/scifact/test", home)
    assert list(judged.remove_queries("1", {"1": 2.0, "32": 1.0, "31": 0.5}, k=1)) == ["32"]
    unchanged = load("beir/scifact/test", home, ignore_identical_ids=False)
    assert list(unchanged.remove_queries("1", {"1": 2.0, "32": 1.0})) == ["1", "32"]


def test_folders_are_independent(home, tmp_path, monkeypatch):
    """The package reads its folder when it is imported; a second folder must not be ignored."""
    assert len(read("beir/scifact", home)) == 3
    other = tmp_path / "other"
    with pytest.raises(SpecError, match="^data must be a folder with the files of beir/scifact"):
        read("beir/scifact", str(other))
    assert len(read("beir/scifact", home)) == 3
    monkeypatch.setenv("IR_DATASETS_HOME", home)
    assert len(load("beir/scifact/test", None).queries) == 2
    assert os.environ["IR_DATASETS_HOME"] == home


def test_errors_are_one_sentence(home, tmp_path):
    def message(dataset: str, data: str = home, **fields: Any) -> str:
        with pytest.raises(SpecError) as error:
            load(dataset, data, **fields)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "did you mean 'beir/scifact/test'?" in message("beir/scifacts/test")
    assert "which has no qrels" in message("beir/scifact")
    assert "query_field must be 'text', got 'body'" in message(
        "beir/scifact/test", query_field="body"
    )
    missing = message("beir/nfcorpus/test")
    assert "which lacks the content of https://public.ukp" in missing
    assert missing.endswith("or download it")
