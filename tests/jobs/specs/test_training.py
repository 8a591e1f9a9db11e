"""The specs for real data, on small files in the same form: each is checked, and trains."""

from __future__ import annotations

import json
import posixpath

import pytest
import torch
import yaml
from safetensors.torch import load_file

from examples.papers.studies.study import StudySpec, runs_of
from examples.papers.synthetic.binding_table import TableSpec
from jobs import train
from pipeline import config
from pipeline.encoders.edje.model import load_adapter, load_joint
from pipeline.registry import ENCODERS
from pipeline.train.spec import TrainSpec
from tests.conftest import ROOT
from tests.datasets.test_karpathy import OBJECTS, SENTENCE, write_karpathy
from tests.encoders.edje.models import language_model
from tests.train.data.files import IMAGES, NAMES, write_pages
from tests.train.data.media import write_msrvtt, write_multivent

SPECS = ROOT / "jobs/specs/training"


def flickr30k(folder):
    """Four photographs with two captions each, in the lists of training and of validation."""
    (folder / "flickr30k/images").mkdir(parents=True)
    for part in ("Sentences", "Annotations"):
        (folder / "flickr30k_entities" / part).mkdir(parents=True)
    size = "<size><width>200</width><height>100</height><depth>3</depth></size>"
    xml = f"<annotation>{size}{OBJECTS.format(1)}</annotation>"
    for number, name in enumerate(NAMES[:4]):
        (folder / f"flickr30k/images/{number}.jpg").symlink_to(IMAGES / name)
        (folder / f"flickr30k_entities/Annotations/{number}.xml").write_text(xml)
        captions = f"{SENTENCE} {number}\nPhoto {number} .\n"
        (folder / f"flickr30k_entities/Sentences/{number}.txt").write_text(captions)
    (folder / "flickr30k_entities/train.txt").write_text("0\n1\n2\n")
    (folder / "flickr30k_entities/val.txt").write_text("3\n")


def colpali(folder):
    """Twelve pages."""
    (folder / "colpali_train_set").mkdir(parents=True)
    write_pages(folder / "colpali_train_set/data")


def coco(folder):
    """Four photographs with a caption each, three of them to train on."""
    (folder / "coco").mkdir(parents=True)
    write_karpathy(folder / "coco").rename(folder / "coco/dataset_coco.json")
    (folder / "coco/images").symlink_to(IMAGES)


#: By spec: its data, and the tiny checkpoint in the place of the real one.
CASES = {
    "flickr30k_samer": (flickr30k, "colpali"),
    "colpali_light": (colpali, "colqwen2"),
    "msrvtt_smart": (lambda folder: write_msrvtt(folder / "msrvtt"), "qwen3_vl"),
    "multivent_adapter": (lambda folder: write_multivent(folder / "multivent", 8), "qwen2_5_omni"),
    "edje": (coco, "siglip"),
}
#: What a tiny model needs: its window is short, and it has few tokens to be merged.
SMALL = {
    "flickr30k_samer": ["learner.compressor.num_vectors=4"],
    "msrvtt_smart": ["learner.encoder.max_pixels=1024", "learner.encoder.min_pixels=64"],
    "multivent_adapter": ["learner.encoder.max_pixels=1024"],
    "edje": ["batch_size=3", "learner.adapter.hidden=32", "learner.joint.max_text_tokens=24"],
}


def test_every_spec_for_real_data_is_tried():
    names = {path.stem for path in SPECS.glob("*.yaml") if "path: data/" in path.read_text("utf-8")}
    assert names == set(CASES)


@pytest.mark.parametrize("path", sorted(SPECS.rglob("*.yaml")), ids=lambda path: path.stem)
def test_no_spec_selects_its_best_model_on_test_data(path):
    """Quality on what is held out chooses `best/`: it is a share of the training data, or names a
    validation split; shapes and binding draw what is held out."""
    data = yaml.safe_load(path.read_text("utf-8")).get("data", {})
    assert "data.validation" not in path.read_text("utf-8")  # in a sweep
    validation = data.get("validation")
    if isinstance(validation, dict):
        names = [posixpath.basename(str(validation["path"])), *validation.get("splits", ())]
        assert any("val" in name or "dev" in name for name in names), validation
        assert not any("test" in name for name in names), validation
        assert validation != {
            name: data.get(name) for name in validation
        }  # no training data either


@pytest.mark.parametrize("path", sorted(SPECS.glob("*/binding*.yaml")), ids=lambda path: path.stem)
def test_specs_of_local_bindings_are_valid(path):
    """The trained weights of a table's encoders may be missing."""
    if path.parent.name == "tables":
        assert config.load(TableSpec, str(path), []).rows
    else:
        assert runs_of(config.load(StudySpec, str(path), []))


@pytest.fixture
def command_of(checkpoint, tmp_path, monkeypatch):
    """The command of a spec, beside its data."""

    def of(name: str) -> list[str]:
        files, family = CASES[name]
        files(tmp_path / "data")
        monkeypatch.chdir(tmp_path)
        small = ["batch_size=4", "epochs=3", "max_steps=2", "eval_every=1", "log_every=1"]
        given = [f"learner.encoder.model={checkpoint(family)}"]
        if name == "edje":
            given.append(f"learner.joint.model={language_model(tmp_path / 'language')}")
        return [str(SPECS / f"{name}.yaml"), *given, *small, *SMALL.get(name, ())]

    return of


@pytest.mark.parametrize("name", CASES)
def test_a_dry_run(name, command_of, tmp_path, capsys):
    train.main([*command_of(name), "--dry-run"])
    assert name in capsys.readouterr().out and not (tmp_path / "out/training" / name).exists()


@pytest.mark.heavy
@pytest.mark.parametrize("name", CASES)
def test_a_spec_trains(name, command_of, tmp_path):
    command = command_of(name)
    train.main([*command, "--in-process"])
    folder = tmp_path / "out/training" / name
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 2 and losses[0] > 0
    assert [row for row in rows if "R@1" in row]
    if name == "edje":
        assert load_joint(folder / "model").dim == 32
        assert load_adapter(folder / "model").spec.num_tokens == 64
        return
    (weights,) = (folder / "model").glob("*.safetensors")
    assert all(tensor.isfinite().all() for tensor in load_file(weights).values())
    (last,) = (folder / "checkpoints").glob("step-*/weights.pt")
    masters = torch.load(last, weights_only=True)
    assert masters and {tensor.dtype for tensor in masters.values()} == {torch.float32}
    # An encoder reads back what was trained.
    spec = config.dump(config.load(TrainSpec, command[0], command[1:]).learner.encoder)
    trained = {
        "flickr30k_samer": {**spec, "projection": str(folder / "model")},
        "multivent_adapter": {"name": "smart", "encoder": spec, "adapter": str(folder / "model")},
    }.get(name, {**spec, "adapter": str(folder / "model")})
    found = ENCODERS.build(ENCODERS.resolve(trained)).encode_queries(["a red car"])
    before = ENCODERS.build(ENCODERS.resolve(spec)).encode_queries(["a red car"])
    one, other = found.tokens.vectors, before.tokens.vectors
    assert one.shape != other.shape or (one - other).abs().max() > 1e-6
