"""Known-item collections and the sweep of k-centre merging."""

import json

import pytest

from jobs import index
from jobs.data import make_known_items
from pipeline import config
from pipeline.index.columns import all_representations
from pipeline.index.recompress import RecompressSpec
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
    index.main(["jobs/specs/methods/known_items.yaml", source, target, "--dry-run"])
    assert "1,398" in capsys.readouterr().out


def test_sweep_has_a_column_per_variant_and_budget():
    spec = config.load(RecompressSpec, "jobs/specs/methods/kcenter.yaml")
    names = [representation.id for representation in all_representations(spec)]
    assert len(set(names)) == len(names) == 7 * 7 + 4
    assert {"kcenter_64", "kcenter_progressive_64", "kcenter_oversampling1_0_8"} <= set(names)
