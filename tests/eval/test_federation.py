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
def test_evaluation(federation, index_uri, checkpoint, tmp_path, capsys):
    """Rows of members equal their own searches, and that of the federation the run of a search."""
    (tmp_path / "qrels").mkdir()
    qrels = "query-id\tcorpus-id\tscore\n1\twing\t1\nb\tbread\t1\n"
    (tmp_path / "qrels/test.tsv").write_text(qrels)
    lines = [json.dumps({"_id": query_id, "text": text}) for query_id, text in QUERIES.items()]
    (tmp_path / "queries.jsonl").write_text("\n".join(lines))
    output = str(tmp_path / "out")
    reranker = {"name": "cross_encoder", "model": checkpoint("cross_encoder"), "top": 4}
    spec = {"index": federation, "benchmark": {"name": "beir", "path": str(tmp_path)}}
    spec["rerank"] = [reranker, [{**reranker, "label": "two"}, {**reranker, "top": 2}]]
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump({**spec, "output": output}))
    evaluate.main([str(tmp_path / "spec.yaml")])
    printed = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert ["federation", "tokens"] in printed  # the planned comparison
    evaluation = read_results(output, "evaluation")
    rows = ["tokens", "single", "federation", "cross_encoder_4", "two-cross_encoder_2"]
    assert [result.name for result in evaluation.results] == rows
    assert evaluation.row("federation").first_stage == "tokens"
    sizes = [result.vectors_per_item for result in evaluation.results]
    assert sizes[0] + sizes[1] == sizes[2]
    pairs = [(planned.row, planned.other) for planned in evaluation.planned_comparisons]
    names = [("federation", "tokens"), ("federation", "single")]
    assert pairs == [*names, *((row, "federation") for row in rows[3:])]
    (row,) = [result for result in evaluation.results if result.name == "cross_encoder_4"]
    assert (row.first_stage, row.rerank["queries"], row.rerank["pairs"]) == ("federation", 2, 8)
    assert "| two-cross_encoder_2 | federation | 4 + 2 |" in (
        tmp_path / "out/reranking.md"
    ).read_text(encoding="utf-8")

    alone = open_index(index_uri).rank([*QUERIES.values()], "hpool_4", k=100, group_by="parent")
    run = read_run(f"{output}/runs/tokens.trec")
    for query_id, ranking in zip(QUERIES, alone, strict=True):
        assert run[query_id] == pytest.approx(ranking.scores_by_parent())
    searched = str(tmp_path / "searched.trec")
    arguments = [federation, "--queries", str(tmp_path / "queries.jsonl"), "--run", searched]
    arguments += ["-k", "100"]
    rerank = ["--rerank", "cross_encoder", f"model={reranker['model']}", "top=4"]
    for name, options in (("federation", []), ("cross_encoder_4", rerank)):
        search.main([*arguments, *options])
        run = read_run(f"{output}/runs/{name}.trec")
        for query_id, scores in read_run(searched).items():
            parents = {}
            for item_id, score in scores.items():
                parents.setdefault(item_id.partition("/")[0], score)
            assert list(run[query_id]) == list(parents)
            if name == "federation":
                assert run[query_id] == pytest.approx(parents)

    evaluate.main([str(tmp_path / "spec.yaml"), "--fit-fusion", str(tmp_path / "fitted.yaml")])
    fitted = FederatedSearcher(str(tmp_path / "fitted.yaml")).spec
    assert list(fitted.members) == ["tokens"]  # alone, as two queries decide nothing
    sentence = "nDCG@10 on held-out queries: 1.0000, tokens 1.0000 (difference +0.0000 to +0.0000"
    assert sentence in capsys.readouterr().out

    for override, message in (
        ("scores=[hybrid]", r"scores must be absent for a federation"),
        ("rerank.0.score=maxsim", r"rerank\[0\].score must be null for a federation, got 'maxsim'"),
        ("rerank.0.label=tokens", r"members must be mappings with other names than tokens"),
        ("comparisons=[[federation, x]]", "comparisons must be one of tokens, single, federation"),
    ):
        with pytest.raises(SpecError, match=f"^{message}"):
            evaluate.main([str(tmp_path / "spec.yaml"), override])
