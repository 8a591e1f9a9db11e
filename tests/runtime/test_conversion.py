"""Conversion of pickled weights, and files that are no weights or contain code."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertForMaskedLM

from pipeline.config import SpecError
from pipeline.encoders.edje.joint import JointEncoder
from pipeline.encoders.loading import bundled_folder
from pipeline.encoders.open_clip import convert_to_clip
from pipeline.registry import ENCODERS
from pipeline.runtime import conversion, unpickle
from tests import hub
from tests.images import make_images


def convert(folder: Path | str, output: Path) -> list[str]:
    lines: list[str] = []
    conversion.convert(str(folder), str(output), None, convert_to_clip, lines.append)
    return lines


@pytest.fixture
def in_process(monkeypatch) -> None:
    """Converts files in this process; another imports torch, which takes two seconds."""

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess:
        *_, source, target, _ = command
        try:
            reply = unpickle.convert(source, target)
        except Exception as error:
            reply = {"error": unpickle.reason(error)}
        return subprocess.CompletedProcess(command, 0, json.dumps(reply), "")

    monkeypatch.setattr("pipeline.runtime.conversion.subprocess.run", run)


def message(folder: Path | str, output: Path) -> str:
    """Returns the error of a conversion, which must leave nothing behind."""
    with pytest.raises(SpecError) as caught:
        convert(folder, output)
    assert not list(output.parent.glob(f"*{output.name}*")) and "\n" not in str(caught.value)
    return str(caught.value)


def checkpoint_with(folder: Path, weights: object, **options: object) -> Path:
    """Writes a folder with a file of torch.save."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    torch.save(weights, folder / "pytorch_model.bin", **options)
    return folder


def pickled(source: str, folder: Path, shards: int = 1) -> Path:
    """Copies a checkpoint with weights as transformers saved them before safetensors."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if shards == 1:
        torch.save(weights, folder / "pytorch_model.bin")
        return folder
    names = {i: f"pytorch_model-{i + 1:05}-of-{shards:05}.bin" for i in range(shards)}
    places = {name: names[i % shards] for i, name in enumerate(weights)}
    for shard in names.values():
        torch.save({n: w for n, w in weights.items() if places[n] == shard}, folder / shard)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("shards", [1, 3])
def test_converted_models_have_equal_vectors(checkpoint, tmp_path, shards):
    folder = pickled(checkpoint("clip"), tmp_path / "pickled", shards)
    (folder / "training_args.bin").write_bytes(b"not read")
    lines = convert(folder, tmp_path / "new")
    assert len(lines) == shards + 1 and lines[0].startswith("converted pytorch_model")
    _, items = make_images((40, 60))
    vectors = []
    for model in (checkpoint("clip"), str(tmp_path / "new")):
        spec = ENCODERS.resolve({"name": "dual", "model": model, "dtype": "float32"})
        ENCODERS.load("dual").check(spec)
        ((_, batch),) = ENCODERS.build(spec).encode(items)
        vectors.append(batch.vectors)
    assert torch.equal(*vectors)
    files = {path.name for path in (tmp_path / "new").iterdir()}
    assert not [name for name in files if name.startswith("pytorch_model")]
    assert {"config.json", "training_args.bin"} < files


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before torch 1.6"])
def test_shared_and_unusual_tensors(tmp_path, is_zip):
    matrix = torch.randn(100, 30)
    weights = OrderedDict(
        matrix=matrix,
        tied=matrix,
        rows=matrix[10:20],
        transposed=matrix.T,
        half=torch.ones(3, dtype=torch.bfloat16),
        empty=torch.empty(0, 4),
        scalar=torch.tensor(2),
        parameter=torch.nn.Parameter(torch.ones(2)),
    )
    folder = checkpoint_with(tmp_path / "pickled", weights, _use_new_zipfile_serialization=is_zip)
    lines = convert(folder, tmp_path / "new")
    assert lines[0].endswith("model.safetensors: 8 tensors (3 shared memory)")
    found = load_file(tmp_path / "new/model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert found["half"].dtype == torch.bfloat16


@pytest.mark.usefixtures("in_process")
def test_language_model_of_edje(tmp_path):
    """A file as that of MiniLM-L12: before torch 1.6, tied weights, former names of LayerNorm."""
    folder = tmp_path / "pickled"
    folder.mkdir()
    for path in bundled_folder().glob("*token*"):
        shutil.copy(path, folder)
    settings = BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    settings.save_pretrained(folder)
    expected = BertForMaskedLM(settings).state_dict()
    weights = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("Norm.bias", "Norm.beta"): value
        for name, value in expected.items()
    }
    torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(SpecError, match="convert it with `maxray convert"):
        JointEncoder.check(JointEncoder.Spec(model=str(folder)))
    convert(folder, tmp_path / "new")
    joint = JointEncoder(JointEncoder.Spec(model=str(tmp_path / "new"), dtype="float32"), 16)
    found = joint.language.state_dict()
    assert all(torch.equal(found[name].cpu(), expected[name]) for name in expected)


@pytest.mark.usefixtures("in_process")
def test_downloads_one_format_of_a_model_on_the_hub(checkpoint, tmp_path):
    folder = pickled(checkpoint("clip"), tmp_path / "pickled")
    names = ["open_clip_model.safetensors", "open_clip_pytorch_model.bin", "tf_model.h5"]
    for name in ("open_clip_config.json", *names, "flax_model.msgpack", "onnx/model.onnx"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    (tmp_path / "hub").mkdir()
    with hub.serve(tmp_path / "hub") as server, hub.connected(server, tmp_path / "cache"):
        server.publish("authors/pickled", folder)
        server.publish("authors/safe", checkpoint("clip"))
        convert("authors/pickled", tmp_path / "new")
        text = message("authors/safe", tmp_path / "other")
    assert text.endswith("got 'authors/safe', which has neither")
    assert {name for name in server.sent if "model" in name} == {"pytorch_model.bin"}
    assert (tmp_path / "new/model.safetensors").is_file()


@pytest.mark.usefixtures("in_process")
def test_other_files(tmp_path):
    """An adapter, modules in subfolders, a state dict within the file, hidden files."""
    folder = tmp_path / "pickled"
    for name in ("adapter_model.bin", "1_Dense/pytorch_model.bin", "notes/README.md", ".git/HEAD"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save({"state_dict": {"a": torch.ones(1)}}, folder / name)
    convert(folder, tmp_path / "new")
    files = {str(p.relative_to(tmp_path / "new")) for p in (tmp_path / "new").rglob("*.*")}
    assert files == {"adapter_model.safetensors", "1_Dense/model.safetensors", "notes/README.md"}


class Creates:
    """Object that creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("form", ["zip", "legacy", "plain"])
