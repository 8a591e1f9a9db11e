"""Tests of local paths with any characters and of URIs."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import fsspec
import pytest

from pipeline import config
from pipeline.config import Spec, SpecError, absolute
from pipeline.data.files import existing_root, walk
from pipeline.eval.topics import read_qrels, read_queries
from pipeline.index.reader import check_location, open_folder, part_uri
from pipeline.paths import locate, open_file
from pipeline.runtime.atomic import open_atomic, write_atomic
from pipeline.train.data.tables import list_files

NAMES = ["keep::v2", "a::b::c", "a%20b", "a#b?c", "[ab]", "a*", "file:x", "s3:", "zip::x", "a b "]


@pytest.fixture(params=NAMES)
def folder(request, tmp_path, monkeypatch) -> Path:
    """Relative folder with an unusual name, in the working directory."""
    for name in ("keep", "a", "b", "x"):  # read or overwritten if `::` or `[` had a meaning
        (tmp_path / name).write_text("precious", "utf-8")
    (tmp_path / request.param).mkdir()
    monkeypatch.chdir(tmp_path)
    yield Path(request.param)
    for name in ("keep", "a", "b", "x"):
        assert (tmp_path / name).read_text("utf-8") == "precious"
    assert len(list(tmp_path.iterdir())) == 5


def test_any_local_path_is_written_and_read(folder: Path):
    write_atomic(f"{folder}/run.trec", "run")
    with open_atomic(f"{folder}/new/text") as file:
        file.write("text")
    with open_file(f"{folder}/{folder}/data", "wb") as file:
        file.write(b"data")
    files = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    expected = {"run.trec": b"run", "new/text": b"text", f"{folder}/data": b"data"}
    assert files == {f"{folder}/{name}": data for name, data in expected.items()}
    fs, root = existing_root(str(folder))
    assert sorted(name for name, _ in walk(fs, root)) == sorted(expected)


def test_any_local_path_of_an_input(folder: Path):
    (folder / "spec.yaml").write_text("path: x", "utf-8")
    assert config.read(f"{folder}/spec.yaml", "spec") == {"path": "x"}
    (folder / "queries.tsv").write_text("1\tglider\n", "utf-8")
    assert read_queries(f"{folder}/queries.tsv") == {"1": "glider"}
    (folder / "qrels.txt").write_text("1 0 d 1\n", "utf-8")
    assert read_qrels(f"{folder}/qrels.txt", "qrels") == {"1": {"d": 1}}
    (folder / "pairs.jsonl").write_text("{}\n", "utf-8")
    (folder / "pairs [2].jsonl").write_text("{}\n", "utf-8")
    for path, number in [("", 2), ("/pairs [2].jsonl", 1), ("/*.jsonl", 2), ("/pairs?[[]*", 1)]:
        assert len(list_files(f"{folder}{path}", (".jsonl",))) == number


def test_any_local_path_of_an_index(folder: Path):
    check_location(f"{folder}/index")
    path = str(folder.absolute() / "index" / "jobs")
    assert part_uri(f"{folder}/index", "jobs") == open_folder(f"{folder}/index", "jobs")[1] == path
    uri = f"file://{folder.absolute()}/index"
    assert part_uri(uri, "jobs") == open_folder(uri, "jobs")[1] == path


def test_home(tmp_path, monkeypatch):
    class Paths(Spec):
        path: config.Uri

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.yaml").write_text("path: ~/a::b", "utf-8")
    assert config.load(Paths, "~/spec.yaml").path == str(tmp_path / "a::b")
    write_atomic("~/out/run", "run")
    assert read_queries_error("~/out/none") and (tmp_path / "out/run").exists()
    with pytest.raises(SpecError, match="names an unknown user"):
        absolute("~no-such-user/x")
    (tmp_path / "~no-such-user").mkdir()
    assert absolute("~no-such-user") == str(tmp_path / "~no-such-user")
    assert absolute("./~draft") == os.path.join(tmp_path, "~draft")


def read(uri: str) -> str:
    with open_file(uri, "r") as file:
        return file.read()


def read_queries_error(path: str) -> str:
    with pytest.raises(SpecError, match="does not exist") as raised:
        read_queries(path)
    return str(raised.value)


def test_uris(tmp_path):
    memory = fsspec.filesystem("memory")
    names = ("keep", "keep::v2/run", "[a]/b*", "a%20b#c")
    for name in names:
        write_atomic(f"memory://uris/{name}", name)
        write_atomic(f"memory://uris/{name}", name)
    for name in names:
        assert read(f"memory://uris/{name}") == name
        memory.rm_file(f"memory://uris/{name}")
    with pytest.raises(ValueError, match="unknown|not known"):
        locate("nothing://a")


@pytest.mark.parametrize("name", ["images.zip", "x::y/images.zip"])
def test_chains(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        archive.writestr("a/b.txt", "member")
    assert read(f"zip://a/b.txt::{tmp_path}/{name}") == "member"
    fs, root = existing_root(f"zip://a::{tmp_path}/{name}")
    assert [file for file, _ in walk(fs, root)] == ["b.txt"]
    fsspec.filesystem("memory").pipe_file("/chains.zip", (tmp_path / name).read_bytes())
    assert read("zip://a/b.txt::memory://chains.zip") == "member"
    fsspec.filesystem("memory").rm_file("/chains.zip")
