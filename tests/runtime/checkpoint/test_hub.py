"""Checkpoints from a local hub through the real client of the hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub.constants import DOWNLOAD_CHUNK_SIZE as BLOCK

from pipeline.config import SpecError
from pipeline.runtime.checkpoint import find_checkpoint
from tests import hub

FILES = ["*.json", "*.safetensors"]
WEIGHTS = "model.safetensors"
NAME = "authors/model"


@pytest.fixture
def server(tmp_path):
    (tmp_path / "hub").mkdir()
    with hub.serve(tmp_path / "hub") as server, hub.connected(server, tmp_path / "cache"):
        yield server


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"version": 0}))
    (folder / WEIGHTS).write_bytes(bytes(range(256)) * 4096)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    return folder


def find(model=NAME, revision=None, files=FILES):
    return find_checkpoint(model, revision, files, "a model")


def version(folder: Path) -> int:
    return json.loads((folder / "config.json").read_text())["version"]


def test_downloads_the_named_files_once(server, source):
    server.publish(NAME, source)
    folder = find()
    assert {path.name for path in folder.iterdir()} == {"config.json", WEIGHTS}
    assert (folder / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()
    sent = dict(server.sent)
    assert find() == folder and server.sent == sent


def test_offline_afterwards(server, source, tmp_path):
    commit = server.publish(NAME, source, "main", "v1")
    folder = find()
    find(revision="v1")
    with hub.connected(None, tmp_path / "cache"):
        assert find() == find(revision="v1") == find(revision=commit) == folder
        with pytest.raises(SpecError, match="offline"):
            find(revision="v2")
        with pytest.raises(SpecError, match="offline"):
            find(files=["*.bin"])


def test_the_cache_if_the_hub_stops(server, source):
    server.publish(NAME, source)
    folder = find()
    server.shutdown()
    server.server_close()
    assert find() == folder


def test_revisions(server, source):
    commits = []
    for number, ref in enumerate(["v1", "refs/pr/7", "main"]):
        (source / "config.json").write_text(json.dumps({"version": number}))
        commits.append(server.publish(NAME, source, ref))
    assert [version(find(revision=ref)) for ref in ("v1", "refs/pr/7", None)] == [0, 1, 2]
    assert [version(find(revision=commit)) for commit in commits] == [0, 1, 2]
    assert find(revision="main") == find()


@pytest.mark.parametrize("revision", ["v2", "0" * 40, "refs/pr/1"])
def test_a_revision_that_does_not_exist(server, source, revision):
    server.publish(NAME, source)
    with pytest.raises(SpecError, match="does not exist on the hub") as caught:
        find(revision=revision)
    assert (caught.value.field, caught.value.value) == ("revision", revision)


def test_a_cut_connection_is_resumed(server, source):
    """The client continues after its last complete block."""
    (source / WEIGHTS).write_bytes(bytes(range(256)) * (5 * BLOCK // 512))
    server.publish(NAME, source)
    server.cuts[WEIGHTS] = [BLOCK + 1000, BLOCK + 1000]
    folder = find()
    assert (folder / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()
    ranges = [requested for _, path, requested in server.requests if "blobs" in path]
    assert ranges == [None, f"bytes={BLOCK}-", f"bytes={2 * BLOCK}-"]


def test_complete_files_are_kept(server, source):
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (source / name).write_bytes(name.encode() * 50)
    server.publish(NAME, source)
    server.short = {"model-2.safetensors"}
    with pytest.raises(SpecError):
        find()
    server.short, sent = set(), dict(server.sent)
    find()
    assert server.sent["model-1.safetensors"] == sent["model-1.safetensors"] > 0
    assert server.sent["model-2.safetensors"] > sent["model-2.safetensors"]


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_truncated_file_is_not_kept(server, source, name):
    server.publish(NAME, source)
    server.short = {name}
    with pytest.raises(SpecError, match="downloaded incompletely"):
        find()
    server.short = set()
    assert (find() / name).read_bytes() == (source / name).read_bytes()


def test_a_connection_that_is_always_cut(server, source, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    server.publish(NAME, source)
    server.cuts["config.json"] = [3] * 100
    with pytest.raises(SpecError, match=r"cannot be loaded from the hub \(RemoteProtocolError\)"):
        find()


def test_a_repository_without_a_model(server, tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source/model.gguf").write_bytes(b"GGUF")
    server.publish(NAME, tmp_path / "source")
    with pytest.raises(SpecError, match="has no config.json on the hub"):
        find(files=["config.json"])


def test_a_gated_model(server, source, monkeypatch):
    server.publish(NAME, source, gated=True)
    for token in ("", "hf_another"):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(SpecError, match="is gated") as caught:
            find()
        assert "hf auth login" in str(caught.value) and "\n" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", hub.TOKEN)
    assert (find() / WEIGHTS).is_file()


@pytest.mark.parametrize("token", ["", hub.TOKEN])
def test_a_model_that_does_not_exist(server, source, monkeypatch, token):
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(SpecError, match="does not exist on the hub; if it is private") as caught:
        find()
    assert "offline" not in str(caught.value)
    server.publish(NAME, source, kind="datasets")
    with pytest.raises(SpecError, match="is a data set"):
        find()


def test_a_hub_that_cannot_be_reached(server, source):
    server.publish(NAME, source)
    server.shutdown()
    server.server_close()
    with pytest.raises(SpecError, match="offline"):
        find()
