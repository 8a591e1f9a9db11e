"""Tests of fitting, with a compressor from an external package."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from pipeline.index import EXECUTOR
from pipeline.index.artefacts import load_artefact, save_artefact
from pipeline.index.reader import IndexReader
from pipeline.index.status import status
from tests.conftest import ROOT, run_jobs
from tests.tiny import SLEEPING

#: Module of an external package whose compressor subtracts the mean of the corpus.
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
        log: str  # folder with one file per call of fit

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
    """Folder in which the package is installed, with its entry point."""
    site = tmp_path / "site"
    dist_info = site / "centred-1.0.dist-info"
    dist_info.mkdir(parents=True)
    (dist_info / "METADATA").write_text(METADATA)
    (dist_info / "entry_points.txt").write_text(ENTRY_POINT)
    (site / "centred_vectors.py").write_text(CENTRED)
    return str(site)


@pytest.mark.heavy
def test_compressor_is_fitted_once_before_the_first_commit(tmp_path, collection, installed):
    log, recompress_log = tmp_path / "fits", tmp_path / "late_fits"
    log.mkdir()
    recompress_log.mkdir()
    centred = {"compressor": {"name": "centred", "log": str(log)}}
    spec = {
        "index": str(tmp_path / "index"),
        "source": {"name": "text", "path": str(collection(**{f"d{i}": f"{i}" for i in range(9)}))},
        "encoder": {
            "class": SLEEPING,
            "seconds": 0.0,
            "num_tokens": 6,
            "dim": 8,
        },
        "representations": [{"compressor": "none"}, centred],
        "unit_items": 2,
        "fit": {"num_items": 5, "seed": 3},
    }
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    recompress_spec = {
        "index": spec["index"],
        "representations": [
            {"compressor": {"name": "centred", "log": str(recompress_log)}, "id": "late"}
        ],
        "fit_items": 4,
    }
    (tmp_path / "late.yaml").write_text(yaml.safe_dump(recompress_spec))
    index = ["index", str(tmp_path / "spec.yaml")]
    recompress = ["add", "representations", str(tmp_path / "late.yaml")]
    done = run_jobs(
        [*index, "--dry-run"],  # fits nothing
        [*index, "--limit", "6"],
        index,
        recompress,
        recompress,
        ["status", spec["index"]],
        **{EXECUTOR: "ray", "PYTHONPATH": os.pathsep.join([str(ROOT), installed])},
    )
    assert done.returncode == 0, done.stderr

    assert [path.read_text() for path in log.iterdir()] == ["5"]  # one call with five items
    assert [path.read_text() for path in recompress_log.iterdir()] == ["4"]
    stored = status(spec["index"])["representations"]
    assert (stored["centred"]["filled"], stored["late"]["filled"]) == (1.0, 1.0)
    assert len(IndexReader(spec["index"])) == 9
    names = {name: stored[name]["artefact"] for name in ("centred", "late")}
    files = {path.stem for path in (tmp_path / "index/artefacts").iterdir()}
    assert files == set(names.values()) and len(files) == 2  # the sample sizes differ

    rows = IndexReader(spec["index"]).dataset.to_table().to_pylist()
    for name in ("centred", "late"):
        mean = load_artefact(spec["index"], names[name], {})["mean"]
        for row in rows:  # both runs use the same artefact
            expected = np.array(row["full"], dtype=np.float64) - mean
            expected /= np.linalg.norm(expected, axis=1, keepdims=True)
            np.testing.assert_allclose(np.array(row[name], np.float64), expected, atol=3e-3)


def test_artefacts_are_named_by_their_content(tmp_path):
    uri = str(tmp_path)
    artefact = {"mean": np.arange(4.0), "scale": np.float32([2])}
    metadata = {"fingerprint": "f", "compressor": {"name": "centred"}}
    name = save_artefact(uri, artefact, metadata)
    assert save_artefact(uri, dict(reversed(artefact.items())), metadata) == name
    others = [
        {**artefact, "mean": np.arange(4)},
        {**artefact, "mean": np.arange(4.0).reshape(2, 2)},
    ]
    names = {name, *(save_artefact(uri, other, metadata) for other in others)}
    assert len(names | {save_artefact(uri, artefact, {**metadata, "fingerprint": "g"})}) == 4
    loaded = load_artefact(uri, name, metadata)
    assert loaded.keys() == artefact.keys()
    assert all(loaded[key].dtype == artefact[key].dtype for key in artefact)
    assert all(np.array_equal(loaded[key], artefact[key]) for key in artefact)

    with pytest.raises(
        ValueError, match="[.]fingerprint must be f, the value it was fitted for, got 'g'"
    ):
        load_artefact(uri, name, {**metadata, "fingerprint": "g"})
    file = Path(uri, "artefacts", f"{name}.npz")
    other = save_artefact(uri, others[0], metadata)
    shutil.copy(Path(uri, "artefacts", f"{other}.npz"), file)
    with pytest.raises(
        ValueError,
        match=f"^index must be an index with the artefact {name}, got .*contains another artefact",
    ):
        load_artefact(uri, name, metadata)
    content = Path(uri, "artefacts", f"{other}.npz").read_bytes()
    entry = content.index(b"PK\1\2")  # directory entry; flags and method follow
    encrypted, compressed = bytearray(content), bytearray(content)
    encrypted[entry + 8], compressed[entry + 10] = 1, 99
    for corrupted in (encrypted, compressed, content[:100], b"", None):
        file.unlink() if corrupted is None else file.write_bytes(corrupted)
        with pytest.raises(
            ValueError,
            match=f"^index must be an index with the artefact {name}, got .*, which is corrupted; "
            "restore .*[.]npz from a backup",
        ):
            load_artefact(uri, name, metadata)
