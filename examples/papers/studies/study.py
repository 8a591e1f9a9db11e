"""Studies: sweeps of training runs, their spread over seeds and the significance of gains."""

from __future__ import annotations

import itertools
import math
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydantic import Field

from pipeline import config
from pipeline.config import SpecError
from pipeline.eval.significance import holm, randomisation_p
from pipeline.runtime.atomic import write_atomic
from pipeline.runtime.text import Table, p_value
from pipeline.train.spec import VALIDATION, TrainSpec

if TYPE_CHECKING:
    from examples.papers.studies.curves import Curve
    from examples.papers.studies.evenness import Point

#: Metrics with a panel in the plot, if they were computed.
PLOTTED = ("R@1", "nDCG@10", "BoxMass", "RegionHit", "CoverageIoU", "pairwise_accuracy")
#: Metrics on the axes of the plot of evenness: quality, and how unevenly vectors are matched.
QUALITY, EVENNESS = "nDCG@10", ("CV", "Gini")


class StudySpec(TrainSpec):
    """A training run, or several, of `python -m examples.papers study`."""

    sweep: dict[str, Any] | list[dict[str, Any]] = Field(default_factory=dict)
    """Dotted fields and the values of each, with one run per combination; or a list of such
    mappings. Runs that differ only in the seed are one row of the table. A swept `name` names the
    row instead of its other fields."""


class Run(NamedTuple):
    """One run of a study.

    Attributes:
        title: Swept fields and their values.
        row: The same without the seed.
        spec: Spec of the run.
    """

    title: str
    row: str
    spec: TrainSpec


class Row(NamedTuple):
    """Results of the runs of a row.

    Attributes:
        name: Name of the row.
        before: (S, Q) values of each run and validation query before training, by metric.
        after: The same after training.
    """

    name: str
    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]

    def change(self, measure: str) -> tuple[float, float, float]:
        """Returns the mean before and after training, and the spread of the runs after training.

        All are NaN if the measure was not computed, as the grounding of vectors without tokens.
        """
        if measure not in self.after:
            return (math.nan,) * 3
        after_SQ = self.after[measure]
        return float(self.before[measure].mean()), float(after_SQ.mean()), spread(after_SQ)


def runs_of(spec: StudySpec) -> list[Run]:
    """Returns the runs of a study in subfolders of its output, or a single run without a sweep."""
    fields = {field: value for field, value in config.dump(spec).items() if field != "sweep"}
    if not spec.sweep:
        return [Run(spec.name, spec.name, config.parse(TrainSpec, fields))]
    runs: dict[str, Run] = {}
    for sweep in [spec.sweep] if isinstance(spec.sweep, dict) else spec.sweep:
        for values in config.combinations(sweep):
            shown = values
            if "name" in values:
                shown = {field: values[field] for field in ("name", "seed") if field in values}
            title = ", ".join(map(_described, shown.items()))
            row = ", ".join(_described(pair) for pair in shown.items() if pair[0] != "seed")
            folder = title.replace(", ", "_").replace(" ", "-").replace("/", "-")
            changed = config.assign(fields, values.items())
            changed |= {"name": f"{spec.name}_{folder}", "output": f"{spec.output}/{folder}"}
            if title in runs:
                raise SpecError("sweep", title, "unique combinations", "occurs twice")
            with config.within("sweep"):
                runs[title] = Run(title, row or spec.name, config.parse(TrainSpec, changed))
    return list(runs.values())


def _described(pair: tuple[str, Any]) -> str:
    """Describes a swept field and its value.

    >>> _described(("learner.compressor", {"name": "samer", "num_vectors": 8, "gamma": 0.0}))
    'samer num_vectors 8 gamma 0.0'
    >>> _described(("optimiser.learning_rate", 0.001))
    'learning_rate 0.001'
    """
    field, value = pair
    if isinstance(value, Mapping):
        named = [str(value["name"])] if "name" in value else []
        return " ".join([*named, *(f"{k} {v}" for k, v in value.items() if k != "name")])
    if isinstance(value, str):
        return value
    return f"{field.rpartition('.')[2]} {value}"


