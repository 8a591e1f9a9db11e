"""Checkpoints of a run, and replacing folders."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from pipeline.config import JobError, SpecError
from pipeline.train.checkpoints import replace, undo_half
from tests.tiny import untrained as tiny
from tests.train.runs import spec_of, trained


def test_rejects_checkpoint_of_another_run(model, tmp_path):
    trained(spec_of(tmp_path, model))
    with pytest.raises(SpecError, match="seed must be 0 as in the checkpoint .*, got 1"):
        trained(spec_of(tmp_path, model, seed=1))
    with pytest.raises(SpecError, match=r"learner.temperature must be .*0.2"):
        trained(spec_of(tmp_path, model, {"temperature": 0.2}))
    trained(spec_of(tmp_path, model, log_every=5))  # changes nothing that is learned


def test_rejects_checkpoint_of_another_backbone(checkpoint, tmp_path):
    shutil.copytree(checkpoint("colpali"), tmp_path / "model")
    spec = spec_of(tmp_path / "run", str(tmp_path / "model"))
    trained(spec)
    shutil.rmtree(tmp_path / "model")
    tiny.colpali(tmp_path / "model")
    with pytest.raises(
        SpecError,
        match=r"output must be .*has a checkpoint of another model"
        r" .* instead of",
    ):
        trained(spec)


class Code:
    """Object that creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self._path = path

    def __reduce__(self):
        return Path.touch, (self._path,)


@pytest.mark.parametrize("name", ["weights.pt", "optimiser.pt", "random-0.pt"])
def test_pickled_code_is_not_executed(model, tmp_path, name):
    spec = spec_of(tmp_path / "run", model, checkpoint_every=5, keep_last=1)
    trained(spec)
    (file,) = (tmp_path / "run/checkpoints").glob(f"*/{name}")
    torch.save({"0": Code(tmp_path / "executed")}, file)
    with pytest.raises(JobError, match="is corrupted"):
        trained(spec)
    assert not (tmp_path / "executed").exists()


def test_keeps_the_newest_checkpoints(model, tmp_path):
    trained(spec_of(tmp_path, model, checkpoint_every=1, keep_last=2))
    checkpoints = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert checkpoints == ["step-00000005", "step-00000006"]


def test_interrupted_replacement_is_undone(tmp_path):
    (tmp_path / ".best.old").mkdir()  # killed between two renamings
    (tmp_path / "new").mkdir()
    (tmp_path / ".best.old" / "good").touch()
    undo_half(tmp_path / "best")
    assert (tmp_path / "best" / "good").exists() and not (tmp_path / ".best.old").exists()
    replace(tmp_path / "new", tmp_path / "best")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best"]
    assert not list((tmp_path / "best").iterdir())
