"""Checkpoints and trained models of a run. Both are written atomically."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch

from pipeline import config
from pipeline.config import JobError, SpecError
from pipeline.encoders.loading import hash_files
from pipeline.runtime import distributed
from pipeline.train.sharding import load_state, whole, whole_state
from pipeline.train.spec import TrainSpec

#: File with the step and the spec of a checkpoint.
METADATA = "metadata.json"
#: Fields of a run's spec that may differ between its start and its resumption.
MAY_CHANGE = (
    *("name", "output", "keep_last", "log_every", "checkpoint_every", "eval_every"),
    *("mini_batch_size", "fsdp", "activation_checkpointing"),
)


class Checkpoints:
    """Checkpoints of a training run.

    A checkpoint contains the trained weights, the optimiser state, the states of the random
    generators of all workers, and the step. The step determines the position in the data and the
    learning rate.
    """

    def __init__(self, spec: TrainSpec):
        self.folder, self.spec = Path(spec.output) / "checkpoints", spec

    def all(self) -> list[Path]:
        """Returns the complete checkpoints, oldest first."""
        return sorted(self.folder.glob("step-*"))

    def last(self) -> Path | None:
        """Returns the latest checkpoint, or None."""
        checkpoints = self.all()
        return checkpoints[-1] if checkpoints else None

    def save(self, step: int, learner: torch.nn.Module, optimiser: torch.optim.Optimizer) -> None:
        """Writes a checkpoint and removes the oldest ones, so that `keep_last` remain."""
        unfinished = self.folder / f".step-{step:08d}"
        if distributed.rank() == 0:
            unfinished.mkdir(parents=True, exist_ok=True)
        distributed.wait_for_all()
        device = next(learner.parameters()).device
        torch.save(random_state(device), unfinished / f"random-{distributed.rank()}.pt")
        with whole(learner):
            weights = trained_weights(learner)
        state = whole_state(optimiser)
        if distributed.rank() == 0:
            torch.save(weights, unfinished / "weights.pt")
            torch.save(state, unfinished / "optimiser.pt")
            metadata = {"step": step, "spec": self._lasting(config.dump(self.spec))}
            (unfinished / METADATA).write_text(json.dumps(metadata), "utf-8")
        distributed.wait_for_all()
        if distributed.rank() == 0:
            replace(unfinished, self.folder / f"step-{step:08d}")
            for old in self.all()[: -self.spec.keep_last]:
                shutil.rmtree(old)
        distributed.wait_for_all()

    def check_spec(self) -> None:
        """Raises `SpecError` if the latest checkpoint belongs to a run with another spec."""
        last = self.last()
        if last is not None:
            self._checked_metadata(last)

    def _checked_metadata(self, checkpoint: Path) -> dict[str, Any]:
        """Returns the metadata, or raises `SpecError` if they are of another run."""
        with _corruption_errors(checkpoint):
            metadata = json.loads((checkpoint / METADATA).read_text("utf-8"))
            stored = self._lasting(metadata["spec"])
        spec = self._lasting(config.dump(self.spec))
        for field, value, stored_value in differences(spec, stored):
            place = f"as in the checkpoint {checkpoint}, unless `output` is another folder"
            raise SpecError(field, value, f"{stored_value!r} {place}")
        return metadata

    def restore_weights(self, learner: torch.nn.Module) -> int:
        """Restores the weights of the latest checkpoint and returns its step, or 0 without one."""
        last = self.last()
        if last is None:
            return 0
        metadata = self._checked_metadata(last)
        with _corruption_errors(last):
            weights = torch.load(last / "weights.pt", map_location="cpu", weights_only=True)
        parameters = {n: p for n, p in learner.named_parameters() if p.requires_grad}
        shapes = {n: tuple(t.shape) for n, t in parameters.items()}
        shapes_there = {n: tuple(t.shape) for n, t in weights.items()}
        for name, ours, theirs in differences(shapes, shapes_there):
            rule = "a new folder or the output of a run of this model"
            problem = f"has a checkpoint of another model ({name}: {theirs} instead of {ours})"
            raise SpecError("output", self.spec.output, rule, problem)
        with torch.no_grad():
            for name, tensor in weights.items():
                parameters[name].copy_(tensor)
        return metadata["step"]

    def restore(self, optimiser: torch.optim.Optimizer, device: torch.device) -> None:
        """Restores the optimiser and the random generators from the latest checkpoint, if any."""
        last = self.last()
        if last is None:
            return
        random, random_state = last / f"random-{distributed.rank()}.pt", None
        with _corruption_errors(last):
            state = torch.load(last / "optimiser.pt", map_location="cpu", weights_only=True)
            if random.exists():  # there may be more workers than before
                random_state = torch.load(random, weights_only=True)
        load_state(optimiser, state)
        if random_state is not None:
            set_random_state(random_state, device)

    def keep_best(self, step: int, quality: dict[str, float], learner: Any) -> None:
        """Writes the model to `best/` if its first metric is the highest one so far."""
        best = self.folder.parent / "best"
        undo_half(best)
        named = best / "quality.json"
        first = next(iter(quality))
        if named.exists() and json.loads(named.read_text("utf-8"))[first] >= quality[first]:
            return

        def write(folder: Path) -> None:
            self._artefact(folder, learner)
            (folder / "quality.json").write_text(json.dumps({"step": step, **quality}), "utf-8")

        written(best, write)

    def publish(self, folder: Path, learner: Any) -> None:
        """Writes the trained model with the resolved spec of its run and hashes of its weights."""
        written(folder, lambda unfinished: self._artefact(unfinished, learner))

    def _artefact(self, folder: Path, learner: Any) -> None:
        learner.save(folder)
        metadata = {
            "spec": config.dump(self.spec),
            "sha256": hash_files(folder, ["*.safetensors"]),
        }
        (folder / "training.json").write_text(json.dumps(metadata, indent=1), "utf-8")

    @staticmethod
    def _lasting(spec: dict[str, Any]) -> dict[str, Any]:
        """Returns the fields of a spec that must not change for a run to resume, as JSON values."""
        fields = {k: v for k, v in spec.items() if k not in MAY_CHANGE}
        return json.loads(json.dumps(fields))


@contextlib.contextmanager
def _corruption_errors(checkpoint: Path) -> Iterator[None]:
    """Converts read errors to a `JobError` that contains the path of the checkpoint."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError, EOFError, pickle.UnpicklingError) as error:
        problem = f"the checkpoint {checkpoint} is corrupted ({config.first_line(error)})"
        remedy = "remove it to resume from the previous one or to start over"
        raise JobError(f"{problem}: {remedy}") from None


