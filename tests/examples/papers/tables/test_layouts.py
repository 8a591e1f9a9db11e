"""All tables read the published layout of their data, and miniatures differ only in sizes."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from examples.papers.tables import layouts
from examples.papers.tables.miniature import SIZES
from examples.papers.tables.plan import Folders, PlannedStep, steps_of
from examples.papers.tables.spec import load_data_sets, load_table
from examples.papers.verbs.run import PAPERS
from pipeline.registry import BENCHMARKS, SOURCES, TRAINING_DATA
from pipeline.schema import Item
from pipeline.train.data.row_data import NO_DOCUMENT
from tests.conftest import ROOT
from tests.examples.papers.tables.test_spec import KNOWN

#: Placeholders that miniatures set: the member of a group that represents it, sizes, and the codec,
#: because residual has 256 centroids, which are more than a miniature has vectors.
VALUES = {"dataset", "backbone", "budget", "appended", "layers", "num_vectors", "layer", "codec"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Folders:
    """Folders with all data sets, in the layouts in which they are published."""
    folder = tmp_path_factory.mktemp("layouts")
    for write in layouts.writers(load_data_sets(PAPERS)).values():
        write(folder)
    return Folders(str(folder), str(folder / "out"), str(ROOT))


def test_data_sets_have_all_files_of_the_list(folders):
    data_sets = load_data_sets(PAPERS)
    assert data_sets.keys() == layouts.writers(data_sets).keys()
    files = [file for data_set in data_sets.values() for file in data_set.files]
    assert [file for file in files if not Path(folders.data, file).exists()] == []


class Pair(NamedTuple):
    """Step of a table and the same step of its miniature."""

    table: PlannedStep
    miniature: PlannedStep


@functools.cache
def pairs(paper: str, name: str, folders: Folders) -> list[Pair]:
    """Returns the distinct steps of all cells of a table."""
    spec = load_table(PAPERS, paper, name)
    cells: dict[str, dict[str, str]] = {}
    for row in spec.rows:
        for column, number in zip(spec.selections(), row.paper, strict=True):
            for variables, _ in spec.cells(row, column) if number is not None else ():
                cells[json.dumps(variables, sort_keys=True)] = variables
    found: dict[str, Pair] = {}
    for variables in cells.values():
        steps = [list(steps_of(spec, variables, folders, is_small)) for is_small in (False, True)]
        for pair in map(Pair, *steps):
            found.setdefault(pair.table.key, pair)
    return list(found.values())


def differences(first: Any, second: Any, path: str = "") -> Iterator[str]:
    """Yields the dotted names of the fields in which two specs differ."""
    if isinstance(first, dict) and isinstance(second, dict):
        for name in first.keys() | second.keys():
            yield from differences(first.get(name), second.get(name), f"{path}.{name}")
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for inner in zip(first, second, strict=True):
            yield from differences(*inner, path)
    elif first != second:
        yield path


@pytest.mark.parametrize(("paper", "name"), KNOWN)
def test_miniatures_differ_only_in_sizes(paper, name, folders):
    spec = load_table(PAPERS, paper, name)
    assert spec.miniature.values.keys() <= VALUES
    for pair in pairs(paper, name, folders):
        assert pair.table.name == pair.miniature.name
        changed = set(differences(pair.table.fields, pair.miniature.fields))
        assert {field for field in changed if field.rpartition(".")[2] not in SIZES} == set()


# -- data --------------------------------------------------------------------------------------


def once(read: Callable[[Any], Any]) -> Callable[[dict[str, Any]], Any]:
    """Returns a function that reads equal components only once."""
    cached = functools.cache(lambda text: read(json.loads(text)))
    return lambda fields: cached(json.dumps(fields, sort_keys=True))


@once
def item_ids(source: dict[str, Any]) -> set[str]:
    """Returns the ids of all items of a source, after it decoded the first ones."""
    spec = SOURCES.resolve(source)
    built = SOURCES.build(spec, SOURCES.load(spec.name).provided_inputs(spec))
    built.check()
    ids: set[str] = set()
    for shard in built.shards():
        items = list(enumerate(built.scan(shard)))
        assert all(isinstance(item, Item) for _, item in items), items
        ids |= {item.item_id for _, item in items}
        assert all(isinstance(item, Item) for item in built.decode(shard, items[:1]))
    return ids


@once
def judged_ids(benchmark: dict[str, Any]) -> set[str]:
    """Returns the ids of the relevant items of a benchmark, after it read the first query."""
    judged = BENCHMARKS.build(BENCHMARKS.resolve(benchmark)).load()
    assert list(judged.inputs(list(judged.qrels)[:1]))
    assert judged.qrels.keys() <= judged.queries.keys()
    return {name for grades in judged.qrels.values() for name, grade in grades.items() if grade}


@once
def num_phrases(benchmark: dict[str, Any]) -> int:
    """Returns the number of phrases with boxes of a benchmark."""
    return len(BENCHMARKS.build(BENCHMARKS.resolve(benchmark)).phrases())


@once
def check_training(fields: list[Any]) -> None:
    """Checks that every document of the training and validation data can be read."""
    data = TRAINING_DATA.build(TRAINING_DATA.resolve(fields[0]), batch_size=fields[1], seed=0)
    validation = data.validation()
    batches = [*data.batches(0, 0, 0, 1), *([validation] if validation else [])]
    assert (validation is None) == (fields[0].get("validation") is None)
    assert all(NO_DOCUMENT not in batch.document_keys for batch in batches)


@pytest.mark.parametrize(("paper", "name"), KNOWN)
def test_data_are_read_in_the_published_layout(paper, name, folders):
    found: dict[str, set[str]] = {}
    skipped: set[str] = set()
    for step in (pair.miniature for pair in pairs(paper, name, folders)):
        fields = step.fields
        if step.job == "train":
            check_training([fields["data"], fields["batch_size"]])
            continue
        part = {"index": "source", "latency": "source", "evaluate": "benchmark"}.get(step.job)
        if part is None:
            continue
        if fields[part]["name"] == "mteb" and not find_spec("mteb"):
            skipped.add(fields[part]["task"])
            continue
        if part == "source":
            found[fields.get("index", "")] = item_ids(fields["source"])
        else:
            assert judged_ids(fields["benchmark"]) <= found[fields["index"]]
            if fields.get("grounding") == "benchmark":
                assert num_phrases(fields["benchmark"])
    if skipped:  # after all others were checked
        pytest.skip(f"the data of {', '.join(sorted(skipped))} need the extra mteb")
