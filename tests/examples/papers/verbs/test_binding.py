"""The binding job: accuracies of one encoder, and tables of several."""

from __future__ import annotations

import csv
import re

import pytest
import torch

import jobs
from examples.papers.synthetic.binding_accuracy import pair_scores
from examples.papers.synthetic.binding_data import evaluation_pairs
from examples.papers.verbs import binding as job
from pipeline.encoders.minilm import MiniLM


def test_the_job_on_minilm(tmp_path, capsys):
    job.main(["--pairs", "3", "--output", str(tmp_path / "out"), "layer=3"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split()[:3] == ["form", "score", "accuracy"]
    with (tmp_path / "out/binding.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["score"] for row in rows] == ["single_vector", "maxsim", "hybrid"]
    scores = pair_scores(MiniLM(MiniLM.Spec(layer=3)), evaluation_pairs(3), "text")
    for row, line in zip(rows, printed[1:], strict=False):
        assert line.split() == list(row.values())
        assert (row["form"], row["pairs"], row["queries"]) == ("text", "3", "75")
        right = (scores[row["score"]][..., 0] > scores[row["score"]][..., 1]).double().mean()
        assert float(row["accuracy"]) == pytest.approx(right.item(), abs=1e-4)
        assert 0 <= float(row["low"]) <= float(row["accuracy"]) <= float(row["high"]) <= 1
    assert (tmp_path / "out/binding.png").read_bytes().startswith(b"\x89PNG")


def test_the_job_reads_encoders_from_files(tmp_path, capsys, checkpoint):
    encoder = f"{{name: colpali, model: {checkpoint('colpali')}, dtype: float32}}"
    printed = []
    for content in (encoder, f"index: nowhere\nencoder: {encoder}"):
        path = tmp_path / "encoder.yaml"
        path.write_text(content, encoding="utf-8")
        arguments = ["--encoder", str(path), "--form", "rendered", "--side", "240", "--pairs", "2"]
        job.main(arguments)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert [line.split()[:2] for line in printed[0].splitlines()[1:]] == [["rendered", "maxsim"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--form", "rendered"], "got 'rendered', which is not supported by the encoder minilm"),
        (["--side", "100"], "--side must be an integer >= 200, got 100"),
        (["--seed", "-1"], "--seed must be an integer >= 0, got -1"),
        (["--encoder", "nowhere.yaml"], "got 'nowhere.yaml', which does not exist"),
        (["layer=9"], "encoder.layer must be from -7 to 6 (the model has 6 layers), got 9"),
        (["laier=1"], "unknown field 'laier' in encoder; did you mean 'layer'?"),
        (["name=nothing"], "encoder.name must be one of "),
        (["--pairs", "0"], "argument --pairs: must be an integer >= 1, got '0'"),
        (["--form", "spoken"], "argument --form: invalid choice: 'spoken'"),
    ],
)
def test_invalid_input_is_one_sentence(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        jobs.run(job.main, arguments)
    assert ended.value.code == jobs.BAD_INPUT
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


TABLE = """
title: layers
rows:
  two: [{name: minilm, layer: 3}, {name: minilm, layer: 6}]
  one: [{name: minilm, layer: 0, pooling: none}]
"""


def test_job_measures_a_table_of_encoders(tmp_path, capsys):
    """A row's figures are those of its encoders' scores, the mean over them pair by pair."""
    (tmp_path / "table.yaml").write_text(TABLE, "utf-8")
    arguments = ["--table", str(tmp_path / "table.yaml"), "--pairs", "3"]
    job.main([*arguments, "--output", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert re.search(r"^encoder +seeds +single_vector +maxsim +hybrid$", printed, re.MULTILINE)
    assert re.search(r"^one +1 +- +0\.\d{3} \[0\.\d{3}, 0\.\d{3}\] +-$", printed, re.MULTILINE)
    with (tmp_path / "out/binding.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["encoder"], row["score"]) for row in rows] == [
        *(("two", score) for score in ("single_vector", "maxsim", "hybrid")),
        ("one", "maxsim"),
    ]
    pairs = evaluation_pairs(3)
    scores = [pair_scores(MiniLM(MiniLM.Spec(layer=n)), pairs, "text")["maxsim"] for n in (3, 6)]
    right = torch.stack(scores).diff(dim=3).squeeze(3).lt(0).double()  # seeds, pairs, queries
    late = rows[1]
    assert (late["seeds"], rows[3]["seeds"], rows[3]["sd"]) == ("2", "1", "")
    assert float(late["accuracy"]) == pytest.approx(right.mean().item(), abs=1e-4)
    assert float(late["sd"]) == pytest.approx(right.mean(dim=(1, 2)).std().item(), abs=1e-4)
    of_pairs = right.mean(dim=(0, 2))
    assert of_pairs.min() - 1e-4 <= float(late["low"]) <= float(late["accuracy"])
    assert float(late["accuracy"]) <= float(late["high"]) <= of_pairs.max() + 1e-4
    assert (tmp_path / "out/binding.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--form", "text"], "--form must be omitted, because"),
        (["rows.two.1.layer=9"], "rows.two[1].layer must be from -7 to 6"),
        (["rows.one.0.adapter=./nowhere"], "got './nowhere', which is not a folder"),
        (["rows.one=[]"], "rows.one must have at least 1 item after validation, not 0, got []"),
        (["form=rendered"], "got 'rendered', which is not supported by the encoder minilm"),
        (["side=1"], "side must be greater than or equal to 200, got 1"),
    ],
)
def test_invalid_table_is_one_sentence(tmp_path, capsys, given, message):
    (tmp_path / "table.yaml").write_text(TABLE, "utf-8")
    with pytest.raises(SystemExit) as ended:
        jobs.run(job.main, ["--table", str(tmp_path / "table.yaml"), *given])
    assert ended.value.code == jobs.BAD_INPUT
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
