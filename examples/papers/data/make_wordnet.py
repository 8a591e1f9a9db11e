"""Builds two collections from WordNet: the definitions of its synsets, and topics.

    apt-get install wordnet-base
    python -m examples.papers.data.make_wordnet --out out/wordnet

`glosses` contains the words and the definition of each of the 117,659 synsets. The queries are
example sentences of synsets, and the relevant document is the synset that a sentence illustrates.
`topics` contains one document per noun with at least four kinds of it: its definition and those of
its kinds. Both folders have the format of BEIR. `log.jsonl` contains further example sentences,
which serve as past queries.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jobs
from examples.papers.data.make_known_items import write_lines
from pipeline.config import SpecError, absolute

PARTS_OF_SPEECH = ("noun", "verb", "adj", "adv")
#: Numbers of example sentences that serve as judged queries and as past queries.
NUM_QUERIES, NUM_LOG = 2_000, 8_000
#: Minimum number of words of an example sentence that serves as a query.
QUERY_WORDS = 5
#: Minimum number of kinds of a noun that is a topic, and their maximum number in a document.
TOPIC_KINDS = (4, 12)


class Synset(NamedTuple):
    """Synset of WordNet.

    Attributes:
        id: Part of speech and offset in its file.
        text: Words and definition.
        examples: Example sentences.
        kinds: Ids of the hyponyms.
    """

    id: str
    text: str
    examples: list[str]
    kinds: list[str]


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes both collections."""
    parser = jobs.parser(__doc__)
    parser.add_argument("--wordnet", default="/usr/share/wordnet", help="folder of WordNet's files")
    parser.add_argument("--out", default="out/wordnet", help="output folder")
    args = parser.parse_args(arguments)
    synsets = {synset.id: synset for synset in read(Path(args.wordnet))}
    folder = Path(absolute(args.out))
    examples = [
        (synset.id, example)
        for synset in synsets.values()
        for example in synset.examples
        if len(example.split()) >= QUERY_WORDS
    ]
    random.Random(0).shuffle(examples)
    judged, log = examples[:NUM_QUERIES], examples[NUM_QUERIES : NUM_QUERIES + NUM_LOG]
    glosses = [(synset.id, synset.text) for synset in synsets.values()]
    for name, documents in (("glosses", glosses), ("topics", list(topics(synsets)))):
        write(folder / name, documents, judged, log)
        print(f"{len(documents)} documents: {folder / name}")


def read(folder: Path) -> Iterator[Synset]:
    """Yields the synsets of WordNet's data files (format described in `man wndb`)."""
    for part in PARTS_OF_SPEECH:
        path = folder / f"data.{part}"
        if not path.exists():
            rule = "a folder with WordNet's data files (Debian package wordnet-base)"
            raise SpecError("wordnet", str(folder), rule, f"has no {path.name}")
        for line in path.read_text("utf-8").splitlines():
            if line.startswith("  "):  # licence
                continue
            data, _, gloss = line.partition("|")
            offset, _, _, num_words, *fields = data.split()
            words = [word.replace("_", " ") for word in fields[: 2 * int(num_words, 16) : 2]]
            pointers = fields[2 * int(num_words, 16) + 1 :]
            kinds = [
                f"{part}-{target}"
                for symbol, target in zip(pointers[::4], pointers[1::4], strict=False)
                if symbol == "~"
            ]
            examples = re.findall(r'"([^"]+)"', gloss)
            definition = re.sub(r';?\s*"[^"]*"', "", gloss).strip()
            yield Synset(f"{part}-{offset}", f"{', '.join(words)}: {definition}", examples, kinds)


def topics(synsets: dict[str, Synset]) -> Iterator[tuple[str, str]]:
    """Yields the id and the text of each topic."""
    fewest, most = TOPIC_KINDS
    for synset in synsets.values():
        if len(synset.kinds) >= fewest:
            members = [synset, *(synsets[kind] for kind in synset.kinds[:most])]
            yield synset.id, ". ".join(member.text for member in members)


def write(
    folder: Path,
    documents: list[tuple[str, str]],
    judged: list[tuple[str, str]],
    log: list[tuple[str, str]],
) -> None:
    """Writes a collection in the format of BEIR, with a log of queries.

    Judged queries without a document of the collection are omitted; past queries are all written.
    """
    ids = {document for document, _ in documents}
    judged = [(document, text) for document, text in judged if document in ids]
    lines = {
        "corpus.jsonl": [
            json.dumps({"_id": document, "title": "", "text": text}) for document, text in documents
        ],
        "queries.jsonl": [
            json.dumps({"_id": f"q{number}", "text": text})
            for number, (_, text) in enumerate(judged)
        ],
        "log.jsonl": [
            json.dumps({"_id": f"l{number}", "text": text}) for number, (_, text) in enumerate(log)
        ],
        "qrels/test.tsv": [
            "query-id\tcorpus-id\tscore",
            *(f"q{number}\t{document}\t1" for number, (document, _) in enumerate(judged)),
        ],
    }
    write_lines(folder, lines)


if __name__ == "__main__":
    jobs.run(main)
