"""Tables of an evaluation of a slice: by what BM25 answers, and by kind and language."""

from __future__ import annotations

import csv
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pipeline.config import SpecError
from pipeline.eval.significance import bootstrap_interval

MEASURE, REFERENCE = "nDCG@10", "full.maxsim"
#: Queries of smaller groups are counted together.
MIN_QUERIES = 25


def tables(folder: Path) -> Iterator[str]:
    """Yields Markdown tables of nDCG@10 by what BM25 answers, by kind and by language.

    The first one has the 95 % confidence intervals of the differences to uncompressed vectors.

    Raises:
        SpecError: The folder is not the output of an evaluation of a slice.
    """
    queries, values = per_query(folder)
    evaluated = sorted(values[REFERENCE])
    sizes = Counter(queries[name]["language"] for name in evaluated)
    groups: dict[str, dict[str, list[str]]]
    groups = {"bm25": {"all": evaluated}, "kind": {}, "language": {}}
    for name in evaluated:
        for field, found in groups.items():
            value = queries[name][field]
            if field == "language" and sizes[value] < MIN_QUERIES:
                value = "others"
            found.setdefault(value, []).append(name)
    for field, found in groups.items():
        largest = sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
        yield from _table(field, dict(largest), values)
        yield ""


def per_query(folder: Path) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, float]]]:
    """Returns the queries by id, and nDCG@10 by run and query, of the output of an evaluation.

    Raises:
        SpecError: The folder is not the output of an evaluation of a slice.
    """
    if not (folder / "per_query.csv").exists():
        rule = "the output folder of `maxray evaluate examples/collection/evaluate.yaml`"
        raise SpecError("OUTPUT", str(folder), rule, "has no per_query.csv")
    path = Path(yaml.safe_load((folder / "spec.yaml").read_text())["benchmark"]["path"])
    with (path / "queries.jsonl").open(encoding="utf-8") as file:
        queries = {row["_id"]: row for row in map(json.loads, file)}
    values: dict[str, dict[str, float]] = defaultdict(dict)
    with (folder / "per_query.csv").open() as file:
        for row in csv.DictReader(file):
            values[row["run"]][row["query_id"]] = float(row[MEASURE])
    return queries, values


def _table(
    field: str, groups: dict[str, list[str]], values: dict[str, dict[str, float]]
) -> Iterator[str]:
    sizes = (f"{name} ({len(ids)})" for name, ids in groups.items())
    yield f"| {field} | {' | '.join(sizes)} |"
    yield "|---" * (len(groups) + 1) + "|"
    for run, by_query in values.items():
        cells = []
        for ids in groups.values():
            scores = np.array([by_query[name] for name in ids])
            cell = f"{scores.mean():.3f}"
            if run != REFERENCE and field == "bm25":
                reference = np.array([values[REFERENCE][name] for name in ids])
                low, high = bootstrap_interval(scores - reference)
                cell += f" ({low:+.3f} to {high:+.3f})"
            cells.append(cell)
        yield f"| {run.removesuffix('.maxsim')} | {' | '.join(cells)} |"
