r"""Builds long narrative queries from the short queries of a collection in the BEIR format.

    python -m jobs.data.make_narratives jobs/data/cranfield --out out/narratives
    python -m jobs.data.make_narratives jobs/data/pages --out out/pages_narratives \
        --documents jobs/data/cranfield/corpus.jsonl

Each query is put at a random position among six sentences that do not help to answer it:

- `filler`: phrases of requests that say nothing about the topic, such as "I would be grateful for
  any pointers."
- `distracting`: sentences of random documents that are not relevant to the query.

Each kind is a folder with the queries and the judgments of the collection, for `benchmark` of
jobs.evaluate.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import jobs
from pipeline.config import SpecError, absolute, check_exists

#: Number of sentences that are added to each query.
NUM_SENTENCES = 6
#: Minimum and maximum number of words of a sentence of a document.
SENTENCE_WORDS = (8, 30)
FILLER = (
    "I am preparing an internal report and need some background material before the meeting.",
    "My colleagues asked me about this last week and I could not give them a good answer.",
    "I have already looked at a few general introductions, but they were not of much help.",
    "It does not matter to me whether the material is old or recent, as long as it is reliable.",
    "Please do not send anything that mentions the subject only in passing.",
    "What I would like to understand in the end is which of the usual explanations is correct.",
    "A relevant document should discuss the question itself and not only give a definition.",
    "I would be grateful for any pointers, even if they cover just a part of the question.",
    "Some of the people on my team believe that the answer is well known, but I doubt it.",
    "In the past I have used similar documents for a talk and they were very well received.",
    "If there are several documents with the same content, the most complete one is enough.",
    "To be honest, I am not sure whether anyone has ever looked at it in this way before.",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes both kinds of queries."""
    parser = jobs.parser(__doc__)
    parser.add_argument("collection", help="folder with queries.jsonl and qrels")
    parser.add_argument(
        "--documents", help="file of the documents (default: corpus.jsonl of the collection)"
    )
    parser.add_argument("--split", default="test", help="judgments of the queries (default: test)")
    parser.add_argument("--out", default="out/narratives", help="output folder")
    args = parser.parse_args(arguments)
    check_exists(args.collection, "collection")
    folder, out = Path(args.collection), Path(absolute(args.out))
    queries, relevant = read_queries(folder, args.split)
    sentences = read_sentences(args.documents or f"{args.collection}/corpus.jsonl")
    rng = np.random.default_rng(0)
    for kind in ("filler", "distracting"):
        texts = {}
        for query_id, text in queries.items():
            if kind == "filler":
                pool: Sequence[str] = FILLER
            else:
                others = [i for i in sentences if i not in relevant.get(query_id, set())]
                chosen = rng.choice(len(others), NUM_SENTENCES, replace=False)
                pool = [str(rng.choice(sentences[others[i]])) for i in chosen]
            texts[query_id] = narrative(text, pool, rng)
        write(out / kind, texts, folder / "qrels" / f"{args.split}.tsv")
        print(f"{len(texts)} queries: {out / kind}")


def narrative(query: str, pool: Sequence[str], rng: np.random.Generator) -> str:
    """Returns a query among random sentences of a pool."""
    sentences = [pool[i] for i in rng.choice(len(pool), NUM_SENTENCES, replace=False)]
    sentences.insert(int(rng.integers(NUM_SENTENCES + 1)), query)
    return " ".join(sentences)


def read_queries(folder: Path, split: str) -> tuple[dict[str, str], dict[str, set[str]]]:
    """Reads the judged queries, and the ids of the relevant documents of each."""
    path = folder / "qrels" / f"{split}.tsv"
    check_exists(str(path), "split")
    relevant: dict[str, set[str]] = {}
    for line in path.read_text("utf-8").splitlines()[1:]:
        query_id, document_id, grade = line.split("\t")
        if float(grade) > 0:
            relevant.setdefault(query_id, set()).add(document_id)
    lines = (folder / "queries.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {row["_id"]: row["text"] for row in rows if row["_id"] in relevant}, relevant


def read_sentences(path: str) -> dict[str, list[str]]:
    """Reads the sentences of each document that have a suitable length."""
    check_exists(path, "documents")
    sentences = {}
    for line in Path(path).read_text("utf-8").splitlines():
        document = json.loads(line)
        parts = re.split(r"(?<=[.!?])\s+", document["text"])
        found = [p for p in parts if SENTENCE_WORDS[0] <= len(p.split()) <= SENTENCE_WORDS[1]]
        if found:
            sentences[document["_id"]] = found
    if len(sentences) <= NUM_SENTENCES:
        rule = f"a file with more than {NUM_SENTENCES} documents that have sentences"
        raise SpecError("documents", path, rule)
    return sentences


def write(folder: Path, queries: dict[str, str], judgments: Path) -> None:
    """Writes the queries and copies their judgments."""
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"_id": query_id, "text": text}) for query_id, text in queries.items()]
    (folder / "queries.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    shutil.copyfile(judgments, folder / "qrels" / "test.tsv")


if __name__ == "__main__":
    jobs.run(main)
