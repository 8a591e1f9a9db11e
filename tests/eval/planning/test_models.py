"""Descriptions of checkpoints in folders and on a local hub, and the specs that load them."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import yaml
from transformers import ColPaliForRetrieval

from jobs import plan
from pipeline import config
from pipeline.config import SpecError
from pipeline.eval.planning.models import plan_model, published_models
from pipeline.index.spec import IndexSpec
from pipeline.registry import ENCODERS
from tests import hub
from tests.images import make_images
from tests.peers import remake

COLQWEN2 = "vidore/colqwen2-v1.0-hf"
PUBLISHED = published_models()


@pytest.fixture
def server(tmp_path):
    (tmp_path / "hub").mkdir()
    with hub.serve(tmp_path / "hub") as server, hub.connected(server, tmp_path / "cache"):
        yield server


def test_a_folder(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("colpali"), tmp_path / "model")
    (folder / "README.md").write_text("---\nlicense: gemma\n---\n")
    text = "\n".join(plan_model(str(folder)).lines)
    assert "ColPali of transformers (encoder colpali)" in text
    assert "license field of the model card: gemma" in text
    assert "109,360 parameters in F32" in text
    assert "vectors: 16 dimensions, 29 tokens" in text


def test_the_output_is_a_spec(checkpoint, tmp_path, capsys):
    folder = checkpoint("colqwen2")
    plan.main(["--model", folder, "encoder.max_pixels=4096", "index=out/mine"])
    path = tmp_path / "spec.yaml"
    path.write_text(printed := capsys.readouterr().out)
    assert printed.startswith(f"# {folder}: ColQwen2 of transformers")
    spec = config.load(IndexSpec, str(path))
    assert (spec.index, spec.encoder.max_pixels) == (config.absolute("out/mine"), 4096)
    assert [source["name"] for source in yaml.safe_load(printed)["source"]] == [
        *("pages", "images", "video")
    ]


def test_a_hub_model_without_its_weights(server, checkpoint, tmp_path):
    commit = server.publish(COLQWEN2, checkpoint("colqwen2"), "main", "v1", license="apache-2.0")
    text = "\n".join(plan_model(COLQWEN2).lines)
    assert "license field of the model card: apache-2.0" in text
    assert "96,848 parameters in F32" in text
    # Only the first 100,000 bytes, which contain the header.
    assert {r for method, path, r in server.requests if "blobs" in path and method == "GET"} == {
        "bytes=0-100000"
    }
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    paths = [path for _, path, _ in server.requests]
    assert len([path for path in paths if path.startswith("/api/models/")]) == 3
    small = {name for name in paths if "/resolve/" in name and not name.endswith(".safetensors")}
    assert len(small) < 12 and all(paths.count(name) < 3 for name in small)  # HEAD and GET
    spec = plan_model(COLQWEN2, ["encoder.revision=v1"]).spec
    assert spec["encoder"] == {
        **{"name": "colpali", "model": COLQWEN2, "revision": "v1", "max_pixels": 602112}
    }
    assert plan_model(COLQWEN2, [f"encoder.revision={commit}"]).lines[1:] == text.splitlines()[1:]


def test_an_adapter_whose_base_is_another_repository(server, checkpoint, tmp_path):
    peft = pytest.importorskip("peft")
    model = ColPaliForRetrieval.from_pretrained(checkpoint("colpali"))
    settings = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(model, settings)
    tuned.peft_config["default"].base_model_name_or_path = "authors/base"
    tuned.save_pretrained(tmp_path / "adapter")
    with pytest.raises(SpecError, match="pass the base model as model"):
        plan_model(str(tmp_path / "adapter"))
    server.publish("authors/base", checkpoint("colpali"))
    server.publish("authors/adapter", tmp_path / "adapter")
    plan = plan_model("authors/adapter")
    assert plan.lines[0].endswith("base authors/base, adapter authors/adapter")
    count = sum(parameter.numel() for parameter in tuned.parameters())
    assert f"{count:,} parameters" in "\n".join(plan.lines)
    assert "needs: the extra training (peft)" in plan.lines
    assert not list((tmp_path / "cache").rglob("*.safetensors"))

    spec = config.parse(IndexSpec, config.override(plan.spec, ["encoder.dtype=float32"])).encoder
    _, items = make_images((40, 40))
    ((_, tokens),) = ENCODERS.build(spec).encode(items)
    with hub.connected(None, tmp_path / "cache"):
        ((_, offline),) = ENCODERS.build(spec).encode(items)
    local = spec.model_copy(
        update={"model": checkpoint("colpali"), "adapter": str(tmp_path / "adapter")}
    )
    ((_, expected),) = ENCODERS.build(local).encode(items)
    assert torch.equal(tokens.vectors, expected.vectors)
    assert torch.equal(tokens.vectors, offline.vectors)


def test_a_published_layout_of_colpali_engine(server, tmp_path):
    """An adapter whose repository has the processor, and whose base has the projection."""
    folder = remake.checkpoint("colqwen2", tmp_path / "made")
    path = folder / "adapter/adapter_config.json"
    settings = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**settings, "base_model_name_or_path": "vidore/colqwen2-base"}))
    name = "vidore/colqwen2-v1.0"
    server.publish("vidore/colqwen2-base", folder / "base")
    server.publish(name, folder / "adapter", commit=PUBLISHED[name].revision)
    plan = plan_model(name)
    assert plan.lines[0].endswith(
        f"ColQwen2 of colpali-engine (encoder colpali), base vidore/colqwen2-base, adapter {name}"
    )
    assert any(line.startswith("vectors: 128 dimensions") for line in plan.lines)
    assert plan.spec["encoder"] == {
        **{"name": "colpali", "model": name, "revision": PUBLISHED[name].revision},
        "query_prefix": "Query: ",
    }


def test_offline_from_the_cache(server, checkpoint, tmp_path):
    server.publish(COLQWEN2, checkpoint("colqwen2"))
    online = plan_model(COLQWEN2)
    with hub.connected(None, tmp_path / "cache"):
        offline = plan_model(COLQWEN2)
    assert offline.spec == online.spec
    assert not any(line.startswith("weights") for line in offline.lines)


def test_corrupted_weights_on_the_hub(server, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("siglip"), tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"\xff" * 9000)
    server.publish("authors/model", folder)
    with pytest.raises(SpecError, match="has a truncated or corrupted safetensors file on the hub"):
        plan_model("authors/model")


def test_a_model_with_pickled_weights(server, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("siglip"), tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    server.publish("authors/model", folder)
    assert any("conversion" in line for line in plan_model("authors/model").lines)


@pytest.mark.parametrize(
    ("gated", "kind", "revision", "message"),
    [
        (True, "models", "main", "is gated on the hub; accept its terms"),
        (False, "models", "v9", "revision must be a branch, tag"),
        (False, "datasets", "main", "is a data set"),
        (False, None, "main", "does not exist on the hub"),
    ],
)
def test_a_model_that_cannot_be_read(server, checkpoint, gated, kind, revision, message):
    if kind:
        server.publish("authors/model", checkpoint("siglip"), kind=kind, gated=gated)
    with pytest.raises(SpecError) as caught:
        plan_model("authors/model", [f"encoder.revision={revision}"])
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("model", ["", "no such folder", "authors/model"])
def test_a_model_that_is_nothing(model):
    with pytest.raises(SpecError, match="^model must be") as caught:
        plan_model(model)
    assert "\n" not in str(caught.value)


def test_a_folder_with_truncated_weights(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("siglip"), tmp_path / "model")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(SpecError, match="has a truncated or corrupted model.safetensors"):
        plan_model(str(folder))


def test_an_adapter_that_names_a_revision_of_its_base(tmp_path):
    """The revision means nothing if the base is a folder."""
    folder = remake.checkpoint("colqwen2", tmp_path / "made") / "adapter"
    settings = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "revision": "v7"}))
    assert "encoder colpali" in plan_model(str(folder)).lines[0]


def test_a_folder_that_is_nothing(tmp_path):
    with pytest.raises(SpecError, match="^model must be") as caught:
        plan_model(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_the_command(checkpoint, tmp_path, capsys):
    (tmp_path / "hub").mkdir()
    with hub.serve(tmp_path / "hub") as server, hub.connected(server, tmp_path / "cache"):
        server.publish("authors/model", checkpoint("siglip"))
        plan.main(["--model", "authors/model"])
        with pytest.raises(SpecError, match="^model must be") as caught:
            plan.main(["--model", "authors/another"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["encoder"] == {"name": "dual", "model": "authors/model"}
    assert "\n" not in str(caught.value)


def test_presets_are_fields_of_an_encoder():
    """The name of the encoder is read from the checkpoint, unless it is an endpoint."""
    for name, model in PUBLISHED.items():
        names = [model.encoder.get("name", "colpali"), "minilm", "qwen_vl", "qwen_omni", "jina_v4"]
        valid = [ENCODERS.spec_class(encoder).model_fields.keys() for encoder in names]
        assert any(model.encoder.keys() <= fields for fields in valid), name


def test_refused_models_name_an_alternative():
    for name, model in PUBLISHED.items():
        if model.refused:
            with pytest.raises(SpecError, match="which needs .*; use ") as caught:
                plan_model(name)
            other = str(caught.value).rsplit("; use ", 1)[1]
            assert "maxray convert" in other or not PUBLISHED[other].refused
