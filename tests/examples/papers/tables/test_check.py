"""The check of a table: without anything, with everything, and with one thing wrong."""

from __future__ import annotations

import json
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch

from examples.papers.tables import first_layer
from examples.papers.tables.check import GET, Checked, check
from examples.papers.tables.miniature import generate_data, generate_models
from examples.papers.tables.plan import (
    Cell,
    Folders,
    Plan,
    PlannedStep,
    checkpoints,
    plan,
    required,
)
from examples.papers.tables.spec import Row, Selection, TableSpec, load_data_sets, load_table
from examples.papers.verbs.run import PAPERS
from pipeline.config import assign, parse
from tests.conftest import ROOT
from tests.examples.papers.tables.test_spec import KNOWN
from tests.hub import connected, serve
from tests.media import make_tar

DATA_SETS = load_data_sets(PAPERS)
#: Tables that are checked by default: training, recompression and a reranker. Other tests check one
#: with videos.
DEFAULT = {("edje", "table1"), ("sap", "table6"), ("smart", "table3")}


def checked(paper: str, name: str, folders: Folders, miniature: bool, *changes: Any) -> Checked:
    """Checks a table, or the steps that functions return for its plan."""
    table = load_table(PAPERS, paper, name)
    planned = plan(table, folders, miniature)
    for change in changes:
        planned = change(planned)
    names = required(table, miniature)
    spec = f"{paper}/{name}.yaml"
    return check(spec, table, planned, names, DATA_SETS, folders, lambda line: None)


@pytest.mark.parametrize(("paper", "name"), KNOWN)
def test_lists_everything_on_a_machine_with_nothing(paper, name, tmp_path):
    folders = Folders(str(tmp_path / "data"), str(tmp_path / "out"), str(ROOT))
    table = load_table(PAPERS, paper, name)
    models = checkpoints(plan(table, folders, False).steps, folders.output)
    with connected(None, tmp_path / "hub"):
        result = checked(paper, name, folders, False)
    wanted = [f"{GET} {what}" for what in (*required(table, False), *models)]
    assert models and [problem.fix for problem in result.problems] == wanted
    assert not any(cost for _, cost in result.steps)
    text = result.text()
    assert text.splitlines()[-1] == f"{len(wanted)} problems"
    assert f"not checked: {len(result.steps)} of {len(result.steps)} steps" in text
    assert list(Path(folders.output).iterdir()) == []


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Folders:
    """Folders of the miniatures, in which tests share data and models."""
    folder = tmp_path_factory.mktemp("checked")
    return Folders(str(folder / "data"), str(folder), str(ROOT))


def complete(paper: str, name: str, folders: Folders) -> None:
    """Generates the data and models of a miniature."""
    table = load_table(PAPERS, paper, name)
    generate_data(required(table, True), DATA_SETS, Path(folders.data))
    steps = plan(table, folders, True).steps
    generate_models([step.fields for step in steps], Path(folders.output) / "miniature")


TABLES = [
    pytest.param(*key, marks=[] if key in DEFAULT else pytest.mark.heavy, id="-".join(key))
    for key in KNOWN
]


@pytest.mark.parametrize(("paper", "name"), TABLES)
def test_complete_miniatures_have_no_problems(paper, name, folders):
    complete(paper, name, folders)
    result = checked(paper, name, folders, True)
    assert not result.problems, result.text()
    assert all(cost for _, cost in result.steps)
    assert not list(Path(folders.output).glob(".check-*"))


def test_estimates(folders):
    complete("agc", "table9", folders)
    result = checked("agc", "table9", folders, True)
    assert not result.problems, result.text()
    costs = dict(result.steps)
    train = costs["train agc/msrvtt/agc_5_5"]
    index = costs["index agc/msrvtt_test/agc_5_5"]
    evaluate = costs["evaluate agc/msrvtt_evaluation/agc_5_5"]
    assert (train.items, index.items, evaluate.items) == (4, 2, 2)
    assert train.memory > 3 * index.memory > 0 and train.disk > 0 and index.disk > 0
    assert all(cost.seconds > 0 for cost in (train, index, evaluate))


