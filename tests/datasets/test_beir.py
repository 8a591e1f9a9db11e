"""Benchmarks in BEIR format: the shipped ones and malformed folders."""

import json
from pathlib import Path

import pytest

from pipeline.config import SpecError
from pipeline.registry import BENCHMARKS

CRANFIELD = Path(__file__).parents[2] / "jobs/data/cranfield"
PAGES = CRANFIELD.parent / "pages"


def load(path, **fields):
    return BENCHMARKS.build(
        BENCHMARKS.resolve({"name": "beir", "path": str(path), **fields})
    ).load()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "queries.jsonl").write_text(
        '{"_id": "1", "text": "wing"}\n\n{"_id": "2", "text": "heat", "metadata": {}}\n'
        '{"_id": "3", "text": "never judged"}\n'
    )
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "test.tsv").write_text(
        "query-id\tcorpus-id\tscore\n1\ta\t2\n1\tb\t0\n2\ta\t0\n9\ta\t1\n"
    )
    return tmp_path


def test_cranfield():
    judged = load(CRANFIELD)
    assert len(judged.queries) == 113
    assert judged.num_unjudged == judged.num_without_text == 0
    assert sum(map(len, judged.qrels.values())) == 971
    assert sum(grade == 0 for grades in judged.qrels.values() for grade in grades.values()) == 113
    assert judged.qrels["1"]["184"] == 1


def test_keeps_grade_0_and_drops_unjudged_queries(folder):
    judged = load(folder)
    assert judged.queries == {"1": "wing", "2": "heat"}
    assert judged.qrels == {"1": {"a": 2, "b": 0}, "2": {"a": 0}}
    assert (judged.num_unjudged, judged.num_without_text) == (1, 1)


def test_windows_line_endings_and_byte_order_marks(folder):
    for file in (folder / "queries.jsonl", folder / "qrels" / "test.tsv"):
        text = file.read_text().replace("\n", "\r\n")
        file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert load(folder).qrels == {"1": {"a": 2, "b": 0}, "2": {"a": 0}}


def test_ids_are_stripped_in_queries_and_judgments(folder):
    (folder / "queries.jsonl").write_text(
        '{"_id": " 1", "text": "wing"}\n{"_id": 2, "text": "a"}\n'
    )
    (folder / "qrels/test.tsv").write_text("1 \t a\t 2 \n\u00a01\tb \t1\n2\ta b\t1\n")
    judged = load(folder)
    assert judged.queries == {"1": "wing", "2": "a"}
    assert judged.qrels == {"1": {"a": 2, "b": 1}, "2": {"a b": 1}}


def test_missing_files(folder):
    with pytest.raises(SpecError, match=r"benchmark\.split must be .*dev\.tsv'.*does not exist"):
        load(folder, split="dev")
    with pytest.raises(
        SpecError,
        match=r"benchmark\.path must be .*queries\.jsonl'.*does not"
        r" exist",
    ):
        load(folder / "nothing")


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("qrels/test.tsv", "1\ta\t1\n1\tb\n", r"\(line 2 of "),
        ("qrels/test.tsv", "1\ta\tgood\n", r"\(line 1 of "),
        ("qrels/test.tsv", f"1\ta\t{2**31}\n", r"\(line 1 of "),
        ("qrels/test.tsv", "1\ta\t1\n \ta\t1\n", r"\(line 2 of "),
        ("qrels/test.tsv", "1\t\t1\n", r"\(line 1 of "),
        ("qrels/test.tsv", "8\ta\t1\n", "a benchmark with a judged query"),
        ("queries.jsonl", '{"_id": "1"}\n', r"\(line 1 of "),
        ("queries.jsonl", '{"_id": "1", "text": "a"\n', r"\(line 1 of "),
        ("queries.jsonl", '{"_id": "1", "text": " "}\n', r"\(line 1 of "),
        ("queries.jsonl", '{"_id": "1", "text": "a"}\n' * 2, "which occurs twice"),
        ("queries.jsonl", "", "is empty"),
    ],
)
def test_malformed_files(folder, file, text, problem):
    (folder / file).write_text(text)
    with pytest.raises(SpecError, match=problem):
        load(folder)


def test_documents_with_the_id_of_the_query_are_removed(folder):
    judged = load(folder)
    scores = {"1": 4.0, "2": 3.0, "a": 2.0, "b": 1.0}
    assert list(judged.remove_queries("1", scores)) == ["2", "a", "b"]
    assert list(judged.remove_queries("2", scores, k=2)) == ["1", "a"]
    assert list(judged.remove_queries("never seen", scores, k=3)) == ["1", "2", "a"]
    (folder / "qrels/test.tsv").write_text("1\t1\t1\n2\t2\t0\n")
    judged = load(folder)  # a document that is judged relevant is not the query itself
    assert list(judged.remove_queries("1", scores)) == list(scores)
    assert list(judged.remove_queries("2", scores)) == ["1", "a", "b"]
    judged = load(folder, ignore_identical_ids=False)
    assert list(judged.remove_queries("2", scores)) == list(scores)


def test_query_categories(tmp_path):
    """Fields with few short values are categories; fields of texts or ids are not."""
    (tmp_path / "qrels").mkdir()
    rows = [
        {"kind": "plain", "metadata": {"types": ["table", "chart"], "page": 3}, "note": "a" * 70},
        {"kind": "plain", "metadata": {"types": ["chart"], "page": 4}, "note": "short"},
        {"kind": "paraphrase", "metadata": {"types": []}},
        {"kind": None, "metadata": None},
        {"kind": "unjudged"},
    ]
    lines = [json.dumps({"_id": n, "text": "words", **row}) for n, row in enumerate(rows)]
    (tmp_path / "queries.jsonl").write_text("\n".join(lines))
    qrels = "".join(f"{n}\td\t1\n" for n in range(4))
    (tmp_path / "qrels" / "test.tsv").write_text(qrels)
    assert load(tmp_path).categories == {}  # three categories of four queries are too many
    rows[3]["kind"] = "plain"
    lines = [json.dumps({"_id": n, "text": "words", **row}) for n, row in enumerate(rows)]
    (tmp_path / "queries.jsonl").write_text("\n".join(lines))
    categories = {"paraphrase": ["2"], "plain": ["0", "1", "3"]}
    assert load(tmp_path).categories == {"kind": categories}


def test_categories_of_pages():
    categories = load(PAGES).categories["kind"]
    assert {name: len(ids) for name, ids in categories.items()} == {"paraphrase": 28, "plain": 26}
