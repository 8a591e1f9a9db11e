"""Steps of tables, and the data and models that are missing."""

from __future__ import annotations

import pytest

from examples.papers.tables.plan import (
    Folders,
    PlannedStep,
    checkpoints,
    has_checkpoint,
    missing_files,
    plan,
    required,
)
from examples.papers.tables.run import parse
from examples.papers.tables.spec import DataSet, load_data_sets, load_table
from examples.papers.verbs.run import PAPERS
from pipeline.config import SpecError
from tests.conftest import ROOT
from tests.examples.papers.tables.tables import FOLDERS, table
from tests.examples.papers.tables.test_spec import KNOWN


def test_equal_steps_run_once():
    steps, cells = plan(table(), FOLDERS, miniature=False)
    assert [step.name for step in steps] == ["index"] * 4 + ["evaluate"] * 4
    assert steps[0].fields["index"] == "/out/one/full"
    assert steps[0].fields["source"]["path"] == "/data/one"
    assert steps[2].fields["representations"][0]["compressor"]["num_vectors"] == 8
    evaluation = steps[4].fields
    assert evaluation["scores"] == ["maxsim"] and not evaluation["bm25"]
    (both, one), (hpool, none) = cells
    assert [cell.output for cell in both] == ["/out/one/full_results", "/out/two/full_results"]
    assert len(one) == 1 and len(hpool) == 2 and none == []


def test_miniature_replaces_data_and_values():
    steps, _ = plan(table(), FOLDERS, miniature=True)
    assert [step.fields["index"] for step in steps[:2]] == ["/out/one/full", "/out/one/hpool_2"]
    assert steps[0].fields["source"]["path"] == f"{ROOT}/jobs/data/cranfield"


def test_skipped_steps():
    steps = table().steps
    variables = {"method": {"full": {"steps": {"index": None}}}}
    rows = [{"label": "full", "at": {"method": "full", "run": "a", "dataset": "b"}, "paper": [1.0]}]
    spec = table(variables=variables, rows=rows, groups={}, columns=[{"measure": ["R@1"]}])
    assert list(steps) == ["index", "evaluate"]
    assert [step.name for step in plan(spec, FOLDERS, False).steps] == ["evaluate"]


def test_errors_name_the_change():
    rows = [{"label": "full", "at": {"method": "full"}, "paper": [1.0, 2.0]}]
    variables = table().variables
    bad = {"base": "jobs/specs/cranfield.yaml", "set": {"index": "out/${data}"}}
    with pytest.raises(SpecError, match=r"steps.index.set must be one of .* got 'data'"):
        plan(table(steps={**fields_of_steps(), "index": bad}, rows=rows), FOLDERS, False)
    assert variables


def fields_of_steps():
    return {name: step.model_dump() for name, step in table().steps.items()}


def test_required_data_sets_are_those_of_the_used_values():
    spec = table()
    assert required(spec, miniature=True) == []  # one data set of each group
    assert required(spec, miniature=False) == ["beir_two"]


def test_missing_files_and_checkpoints(tmp_path):
    data_set = DataSet(files=["a/x.json", "a/y"], note="Ask for it.")
    folders = Folders(str(tmp_path), str(tmp_path / "out"), str(ROOT))
    (tmp_path / "a/y").mkdir(parents=True)
    assert missing_files(data_set, folders) == [f"{tmp_path}/a/x.json"]
    trained, given = f"{folders.output}/run/model", f"{folders.output}/miniature/models/bert"
    fields = {"encoder": {"model": "no/such-model"}, "rerank": [{"model": trained}], "model": given}
    step = PlannedStep("index", "index", fields)
    assert checkpoints([step], folders.output) == [given, "no/such-model"]
    assert not has_checkpoint("no/such-model") and not has_checkpoint("/no/folder")
    assert has_checkpoint(str(tmp_path))


@pytest.mark.parametrize("miniature", [False, True], ids=["full", "miniature"])
@pytest.mark.parametrize(("paper", "name"), KNOWN)
def test_specs_of_all_steps_are_valid(paper, name, miniature):
    spec = load_table(PAPERS, paper, name)
    planned = plan(spec, FOLDERS, miniature)
    for step in planned.steps if miniature else ():  # the check parses those of the table
        parse(step)
    assert all(
        bool(cell) == (number is not None)
        for row, cells in zip(spec.rows, planned.cells, strict=True)
        for number, cell in zip(row.paper, cells, strict=True)
    )
    data_sets = load_data_sets(PAPERS)
    assert set(required(spec, miniature)) <= data_sets.keys()
