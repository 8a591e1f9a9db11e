"""The jobs that a table needs: the specs of all steps, and the data and models that they read."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from examples.papers.downloads.revisions import Revisions, is_cached
from examples.papers.downloads.spec import load_checkpoints
from examples.papers.tables.spec import SCORE, DataSet, Job, TableSpec, filled, step_job
from pipeline import config

#: Prefixes of paths in specs that are replaced by folders.
DATA, OUTPUT, MINIATURE = "data/", "out/", "miniature/"
#: Prefixes of paths in the repository.
SHIPPED = ("jobs/", "examples/")
#: Rows of an evaluation that are not representations.
OTHER_ROWS = ("single_vector", "bm25", "edje", "blip")
#: Command that obtains data sets and models.
GET = "python -m examples.papers get"
#: Prefix of a metric relative to that of the uncompressed representation.
RELATIVE, FULL = "relative ", "full"
#: Files of settings. A checkpoint has one of them.
SETTINGS = ("config.json", "adapter_config.json", "open_clip_config.json")


class Folders(NamedTuple):
    """Folders that replace prefixes of paths in specs."""

    data: str
    output: str
    root: str

    def resolve(self, value: Any) -> Any:
        """Replaces the prefixes in all strings of a JSON value."""
        if isinstance(value, Mapping):
            return {key: self.resolve(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.resolve(inner) for inner in value]
        if not isinstance(value, str):
            return value
        prefixes = {
            DATA: self.data,
            OUTPUT: self.output,
            MINIATURE: f"{self.output}/{MINIATURE.rstrip('/')}",
        }
        for prefix, folder in prefixes.items():
            if value.startswith(prefix):
                return f"{folder}/{value.removeprefix(prefix)}"
        return f"{self.root}/{value}" if value.startswith(SHIPPED) else value


class PlannedStep(NamedTuple):
    """A job with its spec."""

    name: str
    job: Job
    fields: dict[str, Any]

    @property
    def output(self) -> str:
        """Folder or index that the step writes."""
        return self.fields.get("output") or self.fields["index"]

    @property
    def key(self) -> str:
        """Text that is equal for equal steps."""
        return json.dumps([self.job, self.fields], sort_keys=True)


class Cell(NamedTuple):
    """Origin of one number."""

    output: str
    selection: dict[str, str]


class Plan(NamedTuple):
    """Steps of a table, in the order in which they run, and the origin of each number.

    Attributes:
        cells: Origins of the numbers of each cell, by row and column.
    """

    steps: list[PlannedStep]
    cells: list[list[list[Cell]]]


def plan(table: TableSpec, folders: Folders, miniature: bool) -> Plan:
    """Returns the steps of a table, with the commits of published checkpoints."""
    steps: dict[str, dict[str, PlannedStep]] = {name: {} for name in table.steps}
    scores: dict[str, set[str]] = {}  # by output folder
    cells: list[list[list[Cell]]] = []
    planned: dict[str, list[PlannedStep]] = {}
    revisions = Revisions(folders.data)
    checkpoints = load_checkpoints(Path(folders.root, "examples/papers"))
    for row in table.rows:
        of_row = []
        for column, number in zip(table.selections(), row.paper, strict=True):
            of_cell: list[Cell] = []
            if number is None:
                of_row.append(of_cell)
                continue
            for variables, selection in table.cells(row, column, miniature):
                key = json.dumps(variables, sort_keys=True)
                if key not in planned:
                    planned[key] = [
                        step._replace(fields=revisions.pin(step.fields, checkpoints))
                        for step in steps_of(table, variables, folders, miniature)
                    ]
                for step in planned[key]:
                    steps[step.name].setdefault(step.key, step)
                output = planned[key][-1].fields["output"]
                of_cell.append(Cell(output, selection))
                score = selection.get(SCORE, "maxsim")
                if score not in OTHER_ROWS or score == "single_vector":
                    scores.setdefault(output, set()).add(score)
            of_row.append(of_cell)
        cells.append(of_row)
    ordered = [step for by_key in steps.values() for step in by_key.values()]
    for step in ordered:
        if step.job == "evaluate":
            _restrict(step.fields, scores)
    return Plan(ordered, cells)


def _restrict(fields: dict[str, Any], scores: Mapping[str, set[str]]) -> None:
    if found := scores.get(fields["output"]):
        fields["scores"] = sorted(found | set(fields.get("scores") or ()))
    fields.setdefault("bm25", False)


def steps_of(
    table: TableSpec, variables: Mapping[str, str], folders: Folders, miniature: bool
) -> Iterator[PlannedStep]:
    """Yields the steps for values of all placeholders, those of a cell."""
    for name, step in table.steps.items():
        of_values = [
            (f"variables.{variable}.{variables[variable]}", values[variables[variable]])
            for variable, values in table.variables.items()
        ]
        if miniature:
            of_values.append(("miniature", table.miniature))
        changes: list[tuple[str, dict[str, Any] | None]] = [(f"steps.{name}.set", step.set)]
        changes += [(f"{field}.steps.{name}", c.steps.get(name, {})) for field, c in of_values]
        if miniature:
            changes += [
                (f"{field}.miniature.{name}", c.miniature.get(name, {})) for field, c in of_values
            ]
        if any(values is None for _, values in changes):
            continue
        base_file = folders.resolve(filled(step.base, variables))
        base = _read(base_file, f"steps.{name}.base")
        for field, values in changes:
            with config.within(field):
                assert values is not None
                base = config.assign(base, filled(values, variables, typed=True).items())
        yield PlannedStep(name, step_job(name, step), folders.resolve(base))


@functools.lru_cache(maxsize=64)
def _read(path: str, field: str) -> dict[str, Any]:
    """Reads a spec, which many steps change, only once."""
    return config.read(path, field)


def required(table: TableSpec, miniature: bool) -> list[str]:
    """Returns the data sets of a table, and those of the values of its variables that it uses."""
    names = dict.fromkeys(table.requires)
    for row in table.rows:
        for column, number in zip(table.selections(), row.paper, strict=True):
            for values, _ in table.cells(row, column, miniature) if number is not None else ():
                for variable, changes in table.variables.items():
                    names |= dict.fromkeys(filled(changes[values[variable]].requires, values))
    return list(names)


def missing_files(data_set: DataSet, folders: Folders) -> list[str]:
    """Returns the paths of the missing files and folders of a data set."""
    paths = [f"{folders.data}/{file}" for file in data_set.files]
    return [path for path in paths if not Path(path).exists()]


def checkpoints(steps: Iterable[PlannedStep], output: str) -> list[str]:
    """Returns the names or folders of the models that steps read and none of them trains."""
    made, given = f"{output}/", f"{output}/{MINIATURE}"
    names = sorted(models(steps))
    return [name for name in names if name.startswith(given) or not name.startswith(made)]


def models(steps: Iterable[PlannedStep]) -> dict[str, str | None]:
    """Returns the names or folders of the models of steps, with their commits."""
    return dict(model for step in steps for model in _models(step.fields))


def _models(value: Any) -> Iterator[tuple[str, str | None]]:
    if isinstance(value, Mapping):
        if isinstance(model := value.get("model"), str):
            yield model, value.get("revision")
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _models(inner)


def has_checkpoint(model: str, revision: str | None = None) -> bool:
    """Returns True if a checkpoint is a folder, or in the cache of the hub."""
    return Path(model).exists() or is_cached(model, revision)
