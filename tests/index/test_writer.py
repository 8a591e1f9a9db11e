"""Tests of the index writer: its lease, its fence and its commits."""

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
from pipeline.index.reader import IndexReader, part_uri
from pipeline.index.status import status
from pipeline.index.writer import IndexWriter, LeaseHeld, LeaseLost, open_or_create
from pipeline.schema import ITEM, REJECT, Item, Reject

EXPIRED = -1.0  # lifetime in seconds of a lease that has already expired


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path / "index")


def written(uri: str, *item_ids: str, revision: str = "1") -> list[FragmentMetadata]:
    """Writes an uncommitted fragment of items."""
    items = [Item(item_id, item_id, "test", "text", revision).row() for item_id in item_ids]
    return write_table(pa.Table.from_pylist(items, schema=ITEM), part_uri(uri, "items.lance"))


def revisions(uri: str) -> dict[str, str]:
    """Returns the revision by item id and checks that ids are unique."""
    table = IndexReader(uri).dataset.to_table(columns=["item_id", "revision"])
    by_id = dict(zip(*(column.to_pylist() for column in table.columns), strict=True))
    assert len(by_id) == table.num_rows == len(IndexReader(uri))
    return by_id


# -- the lease -------------------------------------------------------------------------------


@pytest.mark.parametrize("exists", [True, False])
def test_one_of_concurrent_writers_takes_the_lease(uri, exists):
    if exists:
        open_or_create(uri)
    num_takers = 4
    start = threading.Barrier(num_takers)
    won: list[IndexWriter] = []
    messages: list[str] = []

    def take(job: str) -> None:
        start.wait()
        try:
            won.append(IndexWriter(uri, job))
        except LeaseHeld as error:
            messages.append(str(error))

    takers = [threading.Thread(target=take, args=[f"job-{i}"]) for i in range(num_takers)]
    for taker in takers:
        taker.start()
    for taker in takers:
        taker.join()
    assert len(won) == 1 and len(messages) == num_takers - 1
    holder = re.escape(f"job {won[0].job} (process {os.getpid()} on ")
    for message in messages:
        assert re.fullmatch(
            rf"index must be an index without a writer, got '{uri}', which is being written by"
            rf" {holder}.* until \d\d:\d\d:\d\d\); wait for it or stop it",
            message,
        )
    won[0].commit(written(uri, "a"))
    assert set(revisions(uri)) == {"a"}


def test_released_lease_is_free_and_its_writer_cannot_commit(uri):
    first = IndexWriter(uri, "first")
    assert status(uri)["lease"].startswith("first on ")
    first.release()
    assert status(uri)["lease"] is None
    with pytest.raises(LeaseLost):
        first.commit(written(uri, "a"))
    second = IndexWriter(uri, "second")
    first.release()  # does not release the lease of the second writer
    second.commit(written(uri, "b"))
    assert set(revisions(uri)) == {"b"}


def test_expired_lease_is_free(uri):
    IndexWriter(uri, "gone", ttl=EXPIRED)
    assert status(uri)["lease"] is None


def test_renewed_lease_is_held(uri):
    writer = IndexWriter(uri, "slow", ttl=EXPIRED)
    writer.ttl = 60.0
    writer.renew()
    with pytest.raises(
        LeaseHeld, match="^index must be an index without a writer, .* by job slow "
    ):
        IndexWriter(uri, "other")


def test_renewal_does_not_commit(uri):
    writer = IndexWriter(uri, "holder", ttl=EXPIRED)
    version = IndexReader(uri).dataset.version
    writer.ttl = 60.0
    writer.renew()
    assert IndexReader(uri).dataset.version == version
    assert status(uri)["lease"].startswith("holder on ")
    writer.release()
    assert not list(Path(uri, "lease").iterdir())


def test_renewal_does_not_wait_for_a_commit(uri):
    writer = IndexWriter(uri, "holder")
    with writer._lock:
        renewer = threading.Thread(target=writer.renew)
        renewer.start()
        renewer.join(timeout=10)
        assert not renewer.is_alive()