@pytest.mark.parametrize(("paper", "name"), [("agc", "table9"), ("smart", "table3")])
def test_models_that_exceed_the_memory_run_with_one_layer(paper, name, folders, monkeypatch):
    complete(paper, name, folders)
    monkeypatch.setattr(first_layer, "free_memory", lambda: 0.0)
    result = checked(paper, name, folders, True)
    assert not result.problems, result.text()
    notes = [note for note in result.notes if note.startswith("not run: ")]
    assert all(note.startswith("not run: all layers but the first") for note in notes) and notes
    assert all(cost for _, cost in result.steps)


class Whole(TableSpec):
    """A table whose miniature has all values of each group."""

    def cells(self, row: Row, column: Selection, miniature: bool = False) -> Iterator[Any]:
        """Yields the cells of the table."""
        return super().cells(row, column)


@pytest.mark.heavy
def test_largest_table_with_all_data_sets(folders):
    table = parse(Whole, load_table(PAPERS, "smart", "table1").model_dump())
    names = required(table, True)
    generate_data(names, DATA_SETS, Path(folders.data))
    planned = plan(table, folders, True)
    generate_models([step.fields for step in planned.steps], Path(folders.output) / "miniature")
    assert len(planned.steps) > 250
    name = "smart/table1.yaml"
    result = check(name, table, planned, names, DATA_SETS, folders, lambda line: None)
    assert not result.problems, result.text()
    assert all(cost for _, cost in result.steps)


# -- mutations -------------------------------------------------------------------------------------

Change = Callable[[Plan], Plan]


def keep(text: str, values: dict[str, Any]) -> Change:
    """Returns a function that keeps the steps with a text in their outputs, with changed fields.

    `values` are by step and field.
    """

    def changed(step: PlannedStep) -> PlannedStep:
        parts = {tuple(name.split(".", 1)): value for name, value in values.items()}
        here = {field: value for (name, field), value in parts.items() if name == step.name}
        return step._replace(fields=assign(step.fields, here.items()))

    def change(planned: Plan) -> Plan:
        steps = [changed(step) for step in planned.steps if text in step.output]
        return Plan(steps, [[] for _ in planned.cells])

    return change


def rewrite_parquet(path: Path, change: Callable[[Any], Any]) -> None:
    pq.write_table(change(pq.read_table(path)), path)


