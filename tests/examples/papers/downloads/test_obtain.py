"""Data sets and checkpoints from local servers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from examples.papers.downloads import obtain
from examples.papers.downloads.fetch import file_hash
from examples.papers.downloads.revisions import Revisions
from examples.papers.downloads.spec import DataSet, Download, Pin, load_checkpoints
from examples.papers.tables.plan import Folders, models, plan
from examples.papers.tables.spec import load_data_sets, load_table
from examples.papers.verbs import get
from examples.papers.verbs.run import PAPERS
from tests import hub
from tests.conftest import ROOT
from tests.examples.papers.downloads import published
from tests.examples.papers.tables.test_spec import KNOWN


def run(data: Path, data_sets: dict[str, DataSet], checkpoints: dict[str, Pin] | None = None):
    """Downloads and returns the problems."""
    return get.get(get.Selection(data_sets, checkpoints or {}), Revisions(str(data)))


@pytest.fixture
def data(tmp_path) -> Path:
    """Data folder."""
    return tmp_path / "data"


#: Files of the layout that no table reads, or that are added by hand.
NOT_DOWNLOADED = (
    "binding/",
    "checkpoints/",
    "edje/pretraining/00000",
    "imagecode/test_data_unlabeled.json",
)


# -- data sets -----------------------------------------------------------------------------------


def test_data_sets_have_the_layout_that_tables_read(server, layout, tmp_path, data, monkeypatch):
    data_sets = published.publish(server, layout, tmp_path / "published")
    server.repositories["datasets", "hltcoe/MultiVENT2.0"].gated = True
    made = {name for name, data_set in data_sets.items() if not data_set.downloads}
    data_sets = {name: data_sets[name] for name in data_sets.keys() - made}
    problems = run(data, data_sets)
    assert len(problems) == 2, problems
    for name, problem in zip(("multivent", "multivent_test"), sorted(problems), strict=True):
        assert problem.startswith(f"{name}: hub must be a source that can")
        assert "is gated on the hub; accept its terms on its page there" in problem
    monkeypatch.setenv("HF_TOKEN", hub.TOKEN)
    assert run(data, data_sets) == []
    expected, found = published.files(layout), published.files(data)
    found.pop("revisions.json")
    ours = {name for name in expected if not name.startswith(NOT_DOWNLOADED)}
    assert found.keys() == ours | {"flickr30k_entities/test.txt"}
    different = {name for name in ours if found[name] != expected[name]}
    assert {name for name in different if not name.startswith("mmeb/video/")} == set()
    for name in different:
        assert pq.read_table(data / name).equals(pq.read_table(layout / name))
    assert not list((data / ".downloads").rglob("*.zip"))
    sent = sum(server.sent.values())
    assert run(data, data_sets) == [] and sum(server.sent.values()) == sent


def test_every_data_set_has_a_way_or_a_sentence():
    for name, data_set in load_data_sets(PAPERS).items():
        if not data_set.downloads:
            assert "`" in str(data_set.note), name  # the command that makes it
            continue
        written = [
            target
            for download in data_set.downloads
            for target in (download.to, *(download.members or {}).values())
            if target
        ]
        for file in data_set.files:
            folder = file.partition("/")[0]
            assert any(target.partition("/")[0] == folder for target in written), (name, file)


ONE = "beir_arguana"


@pytest.fixture
def one(server, layout, tmp_path) -> DataSet:
    """A data set of one archive at a URL."""
    found: DataSet = load_data_sets(PAPERS)[ONE]
    content = published.archive(found.downloads[0].source, layout)
    downloads = [published.local(server, tmp_path, found.downloads[0], content)]
    return found.model_copy(update={"downloads": downloads})


def changed(data_set: DataSet, **fields: object) -> DataSet:
    downloads = [download.model_copy(update=fields) for download in data_set.downloads]
    return data_set.model_copy(update={"downloads": downloads})


def test_truncated_downloads_resume(server, one, data):
    size = server.blobs["arguana.zip"].stat().st_size
    server.cuts["arguana.zip"] = [size, size, 100, 0, 200]
    assert run(data, {ONE: one}) == []
    assert [r for _, _, r in server.requests][2:] == [
        *("bytes=0-", "bytes=100-", "bytes=100-", "bytes=300-")
    ]
    assert server.sent["arguana.zip"] == size + 2  # two probes
    assert (data / "beir/arguana/corpus.jsonl").exists()


def test_interrupted_downloads_resume_in_the_next_run(server, one, data, monkeypatch):
    monkeypatch.setattr("examples.papers.downloads.fetch.NUM_TRIES", 1)
    server.cuts["arguana.zip"] = [1, 1, 100, 0]
    (problem,) = run(data, {ONE: one})
    assert "which broke off after 100 bytes" in problem and "run the command again" in problem
    assert not Revisions(str(data)).is_complete(ONE, one)
    server.requests.clear()
    assert run(data, {ONE: one}) == []
    assert [r for _, _, r in server.requests] == ["bytes=0-0", "bytes=0-0", "bytes=100-"]


def test_hashes_are_compared(server, one, data):
    right = f"md5:{file_hash(server.blobs['arguana.zip'], 'md5')}"
    wrong = changed(one, hash="md5:" + "0" * 32)
    (problem,) = run(data, {ONE: wrong})
    assert f"which has the hash {right} instead of md5:000" in problem
    assert run(data, {ONE: changed(one, hash=right)}) == []
    assert json.loads((data / "revisions.json").read_text())["data"][ONE] == {
        one.downloads[0].source: right
    }
    assert not Revisions(str(data)).is_complete(ONE, wrong)  # the pinned hash has changed


def test_sources_that_do_not_exist(server, one, data):
    (problem,) = run(data, {ONE: changed(one, url=f"{server.url}/no/such.zip")})
    assert problem.startswith(f"{ONE}: url must be") and "refused by the server" in problem
    (problem,) = run(data, {ONE: changed(one, url="http://127.0.0.1:9/a.zip")})
    assert "which cannot be reached (ConnectError)" in problem
    (problem,) = run(data, {"a": DataSet(files=["a"], downloads=[Download(hub="a/b", to="a")])})
    assert "'a/b', which is not a folder and does not exist on the hub" in problem


def test_damaged_archives_and_counts(server, one, data, tmp_path):
    server.blobs["arguana.zip"].write_bytes(b"no archive")
    (problem,) = run(data, {ONE: one})
    assert "must be an archive, got 'arguana.zip', which is damaged" in problem
    assert not Revisions(str(data)).is_complete(ONE, one)
    (problem,) = run(data, {ONE: changed(one, members={"nothing": "a"})})
    assert "damaged" in problem
    with hub.connected(None, tmp_path):
        shutil.copytree(ROOT / "jobs/data/cranfield", data / "beir/arguana")
        counted = one.model_copy(update={"counts": {"beir/arguana/qrels/test.tsv": 3}})
        (problem,) = obtain.verify(ONE, counted, data)
    assert "has 971 rows or files instead of 3" in problem


def test_members_stay_below_the_data_folder(server, one, data):
    (problem,) = run(data, {ONE: changed(one, members={"(.+)": "../../\\1"})})
    assert f"must be the path of a file in {data}" in problem
    (problem,) = run(data, {ONE: changed(one, members={"nothing": "a"})})
    assert "must be an archive with members that match nothing, got 'arguana.zip'" in problem


REPOSITORY = Download(hub="authors/pages", to="pages")


@pytest.fixture
def repository(server, tmp_path) -> DataSet:
    """A data set of one repository with two commits."""
    for number in range(2):
        folder = tmp_path / f"commit{number}"
        folder.mkdir()
        (folder / "a.jsonl").write_text("{}\n" * (number + 1))
        server.publish("authors/pages", folder, kind="datasets")
    return DataSet(files=["pages/a.jsonl"], downloads=[REPOSITORY])


def test_recorded_revisions_are_obtained_again(server, repository, data, tmp_path):
    first, second = server.repositories["datasets", "authors/pages"].commits
    pinned = changed(repository, revision=first)
    assert run(data, {"pages": pinned}) == []
    assert (data / "pages/a.jsonl").read_text() == "{}\n"
    shutil.rmtree(data / "pages")
    assert run(data, {"pages": repository}) == []  # not pinned: the recorded commit
    assert (data / "pages/a.jsonl").read_text() == "{}\n"
    (data / "revisions.json").unlink()
    shutil.rmtree(data / "pages")
    assert run(data, {"pages": repository}) == []
    assert Revisions(str(data)).data["pages"] == {"authors/pages": second}
    assert run(data, {"pages": pinned}) == []
    assert (data / "pages/a.jsonl").read_text() == "{}\n"


def test_files_that_differ_from_the_hub_are_downloaded_again(repository, data, monkeypatch):
    download = huggingface_hub.snapshot_download

    def damaging(*args, **kwargs):
        path = download(*args, **kwargs)
        if not kwargs.get("dry_run"):
            (Path(path) / "a.jsonl").write_text("damaged")
        return path

    with monkeypatch.context() as context:
        context.setattr("huggingface_hub.snapshot_download", damaging)
        (problem,) = run(data, {"pages": repository})
    assert "which has another hash than a.jsonl here; run the command again" in problem
    assert run(data, {"pages": repository}) == []
    assert (data / "pages/a.jsonl").read_text() == "{}\n" * 2


def test_data_placed_by_hand_are_not_downloaded(server, repository, data):
    (data / "pages").mkdir(parents=True)
    (data / "pages/a.jsonl").write_text("")
    assert run(data, {"pages": repository}) == [] and not server.sent


def test_nothing_is_downloaded_without_space(server, repository, data, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 1))
    with pytest.raises(Exception, match="--data must be on a disk with 0.0 GB of free space"):
        run(data, {"pages": repository})
    assert not any(server.sent.values()) and not (data / "pages/a.jsonl").exists()


# -- checkpoints -----------------------------------------------------------------------------------


def test_checkpoints(server, data, tmp_path, checkpoint):
    bert = Path(checkpoint("gte_modernbert"))
    commit = server.publish("authors/bert", bert)
    pickled = tmp_path / "pickled"
    shutil.copytree(bert, pickled)
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    server.publish("authors/pickled", pickled)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"base_model_name_or_path": "authors/bert", "peft_type": "LORA", "revision": None}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    shutil.copy(bert / "model.safetensors", adapter / "adapter_model.safetensors")
    server.publish("authors/adapter", adapter)
    names = ["authors/bert", "authors/pickled", "authors/adapter", "authors/none"]
    problems = run(data, {}, {name: Pin() for name in names})
    assert len(problems) == 1, problems
    assert problems[0].startswith("authors/none: hub must be a source")
    revisions = Revisions(str(data))
    assert revisions.models["authors/bert"] == commit and len(revisions.models) == 3
    converted = revisions.converted("authors/pickled")
    assert load_file(converted / "model.safetensors").keys()
    spec = {"a": [{"model": name, "dtype": "float32"} for name in names]}
    bert_spec, pickled_spec, _, none_spec = revisions.pin(spec, {})["a"]
    assert bert_spec == {"model": "authors/bert", "dtype": "float32", "revision": commit}
    assert pickled_spec == {"model": str(converted), "dtype": "float32", "revision": None}
    assert none_spec == spec["a"][3]
    sent = dict(server.sent)
    assert len(run(data, {}, {name: Pin() for name in names})) == 1 and server.sent == sent


def test_tables_load_pinned_commits():
    checkpoints = load_checkpoints(PAPERS)
    folders = Folders("/no/data", "/out", str(ROOT))
    for paper, name in KNOWN:
        steps = plan(load_table(PAPERS, paper, name), folders, False).steps
        for model, revision in models(steps).items():
            if model and not model.startswith(("/out", "/no/data")):
                assert model in checkpoints, f"{model} of {paper} {name} is not in models.yaml"
                assert revision == checkpoints[model].revision
