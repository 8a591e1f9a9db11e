"""Mining hard negatives: as a user does it, and that training reads them."""

from __future__ import annotations

import json

import pytest

from jobs import train
from pipeline.config import SpecError
from pipeline.search.searcher import open_index
from tests.train.data.files import build_data, write_lines

FULL = ("--representation", "full")


@pytest.fixture
def pairs(index_uri, tmp_path):
    """Three queries on an index; one has two relevant items."""
    hits = open_index(index_uri).search("slipstream", k=3)
    rows = [{"query": "slipstream", "document_id": h.item_id, "text": h.text} for h in hits[:2]]
    rows += [
        {"query": f"heat {n}", "document_id": h.item_id, "text": h.text}
        for n, h in enumerate(open_index(index_uri).search("heat", k=2))
    ]
    rest = [h for h in open_index(index_uri).search("wing", k=60)]
    write_lines(tmp_path / "all.jsonl", [{"document_id": h.item_id, "text": h.text} for h in rest])
    return write_lines(tmp_path / "pairs.jsonl", rows)


def test_relevant_documents_are_skipped(index_uri, pairs, tmp_path, capsys):
    output = tmp_path / "negatives.jsonl"
    train.main(("mine", index_uri, str(pairs), str(output), *FULL, "--ranks", "1", "4"))
    printed = capsys.readouterr().out
    assert "relevant documents are in the index" in printed
    assert "items were left out: they are in the index, but not in the data" in printed
    data = build_data(2, name="pairs", path=pairs)
    relevant = {
        query: {data.training.documents[number].id for number in numbers}
        for query, numbers in data.training.positives().items()
    }
    rows = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    assert [row["query"] for row in rows] == list(relevant)
    for row in rows:
        relevant_ids = relevant[row["query"]]
        found = [hit.item_id for hit in open_index(index_uri).search(row["query"], "full", k=20)]
        others = [item for item in found if item not in relevant_ids][:4]
        assert row["negatives"] == [item for item in others if item in data.training.numbers]
    trained = build_data(2, name="pairs", path=pairs, hard_negatives=output)
    assert sum(len(row.negatives) for row in trained.training.rows) >= sum(
        len(row["negatives"]) for row in rows
    )


def test_copies_of_relevant_documents_are_skipped(index_uri, tmp_path):
    """Ranks are counted without them."""
    (first, second, third) = open_index(index_uri).search("slipstream", "full", k=3)
    rows = [
        {"query": "slipstream", "document_id": "other", "text": f" {first.text}\n"},
        {"query": "heat", "document_id": second.item_id, "text": second.text},
        *({"query": "wing", "document_id": h.item_id, "text": h.text} for h in (first, third)),
    ]
    pairs, output = write_lines(tmp_path / "pairs.jsonl", rows), tmp_path / "negatives.jsonl"
    train.main(("mine", index_uri, str(pairs), str(output), *FULL, "--ranks", "1", "2"))
    (row, *_) = (json.loads(line) for line in output.read_text("utf-8").splitlines())
    assert row == {"query": "slipstream", "negatives": [second.item_id, third.item_id]}


def test_the_data_of_a_training_run(index_uri, pairs, tmp_path, checkpoint):
    spec = {
        "name": "run",
        "output": str(tmp_path / "run"),
        "learner": {
            "name": "contrastive",
            "encoder": {"name": "colpali", "model": checkpoint("colpali")},
        },
        "data": {
            "name": "pairs",
            "path": str(pairs),
            "documents": str(tmp_path / "all.jsonl"),
            "hard_negatives": str(tmp_path / "negatives.jsonl"),
        },
    }
    (tmp_path / "run.yaml").write_text(json.dumps(spec))
    output = tmp_path / "negatives.jsonl"
    train.main(("mine", index_uri, str(tmp_path / "run.yaml"), str(output), "--ranks", "2", "10"))
    rows = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    assert any(row["negatives"] for row in rows)
    assert all(len(row["negatives"]) <= 9 for row in rows)


def test_rejects_invalid_input(index_uri, pairs, tmp_path):
    output = str(tmp_path / "negatives.jsonl")
    with pytest.raises(SpecError) as error:
        train.main(("mine", index_uri, str(pairs), output, "--ranks", "5", "4"))
    assert str(error.value) == (
        "ranks must be two ascending integers >= 1, the first and the last rank, got (5, 4)"
    )
    other = write_lines(tmp_path / "other.jsonl", [{"query": "q", "document_id": "x", "text": "t"}])
    with pytest.raises(SpecError) as error:
        train.main(("mine", index_uri, str(other), output))
    assert str(error.value) == (
        "index must be an index with documents of the data under the same ids,"
        f" got '{index_uri}', which contains no relevant document"
    )
    assert not (tmp_path / "negatives.jsonl").exists()
