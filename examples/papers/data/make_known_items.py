"""Builds two known-item collections: abstracts by their titles, functions by their summaries.

    python -m examples.papers.data.make_known_items --out out/known_items

`titles` contains the abstracts of `jobs/data/cranfield` without their titles, which are the
queries. `functions` contains the documentation of functions of SciPy and NumPy, without its first
paragraph, which is the query. It depends on the installed versions. Each query has one relevant
document. Both folders have the format of BEIR.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jobs
from pipeline.config import absolute

CRANFIELD = Path(__file__).parents[3] / "jobs/data/cranfield"
MODULES = (
    *(f"scipy.{name}" for name in ("signal", "stats", "optimize", "linalg", "ndimage", "special")),
    *(f"scipy.{name}" for name in ("spatial", "integrate", "interpolate", "sparse")),
    *("numpy", "numpy.linalg", "numpy.fft"),
)
#: Minimum and maximum number of words in a first paragraph and in the rest of a documentation.
SUMMARY_WORDS, BODY_WORDS = (8, 30), (80, 350)


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes both collections."""
    parser = jobs.parser(__doc__)
    parser.add_argument("--out", default="out/known_items", help="output folder")
    folder = Path(absolute(parser.parse_args(arguments).out))
    for name, items in (("titles", titles()), ("functions", functions())):
        count = write(folder / name, items)
        print(f"{count} queries and documents: {folder / name}")


def titles() -> Iterator[tuple[str, str, str]]:
    """Yields id, title and remaining text of the abstracts."""
    for line in (CRANFIELD / "corpus.jsonl").read_text("utf-8").splitlines():
        abstract = json.loads(line)
        text = abstract["text"].removeprefix(abstract["title"]).strip()
        if text:
            yield abstract["_id"], abstract["title"], text


def functions() -> Iterator[tuple[str, str, str]]:
    """Yields name, summary and remaining documentation of functions and classes."""
    seen = set()
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in sorted(vars(module)):
            documentation = inspect.getdoc(getattr(module, name)) or ""
            first, _, body = documentation.partition("\n\n")
            # The documentation of compiled functions begins with the signature.
            summary = re.sub(r"^[\w.]+\(.*?\)\s*", "", first, flags=re.DOTALL)
            summary = " ".join(summary.split())
            is_suitable = (
                not name.startswith("_")
                and SUMMARY_WORDS[0] <= len(summary.split()) <= SUMMARY_WORDS[1]
                and BODY_WORDS[0] <= len(body.split()) <= BODY_WORDS[1]
            )
            if is_suitable and summary not in seen:  # modules share functions
                seen.add(summary)
                yield f"{module_name}.{name}", summary, body


def write(folder: Path, items: Iterator[tuple[str, str, str]]) -> int:
    """Writes (id, query, text) of documents in the format of BEIR and returns their number."""
    corpus, queries, judgments = [], [], ["query-id\tcorpus-id\tscore"]
    for item_id, query, text in items:
        corpus.append(json.dumps({"_id": item_id, "title": "", "text": text}))
        queries.append(json.dumps({"_id": item_id, "text": query}))
        judgments.append(f"{item_id}\t{item_id}\t1")
    files = {"corpus.jsonl": corpus, "queries.jsonl": queries, "qrels/test.tsv": judgments}
    write_lines(folder, files)
    return len(corpus)


def write_lines(folder: Path, files: Mapping[str, Sequence[str]]) -> None:
    """Writes the lines of each file of a folder."""
    for name, lines in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    jobs.run(main)
