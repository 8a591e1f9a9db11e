"""Spec of a table or figure of a paper: steps, rows, columns, and the numbers of the paper."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from examples.papers.downloads.spec import DataSet as DataSet
from pipeline import config
from pipeline.config import Spec, SpecError

#: File below the folder of the papers that lists the data sets.
DATA_SETS = "data.yaml"
#: Job of a step, which is also its default name.
Job = Literal["train", "index", "recompress", "evaluate", "latency"]
#: Jobs whose output has the numbers of a table.
MEASURING: tuple[Job, ...] = ("evaluate", "latency")
#: Fields that select a row of an evaluation and a value of this row, beside the variables.
REPRESENTATION, SCORE, MEASURE = SELECTED = ("representation", "score", "measure")
#: A placeholder for the value of a variable.
PLACEHOLDER = re.compile(r"\$\{(\w+)\}")
#: A placeholder value that is a number, a boolean or a list of numbers in a spec.
TYPED = re.compile(r"-?\d+(\.\d+)?|true|false|\[[\d\s,.\[\]-]*\]")

#: Values of some variables, representation, score and measure.
Selection = Mapping[str, Any]


class Step(Spec):
    """A job of a table: an existing spec and changes to it."""

    job: Job | None = None
    """Job that runs the step, or null for the one that the name of the step names."""
    base: str
    """File of the spec that is changed."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Values by dotted field."""


class Changes(Spec):
    """Changes to the steps of a table for one value of a variable, or for its miniature."""

    requires: list[str] = Field(default_factory=list)
    """Names of the data sets that are needed, from data.yaml."""
    values: dict[str, str] = Field(default_factory=dict)
    """Values of further placeholders, unless a row or column has them. Those of the miniature of a
    table replace all others, so that several numbers come from one run."""
    steps: dict[str, dict[str, Any] | None] = Field(default_factory=dict)
    """Values by dotted field, by step. Null skips the step."""
    miniature: dict[str, dict[str, Any] | None] = Field(default_factory=dict)
    """Further changes to the steps in miniatures."""


class Row(Spec):
    """A row of a table."""

    label: str
    """Name of the row."""
    at: dict[str, str] = Field(default_factory=dict)
    """Values of variables and of further placeholders, and selection of the row of the evaluation:
    `representation` and `score` (default: maxsim)."""
    paper: list[float | None]
    """Numbers of the paper, one per column. Null omits the number from the table, and `.nan`
    measures a number that the paper does not have."""


class Correlation(Spec):
    """Pearson correlations of measures with others, over the numbers of all columns and rows."""

    measures: list[str] = Field(min_length=1)
    """Measures with which those of `paper` are correlated."""
    inverse: bool = False
    """Whether the inverses of `measures` are correlated (AGC, table 8)."""
    paper: dict[str, list[float]]
    """Correlations of the paper by measure, one for each of `measures`."""


