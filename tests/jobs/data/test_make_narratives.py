import json
from pathlib import Path

import pytest

from jobs.data import make_narratives
from pipeline.config import SpecError
from pipeline.registry import BENCHMARKS

CRANFIELD = "jobs/data/cranfield"


def load(path: str):
    return BENCHMARKS.build(BENCHMARKS.resolve({"name": "beir", "path": path})).load()


def test_narratives_contain_the_queries(tmp_path):
    make_narratives.main([CRANFIELD, "--out", str(tmp_path)])
    original = load(CRANFIELD)
    lines = Path(CRANFIELD, "corpus.jsonl").read_text("utf-8").splitlines()
    documents = [json.loads(line) for line in lines]
    texts = {document["_id"]: document["text"] for document in documents}
    for kind in ("filler", "distracting"):
        judged = load(str(tmp_path / kind))
        assert judged.qrels == original.qrels
        assert list(judged.queries) == list(original.queries)
        for query_id, text in judged.queries.items():
            assert original.queries[query_id] in text
            assert len(text.split()) > len(original.queries[query_id].split()) + 48
    rest = load(str(tmp_path / "distracting")).queries["1"].split(" . ")
    others = [part for part in rest if part not in original.queries["1"]]
    relevant = [texts[document_id] for document_id in original.qrels["1"]]
    assert others and not any(part in text for part in others for text in relevant)


def test_errors(tmp_path):
    with pytest.raises(SpecError, match=r"^collection must be .*which does not exist"):
        make_narratives.main([str(tmp_path / "nowhere")])
    with pytest.raises(SpecError, match=r"^split must be .*which does not exist"):
        make_narratives.main([CRANFIELD, "--split", "dev"])
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"_id": "1", "text": "A short text."}))
    with pytest.raises(SpecError, match=r"^documents must be a file with more than 6 documents"):
        make_narratives.main([CRANFIELD, "--documents", str(tmp_path / "corpus.jsonl")])
