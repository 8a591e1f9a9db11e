"""Compares the evaluations of two encoders on a slice by the language of the query.

    python -m examples.collection.languages OUTPUT OTHER [--plot FILE.png]

It prints a table of nDCG@10 with the 95 % confidence intervals of the differences, paired by query,
of the rows that both evaluations have. The plot shows the uncompressed vectors.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import jobs
from examples.collection.table import MEASURE, MIN_QUERIES, REFERENCE, per_query
from pipeline.eval.report.plot import COLORS, apply_style, to_png
from pipeline.eval.significance import bootstrap_interval
from pipeline.runtime.atomic import write_atomic

#: Values of a query by row and query.
Values = Mapping[str, Mapping[str, float]]
#: Language of MiniLM.
ENGLISH = "en"


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line, prints the table and writes the plot."""
    parser = jobs.parser(__doc__)
    parser.add_argument("output", help="output folder of the evaluation of one encoder")
    parser.add_argument("other", help="output folder of the other, with the same queries")
    parser.add_argument("--plot", help="file of the plot")
    args = parser.parse(arguments)
    queries, values = per_query(Path(args.output))
    _, others = per_query(Path(args.other))
    groups = language_groups({name: queries[name]["language"] for name in values[REFERENCE]})
    print("\n".join(table(groups, values, others)))
    if args.plot:
        names = [Path(folder).name for folder in (args.output, args.other)]
        write_atomic(args.plot, to_png(plot(groups, values, others, names)))


def language_groups(languages: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns the queries by language, largest group first.

    Languages of few queries are joined as `others`; `not en` has all but the English ones.
    """
    sizes = Counter(languages.values())
    groups = defaultdict[str, list[str]](list)
    for query, language in languages.items():
        if language != ENGLISH:
            groups["not en"].append(query)
        groups[language if sizes[language] >= MIN_QUERIES else "others"].append(query)
    return dict(sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])))


def table(groups: Mapping[str, list[str]], values: Values, others: Values) -> Iterator[str]:
    """Yields the lines of a Markdown table of both encoders and their differences."""
    sizes = (f"{name} ({len(queries)})" for name, queries in groups.items())
    yield f"| language | {' | '.join(sizes)} |"
    yield "|---" * (len(groups) + 1) + "|"
    for row in values:
        if row not in others:
            continue
        cells = []
        for queries in groups.values():
            first_N, second_N = (
                np.array([run[row][query] for query in queries]) for run in (values, others)
            )
            low, high = bootstrap_interval(second_N - first_N)
            cells.append(f"{first_N.mean():.3f}, {second_N.mean():.3f} ({low:+.3f} to {high:+.3f})")
        yield f"| {row} | {' | '.join(cells)} |"


def plot(
    groups: Mapping[str, list[str]], values: Values, others: Values, names: Sequence[str]
) -> Figure:
    """Draws the mean of each language with its 95 % confidence interval."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for number, (run, name) in enumerate(zip((values, others), names, strict=True)):
        samples = [np.array([run[REFERENCE][q] for q in queries]) for queries in groups.values()]
        means = [sample_N.mean() for sample_N in samples]
        limits = np.array([bootstrap_interval(sample_N) for sample_N in samples]).T
        positions = np.arange(len(groups)) + 0.4 * number - 0.2
        errors = np.abs(limits - means)
        axes.bar(positions, means, 0.38, yerr=errors, capsize=2, color=COLORS[number], label=name)
    axes.set_xticks(range(len(groups)), [f"{n}\n({len(q)})" for n, q in groups.items()])
    axes.set_ylabel(MEASURE)
    axes.legend(ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    apply_style(axes)
    return figure


if __name__ == "__main__":
    jobs.run(main)
