"""Figures of a run, for programs and for TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Metrics:
    """Writes `metrics.jsonl`, a line a measurement, and the same as events in `tensorboard/`.

    Without the package tensorboardX there are no events.

    Args:
        folder: of the run.
        step: from which it goes on: what events there are of later steps no longer counts.
    """

    def __init__(self, folder: Path, step: int):
        self._path = folder / "metrics.jsonl"
        self._writer: Any = None
        folder.mkdir(parents=True, exist_ok=True)
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            return
        events = str(folder / "tensorboard")
        self._writer = SummaryWriter(events, purge_step=step + 1, flush_secs=10)

    def add(self, step: int, figures: dict[str, float]) -> None:
        """Adds what was measured at a step."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **figures}) + "\n")
        if self._writer is not None:
            for name, value in figures.items():
                # The library would say of each name that it cannot have an @ or a space.
                self._writer.add_scalar(name.replace("@", "_").replace(" ", "_"), value, step)

    def close(self) -> None:
        """Writes what waits."""
        if self._writer is not None:
            self._writer.close()
