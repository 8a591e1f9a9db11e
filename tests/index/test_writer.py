"""The one writer of an index: its lease, its fence, and what one commit can do."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import lance
import pyarrow as pa
import pytest
from lance import LanceDataset, LanceOperation
from lance.fragment import FragmentMetadata

from pipeline.config import SpecError
from pipeline.index.fragments import write_table
from pipeline.index.reader import Index, part
from pipeline.index.status import status
from pipeline.index.writer import IndexWriter, LeaseHeld, LeaseLost, open_or_create
from pipeline.schema import ITEM, REJECT, Item, Reject

EXPIRED = -1.0  # a lease of this many seconds may be taken at once


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path / "index")


def written(uri: str, *item_ids: str, revision: str = "1") -> list[FragmentMetadata]:
    """A fragment of items that waits for its commit."""
    items = [Item(item_id, item_id, "test", "text", revision).row() for item_id in item_ids]
    return write_table(pa.Table.from_pylist(items, schema=ITEM), part(uri, "items.lance"))


def revisions(uri: str) -> dict[str, str]:
    """The revision of each item; none may be there twice."""
    table = Index(uri).dataset.to_table(columns=["item_id", "revision"])
    there = dict(zip(*(column.to_pylist() for column in table.columns), strict=True))
    assert len(there) == table.num_rows == len(Index(uri))
    return there


# -- the lease -------------------------------------------------------------------------------


@pytest.mark.parametrize("there", [True, False])
def test_of_racing_takers_one_wins_and_the_others_are_told_who(uri, there):
    if there:
        open_or_create(uri)
    num_takers = 4
    start = threading.Barrier(num_takers)
    won: list[IndexWriter] = []
    told: list[str] = []

    def take(job: str) -> None:
        start.wait()
        try:
            won.append(IndexWriter(uri, job))
        except LeaseHeld as error:
            told.append(str(error))

    takers = [threading.Thread(target=take, args=[f"job-{i}"]) for i in range(num_takers)]
    for taker in takers:
        taker.start()
    for taker in takers:
        taker.join()
    assert len(won) == 1 and len(told) == num_takers - 1
    who = re.escape(f"job {won[0].job} (process {os.getpid()} on ")
    for sentence in told:
        assert re.match(
            rf"index must be an index without a writer, got '{uri}', which (is being"
            rf" written|was just"
            rf" taken) by {who}.* until \d\d:\d\d:\d\d\); wait for it or stop it",
            sentence,
        )
    won[0].commit(written(uri, "a"))
    assert set(revisions(uri)) == {"a"}


def test_released_is_free_and_the_one_who_released_writes_no_more(uri):
    first = IndexWriter(uri, "first")
    assert status(uri)["lease"].startswith("first on ")
    first.release()
    assert status(uri)["lease"] is None
    with pytest.raises(LeaseLost):
        first.commit(written(uri, "a"))
    second = IndexWriter(uri, "second")
    first.release()  # once more: the lease of the second stays
    second.commit(written(uri, "b"))
    assert set(revisions(uri)) == {"b"}


def test_an_expired_lease_is_nobodys(uri):
    IndexWriter(uri, "gone", ttl=EXPIRED)
    assert status(uri)["lease"] is None


def test_renewing_keeps_others_away(uri):
    writer = IndexWriter(uri, "slow", ttl=EXPIRED)
    writer.ttl = 60.0
    writer.renew()
    with pytest.raises(LeaseHeld, match="is being written by job slow"):
        IndexWriter(uri, "other")


def fill_column(writer: IndexWriter, number: int) -> tuple[FragmentMetadata, list[int]]:
    """The column `extra` of a fragment, filled and waiting for its commit."""
    fragment = writer.dataset.get_fragment(number)
    ids = fragment.to_table(columns=[], with_row_id=True)["_rowid"]
    values = pa.table({"_rowid": ids, "extra": pa.array([7] * len(ids), pa.int32())})
    return fragment.update_columns(values)


CHANGES: dict[str, Callable[[str, IndexWriter], object]] = {
    "rows": lambda uri, writer: writer.commit(written(uri, "late")),
    "replaced rows": lambda uri, writer: writer.commit(written(uri, "a", revision="2"), {0: ["a"]}),
    "removed rows": lambda uri, writer: writer.remove({0: ["a"]}),
    "columns": lambda uri, writer: writer.add_columns([pa.field("late", pa.int32())]),
    "filled columns": lambda uri, writer: writer.commit_columns([fill_column(writer, 0)]),
    "the lease": lambda uri, writer: writer.renew(),
    "the index of ids": lambda uri, writer: writer.index_ids(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_who_lost_the_lease_changes_nothing(uri, change):
    frozen = IndexWriter(uri, "frozen", ttl=EXPIRED)
    frozen.add_columns([pa.field("extra", pa.int32())])
    frozen.commit(written(uri, "a", "b"))
    taker = IndexWriter(uri, "taker")
    taker.commit(written(uri, "c"))
    for _ in range(2):  # the second time it knows already
        with pytest.raises(LeaseLost, match=r"the lease on .* went to job taker \(process"):
            change(uri, frozen)
    with pytest.raises(LeaseLost):  # and no change opened a way past the fence
        frozen.commit(written(uri, "later"))
    assert revisions(uri) == {"a": "1", "b": "1", "c": "1"}
    there = Index(uri).dataset.to_table()
    assert there.column_names == [*ITEM.names, "extra"]
    assert there["extra"].null_count == 3
    taker.commit(written(uri, "d"))  # the taker was not disturbed
    assert set(revisions(uri)) == {"a", "b", "c", "d"}


def test_a_commit_that_slips_in_before_the_fence_is_seen_by_the_taker(uri, monkeypatch):
    old = IndexWriter(uri, "old", ttl=EXPIRED)
    fragments = written(uri, "slipped in")
    commit = LanceDataset.commit

    def commit_after_the_old_holder(dataset, operation, **options):
        if isinstance(operation, LanceOperation.Project):
            monkeypatch.setattr(LanceDataset, "commit", commit)
            with contextlib.suppress(LeaseLost):
                old.commit(fragments)
        return commit(dataset, operation, **options)

    monkeypatch.setattr(LanceDataset, "commit", commit_after_the_old_holder)
    taker = IndexWriter(uri, "taker")
    assert taker.dataset.to_table()["item_id"].to_pylist() == ["slipped in"]
    with pytest.raises(LeaseLost):
        old.commit(written(uri, "late"))


def test_a_holder_that_died_on_this_machine_is_not_waited_for(uri):
    code = "import sys, time; from pipeline.index.writer import IndexWriter;"
    code += "writer = IndexWriter(sys.argv[1], 'victim', ttl=3600); print('held', flush=True);"
    code += "time.sleep(600)"
    victim = subprocess.Popen(
        [sys.executable, "-c", code, uri], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert victim.stdout.readline() == "held\n"
    with pytest.raises(LeaseHeld, match=rf"written by job victim \(process {victim.pid} on"):
        IndexWriter(uri, "impatient")
    victim.send_signal(signal.SIGKILL)
    deadline = time.time() + 10
    while not re.search(r"\) [ZX] ", Path(f"/proc/{victim.pid}/stat").read_text()):
        assert time.time() < deadline
        time.sleep(0.01)
    writer = IndexWriter(uri, "next")  # although nobody has waited for the dead process yet
    victim.wait()
    victim.stdout.close()
    writer.commit(written(uri, "a"))
    assert set(revisions(uri)) == {"a"}


def test_a_harmless_change_by_somebody_else_does_not_stop_the_holder(uri):
    writer = IndexWriter(uri, "holder")
    writer.add_columns([pa.field("extra", pa.int32())])
    writer.commit(written(uri, "a", "b"))

    def somebody_else(change: Callable[[LanceDataset], object]) -> None:
        change(lance.dataset(part(uri, "items.lance")))

    somebody_else(lambda dataset: dataset.update_config({"note": "seen"}))
    writer.commit(written(uri, "c"))
    somebody_else(lambda dataset: dataset.tags.create("v1", dataset.version))
    writer.renew()
    # A no-op projection conflicts with whatever is committed on top of an older version.
    project = lambda ds: LanceDataset.commit(  # noqa: E731
        ds, LanceOperation.Project(ds.lance_schema), read_version=ds.version
    )
    for change in (
        lambda: writer.commit(written(uri, "d")),
        lambda: writer.commit(written(uri, "a", revision="2"), {0: ["a"]}),
        lambda: writer.add_columns([pa.field("more", pa.int32())]),
        lambda: writer.commit_columns([fill_column(writer, 0)]),
        writer.renew,
        writer.index_ids,
        writer.release,
    ):
        somebody_else(project)
        change()
    assert revisions(uri) == {"a": "2", "b": "1", "c": "1", "d": "1"}
    assert Index(uri).dataset.config()["note"] == "seen"
    filled = Index(uri).dataset.to_table(filter="extra = 7")
    assert filled["item_id"].to_pylist() == ["b"]
    assert status(uri)["lease"] is None


@pytest.mark.parametrize("taken", [False, True])
def test_a_holder_that_slept_inside_lance_looks_who_has_the_lease(uri, monkeypatch, taken):
    writer = IndexWriter(uri, "sleeper", ttl=EXPIRED)
    if taken:
        IndexWriter(uri, "taker")
    asleep = [OSError("Too many concurrent writers. Attempted 2 times, failed on retry_timeout")]
    commit = LanceDataset.commit
    monkeypatch.setattr(
        LanceDataset,
        "commit",
        lambda *args, **options: raise_first(asleep) or commit(*args, **options),
    )
    change = lambda: writer.commit(written(uri, "a"))  # noqa: E731
    if taken:
        with pytest.raises(LeaseLost, match="went to job taker"):
            change()
    else:
        change()
    assert set(revisions(uri)) == (set() if taken else {"a"}) and not asleep


def raise_first(errors: list[Exception]) -> None:
    if errors:
        raise errors.pop()


# -- commits ---------------------------------------------------------------------------------


def test_rows_are_replaced_in_one_commit(uri):
    writer = IndexWriter(uri, "job")
    writer.commit(written(uri, "a", "b", "it's"))
    writer.commit(written(uri, "c"))
    before = writer.dataset.version
    # The first fragment keeps a row, the second one is emptied.
    version = writer.commit(
        written(uri, "a", "it's", "c", "new", revision="2"), {0: ["a", "it's"], 1: ["c"]}
    )
    assert version == before + 1
    assert revisions(uri) == {"a": "2", "b": "1", "it's": "2", "c": "2", "new": "2"}
    assert [f.fragment_id for f in writer.dataset.get_fragments()] == [0, 2]


def test_every_row_can_be_replaced_and_removed(uri):
    writer = IndexWriter(uri, "job")
    writer.commit(written(uri, "a", "b"))
    writer.index_ids()
    writer.commit(written(uri, "a", "b", revision="2"), {0: ["a", "b"]})
    writer.index_ids()
    assert revisions(uri) == {"a": "2", "b": "2"}
    (fragment,) = writer.dataset.get_fragments()
    writer.remove({fragment.fragment_id: ["a", "b"]})
    writer.index_ids()
    assert revisions(uri) == {}
    before = writer.dataset.version
    assert writer.remove({}) == before


def test_rejects_are_one_row_an_item_and_forgotten_when_solved(uri):
    writer = IndexWriter(uri, "job")

    def reject(*rejects: tuple[str, str], solved: tuple[str, ...] = ()) -> dict[str, str]:
        rows = [Reject(item_id, "test", "encode", reason).row() for item_id, reason in rejects]
        writer.set_rejects(pa.Table.from_pylist(rows, schema=REJECT), solved)
        there = Index(uri).rejects()
        assert len(set(there["item_id"].to_pylist())) == there.num_rows
        return dict(zip(there["item_id"].to_pylist(), there["reason"].to_pylist(), strict=True))

    assert reject() == {}
    assert reject(solved=("a",)) == {}
    assert reject(("a", "empty"), ("it's", "empty")) == {"a": "empty", "it's": "empty"}
    assert reject(("a", "late"), ("b", "x"), ("b", "y")) == {"a": "late", "it's": "empty", "b": "y"}
    assert reject(("c", "z"), solved=("it's", "a", "never rejected")) == {"b": "y", "c": "z"}


# -- what lies at the URI --------------------------------------------------------------------


@pytest.mark.parametrize("place", ["file/index", "/proc/index"])
def test_a_place_that_cannot_be_written(tmp_path, place):
    (tmp_path / "file").write_text("not a folder")
    uri = str(tmp_path / place)
    with pytest.raises(SpecError) as error:
        open_or_create(uri)
    sentence = str(error.value)
    problems = ("cannot be written (", "is below the file")
    assert any(f"got {uri!r}, which {problem}" in sentence for problem in problems)
    assert "\n" not in sentence and ".rs" not in sentence


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Makes a folder read-only, for root too."""
    if os.geteuid():
        lock, unlock = ["chmod", "-R", "a-w"], ["chmod", "-R", "u+w"]
    else:
        lock, unlock = ["chattr", "-R", "+i"], ["chattr", "-R", "-i"]
    try:
        subprocess.run([*lock, folder], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("root, on a file system without immutable files")
    try:
        yield
    finally:
        subprocess.run([*unlock, folder], check=True)


@pytest.mark.parametrize("there", ["an index", "an empty folder"])
def test_a_read_only_folder(tmp_path, there):
    folder = tmp_path / "index"
    folder.mkdir()
    if there == "an index":
        IndexWriter(str(folder), "before").release()
    with read_only(folder), pytest.raises(SpecError, match="cannot be written"):
        IndexWriter(str(folder), "job")


@pytest.mark.parametrize("place", ["letters", "letters/from_home.txt"])
def test_what_is_no_index_is_left_alone(tmp_path, place):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters/from_home.txt").write_text("Dear Ada")
    uri = str(tmp_path / place)
    with pytest.raises(SpecError) as error:
        IndexWriter(uri, "job")
    is_file = place.endswith(".txt")
    rule = "the path of a folder" if is_file else "an index, or a new or empty folder"
    problem = "is a file" if is_file else "has other contents"
    assert str(error.value) == f"index must be {rule}, got {uri!r}, which {problem}"
    with pytest.raises(
        SpecError, match="^index must be the URI of an index .* which contains no index"
    ):
        Index(uri)
    assert {path.name for path in tmp_path.rglob("*")} == {"letters", "from_home.txt"}


@pytest.mark.parametrize("lost", ["data", "_versions", "_transactions and _versions"])
def test_a_half_deleted_index_is_refused_as_it_is(uri, lost):
    writer = IndexWriter(uri, "job")
    writer.commit(written(uri, "a"))
    writer.release()
    for folder in lost.split(" and "):
        for file in Path(uri, "items.lance", folder).iterdir():
            file.unlink()
    before = sorted(Path(uri).rglob("*"))
    with pytest.raises(
        SpecError,
        match=r"^index must be an intact index, got '.*', which is"
        r" corrupted \(.*\)$",
    ):
        IndexWriter(uri, "next")
    assert sorted(Path(uri).rglob("*")) == before
