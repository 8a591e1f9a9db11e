"""Tests of the Grafana dashboards."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.data._internal.execution.interfaces.op_runtime_metrics import OpRuntimeMetrics

from tests.conftest import ROOT

#: Dashboards, and the modules whose metrics they show.
DASHBOARDS = {
    "indexing": "pipeline/index/metrics.py",
    "serving": "pipeline/serve/metrics.py",
}
#: Suffixes that Prometheus adds to the names of counters and histograms.
SUFFIX = re.compile("_(total|bucket|sum|count)$")


@pytest.fixture(params=DASHBOARDS)
def name(request) -> str:
    return request.param


@pytest.fixture
def dashboard(name) -> dict[str, Any]:
    return json.loads((ROOT / f"cluster/grafana/{name}.json").read_text())


def expressions(dashboard: dict[str, Any]) -> str:
    """Returns all queries of a dashboard."""
    targets = [t for panel in dashboard["panels"] for t in panel.get("targets", [])]
    variables = [variable["query"] for variable in dashboard["templating"]["list"]]
    return " ".join([*(target["expr"] for target in targets), *variables])


def test_every_dashboard_is_tested():
    assert {path.stem for path in (ROOT / "cluster/grafana").glob("*.json")} == set(DASHBOARDS)


def test_panels_do_not_overlap(dashboard):
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    used = set()
    for panel in panels:
        box = panel["gridPos"]
        assert box["x"] + box["w"] <= 24
        area = {
            (x, y)
            for x in range(box["x"], box["x"] + box["w"])
            for y in range(box["y"], box["y"] + box["h"])
        }
        assert not area & used, panel["title"]
        used |= area
        for target in panel.get("targets", []):
            assert target["expr"].count("(") == target["expr"].count(")")


def test_metrics_of_ray_exist(dashboard):
    folder = Path(ray.__file__).parent
    files = (
        "serve/_private/**/*.py",
        "dashboard/modules/reporter/**/*.py",
        "data/_internal/stats.py",
    )
    source = "".join(path.read_text() for pattern in files for path in folder.glob(pattern))
    exported = set(re.findall(r'"((?:serve|node|data)_\w+)"', source))
    exported |= {f"data_{metric.name}" for metric in OpRuntimeMetrics.get_metrics()}
    used = set(re.findall(r"ray_((?:serve|node|data)_\w+)", expressions(dashboard)))
    assert {SUFFIX.sub("", name) for name in used} <= exported


def test_all_metrics_of_maxray_are_shown(name, dashboard):
    exported = set(re.findall(r'"(maxray_\w+)"', (ROOT / DASHBOARDS[name]).read_text()))
    used = set(re.findall(r"ray_(maxray_\w+)", expressions(dashboard)))
    assert {name if name in exported else SUFFIX.sub("", name) for name in used} == exported
