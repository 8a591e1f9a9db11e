"""Candidate generators as a user adds them, and errors of the command line."""

import shutil

import pytest

from jobs import add, status
from pipeline.config import SpecError
from pipeline.index.reader import IndexReader
from pipeline.search.searcher import open_index


@pytest.fixture
def uri(index_uri, tmp_path) -> str:
    """Copy of the index that the test may change."""
    shutil.copytree(index_uri, tmp_path / "index")
    return str(tmp_path / "index")


OPTIONS = ["representation=hpool_2", "generator.num_centroids=4"]


def test_builds_lists_and_drops_a_generator(uri, cluster, capsys, tmp_path):
    (tmp_path / "log.tsv").write_text("1\tthe lift of a wing\n2\thow to bake bread at home\n")
    add.main(["candidates", uri, "ivf", *OPTIONS, f"queries={tmp_path}/log.tsv"])
    printed = capsys.readouterr().out
    assert "fitting ivf" in printed
    status.main([uri])
    line = "candidates: ivf for hpool_2, revision 1, 7 of 7 items have codes"
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index(line) + 1].endswith(" lists per query token")
    keywords = {"k": 3, "candidates": "ivf", "num_candidates": 5}
    (found,) = open_index(uri).rank(["the lift of a wing"], "hpool_2", **keywords)
    (exact,) = open_index(uri).rank(["the lift of a wing"], "hpool_2", k=9)
    assert set(found.scores_by_item().items()) <= set(exact.scores_by_item().items())

    add.main(["candidates", uri, "ivf", "representation=hpool_2", "--drop"])
    assert not IndexReader(uri).candidates_columns


def test_builds_lists_and_drops_bm25(uri, cluster, capsys):
    add.main(["candidates", uri, "bm25", "generator.k1=0.9"])
    assert "fitting bm25" in capsys.readouterr().out
    status.main([uri])
    line = "candidates: bm25 for text, revision 1, 8 of 8 items have codes"
    assert line in capsys.readouterr().out.splitlines()
    with pytest.raises(SpecError, match=r"generator must be .*differs from the stored generator"):
        add.main(["candidates", uri, "bm25"])
    add.main(["candidates", uri, "bm25", "--drop"])
    assert not IndexReader(uri).candidates_columns


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ivv"], r"generator\.name must be one of .*did you mean 'ivf'"),
        (["ivf", "representation=hpool_9"], r"representation must be one of full, hpool_4"),
        (["ivf", "generator.num_centroids=0"], r"generator\.num_centroids must be .*got 0"),
        (["ivf", "centroids=4"], r"centroids"),
        (["ivf", "queries=gone.tsv"], r"queries must be .*gone\.tsv', which does not exist"),
        (["ivf", "--drop"], r"generator must be a generator of the index, got 'ivf'"),
        (["representation=full"], r"GENERATOR must be the name of a generator"),
    ],
)
def test_invalid_arguments(uri, arguments, message):
    with pytest.raises(SpecError, match=message):
        add.main(["candidates", uri, *arguments])
    assert not IndexReader(uri).candidates_columns


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ivf", "--refit", "--drop"], "--drop: not allowed with argument --refit"),
        (["--drop"], "the following arguments are required: generator"),
    ],
)
def test_invalid_options(uri, capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        add.main(["candidates", uri, *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: columns"),
        (["columns", "INDEX"], "invalid choice: 'columns'"),
    ],
)
def test_invalid_columns(capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        add.main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
