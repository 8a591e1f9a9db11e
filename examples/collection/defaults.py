"""Choice of the default representation and score on one half of the queries, proof on the other.

Shapes: R rows of the table, Q queries, S bootstrap samples.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from examples.collection.parts import HALVES
from examples.collection.study import StudySpec
from pipeline.defaults import CODEC, COMPRESSOR, SCORE
from pipeline.eval.significance import ratio_intervals

#: Largest loss in nDCG@10, at the lower end of the 95 % confidence interval.
MARGIN = 0.01
#: Number of bootstrap samples of the queries.
NUM_SAMPLES = 2000
#: Groups with fewer queries are not compared.
MIN_QUERIES = 50
#: Rows that the rule chooses among. A default has a limited number of vectors, so that the size of
#: an index is known, and a codec without fitting, so that an index may begin empty. Its score needs
#: neither single vectors nor BM25. The others show what these conditions cost.
ELIGIBLE = {
    "all conditions": re.compile(r"[a-z_]+_\d+(_int8)?\.maxsim"),
    "any codec": re.compile(r"[a-z_]+_\d+(_int8|_bits_\d)?\.maxsim"),
    "any row": re.compile(".*"),
}
PRESENT = f"{COMPRESSOR['name']}_{COMPRESSOR['num_vectors']}_{CODEC}.{SCORE}"
#: Rows that are compared with the present default.
ALTERNATIVES = (
    "kcenter_32_int8.fused",
    "kcenter_32_int8.hybrid",
    "kcenter_32_bits_1.maxsim",
    "kcenter_32_bits_1.hybrid",
    "full_bits_1.hybrid",
    "full_int8.maxsim",
)
#: Rows that a recommendation chooses among, as `maxray plan recommend` by default.
RECOMMENDED = re.compile(r"(full|(hpool|kcenter|samer|spatial)_\d+)_int8\.maxsim")
#: Required fractions of quality, and confidence levels of the bound; 0 is the mean.
REQUIRED, SHARES = (0.9, 0.95, 0.98), (0.0, 0.8, 0.95)
#: Minimum number of queries of a case of `regret` in each half, and of a language.
MIN_CASE = 25
#: Methods of the plot.
PLOTTED = ("kcenter", "hpool", "attention_clustering", "samer")
#: Rows in which encoders are compared.
COMPARED = ("full_int8.maxsim", PRESENT, "kcenter_8_int8.maxsim", "single_vector")
#: Row of the uncompressed vectors, in float16 if it was measured, or of those of the index.
REFERENCES = ("full.maxsim", "full_int8.maxsim", "hpool_32.maxsim", "hpool_32_int8.maxsim")


class Rows(NamedTuple):
    """Metric of each row and query of a collection.

    Attributes:
        bytes: Mean bytes per item (R,), with the single vector and the BM25 code that a score uses.
        values: nDCG@10 (R, Q).
        is_prove: Whether a query is in the half `prove` (Q,).
        groups: Mask (Q,) of each group of queries, by name.
    """

    names: list[str]
    bytes: np.ndarray
    values: np.ndarray
    is_prove: np.ndarray
    groups: dict[str, np.ndarray]


class Test(NamedTuple):
    """Difference of a row to another one, with its 95 % confidence interval."""

    other: str
    difference: float
    low: float
    high: float

    @property
    def interval(self) -> str:
        """The difference with its interval, in points."""
        bounds = f"({100 * self.low:+.1f} to {100 * self.high:+.1f})"
        return f"{100 * self.difference:+.1f} {bounds}"

    @property
    def verdict(self) -> str:
        """`passed`, `failed`, or `undecided` if the interval contains both answers."""
        if self.low > -MARGIN:
            return "passed"
        return "failed" if self.high < 0 else "undecided"


def read(folder: Path, queries: Path) -> Rows:
    """Reads the results of a collection, and the groups of its queries from its benchmark."""
    names: list[str] = []
    sizes, values = [], []
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as table:
            new = [number for number, name in enumerate(table["names"]) if name not in names]
            names += table["names"][new].tolist()
            sizes.append(table["bytes"][new])
            values.append(table["values"][new])
    with (folder / "queries.csv").open() as file:
        listed = list(csv.DictReader(file))
    fields = {}
    if queries.exists():
        with queries.open(encoding="utf-8") as file:
            fields = {row["_id"]: row for row in map(json.loads, file)}
    tokens_Q = np.array([float(row["tokens"]) for row in listed])
    bounds = np.quantile(tokens_Q, [1 / 3, 2 / 3])
    length_Q = np.array(["short", "medium", "long"])[np.searchsorted(bounds, tokens_Q)]
    groups = {f"answer: {name}": length_Q == name for name in ("short", "medium", "long")}
    for field in ("kind", "language"):
        value_Q = np.array([fields.get(row["query"], {}).get(field, "") for row in listed])
        groups |= {f"{field}: {name}": value_Q == name for name in np.unique(value_Q) if name}
    is_prove = np.array([row["half"] == HALVES[1] for row in listed])
    return Rows(names, np.concatenate(sizes), np.concatenate(values), is_prove, groups)


def read_all(spec: StudySpec) -> dict[str, Rows]:
    """Reads the results of all collections that have been measured."""
    found = {}
    for name, collection in spec.collections.items():
        if any((folder := Path(spec.output) / name).glob("*.npz")):
            path = Path(getattr(collection.benchmark, "path", ""))
            found[name] = read(folder, path / "queries.jsonl")
    return found


def intervals(differences_RQ: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bounds (R,) of the 95 % confidence intervals of the means (paired bootstrap).

    >>> intervals(np.array([[0.5, 0.5], [0.0, 0.0]]))[0].tolist()
    [0.5, 0.0]
    """
    ones_Q = np.ones(differences_RQ.shape[1])  # the means relative to 1
    low_R, high_R = ratio_intervals(differences_RQ, ones_Q, num_samples=NUM_SAMPLES).T
    return low_R, high_R


