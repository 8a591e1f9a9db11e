"""Listings and errors of the command that downloads data sets and checkpoints."""

from __future__ import annotations

import pytest

import jobs
from examples.papers.downloads.spec import load_checkpoints
from examples.papers.tables.spec import load_data_sets
from examples.papers.verbs import get
from examples.papers.verbs.run import PAPERS
from tests import hub


def test_dry_run_needs_no_network(tmp_path, capsys):
    with hub.connected(None, tmp_path / "cache"):
        get.main(["agc", "table4", "coco", "a/b", "--data", str(tmp_path), "--dry-run"])
        lines = capsys.readouterr().out.splitlines()
        get.main(["--data", str(tmp_path)])
        listing = capsys.readouterr().out
    assert [line.split()[0] for line in lines if line[0] != " "] == [
        *("msrvtt", "coco", "Qwen/Qwen2.5-VL-3B-Instruct", "a/b", "to")
    ]
    assert lines[-1] == f"{'to download':27}     34.2 GB"
    for name in (*load_data_sets(PAPERS), *load_checkpoints(PAPERS)):
        assert f"{name} " in listing
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["flickr30"], "NAME must be one of agc, edje, samer, sap, smart, beir_nfcorpus"),
        (["agc", "table99"], "TABLE must be one of table1"),
        (["a/b", "--data", "{folder}"], "error: a/b: hub must be a source that can be downloaded"),
    ],
)
def test_errors(arguments, message, tmp_path, capsys):
    with hub.connected(None, tmp_path / "cache"), pytest.raises(SystemExit) as caught:
        jobs.run(get.main, [a.format(folder=tmp_path) for a in arguments])
    assert caught.value.code == jobs.BAD_INPUT
    assert message in capsys.readouterr().err