def fill_column(writer: IndexWriter, number: int) -> tuple[FragmentMetadata, list[int]]:
    """Fills the column `extra` of a fragment without committing it."""
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
def test_writer_that_lost_its_lease_cannot_commit(uri, change):
    frozen = IndexWriter(uri, "frozen", ttl=EXPIRED)
    frozen.add_columns([pa.field("extra", pa.int32())])
    frozen.commit(written(uri, "a", "b"))
    taker = IndexWriter(uri, "taker")
    taker.commit(written(uri, "c"))
    for _ in range(2):  # also after it has noticed the loss
        with pytest.raises(LeaseLost, match=r"the lease on .* was taken by job taker \(process"):
            change(uri, frozen)
    with pytest.raises(LeaseLost):  # no change moved its read version past the fence
        frozen.commit(written(uri, "later"))
    assert revisions(uri) == {"a": "1", "b": "1", "c": "1"}
    table = IndexReader(uri).dataset.to_table()
    assert table.column_names == [*ITEM.names, "extra"]
    assert table["extra"].null_count == 3
    taker.commit(written(uri, "d"))  # the taker is not affected
    assert set(revisions(uri)) == {"a", "b", "c", "d"}


def test_taker_sees_commits_made_before_the_fence(uri, monkeypatch):
    old = IndexWriter(uri, "old", ttl=EXPIRED)
    fragments = written(uri, "late commit")
    commit = LanceDataset.commit

    def commit_after_the_old_holder(dataset, operation, **options):
        if isinstance(operation, LanceOperation.Project):
            monkeypatch.setattr(LanceDataset, "commit", commit)
            with contextlib.suppress(LeaseLost):
                old.commit(fragments)
        return commit(dataset, operation, **options)

    monkeypatch.setattr(LanceDataset, "commit", commit_after_the_old_holder)
    taker = IndexWriter(uri, "taker")
    assert taker.dataset.to_table()["item_id"].to_pylist() == ["late commit"]
    with pytest.raises(LeaseLost):
        old.commit(written(uri, "late"))


def test_lease_of_a_dead_local_process_is_free(uri):
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
    writer = IndexWriter(uri, "next")  # the dead process is still a zombie
    victim.wait()
    victim.stdout.close()
    writer.commit(written(uri, "a"))
    assert set(revisions(uri)) == {"a"}


def test_holder_retries_after_harmless_conflicts(uri):
    writer = IndexWriter(uri, "holder")
    writer.add_columns([pa.field("extra", pa.int32())])
    writer.commit(written(uri, "a", "b"))

    def another_writer(change: Callable[[LanceDataset], object]) -> None:
        change(lance.dataset(part_uri(uri, "items.lance")))

    another_writer(lambda dataset: dataset.update_config({"note": "seen"}))
    writer.commit(written(uri, "c"))
    another_writer(lambda dataset: dataset.tags.create("v1", dataset.version))
    writer.renew()
    # A no-op projection conflicts with any commit based on an older version.
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
        another_writer(project)
        change()
    assert revisions(uri) == {"a": "2", "b": "1", "c": "1", "d": "1"}
    assert IndexReader(uri).dataset.config()["note"] == "seen"
    filled = IndexReader(uri).dataset.to_table(filter="extra = 7")
    assert filled["item_id"].to_pylist() == ["b"]
    assert status(uri)["lease"] is None


@pytest.mark.parametrize("taken", [False, True])
def test_holder_checks_the_lease_after_a_retry_timeout(uri, monkeypatch, taken):
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
        with pytest.raises(LeaseLost, match="was taken by job taker"):
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


def test_rejects_have_one_row_per_item_and_are_deleted_when_solved(uri):
    writer = IndexWriter(uri, "job")

    def reject(*rejects: tuple[str, str], solved: tuple[str, ...] = ()) -> dict[str, str]:
        rows = [Reject(item_id, "test", "encode", reason).row() for item_id, reason in rejects]
        writer.set_rejects(pa.Table.from_pylist(rows, schema=REJECT), solved)
        table = IndexReader(uri).rejects()
        assert len(set(table["item_id"].to_pylist())) == table.num_rows
        return dict(zip(table["item_id"].to_pylist(), table["reason"].to_pylist(), strict=True))

    assert reject() == {}
    assert reject(solved=("a",)) == {}
    assert reject(("a", "empty"), ("it's", "empty")) == {"a": "empty", "it's": "empty"}
    assert reject(("a", "late"), ("b", "x"), ("b", "y")) == {"a": "late", "it's": "empty", "b": "y"}
    assert reject(("c", "z"), solved=("it's", "a", "never rejected")) == {"b": "y", "c": "z"}


