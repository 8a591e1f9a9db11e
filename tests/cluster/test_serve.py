"""The configurations for clusters are of the form that Ray, KubeRay and Grafana read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from pipeline.config import SpecError, parse
from pipeline.serve import app
from pipeline.serve.settings import ServeSpec
from tests.conftest import ROOT

FILES = sorted((ROOT / "cluster/serve").glob("*.yaml"))
DASHBOARD = json.loads((ROOT / "cluster/grafana/serving.json").read_text())


def serve_config(path: Path) -> dict:
    """What `serve deploy` reads; in KubeRay's file it is a text."""
    data = yaml.safe_load(path.read_text())
    return yaml.safe_load(data["spec"]["serveConfigV2"]) if "spec" in data else data


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_serve_deploy_reads(path):
    (application,) = ServeDeploySchema.model_validate(serve_config(path)).applications
    assert application.import_path == f"{app.__name__}:{app.build.__name__}"
    settings = parse(ServeSpec, application.args)
    assert settings.keys  # they are open to a network


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_deployments_of_a_configuration(path):
    (application,) = serve_config(path)["applications"]
    settings = parse(ServeSpec, application["args"])
    built = app.build(settings)
    assert built._bound_deployment.name == "Gateway"
    for index in settings.indexes.values():
        assert index.num_shards == (8 if path.stem == "sharded" else 1)


def test_what_ray_hands_to_the_builder():
    """A mapping, of a YAML file or of a command line: `serve run ...:build indexes.i.uri=...`."""
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as built

    for given in ({"indexes": {"i": {"uri": "x"}}}, {"indexes.i.uri": "x", "limits.max_k": "7"}):
        assert built(app.build, given)._bound_deployment.name == "Gateway"
    with pytest.raises(SpecError, match="indexes.i.num_shards"):
        built(app.build, {"indexes.i.uri": "x", "indexes.i.num_shards": "no"})
    with pytest.raises(SpecError, match="evaluations.folder"):
        built(app.build, {"indexes.i.uri": "x", "evaluations.folder": "s3://b/x"})


def test_panels_of_the_dashboard():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        own = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not own & cells, panel["title"]
        cells |= own
        for target in panel.get("targets", []):
            assert target["expr"].count("(") == target["expr"].count(")")


def test_metrics_of_ray_in_the_dashboard():
    """They are what this version of Ray exports."""
    import ray

    files = "serve/_private/**/*.py", "dashboard/modules/reporter/**/*.py"
    folder = Path(ray.__file__).parent
    source = "".join(path.read_text() for pattern in files for path in folder.glob(pattern))
    there = set(re.findall(r'"((?:serve|node)_\w+)"', source))
    expressions = " ".join(
        t["expr"] for panel in DASHBOARD["panels"] for t in panel.get("targets", [])
    )
    used = set(re.findall(r"ray_((?:serve|node)_\w+)", expressions))
    assert {re.sub("_(total|bucket|sum|count)$", "", name) for name in used} <= there


def test_metrics_of_the_dashboard():
    """Those of ours are the ones that the gateway and the stages have."""
    source = (ROOT / "pipeline/serve/metrics.py").read_text()
    ours = set(re.findall(r'"(maxray_\w+)"', source))
    expressions = [t["expr"] for panel in DASHBOARD["panels"] for t in panel.get("targets", [])]
    used = set(re.findall(r"ray_(maxray_\w+)", " ".join(expressions)))
    assert {re.sub("_(total|bucket|sum|count)$", "", name) for name in used} == ours
