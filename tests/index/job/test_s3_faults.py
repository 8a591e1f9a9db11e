"""Tests of jobs on an object store that is slow, throttles, fails and loses responses."""

from __future__ import annotations

import json

import pytest
import s3fs
import yaml

from pipeline.index import EXECUTOR
from tests import s3
from tests.chaos.compare import accounting, contents, differences, orphaned_leases
from tests.conftest import run_jobs
from tests.tiny import SLEEPING

IDS = [f"item{number}" for number in range(60)]
#: Faults of one request in eight.
FAULTS = {"seconds": 0.02, "throttled": 0.05, "failed": 0.02, "refused": 0.03, "lost": 0.03}


@pytest.fixture
def storage(monkeypatch):
    """Starts a server with an empty bucket, and yields its faults and environment variables."""
    faults = s3.Faults(**FAULTS)
    with s3.moto_server() as url, s3.disturbed(url, faults) as proxy:
        s3.create_bucket(url, "bucket")
        environment = s3.environment(proxy)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        yield faults, environment
        s3fs.S3FileSystem.clear_instance_cache()


def commands(uri: str, folder) -> list[list[str]]:
    """Returns jobs that build, extend and maintain an index at a URI."""
    spec = {
        "index": uri,
        "source": {"name": "text", "path": str(folder / "corpus.jsonl")},
        "encoder": {
            "class": SLEEPING,
            "seconds": 0,
            "num_tokens": 8,
            "dim": 32,
        },
        "representations": [
            {"compressor": "none"},
            {
                "compressor": {"name": "random", "num_vectors": 4},
                "codec": {"name": "residual", "num_centroids": 16},
            },
        ],
        "fragment_items": 6,
        "unit_items": 3,
    }
    more = {"compressor": {"name": "hpool", "num_vectors": 2}}
    (folder / "index.yaml").write_text(yaml.safe_dump(spec))
    (folder / "more.yaml").write_text(yaml.safe_dump({"index": uri, "representations": [more]}))
    generator = ["ivf", "representation=full"]
    return [
        ["index", str(folder / "index.yaml")],
        ["index", str(folder / "index.yaml")],
        ["add", "representations", str(folder / "more.yaml")],
        ["add", "candidates", uri, *generator],
        ["maintain", uri, "--retain-hours", "0"],
        ["status", uri],
    ]


@pytest.mark.heavy
def test_faults_change_nothing(storage, tmp_path):
    faults, environment = storage
    lines = [json.dumps({"_id": i, "text": f"the text of {i}"}) for i in IDS]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    local, remote = str(tmp_path / "index"), "s3://bucket/index"
    done = run_jobs(*commands(local, tmp_path), **{EXECUTOR: "ray"})
    assert done.returncode == 0, done.stderr
    disturbed = run_jobs(*commands(remote, tmp_path), **{**environment, EXECUTOR: "ray"})
    assert disturbed.returncode == 0, disturbed.stderr
    assert min(faults.counts[kind] for kind in ("throttled", "failed", "refused", "lost")) >= 5
    assert faults.counts["requests"] > 500

    assert not differences(contents(remote), contents(local)).sentences()
    assert not accounting(remote, IDS).sentences()
    assert not orphaned_leases(remote)

    secret, files = environment["AWS_SECRET_ACCESS_KEY"], s3fs.S3FileSystem()
    assert secret not in disturbed.stdout + disturbed.stderr
    objects = files.find("bucket")
    assert len(objects) > 10
    assert not [name for name in objects if secret.encode() in files.cat_file(name)]