def report(spec: StudySpec, runs: Sequence[Run]) -> str:
    """Writes `study.csv` and `study.png` to the output folder and returns the table as text.

    If the evenness of matching was measured, `evenness.png` shows quality against it. If there are
    evaluations between the first and the last one, `curves.png` shows the metrics by step.

    The p values compare each row with the first one by a paired randomisation test over the
    validation queries. The test uses the first metric after training, averaged over seeds. Holm's
    correction is applied. A row `A > B` was trained with compressor A and evaluated with B.
    """
    rows = rows_of(runs)
    if not rows:
        return "nothing was measured: set eval_every"
    first = next(iter(rows[0].after))
    gains = [row.after[first].mean(axis=0) - rows[0].after[first].mean(axis=0) for row in rows[1:]]
    p_values = [None, *(holm(randomisation_p(np.stack(gains)).tolist()) if gains else [])]
    measures = list(dict.fromkeys(measure for row in rows for measure in row.after))
    cells = Table([["run", "seeds", *measures, f"p ({first})"]])
    names = [f"{m} {when}" for m in measures for when in ("before", "after", "sd")]
    numbers = Table([["run", "seeds", *names, "p"]])
    for row, p in zip(rows, p_values, strict=True):
        seeds = len(row.after[first])
        shown = [
            f"{row.before[m].mean():.3f} > {with_spread(row.after[m])}" if m in row.after else "-"
            for m in measures
        ]
        cells.append([row.name, str(seeds), *shown, p_value(p)])
        numbers.append([row.name, seeds, *itertools.chain(*map(row.change, measures)), p])
    write_atomic(posixpath.join(spec.output, "study.csv"), numbers.csv())
    from examples.papers.studies.changes import changes_png  # matplotlib is an extra

    plotted = [name for name in PLOTTED if name in measures]
    changes = {row.name: {m: row.change(m) for m in plotted} for row in rows}
    write_atomic(posixpath.join(spec.output, "study.png"), changes_png(changes, plotted))
    if curves := curves_of(runs, plotted):
        from examples.papers.studies.curves import curves_png

        write_atomic(posixpath.join(spec.output, "curves.png"), curves_png(curves, plotted))
    if points := evenness_points(rows, runs):
        from examples.papers.studies.evenness import evenness_png

        png = evenness_png(points, EVENNESS, QUALITY)
        write_atomic(posixpath.join(spec.output, "evenness.png"), png)
    return cells.text()


def evenness_points(rows: Sequence[Row], runs: Sequence[Run]) -> list[Point]:
    """Returns the points of the plot of evenness: the rows with all of its metrics."""
    from examples.papers.studies.evenness import Point  # matplotlib is an extra

    methods = {run.row: getattr(run.spec.learner, "compressor", None) for run in runs}
    points = []
    for row in rows:
        if not {QUALITY, *EVENNESS} <= row.after.keys():
            continue
        trained, _, evaluated = row.name.partition(" > ")
        method = evaluated.split()[0] if evaluated else getattr(methods[trained], "name", trained)
        values = tuple(float(row.after[metric].mean()) for metric in EVENNESS)
        points.append(Point(method, float(row.after[QUALITY].mean()), values))
    return points


def curves_of(runs: Sequence[Run], metrics: Sequence[str]) -> dict[str, dict[str, Curve]]:
    """Returns the learning curves of the rows with more than two evaluations.

    A row has the steps at which all of its runs were evaluated, and the metrics of the compressor
    with which it was trained.
    """
    grouped: dict[str, list[dict[int, dict[str, np.ndarray]]]] = {}
    for run in runs:
        if measured := _evaluations(run):
            values = {int(path.stem.removeprefix("step-")): _load(path) for path in measured}
            grouped.setdefault(run.row, []).append(values)
    curves: dict[str, dict[str, Curve]] = {}
    for name, found in grouped.items():
        steps = sorted(set.intersection(*map(set, found)))
        if len(steps) > 2:
            curves[name] = {
                metric: (
                    np.array(steps),
                    np.array(
                        [[by_step[step][metric].mean() for step in steps] for by_step in found]
                    ),
                )
                for metric in metrics
                if all(metric in by_step[step] for by_step in found for step in steps)
            }
    return curves


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """Returns the rows of a study, with the first and the last evaluation of each run."""
    grouped: dict[str, list[tuple[dict[str, np.ndarray], ...]]] = {}
    for run in runs:
        if measured := _evaluations(run):
            both = _load(measured[0]), _load(measured[-1])
            for row, *values in _by_compressor(run.row, *both):
                grouped.setdefault(row, []).append(tuple(values))
    return [
        Row(
            name,
            *(
                {m: np.stack([values[when][m] for values in found]) for m in found[0][when]}
                for when in (0, 1)
            ),
        )
        for name, found in grouped.items()
    ]


def _evaluations(run: Run) -> list[Path]:
    return sorted((Path(run.spec.output) / VALIDATION).glob("step-*.npz"))


def _load(path: Path) -> dict[str, np.ndarray]:
    return dict(np.load(path))


def _by_compressor(row: str, *when: dict[str, np.ndarray]) -> Iterator[tuple[Any, ...]]:
    """Yields the metrics of a run, and of each of its `validation_compressors` as another row.

    >>> metrics = {"R@1": np.array([1.0]), "R@1 (hpool num_vectors 4)": np.array([0.0])}
    >>> for name, values in _by_compressor("none", metrics):
    ...     print(name, values)
    none {'R@1': array([1.])}
    none > hpool num_vectors 4 {'R@1': array([0.])}
    """
    suffixes = dict.fromkeys(name.partition(" (")[2] for name in when[0])
    for suffix in suffixes:
        ending = f" ({suffix}" if suffix else ""
        name = f"{row} > {suffix.removesuffix(')')}" if suffix else row
        yield (
            name,
            *(
                {
                    metric.removesuffix(ending): values
                    for metric, values in metrics.items()
                    if metric.partition(" (")[2] == suffix
                }
                for metrics in when
            ),
        )


def spread(values_SQ: np.ndarray) -> float:
    """Returns the standard deviation of the runs' means, or 0 for a single run."""
    return float(values_SQ.mean(axis=1).std(ddof=1)) if len(values_SQ) > 1 else 0.0


def with_spread(values_SQ: np.ndarray) -> str:
    """Formats the mean over runs and queries with the standard deviation over runs."""
    return f"{values_SQ.mean():.3f} ± {spread(values_SQ):.3f}"