def choose(rows: Rows, pattern: re.Pattern[str]) -> str:
    """Returns the smallest eligible row that is within the margin of the best one on `choose`.

    Among those of this size, it is the present one, unless another is significantly better.
    """
    values_RQ = rows.values[:, ~rows.is_prove]
    eligible = np.array([pattern.fullmatch(name) is not None for name in rows.names])
    means_R = np.where(eligible, values_RQ.mean(1), -1)
    low_R, _ = intervals(values_RQ - values_RQ[means_R.argmax()])
    is_close_R = eligible & (low_R > -MARGIN)
    is_close_R[means_R.argmax()] = True
    smallest = rows.bytes[is_close_R].min()
    best = np.where(is_close_R & (rows.bytes < smallest * 1.001), means_R, -1).argmax()
    if PRESENT in rows.names:
        row = rows.names.index(PRESENT)
        _, (high,) = intervals(values_RQ[[row]] - values_RQ[best])
        if is_close_R[row] and rows.bytes[row] < smallest * 1.001 and high >= 0:
            return PRESENT
    return rows.names[best]


def prove(rows: Rows, name: str, queries_Q: np.ndarray, other: str | None = None) -> Test:
    """Compares a row with another, by default the best of the others of at most equal bytes."""
    row = rows.names.index(name)
    values_RQ = rows.values[:, queries_Q]
    means_R = values_RQ.mean(1)
    if other is None:
        means_R[(rows.bytes > rows.bytes[row] * 1.001) | (np.arange(len(means_R)) == row)] = -1
        number = int(means_R.argmax())
    else:
        number = rows.names.index(other)
    difference_Q = values_RQ[row] - values_RQ[number]
    (low,), (high,) = intervals(difference_Q[np.newaxis])
    return Test(rows.names[number], float(difference_Q.mean()), float(low), float(high))


def regret(spec: StudySpec) -> Iterator[str]:
    """Yields a table of recommendations by one half of the queries, measured on the other.

    A case is a language of a collection, and a required fraction of the uncompressed quality. The
    smallest row of MaxSim is recommended whose lower bound is sufficient, or else the uncompressed
    vectors. Where nothing is chosen on the queries, the halves consist of every other query.
    """
    cases: dict[str, tuple[np.ndarray, ...]] = {}
    for name, rows in read_all(spec).items():
        languages = [q for group, q in rows.groups.items() if group.startswith("language: ")]
        used_R = [n for n, row in enumerate(rows.names) if RECOMMENDED.fullmatch(row)]
        used_R.sort(key=lambda n: -rows.bytes[n])
        second_Q = np.arange(len(rows.is_prove)) % 2 == 1 if rows.is_prove.all() else rows.is_prove
        for mask_Q in languages or [np.ones_like(second_Q)]:
            halves = [rows.values[used_R][:, mask_Q & half] for half in (~second_Q, second_Q)]
            if min(half_RQ.shape[1] for half_RQ in halves) >= MIN_CASE:
                cases[f"{name} {len(cases)}"] = (*halves, rows.bytes[used_R])
    yield f"{len(cases) * len(REQUIRED)} cases"
    yield ""
    yield "| confidence | measured on | regret at most 1 | largest regret | size / best |"
    yield "|---|---|---|---|---|"
    for share in SHARES:
        for title, order in (("prove", (0, 1)), ("choose", (1, 0))):
            found = np.array(
                [
                    pair
                    for *halves, bytes_R in cases.values()
                    for pair in _regrets(halves[order[0]], halves[order[1]], bytes_R, share)
                ]
            )
            ratio = np.exp(np.log(found[:, 1]).mean())
            yield (
                f"| {100 * share:.0f} % | {title} | {100 * (found[:, 0] <= 1).mean():.0f} % | "
                f"{found[:, 0].max():.1f} | {ratio:.1f} |"
            )


