"""Federations in place of an index: what the search and the evaluation print and write."""

import json

import pytest
import yaml

from jobs import evaluate, search
from pipeline.config import SpecError
from pipeline.eval.metrics import read_run
from pipeline.eval.results import read_results
from pipeline.search.federated import FederatedSearcher
from pipeline.search.searcher import open_index

QUERIES = {"1": "the lift of a wing", "b": "how to bake bread"}


@pytest.fixture
def federation(index_uri, tmp_path) -> str:
    members = {
        "tokens": {"index": index_uri, "representation": "hpool_4"},
        "single": {"index": index_uri, "score": "single_vector", "weight": 0.5},
    }
    (tmp_path / "federation.yaml").write_text(yaml.safe_dump({"members": members}, sort_keys=False))
    return str(tmp_path / "federation.yaml")


def test_search(federation, capsys):
    search.main([federation, "lift", "of", "a", "wing", "-k", "2"])
    first, members, *_ = capsys.readouterr().out.splitlines()
    hit = FederatedSearcher(federation).search("lift of a wing")[0]
    assert first.split()[:3] == ["1", f"{hit.score:.4f}", hit.item_id]
    scores = [f"{member.score:.4f}" for member in hit.members]
    assert members.strip() == f"tokens #1 ({scores[0]}), single #1 ({scores[1]})"
    search.main([federation, "lift of a wing", "-k", "3", "--json"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["rank"] for row in rows] == [1, 2, 3]
    assert [member["member"] for member in rows[0]["members"]] == ["tokens", "single"]
    assert rows[0]["matches"] and rows[0]["item_id"] == hit.item_id


def test_missing_member(federation, tmp_path, capsys):
    fields = yaml.safe_load((tmp_path / "federation.yaml").read_text())
    fields["members"]["single"]["index"] = "nowhere"
    (tmp_path / "federation.yaml").write_text(yaml.safe_dump(fields, sort_keys=False))
    search.main([federation, "wing", "-k", "1", "--filter", "parent_id = 'bread'"])
    printed = capsys.readouterr()
    assert printed.out.split()[2].startswith("bread/")
    assert "warning: member single is left out: index must be the URI of " in printed.err
    fields["require_all"] = True
    (tmp_path / "federation.yaml").write_text(yaml.safe_dump(fields, sort_keys=False))
    with pytest.raises(SpecError, match=r"^members.single.index must be the URI of an index"):
        search.main([federation, "wing"])


def test_options_of_an_index(federation, capsys):
    with pytest.raises(SpecError, match="^representation must be set in the members of the fed"):
        search.main([federation, "wing", "--representation", "full"])
    with pytest.raises(SystemExit):
        search.main([federation, "wing", "--actors", "2"])
    assert "--actors cannot be used with a federation" in capsys.readouterr().err
    with pytest.raises(SpecError, match=r"^index must be the path of an existing file, got 'no.y"):
        search.main(["no.yaml", "wing"])


@pytest.mark.usefixtures("blank_figures")
def test_evaluation(federation, index_uri, tmp_path, capsys):
    """Rows of members equal their own searches, and that of the federation the run of a search."""
    (tmp_path / "qrels").mkdir()
    qrels = "query-id\tcorpus-id\tscore\n1\twing\t1\nb\tbread\t1\n"
    (tmp_path / "qrels/test.tsv").write_text(qrels)
    lines = [json.dumps({"_id": query_id, "text": text}) for query_id, text in QUERIES.items()]
    (tmp_path / "queries.jsonl").write_text("\n".join(lines))
    output = str(tmp_path / "out")
    spec = {"index": federation, "benchmark": {"name": "beir", "path": str(tmp_path)}}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump({**spec, "output": output}))
    evaluate.main([str(tmp_path / "spec.yaml")])
    assert "federation  tokens " in capsys.readouterr().out  # the planned comparison
    evaluation = read_results(output, "evaluation")
    assert [result.name for result in evaluation.results] == ["tokens", "single", "federation"]
    assert evaluation.row("federation").first_stage == "tokens"
    sizes = [result.vectors_per_item for result in evaluation.results]
    assert sizes[0] + sizes[1] == sizes[2]
    pairs = [(planned.row, planned.other) for planned in evaluation.planned_comparisons]
    assert pairs == [("federation", "tokens"), ("federation", "single")]

    alone = open_index(index_uri).rank([*QUERIES.values()], "hpool_4", k=100, group_by="parent")
    run = read_run(f"{output}/runs/tokens.trec")
    for query_id, ranking in zip(QUERIES, alone, strict=True):
        assert run[query_id] == pytest.approx(ranking.scores_by_parent())
    searched = str(tmp_path / "searched.trec")
    search.main([federation, "--queries", str(tmp_path / "queries.jsonl"), "--run", searched])
    run = read_run(f"{output}/runs/federation.trec")
    for query_id, scores in read_run(searched).items():
        parents = {}
        for item_id, score in scores.items():
            parents.setdefault(item_id.partition("/")[0], score)
        assert run[query_id] == pytest.approx(parents)

    evaluate.main([str(tmp_path / "spec.yaml"), "--fit-fusion", str(tmp_path / "fitted.yaml")])
    fitted = FederatedSearcher(str(tmp_path / "fitted.yaml")).spec
    assert list(fitted.members) == ["tokens"]  # alone, as two queries decide nothing
    assert "nDCG@10 on held-out queries: 1.0000, tokens 1.0000" in capsys.readouterr().out

    for override, message in (
        ("scores=[hybrid]", r"scores must be absent for a federation"),
        ("comparisons=[[federation, x]]", "comparisons must be one of tokens, single, federation"),
    ):
        with pytest.raises(SpecError, match=f"^{message}"):
            evaluate.main([str(tmp_path / "spec.yaml"), override])
