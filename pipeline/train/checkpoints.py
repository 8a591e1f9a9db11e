"""Checkpoints of a run, and the model that comes out of it: each there whole or not at all."""

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

from pipeline import config, distributed
from pipeline.config import JobError, SpecError
from pipeline.encoders.loading import hashed
from pipeline.train.sharding import load_state, whole, whole_state
from pipeline.train.spec import TrainSpec

#: Fields of a run's spec that may differ between its start and its resumption.
MAY_CHANGE = (
    *("name", "output", "keep", "log_every", "checkpoint_every", "evaluate_every"),
    *("part_size", "shard", "recompute"),
)


class Checkpoints:
    """The checkpoints in a folder, of one run.

    A checkpoint has the trained weights, the state of the optimiser, the states of every worker's
    random generators, and the step, from which the place in the data and the learning rate follow.
    """

    def __init__(self, folder: Path, spec: TrainSpec):
        self.folder, self.spec = folder, spec

    def all(self) -> list[Path]:
        """The finished ones, the oldest first."""
        return sorted(self.folder.glob("step-*"))

    def last(self) -> Path | None:
        """The latest, if there is one."""
        checkpoints = self.all()
        return checkpoints[-1] if checkpoints else None

    def save(self, step: int, learner: torch.nn.Module, optimiser: torch.optim.Optimizer) -> None:
        """Writes a checkpoint, and removes those that need not be kept."""
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
            about = {"step": step, "spec": self._lasting()}
            (unfinished / "about.json").write_text(json.dumps(about), "utf-8")
        distributed.wait_for_all()
        if distributed.rank() == 0:
            replace(unfinished, self.folder / f"step-{step:08d}")
            for old in self.all()[: -self.spec.keep]:
                shutil.rmtree(old)
        distributed.wait_for_all()

    def restore_weights(self, learner: torch.nn.Module) -> int:
        """Brings weights to the state of the latest checkpoint; gives its step, 0 if none is.

        Raises:
            SpecError: it is one of another run.
        """
        last = self.last()
        if last is None:
            return 0
        with _undamaged(last):
            about = json.loads((last / "about.json").read_text("utf-8"))
            weights = torch.load(last / "weights.pt", map_location="cpu", weights_only=True)
        for field, own, there in differences(self._lasting(), about["spec"]):
            rule = f"{there!r} as in the checkpoint {last}, unless `output` is another folder"
            raise SpecError(field, own, rule)
        own = {n: p for n, p in learner.named_parameters() if p.requires_grad}
        shapes = {n: tuple(t.shape) for n, t in own.items()}
        shapes_there = {n: tuple(t.shape) for n, t in weights.items()}
        for name, ours, theirs in differences(shapes, shapes_there):
            rule = "a new folder or the output of a run of this model"
            problem = f"has a checkpoint of another model ({name}: {theirs} instead of {ours})"
            raise SpecError("output", self.spec.output, rule, problem)
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(tensor)
        return about["step"]

    def restore(self, optimiser: torch.optim.Optimizer, device: torch.device) -> None:
        """Brings everything else to the state of the latest checkpoint, if there is one."""
        last = self.last()
        if last is None:
            return
        with _undamaged(last):
            state = torch.load(last / "optimiser.pt", map_location="cpu", weights_only=True)
        load_state(optimiser, state)
        own_random = last / f"random-{distributed.rank()}.pt"
        if own_random.exists():  # there may be more workers than before
            set_random_state(torch.load(own_random, weights_only=True), device)

    def keep_best(self, step: int, quality: dict[str, float], learner: Any) -> None:
        """Writes the model as `best/` if its first figure is the highest so far."""
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
        """Writes the trained artefact with its run's resolved spec and hashes of its weights."""
        written(folder, lambda unfinished: self._artefact(unfinished, learner))

    def _artefact(self, folder: Path, learner: Any) -> None:
        learner.save(folder)
        about = {
            "spec": config.dump(self.spec),
            "sha256": hashed(folder, ["*.safetensors"]),
        }
        (folder / "training.json").write_text(json.dumps(about, indent=1), "utf-8")

    def _lasting(self) -> dict[str, Any]:
        """What of the spec has to be the same for a run to go on, as JSON has it."""
        fields = {k: v for k, v in config.dump(self.spec).items() if k not in MAY_CHANGE}
        return json.loads(json.dumps(fields))


@contextlib.contextmanager
def _undamaged(checkpoint: Path) -> Iterator[None]:
    """What cannot be read inside is an error of the checkpoint."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError, EOFError, pickle.UnpicklingError) as error:
        said = f"the checkpoint {checkpoint} is corrupted ({config.first_line(error)})"
        before = "remove it to resume from the previous one or to start over"
        raise JobError(f"{said}: {before}") from None


def only_one(folder: Path, seconds: float = 10.0) -> TextIO:
    """Keeps other processes from writing a run's folder, until what is given is closed.

    Args:
        seconds: another process may take to end.

    Raises:
        SpecError: for `output`: another process writes it.
    """
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
    """Where two specs differ: the dotted field and both values.

    >>> list(differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}))
    [('a.c', 2, 3)]
    """
    if isinstance(one, dict) and isinstance(other, dict):
        for field in one | other:
            yield from differences(one.get(field), other.get(field), f"{above}{field}.")
    elif one != other:
        yield above.removesuffix("."), one, other


def trained_weights(learner: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that are trained, by name, on the CPU."""
    return {
        name: parameter.detach().cpu()
        for name, parameter in learner.named_parameters()
        if parameter.requires_grad
    }


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of the generators that dropout draws from."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """The inverse of `random_state`."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def written(folder: Path, write: Callable[[Path], None]) -> None:
    """Writes a folder under another name and renames it."""
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    write(unfinished)
    replace(unfinished, folder)


def replace(unfinished: Path, folder: Path) -> None:
    """Gives a folder its name, in the place of one that may be there."""
    undo_half(folder)
    old = _old(folder)
    if folder.exists():
        folder.rename(old)
    unfinished.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def undo_half(folder: Path) -> None:
    """Gives a folder its name back that a process was about to replace when it was killed."""
    if folder.exists():
        shutil.rmtree(_old(folder), ignore_errors=True)
    elif _old(folder).exists():
        _old(folder).rename(folder)


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")
