"""Check of a table before its first step: files, checkpoints, and one item through all steps."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import posixpath
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch

from examples.papers.studies.study import StudySpec
from examples.papers.tables import latency
from examples.papers.tables.first_layer import check_names, exceeds_memory, write_first_layer
from examples.papers.tables.plan import (
    GET,
    MINIATURE,
    Folders,
    Plan,
    PlannedStep,
    checkpoints,
    has_checkpoint,
    missing_files,
    models,
)
from examples.papers.tables.probe import DATA, MODEL, STEP, Cost, Probe, Rejected
from examples.papers.tables.run import Spec, parse
from examples.papers.tables.spec import DataSet, TableSpec
from examples.papers.tables.values import cell_value, read_evaluation
from pipeline.config import JobError, SpecError, Stopped, dump, one_line
from pipeline.encoders.loading import CheckpointSpec, shared_weights
from pipeline.eval.planning.report import duration, size
from pipeline.eval.spec import EvaluateSpec
from pipeline.extras import MissingExtra
from pipeline.index.recompress import RecompressSpec
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.runtime import logs
from pipeline.runtime.atomic import check_writable
from pipeline.runtime.text import Table


class Problem(NamedTuple):
    """A problem, what solves it, and the steps or the data set that have it."""

    problem: str
    fix: str
    where: str


@dataclass
class Checked:
    """Result of a check.

    Attributes:
        steps: Title and cost of each step, or None if it could not be checked.
        notes: Remarks that are no problems.
    """

    problems: list[Problem] = field(default_factory=list)
    steps: list[tuple[str, Cost | None]] = field(default_factory=list)
    notes: Iterable[str] = ()

    def text(self) -> str:
        """Returns the steps with their estimated costs, the remarks and the table of problems."""
        lines = []
        costs = [(title, cost) for title, cost in self.steps if cost is not None]
        if costs:
            rows = Table([["step", "items", "disk", "memory", "time", "GPU-hours"]])
            rows += [[title, *_cells(cost)] for title, cost in costs]
            disk = sum(cost.disk for _, cost in costs)
            seconds = sum(cost.seconds or 0.0 for _, cost in costs)
            memory, hours = max(c.memory for _, c in costs), sum(c.gpu_hours for _, c in costs)
            rows.append(["all", *_cells(Cost(0, disk, memory, seconds, hours))])
            lines.append(rows.text())
        if len(costs) < len(self.steps):
            lines.append(f"not checked: {len(self.steps) - len(costs)} of {len(self.steps)} steps")
        lines += [f"note: {note}" for note in self.notes]
        if not self.problems:
            return "\n".join([*lines, "no problems"])
        merged: dict[tuple[str, str], list[str]] = {}
        for found in self.problems:
            merged.setdefault((found.problem, found.fix), []).append(found.where)
        table = Table([["where", "fix", "problem"]])
        for (problem, fix), where in merged.items():
            more = f" and {len(where) - 1} more" if len(where) > 1 else ""
            table.append([where[0] + more, fix, problem])
        return "\n".join([*lines, "", table.text(), f"{len(merged)} problems"])


def _cells(cost: Cost) -> list[str]:
    return [
        f"{cost.items:,}" if cost.items else "-",
        size(cost.disk) if cost.disk else "-",
        size(cost.memory) if cost.memory else "-",
        "-" if cost.seconds is None else duration(cost.seconds),
        f"{cost.gpu_hours:,.1f}" if cost.gpu_hours else "-",
    ]


def check(
    name: str,
    table: TableSpec,
    plan: Plan,
    required: Sequence[str],
    data_sets: Mapping[str, DataSet],
    folders: Folders,
    say: Callable[[str], None],
    resources: IndexResources | None = None,
) -> Checked:
    """Checks all steps of a table on one item. Nothing is downloaded, and no output changes.

    Args:
        name: Path of the table's spec, for messages.
        required: Names of the data sets that the table needs.
        resources: Profile with which the costs of index steps are estimated.
    """
    check_writable(folders.output, "--output")
    Path(folders.output).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".check-", dir=folders.output) as scratch:
        probe = Probe(resources or IndexResources())
        needed = {data_set: data_sets[data_set] for data_set in required}
        checker = Checker(name, folders, scratch, needed, probe, say)
        with _offline(), logs.warnings_to(probe.note):
            checker.run(plan)
            checker.check_cells(table, plan)
    gc.collect()
    if torch.cuda.is_available():  # the steps run in other processes
        torch.cuda.empty_cache()
    return checker.checked


class Checker:
    """Checks steps whose outputs are moved to a folder that is removed afterwards.

    Steps that depend on each other form a group. Groups are ordered by checkpoint, so that each one
    is loaded once, and one is in memory at a time.
    """

    def __init__(
        self,
        name: str,
        folders: Folders,
        scratch: str,
        data_sets: Mapping[str, DataSet],
        probe: Probe,
        say: Callable[[str], None],
    ):
        self._name, self._folders, self._scratch, self._say = name, folders, scratch, say
        self._data_sets, self.probe, self.checked = data_sets, probe, Checked(notes=probe.notes)
        self._lacking: set[str] = set()  # files, models, and outputs of steps with problems
        self._whole: set[str] = set()  # models that fit into the memory
        self._reduced: dict[str, str] = {}  # folders with the first layers of other models
        self._is_reduced = False

    def run(self, plan: Plan) -> None:
        """Checks files, then the specs of all steps, and then the steps."""
        self._check_files(plan)
        specs: dict[str, Spec] = {}
        for step in plan.steps:
            with self._problems(step):
                specs[step.key] = self._parse(step)
        costs: dict[str, Cost | None] = {}
        of_checkpoints = functools.partial(checkpoints, output=self._folders.output)
        groups = _groups(plan.steps, self._folders.output)
        for read, of_models in itertools.groupby(groups, of_checkpoints):
            self._say(f"checking the steps with {', '.join(read) or 'no checkpoint'}")
            with shared_weights():
                for group in of_models:
                    known = [step for step in group if step.key in specs]
                    self._reduce(known, specs)
                    costs |= {step.key: self._check(step, specs) for step in known}
                    for step in group:  # models may be large
                        if step.job == "train":
                            for folder in Path(self._moved(step.output)).rglob("model"):
                                shutil.rmtree(folder)
        self.checked.steps = [(self._title(step), costs.get(step.key)) for step in plan.steps]

    def _parse(self, step: PlannedStep) -> Spec:
        return parse(step._replace(fields=self._moved(step.fields)))

    def _reduce(self, steps: Sequence[PlannedStep], specs: dict[str, Spec]) -> None:
        """Checks the names of weights that exceed the memory, and keeps one layer of the models."""
        self._is_reduced = False
        for step in steps:
            encoder = _encoder(specs[step.key])
            if encoder is None or self._lacks(step.fields):
                continue
            known = {*self._reduced, *self._whole}
            if encoder.model in known or encoder.model.startswith(self._scratch):
                continue
            with self._problems(step):
                self.probe.part = MODEL
                if exceeds_memory(encoder):
                    check_names(encoder)
                    folder = f"{self._scratch}/first_layers/{len(self._reduced)}"
                    write_first_layer(encoder, Path(folder))
                    self._reduced[encoder.model] = folder
                    note = "not run: all layers but the first of {}, which exceeds the memory"
                    self.probe.note(note.format(encoder.model))
                else:
                    self._whole.add(encoder.model)
        for step in steps:
            if any(model in self._reduced for model in checkpoints([step], self._folders.output)):
                specs[step.key], self._is_reduced = self._parse(step), True

    def _check_files(self, plan: Plan) -> None:
        for name, data_set in self._data_sets.items():
            if paths := missing_files(data_set, self._folders):
                self._lacking.update(paths)
                others = f", and {len(paths) - 1} others" if len(paths) > 1 else ""
                problem = f"{paths[0]} is missing{others}" + (
                    f". {data_set.note}" if data_set.note else ""
                )
                self.checked.problems.append(Problem(problem, f"{GET} {name}", name))
        revisions = models(plan.steps)
        for model in checkpoints(plan.steps, self._folders.output):
            if not has_checkpoint(model, revisions[model]):
                self._lacking.add(model)
                version = f" at {revisions[model]}" if revisions[model] else ""
                problem = f"the checkpoint {model}{version} is missing"
                self.checked.problems.append(Problem(problem, f"{GET} {model}", model))

    def _check(self, step: PlannedStep, specs: Mapping[str, Spec]) -> Cost | None:
        """Returns the cost of a step. Without what it needs, only its data are checked."""
        spec, probe = specs[step.key], self.probe
        data = [step.fields.get(part) for part in ("data", "source", "benchmark")]
        if self._lacks(data):
            self._lacking.add(step.output)
            return None
        index = getattr(spec, "index", None)
        of_index = [s for s in specs.values() if index and getattr(s, "index", None) == index]
        with self._problems(step):
            if self._lacks(step.fields):
                self._lacking.add(step.output)
                if isinstance(spec, IndexSpec):
                    probe.listing(spec)
                elif isinstance(spec, EvaluateSpec):
                    probe.load(spec)
                return None
            if isinstance(spec, StudySpec):
                return probe.train(spec)
            if isinstance(spec, IndexSpec):
                recompressions = [s for s in of_index if isinstance(s, RecompressSpec)]
                evaluations = [s for s in of_index if isinstance(s, EvaluateSpec)]
                evaluations = [s for s in evaluations if not self._lacks(dump(s.benchmark))]
                return probe.index(spec, recompressions, evaluations)
            if isinstance(spec, RecompressSpec):
                return probe.recompress(spec)
            if isinstance(spec, latency.LatencySpec):
                return probe.latency(spec)
            return probe.evaluate(spec, next(s for s in of_index if isinstance(s, IndexSpec)))
        return None

    @contextlib.contextmanager
    def _problems(self, step: PlannedStep) -> Iterator[None]:
        """Records an error in the block as a problem of a step, whose outputs are then missing."""
        self.probe.part = STEP
        try:
            yield
        except Stopped:
            raise
        except Exception as error:  # whatever it is, the step would end with it
            value = getattr(error, "value", None)
            is_known = isinstance(value, str) and value in self._lacking
            self._lacking.add(step.output)
            if is_known:  # such as a checkpoint
                return
            text = one_line(error)
            if not isinstance(error, SpecError | JobError | MissingExtra):
                text = f"{type(error).__name__}: {text}"
            text = text.replace(self._scratch, self._folders.output)
            if self._is_reduced and self.probe.part != DATA:  # maybe because of the other layers
                self.probe.note(f"not run: {self._title(step)} with one layer: {text}")
                return
            problem = Problem(text, self._fix(step, error), self._title(step))
            self.checked.problems.append(problem)

    def _fix(self, step: PlannedStep, error: Exception) -> str:
        """Returns the command or the edit that solves a problem."""
        field = error.field if isinstance(error, SpecError) else ""
        names = set(re.split(r"\W+", field))
        if isinstance(error, MissingExtra):
            return "install the package"
        is_checkpoint = bool(names & {"model", "revision"})
        is_data = self.probe.part == DATA or bool(names & {"source", "data", "benchmark"})
        if is_data and not is_checkpoint:
            paths = list(_strings([step.fields.get(p) for p in ("data", "source", "benchmark")]))
            for name, data_set in self._data_sets.items():
                files = [posixpath.join(self._folders.data, file) for file in data_set.files]
                if any(_overlap(file, path) for file in files for path in paths):
                    return f"{GET} {name}"
        is_of_model = self.probe.part == MODEL and not field and not isinstance(error, Rejected)
        if is_checkpoint or is_of_model:
            for model in checkpoints([step], self._folders.output):
                return f"{GET} {model}"
        return f"correct {self._name}"

    def _title(self, step: PlannedStep) -> str:
        return f"{step.name} {step.output.removeprefix(f'{self._folders.output}/')}"

    def _lacks(self, value: Any) -> bool:
        """Checks whether a value names anything that is missing."""
        return any(_overlap(path, text) for text in _strings(value) for path in self._lacking)

    def _moved(self, value: Any) -> Any:
        """Replaces the output folder in all strings, but not the inputs of a miniature in it."""
        if isinstance(value, Mapping):
            moved = {key: self._moved(inner) for key, inner in value.items()}
            if folder := self._reduced.get(str(value.get("model"))):
                moved |= {"model": folder, **({"revision": None} if "revision" in moved else {})}
            return moved
        if isinstance(value, list):
            return [self._moved(inner) for inner in value]
        prefix = f"{self._folders.output}/"
        inputs = (self._folders.data, f"{prefix}{MINIATURE}")
        if isinstance(value, str) and value.startswith(prefix) and not value.startswith(inputs):
            return f"{self._scratch}/{value.removeprefix(prefix)}"
        return value

    def check_cells(self, table: TableSpec, plan: Plan) -> None:
        """Checks that the results have all numbers of the table."""
        read = functools.cache(read_evaluation)
        for row, cells in zip(table.rows, plan.cells, strict=True):
            for cell in (cell for origins in cells for cell in origins):
                output = self.probe.same.get(self._moved(cell.output))
                if output is None:
                    continue
                try:
                    cell_value([cell._replace(output=output)], table.percent, read)
                except SpecError as error:
                    fix, where = f"correct {self._name}", f"row {row.label}"
                    self.checked.problems.append(Problem(one_line(error), fix, where))


def _groups(steps: Sequence[PlannedStep], output: str) -> list[list[PlannedStep]]:
    """Returns groups of steps that depend on each other, ordered by the names of checkpoints."""
    root = {step.output: step.output for step in steps}

    def find(name: str) -> str:
        while root[name] != name:
            name = root[name]
        return name

    for step in steps:
        for text in _strings(step.fields):
            for part in (text, *map(str, PurePosixPath(text).parents)):
                if part in root:
                    root[find(part)] = find(step.output)
    groups: dict[str, list[PlannedStep]] = {}
    for step in steps:
        groups.setdefault(find(step.output), []).append(step)
    return sorted(groups.values(), key=functools.partial(checkpoints, output=output))


def _overlap(first: str, second: str) -> bool:
    """Checks whether two texts are equal paths, or one is below the other."""
    return second != "" and (
        f"{first}/".startswith(f"{second}/") or f"{second}/".startswith(f"{first}/")
    )


def _encoder(spec: Any) -> CheckpointSpec | None:
    """Returns the encoder of a step that loads a checkpoint, which may be within another one."""
    encoder = getattr(getattr(spec, "learner", spec), "encoder", None)
    encoder = getattr(encoder, "encoder", encoder)
    return encoder if isinstance(encoder, CheckpointSpec) else None


def _strings(value: Any) -> Iterator[str]:
    """Yields all strings of a JSON value."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner)
    elif isinstance(value, str):
        yield value


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Restricts the client of the hub to its cache, because a check downloads nothing."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
