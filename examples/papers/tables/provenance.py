"""Origin of the numbers of a table: data, weights, seeds, versions and hardware."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.papers.tables.schedule import Scheduled
from pipeline import config
from pipeline.eval.evaluation import versions
from pipeline.index.reader import IndexReader

#: File of a data folder with the revisions of data sets and checkpoints.
REVISIONS = "revisions.json"
#: Fields of an encoder that identify its weights or affect its numbers.
FIELDS = ("name", "model", "revision", "adapter", "attention", "dtype")


def encoders(index: str) -> list[dict[str, Any]]:
    """Returns the encoders of an index with their fingerprints, for the record of a step."""
    infos = [info.encoder for info in IndexReader(index).representations().values()]
    found = {info.fingerprint: {"fingerprint": info.fingerprint, **info.spec} for info in infos}
    return list(found.values())


def provenance(steps: Sequence[Scheduled], data_sets: Sequence[str], folder: str) -> dict[str, Any]:
    """Returns what the numbers of the finished steps come from, as JSON values.

    Args:
        steps: Steps of the table.
        data_sets: Names of the data sets of the table.
        folder: Data folder.
    """
    revisions: dict[str, Any] = {}
    if (file := Path(folder, REVISIONS)).is_file():
        revisions = json.loads(file.read_text("utf-8"))
    records = [scheduled.record for scheduled in steps if scheduled.state == "done"]
    found = [encoder for record in records for encoder in record.get("encoders", ())]
    seeds: dict[str, set[int]] = {}
    for scheduled in steps:
        spec = config.dump(scheduled.spec) if scheduled.spec else {}
        if scheduled.step.job == "train":
            found.append(spec["learner"])  # with the models from which training starts
        values = {fields["seed"] for fields in _mappings(spec) if "seed" in fields}
        seeds.setdefault(scheduled.step.name, set()).update(values - {None})
    return {
        "data": {name: revisions.get("data", {}).get(name, {}) for name in data_sets},
        "weights": _distinct(_weights(found, revisions.get("models", {}))),
        "seeds": {name: sorted(values) for name, values in seeds.items() if values},
        "hardware": _distinct(r["hardware"] for r in records if "hardware" in r),
        "versions": versions(),
        "versions of evaluations": _distinct(r["versions"] for r in records if "versions" in r),
    }


def _weights(
    found: Sequence[Mapping[str, Any]], commits: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    for encoder in found:
        for fields in _mappings(encoder):  # an encoder may contain another one
            if "model" not in fields and "adapter" not in fields:
                continue
            weights = {name: fields[name] for name in FIELDS if fields.get(name) is not None}
            if commit := commits.get(str(fields.get("model"))):
                weights["revision"] = commit
            if "fingerprint" in encoder:
                weights["fingerprint"] = encoder["fingerprint"]
            yield weights


def lines(found: Mapping[str, Any]) -> list[str]:
    """Returns the provenance as lines of text."""
    data = [
        f"{name} ({', '.join(map(' '.join, sources.items())) or 'revision not recorded'})"
        for name, sources in found["data"].items()
    ]
    weights = [
        ", ".join(f"{value}" if name in ("name", "model") else f"{name} {value}"
                  for name, value in encoder.items())
        for encoder in found["weights"]
    ]  # fmt: skip
    seeds = [f"{name} {', '.join(map(str, values))}" for name, values in found["seeds"].items()]
    numbers = [f"{name} {version}" for name, version in found["versions"].items()]
    return [
        *(f"Data: {line}" for line in data),
        *(f"Weights: {line}" for line in weights),
        f"Seeds: {'; '.join(seeds) or 'none'}",
        f"Hardware: {'; '.join(found['hardware']) or 'unknown'}",
        f"Versions: {', '.join(numbers)}",
    ]


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _mappings(inner)


def _distinct(values: Any) -> list[Any]:
    return list({json.dumps(value, sort_keys=True): value for value in values}.values())
