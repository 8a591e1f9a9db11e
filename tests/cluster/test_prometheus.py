"""Tests of the alert rules: their metrics exist, their expressions fire, and all have a runbook."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import ray
import yaml

from pipeline.serve.routes import api
from tests.cluster.test_grafana import SUFFIX
from tests.conftest import ROOT

PATH = ROOT / "cluster/prometheus/alerts.yaml"
RULES = [rule for group in yaml.safe_load(PATH.read_text())["groups"] for rule in group["rules"]]
PROMTOOL = shutil.which("promtool")


def source(*patterns: str) -> str:
    """Returns the text of files of Ray and of Maxray."""
    folders = (Path(ray.__file__).parent, ROOT)
    return "".join(
        path.read_text()
        for folder in folders
        for pattern in patterns
        for path in folder.glob(pattern)
    )


def test_metrics_exist():
    text = source(
        "pipeline/index/metrics.py",
        "pipeline/serve/metrics.py",
        "serve/_private/*.py",
        "dashboard/modules/reporter/*.py",
    )
    exported = set(re.findall(r'"((?:maxray|serve|node|cluster)_\w+)"', text))
    for rule in RULES:
        for name in re.findall(r"ray_(\w+)", rule["expr"]):
            assert name in exported or SUFFIX.sub("", name) in exported, name


def test_labels_have_values_that_the_code_sets():
    code = source("pipeline/serve/*.py", "pipeline/index/*.py")
    for rule in RULES:
        for name, value in re.findall(r'(event|count|route)="([\w/]+)"', rule["expr"]):
            if name == "route":
                assert value in {route.path for route in api.routes}
            elif name == "event":
                assert f'_count("{value}"' in code, value
            else:
                assert re.search(rf"\b{value}=", code), value


def test_every_alert_has_a_runbook_and_a_severity():
    text = (ROOT / "docs/tutorials/operations.md").read_text()
    runbooks = re.findall(r"^### (\w+)$", text.partition("## Runbooks")[2], re.MULTILINE)
    assert runbooks == [rule["alert"] for rule in RULES]
    assert {rule["labels"]["severity"] for rule in RULES} == {"critical", "warning"}
    assert all(rule["annotations"].keys() == {"summary"} for rule in RULES)


#: Series with which an alert, and no other, fires within an hour.
SERIES = {
    "MaxrayErrors": {
        'ray_maxray_requests_total{status="200"}': "0+100x60",
        'ray_maxray_requests_total{status="500"}': "0+2x60",
    },
    "MaxrayOverload": {
        'ray_maxray_requests_total{status="200"}': "0+100x60",
        'ray_maxray_requests_total{status="503"}': "0+2x60",
    },
    "MaxraySlowSearch": {
        'ray_maxray_request_seconds_bucket{route="/v1/search",le="2.5"}': "0+1x60",
        'ray_maxray_request_seconds_bucket{route="/v1/search",le="5"}': "0+9x60",
        'ray_maxray_request_seconds_bucket{route="/v1/search",le="+Inf"}': "0+9x60",
    },
    "MaxrayReloadFailed": {'ray_maxray_events_total{event="reload_failed"}': "0x55 1x5"},
    "MaxrayDegraded": {'ray_maxray_events_total{event="degraded"}': "0x55 1x5"},
    "MaxrayNoReplica": {
        'ray_serve_deployment_replica_healthy{application="a",deployment="d"}': "0x60"
    },
    "MaxrayReplicaRestarts": {
        'ray_serve_deployment_replica_starts_total{deployment="d"}': "0+1x60"
    },
    "MaxrayJobStalled": {'ray_maxray_job_done{kind="index",index="i",unit="items"}': "7x60"},
    "MaxrayRejects": {
        'ray_maxray_job_count{kind="index",index="i",count="rejected"}': "200x60",
        'ray_maxray_job_count{kind="index",index="i",count="committed"}': "1000x60",
    },
    "MaxraySlowCommits": {
        'ray_maxray_commit_seconds_bucket{le="10"}': "0+1x60",
        'ray_maxray_commit_seconds_bucket{le="30"}': "0+9x60",
        'ray_maxray_commit_seconds_bucket{le="+Inf"}': "0+9x60",
    },
    "RayDiskFull": {
        'ray_node_disk_free{instance="n"}': "5x60",
        'ray_node_disk_usage{instance="n"}': "95x60",
    },
    "RayMemoryLow": {
        'ray_node_mem_used{instance="n"}': "95x60",
        'ray_node_mem_total{instance="n"}': "100x60",
    },
    "RayNodesFailed": {"ray_cluster_failed_nodes": "1x60"},
    "RayNodesPending": {"ray_cluster_pending_nodes": "1x60"},
}


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_alerts_fire(tmp_path):
    """Runs Prometheus' own unit tests of rules, where they are installed."""
    assert SERIES.keys() == {rule["alert"] for rule in RULES}
    tests = []
    for name, series in SERIES.items():
        fires = {"expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}})'}
        others = {"expr": f'count(ALERTS{{alertname!="{name}"}})', "eval_time": "60m"}
        sample = {"labels": "{}", "value": 1}
        tests.append(
            {
                "name": name,
                "interval": "1m",
                "input_series": [{"series": s, "values": v} for s, v in series.items()],
                "promql_expr_test": [
                    {**fires, "eval_time": "60m", "exp_samples": [sample]},
                    {**others, "exp_samples": []},
                ],
            }
        )
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(PATH)], "tests": tests}))
    done = subprocess.run(
        [str(PROMTOOL), "test", "rules", str(file)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
