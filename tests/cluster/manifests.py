"""Reads the manifests for KubeRay and checks their fields."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.conftest import ROOT

FOLDER = ROOT / "cluster/kuberay"
FILES = sorted(FOLDER.glob("*.yaml"))
TABLE = yaml.safe_load((Path(__file__).parent / "kuberay.yaml").read_text())
TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "object": dict}


def documents(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of a manifest."""
    return list(yaml.safe_load_all(path.read_text()))


def objects(*kinds: str) -> dict[str, dict[str, Any]]:
    """Returns the objects of some kinds in all manifests, by file name and kind."""
    found = {}
    for path in FILES:
        for document in documents(path):
            if document["kind"] in kinds:
                found[f"{path.stem}-{document['kind']}"] = document
    return found


def errors(document: dict[str, Any]) -> list[str]:
    """Returns the fields of an object that the API does not have, and those that are missing."""
    kind = TABLE["kinds"].get(document["kind"])
    if kind is None:
        return [f"unknown kind {document['kind']}"]
    found = []
    if document["apiVersion"] != kind["apiVersion"]:
        found.append(f"apiVersion {document['apiVersion']}")
    if unknown := document.keys() - {"apiVersion", "kind", "metadata", "spec"}:
        found.append(f"unknown fields {sorted(unknown)}")
    metadata = check(document["metadata"], "ObjectMeta", "metadata")
    return [*found, *metadata, *check(document["spec"], kind["spec"], "spec")]


def check(value: Any, kind: str, path: str) -> Iterator[str]:
    """Yields the differences of a value from a type of the table."""
    if kind in TABLE["types"]:
        yield from _check_fields(value, TABLE["types"][kind], path)
    elif kind.startswith("["):
        if isinstance(value, list):
            for position, item in enumerate(value):
                yield from check(item, kind[1:-1], f"{path}[{position}]")
        else:
            yield f"{path}: {value!r} is not a list"
    elif kind.startswith("{"):
        if isinstance(value, dict):
            for key, item in value.items():
                yield from check(item, kind[1:-1], f"{path}.{key}")
        else:
            yield f"{path}: {value!r} is not a mapping"
    elif not _is_scalar(value, kind):
        yield f"{path}: {value!r} is not of type {kind}"


def _check_fields(value: Any, fields: dict[str, str], path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{path}: {value!r} is not a mapping"
        return
    allowed = {name.rstrip("*"): kind for name, kind in fields.items()}
    for name in (name[:-1] for name in fields if name.endswith("*")):
        if name not in value:
            yield f"{path}.{name} is missing"
    for name, item in value.items():
        if name in allowed:
            yield from check(item, allowed[name], f"{path}.{name}")
        else:
            yield f"{path}.{name} is unknown"


def _is_scalar(value: Any, kind: str) -> bool:
    if "|" in kind:
        return value in kind.split("|")
    if kind == "quantity":
        return isinstance(value, int) or bool(re.fullmatch(r"[\w.+-]+%?", str(value)))
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, TYPES[kind])


def ray_clusters() -> dict[str, dict[str, Any]]:
    """Returns the specs of all Ray clusters by the name of their file."""
    found = {}
    for name, document in objects("RayCluster", "RayJob", "RayCronJob", "RayService").items():
        spec = document["spec"]
        spec = spec.get("jobTemplate", spec)
        if document["kind"] != "RayCluster":
            spec = spec.get("rayClusterSpec") or spec.get("rayClusterConfig")
        if spec:
            found[name] = spec
    return found


def jobs() -> dict[str, dict[str, Any]]:
    """Returns the specs of all jobs by the name of their file."""
    found = objects("RayJob", "RayCronJob")
    return {name: d["spec"].get("jobTemplate", d["spec"]) for name, d in found.items()}


def pods(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the pod specs of a Ray cluster, the head's first."""
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]
