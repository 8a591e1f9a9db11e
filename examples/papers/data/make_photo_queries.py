"""Generates the queries and judgments of `jobs/data/photos` from its captions.

    python examples/papers/data/make_photo_queries.py

Caption number 4 (from 0) of each photograph becomes a query whose only relevant item is that
photograph. The index for it is built with `leave_out_caption: 4`, so that it does not contain the
caption.
"""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "jobs/data/photos"
LEFT_OUT = 4


def main() -> None:
    """Writes queries.jsonl and qrels/test.tsv."""
    data = json.loads((FOLDER / "captions.json").read_text(encoding="utf-8"))
    queries, judgments = [], ["query-id\tcorpus-id\tscore"]
    for image in data["images"]:
        captions = [note for note in data["annotations"] if note["image_id"] == image["id"]]
        query = {
            "_id": str(captions[LEFT_OUT]["id"]),
            "text": captions[LEFT_OUT]["caption"].strip(),
        }
        queries.append(json.dumps(query, ensure_ascii=False))
        judgments.append(f"{query['_id']}\t{image['id']}\t1")
    (FOLDER / "queries.jsonl").write_text("\n".join(queries) + "\n", encoding="utf-8")
    (FOLDER / "qrels").mkdir(exist_ok=True)
    (FOLDER / "qrels/test.tsv").write_text("\n".join(judgments) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
