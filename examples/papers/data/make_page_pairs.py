"""Generates training pairs from the pages of `jobs/data/pages`, without the judged queries.

    python -m examples.papers.data.make_page_pairs --out out/agc/pages
    python -m examples.papers.data.make_page_pairs --out out/agc/pages_short --words 120

Every fourth sentence of a page is a query, and the document is the rest of the page. The judged
queries and the complete pages are written separately, for validation. Pages without such sentences
are not trained. `--words` reduces the computation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import jobs
from examples.papers.data.make_text_pairs import first_words, write_pairs
from pipeline.config import absolute
from pipeline.data.decode import Unreadable
from pipeline.data.decode.pdf import describe, read_pages

PAGES = Path(__file__).parents[3] / "jobs/data/pages"
#: Minimum and maximum number of words of a sentence that is a query.
QUERY_WORDS = (8, 40)
#: Distance between the sentences of a page that are queries.
STEP = 4


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes documents.jsonl, train.jsonl and judged.jsonl."""
    parser = jobs.parser(__doc__)
    parser.add_argument("--out", default="out/agc/pages", help="output folder")
    parser.add_argument("--words", type=jobs.positive, help="words per document (default: all)")
    args = parser.parse_args(arguments)
    documents, pairs = [], []
    for page_id, text in texts():
        documents.append({"document_id": page_id, "text": first_words(text, args.words)})
        found, rest = split(text)
        if rest:
            text = first_words(rest, args.words)
            documents.append({"document_id": f"{page_id}/rest", "text": text})
            pairs += [{"query": query, "document_id": f"{page_id}/rest"} for query in found]
    print(write_pairs(Path(absolute(args.out)), documents, pairs, PAGES))


def texts() -> Iterator[tuple[str, str]]:
    """Yields the id and the text layer of each page that has one."""
    settings = {"text": True, "image": False}
    for path in sorted((PAGES / "pdf").glob("*.pdf")):
        numbers = list(range(1, describe(str(path))["num_pages"] + 1))
        for number, page in zip(numbers, read_pages(str(path), numbers, settings), strict=True):
            if not isinstance(page, Unreadable) and page["text"].strip():
                yield f"{path.name}#page={number}", " ".join(page["text"].split())


def split(text: str) -> tuple[list[str], str]:
    """Splits a text into the sentences that are queries and the remaining text.

    >>> split("Short. The flow of air around a thin wing at high speed. The end.")
    (['The flow of air around a thin wing at high speed.'], 'Short. The end.')
    """
    sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z])", text)
    low, high = QUERY_WORDS
    suitable = [
        i
        for i, sentence in enumerate(sentences)
        if low <= len(sentence.split()) <= high and text.count(sentence) == 1
    ]
    chosen = set(suitable[::STEP])
    rest = " ".join(s for i, s in enumerate(sentences) if i not in chosen)
    return [sentences[i] for i in sorted(chosen)], rest


if __name__ == "__main__":
    jobs.run(main)
