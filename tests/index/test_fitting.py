"""A compressor that learns from the corpus, added by another package: fitted once, then reused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from pipeline.index.artefacts import load_artefact, save_artefact
from pipeline.index.reader import Index
from pipeline.index.status import status
from tests.conftest import ROOT, run_jobs

#: A package of somebody else: it takes the corpus' mean out of every vector.
CENTRED = """
import uuid
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch

from pipeline import config
from pipeline.compression import Compressor, select


class Centred(Compressor):
    class Spec(config.Spec):
        name: Literal["centred"] = "centred"
        log: str  # a folder: a file for each call of fit

    needs_fit: ClassVar[bool] = True
    normalised = True

    @classmethod
    def fit(cls, spec, sample):
        batches = list(sample)
        tokens = torch.cat([batch.vectors[batch.mask] for batch in batches]).double()
        Path(spec.log, uuid.uuid4().hex).write_text(str(sum(map(len, batches))))
        return {"mean": tokens.mean(dim=0).numpy()}

    def _compress(self, batch):
        assert self.artefact["mean"].dtype == np.float64
        index = torch.arange(batch.mask.shape[1]).expand_as(batch.mask)
        centred = batch.vectors - torch.from_numpy(self.artefact["mean"]).float()
        return select(
            type(batch)(centred, batch.mask, normalised=False), index, batch.mask
        )
"""
METADATA = "Metadata-Version: 2.1\nName: centred\nVersion: 1.0\n"
ENTRY_POINT = "[maxray.compressors]\ncentred = centred_vectors:Centred\n"


@pytest.fixture
def installed(tmp_path: Path) -> str:
    """The folder in which the package is installed, with its entry point."""
    site = tmp_path / "site"
    about = site / "centred-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(METADATA)
    (about / "entry_points.txt").write_text(ENTRY_POINT)
    (site / "centred_vectors.py").write_text(CENTRED)
    return str(site)


@pytest.mark.heavy
def test_fitted_once_before_the_first_commit(tmp_path, collection, installed):
    log, late_log = tmp_path / "fits", tmp_path / "late_fits"
    log.mkdir()
    late_log.mkdir()
    centred = {"compressor": {"name": "centred", "log": str(log)}}
    spec = {
        "index": str(tmp_path / "index"),
        "source": {"name": "text", "path": str(collection(**{f"d{i}": f"{i}" for i in range(9)}))},
        "encoder": {"name": "sleeping", "seconds": 0.0, "num_tokens": 6, "dim": 8},
        "representations": [{"compressor": "none"}, centred],
        "unit_items": 2,
        "fit": {"num_items": 5, "seed": 3},
    }
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    late = {
        "index": spec["index"],
        "representations": [
            {"compressor": {"name": "centred", "log": str(late_log)}, "id": "late"}
        ],
        "fit_items": 4,
    }
    (tmp_path / "late.yaml").write_text(yaml.safe_dump(late))
    index = ["index", str(tmp_path / "spec.yaml")]
    recompress = ["recompress", str(tmp_path / "late.yaml")]
    done = run_jobs(
        [*index, "--dry-run"],  # fits nothing
        [*index, "--limit", "6"],
        index,
        recompress,
        recompress,
        ["status", spec["index"]],
        PYTHONPATH=os.pathsep.join([str(ROOT), installed]),
    )
    assert done.returncode == 0, done.stderr

    assert [path.read_text() for path in log.iterdir()] == ["5"]  # one call, of five items
    assert [path.read_text() for path in late_log.iterdir()] == ["4"]
    stored = status(spec["index"])["representations"]
    assert (stored["centred"]["filled"], stored["late"]["filled"]) == (1.0, 1.0)
    assert len(Index(spec["index"])) == 9
    names = {name: stored[name]["artefact"] for name in ("centred", "late")}
    files = {path.stem for path in (tmp_path / "index/artefacts").iterdir()}
    assert files == set(names.values()) and len(files) == 2  # samples of another size

    there = Index(spec["index"]).dataset.to_table().to_pylist()
    for name in ("centred", "late"):
        mean = load_artefact(spec["index"], names[name], {})["mean"]
        for row in there:  # of both runs: by one and the same artefact
            expected = np.array(row["full"], dtype=np.float64) - mean
            expected /= np.linalg.norm(expected, axis=1, keepdims=True)
            np.testing.assert_allclose(np.array(row[name], np.float64), expected, atol=3e-3)


def test_an_artefact_is_named_by_its_content(tmp_path):
    uri = str(tmp_path)
    some = {"mean": np.arange(4.0), "scale": np.float32([2])}
    about = {"fingerprint": "f", "compressor": {"name": "centred"}}
    name = save_artefact(uri, some, about)
    assert save_artefact(uri, dict(reversed(some.items())), about) == name
    others = [{**some, "mean": np.arange(4)}, {**some, "mean": np.arange(4.0).reshape(2, 2)}]
    names = {name, *(save_artefact(uri, other, about) for other in others)}
    assert len(names | {save_artefact(uri, some, {**about, "fingerprint": "g"})}) == 4
    loaded = load_artefact(uri, name, about)
    assert loaded.keys() == some.keys()
    assert all(loaded[key].dtype == some[key].dtype for key in some)
    assert all(np.array_equal(loaded[key], some[key]) for key in some)

    with pytest.raises(ValueError, match="fingerprint must be f, for which it was fitted, got 'g'"):
        load_artefact(uri, name, {**about, "fingerprint": "g"})
    file = Path(uri, "artefacts", f"{name}.npz")
    other = save_artefact(uri, others[0], about)
    shutil.copy(Path(uri, "artefacts", f"{other}.npz"), file)
    with pytest.raises(ValueError, match="contains another artefact"):
        load_artefact(uri, name, about)
    whole = Path(uri, "artefacts", f"{other}.npz").read_bytes()
    entry = whole.index(b"PK\1\2")  # of the archive's directory: flags and method lie behind it
    encrypted, compressed = bytearray(whole), bytearray(whole)
    encrypted[entry + 8], compressed[entry + 10] = 1, 99
    for damaged in (encrypted, compressed, whole[:100], b"", None):
        file.unlink() if damaged is None else file.write_bytes(damaged)
        with pytest.raises(
            ValueError, match=f"an index with the artefact {name}, got .*, which is corrupted"
        ):
            load_artefact(uri, name, about)
