"""Files of golden values, and their comparison."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.bench.harness import machine

FOLDER = Path(__file__).parent
#: Relative tolerance of numbers on another machine, and the tolerance of numbers near 0.
TOLERANCE, ABSOLUTE_TOLERANCE = 0.02, 1e-3
#: Key of digests.
DIGEST = "sha256"
#: Keys of values that are compared only on the same CPU with the same version of PyTorch.
EXACT = (DIGEST, "artefact", "codec_artefact")


def digest(*parts: bytes) -> str:
    """Returns the first 16 digits of the SHA-256 of the parts."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:16]


def summary(numbers: np.ndarray) -> dict[str, Any]:
    """Returns the digest of an array and numbers that can be compared with a tolerance."""
    values = np.nan_to_num(numbers.astype(np.float64).ravel())
    return {
        DIGEST: digest(np.ascontiguousarray(numbers).tobytes()),
        "count": values.size,
        "sum": float(values.sum()),
        "mean_abs": float(np.abs(values).mean()) if values.size else 0.0,
    }


def this_machine() -> dict[str, str]:
    """Returns the properties of this machine on which the last bits of results depend."""
    return {"cpu": machine()["cpu"], "torch": torch.__version__}


def write(part: str, values: dict[str, Any]) -> None:
    """Writes the values of a part."""
    text = json.dumps({"machine": this_machine(), "values": values}, indent=1, ensure_ascii=False)
    (FOLDER / f"{part}.json").write_text(f"{text}\n", encoding="utf-8")


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the name and the value of each leaf of a JSON value."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{name} / {key}" if name else key)
    elif isinstance(value, list) and value:
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{name}[{number}]")
    else:
        yield name, value


def is_close(before: Any, after: Any) -> bool:
    """Compares two leaves with the tolerance for other machines."""
    if isinstance(before, float) and isinstance(after, int | float):
        return math.isclose(before, after, rel_tol=TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
    return before == after


def differences(part: str, values: dict[str, Any]) -> Iterator[str]:
    """Yields a line per difference from the file: removed values, added and changed ones."""
    stored = json.loads((FOLDER / f"{part}.json").read_text("utf-8"))
    before = dict(leaves(stored["values"]))
    after = dict(leaves(json.loads(json.dumps(values))))
    is_exact = stored["machine"] == this_machine()
    for name in [name for name in before if name not in after]:
        yield f"{part}: removed: {name}: {before[name]!r}"
    for name in [name for name in after if name not in before]:
        yield f"{part}: added: {name}: {after[name]!r}"
    for name in [name for name in before if name in after]:
        is_digest = name.rpartition(" / ")[2] in EXACT
        if not is_exact and (is_digest or is_close(before[name], after[name])):
            continue
        if before[name] != after[name]:
            yield f"{part}: changed: {name}: {before[name]!r} -> {after[name]!r}"