def rename_column(path: Path, old: str, new: str) -> None:
    rewrite_parquet(
        path, lambda t: t.rename_columns([new if n == old else n for n in t.schema.names])
    )


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def rename_weight(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    name = next(name for name in weights if "q_proj" in name)
    weights[name.replace("q_proj", "query_proj")] = weights.pop(name)
    safetensors.torch.save_file(weights, path, {"format": "pt"})


def members(path: Path, missing: str) -> None:
    """Rewrites an uncompressed archive without a member."""
    with tarfile.open(path) as tar:
        others = [(m.name, tar.extractfile(m).read()) for m in tar if m.name != missing]
    path.write_bytes(make_tar(others))


def lines(path: Path, keeps: Callable[[int], bool]) -> None:
    """Keeps some lines of a text by number."""
    found = path.read_text("utf-8").splitlines(keepends=True)
    path.write_text("".join(line for n, line in enumerate(found) if keeps(n)), "utf-8")


def first_test_image(folder: Path) -> Path:
    images = json.loads((folder / "dataset_flickr30k.json").read_text("utf-8"))["images"]
    return folder / "images" / next(i["filename"] for i in images if i["split"] == "test")


V1, TRAIN = "vidore_v1/arxivqa", "data/colpali_train_set/data/train-00000-of-00082.parquet"
COLPALI = "models/colpali"
FIRST = "test-00000-of-00001.parquet"
PAGES, PHOTOS, TEXTS, VIDEOS = (
    ("sap", "table1"),
    ("samer", "table1"),
    ("agc", "table2"),
    ("agc", "table9"),
)
CLIPS = ("agc", "table1")


class Mutation(NamedTuple):
    """A change after which a check must find one problem.

    Attributes:
        steps: Text in the outputs of the checked steps.
        change: Change of the folder with the data and the models.
        sentence: Expression that the sentence about the problem matches.
        fix: Beginning of what solves it.
        values: Changed fields of steps.
    """

    table: tuple[str, str]
    steps: str
    change: Callable[[Path], Any]
    sentence: str
    fix: str
    values: dict[str, Any] = {}  # noqa: RUF012


def nothing(folder: Path) -> None:
    """Changes no file."""


def page(folder: Path, kind: str = "corpus") -> Path:
    return folder / "data" / V1 / kind / FIRST


def unknown_judgment(path: Path) -> None:
    rewrite_parquet(path, lambda t: t.set_column(1, "corpus-id", pa.array([999] * t.num_rows)))


def foreign_adapter(folder: Path) -> None:
    adapter = folder / "data/adapter"
    adapter.mkdir()
    other = shutil.copytree(folder / "miniature" / COLPALI, folder / "other")
    weights = safetensors.torch.load_file(other / "model.safetensors")
    weights = {name: tensor + 1 for name, tensor in weights.items()}
    safetensors.torch.save_file(weights, other / "model.safetensors", {"format": "pt"})
    settings = {"peft_type": "LORA", "base_model_name_or_path": str(other)}
    (adapter / "adapter_config.json").write_text(json.dumps(settings), "utf-8")
    safetensors.torch.save_file({"x": torch.zeros(1)}, adapter / "adapter_model.safetensors")


MODELS = "miniature/models"
MUTATIONS = {
    "wrong column": Mutation(
        *(PAGES, "colpali/", lambda f: rename_column(page(f), "corpus-id", "id")),
        *("cannot be listed", f"{GET} vidore_v1_arxivqa"),
    ),
    "wrong column of queries": Mutation(
        *(PAGES, "colpali/", lambda f: rename_column(page(f, "queries"), "query", "text")),
        *("row 0 of .*queries", f"{GET} vidore_v1_arxivqa"),
    ),
    "missing split": Mutation(
        *(PAGES, "colpali/", lambda f: shutil.rmtree(page(f, "queries").parent)),
        *("queries", f"{GET} vidore_v1_arxivqa"),
    ),
    "truncated Parquet file": Mutation(
        *(PAGES, "colpali/", lambda f: cut(page(f))),
        *("cannot be listed", f"{GET} vidore_v1_arxivqa"),
    ),
    "id in judgments that the source lacks": Mutation(
        *(PAGES, "colpali/", lambda f: unknown_judgment(page(f, "qrels"))),
        *("judges an item of the source", f"{GET} vidore_v1_arxivqa"),
    ),
    "some ids in judgments that the source lacks": Mutation(
        *(TEXTS, "agc/", lambda f: lines(f / "data/beir/nfcorpus/corpus.jsonl", lambda n: n != 2)),
        *("1 of . judged documents are not in the source", f"{GET} beir_nfcorpus"),
    ),
    "truncated archive": Mutation(
        *(CLIPS, "multivent", lambda f: cut(f / "data/multivent/test/000003.tar")),
        *("000003.tar|cannot be listed|judged", f"{GET} multivent"),
    ),
    "missing video in an archive": Mutation(
        *(CLIPS, "multivent", lambda f: members(f / "data/multivent/test/000003.tar", "200.mp4")),
        *("200", f"{GET} multivent"),
    ),
    "missing image": Mutation(
        *(PHOTOS, "colpali/flickr30k", lambda f: first_test_image(f / "data/flickr30k").unlink()),
        *(".jpg", f"{GET} flickr30k"),
    ),
    "renamed weight": Mutation(
        *(PAGES, "colpali/", lambda f: rename_weight(f / MODELS / "colpali")),
        *("has no weights .*q_proj", f"{GET} "),
    ),
    "truncated weights": Mutation(
        *(PAGES, "colpali/", lambda f: cut(f / MODELS / "colpali/model.safetensors")),
        *("truncated or corrupted", f"{GET} "),
    ),
    "missing tokenizer": Mutation(
        *(PAGES, "colpali/", lambda f: (f / MODELS / "colpali/tokenizer.json").unlink()),
        *("tokenizer", f"{GET} "),
    ),
    "wrong prompt": Mutation(
        *(VIDEOS, "agc_random", nothing, "learner.encoder.document_prompt must be .*<.start.>"),
        *(
            "correct agc/table9.yaml",
            {"train.learner.encoder.document_prompt": "<|start|>{content}"},
        ),
    ),
    "adapter of another base": Mutation(
        *(PAGES, "colpali/", foreign_adapter, "adapter must be an adapter of .*, which is one of"),
        *("correct sap/table1.yaml", {"index.encoder.adapter": "FOLDER/data/adapter"}),
    ),
    "attention statistic that is not stored": Mutation(
        *(PAGES, "colpali/", nothing, "an attention statistic that the index stores"),
        *("correct sap/table1.yaml", {"index.keep_taps": []}),
    ),
    "score that the model lacks": Mutation(
        *(PAGES, "colpali/", nothing, "scores must be maxsim, got 'hybrid'"),
        *("correct sap/table1.yaml", {"evaluate.scores": ["hybrid"]}),
    ),
    "training column": Mutation(
        *(CLIPS, "vidore/full", lambda f: rename_column(f / TRAIN, "query", "text")),
        *("query", f"{GET} colpali_train"),
    ),
    "caption of a missing video": Mutation(
        *(VIDEOS, "agc_random", lambda f: shutil.rmtree(f / "data/msrvtt/videos/")),
        *("videos is missing", f"{GET} msrvtt"),
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutation_is_one_problem(name, tmp_path):
    mutation = MUTATIONS[name]
    table = load_table(PAPERS, *mutation.table)
    folders = Folders(str(tmp_path / "data"), str(tmp_path), str(ROOT))
    values = json.loads(json.dumps(mutation.values).replace("FOLDER", str(tmp_path)))
    change = keep(mutation.steps, values)
    steps = change(plan(table, folders, True)).steps
    generate_data(required(table, True), DATA_SETS, tmp_path / "data")
    generate_models([step.fields for step in steps], tmp_path / "miniature")
    mutation.change(tmp_path)
    result = checked(*mutation.table, folders, True, change)
    text = result.text()
    assert text.splitlines()[-1] == "1 problems", text
    assert re.search(mutation.sentence, result.problems[0].problem), text
    assert result.problems[0].fix.startswith(mutation.fix), text


def test_number_that_no_step_computes(folders):
    complete("agc", "table9", folders)

    def other_representation(planned: Plan) -> Plan:
        (cell, *others), *columns = planned.cells[0]
        selection = {**cell.selection, "representation": "agc_6"}
        first = [[Cell(cell.output, selection), *others], *columns]
        return Plan(planned.steps, [first, *planned.cells[1:]])

    result = checked("agc", "table9", folders, True, other_representation)
    (problem,) = result.problems
    assert "got 'agc_6.maxsim'" in problem.problem and problem.fix == "correct agc/table9.yaml"


def test_other_revision(folders, tmp_path):
    complete("sap", "table1", folders)
    with serve(tmp_path / "served") as hub:
        hub.publish("org/colpali", Path(folders.output, MODELS, "colpali"))
        with connected(hub, tmp_path / "hub"):
            huggingface_hub.snapshot_download("org/colpali")
    names = {"index.encoder.model": "org/colpali", "calibrate.encoder.model": "org/colpali"}
    change = keep("colpali/", names)
    with connected(None, tmp_path / "hub"):
        assert not checked("sap", "table1", folders, True, change).problems
        change = keep("colpali/", {**names, "index.encoder.revision": "v2"})
        result = checked("sap", "table1", folders, True, change)
    assert result.text().splitlines()[-1] == "1 problems", result.text()
    assert "org/colpali" in result.problems[0].problem
    assert result.problems[0].fix == f"{GET} org/colpali"
