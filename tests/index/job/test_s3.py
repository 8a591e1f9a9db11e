"""Tests of corpora and indexes at s3:// URIs, against a moto server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import boto3
import pytest
import s3fs
import yaml

from pipeline import Index
from pipeline.config import SpecError
from pipeline.index import EXECUTOR, find_index
from pipeline.index.fragments import write_table
from pipeline.index.reader import IndexReader
from pipeline.index.status import status
from pipeline.index.writer import IndexWriter
from pipeline.registry import SOURCES, TRAINING_DATA
from pipeline.schema import ITEM
from pipeline.search.searcher import open_index
from tests.conftest import run_jobs
from tests.s3 import create_bucket, environment, moto_server

CORPUS = {
    "wing": "The lift of a wing in a propeller slipstream.",
    "shell": "Thin cylindrical shells buckle under axial compression.",
    "bread": "Bake the bread until its crust is golden.",
}


@pytest.fixture
def s3(monkeypatch) -> Iterator[dict[str, str]]:
    """Starts a server with an empty bucket `bucket` and yields its environment variables."""
    with moto_server() as url:
        variables = environment(url)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        create_bucket(url, "bucket")
        yield variables
        s3fs.S3FileSystem.clear_instance_cache()


def put(key: str, text: str) -> None:
    """Writes an object into the bucket."""
    boto3.client("s3").put_object(Bucket="bucket", Key=key, Body=text.encode())


def test_folder_of_files(s3):
    put("papers/notes.txt", "The lighthouse keeper sleeps.")
    put("papers/sub/data.csv", "name,use\nanvil,forging\n")
    put("papers/program", "\0\1")
    index = Index("s3://bucket/papers.maxray")
    account = index.add_files("s3://bucket/papers/")
    assert [(file.path, file.status) for file in account.files] == [
        ("papers/notes.txt", "indexed"),
        ("papers/program", "rejected"),
        ("papers/sub/data.csv", "indexed"),
    ]
    assert index.search("anvil", k=1)[0].item_id == "papers/sub/data.csv#row=1"
    account = index.add_files("s3://bucket/papers/**/*.csv", "s3://bucket/papers/notes.txt")
    assert [file.status for file in account.files] == ["unchanged", "unchanged"]
    assert find_index("s3://bucket/papers/") == "s3://bucket/papers.maxray"
    assert find_index("s3://bucket/papers.maxray") == "s3://bucket/papers.maxray"
    assert find_index("s3://bucket/others") == "s3://bucket/others"


@pytest.mark.heavy
def test_index_status_search_and_recompress(s3, tmp_path):
    uri = "s3://bucket/deep/index"
    put("corpus.jsonl", "\n".join(json.dumps({"_id": i, "text": t}) for i, t in CORPUS.items()))
    spec = {
        "index": uri,
        "source": {"name": "text", "path": "s3://bucket/corpus.jsonl"},
        "representations": [{"compressor": "none"}],
        "fragment_items": 2,
        "unit_items": 2,
    }
    put("specs/index.yaml", yaml.safe_dump(spec))
    hpool = {"compressor": {"name": "hpool", "num_vectors": 4}}
    more = {"index": uri, "representations": [hpool]}
    (tmp_path / "more.yaml").write_text(yaml.safe_dump(more))
    done = run_jobs(
        ["index", "s3://bucket/specs/index.yaml"],
        ["index", "s3://bucket/specs/index.yaml"],
        ["add", "representations", str(tmp_path / "more.yaml")],
        ["status", uri],
        ["search", uri, "how do shells buckle", "--representation", "hpool_4", "--k", "1"],
        **{**s3, EXECUTOR: "ray"},
    )
    assert done.returncode == 0, done.stderr
    assert "listed 3 = indexed 3 (3 new, 0 replaced, 0 unchanged) + rejected 0" in done.stdout
    assert "listed 3 = indexed 3 (0 new, 0 replaced, 3 unchanged) + rejected 0" in done.stdout
    assert "2 of 2 fragments to fill with 1 representations" in done.stdout
    assert f"index        {uri}\n" in done.stdout
    assert "  1  " in done.stdout and "[buckle]" in done.stdout

    summary = status(uri)
    assert (summary["items"], summary["lease"]) == (3, None)
    assert summary["representations"]["hpool_4"]["filled"] == 1.0
    assert [job["kind"] for job in summary["jobs"]] == ["recompress", "index", "index"]
    assert open_index(uri).search("bake bread", k=1)[0].item_id == "bread"


def test_lines_of_a_remote_file(s3):
    put(
        "corpus.jsonl", "".join(json.dumps({"_id": i, "text": t}) + "\n" for i, t in CORPUS.items())
    )
    source = SOURCES.build(
        SOURCES.resolve({"name": "text", "path": "s3://bucket/corpus.jsonl"}), ()
    )
    assert [item.item_id for shard in source.shards() for item in source.scan(shard)] == [*CORPUS]
    data = {"name": "pairs", "path": "s3://bucket/pairs.jsonl"}
    pairs = [{"query": text, "document_id": i, "text": text} for i, text in CORPUS.items()]
    put("pairs.jsonl", "".join(json.dumps(pair) + "\n" for pair in pairs))
    assert TRAINING_DATA.build(TRAINING_DATA.resolve(data), batch_size=3, seed=0).num_batches == 1


def test_listings_are_not_cached(s3):
    uri = "s3://bucket/index"
    for number in range(2):
        writer = IndexWriter(uri, "job")  # lists the data files
        row = {"item_id": f"a{number}", "parent_id": "a", "source": "s", "modality": "text"}
        rows = ITEM.empty_table().from_pylist([{**row, "revision": "1"}], schema=ITEM)
        writer.commit(write_table(rows, f"{uri}/items.lance"))
        writer.release()
    assert IndexWriter(uri, "last").dataset.count_rows() == 2


def test_missing_bucket_is_not_created(s3):
    with pytest.raises(
        SpecError,
        match=r"^index must be a writable URI, got 's3://typo/index', which cannot be written",
    ):
        IndexWriter("s3://typo/index", "job")
    assert [b["Name"] for b in boto3.client("s3").list_buckets()["Buckets"]] == ["bucket"]
    with pytest.raises(
        SpecError, match="^index must be .*, got 's3://typo/index', which contains no index"
    ):
        IndexReader("s3://typo/index")
    put("letters/from_home.txt", "Dear Ada")
    with pytest.raises(
        SpecError,
        match="^index must be an index, .* got 's3://bucket/letters', which has other contents",
    ):
        IndexWriter("s3://bucket/letters", "job")