class TableSpec(Spec):
    """Spec of a table or figure."""

    title: str
    """Content of the table."""
    source: str
    """Paper and number of the table or figure."""
    percent: bool = True
    """Whether the paper shows metrics in percent."""
    notes: list[str] = Field(default_factory=list)
    """What is omitted, or not known from the paper."""
    requires: list[str] = Field(default_factory=list)
    """Names of the data sets that are needed, from data.yaml."""
    variables: dict[str, dict[str, Changes]] = Field(default_factory=dict)
    """Values by variable, and what each changes. Steps run once for each combination of values
    that a number of the table needs."""
    groups: dict[str, dict[str, list[str]]] = Field(default_factory=dict)
    """Groups of values, by variable and name. The number of a group is the mean over its values."""
    steps: dict[str, Step]
    """Steps by name, in the order in which they run. The last one is the evaluation."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Names of values in the titles of columns."""
    columns: list[dict[str, list[str]]] = Field(min_length=1)
    """Columns: values by field, whose Cartesian product is taken. The fields are those of `at`, and
    `measure`, the name of a metric, see `examples.papers.tables.values`."""
    rows: list[Row] = Field(min_length=1)
    """Rows of the table."""
    correlation: Correlation | None = None
    """Correlations over the rows of the table, which are shown below it."""
    x: str | None = None
    """Horizontal axis of the plot, or null for a panel per column: a field of the columns, for a
    line per row, or a measure, for a point per row and column in a style per end of a label."""
    miniature: Changes = Changes()
    """Changes for the miniature."""

    @field_validator("variables", mode="before")
    @classmethod
    def _unchanged(cls, variables: Any) -> Any:
        """Replaces null, for a value that changes nothing, by an empty mapping."""
        if not isinstance(variables, Mapping):
            return variables
        return {
            name: {value: changes or {} for value, changes in values.items()}
            if isinstance(values, Mapping)
            else values
            for name, values in variables.items()
        }

    @model_validator(mode="after")
    def _check(self) -> TableSpec:
        last = list(self.steps)[-1] if self.steps else ""
        if not self.steps or step_job(last, self.steps[last]) not in MEASURING:
            rule = "a mapping that ends with an evaluate or latency step"
            raise SpecError("steps", list(self.steps), rule)
        for owner, changes in self._all_changes():
            for name in (*changes.steps, *changes.miniature):
                if name not in self.steps:
                    field = config.field_path(owner, "steps")
                    raise SpecError.unknown_name(field, name, self.steps)
        columns = self.selections()
        measures = list(dict.fromkeys(str(column.get(MEASURE)) for column in columns))
        shared = [name for name in columns[0] if all(name in column for column in columns)]
        axes = [*(name for name in shared if name != MEASURE), *measures]
        if self.x is not None and self.x not in axes:
            raise SpecError.unknown_name("x", self.x, axes)
        if self.correlation is not None:
            for name in (*self.correlation.measures, *self.correlation.paper):
                if name not in measures:
                    raise SpecError.unknown_name("correlation", name, measures)
            for name, numbers in self.correlation.paper.items():
                if len(numbers) != len(self.correlation.measures):
                    rule = f"a list of {len(self.correlation.measures)} numbers"
                    raise SpecError(f"correlation.paper.{name}", numbers, rule)
        placeholders = set(PLACEHOLDER.findall(self.model_dump_json()))
        for number, row in enumerate(self.rows):
            for name in row.at:
                if name not in {*self.variables, *SELECTED, *placeholders}:
                    known = [*self.variables, *SELECTED, *sorted(placeholders)]
                    raise SpecError.unknown_name(f"rows[{number}].at", name, known)
            if len(row.paper) != len(columns):
                rule = f"a list of {len(columns)} numbers, one per column"
                raise SpecError(f"rows[{number}].paper", row.paper, rule)
            for column in columns:
                with config.within(f"rows[{number}]"):
                    for _ in self.cells(row, column):
                        pass
        return self

    def _all_changes(self) -> Iterator[tuple[str, Changes]]:
        yield "miniature", self.miniature
        for name, values in self.variables.items():
            for value, changes in values.items():
                yield f"variables.{name}.{value}", changes

    def selections(self) -> list[dict[str, str]]:
        """Returns the selection of each column."""
        return [
            dict(zip(fields, values, strict=True))
            for fields in self.columns
            for values in itertools.product(*fields.values())
        ]

    def column_titles(self) -> list[str]:
        """Returns the titles of the columns."""
        return [
            " ".join(filter(None, (self.labels.get(v, v) for v in selection.values())))
            for selection in self.selections()
        ]

    def cells(
        self, row: Row, column: Selection, miniature: bool = False
    ) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
        """Yields the values of all placeholders and the selection of each number of a cell.

        A cell has several numbers if a variable has the name of a group; its value is their mean.
        """
        at = {**row.at, **column, **(self.miniature.values if miniature else {})}
        selection = {name: at.pop(name) for name in SELECTED if name in at}
        if MEASURE not in selection:
            raise SpecError("at", dict(at), "a selection that with its column has a measure")
        members: dict[str, list[str]] = {}
        for name, known in self.variables.items():
            value = at.get(name, next(iter(known)) if len(known) == 1 else None)
            groups = self.groups.get(name, {})
            if miniature:  # one member of each group is enough
                groups = {group: names[:1] for group, names in groups.items()}
            if value is None:
                rule = f"a selection that with its column has the variable {name!r}"
                raise SpecError("at", dict(at), rule)
            members[name] = groups.get(value, [value])
            for member in members[name]:
                if member not in known:
                    raise SpecError.unknown_name(f"at.{name}", member, [*known, *groups])
        for combination in itertools.product(*members.values()):
            chosen = dict(zip(members, combination, strict=True))
            values = {**at, **chosen}
            for name, value in chosen.items():
                values = {**self.variables[name][value].values, **values}
            with config.within("at"):
                for _ in values:  # values refer to others
                    before, values = values, filled(values, values)
                    if values == before:
                        break
                yield values, filled(selection, values)