def test_pickled_code_is_not_executed(tmp_path, form, request):
    weights = {"a": Creates(tmp_path / "executed")}
    folder = checkpoint_with(
        tmp_path / "model", weights, _use_new_zipfile_serialization=form == "zip"
    )
    if form == "plain":
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(weights))
    if form == "legacy":
        request.getfixturevalue("in_process")
    text = message(folder, tmp_path / "new")
    assert text.startswith("model must be a checkpoint whose pickled weights are only tensors")
    assert not (tmp_path / "executed").exists()
    if form != "plain":
        assert "refers to posix.mkdir (which was not executed)" in text


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ({"a": torch.zeros(1).expand(10**9, 100)}, "needs more memory than its size explains"),
        ({"step": 3}, "has 'step', which is not a dense tensor"),
        ({"a": torch.ones(2).to_sparse()}, "has 'a', which is not a dense tensor"),
        ([torch.ones(2)], "has no mapping of weights"),
        (torch.nn.Linear(2, 2), "refers to torch.nn.modules.linear.Linear (which was not execu"),
    ],
    ids=["bomb", "number", "sparse", "list", "module"],
)
def test_rejects_files_that_are_not_weights(tmp_path, weights, problem, request):
    folder = checkpoint_with(tmp_path / "model", weights)
    if "memory" not in problem:  # which the process limits
        request.getfixturevalue("in_process")
    assert f"has pytorch_model.bin, which {problem}" in message(folder, tmp_path / "new")


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("content", [b"", b"\x80\x02", bytes(range(256)), None])
def test_rejects_corrupted_files(tmp_path, content):
    folder = checkpoint_with(tmp_path / "model", {"a": torch.ones(1000)})
    path = folder / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:2000] if content is None else content)
    problem = "which is truncated, or was not written by torch.save"
    assert problem in message(folder, tmp_path / "new")


def test_rejects_folders_without_pickles(checkpoint, tmp_path):
    text = message(Path(checkpoint("clip")), tmp_path / "new")
    assert text.startswith("model must be a checkpoint with pickled weights or of OpenCLIP")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/pytorch_model.bin").write_text("version https://git-lfs.github.com/spec/v1")
    assert "a git-lfs pointer in place of pytorch_model.bin" in message(
        tmp_path / "model", tmp_path / "new"
    )


@pytest.mark.usefixtures("in_process")
def test_rejects_missing_shards(checkpoint, tmp_path):
    folder = pickled(checkpoint("clip"), tmp_path / "pickled", shards=2)
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    text = message(folder, tmp_path / "new")
    assert "has no model-00002-of-00002.safetensors, which its model.safetensors.index" in text
    (folder / "pytorch_model.bin.index.json").write_text("{}")
    text = message(folder, tmp_path / "new")
    assert text.startswith("model must be a checkpoint with a valid index of shards")


def test_keeps_an_existing_output(checkpoint, tmp_path):
    folder = pickled(checkpoint("clip"), tmp_path / "pickled")
    (tmp_path / "new").mkdir()
    (tmp_path / "new/file").touch()
    with pytest.raises(SpecError, match="^output must be the path of a new folder"):
        convert(folder, tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file"]
    with pytest.raises(SpecError, match="which is a URI"):
        conversion.convert(str(folder), "s3://bucket/new", None, convert_to_clip, print)


@pytest.mark.parametrize("size", [100, 20_000], ids=["settings", "weights"])
def test_a_full_disk(checkpoint, tmp_path, size):
    """A limit of the size of files has the same effect."""
    folder = pickled(checkpoint("clip"), tmp_path / "pickled")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        with pytest.raises(SpecError, match="cannot be written"):
            convert(folder, tmp_path / "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["pickled"]


def test_the_process_has_no_network(tmp_path):
    """Skipped where the system does not allow processes to leave the network."""
    code = "from pipeline.runtime.unpickle import leave_network; leave_network();"
    code += "import socket; print([name for _, name in socket.if_nameindex()])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if "lo" in done.stdout and "," in done.stdout:
        pytest.skip("no permission to create a network namespace")
    assert done.stdout == "['lo']\n"  # which is down
