"""Generates training pairs from the titles of `jobs/data/cranfield`, without the judged queries.

    python -m examples.papers.data.make_text_pairs --out out/agc/cranfield
    python -m examples.papers.data.make_text_pairs --out out/agc/short --words 80 --queries 50

The title of an abstract is a query whose document is the rest of the abstract. The judged queries
are written separately, for validation. `--words` and `--queries` reduce the computation.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import jobs
from examples.papers.data.make_known_items import CRANFIELD, titles
from pipeline.config import absolute


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes documents.jsonl, train.jsonl and judged.jsonl."""
    parser = jobs.parser(__doc__)
    parser.add_argument("--out", default="out/agc/cranfield", help="output folder")
    parser.add_argument("--words", type=jobs.positive, help="words per document (default: all)")
    parser.add_argument("--queries", type=jobs.positive, help="judged queries (default: all)")
    args = parser.parse_args(arguments)
    folder = Path(absolute(args.out))
    documents, pairs = [], []
    for document_id, title, text in titles():
        documents.append({"document_id": document_id, "text": first_words(text, args.words)})
        pairs.append({"query": title, "document_id": document_id})
    print(write_pairs(folder, documents, pairs, CRANFIELD, args.queries))


def first_words(text: str, count: int | None) -> str:
    """Returns the first `count` words of a text, or the text if `count` is None."""
    return text if count is None else " ".join(text.split()[:count])


def write_pairs(
    folder: Path,
    documents: Sequence[Mapping[str, str]],
    pairs: Sequence[Mapping[str, str]],
    collection: Path,
    num_queries: int | None = None,
) -> str:
    """Writes documents.jsonl, train.jsonl and judged.jsonl, and returns a summary.

    The queries of judged.jsonl, at most `num_queries`, are those of the BEIR folder `collection`.
    """
    queries = {}
    for line in (collection / "queries.jsonl").read_text("utf-8").splitlines()[:num_queries]:
        query = json.loads(line)
        queries[query["_id"]] = query["text"]
    stored = {document["document_id"] for document in documents}
    with (collection / "qrels/test.tsv").open(encoding="utf-8") as file:
        judged = [
            {"query": queries[row["query-id"]], "document_id": row["corpus-id"]}
            for row in csv.DictReader(file, delimiter="\t")
            if int(row["score"]) > 0 and row["corpus-id"] in stored and row["query-id"] in queries
        ]
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("documents", documents), ("train", pairs), ("judged", judged)):
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(content, encoding="utf-8")
    return f"{len(pairs)} pairs and {len(judged)} judgments of {len(queries)} queries: {folder}"


if __name__ == "__main__":
    jobs.run(main)