def step_job(name: str, step: Step) -> Job:
    """Returns the job of a step."""
    if step.job is not None:
        return step.job
    for job in get_args(Job):
        if job == name:
            return job
    rule = f"one of {', '.join(get_args(Job))} unless the step has a field `job`"
    raise SpecError("steps", name, rule)


def filled(value: Any, variables: Mapping[str, str], typed: bool = False) -> Any:
    """Replaces placeholders in all strings of a JSON value.

    If `typed`, a placeholder becomes a number, a boolean or a list of numbers if its value is one.

    >>> filled({"out": "out/${model}", "k": ["${k}"]}, {"model": "agc", "k": "32"})
    {'out': 'out/agc', 'k': ['32']}
    >>> filled(["${k}", "agc_${k}"], {"k": "32"}, typed=True)
    [32, 'agc_32']
    """
    if isinstance(value, Mapping):
        return {key: filled(inner, variables, typed) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [filled(inner, variables, typed) for inner in value]
    if not isinstance(value, str) or "$" not in value:
        return value

    def replace(match: re.Match[str]) -> str:
        if match[1] not in variables:
            raise SpecError.unknown_name("", match[1], variables)
        return str(variables[match[1]])

    text = PLACEHOLDER.sub(replace, value)
    if typed and PLACEHOLDER.fullmatch(value) and TYPED.fullmatch(text):
        return json.loads(text)
    return text


def papers(folder: Path) -> dict[str, list[str]]:
    """Returns the names of the tables and figures by paper. table10 follows table9."""
    found = []
    for path in folder.glob("*/*.yaml"):
        if match := re.fullmatch(r"(table|figure)(\d+)", path.stem):
            found.append((path.parent.name, match[1] == "figure", int(match[2]), path.stem))
    tables: dict[str, list[str]] = {}
    for paper, _, _, name in sorted(found):
        tables.setdefault(paper, []).append(name)
    return tables


def load_table(folder: Path, paper: str, table: str) -> TableSpec:
    """Loads the spec of a table."""
    known = papers(folder)
    if paper not in known:
        raise SpecError.unknown_name("PAPER", paper, known)
    if table not in known[paper]:
        raise SpecError.unknown_name("TABLE", table, known[paper])
    with config.within(f"{paper}/{table}.yaml"):
        return config.parse(TableSpec, _read(folder / paper, f"{table}.yaml"))


def _read(folder: Path, name: str) -> dict[str, Any]:
    """Reads a table and adds the fields of the file that it names as `base`.

    Fields that are mappings in both files are united. `rows` may be a mapping of other tables by
    the beginning of the labels of their rows.
    """
    fields = config.read(str(folder / name), "table")
    if isinstance(tables := fields.get("rows"), Mapping):
        fields["rows"] = [
            {**row, "label": f"{label}, {row['label']}"}
            for label, table in tables.items()
            for row in _read(folder, str(table))["rows"]
        ]
    if (base := fields.pop("base", None)) is None:
        return fields
    common = config.read(str(folder / str(base)), "base")
    united = {
        field: {**common[field], **value}
        for field, value in fields.items()
        if isinstance(value, Mapping) and isinstance(common.get(field), Mapping)
    }
    return {**common, **fields, **united}


def load_data_sets(folder: Path) -> dict[str, DataSet]:
    """Loads the data sets that tables require."""
    data = config.read(str(folder / DATA_SETS), "data sets")
    with config.within(DATA_SETS):
        return {name: config.parse(DataSet, fields) for name, fields in data.items()}