def only_one(folder: Path, seconds: float = 10.0) -> TextIO:
    """Locks the output folder of a run, waiting `seconds`, until the returned file is closed."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / ".lock").open("w")
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except (BlockingIOError, PermissionError):
            if time.monotonic() > deadline:
                rule = "a folder without a running job"
                raise SpecError("output", str(folder), rule, "is in use by another run") from None
            time.sleep(0.2)
        except OSError:  # a file system without locks
            return file


def differences(one: Any, other: Any, above: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields the dotted name and both values of each field in which two specs differ.

    >>> list(differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}))
    [('a.c', 2, 3)]
    """
    if isinstance(one, dict) and isinstance(other, dict):
        for field in one | other:
            yield from differences(one.get(field), other.get(field), f"{above}{field}.")
    elif one != other:
        yield above.removesuffix("."), one, other


def trained_weights(learner: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the trainable parameters by name, on the CPU."""
    return {
        name: parameter.detach().cpu()
        for name, parameter in learner.named_parameters()
        if parameter.requires_grad
    }


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Returns the states of the random generators, by device type."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Restores the states that `random_state` returned."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def written(folder: Path, write: Callable[[Path], None]) -> None:
    """Writes a folder under a temporary name and renames it when it is complete."""
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    write(unfinished)
    replace(unfinished, folder)


def replace(unfinished: Path, folder: Path) -> None:
    """Renames a complete folder, replacing an existing one."""
    undo_half(folder)
    old = _old(folder)
    if folder.exists():
        folder.rename(old)
    unfinished.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def undo_half(folder: Path) -> None:
    """Restores a folder whose replacement was interrupted."""
    if folder.exists():
        shutil.rmtree(_old(folder), ignore_errors=True)
    elif _old(folder).exists():
        _old(folder).rename(folder)


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")
