"""Test of a job on an object store that its machine cannot reach until another job has taken over.

It requires root and `ip` (iproute2).
"""

from __future__ import annotations

import json

import pytest
import s3fs
import yaml

from pipeline.config import SpecError
from pipeline.index.reader import IndexReader
from pipeline.index.session import LEASE_VARIABLE
from tests import s3
from tests.chaos.compare import accounting, contents, differences, orphaned_leases
from tests.chaos.processes import wait_until
from tests.conftest import start_job
from tests.tiny import SLEEPING

IDS = [f"item{number}" for number in range(60)]
LEASE_SECONDS = 5.0


def num_items(uri: str) -> int:
    """Returns the number of items in an index, or 0 if it does not exist."""
    try:
        return IndexReader(uri).dataset.count_rows()
    except SpecError:
        return 0


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_superseded_job_does_not_commit_when_it_reaches_the_storage_again(
    network, tmp_path, monkeypatch
):
    lines = [json.dumps({"_id": i, "text": f"the text of {i}"}) for i in IDS]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    spec = {
        "index": "unset",
        "source": {"name": "text", "path": str(tmp_path / "corpus.jsonl")},
        "encoder": {
            "class": SLEEPING,
            "seconds": 0.5,
            "num_tokens": 8,
            "dim": 32,
        },
        "representations": [{"compressor": "none"}],
        "unit_items": 1,
        "fragment_items": 2,
        "commit_items": 4,
    }
    (tmp_path / "index.yaml").write_text(yaml.safe_dump(spec))
    local, remote = str(tmp_path / "index"), "s3://bucket/index"
    command = ["jobs.index", str(tmp_path / "index.yaml")]
    undisturbed = start_job(*command, f"index={local}")
    _, error = undisturbed.communicate(timeout=300)
    assert undisturbed.returncode == 0, error

    with s3.moto_server(network.port.address) as url:
        s3.create_bucket(url, "bucket")
        environment = {**s3.environment(url), LEASE_VARIABLE: str(LEASE_SECONDS)}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        node = network.add()
        superseded = start_job(*command, f"index={remote}", port=node)
        assert wait_until(lambda: num_items(remote) > 0, 120, 0.5)
        node.disconnect()
        before = num_items(remote)
        assert 0 < before < len(IDS)
        second = start_job(*command, f"index={remote}")
        _, error = second.communicate(timeout=300)
        if second.returncode:  # the lease had not expired yet
            assert "lease" in error
            second = start_job(*command, f"index={remote}")
            _, error = second.communicate(timeout=300)
        assert second.returncode == 0, error
        version = IndexReader(remote).version
        assert superseded.poll() is None

        node.connect()
        _, error = superseded.communicate(timeout=300)
        assert superseded.returncode == 1 and "lease" in error, error
        assert IndexReader(remote).version == version
        assert not differences(contents(remote), contents(local)).sentences()
        assert not accounting(remote, IDS).sentences()
        assert not orphaned_leases(remote)
        s3fs.S3FileSystem.clear_instance_cache()