def _regrets(
    chosen_RQ: np.ndarray, proved_RQ: np.ndarray, bytes_R: np.ndarray, share: float
) -> Iterator[tuple[float, float]]:
    """Yields the missing points of retained quality, and the size relative to the best one.

    The first row is the uncompressed one. Without a confidence `share`, its lower bound is the
    mean.
    """
    means_R = chosen_RQ.mean(axis=1) / chosen_RQ[0].mean()
    low_R = ratio_intervals(chosen_RQ, chosen_RQ[0], share)[:, 0] if share else means_R
    truth_R = proved_RQ.mean(axis=1) / proved_RQ[0].mean()
    for required in REQUIRED:
        found, best = (
            min([0, *np.flatnonzero(x_R >= required)], key=lambda row: bytes_R[row])
            for x_R in (low_R, truth_R)
        )
        yield 100 * max(0.0, required - truth_R[found]), bytes_R[found] / bytes_R[best]


def report(spec: StudySpec, table: Path | None) -> Iterator[str]:
    """Yields Markdown tables of the chosen rows, and writes all rows to a CSV file.

    Args:
        table: CSV file, or None.
    """
    collections = read_all(spec)
    rows = next(found for name, found in collections.items() if spec.collections[name].halves)
    for conditions, pattern in ELIGIBLE.items():
        chosen = choose(rows, pattern)
        yield f"With {conditions}: `{chosen}`"
        yield ""
        yield "| queries | number | nDCG@10 | best of at most equal bytes | difference | verdict |"
        yield "|---|---|---|---|---|---|"
        for name, found in collections.items():
            if chosen in found.names:
                yield _line(name, found, chosen, found.is_prove)
        for group, mask_Q in rows.groups.items():
            if (mask_Q & rows.is_prove).sum() >= MIN_QUERIES:
                yield _line(group, rows, chosen, mask_Q & rows.is_prove)
        yield ""
    yield f"| queries | number | {' | '.join(f'`{row}`' for row in ALTERNATIVES)} |"
    yield f"|---|---|{'---|' * len(ALTERNATIVES)}"
    for name, found in collections.items():
        if PRESENT in found.names:
            yield from _alternatives(name, found)
    yield ""
    yield f"| queries | number | {' | '.join(f'`{row}`' for row in COMPARED)} |"
    yield f"|---|---|{'---|' * len(COMPARED)}"
    for name, collection in spec.collections.items():
        if collection.against and {name, collection.against} <= collections.keys():
            yield from _comparison(name, collections[collection.against], collections[name])
    for name, found in collections.items():
        yield ""
        yield f"| {name} | bytes per item | choose | prove | difference to uncompressed |"
        yield "|---|---|---|---|---|"
        yield from _front(found)
    if table is not None:
        write(table, collections)
        shown = {
            name: found
            for name, found in collections.items()
            if spec.collections[name].representation == "full"
            and not spec.collections[name].against
        }
        plot(table.with_suffix(".png"), shown)


def _alternatives(name: str, rows: Rows) -> Iterator[str]:
    """Yields a line per half and kind of query with the differences to the present default."""
    kinds = {group: mask_Q for group, mask_Q in rows.groups.items() if group.startswith("kind: ")}
    halves = dict(zip(HALVES, (~rows.is_prove, rows.is_prove), strict=True))
    for group, mask_Q in {name: np.ones_like(rows.is_prove), **kinds}.items():
        for half, half_Q in halves.items():
            if (used_Q := mask_Q & half_Q).sum() < MIN_QUERIES:
                continue
            cells = [
                prove(rows, row, used_Q, PRESENT).interval if row in rows.names else ""
                for row in ALTERNATIVES
            ]
            title = group.replace("kind", name, 1) if group in kinds else name
            label = title if rows.is_prove.all() else f"{title}, `{half}`"
            yield f"| {label} | {used_Q.sum():,} | {' | '.join(cells)} |"


