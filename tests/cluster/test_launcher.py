"""Tests of the configuration of Ray's cluster launcher."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import jsonschema
import ray
import yaml

from tests.conftest import ROOT
from tests.test_documentation import check_command


def test_launcher_configuration_is_valid():
    path = ROOT / "cluster/launcher/aws.yaml"
    data = yaml.safe_load(path.read_text())
    schema = json.loads((Path(ray.__file__).parent / "autoscaler/ray-schema.json").read_text())
    jsonschema.validate(data, schema)
    assert data["head_node_type"] in data["available_node_types"]
    most = [node.get("max_workers", 0) for node in data["available_node_types"].values()]
    assert sum(most) <= data["max_workers"]
    assert "--env RAY_AUTH_MODE=token" in data["docker"]["run_options"]
    for command in data["head_start_ray_commands"] + data["worker_start_ray_commands"]:
        for words in map(shlex.split, command.split("&&")):
            assert words[0] in ("cd", "ray")
    comment = path.read_text().partition("\ncluster_name")[0].replace("# ", "")
    (submit,) = (line for line in comment.replace("\\\n", "").split("\n") if "submit" in line)
    check_command(shlex.split(submit)[1:], {})
