"""Pairs in JSON lines and Parquet, valid and malformed."""

from __future__ import annotations

import gzip
import json

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import SpecError
from tests.train.data.files import (
    IMAGE_TYPE,
    IMAGES,
    NAMES,
    build_data,
    epoch_batches,
    write_lines,
    write_pages,
)


def content(data) -> dict[str, tuple[str | None, bool]]:
    """Returns the text of each query's document, and whether it has an image."""
    found = {}
    for batch in data.batches(0, 0, 0, 1):
        relevant = data.relevant(batch.query_labels, batch.document_labels)
        for query, row in zip(batch.queries, relevant, strict=True):
            (column,) = row.nonzero().flatten().tolist()
            document = batch.documents[column]
            found[query] = document["text"], (document.get("image") or b"")[:2] == b"\xff\xd8"
    return found


EXPECTED = {"q0": ("t0", False), "q1": (None, True), "q2": ("t2", True)}
ROWS = [
    {"query": "q0", "text": "t0"},
    {"query": "q1", "image": NAMES[0]},
    {"query": "q2", "text": "t2", "image": NAMES[1], "more": [1]},
]


@pytest.mark.parametrize("file_format", ["jsonl", "jsonl.gz", "names", "bytes", "structs", "mixed"])
def test_formats(file_format, tmp_path):
    if file_format.startswith("jsonl"):
        path = write_lines(tmp_path / "pairs.jsonl", ROWS)
        if file_format == "jsonl.gz":
            data = path.read_bytes()
            path.unlink()
            path = tmp_path / "pairs.jsonl.gz"
            path.write_bytes(gzip.compress(data))
    else:
        names = [row.get("image") for row in ROWS]
        data = [name and (IMAGES / name).read_bytes() for name in names]
        images = {
            "names": pa.array(names, pa.string()),
            "bytes": pa.array(data, pa.binary()),
            "structs": pa.array([d and {"bytes": d, "path": None} for d in data], IMAGE_TYPE),
            # The last row is a path, as in data sets with images in separate files.
            "mixed": pa.array(
                [None, {"bytes": data[1], "path": "x"}, {"bytes": None, "path": names[2]}],
                IMAGE_TYPE,
            ),
        }[file_format]
        texts = pa.array([row.get("text") for row in ROWS])
        table = pa.table({"query": ["q0", "q1", "q2"], "text": texts, "image": images})
        path = tmp_path / "pairs.parquet"
        pq.write_table(table, path, 2)
    data = build_data(3, name="pairs", path=path, root=IMAGES)
    assert content(data) == EXPECTED


def test_renamed_columns_and_several_files(tmp_path):
    for part in range(3):
        row = {"q": f"q{part}", "passage": f"t{part}", "neg": [f"t{part} not"]}
        write_lines(tmp_path / f"part-{part}.jsonl", [row])
    columns = {"query": "q", "text": "passage", "negatives": "neg"}
    for path in (tmp_path, tmp_path / "part-*.jsonl"):
        data = build_data(3, name="pairs", path=path, columns=columns, negatives_are="texts")
        assert content(data) == {f"q{part}": (f"t{part}", False) for part in range(3)}
        (batch,) = epoch_batches(data)
        assert {d["text"] for d in batch["documents"][3:]} == {f"t{part} not" for part in range(3)}


def test_separate_documents_and_negatives_by_path(tmp_path):
    documents = [{"document_id": n, "text": f"text {n}"} for n in range(4)]
    write_lines(tmp_path / "documents.jsonl", documents)
    rows = [{"query": f"q{n}", "document_id": n, "negatives": [3]} for n in range(3)]
    path = write_lines(tmp_path / "pairs.jsonl", rows)
    data = build_data(3, name="pairs", path=path, documents=tmp_path / "documents.jsonl")
    (batch,) = epoch_batches(data)
    assert [document["text"] for document in batch["documents"][3:]] == ["text 3"]
    rows = [{"query": f"q{n}", "image": NAMES[n], "negatives": [NAMES[5]]} for n in range(3)]
    path = write_lines(tmp_path / "pairs.jsonl", rows)
    data = build_data(3, name="pairs", path=path, root=IMAGES, negatives_are="images")
    (batch,) = epoch_batches(data)
    assert batch["documents"][3]["image"] == (IMAGES / NAMES[5]).read_bytes()


