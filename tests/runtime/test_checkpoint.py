"""Checkpoint folders as users have them by mistake, and the sentence that each of them gets."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from transformers import CLIPModel

from pipeline.config import SpecError
from pipeline.registry import ENCODERS
from pipeline.runtime.checkpoint import check_folder, check_safetensors, find_checkpoint

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 90868376\n".format(
    "a" * 64
)


@pytest.fixture
def folder(checkpoint, tmp_path) -> Path:
    """A copy of a tiny CLIP that a test may modify."""
    shutil.copytree(checkpoint("clip"), tmp_path / "model")
    return tmp_path / "model"


def message(folder: Path, encoder: str = "dual", **fields) -> str:
    """Returns the error of checking a spec with a folder, which must be one of a field."""
    spec = ENCODERS.resolve({"name": encoder, "model": str(folder), **fields})
    with pytest.raises(SpecError) as caught:
        ENCODERS.load(encoder).check(spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def shard(folder: Path) -> list[Path]:
    """Saves the weights of a checkpoint in several files."""
    model = CLIPModel.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    return sorted(folder.glob("*.safetensors"))


def test_sharded_weights(folder):
    assert len(shard(folder)) > 2
    check_safetensors("model", folder)


def test_missing_shard(folder):
    shard(folder)[1].unlink()
    assert "has no model-00002-of-" in message(folder)
    assert "which its model.safetensors.index.json lists; download it again" in message(folder)


def test_missing_index(folder):
    shard(folder)
    (folder / "model.safetensors.index.json").unlink()
    assert "has no model.safetensors.index.json, which lists its files" in message(folder)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": []}'])
def test_corrupted_index(folder, index):
    (folder / "model.safetensors.index.json").write_text(index)
    assert "has an invalid model.safetensors.index.json" in message(folder)


@pytest.mark.parametrize("size", [0, 4, 1000, -1])
def test_truncated_weights(folder, size):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert "has a truncated or corrupted model.safetensors" in message(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_git_lfs_pointer(folder, name):
    (folder / name).write_text(POINTER)
    text = message(folder)
    assert f"has a git-lfs pointer in place of {name}; run `git lfs pull` there" in text


def test_pickled_weights(folder):
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    torch.save({}, folder / "training_args.bin")
    text = message(folder)
    assert "has no safetensors file to load, only pytorch_model.bin; " in text
    assert text.endswith(f"convert it with `maxray convert {folder} FOLDER` and use FOLDER")


def test_empty_folder(tmp_path):
    assert message(tmp_path).endswith("which is an empty folder")


def test_file(folder):
    text = message(folder / "model.safetensors")
    assert text.endswith("which is a file; use the folder that contains it")


def test_checkpoint_one_level_below(folder, tmp_path):
    folder.rename(tmp_path / "checkpoint-500")
    text = message(tmp_path)
    assert text.endswith(f"which has no config.json; use {tmp_path / 'checkpoint-500'}")


def test_weights_one_level_below(folder):
    (folder / "weights").mkdir()
    (folder / "model.safetensors").rename(folder / "weights/model.safetensors")
    assert message(folder).endswith(f"has no safetensors file; use {folder / 'weights'}")


def test_adapter_one_level_below(folder, tmp_path):
    (tmp_path / "run/checkpoint-20").mkdir(parents=True)
    (tmp_path / "run/checkpoint-20/adapter_config.json").write_text("{}")
    text = message(folder, adapter=str(tmp_path / "run"))
    assert text.startswith("adapter must be")
    assert text.endswith(f"has no adapter_config.json; use {tmp_path / 'run/checkpoint-20'}")


def test_pickled_adapter(folder, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    torch.save({}, tmp_path / "adapter_model.bin")
    text = message(folder, adapter=str(tmp_path))
    assert text.startswith("adapter must be") and "only adapter_model.bin" in text
    assert f"`maxray convert {tmp_path} FOLDER`" in text


def test_folder_of_open_clip(tmp_path):
    (tmp_path / "open_clip_config.json").write_text("{}")
    text = message(tmp_path)
    assert f"is a checkpoint of OpenCLIP; convert it with `maxray convert {tmp_path} F" in text


def test_revision_of_a_folder(folder):
    text = message(folder, revision="main")
    assert text == "revision must be null if model is a folder, which has none, got 'main'"


def test_complete_folder(folder):
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    (folder / "onnx").mkdir()
    check_folder("model", folder)
    check_safetensors("model", folder)


def test_incomplete_model_in_the_cache(tmp_path, monkeypatch):
    """A download that ended early, without network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    commit = "a" * 40
    snapshot = tmp_path / "models--a--b" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (tmp_path / "models--a--b" / "refs").mkdir()
    (tmp_path / "models--a--b" / "refs" / "main").write_text(commit)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "mystery"}))
    folder = find_checkpoint("a/b", None, ["config.json"], "a model")
    assert folder == snapshot
    with pytest.raises(SpecError, match="has no safetensors file"):
        check_safetensors("a/b", folder)
