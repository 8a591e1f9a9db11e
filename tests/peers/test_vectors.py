"""Our vectors equal those of the libraries that checkpoints come from, on the same weights."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline.config import SpecError
from pipeline.registry import ENCODERS
from pipeline.schema import AUDIO, FRAME
from pipeline.tokens import TokenBatch
from tests.conftest import ROOT
from tests.encoders.batches import encode_items
from tests.images import png
from tests.peers import remake
from tests.peers.cases import CASES, Case
from tests.peers.make import FAMILIES, OLD_TRANSFORMERS

#: What a case raises that is not equal yet.
MISMATCH = (SpecError, AssertionError)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Returns a function that returns the folder of a family's checkpoints."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = remake.checkpoint(family, tmp_path_factory.mktemp(family))
        return made[family]

    return folder


def items(kind: str) -> pa.Table:
    """Returns the items of a kind."""
    if kind.endswith("images"):
        images = remake.images() if kind == "images" else remake.grid_images()
        return pa.table({"image": [png(image) for image in images]})
    if kind in ("texts", "empty"):
        return pa.table({"text": list(remake.TEXTS) if kind == "texts" else [""]})
    if kind == "audio":
        sound = {"start": 0.0, "sample_rate": remake.SAMPLE_RATE}
        rows = [{**sound, "samples": remake.audio().tobytes()}]
        return pa.table({"audio": pa.array(rows, AUDIO)})
    pictures = remake.large_frames() if kind == "large_video" else remake.frames()
    frames = [
        {
            "index": index,
            "seconds": index / 2,
            "height": frame.height,
            "width": frame.width,
            "pixels": frame.tobytes(),
        }
        for index, frame in enumerate(pictures)
    ]
    return pa.table({"frames": pa.array([frames], pa.list_(FRAME))})


def vectors(tokens: TokenBatch, pooled: bool) -> list[np.ndarray]:
    """Returns the stored coordinates of each item."""
    if pooled:
        assert tokens.pooled is not None
        return [remake.stored_coordinates(vector.float().numpy()) for vector in tokens.pooled]
    return [
        remake.stored_coordinates(row[mask].float().numpy())
        for row, mask in zip(tokens.vectors, tokens.mask, strict=True)
    ]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=case.name,
            marks=[pytest.mark.xfail(strict=True, raises=MISMATCH, reason=case.pending)]
            if case.pending
            else [],
        )
        for case in CASES
    ],
)
def test_vectors_equal_those_of_the_library(case: Case, folders):
    if case.spec["name"] == "sentence_transformers":
        pytest.importorskip("sentence_transformers", reason="needs the extra sentence-transformers")
    found = differences(case, folders(case.family))
    large = {name: f"{value:.1e}" for name, value in found.items() if value >= 1e-5}
    assert not large, large


def differences(case: Case, folder: Path) -> dict[str, float]:
    """Returns the largest difference to the library's vectors, by input."""
    spec = {
        name: value.replace("{folder}", str(folder)) if isinstance(value, str) else value
        for name, value in case.spec.items()
    }
    parsed = ENCODERS.resolve({"dtype": "float32", **spec})
    ENCODERS.load(parsed.name).check(parsed)
    encoder = ENCODERS.build(parsed)
    if case.instruction:
        instruction = case.instruction.replace("{instruction}", remake.INSTRUCTION)
        encoder = encoder.with_instruction(instruction)
    expected = remake.expected(case.family, case.variant)
    assert expected
    largest = {}
    for kind in dict.fromkeys(name.split(".")[0] for name in expected):
        if kind == "queries":
            found = vectors(encoder.encode_queries(remake.QUERIES).tokens, case.pooled)
        else:
            rows = encode_items(encoder, items(kind))
            found = [vectors(rows[row], case.pooled)[0] for row in sorted(rows)]
        for index, values in enumerate(found):
            name = f"{kind}.{index}"
            reference = expected.pop(name)
            assert values.shape == reference.shape, name
            largest[name] = float(np.abs(values - reference).max())
    assert not expected
    return largest


def contents(files: dict[str, str], folder: Path) -> dict[str, object]:
    """Returns the files of a manifest. peft writes the modules of an adapter in any order."""
    found: dict[str, object] = {}
    for path, name in files.items():
        found[path] = (folder / "files" / name).read_text("utf-8")
        if path.endswith("adapter_config.json"):
            settings = json.loads(str(found[path]))
            found[path] = settings | {"target_modules": sorted(settings["target_modules"])}
    return found


@pytest.mark.heavy
@pytest.mark.parametrize("family", FAMILIES)
def test_libraries_give_the_stored_vectors(family: str, tmp_path: Path):
    variable = "PEERS_PYTHON_5_3" if family in OLD_TRANSFORMERS else "PEERS_PYTHON"
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"{variable} does not name a Python that has the libraries, see make.py")
    command = [python, "-m", "tests.peers.make", family, "--data", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    stored, made = remake.load_manifest(family), remake.load_manifest(family, tmp_path)
    assert made["weights"] == stored["weights"]
    assert contents(made["files"], tmp_path) == contents(stored["files"], remake.DATA)
    with np.load(remake.DATA / f"{family}.npz") as old, np.load(tmp_path / f"{family}.npz") as new:
        assert set(old) == set(new)
        for name in old:
            np.testing.assert_allclose(new[name], old[name], rtol=0, atol=1e-5)
