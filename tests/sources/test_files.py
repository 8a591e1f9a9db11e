"""Listing of files and folders."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem

from pipeline.sources import files
from pipeline.sources.files import walk


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
