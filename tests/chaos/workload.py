"""Jobs under test: a small corpus, the specs of the jobs, and their undisturbed results."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers.utils.logging import disable_progress_bar

from pipeline import config
from pipeline.encoders.edje.adapter import Adapter
from pipeline.encoders.edje.joint import JointEncoder
from pipeline.encoders.edje.model import Edje
from pipeline.registry import ENCODERS
from pipeline.runtime.atomic import write_atomic
from tests.chaos.compare import Contents, contents
from tests.tiny import SLEEPING
from tests.tiny import untrained as tiny

#: Items of the corpus; one has no text, and one more line repeats an id.
NUM_ITEMS = 200
#: Width of the vectors of the encoder that sleeps.
DIM = 32
ENCODER = {
    "class": SLEEPING,
    "seconds": 0.06,
    "batch_size": 2,
    "num_tokens": 8,
    "dim": DIM,
}
RESIDUAL = {"name": "residual", "num_centroids": 16}


@dataclass(frozen=True)
class Workload:
    """Files of the jobs under test.

    Attributes:
        folder: Folder with the corpus, the specs and the undisturbed indexes.
    """

    folder: Path

    def write(self) -> None:
        """Writes the corpus, the specs and the model for `maxray add tokens`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        texts = [{"_id": i, "text": text} for i, text in corpus().items()]
        lines = [json.dumps(text) for text in [*texts, texts[0]]]
        (self.folder / "corpus.jsonl").write_text("\n".join(lines), "utf-8")
        self._write_spec("index", index_spec(self.folder))
        more = [
            {"compressor": {"name": "hpool", "num_vectors": 2}},
            {"compressor": {"name": "random", "num_vectors": 3}, "codec": RESIDUAL},
        ]
        self._write_spec(
            "recompress", {"index": "unset", "representations": more, "commit_fragments": 3}
        )
        pools = {"read": 0.1, "encode": 0.5, "write": 0.1, "compress": 0.5}
        pool = {name: {"num_cpus": cpus, "num_threads": 1} for name, cpus in pools.items()}
        reading = {**pool["read"], "max_actors": 1}
        self._write_spec(
            "index_resources", {"read": reading, "encode": pool["encode"], "write": pool["write"]}
        )
        self._write_spec("recompress_resources", {"compress": pool["compress"]})
        fitting = {"fit": pool["encode"], "encode": pool["encode"]}
        self._write_spec("candidates_resources", fitting)
        if not (self.folder / "edje").exists():
            _write_edje(self.folder)

    def _write_spec(self, name: str, fields: dict[str, Any]) -> None:
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(fields), "utf-8")

    def command(self, job: str, index: Path) -> list[str]:
        """Returns the arguments of `python -m` for a job on an index."""
        spec, resources = (str(self.folder / f"{job}{kind}.yaml") for kind in ("", "_resources"))
        arguments = {
            "index": ["jobs.index", spec, f"index={index}", "--resources", resources],
            "recompress": [
                *("jobs.add", "representations", spec, f"index={index}"),
                *("--resources", resources),
            ],
            "backfill": [
                *("jobs.add", "tokens"),
                str(self.folder / "index.yaml"),
                f"index={index}",
                f"rerank={self.folder / 'edje'}",
                "--resources",
                str(self.folder / "index_resources.yaml"),
            ],
            "candidates": [
                *("jobs.add", "candidates"),
                str(index),
                "bits",
                "representation=full",
                "commit_fragments=3",
                "--resources",
                resources,
            ],
            "maintain": [
                "jobs.maintain",
                str(index),
                "--fragment-items",
                "10",
                "--retain-hours",
                "0",
            ],
        }
        return [*arguments[job], "--progress", "json"]

    def base(self, job: str) -> Path | None:
        """Returns the undisturbed index on which a job starts, or None for a new index."""
        return None if job == "index" else self.folder / "undisturbed" / "index"

    def undisturbed(self, job: str) -> Path:
        """Returns the path of the index that an undisturbed run of a job leaves."""
        return self.folder / "undisturbed" / job

    def prepare(self, job: str, index: Path) -> None:
        """Replaces an index by the one on which a job starts."""
        shutil.rmtree(index, ignore_errors=True)
        if (base := self.base(job)) is not None:
            shutil.copytree(base, index)

    def expected(
        self, job: str, run: Callable[[str, Path], dict[str, float]]
    ) -> tuple[Contents, dict[str, float]]:
        """Returns the contents of an undisturbed index, built by `run` unless it exists."""
        index, record = self.undisturbed(job), self.folder / "undisturbed" / f"{job}.json"
        if not record.exists():
            self.prepare(job, index)
            write_atomic(str(record), json.dumps(run(job, index)))
        return contents(str(index)), json.loads(record.read_text())


def corpus() -> dict[str, str]:
    """Returns the texts of the corpus by item id. One of them is empty."""
    texts = {f"text/{n:03}": f"text {n} of the corpus, number {n % 7}" for n in range(NUM_ITEMS)}
    texts["text/070"] = ""
    return texts


def index_spec(folder: Path) -> dict[str, Any]:
    """Returns the spec of `jobs.index`, with small units and frequent commits."""
    return {
        "index": "unset",
        "source": {"name": "text", "path": str(folder / "corpus.jsonl")},
        "encoder": ENCODER,
        "representations": [
            {"compressor": "none"},
            {"compressor": {"name": "hpool", "num_vectors": 4}},
            {"compressor": {"name": "random", "num_vectors": 4}, "codec": RESIDUAL},
        ],
        "fit": {"num_items": 64},
        "unit_items": 2,
        "fragment_items": 2,
        "commit_items": 6,
    }


def _write_edje(folder: Path) -> None:
    disable_progress_bar()
    torch.manual_seed(0)
    tiny.bert(folder / "language")
    joint = JointEncoder(JointEncoder.Spec(model=str(folder / "language")), text_dim=6)
    adapter = Adapter(Adapter.Spec(num_tokens=3, hidden=12, heads=2), DIM, joint.dim)
    encoder = ENCODERS.build(ENCODERS.resolve(ENCODER))
    vision = {"spec": config.dump(encoder.spec), "fingerprint": encoder.fingerprint}
    Edje(adapter, joint, vision).save(folder / "edje")
