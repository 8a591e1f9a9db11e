"""Tests of the configuration files for Ray Serve and KubeRay."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from pipeline.config import SpecError, parse
from pipeline.serve import app
from pipeline.serve.settings import ServeSpec
from tests.conftest import ROOT

FILES = [*sorted((ROOT / "cluster/serve").glob("*.yaml")), ROOT / "cluster/kuberay/rayservice.yaml"]


def serve_config(path: Path) -> dict:
    """Returns the configuration for `serve deploy`, which KubeRay's file contains as a string."""
    data = next(yaml.safe_load_all(path.read_text()))
    return yaml.safe_load(data["spec"]["serveConfigV2"]) if "spec" in data else data


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_serve_config_is_valid(path):
    (application,) = ServeDeploySchema.model_validate(serve_config(path)).applications
    assert application.import_path == f"{app.__name__}:{app.build.__name__}"
    settings = parse(ServeSpec, application.args)
    assert settings.keys  # the servers listen on all interfaces


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_builds_configured_deployments(path):
    (application,) = serve_config(path)["applications"]
    settings = parse(ServeSpec, application["args"])
    built = app.build(settings)
    assert built._bound_deployment.name == "Gateway"
    for index in settings.indexes.values():
        assert index.num_shards == (8 if path.stem == "sharded" else 1)


def test_builds_from_arguments_of_ray():
    """Ray passes a mapping from YAML or from `serve run ...:build indexes.i.uri=...`."""
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as call_builder

    for args in ({"indexes": {"i": {"uri": "x"}}}, {"indexes.i.uri": "x", "limits.max_k": "7"}):
        assert call_builder(app.build, args)._bound_deployment.name == "Gateway"
    with pytest.raises(SpecError, match="indexes.i.num_shards"):
        call_builder(app.build, {"indexes.i.uri": "x", "indexes.i.num_shards": "no"})
    with pytest.raises(SpecError, match="evaluations.folder"):
        call_builder(app.build, {"indexes.i.uri": "x", "evaluations.folder": "s3://b/x"})
