"""`maxray index FOLDER` and `Index.add_files`: every file is accounted for."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml

from jobs import index as command
from pipeline import Index
from pipeline.config import SpecError
from pipeline.index import find_index
from pipeline.index.folder import Account, folder_spec
from pipeline.index.reader import IndexReader
from tests import mixed
from tests.conftest import start_job

#: A folder that contains the collection of the test.
FOLDER = "papers"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Index, Account]:
    """Returns a folder with files of all types, its index, and the account of the first run."""
    folder = tmp_path_factory.mktemp("mixed") / FOLDER
    folder.mkdir()
    mixed.write(folder)
    mixed.write_media(folder)
    index = Index(f"{folder}.maxray")
    return folder, index, index.add_files(str(folder))


def statuses(account: Account) -> dict[str, str]:
    return {file.path.removeprefix(f"{FOLDER}/"): file.status for file in account.files}


def test_every_file_is_accounted_for(made):
    folder, index, account = made
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert sorted(file.path for file in account.files) == sorted(
        str(path.relative_to(folder.parent)) for path in files
    )
    for name, _, _ in mixed.TEXTS.values():
        assert statuses(account)[name] == "indexed"
    reasons = {file.path.removeprefix(f"{FOLDER}/"): file.reason for file in account.files}
    for name, (_, reason) in mixed.REJECTED.items():
        assert statuses(account)[name] == "rejected"
        assert reasons[name].startswith(reason), name
    # Without words, images, video and audio have nothing that the default encoder encodes.
    for name in ("photo.png", "clip.mp4", "tones.wav"):
        assert (statuses(account)[name], reasons[name]) == (
            "rejected",
            "nothing to index: no text, no speech",
        )
    assert sum(file.num_items for file in account.files) == len(index)


def test_the_table_has_all_types(made):
    table = str(made[2])
    total = next(line for line in table.splitlines() if line.startswith("all ")).split()
    counts = Counter(file.status for file in made[2].files)
    assert total[1:5] == [
        str(len(made[2].files)),
        str(counts["indexed"]),
        "0",
        str(counts["rejected"]),
    ]
    for kind in ("e-mail", "JSON lines", "DOCX", "OpenDocument", "EPUB", "PDF", "image", "other"):
        assert f"\n{kind} " in table
    assert "rejected files: encrypted: 1 ('papers/secret.docx')" in table
    assert "\\n" in table  # of the name with a line break


@pytest.mark.parametrize("word", mixed.TEXTS)
def test_a_word_of_each_type_is_found(made, word):
    name, _, part = mixed.TEXTS[word]
    hits = made[1].search(word, k=1)
    assert hits[0].item_id == f"{FOLDER}/{name}{part}"


def test_a_second_run_changes_nothing(made):
    folder, index, first = made
    version = index.reader.version
    account = index.add_files(str(folder))
    assert set(statuses(account).values()) == {"unchanged", "rejected"}
    assert (
        Counter(statuses(first).values())["indexed"]
        == Counter(statuses(account).values())["unchanged"]
    )
    assert len(index) == sum(file.num_items for file in first.files)
    assert index.reader.version - version < 5  # only the lease


@pytest.fixture
def folder(tmp_path) -> Path:
    """Returns a folder with three texts."""
    folder = tmp_path / FOLDER
    folder.mkdir()
    for name in ("a", "b", "c"):
        (folder / f"{name}.txt").write_text(f"text {name}")
    return folder


def test_changed_files_are_replaced_and_deleted_ones_removed(folder):
    index = Index(f"{folder}.maxray")
    (folder / "long.txt").write_text(" ".join(f"word{i}" for i in range(900)))
    (folder / "d.docx").write_bytes(b"PK\3\4 broken")
    index.add_files(str(folder))
    index.compress("hpool", 4)
    (folder / "a.txt").write_text("zebra")
    (folder / "long.txt").write_text(" ".join(f"other{i}" for i in range(500)))
    (folder / "b.txt").unlink()
    (folder / "d.docx").write_bytes(mixed.docx("repaired"))
    account = index.add_files(str(folder))
    assert statuses(account) == {
        "a.txt": "indexed",
        "c.txt": "unchanged",
        "d.docx": "indexed",
        "long.txt": "indexed",
    }
    assert index.search("zebra", k=1)[0].text == "zebra"
    rows = IndexReader(index.uri).dataset.to_table(["text", "hpool_4_int8"])
    assert not any("word1" in text or text == "text b" for text in rows["text"].to_pylist())
    assert rows["hpool_4_int8"].null_count == 0  # a representation that was added is filled
    assert IndexReader(index.uri).rejects().num_rows == 0


def test_only_the_given_files_are_removed(folder):
    index = Index(folder.parent / "library")
    index.add_files(str(folder / "a.txt"), str(folder / "b.txt"))
    index.add_files(str(folder / "c*"))
    assert len(index) == 3
    (folder / "c.txt").unlink()
    index.add_files(str(folder))
    assert len(index) == 2


def test_folders_of_the_same_name_do_not_replace_each_other(folder, tmp_path):
    index = Index(tmp_path / "library")
    index.add_files(str(folder))
    other = tmp_path / "other" / FOLDER
    other.mkdir(parents=True)
    (other / "a.txt").write_text("else")
    with pytest.raises(SpecError, match="another folder"):
        index.add_files(str(other))
    (other / "a.txt").unlink()
    folder.replace(other)  # moved
    assert set(statuses(index.add_files(str(other))).values()) == {"unchanged"}


def test_the_printed_spec_makes_an_equal_index(folder, tmp_path, capsys):
    command.main([str(folder), "--print-spec", "representations.1.compressor.num_vectors=4"])
    printed = capsys.readouterr().out
    (tmp_path / "spec.yaml").write_text(printed)
    assert yaml.safe_load(printed)["index"] == f"{folder}.maxray"
    command.main([str(tmp_path / "spec.yaml"), f"index={tmp_path}/other"])
    command.main([str(folder), "representations.1.compressor.num_vectors=4"])
    uris = (f"{folder}.maxray", f"{tmp_path}/other")
    tables = [IndexReader(uri).dataset.to_table().sort_by("item_id") for uri in uris]
    assert str(tables[0].to_pylist()) == str(tables[1].to_pylist())  # with NaN
    assert "kcenter_4_int8" in tables[0].column_names


def test_the_command_prints_the_table(folder, capsys):
    command.main([str(folder)])
    output = capsys.readouterr().out
    assert ["text", "3", "3", "0", "0", "3"] in [line.split() for line in output.splitlines()]
    assert f"index: {folder}.maxray" in output


def test_the_index_is_found_by_its_folder(folder, tmp_path):
    Index(f"{folder}.maxray").add(["a"], [np.ones((1, 4), np.float32)])
    for path in (f"{folder}/", f"{folder}/.", f"{folder}.maxray"):
        assert find_index(path).rstrip("/") == f"{folder}.maxray"
    shutil.rmtree(folder)
    assert find_index(str(folder)) == f"{folder}.maxray"
    assert Index(folder).uri == str(folder)  # a new index
    long = str(tmp_path / ("n" * 255))
    assert find_index(long) == long
    with pytest.raises(SpecError, match="index must be a path or a URI, .* name too long"):
        find_index(f"{long}n")


def test_watch_indexes_changes(folder):
    process = start_job("jobs.index", str(folder), "--watch")
    try:
        lines = iter(process.stdout.readline, "")
        assert any(line.startswith("index: ") for line in lines)
        (folder / "new.txt").write_text("a pelican")
        assert any(line.startswith("index: ") for line in lines)
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 143
    assert Index(f"{folder}.maxray").search("pelican", k=1)[0].item_id == f"{FOLDER}/new.txt"


# -- bad input -------------------------------------------------------------------------------


def test_links_names_and_rights(folder):
    (folder / "loop").symlink_to(folder)
    (folder / "dangling").symlink_to("nowhere")
    (folder / "self").symlink_to("self")
    os.mkfifo(folder / "pipe")
    (folder / ("n" * 251 + ".txt")).write_text("long name")
    (folder / "per%20cent#1.txt").write_text("percent")
    (folder / os.fsdecode(b"bytes\xff.txt")).write_text("bytes")
    (folder / ".git").mkdir()
    (folder / ".git" / "object").write_text("hidden")
    index = Index(folder.parent / "library")
    inner = folder / "inner"
    Index(inner).add(["x"], [[[1.0, 0.0]]])
    account = index.add_files(str(folder))
    found = statuses(account)
    for name in ("n" * 251 + ".txt", "per%20cent#1.txt", "a.txt"):
        assert found[name] == "indexed"
    rejected = ("dangling", "self", "pipe", "bytes\\udcff.txt", ".git", "inner")
    assert all(found[name] == "rejected" for name in rejected)
    assert len(found) == 3 + 2 + len(rejected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), "x.*which has no files"),
        (lambda path: None, "path must be an existing file or folder"),
        (lambda path: (path.mkdir(), (path / "a.bin").write_bytes(b"\0\1")), "unsupported type"),
        (lambda path: Index(path).add(["a"], [[[1.0, 0.0]]]), "which is an index; search it"),
    ],
)
def test_folders_that_cannot_be_indexed(tmp_path, make, message):
    make(tmp_path / "x")
    with pytest.raises(SpecError, match=message):
        Index(tmp_path / "index").add_files(str(tmp_path / "x"))
    assert not (tmp_path / "index").exists()


def test_a_folder_may_be_empty_or_have_members_named_like_those_of_an_index(folder):
    for name in ("jobs", "artefacts"):
        (folder / name).mkdir()
        assert folder_spec([folder])["index"] == f"{folder}.maxray"
    assert folder_spec([folder / "jobs"])["index"] == f"{folder}/jobs.maxray"


def test_a_pattern_without_files_is_named(folder):
    with pytest.raises(SpecError, match=f"{folder}/\\*.md', which has no files"):
        Index(folder.parent / "index").add_files(str(folder / "*.md"))


def test_several_paths_need_an_index(folder):
    with pytest.raises(SpecError, match="use --index"):
        folder_spec([str(folder / "a.txt"), str(folder / "b.txt")])
    with pytest.raises(SpecError, match="use --index"):
        folder_spec(["/"])
    (folder / "sub").mkdir()
    paths = [str(folder / "a.txt"), str(folder / "sub"), str(folder / "x*.md")]
    spec = folder_spec(paths, "library")
    files = {"name": "folder", "path": str(folder.parent), "only": ["papers/a.txt", "papers/x*.md"]}
    assert spec["source"] == [
        {**files, "collection": "papers"},
        {"name": "folder", "path": str(folder), "only": ["sub"], "collection": "sub"},
    ]
