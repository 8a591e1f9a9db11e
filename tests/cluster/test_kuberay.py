"""Tests of the manifests for KubeRay: fields, rules of its operator, versions and commands."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement

from docs.extensions.parsers import PROFILES, SPECS, parser
from pipeline import config
from pipeline.runtime.tracing import ENDPOINT_VARIABLES
from pipeline.search.candidates_job import CandidatesJobSpec
from pipeline.serve.environment import TRACING_ENV
from pipeline.serve.routes import public
from pipeline.serve.settings import Scale, ServeSpec
from tests.cluster import manifests
from tests.conftest import ROOT
from tests.documentation import blocks, commands

CLUSTERS = manifests.ray_clusters()
JOBS = manifests.jobs()
DOCUMENTS = {
    f"{path.stem}-{document['kind']}-{document['metadata']['name']}": document
    for path in manifests.FILES
    for document in manifests.documents(path)
}


def job_commands(entrypoint: str) -> list[list[str]]:
    """Returns the commands of an entrypoint, which may be the script of a `bash -ec`."""
    words = shlex.split(entrypoint)
    return list(commands(words[2] if words[:2] == ["bash", "-ec"] else entrypoint))


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS)
def test_fields_are_those_of_the_api(document):
    assert manifests.errors(document) == []


def test_wrong_fields_are_found():
    job = {"entrypoint": 1, "entryPoint": "a", "backoffLimit": "3", "suspend": 1}
    job |= {"rayClusterSpec": {"headGroupSpec": {"template": {"spec": {}}}}}
    document = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {}, "spec": job}
    assert manifests.errors(document) == [
        "spec.entrypoint: 1 is not of type string",
        "spec.entryPoint is unknown",
        "spec.backoffLimit: '3' is not of type integer",
        "spec.suspend: 1 is not of type boolean",
        "spec.rayClusterSpec.headGroupSpec.template.spec.containers is missing",
    ]
    document = {"apiVersion": "ray.io/v1alpha1", "kind": "RayService", "metadata": {}, "spec": []}
    assert manifests.errors(document) == [
        "apiVersion ray.io/v1alpha1",
        "spec: [] is not a mapping",
    ]


def test_all_kinds_of_jobs_have_a_manifest():
    verbs = {words[2] for job in JOBS.values() for words in job_commands(job["entrypoint"])}
    assert verbs == {f"jobs.{name}" for name in ("index", "add", "train", "evaluate", "maintain")}


@pytest.mark.parametrize("name", JOBS)
def test_entrypoints_are_valid_commands(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    for python, option, module, *arguments in job_commands(JOBS[name]["entrypoint"]):
        assert (python, option) == ("python", "-m")
        command = (module.removeprefix("jobs."),)
        if command == ("add",):
            command = ("add", arguments.pop(0))
        verb = " ".join(command)
        parsed = vars(parser(command).parse_intermixed_args(arguments))
        if verb in SPECS and "spec" in parsed:
            config.load(SPECS[verb], parsed["spec"], parsed["overrides"])
        if verb == "add candidates":
            fields = {"index": parsed["index"], "generator": {"name": parsed["generator"]}}
            config.parse(CandidatesJobSpec, config.override(fields, parsed["overrides"]))
        if parsed.get("resources"):
            profile = config.load(PROFILES[verb], parsed["resources"], role="resources")
            check_profile_fits(profile, name)


def check_profile_fits(profile, name: str) -> None:
    """Checks that an actor of each pool fits on a worker, and the GPUs of a training run."""
    cluster = CLUSTERS.get(name, CLUSTERS["raycluster-RayCluster"])
    (group,) = cluster["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    gpus, cpus = float(limits.get("nvidia.com/gpu", 0)), float(limits["cpu"])
    pools = profile.pools.values() if hasattr(profile, "pools") else [profile]
    for pool in pools:
        assert pool.num_cpus <= cpus and pool.num_gpus <= gpus
    if hasattr(profile, "num_workers"):
        assert profile.num_workers * profile.num_gpus <= gpus * group["maxReplicas"]
    else:
        assert profile.autoscaling  # the workers do not exist when the job starts


@pytest.mark.parametrize("name", JOBS)
def test_rules_of_jobs(name):
    """The rules that the operator checks and the schema does not have."""
    job = JOBS[name]
    assert ("clusterSelector" in job) != ("rayClusterSpec" in job)
    if "clusterSelector" in job:
        assert job["clusterSelector"]["ray.io/cluster"] in {
            document["metadata"]["name"] for document in manifests.objects("RayCluster").values()
        }
        assert not job.keys() & {"backoffLimit", "suspend", "ttlSecondsAfterFinished"}
    else:
        assert job["shutdownAfterJobFinishes"]
    # The submitter passes the entrypoint to a shell and a second shell runs it.
    script = job["entrypoint"]
    assert not set("$`\\'") & set(script)
    if set(";&|<>*?[]{}()") & set(script):
        assert script.startswith('bash -ec "') and script.endswith('"') and script.count('"') == 2


@pytest.mark.parametrize("name", CLUSTERS)
def test_rules_of_clusters(name):
    cluster = CLUSTERS[name]
    head, *workers = manifests.pods(cluster)
    assert cluster["enableInTreeAutoscaling"] and cluster["autoscalerOptions"]["version"] == "v2"
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    assert cluster["authOptions"] == {"mode": "token"}
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for pod in (head, *workers):
        assert pod["restartPolicy"] == "Never"  # a rule of the autoscaler
        assert pod["securityContext"]["runAsNonRoot"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["resources"]["limits"] == container["resources"]["requests"]
    # The head's autoscaler uses the API of Kubernetes, workers do not.
    assert not any(pod["automountServiceAccountToken"] for pod in workers)


@pytest.mark.parametrize("name", CLUSTERS)
def test_containers_take_optional_variables_of_traces(name):
    """The driver of a job runs on the head or, with `entrypointNumCpus`, on a worker."""
    source = {"name": "maxray-tracing", "optional": True}
    for pod in manifests.pods(CLUSTERS[name]):
        for container in pod["containers"]:
            assert container["envFrom"] == [{"configMapRef": source}, {"secretRef": source}]


def test_documented_commands_edit_the_manifests(tmp_path):
    """They set the registry of all images and the class of all volumes."""
    for path in manifests.FILES:
        (tmp_path / path.name).write_text(path.read_text())
    for block in blocks(ROOT / "cluster/README.md"):
        for words in commands(block.text):
            if words[:2] == ["sed", "-i"]:
                names = [word.removeprefix("cluster/kuberay/") for word in words[3:]]
                files = [path for name in names for path in tmp_path.glob(name)]
                subprocess.run([*words[:3], *files], check=True)
    texts = [path.read_text() for path in tmp_path.iterdir()]
    images = [image for text in texts for image in re.findall(r"image: (.*)", text)]
    assert {image.split(":")[0] for image in images} == {"REGISTRY/maxray", "redis"}
    claims = yaml.safe_load_all((tmp_path / "storage.yaml").read_text())
    assert [claim["spec"]["storageClassName"] for claim in claims] == ["CLASS", "CLASS"]
    assert "/specs/my.yaml" in (tmp_path / "index-cpu-job.yaml").read_text()


def test_scrape_configuration_finds_the_nodes():
    """By the label that the operator sets, on the port that the network policy opens."""
    (job,) = yaml.safe_load((ROOT / "cluster/prometheus/scrape.yaml").read_text())["scrape_configs"]
    policy = yaml.safe_load_all((manifests.FOLDER / "network-policy.yaml").read_text())
    (label,) = next(policy)["spec"]["podSelector"]["matchLabels"]
    labels = {rule["source_labels"][0] for rule in job["relabel_configs"] if "action" in rule}
    assert labels == {
        f"__meta_kubernetes_pod_label_{re.sub('[./-]', '_', label)}",
        "__meta_kubernetes_pod_container_port_name",
    }


def test_documented_config_map_contains_the_variables_of_traces():
    (command,) = (
        words
        for block in blocks(ROOT / "cluster/README.md")
        for words in commands(block.text)
        if words[:4] == ["kubectl", "create", "configmap", "maxray-tracing"]
    )
    assert command[3] == "maxray-tracing"
    literals = dict(word.removeprefix("--from-literal=").split("=", 1) for word in command[4:])
    assert TRACING_ENV.items() <= literals.items()
    assert literals.keys() - TRACING_ENV.keys() <= set(ENDPOINT_VARIABLES)


def test_versions_are_those_of_the_package():
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    (ray_version,) = (package["version"] for package in packages if package["name"] == "ray")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (requirement,) = map(Requirement, project["optional-dependencies"]["ray"])
    assert ray_version in requirement.specifier
    assert {cluster["rayVersion"] for cluster in CLUSTERS.values()} == {ray_version}
    texts = {path: path.read_text() for path in (ROOT / "cluster").rglob("*.*") if path.is_file()}
    for path, text in texts.items():
        for version in re.findall(r"(?:RAY_VERSION=|rayproject/ray:)(\d[\d.]*)", text):
            assert version == ray_version, path


def test_service_restarts_after_the_loss_of_its_head():
    spec = DOCUMENTS["rayservice-RayService-maxray"]["spec"]
    options = spec["rayClusterConfig"]["gcsFaultToleranceOptions"]
    host, port = options["redisAddress"].split(":")
    redis = DOCUMENTS["redis-Service-maxray-redis"]
    assert host == redis["metadata"]["name"]
    assert int(port) == redis["spec"]["ports"][0]["port"]
    secret = options["redisPassword"]["valueFrom"]["secretKeyRef"]
    pod = DOCUMENTS["redis-StatefulSet-maxray-redis"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["env"][0]["valueFrom"]["secretKeyRef"] == secret


def test_service_probes_keys_and_disruption_budget():
    spec = DOCUMENTS["rayservice-RayService-maxray"]["spec"]
    settings = yaml.safe_load(spec["serveConfigV2"])
    (application,) = settings["applications"]
    (worker,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    probe = container["readinessProbe"]["httpGet"]
    assert probe["path"] in {route.path for route in public.routes}
    (port,) = (p["containerPort"] for p in container["ports"] if p["name"] == probe["port"])
    assert port == settings["http_options"]["port"]
    folder = application["args"]["keys"].rpartition("/")[0]
    (name,) = (m["name"] for m in container["volumeMounts"] if m["mountPath"] == folder)
    (volume,) = (v for v in pod["volumes"] if v["name"] == name)
    assert volume["secret"]["secretName"] == "maxray-keys"

    budget = DOCUMENTS["rayservice-PodDisruptionBudget-maxray-search"]["spec"]
    assert budget["selector"]["matchLabels"] == {"ray.io/group": worker["groupName"]}
    assert budget["maxUnavailable"] < worker["minReplicas"]
    timeouts = config.parse(ServeSpec, application["args"]).timeouts
    assert pod["terminationGracePeriodSeconds"] > timeouts.drain_s


def test_replicas_of_the_service_fit_on_its_smallest_cluster():
    spec = DOCUMENTS["rayservice-RayService-maxray"]["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    settings = config.parse(ServeSpec, application["args"])
    scales = [
        value
        for name in ServeSpec.model_fields
        if isinstance(value := getattr(settings, name), Scale) and name != "rerank_models"
    ]
    (group,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    smallest, largest = (int(limits["cpu"]) * group[f"{m}Replicas"] for m in ("min", "max"))
    assert sum(scale.num_cpus * scale.num_replicas for scale in scales) <= smallest
    most = [scale.num_cpus * scale.max_num_replicas for scale in scales]
    assert sum(most) <= largest


def test_network_policy_opens_the_server_only():
    policy = DOCUMENTS["network-policy-NetworkPolicy-maxray-ray"]["spec"]
    everything, *limited = policy["ingress"]
    assert "ports" not in everything  # only between nodes of Ray
    assert everything["from"] == [{"podSelector": {"matchLabels": {"ray.io/is-ray-node": "yes"}}}]
    assert all(rule["from"] and rule["ports"] for rule in limited)
    open_ports = {port["port"] for rule in limited for port in rule["ports"]}
    assert open_ports == {8000, 8080, 8265, 52365}  # neither the GCS nor Ray Client


def test_ingress_terminates_tls():
    spec = DOCUMENTS["ingress-Ingress-maxray"]["spec"]
    assert [rule["host"] for rule in spec["rules"]] == spec["tls"][0]["hosts"]
    (path,) = spec["rules"][0]["http"]["paths"]
    service = DOCUMENTS["rayservice-RayService-maxray"]["metadata"]["name"]
    assert path["backend"]["service"]["name"] == f"{service}-serve-svc"


def test_claims_and_secrets_are_documented():
    """Every volume and secret that a manifest uses is created by a manifest or its comment."""
    claims = {
        document["metadata"]["name"]
        for document in manifests.documents(manifests.FOLDER / "storage.yaml")
    }
    text = "".join(path.read_text() for path in manifests.FILES)
    assert set(re.findall(r"claimName: ([\w-]+)", text)) <= claims
    secrets = set(re.findall(r"secretName: ([\w-]+)|secretKeyRef: \{name: ([\w-]+)", text))
    for name in {a or b for a, b in secrets} - {"maxray-tls"}:
        assert f"kubectl create secret generic {name} " in text
    kinds = {d["kind"] for path in manifests.FILES for d in manifests.documents(path)}
    assert "Secret" not in kinds  # the values of secrets are not in files
