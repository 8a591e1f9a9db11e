"""A table of two encoders and two collections, whose encoders record that they are loaded.

python -m tests.examples.papers.tables.small FOLDER     # runs its steps
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jobs
from examples.papers.tables.plan import Folders, Plan, plan
from examples.papers.tables.report import Report
from examples.papers.tables.run import Settings, run
from examples.papers.tables.schedule import Scheduled
from examples.papers.tables.spec import TableSpec
from pipeline import config
from pipeline.encoders.minilm import MiniLM
from tests.conftest import ROOT

COLLECTIONS = {
    "food": ["Bake the bread.", "Knead flour and water.", "Roast coffee beans.", "Boil rice."],
    "flow": [
        "Lift of a wing.",
        "Heat of a blunt body.",
        "Buckling of shells.",
        "Flow past a cone.",
    ],
}
#: Import path of the encoder, also if this module is run.
ENCODER = "tests.examples.papers.tables.small:Recorded"


class Recorded(MiniLM):
    """The bundled encoder, which appends a line to a file when it is loaded."""

    class Spec(MiniLM.Spec):
        """Spec with the file."""

        name: str = ENCODER
        loads: str
        """File with a line per load."""

    @classmethod
    def column_prefix(cls, spec: MiniLM.Spec) -> str:
        """Returns a prefix without dots."""
        return "recorded"

    def __init__(self, spec: Recorded.Spec):
        with Path(spec.loads).open("a", encoding="utf-8") as file:
            file.write(f"{spec.layer}\n")
        super().__init__(spec)


def write_collections(folder: Path) -> None:
    """Writes the collections with graded judgments."""
    for name, texts in COLLECTIONS.items():
        (folder / name / "qrels").mkdir(parents=True)
        lines = [json.dumps({"_id": f"d{i}", "text": text}) for i, text in enumerate(texts)]
        (folder / name / "corpus.jsonl").write_text("\n".join(lines), "utf-8")
        lines = [json.dumps({"_id": f"q{i}", "text": text[:12]}) for i, text in enumerate(texts)]
        (folder / name / "queries.jsonl").write_text("\n".join(lines), "utf-8")
        rows = [f"q{i}\td{j}\t{g}" for i in range(4) for j, g in ((i, 1), ((i + 1) % 4, 3))]
        text = "\n".join(["query-id\tcorpus-id\tscore", *rows])
        (folder / name / "qrels/test.tsv").write_text(text, "utf-8")


def table(folder: Path, **changes: Any) -> TableSpec:
    """Returns the table with changed fields."""
    name = "${collection}_${layer}"
    encoder = {"class": ENCODER, "layer": "${layer}", "loads": str(folder / "loads.txt")}
    fields = {
        "title": "A small table",
        "source": "No paper",
        "steps": {
            "index": {
                "base": "jobs/specs/cranfield.yaml",
                "set": {
                    "index": f"out/{name}",
                    "source.path": "data/${collection}",
                    "encoder": encoder,
                    "sweep": [],
                },
            },
            "recompress": {
                "base": "examples/papers/specs/methods/budgets.yaml",
                "set": {
                    "index": f"out/{name}",
                    "representations": [],
                    "sweep": {"compressor.name": ["random"], "compressor.num_vectors": [2]},
                },
            },
            "evaluate": {
                "base": "jobs/specs/cranfield_evaluate.yaml",
                "set": {
                    "index": f"out/{name}",
                    "output": f"out/{name}_evaluation",
                    "benchmark.path": "data/${collection}",
                    "filter": None,
                },
            },
        },
        "columns": [{"measure": ["RR@10", "nDCG@5", "relative nDCG@5", "bytes"]}],
        "rows": [
            {
                "label": f"{collection}, layer {layer}, {representation}",
                "at": {"collection": collection, "layer": layer, "representation": representation},
                "paper": [50, 60, None if representation == "full" else 90, float("nan")],
            }
            for collection in COLLECTIONS
            for layer in ("-1", "-2")
            for representation in ("full", "random_2")
        ],
        **changes,
    }
    return config.parse(TableSpec, fields)


def small_plan(folder: Path, spec: TableSpec, output: str = "out") -> Plan:
    """Returns the plan of the table with the data and the output below a folder."""
    return plan(spec, Folders(str(folder / "data"), str(folder / output), str(ROOT)), False)


def run_table(
    folder: Path,
    output: str = "out",
    say: Callable[[str], None] = print,
    parallel: int = 1,
    **changes: Any,
) -> tuple[list[Scheduled], dict[str, Any]]:
    """Runs the table on the connected cluster and returns its steps and table.json."""
    spec = table(folder, **changes)
    planned = small_plan(folder, spec, output)
    report = Report(spec, planned, str(folder / output / "table"), False, ["food"], str(folder))
    settings = Settings(jobs.job_id, say, parallel=parallel, full_reports=False)
    steps = run(planned, str(folder / output / "steps"), settings, report.update)
    report.write(steps)
    return steps, json.loads((folder / output / "table/table.json").read_text("utf-8"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the table on a cluster of its own."""
    (folder,) = sys.argv[1:] if arguments is None else arguments
    with jobs.cluster(1 << 28):
        run_table(Path(folder), say=partial(print, flush=True))


if __name__ == "__main__":
    jobs.run(main)
