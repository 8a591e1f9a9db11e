"""Metrics of a run, as JSON lines and TensorBoard events."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any


class Metrics:
    """Writes `metrics.jsonl`, one line per call, and the same values as events in `tensorboard/`.

    Events are written only if the package tensorboardX is installed.

    Args:
        step: Step from which the run resumes. Events of later steps are discarded.
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

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Adds the metrics of a step."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
        if self._writer is not None:
            for name, value in metrics.items():
                # The library warns about each name with other characters.
                self._writer.add_scalar(re.sub(r"[^\w./-]+", "_", name), value, step)

    def close(self) -> None:
        """Flushes and closes the event file."""
        if self._writer is not None:
            self._writer.close()