def _comparison(name: str, first: Rows, second: Rows) -> Iterator[str]:
    """Yields a line per language with the values of two encoders and the difference."""
    languages = {g: q for g, q in first.groups.items() if g.startswith("language: ")}
    for group, mask_Q in {name: np.ones_like(first.is_prove), **languages}.items():
        used_Q = mask_Q & first.is_prove
        if used_Q.sum() < MIN_CASE:
            continue
        cells = []
        for row in COMPARED:
            pair = [rows.values[rows.names.index(row), used_Q] for rows in (first, second)]
            (low,), (high,) = intervals((pair[1] - pair[0])[np.newaxis])
            means = ", ".join(f"{values_Q.mean():.3f}" for values_Q in pair)
            cells.append(f"{means} ({100 * low:+.1f} to {100 * high:+.1f})")
        yield f"| {group} | {used_Q.sum():,} | {' | '.join(cells)} |"


def _front(rows: Rows) -> Iterator[str]:
    """Yields the rows than which no smaller one is better, by the half for choosing if there is."""
    values_RQ = rows.values[:, rows.is_prove]
    queries_Q = rows.is_prove if rows.is_prove.all() else ~rows.is_prove
    chosen_by_R = rows.values[:, queries_Q].mean(1)
    low_R, high_R = intervals(values_RQ - values_RQ[rows.names.index(reference(rows))])
    best = -1.0
    for row in np.lexsort((-chosen_by_R, rows.bytes)):
        if chosen_by_R[row] > best:
            best = chosen_by_R[row]
            choose_Q = rows.values[row, ~rows.is_prove]
            cells = [f"{choose_Q.mean():.3f}" if len(choose_Q) else ""]
            cells += [f"{values_RQ[row].mean():.3f}", f"{low_R[row]:+.3f} to {high_R[row]:+.3f}"]
            yield f"| `{rows.names[row]}` | {rows.bytes[row]:,.0f} | {' | '.join(cells)} |"


def reference(rows: Rows) -> str:
    """Returns the name of the row of uncompressed vectors."""
    return next(name for name in REFERENCES if name in rows.names)


def plot(path: Path, collections: dict[str, Rows]) -> None:
    """Draws nDCG@10 on `prove` against bytes per item, one panel per collection."""
    from matplotlib.figure import Figure

    columns = min(3, len(collections))
    lines = -(-len(collections) // columns)
    figure = Figure(figsize=(4 * columns, 3.2 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flat
    for (name, rows), panel in zip(collections.items(), panels, strict=False):
        for number, method in enumerate(PLOTTED):
            for codec, style in (("int8", "o-"), ("bits_1", "s:")):
                pattern = re.compile(rf"{method}_\d+_{codec}\.maxsim")
                found = [n for n, row in enumerate(rows.names) if pattern.fullmatch(row)]
                found.sort(key=lambda row: rows.bytes[row])
                values_R = rows.values[found][:, rows.is_prove].mean(axis=1)
                settings = {"ms": 3, "color": f"C{number}", "label": method}
                panel.plot(rows.bytes[found], values_R, style, **settings)
        if any(len(line.get_xdata()) for line in panel.lines):
            panel.set_xscale("log")
        panel.axhline(rows.values[rows.names.index(reference(rows)), rows.is_prove].mean(), lw=0.8)
        panel.set(xlabel="bytes per item", ylabel="nDCG@10", title=name)
    for panel in panels:
        panel.set_axis_off()
    figure.axes[0].legend(*(x[::2] for x in figure.axes[0].get_legend_handles_labels()), fontsize=7)
    figure.savefig(path, dpi=150)


def _line(name: str, rows: Rows, chosen: str, queries_Q: np.ndarray) -> str:
    test = prove(rows, chosen, queries_Q)
    value = rows.values[rows.names.index(chosen), queries_Q].mean()
    number = int(queries_Q.sum())
    cells = [name, f"{number:,}", f"{value:.3f}", f"`{test.other}`", test.interval, test.verdict]
    return f"| {' | '.join(cells)} |"


def write(path: Path, collections: dict[str, Rows]) -> None:
    """Writes a row per collection, representation and score.

    `low` and `high` are the bounds of the difference to uncompressed vectors on `prove`.
    """
    with path.open("w") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["collection", "row", "bytes", *HALVES, "low", "high"])
        for name, rows in collections.items():
            values_RQ = rows.values[:, rows.is_prove]
            low_R, high_R = intervals(values_RQ - values_RQ[rows.names.index(reference(rows))])
            for row in np.lexsort((np.array(rows.names), rows.bytes)):
                choices_Q = rows.values[row, ~rows.is_prove]
                numbers = [values_RQ[row].mean(), low_R[row], high_R[row]]
                cells = [f"{number:.6f}" for number in numbers]
                first = f"{choices_Q.mean():.6f}" if len(choices_Q) else ""
                writer.writerow([name, rows.names[row], round(rows.bytes[row]), first, *cells])