def test_boxes_depend_on_queries_in_batch(tmp_path):
    boxes = [[0, 0, 0.5, 0.5]], [[0.5, 0.5, 1, 1], [0, 0, 0.01, 0.01]], [[0, 0, 0.5, 0.5]], []
    rows = [
        {"query": f"q{n}", "image": NAMES[n // 3], "boxes": row_boxes}
        for n, row_boxes in enumerate(boxes)
    ]
    data = build_data(4, name="pairs", path=write_lines(tmp_path / "p.jsonl", rows), root=IMAGES)
    (batch,) = epoch_batches(data)
    by_key = dict(zip(batch["keys"], batch["boxes"], strict=True))
    assert sorted(by_key.values()) == [[], [[0, 0, 0.5, 0.5], [0.5, 0.5, 1, 1]]]


def test_colpali_format(tmp_path, caplog):
    data = build_data(4, name="colpali_train", path=write_pages(tmp_path / "pages"))
    assert len(data.training.rows) == 12 and len(data.training.documents) == 6
    found = content(data)
    assert found == {f"What is in photo {row}?": (None, True) for row in range(12)}
    for batch in data.batches(0, 0, 0, 1):
        relevant = data.relevant(batch.query_labels, batch.document_labels)
        for query, row in zip(batch.queries, relevant, strict=True):
            (column,) = row.nonzero().flatten().tolist()
            name = NAMES[int(query.split()[-1][:-1]) // 2]
            assert batch.documents[column]["image"] == (IMAGES / name).read_bytes()
    validation = {"path": str(tmp_path / "pages/test-*.parquet")}
    data = build_data(4, name="colpali_train", path=tmp_path / "pages", validation=validation)
    assert len(data.validation().documents) == 1 and len(data.validation().queries) == 2
    table = pq.read_table(tmp_path / "pages/train-00000-of-00002.parquet")
    queries = pa.array([None, *table["query"].to_pylist()[1:]])
    file = tmp_path / "other.parquet"
    pq.write_table(table.set_column(2, "query", queries), file)
    assert len(build_data(4, name="colpali_train", path=file).training.rows) == 5
    assert caplog.messages == [f"1 rows of {file} are left out: they have no query"]


GOOD = {"query": "q", "text": "t"}
BAD_LINES = {
    '{"query": "q", "te': (
        """path must be one JSON object per line, got '{"query": "q", "te', which is truncated by"""
        " the end of the file (line 2 of {})"
    ),
    "[1]": "path must be one JSON object per line, got '[1]' (line 2 of {})",
    '{"text": "t"}': (
        "columns.query (query) must be a text with at least one word in each row, got None (line 2"
        " of {})"
    ),
    '{"query": " ", "text": "t"}': (
        "columns.query (query) must be a text with at least one word in each row, got ' '"
        " (line 2 of"
        " {})"
    ),
    '{"query": "q"}': (
        "path must be a row with a document (text, image, video, audio), got None (line 2 of {})"
    ),
    '{"query": "q", "document_id": "x"}': (
        "path must be a row with a document (text, image, video, audio) or the document_id of an"
        " earlier one or of one in `documents`, got 'x', which is unknown (line 2 of {})"
    ),
    '{"query": "q", "text": ""}': (
        "columns.text (text) must be a text with at least one word, or null, got '' (line 2 of {})"
    ),
    '{"query": "q", "image": 7}': (
        "columns.image (image) must be the path of an image, or its bytes in Parquet, got 7 (line 2"
        " of {})"
    ),
    '{"query": "q", "video": 7}': (
        "columns.video (video) must be a path or null, got 7 (line 2 of {})"
    ),
    '{"query": "q", "audio": ""}': (
        "columns.audio (audio) must be a path or null, got '' (line 2 of {})"
    ),
    '{"query": "q", "image": "a.jpg", "video": "a.mp4"}': (
        "columns.video (video) must be null when image is given, got 'a.mp4' (line 2 of {})"
    ),
    '{"query": "q", "text": "t", "document_id": []}': (
        "columns.document_id (document_id) must be a string or an integer, got [] (line 2 of {})"
    ),
    '{"query": "q", "text": "other", "document_id": "d"}': (
        "path must be unique ids, got 'd', which has two documents (line 1 of {} and line 2 of {})"
    ),
    '{"query": "q", "text": "t", "negatives": ["x"]}': (
        "columns.negatives (negatives) must be the id of a document in the rows or in `documents`,"
        " got 'x' (line 2 of {})"
    ),
    '{"query": "q", "text": "t", "negatives": "x"}': (
        "columns.negatives (negatives) must be a list of documents, none of them empty, got 'x'"
        " (line 2 of {})"
    ),
    '{"query": "q", "text": "t", "negatives": ["d", " "]}': (
        "columns.negatives (negatives) must be a list of documents, none of them empty, got"
        " ['d', ' '] (line 2 of {})"
    ),
    '{"query": "q", "text": "t", "negatives": [true]}': (
        "columns.negatives (negatives) must be a list of documents, none of them empty, got [True]"
        " (line 2 of {})"
    ),
    '{"query": "q", "text": "t", "negatives": ["d"], "scores": [1]}': (
        "columns.scores (scores) must be 2 numbers, for the document and each negative, got [1]"
        " (line 2 of {})"
    ),
    '{"query": "q", "text": "t", "boxes": [[10, 20, 50, 60]]}': (
        "columns.boxes (boxes) must be boxes [x0, y0, x1, y1] with 0 <= x0 < x1 <= 1 and"
        " 0 <= y0 < y1 <= 1, got [[10, 20, 50, 60]], which are in pixels (line 2 of {})"
    ),
    '{"query": "q", "text": "t", "boxes": [[0.5, 0.5, 1.2, 1]]}': (
        "columns.boxes (boxes) must be boxes [x0, y0, x1, y1] with 0 <= x0 < x1 <= 1 and"
        " 0 <= y0 < y1 <= 1, got [[0.5, 0.5, 1.2, 1]], which exceed the image (line 2 of {})"
    ),
    '{"query": "q", "text": "t", "boxes": [[0.5, 0.5, 0.5, 1]]}': (
        "columns.boxes (boxes) must be boxes [x0, y0, x1, y1] with 0 <= x0 < x1 <= 1 and"
        " 0 <= y0 < y1 <= 1, got [[0.5, 0.5, 0.5, 1]], which have no area (line 2 of {})"
    ),
    '{"query": "q", "text": "t", "boxes": [0.5]}': (
        "columns.boxes (boxes) must be boxes [x0, y0, x1, y1] with 0 <= x0 < x1 <= 1 and"
        " 0 <= y0 < y1 <= 1, got [0.5], which are malformed (line 2 of {})"
    ),
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_malformed_lines(line, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({**GOOD, "document_id": "d"}) + "\n" + line, "utf-8")
    with pytest.raises(SpecError) as error:
        build_data(1, name="pairs", path=path)
    assert str(error.value) == "data." + BAD_LINES[line].replace("{}", str(path))


def test_invalid_json_within_file(tmp_path):
    path = write_lines(tmp_path / "pairs.jsonl", [GOOD, '{"query": "q",', GOOD])
    with pytest.raises(
        SpecError,
        match=r"^data.path must be .*, got .* cannot be parsed"
        r" \(.*\(line 2 of ",
    ):
        build_data(1, name="pairs", path=path)


def test_file_without_trailing_newline(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(GOOD), "utf-8")
    assert len(build_data(1, name="pairs", path=path).training.rows) == 1


def test_malformed_files(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    table = tmp_path / "table.parquet"
    pq.write_table(pa.table({"question": ["q"], "text": ["t"]}), table)
    truncated = tmp_path / "truncated.parquet"
    truncated.write_bytes(table.read_bytes()[:-20])
    gz = tmp_path / "truncated.jsonl.gz"
    gz.write_bytes(gzip.compress(json.dumps(GOOD).encode() * 99)[:-20])
    some = "a file, folder or glob of .jsonl, .jsonl.gz, .parquet files"
    cases = [
        (
            {"path": empty},
            f"data.path must be files with at least one row, got '{empty}', which contain none",
        ),
        (
            {"path": tmp_path / "none.jsonl"},
            f"data.path must be an existing file or folder, got '{tmp_path}/none.jsonl', which does"
            " not exist",
        ),
        (
            {"path": tmp_path / "*.json"},
            f"data.path must be {some}, got '{tmp_path}/*.json', which matches none",
        ),
        (
            {"path": table},
            "data.columns.query must be one of question, text, got 'query', which is not a"
            " column of"
            f" {table}",
        ),
        (
            {"path": table, "columns": {"query": "question", "text": "passage"}},
            "data.columns.text must be one of question, text, got 'passage', which is not a"
            " column of"
            f" {table}",
        ),
        (
            {"path": table, "columns": {"queri": "question"}},
            "unknown field 'queri' in columns; did you mean 'query'? valid fields: query,"
            " text, image,"
            " video, audio, document_id, negatives, scores, boxes",
        ),
    ]
    for fields, message in cases:
        with pytest.raises(SpecError) as error:
            build_data(1, name="pairs", **fields)
        assert str(error.value) == message
    with pytest.raises(
        SpecError,
        match=f"^data.path must be a valid Parquet file, got '{truncated}', which cannot be read",
    ):
        build_data(1, name="pairs", path=truncated)
    with pytest.raises(
        SpecError,
        match=f"^data.path must be a readable file, got '{gz}', which cannot be read after line",
    ):
        build_data(1, name="pairs", path=gz)
    no_content = tmp_path / "nothing.parquet"
    pq.write_table(pa.table({"query": ["q"], "answer": ["t"]}), no_content)
    with pytest.raises(SpecError) as error:
        build_data(1, name="pairs", path=no_content)
    assert str(error.value) == (
        "data.columns must be one of query, answer, got 'text, image, video, audio or document_id',"
        f" which is not a column of {no_content}"
    )


def test_remote_file_system(tmp_path):
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/train/images/a.jpg", (IMAGES / NAMES[0]).read_bytes())
    row = json.dumps({"query": "q1", "image": "images/a.jpg"}).encode()
    fs.pipe_file("/train/pairs-0.jsonl", row)
    for path in ("memory://train/pairs-*.jsonl", "memory://train", "memory://train/pairs-0.jsonl"):
        assert content(build_data(1, name="pairs", path=path)) == {"q1": (None, True)}
    write_pages(tmp_path / "pages")
    fs.put(str(tmp_path / "pages"), "/pages", recursive=True)
    data = build_data(4, name="colpali_train", path="memory://pages")
    assert len(content(data)) == 12
