"""Listing of files and folders."""

from __future__ import annotations

import itertools
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem

from pipeline.config import SpecError
from pipeline.data import files
from pipeline.data.base import NoFiles
from pipeline.data.files import first_file, walk


class SlowFileSystem(LocalFileSystem):
    """File system with a delay per listed folder, like an object store."""

    cachable = False
    delay = 0.02

    def __init__(self) -> None:
        super().__init__()
        self.num_running = self.max_running = 0
        self._count = threading.Lock()

    def ls(self, path: str, detail: bool = False, **options: object) -> list:
        with self._count:
            self.num_running += 1
            self.max_running = max(self.max_running, self.num_running)
        time.sleep(self.delay)
        with self._count:
            self.num_running -= 1
        return super().ls(path, detail=detail, **options)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tree of 85 folders with two files each."""
    for path in [tmp_path / f"{a}/{b}/{c}" for a in "abcd" for b in "efgh" for c in "ijkl"]:
        path.mkdir(parents=True)
        for folder in (path, path.parent, path.parent.parent, tmp_path):
            (folder / "1.txt").write_text("1")
            (folder / "z.txt").write_text("22")
    return tmp_path


def test_order_is_that_of_names(root):
    expected = sorted(
        ((str(path.relative_to(root)), path.stat().st_size) for path in root.rglob("*.txt")),
        key=lambda entry: entry[0].split("/"),
    )
    assert list(walk(LocalFileSystem(), str(root))) == expected


@pytest.mark.parametrize("threads", [1, 3, 16])
def test_folders_are_listed_in_advance(root, monkeypatch, threads):
    monkeypatch.setattr(files, "LIST_THREADS", threads)
    slow = SlowFileSystem()
    assert list(walk(slow, str(root))) == list(walk(LocalFileSystem(), str(root)))
    assert slow.max_running <= threads and (threads == 1 or slow.max_running > 1)


def test_walk_can_be_abandoned(root):
    slow = SlowFileSystem()
    assert next(walk(slow, str(root))) == ("1.txt", 1)


@pytest.mark.parametrize("num_folders", [2, 3, 4])
def test_linked_folders_are_not_entered_below_themselves(tmp_path, num_folders):
    names = [f"package-{number}" for number in range(num_folders)]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "readme.txt").write_text(name)
        (tmp_path / name / "nothing").symlink_to("missing")
        for other in set(names) - {name}:
            (tmp_path / name / other).symlink_to(f"../{other}")
    found = [file for file, _ in walk(LocalFileSystem(), str(tmp_path))]
    # Every sequence of distinct folders, as in `find -L`
    paths = itertools.chain(*(itertools.permutations(names, r) for r in range(1, num_folders + 1)))
    files = ("nothing", "readme.txt")
    assert found == sorted("/".join((*path, file)) for path in paths for file in files)
    assert sorted(found) == find(tmp_path)


def test_links_to_folders_above_and_beside(tmp_path):
    root = tmp_path / "root"
    (root / "a/b").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (root / "a/b/1.txt").write_text("1")
    (tmp_path / "outside/2.txt").write_text("2")
    (root / "a/b/up").symlink_to("..")
    (root / "a/b/root").symlink_to(root)
    (root / "a/b/above").symlink_to("../../..")
    (root / "c").symlink_to("../outside")
    (root / "d").symlink_to("../outside")
    (root / "e.txt").symlink_to("a/b/1.txt")
    (tmp_path / "outside/back").symlink_to(root)
    found = [file for file, _ in walk(LocalFileSystem(), str(root))]
    assert found == ["a/b/1.txt", "c/2.txt", "d/2.txt", "e.txt"]
    assert set(found) < set(find(root))  # which also lists the folder above


def test_a_folder_mounted_below_itself_is_entered_once(tmp_path, monkeypatch):
    """A bind mount has the inode of the folder. Mounting requires privileges, stat does not."""
    (tmp_path / "a/mount").mkdir(parents=True)
    (tmp_path / "a/1.txt").write_text("1")
    (tmp_path / "a/mount/1.txt").write_text("1")
    stat = os.stat
    monkeypatch.setattr(
        files.os, "stat", lambda path, **kw: stat(str(path).removesuffix("/mount"), **kw)
    )
    assert [file for file, _ in walk(LocalFileSystem(), str(tmp_path))] == ["a/1.txt"]


def test_folders_without_files_and_unreadable_ones_are_told_apart(tmp_path, monkeypatch):
    fs = LocalFileSystem()
    with pytest.raises(NoFiles, match="path must be a folder with files, .*contains no such files"):
        first_file(walk(fs, str(tmp_path)), str(tmp_path), "a folder with files")
    (tmp_path / "a.txt").write_text("a", "utf-8")
    assert first_file(walk(fs, str(tmp_path)), str(tmp_path), "a folder") == ("a.txt", 1)

    def denied(*_, **__):
        raise PermissionError

    monkeypatch.setattr(fs, "ls", denied)
    with pytest.raises(SpecError, match="path must be a folder, .*which cannot be listed") as error:
        first_file(walk(fs, str(tmp_path)), str(tmp_path), "a folder")
    assert not isinstance(error.value, NoFiles)


def find(root: Path) -> list[str]:
    """Returns the files that `find -L` lists."""
    command = ["find", "-L", ".", "!", "-type", "d"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    return sorted(line.removeprefix("./") for line in done.stdout.splitlines())
