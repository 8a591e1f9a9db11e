"""The command that converts checkpoints."""

from __future__ import annotations

import subprocess
import sys

import torch

from tests.conftest import ROOT


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jobs.convert", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_converts_and_rejects(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    torch.save({"a": torch.ones(2)}, folder / "adapter_model.bin")
    done = run(str(folder), str(tmp_path / "new"))
    assert done.returncode == 0, done.stderr
    assert "converted adapter_model.bin to adapter_model.safetensors: 1 tensors" in done.stdout
    assert (tmp_path / "new/adapter_config.json").is_file()
    again = run(str(folder), str(tmp_path / "new"))
    assert again.returncode == 2
    assert again.stderr == (
        f"error: output must be the path of a new folder, got '{tmp_path / 'new'}', which exists\n"
    )
    nothing = run("no/such", str(tmp_path / "other"))
    assert nothing.returncode == 2 and nothing.stderr.startswith("error: model must be")
    assert nothing.stderr.count("\n") == 1
