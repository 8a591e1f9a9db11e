import json

import pytest

from examples.papers.data import make_known_items
from jobs import index
from pipeline.registry import BENCHMARKS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("known_items")
    make_known_items.main(["--out", str(path)])
    return path


@pytest.mark.parametrize(("name", "smallest"), [("titles", 1398), ("functions", 150)])
def test_each_query_has_its_document(folder, name, smallest):
    spec = {"name": "beir", "path": str(folder / name)}
    judged = BENCHMARKS.build(BENCHMARKS.resolve(spec)).load()
    documents = [json.loads(line) for line in (folder / name / "corpus.jsonl").open()]
    assert len(documents) >= smallest
    assert judged.qrels == {document["_id"]: {document["_id"]: 1} for document in documents}
    texts = {document["_id"]: document["text"] for document in documents}
    assert all(texts.values())
    contained = [query for query, text in judged.queries.items() if text in texts[query]]
    assert len(contained) < 0.05 * len(texts)


def test_dry_run_of_the_index(folder, tmp_path, capsys):
    source = f"source.path={folder / 'titles'}"
    target = f"index={tmp_path / 'index'}"
    index.main(["examples/papers/specs/methods/known_items.yaml", source, target, "--dry-run"])
    assert "1,398" in capsys.readouterr().out