# -- location --------------------------------------------------------------------------------


def test_new_rejects_are_appended(uri):
    writer = IndexWriter(uri, "job")

    def reject(name: str, *solved: str) -> lance.LanceDataset:
        row = {**Reject(name, "s", "decode", "bad").row(), "spec": ""}
        writer.set_rejects(pa.Table.from_pylist([row], schema=REJECT), solved)
        return lance.dataset(part_uri(uri, "rejects.lance"))

    before = reject("a").version
    assert reject("b", "never rejected").version == before + 1
    assert len(reject("c").get_fragments()) == 3  # none was rewritten
    assert reject("d", "a").version == before + 4  # a deletion and an append
    later = IndexWriter.__new__(IndexWriter)  # ids of earlier jobs are known
    later.__dict__ |= {**vars(writer), "_rejected": None}
    writer = later
    assert reject("b", "c").to_table()["item_id"].to_pylist() == ["d", "b"]


@pytest.mark.parametrize("location", ["file/index", "/proc/index"])
def test_rejects_unwritable_location(tmp_path, location):
    (tmp_path / "file").write_text("not a folder")
    uri = str(tmp_path / location)
    with pytest.raises(SpecError) as error:
        open_or_create(uri)
    message = str(error.value)
    problems = ("cannot be written (", "is below the file")
    assert message.startswith("index must be ")
    assert any(f"got {uri!r}, which {problem}" in message for problem in problems)
    assert "\n" not in message and ".rs" not in message


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Makes a folder read-only, even for root."""
    if os.geteuid():
        lock, unlock = ["chmod", "-R", "a-w"], ["chmod", "-R", "u+w"]
    else:
        lock, unlock = ["chattr", "-R", "+i"], ["chattr", "-R", "-i"]
    try:
        subprocess.run([*lock, folder], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("the file system does not support immutable files for root")
    try:
        yield
    finally:
        subprocess.run([*unlock, folder], check=True)


@pytest.mark.parametrize("content", ["an index", "an empty folder"])
def test_rejects_read_only_folder(tmp_path, content):
    folder = tmp_path / "index"
    folder.mkdir()
    if content == "an index":
        IndexWriter(str(folder), "before").release()
    with (
        read_only(folder),
        pytest.raises(SpecError, match="^index must be .*, got .*cannot be written"),
    ):
        IndexWriter(str(folder), "job")


@pytest.mark.parametrize("location", ["letters", "letters/from_home.txt"])
def test_does_not_modify_other_files(tmp_path, location):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters/from_home.txt").write_text("Dear Ada")
    uri = str(tmp_path / location)
    with pytest.raises(SpecError) as error:
        IndexWriter(uri, "job")
    is_file = location.endswith(".txt")
    rule = (
        "the path of a folder that can be written"
        if is_file
        else "an index, or a new or empty folder"
    )
    problem = "is a file" if is_file else "has other contents"
    assert str(error.value) == f"index must be {rule}, got {uri!r}, which {problem}"
    with pytest.raises(
        SpecError, match="^index must be the URI of an index .* which contains no index"
    ):
        IndexReader(uri)
    assert {path.name for path in tmp_path.rglob("*")} == {"letters", "from_home.txt"}


@pytest.mark.parametrize("lost", ["data", "_versions", "_transactions and _versions"])
def test_rejects_partially_deleted_index_without_changes(uri, lost):
    writer = IndexWriter(uri, "job")
    writer.commit(written(uri, "a"))
    writer.release()
    for folder in lost.split(" and "):
        for file in Path(uri, "items.lance", folder).iterdir():
            file.unlink()
    before = sorted(Path(uri).rglob("*"))
    with pytest.raises(
        SpecError,
        match=r"^index must be an intact index, got '.*', which is corrupted \(.*\)$",
    ):
        IndexWriter(uri, "next")
    assert sorted(Path(uri).rglob("*")) == before
