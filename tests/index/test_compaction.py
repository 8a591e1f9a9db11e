"""Merging of fragments while a job writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.config import Spec
from pipeline.index import EXECUTOR, compaction
from pipeline.index.compaction import FragmentMerger, plan_compaction
from pipeline.index.fragments import write_table
from pipeline.index.in_process import EXECUTORS
from pipeline.index.reader import ITEMS, IndexReader, part_uri
from pipeline.index.session import Session
from pipeline.index.stage import Resources
from pipeline.index.writer import IndexWriter
from pipeline.schema import ITEM, Item


def write(writer: IndexWriter, prefix: str, num_fragments: int, num_items: int = 2) -> None:
    """Commits fragments of items, one after another."""
    for number in range(num_fragments):
        ids = [f"{prefix}{number}-{i}" for i in range(num_items)]
        rows = [Item(i, i, "s", "text", "1", text="x" * 1000).row() for i in ids]
        table = pa.Table.from_pylist(rows, schema=ITEM)
        writer.commit(write_table(table, part_uri(writer.uri, ITEMS)))


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(str(tmp_path / "index"), Spec(), "test", "job", dict) as session:
        yield session


@pytest.fixture
def writer(session) -> IndexWriter:
    return session.writer


def test_merged_fragments_are_limited_by_items_and_bytes(writer):
    write(writer, "a", 12)
    num_bytes = sum(
        file.file_size_bytes for f in writer.dataset.get_fragments() for file in f.data_files()
    )

    def sizes(max_items: int, max_bytes: int) -> list[int]:
        plan = plan_compaction(writer.dataset, max_items, max_bytes)
        return [len(task.fragments) for task in plan.tasks]

    assert sizes(8, 1 << 40) == [4, 4, 4]
    assert sizes(1 << 20, num_bytes // 2) == [6, 6]
    assert sizes(1 << 20, 1) == []  # every fragment is large enough


@pytest.mark.parametrize("executor", EXECUTORS)
def test_job_merges_its_own_fragments(session, writer, cluster, executor, monkeypatch):
    monkeypatch.setenv(EXECUTOR, executor)
    monkeypatch.setattr(compaction, "MERGE_FRAGMENTS", 6)
    monkeypatch.setattr(compaction, "MERGED_ITEMS", 4)
    write(writer, "earlier", 3)
    merger = FragmentMerger(session, Resources(num_cpus=0.25))
    write(writer, "a", 5)
    merger.step()  # not enough fragments
    assert not merger._running
    write(writer, "b", 3)
    merger.step()
    assert merger._running
    write(writer, "c", 1)  # commits during the merge
    writer.remove({0: ["earlier0-0"]})  # fragments of earlier jobs are not rewritten
    merger.finish()
    index = IndexReader(writer.uri)
    assert len(index) == 23
    ids = index.dataset.to_table(columns=["item_id"])["item_id"].to_pylist()
    assert len(set(ids)) == 23
    sizes = [fragment.count_rows() for fragment in index.dataset.get_fragments()]
    assert sizes.count(4) >= 2 and {0, 1, 2} <= {
        fragment.fragment_id for fragment in index.dataset.get_fragments()
    }
